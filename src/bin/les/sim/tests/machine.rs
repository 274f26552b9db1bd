//! What takes how long, computed by hand, and what holds whatever the trace.

use les::lookahead::trace::Record;
use les::store::Lru;
use proptest::prelude::*;

use super::super::machine::{Ahead, Device, Machine, Passed};
use super::super::replay::Trace;

/// A read takes 0.5 ms and then 1 ms per 10^6 bytes; each of two layers is computed in 2 ms up to its router, and in 2 ms
/// after it.
const DEVICE: Device = Device { mb_per_s: 1000.0, latency_us: 500.0, depth: 16, compute_ms: 8.0, dense_part: 0.5 };

type Guesses = Vec<(u32, f32)>;
/// What is needed, and what is predicted.
type Told<'a> = (&'a [i32], &'a [(u32, f32)]);

/// Two layers; what layers 0, 1, 0, 1, and so on need, and what is predicted there.
fn trace(part_bytes: &[u64], passes: &[Told]) -> Trace {
    let n_expert = vec![8; 2];
    let part_bytes = vec![part_bytes.to_vec(); 2];
    let mut trace =
        Trace { model: "test".into(), passes: vec![], n_expert, part_bytes, most_used: 2, outcomes: vec![] };
    for (i, (picks, guesses)) in passes.iter().enumerate() {
        let guesses = if guesses.is_empty() { vec![] } else { vec![guesses.to_vec()] };
        let (scores, outcomes) = (vec![], vec![]);
        let record = Record { at: (i % 2) as u32, rows: 1, picks: picks.to_vec(), scores, guesses, outcomes };
        trace.push(record).unwrap();
    }
    trace
}

fn run(trace: &Trace, slots: usize, device: &Device, ahead: Ahead) -> Vec<Passed> {
    Machine::new(trace, Box::new(Lru::new(16, 1)), slots, device).run(None, ahead)
}

/// Per pass: what was missed, the 10^6 bytes read, how long it waited, and how long it took.
fn told(passed: &[Passed]) -> Vec<(usize, f64, f64, f64)> {
    let round = |x: f64| (x * 1e6).round() / 1e6;
    passed.iter().map(|p| (p.missed, p.bytes as f64 / 1e6, round(p.wait_ms), round(p.all_ms))).collect()
}

const MB: &[u64] = &[1_000_000];

#[test]
fn reads_begin_at_the_router_and_what_is_there_is_computed_first() {
    // layers of token 0: asked at 2, there at 3.5 and 4.5, each computed in 1 ms. Token 1: layer 0 has 0 and computes
    // it from 2 to 3, 2 is there at 3.5
    let trace = trace(MB, &[(&[0, 1], &[]), (&[0, 1], &[]), (&[0, 2], &[]), (&[0, 1], &[])]);
    let passed = run(&trace, 16, &DEVICE, Ahead::Nothing);
    assert_eq!(told(&passed), [(2, 2.0, 1.5, 5.5), (2, 2.0, 1.5, 5.5), (1, 1.0, 0.5, 4.5), (0, 0.0, 0.0, 4.0)]);
}

#[test]
fn one_read_at_a_time_waits_for_each() {
    // asked at 2, there at 3.5; the next is asked for then, and there at 5
    let trace = trace(MB, &[(&[0, 1], &[])]);
    let passed = run(&trace, 16, &Device { depth: 1, ..DEVICE }, Ahead::Nothing);
    assert_eq!(told(&passed), [(2, 2.0, 2.0, 6.0)]);
}

#[test]
fn an_expert_comes_whole_before_the_next_one() {
    // asked at 2; the parts of the first are there at 3.5 and 6.5, those of the second at 7.5 and 10.5. Each takes 1 ms
    let trace = trace(&[1_000_000, 3_000_000], &[(&[0, 1], &[])]);
    assert_eq!(told(&run(&trace, 16, &DEVICE, Ahead::Nothing)), [(2, 8.0, 7.5, 11.5)]);
}

#[test]
fn what_is_known_of_the_next_layer_is_read_behind_what_is_needed() {
    // layer 0 as ever, until 5.5; when its last read is over at 4.5 layer 1's begin: they are there at 6 and 7, before they are asked for at 7.5
    let trace = trace(MB, &[(&[0, 1], &[]), (&[0, 1], &[])]);
    let passed = run(&trace, 16, &DEVICE, Ahead::Oracle(1));
    assert_eq!(told(&passed), [(2, 2.0, 1.5, 5.5), (0, 2.0, 0.0, 4.0)]);
    // with nothing to compute they are late, and not read twice: at 1.5, 2.5, and at 4, 5
    let passed = run(&trace, 16, &Device { compute_ms: 0.0, ..DEVICE }, Ahead::Oracle(1));
    assert_eq!(told(&passed), [(2, 2.0, 2.5, 2.5), (2, 2.0, 2.5, 2.5)]);
}

