#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use les::lookahead::trace::Record;
use proptest::prelude::*;

use super::*;

const DEVICE: Device = Device { mb_per_s: 1000.0, latency_us: 100.0, compute_ms: 8.0 };

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/docmoe-routing.jsonl")
}

/// Two layers; the picks of layers 0, 1, 0, 1, and so on.
fn trace(n_expert: usize, picks: &[Vec<i32>]) -> Trace {
    let mut trace =
        Trace { model: "test".into(), passes: vec![], n_expert: vec![n_expert; 2], bytes: vec![10, 20], most_used: 2 };
    for (i, picks) in picks.iter().enumerate() {
        let scores =
            vec![(0..n_expert as i32).map(|e| if picks.contains(&e) { 1.5 } else { -0.1 * e as f32 }).collect()];
        trace.push(Record { at: (i % 2) as u32, rows: 1, picks: picks.clone(), scores }).unwrap();
    }
    trace
}

fn misses(kind: Kind, trace: &Trace, slots: usize) -> usize {
    kind.replay(trace, slots).iter().map(|m| m.missed).sum()
}

/// The trace is short, so at one size or another the average that happens to suit it is better: over all sizes none is.
#[test]
fn the_learned_values_are_about_as_good_as_the_best_average_wherever_that_is() {
    let trace = Trace::read(&path()).unwrap();
    let rows: Vec<Row> =
        [0.1, 0.2, 0.4, 0.6].iter().flat_map(|&c| compare(&trace, c, Kind::value_variants(), &DEVICE)).collect();
    let hits =
        |kind: Kind| rows.iter().filter(|r| r.policy == kind).map(|r| 25.0 * r.second_half.hit_rate).sum::<f64>();
    let learned = hits(Kind::Learned);
    for &kind in Kind::value_variants().iter().filter(|&&k| k != Kind::Optimal) {
        assert!(learned > hits(kind) - 0.5, "{learned} is less than {} of {kind:?}", hits(kind));
    }
    assert!(learned > hits(Kind::Lru) + 2.0);
    assert!(hits(Kind::Optimal) > learned);
}

#[test]
fn what_is_summed_up() {
    let picks = [vec![0, 1], vec![2, 3], vec![0, 1], vec![2, 4]];
    let trace = trace(8, &picks);
    let missed = Kind::Lru.replay(&trace, 8);
    assert_eq!(missed.iter().map(|m| m.missed).collect::<Vec<_>>(), [2, 2, 0, 1]);
    let whole = trace.summary(&missed, 0, &DEVICE);
    assert!((whole.hit_rate - 3.0 / 8.0).abs() < 1e-9);
    assert!((whole.bytes_per_token - 40.0).abs() < 1e-9);
    // a miss in layer 1 waits for the device less the half of that layer's 4 ms that is there to compute
    assert!((trace.summary(&missed, 1, &Device { latency_us: 5000.0, ..DEVICE }).wait_ms_per_token - 3.0).abs() < 1e-3);
    assert!(trace.summary(&missed, 1, &DEVICE).wait_ms_per_token == 0.0);
}

#[test]
fn a_pass_may_need_more_than_there_is() {
    let picks: Vec<Vec<i32>> = (0..6).map(|_| (0..8).collect()).collect();
    let trace = trace(8, &picks);
    for &kind in Kind::value_variants() {
        assert!(misses(kind, &trace, 3) >= 6 * 8 - 3 * 5, "{kind:?}");
    }
}

#[test]
fn a_picture_and_a_table_of_everything() {
    let trace = Trace::read(&path()).unwrap();
    let rows: Vec<Row> =
        [0.1, 0.3].iter().flat_map(|&c| compare(&trace, c, &[Kind::Lru, Kind::Optimal], &DEVICE)).collect();
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("a.svg");
    plot::draw(&svg, "t<&>itle", &rows).unwrap();
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("optimal") && svg.contains("t&lt;&amp;&gt;itle"), "{svg}");
    assert!(plot::draw(&dir.path().join("no/where.svg"), "", &rows).is_err());
    let table = table(&rows).unwrap();
    assert_eq!(table.lines().filter(|l| l.contains(" optimal ") && l.contains("% optimal")).count(), 2, "{table}");
}

#[test]
fn sizes_are_percentages() {
    assert_eq!(parse_part("12.5%"), Ok(0.125));
    assert_eq!(parse_part("100"), Ok(1.0));
    assert!(["", "%", "0%", "101%", "-5%", "NaN", "x"].iter().all(|t| parse_part(t).is_err()));
}

fn picks() -> impl Strategy<Value = Vec<Vec<i32>>> {
    let pass = proptest::collection::btree_set(0..12i32, 2).prop_map(|set| set.into_iter().collect());
    proptest::collection::vec(pass, 2..120)
}

proptest! {
    #[test]
    fn nothing_is_better_than_optimal(picks in picks(), slots in 2..24usize) {
        let trace = trace(12, &picks);
        let least = misses(Kind::Optimal, &trace, slots);
        for &kind in Kind::value_variants() {
            prop_assert!(misses(kind, &trace, slots) >= least, "{:?}", kind);
        }
    }

    #[test]
    fn lru_is_that_of_the_textbook(picks in picks(), slots in 2..24usize) {
        let mut order: Vec<(usize, i32)> = Vec::new();
        let mut missed = 0;
        for (i, picks) in picks.iter().enumerate() {
            // those that are there are used first: nothing that the pass needs may go for the rest of it
            let (there, absent): (Vec<i32>, Vec<i32>) = picks.iter().partition(|&&e| order.contains(&(i % 2, e)));
            missed += absent.len();
            for e in there.into_iter().chain(absent) {
                order.retain(|&x| x != (i % 2, e));
                order.push((i % 2, e));
            }
            order.drain(..order.len().saturating_sub(slots));
        }
        prop_assert_eq!(misses(Kind::Lru, &trace(12, &picks), slots), missed);
    }

    #[test]
    fn no_policy_gives_up_while_something_may_go(picks in picks(), slots in 2..24usize) {
        // the replay would read what it finds no slot for again and again
        let trace = trace(12, &picks);
        let distinct = trace.passes.iter().flat_map(|p| p.needs.iter().map(|&e| (p.at, e)));
        let distinct = distinct.collect::<std::collections::HashSet<_>>().len();
        for &kind in Kind::value_variants() {
            prop_assert!(misses(kind, &trace, 24) == distinct, "{:?}", kind);
            prop_assert!(misses(kind, &trace, slots) >= distinct, "{:?}", kind);
        }
    }
}
