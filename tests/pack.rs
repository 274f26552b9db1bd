//! The packed layout: there and back, interrupted, damaged.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gguf::Gguf;
use les::index::{GgmlType, Header, Index, PART_ALIGN, PackedPart, Part, Row, Table};
use les::model::Model;
use les::options::{CacheSize, Mode, Options};
use les::pack::{self, EXPERT_ALIGN, Layout, Packed, Source};
use les::sched::{Request, Step};
use les::store::{Plan, extent};
use les::{Error, Result};
use parking_lot::RwLock;

const PATTERN: u32 = 2_654_435_761;

/// The file, no two places of whose data are alike.
fn patterned(gguf: &Gguf) -> Vec<u8> {
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
static STARTING: RwLock<()> = RwLock::new(());

struct Bed {
    dir: tempfile::TempDir,
    source: PathBuf,
}

impl Bed {
    fn new(gguf: &Gguf) -> Self {
        Self::of_bytes(&patterned(gguf))
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("model.gguf");
        fs::write(&source, bytes).unwrap();
        Self { dir, source }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Packs with a progress that fails at the call of that number, from 0.
    fn pack_until(&self, name: &str, split: Option<u64>, calls: usize) -> Result<Packed> {
        let _none = STARTING.read_recursive();
        let source = Source::open(&self.source)?;
        let layout = Layout::new(&source, &self.path(name), split, None)?;
        let mut left = calls;
        pack::pack(&source, &layout, None, &mut |_| {
            left = left.checked_sub(1).ok_or_else(|| Error::Invalid("killed".into()))?;
            Ok(())
        })
    }

    fn pack(&self, name: &str) -> PathBuf {
        self.pack_until(name, None, usize::MAX).unwrap();
        self.path(name)
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.dir.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "model.gguf").collect();
        names.sort();
        names
    }
}

fn unpack(from: &Path, to: &Path) -> Result<pack::Unpacked> {
    pack::unpack(from, to, &mut |_| Ok(()))
}

/// What is damaged, as text.
fn verify(path: &Path) -> Result<Vec<String>> {
    let mut seen = 0;
    let verified = pack::verify(path, &mut |bytes| {
        seen += bytes;
        Ok(())
    })?;
    assert_eq!(seen, pack::total_bytes(path)?);
    Ok(verified.damage.iter().map(ToString::to_string).collect())
}

/// Models with what is unusual: alignment, version, a second set of experts, one expert, gate and up in one tensor.
fn models() -> Vec<Gguf> {
    let odd = Gguf::moe(2, 3, 1)
        .align(64)
        .tensor("blk.1.ffn_up_chexps.weight", 0, &[8, 4, 2], 256)
        .tensor("blk.5.ffn_gate_up_exps.weight", 0, &[33, 5], 33 * 5 * 4)
        .tensor("blk.5.ffn_down_exps.weight", 0, &[5, 33, 1, 1], 33 * 5 * 4)
        .tensor("output.weight", 0, &[3], 12);
    vec![Gguf::moe(3, 16, 2), Gguf { version: 2, ..Gguf::moe(1, 2, 1) }, odd]
}

#[test]
fn there_and_back() {
    for (i, gguf) in models().iter().enumerate() {
        // the last tensor is padded, or not
        let bytes = patterned(gguf);
        for len in [bytes.len(), bytes.len().next_multiple_of(gguf.alignment as usize)] {
            let mut bytes = bytes.clone();
            bytes.resize(len, 0);
            let bed = Bed::of_bytes(&bytes);
            let packed = bed.pack("p.gguf");
            assert_eq!(verify(&packed).unwrap(), [""; 0], "model {i}");
            let unpacked = unpack(&packed, &bed.path("u.gguf")).unwrap();
            assert!(unpacked.identical && unpacked.bytes == len as u64);
            assert!(fs::read(bed.path("u.gguf")).unwrap() == bytes, "model {i}");
            assert_eq!(bed.files(), ["p.gguf", "u.gguf"]);
        }
    }
}

/// The index of a packed file is that of its source, but for where things are.
fn assert_same_model(packed: &Path, source: &Path) {
    let (index, of) = (Index::open(packed).unwrap(), Index::open(source).unwrap());
    let general = |i: &Index| (i.arch.clone(), i.name.clone(), i.n_expert_used, i.dense_bytes, i.rule, i.routers.len());
    assert_eq!(general(&index), general(&of));
    assert_eq!(index.tensors.len(), of.tensors.len());
    let files = |i: &Index| i.files.iter().map(|f| fs::read(&f.path).unwrap()).collect::<Vec<_>>();
    let (there, here) = (files(&of), files(&index));
    let plan = Plan::layout(&index, 512).unwrap();
    let mut ranges = Vec::new();
    let mut first = 0;
    for (i, (p, s)) in index.tensors.iter().zip(&of.tensors).enumerate() {
        assert_eq!((&p.name, p.ty, p.ne, p.expert_bytes), (&s.name, s.ty, s.ne, s.expert_bytes));
        assert_eq!((p.layer, p.group, p.part), (s.layer, s.group, s.part));
        first = if index.leads(i) { ranges.len() } else { first };
        for e in 0..p.n_expert() {
            let at = p.offset_of(e);
            assert!(at.is_multiple_of(PART_ALIGN));
            let range = |at: u64| at as usize..(at + p.expert_bytes) as usize;
            let bytes = &here[p.file as usize][range(at)];
            assert!(bytes == &there[s.file as usize][range(s.offset_of(e))], "{} {e}", p.name);
            assert_eq!((p.crc32_of(e), s.crc32_of(e)), (Some(crc32fast::hash(bytes)), None));
            let read = extent(at, p.expert_bytes, plan.align);
            assert_eq!((read.offset, read.head), (at, 0));
            if index.leads(i) {
                assert!(at.is_multiple_of(EXPERT_ALIGN), "the matrix that is used first is the first");
                ranges.push((p.file, at, at + read.len));
            } else {
                let before: &mut (u32, u64, u64) = &mut ranges[first + e as usize];
                assert_eq!((before.0, before.2), (p.file, at), "the reads of an expert follow each other");
                before.2 += read.len;
            }
        }
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1), "experts overlap");
}

