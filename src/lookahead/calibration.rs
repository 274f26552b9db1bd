//! From a score to a probability, learned from what the routers then picked.

use serde::{Deserialize, Serialize};

/// Margins are cut into so many bins of [`WIDTH`], the last one open above.
const BINS: usize = 64;
/// The margin at which the first bin begins. What is below it is as good as never picked.
const LEAST: f32 = -1.0;
const WIDTH: f32 = 1.0 / 32.0;
/// Before anything is known, the logarithm of the odds grows by so much per margin.
const SLOPE: f32 = 4.0;
/// The largest logarithm of odds that is told from others.
const FARTHEST: f32 = 32.0;
/// A bin begins as if it had seen so many.
const PRIOR: f32 = 4.0;
/// A bin that has seen so many forgets half of them: what holds now counts.
const FULL: f32 = 4096.0;

/// One probability per bin.
pub type Probabilities = Vec<f32>;

/// The predictions of a run that had about the same score: how likely they were said to be, and what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Reliability {
    /// They lie at least so many standard deviations of the token's scores above the least one that would be picked.
    pub margin: f32,
    /// How many: one per token and expert.
    pub predictions: u64,
    /// The mean of the probabilities that they were given when they were made.
    pub promised: f64,
    /// How many were picked.
    pub picked: u64,
}

/// By how much the probabilities were off, on average over all predictions. `None` without any.
pub fn expected_error<'a>(bins: impl Iterator<Item = &'a Reliability>) -> Option<f64> {
    let (mut n, mut off) = (0, 0.0);
    for bin in bins {
        n += bin.predictions;
        off += (bin.promised * bin.predictions as f64 - bin.picked as f64).abs();
    }
    (n > 0).then(|| off / n as f64)
}

/// How often experts were picked whose score had a certain margin over the least one that would be picked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Calibration {
    picked: Vec<f32>,
    seen: Vec<f32>,
    /// Of the whole run, and of no other. What was promised is a sum here.
    #[serde(skip, default = "no_predictions")]
    run: Vec<Reliability>,
}

impl Default for Calibration {
    fn default() -> Self {
        let margin = |bin: usize| LEAST + (bin as f32 + 0.5) * WIDTH;
        let prior = |bin| PRIOR / (1.0 + (-SLOPE * margin(bin)).exp());
        Self { picked: (0..BINS).map(prior).collect(), seen: vec![PRIOR; BINS], run: no_predictions() }
    }
}

/// A run begins.
fn no_predictions() -> Vec<Reliability> {
    (0..BINS).map(|bin| Reliability { margin: LEAST + bin as f32 * WIDTH, ..Default::default() }).collect()
}

impl Calibration {
    /// The bin of `margin`, in standard deviations of the scores; `None` below the first one.
    pub fn bin(margin: f32) -> Option<u8> {
        (margin >= LEAST).then(|| (((margin - LEAST) / WIDTH) as usize).min(BINS - 1) as u8)
    }

    /// The bin that believes `probability` before it has learned anything; `None` when that is as good as 0.
    pub fn bin_of(probability: f32) -> Option<u8> {
        Self::bin((probability / (1.0 - probability)).ln() / SLOPE)
    }

    /// The logarithm of how likely an expert of this margin is not to be picked, before anything is known.
    pub fn ln_missed(margin: f32) -> f32 {
        -(SLOPE * margin).min(FARTHEST).exp().ln_1p()
    }

    /// Whether this can have been learned: what is read from a file must be asked.
    pub fn is_sound(&self) -> bool {
        let mut bins = self.picked.iter().zip(&self.seen);
        [&self.picked, &self.seen].iter().all(|sums| sums.len() == BINS)
            && bins.all(|(p, s)| (PRIOR..=FULL).contains(s) && (0.0..=*s).contains(p))
    }

    /// The share of each bin's experts that was picked.
    pub fn probabilities(&self) -> Probabilities {
        self.picked.iter().zip(&self.seen).map(|(picked, seen)| picked / seen).collect()
    }

