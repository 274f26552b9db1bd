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
            eprintln!("les: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, but those that it tells itself.
fn told(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |told, cause| match told.as_str() {
        "" => cause,
        _ if told.contains(&cause) => told,
        _ => format!("{told}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn each_cause_is_told_once() {
        let cause = || std::io::Error::other("No such file");
        let own = les::Error::File { path: "m.gguf".into(), what: "open", source: cause() };
        let text = told(&anyhow::Error::new(own).context("packing"));
        assert!(text.starts_with("packing: m.gguf: cannot open: No such file; "), "{text}");
        assert_eq!(text.matches("No such file").count(), 1, "{text}");
        let other = Err::<(), _>(cause()).context("plot.svg").err();
        assert_eq!(other.as_ref().map(told).as_deref(), Some("plot.svg: No such file"));
    }
}
