//! `les inspect`, run as users run it.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/gguf.rs"]
mod gguf;

use std::path::Path;
use std::process::{Command, Output};

use gguf::Gguf;

fn inspect(path: &Path, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_les")).arg("inspect").arg(path).args(flags).output().unwrap()
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_table_for_people() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Gguf::moe(2, 8, 3).write(&path);
    let text = stdout(inspect(&path, &[]));
    for line in [
        "model     tiny (qwen3moe)",
        "experts   8 x 2 layers, 3 used per token",
        "up      q8_0             16      2.12 KiB     34.00 KiB",
        "down    f16              16      4.00 KiB     64.00 KiB",
        "smallest cache        1 MiB  --les-cache 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line:?} is not in:\n{text}");
    }
}

#[test]
fn json_for_programs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Gguf::moe(2, 8, 3).write(&path);
    let json: serde_json::Value = serde_json::from_str(&stdout(inspect(&path, &["--json"]))).unwrap();
    let expert = 2 * 32 * 68 + 64 * 64;
    for (key, value) in [
        ("n_layers", 2),
        ("n_expert", 8),
        ("n_expert_used", 3),
        ("dense_bytes", 2 * 64 * 4 * 8),
        ("expert_bytes", 2 * 8 * expert),
        ("largest_expert_bytes", expert),
        ("token_bytes", 2 * 3 * expert),
    ] {
        assert_eq!(json[key], value, "{key}");
    }
    assert_eq!((&json["arch"], &json["name"]), (&"qwen3moe".into(), &"tiny".into()));
    assert_eq!(json["files"][0]["path"], path.to_str().unwrap());
    assert_eq!(json["tensors"].as_array().unwrap().len(), 6);
    let first = &json["tensors"][0];
    assert_eq!(
        (&first["part"], &first["type"], &first["expert_bytes"]),
        (&"up".into(), &"q8_0".into(), &(32 * 68).into())
    );
}

#[test]
fn a_dense_model_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Gguf::new().text("general.architecture", "llama\u{1b}[31m").tensor("t", 0, &[32], 128).write(&path);
    let text = stdout(inspect(&path, &[]));
    assert!(text.contains("nothing would stream"), "{text}");
    assert!(!text.contains('\u{1b}'), "the file's control characters reach the terminal");
}

#[test]
fn errors_go_to_stderr() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, "text").unwrap();
    let output = inspect(&path, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("les: ") && text.contains("m.gguf: not a usable GGUF file"), "{text}");
}
