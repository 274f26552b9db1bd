"""A packed model is a GGUF file: gguf-py reads it, ours streams it, stock llama.cpp refuses it in an orderly way."""

import array
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

import gguf_mini
import harness
import models
from harness import Failed, PATCHED, SELF, STOCK
from packed import tables


def gguf_py():
    """gguf-py's reader, without what the rest of that package imports."""
    package = types.ModuleType("gguf")
    package.__path__ = [str(STOCK.src / "gguf-py/gguf")]
    sys.modules["gguf"] = package
    import gguf.gguf_reader
    return gguf.gguf_reader.GGUFReader


def pack(source, directory, *args):
    """The path to load."""
    packed = Path(directory) / f"{source.stem}.gguf"
    done = harness.run([PATCHED.tool("les"), "pack", source, packed, *args])
    if done.returncode != 0:
        raise Failed(done.shown)
    return packed if packed.exists() else min(Path(directory).glob(f"{source.stem}-00001-of-*.gguf"))


def first_byte(path, layer, expert):
    """Where the first matrix of a packed expert begins."""
    table = tables(path)[f"blk.{layer}.les_experts"]
    return table.offset + table.rows[len(table.parts) * expert].offset


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = harness.temporary(cls.addClassCleanup)
        cls.source = models.BUNDLED
        cls.packed = pack(cls.source, cls.tmp)


@unittest.skipIf(SELF, "stock has no les")
class Pack(Case):
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

    def test_stock_refuses_it(self):
        self.assertTrue(gguf_mini.Header(self.packed).kv["les.pack.version"])
        done = harness.drive(STOCK, self.tmp / "out", ["-m", self.packed], expect=2)
        self.assertRegex(done.stderr, r"error loading model: .*ffn_\w+_exps\.weight", done.shown)


