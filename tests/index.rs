//! Reading GGUF headers and indexing models: what is right is found, what is wrong is said.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/gguf.rs"]
mod gguf;

use std::collections::BTreeSet;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use gguf::Gguf;
use les::index::{GgmlType, Header, Index, Part, Value};
use les::{Error, Result};
use proptest::prelude::*;

fn parse(bytes: &[u8]) -> Result<Header> {
    Header::parse(Cursor::new(bytes), Path::new("m.gguf"))
}

fn index(gguf: &Gguf) -> Result<Index> {
    Index::from_headers(vec![parse(&gguf.bytes())?])
}

/// The error's text, which must name the file.
fn error<T: std::fmt::Debug>(result: Result<T>) -> String {
    let text = result.expect_err("it was taken for right").to_string();
    assert!(text.contains("m.gguf") || text.contains("-of-"), "{text}");
    text
}

#[track_caller]
fn assert_fails(gguf: &Gguf, words: &[&str]) {
    let text = error(index(gguf));
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

/// What holds for every index of a real file.
fn check_invariants(index: &Index) {
    let mut last = None;
    let mut ranges: Vec<(u32, u64, u64)> = Vec::new();
    for (i, t) in index.tensors.iter().enumerate() {
        let key = (t.layer, t.group, t.part);
        assert!(last <= Some(key));
        last = Some(key);
        let end = t.offset + t.expert_bytes * u64::from(t.n_expert());
        assert!(t.expert_bytes > 0 && end <= index.files[t.file as usize].size);
        assert_eq!(t.ty.row_bytes(t.ne[0]).unwrap() * t.ne[1], t.expert_bytes);
        assert_eq!(index.find(&t.name), Some(i));
        ranges.push((t.file, t.offset, end));
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1), "experts overlap");
    assert!(index.token_bytes() <= index.expert_bytes());
    assert_eq!(index.n_expert_used > 0, !index.tensors.is_empty());
    let bytes: u64 = index.files.iter().map(|file| file.size).sum();
    assert!(index.expert_bytes() + index.dense_bytes <= bytes);
}

#[test]
fn a_model_in_one_file() {
    for version in [2, 3] {
        let gguf = Gguf { version, ..Gguf::moe(2, 8, 3) };
        let index = index(&gguf).unwrap();
        check_invariants(&index);
        assert_eq!((index.arch.as_str(), index.name.as_str(), index.n_expert_used), ("qwen3moe", "tiny", 3));
        assert_eq!((index.n_layers(), index.n_expert()), (2, 8));
        let parts: Vec<_> = index.tensors.iter().map(|t| (t.layer, t.part)).collect();
        assert_eq!(parts[..3], [(0, Part::Up), (0, Part::Gate), (0, Part::Down)]);
        assert_eq!(parts[3..], [(1, Part::Up), (1, Part::Gate), (1, Part::Down)]);

        let up = &index.tensors[0];
        assert_eq!((up.ty, up.ne, up.expert_bytes), (GgmlType(8), [64, 32, 8, 1], 32 * 68));
        let data = gguf.header().len().next_multiple_of(32) as u64;
        assert_eq!(up.offset, data + 64 * 4 * 8 + 64 * 64 * 8 + 32 * 68 * 8);
        assert_eq!(index.dense_bytes, 2 * 64 * 4 * 8);
        assert_eq!(index.expert_bytes(), 2 * 8 * (2 * 32 * 68 + 64 * 64));
        assert_eq!(index.token_bytes(), 2 * 3 * (2 * 32 * 68 + 64 * 64));
    }
}

#[test]
fn a_dense_model_streams_nothing() {
    let gguf = Gguf::new().text("general.architecture", "llama").tensor("blk.0.ffn_up.weight", 0, &[32, 2], 256);
    let index = index(&gguf).unwrap();
    check_invariants(&index);
    assert_eq!((index.tensors.len(), index.token_bytes(), index.n_layers(), index.n_expert()), (0, 0, 0, 0));
    assert_eq!((index.dense_bytes, index.name.as_str()), (256, ""));
}

