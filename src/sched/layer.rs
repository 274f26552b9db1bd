//! A layer's experts as a whole: those that are in memory with all their parts are computed first, from the first matrix
//! to the last, while the others are read.
//!
//! A [`Ticket`](super::Ticket) is for one matrix of every expert: its walkers come to the last expert's first matrix before
//! anybody's second one, and wait for it with little to do meanwhile. A [`Layer`] hands out whole experts in *waves*: all
//! that are there when a wave begins. The walkers compute a wave with all matrices, and then ask for the next.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::store::{Acquired, BlockId, State};
use crate::sync::{AtomicU32, Mutex};

use super::drafts::Pickers;
use super::seats::Seats;
use super::ticket::distinct;
use super::{Core, STALL_LIMIT, Streamer};

/// What a layer needs.
#[derive(Debug, Clone, Copy)]
pub struct LayerRequest<'a> {
    /// Indices into the model's expert tensors: the matrices of one layer, the first one in the model's order first.
    pub tensors: &'a [usize],
    /// As [`Request::ids`](super::Request::ids).
    pub ids: &'a [i32],
    /// As [`Request::rows`](super::Request::rows).
    pub rows: usize,
    /// As [`Request::certain`](super::Request::certain).
    pub certain: usize,
    /// How many threads will walk. Each must call [`Layer::wave`] to the end, or [`Layer::leave`].
    pub walkers: u32,
}

/// An expert, with the address of the first byte of each matrix, in the order of the request.
type Placed = (u32, Vec<usize>);

/// The experts of one layer. Shared by the threads that compute it.
pub struct Layer {
    streamer: Arc<Streamer>,
    tensors: Vec<usize>,
    /// Per tensor: the block of expert 0.
    firsts: Vec<BlockId>,
    experts: Vec<u32>,
    walkers: u32,
    /// What was handed out, by position.
    order: Vec<OnceLock<Placed>>,
    /// By wave: the position after its last one.
    ends: Vec<OnceLock<u32>>,
    closed: AtomicU32,
    seats: Seats,
    // locked only while the streamer's core is
    arriving: Mutex<Arriving>,
    failed: OnceLock<Arc<Error>>,
    rows: usize,
    pickers: Pickers,
    at_first: AtFirst,
}

/// How many of a layer's experts were in memory, with all their matrices, when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AtFirst {
    All,
    Some,
    None,
}

/// What a walker is to do for a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Due {
    /// Start the reads.
    pub read: bool,
    /// Learn from the picks, and read ahead.
    pub look_ahead: bool,
}

struct Arriving {
    /// Experts that were not handed out yet.
    waiting: Vec<u32>,
    /// Positions handed out.
    published: usize,
}

impl Layer {
    /// Asks for every expert of the request, with all its matrices; [`Layer::read`], or whoever finds nothing to compute, starts
    /// the reads. `None` when the slots cannot
    /// hold them all at once, now or ever: then the matrices must be walked one by one.
    ///
    /// # Errors
    /// [`Error::ExpertId`] for an id out of range; [`Error::Invalid`] for tensors that are not one layer's, the reads'
    /// errors.
    pub fn open(streamer: Arc<Streamer>, request: LayerRequest) -> Result<Option<Self>, Arc<Error>> {
        let LayerRequest { tensors, ids, rows, certain, walkers } = request;
        let lead = streamer.lead_of(tensors)?;
        if walkers == 0 {
            return Err(Arc::new(Error::Invalid("a layer needs at least one walker".into())));
        }
        let tensor = &streamer.index.tensors[lead];
        let n_expert = tensors.iter().map(|&t| streamer.index.tensors[t].n_expert()).min().unwrap_or(0);
        let experts = distinct(ids, n_expert)
            .map_err(|expert| Arc::new(Error::ExpertId { tensor: tensor.name.clone(), expert, n_expert }))?;
        let pickers = Pickers::new(ids, rows, certain, n_expert);
        let mut guard = streamer.core.lock();
        guard.ahead.forget_queued();
        guard = streamer.poll(guard);
        let core = &mut *guard;
        let plan = core.store.plan();
        let firsts: Vec<BlockId> = tensors.iter().map(|&t| plan.first_block[t]).collect();
        let fits = streamer.fit(core, tensors.iter().copied(), &experts);
        let answer = if fits { streamer.pin_all(core, &request, &firsts, &experts, &pickers) } else { Ok(None) };
        drop(guard);
        let Some(at_first) = answer? else { return Ok(None) };
        let layer = Self {
            tensors: tensors.to_vec(),
            firsts,
            walkers,
            order: experts.iter().map(|_| OnceLock::new()).collect(),
            ends: experts.iter().map(|_| OnceLock::new()).collect(),
            closed: AtomicU32::new(0),
            seats: Seats::new(walkers),
            arriving: Mutex::new(Arriving { waiting: experts.clone(), published: 0 }),
            failed: OnceLock::new(),
            rows,
            pickers,
            at_first,
            experts,
            streamer,
        };
        Ok(Some(layer))
    }

