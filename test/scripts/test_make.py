#!/usr/bin/env python3
"""test_make.py -- the Makefile, dev/install.sh, dev/test.py, .ci/run: wrong knobs, missing packages, counts, time."""
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import unittest
import unittest.mock

from folder import ROOT, Folder, ended

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
        for name in ("train_gpt2.cu", "train_bert.cu", "test/main.cu", "test/shared_kernels.h",
                     "test/layers/test_x.cu", "test/simt/shared_flash.cu"):
            self.write(name, "")

    def refused(self, text, *words):
        code, output = make("-n", "train_gpt2", *words, root=self.folder)
        self.assertNotEqual(code, 0, output)
        self.assertIn(text, output)

    def commands(self, *words):
        code, output = make("-n", *words, root=self.folder)
        self.assertEqual(code, 0, output)
        return output

    def test_a_wrong_value_is_refused(self):
        self.refused("PRECISION=FP16: expected BF16 or FP32", "PRECISION=FP16")
        for knob in ("FEW_POSITIONS", "MPI", "NCCL", "NO_OMP"):
            self.refused(f"{knob}=maybe: expected 0 or 1", f"{knob}=maybe")

    def test_a_compiler_or_directory_that_is_not_there_is_named(self):
        self.refused("CXX=no-such-compiler: there is no such compiler", "CXX=no-such-compiler")
        path = self.shell("with space/g++", "")
        self.refused(f"CXX={path}: make cuts a path at its spaces; name a link to it without any", "CXX=" + path)
        self.refused("OPENMPI_DIR=/nowhere: no program builds with include/mpi.h", "OPENMPI_DIR=/nowhere")

    def test_how_mpi_itself_was_compiled_is_left_out(self):
        """MPICH's mpicc names -flto=auto, which nvcc refuses"""
        mpicc = self.shell("mpi/bin/mpicc", "echo cc -flto=auto -ffat-lto-objects -g -O2 -Wl,-z,relro -Impi/include "
                                            "-Lmpi/lib -lmpich\n")
        compiler = self.shell("compiler", "true\n")
        with unittest.mock.patch.dict(os.environ, PATH=os.path.dirname(mpicc) + ":" + os.environ["PATH"]):
            output = self.commands("train_gpt2", "CXX=" + compiler)
        link = next(line for line in output.split("\n") if "-o train_gpt2" in line)
        self.assertIn("-Wl,-z,relro -Lmpi/lib -lmpich", link)
        self.assertNotRegex(output, "lto|-Impi/include.* -O2")

    def test_an_nccl_without_a_link_to_its_newest_version(self):
        """as PyPI has it: only libnccl.so.2"""
        compiler = self.shell("compiler", 'case "$*" in *-lnccl*) exit 1;; esac\n')
        self.shell("cuda/bin/nvcc", "true\n")
        output = self.commands("train_gpt2cu", "CXX=" + compiler, "NVCC=cuda/bin/nvcc", "NCCL_DIR=/pip")
        self.assertIn("-L/pip/lib -Xlinker -rpath=/pip/lib -l:libnccl.so.2", output)
        self.assertIn("-DUSE_NCCL -Icuda/include -I/pip/include", output.replace(self.folder + "/", ""))
        output = self.commands("train_gpt2cu", "CXX=" + compiler, "NVCC=cuda/bin/nvcc", "NCCL_DIR=/pip", "MPI=0")
        self.assertIn("-DUSE_NCCL", output)
        self.assertNotIn("-DUSE_MPI", output)

    def test_each_knob_reaches_the_compiler(self):
        self.assertNotIn("-DFEW_POSITIONS", self.commands("train_gpt2"))
        self.assertIn("-DFEW_POSITIONS", self.commands("train_gpt2", "FEW_POSITIONS=1"))
        self.assertNotIn("-DFEW_POSITIONS", self.commands("train_gpt2", "FEW_POSITIONS=0"))
        plain = self.commands("train_gpt2", "MPI=0", "NO_OMP=1")
        for word in ("USE_MPI", "-fopenmp"):
            self.assertNotIn(word, plain)
        cuda = self.commands("train_gpt2cu", "NVCC=/opt/nvcc", "ARCH=sm_80", "PRECISION=FP32")
        self.assertIn("/opt/nvcc -std=c++17", cuda)
        self.assertIn("-arch=sm_80 -DPRECISION_FP32", cuda)
        for precision in ([], ["PRECISION=FP32"]):
            self.assertNotIn("-DPRECISION_BF16", self.commands("train_gpt2", *precision))
        for target in ("train_gpt2", "build/bf16/train_gpt2"):
            self.assertIn("-DPRECISION_BF16", self.commands(target, "PRECISION=BF16"))
        self.assertNotIn("-DPRECISION", self.commands("train_gpt2cu", "NVCC=/opt/nvcc", "PRECISION=BF16"))
        for target in ("build/test/layers/test_x", "build/race/layers/test_x", "build/simt/train_gpt2"):
            self.assertIn("-Wsomething", self.commands(target, "CPPFLAGS=-Wsomething"))

    def test_flags_of_the_environment_come_before_ours_and_typed_ones_after(self):
        conda = {"CXXFLAGS": "-march=nocona -mtune=haswell -O2 -pipe", "CPPFLAGS": "-DNDEBUG -O2", "NVCCFLAGS": "-O1"}
        compiling = lambda output: re.search(r".*(?:-x c\+\+|--threads).*", output)[0]
        last = lambda output, flag: re.findall(rf" -{flag}(\S*)", compiling(output))[-1]
        with unittest.mock.patch.dict(os.environ, conda):
            for target, level in (("train_gpt2", "3"), ("build/race/layers/test_x", "1"),
                                  ("build/asan/layers/test_x", "1"), ("build/simt/train_gpt2", "1")):
                output = self.commands(target)
                self.assertEqual(last(output, "O"), level, output)
                self.assertIn("-DNDEBUG", output)
            output = self.commands("train_gpt2")
            self.assertEqual(last(output, "march="), "native", output)
            self.assertIn("-pipe", output)
            self.assertEqual(last(self.commands("train_gpt2cu", "NVCC=/opt/nvcc"), "O"), "3")
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

    def test_targets_that_compile_nothing_ask_nothing(self):
        for target in ("help", "clean", "lint"):
            make("-n", target, root=self.folder)
            self.assertFalse(os.path.exists(self.path("build")), target)

    def test_help_names_every_target_and_knob(self):
        code, output = make("help")
        self.assertEqual(code, 0)
        for word in ("make test ", "make ladders ", "make edit-loop ", "make clean ", "FEW_POSITIONS=1", "ARGS="):
            self.assertIn(word, output)


