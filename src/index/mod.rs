//! Where the bytes of every expert are: the index of a model's GGUF headers.
//!
//! Reads headers only, and the tables of packed files: never weights.

mod gguf;
mod packed;
mod reader;
mod router;
mod shards;
mod types;

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use gguf::{Header, Tensor, Value};
pub use packed::{
    CHECKS, CHECKS_MAGIC, CHECKS_MODEL, PART_ALIGN, PREFIX, PackedLayer, PackedPart, Row, Table, VERSION, is_own,
    is_packed_name, layer_name,
};
pub use router::{Gating, Place, RouterPlaces, Rule};
pub use types::GgmlType;

use crate::error::Result;

/// llama.cpp's bounds (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS): it loads no model that has more.
const MAX_LAYERS: u32 = 512;
const MAX_EXPERTS: u64 = 1024;

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

impl Part {
    /// All parts, in their order.
    pub const ALL: [Self; 4] = [Self::Up, Self::Gate, Self::GateUp, Self::Down];

    /// Its name in tensor names: "up", "gate", "gate_up", "down".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Gate => "gate",
            Self::GateUp => "gate_up",
            Self::Down => "down",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
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
    /// The type that it has for llama.cpp; see [`ExpertTensor::type_of`].
    pub ty: GgmlType,
    /// Columns, rows, experts, 1.
    pub ne: [u64; 4],
    /// Index into [`Index::files`].
    pub file: u32,
    /// Where expert 0 begins, in bytes from the start of the file.
    pub offset: u64,
    /// Bytes of one expert's matrix of this type; see [`ExpertTensor::bytes_of`] and [`ExpertTensor::offset_of`].
    pub expert_bytes: u64,
    /// In a packed file: where each expert begins, and its checksum. `None`: they follow each other.
    pub packed: Option<Arc<[Row]>>,
}

impl ExpertTensor {
    /// The expert tensor that `tensor` of file `file` is. `None` when it is not one of those that stream.
    fn new(tensor: &Tensor, file: u32, header: &Header) -> Result<Option<Self>> {
        let Some((layer, group, part)) = parse_name(&tensor.name) else {
            return Ok(None);
        };
        let [_, _, n_expert, rest] = tensor.ne;
        let wrong = if tensor.bytes == 0 || rest != 1 {
            let why = "are not those of experts (columns, rows, experts); convert the model again";
            Some(format!("dimensions {:?} {why}", tensor.ne))
        } else if n_expert > MAX_EXPERTS {
            Some(format!(
                "it has {n_expert} experts, where llama.cpp takes up to {MAX_EXPERTS}; give a model that it loads"
            ))
        } else if layer >= MAX_LAYERS {
            Some(format!(
                "it is of layer {layer}, where llama.cpp takes up to {MAX_LAYERS} layers; give a model that it loads"
            ))
        } else {
            None
        };
        if let Some(why) = wrong {
            return Err(header.fail(tensor.offset, format!("tensor {:?}: {why}", tensor.name)));
        }
        Ok(Some(Self {
            name: tensor.name.clone(),
            layer,
            group,
            part,
            ty: tensor.ty,
            ne: tensor.ne,
            file,
            offset: tensor.offset,
            expert_bytes: tensor.bytes / n_expert,
            packed: None,
        }))
    }

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
    /// The routers that were found, ordered by layer.
    pub routers: Vec<RouterPlaces>,
    /// How they select.
    pub rule: Rule,
}

impl Index {
    /// The name of the model's first file.
    pub fn model_name(&self) -> String {
        let name = self.files.first().and_then(|file| file.path.file_name()).unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Indexes a model from the path of its file, or of any of its shards: the others are found by the naming
    /// `NAME-00001-of-000NN.gguf`.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when a file cannot be read (it names the shard that is missing),
    /// [`Error::Format`](crate::Error::Format) when the files are not a model in GGUF.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_headers(shards::open(path.as_ref())?)
    }

    /// Indexes a model from the paths of all its shards, named anyhow and in any order.
    ///
    /// # Errors
    /// As [`Index::open`].
    pub fn open_shards(paths: &[PathBuf]) -> Result<Self> {
        Self::from_headers(paths.iter().map(|path| Header::open(path)).collect::<Result<_>>()?)
    }

