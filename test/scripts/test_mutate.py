#!/usr/bin/env python3
"""test_mutate.py -- test/mutations/mutate.py: faults that a test sees and that none sees, and what it keeps of them."""
import glob
import os
import random
import signal
import subprocess
import sys
import unittest
from unittest import mock

from folder import ROOT, Folder, called

sys.path.insert(0, os.path.join(ROOT, "test", "mutations"))
import mutate       # noqa: E402
import tree         # noqa: E402


class Mutate(Folder):
    def setUp(self):
        super().setUp()
        self.write("data/sum.py", "def total(a, b):\n    return 10 * a + b\n\n\ndef idle(a):\n    return a + 0\n")
        self.put_test("self.assertEqual(sum.total(2, 3), 23); sum.idle(1)")
        for words in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *words], cwd=self.folder, check=True)
        for module in (mutate, mutate.planting):
            self.patch(module, "ROOT", self.folder)
        self.patch(mutate, "OBJECTS", [])
        self.patch(mutate, "all_tests", lambda: {"t.py": []})
        self.patch(mutate.ledger, "commit", lambda: "0123456789")

    def patch(self, *words):
        self.start(mock.patch.object(*words))

    def put_test(self, line, more=""):
        """t.py: a test of this line, which sees data/sum.py as `sum`, and what `more` adds to its class"""
        self.write("t.py", "import sys, time, unittest\nsys.path.insert(0, 'data')\nimport sum\n\n\n"
                           f"class Sum(unittest.TestCase):\n    def test(self):\n        {line}\n{more}\n\n"
                           "if __name__ == '__main__':\n    unittest.main()\n")

    def run_main(self, *words, known=""):
        """(exit code, what it printed, the rows of its CSV)"""
        results = self.path("results.csv")
        with mock.patch.object(mutate, "KNOWN", self.write("known.tsv", known)):
            code, out, err = called(mutate.main, "--results", results, *words)
        return code, out + err, self.table(results) if os.path.exists(results) else []

    SEEN = "minus\tdata/sum.py\t10 * a + b\t10 * a - b\tt.py\tci\ta difference\n"
    UNSEEN = "idle\tdata/sum.py\ta + 0\ta - 0\tt.py\t\tnothing\n"

    def test_killed_and_survived(self):
        code, text, rows = self.run_main(known="# a comment\n" + self.SEEN + self.UNSEEN)
        self.assertEqual((code, [r["result"] for r in rows]), (1, ["killed by t.py", "survived"]))
        self.assertIn("1 killed, 1 survived", text)
        self.assertIn("data/sum.py:6\n- a + 0\n+ a - 0", text)
        self.assertIn("10 * a + b", self.read("build/mutations/tree/data/sum.py"))      # the copy is whole again
        self.assertEqual(self.run_main("--only", "minus", known=self.SEEN + self.UNSEEN)[0], 0)

    def test_what_is_done_is_not_done_again(self):
        tried = mock.patch.object(mutate.Tree, "verdict", side_effect=lambda n, *_: (f"tried {n}", 1))
        self.run_main("--only", "minus", known=self.SEEN + self.UNSEEN)
        with tried:
            _, text, rows = self.run_main(known=self.SEEN + self.UNSEEN)
        self.assertEqual([r["result"] for r in rows], ["killed by t.py", "tried 2"])
        self.assertIn("minus, data/sum.py: killed by t.py", text)
        with tried, mock.patch.object(mutate.ledger, "commit", lambda: "1123456789"):
            self.assertEqual(len(self.run_main(known=self.SEEN)[2]), 3)

    def test_a_run_that_ends_early_is_continued(self):
        code, text, rows = self.run_main("--minutes", "0.000001", known=self.SEEN)
        self.assertEqual((code, rows), (0, []))
        self.assertIn("1 faults are left; the same command continues", text)
        with mock.patch.object(mutate.Tree, "verdict", side_effect=mutate.console.Interrupted):
            self.run_main("--minutes", "5", known=self.SEEN)
        with mock.patch.object(mutate.Tree, "green", side_effect=AssertionError):       # this is not done again
            code, _, rows = self.run_main("--minutes", "5", known=self.SEEN)
        self.assertEqual((code, len(rows)), (0, 1))

    def test_what_is_refused(self):
        cases = [(self.SEEN.replace("10 * a + b", "a * b"), (), "expected its text once in data/sum.py, got 0"),
                 (self.SEEN.replace("10 * a + b", "a +"), (), "got 2"), ("a\tb\n", (), "expected 7 cells, got 2"),
                 (self.SEEN, ("--only", "plus"), "there is no fault plus")]
        for known, words, said in cases:
            with self.subTest(said=said):
                code, text, rows = self.run_main(*words, known=known)
                self.assertEqual((code, rows), (2, []))
                self.assertIn(said, text)

    def refused(self, known, why):
        self.forget()
        code, text, rows = self.run_main(known=known)
        self.assertEqual((code, rows), (2, []), text)
        self.assertIn(why, text)
        self.assertRegex(text, r"mutate.py: no result: \w+")

    def test_tests_that_do_not_run(self):
        for test, why in (("pass\n", "and none ran"), ("assert False\n", "got exit code 1")):
            with self.subTest(why=why):
                self.write("t.py", test)
                self.refused(self.SEEN, why)
        self.put_test("self.skipTest('SKIPPED: no GPU')")
        self.refused(self.SEEN, "t.py | no GPU")                            # skipped, and no test is left
        self.put_test("self.assertEqual(sum.total(2, 3), 23)",
                      "    @unittest.skip('SKIPPED: build/x is not built')\n    def test_x(self):\n        pass\n")
        self.refused(self.SEEN, "but some were left out: build/x is not built")

    PROGRAM = """#include "test/../llmc/sum.h"
        #include <cstdio>
        #include <cstring>
        int main(int argc, char** argv) {
            const char* what = argv[argc - 1];
            if (strcmp(what, "--list-test-names-only") == 0) { puts("total\\nlonger"); return 2; }
            const bool total = strcmp(what, "total") == 0;
            const bool good = total ? sum(2, 3) == 23 : longer(1) == SIZE;
            puts(argc < 3 ? "No tests ran" : good ? "All tests passed (1 assertion in 1 test case)" :
                                                    "test cases: 1 | 1 failed");
            return good ? 0 : 1;
        }"""
    HEADER = """constexpr int SIZE = 2;
        inline int sum(int a, int b) { return 10 * a + b; }
        inline int longer(int a) {
            const int sized[SIZE] = {};
            if (a < 0) { a = a - 5; }
            for (int i = 0; i < 1 + (int)sizeof sized % 2; i++) { a += 1; }
            return a;
        }
        template <int N> int unused() { return N; }
        """
    FAULTS = {"seen": ("10 * a + b", "10 * a - b", "killed by test_sum", 1),
              "endless": ("sized % 2; i++", "sized % 2; i--", "killed by test_sum, which did not end", 1),
              "equal": ("a < 0)", "a <= 0)", "survived", 1),
              "dead": ("a = a - 5", "a = a + 5", "reached by no test", 0),
              "constant": ("SIZE = 2", "SIZE = 1 + 2", "killed by test_sum", None),
              "wrong": ("return a;", "return b;", "does not compile", 0),
              "template": ("int N> int", "int N, int M> int", "survived", 2)}

    def forget(self):
        for path in glob.glob(f"{self.folder}/results.csv") + glob.glob(f"{self.folder}/build/mutations/*.json"):
            os.remove(path)

    def put_cpp(self):
        self.forget()
        self.write("llmc/sum.h", self.HEADER)
        self.write("test/test_sum.cu", self.PROGRAM)
        self.write("Makefile", "build/test/test_sum: test/test_sum.cu llmc/sum.h\n\tmkdir -p build/test\n"
                               "\tg++ -std=c++17 -I. -MMD -MF $@.d -x c++ $< -o $@\n")
        self.patch(mutate, "all_tests", lambda: {"build/test/test_sum": []})
        lines = self.HEADER.split("\n")
        faults = []
        for i, (before, after, *_) in enumerate(self.FAULTS.values()):
            line = next(n for n, text in enumerate(lines) if before in text)
            faults.append(mutate.Fault(f"seed 1, {i}: x", "llmc/sum.h", line + 1, lines[line],
                                       lines[line].replace(before, after), ""))
        self.patch(mutate.planting, "draw", lambda seed, count: faults)

    def test_cpp_in_one_build(self):
        """a fault that is seen, one that ends nothing, one that changes nothing; one that no test reaches; and those
        that are no expressions: a constant, what does not compile, a template"""
        self.put_cpp()
        with mock.patch.object(mutate.Tree, "make", autospec=True, side_effect=mutate.Tree.make) as make, \
                mock.patch.object(tree, "SPARE", 1):
            code, text, rows = self.run_main("--seed", "1")
        self.assertEqual(code, 0, text)
        rows.sort(key=lambda r: r["id"])
        for row, (name, (*_, result, cases)) in zip(rows, self.FAULTS.items(), strict=True):
            with self.subTest(name=name):
                self.assertEqual(row["result"], result)
                self.assertIn(cases, (int(row["cases"]), None))         # None: which case is faster is not known
        # nothing at first; all programs, and again without what does not compile; the one; then three faults by
        # themselves, after a check that they compile
        built = ["build/test/test_sum"]
        self.assertEqual([call.args[1] for call in make.call_args_list], [[], built, built, built] + 3 * [[], built])

    def test_what_does_not_compile_as_an_expression(self):
        """the faults on lines that the compiler names, else those of the file"""
        self.put_cpp()
        faults = dict(enumerate(mutate.planting.draw(1, 7), 1))
        for said, left in (("llmc/sum.h:6:9: error: x", {2}), ("a.h:1: error: x\nllmc/sum.h:2:30: note: x", {1}),
                           ("llmc/sum.h:99:1: error: x", {1, 2, 3, 4, 5, 6})):
            with self.subTest(said=said), mock.patch.object(mutate.Tree, "make", side_effect=[(1, said), (0, "")]):
                self.assertEqual(mutate.Tree(self.folder + "/tree").build(faults, ["x"]) - {7}, left)

    def test_cpp_whose_tests_do_not_run(self):
        self.put_cpp()
        for put, why in ((("test/test_sum.cu", self.PROGRAM.replace("sum(2, 3) == 23", "false")), "got exit code 1"),
                         (("test/test_sum.cu", self.PROGRAM.replace("argc < 3", "total")), "and none ran"),
                         (("llmc/sum.h", "wrong"), "expected its text"),
                         (("test/test_sum.cu", "wrong"), "expected tests that compile without a fault")):
            with self.subTest(why=why):
                self.put_cpp()
                self.write(*put)
                code, text, _ = self.run_main("--seed", "1")
                self.assertEqual(code, 2)
                self.assertIn(why, text)

    def test_a_fault_without_an_end(self):
        self.put_test("time.sleep(0 if sum.total(2, 3) == 23 else 60)")
        with mock.patch.object(tree, "SPARE", 1):
            code, _, rows = self.run_main(known=self.SEEN)
        self.assertEqual((code, rows[0]["result"]), (0, "killed by t.py, which did not end"))

    def test_the_time_for_one_fault(self):
        cases = {mutate.Case("x", str(i)): i for i in range(3)}
        with mock.patch.object(mutate.Tree, "run", return_value=(0, None)):
            verdict = mutate.Tree(self.folder + "/tree").verdict
            self.assertEqual(verdict(1, cases, 60), ("survived", 3))
            self.assertEqual(verdict(1, cases, -1), ("survived -1 s of its tests", 1))

    def test_in_the_background(self):
        """a shell has such a job ignore SIGINT; tests that interrupt a program do not"""
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        self.put_test("import signal; self.assertNotEqual(signal.getsignal(2), signal.SIG_IGN); sum.idle(1)")
        self.assertEqual(self.run_main(known=self.UNSEEN)[2][0]["result"], "survived")

    def test_what_does_not_compile_is_no_fault(self):
        code, _, rows = self.run_main(known=self.SEEN.replace("10 * a - b", "10 * (a - b"))
        self.assertEqual((code, rows[0]["result"]), (0, "does not compile"))

    def test_continuous_integration_runs_the_cheap_ones(self):
        code, text, rows = self.run_main("--ci", known=self.SEEN + self.UNSEEN)
        self.assertEqual((code, rows), (0, []))
        self.assertIn("minus, data/sum.py: killed by t.py", text)
        self.assertTrue(text.endswith("1 passed, 0 failed\n"), text)
        self.assertEqual(self.run_main("--ci", known=self.SEEN)[0], 0)                  # again
        code, text, _ = self.run_main("--ci", known=self.UNSEEN.replace("t.py\t\t", "t.py\tci\t"))
        self.assertEqual(code, 1)
        self.assertTrue(text.endswith("0 passed, 1 failed\n"), text)

    def test_survivors_and_the_score(self):
        survivors = self.write("survivors.tsv", "")
        self.patch(mutate, "SURVIVORS", survivors)
        self.run_main(known=self.SEEN + self.UNSEEN)
        code, text, _ = self.run_main("--summary")
        self.assertEqual(code, 1)
        self.assertIn("| all | 1 | 0 | 1 | 0 | 0 | 0 | 50.0% | 50.0% |", text)
        self.assertRegex(text, r"no explanation in survivors.tsv: idle: survived\n  data/sum.py:6")
        self.write("survivors.tsv", "idle\tdata/sum.py\tequivalent\tnothing is added\n")
        code, text, _ = self.run_main("--summary")
        self.assertEqual(code, 0, text)
        self.assertIn("| all | 1 | 0 | 0 | 0 | 1 | 0 | 100.0% | 100.0% |", text)

    def test_a_test_written_since(self):
        """those that no test has seen are tried again: two scores"""
        self.put_test("self.assertEqual(sum.total(2, 0), 20)")
        self.run_main("--seed", "3")
        self.put_test("self.assertEqual(sum.total(2, 3), 23)")
        self.patch(mutate.ledger, "commit", lambda: "1123456789")
        _, text, _ = self.run_main("--seed", "3", "--again")
        self.assertIn("1 killed, 1 reached by no test", text)
        self.patch(mutate, "SURVIVORS", self.write("survivors.tsv", ""))
        self.assertIn("| seed 3 | 1 | 1 | 0 | 1 | 0 | 0 | 33.3% | 66.7% |", self.run_main("--summary")[1])

    def test_only_code_is_changed(self):
        rng = random.Random(1)
        for line in ('    f(a, "1 + 2")  # 1 + 2', "    const int a = b;  // 1 + 2", '    if c == "1 < 2": pass',
                     "    return imin(a, b);", "void f(int a, float b) {", "    int n = 0;"):
            for operator in ("off by one", "statement", "arguments"):
                with self.subTest(line=line, operator=operator):
                    changed = mutate.planting.mutated(operator, line, rng)
                    self.assertIn(changed, (None, '    f("1 + 2", a)  # 1 + 2', '    if c != "1 < 2": pass',
                                            "    pass  # 1 + 2"))
        self.assertEqual(mutate.planting.mutated("sign", "    a = b - c;     // d + e", rng),
                         "    a = b + c;     // d + e")
        self.assertEqual(mutate.planting.mutated("statement", "    a.b(c, d);", rng), "    ;")
        self.assertIsNone(mutate.planting.mutated("statement", "        (int)b, d);", rng))

    def test_what_becomes_an_expression(self):
        cases = [("if (x) f(a, b + 1);", " + 1", "", "if (x) f(a, (mut(7) ? (b) : (b + 1)));"),
                 ("return a < b;", "<", "<=", "return (mut(7) ? (a <= b) : (a < b));"),
                 ("if (c) x = f(a, g(b));", "a, g(b)", "g(b), a", "if (c) x = (mut(7) ? (f(g(b), a)) : (f(a, g(b))));"),
                 ("if (c) f(a, b);", "a, b", "b, a", "if (c) (mut(7) ? (f(b, a)) : (f(a, b)));"),
                 ("else x += a::b;", "+=", "-=", "else (mut(7) ? (x -= a::b) : (x += a::b));"),
                 ("x = c == 1 ? d : e - 1;", "==", "!=", "x = (mut(7) ? (c != 1) : (c == 1)) ? d : e - 1;"),
                 ("for (int i = 0; i < n; i++)", " < ", " <= ", "for (int i = 0; (mut(7) ? (i <= n) : (i < n)); i++)"),
                 ("  f(a[2]);", "f(a[2]);", ";", "  (mut(7) ? (void)0 : (void)(f(a[2])));"),
                 ('s = ", (" + t; // (', "+", "-", 's = (mut(7) ? (", (" - t) : (", (" + t)); // ('),
                 ("#if A && B", "&&", "||", None), ("  const int x[3] = {};", "3", "4", None),
                 ("f(hi), g(lo)", "hi), g(lo", "lo), g(hi", None)]
        for line, old, new, wanted in cases:
            with self.subTest(line=line):
                fault = mutate.Fault("x", "a.h", 2, line, line.replace(old, new, 1), "")
                text = f"void f();\n{line}\n"
                made = mutate.planting.schema(text, fault, 7)
                self.assertEqual(made and (text[:made[0]] + made[2] + text[made[1]:]).split("\n")[1], wanted)

    def test_drawn(self):
        draw = mutate.planting.draw
        faults = draw(3, 2)
        self.assertEqual(faults, draw(3, 2))
        self.assertEqual(faults[:1], draw(3, 1))                    # a larger count adds to a smaller one
        self.write("data/long.py", "def more(a):\n" + 40 * "    a = a + 1\n")
        subprocess.run(["git", "add", "."], cwd=self.folder, check=True)
        many = draw(3, 42)
        self.assertEqual(len({(f.file, f.line) for f in many}), 42)
        self.assertGreater(sum(f.file == "data/long.py" for f in many[:20]), 15)        # each line, not each file
        for f in many:
            self.assertNotEqual(f.before, f.after)
        code, _, rows = self.run_main("--seed", "3", "--count", "42")
        self.assertEqual(code, 0)                                   # a survivor is a finding here, not an error
        for r in rows:
            with self.subTest(before=r["before"], after=r["after"]):
                self.assertEqual(r["result"], "reached by no test" if r["file"] == "data/long.py" else
                                 "survived" if "a + 0" in r["before"] else "killed by t.py")


class Known(unittest.TestCase):
    def test_every_known_fault_still_applies(self):
        faults = mutate.read_known(mutate.KNOWN)
        self.assertEqual(len({f.id for f in faults}), len(faults))
        self.assertGreater(len(faults), 8)
        for f in faults:
            self.assertTrue(f.tests, f.id)


if __name__ == "__main__":
    unittest.main()
