//! `les inspect`: what of a model would stream, and how much memory it takes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use les::index::{ExpertTensor, Index, Part};
use les::model::Model;
use les::options::Size;
use serde::Serialize;

/// Show which experts of a model would stream, and the smallest cache for them
#[derive(clap::Args)]
pub struct Args {
    /// The model, or any of its shards
    model: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    // opened as for use: how reads must be aligned adds to what an expert takes
    let model = Model::open(&args.model)?;
    let mut text = if args.json { serde_json::to_string_pretty(&Report::new(&model))? } else { table(&model)? };
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// What `--json` prints. The keys are stable; sizes are in bytes.
#[derive(Serialize)]
struct Report<'a> {
    arch: &'a str,
    name: &'a str,
    files: Vec<File>,
    n_layers: usize,
    n_expert: u32,
    n_expert_used: u32,
    dense_bytes: u64,
    expert_bytes: u64,
    largest_expert_bytes: u64,
    token_bytes: u64,
    floor_bytes: u64,
    all_bytes: u64,
    tensors: Vec<Tensor<'a>>,
}

#[derive(Serialize)]
struct File {
    path: String,
    size: u64,
}

#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    layer: u32,
    group: u32,
    part: &'static str,
    #[serde(rename = "type")]
    ty: &'static str,
    ne: [u64; 4],
    file: u32,
    offset: u64,
    expert_bytes: u64,
    mixed: bool,
}

impl<'a> Report<'a> {
    fn new(model: &'a Model) -> Self {
        let index = model.index();
        let (floor_bytes, all_bytes) = model.cache_bounds();
        let file = |f: &les::index::ModelFile| File { path: f.path.display().to_string(), size: f.size };
        Self {
            arch: &index.arch,
            name: &index.name,
            files: index.files.iter().map(file).collect(),
            n_layers: index.n_layers(),
            n_expert: index.n_expert(),
            n_expert_used: index.n_expert_used,
            dense_bytes: index.dense_bytes,
            expert_bytes: index.expert_bytes(),
            largest_expert_bytes: largest_expert(index),
            token_bytes: index.token_bytes(),
            floor_bytes,
            all_bytes,
            tensors: index.tensors.iter().map(Tensor::new).collect(),
        }
    }
}

impl<'a> Tensor<'a> {
    fn new(t: &'a ExpertTensor) -> Self {
        Self {
            name: &t.name,
            layer: t.layer,
            group: t.group,
            part: t.part.name(),
            ty: t.ty.name(),
            ne: t.ne,
            file: t.file,
            offset: t.offset,
            expert_bytes: t.expert_bytes,
            mixed: t.is_mixed(),
        }
    }
}

/// Bytes of one expert with all its parts, the largest of all layers.
fn largest_expert(index: &Index) -> u64 {
    let mut experts = BTreeMap::<_, u64>::new();
    for t in &index.tensors {
        for e in 0..t.n_expert() {
            *experts.entry((t.layer, t.group, e)).or_default() += t.bytes_of(e);
        }
    }
    experts.into_values().max().unwrap_or(0)
}

fn table(model: &Model) -> Result<String, std::fmt::Error> {
    let index = model.index();
    let mut out = String::new();
    let name = if index.name.is_empty() { "(no name)" } else { &index.name };
    writeln!(out, "model     {} ({})", printable(name), printable(&index.arch))?;
    for (i, file) in index.files.iter().enumerate() {
        let head = if i == 0 { "files" } else { "" };
        writeln!(out, "{head:<8}{:12.2}  {}", Size(file.size), file.path.display())?;
    }
    if index.tensors.is_empty() {
        writeln!(out, "dense   {:12.2}", Size(index.dense_bytes))?;
        write!(out, "\nThis model has no routed experts: nothing would stream.")?;
        return Ok(out);
    }
    let layers = index.n_layers();
    writeln!(out, "experts   {} x {layers} layers, {} used per token", index.n_expert(), index.n_expert_used)?;
    if index.tensors.iter().all(|t| t.packed.is_some()) {
        writeln!(out, "layout    packed: each expert in one place, with checksums")?;
    }

    writeln!(out, "\n{:<8}{:<10}{:>9}{:>14}{:>14}", "part", "type", "matrices", "per expert", "all")?;
    for ((part, group, ty, expert), (count, all)) in rows(index) {
        let part = format!("{part}{}", if group == 0 { "" } else { "_ch" });
        writeln!(out, "{part:<8}{ty:<10}{count:>9}{:14.2}{:14.2}", Size(expert), Size(all))?;
    }

    let (floor, _) = model.cache_bounds();
    writeln!(out, "\ndense weights  {:12.2}  stay in memory", Size(index.dense_bytes))?;
    writeln!(out, "all experts    {:12.2}  stream", Size(index.expert_bytes()))?;
    writeln!(out, "one expert     {:12.2}  all parts, in the largest layer", Size(largest_expert(index)))?;
    writeln!(out, "one token      {:12.2}  over all layers", Size(index.token_bytes()))?;
    write!(out, "smallest cache {:>8} MiB  --les-cache {0}", floor.div_ceil(1 << 20))?;
    Ok(out)
}

/// How many matrices, and how many bytes, of each part, group, type and size.
fn rows(index: &Index) -> BTreeMap<(Part, u32, &'static str, u64), (usize, u64)> {
    let mut rows = BTreeMap::new();
    for t in &index.tensors {
        for e in 0..t.n_expert() {
            let (count, bytes) = rows.entry((t.part, t.group, t.type_of(e).name(), t.bytes_of(e))).or_insert((0, 0));
            *count += 1;
            *bytes += t.bytes_of(e);
        }
    }
    rows
}

/// Text from a file, fit for a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
