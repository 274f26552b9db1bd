//! From a score to a probability, learned from what the routers then picked.

use serde::{Deserialize, Serialize};

/// Margins are cut into so many bins of [`WIDTH`], the last one open above.
const BINS: usize = 24;
/// The margin at which the first bin begins. What is below it is as good as never picked.
const LEAST: f32 = -1.0;
const WIDTH: f32 = 0.125;
/// A bin begins as if it had seen so many.
const PRIOR: f32 = 4.0;
/// A bin that has seen so many forgets half of them: what holds now counts.
const FULL: f32 = 4096.0;

/// How often experts were picked whose score had a certain margin over the least one that would be picked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Calibration {
    picked: [f32; BINS],
    seen: [f32; BINS],
}

impl Default for Calibration {
    fn default() -> Self {
        let margin = |bin: usize| LEAST + (bin as f32 + 0.5) * WIDTH;
        let prior = |bin| PRIOR / (1.0 + (-4.0 * margin(bin)).exp());
        Self { picked: std::array::from_fn(prior), seen: [PRIOR; BINS] }
    }
}

impl Calibration {
    /// The bin of `margin`, in standard deviations of the scores; `None` below the first one.
    pub fn bin(margin: f32) -> Option<u8> {
        (margin >= LEAST).then(|| (((margin - LEAST) / WIDTH) as usize).min(BINS - 1) as u8)
    }

    /// Whether this can have been learned: what is read from a file must be asked.
    pub fn is_sound(&self) -> bool {
        self.picked.iter().zip(&self.seen).all(|(p, s)| (PRIOR..=FULL).contains(s) && (0.0..=*s).contains(p))
    }

    /// The share of a bin's experts that was picked.
    pub fn probability(&self, bin: u8) -> f32 {
        let bin = usize::from(bin);
        self.picked[bin] / self.seen[bin]
    }

    /// Of every bin, see [`Calibration::probability`].
    pub fn probabilities(&self) -> Vec<f32> {
        (0..BINS as u8).map(|bin| self.probability(bin)).collect()
    }

    /// An expert of `bin` was picked, or not.
    pub fn learn(&mut self, bin: u8, picked: bool) {
        let bin = usize::from(bin);
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

    #[test]
    fn a_bin_learns_its_share_and_unlearns_it() {
        let mut c = Calibration::default();
        let bin = Calibration::bin(0.3).unwrap();
        assert!(c.probability(bin) > 0.7, "what is above is likely, before anything is known");
        for i in 0..1000 {
            c.learn(bin, i % 4 == 0);
            assert!(c.is_sound());
        }
        assert!((c.probability(bin) - 0.25).abs() < 0.01);
        for _ in 0..20_000 {
            c.learn(bin, true);
        }
        assert!(c.probability(bin) > 0.95 && c.is_sound());
        assert!(c.probability(Calibration::bin(-0.9).unwrap()) < 0.1, "other bins are left alone");
    }

    #[test]
    fn every_margin_has_its_bin() {
        assert_eq!(Calibration::bin(-1.01), None);
        assert_eq!(Calibration::bin(f32::NEG_INFINITY), None);
        assert_eq!(Calibration::bin(f32::NAN), None);
        assert_eq!(Calibration::bin(-1.0), Some(0));
        assert_eq!(Calibration::bin(0.0), Some(8));
        assert_eq!(Calibration::bin(1e30), Some(BINS as u8 - 1));
    }
}
