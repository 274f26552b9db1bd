//! ggml's tensor types: names and block sizes.

use std::fmt;

/// A ggml tensor type by its number in GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(pub u32);

impl GgmlType {
    /// Floats.
    pub const F32: Self = Self(0);
    /// Bytes.
    pub const I8: Self = Self(24);

    /// Name, elements per block, bytes per block.
    ///
    /// A row is stored as whole blocks, without padding. The numbers that are missing belong to types that llama.cpp
    /// has removed ([`GgmlType::is_removed`]).
    const fn layout(self) -> Option<(&'static str, u64, u64)> {
        Some(match self.0 {
            0 => ("f32", 1, 4),
            1 => ("f16", 1, 2),
            2 => ("q4_0", 32, 18),
            3 => ("q4_1", 32, 20),
            6 => ("q5_0", 32, 22),
            7 => ("q5_1", 32, 24),
            8 => ("q8_0", 32, 34),
            9 => ("q8_1", 32, 36),
            10 => ("q2_K", 256, 84),
            11 => ("q3_K", 256, 110),
            12 => ("q4_K", 256, 144),
            13 => ("q5_K", 256, 176),
            14 => ("q6_K", 256, 210),
            15 => ("q8_K", 256, 292),
            16 => ("iq2_xxs", 256, 66),
            17 => ("iq2_xs", 256, 74),
            18 => ("iq3_xxs", 256, 98),
            19 => ("iq1_s", 256, 50),
            20 => ("iq4_nl", 32, 18),
            21 => ("iq3_s", 256, 110),
            22 => ("iq2_s", 256, 82),
            23 => ("iq4_xs", 256, 136),
            24 => ("i8", 1, 1),
            25 => ("i16", 1, 2),
            26 => ("i32", 1, 4),
            27 => ("i64", 1, 8),
            28 => ("f64", 1, 8),
            29 => ("iq1_m", 256, 56),
            30 => ("bf16", 1, 2),
            34 => ("tq1_0", 256, 54),
            35 => ("tq2_0", 256, 66),
            39 => ("mxfp4", 32, 17),
            40 => ("nvfp4", 64, 36),
            41 => ("q1_0", 128, 18),
            42 => ("q2_0", 64, 18),
            _ => return None,
        })
    }

    /// The name that llama.cpp prints, or "unknown".
    pub const fn name(self) -> &'static str {
        match self.layout() {
            Some((name, _, _)) => name,
            None => "unknown",
        }
    }

    /// The type that llama.cpp calls so, in any case.
    pub fn named(name: &str) -> Option<Self> {
        (0..=42).map(Self).find(|ty| ty.layout().is_some_and(|(own, ..)| own.eq_ignore_ascii_case(name)))
    }

    /// Elements per block; a row is a multiple of it. `None` for an unknown type.
    pub const fn block_elements(self) -> Option<u64> {
        match self.layout() {
            Some((_, elements, _)) => Some(elements),
            None => None,
        }
    }

    /// Bytes of a row of `columns` elements. `None` for an unknown type, a row that is not a whole number of blocks,
    /// or a size past 64 bits.
    pub const fn row_bytes(self, columns: u64) -> Option<u64> {
        match self.layout() {
            Some((_, elements, bytes)) if columns.is_multiple_of(elements) => (columns / elements).checked_mul(bytes),
            _ => None,
        }
    }

    /// Whether llama.cpp multiplies matrices of both types with activations of one format, in one kernel with one scratch
    /// memory, so that one tensor may have experts of both.
    pub fn mixes_with(self, other: Self) -> bool {
        const FAMILIES: [&[u32]; 3] = [&[10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29], &[2, 6, 8, 20], &[3, 7]];
        self == other || FAMILIES.iter().any(|family| family.contains(&self.0) && family.contains(&other.0))
    }

    /// Whether llama.cpp once knew this type and removed it.
    pub const fn is_removed(self) -> bool {
        matches!(self.0, 4 | 5 | 31..=33 | 36..=38)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layout() {
            Some((name, _, _)) => f.pad(name),
            None => write!(f, "type {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number up to the last is either a type or a removed one, and bits per weight are within reason: a slip
    /// in the table would misplace every expert but the first.
    #[test]
    fn the_table_has_no_holes() {
        for ty in (0..=42).map(GgmlType) {
            let Some((_, elements, bytes)) = ty.layout() else {
                assert!(ty.is_removed(), "{ty}");
                continue;
            };
            assert!(!ty.is_removed(), "{ty}");
            assert!(elements.is_power_of_two(), "{ty}");
            let bits = 8.0 * bytes as f64 / elements as f64;
            assert!((1.0..=64.0).contains(&bits), "{ty}: {bits}");
        }
        assert_eq!(GgmlType(43).layout(), None);
    }

    #[test]
    fn families() {
        let [q4_0, q8_0, q4_1, q2_k, iq4_xs, tq1_0] = [2, 8, 3, 10, 23, 34].map(GgmlType);
        assert!(q4_0.mixes_with(q8_0) && q2_k.mixes_with(iq4_xs) && tq1_0.mixes_with(tq1_0));
        assert!(!q4_0.mixes_with(q4_1) && !q8_0.mixes_with(q2_k) && !tq1_0.mixes_with(q2_k));
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType(12).row_bytes(2048), Some(8 * 144));
        assert_eq!(GgmlType(12).row_bytes(2049), None);
        assert_eq!(GgmlType(0).row_bytes(u64::MAX), None);
        assert_eq!(GgmlType(31).row_bytes(32), None);
        assert_eq!(GgmlType(31).to_string(), "type 31");
        assert_eq!(format!("{:>5}", GgmlType(1)), "  f16");
        assert_eq!(GgmlType::named("Q3_k"), Some(GgmlType(11)));
        assert_eq!(GgmlType::named("unknown"), None);
    }
}
