//! Every engine, through the same scenarios.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod flights;

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;
use crate::index::ModelFile;

const LONG: Duration = Duration::from_secs(20);
const SLOT: usize = 64 << 10;
/// Not a multiple of any alignment.
const SIZE: usize = (1 << 20) + 777;

/// A file of known bytes, opened, and an arena of 32 slots.
struct Bed {
    file: NamedTempFile,
    data: Vec<u8>,
    files: Arc<Files>,
    arena: Arc<Arena>,
}

impl Bed {
    fn new(direct: bool) -> Self {
        Self::within(&std::env::temp_dir(), direct)
    }

    fn within(dir: &Path, direct: bool) -> Self {
        let mut random = Random(7);
        let data: Vec<u8> = (0..SIZE).map(|_| (random.next() >> 32) as u8).collect();
        let mut file = NamedTempFile::new_in(dir).unwrap();
        file.write_all(&data).unwrap();
        file.as_file().sync_all().unwrap();
        let model = ModelFile { path: file.path().into(), size: SIZE as u64 };
        let files = Arc::new(Files::open(&[model], direct).unwrap());
        Self { file, data, files, arena: Arc::new(Arena::new(32 * SLOT).unwrap()) }
    }

    fn open(&self, kind: EngineKind, depth: usize, fault: Option<&str>) -> Box<dyn Engine> {
        let fault = fault.map(|plan| plan.parse().unwrap());
        open(kind, self.files.clone(), self.arena.clone(), depth, fault).unwrap().engine
    }

    /// The read of `slot` number `token`, at an aligned place.
    fn read(&self, token: u64, offset: usize, need: usize) -> Read {
        let align = self.files.align();
        let (offset, len) = (offset - offset % align, need.next_multiple_of(align));
        Read { token, file: 0, offset: offset as u64, len, need, buf: (token as usize % 32) * SLOT, check: None }
    }

    fn bytes(&self, buf: usize, len: usize) -> &[u8] {
        let at = self.arena.at(buf, len);
        assert!(!at.is_null());
        // SAFETY: the range is within the arena, and the tests look at slots that no read is under way for.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    fn fill(&self, value: u8) {
        let at = self.arena.at(0, self.arena.len());
        // SAFETY: the range is the arena, and no read is under way.
        unsafe { at.write_bytes(value, self.arena.len()) };
    }

    fn assert_right(&self, read: &Read) {
        let offset = read.offset as usize;
        assert!(self.bytes(read.buf, read.need) == &self.data[offset..offset + read.need], "wrong bytes: {read:?}");
    }

    fn truncate(&self, size: u64) {
        std::fs::OpenOptions::new().write(true).open(self.file.path()).unwrap().set_len(size).unwrap();
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }
}

/// The engines that this system has.
fn kinds() -> Vec<EngineKind> {
    let bed = Bed::new(true);
    let has_uring = open(EngineKind::Uring, bed.files.clone(), bed.arena.clone(), 1, None).is_ok();
    [EngineKind::Pread].into_iter().chain(has_uring.then_some(EngineKind::Uring)).collect()
}

fn each(mut scenario: impl FnMut(EngineKind, Bed)) {
    for kind in kinds() {
        for direct in [true, false] {
            eprintln!("{kind}, direct: {direct}");
            scenario(kind, Bed::new(direct));
        }
    }
}

/// Submits one read and waits for its end.
fn one(engine: &dyn Engine, read: Read) -> io::Result<()> {
    engine.submit(&[read]);
    let mut done = reap_all(engine, 1);
    assert_eq!(done[0].token, read.token);
    done.remove(0).result
}

fn reap_all(engine: &dyn Engine, n: usize) -> Vec<Completion> {
    let (mut done, until) = (Vec::new(), Instant::now() + LONG);
    while done.len() < n {
        assert!(Instant::now() < until, "{} of {n} reads completed", done.len());
        engine.reap(LONG, &mut done);
    }
    assert_eq!(done.len(), n);
    done
}

