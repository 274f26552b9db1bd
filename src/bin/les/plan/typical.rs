//! A typical routing, for a model that has no trace.

use fastrand::Rng;
use les::lookahead::trace::Record;
use les::store::{Policy, Valued};

use crate::sim::Trace;

/// Hit rates by the share of the experts that is cached: of the policy `learned` for the yardstick, as README.md has them
/// from `les sim`; without a cache, and with all in it, there is no doubt.
const HITS: [(f64, f64); 7] =
    [(0.0, 0.0), (0.05, 0.511), (0.1, 0.710), (0.2, 0.876), (0.4, 0.961), (0.6, 0.984), (1.0, 1.0)];
/// What is predicted one layer ahead of the experts that are not in the cache: how likely they are said to be, and, for each
/// expert of that layer that is needed and not in the cache, how many such guesses are right, and how many are in vain. Of the
/// yardstick with 9% cached; with 5% to 54% there are about as many. (What is in the cache comes true more often, so that all
/// guesses together come true as often as is said.)
const GUESSED: [(f32, f64, f64); 3] = [(0.99, 0.31, 0.01), (0.86, 0.23, 0.05), (0.62, 0.22, 0.19)];
/// Picks that a trace is made of, about; those of the second half count.
const PICKS: usize = 20_000;

/// The part of the experts that is there when `share` of all are cached.
pub fn hit_rate(share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    let after = HITS.iter().position(|&(at, _)| at >= share).unwrap_or(HITS.len() - 1).max(1);
    let ((x0, y0), (x1, y1)) = (HITS[after - 1], HITS[after]);
    y0 + (y1 - y0) * (share - x0) / (x1 - x0)
}

/// Experts and their probabilities.
type Guesses = Vec<(u32, f32)>;

/// A made-up trace of which a cache has each expert with a probability: such experts are the first ones of a layer and are
/// worth more than all others, which come so late again that they are never there.
pub struct Typical {
    n_used: Vec<usize>,
    pub trace: Trace,
    pub slots: usize,
}

impl Typical {
    /// For layers of which each token uses so many experts with parts of such sizes, and this rate of hits. A higher rate
    /// has the hits of a lower one, and more.
    pub fn new(n_used: &[usize], part_bytes: &[Vec<u64>], hit_rate: f64) -> anyhow::Result<Self> {
        let most_used = n_used.iter().copied().max().unwrap_or(1);
        // what is needed now, and the guesses of two layers
        let spare = 4 * most_used;
        // as many others come between two uses of one of them
        let others = spare + 2 * most_used;
        let mut trace = Trace {
            model: String::new(),
            passes: Vec::new(),
            n_expert: n_used.iter().map(|n| n + others).collect(),
            part_bytes: part_bytes.to_vec(),
            most_used,
            outcomes: Vec::new(),
        };
        let mut random = Rng::with_seed(1);
        let mut next = vec![0; n_used.len()];
        let mut other = |at: usize| {
            next[at] = (next[at] + 1) % others;
            (n_used[at] + next[at]) as i32
        };
        let tokens = (PICKS / n_used.iter().sum::<usize>().max(1)).max(32);
        // the first one fills the cache
        for token in 0..tokens {
            // of each layer: its picks, and what is predicted for it
            let mut layers: Vec<(Vec<i32>, Guesses)> = Vec::new();
            for (at, &n) in n_used.iter().enumerate() {
                let (mut picks, mut guesses) = (Vec::new(), Vec::new());
                for i in 0..n {
                    let [hit, mut predicted] = [(); 2].map(|()| random.f64());
                    // each takes the same numbers, so that a higher rate only takes some away
                    let in_vain = GUESSED.map(|_| random.f64());
                    if token == 0 || hit < hit_rate {
                        picks.push(i as i32);
                        continue;
                    }
                    let pick = other(at);
                    picks.push(pick);
                    for ((probability, right, wrong), in_vain) in GUESSED.into_iter().zip(in_vain) {
                        if (0.0..right).contains(&predicted) {
                            guesses.push((pick as u32, probability));
                        }
                        predicted -= right;
                        if in_vain < wrong {
                            guesses.push((other(at) as u32, probability));
                        }
                    }
                }
                // the likeliest are read first
                guesses.sort_by(|a, b| b.1.total_cmp(&a.1));
                layers.push((picks, guesses));
            }
            for at in 0..layers.len() {
                let guesses = layers.get(at + 1).map(|next| next.1.clone()).into_iter().collect();
                let picks = layers[at].0.clone();
                let (scores, outcomes) = (Vec::new(), Vec::new());
                trace.push(Record { at: at as u32, rows: 1, picks, scores, guesses, outcomes })?;
            }
        }
        Ok(Self { n_used: n_used.to_vec(), trace, slots: n_used.iter().sum::<usize>() + spare })
    }

    /// The policy that keeps what is to be kept.
    pub fn policy(&self) -> Box<dyn Policy> {
        let mut policy = Valued::of(self.trace.n_expert.iter().map(|&n| std::iter::repeat_n(0, n)));
        for (at, (&n, &used)) in self.trace.n_expert.iter().zip(&self.n_used).enumerate() {
            let values: Vec<f32> = (0..n).map(|e| if e < used { 1.0 } else { 0.0 }).collect();
            policy.valued(at, &values);
        }
        Box::new(policy)
    }
}
