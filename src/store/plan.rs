//! How a budget is cut into slots.

use crate::error::{Error, Result};
use crate::index::{Index, PART_ALIGN};

use super::BlockId;

/// Slot sizes within this ratio share a class: a few bytes lost per slot for one pool less.
const CLASS_RATIO: f64 = 0.97;

/// Slots of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// Bytes of a slot, a multiple of the alignment.
    pub slot_bytes: u64,
    /// How many slots there are.
    pub slots: u32,
    /// How many blocks compete for them.
    pub blocks: u32,
    /// Where the first slot begins in the arena.
    pub offset: u64,
    /// The number of the first slot, over all classes.
    pub first_slot: u32,
    /// The slots that one token needs.
    floor: u32,
}

/// What to read for a block: the aligned range of the file, and where the expert begins in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where to read, in bytes; a multiple of the alignment.
    pub offset: u64,
    /// How much, a multiple of the alignment.
    pub len: u64,
    /// The expert's first byte within the range.
    pub head: u64,
    /// Bytes from the range's start that must arrive.
    pub need: u64,
}

/// The layout of a store: classes of slots, cut from one budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Alignment of reads and slots, in bytes.
    pub align: u64,
    /// The classes, smallest slots first.
    pub classes: Vec<Class>,
    /// Per tensor of the index: the block of its expert 0. Those of the others follow.
    pub first_block: Vec<BlockId>,
    /// Per block: index into [`Plan::classes`].
    pub class_of: Vec<u16>,
    /// Blocks over all tensors.
    pub n_blocks: u32,
}

/// The aligned range that covers `bytes` bytes at `offset`.
pub fn extent(offset: u64, bytes: u64, align: u64) -> Extent {
    let start = offset / align * align;
    let head = offset - start;
    let need = head + bytes;
    Extent { offset: start, len: need.div_ceil(align) * align, head, need }
}

impl Plan {
    /// What `index` needs, before there is a budget: no class has slots yet. Reads are aligned to `align` bytes, or more.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is more of it than can be counted.
    pub fn layout(index: &Index, align: u64) -> Result<Self> {
        let too_much = || Error::Invalid("the model has more experts than can be counted".into());
        // so that the read of one packed matrix ends where that of the next one begins: they become one
        let align = if index.is_packed() { align.max(PART_ALIGN) } else { align };
        // per block
        let mut bytes = Vec::new();
        let mut first_block = Vec::with_capacity(index.tensors.len());
        for t in &index.tensors {
            let first = bytes.len() as u32;
            first.checked_add(t.n_expert()).ok_or_else(too_much)?;
            first_block.push(first);
            let of = |e: u32| extent(t.offset_of(e), t.bytes_of(e), align).len;
            if t.packed.is_some() {
                // each was held against the end of the file
                bytes.extend((0..t.n_expert()).map(of));
                continue;
            }
            // no extent below reaches past this
            let all = t.expert_bytes.checked_mul(t.ne[2]).and_then(|all| all.checked_add(t.offset));
            all.and_then(|end| end.checked_next_multiple_of(align)).ok_or_else(too_much)?;
            // where experts begin within an aligned block repeats after so many
            let most = (0..t.ne[2].min(align) as u32).map(of).max().unwrap_or(align);
            bytes.extend(std::iter::repeat_n(most, t.n_expert() as usize));
        }
        let n_blocks = bytes.len() as u32;
        let mut sizes = bytes.clone();
        sizes.sort_unstable();
        sizes.dedup();
        // from the largest down: a class takes every size that wastes little in its slots
        let mut classes: Vec<Class> = Vec::new();
        for &size in sizes.iter().rev() {
            if classes.last().is_none_or(|c| (size as f64) < CLASS_RATIO * c.slot_bytes as f64) {
                classes.push(Class { slot_bytes: size, slots: 0, blocks: 0, offset: 0, first_slot: 0, floor: 0 });
            }
        }
        classes.reverse();
        let class_of = bytes.iter().map(|&bytes| classes.partition_point(|c| c.slot_bytes < bytes) as u16).collect();
        let mut plan = Self { align, classes, first_block, class_of, n_blocks };
        plan.count(index.n_expert_used.max(1));
        let all = |all: u64, c: &Class| all.checked_add(c.slot_bytes.checked_mul(c.blocks.into())?);
        plan.classes.iter().try_fold(0, all).ok_or_else(too_much)?;
        Ok(plan)
    }

