//! A read under way. What a short read, an interrupted one or the end of the file mean is decided here, once for all
//! engines.

use std::io;

use super::files::Open;
use super::{Check, Files, Read};
use crate::store::Arena;

/// How often a read that makes no progress is tried again before its error counts.
const RETRIES: u32 = 64;

/// A read and how much of it has arrived.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) read: Read,
    /// The next one begins when this one has ended.
    pub(super) leads: bool,
    /// Bytes in place; a multiple of the file's step, so that direct I/O can go on from here.
    got: usize,
    /// Attempts in a row without progress.
    retries: u32,
}

/// The most that one system call is asked for: within every system's limit, and a multiple of every alignment.
const MOST_BYTES: usize = 1 << 30;

/// What to read next.
#[derive(Debug)]
pub(super) struct Rest<'a> {
    pub(super) open: &'a Open,
    pub(super) offset: u64,
    pub(super) len: usize,
    /// In the arena, with room for `len` bytes; never null.
    pub(super) to: *mut u8,
}

/// What follows an attempt.
#[derive(Debug)]
pub(super) enum Next {
    /// Read [`Flight::rest`].
    Again,
    /// The read has ended.
    Done(io::Result<()>),
}

impl Flight {
    pub(super) fn new(read: Read) -> Self {
        Self { read, leads: false, got: 0, retries: 0 }
    }

    /// What to read next. Fails when the read does not fit the arena or the files: such a read is never started.
    pub(super) fn rest<'a>(&self, files: &'a Files, arena: &Arena) -> io::Result<Rest<'a>> {
        let Read { file, offset, len, need, buf, .. } = self.read;
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        let open = files.get(file).ok_or_else(|| invalid(format!("there is no file {file}")))?;
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        if need > len || end.is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(invalid(format!("a read of {len} bytes at {offset}, {need} of them needed, makes no sense")));
        }
        if arena.at(buf, len).is_null() {
            return Err(invalid(format!("{len} bytes at {buf} are outside the arena")));
        }
        // `got <= len`, so the rest lies within what was just checked.
        let (offset, len) = (offset + self.got as u64, (len - self.got).min(MOST_BYTES));
        Ok(Rest { open, offset, len, to: arena.at(buf + self.got, len) })
    }

    /// Takes note of one attempt: how many bytes arrived, or the error. `step` is what offsets must be multiples of.
    pub(super) fn advance(&mut self, attempt: io::Result<usize>, step: usize) -> Next {
        match attempt {
            Ok(n) => {
                let total = (self.got + n).min(self.read.len);
                if total >= self.read.need {
                    return Next::Done(Ok(()));
                }
                // Direct I/O goes on from an aligned position only; the bytes past it are read twice.
                let whole = total - total % step.max(1);
                if whole <= self.got {
                    return Next::Done(Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends here")));
                }
                self.got = whole;
                self.retries = 0;
                Next::Again
            }
            Err(error) if passing(&error) && self.retries < RETRIES => {
                self.retries += 1;
                Next::Again
            }
            Err(error) => Next::Done(Err(error)),
        }
    }
}

/// Holds what has arrived against its checksum. For a read that [`Flight::rest`] has accepted and that has ended well:
/// the engine still owns its buffer.
#[allow(unsafe_code)]
pub(super) fn verify(read: &Read, arena: &Arena) -> io::Result<()> {
    let Some(Check { head, crc32 }) = read.check else { return Ok(()) };
    let wrong = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let at = arena.at(read.buf, read.len);
    if at.is_null() || head > read.need || read.need > read.len {
        return Err(wrong("there is nothing that could be checked"));
    }
    // SAFETY: the arena has `len >= need` initialized bytes at `buf`, and until the read is completed nobody else writes or
    // reads them.
    let bytes = unsafe { std::slice::from_raw_parts(at, read.need) };
    if crc32fast::hash(&bytes[head..]) == crc32 { Ok(()) } else { Err(wrong("the checksum is wrong")) }
}

/// Whether an error says nothing about the device or the file. Linux cancels what a thread has queued when that thread
/// ends, or begins it without the thread's address space (EFAULT: the arena is always there): no reason to fail the read.
fn passing(error: &io::Error) -> bool {
    #[cfg(unix)]
    if matches!(error.raw_os_error(), Some(libc::ECANCELED | libc::EFAULT)) {
        return true;
    }
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
#[allow(clippy::panic)]
mod tests {
    use super::*;

    fn flight(len: usize, need: usize) -> Flight {
        Flight::new(Read { token: 0, file: 0, offset: 0, len, need, buf: 0, check: None })
    }

    fn kind(next: Next) -> Option<io::ErrorKind> {
        match next {
            Next::Again => panic!("not done"),
            Next::Done(result) => result.err().map(|error| error.kind()),
        }
    }

    #[test]
    fn a_short_read_goes_on_from_an_aligned_position() {
        let mut f = flight(4096, 4000);
        assert!(matches!(f.advance(Ok(1000), 512), Next::Again));
        assert_eq!(f.got, 512);
        assert!(matches!(f.advance(Ok(513), 512), Next::Again));
        assert_eq!(f.got, 1024);
        assert_eq!(kind(f.advance(Ok(2976), 512)), None);
    }

    #[test]
    fn no_progress_is_the_end_of_the_file() {
        assert_eq!(kind(flight(4096, 1).advance(Ok(0), 512)), Some(io::ErrorKind::UnexpectedEof));
        let mut f = flight(4096, 4096);
        assert!(matches!(f.advance(Ok(700), 512), Next::Again));
        assert_eq!(kind(f.advance(Ok(188), 512)), Some(io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn passing_errors_are_tried_again_but_not_for_ever() {
        let mut f = flight(512, 512);
        for _ in 0..RETRIES {
            assert!(matches!(f.advance(Err(io::ErrorKind::Interrupted.into()), 1), Next::Again));
        }
        assert_eq!(kind(f.advance(Err(io::ErrorKind::Interrupted.into()), 1)), Some(io::ErrorKind::Interrupted));
        let mut f = flight(512, 512);
        assert_eq!(
            kind(f.advance(Err(io::ErrorKind::PermissionDenied.into()), 1)),
            Some(io::ErrorKind::PermissionDenied)
        );
    }
}
