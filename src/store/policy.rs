//! Which resident block to give up when a slot is needed.

use super::BlockId;

/// A replacement policy. It sees every use of a block and names victims; it neither reads nor knows layers' maths.
pub trait Policy: Send {
    /// `block` was given a slot of `class`.
    fn inserted(&mut self, block: BlockId, class: usize);
    /// A resident `block` was asked for.
    fn used(&mut self, block: BlockId);
    /// `block` lost its slot.
    fn removed(&mut self, block: BlockId);
    /// The block of `class` to evict, among those for which `evictable` holds.
    fn victim(&mut self, class: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId>;
    /// As [`Policy::victim`], but none that was asked for since the layer in progress began.
    fn idle_victim(&mut self, class: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId> {
        self.victim(class, evictable)
    }
    /// What is asked for from now on is for another layer.
    fn layer_begins(&mut self) {}
    /// What each block of `tensor` is worth keeping, the more the better.
    fn valued(&mut self, _tensor: usize, _values: &[f32]) {}
}

const NONE: BlockId = BlockId::MAX;

#[derive(Clone, Copy)]
struct Link {
    newer: BlockId,
    older: BlockId,
    class: u32,
}

/// Least recently used, one list per class.
pub struct Lru {
    links: Vec<Link>,
    /// Per class: the newest and the oldest block.
    ends: Vec<(BlockId, BlockId)>,
}

impl Lru {
    /// For blocks `0..n_blocks` in `n_classes` classes.
    pub fn new(n_blocks: usize, n_classes: usize) -> Self {
        Self {
            links: vec![Link { newer: NONE, older: NONE, class: u32::MAX }; n_blocks],
            ends: vec![(NONE, NONE); n_classes],
        }
    }

    fn unlink(&mut self, block: BlockId) {
        let Link { newer, older, class } = self.links[block as usize];
        let ends = &mut self.ends[class as usize];
        match newer {
            NONE => ends.0 = older,
            n => self.links[n as usize].older = older,
        }
        match older {
            NONE => ends.1 = newer,
            o => self.links[o as usize].newer = newer,
        }
    }

    fn push_newest(&mut self, block: BlockId, class: u32) {
        let ends = &mut self.ends[class as usize];
        self.links[block as usize] = Link { newer: NONE, older: ends.0, class };
        match ends.0 {
            NONE => ends.1 = block,
            n => self.links[n as usize].newer = block,
        }
        ends.0 = block;
    }

    /// As [`Policy::inserted`], but as the least recently used.
    pub(super) fn push_oldest(&mut self, block: BlockId, class: usize) {
        let ends = &mut self.ends[class];
        self.links[block as usize] = Link { newer: ends.1, older: NONE, class: class as u32 };
        match ends.1 {
            NONE => ends.0 = block,
            o => self.links[o as usize].older = block,
        }
        ends.1 = block;
    }

    /// The blocks of `class`, the least recently used first.
    pub(super) fn oldest_first(&self, class: usize) -> impl Iterator<Item = BlockId> {
        let some = |block: BlockId| (block != NONE).then_some(block);
        std::iter::successors(some(self.ends[class].1), move |&at| some(self.links[at as usize].newer))
    }
}

impl Policy for Lru {
    fn inserted(&mut self, block: BlockId, class: usize) {
        self.push_newest(block, class as u32);
    }

    fn used(&mut self, block: BlockId) {
        let class = self.links[block as usize].class;
        self.unlink(block);
        self.push_newest(block, class);
    }

    fn removed(&mut self, block: BlockId) {
        self.unlink(block);
    }

    fn victim(&mut self, class: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId> {
        self.oldest_first(class).find(|&block| evictable(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicts_the_least_recently_used_that_may_go() {
        let mut lru = Lru::new(8, 2);
        for b in 0..4 {
            lru.inserted(b, 0);
        }
        lru.inserted(7, 1);
        lru.used(0);
        assert_eq!(lru.victim(0, &|_| true), Some(1));
        assert_eq!(lru.victim(0, &|b| b != 1 && b != 2), Some(3));
        lru.removed(1);
        assert_eq!(lru.victim(0, &|_| true), Some(2));
        assert_eq!(lru.victim(1, &|_| true), Some(7));
        assert_eq!(lru.victim(0, &|_| false), None);
        lru.push_oldest(1, 0);
        lru.push_oldest(6, 1);
        assert_eq!(lru.oldest_first(0).collect::<Vec<_>>(), [1, 2, 3, 0]);
        assert_eq!(lru.oldest_first(1).collect::<Vec<_>>(), [6, 7]);
    }

    #[test]
    fn an_emptied_class_has_no_victim() {
        let mut lru = Lru::new(2, 1);
        lru.inserted(0, 0);
        lru.inserted(1, 0);
        lru.removed(0);
        lru.removed(1);
        assert_eq!(lru.victim(0, &|_| true), None);
        lru.push_oldest(1, 0);
        lru.inserted(0, 0);
        assert_eq!(lru.oldest_first(0).collect::<Vec<_>>(), [1, 0]);
    }
}