#[test]
fn a_second_set_of_experts_is_a_group_of_its_own() {
    let gguf = Gguf::moe(1, 8, 3).tensor("blk.0.ffn_up_chexps.weight", 0, &[8, 4, 2], 256).tensor(
        "blk.0.ffn_up_exps.bias",
        0,
        &[32, 8],
        1024,
    );
    let index = index(&gguf).unwrap();
    let last = index.tensors.last().unwrap();
    assert_eq!((last.group, last.n_expert()), (1, 2));
    // Three of eight, but two of two.
    assert_eq!(index.token_bytes(), 3 * (2 * 32 * 68 + 64 * 64) + 256);
    assert_eq!(index.dense_bytes, 64 * 4 * 8 + 1024);
}

#[test]
fn a_count_per_layer_counts_as_its_largest() {
    let mut gguf = Gguf::moe(1, 8, 0);
    gguf.kv.retain(|kv| kv.key != "qwen3moe.expert_used_count");
    assert_fails(&gguf, &["qwen3moe.expert_used_count"]);
    let gguf = gguf.u32s("qwen3moe.expert_used_count", &[2, 5, 0]);
    assert_eq!(index(&gguf).unwrap().n_expert_used, 5);
}

#[test]
fn values_of_every_kind() {
    let long = "x".repeat(100_000);
    let gguf = Gguf::new()
        .raw("u8", 0, &[255])
        .raw("i8", 1, &[255])
        .raw("u16", 2, &[1, 1])
        .raw("i16", 3, &[255, 255])
        .u32("u32", u32::MAX)
        .raw("i32", 5, &(-7_i32).to_le_bytes())
        .raw("f32", 6, &1.5_f32.to_le_bytes())
        .raw("bool", 7, &[2])
        .text("text", "\u{e9}\n")
        .raw("not utf8", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])
        .text("long", &long)
        .raw("u64", 10, &u64::MAX.to_le_bytes())
        .raw("i64", 11, &i64::MIN.to_le_bytes())
        .raw("f64", 12, &(-2.0_f64).to_le_bytes())
        .u32s("few", &[3, 9, 1])
        .u32s("none", &[])
        .u32s("many", &[1; 5000])
        .array("floats", 6, 2, &[0; 8])
        .texts("texts", &["a", "", &long]);
    let header = parse(&gguf.bytes()).unwrap();
    let get = |key: &str| header.kv[key].clone();
    assert_eq!(get("u8"), Value::Int(255));
    assert_eq!(get("i8"), Value::Int(-1));
    assert_eq!(get("u16"), Value::Int(257));
    assert_eq!(get("i16"), Value::Int(-1));
    assert_eq!(get("i32"), Value::Int(-7));
    assert_eq!(get("f32"), Value::Float(1.5));
    assert_eq!(get("bool"), Value::Bool(true));
    assert_eq!(get("text"), Value::Text("\u{e9}\n".into()));
    assert_eq!(get("not utf8"), Value::Text("\u{fffd}".into()));
    assert_eq!(get("u64"), Value::Int(u64::MAX.into()));
    assert_eq!(get("i64"), Value::Int(i64::MIN.into()));
    assert_eq!(get("f64"), Value::Float(-2.0));
    for key in ["long", "none", "many", "floats", "texts"] {
        assert_eq!(get(key), Value::Skipped, "{key}");
    }
    assert_eq!((header.uint("few"), header.uint("u32")), (Some(9), Some(u32::MAX)));
    assert_eq!(
        (header.uint("u64"), header.uint("i8"), header.uint("text"), header.uint("absent")),
        (None, None, None, None)
    );
    assert_eq!((header.text("u8"), header.text("text")), (None, Some("\u{e9}\n")));
}

#[test]
fn a_header_cut_anywhere_is_an_error() {
    let gguf = Gguf::moe(1, 2, 1);
    let bytes = gguf.bytes();
    for len in 0..bytes.len() {
        let text = error(parse(&bytes[..len]));
        assert!(text.contains("download") || text.contains("give a model"), "{text}");
    }
    assert!(parse(&bytes).is_ok());
}

