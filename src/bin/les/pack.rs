//! `les pack`, `les verify` and `les unpack`: the packed layout, there, checked and back.

use std::path::PathBuf;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use les::ffi::ggml::Ggml;
use les::index::GgmlType;
use les::options::{Size, parse_bytes};
use les::pack::mix::{Imatrix, Mix, Quantizer, Recording, Target, Uses, is_float};
use les::pack::{self, Layout, OutFile, Reservation, Source};

/// Write a model anew with all matrices of an expert together, aligned and with checksums
///
/// No weight is changed unless one of --shrink, --bpw and --budget is given. What was interrupted goes on when the same
/// command is given again.
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
    /// Requantize the experts, each matrix to a type of its own, to take so much less than they do in MODEL (26.7%)
    #[arg(long, value_name = "PERCENT", value_parser = percent, group = "target")]
    shrink: Option<Target>,
    /// The same, to so many bits per weight
    #[arg(long, value_name = "BITS", value_parser = bits, group = "target")]
    bpw: Option<Target>,
    /// The same, so that all that is written takes up to so many bytes (14G)
    #[arg(long, value_name = "BYTES", value_parser = |text: &str| bytes(text).map(Target::File), group = "target")]
    budget: Option<Target>,
    /// What llama-imatrix wrote for this model: which inputs of experts are large, and which experts are picked often
    #[arg(long, value_name = "FILE", requires = "target")]
    imatrix: Option<PathBuf>,
    /// What --les-inputs recorded: errors of columns that go together are made to cancel out, which takes far longer
    #[arg(long, value_name = "FILE", requires = "target")]
    inputs: Option<PathBuf>,
    /// A trace of --les-trace: how often experts are picked, instead of what the importance matrix says
    #[arg(long, value_name = "FILE", requires = "target")]
    trace: Option<PathBuf>,
    /// Choose from these types only, and those that the experts have (q2_K,q3_K,q4_K): some are slow to make, or to compute with
    #[arg(long, value_name = "TYPES", value_delimiter = ',', value_parser = ty, requires = "target")]
    types: Option<Vec<GgmlType>>,
    /// llama.cpp's libggml-base, whose quantizers are used; by default (or by LES_GGML) that beside this program
    #[arg(long, value_name = "LIB", requires = "target")]
    ggml: Option<PathBuf>,
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

fn ty(text: &str) -> Result<GgmlType, String> {
    GgmlType::named(text).ok_or_else(|| "there is no type of this name; give ggml's, such as q3_K".into())
}

fn percent(text: &str) -> Result<Target, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse().ok();
    let percent = number.filter(|n: &f64| *n > 0.0 && *n < 100.0);
    percent
        .map(|n| Target::Shrink(n / 100.0))
        .ok_or_else(|| "give a percentage above 0 and below 100, such as 26.7%".into())
}

fn bits(text: &str) -> Result<Target, String> {
    let bits = text.parse().ok().filter(|n: &f64| *n > 0.0 && *n <= 32.0);
    bits.map(Target::Bits).ok_or_else(|| "give a number of bits, such as 3.3".into())
}

pub fn pack(args: &PackArgs) -> anyhow::Result<()> {
    let source = Source::open(&args.model)?;
    let split = args.split_max_size.is_some();
    let reserved = (!args.dry_run).then(|| Reservation::new(&args.output, split)).transpose()?;
    let quantizer = args.target().map(|_| quantizer(args, &source)).transpose()?;
    let mix = args.target().zip(quantizer.as_ref()).map(|(target, of)| mix(args, &source, of, target)).transpose()?;
    let layout = Layout::new(&source, &args.output, args.split_max_size, mix.as_ref())?;
    if args.dry_run {
        println!("{:.2} become {:.2}, of which", Size(source.bytes()), Size(layout.bytes()));
        layout.files.iter().for_each(print_file);
        println!("{:.2} are free there", Size(pack::room(&args.output)?));
        return Ok(());
    }
    // one file is locked under the name itself
    let _reserved = reserved.filter(|_| split);
    let bar = bar(source.index.expert_bytes() + source.index.dense_bytes);
    let packed = pack::pack(&source, &layout, mix.as_ref(), &mut |bytes| {
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

impl PackArgs {
    fn target(&self) -> Option<Target> {
        self.shrink.or(self.bpw).or(self.budget)
    }
}

fn quantizer(args: &PackArgs, source: &Source) -> anyhow::Result<Quantizer> {
    let library = args.ggml.clone().or_else(|| std::env::var_os("LES_GGML").map(PathBuf::from));
    let ggml = Ggml::open(library.as_deref())?;
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    let recording = args.inputs.as_deref().map(Recording::open).transpose()?;
    let uses = args.trace.as_deref().map(|path| Uses::read(path, &source.index)).transpose()?;
    if uses.as_ref().is_some_and(|uses| uses.cut) {
        eprintln!("les: the last line of the trace was cut, and is left out");
    }
    if imatrix.is_none() && recording.is_none() {
        eprintln!(
            "les: without --imatrix all inputs of an expert are taken to be alike, which makes a worse choice of types"
        );
    }
    if source.index.tensors.iter().any(|t| !is_float(t.ty)) {
        eprintln!(
            "les: the experts are quantized already, and lose more when that is done again than from f16 or bf16"
        );
    }
    Ok(Quantizer { ggml, imatrix, recording, uses, types: args.types.clone() })
}

/// Chooses the types, and shows them.
fn mix<'a>(args: &PackArgs, source: &Source, of: &'a Quantizer, target: Target) -> anyhow::Result<Mix<'a>> {
    let bytes = source.index.expert_bytes();
    let bar = bar(bytes);
    let size = |mix: &Mix| Ok(Layout::new(source, &args.output, args.split_max_size, Some(mix))?.bytes());
    let mix = Mix::new(source, of, target, &size, &mut |bytes| {
        bar.inc(bytes);
        Ok(())
    })?;
    bar.finish_and_clear();
    println!("experts of {:.2} become {:.2}, {:.2} bits per weight:", Size(bytes), Size(mix.bytes()), mix.bits());
    println!("{:7}  {:8} {:>9}  {:>12}  {:>12}", "part", "type", "matrices", "bytes", "of the harm");
    for kind in mix.kinds(source) {
        let (part, ty, harm) = (kind.part, kind.ty, 100.0 * kind.harm);
        println!("{part:7}  {ty:8} {:9}  {:12.2}  {harm:11.1}%", kind.matrices, Size(kind.bytes));
    }
    mix.notes().iter().for_each(|note| eprintln!("les: {note}"));
    Ok(mix)
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
