//! The `les` program.
fn main() {}
