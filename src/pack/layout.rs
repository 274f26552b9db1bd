//! What is where in the packed files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::checks::{self, Checks};
use super::copy::{self, Named};
use super::header::{self, Info};
use super::key;
use super::mix::Mix;
use crate::error::{Error, Result};
use crate::index::{self, Header, Index, PART_ALIGN, PackedPart, Row, Table, VERSION, is_own, layer_name};

/// Experts begin at multiples of this in the file: no device in use asks for more.
pub const EXPERT_ALIGN: u64 = 16 << 10;
/// No more shards than `split.count` can hold.
const MOST_FILES: usize = u16::MAX as usize;

/// A model to pack.
#[derive(Debug)]
pub struct Source {
    /// The headers of its files, in their order.
    pub headers: Vec<Header>,
    /// What it holds.
    pub index: Index,
    pub(super) files: Vec<Named>,
    /// CRC-32 of all headers, one after the other.
    pub(super) crc32: u32,
    /// Of sizes and times: whether it is still the same model.
    pub(super) stamp: u32,
}

impl Source {
    /// Opens a model by the path of any of its files.
    ///
    /// # Errors
    /// As [`Index::open`]; [`Error::Invalid`] when there is nothing to pack.
    pub fn open(path: &Path) -> Result<Self> {
        let headers = index::headers(path)?;
        let index = Index::from_headers(headers.clone())?;
        let refuse = |why: &str| Err(Error::Invalid(format!("{}: {why}", path.display())));
        let mut tensors = headers.iter().flat_map(|header| &header.tensors);
        if headers.iter().any(|header| !header.packed.is_empty()) {
            return refuse("this model is packed already");
        }
        if index.tensors.is_empty() {
            return refuse("this model has no routed experts: there is nothing to pack");
        }
        if let Some(t) = tensors.find(|t| is_own(&t.name) || t.name.contains(char::REPLACEMENT_CHARACTER)) {
            return refuse(&format!("tensor {:?} has a name that a packed file cannot hold", t.name));
        }
        let files = headers.iter().map(|header| Named::open(&header.file.path)).collect::<Result<Vec<_>>>()?;
        let mut hasher = crc32fast::Hasher::new();
        for (file, header) in files.iter().zip(&headers) {
            hasher.update(&file.bytes(0, header.end as usize)?);
        }
        let source = Self { crc32: hasher.finalize(), stamp: stamp(&headers)?, headers, index, files };
        for layer in source.layers() {
            let [first, others @ ..] = &layer[..] else { continue };
            let of = |i: &usize| &source.index.tensors[*i];
            let (first, n_expert) = (of(first), of(first).n_expert());
            if let Some(other) = others.iter().map(of).find(|t| t.n_expert() != n_expert) {
                let why = format!("{} has {n_expert} experts, and {} has {}", first.name, other.name, other.n_expert());
                return refuse(&format!("{why}: such a model cannot be packed"));
            }
        }
        Ok(source)
    }

    /// Bytes of all its files.
    pub fn bytes(&self) -> u64 {
        self.headers.iter().map(|header| header.file.size).sum()
    }

    /// The tensors of each layer and group, by their index, in the order of the model.
    pub(super) fn layers(&self) -> Vec<Vec<usize>> {
        let of = |i: usize| (self.index.tensors[i].layer, self.index.tensors[i].group);
        let indices: Vec<usize> = (0..self.index.tensors.len()).collect();
        indices.chunk_by(|&a, &b| of(a) == of(b)).map(<[usize]>::to_vec).collect()
    }

    /// Fails when a file was changed since it was opened.
    pub(super) fn unchanged(&self) -> Result<()> {
        if stamp(&self.headers)? == self.stamp {
            return Ok(());
        }
        let path = self.headers[0].file.path.clone();
        Err(Error::Changed { path, what: "while it was packed; pack it again".into() })
    }

    fn kvs(&self) -> Result<Vec<Vec<u8>>> {
        let (file, first) = (&self.files[0], &self.headers[0]);
        let mut kvs = header::model_kvs(file, first)?;
        kvs.push(header::kv_u32(key::VERSION, VERSION));
        kvs.push(header::kv_text(key::SOURCE_FILE, &file.name()));
        kvs.push(header::kv_u64(key::SOURCE_BYTES, self.bytes()));
        kvs.push(header::kv_u32(key::SOURCE_CRC32, self.crc32));
        Ok(kvs)
    }
}

