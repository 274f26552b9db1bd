"""What all tests of the seam share: the two builds, the driver, running it, comparing what it wrote.

Configuration (environment):
    LES_TEST_BUILD        the patched build                       (default: build)
    LES_TEST_SRC          its llama.cpp source                    (default: what its CMakeCache.txt says)
    LES_TEST_NOLES_BUILD  the patched source built without LES    (default: build/noles)
    LES_TEST_STOCK_SRC    stock llama.cpp, same commit            (default: build/llama.cpp-stock)
    LES_TEST_STOCK_BUILD  its build                               (default: build/stock)
    LES_TEST_MODEL        the small real MoE                      (default: tests/data/docmoe-53m-q4_k_m.gguf)
    LES_TEST_WORK         models, references, binaries            (default: build)
    LES_TEST_SELF=1       try the harness without a patched build: stock takes its place, and what only LES can do
                          is not asserted
"""

import array
import collections
import concurrent.futures
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SELF = os.environ.get("LES_TEST_SELF") == "1"
WORK = Path(os.environ.get("LES_TEST_WORK", ROOT / "build")).resolve()
JOBS = 2
TIMEOUT = 120


class Failed(AssertionError):
    """A test cannot go on; unittest reports it as a failure."""


class Tree:
    """A llama.cpp source together with a build of it."""

    def __init__(self, name, build, src=None):
        self.name = name
        self.build = Path(build).resolve()
        self.bin = self.build / "bin"
        self._src = src

    @property
    def src(self):
        if self._src is None:
            cache = self.cache_entries()
            self._src = cache.get("llama.cpp_SOURCE_DIR") or cache.get("CMAKE_HOME_DIRECTORY", "")
        src = Path(self._src).resolve()
        if not (src / "include/llama.h").is_file():
            raise Failed(f"{self.name}: no llama.cpp source in {src}")
        return src

    def cache_entries(self):
        path = self.build / "CMakeCache.txt"
        if not path.is_file():
            raise Failed(f"{self.name}: no build in {self.build}")
        found = re.findall(r"^([^#/\s][^:=]*):[A-Z]+=(.*)$", path.read_text(), re.M)
        return dict(found)

    def has(self, name):
        return (self.bin / name).is_file()

    def tool(self, name):
        path = self.bin / name
        if not self.has(name):
            raise Failed(f"{self.name}: {path} is missing, build the target {name}")
        return path

    def program(self, name, sources, libs, includes=()):
        """Compiles one of our own programs against this tree, once for each content of the sources."""
        if not (self.bin / "libllama.so").exists():
            raise Failed(f"{self.name}: no libllama.so in {self.bin}")
        digest = hashlib.sha256(f"{self.src} {self.bin}".encode())
        headers = [*HERE.glob("*.h"), *ROOT.glob("ggml-patch/*.h"), ROOT / "include/les.h",
                   self.src / "include/llama.h", self.src / "ggml/include/ggml.h"]
        for path in [*sources, *headers]:
            digest.update(Path(path).read_bytes())
        exe = WORK / "test-bin" / f"{name}-{digest.hexdigest()[:16]}"
        if not exe.exists():
            exe.parent.mkdir(parents=True, exist_ok=True)
            partial = exe.with_name(f"{exe.name}.{os.getpid()}.{threading.get_ident()}")
            cmd = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra"]
            cmd += [f"-I{self.src / d}" for d in ("include", "ggml/include", *includes)]
            cmd += [*map(str, sources), "-o", str(partial), f"-L{self.bin}", f"-Wl,-rpath,{self.bin}"]
            cmd += [*(f"-l{lib}" for lib in libs), "-lllama", "-lggml", "-lggml-base", "-pthread"]
            done = subprocess.run(cmd, capture_output=True, text=True)
            if done.returncode != 0:
                raise Failed(f"{' '.join(cmd)}\n{done.stderr}")
            partial.rename(exe)
        return exe

    def driver(self):
        return self.program("logits", [HERE / "logits.cpp"], [])

    def identity(self):
        """Changes whenever the libraries or the driver do."""
        stats = [(lib.name, lib.stat().st_size, lib.stat().st_mtime_ns) for lib in sorted(self.bin.glob("lib*.so"))]
        return f"{self.driver()} {stats}"


