//! The tensor `les.checks.N` of file N: checksums of all that is not an expert, and the proof that the file is whole.
//!
//! While a file is being written a mark stands in its place, by which an interrupted run knows its work again.

use super::copy::Named;
use crate::error::{Error, Result};
use crate::index::{CHECKS, CHECKS_MAGIC, CHECKS_MODEL, Header, VERSION, is_own};

const BEGUN: &[u8; 8] = b"LESBEGUN";
/// Header and model are the first of the checksums.
const HEAD_BYTES: usize = CHECKS_MODEL - 4;

/// The checksums of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Checks {
    /// CRC-32 of the header, up to the end of the tensor infos.
    pub(super) header: u32,
    /// How many bytes that are.
    pub(super) header_bytes: u64,
    /// That of all files of the model: see [`of_model`].
    pub(super) model: u32,
    /// CRC-32 of each tensor that is neither ours nor a layer's experts, in the order of the file.
    pub(super) dense: Vec<u32>,
}

/// Its name in file `no`, from 0.
pub(super) fn name(no: usize) -> String {
    format!("{CHECKS}{no}")
}

impl Checks {
    /// Bytes of the tensor, for so many dense tensors.
    pub(super) const fn bytes(n_dense: usize) -> usize {
        HEAD_BYTES + 4 * (n_dense + 3)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = CHECKS_MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((self.dense.len() as u32).to_le_bytes());
        out.extend(self.header_bytes.to_le_bytes());
        out.extend(self.header.to_le_bytes());
        out.extend(self.model.to_le_bytes());
        self.dense.iter().for_each(|crc32| out.extend(crc32.to_le_bytes()));
        out.extend(crc32fast::hash(&out).to_le_bytes());
        out
    }

    /// Reads those of file `no`, which must be as many as its tensors ask for.
    ///
    /// # Errors
    /// [`Error::Format`] when they are missing or damaged.
    fn read(file: &Named, header: &Header, no: usize) -> Result<Self> {
        let fail = |offset, why: &str| {
            let why = format!("{why}; pack the model again, or copy the file again");
            Error::Format { path: file.path.clone(), offset, why }
        };
        let name = name(no);
        let Some(tensor) = header.tensors.iter().find(|t| t.name == name) else {
            return Err(fail(header.end, &format!("the tensor {name:?}, with the checksums, is missing")));
        };
        let n_dense = dense(header).count();
        if tensor.bytes != Self::bytes(n_dense) as u64 {
            return Err(fail(tensor.offset, "the checksums are not as many as the tensors"));
        }
        let bytes = file.bytes(tensor.offset, Self::bytes(n_dense))?;
        let header_bytes = bytes[16..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        let mut sums = bytes[HEAD_BYTES..].as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
        let [header, model] = [(); 2].map(|()| sums.next().unwrap_or(0));
        let read = Self { header, header_bytes, model, dense: sums.take(n_dense).collect() };
        // its own checksum with it
        if read.encode() != bytes {
            return Err(fail(tensor.offset, "the checksums are damaged"));
        }
        Ok(read)
    }

    /// Reads those of all files of a model.
    ///
    /// # Errors
    /// As [`Checks::read`].
    pub(super) fn read_all(files: &[Named], headers: &[Header]) -> Result<Vec<Self>> {
        files.iter().zip(headers).enumerate().map(|(no, (file, header))| Self::read(file, header, no)).collect()
    }

    /// Whether the file's header is what was written.
    pub(super) fn fits(&self, file: &Named, header: &Header) -> Result<bool> {
        Ok(self.header_bytes == header.end && crc32fast::hash(&file.bytes(0, header.end as usize)?) == self.header)
    }
}

/// The checksum of a model: of what its files hold, in their order, each with the checksums of its tables.
///
/// It is made of checksums alone. Those of the tables must not come after what they are of: a CRC over bytes and their
/// CRC says nothing about the bytes.
pub(super) fn of_model<'a, T: AsRef<[u32]>>(files: impl IntoIterator<Item = (&'a Checks, T)>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for (checks, tables) in files {
        for sum in [checks.header].iter().chain(&checks.dense).chain(tables.as_ref()) {
            hasher.update(&sum.to_le_bytes());
        }
    }
    hasher.finalize()
}

/// The same, of packed files.
pub(super) fn of_headers(headers: &[Header], checks: &[Checks]) -> u32 {
    let tables = |header: &Header| header.packed.iter().map(|layer| layer.table.crc32()).collect::<Vec<_>>();
    of_model(checks.iter().zip(headers.iter().map(tables)))
}

/// The tensors of a file that have a checksum here.
pub(super) fn dense(header: &Header) -> impl Iterator<Item = &crate::index::Tensor> {
    let experts: Vec<usize> = header.packed.iter().map(|layer| layer.tensor).collect();
    let all = header.tensors.iter().enumerate();
    all.filter(move |(i, t)| !is_own(&t.name) && !experts.contains(i)).map(|(_, t)| t)
}

/// What stands in the tensor's place until the file is whole.
pub(super) fn mark(stamp: u32) -> [u8; 12] {
    let mut out = [0; 12];
    out[..8].copy_from_slice(BEGUN);
    out[8..].copy_from_slice(&stamp.to_le_bytes());
    out
}