#[test]
fn a_packed_file_has_the_index_of_its_source() {
    for gguf in &models() {
        let bed = Bed::new(gguf);
        assert_same_model(&bed.pack("p.gguf"), &bed.source);
    }
}

/// Packed as shards, from shards: the same model, whichever of its files is named.
#[test]
fn a_packed_model_always_streams() {
    let bed = Bed::new(&Gguf::moe(2, 4, 2));
    let model = Model::open(&bed.pack("p.gguf")).unwrap();
    let plenty = Some(1 << 40);
    for cache in [CacheSize::Auto, CacheSize::Part(1.0), CacheSize::Min] {
        let decide = |mode| model.decide_given(&Options { mode, cache, ..Options::default() }, plenty);
        for mode in [Mode::Auto, Mode::On] {
            let decision = decide(mode).unwrap();
            assert!(decision.streams && !decision.message.contains("--les off"), "{decision:?}");
        }
        let refused = decide(Mode::Off).unwrap_err().to_string();
        for word in ["p.gguf", "packed", "--les on or auto", "les unpack"] {
            assert!(refused.contains(word), "{word:?} is not in: {refused}");
        }
    }
}

#[test]
fn shards() {
    let bed = Bed::new(&Gguf::moe(4, 16, 2));
    bed.pack_until("p.gguf", Some(300_000), usize::MAX).unwrap();
    let shards: Vec<_> = bed.files().iter().map(|name| bed.path(name)).collect();
    assert!(shards.len() > 1 && shards[0].ends_with(format!("p-00001-of-{:05}.gguf", shards.len())), "{shards:?}");
    for shard in &shards {
        assert!(fs::metadata(shard).unwrap().len() < 400_000);
        assert_same_model(shard, &bed.source);
        assert_eq!(verify(shard).unwrap(), [""; 0]);
    }
    let unpacked = bed.path("u.gguf");
    assert!(unpack(&shards[1], &unpacked).unwrap().identical);
    assert!(fs::read(&unpacked).unwrap() == fs::read(&bed.source).unwrap());

    // and a source that is sharded
    let (mut first, mut second) = (Gguf::moe(4, 16, 2), Gguf::new());
    second.tensors = first.tensors.split_off(7);
    let dir = tempfile::tempdir().unwrap();
    let path = |no: u32| dir.path().join(format!("m-{no:05}-of-00002.gguf"));
    fs::write(path(1), patterned(&first.shard(0, 2, 16))).unwrap();
    fs::write(path(2), patterned(&second.shard(1, 2, 16))).unwrap();
    let source = Source::open(&path(2)).unwrap();
    let packed = dir.path().join("p.gguf");
    let layout = Layout::new(&source, &packed, None, None).unwrap();
    pack::pack(&source, &layout, None, &mut |_| Ok(())).unwrap();
    assert_same_model(&packed, &path(1));
    let whole = dir.path().join("whole.gguf");
    assert!(!unpack(&packed, &whole).unwrap().identical, "it was two files");
    let names = |header: &Header| header.tensors.iter().map(|t| (t.name.clone(), t.ne, t.n_dims)).collect::<Vec<_>>();
    let [whole, one, two] = [whole, path(1), path(2)].map(|path| Header::open(&path).unwrap());
    assert_eq!(names(&whole), [names(&one), names(&two)].concat());
    assert!(!whole.kv.keys().any(|key| key.starts_with("split.") || key.starts_with("les.")));
    for (merged, from) in
        whole.tensors.iter().zip(one.tensors.iter().map(|t| (&one, t)).chain(two.tensors.iter().map(|t| (&two, t))))
    {
        let data = |header: &Header, t: &les::index::Tensor| {
            fs::read(&header.file.path).unwrap()[t.offset as usize..(t.offset + t.bytes) as usize].to_vec()
        };
        assert!(data(&whole, merged) == data(from.0, from.1), "{}", merged.name);
    }
}

