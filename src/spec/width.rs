//! How many drafted tokens to verify, step by step.
//!
//! With `a(i)` for how likely the i-th drafted token is to stand when those before it do, a step that verifies `w` of them yields
//!
//! ```text
//! tokens(w) = 1 + a(1) + a(1) a(2) + ... + a(1) ... a(w)
//! ```
//!
//! on average, and takes `cost(w)`. Tokens per time are most when every step has the width with the largest
//!
//! ```text
//! value(w) = tokens(w) - rate * cost(w)
//! ```
//!
//! `rate` being the tokens per time that this reaches (renewal reward: S. M. Ross, Applied Probability Models with Optimization
//! Applications, 1970, ch. 7). Tokens are drafted when that was worth more, lately, than the time that drafting takes.
//!
//! What was not measured for long may have changed: it is tried again as long as all tries together are expected to lose
//! little.

use serde::Serialize;

use super::acceptance::{Acceptance, Position};
use super::cost::Cost;
use super::reading::StepCost;

/// Before it was measured: what one token more takes, reading apart, as a part of a step without drafts. A verified token needs
/// experts of its own, and shares the rest.
const RISE: f64 = 0.6;
/// Likewise when one token more is drafted.
const RISE_OF_DRAFTS: f64 = 0.5;
/// Tries may lose so many tokens of each token that was generated,
const TRIES: f64 = 0.0075;
/// so many tokens at the beginning,
const TRIES_AT_FIRST: f64 = 1.0;
/// and so many at once, however long none was lost.
const MOST_TRIES: f64 = 2.0;
/// More tokens are verified than none only where that is better by so many standard deviations.
const SURE: f64 = 0.35;
/// What is expected to be lost where a difference is in doubt: the mean of the negative part of a normal variable, by a logistic
/// curve of this width.
const LOGISTIC: f64 = 0.55;
/// So many steps without drafts are remembered before there are any, after the first one, which finds nothing cached: it takes 18, as
/// what was measured fades.
const PLAIN_STEPS: f64 = 12.0;
/// What a step without drafts takes is what all else is compared with: it is measured so many times as often as the rest.
const OFTEN: f64 = 3.0;
/// So much stays of what drafts were worth when one more is made.
const KEPT: f64 = 0.9;
/// Drafts get shorter by a token after so many steps that did not verify it.
const SHORTER: f64 = 16.0;

/// How the width is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Nothing is drafted.
    Off,
    /// Always so many tokens, or all that were drafted.
    Fixed(usize),
    /// By what each is worth.
    Adaptive,
}

/// What became of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    /// Tokens that were drafted.
    pub drafted: usize,
    /// Of these, verified: what [`Widths::verify`] said.
    pub verified: usize,
    /// Of these, standing.
    pub stood: usize,
    /// Nanoseconds that drafting took.
    pub draft_ns: u64,
    /// Nanoseconds that all the rest of the step took.
    pub step_ns: u64,
    /// Tokens that it yielded beside those that stood and the one after them: where the target can only go back as a whole, what
    /// stands is computed anew, and tells one token more.
    pub more: usize,
}

/// The steps of one width.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct OfWidth {
    /// How many.
    pub steps: u64,
    /// Tokens they yielded.
    pub tokens: u64,
    /// Nanoseconds, without drafting.
    pub ns: u64,
    /// Of these steps, those that were tries.
    pub tries: u64,
    /// Of these steps, those of which it is known what they have read: where each was a pass of its own.
    pub reads_known: u64,
    /// Bytes that those have read.
    pub bytes_read: u64,
}

impl OfWidth {
    pub(super) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.ns = self.ns.saturating_add(other.ns);
        self.tries += other.tries;
        self.reads_known += other.reads_known;
        self.bytes_read += other.bytes_read;
    }
}

/// Chooses the widths. Takes its clock from outside.
#[derive(Debug, Clone)]
pub struct Widths {
    mode: Mode,
    acceptance: Acceptance,
    cost: StepCost,
    cost_of_drafts: Cost,
    /// What verifying was worth more than not to, lately, in tokens. `None` before there was a draft.
    worth: Option<f64>,
    /// How many tokens are drafted, rounded up.
    reach: f64,
    /// What tries may lose, in tokens.
    tries: f64,
    /// What the drafter thought of the tokens being verified.
    confidences: Vec<Option<f32>>,
    trying: bool,
    /// There was no step yet.
    first: bool,
    /// Steps without drafts are being measured.
    begins: bool,
    run: Vec<OfWidth>,
}

