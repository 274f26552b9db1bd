//! Which experts a layer to come will pick: its router, applied to an earlier layer's input.

use serde::{Deserialize, Serialize};

use super::calibration::{Calibration, Probabilities};
use super::spread::mean_and_deviation;

/// An expert that may be picked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guess {
    /// Its number in the layer.
    pub expert: u32,
    /// How likely it is that one of the batch's tokens picks it.
    pub probability: f32,
}

/// How good the predictions were: picks that were among the `k` best scores, or the `2k` best, of all `picks`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recall {
    /// Picks that were predicted.
    pub picks: u64,
    /// Of these, among as many predictions as there were picks.
    pub at_k: u64,
    /// Of these, among twice as many.
    pub at_2k: u64,
}

impl std::ops::AddAssign for Recall {
    fn add_assign(&mut self, other: Self) {
        self.picks += other.picks;
        self.at_k += other.at_k;
        self.at_2k += other.at_2k;
    }
}

/// How much of the weight that a router gave to its picks belongs to those that were predicted. Counted only where the
/// layer's own scores are known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct GateMass {
    /// Tokens and layers.
    pub tokens: u64,
    /// Summed over these: the share of the weight that was among as many predictions as there were picks.
    pub at_k: f64,
    /// Likewise, among twice as many.
    pub at_2k: f64,
}

impl std::ops::AddAssign for GateMass {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.at_k += other.at_k;
        self.at_2k += other.at_2k;
    }
}

/// What was predicted for one layer and is not yet known.
#[derive(Debug, Default)]
pub(super) struct Prediction {
    /// Row by row, expert by expert: its bin, or [`NONE`].
    bins: Vec<u8>,
    /// Row by row: the `2k` best, in order.
    ranked: Vec<u16>,
    /// Row by row, expert by expert; kept until the next prediction.
    scores: Vec<f32>,
    /// What the calibration said when the predictions were made.
    promised: Probabilities,
    /// The pass that was predicted is the one that was settled last.
    came: bool,
    rows: usize,
    n_expert: usize,
    n_used: usize,
}

const NONE: u8 = u8::MAX;

impl Prediction {
    /// Begins a prediction, without rows.
    pub(super) fn begin(&mut self) {
        self.bins.clear();
        self.ranked.clear();
        self.scores.clear();
        self.rows = 0;
    }

    /// The scores that were predicted for the pass that was settled last, row by row, expert by expert.
    pub(super) fn scores(&self) -> Option<&[f32]> {
        self.came.then_some(&self.scores)
    }

    /// Adds a row: `scores` of all experts, of which `n_used` will be picked.
    pub(super) fn push(&mut self, scores: &[f32], n_used: usize) {
        let n = scores.len();
        if n_used == 0 || n_used >= n {
            return;
        }
        (self.n_expert, self.n_used, self.rows) = (n, n_used, self.rows + 1);
        self.scores.extend_from_slice(scores);
        let mut order: Vec<u16> = (0..n as u16).collect();
        let falling = |a: &u16, b: &u16| scores[usize::from(*b)].total_cmp(&scores[usize::from(*a)]);
        let best = (2 * n_used).min(n);
        if best < n {
            order.select_nth_unstable_by(best, falling);
            order.truncate(best);
        }
        order.sort_unstable_by(falling);
        let least = scores[usize::from(order[n_used - 1])];
        let (_, deviation) = mean_and_deviation(scores);
        let inverse = if deviation > 0.0 { 1.0 / deviation } else { 0.0 };
        self.bins.extend(scores.iter().map(|s| Calibration::bin((s - least) * inverse).unwrap_or(NONE)));
        self.ranked.extend(order);
    }

    /// The likely experts, the likeliest first, down to `least`.
    pub(super) fn guesses(&mut self, calibration: &Calibration, least: f32) -> Vec<Guess> {
        self.promised = calibration.probabilities();
        let mut missed = vec![1.0_f32; self.n_expert];
        for row in self.bins.chunks_exact(self.n_expert.max(1)) {
            for (missed, &bin) in missed.iter_mut().zip(row).filter(|(_, bin)| **bin != NONE) {
                *missed *= 1.0 - self.promised[usize::from(bin)];
            }
        }
        let mut guesses: Vec<Guess> = (0..)
            .zip(missed)
            .map(|(expert, missed)| Guess { expert, probability: 1.0 - missed })
            .filter(|guess| guess.probability >= least)
            .collect();
        guesses.sort_by(|a, b| b.probability.total_cmp(&a.probability));
        guesses
    }

    /// The router has picked `picks`, row by row. Teaches the calibration and counts, once.
    pub(super) fn settle(&mut self, picks: &[i32], calibration: &mut Calibration) -> Recall {
        let mut recall = Recall::default();
        let rows = std::mem::take(&mut self.rows);
        self.came = rows > 0 && picks.len() == rows * self.n_used;
        if !self.came {
            return recall;
        }
        let mut picked = vec![false; self.n_expert];
        let best = self.ranked.len() / rows;
        for row in 0..rows {
            let picks = &picks[row * self.n_used..(row + 1) * self.n_used];
            picked.fill(false);
            for &e in picks {
                if let Some(picked) = usize::try_from(e).ok().and_then(|e| picked.get_mut(e)) {
                    *picked = true;
                }
            }
            for (e, &bin) in self.bins[row * self.n_expert..(row + 1) * self.n_expert].iter().enumerate() {
                if bin != NONE {
                    calibration.learn(bin, self.promised[usize::from(bin)], picked[e]);
                }
            }
            for (rank, &e) in self.ranked[row * best..(row + 1) * best].iter().enumerate() {
                let right = u64::from(picked[usize::from(e)]);
                recall.at_k += if rank < self.n_used { right } else { 0 };
                recall.at_2k += right;
            }
            recall.picks += picks.len() as u64;
        }
        recall
    }

