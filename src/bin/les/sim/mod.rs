//! `les sim`: a trace of the routers, replayed under several replacement policies and sizes of the cache.

mod machine;
mod plot;
mod queues;
mod replay;
mod table;
#[cfg(test)]
mod tests;
mod values;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::ensure;
use clap::ValueEnum;
use les::lookahead::{LEAST_PROBABILITY, MAX_DEPTH, trace::Outcome};
use les::store::{Lru, Policy, Valued};
use serde::Serialize;

pub use machine::{Ahead, Device, Machine, Passed};
use queues::{S3Fifo, Sieve};
pub use replay::{Summary, Trace};
use values::{Average, Future, Learned, Signal, Values};

/// Replay a trace (--les-trace): what a cache would read under each policy
#[derive(clap::Args)]
pub struct Args {
    /// The trace
    trace: PathBuf,
    /// Policies to compare; all when not given
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<Kind>,
    /// Sizes of the cache, in percent of the experts
    #[arg(long, value_name = "N%", value_delimiter = ',', default_value = "5%,10%,20%,40%,60%", value_parser = parse_part)]
    cache: Vec<f64>,
    /// 10^6 bytes that the device reads per second
    #[arg(long, value_name = "MB/s", default_value_t = 1500.0)]
    bandwidth: f64,
    /// What each read takes besides, in microseconds
    #[arg(long, value_name = "US", default_value_t = 150.0)]
    latency: f64,
    /// Reads in flight
    #[arg(long, value_name = "N", default_value_t = les::io::DEFAULT_DEPTH)]
    depth: usize,
    /// What computing a token takes, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 170.0)]
    compute: f64,
    /// How much of that is not for experts, in percent
    #[arg(long, value_name = "N%", default_value = "50%", value_parser = parse_part)]
    dense: f64,
    /// Tell how good the predictions were; compare with reading ahead what was predicted for so many layers (1 when no number
    /// is given), and with an oracle
    #[arg(long, value_name = "LAYERS", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    lookahead: Option<usize>,
    /// What is less likely is not read ahead
    #[arg(long, value_name = "P", default_value_t = LEAST_PROBABILITY)]
    threshold: f32,
    /// Draw the hit rates into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A replacement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The least recently used goes
    Lru,
    /// First in, first out, except what was used meanwhile
    Sieve,
    /// A small and a main queue, and a memory of what was dropped
    S3Fifo,
    /// The average of picks, 0.9 of which stays at each token
    #[value(name = "picks-0.9")]
    #[serde(rename = "picks-0.9")]
    Picks90,
    /// The same with 0.98
    #[value(name = "picks-0.98")]
    #[serde(rename = "picks-0.98")]
    Picks98,
    /// The average of the routers' scores, 0.8 of which stays
    #[value(name = "scores-0.8")]
    #[serde(rename = "scores-0.8")]
    Scores80,
    /// The average of how near scores came to being picked, 0.95 of which stays
    #[value(name = "near-0.95")]
    #[serde(rename = "near-0.95")]
    Near95,
    /// What the library does
    Learned,
    /// What is needed last goes: knows the future
    Optimal,
}

impl Kind {
    /// Its name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
    }

    /// Replays a trace under this policy, with so many slots.
    pub fn replay(self, trace: &Trace, slots: usize, device: &Device, ahead: Ahead) -> Vec<Passed> {
        let n = trace.n_blocks();
        let average = |signal, keep| -> Box<dyn Values> { Box::new(Average::new(trace, signal, keep)) };
        let values = match self {
            Self::Lru | Self::Sieve | Self::S3Fifo => None,
            Self::Picks90 => Some(average(Signal::Picks, 0.9)),
            Self::Picks98 => Some(average(Signal::Picks, 0.98)),
            Self::Scores80 => Some(average(Signal::Scores, 0.8)),
            Self::Near95 => Some(average(Signal::Near, 0.95)),
            Self::Learned => Some(Box::new(Learned::new(trace)) as Box<dyn Values>),
            Self::Optimal => Some(Box::new(Future::new(trace)) as Box<dyn Values>),
        };
        let policy: Box<dyn Policy> = match self {
            Self::Lru => Box::new(Lru::new(n, 1)),
            Self::Sieve => Box::new(Sieve::new(n)),
            Self::S3Fifo => Box::new(S3Fifo::new(n, slots)),
            _ => Box::new(Valued::of(trace.n_expert.iter().map(|&n| std::iter::repeat_n(0, n)))),
        };
        Machine::new(trace, policy, slots, device).run(values, ahead)
    }
}

