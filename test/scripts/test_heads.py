"""test_heads.py -- heads.py: against plain loops over drawn parts, and that what both trainers write of every encoding
sums to weights of 1."""
import json
import math
import os
import random
import struct
import subprocess
import sys
import unittest

from folder import BERT_TRAINER, HAS_BERT, HAS_TRAINER, SCRIPTS, TRAINER, Folder, called
import console
import heads
try:
    import numpy
except ImportError:
    numpy = None

EXACT = "queries", "window90", "live_tiles"
ABOUT = {"layer": 1, "heads": 1, "T": 0, "causal": 1, "window": 0, "sinks": 0, "inside": 0, "log": 0, "relu": 0}


def sums_of(about, window, T):
    """(the record of one head over one window, by loops; the lse of its queries); window: (q, k, bias, begins)"""
    q, k, bias, begins = window
    n = len(q)
    logits = [[sum(a * b for a, b in zip(q[i], k[j])) for j in range(n)] for i in range(n)]

    def seen(i, j):
        W = about["window"]
        return (j <= i or not about["causal"]) and j >= begins[i] and (
            not W or i - W < j < i + W or j < begins[i] + about["sinks"])
    P, lse = [], []
    for i in range(n):
        row = [logits[i][j] + bias(i, j, logits[i], seen) if seen(i, j) else -math.inf for j in range(n)]
        lse.append(max(row) + math.log(sum(math.exp(x - max(row)) for x in row)))
        P.append([math.exp(x - lse[i]) for x in row])
    tiles = {(i // 64, j // 64) for i in range(n) for j in range(n) if j <= i or not about["causal"]}
    live = {(i // 64, j // 64) for i in range(n) for j in range(n) if P[i][j] > 2 ** -24 / T}
    mass = [sum(P[i][j] for i in range(n) for j in range(n) if abs(i - j) == d) / n for d in range(T)]
    ends = [0, *(2 ** e for e in range(20) if 2 ** e < T), T]
    return {"entropy": -sum(p * math.log(p) for row in P for p in row if p > 0) / n,
            "distance": sum(d * m for d, m in enumerate(mass)),
            "window90": next(W for W in range(T + 1) if sum(mass[:W]) >= 0.9 * sum(mass)),
            "sink_weight": {str(s): sum(sum(row[:s]) for row in P) / n for s in (1, 4, 16)},
            "live_tiles": len(live) / len(tiles), "queries": n,
            "by_distance": [sum(mass[a:b]) for a, b in zip(ends, ends[1:])]}, lse


@unittest.skipUnless(numpy, "SKIPPED: Python's numpy is missing: pip install -r data/requirements.txt")
class TestSums(Folder):
    def file(self, about, tensors, name="parts_9_0_1.safetensors"):
        """a file as the trainer writes it; tensors: {name: list, or list of rows}"""
        header, data = {"__metadata__": {"format": "pt", **{key: str(value) for key, value in about.items()}}}, b""
        for key, rows in tensors.items():
            flat = [x for row in rows for x in row] if isinstance(rows[0], list) else rows
            shape = [len(rows), len(rows[0])] if isinstance(rows[0], list) else [len(rows)]
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(flat)]}
            data += struct.pack(f"<{len(flat)}f", *flat)
        text = json.dumps(header).encode()
        return self.write(name, struct.pack("<Q", len(text)) + text + data)

    def check(self, n=150, T=150, tensors=None, bias=lambda *_: 0.0, begins=None, scale=1.0, **about):
        """the sums of one drawn window are the loops'"""
        draw = random.Random(n)
        f32 = lambda x: struct.unpack("f", struct.pack("f", x))[0]
        q, k = ([[f32(scale * draw.gauss(0, 1)) for _ in range(3)] for _ in range(n)] for _ in "qk")
        about = {**ABOUT, "T": T, **about}
        want, lse = sums_of(about, (q, k, bias, begins or [0] * n), T)
        more = {"begins": list(map(float, begins))} if begins else {}
        self.file(about, {"0.q": q, "0.k": k, "0.lse": lse, **{"0." + key: x for key, x in (tensors or {}).items()},
                          **more})
        (found,) = heads.statistics(self.folder)
        self.assertEqual((found["layer"], found["head"]), (1, 0))
        numbers = lambda x: list(x.values() if isinstance(x, dict) else numpy.ravel(x))
        for key, value in want.items():
            with self.subTest(key):
                self.assertEqual(numpy.shape(numbers(found[key])), numpy.shape(numbers(value)))
                for a, b in zip(numbers(found[key]), numbers(value)):
                    self.assertAlmostEqual(a, b, delta=0 if key in EXACT else 1e-6 * max(1, b))

    def test_no_bias_and_masks(self):
        self.check()
        self.check(T=200)                                   # the data's last window is shorter
        self.check(n=1, T=1)
        self.check(causal=0)
        self.check(scale=9.0)                               # tiles without a weight
        for causal in 1, 0:
            self.check(window=20, sinks=3, causal=causal)
        self.check(window=20, sinks=3, begins=[t // 37 * 37 for t in range(150)])

    def test_each_form_of_a_bias(self):
        n, draw = 150, random.Random(7)
        drawn = lambda count: [struct.unpack("f", struct.pack("f", draw.uniform(0.1, 1)))[0] for _ in range(count)]
        B, g, f, offset, origin = drawn(2 * n - 1), drawn(n), drawn(n), drawn(n), [0.0, 70.5]
        S = [origin[t // 128] + offset[t] for t in range(n)]
        D = lambda i, j: abs(S[i] - S[j])
        cable = {"S_offset": offset, "S_origin": [[0.0, 70.125], [0.0, 0.25], [0.0, 0.125]], "g": g}
        for causal in 1, 0:
            self.check(tensors={"by_distance": B}, bias=lambda i, j, *_: B[n - 1 + i - j], causal=causal)
            self.check(tensors=cable, bias=lambda i, j, *_: -g[i] * D(i, j), causal=causal)
        rows = [drawn(n) for _ in range(n)]
        self.check(tensors={"rows": rows, "factor": f}, bias=lambda i, j, *_: f[i] * rows[i][j], causal=0)
        self.check(tensors={"by_distance": B, "factor": f}, bias=lambda i, j, *_: f[i] * B[n - 1 + i - j])
        self.check(tensors={**cable, "factor": f}, bias=lambda i, j, *_: -f[i] * g[i] * D(i, j))
        self.check(tensors={**cable, "factor": f}, log=1, bias=lambda i, j, *_: -f[i] * g[i] * math.log1p(D(i, j) ** 2))
        self.check(tensors={**cable, "factor": f}, log=1, inside=1,
                   bias=lambda i, j, *_: -f[i] * math.log1p((g[i] * D(i, j)) ** 2))
        z = [drawn(5) for _ in range(n)]

        def cope(i, j, logits, seen):
            place = min(sum(1 / (1 + math.exp(-logits[t])) for t in range(j, i + 1) if seen(i, t)), 4)
            low = min(int(place), 3)
            return z[i][low] + (place - low) * (z[i][low + 1] - z[i][low])
        self.check(tensors={"z": z}, bias=cope)
        self.check(tensors={"z": z}, bias=cope, window=30, sinks=2)

    def test_where_a_tile_dies(self):
        """its largest weight is e^-x, and 2^-24 / T = 2^-31"""
        zero, n = [[0.0]] * 128, 128
        for halvings, live in (30.9, 1), (31.1, 2 / 3):
            B = [-halvings * math.log(2)] * (n - 1) + [0.0] + [-halvings * math.log(2)] * (n - 1)
            self.file({**ABOUT, "T": n}, {"0.q": zero, "0.k": zero, "0.lse": [0.0] * n, "0.by_distance": B})
            self.assertEqual(heads.statistics(self.folder)[0]["live_tiles"], live)

    def test_ranges_and_dead_heads(self):
        b = [0.0, 1.5, 0.0, 2.0]
        S = [0.0, 1.5, 1.5, 3.5]
        for steps, dead in ((b, False), ([0.0] * 4, True)):
            cable = {"S_offset": S if steps is b else steps, "S_origin": [[0.0]] * 3, "g": [0.5, 1.0, 2.0, 0.5]}
            x = [[0.0]] * 4
            self.file({**ABOUT, "T": 4, "relu": 1}, {"0.q": x, "0.k": x, "0.lse": [0.0] * 4,
                                                     **{"0." + key: value for key, value in cable.items()}})
            (found,) = heads.statistics(self.folder)
            self.assertEqual((found["dead"], found["g"]), (dead, [0.5, 1.0, 2.0]))
            self.assertEqual(found["b"], [0.0, sum(steps) / 4, max(steps)])
            self.assertEqual(found["S"], 3 * [sum(steps)])

    def test_memory_of_16384_tokens(self):
        n = 16384
        x = [[0.25]] * n
        self.file({**ABOUT, "T": n, "window": 64}, {"0.q": x, "0.k": x, "0.lse": [0.0] * n})
        code = (f"import sys, resource; sys.path.insert(0, {SCRIPTS!r}); import heads; heads.statistics(sys.argv[1]); "
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
        ran = subprocess.run([sys.executable, "-c", code, self.folder], check=True, capture_output=True, text=True)
        self.assertLess(int(ran.stdout) << 10, 300e6)


@unittest.skipUnless(HAS_TRAINER and HAS_BERT, "the trainers are not built")
@unittest.skipUnless(numpy, "SKIPPED: Python's numpy is missing: pip install -r data/requirements.txt")
class TestTrainers(Folder):
    def heads(self, trainer, *more, code=0, lengths="150", model="model"):
        found, out, err = called(heads.main, self.path(model), "--val_files", self.text, "--eval_lengths", lengths,
                                 "--out", self.path("out"), "--trainer", trainer, *more)
        self.assertEqual(found, code, err)
        return out + err

    def setUp(self):
        super().setUp()
        self.text = self.write("a.txt", "".join(chr(97 + i * i * 7 % 26) for i in range(1000)))

    def train(self, trainer, *more, out="model"):
        subprocess.run([trainer, "--train_files", self.text, "--val_files", self.text, "--model", "2,2,16", "--T", "32",
                        "--B", "4", "--steps", "3", "--lr", "1e-2", "--val_every", "0", "--checkpoint_every", "3",
                        "--out", self.path(out), "--threads", "1", *more], check=True, capture_output=True)

    def test_weights_sum_to_1(self):
        """the trainer's lse follows from the parts that it writes, with every form of a bias"""
        for n, (pos, *more) in enumerate((
                ["cable+ssmax"], ["kcable:weight=inside", "--window", "20,30", "--sinks", "2"], ["cable_signed"],
                ["fire"], ["t5+rope"], ["alibi+ssmax"], ["kerple_power"], ["cope", "--window", "40"],
                ["none,cope+ssmax"], ["kcable:weight=inside+ssmax"])):
            for trainer in (TRAINER,) if "cope" in pos else (TRAINER, BERT_TRAINER):
                with self.subTest(pos=pos, trainer=os.path.basename(trainer)):
                    name = f"{os.path.basename(trainer)}{n}"
                    self.train(trainer, "--pos", pos, *more, out=name)
                    said = self.heads(trainer, "--eval_tokens", "300", "--stride", "100", model=name)
                    for r in self.records("head", "out")[-4:]:
                        self.assertAlmostEqual(sum(r["by_distance"]), 1, delta=2e-6)
                        self.assertEqual((r["T"], r["stride"], r["T_train"]), (150, 100, 32))
                    self.assertEqual(said.count("\n"), 6, said)
                    self.assertEqual(os.listdir(self.path("out")), ["log.jsonl"])

    def test_lengths_and_the_log(self):
        self.train(TRAINER, "--pos", "cable,alibi")
        self.heads(TRAINER, "--eval_tokens", "300", lengths="64,150")
        records = console.read_log(self.path("out"), "head")
        self.assertEqual([(r["T"], r["layer"], r["head"]) for r in records],
                         [(T, l, h) for T in (64, 150) for l in (0, 1) for h in (0, 1)])
        self.assertEqual([r["queries"] for r in records], 8 * [300])
        self.assertEqual([r.get("dead") for r in records], 2 * [False, False, None, None])      # alibi cannot be dead
        self.assertEqual(len(console.read_log(self.path("out"), "extrapolation")), 2)

    def test_refusals(self):
        self.train(TRAINER, "--pos", "learned")
        for more, lengths, why in ((["--eval_tokens", "10"], "32", "--eval_tokens: expected at least 32"),
                                   ([], "64", "learned reaches 32 tokens"), ([], "2000", "expected at least 2001")):
            self.assertIn(why, self.heads(TRAINER, *more, lengths=lengths, code=2))
        for trainer, flags, why in (
                (TRAINER, ["--heads"], "scripts/heads.py CHECKPOINT --val_files"),
                (BERT_TRAINER, ["--dump_bias", "0,1", "--eval_lengths", "32"], "expected LAYER,parts with --eval"),
                (BERT_TRAINER, ["--dump_bias", "2,parts", "--eval_lengths", "32", "--out", "o", "--model", "2,2,16"],
                 "a layer below 2, got '2,parts'")):
            ran = subprocess.run([trainer, "--train_files", self.text, "--val_files", self.text, "--steps", "1", "--T",
                                  "32", *flags], cwd=self.folder, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 2, ran.stderr)
            self.assertIn(why, ran.stderr)


if __name__ == "__main__":
    unittest.main()
