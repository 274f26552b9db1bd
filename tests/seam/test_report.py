"""What a smaller model costs, as `les report` tells it."""

import json
import unittest

import harness
import models
from harness import PATCHED, SELF


@unittest.skipIf(SELF, "stock has no les")
class Report(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)
        self.text = self.tmp / "text.txt"
        self.text.write_bytes(models.text().read_bytes()[:8000])

    def report(self, *args):
        return harness.run([PATCHED.tool("les"), "report", *args, "-c", "128", "-t", "2",
                            "--llama-perplexity", PATCHED.tool("llama-perplexity")])

    def test_smaller_is_worse(self):
        base, small = models.quantized("Q8_0"), models.with_experts("Q8_0", "q4_0")
        svg = self.tmp / "plot.svg"
        done = self.report(small, base, self.text, "--with", base, "--json", "--svg", svg)
        self.assertEqual(done.returncode, 0, done.shown)
        first, smaller, same = json.loads(done.stdout)
        self.assertNotIn("mean_kl", first)
        self.assertEqual((first["model"], smaller["model"], same["model"]), (base.name, small.name, base.name))
        self.assertLess(smaller["expert_bytes"], first["expert_bytes"])
        self.assertAlmostEqual(smaller["expert_bpw"], 4.5)
        self.assertGreater(smaller["mean_kl"]["value"], 5 * smaller["mean_kl"]["error"])
        self.assertGreater(smaller["kl_999"], smaller["mean_kl"]["value"])
        self.assertAlmostEqual(same["mean_kl"]["value"], 0, places=5)
        self.assertEqual(same["same_top"]["value"], 100)
        self.assertLess(smaller["same_top"]["value"], 100)
        self.assertLess(abs(same["perplexity"] - first["perplexity"]), 0.01)
        self.assertIn(small.name, svg.read_text())

    def test_a_table(self):
        done = self.report(models.BUNDLED, models.BUNDLED, self.text)
        self.assertEqual(done.returncode, 0, done.shown)
        self.assertRegex(done.stdout, r"mean KL divergence.*\n.*base *\n.*100\.000 \+- 0\.000\n$")

    def test_what_goes_wrong_is_said(self):
        done = self.report(models.BUNDLED, self.tmp / "none.gguf", self.text)
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertIn("none.gguf", done.stderr)
        done = self.report(models.BUNDLED, models.BUNDLED, self.tmp / "none.txt")
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertIn("none.txt", done.stderr)


if __name__ == "__main__":
    unittest.main()
