//! Handles that cannot dangle: what C holds is a number in a pointer's clothes, looked up at each call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

/// Open handles of one kind. A number is never used again, so a closed handle stays closed.
pub struct Handles<T> {
    next: AtomicUsize,
    open: RwLock<Option<HashMap<usize, Arc<T>>>>,
}

impl<T> Handles<T> {
    pub const fn new() -> Self {
        Self { next: AtomicUsize::new(1), open: RwLock::new(None) }
    }

    /// A handle for `value`.
    pub fn open(&self, value: T) -> usize {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().get_or_insert_default().insert(id, Arc::new(value));
        id
    }

    /// What the handle stands for, if it is open.
    pub fn get(&self, id: usize) -> Option<Arc<T>> {
        self.open.read().as_ref()?.get(&id).cloned()
    }

    /// Closes the handle. Calls that are under way in other threads finish with what they have.
    pub fn close(&self, id: usize) -> Option<Arc<T>> {
        self.open.write().as_mut()?.remove(&id)
    }
}
