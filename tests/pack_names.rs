//! The names of what is packed: whose they are, and that nothing is lost that has them.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/bed.rs"]
mod bed;
#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::path::Path;

use bed::{Bed, STARTING, les, unpack};
use gguf::Gguf;
use les::Result;
use les::pack::{self, Layout, Reservation, Source};

#[test]
fn the_unfinished_work_of_another_command_is_not_lost() {
    let bed = Bed::new(&Gguf::moe(3, 6, 2));
    let unfinished = bed.path("p.gguf.unfinished");
    let packed = bed.pack("once.gguf");
    let other = Bed::new(&Gguf::moe(2, 6, 2));
    let refused = |result: Result<()>| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("p.gguf.unfinished") && text.contains("remove it"), "{text}");
    };
    let pack_other = || {
        let _none = STARTING.read_recursive();
        let source = Source::open(&other.source)?;
        let layout = Layout::new(&source, &bed.path("p.gguf"), None, None)?;
        pack::pack(&source, &layout, None, &mut |_| Ok(())).map(|_| ())
    };
    let unpack_to = |from: &Path| unpack(from, &bed.path("p.gguf")).map(|_| ());

    bed.pack_until("p.gguf", None, 2 * 3 * 6 + 2).unwrap_err();
    let work = fs::read(&unfinished).unwrap();
    refused(pack_other());
    refused(unpack_to(&packed));
    assert!(fs::read(&unfinished).unwrap() == work);
    assert!(bed.pack_until("p.gguf", None, usize::MAX).unwrap().resumed_bytes > 0);
    fs::remove_file(bed.path("p.gguf")).unwrap();

    // nor is what is read, or what is no model
    fs::copy(&packed, &unfinished).unwrap();
    refused(unpack_to(&unfinished));
    assert!(fs::read(&unfinished).unwrap() == fs::read(&packed).unwrap());
    for there in [fs::read(&other.source).unwrap(), b"{\"layer\":0}\n".to_vec()] {
        fs::write(&unfinished, &there).unwrap();
        refused(pack_other());
        refused(bed.pack_until("p.gguf", None, usize::MAX).map(|_| ()));
        refused(unpack_to(&packed));
        assert!(fs::read(&unfinished).unwrap() == there);
    }

    // unpack begins its own anew
    let source = fs::read(&bed.source).unwrap();
    fs::write(&unfinished, &source[..source.len() / 2]).unwrap();
    unpack_to(&packed).unwrap();
    assert!(fs::read(bed.path("p.gguf")).unwrap() == source);
}

/// Before types are chosen, which takes long.
#[test]
fn a_name_that_is_taken_is_refused_at_once() {
    let bed = Bed::new(&Gguf::moe(1, 4, 2));
    let reserve = |split| Reservation::new(&bed.path("p.gguf"), split);
    let refused = |word: &str, split: bool| {
        let text = reserve(split).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
        let (model, output) = (bed.path("model.gguf"), bed.path("p.gguf"));
        // there are no quantizers, which is what would be found out next
        let mut args =
            vec!["pack", model.to_str().unwrap(), output.to_str().unwrap(), "--shrink", "9%", "--ggml", "/nonexistent"];
        args.extend(split.then_some(["--split-max-size", "100K"]).into_iter().flatten());
        let text = String::from_utf8(les(&args).stderr).unwrap();
        assert!(text.contains(word), "{text}");
    };
    for split in [false, true] {
        let one = reserve(split).unwrap();
        refused("another run", split);
        drop(one);
        assert_eq!(bed.files(), [""; 0]);
    }
    let source = Source::open(&bed.source).unwrap();
    let layout = Layout::new(&source, &bed.path("p.gguf"), None, None).unwrap();
    let mut errors = Vec::new();
    pack::pack(&source, &layout, None, &mut |_| {
        errors.extend(reserve(false).err());
        Ok(())
    })
    .unwrap();
    assert!(!errors.is_empty() && errors.iter().all(|e| e.to_string().contains("another run")), "{errors:?}");
    refused("exists", false);
    fs::rename(bed.path("p.gguf"), bed.path("p-00001-of-00012.gguf")).unwrap();
    refused("exists", true);
    // a run that was ended while it gave names goes on; others have other names
    for name in
        ["p-00002-of-00012.gguf", "q-00001-of-00012.gguf", "p-00001-of-012.gguf", "p-00001-of-00012.gguf.unfinished"]
    {
        fs::write(bed.path(name), "").unwrap();
    }
    fs::remove_file(bed.path("p-00001-of-00012.gguf")).unwrap();
    drop(reserve(true).unwrap());
    // work that is there is kept
    fs::write(bed.path("p.gguf.unfinished"), "work").unwrap();
    drop(reserve(false).unwrap());
    assert_eq!(fs::read(bed.path("p.gguf.unfinished")).unwrap(), b"work");
}