STOCK = Tree(
    "stock",
    os.environ.get("LES_TEST_STOCK_BUILD", ROOT / "build/stock"),
    os.environ.get("LES_TEST_STOCK_SRC", ROOT / "build/llama.cpp-stock"),
)
PATCHED = STOCK if SELF else Tree("patched", os.environ.get("LES_TEST_BUILD", ROOT / "build"),
                                  os.environ.get("LES_TEST_SRC"))
NOLES = STOCK if SELF else Tree("without LES", os.environ.get("LES_TEST_NOLES_BUILD", ROOT / "build/noles"))


def les(cache="min", io="auto", **more):
    """The environment that turns LES on. Further names: fault, depth, lookahead. With a fault, nothing is read that may
    not be needed, unless lookahead is given: otherwise the fault may hit what nobody misses."""
    env = {"LLAMA_ARG_LES": "on", "LLAMA_ARG_LES_CACHE": str(cache), "LLAMA_ARG_LES_IO": io}
    names = {"fault": "LES_FAULT", "depth": "LLAMA_ARG_LES_IO_DEPTH", "lookahead": "LLAMA_ARG_LES_LOOKAHEAD"}
    if "fault" in more:
        more.setdefault("lookahead", 0)
    env.update({names[key]: str(value) for key, value in more.items()})
    return env


def clean_environment():
    """Ours, without what would steer llama.cpp."""
    full = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "LES_FAULT"))}
    # stock prints a stack trace with gdb when it aborts, which takes seconds and says nothing here
    full["GGML_NO_BACKTRACE"] = "1"
    # on a busy machine, threads that spin for each other multiply the time; the results do not depend on it
    full.setdefault("OMP_WAIT_POLICY", "passive")
    return full


def run(cmd, env=None, timeout=TIMEOUT, **kwargs):
    """Runs a program. A hang or a death by signal is a failure, whatever the caller expected of it."""
    full = {**clean_environment(), **(env or {})}
    cmd = [str(c) for c in cmd]
    shown = " ".join([*(f"{k}={v}" for k, v in (env or {}).items()), *cmd])
    try:
        done = subprocess.run(cmd, env=full, timeout=timeout, capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, **kwargs)
    except subprocess.TimeoutExpired as e:
        raise Failed(f"hangs ({timeout} s): {shown}") from e
    done.shown = f"{shown}\nexit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    if done.returncode < 0:
        raise Failed(f"killed by {signal.Signals(-done.returncode).name}: {done.shown}")
    return done


def drive(tree, out, args, env=None, expect=0, timeout=TIMEOUT, **kwargs):
    """Runs the driver, which writes OUT.bin and OUT.idx."""
    done = run([tree.driver(), "-o", out, *args], env, timeout, **kwargs)
    if done.returncode != expect:
        raise Failed(f"expected exit code {expect}: {done.shown}")
    return done


def records(base):
    """[(name, rows, columns, offset in floats)] of what the driver wrote."""
    result, offset = [], 0
    for line in Path(f"{base}.idx").read_text().splitlines():
        name, rows, cols = line.rsplit(" ", 2)
        result.append((name, int(rows), int(cols), offset))
        offset += int(rows) * int(cols)
    return result


def record_bytes(base, prefix):
    """{rest of the name: bytes} of the records that start so."""
    data = Path(f"{base}.bin").read_bytes()
    return {name[len(prefix):]: data[4 * offset:4 * (offset + rows * cols)]
            for name, rows, cols, offset in records(base) if name.startswith(prefix)}


def compare(base, reference, subset=False):
    """None if every record has the reference's bytes, else a message. With subset, records may be missing."""
    want = {name: (rows, cols, offset) for name, rows, cols, offset in records(reference)}
    got = records(base)
    # sorted, as threads write in any order
    if not subset and sorted(r[0] for r in got) != sorted(want):
        return f"records differ: {[r[0] for r in got]} instead of {list(want)}"
    with open(f"{base}.bin", "rb") as file, open(f"{reference}.bin", "rb") as ref_file:
        for name, rows, cols, offset in got:
            if name not in want or want[name][:2] != (rows, cols):
                return f"{name}: {rows} x {cols}, the reference has {want.get(name)}"
            file.seek(4 * offset)
            ref_file.seek(4 * want[name][2])
            a, b = file.read(4 * rows * cols), ref_file.read(4 * rows * cols)
            if len(a) != 4 * rows * cols:
                return f"{name}: the file ends early"
            if a != b:
                return f"{name}: {difference(a, b, cols)}"
    return None


