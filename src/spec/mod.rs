//! Speculative decoding on a model that streams: which drafted tokens stand, and how many to verify.
//!
//! ```text
//! verify:     what stands, and what comes in the place of what does not
//! width:      how many tokens to draft and to verify, so that tokens per second are most
//! acceptance: how likely drafted tokens are to stand
//! cost:       what steps take, by how many tokens they verify
//! reading:    which part of that is reading
//! fading:     a mean in which what is old fades
//! summary:    what became of all sequences of a model
//! ```

mod acceptance;
mod cost;
mod fading;
mod reading;
mod summary;
#[cfg(test)]
mod tests;
mod verify;
mod width;

pub use acceptance::Position;
pub use summary::Summary;
pub use verify::{Candidate, draw, judge};
pub use width::{Mode, OfWidth, Step, Widths};
