"""One run of a program, and what it says of itself. See bench.py."""
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = ("A cache holds what was used before because it may be used again; the art lies in knowing which of the things "
          "that it holds will be wanted first, and which never.")
# other sampling falls into loops that no text has
SAMPLING = ["--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-s", "1", "--ignore-eos"]
# what the readers of the pread pool are called
READER = "les-read"
MIB = 2**20


def command_of(args, tokens, cap, extra):
    """llama-completion, under a cap in MiB unless that is 0."""
    # never less than the text takes
    context = max(1024, tokens + 256)
    command = [str(args.bin / "llama-completion"), "-m", str(args.model), "-t", str(args.threads), "-c", str(context),
               "-no-cnv", "-p", PROMPT, "-n", str(tokens), *SAMPLING, *extra]
    return ["bash", str(ROOT / "tests/bench/capped.sh"), str(cap), *command] if cap else command


def run(command, env=None, watch=None):
    """What it prints. `watch` is called with its process id now and then."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}) as process:
            while watch and process.poll() is None:
                watch(process.pid)
                time.sleep(0.25)
        out.seek(0)
        text = out.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{text[-3000:]}\nexit code {process.returncode}")
    return text


def perf(text):
    """What llama-completion and capped.sh print at the end."""
    row = {}
    for key, pattern in (("prompt tok/s", r"prompt eval time.*?([\d.]+) tokens per second"),
                         ("decode tok/s", r" eval time =.*runs.*?([\d.]+) tokens per second"),
                         ("load s", r"load time =\s*([\d.]+) ms"),
                         ("peak MiB", r"capped: .*peak (\d+) MiB")):
        found = re.search(pattern, text)
        if found:
            row[key] = float(found.group(1)) / (1000 if key == "load s" else 1)
    return row


def generate(args, cap, extra):
    """One run of llama-completion; what it says of itself."""
    with tempfile.NamedTemporaryFile(suffix=".json") as stats:
        if "off" not in extra:
            extra = [*extra, "--les-stats", stats.name]
        began = time.monotonic()
        text = run(command_of(args, args.tokens, cap, extra))
        row = {"seconds": time.monotonic() - began, **perf(text)}
        try:
            s = json.load(open(stats.name))
        except ValueError:
            return row
        d = s["decode"]
        row["hit %"] = 100 * d["hits"] / max(d["requests"], 1)
        row["MiB/token"] = d["bytes_read"] / max(d["tokens"], 1) / MIB
        row["wait ms/token"] = d["wait_ns"] / max(d["tokens"], 1) / 1e6
        row["cache MiB"] = s["cache_bytes"] / MIB
        return row


def show(name, rows):
    """Of each key of the rows: the median, the least, the largest and the quartiles."""
    print(f"\n{name}")
    for key in rows[0]:
        values = [r[key] for r in rows if key in r]
        line = f"  {key:20} {statistics.median(values):10.3f}   ({min(values):.3f} .. {max(values):.3f})"
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            line += f"   quartiles {low:.3f} .. {high:.3f}"
        print(line)


def into_page_cache(path):
    """A capped run before, and les's reads, leave none of the model there."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 22)
        while file.readinto(buffer):
            pass


class Readers:
    """The processor time of the pool of readers: looked at now and then, as nothing is left of a thread that has ended."""

    def __init__(self, proc=pathlib.Path("/proc")):
        self.proc, self.seconds = proc, 0.0

    def __call__(self, pid):
        self.seconds = max(self.seconds, self.of(pid))

    def of(self, pid):
        """Of a process and those that it has started."""
        seconds = 0.0
        try:
            for task in (self.proc / str(pid) / "task").iterdir():
                name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
                if name.startswith(READER):
                    user, system = fields.split()[11:13]
                    seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
                seconds += sum(self.of(child) for child in (task / "children").read_text().split())
        except OSError:
            pass  # it has just ended
        return seconds