fn stamp(headers: &[Header]) -> Result<u32> {
    copy::stamp(headers.iter().map(|header| header.file.path.as_path()))
}

/// A tensor of a packed file.
#[derive(Debug)]
pub(super) enum Content {
    /// One that stays as it is: its file, and its index among the tensors of that.
    Dense(usize, usize),
    /// The experts of a layer.
    Experts(Layer),
}

/// The experts of a layer and group.
#[derive(Debug)]
pub(super) struct Layer {
    name: String,
    /// Indices into [`Index::tensors`], in the order of use.
    pub(super) tensors: Vec<usize>,
    /// Where they will be; the checksums are not known yet.
    pub(super) table: Table,
    /// Bytes of its tensor.
    pub(super) bytes: u64,
}

impl Layer {
    /// Places the experts in a tensor that begins at `offset` of its file.
    fn place(&mut self, offset: u64) {
        let n_parts = self.table.parts.len();
        let mut at = offset + Table::bytes(n_parts, self.table.n_expert) as u64;
        for (i, row) in self.table.rows.iter_mut().enumerate() {
            let align = if i % n_parts == 0 { EXPERT_ALIGN } else { PART_ALIGN };
            row.offset = at.next_multiple_of(align) - offset;
            at = offset + row.offset + row.bytes;
        }
        // so that no aligned read reaches past the tensor, and the next one begins aligned
        self.bytes = at.next_multiple_of(EXPERT_ALIGN) - offset;
    }
}

/// One packed file.
#[derive(Debug)]
pub struct OutFile {
    /// Where it will be.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    pub(super) header: Vec<u8>,
    /// Its tensors, each with where it begins in the file.
    pub(super) contents: Vec<(Content, u64)>,
    /// Where the checksums begin.
    pub(super) checks_at: u64,
}

impl OutFile {
    /// How many layers (and groups) have their experts here.
    pub fn layers(&self) -> usize {
        self.contents.iter().filter(|(content, _)| matches!(content, Content::Experts(_))).count()
    }

    /// How many other tensors of the model are here.
    pub fn others(&self) -> usize {
        self.contents.len() - self.layers()
    }
}

/// All packed files of a model.
#[derive(Debug)]
pub struct Layout {
    /// They, in their order.
    pub files: Vec<OutFile>,
}

