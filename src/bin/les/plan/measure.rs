//! How fast this machine reads, from its device and from its memory.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Context;
use les::index::Index;
use les::options::parse_bytes;

use crate::bench;

/// How long to measure each figure.
const LONG: Duration = Duration::from_millis(1200);
const SHORT: Duration = Duration::from_millis(400);
/// The last-level cache where the system does not tell.
const CACHE_BYTES: u64 = 32 << 20;
const LEAST_BUFFER: u64 = 64 << 20;
const LARGEST_BUFFER: u64 = 1 << 30;

/// 10^6 bytes per second that the device reads at `depth`, and the microseconds that a read takes besides, in the sizes
/// of the model's experts.
///
/// # Errors
/// When it cannot be read, or is too small to tell.
pub fn device(index: &Index, depth: usize) -> anyhow::Result<(f64, f64)> {
    let file = index.files.iter().max_by_key(|file| file.size).context("a model has a file")?;
    let sizes = bench::expert_sizes(index);
    let remedy = "the device cannot be measured; give --bandwidth";
    let (mb_per_s, _) = bench::quick(file, &sizes, depth, LONG).context(remedy)?;
    let (_, one_us) = bench::quick(file, &sizes, 1, SHORT).context(remedy)?;
    let bytes = sizes.iter().sum::<u64>() as f64 / sizes.len() as f64;
    Ok((mb_per_s, (one_us - bytes / mb_per_s).max(0.0)))
}

/// Bytes per second that all processors together read of memory, in a buffer that no cache holds, if there is room for it.
pub fn memory_bytes_per_s() -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let room = les::memory::available().unwrap_or(LARGEST_BUFFER) / 4;
    let bytes = (4 * last_level_cache()).clamp(LEAST_BUFFER, LARGEST_BUFFER).min(room).max(1 << 20);
    // written, so that each page is there
    let data = vec![1_u64; bytes as usize / 8];
    let (mut read, began) = (0, Instant::now());
    while began.elapsed() < SHORT {
        std::thread::scope(|scope| {
            for part in data.chunks(data.len().div_ceil(threads)) {
                scope.spawn(move || black_box(black_box(part).iter().fold(0_u64, |sum, x| sum.wrapping_add(*x))));
            }
        });
        read += 8 * data.len();
    }
    read as f64 / began.elapsed().as_secs_f64()
}

/// The largest cache of the first processor, in bytes.
fn last_level_cache() -> u64 {
    let sizes = (0..8).filter_map(|i| {
        let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok()?;
        parse_bytes(text.trim(), "")
    });
    sizes.max().unwrap_or(CACHE_BYTES)
}
