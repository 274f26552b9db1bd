//! Processor time.

use std::time::Duration;

/// The processor time that the calling thread has used, by it and by the system for it. Costs a system call; 0 where the
/// system does not tell.
pub fn of_this_thread() -> Duration {
    #[cfg(unix)]
    {
        use rustix::time::{ClockId, clock_gettime};

        Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
    }
    #[cfg(not(unix))]
    Duration::ZERO
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn it_grows_with_work_and_is_each_threads_own() {
        let began = of_this_thread();
        // until it is seen
        while of_this_thread() == began {}
        let mine = of_this_thread();
        assert!(mine > began);
        let other = std::thread::scope(|scope| scope.spawn(of_this_thread).join().unwrap_or_default());
        assert!(other > Duration::ZERO && of_this_thread() >= mine);
    }
}
