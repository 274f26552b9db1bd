//! The C interface (`include/les.h`). Every export catches panics, checks its pointers and handles, and returns a
//! status; outputs are written only on success.
#![allow(unsafe_code)]

#[cfg(feature = "cli")]
pub mod ggml;
mod guard;
mod handle;
mod layer;
mod model;
mod params;
mod report;
mod spec;
mod status;
mod ticket;

use std::ffi::c_char;

pub use layer::*;
pub use model::*;
pub use params::*;
pub use report::*;
pub use spec::*;
pub use status::*;
pub use ticket::*;

/// Grows with every incompatible change of this interface.
pub const LES_ABI_VERSION: u32 = 1;

/// The `LES_ABI_VERSION` that the library was built with; compare it with the header's. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_abi_version() -> u32 {
    LES_ABI_VERSION
}

/// The library's version, such as "0.1.0", valid forever. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
