"""test_longppl.py -- longppl.py: which tokens are keys, and LongPPL, against plain loops over the trainer's losses."""
import glob
import json
import math
import os
import struct
import subprocess
import sys
import unittest

from folder import ENVIRONMENT, HAS_TRAINER, ROOT, TRAINER, ClassFolder, Folder, called, read, read_bytes
import console
import longppl
import numpy as np


class TestKeys(Folder):
    def test_contexts(self):
        for tokens, T, stride in (20, 8, 3), (20, 8, 8), (5, 8, 3), (17, 4, 1), (24, 8, 4), (9, 8, 7):
            seen = []
            for n in range(tokens):             # the first window that holds the target, in plain steps
                start = 0
                while n >= start + T:
                    start += stride
                seen.append(n - start + 1)
            self.assertEqual(longppl.contexts(tokens, T, stride).tolist(), seen, (tokens, T, stride))

    def test_thresholds(self):
        # long, short, can be one: a gain of 2.5 and a log-likelihood of -1.5 is a key, at the thresholds none is
        rows = [(1.5, 4.0, True, True), (1.5, 4.0, False, False), (1.5, 3.5, True, False), (2.0, 9.0, True, False),
                (1.5, 1.0, True, False), (1.75, 4.0, True, True), (2.25, 9.0, True, False)]
        long_losses, short_losses, candidate, expected = zip(*rows)
        found = longppl.key_tokens(np.array(long_losses), np.array(short_losses), np.array(candidate), 2, -2)
        self.assertEqual(found.tolist(), list(expected))

    def test_perplexity(self):
        losses = np.array([1, 2, 6, 3], dtype=np.float32)
        self.assertAlmostEqual(longppl.perplexity(losses, [0, 3]), math.exp(2), 12)
        self.assertIsNone(longppl.perplexity(losses, []))

    def test_the_newest_checkpoint_identifies_a_run(self):
        seen = []
        for step in (10, 9, 20):
            self.write(f"step_{step:08d}/manifest.json", f'{{"step": {step}}}')
            seen.append(longppl.weights_of(self.folder))
        self.assertEqual([a == b for a, b in zip(seen, seen[1:])], [True, False])
        self.assertEqual(seen[-1], longppl.weights_of(self.path("step_00000020")))

    def test_the_windows_of_the_authors_program(self):
        """--short K + d - 1 gives a token the K to K + d - 1 tokens before it that their program gives it"""
        K, d, tokens = 12, 5, 90
        theirs = {at: at - start for start in range(0, tokens + 1 - K, d)
                  for at in range(start + K, min(start + K + d, tokens + 1))}
        ours = dict(enumerate(longppl.contexts(tokens, K + d - 1, d).tolist(), 1))      # target n is token n + 1
        self.assertEqual({at: ours[at] for at in theirs}, theirs)


