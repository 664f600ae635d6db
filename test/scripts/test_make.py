#!/usr/bin/env python3
"""test_make.py -- the Makefile, dev/test.py, .ci/run: wrong knobs, counts, time."""
import glob
import os
import re
import shutil
import sys
import unittest
import unittest.mock

from folder import ROOT, Folder, ended, read

sys.path.insert(0, os.path.join(ROOT, "dev"))
import test as runner       # noqa: E402, dev/test.py


def environment():
    """without what the make that started this test handed down"""
    kept = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "NVCC", "JOBS")}
    return {**kept, "CCACHE_DISABLE": "1"}


def make(*words, root=ROOT):
    return ended("make", *words, cwd=root, env=environment())


class Knobs(Folder):
    def setUp(self):
        """a copy of the Makefile and of the scripts that it calls, so that this directory's build is not changed"""
        super().setUp()
        shutil.copy(os.path.join(ROOT, "Makefile"), self.folder)
        shutil.copytree(os.path.join(ROOT, "dev"), self.path("dev"),
                        ignore=shutil.ignore_patterns("results", "hf", "__pycache__"))
        for name in ("train_gpt2.cu", "train_bert.cu", "test/main.cu", "test/oracle_positions.cu",
                     "test/layers/test_x.cu", "test/simt/shared_flash.cu",
                     *glob.glob("llmc/compiled/*.cu", root_dir=ROOT)):
            self.write(name, "")

    def refused(self, text, *words):
        code, output = make("-n", "train_gpt2", *words, root=self.folder)
        self.assertNotEqual(code, 0, output)
        self.assertIn(text, output)

    def commands(self, *words):
        code, output = make("-n", *words, root=self.folder)
        self.assertEqual(code, 0, output)
        return output.replace("\\\n", " ")

    def test_a_wrong_value_is_refused(self):
        self.refused("PRECISION=FP16: expected BF16 or FP32", "PRECISION=FP16")
        for knob in ("FEW_POSITIONS", "MPI", "NCCL", "NO_OMP"):
            self.refused(f"{knob}=maybe: expected 0 or 1", f"{knob}=maybe")
        path = self.shell("with space/g++", "")
        self.refused(f"CXX={path}: make cuts a path at its spaces; name a link to it without any", "CXX=" + path)

    def test_help_fits_a_terminal(self):
        code, output = make("help")
        self.assertEqual((code, [line for line in output.splitlines() if len(line) > 80]), (0, []))
        self.assertIn("before ours if the environment exports them", output)            # the last of the knobs

    def test_a_toolkit_older_than_the_gpu_builds_ptx(self):
        self.shell("bin/nvidia-smi", "echo 12.1")
        nvcc = self.shell("bin/nvcc", "case \"$*\" in *-arch=sm_121a*)"
                          " echo \"nvcc fatal   : Unsupported gpu architecture 'sm_121a'\" >&2; exit 1;; esac")
        newer = self.shell("newer/nvcc", "")
        path = self.path("bin") + ":" + os.environ["PATH"]
        for nvcc, arch, said in ((nvcc, "compute_80", True), (newer, "sm_121a", False)):
            code, output = ended("make", "-n", "train_gpt2cu", "NVCC=" + nvcc, cwd=self.folder,
                                 env={**environment(), "PATH": path})
            self.assertEqual(code, 0, output)
            self.assertIn(f"-gencode arch={arch.replace('sm', 'compute')},code={arch} ", output)
            self.assertEqual("older than this GPU and has no sm_121a" in output, said, output)

    def test_nccl_is_found(self):
        nvcc = self.shell("bin/nvcc", "")
        for version in 21700, 21600:
            self.write("nccl/include/nccl.h", f"#define NCCL_VERSION_CODE {version}\n"
                       'extern "C" int ncclGetVersion(int* v);\n')
            self.write("nccl.cpp", '#include "nccl/include/nccl.h"\nint ncclGetVersion(int* v) { return *v = 0; }\n')
            os.makedirs(self.path("nccl/lib"), exist_ok=True)
            code, output = ended("g++", "-shared", "-fPIC", self.path("nccl.cpp"), "-o",
                                 self.path("nccl/lib/libnccl.so"))
            self.assertEqual(code, 0, output)
            code, output = make("-n", "train_gpt2cu", "NVCC=" + nvcc, "NCCL_DIR=" + self.path("nccl"), root=self.folder)
            found = f"-DUSE_NCCL -I{self.path('bin').removesuffix('bin')}include -I{self.path('nccl/include')}"
            self.assertEqual(found in output, version == 21700, output)
            shutil.rmtree(self.path("build"), ignore_errors=True)

    def test_each_knob_reaches_the_compiler(self):
        cuda = ("train_gpt2cu", "NVCC=/opt/nvcc")
        for words, present, absent in (
                (["train_gpt2"], "", "-DFEW_POSITIONS"), (["train_gpt2", "FEW_POSITIONS=1"], "-DFEW_POSITIONS", "?"),
                (["train_gpt2", "FEW_POSITIONS=0"], "", "-DFEW_POSITIONS"), (["train_gpt2", "MPI=0"], "", "USE_MPI"),
                (["train_gpt2", "NO_OMP=1"], "", "-fopenmp"), (["train_gpt2"], "", "-DPRECISION_BF16"),
                (["train_gpt2", "PRECISION=FP32"], "", "-DPRECISION_BF16"),
                (["train_gpt2", "PRECISION=BF16"], "-DPRECISION_BF16", "?"),
                (["build/bf16/train_gpt2", "PRECISION=BF16"], "-DPRECISION_BF16", "?"),
                ([*cuda, "ARCH=sm_80", "PRECISION=FP32"], "-gencode arch=compute_80,code=sm_80 -DPRECISION_FP32", "?"),
                (["torch", "NVCC=/opt/nvcc"], "-o build/libcablecu.so", "libcablecu_fp32"),
                (["build/libcablecu_fp32.so", "NVCC="], "no nvcc found", "?"),
                ([*cuda, "PRECISION=BF16"], "/opt/nvcc -std=c++17", "-DPRECISION"),
                *(([target, "CPPFLAGS=-Wsomething"], "-Wsomething", "?") for target in
                  ("build/test/layers/test_x", "build/asan/layers/test_x", "build/simt/train_gpt2"))):
            with self.subTest(words=words):
                output = self.commands(*words)
                self.assertEqual((present in output, absent in output), (True, False), output)

    def test_the_library_of_the_cpu_comes_first_and_infos_of_ptxas_are_left_out(self):
        info = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 7 by compiler"
        for code in (0, 3):
            nvcc = self.shell("nvcc", f'echo "{info}" >&2; echo "a warning" >&2; exit {code}')
            output = self.commands("torch", "NVCC=" + nvcc)
            self.assertLess(output.index("-o build/libcable.so"), output.index("-o build/libcablecu.so"))
            self.write("dev/torch/library.cu", "")
            found, output = make("build/libcablecu.so", "NVCC=" + nvcc, root=self.folder)
            self.assertEqual((found != 0, "a warning" in output, info in output), (code != 0, True, code != 0), output)

    def test_flags_of_the_environment_come_before_ours_and_typed_ones_after(self):
        conda = {"CXXFLAGS": "-march=nocona -mtune=haswell -O2 -pipe", "CPPFLAGS": "-DNDEBUG -O2", "NVCCFLAGS": "-O1"}
        compiling = lambda output: re.search(r".*(?:-x c\+\+|--threads).*", output)[0]
        last = lambda output, flag: re.findall(rf" -{flag}(\S*)", compiling(output))[-1]
        with unittest.mock.patch.dict(os.environ, conda):
            for target, level in (("train_gpt2", "3"), ("build/asan/rows.o", "1"), ("build/simt/train_gpt2", "1")):
                output = self.commands(target)
                self.assertEqual(last(output, "O"), level, output)
                self.assertIn("-DNDEBUG", output)
            output = self.commands("train_gpt2")
            self.assertEqual(last(output, "march="), "native", output)
            self.assertIn("-pipe", output)
            self.assertEqual(last(self.commands("train_gpt2cu", "NVCC=/opt/nvcc"), "O"), "1")
            output = self.commands("train_gpt2", "CXXFLAGS=-O0 -march=x86-64")
            self.assertEqual((last(output, "O"), last(output, "march=")), ("0", "x86-64"))
            self.assertNotIn("nocona", output)

    def test_flags_of_the_environment_that_change_results_are_refused(self):
        for name, flags, bad in (("CXXFLAGS", "-O2 -ffast-math", "-ffast-math"), ("CPPFLAGS", "-Ofast", "-Ofast"),
                                 ("CXXFLAGS", "-funsafe-math-optimizations -g", "-funsafe-math-optimizations"),
                                 ("CXXFLAGS", "-ffp-contract=fast", "-ffp-contract=fast"),
                                 ("LDFLAGS", "-Wl,-z,now -ffast-math", "-ffast-math"),
                                 ("NVCCFLAGS", "-Xcompiler=-O3,-fassociative-math", "-fassociative-math"),
                                 ("NVCC_APPEND_FLAGS", "-use_fast_math", "-use_fast_math"),
                                 ("CXX", "g++ -Ofast", "-Ofast")):
            with self.subTest(flags), unittest.mock.patch.dict(os.environ, {name: flags}):
                self.refused(f"{name} of the environment has {bad}, which changes the results")
                self.commands("train_gpt2", f"{name}={'g++' if name == 'CXX' else '-DX'}")
        with unittest.mock.patch.dict(os.environ, CXXFLAGS="-fno-fast-math -ffp-contract=off"):
            self.commands("train_gpt2")
        self.assertIn("-ffast-math", self.commands("train_gpt2", "CXXFLAGS=-ffast-math"))

    def test_a_change_of_flags_builds_anew_and_nothing_else_does(self):
        # writes what it is asked to write
        compiler = self.shell("compiler", 'while [ $# -gt 0 ]; do [ "$1" != -o ] || touch "$2"; shift; done\n')
        words = ["build/test/layers/test_x", "CXX=" + compiler, "MPI=0"]
        self.assertEqual(make(*words, root=self.folder)[0], 0)
        self.assertIn("is up to date", make(*words, root=self.folder)[1])
        self.assertIn("-c test/layers/test_x.cu", make(*words, "CXXFLAGS=-DX", root=self.folder)[1])
        self.assertIn("is up to date", make(*words, "CXXFLAGS=-DX", root=self.folder)[1])

    def test_an_edit_of_a_row_kernel_leaves_the_cuda_trainer_as_it_is(self):
        """by a compiler that writes dependencies, as nvcc does, and nothing else"""
        shutil.copytree(os.path.join(ROOT, "llmc"), self.path("llmc"), dirs_exist_ok=True)
        shutil.copy(os.path.join(ROOT, "train_gpt2.cu"), self.folder)
        nvcc = self.shell("nvcc", r"""while [ $# -gt 0 ]; do case $1 in
    -o) out=$2;; -MF) file=$2;;
    *.cu) read="$1 $(sed -n "s|^#include .\(.*[.]cuh\?\)\".*|$(dirname "$1")/\1|p" "$1" | tr '\n' ' ')";;
    esac; shift; done
touch "$out"
[ -z "$file" ] || echo "$out : $read" >"$file"
""")
        run = lambda: re.findall(r" -c \S+ -o build/cuda/(\w+)[.]o", make("train_gpt2cu", "MPI=0", "NVCC=" + nvcc,
                                                                      root=self.folder)[1])
        self.assertEqual(sorted(run()), ["product", "rows", "train_gpt2"])
        for edited, expected in (("layernorm", ["rows"]), ("matmul", ["product"]), ("attention", ["train_gpt2"])):
            for kernel in (True, False):
                with self.subTest(edited, kernel=kernel):
                    text = self.read(f"llmc/{edited}.cuh")
                    line = "// an edit\n"
                    guard = re.search(r"^#if !defined\([A-Z]*_ELSEWHERE\)\n", text, re.M)[0]
                    self.write(f"llmc/{edited}.cuh", text.replace(guard, guard + line if kernel else line + guard, 1))
                    self.assertEqual(sorted(run()), expected if kernel else sorted({*expected, "train_gpt2"}))


