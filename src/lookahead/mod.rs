//! What the routers tell of the experts that will be needed.
//!
//! The input of a layer's experts is close to that of the next layer's: the hidden state between them changes little. So
//! the next layer's router is applied to it, and what it picks is read while this layer still computes. Hints only:
//! which experts are used is decided by the model's own router.
//!
//! Of a batch of many tokens a few are looked at. The first layer has none before it: what it picked lately is what is
//! known of its next picks.

mod calibration;
mod effort;
mod forecast;
mod keep;
mod predict;
mod products;
pub mod profile;
mod put_off;
mod router;
mod spread;
pub mod trace;

use std::path::Path;
use std::time::Instant;

pub use calibration::{Reliability, expected_error};
pub use effort::{LEAST_PROBABILITY, Waits};
pub use forecast::Foreseen;
pub use keep::Keep;
pub use predict::{GateMass, Guess, Recall};
pub use router::{Input, Router};
pub use spread::mean_and_deviation;

use calibration::Calibration;
use effort::Effort;
use forecast::{Forecasts, Sample};
use predict::Prediction;
use profile::Profile;
use put_off::PutOff;

use crate::error::{Error, Result};
use crate::index::Index;
use trace::{Outcome, Record, Writer};

/// Of a batch of many tokens, so many of the last ones count: they are the ones that what follows is like.
pub const WINDOW: usize = 32;
/// Of a batch of more tokens so many are looked at, which stand for all.
const MOST_ROWS: usize = 8;
/// Layers to look ahead when nothing else is said, and reads do not come late.
const DEFAULT_DEPTH: usize = 1;
/// The most layers that can be asked for.
pub const MAX_DEPTH: usize = 8;
/// When all that was predicted for so many layers in a row was in memory, only every so many layers are looked at.
const NEEDLESS: u32 = 64;
/// What is likely to be needed soon.
#[derive(Debug, Clone, PartialEq)]
pub struct Guesses {
    /// The first tensor of the layer: index into [`Index::tensors`].
    pub tensor: usize,
    /// The layer's likely experts, the likeliest first.
    pub experts: Vec<Guess>,
}

/// One layer that has experts.
struct Site {
    tensor: usize,
    router: Option<Router>,
    /// By distance, from 1: what turns the input of that many layers before into this layer's.
    factors: Vec<Vec<f32>>,
    /// By distance: what was predicted for the pass that is under way.
    predictions: Vec<Prediction>,
    /// By distance: how good they were.
    recalls: Vec<Recall>,
    /// It was last applied to all tokens of a batch. The last layer often is not: only some have an output.
    whole: bool,
    /// What it picked in a verification, and was not learned from yet.
    put_off: Option<PutOff>,
}

/// The routers of a model, and what they did. Not for several threads at once.
pub struct Lookahead {
    sites: Vec<Site>,
    /// By the index of a layer's first tensor of experts.
    site_of: Vec<Option<usize>>,
    n_used: usize,
    effort: Effort,
    /// By distance, at least as many as layers are looked ahead.
    calibrations: Vec<Calibration>,
    /// By distance.
    gate_mass: Vec<GateMass>,
    /// For batches of more than [`MOST_ROWS`] tokens.
    batches: Forecasts,
    /// For the first layers, of the next pass.
    history: Forecasts,
    /// The layer that was computed last, and its tokens.
    before: (usize, usize),
    /// The first layer that was ever computed here: each pass begins with it.
    first: usize,
    /// The most tokens of a layer in this pass. The last one often has fewer.
    pass_rows: usize,
    /// Layers in a row for which all that was predicted was in memory.
    needless: u32,
    trace: Option<Writer>,
    /// Why there is none any more.
    trace_failed: Option<Error>,
    /// For the trace, by distance: what was predicted last.
    traced: Vec<Vec<(u32, f32)>>,
    /// Likewise: what became of the predictions for the pass that is under way.
    outcomes: Vec<Outcome>,
    profile: Option<Profile>,
    /// `None` when nothing is ever evicted and nothing kept for the next run.
    keep: Option<Keep>,
    input: Input,
    /// Row by row, of one layer.
    scores: Vec<f32>,
    row: Vec<f32>,
    sample: Sample,
}