class Install(Folder):
    def check(self, what, hidden):
        """dev/install.sh --check with a compiler that finds none of these headers"""
        compiler = self.shell("compiler", f'input=$(cat)\ncase $input in *{hidden}*) exit 1 ;; esac\n'
                                          'printf "%s\\n" "$input" | g++ "$@"\n')
        return ended("dev/install.sh", "--check", what, cwd=ROOT, env={**environment(), "CXX": compiler})

    def test_a_missing_header_is_an_error_that_names_its_package(self):
        for what, header, package in (("build", "nlohmann/json.hpp", "nlohmann-json3-dev"),
                                      ("build", "xxhash.h", "libxxhash-dev"), ("unit", "catch2", "catch2")):
            code, output = self.check(what, header)
            self.assertEqual(code, 1, output)
            self.assertIn("missing:", output)
            self.assertIn(f"sudo apt-get install {package} ", output)

    def test_a_header_where_the_flags_of_the_environment_lead(self):
        """as in an environment of conda"""
        flags = {"CPPFLAGS": "-isystem /conda/include", "CXXFLAGS": "-O2 -pipe"}
        compiler = self.shell("compiler", 'case "$*" in *"-isystem /conda/include -O2 -pipe"*) ;; *) exit 1;; esac\n')
        for more, expected in (({}, 1), (flags, 0)):
            env = {**environment(), "CXX": compiler, **more}
            self.assertEqual(ended("dev/install.sh", "--check", "build", cwd=ROOT, env=env)[0], expected)

    def test_an_unknown_word_prints_the_usage(self):
        code, output = ended(os.path.join(ROOT, "dev/install.sh"), "everything")
        self.assertEqual(code, 2)
        self.assertIn("dev/install.sh WHAT", output)


