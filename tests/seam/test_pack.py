"""A packed model is a GGUF file: gguf-py reads it, and llama.cpp refuses it in an orderly way."""

import importlib.util
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

import gguf_mini
import harness
import models
from harness import PATCHED, SELF, STOCK


def gguf_py():
    """gguf-py's reader, without what the rest of that package imports."""
    package = types.ModuleType("gguf")
    package.__path__ = [str(STOCK.src / "gguf-py/gguf")]
    sys.modules["gguf"] = package
    import gguf.gguf_reader
    return gguf.gguf_reader.GGUFReader


@unittest.skipIf(SELF, "stock has no les")
class Pack(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.tmp.cleanup)
        cls.source = models.BUNDLED
        cls.packed = Path(cls.tmp.name) / "packed.gguf"
        done = harness.run([PATCHED.tool("les"), "pack", cls.source, cls.packed])
        assert done.returncode == 0, done.shown

    @unittest.skipUnless(importlib.util.find_spec("numpy") or os.environ.get("CI") == "true", "needs numpy")
    def test_gguf_py_reads_it(self):
        reader = gguf_py()
        source, packed = reader(self.source), reader(self.packed)
        for key, field in source.fields.items():
            if not key.startswith("GGUF."):
                self.assertEqual(field.contents(), packed.fields[key].contents(), key)
        self.assertEqual(packed.fields["les.pack.version"].contents(), 1)
        self.assertEqual(packed.fields["les.source.file"].contents(), self.source.name)
        tensors = {t.name: t for t in packed.tensors}
        layers = set()
        for t in source.tensors:
            if "_exps.weight" in t.name:
                layers.add(t.name.split(".")[1])
                self.assertNotIn(t.name, tensors)
            else:
                there = tensors.pop(t.name)
                self.assertEqual((t.tensor_type, list(t.shape)), (there.tensor_type, list(there.shape)))
                self.assertEqual(bytes(t.data), bytes(there.data), t.name)
        self.assertEqual(set(tensors), {f"blk.{n}.les_experts" for n in layers} | {"les.checks.0"})
        self.assertEqual({t.tensor_type.name for t in tensors.values()}, {"I8"})

    def test_llama_cpp_refuses_it(self):
        self.assertTrue(gguf_mini.Header(self.packed).kv["les.pack.version"])
        args = ["-m", self.packed, "-p", "x", "-n", "1", "-no-cnv"]
        done = harness.run([PATCHED.tool("llama-completion"), *args], {"LLAMA_ARG_LES": "off"})
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertRegex(done.stderr, r"error loading model: .*ffn_\w+_exps\.weight", done.shown)


if __name__ == "__main__":
    unittest.main()
