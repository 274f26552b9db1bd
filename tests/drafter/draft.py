"""The DSpark drafter in torch, as llama.cpp's architecture `dflash` computes it, and its loss."""
import torch
import torch.nn.functional as F

from target import HEAD, HEADS, KV_HEADS, heads, rms, rope

# the target's layers whose inputs it reads
TAPS = [2, 5, 7]
LAYERS, FF, RANK, BLOCK, MASK = 2, 768, 64, 5, 0
# of the loss, from one position of the block to the next
FALL = 0.8


class Drafter(torch.nn.Module):
    """Drafts the BLOCK tokens after an anchor token from it, and from the target's states before it.

    Embedding and output matrix are the target's: `embedding` [vocabulary, width].
    """

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        vocabulary, width = embedding.shape
        # drawn for the inputs' sizes; what is added to the stream starts small
        matrix = lambda rows, cols, scale=1.0: torch.nn.Parameter(torch.randn(rows, cols) * scale * cols**-0.5)
        ones = lambda n: torch.nn.Parameter(torch.ones(n))
        p = {"fc": matrix(width, len(TAPS) * width), "enc.output_norm": ones(width), "output_norm": ones(width)}
        for il in range(LAYERS):
            layer = {
                "attn_norm": ones(width), "attn_q": matrix(HEADS * HEAD, width), "attn_k": matrix(KV_HEADS * HEAD, width),
                "attn_v": matrix(KV_HEADS * HEAD, width), "attn_q_norm": ones(HEAD), "attn_k_norm": ones(HEAD),
                "attn_output": matrix(width, HEADS * HEAD, 0.1), "ffn_norm": ones(width), "ffn_gate": matrix(FF, width),
                "ffn_up": matrix(FF, width), "ffn_down": matrix(width, FF, 0.1),
            }
            p |= {f"blk.{il}.{name}": x for name, x in layer.items()}
        p |= {"markov_w1": matrix(vocabulary, RANK), "markov_w2": matrix(vocabulary, RANK, 0.1)}
        p |= {"conf_proj": matrix(1, width + RANK)}
        # a name in a module has no dots
        self.p = torch.nn.ParameterDict({name.replace(".", "/"): x for name, x in p.items()})
        self.conf_bias = torch.nn.Parameter(torch.zeros(1))

    def weight(self, name):
        return self.p[name.replace(".", "/")]

    def forward(self, taps, tokens, anchors):
        """taps [batch, time, width of all TAPS], tokens [batch, time], anchors [batch, n] -> (logits, confidence).

        Both are [batch, n, BLOCK, ..]: at k, of the token k + 1 after the anchor, given the true tokens before it.
        The confidence is before the sigmoid.
        """
        w = self.weight
        batch, time = tokens.shape
        n = anchors.shape[1]
        steps = torch.arange(BLOCK)
        position = anchors[:, :, None] + steps
        read = rms(taps @ w("fc").t(), w("enc.output_norm"))
        # what is at the anchor and after it is not known yet
        unknown = (torch.arange(time) >= anchors[:, :, None]).view(batch, 1, n, 1, time)
        later = steps > steps[:, None]
        ids = torch.full((batch, n, BLOCK), MASK)
        ids[:, :, 0] = tokens.gather(1, anchors)
        x = self.embedding[ids]

        def keys_values(il, source, at):
            k = heads(F.linear(source, w(f"blk.{il}.attn_k")), KV_HEADS)
            v = heads(F.linear(source, w(f"blk.{il}.attn_v")), KV_HEADS)
            k = rope(rms(k, w(f"blk.{il}.attn_k_norm")), at.float())
            return (z.repeat_interleave(HEADS // KV_HEADS, -2) for z in (k, v))

        for il in range(LAYERS):
            h = rms(x, w(f"blk.{il}.attn_norm"))
            q = rope(rms(heads(F.linear(h, w(f"blk.{il}.attn_q")), HEADS), w(f"blk.{il}.attn_q_norm")), position.float())
            k, v = keys_values(il, h, position)
            past_k, past_v = keys_values(il, read, torch.arange(time).expand(batch, time))
            # of the context [batch, head, n, BLOCK, time], and in the block itself [batch, head, n, BLOCK, BLOCK]
            q, k, v = (z.permute(0, 3, 1, 2, 4) for z in (q, k, v))
            past_k, past_v = past_k.transpose(1, 2), past_v.transpose(1, 2)
            far = (q.flatten(2, 3) @ past_k.transpose(-1, -2)).view(batch, HEADS, n, BLOCK, time)
            near = q @ k.transpose(-1, -2)
            scores = torch.cat([far.masked_fill(unknown, -1e9), near.masked_fill(later, -1e9)], -1) * HEAD**-0.5
            far, near = torch.softmax(scores, -1).split([time, BLOCK], -1)
            attended = (far.flatten(2, 3) @ past_v).view_as(q) + near @ v
            x = x + F.linear(attended.permute(0, 2, 3, 1, 4).flatten(3), w(f"blk.{il}.attn_output"))
            h = rms(x, w(f"blk.{il}.ffn_norm"))
            h = F.silu(F.linear(h, w(f"blk.{il}.ffn_gate"))) * F.linear(h, w(f"blk.{il}.ffn_up"))
            x = x + F.linear(h, w(f"blk.{il}.ffn_down"))

        h = rms(x, w("output_norm"))
        before = w("markov_w1")[blocks(tokens, anchors)]
        logits = F.linear(h, self.embedding) + F.linear(before, w("markov_w2"))
        # only reads them: the drafts are not bent for it
        confidence = F.linear(torch.cat([h, before], -1).detach(), w("conf_proj")) + self.conf_bias
        return logits, confidence.squeeze(-1)


def blocks(x, anchors):
    """x [batch, time, ...] -> [batch, n, BLOCK, ...], what it has at each anchor and after it."""
    batch = torch.arange(len(x))[:, None, None]
    return x[batch, anchors[:, :, None] + torch.arange(BLOCK)]


def loss_of(drafter, tokens, taps, final, anchors):
    """The loss, and whether each drafted token is the target's greedy choice [batch, n, BLOCK].

    `final` [batch, time, width] is what the target applies its output matrix to.
    """
    wanted = F.linear(blocks(final, anchors), drafter.embedding)
    logits, confidence = drafter(taps, tokens, anchors)
    logs, best = torch.log_softmax(logits, -1), wanted.argmax(-1)
    # half for the target's distribution, half for its first choice
    soft = -(torch.softmax(wanted, -1) * logs).sum(-1)
    hard = -logs.gather(-1, best[..., None]).squeeze(-1)
    fall = FALL ** torch.arange(BLOCK)
    hit = logits.detach().argmax(-1) == best
    drafts = ((soft + hard) / 2 * fall).mean() / fall.mean()
    return drafts + F.binary_cross_entropy_with_logits(confidence, hit.float()), hit


def accepted(hit):
    """How often the first 1, 2, .. tokens of a block are all accepted, at temperature 0."""
    return hit.float().cumprod(-1).flatten(0, -2).mean(0)
