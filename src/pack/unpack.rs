//! Gives back what was packed, as one stock GGUF file.

use std::iter::Peekable;
use std::path::Path;

use super::checks::{self, Checks};
use super::copy::{Copier, Named};
use super::header::{self, Info};
use super::output::{self, Output};
use super::{Progress, key};
use crate::error::{Error, Result};
use crate::index::{self, ExpertTensor, Header, Index, Tensor, Value};

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unpacked {
    /// Bytes of the file.
    pub bytes: u64,
    /// Whether header and size are those of the file that was packed: then, as all checksums were right, it is that file.
    /// False when the source had several files, or was not padded with zeros.
    pub identical: bool,
}

/// A tensor to write.
enum Item<'a> {
    /// File, tensor and its CRC-32.
    Dense(usize, &'a Tensor, u32),
    Experts(&'a ExpertTensor),
}

impl Item<'_> {
    fn bytes(&self) -> u64 {
        match self {
            Self::Dense(_, tensor, _) => tensor.bytes,
            Self::Experts(tensor) => tensor.expert_bytes * tensor.ne[2],
        }
    }
}

/// Unpacks the model of which `path` is a file into the one file `output`. `progress` hears of
/// [`Index::expert_bytes`] and `dense_bytes` in all.
///
/// # Errors
/// [`Error::Invalid`] when `output` exists, another run writes it, something else has its temporary name, there is no room,
/// or the model is not packed;
/// [`Error::Format`] and [`Error::Read`] when something is damaged; [`Error::File`] when reading or writing fails.
pub fn unpack(path: &Path, output: &Path, progress: &mut Progress) -> Result<Unpacked> {
    let headers = super::verify::packed_headers(path)?;
    let model = Index::from_headers(headers.clone())?;
    let files = headers.iter().map(|header| Named::open(&header.file.path)).collect::<Result<Vec<_>>>()?;
    let items = in_order(&headers, &files, &model)?;
    let first = &headers[0];
    if let Some(t) = model.tensors.iter().find(|t| t.is_mixed()) {
        let why = "has experts of several types, for which a stock file has no room";
        return Err(Error::Invalid(format!(
            "{}: {} {why}: keep the file that it was packed from",
            path.display(),
            t.name
        )));
    }

    let info = |item: &Item| {
        let (name, ne, ty) = match item {
            Item::Dense(_, t, _) => (&t.name, t.ne, t.ty),
            Item::Experts(t) => (&t.name, t.ne, t.ty),
        };
        Info { name: name.clone(), n_dims: n_dims(&headers, item), ne, ty, offset: 0 }
    };
    let mut infos: Vec<Info> = items.iter().map(info).collect();
    let kvs = header::model_kvs(&files[0], first)?;
    let data = (header::encode(first.version, &kvs, &infos).len() as u64).next_multiple_of(first.alignment);
    let (mut at, mut end) = (data, data);
    for (item, info) in items.iter().zip(&mut infos) {
        info.offset = at - data;
        end = at + item.bytes();
        at = end.next_multiple_of(first.alignment);
    }
    let header = header::encode(first.version, &kvs, &infos);
    let number = |key| match first.kv.get(key) {
        Some(Value::Int(n)) => u64::try_from(*n).ok(),
        _ => None,
    };
    let source_bytes = number(key::SOURCE_BYTES);
    // some programs pad the last tensor, others do not
    let bytes = source_bytes.filter(|bytes| (end..at).contains(bytes)).unwrap_or(at);

    let target = Output::claim(output)?;
    target.begins_with(&header)?;
    let out = &target.temporary;
    out.file.set_len(0).map_err(out.error("write"))?;
    if let Err(error) = output::need_room(output, bytes) {
        target.discard();
        return Err(error);
    }
    out.write(0, &header)?;
    let mut copier = Copier::new(progress);
    for (item, info) in items.iter().zip(&infos) {
        write(item, data + info.offset, &files, out, &mut copier)?;
    }
    out.file.set_len(bytes).map_err(out.error("write"))?;
    output::publish(&[target])?;
    let same_header = number(key::SOURCE_CRC32) == Some(crc32fast::hash(&header).into());
    Ok(Unpacked { bytes, identical: same_header && source_bytes == Some(bytes) })
}

