//! What is read because it may be needed soon.

use super::super::guess::IN_TURN;
use super::*;
use crate::lookahead::{Guess, Guesses};
use crate::stats::{LayerStats, Phase};

fn guesses(tensor: usize, experts: &[u32]) -> [Guesses; 1] {
    let experts = experts.iter().map(|&expert| Guess { expert, probability: 0.9 }).collect();
    [Guesses { tensor, experts }]
}

fn pins(s: &Streamer) -> u32 {
    let core = s.core.lock();
    (0..48).map(|b| core.store.pins(b)).sum()
}

#[test]
fn guesses_are_read_expert_by_expert_after_what_is_needed() {
    let (s, shared) = streamer(Setup { depth: 2, spare_slots: 24, ..Default::default() });
    let ticket = Ticket::open(s.clone(), request(0, &[2, 3], 1)).unwrap();
    s.guess(0, &guesses(3, &[7, 1]));
    walk(&s, &shared, &ticket).unwrap();
    settle(&s);
    // blocks of the second layer: up 24..32, gate 32..40, down 40..48
    assert_eq!(*shared.order.lock(), [2, 3, 10, 11, 18, 19, 31, 39, 47, 25, 33, 41]);
    assert_eq!(run(&s, &shared, 3, &[7, 5]).unwrap(), [7, 5]);
    for tensor in 4..6 {
        run(&s, &shared, tensor, &[7, 5]).unwrap();
    }
    let stats = s.stats();
    assert_eq!((stats.reads.guessed, stats.reads.guessed_in_time, stats.reads.guessed_late), (6, 3, 0));
    s.guess(3, &[]);
    s.guess(0, &[]);
    assert_eq!((s.stats().reads.guessed_wasted, pins(&s)), (3, 0));
}

#[test]
fn what_is_needed_has_the_device_for_itself() {
    let (s, shared) = streamer(Setup { depth: 16, spare_slots: 24, ..Default::default() });
    let ticket = Ticket::open(s.clone(), request(0, &[2], 1)).unwrap();
    s.guess(0, &guesses(3, &[7]));
    assert_eq!(*shared.order.lock(), [2, 10, 18], "the guess waits");
    walk(&s, &shared, &ticket).unwrap();
    settle(&s);
    assert_eq!(shared.order.lock()[3..], [31, 39, 47]);
}

#[test]
fn a_lane_is_filled_again_when_it_is_empty() {
    let (s, shared) = streamer(Setup { depth: 16, spare_slots: 24, ..Default::default() });
    s.guess(0, &guesses(3, &[0, 1, 2, 3, 4, 5]));
    let submitted = || shared.order.lock().len();
    assert_eq!(submitted(), LANES * IN_TURN);
    // the device does one read at a time, those of the first lane first
    for _ in 1..IN_TURN {
        drop(s.poll(s.core.lock()));
    }
    assert_eq!(submitted(), LANES * IN_TURN);
    drop(s.poll(s.core.lock()));
    assert_eq!(submitted(), (LANES + 1) * IN_TURN);
}

#[test]
fn a_guess_under_way_is_waited_for_and_not_read_twice() {
    let (s, shared) = streamer(Setup { spare_slots: 24, ..Default::default() });
    s.guess(0, &guesses(3, &[7, 6]));
    // the device does one read at a time: 7's is over when the operation begins, 6's is not
    assert_eq!(run(&s, &shared, 3, &[6, 7]).unwrap(), [7, 6]);
    assert_eq!(shared.order.lock().iter().filter(|&&b| b == 30 || b == 31).count(), 2);
    let stats = s.stats();
    assert_eq!((stats.reads.guessed_in_time, stats.reads.guessed_late), (1, 1));
}

#[test]
fn newer_guesses_replace_those_that_were_not_read_yet() {
    let (s, shared) = streamer(Setup { depth: 1, spare_slots: 24, ..Default::default() });
    s.guess(0, &guesses(3, &[0, 1, 2, 3]));
    s.guess(0, &guesses(3, &[6]));
    settle(&s);
    assert_eq!(*shared.order.lock(), [24, 30, 38, 46]);
}

#[test]
fn what_was_guessed_and_not_read_before_its_layer_is_not_read_for_it() {
    let (s, shared) = streamer(Setup { depth: 1, spare_slots: 24, ..Default::default() });
    for tensor in 0..6 {
        run(&s, &shared, tensor, &[0]).unwrap();
    }
    s.guess(0, &guesses(3, &[0, 1, 2, 3]));
    let before = shared.order.lock().len();
    run(&s, &shared, 3, &[0]).unwrap();
    settle(&s);
    assert_eq!(shared.order.lock().len(), before, "the layer has all that it wants");
    assert_eq!(shared.order.lock().last(), Some(&25), "one guess was under way");
}

