//! Verifications of drafted tokens. Blocks of the first layer: up 0..8, gate 8..16, down 16..24; the second one's follow.

use super::super::drafts::Pickers;
use super::*;
use crate::lookahead::{Guess, Guesses};
use crate::sched::{Layer, LayerRequest};
use crate::store::State;

/// The matrices of one layer, for rows of two picks each, of which the first is certain.
fn tickets(s: &Arc<Streamer>, shared: &Shared, lead: usize, ids: &[i32]) {
    let rows = ids.len() / 2;
    for tensor in lead..lead + 3 {
        let request = Request { tensor, ids, rows, certain: 1, walkers: 1 };
        let ticket = Ticket::open(s.clone(), request).unwrap();
        let mut found = walk(s, shared, &ticket).unwrap();
        found.sort_unstable();
        assert_eq!(found, super::super::ticket::distinct(ids, 8).unwrap());
    }
}

/// As [`tickets`], as a whole. Answers whether there was room.
fn layer(s: &Arc<Streamer>, lead: usize, ids: &[i32]) -> bool {
    let tensors = [lead, lead + 1, lead + 2];
    let request = LayerRequest { tensors: &tensors, ids, rows: ids.len() / 2, certain: 1, walkers: 1 };
    let Some(layer) = Layer::open(s.clone(), request).unwrap() else { return false };
    let mut n = 0;
    for wave in 0.. {
        match layer.wave(wave).unwrap() {
            Some(wave) => n += wave.len(),
            None => break,
        }
    }
    assert_eq!(n, super::super::ticket::distinct(ids, 8).unwrap().len());
    true
}

fn there(s: &Streamer, expert: u32) -> bool {
    let core = s.core.lock();
    [0, 8, 16].iter().all(|first| core.store.state(first + expert) == State::Ready)
}

fn drafts(s: &Streamer) -> [u64; 4] {
    let stats = s.stats();
    [stats.verifications, stats.draft_reads, stats.draft_reads_rejected, stats.evictions_for_drafts]
}

#[test]
fn pickers_are_the_first_rows() {
    let pickers = Pickers::new(&[3, 1, 3, 5, 5, 6], 3, 1, 8);
    assert_eq!([3, 1, 5, 6, 0, 8].map(|e| pickers.draft(e)), [None, None, Some(1), Some(2), None, None]);
    assert!(pickers.verify());
    for certain in [3, 4] {
        let pickers = Pickers::new(&[3, 1, 3, 5, 5, 6], 3, certain, 8);
        assert!(!pickers.verify() && (0..8).all(|e| pickers.draft(e).is_none()));
    }
    assert_eq!(Pickers::new(&[], 2, 1, 8).draft(0), None);
}

#[test]
fn what_is_read_for_drafts_is_counted_and_judged_once() {
    for whole in [false, true] {
        let (s, shared) = streamer(Setup { spare_slots: 36, ..Default::default() });
        let verify = |ids: &[i32]| if whole { assert!(layer(&s, 0, ids)) } else { tickets(&s, &shared, 0, ids) };
        // row 0 picks 0 and 1, row 1 also 2, row 2 also 3 and 4
        verify(&[0, 1, 1, 2, 3, 4]);
        assert_eq!(drafts(&s), [1, 9, 0, 0], "whole: {whole}");
        s.judged(2);
        assert_eq!(drafts(&s), [1, 9, 6, 0]);
        s.judged(1);
        assert_eq!(drafts(&s), [1, 9, 6, 0], "the first verdict counts");
        // nothing of this is read
        verify(&[0, 2, 3, 4]);
        s.judged(1);
        assert_eq!(drafts(&s), [2, 9, 6, 0]);
        // all stand where nobody says
        verify(&[0, 2, 5, 6]);
        verify(&[0, 2, 7, 7]);
        s.judged(1);
        assert_eq!(drafts(&s), [4, 18, 9, 0]);
        assert_nothing_is_pinned(&s);
    }
}

#[test]
fn what_a_pass_reads_is_told_by_the_rows_that_want_it() {
    for whole in [false, true] {
        let (s, shared) = streamer(Setup { spare_slots: 36, ..Default::default() });
        let pass = |ids: &[i32], rows: usize| {
            let before = s.pass_reads();
            if whole {
                assert!(layer(&s, 0, ids))
            } else {
                tickets(&s, &shared, 0, ids)
            }
            s.pass_reads().since(&before, rows)
        };
        // three matrices of an expert
        let expert = 3 * s.core.lock().store.slot_bytes(0);
        // row 0 picks 0 and 1, row 1 also 2, row 2 also 3 and 4
        let reads = pass(&[0, 1, 1, 2, 3, 4], 3);
        assert_eq!(reads, Some(vec![2 * expert, 3 * expert, 5 * expert]), "whole: {whole}");
        s.judged(1);
        // a single row; what is there is not read
        assert_eq!(pass(&[0, 5], 1), Some(vec![expert]));
        assert_eq!(pass(&[0, 5, 1, 2], 2), Some(vec![0, 0]));
        s.judged(1);
        // another number of rows, and more than one pass
        assert_eq!(pass(&[0, 5, 1, 2], 3), None);
        let before = s.pass_reads();
        pass(&[0, 5], 1);
        pass(&[0, 5], 1);
        assert_eq!(s.pass_reads().since(&before, 1), None);
    }
}