#[test]
fn other_formats_and_versions() {
    let with = |version: u32| Gguf { version, ..Gguf::moe(1, 2, 1) };
    assert_fails(&with(0), &["version 0", "at byte 4"]);
    assert_fails(&with(1), &["version 1", "convert"]);
    assert_fails(&with(4), &["version 4", "update"]);
    assert_fails(&with(3_u32.swap_bytes()), &["big-endian", "convert"]);
    for bytes in [&b""[..], b"GGU", b"GGJT\x01\0\0\0", b"FUGG\0\0\0\x03"] {
        assert!(error(parse(bytes)).contains("does not begin with"), "{bytes:?}");
    }
}

#[test]
fn counts_and_lengths_that_cannot_be() {
    let with = |at: usize, n: u64| {
        let mut bytes = Gguf::moe(1, 2, 1).bytes();
        bytes[at..at + 8].copy_from_slice(&n.to_le_bytes());
        error(parse(&bytes))
    };
    for n in [1 << 20, 1 << 40, u64::MAX] {
        assert!(with(8, n).contains("tensors are more than the file can hold"));
        assert!(with(16, n).contains("key-values are more than the file can hold"));
        assert!(with(24, n).contains("key-value 0: "));
    }
    let base = || Gguf::new().text("general.architecture", "llama");
    for n in [1 << 40, u64::MAX / 4, u64::MAX] {
        assert_fails(&base().array("a", 4, n, &[0; 64]), &["key \"a\"", "bytes should follow"]);
        assert_fails(&base().array("a", 8, n, &[0; 64]), &["key \"a\"", "bytes should follow"]);
        assert_fails(&base().raw("a", 8, &n.to_le_bytes()), &["key \"a\"", "bytes should follow"]);
    }
    assert_fails(&base().array("a", 9, 1, &[0; 64]), &["key \"a\"", "9 is no kind"]);
    assert_fails(&base().raw("a", 13, &[0; 64]), &["key \"a\"", "13 is no kind"]);
    assert_fails(&base().u32("", 1), &["key is empty"]);
    assert_fails(&base().u32(&"k".repeat(70_000), 1), &["key is too long"]);
    assert_fails(&base().u32("a", 1).u32("a", 1), &["key \"a\"", "twice"]);
}

#[test]
fn tensors_that_cannot_be() {
    let with = |name: &str, ty, ne: &[u64], bytes| {
        Gguf::new().text("general.architecture", "llama").tensor(name, ty, ne, bytes)
    };
    assert_fails(&with("t", 0, &[1, 1, 1, 1, 1], 4), &["tensor \"t\"", "5 dimensions"]);
    assert_fails(&with("t", 43, &[32], 4), &["tensor \"t\"", "43", "unknown", "update"]);
    assert_fails(&with("t", 4, &[32], 4), &["tensor \"t\"", "removed", "quantize"]);
    assert_fails(&with("t", 2, &[33], 4), &["tensor \"t\"", "rows of 33", "q4_0"]);
    for ne in [&[u64::MAX, 2][..], &[1 << 63], &[1 << 32, 1 << 32], &[1 << 60, 4, 1, 2]] {
        assert_fails(&with("t", 0, ne, 4), &["tensor \"t\"", "too large"]);
    }
    assert_fails(&with("t", 0, &[1 << 40], 4), &["tensor \"t\"", "end past the file", "download"]);
    assert_fails(&with(&"n".repeat(64), 0, &[1], 4), &["tensor 0", "longer than 63"]);
    assert_fails(&with("t", 0, &[1], 4).tensor("t", 0, &[1], 4), &["tensor \"t\"", "twice"]);
    // The second is written where the first has not ended yet, and the other way round.
    assert_fails(&with("t", 0, &[16], 4).tensor("u", 0, &[1], 4), &["tensor \"u\"", "begin at 32, where 64"]);
    assert_fails(&with("t", 0, &[1], 40).tensor("u", 0, &[1], 4), &["tensor \"u\"", "begin at 64, where 32"]);

    assert!(index(&with("t", 0, &[], 4).align(4096)).is_ok());
    for alignment in [0, 3, 48] {
        let gguf = with("t", 0, &[], 4).u32("general.alignment", alignment);
        assert_fails(&gguf, &["general.alignment", "power of two"]);
    }
    assert_fails(&with("t", 0, &[], 4).text("general.alignment", "32"), &["general.alignment", "not an integer"]);
}

