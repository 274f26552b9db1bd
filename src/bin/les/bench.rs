//! `les bench`: random reads at the sizes of experts, through the engines that a model uses.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use fastrand::Rng;
use les::index::{ExpertTensor, Index, ModelFile};
use les::io::{Completion, Engine, EngineKind, Files, Read};
use les::model::fault_plan;
use les::options;
use les::store::Arena;
use serde::Serialize;

/// No read may take longer: the device does not answer.
const STALLED: Duration = Duration::from_secs(60);

/// Arguments of `les bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file to read from: a model, or any large file on the device in question.
    file: PathBuf,
    /// Bytes per read (K, M and G are understood); the sizes of the model's experts when not given.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = parse_size)]
    size: Vec<u64>,
    /// Reads in flight.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4,8,16")]
    depth: Vec<usize>,
    /// Engines to compare: auto, uring, pread.
    #[arg(long, value_name = "ENGINE", value_delimiter = ',', default_value = "uring,pread")]
    io: Vec<EngineKind>,
    /// How long to measure each combination, in seconds.
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    seconds: f64,
    /// Read through the page cache, as on file systems without direct I/O.
    #[arg(long)]
    buffered: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// One measurement.
#[derive(Debug, Serialize)]
struct Row {
    engine: String,
    /// Whether the page cache was bypassed.
    direct: bool,
    /// The sizes of the reads, picked at random, in bytes.
    sizes: Vec<u64>,
    depth: usize,
    /// 10^6 bytes per second.
    mb_per_s: f64,
    reads_per_s: f64,
    /// From submission to completion, in microseconds.
    p50_us: u64,
    p99_us: u64,
    /// Processor time of this process, user and system, per 10^9 bytes; absent where the system does not tell.
    cpu_s_per_gb: Option<f64>,
}

/// Runs the command.
///
/// # Errors
/// When the file cannot be read, or an argument makes no sense.
pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.seconds > 0.0 && args.seconds < 86_400.0, "--seconds must be more than 0, and less than a day");
    let seconds = Duration::from_secs_f64(args.seconds);
    let sizes = if args.size.is_empty() { vec![request_sizes(&args.file)] } else { each_alone(&args.size) };
    let size = std::fs::metadata(&args.file).with_context(|| args.file.display().to_string())?.len();
    let model = ModelFile { path: args.file.clone(), size };
    let files = Arc::new(Files::open(&[model], !args.buffered)?);
    if let (Some(notice), false) = (files.notice(), args.buffered) {
        eprintln!("les: {notice}");
    }
    let mut rows = Vec::new();
    for sizes in &sizes {
        for &kind in &args.io {
            for &depth in &args.depth {
                rows.push(measure(&files, size, sizes, kind, depth, seconds)?);
                if !args.json {
                    print_row(rows.len() == 1, &rows[rows.len() - 1]);
                }
            }
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    }
    Ok(())
}

/// Reads of `sizes` from `file`, so many at a time: 10^6 bytes per second, and microseconds from submission to completion in
/// the middle.
///
/// # Errors
/// When it cannot be read, or is too small.
pub fn quick(file: &ModelFile, sizes: &[u64], depth: usize, seconds: Duration) -> anyhow::Result<(f64, f64)> {
    let files = Arc::new(Files::open(std::slice::from_ref(file), true)?);
    if let Some(notice) = files.notice() {
        eprintln!("les: {notice}");
    }
    let row = measure(&files, file.size, sizes, EngineKind::default(), depth, seconds)?;
    Ok((row.mb_per_s, row.p50_us as f64))
}

/// The sizes in which a model's experts are read; of another file, the size of a part of an expert of a common model.
fn request_sizes(path: &Path) -> Vec<u64> {
    let sizes = Index::open(path).map(|index| expert_sizes(&index)).unwrap_or_default();
    if sizes.is_empty() { vec![576 << 10] } else { sizes }
}

/// The sizes of the parts of a model's experts, each once, from the smallest.
pub fn expert_sizes(index: &Index) -> Vec<u64> {
    let of = |t: &ExpertTensor| (0..t.n_expert()).map(|e| t.bytes_of(e)).collect::<Vec<_>>();
    let mut sizes: Vec<u64> = index.tensors.iter().flat_map(of).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn each_alone(sizes: &[u64]) -> Vec<Vec<u64>> {
    sizes.iter().map(|&size| vec![size]).collect()
}

fn parse_size(text: &str) -> Result<u64, &'static str> {
    let size = options::parse_bytes(text, "").filter(|&size| size > 0);
    size.ok_or("use a number of bytes, such as 589824, 576K or 1M")
}

/// A run of reads: which slots are free, and since when the others are being filled.
struct Load<'a> {
    engine: &'a dyn Engine,
    align: usize,
    file_size: u64,
    sizes: &'a [u64],
    slot: usize,
    free: Vec<usize>,
    flying: HashMap<u64, (Instant, Read)>,
    done: Vec<Completion>,
    random: Rng,
    token: u64,
}

