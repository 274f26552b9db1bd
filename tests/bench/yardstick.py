#!/usr/bin/env python3
"""Write a GGUF of the 35B-A3B shape (arch qwen35moe: 40 layers, 256 experts, top-8) with seeded random weights.

The weights are noise, the *routing* is not: three knobs give it the statistics measured on real models of this
shape, so that caches and predictors meet a realistic load (see README.md for both sides):
  --rho, --topic  how alike the router inputs of two tokens, and of two tokens of one topic, are
  --stay          how long sampled text stays in a topic (sample with temp 1 and no top-k/top-p/min-p)
  --alpha         how much each sublayer turns the residual stream, hence how well a layer predicts the next
Needs: pip install numpy gguf. 20.5 GB at the default size; --layers 8 gives 4.2 GB.
"""
import argparse
import numpy as np
import gguf

Q = gguf.GGMLQuantizationType
ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("out")
ap.add_argument("--layers", type=int, default=40)
ap.add_argument("--experts", type=int, default=256)
ap.add_argument("--used", type=int, default=8)
ap.add_argument("--embd", type=int, default=2048)
ap.add_argument("--ff", type=int, default=512)
ap.add_argument("--vocab", type=int, default=32768)
ap.add_argument("--rho", type=float, default=0.4)
ap.add_argument("--topic", type=float, default=0.3)
ap.add_argument("--topics", type=int, default=64)
ap.add_argument("--stay", type=float, default=0.98)
ap.add_argument("--alpha", type=float, default=0.11)
ap.add_argument("--seed", type=int, default=1)
a = ap.parse_args()

rng = np.random.default_rng(a.seed)
d, L, E, ff, V = a.embd, a.layers, a.experts, a.ff, a.vocab
growth = 1 + 2 * a.alpha**2  # of the residual stream's power, per layer


def normal(*shape, std=1.0):
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def q4_k(rows, cols, std):
    n = rows * cols // 256
    b = np.empty((n, 144), np.uint8)
    scale = np.float16(std / (32 * 4.61))
    b[:, 0:2] = np.frombuffer(scale.tobytes(), np.uint8)
    b[:, 2:4] = np.frombuffer(np.float16(scale * 7.5).tobytes(), np.uint8)
    b[:, 4:12], b[:, 12:16] = 32 | (2 << 6), 0  # all sub-block scales and minimums are 32
    b[:, 16:] = np.frombuffer(rng.bytes(n * 128), np.uint8).reshape(n, 128)
    return b.reshape(rows, -1)


def q6_k(rows, cols, std):
    n = rows * cols // 256
    b = np.empty((n, 210), np.uint8)
    b[:, :192] = np.frombuffer(rng.bytes(n * 192), np.uint8).reshape(n, 192)
    b[:, 192:208] = 32
    b[:, 208:210] = np.frombuffer(np.float16(std / (32 * 18.5)).tobytes(), np.uint8)
    return b.reshape(rows, -1)


