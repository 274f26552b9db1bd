//! Faults on demand: what a broken device, a truncated file or a slow disk would do, at a chosen read.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Completion, Engine, Read};
use crate::error::{Error, Result};

/// How long to look at the wrapped engine before looking at what became due here.
const SLICE: Duration = Duration::from_millis(2);

const GRAMMAR: &str = "eio@N, eio@N+, short@N, short@N+, slow@N:MILLISECONDS, rate@MIB_PER_SECOND and reorder, joined \
                       by commas; N counts reads from 1, and + means all later ones too";

/// What goes wrong, and when: `eio@17`, `short@3+,reorder`, `slow@5:200`, `rate@400`. See [`FaultPlan::from_str`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The read fails.
    Fail { fault: Fault, from: u64, later: bool },
    /// This read and the later ones take longer by so many milliseconds.
    Slow { from: u64, millis: u64 },
    /// The device delivers so many MiB per second, one read after the other.
    Rate { mib: u64 },
    /// Completions are delivered last come, first served.
    Reorder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Eio,
    Short,
}

impl Fault {
    fn error(self) -> io::Error {
        match self {
            #[cfg(unix)]
            Self::Eio => io::Error::from_raw_os_error(libc::EIO),
            #[cfg(not(unix))]
            Self::Eio => io::Error::other("input/output error"),
            Self::Short => io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends here"),
        }
    }
}

impl FaultPlan {
    /// What befalls the `n`th read, counted from 1.
    fn fault(&self, n: u64) -> Option<Fault> {
        self.rules.iter().find_map(|rule| match *rule {
            Rule::Fail { fault, from, later } if n == from || later && n > from => Some(fault),
            _ => None,
        })
    }

    fn delay(&self, n: u64) -> Duration {
        let millis = self.rules.iter().map(|rule| match *rule {
            Rule::Slow { from, millis } if n >= from => millis,
            _ => 0,
        });
        Duration::from_millis(millis.max().unwrap_or(0))
    }

    /// What the device delivers, in MiB per second: the least that was asked for.
    fn rate(&self) -> Option<u64> {
        let rates = self.rules.iter().filter_map(|rule| match *rule {
            Rule::Rate { mib } => Some(mib),
            _ => None,
        });
        rates.min()
    }

    fn reorders(&self) -> bool {
        self.rules.contains(&Rule::Reorder)
    }
}

impl FromStr for FaultPlan {
    type Err = Error;

    /// Reads a plan: one or more of `eio@N` (the Nth read fails with EIO), `eio@N+` (and all later ones), `short@N` and
    /// `short@N+` (likewise, as if the file ended there), `slow@N:MS` (the Nth read and all later ones take longer by
    /// so many milliseconds), `rate@MIB` (all reads, one after the other, come at so many MiB per second, or slower if
    /// the device is) and `reorder` (completions come in reverse), joined by commas.
    fn from_str(text: &str) -> Result<Self> {
        let rule = |text: &str| {
            parse(text.trim()).ok_or_else(|| Error::Invalid(format!("{text:?} is no fault plan; use {GRAMMAR}")))
        };
        Ok(Self { rules: text.split(',').map(rule).collect::<Result<_>>()? })
    }
}

fn parse(text: &str) -> Option<Rule> {
    if text == "reorder" {
        return Some(Rule::Reorder);
    }
    let (what, when) = text.split_once('@')?;
    if what == "slow" {
        let (from, millis) = when.split_once(':')?;
        return Some(Rule::Slow { from: count(from)?, millis: number(millis)? });
    }
    if what == "rate" {
        return Some(Rule::Rate { mib: count(when)? });
    }
    let fault = match what {
        "eio" => Fault::Eio,
        "short" => Fault::Short,
        _ => return None,
    };
    let (from, later) = when.strip_suffix('+').map_or((when, false), |from| (from, true));
    Some(Rule::Fail { fault, from: count(from)?, later })
}

fn count(text: &str) -> Option<u64> {
    number(text).filter(|&n| n > 0)
}

/// Digits only: unlike `parse`, no sign.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, rule) in self.rules.iter().enumerate() {
            let comma = if n > 0 { "," } else { "" };
            match *rule {
                Rule::Fail { fault, from, later } => {
                    let name = if fault == Fault::Eio { "eio" } else { "short" };
                    write!(f, "{comma}{name}@{from}{}", if later { "+" } else { "" })?;
                }
                Rule::Slow { from, millis } => write!(f, "{comma}slow@{from}:{millis}")?,
                Rule::Rate { mib } => write!(f, "{comma}rate@{mib}")?,
                Rule::Reorder => write!(f, "{comma}reorder")?,
            }
        }
        Ok(())
    }
}