#[test]
fn experts_that_cannot_be() {
    for ne in [&[32, 2, 0][..], &[0, 2, 2], &[32, 2, 2, 2], &[1, 0, 1 << 33]] {
        let gguf = Gguf::moe(0, 0, 1).tensor("blk.0.ffn_up_exps.weight", 0, ne, 4 * ne.iter().product::<u64>());
        assert_fails(&gguf, &["blk.0.ffn_up_exps.weight", "columns, rows, experts"]);
    }
    assert_fails(&Gguf::moe(1, 2, 0), &["expert_used_count"]);
    assert_fails(&Gguf::new(), &["general.architecture"]);
    assert!(matches!(Index::from_headers(vec![]), Err(Error::Invalid(_))));
}

#[test]
fn a_large_vocabulary_is_skipped_quickly() {
    let tokens: Vec<String> = (0..250_000).map(|i| format!("token {i}")).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let bytes = Gguf::moe(1, 2, 1).texts("tokens", &tokens).u32s("types", &vec![1; tokens.len()]).bytes();
    let start = std::time::Instant::now();
    assert_eq!(parse(&bytes).unwrap().kv["tokens"], Value::Skipped);
    // Some tens of milliseconds without optimization.
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

/// A model of three shards, the first without tensors.
fn shards() -> [Gguf; 3] {
    let all = Gguf::moe(2, 4, 2);
    let (one, two) = all.tensors.split_at(5);
    [
        Gguf { tensors: vec![], ..all.clone() }.shard(0, 3, 8),
        Gguf { tensors: one.to_vec(), ..Gguf::new().shard(1, 3, 8) },
        Gguf { tensors: two.to_vec(), ..Gguf::new().shard(2, 3, 8) },
    ]
}

fn write_shards(dir: &Path, shards: &[Gguf]) -> Vec<PathBuf> {
    let name = |i| dir.join(format!("m-{:05}-of-{:05}.gguf", i + 1, shards.len()));
    let paths: Vec<PathBuf> = (0..shards.len()).map(name).collect();
    shards.iter().zip(&paths).for_each(|(shard, path)| shard.write(path));
    paths
}

#[test]
fn a_model_opens_from_any_of_its_shards() {
    let dir = tempfile::tempdir().unwrap();
    let paths = write_shards(dir.path(), &shards());
    let whole = index(&Gguf::moe(2, 4, 2)).unwrap();
    for path in &paths {
        let index = Index::open(path).unwrap();
        check_invariants(&index);
        let files: Vec<_> = index.files.iter().map(|file| &file.path).collect();
        assert_eq!(files, paths.iter().collect::<Vec<_>>());
        assert_eq!((index.dense_bytes, index.token_bytes()), (whole.dense_bytes, whole.token_bytes()));
        assert_eq!(index.tensors.iter().map(|t| t.file).collect::<BTreeSet<_>>(), [1, 2].into());
    }
}

#[test]
fn shards_of_any_name_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["z", "y.bin", "x.gguf"].map(|name| dir.path().join(name));
    shards().iter().zip(&paths).for_each(|(shard, path)| shard.write(path));
    let [a, b, c] = paths.clone();
    let index = Index::open_shards(&[c.clone(), a.clone(), b.clone()]).unwrap();
    assert_eq!(index, Index::open_shards(&paths).unwrap());
    assert_eq!(index.files[0].path, a);

    let text = Index::open(&b).unwrap_err().to_string();
    assert!(text.contains("shard 2 of 3") && text.contains("-00002-of-00003.gguf"), "{text}");
    let text = Index::open_shards(&[a.clone(), b.clone()]).unwrap_err().to_string();
    assert!(text.contains("one of 3") && text.contains("2 were given"), "{text}");
    let text = Index::open_shards(&[a, b.clone(), b]).unwrap_err().to_string();
    assert!(text.contains("y.bin") && text.contains("shard 2 of 3"), "{text}");
    assert!(matches!(Index::open_shards(&[]), Err(Error::Invalid(_))));
}

