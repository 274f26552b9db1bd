//! A pool of threads that read one after the other: works everywhere.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::flight::{Flight, Rest, Span, runs};
use super::{Completion, Engine, Files, Read};
use crate::error::{Error, Result};
use crate::store::Arena;

/// More readers than this only add memory and switches; the queue holds the rest.
const MOST_THREADS: usize = 16;

/// The pool. See [`Engine`].
pub(super) struct Pread {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
}

struct Shared {
    files: Arc<Files>,
    arena: Arc<Arena>,
    state: Mutex<State>,
    /// There is something to read, or it is time to stop.
    work: Condvar,
    /// A read has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// Reads in turn stand here together.
    queue: VecDeque<Vec<Flight>>,
    done: Vec<Completion>,
    /// Taken over and not yet handed back.
    in_flight: usize,
    stop: bool,
}

impl Pread {
    /// Starts the pool.
    ///
    /// # Errors
    /// [`Error::System`] when not even one thread could be started.
    pub(super) fn new(files: Arc<Files>, arena: Arc<Arena>, depth: usize) -> Result<Self> {
        let shared =
            Arc::new(Shared { files, arena, state: Mutex::default(), work: Condvar::new(), ended: Condvar::new() });
        let mut threads = Vec::new();
        for n in 0..depth.clamp(1, MOST_THREADS) {
            let shared = Arc::clone(&shared);
            let builder = std::thread::Builder::new().name(format!("les-read-{n}")).stack_size(256 << 10);
            match builder.spawn(move || shared.work()) {
                Ok(thread) => threads.push(thread),
                Err(source) if threads.is_empty() => {
                    return Err(Error::System {
                        what: "start a reader thread",
                        remedy: "allow more threads (ulimit -u, or the control group's pids.max)",
                        source,
                    });
                }
                // Fewer readers are slower, not wrong.
                Err(_) => break,
            }
        }
        Ok(Self { shared, threads, depth })
    }
}

impl Pread {
    fn take(&self, n_reads: usize, turns: impl Iterator<Item = Vec<Flight>>) {
        let mut state = self.shared.state.lock();
        state.in_flight += n_reads;
        for flights in turns {
            state.queue.push_back(flights);
            self.shared.work.notify_one();
        }
    }
}

impl Engine for Pread {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn submit(&self, reads: &[Read]) {
        self.take(reads.len(), runs(reads).map(|flight| vec![flight]));
    }

    fn submit_in_turn(&self, reads: &[Read]) {
        self.take(reads.len(), std::iter::once(runs(reads).collect()));
    }

    fn reap(&self, wait: Duration, out: &mut Vec<Completion>) {
        let until = super::deadline(wait);
        let mut state = self.shared.state.lock();
        while state.done.is_empty() && state.in_flight > 0 {
            if self.shared.ended.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.in_flight -= state.done.len();
        out.append(&mut state.done);
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.lock();
            state.stop = true;
            // Nobody will hear of these any more.
            state.queue.clear();
        }
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader that panicked has reported its read as failed, and touches nothing any more.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        while !state.stop {
            let Some(flights) = state.queue.pop_front() else {
                self.work.wait(&mut state);
                continue;
            };
            for mut flight in flights {
                drop(state);
                let mut done = Vec::new();
                let read = || do_reads(&self.files, &self.arena, &mut flight, &mut done);
                if catch_unwind(AssertUnwindSafe(read)).is_err() {
                    flight.give_up("the reader thread panicked", &mut done);
                }
                state = self.state.lock();
                state.done.append(&mut done);
                self.ended.notify_one();
            }
        }
    }
}

/// Does one read. Nobody else uses its bytes in the arena meanwhile.
pub(super) fn read(files: &Files, arena: &Arena, read: Read) -> io::Result<()> {
    let mut done = Vec::with_capacity(1);
    do_reads(files, arena, &mut Flight::new(&[read]), &mut done);
    done.pop().map_or_else(|| Err(io::Error::other("the read was lost")), |completion| completion.result)
}

/// Does all reads of a flight. Nobody else uses their bytes in the arena meanwhile.
fn do_reads(files: &Files, arena: &Arena, flight: &mut Flight, done: &mut Vec<Completion>) {
    loop {
        let attempt = flight.rest(files, arena).and_then(|Rest { open, offset, spans }| {
            // SAFETY: `rest` has found room for these bytes in the arena, which is borrowed; nobody else uses them: they are
            // the engine's from submission to completion, or all of the arena is the caller's.
            unsafe { read_spans(open.file(), spans, offset) }
        });
        if !flight.advance(attempt, files, arena, done) {
            return;
        }
    }
}

/// Reads what is at `offset` of the file to the spans, one after the other. May read less.
///
/// # Safety
/// As for [`read_at`], for each of the spans.
unsafe fn read_spans(file: &File, spans: &[Span], offset: u64) -> io::Result<usize> {
    #[cfg(target_os = "linux")]
    if spans.len() > 1 {
        let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let fd = std::os::fd::AsRawFd::as_raw_fd(file);
        // SAFETY: a span is laid out as an iovec is, and the caller vouches for their bytes; the descriptor is open.
        let n = unsafe { libc::preadv(fd, spans.as_ptr().cast(), spans.len() as libc::c_int, offset) };
        return usize::try_from(n).map_err(|_| io::Error::last_os_error());
    }
    let Some(first) = spans.first() else { return Ok(0) };
    // SAFETY: passed on.
    unsafe { read_at(file, first.at(), first.len(), offset) }
}

/// Reads up to `len` bytes at `offset` of the file to `to`.
///
/// # Safety
/// The `len` bytes at `to` must be valid, initialized, and used by nobody else until this returns.
pub(super) unsafe fn read_at(file: &File, to: *mut u8, len: usize, offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    {
        let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the caller vouches for `to` and `len`; the descriptor is open.
        let n = unsafe { libc::pread(std::os::fd::AsRawFd::as_raw_fd(file), to.cast(), len, offset) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
    #[cfg(windows)]
    {
        const ERROR_HANDLE_EOF: i32 = 38;
        // SAFETY: the caller vouches for `to` and `len`.
        let to = unsafe { std::slice::from_raw_parts_mut(to, len) };
        match std::os::windows::fs::FileExt::seek_read(file, to, offset) {
            Err(error) if error.raw_os_error() == Some(ERROR_HANDLE_EOF) => Ok(0),
            result => result,
        }
    }
}
