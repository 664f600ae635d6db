#!/usr/bin/env python3
"""test_mutate.py -- test/mutations/mutate.py: faults that a test sees and that none sees."""
import os
import re
import subprocess
import sys
import unittest
from unittest import mock

from folder import ROOT, Folder, called

sys.path.insert(0, os.path.join(ROOT, "test", "mutations"))
import mutate       # noqa: E402


class Mutate(Folder):
    def setUp(self):
        super().setUp()
        self.write(".gitignore", "build/\n")
        self.write("data/sum.py", "def total(a, b):\n    return 10 * a + b\n\n\ndef idle(a):\n    return a + 0\n")
        self.put_test("self.assertEqual(sum.total(2, 3), 23); sum.idle(1)")
        for words in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *words], cwd=self.folder, check=True)
        self.addCleanup(os.chdir, os.getcwd())
        self.start(mock.patch.object(mutate, "ROOT", self.folder))
        self.start(mock.patch.object(mutate, "SPARE", 1))
        self.start(mock.patch.object(mutate.runner, "plan", lambda kind, _: (
            ["test/a/test_sum.py"] * (kind == "test"), [])))
        self.start(mock.patch.object(mutate, "RESULTS", self.path("mutations.csv")))
        self.start(mock.patch.object(mutate.runner, "python_of_the_scripts", lambda: sys.executable))

    def put_test(self, line):
        self.write("test/a/test_sum.py", "import sys, time, unittest\nsys.path.insert(0, 'data')\nimport sum\n\n\n"
                   f"class Sum(unittest.TestCase):\n    def test(self):\n        {line}\n\n\nunittest.main()\n")

    def mutated(self, *words, known=""):
        """(exit code, what it printed)"""
        with mock.patch.object(mutate, "KNOWN", self.write("known.tsv", known)):
            code, out, err = called(mutate.main, *words)
        return code, out + err

    SEEN = "minus\tdata/sum.py\t10 * a + b\t10 * a - b\ttest/a/test_sum.py\tci\ta difference\n"
    UNSEEN = "idle\tdata/sum.py\ta + 0\ta - 0\ttest/a/test_sum.py\t\tnothing\n"

    def test_what_comes_of_a_fault(self):
        code, text = self.mutated(known="# a comment\n" + self.SEEN + self.UNSEEN)
        self.assertEqual(code, 1, text)
        self.assertIn("minus, data/sum.py: killed by a/test_sum.py: test (__main__.Sum", text)
        self.assertIn("idle, data/sum.py: survived\n  data/sum.py:6\n- a + 0\n+ a - 0\n", text)
        self.assertIn("1 killed, 1 survived", text)
        self.assertIn("10 * a + b", self.read("build/mutations/tree0/data/sum.py"))      # the copy is whole again
        self.assertEqual(self.mutated("--only", "minus", known=self.SEEN + self.UNSEEN)[0], 0)
        self.assertIn(": does not compile", self.mutated(known=self.SEEN.replace("10 * a - b", "10 * (a"))[1])
        code, text = self.mutated("--ci", known=self.SEEN + self.UNSEEN)
        self.assertEqual((code, text[-19:]), (0, "1 passed, 0 failed\n"), text)
        self.put_test("time.sleep(0 if sum.total(2, 3) == 23 else 60)")
        self.assertIn("killed by a/test_sum.py: did not end", self.mutated(known=self.SEEN)[1])

    def test_tests_that_do_not_run(self):
        for test in ("assert False", "self.skipTest('SKIPPED: no GPU')"):
            self.put_test(test)
            code, text = self.mutated("--ci", known=self.SEEN)
            self.assertEqual((code, "no result: test/a/test_sum.py" in text), (2, True), text)

    def test_drawn(self):
        faults = mutate.draw(3, 3)
        self.assertEqual(faults[:2], mutate.draw(3, 2))                 # a larger count adds to a smaller one
        code, text = self.mutated("--seed", "3", "--count", "2")
        self.assertEqual((code, text.count("killed by"), text.count(": survived")), (0, 1, 2), text)
        self.assertIn("seen by make test: 0 of 2, 0 %\nseen by all tests: 1 of 2, 50 %\n", text)
        kept = self.read("mutations.csv")
        self.write("mutations.csv", re.sub(r"(,survived,,,,\d+,)", r"\1it adds nothing", kept).replace(
            "a/test_sum.py,test (__main__.Sum.test),,", "a,,yes,"))
        code, text = self.mutated("--seed", "3", "--count", "2")                # nothing is planted again
        self.assertEqual((code, text), (0, "seen by make test: 1 of 1, 100 %\nseen by all tests: 1 of 1, 100 %\n\n"))
        with mock.patch.object(mutate, "MOST", -1):
            self.assertIn(": out of time\n", self.mutated("--seed", "4", "--count", "1")[1])
        self.write("mutations.csv", kept.replace("data/sum.py", "data/other.py"))
        self.assertIn("the sources have changed", self.mutated("--seed", "3")[1])

    def test_make_test_comes_first(self):
        """a fault that survives it meets the rest, and is in one score only"""
        self.write("test/a/test_more.py", self.read("test/a/test_sum.py"))
        self.put_test("pass")
        self.start(mock.patch.object(mutate.runner, "plan", lambda kind, _: (
            ["test/a/test_sum.py" if kind == "test" else "test/a/test_more.py"], [])))
        self.start(mock.patch.dict(mutate.runner.SHORT, {"a/test_sum.py": (1, 1)}))
        text = self.mutated("--seed", "3", "--count", "2")[1]
        counts = [text.count(what) for what in (": survived so far\n", ": survived\n", "killed by a/test_more")]
        self.assertEqual(counts, [2, 1, 1], text)
        self.assertIn("seen by make test: 0 of 2, 0 %\nseen by all tests: 1 of 2, 50 %\n1 killed, 1 survived\n", text)
        os.remove(self.path("mutations.csv"))
        self.start(mock.patch.dict(mutate.runner.SHORT, {"a/test_more.py": (1, 1)}))
        self.assertIn("seen by make test: 1 of 2, 50 %\n", self.mutated("--seed", "3", "--count", "2")[1])

    def test_every_known_fault_still_applies(self):
        with mock.patch.object(mutate, "ROOT", ROOT):
            faults = mutate.read_known(mutate.KNOWN)
        self.assertGreater(len({f.id for f in faults}), 8)
        self.assertEqual([f.id for f in faults if not f.tests], [])


if __name__ == "__main__":
    unittest.main()