    /// Indexes a model from the headers of all its files, in any order.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) when they do not belong together, or are not those of a model.
    pub fn from_headers(headers: Vec<Header>) -> Result<Self> {
        let headers = shards::in_order(headers)?;
        let Some(first) = headers.first() else {
            return Err(crate::Error::Invalid("a model has at least one file".to_owned()));
        };
        let Some(arch) = first.text("general.architecture") else {
            return Err(first.fail(0, "general.architecture is missing; give the file of a language model"));
        };

        let mut names = HashSet::new();
        let mut tensors = Vec::new();
        let mut dense_bytes = 0_u64;
        for (file, header) in (0..).zip(&headers) {
            let mut once = |name: &str, offset| {
                let why = || format!("tensor {name:?} is in another place, too; split or pack the model again");
                names.insert(name.to_owned()).then_some(()).ok_or_else(|| header.fail(offset, why()))
            };
            let mut packed = header.packed.iter().peekable();
            for (i, tensor) in header.tensors.iter().enumerate() {
                once(&tensor.name, tensor.offset)?;
                if let Some(layer) = packed.next_if(|layer| layer.tensor == i) {
                    for expert in layer.expand(file, tensor) {
                        once(&expert.name, expert.offset)?;
                        tensors.push(expert);
                    }
                    continue;
                }
                match ExpertTensor::new(tensor, file, header)? {
                    Some(expert) => tensors.push(expert),
                    None if is_own(&tensor.name) => {}
                    None => dense_bytes = dense_bytes.saturating_add(tensor.bytes),
                }
            }
        }
        tensors.sort_by_key(|t| (t.layer, t.group, t.part));

        let used = format!("{arch}.expert_used_count");
        let n_expert_used = match first.uint(&used) {
            _ if tensors.is_empty() => 0,
            Some(n) if n > 0 => n,
            _ => {
                return Err(first.fail(0, format!("there are experts, but no {used:?}; convert the model again")));
            }
        };
        let all = (0..).zip(&headers).flat_map(|(file, header)| header.tensors.iter().map(move |t| (file, t)));
        let routers = if tensors.is_empty() { Vec::new() } else { router::find(all) };
        let rule = Rule::new(first, arch, routers.iter().any(|r| r.selection_bias.is_some()));
        Ok(Self {
            routers,
            rule,
            arch: arch.to_owned(),
            name: first.text("general.name").unwrap_or_default().to_owned(),
            files: headers.iter().map(|header| header.file.clone()).collect(),
            tensors,
            n_expert_used,
            dense_bytes,
        })
    }

    /// The index in [`Index::tensors`] of the tensor of this GGUF name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|t| t.name == name)
    }

    /// Bytes of all experts.
    pub fn expert_bytes(&self) -> u64 {
        sum(self.tensors.iter().map(ExpertTensor::all_bytes))
    }

    /// The least cache that works, in bytes: the experts of one token over all layers, of average size.
    pub fn token_bytes(&self) -> u64 {
        sum(self.tensors.iter().map(|t| {
            let used = u128::from(t.n_expert().min(self.n_expert_used));
            let bytes = (u128::from(t.all_bytes()) * used).div_ceil(u128::from(t.ne[2].max(1)));
            u64::try_from(bytes).unwrap_or(u64::MAX)
        }))
    }

    /// Whether `tensor` is the first of its layer and group: the one whose operation the router's picks reach first.
    pub fn leads(&self, tensor: usize) -> bool {
        let of = |t: &ExpertTensor| (t.layer, t.group);
        tensor.checked_sub(1).is_none_or(|before| of(&self.tensors[before]) != of(&self.tensors[tensor]))
    }

    /// How many layers have experts that stream.
    pub fn n_layers(&self) -> usize {
        self.tensors.iter().map(|t| t.layer).collect::<BTreeSet<_>>().len()
    }

    /// Experts per layer, the largest of all layers; 0 for a dense model.
    pub fn n_expert(&self) -> u32 {
        self.tensors.iter().map(ExpertTensor::n_expert).max().unwrap_or(0)
    }
}

/// A sum that does not overflow, even for an index that no file could have.
fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// The headers of all files of a model, in their order, from the path of any of them.
///
/// # Errors
/// As [`Index::open`].
pub fn headers(path: &Path) -> Result<Vec<Header>> {
    shards::in_order(shards::open(path)?)
}

/// What [`parse_name`] reads.
fn expert_name(layer: u32, group: u32, part: Part) -> String {
    format!("blk.{layer}.ffn_{part}_{}.weight", if group == 0 { "exps" } else { "chexps" })
}

/// Layer, group and part of an expert tensor's name.
///
/// Those that llama.cpp multiplies with by MUL_MAT_ID, and only those: biases and scales (`_exps.bias`,
/// `_exps.scale`) are small and stay in memory.
fn parse_name(name: &str) -> Option<(u32, u32, Part)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, set) = rest.strip_prefix("ffn_")?.strip_suffix(".weight")?.rsplit_once('_')?;
    let part = Part::ALL.into_iter().find(|p| p.name() == part)?;
    let group = match set {
        "exps" => 0,
        "chexps" => 1,
        _ => return None,
    };
    // "+1" and "01" parse as numbers, but llama.cpp writes neither.
    let number = layer.parse::<u32>().ok()?;
    (number.to_string() == layer).then_some((number, group, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_of_routed_experts_stream() {
        assert_eq!(parse_name("blk.0.ffn_up_exps.weight"), Some((0, 0, Part::Up)));
        assert_eq!(parse_name("blk.61.ffn_gate_exps.weight"), Some((61, 0, Part::Gate)));
        assert_eq!(parse_name("blk.7.ffn_gate_up_exps.weight"), Some((7, 0, Part::GateUp)));
        assert_eq!(parse_name("blk.10.ffn_down_chexps.weight"), Some((10, 1, Part::Down)));
        for name in [
            "blk.0.ffn_up_exps.bias",
            "blk.0.ffn_up_exps.scale",
            "blk.0.ffn_up_shexp.weight",
            "blk.0.ffn_up.weight",
            "blk.0.ffn_norm_exps.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.0.ffn_gate.0.weight",
            "blk.0.ffn_exps.weight",
            "blk.0.ffn__exps.weight",
            "blk..ffn_up_exps.weight",
            "blk.+1.ffn_up_exps.weight",
            "blk.01.ffn_up_exps.weight",
            "blk.4294967296.ffn_up_exps.weight",
            "v.blk.0.ffn_up_exps.weight",
            "blk.0.ffn_up_exps.weight.x",
            "",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }
}