    /// Starts the reads.
    pub fn read(&self) {
        self.streamer.pump(&mut self.streamer.core.lock());
    }

    /// The layer's first tensor.
    pub fn lead(&self) -> usize {
        self.tensors[0]
    }

    /// Whether some of its rows are drafts.
    pub fn verifies(&self) -> bool {
        self.pickers.verify()
    }

    /// What one walker should do before it asks for wave `wave`, or, `computing`, when the others compute it already: what
    /// takes a while is done when they have something to compute, or when everybody would wait for the device.
    pub fn due(&self, wave: u32, computing: bool) -> Due {
        match (self.at_first, wave, computing) {
            (AtFirst::All, 0, true) => Due { read: false, look_ahead: true },
            (AtFirst::Some, 0, true) => Due { read: true, look_ahead: false },
            (AtFirst::Some, 1, false) => Due { read: false, look_ahead: true },
            (AtFirst::None, 0, false) => Due { read: true, look_ahead: true },
            _ => Due::default(),
        }
    }

    /// The positions of wave `wave`: 0 first, then 1, and so on. Waits until there is an expert that no wave had. By
    /// asking for a wave a walker gives up the one before. After the last one: `None`, with which this walker has left.
    ///
    /// # Errors
    /// The layer has failed; this walker has left. [`Error::Invalid`], and nothing changes, when it had left before,
    /// another wave is next, or every walker is another thread.
    pub fn wave(&self, wave: u32) -> Result<Option<Range<u32>>, Arc<Error>> {
        self.seats.step(wave).map_err(|why| Arc::new(Error::Invalid(why)))?;
        let before = wave.checked_sub(1).and_then(|before| self.ends.get(before as usize)?.get().copied());
        let first = before.unwrap_or(0);
        if first as usize == self.order.len() {
            self.close();
            return Ok(None);
        }
        match self.end_of(wave, first) {
            Ok(end) => Ok(Some(first..end)),
            Err(error) => {
                self.close();
                self.streamer.wake.notify_all();
                Err(error)
            }
        }
    }

    /// The expert at `position`, of a wave that this walker was given, and the address of its first byte in `tensor`.
    pub fn expert(&self, position: u32, tensor: usize) -> Option<(u32, usize)> {
        self.streamer.look_after();
        let (expert, addresses) = self.order.get(position as usize)?.get()?;
        let part = self.tensors.iter().position(|&t| t == tensor)?;
        Some((*expert, addresses[part]))
    }

    fn end_of(&self, wave: u32, first: u32) -> Result<u32, Arc<Error>> {
        // a wave has at least one expert, so there are no more waves than experts
        let Some(cell) = self.ends.get(wave as usize) else { return Ok(first) };
        let began = Instant::now();
        let mut core = self.streamer.poll(self.streamer.core.lock());
        let mut progress = (core.completions, began);
        let mut waited = false;
        loop {
            if let Some(&end) = cell.get() {
                return Ok(end);
            }
            if let Some(error) = self.failed.get() {
                return Err(error.clone());
            }
            match self.advance(&mut core) {
                Ok(end) if end > first => {
                    let _ = cell.set(end);
                    if waited {
                        core.stats.waited(self.lead(), self.rows, self.verifies(), began.elapsed());
                    }
                    self.streamer.wake.notify_all();
                    return Ok(end);
                }
                Ok(_) => {}
                // before the lock is given back: no other walker may read anew what has failed for this one
                Err(error) => return Err(self.fail(error)),
            }
            if core.completions != progress.0 {
                progress = (core.completions, Instant::now());
            } else if progress.1.elapsed() > STALL_LIMIT {
                return Err(self.fail(Arc::new(self.streamer.stalled(self.lead()))));
            }
            // if nobody has started the reads
            self.streamer.pump(&mut core);
            core = self.streamer.wait(core);
            waited = true;
        }
    }

    fn blocks(&self, expert: u32) -> impl Iterator<Item = BlockId> {
        self.firsts.iter().map(move |first| first + expert)
    }

    fn fail(&self, error: Arc<Error>) -> Arc<Error> {
        self.failed.get_or_init(|| error).clone()
    }

    /// Hands out what is complete. Answers how many positions there are now.
    fn advance(&self, core: &mut Core) -> Result<u32, Arc<Error>> {
        let Arriving { waiting, published } = &mut *self.arriving.lock();
        let mut i = 0;
        while i < waiting.len() {
            let expert = waiting[i];
            let mut complete = true;
            for block in self.blocks(expert) {
                match core.store.state(block) {
                    State::Ready => continue,
                    State::Loading => {}
                    State::Failed => return Err(self.streamer.failure(core, block)),
                    // it failed for another ticket, which took the error
                    State::Absent => {
                        self.streamer.reserve_at_any_cost(core, block, self.pickers.draft(expert));
                    }
                }
                complete = false;
            }
            if !complete {
                i += 1;
                continue;
            }
            waiting.remove(i);
            let addresses = self.blocks(expert).map(|block| self.streamer.address(core, block)).collect();
            let _ = self.order[*published].set((expert, addresses));
            *published += 1;
        }
        Ok(*published as u32)
    }

