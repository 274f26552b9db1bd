//! Brings the experts that an operation needs, in the order in which they become ready.
//!
//! An operation (one matrix multiplication over the picked experts of one tensor) opens a [`Ticket`]. What is absent
//! is read: first this tensor's part of every expert, then the parts that the layer will need next, so that the later
//! parts arrive while the earlier ones are computed. Every compute thread then walks the ticket and is given one
//! expert after another: those that are in memory first, the others as they arrive.
//!
//! Nobody but the walkers drives the device: a walker that finds nothing ready reaps completions itself, and the
//! others sleep until it has some.

mod drafts;
mod guess;
mod layer;
mod seats;
mod ticket;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::cputime;
use crate::error::{Error, Result, why_unread};
use crate::index::Index;
use crate::io::{Check, Completion, Engine, Read};
use crate::lookahead::Waits;
use crate::stats::Stats;
use crate::store::{Acquired, Arena, Ask, BlockId, Extent, Store, extent};
use crate::sync::{AtomicUsize, Condvar, Mutex, MutexGuard};

use drafts::Drafts;
pub use drafts::PassReads;
use guess::Ahead;
pub use guess::LANES;
pub use layer::{Due, Layer, LayerRequest};
pub use ticket::{Request, Step, Ticket};

/// How long a walker waits in one call for the device before it looks around again.
const REAP_SLICE: Duration = Duration::from_millis(500);
/// A device that completes nothing for so long does not answer.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Says whether a file is still the one that was opened.
pub trait FileGuard: Send + Sync {
    /// # Errors
    /// [`Error::Changed`] when it is not.
    fn check(&self, file: u32) -> Result<()>;
}

/// What all tickets of a model share. All methods may be called from any thread.
pub struct Streamer {
    index: Arc<Index>,
    files: Arc<dyn FileGuard>,
    // dropped before the arena: dropping an engine waits for its reads
    engine: Box<dyn Engine>,
    arena: Arc<Arena>,
    core: Mutex<Core>,
    wake: Condvar,
    /// Per tensor: the tensors of the same layer and group that come after it, in the order of use.
    later: Vec<Vec<usize>>,
    tensor_of: Vec<u32>,
    /// By tensor: the first of its layer and group.
    lead_of: Vec<usize>,
    /// Tickets that wait for a slot. While there are any, slots are given back as early as possible.
    starved: AtomicUsize,
    /// 1 while guesses wait for the device: then walkers look after it.
    hungry: AtomicUsize,
    /// 1 while somebody reaps. Set only under the lock.
    reaping: AtomicUsize,
}

/// Whose turn it is to reap. However it ends, by a panic too, it is somebody else's then.
struct Turn<'a>(&'a Streamer);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.reaping.store(0, Ordering::SeqCst);
        self.0.wake.notify_all();
    }
}

struct Core {
    store: Store,
    /// Blocks that have a slot and wait for their turn at the device.
    queue: VecDeque<BlockId>,
    in_flight: usize,
    /// Reads that have ended, well or not.
    completions: u64,
    progress: Progress,
    ahead: Ahead,
    drafts: Drafts,
    /// Per block: the pass that asked for its last read.
    asked: Vec<u32>,
    /// Per block: it was once read with its checksum right. The file is the same ever since, so later reads are not checked:
    /// that way checking costs nothing in the long run.
    sound: Vec<bool>,
    /// Why the blocks in state `Failed` failed.
    errors: HashMap<BlockId, Arc<Error>>,
    stats: Stats,
    batch: Vec<Read>,
    done: Vec<Completion>,
}

/// Where in the model the computation is.
#[derive(Clone, Copy)]
struct Progress {
    /// Counts the passes over the model.
    pass: u32,
    /// The first tensor of the layer that is computed: a layer that does not come after it begins a pass.
    lead: usize,
    /// The tensors of this layer that were used, a bit each from the first: one that is used again begins a pass, too.
    used: u64,
}

