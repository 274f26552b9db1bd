"""The bundled DSpark drafter: its file has what llama.cpp needs, and the target accepts what it drafts."""

import functools
import sys
import unittest

import gguf_mini
import harness
import models
from harness import PATCHED, ROOT, SELF, STOCK
from test_tools import plain

sys.path.insert(0, str(ROOT / "tests/drafter"))
import measure  # noqa: E402

PROMPTS, TOKENS = 8, 64


class File(unittest.TestCase):
    def setUp(self):
        self.draft = gguf_mini.Header(measure.DRAFTER)
        self.target = gguf_mini.Header(models.BUNDLED)

    def test_fits_the_target(self):
        for key in ["tokens", "merges", "token_type", "eos_token_id"]:
            self.assertEqual(self.draft.kv[f"tokenizer.ggml.{key}"], self.target.kv[f"tokenizer.ggml.{key}"], key)
        self.assertEqual(self.draft.arch("embedding_length"), self.target.arch("embedding_length"))
        # of these it reads the inputs: there is none after the last layer
        self.assertLess(max(self.draft.arch("target_layers")), self.target.arch("block_count"))

    def test_is_dspark(self):
        self.assertEqual(self.draft.kv["general.architecture"], "dflash")
        self.assertGreaterEqual(self.draft.arch("block_size"), 4)
        self.assertTrue(self.draft.arch("sample_from_anchor"))
        self.assertTrue(self.draft.arch("has_confidence_head"))
        width, vocabulary = self.draft.arch("embedding_length"), len(self.draft.kv["tokenizer.ggml.tokens"])
        dims = {t.name: t.dims for t in self.draft.tensors}
        rank = dims["markov_w1.weight"][0]
        self.assertEqual(dims["markov_w1.weight"], (rank, vocabulary))
        self.assertEqual(dims["markov_w2.weight"], (rank, vocabulary))
        self.assertEqual(dims["conf_proj.weight"], (width + rank, 1))
        self.assertEqual(dims["fc.weight"], (width * len(self.draft.arch("target_layers")), width))

    def test_is_small(self):
        self.assertLessEqual(measure.DRAFTER.stat().st_size, 8 << 20)


@functools.cache
def drafted(les=False, most=4, p_min=0.0, drafter=measure.DRAFTER):
    """The texts that llama-server writes, and its counts."""
    # as many are verified as without LES: another size of batch is rounded otherwise
    with_les = {**harness.les("min"), "LLAMA_ARG_LES_SPEC": str(most)}
    exe, env = (PATCHED.tool("llama-server"), with_les) if les else plain("llama-server")
    args = ["-m", models.quantized("Q4_K_M"), "-t", 2, "--no-repack", *measure.drafting(drafter, most, p_min)]
    with measure.server(exe, *args, env={**harness.clean_environment(), **env}) as server:
        texts = [server.complete(prompt, TOKENS) for prompt in measure.prompts_of(models.text(), PROMPTS)]
        return texts, server.counts()


def rates(count):
    """Of a block's first token, and of all that were drafted: how many were accepted."""
    return count[0] / count["blocks"], sum(count[k] for k in range(4)) / count["drafted"]


@unittest.skipIf(SELF and not STOCK.has("llama-server"), "stock was built without llama-server")
class Drafts(unittest.TestCase):
    def test_target_accepts(self):
        _, count = drafted()
        self.assertGreater(count["blocks"], 0)
        self.assertGreater(rates(count)[0], 0.6)
        accepted = [count[k] for k in range(4)]
        self.assertEqual(accepted, sorted(accepted, reverse=True))
        self.assertGreater(accepted[3], 0)

    def test_reads_the_states_of_the_target(self):
        """One that sees none of them drafts far worse."""
        blind = harness.temporary(self.addCleanup) / "blind.gguf"
        data = bytearray(measure.DRAFTER.read_bytes())
        (norm,) = (t for t in gguf_mini.Header(measure.DRAFTER).tensors if t.name == "enc.output_norm.weight")
        data[norm.offset:norm.offset + 4 * norm.dims[0]] = bytes(4 * norm.dims[0])
        blind.write_bytes(data)
        self.assertGreater(rates(drafted()[1])[0], 1.5 * rates(drafted(drafter=blind)[1])[0])

    def test_confidence_tells_what_is_accepted(self):
        self.assertGreater(rates(drafted(p_min=0.7)[1])[1], rates(drafted()[1])[1] + 0.1)

    def test_as_without_les(self):
        self.assertEqual(drafted(les=True), drafted())


if __name__ == "__main__":
    unittest.main()
