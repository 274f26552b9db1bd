//! What experts were applied to, as `--les-inputs` recorded it, and how the columns of it go together.
//!
//! For the rows x that a matrix of an expert was applied to, N of them with n columns, and all rows of its layer,
//!
//! ```text
//! H = (sum over the expert's rows of x' x  +  n * mean over the layer's rows of x' x) / (N + n)
//! H is then enlarged on its diagonal by 1% of the diagonal's mean
//! ```
//!
//! so that a row w of the matrix which becomes q errs by (q - w) x, whose mean square is (q - w) H (q - w)'. An expert that was
//! seldom picked is thus taken to be applied to what its layer is applied to. Columns that are more than 2048 apart
//! are taken to be independent, for the sake of memory: H is cut into squares along its diagonal.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use half::f16;

use super::imatrix::Input;
use super::shape::Covariance;
use crate::error::{Error, Result};
use crate::index::{ExpertTensor, Index};
use crate::inputs::{Header, Record, VERSION, recorded_with};
use crate::pack::copy::Stamped;

/// Columns of the largest square.
const STRETCH: usize = 2048;
/// What is added to the diagonal, as a part of its mean.
const RIDGE: f32 = 0.01;
/// Rows that are read before they are added up.
const ROWS: usize = 256;
/// For so many rows in all, by columns, a layer's mean is taken.
const LAYER_ROWS: usize = 8;

/// A recording. Its rows are read when they are asked for: it may be larger than memory is.
#[derive(Debug)]
pub struct Recording {
    pub(super) file: Stamped,
    header: Header,
    /// By tensor of the header: records, and where their picks begin.
    records: Vec<Vec<(Record, u64)>>,
    /// CRC-32 of the file.
    pub crc32: u32,
}

/// What it says of one tensor.
#[derive(Debug)]
pub struct Recorded<'a> {
    of: &'a Recording,
    tensor: &'a ExpertTensor,
    tokens: u64,
    /// By expert: where its rows are in the file.
    rows: Vec<Vec<u64>>,
    /// Of all experts, evenly chosen rows.
    layer: Covariance,
}

