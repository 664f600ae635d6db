"""test_lint.py -- dev/lint.py finds each kind of breach, planted in a copy of the sources."""
import os
import shutil
import sys
import unittest

from folder import ROOT, Folder, ended

sys.path.insert(0, os.path.join(ROOT, "dev"))
import lint  # noqa: E402

# (file, text to plant at its end, what lint must say of that file)
PLANTS = [
    ("llmc/base/common.h", '#include "../gelu.cuh"\n', "llmc/base may not include llmc/gelu.cuh"),
    ("train_gpt2.cu", '#include "test/catch.h"\n', "outside llmc/"),
    ("llmc/stray/stray.h", "\n", "has no floor"),
    ("llmc/base/tensor.h", "#ifdef __CUDACC__\n#endif\n", "__CUDACC__"),
    ("llmc/matmul.cuh", "inline void f() { gelu_kernel<<<1, 2>>>(); }\n", "only launch() starts kernels"),
    ("llmc/engine/schedule.h", "inline void f(int x) { assert(x > 0); }\n", "assert()"),
    ("llmc/engine/flags.h", "using namespace std;\n", "using namespace"),
    ("llmc/matmul.cuh", "__device__ void f(float* x) { atomicAdd(x, 1.0f); }\n", "atomics"),
    ("llmc/attention.cuh", "__device__ float f(float x) { return logf(x); }\n", "logf()"),      # only one is allowed
    ("llmc/base/math.h", "inline float f(float x) { return std::exp(x); }\n", "exp()"),
    ("scripts/plot.py", "# " + "x" * 120 + "\n", "122 columns"),
    ("docs/tour.md", "x" * 121 + "\n", "121 columns"),
    ("train_gpt2.cu", "\n" * 600, "600 are the limit"),
    ("llmc/classifier.cuh", "\n" * 900, "950 are the limit"),
    ("llmc/adamw.cuh", "inline int f(int a, int b) { return a > 0 ? b > 0 ? 1 : 2 : 3; }\n", "2 ternaries"),
    ("llmc/adamw.cuh", "__global__ void f_kernel(int n) {\n    const int a = n, b = 2 * n;\n}\n", "2 variables"),
    ("llmc/gelu.cuh", "inline void f(int n = {}) {\n" + "    int a;\n" * 60 + "}\n", "a function of 62 lines"),
    ("llmc/gelu.cuh", "// see llmc/nowhere.cuh\n", "llmc/nowhere.cuh is named"),
    ("docs/data.md", "[gelu](../llmc/nowhere.cuh)\n", "llmc/nowhere.cuh is named"),
    ("data/mldr.py", "def f():\n" + "    pass\n" * 60, "a function of 61 lines"),
    ("data/mldr.py", "x = 1 if f else 2 if g else 3\n", "2 conditional expressions"),
    ("data/text.py", "def f(:\n", "not Python"),
    ("scripts/new.sh", "#!/bin/sh\n", "a file is executable if it begins with #!"),
    ("scripts/study.py", "    print()\n", "a script ends with console.run(main)"),
    ("README.md", "| [gelu.cuh](llmc/gelu.cuh) | 7 | GELU |\n", "lines, not 7"),
    ("llmc/engine/json.h", "// TO" + "DO later\n", "left-over"),
    ("scripts/million.sh", "out=/t" + "mp/demo\n", "a path of one machine"),
    ("Makefile", "OPT += -Ofast\n", "-Ofast"),
    ("two words.txt", "x", "expected a plain name"),
]


class Lint(Folder):
    def test_each_planted_breach_is_seen(self):
        for name in lint.tracked_files(ROOT):
            if not name.startswith("test/fixtures/"):
                os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
                shutil.copy(os.path.join(ROOT, name), self.path(name))
        for name, text, _ in PLANTS:
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            with open(self.path(name), "a", encoding="utf-8") as f:
                f.write(text)
        code, said = ended(sys.executable, os.path.join(ROOT, "dev", "lint.py"), self.folder)
        self.assertEqual(code, 1)
        for path, _, rule in PLANTS:
            self.assertTrue(any(line.strip("'").startswith(path) and rule in line for line in said.split("\n")), rule)

    def test_a_first_line_of_two_subjects(self):
        for line, two in (("// a.h -- AdamW (Loshchilov and Hutter), the update\n// and more", False),
                          ("// a.h -- the lock and the log", True), ("// a.h -- the lock: who and when", False)):
            self.assertEqual(lint.two_subjects(line), two, line)


if __name__ == "__main__":
    unittest.main()
