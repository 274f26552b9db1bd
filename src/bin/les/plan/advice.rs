//! What to run with, and why.

use les::options::Size;
use serde::Serialize;

use super::expected::Row;
use crate::sim::Device;

/// A speed that is lower by this part is as good.
const AS_GOOD: f64 = 0.03;
/// Lookahead is advised against only where it is slower by more than this: chance is not.
const SLOWER: f64 = 0.005;

/// The recommended flags. Absent where the model does not stream, or cannot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// What to give `--les-cache`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub les_cache: Option<String>,
    /// What that is, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<u64>,
    /// What to give `--les-lookahead`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub les_lookahead: Option<&'static str>,
    /// In one or two sentences.
    pub why: String,
}

impl Advice {
    fn none(why: String) -> Self {
        Self { les_cache: None, cache_bytes: None, les_lookahead: None, why }
    }

    /// For a model without experts.
    pub fn nothing_streams() -> Self {
        Self::none("This model has no routed experts: nothing would stream, and there is nothing to plan.".into())
    }

    /// For a model that needs no streaming.
    pub fn fits(available: u64) -> Self {
        let all = format!("The whole model fits in the {} that are available", Size(available));
        Self::none(format!("{all}: with --les auto, the default, it is loaded and does not stream."))
    }

    /// For a model that streams, with so much memory left `for_experts`, of which automatically `auto` would be taken.
    pub fn streaming(rows: &[Row], device: &Device, for_experts: u64, auto: u64, floor: u64) -> Self {
        if floor > for_experts {
            let what = "The model does not fit, even with the smallest cache";
            return Self::none(format!(
                "{what}: {} of memory are left for the experts of a token, which take {}.",
                Size(for_experts),
                Size(floor)
            ));
        }
        let Some(most) = rows.iter().find(|row| row.cache_bytes == auto) else {
            return Self::none("No size was asked for.".into());
        };
        let enough = |row: &&Row| row.ms() <= most.ms() * (1.0 + AS_GOOD);
        // what --les-cache takes are whole MiB
        let mib = |row: &Row| row.cache_bytes.div_ceil(1 << 20);
        let fits = |row: &&Row| mib(row) << 20 <= auto;
        let (row, les_cache, cache_bytes) = match rows.iter().find(|row| fits(row) && enough(row)) {
            Some(row) if row.cache_bytes < auto => (row, mib(row).to_string(), mib(row) << 20),
            _ => (most, "auto".to_owned(), auto),
        };
        let (les_lookahead, ahead) = lookahead(row);
        let wait = row.ms() - device.compute_ms;
        let takes = format!("auto would take {}, as much as it can", Size(auto));
        let why = if cache_bytes < auto {
            let limit = if wait < device.compute_ms { "the computation" } else { "the device" };
            format!("{takes}; more than {} gains little, because {limit} is the limit then.", Size(cache_bytes))
        } else if wait > AS_GOOD * device.compute_ms {
            let all = row.ms();
            format!("{takes}, and less is slower: {wait:.0} of a token's {all:.0} ms are waited for the device.")
        } else {
            format!("{takes}, and of the sizes compared none that is smaller is as fast.")
        };
        let why = format!("{why} {ahead}");
        Self { les_cache: Some(les_cache), cache_bytes: Some(cache_bytes), les_lookahead: Some(les_lookahead), why }
    }
}

/// What to give `--les-lookahead`, and why.
fn lookahead(row: &Row) -> (&'static str, String) {
    let without = row.without.ms_per_token;
    match row.lookahead.map(|s| s.ms_per_token) {
        None => ("auto", "Looking ahead was not compared: the trace has no guesses.".into()),
        Some(with) if with > without * (1.0 + SLOWER) => {
            ("0", format!("Looking ahead takes more than it gives: {with:.1} ms per token, {without:.1} without."))
        }
        Some(with) if with < without * (1.0 - SLOWER) => {
            ("auto", format!("Looking ahead takes a token from {without:.1} to {with:.1} ms."))
        }
        Some(_) => ("auto", "Looking ahead makes no difference.".into()),
    }
}