/// Keeps `depth` reads in flight until `n` are done, and compares every byte.
fn churn(bed: &Bed, engine: &dyn Engine, n: u64) {
    let (mut random, mut flying, mut done) = (Random(99), HashMap::new(), Vec::new());
    let (mut next, mut ended) = (0, 0);
    let mut slots: Vec<_> = (0..32).map(|slot| slot * SLOT).collect();
    while ended < n {
        while next < n && flying.len() < engine.depth() {
            let need = 1 + random.below(SLOT);
            let buf = slots.pop().unwrap();
            let read = Read { buf, ..bed.read(next, random.below(SIZE - SLOT), need) };
            assert!(flying.insert(next, read).is_none());
            engine.submit(&[read]);
            next += 1;
        }
        engine.reap(LONG, &mut done);
        for Completion { token, result } in done.drain(..) {
            result.unwrap();
            let read = flying.remove(&token).unwrap();
            bed.assert_right(&read);
            slots.push(read.buf);
            ended += 1;
        }
    }
}

#[test]
fn random_reads_bring_the_right_bytes() {
    each(|kind, bed| {
        for depth in [1, 3, 16] {
            churn(&bed, &*bed.open(kind, depth, None), 200);
        }
        churn(&bed, &*bed.open(kind, 8, Some("reorder,slow@190:2")), 200);
        churn(&bed, &*bed.open(kind, 8, Some("rate@1000")), 200);
    });
}

#[test]
#[cfg(target_os = "linux")]
fn uring_works_without_timed_waits() {
    let bed = Bed::new(true);
    let Ok(mut engine) = uring::Uring::new(bed.files.clone(), bed.arena.clone(), 8) else { return };
    engine.timed = false;
    churn(&bed, &engine, 200);
}

/// Also when one of them fails. When the thread that submitted them has ended, all of them end, in any order: the kernel
/// cancels some, and they are tried again.
#[test]
fn reads_in_turn_end_one_after_the_other() {
    each(|kind, bed| {
        let lives = [(None, true), (Some("eio@3"), true), (Some("rate@1000"), true), (None, false)];
        for (plan, lives) in lives {
            let engine = bed.open(kind, 16, plan);
            let past_the_end = Read { offset: 1 << 40, ..bed.read(4, 0, 1) };
            let reads: Vec<Read> = (0..8)
                .map(|n| Read {
                    buf: n as usize * SLOT,
                    ..if n == 4 { past_the_end } else { bed.read(n, n as usize * 5000, SLOT / 2) }
                })
                .collect();
            if lives {
                engine.submit_in_turn(&reads);
            } else {
                std::thread::scope(|scope| scope.spawn(|| engine.submit_in_turn(&reads)).join().unwrap());
            }
            let mut done = reap_all(&*engine, 8);
            if !lives {
                done.sort_by_key(|done| done.token);
            }
            assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
            for (read, Completion { token, result }) in reads.iter().zip(done) {
                assert_eq!(result.is_err(), token == 4 || plan == Some("eio@3") && token == 2, "{token}: {result:?}");
                if result.is_ok() {
                    bed.assert_right(read);
                }
            }
        }
    });
}

/// Each submitter ends right after its last read: what the kernel has queued for it must survive that.
#[test]
fn many_submit_while_one_reaps() {
    each(|kind, bed| {
        let engine = bed.open(kind, 32, None);
        let slots = parking_lot::Mutex::new((0..8).map(|slot| slot * SLOT).collect::<Vec<_>>());
        let (sender, receiver) = mpsc::channel();
        let (threads, per_thread) = (4, 150);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (sender, bed, engine, slots) = (sender.clone(), &bed, &*engine, &slots);
                scope.spawn(move || {
                    let mut random = Random(thread + 1);
                    for n in 0..per_thread {
                        let buf = loop {
                            let slot = slots.lock().pop();
                            match slot {
                                Some(buf) => break buf,
                                None => std::thread::yield_now(),
                            }
                        };
                        let (offset, need) = (random.below(SIZE - SLOT), 1 + random.below(SLOT));
                        let read = Read { buf, ..bed.read(thread * per_thread + n, offset, need) };
                        sender.send(read).unwrap();
                        engine.submit(&[read]);
                    }
                });
            }
            let (mut ended, mut done, mut flying) = (0, Vec::new(), HashMap::new());
            while ended < threads * per_thread {
                engine.reap(LONG, &mut done);
                flying.extend(receiver.try_iter().map(|read: Read| (read.token, read)));
                for Completion { token, result } in done.drain(..) {
                    result.unwrap();
                    let read = flying.remove(&token).expect("a read completes once");
                    bed.assert_right(&read);
                    slots.lock().push(read.buf);
                    ended += 1;
                }
            }
            assert!(flying.is_empty());
        });
    });
}

