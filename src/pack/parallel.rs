//! Work on matrices, on as many threads as there are processors and memory for.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use crate::error::Result;

/// What the matrices that are being worked on may take together.
const MEMORY: u64 = 384 << 20;

/// Does `work` for 0 to `n`, each time with about `bytes` of memory, on several threads, and `take`s what comes of it on
/// this one, in any order. Ends with the first error.
pub(super) fn each<T: Send>(
    n: usize,
    bytes: u64,
    work: impl Fn(usize) -> Result<T> + Sync,
    mut take: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    let processors = thread::available_parallelism().map_or(1, NonZero::get) as u64;
    let threads = processors.min(MEMORY / bytes.max(1)).min(n as u64).max(1);
    let next = AtomicUsize::new(0);
    // none is far ahead of what is taken
    let (done, results) = mpsc::sync_channel(1);
    thread::scope(|scope| {
        // dropped when this ends, so that the threads do
        let results = results;
        for _ in 0..threads {
            let (done, next, work) = (done.clone(), &next, &work);
            scope.spawn(move || {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= n || done.send((i, work(i))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(done);
        results.into_iter().try_for_each(|(i, result)| take(i, result?))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn each_once_whatever_the_memory() {
        for bytes in [0, 1, u64::MAX] {
            let mut taken = vec![0; 100];
            let take = |i: usize, result| {
                taken[i] += result;
                Ok(())
            };
            each(100, bytes, |i| Ok(i + 1), take).unwrap();
            assert_eq!(taken, (1..=100).collect::<Vec<_>>());
        }
        each(0, 1, |_| Ok(()), |_, ()| Err(Error::Invalid("there is nothing".into()))).unwrap();
    }

    #[test]
    fn an_error_ends_it() {
        let fail = |on: usize| move |i| if i == on { Err(Error::Invalid("stop".into())) } else { Ok(()) };
        assert!(each(1000, 1, fail(7), |_, ()| Ok(())).is_err());
        let mut taken = 0;
        let result = each(
            1000,
            1,
            |_| Ok(()),
            |_, ()| {
                taken += 1;
                fail(3)(taken)
            },
        );
        assert!(result.is_err() && taken == 3);
    }
}
