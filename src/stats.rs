//! Counters. One snapshot type, written as JSON by serde.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::index::Index;
use crate::lookahead::Recall;
use crate::store::Plan;

/// Counters of one phase: generation (one token at a time) or prompts (several tokens at once).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Tokens that passed the first tensor of experts that streams.
    pub tokens: u64,
    /// Experts asked for, each once per operation with the first matrix of its layer: those that follow are not judged.
    pub requests: u64,
    /// Of these, in memory when asked for.
    pub hits: u64,
    /// Of these, being read already.
    pub late: u64,
    /// Of these, to be read from the file.
    pub misses: u64,
    /// Bytes whose reading was started, alignment included.
    pub bytes_read: u64,
    /// Nanoseconds that the computation waited for reads.
    pub wait_ns: u64,
    /// Nanoseconds that went into asking for experts: looking up, submitting reads, guessing. One thread's, while the others
    /// wait for it.
    pub ask_ns: u64,
    /// Of these, for guessing.
    pub guess_ns: u64,
}

/// Counters of one layer, both phases together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LayerStats {
    /// The layer.
    pub layer: u32,
    /// As in [`Phase`].
    pub requests: u64,
    /// As in [`Phase`].
    pub hits: u64,
    /// As in [`Phase`].
    pub bytes_read: u64,
    /// As in [`Phase`].
    pub wait_ns: u64,
}

/// A snapshot of a streamer's counters.
#[derive(Debug, Clone, Serialize)]
pub struct Stats {
    /// The I/O engine.
    pub engine: &'static str,
    /// The most reads in flight.
    pub io_depth: usize,
    /// Bytes of all slots.
    pub cache_bytes: u64,
    /// Bytes of all experts of the model.
    pub expert_bytes: u64,
    /// The smallest cache that is allowed, in bytes.
    pub floor_bytes: u64,
    /// One token at a time.
    pub decode: Phase,
    /// Several tokens at once.
    pub prompt: Phase,
    /// Matrices of experts evicted.
    pub evictions: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Matrices of experts that were read because they were guessed.
    pub guessed: u64,
    /// Bytes of these.
    pub guessed_bytes: u64,
    /// Of these, in memory when they were needed.
    pub guessed_in_time: u64,
    /// Of these, still being read when they were needed.
    pub guessed_late: u64,
    /// Of these, not needed by the pass that they were read for.
    pub guessed_wasted: u64,
    /// Whether what was learned before this run was there when it began.
    pub profile_loaded: bool,
    /// How good the predictions were, one layer ahead, two, ...
    pub recall: Vec<Recall>,
    /// Nanoseconds from one generated token to the next, summed over `decode_steps`, all but the longest.
    pub decode_ns: u64,
    /// Steps in `decode_ns`.
    pub decode_steps: u64,
    /// The largest resident set of the process so far, in bytes; 0 where the system does not tell.
    pub peak_rss_bytes: u64,
    /// Per layer.
    pub layers: Vec<LayerStats>,
    /// The tensor whose operations are counted as steps: the first of all that were used. Those before it do not stream:
    /// they are on another device.
    #[serde(skip)]
    step_tensor: Option<usize>,
    #[serde(skip)]
    layer_slot: Vec<usize>,
    #[serde(skip)]
    in_decode: bool,
    #[serde(skip)]
    last_decode: Option<Instant>,
    #[serde(skip)]
    longest_step_ns: u64,
    /// The part of an expert that is asked for first in each layer: hits are judged by it.
    #[serde(skip)]
    leads: Vec<bool>,
}

impl Stats {
    /// All zero.
    pub fn new(index: &Index, plan: &Plan) -> Self {
        let mut layers: Vec<LayerStats> = Vec::new();
        let mut layer_slot = vec![0; index.tensors.iter().map(|t| t.layer as usize + 1).max().unwrap_or(0)];
        for t in &index.tensors {
            if layers.last().is_none_or(|l| l.layer != t.layer) {
                layer_slot[t.layer as usize] = layers.len();
                layers.push(LayerStats { layer: t.layer, ..Default::default() });
            }
        }
        Self {
            engine: "",
            io_depth: 0,
            cache_bytes: plan.bytes(),
            expert_bytes: index.expert_bytes(),
            floor_bytes: plan.floor_bytes(),
            decode: Phase::default(),
            prompt: Phase::default(),
            evictions: 0,
            read_errors: 0,
            guessed: 0,
            guessed_bytes: 0,
            guessed_in_time: 0,
            guessed_late: 0,
            guessed_wasted: 0,
            profile_loaded: false,
            recall: Vec::new(),
            decode_ns: 0,
            decode_steps: 0,
            peak_rss_bytes: 0,
            step_tensor: None,
            layers,
            layer_slot,
            in_decode: false,
            last_decode: None,
            longest_step_ns: 0,
            leads: (0..index.tensors.len()).map(|t| index.leads(t)).collect(),
        }
    }

