"""Files of one model against each other, as llama.cpp wrote it and as `les pack` did: the mode --against of bench.py.

In every round, for every cap, each file has a run; where a round begins changes from round to round. What is shown is of
the rounds, each compared within itself.
"""
import argparse
import json
import pathlib

import lookahead
from runs import MIB, show


def add_arguments(ap):
    ap.add_argument("--against", action="append", type=pathlib.Path, metavar="FILE",
                    help="compare MODEL with this one under the caps; may be given again")


def compare(rows):
    """The figures of one round under one cap: rows[0] is the model's, the others are those it is compared with."""
    own = rows[0]
    line = {}
    for n, row in enumerate(rows):
        name = f"file {n}" if n else "model"
        line |= {f"tok/s {name}": 1e3 / row["token_ms"], f"ms {name}": row["token_ms"], f"MiB/token {name}": row["bytes"] / MIB,
                 f"hit % {name}": 100 * row["hit"], f"wait ms {name}": row["wait_ms"], f"ask CPU ms {name}": row["ask_cpu_ms"]}
        if n:
            line[f"speed of {name} / model"] = own["token_ms"] / row["token_ms"]
            line[f"bytes of {name} / model"] = row["bytes"] / own["bytes"] if own["bytes"] else float("nan")
    return line


def bench(args):
    """The mode."""
    files = [pathlib.Path(args.model), *args.against]
    caps = [int(cap) for cap in (args.caps or "3072,6144").split(",")]
    rounds = {cap: [] for cap in caps}
    for n in range(args.runs):
        for cap in caps:
            rows = [None] * len(files)
            for i in range(len(files)):
                at = (n + i) % len(files)
                rows[at] = lookahead.stream(argparse.Namespace(**{**vars(args), "model": files[at]}), cap, "on")
            rounds[cap].append(rows)
            line = compare(rows)
            print(f"round {n + 1}/{args.runs}, cap {cap} MiB: "
                  + ", ".join(f"{key} {line[key]:.3f}" for key in line if "tok/s" in key or " / " in key), flush=True)
        if args.json:
            args.json.write_text(json.dumps({"files": [f.name for f in files], "rounds": rounds}, indent=1) + "\n")
    for n, file in enumerate(files):
        print(f"{f'file {n}' if n else 'model'}: {file.name}, {file.stat().st_size // MIB} MiB")
    for cap in caps:
        show(f"cap {cap} MiB", [compare(rows) for rows in rounds[cap]])
