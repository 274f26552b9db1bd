//! What experts are worth keeping in the eyes of several methods: learned, by a fixed average, or by the future.

use les::lookahead::{Keep, mean_and_deviation};

use super::replay::{Pass, Trace};

/// Values of experts, told pass by pass.
pub trait Values {
    /// After a layer's pass: one value per expert of that layer.
    fn after(&mut self, number: usize, pass: &Pass) -> &[f32];
}

/// The library's own.
pub struct Learned(Keep);

impl Learned {
    pub fn new(trace: &Trace) -> Self {
        Self(Keep::new(&trace.n_expert))
    }
}

impl Values for Learned {
    fn after(&mut self, _: usize, pass: &Pass) -> &[f32] {
        self.0.observe(pass.at, pass.rows, &pass.picks, &pass.scores);
        self.0.values(pass.at)
    }
}

/// The optimal order (Belady's): what is needed last goes first.
pub struct Future {
    /// Per pass and needed expert of it: the pass that needs it again.
    next: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Future {
    pub fn new(trace: &Trace) -> Self {
        let never = |n: &usize| vec![-2.0 * trace.passes.len() as f32; *n];
        let mut coming: Vec<Vec<f32>> = trace.n_expert.iter().map(never).collect();
        let mut next = vec![Vec::new(); trace.passes.len()];
        for (number, pass) in trace.passes.iter().enumerate().rev() {
            let coming = &mut coming[pass.at];
            next[number] =
                pass.needs.iter().map(|&e| std::mem::replace(&mut coming[e as usize], -(number as f32))).collect();
        }
        Self { next, values: coming }
    }
}

impl Values for Future {
    fn after(&mut self, number: usize, pass: &Pass) -> &[f32] {
        let values = &mut self.values[pass.at];
        for (&e, &next) in pass.needs.iter().zip(&self.next[number]) {
            values[e as usize] = next;
        }
        values
    }
}

/// What the score of a masked expert counts as, in standard deviations: less than others have.
const MASKED: f32 = -5.0;

/// What a fixed average is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// 1 for what is picked.
    Picks,
    /// The score, with the token's mean and deviation taken out.
    Scores,
    /// The logistic function of how far the score is above the least of the picked ones.
    Near,
}

/// An average in which the past weighs `keep` of itself per token.
pub struct Average {
    signal: Signal,
    keep: f32,
    values: Vec<Vec<f32>>,
}

impl Average {
    pub fn new(trace: &Trace, signal: Signal, keep: f32) -> Self {
        Self { signal, keep, values: trace.n_expert.iter().map(|&n| vec![0.0; n]).collect() }
    }
}

impl Values for Average {
    fn after(&mut self, _: usize, pass: &Pass) -> &[f32] {
        let values = &mut self.values[pass.at];
        let n = values.len();
        let used = pass.picks.len() / pass.rows;
        let unscored = pass.rows - pass.scores.len() / n;
        for row in unscored.max(pass.rows.saturating_sub(les::lookahead::WINDOW))..pass.rows {
            add(
                values,
                self.keep,
                self.signal,
                &pass.picks[row * used..][..used],
                &pass.scores[(row - unscored) * n..][..n],
            );
        }
        // without scores there are the picks
        if unscored == pass.rows {
            for row in pass.rows.saturating_sub(les::lookahead::WINDOW)..pass.rows {
                add(values, self.keep, Signal::Picks, &pass.picks[row * used..][..used], &[]);
            }
        }
        values
    }
}

fn add(values: &mut [f32], keep: f32, signal: Signal, picks: &[i32], scores: &[f32]) {
    let mut put = |e: usize, x: f32| values[e] += (1.0 - keep) * (x - values[e]);
    match signal {
        Signal::Picks => {
            values.iter_mut().for_each(|v| *v *= keep);
            picks.iter().for_each(|&e| values[e as usize] += 1.0 - keep);
        }
        Signal::Scores => {
            let (mean, deviation) = mean_and_deviation(scores);
            let standard = |s: f32| if s.is_finite() { (s - mean) / (deviation + 1e-6) } else { MASKED };
            scores.iter().enumerate().for_each(|(e, &s)| put(e, standard(s)));
        }
        Signal::Near => {
            let least = picks.iter().map(|&e| scores[e as usize]).fold(f32::INFINITY, f32::min);
            scores.iter().enumerate().for_each(|(e, s)| put(e, 1.0 / (1.0 + (least - s).exp())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_numbers_though_experts_are_masked() {
        let none = f32::NEG_INFINITY;
        for signal in [Signal::Picks, Signal::Scores, Signal::Near] {
            let mut values = [0.0; 5];
            for scores in [[3.0, 1.0, none, 0.0, none], [3.0, 1.0, 0.0, none, none]] {
                add(&mut values, 0.8, signal, &[0, 1], &scores);
            }
            assert!(values.iter().all(|v| v.is_finite()), "{signal:?}: {values:?}");
            assert!(values[0].min(values[1]) > values[2] && values[2] >= values[4], "{signal:?}: {values:?}");
        }
    }
}
