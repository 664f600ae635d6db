#!/usr/bin/env python3
"""test_one_file.py -- dev/gpt2_cable.cpp trains as ./train_gpt2 does, and would be seen to differ."""
import os
import sys
import unittest

from folder import ROOT, Folder, ended, read


@unittest.skipUnless(os.path.exists(os.path.join(ROOT, "train_gpt2")), "make train_gpt2")
class TestOneFile(Folder):
    def one_file(self, *flags):
        """(exit code, what was printed) of dev/one_file.py on a small model"""
        return ended(sys.executable, "dev/one_file.py", "--text", self.write("text.txt", read("README.md")), "--out",
                     self.path("out"), "--model", "2,2,32", "--T", "64", "--B", "3", "--steps", "20", *flags, cwd=ROOT)

    def test_losses_are_those_of_the_trainer(self):
        code, printed = self.one_file()
        self.assertEqual(code, 0, printed)
        self.assertIn("20 steps; from float64", printed)

    def test_a_wrong_gradient_is_seen(self):
        source = read("dev/gpt2_cable.cpp")
        right = "dS[head + j] += g[head + i] * dlogit;"
        self.assertEqual(source.count(right), 1)
        code, printed = self.one_file("--source", self.write("copy.cpp", source.replace(right, "")))
        self.assertEqual(code, 1, printed)
        self.assertIn("expected at most 4 times", printed)


if __name__ == "__main__":
    unittest.main(verbosity=2)
