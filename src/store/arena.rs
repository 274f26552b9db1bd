//! The memory that slots are cut from: one anonymous mapping, committed by the system as it is first used, or ahead of
//! that.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

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
    map: MmapMut,
    base: *mut u8,
    untouched: AtomicU64,
}

// SAFETY: `base` points into `map`, which lives as long as the arena; the arena itself never dereferences it.
unsafe impl Send for Arena {}
// SAFETY: as above; shared use of the bytes is ordered by the store's slot states.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves `bytes`, aligned to a page at least.
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses.
    pub fn new(bytes: usize) -> Result<Self> {
        let failed = |source: io::Error| Error::System { what: "reserve the expert cache", source };
        let mut map = MmapOptions::new().len(bytes.max(1)).map_anon().map_err(failed)?;
        // Large pages make both the reads (fewer pages to pin) and the kernels (fewer TLB misses) cheaper. Not having
        // them is no error.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let base = map.as_mut_ptr();
        let untouched = map.len() as u64;
        UNTOUCHED.fetch_add(untouched, Ordering::Relaxed);
        Ok(Self { map, base, untouched: untouched.into() })
    }

    /// Has the system commit all of it in the background. Memory that is fresh is cleared first: by the thread that hands
    /// a read to the device if nobody did it before, while the others wait for it. Where the system cannot commit ahead
    /// nothing happens.
    pub fn commit_ahead(self: &Arc<Self>) {
        let arena = Arc::downgrade(self);
        // without the thread it is merely slower
        let _ = std::thread::Builder::new().name("les-commit".into()).spawn(move || commit(&arena));
    }

    #[cfg(target_os = "linux")]
    fn commit_from(&self, offset: usize) -> Option<usize> {
        let len = COMMIT_STEP.min(self.len().checked_sub(offset).filter(|&left| left > 0)?);
        self.map.advise_range(memmap2::Advice::PopulateWrite, offset, len).ok()?;
        if offset + len == self.len() {
            self.touched(u64::MAX);
        }
        Some(offset + len)
    }

    #[cfg(not(target_os = "linux"))]
    fn commit_from(&self, _: usize) -> Option<usize> {
        None
    }

    /// Bytes that all arenas will still take from the system.
    pub fn promised() -> u64 {
        UNTOUCHED.load(Ordering::Relaxed)
    }

    /// `bytes` more bytes are used for the first time.
    pub fn touched(&self, bytes: u64) {
        let bytes = bytes.min(self.untouched.load(Ordering::Relaxed));
        self.untouched.fetch_sub(bytes, Ordering::Relaxed);
        UNTOUCHED.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether it has no bytes (never: an arena has at least one).
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
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

/// Commits an arena, step by step, as long as somebody has it.
fn commit(arena: &Weak<Arena>) {
    #[cfg(target_os = "linux")]
    // SAFETY: takes and changes no memory; with 0, the priority of the calling thread.
    unsafe {
        // the compute threads come first; it is no error when the system refuses
        libc::setpriority(libc::PRIO_PROCESS, 0, 10);
    }
    let mut offset = 0;
    while let Some(next) = arena.upgrade().and_then(|arena| arena.commit_from(offset)) {
        offset = next;
    }
}

impl Drop for Arena {
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
        let arena = Arc::new(Arena::new(COMMIT_STEP * 2 + 4096).unwrap());
        // SAFETY: nobody else uses it.
        unsafe { arena.at(COMMIT_STEP, 1).write(7) };
        assert_eq!(arena.commit_from(0), Some(COMMIT_STEP));
        assert_eq!(arena.untouched.load(Ordering::Relaxed), arena.len() as u64, "counted at the end");
        commit(&Arc::downgrade(&arena));
        assert_eq!(arena.untouched.load(Ordering::Relaxed), 0);
        // SAFETY: as above.
        assert_eq!(unsafe { arena.at(COMMIT_STEP, 1).read() }, 7, "what was there is still there");
        let gone = Arc::downgrade(&arena);
        drop(arena);
        commit(&gone);
    }
}
