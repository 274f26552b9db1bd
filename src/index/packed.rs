//! Packed files: one tensor per layer holds the experts, each with all its matrices, and a table of where they are.
//!
//! `src/pack/FORMAT.md` describes the bytes. Nothing in a table is trusted: what it says must fit the tensor, the types
//! and the order of experts, or the file is refused.

use std::io::{Read, Seek};

use super::gguf::Tensor;
use super::reader::Reader;
use super::types::GgmlType;
use super::{ExpertTensor, Index, MAX_EXPERTS, MAX_LAYERS, Part};
use crate::error::Result;

/// How all names begin that are ours: keys, and tensors that are not of a layer.
pub const PREFIX: &str = "les.";
/// The version of the format, in tables and in the key `les.pack.version`.
pub const VERSION: u32 = 1;
/// Packers begin the matrices of an expert at multiples of this.
pub const PART_ALIGN: u64 = 4 << 10;
/// How the names begin of the tensors that hold checksums, one in each file.
pub const CHECKS: &str = "les.checks.";
/// How these tensors begin.
pub const CHECKS_MAGIC: &[u8; 8] = b"LESCHECK";
/// Where the checksum [of the model](super::Header::model) is in them, in bytes.
pub const CHECKS_MODEL: usize = 28;

const MAGIC: &[u8; 8] = b"LESEXPRT";
const HEAD_BYTES: usize = 24;
const PART_BYTES: usize = 32;
const ROW_BYTES: usize = 24;
const CHECKSUM_BYTES: usize = 4;
/// The remedy for what no packer writes.
const REMEDY: &str = "the packed experts are incomplete or damaged; pack the model again, or copy the file again";

/// One matrix of every expert of a packed layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedPart {
    /// Which matrix.
    pub part: Part,
    /// The type that its tensor has for llama.cpp. That of each expert [mixes](GgmlType::mixes_with) with it.
    pub ty: GgmlType,
    /// How many dimensions its tensor had.
    pub n_dims: u32,
    /// Where its tensor was among all tensors of the model that was packed; 0 is the first.
    pub position: u32,
    /// Elements of a row.
    pub columns: u64,
    /// Rows of one expert.
    pub rows: u64,
}

impl PackedPart {
    /// Bytes of an expert's matrix of type `ty`. `None` when the type is unknown or the size makes no sense.
    pub fn bytes(&self, ty: GgmlType) -> Option<u64> {
        ty.row_bytes(self.columns)?.checked_mul(self.rows).filter(|&bytes| bytes > 0 && bytes <= i64::MAX as u64)
    }
}

/// One matrix of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Where it begins, in bytes: in a [`Table`] from the start of the layer's tensor, in an [`ExpertTensor`] from the
    /// start of the file.
    pub offset: u64,
    /// How many bytes it has.
    pub bytes: u64,
    /// Its type.
    pub ty: GgmlType,
    /// CRC-32 (IEEE) of its bytes.
    pub crc32: u32,
}

/// Where the experts of one layer are within its tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The matrices of each expert, in the order of their bytes.
    pub parts: Vec<PackedPart>,
    /// How many experts there are.
    pub n_expert: u32,
    /// Expert 0's matrices in the order of `parts`, expert 1's, and so on. They do not overlap, and their offsets ascend.
    pub rows: Vec<Row>,
}

impl Table {
    /// Bytes of a table.
    pub const fn bytes(n_parts: usize, n_expert: u32) -> usize {
        HEAD_BYTES + n_parts * (PART_BYTES + n_expert as usize * ROW_BYTES) + CHECKSUM_BYTES
    }

