//! The one memory budget: aligned slots, what is in them, and what to evict.

mod arena;

pub use arena::Arena;
