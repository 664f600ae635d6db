#!/usr/bin/env python3
"""What llmc/base/ptx.cuh says to a GPU. The emulator replaces these functions by its own, so no test there reads the
instructions themselves; this one puts the operands into their text and compares it with what the PTX ISA wants. So it
sees an operand in another's place, which on a GPU would be a wrong number."""
import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def wgmma(columns, a, more):
    d = ", ".join(f"d[{n}][{i}]:+f" for n in range(columns // 8) for i in range(4))
    return (f"{{.reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
            f"{{{d}}}, {a}, b.from(at):l, add, 1, 1, {more};}}")


REGISTERS = "{a[0]:r, a[1]:r, a[2]:r, a[3]:r}"
# function -> its instruction, or those of all functions with that name.
# cvt.rn.bf16x2.f32 d, a, b: a goes to the upper half of d, b to the lower one
INSTRUCTIONS = {
    "ex2": "ex2.approx.ftz.f32 y:=f, x:f;",
    "rcp": "rcp.approx.ftz.f32 y:=f, x:f;",
    "lg2": "lg2.approx.ftz.f32 y:=f, x:f;",
    "pack_bf16": "cvt.rn.bf16x2.f32 d:=r, hi:f, lo:f;",
    "ldmatrix_x4": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r[0]:=r, r[1]:=r, r[2]:=r, r[3]:=r}, [shared row:r];",
    "ldmatrix_x4_trans":
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {r[0]:=r, r[1]:=r, r[2]:=r, r[3]:=r}, [shared row:r];",
    "mma_m16n8k16":
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d[0]:+f, d[1]:+f, d[2]:+f, d[3]:+f}, "
        "{a[0]:r, a[1]:r, a[2]:r, a[3]:r}, {b0:r, b1:r}, {d[0]:+f, d[1]:+f, d[2]:+f, d[3]:+f};",
    "wgmma": [*(wgmma(n, REGISTERS, "Transposed:n") for n in (64, 32)),
              *(wgmma(n, "a.from(at):l", "0, 0") for n in (64, 32))],
    "wgmma_fence": "wgmma.fence.sync.aligned;",
    "wgmma_wait": "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
    "fence_proxy_async": "fence.proxy.async.shared::cta;",
    "cp_async_16": "cp.async.cg.shared.global [shared shared:r], [global:l], 16, valid ? 16 : 0:r;",
    "cp_async_commit": "cp.async.commit_group;",
    "cp_async_wait": "cp.async.wait_group N:n;",
}
# Those that are made of CUDA's own words: their bodies
BODIES = {
    "unpack_lo": ["return __uint_as_float(x << 16);"],
    "unpack_hi": ["return __uint_as_float(x & 0xffff0000u);"],
    "shuffle_xor": ["return __shfl_xor_sync(~0u, x, bits);"],
    "shuffle": ["return __shfl_sync(~0u, x, lane);"],
    "count_lanes": ["return __popc(__ballot_sync(~0u, holds));"],
    "syncwarp": ["__syncwarp(~0u);"],
}
# What must not be moved, nor left out: they wait, or work on memory that the compiler does not see
ON_REGISTERS = {"mma_m16n8k16", "wgmma"}
VOLATILE = ON_REGISTERS | {"ldmatrix_x4", "ldmatrix_x4_trans", "wgmma_fence", "wgmma_wait",
                           "fence_proxy_async", "cp_async_16", "cp_async_commit", "cp_async_wait"}


def functions():
    """name -> the parameters and the bodies of the functions with that name"""
    with open(os.path.join(ROOT, "llmc", "base", "ptx.cuh"), encoding="utf-8") as f:
        text = re.sub(r"#include.*", "", f.read())
    hopper = ["-D__CUDACC__", "-D__CUDA_ARCH_FEAT_SM90_ALL"]
    text = subprocess.run([os.environ.get("CXX", "g++"), "-E", "-P", "-x", "c++", *hopper, "-"], input=text, text=True,
                          capture_output=True, check=True).stdout
    found = {}
    for m in re.finditer(r"__device__ inline \w+ (\w+)\((.*?)\) \{(.*?)\}\s*(?=__device__|template|struct|constexpr|$)",
                         text, re.S):
        found.setdefault(m[1], []).append((m[2], " ".join(m[3].split())))
    return found


def operands(asm):
    """(constraint, expression) of each: a list is cut at the commas that stand in no parentheses"""
    found = []
    for m in re.finditer(r'"([=+]?[frln])"\(', asm):
        depth, end = 1, m.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(asm[end], 0)
            end += 1
        expression = asm[m.end():end - 1]
        address = re.fullmatch(r"\(uint32_t\)__cvta_generic_to_shared\((\w+)\)", expression)
        found.append((m[1], f"shared {address[1]}" if address else expression))
    return found


class Ptx(unittest.TestCase):
    def test_every_function_is_known(self):
        self.assertEqual(set(functions()), set(INSTRUCTIONS) | set(BODIES))

    def test_operands(self):
        for name, wanted in INSTRUCTIONS.items():
            with self.subTest(function=name):
                bodies = [body for _, body in functions()[name]]
                wanted = wanted if isinstance(wanted, list) else [wanted]
                self.assertEqual([self.instruction(body) for body in bodies], wanted)
                for body in bodies:
                    self.assertEqual("asm volatile" in body, name in VOLATILE)
                    self.assertEqual('"memory"' in body, name in VOLATILE - ON_REGISTERS)

    def instruction(self, body):
        """the text of a body's asm statements, with its operands"""
        texts = []
        for asm in re.findall(r"asm.*?\);(?= *(?:asm|return|$))", body):
            text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', asm[:re.search(r'" ?(:|\))', asm).start() + 1]))
            parts = operands(asm)
            for k in sorted(range(len(parts)), reverse=True):
                text = text.replace(f"%{k}", "{1}:{0}".format(*parts[k]))
            texts.append(text.strip())
        return " ".join(texts)

    def test_what_they_return(self):
        for name in INSTRUCTIONS:
            _, body = functions()[name][0]
            result = re.match(r"(?:float|uint32_t) (\w+);", body)
            with self.subTest(function=name):
                self.assertEqual(result is not None, name in ("ex2", "rcp", "lg2", "pack_bf16"))
                if result:
                    self.assertTrue(body.endswith(f"return {result[1]};"), body)

    def test_descriptor(self):
        """128-byte swizzle in bits 62 and 63, 1,024 bytes between eight rows in bits 32 to 45, all over 16"""
        with open(os.path.join(ROOT, "llmc", "base", "ptx.cuh"), encoding="utf-8") as f:
            text = " ".join(f.read().split())
        self.assertIn("low((uint32_t)__cvta_generic_to_shared(p) >> 4)", text)
        self.assertIn("SWIZZLE_128 = 1u << 30, EIGHT_ROWS = 1024 >> 4;", text)
        self.assertIn('asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + bytes / 16), '
                      '"r"(SWIZZLE_128 | EIGHT_ROWS));', text)

    def test_parameters(self):
        found = functions()
        for name, wanted in (("pack_bf16", "float lo, float hi"),
                             ("cp_async_16", "void* shared, const void* global, bool valid")):
            self.assertEqual([p for p, _ in found[name]], [wanted], name)

    def test_bodies(self):
        for name, wanted in BODIES.items():
            self.assertEqual([body for _, body in functions()[name]], wanted, name)


if __name__ == "__main__":
    unittest.main()
