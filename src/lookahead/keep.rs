//! What each expert is worth keeping, learned while the model runs.
//!
//! The value of an expert is [`DISCOUNT`] to the power of the number of tokens until its layer picks it again: the order
//! in which an optimal cache would keep experts. It is unknown, so it is estimated as a weighted sum of what is known:
//! how often the expert was picked lately, averaged over five spans, and how close its score came to being picked,
//! averaged over two. The weights are those of least squares over the last tokens, a model that has no learning rate to
//! choose and that is of use after a few tokens. Each fixed average is the best for some model, size of the cache and text;
//! over a thousand tokens this is as good as the best of them or better, over a hundred about as good.
//!
//! Least squares need the products of each expert's features with its value, which is known only later. They are summed
//! when an expert is picked, out of a trace: its features at every token since it was picked last, each discounted by
//! its distance. Nothing has to be remembered token by token.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::spread::mean_and_deviation;

/// How much less a use is worth for each token that it lies ahead.
const DISCOUNT: f32 = 0.84;
/// So much of the picks' average stays at the next token; less as long as there were few, so that each begins as the mean
/// of what was seen.
const PICKS: [f32; 5] = [0.5, 0.8, 0.95, 0.98, 0.995];
/// The same for the average of how close the scores came.
const NEARNESS: [f32; 2] = [0.5, 0.9];
/// The averages and a constant.
const FEATURES: usize = PICKS.len() + NEARNESS.len() + 1;
/// The first feature from scores.
const FIRST_NEARNESS: usize = PICKS.len();
/// How much the past weighs per token: what text is about changes which spans tell most.
const REMEMBER: f32 = 0.95;
/// A layer's weights are drawn to those of all layers, whose sums count so much.
const COMMON: f64 = 0.1;
/// Keeps the equations solvable where features say the same.
const RIDGE: f64 = 1e-3;
/// So many standard deviations of a token's scores make a score half as near as it can be.
const NEAR: f32 = 1.0 / 3.0;
/// Beyond this, nearness does not change any more. Masked scores are infinitely far.
const FARTHEST: f32 = 32.0;
/// No number that is learned comes near. With larger ones the arithmetic would overflow.
const LARGEST: f32 = 1e12;
/// Lower triangle of a symmetric matrix, row by row.
const PAIRS: usize = FEATURES * (FEATURES + 1) / 2;
/// Numbers that are added up side by side: what the widest registers hold.
const LANES: usize = 16;

/// The values of all experts of a model.
#[derive(Debug)]
pub struct Keep {
    layers: Vec<Layer>,
    all: Sums,
    near: Vec<f32>,
}

/// The equations of least squares: the features' products with each other, and with the values.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(into = "Vec<f64>", try_from = "Vec<f64>")]
struct Sums {
    pairs: [f64; PAIRS],
    values: [f64; FEATURES],
}

#[derive(Debug, Serialize, Deserialize)]
struct Layer {
    n_expert: usize,
    /// Tokens so far.
    seen: f32,
    /// Feature by feature, one number per expert.
    features: Vec<f32>,
    /// Likewise: discounted sums of the features since the expert was picked last, which fade as the other sums do.
    since: Vec<f32>,
    sums: Sums,
    values: Vec<f32>,
}

impl Keep {
    /// For layers with so many experts.
    pub fn new(n_expert: &[usize]) -> Self {
        Self::of(n_expert.iter().map(|&n| Layer::new(n)).collect())
    }

    fn of(layers: Vec<Layer>) -> Self {
        let mut all = Sums::ZERO;
        layers.iter().for_each(|layer| all.add(&layer.sums, 1.0));
        Self { layers, all, near: Vec::new() }
    }

    /// Whether this can have been learned of layers with so many experts: what is read from a file must be asked, or it
    /// may hold values that are no numbers.
    pub fn fits(&self, n_expert: &[usize]) -> bool {
        self.layers.len() == n_expert.len() && self.layers.iter().zip(n_expert).all(|(layer, &n)| layer.fits(n))
    }

