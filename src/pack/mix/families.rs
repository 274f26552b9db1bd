//! The types that a matrix may have.

use super::Quantizer;
use crate::error::Result;
use crate::index::{ExpertTensor, GgmlType};
use crate::pack::Source;

const FLOATS: [u32; 3] = [0, 1, 30];
/// q2_K to q6_K, iq2_xxs to iq4_xs. The types of less than two bits are left out: they ruin what they are used for.
const SUPER_BLOCKS: &[u32] = &[10, 11, 12, 13, 14, 16, 17, 18, 21, 22, 23];
/// q4_0, q5_0, q8_0, iq4_nl
const BLOCKS: &[u32] = &[2, 6, 8, 20];
/// q4_1, q5_1
const OFFSET_BLOCKS: &[u32] = &[3, 7];

/// Of each tensor of a source. Its own type is one of them where it is quantized, or nothing else is possible.
pub(super) fn of(source: &Source, quantizer: &Quantizer) -> Result<Vec<Vec<GgmlType>>> {
    let wanted = |ty| quantizer.types.as_ref().is_none_or(|types| types.contains(&ty));
    let known = quantizer.imatrix.is_some() || quantizer.recording.is_some();
    let usable = |ty| Ok(wanted(ty) && (known || !quantizer.ggml.needs_importance(ty)?));
    let of = |t: &ExpertTensor| {
        let mut types = Vec::new();
        for ty in smaller(t.ty, t.ne[0]) {
            if usable(ty)? {
                types.push(ty);
            }
        }
        if types.is_empty() || !is_float(t.ty) {
            types.push(t.ty);
        }
        Ok(types)
    };
    source.index.tensors.iter().map(of).collect()
}

/// Whether the type is that of a model which was not quantized.
pub fn is_float(ty: GgmlType) -> bool {
    FLOATS.contains(&ty.0)
}

/// Those that a matrix of this type and so many columns may become.
fn smaller(own: GgmlType, columns: u64) -> Vec<GgmlType> {
    let family = if !is_float(own) {
        [SUPER_BLOCKS, BLOCKS, OFFSET_BLOCKS].into_iter().find(|family| family.contains(&own.0)).unwrap_or(&[])
    } else if columns.is_multiple_of(256) {
        SUPER_BLOCKS
    } else {
        BLOCKS
    };
    let bytes = |ty: GgmlType| ty.row_bytes(columns);
    let smaller = |ty: &GgmlType| bytes(*ty).zip(bytes(own)).is_some_and(|(bytes, own)| bytes < own);
    family.iter().copied().map(GgmlType).filter(smaller).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(own: u32, columns: u64) -> Vec<&'static str> {
        smaller(GgmlType(own), columns).into_iter().map(GgmlType::name).collect()
    }

    #[test]
    fn smaller_types_of_one_family() {
        assert_eq!(names(11, 512), ["q2_K", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq2_s"]);
        assert_eq!(names(8, 512), ["q4_0", "q5_0", "iq4_nl"]);
        assert_eq!(names(2, 64), [""; 0]);
        assert_eq!(names(7, 64), ["q4_1"]);
        // mxfp4 is by itself
        assert_eq!(names(39, 64), [""; 0]);
        for float in FLOATS {
            assert_eq!(names(float, 256).len(), SUPER_BLOCKS.len());
            assert_eq!(names(float, 96), ["q4_0", "q5_0", "q8_0", "iq4_nl"]);
            assert_eq!(names(float, 100), [""; 0]);
        }
        for own in (0..=42).map(GgmlType) {
            let types = smaller(own, 256);
            assert!(types.iter().all(|a| types.iter().all(|b| a.mixes_with(*b))), "{own}");
            assert!(is_float(own) || types.iter().all(|ty| ty.mixes_with(own)), "{own}");
        }
    }
}
