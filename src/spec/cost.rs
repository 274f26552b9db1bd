//! What a step takes, by how many tokens it verifies or drafts, as it is now: time, or bytes that are read.

use super::fading::Fading;

/// So much stays of what was measured when one step more of the width is,
const KEPT: f64 = 0.95;
/// and when one of another width is: what is old is no better than the line through what is new.
const KEPT_BY_OTHERS: f64 = 0.995;
/// So much stays of how fast steps are when there is one more, of whatever width.
const LEVEL_KEPT: f64 = 0.6;
/// A step of so many times the width's time was interrupted by something else.
pub(super) const INTERRUPTED: f64 = 4.0;
/// A width that was measured less often than this is taken for what the line through all of them says.
const PRIOR: f64 = 4.0;
/// That line is worth so many steps of the width when there were many of others,
const LINE: f64 = 6.0;
/// and half of that when there were so many.
const LINE_AT: f64 = 4.0;
/// The more tokens a step has, the less one more takes: it shares experts with all of them. So costs are a line over this power
/// of the width.
const BEND: f64 = 0.85;
/// A width that was not measured takes at least so much of what the others take.
const LEAST: f64 = 0.1;

/// Sums over steps, in which the old ones fade.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    n: f64,
    x: f64,
    xx: f64,
    y: f64,
    xy: f64,
}

impl Sums {
    fn fade(&mut self, kept: f64) {
        for sum in [&mut self.n, &mut self.x, &mut self.xx, &mut self.y, &mut self.xy] {
            *sum *= kept;
        }
    }

    fn learn(&mut self, x: f64, y: f64) {
        self.n += 1.0;
        self.x += x;
        self.xx += x * x;
        self.y += y;
        self.xy += x * y;
    }
}

/// Before it was measured: by which part steps of one width differ, the standard deviation.
const SCATTER: f64 = 0.1;
/// It counts as so many steps.
const SCATTER_PRIOR: f64 = 3.0;

/// Nanoseconds or bytes by width: how many steps take at present, times what is particular to the width.
///
/// What makes steps of all widths faster or slower, such as a cache that fills, is thus learned from each of them, and widths
/// are compared as if they had been measured at the same time.
#[derive(Debug, Clone)]
pub(super) struct Cost {
    /// Those that are 1 in all the rest.
    level: Fading,
    /// Squares of how far steps were from what was expected, as a part of that.
    scatter: Fading,
    line: Sums,
    widths: Vec<Fading>,
    /// What a token more takes before that was measured, as a part of what none takes.
    rise: f64,
}

impl Cost {
    /// Of widths from 0 to `widest`.
    pub(super) fn new(widest: usize, rise: f64) -> Self {
        let widths = vec![Fading::default(); widest + 1];
        Self { level: Fading::default(), scatter: Fading::default(), line: Sums::default(), widths, rise }
    }

    /// A step of this width took `ns`.
    pub(super) fn learn(&mut self, width: usize, ns: f64) {
        let expected = self.relative(width);
        let level = self.level.known().unwrap_or(ns / expected).max(1.0);
        let relative = (ns / level).min(INTERRUPTED * expected);
        self.scatters(width, relative / expected);
        self.level.learn(level * relative / expected, LEVEL_KEPT);
        self.remember(width, &[relative]);
    }

    /// One step took `values[width]` for each of these widths, from 0: what one takes compared with another one is learned of
    /// the same step.
    pub(super) fn learn_up_to(&mut self, values: &[f64]) {
        let expected: Vec<f64> = (0..values.len()).map(|width| self.relative(width)).collect();
        let level = values.iter().sum::<f64>() / expected.iter().sum::<f64>();
        self.level.learn(level, LEVEL_KEPT);
        if level <= 0.0 || values.len() < 2 {
            return self.remember(0, &[]);
        }
        let relative: Vec<f64> = values.iter().map(|value| value / level).collect();
        for (width, (relative, expected)) in relative.iter().zip(expected).enumerate() {
            self.scatters(width, relative / expected);
        }
        self.remember(0, &relative);
    }

