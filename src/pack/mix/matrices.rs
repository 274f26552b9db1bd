//! The matrices of a source's experts, and their bytes in other types.

use super::imatrix::{Imatrix, Input, Inputs};
use super::inputs::{Recorded, Recording};
use super::shape::Shape;
use super::uses::Uses;
use crate::error::{Error, Result};
use crate::ffi::ggml::{Ggml, Rows};
use crate::index::{ExpertTensor, GgmlType, Index};
use crate::pack::Source;

/// Values that are quantized at once: a matrix may be larger than the memory that there is for it.
const AT_ONCE: u64 = 8 << 20;

/// What matrices are requantized with.
#[derive(Debug)]
pub struct Quantizer {
    /// Where the quantizers are.
    pub ggml: Ggml,
    /// How large the inputs are. `None`: all alike.
    pub imatrix: Option<Imatrix>,
    /// What the inputs were. `None`: their columns are taken to be independent.
    pub recording: Option<Recording>,
    /// How often experts are picked. `None`: as often as the importance matrix says.
    pub uses: Option<Uses>,
    /// The types to choose from, besides those that matrices have. `None`: all that a matrix may have.
    pub types: Option<Vec<GgmlType>>,
}

/// The matrices of one tensor.
#[derive(Debug)]
pub(crate) struct Matrices<'a> {
    quantizer: &'a Quantizer,
    source: &'a Source,
    pub(super) tensor: &'a ExpertTensor,
    inputs: Option<Inputs<'a>>,
    recorded: Option<Recorded<'a>>,
}

impl Quantizer {
    /// Fails when what was calibrated is none of the model's, or was written anew since it was opened.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Changed`]; [`Error::File`] when a file cannot be inspected.
    pub(crate) fn check(&self, index: &Index) -> Result<()> {
        let refuse = |name: &str, with: &str| {
            let why = "it says nothing of the experts of this model; make one with this model";
            Err(Error::Invalid(format!("{name}: {why} and {with}")))
        };
        if let Some(imatrix) = &self.imatrix {
            if !imatrix.knows(&index.tensors) {
                return refuse(&imatrix.name(), "llama-imatrix");
            }
            imatrix.file.unchanged()?;
        }
        if let Some(recording) = &self.recording {
            if !recording.knows(&index.tensors) {
                return refuse(&recording.name(), "--les-inputs");
            }
            recording.file.unchanged()?;
        }
        Ok(())
    }

    /// The matrices of some tensors of a source.
    pub(crate) fn matrices<'a>(&'a self, source: &'a Source, tensors: &[usize]) -> Result<Vec<Matrices<'a>>> {
        let of = |&i: &usize| {
            let tensor = &source.index.tensors[i];
            let n_used = source.index.n_expert_used;
            let inputs = self.imatrix.as_ref().map(|imatrix| imatrix.of(tensor, n_used)).transpose()?.flatten();
            let recorded =
                self.recording.as_ref().map(|recording| recording.of(&source.index, i)).transpose()?.flatten();
            Ok(Matrices { quantizer: self, source, tensor, inputs, recorded })
        };
        tensors.iter().map(of).collect()
    }
}

