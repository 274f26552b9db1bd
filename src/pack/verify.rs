//! Holds a packed model against its checksums.

use std::fmt;
use std::path::{Path, PathBuf};

use super::Progress;
use super::checks::{self, Checks};
use super::copy::{Copier, Named};
use crate::error::{Error, Result};
use crate::index::{self, Header, Index};

/// What is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// Key-values or tensor infos: damaged, or edited since the model was packed.
    Header {
        /// The file.
        path: PathBuf,
    },
    /// The checksum of the whole model: parts of the file are of another packing.
    Model {
        /// The file.
        path: PathBuf,
    },
    /// A tensor that is not one of experts.
    Tensor {
        /// The file.
        path: PathBuf,
        /// Its name.
        name: String,
        /// Where it begins, in bytes.
        offset: u64,
    },
    /// One matrix of an expert.
    Expert {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// The tensor that the matrix was in.
        tensor: String,
        /// Where it begins, in bytes.
        offset: u64,
    },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header { path } => {
                write!(f, "{}: the metadata are damaged, or were edited since the model was packed", path.display())
            }
            Self::Model { path } => {
                write!(f, "{}: its checksum of the whole model is not that of what the files hold", path.display())
            }
            Self::Tensor { path, name, offset } => {
                write!(f, "{}: tensor {name:?} is damaged (at byte {offset})", path.display())
            }
            Self::Expert { path, layer, expert, tensor, offset } => write!(
                f,
                "{}: layer {layer}, expert {expert} is damaged (in {tensor}, at byte {offset})",
                path.display()
            ),
        }
    }
}

/// What was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Checksums that were compared.
    pub checksums: usize,
    /// What is damaged, in the order of the files.
    pub damage: Vec<Damage>,
}

/// The bytes that [`verify`] and [`unpack`](super::unpack) read of a model, as their progress counts.
///
/// # Errors
/// As [`Index::open`].
pub fn total_bytes(path: &Path) -> Result<u64> {
    let index = Index::open(path)?;
    Ok(index.expert_bytes().saturating_add(index.dense_bytes))
}

/// The headers of a model whose experts are all packed.
pub(super) fn packed_headers(path: &Path) -> Result<Vec<Header>> {
    let headers = index::headers(path)?;
    let model = Index::from_headers(headers.clone())?;
    if model.tensors.is_empty() || model.tensors.iter().any(|t| t.packed.is_none()) {
        let why = "this model is not packed, and has no checksums";
        return Err(Error::Invalid(format!("{}: {why}", path.display())));
    }
    Ok(headers)
}

/// Reads every tensor of the model of which `path` is a file.
///
/// # Errors
/// [`Error::Format`] when its structure is damaged, so that nobody knows where its parts are; [`Error::Invalid`] when
/// it is not packed; [`Error::File`] when it cannot be read.
pub fn verify(path: &Path, progress: &mut Progress) -> Result<Verified> {
    let headers = packed_headers(path)?;
    let model = Index::from_headers(headers.clone())?;
    let mut copier = Copier::new(progress);
    let mut result = Verified { checksums: 0, damage: Vec::new() };
    let files = headers.iter().map(|header| Named::open(&header.file.path)).collect::<Result<Vec<_>>>()?;
    let checks = Checks::read_all(&files, &headers)?;
    let of_model = checks::of_headers(&headers, &checks);
    for ((header, file), checks) in headers.iter().zip(&files).zip(checks) {
        let path = &file.path;
        result.note(checks.fits(file, header)?, || Damage::Header { path: path.clone() });
        result.note(checks.model == of_model, || Damage::Model { path: path.clone() });
        for (tensor, crc32) in checks::dense(header).zip(checks.dense) {
            let right = copier.copy((file, tensor.offset), tensor.bytes, None)? == crc32;
            let (name, offset) = (tensor.name.clone(), tensor.offset);
            result.note(right, || Damage::Tensor { path: path.clone(), name, offset });
        }
        for layer in &header.packed {
            // expert by expert, as they lie
            let of_layer = |t: &&index::ExpertTensor| (t.layer, t.group) == (layer.layer, layer.group);
            for expert in 0..layer.table.n_expert {
                for t in model.tensors.iter().filter(of_layer) {
                    let offset = t.offset_of(expert);
                    let right = Some(copier.copy((file, offset), t.bytes_of(expert), None)?) == t.crc32_of(expert);
                    result.note(right, || Damage::Expert {
                        path: path.clone(),
                        layer: t.layer,
                        expert,
                        tensor: t.name.clone(),
                        offset,
                    });
                }
            }
        }
    }
    Ok(result)
}

impl Verified {
    fn note(&mut self, right: bool, damage: impl FnOnce() -> Damage) {
        self.checksums += 1;
        if !right {
            self.damage.push(damage());
        }
    }
}
