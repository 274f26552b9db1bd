//! The profile: what was learned while a model ran, for its next run.
//!
//! One JSON object: the model that it is of, how often predictions came true, and what is known of every expert, its value
//! included. It holds hints only: whatever it says, the results are the same.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::calibration::Calibration;
use super::keep::Keep;
use super::trace::{TraceLayer, layers};
use crate::error::{Error, Result};
use crate::index::Index;

/// The version of the format.
const VERSION: u32 = 2;
/// How every profile begins, damaged or not: nothing else is ever written over.
const BEGINNING: &[u8] = br#"{"les_profile":"#;
/// No profile is larger, not even of the most experts that llama.cpp takes.
const MOST_BYTES: u64 = 256 << 20;

/// What was learned.
#[derive(Debug)]
pub struct Learned {
    /// By distance, as far as was looked ahead.
    pub(super) calibrations: Vec<Calibration>,
    /// What the experts are worth keeping.
    pub keep: Keep,
}

impl Learned {
    /// How likely an expert is to be picked that was predicted so many layers ahead, from 1, bin by bin of its score's
    /// distance to the least one that would be picked. Empty where it was never looked so far.
    pub fn probabilities(&self, distance: usize) -> Vec<f32> {
        let calibration = distance.checked_sub(1).and_then(|at| self.calibrations.get(at));
        calibration.map_or_else(Vec::new, |calibration| calibration.probabilities().to_vec())
    }
}

/// Why a file is no use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unfit {
    /// It is a profile, and may be written anew; what is wrong.
    Damaged(String),
    /// It is something else, which must stay; what it is.
    Foreign(String),
}

/// Which model a profile is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    arch: String,
    name: String,
    file_bytes: Vec<u64>,
    layers: Vec<TraceLayer>,
}

impl Identity {
    fn of(index: &Index) -> Self {
        Self {
            arch: index.arch.clone(),
            name: index.name.clone(),
            file_bytes: index.files.iter().map(|file| file.size).collect(),
            layers: layers(index),
        }
    }
}

/// What the file holds; borrowed to be written, owned when read.
#[derive(Serialize, Deserialize)]
struct Contents<I, C, K> {
    les_profile: u32,
    /// The model's file name, for people.
    model: String,
    identity: I,
    calibrations: C,
    keep: K,
}

#[derive(Deserialize)]
struct Version {
    les_profile: u32,
}

/// What every version has.
#[derive(Deserialize)]
struct Whose {
    model: String,
    identity: Identity,
}

/// Reads what a profile of the model of `index` holds.
///
/// # Errors
/// What the bytes are instead.
pub fn parse(bytes: &[u8], index: &Index) -> Result<Learned, Unfit> {
    parse_for(bytes, &Identity::of(index))
}

fn parse_for(bytes: &[u8], identity: &Identity) -> Result<Learned, Unfit> {
    if bytes.iter().zip(BEGINNING).any(|(a, b)| a != b) {
        return Err(Unfit::Foreign("not a profile of --les-profile".into()));
    }
    let damaged = |e: serde_json::Error| Unfit::Damaged(e.to_string());
    let Version { les_profile } = serde_json::from_slice(bytes).map_err(damaged)?;
    if les_profile > VERSION {
        return Err(Unfit::Foreign(format!("a profile of version {les_profile}, not {VERSION}")));
    }
    let whose: Whose = serde_json::from_slice(bytes).map_err(damaged)?;
    if whose.identity != *identity {
        return Err(Unfit::Foreign(format!("a profile of another model ({:?})", whose.model)));
    }
    if les_profile < VERSION {
        return Err(Unfit::Damaged(format!("its version is {les_profile}, not {VERSION}")));
    }
    let read: Contents<Identity, Vec<Calibration>, Keep> = serde_json::from_slice(bytes).map_err(damaged)?;
    let n_expert: Vec<usize> = identity.layers.iter().map(|layer| layer.n_expert as usize).collect();
    if read.calibrations.len() > super::MAX_DEPTH || !read.calibrations.iter().all(Calibration::is_sound) {
        return Err(Unfit::Damaged("calibrations that cannot be".into()));
    }
    if !read.keep.fits(&n_expert) {
        return Err(Unfit::Damaged("experts' statistics that cannot be".into()));
    }
    Ok(Learned { calibrations: read.calibrations, keep: read.keep })
}

