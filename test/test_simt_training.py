"""The CUDA build of the trainer, run on the emulated GPU, gives the losses of the CPU build: float32 (portable kernels) as closely as
float32 computes, bf16 (tensor-core attention where the encoding has it) as closely as bf16 does, for every encoding.

Both bounds come from measurements in the same run. float32: what a relative change of 1e-6 in the learning rate does to the CPU build's
losses, and at least float32's resolution. bf16: the median over the encodings of what bf16 did to the losses; a wrong kernel is far outside, as it is one of many."""
import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPU = os.path.join(ROOT, "train_gpt2")
FP32, BF16 = (os.path.join(ROOT, "build", "simt", name) for name in ("train_gpt2_fp32", "train_gpt2"))
STEPS = 3
with open(os.path.join(ROOT, "LICENSE"), "rb") as source:         # a text that does not change
    TEXT = source.read() * 10


def encodings():
    text = subprocess.run([CPU, "--help"], stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout
    names = re.findall(r"^  ([a-z0-9_]+) {2,}\S", text.split("positional encodings:")[1].split("\n\n")[0], re.M)
    assert {"none", "cable", "fire", "rope"} <= set(names), names
    return names


def losses(program, pos, model="1,1,64", T=66, lr="1e-2", extra=()):
    with tempfile.TemporaryDirectory() as out:
        text = os.path.join(out, "text.txt")
        with open(text, "wb") as f:
            f.write(TEXT)
        run = subprocess.run([program, "--train_files", text, "--val_files", text, "--model", model, "--pos", pos, "--T", str(T), "--B", "1",
                              "--steps", str(STEPS), "--warmup", "1", "--lr", lr, "--val_every", "0", "--sample_every", "0",
                              "--checkpoint_every", "0", "--out", out + "/run", *extra], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             universal_newlines=True)
        assert run.returncode == 0, run.stdout
        with open(out + "/run/log.jsonl") as f:
            return [r["loss"] for r in map(json.loads, f) if r["kind"] == "train"]


def deviation(a, b):
    assert len(a) == len(b) == STEPS, (a, b)
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def in_parallel(jobs):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: job(), jobs))


@unittest.skipUnless(os.path.exists(FP32) and os.path.exists(BF16), "SKIPPED: build/simt/train_gpt2 is not built; make test builds it")
class Training(unittest.TestCase):
    def test_float32(self):
        names = encodings()
        shape = {"model": "1,2,16", "T": 20}
        found = in_parallel([lambda p=p: (losses(CPU, p, **shape), losses(CPU, p, lr="1.000001e-2", **shape), losses(FP32, p, **shape)) for p in names])
        scale = max(statistics.median(deviation(perturbed, cpu) for cpu, perturbed, _ in found), 2.0 ** -23)
        for name, (cpu, _, gpu) in zip(names, found):
            with self.subTest(pos=name):
                self.assertLess(deviation(gpu, cpu), 4 * scale)

    def test_bf16(self):
        # a small rate: at a large one Adam's first steps turn the sign of a gradient that is nearly 0 into a change of the loss
        names = encodings()
        found = in_parallel([lambda p=p: deviation(losses(BF16, p, lr="1e-3"), losses(CPU, p, lr="1e-3")) for p in names])
        typical = statistics.median(found)
        self.assertTrue(0 < typical < 2.0 ** -8, f"bf16 changes the losses by {typical:.2e}; its own resolution is {2.0 ** -8:.2e}")
        for name, d in zip(names, found):
            with self.subTest(pos=name):
                self.assertLess(d, 8 * typical)

    def test_accumulation_and_recompute(self):
        """micro-batches, recompute and several layers and heads, on the tensor-core kernels"""
        shape = {"model": "2,2,128", "T": 34}
        for extra in (["--total_batch", "68"], ["--recompute", "2"]):
            with self.subTest(extra=extra):
                found = deviation(losses(BF16, "cable", lr="1e-3", extra=extra, **shape), losses(CPU, "cable", lr="1e-3", extra=extra, **shape))
                self.assertLess(found, 2.0 ** -10)

    def test_use_of_a_trained_model(self):
        """from one checkpoint: greedy generation (the one-token kernels) and perplexities"""
        with tempfile.TemporaryDirectory() as out:
            text, model = out + "/text.txt", out + "/model"
            with open(text, "wb") as f:
                f.write(TEXT)
            common = ["--val_files", text, "--sample_every", "0", "--val_every", "0"]

            def run(program, *flags):
                p = subprocess.run([program, *common, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
                assert p.returncode == 0, p.stdout + p.stderr
                return p.stdout

            run(CPU, "--train_files", text, "--model", "2,1,64", "--T", "64", "--B", "4", "--steps", "60", "--warmup", "5", "--lr", "1e-2",
                "--checkpoint_every", "60", "--out", model)
            generate = ["--load", model, "--generate", "const int ", "--tokens", "12", "--temperature", "0"]
            evaluate = ["--load", model, "--eval_lengths", "48,80", "--eval_tokens", "160"]
            (want, want_eval), (fp32, fp32_eval), (bf16, bf16_eval) = in_parallel(
                [lambda p=p: (run(p, *generate), run(p, *evaluate)) for p in (CPU, FP32, BF16)])
            self.assertEqual(fp32, want)
            self.assertGreaterEqual(len(want), 12)
            self.assertEqual(len(bf16), len(want))

            def perplexities(text):
                return [float(m) for m in re.findall(r"^ *(?:48|80)\b.*?(\d+\.\d+)", text, re.M)]
            self.assertEqual(len(perplexities(want_eval)), 2, want_eval)
            self.assertEqual(perplexities(fp32_eval), perplexities(want_eval))
            self.assertLess(max(abs(a / b - 1) for a, b in zip(perplexities(bf16_eval), perplexities(want_eval))), 2.0 ** -7)

    def test_tile_skipping(self):
        """at T = 2048 tiles that alibi has zeroed are left out: --tile_skip exact changes no digit, and says how many were computed"""
        with tempfile.TemporaryDirectory() as out:
            text, model = out + "/text.txt", out + "/model"
            with open(text, "wb") as f:
                f.write(TEXT)
            common = [CPU, "--val_files", text, "--sample_every", "0", "--val_every", "0"]
            subprocess.run([*common, "--train_files", text, "--model", "1,2,128", "--pos", "alibi", "--T", "32", "--B", "1", "--steps", "2",
                            "--checkpoint_every", "2", "--out", model], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

            def evaluate(skip):
                p = subprocess.run([BF16, *common[1:], "--load", model, "--eval_lengths", "2048", "--eval_tokens", "2048", "--tile_skip", skip,
                                    "--out", out + "/" + skip], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
                self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
                live = re.search(r"([0-9.]+)% of the tiles live", p.stdout)
                with open(out + "/" + skip + "/log.jsonl") as f:
                    return [r["loss"] for r in map(json.loads, f) if r["kind"] == "extrapolation"], float(live.group(1)) if live else 100.0

            (off, all_tiles), (exact, exact_live), (default, default_live) = in_parallel([lambda s=s: evaluate(s) for s in ("off", "exact", "default")])
            self.assertEqual(len(off), 1)
            self.assertEqual(exact, off)
            self.assertAlmostEqual(default[0] / off[0], 1, delta=2.0 ** -20)
            self.assertEqual(all_tiles, 100)
            self.assertLess(default_live, exact_live)
            self.assertLess(exact_live, 100)


if __name__ == "__main__":
    unittest.main()
