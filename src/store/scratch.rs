//! Slots for what only drafted tokens want.
//!
//! Such a block tells nothing of what is worth keeping, and most likely nobody wants it again: the policy never sees it. It is in
//! its class's *ring*, of which the oldest is overwritten first. The rings take their slots from the one budget, and give them back
//! as they are used less.

use super::policy::{Lru, Policy};
use super::{BlockId, Plan};

/// A ring takes so small a part of its class from the policy. What slots are free it may have besides.
const PART: u32 = 8;
/// So many passes it takes until most of what drafts do not use is given back.
const PASSES: f32 = 32.0;
const OUTSIDE: u64 = u64::MAX;

/// How old an entry must be.
#[derive(Clone, Copy)]
pub(super) enum Age {
    /// Asked for by an earlier pass.
    Pass,
    /// Asked for by an earlier layer.
    Layer,
    /// Any.
    Any,
}

/// The rings of a store.
pub(super) struct Scratch {
    rings: Lru,
    /// Per block: which layer asked for it last, of all that ever began; [`OUTSIDE`] when it is in no ring. Rises along a ring.
    asked: Vec<u64>,
    classes: Vec<Ring>,
    layer: u64,
    /// The layer with which the pass began.
    began: u64,
    pass: u32,
}

#[derive(Clone)]
struct Ring {
    len: u32,
    /// The length up to which drafts may evict what the policy keeps.
    most: u32,
    /// The length that the last passes made use of.
    wanted: f32,
    /// Blocks that this pass has asked for.
    count: u32,
}

impl Ring {
    fn wanted(&self) -> u32 {
        self.wanted.round() as u32
    }
}

impl Scratch {
    pub(super) fn new(plan: &Plan) -> Self {
        let ring = |slots: u32| Ring { len: 0, most: (slots / PART).max(1), wanted: 0.0, count: 0 };
        Self {
            rings: Lru::new(plan.n_blocks as usize, plan.classes.len()),
            asked: vec![OUTSIDE; plan.n_blocks as usize],
            classes: plan.classes.iter().map(|class| ring(class.slots)).collect(),
            // what was asked for in layer 0 may always go
            layer: 1,
            began: 1,
            pass: 0,
        }
    }

    /// What is asked for from now on is for another layer, of the pass `pass`.
    pub(super) fn layer_begins(&mut self, pass: u32) {
        self.layer += 1;
        if std::mem::replace(&mut self.pass, pass) == pass {
            return;
        }
        self.began = self.layer;
        for ring in &mut self.classes {
            let count = std::mem::take(&mut ring.count).min(ring.most);
            ring.wanted += (count as f32 - ring.wanted) / PASSES;
        }
    }

    /// Whether `block` is in a ring.
    pub(super) fn has(&self, block: BlockId) -> bool {
        self.asked[block as usize] != OUTSIDE
    }

    /// A draft asks for `block`, which has a slot of `class` and is in its ring already or in nobody's keeping.
    pub(super) fn ask(&mut self, block: BlockId, class: usize) {
        let before = std::mem::replace(&mut self.asked[block as usize], self.layer);
        let ring = &mut self.classes[class];
        if before == OUTSIDE {
            ring.len += 1;
            self.rings.inserted(block, class);
        } else {
            self.rings.used(block);
        }
        // once in a pass
        if before == OUTSIDE || before < self.began {
            ring.count += 1;
            ring.wanted = ring.wanted.max(ring.count.min(ring.most) as f32);
        }
    }

    /// `block`, which the policy gave up, is to be overwritten next.
    pub(super) fn add_oldest(&mut self, block: BlockId, class: usize) {
        self.asked[block as usize] = 0;
        self.classes[class].len += 1;
        self.rings.push_oldest(block, class);
    }

    /// Takes `block` out of its ring.
    pub(super) fn remove(&mut self, block: BlockId, class: usize) {
        self.asked[block as usize] = OUTSIDE;
        self.classes[class].len -= 1;
        self.rings.removed(block);
    }

    /// The oldest entry that is of this `age` and `may_go`.
    pub(super) fn oldest(&self, class: usize, age: Age, may_go: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let before = match age {
            Age::Pass => self.began,
            Age::Layer => self.layer,
            Age::Any => OUTSIDE,
        };
        self.rings.oldest_first(class).take_while(|&b| self.asked[b as usize] < before).find(|&b| may_go(b))
    }

    /// Whether drafts may evict something else for the ring of `class`.
    pub(super) fn may_grow(&self, class: usize) -> bool {
        self.classes[class].len < self.classes[class].most
    }

    /// Whether the ring of `class` is shorter than drafts make use of.
    pub(super) fn is_short(&self, class: usize) -> bool {
        self.classes[class].len < self.classes[class].wanted()
    }

    /// Whether the ring of `class` is longer than drafts make use of.
    pub(super) fn is_long(&self, class: usize) -> bool {
        self.classes[class].len > self.classes[class].wanted()
    }

    /// How many blocks the ring of `class` has, and how many it may take from the policy.
    #[cfg(test)]
    pub(super) fn len_and_most(&self, class: usize) -> (u32, u32) {
        (self.classes[class].len, self.classes[class].most)
    }
}

#[cfg(test)]
mod tests;
