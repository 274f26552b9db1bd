"""The harness itself: it must see a wrong bit, a missing record, a wrong expert."""

import unittest
from pathlib import Path

import gguf_mini
import harness
import models
from harness import PATCHED, SELF, STOCK

ARGS = ["--no-repack", "--scenarios", "decode,prompt64", "--threads", "1,2"]


class Harness(unittest.TestCase):
    def setUp(self):
        self.model = models.quantized("Q8_0")
        self.args = ["-m", self.model, *ARGS]
        self.ref = harness.reference(self.args, [self.model])
        self.tmp = harness.temporary(self.addCleanup)
        self.out = self.tmp / "out"

    def test_stock_repeats_itself(self):
        self.assertIsNone(harness.identity(self.args, {}, self.ref, tree=STOCK))

    def test_one_wrong_bit_is_found(self):
        harness.drive(STOCK, self.out, self.args)
        data = bytearray(Path(f"{self.out}.bin").read_bytes())
        name, _rows, cols, offset = harness.records(self.out)[12]  # the prompt
        data[4 * (offset + 3 * cols + 5)] ^= 1
        Path(f"{self.out}.bin").write_bytes(data)
        message = harness.compare(self.out, self.ref)
        self.assertIn(f"{name}: first difference at token 3, index 5", message)
        self.assertIn("1 of", message)

    def test_missing_record_is_found(self):
        harness.drive(STOCK, self.out, ["-m", self.model, "--no-repack", "--scenarios", "decode"])
        self.assertIn("records differ", harness.compare(self.out, self.ref))
        self.assertIsNone(harness.compare(self.out, self.ref, subset=True))

    def test_other_tokens_give_other_logits(self):
        harness.drive(STOCK, self.out, [*self.args, "--seed", "7"])
        self.assertIn("first difference", harness.compare(self.out, self.ref))

    def test_swapped_experts_give_other_logits(self):
        path = harness.copy_model(self.model, self.tmp)
        tensor = gguf_mini.Header(path).experts()[0]
        half = tensor.size // 2
        with open(path, "r+b") as file:
            file.seek(tensor.offset)
            data = file.read(2 * half)
            file.seek(tensor.offset)
            file.write(data[half:] + data[:half])
        harness.drive(STOCK, self.out, ["-m", path, *ARGS])
        self.assertIn("first difference", harness.compare(self.out, self.ref))

    def test_crash_is_a_failure(self):
        """Of a mapped file that shrinks, stock dies: whoever expects that exit code must not get away with it."""
        path = harness.copy_model(self.model, self.tmp)
        with self.assertRaisesRegex(harness.Failed, "SIGBUS"):
            harness.drive(STOCK, self.out, ["-m", path, "--load-mode", "mmap", "--no-repack", "--scenarios", "decode",
                                            "--truncate-after", "2", path, "5000"], expect=-7)

    def test_hang_is_a_failure(self):
        with self.assertRaisesRegex(harness.Failed, "hangs"):
            harness.run(["sleep", "60"], timeout=0.2)

    def test_missing_decode_error_is_a_failure(self):
        harness.drive(STOCK, self.out, [*self.args, "--expect-decode-error"], expect=5)

    def test_both_builds_have_the_same_kernels(self):
        names = ["CMAKE_BUILD_TYPE", "CMAKE_CXX_COMPILER", "CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS", "GGML_NATIVE",
                 "GGML_CPU_REPACK", "GGML_LLAMAFILE", "GGML_OPENMP", "GGML_CPU_ALL_VARIANTS"]
        stock, patched = STOCK.cache_entries(), PATCHED.cache_entries()
        self.assertEqual({n: patched.get(n) for n in names}, {n: stock.get(n) for n in names})

    def test_all_architectures_are_there(self):
        # a change of the detection, or of the generator, must not silently empty the identity tests
        names = {path.stem for path in models.arch_models()}
        self.assertEqual(len(names), 53, sorted(names))
        self.assertEqual(len(names - models.UNUSED), 52, sorted(names))

    @unittest.skipIf(SELF, "LES only")
    def test_what_is_said_not_to_stream_does_not(self):
        for name in models.UNUSED:
            with self.subTest(name):
                stats = self.tmp / f"{name}.json"
                args = ["-m", models.arch_model(name), "--scenarios", "decode"]
                harness.drive(PATCHED, self.out, args, {**harness.les("min"), "LLAMA_ARG_LES_STATS": str(stats)})
                # where nothing was read there may be nothing to write
                self.assertTrue(not stats.exists() or harness.total(harness.read_stats(stats), "bytes_read") == 0)


if __name__ == "__main__":
    unittest.main()