/// Ended at any moment, nothing is there under the name that was asked for, and what has another name is no model; the
/// next run makes what one run would have made.
#[test]
fn a_run_that_was_killed_goes_on() {
    // the calls of a whole run: 3 layers of 6 experts of 3 matrices, and 3 other tensors
    let moments = 3 * 6 * 3 + 3;
    for split in [None, Some(60_000)] {
        let bed = Bed::new(&Gguf::moe(3, 6, 2));
        bed.pack_until("once.gguf", split, usize::MAX).unwrap();
        let whole = bed.files();
        let mut resumed = Vec::new();
        for moment in (0..moments).step_by(4).chain([moments - 1]) {
            let name = format!("p{moment}.gguf");
            let error = bed.pack_until(&name, split, moment).unwrap_err();
            assert!(error.to_string().contains("killed"), "{error}");
            let stem = format!("p{moment}");
            let left: Vec<_> = bed.files().into_iter().filter(|name| name.starts_with(&stem)).collect();
            assert_eq!(left.len(), whole.len());
            for name in &left {
                assert!(name.ends_with(".gguf.unfinished"), "{name}");
                assert!(verify(&bed.path(name)).is_err());
            }
            resumed.push(bed.pack_until(&name, split, usize::MAX).unwrap().resumed_bytes);
            for name in &whole {
                let other = bed.path(&name.replace("once", &stem));
                assert!(fs::read(&other).unwrap() == fs::read(bed.path(name)).unwrap(), "{}", other.display());
                fs::remove_file(other).unwrap();
            }
        }
        assert!(bed.files() == whole && resumed.is_sorted() && resumed[0] == 0, "{resumed:?}");
        let layers: std::collections::BTreeSet<_> = resumed.into_iter().collect();
        // the last shard ends with the last layer
        let most = if split.is_some() { 2 } else { 3 };
        assert_eq!(layers.len(), 1 + most, "one layer after the other is kept");
        // it fails at no later moment
        bed.pack_until("last.gguf", split, moments).unwrap();
    }
}