#[test]
fn slots_of_guesses_go_to_those_who_need_them() {
    let all: Vec<i32> = (0..8).collect();
    let (s, shared) = streamer(Setup::default());
    let slots = s.core.lock().store.plan().classes[0].slots;
    assert!(slots < 24, "the test wants a small store");
    for tensor in 3..6 {
        run(&s, &shared, tensor, &[]).unwrap();
    }
    for tensor in [0, 1, 2, 0] {
        let ticket = Ticket::open(s.clone(), request(tensor, &all, 1)).unwrap();
        s.guess(0, &guesses(3, &[0, 1, 2, 3, 4, 5, 6, 7]));
        assert_eq!(walk(&s, &shared, &ticket).unwrap().len(), 8);
        settle(&s);
    }
    // all slots are guesses' when the next operation begins, of a layer that said it wants nothing
    run(&s, &shared, 0, &[]).unwrap();
    s.guess(0, &guesses(3, &[0, 1, 2, 3, 4, 5, 6, 7]));
    settle(&s);
    assert_eq!(pins(&s), slots);
    assert_eq!(run(&s, &shared, 1, &all).unwrap().len(), 8);
    s.guess(3, &[]);
    s.guess(0, &[]);
    assert_eq!(pins(&s), 0);
}

/// Layers that want up to all of their experts, as those of prompts do, in caches of all sizes.
#[test]
fn guesses_of_a_batch_take_no_slot_that_the_running_layer_wants() {
    let mut random = fastrand::Rng::with_seed(1);
    let (mut crowded, mut guessed) = (0, 0);
    for spare_slots in 0..=36 {
        let (s, shared) = streamer(Setup { spare_slots, depth: 8, ..Default::default() });
        let slots = s.core.lock().store.plan().classes[0].slots as usize;
        for pass in 0..12 {
            let (lead, next) = if pass % 2 == 0 { (0, 3) } else { (3, 0) };
            let ids: Vec<i32> = (0..8).filter(|_| random.u8(0..4) > 0).collect();
            let before = shared.order.lock().len();
            let ticket = Ticket::open(s.clone(), request(lead, &ids, 1)).unwrap();
            s.guess(lead, &guesses(next, &[0, 1, 2, 3, 4, 5, 6, 7]));
            walk(&s, &shared, &ticket).unwrap();
            settle(&s);
            let guesses_of = |s: &Streamer| s.stats().reads.guessed;
            let held = |s: &Streamer| s.core.lock().ahead.held_for(s.lead_of[next]);
            let (reads, had) = (guesses_of(&s), held(&s));
            for tensor in lead + 1..lead + 3 {
                run(&s, &shared, tensor, &ids).unwrap();
                settle(&s);
            }
            assert_eq!((guesses_of(&s), held(&s)), (reads, had), "none is given up, none is made again");
            let fits = 3 * ids.len() <= slots;
            assert!(if fits { had + 3 * ids.len() <= slots } else { had == 0 }, "{had} beside {ids:?} in {slots}");
            let order = shared.order.lock()[before..].to_vec();
            let mut own: Vec<u64> = order.iter().copied().filter(|b| (*b >= 24) == (lead == 3)).collect();
            let all = own.len();
            own.sort_unstable();
            own.dedup();
            assert!(!fits || own.len() == all, "what this layer had was read again: {order:?}");
            crowded += usize::from(!fits);
            guessed += had;
        }
    }
    assert!(crowded > 20 && guessed > 1000, "{crowded} {guessed}");
}

#[test]
fn the_first_layer_of_the_next_pass_is_read_ahead_and_kept_until_it_has_passed() {
    let (s, shared) = streamer(Setup { spare_slots: 24, ..Default::default() });
    for tensor in [0, 1, 2, 4, 5, 3] {
        run(&s, &shared, tensor, &[5]).unwrap();
    }
    s.guess(3, &guesses(0, &[7, 6]));
    settle(&s);
    assert_eq!(pins(&s), 6);
    let ticket = Ticket::open(s.clone(), request(0, &[7], 1)).unwrap();
    s.guess(0, &guesses(3, &[1]));
    assert_eq!(walk(&s, &shared, &ticket).unwrap(), [7]);
    settle(&s);
    assert_eq!(pins(&s), 6, "what was wrong has been given up, the later parts are still to come");
    for tensor in 1..3 {
        run(&s, &shared, tensor, &[7]).unwrap();
    }
    s.guess(3, &[]);
    let reads = s.stats().reads;
    assert_eq!((reads.guessed_in_time, reads.guessed_late, reads.guessed_wasted, pins(&s)), (3, 0, 3, 3));
}

