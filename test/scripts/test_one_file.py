#!/usr/bin/env python3
"""test_one_file.py -- dev/gpt2_cable.cpp trains as ./train_gpt2 does, and would be seen to differ."""
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def one_file(*flags):
    """(exit code, what was printed) of dev/one_file.py on a small model"""
    with tempfile.TemporaryDirectory() as directory:
        text = os.path.join(directory, "text.txt")
        with open(text, "w") as file:
            file.write(open(os.path.join(ROOT, "README.md")).read())
        result = subprocess.run([sys.executable, "dev/one_file.py", "--text", text, "--out", directory + "/out",
                                 "--model", "2,2,32", "--T", "64", "--B", "3", "--steps", "20", *flags], cwd=ROOT,
                                capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


class TestOneFile(unittest.TestCase):
    def setUp(self):
        if not os.path.exists(os.path.join(ROOT, "train_gpt2")):
            self.skipTest("make train_gpt2")

    def test_losses_are_those_of_the_trainer(self):
        code, printed = one_file()
        self.assertEqual(code, 0, printed)
        self.assertIn("20 steps; from float64", printed)

    def test_a_wrong_gradient_is_seen(self):
        with open(os.path.join(ROOT, "dev/gpt2_cable.cpp")) as file:
            source = file.read()
        right = "dS[head + j] += g[head + i] * dlogit;"
        self.assertEqual(source.count(right), 1)
        with tempfile.NamedTemporaryFile("w", suffix=".cpp") as copy:
            copy.write(source.replace(right, ""))
            copy.flush()
            code, printed = one_file("--source", copy.name)
        self.assertEqual(code, 1, printed)
        self.assertIn("expected at most 4 times", printed)


if __name__ == "__main__":
    unittest.main(verbosity=2)
