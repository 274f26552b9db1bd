//! Which type each matrix of each expert gets, so that the experts take so many bytes and the harm is least.
//!
//! ```text
//! imatrix: what llama-imatrix measured     uses: how often experts are picked, by a trace
//! inputs: what experts were applied to     shape: what quantizers are given, so that errors make up for each other
//! matrices: values of matrices, and their bytes in a type
//! harm: what a type does to a matrix       choose: the types, given the harm and the bytes of each
//! families: the types that a matrix may have          notes: what one may not expect of the choice
//! ```

mod choose;
mod families;
mod harm;
mod imatrix;
mod inputs;
mod matrices;
mod notes;
mod shape;
mod uses;

use std::collections::BTreeMap;
use std::fmt;

pub use choose::{Candidate, choose};
pub use families::is_float;
pub use imatrix::{Imatrix, Input, Inputs};
pub use inputs::{Recorded, Recording};
pub(super) use matrices::Matrices;
pub use matrices::Quantizer;
pub use shape::Covariance;
pub use uses::Uses;

use super::{Progress, Source, header, key, parallel};
use crate::error::{Error, Result};
use crate::index::{GgmlType, Part};
use crate::options::Size;

/// How large the experts may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// By this part smaller than in the source, from 0 to 1.
    Shrink(f64),
    /// So many bits for each weight, on average.
    Bits(f64),
    /// So many bytes for all that is written.
    File(u64),
}

/// The types of all matrices of a model's experts.
#[derive(Debug)]
pub struct Mix<'a> {
    quantizer: &'a Quantizer,
    /// For each tensor of [`Index::tensors`](crate::index::Index::tensors), expert by expert.
    chosen: Vec<Vec<Candidate<GgmlType>>>,
    weights: u64,
    notes: Vec<String>,
}

/// The matrices of one part and type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kind {
    /// Which matrix.
    pub part: Part,
    /// Its type.
    pub ty: GgmlType,
    /// How many there are.
    pub matrices: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their part of all harm, from 0 to 1; see `harm.rs`.
    pub harm: f64,
}

/// Bytes of the experts of a source, and how many weights they have.
#[derive(Debug, Clone, Copy)]
struct Experts {
    bytes: u64,
    weights: u64,
}

