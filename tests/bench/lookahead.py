"""What looking ahead is worth, and how near a token comes to the larger of what it takes to compute and to read it: the
mode --lookahead of bench.py.

In every round, for every cap: the device, a run with lookahead and one without, the device between and after them; the
order of the two changes from round to round. What is shown is of the rounds, each compared within itself.
"""
import contextlib
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile

from runs import MIB, Readers, command_of, into_page_cache, perf, run, show

RAM_DISK = pathlib.Path("/dev/shm")
WAYS = {"off": ["--les-lookahead", "0"], "on": []}


def add_arguments(ap):
    group = ap.add_argument_group("lookahead")
    group.add_argument("--lookahead", action="store_true",
                       help="compare lookahead on and off, and with what computing and reading take by themselves")
    group.add_argument("--warm", type=int, default=0, metavar="N",
                       help="generate N tokens more, a power of two, that are not counted: the cache fills")
    group.add_argument("--compute", type=float, metavar="MS", help="what a token takes to compute, instead of measuring it")
    group.add_argument("--io", default="auto", choices=["auto", "uring", "pread"], help="the I/O engine")
    group.add_argument("--depth", type=int, default=16, help="reads in flight, of the engine and of what it is compared with")
    group.add_argument("--device-seconds", type=float, default=2, metavar="S", help="how long the device is measured each time")
    group.add_argument("--rate", type=int, metavar="MIB", help="a slower device: MiB per second")
    group.add_argument("--ram", action="store_true", help=f"a faster device: a copy of the model in {RAM_DISK}")
    group.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all rounds and their summary")


def check(ap, args):
    if args.warm < 0 or args.warm & (args.warm - 1):
        ap.error("--warm takes a power of two: the library marks its counters then")
    if args.tokens < 2 or args.runs < 1:
        ap.error("--lookahead needs at least two tokens and one run")
    if args.rate is not None and args.rate < 1:
        ap.error("--rate takes MiB per second, at least 1")


def since(stats, warm):
    """What the counters say of the tokens after the first `warm`."""
    def flat(s):
        return {**s["decode"], **{key: s[key] for key in ("decode_ns", "decode_steps", "guessed", "guessed_in_time",
                                                          "guessed_late", "guessed_wasted")}}
    end = flat(stats)
    if warm == 0:
        return end
    marks = [flat(mark) for mark in stats.get("marks", []) if mark["decode"]["tokens"] == warm]
    if not marks or end["decode_steps"] <= marks[0]["decode_steps"]:
        raise SystemExit(f"--warm {warm}: the statistics of {end['tokens']} tokens have no mark there")
    return {key: end[key] - marks[0][key] for key in end}


def decode_ms(text):
    """Per token, by llama-completion's clock."""
    found = re.search(r" eval time =\s*([\d.]+) ms /\s*(\d+) runs", text)
    if not found:
        raise SystemExit(f"llama-completion has not said how long a token took\n{text[-3000:]}")
    return float(found.group(1)) / int(found.group(2))


def sampling_ms(text):
    """Per token, by llama-completion's clock: it is not part of its time per token, but of the library's."""
    tokens = re.search(r" eval time =\s*[\d.]+ ms /\s*(\d+) runs", text)
    spent = re.search(r"sampling time =\s*([\d.]+) ms", text)
    return float(spent.group(1)) / (int(tokens.group(1)) + 1) if tokens and spent else 0.0