    /// An operation asked for `distinct` experts of `tensor`; of these `[late, missed]` were not in memory.
    pub fn operation(&mut self, tensor: usize, layer: u32, rows: usize, distinct: usize, absent: [usize; 2]) {
        self.in_decode = rows == 1;
        // a smaller one takes over without being counted: the one before has counted this pass
        let first = self.step_tensor.is_none_or(|step| tensor <= step);
        if first && self.step_tensor.replace(tensor).is_none_or(|step| step == tensor) {
            self.step(rows);
        }
        let [late, missed] = absent.map(|n| n as u64);
        let distinct = distinct as u64;
        // the parts that follow are on their way because the first one was missed: judging them would count the same
        // miss as "late" again
        if self.leads[tensor] {
            let hits = distinct - late - missed;
            let phase = self.phase();
            phase.requests += distinct;
            phase.hits += hits;
            phase.late += late;
            phase.misses += missed;
            let l = self.layer(layer);
            l.requests += distinct;
            l.hits += hits;
        }
    }

    /// The reading of `bytes` bytes for `layer` was started.
    pub fn read(&mut self, layer: u32, bytes: u64) {
        self.phase().bytes_read += bytes;
        self.layer(layer).bytes_read += bytes;
    }

    /// The reading of a guess of `bytes` bytes was started.
    pub fn guess_read(&mut self, bytes: u64) {
        self.guessed += 1;
        self.guessed_bytes += bytes;
    }

    /// Asking took so long, of which the guessing.
    pub fn asked(&mut self, all: Duration, guessing: Duration) {
        let phase = self.phase();
        phase.ask_ns += all.as_nanos() as u64;
        phase.guess_ns += guessing.as_nanos() as u64;
    }

    /// What a guess has brought, or is bringing, is needed.
    pub fn guess_right(&mut self, in_time: bool) {
        self.guessed_in_time += u64::from(in_time);
        self.guessed_late += u64::from(!in_time);
    }

    /// The layer of `n` guesses has passed without them.
    pub fn guess_wasted(&mut self, n: u64) {
        self.guessed_wasted += n;
    }

    /// The computation of `layer` waited.
    pub fn waited(&mut self, layer: u32, rows: usize, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.in_decode = rows == 1;
        self.phase().wait_ns += ns;
        self.layer(layer).wait_ns += ns;
    }

    fn step(&mut self, rows: usize) {
        self.phase().tokens += rows as u64;
        let now = Instant::now();
        if let (1, Some(last)) = (rows, self.last_decode) {
            let ns = (now - last).as_nanos() as u64;
            // a pause between two texts is the longest of all steps: it does not count
            self.decode_ns += ns.min(self.longest_step_ns);
            self.decode_steps += u64::from(self.longest_step_ns > 0);
            self.longest_step_ns = self.longest_step_ns.max(ns);
        }
        self.last_decode = (rows == 1).then_some(now);
    }

    fn phase(&mut self) -> &mut Phase {
        if self.in_decode { &mut self.decode } else { &mut self.prompt }
    }

    fn layer(&mut self, layer: u32) -> &mut LayerStats {
        let slot = self.layer_slot[layer as usize];
        &mut self.layers[slot]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::testing::index;

    /// Two layers; in each a second set of experts is picked apart from the first, as in GroveMoE.
    fn stats() -> Stats {
        let mut index = index(4, 8, 2, &[512, 512, 512]);
        for (i, t) in index.tensors.iter_mut().enumerate() {
            (t.layer, t.group) = (i as u32 / 6, i as u32 / 3 % 2);
        }
        Stats::new(&index, &Plan::new(&index, 512, u64::MAX).unwrap())
    }

    /// One pass over the model: the operations of these tensors, in this order.
    fn pass(stats: &mut Stats, rows: usize, tensors: impl IntoIterator<Item = usize>) {
        for tensor in tensors {
            stats.operation(tensor, tensor as u32 / 6, rows, 2, [0, 0]);
        }
    }

    #[test]
    fn a_pass_is_one_step_however_many_groups_a_layer_has() {
        let mut stats = stats();
        pass(&mut stats, 5, 0..12);
        for _ in 0..4 {
            pass(&mut stats, 1, 0..12);
        }
        assert_eq!((stats.prompt.tokens, stats.decode.tokens), (5, 4));
        // the first has none before it, and of the others the longest is left out
        assert!(stats.decode_steps <= 2, "{}", stats.decode_steps);
        assert_eq!(stats.decode.requests, 4 * 4 * 2);
    }

    #[test]
    fn tokens_are_counted_where_the_first_layers_do_not_stream() {
        let mut stats = stats();
        for _ in 0..3 {
            pass(&mut stats, 1, 6..12);
        }
        assert_eq!(stats.decode.tokens, 3);
    }

    #[test]
    fn the_order_within_a_layer_does_not_matter() {
        let mut stats = stats();
        for _ in 0..3 {
            pass(&mut stats, 1, [3, 4, 5, 1, 0, 2, 6, 7, 8]);
        }
        assert_eq!(stats.decode.tokens, 3);
    }
}