def q8_0(x):
    r, c = x.shape
    y = x.reshape(r, c // 32, 32)
    s = np.abs(y).max(-1, keepdims=True) / 127
    s[s == 0] = 1
    out = np.empty((r, c // 32, 34), np.uint8)
    out[..., :2] = s.astype(np.float16).view(np.uint8).reshape(r, c // 32, 2)
    out[..., 2:] = np.round(y / s).astype(np.int8).view(np.uint8)
    return out.reshape(r, -1)


def ones(n):
    return np.ones(n, np.float32)


BLOCK_BYTES = {Q.Q4_K: 144, Q.Q6_K: 210}
MAKE = {Q.Q4_K: q4_k, Q.Q6_K: q6_k}


def layer(il):
    """Yield (name, data or (rows, cols, std) for a routed-expert tensor, type)."""
    res, s = np.sqrt(growth**il), 1 / np.sqrt(d)
    down = 2.0 * a.alpha * res / np.sqrt(ff)
    yield "attn_norm.weight", ones(d), Q.F32
    yield "post_attention_norm.weight", ones(d), Q.F32
    if (il + 1) % 4 == 0:
        yield "attn_q.weight", q4_k(2 * 16 * 256, d, s), Q.Q4_K
        yield "attn_k.weight", q4_k(512, d, s), Q.Q4_K
        yield "attn_v.weight", q6_k(512, d, s), Q.Q6_K
        yield "attn_output.weight", q4_k(d, 4096, 4 * a.alpha * res / 64), Q.Q4_K
        yield "attn_q_norm.weight", ones(256), Q.F32
        yield "attn_k_norm.weight", ones(256), Q.F32
    else:
        yield "attn_qkv.weight", q4_k(8192, d, s), Q.Q4_K
        yield "attn_gate.weight", q4_k(4096, d, s), Q.Q4_K
        yield "ssm_conv1d.weight", normal(8192, 4, std=0.5), Q.F32
        yield "ssm_dt.bias", normal(32) - 2, Q.F32
        yield "ssm_a", -np.exp(normal(32)), Q.F32
        yield "ssm_beta.weight", q8_0(normal(32, d, std=s)), Q.Q8_0
        yield "ssm_alpha.weight", q8_0(normal(32, d, std=s)), Q.Q8_0
        yield "ssm_norm.weight", ones(128), Q.F32
        yield "ssm_out.weight", q4_k(d, 4096, 1.7 * a.alpha * res / 64), Q.Q4_K
    yield "ffn_gate_inp.weight", normal(E, d, std=2 * s), Q.F32
    yield "ffn_gate_inp_shexp.weight", normal(d, std=s), Q.F32
    yield "ffn_gate_shexp.weight", q4_k(ff, d, s), Q.Q4_K
    yield "ffn_up_shexp.weight", q4_k(ff, d, s), Q.Q4_K
    yield "ffn_down_shexp.weight", q6_k(d, ff, down), Q.Q6_K
    yield "ffn_gate_exps.weight", (ff, d, s), Q.Q4_K
    yield "ffn_up_exps.weight", (ff, d, s), Q.Q4_K
    yield "ffn_down_exps.weight", (d, ff, 1.6 * down), Q.Q6_K if il % 2 else Q.Q4_K


def byte_tokens():
    """The 256 characters that byte-level BPE spells bytes with, so that any text can be tokenized."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(c).encode() for c in sorted(keep + [256 + i for i in range(256 - len(keep))])]


w = gguf.GGUFWriter(a.out, "qwen35moe")
for key, value in {
    "block_count": L, "context_length": 32768, "embedding_length": d, "attention.head_count": 16,
    "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
    "rope.dimension_count": 64, "expert_count": E, "expert_used_count": a.used,
    "expert_feed_forward_length": ff, "expert_shared_feed_forward_length": ff, "ssm.conv_kernel": 4,
    "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
    "full_attention_interval": 4,
}.items():
    w.add_uint32(f"qwen35moe.{key}", value)
w.add_name("synthetic 35B-A3B shape")
w.add_rope_freq_base(1e7)
w.add_layer_norm_rms_eps(1e-6)
w.add_array("qwen35moe.rope.dimension_sections", [11, 11, 10, 0])
w.add_tokenizer_model("gpt2")
w.add_tokenizer_pre("qwen2")
w.add_token_list(byte_tokens() + [f"<{i}>".encode() for i in range(256, V)])
w.add_token_types([1] * V)
w.add_token_merges(["a b"])
w.add_eos_token_id(V - 1)
w.add_add_bos_token(False)

topics, of = normal(a.topics, d), rng.integers(0, a.topics, V)
embd = np.sqrt(a.rho) * normal(d) + np.sqrt(a.topic) * topics[of] + np.sqrt(1 - a.rho - a.topic) * normal(V, d)
beta = np.log(a.stay / (1 - a.stay) * (a.topics - 1)) / np.sqrt(d * a.topic / growth**L)
tensors = [
    ("token_embd.weight", q8_0(embd), Q.Q8_0),
    ("output.weight", q8_0((beta * topics[of] + normal(V, d)) / np.float32(np.sqrt(d))), Q.Q8_0),
    ("output_norm.weight", ones(d), Q.F32),
]
for il in range(L):
    tensors += [(f"blk.{il}.{n}", x, t) for n, x, t in layer(il)]
for name, x, t in tensors:
    if isinstance(x, tuple):
        shape = (E, x[0], x[1] // 256 * BLOCK_BYTES[t])
        w.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=t)
    else:
        x = np.ascontiguousarray(x)
        w.add_tensor_info(name, x.shape, x.dtype, x.nbytes, raw_dtype=t)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_ti_data_to_file()
f = w.fout[0]


def pad():
    f.write(b"\0" * (-f.tell() % 32))


pad()
for name, x, t in tensors:
    if isinstance(x, tuple):
        for _ in range(E):
            f.write(MAKE[t](*x).tobytes())
    else:
        f.write(np.ascontiguousarray(x).tobytes())
    pad()
f.close()
