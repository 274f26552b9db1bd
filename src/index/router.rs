//! Where the routers are: the small tensors that decide which experts a layer uses.

use super::{GgmlType, Header, Tensor};

/// Where a small tensor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its GGUF name.
    pub name: String,
    /// Index into [`Index::files`](super::Index::files).
    pub file: u32,
    /// Where it begins, in bytes from the start of the file.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its type.
    pub ty: GgmlType,
    /// Columns, rows, and so on.
    pub ne: [u64; 4],
}

/// The router of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterPlaces {
    /// The layer.
    pub layer: u32,
    /// `ffn_gate_inp.weight`, `[n_embd, n_expert]`.
    pub weight: Place,
    /// `ffn_gate_inp.bias`, `[n_expert]`: added to the logits.
    pub bias: Option<Place>,
    /// `exp_probs_b.bias`, `[n_expert]`: added to the probabilities when experts are selected.
    pub selection_bias: Option<Place>,
    /// The weight of the norm before the FFN, `[n_embd]`.
    pub norm: Option<Place>,
}

/// What a router's logits become before experts are selected. The numbers are GGUF's (`{arch}.expert_gating_func`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// 1, and 3, where the weights are normalized after the selection.
    Softmax,
    /// 2
    Sigmoid,
    /// 4
    SqrtSoftplus,
}

/// How experts are selected, the same for all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// What the logits become.
    pub gating: Gating,
    /// The experts form so many groups (`{arch}.expert_group_count`); 1: none.
    pub groups: u32,
    /// Of which so many are used, those with the largest sum of their two best experts.
    pub groups_used: u32,
}

impl Rule {
    pub(super) fn new(header: &Header, arch: &str, biased: bool) -> Self {
        let uint = |key: &str| header.uint(&format!("{arch}.{key}"));
        let gating = match uint("expert_gating_func") {
            Some(1 | 3) => Gating::Softmax,
            Some(2) => Gating::Sigmoid,
            Some(4) => Gating::SqrtSoftplus,
            // a bias for the selection came with the sigmoid
            _ if biased => Gating::Sigmoid,
            _ => Gating::Softmax,
        };
        let groups = uint("expert_group_count").unwrap_or(1).max(1);
        Self { gating, groups, groups_used: uint("expert_group_used_count").unwrap_or(groups).clamp(1, groups) }
    }
}

/// Gathers the routers from all tensors of a model.
pub(super) fn find<'a>(tensors: impl Iterator<Item = (u32, &'a Tensor)>) -> Vec<RouterPlaces> {
    let (mut weights, mut biases, mut selections) = (Vec::new(), Vec::new(), Vec::new());
    let (mut norms, mut post_norms) = (Vec::new(), Vec::new());
    for (file, t) in tensors {
        let Some((layer, rest)) = layer_of(&t.name) else { continue };
        let list = match rest {
            "ffn_gate_inp.weight" => &mut weights,
            "ffn_gate_inp.bias" => &mut biases,
            "exp_probs_b.bias" | "exp_probs_b" => &mut selections,
            "ffn_norm.weight" => &mut norms,
            // the norm before the FFN in models that have no other
            "post_attention_norm.weight" => &mut post_norms,
            _ => continue,
        };
        let place = Place { name: t.name.clone(), file, offset: t.offset, bytes: t.bytes, ty: t.ty, ne: t.ne };
        list.push((layer, place));
    }
    let of = |list: &[(u32, Place)], layer| list.iter().find(|(l, _)| *l == layer).map(|(_, place)| place.clone());
    let mut routers: Vec<_> = weights
        .iter()
        .map(|&(layer, ref weight)| RouterPlaces {
            layer,
            weight: weight.clone(),
            bias: of(&biases, layer),
            selection_bias: of(&selections, layer),
            norm: of(&norms, layer).or_else(|| of(&post_norms, layer)),
        })
        .collect();
    routers.sort_by_key(|r| r.layer);
    routers
}

fn layer_of(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}
