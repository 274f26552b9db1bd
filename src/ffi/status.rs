//! Status codes. Their numbers never change and are never used again.

use std::ffi::{CStr, c_char};

use crate::error::Error;

/// What an exported function answers: 0 for success, 1 for the end of a walk, negative for errors.
pub type LesStatus = i32;

/// Success.
pub const LES_OK: LesStatus = 0;
/// The walk is at its end: there are no more experts.
pub const LES_END: LesStatus = 1;
/// A pointer that must not be NULL is NULL.
pub const LES_ERR_NULL: LesStatus = -1;
/// The handle is not one that is open: it was closed, or never was one.
pub const LES_ERR_HANDLE: LesStatus = -2;
/// An argument makes no sense.
pub const LES_ERR_INVALID: LesStatus = -3;
/// `struct_size` is not the size of a known version of the struct.
pub const LES_ERR_STRUCT_SIZE: LesStatus = -4;
/// A file could not be opened or inspected.
pub const LES_ERR_FILE: LesStatus = -5;
/// A file is no GGUF that can be streamed from.
pub const LES_ERR_FORMAT: LesStatus = -6;
/// A read of an expert failed.
pub const LES_ERR_READ: LesStatus = -7;
/// A file was changed while the model was in use.
pub const LES_ERR_CHANGED: LesStatus = -8;
/// The cache is smaller than one token's experts.
pub const LES_ERR_BUDGET: LesStatus = -9;
/// The router named an expert that is not there.
pub const LES_ERR_EXPERT_ID: LesStatus = -10;
/// The input of the experts has a value that is not finite.
pub const LES_ERR_NOT_A_NUMBER: LesStatus = -11;
/// The device does not answer.
pub const LES_ERR_STALLED: LesStatus = -12;
/// The system refused memory or another resource.
pub const LES_ERR_SYSTEM: LesStatus = -13;
/// There is no such tensor, or nothing to report yet.
pub const LES_ERR_NOT_FOUND: LesStatus = -14;
/// A defect of this library: a panic was caught. The handle stays usable or reports errors; nothing is undefined.
pub const LES_ERR_PANIC: LesStatus = -15;

impl From<&Error> for LesStatus {
    fn from(error: &Error) -> Self {
        match error {
            Error::File { .. } => LES_ERR_FILE,
            Error::Format { .. } => LES_ERR_FORMAT,
            Error::Read { .. } => LES_ERR_READ,
            Error::Changed { .. } => LES_ERR_CHANGED,
            Error::Budget { .. } => LES_ERR_BUDGET,
            Error::ExpertId { .. } => LES_ERR_EXPERT_ID,
            Error::NotANumber { .. } => LES_ERR_NOT_A_NUMBER,
            Error::Stalled { .. } => LES_ERR_STALLED,
            Error::Invalid(_) => LES_ERR_INVALID,
            Error::System { .. } => LES_ERR_SYSTEM,
        }
    }
}

pub(super) fn text(status: LesStatus) -> &'static CStr {
    match status {
        LES_OK => c"success",
        LES_END => c"no more experts",
        LES_ERR_NULL => c"a pointer is NULL",
        LES_ERR_HANDLE => c"the handle is not open",
        LES_ERR_INVALID => c"an argument makes no sense",
        LES_ERR_STRUCT_SIZE => c"struct_size is wrong",
        LES_ERR_FILE => c"a file cannot be opened",
        LES_ERR_FORMAT => c"not a usable GGUF file",
        LES_ERR_READ => c"reading an expert failed",
        LES_ERR_CHANGED => c"the file was changed",
        LES_ERR_BUDGET => c"the cache is too small",
        LES_ERR_EXPERT_ID => c"there is no such expert",
        LES_ERR_NOT_A_NUMBER => c"the input is not finite",
        LES_ERR_STALLED => c"the device does not answer",
        LES_ERR_SYSTEM => c"the system refused a resource",
        LES_ERR_NOT_FOUND => c"not found",
        LES_ERR_PANIC => c"internal error",
        _ => c"unknown status",
    }
}

/// A short English text for a status, never NULL, valid forever. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_status_str(status: LesStatus) -> *const c_char {
    text(status).as_ptr()
}