impl Progress {
    /// An operation on `tensor`, whose layer's first one is `lead`, begins; tensors of one layer come in any order. Answers whether
    /// it is the first one of its layer.
    fn step(&mut self, tensor: usize, lead: usize) -> bool {
        let bit = 1u64.checked_shl((tensor - lead) as u32).unwrap_or(0);
        let again = lead == self.lead && self.used & bit != 0;
        let begins = again || lead != self.lead;
        self.pass = self.pass.wrapping_add(u32::from(lead < self.lead || again));
        self.used = if begins { bit } else { self.used | bit };
        self.lead = lead;
        begins
    }
}

impl Core {
    /// An operation on `tensor`, whose layer's first one is `lead`, begins; some of its rows are drafts if it is `verifying`.
    fn begin(&mut self, tensor: usize, lead: usize, rows: usize, verifying: bool) {
        if self.progress.step(tensor, lead) {
            self.store.layer_begins(self.progress.pass);
        }
        self.begin_operation(rows, verifying);
        self.ahead.use_tensor(tensor);
    }
}

impl Streamer {
    /// A streamer over an empty `store`. `engine` fills `arena`, in which the store's slots lie.
    pub fn new(
        index: Arc<Index>,
        store: Store,
        files: Arc<dyn FileGuard>,
        arena: Arc<Arena>,
        engine: Box<dyn Engine>,
    ) -> Self {
        let same = |a: usize, b: usize| {
            let (a, b) = (&index.tensors[a], &index.tensors[b]);
            (a.layer, a.group) == (b.layer, b.group)
        };
        let n = index.tensors.len();
        let later = (0..n).map(|t| (t + 1..n).take_while(|&u| same(t, u)).collect()).collect();
        let tensor_of =
            (0..n).flat_map(|t| std::iter::repeat_n(t as u32, index.tensors[t].n_expert() as usize)).collect();
        let mut lead_of = vec![0; n];
        for t in 0..n {
            lead_of[t] = if index.leads(t) { t } else { lead_of[t - 1] };
        }
        let stats = Stats::new(&index, store.plan());
        let n_blocks = store.plan().n_blocks as usize;
        let core = Core {
            asked: vec![0; n_blocks],
            sound: vec![false; n_blocks],
            store,
            queue: VecDeque::new(),
            in_flight: 0,
            completions: 0,
            progress: Progress { pass: 0, lead: usize::MAX, used: 0 },
            ahead: Ahead::new(n_blocks, n),
            drafts: Drafts::default(),
            errors: HashMap::new(),
            stats,
            batch: Vec::new(),
            done: Vec::new(),
        };
        Self {
            index,
            files,
            engine,
            arena,
            core: Mutex::new(core),
            wake: Condvar::default(),
            later,
            tensor_of,
            lead_of,
            starved: AtomicUsize::new(0),
            hungry: AtomicUsize::new(0),
            reaping: AtomicUsize::new(0),
        }
    }

    /// The model's index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// A snapshot of the counters.
    pub fn stats(&self) -> Stats {
        let core = self.core.lock();
        let mut stats = core.stats.clone();
        stats.engine = self.engine.name();
        stats.io_depth = self.engine.depth();
        stats.evictions = core.store.evictions();
        stats.evictions_for_drafts = core.store.evictions_for_drafts();
        stats.evictions_for_accepted = core.store.evictions_for_accepted();
        stats
    }

    /// What was waited for so far.
    pub fn waits(&self) -> Waits {
        self.core.lock().stats.waits()
    }

    /// Counts the time that opening a ticket took, the guessing in it, and its processor time.
    pub fn asked(&self, all: Duration, guessing: Duration, cpu: Duration) {
        self.core.lock().stats.asked(all, guessing, cpu);
    }

    /// What the experts of the layer that `tensor` leads are worth keeping, one value per expert.
    pub fn set_values(&self, tensor: usize, values: &[f32]) {
        let store = &mut self.core.lock().store;
        self.parts_from(tensor).for_each(|tensor| store.set_values(tensor, values));
    }

    fn extent_of(&self, core: &Core, block: BlockId) -> (usize, Extent) {
        let t = self.tensor_of[block as usize] as usize;
        let tensor = &self.index.tensors[t];
        let expert = block - core.store.plan().first_block[t];
        (t, extent(tensor.offset_of(expert), tensor.bytes_of(expert), core.store.plan().align))
    }

