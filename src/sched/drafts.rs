//! Verification passes: what of them only drafted tokens want.
//!
//! The blocks that no certain row picks are read into the store's scratch slots. When it is known which rows stand, those
//! that they picked are kept as if they had been certain; the others are forgotten first.

use crate::store::{Acquired, Ask, BlockId};

use super::{Core, Streamer};

/// By which row an expert is picked first. Of other passes than verifications all rows are certain, and nothing is noted.
#[derive(Default)]
pub(super) struct Pickers {
    /// By expert; what nobody picks says 0.
    first: Vec<u32>,
    certain: u32,
}

impl Pickers {
    /// Of `rows` rows with the same number of `ids` each, all below `n_expert`, the first `certain` ones are no drafts.
    pub(super) fn new(ids: &[i32], rows: usize, certain: usize, n_expert: u32) -> Self {
        if certain >= rows {
            return Self::default();
        }
        let mut first = vec![0; n_expert as usize];
        let used = (ids.len() / rows).max(1);
        for (i, &id) in ids.iter().enumerate().rev() {
            first[id as usize] = (i / used) as u32;
        }
        Self { first, certain: certain as u32 }
    }

    /// The first row that picks `expert`, if that is a draft.
    pub(super) fn draft(&self, expert: u32) -> Option<u32> {
        self.first.get(expert as usize).copied().filter(|&row| row >= self.certain)
    }

    /// Whether there are drafts.
    pub(super) fn verify(&self) -> bool {
        !self.first.is_empty()
    }
}

/// What the passes have read so far. Grows only: what one pass has read is the difference.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PassReads {
    /// Counts the passes that have begun.
    pub pass: u32,
    /// The rows of the last one, where it is known what each of them wanted: of a verification, or a single one. Else 0.
    pub rows: usize,
    /// Bytes (of slots), by the first row that wanted them.
    pub bytes: Vec<u64>,
}

impl PassReads {
    /// What the one pass since `before` has read for its first row, its first two, ...; `None` unless it was just one, of `rows`
    /// rows.
    pub fn since(&self, before: &Self, rows: usize) -> Option<Vec<u64>> {
        if self.pass != before.pass.wrapping_add(1) || self.rows != rows {
            return None;
        }
        let at = |bytes: &[u64], row: usize| bytes.get(row).copied().unwrap_or(0);
        let mut sum = 0;
        Some(
            (0..rows)
                .map(|row| {
                    sum += at(&self.bytes, row) - at(&before.bytes, row);
                    sum
                })
                .collect(),
        )
    }
}

/// A block that only drafts want.
struct Want {
    block: BlockId,
    /// The first of them.
    row: u32,
    /// It was read for them.
    read: bool,
}

/// What waits for the verdict.
#[derive(Default)]
pub(super) struct Drafts {
    /// The layer that is computed is one of a verification.
    pub(super) verifying: bool,
    /// The last verification.
    pass: Option<u32>,
    wants: Vec<Want>,
    reads: PassReads,
}

impl Core {
    /// An operation of so many rows begins, of a verification or not.
    pub(super) fn begin_operation(&mut self, rows: usize, verifying: bool) {
        self.drafts.verifying = verifying;
        if self.drafts.reads.pass != self.progress.pass {
            self.drafts.reads.pass = self.progress.pass;
            self.drafts.reads.rows = if verifying || rows == 1 { rows } else { 0 };
        }
        if verifying && self.drafts.pass != Some(self.progress.pass) {
            // another one has come before the verdict
            self.judge(usize::MAX);
            self.drafts.pass = Some(self.progress.pass);
            self.stats.verifications += 1;
        }
    }

    /// Pins `block` of `tensor`, which is there or is being read; a draft wants it or, `None`, a certain row. Answers whether it is
    /// there.
    pub(super) fn want(&mut self, tensor: usize, block: BlockId, draft: Option<u32>) -> bool {
        let ask = Ask { guess: false, draft: draft.is_some() };
        let ready = self.store.acquire_as(block, ask) == Acquired::Ready;
        self.store.pin(block);
        let guessed = self.ahead.prove(block);
        if guessed {
            self.stats.guess_right(tensor, ready);
        }
        self.wanted_by(block, draft, guessed);
        ready
    }

    /// Of the rows only the drafts from `row` on want `block`, which was `read` for them or was there. `None`: a certain one does.
    /// Counts what was read.
    pub(super) fn wanted_by(&mut self, block: BlockId, row: Option<u32>, read: bool) {
        if read {
            let (row, bytes) = (row.unwrap_or(0) as usize, &mut self.drafts.reads.bytes);
            bytes.resize(bytes.len().max(row + 1), 0);
            bytes[row] += self.store.slot_bytes(block);
        }
        if let Some(row) = row {
            self.drafts.wants.push(Want { block, row, read });
            self.stats.draft_reads += u64::from(read);
        }
    }

    /// The first `rows` rows of the last verification stand.
    fn judge(&mut self, rows: usize) {
        self.stats.judged(rows);
        for Want { block, row, read } in self.drafts.wants.drain(..) {
            match (row as usize) < rows {
                true => self.store.promote(block),
                false => self.stats.draft_reads_rejected += u64::from(read),
            }
        }
    }
}

impl Streamer {
    /// What the passes have read so far. Any thread.
    pub fn pass_reads(&self) -> PassReads {
        self.core.lock().drafts.reads.clone()
    }

    /// The first `rows` rows of the last verification stand, at most all; until then it is not known, and if another one comes
    /// first, all do. Any thread.
    pub fn judged(&self, rows: usize) {
        self.core.lock().judge(rows);
    }
}
