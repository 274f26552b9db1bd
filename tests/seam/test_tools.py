"""llama.cpp's programs with LES on say the same as without."""

import json
import re
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

import harness
import models
from harness import PATCHED, SELF, STOCK

PROMPT = "The function returns"


def plain(name):
    """The program to compare with: stock's, or where stock was built without it, the patched one with LES off."""
    if STOCK.has(name):
        return STOCK.tool(name), {}
    return PATCHED.tool(name), {"LLAMA_ARG_LES": "off"}


class Tools(unittest.TestCase):
    def setUp(self):
        self.tmp = harness.temporary(self.addCleanup)
        self.model = models.quantized("Q4_K_M")

    def both(self, name, *args):
        """What the program prints, without and with LES. It writes files into the directories plain and les."""
        exe, env = plain(name)
        outputs = []
        for label, program, settings in [("plain", exe, env), ("les", PATCHED.tool(name), harness.les("min"))]:
            if label == "les":
                settings["LLAMA_ARG_LES_STATS"] = str(self.tmp / "stats.json")
            (self.tmp / label).mkdir(exist_ok=True)
            done = harness.run([program, "-m", self.model, "-t", "2", *args], settings, cwd=self.tmp / label)
            self.assertEqual(done.returncode, 0, done.shown)
            outputs.append(done.stdout)
        if not SELF:
            self.assertGreater(harness.total(harness.read_stats(self.tmp / "stats.json"), "bytes_read"), 0)
        return outputs

    def same_text(self, plain_out, les_out):
        """llama.cpp's logger may lose the end of the output when the program exits, in stock too."""
        a, b = plain_out.strip(), les_out.strip()
        self.assertTrue(a.startswith(b) or b.startswith(a), f"{les_out!r} instead of {plain_out!r}")

    def same_file(self, name, least):
        a, b = ((self.tmp / label / name).read_bytes() for label in ["plain", "les"])
        self.assertGreater(len(a), least)
        self.assertTrue(a == b, f"the files differ: {len(a)} and {len(b)} bytes")
        return a

    def perplexity(self, *args):
        outputs = self.both("llama-perplexity", "-f", models.text(), "-c", "256", "--chunks", "3", "--no-repack",
                            "--save-all-logits", "logits", *args)
        self.same_text(*outputs)
        return self.same_file("logits", 1 << 20)

    def test_perplexity(self):
        self.perplexity()

    def test_lora(self):
        self.assertTrue(self.perplexity("--lora", models.lora()) != self.perplexity(), "the adapter has no effect")

    def test_imatrix(self):
        self.both("llama-imatrix", "-f", models.text(), "-c", "256", "--chunks", "2", "--no-repack",
                  "-o", "imatrix.gguf")
        self.assertIn(b"ffn_down_exps", self.same_file("imatrix.gguf", 1000))

    def test_completion(self):
        """The session file holds the tokens and the whole KV cache."""
        outputs = self.both("llama-completion", "-p", PROMPT, "-n", "32", "--temp", "0", "-no-cnv", "--no-repack",
                            "--no-display-prompt", "--simple-io", "--prompt-cache", "session",
                            "--prompt-cache-all")
        self.same_text(*outputs)
        self.same_file("session", 10_000)

    def test_bench(self):
        flags = [] if SELF else ["--les", "on", "--les-cache", "min"]
        done = harness.run([PATCHED.tool("llama-bench"), "-m", self.model, "-t", "2", "-p", "32", "-n", "8", "-r", "2",
                            "-o", "json", *flags])
        self.assertEqual(done.returncode, 0, done.shown)
        rows = json.loads(done.stdout)
        self.assertEqual([(row["n_prompt"], row["n_gen"]) for row in rows], [(32, 0), (0, 8)])
        self.assertTrue(all(row["avg_ts"] > 0 for row in rows))

    @unittest.skipIf(SELF, "LES only")
    def test_flags(self):
        """The flags do what the environment does."""
        stats, trace = self.tmp / "flags.json", self.tmp / "trace.jsonl"
        done = harness.run([PATCHED.tool("llama-completion"), "-m", self.model, "-t", "2", "-p", PROMPT, "-n", "8",
                            "-no-cnv", "--les", "on", "--les-cache", "min", "--les-io", "pread", "--les-io-depth", "4",
                            "--les-lookahead", "2", "--les-stats", stats, "--les-trace", trace])
        self.assertEqual(done.returncode, 0, done.shown)
        written = harness.read_stats(stats)
        self.assertGreater(harness.total(written, "bytes_read"), 0)
        self.assertEqual((written["engine"], written["io_depth"]), ("pread", 4))
        # one layer ahead most picks are right, two layers ahead fewer; many guesses are read, most of them used
        near, far = written["recall"]
        self.assertGreater(near["at_k"], 0.6 * near["picks"])
        self.assertGreater(near["at_k"] * far["picks"], far["at_k"] * near["picks"])
        self.assertGreater(written["guessed"], 100)
        self.assertGreater(written["guessed_in_time"] + written["guessed_late"], written["guessed_wasted"])
        # what was promised came true about as often, and the weightier picks are predicted more often than others
        self.assertLess(written["calibration_error"], 0.1)
        mass = written["gate_mass"][0]
        self.assertGreater(mass["at_k"] * near["picks"], near["at_k"] * mass["tokens"])
        layers = written["layers"]
        for counter in ["requests", "hits", "late", "misses", "bytes_read", "wait_ns"]:
            self.assertEqual(sum(layer[counter] for layer in layers), harness.total(written, counter), counter)
        for counter in ["demand_reads", "demand_bytes", "guessed", "guessed_bytes", "guessed_in_time"]:
            self.assertEqual(sum(layer[counter] for layer in layers), written[counter], counter)
        sim = harness.run([PATCHED.tool("les"), "sim", trace])
        self.assertEqual(sim.returncode, 0, sim.shown)
        self.assertIn("optimal", sim.stdout)
        # the trace tells what was predicted, two layers ahead
        sim = harness.run([PATCHED.tool("les"), "sim", trace, "--lookahead=2", "--json"])
        self.assertEqual(sim.returncode, 0, sim.shown)
        told = json.loads(sim.stdout)
        self.assertTrue(all("lookahead" in row for row in told["rows"]))
        self.assertEqual([outcome["recall"] for outcome in told["outcomes"]], written["recall"])

    @unittest.skipIf(SELF, "LES only")
    def test_prompts_are_read_ahead(self):
        """Of batches of many tokens, too, the next layer's experts are foreseen and read while this layer is computed."""
        stats = self.tmp / "ahead.json"
        done = harness.run([PATCHED.tool("llama-perplexity"), "-m", self.model, "-t", "2", "-f", models.text(), "-c", "128",
                            "-b", "128", "--chunks", "8", "--les", "on", "--les-cache", "70%", "--les-stats", stats])
        self.assertEqual(done.returncode, 0, done.shown)
        written = harness.read_stats(stats)
        batch = written["batch"]
        self.assertGreater(batch["at_k"], 0.9 * batch["picks"])
        self.assertTrue(all(0 <= bin["promised"] <= 1 for bin in batch["calibration"]))
        self.assertGreater(written["guessed"], 100)
        self.assertGreater(written["guessed_in_time"] + written["guessed_late"], 3 * written["guessed_wasted"])

    @unittest.skipIf(SELF, "LES only")
    def test_profile(self):
        """What was learned is there the next time, damaged or not, and changes no logit."""
        def run(name, *flags):
            stats, logits = self.tmp / f"{name}.json", self.tmp / f"{name}.logits"
            done = harness.run([PATCHED.tool("llama-perplexity"), "-m", self.model, "-t", "2", "-f", models.text(),
                                "-c", "128", "--chunks", "2", "--no-repack", "--save-all-logits", logits, "--les", "on",
                                "--les-cache", "min", "--les-stats", stats, *flags])
            self.assertEqual(done.returncode, 0, done.shown)
            written = harness.read_stats(stats)
            self.assertGreater(harness.total(written, "bytes_read"), 0)
            return logits.read_bytes(), written["profile_loaded"], done

        profile = self.tmp / "profile.json"
        logits, knew, _ = run("without")
        self.assertGreater(len(logits), 1 << 18)
        self.assertFalse(knew)
        for name, expected in [("cold", False), ("warm", True), ("damaged", False), ("poisoned", False),
                               ("misleading", True)]:
            with self.subTest(name):
                if name == "damaged":
                    profile.write_bytes(profile.read_bytes()[:5000])
                if name == "poisoned":
                    profile.write_text(re.sub(r'"values":\[[^,]*,', '"values":[1e39,', profile.read_text()))
                if name == "misleading":
                    told = json.loads(profile.read_text())
                    for layer in told["keep"]:
                        layer["values"] = [-1e30 * value for value in layer["values"]]
                        layer["features"].sort()
                        layer["sums"] = [-x for x in layer["sums"]]
                    profile.write_text(json.dumps(told))
                again, knew, done = run(name, "--les-profile", profile)
                self.assertTrue(again == logits, "the logits differ")
                self.assertEqual(knew, expected)
                told = f"{profile}: a damaged profile"
                self.assertEqual(told in done.stderr + done.stdout, name in ["damaged", "poisoned"], done.shown)
                learned = json.loads(profile.read_text())
                self.assertEqual(learned["les_profile"], 2)
                self.assertEqual([len(layer["values"]) for layer in learned["keep"]], [64] * 8)
                self.assertTrue(all(len(set(layer["values"])) > 32 for layer in learned["keep"]))
                self.assertEqual(len(learned["calibrations"]), 2)
        # nothing else is left behind
        self.assertEqual([path.name for path in self.tmp.glob("*profile*")], ["profile.json"])

    @unittest.skipIf(SELF, "LES only")
    def test_profile_of_another_model(self):
        """It is left alone, as is a file that is no profile."""
        profile = self.tmp / "profile.json"

        def run(model):
            done = harness.run([PATCHED.tool("llama-completion"), "-m", model, "-t", "2", "-p", PROMPT, "-n", "4",
                                "-no-cnv", "--les", "on", "--les-cache", "min", "--les-profile", profile])
            self.assertEqual(done.returncode, 0, done.shown)
            return done.stderr + done.stdout

        run(self.model)
        contents = profile.read_bytes()
        self.assertIn("another model (\"Q4_K_M.gguf\")", run(models.quantized("Q8_0")))
        self.assertEqual(profile.read_bytes(), contents)
        profile.write_text("mine")
        self.assertIn("not a profile", run(self.model))
        self.assertEqual(profile.read_text(), "mine")


