"""Speculation never changes what is generated, whatever is drafted and however much of it is verified."""

import itertools
import random
import re
import unittest

import gguf_mini
import harness
import models
import speculating
from harness import PATCHED, SELF, STOCK
from speculating import BLOCK, ROUNDING, ROUNDING_F32, docmoe, dspark, ngrams, speculate, speculation, with_les

WIDTHS = ["off", 1, 2, 3, 4, 5, "adaptive"]


def least_and_most(width):
    """How many tokens may be verified at once."""
    return {"off": (0, 0), "adaptive": (0, BLOCK)}.get(width) or (width, width)


class Rule(unittest.TestCase):
    """The driver itself fails where a token is accepted or rejected wrongly."""

    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)

    def job(self, width, cache, tokens, context=512):
        """None, or what is wrong with a text of so many tokens."""
        out = self.tmp / f"{width}-{cache}-{tokens}"
        stats = out.with_suffix(".json")
        written = speculate(PATCHED, out, docmoe(tokens, *dspark(), context=context), with_les(width, cache, stats))
        least, most = least_and_most(width)
        # at the end fewer are drafted than elsewhere
        if len(written.tokens) != tokens or max(written.widths) > most or min(written.widths[:-BLOCK]) < least:
            return f"{len(written.tokens)} tokens, widths {sorted(set(written.widths))}"
        # how often an adapted width is not 0 is for the machine to say
        if least > 0 and not 0 < sum(written.stood) < sum(written.widths):
            return f"{sum(written.stood)} of {sum(written.widths)} tokens stood"
        if SELF:
            return None
        return self.told(written, stats)

    def told(self, written, stats):
        """None, or how the statistics differ from what the driver saw."""
        told = speculation(stats)
        n = sum(width["steps"] for width in told["widths"])
        # a step is counted when the next one begins, and where no token can be drafted there is none
        if len(written.widths) - n not in (1, 2):
            return f"{n} steps in {len(written.widths)} passes"
        passes = list(zip(written.widths[:n], written.stood))
        for width, counted in enumerate(told["widths"]):
            stood = [s for w, s in passes if w == width]
            if (counted["steps"], counted["tokens"]) != (len(stood), len(stood) + sum(stood)):
                return f"width {width}: {counted} instead of {len(stood)} steps, {len(stood) + sum(stood)} tokens"
        unknown = n - sum(width["reads_known"] for width in told["widths"])
        if unknown > 0:
            return f"of {unknown} steps it is not known what they have read"
        for place, counted in enumerate(told["positions"]):
            verified = [s > place for w, s in passes if w > place and s >= place]
            if (counted["verified"], counted["stood"]) != (len(verified), sum(verified)):
                return f"place {place}: {counted} instead of {sum(verified)} of {len(verified)}"
        return None

    def jobs(self, cases, tokens, context=512):
        harness.in_parallel(self, [(f"{width} {cache}", lambda w=width, c=cache: self.job(w, c, tokens, context))
                                   for width, cache in cases])

    @unittest.skipIf(SELF, "LES only")
    def test_long_texts(self):
        self.jobs([("adaptive", "min"), (BLOCK, "min"), ("adaptive", "100%")], 2000, 2560)

    @unittest.skipIf(SELF, "LES only")
    def test_every_width_and_cache(self):
        middle = harness.middle_cache(models.quantized("Q4_K_M"))
        self.jobs([(0, "min"), *itertools.product(WIDTHS, ["min", middle, "100%"])], 300)

    @unittest.skipIf(SELF, "LES only")
    def test_longer_drafts(self):
        """Widths that the bundled drafter does not reach."""
        for width in [6, 7]:
            stats = self.tmp / f"{width}.json"
            written = speculate(PATCHED, self.tmp / "out", docmoe(300, *ngrams(2, 7)), with_les(width, "min", stats))
            self.assertEqual(max(written.widths), width)
            self.assertGreater(written.widths.count(width), 10)
            self.assertGreater(sum(written.stood), 0)
            self.assertLess(sum(written.stood), sum(written.widths))
            self.assertIsNone(self.told(written, stats))

    def test_decoded_again(self):
        """What was verified and rejected leaves nothing behind."""
        written = speculate(PATCHED, self.tmp / "out", docmoe(200, *dspark(), "--again", ROUNDING), with_les(BLOCK))
        self.assertEqual(written["again"][:2], [200, 0])
        self.assertGreater(sum(written.stood), 0)
        self.assertLess(sum(written.stood), sum(written.widths))

    def test_end_of_the_context(self):
        """No more is drafted than there is room for (the driver fails otherwise), and all of the room is used."""
        written = speculate(PATCHED, self.tmp / "out", docmoe(1000, *dspark(), context=256), with_les(BLOCK))
        self.assertGreater(len(written.tokens), 256 - 10)
        self.assertLess(written.widths[-1], BLOCK)


