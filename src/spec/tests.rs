//! The choice of widths, against a device and a drafter that are simulated.

use super::{Mode, Step, Widths};

const N_MAX: usize = 7;

/// A device and a drafter, whose times and tokens scatter.
#[derive(Debug, Clone, Copy)]
struct World {
    /// How likely each token is to stand when those before it do.
    acceptance: f64,
    /// What a token more takes, as a part of a step without drafts.
    rise: f64,
    /// Likewise a draft.
    draft: f64,
    /// By which part times differ from that, at most.
    scatter: f64,
}

const PLAIN_NS: f64 = 2e8;
/// Half the tokens are easier to draft than others.
const SPREAD: f64 = 0.15;

struct Run {
    rng: fastrand::Rng,
    widths: Widths,
    ns: f64,
    tokens: u64,
    steps: u64,
}

impl Run {
    fn new(mode: Mode) -> Self {
        Self { rng: fastrand::Rng::with_seed(11), widths: Widths::new(mode, N_MAX), ns: 0.0, tokens: 0, steps: 0 }
    }

    fn step(&mut self, world: World, confidence: impl Fn(f64) -> Option<f32>) {
        // at the beginning nothing is cached
        let cold = 1.0 + 4.0 / (1.0 + self.steps as f64).powi(2);
        self.steps += 1;
        let scatter = cold * (1.0 + world.scatter * (2.0 * self.rng.f64() - 1.0));
        let drafted = self.widths.draft();
        let chances: Vec<f64> = (0..drafted)
            .map(|_| (world.acceptance + if self.rng.bool() { SPREAD } else { -SPREAD }).clamp(0.0, 1.0))
            .map(|chance| if world.acceptance == 0.0 { 0.0 } else { chance })
            .collect();
        let confidences: Vec<_> = chances.iter().map(|chance| confidence(*chance)).collect();
        let verified = self.widths.verify(&confidences);
        let stood = chances[..verified].iter().take_while(|chance| self.rng.f64() < **chance).count();
        let draft_ns = if drafted > 0 { world.draft * PLAIN_NS } else { 0.0 };
        let step_ns = PLAIN_NS * scatter * (1.0 + world.rise * verified as f64);
        let step = Step { drafted, verified, stood, draft_ns: draft_ns as u64, step_ns: step_ns as u64, more: 0 };
        self.widths.done(step, None);
        self.ns += draft_ns + step_ns;
        self.tokens += 1 + stood as u64;
    }

    fn until(mut self, tokens: u64, world: World) -> Self {
        let end = self.tokens + tokens;
        while self.tokens < end {
            self.step(world, |_| None);
        }
        self
    }

    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.ns * 1e9
    }
}

/// Tokens that a step yields on average, where each stands with this `chance`.
fn tokens(width: usize, chance: f64) -> f64 {
    (0..=width as i32).map(|place| chance.powi(place)).sum()
}

/// Tokens per second that a width reaches on average.
fn rate(width: usize, world: World) -> f64 {
    let World { acceptance, rise, draft, .. } = world;
    let chance = |more: f64| if acceptance == 0.0 { 0.0 } else { (acceptance + more).clamp(0.0, 1.0) };
    let stands = (chance(SPREAD) + chance(-SPREAD)) / 2.0;
    let tokens = tokens(width, stands);
    let draft = if width > 0 { draft } else { 0.0 };
    tokens / (PLAIN_NS * (1.0 + rise * width as f64 + draft)) * 1e9
}

#[test]
fn adaptive_is_about_as_fast_as_the_best_width_and_never_loses_much() {
    let mut slow = Vec::new();
    for acceptance in [0.0, 0.3, 0.6, 0.8, 0.95] {
        for rise in [0.02, 0.1, 0.3, 0.6, 0.95] {
            for (draft, scatter) in [(0.0, 0.1), (0.05, 0.1), (0.3, 0.1), (0.0, 0.35), (0.05, 0.35)] {
                let world = World { acceptance, rise, draft, scatter };
                let fixed: Vec<f64> = (0..=N_MAX).map(|n| rate(n, world)).collect();
                let adaptive = Run::new(Mode::Adaptive).until(4000, world).tokens_per_s();
                let best = fixed.iter().copied().fold(0.0, f64::max);
                if adaptive < 0.95 * fixed[0] || adaptive < 0.91 * best {
                    slow.push(format!("{world:?}: {adaptive:.2} of {fixed:.2?}"));
                }
            }
        }
    }
    assert!(slow.is_empty(), "{slow:#?}");
}

