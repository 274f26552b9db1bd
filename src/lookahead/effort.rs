//! How much is read ahead, by how much is waited for.
//!
//! A guess that comes true saves a wait, one that does not has read in vain, which takes memory bandwidth and a slot from
//! others. So the more of the time is waited, up to a quarter of it, the less likely may be what is read; and where guesses
//! come true that are still being read when they are needed, the device takes longer than a layer, and one layer ahead is
//! too late. Where about half of the time is waited, though, the device is the limit, and what was read in vain is waited
//! for: towards there only what is likely is read.

use std::time::{Duration, Instant};

/// Where next to nothing is waited for, or the device is the limit, what is less likely to be picked is not worth a read
/// that may delay one that is needed.
pub const LEAST_PROBABILITY: f32 = 0.78;
/// So small a share of the time is not worth more bytes.
const SMALL: f32 = 0.03;
/// Where such a share of the time is waited, the device is the limit.
const LIMIT: f32 = 0.45;
/// So much less likely may be what is read, per share of the time by which the one that is waited is off these two.
const BOLDNESS: f32 = 0.75;
/// Between these shares of the time that is waited, two layers ahead may pay for the second router.
const WORTH_A_ROUTER: std::ops::Range<f32> = 0.1..LIMIT;
/// Once they are looked at, as long as it is between these.
const STILL_WORTH_IT: std::ops::Range<f32> = SMALL..0.6;
/// Of what was not in memory, such a share is on its way where the device takes longer than a layer.
const LATE: f32 = 0.25;
/// So much of what was before stays at each pass.
const STAYS: f32 = 0.875;
/// Layers to look ahead where one is too late. With more, what is predicted is too seldom right.
const FARTHER: usize = 2;

/// What the computation has waited for since the model was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// The time in which it did.
    pub waited: Duration,
    /// Experts that were being read when they were asked for.
    pub late: u64,
    /// Experts that were neither in memory nor being read.
    pub missed: u64,
}

/// What was waited for lately.
pub(super) struct Effort {
    fixed: Option<usize>,
    depth: usize,
    last: Option<(Instant, Waits)>,
    /// Of the time, the share that was waited.
    share: f32,
    /// What was late, and all that was not in memory: sums, of which [`STAYS`] stays at each pass.
    late: f32,
    absent: f32,
}

impl Effort {
    /// Looks so many layers ahead if it is `fixed`.
    pub(super) fn new(fixed: Option<usize>) -> Self {
        let depth = fixed.unwrap_or(super::DEFAULT_DEPTH);
        Self { fixed, depth, last: None, share: 0.0, late: 0.0, absent: 0.0 }
    }

    /// The most layers that it ever looks ahead.
    pub(super) fn most(&self) -> usize {
        self.fixed.unwrap_or(FARTHER)
    }

    /// How many layers to look ahead now.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// How likely something must be to be read.
    pub(super) fn least(&self) -> f32 {
        LEAST_PROBABILITY - BOLDNESS * (self.share - SMALL).min(LIMIT - self.share).max(0.0)
    }

    /// A pass begins `now`, when so much has been waited. The one before was one to learn from, or not.
    pub(super) fn pass(&mut self, now: Instant, waits: Waits, learn: bool) {
        let Some((then, before)) = self.last.replace((now, waits)).filter(|_| learn) else { return };
        let took = now.saturating_duration_since(then).as_secs_f32();
        if took <= 0.0 {
            return;
        }
        let share = (waits.waited.saturating_sub(before.waited).as_secs_f32() / took).min(1.0);
        self.share = self.share * STAYS + share * (1.0 - STAYS);
        let late = waits.late.saturating_sub(before.late) as f32;
        self.late = self.late * STAYS + late;
        self.absent = self.absent * STAYS + late + waits.missed.saturating_sub(before.missed) as f32;
        self.depth = self.fixed.unwrap_or_else(|| self.adapted());
    }