    /// Layer `at` has picked `picks` for `rows` tokens, token by token, by `scores` (one per expert) for the last of
    /// them; empty where nobody knows. Of many tokens the last [`WINDOW`](super::WINDOW) count.
    pub fn observe(&mut self, at: usize, rows: usize, picks: &[i32], scores: &[f32]) {
        let Some(layer) = self.layers.get_mut(at) else { return };
        if rows == 0 || !picks.len().is_multiple_of(rows) || layer.n_expert == 0 {
            return;
        }
        let before = layer.sums;
        let unscored = rows.saturating_sub(scores.len() / layer.n_expert);
        for row in rows.saturating_sub(super::WINDOW)..rows {
            let of = |row: usize, n: usize| row * n..(row + 1) * n;
            let picks = &picks[of(row, picks.len() / rows)];
            let scores = row.checked_sub(unscored).and_then(|row| scores.get(of(row, layer.n_expert)));
            pulp::Arch::new().dispatch(|| layer.step(picks, scores.unwrap_or(&[]), &mut self.near));
        }
        self.all.add(&layer.sums, 1.0);
        self.all.add(&before, -1.0);
        let mut sums = layer.sums;
        sums.add(&self.all, COMMON);
        if let Some(weights) = sums.solve() {
            pulp::Arch::new().dispatch(|| layer.weigh(&weights));
        }
    }

    /// One value per expert of layer `at`, the more the better to keep. All the same before anything was learned.
    pub fn values(&self, at: usize) -> &[f32] {
        self.layers.get(at).map_or(&[], |layer| &layer.values)
    }
}

impl Layer {
    fn new(n_expert: usize) -> Self {
        let mut features = vec![0.0; FEATURES * n_expert];
        features[(FEATURES - 1) * n_expert..].fill(1.0);
        Self {
            n_expert,
            seen: 0.0,
            features,
            since: vec![0.0; FEATURES * n_expert],
            sums: Sums::ZERO,
            values: vec![0.0; n_expert],
        }
    }

    fn fits(&self, n_expert: usize) -> bool {
        let numbers = FEATURES * n_expert;
        self.n_expert == n_expert
            && [self.features.len(), self.since.len(), self.values.len()] == [numbers, numbers, n_expert]
            && self.features.iter().chain(&self.since).chain([&self.seen]).all(|x| (0.0..=LARGEST).contains(x))
            && self.features[numbers - n_expert..].iter().all(|&constant| constant == 1.0)
            && self.sums.pairs.iter().chain(&self.sums.values).all(|x| x.abs() <= f64::from(LARGEST))
            && self.values.iter().all(|x| x.is_finite())
    }

    /// One token.
    #[inline(always)]
    fn step(&mut self, picks: &[i32], scores: &[f32], near: &mut Vec<f32>) {
        let n = self.n_expert;
        self.seen += 1.0;
        let most = 1.0 - 1.0 / self.seen;
        let picked = || picks.iter().filter_map(|&e| usize::try_from(e).ok()).filter(|&e| e < n);
        for e in picked() {
            for (f, sum) in self.sums.values.iter_mut().enumerate() {
                *sum += f64::from(std::mem::take(&mut self.since[f * n + e]));
            }
        }
        for (feature, keep) in self.features.chunks_exact_mut(n).zip(PICKS.map(|keep| keep.min(most))) {
            feature.iter_mut().for_each(|x| *x *= keep);
            picked().for_each(|e| feature[e] += 1.0 - keep);
        }
        if nearness(scores, picked().filter_map(|e| scores.get(e).copied()), near) {
            for (feature, keep) in
                self.features[FIRST_NEARNESS * n..].chunks_exact_mut(n).zip(NEARNESS.map(|keep| keep.min(most)))
            {
                feature.iter_mut().zip(&*near).for_each(|(x, near)| *x = keep * *x + (1.0 - keep) * near);
            }
        }
        self.since.iter_mut().zip(&self.features).for_each(|(sum, x)| *sum = DISCOUNT * REMEMBER * *sum + x);
        self.sums.values.iter_mut().for_each(|sum| *sum *= f64::from(REMEMBER));
        let mut pair = self.sums.pairs.iter_mut();
        for (i, a) in self.features.chunks_exact(n).enumerate() {
            for (b, sum) in self.features.chunks_exact(n).take(i + 1).zip(&mut pair) {
                *sum = *sum * f64::from(REMEMBER) + f64::from(dot(a, b));
            }
        }
    }

