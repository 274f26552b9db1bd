//! The one memory budget: aligned slots, what is in them, and what to evict.
//!
//! The unit is a *block*: one matrix (up, gate or down) of one expert of one layer. A plain state machine without
//! locks or I/O; [`sched`](crate::sched) drives it.

mod arena;
mod plan;
mod policy;
mod scratch;
#[cfg(test)]
pub(crate) mod testing;
mod valued;

pub use arena::Arena;
pub use plan::{Class, Extent, Plan, extent};
pub use policy::{Lru, Policy};
pub use valued::Valued;

use scratch::{Age, Scratch};

/// The number of a block, see [`Plan::first_block`].
pub type BlockId = u32;

/// What is known of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// In the file only.
    Absent,
    /// Has a slot that a read fills, or will fill.
    Loading,
    /// Its slot holds its bytes.
    Ready,
    /// Its last read failed, and nobody has been told yet.
    Failed,
}

#[derive(Clone, Copy)]
struct Block {
    state: State,
    pins: u32,
    slot: u32,
    /// It was read for drafts into a slot of what the policy would have kept.
    displaced: bool,
}

/// How a block is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ask {
    /// It may not be needed: nothing is evicted that was asked for since the layer in progress began.
    pub guess: bool,
    /// As far as is known only drafted tokens want it, which may be rejected: it displaces what others like it have brought, and
    /// hardly anything else.
    pub draft: bool,
}

/// The answer to [`Store::acquire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquired {
    /// In memory.
    Ready,
    /// Being read for someone else.
    Loading,
    /// It has a slot now; the caller must have it read.
    Reserved,
    /// Every slot of its class is pinned, being filled, or not to be had.
    Full,
    /// Its last read failed.
    Failed,
}

const NO_SLOT: u32 = u32::MAX;

/// Slots and what is in them.
pub struct Store {
    plan: Plan,
    policy: Box<dyn Policy>,
    /// Has the blocks with a slot that the policy does not have.
    scratch: Scratch,
    blocks: Vec<Block>,
    free: Vec<Vec<u32>>,
    /// Per class: slots below this one have been used.
    high_water: Vec<u32>,
    fresh_bytes: u64,
    evictions: u64,
    evictions_for_drafts: u64,
    evictions_for_accepted: u64,
}

impl Store {
    /// An empty store.
    pub fn new(plan: Plan, policy: Box<dyn Policy>) -> Self {
        // the last is taken first: slots fill from the start of the arena
        let free = plan.classes.iter().map(|c| (c.first_slot..c.first_slot + c.slots).rev().collect()).collect();
        let blocks =
            vec![Block { state: State::Absent, pins: 0, slot: NO_SLOT, displaced: false }; plan.n_blocks as usize];
        let high_water = plan.classes.iter().map(|c| c.first_slot).collect();
        let scratch = Scratch::new(&plan);
        Self {
            plan,
            policy,
            scratch,
            blocks,
            free,
            high_water,
            fresh_bytes: 0,
            evictions: 0,
            evictions_for_drafts: 0,
            evictions_for_accepted: 0,
        }
    }

