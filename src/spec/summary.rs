//! What became of all sequences of a model whose speculation has ended.

use serde::Serialize;

use super::{OfWidth, Position, Widths};

/// Sums over sequences.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary {
    /// The steps by the number of tokens that they verified, from 0.
    pub widths: Vec<OfWidth>,
    /// The drafted tokens by their place, from the first.
    pub positions: Vec<Position>,
}

impl Summary {
    /// Adds those of one sequence.
    pub fn add(&mut self, widths: &Widths) {
        self.widths.resize(self.widths.len().max(widths.run().len()), OfWidth::default());
        self.widths.iter_mut().zip(widths.run()).for_each(|(sum, one)| sum.add(one));
        self.positions.resize(self.positions.len().max(widths.positions().len()), Position::default());
        self.positions.iter_mut().zip(widths.positions()).for_each(|(sum, one)| sum.add(one));
    }

    /// The steps that verified `width` tokens, and the tokens at that place of a draft. `None` for more than any drafter drafted.
    pub fn of(&self, width: usize) -> Option<(OfWidth, Position)> {
        let place = width.checked_sub(1).and_then(|place| self.positions.get(place)).copied();
        Some((*self.widths.get(width)?, place.unwrap_or_default()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::spec::{Mode, Step};

    #[test]
    fn sequences_with_drafters_of_several_lengths_are_summed() {
        let mut sum = Summary::default();
        for (n_max, stood) in [(2, 1), (4, 3)] {
            let mut widths = Widths::new(Mode::Fixed(n_max), n_max);
            for _ in 0..10 {
                let verified = widths.verify(&vec![None; n_max]);
                widths.done(Step { drafted: n_max, verified, stood, draft_ns: 1, step_ns: 5, more: 0 }, None);
            }
            sum.add(&widths);
        }
        let steps: Vec<_> = sum.widths.iter().map(|w| (w.steps, w.tokens, w.ns)).collect();
        assert_eq!(steps, [(0, 0, 0), (0, 0, 0), (10, 20, 50), (0, 0, 0), (10, 40, 50)]);
        let stood: Vec<_> = sum.positions.iter().map(|p| (p.verified, p.stood)).collect();
        assert_eq!(stood, [(20, 20), (20, 10), (10, 10), (10, 0)]);
        assert_eq!(sum.of(0).unwrap().1, Position::default());
        assert_eq!(sum.of(5), None);
    }
}