def figures(text, stats, warm, reader_s=0.0):
    """One run that streamed, per token: times in ms, bytes; `text` is what llama-completion printed."""
    d = since(stats, warm)
    tokens = max(d["tokens"], 1)
    # over all tokens the program's own clock counts; of some of them only the library's tells
    token_ms = decode_ms(text) if warm == 0 else d["decode_ns"] / d["decode_steps"] / 1e6 - sampling_ms(text)
    all_bytes = stats["decode"]["bytes_read"] + stats["prompt"]["bytes_read"]
    row = {"token_ms": token_ms, "bytes": d["bytes_read"] / tokens, "hit": d["hits"] / max(d["requests"], 1),
           "reader_ms": 1e3 * reader_s * (d["bytes_read"] / tokens) / max(all_bytes, 1),
           "cache_bytes": stats["cache_bytes"], "engine": stats["engine"]}
    for key in ("wait", "ask", "guess", "ask_cpu"):
        row[f"{key}_ms"] = d[f"{key}_ns"] / tokens / 1e6
    for key in ("guessed", "guessed_in_time", "guessed_late", "guessed_wasted"):
        row[key] = d[key] / tokens
    return {**row, **{key: value for key, value in perf(text).items() if key in ("peak MiB", "decode tok/s")}}


def stream(args, cap, way):
    """One run of llama-completion under a cap."""
    env = {"LES_FAULT": f"rate@{args.rate}"} if args.rate else {}
    readers = Readers()
    with tempfile.NamedTemporaryFile(suffix=".json") as stats:
        # the pass that warms up is counted as a token
        flags = ["--les", "on", "--no-warmup", "--les-io", args.io, "--les-io-depth", str(args.depth),
                 "--les-stats", stats.name, *WAYS[way]]
        text = run(command_of(args, args.warm + args.tokens, cap, flags), env, readers)
        return figures(text, json.loads(pathlib.Path(stats.name).read_text()), args.warm, readers.seconds)


def resident(args):
    """What a token takes with everything in the page cache, in ms."""
    into_page_cache(args.model)
    flags = ["--les", "off", "--no-repack", "-lm", "mmap"]
    return decode_ms(run(command_of(args, args.warm + args.tokens, 0, flags)))