/// Makes reads of another engine fail or dawdle as planned. A read that is to fail never reaches that engine, so its
/// buffer is not touched.
pub struct FaultEngine {
    faulty: Arc<Faulty>,
    /// With a rate: the device, which goes on with reads in turn whether or not anybody looks.
    device: Option<JoinHandle<()>>,
}

struct Faulty {
    inner: Box<dyn Engine>,
    plan: FaultPlan,
    state: Mutex<State>,
    /// A read was submitted, or handed over by the device: who waits must look again.
    changed: Condvar,
}

/// A device that serves one read after the other, in the order in which they were submitted, at a fixed rate.
#[derive(Default)]
struct Queue {
    /// When it will have served all that was submitted; never, before the first.
    free: Option<Instant>,
}

impl Queue {
    /// When a read of so many bytes that is submitted now will have been served, at so many MiB per second.
    fn serve(&mut self, now: Instant, bytes: usize, mib_per_s: u64) -> Instant {
        let begin = self.free.map_or(now, |free| free.max(now));
        let end = begin + Duration::from_secs_f64(bytes as f64 / (mib_per_s as f64 * 1_048_576.0));
        self.free = Some(end);
        end
    }
}

#[derive(Default)]
struct State {
    queue: Queue,
    /// Reads seen so far. A read's number is its token within the wrapped engine.
    count: u64,
    /// With the wrapped engine: the caller's token, and when it may be handed out.
    inside: HashMap<u64, (u64, Instant)>,
    /// Ended, but not before the given time.
    held: Vec<(Instant, Completion)>,
    /// By the caller's token: what begins when that read has ended.
    behind: HashMap<u64, Vec<Read>>,
    /// What the device has handed over.
    served: Vec<Completion>,
    /// The device is not needed any more.
    over: bool,
}

impl fmt::Debug for FaultEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultEngine({} on {})", self.faulty.plan, self.faulty.inner.name())
    }
}

impl FaultEngine {
    /// Wraps an engine.
    ///
    /// # Errors
    /// [`Error::System`] when there is no thread for a device with a rate.
    pub fn new(inner: Box<dyn Engine>, plan: FaultPlan) -> Result<Self> {
        let faulty = Arc::new(Faulty { inner, plan, state: Mutex::default(), changed: Condvar::new() });
        let with_rate = faulty.plan.rate().map(|_| faulty.clone());
        let device = with_rate.map(|faulty| Builder::new().name("les-device".into()).spawn(move || faulty.serve()));
        let device = device.transpose().map_err(|source| Error::System {
            what: "start the thread of a device with a rate",
            remedy: "allow more threads (ulimit -u, or the control group's pids.max)",
            source,
        })?;
        Ok(Self { device, faulty })
    }
}

impl Drop for FaultEngine {
    fn drop(&mut self) {
        self.faulty.state.lock().over = true;
        self.faulty.changed.notify_all();
        if let Some(device) = self.device.take() {
            let _ = device.join();
        }
    }
}

impl Faulty {
    /// Is the device, until it is not needed any more.
    fn serve(&self) {
        let mut done = Vec::new();
        loop {
            let mut state = self.state.lock();
            state.served.append(&mut done);
            self.changed.notify_all();
            while state.is_idle() && !state.over {
                self.changed.wait(&mut state);
            }
            if state.over {
                return;
            }
            drop(state);
            self.run(SLICE, &mut done);
        }
    }

    /// Takes what the device has handed over, waiting up to `wait`.
    fn take(&self, wait: Duration, out: &mut Vec<Completion>) {
        let until = super::deadline(wait);
        let mut state = self.state.lock();
        while state.served.is_empty() && !state.is_idle() && Instant::now() < until {
            let _ = self.changed.wait_until(&mut state, until);
        }
        out.append(&mut state.served);
    }

    fn submit(&self, reads: &[Read]) {
        let mut state = self.state.lock();
        let now = Instant::now();
        let pass: Vec<Read> = reads.iter().filter_map(|&read| state.begin(&self.plan, read, now)).collect();
        drop(state);
        self.inner.submit(&pass);
        self.changed.notify_all();
    }

