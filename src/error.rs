//! The one error type: every variant names what failed, where, and what to do about it.

use std::io;
use std::path::PathBuf;

use crate::options::Size;

/// What went wrong. Cheap to clone is not needed: errors end a load or a decode.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, inspected or read as a whole (not a read of an expert).
    #[error("{path}: cannot {what}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried: "open", "inspect", ...
        what: &'static str,
        /// The operating system's answer.
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
    #[error("{tensor}: the router asked for expert {expert}, but there are {n_expert}")]
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
        "{tensor}: the input of the experts has a value that is not finite (NaN or infinite); the weights or the context are corrupt"
    )]
    NotANumber {
        /// The GGUF tensor.
        tensor: String,
    },
    /// A request waited too long for the device.
    #[error("no read has completed for {seconds} s; the device does not answer")]
    Stalled {
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// An argument makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The system refused memory or another resource.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
}

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;
