//! What a pass as a whole will want of a layer, where no router can be asked token by token.
//!
//! How likely each expert is to be wanted is reckoned first, from a sample of a batch or from what was picked before. How
//! far such a reckoning is to be trusted is learned from what the passes then wanted.

use serde::Serialize;

use super::calibration::{Calibration, Probabilities, Reliability};
use super::predict::{Guess, Recall};
use super::spread::mean_and_deviation;

/// How good the forecasts were.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Foreseen {
    /// `picks`: the distinct experts that passes wanted for which there was a forecast.
    #[serde(flatten)]
    pub recall: Recall,
    /// How likely experts were said to be, and how often they came. The margin is a quarter of the logarithm of the odds
    /// that were reckoned.
    pub calibration: Vec<Reliability>,
}

/// What was foreseen for one pass of one layer, and has not come yet.
struct Forecast {
    at: usize,
    rows: usize,
    /// How likely each expert was reckoned to be.
    chances: Vec<f32>,
    /// What the calibration said then.
    promised: Probabilities,
}

/// Forecasts of one kind, and what became of them.
#[derive(Default)]
pub(super) struct Forecasts {
    open: Vec<Forecast>,
    calibration: Calibration,
    recall: Recall,
}

impl Forecasts {
    /// The next pass of layer `at`, of `rows` tokens, is reckoned to want each expert with these `chances`. Takes
    /// the place of the forecast for that layer before. Answers the likely experts, the likeliest first, down to `least`.
    pub(super) fn foresee(&mut self, at: usize, rows: usize, chances: Vec<f32>, least: f32) -> Vec<Guess> {
        let promised = self.calibration.probabilities();
        let probability = |chance: f32| Calibration::bin_of(chance).map_or(0.0, |bin| promised[usize::from(bin)]);
        let mut guesses: Vec<Guess> = (0..)
            .zip(&chances)
            .map(|(expert, &chance)| Guess { expert, probability: probability(chance) })
            .filter(|guess| guess.probability >= least)
            .collect();
        // within a bin by what was reckoned
        let reckoned = |guess: &Guess| chances[guess.expert as usize];
        guesses
            .sort_by(|a, b| b.probability.total_cmp(&a.probability).then_with(|| reckoned(b).total_cmp(&reckoned(a))));
        self.open.retain(|forecast| forecast.at != at);
        self.open.push(Forecast { at, rows, chances, promised });
        guesses
    }

    /// Layer `at` has picked `picks` for `rows` tokens. Teaches the calibration and counts, once per forecast.
    pub(super) fn settle(&mut self, at: usize, rows: usize, picks: &[i32]) {
        let Some(i) = self.open.iter().position(|forecast| forecast.at == at) else { return };
        let Forecast { chances, promised, rows: foreseen, .. } = self.open.swap_remove(i);
        if rows != foreseen {
            return;
        }
        let mut wanted = vec![false; chances.len()];
        for &e in picks {
            if let Some(wanted) = usize::try_from(e).ok().and_then(|e| wanted.get_mut(e)) {
                *wanted = true;
            }
        }
        for (&chance, &wanted) in chances.iter().zip(&wanted) {
            if let Some(bin) = Calibration::bin_of(chance) {
                self.calibration.learn(bin, promised[usize::from(bin)], wanted);
            }
        }
        let mut ranked: Vec<usize> = (0..chances.len()).collect();
        ranked.sort_unstable_by(|&a, &b| chances[b].total_cmp(&chances[a]));
        let n = wanted.iter().filter(|wanted| **wanted).count();
        let right = |best: usize| ranked.iter().take(best).filter(|&&e| wanted[e]).count() as u64;
        self.recall += Recall { picks: n as u64, at_k: right(n), at_2k: right(2 * n) };
    }

    /// How good they were.
    pub(super) fn foreseen(&self) -> Foreseen {
        Foreseen { recall: self.recall, calibration: self.calibration.reliability() }
    }
}

/// How likely a batch is to want each expert, by the scores of a few of its tokens.
#[derive(Default)]
pub(super) struct Sample {
    /// By expert: the logarithm of how likely it is that none of these tokens picks it.
    missed: Vec<f32>,
    tokens: usize,
    sorted: Vec<f32>,
}

impl Sample {
    /// Begins a sample, without tokens.
    pub(super) fn begin(&mut self) {
        self.missed.clear();
        self.tokens = 0;
    }

    /// Adds a token: `scores` of all experts, of which `n_used` will be picked.
    pub(super) fn push(&mut self, scores: &[f32], n_used: usize) {
        if n_used == 0 || n_used >= scores.len() {
            return;
        }
        self.sorted.clear();
        self.sorted.extend_from_slice(scores);
        let (_, &mut least, _) = self.sorted.select_nth_unstable_by(n_used - 1, |a, b| b.total_cmp(a));
        let (_, deviation) = mean_and_deviation(scores);
        let inverse = if deviation > 0.0 { 1.0 / deviation } else { 0.0 };
        self.missed.resize(scores.len(), 0.0);
        for (missed, score) in self.missed.iter_mut().zip(scores).filter(|(_, score)| score.is_finite()) {
            *missed += Calibration::ln_missed((score - least) * inverse);
        }
        self.tokens += 1;
    }

