//! The memory that slots are cut from: one anonymous mapping, committed by the system as it is first used.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapMut, MmapOptions};

use crate::error::{Error, Result};

/// Bytes of all arenas that no slot has used yet: the system believes them free.
static UNTOUCHED: AtomicU64 = AtomicU64::new(0);

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

impl Drop for Arena {
    fn drop(&mut self) {
        UNTOUCHED.fetch_sub(*self.untouched.get_mut(), Ordering::Relaxed);
    }
}
