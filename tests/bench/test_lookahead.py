"""The computations of bench.py --lookahead, from outputs as the programs print them. No program runs."""
import argparse
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bench  # noqa: E402
import lookahead  # noqa: E402
import runs  # noqa: E402

MIB = runs.MIB
TEXT = """
0.00.665.739 I common_perf_print:    sampling time =      50.00 ms
0.00.665.740 I common_perf_print:    samplers time =      40.00 ms /    68 tokens
0.00.665.749 I common_perf_print:        load time =    2500.00 ms
0.00.665.751 I common_perf_print: prompt eval time =     400.00 ms /    10 tokens (   40.00 ms per token,    25.00 tokens per second)
0.00.665.771 I common_perf_print:        eval time =    1800.00 ms /     9 runs   (  200.00 ms per token,     5.00 tokens per second)
0.00.665.772 I common_perf_print:       total time =    2300.00 ms /    19 tokens
les: yardstick: 5.00 tok/s, 85.6% of experts in cache
capped: limit 3072 MiB, peak 2900 MiB, exit 0
"""


def counters(tokens, requests, hits, bytes_read, ns, steps, guessed):
    in_time, late, wasted = guessed
    return {"decode": {"tokens": tokens, "requests": requests, "hits": hits, "late": 0, "misses": requests - hits,
                       "bytes_read": bytes_read, "wait_ns": tokens * 30_000_000, "ask_ns": tokens * 4_000_000,
                       "guess_ns": tokens * 3_000_000, "ask_cpu_ns": tokens * 5_000_000},
            "guessed": sum(guessed), "guessed_in_time": in_time, "guessed_late": late, "guessed_wasted": wasted,
            "decode_ns": ns, "decode_steps": steps}


# the first four tokens took 400 ms each and read 300 MiB, the last five 150 ms and 60 MiB
STATS = {**counters(9, 900, 700, 4 * 300 * MIB + 5 * 60 * MIB, 4 * 400_000_000 + 4 * 150_000_000, 8, (90, 9, 18)),
         "prompt": {"bytes_read": 1500 * MIB}, "cache_bytes": 1600 * MIB, "engine": "pread",
         "marks": [counters(n, 100 * n, 50 * n, n * 300 * MIB, n * 400_000_000, n, (10 * n, n, 2 * n)) for n in (1, 2, 4)]}


def row(token_ms, mib, **more):
    return {"token_ms": token_ms, "bytes": mib * MIB, "hit": 0.9, "reader_ms": 0.0, "cache_bytes": 1600 * MIB,
            "wait_ms": 20, "ask_ms": 4.0, "guess_ms": 3.0, "ask_cpu_ms": 5.0, "guessed_in_time": 10.0, "guessed_late": 2.0,
            "guessed_wasted": 1.0, "bandwidth": 1000.0 * MIB, "bandwidth_8": 900.0 * MIB, **more}


