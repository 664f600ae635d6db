"""test_lint.py -- dev/lint.py sees each kind of breach, planted in a copy of the sources."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")

# file, text to plant at its end, what the lint must say, in a line that begins with the file
PLANTS = [
    ("llmc/common.h", '#include "device.h"\n', "floor 0 may not include device.h of floor 1"),
    ("llmc/schedule.h", '#include "json.h"\n', "floor 1 may not include json.h of floor 1"),
    ("llmc/position/rope.cuh", '#include "alibi.cuh"\n', "floor 2 may not include position/alibi.cuh"),
    ("llmc/matmul.cuh", '#include "attention.cuh"\n', "floor 2 may not include attention.cuh of floor 3"),
    ("llmc/adamw.cuh", '  #  include   "generate.h"\n', "floor 3 may not include generate.h"),
    ("llmc/gelu.cuh", '#include "llmc/device.h"\n', "is not beside this file"),
    ("llmc/json.h", '#include "../test/catch.h"\n', "outside llmc/"),
    ("train_gpt2.cu", '#include "test/catch.h"\n', "outside llmc/"),
    ("llmc/stray.h", "\n", "has no floor"),
    ("llmc/rand.h", "#ifdef __CUDACC__\n#endif\n", "__CUDACC__"),
    ("train_gpt2.cu", "#if defined(__CUDACC__)\n#endif\n", "__CUDACC__"),
    ("llmc/gelu.cuh", "inline void f() { gelu_kernel<<<1, 2>>>(); }\n", "started by launch() alone"),
    ("train_gpt2.cu", "void f() { gelu_kernel<<<1, 2>>>(); }\n", "started by launch() alone"),
    ("llmc/guard.h", "inline void f(int x) { assert(x > 0); }\n", "assert()"),
    ("llmc/log.h", "using namespace std;\n", "using namespace"),
    ("llmc/gelu.cuh", "__device__ void f(float* x) { atomicAdd(x, 1.0f); }\n", "atomics"),
    ("llmc/gelu.cuh", "__device__ float f(float x) { return expf(x); }\n", "expf()"),
    ("llmc/layernorm.cuh", "__device__ float f(float x) { return std::tanh(x); }\n", "tanh()"),
    ("llmc/attention.cuh", "__device__ float f(float x) { return logf(x); }\n", "logf()"),         # one is allowed, not two
    ("llmc/classifier.cuh", "__device__ float f(float x) { return x + powf(x, 2.0f); }\n", "powf()"),
    ("llmc/tensor.h", "// " + "x" * 160 + "\n", "163 columns"),
    ("train_gpt2.cu", "// " + "x" * 160 + "\n", "163 columns"),
    ("llmc/gelu.cuh", "\n" * 300, "300 are the limit"),
    ("llmc/device.h", "\n" * 350, "300 are the limit"),
    ("llmc/fastmath.h", "inline float f(float x) { return std::exp(x); }\n", "exp()"),
    ("train_gpt2.cu", "\n" * 700, "700 are the limit"),
    ("llmc/json.h", "// TO" + "DO later\n", "left-over"),
    ("scripts/demo.sh", "# FIX" + "ME\n", "left-over"),
    ("llmc/json.h", "// see /wo" + "rk/notes\n", "a path of one machine"),
    ("scripts/demo.sh", "out=/t" + "mp/demo\n", "a path of one machine"),
    ("test/files.h", "// /ro" + "ot/.cache\n", "a path of one machine"),
    ("Makefile", "OPT += -ffast-math\n", "-ffast-math"),
    ("Makefile", "OPT += -Ofast\n", "-Ofast"),
    ("scripts/demo.sh", "make CXXFLAGS=-Ofast\n", "-Ofast"),
]

# what must not be taken for a breach
HARMLESS = [
    ("llmc/gelu.cuh", "// __CUDACC__, <<<, assert(x), expf(x) in a comment\n/* atomicAdd(\n   tanhf( */\n"),
    ("llmc/json.h", 'inline const char* f() { return "__CUDACC__ <<< assert( atomicAdd("; }\n'),
    ("llmc/gelu.cuh", "inline float f(float x) { return fast_exp(x) + softplus(x); }\n"),
    ("llmc/json.h", "static_assert(true);\n"),
    ("llmc/json.h", '#include <vector>\n// #include "generate.h"\n'),
    ("test/files.h", 'inline const char* f() { return "/t' + 'mp"; }\n'),
    ("Makefile", "# never -Ofast\n"),
]


def lint(root):
    p = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "lint.py"), root], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                       universal_newlines=True)
    return p.returncode, p.stdout


class Lint(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        for name in os.listdir(ROOT):
            source, copy = os.path.join(ROOT, name), os.path.join(self.root, name)
            if name in ("llmc", "test", "scripts", "dev"):
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("fixtures", "__pycache__"))
            elif os.path.isfile(source) and name.endswith((".cu", "Makefile", ".md")):
                shutil.copy(source, copy)

    def append(self, path, text):
        path = os.path.join(self.root, path)
        size = os.path.getsize(path) if os.path.exists(path) else None
        with open(path, "a") as f:
            f.write(text)
        return size

    def restore(self, path, size):
        path = os.path.join(self.root, path)
        if size is None:
            os.remove(path)
        else:
            os.truncate(path, size)

    def test_the_sources_are_clean(self):
        code, text = lint(self.root)
        self.assertEqual(code, 0, text)
        self.assertIn(" 0 findings", text)

    def test_each_planted_breach_is_seen(self):
        before = lint(self.root)[1].split("\n")
        for path, plant, rule in PLANTS:
            with self.subTest(file=path, rule=rule):
                size = self.append(path, plant)
                code, text = lint(self.root)
                self.restore(path, size)
                self.assertEqual(code, 1, text)
                new = [line for line in text.split("\n") if line not in before and line.startswith(path + ":")]
                self.assertTrue(any(rule in line for line in new), "\n".join(new) or "nothing was found")

    def test_harmless_text_passes(self):
        before = lint(self.root)[1]
        for path, text in HARMLESS:
            with self.subTest(file=path, text=text):
                size = self.append(path, text)
                self.assertEqual(lint(self.root)[1], before)
                self.restore(path, size)

    def test_an_empty_tree_does_not_pass(self):
        with tempfile.TemporaryDirectory() as empty:
            self.assertEqual(lint(empty)[0], 1)


if __name__ == "__main__":
    unittest.main()