def difference(a, b, cols):
    x, y = array.array("f", a), array.array("f", b)
    at = [i for i in range(len(x)) if a[4 * i:4 * i + 4] != b[4 * i:4 * i + 4]]
    largest = max(abs(x[i] - y[i]) for i in at)
    return (f"first difference at token {at[0] // cols}, index {at[0] % cols}: {x[at[0]]!r} instead of {y[at[0]]!r}; "
            f"{len(at)} of {len(x)} values differ, by at most {largest:g}")


def check_sane(base):
    """A reference of NaNs or of one value would let everything pass."""
    values = array.array("f", Path(f"{base}.bin").read_bytes())
    for name, rows, cols, offset in records(base):
        part = values[offset:offset + rows * cols]
        if not part or not all(map(math.isfinite, part)) or min(part) == max(part):
            raise Failed(f"{base}: {name} is not a usable reference")


# by reference: jobs that run side by side want the same ones, and one must not read what another is writing
WRITING = collections.defaultdict(threading.Lock)


def reference(args, models):
    """What stock writes for these arguments, from the cache if nothing has changed. The models belong to the key."""
    key = [STOCK.identity(), list(map(str, args))]
    for path in models:
        for part in shard_files(path):
            key.append((str(part), part.stat().st_size, part.stat().st_mtime_ns))
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    base = WORK / "test-cache" / digest
    with WRITING[digest]:
        if not base.with_suffix(".ok").exists():
            base.parent.mkdir(parents=True, exist_ok=True)
            drive(STOCK, base, args)
            check_sane(base)
            base.with_suffix(".ok").touch()
    return base


def shard_files(path):
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", str(path))
    if not match:
        return [Path(path)]
    return [Path(f"{match[1]}-{i + 1:05}-of-{match[2]}.gguf") for i in range(int(match[2]))]


def read_stats(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise Failed(f"no usable statistics: {e}") from e


def total(stats, counter):
    """A counter over both phases."""
    try:
        return stats["decode"][counter] + stats["prompt"][counter]
    except (KeyError, TypeError) as e:
        raise Failed(f"no {counter} in the statistics: {stats}") from e


def identity(args, env, ref, tree=None, streams=None):
    """None, or why the tree's logits are not the reference's. With LES on, it must really have streamed."""
    tree = tree or PATCHED
    if streams is None:
        streams = env.get("LLAMA_ARG_LES") == "on" and tree is PATCHED and not SELF
    with tempfile.TemporaryDirectory() as tmp:
        env = dict(env)
        if streams:
            env["LLAMA_ARG_LES_STATS"] = f"{tmp}/stats.json"
        try:
            done = drive(tree, f"{tmp}/out", args, env)
            if streams and total(read_stats(f"{tmp}/stats.json"), "bytes_read") <= 0:
                raise Failed(f"nothing was streamed: {done.shown}")
        except Failed as e:
            return str(e)
        message = compare(f"{tmp}/out", ref)
        return message and f"{message}\n{done.shown}"


def temporary(add_cleanup):
    """A directory for a test, or with addClassCleanup for all of its class."""
    tmp = tempfile.TemporaryDirectory()
    add_cleanup(tmp.cleanup)
    return Path(tmp.name)


def middle_cache(path):
    """A cache between the smallest and the largest of a model, as the flag spells it."""
    done = run([PATCHED.tool("les"), "inspect", "--json", path], {})
    info = json.loads(done.stdout)
    return f"{(info['floor_bytes'] + info['all_bytes']) // 2048 + 1}K"


def identity_of_two(args, env_a, env_b, streams=None):
    """None, or why the patched tree's logits differ between two environments."""
    with tempfile.TemporaryDirectory() as tmp:
        drive(PATCHED, f"{tmp}/a", args, env_a)
        check_sane(f"{tmp}/a")
        return identity(args, env_b, f"{tmp}/a", streams=streams)


def in_parallel(test, jobs):
    """Runs [(label, function)]; a function returns None or a message, each becomes a subtest."""
    def guarded(function):
        try:
            return function()
        except Failed as e:
            return str(e)

    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(guarded, [function for _, function in jobs]))
    for (label, _), message in zip(jobs, results):
        with test.subTest(label):
            test.assertIsNone(message, message)


def copy_model(path, directory):
    """A private copy, for tests that damage it. Returns the path to load, as in shard_files()[0]."""
    copies = [shutil.copyfile(part, Path(directory) / part.name) for part in shard_files(path)]
    return copies[0]
