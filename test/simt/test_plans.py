"""--plans FILE: the same file gives the same bits, on one rank and on two, in training and evaluation; a run that is
resumed must have the file that it had; a file that is damaged is refused.

The emulator's double of cuBLASLt has three algorithms, which add up in different orders. CABLE_LT_FAST makes all but
one of them slow."""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = [os.path.join(ROOT, "build", "simt", name) for name in ("train_gpt2", "train_gpt2_fp32", "train_bert")]
GPT2, FP32, BERT = PROGRAMS
CPU = os.path.join(ROOT, "train_gpt2")
STEPS = 3


class Plans(unittest.TestCase):
    def setUp(self):
        absent = [os.path.relpath(p, ROOT) for p in (*PROGRAMS, CPU) if not os.path.exists(p)]
        if absent:
            self.skipTest(f"SKIPPED: not built: {', '.join(absent)}; make test builds all")
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        with open(os.path.join(ROOT, "LICENSE"), "rb") as f:
            text = f.read() * 4
        with open(self.path("text.txt"), "wb") as f:
            f.write(text)

    def path(self, name):
        return os.path.join(self.directory.name, name)

    def command(self, program, out, plans, *flags, B=2, T=8, every=STEPS):
        known = ["--plans", self.path(plans)] if plans else []
        return [program, "--train_files", self.path("text.txt"), "--model", "1,2,32", "--pos", "none", "--T", str(T),
                "--B", str(B), "--total_batch", str(4 * T), "--steps", str(STEPS), "--lr", "1e-2", "--val_every", "0",
                "--checkpoint_every", str(every), "--out", self.path(out), *known, *flags]

    def start(self, command, fast=None, **env):
        env = {k: str(v) for k, v in env.items()}
        if fast is not None:
            env["CABLE_LT_FAST"] = str(fast)
        return subprocess.Popen(command, env=dict(os.environ, **env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                universal_newlines=True)

    def train(self, out, plans, *flags, program=GPT2, fast=None, code=0, **more):
        """what it printed"""
        p = self.start(self.command(program, out, plans, *flags, **more), fast)
        text = p.communicate()[0]
        self.assertEqual(p.returncode, code, text)
        return text

    def weights(self, out):
        with open(self.path(f"{out}/step_{STEPS:08d}/model.safetensors"), "rb") as f:
            return f.read()

    def first_norm(self, out):
        with open(self.path(f"{out}/log.jsonl")) as f:
            return next(r["norm"] for r in map(json.loads, f) if r["kind"] == "train")

    def test_the_same_file_gives_the_same_bits(self):
        for program in GPT2, BERT:
            with self.subTest(program=program):
                name = os.path.basename(program)
                text = self.train(name + "1", name + ".json", program=program, fast=2)
                self.assertIn("products were measured in", text)
                with open(self.path(name + ".json")) as f:
                    file = f.read()
                self.assertEqual({p["algorithm"][1] for p in json.loads(file)["plans"]}, {2})
                text = self.train(name + "2", name + ".json", program=program)
                self.assertNotIn("measured", text)
                self.assertEqual(self.weights(name + "1"), self.weights(name + "2"))
                with open(self.path(name + ".json")) as f:
                    self.assertEqual(f.read(), file)
                self.train(name + "3", None, program=program)
                self.assertNotEqual(self.weights(name + "1"), self.weights(name + "3"))
                # where the first choices are the fastest, measuring them leaves nothing behind that a step reads
                self.train(name + "4", name + "4.json", program=program, fast=0)
                self.assertEqual(self.first_norm(name + "4"), self.first_norm(name + "3"))
                self.assertEqual(self.weights(name + "4"), self.weights(name + "3"))

    def test_a_larger_batch_adds_its_products(self):
        self.train("a", "plans.json", fast=2)
        with open(self.path("plans.json")) as f:
            before = json.load(f)["plans"]
        self.train("b", "plans.json", B=4, fast=1)
        with open(self.path("plans.json")) as f:
            after = json.load(f)["plans"]
        self.assertEqual(after[:len(before)], before)
        self.assertEqual({p["algorithm"][1] for p in after[len(before):]}, {1})

    def test_evaluation_uses_it(self):
        self.train("a", "plans.json", program=FP32, fast=2)       # in which no rounding hides the order of a sum
        load = ["--load", self.path(f"a/step_{STEPS:08d}"), "--val_files", self.path("text.txt"),
                "--eval_lengths", "8", "--B", "2", "--eval_tokens", "16"]       # two windows, as in a micro-batch
        found = {}
        for known in [], ["--plans", self.path("plans.json")]:
            p = self.start([FP32, *load, *known, "--out", self.path("e" + str(len(known)))])
            text = p.communicate()[0]
            self.assertEqual(p.returncode, 0, text)
            with open(self.path(f"e{len(known)}/log.jsonl")) as f:
                found[len(known)] = [r["loss"] for r in map(json.loads, f) if r["kind"] == "extrapolation"]
        self.assertTrue(found[0])
        self.assertNotEqual(found[0], found[2])
        p = self.start([FP32, *load, "--plans", self.path("absent.json")])
        text = p.communicate()[0]
        self.assertEqual(p.returncode, 2, text)
        self.assertIn("no such file; a training with --plans writes it", text)

    def test_all_ranks_take_over_what_rank_0_has_measured(self):
        self.train("one", "one.json", fast=2)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = self.command(GPT2, "two", "two.json")
        shared = {"SIMT_GPUS": 2, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "7"}
        runs = [self.start(command, fast=2 - rank, RANK=rank, LOCAL_RANK=rank, **shared) for rank in (0, 1)]
        texts = [p.communicate()[0] for p in runs]
        self.assertEqual([p.returncode for p in runs], [0, 0], texts)
        self.assertEqual(self.weights("one"), self.weights("two"))

    def test_a_resumed_run_must_have_its_file(self):
        self.train("a", "plans.json", fast=2, every=1)
        whole = self.weights("a")
        for step in STEPS - 1, STEPS:
            shutil.rmtree(self.path(f"a/step_{step:08d}"))
        for plans in None, "other.json":
            with self.subTest(plans=plans):
                text = self.train("a", plans, "--resume", "1", fast=1, code=2)
                self.assertIn("--plans: the run to be resumed had ", text)
                self.assertFalse(os.path.exists(self.path("other.json")))       # a refused run writes nothing
        self.train("a", "plans.json", "--resume", "1")
        self.assertEqual(self.weights("a"), whole)
        shutil.rmtree(self.path(f"a/step_{STEPS:08d}"))
        self.train("a", None, "--resume", "1", "--allow_change", "plans")
        self.assertNotEqual(self.weights("a"), whole)

    def test_what_is_not_a_file_of_plans_is_refused(self):
        self.train("a", "plans.json")
        with open(self.path("plans.json")) as f:
            good = f.read()
        plans = json.loads(good)
        first = plans["plans"][0]["algorithm"][0]
        for bad, message in ((good[:-5], "not valid JSON"), (good.replace(str(first), str(first ^ 1), 1), "checksum"),
                             (good.replace("plans 1", "plans 2"), "expected \"format\": \"matmul plans 1\""),
                             ("[]", "expected an object"), ("", "not valid JSON")):
            with self.subTest(message=message):
                with open(self.path("bad.json"), "w") as f:
                    f.write(bad)
                text = self.train("b", "bad.json", code=2)
                self.assertIn(message, text)
                with open(self.path("bad.json")) as f:
                    self.assertEqual(f.read(), bad)
        text = self.train("b", "plans.json", program=CPU, code=2)
        self.assertIn("--plans: this program was built for CPUs", text)


if __name__ == "__main__":
    sys.exit(unittest.main())
