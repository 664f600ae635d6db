"""test_ptxas_budget.py -- dev/ptxas_budget.py on the output of nvcc 13.0, and on the same text with planted faults."""
import json
import os
import sys
import unittest

from folder import ROOT, Folder, ended, read

PROGRAM = os.path.join(ROOT, "dev", "ptxas_budget.py")
ATTENTION = "_Z26flash_backward_dkdv_kernelILb1EL9FlashBias2ELi64EEv9FlashArgsPK10FlashQuery"
KERPLE = "_Z22kerple_backward_kernelILb1EEvPfS0_PKfS2_S2_iiii"

LOG = f"""ptxas info    : 272 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function '{KERPLE}' for 'sm_80'
ptxas info    : Function properties for {KERPLE}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 408 bytes cmem[0]
ptxas info    : Compile time = 35.110 ms
ptxas info    : Compiling entry function '{ATTENTION}' for 'sm_80'
ptxas info    : Function properties for {ATTENTION}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for __internal_trig_reduction_slowpathf
    24 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 536 bytes cmem[0]
ptxas info    : Compile time = 226.820 ms
ptxas info    : 272 bytes gmem
ptxas info    : Compiling entry function '{KERPLE}' for 'sm_90a'
ptxas info    : Function properties for {KERPLE}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 23.280 ms
ptxas info    : Compiling entry function '{ATTENTION}' for 'sm_90a'
ptxas info    : Function properties for {ATTENTION}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compile time = 99.280 ms
"""
NAME = "flash_backward_dkdv_kernel<true, (FlashBias)2, 64>"


class Budget(Folder):
    def setUp(self):
        super().setUp()
        code, said = self.run_it("--update", self.write("log", LOG))
        self.assertEqual(code, 0, said)

    def run_it(self, *arguments, version="13.0", **env):
        compiler = ["--nvcc-version", version] if version else []
        return ended(sys.executable, PROGRAM, "--budget", self.path("budget.json"), *compiler, *arguments,
                     env=dict(os.environ, **env))

    def compare(self, text, **more):
        return self.run_it(self.write("log", text), **more)

    def planted(self, old, new, *parts):
        self.assertIn(old, LOG)
        code, said = self.compare(LOG.replace(old, new, 1))
        self.assertEqual(code, 1, said)
        for part in (*parts, "dev/ptxas_budget.py --update"):
            self.assertIn(part, said)
        self.assertIn("1 breaches", said)

    def test_what_it_reads(self):
        budget = json.loads(self.read("budget.json"))
        self.assertEqual(budget["nvcc"], "13.0")
        self.assertEqual(set(budget["kernels"]), {NAME, "kerple_backward_kernel<true>"})
        self.assertEqual(budget["kernels"]["kerple_backward_kernel<true>"]["sm_90a"],
                         {"registers": 38, "static_shared": 256})
        self.assertEqual(budget["kernels"][NAME]["sm_80"], {"registers": 168})

    def test_within(self):
        code, said = self.compare(LOG)
        self.assertEqual(code, 0, said)
        self.assertIn("2 kernels, 4 builds of them: within their budget", said)

    def test_fewer_registers_pass(self):
        self.assertEqual(self.compare(LOG.replace("Used 168", "Used 160"))[0], 0)

    def test_a_spill(self):
        self.planted(f"for {ATTENTION}\n    0 bytes stack frame, 0 bytes spill stores",
                     f"for {ATTENTION}\n    24 bytes stack frame, 24 bytes spill stores",
                     f"{NAME}, sm_80: spill stores: found 24, budget 0")

    def test_budgeted_spills_are_named(self):
        log = self.write("log", LOG.replace("0 bytes spill stores", "4 bytes spill stores"))
        self.assertIn("2 of them spill", self.run_it("--update", log)[1])
        code, said = self.compare(LOG)
        self.assertEqual(code, 0)
        self.assertIn(f"2 kernels; 2 of them spill: {NAME}, kerple", said)

    def test_a_register(self):
        self.planted("Used 38 registers", "Used 39 registers",
                     "kerple_backward_kernel<true>, sm_90a: registers: found 39, budget 38")

    def test_shared_memory(self):
        self.planted("Used 38 registers, used 1 barriers, 256 bytes smem",
                     "Used 38 registers, used 1 barriers, 512 bytes smem",
                     "sm_90a: static shared: found 512, budget 256")

    def test_a_kernel_without_a_budget(self):
        first = LOG.split("ptxas info    : Compiling entry function '" + ATTENTION)[0]
        self.planted("", first.replace("kerple", "warple"),
                     "warple_backward_kernel<true>, sm_80: has no budget; found registers 40")

    def test_an_architecture_without_a_budget(self):
        code, said = self.compare(LOG.replace("'sm_90a'", "'sm_100a'"))
        self.assertEqual(code, 1)
        self.assertIn(f"{NAME}, sm_100a: has no budget", said)

    def test_two_files_with_one_kernel(self):
        other = LOG.replace("Used 38", "Used 44")
        for both in (LOG + other, other + LOG):
            code, said = self.compare(both)
            self.assertEqual(code, 1)
            self.assertIn("found 44, budget 38", said)

    def test_another_compiler(self):
        code, said = self.compare(LOG.replace("Used 168", "Used 200"), version="12.4")
        self.assertEqual(code, 0, said)
        self.assertIn("registers and shared memory are not compared", said)
        spills = LOG.replace("0 bytes spill stores", "4 bytes spill stores")
        self.assertEqual(self.compare(spills, version="12.4")[0], 1)

    def test_bad_input(self):
        for text in ("", "nvcc: error\n"):
            code, said = self.compare(text)
            self.assertEqual(code, 2)
            self.assertIn("no kernel in the log", said)
        for text in ("{", "{}", "[]"):
            self.write("budget.json", text)
            code, said = self.compare(LOG)
            self.assertEqual(code, 2)
            self.assertIn("--update` writes one", said)

    def test_without_nvcc(self):
        os.mkdir(self.path("empty"))
        code, said = self.run_it(version=None, PATH=self.path("empty"), NVCC="", CUDA_HOME=self.path("empty"))
        self.assertEqual(code, 0, said)
        self.assertIn("SKIPPED: there is no nvcc", said)

    def test_a_compiler_that_fails(self):
        nvcc = self.shell("nvcc", "echo 'train_gpt2.cu(3): error: this is wrong'\nexit 2\n")
        code, said = self.run_it(NVCC=nvcc)
        self.assertEqual(code, 2)
        self.assertIn("train_gpt2.cu does not compile:\ntrain_gpt2.cu(3): error: this is wrong", said)

    def test_the_committed_budget(self):
        kernels = json.loads(read("dev/ptxas_budget.json"))["kernels"]
        for which in ("forward", "backward_dkdv", "backward_dq"):
            for causal in ("true", "false"):            # GPT-2, BERT
                kernel = f"flash_{which}_kernel<{causal}, "
                self.assertTrue(any(name.startswith(kernel) for name in kernels), kernel)
        for kernel, archs in kernels.items():
            self.assertEqual(set(archs), {"sm_80", "sm_90a"}, kernel)


if __name__ == "__main__":
    unittest.main()
