//! What a step takes, apart: what reading takes, by the bytes, and the rest.
//!
//! From one step to the next the bytes differ most, by what the tokens happen to want; and a step tells how many of them fewer
//! tokens would have wanted. So widths are compared by bytes of the same steps, and the rest scatters less.

use super::cost::{Cost, INTERRUPTED};
use super::fading::Fading;

/// So much stays of what was measured when one step more is,
const KEPT: f64 = 0.95;
/// and of what a byte takes: that is the device's, whatever is verified.
const PRICE_KEPT: f64 = 0.98;
/// What steps of a width usually take is known as long as so much stays of the last one.
const RECENT: f64 = 0.5;
/// Before it was measured: what one token more reads, as a part of what none reads. Tokens share some experts.
const RISE: f64 = 1.0;
/// That bytes take no time is believed as if so many steps had told it,
const PRIOR: f64 = 0.5;
/// whose bytes differ by this part of what is usual.
const VARIED: f64 = 0.1;
/// At least this part of a step is no reading.
const LEAST: f64 = 0.1;

/// Nanoseconds by width.
#[derive(Debug, Clone)]
pub(super) struct StepCost {
    /// What is not for the bytes.
    rest: Cost,
    bytes: Cost,
    /// What is usual by width: bytes and nanoseconds.
    usual: Vec<[Fading; 2]>,
    /// The sum over steps of the squares of how far their bytes are from what is usual, as a part of it,
    varied: f64,
    /// and the sum of these squares times nanoseconds per byte more.
    priced: f64,
}

impl StepCost {
    /// Of widths from 0 to `widest`. `rise`: as in [`Cost::new`].
    pub(super) fn new(widest: usize, rise: f64) -> Self {
        Self {
            rest: Cost::new(widest, rise),
            bytes: Cost::new(widest, RISE),
            usual: vec![<[Fading; 2]>::default(); widest + 1],
            varied: 0.0,
            priced: 0.0,
        }
    }

    /// A step of this width took `ns`. `reads`: the bytes that it has read for its first row, its first two, and so on to all;
    /// `None` where that is not known.
    pub(super) fn learn(&mut self, width: usize, ns: f64, reads: Option<&[u64]>) {
        let Some(reads) = reads.filter(|reads| reads.len() == width + 1) else {
            // reading and the rest are faster or slower alike
            let rest = self.rest.of(width).unwrap_or(1.0).max(1.0);
            let part = rest / (rest + self.reading(width));
            self.bytes.scale(part * ns / rest);
            return self.rest.learn(width, part * ns);
        };
        let reads: Vec<f64> = reads.iter().map(|bytes| *bytes as f64).collect();
        self.learn_price(width, reads[width], ns);
        self.bytes.learn_up_to(&reads);
        self.rest.learn(width, (ns - self.price() * reads[width]).max(LEAST * ns));
    }

    /// What a step of this width takes. `None` before any was measured.
    pub(super) fn of(&self, width: usize) -> Option<f64> {
        Some(self.rest.of(width)? + self.reading(width))
    }

    /// As [`Cost::doubt`].
    pub(super) fn doubt(&self, width: usize, other: usize) -> f64 {
        let (rest, reading) = (self.rest.of(width).unwrap_or(0.0), self.reading(width));
        let doubt = (self.rest.doubt(width, other) * rest).hypot(self.bytes.doubt(width, other) * reading);
        doubt / (rest + reading).max(1.0)
    }

    /// How many steps of this width are remembered.
    pub(super) fn seen(&self, width: usize) -> f64 {
        self.rest.seen(width)
    }

    /// What reading takes in a step of this width.
    fn reading(&self, width: usize) -> f64 {
        self.price() * self.bytes.of(width).unwrap_or(0.0)
    }

    /// Nanoseconds per byte: the least squares' slope, drawn towards none.
    fn price(&self) -> f64 {
        self.priced / (self.varied + PRIOR * VARIED * VARIED)
    }