#[test]
fn a_run_that_was_killed_while_it_gave_names_goes_on() {
    let bed = Bed::new(&Gguf::moe(3, 6, 2));
    bed.pack_until("p.gguf", Some(60_000), usize::MAX).unwrap();
    let names = bed.files();
    let before: Vec<_> = names.iter().map(|name| fs::read(bed.path(name)).unwrap()).collect();
    let unfinished = |name: &str| bed.path(&format!("{name}.unfinished"));
    fs::rename(bed.path(&names[0]), unfinished(&names[0])).unwrap();
    assert!(Index::open(bed.path(&names[1])).is_err());
    bed.pack_until("p.gguf", Some(60_000), usize::MAX).unwrap();
    assert_eq!(bed.files(), names);
    assert!(names.iter().zip(before).all(|(name, before)| fs::read(bed.path(name)).unwrap() == before));
    // what is not from there is not touched
    fs::rename(bed.path(&names[0]), unfinished(&names[0])).unwrap();
    fs::write(bed.path(&names[1]), "text").unwrap();
    let error = bed.pack_until("p.gguf", Some(60_000), usize::MAX).unwrap_err();
    assert!(error.to_string().contains("exists"), "{error}");
    assert_eq!(fs::read(bed.path(&names[1])).unwrap(), b"text");
}

