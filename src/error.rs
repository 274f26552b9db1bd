//! The one error type: every variant names what failed, where, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::options::Size;

/// What went wrong. Cheap to clone is not needed: errors end a load or a decode.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, inspected or read as a whole (not a read of an expert).
    #[error("{path}: cannot {what}: {source}; {remedy}", path = path.display(), remedy = remedy(source.kind()))]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried: "open", "inspect", ...
        what: &'static str,
        /// The operating system's answer; of a part of the file with what [`within`] adds.
        source: io::Error,
    },
    /// The file is not a GGUF that this library can stream from.
    #[error("{path}: not a usable GGUF file: {why} (at byte {offset})", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// What is wrong, and the remedy where there is one.
        why: String,
    },
    /// A read of an expert failed or came back short.
    #[error(
        "{path}: reading expert {expert} of {tensor} failed at byte {offset} ({len} bytes): {why}",
        path = path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The GGUF tensor.
        tensor: String,
        /// The expert's index in the tensor.
        expert: u32,
        /// Where the read began, in bytes.
        offset: u64,
        /// How many bytes were wanted.
        len: u64,
        /// The operating system's answer, or "the file ends here".
        why: String,
    },
    /// The file changed under the running model.
    #[error("{path}: the file was changed while the model was in use ({what}); load the model again", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What differs: size or modification time.
        what: String,
    },
    /// The budget cannot hold what one token needs.
    #[error(
        "an expert cache of {budget} is too small for this model: it needs at least {floor_mib} MiB \
         (the experts of one token); use --les-cache {floor_mib} or more", budget = Size(*budget)
    )]
    Budget {
        /// What was asked for, in bytes.
        budget: u64,
        /// The least that works, in MiB, rounded up.
        floor_mib: u64,
    },
    /// The router named an expert that the tensor does not have.
    #[error(
        "{tensor}: the router asked for expert {expert}, but there are {n_expert}; the model is damaged: download or \
         convert it again"
    )]
    ExpertId {
        /// The GGUF tensor.
        tensor: String,
        /// The id.
        expert: i64,
        /// How many there are.
        n_expert: u32,
    },
    /// The input of an expert layer holds a value that is not finite.
    #[error(
        "{tensor}: the input of the experts has a value that is not finite (NaN or infinite); the weights or the context \
         are corrupt: --les off --check-tensors tells whether the weights are; begin with an empty context"
    )]
    NotANumber {
        /// The GGUF tensor.
        tensor: String,
    },
    /// A request waited too long for the device.
    #[error(
        "{path}: reading the experts of {tensor}: no read has completed for {seconds} s; the device does not answer: \
         check it and its connection", path = path.display()
    )]
    Stalled {
        /// The file.
        path: PathBuf,
        /// The GGUF tensor whose experts were waited for.
        tensor: String,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// An argument makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The system refused memory or another resource.
    #[error("cannot {what}: {source}; {remedy}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What to do about it.
        remedy: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
}

/// That of `what` with a file.
pub(crate) fn failed(path: &Path, what: &'static str, source: io::Error) -> Error {
    Error::File { path: path.to_owned(), what, source }
}

/// Why an expert could not be read, and what to do about it.
pub fn why_unread(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => {
            "the file ends before the expert does; it is truncated: download or copy it again".to_owned()
        }
        io::ErrorKind::InvalidData => format!(
            "{source}: these are not the bytes that were packed; `les verify` shows what else is damaged, pack the model or \
             copy the file again"
        ),
        _ => format!("{source}; check the device and the file system"),
    }
}

/// Adds to an answer of the operating system which part of a file was wanted, and where it begins, in bytes.
pub fn within(what: &str, offset: u64, source: &io::Error) -> io::Error {
    io::Error::new(source.kind(), format!("{what} at byte {offset}: {source}"))
}

/// What to do about a file that cannot be opened, read or written.
fn remedy(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::InvalidInput | io::ErrorKind::IsADirectory => "give a regular file",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "check who may use it",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room",
        io::ErrorKind::UnexpectedEof => "it is truncated: download or copy it again",
        _ => "check the device and the file system",
    }
}

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_names_the_place_and_the_remedy() {
        let (path, tensor) = (PathBuf::from("m.gguf"), "blk.3.ffn_up_exps.weight".to_owned());
        let file = |kind| Error::File {
            path: path.clone(),
            what: "read a router",
            source: within("blk.3.ffn_gate_inp.weight", 4711, &io::Error::from(kind)),
        };
        let errors = [
            (file(io::ErrorKind::UnexpectedEof), ["m.gguf", "ffn_gate_inp.weight at byte 4711", "download or copy"]),
            (file(io::ErrorKind::StorageFull), ["m.gguf", "cannot read a router", "make room"]),
            (
                Error::ExpertId { tensor: tensor.clone(), expert: 9, n_expert: 8 },
                ["blk.3", "expert 9", "convert it again"],
            ),
            (Error::NotANumber { tensor: tensor.clone() }, ["blk.3", "not finite", "--check-tensors"]),
            (Error::Stalled { path: path.clone(), tensor, seconds: 60 }, ["m.gguf", "blk.3", "check it"]),
            (
                Error::System { what: "reserve", remedy: "take less", source: io::ErrorKind::OutOfMemory.into() },
                ["cannot reserve", "out of memory", "; take less"],
            ),
        ];
        for (error, parts) in errors {
            let text = error.to_string();
            assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} are not all in {text:?}");
        }
    }
}
