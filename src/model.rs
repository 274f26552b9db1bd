//! A model that streams: its index, the user's choices, and the streamer, started when it is first needed.

mod decide;
mod drafts;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::cputime;
use crate::error::{Error, Result, why_unread};
use crate::index::Index;
use crate::inputs::Recorder;
use crate::io::{self, DEFAULT_DEPTH, FaultPlan, Files};
use crate::lookahead::Lookahead;
use crate::memory;
use crate::options::Options;
use crate::sched::{Due, FileGuard, Layer, LayerRequest, Request, Streamer, Ticket};
use crate::spec;
use crate::stats::Stats;
use crate::store::{Arena, Plan, Store, Valued};
use crate::sync::Mutex;

pub use decide::Decision;
use decide::{Promise, available};

/// Makes reads fail on purpose, to see how a program copes: see [`FaultPlan`].
pub const FAULT_VARIABLE: &str = "LES_FAULT";

impl FileGuard for Files {
    fn check(&self, file: u32) -> Result<()> {
        Files::check(self, file)
    }
}

/// What was chosen.
#[derive(Debug, Default)]
struct Choice {
    options: Options,
    fault: Option<FaultPlan>,
    promise: Promise,
}

/// An opened model. All methods may be called from any thread.
pub struct Model {
    index: Arc<Index>,
    files: Arc<Files>,
    /// How a budget will be cut.
    layout: Plan,
    choice: Mutex<Choice>,
    streamer: OnceLock<Arc<Streamer>>,
    /// The rows of a pass that verifies drafts; 0: there is none.
    drafted: AtomicUsize,
    lookahead: OnceLock<Mutex<Lookahead>>,
    /// Of inputs, where the options name one.
    recorder: OnceLock<Mutex<Recorder>>,
    engine_notice: OnceLock<String>,
    /// Of sequences that have ended.
    speculation: Mutex<spec::Summary>,
    last_error: Mutex<String>,
}

impl Model {
    /// Opens a model by its first shard; finds the others by their names.
    ///
    /// # Errors
    /// When a file cannot be opened or is no usable GGUF.
    pub fn open(path: &Path) -> Result<Self> {
        Self::with_index(Index::open(path)?)
    }

