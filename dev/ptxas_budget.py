#!/usr/bin/env python3
"""ptxas_budget.py -- registers, spills and static shared memory of every CUDA kernel, against dev/ptxas_budget.json.
It needs nvcc, but no GPU.

    dev/ptxas_budget.py                     compiles train_gpt2.cu and train_bert.cu for sm_80 and sm_90a, compares
    dev/ptxas_budget.py LOG...              compares what `nvcc -Xptxas -v` wrote into these files
    dev/ptxas_budget.py --update [LOG...]   writes the budget from what was found
                        --budget FILE       instead of dev/ptxas_budget.json

It fails on a spill or a register more than budgeted, on more static shared memory, and on a kernel without a budget.
Registers depend on the compiler: under another version of nvcc than the budget's only spills and unknown kernels fail.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.append(os.path.join(ROOT, "scripts"))
import console                      # noqa: E402
from console import BadInput        # noqa: E402

ARCHS = ("sm_80", "sm_90a")
FIELDS = ("registers", "spill_stores", "spill_loads", "static_shared")
UPDATE = "dev/ptxas_budget.py --update"
object_of = console.object_of
KERNELS = object_of("kernels", object_of("architectures", object_of("counts", console.COUNT)))


def makefile(name):
    """the words of a variable that the Makefile sets to plain words"""
    with open(os.path.join(ROOT, "Makefile")) as f:
        return re.search(rf"^{name} := (.*)$", f.read(), re.M).group(1).split()


def tool(name):
    """the path of a program of the CUDA toolkit, which $NVCC and the like may name; "" if there is none"""
    usual = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", name)
    return os.environ.get(name.upper()) or shutil.which(name) or (usual if os.path.exists(usual) else "")


def kernels_of(log):
    """{kernel<arguments>: {arch: {field: the most, where several files compile it or static ones share a name}}}"""
    demangler = shutil.which("c++filt") or shutil.which("cu++filt")
    if not demangler:
        raise BadInput("no c++filt (it comes with binutils)")
    text = subprocess.run([demangler, "-p"], input=log, stdout=subprocess.PIPE, text=True, check=True).stdout
    kernels = {}
    for part in text.split("Compiling entry function ")[1:]:
        name, arch = re.match(r"(?:'(?:void )?(.+?)' for '([^']+)')?", part).groups()
        # later spills belong to functions that were not inlined
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        if not (name and spills and registers):
            raise BadInput(f"{name or part[:80]}: its registers or spills are missing; was the log made by -Xptxas -v?")
        values = (int(registers[1]), int(spills[1]), int(spills[2]), int(shared[1]) if shared else 0)
        before = kernels.setdefault(name.replace("> >", ">>"), {}).setdefault(arch, dict.fromkeys(FIELDS, 0))
        before.update((f, max(v, before[f])) for f, v in zip(FIELDS, values))
    return kernels


def compare(kernels, budget, same_compiler):
    """one line for each breach"""
    breaches = []
    for kernel, archs in sorted(kernels.items()):
        for arch, values in sorted(archs.items()):
            allowed = budget.get(kernel, {}).get(arch)
            if allowed is None:
                found = ", ".join(f"{f} {values[f]}" for f in FIELDS)
                breaches.append(f"{kernel}, {arch}: has no budget; found {found}")
                continue
            for f in FIELDS:
                most = allowed.get(f, 0)
                if values[f] > most and (same_compiler or f.startswith("spill")):
                    breaches.append(f"{kernel}, {arch}: {f.replace('_', ' ')}: found {values[f]}, budget {most}")
    return breaches


def compiler_version(nvcc):
    p = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, universal_newlines=True, check=True)
    return re.search(r"release (\d+\.\d+)|$", p.stdout)[1] or "unknown"


def compile_all(nvcc):
    """the log; each source is compiled once, for all architectures"""
    gencode = [x for a in ARCHS for x in ("-gencode", f"arch={a.replace('sm', 'compute')},code={a}")]
    log = ""
    for source in ("train_gpt2.cu", "train_bert.cu"):   # causal, bidirectional
        print(f"compiling {source} for {', '.join(ARCHS)}", flush=True)
        with tempfile.NamedTemporaryFile(suffix=".o") as product:
            p = subprocess.run([nvcc, *makefile("NVCC_CODE"), "--threads", "2", *gencode, "-Xptxas", "-v", "-I.", "-c",
                                source, "-o", product.name], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, universal_newlines=True)
        if p.returncode != 0:
            errors = [x for x in p.stdout.split("\n") if not x.startswith(("ptxas info", "    "))]
            raise BadInput(f"{source} does not compile:\n" + "\n".join(errors[:15]))
        log += p.stdout
    return log


def write_budget(path, version, what, rows):
    """a line of JSON for each row"""
    lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items()))
    console.write_whole(path, f'{{\n  "nvcc": {json.dumps(version)},\n  "{what}": {{\n{lines}\n  }}\n}}\n')


def read_budget(path):
    """(version of nvcc, budget)"""
    try:
        budget = console.fields(console.read_object(path), {"nvcc": console.TEXT, "kernels": KERNELS}, {}, path)
        return budget["nvcc"], budget["kernels"]
    except BadInput as e:
        raise BadInput(f"{path}: no budget in it ({e}); `{UPDATE}` writes one") from None


def spilling(kernels):
    """how many kernels spill, and their names"""
    names = sorted(k for k, archs in kernels.items() if any(v.get("spill_stores") for v in archs.values()))
    return f"{len(names)} of them spill: {', '.join(names)}" if names else "none spills"


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("logs", nargs="*", metavar="LOG")
    p.add_argument("--update", action="store_true")
    p.add_argument("--budget", default=os.path.join(ROOT, "dev", "ptxas_budget.json"))
    p.add_argument("--nvcc-version",
                   help="of the compiler that wrote the logs, such as 13.0 [that of nvcc, or the budget's]")
    args = p.parse_args(argv)
    nvcc = tool("nvcc")
    if args.logs:
        log = "".join(open(name, errors="replace").read() for name in args.logs)
    elif not nvcc:
        print("#" * 88)
        print("## SKIPPED: there is no nvcc here. Registers and spills of the kernels were NOT checked. ##")
        print("#" * 88)
        return 0
    else:
        log = compile_all(nvcc)
    kernels = kernels_of(log)
    if not kernels:
        raise BadInput("no kernel in the log; was it made by -Xptxas -v?")
    version = args.nvcc_version or (compiler_version(nvcc) if nvcc else None)
    if args.update:
        rows = {k: {a: {f: n for f, n in v.items() if n} for a, v in archs.items()} for k, archs in kernels.items()}
        write_budget(args.budget, version or "unknown", "kernels", rows)
        print(f"{args.budget}: {len(kernels)} kernels; {spilling(kernels)}")
        return 0
    known, budget = read_budget(args.budget)
    same = version in (None, known)
    if not same:
        print(f"nvcc {version}, but the budget is of nvcc {known}: registers and shared memory are not compared")
    print(f"the budget is of {len(budget)} kernels; {spilling(budget)}")
    gone = sorted(set(budget) - set(kernels))
    if gone and not args.logs:
        print(f"{len(gone)} budgeted kernels are gone, `{UPDATE}` forgets them: {', '.join(gone)}")
    breaches = compare(kernels, budget, same)
    if breaches:
        print("\n".join(breaches), file=sys.stderr)
        print(f"{len(breaches)} breaches of {os.path.relpath(args.budget, ROOT)}; if they are meant: {UPDATE}",
              file=sys.stderr)
        return 1
    print(f"{len(kernels)} kernels, {sum(map(len, kernels.values()))} builds of them: within their budget")
    return 0


if __name__ == "__main__":
    console.run(main)