impl Layout {
    /// Lays out `source` in the file `output`, or with `split` in shards of up to so many bytes each (more where one
    /// tensor is larger). The experts have the types of `mix`, or their own.
    ///
    /// # Errors
    /// When the source cannot be read; [`Error::Invalid`] when it cannot be packed.
    pub fn new(source: &Source, output: &Path, split: Option<u64>, mix: Option<&Mix>) -> Result<Self> {
        let shares = share(contents(source, mix)?, source, split);
        let count = shares.len();
        if count > MOST_FILES {
            return Err(Error::Invalid(format!("that would be {count} files, where {MOST_FILES} are the most")));
        }
        // every file has one tensor of checksums
        let tensors: usize = shares.iter().map(|share| share.len() + 1).sum();
        let of = |(no, contents): (usize, Vec<Content>)| {
            let mut kvs = if no == 0 { source.kvs()? } else { Vec::new() };
            kvs.extend(mix.filter(|_| no == 0).map(Mix::kvs).unwrap_or_default());
            let mut path = output.to_owned();
            if split.is_some() {
                kvs.extend(header::split_kvs(no as u16, count as u16, tensors as i32));
                path = shard_path(output, no, count);
            }
            let alignment = if no == 0 { source.headers[0].alignment } else { 32 };
            Ok(place(source, path, no, &kvs, alignment, contents))
        };
        Ok(Self { files: shares.into_iter().enumerate().map(of).collect::<Result<_>>()? })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// `NAME-00001-of-000NN.gguf` beside `NAME.gguf`.
pub(super) fn shard_path(output: &Path, no: usize, count: usize) -> PathBuf {
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    output.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", no + 1))
}

/// The tensors of the packed model: first those that stay as they are, then layer by layer.
fn contents(source: &Source, mix: Option<&Mix>) -> Result<Vec<Content>> {
    let mut positions = HashMap::new();
    let mut contents = Vec::new();
    for (file, header) in source.headers.iter().enumerate() {
        for (i, tensor) in header.tensors.iter().enumerate() {
            positions.insert(tensor.name.as_str(), (positions.len() as u32, tensor.n_dims));
            if source.index.find(&tensor.name).is_none() {
                contents.push(Content::Dense(file, i));
            }
        }
    }
    let of = |i: usize| &source.index.tensors[i];
    for tensors in source.layers() {
        let first = of(tensors[0]);
        let n_expert = first.n_expert();
        let part = |&i: &usize| {
            let t = of(i);
            let (position, n_dims) = positions.get(t.name.as_str()).copied().unwrap_or_default();
            let ty = mix.and_then(|mix| mix.main_type(i)).unwrap_or(t.ty);
            PackedPart { part: t.part, ty, n_dims, position, columns: t.ne[0], rows: t.ne[1] }
        };
        let parts: Vec<_> = tensors.iter().map(part).collect();
        let row = |expert: u32, i: usize, part: &PackedPart| {
            let ty = mix.map_or(part.ty, |mix| mix.type_of(i, expert));
            Row { offset: 0, bytes: part.bytes(ty).unwrap_or(0), ty, crc32: 0 }
        };
        let of_expert = |expert| tensors.iter().zip(&parts).map(move |(&i, part)| row(expert, i, part));
        let rows = (0..n_expert).flat_map(of_expert).collect();
        contents.push(Content::Experts(Layer {
            name: layer_name(first.layer, first.group),
            tensors,
            table: Table { parts, n_expert, rows },
            bytes: 0,
        }));
    }
    Ok(contents)
}

/// Which tensors are in which file.
fn share(contents: Vec<Content>, source: &Source, split: Option<u64>) -> Vec<Vec<Content>> {
    let mut shares = Vec::new();
    let (mut share, mut bytes) = (Vec::new(), 0_u64);
    for mut content in contents {
        let more = match &mut content {
            Content::Dense(file, i) => source.headers[*file].tensors[*i].bytes,
            Content::Experts(layer) => {
                layer.place(0);
                layer.bytes
            }
        };
        if !share.is_empty() && split.is_some_and(|most| bytes.saturating_add(more) > most) {
            shares.push(std::mem::take(&mut share));
            bytes = 0;
        }
        bytes = bytes.saturating_add(more);
        share.push(content);
    }
    shares.push(share);
    shares
}

fn place(
    source: &Source,
    path: PathBuf,
    no: usize,
    kvs: &[Vec<u8>],
    alignment: u64,
    contents: Vec<Content>,
) -> OutFile {
    let version = source.headers[0].version;
    let info = |content: &Content| match content {
        Content::Dense(file, i) => {
            let t = &source.headers[*file].tensors[*i];
            Info { name: t.name.clone(), n_dims: t.n_dims, ne: t.ne, ty: t.ty, offset: 0 }
        }
        Content::Experts(layer) => Info::of_bytes(layer.name.clone(), 0, 0),
    };
    let mut infos: Vec<Info> = contents.iter().map(info).collect();
    infos.push(Info::of_bytes(checks::name(no), 0, 0));
    // the numbers do not change its length
    let data = (header::encode(version, kvs, &infos).len() as u64).next_multiple_of(alignment);

    let mut at = data;
    let mut n_dense = 0;
    let mut placed = Vec::with_capacity(contents.len());
    for (mut content, info) in contents.into_iter().zip(&mut infos) {
        let bytes = match &mut content {
            Content::Dense(file, i) => {
                n_dense += 1;
                source.headers[*file].tensors[*i].bytes
            }
            Content::Experts(layer) => {
                layer.place(at);
                info.ne[0] = layer.bytes;
                layer.bytes
            }
        };
        info.offset = at - data;
        placed.push((content, at));
        at = (at + bytes).next_multiple_of(alignment);
    }
    let checks_bytes = Checks::bytes(n_dense) as u64;
    if let Some(info) = infos.last_mut() {
        (info.ne[0], info.offset) = (checks_bytes, at - data);
    }
    let bytes = (at + checks_bytes).next_multiple_of(alignment);
    OutFile { path, bytes, header: header::encode(version, kvs, &infos), contents: placed, checks_at: at }
}
