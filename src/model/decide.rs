//! Whether a model streams, and with how much memory.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::index::ExpertTensor;
use crate::memory;
use crate::options::{CacheSize, Mode, Options, Size};
use crate::store::Arena;

use super::{Model, fault_plan};

/// Kept free of the automatic cache for what llama.cpp allocates later (compute buffers above all), as a part of what
/// is available, and at the least.
const RESERVE_PART: f64 = 0.10;
const RESERVE_LEAST: u64 = 320 << 20;

/// What of the machine's memory all models together will still take before they have an arena.
static PROMISED: AtomicU64 = AtomicU64::new(0);

/// Memory that a model will take when it starts: others' automatic caches leave it alone.
#[derive(Debug, Default)]
pub(super) struct Promise(pub(super) u64);

impl Promise {
    fn new(bytes: u64) -> Self {
        PROMISED.fetch_add(bytes, Ordering::Relaxed);
        Self(bytes)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        PROMISED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// What was decided about a model, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether its experts stream.
    pub streams: bool,
    /// The memory that the experts will take, in bytes: the least, when that depends on what is left later.
    pub cache_bytes: u64,
    /// One line for the user. Empty for a model without routed experts.
    pub message: String,
}

impl Model {
    /// The smallest and the largest useful cache, in bytes.
    pub fn cache_bounds(&self) -> (u64, u64) {
        (self.layout.floor_bytes(), self.layout.all_bytes())
    }

    /// Decides whether the experts stream, and checks the size of the cache if one was given.
    ///
    /// # Errors
    /// [`Error::Budget`] when the cache is below the floor; [`Error::Invalid`] when the model streams already, or is packed,
    /// which means that it must stream, and the mode is off.
    pub fn decide(&self, options: &Options) -> Result<Decision> {
        let own = self.choice.lock().promise.0;
        self.decide_given(options, available(own))
    }

    /// As [`Model::decide`], with so many bytes of memory available; `None`: nobody knows.
    ///
    /// # Errors
    /// As [`Model::decide`].
    pub fn decide_given(&self, options: &Options, available: Option<u64>) -> Result<Decision> {
        let choice = &mut *self.choice.lock();
        if self.streamer.get().is_some() {
            return Err(Error::Invalid("the model streams already: its options can no longer change".into()));
        }
        let decision = self.consider(options, available)?;
        if decision.streams {
            (choice.options, choice.fault) = (options.clone(), fault_plan()?);
        }
        choice.promise = Promise::new(decision.cache_bytes);
        Ok(decision)
    }

    fn consider(&self, options: &Options, available: Option<u64>) -> Result<Decision> {
        let (floor, all) = self.cache_bounds();
        let off = |message: String| Ok(Decision { streams: false, cache_bytes: 0, message });
        if all == 0 {
            let asked = options.mode == Mode::On;
            return off(if asked { "the model has no routed experts: nothing streams".into() } else { String::new() });
        }
        let experts = Size(self.index.expert_bytes());
        let packed = self.index.is_packed();
        match options.mode {
            Mode::Off if packed => {
                let file = self.index.files[0].path.display();
                // a stock file has no room for experts of several types
                let other = match self.index.tensors.iter().any(ExpertTensor::is_mixed) {
                    true => "take the file that it was packed from",
                    false => "make a stock file of it with les unpack",
                };
                return Err(Error::Invalid(format!(
                    "{file}: the experts are packed for streaming and are not loaded into memory; use --les on or auto, \
                     or {other}"
                )));
            }
            Mode::Off => return off(format!("{experts} of experts are loaded into memory (--les off)")),
            Mode::On => {}
            Mode::Auto if packed => {}
            Mode::Auto if options.cache == CacheSize::Auto => {
                let free = available.unwrap_or(u64::MAX);
                let need = self.index.expert_bytes() + self.index.dense_bytes;
                if need + reserve(free) <= free {
                    return off(format!(
                        "the experts ({experts}) fit in memory ({} available) and do not stream; --les on makes them",
                        Size(free)
                    ));
                }
            }
            Mode::Auto => {}
        }
        let budget = self.budget(options.cache, available.map(|a| a.saturating_sub(self.index.dense_bytes)))?.min(all);
        if options.mode == Mode::Auto && budget == all && !packed {
            return off(format!("the experts ({experts}) fit in the cache and do not stream; --les on makes them"));
        }
        // rounded up: it is what --les-cache must be given
        let least = floor.next_multiple_of(1 << 20);
        let shown = Size(budget.max(least));
        let (how, cache_bytes) = match options.cache {
            CacheSize::Auto => (format!("what memory is left, about {shown}"), floor),
            _ => (format!("{shown}"), budget),
        };
        Ok(Decision {
            streams: true,
            cache_bytes,
            message: format!(
                "{experts} of experts stream from the file through a cache of {how} (at least {}, at most {}); \
                 --les-cache sets it{}",
                Size(least),
                Size(all),
                if packed { "" } else { ", --les off loads all" }
            ),
        })
    }

    /// The budget that `cache` means, in bytes, with so many available once the rest of the model is loaded.
    ///
    /// # Errors
    /// [`Error::Budget`] when it is below the floor; [`Error::Invalid`] for a model without experts.
    pub fn budget(&self, cache: CacheSize, available: Option<u64>) -> Result<u64> {
        let (floor, all) = self.cache_bounds();
        let budget = match cache {
            CacheSize::Min => floor,
            CacheSize::Bytes(bytes) => bytes,
            CacheSize::Part(part) => (all as f64 * part) as u64,
            // a machine that has less than the floor gets the floor: there is no less that works
            CacheSize::Auto => {
                available.map_or(floor.saturating_mul(2), |a| a.saturating_sub(reserve(a))).clamp(floor, all)
            }
        };
        self.layout.check(budget).map(|()| budget)
    }
}

/// What is available, less what other models' caches will still take. `own`: what was promised to the one that asks.
pub(super) fn available(own: u64) -> Option<u64> {
    let promised = PROMISED.load(Ordering::Relaxed).saturating_sub(own).saturating_add(Arena::promised());
    memory::available().map(|a| a.saturating_sub(promised))
}

fn reserve(available: u64) -> u64 {
    ((available as f64 * RESERVE_PART) as u64).max(RESERVE_LEAST)
}
