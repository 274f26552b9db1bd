//! One operation's walk over the experts it needs.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::store::{Acquired, Ask, BlockId, State};
use crate::sync::{AtomicU32, Mutex};

use super::drafts::Pickers;
use super::seats::Seats;
use super::{Core, STALL_LIMIT, Streamer};

/// What an operation needs.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Index into the model's expert tensors.
    pub tensor: usize,
    /// The router's picks, in any order and with repetitions: `rows` groups of equal length.
    pub ids: &'a [i32],
    /// How many tokens asked: 1 while text is generated.
    pub rows: usize,
    /// Of these, the first ones that are certain to stand: all, but for the drafts of a verification.
    pub certain: usize,
    /// How many threads will walk the ticket. Each must call [`Ticket::next`] to the end, or [`Ticket::leave`].
    pub walkers: u32,
}

/// One step of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Use this expert now; its bytes begin at this address and stay until the walker's next call.
    Expert {
        /// Its index in the tensor.
        expert: u32,
        /// The address of its first byte.
        address: usize,
    },
    /// That was the last one.
    End,
}

/// The experts of one operation. Shared by the threads that compute it.
pub struct Ticket {
    streamer: Arc<Streamer>,
    first_block: BlockId,
    walkers: u32,
    /// What was handed out, by position. Every walker sees the same order.
    order: Vec<OnceLock<(u32, usize)>>,
    /// How many walkers have passed a position.
    passed: Vec<AtomicU32>,
    closed: AtomicU32,
    seats: Seats,
    // locked only while the streamer's core is
    walk: Mutex<Walk>,
    failed: OnceLock<Arc<Error>>,
    rows: usize,
    tensor: usize,
    pickers: Pickers,
}

struct Walk {
    /// Pinned, not handed out yet: being read.
    pending: Vec<BlockId>,
    /// No slot yet, in reverse.
    unplaced: Vec<BlockId>,
    /// Positions handed out.
    published: usize,
    /// Positions whose pin is still held.
    held: Vec<bool>,
}

impl Ticket {
    /// Opens a ticket: asks for every expert of the request, starts the reads and names those that are ready.
    ///
    /// # Errors
    /// [`Error::ExpertId`] for an id out of range; [`Error::Invalid`] for a tensor that is not there.
    pub fn open(streamer: Arc<Streamer>, request: Request) -> Result<Self> {
        let tensor = streamer.index.tensors.get(request.tensor).ok_or_else(|| {
            Error::Invalid(format!(
                "there is no expert tensor {}: the model has {}",
                request.tensor,
                streamer.index.tensors.len()
            ))
        })?;
        if request.walkers == 0 {
            return Err(Error::Invalid("a ticket needs at least one walker".into()));
        }
        let experts = distinct(request.ids, tensor.n_expert()).map_err(|expert| Error::ExpertId {
            tensor: tensor.name.clone(),
            expert,
            n_expert: tensor.n_expert(),
        })?;
        let pickers = Pickers::new(request.ids, request.rows, request.certain, tensor.n_expert());
        let lead = streamer.lead_of[request.tensor];
        let mut guard = streamer.core.lock();
        if request.tensor == lead {
            guard.ahead.forget_queued();
        }
        guard = streamer.poll(guard);
        let core = &mut *guard;
        let passed = core.progress.lead;
        core.begin(request.tensor, lead, request.rows, pickers.verify());
        let ticket = Self {
            first_block: core.store.plan().first_block[request.tensor],
            walkers: request.walkers,
            order: experts.iter().map(|_| OnceLock::new()).collect(),
            passed: experts.iter().map(|_| AtomicU32::new(0)).collect(),
            closed: AtomicU32::new(0),
            seats: Seats::new(request.walkers),
            walk: Mutex::new(Walk {
                pending: Vec::new(),
                unplaced: Vec::new(),
                published: 0,
                held: vec![false; experts.len()],
            }),
            failed: OnceLock::new(),
            rows: request.rows,
            tensor: request.tensor,
            pickers,
            streamer: streamer.clone(),
        };
        let absent = ticket.pin_present(core, &experts);
        if request.tensor == lead {
            core.give_up_past(passed, lead, &experts);
        }
        core.stats.operation(request.tensor, request.rows, ticket.pickers.verify(), experts.len(), absent);
        let along = streamer.touch_along(core, request.tensor, &experts, &ticket.pickers);
        if let Err(error) = ticket.place(core, &mut ticket.walk.lock()) {
            ticket.fail(error);
        }
        for (block, draft) in along {
            streamer.reserve(core, block, draft);
        }
        streamer.pump(core);
        drop(guard);
        Ok(ticket)
    }

