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
SEGMENT = 16
# of the adaptive way's first turn
LEARNING = 96
# a turn ends with what stands of its last draft
LONGEST = SEGMENT + 8


def add_arguments(ap):
    ap.add_argument("--speculation", action="store_true",
                    help="compare numbers of tokens to verify, with a drafter that is right as often as --right says")
    ap.add_argument("--right", default="0.3,0.6,0.8,0.95", help="with --speculation: how often (default: %(default)s)")
    ap.add_argument("--text", type=pathlib.Path, help="with --speculation: where the recorded text is, or is written")


def rounds_of(lines):
    """Turn by turn, what each way did: the rounds in which all had theirs, but for the first one."""
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    rounds = [rows[i : i + len(WAYS)] for i in range(0, len(rows) - len(WAYS) + 1, len(WAYS))]
    return [{row["width"]: row for row in found} for found in rounds[1:]]


def speed(row):
    return row["expected"] / row["seconds"]


def best_fixed(rounds):
    """The number of tokens that was the fastest, by the median over rounds."""
    return max(WAYS[:-1], key=lambda way: statistics.median(speed(found[way]) for found in rounds))


def compare(found, best, bytes_per_read):
    """The figures of one round."""
    line = {f"tok/s {way}": speed(row) for way, row in found.items()}
    line["adaptive / off"] = speed(found["adaptive"]) / speed(found["off"])
    line[f"adaptive / best fixed ({best})"] = speed(found["adaptive"]) / speed(found[best])
    for way in ("off", best, "adaptive"):
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


def bench(args):
    """The mode."""
    exe = program()
    caps = [int(cap) for cap in (args.caps or "3072,6144,12288").split(",")]
    length = LEARNING + (args.runs + 1) * len(WAYS) * LONGEST + LONGEST
    base = [exe, "-m", args.model, "-t", args.threads, "-c", length + 64, "--les", "on"]
    with tempfile.TemporaryDirectory() as directory:
        text = args.text or pathlib.Path(directory) / "text"
        if not text.exists():
            run([str(c) for c in [*base, "--record", text, "-n", length]])
        for cap in caps:
            for right in args.right.split(","):
                command = [*base, "--replay", text, "--right", right, "--segment", SEGMENT, "--learning", LEARNING,
                           "--rounds", args.runs + 1, "--widths", ",".join(WAYS)]
                command = [str(c) for c in ["bash", ROOT / "tests/bench/capped.sh", cap, *command]]
                with tempfile.NamedTemporaryFile(suffix=".json") as stats:
                    said = run([*command, "--les-stats", stats.name])
                    counters = json.loads(pathlib.Path(stats.name).read_text())
                reads = counters["demand_reads"] + counters["guessed"]
                per_read = (counters["decode"]["bytes_read"] + counters["prompt"]["bytes_read"]) / reads
                rounds = rounds_of(said.splitlines())[: args.runs]
                best = best_fixed(rounds)
                show(f"cap {cap} MiB, right {right}", [compare(found, best, per_read) for found in rounds])
                counters["evictions_for_rejected"] = counters["evictions_for_drafts"] - counters["evictions_for_accepted"]
                for name in ("draft_reads", "draft_reads_rejected", "evictions_for_drafts", "evictions_for_rejected"):
                    print(f"  {name:22} {100 * counters[name] / reads:8.3f} % of {reads} reads", flush=True)
