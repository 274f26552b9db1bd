//! Small indexes for tests.

use crate::index::{ExpertTensor, Gating, GgmlType, Index, ModelFile, Part, Rule};

/// A model of `layers` layers with `n_expert` experts, `used` per token, whose up, gate and down matrices have the
/// given sizes. Its file is not there.
pub fn index(layers: u32, n_expert: u64, used: u32, bytes: &[u64; 3]) -> Index {
    let mut tensors = Vec::new();
    let mut offset = 32;
    for layer in 0..layers {
        for (part, &expert_bytes) in [Part::Up, Part::Gate, Part::Down].into_iter().zip(bytes) {
            tensors.push(ExpertTensor {
                name: format!("blk.{layer}.{part:?}.weight"),
                layer,
                group: 0,
                part,
                ty: GgmlType(0),
                ne: [expert_bytes / 4, 1, n_expert, 1],
                file: 0,
                offset,
                expert_bytes,
                packed: None,
            });
            offset += expert_bytes * n_expert;
        }
    }
    Index {
        arch: "test".into(),
        name: String::new(),
        files: vec![ModelFile { path: "test.gguf".into(), size: offset }],
        tensors,
        n_expert_used: used,
        dense_bytes: 0,
        routers: Vec::new(),
        rule: Rule { gating: Gating::Softmax, groups: 1, groups_used: 1 },
    }
}
