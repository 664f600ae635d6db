#!/usr/bin/env python3
"""test_mutate.py -- test/mutations/mutate.py: faults that a test sees and that none sees, and what it keeps of them."""
import contextlib
import csv
import io
import os
import random
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path.insert(0, os.path.join(ROOT, "test", "mutations"))
import mutate       # noqa: E402


class Mutate(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.root = self.directory.name
        self.put("data/sum.py", "def total(a, b):\n    return 10 * a + b\n\n\ndef idle(a):\n    return a + 0\n")
        self.put_test("self.assertEqual(sum.total(2, 3), 23)")
        for words in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *words], cwd=self.root, check=True)
        for name, value in (("ROOT", self.root), ("TESTS", [(r"data/.*\.py", "t.py")])):
            self.patch(mutate, name, value)
        self.patch(mutate.ledger, "commit", lambda: "0123456789")
        self.patch(mutate.Tree, "green", {})

    def patch(self, *words):
        patch = mock.patch.object(*words)
        patch.start()
        self.addCleanup(patch.stop)

    def put(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)
        return path

    def put_test(self, line, more=""):
        """t.py: a test of this line, which sees data/sum.py as `sum`, and what `more` adds to its class"""
        self.put("t.py", "import sys, time, unittest\nsys.path.insert(0, 'data')\nimport sum\n\n\n"
                         f"class Sum(unittest.TestCase):\n    def test(self):\n        {line}\n{more}\n\n"
                         "unittest.main()\n")

    def run_main(self, *words, known=""):
        """(exit code, what it printed, the rows of its CSV)"""
        results = os.path.join(self.root, "results.csv")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = mutate.console.code_of(mutate.main, ["--known", self.put("known.tsv", known), "--results", results,
                                                        *words])
        rows = []
        if os.path.exists(results):
            with open(results) as f:
                rows = list(csv.DictReader(f))
        return code, out.getvalue() + err.getvalue(), rows

    SEEN = "minus\tdata/sum.py\t10 * a + b\t10 * a - b\t\tci\ta difference\n"
    UNSEEN = "idle\tdata/sum.py\ta + 0\ta - 0\tt.py\t\tnothing\n"

    def test_killed_and_survived(self):
        code, text, rows = self.run_main(known="# a comment\n" + self.SEEN + self.UNSEEN)
        self.assertEqual((code, [r["result"] for r in rows]), (1, ["killed by t.py", "survived"]))
        self.assertIn("1 killed, 1 survived", text)
        self.assertIn("data/sum.py:6\n- a + 0\n+ a - 0", text)
        with open(os.path.join(self.root, "build", "mutations", "0", "data", "sum.py")) as f:
            self.assertIn("10 * a + b", f.read())                        # the copy is whole again
        self.assertEqual(self.run_main("--only", "minus", known=self.SEEN + self.UNSEEN)[0], 0)

    def test_what_is_done_is_not_done_again(self):
        self.run_main("--part", "1/2", known=self.SEEN + self.UNSEEN)
        with mock.patch.object(mutate.Tree, "try_fault", side_effect=lambda fault: f"tried {fault.id}"):
            _, text, rows = self.run_main(known=self.SEEN + self.UNSEEN)
        self.assertEqual([r["result"] for r in rows], ["killed by t.py", "tried idle"])
        self.assertIn("minus, data/sum.py: killed by t.py", text)
        with mock.patch.object(mutate.Tree, "try_fault", side_effect=lambda fault: f"tried {fault.id}"), \
                mock.patch.object(mutate.ledger, "commit", lambda: "1123456789"):
            self.assertEqual(len(self.run_main(known=self.SEEN)[2]), 3)

    def test_what_is_refused(self):
        cases = [(self.SEEN.replace("10 * a + b", "a * b"), (), "expected its text once in data/sum.py, got 0"),
                 (self.SEEN.replace("10 * a + b", "a +"), (), "got 2"), (self.SEEN * 2, (), "an id appears twice"),
                 ("a\tb\n", (), "expected 7 cells, got 2"), (self.SEEN, ("--only", "plus"), "there is no fault plus")]
        for known, words, said in cases:
            with self.subTest(said=said):
                code, text, rows = self.run_main(*words, known=known)
                self.assertEqual((code, rows), (2, []))
                self.assertIn(said, text)

    def refused(self, known, why):
        code, text, rows = self.run_main(known=known)
        self.assertEqual((code, rows), (2, []), text)
        self.assertIn(why, text)
        self.assertRegex(text, r"mutate.py: no result: \w+")

    def test_tests_that_do_not_run(self):
        self.put_test("self.skipTest('SKIPPED: no GPU')")
        self.refused(self.SEEN, "and none ran: no GPU; see")
        self.put("t.py", "pass\n")
        self.refused(self.SEEN, "and none ran; see")
        self.put_test("self.assertEqual(sum.total(2, 3), 23)",
                      "    @unittest.skip('no GPU')\n    def test_on_a_gpu(self):\n        pass\n")
        self.refused(self.UNSEEN, "no test has seen it, but some were skipped: t.py: no GPU")
        self.assertEqual(self.run_main(known=self.SEEN)[0], 0)              # one that has seen it is enough

    def test_programs_of_cpp(self):
        """their last lines, as Catch2 prints them"""
        self.put("Makefile", "build/%: % ; mkdir -p build; cp $< $@\n")
        seen, blind = self.SEEN.replace("b\t\t", "b\tbuild/t\t"), self.UNSEEN.replace("t.py", "build/t")
        passed, failed = "All tests passed (3 assertions in 2 test cases)", "test cases: 2 | 1 passed | 1 failed"
        for alone, planted, code, wanted in (
                ((passed, 0), (failed, 1), 0, "killed by t"), ((passed, 0), (passed, 0), 1, "survived"),
                (("No tests ran", 0), ("No tests ran", 0), 2, "none ran"),
                ((failed, 1), (failed, 1), 2, "that pass without a fault, got exit code 1"),
                ((passed, 0), ("No tests ran", 0), 2, "got None and exit code 0")):
            with self.subTest(alone=alone, planted=planted):
                script = "".join(f"{word} echo '{said}'; exit {n}\n{end}" for word, (said, n), end in (
                    ("if grep -q '10 [*] a [+] b' data/sum.py && grep -q 'a [+] 0' data/sum.py; then", alone, "else"),
                    ("", planted, "fi\n")))
                os.chmod(self.put("t", "#!/bin/sh\n" + script), 0o755)
                mutate.Tree.green.clear()
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self.root, "results.csv"))
                found, text, rows = self.run_main(known=seen if code == 0 else blind)
                self.assertEqual((found, len(rows)), (code, int(code != 2)), text)
                self.assertIn(wanted, text)

    def test_a_fault_without_an_end(self):
        self.put_test("time.sleep(0 if sum.total(2, 3) == 23 else 60)")
        with mock.patch.object(mutate, "SPARE", 1):
            code, _, rows = self.run_main(known=self.SEEN)
        self.assertEqual((code, rows[0]["result"]), (0, "killed by t.py, which did not end"))

    def test_what_does_not_compile_is_no_fault(self):
        code, _, rows = self.run_main(known=self.SEEN.replace("10 * a - b", "10 * (a - b"))
        self.assertEqual((code, rows[0]["result"]), (0, "does not compile"))

    def test_continuous_integration_runs_the_cheap_ones(self):
        code, text, rows = self.run_main("--ci", known=self.SEEN + self.UNSEEN)
        self.assertEqual((code, rows), (0, []))
        self.assertIn("minus, data/sum.py: killed by t.py", text)
        self.assertTrue(text.endswith("1 passed, 0 failed\n"), text)
        code, text, _ = self.run_main("--ci", known=self.UNSEEN.replace("t.py\t\t", "t.py\tci\t"))
        self.assertEqual(code, 1)
        self.assertTrue(text.endswith("0 passed, 1 failed\n"), text)

    def test_survivors_and_the_score(self):
        survivors = self.put("survivors.tsv", "")
        self.patch(mutate, "SURVIVORS", survivors)
        self.run_main(known=self.SEEN + self.UNSEEN)
        code, text, _ = self.run_main("--summary")
        self.assertEqual(code, 1)
        self.assertRegex(text, r"all +1 +1 +50.0%")
        self.assertRegex(text, r"no explanation in survivors.tsv: idle\n  data/sum.py:6")
        self.put("survivors.tsv", "idle\tdata/sum.py\tequivalent\tnothing is added\n")
        code, text, _ = self.run_main("--summary")
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"all +1 +0 +100.0% +1 +0")

    def test_only_code_is_changed(self):
        rng = random.Random(1)
        for line in ('    f(a, "1 + 2")  # 1 + 2', "    const int a = b;  // 1 + 2", '    if c == "1 < 2": pass',
                     "    return imin(a, b);", "void f(int a, float b) {", "    int n = 0;"):
            for operator in ("off by one", "statement", "arguments"):
                with self.subTest(line=line, operator=operator):
                    changed = mutate.mutated(operator, line, rng)
                    self.assertIn(changed, (None, '    f("1 + 2", a)  # 1 + 2', '    if c != "1 < 2": pass',
                                            "    pass  # 1 + 2"))
        self.assertEqual(mutate.mutated("sign", "    a = b - c;     // d + e", rng), "    a = b + c;  // d + e")
        self.assertEqual(mutate.mutated("statement", "    a.b(c, d);", rng), "    ;")
        self.assertIsNone(mutate.mutated("statement", "        (int)b, d);", rng))

    def test_drawn(self):
        faults = mutate.draw(3, 8)
        self.assertEqual(faults, mutate.draw(3, 8))
        self.assertNotEqual(faults, mutate.draw(4, 8))
        for f in faults:
            self.assertNotEqual(f.before, f.after)
        code, _, rows = self.run_main("--seed", "3", "--count", "8")
        self.assertEqual(code, 0)                                   # a survivor is a finding here, not an error
        found = {(r["before"].strip(), r["after"].strip()): r["result"] for r in rows}
        for (before, after), result in found.items():
            with self.subTest(before=before, after=after):
                self.assertEqual(result, "survived" if "a + 0" in before else "killed by t.py")


class Known(unittest.TestCase):
    def test_every_known_fault_still_applies(self):
        faults = mutate.read_known(mutate.KNOWN)
        self.assertGreater(len(faults), 8)
        for f in faults:
            self.assertTrue(f.tests, f.id)


if __name__ == "__main__":
    unittest.main()
