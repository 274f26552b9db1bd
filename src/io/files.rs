//! The model's files, opened for reading past the page cache where that is possible.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::index::ModelFile;

/// Slots stay aligned to this even when no file asks for it.
const LEAST_ALIGN: usize = 512;
/// Suits every device and file system in common use; taken where the kernel does not say.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
const USUAL_ALIGN: usize = 4096;

/// What a file looked like when it was opened.
#[derive(Debug, Clone, Copy)]
struct Stamp {
    size: u64,
    /// When its content last changed; `None` where the system does not tell.
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { size: meta.len(), modified: meta.modified().ok() })
    }
}

/// One open file.
#[derive(Debug)]
pub(super) struct Open {
    file: File,
    path: PathBuf,
    stamp: Stamp,
    /// The alignment for direct I/O, or why the page cache is used.
    direct: Result<usize, String>,
}

/// The model's files, open for reading. All methods may be called from any thread.
///
/// A read that goes through the page cache is dropped from it afterwards, so there is never a lasting second copy.
#[derive(Debug)]
pub struct Files {
    files: Vec<Open>,
    align: usize,
}

impl Files {
    /// Opens every file of a model; with `direct` past the page cache, wherever the file system can do that.
    ///
    /// # Errors
    /// [`Error::File`] when a file cannot be opened, [`Error::Changed`] when its size is not the index's.
    pub fn open(files: &[ModelFile], direct: bool) -> Result<Self> {
        let files = files.iter().map(|file| Open::new(file, direct)).collect::<Result<Vec<_>>>()?;
        let align = files.iter().filter_map(|open| open.direct.as_ref().ok().copied()).fold(LEAST_ALIGN, usize::max);
        Ok(Self { files, align })
    }

    /// How many files there are.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// What offsets, lengths and addresses of reads must be multiples of, in bytes: the largest of all files', a power
    /// of two, at least 512.
    pub fn align(&self) -> usize {
        self.align
    }

    /// Whether reads of this file bypass the page cache. `false` for a file that does not exist.
    pub fn direct(&self, file: u32) -> bool {
        self.get(file).is_some_and(|open| open.direct.is_ok())
    }

    /// The files that are read through the page cache, and why.
    pub fn buffered(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().filter_map(|open| Some((open.path.as_path(), open.direct.as_ref().err()?.as_str())))
    }

    /// [`Files::buffered`] in words for the user; `None` when every file is read directly.
    pub fn notice(&self) -> Option<String> {
        let all: Vec<_> = self.buffered().map(|(path, why)| format!("{} ({why})", path.display())).collect();
        (!all.is_empty()).then(|| format!("read through the page cache: {}", all.join(", ")))
    }

    /// Whether the file is still what it was when it was opened, at the cost of one system call.
    ///
    /// # Errors
    /// [`Error::Changed`] when its size or modification time differ, [`Error::File`] when the system does not tell,
    /// [`Error::Invalid`] for a file that does not exist.
    pub fn check(&self, file: u32) -> Result<()> {
        let open = self.get(file).ok_or_else(|| Error::Invalid(format!("there is no file {file}")))?;
        let now = Stamp::of(&open.file).map_err(|source| open.error("inspect", source))?;
        if now.size != open.stamp.size {
            return Err(open.changed(now.size, open.stamp.size));
        }
        if now.modified != open.stamp.modified {
            return Err(Error::Changed { path: open.path.clone(), what: "its modification time differs".into() });
        }
        Ok(())
    }

    /// Drops what the page cache holds of the files, as far as the system does that: for measurements, and for a file
    /// that was just read by another way.
    pub fn forget_cached(&self) {
        for open in &self.files {
            forget(&open.file, 0, 0);
        }
    }

    pub(super) fn get(&self, file: u32) -> Option<&Open> {
        self.files.get(usize::try_from(file).ok()?)
    }
}

impl Open {
    fn new(model: &ModelFile, direct: bool) -> Result<Self> {
        let failed = |source| Error::File { path: model.path.clone(), what: "open", source };
        let (file, direct) = if direct {
            match open_direct(&model.path) {
                Ok((file, align)) => (file, Ok(align)),
                Err(why) => (File::open(&model.path).map_err(failed)?, Err(why)),
            }
        } else {
            (File::open(&model.path).map_err(failed)?, Err("as asked for".into()))
        };
        if direct.is_err() {
            expect_random(&file);
        }
        let stamp = Stamp::of(&file).map_err(failed)?;
        let open = Self { file, path: model.path.clone(), stamp, direct };
        if stamp.size != model.size {
            return Err(open.changed(stamp.size, model.size));
        }
        Ok(open)
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// What the positions of this file's reads must be multiples of.
    pub(super) fn step(&self) -> usize {
        self.direct.as_ref().map_or(1, |&align| align)
    }

    /// To be called after a read: leaves no copy in the page cache.
    pub(super) fn forget(&self, offset: u64, len: usize) {
        if self.direct.is_err() && len > 0 {
            forget(&self.file, offset, len as u64);
        }
    }

    fn error(&self, what: &'static str, source: io::Error) -> Error {
        Error::File { path: self.path.clone(), what, source }
    }

    fn changed(&self, now: u64, then: u64) -> Error {
        Error::Changed { path: self.path.clone(), what: format!("it has {now} bytes, not {then}") }
    }
}

/// Opens past the page cache and proves it with one read. Answers with the alignment, or with why it cannot be done.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_direct(path: &Path) -> Result<(File, usize), String> {
    use std::os::unix::fs::OpenOptionsExt;

