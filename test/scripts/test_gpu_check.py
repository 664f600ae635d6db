"""test_gpu_check.py -- dev/gpu_check.py with simulated programs: what it runs, keeps, reports and refuses."""
import contextlib
import glob
import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
import unittest
from unittest import mock

from folder import HAS_TRAINER, ROOT, TRAINER, Folder, ended, read, read_bytes

sys.path.insert(0, os.path.join(ROOT, "dev"))
import gpu_check  # noqa: E402
import gpu_report  # noqa: E402
import gpu_stages  # noqa: E402

HELP = ("usage\nTrains with any of these positional encodings (--pos):\n"
        "  none          no\n  alibi         -m |i-j|\n  cable         the paper's\n\n"
        "Data\n  --T    tokens\n")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Machine:
    """a runner that simulates nvidia-smi, the compilers, the trainers and the benchmarks"""

    def __init__(self, case):
        self.make, self.path, self.commands, self.clock = case.write, case.path, [], Clock()
        self.error = {"fp32": 2e-7, "bf16": 4e-4}       # of the losses, at the last step
        self.tests = [{"name": "sum", "status": "ok", "ms": 3.0, "info": "error 1e-7"},
                      {"name": "big", "status": "ok", "ms": 9000.0, "info": ""}]
        self.programs = {"nvidia-smi", "nvcc", "g++", "compute-sanitizer", "python3"}
        self.skip_error = self.first = self.ranks_error = 0.0
        self.gpus, self.ranks_weight, self.nccl = 2, 1.1, self.path("site", "nvidia", "nccl")
        self.exchange = (0, "ok\n")                     # of the program of test/ranks, after its first line
        self.profile = "step 9\nprofile of step 10\nmatmul_kernel  1x2x3  4  5.0  6.0%\n"
        self.slow, self.fail, self.test_code, self.bench_dies, self.torch = {}, None, 0, None, True

    def which(self, name):
        return "/bin/" + name if name in self.programs else None

    def end_all(self):
        pass

    def run(self, command, cap, on_line=None, env=None):
        self.commands.append(command)
        text = " ".join(command)
        seconds = next((s for part, s in self.slow.items() if part in text), 0.01)
        self.clock.now += min(seconds, cap)
        if seconds > cap:
            return gpu_stages.Result(-9, "still running", timed_out=True)
        if self.fail and self.fail in text:
            return gpu_stages.Result(5, "CUDA error: unspecified launch failure")
        code, output = self.play(command, text, on_line or (lambda *_: None))
        return gpu_stages.Result(code, output)

    def play(self, command, text, on_line):
        program = os.path.basename(command[0])
        if program == "nvidia-smi":
            query = [c for c in command if c.startswith("--query-gpu=")]
            known = {"name": "NVIDIA Test GPU", "compute_cap": "9.0", "driver_version": "580.1",
                     "memory.total": "81559"}
            fields = query[0][len("--query-gpu="):].split(",")
            return 0, self.gpus * (", ".join(known.get(f, "1") for f in fields) + "\n")
        if program == "git":
            return 0, "abcdef123456\n" if "rev-parse" in text else ""
        if program in ("nvcc", "g++"):
            if "--version" not in command:
                self.make(command[command.index("-o") + 1], "")
            return 0, "a\nCuda release 13.0\nBuild 1\n"
        if "nvidia.nccl" in text:
            return (0, self.nccl + "\n") if self.nccl else (1, "ModuleNotFoundError")
        if program == "comm_program":
            return self.exchange[0], "1 rank\n" + self.exchange[1]
        if program.startswith("test_"):
            if "--list" in command:
                return 0, "".join(t["name"] + "\n" for t in self.tests)
            mine = [t for t in self.tests if t["name"] == command[-1]]
            self.make(command[command.index("--json") + 1], json.dumps(mine))
            return self.test_code, "sum ok\n"
        if "roofline.py" in text:
            return 0, "matmul_kernel   predicted 4.0 measured 5.0\n"
        if "--step" in command:
            on_line(json.dumps({"key": "step 124M none", "size": "124M, 65,536 tokens", "pos": "none", "T": 1024,
                                "B": 64, "backend": "torch.compile", "tokens_per_s": 3276800.0}), 0.3)
            return 0, ""
        if program.startswith("bench_") or "gpu_bench_pytorch.py" in text:
            return self.bench(command, on_line)
        if "import torch" in text:
            return (0, "2.9.0\n") if self.torch else (1, "ModuleNotFoundError")
        if "--gpus" in command and command[command.index("--gpus") + 1] == "2":
            self.trainer(command, on_line, ranks=True)
            return 0, "2 ranks, gradients by NCCL"
        return self.trainer(command, on_line) if program.startswith("train_") else (0, "")

    def bench(self, command, on_line):
        skip = read(self.path(command[command.index("--skip") + 1])).split("\n")
        torch = "gpu_bench_pytorch.py" in command[-3] or "gpu_bench_pytorch.py" in command[1]
        causal = "causal" in command[0] or torch
        mask = "causal" if causal else "full"
        suffix = " torch" if torch else ""
        on_line('{"key": "matmul %s", "tflops": 700.0}' % mask, 0.1)
        for pos, ms in (("none", 1.0), ("cable", 1.05)):
            key = f"forward {mask} d64 T1024 {pos}{suffix}"
            if key in skip:
                continue
            if self.bench_dies == pos:
                return 5, "gpu_bench: illegal address"
            on_line(json.dumps({"key": key, "pass": "forward", "pos": pos, "HS": 64, "T": 1024, "tokens": 16384,
                                "C": 768, "causal": causal, "backend": "FlexAttention", "ms": 3 * ms if torch else ms,
                                "tflops": 200.0, "share": 0.3}), 0.2)
        on_line("not JSON", 0.3)
        return 0, ""

    def error_of(self, program):
        """the relative error of the losses of a trainer"""
        return next((error for kind, error in self.error.items() if f"/{kind}/" in program), 0.0)

    def trainer(self, command, on_line, ranks=False):
        if "--help" in command or "--list" in command:
            return 0, HELP
        if "--profile" in command:
            self.make(command[command.index("--out") + 1] + "/log.jsonl", "")
            return 0, self.profile
        flags = {command[i]: command[i + 1] for i in range(1, len(command) - 1) if command[i].startswith("--")}
        out, steps = flags["--out"], int(flags["--steps"])
        grows = self.error_of(command[0]) / 20
        records = []
        for s in range(steps):
            first = self.first if s == 0 and "/cpu/" not in command[0] else 0.0
            loss = (5 - 0.1 * s) * (1 + grows * (s + 1) + first + self.ranks_error * ranks)
            loss = None if math.isnan(loss) else loss
            records.append({"kind": "train", "step": s, "loss": loss, "ms": 10.0, "mfu": 0.4, "mem": 2000.0 * 2 ** 20})
        self.make(out + "/log.jsonl", "".join(json.dumps(r) + "\n" for r in records))
        if "--checkpoint_every" in flags:
            header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
            step = f"step_{int(flags['--checkpoint_every']):08d}"
            self.make(f"{out}/{step}/config.json", "{}")
            weights = struct.pack("<2f", self.ranks_weight if ranks else 1.1, -2.3)
            self.make(f"{out}/{step}/model.safetensors", struct.pack("<Q", len(header)) + header + weights)
        at = 0.0
        with open(self.path(out, "log.jsonl"), "a") as f:
            for length in flags.get("--eval_lengths", "").split(","):
                if length:
                    loss = 10.8 + (self.skip_error if flags["--tile_skip"] == "exact" else 0.0)
                    f.write(json.dumps({"kind": "extrapolation", "pos": "x", "T": int(length),
                                        "stride": int(length), "ppl": math.exp(loss), "loss": loss}) + "\n")
        for length in flags.get("--eval_lengths", "").split(","):
            if length:
                at += 1 + int(length) / 131072
                # the line that evaluate_lengths prints
                on_line(f"{int(length):8d} {int(length):8d} {8:10d} {131072:12d} {10.8:10.4f} {50000.0:10.4f}", at)
                if int(length) >= 32768:
                    on_line("                  last layer: 34.5% of the tiles live", at)
        return 0, ""


