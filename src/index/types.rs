//! ggml's tensor types: block sizes.
/// A ggml tensor type by its number in GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(pub u32);
