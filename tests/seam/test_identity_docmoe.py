"""Logits of a real small MoE equal stock's bit for bit: types, shards, contexts, caches, engines, adapters."""

import itertools
import unittest

import harness
import models


def every_model():
    return [(kind, models.quantized(kind)) for kind in models.QUANTS] + [("shards", models.sharded())]


class IdentityDocmoe(unittest.TestCase):
    def check(self, env, *args, names=None):
        jobs = []
        for name, path in every_model():
            if names is None or name in names:
                full = ["-m", path, "--no-repack", "--threads", "1,2", *args]
                jobs.append((name, lambda full=full, path=path: harness.identity(
                    full, env, harness.reference(full, [path]))))
        harness.in_parallel(self, jobs)

    def test_caches_and_engines(self):
        for cache, io in itertools.product(["min", "50%", "100%"], ["uring", "pread"]):
            with self.subTest(cache=cache, io=io):
                self.check(harness.les(cache, io))

    def test_repack_does_not_depend_on_the_cache(self):
        jobs = [(name, lambda path=path: harness.identity_of_two(
            ["-m", path, "--threads", "1,2"], harness.les("100%"), harness.les("min"))) for name, path in every_model()]
        harness.in_parallel(self, jobs)

    def test_load_modes(self):
        for mode in ["none", "mmap", "dio"]:
            with self.subTest(mode):
                self.check(harness.les("min"), "--load-mode", mode, names=["Q4_K_M", "shards"])

    def test_read_order_and_depth(self):
        for io in ["uring", "pread"]:
            for more in [{"fault": "reorder", "lookahead": 1}, {"fault": "slow@5:20", "lookahead": 1},
                         {"fault": "rate@120", "lookahead": "auto"}, {"depth": 1}, {"depth": 64}]:
                with self.subTest(io=io, **more):
                    self.check(harness.les("min", io, **more), "--scenarios", "decode,prompt64", names=["Q4_K_M"])

    def test_lookahead(self):
        for cache, lookahead in itertools.product(["min", "50%"], [0, 2, 8]):
            with self.subTest(cache=cache, lookahead=lookahead):
                self.check(harness.les(cache, lookahead=lookahead), names=["Q4_K_M"])

    def test_long_decode(self):
        """Long enough for evictions to happen at half the cache."""
        for cache in ["min", "20%", "50%"]:
            with self.subTest(cache):
                self.check(harness.les(cache), "--scenarios", "decode", "--n-decode", 128, names=["Q4_K_M", "Q8_0"])

    def test_state_saved_and_restored(self):
        for cache in ["min", "50%"]:
            with self.subTest(cache):
                self.check(harness.les(cache), "--save-restore", names=["Q4_K_M"])

    def test_restored_context_goes_on_as_the_first(self):
        args = ["-m", models.quantized("Q4_K_M"), "--no-repack", "--save-restore"]
        base = harness.reference(args, [models.quantized("Q4_K_M")])
        self.assertEqual(harness.record_bytes(base, "t1/straight."), harness.record_bytes(base, "t1/restored."))

    def test_two_contexts_at_once(self):
        for cache, io in itertools.product(["min", "50%"], ["uring", "pread"]):
            with self.subTest(cache=cache, io=io):
                args = ["-m", models.quantized("Q4_K_M"), "--no-repack", "--threads", "1,2", "--threads-both"]
                ref = harness.reference(args, [models.quantized("Q4_K_M")])
                self.assertIsNone(harness.identity(args, harness.les(cache, io), ref))

    def test_two_contexts_at_once_equal_one_alone(self):
        args = ["-m", models.quantized("Q4_K_M"), "--no-repack", "--threads", "1,2", "--threads-both"]
        base = harness.reference(args, [models.quantized("Q4_K_M")])
        for t, i in itertools.product(["t1", "t2"], ["0", "1"]):
            self.assertEqual(harness.record_bytes(base, f"{t}/both{i}/"), harness.record_bytes(base, f"{t}/alone{i}/"))

    def test_what_others_see(self):
        """Who asks for one operation of a layer sees what it would see, though layers are computed in waves."""
        for watch in ["ffn_moe_gate-", "ffn_moe_down-"]:
            with self.subTest(watch):
                self.check(harness.les("20%"), "--scenarios", "decode", "--watch", watch, names=["Q4_K_M"])

    def test_lora(self):
        for cache in ["min", "100%"]:
            with self.subTest(cache):
                self.check(harness.les(cache), "--lora", models.lora(), names=["Q4_K_M", "shards"])

    def test_lora_changes_the_logits(self):
        model = models.quantized("Q4_K_M")
        args = ["-m", model, "--no-repack", "--threads", "1,2"]
        plain = harness.reference(args, [model])
        adapted = harness.reference([*args, "--lora", models.lora()], [model, models.lora()])
        self.assertIn("first difference", harness.compare(adapted, plain))


if __name__ == "__main__":
    unittest.main()