    /// Hands out what is ready and pins what is on its way, before anything is evicted for the rest. Answers how many
    /// are `[on their way, absent]`.
    fn pin_present(&self, core: &mut Core, experts: &[u32]) -> [usize; 2] {
        let walk = &mut *self.walk.lock();
        for &e in experts {
            let block = self.first_block + e;
            match core.store.state(block) {
                State::Absent => {
                    walk.unplaced.push(block);
                    continue;
                }
                // an error is for the pass that asked for the read; a later one tries again
                State::Failed if core.asked[block as usize] != core.progress.pass => {
                    self.streamer.failure(core, block);
                    walk.unplaced.push(block);
                    continue;
                }
                State::Failed => {
                    self.fail(self.streamer.failure(core, block));
                    continue;
                }
                State::Ready | State::Loading => {}
            }
            let ready = core.want(self.tensor, block, self.pickers.draft(e));
            if ready {
                self.publish(core, walk, block);
            } else {
                walk.pending.push(block);
            }
        }
        // taken from the end
        walk.unplaced.reverse();
        if !walk.unplaced.is_empty() {
            self.streamer.starved.fetch_add(1, Ordering::SeqCst);
        }
        [walk.pending.len(), walk.unplaced.len()]
    }

    fn publish(&self, core: &Core, walk: &mut Walk, block: BlockId) {
        let at = walk.published;
        let _ = self.order[at].set((block - self.first_block, self.streamer.address(core, block)));
        walk.held[at] = true;
        walk.published += 1;
    }

    fn fail(&self, error: Arc<Error>) {
        let _ = self.failed.set(error);
    }

    /// The expert at `position`: 0 first, then 1, and so on. By asking for a position a walker gives up the one before.
    /// Waits until an expert is there. After the last one: [`Step::End`], with which this walker has left.
    ///
    /// # Errors
    /// The operation has failed; this walker has left. [`Error::Invalid`], and nothing changes, when it had left before,
    /// another position is next, or every walker is another thread.
    pub fn next(&self, position: u32) -> Result<Step, Arc<Error>> {
        self.seats.step(position).map_err(|why| Arc::new(Error::Invalid(why)))?;
        if let Some(before) = position.checked_sub(1) {
            self.pass(before as usize);
            self.streamer.look_after();
        }
        if let Some(error) = self.failed.get() {
            self.close(position);
            return Err(error.clone());
        }
        let Some(cell) = self.order.get(position as usize) else {
            self.close(position);
            return Ok(Step::End);
        };
        if let Some(&(expert, address)) = cell.get() {
            return Ok(Step::Expert { expert, address });
        }
        self.wait_for(cell).map(|(expert, address)| Step::Expert { expert, address }).inspect_err(|_| {
            self.close(position);
            self.streamer.wake.notify_all();
        })
    }

    fn wait_for(&self, cell: &OnceLock<(u32, usize)>) -> Result<(u32, usize), Arc<Error>> {
        let began = Instant::now();
        let mut core = self.streamer.core.lock();
        let mut progress = (core.completions, began);
        loop {
            if let Some(&answer) = cell.get() {
                return Ok(answer);
            }
            if let Some(error) = self.failed.get() {
                return Err(error.clone());
            }
            match self.advance(&mut core) {
                Ok(false) => {}
                Ok(true) => {
                    core.stats.waited(self.tensor, self.rows, self.pickers.verify(), began.elapsed());
                    // one walker may have made the others' next expert available
                    self.streamer.wake.notify_all();
                    continue;
                }
                // before the lock is given back: no other walker may read anew what has failed for this one
                Err(error) => {
                    self.fail(error.clone());
                    return Err(error);
                }
            }
            if core.completions != progress.0 {
                progress = (core.completions, Instant::now());
            } else if progress.1.elapsed() > STALL_LIMIT {
                let error = Arc::new(self.streamer.stalled(self.tensor));
                self.fail(error.clone());
                return Err(error);
            }
            core = self.streamer.wait(core);
        }
    }

    /// Hands out what has become ready, and asks again for what had no slot. Answers whether anything was handed out.
    fn advance(&self, core: &mut Core) -> Result<bool, Arc<Error>> {
        let walk = &mut *self.walk.lock();
        let before = walk.published;
        let mut i = 0;
        while i < walk.pending.len() {
            let block = walk.pending[i];
            match core.store.state(block) {
                State::Ready => {
                    walk.pending.swap_remove(i);
                    self.publish(core, walk, block);
                }
                State::Loading => i += 1,
                State::Failed => return Err(self.streamer.failure(core, block)),
                // it failed for another ticket, which took the error
                State::Absent => {
                    walk.pending.swap_remove(i);
                    core.store.unpin(block);
                    if walk.unplaced.is_empty() {
                        self.streamer.starved.fetch_add(1, Ordering::SeqCst);
                    }
                    walk.unplaced.push(block);
                }
            }
        }
        self.place(core, walk)?;
        Ok(walk.published > before)
    }

