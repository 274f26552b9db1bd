"""What speculation is worth, without a drafter for the model: the mode --speculation of bench.py.

replay.cpp generates a text that it has recorded, with a drafter that knows it and is wrong with a set probability. In one
run the ways of choosing how many tokens to verify take turns, some tokens each; the first turn of each is left out, in which
the adaptive way has more tokens than the others, to learn, and each of the other turns is compared with the others' of the same round. Speeds are of the tokens to be expected of the steps that
were taken: which of them stood is luck, and would take thousands of tokens to even out.
"""
import json
import pathlib
import statistics
import sys
import tempfile

from runs import MIB, ROOT, run, show

sys.path.insert(0, str(ROOT / "tests/seam"))

WAYS = ["off", "1", "3", "7", "adaptive"]
# of the adaptive way's first turn
LEARNING = 96
# by so many tokens a turn may be longer: it ends with what stands of its last draft
MORE = 8


def add_arguments(ap):
    ap.add_argument("--speculation", action="store_true",
                    help="compare numbers of tokens to verify, with a drafter that is right as often as --right says")
    ap.add_argument("--right", default="0.3,0.6,0.8,0.95", help="with --speculation: how often (default: %(default)s)")
    ap.add_argument("--ways", default=",".join(WAYS), help="with --speculation: those to compare, off and adaptive among them (default: %(default)s)")
    ap.add_argument("--turn", type=int, default=16, metavar="N", help="with --speculation: tokens of a turn (default: %(default)s)")
    ap.add_argument("--text", type=pathlib.Path, help="with --speculation: where the recorded text is, or is written")


def check(ap, args):
    args.ways = args.ways.split(",")
    if not {"off", "adaptive"} <= set(args.ways) or len(set(args.ways)) < len(args.ways):
        ap.error("--ways takes off, adaptive and numbers of tokens, each once")
    if args.turn < 1 or args.runs < 1:
        ap.error("--speculation needs at least one token and one run")


def rounds_of(lines, n_ways):
    """Turn by turn, what each way did: the rounds in which all had theirs, but for the first one."""
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    rounds = [rows[i : i + n_ways] for i in range(0, len(rows) - n_ways + 1, n_ways)]
    return [{row["width"]: row for row in found} for found in rounds[1:]]


def speed(row):
    return row["expected"] / row["seconds"]


def best_fixed(rounds):
    """The number of tokens that was the fastest, by the median over rounds."""
    return max((way for way in rounds[0] if way != "adaptive"), key=lambda way: statistics.median(speed(found[way]) for found in rounds))


def compare(found, best, bytes_per_read):
    """The figures of one round."""
    line = {f"tok/s {way}": speed(row) for way, row in found.items()}
    line["adaptive / off"] = speed(found["adaptive"]) / speed(found["off"])
    line[f"adaptive / best fixed ({best})"] = speed(found["adaptive"]) / speed(found[best])
    for way in dict.fromkeys(("off", best, "adaptive")):
        row = found[way]
        line[f"tokens/step {way}"] = row["expected"] / row["steps"]
        line[f"verified/step {way}"] = row["verified"] / row["steps"]
        line[f"MiB/token {way}"] = row["bytes_read"] / row["tokens"] / MIB
    row = found["adaptive"]
    line["evicted for drafts, % of reads, adaptive"] = 100 * row["evictions_for_drafts"] * bytes_per_read / max(row["bytes_read"], 1)
    return line


def program():
    import harness

    return harness.PATCHED.program("replay", [ROOT / "tests/bench/replay.cpp"], ["llama-common"],
                                   ["common", "vendor", ROOT / "ggml-patch", ROOT / "include"])


def bench(ap, args):
    """The mode."""
    check(ap, args)
    exe = program()
    caps = [int(cap) for cap in (args.caps or "3072,6144,12288").split(",")]
    length = LEARNING + ((args.runs + 1) * len(args.ways) + 1) * (args.turn + MORE)
    base = [exe, "-m", args.model, "-t", args.threads, "-c", length + 64, "--les", "on"]
    with tempfile.TemporaryDirectory() as directory:
        text = args.text or pathlib.Path(directory) / "text"
        if not text.exists():
            run([str(c) for c in [*base, "--record", text, "-n", length]])
        for cap in caps:
            for right in args.right.split(","):
                command = [*base, "--replay", text, "--right", right, "--segment", args.turn, "--learning", LEARNING,
                           "--rounds", args.runs + 1, "--widths", ",".join(args.ways)]
                command = [str(c) for c in ["bash", ROOT / "tests/bench/capped.sh", cap, *command]]
                with tempfile.NamedTemporaryFile(suffix=".json") as stats:
                    said = run([*command, "--les-stats", stats.name])
                    counters = json.loads(pathlib.Path(stats.name).read_text())
                reads = counters["demand_reads"] + counters["guessed"]
                per_read = (counters["decode"]["bytes_read"] + counters["prompt"]["bytes_read"]) / reads
                rounds = rounds_of(said.splitlines(), len(args.ways))[: args.runs]
                best = best_fixed(rounds)
                show(f"cap {cap} MiB, right {right}", [compare(found, best, per_read) for found in rounds])
                counters["evictions_for_rejected"] = counters["evictions_for_drafts"] - counters["evictions_for_accepted"]
                for name in ("draft_reads", "draft_reads_rejected", "evictions_for_drafts", "evictions_for_rejected"):
                    print(f"  {name:22} {100 * counters[name] / reads:8.3f} % of {reads} reads", flush=True)
