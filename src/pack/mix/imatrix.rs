//! The importance matrix that llama-imatrix writes: how large the inputs of each expert were.
//!
//! A GGUF file with two tensors of f32 for each tensor of experts: `NAME.in_sum2` `[columns, experts]`, the sums of the squares of
//! each column over the tokens that the expert was picked for, and `NAME.counts` `[1, experts]`, the number of these.

use std::path::Path;

use super::shape::Shape;
use crate::error::{Error, Result};
use crate::index::{ExpertTensor, GgmlType, Header, Tensor};
use crate::pack::copy::Stamped;

/// What the calibration found of an expert's input.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The mean square of each column, over the tokens that the expert was picked for.
    pub mean_square: Vec<f32>,
    /// The part of all tokens that it was picked for.
    pub share: f64,
    /// How its columns go together, where a recording tells.
    pub(super) shape: Option<Shape>,
}

/// An importance matrix. Read when it is asked for: it may be larger than memory is.
#[derive(Debug)]
pub struct Imatrix {
    pub(super) file: Stamped,
    header: Header,
    /// CRC-32 of the file.
    pub crc32: u32,
}

/// What it says of one tensor.
#[derive(Debug)]
pub struct Inputs<'a> {
    of: &'a Imatrix,
    sums: &'a Tensor,
    columns: usize,
    counts: Vec<f32>,
    tokens: f64,
    /// What experts get that the calibration never reached.
    mean: Input,
}

impl Imatrix {
    /// Opens the file.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read, [`Error::Format`] or [`Error::Invalid`] when it is no importance matrix.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |why: &str| Err(Error::Invalid(format!("{}: {why}", path.display())));
        let stamped = Stamped::open(path)?;
        let file = &stamped.file;
        let mut hasher = crc32fast::Hasher::new();
        let mut reader = std::io::BufReader::with_capacity(1 << 20, &file.file);
        let mut first = None;
        loop {
            let chunk = std::io::BufRead::fill_buf(&mut reader).map_err(file.error("read"))?;
            first.get_or_insert_with(|| chunk.starts_with(b"GGUF"));
            if chunk.is_empty() {
                break;
            }
            hasher.update(chunk);
            let len = chunk.len();
            std::io::BufRead::consume(&mut reader, len);
        }
        if first != Some(true) {
            return refuse(
                "this is no importance matrix in GGUF format; one in the old format becomes one by \
                 llama-imatrix --in-file OLD.dat -o NEW.gguf",
            );
        }
        let header = Header::open(path)?;
        if !header.tensors.iter().any(|t| t.name.ends_with(SUMS)) {
            return refuse("this is no importance matrix; give the file that llama-imatrix wrote");
        }
        Ok(Self { file: stamped, header, crc32: hasher.finalize() })
    }

    /// The file's name.
    pub fn name(&self) -> String {
        self.file.file.name()
    }

    /// Whether it says anything of one of the tensors.
    pub fn knows(&self, tensors: &[ExpertTensor]) -> bool {
        tensors.iter().any(|t| self.find(t, SUMS).is_some())
    }

    /// What it says of a tensor of which each token uses `n_used` experts. `None`: nothing, as llama-imatrix does not compute the
    /// layers that predict further tokens.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it makes no sense; [`Error::File`] when it cannot be read.
    pub fn of(&self, tensor: &ExpertTensor, n_used: u32) -> Result<Option<Inputs<'_>>> {
        let Some(sums) = self.find(tensor, SUMS) else { return Ok(None) };
        let [columns, _, n_expert, _] = tensor.ne;
        let sums = self.shaped(tensor, Some(sums), [columns, n_expert])?;
        let counts = self.shaped(tensor, self.find(tensor, COUNTS), [1, n_expert])?;
        let counts = self.floats(counts, 0, n_expert as usize)?;
        let tokens = counts.iter().map(|n| f64::from(*n)).sum::<f64>() / f64::from(n_used.max(1));
        if tokens <= 0.0 {
            return Err(
                self.refuse(tensor, "the calibration reached none of its experts; give llama-imatrix a longer text")
            );
        }
        let mean = Input { mean_square: Vec::new(), share: 0.0, shape: None };
        let mut inputs = Inputs { of: self, sums, columns: columns as usize, counts, tokens, mean };
        inputs.mean = inputs.average()?;
        Ok(Some(inputs))
    }

    fn find(&self, of: &ExpertTensor, suffix: &str) -> Option<&Tensor> {
        let name = format!("{}{suffix}", of.name);
        self.header.tensors.iter().find(|t| t.name == name)
    }

    fn shaped<'a>(&self, of: &ExpertTensor, found: Option<&'a Tensor>, shape: [u64; 2]) -> Result<&'a Tensor> {
        match found {
            None => Err(self.refuse(of, "it is not there; make one with this model and llama-imatrix")),
            Some(t) if t.ty != GgmlType::F32 || t.ne != [shape[0], shape[1], 1, 1] => {
                Err(self.refuse(of, "it has another shape; make one with this model and llama-imatrix"))
            }
            Some(t) => Ok(t),
        }
    }

    fn refuse(&self, of: &ExpertTensor, why: &str) -> Error {
        Error::Invalid(format!("{}: the importance of {}: {why}", self.header.file.path.display(), of.name))
    }

    /// So many values of a tensor, none of which is negative or not finite.
    fn floats(&self, tensor: &Tensor, first: usize, n: usize) -> Result<Vec<f32>> {
        let bytes = self.file.file.bytes(tensor.offset + 4 * first as u64, 4 * n)?;
        let floats: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        if floats.iter().all(|v| v.is_finite() && *v >= 0.0) {
            return Ok(floats);
        }
        let why = format!("tensor {:?} has negative values, or some that are not finite; make it anew", tensor.name);
        Err(Error::Format { path: self.header.file.path.clone(), offset: tensor.offset, why })
    }
}

impl Inputs<'_> {
    /// That of an expert. The layer's mean where the calibration never reached it.
    ///
    /// # Errors
    /// As [`Imatrix::of`].
    pub fn expert(&self, expert: u32) -> Result<Input> {
        let count = self.counts[expert as usize];
        if count <= 0.0 {
            return Ok(self.mean.clone());
        }
        let mean_square = self.sums(expert)?.iter().map(|sum| sum / count).collect();
        Ok(Input { mean_square, share: f64::from(count) / self.tokens, shape: None })
    }

    fn sums(&self, expert: u32) -> Result<Vec<f32>> {
        self.of.floats(self.sums, expert as usize * self.columns, self.columns)
    }

    /// Over all tokens and the experts that were reached.
    fn average(&self) -> Result<Input> {
        let mut sums = vec![0.0_f64; self.columns];
        let (mut count, mut reached) = (0.0, 0.0);
        for expert in (0..).take(self.counts.len()) {
            let n = f64::from(self.counts[expert as usize]);
            if n > 0.0 {
                (count, reached) = (count + n, reached + 1.0);
                sums.iter_mut().zip(self.sums(expert)?).for_each(|(sum, more)| *sum += f64::from(more));
            }
        }
        let mean_square = sums.iter().map(|sum| (sum / count) as f32).collect();
        Ok(Input { mean_square, share: count / reached / self.tokens, shape: None })
    }
}

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