    /// The address of a block that is ready.
    fn address(&self, core: &Core, block: BlockId) -> usize {
        let (_, range) = self.extent_of(core, block);
        let bytes = range.need - range.head;
        self.arena.at((core.store.slot_offset(block) + range.head) as usize, bytes as usize) as usize
    }

    fn read_of(&self, core: &Core, block: BlockId) -> Read {
        let (t, range) = self.extent_of(core, block);
        let crc32 = self.index.tensors[t].crc32_of(block - core.store.plan().first_block[t]);
        Read {
            token: u64::from(block),
            file: self.index.tensors[t].file,
            offset: range.offset,
            len: range.len as usize,
            need: range.need as usize,
            buf: core.store.slot_offset(block) as usize,
            check: crc32
                .filter(|_| !core.sound[block as usize])
                .map(|crc32| Check { head: range.head as usize, crc32 }),
        }
    }

    /// Gives the engine as many queued reads as it may hold.
    fn pump(&self, core: &mut Core) {
        let mut batch = std::mem::take(&mut core.batch);
        while core.in_flight < self.engine.depth() {
            let Some(block) = core.queue.pop_front() else { break };
            batch.push(self.read_of(core, block));
            core.in_flight += 1;
        }
        self.pump_guesses(core, &mut batch);
        if !batch.is_empty() {
            self.engine.submit(&batch);
            batch.clear();
        }
        core.batch = batch;
    }