@unittest.skipIf(SELF, "stock has no les")
class Load(Case):
    """The patched llama.cpp loads a packed model as it loads the source."""

    def identity(self, source, packed, env, *args, streams=None):
        """None, or why the packed model's logits are not the source's in stock."""
        args = ["--threads", "1,2", "--no-repack", *args]
        ref = harness.reference(["-m", source, *args], [source])
        return harness.identity(["-m", packed, *args], env, ref, streams=streams)

    def check(self, pairs):
        """[(source, packed)], with the smallest cache, half of the experts, all."""
        jobs = []
        for (source, packed), io in itertools.product(pairs, ["uring", "pread"]):
            for cache in ["min", harness.middle_cache(packed), "100%"]:
                env = harness.les(cache, io)
                jobs.append((f"{source.stem} {cache} {io}", lambda source=source, packed=packed, env=env:
                             self.identity(source, packed, env, "--scenarios", "decode,prompt64,prompt512")))
        harness.in_parallel(self, jobs)

    def test_bundled(self):
        self.check([(self.source, self.packed)])

    def test_archs(self):
        """One tensor for gate and up; biases; a second set of experts."""
        sources = [models.arch_model(f"{arch}-moe") for arch in ["deepseek2", "gpt-oss", "grovemoe"]]
        self.check([(source, pack(source, self.tmp)) for source in sources])

    def test_every_arch(self):
        def check(source):
            with tempfile.TemporaryDirectory() as tmp:
                return self.identity(source, pack(source, tmp), harness.les("min"), "--scenarios", "decode,prompt64",
                                     streams=source.stem not in models.UNUSED)

        harness.in_parallel(self, [(source.stem, lambda source=source: check(source)) for source in models.arch_models()])

    def test_shards(self):
        directory = self.tmp / "shards"
        directory.mkdir()
        packed = pack(self.source, directory, "--split-max-size", "12M")
        self.assertGreater(len(harness.shard_files(packed)), 2)
        self.check([(self.source, packed)])

    def test_shards_of_shards(self):
        source = models.sharded()
        self.check([(source, pack(source, self.tmp, "--split-max-size", "12M"))])

    def test_streams_though_it_fits(self):
        for env in [{}, {"LLAMA_ARG_LES": "auto"}, {"LLAMA_ARG_LES_CACHE": "100%"}]:
            for args in [(), ("--load-mode", "mmap")]:
                with self.subTest(env=env, args=args):
                    message = self.identity(self.source, self.packed, env, "--scenarios", "decode", *args, streams=True)
                    self.assertIsNone(message, message)

    def test_a_copy_that_llama_cpp_writes_is_a_stock_file(self):
        """With the tensors of the source, read back from where they are packed."""
        copies = []
        for name, model in [("source", self.source), ("packed", self.packed)]:
            copies.append(self.tmp / f"copy-{name}.gguf")
            harness.drive(PATCHED, self.tmp / "out", ["-m", model, "--no-repack", "--scenarios", "decode", "--n-decode", "1",
                                                      "--save", copies[-1]], harness.les("min"))
        headers = [gguf_mini.Header(copy) for copy in copies]
        self.assertEqual(*({t.name for t in header.tensors} for header in headers))
        self.assertTrue(headers[1].experts())
        for a, b in zip(*(sorted(header.tensors) for header in headers)):
            self.assertEqual((a.name, a.dims, a.type), (b.name, b.dims, b.type))
            with open(copies[0], "rb") as source, open(copies[1], "rb") as packed:
                source.seek(a.offset)
                packed.seek(b.offset)
                self.assertTrue(source.read(a.size) == packed.read(b.size), a.name)

    def test_sizes_are_those_of_the_source(self):
        rows = []
        for model in [self.source, self.packed]:
            done = harness.run([PATCHED.tool("llama-bench"), "-m", model, "-t", "2", "-p", "0", "-n", "4", "-r", "1",
                                "-fitt", "64", "-o", "json", "--les", "on", "--les-cache", "min"])
            self.assertEqual(done.returncode, 0, done.shown)
            rows.append(json.loads(done.stdout)[0])
        for key in ["model_type", "model_size", "model_n_params"]:
            self.assertEqual(rows[0][key], rows[1][key])

    def completion(self, model, *args):
        return harness.run([PATCHED.tool("llama-completion"), "-m", model, "-t", "2", "-p", "The list", "-n", "12",
                            "--temp", "0", "-no-cnv", "--no-repack", *args])

    def test_completion(self):
        """With what it does before it loads, which is to see what fits. The sessions hold the tokens and the KV cache."""
        sessions = []
        for name, model in [("source", self.source), ("packed", self.packed)]:
            sessions.append(self.tmp / f"session-{name}")
            done = self.completion(model, "--les", "on", "--prompt-cache", sessions[-1], "--prompt-cache-all")
            self.assertEqual(done.returncode, 0, done.shown)
        source, packed = (session.read_bytes() for session in sessions)
        self.assertGreater(len(source), 10_000)
        self.assertTrue(source == packed, "the sessions differ")

    def test_off_refuses(self):
        """Whether or not the program's own log reaches its end."""
        done = self.completion(self.packed, "--les", "off")
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertRegex(done.stderr, "les: the experts are packed for streaming: use --les auto .* les unpack .*\n")

    def test_quantize_refuses(self):
        done = harness.run([PATCHED.tool("llama-quantize"), "--allow-requantize", self.packed, self.tmp / "q.gguf", "Q8_0"])
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertRegex(done.stderr + done.stdout, "packed for streaming.*les unpack", done.shown)

    def damaged(self, at):
        """A copy with a flipped bit there."""
        path = harness.copy_model(self.packed, tempfile.mkdtemp(dir=self.tmp))
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        return path

    def test_flipped_bit(self):
        """Decode fails, and says which expert is damaged; what was decoded before is right."""
        path = self.damaged(first_byte(self.packed, 3, 7))
        args = ["--no-repack", "--scenarios", "decode,prompt512"]
        ref = harness.reference(["-m", self.source, *args], [self.source])
        for io in ["uring", "pread"]:
            with self.subTest(io):
                done = harness.drive(PATCHED, self.tmp / "out", ["-m", path, *args, "--expect-decode-error"],
                                     harness.les("min", io))
                self.assertRegex(done.stderr, rf"{path.name}: reading expert 7 of blk\.3\.ffn_up_exps\.weight failed.*checksum")
                message = harness.compare(self.tmp / "out", ref, subset=True)
                self.assertIsNone(message, message)

    def test_damaged_table(self):
        holder = next(t for t in gguf_mini.Header(self.packed).tensors if t.name == "blk.3.les_experts")
        done = harness.drive(PATCHED, self.tmp / "out", ["-m", self.damaged(holder.offset + 100)], expect=2)
        self.assertRegex(done.stderr, r"error loading model: les: .*blk\.3\.les_experts.*table of experts is wrong")