/// The file of a profile.
pub struct Profile {
    path: PathBuf,
    /// The model's file name.
    model: String,
    identity: Identity,
    knew: bool,
    /// The file is something else.
    foreign: bool,
    notice: Option<String>,
}

impl Profile {
    /// The profile at `path` of the model of `index`, and what it holds if it is there.
    pub fn open(path: &Path, index: &Index) -> (Self, Option<Learned>) {
        let mut profile = Self {
            // a link stays one, and the working directory may change until the end
            path: path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned()),
            model: index.model_name(),
            identity: Identity::of(index),
            knew: false,
            foreign: false,
            notice: None,
        };
        match profile.found() {
            Some(Ok(learned)) => {
                profile.knew = true;
                return (profile, Some(learned));
            }
            None => {
                if !directory(&profile.path).is_dir() {
                    profile.tell("its directory does not exist; nothing will be kept unless you make it".into());
                }
            }
            Some(Err(Unfit::Damaged(why))) => {
                profile.tell(format!(
                    "a damaged profile ({why}); learning begins anew, and it is written anew at the end"
                ));
            }
            Some(Err(Unfit::Foreign(what))) => {
                profile.foreign = true;
                profile.tell(format!(
                    "{what}; it is not used and stays as it is: give --les-profile another file, or delete it"
                ));
            }
        }
        (profile, None)
    }

    /// What the file holds now. `None` without one.
    fn found(&self) -> Option<Result<Learned, Unfit>> {
        match read(&self.path) {
            Ok(bytes) => Some(parse_for(&bytes, &self.identity)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => Some(Err(Unfit::Foreign(format!("cannot be read: {e}")))),
        }
    }

    fn tell(&mut self, what: String) {
        self.notice = Some(format!("{}: {what}", self.path.display()));
    }

    /// What the user should know. `None` when all is as it should be.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Whether it was there.
    pub fn knew(&self) -> bool {
        self.knew
    }

    /// Writes the file, at once or not at all; answers whether it is this model's to write.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written, or has become something else since it was opened.
    pub(super) fn save(&self, calibrations: &[Calibration], keep: &Keep) -> Result<bool> {
        if self.foreign {
            return Ok(false);
        }
        let failed = |source| Error::File { path: self.path.clone(), what: "write the profile", source };
        // another model may have been given the same file meanwhile
        if let Some(Err(Unfit::Foreign(what))) = self.found() {
            return Err(failed(io::Error::other(what)));
        }
        replace(&self.path, |out| self.write(out, calibrations, keep)).map_err(failed)?;
        Ok(true)
    }

    fn write(&self, out: impl Write, calibrations: &[Calibration], keep: &Keep) -> io::Result<()> {
        let (model, identity) = (self.model.clone(), &self.identity);
        Ok(serde_json::to_writer(out, &Contents { les_profile: VERSION, model, identity, calibrations, keep })?)
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// The bytes of the file, if it can be a profile by its kind and size.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    // asked before it is opened: a pipe would wait for a writer
    let found = fs::metadata(path)?;
    match (found.is_file(), found.len()) {
        (true, 0..=MOST_BYTES) => fs::read(path),
        (true, _) => Err(io::Error::other("larger than any profile")),
        (false, _) => Err(io::Error::other("not a regular file")),
    }
}

/// Puts what `write` writes in place of the file at `path`, when it is whole.
fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>) -> io::Result<()> {
    // a name that no other process, container or thread has; a library for it would take memory that the main thread of
    // a C program never gives back
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}-{}.part", std::process::id(), since.as_nanos()));
    let part = path.with_file_name(name);
    let file = File::create_new(&part)?;
    let mut out = BufWriter::new(&file);
    let whole = write(&mut out).and_then(|()| out.flush()).and_then(|()| file.sync_all());
    whole.and_then(|()| fs::rename(&part, path)).inspect_err(|_| drop(fs::remove_file(&part)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
