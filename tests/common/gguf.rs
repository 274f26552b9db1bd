//! Writes small GGUF files, right or wrong, for tests.
#![allow(dead_code)]

use std::path::Path;

/// A key-value: its kind and its bytes.
#[derive(Debug, Clone)]
pub struct Kv {
    pub key: String,
    pub kind: u32,
    pub value: Vec<u8>,
}

/// A tensor; its data are zeros.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    pub ty: u32,
    pub ne: Vec<u64>,
    /// How many bytes to write, and to leave for it.
    pub bytes: u64,
}

/// A file.
#[derive(Debug, Clone)]
pub struct Gguf {
    pub version: u32,
    pub alignment: u64,
    pub kv: Vec<Kv>,
    pub tensors: Vec<Tensor>,
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

impl Gguf {
    pub fn new() -> Self {
        Self { version: 3, alignment: 32, kv: Vec::new(), tensors: Vec::new() }
    }

    /// A model of `layers` layers with `experts` experts of 64 columns and 32 rows (q8_0, and f16 for down), and one
    /// dense tensor each.
    pub fn moe(layers: u32, experts: u64, used: u32) -> Self {
        let mut gguf = Self::new()
            .text("general.architecture", "qwen3moe")
            .text("general.name", "tiny")
            .u32("qwen3moe.expert_used_count", used)
            .texts("tokenizer.ggml.tokens", &["a", "", "\u{e9}"]);
        for layer in 0..layers {
            gguf = gguf
                .tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), 0, &[64, experts], 64 * 4 * experts)
                .tensor(&format!("blk.{layer}.ffn_down_exps.weight"), 1, &[32, 64, experts], 64 * 64 * experts)
                .tensor(&format!("blk.{layer}.ffn_gate_exps.weight"), 8, &[64, 32, experts], 32 * 68 * experts)
                .tensor(&format!("blk.{layer}.ffn_up_exps.weight"), 8, &[64, 32, experts], 32 * 68 * experts);
        }
        gguf
    }

    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.kv.push(Kv { key: key.to_owned(), kind, value: value.to_vec() });
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    /// An array whose elements are given as bytes.
    pub fn array(self, key: &str, kind: u32, len: u64, elements: &[u8]) -> Self {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend(len.to_le_bytes());
        value.extend(elements);
        self.raw(key, 9, &value)
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|text| string(text)).collect();
        self.array(key, 8, values.len() as u64, &elements)
    }

    pub fn u32s(self, key: &str, values: &[u32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.array(key, 4, values.len() as u64, &elements)
    }

    pub fn shard(self, no: u16, count: u16, tensors: i32) -> Self {
        self.raw("split.no", 2, &no.to_le_bytes()).raw("split.count", 2, &count.to_le_bytes()).raw(
            "split.tensors.count",
            5,
            &tensors.to_le_bytes(),
        )
    }

    pub fn tensor(mut self, name: &str, ty: u32, ne: &[u64], bytes: u64) -> Self {
        self.tensors.push(Tensor { name: name.to_owned(), ty, ne: ne.to_vec(), bytes });
        self
    }

    pub fn align(mut self, alignment: u32) -> Self {
        self.alignment = alignment.into();
        self.u32("general.alignment", alignment)
    }

    /// The header alone, without the padding.
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.kv.len() as u64).to_le_bytes());
        for kv in &self.kv {
            out.extend(string(&kv.key));
            out.extend(kv.kind.to_le_bytes());
            out.extend(&kv.value);
        }
        let mut offset = 0_u64;
        for t in &self.tensors {
            out.extend(string(&t.name));
            out.extend((t.ne.len() as u32).to_le_bytes());
            t.ne.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(t.ty.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = offset.wrapping_add(t.bytes).next_multiple_of(self.alignment);
        }
        out
    }

    /// The whole file. The last tensor is not padded.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
            out.resize(out.len() + t.bytes as usize, 0);
        }
        out
    }

    pub fn write(&self, path: impl AsRef<Path>) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}