    /// How the budget is cut.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of the slots that were used for the first time since the last call.
    pub fn take_fresh_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.fresh_bytes)
    }

    /// Blocks evicted so far.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Of these, blocks that the policy would have kept, evicted because drafts wanted others.
    pub fn evictions_for_drafts(&self) -> u64 {
        self.evictions_for_drafts
    }

    /// Of these, evicted for what was [promoted](Store::promote), without a loss for the ring.
    pub fn evictions_for_accepted(&self) -> u64 {
        self.evictions_for_accepted
    }

    /// The state of `block`.
    pub fn state(&self, block: BlockId) -> State {
        self.blocks[block as usize].state
    }

    /// Asks for `block` because it is needed: a use in the policy's eyes. When it is absent it gets a slot, evicting if need be.
    pub fn acquire(&mut self, block: BlockId) -> Acquired {
        self.acquire_as(block, Ask::default())
    }

    /// As [`Store::acquire`], for whom `ask` tells.
    pub fn acquire_as(&mut self, block: BlockId, ask: Ask) -> Acquired {
        match self.state(block) {
            State::Ready => {
                self.used(block, ask);
                Acquired::Ready
            }
            State::Loading => {
                self.used(block, ask);
                Acquired::Loading
            }
            State::Failed => Acquired::Failed,
            State::Absent => match self.take_slot(block, ask) {
                Some((slot, displaced)) => {
                    let b = &mut self.blocks[block as usize];
                    (b.state, b.slot, b.displaced) = (State::Loading, slot, displaced);
                    let class = self.class_of(block);
                    match ask.draft {
                        true => self.scratch.ask(block, class),
                        false => self.policy.inserted(block, class),
                    }
                    Acquired::Reserved
                }
                None => Acquired::Full,
            },
        }
    }

    fn used(&mut self, block: BlockId, ask: Ask) {
        match (self.scratch.has(block), ask.draft) {
            (false, _) => self.policy.used(block),
            (true, true) => self.scratch.ask(block, self.class_of(block)),
            (true, false) => self.promote(block),
        }
    }

    /// Somebody wants `block` who is certain to stand: the policy keeps it from now on, if it is still there. In exchange it gives
    /// up another one, where drafts would need the slot.
    pub fn promote(&mut self, block: BlockId) {
        if !self.scratch.has(block) {
            return;
        }
        let class = self.class_of(block);
        self.scratch.remove(block, class);
        let displaced = std::mem::take(&mut self.blocks[block as usize].displaced);
        let blocks = &self.blocks;
        if self.scratch.is_short(class)
            && let Some(other) = self.policy.idle_victim(class, &|b| may_go(blocks, b))
        {
            self.policy.removed(other);
            self.scratch.add_oldest(other, class);
        } else {
            self.evictions_for_accepted += u64::from(displaced);
        }
        self.policy.inserted(block, class);
    }

    /// What is asked for from now on is for another layer, of the pass that has this number.
    pub fn layer_begins(&mut self, pass: u32) {
        self.policy.layer_begins();
        self.scratch.layer_begins(pass);
    }

    /// What each expert of `tensor` is worth keeping, the more the better.
    pub fn set_values(&mut self, tensor: usize, values: &[f32]) {
        self.policy.valued(tensor, values);
    }

    /// Whether there are fewer slots than blocks, so that something will have to go.
    pub fn evicts(&self) -> bool {
        self.plan.classes.iter().any(|c| c.slots < c.blocks)
    }

    /// Where the slot of a block that is loading or ready begins in the arena.
    pub fn slot_offset(&self, block: BlockId) -> u64 {
        let class = &self.plan.classes[self.class_of(block)];
        let slot = self.blocks[block as usize].slot;
        class.offset + u64::from(slot - class.first_slot) * class.slot_bytes
    }

    /// Bytes of the slots that a block may be in.
    pub fn slot_bytes(&self, block: BlockId) -> u64 {
        self.plan.classes[self.class_of(block)].slot_bytes
    }

    /// The read of a loading block ended well.
    pub fn filled(&mut self, block: BlockId) {
        self.blocks[block as usize].state = State::Ready;
    }

    /// The read of a loading block failed: its slot is free again.
    pub fn failed(&mut self, block: BlockId) {
        let slot = self.blocks[block as usize].slot;
        let class = self.class_of(block);
        self.let_go(block, class);
        self.free[class].push(slot);
        let b = &mut self.blocks[block as usize];
        (b.state, b.slot) = (State::Failed, NO_SLOT);
    }

    /// The failure has been reported: the next request reads again.
    pub fn forgive(&mut self, block: BlockId) {
        if self.state(block) == State::Failed {
            self.blocks[block as usize].state = State::Absent;
        }
    }

    /// Keeps `block` from being evicted until [`Store::unpin`].
    pub fn pin(&mut self, block: BlockId) {
        self.blocks[block as usize].pins += 1;
    }

    /// Takes one pin back.
    pub fn unpin(&mut self, block: BlockId) {
        let pins = &mut self.blocks[block as usize].pins;
        debug_assert!(*pins > 0, "unpinned more often than pinned");
        *pins = pins.saturating_sub(1);
    }

    /// How many pins `block` has.
    #[cfg(test)]
    pub(crate) fn pins(&self, block: BlockId) -> u32 {
        self.blocks[block as usize].pins
    }

    /// Whether the policy does not know of `block`, though it has a slot.
    #[cfg(test)]
    pub(crate) fn is_scratch(&self, block: BlockId) -> bool {
        self.scratch.has(block)
    }

    fn class_of(&self, block: BlockId) -> usize {
        usize::from(self.plan.class_of[block as usize])
    }

    /// `block` loses its slot. Answers whether the policy had it.
    fn let_go(&mut self, block: BlockId, class: usize) -> bool {
        let kept = !self.scratch.has(block);
        match kept {
            true => self.policy.removed(block),
            false => self.scratch.remove(block, class),
        }
        kept
    }

    /// A slot for `block`, and whether drafts took it from what the policy would have kept.
    fn take_slot(&mut self, block: BlockId, ask: Ask) -> Option<(u32, bool)> {
        let class = self.class_of(block);
        if let Some(slot) = self.free[class].pop() {
            if slot >= self.high_water[class] {
                self.high_water[class] = slot + 1;
                self.fresh_bytes += self.plan.classes[class].slot_bytes;
            }
            return Some((slot, false));
        }
        let victim = self.victim(class, ask)?;
        let kept = self.let_go(victim, class);
        self.evictions += 1;
        let displaced = kept && ask.draft;
        self.evictions_for_drafts += u64::from(displaced);
        let v = &mut self.blocks[victim as usize];
        v.state = State::Absent;
        Some((std::mem::replace(&mut v.slot, NO_SLOT), displaced))
    }

    fn victim(&mut self, class: usize, ask: Ask) -> Option<BlockId> {
        let Self { policy, scratch, blocks, .. } = self;
        let may_go = |b: BlockId| may_go(blocks, b);
        let ring = |age| scratch.oldest(class, age, may_go);
        let first = match ask.draft {
            true => ring(Age::Pass)
                .or_else(|| scratch.may_grow(class).then(|| policy.idle_victim(class, &may_go)).flatten())
                .or_else(|| ring(Age::Layer)),
            false => scratch.is_long(class).then(|| ring(Age::Layer)).flatten(),
        };
        match ask {
            Ask { guess: true, draft: true } => first,
            Ask { guess: true, draft: false } => first.or_else(|| policy.idle_victim(class, &may_go)),
            // what must be had takes what there is
            Ask { guess: false, .. } => first.or_else(|| policy.victim(class, &may_go)).or_else(|| ring(Age::Any)),
        }
    }
}

