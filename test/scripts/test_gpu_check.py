"""test_gpu_check.py -- dev/gpu_check.py with simulated programs, dev/gpu_study.py on a CPU, and dev/measured.py."""
import collections
import csv
import io
import os
import re
import shutil
import struct
import sys
import unittest
from unittest import mock

from folder import HAS_TRAINER, ROOT, TRAINER, Folder, alive, called, ended, read, read_bytes

sys.path.insert(0, os.path.join(ROOT, "dev"))
import gpu_check  # noqa: E402
import gpu_study  # noqa: E402
import measured  # noqa: E402

# nvcc, the C++ compiler and all that they build: a program of this text. WRONG: what is not as it should be.
PROGRAM = f"#!{sys.executable} -SE\n" + r"""
import json, os, struct, subprocess, sys
args, name, wrong = sys.argv[1:], os.path.basename(sys.argv[0]), os.environ.get("WRONG", "")
flag = lambda word, otherwise="": args[args.index(word) + 1] if word in args else otherwise
source = open(__file__).read()
nccl = "-DUSE_NCCL" in source.rpartition("# built by ")[2]
if "--version" in args:
    print("Cuda compilation tools, release 13.0")
elif name == "g++" and "-" in args:     # dev/configure.sh
    sys.exit("nccl.h" in sys.stdin.read() and "no NCCL" in wrong)
elif name in ("nvcc", "g++"):
    if wrong == "newer card" and "sm_121a" in " ".join(args):
        sys.exit("nvcc fatal   : Unsupported gpu architecture 'sm_121a'")
    if "-E" in args:
        sys.exit(wrong == "headers")
    if "--dryrun" not in args:
        os.chmod(os.open(args[-1], os.O_CREAT), 0o755)
        open(args[-1], "w").write(source + "# built by " + " ".join(args))
elif name == "ncu":
    print(wrong == "permission" and "==ERROR== ERR_NVGPUCTRPERM" or TABLE)
elif not nccl and (args[:1] == ["self"] or flag("--gpus", "1") != "1"):
    sys.exit("built without NCCL")
elif name.startswith("test_"):
    print("sum\nbig" if "--list" in args else args[0] + (" FAILED 1.0 ms" if wrong == "test" else "  ok   2.0 ms"))
elif name.startswith("bench_"):
    print(json.dumps({"key": "forward causal d64 T16384 cable", "tflops": 200.5}) + "\nmore")
elif name == "nvidia-smi":
    count = {"two ": 2, "eigh": 8}.get(wrong[:4], 1)
    print({"compute_cap": "12.1" if wrong == "newer card" else "9.0", "memory.free": "16380 MiB"}.get(
        args[0].partition("=")[2], "NVIDIA Test GPU" + "\nNVIDIA Test GPU" * (count - 1)))
elif "--help" in args:
    print("positional encodings (--pos):\n  none          no\n  cable         the paper's\n")
elif "Cuda" in args:                    # of test_torch.py, whose emulator is not there
    print("OK (skipped=1)")
elif flag("--steps") == "1000000":
    rank = subprocess.Popen(["sleep", "60"])
    print(f"--ranks 2: the ranks are processes {os.getpid()} {rank.pid}\nstep 1", flush=True)
    rank.wait()
    print(f"rank {int(flag('--gpus')) - 1} (process 7) was ended by signal 9" if "GPUs" in wrong else "an error")
    sys.exit(137)
elif "--out" in args:
    steps, out, small = int(flag("--steps")), flag("--out"), wrong == "16 GB"
    if small and flag("--B") == "64":
        sys.exit(4)
    if wrong == "hang" and flag("--model") == "small" and flag("--pos") == "none":
        child = subprocess.Popen(["sleep", "600"])
        open("child", "w").write(str(child.pid))
        child.wait()
    error = 1e-2 * (wrong == "loss" and "/bf16/" in sys.argv[0])
    error += 1e-12 * (wrong == "bits" and flag("--recompute") == "2")
    error += 1e-12 * (wrong == "two paths" and flag("--gpus") == "2" and "NCCL_P2P_DISABLE" in os.environ)
    error += 1e-12 * (wrong == "eight GPUs" and flag("--gpus") == "8" and "bert" in name)
    os.makedirs(f"{out}/step_{steps:08d}")
    B = 32 if small else int(flag("--total_batch", "0")) // int(flag("--T", "1"))
    with open(f"{out}/log.jsonl", "w") as f:
        f.write(json.dumps({"kind": "config", "flags": {"B": B, "recompute": int(small)}}) + "\n")
        for s in range(steps):
            f.write(json.dumps({"kind": "train", "loss": 5 + error - 0.1 * s, "ms": 10.0 + s, "mem": 2 ** 30}) + "\n")
        f.write(json.dumps({"kind": "evaluation_speed", "T": 131072, "tokens": 262144, "ms": 250.0}) + "\n")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    with open(f"{out}/step_{steps:08d}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2))
    open(f"{out}/step_{steps:08d}/config.json", "w").write("{}")
    print("step 9\n\nprofile of step 10, by events\nadamw_kernel  -  1  5.0  6.0%  -\nnorm_kernel  -  1  0.5  0.6%  -")
"""
# as Nsight Compute's --page raw prints it
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TABLE = "==PROF== Connected\n" + "\n".join('"' + '","'.join(row) + '"' for row in (
    ["ID", "Kernel Name", *gpu_check.COUNTERS, STALLS.format("barrier"), STALLS.format("wait")],
    ["", "", "sector/s", "byte/s", "%", "", ""], ["0", "void flash_kernel<1>", "1,000", "2", "70.5", "9", "10"]))


