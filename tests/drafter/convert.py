#!/usr/bin/env python3
"""Write a checkpoint of train.py as the GGUF that llama.cpp loads (architecture `dflash`). See README.md.

Matrices become Q8_0, what is small stays F32. The tokenizer is copied from the target; embedding and output matrix are
not: llama.cpp takes the target's.
"""
import argparse

import gguf
import torch

from draft import BLOCK, FF, LAYERS, MASK, TAPS, Drafter
from target import EPS, HEAD, HEADS, KV_HEADS, THETA, Target


def copy_tokenizer(writer, path):
    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("target", help="docmoe-53m-f16.gguf")
    ap.add_argument("checkpoint")
    ap.add_argument("out")
    a = ap.parse_args()
    embedding = Target(a.target).embedding
    drafter = Drafter(embedding)
    drafter.load_state_dict(torch.load(a.checkpoint)["drafter"])

    w = gguf.GGUFWriter(a.out, "dflash")
    w.add_name("docmoe DSpark drafter")
    w.add_license("(MIT OR Apache-2.0) AND PSF-2.0")
    w.add_block_count(LAYERS)
    w.add_context_length(2048)
    w.add_embedding_length(embedding.shape[1])
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_rope_freq_base(THETA)
    w.add_layer_norm_rms_eps(EPS)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_block_size(BLOCK)
    w.add_target_layers(TAPS)
    w.add_causal_attention(True)
    w.add_sample_from_anchor(True)
    w.add_has_confidence_head(True)
    copy_tokenizer(w, a.target)
    w.add_mask_token_id(MASK)

    tensors = {name.replace("/", ".") + ".weight": x for name, x in drafter.p.items()}
    tensors["conf_proj.bias"] = drafter.conf_bias
    for name, x in tensors.items():
        x = x.detach().numpy()
        if x.ndim > 1 and not name.startswith("conf_proj"):
            q8 = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(name, gguf.quants.quantize(x, q8), raw_dtype=q8)
        else:
            w.add_tensor(name, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
