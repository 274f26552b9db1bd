//! The GGUF header reader: key-values and tensor infos of one file, never tensor data.
//!
//! Nothing in a file is trusted. Every length is held against what is left of the file before it is read or skipped,
//! nothing is allocated from a count alone, and what no one asks for (token lists, huge strings) is skipped.
//!
//! ```text
//! "GGUF" version:u32 n_tensors:u64 n_kv:u64
//! n_kv x      key:string kind:u32 value                     string: len:u64 bytes
//! n_tensors x name:string n_dims:u32 ne:u64[n_dims] type:u32 offset:u64
//! padding to general.alignment, then the data that the offsets are relative to
//! ```

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::path::Path;

use super::ModelFile;
use super::packed::{self, PackedLayer};
use super::reader::Reader;
use super::types::GgmlType;
use crate::error::{Error, Result};

/// A key-value has at least a length, one character, a kind and one byte.
const MIN_KV_BYTES: u64 = 8 + 1 + 4 + 1;
/// A tensor info has at least a length, no dimensions, a type and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
/// Far above what models have (some tens, some thousands), low enough to bound what a crafted file can cost.
const MAX_KVS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 18;
/// The bound of the GGUF specification.
const MAX_KEY_BYTES: u64 = u16::MAX as u64;
/// llama.cpp's bound (GGML_MAX_NAME counts the final zero).
const MAX_NAME_BYTES: u64 = 63;
/// Longer strings are skipped: they are tokenizer blobs, not names.
const MAX_TEXT_BYTES: u64 = 1 << 16;
/// Longer arrays of integers are skipped: they are token lists, not one number per layer.
const MAX_INTS: u64 = 4096;

/// A value of the header.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// An integer of any width.
    Int(i128),
    /// A float of any width.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string; what is not UTF-8 in it is replaced.
    Text(String),
    /// A short array of integers, one per layer as a rule.
    Ints {
        /// The largest of them.
        largest: i128,
    },
    /// A long string, or an array of something else: present, not kept.
    Skipped,
}

/// Where one tensor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name; what is not UTF-8 in it is replaced.
    pub name: String,
    /// Its type, always a known one.
    pub ty: GgmlType,
    /// Columns, rows, and so on; 1 where there is no such dimension.
    pub ne: [u64; 4],
    /// How many dimensions the file names.
    pub n_dims: u32,
    /// Where it begins, in bytes from the start of the file.
    pub offset: u64,
    /// Its size in bytes; it ends within the file.
    pub bytes: u64,
}

/// The header of one GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The file.
    pub file: ModelFile,
    /// The GGUF version, 2 or 3.
    pub version: u32,
    /// The key-values.
    pub kv: BTreeMap<String, Value>,
    /// Their keys in the order of the file, each with its bytes: from the key's length to the end of the value.
    pub kv_places: Vec<(String, Range<u64>)>,
    /// `general.alignment`, or 32.
    pub alignment: u64,
    /// The tensors in the order of their data. They do not overlap.
    pub tensors: Vec<Tensor>,
    /// Where the tensor infos end, in bytes from the start of the file.
    pub end: u64,
    /// The layers whose experts are packed, in the order of their data.
    pub packed: Vec<PackedLayer>,
    /// Of a packed file: a checksum of the whole model, the same in all its files.
    pub model: Option<u32>,
}