    #[inline(always)]
    fn weigh(&mut self, weights: &[f32; FEATURES]) {
        self.values.fill(0.0);
        for (feature, &weight) in self.features.chunks_exact(self.n_expert).zip(weights) {
            self.values.iter_mut().zip(feature).for_each(|(value, x)| *value += weight * x);
        }
    }
}

/// How near each of `scores` is to the least of the `picked` ones, from 0 to 1, in `out`. Does not depend on the scores'
/// scale, for they may be logits or probabilities. Answers whether it is known.
#[inline(always)]
fn nearness(scores: &[f32], picked: impl Iterator<Item = f32>, out: &mut Vec<f32>) -> bool {
    let least = picked.filter(|s| s.is_finite()).fold(f32::INFINITY, f32::min);
    let (_, deviation) = mean_and_deviation(scores);
    let scale = 1.0 / (NEAR * deviation);
    // not when nothing was picked, nor when all scores are the same
    if !scale.is_finite() {
        return false;
    }
    out.clear();
    out.extend(scores.iter().map(|s| {
        #[allow(clippy::manual_clamp, reason = "this makes a number of what is none, clamp does not")]
        let x = ((s - least) * scale).max(-FARTHEST).min(FARTHEST);
        0.5 + 0.5 * x / (1.0 + x.abs())
    }));
    true
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        // by index: nested zips were not inlined, which cost three times as much
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

impl Sums {
    const ZERO: Self = Self { pairs: [0.0; PAIRS], values: [0.0; FEATURES] };

    fn add(&mut self, other: &Self, factor: f64) {
        self.pairs.iter_mut().zip(&other.pairs).for_each(|(a, b)| *a += factor * b);
        self.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += factor * b);
    }

    /// The weights, by Cholesky's way. `None` when they are no numbers, or none to reckon with.
    fn solve(&self) -> Option<[f32; FEATURES]> {
        let at = |i: usize, j: usize| i * (i + 1) / 2 + j;
        let mut l = self.pairs;
        let mut x = self.values;
        for i in 0..FEATURES {
            l[at(i, i)] += RIDGE * l[at(i, i)] + 1e-9;
            for j in 0..=i {
                let sum: f64 = (0..j).map(|k| l[at(i, k)] * l[at(j, k)]).sum();
                let rest = l[at(i, j)] - sum;
                l[at(i, j)] = if i == j { rest.sqrt() } else { rest / l[at(j, j)] };
            }
            x[i] = (x[i] - (0..i).map(|k| l[at(i, k)] * x[k]).sum::<f64>()) / l[at(i, i)];
        }
        for i in (0..FEATURES).rev() {
            x[i] = (x[i] - (i + 1..FEATURES).map(|k| l[at(k, i)] * x[k]).sum::<f64>()) / l[at(i, i)];
        }
        x.iter().all(|x| x.abs() <= f64::from(LARGEST)).then(|| x.map(|x| x as f32))
    }
}

impl From<Sums> for Vec<f64> {
    fn from(sums: Sums) -> Self {
        [&sums.pairs[..], &sums.values].concat()
    }
}

impl TryFrom<Vec<f64>> for Sums {
    type Error = &'static str;

    fn try_from(numbers: Vec<f64>) -> Result<Self, Self::Error> {
        let (pairs, values) = numbers.split_at_checked(PAIRS).ok_or("too few sums")?;
        let wrong = |_| "too few sums, or too many";
        Ok(Self { pairs: pairs.try_into().map_err(wrong)?, values: values.try_into().map_err(wrong)? })
    }
}

