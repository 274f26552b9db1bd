#!/usr/bin/env python3
"""What requantized experts cost: `les pack` against what llama-quantize can do, at the bytes of the experts.

usage: tests/quality/quality.py MODEL-F16.gguf TEXT... [--part 0.733] [--work DIR] [--mixes MIX,...] [--threads N]

Each text is halved: the first halves calibrate (the importance matrix of llama-imatrix, the inputs of --les-inputs), the
second ones are reported on. In all files the other tensors stay as they are in MODEL, so that what is seen comes from the
experts. `les pack` makes them as large as --part of those of Q4_K_M; MIX is UP:GATE:DOWN, or the name of a ftype of
llama-quantize. For every token whose logits llama-perplexity keeps (those of the second half of each context): the
Kullback-Leibler divergence from MODEL's, and whether the likeliest token is the one that follows. Means are over the texts,
each weighing as much; intervals (95%) are by a bootstrap of contexts within each text, paired.

Needs the programs of build/bin and numpy.
"""
import argparse
import os
import pathlib
import subprocess
import sys

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/seam"))
import gguf_mini  # noqa: E402
import packed  # noqa: E402

CONTEXT = 256
RESAMPLES = 4000
MIXES = ["Q4_K_M", "Q3_K_M", "IQ3_XXS", "q3_k:q3_k:iq4_nl", "iq3_s:iq3_s:iq4_nl", "iq3_xxs:iq4_xs:iq4_nl", "iq4_xs:iq3_xxs:iq4_nl",
         "iq3_xxs:iq3_xxs:q5_0"]