fn may_go(blocks: &[Block], block: BlockId) -> bool {
    matches!(blocks[block as usize], Block { state: State::Ready, pins: 0, .. })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;

    use super::testing::index;
    use super::*;

    fn store(budget: u64, by_value: bool) -> Store {
        let index = index(2, 8, 2, &[1024, 1024, 2048]);
        let (floor, _) = Plan::bounds(&index, 512);
        let plan = Plan::new(&index, 512, floor + budget).unwrap();
        let policy: Box<dyn Policy> = match by_value {
            true => Box::new(Valued::new(&plan)),
            false => Box::new(Lru::new(plan.n_blocks as usize, plan.classes.len())),
        };
        Store::new(plan, policy)
    }

    #[test]
    fn what_is_pinned_or_loading_is_never_evicted() {
        for by_value in [false, true] {
            let mut s = store(0, by_value);
            let slots = s.plan().classes[0].slots;
            for b in 0..slots {
                assert_eq!(s.acquire(b), Acquired::Reserved);
            }
            assert_eq!(s.acquire(slots), Acquired::Full, "all are loading");
            for b in 0..slots {
                s.filled(b);
                s.pin(b);
            }
            assert_eq!(s.acquire(slots), Acquired::Full, "all are pinned");
            s.unpin(3);
            assert_eq!(s.acquire(slots), Acquired::Reserved);
            assert_eq!(s.state(3), State::Absent);
        }
    }

    #[test]
    fn a_failed_read_frees_its_slot_and_is_reported_once() {
        let mut s = store(0, true);
        assert_eq!(s.acquire(0), Acquired::Reserved);
        s.failed(0);
        assert_eq!(s.acquire(0), Acquired::Failed);
        s.forgive(0);
        assert_eq!(s.acquire(0), Acquired::Reserved);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Acquire(u32, Ask),
        Promote(u32),
        Finish(usize, bool),
        Pin(u32),
        Unpin(usize),
        Begin(u32),
        Value(usize, Vec<f32>),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0..48u32, any::<bool>(), any::<bool>())
                .prop_map(|(b, guess, draft)| Op::Acquire(b, Ask { guess, draft })),
            1 => (0..48u32).prop_map(Op::Promote),
            4 => (any::<usize>(), any::<bool>()).prop_map(|(i, ok)| Op::Finish(i, ok)),
            1 => (0..48u32).prop_map(Op::Pin),
            1 => any::<usize>().prop_map(Op::Unpin),
            1 => (0..3u32).prop_map(Op::Begin),
            1 => (0..6usize, proptest::collection::vec(any::<f32>(), 8)).prop_map(|(t, v)| Op::Value(t, v)),
        ]
    }

    proptest! {
        #[test]
        fn slots_are_never_shared_nor_outside_the_budget(ops in proptest::collection::vec(op(), 1..400), spare in 0..30_000u64, by_value: bool) {
            let mut s = store(spare, by_value);
            let budget = s.plan().bytes();
            let (mut loading, mut pinned) = (Vec::new(), Vec::new());
            for op in ops {
                match op {
                    Op::Acquire(b, ask) => match s.acquire_as(b, ask) {
                        Acquired::Reserved => {
                            prop_assert_eq!(s.scratch.has(b), ask.draft);
                            loading.push(b);
                        }
                        Acquired::Ready | Acquired::Loading if !ask.draft => prop_assert!(!s.scratch.has(b)),
                        Acquired::Full if !ask.guess => prop_assert_eq!(s.acquire(b), Acquired::Full),
                        Acquired::Failed => s.forgive(b),
                        _ => {}
                    },
                    Op::Finish(i, ok) if !loading.is_empty() => {
                        let b = loading.swap_remove(i % loading.len());
                        if ok { s.filled(b) } else if !pinned.contains(&b) { s.failed(b) } else { loading.push(b) }
                    }
                    Op::Pin(b) if matches!(s.state(b), State::Ready | State::Loading) => {
                        s.pin(b);
                        pinned.push(b);
                    }
                    Op::Unpin(i) if !pinned.is_empty() => {
                        let b = pinned.swap_remove(i % pinned.len());
                        s.unpin(b);
                    }
                    Op::Promote(b) => {
                        s.promote(b);
                        prop_assert!(!s.scratch.has(b));
                    }
                    Op::Begin(pass) => s.layer_begins(pass),
                    Op::Value(tensor, values) => s.set_values(tensor, &values),
                    _ => {}
                }
                let mut seen = HashSet::new();
                let mut by_slot = HashMap::new();
                let mut in_rings = vec![0; s.plan().classes.len()];
                for b in 0..s.plan().n_blocks {
                    in_rings[s.class_of(b)] += u32::from(s.scratch.has(b));
                    if matches!(s.state(b), State::Ready | State::Loading) {
                        let size = s.slot_bytes(b);
                        let at = s.slot_offset(b);
                        prop_assert!(at + size <= budget);
                        prop_assert!(seen.insert(at), "slot at {at} has two blocks");
                        by_slot.insert(at, size);
                    } else {
                        prop_assert!(!s.scratch.has(b));
                    }
                }
                prop_assert!(by_slot.values().sum::<u64>() <= budget);
                prop_assert!(pinned.iter().all(|&b| matches!(s.state(b), State::Ready | State::Loading)));
                for (class, n) in in_rings.into_iter().enumerate() {
                    prop_assert_eq!(s.scratch.len_and_most(class).0, n);
                }
            }
            // whoever had them, all slots can be had
            loading.into_iter().for_each(|b| s.filled(b));
            pinned.into_iter().for_each(|b| s.unpin(b));
            let mut left: Vec<u32> = s.plan().classes.iter().map(|c| c.slots).collect();
            for b in 0..s.plan().n_blocks {
                s.forgive(b);
                let class = s.class_of(b);
                match s.acquire(b) {
                    Acquired::Full => prop_assert_eq!(left[class], 0),
                    acquired => {
                        left[class] -= 1;
                        if acquired == Acquired::Reserved {
                            s.filled(b);
                        }
                        s.pin(b);
                    }
                }
            }
        }
    }
}
