"""The cache that is chosen by what memory is left."""

import contextlib
import os
import re
import unittest
from pathlib import Path

import harness
import models
from harness import PATCHED, ROOT, SELF

# MiB. The model has 34, and 320 are kept in reserve: the first leaves a cache of the floor, and loading all would fill
# it; the second leaves something between the floor and all
SMALL, MIDDLE = 48, 340


def can_cap():
    """Whether we may limit the memory of a control group."""
    root = Path("/sys/fs/cgroup")
    if (root / "memory").is_dir():
        root /= "memory"
    group = root / f"les-test-{os.getpid()}"
    try:
        if (root / "cgroup.controllers").exists():  # version 2; as in capped.sh
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        try:
            return any((group / name).exists() for name in ["memory.limit_in_bytes", "memory.max"])
        finally:
            group.rmdir()
    except OSError:
        return False


class Case(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)
        self.model = models.quantized("Q4_K_M")
        self.args = ["-m", self.model, "--no-repack", "--threads", "1,2", "--scenarios", "decode,prompt64"]
        self.ref = harness.reference(self.args, [self.model])


class Auto(Case):
    def test_no_cache_given(self):
        message = harness.identity(self.args, {"LLAMA_ARG_LES": "on"}, self.ref)
        self.assertIsNone(message, message)


@unittest.skipIf(SELF, "LES only")
@unittest.skipUnless(os.geteuid() == 0 and can_cap(), "limiting memory needs root and a control group of memory")
class Capped(Case):
    """Nothing is set: the cap alone makes the model stream."""

    def capped(self, cap):
        """Statistics, and the peak in MiB."""
        stats = self.tmp / "stats.json"
        out = self.tmp / "out"
        done = harness.run(["bash", ROOT / "tests/bench/capped.sh", cap, PATCHED.driver(), "-o", out, *self.args],
                           {"LLAMA_ARG_LES_STATS": str(stats)})
        self.assertEqual(done.returncode, 0, done.shown)
        capped = re.search(r"^capped: limit (\d+) MiB, peak (\d+) MiB, exit 0$", done.stderr, re.M)
        self.assertTrue(capped, done.shown)
        self.assertEqual(int(capped[1]), cap)
        written = harness.read_stats(stats)
        self.assertGreater(harness.total(written, "bytes_read"), 0)
        message = harness.compare(out, self.ref)
        self.assertIsNone(message, message)
        return written, int(capped[2])

    def test_small(self):
        stats, peak = self.capped(SMALL)
        self.assertEqual(stats["cache_bytes"], stats["floor_bytes"])
        self.assertLess(peak, SMALL)  # which is never reached: no page had to be taken back

    def test_middle(self):
        stats, peak = self.capped(MIDDLE)
        self.assertGreater(stats["cache_bytes"], stats["floor_bytes"])
        self.assertLess(stats["cache_bytes"], stats["expert_bytes"])
        self.assertLess(peak, MIDDLE)


if __name__ == "__main__":
    unittest.main()