class Figures(unittest.TestCase):
    def test_all_tokens_by_the_programs_clock(self):
        r = lookahead.figures(TEXT, STATS, 0, reader_s=0.3)
        self.assertEqual(r["token_ms"], 200)
        self.assertEqual(r["bytes"], 1500 * MIB / 9)
        self.assertAlmostEqual(r["hit"], 7 / 9)
        self.assertEqual((r["wait_ms"], r["ask_ms"], r["guess_ms"], r["ask_cpu_ms"]), (30, 4, 3, 5))
        self.assertEqual((r["guessed"], r["guessed_in_time"], r["guessed_late"], r["guessed_wasted"]), (13, 10, 1, 2))
        # half of what was read was read for these tokens
        self.assertAlmostEqual(r["reader_ms"], 150 / 9)
        self.assertEqual((r["peak MiB"], r["decode tok/s"]), (2900, 5))

    def test_what_is_warm_is_counted_from_the_mark(self):
        r = lookahead.figures(TEXT, STATS, 4)
        # the library's clock, less 50 ms of sampling for 10 tokens
        self.assertAlmostEqual(r["token_ms"], 150 - 5)
        self.assertEqual(r["bytes"], 60 * MIB)
        self.assertEqual(r["hit"], 1)
        self.assertEqual((r["wait_ms"], r["ask_ms"], r["guess_ms"]), (30, 4, 3))
        self.assertEqual((r["guessed_in_time"], r["guessed_late"], r["guessed_wasted"]), (10, 1, 2))

    def test_statistics_without_the_mark_are_refused(self):
        for stats in (STATS, {key: value for key, value in STATS.items() if key != "marks"}):
            with self.assertRaises(SystemExit) as failed:
                lookahead.figures(TEXT, stats, 8)
            self.assertIn("--warm 8", str(failed.exception))
        ended = {**STATS, "decode_steps": 4}
        with self.assertRaises(SystemExit):
            lookahead.figures(TEXT, ended, 4)

    def test_a_run_that_does_not_tell_its_time_is_refused(self):
        with self.assertRaises(SystemExit) as failed:
            lookahead.figures("nothing", STATS, 0)
        self.assertIn("nothing", str(failed.exception))

    def test_an_emulated_device_is_never_faster_than_the_real_one(self):
        before, after = {8: 500e6, 16: 1000e6}, {8: 700e6, 16: 3000e6}
        self.assertEqual(lookahead.bandwidth(before, after, 16, None), 2000e6)
        self.assertEqual(lookahead.bandwidth(before, after, 16, 400), 400 * MIB)
        self.assertEqual(lookahead.bandwidth(before, after, 8, 4000), 600e6)