    let none = || "the file system has no direct I/O".to_owned();
    let said = direct_align(path);
    if said == Some(0) {
        return Err(none());
    }
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).map_err(|error| {
        if error.raw_os_error() == Some(libc::EINVAL) { none() } else { format!("direct I/O: {error}") }
    })?;
    let mut why = String::new();
    for align in [said.unwrap_or(USUAL_ALIGN), USUAL_ALIGN] {
        match try_read(&file, align) {
            Ok(()) => return Ok((file, align)),
            Err(error) => why = format!("direct I/O: {error}"),
        }
    }
    Err(why)
}

/// The alignment that the kernel reports for direct reads of a file: of offsets, lengths and memory. Zero when there is
/// no direct I/O, `None` when the kernel does not say.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn direct_align(path: &Path) -> Option<usize> {
    use std::os::unix::ffi::OsStrExt;

    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let want = libc::STATX_DIOALIGN | libc::STATX_DIO_READ_ALIGN;
    // SAFETY: `path` ends with a zero byte, and `found` has room for a statx; both outlive the call.
    let code = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, want, found.as_mut_ptr()) };
    if code != 0 {
        return None;
    }
    // SAFETY: a statx is integers only, for which zero bytes are valid values, and the kernel has filled it in.
    let found = unsafe { found.assume_init() };
    if found.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let mut offset = found.stx_dio_offset_align;
    if offset == 0 || found.stx_dio_mem_align == 0 {
        return Some(0);
    }
    // Reads may be less strict than writes.
    if found.stx_mask & libc::STATX_DIO_READ_ALIGN != 0 && found.stx_dio_read_offset_align != 0 {
        offset = found.stx_dio_read_offset_align;
    }
    let align = usize::try_from(offset.max(found.stx_dio_mem_align)).ok()?;
    Some(align.next_power_of_two().max(LEAST_ALIGN))
}

#[cfg(any(target_os = "android", all(target_os = "linux", not(target_env = "gnu"))))]
fn direct_align(_path: &Path) -> Option<usize> {
    None
}

/// Reads `align` bytes at `align` to an address that is a multiple of no more than `align`.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn try_read(file: &File, align: usize) -> io::Result<()> {
    let arena = crate::store::Arena::new(2 * align).map_err(io::Error::other)?;
    let to = arena.at(align, align);
    // SAFETY: the arena has `2 * align` bytes, and nobody else knows of it.
    match unsafe { super::pread::read_at(file, to, align, align as u64) } {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

#[cfg(target_vendor = "apple")]
fn open_direct(path: &Path) -> Result<(File, usize), String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    // SAFETY: F_NOCACHE takes an integer, and the descriptor is open.
    let code = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_NOCACHE, 1) };
    if code == -1 {
        return Err(format!("F_NOCACHE: {}", io::Error::last_os_error()));
    }
    Ok((file, USUAL_ALIGN))
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn open_direct(_path: &Path) -> Result<(File, usize), String> {
    Err("direct I/O is not supported on this system".into())
}

/// Drops `len` bytes at `offset` from the page cache; with `len` 0 everything from `offset` on. Not being able to is no
/// error.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn forget(file: &File, offset: u64, len: u64) {
    // The kernel drops whole pages only, and leaves those that a range covers in part: widen it.
    let page = page_size();
    let first = offset - offset % page;
    let len = if len == 0 { 0 } else { (offset - first + len).next_multiple_of(page) };
    advise(file, first, len, libc::POSIX_FADV_DONTNEED);
}

/// Keeps the kernel from reading ahead into the page cache.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn expect_random(file: &File) {
    advise(file, 0, 0, libc::POSIX_FADV_RANDOM);
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) {
    let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) else { return };
    // SAFETY: the descriptor is open; the call takes integers only.
    unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(file), offset, len, advice) };
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn page_size() -> u64 {
    // SAFETY: takes an integer and has no effect.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(0).max(1)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn forget(_file: &File, _offset: u64, _len: u64) {}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn expect_random(_file: &File) {}
