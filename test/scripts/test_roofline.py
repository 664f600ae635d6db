"""test_roofline.py -- scripts/roofline.py: its rows against arithmetic done by hand, the trainer's --check and the
sources; its table and bad input."""
import glob
import json
import os
import re
import subprocess
import unittest

from folder import BERT_TRAINER, HAS_BERT, HAS_TRAINER, ROOT, TRAINER, Folder, called, ended, read, read_bytes
import console
import roofline

H200 = roofline.GPUS["H200"]
LEFT_OUT = re.compile(r"attention_|\(|(alibi|toeplitz|t5|sandwich|fire|rope_table)_")     # of the model, on a CPU


def rows_of(model="small", B=64, T=1024, pos="cable", gpu=H200):
    s = roofline.shape_of(roofline.SIZES.get(model, model), B, T, pos)
    return s, roofline.step_rows(s, gpu)


def built(*names):
    """those of the encodings that the trainer has: with FEW_POSITIONS=1 none and cable"""
    text = subprocess.run([TRAINER, "--help"], capture_output=True, text=True, timeout=100).stdout
    return [name for name in names if name in console.encodings(text)]


def run_main(*words):
    """(exit code, what it prints)"""
    code, out, err = called(roofline.main, *words)
    return code, out + err


def one(rows, kernel, what=None):
    found = [r for r in rows if r.kernel == kernel and what in (None, r.what)]
    assert len(found) == 1, (kernel, what, found)
    return found[0]


class Ranges(unittest.TestCase):
    def test_ranges(self):
        """errors of one rate add up, those of two are perpendicular"""
        copy = roofline.Row("", "a", "", 2, bytes=4.3e9)
        self.assertEqual(roofline.ends(copy, H200), ([1e-3 + 2e-6, 1e-3 / 0.86 + 2e-6], "memory"))
        one, two = roofline.range_of([copy], H200), roofline.range_of([copy, copy], H200)
        self.assertAlmostEqual(two[2] - two[1], 2 * (one[2] - one[1]))
        other = roofline.range_of([copy, copy._replace(memory="rows")], H200)
        apart = roofline.range_of([copy._replace(memory="rows")], H200)
        self.assertAlmostEqual((other[2] - other[1]) ** 2, (one[2] - one[1]) ** 2 + (apart[2] - apart[1]) ** 2)

    def test_no_group_is_left_out(self):
        groups = {r.group for r in rows_of()[1]}
        self.assertEqual(len(groups), 9)
        for pos in roofline.BIASES:
            self.assertEqual({r.group for r in rows_of(pos=pos)[1]}, groups, pos)