/// One policy with one size.
#[derive(Debug, Serialize)]
struct Row {
    policy: Kind,
    /// As a part of the experts.
    cache: f64,
    slots: usize,
    second_half: Summary,
    whole: Summary,
    /// Bytes per token over those of the optimal policy.
    times_optimal: [f64; 2],
    /// The same two with what was predicted read ahead; absent where the trace does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    lookahead: Option<[Summary; 2]>,
    /// The same two with all that the next layers need read ahead.
    #[serde(skip_serializing_if = "Option::is_none")]
    oracle: Option<[Summary; 2]>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    tokens: usize,
    device: Device,
    #[serde(skip_serializing_if = "Option::is_none")]
    lookahead: Option<usize>,
    threshold: f32,
    /// What became of the predictions, one layer ahead, two, ...; empty where the trace does not tell.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    outcomes: &'a [Outcome],
    rows: &'a [Row],
}

/// Runs the command.
///
/// # Errors
/// When the trace cannot be read or the picture cannot be written.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let device = args.device()?;
    ensure!(
        args.lookahead.is_none_or(|layers| (1..=MAX_DEPTH).contains(&layers)),
        "--lookahead takes a number of layers from 1 to {MAX_DEPTH}"
    );
    let least = les::lookahead::trace::LEAST_PROBABILITY;
    ensure!(
        (least..=1.0).contains(&args.threshold),
        "--threshold takes a probability from {least} to 1: a trace has no less likely guesses"
    );
    let trace = Trace::read(&args.trace)?;
    let ahead = args.lookahead.map(|layers| (layers, args.threshold));
    let kinds = if args.policy.is_empty() { Kind::value_variants() } else { &args.policy };
    let rows: Vec<Row> = args.cache.iter().flat_map(|&cache| compare(&trace, cache, kinds, &device, ahead)).collect();
    if let Some(path) = &args.svg {
        plot::draw(path, &trace.model, &rows)?;
    }
    let mut text = if args.json {
        let tokens = trace.passes.last().map_or(0, |p| p.token + 1);
        let (lookahead, threshold) = (args.lookahead, args.threshold);
        serde_json::to_string_pretty(&Report {
            model: &trace.model,
            tokens,
            device,
            lookahead,
            threshold,
            outcomes: &trace.outcomes,
            rows: &rows,
        })?
    } else if ahead.is_some() {
        [table::outcomes(&trace.outcomes)?, table::lookahead(&rows)?].join("\n\n").trim_start().to_owned()
    } else {
        table::policies(&rows)?
    };
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

impl Args {
    fn device(&self) -> anyhow::Result<Device> {
        ensure!(self.bandwidth > 0.0 && self.bandwidth.is_finite(), "--bandwidth must be more than 0");
        ensure!(
            [self.latency, self.compute].iter().all(|&t| (0.0..1e9).contains(&t)),
            "times must not be negative, nor absurd"
        );
        ensure!(self.depth > 0, "--depth must be more than 0");
        Ok(Device {
            mb_per_s: self.bandwidth,
            latency_us: self.latency,
            depth: self.depth,
            compute_ms: self.compute,
            dense_part: self.dense,
        })
    }
}

/// `ahead`: how many layers to look ahead, and the threshold, to be compared.
fn compare(trace: &Trace, cache: f64, kinds: &[Kind], device: &Device, ahead: Option<(usize, f32)>) -> Vec<Row> {
    // less than one layer of a token needs holds nothing worth comparing
    let slots = ((cache * trace.n_blocks() as f64) as usize).max(trace.most_used);
    let run = |kind: Kind, ahead: Ahead| {
        let passed = kind.replay(trace, slots, device, ahead);
        [trace.half(), 0].map(|from| trace.summary(&passed, from))
    };
    let optimal = run(Kind::Optimal, Ahead::Nothing);
    let row = |&policy: &Kind| {
        let [second_half, whole] = if policy == Kind::Optimal { optimal } else { run(policy, Ahead::Nothing) };
        let over =
            |s: Summary, o: Summary| if o.bytes_per_token > 0.0 { s.bytes_per_token / o.bytes_per_token } else { 1.0 };
        let times_optimal = [over(second_half, optimal[0]), over(whole, optimal[1])];
        let lookahead = ahead
            .filter(|(layers, _)| *layers <= trace.foresight())
            .map(|(layers, least)| run(policy, Ahead::Predicted(layers, least)));
        let oracle = ahead.map(|(layers, _)| run(policy, Ahead::Oracle(layers)));
        Row { policy, cache, slots, second_half, whole, times_optimal, lookahead, oracle }
    };
    kinds.iter().map(row).collect()
}

fn parse_part(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse::<f64>().ok();
    number
        .filter(|n| *n > 0.0 && *n <= 100.0)
        .map(|n| n / 100.0)
        .ok_or_else(|| "use a percentage, such as 10%".to_owned())
}
