//! Learning from a verification, put off until it is known which of its rows stand.

use super::Keep;

/// What a layer picked in a verification.
#[derive(Debug)]
pub(super) struct PutOff {
    picks: Vec<i32>,
    /// As [`Keep::observe`] takes them.
    scores: Vec<f32>,
    rows: usize,
    /// Rows that stand: all, as long as nothing else is known.
    stood: usize,
    judged: bool,
}

impl PutOff {
    pub(super) fn new(picks: &[i32], scores: &[f32], rows: usize) -> Self {
        Self { picks: picks.to_vec(), scores: scores.to_vec(), rows, stood: rows, judged: false }
    }

    /// Of the rows so many stand. The first verdict counts.
    pub(super) fn judge(&mut self, rows: usize) {
        if !std::mem::replace(&mut self.judged, true) {
            self.stood = rows.min(self.rows);
        }
    }

    /// Whether there was a verdict.
    pub(super) fn is_judged(&self) -> bool {
        self.judged
    }

    /// Shows `keep` what layer `at` picked for the rows that stand.
    pub(super) fn observe(&self, keep: &mut Keep, at: usize) {
        let n_expert = keep.values(at).len();
        let n_used = self.picks.len() / self.rows.max(1);
        let unscored = self.rows.saturating_sub(self.scores.len() / n_expert.max(1));
        let picks = self.picks.get(..self.stood * n_used).unwrap_or(&[]);
        let scores = self.scores.get(..self.stood.saturating_sub(unscored) * n_expert).unwrap_or(&[]);
        keep.observe(at, self.stood, picks, scores);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::super::Lookahead;
    use super::*;
    use crate::store::testing::index;

    fn lookahead() -> Lookahead {
        Lookahead::new(&index(1, 8, 2, &[512; 3]), Some(1), true, None, None).unwrap()
    }

    #[test]
    fn a_verification_teaches_when_its_layer_is_computed_again() {
        // rows 1 and 2 are drafts
        let (verified, next) = ([0, 1, 2, 3, 4, 5], [6, 7]);
        for (verdict, stood) in [(Some(1), 1), (Some(2), 2), (Some(3), 3), (Some(9), 3), (None, 3)] {
            let (mut it, mut twin) = (lookahead(), lookahead());
            for _ in 0..5 {
                let before = it.values(0).unwrap().to_vec();
                it.learn(0, &verified, 3, &[], true);
                assert_eq!(it.values(0).unwrap(), before, "nobody knows yet what stands");
                if let Some(rows) = verdict {
                    it.judged(rows);
                    it.judged(1);
                }
                it.learn(0, &next, 1, &[], false);
                twin.learn(0, &verified[..2 * stood], stood, &[], false);
                twin.learn(0, &next, 1, &[], false);
                assert_eq!(it.values(0), twin.values(0), "{verdict:?}");
            }
        }
    }

    #[test]
    fn what_is_judged_is_learned_before_it_is_saved() {
        let (mut it, mut twin) = (lookahead(), lookahead());
        it.learn(0, &[0, 1, 2, 3], 2, &[], true);
        it.save_profile().unwrap();
        assert_eq!(it.values(0).unwrap(), [0.0; 8], "the verdict is yet to come");
        it.judged(1);
        it.save_profile().unwrap();
        twin.learn(0, &[0, 1], 1, &[], false);
        assert_eq!(it.values(0), twin.values(0));
    }

    proptest! {
        /// Each step is a verification of so many rows, of which so many stand, and the last so many have scores.
        #[test]
        fn what_is_learned_is_what_the_rows_that_stand_teach(
            steps in proptest::collection::vec((1..6usize, 1..8usize, 0..6usize, any::<bool>()), 1..40),
            seed: u64,
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut keep, mut twin) = (Keep::new(&[16]), Keep::new(&[16]));
            for (rows, stood, unscored, judged) in steps {
                let picks: Vec<i32> = (0..2 * rows).map(|_| random.i32(0..16)).collect();
                let scored = unscored.min(rows)..rows;
                let scores: Vec<f32> = scored.clone().flat_map(|_| [0; 16]).map(|_| random.f32()).collect();
                let mut put_off = PutOff::new(&picks, &scores, rows);
                if judged {
                    put_off.judge(stood);
                    put_off.judge(1);
                }
                put_off.observe(&mut keep, 0);
                let stood = if judged { stood.min(rows) } else { rows };
                let scores = &scores[..(scored.start..stood).len() * 16];
                twin.observe(0, stood, &picks[..2 * stood], scores);
                prop_assert_eq!(keep.values(0), twin.values(0));
            }
        }
    }
}