    fn adapted(&self) -> usize {
        let pays = match self.depth {
            // there they are late less often: that is no reason to go back
            FARTHER => STILL_WORTH_IT.contains(&self.share),
            _ => self.late > LATE * self.absent && WORTH_A_ROUTER.contains(&self.share),
        };
        if pays { FARTHER } else { super::DEFAULT_DEPTH }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Lookahead;
    use super::*;
    use crate::store::testing::index;

    /// Passes of 100 ms each, of which `waited` ms are waited, in which so many experts are late and so many missed.
    struct Clock {
        now: Instant,
        waits: Waits,
    }

    impl Clock {
        fn new() -> Self {
            Self { now: Instant::now(), waits: Waits::default() }
        }

        fn passes(&mut self, effort: &mut Effort, n: usize, waited: u64, [late, missed]: [u64; 2]) {
            for _ in 0..n {
                effort.pass(self.now, self.waits, true);
                self.now += Duration::from_millis(100);
                self.waits.waited += Duration::from_millis(waited);
                self.waits.late += late;
                self.waits.missed += missed;
            }
            effort.pass(self.now, self.waits, true);
        }
    }

    #[test]
    fn the_more_is_waited_the_less_likely_may_be_what_is_read() {
        let (mut effort, mut clock) = (Effort::new(None), Clock::new());
        assert_eq!((effort.least(), effort.depth()), (LEAST_PROBABILITY, 1));
        let mut before = 1.0;
        for waited in [2, 8, 14, 20] {
            clock.passes(&mut effort, 60, waited, [0, 10]);
            assert!(effort.least() < before, "{waited}: {}", effort.least());
            before = effort.least();
        }
        assert!(before < 0.7 && effort.depth() == 1, "nothing was late");
        for waited in [0, 50, 100] {
            clock.passes(&mut effort, 60, waited, [0, 10]);
            assert_eq!(effort.least(), LEAST_PROBABILITY, "{waited}");
        }
    }

    #[test]
    fn two_layers_ahead_are_looked_at_where_one_is_too_late() {
        let (mut effort, mut clock) = (Effort::new(None), Clock::new());
        clock.passes(&mut effort, 30, 3, [9, 10]);
        assert_eq!(effort.depth(), 1, "next to nothing is waited");
        clock.passes(&mut effort, 30, 30, [9, 10]);
        assert_eq!(effort.depth(), 2);
        clock.passes(&mut effort, 100, 15, [1, 10]);
        assert_eq!(effort.depth(), 2, "that is what it is for");
        clock.passes(&mut effort, 30, 2, [1, 10]);
        assert_eq!(effort.depth(), 1);
        clock.passes(&mut effort, 30, 30, [9, 10]);
        clock.passes(&mut effort, 30, 80, [9, 10]);
        assert_eq!(effort.depth(), 1, "the device is the limit");
    }

    #[test]
    fn what_the_user_says_is_done() {
        for depth in [0, 1, 2, 5] {
            let (mut effort, mut clock) = (Effort::new(Some(depth)), Clock::new());
            clock.passes(&mut effort, 30, 50, [9, 10]);
            assert_eq!((effort.depth(), effort.most()), (depth, depth));
        }
    }

    #[test]
    fn prompts_and_clocks_that_stand_still_teach_nothing() {
        let (mut effort, mut clock) = (Effort::new(None), Clock::new());
        clock.passes(&mut effort, 10, 2, [0, 10]);
        let least = effort.least();
        clock.waits.waited += Duration::from_secs(10);
        effort.pass(clock.now, clock.waits, true);
        clock.now += Duration::from_secs(10);
        clock.waits.waited += Duration::from_secs(10);
        effort.pass(clock.now, clock.waits, false);
        clock.passes(&mut effort, 1, 2, [0, 10]);
        assert_eq!((effort.least(), effort.depth()), (least, 1));
    }

    #[test]
    fn a_pass_is_one_however_many_tokens_its_last_layer_has() {
        let mut lookahead = Lookahead::new(&index(3, 8, 2, &[512; 3]), None, true, None, None).unwrap();
        let mut clock = Clock::new();
        // the rows of three layers, as of a prompt whose last token has an output, and of tokens
        for (rows, learned) in [([12, 12, 1], false), ([1; 3], false), ([1; 3], true), ([12, 12, 1], true)] {
            for (layer, rows) in rows.into_iter().enumerate() {
                let mut begins = false;
                lookahead.predict(3 * layer, &[0, 1].repeat(rows), rows, &[], || {
                    begins = true;
                    (clock.now, clock.waits)
                });
                assert_eq!(begins, layer == 0);
                assert_eq!(lookahead.effort.share > 0.0, learned);
                clock.now += Duration::from_millis(10);
                clock.waits.waited += Duration::from_millis(5);
            }
        }
        assert!((lookahead.effort.share - 0.5 * (1.0 - STAYS)).abs() < 1e-6, "{}", lookahead.effort.share);
        assert_eq!(lookahead.effort(), (lookahead.effort.least(), 1));
    }
}
