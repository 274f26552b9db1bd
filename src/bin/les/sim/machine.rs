//! What a machine does with a trace, event by event: one device that reads, one processor that computes, one cache.
//!
//! It is the library's design in small. A layer is computed up to its router; then its experts are known: those that are
//! in the cache are pinned, the others get a slot and are read, one after the other, with all their parts. The processor takes
//! whatever expert has arrived; it waits only when none has. What is predicted for the next layers is read when nothing that
//! is needed is under way, and pinned until its layer has passed.
//!
//! Slots hold a whole expert of any layer here, and the processor's time does not depend on the device's work.

use std::collections::VecDeque;

use les::sched::LANES;
use les::store::{BlockId, Policy};
use serde::Serialize;

use super::replay::{Pass, Trace};
use super::values::Values;

/// A device, and a processor that takes the same time for each layer.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Device {
    /// 10^6 bytes per second, of all reads together.
    pub mb_per_s: f64,
    /// What each read takes besides; those of reads in flight overlap.
    pub latency_us: f64,
    /// The most reads in flight.
    pub depth: usize,
    /// Of a token.
    pub compute_ms: f64,
    /// The part of it that is not for experts: attention, routers, and what all tokens use.
    pub dense_part: f64,
}

/// What is known of the next layers when a layer's experts are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ahead {
    /// Nothing.
    Nothing,
    /// What was predicted in the trace for so many layers, down to a probability.
    Predicted(usize, f32),
    /// Everything of so many layers.
    Oracle(usize),
}

/// What one pass of a layer took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Passed {
    pub needed: usize,
    /// Of these, how many were not all there when they were asked for.
    pub missed: usize,
    /// What has been read meanwhile, for whatever layer.
    pub bytes: u64,
    pub wait_ms: f64,
    /// The wait and the computation.
    pub all_ms: f64,
}

/// A part of an expert that is to be read: the expert's block, its layer, and which part.
#[derive(Clone, Copy)]
struct Read {
    block: BlockId,
    at: usize,
    part: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Absent,
    /// Waits for its turn at the device.
    Asked,
    /// Arrives at this time, or has arrived.
    Comes(f64),
}

#[derive(Clone)]
struct Block {
    resident: bool,
    parts: Vec<Part>,
    /// The last pass that needed it.
    needed: usize,
    /// Pinned because it was predicted.
    held: bool,
}

impl Block {
    fn lacks(&self, part: usize) -> bool {
        !self.resident || self.parts[part] == Part::Absent
    }

    fn has(&self, part: usize, now: f64) -> bool {
        matches!(self.parts[part], Part::Comes(at) if at <= now)
    }

    fn complete(&self, now: f64) -> bool {
        self.resident && (0..self.parts.len()).all(|part| self.has(part, now))
    }

    /// Nobody needs it, and no read fills it.
    fn may_go(&self, pass: usize, now: f64) -> bool {
        let still = |part: &Part| *part == Part::Absent || matches!(part, Part::Comes(at) if *at <= now);
        !self.held && self.needed != pass && self.parts.iter().all(still)
    }
}

/// A replay under way. Times are in milliseconds.
pub struct Machine<'a> {
    trace: &'a Trace,
    device: Device,
    policy: Box<dyn Policy>,
    /// Slots that hold nothing yet.
    free: usize,
    firsts: Vec<BlockId>,
    blocks: Vec<Block>,
    /// The pass that is computed.
    pass: usize,
    now: f64,
    demand: VecDeque<Read>,
    guesses: VecDeque<Read>,
    /// What is pinned because it was predicted, with its layer.
    held: Vec<(BlockId, usize)>,
    /// Reads that were given to the device: when each ends, in order, its bytes, and whether it is a guess.
    flying: VecDeque<(f64, u64, bool)>,
    /// When the device has sent all that it was asked for.
    idle_at: f64,
    bytes: u64,
}

