"""test_sass_bound.py -- dev/sass_bound.py on small kernels whose counts are done by hand, and with planted faults."""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PROGRAM = os.path.join(ROOT, "dev", "sass_bound.py")
sys.path.insert(0, os.path.join(ROOT, "dev"))
import sass_bound  # noqa: E402
KEYS = {"forward": "None 64 causal forward", "backward_dkdv": "None 64 causal backward_dkdv",
        "backward_dq": "None 64 causal backward_dq"}
MANGLED = {"forward": "_Z20flash_forward_kernelILb1EL9FlashBias0ELi64EEv9FlashArgs",
           "backward_dkdv": "_Z26flash_backward_dkdv_kernelILb1EL9FlashBias0ELi64EEv9FlashArgsPK12FlashQueries",
           "backward_dq": "_Z24flash_backward_dq_kernelILb1EL9FlashBias0ELi64EEv9FlashArgsPK12FlashQueries"
                          "10FlashSlabs"}
GELU = "_Z19gelu_forward_kernelILi8EEvP13__nv_bfloat16PKS0_m"

# nvcc 13.0's text, shortened: the operands of the first tile, the copies of the next, the masks of the diagonal, and
# a rare rescaling; %s: the products
FORWARD = """
    S2R R2, SR_TID.X
loop:
    DEPBAR.LE SB0, 0x0
    BAR.SYNC.DEFER_BLOCKING 0x0
    ISETP.NE.AND P0, PT, R132.reuse, RZ, PT
    @!P0 LDSM.16.M88.4 R48, [R130]
    @P1 BRA {scores}
    @!PT LDS RZ, [RZ]
    LDGSTS.E.BYPASS.128 [R77], desc[UR6][R66.64], !P0
    LDGSTS.E.BYPASS.128 [R83], desc[UR6][R68.64], !P1
    LDGDEPBAR
scores:
    LDSM.16.M88.4 R68, [R76+0x2000]
    LDSM.16.MT88.2 R68, [R76+0x2000]
%s
    @P0 BRA P1, {full}
    ISETP.GE.AND P0, PT, R69, R92.reuse, PT
    FSEL R82, R82, -INF , !P1
full:
    FMNMX.FTZ R68, R81, R80, !PT
    BSSY B0, {rest}
    SHFL.BFLY PT, R69, R68, 0x1, 0x1f
    @!P1 BRA !P2, {kept}
    @P0 MUFU.EX2 R69, R68
    FMUL.FTZ R124, R124, R69.reuse
kept:
    BSYNC B0
rest:
    ISETP.GT.AND P3, PT, R2, 0x3f, PT
    @P3 BRA {others}
    LDS.128 R92, [R11]
    STS.64 [R11], R92
others:
    FFMA.FTZ R104, R72, R5.reuse, R92.reuse
    IMAD R104, R72, R5, R92
    MUFU.EX2 R104, R104
    F2FP.BF16.F32.PACK_AB R21, R110, R21
    @!P0 BRA {loop}
    EXIT
"""
HMMA = "    HMMA.16816.F32.BF16 R72, R48.reuse, R68, RZ\n"
# strips: two inner loops, one without and one with masks; the counter of the second is a uniform register
BACKWARD = """
    S2R R2, SR_TID.X
outer:
    @P1 BRA {start}
    LDGSTS.E.BYPASS.128 [R77], desc[UR6][R66.64], !P0
start:
    @P0 BRA {masked}
strip:
    VIADD R120, R120, 0x10
    LDSM.16.M88.4 R68, [R76+0x2000]
%s
    ISETP.GE.U32.AND P0, PT, R120, 0x40, PT
    @!P0 BRA {strip}
    BRA {next}
masked:
    UIADD3 UR5, UR5, 0x10, URZ
    UISETP.GE.U32.AND UP0, UPT, UR5, 0x40, UPT
    PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0
%s
    FSEL R82, R82, -INF , !P1
    FSEL R83, R83, -INF , !P1
    @!P0 BRA {masked}
next:
    @!P4 BRA {outer}
    EXIT
"""
ELEMENTS = """
    @P0 EXIT
loop:
    LDG.E.128 R4, desc[UR6][R4.64]
%s
    STG.E.128 desc[UR6][R4.64], R6
    @!P1 BRA {fast}
    MOV R1, R2
    CALL.REL.NOINC {slow}
    BRA {loop_end}
fast:
    MOV R1, R2
    MOV R1, R2
    MOV R1, R2
    MOV R1, R2
loop_end:
    @!P0 BRA {loop}
    EXIT
slow:
    RET.REL.NODEC R2 0x0
"""