#[test]
fn guesses_below_the_threshold_are_not_read() {
    let trace = trace(MB, &[(&[0, 1], &[(3, 0.9), (0, 0.3)]), (&[0, 1], &[])]);
    // 3 is read in vain, from 5 to 6: it is not in the way of what is asked for at 7.5
    let passed = run(&trace, 16, &DEVICE, Ahead::Predicted(1, 0.6));
    assert_eq!(told(&passed), [(2, 2.0, 1.5, 5.5), (2, 3.0, 1.5, 5.5)]);
    // 0 is there at 7 and computed from 7.5 to 8.5; 1 is there at 9
    let passed = run(&trace, 16, &DEVICE, Ahead::Predicted(1, 0.3));
    assert_eq!(told(&passed), [(2, 2.0, 1.5, 5.5), (1, 3.0, 0.5, 4.5)]);
}

#[test]
fn guesses_take_no_slot_from_what_is_needed_now() {
    let trace = trace(MB, &[(&[0, 1], &[(0, 0.9), (1, 0.9)]), (&[0, 1], &[])]);
    for slots in [2, 3, 4] {
        let passed = run(&trace, slots, &DEVICE, Ahead::Predicted(1, 0.6));
        assert_eq!(passed.iter().map(|p| p.missed).collect::<Vec<_>>(), [2, 4 - slots], "{slots} slots");
    }
}

#[test]
fn a_guess_keeps_its_slot_until_its_layer_has_passed_but_not_from_those_who_need_it() {
    // 5 is never used. While it is pinned, two of three slots are left; where a pass needs three, it gives its own
    let guess: &[(u32, f32)] = &[(5, 0.9)];
    let three = trace(MB, &[(&[0, 1], guess), (&[0, 1, 2], &[]), (&[0], &[]), (&[0, 1, 2], &[])]);
    let passed = run(&three, 3, &DEVICE, Ahead::Predicted(1, 0.6));
    assert_eq!(passed.iter().map(|p| p.missed).collect::<Vec<_>>(), [2, 3, 1, 1]);
    let two = trace(MB, &[(&[0, 1], guess), (&[0], &[]), (&[0, 1], &[]), (&[0], &[])]);
    let without = run(&two, 4, &DEVICE, Ahead::Nothing);
    let with = run(&two, 4, &DEVICE, Ahead::Predicted(1, 0.6));
    assert_eq!([without, with].map(|p| p.iter().map(|p| p.missed).sum::<usize>()), [3, 3]);
}

fn passes() -> impl Strategy<Value = Vec<(Vec<i32>, Guesses)>> {
    let picks = proptest::collection::btree_set(0..8i32, 2).prop_map(|set| set.into_iter().collect());
    let guesses = proptest::collection::btree_map(0..8u32, 0.05..1.0f32, 1..4).prop_map(|g| g.into_iter().collect());
    proptest::collection::vec((picks, guesses), 2..60)
}

fn device() -> impl Strategy<Value = Device> {
    (10.0..5000.0f64, 0.0..2000.0f64, 1..20usize, 0.0..20.0f64, 0.0..=1.0f64).prop_map(
        |(mb_per_s, latency_us, depth, compute_ms, dense_part)| Device {
            mb_per_s,
            latency_us,
            depth,
            compute_ms,
            dense_part,
        },
    )
}

proptest! {
    #[test]
    fn nothing_is_faster_than_the_processor_or_the_device(passes in passes(), device in device(), slots in 2..17usize) {
        let passes: Vec<Told> = passes.iter().enumerate()
            .map(|(i, (picks, guesses))| (&picks[..], if i % 2 == 0 { &guesses[..] } else { &[] }))
            .collect();
        let trace = trace(&[300_000, 700_000], &passes);
        let run = |ahead| run(&trace, slots, &device, ahead);
        let took = |passed: &[Passed]| passed.iter().map(|p| p.all_ms).sum::<f64>();
        let runs = [Ahead::Nothing, Ahead::Predicted(1, 0.6), Ahead::Oracle(1), Ahead::Oracle(3)].map(run);
        for passed in &runs {
            let waited = passed.iter().map(|p| p.wait_ms).sum::<f64>();
            let bytes = passed.iter().map(|p| p.bytes).sum::<u64>() as f64;
            let compute = device.compute_ms / 2.0 * passes.len() as f64;
            prop_assert!((took(passed) - compute - waited).abs() < 1e-6, "{} is not {compute} and {waited}", took(passed));
            prop_assert!(took(passed) >= bytes / device.mb_per_s / 1e3 - 1e-6);
            prop_assert!(passed.iter().all(|p| p.missed <= p.needed && p.wait_ms >= 0.0));
            // whatever is needed for the first time must be read
            let first = passes.iter().enumerate().flat_map(|(i, p)| p.0.iter().map(move |e| (i % 2, e)));
            let first = first.collect::<std::collections::HashSet<_>>().len();
            prop_assert!(bytes >= 1e6 * first as f64);
        }
    }

    /// It reads the same, only earlier.
    #[test]
    fn an_oracle_that_evicts_nothing_is_never_slower(passes in passes(), device in device()) {
        let passes: Vec<Told> = passes.iter().map(|(picks, _)| (&picks[..], &[][..])).collect();
        let trace = trace(&[300_000, 700_000], &passes);
        let took = |ahead| run(&trace, 16, &device, ahead).iter().map(|p| p.all_ms).sum::<f64>();
        prop_assert!(took(Ahead::Oracle(1)) <= took(Ahead::Nothing) + 1e-6);
    }
}
