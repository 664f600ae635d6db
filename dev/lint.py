#!/usr/bin/env python3
"""lint.py -- the rules of this repository that no compiler checks. Prints place and rule of each breach; exit code 1 if any.

    dev/lint.py [ROOT]
"""
import os
import re
import sys

# The floor of each file: it includes files of lower floors, and of its own floor only those named beside it.
# "position/*" stands for every encoding.
FLOORS = {
    "common.h": (0, ""),
    "device.h": (1, "device_cuda.h device_cpu.h"),
    "device_cuda.h": (1, ""),
    "device_cpu.h": (1, ""),
    "fastmath.h": (1, "device.h"),
    "json.h": (1, ""),
    "ptx.cuh": (1, "device.h"),
    "rand.h": (1, "device.h"),
    "schedule.h": (1, ""),
    "options.h": (1, ""),
    "args.h": (1, "json.h options.h"),
    "guard.h": (1, "json.h"),
    "gpu.h": (1, "device.h"),
    "log.h": (1, "gpu.h json.h"),
    "tokenizer.h": (1, "bpe.h json.h words.h"),
    "safetensors.h": (1, "json.h"),
    "tensor.h": (1, "device.h rand.h"),
    "comm_nccl.h": (2, ""),
    "comm.h": (2, "comm_nccl.h"),
    "comm_tree.cuh": (3, ""),
    "dataloader.h": (2, ""),
    "documents.h": (2, "dataloader.h mlm.h"),
    "mlm.h": (2, "classifier.cuh"),
    "trec.h": (2, ""),
    "embedding.cuh": (2, ""),
    "cublaslt.cuh": (2, ""),
    "matmul.cuh": (2, "cublaslt.cuh"),
    "layernorm.cuh": (2, "matmul.cuh"),
    "gelu.cuh": (2, ""),
    "rows.cuh": (2, "embedding.cuh matmul.cuh"),
    "classifier.cuh": (2, ""),
    "pooling.cuh": (2, "matmul.cuh"),
    "contrastive.cuh": (2, "matmul.cuh"),
    "position/none.cuh": (2, ""),
    "position/toeplitz.cuh": (2, "position/none.cuh"),
    "position/*": (2, "position/none.cuh position/toeplitz.cuh"),
    "outdir.h": (2, ""),
    "weights.h": (2, ""),
    "positions.h": (3, ""),
    "attention_portable.cuh": (3, "positions.h"),
    "attention_decode.cuh": (3, "positions.h"),
    "attention_tiles.cuh": (3, ""),
    "attention_skip.cuh": (3, "attention_tiles.cuh"),
    "attention_flash.cuh": (3, "attention_skip.cuh attention_tiles.cuh"),
    "attention_flash_pairs.cuh": (3, "attention_flash.cuh"),
    "attention_flash_backward.cuh": (3, "attention_flash_pairs.cuh"),
    "unicode.h": (1, ""),
    "words.h": (1, "unicode.h"),
    "bpe.h": (1, "words.h"),
    "attention.cuh": (3, "attention_portable.cuh attention_flash_backward.cuh attention_skip.cuh"),
    "adamw.cuh": (3, ""),
    "checkpoint.h": (3, ""),
    "import.h": (3, ""),
    "model.cuh": (4, ""),
    "evaluate.h": (4, "model.cuh"),
    "generate.h": (4, "evaluate.h"),
    "hellaswag.h": (4, "evaluate.h"),
    "retrieval.h": (4, "evaluate.h model.cuh"),
    "program.h": (4, "generate.h"),
    "run.h": (4, "model.cuh program.h"),
}
TRAINER_FLOOR = 5

KNOWS_THE_BUILD = {"device.h", "fastmath.h", "matmul.cuh", "comm.h", "ptx.cuh", "gpu.h"}   # may say __CUDACC__

# Calls of libm in kernels and layers, which no compiler vectorizes: how often each may appear, and why that is no inner loop.
LIBM = "expf? exp2f? expm1f? tanhf? logf? log2f? log10f? log1pf? powf? erff? erfcf? sinf? cosf? tanf?".split()
LIBM_ALLOWED = {
    ("attention_flash.cuh", "logf"): 1,         # likewise
    ("attention_decode.cuh", "log2"): 1,        # on the host
    ("attention_skip.cuh", "log2f"): 1,         # on the host
    ("ptx.cuh", "exp2f"): 1,                    # the emulator's meaning of an instruction
    ("ptx.cuh", "log2f"): 1,
    ("attention_portable.cuh", "logf"): 1,      # once a row: the log-sum-exp
    ("classifier.cuh", "logf"): 1,              # once a row: the loss
    ("contrastive.cuh", "logf"): 1,             # likewise
    ("adamw.cuh", "pow"): 2,                    # once an update, on the host
    ("position/sinusoidal.cuh", "pow"): 1,      # once a channel of a table, in double
    ("position/sinusoidal.cuh", "sin"): 1,
    ("position/sinusoidal.cuh", "cos"): 1,
    ("position/rope.cuh", "pow"): 2,            # once an angle of a table, in double
    ("position/rope.cuh", "sin"): 1,
    ("position/rope.cuh", "cos"): 1,
    ("position/rope.cuh", "log"): 1,            # once a length, on the host
    ("position/alibi.cuh", "exp2"): 1,          # once a head, on the host
    ("position/fire.cuh", "log1p"): 1,          # once an entry of a table, in double
    ("position/t5.cuh", "pow"): 1,              # once a bucket, on the host
}

