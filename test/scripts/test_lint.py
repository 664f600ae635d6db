"""test_lint.py -- dev/lint.py finds each kind of breach, planted in a copy of the sources."""
import os
import shutil
import sys
import tempfile
import unittest

from folder import ROOT, Folder, ended

# (file, text to plant at its end, what lint must say in a line that begins with the file)
PLANTS = [
    ("llmc/base/common.h", '#include "../gelu.cuh"\n', "llmc/base may not include llmc/gelu.cuh"),
    ("llmc/layernorm.cuh", '#include "position/alibi.cuh"\n', "llmc may not include llmc/position/alibi.cuh"),
    ("llmc/matmul.cuh", '#include "attention.cuh"\n', "llmc may not include llmc/attention.cuh"),
    ("llmc/position/rope.cuh", '#include "../attention.cuh"\n', "may not include llmc/attention.cuh"),
    ("llmc/attention.cuh", '#include "engine/model.cuh"\n', "may not include llmc/engine/model.cuh"),
    ("llmc/engine/ranks/comm.h", '#include "../model.cuh"\n', "may not include llmc/engine/model.cuh"),
    ("llmc/adamw.cuh", '  #  include   "lab/generate.h"\n', "may not include llmc/lab/generate.h"),
    ("llmc/gelu.cuh", '#include "llmc/base/device.h"\n', "includes are relative"),
    ("llmc/engine/json.h", '#include "../../test/catch.h"\n', "outside llmc/"),
    ("train_gpt2.cu", '#include "test/catch.h"\n', "outside llmc/"),
    ("llmc/stray/stray.h", "\n", "has no floor"),
    ("llmc/base/rand.h", "#ifdef __CUDACC__\n#endif\n", "__CUDACC__"),
    ("train_gpt2.cu", "#if defined(__CUDACC__)\n#endif\n", "__CUDACC__"),
    ("llmc/gelu.cuh", "inline void f() { gelu_kernel<<<1, 2>>>(); }\n", "only launch() starts kernels"),
    ("train_gpt2.cu", "void f() { gelu_kernel<<<1, 2>>>(); }\n", "only launch() starts kernels"),
    ("llmc/engine/run/guard.h", "inline void f(int x) { assert(x > 0); }\n", "assert()"),
    ("llmc/engine/run/log.h", "using namespace std;\n", "using namespace"),
    ("llmc/gelu.cuh", "__device__ void f(float* x) { atomicAdd(x, 1.0f); }\n", "atomics"),
    ("llmc/gelu.cuh", "__device__ float f(float x) { return expf(x); }\n", "expf()"),
    ("llmc/layernorm.cuh", "__device__ float f(float x) { return std::tanh(x); }\n", "tanh()"),
    ("llmc/attention.cuh", "__device__ float f(float x) { return logf(x); }\n", "logf()"),      # only one is allowed
    ("llmc/classifier.cuh", "__device__ float f(float x) { return x + powf(x, 2.0f); }\n", "powf()"),
    ("llmc/base/fastmath.h", "inline float f(float x) { return std::exp(x); }\n", "exp()"),
    ("llmc/base/tensor.h", "// " + "x" * 120 + "\n", "123 columns"),
    ("train_gpt2.cu", "// " + "x" * 120 + "\n", "123 columns"),
    ("test/files.h", "// " + "x" * 120 + "\n", "123 columns"),
    ("scripts/plot.py", "# " + "x" * 120 + "\n", "122 columns"),
    ("scripts/explorer.js", "// " + "x" * 120 + "\n", "123 columns"),
    ("scripts/run_gpt2_124M.sh", "# " + "x" * 120 + "\n", "122 columns"),
    ("docs/tour.md", "x" * 121 + "\n", "121 columns"),
    ("llmc/gelu.cuh", "\n" * 400, "400 are the limit"),
    ("train_gpt2.cu", "\n" * 600, "600 are the limit"),
    ("llmc/gelu.cuh", "inline int f(int a, int b) { return a > 0 ? b > 0 ? 1 : 2 : 3; }\n", "2 ternaries"),
    ("llmc/gelu.cuh", "__global__ void f_kernel(int n) {\n    const int a = n, b = 2 * n;\n}\n",
     "2 variables are initialised"),
    ("llmc/gelu.cuh", "inline void f() {\n    int a = 1, b = 2, c = 3;\n}\n", "3 variables are initialised"),
    ("llmc/gelu.cuh", "inline void f() {\n" + "    int a;\n" * 60 + "}\n", "a function of 62 lines"),
    ("llmc/gelu.cuh", "inline void f(int n = {}) {\n" + "    int a;\n" * 60 + "}\n", "a function of 62 lines"),
    ("llmc/gelu.cuh", "inline void f() {\n    // 1. a\n    // 2. b\n" + "    int a;\n" * 98 + "}\n",
     "a function of 102 lines"),
    ("llmc/gelu.cuh", "// see llmc/nowhere.cuh\n", "llmc/nowhere.cuh is named"),
    ("scripts/report.py", "def f():\n" + "    pass\n" * 60, "a function of 61 lines"),
    ("scripts/report.py", "x = 1 if f else 2 if g else 3\n", "2 conditional expressions"),
    ("scripts/report.py", "def f(:\n", "not Python"),
    ("scripts/new.sh", "#!/bin/sh\n", "a file is executable if it begins with #!"),
    ("scripts/study.py", "    print()\n", "a script ends with console.run(main)"),
    ("README.md", "See [the page](docs/nowhere.md).\n", "docs/nowhere.md is named"),
    ("README.md", "| [gelu.cuh](llmc/gelu.cuh) | 7 | GELU |\n", "lines, not 7"),
    ("README.md", "\n" * 160, "160 are the limit"),
    ("README.md", "| `gpt2_forward` and `gpt2_backward` in [x](train_gpt2.cu) | 55 + 7 | steps |\n", "lines, not 7"),
    ("dev/gpt2_cable.cpp", "\n" * 300, "700 are the limit"),
    ("llmc/engine/json.h", "// TO" + "DO later\n", "left-over"),
    ("scripts/run_gpt2_124M.sh", "# FIX" + "ME\n", "left-over"),
    ("llmc/engine/json.h", "// see /wo" + "rk/notes\n", "a path of one machine"),
    ("scripts/run_gpt2_124M.sh", "out=/t" + "mp/demo\n", "a path of one machine"),
    ("test/files.h", "// /ro" + "ot/.cache\n", "a path of one machine"),
    ("Makefile", "OPT += -ffast-math\n", "-ffast-math"),
    ("Makefile", "OPT += -Ofast\n", "-Ofast"),
    ("scripts/run_gpt2_124M.sh", "make CXXFLAGS=-Ofast\n", "-Ofast"),
]

