"""les pack with a target: experts of several types, by ggml's own quantizers."""

import collections
import signal
import subprocess
import time
import unittest
from pathlib import Path

import gguf_mini
import harness
import models
import packed
from harness import PATCHED, SELF

K_FAMILY = {10, 11, 12, 13, 14, 16, 17, 18, 21, 22, 23}
LEGACY_FAMILY = {2, 6, 8, 20}
PARTS = ["up", "gate", "gate_up", "down"]


def matrices_of(path):
    """{tensor: (main type, columns, rows, [(offset in the file, bytes, type)])} of every packed layer."""
    found = {}
    for name, table in packed.tables(path).items():
        for i, part in enumerate(table.parts):
            rows = [(table.offset + row.offset, row.bytes, row.type) for row in table.rows[i::len(table.parts)]]
            tensor = name.replace("les_experts", f"ffn_{PARTS[part.part]}_exps.weight")
            found[tensor] = (part.type, part.columns, part.rows, rows)
    return found


@unittest.skipIf(SELF, "stock has no les")
class Requantize(unittest.TestCase):
    # those of the others are slow to make
    TYPES = ["--types", "q2_K,q3_K,q5_0,iq4_nl"]

    @classmethod
    def setUpClass(cls):
        cls.tmp = harness.temporary(cls.addClassCleanup)
        cls.source = models.BUNDLED
        cls.imatrix = cls.tmp / "imatrix.gguf"
        done = harness.run([PATCHED.tool("llama-imatrix"), "-m", cls.source, "-f", models.BUNDLED.parent / "rust-api.txt",
                            "-o", cls.imatrix, "-c", "256", "--chunks", "2", "-t", "2"])
        assert done.returncode == 0, done.shown

    def command(self, output, *args):
        return [str(arg) for arg in [PATCHED.tool("les"), "pack", self.source, output, "--ggml", PATCHED.bin, *self.TYPES, *args]]

    def pack(self, output, *args):
        done = harness.run(self.command(output, *args))
        self.assertEqual(done.returncode, 0, done.shown)
        return done

    def refused(self, *args):
        output = self.tmp / "refused.gguf"
        done = harness.run(self.command(output, *args))
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertFalse(output.exists())
        return done.stderr

    def experts(self):
        return [t for t in gguf_mini.Header(self.source).tensors if "_exps.weight" in t.name]

    def check(self, output, part):
        """The experts take that part of what they took, in types of their family that are not larger than their own."""
        before = sum(t.size for t in self.experts())
        matrices = matrices_of(output).values()
        after = sum(size for *_, rows in matrices for _, size, _ in rows)
        self.assertLessEqual(after, before * part)
        # what is left would not hold another step
        self.assertGreater(after, before * part - 64 * 1024)
        for main, columns, _, rows in matrices:
            types = collections.Counter(ty for *_, ty in rows)
            self.assertEqual(types[main], max(types.values()))
            self.assertLessEqual(set(types), LEGACY_FAMILY if main in LEGACY_FAMILY else K_FAMILY)
        done = harness.run([PATCHED.tool("les"), "verify", output])
        self.assertEqual(done.returncode, 0, done.shown)
        kv = gguf_mini.Header(output).kv
        bits = 8 * after / sum(columns * n_rows * len(rows) for _, columns, n_rows, rows in matrices)
        self.assertAlmostEqual(kv["les.pack.bpw"], bits, places=4)
        return kv

    def test_sizes_and_families(self):
        output = self.tmp / "ten.gguf"
        done = self.pack(output, "--shrink", "10%")
        self.assertRegex(done.stderr, "without --imatrix")
        self.assertRegex(done.stderr, "quantized already")
        self.assertNotIn("les.pack.imatrix", self.check(output, 0.9))
        # what keeps its type keeps its bytes
        written, source, kept = output.read_bytes(), self.source.read_bytes(), 0
        matrices = matrices_of(output)
        for t in self.experts():
            *_, rows = matrices[t.name]
            for expert, (at, size, ty) in enumerate(rows):
                if ty == t.type:
                    kept += 1
                    begin = t.offset + size * expert
                    self.assertTrue(written[at:at + size] == source[begin:begin + size], (t.name, expert))
        self.assertIn(kept, range(1, 64 * len(matrices)))

    def test_killed_and_resumed(self):
        args = ["--shrink", "25%", "--imatrix", self.imatrix]
        whole, resumed = self.tmp / "whole.gguf", self.tmp / "resumed.gguf"
        done = self.pack(whole, *args)
        self.assertNotIn("without --imatrix", done.stderr)
        self.assertEqual(self.check(whole, 0.75)["les.pack.imatrix"], self.imatrix.name)

        unfinished = Path(f"{resumed}.unfinished")
        first = next(t.offset for t in gguf_mini.Header(whole).tensors if t.name == "blk.0.les_experts")
        run = subprocess.Popen(self.command(resumed, *args), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # the first layer has a table
        while run.poll() is None and not (unfinished.exists() and self.bytes_at(unfinished, first, 8) == b"LESEXPRT"):
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
        self.assertEqual(run.wait(), -signal.SIGKILL, "it ended before it was killed")
        self.assertFalse(resumed.exists())
        self.assertRegex(self.pack(resumed, *args).stdout, "from a run that was interrupted")
        self.assertTrue(whole.read_bytes() == resumed.read_bytes())

        done = harness.run([PATCHED.tool("les"), "unpack", whole, self.tmp / "unpacked.gguf"])
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertRegex(done.stderr, "several types")

    @staticmethod
    def bytes_at(path, offset, n):
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(n)

    def test_budget_is_that_of_the_file(self):
        output = self.tmp / "budget.gguf"
        self.pack(output, "--budget", "30M", "--imatrix", self.imatrix)
        size = output.stat().st_size
        self.assertLessEqual(size, 30 << 20)
        self.assertGreater(size, 29.5 * (1 << 20))

    def test_dry_run(self):
        output = self.tmp / "dry.gguf"
        done = self.pack(output, "--bpw", "4.5", "--dry-run")
        self.assertRegex(done.stdout, r"4\.\d\d bits per weight:")
        self.assertRegex(done.stdout, r"down +iq4_nl +\d+ +[\d.]+ MiB +[\d.]+%")
        self.assertFalse(output.exists())
        done = harness.run(self.command(output, "--bpw", "4.5", "--types", "q3_Z"))
        self.assertEqual(done.returncode, 2, done.shown)
        self.assertRegex(done.stderr, "no type of this name")

    def test_targets_that_cannot_be(self):
        text = self.refused("--shrink", "95%")
        least = text.split("the least is ")[1].split(" (")[0].split()
        self.assertRegex(self.refused("--bpw", "1"), r"the least is --bpw \d")
        self.assertRegex(self.refused("--budget", "1M"), r"the least is --budget \d")
        self.assertRegex(self.refused("--budget", "1G"), "changes nothing")
        self.pack(self.tmp / "least.gguf", *least, "--dry-run")

    def test_what_is_missing(self):
        self.assertRegex(self.refused("--bpw", "4", "--imatrix", self.source), "no importance matrix.*llama-imatrix")
        done = harness.run([PATCHED.tool("les"), "pack", self.source, self.tmp / "refused.gguf", "--bpw", "4",
                            "--ggml", "/nonexistent"])
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertRegex(done.stderr, "/nonexistent.*build llama.cpp with shared libraries.*--ggml")
        done = harness.run([PATCHED.tool("les"), "pack", self.source, self.tmp / "refused.gguf", "--imatrix", self.imatrix])
        self.assertNotEqual(done.returncode, 0, done.shown)


if __name__ == "__main__":
    unittest.main()
