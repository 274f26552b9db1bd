"""The driver of bench.py --speculation, on the small model."""
import sys
import unittest

import harness
import models
from harness import ROOT, SELF

sys.path.insert(0, str(ROOT / "tests/bench"))
import speculation  # noqa: E402


@unittest.skipIf(SELF, "it needs LES")
class Replay(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.exe, cls.tmp = speculation.program(), harness.temporary(cls.addClassCleanup)
        cls.base = ["-m", models.quantized("Q4_K_M"), "-t", "2", "-c", "512"]
        cls.text = cls.tmp / "text"
        done = harness.run([cls.exe, *cls.base, "--record", cls.text, "-n", "420"], harness.les("min"))
        if done.returncode != 0:
            raise harness.Failed(done.shown)

    def rounds(self, right):
        args = ["--replay", self.text, "--right", right, "--segment", "12", "--widths", ",".join(speculation.WAYS)]
        stats = self.tmp / "stats.json"
        done = harness.run([self.exe, *self.base, *args], {**harness.les("min"), "LLAMA_ARG_LES_STATS": str(stats)})
        self.assertEqual(done.returncode, 0, done.shown)
        rounds = speculation.rounds_of(done.stdout.splitlines(), len(speculation.WAYS))
        self.assertGreater(len(rounds), 0, done.shown)
        self.counted = harness.read_stats(stats)["speculation"]
        return rounds

    def test_a_drafter_that_is_always_right(self):
        for found in self.rounds("1"):
            self.assertEqual(found["off"]["verified"], 0)
            self.assertEqual(found["off"]["steps"], found["off"]["tokens"])
            self.assertEqual(found["7"]["tokens"], 8 * found["7"]["steps"])
            self.assertEqual(found["7"]["tokens"], found["7"]["expected"])
        for position in self.counted["positions"]:
            self.assertEqual(position["verified"], position["stood"])

    def test_a_drafter_that_is_always_wrong(self):
        rounds = self.rounds("0")
        for found in rounds:
            self.assertTrue(all(row["steps"] == row["tokens"] for row in found.values()))
        # it is found out: only tries are left
        steps, verified = (sum(found["adaptive"][key] for found in rounds) for key in ("steps", "verified"))
        self.assertLess(verified, steps)
        self.assertGreater(self.counted["positions"][0]["verified"], 0)
        self.assertEqual(self.counted["positions"][0]["stood"], 0)

    def test_more_tokens_read_more(self):
        self.rounds("0")
        read = [(width["reads_known"], width["bytes_read"]) for width in self.counted["widths"]]
        self.assertGreater(min(read[0][0], read[7][0]), 0)
        self.assertGreater(read[7][1] / read[7][0], 2 * read[0][1] / read[0][0])


if __name__ == "__main__":
    unittest.main()
