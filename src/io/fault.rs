//! Faults on demand: what a broken device, a truncated file or a slow disk would do, at a chosen read.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Completion, Engine, Read};
use crate::error::{Error, Result};

/// How long to look at the wrapped engine before looking at what became due here.
const SLICE: Duration = Duration::from_millis(2);

const GRAMMAR: &str = "eio@N, eio@N+, short@N, short@N+, slow@N:MILLISECONDS and reorder, joined by commas; N counts \
                       reads from 1, and + means all later ones too";

/// What goes wrong, and when: `eio@17`, `short@3+,reorder`, `slow@5:200`. See [`FaultPlan::from_str`].
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

    fn reorders(&self) -> bool {
        self.rules.contains(&Rule::Reorder)
    }
}

impl FromStr for FaultPlan {
    type Err = Error;

    /// Reads a plan: one or more of `eio@N` (the Nth read fails with EIO), `eio@N+` (and all later ones), `short@N` and
    /// `short@N+` (likewise, as if the file ended there), `slow@N:MS` (the Nth read and all later ones take longer by
    /// so many milliseconds) and `reorder` (completions come in reverse), joined by commas.
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
                Rule::Reorder => write!(f, "{comma}reorder")?,
            }
        }
        Ok(())
    }
}

/// Makes reads of another engine fail or dawdle as planned. A read that is to fail never reaches that engine, so its
/// buffer is not touched.
pub struct FaultEngine {
    inner: Box<dyn Engine>,
    plan: FaultPlan,
    state: Mutex<State>,
    /// A read was submitted: the reaper must look again at what to wait for.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Reads seen so far. A read's number is its token within the wrapped engine.
    count: u64,
    /// With the wrapped engine: the caller's token, and when it may be handed out.
    inside: HashMap<u64, (u64, Instant)>,
    /// Ended, but not before the given time.
    held: Vec<(Instant, Completion)>,
}

impl fmt::Debug for FaultEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultEngine({} on {})", self.plan, self.inner.name())
    }
}

impl FaultEngine {
    /// Wraps an engine.
    pub fn new(inner: Box<dyn Engine>, plan: FaultPlan) -> Self {
        Self { inner, plan, state: Mutex::default(), changed: Condvar::new() }
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
    fn deliver(&mut self, reorder: bool, out: &mut Vec<Completion>) {
        let now = Instant::now();
        let (due, held) = self.held.drain(..).partition::<Vec<_>, _>(|&(due, _)| due <= now);
        self.held = held;
        let due = due.into_iter().map(|(_, completion)| completion);
        if reorder { out.extend(due.rev()) } else { out.extend(due) }
    }
}

impl Engine for FaultEngine {
    fn name(&self) -> &'static str {
        "fault"
    }

    fn submit(&self, reads: &[Read]) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let mut pass = Vec::with_capacity(reads.len());
        for read in reads {
            state.count += 1;
            let n = state.count;
            let due = now + self.plan.delay(n);
            match self.plan.fault(n) {
                Some(fault) => state.held.push((due, Completion { token: read.token, result: Err(fault.error()) })),
                None => {
                    state.inside.insert(n, (read.token, due));
                    pass.push(Read { token: n, ..*read });
                }
            }
        }
        drop(state);
        self.inner.submit(&pass);
        self.changed.notify_all();
    }

    fn reap(&self, wait: Duration, out: &mut Vec<Completion>) {
        let until = super::deadline(wait);
        let before = out.len();
        self.collect(Duration::ZERO);
        loop {
            let mut state = self.state.lock();
            // The more there are, the more there is to reverse.
            let gather = self.plan.reorders() && !state.inside.is_empty() && Instant::now() < until;
            if !gather {
                state.deliver(self.plan.reorders(), out);
            }
            let left = until.saturating_duration_since(Instant::now());
            if out.len() > before || left.is_zero() || state.inside.is_empty() && state.held.is_empty() {
                return;
            }
            if state.inside.is_empty() {
                // Only what is held back is left: sleep until it is due, or more is submitted.
                let due = state.held.iter().map(|&(due, _)| due).min().map_or(until, |due| due.min(until));
                let _ = self.changed.wait_until(&mut state, due);
            } else {
                drop(state);
                self.collect(left.min(SLICE));
            }
        }
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}