impl Lookahead {
    /// Loads the routers, to look `depth` layers ahead, or as many as it takes; traces to `trace` if there is one, and begins
    /// with what `profile` knows. `evicts`: the cache is too small for all experts, so what they are worth keeping is of interest.
    ///
    /// # Errors
    /// [`Error::File`] when a router cannot be read, or the trace cannot be written.
    pub fn new(
        index: &Index,
        depth: Option<usize>,
        evicts: bool,
        trace: Option<&Path>,
        profile: Option<&Path>,
    ) -> Result<Self> {
        let trace = trace.map(|path| Writer::create(path, index)).transpose()?;
        let (profile, learned) = profile.map(|path| Profile::open(path, index)).unzip();
        // what a trace tells is to be compared layer by layer
        let effort = Effort::new(depth.or_else(|| trace.is_some().then_some(DEFAULT_DEPTH)));
        let depth = effort.most();
        let learns = evicts || profile.is_some();
        let wanted = depth > 0 || learns || trace.is_some();
        let mut sites: Vec<Site> = Vec::new();
        let mut site_of = vec![None; index.tensors.len()];
        let mut n_expert = Vec::new();
        for (i, t) in index.tensors.iter().enumerate().filter(|(i, _)| index.leads(*i)) {
            // a second group of experts in a layer uses the picks of the first
            let places = index.routers.iter().find(|r| r.layer == t.layer && t.group == 0);
            let router = places.filter(|_| wanted).map(|places| Router::load(index, places)).transpose()?.flatten();
            let router = router.filter(|r| r.n_expert() == t.n_expert() as usize);
            let factors = router.as_ref().map_or_else(Vec::new, |r| {
                sites.iter().rev().take(depth).map(|before| factor(before.router.as_ref(), r)).collect()
            });
            site_of[i] = Some(sites.len());
            sites.push(Site {
                tensor: i,
                router,
                factors,
                predictions: Vec::new(),
                recalls: vec![Recall::default(); depth],
                whole: true,
                put_off: None,
            });
            n_expert.push(t.n_expert() as usize);
        }
        if let Some(last) = sites.last_mut() {
            last.whole = false;
        }
        for site in &mut sites {
            site.predictions.resize_with(depth, Prediction::default);
        }
        let (mut calibrations, keep) =
            learned.flatten().map_or_else(Default::default, |learned| (learned.calibrations, Some(learned.keep)));
        // what is known of distances that this run does not look at stays
        calibrations.resize_with(calibrations.len().max(depth), Calibration::default);
        Ok(Self {
            sites,
            site_of,
            n_used: index.n_expert_used as usize,
            effort,
            calibrations,
            gate_mass: vec![GateMass::default(); depth],
            batches: Forecasts::default(),
            history: Forecasts::default(),
            before: (0, 0),
            first: usize::MAX,
            pass_rows: 0,
            needless: 0,
            keep: learns.then(|| keep.unwrap_or_else(|| Keep::new(&n_expert))),
            trace,
            trace_failed: None,
            profile,
            traced: Vec::new(),
            outcomes: vec![Outcome::default(); depth],
            input: Input::default(),
            scores: Vec::new(),
            row: Vec::new(),
            sample: Sample::default(),
        })
    }

    /// How good the predictions were: the first tensor of each layer, and, one layer ahead, two, ..., what was predicted of
    /// its picks.
    pub fn recalls(&self) -> impl Iterator<Item = (usize, &[Recall])> {
        self.sites.iter().map(|site| (site.tensor, &*site.recalls))
    }

    /// One layer ahead, two, ...: how much of the routers' weight was predicted. Known while a trace is written.
    pub fn gate_mass(&self) -> &[GateMass] {
        &self.gate_mass
    }

    /// One layer ahead, two, ...: how likely predictions were said to be, and how often they came true.
    pub fn reliability(&self) -> Vec<Vec<Reliability>> {
        self.calibrations.iter().take(self.effort.most()).map(Calibration::reliability).collect()
    }

