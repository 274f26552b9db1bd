#!/usr/bin/env python3
"""How many of the drafter's tokens llama.cpp accepts, by position, on texts that neither model was trained on.

Two llama-servers, without and with the drafter, go on from pieces of the texts. The counts are those of the server's
/metrics. At temperature 0 the two must write the same, but where the rounding of another batch size decides.
"""
import argparse
import collections
import contextlib
import json
import pathlib
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data"
DRAFTER = DATA / "docmoe-dspark.gguf"
PREFIX = "llamacpp:spec_decode_num"


class Server:
    """A llama-server that listens at a URL."""

    def __init__(self, url):
        self.url = url

    def complete(self, prompt, tokens, temperature=0.0):
        """The tokens that it goes on with."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": temperature, "seed": 1, "ignore_eos": True,
                "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["tokens"]

    def counts(self):
        """A Counter since the start: blocks drafted, tokens drafted, and under 0, 1, .. tokens accepted there."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        at = re.findall(PREFIX + r'_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', text)
        count = collections.Counter({int(position): int(n) for position, n in at})
        for key, name in (("blocks", "drafts"), ("drafted", "draft_tokens")):
            count[key] = int(re.search(rf"(?m)^{PREFIX}_{name}_total (\d+)", text)[1])
        return count


@contextlib.contextmanager
def server(exe, *args, env=None):
    """Starts llama-server with these arguments, in this environment or the one given, and ends it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [exe, "--host", "127.0.0.1", "--port", port, "-c", "1024", "-np", "1", "--metrics", *args]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen([str(c) for c in command], stdout=log, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, env=env)
        try:
            while process.poll() is None:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.1)
            else:
                log.seek(0)
                raise RuntimeError(f"the server does not start: {log.read()[-3000:]}")
            yield Server(url)
        finally:
            process.terminate()
            process.wait()


def drafting(drafter, most, p_min=0.0):
    """The arguments that make llama-server draft at most so many tokens, each with at least that confidence."""
    return ["-md", drafter, "--spec-type", "draft-dspark", "--spec-draft-n-max", most, "--spec-draft-p-min", p_min]


def prompts_of(path, n, chars=300):
    """Pieces of a text, evenly spread over it."""
    text = path.read_text()
    step = (len(text) - chars) // n
    return [text[i * step : i * step + chars] for i in range(n)]


def shown(name, count):
    at = [count[k] for k in sorted(key for key in count if isinstance(key, int))]
    blocks, drafted = max(1, count["blocks"]), max(1, count["drafted"])
    rates = " ".join(f"{n / blocks:.3f}" for n in at)
    return (f"{name:20} blocks {blocks:5} drafted {drafted:6} accepted {sum(at):5} ({sum(at) / drafted:.3f}), "
            f"{sum(at) / blocks:.2f} of a block; by position {rates}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("texts", type=pathlib.Path, nargs="*", default=[DATA / "python-guides.txt", DATA / "rust-api.txt"])
    ap.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/bin", help="where llama-server is")
    ap.add_argument("--model", type=pathlib.Path, default=DATA / "docmoe-53m-q4_k_m.gguf")
    ap.add_argument("--drafter", type=pathlib.Path, default=DRAFTER)
    ap.add_argument("--max", type=int, default=5, help="tokens of a block (--spec-draft-n-max)")
    ap.add_argument("--p-min", type=float, default=0.0, help="least confidence (--spec-draft-p-min)")
    ap.add_argument("--temp", type=float, default=0.0)
    ap.add_argument("--prompts", type=int, default=16, help="per text")
    ap.add_argument("--tokens", type=int, default=128, help="per prompt")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()

    def go_on(s, path):
        return [s.complete(prompt, a.tokens, a.temp) for prompt in prompts_of(path, a.prompts)]

    command, same = [a.bin / "llama-server", "-m", a.model, "-t", a.threads], 0
    # by chance, the texts differ anyway
    if a.temp == 0:
        with server(*command) as s:
            plain = {path: go_on(s, path) for path in a.texts}
    with server(*command, *drafting(a.drafter, a.max, a.p_min)) as s:
        for path in a.texts:
            before = s.counts()
            made = go_on(s, path)
            if a.temp == 0:
                same += sum(x == y for x, y in zip(made, plain[path]))
            count = s.counts()
            count.subtract(before)
            print(shown(path.name, count), flush=True)
        print(shown("all", s.counts()))
    if a.temp == 0:
        print(f"the same text as without the drafter: {same} of {len(a.texts) * a.prompts}")


if __name__ == "__main__":
    main()