impl Header {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read, [`Error::Format`] when it is not a GGUF that llama.cpp would load.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |what| move |source| Error::File { path: path.to_owned(), what, source };
        // Before opening: to open a pipe would wait for its writer.
        if !fs::metadata(path).map_err(failed("open"))?.is_file() {
            return Err(failed("open")(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        Self::parse(File::open(path).map_err(failed("open"))?, path)
    }

    /// Reads the header from anything; `path` is for the errors.
    ///
    /// # Errors
    /// As [`Header::open`].
    pub fn parse<R: Read + Seek>(source: R, path: &Path) -> Result<Self> {
        let mut r = Reader::new(source, path)?;
        let version = r.version()?;
        let n_tensors = r.count("tensors", MIN_TENSOR_BYTES, MAX_TENSORS)?;
        let n_kv = r.count("key-values", MIN_KV_BYTES, MAX_KVS)?;

        let mut alignment = 32;
        let (mut kv, mut kv_places) = (BTreeMap::new(), Vec::new());
        for i in 0..n_kv {
            let begin = r.pos;
            let (key, value) = r.key_value(i)?;
            kv_places.push((key.clone(), begin..r.pos));
            if key == "general.alignment" {
                alignment = r.alignment(&value)?;
            }
            if kv.insert(key, value).is_some() {
                return Err(r.corrupt("the key is there twice"));
            }
        }

        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        let mut next = 0_u64;
        for i in 0..n_tensors {
            let tensor = r.tensor(i)?;
            if !names.insert(tensor.name.clone()) {
                return Err(r.corrupt("the tensor is there twice"));
            }
            // No gaps and no other order: llama.cpp refuses them. This also keeps tensors from overlapping.
            if tensor.offset != next {
                return Err(r.corrupt(&format!("its data begin at {}, where {next} is expected", tensor.offset)));
            }
            let end = next.checked_add(tensor.bytes).and_then(|end| end.checked_next_multiple_of(alignment));
            next = end.ok_or_else(|| r.corrupt("its data end past 64 bits"))?;
            tensors.push(tensor);
        }
        let end = r.pos;
        r.place(&mut tensors, end.checked_next_multiple_of(alignment))?;
        let (packed, model) = packed::read(&mut r, &tensors)?;
        let file = ModelFile { path: path.to_owned(), size: r.size };
        Ok(Self { file, version, kv, kv_places, alignment, tensors, end, packed, model })
    }

    /// The value of an integer key, the largest where it is an array of one per layer. `None` when it is missing,
    /// negative, too large, or something else.
    pub fn uint(&self, key: &str) -> Option<u32> {
        match self.kv.get(key)? {
            Value::Int(n) | Value::Ints { largest: n } => u32::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The value of a string key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.kv.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An error about this file.
    pub(super) fn fail(&self, offset: u64, why: impl Into<String>) -> Error {
        Error::Format { path: self.file.path.clone(), offset, why: why.into() }
    }
}

/// The numbers of GGUF's kinds of values that need a name.
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Bytes of a value of a kind, where they are always as many.
const fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

impl<R: Read + Seek> Reader<'_, R> {
    /// Magic and version.
    fn version(&mut self) -> Result<u32> {
        if self.size < 4 || &self.take()? != b"GGUF" {
            return Err(self.fail_at(0, "it does not begin with \"GGUF\"; give a model in GGUF format"));
        }
        let at = self.pos;
        match self.u32()? {
            version @ 2..=3 => Ok(version),
            1 => Err(self.fail_at(at, "GGUF version 1 is no longer in use; convert the model again")),
            // A small number whose bytes are in the other order.
            version if version != 0 && version.trailing_zeros() >= 16 => {
                Err(self.fail_at(at, "it is big-endian; convert it with gguf-py's gguf_convert_endian"))
            }
            version => {
                let why = format!("GGUF version {version} is unknown (2 and 3 are known); update ggml-les");
                Err(self.fail_at(at, &why))
            }
        }
    }

    fn key_value(&mut self, i: u64) -> Result<(String, Value)> {
        self.within = format!("key-value {i}");
        match self.string(MAX_KEY_BYTES)? {
            Some(key) if !key.is_empty() => {
                self.within = format!("key {key:?}");
                Ok((key, self.value()?))
            }
            Some(_) => Err(self.corrupt("the key is empty")),
            None => Err(self.corrupt("the key is too long")),
        }
    }

    fn value(&mut self) -> Result<Value> {
        match self.u32()? {
            STRING => Ok(self.string(MAX_TEXT_BYTES)?.map_or(Value::Skipped, Value::Text)),
            ARRAY => self.array(),
            kind => self.scalar(kind),
        }
    }

    fn scalar(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::Int(u8::from_le_bytes(self.take()?).into()),
            1 => Value::Int(i8::from_le_bytes(self.take()?).into()),
            2 => Value::Int(u16::from_le_bytes(self.take()?).into()),
            3 => Value::Int(i16::from_le_bytes(self.take()?).into()),
            4 => Value::Int(self.u32()?.into()),
            5 => Value::Int(i32::from_le_bytes(self.take()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.take()?).into()),
            7 => Value::Bool(self.take()? != [0]),
            10 => Value::Int(self.u64()?.into()),
            11 => Value::Int(i64::from_le_bytes(self.take()?).into()),
            12 => Value::Float(f64::from_le_bytes(self.take()?)),
            _ => return Err(self.corrupt(&format!("{kind} is no kind of value"))),
        })
    }

    fn array(&mut self) -> Result<Value> {
        let kind = self.u32()?;
        let len = self.u64()?;
        if kind == STRING {
            self.need(len.saturating_mul(8))?;
            for _ in 0..len {
                let bytes = self.u64()?;
                self.skip(bytes)?;
            }
            return Ok(Value::Skipped);
        }
        let Some(bytes) = scalar_bytes(kind) else {
            return Err(self.corrupt(&format!("{kind} is no kind of value for an array")));
        };
        let bytes = len.saturating_mul(bytes);
        self.need(bytes)?;
        if len > MAX_INTS {
            self.skip(bytes)?;
            return Ok(Value::Skipped);
        }
        // below every integer of a GGUF; an Option would be compared before it has a value, which harms nothing but
        // disquiets valgrind
        const NONE: i128 = i128::MIN;
        let mut largest = NONE;
        for _ in 0..len {
            if let Value::Int(n) = self.scalar(kind)? {
                largest = largest.max(n);
            }
        }
        Ok(if largest == NONE { Value::Skipped } else { Value::Ints { largest } })
    }

    fn alignment(&self, value: &Value) -> Result<u64> {
        match value {
            Value::Int(n) => match u32::try_from(*n) {
                Ok(n) if n.is_power_of_two() => Ok(n.into()),
                _ => Err(self.corrupt(&format!("{n} is not a power of two"))),
            },
            _ => Err(self.corrupt("it is not an integer")),
        }
    }

    /// One tensor info; its offset is still relative to the data.
    fn tensor(&mut self, i: u64) -> Result<Tensor> {
        self.within = format!("tensor {i}");
        let Some(name) = self.string(MAX_NAME_BYTES)? else {
            return Err(self.corrupt(&format!("its name is longer than {MAX_NAME_BYTES} bytes")));
        };
        self.within = format!("tensor {name:?}");

        let n_dims = self.u32()?;
        let mut ne = [1; 4];
        let Some(dims) = ne.get_mut(..n_dims as usize) else {
            return Err(self.corrupt(&format!("{n_dims} dimensions, where 4 is the most")));
        };
        for n in dims {
            *n = self.u64()?;
        }
        let ty = GgmlType(self.u32()?);
        let bytes = self.tensor_bytes(ty, ne)?;
        let offset = self.u64()?;
        Ok(Tensor { name, ty, ne, n_dims, offset, bytes })
    }

    fn tensor_bytes(&self, ty: GgmlType, ne: [u64; 4]) -> Result<u64> {
        let Some(block) = ty.block_elements() else {
            return Err(self.fail(&if ty.is_removed() {
                format!("llama.cpp has removed its type, number {}; quantize the model again", ty.0)
            } else {
                format!("its type, number {}, is unknown; update ggml-les, or download the file again", ty.0)
            }));
        };
        if !ne[0].is_multiple_of(block) {
            return Err(self.corrupt(&format!("its rows of {} are no whole blocks of {ty} ({block})", ne[0])));
        }
        // llama.cpp counts elements in 63 bits.
        let elements = ne.iter().try_fold(1, |all: u64, n| all.checked_mul(*n)).filter(|all| *all <= i64::MAX as u64);
        let bytes = elements.and_then(|elements| ty.row_bytes(elements));
        bytes.ok_or_else(|| self.corrupt(&format!("its dimensions {ne:?} are too large")))
    }

    /// Makes the offsets relative to the file, whose data begin at `start`, and holds them against its end.
    fn place(&mut self, tensors: &mut [Tensor], start: Option<u64>) -> Result<()> {
        for t in tensors {
            self.within = format!("tensor {:?}", t.name);
            let offset = start.and_then(|start| start.checked_add(t.offset));
            let end = offset.and_then(|offset| offset.checked_add(t.bytes));
            match (offset, end) {
                (Some(offset), Some(end)) if end <= self.size => t.offset = offset,
                _ => {
                    let why = format!(
                        "its data ({} bytes at {} of the data) end past the file ({} bytes), which is incomplete; \
                         download it again",
                        t.bytes, t.offset, self.size
                    );
                    return Err(self.fail_at(offset.unwrap_or(self.size), &why));
                }
            }
        }
        Ok(())
    }
}