#[test]
fn a_verification_is_one_pass_in_whatever_order_a_layer_uses_its_matrices() {
    for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0]] {
        let (s, shared) = streamer(Setup { spare_slots: 36, ..Default::default() });
        for n in 1..4 {
            let before = s.pass_reads();
            for tensor in [0, 3].into_iter().flat_map(|lead| order.map(|part| lead + part)) {
                let request = Request { tensor, ids: &[0, 1, 1, 2], rows: 2, certain: 1, walkers: 1 };
                walk(&s, &shared, &Ticket::open(s.clone(), request).unwrap()).unwrap();
            }
            assert!(s.pass_reads().since(&before, 2).is_some(), "{order:?}, {n}");
            s.judged(1);
            assert_eq!(drafts(&s)[0], n, "{order:?}");
        }
    }
}

#[test]
fn what_was_guessed_rightly_is_read_by_who_wants_it() {
    let (s, shared) = streamer(Setup { spare_slots: 36, ..Default::default() });
    // a matrix that was never used is not guessed
    tickets(&s, &shared, 0, &[0, 1]);
    tickets(&s, &shared, 3, &[0, 1]);
    tickets(&s, &shared, 0, &[0, 1]);
    let before = s.pass_reads().bytes;
    s.guess(0, &[Guesses { tensor: 3, experts: vec![Guess { expert: 6, probability: 1.0 }] }]);
    tickets(&s, &shared, 3, &[0, 1, 6, 1]);
    assert_eq!(s.stats().draft_reads, 3);
    let after = s.pass_reads().bytes;
    assert_eq!((after[0], after[1]), (before[0], 3 * s.core.lock().store.slot_bytes(24)));
}

#[test]
fn what_is_rejected_goes_first_and_what_stands_stays() {
    for (verdict, stay) in [(Some(1), false), (Some(2), true), (None, true)] {
        let (s, shared) = streamer(Setup::default());
        assert_eq!(s.core.lock().store.plan().classes[0].slots, 12, "room for 4");
        s.set_values(0, &[0.1, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5]);
        tickets(&s, &shared, 0, &[0, 1, 0, 2]);
        assert_eq!([0, 1, 2].map(|e| there(&s, e)), [true; 3]);
        match verdict {
            Some(rows) => s.judged(rows),
            // another verification
            None => tickets(&s, &shared, 0, &[0, 1, 1, 1]),
        }
        // 3 takes what is free; for 4 a draft goes, whatever it is worth, or else 0
        for expert in [3, 4] {
            for tensor in 0..3 {
                run(&s, &shared, tensor, &[expert]).unwrap();
            }
        }
        assert_eq!([1, 2].map(|e| there(&s, e)), [true, stay], "{verdict:?}");
    }
}

#[test]
fn a_guess_of_a_verification_is_the_certain_rows_when_that_one_needs_it() {
    let guesses = |experts: &[u32]| {
        let experts = experts.iter().map(|&expert| Guess { expert, probability: 0.9 }).collect();
        [Guesses { tensor: 3, experts }]
    };
    let (s, shared) = streamer(Setup { spare_slots: 36, ..Default::default() });
    tickets(&s, &shared, 0, &[0, 1, 0, 2]);
    s.guess(0, &guesses(&[5, 6, 7]));
    settle(&s);
    tickets(&s, &shared, 3, &[5, 0, 6, 0]);
    s.judged(1);
    // 2 and 6 and the rest of what they are with; that 7 was guessed concerns nobody
    assert_eq!(drafts(&s), [1, 6, 6, 0]);
    let core = s.core.lock();
    let kept = |first: u32, expert: u32| !core.store.is_scratch(first + expert);
    assert!([24, 32, 40].iter().all(|&first| kept(first, 5) && !kept(first, 6) && !kept(first, 7)));
}

#[test]
fn the_smallest_cache_is_enough_for_any_verification() {
    let mut random = fastrand::Rng::with_seed(3);
    for spare_slots in [0, 1, 5, 12] {
        let (s, shared) = streamer(Setup { depth: 2, spare_slots, ..Default::default() });
        let mut whole = 0;
        for pass in 0..120 {
            let rows = random.usize(1..6);
            for lead in [0, 3] {
                let ids: Vec<i32> = (0..2 * rows).map(|_| random.i32(0..8)).collect();
                if pass % 2 == 0 || !layer(&s, lead, &ids) {
                    tickets(&s, &shared, lead, &ids);
                } else {
                    whole += 1;
                }
                let experts = (0..4).map(|_| Guess { expert: random.u32(0..8), probability: 0.9 }).collect();
                s.guess(lead, &[Guesses { tensor: 3 - lead, experts }]);
            }
            if pass % 3 > 0 {
                s.judged(random.usize(0..7));
            }
        }
        settle(&s);
        s.core.lock().give_up_guesses();
        assert!(whole > 10, "{whole} layers had room");
        assert_nothing_is_pinned(&s);
        let [verifications, reads, rejected, _] = drafts(&s);
        assert!(verifications > 60 && reads > 500 && (1..reads).contains(&rejected), "{:?}", drafts(&s));
    }
}

#[test]
fn without_drafts_nothing_is_a_verification() {
    let (s, shared) = streamer(Setup::default());
    for _ in 0..3 {
        for tensor in 0..6 {
            let ids = [0, 1, 2, 3];
            let ticket =
                Ticket::open(s.clone(), Request { tensor, ids: &ids, rows: 2, certain: 2, walkers: 1 }).unwrap();
            walk(&s, &shared, &ticket).unwrap();
        }
        s.judged(1);
    }
    assert_eq!(drafts(&s), [0; 4]);
    assert!((0..48).all(|b| !s.core.lock().store.is_scratch(b)));
}
