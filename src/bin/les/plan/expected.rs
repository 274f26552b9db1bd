//! What is to be expected of a cache of some size.

use anyhow::ensure;
use les::index::Index;
use les::lookahead::{LEAST_PROBABILITY, trace::layers};
use serde::Serialize;

use super::typical::{Typical, hit_rate};
use crate::sim::{Ahead, Device, Kind, Machine, Summary, Trace};

/// How many layers ahead are compared with none.
const LAYERS: usize = 1;

/// How a model's experts are picked.
pub enum Routing<'a> {
    Traced(&'a Trace),
    /// Per layer: experts per token, and the sizes of an expert's parts.
    Typical(Vec<usize>, Vec<Vec<u64>>),
}

impl<'a> Routing<'a> {
    /// By the `trace`, if there is one.
    ///
    /// # Errors
    /// When it is another model's.
    pub fn new(index: &Index, trace: Option<&'a Trace>) -> anyhow::Result<Self> {
        let layers = layers(index);
        let part_bytes: Vec<Vec<u64>> = layers.iter().map(|l| l.part_bytes.clone()).collect();
        let Some(trace) = trace else {
            let n_used = layers.iter().map(|l| l.n_used.min(l.n_expert) as usize).collect();
            return Ok(Self::Typical(n_used, part_bytes));
        };
        let same = trace.part_bytes == part_bytes
            && trace.n_expert.iter().copied().eq(layers.iter().map(|l| l.n_expert as usize));
        ensure!(
            same,
            "the trace is of {:?}, whose experts are others than this model's: give one of this model",
            trace.model
        );
        Ok(Self::Traced(trace))
    }

    /// What a token takes in the second half, with this share of the experts cached: without lookahead and, where it is
    /// known, with it.
    fn with(&self, share: f64, device: &Device) -> anyhow::Result<[Option<Summary>; 2]> {
        let predicted = Ahead::Predicted(LAYERS, LEAST_PROBABILITY);
        Ok(match self {
            Self::Traced(trace) => {
                let slots = ((share * trace.n_blocks() as f64) as usize).max(trace.most_used);
                [Ahead::Nothing, predicted].map(|ahead| {
                    let known = ahead == Ahead::Nothing || trace.foresight() >= LAYERS;
                    known.then(|| trace.summary(&Kind::Learned.replay(trace, slots, device, ahead), trace.half()))
                })
            }
            Self::Typical(n_used, part_bytes) => {
                let typical = Typical::new(n_used, part_bytes, hit_rate(share))?;
                let Typical { trace, slots, .. } = &typical;
                [Ahead::Nothing, predicted].map(|ahead| {
                    let passed = Machine::new(trace, typical.policy(), *slots, device).run(None, ahead);
                    Some(trace.summary(&passed, trace.half()))
                })
            }
        })
    }
}

/// What is expected of one size.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub cache_bytes: u64,
    /// As a part of all experts.
    pub share: f64,
    pub without: Summary,
    /// With lookahead; absent where a trace does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookahead: Option<Summary>,
    /// With lookahead or without, whichever is faster.
    pub tokens_per_s: f64,
}

impl Row {
    /// What a token takes, with lookahead or without, whichever is faster.
    pub fn ms(&self) -> f64 {
        let with = self.lookahead.map_or(f64::INFINITY, |s| s.ms_per_token);
        self.without.ms_per_token.min(with)
    }
}

/// One row per size; `sizes` from the smallest.
///
/// # Errors
/// None that a model's own layers can cause.
pub fn rows(routing: &Routing, device: &Device, sizes: &[u64], all_bytes: u64) -> anyhow::Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for &cache_bytes in sizes {
        let share = cache_bytes as f64 / all_bytes as f64;
        let [without, lookahead] = routing.with(share, device)?;
        let mut row = Row { cache_bytes, share, without: without.unwrap_or_default(), lookahead, tokens_per_s: 0.0 };
        if let Some(smaller) = rows.last() {
            // a larger cache can do whatever a smaller one does: where the replay says otherwise it is chance
            no_slower(&mut row.without, &smaller.without);
            if let (Some(summary), Some(smaller)) = (&mut row.lookahead, &smaller.lookahead) {
                no_slower(summary, smaller);
            }
        }
        row.tokens_per_s = 1e3 / row.ms();
        rows.push(row);
    }
    Ok(rows)
}

fn no_slower(summary: &mut Summary, smaller: &Summary) {
    let over = (summary.ms_per_token - smaller.ms_per_token).max(0.0);
    summary.ms_per_token -= over;
    summary.wait_ms_per_token = (summary.wait_ms_per_token - over).max(0.0);
}
