//! What is told of a model while it is used.

use std::ffi::c_char;
use std::io::Write;
use std::mem::offset_of;

use crate::error::Error;
use crate::memory;
use crate::model::Model;
use crate::stats::Phase;

use super::guard::{Versioned, guard, ok, put_sized, put_text, size_up_to};
use super::model::{LesModel, model};
use super::status::{LES_ERR_NOT_FOUND, LES_OK, LesStatus};
use super::ticket::remember;

/// What the user should know of how the files are read, and of the profile, in one line; empty when all is as it should
/// be. Any thread.
///
/// # Safety
/// `buf` is NULL or writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_notice(handle: *const LesModel, buf: *mut c_char, len: usize) -> LesStatus {
    guard(|| {
        let notice = model(handle)?.notice().unwrap_or_default();
        // SAFETY: the caller vouches for `buf`.
        unsafe { put_text(buf, len, &notice) };
        Ok(LES_OK)
    })
}

/// What went wrong last in a ticket of this model; empty if nothing did. Any thread.
///
/// # Safety
/// `buf` is NULL or writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_last_error(handle: *const LesModel, buf: *mut c_char, len: usize) -> LesStatus {
    guard(|| {
        let error = model(handle)?.last_error();
        // SAFETY: the caller vouches for `buf`.
        unsafe { put_text(buf, len, &error) };
        Ok(LES_OK)
    })
}

/// The counters of one phase.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct LesPhase {
    /// Tokens that passed the first tensor of experts that streams.
    pub tokens: u64,
    /// Experts asked for, each once per operation with the first matrix of its layer.
    pub requests: u64,
    /// Of these, in memory when asked for.
    pub hits: u64,
    /// Bytes whose reading was started.
    pub bytes_read: u64,
    /// Nanoseconds that the computation waited for reads.
    pub wait_ns: u64,
}

/// The main counters; `les_model_stats_write` writes all.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesStats {
    /// `sizeof(struct les_stats)`.
    pub struct_size: usize,
    /// Text that is generated: one token at a time, or with drafts that are verified.
    pub decode: LesPhase,
    /// Several tokens at once.
    pub prompt: LesPhase,
    /// Bytes of all slots.
    pub cache_bytes: u64,
    /// Matrices of experts evicted.
    pub evictions: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Nanoseconds from one pass that generates to the next, all but the longest.
    pub decode_ns: u64,
    /// Tokens in `decode_ns`: one for each pass, and the drafts that stood.
    pub decode_steps: u64,
    /// The largest resident set of the process so far, in bytes; 0 where the system does not tell.
    pub peak_rss_bytes: u64,
    /// Matrices of experts that were read because they were guessed.
    pub guessed: u64,
    /// Of these, in memory when they were needed.
    pub guessed_in_time: u64,
    /// Of these, still being read when they were needed.
    pub guessed_late: u64,
    /// Of these, not needed by the pass that they were read for.
    pub guessed_wasted: u64,
    /// Passes that verified drafted tokens, see `les_model_drafted`.
    pub verifications: u64,
    /// Matrices of experts that were read and that no other than drafted tokens wanted.
    pub draft_reads: u64,
    /// Of these, wanted by no token that stood.
    pub draft_reads_rejected: u64,
    /// Of the evictions, those of what was worth keeping, for what drafted tokens alone wanted or was guessed while they were
    /// verified.
    pub evictions_for_drafts: u64,
    /// Of these, evicted for what is kept instead, as tokens want it that stood.
    pub evictions_for_accepted: u64,
}

// SAFETY: repr(C), the size first, integers only.
unsafe impl Versioned for LesStats {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, peak_rss_bytes), size_of::<u64>());
}

impl From<&Phase> for LesPhase {
    fn from(p: &Phase) -> Self {
        Self { tokens: p.tokens, requests: p.requests, hits: p.hits, bytes_read: p.bytes_read, wait_ns: p.wait_ns }
    }
}

