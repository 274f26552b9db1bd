//! Writes GGUF headers. Key-values that exist are copied, byte by byte.

use super::copy::Named;
use crate::error::Result;
use crate::index::{GgmlType, Header};

/// A tensor info.
#[derive(Debug, Clone)]
pub(super) struct Info {
    pub(super) name: String,
    pub(super) n_dims: u32,
    pub(super) ne: [u64; 4],
    pub(super) ty: GgmlType,
    /// From the beginning of the data.
    pub(super) offset: u64,
}

impl Info {
    /// A tensor of bytes.
    pub(super) fn of_bytes(name: String, bytes: u64, offset: u64) -> Self {
        Self { name, n_dims: 1, ne: [bytes, 1, 1, 1], ty: GgmlType::I8, offset }
    }
}

/// A header, up to the end of the tensor infos. Its length depends on no number in `infos`.
pub(super) fn encode(version: u32, kvs: &[Vec<u8>], infos: &[Info]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend((infos.len() as u64).to_le_bytes());
    out.extend((kvs.len() as u64).to_le_bytes());
    kvs.iter().for_each(|kv| out.extend(kv));
    for info in infos {
        out.extend(string(&info.name));
        out.extend(info.n_dims.to_le_bytes());
        info.ne.iter().take(info.n_dims as usize).for_each(|n| out.extend(n.to_le_bytes()));
        out.extend(info.ty.0.to_le_bytes());
        out.extend(info.offset.to_le_bytes());
    }
    out
}

/// The key-values of `file`, whose header is `header`, but those of splits and of this format.
pub(super) fn model_kvs(file: &Named, header: &Header) -> Result<Vec<Vec<u8>>> {
    let ours = |key: &str| key.starts_with(crate::index::PREFIX) || SPLIT_KEYS.contains(&key);
    let kept = header.kv_places.iter().filter(|(key, _)| !ours(key));
    kept.map(|(_, place)| file.bytes(place.start, (place.end - place.start) as usize)).collect()
}

const SPLIT_KEYS: [&str; 3] = ["split.no", "split.count", "split.tensors.count"];

/// The key-values of shard `no` of `count`, as llama.cpp writes them.
pub(super) fn split_kvs(no: u16, count: u16, tensors: i32) -> [Vec<u8>; 3] {
    let [key_no, key_count, key_tensors] = SPLIT_KEYS;
    [
        kv(key_no, 2, &no.to_le_bytes()),
        kv(key_count, 2, &count.to_le_bytes()),
        kv(key_tensors, 5, &tensors.to_le_bytes()),
    ]
}

pub(super) fn kv_u32(key: &str, value: u32) -> Vec<u8> {
    kv(key, 4, &value.to_le_bytes())
}

pub(super) fn kv_u64(key: &str, value: u64) -> Vec<u8> {
    kv(key, 10, &value.to_le_bytes())
}

pub(super) fn kv_f32(key: &str, value: f32) -> Vec<u8> {
    kv(key, 6, &value.to_le_bytes())
}

pub(super) fn kv_text(key: &str, value: &str) -> Vec<u8> {
    kv(key, 8, &string(value))
}

fn kv(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut out = string(key);
    out.extend(kind.to_le_bytes());
    out.extend(value);
    out
}

fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out
}