fn measure(
    files: &Arc<Files>,
    file_size: u64,
    sizes: &[u64],
    kind: EngineKind,
    depth: usize,
    seconds: Duration,
) -> anyhow::Result<Row> {
    let align = files.align();
    let largest = sizes.iter().copied().max().unwrap_or(0);
    // what is read: whole aligned blocks
    let slot = usize::try_from(largest)?.checked_next_multiple_of(align).context("--size is out of range")?;
    ensure!(file_size / 2 >= slot as u64, "the file is smaller than two reads of {slot} bytes");
    let bytes = slot.checked_mul(depth).context("--size times --depth is out of range")?;
    let arena = Arc::new(Arena::new(bytes)?);
    let opened = les::io::open(kind, Arc::clone(files), arena, depth, fault_plan()?)?;
    if let Some(notice) = opened.notice {
        eprintln!("les: {notice}");
    }
    let mut load = Load {
        engine: &*opened.engine,
        align,
        file_size,
        sizes,
        slot,
        free: (0..depth).collect(),
        flying: HashMap::new(),
        done: Vec::new(),
        // other places in every run: a device, or the host of a virtual one, may remember the last ones
        random: Rng::new(),
        token: 0,
    };
    // Once around, so that the slots' memory is there.
    load.submit(Instant::now());
    while !load.flying.is_empty() {
        load.reap(|_, _| ())?;
    }
    let (mut took, mut bytes, cpu, begin) = (Vec::new(), 0, cpu_seconds(), Instant::now());
    while begin.elapsed() < seconds {
        load.submit(Instant::now());
        load.reap(|latency, read| {
            took.push(latency);
            bytes += read.len;
        })?;
    }
    let elapsed = begin.elapsed().as_secs_f64();
    let cpu = cpu_seconds().zip(cpu).map(|(now, then)| now - then);
    took.sort_unstable();
    let percentile =
        |p: usize| took.get(took.len() * p / 100).map_or(0, |t| t.as_micros().try_into().unwrap_or(u64::MAX));
    Ok(Row {
        engine: opened.engine.name().to_owned(),
        direct: files.direct(0),
        sizes: sizes.to_vec(),
        depth,
        mb_per_s: bytes as f64 / elapsed / 1e6,
        reads_per_s: took.len() as f64 / elapsed,
        p50_us: percentile(50),
        p99_us: percentile(99),
        cpu_s_per_gb: cpu.map(|cpu| cpu / (bytes as f64 / 1e9)),
    })
}

impl Load<'_> {
    /// Fills every free slot.
    fn submit(&mut self, now: Instant) {
        let mut reads = Vec::with_capacity(self.free.len());
        while let Some(slot) = self.free.pop() {
            let size = self.sizes[self.random.usize(..self.sizes.len())];
            let len = (size as usize).next_multiple_of(self.align);
            let places = (self.file_size - len as u64) / self.align as u64;
            let offset = self.random.u64(..=places) * self.align as u64;
            let read = Read { token: self.token, file: 0, offset, len, need: len, buf: slot * self.slot, check: None };
            self.flying.insert(self.token, (now, read));
            self.token += 1;
            reads.push(read);
        }
        self.engine.submit(&reads);
    }

    /// Waits for at least one read.
    fn reap(&mut self, mut ended: impl FnMut(Duration, &Read)) -> anyhow::Result<()> {
        self.engine.reap(STALLED, &mut self.done);
        let now = Instant::now();
        if self.done.is_empty() {
            bail!("no read has completed for {} s; the device does not answer", STALLED.as_secs());
        }
        for Completion { token, result } in self.done.drain(..) {
            let (since, read) = self.flying.remove(&token).context("a read has completed twice")?;
            result.with_context(|| format!("reading {} bytes at {}", read.len, read.offset))?;
            self.free.push(read.buf / self.slot);
            ended(now - since, &read);
        }
        Ok(())
    }
}

fn print_row(first: bool, row: &Row) {
    if first {
        println!(
            "{:>9} {:6} {:>5} {:>9} {:>9} {:>9} {:>9} {:>10}",
            "KiB", "engine", "depth", "MB/s", "reads/s", "p50 us", "p99 us", "CPU s/GB"
        );
    }
    let kib = match row.sizes[..] {
        [size] => format!("{:.0}", size as f64 / 1024.0),
        _ => "mixed".to_owned(),
    };
    println!(
        "{kib:>9} {:6} {:>5} {:>9.0} {:>9.0} {:>9} {:>9} {:>10}",
        row.engine,
        row.depth,
        row.mb_per_s,
        row.reads_per_s,
        row.p50_us,
        row.p99_us,
        row.cpu_s_per_gb.map_or("-".to_owned(), |cpu| format!("{cpu:.3}"))
    );
}

/// Processor time that this process has used so far, user and system.
fn cpu_seconds() -> Option<f64> {
    // The kernel reports hundredths of a second there, whatever it counts in itself.
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / 100.0)
}