    /// Every bin that had predictions, with what became of them in the whole run.
    pub fn reliability(&self) -> Vec<Reliability> {
        let mean = |bin: &Reliability| Reliability { promised: bin.promised / bin.predictions as f64, ..*bin };
        self.run.iter().filter(|bin| bin.predictions > 0).map(mean).collect()
    }

    /// An expert of `bin`, which was `promised` to be so likely, was picked, or not.
    pub fn learn(&mut self, bin: u8, promised: f32, picked: bool) {
        let bin = usize::from(bin);
        self.run[bin].predictions += 1;
        self.run[bin].promised += f64::from(promised);
        self.run[bin].picked += u64::from(picked);
        self.picked[bin] += f32::from(u8::from(picked));
        self.seen[bin] += 1.0;
        if self.seen[bin] > FULL {
            self.picked[bin] /= 2.0;
            self.seen[bin] /= 2.0;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(c: &Calibration, bin: u8) -> f32 {
        c.probabilities()[usize::from(bin)]
    }

    #[test]
    fn a_bin_learns_its_share_and_unlearns_it() {
        let mut c = Calibration::default();
        let bin = Calibration::bin(0.3).unwrap();
        assert!(of(&c, bin) > 0.7, "what is above is likely, before anything is known");
        for i in 0..1000 {
            c.learn(bin, 0.5, i % 4 == 0);
            assert!(c.is_sound());
        }
        assert!((of(&c, bin) - 0.25).abs() < 0.01);
        for _ in 0..20_000 {
            c.learn(bin, 0.5, true);
        }
        assert!(of(&c, bin) > 0.95 && c.is_sound());
        assert!(of(&c, Calibration::bin(-0.9).unwrap()) < 0.1, "other bins are left alone");
    }

    #[test]
    fn a_run_is_remembered_though_bins_forget() {
        let mut c = Calibration::default();
        assert_eq!((c.reliability(), expected_error(c.reliability().iter())), (Vec::new(), None));
        let [low, high] = [-0.5, 0.5].map(|margin| Calibration::bin(margin).unwrap());
        for i in 0..20_000 {
            c.learn(low, 0.25, i % 4 == 0);
            c.learn(high, if i % 2 == 0 { 0.5 } else { 1.0 }, i % 2 == 0);
        }
        let expected = [(-0.5, 0.25, 5000), (0.5, 0.75, 10_000)].map(|(margin, promised, picked)| Reliability {
            margin,
            predictions: 20_000,
            promised,
            picked,
        });
        assert_eq!(c.reliability(), expected);
        // right in the one half, off by a quarter in the other
        assert_eq!(expected_error(c.reliability().iter()), Some(0.125));
    }

    #[test]
    fn every_margin_has_its_bin() {
        assert_eq!(Calibration::bin(-1.01), None);
        assert_eq!(Calibration::bin(f32::NEG_INFINITY), None);
        assert_eq!(Calibration::bin(f32::NAN), None);
        assert_eq!(Calibration::bin(-1.0), Some(0));
        assert_eq!(Calibration::bin(0.0), Some(BINS as u8 / 2));
        assert_eq!(Calibration::bin(1e30), Some(BINS as u8 - 1));
    }

    #[test]
    fn a_probability_goes_to_the_bin_that_begins_with_it() {
        let c = Calibration::default();
        for p in [0.02, 0.2, 0.5, 0.61, 0.9, 0.99] {
            let said = of(&c, Calibration::bin_of(p).unwrap());
            assert!((said - p).abs() < 0.07, "{said} for {p}");
            let margin = (p / (1.0 - p)).ln() / SLOPE;
            assert!((Calibration::ln_missed(margin).exp() - (1.0 - p)).abs() < 1e-5);
        }
        assert_eq!((Calibration::bin_of(0.0), Calibration::bin_of(f32::NAN)), (None, None));
        assert_eq!(Calibration::bin_of(1.0), Some(BINS as u8 - 1));
        assert!(Calibration::ln_missed(1e30).is_finite() && Calibration::ln_missed(-1e30) == 0.0);
    }
}
