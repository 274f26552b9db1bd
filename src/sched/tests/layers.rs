//! Layers as a whole.

use super::*;
use crate::sched::{Due, Layer, LayerRequest};

const TENSORS: [usize; 3] = [0, 1, 2];

#[cfg(not(feature = "shuttle"))]
fn open(s: &Arc<Streamer>, tensors: &[usize], ids: &[i32], walkers: u32) -> Result<Option<Layer>, Arc<Error>> {
    let layer = Layer::open(s.clone(), LayerRequest { tensors, ids, rows: 1, certain: 1, walkers })?;
    if let Some(layer) = &layer {
        layer.read();
    }
    Ok(layer)
}

/// Computes every wave; the experts in the order in which they came, by wave.
fn compute(s: &Streamer, shared: &Shared, layer: &Layer, tensors: &[usize]) -> Result<Vec<Vec<u32>>, Arc<Error>> {
    let base = s.arena.at(0, 0) as usize;
    let mut waves = Vec::new();
    for n in 0.. {
        let Some(wave) = layer.wave(n)? else { break };
        let mut experts = Vec::new();
        for &tensor in tensors {
            experts.clear();
            for position in wave.clone() {
                let (expert, address) = layer.expert(position, tensor).unwrap();
                let slot = (address - base) / 512 * 512;
                shared.used.lock().insert(slot);
                experts.push(expert);
                #[cfg(feature = "shuttle")]
                shuttle::thread::yield_now();
                shared.used.lock().remove(&slot);
            }
        }
        waves.push(experts);
    }
    Ok(waves)
}

fn unpinned(s: &Streamer) -> bool {
    let core = s.core.lock();
    (0..48).all(|block| core.store.pins(block) == 0)
}

#[cfg(not(feature = "shuttle"))]
mod sequential {
    use super::*;

    fn settle(s: &Streamer) {
        while s.core.lock().in_flight > 0 {
            drop(s.poll(s.core.lock()));
        }
    }

    fn run(s: &Arc<Streamer>, shared: &Shared, ids: &[i32]) -> Result<Vec<Vec<u32>>, Arc<Error>> {
        let layer = open(s, &TENSORS, ids, 1)?.unwrap();
        compute(s, shared, &layer, &TENSORS)
    }

    #[test]
    fn those_that_are_there_come_first_and_the_others_as_they_arrive() {
        let (s, shared) = streamer(Setup { spare_slots: 24, ..Default::default() });
        assert_eq!(run(&s, &shared, &[5, 2]).unwrap(), [[2], [5]]);
        // expert by expert: blocks up 0..8, gate 8..16, down 16..24
        assert_eq!(*shared.order.lock(), [2, 10, 18, 5, 13, 21]);
        assert_eq!(run(&s, &shared, &[1, 5, 2, 5]).unwrap(), [vec![2, 5], vec![1]]);
        assert_eq!(run(&s, &shared, &[]).unwrap(), [[0u32; 0]; 0]);
        assert!(unpinned(&s));
        let stats = s.stats();
        assert_eq!((stats.decode.requests, stats.decode.misses, stats.decode.hits), (5, 3, 2));
    }

    /// What is due before and while the waves 0 and 1 are computed, as `[wave, computing, read, look_ahead]`.
    fn due(layer: &Layer) -> Vec<[u32; 4]> {
        let calls = [(0, false), (0, true), (1, false), (1, true)];
        let due = calls.map(|(wave, computing)| (wave, computing, layer.due(wave, computing)));
        let due = due.into_iter().filter(|(.., due)| *due != Due::default());
        due.map(|(wave, computing, due)| [wave, computing.into(), due.read.into(), due.look_ahead.into()]).collect()
    }

    #[test]
    fn what_takes_time_is_done_when_the_others_compute_or_everybody_waits() {
        let (s, shared) = streamer(Setup { spare_slots: 24, ..Default::default() });
        let open =
            |ids| Layer::open(s.clone(), LayerRequest { tensors: &TENSORS, ids, rows: 1, certain: 1, walkers: 1 });
        let none = open(&[3]).unwrap().unwrap();
        assert_eq!(due(&none), [[0, 0, 1, 1]]);
        assert!(shared.order.lock().is_empty(), "nothing is read before it is said");
        none.read();
        assert_eq!(compute(&s, &shared, &none, &TENSORS).unwrap(), [[3]]);
        let some = open(&[3, 4]).unwrap().unwrap();
        assert_eq!(due(&some), [[0, 1, 1, 0], [1, 0, 0, 1]]);
        // a layer that nobody attends is read when a walker finds nothing
        assert_eq!(compute(&s, &shared, &some, &TENSORS).unwrap(), [[3], [4]]);
        let all = open(&[3, 4]).unwrap().unwrap();
        assert_eq!(due(&all), [[0, 1, 0, 1]]);
        drop(all);
        assert!(unpinned(&s));
    }

