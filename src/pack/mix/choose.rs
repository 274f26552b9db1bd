//! Which of its candidates each item gets, so that the harm is least in so many bytes: a knapsack.
//!
//! Of each item only the candidates on the lower convex hull of harm over bytes are used. From the cheapest of each item on,
//! the steps along the hulls are taken in the order of the harm that they save per byte: as far as the first that does
//! not fit, this is the best that there is for those bytes. What is left is filled with the next ones that fit. The sum is never
//! worse than the best possible one by more than one step.

/// What an item may become.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate<T> {
    /// What it is.
    pub what: T,
    /// What it takes.
    pub bytes: u64,
    /// What it costs otherwise; finite.
    pub harm: f64,
}

/// One candidate for each item, of `budget` bytes in all at the most.
///
/// # Errors
/// The least budget that is enough, when this one is not.
pub fn choose<T: Copy>(items: &[Vec<Candidate<T>>], budget: u64) -> Result<Vec<Candidate<T>>, u64> {
    let hulls: Vec<Vec<Candidate<T>>> = items.iter().map(|candidates| hull(candidates)).collect();
    let least: u64 = hulls.iter().filter_map(|hull| hull.first()).map(|c| c.bytes).sum();
    let mut left = budget.checked_sub(least).ok_or(least)?;

    let mut steps = Vec::new();
    for (item, hull) in hulls.iter().enumerate() {
        for (from, pair) in hull.windows(2).enumerate() {
            if let [a, b] = pair {
                steps.push((saved(a, b), item, from));
            }
        }
    }
    // along a hull what is saved per byte falls, but for rounding; equal ones in their order, so that the choice is always
    // the same
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut at = vec![0; hulls.len()];
    for (_, item, from) in steps {
        let more = hulls[item][from + 1].bytes - hulls[item][from].bytes;
        if at[item] == from && more <= left {
            at[item] += 1;
            left -= more;
        }
    }
    Ok(hulls.iter().zip(at).filter_map(|(hull, at)| hull.get(at)).copied().collect())
}

/// What a step saves per byte.
fn saved<T>(a: &Candidate<T>, b: &Candidate<T>) -> f64 {
    (a.harm - b.harm) / (b.bytes - a.bytes) as f64
}

/// The lower convex hull: ascending bytes, falling harm, and each step saves less per byte than the one before.
fn hull<T: Copy>(candidates: &[Candidate<T>]) -> Vec<Candidate<T>> {
    let mut sorted = candidates.to_vec();
    sorted.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.harm.total_cmp(&b.harm)));
    let mut hull: Vec<Candidate<T>> = Vec::new();
    for c in sorted {
        if hull.last().is_some_and(|last| c.harm >= last.harm) {
            continue;
        }
        while let [.., a, b] = hull[..]
            && saved(&a, &b) <= saved(&b, &c)
        {
            hull.pop();
        }
        hull.push(c);
    }
    hull
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Items = Vec<Vec<Candidate<usize>>>;

    fn items() -> impl Strategy<Value = Items> {
        let item = prop::collection::vec((1_u64..30, 0_u32..100), 1..5);
        let named = |item: Vec<(u64, u32)>| {
            let candidate = |(what, (bytes, harm))| Candidate { what, bytes, harm: f64::from(harm) };
            item.into_iter().enumerate().map(candidate).collect()
        };
        prop::collection::vec(item.prop_map(named), 1..6)
    }

    /// The least harm that there is, or `None`.
    fn brute(items: &[Vec<Candidate<usize>>], budget: u64) -> Option<f64> {
        let Some((first, rest)) = items.split_first() else { return Some(0.0) };
        let with = |c: &Candidate<usize>| Some(c.harm + brute(rest, budget.checked_sub(c.bytes)?)?);
        first.iter().filter_map(with).min_by(f64::total_cmp)
    }

    proptest! {
        #[test]
        fn within_one_step_of_the_best_and_never_above_the_budget(items in items(), budget in 1_u64..120) {
            let best = brute(&items, budget);
            match choose(&items, budget) {
                Err(least) => {
                    prop_assert!(best.is_none() && least > budget);
                    prop_assert!(brute(&items, least).is_some() && choose(&items, least).is_ok());
                }
                Ok(chosen) => {
                    prop_assert_eq!(chosen.len(), items.len());
                    prop_assert!(chosen.iter().zip(&items).all(|(c, item)| item.contains(c)));
                    prop_assert!(chosen.iter().map(|c| c.bytes).sum::<u64>() <= budget);
                    let harm: f64 = chosen.iter().map(|c| c.harm).sum();
                    let steps = items.iter().flat_map(|item| hull(item).windows(2).map(|w| w[0].harm - w[1].harm).collect::<Vec<_>>());
                    let step = steps.max_by(f64::total_cmp).unwrap_or(0.0);
                    prop_assert!(harm <= best.unwrap() + step, "{} instead of {:?}", harm, best);
                    // with room for all there is nothing left to gain
                    let rooms: u64 = items.iter().map(|item| item.iter().map(|c| c.bytes).max().unwrap()).sum();
                    if budget >= rooms {
                        prop_assert_eq!(harm, best.unwrap());
                    }
                }
            }
        }
    }

    #[test]
    fn what_saves_most_per_byte_comes_first() {
        let item = |harms: [f64; 3]| {
            let candidate = |(what, harm)| Candidate { what, bytes: [10, 20, 30][what], harm };
            harms.into_iter().enumerate().map(candidate).collect::<Vec<_>>()
        };
        // the middle one of the second is above the line from the first to the last
        let items = [item([9.0, 4.0, 3.0]), item([8.0, 7.0, 0.0])];
        let chosen = |budget| choose(&items, budget).unwrap().iter().map(|c| c.what).collect::<Vec<_>>();
        assert_eq!(chosen(20), [0, 0]);
        assert_eq!(chosen(30), [1, 0]);
        // what is next does not fit, what comes after it does
        assert_eq!(chosen(40), [2, 0]);
        assert_eq!(chosen(50), [1, 2]);
        assert_eq!(chosen(1000), [2, 2]);
        assert_eq!(choose(&items, 19), Err(20));
    }
}
