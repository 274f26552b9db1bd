//! What a quantizer is given, so that what comes out of it does little harm where columns go together.
//!
//! A quantizer chooses the nearest of what it can write, column by column. For inputs of the covariance H, though, a row w that
//! becomes q errs by (q - w) H (q - w)': an error of one column can make up for that of another. The least of it
//! over all q is sought by the alternating direction method of multipliers, in which ggml's quantizer is the projection onto
//! what can be written. For D, H's diagonal or what an importance matrix has in its place, and a factor r,
//!
//! ```text
//! q = Q(w), u = 0                          Q: quantize, with the importances D
//! repeat:  x = w + (q - u - w) P           P = r D (H + r D)^-1
//!          q = Q(x + u)
//!          u = u + x - q
//! ```
//!
//! x being the least of (x - w) H (x - w)' + r (x - q + u) D (x - q + u)'. Nothing says that this converges, where what can be
//! written has gaps, so of each row the best q that was seen is kept: the first is what comes without all this.
//!
//! Sources: S. Boyd et al., Distributed Optimization and Statistical Learning via the Alternating Direction Method of
//! Multipliers, 2011, chapter 9 (projections onto sets that are not convex); E. Frantar et al., GPTQ, 2022 (the covariance as
//! what a layer's error is measured by).

use faer::linalg::matmul::matmul;
use faer::linalg::solvers::Solve;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side};

use crate::error::Result;

/// How closely x keeps to what can be written.
const FACTOR: f32 = 0.5;
/// How often a row is quantized beside the first time.
const TURNS: usize = 20;

/// Which columns of a matrix's inputs go together: the mean of x' x, or a sum, in squares along its diagonal.
#[derive(Debug, Clone, PartialEq)]
pub struct Covariance {
    squares: Vec<Mat<f32>>,
    columns: usize,
}

impl Covariance {
    /// For so many columns, in squares of up to `stretch`.
    pub(super) fn zeros(columns: usize, stretch: usize) -> Self {
        let square = |begin: usize| {
            let n = stretch.min(columns - begin);
            Mat::zeros(n, n)
        };
        Self { squares: (0..columns).step_by(stretch).map(square).collect(), columns }
    }

    /// Adds x' x for rows x.
    pub(super) fn add(&mut self, rows: &[f32]) {
        let columns = self.columns;
        let mut begin = 0;
        for square in &mut self.squares {
            let x = view(rows, columns).subcols(begin, square.ncols());
            begin += square.ncols();
            matmul(square.as_mut(), Accum::Add, x.transpose(), x, 1.0, Par::Seq);
        }
    }

    /// Multiplies by a factor.
    pub(super) fn scale(&mut self, by: f32) {
        for square in &mut self.squares {
            *square *= faer::Scale(by);
        }
    }

    /// Adds so much of the diagonal's mean to the diagonal.
    pub(super) fn enlarge(&mut self, part: f32) {
        let diagonal = self.diagonal();
        let more = part * diagonal.iter().sum::<f32>() / diagonal.len() as f32;
        for square in &mut self.squares {
            (0..square.nrows()).for_each(|i| square[(i, i)] += more);
        }
    }

    /// The mean square of each column.
    pub fn diagonal(&self) -> Vec<f32> {
        self.squares.iter().flat_map(|square| (0..square.nrows()).map(|i| square[(i, i)])).collect()
    }

    /// Bytes that it takes.
    pub(super) fn memory(&self) -> u64 {
        self.squares.iter().map(|square| 4 * (square.nrows() * square.ncols()) as u64).sum()
    }

    /// e H e' of each row e of `errors`.
    pub(super) fn of(&self, errors: &[f32]) -> Vec<f64> {
        let mut sums = vec![0.0; errors.len() / self.columns];
        let product = self.times(errors);
        let rows = errors.chunks(self.columns).zip(product.chunks(self.columns));
        for (sum, (a, b)) in sums.iter_mut().zip(rows) {
            *sum = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        }
        sums
    }

