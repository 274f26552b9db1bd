"""Off means off: with LES=off, or built without LES, or where nothing needs streaming, the logits are stock's."""

import itertools
import unittest

import harness
import models
from harness import NOLES, PATCHED


class Off(unittest.TestCase):
    def check(self, tree, env):
        jobs = []
        for kind, repack in itertools.product(["Q4_K_M", "Q8_0", "MXFP4_MOE"], [(), ("--no-repack",)]):
            path = models.quantized(kind)
            args = ["-m", path, "--threads", "1,2", *repack]
            jobs.append((f"{kind} {repack}", lambda args=args, path=path: harness.identity(
                args, env, harness.reference(args, [path]), tree=tree)))
        harness.in_parallel(self, jobs)

    def test_les_off(self):
        self.check(PATCHED, {"LLAMA_ARG_LES": "off"})

    def test_les_off_ignores_the_rest(self):
        self.check(PATCHED, {"LLAMA_ARG_LES": "off", "LLAMA_ARG_LES_CACHE": "1K", "LES_FAULT": "eio@1+"})

    def test_auto_with_room_for_all(self):
        self.check(PATCHED, {"LLAMA_ARG_LES": "auto"})

    def test_nothing_set(self):
        self.check(PATCHED, {})

    def test_on_without_experts(self):
        """A dense model has nothing to stream: on is no error, and changes nothing."""
        path = models.arch_model("qwen3-dense")
        args = ["-m", path, "--threads", "1,2"]
        with_les = {"LLAMA_ARG_LES": "on", "LLAMA_ARG_LES_CACHE": "min"}
        message = harness.identity(args, with_les, harness.reference(args, [path]), streams=False)
        self.assertIsNone(message, message)

    def test_built_without_les(self):
        self.check(NOLES, {})

    def test_built_without_les_ignores_the_environment(self):
        self.check(NOLES, harness.les("min"))


if __name__ == "__main__":
    unittest.main()
