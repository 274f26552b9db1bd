//! Locks, so that the concurrency tests can put shuttle's in their place.

#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic::{AtomicU32, AtomicUsize};
#[cfg(not(feature = "shuttle"))]
use std::time::Duration;

#[cfg(not(feature = "shuttle"))]
pub use parking_lot::{Mutex, MutexGuard};

/// Tells threads apart.
#[cfg(not(feature = "shuttle"))]
pub type ThreadId = usize;

/// The calling thread. Unlike the standard library's, this takes no memory, which the main thread of a C program would
/// never give back.
#[cfg(not(feature = "shuttle"))]
pub fn this_thread() -> ThreadId {
    use std::sync::atomic::{AtomicUsize, Ordering};

    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static ID: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    ID.with(|id| *id)
}

/// A condition variable for [`Mutex`].
#[cfg(not(feature = "shuttle"))]
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

#[cfg(not(feature = "shuttle"))]
impl Condvar {
    /// Releases the lock, waits to be notified or for `limit`, and takes the lock again.
    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        self.0.wait_for(&mut guard, limit);
        guard
    }

    /// Wakes every waiter.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(feature = "shuttle")]
mod checked {
    pub use shuttle::sync::MutexGuard;
    pub use shuttle::sync::atomic::{AtomicU32, AtomicUsize};
    pub use shuttle::thread::ThreadId;

    /// [`parking_lot::Mutex`]'s interface over shuttle's.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// The calling thread.
    pub fn this_thread() -> ThreadId {
        shuttle::thread::current().id()
    }

    impl<T> Mutex<T> {
        /// A new lock.
        pub fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        /// Takes the lock.
        #[allow(clippy::unwrap_used)]
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        /// Takes the lock if nobody has it.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// A condition variable.
    #[derive(Debug, Default)]
    pub struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        /// Releases the lock, waits to be notified, and takes the lock again. Never times out: a lost wake-up shows as
        /// a deadlock.
        #[allow(clippy::unwrap_used)]
        pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>, _: std::time::Duration) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap()
        }

        /// Wakes every waiter.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

#[cfg(feature = "shuttle")]
pub use checked::{AtomicU32, AtomicUsize, Condvar, Mutex, MutexGuard, ThreadId, this_thread};
