//! A mean in which what is old fades.

/// Of values that were learned, the last ones above all.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fading {
    sum: f64,
    n: f64,
}

impl Fading {
    /// One value more, after which so much stays of those before.
    pub(super) fn learn(&mut self, value: f64, kept: f64) {
        self.fade(kept);
        self.sum += value;
        self.n += 1.0;
    }

    /// So much stays.
    pub(super) fn fade(&mut self, kept: f64) {
        self.sum *= kept;
        self.n *= kept;
    }

    /// How many values are remembered.
    pub(super) fn seen(&self) -> f64 {
        self.n
    }

    /// The mean. `None` before a value was learned.
    pub(super) fn known(&self) -> Option<f64> {
        (self.n > 0.0).then(|| self.sum / self.n)
    }

    /// The mean, with `prior`, what is known otherwise, as if it had been learned so many `times`.
    pub(super) fn mean(&self, prior: f64, times: f64) -> f64 {
        (self.sum + times * prior) / (self.n + times)
    }
}