#[test]
fn shards_that_do_not_belong_together() {
    let fails = |change: &dyn Fn(&mut [Gguf; 3]), words: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let mut shards = shards();
        change(&mut shards);
        let paths = write_shards(dir.path(), &shards);
        let text = error(Index::open(&paths[0]));
        words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in: {text}"));
    };
    let renumber = |shard: &Gguf, no, count| Gguf { kv: vec![], ..shard.clone() }.shard(no, count, 8);
    fails(&|s| s[2] = renumber(&s[2], 1, 3), &["00003-of-00003", "shard 2 of 3"]);
    fails(&|s| s[2] = renumber(&s[2], 2, 4), &["00003-of-00003", "one of 4", "3 were given"]);
    fails(&|s| s[2] = renumber(&s[2], 3, 3), &["00003-of-00003", "split.no is 3"]);
    fails(&|s| s[2].kv.clear(), &["00003-of-00003", "one of 1"]);
    fails(&|s| s[1].kv.retain(|kv| kv.key != "split.no"), &["00002-of-00003", "split.no is missing"]);
    fails(&|s| s[2].tensors.truncate(1), &["00001-of-00003", "split.tensors.count is 8", "6 tensors"]);
    fails(&|s| s[2].tensors[0] = s[1].tensors[0].clone(), &["00003-of-00003", "blk.0.ffn_gate_inp.weight"]);
    fails(&|s| s[1].version = 1, &["00002-of-00003", "version 1"]);
}

#[test]
fn a_missing_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let paths = write_shards(dir.path(), &shards());
    fs::remove_file(&paths[1]).unwrap();
    for path in [&paths[0], &paths[2]] {
        let text = Index::open(path).unwrap_err().to_string();
        assert!(text.contains("m-00002-of-00003.gguf: cannot open this shard"), "{text}");
    }
}

#[test]
fn what_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let text = Index::open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("not a regular file"), "{text}");
    let missing = dir.path().join("absent.gguf");
    assert!(matches!(Index::open(&missing), Err(Error::File { path, what: "open", .. }) if path == missing));
}

/// The seeds of the fuzz target stay valid, or the fuzzer starts from nothing. `LES_WRITE_SEEDS=1` writes them anew.
#[test]
fn fuzz_seeds_are_models() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/gguf");
    let small = Gguf::new()
        .text("general.architecture", "m")
        .u32s("m.expert_used_count", &[1, 2])
        .texts("t", &["a", "b"])
        .raw("f", 6, &[0; 4])
        .tensor("blk.0.ffn_up_exps.weight", 0, &[1, 1, 2], 8)
        .tensor("d", 1, &[4], 8);
    let [_, second, _] = shards();
    let seeds = [
        ("seed-v3", small.clone()),
        ("seed-v2", Gguf { version: 2, ..small.clone().align(8) }),
        ("seed-shard", Gguf { tensors: small.tensors, kv: second.kv, ..small }),
    ];
    for (name, gguf) in seeds {
        let path = dir.join(name);
        if std::env::var_os("LES_WRITE_SEEDS").is_some() {
            gguf.write(&path);
        }
        assert_eq!(fs::read(&path).unwrap(), gguf.bytes(), "{name}");
        parse(&gguf.bytes()).unwrap();
    }
}

/// Element types: number, elements per block, bytes per block.
const TYPES: [(u32, u64, u64); 6] = [(0, 1, 4), (1, 1, 2), (8, 32, 34), (12, 256, 144), (39, 32, 17), (41, 128, 18)];