fn write(item: &Item, mut at: u64, files: &[Named], out: &Named, copier: &mut Copier) -> Result<()> {
    match *item {
        Item::Dense(file, tensor, crc32) => {
            if copier.copy((&files[file], tensor.offset), tensor.bytes, Some((out, at)))? != crc32 {
                let why = format!("the checksum of tensor {:?} is wrong; `les verify` shows what else is", tensor.name);
                return Err(Error::Format { path: files[file].path.clone(), offset: tensor.offset, why });
            }
        }
        Item::Experts(tensor) => {
            let file = &files[tensor.file as usize];
            for expert in 0..tensor.n_expert() {
                let offset = tensor.offset_of(expert);
                let crc32 = copier.copy((file, offset), tensor.expert_bytes, Some((out, at)))?;
                if Some(crc32) != tensor.crc32_of(expert) {
                    return Err(Error::Read {
                        path: file.path.clone(),
                        tensor: tensor.name.clone(),
                        expert,
                        offset,
                        len: tensor.expert_bytes,
                        why: "the checksum is wrong; `les verify` shows what else is".into(),
                    });
                }
                at += tensor.expert_bytes;
            }
        }
    }
    Ok(())
}

fn n_dims(headers: &[Header], item: &Item) -> u32 {
    match item {
        Item::Dense(_, tensor, _) => tensor.n_dims,
        Item::Experts(t) => packed_part(headers, t).map_or(3, |part| part.n_dims),
    }
}

fn packed_part<'a>(headers: &'a [Header], t: &ExpertTensor) -> Option<&'a index::PackedPart> {
    let layer = headers[t.file as usize].packed.iter().find(|l| (l.layer, l.group) == (t.layer, t.group))?;
    layer.table.parts.iter().find(|part| part.part == t.part)
}

/// All tensors in the order of the source.
fn in_order<'a>(headers: &'a [Header], files: &[Named], model: &'a Index) -> Result<Vec<Item<'a>>> {
    let mut dense = Vec::new();
    let checks = Checks::read_all(files, headers)?;
    let of_model = checks::of_headers(headers, &checks);
    for (no, ((header, file), checks)) in headers.iter().zip(files).zip(checks).enumerate() {
        let wrong = if !checks.fits(file, header)? {
            "its metadata are damaged, or were edited since it was packed"
        } else if checks.model != of_model {
            "parts of it are of another packing"
        } else {
            ""
        };
        if !wrong.is_empty() {
            let why = format!("{wrong}; pack the model again, or copy the file again");
            return Err(Error::Format { path: file.path.clone(), offset: 0, why });
        }
        dense.extend(checks::dense(header).zip(checks.dense).map(|(tensor, crc32)| Item::Dense(no, tensor, crc32)));
    }
    let position = |t: &ExpertTensor| packed_part(headers, t).map_or(u32::MAX, |part| part.position);
    let mut experts: Vec<_> = model.tensors.iter().map(|t| (position(t), t)).collect();
    experts.sort_by_key(|(position, _)| *position);
    let (mut dense, mut experts) = (dense.into_iter(), experts.into_iter().peekable());
    let mut items = Vec::new();
    while let Some(item) = next_expert(&mut experts, items.len()).or_else(|| dense.next()) {
        items.push(item);
    }
    // left over when two are in one place, or one is past the end
    match experts.next() {
        None => Ok(items),
        Some((_, t)) => Err(Error::Format {
            path: headers[t.file as usize].file.path.clone(),
            offset: t.offset,
            why: format!("nobody knows where tensor {:?} was among the others; pack the model again", t.name),
        }),
    }
}

fn next_expert<'a>(
    experts: &mut Peekable<impl Iterator<Item = (u32, &'a ExpertTensor)>>,
    position: usize,
) -> Option<Item<'a>> {
    experts.next_if(|(at, _)| *at as usize == position).map(|(_, tensor)| Item::Experts(tensor))
}