#[test]
fn a_guess_that_cannot_be_read_is_read_again_when_it_is_needed() {
    let script: Script = Box::new(|i| if i == 1 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) });
    let (s, shared) = streamer(Setup { script, spare_slots: 24, depth: 1, ..Default::default() });
    s.guess(0, &guesses(3, &[7]));
    settle(&s);
    assert_eq!(s.stats().read_errors, 1);
    for _ in 0..2 {
        assert_eq!(run(&s, &shared, 3, &[7]).unwrap(), [7]);
    }
    assert_eq!(shared.order.lock().iter().filter(|&&b| b == 31).count(), 2);
    // the guess has brought nothing
    let reads = s.stats().reads;
    assert_eq!((reads.guessed, reads.guessed_in_time, reads.guessed_late, reads.demand_reads), (3, 0, 0, 1));
}

#[test]
fn tensors_that_are_never_used_are_not_read_ahead() {
    let (s, shared) = streamer(Setup { spare_slots: 40, ..Default::default() });
    for ids in [[0, 1], [2, 3], [4, 5]] {
        // the last part of both layers is computed elsewhere
        for tensor in [0, 1, 3, 4] {
            run(&s, &shared, tensor, &ids).unwrap();
        }
        settle(&s);
    }
    let order = shared.order.lock();
    let down = order.iter().filter(|&&b| (16..24).contains(&b) || (40..48).contains(&b)).count();
    assert_eq!(down, 4, "in the first pass nobody knows");
}

#[test]
fn a_guess_that_a_part_does_not_have_is_left_out() {
    let (s, shared) = streamer(Setup { spare_slots: 24, ..Default::default() });
    s.guess(0, &guesses(3, &[8, u32::MAX, 7]));
    settle(&s);
    assert_eq!(*shared.order.lock(), [31, 39, 47]);
}

#[test]
fn layers_add_up_to_the_totals_and_reads_to_what_was_asked() {
    let script: Script = Box::new(|i| if i % 50 == 7 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) });
    let (s, shared) = streamer(Setup { script, depth: 2, spare_slots: 6, ..Default::default() });
    let mut random = fastrand::Rng::with_seed(1);
    for pass in 0..60 {
        for tensor in 0..6 {
            let rows = if pass % 5 == 0 { 3 } else { 1 };
            let ids: Vec<i32> = (0..2 * rows).map(|_| random.i32(0..8)).collect();
            let ticket =
                Ticket::open(s.clone(), Request { tensor, ids: &ids, rows, certain: rows, walkers: 1 }).unwrap();
            if tensor % 3 == 0 {
                s.guess(tensor, &guesses(3 - tensor, &[random.u32(0..8), random.u32(0..8)]));
            }
            // some fail
            let _ = walk(&s, &shared, &ticket);
        }
    }
    settle(&s);
    s.core.lock().give_up_guesses();
    let stats = s.stats();
    let sum = |of: fn(&LayerStats) -> u64| stats.layers.iter().map(of).sum::<u64>();
    let both = |of: fn(&Phase) -> u64| of(&stats.decode) + of(&stats.prompt);
    assert_eq!(sum(|l| l.requests), both(|p| p.requests));
    assert_eq!(sum(|l| l.hits), both(|p| p.hits));
    assert_eq!(sum(|l| l.late), both(|p| p.late));
    assert_eq!(sum(|l| l.misses), both(|p| p.misses));
    assert_eq!(sum(|l| l.bytes_read), both(|p| p.bytes_read));
    assert_eq!(sum(|l| l.wait_ns), both(|p| p.wait_ns));
    let reads = &stats.reads;
    assert_eq!(sum(|l| l.reads.demand_reads), reads.demand_reads);
    assert_eq!(sum(|l| l.reads.demand_bytes), reads.demand_bytes);
    assert_eq!(sum(|l| l.reads.guessed), reads.guessed);
    assert_eq!(sum(|l| l.reads.guessed_bytes), reads.guessed_bytes);
    assert_eq!(sum(|l| l.reads.guessed_in_time), reads.guessed_in_time);
    assert_eq!(sum(|l| l.reads.guessed_late), reads.guessed_late);
    assert_eq!(sum(|l| l.reads.guessed_wasted), reads.guessed_wasted);
    for l in &stats.layers {
        assert_eq!(l.requests, l.hits + l.late + l.misses, "{l:?}");
        assert_eq!(l.bytes_read, l.reads.demand_bytes + l.reads.guessed_bytes, "{l:?}");
        assert!(l.requests > 0 && l.reads.demand_reads > 0 && l.reads.guessed > 0, "{l:?}");
    }
    assert_eq!(reads.demand_reads + reads.guessed, shared.order.lock().len() as u64);
    // each guess came to something, but for those whose reads failed
    let failed = reads.guessed - reads.guessed_in_time - reads.guessed_late - reads.guessed_wasted;
    assert!(failed > 0 && failed < stats.read_errors, "{failed} of {stats:?}");
}