/// What a step takes and reads when so many tokens are verified: a model of the 35B-A3B shape.
#[derive(Debug, Clone, Copy)]
struct Streamed {
    /// Nanoseconds without what is read, and by which part each token more makes them more.
    rest: (f64, f64),
    /// Likewise bytes.
    bytes: (f64, f64),
}

const SMALL_CACHE: Streamed = Streamed { rest: (8e7, 0.35), bytes: (2.84e8, 1.15) };
const MIDDLE_CACHE: Streamed = Streamed { rest: (1.5e8, 0.5), bytes: (8.5e7, 1.2) };
const LARGE_CACHE: Streamed = Streamed { rest: (1.55e8, 0.6), bytes: (2.7e7, 1.3) };
const NS_PER_BYTE: f64 = 0.55;

impl Streamed {
    fn rest(self, width: usize) -> f64 {
        self.rest.0 * (1.0 + self.rest.1 * (width as f64).powf(0.85))
    }

    fn bytes(self, width: usize) -> f64 {
        self.bytes.0 * (1.0 + self.bytes.1 * (width as f64).powf(0.85))
    }

    fn ns(self, width: usize) -> f64 {
        self.rest(width) + NS_PER_BYTE * self.bytes(width)
    }

    /// Tokens per nanosecond that are to be expected of the steps that are taken after 100 tokens, until there are `n`: the median of
    /// some runs. At the beginning, when nothing is cached, more is read.
    fn adaptive(self, acceptance: f64, n: usize, told: bool) -> f64 {
        let speed = |seed: u64| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut widths = Widths::new(Mode::Adaptive, N_MAX);
            let (mut at, mut expected, mut took) = (0, 0.0, 0.0);
            while at < n {
                // about normal
                let mut differs = |part: f64| 1.0 + part * 2.0 * (rng.f64() + rng.f64() + rng.f64() - 1.5);
                let cold = 1.0 + 2.0 * f64::exp(-(at as f64) / 10.0) + 0.15 * f64::exp(-(at as f64) / 100.0);
                let (all, rest) = (cold * differs(0.12), differs(0.15));
                let more =
                    |width: usize| self.bytes(width) - width.checked_sub(1).map_or(0.0, |before| self.bytes(before));
                let reads = (0..=N_MAX).map(|width| all * differs(0.2) * more(width));
                let reads: Vec<f64> = reads
                    .scan(0.0, |sum, more| {
                        *sum += more;
                        Some(*sum)
                    })
                    .collect();
                let drafted = widths.draft();
                let verified = widths.verify(&vec![None; drafted]);
                let stood = (0..verified).take_while(|_| rng.f64() < acceptance).count();
                let step_ns = (self.rest(verified) * rest + NS_PER_BYTE * reads[verified]) as u64;
                let reads: Vec<u64> = reads[..=verified].iter().map(|bytes| *bytes as u64).collect();
                let step = Step { drafted, verified, stood, draft_ns: 0, step_ns, more: 0 };
                widths.done(step, told.then_some(&reads));
                if at >= 100 {
                    expected += tokens(verified, acceptance);
                    took += self.ns(verified);
                }
                at += 1 + stood;
            }
            expected / took
        };
        let mut speeds: Vec<f64> = (0..31).map(speed).collect();
        speeds.sort_by(f64::total_cmp);
        speeds[15]
    }
}

#[test]
fn on_a_model_that_streams_it_finds_out_within_some_tokens() {
    for streamed in [SMALL_CACHE, MIDDLE_CACHE, LARGE_CACHE] {
        for acceptance in [0.3, 0.6, 0.8, 0.95] {
            let fixed: Vec<f64> = (0..=N_MAX).map(|width| tokens(width, acceptance) / streamed.ns(width)).collect();
            let best = fixed.iter().copied().fold(0.0, f64::max);
            for (told, of_none, of_best) in [(true, 0.98, 0.96), (false, 0.96, 0.95)] {
                let adaptive = streamed.adaptive(acceptance, 300, told);
                let slow = adaptive < of_none * fixed[0] || adaptive < of_best * best;
                assert!(!slow, "{streamed:?}, {acceptance}, {told}: {adaptive} of {fixed:?}");
            }
        }
    }
}