impl<'a> Machine<'a> {
    /// With so many slots, each of which holds an expert of any layer.
    pub fn new(trace: &'a Trace, policy: Box<dyn Policy>, slots: usize, device: &Device) -> Self {
        let firsts = trace.n_expert.iter().scan(0, |at, &n| Some(std::mem::replace(at, *at + n as u32))).collect();
        let block = |at: usize| {
            let parts = vec![Part::Absent; trace.part_bytes[at].len()];
            Block { resident: false, parts, needed: usize::MAX, held: false }
        };
        let blocks = trace.n_expert.iter().enumerate().flat_map(|(at, &n)| vec![block(at); n]).collect();
        Self {
            trace,
            device: *device,
            policy,
            free: slots,
            firsts,
            blocks,
            pass: 0,
            now: 0.0,
            demand: VecDeque::new(),
            guesses: VecDeque::new(),
            held: Vec::new(),
            flying: VecDeque::new(),
            idle_at: 0.0,
            bytes: 0,
        }
    }

    /// Replays the whole trace.
    pub fn run(mut self, mut values: Option<Box<dyn Values>>, ahead: Ahead) -> Vec<Passed> {
        let mut passes = Vec::with_capacity(self.trace.passes.len());
        for (number, pass) in self.trace.passes.iter().enumerate() {
            self.pass = number;
            let (began, bytes) = (self.now, self.bytes);
            let layer_ms = self.device.compute_ms / self.trace.n_expert.len() as f64 * pass.rows as f64;
            self.advance(self.now + layer_ms * self.device.dense_part);
            let missed = self.ask(pass);
            self.guess(number, ahead);
            if let Some(values) = &mut values {
                self.policy.valued(pass.at, values.after(number, pass));
            }
            let wait_ms = self.compute(pass, layer_ms * (1.0 - self.device.dense_part));
            let bytes = self.bytes - bytes;
            passes.push(Passed { needed: pass.needs.len(), missed, bytes, wait_ms, all_ms: self.now - began });
        }
        passes
    }

    /// What `pass` needs is pinned, and read where it lacks. Answers how many of its experts were not all there.
    fn ask(&mut self, pass: &Pass) -> usize {
        let blocks: Vec<BlockId> = pass.needs.iter().map(|e| self.firsts[pass.at] + e).collect();
        self.policy.layer_begins();
        let mut absent = Vec::new();
        let mut missed = 0;
        for &b in &blocks {
            let block = &mut self.blocks[b as usize];
            block.needed = self.pass;
            missed += usize::from(!block.complete(self.now));
            if block.resident { self.policy.used(b) } else { absent.push(b) }
        }
        for b in absent {
            if !self.take_slot(b, false) {
                self.guesses.clear();
                self.release(|_| false);
                // a pass that needs more than there is gives back what it has computed: as if it were so at once
                let _ = self.take_slot(b, false) || self.take_slot(b, true);
            }
        }
        for &block in &blocks {
            for part in 0..self.trace.part_bytes[pass.at].len() {
                let state = &mut self.blocks[block as usize].parts[part];
                if *state == Part::Absent {
                    *state = Part::Asked;
                    self.demand.push_back(Read { block, at: pass.at, part });
                }
            }
        }
        missed
    }

    /// What is predicted at pass `number` takes the place of what was predicted before.
    fn guess(&mut self, number: usize, ahead: Ahead) {
        let trace = self.trace;
        let Pass { at, token, guesses, .. } = &trace.passes[number];
        let likely: Vec<(usize, Vec<(u32, f32)>)> = match ahead {
            Ahead::Nothing => Vec::new(),
            Ahead::Predicted(layers, least) => (at + 1..)
                .zip(guesses.iter().take(layers))
                .map(|(at, guesses)| (at, guesses.iter().copied().filter(|g| g.1 >= least).collect()))
                .collect(),
            Ahead::Oracle(layers) => trace.passes[number + 1..]
                .iter()
                .take(layers)
                .filter(|pass| pass.token == *token)
                .map(|pass| (pass.at, pass.needs.iter().map(|&e| (e, 1.0)).collect()))
                .collect(),
        };
        self.guesses.clear();
        let last = likely.iter().map(|(at, _)| *at).max().unwrap_or(*at);
        self.release(|layer| (*at..=last).contains(&layer));
        for (at, experts) in likely {
            for (e, _) in &experts {
                let block = self.firsts[at] + e;
                for part in 0..trace.part_bytes[at].len() {
                    if self.blocks[block as usize].lacks(part) {
                        self.guesses.push_back(Read { block, at, part });
                    }
                    if self.blocks[block as usize].resident {
                        self.hold(block, at);
                    }
                }
            }
        }
    }

