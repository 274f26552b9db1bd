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
    for t in &index.tensors {
        let end = t.expert_bytes.checked_mul(t.ne[2]).and_then(|bytes| bytes.checked_add(t.offset));
        assert!(t.expert_bytes > 0 && end.is_some_and(|end| end <= index.files[t.file as usize].size));
        assert!(index.find(&t.name).is_some());
    }
    assert!(index.floor_bytes() <= index.expert_bytes());
    let bytes: u64 = index.files.iter().map(|file| file.size).sum();
    assert!(index.expert_bytes() + index.dense_bytes <= bytes);
}
