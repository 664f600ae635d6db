"""test_ptxas_budget.py -- dev/ptxas_budget.py on the output of nvcc 13.0, and on the same text with planted faults; and
dev/slots.py on a loop whose instructions are counted by hand."""
import itertools
import json
import os
import sys
import unittest

from folder import ROOT, Folder, ended, read

sys.path.append(os.path.join(ROOT, "dev"))
import slots                        # noqa: E402

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

    def test_what_it_reads(self):
        budget = json.loads(self.read("budget.json"))
        self.assertEqual(budget["nvcc"], "13.0")
        self.assertEqual(set(budget["kernels"]), {NAME, "kerple_backward_kernel<true>"})
        self.assertEqual(budget["kernels"]["kerple_backward_kernel<true>"]["sm_90a"],
                         {"registers": 38, "static_shared": 256})
        self.assertEqual(budget["kernels"][NAME]["sm_80"], {"registers": 168})

    def test_within(self):
        for text in LOG, LOG.replace("Used 168", "Used 160"):
            code, said = self.compare(text)
            self.assertEqual(code, 0, said)
            self.assertIn("2 kernels, 4 builds of them: within their budget", said)

    def test_breaches(self):
        first = LOG.split("ptxas info    : Compiling entry function '" + ATTENTION)[0]
        other = LOG.replace("Used 38", "Used 44")
        attention = f"for {ATTENTION}\n    0 bytes stack frame, "
        for text, words in (
                (LOG.replace(attention + "0 bytes spill", attention + "24 bytes spill", 1),
                 f"{NAME}, sm_80: spill stores: found 24, budget 0"),
                (LOG.replace("Used 38", "Used 39"),
                 "kerple_backward_kernel<true>, sm_90a: registers: found 39, budget 38"),
                (LOG.replace("256 bytes smem\n", "512 bytes smem\n"), "sm_90a: static shared: found 512, budget 256"),
                (LOG + first.replace("kerple", "warple"),
                 "warple_backward_kernel<true>, sm_80: has no budget; found registers 40"),
                (LOG.replace(f"'{ATTENTION}' for 'sm_90a'", f"'{ATTENTION}' for 'sm_100a'"),
                 f"{NAME}, sm_100a: has no budget"),
                (LOG + other, "found 44, budget 38"), (other + LOG, "found 44, budget 38")):     # one kernel, two files
            code, said = self.compare(text)
            self.assertEqual(code, 1, said)
            for part in (words, "1 breaches", "dev/ptxas_budget.py --update"):
                self.assertIn(part, said)

    def test_budgeted_spills_are_named(self):
        log = self.write("log", LOG.replace("0 bytes spill stores", "4 bytes spill stores"))
        self.assertIn("2 of them spill", self.run_it("--update", log)[1])
        code, said = self.compare(LOG)
        self.assertEqual(code, 0)
        self.assertIn(f"2 kernels; 2 of them spill: {NAME}, kerple", said)

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
            for form in itertools.product(("true", "false"), range(6), (64, 128), ("true", "false")):
                # causal (GPT-2) or not (BERT), each bias, both head sizes, with masks and without
                self.assertIn("flash_{}_kernel<{}, (FlashBias){}, {}, {}>".format(which, *form), kernels)
        for kernel, archs in kernels.items():
            self.assertEqual(set(archs), {"sm_80", "sm_90a"}, kernel)


def code(*instructions):
    """a kernel as nvdisasm writes it; .L_x_N: a label"""
    return "\n".join(x if x.endswith(":") else f"        /*0000*/          {x} ;" for x in instructions)


class Slots(unittest.TestCase):
    FETCH = ["LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]"] * 8
    DIAGONAL = ["FADD.FTZ R1, |R2|, R3"] * 32

    def loop(self, prepare):
        return code("S2R R0, SR_TID.X", ".L_x_1:", "@P0 BRA `(.L_x_2)", *self.FETCH, ".L_x_2:", "@P1 BRA `(.L_x_3)",
                    *prepare, ".L_x_3:", "@P2 BRA `(.L_x_5)", ".L_x_4:", "HGMMA.64x32x16.F32.BF16 R1, gdesc[UR8], R1",
                    "FADD R1, R1, R2", "@!P3 BRA `(.L_x_4)", "BRA `(.L_x_6)", ".L_x_5:", *self.DIAGONAL, ".L_x_6:",
                    "@!P4 BRA `(.L_x_1)", "EXIT")

    def test_counts(self):
        # a test and 8 copies, two tests, two strips of 3, the way around the diagonal, the way back
        computes = 9 + 2 + 2 * 3 + 1 + 1
        self.assertEqual(slots.slots(self.loop(["FADD R1, R1, R2", "STS [R1], R2"])), [computes, computes + 2])
        self.assertEqual(slots.slots(self.loop([self.FETCH[0], "NOP"])), [computes, computes + 2])

    def test_no_loop(self):
        with self.assertRaisesRegex(slots.BadInput, "expected a loop that fetches tiles"):
            slots.slots(code("EXIT"))


if __name__ == "__main__":
    unittest.main()