impl<'a> Mix<'a> {
    /// Chooses the types. `size` tells how large the files would be with others; `progress` hears of
    /// [`Index::expert_bytes`](crate::index::Index::expert_bytes) in all. The same source, quantizer and target always give
    /// the same choice.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the target is below the least possible, or above what the source takes;
    /// [`Error::File`] or [`Error::Read`] when the source cannot be read, or has weights that are no numbers.
    pub fn new(
        source: &Source,
        quantizer: &'a Quantizer,
        target: Target,
        size: &dyn Fn(&Self) -> Result<u64>,
        progress: &mut Progress,
    ) -> Result<Self> {
        let weights = source.index.tensors.iter().map(|t| t.ne[0] * t.ne[1] * t.ne[2]).sum();
        let experts = Experts { bytes: source.index.expert_bytes(), weights };
        quantizer.check(&source.index)?;
        let types = families::of(source, quantizer)?;
        let mix = |chosen| Self { quantizer, chosen, weights, notes: Vec::new() };
        let of_size = |pick: &dyn Fn(usize) -> Option<GgmlType>| {
            let one = |(i, t): (usize, &crate::index::ExpertTensor)| {
                let what = pick(i).unwrap_or(t.ty);
                let bytes = what.row_bytes(t.ne[0]).map_or(t.expert_bytes, |bytes| bytes * t.ne[1]);
                vec![Candidate { what, bytes, harm: 0.0 }; t.ne[2] as usize]
            };
            mix(source.index.tensors.iter().enumerate().map(one).collect())
        };
        // before anything takes time
        let smallest = |i: usize| types[i].iter().copied().min_by_key(|ty| ty.row_bytes(source.index.tensors[i].ne[0]));
        let least = of_size(&smallest);
        let measure = |mix: &Self| match target {
            Target::File(_) => size(mix),
            _ => Ok(mix.bytes()),
        };
        let limit = target.limit(experts);
        if measure(&of_size(&|_| None))? <= limit {
            return Err(Error::Invalid(format!(
                "{target} changes nothing: the experts take no more in the source; leave it out"
            )));
        }
        if least.bytes() == experts.bytes {
            return Err(Error::Invalid(
                "no matrix can become smaller with the types that there are to choose from: some need an --imatrix or \
                 --inputs, and some do not fit the columns or the own type of any; give others by --types, or leave it out"
                    .into(),
            ));
        }
        let least_bytes = measure(&least)?;
        if least_bytes > limit {
            return Err(target.too_small(least_bytes, experts));
        }

        let mut items = measure_harm(source, quantizer, &types, progress)?;
        items.iter_mut().flatten().for_each(|item| item.retain(|c| c.harm.is_finite()));
        let flat: Vec<_> = items.iter().flatten().cloned().collect();
        // what files have beside the experts depends on where these begin, so it may take some turns
        let mut room = limit.saturating_sub(least_bytes - least.bytes());
        loop {
            let mut chosen = choose(&flat, room).map_err(|least| target.too_small(least, experts))?.into_iter();
            let mut chosen = mix(items.iter().map(|tensor| chosen.by_ref().take(tensor.len()).collect()).collect());
            let bytes = measure(&chosen)?;
            let excess = bytes.saturating_sub(limit);
            if excess == 0 {
                let tensors = &source.index.tensors;
                chosen.notes = notes::kept(tensors, &types);
                chosen.notes.extend(notes::left_over(target, (bytes, limit), tensors, &types));
                return Ok(chosen);
            }
            room = room.saturating_sub(excess).max(least.bytes());
        }
    }

    /// What one may not expect of the choice: lines for the user.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The type of an expert's matrix in the tensor of that index.
    pub fn type_of(&self, tensor: usize, expert: u32) -> GgmlType {
        self.chosen[tensor][expert as usize].what
    }

    /// The most frequent type of a tensor: that which llama.cpp sees.
    pub fn main_type(&self, tensor: usize) -> Option<GgmlType> {
        let mut counts = BTreeMap::new();
        self.chosen[tensor].iter().for_each(|c| *counts.entry(c.what.0).or_insert(0) += 1);
        counts.into_iter().rev().max_by_key(|(_, n)| *n).map(|(ty, _)| GgmlType(ty))
    }

    /// Bytes of all experts, without what lies between them.
    pub fn bytes(&self) -> u64 {
        self.chosen.iter().flatten().map(|c| c.bytes).sum()
    }

    /// Bits per weight of the experts.
    pub fn bits(&self) -> f64 {
        8.0 * self.bytes() as f64 / self.weights as f64
    }

    /// How many matrices there are of each part and type, in this order.
    pub fn kinds(&self, source: &Source) -> Vec<Kind> {
        let all: f64 = self.chosen.iter().flatten().map(|c| c.harm).sum();
        let mut kinds = BTreeMap::new();
        for (tensor, chosen) in source.index.tensors.iter().zip(&self.chosen) {
            for c in chosen {
                let none = Kind { part: tensor.part, ty: c.what, matrices: 0, bytes: 0, harm: 0.0 };
                let kind = kinds.entry((tensor.part, c.what.0)).or_insert(none);
                kind.matrices += 1;
                kind.bytes += c.bytes;
                kind.harm += if all > 0.0 { c.harm / all } else { 0.0 };
            }
        }
        kinds.into_values().collect()
    }

    /// The matrices of some tensors, with which their bytes are made.
    pub(super) fn matrices<'b>(&'b self, source: &'b Source, tensors: &[usize]) -> Result<Vec<Matrices<'b>>> {
        self.quantizer.matrices(source, tensors)
    }