MAX_COLUMNS = 160                               # 120 is the aim
MAX_LINES_HEADER, MAX_LINES_TRAINER = 300, 700
SKIPPED_DIRECTORIES = {".git", ".venv", "build", "__pycache__", "fixtures"}
TEXT = (".cu", ".cuh", ".h", ".py", ".sh", ".md", ".yml", ".json", ".txt", "Makefile", "run", ".gitignore", "LICENSE")

findings = []


def report(path, line, rule):
    findings.append(f"{path}:{line}: {rule}")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def without_comments(text, strings=True):
    """the code alone, every character at its place; includes keep their names"""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

    def replace(m):
        if m.group(0)[0] == "/" or strings:
            return blank(m)
        return m.group(0)
    return token.sub(replace, text)


def floor_of(name):
    if name in FLOORS:
        return FLOORS[name]
    if name.startswith("position/"):
        return FLOORS["position/*"]
    return None


def check_includes(root, path, text):
    """path is relative to the root; text has no comments"""
    name = path[len("llmc/"):] if path.startswith("llmc/") else None
    floor, same = (TRAINER_FLOOR, "") if name is None else floor_of(name) or (None, "")
    if floor is None:
        report(path, 1, "this file has no floor: give it one in FLOORS of dev/lint.py")
        return
    for number, line in enumerate(text.split("\n"), 1):
        m = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if not m:
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(path), m.group(1)))
        if not os.path.exists(os.path.join(root, target)):
            report(path, number, f'"{m.group(1)}" is not beside this file; includes are relative to the file that has them')
        elif target == "test/simt/simt.h" and path == "llmc/device.h":
            pass                                # one of the builds it knows
        elif not target.startswith("llmc/"):
            report(path, number, f'"{m.group(1)}" is outside llmc/')
        else:
            included = target[len("llmc/"):]
            other = floor_of(included)
            if other and not (other[0] < floor or (other[0] == floor and included in same.split())):
                report(path, number, f"floor {floor} may not include {included} of floor {other[0]}")


def check_code(path, code):
    """rules of C++ sources; code has neither comments nor strings"""
    base = path[len("llmc/"):] if path.startswith("llmc/") else path
    kernels = path.startswith("llmc/") and (path.endswith(".cuh") or base in ("device.h", "fastmath.h"))
    calls = {}
    for number, line in enumerate(code.split("\n"), 1):
        if "__CUDACC__" in line and base not in KNOWS_THE_BUILD:
            report(path, number, "__CUDACC__: only " + ", ".join(sorted(KNOWS_THE_BUILD)) + " know which build this is")
        if "<<<" in line and path != "llmc/device.h":
            report(path, number, "<<<: kernels are started by launch() alone")
        if re.search(r"(?<!\w)assert\s*\(", line):
            report(path, number, "assert(): vanishes in a release; use check()")
        if re.match(r"using\s+namespace\b", line):
            report(path, number, "using namespace: names a whole file cannot see the origin of")
        if re.search(r"\batomic(Add|Sub|Exch|Max|Min|CAS)\w*\s*\(", line):
            report(path, number, "atomics: sums go through slabs in a fixed order, so that the same input gives the same bits")
        if kernels:
            for m in re.finditer(r"(?<![\w.>])(?:std::|::)?(" + "|".join(LIBM) + r")\s*\(", line):
                key = (base, m.group(1))
                calls[key] = calls.get(key, 0) + 1
                if calls[key] > LIBM_ALLOWED.get(key, 0):
                    report(path, number, f"{m.group(1)}(): no compiler vectorizes it; use device.h's fast_*, or allow it in dev/lint.py with a reason")


def check_text(path, text):
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line) and path not in ("dev/lint.py", "test/test_lint.py"):
            report(path, number, "a left-over: do it or file an issue")
        m = re.search(r"(?<![\w.$}~])/(work|root|tmp|home)\b", line)
        if m and not (m.group(1) == "tmp" and path.startswith("test/")):
            report(path, number, f"{m.group(0)}: a path of one machine")
        if path == "Makefile" or path.endswith(".sh"):
            for flag in ("-Ofast", "-ffast-math", "-use_fast_math"):
                if flag in line.split("#")[0]:
                    report(path, number, f"{flag}: infinities and NaN would lose their meaning")
    if path.endswith((".cu", ".cuh", ".h")) and not path.startswith("test/"):
        limit = MAX_LINES_TRAINER if path.startswith("train_") else MAX_LINES_HEADER
        count = len(lines) - (lines[-1] == "")
        if count > limit:
            report(path, limit + 1, f"{count} lines, {limit} are the limit")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                report(path, number, f"{len(line)} columns, {MAX_COLUMNS} are the limit")


def sources(root):
    for directory, names, files in os.walk(root):
        below_data = os.path.relpath(directory, root) == "data"        # downloads and shards
        names[:] = [] if below_data else sorted(n for n in names if n not in SKIPPED_DIRECTORIES)
        for f in sorted(files):
            if f.endswith(TEXT):
                yield os.path.relpath(os.path.join(directory, f), root)


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    count = 0
    for path in sources(root):
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
            text = f.read()
        count += 1
        check_text(path, text)
        if path.endswith((".cu", ".cuh", ".h")) and not path.startswith("test/"):
            check_includes(root, path, without_comments(text, strings=False))
            check_code(path, without_comments(text))
    for finding in findings:
        print(finding)
    print(f"lint: {count} files, {len(findings)} finding{'s' if len(findings) != 1 else ''}")
    return 1 if findings or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