    /// Tries to find slots for what has none, giving back what every walker has passed.
    fn place(&self, core: &mut Core, walk: &mut Walk) -> Result<(), Arc<Error>> {
        if walk.unplaced.is_empty() {
            return Ok(());
        }
        for position in 0..walk.published {
            if walk.held[position] && self.passed[position].load(Ordering::SeqCst) == self.walkers {
                walk.held[position] = false;
                self.unpin_position(core, position);
            }
        }
        while let Some(&block) = walk.unplaced.last() {
            let draft = self.pickers.draft(block - self.first_block);
            match self.streamer.reserve(core, block, draft) {
                Acquired::Full if core.give_up_guesses() => continue,
                Acquired::Full => break,
                Acquired::Failed => return Err(self.streamer.failure(core, block)),
                Acquired::Ready => {
                    core.store.pin(block);
                    self.publish(core, walk, block);
                }
                Acquired::Loading | Acquired::Reserved => {
                    core.store.pin(block);
                    walk.pending.push(block);
                }
            }
            walk.unplaced.pop();
        }
        if walk.unplaced.is_empty() {
            self.streamer.starved.fetch_sub(1, Ordering::SeqCst);
        }
        self.streamer.pump(core);
        Ok(())
    }

    /// A walker is done with a position. The last one to leave gives the pin back, if somebody needs the slot.
    fn pass(&self, position: usize) {
        let Some(passed) = self.passed.get(position) else { return };
        let all = passed.fetch_add(1, Ordering::SeqCst) + 1 == self.walkers;
        if all && self.streamer.starved.load(Ordering::SeqCst) > 0 {
            let mut core = self.streamer.core.lock();
            let walk = &mut *self.walk.lock();
            if std::mem::take(&mut walk.held[position]) {
                self.unpin_position(&mut core, position);
                self.streamer.wake.notify_all();
            }
        }
    }

    fn unpin_position(&self, core: &mut Core, position: usize) {
        if let Some(&(expert, _)) = self.order[position].get() {
            core.store.unpin(self.first_block + expert);
        }
    }

    /// This thread's walker leaves before the end.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it had left before, or every walker is another thread.
    pub fn leave(&self) -> Result<()> {
        let next = self.seats.next().map_err(Error::Invalid)?;
        self.close(next.saturating_sub(1));
        Ok(())
    }

    /// A walker at `position` leaves for good. The last one gives everything back.
    fn close(&self, position: u32) {
        self.seats.leave();
        // what it will not use must not be kept for it
        for passed in position as usize..self.order.len() {
            self.pass(passed);
        }
        if self.closed.fetch_add(1, Ordering::AcqRel) + 1 != self.walkers {
            return;
        }
        self.give_back();
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
        let walk = &mut *self.walk.lock();
        for position in 0..walk.published {
            if std::mem::take(&mut walk.held[position]) {
                self.unpin_position(core, position);
            }
        }
        for block in walk.pending.drain(..) {
            core.store.unpin(block);
        }
        if !walk.unplaced.is_empty() {
            walk.unplaced.clear();
            self.streamer.starved.fetch_sub(1, Ordering::SeqCst);
        }
        // another ticket or a layer may wait for a slot
        self.streamer.wake.notify_all();
    }
}

impl Drop for Ticket {
    /// A ticket whose walkers did not all come to the end gives its pins back here.
    fn drop(&mut self) {
        if !self.is_closed() {
            self.give_back();
        }
    }
}

/// The distinct ids in ascending order, or the first that is out of range.
pub(super) fn distinct(ids: &[i32], n_expert: u32) -> Result<Vec<u32>, i64> {
    let mut seen = vec![0u64; n_expert.div_ceil(64) as usize];
    for &id in ids {
        match u32::try_from(id) {
            Ok(e) if e < n_expert => seen[(e / 64) as usize] |= 1 << (e % 64),
            _ => return Err(i64::from(id)),
        }
    }
    let bits = |(word, &bits): (usize, &u64)| {
        (0..64u32).filter(move |b| bits >> b & 1 == 1).map(move |b| word as u32 * 64 + b)
    };
    Ok(seen.iter().enumerate().flat_map(bits).collect())
}

impl Streamer {
    /// The blocks that the layer needs after `tensor` and that are absent, in the order of use, and which draft each is for; those that are present
    /// count as used. Empty when the slots cannot hold all of them at once.
    fn touch_along(
        &self,
        core: &mut Core,
        tensor: usize,
        experts: &[u32],
        pickers: &Pickers,
    ) -> Vec<(BlockId, Option<u32>)> {
        core.ahead.crowded = !self.fit(core, self.parts_from(tensor), experts);
        if core.ahead.crowded {
            return Vec::new();
        }
        let mut absent = Vec::new();
        for &t in &self.later[tensor] {
            if !core.uses(t) {
                continue;
            }
            let first = core.store.plan().first_block[t];
            for block in self.blocks_of(core, t, experts.iter().copied()) {
                let draft = pickers.draft(block - first);
                match core.store.state(block) {
                    State::Absent => absent.push((block, draft)),
                    State::Failed => {}
                    State::Ready | State::Loading => {
                        core.store.acquire_as(block, Ask { guess: false, draft: draft.is_some() });
                    }
                }
            }
        }
        absent
    }
}