class Rounds(unittest.TestCase):
    def test_a_token_is_compared_with_the_larger_of_both(self):
        rows = {"off": row(250, 280), "on": row(220, 200)}
        line = lookahead.compare(rows, 110)
        self.assertAlmostEqual(line["T_io ms"], 200)
        self.assertAlmostEqual(line["T on / larger"], 1.1)
        self.assertAlmostEqual(line["T off / T on"], 250 / 220)
        self.assertAlmostEqual(line["ask % of T on"], 100 * 4 / 220)
        self.assertAlmostEqual(line["ask CPU % of T on"], 100 * 5 / 220)
        self.assertAlmostEqual(lookahead.compare(rows, 210)["T on / larger"], 220 / 210)
        alone = lookahead.compare(rows, None)
        self.assertAlmostEqual(alone["T on / T_io"], 1.1)
        self.assertNotIn("T on / larger", alone)
        self.assertNotIn("readers' CPU ms on", line)
        self.assertEqual(lookahead.compare({**rows, "on": row(220, 200, reader_ms=7)}, 110)["readers' CPU ms on"], 7)

    def test_ratios_are_of_each_round_and_of_the_medians(self):
        times = [(100, 90), (300, 200), (200, 160), (110, 100), (120, 130)]
        s = lookahead.summary([lookahead.compare({"off": row(off, 9), "on": row(on, 9)}, 80) for off, on in times])
        self.assertAlmostEqual(s["ratio of the medians of T"], 120 / 130)
        ratios = sorted(off / on for off, on in times)
        of = s["T off / T on"]
        self.assertAlmostEqual(of["median"], ratios[2])
        self.assertEqual((of["least"], of["largest"]), (ratios[0], ratios[-1]))
        self.assertAlmostEqual(of["quartiles"][0], ratios[1])
        self.assertAlmostEqual(of["quartiles"][1], ratios[3])

    def test_the_order_alternates_and_each_run_has_the_devices_around_it(self):
        args = argparse.Namespace(depth=16, rate=None)
        order = []

        def stream(_, cap, way):
            order.append(way)
            return {}
        measured = iter([{8: x, 16: 10 * x} for x in (1, 3, 7, 2, 4, 6)])
        with mock.patch.object(lookahead, "stream", stream), \
                mock.patch.object(lookahead, "device", lambda _: next(measured)):
            first, second = lookahead.pair(args, 3072, 0), lookahead.pair(args, 3072, 1)
        self.assertEqual(order, ["off", "on", "on", "off"])
        self.assertEqual((first["off"]["bandwidth"], first["on"]["bandwidth"]), (20, 50))
        self.assertEqual((second["on"]["bandwidth"], second["off"]["bandwidth"]), (30, 50))
        self.assertEqual(first["on"]["bandwidth_8"], 5)

    def test_the_device_is_measured_as_the_engine_uses_it(self):
        said = json.dumps([{"depth": 8, "mb_per_s": 1500.0}, {"depth": 32, "mb_per_s": 2000.0}])
        args = argparse.Namespace(bin=pathlib.Path("bin"), model="m.gguf", io="uring", depth=32, device_seconds=2)
        done = types.SimpleNamespace(returncode=0, stdout=said, stderr="")
        with mock.patch.object(lookahead.subprocess, "run", return_value=done) as ran:
            self.assertEqual(lookahead.device(args), {8: 1500e6, 32: 2000e6})
        command = " ".join(ran.call_args.args[0])
        self.assertIn("--io uring --depth 8,32 --seconds 2", command)

    def stream(self, way, **more):
        args = argparse.Namespace(**{"bin": pathlib.Path("bin"), "model": "m.gguf", "threads": 2, "tokens": 9, "warm": 4,
                                     "io": "auto", "depth": 16, "rate": None, **more})
        seen = {}

        def run(command, env, watch):
            seen.update(command=command, env=env)
            pathlib.Path(command[command.index("--les-stats") + 1]).write_text(json.dumps(STATS))
            return TEXT
        with mock.patch.object(lookahead, "run", run):
            self.assertEqual(lookahead.stream(args, 3072, way)["bytes"], 60 * MIB)
        return seen

    def test_a_run_is_told_what_to_do(self):
        off, on = self.stream("off"), self.stream("on", rate=400)
        self.assertEqual(off["command"][off["command"].index("--les-lookahead") + 1], "0")
        self.assertNotIn("--les-lookahead", on["command"])
        self.assertEqual((off["env"], on["env"]), ({}, {"LES_FAULT": "rate@400"}))
        self.assertEqual(on["command"][2], "3072")
        # those that warm up come on top
        self.assertEqual(on["command"][on["command"].index("-n") + 1], "13")

    def test_the_context_holds_the_text(self):
        args = argparse.Namespace(bin=pathlib.Path("bin"), model="m.gguf", threads=2)
        for tokens, context in ((9, "1024"), (2048, "2304")):
            command = runs.command_of(args, tokens, 0, [])
            self.assertEqual(command[command.index("-c") + 1], context)


class Series(unittest.TestCase):
    def bench(self, *flags):
        with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(io.StringIO()) as out:
            file = pathlib.Path(tmp) / "out.json"
            argv = ["bench.py", "models/m.gguf", "--lookahead", "--caps", "3072,6144", "--json", str(file), *flags]
            with mock.patch.object(sys, "argv", argv):
                bench.main()
            return out.getvalue(), json.loads(file.read_text())

    def test_what_is_shown_is_written(self):
        times = iter([250, 200, 120, 100, 210, 260, 100, 120])
        with mock.patch.object(lookahead, "device", return_value={8: 900.0 * MIB, 16: 1000.0 * MIB}), \
                mock.patch.object(lookahead, "resident", return_value=90.0), \
                mock.patch.object(lookahead, "stream", lambda *_: row(next(times), 150)):
            out, written = self.bench("--runs", "2")
        self.assertEqual([r["compute_ms"] for r in written["rounds"]], [90, 90])
        s = written["summary"]["3072"]
        self.assertEqual((s["T off ms"]["median"], s["T on ms"]["median"]), (255, 205))
        self.assertAlmostEqual(s["ratio of the medians of T"], 255 / 205)
        self.assertAlmostEqual(s["T on / larger"]["largest"], 210 / 150)
        self.assertEqual(written["model"], "m.gguf")
        self.assertRegex(out, r"cap 6144 MiB\n(.*\n)*  T_compute ms +90\.000")
        self.assertRegex(out, r"ratio of medians +1\.244")

    def test_the_resident_run_can_be_left_out(self):
        with mock.patch.object(lookahead, "device", return_value={8: 9.0, 16: 9.0}), \
                mock.patch.object(lookahead, "resident", side_effect=AssertionError), \
                mock.patch.object(lookahead, "stream", lambda *_: row(100, 9)):
            _, given = self.bench("--runs", "1", "--compute", "80")
            _, without = self.bench("--runs", "1", "--no-resident")
        self.assertEqual(given["summary"]["3072"]["T_compute ms"]["median"], 80)
        self.assertNotIn("T_compute ms", without["summary"]["3072"])

    def test_what_cannot_be_measured_is_refused(self):
        for flags in (["--warm", "48"], ["--warm", "-1"], ["--tokens", "1"], ["--runs", "0"], ["--rate", "0"]):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
                self.bench(*flags)
            self.assertIn("usage:", err.getvalue())


