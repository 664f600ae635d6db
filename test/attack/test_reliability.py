#!/usr/bin/env python3
"""test_reliability.py -- the scoreboard of promises counts what its parts print, and calls nothing proved that did not
run."""
import argparse
import contextlib
import io
import os
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reliability                                          # noqa: E402


class Reliability(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        for name in ("CSV", "REPORT"):
            patch = mock.patch.object(reliability, name, os.path.join(self.directory.name, name))
            patch.start()
            self.addCleanup(patch.stop)

    def run_parts(self, *commands, form="full", minutes=60):
        """of parts that print what they are given: (passed, failed, left), and what was said"""
        parts = [reliability.Part(f"part {i}", "P1", command, command, 10, kind)
                 for i, (kind, command) in enumerate(commands)]
        with mock.patch.object(reliability, "programs", lambda *_: ["help"]), \
                mock.patch.object(reliability.ledger, "commit", lambda *_, **__: "0123456789"), \
                contextlib.redirect_stdout(io.StringIO()) as said:
            return reliability.run(parts, form, minutes), said.getvalue()

    def rows(self):
        rows = reliability.ledger.read(reliability.CSV)
        return [(r["part"], r["cases"], r["failures"], r["what"]) for r in rows]

    def test_what_the_parts_print(self):
        for kind, text, code, wanted in (
                ("assertions", "All tests passed (451 assertions in 5 test cases)", 0, (451, 0)),
                ("assertions", "All tests passed (1 assertion in 1 test case)", 0, (1, 0)),
                ("assertions", "test cases:   3 |   1 passed | 2 failed\nassertions: 705 | 703 passed | 2 failed", 1,
                 (705, 2)),
                ("assertions", "No test cases matched 'x'", 2, (0, 1)),
                ("assertions", "test cases: 1 | 1 failed\nassertions: - none -", 1, (0, 1)),
                ("cases", "kills; seed 1: 8 cases, 1 failures, 3 s\n7 passed, 1 failed", 1, (8, 1)),
                ("cases", "24 cases, 20 of them done already, on ab\n0 cases are left\n4 passed, 0 failed", 0, (24, 0)),
                ("tests", "Ran 2 tests in 3.4s\n\nOK", 0, (2, 0)),
                ("tests", "Ran 3 tests in 3.4s\n\nFAILED (failures=1, errors=1)", 1, (3, 2)),
                ("executions", "flags    1200 executions     310 edges  ok\njson 34 executions 20 edges  ok\n"
                 "2 passed, 0 failed", 0, (1234, 0)),
                ("executions", "flags    1200 executions     310 edges  FAILED\n0 passed, 1 failed", 1, (1200, 1)),
                ("faults", "1 does not compile, 50 killed, 2 survived", 1, (52, 2)),
                ("cases", "killed", -9, (0, 1))):
            self.assertEqual(reliability.counted(kind, text, code), wanted, text)

    def test_what_ran_is_recorded_once_for_a_commit(self):
        parts = (("cases", "echo '3 passed, 0 failed'"), ("cases", "sh -c 'echo 1 passed, 1 failed; exit 1'"),
                 ("assertions", "echo 'No tests ran'"))
        self.assertEqual(self.run_parts(*parts, form="short")[0], (1, 2, 0))
        self.assertEqual(self.rows(), [])
        (passed, failed, left), said = self.run_parts(*parts)
        self.assertEqual((passed, failed, left), (1, 2, 0))
        self.assertIn("exit code 1", said)
        self.assertEqual(self.rows(), [("part 0", "3", "0", ""), ("part 1", "2", "1", ""), ("part 2", "0", "1", "")])
        self.assertEqual(self.run_parts(*parts)[0], (0, 2, 0))              # what has failed runs again

    def test_what_would_end_too_late_is_left(self):
        self.assertEqual(self.run_parts(*[("cases", "echo '1 passed, 0 failed'")] * 3, minutes=5)[0], (1, 0, 2))

    def test_what_left_cases_is_not_done(self):
        part = reliability.Part("ranks-long bits", "P12", None, "", 50, "cases")
        row = {"commit": "a", "part": part.name, "cases": "5", "failures": "0", "what": "19 cases are left"}
        self.assertTrue(reliability.due(part, [row], "a"))
        self.assertEqual(reliability.since_failure([row], part.name), [])
        self.assertFalse(reliability.due(part, [row, dict(row, what="")], "a"))
        self.assertTrue(reliability.due(part, [row, dict(row, what="")], "b"))

    def test_parts_and_rows(self):
        ledger, path = reliability.ledger, os.path.join(self.directory.name, "rows.csv")
        things = list(range(11))
        for n in range(1, 14):
            shares = [ledger.share(ledger.part_of(f"{k}/{n}"), things) for k in range(1, n + 1)]
            self.assertEqual(sorted(x for s in shares for x in s), things)
            self.assertLessEqual(max(map(len, shares)) - min(map(len, shares)), 1)
        for text in "0/2", "3/2", "1", "1/0", "-1/2", "1/2x", "1/ 2", "":
            self.assertRaisesRegex(argparse.ArgumentTypeError, "expected K/N with K from 1 to N, got " + text,
                                   ledger.part_of, text)
        self.assertEqual(ledger.read(path), [])
        ledger.append(path, {"a": 1, "b": 'a "word", é'})
        ledger.append(path, {"b": "", "a": 2})
        self.assertEqual(ledger.read(path), [{"a": "1", "b": 'a "word", é'}, {"a": "2", "b": ""}])
        with open(path, "rb") as f:
            whole = f.read()
        for last in (b"3", b"3,", b"3,4,5\n", b"\xff\0\n", b'"\n'):         # torn, or damaged
            with open(path, "wb") as f:
                f.write(whole + last)
            with self.assertRaisesRegex(reliability.console.BadInput, "rows.csv: line 4: expected 2 columns"):
                ledger.read(path)

    def test_a_parser_is_fuzzed_until_its_hour_is_full(self):
        part = reliability.Part("fuzz json", "P19", None, "", 10, "executions")
        row = {"commit": "a", "part": "fuzz json", "cases": "5", "failures": "0", "seconds": "1800",
               "what": "77 edges"}
        self.assertTrue(reliability.due(part, [row], "b"))
        self.assertFalse(reliability.due(part, [row, row], "b"))
        self.assertTrue(reliability.due(part, [row, row, dict(row, failures="1")], "b"))

    def test_the_report(self):
        def row(part, cases, failures):
            reliability.ledger.append(reliability.CSV, {
                "commit": "0123456789", "part": part, "cases": cases, "failures": failures, "seconds": "60",
                "what": "77 edges"})
        row("kills of processes", 10, 3)
        row("kills of processes", 20, 0)
        row("kills of processes", 5, 0)
        row("failing calls", 9, 0)
        row("failing calls", 9, 2)
        row("fuzz json", 1000000, 0)
        with contextlib.redirect_stdout(io.StringIO()):
            reliability.report()
        with open(reliability.REPORT, encoding="ascii") as f:
            text = f.read()
        self.assertIn("| kills of processes | 25 assertions | 0 | 0123456789 |", text)
        self.assertIn("| failing calls | 9 assertions | 2 | 0123456789 |", text)
        self.assertIn("| fuzz json | 1,000,000 executions in 1 min, 77 edges | 0 |", text)
        self.assertIn("kills at every call, attack kills | not yet run at full length |", text)

    def test_every_promise_has_tests(self):
        proved = {number for p in reliability.PARTS if p.full for number in p.promises.split()}
        self.assertEqual(set(reliability.PROMISES) - proved, set())
        self.assertEqual(len({p.name for p in reliability.PARTS}), len(reliability.PARTS))
        self.assertIn("tokenizer", reliability.parsers())


if __name__ == "__main__":
    unittest.main()
