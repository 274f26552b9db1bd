//! `les report`: what a smaller file costs, by llama-perplexity.

mod measure;
mod plot;
mod scratch;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Context;
use les::index::{ExpertTensor, Index};
use les::options::Size;
use measure::{Harm, Perplexity};
use serde::Serialize;

/// Compare a model with the one that it was made from: size, perplexity, KL divergence, how often the likeliest token is
/// the same
///
/// Runs llama-perplexity, first on the base. That writes its logits to a temporary file: two bytes for each token of the
/// text and each of the vocabulary.
#[derive(clap::Args)]
pub struct Args {
    /// The smaller model, packed or not
    model: PathBuf,
    /// What to compare with: the model before it was quantized, or less so
    base: PathBuf,
    /// A text that no choice was made by
    text: PathBuf,
    /// More models to compare, for the table and the picture
    #[arg(long = "with", value_name = "MODEL")]
    others: Vec<PathBuf>,
    /// Tokens that are looked at together; the first half of them are not judged
    #[arg(long, short, default_value_t = 512)]
    ctx_size: u32,
    /// Threads
    #[arg(long, short)]
    threads: Option<u32>,
    /// The program; else it is looked for beside this one, and then where programs are
    #[arg(long, value_name = "PATH")]
    llama_perplexity: Option<PathBuf>,
    /// Where the base's logits go meanwhile
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Draw size against KL divergence into this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One model.
#[derive(Debug, Serialize)]
struct Row {
    model: String,
    file_bytes: u64,
    expert_bytes: u64,
    /// Bits per weight of the experts.
    expert_bpw: f64,
    /// Not of the base.
    #[serde(flatten)]
    harm: Option<Harm>,
    perplexity: f64,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let models: Vec<&PathBuf> = std::iter::once(&args.model).chain(&args.others).collect();
    // what cannot be opened is found out before anything takes long
    let mut rows = models.iter().map(|model| row(model)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut base = row(&args.base)?;
    let perplexity = Perplexity::new(args)?;
    perplexity.base(&args.base)?;
    for (row, model) in rows.iter_mut().zip(models) {
        let harm = perplexity.harm(model)?;
        (row.perplexity, base.perplexity) = (harm.perplexity, harm.base_perplexity);
        row.harm = Some(harm);
    }
    if let Some(svg) = &args.svg {
        plot::draw(svg, &rows)?;
    }
    rows.insert(0, base);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        println!("{}", table(&rows)?);
    }
    Ok(())
}

fn row(model: &PathBuf) -> anyhow::Result<Row> {
    let index = Index::open(model)?;
    let weights = |t: &ExpertTensor| t.ne.iter().map(|&n| n as f64).product::<f64>();
    let all: f64 = index.tensors.iter().map(weights).sum();
    let name = model.file_name().context("a model is a file")?;
    Ok(Row {
        model: name.to_string_lossy().into_owned(),
        file_bytes: index.files.iter().map(|f| f.size).sum(),
        expert_bytes: index.expert_bytes(),
        expert_bpw: if all > 0.0 { 8.0 * index.expert_bytes() as f64 / all } else { 0.0 },
        harm: None,
        perplexity: 0.0,
    })
}

fn table(rows: &[Row]) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let width = rows.iter().map(|row| row.model.chars().count()).max().unwrap_or(0);
    write!(
        out,
        "{:width$} {:>12} {:>12} {:>6} {:>10} {:>21} {:>10} {:>17}",
        "model", "file", "experts", "bits", "perplexity", "mean KL divergence", "99.9% KL", "same likeliest %"
    )?;
    for row in rows {
        let Row { model, file_bytes, expert_bytes, expert_bpw, perplexity, .. } = row;
        let (file, experts) = (Size(*file_bytes), Size(*expert_bytes));
        write!(out, "\n{model:width$} {file:12.2} {experts:12.2} {expert_bpw:6.2} {perplexity:10.3}")?;
        match &row.harm {
            Some(h) => {
                let [kl, same] = [h.mean_kl, h.same_top];
                write!(out, " {:10.6} +- {:8.6} {:10.6}", kl.value, kl.error, h.kl_999)?;
                write!(out, " {:9.3} +- {:5.3}", same.value, same.error)?;
            }
            None => write!(out, " {:>21} {:>10} {:>17}", "base", "", "")?,
        }
    }
    Ok(out)
}