class Case(Folder):
    def setUp(self):
        super().setUp()
        self.machine = Machine(self)
        self.start(mock.patch.dict(os.environ))
        for name in ("NVCC", "NCCL_DIR", "CXX", "ARCH", "COMMIT"):        # the machine below has its own
            os.environ.pop(name, None)
        for name in ("include/nccl.h", "lib/libnccl.so.2"):
            self.write("site/nvidia/nccl/" + name, "")
        for name in ("train_gpt2.cu", "train_bert.cu", "llmc/matmul.cuh", "test/simt/test_sum.cu", "dev/gpu_bench.cu",
                     "test/simt/test_flash_forward.cu", "dev/gpu_bench_pytorch.py"):
            self.write(name, "// " + name)
        for where, target, value in ((gpu_check, "ROOT", self.folder), (gpu_check, "write_data", lambda: None),
                                     (os, "fsync", lambda f: None)):
            self.start(mock.patch.object(where, target, value))

    def check(self, *arguments):
        """(exit code, everything printed)"""
        said = io.StringIO()
        options = gpu_check.parse(["--results", self.path("results"), *arguments])
        os.makedirs(self.path(gpu_check.WORK), exist_ok=True)
        with contextlib.redirect_stderr(said):
            code = gpu_check.check_of(options, self.machine, self.machine.clock).run()
        return code, said.getvalue()

    def result(self, kind="json"):
        found = glob.glob(self.path("results", "*." + kind))
        self.assertEqual(len(found), 1, found)
        return json.loads(read(found[0])) if kind == "json" else read(found[0])

    def ran(self, part):
        return [" ".join(c) for c in self.machine.commands if part in " ".join(c)]


