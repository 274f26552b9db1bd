"""The models that the tests run: made once with stock tools, kept under build/test-models."""

import array
import functools
import hashlib
import os
import random
import shutil
import struct
from pathlib import Path

import gguf_mini
import harness
from harness import Failed, PATCHED, ROOT, STOCK, WORK

DIR = WORK / "test-models"
BUNDLED = Path(os.environ.get("LES_TEST_MODEL", ROOT / "tests/data/docmoe-53m-q4_k_m.gguf"))
QUANTS = ["Q4_K_M", "Q8_0", "IQ4_XS", "MXFP4_MOE", "F16"]
SEED = 1234
# its graph has no experts, though its file has
UNUSED = {"refact-moe"}


def made(path, make):
    """Makes a file or directory unless it is there. A half made one is never taken for a whole one."""
    if not path.exists():
        partial = path.parent / f"partial-{os.getpid()}-{path.name}"
        shutil.rmtree(partial, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(path)
    return path


def stock_tool(name, *args):
    done = harness.run([STOCK.tool(name), *args])
    if done.returncode != 0:
        raise Failed(done.shown)


@functools.cache
def every_arch():
    """Random models of all architectures that test-llama-archs can write."""
    def make(partial):
        partial.mkdir()
        stock_tool("test-llama-archs", "-o", partial, "-s", SEED)

    return sorted(made(DIR / f"archs-{SEED}", make).glob("*.gguf"))


@functools.cache
def arch_models():
    """Those with routed experts."""
    return [path for path in every_arch() if gguf_mini.Header(path).experts()]


def arch_model(name):
    for path in every_arch():
        if path.stem == name:
            return path
    raise Failed(f"test-llama-archs wrote no {name}")


@functools.cache
def quantized(kind):
    """The small real MoE in another type."""
    if not BUNDLED.is_file():
        raise Failed(f"{BUNDLED} is missing, set LES_TEST_MODEL")
    directory = DIR / f"{BUNDLED.stem}-{hashlib.sha256(BUNDLED.read_bytes()).hexdigest()[:12]}"
    return made(directory / f"{kind}.gguf",
                lambda partial: stock_tool("llama-quantize", "--allow-requantize", BUNDLED, partial, kind, 2))


@functools.cache
def with_experts(kind, experts):
    """The small real MoE in one type, and its experts in another."""
    override = [f"{part}_exps={experts}" for part in ["ffn_up", "ffn_gate", "ffn_down"]]
    flags = [flag for o in override for flag in ("--tensor-type", o)]
    return made(quantized(kind).with_name(f"{kind}-{experts}.gguf"),
                lambda partial: stock_tool("llama-quantize", "--allow-requantize", *flags, BUNDLED, partial, kind, 2))


@functools.cache
def first_layers(kind, n):
    """The small real MoE in another type and without its later layers: what little remains is quickly requantized."""
    whole = quantized(kind)
    header, data = gguf_mini.Header(whole), whole.read_bytes()
    kept = [t for t in header.tensors if not t.name.startswith("blk.") or int(t.name.split(".")[1]) < n]

    def make(partial):
        first = header.tensors[0].name.encode()
        kvs = bytearray(data[24:data.index(struct.pack("<Q", len(first)) + first)])
        # a key is followed by four bytes of its kind
        key = f"{header.kv['general.architecture']}.block_count".encode()
        struct.pack_into("<I", kvs, kvs.index(key) + len(key) + 4, n)
        infos, body = b"", b""
        for t in kept:
            infos += struct.pack("<Q", len(t.name)) + t.name.encode()
            infos += struct.pack(f"<I{len(t.dims)}QIQ", len(t.dims), *t.dims, t.type, len(body))
            body += data[t.offset:t.offset + t.size]
            body += bytes(-len(body) % gguf_mini.ALIGNMENT)
        head = data[:8] + struct.pack("<QQ", len(kept), len(header.kv)) + kvs + infos
        partial.write_bytes(head + bytes(-len(head) % gguf_mini.ALIGNMENT) + body)

    return made(whole.with_name(f"{kind}-{n}-layers.gguf"), make)


@functools.cache
def sharded(kind="Q4_K_M"):
    """The same in three files; the path of the first."""
    whole = quantized(kind)
    n = len(gguf_mini.Header(whole).tensors)

    def make(partial):
        partial.mkdir()
        if PATCHED.has("llama-gguf-split"):
            split = PATCHED.tool("llama-gguf-split")
        else:
            split = STOCK.program("gguf-split", [STOCK.src / "tools/gguf-split/gguf-split.cpp"], ["llama-common"],
                                  ["common", "vendor"])
        done = harness.run([split, "--split", "--split-max-tensors", -(-n // 3), whole, partial / kind])
        if done.returncode != 0:
            raise Failed(done.shown)

    shards = sorted(made(whole.with_name(f"{kind}-shards"), make).glob("*.gguf"))
    if len(shards) != 3:
        raise Failed(f"{len(shards)} shards instead of 3: {shards}")
    return shards[0]


@functools.cache
def lora(kind="Q4_K_M"):
    """A random adapter of rank 4 for attention and experts, small enough to leave the logits finite."""
    header = gguf_mini.Header(quantized(kind))
    rng = random.Random(SEED)

    def tensor(*dims):
        n = 1
        for d in dims:
            n *= d
        return dims, array.array("f", (rng.uniform(-0.05, 0.05) for _ in range(n))).tobytes()

    tensors = {}
    for t in header.tensors:
        if t.name.endswith(("attn_q.weight", "attn_v.weight", "exps.weight")):
            n_in, n_out, *n_expert = t.dims
            tensors[f"{t.name}.lora_a"] = tensor(n_in, 4, *n_expert)
            tensors[f"{t.name}.lora_b"] = tensor(4, n_out, *n_expert)
    kv = {"general.type": "adapter", "general.architecture": header.kv["general.architecture"],
          "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    return made(quantized(kind).with_name("lora.gguf"), lambda partial: gguf_mini.write(partial, kv, tensors))


def text():
    """Some prose for perplexity and the importance matrix."""
    path = ROOT / "tests/data/python-guides.txt"
    return path if path.is_file() else STOCK.src / "README.md"
