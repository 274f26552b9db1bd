//! Lookahead Expert Scheduling: runs Mixture-of-Experts models whose experts do not fit in memory.
//!
//! The experts stay in the GGUF file. The library reads those that the router picks into a cache of fixed size, and
//! hands their addresses to the kernels that multiply with them. It never changes which experts are used, nor any
//! arithmetic.
//!
//! ```text
//! GGUF headers --> index: where are the bytes of expert e of tensor t?
//! router ids ----> sched: a ticket per operation; what is absent is read, what is ready is used first
//!                  store: one budget, slots, states, pins, replacement policy
//!                  io:    engines that fill slots (io_uring, a pool of readers)
//! draft blocks ---> spec:  what of them stands, and how many tokens to verify
//! C callers -----> ffi:   every exported function (include/les.h)
//! inputs ---------> inputs: a recording of them, for les pack
//! les pack ------> pack:  the layout that has an expert in one place, and back
//! ```
//!
//! Invariant: `unsafe` is in `ffi`, `io` and the slot arena only.
//! Invariant: slots never take more memory than the budget.
//! Invariant: a failed or short read ends in an error, never in a wrong value.

pub mod cputime;
pub mod error;
pub mod ffi;
pub mod index;
pub mod inputs;
pub mod io;
pub mod lookahead;
pub mod memory;
pub mod model;
pub mod options;
#[cfg(feature = "cli")]
pub mod pack;
pub mod sched;
pub mod spec;
pub mod stats;
pub mod store;
pub mod sync;

pub use error::{Error, Result};
