//! Drafts in a store.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::super::testing::index;
use super::super::{Acquired, Ask, BlockId, Plan, State, Store, Valued};

const NEED: Ask = Ask { guess: false, draft: false };
const DRAFT: Ask = Ask { guess: false, draft: true };
const GUESS: Ask = Ask { guess: true, draft: true };
const LAYERS: u32 = 8;
const EXPERTS: u32 = 64;
const PARTS: u32 = 3;

/// 1536 blocks of one class, in so many slots.
fn store(slots: u64) -> Store {
    let plan = Plan::new(&index(LAYERS, EXPERTS.into(), 2, &[512; 3]), 512, slots * 512 * 2).unwrap();
    assert_eq!((plan.classes.len(), plan.classes[0].slot_bytes), (1, 1024));
    Store::new(plan.clone(), Box::new(Valued::new(&plan)))
}

/// Asks for a block, which comes at once. Answers whether it was read.
fn get(s: &mut Store, block: BlockId, ask: Ask) -> bool {
    match s.acquire_as(block, ask) {
        Acquired::Ready => false,
        Acquired::Reserved => {
            s.filled(block);
            true
        }
        other => panic!("{other:?}"),
    }
}

/// A store whose slots all have what certain rows wanted.
fn full(slots: u32) -> Store {
    let mut s = store(slots.into());
    s.layer_begins(1);
    (0..slots).for_each(|b| assert!(get(&mut s, b, NEED)));
    s
}

fn ring(s: &Store) -> (u32, u32) {
    s.scratch.len_and_most(0)
}

fn has(s: &Store, block: BlockId) -> bool {
    s.state(block) == State::Ready
}

/// The certain row picks among a few experts, mostly; the drafts among all.
struct Simulation {
    store: Store,
    random: fastrand::Rng,
    pass: u32,
    /// Blocks that were read for the certain row, and for drafts alone.
    reads: [u64; 2],
    /// Of the pass, what drafts alone wanted.
    wanted: Vec<BlockId>,
}

impl Simulation {
    fn new(slots: u64) -> Self {
        let random = fastrand::Rng::with_seed(7);
        Self { store: store(slots), random, pass: 0, reads: [0; 2], wanted: Vec::new() }
    }

    /// A pass of one certain row and so many `drafts`.
    fn pass(&mut self, drafts: usize) {
        self.pass += 1;
        self.wanted.clear();
        let s = &mut self.store;
        for layer in 0..LAYERS {
            s.layer_begins(self.pass);
            let most = if self.random.u8(0..20) == 0 { EXPERTS } else { 14 };
            let certain = [self.random.u32(0..most), self.random.u32(0..most)];
            // apart, so that the certain row's picks do not depend on the drafts
            let mut random = fastrand::Rng::with_seed(u64::from(self.pass * LAYERS + layer));
            let drafted: Vec<u32> = (0..2 * drafts).map(|_| random.u32(0..EXPERTS)).collect();
            for part in 0..PARTS {
                let block = |e: u32| (layer * PARTS + part) * EXPERTS + e;
                let mut pinned = Vec::new();
                let drafted = drafted.iter().filter(|e| !certain.contains(e)).map(|e| (e, DRAFT));
                for (&e, ask) in certain.iter().map(|e| (e, NEED)).chain(drafted) {
                    self.reads[usize::from(ask.draft)] += u64::from(get(s, block(e), ask));
                    s.pin(block(e));
                    pinned.push(block(e));
                    if ask.draft {
                        self.wanted.push(block(e));
                    }
                }
                pinned.into_iter().for_each(|b| s.unpin(b));
            }
            // the value is what is known of the certain row's habits
            for part in 0..PARTS {
                let values: Vec<f32> = (0..EXPERTS).map(|e| if e < 14 { 0.5 } else { 0.01 }).collect();
                s.set_values((layer * PARTS + part) as usize, &values);
            }
        }
    }
}

#[test]
fn rejected_drafts_displace_hardly_anything() {
    let slots = 512;
    let mut with = Simulation::new(slots);
    let (_, most) = ring(&with.store);
    // as if the ring's slots were not there
    let mut without = Simulation::new(slots - u64::from(most));
    (0..400).for_each(|_| without.pass(0));
    for _ in 0..400 {
        with.pass(3);
        assert!(with.store.evictions_for_drafts() <= u64::from(most), "{}", with.store.evictions_for_drafts());
    }
    let [certain, drafts] = with.reads;
    assert!(drafts > 20_000, "the test wants many drafts: {drafts}");
    assert!(with.store.evictions_for_drafts() * 100 < certain + drafts);
    assert!(certain <= without.reads[0], "{certain} reads for the certain row, {:?} without drafts", without.reads);
    assert_eq!(ring(&with.store).0, most);
    // and when there are no drafts any more, all slots are there for the others
    (0..400).for_each(|_| with.pass(0));
    assert_eq!(ring(&with.store).0, 0);
}