impl Widths {
    /// For a drafter of at most `n_max` tokens.
    pub fn new(mode: Mode, n_max: usize) -> Self {
        Self {
            mode,
            acceptance: Acceptance::new(n_max),
            cost: StepCost::new(n_max, RISE),
            cost_of_drafts: Cost::new(n_max, RISE_OF_DRAFTS),
            worth: None,
            reach: n_max as f64,
            tries: TRIES_AT_FIRST,
            confidences: Vec::new(),
            trying: false,
            first: true,
            begins: true,
            run: vec![OfWidth::default(); n_max + 1],
        }
    }

    /// The most tokens that are drafted.
    pub fn n_max(&self) -> usize {
        self.run.len() - 1
    }

    /// How many tokens to draft for the next step.
    pub fn draft(&mut self) -> usize {
        match self.mode {
            Mode::Off => 0,
            Mode::Fixed(n) => n.min(self.n_max()),
            // first what a step takes without drafts
            Mode::Adaptive if self.begins => 0,
            Mode::Adaptive => {
                let n = (self.reach.ceil() as usize).clamp(1.min(self.n_max()), self.n_max());
                let rate = self.rate();
                let price = rate * self.cost_of_drafts.of(n).unwrap_or(0.0);
                let loss = self.worth.map_or(0.0, |worth| price - worth);
                // a draft of which nothing would be verified tells nothing
                let pays = loss <= 0.0 || loss + self.least_loss(rate) <= self.tries && self.try_for(loss);
                if pays { n } else { 0 }
            }
        }
    }

    /// How many of the drafted tokens to verify: the first ones. `confidences`: how likely the drafter thinks that each stands,
    /// given that those before it do; `None` where it does not say.
    pub fn verify(&mut self, confidences: &[Option<f32>]) -> usize {
        let drafted = &confidences[..confidences.len().min(self.n_max())];
        self.trying = false;
        let width = match self.mode {
            Mode::Off => 0,
            Mode::Fixed(n) => n.min(drafted.len()),
            Mode::Adaptive => self.best(drafted),
        };
        self.confidences = drafted[..width].to_vec();
        width
    }

    /// The step that was begun by [`Widths::verify`] is over. `reads`: the bytes that it has read for its first row, its first two,
    /// and so on to all; `None` where that is not known.
    pub fn done(&mut self, step: Step, reads: Option<&[u64]>) {
        let n_max = self.n_max();
        let (drafted, width) = (step.drafted.min(n_max), step.verified.min(n_max));
        let stood = step.stood.min(width);
        let tokens = 1 + stood;
        // what its tokens would take without those beside
        let part = tokens as f64 / (tokens + step.more) as f64;
        let reads = reads.filter(|_| step.more == 0);
        if !std::mem::take(&mut self.first) {
            self.cost.learn(width, part * step.step_ns as f64, reads);
        }
        self.begins &= self.cost.seen(0) < PLAIN_STEPS;
        if drafted > 0 {
            self.cost_of_drafts.learn(drafted, step.draft_ns as f64);
        }
        let confidences = std::mem::take(&mut self.confidences);
        if confidences.len() == width {
            self.acceptance.learn(&confidences, stood);
        }
        let tokens = (tokens + step.more) as u64;
        self.tries = (self.tries + TRIES * tokens as f64).min(MOST_TRIES);
        self.reach = (self.reach - 1.0 / SHORTER).max(width as f64 + 1.0).min(n_max as f64);
        let run = &mut self.run[width];
        run.steps += 1;
        run.tokens += tokens;
        run.ns = run.ns.saturating_add(step.step_ns);
        run.tries += u64::from(std::mem::take(&mut self.trying));
        run.reads_known += u64::from(reads.is_some());
        run.bytes_read += reads.and_then(<[u64]>::last).unwrap_or(&0);
    }

    /// The steps of the run, by width.
    pub fn run(&self) -> &[OfWidth] {
        &self.run
    }

    /// What became of the drafted tokens of the run, by their place.
    pub fn positions(&self) -> &[Position] {
        self.acceptance.run()
    }

