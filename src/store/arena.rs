//! The memory that slots are cut from: one anonymous mapping, committed by the system as it is first used, or ahead of
//! that.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use memmap2::{MmapMut, MmapOptions};

use crate::error::{Error, Result};

/// Bytes of all arenas that no slot has used yet: the system believes them free.
static UNTOUCHED: AtomicU64 = AtomicU64::new(0);

/// So much is committed at once: little enough for those who wait for the address space's lock meanwhile.
#[cfg(target_os = "linux")]
const COMMIT_STEP: usize = 4 << 20;

/// One anonymous mapping. Who may write to or read from which bytes is the store's affair: a slot that is being filled
/// belongs to the engine, a slot that is ready is only read.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Memory>,
    base: *mut u8,
    committer: OnceLock<JoinHandle<()>>,
}

// SAFETY: `base` points into the mapping, which lives as long as the arena; the arena itself never dereferences it.
unsafe impl Send for Arena {}
// SAFETY: as above; shared use of the bytes is ordered by the store's slot states.
unsafe impl Sync for Arena {}

#[derive(Debug)]
struct Memory {
    map: MmapMut,
    untouched: AtomicU64,
    /// It is given up: nobody needs the rest of it.
    unwanted: AtomicBool,
}

impl Arena {
    /// Reserves `bytes`, aligned to a page at least.
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses.
    pub fn new(bytes: usize) -> Result<Self> {
        let remedy = "give a smaller --les-cache";
        let failed = |source: io::Error| Error::System { what: "reserve the expert cache", remedy, source };
        let mut map = MmapOptions::new().len(bytes.max(1)).map_anon().map_err(failed)?;
        // Large pages make both the reads (fewer pages to pin) and the kernels (fewer TLB misses) cheaper. Not having
        // them is no error.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let base = map.as_mut_ptr();
        let untouched = map.len() as u64;
        UNTOUCHED.fetch_add(untouched, Ordering::Relaxed);
        let memory = Arc::new(Memory { map, untouched: untouched.into(), unwanted: false.into() });
        Ok(Self { memory, base, committer: OnceLock::new() })
    }

    /// Has the system commit all of it in the background; to be called once. Memory that is fresh is cleared first: by the thread that
    /// hands a read to the device if nobody did it before, while the others wait for it. Where the system cannot commit
    /// ahead nothing happens.
    pub fn commit_ahead(&self) {
        let memory = self.memory.clone();
        // without the thread it is merely slower
        if let Ok(thread) = std::thread::Builder::new().name("les-commit".into()).spawn(move || memory.commit()) {
            let _ = self.committer.set(thread);
        }
    }

    /// Bytes that all arenas will still take from the system.
    pub fn promised() -> u64 {
        UNTOUCHED.load(Ordering::Relaxed)
    }

    /// `bytes` more bytes are used for the first time.
    pub fn touched(&self, bytes: u64) {
        self.memory.touched(bytes);
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.memory.map.len()
    }

    /// Whether it has no bytes (never: an arena has at least one).
    pub fn is_empty(&self) -> bool {
        self.memory.map.is_empty()
    }

    /// The address of byte `offset`.
    ///
    /// # Panics
    /// Never: an offset outside is answered with the null pointer.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        match offset.checked_add(len) {
            // SAFETY: `offset + len <= len()`, so the address stays within the mapping.
            Some(end) if end <= self.len() => unsafe { self.base.add(offset) },
            _ => std::ptr::null_mut(),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.memory.unwanted.store(true, Ordering::Relaxed);
        // so that the memory is free when the arena is gone; it does not panic
        self.committer.take().map(JoinHandle::join);
    }
}

impl Memory {
    fn touched(&self, bytes: u64) {
        let mut counted = 0;
        // two that count at once must not count the same bytes
        let _ = self.untouched.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |untouched| {
            counted = bytes.min(untouched);
            Some(untouched - counted)
        });
        UNTOUCHED.fetch_sub(counted, Ordering::Relaxed);
    }

    #[cfg(target_os = "linux")]
    fn commit(&self) {
        // SAFETY: takes and changes no memory; with 0, the priority of the calling thread.
        unsafe {
            // the compute threads come first; it is no error when the system refuses
            libc::setpriority(libc::PRIO_PROCESS, 0, 10);
        }
        let len = self.map.len();
        for offset in (0..len).step_by(COMMIT_STEP) {
            let step = COMMIT_STEP.min(len - offset);
            if self.unwanted.load(Ordering::Relaxed)
                || self.map.advise_range(memmap2::Advice::PopulateWrite, offset, step).is_err()
            {
                return;
            }
        }
        self.touched(u64::MAX);
    }

    #[cfg(not(target_os = "linux"))]
    fn commit(&self) {}
}

impl Drop for Memory {
    fn drop(&mut self) {
        UNTOUCHED.fetch_sub(*self.untouched.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_committed_is_promised_no_more() {
        let arena = Arena::new(COMMIT_STEP * 2 + 4096).unwrap();
        // SAFETY: nobody else uses it.
        unsafe { arena.at(COMMIT_STEP, 1).write(7) };
        let untouched = || arena.memory.untouched.load(Ordering::Relaxed);
        arena.touched(4096);
        assert_eq!(untouched(), 2 * COMMIT_STEP as u64);
        arena.memory.commit();
        assert_eq!(untouched(), 0);
        arena.touched(4096);
        assert_eq!(untouched(), 0, "it is counted once");
        // SAFETY: as above.
        assert_eq!(unsafe { arena.at(COMMIT_STEP, 1).read() }, 7, "what was there is still there");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_arena_that_is_gone_is_not_committed_further() {
        let arena = Arena::new(COMMIT_STEP * 16).unwrap();
        arena.commit_ahead();
        let memory = arena.memory.clone();
        drop(arena);
        assert_eq!(Arc::strong_count(&memory), 1, "its thread has ended");
        let untouched = memory.untouched.swap(memory.map.len() as u64, Ordering::Relaxed);
        UNTOUCHED.fetch_add(memory.map.len() as u64 - untouched, Ordering::Relaxed);
        memory.commit();
        assert_eq!(memory.untouched.load(Ordering::Relaxed), memory.map.len() as u64);
    }
}