    /// Counts the blocks of each class, and those that a token needs, of `n_used` experts per layer: of a tensor whose experts
    /// are of several classes, its share of each.
    fn count(&mut self, n_used: u32) {
        let ends = self.first_block.iter().skip(1).copied().chain([self.n_blocks]);
        for (&first, end) in self.first_block.iter().zip(ends) {
            let mut blocks = vec![0_u32; self.classes.len()];
            self.class_of[first as usize..end as usize].iter().for_each(|&class| blocks[usize::from(class)] += 1);
            for (class, n) in self.classes.iter_mut().zip(blocks) {
                let share = (u64::from(n) * u64::from(n_used)).div_ceil(u64::from(end - first).max(1));
                class.blocks += n;
                class.floor += (share as u32).min(n);
            }
        }
    }

    /// The smallest budget that makes sense, in bytes: one token's experts.
    pub fn floor_bytes(&self) -> u64 {
        self.sum(|c| c.floor)
    }

    /// The largest budget that makes sense, in bytes: all experts.
    pub fn all_bytes(&self) -> u64 {
        self.sum(|c| c.blocks)
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.sum(|c| c.slots)
    }

    fn sum(&self, slots: impl Fn(&Class) -> u32) -> u64 {
        self.classes.iter().map(|c| c.slot_bytes * u64::from(slots(c))).sum()
    }

    /// [`Plan::layout`], cut.
    ///
    /// # Errors
    /// As [`Plan::layout`] and [`Plan::cut`].
    pub fn new(index: &Index, align: u64, budget: u64) -> Result<Self> {
        Self::layout(index, align)?.cut(budget)
    }

    /// The smallest and the largest budget.
    #[cfg(test)]
    pub(crate) fn bounds(index: &Index, align: u64) -> (u64, u64) {
        #[allow(clippy::unwrap_used)]
        let layout = Self::layout(index, align).unwrap();
        (layout.floor_bytes(), layout.all_bytes())
    }

    /// Checks that `budget` bytes are enough.
    ///
    /// # Errors
    /// [`Error::Budget`] when they are fewer than the floor; [`Error::Invalid`] for a model without experts.
    pub fn check(&self, budget: u64) -> Result<()> {
        let floor = self.floor_bytes();
        if self.n_blocks == 0 {
            return Err(Error::Invalid("the model has no routed experts to stream; use --les off".into()));
        }
        if budget < floor {
            return Err(Error::Budget { budget, floor_mib: floor.div_ceil(1 << 20) });
        }
        Ok(())
    }