class GpuCheck(Folder):
    def setUp(self):
        super().setUp()
        tools = os.path.dirname([self.executable("bin/" + name, PROGRAM.replace("TABLE", repr(TABLE))) for name in
                                 ("nvidia-smi", "nvcc", "g++", "python", "compute-sanitizer", "ncu")][0])
        self.executable("dev/configure.sh", re.sub("/var/lib/dpkg", "/no", read("dev/configure.sh")))   # not Debian
        self.start(mock.patch.object(gpu_check, "tool", lambda name, tool=gpu_check.tool:
                                     "" if os.environ["WRONG"] == f"no {name}" else tool(name)))
        self.start(mock.patch.object(gpu_check, "TOKENS", 1000))
        self.start(mock.patch.object(sys, "executable", tools + "/python"))             # the one with PyTorch
        for name in ("train_gpt2.cu", "llmc/a.cuh", "test/simt/test_sum.cu", "test/simt/test_flash_forward.cu"):
            self.write(name, 50 * "// one two three\n")
        self.start(mock.patch.object(gpu_check.ledger, "ROOT", self.folder))
        self.start(mock.patch.dict(os.environ, PATH=tools + ":" + os.environ["PATH"], COMMIT="0123456789", WRONG=""))
        for name in ("NVCC", "NCCL", "NCCL_DIR", "CXX", "ARCH"):
            os.environ.pop(name, None)
        self.addCleanup(os.chdir, os.getcwd())

    def check(self, *words):
        """(exit code, what it printed, {what: {unit: value}})"""
        code, out, err = called(gpu_check.main, "--results", self.path("build/gpu.csv"), *words)
        rows = collections.defaultdict(dict)
        for r in self.table("build/gpu.csv") if os.path.exists(self.path("build/gpu.csv")) else ():
            self.assertEqual((r["gpu"], r["commit"]), ("NVIDIA Test GPU", "0123456789"))
            rows[r["what"]][r["unit"]] = r["value"]
        return code, out + err, rows

    def test_all_pass_and_a_second_run_repeats_nothing(self):
        with mock.patch.object(gpu_check, "on_the_gpu", return_value=2) as processes:
            code, said, rows = self.check()
        self.assertEqual((code, processes.call_count), (0, 5), said)            # two of kernels, three of losses
        self.assertEqual(rows["step 124M cable, 65536 tokens"], {"ms": "18.5", "MiB": "1024"})
        self.assertEqual(rows["profile 124M cable"], {"ms adamw_kernel": "5"})
        self.assertEqual(rows["kernels sum"], {"tests passed": "2"})
        self.assertEqual(rows["bench forward causal d64 T16384 cable"], {"TFLOP/s": "200.5"})
        self.assertEqual(rows["counters flash_kernel"], dict(zip([*gpu_check.COUNTERS, STALLS.format("wait")],
                                                                 ("1000", "2", "70.5", "10"))))
        self.assertEqual(rows["evaluate 124M cable"], {"ms a window of 131072": "125"})
        self.assertEqual([what for what in rows if "epilogues" in what],
                         [f"epilogues {bits}, step 124M cable, 65536 tokens, turn {turn}" for turn in (1, 2, 3)
                          for bits in range(4)])
        for what in ("repeat none", "losses gpt2", "losses bert", "losses pairs", "racecheck", "torch", "library",
                     "exchange"):
            self.assertIn(what, rows)
        log = self.read("build/gpu_check/log.txt")
        compiled = [line for line in log.split("\n") if line.startswith("$ ") and " -o build" in line]
        self.assertRegex(read("Makefile"), r"\nNVCC_BASE = .*\$\(NVCC_CODE\) ")
        self.assertIn(" ".join(gpu_check.makefile("NVCC_CODE")), compiled[0])
        self.assertEqual([("-gencode arch=compute_90a,code=sm_90a" in line) != ("-ffp-contract=off" in line)
                          for line in compiled], 18 * [True])
        self.assertEqual(self.check()[::2], (0, rows))
        self.assertEqual(self.read("build/gpu_check/log.txt")[len(log):].count("\n$ "), 5)    # --help, import torch

    def test_only_what_the_stages_need_is_compiled(self):
        libraries = {"build/gpu_check/libcablecu.so", "build/gpu_check/libcablecu_fp32.so"}
        for stages, torch, expected in ((["torch"], True, libraries), (["torch"], False, set()), ([], True, None),
                                        (["train"], True, {"build/gpu_check/bf16/train_gpt2",
                                                           "build/gpu_check/bf16/train_bert"})):
            compiled = []
            with mock.patch.object(gpu_check, "has_pytorch", lambda visit: torch), \
                    mock.patch.object(gpu_check, "host", lambda: (9 << 30, 128)), \
                    mock.patch.object(gpu_check, "side_by_side", lambda f, found, n: compiled.extend([n, *found])):
                self.check("--only", "build", *stages)
            self.assertEqual(compiled.pop(0), 4)                # as many of nvcc as fit into 9 GiB
            names = {line[-1] for line in compiled}
            self.assertEqual(names, expected or names, stages)
            self.assertEqual(len(names), 18 if expected is None else len(expected), stages)

    def test_several_gpus(self):
        host, killed = "ranks gpt2, by the host's memory", "a killed rank"
        for wrong, failed, stages in (("two GPUs", set(), ["first", "build"]), ("two paths", {host, killed}, []),
                                      ("eight GPUs", {"ranks bert"}, [])):
            with self.subTest(wrong=wrong), mock.patch.dict(os.environ, WRONG=wrong):
                code, said, rows = self.check("--only", *stages, "ranks")
                self.assertEqual(code, 1 if failed else 0, said)
                for what in ("ranks gpt2", "ranks bert", host, killed):
                    self.assertEqual(rows[what] == {"": "failed"}, what in failed, (what, rows[what]))
            os.remove(self.path("build/gpu.csv"))
        self.assertIn("expected the same bits with ('--gpus', 8)", said)

    def test_what_is_wrong_is_named_and_tried_again(self):
        small = ", --B 32 --recompute 1"
        for wrong, stages, code, words, rows in (
                ("headers", "device", 2, "expected the headers xxhash.h", 1),
                ("loss", "build losses", 1, "losses gpt2: FAILED: none, bf16: the losses differ from the CPU's", 3),
                ("bits", "first step", 1, "repeat none: FAILED: expected the same bits with ('--recompute', 2)", 5),
                ("test", "build kernels", 1, "kernels sum: FAILED: expected each of the tests ['sum', 'big']", 2),
                ("16 GB", "first step", 0, f"step 124M cable, 65536 tokens: 18.5 ms{small}, 1024 MiB{small}\n", 5),
                ("newer card", "first step", 0, "nvcc is older than this GPU", 5),
                ("two GPUs, no NCCL", "build ranks", 3, "FAILED: nothing; unfinished: ranks\n", 0),
                ("no ncu", "first counters", 0, "there is no ncu here", 0),
                ("permission", "first counters", 3, "counters: unfinished: ncu has no table: ==ERROR== ERR_NVGPU", 0),
                ("hang", "first step", 3, "FAILED: nothing; unfinished: step 124M none, 65536 tokens\n", 4)):
            with self.subTest(wrong), mock.patch.object(gpu_check, "LIMIT", 5):
                os.environ["WRONG"] = wrong
                found, said, results = self.check("--only", *stages.split())
                self.assertEqual((found, words in said, len(results)), (code, True, rows), said)
                self.assertEqual({"": "failed"} in results.values(), code == 1)
                if wrong == "16 GB":
                    self.assertEqual(results["profile 124M cable"], {f"ms{small} adamw_kernel": "5"})
                if wrong == "newer card":
                    self.assertIn("arch=compute_80,code=compute_80 ", self.read("build/gpu_check/log.txt"))
                os.environ["WRONG"] = ""
                self.assertEqual(self.check("--only", *stages.split())[0], 0)
            shutil.rmtree(self.path("build"))
        self.assertFalse(alive(int(self.read("child"))))

    def test_a_host_of_128_threads(self):
        self.write("proc/meminfo", "MemFree: 1 kB\nMemAvailable:   536870912 kB\n")
        self.write("proc/self/cgroup", "0::/a/b\n")
        for memory, quota, expected in (("max", "max 100000", 15), ("6442450944", "max 100000", 6),  # 15 GiB of the GPU
                                        ("max", "800000 100000", 4), ("1", "50000 100000", 1)):
            self.write("sys/fs/cgroup/a/memory.max", memory + "\n")
            self.write("sys/fs/cgroup/a/b/cpu.max", quota + "\n")
            with mock.patch.object(os, "sched_getaffinity", lambda _: range(128)), \
                    mock.patch.object(gpu_check.host, "__defaults__", (self.folder,)):
                self.assertEqual(gpu_check.on_the_gpu(), expected)

    def test_what_time_ends_is_unfinished(self):
        code, said, _ = self.check("--minutes", "0")
        self.assertEqual(code, 3)
        self.assertIn("FAILED: nothing; unfinished: device, first, step", said)
        self.assertIn("unfinished: build/gpu_check/cpu/train_gpt2 was not built", self.check("--only", "losses")[1])
        for missing in ("nvcc", "nvidia-smi"):
            os.remove(self.path("bin", missing))
            with mock.patch.dict(os.environ, PATH=self.path("bin"), CUDA_HOME=self.path("no")):
                self.assertIn("gpu_check.py: no " + ("nvcc" if missing == "nvcc" else "GPU"), self.check()[1])
            os.environ["NVCC"] = "nvcc"

    def test_the_headers_for_a_bare_machine(self):
        """what --pack copies is all that the compiler reads of the two libraries"""
        os.environ["PATH"] = os.environ["PATH"].partition(":")[2]
        self.assertEqual(self.check("--pack")[0], 0)
        text = "#define XXH_INLINE_ALL\n#include <xxhash.h>\n#include <nlohmann/json.hpp>\n"
        _, said = ended("g++", "-std=c++17", "-x", "c++", "-M", "-", input=text,
                        env=dict(os.environ, CPATH=self.path(gpu_check.HEADERS)))
        found = [word for word in said.split() if "xxh" in word or "nlohmann" in word]
        self.assertGreater(len(found), 1)
        self.assertEqual([word for word in found if not word.startswith(self.folder)], [])

    def test_what_a_kernel_reaches(self):
        banner = ("device  H200, 141 GB at 4.80 TB/s, peak 1000 bf16 and 67 float32 TFLOP/s\nflags --B 2 --T 63\n"
                  "model  L 1, NH 2, C 128, V 500: 0.5M parameters\n\nprofile of step 3, by events\n")
        for row, cells in (("matmul_kernel 126x512x128 2 0.1 1% 1.0", "0.3 6 0.3 0%"),
                           ("matmul_kernel 512x512x4096 1 0.01 1% 1.0", "10.5 1049 214.7 22%"),
                           ("flash_forward_kernel - 1 0.001 1% -", "0.1 130 2.1 3%"),
                           ("(host) - - 1.0 1% -", "- - - -%")):
            self.assertEqual(measured.table(banner + row + "\n")[1].split()[-4:], cells.split(), row)
        refused = lambda text: called(measured.main, self.write("x", text))
        self.assertIn("x: expected the output of a run with --profile", refused(banner)[2])
        row = "matmul_kernel 126x512x128 2 0.1 1% 1.0\n"
        for good in "126", "2 0.1", "0.1 1%", "0.5M", "4.80", "C 128":
            for bad in "1.2.3", "9" * 400, "1" * 400 + ".5", ".":
                wrong = re.sub(r"[\d.]+", bad, good, count=1)
                code, out, said = refused((banner + row).replace(good, wrong))
                self.assertEqual((code, out, said.count("\n")), (2, "", 1), (wrong, said))
                self.assertIn("x: expected a number of at most 15 digits", said)

    def test_the_committed_results(self):
        rows = list(csv.DictReader(io.StringIO(read("dev/results/gpu.csv"))))
        self.assertLessEqual(len(rows), 400)
        self.assertEqual(len({(r["gpu"], r["commit"], r["what"], r["unit"]) for r in rows}), len(rows))