impl Matrices<'_> {
    /// About how much memory it takes to make the bytes of one, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        let values = 4 * self.tensor.ne[0] * self.rows_at_once();
        // the covariance, what is made of it, and what that is made of; values of each turn
        let shape = self.recorded.as_ref().map_or(0, |recorded| 4 * recorded.memory() + 5 * values);
        values + 2 * self.tensor.expert_bytes + shape
    }

    /// About how much memory it takes beside its samples to measure what types do to one.
    pub(super) fn sample_memory(&self) -> u64 {
        1 + self.recorded.as_ref().map_or(0, |recorded| 4 * recorded.memory())
    }

    /// The part of all tokens that pick an expert, on average.
    pub(super) fn mean_share(&self) -> f64 {
        f64::from(self.source.index.n_expert_used.max(1)) / f64::from(self.tensor.n_expert().max(1))
    }

    /// Bytes of one in the source.
    pub(crate) fn source_bytes(&self) -> u64 {
        self.tensor.expert_bytes
    }

    /// What the calibration found of an expert's input.
    pub(super) fn input(&self, expert: u32) -> Result<Option<Input>> {
        let known = self.inputs.as_ref().map(|inputs| inputs.expert(expert)).transpose()?;
        let Some(recorded) = &self.recorded else { return Ok(known) };
        let covariance = recorded.covariance(expert)?;
        let mut input = known.unwrap_or_else(|| recorded.input(expert, &covariance));
        input.shape = Shape::new(covariance, &importance(&input));
        Ok(Some(input))
    }

    /// The bytes of an expert's matrix in a type. The only place where they are made.
    pub(crate) fn bytes(&self, expert: u32, ty: GgmlType) -> Result<Vec<u8>> {
        if ty == self.tensor.ty {
            return self.read(expert, [(0, self.tensor.ne[1])]);
        }
        let input = self.input(expert)?;
        let (rows, step) = (self.tensor.ne[1], self.rows_at_once());
        let mut bytes = Vec::new();
        // each row is quantized by itself
        for first in (0..rows).step_by(step as usize) {
            let values = self.values(expert, [(first, step.min(rows - first))])?;
            bytes.extend(self.quantized(ty, &values, input.as_ref())?);
        }
        Ok(bytes)
    }

    fn rows_at_once(&self) -> u64 {
        (AT_ONCE / self.tensor.ne[0].max(1)).clamp(1, self.tensor.ne[1].max(1))
    }

    /// Whether a type cannot be made, as nothing is known of the expert's input.
    pub(super) fn lacks_importance(&self, ty: GgmlType, input: Option<&Input>) -> Result<bool> {
        Ok(input.is_none() && self.quantizer.ggml.needs_importance(ty)?)
    }

    /// Whole rows in a type.
    pub(super) fn quantized(&self, ty: GgmlType, values: &[f32], input: Option<&Input>) -> Result<Vec<u8>> {
        let importance = input.map(importance);
        let quantize = |values: &[f32]| {
            let rows = Rows { values, columns: self.tensor.ne[0] as usize };
            self.quantizer.ggml.quantize(ty, rows, importance.as_deref())
        };
        match input.and_then(|input| input.shape.as_ref()) {
            Some(shape) => shape.quantize(values, quantize, |bytes| self.dequantized(ty, bytes)),
            None => quantize(values),
        }
    }

    /// What values became of rows in a type.
    pub(super) fn dequantized(&self, ty: GgmlType, bytes: &[u8]) -> Result<Vec<f32>> {
        self.quantizer.ggml.dequantize(ty, bytes)
    }

    /// The values of ranges of rows: where they begin, and how many they are.
    pub(super) fn values(&self, expert: u32, rows: impl IntoIterator<Item = (u64, u64)>) -> Result<Vec<f32>> {
        let t = self.tensor;
        let values = self.quantizer.ggml.dequantize(t.ty, &self.read(expert, rows)?)?;
        if (Rows { values: &values, columns: t.ne[0] as usize }).fit() {
            return Ok(values);
        }
        Err(Error::Read {
            path: self.source.files[t.file as usize].path.clone(),
            tensor: t.name.clone(),
            expert,
            offset: t.offset_of(expert),
            len: t.expert_bytes,
            why:
                "it has a weight that is not finite, or too large to be quantized; download or convert the model again"
                    .into(),
        })
    }

    fn read(&self, expert: u32, rows: impl IntoIterator<Item = (u64, u64)>) -> Result<Vec<u8>> {
        let file = &self.source.files[self.tensor.file as usize];
        let row_bytes = self.tensor.expert_bytes / self.tensor.ne[1];
        let mut bytes = Vec::new();
        for (first, n) in rows {
            let begin = bytes.len();
            bytes.resize(begin + (n * row_bytes) as usize, 0);
            file.read(self.tensor.offset_of(expert) + first * row_bytes, &mut bytes[begin..])?;
        }
        Ok(bytes)
    }
}

/// What quantizers weigh columns by, 1 on average: all alike where all inputs were zero.
///
/// None is zero: a block of nothing else would have no scale that is better than another.
fn importance(input: &Input) -> Vec<f32> {
    const LEAST: f64 = 1e-6;
    let sum: f64 = input.mean_square.iter().map(|v| f64::from(*v)).sum();
    let mean = sum / input.mean_square.len() as f64;
    let relative = |v: &f32| (f64::from(*v) / mean).max(LEAST) as f32;
    if mean > 0.0 { input.mean_square.iter().map(relative).collect() } else { vec![1.0; input.mean_square.len()] }
}
