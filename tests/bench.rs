//! `les bench`, run as users run it.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Output};

/// On a file of so many bytes.
fn bench(bytes: usize, size: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; bytes]).unwrap();
    Command::new(env!("CARGO_BIN_EXE_les"))
        .args(["bench", "--json", "--seconds", "0.05", "--depth", "1,2", "--io", "pread", "--size", size])
        .arg(path)
        .output()
        .unwrap()
}

#[test]
fn it_measures() {
    let output = bench(1 << 20, "1,64K,256K");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let sizes: Vec<_> = rows.as_array().unwrap().iter().map(|row| row["sizes"][0].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1, 1, 64 << 10, 64 << 10, 256 << 10, 256 << 10]);
    assert!(rows.as_array().unwrap().iter().all(|row| row["reads_per_s"].as_f64().unwrap() > 0.0), "{rows}");
}

#[test]
fn files_that_are_too_small_are_refused() {
    // whole blocks are read, whatever is asked for
    for (bytes, size) in [(0, "1"), (100, "1"), (700, "100"), (100_000, "64K"), (100_000, "4G")] {
        let output = bench(bytes, size);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("smaller than two reads"), "{text}");
    }
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for size in ["0", "x", "3T", "40%", "auto", "99999999999G"] {
        let output = bench(1 << 20, size);
        assert!(!output.status.success(), "{size}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("--size"), "{size}");
    }
}

#[test]
fn it_measures_the_device_that_faults_make() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    for (plan, engine) in [("rate@100", Some("fault")), ("eio@2", None), ("rate@0", None)] {
        let output = Command::new(env!("CARGO_BIN_EXE_les"))
            .args(["bench", "--json", "--seconds", "0.05", "--depth", "2", "--io", "pread", "--size", "64K"])
            .arg(&path)
            .env("LES_FAULT", plan)
            .output()
            .unwrap();
        let rows: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        assert_eq!(rows.as_ref().and_then(|rows| rows[0]["engine"].as_str()), engine, "{plan}");
        assert_eq!(output.status.success(), engine.is_some(), "{plan}");
    }
}
