//! Counters. One snapshot type, written as JSON by serde.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::index::Index;
use crate::lookahead::{Foreseen, GateMass, Recall, Reliability, Waits, expected_error};
use crate::spec;
use crate::store::Plan;

/// Counters of one phase: generation (one token at a time, or with drafts that are verified) or prompts (several tokens at once).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Tokens that passed the first tensor of experts that streams, but for drafts that did not stand.
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
    /// Nanoseconds that went into asking for experts: looking up, submitting reads, guessing. One thread's; what it does while
    /// the others compute, or while everybody would wait for the device, is counted too.
    pub ask_ns: u64,
    /// Of these, for guessing.
    pub guess_ns: u64,
    /// Nanoseconds of processor time, of all threads that compute, that went into what `ask_ns` counts and into what walkers
    /// do who find nothing ready or look after the guesses: taking in what was read, and submitting more. 0 where the
    /// system does not tell.
    pub ask_cpu_ns: u64,
}

/// What was read, matrix by matrix of an expert, both phases together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Reads {
    /// Matrices that were read because an operation asked for them, or for another matrix of the same expert.
    pub demand_reads: u64,
    /// Bytes of these, alignment included.
    pub demand_bytes: u64,
    /// Matrices that were read because they were guessed.
    pub guessed: u64,
    /// Bytes of these, alignment included.
    pub guessed_bytes: u64,
    /// Of the guessed, in memory when they were needed.
    pub guessed_in_time: u64,
    /// Of the guessed, still being read when they were needed.
    pub guessed_late: u64,
    /// Of the guessed, not needed by the pass that they were read for. What is missing to all that were guessed is not
    /// decided yet, or could not be read.
    pub guessed_wasted: u64,
}

/// The counters as they were when so many tokens, or more by drafts, had been generated: what came later is the difference to the
/// end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Mark {
    /// As in [`Stats`].
    pub decode: Phase,
    /// As in [`Stats`].
    #[serde(flatten)]
    pub reads: Reads,
    /// As in [`Stats`].
    pub decode_ns: u64,
    /// As in [`Stats`].
    pub decode_steps: u64,
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
    pub late: u64,
    /// As in [`Phase`].
    pub misses: u64,
    /// As in [`Phase`].
    pub bytes_read: u64,
    /// As in [`Phase`].
    pub wait_ns: u64,
    /// What was read.
    #[serde(flatten)]
    pub reads: Reads,
    /// How good the predictions for this layer were, made one layer before it, two, ...
    pub recall: Vec<Recall>,
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
    /// Text that is generated.
    pub decode: Phase,
    /// Several tokens at once.
    pub prompt: Phase,
    /// Matrices of experts evicted.
    pub evictions: u64,
    /// Passes that verified drafted tokens.
    pub verifications: u64,
    /// Matrices of experts that were read, asked for or guessed, and that no other than drafted tokens wanted.
    pub draft_reads: u64,
    /// Of these, wanted by no token that stood.
    pub draft_reads_rejected: u64,
    /// Of the evictions, those of what was worth keeping, for what drafted tokens alone wanted or was guessed while they were
    /// verified.
    pub evictions_for_drafts: u64,
    /// Of these, evicted for what is kept instead, as tokens want it that stood.
    pub evictions_for_accepted: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// What was read, by all layers.
    #[serde(flatten)]
    pub reads: Reads,
    /// Whether what was learned before this run was there when it began.
    pub profile_loaded: bool,
    /// How likely an expert had to be at last to be read ahead,
    pub least_probability: f32,
    /// and how many layers ahead.
    pub layers_ahead: usize,
    /// How good the predictions were, one layer ahead, two, ...
    pub recall: Vec<Recall>,
    /// How much of the routers' weight was predicted, one layer ahead, two, ...; known while a trace is written.
    pub gate_mass: Vec<GateMass>,
    /// One layer ahead, two, ...: how likely predictions were said to be, and how often they came true.
    pub calibration: Vec<Vec<Reliability>>,
    /// By how much the probabilities in `calibration` were off, on average over its predictions (the expected calibration
    /// error). None without predictions.
    pub calibration_error: Option<f64>,
    /// How good the predictions for batches of many tokens were, one layer ahead, from a sample of their tokens.
    pub batch: Foreseen,
    /// How good the predictions for the first layers of the next pass were, from what they had picked before.
    pub history: Foreseen,
    /// Nanoseconds from one pass that generates to the next, all but the longest.
    pub decode_ns: u64,
    /// Tokens in `decode_ns`: one for each pass, and the drafts that stood.
    pub decode_steps: u64,
    /// As it was after 1, 2, 4, 8, ... generated tokens: how the cache has filled.
    pub marks: Vec<Mark>,
    /// The largest resident set of the process so far, in bytes; 0 where the system does not tell.
    pub peak_rss_bytes: u64,
    /// The speculation of all sequences that have ended.
    pub speculation: spec::Summary,
    /// Per layer.
    pub layers: Vec<LayerStats>,
    /// The tensor whose operations are counted as steps: the first of all that were used. Those before it do not stream:
    /// they are on another device.
    #[serde(skip)]
    step_tensor: Option<usize>,
    /// By tensor: where its layer is in `layers`.
    #[serde(skip)]
    layer_of: Vec<usize>,
    #[serde(skip)]
    in_decode: bool,
    #[serde(skip)]
    last_decode: Option<Instant>,
    #[serde(skip)]
    longest_step: (u64, u64),
    /// The drafts of the last pass, until it is known which of them stand,
    #[serde(skip)]
    drafted: u64,
    /// and how many did.
    #[serde(skip)]
    stood: u64,
    /// The part of an expert that is asked for first in each layer: hits are judged by it.
    #[serde(skip)]
    leads: Vec<bool>,
}

