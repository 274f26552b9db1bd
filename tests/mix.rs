//! What requantizing reads: importance matrices, traces and recordings of inputs.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::path::Path;

use gguf::Gguf;
use les::Error;
use les::index::{ExpertTensor, Index};
use les::inputs::Recorder;
use les::pack::mix::{Imatrix, Recording, Uses};

const NAME: &str = "blk.0.ffn_up_exps.weight";

/// An importance matrix of [`NAME`], with these sums and counts.
fn imatrix(columns: usize, sums: &[f32], counts: &[f32]) -> Vec<u8> {
    let n = counts.len() as u64;
    let gguf = Gguf::new().text("general.type", "imatrix").tensor(&format!("{NAME}.counts"), 0, &[1, n], 4 * n).tensor(
        &format!("{NAME}.in_sum2"),
        0,
        &[columns as u64, n],
        4 * sums.len() as u64,
    );
    let mut bytes = gguf.header();
    for floats in [counts, sums] {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        floats.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
    }
    bytes
}

/// A tensor of 32 rows and three experts, of which two are used.
fn tensor(columns: u64) -> ExpertTensor {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    Gguf::new()
        .text("general.architecture", "qwen3moe")
        .u32("qwen3moe.expert_used_count", 2)
        .tensor(NAME, 0, &[columns, 32, 3], columns * 32 * 3 * 4)
        .write(&path);
    Index::open(&path).unwrap().tensors.remove(0)
}

fn with<T>(bytes: &[u8], then: impl FnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("i.gguf");
    fs::write(&path, bytes).unwrap();
    then(&path)
}

/// What is wrong with it for a model of two columns.
fn refusal(bytes: &[u8]) -> String {
    let read = |path: &Path| {
        let imatrix = Imatrix::open(path)?;
        let tensor = tensor(2);
        let inputs = imatrix.of(&tensor, 2)?.ok_or_else(|| Error::Invalid(format!("nothing of {NAME} in i.gguf")))?;
        (0..3).try_for_each(|expert| inputs.expert(expert).map(|_| ()))
    };
    with(bytes, |path| read(path).unwrap_err().to_string())
}

#[test]
fn inputs_are_means_over_the_tokens_of_an_expert() {
    let bytes = imatrix(2, &[6.0, 3.0, 0.0, 0.0, 4.0, 5.0], &[3.0, 0.0, 1.0]);
    with(&bytes, |path| {
        let imatrix = Imatrix::open(path).unwrap();
        assert_eq!((imatrix.name().as_str(), imatrix.crc32), ("i.gguf", crc32fast::hash(&bytes)));
        // four picks, two to a token
        let tensor = tensor(2);
        let inputs = imatrix.of(&tensor, 2).unwrap().unwrap();
        let input = |expert| inputs.expert(expert).map(|i| (i.mean_square, i.share)).unwrap();
        assert_eq!(input(0), (vec![2.0, 1.0], 1.5));
        assert_eq!(input(2), (vec![4.0, 5.0], 0.5));
        // the mean of all picks, as often as an expert was picked that was
        assert_eq!(input(1), (vec![2.5, 2.0], 1.0));
    });
}

