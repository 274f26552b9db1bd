//! `les report`, with scripts in llama-perplexity's place.
#![cfg(all(feature = "cli", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;

use gguf::Gguf;
use tempfile::TempDir;

/// The command, on a model and with a program that gets the file of the logits as `$logits`.
fn report(dir: &TempDir, script: &str) -> Command {
    let at = |name: &str| dir.path().join(name);
    Gguf::moe(1, 2, 1).write(at("m.gguf"));
    fs::write(at("text.txt"), "text").unwrap();
    fs::create_dir(at("scratch")).unwrap();
    // -m MODEL -c N --kl-divergence-base FILE
    fs::write(at("perplexity"), format!("#!/bin/sh\nlogits=$6\n{script}\n")).unwrap();
    fs::set_permissions(at("perplexity"), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_les"));
    command.arg("report").args([at("m.gguf"), at("m.gguf"), at("text.txt")]).args(["-c", "128"]);
    command.arg("--llama-perplexity").arg(at("perplexity")).arg("--scratch").arg(at("scratch"));
    command
}

/// What it says when it fails. Nothing is left behind.
fn failure(script: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let done = report(&dir, script).output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert_eq!(fs::read_dir(dir.path().join("scratch")).unwrap().count(), 0);
    String::from_utf8(done.stderr).unwrap()
}

#[test]
fn a_text_that_is_too_short_is_named() {
    let text = failure("printf '_logits_\\200\\0\\0\\0' >$logits");
    for word in ["text.txt: this text is too short", "128 tokens it needs 256", "--ctx-size"] {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn a_full_disk_is_not_taken_for_a_wrong_model() {
    // 128 tokens in the context, 4096 in the vocabulary, 8 contexts; and nothing but the beginning
    let whole = r"printf '_logits_\200\0\0\0\0\20\0\0\10\0\0\0' >$logits";
    for script in [whole, ": >$logits"] {
        let text = failure(script);
        for word in ["scratch: the logits of the base take", "could be written", "another --scratch"] {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
    }
    assert!(failure(whole).contains("take 4 MiB"));
    assert!(failure("exit 0").contains("logits: No such file"));
}

#[test]
fn an_interrupted_report_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let started = dir.path().join("started");
    let script = format!("echo x >$logits; echo x >{}; exec sleep 60", started.display());
    let mut running = report(&dir, &script).process_group(0).stderr(Stdio::null()).spawn().unwrap();
    while !started.exists() {
        assert!(running.try_wait().unwrap().is_none(), "it ended by itself");
        thread::yield_now();
    }
    // to all of them, as a terminal does
    let group = format!("-{}", running.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    assert!(!running.wait().unwrap().success());
    assert_eq!(fs::read_dir(dir.path().join("scratch")).unwrap().count(), 0);
}

/// The perplexity of the base is that of the last table, as what is said while it runs may end too early.
#[test]
fn what_was_said_of_both_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let table = "Mean PPL(Q): 26.5 +- 1\nMean PPL(base): 26.25 +- 1\nMean KLD: 0.5 +- 0.25\n99.9% KLD: 2\nSame top p: 97.5 +- 0.5 %";
    let logits =
        r"printf '_logits_\4\0\0\0\2\0\0\0\1\0\0\0' >$logits; head -c 100 /dev/zero >>$logits; printf '[1]1.0,'";
    let script = |table: &str| format!("case $* in *--kl-divergence) printf '{table}' ;; *) {logits} ;; esac");
    let done = report(&dir, &script(&table.replace('%', "%%").replace('\n', "\\n"))).arg("--json").output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let rows: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!((&rows[0]["perplexity"], &rows[1]["perplexity"]), (&26.25.into(), &26.5.into()));
    assert!(failure(&script("Mean PPL(Q): 26.5")).contains("give the command again"));
}
