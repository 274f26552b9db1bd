"""The functions between llama.cpp and the library, called by themselves."""

import tempfile
import unittest

import harness
import models
from harness import HERE, PATCHED, ROOT, SELF
from test_pack import pack


@unittest.skipIf(SELF, "LES only")
class Glue(unittest.TestCase):
    def test_options_and_loads(self):
        exe = PATCHED.program("glue", [HERE / "glue.cpp"], [], [ROOT / "ggml-patch"])
        model = models.quantized("Q4_K_M")
        with tempfile.TemporaryDirectory() as tmp:
            done = harness.run([exe, model, pack(model, tmp)])
        self.assertEqual(done.returncode, 0, done.shown)


if __name__ == "__main__":
    unittest.main()