    /// Computes the experts of `pass`, which takes `experts_ms`, as they arrive. Answers how long it waited.
    fn compute(&mut self, pass: &Pass, experts_ms: f64) -> f64 {
        let mut left: Vec<BlockId> = pass.needs.iter().map(|e| self.firsts[pass.at] + e).collect();
        let mut waited = 0.0;
        while !left.is_empty() {
            if let Some(i) = left.iter().position(|&b| self.blocks[b as usize].complete(self.now)) {
                left.remove(i);
                self.advance(self.now + experts_ms / pass.needs.len() as f64);
            } else {
                self.issue();
                // what is needed is in flight, or behind others that are
                let Some(&(next, ..)) = self.flying.front() else { break };
                waited += next - self.now;
                self.advance(next);
            }
        }
        waited
    }

    /// Lets the device work until `until`.
    fn advance(&mut self, until: f64) {
        loop {
            self.issue();
            match self.flying.front() {
                Some(&(at, bytes, _)) if at <= until => {
                    self.now = at;
                    self.bytes += bytes;
                    self.flying.pop_front();
                }
                _ => break,
            }
        }
        self.now = until;
    }

    /// Gives the device what it may have: what is needed first.
    fn issue(&mut self) {
        while self.flying.len() < self.device.depth
            && let Some(read) = self.demand.pop_front()
        {
            self.start(read, false);
        }
        while self.flying.len() < self.device.depth.min(LANES)
            && self.flying.iter().all(|&(.., guess)| guess)
            && let Some(read) = self.guesses.pop_front()
        {
            if !self.blocks[read.block as usize].resident && !self.take_slot(read.block, false) {
                self.guesses.clear();
                break;
            }
            self.hold(read.block, read.at);
            if self.blocks[read.block as usize].parts[read.part] == Part::Absent {
                self.start(read, true);
            }
        }
    }

    fn start(&mut self, Read { block, at, part }: Read, guess: bool) {
        let bytes = self.trace.part_bytes[at][part];
        let begins = self.idle_at.max(self.now + self.device.latency_us / 1e3);
        self.idle_at = begins + bytes as f64 / self.device.mb_per_s / 1e3;
        self.blocks[block as usize].parts[part] = Part::Comes(self.idle_at);
        self.flying.push_back((self.idle_at, bytes, guess));
    }

    /// Gives `block` a slot, from whatever has one if `any`. Answers whether there was one.
    fn take_slot(&mut self, block: BlockId, any: bool) -> bool {
        if self.free > 0 {
            self.free -= 1;
        } else {
            let Self { blocks, policy, pass, now, .. } = self;
            let may_go = |b: BlockId| any || blocks[b as usize].may_go(*pass, *now);
            let Some(victim) = policy.victim(0, &may_go) else { return false };
            policy.removed(victim);
            // its parts stay as they are: a pass that has no slots for all it needs still waits for them
            blocks[victim as usize].resident = false;
        }
        self.policy.inserted(block, 0);
        let block = &mut self.blocks[block as usize];
        block.resident = true;
        block.parts.fill(Part::Absent);
        true
    }

    fn hold(&mut self, block: BlockId, at: usize) {
        if !std::mem::replace(&mut self.blocks[block as usize].held, true) {
            self.held.push((block, at));
        }
    }

    /// Gives back the pins of what was predicted, but for layers to `keep`.
    fn release(&mut self, keep: impl Fn(usize) -> bool) {
        let Self { held, blocks, .. } = self;
        held.retain(|&(block, at)| {
            blocks[block as usize].held = keep(at);
            keep(at)
        });
    }
}
