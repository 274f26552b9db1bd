//! Files that are there when they are whole, and not before: written under another name, which they lose at the end.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::copy::Named;
use crate::error::{Error, Result};
use crate::options::Size;

/// A file that is being written. It is locked against other runs.
#[derive(Debug)]
pub(super) struct Output {
    /// Under its name for the time being.
    pub(super) temporary: Named,
    target: PathBuf,
}

/// The name that a file has until it is whole.
pub(super) fn temporary_path(target: &Path) -> PathBuf {
    let mut name = OsString::from(target.as_os_str());
    name.push(".unfinished");
    name.into()
}

impl Output {
    /// Opens the file that will be `target`, with what is there of it, if there is no file of that name.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is one, or another run is at it.
    pub(super) fn claim(target: &Path) -> Result<Self> {
        refuse_existing(target)?;
        Self::open(target)?.new_name()
    }

    /// Opens the file that will be `target`, with what is there of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another run is at it.
    pub(super) fn open(target: &Path) -> Result<Self> {
        let path = temporary_path(target);
        let failed = |source| Error::File { path: path.clone(), what: "open for writing", source };
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        match fs4::FileExt::try_lock(&file) {
            Err(fs4::TryLockError::WouldBlock) => {
                return Err(Error::Invalid(format!("{}: another run is writing this file", target.display())));
            }
            // a file system without locks
            Err(fs4::TryLockError::Error(_)) | Ok(()) => {}
        }
        Ok(Self { temporary: Named { file, path }, target: target.to_owned() })
    }

    /// Itself, if there is no file of the name that it will have: not even of a run that has just ended.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is one.
    pub(super) fn new_name(self) -> Result<Self> {
        refuse_existing(&self.target)?;
        Ok(self)
    }

    /// Whether it begins with `header`, as what an earlier run of the same command has left does.
    ///
    /// # Errors
    /// [`Error::Invalid`] when something else is there, which may be the work of hours, or a file that is read for this one.
    pub(super) fn begins_with(&self, header: &[u8]) -> Result<bool> {
        let there = &self.temporary;
        let len = there.file.metadata().map_err(there.error("inspect"))?.len();
        let begin = there.bytes(0, len.min(header.len() as u64) as usize)?;
        // ended while the header was written, or before it reached the device
        if !header.starts_with(&begin) && begin.iter().any(|&byte| byte != 0) {
            return Err(Error::Invalid(format!(
                "{}: this is no unfinished work of the same command, but of one with other options, or another file; give \
                 the same command to go on with it, or remove it, or give another name for the output",
                there.path.display()
            )));
        }
        Ok(begin == header)
    }

    /// Removes it: there is nothing in it that a later run could use.
    pub(super) fn discard(self) {
        // at worst it is in the way of nothing
        let _ = fs::remove_file(&self.temporary.path);
    }
}

/// A name that is kept from other runs while it is found out what will be written: that may take hours. Nothing may be
/// written in one file under the name before this is dropped.
#[derive(Debug)]
pub struct Reservation(Output);

impl Reservation {
    /// Reserves `target`; with `split` as the name from which those of shards are made.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the file or the first of the shards is there, or another run is at it; [`Error::File`] when
    /// nothing can be written there.
    pub fn new(target: &Path, split: bool) -> Result<Self> {
        let reserved = Self(Output::open(target)?);
        match split {
            // it gets its name when all others have theirs
            true => first_shards(target)?.iter().try_for_each(|shard| refuse_existing(shard))?,
            false => refuse_existing(target)?,
        }
        Ok(reserved)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let there = &self.0.temporary;
        if there.file.metadata().is_ok_and(|meta| meta.len() == 0) {
            let _ = fs::remove_file(&there.path);
        }
    }
}

/// The first shards that are there of a model of this name.
fn first_shards(target: &Path) -> Result<Vec<PathBuf>> {
    let directory = directory_of(target);
    let failed = |source| Error::File { path: directory.to_owned(), what: "list", source };
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let count = name.to_str().and_then(|name| name.strip_suffix(".gguf")?.rsplit_once("-of-")?.1.parse().ok());
        if count.is_some_and(|count| super::layout::shard_path(target, 0, count).file_name() == Some(&name)) {
            found.push(directory.join(name));
        }
    }
    Ok(found)
}

fn refuse_existing(target: &Path) -> Result<()> {
    match fs::symlink_metadata(target) {
        Ok(_) => {
            let why = "this file exists; remove it, or give another name";
            Err(Error::Invalid(format!("{}: {why}", target.display())))
        }
        Err(_) => Ok(()),
    }
}

/// Gives the files, which are whole, their names: the first one last, because without it the others are no model.
pub(super) fn publish(outputs: &[Output]) -> Result<()> {
    for Output { temporary, .. } in outputs {
        temporary.file.sync_all().map_err(temporary.error("write"))?;
    }
    for Output { temporary, target } in outputs.iter().rev() {
        fs::rename(&temporary.path, target).map_err(temporary.error("rename"))?;
        sync_directory(target)?;
    }
    Ok(())
}

/// Makes a new name last.
fn sync_directory(target: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        let directory = Named::open(directory_of(target))?;
        directory.file.sync_all().map_err(directory.error("write"))?;
    }
    #[cfg(not(unix))]
    let _ = target;
    Ok(())
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// How much room there is where `target` will be, in bytes.
///
/// # Errors
/// [`Error::File`] when the system does not tell.
pub fn room(target: &Path) -> Result<u64> {
    let directory = directory_of(target);
    fs4::available_space(directory).map_err(|source| Error::File {
        path: directory.to_owned(),
        what: "ask for the free space of",
        source,
    })
}

/// Fails when there is no room for so many bytes.
pub(super) fn need_room(target: &Path, bytes: u64) -> Result<()> {
    let room = room(target)?;
    if bytes <= room {
        return Ok(());
    }
    let (need, room, at) = (Size(bytes), Size(room), directory_of(target).display());
    Err(Error::Invalid(format!("{at}: {need} more are needed, but only {room} are free; make room or write elsewhere")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is_room_for_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("p.gguf");
        need_room(&target, room(&target).unwrap() / 2).unwrap();
        let text = need_room(&target, u64::MAX).unwrap_err().to_string();
        assert!(text.contains(dir.path().to_str().unwrap()) && text.contains("make room"), "{text}");
        assert!(matches!(room(&dir.path().join("absent/p.gguf")), Err(Error::File { .. })));
    }
}
