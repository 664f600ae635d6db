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
import argparse
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


def makefile(name):
    """the words of a variable that the Makefile sets to plain words"""
    with open(os.path.join(ROOT, "Makefile")) as f:
        return re.search(rf"^{name} := (.*)$", f.read(), re.M).group(1).split()


def parse_log(text):
    """{(mangled name, arch): {field: the most, where several files compile it}}"""
    found, name, spills = {}, None, None
    for line in text.split("\n"):
        m = re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line)
        if m:
            name, spills = (m.group(1), m.group(2)), None
            continue
        m = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if m and name and spills is None:               # later ones belong to functions that were not inlined
            spills = (int(m.group(2)), int(m.group(3)))
            continue
        m = re.search(r"Used (\d+) registers", line)
        if m and name:
            if spills is None:
                raise BadInput(f"{name[0]}: its spills are missing; was the log made by -Xptxas -v?")
            shared = re.search(r"(\d+) bytes smem", line)
            values = (int(m.group(1)), *spills, int(shared.group(1)) if shared else 0)
            before = found.get(name, {})
            found[name] = {f: max(v, before.get(f, v)) for f, v in zip(FIELDS, values)}
            name = None
    return found


def demangle(names):
    """mangled -> kernel<arguments>, without its parameters"""
    names = sorted(set(names))
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if not tool:
        raise BadInput("no c++filt (it comes with binutils)")
    p = subprocess.run([tool, "-p"], input="\n".join(names) + "\n", stdout=subprocess.PIPE, universal_newlines=True,
                       check=True)
    return dict(zip(names, (re.sub(r"^void ", "", x).replace("> >", ">>") for x in p.stdout.split("\n"))))


def by_kernel(found):
    """{kernel: {arch: {field: most}}}: static kernels of two files may have the same name"""
    readable, kernels = demangle(name for name, _ in found), {}
    for (name, arch), values in sorted(found.items()):
        known = kernels.setdefault(readable[name], {}).setdefault(arch, dict(values))
        kernels[readable[name]][arch] = {f: max(known[f], values[f]) for f in FIELDS}
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
    m = re.search(r"release (\d+\.\d+)", p.stdout)
    return m.group(1) if m else "unknown"


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


def write_budget(path, version, kernels):
    """a line of JSON for each kernel, without zeros"""
    rows = {k: {a: {f: n for f, n in v.items() if n} for a, v in archs.items()} for k, archs in kernels.items()}
    lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items()))
    console.write_whole(path, f'{{\n  "nvcc": {json.dumps(version)},\n  "kernels": {{\n{lines}\n  }}\n}}\n')


def read_budget(path):
    """(version of nvcc, budget)"""
    try:
        with open(path) as f:
            budget = json.load(f)
        return budget["nvcc"], budget["kernels"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{path}: no budget in it ({e}); `{UPDATE}` writes one") from None


def spilling(kernels):
    """their names, after a colon; none: a word"""
    names = sorted(k for k, archs in kernels.items() if any(v.get("spill_stores") for v in archs.values()))
    return f"{len(names)} of them spill: {', '.join(names)}" if names else "none spills"


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("logs", nargs="*", metavar="LOG")
    p.add_argument("--update", action="store_true")
    p.add_argument("--budget", default=os.path.join(ROOT, "dev", "ptxas_budget.json"))
    p.add_argument("--nvcc-version",
                   help="of the compiler that wrote the logs, such as 13.0 [that of nvcc, or the budget's]")
    return p.parse_args(argv)


def main(argv):
    args = parse(argv)
    usual = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc"
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or (usual if os.path.exists(usual) else None)
    if args.logs:
        log = "".join(open(name, errors="replace").read() for name in args.logs)
    elif not nvcc:
        print("#" * 88)
        print("## SKIPPED: there is no nvcc here. Registers and spills of the kernels were NOT checked. ##")
        print("#" * 88)
        return 0
    else:
        log = compile_all(nvcc)
    kernels = by_kernel(parse_log(log))
    if not kernels:
        raise BadInput("no kernel in the log; was it made by -Xptxas -v?")
    version = args.nvcc_version or (compiler_version(nvcc) if nvcc else None)
    if args.update:
        write_budget(args.budget, version or "unknown", kernels)
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