    /// Opens a model whose shards have any names.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_shards(paths: &[PathBuf]) -> Result<Self> {
        Self::with_index(Index::open_shards(paths)?)
    }

    fn with_index(index: Index) -> Result<Self> {
        let files = Files::open(&index.files, true)?;
        Ok(Self {
            layout: Plan::layout(&index, files.align() as u64)?,
            index: Arc::new(index),
            files: Arc::new(files),
            choice: Mutex::default(),
            streamer: OnceLock::new(),
            drafted: AtomicUsize::new(0),
            lookahead: OnceLock::new(),
            recorder: OnceLock::new(),
            engine_notice: OnceLock::new(),
            speculation: Mutex::default(),
            last_error: Mutex::new(String::new()),
        })
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Starts streaming: takes the memory and the I/O engine. Called by the first operation if nobody did before: then
    /// the model and its contexts are loaded, and what memory is left is known.
    ///
    /// # Errors
    /// When the cache is below the floor, or the system refuses memory or the engine.
    pub fn streamer(&self) -> Result<&Arc<Streamer>> {
        if let Some(streamer) = self.streamer.get() {
            return Ok(streamer);
        }
        // one thread starts it
        let choice = &mut *self.choice.lock();
        if let Some(streamer) = self.streamer.get() {
            return Ok(streamer);
        }
        let Choice { options, fault, promise } = choice;
        let budget = self.budget(options.cache, available(promise.0))?;
        let plan = self.layout.cut(budget)?;
        let arena = Arc::new(Arena::new(plan.bytes() as usize)?);
        arena.commit_ahead();
        let depth = if options.io_depth == 0 { DEFAULT_DEPTH } else { options.io_depth };
        let opened = io::open(options.io, self.files.clone(), arena.clone(), depth, fault.clone())?;
        if let Some(notice) = opened.notice {
            self.engine_notice.get_or_init(|| notice);
        }
        let policy = Box::new(Valued::new(&plan));
        let store = Store::new(plan, policy);
        let (trace, profile) = (options.trace.as_deref(), options.profile.as_deref());
        let lookahead = Lookahead::new(&self.index, options.lookahead, store.evicts(), trace, profile)?;
        let recorder = options.inputs.as_deref().map(|path| Recorder::create(path, &self.index)).transpose()?;
        let streamer = Streamer::new(self.index.clone(), store, self.files.clone(), arena, opened.engine);
        // what is known from the last time
        for tensor in (0..self.index.tensors.len()).filter(|&tensor| self.index.leads(tensor)) {
            if let Some(values) = lookahead.values(tensor) {
                streamer.set_values(tensor, values);
            }
        }
        self.lookahead.get_or_init(|| Mutex::new(lookahead));
        if let Some(recorder) = recorder {
            self.recorder.get_or_init(|| Mutex::new(recorder));
        }
        // its arena has taken over
        *promise = Promise::default();
        Ok(self.streamer.get_or_init(|| Arc::new(streamer)))
    }

    /// Opens a ticket, see [`Ticket::open`]. `input` is what the experts are applied to: rows that must be finite numbers.
    ///
    /// # Errors
    /// As [`Ticket::open`] and [`Model::streamer`]; [`Error::NotANumber`] when one is not.
    pub fn ticket(&self, request: Request, input: &[&[f32]]) -> Result<Ticket> {
        // first the reads, then, while they are under way, the rest; dropping the ticket gives back what it holds
        let asking = Asking::begin();
        let ticket = Ticket::open(self.streamer()?.clone(), request)?;
        let mut guessing = Duration::ZERO;
        if self.index.leads(request.tensor) {
            self.check_input(request.tensor, input)?;
            let verifying = request.certain < request.rows;
            guessing = self.look_ahead(ticket.streamer(), request.tensor, request.ids, request.rows, input, verifying);
        }
        asking.end(ticket.streamer(), guessing);
        if let Some(recorder) = self.recorder.get() {
            recorder.lock().record(request.tensor, request.ids, request.rows, input);
        }
        Ok(ticket)
    }

    /// Opens a layer, see [`Layer::open`]. `input` as of [`Model::ticket`]. `None` also while inputs are recorded: only tickets
    /// tell of what down is applied to.
    ///
    /// # Errors
    /// As [`Layer::open`] and [`Model::ticket`].
    pub fn layer(&self, request: LayerRequest, input: &[&[f32]]) -> Result<Option<Layer>, Arc<Error>> {
        let asking = Asking::begin();
        let streamer = self.streamer()?;
        if self.recorder.get().is_some() {
            return Ok(None);
        }
        if let Some(&tensor) = request.tensors.first().filter(|&&t| t < self.index.tensors.len()) {
            self.check_input(tensor, input)?;
        }
        let layer = Layer::open(streamer.clone(), request)?;
        asking.end(streamer, Duration::ZERO);
        Ok(layer)
    }

    /// Does what is due for `layer`, see [`Layer::due`]: starts the reads, learns from what the router picked, and reads
    /// ahead. `picks`, `rows` and `input` are those that the layer was opened with.
    pub fn attend(&self, layer: &Layer, due: Due, picks: &[i32], rows: usize, input: &[&[f32]]) {
        let asking = Asking::begin();
        if due.read {
            layer.read();
        }
        let mut guessing = Duration::ZERO;
        if due.look_ahead {
            guessing = self.look_ahead(layer.streamer(), layer.lead(), picks, rows, input, layer.verifies());
        }
        asking.end(layer.streamer(), guessing);
    }

    /// What the experts of `tensor` are applied to must be numbers.
    fn check_input(&self, tensor: usize, input: &[&[f32]]) -> Result<()> {
        // without a branch per element, so that the loop is vectorized
        if input.iter().any(|row| row.iter().fold(false, |bad, x| bad | !x.is_finite())) {
            return Err(Error::NotANumber { tensor: self.index.tensors[tensor].name.clone() });
        }
        Ok(())
    }

    /// The layer that `tensor` leads is being computed: learns from it and reads ahead. Answers how long that took.
    fn look_ahead(
        &self,
        streamer: &Streamer,
        tensor: usize,
        picks: &[i32],
        rows: usize,
        input: &[&[f32]],
        verifying: bool,
    ) -> Duration {
        let Some(lookahead) = self.lookahead.get() else { return Duration::ZERO };
        let began = Instant::now();
        let mut lookahead = lookahead.lock();
        let guesses = lookahead.predict(tensor, picks, rows, input, || (began, streamer.waits()));
        lookahead.told(streamer.guess(tensor, &guesses));
        // now that the device is busy
        lookahead.learn(tensor, picks, rows, input, verifying);
        if let Some(values) = lookahead.values(tensor) {
            streamer.set_values(tensor, values);
        }
        began.elapsed()
    }

    /// What the user should know of how the files are read, and of the profile, as far as it is known: all of it once
    /// streaming has begun. `None` when all is as it should be.
    pub fn notice(&self) -> Option<String> {
        let profile = self.lookahead.get().and_then(|lookahead| lookahead.lock().notice().map(str::to_owned));
        let notices: Vec<String> =
            self.files.notice().into_iter().chain(self.engine_notice.get().cloned()).chain(profile).collect();
        (!notices.is_empty()).then(|| notices.join("; "))
    }

    /// Writes what was learned to the profile that the options name; answers whether there was anything to write and the
    /// file is this model's. Tickets wait meanwhile.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written; what was there is still there.
    pub fn save_profile(&self) -> Result<bool> {
        self.lookahead.get().map_or(Ok(false), |lookahead| lookahead.lock().save_profile())
    }

    /// Ends the trace that the options name; answers whether there was one.
    ///
    /// # Errors
    /// [`Error::File`] when not all of it could be written.
    pub fn close_trace(&self) -> Result<bool> {
        self.lookahead.get().map_or(Ok(false), |lookahead| lookahead.lock().close_trace())
    }

    /// Ends the recording of inputs that the options name; answers whether there was one.
    ///
    /// # Errors
    /// [`Error::File`] when not all of it could be written.
    pub fn close_inputs(&self) -> Result<bool> {
        self.recorder.get().map_or(Ok(false), |recorder| recorder.lock().close())
    }

    /// Fills `to` with what is at byte `offset` of the expert tensor number `tensor`, from its file and past the cache: for
    /// copies of the model. Whether or not it streams.
    ///
    /// # Errors
    /// [`Error::Read`] and [`Error::Changed`]; [`Error::Invalid`] for a range that no tensor has, or one of a tensor of several
    /// types.
    pub fn read(&self, tensor: usize, offset: u64, to: &mut [u8]) -> Result<()> {
        let len = to.len() as u64;
        let has = |end: u64| {
            self.index.tensors.get(tensor).filter(|t| t.expert_bytes.checked_mul(t.ne[2]).is_some_and(|all| end <= all))
        };
        let Some(t) = offset.checked_add(len).and_then(has) else {
            return Err(Error::Invalid(format!("there are no {len} bytes at {offset} of expert tensor {tensor}")));
        };
        if t.is_mixed() {
            let why = "has experts of several types, for which a copy has no room; copy the packed file";
            return Err(Error::Invalid(format!("{} {why}", t.name)));
        }
        // an expert at a time: they need not follow each other
        let mut offset = offset;
        let mut to = to;
        while !to.is_empty() {
            let (expert, begin) = ((offset / t.expert_bytes) as u32, offset % t.expert_bytes);
            let (now, later) = to.split_at_mut((t.expert_bytes - begin).min(to.len() as u64) as usize);
            let at = t.offset_of(expert) + begin;
            let crc32 = t.crc32_of(expert).filter(|_| now.len() as u64 == t.expert_bytes);
            io::read_range(&self.files, t.file, at, now, crc32).map_err(|source| Error::Read {
                path: self.index.files[t.file as usize].path.clone(),
                tensor: t.name.clone(),
                expert,
                offset: at,
                len: now.len() as u64,
                why: why_unread(&source),
            })?;
            offset += now.len() as u64;
            to = later;
        }
        self.files.check(t.file)
    }

    /// Drops what the page cache holds of the model's files.
    pub fn forget_cached(&self) {
        self.files.forget_cached();
    }

    /// Counters, if streaming has begun.
    pub fn stats(&self) -> Option<Stats> {
        let mut stats = self.streamer.get()?.stats();
        stats.peak_rss_bytes = memory::peak_rss();
        stats.speculation = self.speculation();
        if let Some(lookahead) = self.lookahead.get() {
            let lookahead = lookahead.lock();
            lookahead.recalls().for_each(|(tensor, recalls)| stats.recalled(tensor, recalls));
            stats.gate_mass = lookahead.gate_mass().to_vec();
            stats.calibrated(lookahead.reliability());
            [stats.batch, stats.history] = lookahead.foreseen();
            stats.profile_loaded = lookahead.knew();
            (stats.least_probability, stats.layers_ahead) = lookahead.effort();
        }
        Some(stats)
    }

    /// The speculation of a sequence has ended.
    pub fn speculated(&self, widths: &spec::Widths) {
        self.speculation.lock().add(widths);
    }

    /// What became of the sequences whose speculation has ended.
    pub fn speculation(&self) -> spec::Summary {
        self.speculation.lock().clone()
    }

    /// Remembers what went wrong, for [`Model::last_error`].
    pub fn set_last_error(&self, message: String) {
        *self.last_error.lock() = message;
    }

    /// What went wrong last; empty if nothing did.
    pub fn last_error(&self) -> String {
        self.last_error.lock().clone()
    }
}

/// The time that asking for experts takes.
struct Asking {
    began: Instant,
    cpu: Duration,
}

impl Asking {
    fn begin() -> Self {
        Self { began: Instant::now(), cpu: cputime::of_this_thread() }
    }

    /// Counts it; `guessing` is a part of it.
    fn end(self, streamer: &Streamer, guessing: Duration) {
        streamer.asked(self.began.elapsed(), guessing, cputime::of_this_thread().saturating_sub(self.cpu));
    }
}

/// What [`FAULT_VARIABLE`] asks for.
///
/// # Errors
/// [`Error::Invalid`] when it is no plan.
pub fn fault_plan() -> Result<Option<FaultPlan>> {
    match std::env::var(FAULT_VARIABLE) {
        Ok(plan) if !plan.is_empty() => plan.parse().map(Some),
        _ => Ok(None),
    }
}
