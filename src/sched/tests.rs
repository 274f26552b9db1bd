//! A device made of memory: reads complete when the test lets them, in any order, with any result. It checks at each
//! read that the slot it goes to is nobody's.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::index::Row;
use crate::store::testing::index;
use crate::store::{Plan, Valued};

/// What the device does with its next completion.
type Script = Box<dyn Fn(u64) -> io::Result<()> + Send + Sync>;

struct Device {
    depth: usize,
    state: Mutex<DeviceState>,
    script: Script,
    newest_first: bool,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct DeviceState {
    queued: Vec<Read>,
    count: u64,
}

/// What tests look at.
#[derive(Default)]
struct Shared {
    /// Arena offsets that a walker uses now.
    used: Mutex<HashSet<usize>>,
    /// Blocks in the order in which their reads were submitted.
    order: Mutex<Vec<u64>>,
    /// With which check.
    checks: Mutex<Vec<Option<Check>>>,
}

impl Engine for Device {
    fn name(&self) -> &'static str {
        "test"
    }

    fn submit(&self, reads: &[Read]) {
        let used = self.shared.used.lock();
        let mut state = self.state.lock();
        for read in reads {
            assert!(!used.contains(&read.buf), "a slot in use is read into");
            assert!(state.queued.iter().all(|r| r.buf != read.buf), "two reads into one slot");
            state.queued.push(*read);
            self.shared.order.lock().push(read.token);
            self.shared.checks.lock().push(read.check);
        }
        assert!(state.queued.len() <= self.depth, "more reads in flight than allowed");
    }

    fn reap(&self, _: Duration, out: &mut Vec<Completion>) {
        let mut state = self.state.lock();
        if state.queued.is_empty() {
            return;
        }
        let read = if self.newest_first { state.queued.pop().unwrap() } else { state.queued.remove(0) };
        state.count += 1;
        out.push(Completion { token: read.token, result: (self.script)(state.count) });
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

struct SameFile;

impl FileGuard for SameFile {
    fn check(&self, _: u32) -> Result<()> {
        Ok(())
    }
}

#[cfg(not(feature = "shuttle"))]
struct ChangedFile;

#[cfg(not(feature = "shuttle"))]
impl FileGuard for ChangedFile {
    fn check(&self, _: u32) -> Result<()> {
        Err(Error::Changed { path: "test.gguf".into(), what: "size".into() })
    }
}

struct Setup {
    packed: bool,
    spare_slots: u64,
    depth: usize,
    newest_first: bool,
    guard: Arc<dyn FileGuard>,
    script: Script,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            packed: false,
            spare_slots: 0,
            depth: 4,
            newest_first: false,
            guard: Arc::new(SameFile),
            script: Box::new(|_| Ok(())),
        }
    }
}

/// Two layers of 8 experts, 2 used; all matrices have 512 bytes, so that there is one class of slots.
fn streamer(setup: Setup) -> (Arc<Streamer>, Arc<Shared>) {
    let mut index = index(2, 8, 2, &[480, 480, 480]);
    for t in index.tensors.iter_mut().filter(|_| setup.packed) {
        let row =
            |e: u32| Row { offset: u64::from(7 - e) * 512, bytes: 512, ty: crate::index::GgmlType(0), crc32: 100 + e };
        t.packed = Some((0..8).map(row).collect());
    }
    let index = Arc::new(index);
    let (floor, _) = Plan::bounds(&index, 512);
    let slot = Plan::new(&index, 512, floor).unwrap().classes[0].slot_bytes;
    let plan = Plan::new(&index, 512, floor + setup.spare_slots * slot).unwrap();
    let arena = Arc::new(Arena::new(plan.bytes() as usize).unwrap());
    let store = Store::new(plan.clone(), Box::new(Valued::new(&plan)));
    let shared = Arc::new(Shared::default());
    let device = Device {
        depth: setup.depth,
        state: Mutex::new(DeviceState::default()),
        script: setup.script,
        newest_first: setup.newest_first,
        shared: shared.clone(),
    };
    (Arc::new(Streamer::new(index, store, setup.guard, arena, Box::new(device))), shared)
}