class Objects(unittest.TestCase):
    def test_kernels_are_compiled_as_kernels(self):
        """whatever runs for each token is in an object at -O3, not in a trainer's own at -O1, nor in a test's"""
        for name, own in (("train_gpt2", {"replica_hash_kernel"}), ("train_bert", {"replica_hash_kernel"}),
                          ("test/layers/test_attention", {"poison_shared_kernel"})):    # the first: with a checkpoint
            code, symbols = ended("nm", "-C", "--defined-only", os.path.join(ROOT, "build", name + ".o"))
            if code != 0:
                self.skipTest(f"SKIPPED: build/{name}.o is not built: make test builds all")
            found = set(re.findall(r"\b\w+_kernel(?=[<(])", symbols)) - {"launch_kernel", "start_kernel"}
            self.assertEqual(found, own, name)

    def test_attention_is_compiled_once(self):
        """an edit of an encoding compiles no attention, and an edit of attention no encoding"""
        for name, header in (("causal", "attention"), ("bidirectional", "attention"), ("encodings", "cable")):
            path = os.path.join(ROOT, "build", name)
            code, symbols = ended("nm", "-C", "--defined-only", path + ".o")
            if code != 0:
                self.skipTest("SKIPPED: the trainers are not built: make test builds all")
            included = set(re.findall(r"/(attention|cable)\.cuh", read(path + ".d")))
            self.assertEqual(included, {header}, name)
            functors = set(re.findall(r"\b\w*Bias(?=[>,&])", symbols))
            self.assertEqual("AnyBias" in functors and len(functors) == 1, name != "encodings", (name, functors))