impl Stats {
    /// All zero.
    pub fn new(index: &Index, plan: &Plan) -> Self {
        let mut layers: Vec<LayerStats> = Vec::new();
        let mut layer_of = Vec::with_capacity(index.tensors.len());
        for t in &index.tensors {
            if layers.last().is_none_or(|l| l.layer != t.layer) {
                layers.push(LayerStats { layer: t.layer, ..Default::default() });
            }
            layer_of.push(layers.len() - 1);
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
            verifications: 0,
            draft_reads: 0,
            draft_reads_rejected: 0,
            evictions_for_drafts: 0,
            evictions_for_accepted: 0,
            read_errors: 0,
            reads: Reads::default(),
            profile_loaded: false,
            least_probability: 0.0,
            layers_ahead: 0,
            recall: Vec::new(),
            gate_mass: Vec::new(),
            calibration: Vec::new(),
            calibration_error: None,
            batch: Foreseen::default(),
            history: Foreseen::default(),
            decode_ns: 0,
            decode_steps: 0,
            marks: Vec::new(),
            peak_rss_bytes: 0,
            speculation: spec::Summary::default(),
            step_tensor: None,
            layers,
            layer_of,
            in_decode: false,
            last_decode: None,
            longest_step: (0, 0),
            drafted: 0,
            stood: 0,
            leads: (0..index.tensors.len()).map(|t| index.leads(t)).collect(),
        }
    }

    /// An operation of a pass of so many rows, which is `verifying` drafts or not, asked for `distinct` experts of `tensor`; of
    /// these `[late, missed]` were not in memory.
    pub fn operation(&mut self, tensor: usize, rows: usize, verifying: bool, distinct: usize, absent: [usize; 2]) {
        self.in_decode = generates(rows, verifying);
        // a smaller one takes over without being counted: the one before has counted this pass
        let first = self.step_tensor.is_none_or(|step| tensor <= step);
        if first && self.step_tensor.replace(tensor).is_none_or(|step| step == tensor) {
            self.step(rows, verifying);
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
            let l = self.layer(tensor);
            l.requests += distinct;
            l.hits += hits;
            l.late += late;
            l.misses += missed;
        }
    }

    /// The reading of a matrix of `tensor`, of `bytes` bytes, was started: a guess, or needed.
    pub fn read(&mut self, tensor: usize, bytes: u64, guess: bool) {
        self.phase().bytes_read += bytes;
        self.layer(tensor).bytes_read += bytes;
        self.count(tensor, |reads| {
            let (n, sum) = match guess {
                true => (&mut reads.guessed, &mut reads.guessed_bytes),
                false => (&mut reads.demand_reads, &mut reads.demand_bytes),
            };
            *n += 1;
            *sum += bytes;
        });
    }

    /// Asking took so long, of which the guessing, and so much processor time.
    pub fn asked(&mut self, all: Duration, guessing: Duration, cpu: Duration) {
        let phase = self.phase();
        phase.ask_ns += all.as_nanos() as u64;
        phase.guess_ns += guessing.as_nanos() as u64;
        phase.ask_cpu_ns += cpu.as_nanos() as u64;
    }

    /// A walker has reaped and submitted, in so much processor time.
    pub fn reaped(&mut self, cpu: Duration) {
        self.phase().ask_cpu_ns += cpu.as_nanos() as u64;
    }

    /// What a guess for the layer of `tensor` has brought, or is bringing, is needed.
    pub fn guess_right(&mut self, tensor: usize, in_time: bool) {
        self.count(tensor, |reads| {
            reads.guessed_in_time += u64::from(in_time);
            reads.guessed_late += u64::from(!in_time);
        });
    }

    /// The layer of `tensor` has passed without a guess that was read for it.
    pub fn guess_wasted(&mut self, tensor: usize) {
        self.count(tensor, |reads| reads.guessed_wasted += 1);
    }

    /// The predictions for the layer of `tensor` were so good, one layer ahead, two, ...
    pub fn recalled(&mut self, tensor: usize, recalls: &[Recall]) {
        let layer = self.layer_of[tensor];
        for sums in [&mut self.recall, &mut self.layers[layer].recall] {
            sums.resize(recalls.len(), Recall::default());
            sums.iter_mut().zip(recalls).for_each(|(sum, recall)| *sum += *recall);
        }
    }

