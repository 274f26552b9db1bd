#!/usr/bin/env python3
"""Train the DSpark drafter of docmoe on a CPU. See README.md.

It learns from windows of the training text, and from texts that the target itself goes on with: at temperature 0 it
drafts those.
"""
import argparse
import math
import os
import time

import numpy
import torch

from draft import BLOCK, TAPS, Drafter, accepted, loss_of
from target import Target, continued

WINDOW, HELD = 256, 64
# no block starts before: there would be nothing to read
FIRST = 8


def windows(data, n, length, generator):
    at = torch.randint(0, len(data) - length, (n,), generator=generator)
    return torch.stack([data[i : i + length] for i in at])


def texts(target, data, n, generator, batch=192):
    """n texts of WINDOW tokens, and the target's states in them: half are what it goes on with greedily, a quarter
    what it goes on with by chance, a quarter the training text."""
    made, start = [], time.time()
    for i in range(math.ceil(n / batch)):
        temperature, prompt = [(0, 16 << i // 4 % 4), (0.8, 16 << i // 4 % 4), (0, 16 << i // 4 % 4), (0, WINDOW)][i % 4]
        made.append(continued(target, windows(data, batch, prompt, generator), WINDOW, TAPS, temperature, generator))
        print(f"{(i + 1) * batch} texts {time.time() - start:.0f} s", flush=True)
    return [torch.cat(x) for x in zip(*made)]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("target", help="docmoe-53m-f16.gguf")
    ap.add_argument("data", help="train.bin: tokens, uint16")
    ap.add_argument("out", help="the checkpoint to write, and to go on from when it exists")
    ap.add_argument("--texts", default="texts.pt", help="made when missing")
    ap.add_argument("--windows", type=int, default=3072, help="how many texts")
    ap.add_argument("--steps", type=int, default=800)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--anchors", type=int, default=20, help="blocks per window")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--threads", type=int, default=1)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    target = Target(a.target)
    data = torch.from_numpy(numpy.fromfile(a.data, dtype=numpy.uint16).astype(numpy.int64))
    if not os.path.exists(a.texts):
        torch.save(texts(target, data, a.windows, generator), a.texts)
    made = torch.load(a.texts)
    # greedy ones that are not trained on
    held, made = [x[:HELD].float() for x in made], [x[HELD:] for x in made]
    held[0] = held[0].long()

    drafter, first = Drafter(target.embedding), 0
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    vectors = [p for p in drafter.parameters() if p.ndim == 1]
    opt = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95),
                            weight_decay=0.05)
    if os.path.exists(a.out):
        saved = torch.load(a.out)
        first = saved["step"]
        drafter.load_state_dict(saved["drafter"])
        opt.load_state_dict(saved["opt"])
        generator.manual_seed(first)

    start, sum_loss, sum_hit = time.time(), 0.0, torch.zeros(BLOCK)
    for step in range(first, a.steps):
        for group in opt.param_groups:
            fall = 0.5 * (1 + math.cos(math.pi * step / a.steps))
            group["lr"] = a.lr * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * fall)
        pick = torch.randint(0, len(made[0]), (a.batch,), generator=generator)
        tokens, taps, final = (x[pick] for x in made)
        anchors = torch.randint(FIRST, WINDOW - BLOCK, (a.batch, a.anchors), generator=generator)
        loss, hit = loss_of(drafter, tokens, taps.float(), final.float(), anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        sum_loss, sum_hit = sum_loss + loss.item(), sum_hit + accepted(hit)
        if step % 20 == 19:
            shown = " ".join(f"{x:.3f}" for x in sum_hit / 20)
            print(f"step {step + 1} loss {sum_loss / 20:.3f} accepted {shown} {time.time() - start:.0f} s", flush=True)
            sum_loss, sum_hit = 0.0, torch.zeros(BLOCK)
        if step % 200 == 199 or step == a.steps - 1:
            with torch.no_grad():
                anchors = torch.arange(FIRST, WINDOW - BLOCK, 8).expand(HELD, -1)
                shown = " ".join(f"{x:.3f}" for x in accepted(loss_of(drafter, *held, anchors)[1]))
            print(f"held-out continuations: accepted {shown}", flush=True)
            torch.save({"step": step + 1, "drafter": drafter.state_dict(), "opt": opt.state_dict()}, a.out + ".tmp")
            os.replace(a.out + ".tmp", a.out)


if __name__ == "__main__":
    main()
