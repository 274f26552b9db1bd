//! What every export goes through: panics become a status, C's pointers become Rust's values.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::error::Error;

use super::status::{LES_ERR_INVALID, LES_ERR_NULL, LES_ERR_PANIC, LES_ERR_STRUCT_SIZE, LES_OK, LesStatus, text};

/// Runs the body of an export. An `Err` is the status to answer.
pub fn guard(body: impl FnOnce() -> Result<LesStatus, LesStatus>) -> LesStatus {
    // The state behind a handle is protected by locks that do not poison and is consistent between their holders.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status) | Err(status)) => status,
        Err(_) => LES_ERR_PANIC,
    }
}

/// Why an export fails: with words of its own, or with those of its status.
pub enum Failure {
    Status(LesStatus),
    Error(Error),
}

impl From<LesStatus> for Failure {
    fn from(status: LesStatus) -> Self {
        Self::Status(status)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// As [`guard`], for an export with a buffer for the reason: whatever fails, the buffer tells.
///
/// # Safety
/// `buf` is NULL or valid for writing `len` bytes.
pub unsafe fn guard_telling(
    buf: *mut c_char,
    len: usize,
    body: impl FnOnce() -> Result<LesStatus, Failure>,
) -> LesStatus {
    let mut why = None;
    let status = guard(|| {
        body().map_err(|failure| match failure {
            Failure::Status(status) => status,
            Failure::Error(error) => {
                why = Some(error.to_string());
                LesStatus::from(&error)
            }
        })
    });
    if status < 0 {
        let why = why.unwrap_or_else(|| text(status).to_string_lossy().into_owned());
        // SAFETY: passed on.
        unsafe { put_text(buf, len, &why) };
    }
    status
}

/// The path at `text`: on Unix any bytes.
///
/// # Safety
/// As [`string`].
pub unsafe fn path<'a>(text: *const c_char) -> Result<&'a Path, LesStatus> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;

        if text.is_null() {
            return Err(LES_ERR_NULL);
        }
        // SAFETY: not NULL, and the caller vouches for the rest.
        let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
        Ok(Path::new(std::ffi::OsStr::from_bytes(bytes)))
    }
    #[cfg(not(unix))]
    {
        // SAFETY: passed on.
        unsafe { string(text) }.map(Path::new)
    }
}

/// The string at `text`.
///
/// # Safety
/// `text` is NULL or points to a string that ends with NUL.
pub unsafe fn string<'a>(text: *const c_char) -> Result<&'a str, LesStatus> {
    if text.is_null() {
        return Err(LES_ERR_NULL);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| LES_ERR_INVALID)
}

/// The string at `text`; the empty string for NULL.
///
/// # Safety
/// As [`string`].
pub unsafe fn string_or_empty<'a>(text: *const c_char) -> Result<&'a str, LesStatus> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: passed on.
    unsafe { string(text) }
}

