//! How much harm it does to store a matrix in a type.
//!
//! For rows w of a matrix, what the type makes of them (q), and the mean square x_j of the input's column j over the tokens that
//! the expert is picked for,
//!
//! ```text
//! error(q) = rows * mean over sampled rows of  sum_j x_j (w_j - q_j)^2
//! energy   = rows * mean over sampled rows of  sum_j x_j  w_j^2
//!
//! harm of a down matrix:          share * error(q)
//! harm of an up or gate matrix:   share * error(q) / energy * energy of the expert's down matrix
//! ```
//!
//! share being the part of all tokens that the expert is picked for. It is the energy of the error that a token finds in the residual
//! stream, on average, if columns err independently of each other. A down matrix writes there. An up or a gate matrix
//! does not: what it gets wrong by so many percent, the products of both, and so what down makes of them, are wrong by as many
//! (of a matrix that holds both, by both). The weight that the router gives to an expert is not known here. Without an
//! importance matrix all x_j are 1, and without a trace, too, all shares. Where inputs were recorded, both sums are those of
//! `shape.rs`, in which columns do not err independently.

use super::choose::Candidate;
use super::imatrix::Input;
use super::matrices::Matrices;
use crate::error::Result;
use crate::index::{GgmlType, Part};

/// About as many values of a matrix are tried, in this many rows.
const VALUES: u64 = 32 << 10;
const ROWS: std::ops::RangeInclusive<u64> = 8..=64;

/// What the types do to one matrix.
struct Errors {
    /// 0 where there is no choice, and nothing was measured.
    energy: f64,
    /// In the order of the types.
    errors: Vec<f64>,
}

/// The candidates of an expert, for each matrix of its layer. `types` are those of each matrix; `share` is the part of
/// all tokens that it is picked for, where that is known from elsewhere than the importance matrix.
pub(super) fn of_expert(
    layer: &[Matrices],
    types: &[Vec<GgmlType>],
    expert: u32,
    share: Option<f64>,
) -> Result<Vec<Vec<Candidate<GgmlType>>>> {
    let unknown = layer.first().map_or(1.0, Matrices::mean_share);
    let mut measured = Vec::new();
    for (matrices, types) in layer.iter().zip(types) {
        let input = matrices.input(expert)?;
        let share = share.or_else(|| input.as_ref().map(|input| input.share)).unwrap_or(unknown);
        measured.push((share, errors(matrices, types, expert, input.as_ref())?));
    }
    let down = layer.iter().position(|matrices| matrices.tensor.part == Part::Down);
    let down = down.map(|i| measured[i].1.energy);
    let candidates = layer.iter().zip(types).zip(&measured).map(|((matrices, types), (share, measured))| {
        let factor = share * gain(matrices.tensor.part, measured.energy, down);
        let [columns, rows, ..] = matrices.tensor.ne;
        let candidate = |(&what, error): (&GgmlType, &f64)| {
            let bytes = what.row_bytes(columns).map_or(0, |bytes| bytes * rows);
            Candidate { what, bytes, harm: factor * error }
        };
        types.iter().zip(&measured.errors).map(candidate).collect()
    });
    Ok(candidates.collect())
}

/// By what an error of a matrix is multiplied on its way to the residual stream.
fn gain(part: Part, energy: f64, down: Option<f64>) -> f64 {
    let parts = match part {
        Part::Down => return 1.0,
        Part::Up | Part::Gate => 1.0,
        Part::GateUp => 2.0,
    };
    match down {
        Some(down) if energy > 0.0 && down > 0.0 => parts * down / energy,
        _ => parts,
    }
}

fn errors(matrices: &Matrices, types: &[GgmlType], expert: u32, input: Option<&Input>) -> Result<Errors> {
    if *types == [matrices.tensor.ty] {
        return Ok(Errors { energy: 0.0, errors: vec![0.0] });
    }
    let [columns, rows, ..] = matrices.tensor.ne;
    let sample = (VALUES / columns.max(1)).clamp(*ROWS.start(), *ROWS.end()).min(rows);
    // from the middle of as many equal stretches
    let values = matrices.values(expert, (0..sample).map(|i| ((2 * i + 1) * rows / (2 * sample), 1)))?;
    let all = rows as f64 / sample as f64;
    let none = vec![0.0; values.len()];
    let mut errors = Vec::new();
    for &ty in types {
        let error = if ty == matrices.tensor.ty {
            0.0
        } else if matrices.lacks_importance(ty, input)? {
            f64::INFINITY
        } else {
            let made = matrices.dequantized(ty, &matrices.quantized(ty, &values, input)?)?;
            all * squares(&values, &made, columns as usize, input)
        };
        errors.push(error);
    }
    Ok(Errors { energy: all * squares(&values, &none, columns as usize, input), errors })
}

/// The sum of the squares of the differences, each times the mean square of its column.
fn squares(a: &[f32], b: &[f32], columns: usize, input: Option<&Input>) -> f64 {
    if let Some(shape) = input.and_then(|input| input.shape.as_ref()) {
        let difference: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        return shape.covariance.of(&difference).iter().sum();
    }
    let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
    let row = |(a, b): (&[f32], &[f32])| -> f64 {
        let squares = a.iter().zip(b).map(square);
        match input {
            Some(input) => squares.zip(&input.mean_square).map(|(square, x)| square * f64::from(*x)).sum(),
            None => squares.sum(),
        }
    };
    a.chunks(columns).zip(b.chunks(columns)).map(row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_weighs_as_much_as_its_column() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 6.0, 4.0]);
        assert_eq!(squares(&a, &b, 2, None), 4.0 + 9.0);
        let input = Input { mean_square: vec![2.0, 0.5], share: 1.0, shape: None };
        assert_eq!(squares(&a, &b, 2, Some(&input)), 0.5 * 4.0 + 2.0 * 9.0);
    }

    #[test]
    fn errors_of_up_and_gate_are_those_of_what_down_writes() {
        assert_eq!(gain(Part::Down, 5.0, Some(5.0)), 1.0);
        assert_eq!(gain(Part::Up, 4.0, Some(8.0)), 2.0);
        assert_eq!(gain(Part::GateUp, 4.0, Some(8.0)), 4.0);
        // nothing to scale by
        assert_eq!(gain(Part::Gate, 0.0, Some(8.0)), 1.0);
        assert_eq!(gain(Part::Gate, 4.0, None), 1.0);
    }
}