    fn submit_in_turn(&self, reads: &[Read]) {
        let Some((first, behind)) = reads.split_first() else { return };
        self.state.lock().behind.insert(first.token, behind.to_vec());
        self.submit(std::slice::from_ref(first));
    }

    /// Begins, holds back and hands out reads, until one is handed out or `wait` is over.
    fn run(&self, wait: Duration, out: &mut Vec<Completion>) {
        let until = super::deadline(wait);
        let before = out.len();
        self.collect(Duration::ZERO);
        loop {
            let mut state = self.state.lock();
            // The more there are, the more there is to reverse.
            let gather = self.plan.reorders() && !state.inside.is_empty() && Instant::now() < until;
            if !gather {
                let turns = state.deliver(Instant::now(), self.plan.reorders(), out);
                let pass: Vec<Read> =
                    turns.into_iter().filter_map(|(read, at)| state.begin(&self.plan, read, at)).collect();
                self.inner.submit(&pass);
            }
            let left = until.saturating_duration_since(Instant::now());
            if out.len() > before || left.is_zero() || state.is_idle() {
                return;
            }
            // what is gathered is not handed out when it is due
            let due = if gather { until } else { state.next_due().map_or(until, |due| due.min(until)) };
            if state.inside.is_empty() {
                // Only what is held back is left: sleep until it is due, or more is submitted.
                let _ = self.changed.wait_until(&mut state, due);
            } else {
                drop(state);
                self.collect(due.saturating_duration_since(Instant::now()).min(SLICE));
            }
        }
    }

    /// Takes what the wrapped engine has completed, waiting up to `wait`.
    fn collect(&self, wait: Duration) {
        let mut ended = Vec::new();
        self.inner.reap(wait, &mut ended);
        let mut state = self.state.lock();
        for Completion { token, result } in ended {
            if let Some((token, due)) = state.inside.remove(&token) {
                state.held.push((due, Completion { token, result }));
            }
        }
    }
}

impl State {
    /// Whether nothing is under way.
    fn is_idle(&self) -> bool {
        self.inside.is_empty() && self.held.is_empty()
    }

    /// When the first of those held back may be handed out.
    fn next_due(&self) -> Option<Instant> {
        self.held.iter().map(|&(due, _)| due).min()
    }

    /// Begins a read at `now`. Answers what the wrapped engine must read for it, unless it fails.
    fn begin(&mut self, plan: &FaultPlan, read: Read, now: Instant) -> Option<Read> {
        self.count += 1;
        let n = self.count;
        if let Some(fault) = plan.fault(n) {
            // no device has had to do with it
            self.held.push((now + plan.delay(n), Completion { token: read.token, result: Err(fault.error()) }));
            return None;
        }
        let served = plan.rate().map_or(now, |rate| self.queue.serve(now, read.len, rate));
        self.inside.insert(n, (read.token, served + plan.delay(n)));
        Some(Read { token: n, ..read })
    }

    /// Hands out what is due. Answers whose turn it is then, and since when.
    fn deliver(&mut self, now: Instant, reorder: bool, out: &mut Vec<Completion>) -> Vec<(Read, Instant)> {
        let (due, held) = self.held.drain(..).partition::<Vec<_>, _>(|&(due, _)| due <= now);
        self.held = held;
        let mut turns = Vec::new();
        for (at, completion) in &due {
            let mut behind = self.behind.remove(&completion.token).unwrap_or_default().into_iter();
            if let Some(next) = behind.next() {
                self.behind.insert(next.token, behind.collect());
                turns.push((next, *at));
            }
        }
        let due = due.into_iter().map(|(_, completion)| completion);
        if reorder {
            out.extend(due.rev())
        } else {
            out.extend(due)
        }
        turns
    }
}