    /// Rows times the squares, each of which is transposed: what is symmetric does not mind.
    fn times(&self, rows: &[f32]) -> Vec<f32> {
        let mut product = vec![0.0; rows.len()];
        let mut begin = 0;
        for square in &self.squares {
            let n = square.ncols();
            let to = MatMut::from_row_major_slice_mut(&mut product, rows.len() / self.columns, self.columns);
            let from = view(rows, self.columns).subcols(begin, n);
            matmul(to.subcols_mut(begin, n), Accum::Replace, from, square.transpose(), 1.0, Par::Seq);
            begin += n;
        }
        product
    }

    /// P of the module's text, transposed, for the weights D of the columns. `None` where H + r D has no inverse.
    fn pull(&self, weights: &[f32]) -> Option<Self> {
        let mut begin = 0;
        let mut squares = Vec::new();
        for square in &self.squares {
            let n = square.nrows();
            let weights = &weights[begin..][..n];
            begin += n;
            let mut sum = square.clone();
            weights.iter().enumerate().for_each(|(i, w)| sum[(i, i)] += FACTOR * w);
            let llt = sum.llt(Side::Lower).ok()?;
            drop(sum);
            // both are symmetric: (H + r D)^-1 r D
            let mut pull = Mat::from_fn(n, n, |i, j| if i == j { FACTOR * weights[i] } else { 0.0 });
            llt.solve_in_place(pull.as_mut());
            squares.push(pull);
        }
        Some(Self { squares, columns: self.columns })
    }
}

fn view(rows: &[f32], columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(rows, rows.len() / columns, columns)
}

/// What an expert's rows are quantized with, beside the importance of columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    pub(super) covariance: Covariance,
    pull: Covariance,
}

impl Shape {
    /// For inputs of a covariance, and the importance of columns by which rows are quantized, 1 on average. `None` when nothing is to be
    /// gained.
    pub(super) fn new(covariance: Covariance, importance: &[f32]) -> Option<Self> {
        let diagonal = covariance.diagonal();
        let mean = diagonal.iter().sum::<f32>() / diagonal.len() as f32;
        let weights: Vec<f32> = importance.iter().map(|i| i * mean).collect();
        let pull = covariance.pull(&weights).filter(|_| mean > 0.0)?;
        Some(Self { covariance, pull })
    }

    /// The bytes of `rows`, by a quantizer and what makes values of its bytes.
    ///
    /// # Errors
    /// As these.
    pub(super) fn quantize(
        &self,
        rows: &[f32],
        quantize: impl Fn(&[f32]) -> Result<Vec<u8>>,
        dequantize: impl Fn(&[u8]) -> Result<Vec<f32>>,
    ) -> Result<Vec<u8>> {
        let columns = self.covariance.columns;
        let errors = |q: &[f32]| {
            let difference: Vec<f32> = q.iter().zip(rows).map(|(q, w)| q - w).collect();
            self.covariance.of(&difference)
        };
        let mut best = quantize(rows)?;
        let mut q = dequantize(&best)?;
        let mut least = errors(&q);
        let row_bytes = best.len() / least.len().max(1);
        let mut u = vec![0.0_f32; rows.len()];
        for _ in 0..TURNS {
            let difference: Vec<f32> = q.iter().zip(&u).zip(rows).map(|((q, u), w)| q - u - w).collect();
            let x: Vec<f32> = self.pull.times(&difference).iter().zip(rows).map(|(d, w)| w + d).collect();
            u.iter_mut().zip(&x).for_each(|(u, x)| *u += x);
            // far out nothing is found that is better
            if !(crate::ffi::ggml::Rows { values: &u, columns }).fit() {
                break;
            }
            let bytes = quantize(&u)?;
            q = dequantize(&bytes)?;
            u.iter_mut().zip(&q).for_each(|(u, q)| *u -= q);
            for (i, error) in errors(&q).into_iter().enumerate() {
                if error < least[i] {
                    least[i] = error;
                    best[i * row_bytes..][..row_bytes].copy_from_slice(&bytes[i * row_bytes..][..row_bytes]);
                }
            }
        }
        Ok(best)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const COLUMNS: usize = 8;

    /// Rows that have little beside one direction.
    fn inputs(n: usize) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut row = || {
            let along = rng.f32() - 0.5;
            (0..COLUMNS).map(|i| along * (1.0 + i as f32) + 0.05 * (rng.f32() - 0.5)).collect::<Vec<_>>()
        };
        (0..n).flat_map(|_| row()).collect()
    }

