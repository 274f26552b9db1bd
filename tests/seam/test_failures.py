"""Whatever goes wrong with the file ends in an error: never a wrong token, a hang or a crash.

harness.run makes a hang or a signal fail any of these.
"""

import itertools
import os
import re
import unittest

import gguf_mini
import harness
import models
from harness import PATCHED, SELF

SCENARIOS = "decode,prompt64"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ENGINES = ["uring", "pread"]
NOBODY = 65534


class Case(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)
        self.out = self.tmp / "out"


class LoadFailures(Case):
    @unittest.skipIf(SELF, "LES only")
    def test_cache_below_the_floor(self):
        """The error names the minimum, rounded up to at most a MiB, and that is enough."""
        model = models.quantized("Q4_K_M")
        args = ["-m", model, "--no-repack", "--scenarios", "decode"]
        stats = {"LLAMA_ARG_LES_STATS": str(self.tmp / "stats.json")}
        harness.drive(PATCHED, self.out, args, {**harness.les("min"), **stats})
        floor = harness.read_stats(self.tmp / "stats.json")["floor_bytes"]

        done = harness.drive(PATCHED, self.out, args, harness.les("1K"), expect=2)
        sizes = [float(n) * UNITS[u] for n, u in re.findall(r"(\d+(?:\.\d+)?) ?([KMG]?)i?B\b", done.stderr)]
        named = [size for size in sizes if floor <= size < floor + UNITS["M"]]
        self.assertTrue(named, f"the minimum is {floor} bytes, the message: {done.stderr}")
        message = harness.identity(args, harness.les(f"{-(-named[0] // 1024):.0f}K"), harness.reference(args, [model]))
        self.assertIsNone(message, message)

    @unittest.skipIf(SELF, "LES only")
    def test_wrong_settings(self):
        model = models.quantized("Q4_K_M")
        for name, value in [("LLAMA_ARG_LES", "maybe"), ("LLAMA_ARG_LES_CACHE", "lots"), ("LLAMA_ARG_LES_IO", "tape"),
                            ("LLAMA_ARG_LES_CACHE", "-5"), ("LES_FAULT", "eio")]:
            with self.subTest(f"{name}={value}"):
                done = harness.drive(PATCHED, self.out, ["-m", model], {**harness.les("min"), name: value}, expect=2)
                self.assertIn(value, done.stderr)

    def load_damaged(self, damage, **kwargs):
        first = harness.copy_model(models.sharded(), self.tmp)
        damage(harness.shard_files(first)[1])
        done = harness.drive(PATCHED, self.out, ["-m", first], harness.les("min"), expect=2, **kwargs)
        self.assertTrue(done.stderr.strip())
        return done

    def test_truncated_shard(self):
        self.load_damaged(lambda path: os.truncate(path, path.stat().st_size - 100_000))

    def test_shard_cut_to_its_header(self):
        self.load_damaged(lambda path: os.truncate(path, 4096))

    def test_missing_shard(self):
        self.load_damaged(lambda path: path.unlink())

    def test_shard_is_a_directory(self):
        def damage(path):
            path.unlink()
            path.mkdir()
        self.load_damaged(damage)

    def test_unreadable_shard(self):
        user = {}
        if os.geteuid() == 0:  # who may read everything
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(self.tmp, NOBODY, NOBODY)
            try:
                reached = "usage" in harness.run([PATCHED.driver()], **user).stderr
            except OSError:
                reached = False
            if not reached:
                self.skipTest(f"the user {NOBODY} cannot reach {PATCHED.driver()} or its libraries")
        done = self.load_damaged(lambda path: path.chmod(0), **user)
        self.assertRegex(done.stderr, r"00002-of-00003\.gguf.*[Pp]ermission denied")


@unittest.skipIf(SELF, "stock has no les")
class TraceFailures(Case):
    def test_a_trace_that_cannot_be_written(self):
        """Is told once; what is computed is not lost, whether tokens come one by one or many at once."""
        env = {**harness.les("min"), "LLAMA_ARG_LES_TRACE": "/dev/full"}
        for scenario in ["decode", "prompt64"]:
            with self.subTest(scenario):
                args = ["-m", models.BUNDLED, "--no-repack", "--scenarios", scenario, "--n-decode", "32"]
                ref = harness.reference(args, [models.BUNDLED])
                done = harness.drive(PATCHED, self.tmp / "out", args, env)
                self.assertEqual(done.stderr.count("/dev/full: cannot write the trace"), 1, done.shown)
                self.assertIsNone(harness.compare(self.tmp / "out", ref))


