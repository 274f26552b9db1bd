//! Evicts what is worth least, by values that somebody else learns.

use super::{BlockId, Plan, Policy};

/// Gives up the block of the least value; of equal ones, and before any value is known, the least recently used.
///
/// What was asked for since the layer in progress began is given up last: its later parts, and what is read ahead for the
/// next layer, must not go before they are used, whatever they are worth afterwards.
pub struct Valued {
    /// Per tensor: its first block, and how many it has.
    tensors: Vec<(BlockId, u32)>,
    groups: Vec<Group>,
    group_of: Vec<u32>,
    /// Per class: its groups.
    by_class: Vec<Vec<u32>>,
    values: Vec<f32>,
    /// Per block: its value, or infinity when it is not resident.
    resident: Vec<f32>,
    /// Per block: when it was asked for last.
    used: Vec<u64>,
    now: u64,
    /// When the layer in progress began. What was asked for before it, or at any time before the first one, may go.
    began: u64,
}

/// The blocks of one tensor that are of one class.
struct Group {
    tensor: usize,
    /// The block to go first, pinned or not; looked for again when it may be another one.
    least: Option<Rank>,
    stale: bool,
}

#[derive(Clone, Copy)]
struct Rank {
    value: f32,
    used: u64,
    block: BlockId,
}

impl Rank {
    fn goes_before(&self, other: &Self) -> bool {
        self.value < other.value || (self.value == other.value && self.used < other.used)
    }
}

impl Valued {
    /// For the blocks of `plan`.
    pub fn new(plan: &Plan) -> Self {
        let ends = plan.first_block.iter().skip(1).copied().chain([plan.n_blocks]);
        let tensors = plan.first_block.iter().zip(ends);
        Self::of(tensors.map(|(&first, end)| plan.class_of[first as usize..end as usize].iter().map(|&c| c.into())))
    }

    /// For tensors whose blocks are in these classes, numbered in this order.
    pub fn of<T: Iterator<Item = usize>>(tensors: impl Iterator<Item = T>) -> Self {
        let mut list = Vec::new();
        let (mut groups, mut group_of, mut by_class): (Vec<Group>, Vec<u32>, Vec<Vec<u32>>) = Default::default();
        for (tensor, classes) in tensors.enumerate() {
            let first = group_of.len() as BlockId;
            for class in classes {
                if by_class.len() <= class {
                    by_class.resize_with(class + 1, Vec::new);
                }
                let last = by_class[class].last().copied().filter(|&g| groups[g as usize].tensor == tensor);
                let group = last.unwrap_or(groups.len() as u32);
                if last.is_none() {
                    by_class[class].push(group);
                    groups.push(Group { tensor, least: None, stale: false });
                }
                group_of.push(group);
            }
            list.push((first, group_of.len() as u32 - first));
        }
        let n = group_of.len();
        Self {
            tensors: list,
            groups,
            group_of,
            by_class,
            values: vec![0.0; n],
            resident: vec![f32::INFINITY; n],
            used: vec![0; n],
            now: 0,
            began: u64::MAX,
        }
    }

    fn rank(&self, block: BlockId) -> Rank {
        Rank { value: self.resident[block as usize], used: self.used[block as usize], block }
    }

    fn group(&mut self, block: BlockId) -> &mut Group {
        &mut self.groups[self.group_of[block as usize] as usize]
    }

    fn stamp(&mut self, block: BlockId) {
        self.now += 1;
        self.used[block as usize] = self.now;
    }

    /// The block of the group that goes first among those that `may_go`.
    fn first_to_go(&self, group: u32, may_go: impl Fn(BlockId) -> bool) -> Option<Rank> {
        let (first, n) = self.tensors[self.groups[group as usize].tensor];
        let mut best: Option<Rank> = None;
        for block in (first..first + n).filter(|&block| self.group_of[block as usize] == group) {
            let rank = self.rank(block);
            if rank.value < f32::INFINITY && best.is_none_or(|b| rank.goes_before(&b)) && may_go(block) {
                best = Some(rank);
            }
        }
        best
    }

    fn search(&mut self, class: usize, may_go: impl Fn(&Self, BlockId) -> bool) -> Option<BlockId> {
        let mut best: Option<Rank> = None;
        for i in 0..self.by_class.get(class)?.len() {
            let g = self.by_class[class][i];
            if self.groups[g as usize].stale {
                self.groups[g as usize].least = self.first_to_go(g, |_| true);
                self.groups[g as usize].stale = false;
            }
            let Some(least) = self.groups[g as usize].least else { continue };
            if best.is_some_and(|b| !least.goes_before(&b)) {
                continue;
            }
            let rank = if may_go(self, least.block) { Some(least) } else { self.first_to_go(g, |b| may_go(self, b)) };
            best = rank.filter(|r| best.is_none_or(|b| r.goes_before(&b))).or(best);
        }
        best.map(|b| b.block)
    }
}

impl Policy for Valued {
    fn inserted(&mut self, block: BlockId, _: usize) {
        self.stamp(block);
        self.resident[block as usize] = self.values[block as usize];
        let rank = self.rank(block);
        let group = self.group(block);
        if group.least.is_none_or(|least| rank.goes_before(&least)) {
            group.least = Some(rank);
        }
    }

    fn used(&mut self, block: BlockId) {
        self.stamp(block);
        let group = self.group(block);
        group.stale |= group.least.is_some_and(|least| least.block == block);
    }

    fn removed(&mut self, block: BlockId) {
        self.resident[block as usize] = f32::INFINITY;
        let group = self.group(block);
        group.stale |= group.least.is_some_and(|least| least.block == block);
    }