#[test]
fn an_unfinished_file_is_not_trusted() {
    let bed = Bed::new(&Gguf::moe(3, 6, 2));
    let whole = fs::read(bed.pack("once.gguf")).unwrap();
    let unfinished = bed.path("p.gguf.unfinished");
    let moment = 2 * 3 * 6 + 2;
    let again = || {
        let packed = bed.pack_until("p.gguf", None, usize::MAX).unwrap();
        assert!(fs::read(bed.path("p.gguf")).unwrap() == whole);
        fs::remove_file(bed.path("p.gguf")).unwrap();
        packed.resumed_bytes
    };
    bed.pack_until("p.gguf", None, moment).unwrap_err();
    let two = again();
    assert!(two > 0);
    // a table that did not quite reach the device
    bed.pack_until("p.gguf", None, moment).unwrap_err();
    let mut bytes = fs::read(&unfinished).unwrap();
    let layer = Header::parse(std::io::Cursor::new(&whole), Path::new("p")).unwrap().packed[1].clone();
    let header = Header::open(&bed.path("once.gguf")).unwrap();
    let tensor = &header.tensors[layer.tensor];
    bytes[tensor.offset as usize + 100] ^= 4;
    fs::write(&unfinished, bytes).unwrap();
    let one = again();
    assert!(0 < one && one < two);
    // a table of other types that take as many bytes does not outlive the experts that it told of
    bed.pack_until("p.gguf", None, moment).unwrap_err();
    let mut bytes = fs::read(&unfinished).unwrap();
    let first = header.packed[0].tensor;
    let table = header.tensors[first].offset as usize..;
    bytes[table.start + 100] ^= 4;
    fs::write(&unfinished, bytes).unwrap();
    bed.pack_until("p.gguf", None, 3).unwrap_err();
    assert_eq!(fs::read(&unfinished).unwrap()[table][..200], [0; 200]);
    fs::remove_file(&unfinished).unwrap();
    // what somebody else left there
    fs::write(&unfinished, "text").unwrap();
    assert_eq!(again(), 0);
    // another model meanwhile, of the same size and with the same header
    bed.pack_until("p.gguf", None, moment).unwrap_err();
    let mut bytes = fs::read(&bed.source).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    fs::write(&bed.source, bytes).unwrap();
    let packed = bed.pack_until("p.gguf", None, usize::MAX).unwrap();
    assert_eq!(packed.resumed_bytes, 0);
    assert_eq!(verify(&bed.path("p.gguf")).unwrap(), [""; 0]);
    fs::remove_file(bed.path("p.gguf")).unwrap();
    // the unfinished work of another command is not lost
    bed.pack_until("p.gguf", None, moment).unwrap_err();
    let work = fs::read(&unfinished).unwrap();
    let other = Bed::new(&Gguf::moe(2, 6, 2));
    let source = Source::open(&other.source).unwrap();
    let layout = Layout::new(&source, &bed.path("p.gguf"), None, None).unwrap();
    let text = pack::pack(&source, &layout, None, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(text.contains("p.gguf.unfinished") && text.contains("remove it"), "{text}");
    assert!(fs::read(&unfinished).unwrap() == work);
}

#[test]
fn a_source_that_changes_meanwhile_is_an_error() {
    let bed = Bed::new(&Gguf::moe(2, 4, 2));
    let source = Source::open(&bed.source).unwrap();
    let layout = Layout::new(&source, &bed.path("p.gguf"), None, None).unwrap();
    let mut calls = 0;
    let result = pack::pack(&source, &layout, None, &mut |_| {
        calls += 1;
        if calls == 5 {
            let bytes = fs::read(&bed.source).unwrap();
            fs::write(&bed.source, [&bytes[..], b"x"].concat()).unwrap();
        }
        Ok(())
    });
    assert!(matches!(result, Err(Error::Changed { .. })), "{result:?}");
    assert_eq!(bed.files(), ["p.gguf.unfinished"]);
}

#[test]
fn one_run_at_a_time() {
    let bed = Bed::new(&Gguf::moe(1, 4, 2));
    let source = Source::open(&bed.source).unwrap();
    let layout = Layout::new(&source, &bed.path("p.gguf"), None, None).unwrap();
    let mut errors = Vec::new();
    pack::pack(&source, &layout, None, &mut |_| {
        errors.extend(bed.pack_until("p.gguf", None, usize::MAX).err());
        Ok(())
    })
    .unwrap();
    assert!(!errors.is_empty() && errors.iter().all(|e| e.to_string().contains("another run")), "{errors:?}");
    assert_eq!(verify(&bed.path("p.gguf")).unwrap(), [""; 0]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let bed = Bed::new(&Gguf::moe(1, 4, 2));
    let packed = bed.pack("p.gguf");
    let refused = |result: Result<Packed>, word: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(word) && text.contains(".gguf"), "{text}");
    };
    refused(bed.pack_until("p.gguf", None, usize::MAX), "exists");
    let again = Bed { source: packed.clone(), dir: tempfile::tempdir().unwrap() };
    refused(again.pack_until("q.gguf", None, usize::MAX), "packed already");
    let dense = Bed::new(&Gguf::new().text("general.architecture", "llama").tensor("t", 0, &[32], 128));
    refused(dense.pack_until("p.gguf", None, usize::MAX), "nothing to pack");
    let own = Bed::new(&Gguf::moe(1, 4, 2).tensor("les.x", 0, &[32], 128));
    refused(own.pack_until("p.gguf", None, usize::MAX), "les.x");
    let uneven = Bed::new(&Gguf::moe(1, 4, 2).tensor("blk.0.ffn_gate_up_exps.weight", 0, &[32, 1, 3], 384));
    refused(uneven.pack_until("p.gguf", None, usize::MAX), "4 experts");
    assert!(verify(&bed.source).unwrap_err().to_string().contains("not packed"));
    assert!(unpack(&bed.source, &bed.path("u.gguf")).unwrap_err().to_string().contains("not packed"));
    assert!(unpack(&packed, &packed).unwrap_err().to_string().contains("exists"));
    assert_eq!((bed.files(), dense.files()), (vec!["p.gguf".to_owned()], Vec::new()));
}