RULE = "-" * 79
CATCH = f"""~~~~~
run_tests is a Catch v2.13.10 host application.

{RULE}
a name
{RULE}
test/files.h:78
...............

test/files.h:78: warning:
  SKIPPED: there is no directory of
  real data

test/files.h:79: warning:
  SKIPPED: said twice in one test

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

    def test_words_are_those_of_tags_or_names(self):
        for program, words in (("simt/test_x", ["words"]), ("simt_asan/test_x", []), ("asan/test_x", ["words"])):
            command = runner.command_of(f"build/{program}", ["words"])[0]
            self.assertEqual([w for w in command if w == "words"], words, program)

    def test_unittest(self):
        counts = runner.read_unittest("test_a (x) ... ok\ntest_b (x) ... skipped 'SKIPPED: no mpirun'\n"
                                      "test_c (x) ... skipped \"there isn't one\"\n\nRan 5 tests in 0.1s\n\n"
                                      "FAILED (failures=1, errors=1, skipped=2)\n", 1)
        self.assertEqual(counts, runner.Result(1, 2, ["no mpirun", "there isn't one"]))

    def test_a_program_that_dies_has_failed(self):
        program = self.shell("dies", "echo 'All tests passed (9 assertions in 3 test cases)'\nkill -9 $$\n")
        _, result, _, text = runner.run(program, [])
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
        programs = [p for p in runner.plan("test", [])[0] if not p.endswith(".py")]
        commands = make("-n", "-B", *programs)[1]
        for path in glob.glob("test/*/test_*.cu"):
            self.assertEqual(len(re.findall(rf"-(?:c|include) {path} ", commands)), 1, path)
        self.assertIn("build/test/layers/test_attention", runner.plan("test", ["[decode]"])[0])     # its part _long


class ExportsEnvironment(Folder):
    """dev/hf/exports.sh: the Python environment of `make exports`"""
    SCRIPT = os.path.join(ROOT, "dev", "hf", "exports.sh")

    def setUp(self):
        super().setUp()
        self.cache = self.path("cable.c")

    def run_script(self, *words, **settings):
        """where no registry can be reached"""
        nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_FIND_LINKS": "",
                   "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": self.folder}
        return ended(self.SCRIPT, *words, env={**environment(), **nowhere, **settings})

    def test_without_a_network_it_is_skipped_and_nothing_is_left(self):
        code, output = self.run_script("--ci")
        self.assertEqual(code, 0, output)
        self.assertIn("SKIPPED: the libraries of dev/hf/requirements.txt could not be installed: ", output)
        self.assertTrue(output.endswith("0 passed, 0 failed, 1 skipped\n"), output)
        self.assertEqual(os.listdir(self.cache), [])
        self.assertNotEqual(self.run_script()[0], 0)

    def run_in_fake_environment(self, script, *words, install="exit 0\n"):
        """with these scripts as python and uv of the environment, and a make that has nothing to do"""
        with open(os.path.join(ROOT, "dev", "hf", "requirements.txt"), "rb") as f:
            text = f"Python {sys.version.split()[0]}\n".encode() + f.read()
        bin_of = os.path.join(self.cache, "exports-" + hashlib.sha256(text).hexdigest()[:16], "bin")
        self.shell(bin_of + "/python", script)
        self.shell(bin_of + "/uv", install)
        tools = os.path.dirname(self.shell("tools/make", ""))
        return self.run_script(*words, PATH=f"{tools}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}")

    def test_the_hash_of_the_requirements_names_the_environment(self):
        self.assertEqual(self.run_in_fake_environment("echo the one of the cache\nexit 7\n", "--ci"),
                         (7, "the one of the cache\n"))

    def test_every_part_runs_even_after_a_failure(self):
        """and a failure of one is a failure of the whole"""
        everything = ["test_exports.py"] * 2 + ["test_gpu_bench_pytorch.py", "test_tokenizer_export.py",
                                               "test_log_to_tensorboard.py"]
        for failing in (*everything[1:], "none"):
            script = f'echo "ran ${{1##*/}}"\ncase $1 in *{failing}) exit 3;; *test_*.py) exit 0;; esac\n'
            code, output = self.run_in_fake_environment(script)
            self.assertEqual((code, re.findall(r"^ran (test_\w+\.py)$", output, re.M)),
                             (int(failing != "none"), everything), output)

    def test_newer_releases_are_tested_too(self):
        """in a copy, which leaves the pinned ones as they are"""
        script, tests = 'echo "ran ${1##*/}"\n', r"^ran (test_exports.py)$"
        newer = """cd "${0%/*}"; rm python; echo '#!/bin/sh' >python; chmod +x python
                   echo 'echo "newer ${1##*/}"; case $1 in *.py) exit 3;; esac' >>python\n"""
        code, output = self.run_in_fake_environment(script, install=newer)
        self.assertEqual((code, re.findall(tests, output, re.M)), (1, ["test_exports.py"] * 2), output)
        self.assertTrue(output.endswith("newer -\nnewer test_log_to_tensorboard.py\nnewer test_exports.py\n"), output)
        code, output = self.run_in_fake_environment(script, install="echo no network; exit 1\n")
        self.assertEqual(code, 1)
        self.assertTrue(output.endswith("no network\nthe newest releases could not be installed\n"), output)
        self.assertEqual(sorted(name.partition("-")[0] for name in os.listdir(self.cache)), ["exports", "exports"])
        code, output = self.run_in_fake_environment(script, "--ci", install=newer)
        self.assertEqual((code, "newer" in output), (0, False), output)

    def test_one_class_runs_only_with_the_pinned_releases(self):
        code, output = self.run_in_fake_environment('echo "ran ${1##*/}"\nexit 0\n', "HF")
        self.assertEqual((code, re.findall(r"^ran (test_\w+\.py)$", output, re.M)), (0, ["test_exports.py"]), output)


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


class Configure(Folder):
    def test_eight_makes_at_a_time(self):
        """in a tree where nothing was built: each finds all flags, and none deletes another one's files"""
        shutil.copytree(ROOT + "/dev", self.path("dev"), ignore=shutil.ignore_patterns("results", "__pycache__"))
        shutil.copy(ROOT + "/Makefile", self.folder)
        self.write("test/a/test_a.cu", '#include "shared_kernels.h"\n')
        self.shell("compiler", "")
        command = ["make", "-q", "build/cpu.flags", "CXX=./compiler", "MPI=0", "NCCL=0", "NVCC="]
        for _ in range(10):
            shutil.rmtree(self.path("build"), ignore_errors=True)
            runs = [subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     universal_newlines=True) for _ in range(8)]
            said = [run.communicate()[0] for run in runs]
            self.assertEqual([(run.returncode, text) for run, text in zip(runs, said)], 8 * [(0, "")])
            files = [name for name in os.listdir(self.path("build")) if os.path.isfile(self.path("build", name))]
            names = ("commit", "cpu", "race", "asan", "simt", "mpi", "cuda", "precision")
            self.assertEqual(sorted(files), sorted(["config.mk", *(n + ".flags" for n in names)]))


if __name__ == "__main__":
    unittest.main()
