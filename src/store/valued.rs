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

/// So many are known of each group: several go between two times that values are learned.
const KNOWN: usize = 8;

/// The blocks of one tensor that are of one class.
struct Group {
    tensor: usize,
    /// The resident blocks that go first, in order, pinned or not; as many of them as are known, and one at least where there is one.
    first: [Rank; KNOWN],
    known: usize,
    /// They may be others, and are to be looked for again.
    stale: bool,
}

#[derive(Clone, Copy, Default)]
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

impl Group {
    fn first(&self) -> &[Rank] {
        &self.first[..self.known]
    }

    /// A resident block has this rank. It is not among the known ones.
    fn add(&mut self, rank: Rank) {
        let at = self.first().partition_point(|known| known.goes_before(&rank));
        if at < KNOWN {
            self.known = KNOWN.min(self.known + 1);
            self.first[at..self.known].rotate_right(1);
            self.first[at] = rank;
        }
    }

    /// As [`Group::add`], where others may be resident that are not known: it cannot come after them.
    fn add_to_some(&mut self, rank: Rank) {
        match self.first().last() {
            Some(last) if !rank.goes_before(last) => {}
            _ => self.add(rank),
        }
    }

    /// Answers whether it was known.
    fn forget(&mut self, block: BlockId) -> bool {
        let Some(at) = self.first().iter().position(|known| known.block == block) else { return false };
        self.first[at..self.known].rotate_left(1);
        self.known -= 1;
        self.stale |= self.known == 0;
        true
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
                    groups.push(Group { tensor, first: [Rank::default(); KNOWN], known: 0, stale: false });
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

    /// The resident blocks of the group.
    fn ranks(&self, group: u32) -> impl Iterator<Item = Rank> {
        let (first, n) = self.tensors[self.groups[group as usize].tensor];
        (first..first + n)
            .filter(move |&block| {
                self.group_of[block as usize] == group && self.resident[block as usize] < f32::INFINITY
            })
            .map(|block| self.rank(block))
    }

    fn look_again(&mut self, group: u32) {
        let mut found = Group { known: 0, stale: false, ..self.groups[group as usize] };
        self.ranks(group).for_each(|rank| found.add(rank));
        self.groups[group as usize] = found;
    }

    fn search(&mut self, class: usize, may_go: impl Fn(&Self, BlockId) -> bool) -> Option<BlockId> {
        let mut best: Option<Rank> = None;
        for i in 0..self.by_class.get(class)?.len() {
            let g = self.by_class[class][i];
            if self.groups[g as usize].stale {
                self.look_again(g);
            }
            let first = self.groups[g as usize].first();
            if first.first().is_none_or(|least| best.is_some_and(|b| !least.goes_before(&b))) {
                continue;
            }
            let may_go = |rank: &Rank| may_go(self, rank.block);
            let first_to_go = || self.ranks(g).filter(may_go).reduce(|a, b| if b.goes_before(&a) { b } else { a });
            let rank = first.iter().copied().find(may_go).or_else(first_to_go);
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
        self.group(block).add_to_some(rank);
    }

    fn used(&mut self, block: BlockId) {
        self.stamp(block);
        let rank = self.rank(block);
        let group = self.group(block);
        if group.forget(block) && group.known > 0 {
            group.add_to_some(rank);
        }
    }

    fn removed(&mut self, block: BlockId) {
        self.resident[block as usize] = f32::INFINITY;
        self.group(block).forget(block);
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
            12 => (0..48u32).prop_map(Op::Insert),
            3 => (0..48u32).prop_map(Op::Use),
            1 => (0..48u32).prop_map(Op::Remove),
            4 => (0..2usize, any::<u64>()).prop_map(|(c, pins)| Op::Evict(c, pins)),
            1 => Just(Op::Begin),
            1 => (0..2usize, proptest::collection::vec(0..9u8, 24)).prop_map(|(t, v)| Op::Value(t, v)),
        ]
    }

    proptest! {
        /// Against a model that looks at every block. Groups have more blocks than are known of them.
        #[test]
        fn the_victim_is_the_one_that_a_full_search_finds(
            ops in proptest::collection::vec(op(), 1..600),
            blocks in proptest::collection::vec(any::<bool>(), 48),
        ) {
            let class_of = |block: u32| usize::from(blocks[block as usize]);
            let mut policy = Valued::of(blocks.chunks(24).map(|t| t.iter().map(|&class| class.into())));
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
