//! A router's scores for an input, computed on a quantized copy: fast, and good enough to guess by.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use half::{bf16, f16};

use super::products::products;
use crate::error::{Error, Result, within};
use crate::index::{Gating, Index, Place, RouterPlaces, Rule};

/// Larger routers are not copied: none is known.
const MOST_BYTES: u64 = 256 << 20;
/// GGUF's numbers of the types that routers have.
const F32: u32 = 0;
const F16: u32 = 1;
const BF16: u32 = 30;

/// The input of a layer's experts, quantized once for all routers that are applied to it.
///
/// Element `i` is about `scale * values[i]`.
#[derive(Debug, Default)]
pub struct Input {
    /// Before they are quantized.
    scaled: Vec<f32>,
    values: Vec<i16>,
    scale: f32,
}

impl Input {
    /// Quantizes `x`, times `factor` element by element where there is one.
    pub fn set(&mut self, x: &[f32], factor: &[f32]) {
        self.scaled.clear();
        self.scaled.extend_from_slice(x);
        pulp::Arch::new().dispatch(|| self.quantize(factor));
    }

    #[inline(always)]
    fn quantize(&mut self, factor: &[f32]) {
        self.scaled.iter_mut().zip(factor).for_each(|(v, f)| *v *= f);
        // eight at once: of one after the other the processor would wait for each
        let (eights, rest) = self.scaled.as_chunks::<8>();
        let larger = |m: f32, v: f32| if v > m { v } else { m };
        let mut most = [0f32; 8];
        eights.iter().for_each(|eight| most.iter_mut().zip(eight).for_each(|(m, v)| *m = larger(*m, v.abs())));
        let largest = most.into_iter().chain(rest.iter().map(|v| v.abs())).fold(0.0, larger);
        // a sum of products with 8-bit weights stays below 2^31
        let steps = (i32::MAX / 128 / self.scaled.len().max(1) as i32).min(2047) as f32;
        let inverse = if largest > 0.0 { steps / largest } else { 0.0 };
        self.values.clear();
        self.values.extend(self.scaled.iter().map(|v| (v * inverse) as i16));
        self.scale = largest / steps;
    }
}

/// The router of one layer.
#[derive(Debug)]
pub struct Router {
    n_embd: usize,
    /// Row by row; element `(e, i)` of the matrix is about `scales[e] * weights[e * n_embd + i]`.
    weights: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<f32>,
    selection_bias: Vec<f32>,
    /// The weight of the norm whose output is the router's input; empty when there is none.
    pub norm: Vec<f32>,
    rule: Rule,
}