class Install(Folder):
    def test_a_header_where_the_flags_of_the_environment_lead(self):
        """as in an environment of conda"""
        flags = {"CPPFLAGS": "-isystem /conda/include", "CXXFLAGS": "-O2 -pipe"}
        compiler = self.shell("compiler", 'cat >/dev/null; case "$*" in\n'
                                          '*"-isystem /conda/include -O2 -pipe"*) ;;\n*) exit 1;;\nesac\n')
        for more, expected in (({}, 1), (flags, 0)):
            env = {**environment(), "CXX": compiler, **more}
            self.assertEqual(ended("dev/install.sh", "--check", "build", cwd=ROOT, env=env)[0], expected)

    def test_the_ladders_need_a_compiler_and_one_header(self):
        compiler = self.shell("compiler", 'case "$(cat)" in *xxhash*) ;; *) exit 1;; esac')
        for what, expected in (("ladders", 0), ("build", 1)):
            env = {**environment(), "CXX": compiler}
            self.assertEqual(ended("dev/install.sh", "--check", what, cwd=ROOT, env=env)[0], expected)
        self.assertIn("dev/install.sh ladders &&", make("-n", "ladders")[1])
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(ROOT)
        with unittest.mock.patch.dict(os.environ, NVCC=""):
            programs, also = runner.plan("ladders", [])
        self.assertEqual([name for name in programs if "matmul" in name], ["build/ladders/matmul"])
        self.assertEqual(also, [])


