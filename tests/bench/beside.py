"""What reading takes from computing, whoever reads and whenever: the mode --beside of bench.py.

Each round has a run with everything in the page cache alone, and one while another process reads at a given rate; which
comes first changes from round to round.
"""
import contextlib
import os
import subprocess

import lookahead
from runs import show


def add_arguments(ap):
    ap.add_argument("--beside", type=int, metavar="MIB",
                    help="what a token takes to compute with everything in memory, alone and while another process reads so "
                         "many MiB per second")


@contextlib.contextmanager
def reader(args):
    """Reads the model's experts at the rate, past the page cache, until it is not wanted any more."""
    command = [str(args.bin / "les"), "bench", str(args.model), "--io", args.io, "--depth", "8", "--seconds", "80000"]
    process = subprocess.Popen(command, env={**os.environ, "LES_FAULT": f"rate@{args.beside}"}, stdout=subprocess.DEVNULL)
    try:
        yield process
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)}\nexit code {process.returncode}")
    finally:
        process.kill()
        process.wait()


def bench(args):
    """The mode."""
    rows = []
    for n in range(args.runs):
        row = {}
        for reading in (False, True) if n % 2 == 0 else (True, False):
            with reader(args) if reading else contextlib.nullcontext():
                row["ms while reading" if reading else "ms alone"] = lookahead.resident(args)
        rows.append({**row, "more": row["ms while reading"] / row["ms alone"]})
        print(f"round {n + 1}/{args.runs}: " + ", ".join(f"{key} {value:.3f}" for key, value in rows[-1].items()), flush=True)
    show(f"computing, and {args.beside} MiB per second being read", rows)