@unittest.skipUnless(HAS_TRAINER, "needs train_gpt2, which make builds")
class GpuStudy(Folder):
    """the whole study with a tiny model, whose trainer is the CPU's"""
    def setUp(self):
        super().setUp()
        tools = os.path.dirname(self.executable("bin/nvidia-smi", "#!/bin/sh\necho Test GPU\n"))
        self.start(mock.patch.object(gpu_study, "WORK", self.path("study")))
        self.start(mock.patch.dict(os.environ, PATH=tools + ":" + os.environ["PATH"], COMMIT="0123456789"))
        self.addCleanup(os.chdir, os.getcwd())
        text = read("data/shakespeare_val.txt").encode()
        for k in range(3):
            part = text[7000 * k:7000 * k + 7000]
            header = struct.pack("<256i", 20240520, 1, len(part), 256, 10, *[0] * 251)
            self.write(f"text_{k}.bin", header + struct.pack(f"<{len(part)}H", *part))

    def study(self, *words):
        code, out, err = called(gpu_study.main, "--T", "32", "--eval_tokens", "6000", *words)
        return code, out + err

    def test_from_shards_to_results(self):
        self.assertIn("expected train_*.bin.xz", self.study()[1])
        code, said = self.study("--pack", self.path("text_[12].bin"), "--val_files", self.path("text_0.bin"),
                                "--tokens", "8001")
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r"train_1.bin.xz: 4,001 tokens, .*\n.*train_2.bin.xz: 4,000 .*\n.*val.bin.xz: 6,000")
        small = ("--trainer", TRAINER, "--model", "1,1,16", "--B", "4", "--encodings", "cable", "--results",
                 self.path("gpu.csv"))
        code, said = self.study(*small, "--minutes", "0")
        self.assertEqual((code, "unfinished: study 1,1,16, 8,001 tokens" in said), (3, True), said)
        code, said = self.study(*small)
        self.assertEqual(code, 0, said)
        tokens = lambda name: b"".join(read_bytes(self.path(name.format(k)))[1024:] for k in (1, 2))
        self.assertEqual(tokens("study/train_{}.bin"), tokens("text_{}.bin")[:2 * 8001])
        rows = {(r["what"].rpartition(", ")[2], r["unit"]): float(r["value"]) for r in self.table("gpu.csv")}
        self.assertTrue(100 < rows["perplexity", "at 32"] < 256 and 100 < rows["perplexity", "at 4096"] < 256, rows)
        self.assertEqual(sum(unit.startswith("% passkey at ") for _, unit in rows), 5)
        self.assertNotIn("perplexity", self.study(*small)[1])         # a second run repeats nothing

    def test_text_to_pack_without_text_for_evaluation(self):
        for flag in "--pack", "--val_files":
            code, said = self.study(flag, self.path("text_0.bin"))
            self.assertEqual((code, "expected --pack and --val_files together" in said), (2, True), said)

    def test_shards_that_do_not_fit_together(self):
        with open(self.path("text_1.bin"), "r+b") as f:
            f.write(struct.pack("<4i", 20240520, 1, 7000, 50257))
        code, said = self.study("--pack", self.path("text_*.bin"), "--val_files", self.path("text_0.bin"))
        self.assertEqual(code, 2)
        self.assertIn("text_1.bin: expected a shard of uint16 tokens, and all of one vocabulary", said)


if __name__ == "__main__":
    unittest.main()
