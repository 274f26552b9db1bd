//! How likely drafted tokens are to stand, learned from those that were verified.

use serde::Serialize;

use super::fading::Fading;

/// Confidences are cut into so many bins, evenly from 0 to 1; one bin more has the tokens of drafters that tell none.
const BINS: usize = 8;
/// What is not known yet is taken for what is known of more: so many tokens of a position and bin outweigh it.
const PRIOR: f64 = 4.0;
/// Before anything is known: drafts are worth a try.
const HOPE: f64 = 0.7;
/// So much stays of what was seen when one token more is.
const KEPT: f64 = 0.975;

/// The tokens that were drafted at one place of a draft.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Position {
    /// Verified, with all those before it standing.
    pub verified: u64,
    /// Of these, those that stood.
    pub stood: u64,
    /// The sum over them of how likely they were said to be to stand.
    pub promised: f64,
}

impl Position {
    pub(super) fn add(&mut self, other: &Self) {
        self.verified += other.verified;
        self.stood += other.stood;
        self.promised += other.promised;
    }
}

/// How likely a token is to stand when all those before it do, by its place in the draft and the drafter's confidence.
#[derive(Debug, Clone)]
pub(super) struct Acceptance {
    /// 1 for a token that stood, 0 for one that did not.
    all: Fading,
    places: Vec<Fading>,
    /// Place by place.
    bins: Vec<[Fading; BINS + 1]>,
    run: Vec<Position>,
}

impl Acceptance {
    /// For drafts of at most `n_max` tokens.
    pub(super) fn new(n_max: usize) -> Self {
        Self {
            all: Fading::default(),
            places: vec![Fading::default(); n_max],
            bins: vec![[Fading::default(); BINS + 1]; n_max],
            run: vec![Position::default(); n_max],
        }
    }

    /// How likely the token at `place` is to stand. `None`: the drafter tells no confidence.
    pub(super) fn of(&self, place: usize, confidence: Option<f32>) -> f64 {
        let of_place = self.places[place].mean(self.all.mean(HOPE, PRIOR), PRIOR);
        self.bins[place][bin(confidence)].mean(of_place, PRIOR)
    }

    /// Of a draft whose tokens were verified in order, `stood` stood, and the one after them, if there is one, did not.
    pub(super) fn learn(&mut self, confidences: &[Option<f32>], stood: usize) {
        for (place, &confidence) in confidences.iter().enumerate().take(stood + 1) {
            let stands = place < stood;
            let promised = self.of(place, confidence);
            let run = &mut self.run[place];
            run.verified += 1;
            run.stood += u64::from(stands);
            run.promised += promised;
            for known in [&mut self.all, &mut self.places[place], &mut self.bins[place][bin(confidence)]] {
                known.learn(f64::from(u8::from(stands)), KEPT);
            }
        }
    }

    /// What became of the tokens of the whole run, by their place.
    pub(super) fn run(&self) -> &[Position] {
        &self.run
    }
}

fn bin(confidence: Option<f32>) -> usize {
    confidence.filter(|c| c.is_finite()).map_or(BINS, |c| ((c * BINS as f32) as usize).min(BINS - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_how_often_tokens_stand_by_place_and_confidence() {
        let mut a = Acceptance::new(2);
        assert!((a.of(0, None) - HOPE).abs() < 1e-9);
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..4000 {
            let confident = rng.bool();
            let c = Some(if confident { 0.9 } else { 0.2 });
            let first = rng.f64() < if confident { 0.8 } else { 0.1 };
            let second = first && rng.f64() < 0.5;
            a.learn(&[c, c], usize::from(first) + usize::from(second));
        }
        let near = |found: f64, truth: f64| (found - truth).abs() < 0.12;
        assert!(near(a.of(0, Some(0.9)), 0.8) && near(a.of(0, Some(0.2)), 0.1), "{a:?}");
        assert!(near(a.of(1, Some(0.9)), 0.5), "{a:?}");
        let [first, second] = a.run() else { unreachable!() };
        assert_eq!((first.verified, second.verified), (4000, first.stood));
        assert!((first.promised - first.stood as f64).abs() < 0.05 * 4000.0, "{first:?}");
    }

    #[test]
    fn it_forgets() {
        let mut a = Acceptance::new(1);
        (0..1000).for_each(|_| a.learn(&[None], 1));
        assert!(a.of(0, None) > 0.95);
        (0..200).for_each(|_| a.learn(&[None], 0));
        assert!(a.of(0, None) < 0.1);
    }

    #[test]
    fn confidences_that_are_none_are_no_trouble() {
        let a = Acceptance::new(1);
        for c in [f32::NAN, f32::INFINITY, -1.0, 2.0] {
            assert!((0.0..=1.0).contains(&a.of(0, Some(c))), "{c}");
        }
    }
}
