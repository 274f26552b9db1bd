//! A trace, and what a cache would have had to read for it.

use std::path::Path;

use anyhow::ensure;
use les::lookahead::trace::{Reader, Record};
use les::store::Policy;
use serde::Serialize;

use super::values::Values;

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
}

/// A whole trace.
pub struct Trace {
    pub model: String,
    pub passes: Vec<Pass>,
    /// Per layer.
    pub n_expert: Vec<usize>,
    /// Per layer: bytes of one expert.
    pub bytes: Vec<u64>,
    /// The most experts that one pass of one token needs, over all layers.
    pub most_used: usize,
}

impl Trace {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let mut reader = Reader::open(path)?;
        let header = &reader.header;
        let mut trace = Self {
            model: header.model.clone(),
            passes: Vec::new(),
            n_expert: header.layers.iter().map(|l| l.n_expert as usize).collect(),
            bytes: header.layers.iter().map(|l| l.part_bytes.iter().sum()).collect(),
            most_used: header.layers.iter().map(|l| l.n_used as usize).max().unwrap_or(1).max(1),
        };
        for record in &mut reader {
            trace.push(record?)?;
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
        self.passes.push(Pass { at, token, rows, picks: record.picks, needs, scores: record.scores.concat() });
        Ok(())
    }

    /// Experts of all layers.
    pub fn n_blocks(&self) -> usize {
        self.n_expert.iter().sum()
    }

    /// Replays it with so many slots, each of which holds an expert of any layer.
    pub fn replay(
        &self,
        mut policy: Box<dyn Policy>,
        mut values: Option<Box<dyn Values>>,
        slots: usize,
    ) -> Vec<Missed> {
        let firsts: Vec<u32> =
            self.n_expert.iter().scan(0, |at, &n| Some(std::mem::replace(at, *at + n as u32))).collect();
        let mut resident = vec![false; self.n_blocks()];
        let mut needed_at = vec![usize::MAX; self.n_blocks()];
        let mut taken = 0;
        let mut missed = Vec::with_capacity(self.passes.len());
        for (number, pass) in self.passes.iter().enumerate() {
            let blocks = || pass.needs.iter().map(|e| firsts[pass.at] + e);
            let mut absent = Vec::new();
            policy.layer_begins();
            for block in blocks() {
                needed_at[block as usize] = number;
                if resident[block as usize] { policy.used(block) } else { absent.push(block) }
            }
            for &block in &absent {
                if taken < slots {
                    taken += 1;
                } else {
                    // a pass that needs more than there is gives back what it has computed
                    let may_go = |b: u32| needed_at[b as usize] != number;
                    let Some(victim) = policy.victim(0, &may_go).or_else(|| policy.victim(0, &|_| true)) else {
                        continue;
                    };
                    policy.removed(victim);
                    resident[victim as usize] = false;
                }
                policy.inserted(block, 0);
                resident[block as usize] = true;
            }
            missed.push(Missed { needed: pass.needs.len(), missed: absent.len() });
            if let Some(values) = &mut values {
                policy.valued(pass.at, values.after(number, pass));
            }
        }
        missed
    }

    /// Sums up what was missed from token `from` on.
    pub fn summary(&self, missed: &[Missed], from: usize, device: &Device) -> Summary {
        let mut sum = Summary::default();
        let (mut needed, mut absent, mut rows) = (0, 0, 0);
        for (i, (pass, m)) in self.passes.iter().zip(missed).enumerate().filter(|(_, (pass, _))| pass.token >= from) {
            needed += m.needed;
            absent += m.missed;
            if i == 0 || self.passes[i - 1].token != pass.token {
                rows += pass.rows;
            }
            let bytes = m.missed as u64 * self.bytes[pass.at];
            sum.bytes_per_token += bytes as f64;
            sum.wait_ms_per_token += device.wait_ms(bytes, m, self.n_expert.len(), pass.rows);
        }
        sum.hit_rate = 1.0 - absent as f64 / (needed as f64).max(1.0);
        sum.bytes_per_token /= f64::from(rows.max(1) as u32);
        sum.wait_ms_per_token /= f64::from(rows.max(1) as u32);
        sum
    }
}

/// What one pass needed, and what of it was not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missed {
    pub needed: usize,
    pub missed: usize,
}

/// What is said of a run.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Summary {
    /// Of the experts that were needed.
    pub hit_rate: f64,
    pub bytes_per_token: f64,
    /// By the model of [`Device`].
    pub wait_ms_per_token: f64,
}

/// A device that takes a time per pass and a time per byte, and a processor that takes a time per token, the same for
/// each layer and expert. A layer's reads begin when its experts are picked, and what is in memory is computed meanwhile.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Device {
    pub mb_per_s: f64,
    pub latency_us: f64,
    pub compute_ms: f64,
}

impl Device {
    fn wait_ms(&self, bytes: u64, m: &Missed, layers: usize, rows: usize) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        let reads = self.latency_us / 1e3 + bytes as f64 / self.mb_per_s / 1e3;
        let ready = (m.needed - m.missed) as f64 / m.needed as f64;
        (reads - self.compute_ms / layers as f64 * rows as f64 * ready).max(0.0)
    }
}
