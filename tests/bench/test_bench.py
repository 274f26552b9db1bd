"""bench.py's turns, with programs that only say what llama-bench says."""
import argparse
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bench  # noqa: E402

RUNS = 2
bench.WARM_UP = 1
REPETITIONS = 2 * (RUNS + bench.WARM_UP)
# NAME FILE: each repetition writes its name to the file many times; the even ones, which are stopped, are told apart
FAKE = f"""
import json, sys, time
name, path, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
def work():
    for _ in range(100):
        with open(path, "a") as file:
            file.write(name)
        time.sleep(0.001)
work()
for test in ("prompt", "generation"):
    for i in range(1, {REPETITIONS} + 1):
        print(f"llama-bench: benchmark 1/2: {{test}} run {{i}}/{REPETITIONS}", file=sys.stderr, flush=True)
        work()
        if i == last:
            sys.exit("no such expert")
print(" " * (1 << 20))
print(json.dumps([{{"samples_ts": [i % 2 or -1 for i in range(1, {REPETITIONS} + 1)]}}] * 2))
"""


class Turns(unittest.TestCase):
    def setUp(self):
        self.file = tempfile.NamedTemporaryFile()
        self.addCleanup(self.file.close)
        self.args = argparse.Namespace(runs=RUNS)

    def fake(self, name, last=0):
        return [sys.executable, "-c", FAKE, name, self.file.name, last]

    def test_one_runs_at_a_time_and_whole_repetitions_count(self):
        speeds = bench.in_turns(self.args, [self.fake("a"), self.fake("b")])
        self.assertEqual(speeds, [[[1] * RUNS] * 2] * 2)
        said = self.file.read().decode()
        changes = sum(x != y for x, y in zip(said, said[1:]))
        # each turn, and at its end the repetition that it is stopped in, which hardly begins
        self.assertLessEqual(changes, 2 * (2 * REPETITIONS // 2 + 1))

    def test_a_failure_says_why_and_leaves_no_process(self):
        started = []

        class Remembered(subprocess.Popen):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                started.append(self)

        with mock.patch.object(bench.subprocess, "Popen", Remembered), self.assertRaises(SystemExit) as failed:
            bench.in_turns(self.args, [self.fake("a"), self.fake("b", last=3)])
        self.assertIn("no such expert", str(failed.exception))
        self.assertIn("exit code 1", str(failed.exception))
        self.assertEqual(len(started), 2)
        for process in started:
            self.assertIsNotNone(process.returncode)
            self.assertFalse(os.path.exists(f"/proc/{process.pid}"))

    def test_a_program_that_cannot_be_started_stops_the_other(self):
        with self.assertRaises(FileNotFoundError):
            bench.in_turns(self.args, [self.fake("a"), ["/no/such/program"]])

    def test_quartiles_are_shown(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            bench.show("x", [{"y": value} for value in (1, 2, 3, 4, 5)])
        self.assertIn("3.000   (1.000 .. 5.000)   quartiles 2.000 .. 4.000", out.getvalue())


class Capped(unittest.TestCase):
    def test_without_a_cap_nothing_runs(self):
        with tempfile.TemporaryDirectory() as tmp:
            tmp = pathlib.Path(tmp)
            (tmp / "mkdir").write_text("#!/bin/sh\nexit 1\n")
            (tmp / "mkdir").chmod(0o755)
            done = subprocess.run(["bash", pathlib.Path(bench.__file__).parent / "capped.sh", "64", "touch", tmp / "ran"],
                                  env={**os.environ, "PATH": f"{tmp}:{os.environ['PATH']}"}, capture_output=True)
            self.assertNotEqual(done.returncode, 0)
            self.assertFalse((tmp / "ran").exists())


if __name__ == "__main__":
    unittest.main()