prop_compose! {
    fn tensor()(
        layer in 0..4_u32, name in 0..6_usize, ty in 0..TYPES.len(),
        blocks in 1..3_u64, rows in 1..4_u64, experts in 1..6_u64,
    ) -> gguf::Tensor {
        let name = ["ffn_up_exps", "ffn_gate_exps", "ffn_gate_up_exps", "ffn_down_exps", "ffn_up_chexps", "ffn_norm"][name];
        let (ty, block, bytes) = TYPES[ty];
        gguf::Tensor {
            name: format!("blk.{layer}.{name}.weight"),
            ty,
            ne: vec![blocks * block, rows, experts],
            bytes: blocks * bytes * rows * experts,
        }
    }
}

prop_compose! {
    fn model()(
        version in 2..4_u32, shift in 0..7_u32, used in 1..8_u32, name in ".{0,12}",
        ints in prop::collection::vec(any::<u32>(), 0..5),
        mut tensors in prop::collection::vec(tensor(), 0..20),
    ) -> Gguf {
        let mut seen = BTreeSet::new();
        tensors.retain(|t| seen.insert(t.name.clone()));
        let gguf = Gguf { version, tensors, ..Gguf::new() };
        gguf.align(1 << shift)
            .text("general.architecture", "a")
            .text("general.name", &name)
            .u32s("ints", &ints)
            .u32("a.expert_used_count", used)
    }
}

proptest! {
    #[test]
    fn valid_files_are_read_back(gguf in model()) {
        let bytes = gguf.bytes();
        let header = parse(&bytes).unwrap();
        prop_assert_eq!(header.version, gguf.version);
        prop_assert_eq!(header.kv.len(), gguf.kv.len());
        prop_assert_eq!(header.tensors.len(), gguf.tensors.len());
        for (read, written) in header.tensors.iter().zip(&gguf.tensors) {
            prop_assert_eq!(&read.name, &written.name);
            prop_assert_eq!(&read.ne[..3], &written.ne[..]);
            prop_assert_eq!(read.bytes, written.bytes);
            prop_assert_eq!(read.ty, GgmlType(written.ty));
            prop_assert_eq!(read.offset % gguf.alignment, 0);
        }
        let index = Index::from_headers(vec![header]).unwrap();
        check_invariants(&index);
        let experts = gguf.tensors.iter().filter(|t| t.name.contains("exps")).count();
        prop_assert_eq!(index.tensors.len(), experts);
        let all: u64 = gguf.tensors.iter().map(|t| t.bytes).sum();
        prop_assert_eq!(index.expert_bytes() + index.dense_bytes, all);
    }

    /// A change may leave a valid file; it never does harm.
    #[test]
    fn changed_files_never_panic(
        gguf in model(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        word in prop::option::of((any::<prop::sample::Index>(), prop_oneof![Just(u64::MAX), Just(1 << 40), any::<u64>()])),
    ) {
        let mut bytes = gguf.bytes();
        let header = gguf.header().len();
        for (at, byte) in changes {
            bytes[at.index(header)] = byte;
        }
        if let Some((at, word)) = word {
            let at = at.index(header - 8);
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        if let Ok(index) = parse(&bytes).and_then(|header| Index::from_headers(vec![header])) {
            check_invariants(&index);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(start in 0..3_usize, rest in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = [&b""[..], b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"][start].to_vec();
        bytes.extend(rest);
        let _ = parse(&bytes).and_then(|header| Index::from_headers(vec![header]));
    }
}

#[test]
fn more_layers_or_experts_than_llama_cpp_takes_are_refused() {
    let model = |layer: u32, experts: u64| {
        Gguf::new().text("general.architecture", "qwen3moe").u32("qwen3moe.expert_used_count", 1).tensor(
            &format!("blk.{layer}.ffn_up_exps.weight"),
            0,
            &[1, 1, experts],
            4 * experts,
        )
    };
    assert_eq!(index(&model(511, 1024)).unwrap().n_expert(), 1024);
    assert_fails(&model(512, 1), &["blk.512.ffn_up_exps.weight", "layer 512", "512 layers"]);
    assert_fails(&model(u32::MAX, 1), &["layer 4294967295"]);
    assert_fails(&model(0, 1025), &["blk.0.ffn_up_exps.weight", "1025 experts", "1024"]);
}
