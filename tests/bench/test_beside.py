"""The reader of bench.py --beside. No model is read."""
import argparse
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import beside  # noqa: E402


class Reader(unittest.TestCase):
    def started(self, script):
        """A reader that is this shell script."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        les = pathlib.Path(folder.name) / "les"
        les.write_text(f"#!/bin/sh\n{script}\n")
        les.chmod(0o755)
        return beside.reader(argparse.Namespace(bin=les.parent, model="m", io="auto", beside=100))

    def test_one_that_ends_before_its_time_is_an_error(self):
        with self.assertRaises(SystemExit), self.started("exit 3") as process:
            process.wait()

    def test_one_that_is_not_wanted_any_more_is_ended(self):
        with self.started("exec sleep 1000") as process:
            pass
        self.assertIsNotNone(process.returncode)


if __name__ == "__main__":
    unittest.main()