    /// The bytes in the file.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for n in [VERSION, self.parts.len() as u32, self.n_expert, 0] {
            out.extend(n.to_le_bytes());
        }
        for p in &self.parts {
            for n in [number(p.part), p.ty.0, p.n_dims, p.position] {
                out.extend(n.to_le_bytes());
            }
            out.extend(p.columns.to_le_bytes());
            out.extend(p.rows.to_le_bytes());
        }
        for row in &self.rows {
            out.extend(row.offset.to_le_bytes());
            out.extend(row.bytes.to_le_bytes());
            out.extend(row.ty.0.to_le_bytes());
            out.extend(row.crc32.to_le_bytes());
        }
        out.extend(crc32fast::hash(&out).to_le_bytes());
        out
    }

    /// The checksum of all that it says, with which it ends in the file.
    pub fn crc32(&self) -> u32 {
        self.encode().last_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    /// How long the table is that begins with `head`.
    fn length(head: &[u8; HEAD_BYTES]) -> Result<usize, String> {
        let mut r = Fields(head);
        if &r.take() != MAGIC {
            return Err("there is no table of experts".into());
        }
        let [version, n_parts, n_expert] = [(); 3].map(|()| r.u32());
        if version != VERSION {
            return Err(format!(
                "version {version} of the packed format is unknown ({VERSION} is known); update ggml-les"
            ));
        }
        if !(1..=Part::ALL.len() as u32).contains(&n_parts) || !(1..=MAX_EXPERTS).contains(&n_expert.into()) {
            return Err(format!("{n_expert} experts of {n_parts} matrices make no sense"));
        }
        Ok(Self::bytes(n_parts as usize, n_expert))
    }

    /// Reads a table of a tensor of so many bytes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8], tensor_bytes: u64) -> Result<Self, String> {
        let head = bytes.first_chunk().ok_or("there is no table of experts")?;
        let length = Self::length(head)?;
        let (Some(bytes), true) = (bytes.get(..length), length as u64 <= tensor_bytes) else {
            return Err("the table of experts ends too early".into());
        };
        let (content, checksum) = bytes.split_at(length - CHECKSUM_BYTES);
        // a fuzzer would never come past it
        if !cfg!(fuzzing) && crc32fast::hash(content) != Fields(checksum).u32() {
            return Err("the checksum of the table of experts is wrong".into());
        }
        let mut r = Fields(&content[12..]);
        let [n_parts, n_expert, _] = [(); 3].map(|()| r.u32());
        let parts = (0..n_parts).map(|_| r.part()).collect::<Result<Vec<_>, _>>()?;
        let mut rows = Vec::with_capacity(parts.len() * n_expert as usize);
        let mut end = length as u64;
        for expert in 0..n_expert {
            for part in &parts {
                let wrong = |why: &str| Err(format!("expert {expert}, {}: {why}", part.part));
                let (offset, bytes, ty, crc32) = (r.u64(), r.u64(), GgmlType(r.u32()), r.u32());
                if !ty.mixes_with(part.ty) {
                    return wrong("its type cannot be one tensor's with the others'");
                }
                if Some(bytes) != part.bytes(ty) {
                    return wrong("its size is not that of its type and shape");
                }
                if offset < end {
                    return wrong("it overlaps what is before it");
                }
                end = match offset.checked_add(bytes) {
                    Some(end) if end <= tensor_bytes => end,
                    _ => return wrong("it ends past the tensor"),
                };
                rows.push(Row { offset, bytes, ty, crc32 });
            }
        }
        Ok(Self { parts, n_expert, rows })
    }
}

const fn number(part: Part) -> u32 {
    match part {
        Part::Up => 0,
        Part::Gate => 1,
        Part::GateUp => 2,
        Part::Down => 3,
    }
}

/// Little-endian fields of bytes whose number was checked before: past their end there are zeros.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk() else { return [0; N] };
        self.0 = rest;
        *field
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn part(&mut self) -> Result<PackedPart, String> {
        let n = self.u32();
        let Some(part) = Part::ALL.into_iter().find(|&part| number(part) == n) else {
            return Err(format!("{n} is no matrix of an expert"));
        };
        let (ty, n_dims, position) = (GgmlType(self.u32()), self.u32(), self.u32());
        let part = PackedPart { part, ty, n_dims, position, columns: self.u64(), rows: self.u64() };
        if part.bytes(ty).is_none() || !(1..=4).contains(&n_dims) {
            return Err(format!("{}: {} x {} of {ty} make no matrix", part.part, part.columns, part.rows));
        }
        Ok(part)
    }
}

/// A layer whose experts are packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedLayer {
    /// The layer (`blk.N`).
    pub layer: u32,
    /// As [`ExpertTensor::group`].
    pub group: u32,
    /// The tensor that holds it: an index into [`Header::tensors`](super::Header::tensors).
    pub tensor: usize,
    /// Where its experts are.
    pub table: Table,
}

impl PackedLayer {
    /// The tensors that it stands for, of a file and of the layer's tensor in it.
    pub(super) fn expand(&self, file: u32, tensor: &Tensor) -> impl Iterator<Item = ExpertTensor> {
        let n_parts = self.table.parts.len();
        self.table.parts.iter().enumerate().map(move |(i, part)| {
            let rows = self.table.rows.iter().skip(i).step_by(n_parts);
            let rows = rows.map(|row| Row { offset: tensor.offset + row.offset, ..*row }).collect::<Vec<_>>();
            ExpertTensor {
                name: super::expert_name(self.layer, self.group, part.part),
                layer: self.layer,
                group: self.group,
                part: part.part,
                ty: part.ty,
                ne: [part.columns, part.rows, self.table.n_expert.into(), 1],
                file,
                offset: rows.first().map_or(0, |row| row.offset),
                expert_bytes: part.bytes(part.ty).unwrap_or(0),
                packed: Some(rows.into()),
            }
        })
    }
}