    #[cfg(test)]
    pub(super) fn cost_of(&self, width: usize) -> Option<f64> {
        self.cost.of(width)
    }

    /// The width that is worth most, or one that is worth a try.
    fn best(&mut self, drafted: &[Option<f32>]) -> usize {
        if drafted.is_empty() {
            return 0;
        }
        let rate = self.rate();
        let values = self.values(drafted.iter().copied(), rate);
        let doubts: Vec<f64> = (0..values.len()).map(|width| self.doubt(width, rate)).collect();
        let pays = |width: &usize| values[*width] - SURE * doubts[*width] >= values[0];
        let best = (0..values.len()).rev().filter(pays).max_by(|a, b| values[*a].total_cmp(&values[*b])).unwrap_or(0);
        let worth = values.iter().copied().fold(f64::NEG_INFINITY, f64::max) - values[0];
        self.worth = Some(self.worth.map_or(worth, |before| KEPT * before + (1.0 - KEPT) * worth));
        let loss = |width: usize| expected_loss(values[width] - values[best], doubts[width].max(doubts[best]));
        let known = |width: usize| self.cost.seen(width) / if width == 0 { OFTEN } else { 1.0 };
        let affordable = (0..values.len()).filter(|width| *width == best || loss(*width) <= self.tries);
        match affordable.min_by(|a, b| known(*a).total_cmp(&known(*b))) {
            Some(stale) if stale != best => {
                self.trying = self.try_for(loss(stale));
                stale
            }
            _ => best,
        }
    }

    /// The standard deviation of what a step is worth more than one without drafts, at this [`rate`](Self::rate).
    fn doubt(&self, width: usize, rate: f64) -> f64 {
        let doubt = if width == 0 { 0.0 } else { self.cost.doubt(width, 0) };
        doubt * rate * self.cost.of(width).unwrap_or(0.0)
    }

    /// What verifying at least one token is expected to lose, whatever the drafter thinks of it.
    fn least_loss(&self, rate: f64) -> f64 {
        let values = self.values(std::iter::repeat_n(None, self.n_max()), rate);
        let loss = |width: usize| expected_loss(values[width] - values[0], self.doubt(width, rate));
        (1..values.len()).map(loss).fold(f64::INFINITY, f64::min)
    }

    /// What a step is worth, by width, from 0.
    fn values(&self, confidences: impl Iterator<Item = Option<f32>>, rate: f64) -> Vec<f64> {
        let tokens = self.tokens(confidences).enumerate();
        tokens.map(|(width, tokens)| tokens - rate * self.cost.of(width).unwrap_or(0.0)).collect()
    }

    /// How many tokens a step yields, by width, from 0.
    fn tokens(&self, confidences: impl Iterator<Item = Option<f32>>) -> impl Iterator<Item = f64> {
        let stands = confidences.enumerate().map(|(place, confidence)| self.acceptance.of(place, confidence));
        let mut sum = 1.0;
        let more = stands.scan(1.0, move |all, stands| {
            *all *= stands;
            sum += *all;
            Some(sum)
        });
        std::iter::once(1.0).chain(more)
    }

    /// The most tokens per nanosecond that a width is expected to reach.
    fn rate(&self) -> f64 {
        let unknown = std::iter::repeat_n(None, self.n_max());
        let rate = |(width, tokens): (usize, f64)| {
            let drafts = if width > 0 { self.cost_of_drafts.of(width).unwrap_or(0.0) } else { 0.0 };
            self.cost.of(width).map_or(0.0, |cost| tokens / (cost + drafts).max(1.0))
        };
        self.tokens(unknown).enumerate().map(rate).fold(0.0, f64::max)
    }

    /// Whether so many tokens may be lost for a try. Then they are.
    fn try_for(&mut self, loss: f64) -> bool {
        let may = loss <= self.tries;
        self.tries -= if may { loss.max(0.0) } else { 0.0 };
        may
    }
}

/// Of what is worth so much `more` than something else, with so much `doubt`.
fn expected_loss(more: f64, doubt: f64) -> f64 {
    let scale = LOGISTIC * doubt;
    // where the exponential is no number, or nothing is in doubt
    if -more > 30.0 * scale { -more } else { scale * (-more / scale).exp().ln_1p() }
}