    /// Cuts `budget` bytes into slots. Each class gets what one token needs; the rest is shared in proportion to what
    /// each class lacks, so that every tensor has the same part of its experts resident.
    ///
    /// # Errors
    /// As [`Plan::check`].
    pub fn cut(&self, budget: u64) -> Result<Self> {
        self.check(budget)?;
        let (floor, all) = (self.floor_bytes(), self.all_bytes());
        let mut plan = self.clone();
        let spare = (budget - floor).min(all - floor);
        let lacking = all - floor;
        let mut left = spare;
        for class in &mut plan.classes {
            let lack = u64::from(class.blocks - class.floor) * class.slot_bytes;
            let share = if lacking == 0 { 0 } else { u128::from(spare) * u128::from(lack) / u128::from(lacking) };
            let more = (share as u64 / class.slot_bytes).min(u64::from(class.blocks - class.floor)) as u32;
            class.slots = class.floor + more;
            left -= u64::from(more) * class.slot_bytes;
        }
        // what rounding left over
        for class in plan.classes.iter_mut().rev() {
            let more = (left / class.slot_bytes).min(u64::from(class.blocks - class.slots)) as u32;
            class.slots += more;
            left -= u64::from(more) * class.slot_bytes;
        }
        let (mut offset, mut slot) = (0, 0);
        for class in &mut plan.classes {
            (class.offset, class.first_slot) = (offset, slot);
            offset += u64::from(class.slots) * class.slot_bytes;
            slot += class.slots;
        }
        Ok(plan)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::index;
    use super::*;

    #[test]
    fn an_extent_covers_the_expert_and_is_aligned() {
        assert_eq!(extent(4096, 4096, 4096), Extent { offset: 4096, len: 4096, head: 0, need: 4096 });
        assert_eq!(extent(4100, 4096, 4096), Extent { offset: 4096, len: 8192, head: 4, need: 4100 });
        assert_eq!(extent(8191, 1, 4096), Extent { offset: 4096, len: 4096, head: 4095, need: 4096 });
    }

    #[test]
    fn the_budget_is_never_exceeded_and_never_below_the_floor() {
        let index = index(4, 16, 2, &[1000, 1000, 3000]);
        let (floor, all) = Plan::bounds(&index, 512);
        assert!(matches!(Plan::new(&index, 512, floor - 1), Err(Error::Budget { .. })));
        for budget in (floor..all + 5000).step_by(777) {
            let plan = Plan::new(&index, 512, budget).unwrap();
            assert!(plan.bytes() <= budget, "{} > {budget}", plan.bytes());
            assert!(plan.classes.iter().all(|c| c.slots >= c.floor && c.slots <= c.blocks));
        }
        assert_eq!(Plan::new(&index, 512, all).unwrap().bytes(), all);
        assert_eq!(Plan::new(&index, 512, u64::MAX).unwrap().bytes(), all);
    }

    #[test]
    fn classes_share_in_proportion() {
        let index = index(10, 100, 4, &[4096, 4096, 8192]);
        let (floor, all) = Plan::bounds(&index, 4096);
        let plan = Plan::new(&index, 4096, (floor + all) / 2).unwrap();
        let part: Vec<f64> = plan.classes.iter().map(|c| f64::from(c.slots) / f64::from(c.blocks)).collect();
        assert_eq!(part.len(), 2);
        assert!((part[0] - part[1]).abs() < 0.01, "{part:?}");
    }

    #[test]
    fn nearly_equal_sizes_share_a_class() {
        let index = index(2, 4, 1, &[100_000, 101_000, 200_000]);
        assert_eq!(Plan::new(&index, 512, u64::MAX).unwrap().classes.len(), 2);
    }

    #[test]
    fn slots_of_several_sizes_waste_less_than_a_twentieth() {
        // a matrix of 512 x 2048 in types from 2.0 to 8.5 bits, three at a time
        let bits = [2.0625, 2.3125, 2.5625, 2.625, 3.0625, 3.4375, 4.25, 4.5, 5.5, 6.5625, 8.5];
        let bytes: Vec<u64> = bits.iter().map(|bits| (bits * 512.0 * 2048.0 / 8.0) as u64).collect();
        for sizes in bytes.windows(3) {
            let index = index(10, 64, 8, &[sizes[0], sizes[1], sizes[2]]);
            let (floor, all) = Plan::bounds(&index, 4096);
            let budget = floor + (all - floor) / 4;
            let plan = Plan::new(&index, 4096, budget).unwrap();
            let used = |t: usize| {
                let class = &plan.classes[usize::from(plan.class_of[plan.first_block[t] as usize])];
                (index.tensors[t].expert_bytes as f64, class.slot_bytes as f64)
            };
            let (used, slots) = (0..index.tensors.len()).map(used).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
            let filled = used / slots * plan.bytes() as f64 / budget as f64;
            assert!(filled > 0.95, "{sizes:?}: {filled}");
        }
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let with = |offset, expert_bytes, n_expert| {
            let mut index = index(1, 2, 1, &[512, 512, 512]);
            let t = &mut index.tensors[2];
            (t.offset, t.expert_bytes, t.ne[2]) = (offset, expert_bytes, n_expert);
            index
        };
        for index in [
            with(32, u64::MAX / 2, 3),
            with(u64::MAX - 600, 512, 1),
            with(0, 1 << 62, 4),
            with(0, 1, u64::from(u32::MAX)),
        ] {
            assert!(matches!(Plan::new(&index, 512, u64::MAX), Err(Error::Invalid(_))), "{:?}", index.tensors[2]);
        }
    }
}
