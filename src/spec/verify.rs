//! Which drafted tokens stand, and which token follows them.
//!
//! Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): a token `x`, drawn
//! from the drafter's distribution `q`, stands with probability
//!
//! ```text
//! min(1, p(x) / q(x))
//! ```
//!
//! where `p` is the target's distribution after the user's samplers. Where it does not stand, the token in its place is
//! drawn from the residual, `max(0, p - q)` divided by its sum. What comes out has the distribution `p`, whatever `q` is.
//!
//! A drafter that always proposes its best token has all of `q` in it: then `x` stands with probability `p(x)`, and the
//! residual is `p` without `x`. At temperature 0 all of `p` is in one token, and `x` stands if it is that one.

use crate::error::{Error, Result};

/// A token, and how likely it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token's id.
    pub token: i32,
    /// Its probability, up to a factor that is the same for all candidates.
    pub p: f32,
}

/// Whether `drafted` stands: answers with itself if it does, with the token in its place otherwise.
///
/// `target` and `draft` are `p` and `q`: distributions up to a factor, each token once, in any order; what is not there
/// has probability 0. An empty `draft` has all its mass in `drafted`. A token that its own distribution does not have, or that is no
/// token of the target at all, never stands. `uniform` answers with numbers drawn evenly from 0 up to, but not with, 1.
///
/// # Errors
/// [`Error::Invalid`] when a distribution has a probability that is negative or no number, or no mass at all.
pub fn judge(drafted: i32, target: &[Candidate], draft: &[Candidate], uniform: impl FnMut() -> f64) -> Result<i32> {
    let mut uniform = uniform;
    let all = mass(target, "target")?;
    let p = probability(target, drafted) / all;
    if draft.is_empty() {
        if uniform() < p {
            return Ok(drafted);
        }
        return Ok(pick(target, |c| if c.token == drafted { 0.0 } else { f64::from(c.p) }, uniform()));
    }
    let all_of_draft = mass(draft, "draft")?;
    let q = probability(draft, drafted) / all_of_draft;
    if q <= 0.0 {
        // from where it came is not known: what does not depend on it is right
        return Ok(pick(target, |c| f64::from(c.p), uniform()));
    }
    if uniform() * q < p {
        return Ok(drafted);
    }
    let mut sorted = draft.to_vec();
    sorted.sort_by_key(|c| c.token);
    let of_draft = |token: i32| {
        let found = sorted.binary_search_by_key(&token, |c| c.token).ok();
        found.map_or(0.0, |i| f64::from(sorted[i].p) / all_of_draft)
    };
    Ok(pick(target, |c| (f64::from(c.p) / all - of_draft(c.token)).max(0.0), uniform()))
}

/// Draws from the target's distribution: the token after a draft that stands as a whole.
///
/// # Errors
/// As [`judge`].
pub fn draw(target: &[Candidate], uniform: impl FnOnce() -> f64) -> Result<i32> {
    mass(target, "target")?;
    Ok(pick(target, |c| f64::from(c.p), uniform()))
}

fn mass(of: &[Candidate], whose: &str) -> Result<f64> {
    let sum: f64 = of.iter().map(|c| f64::from(c.p)).sum();
    if sum > 0.0 && sum.is_finite() && of.iter().all(|c| c.p >= 0.0) {
        return Ok(sum);
    }
    Err(Error::Invalid(format!(
        "the {whose}'s distribution of {} tokens is none: its probabilities are not numbers, negative, or all zero",
        of.len()
    )))
}

fn probability(of: &[Candidate], token: i32) -> f64 {
    of.iter().find(|c| c.token == token).map_or(0.0, |c| f64::from(c.p))
}