    /// The router has given these `weights` to all experts when it picked `picks`, row by row. Counts what was predicted
    /// for the pass that was settled last.
    pub(super) fn weigh(&self, picks: &[i32], weights: &[f32]) -> GateMass {
        let mut mass = GateMass::default();
        if !self.came || weights.len() * self.n_used != picks.len() * self.n_expert {
            return mass;
        }
        let rows = picks.len() / self.n_used;
        let rows = picks
            .chunks_exact(self.n_used)
            .zip(weights.chunks_exact(self.n_expert))
            .zip(self.ranked.chunks_exact(self.ranked.len() / rows));
        for ((picks, weights), ranked) in rows {
            let weight = |expert: usize| weights.get(expert).copied().unwrap_or(0.0);
            let picked = |expert: &u16| picks.contains(&i32::from(*expert));
            let of = |best: &[u16]| -> f32 { best.iter().filter(|e| picked(e)).map(|&e| weight(usize::from(e))).sum() };
            let all: f32 = picks.iter().filter_map(|&e| usize::try_from(e).ok()).map(weight).sum();
            if all > 0.0 {
                mass.tokens += 1;
                mass.at_k += f64::from(of(&ranked[..self.n_used]) / all);
                mass.at_2k += f64::from(of(ranked) / all);
            }
        }
        mass
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_scores_are_the_likeliest_and_are_counted() {
        let mut p = Prediction::default();
        p.push(&[0.0, 5.0, 1.0, 4.0, 0.5, 0.2, 0.1, 3.9], 2);
        let mut calibration = Calibration::default();
        let guesses = p.guesses(&calibration, 0.4);
        assert_eq!(guesses.iter().map(|g| g.expert).collect::<Vec<_>>(), [1, 3, 7]);
        let recall = p.settle(&[1, 7], &mut calibration);
        assert_eq!(recall, Recall { picks: 2, at_k: 1, at_2k: 2 });
        assert_eq!(p.scores().map(<[f32]>::len), Some(8));
        // the next pass was not predicted
        let recall = p.settle(&[1, 7], &mut calibration);
        assert_eq!((recall.picks, p.scores()), (0, None));
        // picks that do not fit the prediction are of another batch
        p.begin();
        p.push(&[0.0, 5.0, 1.0, 4.0, 0.5, 0.2, 0.1, 3.9], 2);
        let recall = p.settle(&[1, 7, 3], &mut calibration);
        assert_eq!((recall.picks, p.scores()), (0, None));
    }

    #[test]
    fn the_weight_of_what_was_predicted_is_counted() {
        let mut p = Prediction::default();
        let row = [0.0, 5.0, 1.0, 4.0, 0.5, 0.2, 0.1, 3.9];
        p.push(&row, 2);
        p.push(&row, 2);
        p.guesses(&Calibration::default(), 1.0);
        // among the best two, among the best four; neither
        let (picks, weights) = ([1, 7, 1, 5], [[0.0, 0.3, 0.0, 0.5, 0.0, 0.1, 0.0, 0.1]; 2].concat());
        assert_eq!(p.weigh(&picks, &weights).tokens, 0, "nothing has come yet");
        p.settle(&picks, &mut Calibration::default());
        assert_eq!(p.weigh(&picks, &weights[..8]).tokens, 0, "weights of one token do not tell of two");
        let mass = p.weigh(&picks, &weights);
        assert_eq!(mass.tokens, 2);
        assert!((mass.at_k - 1.5).abs() < 1e-6 && (mass.at_2k - 1.75).abs() < 1e-6, "{mass:?}");
    }

    #[test]
    fn what_is_promised_is_judged_by_what_was_promised_then() {
        let mut p = Prediction::default();
        let mut calibration = Calibration::default();
        p.push(&[3.0, 2.0, 1.9, 0.0], 1);
        let promised = p.guesses(&calibration, 0.0)[0].probability;
        // meanwhile other layers teach it otherwise
        (0..1000).for_each(|_| (0..64).for_each(|bin| calibration.learn(bin, 0.0, false)));
        p.settle(&[0], &mut calibration);
        let after = calibration.reliability();
        let bin = after.iter().find(|bin| bin.picked == 1).copied().unwrap_or_default();
        assert_eq!((bin.margin, bin.predictions), (0.0, 1001), "the one that was picked was just above the margin");
        assert!((bin.promised * 1001.0 - f64::from(promised)).abs() < 1e-6, "{bin:?}");
    }

    #[test]
    fn what_several_rows_may_want_is_likelier() {
        let mut p = Prediction::default();
        let row = [3.0, 2.0, 1.9, 0.0];
        p.push(&row, 1);
        let one = p.guesses(&Calibration::default(), 0.0)[1].probability;
        p.push(&row, 1);
        let two = p.guesses(&Calibration::default(), 0.0)[1].probability;
        assert!(two > one && (two - (1.0 - (1.0 - one) * (1.0 - one))).abs() < 1e-6);
    }

    #[test]
    fn equal_scores_and_masked_groups_are_no_trouble() {
        let mut p = Prediction::default();
        p.push(&[1.0; 8], 2);
        p.push(&[f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0, 2.0, 3.0, 1.5, f32::NEG_INFINITY, f32::NEG_INFINITY], 2);
        assert!(p.guesses(&Calibration::default(), 0.0).iter().all(|g| (0.0..=1.0).contains(&g.probability)));
    }
}
