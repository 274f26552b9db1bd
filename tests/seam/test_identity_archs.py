"""Logits of every architecture with routed experts equal stock's bit for bit, whatever the cache and the engine."""

import unittest

import harness
import models

# stock itself aborts in these: kimi-linear cannot build its graph for several sequences
SKIPPED = {"kimi-linear-moe": ["seqs"]}
SCENARIOS = ["decode", "prompt64", "prompt512", "embd", "seqs"]


def arguments(path, *more):
    scenarios = [s for s in SCENARIOS if s not in SKIPPED.get(path.stem, [])]
    return ["-m", path, "--threads", "1,2", "--scenarios", ",".join(scenarios), *more]


class IdentityArchs(unittest.TestCase):
    def check(self, env):
        def job(path):
            args = arguments(path, "--no-repack")
            streams = False if path.stem in models.UNUSED else None
            return harness.identity(args, env(path), harness.reference(args, [path]), streams=streams)

        harness.in_parallel(self, [(path.stem, lambda path=path: job(path)) for path in models.arch_models()])

    def test_min_uring(self):
        self.check(lambda _: harness.les("min", "uring"))

    def test_min_pread(self):
        self.check(lambda _: harness.les("min", "pread"))

    def test_half_uring(self):
        self.check(lambda path: harness.les(harness.middle_cache(path), "uring"))

    def test_half_pread(self):
        self.check(lambda path: harness.les(harness.middle_cache(path), "pread"))

    def test_all_uring(self):
        self.check(lambda _: harness.les("100%", "uring"))

    def test_all_pread(self):
        self.check(lambda _: harness.les("100%", "pread"))

    def test_repack_does_not_depend_on_the_cache(self):
        """With repacking, the other weights use other kernels than in the reference: LES is its own reference."""
        def job(path):
            streams = False if path.stem in models.UNUSED else None
            return harness.identity_of_two(arguments(path), harness.les("100%"), harness.les("min"), streams)

        harness.in_parallel(self, [(path.stem, lambda path=path: job(path)) for path in models.arch_models()])


if __name__ == "__main__":
    unittest.main()