    /// This thread's walker leaves before the end.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it had left before, or every walker is another thread.
    pub fn leave(&self) -> Result<()> {
        self.seats.next().map_err(Error::Invalid)?;
        self.close();
        Ok(())
    }

    /// A walker leaves for good. The last one gives everything back.
    fn close(&self) {
        self.seats.leave();
        if self.closed.fetch_add(1, Ordering::AcqRel) + 1 == self.walkers {
            self.give_back();
        }
    }

    /// Whose experts these are.
    pub fn streamer(&self) -> &Streamer {
        &self.streamer
    }

    /// Whether every walker has left.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) >= self.walkers
    }

    fn give_back(&self) {
        let mut guard = self.streamer.core.lock();
        let core = &mut *guard;
        for &expert in &self.experts {
            self.blocks(expert).for_each(|block| core.store.unpin(block));
        }
        // a ticket or another layer may wait for a slot
        self.streamer.wake.notify_all();
    }
}

impl Drop for Layer {
    /// A layer whose walkers did not all come to the end gives its pins back here.
    fn drop(&mut self) {
        if !self.is_closed() {
            self.give_back();
        }
    }
}

impl Streamer {
    /// The first of `tensors`, which must be the first of its layer, and the others the same layer's.
    fn lead_of(&self, tensors: &[usize]) -> Result<usize, Arc<Error>> {
        let rising = tensors.windows(2).all(|pair| pair[0] < pair[1]);
        match tensors {
            [first, ..] if rising && tensors.iter().all(|&t| self.lead_of.get(t) == Some(first)) => Ok(*first),
            _ => {
                let why = format!("the tensors {tensors:?} are not the experts of one layer, in the model's order");
                Err(Arc::new(Error::Invalid(why)))
            }
        }
    }

    /// Gives `block` a slot, at the expense of guesses if need be. Answers whether there was one.
    fn reserve_at_any_cost(&self, core: &mut Core, block: BlockId, draft: Option<u32>) -> bool {
        while self.reserve(core, block, draft) == Acquired::Full {
            if !core.give_up_guesses() {
                return false;
            }
        }
        true
    }

    /// Pins all blocks of the experts, and queues the reads of those that are absent, expert by expert. Answers how many
    /// are there already; `None` when there was no room for all: then nothing is pinned, and what got a slot is read all the
    /// same.
    fn pin_all(
        &self,
        core: &mut Core,
        request: &LayerRequest,
        firsts: &[BlockId],
        experts: &[u32],
        pickers: &Pickers,
    ) -> Result<Option<AtFirst>, Arc<Error>> {
        let LayerRequest { tensors, rows, certain, .. } = *request;
        let before = core.progress;
        core.begin(tensors[0], tensors[0], rows, pickers.verify());
        let mut counts = vec![[0; 2]; tensors.len()];
        let mut pinned = Vec::new();
        let mut absent = Vec::new();
        // an expert is as its worst matrix is: that is judged by the first one, as with tickets
        let mut lead = [0; 2];
        // what is there is pinned before anything is evicted for the rest
        for &expert in experts {
            let (mut late, mut missed) = (false, false);
            let draft = pickers.draft(expert);
            for (part, block) in firsts.iter().map(|first| first + expert).enumerate() {
                match core.store.state(block) {
                    // an error is for the pass that asked for the read; a later one tries again
                    State::Failed if core.asked[block as usize] == core.progress.pass => {
                        pinned.into_iter().for_each(|block| core.store.unpin(block));
                        return Err(self.failure(core, block));
                    }
                    state @ (State::Failed | State::Absent) => {
                        if state == State::Failed {
                            self.failure(core, block);
                        }
                        counts[part][1] += 1;
                        missed = true;
                        absent.push((block, draft));
                        continue;
                    }
                    State::Ready | State::Loading => {}
                }
                let ready = core.want(tensors[part], block, draft);
                counts[part][0] += usize::from(!ready);
                late |= !ready;
                pinned.push(block);
            }
            lead[0] += usize::from(late && !missed);
            lead[1] += usize::from(missed);
        }
        counts[0] = lead;
        core.ahead.crowded = false;
        core.give_up_past(before.lead, tensors[0], experts);
        for (block, draft) in absent {
            if !self.reserve_at_any_cost(core, block, draft) {
                pinned.into_iter().for_each(|block| core.store.unpin(block));
                core.progress = before;
                return Ok(None);
            }
            core.store.pin(block);
            pinned.push(block);
        }
        for (&tensor, &absent) in tensors.iter().zip(&counts) {
            core.ahead.use_tensor(tensor);
            core.stats.operation(tensor, rows, certain < rows, experts.len(), absent);
        }
        Ok(Some(match lead[0] + lead[1] {
            0 => AtFirst::All,
            n if n < experts.len() => AtFirst::Some,
            _ => AtFirst::None,
        }))
    }
}