/// The token at `at`, from 0 to 1, of the candidates laid side by side, each as long as it weighs. The likeliest one where
/// rounding has left no weight: then nothing was to be rejected in the first place.
fn pick(from: &[Candidate], weight: impl Fn(&Candidate) -> f64, at: f64) -> i32 {
    let all: f64 = from.iter().map(&weight).sum();
    let mut left = at * all;
    let mut last = None;
    for c in from {
        let weight = weight(c);
        if weight <= 0.0 {
            continue;
        }
        last = Some(c.token);
        if left < weight {
            break;
        }
        left -= weight;
    }
    let likeliest = || from.iter().max_by(|a, b| a.p.total_cmp(&b.p)).map_or(0, |c| c.token);
    last.unwrap_or_else(likeliest)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use statrs::distribution::{ChiSquared, ContinuousCDF};

    use super::*;

    const DRAWS: usize = 200_000;
    /// A right rule fails a test this rarely.
    const CHANCE: f64 = 1e-6;

    /// Both at a temperature: the higher, the flatter.
    fn at(temperature: f64, logits: &[f64]) -> Vec<Candidate> {
        let weights: Vec<f64> = logits.iter().map(|l| (l / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        (0..).zip(weights).map(|(token, w)| Candidate { token, p: (w / sum) as f32 }).collect()
    }

    const TARGET: [f64; 6] = [2.0, 1.5, 0.3, 0.0, -1.0, -2.0];
    const DRAFT: [f64; 6] = [0.5, 2.2, 0.9, -1.0, 0.4, -3.0];

    /// The chi-square statistic of what `rule` answers against `target`, and the largest that chance explains.
    fn chi_square(target: &[Candidate], mut rule: impl FnMut(&mut fastrand::Rng) -> i32) -> (f64, f64) {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut seen = vec![0_u32; target.len()];
        (0..DRAWS).for_each(|_| seen[rule(&mut rng) as usize] += 1);
        let expected = |c: &Candidate| f64::from(c.p) * DRAWS as f64;
        let sum = target.iter().zip(seen).map(|(c, n)| (f64::from(n) - expected(c)).powi(2) / expected(c)).sum();
        (sum, ChiSquared::new(target.len() as f64 - 1.0).unwrap().inverse_cdf(1.0 - CHANCE))
    }

    #[test]
    fn what_comes_out_has_the_targets_distribution() {
        for temperature in [0.3, 0.7, 1.0, 1.5] {
            let (p, q) = (at(temperature, &TARGET), at(temperature, &DRAFT));
            let (found, most) = chi_square(&p, |rng| {
                let drafted = draw(&q, || rng.f64()).unwrap();
                judge(drafted, &p, &q, || rng.f64()).unwrap()
            });
            assert!(found < most, "temperature {temperature}, a drafter that draws: {found} of {most}");
            for best in 0..6 {
                let (found, most) = chi_square(&p, |rng| judge(best, &p, &[], || rng.f64()).unwrap());
                assert!(found < most, "temperature {temperature}, a drafter that proposes {best}: {found} of {most}");
            }
        }
    }

    #[test]
    fn the_test_of_the_distribution_finds_wrong_rules() {
        let (p, q) = (at(1.0, &TARGET), at(1.0, &DRAFT));
        type Wrong<'a> = &'a dyn Fn(i32, &mut fastrand::Rng) -> i32;
        let wrong: [(&str, Wrong); 3] = [
            ("all stand", &|drafted, _| drafted),
            ("the token in its place is drawn from the target", &|drafted, rng| {
                if rng.f64() * probability(&q, drafted) < probability(&p, drafted) {
                    drafted
                } else {
                    draw(&p, || rng.f64()).unwrap()
                }
            }),
            ("the likeliest stand", &|drafted, rng| {
                if probability(&p, drafted) > 0.2 { drafted } else { draw(&p, || rng.f64()).unwrap() }
            }),
        ];
        for (name, rule) in wrong {
            let (found, most) = chi_square(&p, |rng| {
                let drafted = draw(&q, || rng.f64()).unwrap();
                rule(drafted, rng)
            });
            assert!(found > most, "{name}: {found} of {most}");
        }
    }

    #[test]
    fn tokens_stand_as_often_as_the_distributions_overlap() {
        let (p, q) = (at(1.0, &TARGET), at(1.0, &DRAFT));
        let mut rng = fastrand::Rng::with_seed(3);
        let stood = (0..DRAWS).filter(|_| {
            let drafted = draw(&q, || rng.f64()).unwrap();
            judge(drafted, &p, &q, || rng.f64()).unwrap() == drafted
        });
        // also a token in another's place is never the drafted one, whose residual is nothing
        let overlap: f64 = p.iter().zip(&q).map(|(p, q)| f64::from(p.p.min(q.p))).sum();
        let share = stood.count() as f64 / DRAWS as f64;
        assert!((share - overlap).abs() < 0.005, "{share}, overlap {overlap}");
    }

    #[test]
    fn at_temperature_0_the_only_token_stands_and_no_other() {
        let p = [Candidate { token: 5, p: 1.0 }];
        for u in [0.0, 0.5, 0.999_999] {
            assert_eq!(judge(5, &p, &[], || u).unwrap(), 5);
            assert_eq!(judge(4, &p, &[], || u).unwrap(), 5);
            // whatever the drafter thought of it
            assert_eq!(judge(5, &p, &at(1.0, &DRAFT), || u).unwrap(), 5);
            assert_eq!(judge(1, &p, &at(1.0, &DRAFT), || u).unwrap(), 5);
        }
    }

    #[test]
    fn nonsense_never_stands_and_changes_nothing() {
        let p = at(1.0, &TARGET);
        for nonsense in [-1, 6, i32::MAX, i32::MIN] {
            for draft in [vec![], vec![Candidate { token: nonsense, p: 1.0 }], at(1.0, &DRAFT)] {
                let (found, most) = chi_square(&p, |rng| judge(nonsense, &p, &draft, || rng.f64()).unwrap());
                assert!(found < most, "{nonsense} of {} candidates: {found} of {most}", draft.len());
            }
        }
    }

    #[test]
    fn what_is_no_distribution_is_an_error() {
        let good = at(1.0, &TARGET);
        for p in [f32::NAN, f32::INFINITY, -0.1, 0.0] {
            let bad = [Candidate { token: 0, p }];
            assert!(judge(0, &bad, &[], || 0.5).is_err(), "{p}");
            assert!(judge(0, &good, &bad, || 0.5).is_err(), "{p}");
            assert!(draw(&bad, || 0.5).is_err(), "{p}");
        }
        assert!(draw(&[], || 0.5).is_err());
    }

    #[test]
    fn equal_distributions_reject_nothing_and_rounding_finds_a_token() {
        let p = at(1.0, &TARGET);
        for u in [0.0, 0.3, 0.999_999_9] {
            assert_eq!(judge(2, &p, &p, || u).unwrap(), 2);
        }
        // all of the residual is zero
        assert_eq!(pick(&p, |_| 0.0, 0.5), 0);
    }
}