@unittest.skipIf(SELF, "LES only")
class Told(unittest.TestCase):
    """What each program tells its user: two lines on stderr, and by its exit code that reads failed."""

    def run_tool(self, name, **settings):
        args = {
            "llama-cli": ["--single-turn", "-p", PROMPT, "-n", "8", "--temp", "0"],
            "llama-completion": ["-no-cnv", "-p", PROMPT, "-n", "8", "--temp", "0"],
            "llama-perplexity": ["-f", models.text(), "-c", "256", "--chunks", "1"],
            "llama-bench": ["-p", "32", "-n", "8", "-r", "1"],
        }[name]
        return harness.run([PATCHED.tool(name), "-m", models.quantized("Q4_K_M"), "-t", "2", *args],
                           harness.les("min", **settings))

    def lines(self, name):
        done = self.run_tool(name)
        self.assertEqual(done.returncode, 0, done.shown)
        self.assertRegex(done.stderr, r"(?m)^les: .* of experts stream from the file through a cache of ")
        # what llama.cpp's own log thread has begun may stand before it
        self.assertRegex(done.stderr, r"les: Q4_K_M\.gguf: .* of experts in cache, .* read per token")

    def failure(self, name):
        done = self.run_tool(name, fault="eio@40+")
        self.assertNotEqual(done.returncode, 0, done.shown)

    def test_lines_of_cli(self):
        self.lines("llama-cli")

    def test_lines_of_completion(self):
        self.lines("llama-completion")

    def test_lines_of_perplexity(self):
        self.lines("llama-perplexity")

    def test_lines_of_bench(self):
        self.lines("llama-bench")

    def test_failed_reads_of_cli(self):
        self.failure("llama-cli")

    def test_failed_reads_of_completion(self):
        self.failure("llama-completion")

    def test_failed_reads_of_perplexity(self):
        self.failure("llama-perplexity")

    def test_failed_reads_of_bench(self):
        self.failure("llama-bench")


