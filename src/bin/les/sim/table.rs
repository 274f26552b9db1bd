//! Rows as tables for people.

use std::fmt::{Error, Write as _};

use les::lookahead::trace::Outcome;

use super::Row;

/// Both halves of every policy, without lookahead.
pub fn policies(rows: &[Row]) -> Result<String, Error> {
    let mut out = String::new();
    writeln!(out, "{:17}{:^40} {:^40}", "", "second half", "whole")?;
    let columns = format!("{:>7} {:>12} {:>9} {:>9}", "hits", "MiB/token", "x optimal", "wait ms");
    write!(out, "{:>5} {:11}{columns} {columns}", "cache", "policy")?;
    for (i, row) in rows.iter().enumerate() {
        begin(&mut out, rows, i)?;
        for (i, (s, times)) in [row.second_half, row.whole].into_iter().zip(row.times_optimal).enumerate() {
            let gap = if i == 0 { "" } else { " " };
            let mib = s.mib_per_token();
            write!(out, "{gap}{:>6.1}% {mib:>12.2} {times:>9.2} {:>9.2}", 100.0 * s.hit_rate, s.wait_ms_per_token)?;
        }
    }
    Ok(out)
}

/// The second half of every policy without lookahead, with it, and with an oracle's.
pub fn lookahead(rows: &[Row]) -> Result<String, Error> {
    let mut out = String::new();
    writeln!(out, "{:17}{:^34} {:^34} {:^34}", "", "no lookahead", "lookahead", "oracle")?;
    let columns = format!("{:>6} {:>9} {:>8} {:>8}", "hits", "MiB/token", "wait ms", "T ms");
    write!(out, "{:>5} {:11}{columns} {columns} {columns}", "cache", "policy")?;
    for (i, row) in rows.iter().enumerate() {
        begin(&mut out, rows, i)?;
        for (i, summary) in
            [Some(row.second_half), row.lookahead.map(|s| s[0]), row.oracle.map(|s| s[0])].into_iter().enumerate()
        {
            let gap = if i == 0 { "" } else { " " };
            match summary {
                Some(s) => {
                    let (hits, mib) = (100.0 * s.hit_rate, s.mib_per_token());
                    write!(out, "{gap}{hits:>5.1}% {mib:>9.2} {:>8.2} {:>8.2}", s.wait_ms_per_token, s.ms_per_token)?;
                }
                None => write!(out, "{gap}{:>6} {:>9} {:>8} {:>8}", "-", "-", "-", "-")?,
            }
        }
    }
    Ok(out)
}

/// What became of the predictions; empty where the trace does not tell.
pub fn outcomes(outcomes: &[Outcome]) -> Result<String, Error> {
    let mut out = String::new();
    if outcomes.iter().all(|o| o.recall.picks == 0) {
        return Ok(out);
    }
    let columns = format!("{:>10} {:>6} {:>6} {:>13} {:>6}", "picks", "at k", "at 2k", "weight: at k", "at 2k");
    write!(out, "predicted{columns}")?;
    for (distance, Outcome { recall, gate_mass }) in (1..).zip(outcomes) {
        let part = |n: f64, all: u64| if all > 0 { format!("{:.1}%", 100.0 * n / all as f64) } else { "-".into() };
        let [k, double] = [recall.at_k, recall.at_2k].map(|n| part(n as f64, recall.picks));
        let [weight, double_weight] = [gate_mass.at_k, gate_mass.at_2k].map(|sum| part(sum, gate_mass.tokens));
        write!(out, "\n{distance:>3} ahead{:>10} {k:>6} {double:>6} {weight:>13} {double_weight:>6}", recall.picks)?;
    }
    Ok(out)
}

/// The beginning of a row, and before those of another size an empty line.
fn begin(out: &mut String, rows: &[Row], i: usize) -> Result<(), Error> {
    if i == 0 || rows[i].cache != rows[i - 1].cache {
        writeln!(out)?;
    }
    write!(out, "\n{:>4.0}% {:11}", 100.0 * rows[i].cache, rows[i].policy.name())
}
