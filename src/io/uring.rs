//! `io_uring`: any number of reads in flight without a thread for each.
//!
//! Any thread submits; one reaps, and sleeps in the kernel meanwhile without holding a lock that submitting needs. The
//! flights are owned here from submission to completion, so nothing that a caller does, or drops, can free a buffer
//! that the kernel still writes to.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use parking_lot::Mutex;

use super::flight::{Flight, Rest, runs};
use super::{Completion, Engine, Files, Read};
use crate::store::Arena;

/// How long to sleep when the kernel refuses to take reads over, or to wait: it is short of memory.
const PAUSE: Duration = Duration::from_millis(1);

/// The engine. See [`Engine`].
pub(super) struct Uring {
    // Dropped first: after `drop` has waited for every read.
    ring: IoUring,
    state: Mutex<State>,
    /// Held while completions are taken from the ring, never while waiting for them.
    completions: Mutex<()>,
    files: Arc<Files>,
    arena: Arc<Arena>,
    depth: usize,
    /// Whether the kernel can wait with a timeout (since 5.11).
    pub(super) timed: bool,
}

#[derive(Default)]
struct State {
    /// A flight's place here is its name in the ring. Boxed: the kernel is told where its spans are.
    flights: Vec<Option<Box<Flight>>>,
    free: Vec<usize>,
    /// Places of flights that are not in the ring yet.
    waiting: VecDeque<usize>,
}

