#!/usr/bin/env python3
"""Measure ggml-les on the yardstick model, in pairs: generation and prompt speed under memory caps, and with everything
in memory.

    python3 tests/bench/bench.py MODEL.gguf [--runs N] [--caps 3072,12288] [--tokens N]
    python3 tests/bench/bench.py MODEL.gguf --lookahead [--warm N] [--rate MIB | --ram]
    python3 tests/bench/bench.py MODEL.gguf --against PACKED.gguf [--against SMALLER.gguf]
    python3 tests/bench/bench.py MODEL.gguf --beside MIB
    python3 tests/bench/bench.py MODEL.gguf --speculation [--right 0.6,0.95]

Needs the programs in build/bin (and build/stock/bin/llama-bench for the comparison with stock), root and memory control
groups for the caps. The cases are run in turn, N times each; medians with the least and the largest are printed. Run it
on a machine that does nothing else.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import tempfile

import against
import beside
import lookahead
import speculation
from runs import ROOT, generate, into_page_cache, show

# pairs that are left out: until they are over not every expert has been used
WARM_UP = 10


class Bench:
    """A llama-bench that is stopped between its repetitions, so that two of them take turns within seconds: on a machine
    whose speed drifts, programs that run one after the other cannot be compared to within some percent."""

    def __init__(self, args, command, out):
        self.args, self.out, self.log, self.seen = args, out, b"", 0
        # a file: a pipe that nobody reads would stop the program where it should go on
        self.process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.PIPE)
        # nothing runs outside of its turn, not even the loading
        self.stop()

    def stop(self):
        """Has it stop, and waits until it has, or has ended."""
        self.process.send_signal(signal.SIGSTOP)
        if self.process.returncode is None:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def turn(self):
        """Ends the repetition it was stopped in, whose time means nothing, and does a whole one. False at the end."""
        if self.begun() > 0:
            raise SystemExit(f"{self.process.args[0]}: its repetitions are too short to take turns")
        self.process.send_signal(signal.SIGCONT)
        while self.begun() < 2:
            if not self.read():
                self.ended()
                return False
        self.stop()
        # what it said before it stopped
        while select.select([self.process.stderr], [], [], 0)[0] and self.read():
            pass
        self.seen += 2
        return True

    def read(self):
        more = os.read(self.process.stderr.fileno(), 1 << 16)
        self.log += more
        return more

    def begun(self):
        """The repetitions that it has begun since the last turn."""
        return len(re.findall(rb" run \d+/\d+\n", self.log)) - self.seen

    def ended(self):
        if self.process.wait() != 0:
            raise SystemExit(f"{' '.join(self.process.args)}\n{self.log.decode(errors='replace')[-3000:]}\n"
                             f"exit code {self.process.returncode}")

    def speeds(self):
        """Of the whole repetitions (every other one), per test, the last args.runs."""
        self.out.seek(0)
        tests = [test["samples_ts"] for test in json.load(self.out)]
        whole = [samples[::2][WARM_UP:] for samples in tests]
        if any(len(samples) != self.args.runs for samples in whole):
            raise SystemExit(f"{self.process.args[0]}: {[len(s) for s in tests]} repetitions, "
                             f"where {2 * (self.args.runs + WARM_UP)} were asked for")
        return whole

    def close(self):
        """Leaves no process behind, not even a stopped one."""
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


def in_turns(args, commands):
    """What llama-benches that take turns measure: per program, per test, the speeds."""
    with contextlib.ExitStack() as stack:
        benches = []
        for command in commands:
            benches.append(Bench(args, command, stack.enter_context(tempfile.TemporaryFile())))
            stack.callback(benches[-1].close)
        while any([bench.turn() for bench in benches]):
            pass
        return [bench.speeds() for bench in benches]


def pairs(args):
    """llama-bench with every expert cached against stock's, prompt and generation: the ratios, pair by pair. The first
    repetitions fill the cache and are left out."""
    usual = ["-m", args.model, "-t", args.threads, "--repack", "0", "-p", 256, "-n", 32,
             "-r", 2 * (args.runs + WARM_UP), "-o", "json", "--progress"]
    stock, les = in_turns(args, [[ROOT / "build/stock/bin/llama-bench", *usual],
                                 [args.bin / "llama-bench", *usual, "--les", "on", "--les-cache", "100%"]])
    for name, a, b in zip(("prompt", "decode"), stock, les):
        show(f"{name}, everything cached, both with --repack 0",
             [{"stock tok/s": x, "les tok/s": y, "les/stock": y / x} for x, y in zip(a, b)])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--runs", type=int, default=5)
    ap.add_argument("--caps", help="memory caps in MiB, separated by commas (3072,12288; with --lookahead and --speculation also 6144; with --against 3072,6144)")
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/bin")
    ap.add_argument("--pairs", action="store_true",
                    help="only compare llama-bench with all experts cached with stock's (build/stock/bin/llama-bench)")
    ap.add_argument("--no-resident", action="store_true", help="leave out the cases that need memory for the whole model")
    lookahead.add_arguments(ap)
    against.add_arguments(ap)
    beside.add_arguments(ap)
    speculation.add_arguments(ap)
    args = ap.parse_args()
    if args.pairs:
        pairs(args)
        return
    if args.beside:
        lookahead.check(ap, args)
        beside.bench(args)
        return
    if args.lookahead:
        lookahead.bench(ap, args)
        return
    if args.against:
        lookahead.check(ap, args)
        against.bench(args)
        return
    if args.speculation:
        speculation.bench(ap, args)
        return
    # name: cap in MiB, flags, whether the model is read into the page cache before
    cases = {f"streamed, cap {cap} MiB": (int(cap), ["--les", "on"], False) for cap in (args.caps or "3072,12288").split(",") if cap}
    if not args.no_resident:
        cases["stock way, everything in the page cache: --les off --no-repack, no cap"] = \
            (0, ["--les", "off", "--no-repack", "-lm", "mmap"], True)
        cases["everything cached: --les on --les-cache 100% --no-repack"] = \
            (0, ["--les", "on", "--les-cache", "100%", "--no-repack"], False)
    rows = {name: [] for name in cases}
    for run in range(args.runs):
        for name, (cap, extra, cached) in cases.items():
            if cached:
                into_page_cache(args.model)
            rows[name].append(generate(args, cap, extra))
            print(f"run {run + 1}/{args.runs}: {name}: {rows[name][-1].get('decode tok/s', 0):.2f} tok/s", flush=True)
    for name in cases:
        show(name, rows[name])


if __name__ == "__main__":
    main()