# texts that are not breaches
HARMLESS = [
    ("llmc/gelu.cuh", "// __CUDACC__, <<<, assert(x), expf(x) in a comment\n/* atomicAdd(\n   tanhf( */\n"),
    ("llmc/engine/json.h", 'inline const char* f() { return "__CUDACC__ <<< assert( atomicAdd("; }\n'),
    ("llmc/gelu.cuh", "inline float f(float x) { return fast_exp(x) + softplus(x); }\n"),
    ("llmc/gelu.cuh", "inline void f() {\n    // 1. one\n" + "    int a;\n" * 60 + "    // 2. two\n}\n"),
    ("llmc/gelu.cuh", "#define TABLE(X) \\\n" + "    X(int, a, 1) \\\n" * 70 + "\nstruct S {\n    int x;\n};\n"),
    ("llmc/engine/json.h", "static_assert(true);\n"),
    ("dev/recipe.py", "def f():\n" + "    pass\n" * 59 + "x = 1 if f else 2\n"),
    ("llmc/engine/json.h", '#include <vector>\n// #include "generate.h"\n'),
    ("test/files.h", 'inline const char* f() { return "/t' + 'mp"; }\n'),
    ("Makefile", "# never -Ofast\n"),
]


def lint(root, *only):
    """(exit code, output) for a tree, or for some of its files"""
    return ended(sys.executable, os.path.join(ROOT, "dev", "lint.py"), root, *(["--only", *only] if only else []))


class Lint(Folder):
    def setUp(self):
        super().setUp()
        for name in os.listdir(ROOT):
            source, copy = os.path.join(ROOT, name), self.path(name)
            if name in ("llmc", "test", "scripts", "dev", "docs"):
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("fixtures", "__pycache__"))
            elif os.path.isfile(source) and name.endswith((".cu", "Makefile", ".md")):
                shutil.copy(source, copy)

    def append(self, path, text):
        path = self.path(path)
        size = os.path.getsize(path) if os.path.exists(path) else None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a") as f:
            f.write(text)
        return size

    def restore(self, path, size):
        path = self.path(path)
        if size is None:
            os.remove(path)
        else:
            os.truncate(path, size)

    def test_the_sources_are_clean(self):
        code, text = lint(self.folder)
        self.assertEqual(code, 0, text)
        self.assertIn(" 0 findings", text)

    def test_each_planted_breach_is_seen(self):
        for path, plant, rule in PLANTS:
            with self.subTest(file=path, rule=rule):
                before = lint(self.folder, path)[1].split("\n")
                size = self.append(path, plant)
                code, text = lint(self.folder, path)
                self.restore(path, size)
                self.assertEqual(code, 1, text)
                new = [line for line in text.split("\n") if line not in before and line.startswith(path + ":")]
                self.assertTrue(any(rule in line for line in new), "\n".join(new) or "nothing was found")

    def test_a_stray_file_is_seen(self):
        for path in ("notes.txt", "runs/log.jsonl", "\033[2Jx/data.bin", "data/two words.bin"):
            with self.subTest(file=path):
                self.append(path, "x")
                code, text = lint(self.folder)
                self.restore(path, None)
                self.assertEqual((code, text.count("expected a plain name")), (1, 1), text)

    def test_harmless_text_passes(self):
        for path, text in HARMLESS:
            with self.subTest(file=path, text=text):
                before = lint(self.folder, path)[1]
                size = self.append(path, text)
                self.assertEqual(lint(self.folder, path)[1], before)
                self.restore(path, size)

    def test_phrases_are_listed_and_are_not_findings(self):
        for path, plant, phrases in (("docs/new.md", "Two, of which one goes on.\nThere is no third.\n", 2),
                                     ("llmc/new.txt", "anew\n", 0), ("llmc/base/new.h", "int besides; // anew\n", 1)):
            self.append(path, plant)
            code, text = lint(self.folder, path, "--words")
            self.assertEqual((code, text.count(path + ":")), (0, phrases), text)
            self.assertIn(f" 0 findings; {phrases} phrases", text)

    def test_without_any_file_it_does_not_pass(self):
        with tempfile.TemporaryDirectory() as empty:
            self.assertEqual(lint(empty)[0], 1)
        self.assertEqual(lint(self.folder, "llmc/nowhere")[0], 1)

    def test_only(self):
        self.append("llmc/gelu.cuh", "\n" * 400)
        self.append("llmc/matmul.cuh", "\n" * 400)
        text = lint(self.folder, "llmc/gelu.cuh")[1]
        self.assertIn("llmc/gelu.cuh:401: ", text)
        self.assertNotIn("llmc/matmul.cuh", text)


if __name__ == "__main__":
    unittest.main()