impl Recording {
    /// Opens the file, and finds its records.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read, [`Error::Invalid`] when it is no recording, or ends within a record.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |why: &str| Error::Invalid(format!("{}: {why}", path.display()));
        let damaged =
            || refuse("this recording of inputs is damaged, or was not finished; make it again with --les-inputs");
        let stamped = Stamped::open(path)?;
        let file = &stamped.file;
        let mut reader = BufReader::with_capacity(1 << 20, &file.file);
        let mut line = Vec::new();
        // no other file is read to its end in search of a line
        (&mut reader).take(64 << 20).read_until(b'\n', &mut line).map_err(file.error("read"))?;
        let header: Header = serde_json::from_slice(&line)
            .map_err(|_| refuse("this is no recording of inputs; give a file that --les-inputs wrote"))?;
        if header.les_inputs != VERSION {
            return Err(refuse("a recording of another version; make it again with --les-inputs"));
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&line);
        let mut at = line.len() as u64;
        let mut records = vec![Vec::new(); header.tensors.len()];
        loop {
            if reader.fill_buf().map_err(file.error("read"))?.is_empty() {
                break;
            }
            let mut bytes = [0; Record::BYTES];
            reader.read_exact(&mut bytes).map_err(|_| damaged())?;
            hasher.update(&bytes);
            at += Record::BYTES as u64;
            let record = Record::decode(bytes);
            let tensor = header.tensors.get(record.at as usize).ok_or_else(damaged)?;
            let rows = u64::from(record.rows);
            if record.picks() == 0 || (rows != u64::from(record.tokens) && rows != record.picks()) {
                return Err(damaged());
            }
            records[record.at as usize].push((record, at));
            let bytes =
                |columns: u64| rows.checked_mul(columns)?.checked_mul(2)?.checked_add(record.picks().checked_mul(4)?);
            let mut left = bytes(tensor.columns).ok_or_else(damaged)?;
            at = at.checked_add(left).ok_or_else(damaged)?;
            while left > 0 {
                let chunk = reader.fill_buf().map_err(file.error("read"))?;
                let now = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                if now == 0 {
                    return Err(damaged());
                }
                hasher.update(&chunk[..now]);
                reader.consume(now);
                left -= now as u64;
            }
        }
        Ok(Self { file: stamped, header, records, crc32: hasher.finalize() })
    }

    /// The file's name.
    pub fn name(&self) -> String {
        self.file.file.name()
    }

    /// Whether it says anything of one of the tensors.
    pub fn knows(&self, tensors: &[ExpertTensor]) -> bool {
        let mut recorded = self.header.tensors.iter().zip(&self.records).filter(|(_, records)| !records.is_empty());
        recorded.any(|(of, _)| tensors.iter().any(|t| t.name == of.name))
    }

    /// What it says of the tensor of an index's number. `None`: nothing, as layers that predict further tokens are not computed.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it makes no sense; [`Error::File`] when it cannot be read.
    pub fn of<'a>(&'a self, index: &'a Index, tensor: usize) -> Result<Option<Recorded<'a>>> {
        let tensor = &index.tensors[recorded_with(index, tensor)];
        let columns = tensor.ne[0] as usize;
        let found = self.header.tensors.iter().position(|t| t.name == tensor.name);
        let same = |i: &usize| {
            let t = &self.header.tensors[*i];
            (t.columns, t.n_expert) == (tensor.ne[0], tensor.n_expert())
        };
        let Some(at) = found.filter(same) else {
            return Err(self.refuse(tensor, "it has none of that shape; make it with this model and --les-inputs"));
        };
        let file = &self.file.file;
        let mut rows = vec![Vec::new(); tensor.n_expert() as usize];
        let (mut tokens, mut all) = (0, Vec::new());
        for &(record, picks_at) in &self.records[at] {
            tokens += u64::from(record.tokens);
            let picks = file.bytes(picks_at, 4 * record.picks() as usize)?;
            let rows_at = picks_at + picks.len() as u64;
            let row_at = |row: u64| rows_at + row * 2 * columns as u64;
            all.extend((0..u64::from(record.rows)).map(row_at));
            for (i, pick) in picks.as_chunks().0.iter().enumerate() {
                let row = if record.rows == record.tokens { i as u64 / u64::from(record.n_used) } else { i as u64 };
                let of = usize::try_from(i32::from_le_bytes(*pick)).ok().and_then(|expert| rows.get_mut(expert));
                of.ok_or_else(|| self.refuse(tensor, "it has picks of experts that are not there; make it again"))?
                    .push(row_at(row));
            }
        }
        if all.is_empty() {
            return Ok(None);
        }
        // odd, so that it is not always the first of a token's picks
        let every = all.len().div_ceil(LAYER_ROWS * columns) | 1;
        let sampled: Vec<u64> = all.into_iter().step_by(every).collect();
        let mut layer = Covariance::zeros(columns, STRETCH);
        self.add(tensor, &sampled, &mut layer)?;
        layer.scale(1.0 / sampled.len() as f32);
        Ok(Some(Recorded { of: self, tensor, tokens, rows, layer }))
    }

    /// Adds the squares of rows.
    fn add(&self, tensor: &ExpertTensor, rows: &[u64], to: &mut Covariance) -> Result<()> {
        let file = &self.file.file;
        let columns = tensor.ne[0] as usize;
        for rows in rows.chunks(ROWS) {
            let mut values = Vec::with_capacity(rows.len() * columns);
            let mut bytes = vec![0; 2 * columns];
            for &at in rows {
                file.read(at, &mut bytes)?;
                values.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()));
            }
            if !values.iter().all(|v| v.is_finite()) {
                return Err(self.refuse(tensor, "an input is not finite; make it again"));
            }
            to.add(&values);
        }
        Ok(())
    }

    fn refuse(&self, of: &ExpertTensor, why: &str) -> Error {
        Error::Invalid(format!("{}: the inputs of {}: {why}", self.file.file.path.display(), of.name))
    }
}

impl Recorded<'_> {
    /// How the columns of an expert's input go together.
    ///
    /// # Errors
    /// As [`Recording::of`].
    pub fn covariance(&self, expert: u32) -> Result<Covariance> {
        let rows = &self.rows[expert as usize];
        let columns = self.tensor.ne[0] as usize;
        let mut sum = self.layer.clone();
        sum.scale(columns as f32);
        self.of.add(self.tensor, rows, &mut sum)?;
        sum.scale(1.0 / (rows.len() + columns) as f32);
        sum.enlarge(RIDGE);
        Ok(sum)
    }

    /// How large the columns are, where `covariance` is an expert's, and how often it was picked: as if by one token more.
    pub(super) fn input(&self, expert: u32, covariance: &Covariance) -> Input {
        let share = (self.rows[expert as usize].len() + 1) as f64 / (self.tokens + 1) as f64;
        Input { mean_square: covariance.diagonal(), share, shape: None }
    }

    /// How much memory the squares of one expert take.
    pub(super) fn memory(&self) -> u64 {
        self.layer.memory()
    }
}
