//! Reads of what may be needed soon, while the device has nothing better to do.
//!
//! A guess gets a slot only when its read is issued, and its read is issued only when hardly any other is under way: what
//! is needed now is never behind more than a few of them. A slot that was filled by a guess is kept until its layer has
//! passed, but not from those that need it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use crate::io::Read;
use crate::lookahead::Guesses;
use crate::store::{Acquired, BlockId, State};

use super::{Core, Streamer};

/// Guesses are read while fewer reads than this are under way. Enough to keep a device busy, and few enough that those
/// in the way of what turns out to be needed are soon done.
pub const MOST_IN_FLIGHT: usize = 8;

/// What is known of a block that was guessed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mark {
    /// It is pinned until its layer has passed.
    held: bool,
    /// It was read because it was guessed, and nobody has needed it yet.
    unproven: bool,
    /// Its read is under way.
    in_flight: bool,
}

/// The guesses of a streamer.
pub(super) struct Ahead {
    queue: VecDeque<BlockId>,
    marks: Vec<Mark>,
    /// The blocks whose mark says so, with the first tensor of their layer.
    held: Vec<(BlockId, usize)>,
    /// Tensors that were used once: what belongs to others may be computed elsewhere, and never be asked for.
    used: Vec<bool>,
}

impl Ahead {
    pub(super) fn new(n_blocks: usize, n_tensors: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            marks: vec![Mark::default(); n_blocks],
            held: Vec::new(),
            used: vec![false; n_tensors],
        }
    }

    /// `tensor` is being used.
    pub(super) fn use_tensor(&mut self, tensor: usize) {
        self.used[tensor] = true;
    }

    /// The read of `block` has ended. Answers whether it was a guess.
    pub(super) fn ended(&mut self, block: BlockId) -> bool {
        std::mem::take(&mut self.marks[block as usize].in_flight)
    }

    /// The read of `block`, a guess, has failed: the next read of it is not the guess's.
    pub(super) fn failed(&mut self, block: BlockId) {
        self.marks[block as usize].unproven = false;
    }

    /// Somebody needs `block`. Answers whether a guess has brought it.
    pub(super) fn prove(&mut self, block: BlockId) -> bool {
        std::mem::take(&mut self.marks[block as usize].unproven)
    }
}

impl Core {
    /// Whether `tensor` is computed with here, as far as the first pass has shown.
    pub(super) fn uses(&self, tensor: usize) -> bool {
        self.pass < 2 || self.ahead.used[tensor]
    }

    /// Gives back the pins of guesses of layers other than those from `first` to `last` (first tensors). Answers whether
    /// there were any.
    fn release_held(&mut self, keep: std::ops::RangeInclusive<usize>) -> bool {
        let before = self.ahead.held.len();
        let Self { ahead: Ahead { held, marks, .. }, store, stats, .. } = self;
        held.retain(|&(block, lead)| {
            if keep.contains(&lead) {
                return true;
            }
            let mark = &mut marks[block as usize];
            mark.held = false;
            if std::mem::take(&mut mark.unproven) {
                stats.guess_wasted(lead);
            }
            store.unpin(block);
            false
        });
        self.ahead.held.len() < before
    }

    /// Those who need slots now get those of the guesses.
    #[allow(clippy::reversed_empty_ranges)]
    pub(super) fn give_up_guesses(&mut self) -> bool {
        self.ahead.queue.clear();
        self.release_held(1..=0)
    }

    fn hold(&mut self, block: BlockId, lead: usize) {
        let mark = &mut self.ahead.marks[block as usize];
        if !std::mem::replace(&mut mark.held, true) {
            self.ahead.held.push((block, lead));
            self.store.pin(block);
        }
    }
}

impl Streamer {
    /// The layer of the tensor `at`, its first, is being computed; `guesses` are the likely experts of the next layers, the
    /// nearest first. They replace the guesses made before. Answers how many matrices of them are not in memory; `None`
    /// without guesses. Any thread.
    pub fn guess(&self, at: usize, guesses: &[Guesses]) -> Option<usize> {
        let mut guard = self.core.lock();
        let core = &mut *guard;
        core.ahead.queue.clear();
        let last = guesses.iter().map(|g| g.tensor).max().unwrap_or(at);
        core.release_held(at..=last.max(at));
        for Guesses { tensor, experts } in guesses {
            for t in self.parts_from(*tensor) {
                if !core.uses(t) {
                    continue;
                }
                for block in self.blocks_of(core, t, experts.iter().map(|guess| guess.expert)) {
                    match core.store.state(block) {
                        State::Absent => core.ahead.queue.push_back(block),
                        State::Ready | State::Loading => core.hold(block, *tensor),
                        State::Failed => {}
                    }
                }
            }
        }
        let absent = core.ahead.queue.len();
        self.pump(core);
        (!guesses.is_empty()).then_some(absent)
    }

    /// As many guesses as the device has time for, appended to `batch`.
    pub(super) fn pump_guesses(&self, core: &mut Core, batch: &mut Vec<Read>) {
        while core.in_flight < MOST_IN_FLIGHT.min(self.engine.depth()) {
            let Some(block) = core.ahead.queue.pop_front() else { break };
            if core.store.state(block) != State::Absent {
                continue;
            }
            if self.take_slot(core, block, true) != Acquired::Reserved {
                // every slot is taken by what is needed now
                core.ahead.queue.clear();
                break;
            }
            let read = self.read_of(core, block);
            core.hold(block, self.lead_of[self.tensor_of[block as usize] as usize]);
            let mark = &mut core.ahead.marks[block as usize];
            (mark.unproven, mark.in_flight) = (true, true);
            batch.push(read);
            core.in_flight += 1;
        }
        self.hungry.store(usize::from(!core.ahead.queue.is_empty()), Ordering::Relaxed);
    }
}