class Stages(Case):
    def test_all_pass(self):
        code, said = self.check()
        self.assertEqual(code, 0, said)
        stages = self.result()["stages"]
        self.assertEqual({n: s["status"] for n, s in stages.items()}, dict.fromkeys(gpu_check.STAGE_NAMES, "ok"))
        self.assertRegex(self.ran("compute-sanitizer")[0], "racecheck .*test_flash_forward")
        tests = {f"{program}: {name}" for program in ("sum", "flash_forward") for name in ("sum", "big")}
        self.assertEqual(set(stages["kernels"]["items"]), tests | {"sum", "flash_forward"})
        runs = ("none", "alibi", "cable", "BERT none", "BERT alibi", "BERT cable", "BERT cable, pairs")
        self.assertEqual(set(stages["losses"]["items"]), set(runs))
        name = os.path.basename(glob.glob(self.path("results", "*.json"))[0])
        self.assertTrue(name.startswith("NVIDIA-Test-GPU_abcdef123456."), name)
        self.assertEqual(len(self.ran("compute-sanitizer")), 4 * 2)                     # only the short test of each
        self.assertTrue(all(c.endswith(" sum") for c in self.ran("compute-sanitizer")))
        for trainer in ("cpu/train_bert", "bf16/train_bertcu", "fp32/train_bertcu"):
            trainer = "build/gpu_check/" + trainer
            runs = [c for c in self.ran("--steps 20") if c.startswith(trainer + " ")]
            self.assertEqual({"--pairs" in c for c in runs}, {False, True}, trainer)
            self.assertEqual([c for c in runs if "--sample_every" in c], [])            # train_bert has no such flag
        self.assertIn("min left", said)

    def test_report_has_ratios_first(self):
        self.check()
        text = self.result("md")
        self.assertNotIn("FAILED", text)
        first = text.index("## ")
        self.assertTrue(text[first:].startswith("## Ratios"), text[:400])
        self.assertRegex(text, r"cable / none, time: forward d=64 T=1024 causal.*1\.050 \| at most 1.06: met")
        self.assertRegex(text, r"PyTorch FlexAttention / ours, time: cable, forward.*3\.000")
        self.assertRegex(text, r"evaluation, time of T=131,072 / T=16,384.*14\.22 \| at most 10: MISSED")
        self.assertRegex(text, r"\| none \| forward d=64 T=1024 causal.* \| 1.000 \| 200 \| 30% \|")
        self.assertRegex(text, r"\| 124M \| cable \| 1024 \| 16 \| 1,638,400 \| 40.0% \| 2000 \|")
        self.assertRegex(text, r"\| BERT base \| learned \| 512 \| 32 \| 1,638,400 \|")
        self.assertRegex(text, r"\| BERT cable, pairs \| fp32 \| \d+ \|")
        self.assertRegex(text, r"\| bert \| 20 \| NCCL \|")
        self.assertRegex(text, r"\| cable \| bf16 \| 19 \| 4.00e-04 \| 1.44e-03 \|")
        self.assertIn("sum: sum | ok", text)
        self.assertIn("T = 131072: last layer: 34.5% of the tiles live", text)

    def test_caps_fit_into_two_visits(self):
        """of 9.5 minutes, with one for the first trainer and three for the rest of the build"""
        builds = {"trainer": 60, "build": 180}
        self.assertLessEqual(sum(builds.get(name, cap) for name, _, cap in gpu_check.STAGES), 2 * 570)

    def test_what_is_compiled_and_how(self):
        """without make: nvcc and a compiler for the CPU, with the Makefile's flags, only the first trainer"""
        self.check()
        self.assertEqual([c for c in self.machine.commands if os.path.basename(c[0]) == "make"], [])
        lines = [c for c in self.machine.commands if "-o" in c and os.path.basename(c[0]) in ("nvcc", "g++")
                 and "-E" not in c]
        self.assertEqual(lines[0][lines[0].index("-o") + 1], "build/gpu_check/first/train_gpt2cu")
        self.assertIn("-DFEW_POSITIONS", lines[0])
        makefile = ended("make", "-n", "-B", "train_gpt2cu", "NVCC=nvcc", cwd=ROOT)[1]
        products = set()
        for line in lines:
            product = line[line.index("-o") + 1]
            products.add(os.path.relpath(product, "build/gpu_check"))
            if line[0].endswith("nvcc"):
                flags = gpu_check.makefile("NVCC_CODE")
                self.assertIn("-ftz=true", flags)
                self.assertIn(" ".join(flags), makefile)
                self.assertEqual(line[1:1 + len(flags)], flags, product)
                self.assertIn("arch=compute_90a,code=sm_90a", line)
            else:
                self.assertIn("-ffp-contract=off", line)
        trainers = {f"{kind}/train_{t}{cu}" for t in ("gpt2", "bert")
                    for kind, cu in (("cpu", ""), ("bf16", "cu"), ("fp32", "cu"))}
        self.assertEqual(products, trainers | {"first/train_gpt2cu", "test_sum", "test_flash_forward", "bench_causal",
                                               "bench_full", "comm_program"})
        with_nccl = [c for c in lines if "-DUSE_NCCL" in c]
        self.assertEqual(len(with_nccl), 3)             # of PyTorch's package: both trainers, test/ranks' program
        self.assertIn(self.machine.nccl + "/lib/libnccl.so.2", with_nccl[0])
        self.machine.nccl = None
        self.machine.commands.clear()
        self.machine.make("llmc/matmul.cuh", "// changed")
        self.assertEqual(self.check()[0], 0)
        self.assertEqual(self.ran("-DUSE_NCCL"), [])
        self.assertEqual(self.ran("--gpus 2"), [])

    def test_the_step_and_what_is_beside_it(self):
        self.check()
        items = self.result()["stages"]["step"]["items"]
        self.assertEqual(set(self.result()["stages"]["torch"]["items"]), {"step 124M none"})
        ours = {"124M, 65,536 tokens " + pos for pos in ("none", "cable")}
        self.assertEqual(set(items), ours | {"profile"})
        self.assertEqual(items["profile"]["beside"], ["matmul_kernel   predicted 4.0 measured 5.0"])
        self.assertIn("--gpu H100 --measured build/gpu_check/profile.txt", self.ran("roofline.py")[0])
        text = self.result("md")
        self.assertIn("| 124M, 65,536 tokens | cable | 1024 | 64 | 6,553,600 |", text)
        self.assertIn("predicted 4.0 measured 5.0", text)
        self.assertRegex(text, r"ours / PyTorch torch.compile, tokens/s: 124M, 65,536 tokens none.*B=64 / 64 \| 2\.000")
        self.machine.profile = "no table"
        self.assertEqual(self.check("--again", "step")[0], 1)
        self.assertIn("expected a table from --profile 10", self.result("md"))

    def test_a_rerun_repeats_nothing(self):
        self.check()
        before = len(self.ran("train_gpt2"))
        stages = self.result()["stages"]
        self.machine.commands.clear()
        code, _ = self.check()
        self.assertEqual(code, 0)
        self.assertLess(len(self.ran("train_gpt2")), before)
        self.assertEqual(self.ran("--steps") + self.ran("bench_causal") + self.ran("--json"), [])
        self.assertEqual({n: s["items"] for n, s in self.result()["stages"].items() if n != "build"},
                         {n: s["items"] for n, s in stages.items() if n != "build"})

    def test_absent_tools_are_recorded(self):
        self.machine.programs.discard("compute-sanitizer")
        self.machine.torch, self.machine.gpus = False, 1
        code, said = self.check()
        self.assertEqual(code, 0, said)
        sanitizer = self.result()["stages"]["sanitizer"]
        self.assertEqual((sanitizer["status"], sanitizer["note"]), ("skipped", "compute-sanitizer is not installed"))
        self.assertIn("| sanitizer | skipped |", self.result("md"))
        self.assertEqual(self.result()["stages"]["pytorch"]["status"], "skipped")
        ranks = self.result()["stages"]["ranks"]
        self.assertEqual((ranks["status"], ranks["note"]), ("skipped", "needs two GPUs, found one"))

    def test_no_device(self):
        for missing in ("nvidia-smi", "nvcc"):
            machine = Machine(self)
            machine.programs.discard(missing)
            with contextlib.redirect_stderr(io.StringIO()) as said, mock.patch.dict(os.environ):
                os.environ.pop("NVCC", None)
                self.assertEqual(gpu_check.main(["--results", self.path("results")], machine), 2)
            self.assertIn(missing + " is not there", said.getvalue())
            self.assertEqual(glob.glob(self.path("results", "*")), [])

    def test_unknown_stage(self):
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
            gpu_check.parse(["--again", "benhc"])
        self.assertIn("benhc", said.getvalue())


