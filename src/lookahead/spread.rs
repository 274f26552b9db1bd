//! How far a token's scores lie apart.

/// The mean and the standard deviation of the scores that are finite: those of masked experts are infinite, and tell
/// nothing of the others. Both are 0 when none is.
#[inline(always)]
pub fn mean_and_deviation(scores: &[f32]) -> (f32, f32) {
    let finite = || scores.iter().copied().filter(|s| s.is_finite());
    let n = (finite().count() as f32).max(1.0);
    let mean = finite().sum::<f32>() / n;
    (mean, (finite().map(|s| (s - mean).powi(2)).sum::<f32>() / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_scores_do_not_count() {
        let none = f32::NEG_INFINITY;
        for scores in [[1.0, 5.0, 1.0, 5.0].as_slice(), &[none, 1.0, 5.0, f32::NAN, 1.0, none, 5.0, f32::INFINITY]] {
            assert_eq!(mean_and_deviation(scores), (3.0, 2.0), "{scores:?}");
        }
        for nothing in [[].as_slice(), &[none; 4], &[f32::NAN]] {
            assert_eq!(mean_and_deviation(nothing), (0.0, 0.0), "{nothing:?}");
        }
    }
}
