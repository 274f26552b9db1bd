//! Reads under way. What a short read, an interrupted one or the end of the file mean is decided here, once for all
//! engines.

use std::io;

use super::files::Open;
use super::{Check, Completion, Files, Read};
use crate::store::Arena;

/// How often a read that makes no progress is tried again before its error counts.
const RETRIES: u32 = 64;
/// So many reads that follow each other in a file are done at once. A packed expert has no more matrices.
const MOST_READS: usize = 4;
/// The most that one buffer of a system call is asked for: all of them are within every system's limit, and this is a
/// multiple of every alignment.
const MOST_BYTES: usize = 1 << 28;

/// A run of reads that follow each other in their file, and how much of them has arrived.
#[derive(Debug)]
pub(super) struct Flight {
    /// Those that have not ended; the first is the next to end.
    reads: Vec<Read>,
    /// The next flight begins when this one has ended.
    pub(super) leads: bool,
    /// Bytes of the first read in place; a multiple of the file's step, so that direct I/O can go on from here.
    got: usize,
    /// Attempts in a row without progress.
    retries: u32,
    /// An attempt at several reads failed: now one by one, to tell which of them it is.
    alone: bool,
    spans: [Span; MOST_READS],
}

/// A buffer of a system call, laid out as POSIX's `iovec` is: an address and a length.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Span {
    /// The address of its first byte, in the arena.
    at: usize,
    len: usize,
}

/// What to read next.
#[derive(Debug)]
pub(super) struct Rest<'a> {
    pub(super) open: &'a Open,
    pub(super) offset: u64,
    /// One after the other, all in the arena; at least one.
    pub(super) spans: &'a [Span],
}

impl Span {
    /// Its first byte; never null.
    pub(super) fn at(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.at)
    }

    pub(super) fn len(self) -> usize {
        self.len
    }
}

/// Those of `reads` that can be done at once.
pub(super) fn runs(reads: &[Read]) -> impl Iterator<Item = Flight> {
    let follows = |a: &Read, b: &Read| a.file == b.file && a.offset.checked_add(a.len as u64) == Some(b.offset);
    reads.chunk_by(follows).flat_map(|run| run.chunks(MOST_READS)).map(Flight::new)
}

impl Flight {
    /// Of 1 to [`MOST_READS`] reads that follow each other.
    pub(super) fn new(reads: &[Read]) -> Self {
        let spans = [Span::default(); MOST_READS];
        Self { reads: reads.to_vec(), leads: false, got: 0, retries: 0, alone: false, spans }
    }

    /// What to read next. Fails when the first read does not fit the arena or the files: such a read is never started, and
    /// [`Flight::advance`] ends it.
    pub(super) fn rest<'a>(&'a mut self, files: &'a Files, arena: &Arena) -> io::Result<Rest<'a>> {
        let mut begin = None;
        let mut n = 0;
        let mut got = self.got;
        for (span, read) in self.spans.iter_mut().zip(&self.reads) {
            let (open, at) = match place(read, files, arena) {
                Ok(place) => place,
                Err(error) if n == 0 => return Err(error),
                // what is wrong is met when it is the first
                Err(_) => break,
            };
            begin.get_or_insert((open, read.offset + got as u64));
            // `got <= len`, so the rest lies within what was just checked
            let rest = read.len - got;
            *span = Span { at: at.expose_provenance() + got, len: rest.min(MOST_BYTES) };
            n += 1;
            if self.alone || span.len < rest {
                break;
            }
            got = 0;
        }
        let (open, offset) = begin.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Rest { open, offset, spans: &self.spans[..n] })
    }

    /// Takes note of one attempt at [`Flight::rest`]: how many bytes arrived, or the error. Completes in `out` what has ended
    /// by it. Answers whether anything is left.
    pub(super) fn advance(
        &mut self,
        attempt: io::Result<usize>,
        files: &Files,
        arena: &Arena,
        out: &mut Vec<Completion>,
    ) -> bool {
        let Some(first) = self.reads.first() else { return false };
        let (open, attempt) = match place(first, files, arena) {
            Ok((open, _)) => (Some(open), attempt),
            Err(error) => (None, Err(error)),
        };
        match attempt {
            Ok(n) => {
                self.retries = 0;
                if !self.arrived(n, open, arena, out) {
                    let error = io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends here");
                    self.end(Err(error), open, arena, out);
                }
            }
            Err(error) if passing(&error) && self.retries < RETRIES => self.retries += 1,
            Err(_) if !self.alone && self.reads.len() > 1 => self.alone = true,
            Err(error) => self.end(Err(error), open, arena, out),
        }
        !self.reads.is_empty()
    }

    /// So many bytes have arrived. Answers whether that is of any use.
    fn arrived(&mut self, n: usize, open: Option<&Open>, arena: &Arena, out: &mut Vec<Completion>) -> bool {
        let before = (self.reads.len(), self.got);
        let mut n = n;
        while let Some(read) = self.reads.first() {
            let total = (self.got + n).min(read.len);
            if total < read.need {
                // Direct I/O goes on from an aligned position only; the bytes past it are read twice.
                self.got = self.got.max(total - total % open.map_or(1, Open::step).max(1));
                break;
            }
            n -= total - self.got;
            self.end(Ok(()), open, arena, out);
            if n == 0 {
                break;
            }
        }
        (self.reads.len(), self.got) != before
    }

    /// Nobody will go on with it.
    pub(super) fn give_up(&mut self, why: &str, out: &mut Vec<Completion>) {
        out.extend(
            self.reads.drain(..).map(|read| Completion { token: read.token, result: Err(io::Error::other(why)) }),
        );
    }

    /// The first read has ended.
    fn end(&mut self, result: io::Result<()>, open: Option<&Open>, arena: &Arena, out: &mut Vec<Completion>) {
        let read = self.reads.remove(0);
        self.got = 0;
        if let Some(open) = open {
            open.forget(read.offset, read.len);
        }
        let result = result.and_then(|()| verify(&read, arena));
        out.push(Completion { token: read.token, result });
    }
}

/// The file to read from, and where in the arena to put it, if the read makes sense and fits.
fn place<'a>(read: &Read, files: &'a Files, arena: &Arena) -> io::Result<(&'a Open, *mut u8)> {
    let Read { file, offset, len, need, buf, .. } = *read;
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
    let open = files.get(file).ok_or_else(|| invalid(format!("there is no file {file}")))?;
    let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
    if need > len || end.is_none_or(|end| i64::try_from(end).is_err()) {
        return Err(invalid(format!("a read of {len} bytes at {offset}, {need} of them needed, makes no sense")));
    }
    let at = arena.at(buf, len);
    if at.is_null() {
        return Err(invalid(format!("{len} bytes at {buf} are outside the arena")));
    }
    Ok((open, at))
}

/// Holds what has arrived against its checksum. For a read that has ended well:
/// the engine still owns its buffer.
#[allow(unsafe_code)]
fn verify(read: &Read, arena: &Arena) -> io::Result<()> {
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