RULE = "-" * 79
CATCH = f"""{RULE}
a name
{RULE}
test/files.h:78
...............

test/files.h:78: warning:
  SKIPPED: there is no directory of
  real data

{RULE}
another
{RULE}
test/x.cu:1
...............

test/x.cu:2: FAILED:
  CHECK( 1 == 2 )

===============================================================================
"""


class Counts(Folder):
    def test_catch(self):
        counts = runner.read_catch(CATCH + "test cases:  5 |  4 passed | 1 failed\n", 1)
        self.assertEqual((counts.passed, counts.failed), (3, 1))
        self.assertEqual(counts.skipped, ["there is no directory of real data"])
        self.assertEqual(runner.read_catch("All tests passed (9 assertions in 3 test cases)\n", 0)[:2], (3, 0))
        self.assertEqual(runner.read_catch("All tests passed (1 assertion in 1 test case)\n", 0)[:2], (1, 0))
        self.assertIsNone(runner.read_catch("No test cases matched '[x]'\n", 0))

    def test_kernel_tests(self):
        counts = runner.read_kernel_tests("a b        ok       12.0 ms  error 3\nc    skipped   0.0 ms  needs a GPU\n"
                                          "    place: x is false\nd      FAILED    1.0 ms  \n", 1)
        self.assertEqual(counts, runner.Result(1, 1, ["needs a GPU"]))

    def test_unittest(self):
        counts = runner.read_unittest("test_a (x) ... ok\ntest_b (x) ... skipped 'SKIPPED: no mpirun'\n"
                                      "test_c (x) ... skipped \"there isn't one\"\n\nRan 5 tests in 0.1s\n\n"
                                      "FAILED (failures=1, errors=1, skipped=2)\n", 1)
        self.assertEqual(counts, runner.Result(1, 2, ["no mpirun", "there isn't one"]))

    def test_a_program_that_dies_has_failed(self):
        program = self.shell("dies", "echo 'All tests passed (9 assertions in 3 test cases)'\nkill -9 $$\n")
        _, result, *_, text = runner.run(program, [])
        self.assertEqual(result.failed, 1)
        self.assertIn("exit code", text)