    /// The predictions' probabilities came true so often, one layer ahead, two, ...
    pub fn calibrated(&mut self, calibration: Vec<Vec<Reliability>>) {
        self.calibration_error = expected_error(calibration.iter().flatten());
        self.calibration = calibration;
    }

    /// The computation of the layer of `tensor` waited, in a pass as in [`Stats::operation`].
    pub fn waited(&mut self, tensor: usize, rows: usize, verifying: bool, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.in_decode = generates(rows, verifying);
        self.phase().wait_ns += ns;
        self.layer(tensor).wait_ns += ns;
    }

    /// What was waited for so far.
    pub fn waits(&self) -> Waits {
        let of = |count: fn(&Phase) -> u64| count(&self.decode) + count(&self.prompt);
        let waited = Duration::from_nanos(of(|phase| phase.wait_ns));
        Waits { waited, late: of(|phase| phase.late), missed: of(|phase| phase.misses) }
    }

    fn step(&mut self, rows: usize, verifying: bool) {
        let now = Instant::now();
        let generates = generates(rows, verifying);
        let stood = std::mem::take(&mut self.stood);
        if let (true, Some(last)) = (generates, self.last_decode) {
            let mut step = ((now - last).as_nanos() as u64, 1 + stood);
            // a pause between two texts is the longest of all steps: it does not count
            if step.0 > self.longest_step.0 {
                std::mem::swap(&mut step, &mut self.longest_step);
            }
            self.decode_ns += step.0;
            self.decode_steps += step.1;
        }
        self.last_decode = generates.then_some(now);
        if generates && self.decode.tokens.checked_ilog2().is_some_and(|n| n as usize >= self.marks.len()) {
            self.mark();
        }
        // of a verification only the first is known to stand
        self.drafted = if verifying { rows as u64 - 1 } else { 0 };
        self.phase().tokens += rows as u64 - self.drafted;
    }

    /// Of the verification before, the first `rows` rows stand, at most all.
    pub fn judged(&mut self, rows: usize) {
        self.stood = (rows as u64).saturating_sub(1).min(std::mem::take(&mut self.drafted));
        self.decode.tokens += self.stood;
    }

    /// A token begins: all that was counted is of those before.
    fn mark(&mut self) {
        self.marks.push(Mark {
            decode: self.decode.clone(),
            reads: self.reads.clone(),
            decode_ns: self.decode_ns,
            decode_steps: self.decode_steps,
        });
    }

    fn phase(&mut self) -> &mut Phase {
        if self.in_decode { &mut self.decode } else { &mut self.prompt }
    }

    fn layer(&mut self, tensor: usize) -> &mut LayerStats {
        &mut self.layers[self.layer_of[tensor]]
    }

    fn count(&mut self, tensor: usize, count: impl Fn(&mut Reads)) {
        count(&mut self.reads);
        count(&mut self.layer(tensor).reads);
    }
}

/// Whether a pass of so many rows, which verifies drafts or does not, generates text.
fn generates(rows: usize, verifying: bool) -> bool {
    rows == 1 || verifying
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
        pass_of(stats, rows, false, tensors);
    }

    fn pass_of(stats: &mut Stats, rows: usize, verifying: bool, tensors: impl IntoIterator<Item = usize>) {
        for tensor in tensors {
            stats.operation(tensor, rows, verifying, 2, [0, 0]);
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
    fn what_was_counted_is_marked_after_tokens_that_double() {
        let mut stats = stats();
        for token in 0..10 {
            pass(&mut stats, 1, 0..12);
            stats.read(0, 100, false);
            stats.guess_right(0, true);
            // a prompt in between does not count
            if token == 2 {
                pass(&mut stats, 5, 0..12);
            }
        }
        let seen = |mark: &Mark| {
            (mark.decode.tokens, mark.decode.requests, mark.decode.bytes_read, mark.reads.guessed_in_time)
        };
        let marks: Vec<_> = stats.marks.iter().map(seen).collect();
        assert_eq!(marks, [1, 2, 4, 8].map(|n| (n, 8 * n, 100 * n, n)));
        // of four tokens the prompt has cut the third from the fourth, and the longest step is left out
        assert!(stats.marks[2].decode_steps <= 2, "{:?}", stats.marks[2]);
        assert!(stats.marks[3].decode_ns <= stats.decode_ns && stats.marks[3].decode_steps < stats.decode_steps);
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
    fn a_verification_generates_the_tokens_that_stand() {
        let mut stats = stats();
        for verdict in [Some(1), Some(3), None, Some(9)] {
            pass_of(&mut stats, 4, true, 0..12);
            verdict.into_iter().for_each(|rows| stats.judged(rows));
            stats.judged(usize::MAX);
        }
        // a verdict counts once, and without one all stand
        assert_eq!((stats.decode.tokens, stats.prompt.tokens), (1 + 3 + 4 + 4, 0));
        // three steps end there, of which the longest is left out
        let counted = stats.decode_steps;
        assert!([1 + 3, 1 + 4, 3 + 4].contains(&counted), "{counted}");
        pass(&mut stats, 4, 0..12);
        assert_eq!((stats.decode.tokens, stats.prompt.tokens), (12, 4));
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
