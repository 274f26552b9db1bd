//! Bytes from file to file, with their checksum, in little memory.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Progress;
use crate::error::{Error, Result};

/// Large enough for the device, small enough for any machine.
const CHUNK_BYTES: usize = 4 << 20;

/// An open file and its name.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) file: File,
    pub(super) path: PathBuf,
}

impl Named {
    /// Opens a file for reading.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::File { path: path.to_owned(), what: "open", source })?;
        Ok(Self { file, path: path.to_owned() })
    }

    pub(super) fn error(&self, what: &'static str) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| Error::File { path: self.path.clone(), what, source }
    }

    /// Fills `to` with the bytes at `offset`. Any number of threads at once.
    pub(super) fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        read_at(&self.file, offset, to).map_err(self.error("read"))
    }

    /// Writes `bytes` at `offset`.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(bytes)).map_err(self.error("write"))
    }

    /// Its name, without where it is.
    pub(super) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// `len` bytes at `offset`.
    pub(super) fn bytes(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes).map(|()| bytes)
    }
}

#[cfg(unix)]
fn read_at(file: &File, offset: u64, to: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, offset)
}

#[cfg(windows)]
fn read_at(file: &File, offset: u64, to: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        match std::os::windows::fs::FileExt::seek_read(file, &mut to[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A checksum of the sizes of files and of the times when they were changed.
pub(super) fn stamp<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    for path in paths {
        let failed = |source| Error::File { path: path.to_owned(), what: "inspect", source };
        let meta = fs::metadata(path).map_err(failed)?;
        hasher.update(format!("{} {:?}\n", meta.len(), meta.modified().map_err(failed)?).as_bytes());
    }
    Ok(hasher.finalize())
}

/// A file that is read again and again, and must stay the same meanwhile.
#[derive(Debug)]
pub(super) struct Stamped {
    pub(super) file: Named,
    stamp: u32,
}

impl Stamped {
    /// Opens a file for reading.
    pub(super) fn open(path: &Path) -> Result<Self> {
        Ok(Self { stamp: stamp([path])?, file: Named::open(path)? })
    }

    /// Fails when the file was changed since.
    pub(super) fn unchanged(&self) -> Result<()> {
        let path = &self.file.path;
        if stamp([path.as_path()])? == self.stamp {
            return Ok(());
        }
        Err(Error::Changed { path: path.clone(), what: "while it was used; give the same command again".into() })
    }
}

/// Copies, and tells how far it is.
pub(super) struct Copier<'a, 'p> {
    chunk: Vec<u8>,
    progress: &'a mut Progress<'p>,
}

impl<'a, 'p> Copier<'a, 'p> {
    pub(super) fn new(progress: &'a mut Progress<'p>) -> Self {
        Self { chunk: vec![0; CHUNK_BYTES], progress }
    }

    /// So many bytes need no copying.
    pub(super) fn skip(&mut self, len: u64) -> Result<()> {
        (self.progress)(len)
    }

    /// Copies `len` bytes from a place to a place, or only reads them; answers with their CRC-32.
    pub(super) fn copy(&mut self, from: (&Named, u64), len: u64, to: Option<(&Named, u64)>) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        let mut done = 0;
        while done < len {
            let step = (len - done).min(CHUNK_BYTES as u64);
            let chunk = &mut self.chunk[..step as usize];
            from.0.read(from.1 + done, chunk)?;
            hasher.update(chunk);
            if let Some((to, at)) = to {
                to.write(at + done, chunk)?;
            }
            done += step;
            (self.progress)(step)?;
        }
        Ok(hasher.finalize())
    }
}
