"""What the tests of speculation share: the driver, what it wrote, and whether draws are of a distribution."""

import math
import re
import sys

import harness
import models
from harness import HERE, PATCHED, ROOT

sys.path.insert(0, str(ROOT / "tests/drafter"))
import measure  # noqa: E402

BLOCK = 5  # tokens that the bundled drafter drafts at once
# of logits computed in batches of other sizes, as a part of their range: weights of 4 bits, and of 32
ROUNDING, ROUNDING_F32 = 0.02, 1e-3
Z = 4.753  # a normal deviate is larger once in a million


class Written:
    """What the driver wrote."""

    def __init__(self, path):
        self.lines = [line.split() for line in path.read_text().splitlines()]
        passes = [line[1:] for line in self.lines if line[0] == "pass"]
        self.widths = [int(drafted) for drafted, *_ in passes]
        self.stood = [int(stood) for _, stood, *_ in passes]
        self.sums = [sum for _, _, sum, *_ in passes]
        self.tokens = [int(token) for _, _, _, *tokens in passes for token in tokens]

    def __getitem__(self, name):
        """The numbers of the only line of this name."""
        (values,) = self.all(name)
        return values

    def all(self, name):
        return [[float(v) if re.fullmatch(r"[-+.e\d]+", v) else v for v in line[1:]]
                for line in self.lines if line[0] == name]


def driver(tree):
    return tree.program("speculate", [HERE / "speculate.cpp"], ["llama-common"], ["common", "vendor"])


def dspark(most=BLOCK, drafter=measure.DRAFTER):
    return ["-md", drafter, "--spec-type", "draft-dspark", "--spec-draft-n-max", most]


def ngrams(found, most):
    """A drafter that goes on as the text did after the same tokens."""
    return ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", found, "--spec-ngram-simple-size-m", most]


def args(model, tokens, *more, context=512):
    return ["-m", model, "-n", tokens, "-c", context, "-b", 256, "-t", 1, "--no-repack", "--temp", 0,
            "-p", "The function returns", *more]


def docmoe(tokens, *more, context=512):
    return args(models.quantized("Q4_K_M"), tokens, *more, context=context)


def speculate(tree, out, arguments, env=None, expect=0):
    """Runs the driver. Returns what it wrote, or if it ends otherwise, the process."""
    done = harness.run([driver(tree), "-o", out, *arguments], env, timeout=300)
    if done.returncode != expect:
        raise harness.Failed(f"expected exit code {expect}: {done.shown}")
    return Written(out) if expect == 0 else done


def with_les(width, cache="min", stats=None):
    env = {**harness.les(cache), "LLAMA_ARG_LES_SPEC": str(width)}
    return {**env, "LLAMA_ARG_LES_STATS": str(stats)} if stats else env


def speculation(stats):
    """What the statistics in a file tell of speculation."""
    return harness.read_stats(stats)["speculation"]


def steps(stats):
    """How many steps verified 0, 1, .. tokens."""
    return [width["steps"] for width in speculation(stats)["widths"]]


def softmax(logits, temperature):
    most = max(logits)
    weights = [math.exp((x - most) / temperature) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def deviation(counts, probabilities):
    """By how many standard deviations the counts, by index, differ more from a distribution than draws mostly do."""
    n = sum(counts.values())
    cells, rare = [], [0.0, 0.0]
    for index, p in enumerate(probabilities):
        seen, expected = counts.get(index, 0), n * p
        if expected < 5:
            rare[0] += seen
            rare[1] += expected
        else:
            cells.append((seen, expected))
    if rare[1] > 0:
        cells.append(tuple(rare))
    chi2 = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty: the cube root of chi square is about normal
    spread = 2 / (9 * freedom)
    return ((chi2 / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread)
