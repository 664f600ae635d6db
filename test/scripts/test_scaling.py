"""test_scaling.py -- scripts/scaling.py: its formulas against arithmetic done by hand and against the trainer's --check
--as_ranks, its logs, figure and bad input."""
import contextlib
import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import console  # noqa: E402
import scaling  # noqa: E402

TRAINER = os.path.abspath(os.path.join(ROOT, os.environ.get("TRAIN_GPT2", "./train_gpt2")))
VOCABULARY = 50257


def machine(nvlink, **more):
    """no latencies; additions in registers, which read each element once"""
    return scaling.Machine(8, nvlink * 1e9, 48e9, 3e12, 0, 0, 4, 32 << 20)._replace(**more)


def exchange(model, N, m, element, zero):
    """ms of the sums and of the way back, without overlap"""
    parts = scaling.blocks(scaling.SIZES[model], VOCABULARY, "none", 1024)
    compute = scaling.Compute(0, 1e-6)
    row = scaling.predict(scaling.SIZES[model], parts, N, 1024, 1024, 1, m, compute, element, zero, False)
    assert abs(row["exposed"] - row["exchange"] - row["gather"]) < 1e-9
    return row["exposed"]


class Scaling(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def log(self, name, *ms):
        path = os.path.join(self.folder, name)
        with open(path, "w") as f:
            for step, value in enumerate(ms):
                f.write(json.dumps({"kind": "train", "step": step, "ms": value}) + "\n")
            f.write('{"kind": "train", "st')
        return path

    def run_main(self, *words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = console.code_of(scaling.main, list(words))
        return code, out.getvalue() + err.getvalue()

    def test_arithmetic_by_hand(self):
        """ms at 370 to 450 GB/s by NVLink and 48 between machines. A ring of float32 moves 2 (N - 1) / N of the
        gradient, which is what --zero 0 does on one machine; slices move 4 + 2 bytes an element."""
        for model, N, element, zero, fastest, slowest in (
                ("small", 8, 4, 0, 1.9, 2.3), ("medium", 8, 4, 0, 5.5, 6.7), ("xl", 8, 4, 0, 24, 30),
                ("small", 8, 2, 1, 1.6, 1.9), ("medium", 8, 2, 1, 4.7, 5.6), ("xl", 8, 2, 1, 21, 25),
                ("small", 64, 2, 1, 3.3, 3.6), ("xl", 64, 2, 1, 41, 45)):
            with self.subTest(model=model, N=N, element=element):
                more = {"fold": 0} if zero == 0 else {}
                for nvlink, expected in (450, fastest), (370, slowest):
                    got = exchange(model, N, machine(nvlink, **more), element, zero)
                    self.assertAlmostEqual(got / expected, 1, delta=0.05)

    def test_turns_and_latency(self):
        m = machine(100, latency=1, fold=0)
        seconds = scaling.transfer(4 * (8 << 20), 4, 4, m, True)       # 3/4 of 128 MB in turns of 32 MB
        self.assertAlmostEqual(seconds, 3 + 0.75 * (128 << 20) / 100e9, places=6)

    def test_overlap_hides_all_but_the_ends(self):
        """with long passes only the first and the last transfers are left, with short ones no more than without"""
        shape = (4, 4, 256)
        parts = scaling.blocks(shape, VOCABULARY, "none", 1024)
        one = lambda n, element, adds: scaling.transfer(n, element, 8, machine(1), adds) * 1e3
        row = lambda token, overlap: scaling.predict(shape, parts, 8, 64, 1024, 8, machine(1),
                                                     scaling.Compute(0, token), 2, 1, overlap)["exposed"]
        ends = one(parts[1], 4, True) + one(parts[2], 4, True) + one(parts[1], 2, False) + one(parts[2], 2, False)
        self.assertAlmostEqual(row(1e-3, True), ends, places=6)
        self.assertAlmostEqual(row(1e-12, True), row(1e-12, False), places=3)

    @unittest.skipUnless(os.path.exists(TRAINER), "SKIPPED: make train_gpt2")
    def test_memory_and_traffic_are_the_trainers(self):
        text = os.path.join(self.folder, "a.txt")
        with open(text, "w") as f:
            f.write("abcdefgh" * 1000)
        for pos, N, zero, batch in (("cable", 1, 1, 64), ("cable", 8, 1, 64), ("learned", 4, 1, 4),
                                    ("none", 16, 0, 64)):
            with self.subTest(pos=pos, N=N, zero=zero):
                p = subprocess.run([TRAINER, "--check", "--as_ranks", str(N), "--model", "6,8,512", "--pos", pos,
                                    "--train_files", text, "--val_files", text, "--T", "64", "--B", "1",
                                    "--steps", "1", "--zero", str(zero), "--total_batch", str(64 * batch),
                                    *["--leaves", str(N)] * (N > 8)],
                                   capture_output=True, text=True, timeout=100)
                self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
                said, unit = re.search(r"on each: ([\d.]+) ([MG]B) for the parameters", p.stdout).groups()
                parts = scaling.blocks((6, 8, 512), 256, pos, 64)
                got = scaling.memory(parts, 6, N, scaling.leaves_of(batch, N), 4, zero)
                scale = {"MB": 1e6, "GB": 1e9}[unit]
                self.assertAlmostEqual(got / scale, float(said), delta=0.06)

    def test_a_fit_and_a_measurement(self):
        """4 sequences a step: at B 1 four micro-batches of 30 ms, at B 4 one of 60: 20 fixed and 10 a sequence"""
        small, large = self.log("small", 999, 999, 999, 120, 120), self.log("large", 999, 999, 999, 60, 50, 70)
        words = ["--model", "1,2,16", "--T", "8", "--total_batch", "32", "--log", small + "@1", "--log", large + "@4"]
        out = os.path.join(self.folder, "figure")
        code, output = self.run_main(*words, "--ranks", "1,2,8", "--measured", large + "@1", "-o", out)
        self.assertEqual(code, 0, output)
        self.assertIn("measured 60 ms a step, predicted 60: +0.0%", output)
        self.assertIn("# 8: does not divide the 4 sequences of a step", output)
        with open(out + ".csv", newline="") as f:
            rows = list(csv.DictReader(f))
        self.assertEqual([r["N"] for r in rows], ["1", "2"])
        self.assertAlmostEqual(float(rows[1]["compute"]), 40, delta=1e-6)
        self.assertTrue(os.path.getsize(out + ".png") > 1000)

    def test_bad_input(self):
        log = self.log("short", 1, 2)
        for words, says in ((["--model", "huge"], "numbers joined by commas"), (["--B", "0"], "positive"),
                            (["--log", log], "FILE@NUMBER"), (["--log", log + "@1"], "more than three steps, got 2"),
                            (["--log", "nowhere@1"], "nowhere"), (["--T", "1000"], "multiple of --T")):
            code, output = self.run_main(*words)
            self.assertEqual(code, 2, output)
            self.assertIn(says, output)


if __name__ == "__main__":
    unittest.main()
