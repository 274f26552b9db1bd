//! What a user may choose.

use std::ffi::c_char;
use std::mem::offset_of;
use std::path::PathBuf;

use crate::io::parse_depth;
use crate::options::{Options, parse_lookahead};

use super::guard::{Failure, Versioned, guard, guard_telling, ok, path, put, size_up_to, sized, string_or_empty};
use super::status::{LES_OK, LesStatus};

/// What a user may choose. Fill it with `les_params_default`, then change what matters.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesParams {
    /// `sizeof(struct les_params)`.
    pub struct_size: usize,
    /// "off", "auto" or "on"; NULL: "auto".
    pub mode: *const c_char,
    /// Memory for experts: "1500" (MiB), "3G", "512K", "40%" (of the experts), "min", "auto"; NULL: "auto".
    pub cache: *const c_char,
    /// "auto", "uring" or "pread"; NULL: "auto".
    pub io: *const c_char,
    /// The most reads in flight, as a number; NULL or "0": the default.
    pub io_depth: *const c_char,
    /// Layers to look ahead, as a number, 0: none; NULL or "auto": one, or two where reads come late.
    pub lookahead: *const c_char,
    /// A file for the routing trace; NULL: none.
    pub trace: *const c_char,
    /// A file that keeps what is learned of the model from one run to the next: read when streaming begins, written by
    /// `les_model_profile_save`; NULL: none.
    pub profile: *const c_char,
    /// A file that records what the experts are applied to, for `les pack --inputs`; NULL: none.
    pub inputs: *const c_char,
}

// SAFETY: repr(C), the size first, and every field takes any bytes (pointers are checked for NULL, and the caller
// vouches for the strings).
unsafe impl Versioned for LesParams {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, trace), size_of::<*const c_char>());
}

pub(super) const DEFAULT_PARAMS: LesParams = LesParams {
    struct_size: size_of::<LesParams>(),
    mode: std::ptr::null(),
    cache: std::ptr::null(),
    io: std::ptr::null(),
    io_depth: std::ptr::null(),
    lookahead: std::ptr::null(),
    trace: std::ptr::null(),
    profile: std::ptr::null(),
    inputs: std::ptr::null(),
};

/// Fills `params` with the defaults and its own size. Any thread.
///
/// # Safety
/// `params` is NULL or valid for writing a `struct les_params`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_params_default(params: *mut LesParams) -> LesStatus {
    // SAFETY: the caller vouches for `params`.
    guard(|| ok(unsafe { put(params, DEFAULT_PARAMS) }))
}

/// Whether `params` make sense for any model. If not, `err`, if there is room, tells why. Any thread.
///
/// # Safety
/// `params` is NULL or begins with its size and holds NULL or strings, `err` is NULL or writable for `err_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_params_check(params: *const LesParams, err: *mut c_char, err_len: usize) -> LesStatus {
    let body = || {
        // SAFETY: the caller vouches for `params`.
        let params = unsafe { sized(params, DEFAULT_PARAMS) }?;
        // SAFETY: the caller vouches for the strings in `params`.
        unsafe { options(&params) }?;
        Ok(LES_OK)
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard_telling(err, err_len, body) }
}

/// # Safety
/// The strings in `params` are NULL or NUL-terminated.
pub(super) unsafe fn options(params: &LesParams) -> Result<Options, Failure> {
    // SAFETY: the caller vouches for the strings.
    let text = |p| unsafe { string_or_empty(p) };
    let or = |t: &'static str, p| text(p).map(|s: &str| if s.is_empty() { t } else { s }.to_owned());
    let (mode, cache, io) = (or("auto", params.mode)?, or("auto", params.cache)?, or("auto", params.io)?);
    let io_depth = parse_depth(&or("0", params.io_depth)?)?;
    let file = |p: *const c_char| -> Result<Option<PathBuf>, Failure> {
        if p.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller vouches for the strings.
        let path = unsafe { path(p) }?;
        Ok(Some(path.to_path_buf()).filter(|path| !path.as_os_str().is_empty()))
    };
    Ok(Options {
        mode: mode.parse()?,
        cache: cache.parse()?,
        io: io.parse()?,
        io_depth,
        lookahead: parse_lookahead(&or("auto", params.lookahead)?)?,
        trace: file(params.trace)?,
        profile: file(params.profile)?,
        inputs: file(params.inputs)?,
    })
}