    #[test]
    fn an_expert_is_as_its_worst_matrix_is() {
        let (s, shared) = streamer(Setup { spare_slots: 24, ..Default::default() });
        let judged = [&[0][..], &TENSORS, &TENSORS].map(|tensors| {
            let layer = open(&s, tensors, &[1], 1).unwrap().unwrap();
            compute(&s, &shared, &layer, tensors).unwrap();
            let phase = s.stats().decode;
            (phase.requests, phase.hits, phase.misses)
        });
        assert_eq!(judged, [(1, 0, 1), (2, 0, 2), (3, 1, 2)], "the first matrix alone is not a hit");
    }

    #[test]
    fn a_right_guess_is_one_also_when_it_must_make_room() {
        use crate::lookahead::{Guess, Guesses};
        let (s, shared) = streamer(Setup::default());
        let experts = [1, 3, 4, 5, 6, 7].map(|expert| Guess { expert, probability: 0.9 }).to_vec();
        s.guess(3, &[Guesses { tensor: 0, experts }]);
        settle(&s);
        assert_eq!(run(&s, &shared, &[1, 2]).unwrap().concat(), [1, 2]);
        let reads = s.stats().reads;
        assert_eq!(reads.guessed_in_time, 3, "{reads:?}");
    }

    /// The pass and the layer that the streamer is at.
    fn at(s: &Streamer) -> (u32, usize) {
        let core = s.core.lock();
        (core.progress.pass, core.progress.lead)
    }

    #[test]
    fn what_has_no_room_as_a_whole_is_left_to_tickets() {
        let all: Vec<i32> = (0..8).collect();
        let (s, shared) = streamer(Setup::default());
        assert!(open(&s, &TENSORS, &all, 1).unwrap().is_none());
        assert_eq!(at(&s), (0, usize::MAX), "it has not begun");
        // there would be room if another ticket did not hold it
        let other = Ticket::open(s.clone(), request(3, &all[..4], 1)).unwrap();
        let before = at(&s);
        assert!(open(&s, &TENSORS, &[1, 2], 1).unwrap().is_none());
        assert_eq!(at(&s), before);
        walk(&s, &shared, &other).unwrap();
        drop(other);
        assert!(unpinned(&s));
        for tensor in TENSORS {
            assert_eq!(super::super::run(&s, &shared, tensor, &[1, 2]).unwrap().len(), 2);
        }
        assert_eq!(run(&s, &shared, &[1, 2]).unwrap(), [[1, 2]]);
    }

    #[test]
    fn guesses_make_room() {
        use crate::lookahead::{Guess, Guesses};
        let (s, shared) = streamer(Setup::default());
        let experts = (0..8).map(|expert| Guess { expert, probability: 0.9 }).collect();
        s.guess(0, &[Guesses { tensor: 3, experts }]);
        settle(&s);
        assert!(!unpinned(&s));
        assert_eq!(run(&s, &shared, &[1, 2]).unwrap().concat(), [1, 2]);
        assert!(unpinned(&s));
    }