class AsStock(unittest.TestCase):
    """With as many tokens as the drafter drafts, the passes are stock's, and so are their logits."""

    def test_fixed_width(self):
        tmp = harness.temporary(self.addCleanup)

        def job(width):
            args = docmoe(200, *dspark(width))
            stock = speculate(STOCK, tmp / f"stock{width}", args)
            les = speculate(PATCHED, tmp / f"les{width}", args, with_les(width))
            if max(stock.widths) != width or not sum(stock.stood):
                return f"stock verifies {stock.widths}"
            if les.lines != stock.lines:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(stock.lines, les.lines))
                return f"pass {len(list(same))} of {len(stock.lines)} differs"
            return None

        harness.in_parallel(self, [(str(width), lambda width=width: job(width)) for width in [1, 3, 5]])

    @unittest.skipIf(SELF, "LES only")
    def test_les_off(self):
        """With LES off nothing is adapted."""
        tmp = harness.temporary(self.addCleanup)
        args = docmoe(100, *dspark())
        off = {"LLAMA_ARG_LES": "off", "LLAMA_ARG_LES_SPEC": "adaptive"}
        self.assertEqual(speculate(PATCHED, tmp / "off", args, off).lines, speculate(STOCK, tmp / "stock", args).lines)


class BadDrafters(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)

    def bad(self, way, *more, context=512):
        tokens = 1000 if context < 512 else 150
        args = docmoe(tokens, *dspark(), "--bad", way, "--again", ROUNDING, *more, context=context)
        written = speculate(PATCHED, self.tmp / way, args, with_les(BLOCK))
        rows, off, _ = written["again"]
        self.assertEqual((rows, off), (len(written.tokens), 0))
        return written

    def test_always_wrong(self):
        written = self.bad("wrong")
        self.assertEqual(sum(written.stood), 0)
        self.assertGreater(sum(written.widths), 5 * 100)

    def test_one_token_wrong(self):
        written = self.bad("spoiled")
        self.assertGreater(sum(written.stood), 0)
        self.assertLess(sum(written.stood), sum(written.widths))

    def test_tokens_that_are_none(self):
        """llama.cpp refuses the pass, and without the draft it is as if there had been none."""
        written = self.bad("nonsense")
        self.assertGreater(written["refused"][0], 10)
        self.assertGreater(sum(written.stood), 0)

    def test_longer_than_the_context(self):
        written = self.bad("too-long", context=256)
        self.assertGreater(written["refused"][0], 0)
        self.assertGreater(len(written.tokens), 256 - 10)

    def test_same_text(self):
        """Of a model whose weights have 32 bits, rounding decides no token."""
        args = speculating.args(models.arch_model("qwen35moe-moe"), 100, *ngrams(1, 7), "--noise", 24)
        expected = speculate(PATCHED, self.tmp / "off", args, with_les("off")).tokens
        for way in ["wrong", "spoiled", "nonsense", "too-long"]:
            for snapshots in [0, 7]:
                bad = [*args, "--snapshots", snapshots, "--bad", way]
                written = speculate(PATCHED, self.tmp / way, bad, with_les(7))
                rejected = sum(written.widths) - sum(written.stood) + written["back"][0]
                self.assertGreater(written["refused"][0] if way == "nonsense" else rejected, 0)
                self.assertEqual(written.tokens, expected, f"{way} {snapshots}")


def goes_back_as_a_whole(path):
    """Whether layers keep a state of all tokens so far."""
    names = {"deepseek4-moe", "minimax-01-moe", "qwen4exp-moe"}
    return path.stem in names or any(re.search("ssm_|shortconv", t.name) for t in gguf_mini.Header(path).tensors)


