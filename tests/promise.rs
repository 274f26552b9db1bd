//! What one model will take of the machine's memory is not another's to take. Alone in its process: all models count.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::expect_used)]

#[path = "common/gguf.rs"]
mod gguf;

use std::fs::File;
use std::path::{Path, PathBuf};

use les::memory;
use les::model::Model;
use les::options::{CacheSize, Mode, Options};

/// A model with so many bytes of experts, none of which take room on the disk.
fn file(dir: &Path, name: &str, bytes: u64) -> PathBuf {
    const EXPERTS: u64 = 64;
    let columns = bytes / EXPERTS / 4;
    let model = gguf::Gguf::new().text("general.architecture", "qwen3moe").u32("qwen3moe.expert_used_count", 1).tensor(
        "blk.0.ffn_up_exps.weight",
        0,
        &[columns, 1, EXPERTS],
        4 * columns * EXPERTS,
    );
    let path = dir.join(name);
    std::fs::write(&path, model.header()).unwrap();
    let header = (model.header().len() as u64).next_multiple_of(32);
    File::options().write(true).open(&path).unwrap().set_len(header + 4 * columns * EXPERTS).unwrap();
    path
}

#[test]
fn what_is_promised_is_not_available() {
    let Some(memory) = memory::available() else { return };
    let dir = tempfile::tempdir().unwrap();
    let part = |part: f64| (memory as f64 * part) as u64;
    let [first, large, small] = [("first", 0.9), ("large", 0.6), ("small", 0.2)]
        .map(|(name, size)| Model::open(&file(dir.path(), name, part(size))).unwrap());
    let streams = |model: &Model| model.decide(&Options::default()).unwrap().streams;
    let budget = Options { mode: Mode::On, cache: CacheSize::Bytes(part(0.5)), ..Options::default() };

    assert!(!streams(&large) && !streams(&small));
    assert!(first.decide(&budget).unwrap().streams);
    assert!(streams(&large), "the first model's cache was not counted");
    assert!(!streams(&small), "the first model's cache was counted twice");
    // asked again: its own promise is not in its way
    assert!(first.decide(&budget).unwrap().streams);
    assert!(!streams(&small), "the first model's cache was counted twice");

    // now its arena stands for it
    first.streamer().unwrap();
    assert!(streams(&large) && !streams(&small));
    drop(first);
    assert!(!streams(&large));

    // a model that will not stream takes nothing; an automatic cache is promised the least it needs
    let off = Options { mode: Mode::Off, ..Options::default() };
    let second = Model::open(&file(dir.path(), "second", part(0.9))).unwrap();
    second.decide(&budget).unwrap();
    second.decide(&off).unwrap();
    assert!(!streams(&large));
    second.decide(&budget).unwrap();
    drop(second);
    assert!(!streams(&large));
}
