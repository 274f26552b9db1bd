//! Verification of drafted tokens: which passes are one, and what became of them.

use std::sync::atomic::Ordering;

use crate::sched::PassReads;

use super::Model;

impl Model {
    /// The passes of exactly `rows` rows are a verification from now on: row 0 is certain, the others are drafts, which may be
    /// rejected. What they alone need displaces hardly anything, and nothing is learned from them before it is known which
    /// stand. 0 or 1: there are no drafts. Without a verdict, all rows of the verification before this one stand.
    pub fn drafted(&self, rows: usize) {
        self.judge(usize::MAX);
        self.drafted.store(if rows > 1 { rows } else { 0 }, Ordering::Relaxed);
    }

    /// Of the verification the first `rows` rows stand, at least the one that is certain. Passes that follow are none, until
    /// [`Model::drafted`] says so.
    pub fn judged(&self, rows: usize) {
        self.drafted.store(0, Ordering::Relaxed);
        self.judge(rows.max(1));
    }

    /// What the passes have read so far.
    pub fn pass_reads(&self) -> PassReads {
        self.streamer.get().map_or_else(PassReads::default, |streamer| streamer.pass_reads())
    }

    fn judge(&self, rows: usize) {
        if let Some(streamer) = self.streamer.get() {
            streamer.judged(rows);
        }
        if let Some(lookahead) = self.lookahead.get() {
            lookahead.lock().judged(rows);
        }
    }

    /// How many of the `rows` rows of a pass are certain to stand.
    pub fn certain(&self, rows: usize) -> usize {
        if self.drafted.load(Ordering::Relaxed) == rows { rows.min(1) } else { rows }
    }
}