impl Engine for FaultEngine {
    fn name(&self) -> &'static str {
        "fault"
    }

    fn submit(&self, reads: &[Read]) {
        self.faulty.submit(reads);
    }

    fn submit_in_turn(&self, reads: &[Read]) {
        self.faulty.submit_in_turn(reads);
    }

    fn reap(&self, wait: Duration, out: &mut Vec<Completion>) {
        match self.device {
            Some(_) => self.faulty.take(wait, out),
            None => self.faulty.run(wait, out),
        }
    }

    fn depth(&self) -> usize {
        self.faulty.inner.depth()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Completes everything at once.
    #[derive(Default)]
    struct Instantly(Mutex<Vec<u64>>);

    impl Engine for Instantly {
        fn name(&self) -> &'static str {
            "instantly"
        }

        fn submit(&self, reads: &[Read]) {
            self.0.lock().extend(reads.iter().map(|read| read.token));
        }

        fn reap(&self, _: Duration, out: &mut Vec<Completion>) {
            out.extend(self.0.lock().drain(..).map(|token| Completion { token, result: Ok(()) }));
        }

        fn depth(&self) -> usize {
            16
        }
    }

    /// Without a thread: what it does is called by its parts.
    fn engine(plan: &str) -> Faulty {
        let inner = Box::<Instantly>::default();
        Faulty { inner, plan: plan.parse().unwrap(), state: Mutex::default(), changed: Condvar::new() }
    }

    fn read(token: u64, len: usize) -> Read {
        Read { token, file: 0, offset: 0, len, need: len, buf: 0, check: None }
    }

    #[test]
    fn a_device_serves_one_read_after_the_other() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let ms = |n| now + Duration::from_millis(n);
        assert_eq!(queue.serve(now, MIB, 4), ms(250));
        assert_eq!(queue.serve(now, 2 * MIB, 4), ms(750));
        // while it is busy it does not matter when a read comes
        assert_eq!(queue.serve(ms(700), MIB, 4), ms(1000));
        // what it could have read while it had nothing to do is lost
        assert_eq!(queue.serve(ms(5000), MIB, 4), ms(5250));
        assert_eq!(queue.serve(ms(5000), 0, 4), ms(5250));
    }

    #[test]
    fn reads_are_due_when_the_device_has_served_them() {
        let engine = engine("slow@3:500,rate@8,rate@4");
        engine.submit(&[read(1, MIB), read(2, 2 * MIB), read(3, MIB), read(4, MIB)]);
        let state = engine.state.lock();
        let due = |n: u64| state.inside[&n].1;
        assert_eq!(due(2) - due(1), Duration::from_millis(500));
        assert_eq!(due(3) - due(2), Duration::from_millis(250 + 500));
        // a read that comes late does not keep the device
        assert_eq!(due(4) - due(3), Duration::from_millis(250));
    }

    #[test]
    fn reads_in_turn_leave_the_device_to_others_between_them() {
        let engine = engine("rate@1");
        engine.submit_in_turn(&[read(1, MIB), read(2, MIB), read(3, MIB)]);
        engine.submit(&[read(4, MIB)]);
        engine.collect(Duration::ZERO);
        let mut state = engine.state.lock();
        let dues: Vec<Instant> = state.held.iter().map(|&(due, _)| due).collect();
        assert_eq!((dues.len(), dues[1] - dues[0]), (2, Duration::from_secs(1)));
        let turns = state.deliver(dues[0], false, &mut Vec::new());
        assert_eq!(turns, [(read(2, MIB), dues[0])]);
        let begun = state.begin(&engine.plan, turns[0].0, turns[0].1).unwrap();
        // the other was there first
        assert_eq!(state.inside[&begun.token], (2, dues[1] + Duration::from_secs(1)));
        assert_eq!(state.behind[&2], [read(3, MIB)]);
    }

    #[test]
    fn reads_are_held_back_until_they_are_due() {
        let engine = engine("rate@1,eio@2");
        // this takes the device an hour
        engine.submit(&[read(1, 3600 * MIB), read(2, MIB), read(3, MIB)]);
        let mut done = Vec::new();
        engine.run(Duration::ZERO, &mut done);
        // the second has failed without the device
        assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [2]);
        assert!(done[0].result.is_err());
        let mut state = engine.state.lock();
        assert!(state.inside.is_empty());
        let dues: Vec<Instant> = state.held.iter().map(|&(due, _)| due).collect();
        assert_eq!(state.next_due(), Some(dues[0]));
        assert_eq!(dues[1] - dues[0], Duration::from_secs(1));
        // none before it is due, and each then
        done.clear();
        state.deliver(dues[0] - Duration::from_nanos(1), false, &mut done);
        assert!(done.is_empty());
        state.deliver(dues[0], false, &mut done);
        assert_eq!((done[0].token, done.len()), (1, 1));
        state.deliver(dues[1], false, &mut done);
        assert_eq!((done[1].token, done.len()), (3, 2));
    }
}