@unittest.skipUnless(HAS_TRAINER, "the trainer is not built")
class TestTrainer(ClassFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        text = read("LICENSE")
        for name, content in ("train.txt", text), ("val.txt", text[:900]), ("other.txt", text[1:901]):
            cls.write(name, content)
        for pos, seed in ("cable", 1), ("none", 2):
            cls.run_it(TRAINER, "--train_files", "train.txt", "--model", "1,2,32", "--T", "32", "--B", "4", "--steps",
                       "20", "--lr", "1e-2", "--val_every", "0", "--sample_every", "0", "--checkpoint_every", "20",
                       "--pos", pos, "--seed", str(seed), "--out", pos)

    @classmethod
    def run_it(cls, *words, code=0):
        r = subprocess.run(words, cwd=cls.folder, capture_output=True, text=True, timeout=120,
                           env=ENVIRONMENT)
        if r.returncode != code or "Traceback" in r.stderr:
            raise AssertionError(f"{words}: exit code {r.returncode}\n{r.stdout}{r.stderr}")
        return r

    def longppl(self, *words, code=0):
        return self.run_it(sys.executable, os.path.join(ROOT, "scripts", "longppl.py"), *words, "--trainer", TRAINER,
                           code=code)

    def losses(self, checkpoint, T, stride):
        """those of --token_losses, read without longppl.py, and the loss in the log beside them"""
        out = self.path("mine", f"{checkpoint}_{T}")
        self.run_it(TRAINER, "--load", checkpoint, "--val_files", "val.txt", "--eval_lengths", str(T), "--stride",
                    str(stride), "--token_losses", "--out", out)
        data = read_bytes(out, f"token_losses_{T}_{stride}.safetensors")
        header = 8 + struct.unpack("<Q", data[:8])[0]
        *_, logged = self.records("extrapolation", out)
        return list(struct.unpack(f"<{(len(data) - header) // 4}f", data[header:])), logged["loss"]

    def test_keys_and_scores(self):
        keys = ("keys", "cable", "--val_files", "val.txt", "--long", "128", "--short", "16", "--stride", "8", "--alpha",
                "0.01", "--beta", "-3.5", "-o", "keys.json")
        said = self.longppl(*keys).stdout
        (long_losses, logged), (short_losses, _) = (self.losses("cable", T, 8) for T in (128, 16))
        self.assertEqual(len(long_losses), 899)
        self.assertAlmostEqual(sum(long_losses) / 899, logged, 5)
        expected, candidates = [], []
        for n in range(899):
            start = 0
            while n >= start + 128:
                start += 8
            if n - start + 1 > 16:
                candidates.append(n)
                if short_losses[n] - long_losses[n] > 0.01 and -long_losses[n] > -3.5:
                    expected.append(n)
        found = json.loads(self.read("keys.json"))
        self.assertEqual(found["keys"], expected)
        self.assertEqual(found["candidates"], len(candidates))
        self.assertTrue(20 < len(expected) < len(candidates) - 20, len(expected))
        self.assertIn(f"{len(expected)} key tokens of {len(candidates)}", said)
        # two models on these tokens
        r = self.longppl("score", "keys.json", "cable", "none", "--out", "scores")
        rows = json.loads(self.read("scores", "longppl.json"))
        for row, checkpoint in zip(rows, ("cable", "none")):
            losses, _ = self.losses(checkpoint, 128, 8)
            mean = lambda chosen: sum(losses[n] for n in chosen) / len(chosen)
            self.assertAlmostEqual(row["longppl"], math.exp(mean(expected)), 4)
            self.assertAlmostEqual(row["ppl"], math.exp(mean(candidates)), 4)
            self.assertIn(f"| {checkpoint} | {row['longppl']:.4f} | {row['ppl']:.4f} |\n", r.stdout)
        self.assertNotAlmostEqual(rows[0]["longppl"], rows[1]["longppl"], 2)
        # what is there is not evaluated again
        times = lambda: {p: os.stat(p).st_mtime_ns for p in glob.glob(self.path("scores", "*", "*.safetensors"))}
        before = times()
        self.assertEqual(len(before), 2)
        self.longppl("score", "keys.json", "cable", "none", "--out", "scores")
        self.assertEqual(times(), before)
        path, data = list(before)[0], read_bytes(list(before)[0])
        self.write(path, data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])      # but damage is
        self.longppl("score", "keys.json", "cable", "none", "--out", "scores")
        self.assertEqual((read_bytes(path), json.loads(self.read("scores", "longppl.json"))), (data, rows))
        # another text is another question, under the same name too
        r = self.longppl("score", "keys.json", "cable", "--val_files", "other.txt", code=2)
        self.assertIn("other.txt: expected the text of keys.json", r.stderr)
        # no key: no LongPPL
        self.longppl(*keys[:-5], "99", *keys[-4:-1], "none.json")
        self.assertIn("| cable | - | ", self.longppl("score", "none.json", "cable", "--out", "scores").stdout)

    def test_damage(self):
        """a file of keys or losses that is not what it should be is refused in one line"""
        def refused(words, *command):
            code, _, said = called(longppl.main, *command, "--trainer", TRAINER)
            self.assertEqual((code, said.count("\n")), (2, 1), said)
            self.assertIn(words, said)
        keys, path, model = self.path("damage.json"), self.path("damaged.safetensors"), self.path("cable")
        self.longppl("keys", model, "--val_files", self.path("val.txt"), "--long", "128", "--short", "16", "--stride",
                     "8", "-o", keys)
        good = json.loads(self.read(keys))
        for change in ({"keys": [-1]}, {"keys": [899]}, {"keys": ["40"]}, {"alpha": None}, {"more": 1},
                       {"keys": 500 * [200]}, {"candidates": 1}):
            self.write(keys, json.dumps({**good, **change}))
            refused("expected a file that this version", "score", keys, model)
        losses, = glob.glob(self.path("damage.json.losses", "*", "token_losses_128_8.safetensors"))
        data = read_bytes(losses)
        for damaged, words in ((data[:-1], "bytes"), (b"", "cut short"), (data.replace(b"[899]", b"[898]"), "shape"),
                               (data.replace(b"losses", b"gains!"), "F32"),
                               (data[:-4] + struct.pack("<f", math.nan), "losses: expected numbers, got nan")):
            self.write(path, damaged)
            with self.assertRaisesRegex(console.BadInput, words):
                console.read_losses(path)

    def test_refusals(self):
        for words in (("--long", "16", "--short", "16", "--stride", "8"), ("--long", "32", "--short", "16", "--stride",
                                                                           "17")):
            r = self.longppl("keys", "cable", "--val_files", "val.txt", *words, "-o", "x.json", code=2)
            self.assertIn("expected --stride <= --short < --long", r.stderr)
        r = self.longppl("keys", "cable", "--val_files", "no.txt", "--long", "32", "--short", "16", "--stride", "8",
                         "-o", "x.json", code=2)
        self.assertIn("no.txt: No such file", r.stderr)
        r = self.longppl("score", "val.txt", "cable", code=2)
        self.assertIn("val.txt: expected a JSON object", r.stderr)
        r = subprocess.run([TRAINER, "--load", "cable", "--val_files", "val.txt", "--eval_lengths", "32",
                            "--token_losses"], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertIn("--token_losses: give the directory to write to with --out", r.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
