//! What the routers tell of the experts that will be needed.

mod router;
pub mod trace;

use std::path::Path;

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
    input: Input,
    scores: Vec<f32>,
}

impl Lookahead {
    /// Loads the routers; traces to `trace` if there is one.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when a router cannot be read, or the trace cannot be written.
    pub fn new(index: &Index, trace: Option<&Path>) -> Result<Self> {
        let mut site_of = vec![None; index.tensors.len()];
        let mut routers = Vec::new();
        for (i, t) in index.tensors.iter().enumerate().filter(|(i, _)| index.leads(*i)) {
            site_of[i] = Some(routers.len() as u32);
            let places = index.routers.iter().find(|r| r.layer == t.layer && t.group == 0);
            let router = places.map(|places| Router::load(index, places)).transpose()?.flatten();
            routers.push(router.filter(|r| r.n_expert() == t.n_expert() as usize));
        }
        let trace = trace.map(|path| Writer::create(path, index)).transpose()?;
        Ok(Self { site_of, routers, trace, input: Input::default(), scores: Vec::new() })
    }

    /// The experts of `tensor` are about to be applied to `rows` (empty: unknown) of `n_rows` tokens; the router has picked
    /// `picks` for them, token by token. Only a layer's first tensor counts.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when the trace cannot be written.
    pub fn observe(&mut self, tensor: usize, picks: &[i32], n_rows: usize, rows: &[&[f32]]) -> Result<()> {
        let Some(site) = self.site_of[tensor] else { return Ok(()) };
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let mut scores = Vec::new();
        if let Some(router) = &self.routers[site as usize] {
            for row in rows.iter().skip(rows.len().saturating_sub(WINDOW)).filter(|row| row.len() == router.n_embd()) {
                self.input.set(row, &[]);
                router.scores(&self.input, &mut self.scores);
                scores.push(self.scores.iter().map(|s| (s * 1000.0).round() / 1000.0).collect());
            }
        }
        trace.write(&Record { at: site, rows: n_rows as u32, picks: picks.to_vec(), scores })
    }
}