    fn victim(&mut self, class: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId> {
        self.idle_victim(class, evictable).or_else(|| self.search(class, |_, b| evictable(b)))
    }

    fn idle_victim(&mut self, class: usize, evictable: &dyn Fn(BlockId) -> bool) -> Option<BlockId> {
        let began = self.began;
        self.search(class, |this, b| this.used[b as usize] <= began && evictable(b))
    }

    fn layer_begins(&mut self) {
        self.began = self.now;
    }

    fn valued(&mut self, tensor: usize, values: &[f32]) {
        let Some(&(first, _)) = self.tensors.get(tensor).filter(|(_, n)| *n as usize == values.len()) else { return };
        for (block, &value) in (first as usize..).zip(values) {
            self.groups[self.group_of[block] as usize].stale = true;
            // what is not a number is worth nothing, and must not look absent
            let value = if value.is_finite() { value } else { 0.0 };
            self.values[block] = value;
            if self.resident[block] < f32::INFINITY {
                self.resident[block] = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn filled(tensors: &[(u32, usize)]) -> Valued {
        let mut policy = Valued::of(tensors.iter().map(|&(n, class)| std::iter::repeat_n(class, n as usize)));
        let mut block = 0;
        for &(n, class) in tensors {
            (0..n).for_each(|i| policy.inserted(block + i, class));
            block += n;
        }
        policy
    }

    #[test]
    fn without_values_the_least_recently_used_goes() {
        let mut policy = filled(&[(3, 0), (2, 1), (2, 0)]);
        assert_eq!(policy.victim(0, &|_| true), Some(0));
        policy.used(0);
        assert_eq!(policy.victim(0, &|_| true), Some(1));
        assert_eq!(policy.victim(0, &|b| b > 2), Some(5));
        assert_eq!(policy.victim(1, &|_| true), Some(3));
        assert_eq!(policy.victim(2, &|_| true), None);
        assert_eq!(policy.victim(0, &|_| false), None);
    }

    #[test]
    fn the_least_value_goes_whatever_its_layer() {
        let mut policy = filled(&[(3, 0), (3, 0)]);
        policy.valued(0, &[0.5, 0.2, 0.4]);
        policy.valued(1, &[0.3, f32::NAN, 0.1]);
        let mut order = Vec::new();
        while let Some(block) = policy.victim(0, &|_| true) {
            policy.removed(block);
            order.push(block);
        }
        assert_eq!(order, [4, 5, 1, 3, 2, 0]);
    }

    #[test]
    fn what_this_layer_asked_for_goes_last() {
        let mut policy = filled(&[(3, 0), (3, 0)]);
        policy.layer_begins();
        policy.used(4);
        policy.used(3);
        policy.valued(1, &[0.5, -1.0, 0.3]);
        policy.valued(0, &[0.1, 0.2, 0.4]);
        let mut idle = policy.idle_victim(0, &|b| b != 0);
        assert_eq!(idle, Some(1));
        let order: Vec<_> = (0..6)
            .map_while(|_| {
                idle = policy.idle_victim(0, &|_| true);
                policy.victim(0, &|_| true).inspect(|&b| {
                    assert!(idle == Some(b) || (idle.is_none() && [3, 4].contains(&b)), "{idle:?} {b}");
                    policy.removed(b);
                })
            })
            .collect();
        assert_eq!(order, [0, 1, 5, 2, 4, 3]);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32),
        Use(u32),
        Remove(u32),
        Evict(usize, u64),
        Begin,
        Value(usize, Vec<u8>),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..24u32).prop_map(Op::Insert),
            3 => (0..24u32).prop_map(Op::Use),
            1 => (0..24u32).prop_map(Op::Remove),
            4 => (0..2usize, any::<u64>()).prop_map(|(c, pins)| Op::Evict(c, pins)),
            1 => Just(Op::Begin),
            2 => (0..4usize, proptest::collection::vec(0..5u8, 6)).prop_map(|(t, v)| Op::Value(t, v)),
        ]
    }

    proptest! {
        /// Against a model that looks at every block.
        #[test]
        fn the_victim_is_the_one_that_a_full_search_finds(
            ops in proptest::collection::vec(op(), 1..300),
            blocks in proptest::collection::vec(any::<bool>(), 24),
        ) {
            let class_of = |block: u32| usize::from(blocks[block as usize]);
            let mut policy = Valued::of(blocks.chunks(6).map(|t| t.iter().map(|&class| class.into())));
            let mut resident: HashMap<u32, ()> = HashMap::new();
            for op in ops {
                match op {
                    Op::Insert(b) if !resident.contains_key(&b) => {
                        resident.insert(b, ());
                        policy.inserted(b, class_of(b));
                    }
                    Op::Use(b) if resident.contains_key(&b) => policy.used(b),
                    Op::Remove(b) if resident.remove(&b).is_some() => policy.removed(b),
                    Op::Begin => policy.layer_begins(),
                    Op::Value(t, values) => {
                        policy.valued(t, &values.iter().map(|&v| f32::from(v)).collect::<Vec<_>>());
                    }
                    Op::Evict(class, pins) => {
                        let may_go = |b: u32| pins >> b & 1 == 0;
                        let key = |b: u32| {
                            let (value, used) = (policy.values[b as usize], policy.used[b as usize]);
                            (used > policy.began, value as u32, used)
                        };
                        let expected = resident
                            .keys()
                            .copied()
                            .filter(|&b| class_of(b) == class && may_go(b))
                            .min_by_key(|&b| key(b));
                        let found = policy.victim(class, &may_go);
                        prop_assert_eq!(found, expected);
                        if let Some(b) = found {
                            resident.remove(&b);
                            policy.removed(b);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}
