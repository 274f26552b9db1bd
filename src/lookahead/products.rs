//! Products of a quantized matrix with a quantized vector.

/// One product per output: a row of `weights`, which has as many columns as `x` has elements, with `x`. Sums wrap at 2^31.
pub fn products(weights: &[i8], x: &[i16], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = pulp::x86::V3::try_new()
        && !x.is_empty()
    {
        return simd.vectorize(x86::Products { simd, weights, x, out });
    }
    pulp::Arch::new().dispatch(|| one_by_one(weights, x, out));
}

#[inline(always)]
fn one_by_one(weights: &[i8], x: &[i16], out: &mut [f32]) {
    for (row, out) in weights.chunks_exact(x.len().max(1)).zip(out) {
        *out = product(row, x) as f32;
    }
}

#[inline(always)]
fn product(row: &[i8], x: &[i16]) -> i32 {
    row.iter().zip(x).fold(0, |sum: i32, (&w, &v)| sum.wrapping_add(i32::from(w) * i32::from(v)))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m128i, __m256i};

    use pulp::{NullaryFnOnce, cast, x86::V3};

    use super::{one_by_one, product};

    /// Columns at once.
    const STEP: usize = 16;

    /// Four rows at once: the matrix comes from memory each time, which gives more when it is asked in four places.
    pub(super) struct Products<'a> {
        pub simd: V3,
        pub weights: &'a [i8],
        pub x: &'a [i16],
        pub out: &'a mut [f32],
    }

    impl NullaryFnOnce for Products<'_> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            let Self { simd, weights, x, out } = self;
            let n = x.len();
            let (steps, rest) = x.as_chunks::<STEP>();
            let mut fours = weights.chunks_exact(4 * n);
            let mut outs = out.chunks_exact_mut(4);
            for (rows, out) in (&mut fours).zip(&mut outs) {
                let row = |i: usize| rows[i * n..(i + 1) * n].as_chunks::<STEP>();
                let ((a, rest_a), (b, rest_b), (c, rest_c), (d, rest_d)) = (row(0), row(1), row(2), row(3));
                let mut sums = [simd.avx._mm256_setzero_si256(); 4];
                for ((((x, a), b), c), d) in steps.iter().zip(a).zip(b).zip(c).zip(d) {
                    let x: __m256i = cast(*x);
                    for (sum, weights) in sums.iter_mut().zip([a, b, c, d]) {
                        let weights: __m128i = cast(*weights);
                        let weights = simd.avx2._mm256_cvtepi8_epi16(weights);
                        *sum = simd.avx2._mm256_add_epi32(*sum, simd.avx2._mm256_madd_epi16(weights, x));
                    }
                }
                for ((out, sum), last) in out.iter_mut().zip(sums).zip([rest_a, rest_b, rest_c, rest_d]) {
                    let sum: [i32; 8] = cast(sum);
                    *out = sum.into_iter().fold(product(last, rest), i32::wrapping_add) as f32;
                }
            }
            one_by_one(fours.remainder(), x, outs.into_remainder());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_the_processor_products_are_the_same(
            (columns, weights, x) in (0..70usize, 0..11usize).prop_flat_map(|(columns, rows)| {
                let weights = proptest::collection::vec(any::<i8>(), rows * columns);
                (Just(columns), weights, proptest::collection::vec(-2047..2048i16, columns))
            }),
        ) {
            let mut out = vec![f32::NAN; weights.len().checked_div(columns).unwrap_or(0)];
            products(&weights, &x, &mut out);
            let expected: Vec<f32> = weights.chunks_exact(columns.max(1)).map(|row| product(row, &x) as f32).collect();
            prop_assert_eq!(out, expected);
        }
    }
}
