"""The functions between llama.cpp and the library, called by themselves."""

import unittest

import harness
import models
from harness import HERE, PATCHED, ROOT, SELF


@unittest.skipIf(SELF, "LES only")
class Glue(unittest.TestCase):
    def test_options_and_loads(self):
        exe = PATCHED.program("glue", [HERE / "glue.cpp"], [], [ROOT / "ggml-patch"])
        done = harness.run([exe, models.quantized("Q4_K_M")])
        self.assertEqual(done.returncode, 0, done.shown)


if __name__ == "__main__":
    unittest.main()