#[test]
fn more_than_depth_at_once_is_not_lost() {
    each(|kind, bed| {
        let engine = bed.open(kind, 2, None);
        let reads: Vec<_> = (0..32).map(|token| bed.read(token, token as usize * 5000, 4000)).collect();
        engine.submit(&reads);
        let mut tokens: Vec<_> = reap_all(&*engine, reads.len()).iter().map(|done| done.token).collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..32));
        reads.iter().for_each(|read| bed.assert_right(read));
    });
}

#[test]
fn reaping_does_not_wait_when_nothing_is_in_flight() {
    each(|kind, bed| {
        for fault in [None, Some("slow@1:0")] {
            let engine = bed.open(kind, 2, fault);
            let begin = Instant::now();
            let mut done = Vec::new();
            engine.reap(LONG, &mut done);
            assert!(done.is_empty() && begin.elapsed() < LONG / 2);
        }
    });
}

#[test]
fn the_end_of_the_file() {
    each(|kind, bed| {
        let engine = bed.open(kind, 4, None);
        let last = SIZE - SIZE % 4096;
        let tail = Read { len: 8192, ..bed.read(1, last, SIZE - last) };
        one(&*engine, tail).unwrap();
        bed.assert_right(&tail);
        let beyond = Read { len: 8192, ..bed.read(2, last, SIZE - last + 1) };
        assert_eq!(one(&*engine, beyond).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let behind = bed.read(3, 2 * SIZE, 1);
        assert_eq!(one(&*engine, behind).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        one(&*engine, Read { len: 0, ..bed.read(4, 0, 0) }).unwrap();
    });
}

#[test]
fn bytes_that_are_not_those_of_the_checksum_are_an_error() {
    each(|kind, bed| {
        let engine = bed.open(kind, 4, None);
        let (head, need) = (100, 9000);
        let read = bed.read(1, 8192, need);
        let crc32 = crc32fast::hash(&bed.data[8192 + head..8192 + need]);
        let checked = |head, crc32| Read { check: Some(Check { head, crc32 }), ..read };
        one(&*engine, checked(head, crc32)).unwrap();
        bed.assert_right(&read);
        for wrong in [checked(head, crc32 ^ 1), checked(head + 1, crc32), checked(need + 1, crc32)] {
            assert_eq!(one(&*engine, wrong).unwrap_err().kind(), ErrorKind::InvalidData, "{wrong:?}");
        }
        // an error of the device is said first
        let behind = Read { check: Some(Check { head: 0, crc32: 0 }), ..bed.read(2, 2 * SIZE, 1) };
        assert_eq!(one(&*engine, behind).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    });
}

#[test]
fn a_file_truncated_under_way() {
    each(|kind, bed| {
        let engine = bed.open(kind, 4, None);
        bed.truncate(10_000);
        assert_eq!(one(&*engine, bed.read(1, 4096, 8192)).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        assert_eq!(one(&*engine, bed.read(2, 65_536, 1)).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        one(&*engine, bed.read(3, 0, 8192)).unwrap();
        assert!(matches!(bed.files.check(0), Err(Error::Changed { .. })));
    });
}

#[test]
fn reads_that_make_no_sense_fail() {
    each(|kind, bed| {
        let engine = bed.open(kind, 4, None);
        let good = bed.read(1, 0, 4096);
        for bad in [
            Read { file: 1, ..good },
            Read { file: u32::MAX, ..good },
            Read { buf: bed.arena.len(), ..good },
            Read { buf: usize::MAX, ..good },
            Read { len: bed.arena.len() + 4096, ..good },
            Read { len: usize::MAX, ..good },
            Read { need: 4097, ..good },
            Read { offset: u64::MAX, ..good },
            Read { offset: i64::MAX as u64, ..good },
        ] {
            assert_eq!(one(&*engine, bad).unwrap_err().kind(), ErrorKind::InvalidInput, "{bad:?}");
        }
        one(&*engine, good).unwrap();
    });
}

/// The system's own errors come through as what they are. (A file system may also be lenient.)
#[test]
fn misaligned_direct_reads_are_refused_or_right() {
    each(|kind, bed| {
        let engine = bed.open(kind, 4, None);
        let read = Read { offset: 4097, ..bed.read(1, 0, 4096) };
        match one(&*engine, read) {
            Ok(()) => bed.assert_right(&read),
            Err(error) => assert!(bed.files.direct(0) && error.kind() == ErrorKind::InvalidInput, "{error}"),
        }
    });
}

#[test]
fn a_failing_read_wakes_the_reaper() {
    each(|kind, bed| {
        for fault in [None, Some("eio@2")] {
            let engine = bed.open(kind, 4, fault);
            let begin = Instant::now();
            engine.submit(&[bed.read(0, 0, 4096)]);
            std::thread::scope(|scope| {
                let reaper = scope.spawn(|| reap_all(&*engine, 2).len());
                engine.submit(&[Read { file: 5, ..bed.read(1, 0, 4096) }]);
                assert_eq!(reaper.join().unwrap(), 2);
            });
            assert!(begin.elapsed() < LONG / 2);
        }
    });
}

#[test]
fn faults_hit_the_chosen_reads_only() {
    each(|kind, bed| {
        for n in 1..=20 {
            for (fault, expected) in [("eio", None), ("short", Some(ErrorKind::UnexpectedEof))] {
                for later in [false, true] {
                    bed.fill(0xa5);
                    let engine = bed.open(kind, 20, Some(&format!("{fault}@{n}{}", if later { "+" } else { "" })));
                    let reads: Vec<_> = (1..=20).map(|token| bed.read(token, token as usize * 9999, 5000)).collect();
                    engine.submit(&reads);
                    for Completion { token, result } in reap_all(&*engine, reads.len()) {
                        let read = &reads[token as usize - 1];
                        if token == n || later && token > n {
                            let error = result.unwrap_err();
                            match expected {
                                Some(kind) => assert_eq!(error.kind(), kind),
                                None => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
                            }
                            assert!(bed.bytes(read.buf, read.len).iter().all(|&byte| byte == 0xa5));
                        } else {
                            result.unwrap();
                            bed.assert_right(read);
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn slow_reads_come_late_and_reordered_ones_in_reverse() {
    each(|kind, bed| {
        let engine = bed.open(kind, 4, Some("slow@3:150"));
        let begin = Instant::now();
        engine.submit(&[bed.read(1, 0, 1), bed.read(2, 0, 1), bed.read(3, 0, 1), bed.read(4, 0, 1)]);
        let early = reap_all(&*engine, 2);
        assert!(early.iter().all(|done| done.token < 3));
        let mut late = Vec::new();
        engine.reap(Duration::ZERO, &mut late);
        assert!(late.is_empty() || begin.elapsed() >= Duration::from_millis(150));
        reap_all(&*engine, 2 - late.len());
        assert!(begin.elapsed() >= Duration::from_millis(150));

        let engine = bed.open(kind, 1, Some("reorder,eio@1+"));
        engine.submit(&[bed.read(1, 0, 1), bed.read(2, 0, 1), bed.read(3, 0, 1)]);
        let tokens: Vec<_> = reap_all(&*engine, 3).iter().map(|done| done.token).collect();
        assert_eq!(tokens, [3, 2, 1]);
    });
}

#[test]
fn nothing_is_written_after_an_engine_is_gone() {
    each(|kind, bed| {
        for fault in [None, Some("slow@1:5,reorder")] {
            for _ in 0..20 {
                let engine = bed.open(kind, 32, fault);
                let reads: Vec<_> = (0..32).map(|token| bed.read(token, token as usize * 20_000, SLOT)).collect();
                engine.submit(&reads);
                drop(engine);
                bed.fill(0x5a);
                std::thread::sleep(Duration::from_millis(1));
                assert!(bed.bytes(0, bed.arena.len()).iter().all(|&byte| byte == 0x5a));
            }
        }
    });
}

#[test]
fn a_changed_file_is_noticed() {
    let bed = Bed::new(true);
    bed.files.check(0).unwrap();
    assert!(bed.files.check(1).is_err());
    let modified = bed.file.as_file().metadata().unwrap().modified().unwrap();
    bed.file.as_file().set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
    assert!(matches!(bed.files.check(0), Err(Error::Changed { .. })));
    bed.file.as_file().set_modified(modified).unwrap();
    bed.files.check(0).unwrap();
    bed.truncate(SIZE as u64 + 1);
    assert!(matches!(bed.files.check(0), Err(Error::Changed { .. })));
}

#[test]
fn opening_fails_for_missing_and_changed_files() {
    let missing = ModelFile { path: "/nonexistent/model.gguf".into(), size: 1 };
    for direct in [true, false] {
        assert!(matches!(Files::open(std::slice::from_ref(&missing), direct), Err(Error::File { .. })));
        let bed = Bed::new(direct);
        let other = ModelFile { path: bed.file.path().into(), size: 5 };
        assert!(matches!(Files::open(&[other], direct), Err(Error::Changed { .. })));
    }
}

#[test]
fn files_say_how_they_are_read() {
    let bed = Bed::new(false);
    assert!(!bed.files.direct(0) && bed.files.align() >= 512 && bed.files.len() == 1);
    assert!(bed.files.notice().unwrap().contains("page cache"));
    let bed = Bed::new(true);
    assert!(bed.files.align().is_power_of_two());
    assert_eq!(bed.files.direct(0), bed.files.notice().is_none());
    bed.files.forget_cached();
}

#[test]
#[cfg(target_os = "linux")]
fn tmpfs_is_read_with_or_without_direct_io() {
    let dir = Path::new("/dev/shm");
    if !dir.is_dir() {
        return;
    }
    for kind in kinds() {
        let bed = Bed::within(dir, true);
        eprintln!("{kind}: {:?}", bed.files.notice());
        churn(&bed, &*bed.open(kind, 4, None), 100);
    }
}

#[test]
fn depths_that_make_no_sense_are_refused() {
    let bed = Bed::new(true);
    for depth in [0, MAX_DEPTH + 1] {
        assert!(open(EngineKind::Auto, bed.files.clone(), bed.arena.clone(), depth, None).is_err());
    }
    assert!("fast".parse::<EngineKind>().is_err());
    for kind in [EngineKind::Auto, EngineKind::Uring, EngineKind::Pread] {
        assert_eq!(kind.to_string().parse::<EngineKind>().unwrap(), kind);
    }
}

#[test]
fn bad_plans_are_explained() {
    for text in [
        "",
        ",",
        "eio",
        "eio@",
        "eio@0",
        "eio@+1",
        "eio@1++",
        "slow@1",
        "slow@1:",
        "slow@1+:5",
        "rate@",
        "rate@0",
        "rate@9+",
        "rate@-1",
        "reorder@1",
        "x@1",
    ] {
        let error = text.parse::<FaultPlan>().unwrap_err().to_string();
        assert!(error.contains("eio@N"), "{error}");
    }
    assert_eq!(" eio@3 , reorder".parse::<FaultPlan>().unwrap().to_string(), "eio@3,reorder");
}

proptest! {
    #[test]
    fn plans_survive_printing(rules in prop::collection::vec("(eio|short)@[1-9][0-9]{0,5}[+]?|slow@[1-9]:[0-9]{1,3}|rate@[1-9][0-9]{0,3}|reorder", 1..6)) {
        let text = rules.join(",");
        let plan: FaultPlan = text.parse().unwrap();
        prop_assert_eq!(plan.to_string().parse::<FaultPlan>().unwrap(), plan);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[a-z@0-9:+, ]{0,40}|\\PC{0,20}") {
        let _ = text.parse::<FaultPlan>();
    }
}