class RamDisk(unittest.TestCase):
    def setUp(self):
        tmp = tempfile.TemporaryDirectory()
        self.addCleanup(tmp.cleanup)
        self.tmp = pathlib.Path(tmp.name)
        self.disk = self.tmp / "disk"
        self.disk.mkdir()
        self.model = self.tmp / "m.gguf"
        self.model.write_bytes(b"x" * 3 * MIB)

    def copy(self, free_mib=100, available_mib=100, most=MIB, model=None):
        meminfo = self.tmp / "meminfo"
        meminfo.write_text(f"MemTotal:  9 kB\nMemAvailable:   {available_mib * 1024} kB\n")
        with mock.patch.object(lookahead.shutil, "disk_usage", return_value=types.SimpleNamespace(free=free_mib * MIB)), \
                lookahead.on_ram_disk(model or self.model, most, self.disk, meminfo) as copy:
            self.assertEqual(copy.read_bytes(), self.model.read_bytes())
            self.assertEqual(copy.parent.parent, self.disk)

    def refused(self, why, **how):
        with self.assertRaises(SystemExit) as failed:
            self.copy(**how)
        self.assertIn(why, str(failed.exception))
        self.assertEqual(list(self.disk.iterdir()), [])

    def test_the_copy_is_gone_afterwards(self):
        self.copy(free_mib=3, available_mib=4)
        self.assertEqual(list(self.disk.iterdir()), [])

    def test_without_room_it_says_what_to_do(self):
        self.refused("room for 2 MiB, and m.gguf takes 3", free_mib=2)
        self.refused("--layers 8", free_mib=2)
        self.refused("a run beside it take 4", available_mib=3)
        # a run takes no more than the model
        self.refused("a run beside it take 6", available_mib=5, most=100 * MIB)
        self.copy(available_mib=6, most=100 * MIB)

    def test_shards_are_refused(self):
        self.refused("--merge", model=self.tmp / "m-00001-of-00002.gguf")


class ReadersOfThePool(unittest.TestCase):
    def test_only_the_readers_count_also_of_children(self):
        with tempfile.TemporaryDirectory() as tmp:
            proc = pathlib.Path(tmp)

            def task(pid, tid, name, user, system, children=""):
                folder = proc / str(pid) / "task" / str(tid)
                folder.mkdir(parents=True)
                fields = ["S", *["0"] * 10, str(user), str(system), "0"]
                (folder / "stat").write_text(f"{tid} ({name}) {' '.join(fields)}\n")
                (folder / "children").write_text(children)
            task(1, 1, "bash", 500, 500, "2 ")
            task(2, 2, "llama) (x", 800, 100)
            task(2, 3, "les-read-0", 20, 30)
            task(2, 4, "les-read-1", 5, 5)
            readers = runs.Readers(proc)
            readers(1)
            readers(77)  # has ended
            self.assertAlmostEqual(readers.seconds, 60 / os.sysconf("SC_CLK_TCK"))


if __name__ == "__main__":
    unittest.main()