def device(args):
    """Bytes per second by depth, at the sizes of the model's reads."""
    command = [str(args.bin / "les"), "bench", str(args.model), "--json", "--io", args.io,
               "--depth", ",".join(map(str, sorted({8, args.depth}))), "--seconds", str(args.device_seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}\nexit code {done.returncode}")
    return {row["depth"]: row["mb_per_s"] * 1e6 for row in json.loads(done.stdout)}


def bandwidth(before, after, depth, rate):
    """Of a run that was between these two, in bytes per second; no more than an emulated device has."""
    measured = (before[depth] + after[depth]) / 2
    return min(measured, rate * MIB) if rate else measured


def pair(args, cap, round_):
    """A run without and one with lookahead, in the order of the round, and the device around each."""
    rows, before = {}, device(args)
    for way in ("off", "on") if round_ % 2 == 0 else ("on", "off"):
        row = stream(args, cap, way)
        after = device(args)
        row["bandwidth"] = bandwidth(before, after, args.depth, args.rate)
        row["bandwidth_8"] = bandwidth(before, after, 8, args.rate)
        rows[way], before = row, after
    return rows


def compare(rows, compute_ms):
    """The figures of one round under one cap."""
    off, on = rows["off"], rows["on"]
    io_ms = 1e3 * on["bytes"] / on["bandwidth"]
    line = {"T off ms": off["token_ms"], "T on ms": on["token_ms"], "T off / T on": off["token_ms"] / on["token_ms"],
            "T_io ms": io_ms}
    if compute_ms is None:
        line["T on / T_io"] = on["token_ms"] / io_ms if io_ms else float("inf")
    else:
        line["T_compute ms"] = compute_ms
        line["T on / larger"] = on["token_ms"] / max(io_ms, compute_ms)
    for way, row in rows.items():
        line |= {f"MiB/token {way}": row["bytes"] / MIB, f"hit % {way}": 100 * row["hit"], f"wait ms {way}": row["wait_ms"],
                 f"ask ms {way}": row["ask_ms"]}
    line |= {"guess ms on": on["guess_ms"], "ask % of T on": 100 * on["ask_ms"] / on["token_ms"],
             "ask CPU ms on": on["ask_cpu_ms"], "ask CPU % of T on": 100 * on["ask_cpu_ms"] / on["token_ms"],
             "guessed in time": on["guessed_in_time"], "guessed late": on["guessed_late"],
             "guessed wasted": on["guessed_wasted"], "MB/s": on["bandwidth"] / 1e6, "MB/s at depth 8": on["bandwidth_8"] / 1e6,
             "cache MiB": on["cache_bytes"] / MIB}
    if on["reader_ms"] or off["reader_ms"]:
        line |= {"readers' CPU ms off": off["reader_ms"], "readers' CPU ms on": on["reader_ms"]}
    if "peak MiB" in on:
        line["peak MiB"] = max(on["peak MiB"], off.get("peak MiB", 0))
    return line


def summary(lines):
    """Of the rounds under one cap: each figure's median, range and quartiles, and the ratio of the medians."""
    out = {}
    for key in lines[0]:
        values = [line[key] for line in lines if key in line]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        out[key] = {"median": statistics.median(values), "least": min(values), "largest": max(values), "quartiles": [low, high]}
    out["ratio of the medians of T"] = out["T off ms"]["median"] / out["T on ms"]["median"]
    return out


def results(args, caps, rounds):
    lines = {cap: [compare(r["caps"][cap], r["compute_ms"]) for r in rounds] for cap in caps}
    return lines, {
        "model": args.model_name, "tokens": args.tokens, "warm": args.warm, "threads": args.threads, "io": args.io,
        "depth": args.depth, "rate_mib": args.rate, "ram": args.ram, "rounds": rounds,
        "summary": {str(cap): summary(of_cap) for cap, of_cap in lines.items()},
    }


@contextlib.contextmanager
def on_ram_disk(model, most, disk=RAM_DISK, meminfo="/proc/meminfo"):
    """A copy of the model there, gone afterwards. `most`: bytes that a run beside it takes."""
    model = pathlib.Path(model)
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", model.name):
        raise SystemExit(f"{model}: --ram copies one file; join the shards with llama-gguf-split --merge")
    size, room = model.stat().st_size, shutil.disk_usage(disk).free
    smaller = "take a smaller model (yardstick.py --layers 8)"
    if room < size:
        raise SystemExit(f"{disk} has room for {room // MIB} MiB, and {model.name} takes {size // MIB}: {smaller}, "
                         f"or mount -o remount,size={size // MIB + 1}M {disk}")
    available = int(re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path(meminfo).read_text()).group(1)) * 1024
    # a run takes no more than another copy of the model
    if available < size + min(most, size):
        raise SystemExit(f"{available // MIB} MiB of memory are available, and {model.name} in {disk} and a run beside it take "
                         f"{(size + min(most, size)) // MIB}: {smaller}")
    with tempfile.TemporaryDirectory(dir=disk, prefix="les-bench-") as folder:
        yield shutil.copyfile(model, pathlib.Path(folder) / model.name)


def bench(ap, args):
    """The mode."""
    check(ap, args)
    caps = [int(cap) for cap in (args.caps or "3072,6144,12288").split(",")]
    args.model_name = pathlib.Path(args.model).name
    with contextlib.ExitStack() as stack:
        if args.ram:
            args.model = stack.enter_context(on_ram_disk(args.model, max(caps) * MIB))
        rounds = []
        for n in range(args.runs):
            compute_ms = args.compute
            if compute_ms is None and not args.no_resident:
                compute_ms = resident(args)
            rounds.append({"compute_ms": compute_ms, "caps": {}})
            for cap in caps:
                rows = rounds[n]["caps"][cap] = pair(args, cap, n)
                line = compare(rows, compute_ms)
                print(f"round {n + 1}/{args.runs}, cap {cap} MiB: " + ", ".join(
                    f"{key} {line[key]:.3f}" for key in line if key.startswith("T")), flush=True)
            lines, all_ = results(args, caps, rounds)
            if args.json:
                # after each round: a series that is cut short is not lost
                args.json.write_text(json.dumps(all_, indent=1) + "\n")
    for cap in caps:
        show(f"cap {cap} MiB", lines[cap])
        print(f"  {'ratio of medians':20} {all_['summary'][str(cap)]['ratio of the medians of T']:10.3f}")