class Quality:
    """Makes files, and reads what they answer."""

    def __init__(self, args):
        self.args = args
        self.model = args.model.resolve()
        self.work = args.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.texts = {path.stem: self.halves(path) for path in args.texts}
        self.all_first = self.work / "calibration.txt"
        self.all_first.write_bytes(b"".join(first.read_bytes() for first, _ in self.texts.values()))

    def halves(self, path):
        text = path.read_bytes()
        at = text.index(b"\n", len(text) // 2) + 1
        halves = [self.work / f"{path.stem}.{half}.txt" for half in ("first", "second")]
        for half, part in zip(halves, (text[:at], text[at:])):
            half.write_bytes(part)
        return halves

    def run(self, tool, *args):
        env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
        cmd = [str(ROOT / "build/bin" / tool), *map(str, args)]
        done = subprocess.run(cmd, env=env, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            sys.exit(f"{' '.join(cmd)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def once(self, name, make):
        """The file of that name, made unless it is there."""
        path = self.work / name
        if not path.exists():
            partial = self.work / f"partial-{name}"
            partial.unlink(missing_ok=True)
            make(partial)
            partial.rename(path)
        return path

    def common(self, model, text):
        return ["-m", model, "-f", text, "-c", CONTEXT, "-b", CONTEXT, "-t", self.args.threads, "--no-repack"]

    def imatrix(self):
        return self.once("imatrix.gguf", lambda path: self.run(
            "llama-imatrix", *self.common(self.model, self.all_first), "--les", "off", "--no-ppl", "-o", path))

    def inputs(self):
        return self.once("inputs.les", lambda path: self.run(
            "llama-perplexity", *self.common(self.model, self.all_first), "--les", "on", "--les-inputs", path))

    def mix(self, mix):
        """By llama-quantize: all but the experts as they are."""
        ftype, flags = mix, []
        if ":" in mix:
            ftype = "Q4_K_M"
            for part, ty in zip(("up", "gate", "down"), mix.split(":")):
                flags += ["--tensor-type", f"ffn_{part}_exps={ty}"]
        others = ["--tensor-type", "attn=f16", "--token-embedding-type", "f16", "--output-tensor-type", "f16"]

        def make(path):
            self.run("llama-quantize", "--imatrix", self.imatrix(), *others, *flags, self.model, path, ftype, self.args.threads)
            source = {t.name: t.type for t in gguf_mini.Header(self.model).tensors}
            changed = [t.name for t in gguf_mini.Header(path).tensors if "_exps" not in t.name and t.type != source[t.name]]
            if changed:
                sys.exit(f"llama-quantize changed {changed}, which it was to leave alone")

        return self.once(f"{mix.replace(':', '-')}.gguf", make)

    def packed(self, name, bits, *flags):
        return self.once(f"{name}-{bits:.4f}.gguf", lambda path: self.run(
            "les", "pack", self.model, path, "--bpw", f"{bits:.6f}", *self.args.types, "--ggml", ROOT / "build/bin", *flags))

    def answers(self, model):
        """Per text: the log probabilities of all tokens, context by context, and the tokens that follow."""
        for name, (_, second) in self.texts.items():
            logits = self.work / f"{model.name}-{name}.logits"
            self.run("llama-perplexity", *self.common(model, second), "--les", "auto", "--kl-divergence-base", logits)
            with logits.open("rb") as file:
                magic, (n_ctx, n_vocab, n_chunk) = file.read(8), numpy.fromfile(file, numpy.int32, 3)
                if magic != b"_logits_":
                    sys.exit(f"{logits}: not what llama-perplexity writes")
                tokens = numpy.fromfile(file, numpy.int32, n_chunk * n_ctx).reshape(n_chunk, n_ctx)
                n = n_ctx - 1 - n_ctx // 2
                rows = numpy.fromfile(file, numpy.uint16).reshape(n_chunk, n, 2 * ((n_vocab + 1) // 2) + 4)
            logits.unlink()
            yield name, rows, tokens[:, n_ctx // 2 + 1:]

    def measured(self, model):
        """Per text: KL divergence and whether the likeliest token was right, by context and token."""
        path = self.work / f"{model.name}.npz"
        if not path.exists():
            base, found = self.base(), {}
            for name, rows, tokens in self.answers(model):
                kl = numpy.array([divergence(log_probabilities(b), log_probabilities(r)) for b, r in zip(base[name], rows)])
                found |= {f"kl-{name}": kl, f"right-{name}": rows[:, :, 4:].argmax(-1) == tokens}
            numpy.savez_compressed(path, **found)
        with numpy.load(path) as found:
            return [[found[f"{what}-{name}"].astype(float) for name in self.texts] for what in ("kl", "right")]

    def base(self):
        path = self.work / "base.npz"
        if not path.exists():
            numpy.savez(path, **{name: rows for name, rows, _ in self.answers(self.model)})
        return numpy.load(path)


def log_probabilities(rows):
    """Of what llama-perplexity writes: a scale and an offset as two floats, then the numbers."""
    scale = numpy.ascontiguousarray(rows[:, :4]).view(numpy.float32)
    return rows[:, 4:].astype(numpy.float32) * scale[:, :1] + scale[:, 1:]


def divergence(p, q):
    return (numpy.exp(p) * (p - q)).sum(-1)


def expert_bytes(path):
    header = gguf_mini.Header(path)
    own = sum(t.size for t in header.tensors if "_exps" in t.name)
    return own or sum(row.bytes for table in packed.tables(path).values() for row in table.rows)


def interval(differences):
    """Of the mean over texts of paired differences: contexts are drawn anew within each text."""
    rng = numpy.random.default_rng(0)
    means = numpy.zeros(RESAMPLES)
    for text in differences:
        by_context = text.mean(1)
        drawn = rng.integers(0, len(by_context), (RESAMPLES, len(by_context)))
        means += by_context[drawn].mean(1) / len(differences)
    return numpy.quantile(means, [0.025, 0.975])


def main():
    ap = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ap.add_argument("model", type=pathlib.Path)
    ap.add_argument("texts", type=pathlib.Path, nargs="+")
    ap.add_argument("--part", type=float, default=0.733, help="how large ours are, of the experts of Q4_K_M (default: 0.733)")
    ap.add_argument("--work", type=pathlib.Path, default=ROOT / "build/quality", help="where files are kept (default: build/quality)")
    ap.add_argument("--mixes", default=",".join(MIXES), help="what llama-quantize makes (default: %(default)s)")
    ap.add_argument("--types", help="for les pack --types")
    ap.add_argument("--threads", type=int, default=2)
    args = ap.parse_args()
    args.types = ["--types", args.types] if args.types else []
    quality = Quality(args)

    reference = quality.mix("Q4_K_M")
    weights = sum(numpy.prod(t.dims) for t in gguf_mini.Header(quality.model).tensors if "_exps" in t.name)
    bits = 8 * args.part * expert_bytes(reference) / weights
    files = {f"llama-quantize {mix}": quality.mix(mix) for mix in args.mixes.split(",")}
    files["les pack --imatrix"] = quality.packed("imatrix", bits, "--imatrix", quality.imatrix())
    files["les pack --inputs"] = quality.packed("inputs", bits, "--inputs", quality.inputs())
    files["les pack --inputs --imatrix"] = quality.packed("both", bits, "--inputs", quality.inputs(), "--imatrix", quality.imatrix())

    _, right_reference = quality.measured(reference)
    print("| experts | MiB | bits | mean KL | 99.9% KL | next token right % | less than Q4_K_M's, points (95%) |")
    print("|---|---|---|---|---|---|---|")
    for name, path in files.items():
        size = expert_bytes(path)
        kl, right = quality.measured(path)
        mean = numpy.mean([text.mean() for text in kl])
        high = numpy.quantile(numpy.concatenate([text.ravel() for text in kl]), 0.999)
        accuracy = 100 * numpy.mean([text.mean() for text in right])
        lost = [100 * (b - a) for a, b in zip(right, right_reference)]
        low, up = interval(lost)
        print(f"| {name} | {size / 2**20:.3f} | {8 * size / weights:.3f} | {mean:.6f} | {high:.4f} | {accuracy:.3f} "
              f"| {numpy.mean([text.mean() for text in lost]):+.3f} ({low:+.3f} .. {up:+.3f}) |", flush=True)


if __name__ == "__main__":
    main()
