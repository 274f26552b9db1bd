//! What the routers tell of the experts that will be needed.

mod keep;
mod router;
pub mod trace;

use std::path::Path;

pub use keep::Keep;
pub use router::{Input, Router};

use crate::error::Result;
use crate::index::Index;
use trace::{Record, Writer};

/// Of a batch of many tokens, so many of the last ones count: they are the ones that what follows is like.
pub const WINDOW: usize = 32;

/// The routers of a model, and what they did.
pub struct Lookahead {
    /// By the index of a layer's first tensor of experts: its place among the layers.
    site_of: Vec<Option<u32>>,
    routers: Vec<Option<Router>>,
    trace: Option<Writer>,
    /// `None` when nothing is ever evicted.
    keep: Option<Keep>,
    input: Input,
    /// Row by row, of one layer.
    scores: Vec<f32>,
    row: Vec<f32>,
}

impl Lookahead {
    /// Loads the routers; traces to `trace` if there is one. `evicts`: the cache is too small for all experts, so what
    /// they are worth keeping is of interest.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when a router cannot be read, or the trace cannot be written.
    pub fn new(index: &Index, trace: Option<&Path>, evicts: bool) -> Result<Self> {
        let mut site_of = vec![None; index.tensors.len()];
        let mut routers = Vec::new();
        for (i, t) in index.tensors.iter().enumerate().filter(|(i, _)| index.leads(*i)) {
            site_of[i] = Some(routers.len() as u32);
            let places = index.routers.iter().find(|r| r.layer == t.layer && t.group == 0);
            let router = places.map(|places| Router::load(index, places)).transpose()?.flatten();
            routers.push(router.filter(|r| r.n_expert() == t.n_expert() as usize));
        }
        let trace = trace.map(|path| Writer::create(path, index)).transpose()?;
        let n_expert: Vec<usize> = (0..index.tensors.len())
            .filter(|&t| index.leads(t))
            .map(|t| index.tensors[t].n_expert() as usize)
            .collect();
        let keep = evicts.then(|| Keep::new(&n_expert));
        Ok(Self { site_of, routers, trace, keep, input: Input::default(), scores: Vec::new(), row: Vec::new() })
    }

    /// The experts of `tensor` are about to be applied to `rows` (empty: unknown) of `n_rows` tokens; the router has picked
    /// `picks` for them, token by token. Only a layer's first tensor counts.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when the trace cannot be written.
    pub fn observe(&mut self, tensor: usize, picks: &[i32], n_rows: usize, rows: &[&[f32]]) -> Result<()> {
        let Some(site) = self.site_of[tensor] else { return Ok(()) };
        if self.trace.is_none() && self.keep.is_none() {
            return Ok(());
        }
        self.scores.clear();
        if let Some(router) = &self.routers[site as usize] {
            for row in rows.iter().skip(rows.len().saturating_sub(WINDOW)).filter(|row| row.len() == router.n_embd()) {
                self.input.set(row, &[]);
                router.scores(&self.input, &mut self.row);
                self.scores.extend_from_slice(&self.row);
            }
        }
        if let Some(keep) = &mut self.keep {
            keep.observe(site as usize, n_rows, picks, &self.scores);
        }
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let rounded = |row: &[f32]| row.iter().map(|s| (s * 1000.0).round() / 1000.0).collect();
        let scores = self.scores.chunks(self.row.len().max(1)).map(rounded).collect();
        trace.write(&Record { at: site, rows: n_rows as u32, picks: picks.to_vec(), scores })
    }

    /// What the experts of the layer that `tensor` leads are worth keeping, one value per expert.
    pub fn values(&self, tensor: usize) -> Option<&[f32]> {
        Some(self.keep.as_ref()?.values(self.site_of[tensor]? as usize))
    }
}