class Failures(Case):
    def failed(self, stage, *parts, again=True):
        code, said = self.check()
        self.assertEqual(code, 1)
        self.assertEqual(self.result()["stages"][stage]["status"], "failed")
        text = self.result("md")
        self.assertTrue(text[text.index("## "):].startswith("## FAILED"), text[:300])
        for part in parts:
            self.assertIn(part, text)
            self.assertIn(part.split(": ", 1)[-1], said)
        if again:                                       # it stays failed
            self.assertEqual(self.check()[0], 1)

    def test_what_is_reported(self):
        for name, value, stage, *parts in (
                ("error", {"fp32": 2e-6}, "losses", "losses, cable: fp32: at step 19", "expected at most 1.32e-06"),
                ("error", {"bf16": 2e-3}, "losses", "losses, alibi: bf16: at step 19", "expected at most 0.00144"),
                ("error", {"bf16": float("nan")}, "losses", "losses [None"),
                # of the first step, which has its own bound: the last may differ by 1.4e-3
                ("first", 2e-4, "losses", "bf16: at step 0 the loss differs from the CPU's by"),
                ("skip_error", 1e-12, "eval", "expected the same bits"),
                ("test_code", 139, "kernels", "exit code 139"),
                ("tests", [], "kernels", "expected --list to name tests, got none")):
            with self.subTest(parts=parts):
                self.machine = Machine(self)
                shutil.rmtree(self.path("results"), ignore_errors=True)
                setattr(self.machine, name, {**self.machine.error, **value} if name == "error" else value)
                self.failed(stage, *parts)

    def test_exchange(self):
        """NCCL on one GPU"""
        self.check()
        self.assertEqual(len(self.ran("comm_program self")), 1)
        for exchange, ok, words in (((1, "error: what NCCL brought: wrong\n"), False, "what NCCL brought"),
                                    ((0, "error: then nothing\n"), False, "expected"),
                                    ((2, "error: self: this program was built without NCCL\n"), True, "without NCCL")):
            with self.subTest(exchange=exchange):
                self.machine.exchange = exchange
                code, _ = self.check("--only", "exchange", "--again", "exchange")
                items = self.result()["stages"]["exchange"]["items"]
                self.assertEqual([i["ok"] for i in items.values()], [ok], items)
                self.assertEqual(code == 0, ok)
                self.assertIn(words, str(items))

    def test_two_ranks_that_change_a_bit(self):
        self.machine.ranks_error = 1e-12
        self.failed("ranks", "ranks, gpt2: gpt2, two ranks: expected the same bits, the losses differ from step 0",
                    "ranks, bert: bert, two ranks: expected the same bits")
        self.machine.ranks_error, self.machine.ranks_weight = 0.0, 1.2
        self.check("--again", "ranks")
        self.assertIn("the losses agree, the weights differ", self.result("md"))

    def test_what_the_sanitizers_get(self):
        chosen = gpu_check.SANITIZED["flash_forward"]
        self.machine.tests.append({"name": chosen, "status": "ok", "ms": 20000.0, "info": ""})
        self.check("--only", "build,kernels,sanitizer")
        of_flash = [c for c in self.ran("compute-sanitizer") if "test_flash_forward" in c]
        self.assertEqual((len(of_flash), all(c.endswith(chosen) for c in of_flash)), (4, True), of_flash)
        self.assertEqual(["--report-api-errors no" in c for c in of_flash], ["memcheck" in c for c in of_flash])

    def test_a_run_that_is_not_repeated(self):
        change = self.machine.trainer
        for error, weight, words in ((1e-12, 1.1, "the losses differ from step 0"),
                                     (0.0, 1.2, "the losses agree, the weights differ")):
            def other(command, on_line, **_):
                return change(command, on_line, ranks="cable_again" in str(command))
            self.machine.ranks_error, self.machine.ranks_weight = error, weight
            with self.subTest(words), mock.patch.object(self.machine, "trainer", other):
                self.check("--only", "trainer,repeat", "--again", "repeat")
                items = self.result()["stages"]["repeat"]["items"]
                self.assertEqual([items["none"]["ok"], items["cable"]["ok"]], [True, False])
                self.assertIn("cable, again: expected the same bits, " + words, items["cable"]["error"])

    def test_pairs_that_differ(self):
        """fails if they differ more than pairs did, even if masked tokens may differ as much"""
        run = self.machine.run

        def other(command, *a, **more):
            self.machine.first = 3e-4 if "--pairs" in command else 0.0
            return run(command, *a, **more)
        with mock.patch.object(self.machine, "run", other):
            self.failed("losses", "losses, BERT cable, pairs: fp32: at step 0", "bf16: at step 0", again=False)
        items = self.result()["stages"]["losses"]["items"]
        self.assertEqual([n for n, r in items.items() if not r["ok"]], ["BERT cable, pairs"])

    def test_headers_that_are_not_part_of_the_toolkit(self):
        """nothing else starts; once that is corrected, a rerun continues"""
        self.machine.fail = "headers.cu"
        code, said = self.check()
        self.assertEqual(code, 2, said)
        self.assertEqual(list(self.result()["stages"]), ["device"])
        for part in ("libxxhash-dev", "dev/gpu_pack.sh"):
            self.assertIn(part, self.result("md"))
        self.assertEqual(self.ran("make"), [])
        self.machine.fail = None
        self.assertEqual(self.check()[0], 0)

    def test_a_kernel_test_fails(self):
        self.machine.tests[1]["status"] = "FAILED"
        self.machine.test_code = 1
        self.failed("kernels", "exit code 1; FAILED: ")
        kernels = self.result()["stages"]["kernels"]["items"]
        self.assertEqual((kernels["sum: big"]["ms"], kernels["sum: big"]["ok"]), (9000.0, False))

    def test_a_build_that_fails(self):
        self.machine.fail = "-o build/gpu_check/fp32/train_"
        self.failed("build", "unspecified launch failure", again=False)
        self.assertIn("was not built", self.result("md"))
        self.assertEqual(self.result()["stages"]["losses"]["status"], "unfinished")
        self.machine.fail = None                        # a rerun tries the build again, and what needed it
        code, said = self.check()
        self.assertEqual(code, 0, said)
        self.assertNotIn("FAILED", self.result("md"))

    def test_sanitizer_finds_something(self):
        self.machine.fail = "--tool racecheck"
        self.failed("sanitizer", "racecheck sum", "racecheck flash_forward")

    def test_a_sanitizer_that_takes_too_long_is_not_a_finding(self):
        self.machine.slow = {"--tool racecheck": 100}
        self.assertEqual(self.check()[0], 0)
        self.assertIn("| racecheck sum | sum | not finished |", self.result("md"))
        self.assertIn("| memcheck sum | sum | no finding |", self.result("md"))

    def test_bench_dies_and_keeps_what_it_had(self):
        self.machine.bench_dies = "cable"
        self.failed("bench", "illegal address", again=False)
        self.assertIn("forward causal d64 T1024 none", self.result()["stages"]["bench"]["items"])