/// Writes `value` to `out`.
///
/// # Safety
/// `out` is NULL or valid for writing one `T`.
pub unsafe fn put<T>(out: *mut T, value: T) -> Result<(), LesStatus> {
    if out.is_null() {
        return Err(LES_ERR_NULL);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { out.write(value) };
    Ok(())
}

/// Copies `text` with its NUL into the caller's buffer, cut to what fits. A NULL or empty buffer gets nothing.
///
/// # Safety
/// `buf` is NULL or valid for writing `len` bytes.
pub unsafe fn put_text(buf: *mut c_char, len: usize, text: &str) {
    if buf.is_null() || len == 0 {
        return;
    }
    let mut n = text.len().min(len - 1);
    while !text.is_char_boundary(n) {
        n -= 1;
    }
    // SAFETY: the source has n bytes, the target has len > n; they do not overlap, as one is Rust's.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), n) };
    // SAFETY: n < len.
    let end = unsafe { buf.add(n) };
    // SAFETY: within the buffer.
    unsafe { end.write(0) };
}

/// A struct that C passes by pointer and that may grow at its end: it starts with its own size.
///
/// # Safety
/// `#[repr(C)]`, first field `struct_size: usize`, and any bytes are a valid value.
pub unsafe trait Versioned {
    /// The size of the first version. Never changes: what a caller says that was compiled with that version. A field that
    /// is added later must not lie in the padding at its end.
    const LEAST: usize;
}

/// The size of a struct `T` whose last field, of `bytes` bytes, is at `offset`.
pub const fn size_up_to<T>(offset: usize, bytes: usize) -> usize {
    (offset + bytes).next_multiple_of(align_of::<T>())
}

/// Reads the struct at `from`, whatever version the caller was compiled with: what it lacks keeps `default`'s value.
///
/// # Safety
/// `from` is NULL or points to a struct that begins with its true size.
pub unsafe fn sized<T: Versioned>(from: *const T, mut default: T) -> Result<T, LesStatus> {
    if from.is_null() {
        return Err(LES_ERR_NULL);
    }
    // SAFETY: every version begins with its size.
    let size = unsafe { from.cast::<usize>().read() };
    if size < T::LEAST || size > 1 << 16 {
        return Err(LES_ERR_STRUCT_SIZE);
    }
    let n = size.min(size_of::<T>());
    let to = (&raw mut default).cast::<u8>();
    // SAFETY: both have at least n bytes, they do not overlap, and any bytes make a valid T.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, n) };
    Ok(default)
}

/// Writes `value` to a struct whose caller may have been compiled with another version: only what it knows, and its
/// `struct_size` stays.
///
/// # Safety
/// `to` is NULL or points to a writable struct that begins with its true size.
pub unsafe fn put_sized<T: Versioned>(to: *mut T, value: T) -> Result<(), LesStatus> {
    if to.is_null() {
        return Err(LES_ERR_NULL);
    }
    // SAFETY: every version begins with its size.
    let size = unsafe { to.cast::<usize>().read() };
    if size < T::LEAST || size > 1 << 16 {
        return Err(LES_ERR_STRUCT_SIZE);
    }
    let skip = size_of::<usize>();
    let n = size.min(size_of::<T>()) - skip;
    // SAFETY: the first field is within the struct.
    let from = unsafe { (&raw const value).cast::<u8>().add(skip) };
    // SAFETY: as above; the caller's struct has at least LEAST bytes.
    let to = unsafe { to.cast::<u8>().add(skip) };
    // SAFETY: both have n more bytes and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
    Ok(())
}

/// Turns "it worked" into a status.
pub fn ok<E>(result: Result<(), E>) -> Result<LesStatus, E> {
    result.map(|()| LES_OK)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct First {
        struct_size: usize,
        a: u32,
        padding: u32,
    }

    /// What the library knows.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Second {
        struct_size: usize,
        a: u32,
        padding: u32,
        b: u64,
    }

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Third {
        struct_size: usize,
        a: u32,
        padding: u32,
        b: u64,
        c: u64,
    }

    // SAFETY: repr(C), the size first, integers only.
    unsafe impl Versioned for Second {
        const LEAST: usize = size_up_to::<Self>(offset_of!(Self, a), size_of::<u32>());
    }

    const NONE: Second = Second { struct_size: size_of::<Second>(), a: 1, padding: 0, b: 2 };

    fn read<T>(from: &T) -> Result<Second, LesStatus> {
        // SAFETY: all versions begin with their size, which is set.
        unsafe { sized(std::ptr::from_ref(from).cast(), NONE) }
    }

    fn write<T>(to: &mut T) -> Result<(), LesStatus> {
        // SAFETY: all versions begin with their size, which is set.
        unsafe { put_sized(std::ptr::from_mut(to).cast(), Second { struct_size: 4711, a: 10, padding: 0, b: 11 }) }
    }

    #[test]
    fn callers_of_every_version_are_understood() {
        let first = First { struct_size: size_of::<First>(), a: 3, padding: 0 };
        assert_eq!(read(&first).map(|s| (s.a, s.b)), Ok((3, 2)), "what it lacks keeps its default");
        let third = Third { struct_size: size_of::<Third>(), a: 3, padding: 0, b: 4, c: 5 };
        assert_eq!(read(&third).map(|s| (s.a, s.b)), Ok((3, 4)));
        for struct_size in [0, size_of::<First>() - 1, usize::MAX] {
            assert_eq!(read(&Third { struct_size, ..third }), Err(LES_ERR_STRUCT_SIZE));
        }
    }

    #[test]
    fn callers_of_every_version_get_what_they_know() {
        let mut first = [First { struct_size: size_of::<First>(), a: 3, padding: 0 }; 2];
        write(&mut first).unwrap();
        assert_eq!(first[0], First { struct_size: size_of::<First>(), a: 10, padding: 0 });
        assert_eq!(first[1], First { struct_size: size_of::<First>(), a: 3, padding: 0 }, "written past its end");
        let mut third = Third { struct_size: size_of::<Third>(), a: 3, padding: 0, b: 4, c: 5 };
        write(&mut third).unwrap();
        assert_eq!(third, Third { struct_size: size_of::<Third>(), a: 10, padding: 0, b: 11, c: 5 });
        let mut small = Third { struct_size: size_of::<First>() - 1, ..third };
        assert_eq!(write(&mut small), Err(LES_ERR_STRUCT_SIZE));
    }
}
