"""The cache that is chosen by what memory is left."""

import os
import re
import tempfile
import unittest
from pathlib import Path

import harness
import models
from harness import PATCHED, ROOT, SELF

CAP = 64  # MiB: streaming fits, the whole model with what is kept in reserve does not


def can_cap():
    """Whether we may limit the memory of a control group."""
    root = Path("/sys/fs/cgroup")
    group = (root / "memory" if (root / "memory").is_dir() else root) / f"les-test-{os.getpid()}"
    try:
        group.mkdir()
        try:
            return any((group / name).exists() for name in ["memory.limit_in_bytes", "memory.max"])
        finally:
            group.rmdir()
    except OSError:
        return False


class Auto(unittest.TestCase):
    def setUp(self):
        tmp = tempfile.TemporaryDirectory()
        self.addCleanup(tmp.cleanup)
        self.tmp = Path(tmp.name)
        self.model = models.quantized("Q4_K_M")
        self.args = ["-m", self.model, "--no-repack", "--threads", "1,2", "--scenarios", "decode,prompt64"]
        self.ref = harness.reference(self.args, [self.model])

    def test_no_cache_given(self):
        message = harness.identity(self.args, {"LLAMA_ARG_LES": "on"}, self.ref)
        self.assertIsNone(message, message)

    @unittest.skipIf(SELF, "LES only")
    @unittest.skipUnless(os.geteuid() == 0 and can_cap(), "limiting memory needs root and a control group of memory")
    def test_a_cap_makes_it_stream_and_is_kept(self):
        stats = self.tmp / "stats.json"
        out = self.tmp / "out"
        driver = PATCHED.driver()
        done = harness.run(["bash", ROOT / "tests/bench/capped.sh", CAP, driver, "-v", "-o", out, *self.args],
                           {"LLAMA_ARG_LES_STATS": str(stats)})
        self.assertEqual(done.returncode, 0, done.shown)
        capped = re.search(r"^capped: limit (\d+) MiB, peak (\d+) MiB, exit 0$", done.stderr, re.M)
        self.assertTrue(capped, done.shown)
        self.assertEqual(int(capped[1]), CAP)
        written = harness.read_stats(stats)
        self.assertGreater(harness.total(written, "bytes_read"), 0)
        self.assertLess(written["cache_bytes"], CAP << 20)
        message = harness.compare(out, self.ref)
        self.assertIsNone(message, message)


if __name__ == "__main__":
    unittest.main()