@unittest.skipIf(SELF, "LES only")
class ReadFailures(Case):
    """Injected faults. The reference is a run of stock on both models without any."""

    def setUp(self):
        super().setUp()
        self.model = models.quantized("Q4_K_M")
        self.other = models.arch_model("qwen3moe-moe")
        self.args = ["-m", self.model, "--no-repack", "--threads", "2", "--other", self.other]

    def run_with(self, fault, io, scenarios, *more, **les):
        args = [*self.args, "--scenarios", scenarios]
        self.ref = harness.reference(args, [self.model, self.other])
        return harness.drive(PATCHED, self.out, [*args, "--expect-decode-error", "--env-other", "LES_FAULT=", *more],
                             harness.les("min", io, fault=fault, **les))

    def test_one_failed_read(self):
        """Decode fails once; the same context then gives the right logits, and so does another model."""
        for io in ENGINES:
            for scenarios in ["decode", "prompt64"]:
                for fault in ["eio@1", "eio@17", "eio@300", "short@1", "short@17", "short@300"]:
                    with self.subTest(io=io, scenarios=scenarios, fault=fault):
                        done = self.run_with(fault, io, scenarios, "--retries", "1")
                        self.assertEqual(len(re.findall(r"^rc .* attempt 0 code -\d+$", done.stdout, re.M)), 1,
                                         done.shown)
                        self.assertNotIn("attempt 1", done.stdout)
                        message = harness.compare(self.out, self.ref)
                        self.assertIsNone(message, message)

    def test_two_failed_reads_fail_one_decode(self):
        """Of reads that are in flight together, none may be left to fail a later decode."""
        for io in ENGINES:
            with self.subTest(io=io):
                done = self.run_with("eio@600,eio@601", io, "decode", "--retries", "1")
                self.assertEqual(len(re.findall(r"^rc .* code -\d+$", done.stdout, re.M)), 1, done.shown)
                message = harness.compare(self.out, self.ref)
                self.assertIsNone(message, message)

    def test_failed_reads_of_guesses(self):
        """What is read ahead may fail: then it is read again when it is needed."""
        faults = ",".join(f"eio@{n},short@{n + 40}" for n in range(400, 1600, 80))
        for io in ENGINES:
            with self.subTest(io=io):
                self.run_with(faults, io, "decode", "--retries", "9", lookahead=2)
                message = harness.compare(self.out, self.ref)
                self.assertIsNone(message, message)

    def test_every_read_fails_from_some_on(self):
        """Decode fails again and again; what was decoded before is right, and so is another model."""
        for io, lookahead in itertools.product(ENGINES, [0, 1]):
            for fault in ["eio@1+", "eio@17+", "eio@900+", "short@17+"]:
                with self.subTest(io=io, fault=fault, lookahead=lookahead):
                    done = self.run_with(fault, io, SCENARIOS, "--retries", "2", lookahead=lookahead)
                    self.assertRegex(done.stdout, r"attempt 2 code -\d+")
                    message = harness.compare(self.out, self.ref, subset=True)
                    self.assertIsNone(message, message)
                    others = [name for name, *_ in harness.records(self.out) if "/other/" in name]
                    self.assertEqual(len(others), 13)  # 12 tokens and the prompt

    def test_the_message_says_what_failed(self):
        done = self.run_with("eio@17", "auto", "decode", "--retries", "1")
        said = re.findall(r"^.*(?:input/output error|os error 5|EIO).*$", done.stderr, re.I | re.M)
        # once, although both threads meet it
        self.assertEqual(len(said), 1, done.shown)

    def test_two_contexts_of_which_both_fail(self):
        """A failure under one context must not leave the other one waiting."""
        args = ["-m", self.model, "--no-repack", "--threads", "2", "--threads-both", "--retries", "3"]
        ref = harness.reference(args, [self.model])
        for fault in ["eio@2500+", "eio@2500,eio@2510,eio@2700"]:
            with self.subTest(fault):
                harness.drive(PATCHED, self.out, [*args, "--expect-decode-error"], harness.les("min", fault=fault))
                message = harness.compare(self.out, ref, subset=True)
                self.assertIsNone(message, message)


@unittest.skipIf(SELF, "LES only")
class ChangedFiles(Case):
    """The file changes under a running model. --load-mode none: of a mapped file, the other weights are gone too."""

    def check(self, model, *change):
        path = harness.copy_model(model, self.tmp)
        shards = harness.shard_files(path)
        target = shards[len(shards) // 2]
        args = ["--no-repack", "--load-mode", "none", "--scenarios", "decode", "--n-decode", "24"]
        ref = harness.reference(["-m", model, *args], [model])
        option, value = change
        for io in ENGINES:
            with self.subTest(io=io):
                harness.copy_model(model, self.tmp)
                done = harness.drive(PATCHED, self.out, [
                    "-m", path, *args, option, "4", target, value(target), "--expect-decode-error",
                ], harness.les("min", io))
                self.assertIn("acted after call 4", done.stdout)
                # nothing wrong may have been written; what came before the change must be there
                self.assertGreaterEqual(len(harness.records(self.out)), 4)
                message = harness.compare(self.out, ref, subset=True)
                self.assertIsNone(message, message)

    def test_shrinks(self):
        self.check(models.quantized("Q4_K_M"), "--truncate-after", lambda path: 5000)

    def test_shard_shrinks(self):
        self.check(models.sharded(), "--truncate-after", lambda path: 5000)

    def test_shrinks_by_a_little(self):
        self.check(models.sharded(), "--truncate-after", lambda path: path.stat().st_size - 1)

    def test_grows(self):
        self.check(models.sharded(), "--truncate-after", lambda path: path.stat().st_size + 1)

    def test_one_byte_of_an_expert_changes(self):
        def offset(path):
            tensor = gguf_mini.Header(path).experts()[-1]
            return tensor.offset + tensor.size // 2
        self.check(models.quantized("Q4_K_M"), "--touch-after", offset)
        self.check(models.sharded(), "--touch-after", offset)


if __name__ == "__main__":
    unittest.main()