class Background(Folder):
    def test_a_test_gets_the_signals_that_it_sends(self):
        """a shell has a job in the background of a script ignore SIGINT, and what it starts inherits that"""
        program = self.shell("program", "kill -INT $$\n")
        for first, module in (("0", "scripts/folder"), ("0", "ranks/test_ranks"), ("module.main()", "../dev/test")):
            folder, name = os.path.split(os.path.join(ROOT, "test", module))
            script = (f"import subprocess, sys; sys.path.insert(0, {folder!r}); import {name} as module; "
                      f"module.plan = lambda *_: ([], []); {first}; print(subprocess.call({program!r}))")
            code, output = ended("bash", "-c", '"$@" & wait $!', "", sys.executable, "-c", script, "test")
            self.assertEqual((code, output.split()[-1]), (0, "-2"), (module, output))


class Plan(unittest.TestCase):
    def test_every_file_of_tests_is_compiled_once(self):
        """also those that are joined: test_gpt2.cu and test_gpt2_*.cu"""
        before = os.getcwd()
        os.chdir(ROOT)
        self.addCleanup(os.chdir, before)
        programs = [p for kind in ("test", "test-long") for p in runner.plan(kind, [])[0] if not p.endswith(".py")]
        commands = make("-n", "-B", *programs)[1]
        for path in glob.glob("test/*/test_*.cu"):
            self.assertEqual(len(re.findall(rf"-(?:c|include) {path} ", commands)), 1, path)
        self.assertIn("build/test/layers/test_attention", runner.plan("test", ["[decode]"])[0])     # its part _long
        for tag in re.findall(r"`(\[(?:P\d+|args|guard|log)\])`", read("docs/checkpoints.md")):      # of promises
            self.assertTrue(runner.plan("test", [tag])[0], tag)


class Ci(unittest.TestCase):
    def run_ci(self, *words, **limits):
        code, output = ended(os.path.join(ROOT, ".ci/run"), *words, env={**environment(), **limits})
        return code, output.split("\n")

    def test_what_is_left_out_for_want_of_time_is_listed_and_is_not_a_failure(self):
        code, lines = self.run_ci("--only", "lint", "nvcc", LAST_START="0")
        self.assertEqual(code, 0, lines)
        self.assertEqual([line for line in lines if line.startswith(("skipped ", "0 passed"))],
                         ["skipped for time: lint", "skipped for time: nvcc", "0 passed, 0 failed, 0 skipped"])

    def test_an_unknown_stage_is_an_error(self):
        code, lines = self.run_ci("--only", "lnit")
        self.assertEqual(code, 1, lines)
        self.assertIn("lnit: expected a stage, one of install lint ", "\n".join(lines))


if __name__ == "__main__":
    unittest.main()
