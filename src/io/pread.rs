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

use super::flight::{self, Flight, Next, Rest};
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
    queue: VecDeque<Vec<Read>>,
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
    fn take(&self, turns: impl Iterator<Item = Vec<Read>>) {
        let mut state = self.shared.state.lock();
        for reads in turns {
            state.in_flight += reads.len();
            state.queue.push_back(reads);
            self.shared.work.notify_one();
        }
    }
}

impl Engine for Pread {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn submit(&self, reads: &[Read]) {
        self.take(reads.iter().map(|&read| vec![read]));
    }

    fn submit_in_turn(&self, reads: &[Read]) {
        self.take(std::iter::once(reads.to_vec()));
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
            let Some(reads) = state.queue.pop_front() else {
                self.work.wait(&mut state);
                continue;
            };
            for read in reads {
                drop(state);
                let result = catch_unwind(AssertUnwindSafe(|| self::read(&self.files, &self.arena, read)))
                    .unwrap_or_else(|_| Err(io::Error::other("the reader thread panicked")));
                state = self.state.lock();
                state.done.push(Completion { token: read.token, result });
                self.ended.notify_one();
            }
        }
    }
}

/// Does one read, whose bytes in the arena nobody else uses meanwhile.
pub(super) fn read(files: &Files, arena: &Arena, read: Read) -> io::Result<()> {
    let mut flight = Flight::new(read);
    loop {
        let Rest { open, offset, len, to } = flight.rest(files, arena)?;
        // SAFETY: `rest` has found room for `len` bytes at `to` of the arena, which is borrowed; nobody else uses these
        // bytes: they are the engine's from submission to completion, or all of the arena is the caller's.
        let attempt = unsafe { read_at(open.file(), to, len, offset) };
        if let Next::Done(result) = flight.advance(attempt, open.step()) {
            open.forget(read.offset, read.len);
            return result.and_then(|()| flight::verify(&read, arena));
        }
    }
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
