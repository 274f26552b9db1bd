//! The packed layout: all matrices of an expert together, aligned for direct reads, each with a checksum.
//!
//! A packed file is a GGUF file with everything that it was packed from, and [`unpack`] gives that back. `FORMAT.md`
//! beside this file describes the bytes; what the engine must know of them is in [`index`](crate::index).
//!
//! ```text
//! layout: what is where in the packed files      header: writes GGUF headers    checks: the checksums of the rest
//! writer: les pack    verify: les verify    unpack: les unpack
//! copy:   bytes from file to file               output: a file that is there when it is whole, and not before
//! mix:    the type of each matrix, where they are to become smaller             parallel: work on matrices
//! ```

mod checks;
mod copy;
mod header;
mod layout;
pub mod mix;
mod output;
mod parallel;
mod unpack;
mod verify;
mod writer;

pub use layout::{EXPERT_ALIGN, Layout, OutFile, Source};
pub use output::{Reservation, room};
pub use unpack::{Unpacked, unpack};
pub use verify::{Damage, Verified, total_bytes, verify};
pub use writer::{Packed, pack};

use crate::error::Result;

/// Is told how many more bytes are done. An error of its own ends the work there, as if the process had been killed.
pub type Progress<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// The keys of what was packed, in the first file.
mod key {
    pub const VERSION: &str = "les.pack.version";
    pub const SOURCE_FILE: &str = "les.source.file";
    pub const SOURCE_BYTES: &str = "les.source.bytes";
    pub const SOURCE_CRC32: &str = "les.source.crc32";
    pub const BITS: &str = "les.pack.bpw";
    pub const IMATRIX_FILE: &str = "les.pack.imatrix";
    pub const IMATRIX_CRC32: &str = "les.pack.imatrix.crc32";
    pub const INPUTS_FILE: &str = "les.pack.inputs";
    pub const INPUTS_CRC32: &str = "les.pack.inputs.crc32";
}
