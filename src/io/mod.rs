//! Reading experts from files into slots.
//!
//! A buffer belongs to the engine from [`Engine::submit`] to its completion: what crosses the interface is a range of
//! the [`Arena`](crate::store::Arena), never a pointer. Engines do not decide what to read, nor in which order.

use std::io;
use std::time::Duration;

/// One read: `len` bytes at `offset` of file `file` into the arena at `buf`. With direct I/O all three are multiples
/// of the alignment that [`Files`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Comes back in the completion.
    pub token: u64,
    /// Index into the model's files.
    pub file: u32,
    /// Where to read, in bytes.
    pub offset: u64,
    /// How much to read, in bytes.
    pub len: usize,
    /// How much must arrive: the last read of a file may be rounded up past the file's end. `need <= len`.
    pub need: usize,
    /// Where in the arena, in bytes.
    pub buf: usize,
}

/// The end of one read.
#[derive(Debug)]
pub struct Completion {
    /// The read's token.
    pub token: u64,
    /// `Ok` when at least [`Read::need`] bytes are in place. `UnexpectedEof` when the file ended before that.
    pub result: io::Result<()>,
}

/// Fills slots. All calls may come from any thread.
///
/// Dropping an engine waits for every read in flight, so that no buffer is written to afterwards.
pub trait Engine: Send + Sync {
    /// Its name: "uring", "pread", ...
    fn name(&self) -> &'static str;

    /// Takes reads over. Never waits for the device. Every read taken over is completed exactly once.
    ///
    /// The caller keeps at most [`Engine::depth`] reads in flight.
    fn submit(&self, reads: &[Read]);

    /// Appends completions to `out`. Waits for at least one, up to `wait`, when there is none yet and reads are in
    /// flight. At most one thread calls this at a time.
    fn reap(&self, wait: Duration, out: &mut Vec<Completion>);

    /// The most reads that may be in flight.
    fn depth(&self) -> usize;
}
