//! Writes packed files.
//!
//! The order makes a run that was ended at any moment one that can go on: a layer's table is written when its experts
//! are on the device, so a layer with a table is done. What is quick is done anew.

use std::fs;

use super::Progress;
use super::checks::{self, Checks};
use super::copy::{Copier, Named};
use super::layout::{Content, Layer, Layout, OutFile, Source};
use super::mix::{Matrices, Mix};
use super::output::{self, Output};
use super::parallel;
use crate::error::Result;
use crate::index::{Row, Table};

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// Bytes of the packed files.
    pub bytes: u64,
    /// Of those, what an earlier run had written.
    pub resumed_bytes: u64,
}

/// Packs `source` as laid out, with the types of `mix` if it was laid out so. `progress` hears of [`Index::expert_bytes`](crate::index::Index::expert_bytes) and
/// `dense_bytes` in all, those of an earlier run at once. When it fails, what is done stays beside the target, for the next run.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) when a target exists, another run writes it, or there is no room;
/// [`Error::File`](crate::Error::File) when reading or writing fails; [`Error::Changed`](crate::Error::Changed) when
/// the source did meanwhile.
pub fn pack(source: &Source, layout: &Layout, mix: Option<&Mix>, progress: &mut Progress) -> Result<Packed> {
    let outputs = claim(layout)?;
    let mut done = Vec::new();
    for (file, output) in layout.files.iter().zip(&outputs) {
        done.push(begin(file, source, output)?);
    }
    let bytes = layout.bytes();
    let layers = |i: usize| layout.files[i].contents.iter().zip(&done[i]);
    let resumed_bytes = (0..done.len()).flat_map(layers).map(|((content, _), &done)| done_bytes(content, done)).sum();
    if let Err(error) = output::need_room(&layout.files[0].path, bytes - resumed_bytes) {
        if resumed_bytes == 0 {
            outputs.into_iter().for_each(Output::discard);
        }
        return Err(error);
    }
    let mut copier = Copier::new(progress);
    let mut checks = Vec::new();
    for ((file, output), done) in layout.files.iter().zip(&outputs).zip(done) {
        let out = &output.temporary;
        checks.push(write(file, source, mix, out, &done, &mut copier)?);
        out.file.sync_data().map_err(out.error("write"))?;
    }
    source.unchanged()?;
    mix.map_or(Ok(()), |mix| mix.unchanged(source))?;
    // last, as nothing that was ended after this can go on
    let of_model = checks::of_model(checks.iter().map(|(checks, tables)| (checks, tables)));
    for ((file, output), (checks, _)) in layout.files.iter().zip(&outputs).zip(checks) {
        let checks = Checks { model: of_model, ..checks };
        let out = &output.temporary;
        out.write(file.checks_at, &checks.encode())?;
        out.file.set_len(file.bytes).map_err(out.error("write"))?;
    }
    output::publish(&outputs)?;
    Ok(Packed { bytes, resumed_bytes })
}

fn done_bytes(content: &Content, done: bool) -> u64 {
    match content {
        Content::Experts(layer) if done => layer.bytes,
        _ => 0,
    }
}

/// Opens what is to be written, and takes back the names that a run has given which was ended while it gave them.
fn claim(layout: &Layout) -> Result<Vec<Output>> {
    let temporary = |file: &OutFile| output::temporary_path(&file.path);
    // a run that goes on has these locked, also while it gives names
    let unfinished = |file: &OutFile| temporary(file).exists().then(|| Output::open(&file.path)).transpose();
    let outputs = layout.files.iter().map(unfinished).collect::<Result<Vec<_>>>()?;
    if outputs.iter().any(Option::is_some) {
        for (file, _) in layout.files.iter().zip(&outputs).filter(|(_, output)| output.is_none()) {
            if file.path.exists() {
                let there = Named::open(&file.path)?;
                if starts_with(&there, file)? {
                    fs::rename(&file.path, temporary(file)).map_err(there.error("rename"))?;
                }
            }
        }
    }
    let claim = |(file, output): (&OutFile, Option<Output>)| match output {
        Some(output) => output.new_name(),
        None => Output::claim(&file.path),
    };
    layout.files.iter().zip(outputs).map(claim).collect()
}

/// Whether what is there has the header of `file`.
fn starts_with(there: &Named, file: &OutFile) -> Result<bool> {
    let len = there.file.metadata().map_err(there.error("inspect"))?.len();
    Ok(len >= file.header.len() as u64 && there.bytes(0, file.header.len())? == file.header)
}

/// Begins a file, or finds out what an earlier run has done: per tensor.
fn begin(file: &OutFile, source: &Source, output: &Output) -> Result<Vec<bool>> {
    let out = &output.temporary;
    let mark = checks::mark(source.stamp);
    let ours = output.begins_with(&file.header)?;
    let len = out.file.metadata().map_err(out.error("inspect"))?.len();
    let fits = len >= file.checks_at + mark.len() as u64;
    if fits && ours && out.bytes(file.checks_at, mark.len())? == mark {
        return file.contents.iter().map(|(content, at)| is_done(content, *at, out)).collect();
    }
    out.file.set_len(0).map_err(out.error("write"))?;
    out.write(0, &file.header)?;
    out.write(file.checks_at, &mark)?;
    out.file.sync_data().map_err(out.error("write"))?;
    Ok(vec![false; file.contents.len()])
}