impl Serialize for Keep {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.layers.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Keep {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Vec::deserialize(from).map(Self::of)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_equations_are_solved() {
        let rows: Vec<[f64; FEATURES]> =
            (0..40).map(|i| std::array::from_fn(|j| ((i * 7 + j * j * 3 + i * i * j) % 11) as f64 - 5.0)).collect();
        let truth: [f64; FEATURES] = std::array::from_fn(|j| j as f64 - 2.5);
        let mut sums = Sums::ZERO;
        for row in &rows {
            let value: f64 = row.iter().zip(&truth).map(|(a, b)| a * b).sum();
            let mut pair = sums.pairs.iter_mut();
            for i in 0..FEATURES {
                sums.values[i] += row[i] * value;
                (0..=i).for_each(|j| *pair.next().unwrap() += row[i] * row[j]);
            }
        }
        for (found, truth) in sums.solve().unwrap().iter().zip(truth) {
            assert!((f64::from(*found) - truth).abs() < 0.05, "{found} is not {truth}");
        }
    }

    #[test]
    fn what_comes_back_is_worth_more_than_what_does_not() {
        for scored in [false, true] {
            let mut keep = Keep::new(&[32, 32]);
            assert_eq!(keep.values(1), [0.0; 32]);
            for token in 0..200i32 {
                for at in 0..2 {
                    // one expert always, one now and then, the rest hardly ever
                    let picks = [3, if token % 3 == 0 { 5 } else { 8 + (token * 7 + at) % 24 }];
                    let scores: Vec<f32> = (0..32).map(|e| if picks.contains(&e) { 2.0 } else { -1.0 }).collect();
                    keep.observe(at as usize, 1, &picks, if scored { &scores } else { &[] });
                }
            }
            let values = keep.values(0);
            assert!((8..32).all(|e| values[3] > values[5] && values[5] > values[e]), "{values:?}");
        }
    }

    #[test]
    fn masked_experts_are_as_far_as_can_be_and_do_not_move_the_others() {
        let (mut plain, mut masked) = (Vec::new(), Vec::new());
        assert!(nearness(&[3.0, 1.0, 0.0, -1.0], [3.0, 1.0].into_iter(), &mut plain));
        let none = f32::NEG_INFINITY;
        assert!(nearness(&[none, 3.0, 1.0, none, 0.0, -1.0], [3.0, 1.0].into_iter(), &mut masked));
        assert!(masked[0] < 0.02 && masked[0] == masked[3], "{masked:?}");
        assert_eq!([masked[1], masked[2], masked[4], masked[5]], plain[..]);
        assert!(!nearness(&[none; 4], [none].into_iter(), &mut masked), "nothing is known");
    }

    #[test]
    fn a_batch_counts_as_its_tokens() {
        let (mut one, mut many) = (Keep::new(&[8]), Keep::new(&[8]));
        let picks: Vec<i32> = (0..20).flat_map(|i| [i % 5, 5 + i % 3]).collect();
        let scores: Vec<f32> = (0..160).map(|i| ((i * 37) % 19) as f32).collect();
        picks.chunks(2).zip(scores.chunks(8)).for_each(|(p, s)| one.observe(0, 1, p, s));
        many.observe(0, 20, &picks, &scores);
        assert_eq!(one.values(0), many.values(0));
    }

    proptest! {
        #[test]
        fn values_are_numbers_whatever_comes(
            steps in proptest::collection::vec((proptest::collection::vec(-2..12i32, 0..6), proptest::collection::vec(any::<f32>(), 0..20)), 0..60),
        ) {
            let mut keep = Keep::new(&[10, 0]);
            for (i, (picks, scores)) in steps.iter().enumerate() {
                keep.observe(i % 3, 1 + i % 2, picks, scores);
                prop_assert!(keep.values(0).iter().all(|v| v.is_finite()));
                prop_assert!(keep.fits(&[10, 0]) && !keep.fits(&[10]) && !keep.fits(&[0, 10]));
            }
        }
    }
}
