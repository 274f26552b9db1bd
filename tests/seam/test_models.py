"""Several models in one process, and the warm-up: what is read, and whose counters move."""

import json
import tempfile
import unittest
from pathlib import Path

import gguf_mini
import harness
import models
from harness import PATCHED, SELF


def one_token_bytes(path):
    """What one token's experts take to read: each matrix of each picked expert, in whole blocks of 4 KiB."""
    header = gguf_mini.Header(path)
    used = header.arch("expert_used_count")
    return sum(used * (t.size // t.dims[-1] + 2 * 4096) for t in header.experts())


class TwoModels(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)

    def test_in_turns(self):
        """As a draft model beside its target."""
        target, draft = models.quantized("Q8_0"), models.quantized("Q4_K_M")
        args = ["--two-models", target, draft, "--no-repack", "--threads", "1,2"]
        ref = harness.reference(args, [target, draft])
        for cache in ["min", "50%", "100%"]:
            with self.subTest(cache):
                message = harness.identity(args, harness.les(cache), ref)
                self.assertIsNone(message, message)

    @unittest.skipIf(SELF, "LES only")
    def test_the_second_does_not_disturb_the_first(self):
        target, draft = models.quantized("Q8_0"), models.quantized("Q4_K_M")
        common = ["-o", self.tmp / "out", "--no-repack", "--n-decode", "24"]
        counters = ["requests", "hits", "misses", "bytes_read"]

        def stats_of(name, *args):
            # what was guessed may come in time or late
            env = {**harness.les("50%"), "LLAMA_ARG_LES_LOOKAHEAD": "0", "LLAMA_ARG_LES_STATS": str(self.tmp / name)}
            done = harness.run([PATCHED.driver(), *common, *args], env)
            self.assertEqual(done.returncode, 0, done.shown)
            stats = harness.read_stats(self.tmp / name)
            return {c: harness.total(stats, c) for c in counters}

        alone = stats_of("alone.json", "-m", target, "--scenarios", "decode")
        beside = stats_of("beside.json", "--two-models", target, draft, "--env-other",
                          f"LLAMA_ARG_LES_STATS={self.tmp}/draft.json")
        self.assertEqual(beside, alone)
        self.assertGreater(alone["bytes_read"], 0)
        self.assertGreater(harness.total(harness.read_stats(self.tmp / "draft.json"), "bytes_read"), 0)

    @unittest.skipIf(SELF, "LES only")
    def test_each_has_a_profile(self):
        target, draft = models.quantized("Q8_0"), models.quantized("Q4_K_M")
        profile = self.tmp / "profile"
        env = {**harness.les("min"), "LLAMA_ARG_LES_PROFILE": str(profile)}
        for _ in range(2):
            harness.drive(PATCHED, self.tmp / "out", ["--two-models", target, draft, "--no-repack"], env)
            learned = [json.loads(path.read_text())["model"] for path in [profile, Path(f"{profile}.2")]]
            self.assertEqual(learned, [target.name, draft.name])


@unittest.skipIf(SELF, "LES only")
class Stats(unittest.TestCase):
    """The counters that other tests lean on are right where the truth is known."""

    def stats(self, cache, *args):
        with tempfile.TemporaryDirectory() as tmp:
            env = {**harness.les(cache), "LLAMA_ARG_LES_STATS": f"{tmp}/stats.json"}
            harness.drive(PATCHED, f"{tmp}/out", ["-m", models.quantized("Q4_K_M"), "--no-repack", *args], env)
            return harness.read_stats(f"{tmp}/stats.json")

    def test_one_token_reads_its_experts(self):
        header = gguf_mini.Header(models.quantized("Q4_K_M"))
        used = header.arch("expert_used_count")
        least = sum(used * (t.size // t.dims[-1]) for t in header.experts())
        stats = self.stats("100%", "--scenarios", "decode", "--n-decode", "1")
        # each expert counts once per layer, not once per matrix
        layers = {t.name.split(".")[1] for t in header.experts()}
        self.assertEqual(harness.total(stats, "requests"), used * len(layers))
        self.assertGreaterEqual(harness.total(stats, "bytes_read"), least)

    def test_nothing_is_read_twice_at_full_cache(self):
        size = sum(t.size + 2 * 4096 * t.dims[-1] for t in gguf_mini.Header(models.quantized("Q4_K_M")).experts())
        stats = self.stats("100%")
        self.assertLessEqual(harness.total(stats, "bytes_read"), size)
        self.assertEqual(stats["evictions"], 0)

    def test_small_cache_is_respected(self):
        stats = self.stats("min")
        self.assertLess(stats["cache_bytes"], stats["expert_bytes"])
        self.assertGreater(stats["evictions"], 0)


@unittest.skipIf(SELF, "LES only")
class Copies(unittest.TestCase):
    def saved(self, path, env):
        """What llama_model_save_to_file writes."""
        with tempfile.TemporaryDirectory() as tmp:
            copy = Path(tmp, "copy.gguf")
            harness.drive(PATCHED, f"{tmp}/out", ["-m", path, "--no-repack", "--load-mode", "none", "--scenarios", "decode",
                                                  "--n-decode", "2", "--save", copy], env)
            return copy.read_bytes()

    def test_a_model_that_streams_can_be_written_out(self):
        for path in (models.quantized("Q4_K_M"), models.sharded()):
            with self.subTest(path):
                plain = self.saved(path, {"LLAMA_ARG_LES": "off"})
                self.assertGreater(len(plain), 32 << 20)
                self.assertTrue(self.saved(path, harness.les("min")) == plain, "the copies differ")


class WarmUp(unittest.TestCase):
    def bytes_read(self, *args):
        with tempfile.TemporaryDirectory() as tmp:
            path = f"{tmp}/stats.json"
            env = {**harness.les("100%"), "LLAMA_ARG_LES_STATS": path}
            done = harness.run([PATCHED.tool("llama-completion"), "-m", models.quantized("Q4_K_M"), "-no-cnv",
                                "-t", "2", "-p", "The", *args], env)
            self.assertEqual(done.returncode, 0, done.shown)
            # a model that has read nothing may have nothing to write
            return harness.total(harness.read_stats(path), "bytes_read") if Path(path).exists() else 0

    def test_loading_and_warm_up_read_at_most_one_token(self):
        limit = one_token_bytes(models.quantized("Q4_K_M"))
        self.assertLessEqual(self.bytes_read("-n", "0"), limit)

    def test_warm_up_adds_at_most_one_token(self):
        limit = one_token_bytes(models.quantized("Q4_K_M"))
        without = self.bytes_read("-n", "1", "--no-warmup")
        self.assertGreater(without, 0)
        self.assertLessEqual(self.bytes_read("-n", "1"), without + limit)


if __name__ == "__main__":
    unittest.main()