fn request(tensor: usize, ids: &[i32], walkers: u32) -> Request<'_> {
    Request { tensor, ids, rows: 1, certain: 1, walkers }
}

/// Walks to the end; the experts in the order in which they came.
fn walk(s: &Streamer, shared: &Shared, ticket: &Ticket) -> Result<Vec<u32>, Arc<Error>> {
    let base = s.arena.at(0, 0) as usize;
    let mut experts = Vec::new();
    for position in 0.. {
        match ticket.next(position)? {
            Step::Expert { expert, address } => {
                let slot = (address - base) / 512 * 512;
                shared.used.lock().insert(slot);
                experts.push(expert);
                #[cfg(feature = "shuttle")]
                shuttle::thread::yield_now();
                shared.used.lock().remove(&slot);
            }
            Step::End => break,
        }
    }
    Ok(experts)
}

#[cfg(not(feature = "shuttle"))]
fn run(s: &Arc<Streamer>, shared: &Shared, tensor: usize, ids: &[i32]) -> Result<Vec<u32>, Arc<Error>> {
    let ticket = Ticket::open(s.clone(), request(tensor, ids, 1)).map_err(Arc::new)?;
    walk(s, shared, &ticket)
}

fn assert_nothing_is_pinned(s: &Streamer) {
    let core = s.core.lock();
    assert!((0..48).all(|b| core.store.pins(b) == 0));
}

/// Lets the device do all that it was given, and what it is given meanwhile.
#[cfg(not(feature = "shuttle"))]
fn settle(s: &Streamer) {
    let mut core = s.core.lock();
    while core.in_flight > 0 {
        core = s.poll(core);
    }
}

#[cfg(not(feature = "shuttle"))]
mod drafts;
#[cfg(not(feature = "shuttle"))]
mod guesses;
mod layers;

#[cfg(not(feature = "shuttle"))]
mod sequential {
    use super::*;

    #[test]
    fn every_expert_comes_once_and_the_ready_ones_first() {
        let (s, shared) = streamer(Setup::default());
        assert_eq!(run(&s, &shared, 0, &[5, 1, 5]).unwrap(), [1, 5]);
        assert_eq!(run(&s, &shared, 0, &[0, 5]).unwrap(), [5, 0]);
        assert_eq!(run(&s, &shared, 0, &[]).unwrap(), [0u32; 0]);
    }

    #[test]
    fn parts_are_read_in_the_order_of_use() {
        let (s, shared) = streamer(Setup { depth: 1, ..Default::default() });
        run(&s, &shared, 0, &[2, 3]).unwrap();
        run(&s, &shared, 1, &[2, 3]).unwrap();
        run(&s, &shared, 2, &[2, 3]).unwrap();
        // blocks: up 0..8, gate 8..16, down 16..24
        assert_eq!(*shared.order.lock(), [2, 3, 10, 11, 18, 19]);
        let stats = s.stats();
        assert_eq!((stats.decode.requests, stats.decode.misses, stats.decode.bytes_read), (2, 2, 6 * 512 + 6 * 512));
    }

    #[test]
    fn more_experts_than_slots_come_one_after_the_other() {
        let (s, shared) = streamer(Setup::default());
        let all: Vec<i32> = (0..8).collect();
        let slots = s.core.lock().store.plan().classes[0].slots;
        for tensor in [0, 1, 2, 3, 4, 5, 0] {
            let mut experts = run(&s, &shared, tensor, &all).unwrap();
            experts.sort_unstable();
            assert_eq!(experts, (0..8).collect::<Vec<_>>());
        }
        assert!(slots < 24, "the test wants a small store");
    }

