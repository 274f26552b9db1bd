//! Reading experts from files into slots.
//!
//! A buffer belongs to the engine from [`Engine::submit`] to its completion: what crosses the interface is a range of
//! the [`Arena`], never a pointer. Engines do not decide what to read, nor in which order.

mod fault;
mod files;
mod flight;
mod pread;
mod range;
#[cfg(test)]
mod tests;
#[cfg(target_os = "linux")]
mod uring;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use fault::{FaultEngine, FaultPlan};
pub use files::Files;
pub use range::read_range;

use crate::error::{Error, Result};
use crate::store::Arena;

/// Reads in flight, unless the user says otherwise: with parts of experts (300 to 850 KB) fewer leave bandwidth unused,
/// and more only wait for each other.
pub const DEFAULT_DEPTH: usize = 16;

/// The most reads in flight that [`open`] accepts.
pub const MAX_DEPTH: usize = 4096;

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
    /// What the bytes must be. `None`: nobody knows.
    pub check: Option<Check>,
}

/// The checksum of a read's bytes from `head` up to [`Read::need`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// How many bytes before it are not part of it.
    pub head: usize,
    /// CRC-32 (IEEE).
    pub crc32: u32,
}

/// The end of one read.
#[derive(Debug)]
pub struct Completion {
    /// The read's token.
    pub token: u64,
    /// `Ok` when at least [`Read::need`] bytes are in place. `UnexpectedEof` when the file ended before that,
    /// `InvalidData` when they are not what [`Read::check`] says.
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

    /// As [`Engine::submit`], for reads that nobody waits for yet: the device gets one after the other, each when the one
    /// before has ended, without anybody's doing. So what is submitted meanwhile is delayed by one of them at the most. An engine that
    /// cannot do this takes them as it takes others.
    fn submit_in_turn(&self, reads: &[Read]) {
        self.submit(reads);
    }

    /// Appends completions to `out`. Waits for at least one, up to `wait`, when there is none yet and reads are in
    /// flight. At most one thread calls this at a time.
    fn reap(&self, wait: Duration, out: &mut Vec<Completion>);

    /// The most reads that may be in flight.
    fn depth(&self) -> usize;
}

/// Which engine to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// `io_uring` where the system has it, else the pool of readers.
    #[default]
    Auto,
    /// `io_uring` or nothing.
    Uring,
    /// The pool of readers.
    Pread,
}

impl FromStr for EngineKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "pread" => Ok(Self::Pread),
            _ => Err(Error::Invalid(format!("there is no I/O engine {text:?}; use auto, uring or pread"))),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Pread => "pread",
        })
    }
}

/// An engine, ready for use.
pub struct Opened {
    /// The engine.
    pub engine: Box<dyn Engine>,
    /// What the user should know: that another engine than usual was taken, and why.
    pub notice: Option<String>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("engine", &self.engine.name()).field("notice", &self.notice).finish()
    }
}

/// Whether so many reads may be in flight.
///
/// # Errors
/// [`Error::Invalid`] when `depth` is 0 or more than [`MAX_DEPTH`].
pub fn check_depth(depth: usize) -> Result<()> {
    if depth == 0 || depth > MAX_DEPTH {
        return Err(Error::Invalid(format!("an I/O depth of {depth} makes no sense; use 1 to {MAX_DEPTH}")));
    }
    Ok(())
}

/// Reads what `--les-io-depth` takes; 0 stands for the default.
///
/// # Errors
/// [`Error::Invalid`] when it is no number, or more than [`MAX_DEPTH`].
pub fn parse_depth(text: &str) -> Result<usize> {
    let depth = text.parse().map_err(|_| Error::Invalid(format!("--les-io-depth takes a number, not {text:?}")))?;
    if depth > 0 {
        check_depth(depth)?;
    }
    Ok(depth)
}

/// Starts an engine that reads `files` into `arena`, with up to `depth` reads in flight, and faults where `fault` says.
///
/// # Errors
/// [`Error::Invalid`] when `depth` is 0 or more than [`MAX_DEPTH`], or when `io_uring` is asked for and unavailable.
/// [`Error::System`] when no reader thread can be started.
pub fn open(
    kind: EngineKind,
    files: Arc<Files>,
    arena: Arc<Arena>,
    depth: usize,
    fault: Option<FaultPlan>,
) -> Result<Opened> {
    check_depth(depth)?;
    let Opened { mut engine, notice } = open_kind(kind, files, arena, depth)?;
    if let Some(plan) = fault {
        engine = Box::new(FaultEngine::new(engine, plan)?);
    }
    Ok(Opened { engine, notice })
}

#[cfg(target_os = "linux")]
fn open_kind(kind: EngineKind, files: Arc<Files>, arena: Arc<Arena>, depth: usize) -> Result<Opened> {
    let mut notice = None;
    if kind != EngineKind::Pread {
        match uring::Uring::new(Arc::clone(&files), Arc::clone(&arena), depth) {
            Ok(engine) => return Ok(Opened { engine: Box::new(engine), notice }),
            Err(why) if kind == EngineKind::Uring => {
                return Err(Error::Invalid(format!(
                    "io_uring is not available here: {why}; use the engine pread or auto, or allow io_uring (sysctl \
                     kernel.io_uring_disabled=0, and the seccomp profile of a container must permit it)"
                )));
            }
            Err(why) => notice = Some(format!("io_uring is not available here ({why}): using a pool of readers")),
        }
    }
    Ok(Opened { engine: Box::new(pread::Pread::new(files, arena, depth)?), notice })
}

#[cfg(not(target_os = "linux"))]
fn open_kind(kind: EngineKind, files: Arc<Files>, arena: Arc<Arena>, depth: usize) -> Result<Opened> {
    if kind == EngineKind::Uring {
        return Err(Error::Invalid("io_uring exists on Linux only; use the engine pread or auto".into()));
    }
    Ok(Opened { engine: Box::new(pread::Pread::new(files, arena, depth)?), notice: None })
}

/// When a wait ends; no wait is longer than an hour.
fn deadline(wait: Duration) -> Instant {
    Instant::now() + wait.min(Duration::from_secs(3600))
}