    /// Makes what was read available. Checks first that the files are still the same: bytes that were read before the
    /// check are those of the file that was opened, because a write changes the file's time before its bytes.
    fn finish(&self, done: &[Completion]) -> MutexGuard<'_, Core> {
        let checked = self.check_files(done);
        let mut core = self.core.lock();
        for completion in done {
            core.in_flight -= 1;
            core.completions += 1;
            let block = completion.token as BlockId;
            let guessed = core.ahead.ended(block);
            let file = self.index.tensors[self.tensor_of[block as usize] as usize].file;
            let changed = checked.iter().find(|(f, _)| *f == file).and_then(|(_, e)| e.clone());
            let error = match (changed, &completion.result) {
                (Some(error), _) => error,
                (None, Ok(())) => {
                    core.store.filled(block);
                    core.sound[block as usize] = true;
                    continue;
                }
                (None, Err(e)) => Arc::new(self.read_error(&core, block, e)),
            };
            core.store.failed(block);
            core.stats.read_errors += 1;
            if guessed {
                // whoever needs it will ask again, and be told
                core.store.forgive(block);
                core.ahead.failed(block);
            } else {
                core.errors.insert(block, error);
            }
        }
        core
    }

    fn check_files(&self, done: &[Completion]) -> Vec<(u32, Option<Arc<Error>>)> {
        let mut checked: Vec<(u32, Option<Arc<Error>>)> = Vec::with_capacity(1);
        for completion in done {
            let file = self.index.tensors[self.tensor_of[completion.token as usize] as usize].file;
            if checked.iter().all(|(f, _)| *f != file) {
                checked.push((file, self.files.check(file).err().map(Arc::new)));
            }
        }
        checked
    }

    fn read_error(&self, core: &Core, block: BlockId, e: &std::io::Error) -> Error {
        let (t, range) = self.extent_of(core, block);
        let tensor = &self.index.tensors[t];
        Error::Read {
            path: self.index.files[tensor.file as usize].path.clone(),
            tensor: tensor.name.clone(),
            expert: block - core.store.plan().first_block[t],
            offset: range.offset + range.head,
            len: range.need - range.head,
            why: why_unread(e),
        }
    }

    /// Waits until something may have changed: reaps completions, or sleeps while another walker does.
    fn wait<'a>(&'a self, core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if self.may_reap(&core) { self.walker_reaps(core, REAP_SLICE) } else { self.wake.wait(core, REAP_SLICE) }
    }

    /// Takes what has been completed, without waiting.
    fn poll<'a>(&'a self, core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if self.may_reap(&core) { self.reap(core, Duration::ZERO) } else { core }
    }

    /// While guesses wait for the device: gives it the next ones as soon as it has time, unless somebody else is at it.
    fn look_after(&self) {
        if self.hungry.load(Ordering::Relaxed) == 1
            && let Some(core) = self.core.try_lock()
            && self.may_reap(&core)
        {
            drop(self.walker_reaps(core, Duration::ZERO));
        }
    }

    /// As [`Streamer::reap`], and counts the processor time. What reaps while a ticket is opened is counted there.
    fn walker_reaps<'a>(&'a self, core: MutexGuard<'a, Core>, limit: Duration) -> MutexGuard<'a, Core> {
        let began = cputime::of_this_thread();
        let mut core = self.reap(core, limit);
        core.stats.reaped(cputime::of_this_thread().saturating_sub(began));
        core
    }

    /// Whether there is something to reap, and nobody does.
    fn may_reap(&self, core: &Core) -> bool {
        core.in_flight > 0 && self.reaping.load(Ordering::SeqCst) == 0
    }

    fn reap<'a>(&'a self, mut core: MutexGuard<'a, Core>, limit: Duration) -> MutexGuard<'a, Core> {
        self.reaping.store(1, Ordering::SeqCst);
        let turn = Turn(self);
        let mut done = std::mem::take(&mut core.done);
        drop(core);
        self.engine.reap(limit, &mut done);
        let mut core = self.finish(&done);
        done.clear();
        core.done = done;
        self.pump(&mut core);
        drop(turn);
        core
    }

    /// Gives `block` a slot that its read will fill. Answers whether there was one.
    fn take_slot(&self, core: &mut Core, block: BlockId, ask: Ask) -> Acquired {
        let answer = core.store.acquire_as(block, ask);
        if answer == Acquired::Reserved {
            core.asked[block as usize] = core.progress.pass;
            self.arena.touched(core.store.take_fresh_bytes());
            let (t, range) = self.extent_of(core, block);
            core.stats.read(t, range.len, ask.guess);
        }
        answer
    }

    /// Has `block` read, which a draft wants or, `None`, a certain row: it holds a slot from now on. Answers whether there was one.
    fn reserve(&self, core: &mut Core, block: BlockId, draft: Option<u32>) -> Acquired {
        let answer = self.take_slot(core, block, Ask { guess: false, draft: draft.is_some() });
        if answer == Acquired::Reserved {
            core.queue.push_back(block);
        }
        if !matches!(answer, Acquired::Full | Acquired::Failed) {
            core.wanted_by(block, draft, answer == Acquired::Reserved);
        }
        answer
    }

    /// `tensor` and those that its layer and group use after it.
    fn parts_from(&self, tensor: usize) -> impl Iterator<Item = usize> {
        std::iter::once(tensor).chain(self.later[tensor].iter().copied())
    }

    /// The blocks of those `experts` that `tensor` has.
    fn blocks_of<I: Iterator<Item = u32>>(
        &self,
        core: &Core,
        tensor: usize,
        experts: I,
    ) -> impl Iterator<Item = BlockId> + use<I> {
        let first = core.store.plan().first_block[tensor];
        let n_expert = self.index.tensors[tensor].n_expert();
        experts.filter(move |&e| e < n_expert).map(move |e| first + e)
    }

    /// Whether the `experts` have room with all these matrices at once.
    fn fit(&self, core: &Core, tensors: impl Iterator<Item = usize>, experts: &[u32]) -> bool {
        let plan = core.store.plan();
        let mut wanted = vec![0; plan.classes.len()];
        for t in tensors {
            for block in self.blocks_of(core, t, experts.iter().copied()) {
                wanted[usize::from(plan.class_of[block as usize])] += 1;
            }
        }
        wanted.iter().zip(&plan.classes).all(|(&n, class)| n <= class.slots)
    }

    /// The device does not answer to who needs `tensor`.
    fn stalled(&self, tensor: usize) -> Error {
        let tensor = &self.index.tensors[tensor];
        let path = self.index.files[tensor.file as usize].path.clone();
        Error::Stalled { path, tensor: tensor.name.clone(), seconds: STALL_LIMIT.as_secs() }
    }

    /// Why the read of `block` failed; the next request reads it again.
    fn failure(&self, core: &mut Core, block: BlockId) -> Arc<Error> {
        core.store.forgive(block);
        core.errors.remove(&block).unwrap_or_else(|| {
            // another operation was told
            Arc::new(self.read_error(core, block, &std::io::Error::other("a read has failed before")))
        })
    }
}

#[cfg(test)]
mod tests;
