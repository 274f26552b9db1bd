#!/usr/bin/env python3
"""Measure ggml-les on the yardstick model, in pairs: generation and prompt speed under memory caps, and with everything
in memory.

    python3 tests/bench/bench.py MODEL.gguf [--runs N] [--caps 3072,12288] [--tokens N]

Needs the programs in build/bin (and build/stock/bin/llama-bench for the comparison with stock), root and memory control
groups for the caps. The cases are run in turn, N times each; medians with the least and the largest are printed. Run it
on a machine that does nothing else.
"""
import argparse
import json
import pathlib
import re
import signal
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = ("A cache holds what was used before because it may be used again; the art lies in knowing which of the things "
          "that it holds will be wanted first, and which never.")
# other sampling falls into loops that no text has
SAMPLING = ["--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-s", "1", "--ignore-eos"]


# pairs that are left out: until they are over not every expert has been used
WARM_UP = 10


def generate(args, cap, extra):
    """One run of llama-completion; what it says of itself."""
    with tempfile.NamedTemporaryFile(suffix=".json") as stats:
        command = [str(args.bin / "llama-completion"), "-m", args.model, "-t", str(args.threads), "-c", "1024", "-no-cnv",
                   "-p", PROMPT, "-n", str(args.tokens), *SAMPLING, *extra]
        if "off" not in extra:
            command += ["--les-stats", stats.name]
        if cap:
            command = ["bash", str(ROOT / "tests/bench/capped.sh"), str(cap), *command]
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        row = {"seconds": time.monotonic() - began}
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\nexit code {done.returncode}")
        for key, pattern in (("prompt tok/s", r"prompt eval time.*?([\d.]+) tokens per second"),
                             ("decode tok/s", r" eval time =.*runs.*?([\d.]+) tokens per second"),
                             ("load s", r"load time =\s*([\d.]+) ms"),
                             ("peak MiB", r"capped: .*peak (\d+) MiB")):
            found = re.search(pattern, done.stdout)
            if found:
                row[key] = float(found.group(1)) / (1000 if key == "load s" else 1)
        try:
            s = json.load(open(stats.name))
        except ValueError:
            return row
        d = s["decode"]
        row["hit %"] = 100 * d["hits"] / max(d["requests"], 1)
        row["MiB/token"] = d["bytes_read"] / max(d["tokens"], 1) / 2**20
        row["wait ms/token"] = d["wait_ns"] / max(d["tokens"], 1) / 1e6
        row["cache MiB"] = s["cache_bytes"] / 2**20
        return row


class Bench:
    """A llama-bench that is stopped between its repetitions, so that two of them take turns within seconds: on a machine
    whose speed drifts, programs that run one after the other cannot be compared to within some percent."""

    def __init__(self, args, exe, extra):
        command = [str(exe), "-m", args.model, "-t", str(args.threads), "--repack", "0", "-p", "256", "-n", "32",
                   "-r", str(2 * (args.runs + WARM_UP)), "-o", "json", "--progress", *extra]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def turn(self):
        """Ends the repetition it was stopped in, whose time means nothing, and does a whole one. False at the end."""
        self.process.send_signal(signal.SIGCONT)
        begun = 0
        for line in self.process.stderr:
            begun += re.search(r" run \d+/\d+$", line.rstrip()) is not None
            if begun == 2:
                self.process.send_signal(signal.SIGSTOP)
                return True
        return False

    def speeds(self):
        """Of the whole repetitions (every other one), per test, the last args.runs."""
        out = json.loads(self.process.stdout.read())
        if self.process.wait() != 0:
            raise SystemExit(f"{self.process.args}: exit code {self.process.returncode}")
        return [test["samples_ts"][::2][WARM_UP:] for test in out]


def pairs(args):
    """llama-bench with every expert cached against stock's, prompt and generation: the ratios, pair by pair. The first
    repetitions fill the cache and are left out."""
    both = [Bench(args, ROOT / "build/stock/bin/llama-bench", []),
            Bench(args, args.bin / "llama-bench", ["--les", "on", "--les-cache", "100%"])]
    while any([bench.turn() for bench in both]):
        pass
    stock, les = (bench.speeds() for bench in both)
    for name, a, b in zip(("prompt", "decode"), stock, les):
        show(f"{name}, everything cached, both with --repack 0",
             [{"stock tok/s": x, "les tok/s": y, "les/stock": y / x} for x, y in zip(a, b)])


def show(name, rows):
    print(f"\n{name}")
    for key in rows[0]:
        values = [r[key] for r in rows if key in r]
        print(f"  {key:14} {statistics.median(values):10.3f}   ({min(values):.3f} .. {max(values):.3f})")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--runs", type=int, default=5)
    ap.add_argument("--caps", default="3072,12288", help="memory caps in MiB, separated by commas")
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/bin")
    ap.add_argument("--pairs", action="store_true",
                    help="only compare llama-bench with all experts cached with stock's (build/stock/bin/llama-bench)")
    ap.add_argument("--no-resident", action="store_true", help="leave out the cases that need memory for the whole model")
    args = ap.parse_args()
    if args.pairs:
        pairs(args)
        return
    cases = {f"streamed, cap {cap} MiB": (int(cap), ["--les", "on"]) for cap in args.caps.split(",") if cap}
    if not args.no_resident:
        cases["stock way: --les off --no-repack, no cap"] = (0, ["--les", "off", "--no-repack", "-lm", "mmap"])
        cases["everything cached: --les on --les-cache 100% --no-repack"] = \
            (0, ["--les", "on", "--les-cache", "100%", "--no-repack"])
    rows = {name: [] for name in cases}
    for run in range(args.runs):
        for name, (cap, extra) in cases.items():
            rows[name].append(generate(args, cap, extra))
            print(f"run {run + 1}/{args.runs}: {name}: {rows[name][-1].get('decode tok/s', 0):.2f} tok/s", flush=True)
    for name in cases:
        show(name, rows[name])


if __name__ == "__main__":
    main()