impl Uring {
    /// Sets up a ring.
    ///
    /// # Errors
    /// The system's answer when there is no `io_uring` here, it may not be used, or it is too old (before Linux 5.6).
    pub(super) fn new(files: Arc<Files>, arena: Arc<Arena>, depth: usize) -> io::Result<Self> {
        if on_android() {
            // There even asking is answered with a deadly signal.
            return Err(io::Error::new(io::ErrorKind::Unsupported, "Android forbids it"));
        }
        let entries = u32::try_from(depth.next_power_of_two()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ring = IoUring::builder().setup_clamp().build(entries)?;
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe);
        if probed.is_err() || !probe.is_supported(opcode::Readv::CODE) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is too old"));
        }
        let timed = ring.params().is_feature_ext_arg();
        let state = Mutex::new(State::default());
        Ok(Self { ring, state, completions: Mutex::new(()), files, arena, depth, timed })
    }

    fn in_flight(&self) -> usize {
        let state = self.state.lock();
        state.flights.len() - state.free.len()
    }

    fn take(&self, flights: impl Iterator<Item = Flight>) {
        let mut state = self.state.lock();
        for flight in flights {
            let flight = Some(Box::new(flight));
            let place = match state.free.pop() {
                Some(place) => {
                    state.flights[place] = flight;
                    place
                }
                None => {
                    state.flights.push(flight);
                    state.flights.len() - 1
                }
            };
            state.waiting.push_back(place);
        }
        drop(state);
        self.flush();
    }

    /// Gives the kernel all that waits. What it does not take now stays, in the ring or in `waiting`, and is tried again
    /// whenever somebody submits or reaps.
    fn flush(&self) {
        while self.fill() > 0 {
            // Another thread may have given the kernel our reads meanwhile: 0 is no error.
            if !matches!(self.ring.submit(), Ok(1..)) {
                return;
            }
        }
    }

    /// Moves what waits to the ring. Returns how many the kernel has not taken yet.
    fn fill(&self) -> usize {
        let mut state = self.state.lock();
        // SAFETY: no other submission queue exists: this is the only place that makes one, under the lock, and it is
        // gone before the lock is.
        let mut queue = unsafe { self.ring.submission_shared() };
        while let Some(&place) = state.waiting.front() {
            let entry = self.entry(state.flights.get_mut(place).and_then(Option::as_mut)).user_data(place as u64);
            // SAFETY: the entry's buffers lie in the arena, and its descriptor is one of `files`. Both outlive the read,
            // as `drop` waits for it, and the engine owns the buffers until the read is completed. The spans that tell where
            // they are do not move, and are not changed before the flight has landed.
            if unsafe { queue.push(&entry) }.is_err() {
                break;
            }
            state.waiting.pop_front();
        }
        queue.len()
    }

    fn entry(&self, flight: Option<&mut Box<Flight>>) -> squeue::Entry {
        let Some(flight) = flight else { return opcode::Nop::new().build() };
        let leads = flight.leads;
        let entry = match flight.rest(&self.files, &self.arena) {
            Ok(Rest { open, offset, spans }) => {
                opcode::Readv::new(Fd(open.file().as_raw_fd()), spans.as_ptr().cast(), spans.len() as u32)
                    .offset(offset)
                    .build()
            }
            // A read that makes no sense fails as others do, by way of the ring: this wakes the reaper.
            Err(_) => opcode::Nop::new().build(),
        };
        // A hard link: the next one begins however this one ends.
        if leads { entry.flags(squeue::Flags::IO_HARDLINK) } else { entry }
    }

    /// Takes what has completed. Reads that came back short wait for their turn again.
    fn collect(&self, out: &mut Vec<Completion>) {
        let _only = self.completions.lock();
        // SAFETY: no other completion queue exists: this is the only place that makes one, under the lock, and it is
        // gone before the lock is.
        let completed = unsafe { self.ring.completion_shared() };
        for entry in completed {
            let (place, result) = (entry.user_data(), entry.result());
            let attempt = match usize::try_from(result) {
                Ok(n) => Ok(n),
                Err(_) => Err(io::Error::from_raw_os_error(result.saturating_neg())),
            };
            if let Ok(place) = usize::try_from(place) {
                self.land(place, attempt, out);
            }
        }
    }

    fn land(&self, place: usize, attempt: io::Result<usize>, out: &mut Vec<Completion>) {
        // not under the lock: checksums are computed here, and nobody else touches a flight whose attempt has ended
        let Some(mut flight) = self.state.lock().flights.get_mut(place).and_then(Option::take) else { return };
        let again = flight.advance(attempt, &self.files, &self.arena, out);
        // those behind it have begun already
        flight.leads = false;
        let mut state = self.state.lock();
        if again {
            state.flights[place] = Some(flight);
            state.waiting.push_back(place);
        } else {
            state.free.push(place);
        }
    }

    /// Sleeps until something has completed, or for `timeout`.
    fn wait(&self, timeout: Duration) {
        let result = if self.timed {
            let timeout = Timespec::from(timeout);
            let args = SubmitArgs::new().timespec(&timeout);
            self.ring.submitter().submit_with_args(1, &args).map(drop)
        } else {
            self.poll(timeout)
        };
        match result {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                std::thread::sleep(PAUSE.min(timeout));
            }
            _ => (),
        }
    }

    /// The same for kernels whose `io_uring_enter` has no timeout.
    fn poll(&self, timeout: Duration) -> io::Result<()> {
        let mut poll = libc::pollfd { fd: self.ring.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY: one pollfd, which outlives the call.
        let code = unsafe { libc::poll(&raw mut poll, 1, millis) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn submit(&self, reads: &[Read]) {
        self.take(runs(reads));
    }

    fn submit_in_turn(&self, reads: &[Read]) {
        let mut flights: Vec<Flight> = runs(reads).collect();
        let last = flights.len().saturating_sub(1);
        flights[..last].iter_mut().for_each(|flight| flight.leads = true);
        self.take(flights.into_iter());
    }

    fn reap(&self, wait: Duration, out: &mut Vec<Completion>) {
        let until = super::deadline(wait);
        let before = out.len();
        loop {
            self.collect(out);
            // The rest of short reads, and what the kernel had no room for.
            self.flush();
            let left = until.saturating_duration_since(Instant::now());
            if out.len() > before || left.is_zero() || self.in_flight() == 0 {
                return;
            }
            self.wait(left);
        }
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut out = Vec::new();
        while self.in_flight() > 0 {
            self.reap(Duration::from_secs(1), &mut out);
        }
    }
}

/// Whether the kernel is Android's. A program built for Linux may run there too (Termux).
fn on_android() -> bool {
    std::env::var_os("ANDROID_ROOT").is_some()
        || std::fs::read_to_string("/proc/sys/kernel/osrelease").is_ok_and(|release| release.contains("android"))
}