    #[cfg(unix)]
    #[test]
    fn the_processor_time_of_walkers_who_reap_is_counted() {
        let (s, shared) = streamer(Setup::default());
        let cpu = || s.stats().decode.ask_cpu_ns;
        run(&s, &shared, 0, &[2]).unwrap();
        let reaped = cpu();
        assert!(reaped > 0, "the walker has waited");
        settle(&s);
        run(&s, &shared, 0, &[2]).unwrap();
        assert_eq!(cpu(), reaped, "all was there, and whoever opens the ticket counts that");
        s.asked(Duration::from_nanos(7), Duration::from_nanos(5), Duration::from_nanos(6));
        let decode = s.stats().decode;
        assert_eq!((decode.ask_ns, decode.guess_ns, decode.ask_cpu_ns), (7, 5, reaped + 6));
    }

    #[test]
    fn an_id_out_of_range_is_an_error() {
        let (s, shared) = streamer(Setup::default());
        for bad in [-1, 8, i32::MAX, i32::MIN] {
            assert!(
                matches!(&*run(&s, &shared, 0, &[1, bad]).unwrap_err(), Error::ExpertId { expert, .. } if *expert == i64::from(bad))
            );
        }
        assert!(matches!(&*run(&s, &shared, 6, &[1]).unwrap_err(), Error::Invalid(_)));
        assert_eq!(run(&s, &shared, 0, &[1]).unwrap(), [1]);
    }

