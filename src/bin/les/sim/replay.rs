//! A trace to replay, and what is said of a replay.

use std::path::Path;

use anyhow::ensure;
use les::lookahead::trace::{Outcome, Reader, Record};
use serde::Serialize;

use super::machine::Passed;

/// One pass of a batch through the experts of one layer.
pub struct Pass {
    /// Which layer.
    pub at: usize,
    /// The pass over the whole model that this one is a part of.
    pub token: usize,
    pub rows: usize,
    pub picks: Vec<i32>,
    /// The distinct picks.
    pub needs: Vec<u32>,
    /// One score per expert, for each of the last rows.
    pub scores: Vec<f32>,
    /// What was predicted here, by distance from 1: experts and their probabilities.
    pub guesses: Vec<Vec<(u32, f32)>>,
}

/// A whole trace.
pub struct Trace {
    pub model: String,
    pub passes: Vec<Pass>,
    /// Per layer.
    pub n_expert: Vec<usize>,
    /// Per layer: bytes of the parts of one expert, in the order of use.
    pub part_bytes: Vec<Vec<u64>>,
    /// The most experts that one pass of one token needs, over all layers.
    pub most_used: usize,
    /// What became of the predictions, one layer ahead, two, ..., all passes together.
    pub outcomes: Vec<Outcome>,
}

impl Trace {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let mut reader = Reader::open(path)?;
        let header = &reader.header;
        let mut trace = Self {
            model: header.model.clone(),
            passes: Vec::new(),
            n_expert: header.layers.iter().map(|l| l.n_expert as usize).collect(),
            part_bytes: header.layers.iter().map(|l| l.part_bytes.clone()).collect(),
            most_used: header.layers.iter().map(|l| l.n_used as usize).max().unwrap_or(1).max(1),
            outcomes: Vec::new(),
        };
        for record in &mut reader {
            trace.push(record?)?;
        }
        if reader.cut {
            eprintln!("les: {}: the last line of the trace was cut, and is left out", path.display());
        }
        ensure!(!trace.passes.is_empty(), "{}: nothing was traced", path.display());
        Ok(trace)
    }

    pub fn push(&mut self, record: Record) -> anyhow::Result<()> {
        let (at, rows) = (record.at as usize, record.rows as usize);
        ensure!(
            rows > 0 && record.picks.len().is_multiple_of(rows),
            "pass {}: picks of no whole tokens",
            self.passes.len() + 1
        );
        ensure!(record.scores.len() <= rows, "pass {}: more scores than tokens", self.passes.len() + 1);
        let token = self.passes.last().map_or(0, |last| last.token + usize::from(at <= last.at));
        let mut needs: Vec<u32> = record.picks.iter().filter_map(|&e| u32::try_from(e).ok()).collect();
        needs.sort_unstable();
        needs.dedup();
        self.outcomes.resize_with(self.outcomes.len().max(record.outcomes.len()), Outcome::default);
        for (sum, outcome) in self.outcomes.iter_mut().zip(&record.outcomes) {
            sum.recall += outcome.recall;
            sum.gate_mass += outcome.gate_mass;
        }
        let (picks, scores, guesses) = (record.picks, record.scores.concat(), record.guesses);
        self.passes.push(Pass { at, token, rows, picks, needs, scores, guesses });
        Ok(())
    }

    /// Experts of all layers.
    pub fn n_blocks(&self) -> usize {
        self.n_expert.iter().sum()
    }

    /// The most layers for which anything was predicted at once; 0 where the trace does not tell.
    pub fn foresight(&self) -> usize {
        self.passes.iter().map(|pass| pass.guesses.len()).max().unwrap_or(0)
    }

    /// The number of the token that begins the second half.
    pub fn half(&self) -> usize {
        self.passes.last().map_or(0, |p| p.token.div_ceil(2))
    }

    /// Sums up a replay from token `from` on.
    pub fn summary(&self, passed: &[Passed], from: usize) -> Summary {
        let mut sum = Summary::default();
        let (mut needed, mut missed, mut rows) = (0, 0, 0);
        for (i, (pass, p)) in self.passes.iter().zip(passed).enumerate().filter(|(_, (pass, _))| pass.token >= from) {
            needed += p.needed;
            missed += p.missed;
            if i == 0 || self.passes[i - 1].token != pass.token {
                rows += pass.rows;
            }
            sum.bytes_per_token += p.bytes as f64;
            sum.wait_ms_per_token += p.wait_ms;
            sum.ms_per_token += p.all_ms;
        }
        sum.hit_rate = 1.0 - missed as f64 / (needed as f64).max(1.0);
        for per_token in [&mut sum.bytes_per_token, &mut sum.wait_ms_per_token, &mut sum.ms_per_token] {
            *per_token /= f64::from(rows.max(1) as u32);
        }
        sum
    }
}

/// What is said of a run.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Summary {
    /// Experts that were all there when they were asked for, of those that were needed.
    pub hit_rate: f64,
    /// Read, be it needed or not.
    pub bytes_per_token: f64,
    pub wait_ms_per_token: f64,
    /// The computation and the wait.
    pub ms_per_token: f64,
}

impl Summary {
    /// What is read, as tables show it.
    pub fn mib_per_token(&self) -> f64 {
        self.bytes_per_token / f64::from(1 << 20)
    }
}