class States(unittest.TestCase):
    """Recurrent layers go back by snapshots of their states, or by a checkpoint from which all is computed again."""

    def check(self, snapshots, memory):
        """Of the models whose memory takes tokens back in this way there are several."""
        tmp = harness.temporary(self.addCleanup)
        paths = [path for path in models.arch_models() if goes_back_as_a_whole(path)]
        self.assertGreaterEqual(len(paths), 10)
        used = []

        def job(path):
            args = speculating.args(path, 160, *ngrams(1, 7), "--noise", 24, "--snapshots", snapshots,
                                    "--bad", "spoiled", "--again", ROUNDING_F32)
            written = speculate(PATCHED, tmp / path.stem, args, with_les(7))
            kind, rejected = written["memory"][0], sum(written.widths) - sum(written.stood)
            used.append(kind)
            if kind == "part" or kind == "full" and not written["back"][0] or kind == "snapshots" and not rejected:
                return f"memory {kind}, {written['back'][0]} checkpoints restored, {rejected} tokens rejected"
            if not sum(written.stood):
                return "nothing was accepted"
            rows, off, worst = written["again"]
            if (rows, off) != (len(written.tokens), 0):
                return f"{off} of {rows} rows are off, by up to {worst}"
            return None

        harness.in_parallel(self, [(path.stem, lambda path=path: job(path)) for path in paths])
        self.assertGreaterEqual(used.count(memory), 4, used)

    def test_snapshots(self):
        """As many as the longest draft needs."""
        self.check(7, "snapshots")

    def test_snapshots_of_some(self):
        """Of longer drafts a checkpoint is needed."""
        self.check(3, "snapshots")

    def test_checkpoints(self):
        self.check(0, "full")

    # a step that is computed anew yields a token more: the one after the target's own in place of the first rejected one
    @unittest.skipIf(SELF, "LES only")
    def test_tokens_after_a_checkpoint_are_counted(self):
        tmp = harness.temporary(self.addCleanup)
        args = speculating.args(models.arch_model("kimi-linear-moe"), 160, *ngrams(1, 7), "--noise", 24,
                                "--snapshots", 0, "--bad", "spoiled")
        written = speculate(PATCHED, tmp / "out", args, with_les(7, stats=tmp / "stats.json"))
        self.assertGreater(written["back"][0], 0)
        told = speculation(tmp / "stats.json")["widths"]
        n = sum(width["steps"] for width in told)
        self.assertEqual(sum(width["tokens"] for width in told), n + sum(written.stood[:n]))


class Distribution(unittest.TestCase):
    """What is drawn after a draft is distributed as if there had been none."""

    def deviations(self, temperature, draws, *more):
        """Of the first token, and of the second one where the draft's first token was drawn."""
        tmp = harness.temporary(self.addCleanup)
        args = docmoe(10, *dspark(), "--top-k", 0, "--top-p", 1, "--min-p", 0, "--seed", 1, "--draws", draws,
                      "--temp", temperature, *more)
        written = speculate(PATCHED, tmp / "out", args, with_les(1))
        counts = [dict(zip(map(int, line[::2]), map(int, line[1::2]))) for line in written.all("counts")]
        self.assertEqual(sum(counts[0].values()), draws)
        if not more:
            (draft,) = map(int, written["draft"])
            self.assertEqual(sum(counts[1].values()), counts[0][draft])
            self.assertGreater(counts[0][draft], 1000)
        chances = [speculating.softmax(row, temperature) for row in written.all("row")]
        return [speculating.deviation(c, p) for c, p in zip(counts, chances)]

    def test_first_and_second_token(self):
        def job(temperature):
            found = self.deviations(temperature, 100_000)
            return f"{found} standard deviations" if max(found) > speculating.Z else None

        harness.in_parallel(self, [(str(t), lambda t=t: job(t)) for t in [0.7, 1.3]])

    def test_a_wrong_rule_is_found(self):
        """One that accepts a tenth of the drafts without asking the target."""
        self.assertGreater(self.deviations(1.3, 20_000, "--wrong-rule")[0], speculating.Z)

    def test_deviation(self):
        """Draws are told from draws of a distribution that differs by a tenth in one token."""
        rng = random.Random(1)
        chances = [0.3, 0.2, 0.1, *[0.4 / 400] * 400]
        counts = {}
        for index in rng.choices(range(len(chances)), chances, k=20_000):
            counts[index] = counts.get(index, 0) + 1
        self.assertLess(abs(speculating.deviation(counts, chances)), 3)
        chances[0], chances[1] = 0.27, 0.23
        self.assertGreater(speculating.deviation(counts, chances), speculating.Z)


if __name__ == "__main__":
    unittest.main()
