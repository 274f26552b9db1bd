//! Reading little-endian values from a file that is not trusted.

use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use crate::error::{Error, Result, within};

/// Small enough to be cheap, large enough that a vocabulary takes few reads.
const BUFFER_BYTES: usize = 64 << 10;

/// A position in the file, and what is being read there.
pub(super) struct Reader<'a, R> {
    inner: BufReader<R>,
    path: &'a Path,
    /// Bytes of the file.
    pub(super) size: u64,
    /// The next byte to read; never past `size`.
    pub(super) pos: u64,
    /// The key or the tensor that errors name; empty before the first.
    pub(super) within: String,
}

impl<'a, R: Read + Seek> Reader<'a, R> {
    /// Starts at byte 0; `path` is for the errors.
    pub(super) fn new(mut source: R, path: &'a Path) -> Result<Self> {
        let size = source.seek(SeekFrom::End(0)).and_then(|size| source.rewind().map(|()| size));
        let size = size.map_err(|source| Error::File { path: path.to_owned(), what: "inspect", source })?;
        let inner = BufReader::with_capacity(BUFFER_BYTES, source);
        Ok(Self { inner, path, size, pos: 0, within: String::new() })
    }

    /// An error about what is at `offset`.
    pub(super) fn fail_at(&self, offset: u64, why: &str) -> Error {
        let why = if self.within.is_empty() { why.to_owned() } else { format!("{}: {why}", self.within) };
        Error::Format { path: self.path.to_owned(), offset, why }
    }

    /// An error about what is here.
    pub(super) fn fail(&self, why: &str) -> Error {
        self.fail_at(self.pos, why)
    }

    /// An error about what no program writes on purpose.
    pub(super) fn corrupt(&self, why: &str) -> Error {
        self.fail(&format!("{why}; the file is corrupt, download or convert it again"))
    }

    fn io_error(&self, source: io::Error) -> Error {
        let what = if self.within.is_empty() { "the beginning" } else { &self.within };
        let source = within(what, self.pos, &source);
        Error::File { path: self.path.to_owned(), what: "read the header", source }
    }

    /// Fails when less than `len` bytes are left.
    pub(super) fn need(&self, len: u64) -> Result<()> {
        let left = self.size - self.pos;
        if len <= left {
            return Ok(());
        }
        Err(self.corrupt(&format!("{len} bytes should follow, but the file ends after {left}")))
    }

    /// Fills all of `buf`.
    pub(super) fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        self.need(buf.len() as u64)?;
        match self.inner.read_exact(buf) {
            Ok(()) => {
                self.pos += buf.len() as u64;
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(self.corrupt("the file became shorter")),
            Err(e) => Err(self.io_error(e)),
        }
    }

    /// The next `N` bytes.
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Moves on without reading.
    pub(super) fn skip(&mut self, len: u64) -> Result<()> {
        self.need(len)?;
        let Ok(step) = i64::try_from(len) else { return Err(self.corrupt("the file is too large")) };
        self.inner.seek_relative(step).map_err(|e| self.io_error(e))?;
        self.pos += len;
        Ok(())
    }

    /// A string of up to `max` bytes; a longer one is skipped.
    pub(super) fn string(&mut self, max: u64) -> Result<Option<String>> {
        let len = self.u64()?;
        self.need(len)?;
        if len > max {
            self.skip(len)?;
            return Ok(None);
        }
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// How many things of at least `min` bytes follow.
    pub(super) fn count(&mut self, what: &str, min: u64, max: u64) -> Result<u64> {
        let at = self.pos;
        let count = self.u64()?;
        if count > max.min((self.size - self.pos) / min) {
            let why = format!(
                "{count} {what} are more than the file can hold; it is corrupt or incomplete, download it again"
            );
            return Err(self.fail_at(at, &why));
        }
        Ok(count)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A file of 100 bytes on a device that fails.
    struct Broken;

    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("device error"))
        }
    }

    impl Seek for Broken {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            Ok(if to == SeekFrom::End(0) { 100 } else { 0 })
        }
    }

    #[test]
    fn a_read_that_fails_names_the_tensor_and_the_offset() {
        let mut r = Reader::new(Broken, Path::new("m.gguf")).unwrap();
        let text = r.u32().unwrap_err().to_string();
        assert!(
            text.contains("m.gguf: cannot read the header: the beginning at byte 0: device error; check"),
            "{text}"
        );
        (r.within, r.pos) = ("tensor \"t\"".into(), 40);
        let text = r.u64().unwrap_err().to_string();
        assert!(text.contains("tensor \"t\" at byte 40: device error"), "{text}");
    }
}