/// Everything but the gaps, bit by bit: some bit of each region.
#[test]
fn a_flipped_bit_is_found_and_named() {
    let bed = Bed::new(&Gguf::moe(2, 4, 2));
    let packed = bed.pack("p.gguf");
    let whole = fs::read(&packed).unwrap();
    let header = Header::open(&packed).unwrap();
    let index = Index::open(&packed).unwrap();
    let flip = |at: u64| {
        let mut bytes = whole.clone();
        bytes[at as usize] ^= 0x10;
        let path = bed.path("flipped.gguf");
        fs::write(&path, bytes).unwrap();
        path
    };
    for t in &index.tensors {
        for expert in [0, 3] {
            let at = t.offset_of(expert) + t.expert_bytes - 1;
            let path = flip(at);
            let damage = verify(&path).unwrap();
            let name = format!("layer {}, expert {expert} is damaged (in {}", t.layer, t.name);
            assert!(damage.len() == 1 && damage[0].contains(&name) && damage[0].contains("flipped.gguf"), "{damage:?}");
            let text = unpack(&path, &bed.path("u.gguf")).unwrap_err().to_string();
            assert!(text.contains(&format!("expert {expert} of {}", t.name)) && text.contains("checksum"), "{text}");
            assert!(!bed.path("u.gguf").exists());

            // never a wrong number for the engine, and the others are as good as ever
            let model = Model::open(&path).unwrap();
            let options = Options { mode: Mode::On, cache: CacheSize::Min, ..Options::default() };
            assert!(model.decide(&options).unwrap().streams);
            let tensor = index.find(&t.name).unwrap();
            for (id, good) in [(1, true), (expert as i32, false), (2, true), (expert as i32, false)] {
                let request = Request { tensor, ids: &[id], rows: 1, certain: 1, walkers: 1 };
                let step = model.ticket(request, &[]).unwrap().next(0).map_err(|e| e.to_string());
                match step {
                    Ok(Step::Expert { .. }) => assert!(good, "{} expert {id}", t.name),
                    Ok(Step::End) => panic!("there is one expert"),
                    Err(text) => {
                        let offset = format!("at byte {}", t.offset_of(expert));
                        for word in ["flipped.gguf", &t.name, &format!("expert {expert}"), &offset, "les verify"] {
                            assert!(!good && text.contains(word), "{word:?} is not in: {text}");
                        }
                    }
                }
            }
        }
    }
    let dense = header.tensors.iter().find(|t| t.name == "blk.1.ffn_gate_inp.weight").unwrap();
    let path = flip(dense.offset);
    let damage = verify(&path).unwrap();
    assert!(damage.len() == 1 && damage[0].contains(&dense.name), "{damage:?}");
    assert!(unpack(&path, &bed.path("u.gguf")).unwrap_err().to_string().contains(&dense.name));
    // the text of general.name
    let name = whole.windows(4).position(|bytes| bytes == b"tiny").unwrap() as u64;
    let damage = verify(&flip(name)).unwrap();
    assert!(damage.len() == 1 && damage[0].contains("metadata"), "{damage:?}");
    let text = unpack(&flip(name), &bed.path("u.gguf")).unwrap_err().to_string();
    assert!(text.contains("metadata") && !bed.path("u.gguf").exists(), "{text}");
    // a table, and the checksums themselves
    let text = verify(&flip(header.tensors[header.packed[1].tensor].offset + 200)).unwrap_err().to_string();
    assert!(text.contains("blk.1.les_experts") && text.contains("table of experts"), "{text}");
    let checks = header.tensors.last().unwrap();
    for at in checks.offset..checks.offset + checks.bytes {
        let text = verify(&flip(at)).unwrap_err().to_string();
        assert!(text.contains("checksums are damaged"), "{text}");
    }
}

