"""test_gpu_bench_pytorch.py -- dev/gpu_bench_pytorch.py on the CPU: CABLE by more columns is CABLE, and the model whose
steps it measures on a GPU has the losses of train_gpt2. In a Python with PyTorch 2.3 or later (make exports)."""
import array
import importlib.util
import json
import math
import os
import random
import struct
import subprocess
import sys
import unittest

from folder import HAS_TRAINER, ROOT, TRAINER, Folder

PROGRAM = os.path.join(ROOT, "dev", "gpu_bench_pytorch.py")
recent = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("torch.nn.attention") is not None
if recent:
    import torch
    sys.path.insert(0, os.path.join(ROOT, "dev"))
    import gpu_bench_pytorch
    from modeling_cable import load_checkpoint
    torch.set_flush_denormal(True)              # as in the trainers


def printed(*arguments):
    """the JSON objects of a run on the CPU, by key"""
    p = subprocess.run([sys.executable, PROGRAM, "--device", "cpu", *arguments], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, universal_newlines=True)
    if p.returncode != 0:
        raise AssertionError(p.stderr[-2000:])
    records = [json.loads(line) for line in p.stdout.split("\n") if line]
    return {r["key"]: r for r in records}


@unittest.skipUnless(recent, "no PyTorch 2.3 or later here")
class Columns(unittest.TestCase):
    def attention(self, dtype, T=512, HS=64):
        """(out by more columns, out of plain attention with the same q, k, v) and what both are in float64"""
        torch.manual_seed(1)
        draws = [torch.randn(2, 3, T, HS).to(dtype) for _ in range(3)]
        S = torch.cumsum(torch.relu(0.5 * torch.randn(2, 3, T)), -1)
        g = torch.nn.functional.softplus(torch.randn(2, 3, T))
        scale, attend = 1 / math.sqrt(HS), torch.nn.functional.scaled_dot_product_attention
        wide = gpu_bench_pytorch.with_columns(*draws, S, g, scale)
        self.assertEqual([x.shape[-1] for x in wide], 3 * [HS + 8])
        found = attend(*wide, is_causal=True, scale=scale)[..., :HS], attend(*draws, is_causal=True, scale=scale)
        q, k, v = (x.double() for x in draws)
        scores = scale * q @ k.transpose(-1, -2)
        bias = -g.double()[..., None] * (S.double()[..., :, None] - S.double()[..., None, :]).abs()
        masked = torch.ones(T, T).tril() == 0
        exact = [torch.softmax((scores + b).masked_fill(masked, -math.inf), -1) @ v for b in (bias, 0 * bias)]
        return [(x.double() - y).abs().max().item() for x, y in zip(found, exact)]

    def test_the_bias(self):
        """about as exact as attention without one: 1.1e-5 beside 7e-7 in float32, where g S is 100, and 7.7e-3 beside
        7.1e-3 in bf16"""
        cable, none = self.attention(torch.float32)
        self.assertLess(cable, 20 * none)
        cable, none = self.attention(torch.bfloat16)
        self.assertLess(cable, 2 * none)

    def test_parts(self):
        x = torch.tensor([1000.1, 0.3, 7.77], requires_grad=True)
        split = gpu_bench_pytorch.parts(x, 3, torch.bfloat16)
        self.assertLess((sum(p.double() for p in split) - x.double()).abs().max().item(), 1000 * 2.0 ** -24)
        sum(p.float().sum() * 2 for p in split).backward()
        self.assertEqual(x.grad.tolist(), [2.0, 2.0, 2.0])          # once, not for each part


@unittest.skipUnless(recent and HAS_TRAINER, "no PyTorch 2.3 or later, or no train_gpt2")
class Losses(Folder):
    B, T, STEPS = 2, 32, 5

    def compare(self, pos, *ways):
        draw, n = random.Random(3), self.B * self.T + 1
        tokens = array.array("H", (draw.randrange(50257) for _ in range(n)))
        header = struct.pack("<256i", 20240520, 1, n, 50257, 50256, *[0] * 251)
        shard, start = self.write("shard.bin", header + tokens.tobytes()), self.path("new/step_00000001")
        common = [TRAINER, "--train_files", shard, "--val_files", shard, "--val_every", "0", "--sample_every", "0",
                  "--T", str(self.T), "--B", str(self.B), "--threads", "1"]
        quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*common, "--model", "2,2,128", "--pos", pos, "--steps", "1", "--lr", "0",
                        "--checkpoint_every", "1", "--out", self.path("new")], **quiet)
        subprocess.run([*common, "--load", start, "--steps", str(self.STEPS), "--lr", "1e-3", "--out",
                        self.path("run")], **quiet)
        expected = [r["loss"] for r in self.records("train", "run")]
        inputs = [torch.tensor(tokens[n:n + self.B * self.T].tolist()).view(self.B, self.T) for n in (0, 1)]
        for way in ways:
            found = self.losses(start, way, inputs)
            for step, (x, y) in enumerate(zip(found, expected)):
                self.assertLess(abs(x - y) / y, 2e-6, (way, step, found, expected))     # 3e-7 found

    def losses(self, checkpoint, way, inputs):
        """of some updates, always on the same sequences; FlexAttention has no backward on a CPU"""
        loss_of = gpu_bench_pytorch.GPT2(load_checkpoint(checkpoint), way, "cpu")
        if way == "flex":
            with torch.no_grad():
                return [loss_of(*inputs).item()]
        parameters, found = list(loss_of.parameters()), []
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        for _ in range(self.STEPS):
            loss = loss_of(*inputs)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())
        return found

    def test_none(self):
        self.compare("none", "sdpa")

    def test_cable(self):
        self.compare("cable", "columns", "flex")

    def test_alibi(self):
        self.compare("alibi", "columns")


@unittest.skipUnless(recent, "no PyTorch 2.3 or later here")
class Program(Folder):
    def test_what_it_prints(self):
        found = printed()
        kinds = {(r["pass"], r["pos"], r["backend"]) for r in found.values() if "pass" in r}
        self.assertEqual(kinds, {(way, pos, "SDPA math" + more) for way in ("forward", "backward")
                                 for pos, more in (("none", ""), ("cable", ", columns"))})

    def test_a_step(self):
        found = printed("--step", "4")
        self.assertEqual({(r["pos"], r["backend"], r["B"]) for r in found.values()},
                         {("none", "torch.compile, SDPA", 4), ("cable", "torch.compile, SDPA with columns", 4)})


if __name__ == "__main__":
    unittest.main()