fn is_done(content: &Content, at: u64, out: &Named) -> Result<bool> {
    let Content::Experts(layer) = content else { return Ok(false) };
    let Some(there) = read_table(layer, at, out)? else { return Ok(false) };
    let same = |(a, b): (&Row, &Row)| (a.offset, a.bytes, a.ty) == (b.offset, b.bytes, b.ty);
    Ok(there.parts == layer.table.parts && there.rows.iter().zip(&layer.table.rows).all(same))
}

/// The table of a layer as it is in the file. `None` when there is none.
fn read_table(layer: &Layer, at: u64, out: &Named) -> Result<Option<Table>> {
    let bytes = out.bytes(at, Table::bytes(layer.table.parts.len(), layer.table.n_expert))?;
    Ok(Table::decode(&bytes, layer.bytes).ok())
}

/// Writes the tensors that are not done; answers with the checksums of those that are not experts, without that of the
/// model, and with those of the tables.
fn write(
    file: &OutFile,
    source: &Source,
    mix: Option<&Mix>,
    out: &Named,
    done: &[bool],
    copier: &mut Copier,
) -> Result<(Checks, Vec<u32>)> {
    let mut tables = Vec::new();
    for ((content, at), &done) in file.contents.iter().zip(done) {
        match content {
            Content::Experts(layer) if done => {
                tables.push(read_table(layer, *at, out)?.map_or(0, |table| table.crc32()));
                let of = |&i: &usize| &source.index.tensors[i];
                copier.skip(layer.tensors.iter().map(of).map(|t| t.expert_bytes * t.ne[2]).sum())?;
            }
            Content::Experts(layer) => {
                let mut table = layer.table.clone();
                // what stands there may be of other types that take as many bytes: it must not outlive the experts
                out.write(*at, &vec![0; table.rows.first().map_or(0, |row| row.offset) as usize])?;
                out.file.sync_data().map_err(out.error("write"))?;
                match mix {
                    Some(mix) => make_experts(&mix.matrices(source, &layer.tensors)?, &mut table, (out, *at), copier)?,
                    None => copy_experts(layer, &mut table, source, (out, *at), copier)?,
                }
                fill_gaps(&table, layer.bytes, (out, *at))?;
                out.file.sync_data().map_err(out.error("write"))?;
                out.write(*at, &table.encode())?;
                tables.push(table.crc32());
            }
            Content::Dense(..) => {}
        }
    }
    let mut dense = Vec::new();
    for (content, at) in &file.contents {
        if let Content::Dense(from, i) = content {
            let tensor = &source.headers[*from].tensors[*i];
            dense.push(copier.copy((&source.files[*from], tensor.offset), tensor.bytes, Some((out, *at)))?);
        }
    }
    let header = crc32fast::hash(&file.header);
    Ok((Checks { header, header_bytes: file.header.len() as u64, model: 0, dense }, tables))
}

/// Writes zeros between the matrices, and up to the end of the tensor, where an earlier run may have had others.
fn fill_gaps(table: &Table, tensor_bytes: u64, (out, at): (&Named, u64)) -> Result<()> {
    let next = table.rows.iter().skip(1).map(|row| row.offset).chain([tensor_bytes]);
    table.rows.iter().zip(next).try_for_each(|(row, next)| {
        let end = row.offset + row.bytes;
        out.write(at + end, &vec![0; (next - end) as usize])
    })
}

fn copy_experts(
    layer: &Layer,
    table: &mut Table,
    source: &Source,
    (out, at): (&Named, u64),
    copier: &mut Copier,
) -> Result<()> {
    let n_parts = layer.tensors.len();
    for (i, row) in table.rows.iter_mut().enumerate() {
        let tensor = &source.index.tensors[layer.tensors[i % n_parts]];
        let from = (&source.files[tensor.file as usize], tensor.offset_of((i / n_parts) as u32));
        row.crc32 = copier.copy(from, tensor.expert_bytes, Some((out, at + row.offset)))?;
    }
    Ok(())
}

fn make_experts(layer: &[Matrices], table: &mut Table, (out, at): (&Named, u64), copier: &mut Copier) -> Result<()> {
    let memory = layer.iter().map(Matrices::memory).max().unwrap_or(0);
    let types: Vec<_> = table.rows.iter().map(|row| row.ty).collect();
    let make = |i: usize| layer[i % layer.len()].bytes((i / layer.len()) as u32, types[i]);
    parallel::each(types.len(), memory, make, |i, bytes| {
        let row = &mut table.rows[i];
        row.crc32 = crc32fast::hash(&bytes);
        out.write(at + row.offset, &bytes)?;
        copier.skip(layer[i % layer.len()].source_bytes())
    })
}
