"""Flags that say where experts shall lie leave them to the CPU, which streams them all the same."""

import unittest

import harness
import models
from harness import PATCHED, SELF
from test_tools import PROMPT, plain

PLACEMENTS = [["--cpu-moe"], ["--n-cpu-moe", "2"], ["-ot", "exps=CPU"], ["-ot", r"blk\.[0-3]\.ffn_.*_exps=CPU"]]


class Placement(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)

    def session(self, name, exe, env, *args):
        """The session file, which holds the tokens and the whole KV cache."""
        path = self.tmp / name
        done = harness.run([exe, "-m", models.quantized("Q4_K_M"), "-t", "2", "-p", PROMPT, "-n", "12", "--temp", "0",
                            "-no-cnv", "--no-repack", "--prompt-cache", path, "--prompt-cache-all", *args], env)
        self.assertEqual(done.returncode, 0, done.shown)
        return path.read_bytes()

    def streamed(self, name, *args):
        """The session and how many experts were asked for."""
        stats = self.tmp / f"{name}.json"
        flags = [] if SELF else ["--les", "on", "--les-cache", "min", "--les-stats", stats]
        session = self.session(name, PATCHED.tool("llama-completion"), {}, *flags, *args)
        if SELF:
            return session, 0
        written = harness.read_stats(stats)
        self.assertGreater(harness.total(written, "bytes_read"), 0)
        return session, harness.total(written, "requests")

    def test_experts_stream_wherever_they_are_put(self):
        exe, env = plain("llama-completion")
        expected = self.session("plain", exe, env)
        self.assertGreater(len(expected), 10_000)
        _, requests = self.streamed("unplaced")
        for i, args in enumerate(PLACEMENTS):
            with self.subTest(" ".join(args)):
                session, n = self.streamed(f"placed-{i}", *args)
                self.assertTrue(session == expected, "the sessions differ")
                self.assertEqual(n, requests)  # of all layers, not only of those that were named


if __name__ == "__main__":
    unittest.main()