def assemble(name, text):
    """the text as cuobjdump prints it, with an address for each {label}"""
    at, places, lines = 0, {}, []
    for line in (x.strip() for x in text.split("\n")):
        if line.endswith(":"):
            places[line[:-1]] = f"{at:#x}"
        elif line:
            lines.append((at, line))
            at += 16
    listed = [f"        /*{at:04x}*/                   {line} ;       /* 0x000000000000794d */\n"
              "                                              /* 0x000fea0003800000 */\n" for at, line in lines]
    body = re.sub(r"\{(\w+)\}", lambda m: places[m.group(1)], "".join(listed))
    return f"\t\tFunction : {name}\n\t.headerflags\t@\"EF_CUDA_SM90\"\n{body}\t\t..........\n"


SASS = {"forward": assemble(MANGLED["forward"], FORWARD % (64 * HMMA)),
        "backward_dkdv": assemble(MANGLED["backward_dkdv"], BACKWARD % (32 * HMMA, 32 * HMMA)),
        "backward_dq": assemble(MANGLED["backward_dq"], BACKWARD % (24 * HMMA, 24 * HMMA)),
        "gelu": assemble(GELU, ELEMENTS % (120 * "    FMUL.FTZ R4, R4, R4\n"))}


class Bound(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.at = lambda name: os.path.join(directory.name, name)
        code, said = self.run_it("".join(SASS.values()), "--update")
        self.assertEqual(code, 0, said)
        with open(self.at("budget.json")) as f:
            self.budget = json.load(f)

    def run_it(self, text, *arguments, version="13.0", **env):
        with open(self.at("sass"), "w") as f:
            f.write(text)
        p = subprocess.run([sys.executable, PROGRAM, "--budget", self.at("budget.json"), "--nvcc-version", version,
                            "--sass", self.at("sass"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           universal_newlines=True, env=dict(os.environ, **env))
        return p.returncode, p.stdout

    def planted(self, kernel, old, new, *parts):
        self.assertIn(old, SASS[kernel])
        changed = dict(SASS, **{kernel: SASS[kernel].replace(old, new)})
        code, said = self.run_it("".join(changed.values()))
        self.assertEqual(code, 1, said)
        for part in (*parts, "dev/sass_bound.py --update"):
            self.assertIn(part, said)

    def test_forward(self):
        """per warp: 12 instructions of the tile's own and 64 HMMA, 4 + 2 wavefronts of ldmatrix, 2 x 4 of the copies,
        a shuffle; two of four warps run LDS.128 and STS.64"""
        found = self.budget["flash"][KEYS["forward"]]
        instructions = 3 + 1 + 1 + 4 + 2 + 64 + 1 + 2 + 1 + 1 + 1 + 2 + 5        # of each warp, and then of two
        self.assertEqual(found["issue"], round((4 * instructions + 2 * 2) / 4, 1))
        self.assertEqual(found["tensor"], 409.6)        # 256 mma of 4,096 FLOPs at 2,560 a clock
        self.assertEqual(found["shared"], 4 * (4 + 2 + 2 * 4 + 1) + 2 * (4 + 2))
        self.assertEqual(found["mufu"], 4 * 2)          # the rescaling is left out
        self.assertEqual(found["fma"], 4 * (0.25 + 0.5))
        self.assertEqual(found["alu"], 4 * 4 * 0.5)     # two ISETP, FMNMX, F2FP

    def test_strips(self):
        """an inner loop runs four times, whether its counter is a register or a uniform one"""
        found = self.budget["flash"][KEYS["backward_dkdv"]]
        self.assertEqual(found["tensor"], 819.2)
        self.assertEqual(found["shared"], 4 * (4 * 4 + 4))
        self.assertEqual(found["issue"], 3 + 4 * 36 + 2)
        self.assertEqual(self.budget["flash"][KEYS["backward_dq"]]["tensor"], 614.4)

    def test_rows_of_a_warp(self):
        """twice the products of a warp are two tiles at a time: all else counts half"""
        text = assemble(MANGLED["forward"], FORWARD % (128 * HMMA))
        self.assertEqual(self.run_it(text, "--update")[0], 0)
        with open(self.at("budget.json")) as f:
            found = json.load(f)["flash"][KEYS["forward"]]
        self.assertEqual(found["tensor"], 409.6)
        self.assertEqual(found["shared"], self.budget["flash"][KEYS["forward"]]["shared"] / 2)

    def test_rows_in_the_name(self):
        """a kernel with 16 and with 32 rows of a warp: two budgets, and the better one's bound"""
        both = (SASS["forward"].replace("Li64E", "Li64ELi16E").replace("LDSM.16.MT88.2", "LDSM.16.MT88.4") +
                SASS["forward"].replace("Li64E", "Li64ELi32E"))
        code, said = self.run_it(both, "--update")
        self.assertEqual(code, 0, said)
        with open(self.at("budget.json")) as f:
            found = json.load(f)["flash"]
        self.assertEqual(found[KEYS["forward"] + " 16"]["shared"], found[KEYS["forward"] + " 32"]["shared"] + 8)
        row = next(line for line in said.split("\n") if line.startswith("None 64 causal  "))
        self.assertEqual(row.split()[-1], "-")

    def test_bounds(self):
        said = self.run_it("".join(SASS.values()))[1]
        row = next(line for line in said.split("\n") if line.startswith("None 64 causal  "))
        clock = 132 * 1.98e9 / 1e12 * 4 * 64 ** 3
        self.assertEqual(row.split()[-2:], [f"{clock / 409.6:.0f}", f"{2.5 * clock / (819.2 + 614.4):.0f}"])
        self.assertIn("Nothing was measured", said)

    def test_elements(self):
        """128 instructions for 8 elements: 120, a load, a store, two branches, four MOV; the call is not taken"""
        self.assertEqual(self.budget["elementwise"], {"gelu_forward_kernel<8>": 16.0})
        said = self.run_it("".join(SASS.values()))[1]
        self.assertIn("16.0      31.1  memory limits it", said)
        slow = assemble(GELU, ELEMENTS % (260 * "    FMUL.FTZ R4, R4, R4\n"))
        self.assertIn("ISSUE limits it", self.run_it(SASS["forward"] + slow, "--update")[1])

    def test_within(self):
        code, said = self.run_it("".join(SASS.values()))
        self.assertEqual(code, 0, said)
        self.assertIn("3 kernels of attention and 1 elementwise ones: within their budget", said)

    def test_growth(self):
        two = lambda kernel, word: "\n".join(2 * [next(x for x in SASS[kernel].split("\n") if word in x)])  # noqa: E731
        one = lambda kernel, word: two(kernel, word).split("\n")[0]                 # noqa: E731
        self.planted("forward", one("forward", "LDSM.16.MT88"), two("forward", "LDSM.16.MT88"),
                     KEYS["forward"] + ", shared: found 80.0 clocks, budget 72.0")
        self.planted("forward", one("forward", "MUFU.EX2 R104"), two("forward", "MUFU.EX2 R104"), ", mufu: found 16.0")
        self.planted("backward_dq", one("backward_dq", "VIADD"),
                     two("backward_dq", "VIADD").replace("VIADD R120", "MOV R9", 1),
                     KEYS["backward_dq"] + ", alu: found 24.0 clocks, budget 16.0")
        self.planted("gelu", one("gelu", "LDG"), "\n".join([one("gelu", "LDG")] + 3 * [one("gelu", "FMUL")]),
                     "gelu_forward_kernel<8>: found 16.4 instructions per element, budget 16.0")

    def test_another_pipe_limits(self):
        budget = json.loads(json.dumps(self.budget))
        budget["flash"][KEYS["forward"]].update(mufu=409.7)
        with open(self.at("budget.json"), "w") as f:
            json.dump(budget, f)
        self.assertEqual(self.run_it("".join(SASS.values()))[0], 0)         # the bound is higher
        budget["flash"][KEYS["forward"]].update(mufu=409.6, tensor=409.5)
        with open(self.at("budget.json"), "w") as f:
            json.dump(budget, f)
        code, said = self.run_it("".join(SASS.values()))
        self.assertEqual(code, 1)
        self.assertIn("tensor limits it, expected mufu or a higher bound", said)

    def test_a_kernel_without_a_budget(self):
        code, said = self.run_it("".join(SASS.values()) + SASS["forward"].replace("Bias0", "Bias2"))
        self.assertEqual(code, 1)
        self.assertIn("Distance 64 causal forward: has no budget", said)

    def test_another_compiler(self):
        code, said = self.run_it("".join(SASS.values()).replace("LDSM.16.MT88.2", "LDSM.16.MT88.4"), version="12.4")
        self.assertEqual(code, 0, said)
        self.assertIn("not compared", said)

    def test_what_it_cannot_read(self):
        for text, part in (("", "no tensor-core attention kernel"), (SASS["gelu"], "no tensor-core attention kernel"),
                           (SASS["forward"].replace("HMMA", "IMMA"), "expected one main loop with HMMA, got 0"),
                           (SASS["backward_dq"].replace("R120, 0x40", "R120, R121"), "expected a loop with a counter")):
            code, said = self.run_it(text)
            self.assertEqual(code, 2)
            self.assertIn(part, said)
        with open(self.at("budget.json"), "w") as f:
            f.write("{}")
        code, said = self.run_it(SASS["forward"])
        self.assertEqual(code, 2)
        self.assertIn("--update train_gpt2cu train_bertcu` writes one", said)

    def test_without_a_disassembler(self):
        with tempfile.TemporaryDirectory() as empty:
            env = dict(os.environ, PATH=empty, CUDA_HOME=empty, SASS_TOOLS=empty)
            p = subprocess.run([sys.executable, PROGRAM, "train_gpt2cu"], stdout=subprocess.PIPE,
                               universal_newlines=True, env=env)
        self.assertEqual(p.returncode, 0, p.stdout)
        self.assertIn("SKIPPED: cuobjdump and nvdisasm are not here", p.stdout)

    def test_the_rates_that_probes_measure(self):
        """dev/gpu_probes.cu asks a GPU for the clocks that are counted here"""
        with open(os.path.join(ROOT, "dev", "gpu_probes.cu")) as f:
            rows = re.findall(r'\{Rate::\w+, "([^"]+)", ([\d.]+)f\}', f.read())
        self.assertGreaterEqual(len(rows), 14)
        for name, clocks in rows:
            instruction, *words = name.split()[0].split(".")
            cost = sass_bound.cost_of(sass_bound.Instruction(0, None, instruction, words, ""))
            pipes = {"tensor": cost["hmma"] * 4096 / sass_bound.GPU.mma,
                     **{p: cost[p] for p in ("mufu", "shared", "fma", "alu")}}
            self.assertAlmostEqual(max(pipes.values()), float(clocks), msg=name)

    def test_probes_that_the_compiler_has_emptied(self):
        names, times = sass_bound.probed()
        self.assertEqual(times, 1024)
        loop = "loop:\n%sVIADD R1, R1, 0x1\nISETP.NE.AND P0, PT, R1, 0x40, PT\n@P0 BRA {loop}\nEXIT\n"
        text = "".join(assemble(f"_Z11rate_kernelIL4Rate{k}EEvPyPff", loop % (16 * f"{'.'.join(name)} R2, R3, R4\n"))
                       for k, name in enumerate(names))
        self.assertEqual(sass_bound.check_probes(text), [])
        gone = text.replace("SHFL.BFLY R2", "MOV R2", 1)
        self.assertEqual(sass_bound.check_probes(gone), ["rate of SHFL.BFLY: expected 1024 of them, got 960"])
        self.assertEqual(len(sass_bound.check_probes("")), len(names))

    def test_the_committed_budget(self):
        with open(os.path.join(ROOT, "dev", "sass_budget.json")) as f:
            budget = json.load(f)
        for bias in ("None", "Linear", "Distance", "LogDistance", "Toeplitz", "Fire"):
            for HS in (64, 128):
                for mask in ("causal", "full"):
                    for what in KEYS:
                        names = [f"{bias} {HS} {mask} {what}{rows}" for rows in ("", " 16", " 32")]
                        self.assertTrue(any(name in budget["flash"] for name in names), names[0])
        for kernel in ("gelu_forward_kernel<8>", "gelu_backward_kernel<8>", "classifier_kernel<__nv_bfloat16>",
                       "layernorm_forward_kernel<8>", "layernorm_backward_kernel<8>", "adamw_kernel"):
            self.assertIn(kernel, budget["elementwise"])


if __name__ == "__main__":
    unittest.main()
