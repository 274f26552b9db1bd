//! `les plan`, run as users run it, with figures that are given: nothing is measured.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/gguf.rs"]
mod gguf;

use std::path::Path;
use std::process::{Command, Output};

use gguf::Gguf;
use serde_json::Value;

const MODEL: &str = "tests/data/docmoe-53m-q4_k_m.gguf";
const TRACE: &str = "tests/data/docmoe-routing.jsonl";
const FIGURES: [&str; 4] = ["--bandwidth", "500", "--compute", "2"];

fn plan(model: impl AsRef<Path>, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_les")).arg("plan").arg(model.as_ref()).args(flags).output().unwrap()
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(model: impl AsRef<Path>, flags: &[&str]) -> Value {
    let flags = [&FIGURES[..], flags, &["--json"]].concat();
    serde_json::from_str(&stdout(plan(model, &flags))).unwrap()
}

fn numbers(report: &Value, keys: &[&str]) -> Vec<f64> {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().map(|row| keys.iter().fold(row, |value, key| &value[key]).as_f64().unwrap()).collect()
}

#[test]
fn given_figures_give_the_same_plan_every_time() {
    let flags = [&FIGURES[..], &["--memory", "340M"]].concat();
    let text = stdout(plan(MODEL, &flags));
    assert_eq!(text, stdout(plan(MODEL, &flags)));
    for part in ["340.00 MiB  available", "500 MB/s and 150 us per read, given", "recommended: --les-cache ", "100%"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains("estimate"), "nothing was:\n{text}");
}

#[test]
fn the_model_and_its_trace_agree() {
    for flags in [&["--memory", "340M"][..], &["--memory", "340M", "--trace", TRACE]] {
        let report = json(MODEL, flags);
        let sizes = numbers(&report, &["cache_bytes"]);
        assert_eq!(
            (sizes[0], sizes[sizes.len() - 1]),
            (report["floor_bytes"].as_f64().unwrap(), report["all_bytes"].as_f64().unwrap())
        );
        assert!(sizes.len() > 5 && sizes.is_sorted());
        assert!(numbers(&report, &["tokens_per_s"]).is_sorted(), "{report}");
        let hits = numbers(&report, &["without", "hit_rate"]);
        assert!(hits.is_sorted() && hits[0] < 0.6 && hits[hits.len() - 1] > 0.9, "{hits:?}");
        let left = 340.0 * 1048576.0 - report["dense_bytes"].as_f64().unwrap();
        assert!(report["advice"]["cache_bytes"].as_f64().unwrap() <= left, "{}", report["advice"]);
        // the trace is from before guesses were traced
        assert_eq!(report["rows"][0]["lookahead"].is_null(), flags.len() > 2);
        assert_eq!(report["advice"]["les_lookahead"], "auto");
    }
}

#[test]
fn only_the_sizes_that_are_asked_for_and_that_of_auto() {
    let report = json(MODEL, &["--memory", "345M", "--cache", "30%,8M", "--cache", "min"]);
    let (all, sizes) = (report["all_bytes"].as_f64().unwrap(), numbers(&report, &["cache_bytes"]));
    let auto = report["auto_bytes"].as_f64().unwrap();
    let mut want = [report["floor_bytes"].as_f64().unwrap(), (0.3 * all).floor(), 8_388_608.0, auto];
    want.sort_by(f64::total_cmp);
    assert_eq!(sizes, want);
}

#[test]
fn a_model_that_fits_does_not_stream_and_one_without_experts_never_does() {
    let fits = json(MODEL, &["--memory", "4G"]);
    assert!(fits["advice"]["why"].as_str().unwrap().contains("fits"), "{fits}");
    assert!(fits["advice"]["les_cache"].is_null());
    let little = json(MODEL, &["--memory", "3M"]);
    assert!(little["advice"]["why"].as_str().unwrap().contains("does not fit"), "{little}");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dense.gguf");
    Gguf::new().text("general.architecture", "llama").tensor("t", 0, &[32], 128).write(&path);
    // neither is anything measured
    let text = stdout(plan(&path, &[]));
    assert!(text.contains("no routed experts") && !text.contains("recommended"), "{text}");
    assert!(json(&path, &[])["rows"].as_array().unwrap().is_empty());
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (flags, named) in [
        (&["--bandwidth", "0"][..], "--bandwidth"),
        (&["--bandwidth=-5"], "--bandwidth"),
        (&["--bandwidth", "NaN"], "--bandwidth"),
        (&["--bandwidth", "1e300"], "--bandwidth"),
        (&["--compute", "0"], "--compute"),
        (&["--compute", "inf"], "--compute"),
        (&["--memory", "0"], "--memory"),
        (&["--memory", "x"], "--memory"),
        (&["--bandwidth", "1", "--compute", "1", "--cache", "1K"], "at least"),
        (&["--cache", "101%"], "--cache"),
        (&["--trace", "README.md", "--bandwidth", "1", "--compute", "1"], "README.md"),
    ] {
        let output = plan(MODEL, flags);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(named), "{flags:?}: {text}");
    }
}

#[test]
fn another_models_trace_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Gguf::moe(2, 8, 3).write(&path);
    let output = plan(&path, &[&FIGURES[..], &["--trace", TRACE]].concat());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("docmoe"), "{text}");
}