    #[test]
    fn a_failing_read_fails_its_operation_once_whichever_it_is() {
        for n in 1..=6 {
            let script: Script = Box::new(move |i| if i == n { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) });
            let (s, shared) = streamer(Setup { script, ..Default::default() });
            let failures: Vec<_> = (0..3).filter_map(|t| run(&s, &shared, t, &[2, 3]).err()).collect();
            assert_eq!(failures.len(), 1, "read {n}");
            let text = failures[0].to_string();
            assert!(text.contains("test.gguf") && text.contains("blk.0") && text.contains("os error 5"), "{text}");
            for t in 0..3 {
                run(&s, &shared, t, &[2, 3]).unwrap();
            }
            let core = s.core.lock();
            assert!((0..48).all(|b| core.store.pins(b) == 0), "read {n}: a pin is left");
        }
    }

    /// The first read of expert 3 is damaged; what was right once is not checked again.
    #[test]
    fn a_matrix_is_checked_until_it_was_right_once() {
        let script: Script =
            Box::new(|i| if i == 2 { Err(io::Error::new(io::ErrorKind::InvalidData, "bad")) } else { Ok(()) });
        let (s, shared) = streamer(Setup { packed: true, depth: 1, script, ..Default::default() });
        let text = run(&s, &shared, 5, &[2, 3]).unwrap_err().to_string();
        for word in ["test.gguf", "expert 3 of blk.1.Down", "byte 2048", "les verify", "pack the model"] {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
        for tensor in [0, 1, 2, 3, 4, 5] {
            run(&s, &shared, tensor, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        }
        run(&s, &shared, 5, &[2, 3]).unwrap();
        let of = |block| {
            let (order, checks) = (shared.order.lock(), shared.checks.lock());
            let reads = order.iter().zip(&*checks).filter(|(b, _)| **b == block);
            reads.map(|(_, check)| check.map(|check| check.crc32)).collect::<Vec<_>>()
        };
        assert_eq!(of(42)[..2], [Some(102), None]);
        assert_eq!(of(43)[..2], [Some(103), Some(103)]);
        assert!(of(43)[2..].iter().all(Option::is_none), "{:?}", of(43));
    }

    #[test]
    fn a_short_file_is_said_to_be_one() {
        let script: Script = Box::new(|_| Err(io::ErrorKind::UnexpectedEof.into()));
        let (s, shared) = streamer(Setup { script, ..Default::default() });
        let text = run(&s, &shared, 0, &[2]).unwrap_err().to_string();
        assert!(text.contains("truncated"), "{text}");
    }

    #[test]
    fn nothing_that_was_read_from_a_changed_file_is_used() {
        let (s, shared) = streamer(Setup { guard: Arc::new(ChangedFile), ..Default::default() });
        for _ in 0..3 {
            assert!(matches!(&*run(&s, &shared, 0, &[2]).unwrap_err(), Error::Changed { .. }));
        }
    }

    #[test]
    fn after_a_panic_others_still_reap() {
        let script: Script = Box::new(|i| if i == 1 { panic!("a defect") } else { Ok(()) });
        let (s, shared) = streamer(Setup { script, ..Default::default() });
        let panics = || std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&s, &shared, 0, &[2])));
        assert!(panics().is_err());
        assert!(s.may_reap(&s.core.lock()), "the turn is over, and the other reads are still under way");
        assert_eq!(run(&s, &shared, 0, &[5, 1]).unwrap(), [1, 5]);
        assert!([1, 5].iter().all(|&b| s.core.lock().store.pins(b) == 0));
    }

    #[test]
    fn a_ticket_that_nobody_walks_gives_its_slots_back() {
        let (s, shared) = streamer(Setup::default());
        let all: Vec<i32> = (0..8).collect();
        drop(Ticket::open(s.clone(), request(0, &all, 2)).unwrap());
        let left = Ticket::open(s.clone(), request(0, &all, 2)).unwrap();
        left.leave().unwrap();
        drop(left);
        for tensor in 0..6 {
            assert_eq!(run(&s, &shared, tensor, &all).unwrap().len(), 8);
        }
        assert_nothing_is_pinned(&s);
    }

    #[test]
    fn a_walker_that_errs_takes_nothing_away_from_another() {
        let (s, _) = streamer(Setup::default());
        let invalid = |result: Result<Step, Arc<Error>>| assert!(matches!(&*result.unwrap_err(), Error::Invalid(_)));
        let ticket = Ticket::open(s.clone(), request(0, &[2, 3], 2)).unwrap();
        std::thread::scope(|scope| {
            // the other walker is at its first expert meanwhile
            scope.spawn(|| ticket.next(0).unwrap()).join().unwrap();
        });
        invalid(ticket.next(1));
        ticket.next(0).unwrap();
        invalid(ticket.next(0));
        ticket.next(1).unwrap();
        invalid(ticket.next(1));
        invalid(ticket.next(u32::MAX));
        assert_eq!(ticket.next(2).unwrap(), Step::End);
        for position in 0..4 {
            invalid(ticket.next(position));
        }
        assert!(matches!(ticket.leave(), Err(Error::Invalid(_))));
        std::thread::scope(|scope| {
            // there is no third walker
            scope.spawn(|| invalid(ticket.next(0))).join().unwrap();
            scope.spawn(|| assert!(ticket.leave().is_err())).join().unwrap();
        });
        assert!(!ticket.is_closed());
        assert!([2, 3].iter().all(|&b| s.core.lock().store.pins(b) == 1));
    }

    #[test]
    fn a_walker_that_left_keeps_no_slots_from_the_others() {
        let (s, shared) = streamer(Setup::default());
        let all: Vec<i32> = (0..8).collect();
        for first in 0..2 {
            // the slots that another ticket holds leave fewer than the experts of this one
            let _other = Ticket::open(s.clone(), request(3, &all[..6], 1)).unwrap();
            let ticket = Ticket::open(s.clone(), request(0, &all, 2)).unwrap();
            std::thread::scope(|scope| {
                let leaver = scope.spawn(|| {
                    (0..first).for_each(|position| assert!(ticket.next(position).is_ok()));
                    ticket.leave().unwrap();
                });
                leaver.join().unwrap();
            });
            assert_eq!(walk(&s, &shared, &ticket).unwrap().len(), 8);
            assert!(ticket.is_closed());
        }
    }
}

#[cfg(feature = "shuttle")]
mod concurrent;
