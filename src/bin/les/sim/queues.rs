//! Two policies from the literature that need neither values nor more than a bit or two per block, to compare with.

use std::collections::VecDeque;

use les::store::{BlockId, Policy};

/// SIEVE (Zhang et al., NSDI 2024): first in, first out, except that a hand passes over what was used since it came by.
pub struct Sieve {
    /// Oldest first.
    order: Vec<BlockId>,
    visited: Vec<bool>,
    hand: usize,
}

impl Sieve {
    pub fn new(n_blocks: usize) -> Self {
        Self { order: Vec::new(), visited: vec![false; n_blocks], hand: 0 }
    }
}

impl Policy for Sieve {
    fn inserted(&mut self, block: BlockId, _: usize) {
        self.visited[block as usize] = false;
        self.order.push(block);
    }

    fn used(&mut self, block: BlockId) {
        self.visited[block as usize] = true;
    }

    fn removed(&mut self, block: BlockId) {
        if let Some(at) = self.order.iter().position(|&b| b == block) {
            self.order.remove(at);
            self.hand -= usize::from(at < self.hand);
        }
    }

    fn victim(&mut self, _: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId> {
        // once to take the marks away, once more to find
        for _ in 0..2 * self.order.len() {
            if self.hand >= self.order.len() {
                self.hand = 0;
            }
            let block = self.order[self.hand];
            if evictable(block) && !std::mem::take(&mut self.visited[block as usize]) {
                return Some(block);
            }
            self.hand += 1;
        }
        None
    }
}

/// What of the slots is for blocks that were not used twice.
const SMALL_PART: usize = 10;
const MOST_USES: u8 = 3;

/// S3-FIFO (Yang et al., SOSP 2023): a small queue that what is used once leaves soon, a main one, and the names of what
/// left the small one.
pub struct S3Fifo {
    small: VecDeque<BlockId>,
    main: VecDeque<BlockId>,
    ghost: VecDeque<BlockId>,
    uses: Vec<u8>,
    slots: usize,
}

impl S3Fifo {
    pub fn new(n_blocks: usize, slots: usize) -> Self {
        let queue = VecDeque::new;
        Self { small: queue(), main: queue(), ghost: queue(), uses: vec![0; n_blocks], slots }
    }
}

impl Policy for S3Fifo {
    fn inserted(&mut self, block: BlockId, _: usize) {
        self.uses[block as usize] = 0;
        match self.ghost.iter().position(|&b| b == block) {
            Some(at) => {
                self.ghost.remove(at);
                self.main.push_back(block);
            }
            None => self.small.push_back(block),
        }
    }

    fn used(&mut self, block: BlockId) {
        let uses = &mut self.uses[block as usize];
        *uses = (*uses + 1).min(MOST_USES);
    }

    fn removed(&mut self, block: BlockId) {
        if let Some(at) = self.small.iter().position(|&b| b == block) {
            self.small.remove(at);
            self.ghost.push_back(block);
            if self.ghost.len() > self.slots {
                self.ghost.pop_front();
            }
        } else {
            self.main.retain(|&b| b != block);
        }
    }

    fn victim(&mut self, _: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId> {
        // enough for every block to lose all its uses and to be seen once more
        for _ in 0..(usize::from(MOST_USES) + 2) * (self.small.len() + self.main.len()) {
            let from_small = self.main.is_empty() || self.small.len() > self.slots / SMALL_PART;
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let block = *queue.front()?;
            if !evictable(block) {
                queue.rotate_left(1);
                // the pinned ones may be all there is in this queue
                if !from_small || self.small.iter().any(|&b| evictable(b)) {
                    continue;
                }
                if let Some(at) = self.main.iter().position(|&b| evictable(b)) {
                    return self.main.get(at).copied();
                }
                return None;
            }
            let uses = &mut self.uses[block as usize];
            match (from_small, *uses) {
                (true, 2..) => {
                    self.small.pop_front();
                    self.main.push_back(block);
                }
                (false, 1..) => {
                    *uses -= 1;
                    self.main.rotate_left(1);
                }
                _ => return Some(block),
            }
        }
        self.small.iter().copied().find(|&b| evictable(b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sieve_spares_what_was_used_once() {
        let mut sieve = Sieve::new(5);
        (0..4).for_each(|b| sieve.inserted(b, 0));
        sieve.used(0);
        sieve.used(2);
        let mut order = Vec::new();
        while let Some(b) = sieve.victim(0, &|b| b != 3) {
            sieve.removed(b);
            order.push(b);
        }
        assert_eq!(order, [1, 0, 2]);
    }

    #[test]
    fn s3fifo_remembers_what_it_dropped() {
        let mut fifo = S3Fifo::new(40, 20);
        (0..20).for_each(|b| fifo.inserted(b, 0));
        assert_eq!(fifo.victim(0, &|b| b != 0), Some(1));
        fifo.removed(1);
        fifo.inserted(1, 0);
        assert_eq!(fifo.main, [1]);
        assert_eq!(fifo.victim(0, &|_| false), None);
    }
}