    fn covariance(stretch: usize) -> Covariance {
        let mut covariance = Covariance::zeros(COLUMNS, stretch);
        let rows = inputs(100);
        rows.chunks(32 * COLUMNS).for_each(|rows| covariance.add(rows));
        covariance.scale(0.01);
        covariance
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-4 * a.abs().max(b.abs()).max(1e-3)
    }

    #[test]
    fn a_covariance_tells_the_mean_square_of_what_rows_err_by() {
        let error: Vec<f32> = (0..2 * COLUMNS).map(|i| ((i * 5) % 7) as f32 - 3.0).collect();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let mean = |error: &[f32]| inputs(100).chunks(COLUMNS).map(|x| dot(x, error).powi(2)).sum::<f64>() / 100.0;
        let found = covariance(COLUMNS).of(&error);
        assert!(found.iter().zip(error.chunks(COLUMNS)).all(|(found, error)| close(*found, mean(error))), "{found:?}");
        // in squares of three columns those of one know nothing of the others
        let apart = |error: &[f32]| {
            let part = |begin: usize| {
                let inside = |i: usize| (begin..begin + 3).contains(&i);
                error.iter().enumerate().map(|(i, e)| if inside(i) { *e } else { 0.0 }).collect::<Vec<_>>()
            };
            (0..COLUMNS).step_by(3).map(|begin| mean(&part(begin))).sum::<f64>()
        };
        let found = covariance(3).of(&error);
        assert!(found.iter().zip(error.chunks(COLUMNS)).all(|(found, error)| close(*found, apart(error))), "{found:?}");
        assert_eq!(covariance(3).diagonal(), covariance(COLUMNS).diagonal());
    }

    #[test]
    fn x_is_where_both_pull_alike() {
        let (covariance, weights) = (covariance(COLUMNS), [0.5, 2.0, 1.0, 1.0, 0.25, 1.0, 3.0, 1.0]);
        let pull = covariance.pull(&weights).unwrap();
        let away: Vec<f32> = (0..COLUMNS).map(|i| i as f32 - 2.5).collect();
        // (x - w) H = r (q - u - x) D
        let moved = pull.times(&away);
        let left = covariance.times(&moved);
        for i in 0..COLUMNS {
            assert!(close(f64::from(left[i]), f64::from(FACTOR * (away[i] - moved[i]) * weights[i])), "{i}");
        }
    }

    #[test]
    fn errors_make_up_for_each_other_and_no_row_is_worse_than_without() {
        // halves only
        let quantize = |rows: &[f32]| {
            Ok(rows.iter().map(|v| (2.0 * v).round().clamp(-100.0, 100.0) as i8 as u8).collect::<Vec<_>>())
        };
        let dequantize = |bytes: &[u8]| Ok(bytes.iter().map(|b| f32::from(*b as i8) / 2.0).collect::<Vec<_>>());
        let mut rng = fastrand::Rng::with_seed(3);
        let rows: Vec<f32> = (0..20 * COLUMNS).map(|_| 4.0 * rng.f32() - 2.0).collect();
        let shape = Shape::new(covariance(COLUMNS), &[1.0; COLUMNS]).unwrap();
        let errors = |bytes: &[u8]| {
            let error: Vec<f32> = dequantize(bytes).unwrap().iter().zip(&rows).map(|(q, w)| q - w).collect();
            shape.covariance.of(&error)
        };
        let plain = errors(&quantize(&rows).unwrap());
        let shaped = errors(&shape.quantize(&rows, quantize, dequantize).unwrap());
        assert!(plain.iter().zip(&shaped).all(|(plain, shaped)| shaped <= plain));
        assert!(shaped.iter().sum::<f64>() < 0.5 * plain.iter().sum::<f64>(), "{shaped:?} instead of {plain:?}");
    }

    #[test]
    fn inputs_of_nothing_but_zeros_shape_nothing() {
        assert_eq!(Shape::new(Covariance::zeros(COLUMNS, 3), &[1.0; COLUMNS]), None);
    }
}
