//! What the experts of a model were applied to, for `les pack --inputs`: a file that is written while a model computes.
//!
//! A line of JSON, the [`Header`]; then records, of little-endian numbers: those of [`Record`] as `u32`, the picks as `i32`, token by
//! token, and the rows as `f16`. The matrices of a layer that take the same input have it recorded once, with the first
//! of them; down has its own. What is larger than f16 can hold is recorded as the largest number that it can.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::f16;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, failed};
use crate::index::{Index, Part};

/// The version of the format.
pub const VERSION: u32 = 1;
/// Of each tensor the inputs of about so many tokens are recorded, the first ones.
pub const MOST_TOKENS: u64 = 1 << 16;

/// What was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The version of the format, 1.
    pub les_inputs: u32,
    /// The model's file name.
    pub model: String,
    /// The tensors whose inputs are recorded.
    pub tensors: Vec<InputTensor>,
}

/// One tensor of experts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputTensor {
    /// Its GGUF name.
    pub name: String,
    /// Numbers of an input's row.
    pub columns: u64,
    /// How many experts it has.
    pub n_expert: u32,
}

/// One pass of a batch through one tensor: what its picks and rows follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Index into [`Header::tensors`].
    pub at: u32,
    /// Tokens in the batch.
    pub tokens: u32,
    /// Picks per token.
    pub n_used: u32,
    /// Rows: one per token, or one per pick.
    pub rows: u32,
}

impl Record {
    /// Bytes of the numbers above.
    pub const BYTES: usize = 16;

    /// As it is written.
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, n) in bytes.as_chunks_mut::<4>().0.iter_mut().zip([self.at, self.tokens, self.n_used, self.rows]) {
            *to = n.to_le_bytes();
        }
        bytes
    }

    /// As it was before it was written.
    pub fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let n = |i: usize| u32::from_le_bytes(bytes.as_chunks::<4>().0[i]);
        Self { at: n(0), tokens: n(1), n_used: n(2), rows: n(3) }
    }

    /// Picks.
    pub const fn picks(self) -> u64 {
        self.tokens as u64 * self.n_used as u64
    }
}

/// The tensor whose input is that of `tensor`: the first of its layer, unless it is down.
pub fn recorded_with(index: &Index, tensor: usize) -> usize {
    if index.tensors[tensor].part == Part::Down {
        return tensor;
    }
    (0..=tensor).rev().find(|&i| index.leads(i)).unwrap_or(tensor)
}

/// Records, until a write fails. Not for several threads at once.
#[derive(Debug)]
pub struct Recorder {
    out: Option<BufWriter<File>>,
    path: PathBuf,
    failed: Option<Error>,
    /// By tensor: its number in the header, and the tokens that were recorded.
    tensors: Vec<Option<(u32, u64)>>,
}

impl Recorder {
    /// Creates the file.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn create(path: &Path, index: &Index) -> Result<Self> {
        let file = File::create(path).map_err(|e| failed(path, "create the recording of inputs", e))?;
        let mut header = Header { les_inputs: VERSION, model: index.model_name(), tensors: Vec::new() };
        let mut tensors = Vec::new();
        for (i, t) in index.tensors.iter().enumerate() {
            tensors.push((recorded_with(index, i) == i).then_some((header.tensors.len() as u32, 0)));
            if tensors[i].is_some() {
                header.tensors.push(InputTensor { name: t.name.clone(), columns: t.ne[0], n_expert: t.n_expert() });
            }
        }
        let mut recorder = Self { out: Some(BufWriter::new(file)), path: path.to_owned(), failed: None, tensors };
        let mut line =
            serde_json::to_vec(&header).map_err(|e| failed(path, "write the recording of inputs", e.into()))?;
        line.push(b'\n');
        recorder.write(&line);
        Ok(recorder)
    }

    /// Appends what the experts of a tensor of [`Index::tensors`] are applied to, for `tokens` tokens. Rows that are not one per
    /// token, or one per pick, are left out, as is what follows [`MOST_TOKENS`]. What cannot be written ends the recording;
    /// [`Recorder::close`] tells.
    pub fn record(&mut self, tensor: usize, picks: &[i32], tokens: usize, rows: &[&[f32]]) {
        let Some((at, recorded)) = self.tensors.get_mut(tensor).and_then(Option::as_mut) else { return };
        let known = tokens > 0 && (rows.len() == tokens || rows.len() == picks.len());
        if !known || self.out.is_none() || *recorded >= MOST_TOKENS {
            return;
        }
        *recorded += tokens as u64;
        let record =
            Record { at: *at, tokens: tokens as u32, n_used: (picks.len() / tokens) as u32, rows: rows.len() as u32 };
        self.write(&record.encode());
        let mut bytes: Vec<u8> = picks.iter().flat_map(|pick| pick.to_le_bytes()).collect();
        self.write(&bytes);
        for row in rows {
            bytes.clear();
            let largest = f16::MAX.to_f32();
            bytes.extend(row.iter().flat_map(|x| f16::from_f32(x.clamp(-largest, largest)).to_le_bytes()));
            self.write(&bytes);
        }
    }

    /// Ends the recording; answers whether it had not been ended before.
    ///
    /// # Errors
    /// [`Error::File`] when not all of it could be written.
    pub fn close(&mut self) -> Result<bool> {
        match (self.failed.take(), self.out.take()) {
            (Some(e), _) => Err(e),
            (None, Some(mut out)) => {
                out.flush().map(|()| true).map_err(|e| failed(&self.path, "write the recording of inputs", e))
            }
            (None, None) => Ok(false),
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        let Some(out) = &mut self.out else { return };
        if let Err(e) = out.write_all(bytes) {
            self.failed = Some(failed(&self.path, "write the recording of inputs", e));
            self.out = None;
        }
    }
}
