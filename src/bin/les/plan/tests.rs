#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::advice::Advice;
use super::expected::{Routing, Row, rows};
use super::typical::{Typical, hit_rate};
use les::lookahead::LEAST_PROBABILITY;

use super::*;
use crate::sim::{Ahead, Machine, Summary};

const DEVICE: Device = Device { mb_per_s: 1500.0, latency_us: 150.0, depth: 16, compute_ms: 40.0, dense_part: 0.5 };
const MIB: u64 = 1 << 20;

/// 8 layers, 8 experts per token of 1.2 MB.
fn routing() -> Routing<'static> {
    Routing::Typical(vec![8; 8], vec![vec![400_000; 3]; 8])
}

fn expected(device: &Device, mib: &[u64]) -> Vec<Row> {
    let sizes: Vec<u64> = mib.iter().map(|m| m * MIB).collect();
    rows(&routing(), device, &sizes, 1000 * MIB).unwrap()
}

#[test]
fn the_curve_is_that_of_the_readme() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let learned = readme.lines().find(|line| line.starts_with("| learned |")).unwrap();
    let percent: Vec<f64> = learned.split('|').skip(2).take(5).map(|cell| cell.trim().parse().unwrap()).collect();
    let curve = [0.05, 0.1, 0.2, 0.4, 0.6].map(|share| (1000.0 * hit_rate(share)).round() / 10.0);
    assert_eq!(curve, percent[..]);
    assert_eq!([-1.0, 0.0, 0.025, 0.8, 1.0, 2.0].map(hit_rate), [0.0, 0.0, 0.2555, 0.992, 1.0, 1.0]);
}

#[test]
fn a_typical_trace_has_the_hits_it_is_made_for() {
    for rate in [0.0, 0.3, 0.7, 0.95, 1.0] {
        let Typical { trace, slots, .. } = &Typical::new(&[8; 8], &vec![vec![1000; 3]; 8], rate).unwrap();
        let policy = || Typical::new(&[8; 8], &vec![vec![1000; 3]; 8], rate).unwrap().policy();
        let run = |ahead| trace.summary(&Machine::new(trace, policy(), *slots, &DEVICE).run(None, ahead), trace.half());
        let (without, with) = (run(Ahead::Nothing), run(Ahead::Predicted(1, LEAST_PROBABILITY)));
        assert!((without.hit_rate - rate).abs() < 0.03, "{} instead of {rate}", without.hit_rate);
        // of all but the first layer's; where nothing waits the likely ones are in time
        let in_time = rate + (1.0 - rate) * 0.51 * 7.0 / 8.0;
        assert!((with.hit_rate - in_time).abs() < 0.03, "{} instead of {in_time}", with.hit_rate);
        assert!(with.bytes_per_token >= without.bytes_per_token);
    }
}

/// The yardstick on the machine that `les sim` takes when it is told of none: what is made up comes close to what was traced.
#[test]
fn a_typical_routing_gains_by_lookahead_what_the_yardstick_does() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let line = readme.lines().find(|line| line.starts_with("| learned, reading ahead |")).unwrap();
    let traced = line.split('|').skip(2).take(5).map(|cell| cell.trim().parse::<f64>().unwrap());
    let device = Device { mb_per_s: 1500.0, latency_us: 150.0, depth: 16, compute_ms: 170.0, dense_part: 0.5 };
    let parts = (0..40).map(|layer| vec![589_824, 589_824, if layer % 2 == 0 { 589_824 } else { 860_160 }]);
    let routing = Routing::Typical(vec![8; 40], parts.collect());
    for (mib, traced) in [50, 100, 200, 400, 600].into_iter().zip(traced) {
        let row = &rows(&routing, &device, &[mib * MIB], 1000 * MIB).unwrap()[0];
        let with = row.lookahead.unwrap();
        assert!((100.0 * with.hit_rate - traced).abs() < 1.5, "{with:?} instead of {traced}");
        let in_vain = with.bytes_per_token / row.without.bytes_per_token - 1.0;
        assert!((0.01..0.06).contains(&in_vain), "{in_vain} of what is needed is read in vain");
        assert!(with.ms_per_token < row.without.ms_per_token);
    }
}

#[test]
fn auto_is_recommended_where_memory_is_what_lacks() {
    let rows = expected(&Device { mb_per_s: 100.0, ..DEVICE }, &[50, 100, 200, 400]);
    let advice = Advice::streaming(&rows, &Device { mb_per_s: 100.0, ..DEVICE }, 300 * MIB, 200 * MIB, 50 * MIB);
    assert_eq!((advice.les_cache.as_deref(), advice.cache_bytes), (Some("auto"), Some(200 * MIB)));
    assert!(advice.why.contains("waited for the device"), "{}", advice.why);
}

#[test]
fn less_than_auto_is_recommended_where_more_gains_little() {
    let device = Device { mb_per_s: 5000.0, latency_us: 50.0, compute_ms: 400.0, ..DEVICE };
    let advice = Advice::streaming(&expected(&device, &[100, 300, 600, 800]), &device, 900 * MIB, 800 * MIB, 50 * MIB);
    assert_eq!((advice.les_cache.as_deref(), advice.cache_bytes), (Some("100"), Some(100 * MIB)));
    assert!(advice.why.contains("auto would take 800 MiB") && advice.why.contains("computation is the limit"));
}

#[test]
fn lookahead_is_recommended_where_it_gains() {
    let rows = expected(&DEVICE, &[200]);
    let with = |with: Option<f64>| {
        let mut rows = rows.clone();
        let lookahead = rows[0].lookahead.unwrap();
        rows[0].lookahead =
            with.map(|times| Summary { ms_per_token: times * rows[0].without.ms_per_token, ..lookahead });
        Advice::streaming(&rows, &DEVICE, 300 * MIB, 200 * MIB, 50 * MIB).les_lookahead
    };
    assert_eq!([Some(0.9), Some(1.0), Some(1.1), None].map(with), ["auto", "auto", "0", "auto"].map(Some));
}

#[test]
fn what_does_not_fit_gets_no_recommendation() {
    let advice = Advice::streaming(&expected(&DEVICE, &[50]), &DEVICE, 49 * MIB, 50 * MIB, 50 * MIB);
    assert!(advice.les_cache.is_none() && advice.why.contains("does not fit"), "{advice:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn more_cache_is_never_slower_and_nothing_beats_the_processor(
        mb_per_s in 20.0..8000.0f64,
        compute_ms in 1.0..500.0f64,
        available in 60..1200u64,
    ) {
        let device = Device { mb_per_s, compute_ms, ..DEVICE };
        let auto = available.min(1000);
        let mut sizes = vec![30, 50, 110, 200, 400, 700, 1000, auto];
        sizes.sort_unstable();
        sizes.dedup();
        let rows = expected(&device, &sizes);
        prop_assert!(rows.is_sorted_by(|a, b| a.tokens_per_s <= b.tokens_per_s), "{rows:?}");
        for row in &rows {
            prop_assert!(row.ms() >= compute_ms - 1e-6);
            prop_assert!((row.tokens_per_s - 1e3 / row.ms()).abs() < 1e-9);
        }
        let advice = Advice::streaming(&rows, &device, available * MIB, auto * MIB, 30 * MIB);
        prop_assert!(advice.cache_bytes.unwrap() <= available * MIB);
        let chosen = rows.iter().find(|row| Some(row.cache_bytes) == advice.cache_bytes).unwrap();
        let best = rows.iter().rfind(|row| row.cache_bytes <= available * MIB).unwrap();
        prop_assert!(chosen.ms() <= 1.03 * best.ms() + 1e-6);
    }
}
