//! Handles that cannot dangle: what C holds is a number in a pointer's clothes, looked up at each call.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

/// Of all kinds, so that a handle of one kind is none of another.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Open handles of one kind. A number is never used again, so a closed handle stays closed.
pub struct Handles<T> {
    open: RwLock<BTreeMap<usize, Arc<T>>>,
}

impl<T> Handles<T> {
    pub const fn new() -> Self {
        Self { open: RwLock::new(BTreeMap::new()) }
    }

    /// A handle for `value`.
    pub fn open(&self, value: T) -> usize {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(id, Arc::new(value));
        id
    }

    /// What the handle stands for, if it is open.
    pub fn get(&self, id: usize) -> Option<Arc<T>> {
        self.open.read().get(&id).cloned()
    }

    /// Closes the handle. Calls that are under way in other threads finish with what they have.
    pub fn close(&self, id: usize) -> Option<Arc<T>> {
        self.open.write().remove(&id)
    }
}
