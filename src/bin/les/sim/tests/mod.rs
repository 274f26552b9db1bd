#![allow(clippy::unwrap_used)]

mod machine;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use les::lookahead::trace::Record;
use proptest::prelude::*;

use super::*;

const DEVICE: Device = Device { mb_per_s: 1000.0, latency_us: 400.0, depth: 16, compute_ms: 8.0, dense_part: 0.5 };

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/docmoe-routing.jsonl")
}

/// Two layers; the picks of layers 0, 1, 0, 1, and so on.
fn trace(n_expert: usize, picks: &[Vec<i32>]) -> Trace {
    let (model, part_bytes) = ("test".into(), vec![vec![10], vec![10, 10]]);
    let mut trace =
        Trace { model, passes: vec![], n_expert: vec![n_expert; 2], part_bytes, most_used: 2, outcomes: vec![] };
    for (i, picks) in picks.iter().enumerate() {
        let scores =
            vec![(0..n_expert as i32).map(|e| if picks.contains(&e) { 1.5 } else { -0.1 * e as f32 }).collect()];
        let (picks, guesses, outcomes) = (picks.clone(), vec![], vec![]);
        let record = Record { at: (i % 2) as u32, rows: 1, picks, scores, guesses, outcomes };
        trace.push(record).unwrap();
    }
    trace
}

fn misses(kind: Kind, trace: &Trace, slots: usize) -> usize {
    kind.replay(trace, slots, &DEVICE, Ahead::Nothing).iter().map(|p| p.missed).sum()
}

/// The trace is short, so at one size or another the average that happens to suit it is better: over all sizes none is.
#[test]
fn the_learned_values_are_about_as_good_as_the_best_average_wherever_that_is() {
    let trace = Trace::read(&path()).unwrap();
    let rows: Vec<Row> =
        [0.1, 0.2, 0.4, 0.6].iter().flat_map(|&c| compare(&trace, c, Kind::value_variants(), &DEVICE, None)).collect();
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
fn an_oracle_waits_less_at_every_size() {
    let trace = Trace::read(&path()).unwrap();
    // as fast as it computes, at about half of the hits
    let device = Device { mb_per_s: 300.0, latency_us: 100.0, ..DEVICE };
    for cache in [0.1, 0.2, 0.4, 0.6] {
        for row in compare(&trace, cache, &[Kind::Lru, Kind::Learned], &device, Some((1, 0.6))) {
            let oracle = row.oracle.unwrap()[0];
            assert!(row.lookahead.is_none(), "nothing was predicted in this trace");
            assert!(oracle.wait_ms_per_token < 0.8 * row.second_half.wait_ms_per_token, "{row:?}");
            assert!(oracle.ms_per_token >= 8.0, "{row:?}");
        }
    }
}

#[test]
fn what_is_summed_up() {
    let picks = [vec![0, 1], vec![2, 3], vec![0, 1], vec![2, 4]];
    let trace = trace(8, &picks);
    let passed = Kind::Lru.replay(&trace, 8, &DEVICE, Ahead::Nothing);
    assert_eq!(passed.iter().map(|p| p.missed).collect::<Vec<_>>(), [2, 2, 0, 1]);
    let whole = trace.summary(&passed, 0);
    assert!((whole.hit_rate - 3.0 / 8.0).abs() < 1e-9);
    assert!((whole.bytes_per_token - 40.0).abs() < 1e-9);
    // the second token misses one expert, which arrives while the other one's first part is computed, in 0.5 ms
    let second = trace.summary(&passed, 1);
    assert!((second.hit_rate - 0.75).abs() < 1e-9 && (second.bytes_per_token - 20.0).abs() < 1e-9);
    assert_eq!((second.wait_ms_per_token, second.ms_per_token), (0.0, 8.0));
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
    let rows: Vec<Row> = [0.1, 0.3]
        .iter()
        .flat_map(|&c| compare(&trace, c, &[Kind::Lru, Kind::Optimal], &DEVICE, Some((1, 0.6))))
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("a.svg");
    plot::draw(&svg, "t<&>itle", &rows).unwrap();
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("optimal") && svg.contains("t&lt;&amp;&gt;itle"), "{svg}");
    assert!(plot::draw(&dir.path().join("no/where.svg"), "", &rows).is_err());
    for table in [table::policies(&rows).unwrap(), table::lookahead(&rows).unwrap()] {
        assert_eq!(table.lines().filter(|l| l.contains(" optimal ") && l.contains("% optimal")).count(), 2, "{table}");
        let width = table.lines().next_back().unwrap().len();
        assert!(table.lines().all(|l| l.is_empty() || l.len() == width || l.len() == width + 1), "{table}");
    }
    // this trace has no guesses
    assert!(rows.iter().all(|r| r.lookahead.is_none() && r.oracle.is_some()));
    assert!(table::lookahead(&rows).unwrap().lines().next_back().unwrap().contains("   -         -        -"));
}

#[test]
fn what_became_of_the_predictions_is_summed_up() {
    use les::lookahead::{GateMass, Recall};
    let mut trace = trace(8, &[]);
    assert_eq!(table::outcomes(&trace.outcomes).unwrap(), "");
    let near = Outcome {
        recall: Recall { picks: 4, at_k: 3, at_2k: 4 },
        gate_mass: GateMass { tokens: 2, at_k: 1.7, at_2k: 2.0 },
    };
    let far = Outcome { recall: Recall { picks: 4, at_k: 2, at_2k: 3 }, ..Outcome::default() };
    for outcomes in [vec![near], vec![near, far], vec![]] {
        let (scores, guesses) = (vec![], vec![]);
        trace.push(Record { at: 0, rows: 2, picks: vec![0, 1, 2, 3], scores, guesses, outcomes }).unwrap();
    }
    let table = table::outcomes(&trace.outcomes).unwrap();
    let cells: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(cells[0], ["1", "ahead", "8", "75.0%", "100.0%", "85.0%", "100.0%"]);
    assert_eq!(cells[1], ["2", "ahead", "4", "50.0%", "75.0%", "-", "-"]);
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
