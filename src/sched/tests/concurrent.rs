//! Several threads, in every order that shuttle tries.

use super::*;

pub(super) fn check(test: fn()) {
    let iterations = std::env::var("LES_SHUTTLE_ITERATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    shuttle::check_random(test, iterations);
    shuttle::check_pct(test, iterations, 3);
}

fn walkers(
    s: &Arc<Streamer>,
    shared: &Arc<Shared>,
    tensor: usize,
    ids: &'static [i32],
    n: u32,
) -> Vec<shuttle::thread::JoinHandle<Option<Vec<u32>>>> {
    let ticket = Arc::new(Ticket::open(s.clone(), request(tensor, ids, n)).unwrap());
    (0..n)
        .map(|_| {
            let (s, shared, ticket) = (s.clone(), shared.clone(), ticket.clone());
            shuttle::thread::spawn(move || walk(&s, &shared, &ticket).ok())
        })
        .collect()
}

pub(super) fn sorted(mut v: Vec<u32>) -> Vec<u32> {
    v.sort_unstable();
    v
}

#[test]
fn walkers_of_one_ticket_see_the_same_order() {
    check(|| {
        let (s, shared) = streamer(Setup { newest_first: true, ..Default::default() });
        let orders: Vec<_> =
            walkers(&s, &shared, 0, &[1, 4, 6], 2).into_iter().map(|h| h.join().unwrap().unwrap()).collect();
        assert_eq!(orders[0], orders[1]);
        assert_eq!(sorted(orders[0].clone()), [1, 4, 6]);
    });
}

#[test]
fn two_contexts_share_too_few_slots_without_blocking_each_other() {
    check(|| {
        let (s, shared) = streamer(Setup { depth: 2, ..Default::default() });
        const ALL: &[i32] = &[0, 1, 2, 3, 4, 5, 6, 7];
        let contexts: Vec<_> = [0, 3]
            .into_iter()
            .map(|layer| {
                let (s, shared) = (s.clone(), shared.clone());
                shuttle::thread::spawn(move || {
                    for part in 0..2 {
                        for h in walkers(&s, &shared, layer + part, ALL, 2) {
                            assert_eq!(sorted(h.join().unwrap().unwrap()), [0, 1, 2, 3, 4, 5, 6, 7]);
                        }
                    }
                })
            })
            .collect();
        for c in contexts {
            c.join().unwrap();
        }
        assert_nothing_is_pinned(&s);
    });
}

#[test]
fn guesses_take_no_slot_from_those_who_need_it() {
    use crate::lookahead::{Guess, Guesses};
    check(|| {
        let (s, shared) = streamer(Setup { depth: 2, newest_first: true, ..Default::default() });
        const ALL: &[i32] = &[0, 1, 2, 3, 4, 5, 6, 7];
        let guesser = {
            let s = s.clone();
            shuttle::thread::spawn(move || {
                for tensor in [3, 0] {
                    let experts = (0..8).map(|expert| Guess { expert, probability: 0.9 }).collect();
                    s.guess(3 - tensor, &[Guesses { tensor, experts }]);
                }
            })
        };
        for tensor in [0, 1] {
            for h in walkers(&s, &shared, tensor, ALL, 2) {
                assert_eq!(sorted(h.join().unwrap().unwrap()), [0, 1, 2, 3, 4, 5, 6, 7]);
            }
        }
        guesser.join().unwrap();
        s.core.lock().give_up_guesses();
        assert_nothing_is_pinned(&s);
    });
}

#[test]
fn a_verdict_may_come_at_any_time() {
    check(|| {
        let (s, shared) = streamer(Setup { depth: 2, ..Default::default() });
        let judge = {
            let s = s.clone();
            shuttle::thread::spawn(move || (1..3).for_each(|rows| s.judged(rows)))
        };
        for tensor in [0, 1, 0] {
            let request = Request { tensor, ids: &[0, 1, 2, 3, 4, 5], rows: 3, certain: 1, walkers: 1 };
            let ticket = Ticket::open(s.clone(), request).unwrap();
            assert_eq!(sorted(walk(&s, &shared, &ticket).unwrap()), [0, 1, 2, 3, 4, 5]);
        }
        judge.join().unwrap();
        assert_nothing_is_pinned(&s);
    });
}

#[test]
fn a_failure_reaches_every_walker_and_leaves_nothing_pinned() {
    check(|| {
        let script: Script = Box::new(|i| if i == 2 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) });
        let (s, shared) = streamer(Setup { script, depth: 2, ..Default::default() });
        let results: Vec<_> = walkers(&s, &shared, 0, &[1, 4, 6], 2).into_iter().map(|h| h.join().unwrap()).collect();
        assert!(results.iter().all(Option::is_none));
        assert_nothing_is_pinned(&s);
    });
}
