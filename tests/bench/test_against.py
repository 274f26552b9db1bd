"""The computations of bench.py --against. No model is run."""
import argparse
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import against  # noqa: E402
import lookahead  # noqa: E402
from runs import MIB  # noqa: E402


def row(token_ms, mib):
    return {"token_ms": token_ms, "bytes": mib * MIB, "hit": 0.9, "wait_ms": 20, "ask_cpu_ms": 5.0}


class Against(unittest.TestCase):
    def test_files_are_compared_with_the_model_of_the_same_round(self):
        line = against.compare([row(200, 100), row(160, 99), row(250, 60)])
        self.assertEqual((line["tok/s model"], line["tok/s file 1"]), (5, 6.25))
        self.assertEqual((line["speed of file 1 / model"], line["speed of file 2 / model"]), (1.25, 0.8))
        self.assertEqual((line["bytes of file 1 / model"], line["bytes of file 2 / model"]), (0.99, 0.6))

    def test_every_file_runs_once_a_round_and_another_one_first_each_time(self):
        ran = []

        def stream(args, cap, way):
            ran.append((cap, args.model.name, way))
            return row(100, 10)

        with tempfile.TemporaryDirectory() as folder:
            files = [pathlib.Path(folder) / name for name in ("a", "b")]
            [file.write_bytes(b"") for file in files]
            args = argparse.Namespace(model=files[0], against=files[1:], caps="5,6", runs=2, json=None)
            with mock.patch.object(lookahead, "stream", stream), mock.patch("builtins.print"):
                against.bench(args)
        self.assertEqual(ran, [(cap, name, "on") for names in ("ab", "ba") for cap in (5, 6) for name in names])


if __name__ == "__main__":
    unittest.main()