impl Router {
    /// Reads the router at `places`. `None` when its type or shape is none that can be applied.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read.
    pub fn load(index: &Index, places: &RouterPlaces) -> Result<Option<Self>> {
        let [n_embd, n_expert, 1, 1] = places.weight.ne else { return Ok(None) };
        let (n_embd, n_expert) = (n_embd as usize, n_expert as usize);
        let Some(matrix) = floats(index, &places.weight)? else { return Ok(None) };
        let vector = |place: &Option<Place>, n: usize| -> Result<Option<Vec<f32>>> {
            let Some(place) = place else { return Ok(Some(Vec::new())) };
            Ok(floats(index, place)?.filter(|v| v.len() == n))
        };
        let (Some(bias), Some(selection_bias), Some(norm)) =
            (vector(&places.bias, n_expert)?, vector(&places.selection_bias, n_expert)?, vector(&places.norm, n_embd)?)
        else {
            return Ok(None);
        };
        let mut weights = Vec::with_capacity(matrix.len());
        let mut scales = Vec::with_capacity(n_expert);
        for row in matrix.chunks_exact(n_embd.max(1)) {
            let largest = row.iter().fold(0f32, |m, v| m.max(v.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            weights.extend(row.iter().map(|v| (v * inverse).round() as i8));
            scales.push(largest / 127.0);
        }
        Ok(Some(Self { n_embd, weights, scales, bias, selection_bias, norm, rule: index.rule }))
    }

    /// Columns.
    pub fn n_embd(&self) -> usize {
        self.n_embd
    }

    /// Experts.
    pub fn n_expert(&self) -> usize {
        self.scales.len()
    }

    /// What experts are selected by, one score per expert, the larger the better: logits, or probabilities with their
    /// bias. Experts of groups that are not used score negative infinity. `x` has [`Router::n_embd`] elements.
    pub fn scores(&self, x: &Input, out: &mut Vec<f32>) {
        out.clear();
        out.resize(self.n_expert(), 0.0);
        products(&self.weights, &x.values, out);
        for (e, score) in out.iter_mut().enumerate() {
            *score = *score * self.scales[e] * x.scale + self.bias.get(e).copied().unwrap_or(0.0);
        }
        // what is monotone changes no selection
        if self.selects_by_logits() {
            return;
        }
        self.gate(out);
        for (score, bias) in out.iter_mut().zip(&self.selection_bias) {
            *score += bias;
        }
        if self.grouped() {
            self.mask_groups(out);
        }
    }

    /// Makes [`Router::scores`] what the experts are weighted by, up to a factor per token: without the bias of the
    /// selection. Experts of groups that are not used weigh nothing.
    pub fn weights(&self, scores: &mut [f32]) {
        if self.selects_by_logits() {
            return self.gate(scores);
        }
        for (e, score) in scores.iter_mut().enumerate() {
            *score = (*score - self.selection_bias.get(e).copied().unwrap_or(0.0)).max(0.0);
        }
    }

    fn grouped(&self) -> bool {
        self.rule.groups > 1 && self.n_expert().is_multiple_of(self.rule.groups as usize)
    }

    fn selects_by_logits(&self) -> bool {
        self.selection_bias.is_empty() && !self.grouped()
    }

    fn gate(&self, scores: &mut [f32]) {
        match self.rule.gating {
            Gating::Sigmoid => scores.iter_mut().for_each(|s| *s = 1.0 / (1.0 + (-*s).exp())),
            Gating::SqrtSoftplus => scores.iter_mut().for_each(|s| *s = s.exp().ln_1p().sqrt()),
            Gating::Softmax => {
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = scores.iter().map(|s| (s - largest).exp()).sum();
                scores.iter_mut().for_each(|s| *s = (*s - largest).exp() / sum);
            }
        }
    }

    fn mask_groups(&self, scores: &mut [f32]) {
        let size = scores.len() / self.rule.groups as usize;
        let mut sums: Vec<(f32, usize)> = scores
            .chunks_exact(size)
            .map(|group| {
                let mut best = [f32::NEG_INFINITY; 2];
                for &s in group {
                    if s > best[0] {
                        best = [s, best[0]];
                    } else if s > best[1] {
                        best[1] = s;
                    }
                }
                if size > 1 { best[0] + best[1] } else { best[0] }
            })
            .zip(0..)
            .collect();
        sums.sort_by(|a, b| b.0.total_cmp(&a.0));
        for &(_, group) in sums.iter().skip(self.rule.groups_used as usize) {
            scores[group * size..(group + 1) * size].fill(f32::NEG_INFINITY);
        }
    }
}

/// The tensor at `place` as floats. `None` for a type that small tensors do not have.
fn floats(index: &Index, place: &Place) -> Result<Option<Vec<f32>>> {
    if place.bytes > MOST_BYTES || ![F32, F16, BF16].contains(&place.ty.0) {
        return Ok(None);
    }
    let path = &index.files[place.file as usize].path;
    let mut bytes = vec![0; place.bytes as usize];
    File::open(path)
        .and_then(|mut file| {
            file.seek(SeekFrom::Start(place.offset))?;
            file.read_exact(&mut bytes)
        })
        .map_err(|source| {
            let source = within(&place.name, place.offset, &source);
            Error::File { path: path.clone(), what: "read a router", source }
        })?;
    let halves = || bytes.as_chunks::<2>().0.iter();
    Ok(Some(match place.ty.0 {
        F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        F16 => halves().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        _ => halves().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(rule: Rule, selection_bias: &[f32]) -> Router {
        Router {
            n_embd: 1,
            weights: vec![0, 64, -127, 127],
            scales: vec![1.0 / 64.0; 4],
            bias: Vec::new(),
            selection_bias: selection_bias.to_vec(),
            norm: Vec::new(),
            rule,
        }
    }

    /// The scores and the weights of the input 1.
    fn apply(router: &Router) -> (Vec<f32>, Vec<f32>) {
        let (mut input, mut scores) = (Input::default(), Vec::new());
        input.set(&[1.0], &[]);
        router.scores(&input, &mut scores);
        let mut weights = scores.clone();
        router.weights(&mut weights);
        (scores, weights)
    }

    #[test]
    fn experts_are_weighted_without_the_bias_of_the_selection() {
        let logits = [0.0, 1.0, -127.0 / 64.0, 127.0 / 64.0];
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
        let (scores, weights) = apply(&router(Rule { gating: Gating::Softmax, groups: 1, groups_used: 1 }, &[]));
        assert!(near(&scores, &logits), "{scores:?}");
        let sum: f32 = logits.iter().map(|l: &f32| l.exp()).sum();
        assert!(near(&weights, &logits.map(|l| l.exp() / sum)), "{weights:?}");

        let biased = router(Rule { gating: Gating::Sigmoid, groups: 2, groups_used: 1 }, &[10.0, 0.0, 0.0, 0.0]);
        let (scores, weights) = apply(&biased);
        assert_eq!((scores[0] > 10.0, &scores[2..]), (true, &[f32::NEG_INFINITY; 2][..]));
        assert!(near(&weights, &[0.5, 0.731, 0.0, 0.0]), "{weights:?}");
    }
}