    /// A step of this width took so many `times` what was expected.
    fn scatters(&mut self, width: usize, times: f64) {
        if self.seen(width) >= 1.0 {
            self.scatter.learn((times - 1.0).powi(2), KEPT);
        }
    }

    /// All widths take so many `times` what they took.
    pub(super) fn scale(&mut self, times: f64) {
        if let Some(level) = self.level.known() {
            self.level.learn(level * times, LEVEL_KEPT);
        }
    }

    /// What the widths from `first` on took in one step, compared with the level.
    fn remember(&mut self, first: usize, relative: &[f64]) {
        self.line.fade(KEPT);
        for (width, measured) in self.widths.iter_mut().enumerate() {
            match width.checked_sub(first).and_then(|i| relative.get(i)) {
                Some(&relative) => {
                    self.line.learn(bent(width), relative);
                    measured.learn(relative, KEPT);
                }
                None => measured.fade(KEPT_BY_OTHERS),
            }
        }
    }

    /// What a step of this width takes. `None` before any was measured.
    pub(super) fn of(&self, width: usize) -> Option<f64> {
        self.level.known().map(|level| level * self.relative(width))
    }

    fn relative(&self, width: usize) -> f64 {
        self.widths[width].mean(self.on_line(bent(width)), PRIOR)
    }

    /// By which part what a step of this width takes may differ from what steps of another one take, compared with what is
    /// expected of both: the standard deviation.
    pub(super) fn doubt(&self, width: usize, other: usize) -> f64 {
        let scatter = self.scatter.mean(SCATTER * SCATTER, SCATTER_PRIOR);
        let of = |width: usize| {
            let others = (self.line.n - self.seen(width)).max(0.0);
            1.0 / (1.0 + self.seen(width) + LINE * others / (others + LINE_AT))
        };
        (scatter * (of(width) + of(other))).sqrt()
    }

    /// How many steps of this width are remembered.
    pub(super) fn seen(&self, width: usize) -> f64 {
        self.widths[width].seen()
    }

    /// The least squares' line, drawn towards the rise that is assumed before much is known.
    fn on_line(&self, x: f64) -> f64 {
        let Sums { n, x: sx, xx, y, xy } = self.line;
        if n <= 0.0 {
            return 1.0 + self.rise * x;
        }
        let (mean_x, mean_y) = (sx / n, y / n);
        let (varied, together) = (xx - n * mean_x * mean_x, xy - n * mean_x * mean_y);
        // where only one width was seen, what width 0 takes and the rise explain it
        let assumed = mean_y * self.rise / (1.0 + self.rise * mean_x);
        let slope = (together + PRIOR * assumed) / (varied + PRIOR);
        (mean_y + slope * (x - mean_x)).max(LEAST)
    }
}

fn bent(width: usize) -> f64 {
    (width as f64).powf(BEND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_width_that_was_measured_is_what_was_measured() {
        let mut cost = Cost::new(4, 0.3);
        assert_eq!(cost.of(0), None);
        for _ in 0..200 {
            cost.learn(0, 100.0);
            cost.learn(3, 180.0);
        }
        let near = |found: Option<f64>, truth: f64| found.is_some_and(|found| (found - truth).abs() < 0.05 * truth);
        assert!(near(cost.of(0), 100.0) && near(cost.of(3), 180.0), "{cost:?}");
        // between and beyond what was measured: the line
        assert!(near(cost.of(1), 126.7) && near(cost.of(4), 206.7), "{:?} {:?}", cost.of(1), cost.of(4));
        // it follows what changes
        (0..60).for_each(|_| cost.learn(3, 300.0));
        assert!(near(cost.of(3), 300.0), "{:?}", cost.of(3));
    }

    #[test]
    fn before_others_were_measured_they_cost_what_is_assumed() {
        let mut cost = Cost::new(4, 0.5);
        (0..50).for_each(|_| cost.learn(0, 100.0));
        assert_eq!(cost.of(0).map(f64::round), Some(100.0));
        assert_eq!(cost.of(1).map(f64::round), Some(150.0));
        assert_eq!(cost.of(2).map(f64::round), Some(190.0));
    }
}
