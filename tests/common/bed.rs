//! A directory with a model that is packed, unpacked and verified, for tests.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use les::pack::{self, Layout, Packed, Source};
use les::{Error, Result};
use parking_lot::RwLock;

use super::gguf::Gguf;

const PATTERN: u32 = 2_654_435_761;

/// The file, no two places of whose data are alike.
pub fn patterned(gguf: &Gguf) -> Vec<u8> {
    let mut bytes = gguf.bytes();
    let end = gguf.header().len();
    let data = end.next_multiple_of(gguf.alignment as usize);
    for (i, byte) in bytes.iter_mut().enumerate().skip(data) {
        *byte = ((i as u32).wrapping_mul(PATTERN) >> 24) as u8;
    }
    // the gaps between tensors are zero
    let mut at = data;
    for t in &gguf.tensors {
        at += t.bytes as usize;
        let next = at.next_multiple_of(gguf.alignment as usize).min(bytes.len());
        bytes[at..next].fill(0);
        at = next;
    }
    bytes
}

/// A program that is being started holds for a moment what is locked here: none is while something is packed.
pub static STARTING: RwLock<()> = RwLock::new(());

/// A directory with a model.
pub struct Bed {
    pub dir: tempfile::TempDir,
    pub source: PathBuf,
}

impl Bed {
    pub fn new(gguf: &Gguf) -> Self {
        Self::of_bytes(&patterned(gguf))
    }

    pub fn of_bytes(bytes: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("model.gguf");
        fs::write(&source, bytes).unwrap();
        Self { dir, source }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Packs with a progress that fails at the call of that number, from 0.
    pub fn pack_until(&self, name: &str, split: Option<u64>, calls: usize) -> Result<Packed> {
        let _none = STARTING.read_recursive();
        let source = Source::open(&self.source)?;
        let layout = Layout::new(&source, &self.path(name), split, None)?;
        let mut left = calls;
        pack::pack(&source, &layout, None, &mut |_| {
            left = left.checked_sub(1).ok_or_else(|| Error::Invalid("killed".into()))?;
            Ok(())
        })
    }

    pub fn pack(&self, name: &str) -> PathBuf {
        self.pack_until(name, None, usize::MAX).unwrap();
        self.path(name)
    }

    pub fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.dir.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "model.gguf").collect();
        names.sort();
        names
    }
}

pub fn unpack(from: &Path, to: &Path) -> Result<pack::Unpacked> {
    let _none = STARTING.read_recursive();
    pack::unpack(from, to, &mut |_| Ok(()))
}

/// What is damaged, as text.
pub fn verify(path: &Path) -> Result<Vec<String>> {
    let mut seen = 0;
    let verified = pack::verify(path, &mut |bytes| {
        seen += bytes;
        Ok(())
    })?;
    assert_eq!(seen, pack::total_bytes(path)?);
    Ok(verified.damage.iter().map(ToString::to_string).collect())
}

/// Runs the program.
pub fn les(args: &[&str]) -> Output {
    let _one = STARTING.write();
    Command::new(env!("CARGO_BIN_EXE_les")).args(args).output().unwrap()
}
