//! Where the bytes of every expert are: the index of a model's GGUF headers.
//!
//! Reads headers only, never tensor data.

mod gguf;
mod reader;
mod types;

use std::path::PathBuf;

pub use gguf::{Header, Tensor, Value};
pub use types::GgmlType;

/// Which of an expert's matrices a tensor holds, in the order of use within a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// `ffn_up_exps`
    Up,
    /// `ffn_gate_exps`
    Gate,
    /// `ffn_gate_up_exps`: both in one tensor
    GateUp,
    /// `ffn_down_exps`
    Down,
}

/// One GGUF tensor that holds one matrix of every expert of a layer (`ne[2]` experts).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTensor {
    /// Its GGUF name, for example `blk.3.ffn_up_exps.weight`.
    pub name: String,
    /// The layer (`blk.N`).
    pub layer: u32,
    /// Experts of one layer and one group are routed together. 0: `_exps`, 1: `_chexps` (a second set of experts
    /// of the same layer, as in GroveMoE).
    pub group: u32,
    /// Which matrix.
    pub part: Part,
    /// Its type.
    pub ty: GgmlType,
    /// Columns, rows, experts, 1.
    pub ne: [u64; 4],
    /// Index into [`Index::files`].
    pub file: u32,
    /// Where expert 0 begins, in bytes from the start of the file.
    pub offset: u64,
    /// Bytes of one expert's matrix; expert `e` begins at `offset + e * expert_bytes`.
    pub expert_bytes: u64,
}

impl ExpertTensor {
    /// How many experts the tensor holds.
    pub fn n_expert(&self) -> u32 {
        u32::try_from(self.ne[2]).unwrap_or(u32::MAX)
    }
}

/// One file of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// Its path.
    pub path: PathBuf,
    /// Its size when the index was made, in bytes.
    pub size: u64,
}

/// Everything the streamer must know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// `general.architecture`.
    pub arch: String,
    /// `general.name`, or empty.
    pub name: String,
    /// The shards, in their order.
    pub files: Vec<ModelFile>,
    /// The tensors of routed experts, ordered by layer, then group, then part. Empty for a dense model.
    pub tensors: Vec<ExpertTensor>,
    /// Experts used per token, the largest of all layers (`{arch}.expert_used_count`); 0 for a dense model.
    pub n_expert_used: u32,
    /// Bytes of all other tensors.
    pub dense_bytes: u64,
}