#[test]
fn what_the_drafter_thinks_of_its_tokens_is_of_use() {
    let world = World { acceptance: 0.5, rise: 0.5, draft: 0.02, scatter: 0.1 };
    let of = |confidence: fn(f64) -> Option<f32>| {
        let mut run = Run::new(Mode::Adaptive);
        while run.tokens < 4000 {
            run.step(world, confidence);
        }
        run.tokens_per_s()
    };
    // 0.65 or 0.35: with the first alone it pays
    let (told, untold) = (of(|chance| Some(chance as f32)), of(|_| None));
    assert!(told > 1.01 * untold, "{told} {untold}");
}

#[test]
fn it_changes_its_mind_when_conditions_change() {
    let bad = World { acceptance: 0.1, rise: 0.6, draft: 0.05, scatter: 0.1 };
    let good = World { acceptance: 0.95, rise: 0.1, draft: 0.05, scatter: 0.1 };
    let run = Run::new(Mode::Adaptive).until(500, bad);
    let (tokens, ns) = (run.tokens, run.ns);
    let run = run.until(1500, good);
    let since = (run.tokens - tokens) as f64 / (run.ns - ns) * 1e9;
    assert!(since > 0.6 * rate(N_MAX, good), "found out too late: {since}");
    let (tokens, ns) = (run.tokens, run.ns);
    let run = run.until(500, bad);
    let since = (run.tokens - tokens) as f64 / (run.ns - ns) * 1e9;
    assert!(since > 0.8 * rate(0, bad), "went on too long: {since}");
}

#[test]
fn modes_say_how_much_is_drafted_and_verified() {
    let mut off = Widths::new(Mode::Off, 4);
    assert_eq!((off.draft(), off.verify(&[None; 4])), (0, 0));
    let mut three = Widths::new(Mode::Fixed(3), 4);
    assert_eq!((three.draft(), three.verify(&[None; 4]), three.verify(&[None; 2])), (3, 3, 2));
    // more than the drafter can
    let mut nine = Widths::new(Mode::Fixed(9), 4);
    assert_eq!((nine.draft(), nine.verify(&[None; 9])), (4, 4));
    // a drafter without tokens
    let mut none = Widths::new(Mode::Adaptive, 0);
    for _ in 0..3 {
        assert_eq!((none.draft(), none.verify(&[])), (0, 0));
        none.done(Step { step_ns: 100, ..Step::default() }, None);
    }
}

#[test]
fn reports_that_make_no_sense_do_no_harm() {
    let mut widths = Widths::new(Mode::Adaptive, 2);
    for step_ns in [0, u64::MAX, 1] {
        let drafted = widths.draft();
        let verified = widths.verify(&vec![Some(f32::NAN); drafted]);
        widths.done(Step { drafted: 99, verified, stood: 77, draft_ns: u64::MAX, step_ns, more: 9 }, None);
        widths.done(Step { drafted: 0, verified: 2, stood: 1, draft_ns: 0, step_ns, more: 0 }, None);
    }
    assert!(widths.draft() <= 2);
}

/// A step that yields twice the tokens in twice the time costs as much as one that does not.
#[test]
fn tokens_beside_those_that_stood_are_counted_and_paid_for() {
    let cost_of = |more: usize| {
        let mut widths = Widths::new(Mode::Fixed(2), 2);
        let tokens = 2 + more as u64;
        for _ in 0..50 {
            widths.verify(&[None, None]);
            widths.done(Step { drafted: 2, verified: 2, stood: 1, draft_ns: 0, step_ns: 100 * tokens, more }, None);
        }
        assert_eq!(widths.run()[2].tokens, 50 * tokens);
        widths.cost_of(2)
    };
    assert_eq!(cost_of(0), cost_of(2));
}
