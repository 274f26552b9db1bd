//! Any bytes are either a profile to go on with, or refused.
#![no_main]

#[path = "../common/gguf.rs"]
mod gguf;

use std::io::Cursor;
use std::path::Path;
use std::sync::LazyLock;

use les::index::{Header, Index};
use les::lookahead::MAX_DEPTH;
use les::lookahead::profile::parse;
use libfuzzer_sys::fuzz_target;

/// What the seed is a profile of.
static INDEX: LazyLock<Index> = LazyLock::new(|| {
    let bytes = gguf::Gguf::moe(1, 3, 1).bytes();
    let header = Header::parse(Cursor::new(bytes), Path::new("model.gguf")).unwrap();
    Index::from_headers(vec![header]).unwrap()
});

fuzz_target!(|data: &[u8]| {
    let Ok(mut learned) = parse(data, &INDEX) else { return };
    for distance in 0..=MAX_DEPTH + 1 {
        assert!(learned.probabilities(distance).iter().all(|p| (0.0..=1.0).contains(p)));
    }
    for token in 0..8_i32 {
        assert!(learned.keep.values(0).iter().all(|value| value.is_finite()));
        learned.keep.observe(0, 1, &[token % 3], &[0.5, token as f32, -1.0]);
    }
});