    fn learn_price(&mut self, width: usize, bytes: f64, ns: f64) {
        let [of_bytes, of_ns] = &self.usual[width];
        let ns = of_ns.known().map_or(ns, |usual_ns| ns.min(INTERRUPTED * usual_ns));
        let recent = of_bytes.seen() >= RECENT;
        if let (true, Some(usual_bytes), Some(usual_ns)) = (recent, of_bytes.known(), of_ns.known())
            && usual_bytes > 0.0
            && bytes != usual_bytes
        {
            let squared = (bytes / usual_bytes - 1.0).powi(2);
            // bytes take no less than no time and no more than all of it, whatever has held up this one step
            let slope = ((ns - usual_ns) / (bytes - usual_bytes)).clamp(0.0, usual_ns / usual_bytes);
            self.varied = PRICE_KEPT * self.varied + squared;
            self.priced = PRICE_KEPT * self.priced + squared * slope;
        }
        for (of, [of_bytes, of_ns]) in self.usual.iter_mut().enumerate() {
            if of == width {
                of_bytes.learn(bytes, KEPT);
                of_ns.learn(ns, KEPT);
            } else {
                of_bytes.fade(KEPT);
                of_ns.fade(KEPT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a step reads and takes: 5 us, 3 us more for a second row, and 2 ns per byte.
    fn step(rng: &mut fastrand::Rng, width: usize) -> (f64, Vec<u64>) {
        let all = 0.5 + rng.f64();
        let reads: Vec<u64> = [1e3 * all, 2.2e3 * all][..=width].iter().map(|bytes| *bytes as u64).collect();
        (5e3 + 3e3 * width as f64 + 2.0 * reads[width] as f64, reads)
    }

    /// Learns from so many steps, of one row and of two in turn, which take so many times as long.
    fn learn_some(cost: &mut StepCost, rng: &mut fastrand::Rng, steps: usize, times: f64) {
        for i in 0..steps {
            let (ns, reads) = step(rng, i % 2);
            cost.learn(i % 2, times * ns, Some(&reads));
        }
    }

    #[test]
    fn what_reading_takes_is_told_from_the_rest() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut cost = StepCost::new(1, 0.1);
        learn_some(&mut cost, &mut rng, 200, 1.0);
        let price = cost.price();
        assert!((price - 2.0).abs() < 0.2, "{price}");
        // by far nearer than the bytes are to each other
        let more = cost.of(1).zip(cost.of(0)).map_or(0.0, |(one, none)| one / none);
        let truth = (8e3 + 4.4e3) / (5e3 + 2e3);
        assert!((more / truth - 1.0).abs() < 0.08, "{more} {truth}");
    }

    #[test]
    fn a_step_tells_what_fewer_tokens_would_have_read() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut cost = StepCost::new(1, 0.1);
        for _ in 0..10 {
            let (ns, reads) = step(&mut rng, 1);
            cost.learn(1, ns, Some(&reads));
        }
        let less = cost.reading(0) / cost.reading(1);
        assert!((less - 1.0 / 2.2).abs() < 0.05, "{less}");
    }

    #[test]
    fn a_device_that_hangs_once_or_becomes_slower_misleads_for_some_steps_only() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut cost = StepCost::new(1, 0.1);
        let mut run = |cost: &mut StepCost, slower: f64| {
            learn_some(cost, &mut rng, 60, slower);
            cost.of(1).zip(cost.of(0)).map_or(0.0, |(one, none)| one / none)
        };
        let before = run(&mut cost, 1.0);
        for hangs in [[1e7, 2e3], [1e7, 1e1]] {
            cost.learn(0, hangs[0], Some(&[hangs[1] as u64]));
            let after = run(&mut cost, 1.0);
            assert!((after / before - 1.0).abs() < 0.1, "{before} {after}");
        }
        let slower = run(&mut cost, 3.0);
        assert!((slower / before - 1.0).abs() < 0.1, "{before} {slower}");
    }

    #[test]
    fn what_was_read_is_not_believed_for_long_when_it_is_told_no_more() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut cost = StepCost::new(1, 0.1);
        learn_some(&mut cost, &mut rng, 60, 1.0);
        let before = cost.of(0).unwrap_or(0.0);
        (0..12).for_each(|_| cost.learn(0, 0.2 * before, None));
        let after = cost.of(0).unwrap_or(0.0);
        assert!((after / before - 0.2).abs() < 0.03, "{before} {after}");
    }

    #[test]
    fn all_widths_pay_the_same_for_a_byte() {
        let mut cost = StepCost::new(7, 0.1);
        for i in 0..40 {
            let bytes = 1000 + i % 3 * 10;
            cost.learn(0, 2.0 * bytes as f64 + 100.0, Some(&[bytes]));
        }
        let bytes = |width: usize| cost.bytes.of(width).unwrap_or(0.0);
        assert!((cost.reading(7) / cost.reading(0) / (bytes(7) / bytes(0)) - 1.0).abs() < 1e-9);
        assert!(cost.price() > 0.2, "{}", cost.price());
    }

    #[test]
    fn what_is_not_known_or_makes_no_sense_is_no_trouble() {
        let mut cost = StepCost::new(2, 0.5);
        assert_eq!(cost.of(1), None);
        for reads in [None, Some(&[][..]), Some(&[1, 2, 3][..]), Some(&[0, 0][..]), Some(&[u64::MAX, u64::MAX][..])] {
            for ns in [100.0, 0.0, 1e18] {
                cost.learn(1, ns, reads);
                let found = [0, 1, 2].map(|width| cost.of(width).unwrap_or(f64::NAN));
                assert!(found.iter().all(|ns| ns.is_finite() && *ns >= 0.0), "{found:?} {reads:?} {ns}");
                assert!(cost.doubt(2, 0).is_finite());
            }
        }
        // where nothing is read, it is as if that were not known
        let (mut told, mut untold) = (StepCost::new(2, 0.5), StepCost::new(2, 0.5));
        for width in [0, 1, 0, 2, 0, 1] {
            let ns = 100.0 * (1 + width) as f64;
            told.learn(width, ns, Some(&vec![0; width + 1]));
            untold.learn(width, ns, None);
        }
        assert_eq!([0, 1, 2].map(|width| told.of(width)), [0, 1, 2].map(|width| untold.of(width)));
    }
}
