//! `les plan`: will a model run on this machine, how fast, and with how much of a cache.

mod advice;
mod expected;
mod measure;
mod table;
#[cfg(test)]
mod tests;
mod typical;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use les::model::Model;
use les::options::{CacheSize, Options, Size, parse_bytes};
use serde::Serialize;

use crate::sim::{Device, Trace};
use advice::Advice;
use expected::{Routing, Row};

/// What a read takes besides its bytes where it was not measured, in microseconds: of a common solid-state disk.
const LATENCY_US: f64 = 150.0;
/// The sizes that are tried when none are given, as parts of all experts, besides the smallest and what `auto` takes.
const SHARES: [f64; 7] = [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0];

/// How fast a model would run here, and with how much of a cache
#[derive(clap::Args)]
pub struct Args {
    /// The model, or any of its shards
    model: PathBuf,
    /// Sizes of the cache, as --les-cache takes them
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    cache: Vec<CacheSize>,
    /// The memory that is available, in MiB or such as 16G; what the system tells when not given
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,
    /// 10^6 bytes that the device reads per second; measured when not given
    #[arg(long, value_name = "MB/s")]
    bandwidth: Option<f64>,
    /// What computing a token takes, in milliseconds; estimated from the speed of memory when not given
    #[arg(long, value_name = "MS")]
    compute: Option<f64>,
    /// A trace of this model (--les-trace): its routing instead of a typical one
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints. The keys are stable; sizes are in bytes.
#[derive(Serialize)]
struct Report {
    arch: String,
    name: String,
    dense_bytes: u64,
    expert_bytes: u64,
    token_bytes: u64,
    /// The smallest useful cache.
    floor_bytes: u64,
    /// The largest one.
    all_bytes: u64,
    /// Of memory; absent for a model without experts, as is what follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    /// What `--les-cache auto` would take.
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Device>,
    /// Where the figures are from.
    notes: Vec<String>,
    rows: Vec<Row>,
    advice: Advice,
}

/// Runs the command.
///
/// # Errors
/// When the model or the trace cannot be read, a figure makes no sense, or nothing can be measured.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let figure = |name: &str, value: Option<f64>| {
        let sane = value.is_none_or(|value| value > 0.0 && value < 1e9);
        ensure!(sane, "{name} must be more than 0, and less than 10^9");
        Ok(())
    };
    figure("--bandwidth", args.bandwidth)?;
    figure("--compute", args.compute)?;
    let report = Report::new(args, &Model::open(&args.model)?)?;
    let mut text = if args.json { serde_json::to_string_pretty(&report)? } else { table::text(&report)? };
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

impl Report {
    fn new(args: &Args, model: &Model) -> anyhow::Result<Self> {
        let index = model.index();
        let (floor_bytes, all_bytes) = model.cache_bounds();
        let mut report = Self {
            arch: index.arch.clone(),
            name: index.name.clone(),
            dense_bytes: index.dense_bytes,
            expert_bytes: index.expert_bytes(),
            token_bytes: index.token_bytes(),
            floor_bytes,
            all_bytes,
            available_bytes: None,
            auto_bytes: None,
            device: None,
            notes: Vec::new(),
            rows: Vec::new(),
            advice: Advice::nothing_streams(),
        };
        if all_bytes == 0 {
            return Ok(report);
        }
        let available = args.memory.or_else(les::memory::available);
        let available = available.context("the system does not tell how much memory is available: give --memory")?;
        let for_experts = Some(available.saturating_sub(index.dense_bytes));
        let auto = model.budget(CacheSize::Auto, for_experts)?;
        let given = if args.cache.is_empty() {
            let shares = SHARES.map(CacheSize::Part).into_iter();
            shares.filter(|&share| model.budget(share, for_experts).is_ok()).chain([CacheSize::Min]).collect()
        } else {
            args.cache.clone()
        };
        let mut sizes = vec![auto];
        for cache in given {
            sizes.push(model.budget(cache, for_experts)?.min(all_bytes));
        }
        sizes.sort_unstable();
        sizes.dedup();

        let trace = args.trace.as_deref().map(Trace::read).transpose()?;
        let routing = Routing::new(index, trace.as_ref())?;
        let device = report.machine(args, model)?;
        report.notes.push(match &args.trace {
            Some(path) => format!("routing: {}, replayed; its second half counts", path.display()),
            None => {
                "routing: a typical one, by the share of experts that is cached; --trace takes the model's own".into()
            }
        });
        report.rows = expected::rows(&routing, &device, &sizes, all_bytes)?;
        let streams = model.decide_given(&Options::default(), Some(available))?.streams;
        report.advice = if streams {
            Advice::streaming(&report.rows, &device, available.saturating_sub(index.dense_bytes), auto, floor_bytes)
        } else {
            Advice::fits(available)
        };
        (report.available_bytes, report.auto_bytes, report.device) = (Some(available), Some(auto), Some(device));
        Ok(report)
    }

    /// The machine, as given or measured.
    fn machine(&mut self, args: &Args, model: &Model) -> anyhow::Result<Device> {
        let depth = les::io::DEFAULT_DEPTH;
        let (mb_per_s, latency_us) = match args.bandwidth {
            Some(mb_per_s) => (mb_per_s, LATENCY_US),
            None => measure::device(model.index(), depth)?,
        };
        let how = if args.bandwidth.is_some() { "given" } else { "measured in reads of the experts' sizes" };
        self.notes.push(format!("device: {mb_per_s:.0} MB/s and {latency_us:.0} us per read, {how}"));
        // what a token touches: all that is not experts, and its own experts
        let touched = self.dense_bytes + self.token_bytes;
        let compute_ms = args.compute.unwrap_or_else(|| {
            let speed = measure::memory_bytes_per_s();
            let ms = touched as f64 / speed * 1e3;
            self.notes.push(format!(
                "compute: an estimate, {} per token over {:.1} GB/s of memory, measured; a processor that is slower than \
                 its memory takes longer: --compute says how long",
                Size(touched),
                speed / 1e9
            ));
            ms
        });
        let dense_part = self.dense_bytes as f64 / touched as f64;
        Ok(Device { mb_per_s, latency_us, depth, compute_ms, dense_part })
    }
}

fn parse_memory(text: &str) -> Result<u64, &'static str> {
    parse_bytes(text, "M").filter(|&bytes| bytes > 0).ok_or("use a size in MiB, or one such as 16G")
}