#[test]
fn what_stands_is_kept_and_what_does_not_goes_first() {
    let mut simulation = Simulation::new(512);
    (0..400).for_each(|_| simulation.pass(3));
    let wanted: Vec<BlockId> =
        simulation.wanted.clone().into_iter().filter(|&b| simulation.store.scratch.has(b)).collect();
    let s = &mut simulation.store;
    assert!(wanted.len() > 20 && wanted.iter().all(|&b| has(s, b)));
    let (stands, rejected) = wanted.split_at(wanted.len() / 2);
    let before = ring(s);
    stands.iter().for_each(|&b| s.promote(b));
    assert_eq!(ring(s), before, "something of less worth is given up for each");
    // a block that nobody has asked for is worth as little as can be
    s.layer_begins(1000);
    let others: Vec<BlockId> = (0..s.plan().n_blocks).rev().filter(|&b| !has(s, b)).take(before.0 as usize).collect();
    others.iter().for_each(|&b| assert!(get(s, b, DRAFT)));
    assert!(stands.iter().all(|&b| has(s, b)));
    assert!(rejected.iter().all(|&b| !has(s, b)));
    // a block that is not there any more, or was kept all the time, stays as it is
    s.promote(rejected[0]);
    s.promote(stands[0]);
    assert!(!has(s, rejected[0]) && has(s, stands[0]));
}

#[test]
fn what_a_certain_row_uses_is_kept() {
    let mut s = full(60);
    s.layer_begins(2);
    // 7 are an eighth: the rest finds its place among these, or else the layer could not be computed
    (60..67).for_each(|b| assert!(get(&mut s, b, DRAFT)));
    assert_eq!((ring(&s), s.evictions_for_drafts()), ((7, 7), 7));
    s.layer_begins(2);
    assert!(!get(&mut s, 60, NEED));
    // the oldest of what is kept takes its place, and is the first to go
    assert_eq!(ring(&s), (7, 7));
    assert!(has(&s, 7));
    s.layer_begins(3);
    assert!(get(&mut s, 100, DRAFT));
    assert!(!has(&s, 7) && has(&s, 60) && has(&s, 61));
    assert_eq!(s.evictions_for_drafts(), 7);
    assert_eq!(s.evictions_for_accepted(), 0, "the ring has as many slots as before");
    // until then it may be used again
    assert!(has(&s, 8) && !get(&mut s, 61, NEED) && !get(&mut s, 8, NEED));
    assert!(!s.scratch.has(8) && !s.scratch.has(61));
}

#[test]
fn what_was_evicted_for_what_stands_is_told_apart() {
    let mut s = full(60);
    s.layer_begins(2);
    (60..64).for_each(|b| assert!(get(&mut s, b, DRAFT)));
    // drafts want nothing for so long that the ring may be shorter
    (3..200).for_each(|pass| s.layer_begins(pass));
    (60..62).for_each(|b| s.promote(b));
    assert_eq!((s.evictions_for_drafts(), s.evictions_for_accepted(), ring(&s).0), (4, 2, 2));
    // once
    s.promote(60);
    assert_eq!(s.evictions_for_accepted(), 2);
}

#[test]
fn a_layer_that_needs_more_than_the_ring_gets_it() {
    let mut s = store(60);
    s.layer_begins(1);
    for b in 0..60 {
        assert!(get(&mut s, b, DRAFT), "free slots are anybody's");
        s.pin(b);
    }
    assert_eq!(s.acquire_as(60, DRAFT), Acquired::Full);
    s.unpin(5);
    assert_eq!(s.acquire_as(60, GUESS), Acquired::Full, "this layer has asked for it");
    assert_eq!(s.acquire_as(60, DRAFT), Acquired::Reserved);
    s.failed(60);
    assert_eq!(ring(&s).0, 59);
    s.layer_begins(1);
    s.unpin(6);
    assert!(get(&mut s, 61, GUESS) && get(&mut s, 62, GUESS));
    assert!(!has(&s, 6));
}

#[test]
fn what_drafts_use_again_stays_as_long_as_they_do() {
    let mut s = full(60);
    for pass in 2..202 {
        s.layer_begins(pass);
        let read = (100..107).filter(|&b| get(&mut s, b, DRAFT)).count();
        assert_eq!(read, if pass == 2 { 7 } else { 0 }, "pass {pass}");
        // something else is needed all the time
        s.layer_begins(pass);
        assert!(get(&mut s, 200 + pass, NEED));
    }
}

#[test]
fn guesses_do_not_let_the_ring_grow_beyond_its_limit() {
    let mut s = full(60);
    s.layer_begins(2);
    for b in 60..67 {
        assert!(get(&mut s, b, GUESS));
        s.pin(b);
    }
    s.layer_begins(2);
    assert_eq!(s.acquire_as(67, GUESS), Acquired::Full);
    assert_eq!(s.acquire_as(67, DRAFT), Acquired::Reserved, "this must be had");
    assert_eq!(s.evictions_for_drafts(), 8);
}