class BuildElsewhere(Case):
    """--build"""

    def build(self, *arguments):
        """(exit code, what was printed) on a machine without a GPU"""
        self.machine.programs.discard("nvidia-smi")
        with contextlib.redirect_stderr(io.StringIO()) as said, mock.patch.dict(os.environ):
            code = gpu_check.main(["--build", "sm_90a", *arguments], self.machine)
        self.machine.programs.add("nvidia-smi")
        return code, said.getvalue()

    def test_a_gpu_machine_compiles_nothing(self):
        code, said = self.build()
        self.assertEqual(code, 0, said)
        lines = self.ran(" -o build/gpu_check/")
        self.assertEqual(len(lines), 1 + 2 * 3 + 2 + 2 + 1)
        for line in lines:
            self.assertIn("code=sm_90a" if "nvcc" in line else "-march=x86-64-v3", line)
        self.assertEqual(self.ran("-DUSE_NCCL") + self.ran("--steps") + self.ran("-march=native"), [])
        self.machine.commands.clear()
        os.environ["COMMIT"] = "0123456789ab"           # of a copy without .git
        code, said = self.check()
        self.assertEqual(code, 0, said)
        self.assertEqual(self.ran(" -o build/gpu_check/"), [])
        self.assertEqual(self.result()["stages"]["build"]["status"], "ok")
        self.assertEqual(self.result()["commit"], "0123456789ab")

    def test_other_sources_or_another_gpu(self):
        for change in (lambda: self.machine.make("llmc/matmul.cuh", "// changed"),
                       lambda: os.environ.update(ARCH="sm_80")):
            self.assertEqual(self.build()[0], 0)
            self.machine.commands.clear()
            change()
            self.assertEqual(self.check("--only", "trainer")[0], 0)
            self.assertEqual(len(self.ran("-o build/gpu_check/first")), 1)

    def test_a_part_and_a_failure(self):
        self.assertEqual(self.build("--only", "trainer")[0], 0)
        self.assertEqual(len(self.ran(" -o build/gpu_check/")), 1)
        self.machine.fail = "-o build/gpu_check/fp32/train_bert"
        code, said = self.build()
        self.assertEqual(code, 1)
        self.assertIn("bert, CUDA FP32: FAILED", said)
        self.machine.fail = None
        self.machine.commands.clear()
        self.assertEqual(self.build()[0], 0)
        self.assertEqual(len(self.ran(" -o build/gpu_check/")), 1)      # the rest is there
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
            gpu_check.parse(["--build", "sm_90a", "--only", "step"])
        self.assertIn("expected a stage among trainer, build, got 'step'", said.getvalue())


