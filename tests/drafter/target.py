"""The target in torch: docmoe (qwen3moe), as llama.cpp computes it, for inference only."""
import gguf
import numpy
import torch
import torch.nn.functional as F

HEADS, KV_HEADS, HEAD, USED, THETA, EPS = 4, 2, 64, 4, 10000.0, 1e-6


def rms(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rope(x, position):
    """NeoX rotation of x [..., heads, HEAD]; position has the shape of x without its last two axes."""
    angle = position[..., None, None] * THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def heads(x, n):
    return x.view(*x.shape[:-1], n, HEAD)


class Target:
    """The model of a GGUF file."""

    def __init__(self, path):
        self.t = {}
        for tensor in gguf.GGUFReader(path).tensors:
            x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
            # rows of a GGUF matrix are outputs
            matrix = x.ndim > 1 and tensor.name != "token_embd.weight"
            self.t[tensor.name.removesuffix(".weight")] = x.transpose(-1, -2).contiguous() if matrix else x
        self.embedding = self.t["token_embd"]
        self.layers = 1 + max(int(name.split(".")[1]) for name in self.t if name.startswith("blk."))

    def moe(self, t, x):
        """x [tokens, width] through the experts that the router picks."""
        weight, pick = torch.softmax(x @ t("ffn_gate_inp"), -1).topk(USED, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        by_expert, order = pick.flatten().sort(stable=True)
        token, out, start = order // USED, torch.empty(len(order), x.shape[1]), 0
        inputs = x[token]
        gate, up, down = t("ffn_gate_exps"), t("ffn_up_exps"), t("ffn_down_exps")
        for e, n in enumerate(torch.bincount(by_expert, minlength=len(gate)).tolist()):
            if n:
                x_e = inputs[start : start + n]
                out[start : start + n] = (F.silu(x_e @ gate[e]) * (x_e @ up[e])) @ down[e]
                start += n
        return torch.zeros_like(x).index_add_(0, token, out * weight.flatten()[order, None])

    @torch.no_grad()
    def run(self, ids, cache=None, past=0):
        """ids [batch, time] -> the inputs of all layers, and what the output matrix is applied to.

        `cache` [layers, 2, batch, KV_HEADS, most, HEAD] has the keys and values of the `past` tokens before; those of
        these are added.
        """
        batch, time = ids.shape
        if cache is None:
            cache = self.cache(batch, time)
        position = torch.arange(past, past + time).float().expand(batch, time)
        hidden = torch.arange(past + time) > torch.arange(past, past + time)[:, None]
        x, inputs = self.embedding[ids], []
        for il in range(self.layers):
            inputs.append(x)
            t = lambda name: self.t[f"blk.{il}.{name}"]
            h = rms(x, t("attn_norm"))
            q = rope(rms(heads(h @ t("attn_q"), HEADS), t("attn_q_norm")), position)
            k = rope(rms(heads(h @ t("attn_k"), KV_HEADS), t("attn_k_norm")), position)
            v = heads(h @ t("attn_v"), KV_HEADS)
            for z, kept in ((k, cache[il, 0]), (v, cache[il, 1])):
                kept[:, :, past : past + time] = z.transpose(1, 2)
            k, v = cache[il, :, :, :, : past + time]
            # the query heads that share a key stand one below the other
            q = q.transpose(1, 2).reshape(batch, KV_HEADS, -1, HEAD)
            scores = (q @ k.transpose(-1, -2)).view(batch, HEADS, time, -1) * HEAD**-0.5
            scores = torch.softmax(scores.masked_fill(hidden, -1e9), -1)
            attended = (scores.view(batch, KV_HEADS, -1, past + time) @ v).view(batch, HEADS, time, HEAD)
            x = x + attended.transpose(1, 2).flatten(2) @ t("attn_output")
            x = x + self.moe(t, rms(x, t("ffn_norm")).flatten(0, 1)).view_as(x)
        return inputs, rms(x, self.t["output_norm"])

    def cache(self, batch, most):
        return torch.zeros(self.layers, 2, batch, KV_HEADS, most, HEAD)

    def logits(self, final):
        return final @ self.embedding.t()


def continued(target, prompts, length, taps, temperature, generator):
    """prompts [batch, time] -> [batch, length], what the target goes on with; greedy at temperature 0.

    Also in F16 the inputs of the layers `taps`, one beside the other, and what the output matrix is applied to.
    """
    cache, ids, new, read, finals = target.cache(len(prompts), length), prompts, prompts, [], []
    while True:
        inputs, final = target.run(new, cache, ids.shape[1] - new.shape[1])
        read.append(torch.cat([inputs[i] for i in taps], -1).half())
        finals.append(final.half())
        if ids.shape[1] == length:
            return ids, torch.cat(read, 1), torch.cat(finals, 1)
        logits = target.logits(final[:, -1])
        if temperature:
            new = torch.softmax(logits / temperature, -1).multinomial(1, generator=generator)
        else:
            new = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], 1)