    /// How good the predictions were that are no router's, token by token: for batches of many tokens, and from history.
    pub fn foreseen(&self) -> [Foreseen; 2] {
        [self.batches.foreseen(), self.history.foreseen()]
    }

    /// What the user should know of the profile. `None` when all is as it should be.
    pub fn notice(&self) -> Option<&str> {
        self.profile.as_ref()?.notice()
    }

    /// Whether a profile told what was learned before.
    pub fn knew(&self) -> bool {
        self.profile.as_ref().is_some_and(Profile::knew)
    }

    /// Writes the profile; answers whether there is one that is this model's.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn save_profile(&mut self) -> Result<bool> {
        (0..self.sites.len()).for_each(|at| self.catch_up(at, PutOff::is_judged));
        match (&self.profile, &self.keep) {
            (Some(profile), Some(keep)) => profile.save(&self.calibrations, keep),
            _ => Ok(false),
        }
    }

    /// The experts of `tensor` are about to be applied to `rows` (empty: unknown) of `n_rows` tokens; the router has picked
    /// `picks` for them, token by token. Only a layer's first tensor counts. `waits` is asked where a pass begins: what time it
    /// is, and what has been waited for. Answers what the next layers are likely to need, the nearest first; after the last
    /// layer come the first ones, in a pass of as many tokens.
    pub fn predict(
        &mut self,
        tensor: usize,
        picks: &[i32],
        n_rows: usize,
        rows: &[&[f32]],
        waits: impl FnOnce() -> (Instant, Waits),
    ) -> Vec<Guesses> {
        let Some(at) = self.site_of[tensor] else { return Vec::new() };
        if at <= self.first {
            self.pass_begins(n_rows, waits());
        }
        let site = &mut self.sites[at];
        for (d, prediction) in site.predictions.iter_mut().enumerate() {
            let recall = prediction.settle(picks, &mut self.calibrations[d]);
            site.recalls[d] += recall;
            self.outcomes[d] = Outcome { recall, ..Outcome::default() };
        }
        (self.first, self.pass_rows) = (self.first.min(at), self.pass_rows.max(n_rows));
        let (before, n_before) = std::mem::replace(&mut self.before, (at, n_rows));
        if let Some(next) = self.sites.get_mut(before + 1).filter(|_| n_before > MOST_ROWS) {
            next.whole = (before + 1, n_before) == (at, n_rows);
        }
        self.batches.settle(at, n_rows, picks);
        self.history.settle(at, n_rows, picks);
        // a trace is for caches of every size
        let due = self.needless < NEEDLESS || self.needless.is_multiple_of(NEEDLESS) || self.trace.is_some();
        if !due {
            self.needless = self.needless.wrapping_add(1);
            return Vec::new();
        }
        let rows = if rows.len() == n_rows { rows } else { &[] };
        if n_rows > MOST_ROWS {
            return self.predict_batch(at + 1, rows).into_iter().collect();
        }
        let depth = self.effort.depth();
        let next = |distance: usize| match (at + distance).checked_sub(self.sites.len()) {
            Some(first) if first < at => self.predict_from_history(first, n_rows),
            Some(_) => None,
            None => self.predict_at(at + distance, distance, rows),
        };
        (1..=depth).filter_map(next).collect()
    }

    /// A pass of `n_rows` tokens begins `now`, when so much has been waited for.
    fn pass_begins(&mut self, n_rows: usize, (now, waits): (Instant, Waits)) {
        // a prompt reads much at once, and before one a user may have thought for long
        let before = std::mem::replace(&mut self.pass_rows, 0);
        let learn = [before, n_rows].iter().all(|rows| (1..=MOST_ROWS).contains(rows));
        self.effort.pass(now, waits, learn);
    }

    /// How likely something must be now to be read ahead, and how many layers ahead.
    pub fn effort(&self) -> (f32, usize) {
        (self.effort.least(), self.effort.depth())
    }

    /// Of what was predicted last, this much was not in memory already.
    pub fn told(&mut self, absent: Option<usize>) {
        match absent {
            Some(0) => self.needless = self.needless.saturating_add(1),
            Some(_) => self.needless = 0,
            None => {}
        }
    }

    /// What the layer `at` will need, whose router is applied to a sample of `rows`: those of the layer before it. `None`
    /// where they are not known, or are not expected to come.
    fn predict_batch(&mut self, at: usize, rows: &[&[f32]]) -> Option<Guesses> {
        let site = self.sites.get(at).filter(|site| site.whole && !rows.is_empty())?;
        let (router, factor) = (site.router.as_ref()?, site.factors.first()?);
        self.sample.begin();
        for row in (0..MOST_ROWS).filter_map(|i| rows.get(i * rows.len() / MOST_ROWS)) {
            if row.len() == router.n_embd() {
                self.input.set(row, factor);
                router.scores(&self.input, &mut self.row);
                self.sample.push(&self.row, self.n_used);
            }
        }
        let chances = self.sample.chances(rows.len());
        let experts = self.batches.foresee(at, rows.len(), chances, LEAST_PROBABILITY);
        Some(Guesses { tensor: site.tensor, experts })
    }

    /// What the layer `at` will need in the next pass, of `n_rows` tokens. `None` when none of it is likely.
    fn predict_from_history(&mut self, at: usize, n_rows: usize) -> Option<Guesses> {
        let tensor = self.sites.get(at)?.tensor;
        // the value of an expert is about how likely it is to be picked next, and somewhat more
        let chance = |value: &f32| 1.0 - (1.0 - value.clamp(0.0, 1.0)).powi(n_rows as i32);
        let chances = self.keep.as_ref()?.values(at).iter().map(chance).collect();
        let experts = self.history.foresee(at, n_rows, chances, self.effort.least());
        (!experts.is_empty()).then_some(Guesses { tensor, experts })
    }

    fn predict_at(&mut self, at: usize, distance: usize, rows: &[&[f32]]) -> Option<Guesses> {
        let site = self.sites.get_mut(at).filter(|_| !rows.is_empty())?;
        let router = site.router.as_ref()?;
        let factor = site.factors.get(distance - 1)?;
        let prediction = &mut site.predictions[distance - 1];
        prediction.begin();
        for row in rows.iter().filter(|row| row.len() == router.n_embd()) {
            self.input.set(row, factor);
            router.scores(&self.input, &mut self.row);
            prediction.push(&self.row, self.n_used);
        }
        let least = self.effort.least();
        let told = if self.trace.is_some() { trace::LEAST_PROBABILITY } else { least };
        let mut experts = prediction.guesses(&self.calibrations[distance - 1], told);
        if self.trace.is_some() {
            self.traced.resize(distance, Vec::new());
            self.traced[distance - 1] = experts.iter().map(|g| (g.expert, rounded(g.probability))).collect();
            experts.retain(|g| g.probability >= least);
        }
        Some(Guesses { tensor: site.tensor, experts })
    }

    /// As [`Lookahead::predict`], but to learn what experts are worth keeping, and to write the trace. A trace that cannot be
    /// written ends there; [`Lookahead::close_trace`] tells. Of a pass that is `verifying` drafts is learned when the layer is
    /// computed again, from the rows that stand by then.
    pub fn learn(&mut self, tensor: usize, picks: &[i32], n_rows: usize, rows: &[&[f32]], verifying: bool) {
        let Some(at) = self.site_of[tensor] else { return };
        if self.trace.is_none() && self.keep.is_none() {
            return;
        }
        self.catch_up(at, |_| true);
        // what was predicted is close enough to learn from, and costs nothing
        let predicted = self.sites[at].predictions.first().and_then(Prediction::scores);
        match predicted.filter(|_| self.trace.is_none()) {
            Some(scores) => {
                self.scores.clear();
                self.scores.extend_from_slice(scores);
            }
            None => self.score(at, rows),
        }
        if verifying {
            self.sites[at].put_off = Some(PutOff::new(picks, &self.scores, n_rows));
        } else if let Some(keep) = &mut self.keep {
            keep.observe(at, n_rows, picks, &self.scores);
        }
        self.weigh(at, picks);
        let Some(trace) = &mut self.trace else { return };
        let rounded = |row: &[f32]| row.iter().copied().map(rounded).collect();
        let scores = self.scores.chunks(self.row.len().max(1)).map(rounded).collect();
        let guesses = std::mem::take(&mut self.traced);
        let known = self.outcomes.iter().rposition(|o| o.recall.picks > 0).map_or(0, |last| last + 1);
        let outcomes = self.outcomes[..known].to_vec();
        let record = Record { at: at as u32, rows: n_rows as u32, picks: picks.to_vec(), scores, guesses, outcomes };
        if let Err(e) = trace.write(&record) {
            self.trace = None;
            self.trace_failed = Some(e);
        }
    }

    /// Of the verification that was last, the first `rows` rows stand, at most all. Without this, all do.
    pub fn judged(&mut self, rows: usize) {
        self.sites.iter_mut().filter_map(|site| site.put_off.as_mut()).for_each(|put_off| put_off.judge(rows));
    }

    /// Learns what was put off for the layer `at`, if that is `due`.
    fn catch_up(&mut self, at: usize, due: impl FnOnce(&PutOff) -> bool) {
        let put_off = self.sites[at].put_off.take_if(|put_off| due(put_off));
        if let (Some(put_off), Some(keep)) = (put_off, &mut self.keep) {
            put_off.observe(keep, at);
        }
    }

    /// Ends the trace; answers whether there was one.
    ///
    /// # Errors
    /// [`Error::File`] when not all of it could be written.
    pub fn close_trace(&mut self) -> Result<bool> {
        match (self.trace_failed.take(), self.trace.take()) {
            (Some(e), _) => Err(e),
            (None, Some(trace)) => trace.close().map(|()| true),
            (None, None) => Ok(false),
        }
    }

    /// The scores of the last rows, in `self.scores`.
    fn score(&mut self, at: usize, rows: &[&[f32]]) {
        self.scores.clear();
        let Some(router) = &self.sites[at].router else { return };
        for row in rows.iter().skip(rows.len().saturating_sub(WINDOW)).filter(|row| row.len() == router.n_embd()) {
            self.input.set(row, &[]);
            router.scores(&self.input, &mut self.row);
            self.scores.extend_from_slice(&self.row);
        }
    }

    /// Counts how much of the router's weight was predicted, where a trace wants the layer's own scores anyway.
    fn weigh(&mut self, at: usize, picks: &[i32]) {
        let Site { router: Some(router), predictions, .. } = &self.sites[at] else { return };
        if self.trace.is_none() {
            return;
        }
        let mut weights = self.scores.clone();
        weights.chunks_exact_mut(router.n_expert()).for_each(|row| router.weights(row));
        for ((prediction, mass), outcome) in predictions.iter().zip(&mut self.gate_mass).zip(&mut self.outcomes) {
            outcome.gate_mass = prediction.weigh(picks, &weights);
            *mass += outcome.gate_mass;
        }
    }

    /// What the experts of the layer that `tensor` leads are worth keeping, one value per expert. `None` when nothing is
    /// ever evicted, nor kept for the next run.
    pub fn values(&self, tensor: usize) -> Option<&[f32]> {
        Some(self.keep.as_ref()?.values(self.site_of[tensor]?))
    }
}

/// To what the trace tells of a number.
fn rounded(x: f32) -> f32 {
    (x * 1000.0).round() / 1000.0
}

/// What an input of the layer of `from` is multiplied with to resemble one of `to`'s: both are the same normalized
/// hidden state, times the weight of the layer's own norm.
fn factor(from: Option<&Router>, to: &Router) -> Vec<f32> {
    let Some(from) = from.filter(|from| from.norm.len() == to.norm.len()) else { return Vec::new() };
    // what the first norm has made tiny is lost: its noise must not be made large again
    let ratio = |(a, b): (&f32, &f32)| if a.abs() > 1e-3 { (b / a).clamp(-16.0, 16.0) } else { 0.0 };
    from.norm.iter().zip(&to.norm).map(ratio).collect()
}
