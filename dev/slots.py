#!/usr/bin/env python3
"""slots.py -- how many instructions a warp of the tensor-core attention issues for a tile of 64 x 64, on Hopper. The
kernels' time follows it (docs/attention.md, "The bias and the issue of instructions"). It needs nvcc and nvdisasm, but
no GPU.

    dev/slots.py              counts, and compares with dev/slots.json
    dev/slots.py --update     writes dev/slots.json

Head size 64, without masks. Of the loop over tiles it takes the shortest way that fetches the next tile and is not the
diagonal's: first for a warp without a part in the tile's bias, then for the warp with the largest part.
"""
import os
import re
import tempfile

from ptxas_budget import ROOT, BadInput, compiler_version, console, makefile, tool, write_budget

BUDGET = os.path.join(ROOT, "dev", "slots.json")
BIASES = {"None": "none", "Linear": "alibi", "Distance": "cable"}
KERNELS = {"forward": "FlashArgs", "backward_dq": "FlashArgs, const FlashQueries*, FlashSlabs",
           "backward_dkdv": "FlashArgs, const FlashQueries*"}


def source(causal):
    lines = ['#include "llmc/attention/flash/backward.cuh"', '#include "llmc/attention/flash/forward.cuh"']
    for bias in BIASES:
        form = f"{causal}, FlashBias::{bias}, 64, false"
        lines += [f"template __global__ void flash_{k}_kernel<{form}>({a});" for k, a in KERNELS.items()]
    return "\n".join(lines)


def disassemble(causal):
    """the text of nvdisasm"""
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "slots.cu")
        with open(name, "w") as f:
            f.write(source(causal))
        compile_it = [tool("nvcc"), *makefile("NVCC_CODE"), "-arch=sm_90a", "-cubin", "-I" + ROOT, name, "-o",
                      name + "bin"]
        console.output_of(compile_it)
        return console.output_of([tool("nvdisasm"), "-c", name + "bin"])


def blocks_of(text):
    """a kernel's basic blocks: [label or None, instructions]"""
    blocks = [[None, []]]
    for line in text.split("\n"):
        label = re.match(r"(\.L_x_\d+):", line)
        instruction = re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line)
        if label:
            blocks.append([label[1], []])
        if instruction:
            blocks[-1][1].append(instruction[1])
            if re.search(r"\b(BRA|EXIT|RET)\b", instruction[1]):
                blocks.append([None, []])
    return blocks


def ways(blocks):
    """{(copies into shared memory, other stores there): the least slots} of the ways through the loop over tiles"""
    place = {label: k for k, (label, _) in enumerate(blocks) if label}
    count = [[sum(re.search(rf"\b{word}\b", x) is not None for x in code) for word in ("LDGSTS", "STS", "HGMMA")]
             for _, code in blocks]
    target = [re.search(r"BRA .*`\((\.L_x_\d+)\)", code[-1]) if code else None for _, code in blocks]
    target = [place[t[1]] if t else None for t in target]
    loops = [(target[k], k) for k in range(len(blocks)) if target[k] is not None and target[k] <= k]
    fetches = [(a, b) for a, b in loops if any(n[0] >= 8 for n in count[a:b + 1])]
    if not fetches:
        raise BadInput("expected a loop that fetches tiles")
    first, last = max(fetches, key=lambda loop: loop[1] - loop[0])
    strips = [(a, b) for a, b in loops if first < a and any(n[2] for n in count[a:b + 1])]      # of 32 rows: two turns
    found = {first: {(0, 0): 0}}
    for k in range(first, last + 1):
        code = blocks[k][1]
        if sum(re.search(r"F\w+\.FTZ .*\|R\d+", x) is not None for x in code) >= 32 and count[k][2] == 0:
            continue                                # |S_i - S_j| of each pair: the diagonal
        cost = len(code) * (2 if any(a <= k <= b for a, b in strips) else 1)
        after = {(c + count[k][0], s + count[k][1]): n + cost for (c, s), n in found.get(k, {}).items()}
        if k == last:
            return after
        always = code and re.match(r"(BRA|EXIT)\b", code[-1])
        for to in {target[k], None if always else k + 1}:
            if to is not None and k < to <= last:
                for key, n in after.items():
                    found.setdefault(to, {})[key] = min(n, found.get(to, {}).get(key, n))
    raise BadInput("expected the loop's last block to be reached")


def slots(text):
    """[slots of a warp without a part in the bias, slots of the warp with the largest part]"""
    found = {key: n for key, n in ways(blocks_of(text)).items() if key[0] >= 8}     # it fetches the next tile
    return [min(found.values()), found[max(found, key=lambda way: (way[1], way[0]))]]


def count_all():
    rows = {}
    for direction, causal in (("causal", "true"), ("full", "false")):
        print(f"compiling {direction}", flush=True)
        for part in re.split(r"\n\s*\.section\s+\.text\.", disassemble(causal))[1:]:
            kernel = re.search(r"flash_(forward|backward_\w+?)_kernelILb[01]EL9FlashBias(\d)", part.split(",")[0])
            if kernel:
                rows[f"{kernel[1]} {direction} {list(BIASES.values())[int(kernel[2])]}"] = slots(part)
    return dict(sorted(rows.items()))


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("--update", action="store_true")
    args = p.parse_args(argv)
    if not tool("nvcc") or not tool("nvdisasm"):
        raise BadInput("expected nvcc and nvdisasm of a CUDA toolkit in PATH or /usr/local/cuda/bin, found none")
    rows, version = count_all(), compiler_version(tool("nvcc"))
    print("\n".join(f"{key:40} {least:4} {most:4}" for key, (least, most) in rows.items()))
    if args.update:
        write_budget(BUDGET, version, "slots", rows)
        return 0
    kinds = {"nvcc": console.TEXT, "slots": console.object_of("slots", console.list_of("counts", console.COUNT))}
    budget = console.fields(console.read_object(BUDGET), kinds, {}, BUDGET)
    if version != budget["nvcc"]:
        print(f"nvcc {version}, but the budget is of nvcc {budget['nvcc']}: not compared")
        return 0
    more = [f"{k}: found {v}, budget {budget['slots'].get(k)}" for k, v in rows.items()
            if any(found > most for found, most in zip(v, budget["slots"].get(k, (0, 0))))]
    if more:
        raise BadInput("\n".join(["more slots than budgeted; if they are meant: dev/slots.py --update", *more]))
    return 0


if __name__ == "__main__":
    console.run(main)
