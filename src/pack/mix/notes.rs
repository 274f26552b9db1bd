//! What one may not expect of a choice of types, in words.

use std::collections::BTreeSet;

use super::Target;
use crate::index::{ExpertTensor, GgmlType};
use crate::options::Size;

/// It is said when this part of what was asked for is left over, or more.
const FAR: f64 = 0.05;

/// Of matrices that keep their type because there is no other: a line for each part and type.
pub(super) fn kept(tensors: &[ExpertTensor], types: &[Vec<GgmlType>]) -> Vec<String> {
    let alone = tensors.iter().zip(types).filter(|(t, types)| **types == [t.ty]);
    let found: BTreeSet<_> = alone.map(|(t, _)| (t.part, t.ty.name(), t.ne[0])).collect();
    let line = |(part, ty, columns)| {
        format!("{part} stays {ty}: no type to choose from is smaller and possible for it (a row has {columns} values)")
    };
    found.into_iter().map(line).collect()
}

/// Of a choice that takes far fewer `bytes` than the `limit` of `target`.
pub(super) fn left_over(
    target: Target,
    (bytes, limit): (u64, u64),
    tensors: &[ExpertTensor],
    types: &[Vec<GgmlType>],
) -> Option<String> {
    let far = limit as f64 - bytes as f64 > FAR * limit as f64;
    far.then(|| {
        let size = |t: &ExpertTensor, ty: &GgmlType| ty.row_bytes(t.ne[0]);
        let largest = |(t, types): (&ExpertTensor, &Vec<GgmlType>)| types.iter().copied().max_by_key(|ty| size(t, ty));
        let largest: BTreeSet<_> = tensors.iter().zip(types).filter_map(largest).map(GgmlType::name).collect();
        let largest: Vec<_> = largest.into_iter().collect();
        let (bytes, limit, largest) = (Size(bytes), Size(limit), largest.join(" and "));
        format!("{target} leaves room for {limit:.2}, but only {bytes:.2} are taken: no type to choose from is larger than {largest}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Part;

    fn tensor(part: Part, ty: u32, columns: u64) -> ExpertTensor {
        ExpertTensor {
            name: String::new(),
            layer: 0,
            group: 0,
            part,
            ty: GgmlType(ty),
            ne: [columns, 8, 4, 1],
            file: 0,
            offset: 0,
            expert_bytes: 0,
            packed: None,
        }
    }

    #[test]
    fn parts_that_keep_their_type_are_named() {
        let tensors = [tensor(Part::Up, 1, 256), tensor(Part::Down, 1, 96), tensor(Part::Down, 1, 96)];
        let own = vec![GgmlType(1)];
        let line = "down stays f16: no type to choose from is smaller and possible for it (a row has 96 values)";
        assert_eq!(kept(&tensors, &[vec![GgmlType(12)], own.clone(), own]), [line]);
        assert_eq!(kept(&tensors[..1], &[vec![GgmlType(12), GgmlType(1)]]), [""; 0]);
    }

    #[test]
    fn a_choice_far_below_what_was_asked_for_is_told() {
        let tensors = [tensor(Part::Up, 1, 256), tensor(Part::Down, 1, 96)];
        let types = [vec![GgmlType(14), GgmlType(12)], vec![GgmlType(8), GgmlType(2)]];
        let note = |bytes| left_over(Target::Shrink(0.25), (bytes, 100 << 20), &tensors, &types);
        assert_eq!(note(95 << 20), None);
        let line = "--shrink 25% leaves room for 100.00 MiB, but only 94.00 MiB are taken: no type to choose from is larger \
                    than q6_K and q8_0";
        assert_eq!(note(94 << 20).as_deref(), Some(line));
    }
}
