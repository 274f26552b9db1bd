//! Any bytes are either an index that holds together, or an error.
#![no_main]

use std::io::Cursor;
use std::path::Path;

use les::index::{Header, Index};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // Cut in two, the same bytes may also be a model of two shards.
    let (first, second) = data.split_at(data.len() / 2);
    let parse = |bytes| Header::parse(Cursor::new(bytes), Path::new("fuzz.gguf"));
    check(parse(data).map(|header| vec![header]));
    check(parse(first).and_then(|first| Ok(vec![first, parse(second)?])));
});

fn check(headers: les::Result<Vec<Header>>) {
    let Ok(index) = headers.and_then(Index::from_headers) else { return };
    let size = |file: u32| index.files[file as usize].size;
    for (i, t) in index.tensors.iter().enumerate() {
        assert!(t.expert_bytes > 0 && index.find(&t.name) == Some(i));
        let range = |e| t.offset_of(e)..t.offset_of(e).saturating_add(t.expert_bytes);
        for e in 0..t.n_expert() {
            assert!(range(e).end <= size(t.file) && (e == 0 || range(e - 1).end <= range(e).start));
            assert_eq!(t.crc32_of(e).is_some(), t.packed.is_some());
        }
    }
    let bytes: u64 = index.files.iter().map(|file| file.size).sum();
    assert!(index.token_bytes() <= index.expert_bytes() && index.expert_bytes() + index.dense_bytes <= bytes);
}