    /// Fails when what it was chosen by was changed since.
    pub(super) fn unchanged(&self, source: &Source) -> Result<()> {
        self.quantizer.check(&source.index)
    }

    /// What the file says of this.
    pub(super) fn kvs(&self) -> Vec<Vec<u8>> {
        let mut kvs = vec![header::kv_f32(key::BITS, self.bits() as f32)];
        if let Some(imatrix) = &self.quantizer.imatrix {
            kvs.push(header::kv_text(key::IMATRIX_FILE, &imatrix.name()));
            kvs.push(header::kv_u32(key::IMATRIX_CRC32, imatrix.crc32));
        }
        if let Some(recording) = &self.quantizer.recording {
            kvs.push(header::kv_text(key::INPUTS_FILE, &recording.name()));
            kvs.push(header::kv_u32(key::INPUTS_CRC32, recording.crc32));
        }
        kvs
    }
}

/// The candidates of every matrix: for each tensor, expert by expert.
fn measure_harm(
    source: &Source,
    quantizer: &Quantizer,
    types: &[Vec<GgmlType>],
    progress: &mut Progress,
) -> Result<Vec<Vec<Vec<Candidate<GgmlType>>>>> {
    let mut all = Vec::new();
    for (no, tensors) in source.layers().iter().enumerate() {
        let layer = quantizer.matrices(source, tensors)?;
        let types = &types[all.len()..][..tensors.len()];
        let n_expert = layer.first().map_or(0, |matrices| matrices.tensor.n_expert() as usize);
        let begin = all.len();
        all.extend(tensors.iter().map(|_| vec![Vec::new(); n_expert]));
        let bytes: u64 = layer.iter().map(|matrices| matrices.tensor.expert_bytes).sum();
        let work = |expert| {
            let expert = expert as u32;
            harm::of_expert(&layer, types, expert, quantizer.uses.as_ref().map(|uses| uses.share(no, expert)))
        };
        // it holds samples only, but for what inputs are known by
        let memory = layer.iter().map(Matrices::sample_memory).max().unwrap_or(1);
        parallel::each(n_expert, memory, work, |expert, parts| {
            parts.into_iter().zip(&mut all[begin..]).for_each(|(part, tensor)| tensor[expert] = part);
            progress(bytes)
        })?;
    }
    Ok(all)
}

impl Target {
    /// Bytes of the experts, or of the files.
    fn limit(self, experts: Experts) -> u64 {
        match self {
            Self::Shrink(part) => (experts.bytes as f64 * (1.0 - part)) as u64,
            Self::Bits(bits) => (experts.weights as f64 * bits / 8.0) as u64,
            Self::File(bytes) => bytes,
        }
    }

    fn too_small(self, least: u64, experts: Experts) -> Error {
        // rounded to what is possible
        let possible = match self {
            Self::Shrink(_) => {
                let percent = 100.0 * (1.0 - least as f64 / experts.bytes as f64);
                // as many decimals as it takes for something to be left
                let parts = [1e1, 1e2, 1e4, 1e8].map(|parts| (parts * percent).floor() / parts);
                format!("--shrink {}%", parts.into_iter().find(|&percent| percent > 0.0).unwrap_or(percent))
            }
            Self::Bits(_) => format!("--bpw {:.2}", (800.0 * least as f64 / experts.weights as f64).ceil() / 100.0),
            Self::File(_) => format!("--budget {least}"),
        };
        Error::Invalid(format!("{self} is not possible: the least is {possible} ({:.2})", Size(least)))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // without what 100 times the part has in the last place
            Self::Shrink(part) => write!(f, "--shrink {}%", (1e12 * part).round() / 1e10),
            Self::Bits(bits) => write!(f, "--bpw {bits}"),
            Self::File(bytes) => write!(f, "--budget {bytes}"),
        }
    }
}
