//! The `les` program.

mod bench;
mod inspect;
mod pack;
mod plan;
mod report;
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
    Pack(pack::PackArgs),
    Plan(plan::Args),
    Report(report::Args),
    Sim(sim::Args),
    Unpack(pack::UnpackArgs),
    Verify(pack::VerifyArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Pack(args) => pack::pack(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Unpack(args) => pack::unpack(&args),
        Command::Verify(args) => pack::verify(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("les: {error:#}");
            ExitCode::FAILURE
        }
    }
}