class Counts(Folder):
    def test_flops_are_6_per_weight_and_token_and_attention(self):
        for model, B, T, pos in (("small", 64, 1024, "cable"), ("small", 3, 100, "learned"), ("xl", 4, 2048, "alibi"),
                                 ((2, 2, 128), 1, 64, "kcable")):
            with self.subTest(model=model, pos=pos):
                s, rows = rows_of(model, B, T, pos)
                L, NH, C = s[:3]
                OC = 3 * C + {"cable": 2 * NH, "kcable": 2 * NH}.get(pos, 0)
                OC += -OC % 8
                weights = L * C * (OC + 9 * C) + s.Vp * C
                products = sum(r.calls * r.flops for r in rows if r.kernel == "matmul_kernel")
                self.assertAlmostEqual(products / (6 * weights * B * T), 1, delta=1e-12)
                # two products forwards, seven backwards, of 2 C for each key that a query sees
                attention = sum(r.calls * r.flops for r in rows if r.group == "attention")
                self.assertEqual(attention, 9 * 2 * C * L * B * T * (T + 1) // 2)
                useful = 6 * (weights - (s.Vp - s.V) * C) + 12 * L * C * (T + 1) / 2      # llmc/base/gpu.h
                self.assertEqual(roofline.token_flops(s), useful)

    def test_bytes_by_hand(self):
        """L 2, NH 2, C 128, B 4, T 256: 1,024 rows; an array of bf16 has 262,144 bytes"""
        s, rows = rows_of((2, 2, 128), 4, 256, "cable")
        x = 262144
        n = roofline.elements(s)
        for kernel, what, calls, bytes in (
                ("layernorm_forward_kernel", "", 5, 2 * x), ("layernorm_backward_kernel", "", 5, 4 * x + 32 * 1024),
                ("gelu_forward_kernel", "", 2, 8 * x), ("gelu_backward_kernel", None, 2, 12 * x + 4 * 32 * 512),
                ("matmul_kernel", "fcw forward", 2, 5 * x + 2 * 512 * 128),
                ("matmul_kernel", "fcprojw forward", 2, 6 * x + 2 * 512 * 128),         # it adds the residual stream
                ("matmul_kernel", "fcw dinp", 2, 5 * x + 2 * 512 * 128),
                ("matmul_kernel", "fcw dweight", 2, 5 * x + 8 * 512 * 128),
                ("matmul_kernel", "wte forward", 1, x + 2 * 50304 * (128 + 1024)),
                ("slab_sums_kernel", "fcprojb", 2, x + 4 * 32 * 128), ("add_slabs_kernel", "fcb", 2, 4 * 32 * 512),
                ("classifier_kernel", "", 1, 4 * 1024 * 50304), ("embedding_forward_kernel", "", 1, 2 * x),
                ("memset", "dresidual", 1, x), ("memset", "gradients", 1, 4 * n),
                ("flash_forward_kernel", None, 2, 4 * x + 4 * 2048),
                ("flash_backward_dkdv_kernel", None, 2, 6 * x + 16 * 2048),
                ("flash_backward_dq_kernel", None, 2, 5 * x + 16 * 2048)):
            with self.subTest(kernel=kernel, what=what):
                r = one(rows, kernel, what)
                self.assertEqual((r.calls, r.bytes), (calls, bytes))
        # gradient, master, m and v are read, the latter three written, and two bytes of the weight
        adamw = one(rows, "adamw_kernel")
        self.assertAlmostEqual(adamw.calls * adamw.bytes, 30 * n)
        norm = one(rows, "norm_kernel")
        self.assertAlmostEqual(norm.calls * norm.bytes, 4 * n)

    def test_the_head_and_its_tiles(self):
        """13 parts of 5,120 rows, not 12 of 5,336 and a rest; 2,328 columns are ten tiles of 256, or 19 of 128"""
        s = rows_of()[0]
        self.assertEqual(roofline.chunk_of(s), 5120)
        self.assertEqual(roofline.chunk_of(s._replace(B=1)), 1024)
        qkv = one(rows_of()[1], "matmul_kernel", "qkvw forward")
        tiles = min(512 * 10, 256 * 19)
        self.assertAlmostEqual(qkv.waste, -(-tiles // 132) * 132 * 128 * 256 / (65536 * 2328))
        head = one(rows_of()[1], "matmul_kernel", "wte dinp")             # 40 x 3 tiles for 132 SMs
        self.assertAlmostEqual(head.waste, 132 / 120)
        self.assertAlmostEqual(one(rows_of()[1], "matmul_kernel", "fcw dweight").waste, 1)

    def test_calls(self):
        """all tensors are updated at once; the head sees 5,120 rows at a time; only many tokens have a frequent one"""
        _, rows = rows_of()
        self.assertEqual(one(rows, "adamw_kernel").calls, 1)
        self.assertEqual(one(rows, "classifier_kernel").calls, 13)
        self.assertEqual(sum(r.calls for r in rows if r.kernel == "matmul_kernel"), 3 * (13 + 4 * 12))
        self.assertAlmostEqual(one(rows, "embedding_hot_kernel").seconds, 39 * 0.12e-6)
        self.assertNotIn("embedding_hot_kernel", [r.kernel for r in rows_of(B=1, T=66)[1]])

    @unittest.skipUnless(HAS_TRAINER, "SKIPPED: make train_gpt2")
    def test_tensors_are_the_trainers(self):
        """--check: a line for each tensor, with its shape"""
        for pos in built("cable", "kcable_nw", "alibi", "learned"):
            with self.subTest(pos=pos):
                text = self.write("text.txt", 100 * "a")
                p = subprocess.run([TRAINER, "--check", "--model", "3,2,64", "--T", "32", "--B", "1", "--pos", pos,
                                    "--train_files", text, "--val_files", text], cwd=self.folder, capture_output=True,
                                   text=True, timeout=100)
                self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
                s = roofline.shape_of((3, 2, 64), 1, 32, pos, V=256)
                listed = {name: tuple(0 if n == "-" else int(n) for n in sizes) for name, *sizes in
                          re.findall(r"^(\w+) +(-|\d+) +(\d+) +(-|\d+) +\d+ +(?:yes|no)", p.stdout, re.M)}
                found = {name: listed.pop(name, None) for name in roofline.tensors(s)}
                self.assertEqual(found, roofline.tensors(s))
                self.assertEqual(listed, {})                            # of no tensor the model is without
                total = int(re.search(r"(\d+) of them parameters", p.stdout).group(1))
                extra = 2 * roofline.EXTRA_COLUMNS.get(pos, 0)
                padding = (s.Vp - s.V) * 64 + 3 * (s.OC - 192 - extra) * 65
                self.assertEqual(roofline.elements(s) - padding, total)


class Sources(unittest.TestCase):
    def test_gpus_have_the_trainers_peaks(self):
        table = re.search(r"GPU_RATES\[\] = \{(.*?)\n\};", read("llmc/base/gpu.h"), re.S).group(1)
        rates = {(int(a), int(b)): (int(bf16), int(geforce), int(khz)) for a, b, bf16, geforce, khz in
                 re.findall(r"\{(\d+), +(\d+), +(\d+), +(\d+), +\d+, +(\d+)\}", table)}
        capabilities = {"A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0), "4090": (8, 9)}
        self.assertEqual(set(capabilities), set(roofline.GPUS))
        for name, capability in capabilities.items():
            with self.subTest(gpu=name):
                gpu = roofline.GPUS[name]
                bf16, geforce, khz = rates[capability]
                rate = geforce if name == "4090" else bf16
                peak = gpu.sms * rate * (khz * 1e3 if khz else gpu.ghz * 1e9) / 1e12
                self.assertAlmostEqual(gpu.tflops / peak, 1, delta=0.005)

    def test_encodings_and_kernels_are_in_the_sources(self):
        table = read("llmc/position/table.h")
        names = set(re.findall(r"^    X\((\w+), +\w+, +\"", table, re.M))
        names |= set(re.findall(r'\{\{"(\w+)", "\w+"\}\}', table))
        self.assertEqual(set(roofline.BIASES), names - {"cope", "cable_signed", "grape_k", "grape_qk"})     # portable
        kernels = {name for path in glob.glob(os.path.join(ROOT, "llmc", "**", "*.cuh"), recursive=True)
                   for name in re.findall(r"__global__ void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(", read(path))}
        for pos in roofline.BIASES:
            for r in rows_of((2, 2, 128), pos=pos)[1]:
                self.assertTrue(r.kernel in kernels | {"memset", "(host)"}, r.kernel)

    def test_numbers_of_the_sources(self):
        self.assertIn("? 256u : 32u) << 20", read("llmc/engine/model.cuh"))            # LOGITS_BOUND of product_rows
        self.assertIn("MAX_SLABS = ON_GPU ? 1024 :", read("llmc/base/reduce.cuh"))
        self.assertIn("EMBEDDING_PART = ON_GPU ? 64 :", read("llmc/embedding.cuh"))


class Gpus(unittest.TestCase):
    def test_limits(self):
        """a row by each limit, on an H200: 785 TFLOP/s, 4.3 TB/s"""
        row = lambda **more: roofline.Row("", "", "", 1, **more)
        for what, row, expected in (
                ("tensor", row(flops=785e9), (1 / 1.01, 1 / 0.84)),
                ("tensor", row(flops=785e9, waste=1.5), (1.5 / 1.01, 1.5 / 0.84)),
                ("memory", row(bytes=4.3e9, flops=1e9), (1, 1 / 0.86)),
                ("attention", row(flops=2e11, rates=(100, 200), bytes=1e9), (1, 2)),
                ("latency", row(seconds=1e-3), (1, 1))):
            with self.subTest(limit=what):
                times, limit = roofline.ends(row, H200)
                self.assertEqual(limit, what)
                for got, ms in zip(times, expected):
                    self.assertAlmostEqual(got, 1e-3 * ms + 2e-6, places=9)

    def test_attention_of_long_sequences(self):
        """the rates are of T 1,024; at 16,384 an H100 reached 312.2 TFLOP/s forward"""
        long = roofline.attention_rates("none", 64, 16384, roofline.GPUS["H100"])
        self.assertAlmostEqual(long[0][1] / 312.2, 1, delta=0.03)

    def test_a_measured_step(self):
        """the prediction is near what an H100 took; the rates are from cable's profile, and none's step is not"""
        items = json.loads(read("dev/results/NVIDIA-H100-80GB-HBM3_a48c6acfe0ea.json"))["stages"]["step"]["items"]
        for pos in ("cable", "none"):
            gpu = roofline.GPUS["H100"]
            predicted = roofline.range_of(rows_of(pos=pos, gpu=gpu)[1], gpu)[1]
            self.assertAlmostEqual(predicted / items["124M, 65,536 tokens " + pos]["ms"], 1, delta=0.03)

    def test_what_the_documents_say(self):
        """docs/predictions.md: GPT-2 124M, cable, T 1,024, B 64"""
        for name, expected in ("H200", (106.6, 113.3, 120.0)), ("H100", (114.1, 120.9, 127.7)):
            gpu = roofline.GPUS[name]
            for got, ms in zip(roofline.range_of(rows_of(gpu=gpu)[1], gpu), expected):
                self.assertAlmostEqual(got, ms, delta=0.06)


class Profile(Folder):
    """--profile of the trainers, and beside the prediction"""

    def setUp(self):
        super().setUp()
        self.text = self.write("text.txt", "".join(f"line {n}, and {n * n} its square.\n" for n in range(2000)))

    def train(self, program, name, *flags):
        """the path of what it printed"""
        words = ["--train_files", self.text, "--val_files", self.text, "--T", "64", "--steps", "3", "--B", "2"]
        code, text = ended(program, *words, "--val_every", "0", *flags, timeout=200)
        self.assertEqual(code, 0, text)
        return self.write(name + ".txt", text)

    @unittest.skipUnless(HAS_TRAINER, "SKIPPED: make train_gpt2")
    def test_kernels_are_called_as_often_as_predicted(self):
        """all that the model has except attention's, which are different kernels on a CPU"""
        for pos, recompute in [(pos, 1) for pos in built(*roofline.BIASES)] + [("cable", 2)]:
            with self.subTest(pos=pos, recompute=recompute):
                path = self.train(TRAINER, "run", "--model", "3,3,192", "--pos", pos, "--sample_every", "0",
                                  "--recompute", str(recompute), "--profile", "2")
                text = read(path)
                self.assertEqual(text.count("profile of step 2, by the clock"), 1)
                self.assertLess(text.index("step    2/3"), text.index("profile of step 2"))
                rows = [r for r in roofline.step_rows(roofline.shape_of((3, 3, 192), 2, 64, pos, 256), H200, recompute)
                        if r.group != "attention" and r.kernel not in ("memset", "(host)")]
                profile = roofline.measured(path)
                table = roofline.compared(rows, H200, profile)
                predicted = {k: v for k, v in table.items() if v[0]}
                self.assertEqual({k: v[2] for k, v in predicted.items()}, {k: v[0] for k, v in predicted.items()})
                self.assertEqual([k for k, v in table.items() if not v[0] and not LEFT_OUT.match(k[0])], [])
                self.assertEqual(profile["attention_forward_kernel", "-"][0], 3)
                # the host's part is what remains of the step
                shares = [float(x) for x in re.findall(r" (-?[\d.]+)% +\S+$", text, re.M)]
                self.assertAlmostEqual(sum(shares), 100, delta=0.06 * len(shares))
                self.assertTrue(all(ms >= 0 for _, ms in profile.values()), profile)

    @unittest.skipUnless(HAS_TRAINER, "SKIPPED: make train_gpt2")
    def test_it_changes_no_bit_and_is_off_by_default(self):
        printed = []
        for name, flags in ("with", ("--profile", "2")), ("without", ()):
            out = self.path(name)
            printed.append(read(self.train(TRAINER, name, "--model", "1,2,64", "--out", out, "--checkpoint_every", "3",
                                           "--sample_every", "0", *flags)))
            weights = glob.glob(os.path.join(out, "step_*", "*.safetensors"))
            self.assertTrue(weights)
        self.assertEqual(["profile of step" in text for text in printed], [True, False])
        for path in glob.glob(self.path("with", "step_*", "*.safetensors")):
            self.assertEqual(read_bytes(path), read_bytes(path.replace("/with/", "/without/")), path)

    @unittest.skipUnless(HAS_BERT, "SKIPPED: make train_bert")
    def test_bert(self):
        profile = roofline.measured(self.train(BERT_TRAINER, "bert", "--model", "2,2,64", "--profile", "3"))
        self.assertEqual(profile["gelu_erf_backward_kernel", "-"][0], 3)        # two layers and the head
        self.assertEqual(profile["attention_backward_kernel", "-"][0], 2)

    def test_measured_beside_predicted(self):
        path = self.write("printed.txt", "step 1/9 | loss 3\nprofile of step 3, by events\n"
                          "kernel  M x N x K  calls  ms  share  TFLOP/s\n"
                          "flash_forward_kernel   -   12   12.000   8.0%   -\n"
                          "matmul_kernel   65536x3072x768   12   4.000   3.0%   927.713\n"
                          "some_new_kernel   -   2   0.500   0.3%   -\n"
                          "(host)   -   -   1.000   0.7%   -\nstep 4/9 | loss 2\n")
        s, rows = rows_of()
        table = roofline.compared(rows, H200, roofline.measured(path))
        self.assertEqual(table["flash_forward_kernel", "-"][2:4], [12, 12.0])
        self.assertEqual(table["matmul_kernel", "*x3072x768"][0:4:2], [24, 12])          # and fcprojw's dinp
        self.assertEqual(table["some_new_kernel", "-"][:4], [0, 0.0, 2, 0.5])
        code, output = run_main("--measured", path)
        self.assertEqual(code, 0, output)
        self.assertRegex(output, r"flash_forward_kernel +- +12 +12 +6\.133 +12\.000 +-49% +406 +103\.2")
        code, output = run_main("--measured", self.text)
        self.assertEqual(code, 2, output)
        self.assertIn("got no table", output)


class Program(unittest.TestCase):
    def test_table(self):
        code, output = run_main("--B", "8")
        self.assertEqual(code, 0, output)
        self.assertIn("A PREDICTION, not a measurement", output)
        step = float(re.search(r"^# step +([\d.]+) ms", output, re.M).group(1))
        rows = re.findall(r"^[^#]\S* .* (\S+) +\S+ +\S+ +(\S+)%$", output, re.M)
        self.assertAlmostEqual(sum(float(ms) for ms, _ in rows), step, delta=0.05)
        self.assertAlmostEqual(sum(float(share) for _, share in rows), 100, delta=1)

    def test_every_gpu_and_encoding_has_a_table(self):
        for words in (["--gpu", "4090", "--pos", "fire"], ["--gpu", "B200", "--pos", "t5", "--model", "xl"],
                      ["--gpu", "A100"], ["--recompute", "2"]):
            code, output = run_main(*words)
            self.assertEqual(code, 0, output)
            self.assertRegex(output, "prediction|PREDICTION|predicted")

    def test_bad_input(self):
        for words, says in ((["--model", "huge"], "L,NH,C"), (["--model", "2,2,64"], "heads of 64 or 128"),
                            (["--model", "2,3,64"], "multiple of NH"), (["--B", "0"], "positive")):
            code, output = run_main(*words)
            self.assertEqual(code, 2, output)
            self.assertIn(says, output)


if __name__ == "__main__":
    unittest.main()
