//! How often experts are picked, by a trace of `--les-trace`.

use std::path::Path;

use crate::error::{Error, Result};
use crate::index::Index;
use crate::lookahead::trace::{Reader, TraceLayer, layers};

/// How often each expert is picked.
///
/// The weight that the router gave to a pick is not in a trace, nor is all that would tell it from the scores (whether
/// the weights of a token's picks are made to add up to one): only picks are counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Uses {
    /// By layer and group, in the order of the index: the part of all tokens that picked an expert.
    shares: Vec<Vec<f64>>,
    /// Whether the last line of the trace was cut, and is left out.
    pub cut: bool,
}

impl Uses {
    /// Counts the picks of a trace of the model of `index`.
    ///
    /// # Errors
    /// As [`Reader`]; [`Error::Invalid`] when it is a trace of another model, or ends before there are picks in every layer.
    pub fn read(path: &Path, index: &Index) -> Result<Self> {
        let refuse = |why: &str| Err(Error::Invalid(format!("{}: {why}", path.display())));
        let mut trace = Reader::open(path)?;
        let key = |layers: &[TraceLayer]| layers.iter().map(|l| (l.layer, l.n_expert, l.n_used)).collect::<Vec<_>>();
        let layers = layers(index);
        if key(&trace.header.layers) != key(&layers) {
            return refuse("this is a trace of another model; make one of this model with --les-trace");
        }
        let mut picks: Vec<Vec<u64>> = layers.iter().map(|layer| vec![0; layer.n_expert as usize]).collect();
        let mut tokens = vec![0_u64; layers.len()];
        for record in &mut trace {
            let record = record?;
            tokens[record.at as usize] += u64::from(record.rows);
            record.picks.iter().for_each(|&e| picks[record.at as usize][e as usize] += 1);
        }
        if tokens.iter().all(|tokens| *tokens == 0) {
            return refuse("it tells of no token; let the model read a text");
        }
        // one that was never picked may be yet: as if by one token more
        let share = |((picks, tokens), layer): ((&Vec<u64>, &u64), &TraceLayer)| {
            let unknown = f64::from(layer.n_used) / f64::from(layer.n_expert.max(1));
            // layers that predict further tokens are not computed
            let of = |n: &u64| if *tokens == 0 { unknown } else { (n + 1) as f64 / (tokens + 1) as f64 };
            picks.iter().map(of).collect()
        };
        Ok(Self { shares: picks.iter().zip(&tokens).zip(&layers).map(share).collect(), cut: trace.cut })
    }

    /// The part of the tokens that pick an expert of the layer (and group) of that number, from 0.
    pub fn share(&self, layer: usize, expert: u32) -> f64 {
        self.shares[layer][expert as usize]
    }
}
