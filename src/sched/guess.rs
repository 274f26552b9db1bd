//! Reads of what may be needed soon, while the device has nothing better to do.
//!
//! A guess gets a slot only when its read is issued, and its read is issued only when nothing that is needed is under way.
//! Guesses are read in a few lanes, each one after the other: what turns out to be needed is never behind more than one
//! per lane. A slot that was filled by a guess is kept until its layer has passed, but not from those that need it. Nothing
//! that the layer being computed uses goes for a guess.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use crate::io::Read;
use crate::lookahead::{Guess, Guesses};
use crate::store::{Acquired, Ask, BlockId, State};

use super::{Core, Streamer};

/// So many guesses are with the device at once: enough to keep it busy, and few enough that what turns out to be needed
/// is hardly delayed.
pub const LANES: usize = 2;
/// So many guesses are given to each lane, to be read one after the other also while nobody looks after the device.
pub(super) const IN_TURN: usize = 4;

/// What is known of a block that was guessed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mark {
    /// It is pinned until its layer has passed.
    held: bool,
    /// It was read because it was guessed, and nobody has needed it yet.
    unproven: bool,
    /// Its read is under way, in this lane.
    lane: Option<u8>,
}

/// A block that is kept because it was guessed.
#[derive(Clone, Copy)]
struct Held {
    block: BlockId,
    /// The first tensor of its layer.
    lead: usize,
    expert: u32,
}

/// The guesses of a streamer.
pub(super) struct Ahead {
    queue: VecDeque<BlockId>,
    /// Reads under way, by lane.
    lanes: [usize; LANES],
    marks: Vec<Mark>,
    /// The blocks whose mark says so.
    held: Vec<Held>,
    /// The layer being computed needs more slots than there are: none are left for guesses.
    pub(super) crowded: bool,
    /// Tensors that were used once: what belongs to others may be computed elsewhere, and never be asked for.
    used: Vec<bool>,
}

impl Ahead {
    pub(super) fn new(n_blocks: usize, n_tensors: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            lanes: [0; LANES],
            marks: vec![Mark::default(); n_blocks],
            held: Vec::new(),
            crowded: false,
            used: vec![false; n_tensors],
        }
    }

    /// The next layer begins: guesses whose reads were not issued are too late.
    pub(super) fn forget_queued(&mut self) {
        self.queue.clear();
    }

    /// `tensor` is being used.
    pub(super) fn use_tensor(&mut self, tensor: usize) {
        self.used[tensor] = true;
    }

    /// The read of `block` has ended. Answers whether it was a guess.
    pub(super) fn ended(&mut self, block: BlockId) -> bool {
        let lane = self.marks[block as usize].lane.take();
        lane.map(|lane| self.lanes[usize::from(lane)] -= 1).is_some()
    }

    /// Guesses whose reads are under way.
    fn in_flight(&self) -> usize {
        self.lanes.iter().sum()
    }

    /// How many slots are kept for the layer that the tensor `lead` leads.
    #[cfg(test)]
    pub(super) fn held_for(&self, lead: usize) -> usize {
        self.held.iter().filter(|held| held.lead == lead).count()
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
        self.progress.pass < 2 || self.ahead.used[tensor]
    }

    /// Gives back the pins of guesses, but for those to `keep`. Answers whether there were any.
    fn release_held(&mut self, keep: impl Fn(Held) -> bool) -> bool {
        let before = self.ahead.held.len();
        let Self { ahead: Ahead { held, marks, .. }, store, stats, .. } = self;
        held.retain(|&guess| {
            if keep(guess) {
                return true;
            }
            let Held { block, lead, .. } = guess;
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
    pub(super) fn give_up_guesses(&mut self) -> bool {
        self.ahead.queue.clear();
        self.release_held(|_| false)
    }

    /// The layer that `lead` leads wants these `experts`, in order, and the layer of `passed` has passed: gives back what was
    /// kept for it, and what was guessed wrong.
    pub(super) fn give_up_past(&mut self, passed: usize, lead: usize, experts: &[u32]) {
        self.release_held(|held| match held.lead == lead {
            true => experts.binary_search(&held.expert).is_ok(),
            false => held.lead != passed,
        });
    }

    fn hold(&mut self, held: Held) {
        let mark = &mut self.ahead.marks[held.block as usize];
        if !std::mem::replace(&mut mark.held, true) {
            self.ahead.held.push(held);
            self.store.pin(held.block);
        }
    }
}

impl Streamer {
    /// The layer of the tensor `at`, its first, is being computed; `guesses` are the likely experts of the next layers, the
    /// nearest first, of this pass or the next. They replace the guesses made before. Answers how many matrices of them are
    /// not in memory; `None` without guesses. Any thread.
    pub fn guess(&self, at: usize, guesses: &[Guesses]) -> Option<usize> {
        let mut guard = self.core.lock();
        let core = &mut *guard;
        core.ahead.queue.clear();
        let guesses = if core.ahead.crowded { &[] } else { guesses };
        core.release_held(|held| held.lead == at || guesses.iter().any(|g| g.tensor == held.lead));
        for Guesses { tensor, experts } in guesses {
            // expert by expert: one is of use when all of it is there
            for &Guess { expert, .. } in experts {
                for t in self.parts_from(*tensor) {
                    if !core.uses(t) {
                        continue;
                    }
                    for block in self.blocks_of(core, t, std::iter::once(expert)) {
                        match core.store.state(block) {
                            State::Absent => core.ahead.queue.push_back(block),
                            State::Ready | State::Loading => core.hold(Held { block, lead: *tensor, expert }),
                            State::Failed => {}
                        }
                    }
                }
            }
        }
        let absent = core.ahead.queue.len();
        self.pump(core);
        (!guesses.is_empty()).then_some(absent)
    }

    /// Gives the device as many guesses as it has time for. `batch` is empty, and is so afterwards.
    pub(super) fn pump_guesses(&self, core: &mut Core, batch: &mut Vec<Read>) {
        // what is needed has the device for itself
        let wanted = core.in_flight > core.ahead.in_flight();
        for lane in 0..LANES {
            if wanted || core.ahead.lanes[lane] > 0 {
                continue;
            }
            while batch.len() < IN_TURN
                && core.in_flight < self.engine.depth()
                && let Some(read) = self.next_guess(core, lane)
            {
                batch.push(read);
            }
            if !batch.is_empty() {
                self.engine.submit_in_turn(batch);
                batch.clear();
            }
        }
        self.hungry.store(usize::from(!core.ahead.queue.is_empty()), Ordering::Relaxed);
    }

    /// Gives the next guess that is not in memory a slot.
    fn next_guess(&self, core: &mut Core, lane: usize) -> Option<Read> {
        let block = loop {
            let block = core.ahead.queue.pop_front()?;
            if core.store.state(block) == State::Absent {
                break block;
            }
        };
        // of a verification nobody knows which rows will want it
        let ask = Ask { guess: true, draft: core.drafts.verifying };
        if self.take_slot(core, block, ask) != Acquired::Reserved {
            // every slot is taken by what this layer needs, or by nearer guesses
            core.ahead.queue.clear();
            return None;
        }
        let tensor = self.tensor_of[block as usize] as usize;
        let expert = block - core.store.plan().first_block[tensor];
        core.hold(Held { block, lead: self.lead_of[tensor], expert });
        let mark = &mut core.ahead.marks[block as usize];
        (mark.unproven, mark.lane) = (true, Some(lane as u8));
        core.ahead.lanes[lane] += 1;
        core.in_flight += 1;
        Some(self.read_of(core, block))
    }
}