    /// How likely it is that one of `rows` tokens like these picks the expert, for each expert. Empty without tokens.
    pub(super) fn chances(&self, rows: usize) -> Vec<f32> {
        let times = rows as f32 / self.tokens as f32;
        self.missed.iter().map(|missed| -(missed * times).exp_m1()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(guesses: &[Guess]) -> Vec<u32> {
        guesses.iter().map(|guess| guess.expert).collect()
    }

    #[test]
    fn what_is_reckoned_is_believed_until_it_is_known_better() {
        let mut forecasts = Forecasts::default();
        let chances = vec![0.9, 0.1, 0.97, 0.7, 0.0, 1.0];
        let first = forecasts.foresee(0, 1, chances.clone(), 0.6);
        assert_eq!(experts(&first), [5, 2, 0, 3]);
        assert!((first[2].probability - 0.9).abs() < 0.05, "{first:?}");
        for _ in 0..200 {
            forecasts.foresee(0, 1, chances.clone(), 0.6);
            forecasts.settle(0, 1, &[3, 1]);
        }
        let last = forecasts.foresee(0, 1, chances, 0.6);
        assert_eq!(experts(&last), [3, 1]);
        let foreseen = forecasts.foreseen();
        // two are wanted each time; 3 is the fourth of the ranking, 1 the fifth
        assert_eq!(foreseen.recall, Recall { picks: 400, at_k: 0, at_2k: 200 });
        assert_eq!(foreseen.calibration.iter().map(|bin| bin.picked).sum::<u64>(), 400);
        assert_eq!(foreseen.calibration.iter().map(|bin| bin.predictions).sum::<u64>(), 1000, "0 is no forecast");
    }

    #[test]
    fn a_forecast_is_of_one_pass_of_one_layer() {
        let mut forecasts = Forecasts::default();
        forecasts.foresee(3, 2, vec![0.9, 0.1], 0.6);
        forecasts.foresee(4, 2, vec![0.9, 0.1], 0.6);
        forecasts.settle(2, 2, &[0]);
        assert_eq!(forecasts.recall.picks, 0);
        forecasts.settle(3, 2, &[0, 0]);
        assert_eq!(forecasts.recall, Recall { picks: 1, at_k: 1, at_2k: 1 });
        forecasts.settle(3, 2, &[0, 1]);
        // of another batch
        forecasts.settle(4, 1, &[0]);
        forecasts.settle(4, 2, &[0]);
        assert_eq!(forecasts.recall.picks, 1);
        // the second takes the place of the first
        forecasts.foresee(3, 1, vec![0.9, 0.1], 0.6);
        forecasts.foresee(3, 1, vec![0.1, 0.9], 0.6);
        forecasts.settle(3, 1, &[1]);
        assert_eq!(forecasts.recall, Recall { picks: 2, at_k: 2, at_2k: 2 });
    }

    #[test]
    fn more_tokens_want_more_experts() {
        let mut sample = Sample::default();
        assert!(sample.chances(100).is_empty());
        for i in 0..4 {
            let mut scores = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, f32::NEG_INFINITY];
            scores[i] = 1.5;
            sample.push(&scores, 2);
        }
        let [few, many] = [4, 400].map(|rows| sample.chances(rows));
        assert!(few.iter().chain(&many).all(|chance| (0.0..=1.0).contains(chance)), "{few:?} {many:?}");
        assert!((0..7).all(|e| many[e] > few[e] || many[e] == 1.0), "{few:?} {many:?}");
        assert!(few[0] > few[5] && few[6] > few[5] && few[5] > few[4], "{few:?}");
        assert_eq!((few[7], many[7]), (0.0, 0.0), "no token can pick it");
        sample.begin();
        assert!(sample.chances(1).is_empty());
    }

    #[test]
    fn as_many_tokens_as_were_looked_at_are_these() {
        let mut sample = Sample::default();
        let scores = [3.0, 2.0, 1.9, 0.0];
        sample.push(&scores, 1);
        let one = sample.chances(1);
        assert!((one[0] - 0.5).abs() < 1e-6, "the least that would be picked is as likely as not: {one:?}");
        sample.push(&scores, 1);
        let two = sample.chances(2);
        assert!(one.iter().zip(&two).all(|(one, two)| (two - (1.0 - (1.0 - one) * (1.0 - one))).abs() < 1e-6));
    }

    #[test]
    fn equal_scores_are_no_trouble() {
        let mut sample = Sample::default();
        sample.push(&[1.0; 8], 2);
        sample.push(&[f32::NEG_INFINITY; 8], 2);
        sample.push(&[1.0; 2], 2);
        let chances = sample.chances(50);
        assert!(chances.iter().all(|chance| (0.0..=1.0).contains(chance)), "{chances:?}");
        assert_eq!(Forecasts::default().foresee(0, 50, chances, 0.6).len(), 8);
    }
}
