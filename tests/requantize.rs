//! Packing with a target, by quantizers that stand for ggml's.
#![cfg(all(feature = "cli", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/bed.rs"]
mod bed;
#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use bed::{Bed, les, verify};
use gguf::Gguf;
use les::ffi::ggml::Ggml;
use les::index::{GgmlType, Header};
use les::model::Model;
use les::options::{Mode, Options};
use les::pack::mix::{Mix, Quantizer, Target};
use les::pack::{self, Layout, Packed, Source};
use les::{Error, Result};

/// `common/quantizers.c`, built once.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libquantizers.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/quantizers.c");
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        assert!(compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap().success());
        library
    })
}

/// A model of floats between -1 and 1: expert matrices of so many columns, down first.
fn floats(layers: u32, experts: u64, columns: u64, down: [u64; 2]) -> Bed {
    let mut gguf = Gguf::new().text("general.architecture", "qwen3moe").u32("qwen3moe.expert_used_count", 2);
    for layer in 0..layers {
        for (part, columns, rows) in [("down", down[0], down[1]), ("gate", columns, 8), ("up", columns, 8)] {
            let name = format!("blk.{layer}.ffn_{part}_exps.weight");
            gguf = gguf.tensor(&name, 0, &[columns, rows, experts], 4 * columns * rows * experts);
        }
    }
    let mut bytes = gguf.header();
    let data = bytes.len().next_multiple_of(gguf.alignment as usize);
    let end = gguf.bytes().len();
    bytes.resize(data, 0);
    let mut random = fastrand::Rng::with_seed(7);
    while bytes.len() < end {
        bytes.extend((2.0 * random.f32() - 1.0).to_le_bytes());
    }
    Bed::of_bytes(&bytes)
}

/// Packs with a target, and a progress that fails at the call of that number.
fn pack_until(bed: &Bed, name: &str, target: Target, calls: usize) -> Result<Packed> {
    let source = Source::open(&bed.source)?;
    let ggml = Ggml::open(Some(library()))?;
    let types = Some([2, 6, 8].map(GgmlType).to_vec());
    let quantizer = Quantizer { ggml, imatrix: None, recording: None, uses: None, types };
    let size = |_: &Mix| Ok(0);
    let mix = Mix::new(&source, &quantizer, target, &size, &mut |_| Ok(()))?;
    let layout = Layout::new(&source, &bed.path(name), None, Some(&mix))?;
    let mut left = calls;
    pack::pack(&source, &layout, Some(&mix), &mut |_| {
        left = left.checked_sub(1).ok_or_else(|| Error::Invalid("killed".into()))?;
        Ok(())
    })
}

#[test]
fn a_run_that_was_killed_goes_on() {
    let bed = floats(3, 6, 64, [96, 16]);
    let target = Target::Bits(6.5);
    let bytes = pack_until(&bed, "once.gguf", target, usize::MAX).unwrap().bytes;
    let once = fs::read(bed.path("once.gguf")).unwrap();
    let header = Header::open(&bed.path("once.gguf")).unwrap();
    let types: std::collections::BTreeSet<_> =
        header.packed.iter().flat_map(|layer| layer.table.rows.iter().map(|row| row.ty.0)).collect();
    assert!(types.len() > 1, "one type would be no test of a choice");
    let mut resumed = Vec::new();
    for moment in (0..3 * 18).step_by(5) {
        let text = pack_until(&bed, "p.gguf", target, moment).unwrap_err().to_string();
        assert!(text.contains("killed"), "{text}");
        assert!(bed.path("p.gguf.unfinished").exists() && !bed.path("p.gguf").exists());
        resumed.push(pack_until(&bed, "p.gguf", target, usize::MAX).unwrap().resumed_bytes);
        assert!(fs::read(bed.path("p.gguf")).unwrap() == once, "killed at {moment}");
        fs::remove_file(bed.path("p.gguf")).unwrap();
    }
    // nothing, one layer, two layers
    assert!(resumed.is_sorted() && resumed[0] == 0 && resumed.iter().all(|&n| n < bytes));
    resumed.dedup();
    assert_eq!(resumed.len(), 3);
    assert_eq!(verify(&bed.path("once.gguf")).unwrap(), [""; 0]);

    // it cannot be unpacked, so nobody is told to
    let options = Options { mode: Mode::Off, ..Options::default() };
    let text = Model::open(&bed.path("once.gguf")).unwrap().decide(&options).unwrap_err().to_string();
    assert!(text.contains("the file that it was packed from") && !text.contains("les unpack"), "{text}");
}

/// What the program says of a choice, and without a target.
#[test]
fn what_one_may_not_expect_is_told() {
    let bed = floats(1, 4, 256, [96, 16]);
    let [model, output] = [&bed.source, &bed.path("p.gguf")].map(|path| path.to_str().unwrap().to_owned());
    let said = |args: &[&str]| {
        let mut all = vec!["pack", &model, &output, "--dry-run", "--ggml", library().to_str().unwrap()];
        all.extend(args);
        let done = les(&all);
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stderr).unwrap()
    };
    let far = said(&["--shrink", "25%", "--types", "q4_K,q6_K,q4_0,q8_0"]);
    assert!(far.contains("les: --shrink 25% leaves room for") && far.contains("q6_K and q8_0"), "{far}");
    assert!(!far.contains("stays"), "{far}");
    let kept = said(&["--shrink", "40%", "--types", "q4_K"]);
    assert!(kept.contains("les: down stays f32") && kept.contains("96 values"), "{kept}");
    let near = said(&["--bpw", "4.6", "--types", "q4_K,q4_0,q8_0"]);
    assert!(!near.contains("leaves room") && !near.contains("stays"), "{near}");
}

/// However little it is.
#[test]
fn the_least_that_is_named_is_possible() {
    let bed = floats(1, 4, 32, [33, 4000]);
    let [model, output] = [&bed.source, &bed.path("p.gguf")].map(|path| path.to_str().unwrap().to_owned());
    let shrink = |percent: &str| {
        let library = library().to_str().unwrap();
        les(&["pack", &model, &output, "--dry-run", "--ggml", library, "--types", "q4_0,q8_0", "--shrink", percent])
    };
    let text = String::from_utf8(shrink("5%").stderr).unwrap();
    let least = text.split("the least is --shrink ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or(&text);
    let done = shrink(least);
    assert!(done.status.success(), "{least}: {done:?}");
}
