//! The `les` program.

mod bench;

use clap::{Parser, Subcommand};

/// Tools for models that are larger than memory.
#[derive(Debug, Parser)]
#[command(name = "les", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure how fast this device delivers experts.
    Bench(bench::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Bench(args) => bench::run(args),
    }
}
