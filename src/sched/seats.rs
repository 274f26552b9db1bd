//! Who walks. Walkers are told apart by their threads, so that one that leaves twice, or takes a step twice, takes nothing
//! away from another.

use crate::sync::{Mutex, ThreadId, this_thread};

/// The walkers of one ticket.
pub(super) struct Seats {
    walkers: usize,
    seats: Mutex<Vec<Seat>>,
}

struct Seat {
    thread: ThreadId,
    /// The step to be taken next.
    next: u32,
    left: bool,
}

impl Seats {
    pub(super) fn new(walkers: u32) -> Self {
        Self { walkers: walkers as usize, seats: Mutex::new(Vec::new()) }
    }

    /// This thread's walker takes its step `step`. Says why it may not.
    pub(super) fn step(&self, step: u32) -> Result<(), String> {
        self.with_seat(|seat| {
            if step != seat.next {
                return Err(format!("position {} of a walk is next, not {step}", seat.next));
            }
            seat.next = seat.next.saturating_add(1);
            Ok(())
        })
    }

    /// The step that this thread's walker would take next.
    pub(super) fn next(&self) -> Result<u32, String> {
        self.with_seat(|seat| Ok(seat.next))
    }

    /// This thread's walker has left: it takes no more steps.
    pub(super) fn leave(&self) {
        // has a seat, and has not left: it was looked up a moment ago, by the same thread
        let _ = self.with_seat(|seat| {
            seat.left = true;
            Ok(())
        });
    }

    fn with_seat<T>(&self, act: impl FnOnce(&mut Seat) -> Result<T, String>) -> Result<T, String> {
        let thread = this_thread();
        let seats = &mut *self.seats.lock();
        let at = seats.iter().position(|seat| seat.thread == thread).unwrap_or(seats.len());
        if at == self.walkers {
            return Err(format!("more threads walk a ticket than its {} walkers", self.walkers));
        }
        let Some(seat) = seats.get_mut(at) else {
            let mut seat = Seat { thread, next: 0, left: false };
            let answer = act(&mut seat)?;
            seats.push(seat);
            return Ok(answer);
        };
        if seat.left {
            return Err("this thread has left the walk before".into());
        }
        act(seat)
    }
}