class Time(Case):
    def test_a_command_at_its_cap(self):
        self.machine.slow = {"sum_big.json big": 1000}
        for tries in (1, 2, 3):                         # a rerun tries it again
            code, said = self.check()
            self.assertEqual(code, 3, said)
            kernels = self.result()["stages"]["kernels"]
            self.assertEqual(kernels["status"], "unfinished")
            self.assertIn("ended at its cap of 40 s", kernels["items"]["sum: big"]["error"])
            self.assertEqual(kernels["items"]["sum: sum"]["ok"], True)
            self.assertEqual(len(self.ran("sum_big.json big")), tries)
        self.assertEqual(self.result()["stages"]["losses"]["status"], "ok")
        text = self.result("md")
        self.assertNotIn("FAILED", text)
        self.assertIn("## Unfinished\n\n- kernels is unfinished. not built, or ended at a cap: sum: big", text)

    def test_minutes(self):
        """a stage has the remaining time, the next runs continue, and nothing that the time ended counts as failed"""
        self.machine.slow = {"--tool racecheck": 11.0, "gpu_check/bench_": 12.0, "losses/": 0.5}
        runs, left, code = 0, 0, None
        while code != 0 and runs < 12:
            began = self.machine.clock.now
            code, said = self.check("--minutes", "0.5")
            self.assertIn(code, (0, 3), said)
            self.assertLessEqual(self.machine.clock.now - began, 30 + 20)   # losses run several programs at once
            self.assertNotIn("FAILED", self.result("md"))
            left += said.count("left for the next run")
            runs += 1
        self.assertEqual(code, 0)
        self.assertGreater(runs, 3)
        self.assertGreater(left, 10)

    def test_a_fresh_machine_takes_over_what_was_carried(self):
        """it has the results and nothing that was built"""
        self.machine.slow = {"-o build": 1.0, "--steps 20": 1.0}
        self.assertEqual(self.check("--minutes", "0.6")[0], 3)
        shutil.rmtree(self.path(gpu_check.WORK))
        had = {n: s["items"] for n, s in self.result()["stages"].items() if s["status"] == "ok"}
        self.assertGreater(len(had), 3)
        self.machine.commands.clear()
        self.assertEqual(self.check()[0], 0)
        self.assertEqual(self.ran("gpu_check/step/"), [])
        self.assertEqual(len(self.ran("-o build/gpu_check/first/train_gpt2cu")), 1)
        stages = self.result()["stages"]
        self.assertEqual({n: stages[n]["items"] for n in had if n not in gpu_check.BUILDS},
                         {n: had[n] for n in had if n not in gpu_check.BUILDS})

    def test_a_rerun_continues_a_stage_at_its_cap(self):
        self.machine.slow = {"--T 1024 --B 32": 20.0}
        code, _ = self.check()
        self.assertEqual(code, 3)
        train = self.result()["stages"]["train"]
        self.assertEqual(train["status"], "unfinished")
        self.assertEqual(len(train["items"]), 2)                                        # 2 x 20 s of 50 s
        self.assertEqual(self.result()["stages"]["eval"]["status"], "ok")
        self.assertIn("train is unfinished", self.result("md"))
        self.machine.commands.clear()
        self.assertEqual(self.check()[0], 0)
        self.assertEqual(len(self.ran("train/tiny_")), 2)
        self.assertEqual(len(self.result()["stages"]["train"]["items"]), 16)
        self.assertEqual(len(self.ran("eval_lengths")), 0)

    def test_nothing_takes_longer_than_its_stage(self):
        self.machine.slow = dict.fromkeys(("-o build", "--steps", "test_sum --json", "--tool", "--skip"), 29.0)
        self.check()
        for name, _, cap in gpu_check.STAGES:
            seconds = self.result()["stages"][name]["seconds"]
            slack = 29 if name in ("trainer", "build", "kernels", "losses") else 0.5   # several programs at once
            self.assertLessEqual(seconds, cap + slack, name)


