"""--les-spec in llama.cpp's programs, and drafters that cannot be used."""

import struct
import unittest

import gguf_mini
import harness
import models
import speculating
from harness import PATCHED, SELF
from speculating import BLOCK, docmoe, dspark, measure, speculate, steps, with_les

PROMPT = "The function returns"


def other_words(directory):
    """The bundled drafter with a vocabulary that is not the target's."""
    data = measure.DRAFTER.read_bytes()
    word = next(w for w in gguf_mini.Header(measure.DRAFTER).kv["tokenizer.ggml.tokens"] if len(w) > 5 and w.isalpha())
    old = struct.pack("<Q", len(word.encode())) + word.encode()
    path = directory / "other-words.gguf"
    path.write_bytes(data.replace(old, old[:-3] + b"###", 1))
    return path


class Unusable(unittest.TestCase):
    """What cannot draft is refused with a message, or drafts nothing that does harm."""

    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)

    def refused(self, message, *drafter):
        done = speculate(PATCHED, self.tmp / "out", docmoe(20, *drafter), with_les("adaptive"), expect=2)
        self.assertRegex(done.stderr, message)
        self.assertEqual((self.tmp / "out").read_text(), "")

    def no_model(self):
        path = self.tmp / "no-model.gguf"
        path.write_text("not a model\n" * 100)
        return path

    def test_no_model(self):
        for kind in ["draft-simple", "draft-dspark"]:
            self.refused(r"no-model\.gguf", "-md", self.no_model(), "--spec-type", kind)

    def test_no_file(self):
        self.refused(r"missing\.gguf", "-md", self.tmp / "missing.gguf", "--spec-type", "draft-dspark")

    def test_half_a_drafter(self):
        path = self.tmp / "half.gguf"
        path.write_bytes(measure.DRAFTER.read_bytes()[:-1_000_000])
        self.refused(r"half\.gguf", *dspark(drafter=path))

    def test_without_vocabulary(self):
        self.refused("vocab", "-md", models.arch_model("llama-dense"), "--spec-type", "draft-simple")

    def test_other_vocabulary(self):
        self.refused("vocab", "-md", other_words(self.tmp), "--spec-type", "draft-simple")

    def test_other_vocabulary_of_a_block_drafter(self):
        """Its vocabulary is not looked at: what it drafts is verified as any draft."""
        args = docmoe(60, *dspark(drafter=other_words(self.tmp)))
        written = speculate(PATCHED, self.tmp / "out", args, with_les(BLOCK))
        self.assertEqual(len(written.tokens), 60)

    @unittest.skipIf(SELF and not PATCHED.has("llama-server"), "stock was built without llama-server")
    def test_server_ends(self):
        args = ["-m", models.quantized("Q4_K_M"), *dspark(drafter=self.no_model()), "--port", 0]
        done = harness.run([PATCHED.tool("llama-server"), *args], with_les("adaptive"))
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stdout + done.stderr, r"no-model\.gguf")

    @unittest.skipIf(SELF and not PATCHED.has("llama-server"), "stock was built without llama-server")
    def test_server_without_speculation(self):
        args = ["-m", models.quantized("Q4_K_M"), "-t", 2, "--no-repack"]
        texts = []
        for drafter in [[], ["-md", models.arch_model("llama-dense"), "--spec-type", "draft-simple"]]:
            env = {**harness.clean_environment(), **with_les("adaptive")}
            with measure.server(PATCHED.tool("llama-server"), *args, *drafter, env=env) as server:
                texts.append(server.complete(PROMPT, 20))
        self.assertEqual(*texts)


@unittest.skipIf(SELF, "LES only")
class Flag(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)
        self.stats = self.tmp / "stats.json"
        self.args = ["-m", models.quantized("Q4_K_M"), "-t", 2, *dspark(), "--les", "on", "--les-cache", "min",
                     "--les-stats", self.stats]

    def check_steps(self, width):
        taken = steps(self.stats)
        most = {"off": 0, "adaptive": BLOCK}.get(width, width)
        self.assertGreater(sum(taken), 3, width)
        self.assertEqual(sum(taken[most + 1:]), 0, taken)
        if width == 3:
            self.assertGreater(taken[3], 1, taken)

    def test_server(self):
        for width in ["off", "adaptive", 3]:
            with self.subTest(width):
                with measure.server(PATCHED.tool("llama-server"), *self.args, "--les-spec", width,
                                    env=harness.clean_environment()) as server:
                    self.assertEqual(len(server.complete(PROMPT, 40)), 40)
                self.check_steps(width)

    def test_cli(self):
        for width in ["off", "adaptive", 3]:
            with self.subTest(width):
                done = harness.run([PATCHED.tool("llama-cli"), *self.args, "--les-spec", width, "-c", 512,
                                    "--single-turn", "-p", PROMPT, "-n", 40, "--temp", 0, "--ignore-eos"])
                self.assertEqual(done.returncode, 0, done.shown)
                self.check_steps(width)

    def test_wrong_value(self):
        for program in ["llama-server", "llama-cli"]:
            done = harness.run([PATCHED.tool(program), *self.args, "--les-spec", "many"])
            self.assertNotEqual(done.returncode, 0)
            self.assertIn('--les-spec takes off, adaptive or a number of tokens, not "many"', done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
