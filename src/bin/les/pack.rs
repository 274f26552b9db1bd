//! `les pack`, `les verify` and `les unpack`: the packed layout, there, checked and back.

use std::path::PathBuf;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use les::options::{Size, parse_bytes};
use les::pack::{self, Layout, OutFile, Source};

/// Write a model anew with all matrices of an expert together, aligned and with checksums
///
/// What was interrupted goes on when the same command is given again.
#[derive(clap::Args)]
pub struct PackArgs {
    /// The model, or any of its shards
    model: PathBuf,
    /// The packed file to write
    output: PathBuf,
    /// Write shards OUTPUT-00001-of-000NN.gguf of up to so many bytes (K, M and G are understood)
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    split_max_size: Option<u64>,
    /// Show what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
}

/// Hold a packed model against its checksums
#[derive(clap::Args)]
pub struct VerifyArgs {
    /// The packed model, or any of its shards
    model: PathBuf,
}

/// Write the stock GGUF file that a packed model was made from
#[derive(clap::Args)]
pub struct UnpackArgs {
    /// The packed model, or any of its shards
    model: PathBuf,
    /// The file to write
    output: PathBuf,
}

fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text, "").filter(|&bytes| bytes > 0).ok_or_else(|| "give a number of bytes, such as 20G".into())
}

pub fn pack(args: &PackArgs) -> anyhow::Result<()> {
    let source = Source::open(&args.model)?;
    let layout = Layout::new(&source, &args.output, args.split_max_size)?;
    if args.dry_run {
        println!("{:.2} become {:.2}, of which", Size(source.bytes()), Size(layout.bytes()));
        layout.files.iter().for_each(print_file);
        println!("{:.2} are free there", Size(pack::room(&args.output)?));
        return Ok(());
    }
    let bar = bar(source.index.expert_bytes() + source.index.dense_bytes);
    let packed = pack::pack(&source, &layout, &mut |bytes| {
        bar.inc(bytes);
        Ok(())
    })?;
    bar.finish_and_clear();
    if packed.resumed_bytes > 0 {
        println!("{:.2} were there already, from a run that was interrupted", Size(packed.resumed_bytes));
    }
    layout.files.iter().for_each(print_file);
    Ok(())
}

fn print_file(file: &OutFile) {
    let (layers, others) = (file.layers(), file.others());
    println!(
        "{:12.2}  {}: the experts of {layers} layers, {others} other tensors",
        Size(file.bytes),
        file.path.display()
    );
}

pub fn verify(args: &VerifyArgs) -> anyhow::Result<()> {
    let bar = bar(pack::total_bytes(&args.model)?);
    let verified = pack::verify(&args.model, &mut |bytes| {
        bar.inc(bytes);
        Ok(())
    })?;
    bar.finish_and_clear();
    if verified.damage.is_empty() {
        println!("all {} checksums are right", verified.checksums);
        return Ok(());
    }
    for damage in &verified.damage {
        println!("{damage}");
    }
    bail!(
        "{} of {} checksums are wrong; pack the model again, or copy the file again",
        verified.damage.len(),
        verified.checksums
    )
}

pub fn unpack(args: &UnpackArgs) -> anyhow::Result<()> {
    let bar = bar(pack::total_bytes(&args.model)?);
    let unpacked = pack::unpack(&args.model, &args.output, &mut |bytes| {
        bar.inc(bytes);
        Ok(())
    })?;
    bar.finish_and_clear();
    let what =
        if unpacked.identical { "the file that was packed" } else { "the tensors and metadata that were packed" };
    println!("{:12.2}  {}: {what}", Size(unpacked.bytes), args.output.display());
    Ok(())
}

/// Shows how far a command is; nothing where there is no terminal.
fn bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}") {
        bar.set_style(style);
    }
    bar
}
