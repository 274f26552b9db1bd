//! The `les` program.

mod bench;
mod inspect;
mod plan;
mod sim;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tools around Lookahead Expert Scheduling for llama.cpp
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Inspect(inspect::Args),
    Plan(plan::Args),
    Sim(sim::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Sim(args) => sim::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("les: {error:#}");
            ExitCode::FAILURE
        }
    }
}
