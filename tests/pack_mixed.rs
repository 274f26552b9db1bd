//! Files of two packings are never taken for one model.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/bed.rs"]
mod bed;
#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::path::Path;

use bed::{Bed, patterned, unpack, verify};
use gguf::Gguf;
use les::index::{CHECKS_MODEL, Header, Index};
use les::model::Model;

/// Where the checksums of a file begin, and how many bytes they have.
fn checks(path: &Path) -> (usize, usize) {
    let tensor = Header::open(path).unwrap().tensors.pop().unwrap();
    assert!(tensor.name.starts_with("les.checks."));
    (tensor.offset as usize, tensor.bytes as usize)
}

/// Two models with one header, packed to shards: experts that differ in one bit, or other tensors that do.
fn pair(differs: &str) -> (Bed, Bed, Vec<String>) {
    let gguf = Gguf::moe(3, 6, 2);
    let one = Bed::new(&gguf);
    let mut bytes = patterned(&gguf);
    let tensor = Header::open(&one.source).unwrap().tensors.into_iter().find(|t| t.name == differs).unwrap();
    bytes[tensor.offset as usize] ^= 1;
    let other = Bed::of_bytes(&bytes);
    for bed in [&one, &other] {
        bed.pack_until("p.gguf", Some(60_000), usize::MAX).unwrap();
    }
    let files = one.files();
    assert!(files.len() >= 3 && files == other.files());
    (one, other, files)
}

#[test]
fn a_shard_of_another_packing_is_refused_and_named() {
    for differs in ["blk.0.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight", "blk.1.ffn_gate_inp.weight"] {
        let (one, other, files) = pair(differs);
        for foreign in &files {
            let right = fs::read(one.path(foreign)).unwrap();
            fs::copy(other.path(foreign), one.path(foreign)).unwrap();
            for named in &files {
                let path = one.path(named);
                let texts = [
                    Index::open(&path).unwrap_err().to_string(),
                    Model::open(&path).map(|_| ()).unwrap_err().to_string(),
                    verify(&path).unwrap_err().to_string(),
                    unpack(&path, &one.path("u.gguf")).unwrap_err().to_string(),
                ];
                for text in texts {
                    let begin = format!("{}: ", one.path(foreign).display());
                    assert!(text.starts_with(&begin) && text.contains("another packing"), "{text}");
                }
            }
            fs::write(one.path(foreign), right).unwrap();
            assert_eq!(verify(&one.path(foreign)).unwrap(), [""; 0]);
        }
        assert_eq!(one.files(), files);
    }
}

/// A tool that splits files drops what it does not know: nothing is compared then.
#[test]
fn a_shard_without_checksums_is_not_compared() {
    let (one, other, files) = pair("blk.1.ffn_gate_inp.weight");
    let path = one.path(&files[1]);
    fs::copy(other.path(&files[1]), &path).unwrap();
    let (at, _) = checks(&path);
    let mut bytes = fs::read(&path).unwrap();
    bytes[at..at + 8].fill(0);
    fs::write(&path, bytes).unwrap();
    Index::open(&path).unwrap();
    assert!(verify(&path).is_err());
}

/// A layer of another packing in the file, with a table that is right: no other checksum tells.
#[test]
fn a_layer_of_another_packing_is_found() {
    let gguf = Gguf::moe(2, 4, 2);
    let one = Bed::new(&gguf);
    let mut bytes = patterned(&gguf);
    let end = bytes.len();
    bytes[end - 1] ^= 1;
    let other = Bed::of_bytes(&bytes);
    let [path, from] = [&one, &other].map(|bed| bed.pack("p.gguf"));
    let header = Header::open(&path).unwrap();
    let tensor = &header.tensors[header.packed[1].tensor];
    let layer = tensor.offset as usize..(tensor.offset + tensor.bytes) as usize;
    let (mut bytes, from) = (fs::read(&path).unwrap(), fs::read(from).unwrap());
    assert!(bytes[layer.clone()] != from[layer.clone()]);
    bytes[layer.clone()].copy_from_slice(&from[layer]);
    fs::write(&path, &bytes).unwrap();
    let damage = verify(&path).unwrap();
    assert!(damage.len() == 1 && damage[0].contains("of the whole model"), "{damage:?}");
    let text = unpack(&path, &one.path("u.gguf")).unwrap_err().to_string();
    assert!(text.contains("another packing") && !one.path("u.gguf").exists(), "{text}");
}

/// As `src/pack/FORMAT.md` has it.
#[test]
fn the_checksum_of_the_model_is_that_of_all_checksums() {
    let bed = Bed::new(&Gguf::moe(3, 6, 2));
    bed.pack_until("p.gguf", Some(60_000), usize::MAX).unwrap();
    let (mut sums, mut stored) = (Vec::new(), Vec::new());
    for file in bed.files() {
        let path = bed.path(&file);
        let (bytes, header) = (fs::read(&path).unwrap(), Header::open(&path).unwrap());
        let (at, len) = checks(&path);
        sums.extend(&bytes[at + 24..at + 28]);
        sums.extend(&bytes[at + 32..at + len - 4]);
        for layer in &header.packed {
            let table = header.tensors[layer.tensor].offset as usize;
            let end = table + layer.table.encode().len();
            sums.extend(&bytes[end - 4..end]);
        }
        stored.push(*bytes[at + CHECKS_MODEL..].first_chunk().unwrap());
    }
    let expected = crc32fast::hash(&sums).to_le_bytes();
    assert!(stored.len() >= 3 && stored.iter().all(|sum| *sum == expected));
}