@contextlib.contextmanager
def dying_at(point, after):
    """the program is killed at a rename, or in the middle of writing a result, after a number of them"""
    calls, replace = [0], os.replace

    def count():
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt

    def dying_replace(*a):
        count()
        replace(*a)

    def dying_open(path, mode="r", **more):
        f = open(path, mode, **more)
        if "w" in mode and "results" in path:
            write = f.write

            def half(text):
                write(text[:len(text) // 2])
                f.flush()
                count()
                write(text[len(text) // 2:])
            f.write = half
        return f
    patch = mock.patch.object(gpu_check.console, "open", dying_open, create=True)
    if point == "replace":
        patch = mock.patch.object(os, "replace", dying_replace)
    with patch:
        yield


class Killed(Case):
    def reference(self):
        self.assertEqual(self.check()[0], 0)
        found = self.result()
        shutil.rmtree(self.path("results"))
        return {n: set(s["items"]) for n, s in found["stages"].items()}

    def test_a_kill_at_any_point_leaves_valid_files(self):
        want = self.reference()
        for point in ("replace", "half a write"):
            halfway, finished = 0, False
            for stop in range(0, 160, 4):
                shutil.rmtree(self.path("results"), ignore_errors=True)
                with dying_at(point, stop), contextlib.suppress(KeyboardInterrupt):
                    self.check()
                    finished = True
                for path in glob.glob(self.path("results", "*.json")):
                    halfway += any(s["status"] == "unfinished" for s in json.loads(read(path))["stages"].values())
                if finished:
                    break
                if stop % 12 == 0:
                    self.assertEqual(self.check()[0], 0)
                    self.assertEqual({n: set(s["items"]) for n, s in self.result()["stages"].items()}, want)
            self.assertTrue(finished)
            self.assertGreater(halfway, 8)

    def test_a_file_of_something_else_is_refused(self):
        self.check("--only", "device")
        path = glob.glob(self.path("results", "*.json"))[0]
        for text in ("{", "[]", '{"format": "other"}'):
            self.write(path, text)
            with self.assertRaises(SystemExit) as e:
                self.check()
            self.assertIn("not a result of this program", str(e.exception))


class Programs(Folder):
    """the real runner"""

    def test_output_code_and_lines(self):
        lines = []
        command = ["sh", "-c", "echo one; echo two >&2; exit 3"]
        r = gpu_check.Runner().run(command, 10, on_line=lambda line, s: lines.append(line))
        self.assertEqual((r.code, r.output, r.timed_out, lines), (3, "one\ntwo\n", False, ["one", "two"]))

    def test_messages_name_no_machine(self):
        message = gpu_stages.without_root(gpu_check.Failed(gpu_check.ROOT + "/train_gpt2.cu:1: no"))
        self.assertEqual(message, "train_gpt2.cu:1: no")

    def test_a_missing_program(self):
        self.assertEqual(gpu_check.Runner().run(["/no/such/program"], 10).code, 127)

    def test_the_cap_ends_children_too(self):
        late, began = self.path("late"), time.monotonic()
        r = gpu_check.Runner().run(["sh", "-c", f"echo begun; (sleep 3; touch {late}) & sleep 30"], 0.5)
        self.assertTrue(r.timed_out)
        self.assertLess(time.monotonic() - began, 3)
        self.assertIn("begun", r.output)
        time.sleep(3)
        self.assertFalse(os.path.exists(late))

    def test_the_headers_for_a_bare_machine(self):
        """what gpu_pack.sh packs is all that the compiler reads of the two libraries, and git ignores its folder"""
        headers = self.path("headers")
        code, said = ended(os.path.join(ROOT, "dev", "gpu_pack.sh"), headers)
        self.assertEqual(code, 0, said)
        text = "#define XXH_INLINE_ALL\n#include <xxhash.h>\n#include <nlohmann/json.hpp>\n"
        _, said = ended("g++", "-std=c++17", "-x", "c++", "-M", "-", input=text, env=dict(os.environ, CPATH=headers))
        found = [word for word in said.split() if "xxh" in word or "nlohmann" in word]
        self.assertGreater(len(found), 1)
        self.assertEqual([word for word in found if not word.startswith(headers)], [])
        self.assertEqual(subprocess.run(["git", "check-ignore", "-q", gpu_check.HEADERS], cwd=ROOT).returncode, 0)


class Pieces(Folder):
    def test_tokens_as_frequent_as_words(self):
        count, n = 50257, 65536
        tokens = gpu_check.frequent_tokens(n, count)
        self.assertTrue(all(0 <= t < count for t in tokens))
        times = sorted((tokens.count(t) for t in (0, 7919, 2 * 7919)), reverse=True)
        self.assertLess(abs(times[0] / n - 0.038), 0.004)               # HOT of scripts/roofline.py
        self.assertGreater(times[1], times[2])
        self.assertGreater(len(set(tokens)), 8000)

    def test_encodings_of_the_trainer(self):
        self.assertEqual(gpu_check.encodings(HELP), ["none", "alibi", "cable"])
        if HAS_TRAINER:
            self.assertGreaterEqual(len(gpu_check.encodings(ended(TRAINER, "--help")[1])), 15)
        with self.assertRaises(gpu_check.Failed):
            gpu_check.encodings("nothing")

    def test_a_checkpoint_with_larger_matrices(self):
        vector = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
        matrix = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
        header = json.dumps({"__metadata__": {"a": "b"}, "v": vector, "m": matrix}).encode()
        self.write("model.safetensors", struct.pack("<Q", len(header)) + header + struct.pack("<4f", 1, 2, 3, 4))
        self.write("config.json", "{}")
        gpu_check.enlarge(self.folder, self.path("e"))
        self.assertEqual(sorted(os.listdir(self.path("e"))), ["config.json", "model.safetensors"])
        self.assertEqual(read_bytes(self.path("e/model.safetensors"))[8 + len(header):],
                         struct.pack("<4f", 6, 12, 3, 4))

    def test_the_differences_of_the_h100(self):
        """DIFFERENCES is what its committed result says, which the report can still show"""
        data = json.loads(read("dev/results/NVIDIA-H100-80GB-HBM3_1ee49cdc8c27.json"))
        items, found = data["stages"]["losses"]["items"], {}
        for name in [n for n in items if "measured " + n in items]:
            cpu = items["measured " + name]
            for kind in ("fp32", "bf16"):
                apart = [abs(x - y) / y for x, y in zip(items[name][kind]["losses"], cpu["losses"])]
                first, most = found.get((cpu["group"], kind), (0, 0))
                found[cpu["group"], kind] = (max(first, apart[0], 2 ** -24), max(most, *apart))
        self.assertEqual(len(found), 6)
        for (group, kind), pair in found.items():
            for expected, got in zip(gpu_check.DIFFERENCES[group][kind], pair):
                self.assertAlmostEqual(expected / got, 1, delta=0.05, msg=f"{group} {kind}")
        self.assertTrue("| cable | bf16 | 3 | 2.24e-04 |" in gpu_report.markdown(data, gpu_check.STAGE_NAMES))

    def test_an_empty_report(self):
        text = gpu_report.markdown({"gpu": "G", "commit": "c", "stages": {}}, ["device"])
        self.assertIn("| device | not run |", text)


if __name__ == "__main__":
    unittest.main()
