//! The report for people.

use std::fmt::{Error, Write as _};

use les::options::Size;

use super::{Advice, Report};
use crate::sim::Summary;

/// All of it.
pub fn text(report: &Report) -> Result<String, Error> {
    let mut out = String::new();
    let name = if report.name.is_empty() { "(no name)" } else { &report.name };
    writeln!(out, "model           {} ({})", crate::inspect::printable(name), crate::inspect::printable(&report.arch))?;
    writeln!(out, "dense weights   {:12.2}", Size(report.dense_bytes))?;
    let (Some(available), Some(auto)) = (report.available_bytes, report.auto_bytes) else {
        write!(out, "\n{}", report.advice.why)?;
        return Ok(out);
    };
    writeln!(out, "all experts     {:12.2}  the largest cache", Size(report.all_bytes))?;
    writeln!(out, "one token       {:12.2}  the smallest cache", Size(report.floor_bytes))?;
    writeln!(out, "memory          {:12.2}  available", Size(available))?;
    writeln!(out, "auto            {:12.2}  what --les-cache auto takes of it", Size(auto))?;
    for note in &report.notes {
        writeln!(out, "{note}")?;
    }
    rows(&mut out, report)?;
    let Advice { les_cache, les_lookahead, why, .. } = &report.advice;
    writeln!(out)?;
    if let (Some(cache), Some(lookahead)) = (les_cache, les_lookahead) {
        writeln!(out, "recommended: --les-cache {cache} --les-lookahead {lookahead}")?;
    }
    write!(out, "{why}")?;
    Ok(out)
}

fn rows(out: &mut String, report: &Report) -> Result<(), Error> {
    writeln!(out, "\n{:19}{:^34}  {:^34}", "", "no lookahead", "lookahead")?;
    let columns = format!("{:>6} {:>9} {:>9} {:>7}", "hits", "MiB/token", "wait ms", "tok/s");
    writeln!(out, "{:>12} {:>5} {columns}  {columns}", "cache", "share")?;
    let left = report.available_bytes.unwrap_or(0).saturating_sub(report.dense_bytes);
    for row in &report.rows {
        write!(out, "{:12.2} {:>4.0}%", Size(row.cache_bytes), 100.0 * row.share)?;
        summary(out, Some(&row.without))?;
        write!(out, " ")?;
        summary(out, row.lookahead.as_ref())?;
        writeln!(out, "{}", if row.cache_bytes > left { "  more than there is" } else { "" })?;
    }
    Ok(())
}

fn summary(out: &mut String, summary: Option<&Summary>) -> Result<(), Error> {
    let Some(s) = summary else { return write!(out, " {:>6} {:>9} {:>9} {:>7}", "-", "-", "-", "-") };
    let (hits, mib, speed) = (100.0 * s.hit_rate, s.mib_per_token(), 1e3 / s.ms_per_token);
    write!(out, " {hits:>5.1}% {mib:>9.2} {:>9.2} {speed:>7.2}", s.wait_ms_per_token)
}