#[test]
fn no_byte_of_the_header_is_damaged_unnoticed() {
    let bed = Bed::new(&Gguf::moe(1, 1, 1));
    let packed = bed.pack("p.gguf");
    let whole = fs::read(&packed).unwrap();
    for at in 0..Header::open(&packed).unwrap().end {
        let mut bytes = whole.clone();
        bytes[at as usize] ^= 0x10;
        fs::write(&packed, bytes).unwrap();
        assert!(verify(&packed).map_or(true, |damage| !damage.is_empty()), "byte {at}");
    }
}

#[test]
fn a_file_that_was_cut_is_no_model() {
    let bed = Bed::new(&Gguf::moe(2, 4, 2));
    let whole = fs::read(bed.pack("p.gguf")).unwrap();
    let checks = Header::open(&bed.path("p.gguf")).unwrap().tensors.pop().unwrap();
    let end = (checks.offset + checks.bytes) as usize;
    for len in (0..end).step_by(997).chain([end - 1]) {
        fs::write(bed.path("cut.gguf"), &whole[..len]).unwrap();
        let error = Index::open(bed.path("cut.gguf")).unwrap_err();
        assert!(error.to_string().contains("cut.gguf"), "{error}");
    }
    // zeros in place of the rest, as some tools for copying leave them
    for len in (0..end).step_by(9973) {
        let mut bytes = whole.clone();
        bytes[len..].fill(0);
        fs::write(bed.path("cut.gguf"), bytes).unwrap();
        assert!(verify(&bed.path("cut.gguf")).map_or(true, |damage| !damage.is_empty()), "{len}");
    }
}

/// What only a program could write that means harm: the checksum of the table is right.
#[test]
fn tables_that_lie_are_refused_when_the_file_is_opened() {
    let bed = Bed::new(&Gguf::moe(2, 4, 2));
    let packed = bed.pack("p.gguf");
    let whole = fs::read(&packed).unwrap();
    let header = Header::open(&packed).unwrap();
    let layer = &header.packed[1];
    let at = header.tensors[layer.tensor].offset as usize;
    let with = |table: &Table| {
        let mut bytes = whole.clone();
        let table = table.encode();
        bytes[at..at + table.len()].copy_from_slice(&table);
        Header::parse(std::io::Cursor::new(bytes), Path::new("m.gguf"))
    };
    with(&layer.table).unwrap();
    type Lie = fn(&mut Table);
    let lies: [(&str, Lie); 5] = [
        ("overlaps", |table| table.rows[4].offset = table.rows[3].offset),
        ("overlaps", |table| table.rows[0].offset = 40),
        ("past the tensor", |table| table.rows[11].offset += 1 << 40),
        ("past the tensor", |table| table.rows[11].offset = u64::MAX),
        ("no sense", |table| table.n_expert = u32::MAX),
    ];
    for (word, lie) in lies {
        let mut table = layer.table.clone();
        lie(&mut table);
        let text = with(&table).unwrap_err().to_string();
        for word in [word, "m.gguf", "blk.1.les_experts", "pack the model again"] {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
    }
    // the same tensor in two places
    let mut table = layer.table.clone();
    table.parts[1].part = table.parts[0].part;
    let text = Index::from_headers(vec![with(&table).unwrap()]).unwrap_err().to_string();
    assert!(text.contains("blk.1.ffn_up_exps.weight"), "{text}");
    // places among the others that cannot be
    for position in [layer.table.parts[0].position, u32::MAX] {
        let mut table = layer.table.clone();
        table.parts[1].position = position;
        let header = with(&table).unwrap();
        let mut bytes = whole.clone();
        let encoded = header.packed[1].table.encode();
        bytes[at..at + encoded.len()].copy_from_slice(&encoded);
        fs::write(bed.path("lie.gguf"), bytes).unwrap();
        assert!(unpack(&bed.path("lie.gguf"), &bed.path("u.gguf")).is_err(), "{position}");
    }
}

fn les(args: &[&str]) -> Output {
    let _one = STARTING.write();
    Command::new(env!("CARGO_BIN_EXE_les")).args(args).output().unwrap()
}

#[test]
fn the_commands() {
    let bed = Bed::new(&Gguf::moe(2, 4, 2));
    let at = |name: &str| bed.path(name).to_str().unwrap().to_owned();
    let ok = |args: &[&str]| {
        let output = les(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "no progress where there is no terminal");
        String::from_utf8(output.stdout).unwrap()
    };
    let plan = ok(&["pack", &at("model.gguf"), &at("p.gguf"), "--split-max-size", "100K", "--dry-run"]);
    assert!(plan.contains("p-00001-of-00002.gguf: the experts of 1 layers, 2 other tensors"), "{plan}");
    assert!(plan.contains("are free there") && bed.files().is_empty());
    ok(&["pack", &at("model.gguf"), &at("p.gguf")]);
    let text = ok(&["verify", &at("p.gguf")]);
    // header, two routers, 24 matrices
    assert_eq!(text, "all 27 checksums are right\n");
    assert!(ok(&["inspect", &at("p.gguf")]).contains("\nlayout    packed"));
    assert!(!ok(&["inspect", &at("model.gguf")]).contains("packed"));
    let text = ok(&["unpack", &at("p.gguf"), &at("u.gguf")]);
    assert!(text.contains("the file that was packed"), "{text}");

    let mut bytes = fs::read(bed.path("p.gguf")).unwrap();
    let t = &Index::open(bed.path("p.gguf")).unwrap().tensors[5];
    bytes[t.offset_of(2) as usize] ^= 1;
    fs::write(bed.path("p.gguf"), bytes).unwrap();
    let output = les(&["verify", &at("p.gguf")]);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1));
    assert!(out.contains("layer 1, expert 2 is damaged") && err.contains("1 of 27 checksums"), "{out}{err}");
    assert!(!les(&["pack", &at("model.gguf"), &at("q.gguf"), "--split-max-size", "0"]).status.success());
}