/// The name of the tensor that holds the packed experts of a layer.
pub fn layer_name(layer: u32, group: u32) -> String {
    format!("blk.{layer}.les_{}", SETS[usize::from(group > 0)])
}

/// By group.
const SETS: [&str; 2] = ["experts", "chexperts"];

fn parse_layer_name(name: &str) -> Option<(u32, u32)> {
    let (layer, set) = name.strip_prefix("blk.")?.split_once(".les_")?;
    let group = SETS.into_iter().position(|s| s == set)? as u32;
    let layer = layer.parse().ok()?;
    (layer_name(layer, group) == name).then_some((layer, group))
}

/// Whether a tensor is ours: neither the model's as it was, nor a layer's experts.
pub fn is_own(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Whether only packed files have a tensor of this name: it is ours, or holds a layer's experts.
pub fn is_packed_name(name: &str) -> bool {
    is_own(name) || parse_layer_name(name).is_some()
}

/// Reads the tables of a file's packed layers, and the checksum of the model, where there is one. `r` is at the end of
/// the tensor infos.
pub(super) fn read<R: Read + Seek>(
    r: &mut Reader<'_, R>,
    tensors: &[Tensor],
) -> Result<(Vec<PackedLayer>, Option<u32>)> {
    let (mut layers, mut model) = (Vec::new(), None);
    for (i, tensor) in tensors.iter().enumerate() {
        if tensor.name.starts_with(CHECKS) {
            model = model.or(read_model(r, tensor)?);
        }
        let Some((layer, group)) = parse_layer_name(&tensor.name) else { continue };
        r.within = format!("tensor {:?}", tensor.name);
        let wrong = |r: &Reader<'_, R>, why: &str| Err(r.fail_at(tensor.offset, &format!("{why}; {REMEDY}")));
        if layer >= MAX_LAYERS {
            return wrong(r, &format!("llama.cpp takes up to {MAX_LAYERS} layers"));
        }
        if tensor.ty != GgmlType::I8 || tensor.bytes < HEAD_BYTES as u64 {
            return wrong(r, "there is no table of experts");
        }
        r.skip(tensor.offset - r.pos)?;
        let mut bytes = r.take::<HEAD_BYTES>()?.to_vec();
        let length = bytes.first_chunk().map_or(Err(String::new()), Table::length);
        let table = match length {
            // before anything is allocated for it; the counts are bounded, so the length is
            Ok(length) if length as u64 <= tensor.bytes => {
                bytes.resize(length, 0);
                r.fill(&mut bytes[HEAD_BYTES..])?;
                Table::decode(&bytes, tensor.bytes)
            }
            Ok(_) => Err("the table of experts ends past the tensor".into()),
            Err(why) => Err(why),
        };
        match table {
            Ok(table) => layers.push(PackedLayer { layer, group, tensor: i, table }),
            Err(why) => return wrong(r, &why),
        }
    }
    Ok((layers, model))
}

/// The checksum of the model in a tensor of checksums. `None` where it is not one.
fn read_model<R: Read + Seek>(r: &mut Reader<'_, R>, tensor: &Tensor) -> Result<Option<u32>> {
    let mut head = [0; CHECKS_MODEL + 4];
    if tensor.bytes < head.len() as u64 {
        return Ok(None);
    }
    r.within = format!("tensor {:?}", tensor.name);
    r.skip(tensor.offset - r.pos)?;
    r.fill(&mut head)?;
    Ok(head.starts_with(CHECKS_MAGIC).then(|| Fields(&head[CHECKS_MODEL..]).u32()))
}

impl ExpertTensor {
    /// Where expert `expert` begins, in bytes from the start of the file.
    pub fn offset_of(&self, expert: u32) -> u64 {
        match &self.packed {
            Some(rows) => rows.get(expert as usize).map_or(u64::MAX, |row| row.offset),
            None => self.offset + u64::from(expert) * self.expert_bytes,
        }
    }

    /// Bytes of expert `expert`.
    pub fn bytes_of(&self, expert: u32) -> u64 {
        self.row(expert).map_or(self.expert_bytes, |row| row.bytes)
    }

    /// The type of expert `expert`.
    pub fn type_of(&self, expert: u32) -> GgmlType {
        self.row(expert).map_or(self.ty, |row| row.ty)
    }

    /// Whether it has experts of several types, or of another one than `ty`.
    pub fn is_mixed(&self) -> bool {
        self.packed.as_ref().is_some_and(|rows| rows.iter().any(|row| row.ty != self.ty))
    }

    /// Bytes of all experts.
    pub fn all_bytes(&self) -> u64 {
        match &self.packed {
            Some(rows) => rows.iter().fold(0, |sum, row| sum.saturating_add(row.bytes)),
            None => self.expert_bytes.saturating_mul(self.ne[2]),
        }
    }

    fn row(&self, expert: u32) -> Option<&Row> {
        self.packed.as_ref()?.get(expert as usize)
    }

    /// CRC-32 (IEEE) of the bytes of expert `expert`. `None` where the file has none.
    pub fn crc32_of(&self, expert: u32) -> Option<u32> {
        self.row(expert).map(|row| row.crc32)
    }
}

impl Index {
    /// Whether there are packed experts. Only we can load them.
    pub fn is_packed(&self) -> bool {
        self.tensors.iter().any(|t| t.packed.is_some())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn table() -> Table {
        let part = |part, rows| PackedPart { part, ty: GgmlType(8), n_dims: 3, position: 7, columns: 64, rows };
        let parts = vec![part(Part::Up, 2), part(Part::Down, 3)];
        // the last one is of another type
        let rows = [(400, 2, 8, 1), (600, 3, 8, 2), (1000, 2, 8, 3), (1200, 3, 6, u32::MAX)];
        let row = |(offset, n, ty, crc32)| {
            let ty = GgmlType(ty);
            Row { offset, bytes: n * ty.row_bytes(64).unwrap(), ty, crc32 }
        };
        Table { parts, n_expert: 2, rows: rows.map(row).to_vec() }
    }

    /// The table with some bytes replaced, and a checksum that says they are right.
    fn with(at: usize, bytes: &[u8]) -> Result<Table, String> {
        let mut all = table().encode();
        all[at..at + bytes.len()].copy_from_slice(bytes);
        let end = all.len() - CHECKSUM_BYTES;
        let checksum = crc32fast::hash(&all[..end]).to_le_bytes();
        all[end..].copy_from_slice(&checksum);
        Table::decode(&all, 1404)
    }

    #[test]
    fn a_table_comes_back() {
        let bytes = table().encode();
        assert_eq!(bytes.len(), Table::bytes(2, 2));
        assert_eq!(Table::decode(&bytes, 1404).unwrap(), table());
        assert!(Table::decode(&bytes, 1332).is_ok());
        // 1200 and three rows of two blocks of 22 bytes
        assert!(Table::decode(&bytes, 1331).unwrap_err().contains("past the tensor"));
        assert!(Table::decode(&bytes[..bytes.len() - 1], 1404).is_err());
    }

    #[test]
    fn every_flipped_bit_of_a_table_is_noticed() {
        let bytes = table().encode();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Table::decode(&bytes, 1404).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn tables_that_make_no_sense_are_refused() {
        let row = HEAD_BYTES + 2 * PART_BYTES;
        for (at, bytes, word) in [
            (8, &2_u32.to_le_bytes()[..], "update ggml-les"),
            (12, &0_u32.to_le_bytes(), "no sense"),
            (12, &5_u32.to_le_bytes(), "no sense"),
            (16, &0_u32.to_le_bytes(), "no sense"),
            (16, &u32::MAX.to_le_bytes(), "no sense"),
            (16, &3_u32.to_le_bytes(), "too early"),
            (24, &4_u32.to_le_bytes(), "no matrix"),
            (28, &31_u32.to_le_bytes(), "no matrix"),
            (32, &5_u32.to_le_bytes(), "no matrix"),
            (40, &63_u64.to_le_bytes(), "no matrix"),
            (48, &u64::MAX.to_le_bytes(), "no matrix"),
            (48, &0_u64.to_le_bytes(), "no matrix"),
            (48, &3_u64.to_le_bytes(), "size"),
            (row, &8_u64.to_le_bytes(), "overlaps"),
            (row, &1000_u64.to_le_bytes(), "overlaps"),
            (row, &u64::MAX.to_le_bytes(), "past the tensor"),
            (row + 8, &1_u64.to_le_bytes(), "size"),
            (row + 16, &12_u32.to_le_bytes(), "type"),
            (row + 16, &6_u32.to_le_bytes(), "size"),
        ] {
            let why = with(at, bytes).unwrap_err();
            assert!(why.contains(word), "{at}: {why}");
        }
    }

    #[test]
    fn names_of_packed_layers() {
        assert_eq!(parse_layer_name("blk.3.les_experts"), Some((3, 0)));
        assert_eq!(parse_layer_name("blk.0.les_chexperts"), Some((0, 1)));
        assert!(is_packed_name("blk.3.les_experts") && is_packed_name("les.checks.0"));
        assert!(!is_packed_name("blk.3.ffn_up_exps.weight") && !is_packed_name("blk.03.les_experts"));
        for name in
            ["blk.03.les_experts", "blk.3.les_exps", "blk..les_experts", "les.checks.0", "blk.3.les_experts.weight"]
        {
            assert_eq!(parse_layer_name(name), None, "{name}");
        }
    }
}