def spliced(path, other, directory, chosen):
    """A copy of a packed model in which the `chosen` experts are those of another, whose types take less room."""
    copy = harness.copy_model(path, directory)
    theirs = tables(other)
    with open(copy, "r+b") as file, open(other, "rb") as from_file:
        for name, table in tables(copy).items():
            for i, (row, new) in enumerate(zip(table.rows, theirs[name].rows)):
                if chosen(i // len(table.parts)):
                    from_file.seek(theirs[name].offset + new.offset)
                    file.seek(table.offset + row.offset)
                    file.write(from_file.read(new.bytes))
                    table.rows[i] = new._replace(offset=row.offset)
            table.write()
    return copy


@unittest.skipIf(SELF, "stock has no les")
class Mixed(unittest.TestCase):
    """Experts of one tensor that are of several types."""

    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)

    def splice(self, kind, experts, chosen):
        large, small = models.quantized(kind), models.with_experts(kind, experts)
        dirs = [self.tmp / kind / name for name in ["large", "small", "spliced"]]
        for directory in dirs:
            directory.mkdir(parents=True)
        return large, small, spliced(pack(large, dirs[0]), pack(small, dirs[1]), dirs[2], chosen)

    def test_their_own_type_decides(self):
        """Whatever type the tensor has for llama.cpp."""
        for kind, experts in [("Q8_0", "q4_0"), ("Q6_K", "q3_K")]:
            with self.subTest(kind):
                _, small, packed = self.splice(kind, experts, lambda expert: True)
                args = ["--threads", "1,2", "--no-repack", "--scenarios", "decode,prompt64,prompt512"]
                ref = harness.reference(["-m", small, *args], [small])
                for cache in ["min", "50%", "100%"]:
                    message = harness.identity(["-m", packed, *args], harness.les(cache), ref)
                    self.assertIsNone(message, message)

    def test_each_has_its_own(self):
        """An expert's product is what it is where all are of its type."""
        large, small, packed = self.splice("Q8_0", "q4_0", lambda expert: expert % 2)
        args = ["--no-repack", "--scenarios", "decode,prompt64"]
        watch = ["--watch", "ffn_moe_up-0"]
        runs = []
        for model in [large, small, packed]:
            out = self.tmp / f"out-{len(runs)}"
            harness.drive(PATCHED, out, ["-m", model, *args, *watch], harness.les("min"))
            runs.append(harness.record_bytes(out, "watched."))
        seen = set()
        for name, picks in runs[2].items():
            if not name.endswith(".picks"):
                continue
            base = name.removesuffix(".picks")
            self.assertEqual([run[name] for run in runs], 3 * [picks])
            outputs = [run[f"{base}.output"] for run in runs]
            picks = array.array("f", picks)
            size = len(outputs[0]) // len(picks)
            for i, expert in enumerate(map(int, picks)):
                of = [output[size * i:size * (i + 1)] for output in outputs]
                self.assertNotEqual(of[0], of[1])
                self.assertEqual(of[2], of[expert % 2], f"{base}: expert {expert}")
                seen.add(expert)
        self.assertGreater(len(seen), 20)
        # and whatever is in memory, one by one or in waves
        args += ["--threads", "1,2"]
        harness.drive(PATCHED, self.tmp / "ref", ["-m", packed, *args, *watch], harness.les("100%"))
        for cache, io in itertools.product(["min", "50%"], ["uring", "pread"]):
            harness.drive(PATCHED, self.tmp / "out", ["-m", packed, *args], harness.les(cache, io))
            message = harness.compare(self.tmp / "out", self.tmp / "ref", subset=True)
            self.assertIsNone(message, message)

    def test_no_copy_is_possible(self):
        """Of tensors for which a stock file has no room: an error, which names the way out."""
        _, _, packed = self.splice("Q8_0", "q4_0", lambda expert: expert % 2)
        done = harness.drive(PATCHED, self.tmp / "out", ["-m", packed, "--scenarios", "decode", "--n-decode", "1", "--save",
                                                         self.tmp / "copy.gguf"], harness.les("min"))
        self.assertRegex(done.stderr, "failed to write.*les: blk.*_exps.weight has experts of several types.*copy the packed file")
        done = harness.run([PATCHED.tool("llama-quantize"), "--allow-requantize", packed, self.tmp / "q.gguf", "Q8_0"])
        self.assertEqual(done.returncode, 1, done.shown)
        self.assertRegex(done.stderr + done.stdout, "packed for streaming.*file that it was packed from", done.shown)

    def test_types_that_do_not_mix(self):
        """Are refused when the model is opened."""
        path = pack(models.BUNDLED, self.tmp)
        table = tables(path)["blk.0.les_experts"]
        table.rows[0] = table.rows[0]._replace(type=8)  # q4_K becomes q8_0
        table.write()
        done = harness.drive(PATCHED, self.tmp / "out", ["-m", path], harness.les("min"), expect=2)
        self.assertRegex(done.stderr, "expert 0, up: its type cannot be one tensor's")


if __name__ == "__main__":
    unittest.main()