/// The seed of the fuzz target stays a packed model, a small one: without gaps. `LES_WRITE_SEEDS=1` writes it anew.
#[test]
fn the_fuzz_seed_is_packed() {
    let part = |part, position| PackedPart { part, ty: GgmlType(0), n_dims: 3, position, columns: 1, rows: 1 };
    let parts = vec![part(Part::Up, 1), part(Part::Down, 0)];
    let first = Table::bytes(parts.len(), 2) as u64;
    let row = |i: u64| Row { offset: first + 4 * i, bytes: 4, ty: GgmlType(0), crc32: crc32fast::hash(&[i as u8; 4]) };
    let rows = (0..4).map(row).collect();
    let table = Table { parts, n_expert: 2, rows }.encode();
    let data = (0..4).flat_map(|i| [i; 4]);
    let gguf = Gguf::new().text("general.architecture", "m").u32("m.expert_used_count", 1).tensor(
        "blk.0.les_experts",
        24,
        &[first + 16],
        first + 16,
    );
    let mut bytes = gguf.bytes();
    let at = bytes.len() - first as usize - 16;
    bytes.splice(at.., table.into_iter().chain(data));

    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/gguf/seed-packed");
    if std::env::var_os("LES_WRITE_SEEDS").is_some() {
        fs::write(&seed, &bytes).unwrap();
    }
    assert!(fs::read(&seed).unwrap() == bytes);
    let index = Index::open(&seed).unwrap();
    let down = &index.tensors[1];
    assert_eq!((down.name.as_str(), down.offset_of(1)), ("blk.0.ffn_down_exps.weight", bytes.len() as u64 - 4));
    assert_eq!(index.tensors[0].offset_of(1), bytes.len() as u64 - 8);
}