    #[test]
    fn a_failing_read_fails_its_layer_once_whichever_it_is() {
        for n in 1..=6 {
            let script: Script = Box::new(move |i| if i == n { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) });
            let (s, shared) = streamer(Setup { script, ..Default::default() });
            let text = run(&s, &shared, &[2, 3]).unwrap_err().to_string();
            assert!(text.contains("test.gguf") && text.contains("blk.0") && text.contains("os error 5"), "{text}");
            assert!(unpinned(&s), "read {n}: a pin is left");
            assert_eq!(run(&s, &shared, &[2, 3]).unwrap().concat().len(), 2, "read {n}");
        }
    }

    #[test]
    fn a_layer_that_nobody_computes_gives_its_slots_back() {
        let (s, shared) = streamer(Setup::default());
        drop(open(&s, &TENSORS, &[1, 2], 2).unwrap());
        let left = open(&s, &TENSORS, &[3, 4], 2).unwrap().unwrap();
        left.leave().unwrap();
        assert!(left.leave().is_err() && !left.is_closed());
        drop(left);
        assert!(unpinned(&s));
        // what was asked for is read all the same
        settle(&s);
        assert_eq!(run(&s, &shared, &[5, 6]).unwrap().concat(), [5, 6]);
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        let (s, _) = streamer(Setup { spare_slots: 24, ..Default::default() });
        let invalid = |result: Result<(), Arc<Error>>| assert!(matches!(&*result.err().unwrap(), Error::Invalid(_)));
        for tensors in [&[][..], &[1, 2], &[0, 3], &[0, 0], &[0, 2, 1], &[0, 6], &[usize::MAX]] {
            invalid(open(&s, tensors, &[1], 1).map(drop));
        }
        invalid(open(&s, &TENSORS, &[1], 0).map(drop));
        let bad = open(&s, &TENSORS, &[1, 8], 1).err().unwrap();
        assert!(matches!(&*bad, Error::ExpertId { expert: 8, .. }));
        let layer = open(&s, &TENSORS, &[1], 1).unwrap().unwrap();
        invalid(layer.wave(1).map(drop));
        assert_eq!(layer.expert(0, 0), None, "nothing was handed out");
        assert_eq!(layer.wave(0).unwrap(), Some(0..1));
        invalid(layer.wave(0).map(drop));
        assert!(layer.expert(0, 3).is_none() && layer.expert(1, 0).is_none());
        assert_eq!(layer.wave(1).unwrap(), None);
        invalid(layer.wave(2).map(drop));
    }
}

#[cfg(feature = "shuttle")]
mod concurrent {
    use super::super::concurrent::{check, sorted};
    use super::*;

    fn walkers(
        s: &Arc<Streamer>,
        shared: &Arc<Shared>,
        tensors: &'static [usize],
        ids: &[i32],
    ) -> Vec<shuttle::thread::JoinHandle<Option<Vec<Vec<u32>>>>> {
        let layer = Arc::new(
            Layer::open(s.clone(), LayerRequest { tensors, ids, rows: 1, certain: 1, walkers: 2 }).unwrap().unwrap(),
        );
        (0..2)
            .map(|n| {
                let (s, shared, layer) = (s.clone(), shared.clone(), layer.clone());
                shuttle::thread::spawn(move || {
                    // one of them starts the reads, maybe after the other waits for them
                    if n == 0 {
                        layer.read();
                    }
                    compute(&s, &shared, &layer, tensors).ok()
                })
            })
            .collect()
    }

    #[test]
    fn walkers_see_the_same_waves() {
        check(|| {
            let (s, shared) = streamer(Setup { newest_first: true, spare_slots: 4, ..Default::default() });
            for ids in [[1, 4], [4, 6]] {
                let waves: Vec<_> =
                    walkers(&s, &shared, &TENSORS, &ids).into_iter().map(|h| h.join().unwrap().unwrap()).collect();
                assert_eq!(waves[0], waves[1]);
                assert_eq!(sorted(waves[0].concat()), ids.map(|id| id as u32));
            }
            assert!(unpinned(&s));
        });
    }

    #[test]
    fn a_failure_reaches_both_walkers() {
        check(|| {
            let script: Script = Box::new(|i| if i == 4 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) });
            let (s, shared) = streamer(Setup { script, depth: 2, ..Default::default() });
            let results: Vec<_> =
                walkers(&s, &shared, &TENSORS, &[1, 4]).into_iter().map(|h| h.join().unwrap()).collect();
            assert!(results.iter().all(Option::is_none));
            assert!(unpinned(&s));
        });
    }

    #[test]
    fn layers_of_two_contexts_share_slots() {
        check(|| {
            let (s, shared) = streamer(Setup { depth: 2, spare_slots: 8, ..Default::default() });
            const OTHERS: &[usize] = &[3, 4, 5];
            let contexts: Vec<_> = [&TENSORS[..], OTHERS]
                .into_iter()
                .map(|tensors| {
                    let (s, shared) = (s.clone(), shared.clone());
                    shuttle::thread::spawn(move || {
                        for h in walkers(&s, &shared, if tensors[0] == 0 { &TENSORS } else { OTHERS }, &[0, 5]) {
                            assert_eq!(sorted(h.join().unwrap().unwrap().concat()), [0, 5]);
                        }
                    })
                })
                .collect();
            for context in contexts {
                context.join().unwrap();
            }
            assert!(unpinned(&s));
        });
    }
}
