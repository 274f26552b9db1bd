"""What experts are applied to: recorded by --les-inputs, used by les pack --inputs."""

import json
import struct
import unittest

import gguf_mini
import harness
import models
from harness import PATCHED, SELF
from test_requantize import matrices_of

TEXTS = models.BUNDLED.parent


def passes(path):
    """The tensors of a recording, and its records: (tensor, tokens, picks per token, rows, picks)."""
    data = path.read_bytes()
    at = data.index(b"\n") + 1
    tensors = json.loads(data[:at])["tensors"]
    records = []
    while at < len(data):
        tensor, tokens, n_used, rows = struct.unpack_from("<4I", data, at)
        picks = data[at + 16:at + 16 + 4 * tokens * n_used]
        records.append((tensor, tokens, n_used, rows, picks))
        at += 16 + len(picks) + 2 * rows * tensors[tensor]["columns"]
    return tensors, records


@unittest.skipIf(SELF, "stock has no les")
class Inputs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = harness.temporary(cls.addClassCleanup)
        cls.source = models.first_layers("F16", 1)
        cls.recording = cls.record(cls.source, cls.tmp / "inputs")
        cls.imatrix = cls.tmp / "imatrix.gguf"
        cls.run_tool(PATCHED.tool("llama-imatrix"), "-m", cls.source, "-f", TEXTS / "rust-api.txt", "-o", cls.imatrix,
                     "-c", "256", "-t", "2")

    @staticmethod
    def run_tool(*args, env=None):
        done = harness.run(args, env)
        assert done.returncode == 0, done.shown
        return done

    @classmethod
    def record(cls, model, path, *args):
        cls.run_tool(PATCHED.tool("llama-perplexity"), "-m", model, "-f", TEXTS / "rust-api.txt", "-c", "256", "-t", "2",
                     "--les", "on", "--les-inputs", path, *args)
        return path

    def pack(self, name, *args, env=None):
        output = self.tmp / name
        self.run_tool(PATCHED.tool("les"), "pack", self.source, output, "--bpw", "4.1", "--types", "q3_K,q4_K,q4_0,q5_0",
                      *args, env=env)
        return output

    def divergence(self, *files):
        """Of each file from the source, on text that calibrated nothing."""
        text = self.tmp / "text.txt"
        text.write_bytes((TEXTS / "python-guides.txt").read_bytes()[:8000])
        first, *others = files
        args = [arg for other in others for arg in ("--with", other)]
        done = self.run_tool(PATCHED.tool("les"), "report", first, self.source, text, *args, "-c", "256", "-t", "2", "--json",
                             "--llama-perplexity", PATCHED.tool("llama-perplexity"))
        return [row["mean_kl"]["value"] for row in json.loads(done.stdout)[1:]]

    def test_shaped_for_its_inputs_a_model_of_as_many_bytes_is_closer(self):
        ggml = {"LES_GGML": str(PATCHED.bin)}
        plain = self.pack("plain.gguf", "--imatrix", self.imatrix, env=ggml)
        shaped = self.pack("shaped.gguf", "--inputs", self.recording, env=ggml)
        sizes = [sum(size for *_, rows in matrices_of(f).values() for _, size, _ in rows) for f in (plain, shaped)]
        self.assertAlmostEqual(sizes[1] / sizes[0], 1, delta=0.002)
        kv = gguf_mini.Header(shaped).kv
        self.assertEqual(kv["les.pack.inputs"], self.recording.name)
        self.assertNotIn("les.pack.imatrix", kv)
        self.run_tool(PATCHED.tool("les"), "verify", shaped)
        without, by_shape = self.divergence(plain, shaped)
        self.assertLess(by_shape, 0.7 * without)

    def test_shards_and_an_importance_matrix_beside(self):
        args = ["--inputs", self.recording, "--imatrix", self.imatrix, "--ggml", PATCHED.bin]
        whole = self.pack("whole.gguf", *args)
        self.pack("parts.gguf", *args, "--split-max-size", "3M")
        shards = sorted(self.tmp.glob("parts-*.gguf"))
        self.assertGreater(len(shards), 1)
        # the same experts, wherever they are
        found = {}
        for shard in shards:
            data = shard.read_bytes()
            found |= {name: [data[at:at + size] for at, size, _ in rows] for name, (*_, rows) in matrices_of(shard).items()}
        data = whole.read_bytes()
        for name, (*_, rows) in matrices_of(whole).items():
            self.assertTrue(found[name] == [data[at:at + size] for at, size, _ in rows], name)

    def test_token_by_token_as_many_at_once(self):
        """The way of waves is not taken while inputs are recorded."""
        one = self.record(models.BUNDLED, self.tmp / "one", "-b", "256", "-ub", "1", "--chunks", "1", "--no-warmup")
        many = self.record(models.BUNDLED, self.tmp / "many", "--chunks", "1", "--no-warmup")
        (tensors, records_one), (_, records_many) = passes(one), passes(many)
        self.assertEqual([t["columns"] for t in tensors], 8 * [256, 128])
        for at in range(len(tensors)):
            by_one, at_once = ([r for r in records if r[0] == at] for records in (records_one, records_many))
            self.assertTrue(len(at_once) == 1 and len(by_one) == at_once[0][1], at)
            picks = [list(memoryview(b"".join(r[4] for r in records)).cast("i")) for records in (by_one, at_once)]
            self.assertEqual(*map(len, picks))
            same = sum(a == b for a, b in zip(*picks)) / len(picks[0])
            self.assertGreater(same, 0.95, at)
        # of the last layer only those with an output
        self.assertEqual({r[1] for r in records_many if r[0] < 14}, {256})

    def test_what_is_no_recording_is_refused(self):
        cut = self.tmp / "cut"
        cut.write_bytes(self.recording.read_bytes()[:-1])
        for path, words in [(cut, "not finished.*--les-inputs"), (self.imatrix, "no recording.*--les-inputs"),
                            (self.tmp / "none", "none")]:
            done = harness.run([PATCHED.tool("les"), "pack", self.source, self.tmp / "refused.gguf", "--bpw", "4",
                                "--inputs", path, "--ggml", PATCHED.bin])
            self.assertEqual(done.returncode, 1, done.shown)
            self.assertRegex(done.stderr, words)

    def test_a_recording_that_cannot_be_written(self):
        """Is told once; what is computed is not lost."""
        env = {**harness.les("min"), "LLAMA_ARG_LES_INPUTS": "/dev/full"}
        args = ["-m", models.BUNDLED, "--no-repack", "--scenarios", "decode", "--n-decode", "32"]
        ref = harness.reference(args, [models.BUNDLED])
        done = harness.drive(PATCHED, self.tmp / "out", args, env)
        self.assertEqual(done.stderr.count("/dev/full: cannot write the recording"), 1, done.shown)
        self.assertIsNone(harness.compare(self.tmp / "out", ref))


if __name__ == "__main__":
    unittest.main()