#[test]
fn what_is_no_importance_matrix_of_the_model_is_refused() {
    let sums = [1.0; 6];
    for (bytes, words) in [
        (imatrix(2, &sums, &[0.0; 3]), vec![NAME, "reached none", "longer text"]),
        (imatrix(2, &[1.0; 4], &[1.0; 2]), vec![NAME, "another shape", "llama-imatrix"]),
        (imatrix(3, &[1.0; 9], &[1.0; 3]), vec![NAME, "another shape"]),
        (imatrix(2, &[1.0, 1.0, f32::NAN, 1.0, 1.0, 1.0], &[1.0; 3]), vec![NAME, "in_sum2", "not finite"]),
        (imatrix(2, &[1.0, 1.0, -1.0, 1.0, 1.0, 1.0], &[1.0; 3]), vec![NAME, "in_sum2", "negative"]),
        (imatrix(2, &sums, &[1.0, f32::INFINITY, 1.0]), vec![NAME, "counts", "not finite"]),
        (Gguf::moe(1, 3, 1).bytes(), vec!["no importance matrix", "llama-imatrix"]),
        (b"\x01\0\0\0blk.0".to_vec(), vec!["--in-file OLD.dat -o NEW.gguf"]),
        (Vec::new(), vec!["no importance matrix"]),
    ] {
        let text = refusal(&bytes);
        assert!(text.contains("i.gguf") && words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }
    let mut other = imatrix(2, &sums, &[1.0; 3]);
    while let Some(at) = other.windows(NAME.len()).position(|w| w == NAME.as_bytes()) {
        other[at + 4] = b'1';
    }
    // a layer that is not computed
    assert!(refusal(&other).contains("nothing of"));
    with(&other, |path| assert!(!Imatrix::open(path).unwrap().knows(&[tensor(2)])));
}

#[test]
fn a_truncated_importance_matrix_is_an_error() {
    let bytes = imatrix(2, &[1.0; 6], &[1.0; 3]);
    for len in 0..bytes.len() {
        assert!(refusal(&bytes[..len]).contains("i.gguf"), "{len}");
    }
}

#[test]
fn uses_count_picks() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    Gguf::moe(2, 3, 1).write(&model);
    let index = Index::open(&model).unwrap();
    let path = dir.path().join("trace");
    let layer = |n| format!(r#"{{"layer":{n},"n_expert":3,"n_used":1,"part_bytes":[1]}}"#);
    let read = |last, records: &[&str]| {
        let header = format!(r#"{{"les_trace":1,"model":"m","layers":[{},{}]}}"#, layer(0), layer(last));
        fs::write(&path, format!("{header}\n{}\n", records.join("\n"))).unwrap();
        Uses::read(&path, &index).map_err(|e| e.to_string())
    };
    let first = r#"{"at":0,"rows":3,"picks":[0,2,2],"scores":[]}"#;
    let second = r#"{"at":1,"rows":1,"picks":[1],"scores":[]}"#;
    let uses = read(1, &[first, second]).unwrap();
    assert_eq!([0, 1, 2].map(|e| uses.share(0, e)), [0.5, 0.25, 0.75]);
    assert_eq!([0, 1, 2].map(|e| uses.share(1, e)), [0.5, 1.0, 0.5]);
    // a layer that is not computed
    let uses = read(1, &[first]).unwrap();
    assert_eq!((uses.share(0, 0), uses.share(1, 0)), (0.5, 1.0 / 3.0));
    assert!(read(2, &[first, second]).unwrap_err().contains("another model"));
}

/// A model of two layers with three experts, of which one is used, and a recording of it: two passes of the first layer's
/// gate and up, one token of which goes to expert 2, two to expert 0; one pass of its down.
fn recording(dir: &Path) -> (Index, Vec<u8>) {
    let model = dir.join("model.gguf");
    Gguf::moe(2, 3, 1).write(&model);
    let index = Index::open(&model).unwrap();
    let path = dir.join("inputs");
    let mut recorder = Recorder::create(&path, &index).unwrap();
    let row = |value: f32| vec![value; 64];
    let (a, b, c) = (row(1.0), row(2.0), row(3.0));
    recorder.record(0, &[2, 0], 2, &[&a, &b]);
    recorder.record(0, &[0], 1, &[&c]);
    // the same input again
    recorder.record(1, &[2, 0], 2, &[&a, &b]);
    recorder.record(2, &[1], 1, &[&[1e9; 32]]);
    assert!(recorder.close().unwrap() && !recorder.close().unwrap());
    (index, fs::read(path).unwrap())
}

#[test]
fn recorded_inputs_come_back_as_squares() {
    let dir = tempfile::tempdir().unwrap();
    let (index, _) = recording(dir.path());
    let recording = Recording::open(&dir.path().join("inputs")).unwrap();
    let square = |tensor, expert| {
        let all = recording.of(&index, tensor).unwrap().unwrap().covariance(expert).unwrap().diagonal();
        assert!(all.iter().all(|v| *v == all[0]));
        all[0]
    };
    // the layer's mean counts as often as there are columns; 1% is added
    let mean = 14.0 / 3.0;
    for (expert, rows) in [(0, vec![4.0, 9.0]), (1, vec![]), (2, vec![1.0])] {
        let sum = rows.iter().sum::<f32>() + 64.0 * mean;
        let expected = 1.01 * sum / (64.0 + rows.len() as f32);
        // up leads, and gate has the same
        for tensor in [0, 1] {
            assert!((square(tensor, expert) - expected).abs() < 1e-4, "{expert}: {}", square(tensor, expert));
        }
    }
    // down has its own; what is too large for f16 is as large as can be
    assert_eq!(square(2, 0), square(2, 1));
    assert!((square(2, 1) / (1.01 * 65504.0_f32.powi(2)) - 1.0).abs() < 1e-4);
    assert!(recording.of(&index, 3).unwrap().is_none());
    assert!(recording.knows(&index.tensors) && !recording.knows(&index.tensors[3..]));
}

#[test]
fn what_is_no_recording_of_the_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (index, bytes) = recording(dir.path());
    let refusal = |bytes: &[u8]| {
        let path = dir.path().join("other");
        fs::write(&path, bytes).unwrap();
        let recording = Recording::open(&path).map_err(|e| e.to_string())?;
        let recorded = recording.of(&index, 2).map_err(|e| e.to_string())?;
        recorded.map(|_| ()).ok_or("nothing in other".to_owned())
    };
    refusal(&bytes).unwrap();
    for len in 0..bytes.len() {
        assert!(refusal(&bytes[..len]).unwrap_err().contains("other"), "{len}");
    }
    let header = bytes.iter().position(|b| *b == b'\n').unwrap() + 1;
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        refusal(&bytes).unwrap_err()
    };
    // a tensor, a number of tokens and of rows that are not there; the pick of down's record, and its last value
    let down = bytes.len() - 4 - 64;
    for (at, byte, words) in [
        (header, 9, "damaged"),
        (header + 4, 200, "damaged"),
        (header + 12, 7, "damaged"),
        (down, 3, "experts that are not there"),
        (down + 3, 0x80, "experts that are not there"),
        (bytes.len() - 1, 0x7f, "not finite"),
    ] {
        let text = with(at, byte);
        assert!(text.contains(words) && text.contains("make it again"), "{at}: {text}");
    }
    assert!(refusal(&bytes[header..]).unwrap_err().contains("no recording of inputs"));
    let wrong = String::from_utf8_lossy(&bytes[..header]).replace("\"columns\":32", "\"columns\":16");
    assert!(refusal(wrong.as_bytes()).unwrap_err().contains("none of that shape"));
}
