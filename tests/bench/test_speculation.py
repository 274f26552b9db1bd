"""The figures of bench.py --speculation. No model is read."""
import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import speculation  # noqa: E402


def turn(width, seconds, tokens=16, steps=8):
    return {"width": width, "tokens": tokens + 5, "expected": tokens, "seconds": seconds, "steps": steps, "verified": 2 * steps, "stood": tokens - steps,
            "bytes_read": 16 * 2**20, "evictions_for_drafts": 2}


def rounds(*of_round):
    lines = [json.dumps(turn(way, seconds)) for times in of_round for way, seconds in zip(speculation.WAYS, times)]
    return speculation.rounds_of(["loading", *lines, "done"], len(speculation.WAYS))


class Rounds(unittest.TestCase):
    def test_the_first_and_what_is_incomplete_are_left_out(self):
        found = rounds([9] * 5, [1, 2, 3, 4, 5], [1, 2])
        self.assertEqual(len(found), 1)
        self.assertEqual(found[0]["7"]["seconds"], 4)

    def test_ratios_are_of_one_round(self):
        found = rounds([9] * 5, [8, 4, 2, 4, 2], [4, 2, 1, 2, 1], [8, 4, 2.5, 4, 2])
        best = speculation.best_fixed(found)
        # by the median, not by the best or the last round
        self.assertEqual(best, "3")
        lines = [speculation.compare(each, best, 2**20) for each in found]
        self.assertEqual([line["adaptive / off"] for line in lines], [4, 4, 4])
        self.assertEqual([line["adaptive / best fixed (3)"] for line in lines], [1, 1, 1.25])
        self.assertEqual(lines[0]["MiB/token off"], 16 / 21)
        self.assertEqual(lines[0]["evicted for drafts, % of reads, adaptive"], 12.5)


if __name__ == "__main__":
    unittest.main()