/// Fills `stats`, whose `struct_size` the caller has set. `LES_ERR_NOT_FOUND` before the first ticket. Any thread.
///
/// # Safety
/// `stats` is NULL or a writable struct that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_stats(handle: *const LesModel, stats: *mut LesStats) -> LesStatus {
    guard(|| {
        let s = model(handle)?.stats().ok_or(LES_ERR_NOT_FOUND)?;
        let value = LesStats {
            struct_size: size_of::<LesStats>(),
            decode: (&s.decode).into(),
            prompt: (&s.prompt).into(),
            cache_bytes: s.cache_bytes,
            evictions: s.evictions,
            read_errors: s.read_errors,
            decode_ns: s.decode_ns,
            decode_steps: s.decode_steps,
            peak_rss_bytes: s.peak_rss_bytes,
            guessed: s.reads.guessed,
            guessed_in_time: s.reads.guessed_in_time,
            guessed_late: s.reads.guessed_late,
            guessed_wasted: s.reads.guessed_wasted,
            verifications: s.verifications,
            draft_reads: s.draft_reads,
            draft_reads_rejected: s.draft_reads_rejected,
            evictions_for_drafts: s.evictions_for_drafts,
            evictions_for_accepted: s.evictions_for_accepted,
        };
        // SAFETY: the caller vouches for `stats`.
        ok(unsafe { put_sized(stats, value) })
    })
}

/// Writes all counters as JSON to the file `path`. `LES_ERR_NOT_FOUND` before the first ticket. Any thread.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_stats_write(handle: *const LesModel, path: *const c_char) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        // SAFETY: the caller vouches for `path`.
        let path = unsafe { super::guard::path(path) }?;
        let stats = model.stats().ok_or(LES_ERR_NOT_FOUND)?;
        let write = || -> std::io::Result<()> {
            let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
            serde_json::to_writer_pretty(&mut file, &stats)?;
            // dropping it would not tell of a full disk
            file.flush()
        };
        match write() {
            Ok(()) => Ok(LES_OK),
            Err(source) => {
                let e = Error::File { path: path.into(), what: "write the statistics", source };
                model.set_last_error(e.to_string());
                Err(LesStatus::from(&e))
            }
        }
    })
}

/// Writes what was learned of the model to the file that `les_params` named as its profile, in place of what is there, at
/// once or not at all. `LES_ERR_NOT_FOUND` before streaming begins, without a profile, or when the file is another's (then
/// `les_model_notice` says so). Any thread; tickets wait meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_profile_save(handle: *const LesModel) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        written(&model, model.save_profile())
    })
}

/// Ends the routing trace that `les_params` named, and writes what is left of it. An error is that of the first record that
/// could not be written: the trace ends before it. `LES_ERR_NOT_FOUND` without a trace, or when it has been ended. Any
/// thread; tickets wait meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_trace_close(handle: *const LesModel) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        written(&model, model.close_trace())
    })
}

/// Ends the recording of inputs that `les_params` named, and writes what is left of it. An error is that of the first write
/// that failed: the recording ends there. `LES_ERR_NOT_FOUND` without a recording, or when it has been ended. Any thread;
/// tickets wait meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_inputs_close(handle: *const LesModel) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        written(&model, model.close_inputs())
    })
}

/// What to answer when there was something to write, or not.
fn written(model: &Model, result: Result<bool, Error>) -> Result<LesStatus, LesStatus> {
    match result {
        Ok(true) => Ok(LES_OK),
        Ok(false) => Ok(LES_ERR_NOT_FOUND),
        Err(e) => Err(remember(model, &e)),
    }
}

/// Bytes of memory that this process may still take, control groups respected; 0 where the system does not tell. Any
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_memory_available() -> u64 {
    let mut available = 0;
    guard(|| {
        available = memory::available().unwrap_or(0);
        Ok(LES_OK)
    });
    available
}