class Server(unittest.TestCase):
    def start(self, exe, env, *args):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        full = {**harness.clean_environment(), **env}
        log = tempfile.TemporaryFile(mode="w+")
        process = subprocess.Popen([exe, "-m", models.quantized("Q4_K_M"), "--host", "127.0.0.1", "--port", str(port),
                                    "-t", "2", "-c", "512", "-np", "1", "--no-repack", *args], env=full, stdout=log,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.addCleanup(log.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return process, port
            except (urllib.error.URLError, OSError):
                if process.poll() is not None:
                    break
                time.sleep(0.1)
        log.seek(0)
        self.fail(f"the server does not start: {log.read()[-3000:]}")

    def complete(self, port):
        body = json.dumps({"prompt": PROMPT, "n_predict": 24, "temperature": 0, "cache_prompt": False}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["content"]

    def stop(self, process):
        process.terminate()
        self.assertEqual(process.wait(timeout=30), 0)

    def text(self, exe, env, *args):
        process, port = self.start(exe, env, *args)
        content = self.complete(port)
        self.stop(process)
        return content

    @unittest.skipIf(SELF and not STOCK.has("llama-server"), "stock was built without llama-server")
    def test_completion_as_without_les(self):
        expected = self.text(*plain("llama-server"))
        self.assertGreater(len(expected.strip()), 10)
        self.assertEqual(self.text(PATCHED.tool("llama-server"), harness.les("min")), expected)

    @unittest.skipIf(SELF and not STOCK.has("llama-server"), "stock was built without llama-server")
    def test_draft_model_as_without_les(self):
        args = ["-md", models.quantized("Q8_0"), "--spec-draft-n-max", "4"]
        expected = self.text(*plain("llama-server"), *args)
        self.assertGreater(len(expected.strip()), 10)
        # as many are verified as without LES: another size of batch is rounded otherwise
        env = {**harness.les("min"), "LLAMA_ARG_LES_SPEC": "4"}
        self.assertEqual(self.text(PATCHED.tool("llama-server"), env, *args), expected)

    def metrics(self, *args):
        """What /metrics says of streaming after one request, and the statistics written at the end."""
        with tempfile.TemporaryDirectory() as tmp:
            process, port = self.start(PATCHED.tool("llama-server"), {}, "--metrics", "--les-stats", f"{tmp}/stats.json",
                                       *args)
            self.complete(port)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            self.stop(process)
            stats = harness.read_stats(f"{tmp}/stats.json") if Path(f"{tmp}/stats.json").exists() else None
        self.assertRegex(text, r"(?m)^llamacpp:prompt_tokens_total ")
        values = dict(re.findall(r"(?m)^llamacpp:les_(\w+) (\S+)$", text))
        kinds = dict(re.findall(r"(?m)^# TYPE llamacpp:les_(\w+) (\w+)$", text))
        self.assertEqual(list(kinds), list(values))
        for name, kind in kinds.items():
            self.assertEqual(kind, "counter" if name.endswith("_total") else "gauge", name)
        return {name.removesuffix("_total"): float(value) for name, value in values.items()}, stats

    @unittest.skipIf(SELF, "LES only")
    def test_metrics(self):
        les, stats = self.metrics("--les", "on", "--les-cache", "min")
        self.assertGreater(les["hits"], 0)
        self.assertLess(les["hits"], les["requests"])
        self.assertGreater(les["wait_seconds"], 0)
        self.assertGreater(les["guessed"], 0)
        self.assertLessEqual(les["guessed_in_time"] + les["guessed_late"] + les["guessed_wasted"], les["guessed"])
        self.assertEqual(les["read_errors"], 0)
        # nothing was computed after the request
        for name in ["requests", "hits", "bytes_read"]:
            self.assertEqual(les[name], harness.total(stats, name), name)
        for name in ["guessed", "guessed_in_time", "guessed_late", "evictions", "cache_bytes"]:
            self.assertEqual(les[name], stats[name], name)
            self.assertGreaterEqual(les[name], 0)
        self.assertGreater(min(les["bytes_read"], les["evictions"], les["cache_bytes"]), 0)

    @unittest.skipIf(SELF, "LES only")
    def test_metrics_of_a_model_that_does_not_stream(self):
        self.assertEqual(self.metrics("--les", "off"), ({}, None))

    @unittest.skipIf(SELF, "LES only")
    def test_a_failed_read_is_an_error_of_that_request(self):
        """The server lives on, and the next request gets the right text."""
        expected = self.text(*plain("llama-server"))
        process, port = self.start(PATCHED.tool("llama-server"), harness.les("min", fault="eio@200"))
        answers = []
        for _ in range(3):
            try:
                answers.append(self.complete(port))
            except urllib.error.HTTPError as e:
                self.assertTrue(re.match("5", str(e.code)), e)
                answers.append(None)
        self.stop(process)
        self.assertIn(None, answers)
        self.assertEqual(set(answers) - {None}, {expected})


if __name__ == "__main__":
    unittest.main()
