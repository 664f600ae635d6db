#!/usr/bin/env python3
"""gpu_check.py -- `make gpu-check`: checks the CUDA build on the GPU of this machine and measures it.

    dev/gpu_check.py [--again STAGE]... [--only STAGE,STAGE] [--results DIR] [--minutes N]
    dev/gpu_check.py --build ARCH [--only trainer]      compiles for sm_90a, say, where no GPU need be

Stages, in order, each with a limit of time; those that tell most about a new machine come first:
  device     GPU, driver, compiler, headers; without the headers nothing else starts
  trainer    the bf16 trainer of GPT-2, with two encodings only, which takes a fraction of the time
  step       124M with 65,536 tokens a step, drawn as frequent as words are: tokens/s, and the time of each kernel
             beside scripts/roofline.py's prediction
  repeat     one seed several times: the same bits
  build      trainers for the CPU and for CUDA (bf16, FP32); kernel tests; benchmark
  kernels    every kernel test of test/simt on the hardware, each in a process of its own
  losses     20 steps on the CPU and in CUDA, FP32 and bf16: GPT-2 with every encoding; BERT with some of them, on
             masked tokens and on pairs
  torch      the step of 124M in PyTorch with torch.compile at the same batch, CABLE in its two ways
  bench      attention forward and backward with each encoding, and a cuBLASLt product for comparison
  train      tokens/s and memory of GPT-2 tiny, 124M, 350M and of BERT base
  eval       a randomly initialised 124M cable model at lengths up to 131,072
  pytorch    shapes of bench in PyTorch, if python3 has it
  exchange   NCCL between a GPU and itself, started, ended and aborted
  ranks      one GPU against two, if there are two: the same bits
  sanitizer  racecheck of the tensor-core attention; all of compute-sanitizer's tools on the short kernel tests

It compiles by itself, without make, by the flags that the Makefile names. What --build has compiled is used wherever
build/gpu_check is carried together with the same sources; its CPU programs need AVX2, and NCCL only where NCCL_DIR was
set.

Each result is written to dev/results/<gpu>_<commit>.json (replaced atomically) as soon as it is obtained, and the .md
after each stage. A rerun does only what is missing; a failed result stays until --again. What the time did not suffice
for is unfinished, never failed: a stage at its cap, the stages that --minutes left no time for, a program that its cap
ended. A rerun tries it again.
Exit codes: 0 all passed, 1 a mismatch or a failure, 2 no GPU, no nvcc or no headers, 3 nothing failed but something is
unfinished, 130 interrupted.

A loss may differ from the CPU's by MULTIPLE times the largest relative difference that an H100 had (DIFFERENCES).
"""
import argparse
import array
import fcntl
import functools
import glob
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpu_stages import Check, Failed, Report, Runner, Unfinished  # noqa: E402
from ptxas_budget import console, makefile  # noqa: E402

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
WORK = os.path.join("build", "gpu_check")           # relative to the root, where every command runs
HEADERS = os.path.join("build", "gpu_headers")      # written by dev/gpu_pack.sh

MODEL, T, B, STEPS = "2,2,128", 150, 4, 20          # heads of 64, three tiles of 64 tokens, the last one not full
# of losses from the CPU's, relative: in the first step, and at most in all of them. Measured at 1ee49cd on an H100
# (dev/results/NVIDIA-H100-80GB-HBM3_1ee49cdc8c27.json); where it found less than float32 resolves, 2^-24.
DIFFERENCES = {"gpt2": {"fp32": (6.0e-8, 3.3e-7), "bf16": (3.4e-5, 3.6e-4)},
               "bert": {"fp32": (6.0e-8, 2.0e-7), "bf16": (5.8e-4, 1.2e-3)},
               "pairs": {"fp32": (1.4e-7, 1.5e-7), "bf16": (6.7e-5, 1.3e-3)}}
MULTIPLE = 4


class NoDevice(Exception):
    """there is no GPU, no driver or no compiler"""


# ---------------------------------------------------------------------------------------------------------
# device

def smi(runner, fields):
    p = runner.which("nvidia-smi")
    if not p:
        raise NoDevice("nvidia-smi is not there: install the NVIDIA driver")
    r = runner.run([p, "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"], 20)
    line = r.output.strip().split("\n")[0]
    if r.code != 0 or line.count(",") != len(fields) - 1:
        raise NoDevice("nvidia-smi finds no GPU: " + r.tail(3))
    return dict(zip(fields, (x.strip() for x in line.split(","))))


def device(stage):
    fields = ["name", "driver_version", "compute_cap", "memory.total", "clocks.max.sm", "power.limit"]

    def compiler():
        r = stage.run([nvcc(stage.runner), "--version"], 20)
        return {"version": r.output.strip().split("\n")[-2:]}

    def headers():
        """the two libraries that are not part of a CUDA toolkit"""
        includes = "#include <xxhash.h>\n#include <nlohmann/json.hpp>\n"
        console.write_whole(os.path.join(ROOT, path("headers.cu")), includes)
        r = stage.run([nvcc(stage.runner), "-E", path("headers.cu"), "-o", os.devnull], 60, fine=None)
        if r.code != 0:
            raise Failed("expected the headers xxhash.h and nlohmann/json.hpp: install libxxhash-dev and "
                         "nlohmann-json3-dev, or run dev/gpu_pack.sh where they are and carry build/gpu_headers along"
                         f"\n{r.tail(4)}")
        return {}
    stage.items.pop("headers", None)                    # they may be there by now
    stage.do_all([("nvidia-smi", smi, stage.runner, fields), ("nvcc", compiler), ("headers", headers)])


def nvcc(runner):
    p = os.environ.get("NVCC") or runner.which("nvcc")
    if not p:
        raise NoDevice("nvcc is not there: install the CUDA toolkit or set NVCC=path")
    return p


def architecture(runner):
    if os.environ.get("ARCH"):
        return os.environ["ARCH"]
    major, minor = smi(runner, ["compute_cap"])["compute_cap"].split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


# ---------------------------------------------------------------------------------------------------------
# build

def path(*names):
    return os.path.join(WORK, *names)


TRAINERS = ("gpt2", "bert")
CPU = {t: path("cpu", "train_" + t) for t in TRAINERS}
CUDA = {t: path("bf16", f"train_{t}cu") for t in TRAINERS}
CUDA_FP32 = {t: path("fp32", f"train_{t}cu") for t in TRAINERS}
FIRST_TRAINER = path("first", "train_gpt2cu")           # with none and cable only
COMM_PROGRAM = path("comm_program")


def kernel_tests():
    """{name: source}, without test_flash_ampere.cu, which is for the emulator"""
    found = {}
    for source in sorted(glob.glob(os.path.join(ROOT, "test", "simt", "test_*.cu"))):
        if source.endswith("_ampere.cu"):
            continue
        found[os.path.basename(source)[len("test_"):-len(".cu")]] = os.path.relpath(source, ROOT)
    return found


def nccl(runner):
    """the compiler's flags for NCCL: NCCL_DIR's, else those of the package that PyTorch brings; none without it"""
    find = "import importlib.util as u; print(*u.find_spec('nvidia.nccl').submodule_search_locations)"
    directory = os.environ.get("NCCL_DIR")
    if not directory:
        found = runner.run([runner.which("python3") or sys.executable, "-c", find], 20)
        directory = found.output.strip() if found.code == 0 else ""
    library = next(iter(sorted(glob.glob(os.path.join(directory, "lib", "libnccl.so*")))), None)
    if not directory or not library or not os.path.exists(os.path.join(directory, "include", "nccl.h")):
        return []
    return ["-DUSE_NCCL", "-I" + os.path.join(directory, "include"), "-Xlinker", library,
            "-Xlinker", "-rpath=" + os.path.dirname(library)]


def cuda_line(runner, source, product, *more):
    """nvcc's line, with the flags of the product; -arch=sm_90a would compile twice, for compute_90, too"""
    arch = architecture(runner)
    code = ["-gencode", f"arch={arch.replace('sm', 'compute')},code={arch}"]
    return [nvcc(runner), *makefile("NVCC_CODE"), *code, "-Xcompiler", "-fopenmp", "-I.", source, "-o", product, *more,
            "-lcublasLt", "-lcublas", "-Xlinker", "-s"]


def cpu_line(runner, trainer, product):
    compiler = os.environ.get("CXX") or runner.which("g++") or runner.which("clang++") or "g++"
    flags = [flag.replace("native", os.environ.get("MARCH", "native")) for flag in makefile("OPT")]
    return [compiler, "-std=c++17", "-fopenmp", *flags, "-ffp-contract=off", "-I.", "-x", "c++", f"train_{trainer}.cu",
            "-o", product, "-lpthread", "-s"]


def product_of(command):
    return command[command.index("-o") + 1]


def stamp(product):
    """the file that says what a product was built from: a copied tree may have other times"""
    return os.path.join(ROOT, product + ".sources")


def up_to_date(product, origin):
    try:
        with open(stamp(product)) as f:
            return f.read() == origin and os.path.exists(os.path.join(ROOT, product))
    except OSError:
        return False


def first_program(runner):
    """[(name, command)]"""
    return [("GPT-2, CUDA bf16, two encodings", cuda_line(runner, "train_gpt2.cu", FIRST_TRAINER, "-DFEW_POSITIONS"))]


def programs(runner):
    """[(name, command)], the longest first"""
    line, communicator = functools.partial(cuda_line, runner), nccl(runner)
    work = []
    for t in TRAINERS:
        source = f"train_{t}.cu"
        work += [(f"{t}, CUDA bf16", line(source, CUDA[t], *communicator)),
                 (f"{t}, CUDA FP32", line(source, CUDA_FP32[t], "-DPRECISION_FP32")),
                 (f"{t}, CPU", cpu_line(runner, t, CPU[t]))]
    tests = sorted(kernel_tests().items(), key=lambda item: (not item[0].startswith("flash"), item))
    work += [("kernel test " + name, line(source, path("test_" + name), "-Itest/simt")) for name, source in tests]
    return work + [("bench_causal", line("dev/gpu_bench.cu", path("bench_causal"), "-DCAUSAL=1")),
                   ("bench_full", line("dev/gpu_bench.cu", path("bench_full"), "-DCAUSAL=0")),
                   ("the program of test/ranks", line("test/ranks/comm_program.cu", COMM_PROGRAM, *communicator))]


# stage: what it compiles. What they made may be gone: each run looks
BUILDS = {"trainer": first_program, "build": programs}


def build(stage):
    """what was built from the same sources for the same architecture stays"""
    origin = f"{stage.check.report.data['sources']} {architecture(stage.runner)}"
    work = BUILDS[stage.name](stage.runner)

    def compile_one(command):
        product = product_of(command)
        os.makedirs(os.path.dirname(os.path.join(ROOT, product)), exist_ok=True)
        stage.run(command, 3000)
        if not os.path.exists(os.path.join(ROOT, product)):
            raise Failed(f"{' '.join(command)}: exit code 0, but {product} is not there")
        console.write_whole(stamp(product), origin)
        return {"product": product}
    for name, command in work:
        if not up_to_date(product_of(command), origin):
            stage.items.pop(name, None)
        elif not stage.items.get(name, {}).get("ok"):       # built elsewhere, and carried here
            stage.items[name] = {"product": product_of(command), "ok": True, "seconds": 0.0}
    stage.do_all([(name, compile_one, command) for name, command in work], workers=max(2, os.cpu_count() or 2))


def built(product):
    if not os.path.exists(os.path.join(ROOT, product)):
        raise Unfinished(f"{product} was not built")
    return product


# ---------------------------------------------------------------------------------------------------------
# kernels, sanitizer

def read_test(report, result):
    """the test of a binary's --json file; Failed with what it printed if it died before it wrote that"""
    try:
        with open(os.path.join(ROOT, report)) as f:
            test, = json.load(f)
        return {"status": test["status"], "ms": float(test["ms"]), "info": test["info"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise Failed(f"exit code {result.code} and no result in {report}; it printed:\n{result.tail()}")


TEST_S = 40                         # the cap of a test
def in_order(names):
    """the names of kernel tests: what attention builds on, then attention"""
    return sorted(names, key=lambda name: (name.startswith("flash"), name))


def kernels(stage):
    """A process for each test: all cores work, one test at its cap ends no other, and each result is kept at once."""
    two_threads = {"OMP_NUM_THREADS": "2"}              # of an oracle
    found, work = kernel_tests(), []
    if not found:
        raise Failed("test/simt/test_*.cu: no kernel test found")

    def test(binary, name):
        report = path("tests", re.sub(r"\W+", "_", f"{binary} {name}") + ".json")
        os.makedirs(os.path.join(ROOT, path("tests")), exist_ok=True)
        if os.path.exists(os.path.join(ROOT, report)):
            os.remove(os.path.join(ROOT, report))
        result = stage.run([built(path("test_" + binary)), "--json", report, name], TEST_S, fine=None, env=two_threads)
        record = read_test(report, result)
        record["ok"] = result.code == 0 and record["status"] in ("ok", "skipped")
        if not record["ok"]:
            record["error"] = f"exit code {result.code}; {record['status']}: {record['info']}\n{result.tail(25)}"
        return record

    def names(binary):
        listed = stage.run([built(path("test_" + binary)), "--list"], 10).output.split("\n")
        if not listed[0]:
            raise Failed("expected --list to name tests, got none")
        work.extend((f"{binary}: {name}", test, binary, name) for name in listed if name)
        return {"status": "ok", "tests": len([name for name in listed if name])}
    for binary in in_order(found):
        stage.items.pop(binary, None)
        stage.do(binary, names, binary)
    stage.do_all(work, workers=max(2, min(8, (os.cpu_count() or 2) // 2)))


SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")        # in this order: time may not suffice for all
SHORT_MS = 1000                     # a short test takes at most this long, most of it the start of CUDA
SANITIZED_S = 12                    # the cap of a test under a sanitizer
# tests that launch real kernels
SANITIZED = {"flash_forward": "flash forward: a span leaves out exactly its tiles",
             "flash_backward": "flash backward: a span leaves out exactly its tiles"}


def sanitizer(stage):
    tool = stage.runner.which("compute-sanitizer")
    if not tool:
        stage.record["note"] = "compute-sanitizer is not installed"
        return

    def check(kind, name):
        """runs a binary's test of SANITIZED, else the longest of the short ones, or the shortest if none is short"""
        known = stage.check.report.stage("kernels")["items"].items()
        tests = [dict(r, name=key[len(name) + 2:]) for key, r in known
                 if key.startswith(name + ": ") and r.get("status") == "ok"]
        if not tests:
            return {"test": None}
        short = [t for t in tests if t["ms"] <= SHORT_MS]
        test = max(short, key=lambda t: t["ms"]) if short else min(tests, key=lambda t: t["ms"])
        test = next((t for t in tests if t["name"] == SANITIZED.get(name)), test)
        options = ["--report-api-errors", "no"] if kind == "memcheck" else []       # some tests provoke them
        command = [tool, "--tool", kind, *options, "--error-exitcode", "9", built(path("test_" + name)), test["name"]]
        result = stage.run(command, SANITIZED_S, slow_ok=True, fine=None)
        if result.code != 0 and not result.timed_out:
            if "Device not supported" in result.output:     # containers may lack the driver's interface for debuggers
                return {"test": None, "note": "compute-sanitizer: Device not supported"}
            raise Failed(f"{kind} of {name}, {test['name']}: exit code {result.code}\n{result.tail()}")
        return {"test": test["name"], "finished": not result.timed_out}
    names = in_order(kernel_tests())
    pairs = [("racecheck", name) for name in names if name.startswith("flash")]
    pairs += [(kind, name) for kind in SANITIZERS for name in names if (kind, name) not in pairs]
    stage.do_all([(f"{kind} {name}", check, kind, name) for kind, name in pairs])


# ---------------------------------------------------------------------------------------------------------
# losses

def encodings(text):
    names = console.encodings(text)
    if not names:
        raise Failed("expected a list of positional encodings in train_gpt2 --help, got none")
    return names


@functools.lru_cache(None)
def write_data():
    """writes the sources as text and as groups of pieces of it, and drawn tokens of GPT-2's and BERT's vocabularies"""
    os.makedirs(os.path.join(ROOT, WORK), exist_ok=True)
    sources = sorted(glob.glob(os.path.join(ROOT, "llmc", "**", "*.*h"), recursive=True))
    sources.append(os.path.join(ROOT, "train_gpt2.cu"))
    text = b"".join(open(name, "rb").read() for name in sources)
    with open(os.path.join(ROOT, path("text.txt")), "wb") as f:
        f.write(text)
    # a query, a piece that begins like it, another piece: from a few bytes to more than T
    words, draw, n = text.split(), random.Random(1), 1000000

    def piece(k):
        return b" ".join(words[k:k + draw.randint(1, 40)])
    with open(os.path.join(ROOT, path("pairs.txt")), "wb") as f:
        for k in range(0, min(len(words), 40000) - 40, 97):
            f.write(b"\t".join((piece(k), piece(k), piece(draw.randrange(len(words) - 40)))) + b"\n")
    for name, first, vocab, end in (("tokens.bin", 0, 50257, 50256), ("bert_tokens.bin", 1000, 30522, 102)):
        tokens = array.array("H", (first + t for t in frequent_tokens(n, vocab - first)))
        with open(os.path.join(ROOT, path(name)), "wb") as f:
            f.write(struct.pack("<256i", 20240520, 1, n, vocab, end, *[0] * 251) + tokens.tobytes())


def frequent_tokens(n, count, seed=1):
    """n numbers below count, as frequent as words are (Zipf and Mandelbrot: 1 / (rank + 1.7), which gives the first of
    50,257 the 3.8 % that " the" has); neighbours in rank are apart as numbers"""
    ranks = random.Random(seed).choices(range(count), cum_weights=list(itertools.accumulate(
        1 / (rank + 2.7) for rank in range(count))), k=n)
    return [rank * 7919 % count for rank in ranks]


def enlarge(source, target):
    """Copies a checkpoint for --load, with every matrix six times as large. Then queries and keys have size 1,
    attention is not just a mean of all values, and no gradient is small compared to what bf16 does to it."""
    with open(os.path.join(source, "model.safetensors"), "rb") as f:
        data = f.read()
    at = 8 + struct.unpack("<Q", data[:8])[0]
    parts = [data[:at]]
    tensors = {name: t for name, t in json.loads(data[8:at]).items() if name != "__metadata__"}
    for name, t in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        if t["dtype"] != "F32":
            raise Failed(f"{source}: {name}: expected a float32 tensor, got {t['dtype']}")
        first, end = t["data_offsets"]
        values = array.array("f", data[at + first:at + end])
        parts.append(array.array("f", [6 * x for x in values]) if len(t["shape"]) == 2 else values)
    os.makedirs(target, exist_ok=True)
    shutil.copy(os.path.join(source, "config.json"), target)
    with open(os.path.join(target, "model.safetensors"), "wb") as f:
        f.write(b"".join(parts))


def records(directory, kind):
    """of a run's log"""
    try:
        return console.read_log(os.path.join(ROOT, directory), kind, ended=True)
    except console.BadInput as e:
        raise Failed(str(e))


def losses_of(directory):
    losses = [r["loss"] for r in records(directory, "train")]
    if len(losses) != STEPS or None in losses:
        raise Failed(f"{directory}/log.jsonl: expected {STEPS} finite losses, got losses {losses}")
    return losses


def train(stage, binary, out, flags, cap, **more):
    shutil.rmtree(os.path.join(ROOT, out), ignore_errors=True)
    samples = ["--sample_every", "0"] if "gpt2" in os.path.basename(binary) else []
    return stage.run([built(binary), "--val_every", "0", *samples, "--out", out, *flags], cap, **more)


BERT_ENCODINGS = ("none", "cable", "alibi", "t5", "rope")


def cases(names):
    """{name: (trainer, encoding, flags, group of DIFFERENCES)}"""
    found = {pos: ("gpt2", pos, ["--lr", "5e-4"], "gpt2") for pos in names}
    if "cable_signed" in found:     # it has a kink where two tokens have the same S: at 5e-4 two CPU builds, too, part
        found["cable_signed"] = ("gpt2", "cable_signed", ["--lr", "2.5e-4"], "gpt2")
    found.update({"BERT " + pos: ("bert", pos, ["--lr", "5e-4"], "bert") for pos in BERT_ENCODINGS if pos in names})
    pairs = ["--lr", "1e-4", "--tau", "0.5", "--pairs", path("pairs.txt")]
    found["BERT cable, pairs"] = ("bert", "cable", pairs, "pairs")
    return found


def losses(stage):
    write_data()
    known, text = cases(encodings(stage.run([built(CPU["gpt2"]), "--help"], 10).output)), path("text.txt")
    data = ["--train_files", text, "--val_files", text, "--T", str(T), "--B", str(B), "--threads", "2"]

    def compare(name):
        """the losses on the CPU and in CUDA, FP32 and bf16, from the same initial weights"""
        (trainer, pos, flags, group), here = known[name], path("losses", re.sub(r"\W+", "_", name))
        initial = ["--model", MODEL, "--pos", pos, "--steps", "1", "--lr", "0", "--checkpoint_every", "1"]
        train(stage, CPU[trainer], here + "_new", [*data, *initial], 30)
        start = here + "_new/step_00000001"
        if trainer == "bert":
            enlarge(os.path.join(ROOT, start), os.path.join(ROOT, here + "_start"))
            start = here + "_start"
        record, wrong = {"losses": {}}, []
        for kind, binary, env in (("cpu", CPU, None), ("fp32", CUDA_FP32, {"NVIDIA_TF32_OVERRIDE": "0"}),
                                  ("bf16", CUDA, None)):
            out = f"{here}_{kind}"
            train(stage, binary[trainer], out, [*data, *flags, "--load", start, "--steps", str(STEPS)], 30, env=env)
            found = record["losses"][kind] = losses_of(out)
            if kind == "cpu":
                continue
            first, later = (MULTIPLE * x for x in DIFFERENCES[group][kind])
            apart = [abs(x - y) / abs(y) for x, y in zip(found, record["losses"]["cpu"])]
            step, bound = max(enumerate([first] + (STEPS - 1) * [later]), key=lambda at: apart[at[0]] / at[1])
            record[kind] = {"step": step, "difference": apart[step], "bound": bound}
            if apart[step] > bound:
                wrong.append(f"{kind}: at step {step} the loss differs from the CPU's by {apart[step]:.3g}, "
                             f"expected at most {bound:.3g}")
        return dict(record, ok=False, error="; ".join(wrong)) if wrong else record
    # Nothing is timed here, and a program takes longer to start than to do its steps: several share the GPU.
    stage.do_all([(name, compare, name) for name in known], workers=max(1, min(8, (os.cpu_count() or 2) // 2)))


# ---------------------------------------------------------------------------------------------------------
# bench, train, eval, pytorch

def json_lines(stage, command, cap):
    """runs a program that prints one JSON object per result and keeps each, by its key, as it arrives"""
    def keep(line, _):
        try:
            record = json.loads(line)
            key = record.pop("key")
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        record.setdefault("ok", True)
        stage.put(key, record)
        stage.done += 1
        stage.check.progress(stage, key, record)
    done = path(stage.name + "_done.txt")
    console.write_whole(os.path.join(ROOT, done), "".join(key + "\n" for key in stage.items))
    stage.run([*command, "--skip", done], cap, on_line=keep)


def bench(stage):
    for name in ("bench_causal", "bench_full"):
        json_lines(stage, [built(path(name))], 90)


# name, trainer, --model, shard, T, sequences per batch, encodings
SIZES = [("tiny", "gpt2", "tiny", "tokens.bin", 1024, 32, ("none", "cable", "alibi", "rope")),
         ("124M", "gpt2", "small", "tokens.bin", 1024, 16, ("none", "cable", "alibi", "rope")),
         ("BERT base", "bert", "base", "bert_tokens.bin", 512, 32, ("none", "cable", "alibi", "learned")),
         ("350M", "gpt2", "medium", "tokens.bin", 1024, 8, ("none", "cable", "alibi", "rope"))]
TRAIN_STEPS, WARM_UP = 14, 4
OUT_OF_MEMORY = 4                                       # llmc/base/common.h: EXIT_OUT_OF_MEMORY


STEP = ("124M, 65,536 tokens", "gpt2", "small", "tokens.bin", 1024, 64, ("none", "cable"))
PROFILED = 10                                           # the step of --profile


def end_of_run(stage, binary, out, flags):
    """(its losses, the SHA-256 of its weights), and what it printed, after STEPS steps"""
    result = train(stage, binary, out, [*flags, "--steps", str(STEPS), "--checkpoint_every", str(STEPS)], 30)
    with open(os.path.join(ROOT, out, f"step_{STEPS:08d}", "model.safetensors"), "rb") as f:
        return (losses_of(out), hashlib.sha256(f.read()).hexdigest()), result.output


def same_bits(what, expected, found):
    """of two ends"""
    if found != expected:
        apart = [step for step, (a, b) in enumerate(zip(expected[0], found[0])) if a != b]
        where = f"the losses differ from step {apart[0]}" if apart else "the losses agree, the weights differ"
        raise Failed(f"{what}: expected the same bits, {where}")


def repeat(stage):
    """one seed, several runs: the same losses and weights, bit for bit"""
    write_data()
    tokens = path("tokens.bin")

    def run(pos, name, recompute):
        out = path("repeat", f"{pos}_{name}")
        data = ["--train_files", tokens, "--val_files", tokens, "--model", "4,6,384", "--B", "16", "--pos", pos]
        return end_of_run(stage, FIRST_TRAINER, out, [*data, "--recompute", recompute])[0]

    def compare(pos):
        first = run(pos, "first", "0")
        for name, recompute in (("again", "0"), ("recomputed", "2")):
            same_bits(f"{pos}, {name}", first, run(pos, name, recompute))
        return {"losses": first[0], "weights": first[1]}
    stage.do_all([(pos, compare, pos) for pos in ("none", "cable")])


def batch_of_step(check):
    return check.report.stage("step")["items"].get(f"{STEP[0]} cable", {}).get("B", STEP[5])


def step(stage):
    """one step of 124M, kernel by kernel"""
    measure_training(stage, [STEP], {"gpt2": FIRST_TRAINER})

    def profile():
        B, out, printed = batch_of_step(stage.check), path("step", "profile"), path("profile.txt")
        tokens = path("tokens.bin")
        arguments = ["--train_files", tokens, "--val_files", tokens, "--model", "small", "--pos", "cable",
                     "--T", "1024", "--B", str(B), "--steps", str(PROFILED + 1), "--profile", str(PROFILED)]
        result = train(stage, FIRST_TRAINER, out, arguments, 40)
        if "profile of step " not in result.output:
            raise Failed(f"expected a table from --profile {PROFILED}, got none\n{result.tail()}")
        console.write_whole(os.path.join(ROOT, printed), result.output)
        name = stage.check.report.data["gpu"]
        gpu = next((g for g in ("A100", "H100", "H200", "B200", "4090") if g in name), "H100")
        command = [stage.runner.which("python3") or sys.executable, "scripts/roofline.py", "--model", "small", "--T",
                   "1024", "--B", str(B), "--pos", "cable", "--gpu", gpu, "--measured", printed]
        beside = stage.run(command, 20, fine=None)
        return {"predicted_for": gpu, "lines": result.output.rpartition("profile of step ")[2].split("\n")[:80],
                "beside": beside.output.rstrip().split("\n")[-90:]}
    stage.do_all([("profile", profile)])


def torch_step(stage):
    write_data()
    if torch_version(stage):
        python = stage.runner.which("python3") or sys.executable
        json_lines(stage, [python, "dev/gpu_bench_pytorch.py", "--step", str(batch_of_step(stage.check)), "--tokens",
                           path("tokens.bin")], 260)


def training(stage):
    measure_training(stage, SIZES, CUDA)


def measure_training(stage, sizes, programs):
    write_data()
    batches = {}

    def measure(size, trainer, model, shard, T, most, pos):
        tokens, b = path(shard), batches.setdefault(size, most)
        out = path(stage.name, re.sub("[^A-Za-z0-9]+", "_", f"{size}_{pos}"))
        while True:
            arguments = ["--train_files", tokens, "--val_files", tokens, "--model", model, "--pos", pos,
                         "--T", str(T), "--B", str(b), "--steps", str(TRAIN_STEPS)]
            result = train(stage, programs[trainer], out, arguments, 40, fine=(0, OUT_OF_MEMORY))
            if result.code == 0:
                break
            if b == 1:
                raise Failed(f"out of memory with one sequence\n{result.tail(4)}")
            b = batches[size] = b // 2
        steps = records(out, "train")[WARM_UP:]
        if len(steps) != TRAIN_STEPS - WARM_UP:
            raise Failed(f"{out}/log.jsonl: expected {TRAIN_STEPS} steps, got {len(steps) + WARM_UP}")
        ms = statistics.median(r["ms"] for r in steps)
        record = {"size": size, "pos": pos, "B": b, "T": T, "ms": ms, "tokens_per_s": 1000 * b * T / ms,
                  "peak_mib": round(max(r["mem"] for r in steps) / 2 ** 20)}    # polling nvidia-smi slows the steps
        mfu = [r["mfu"] for r in steps if r.get("mfu")]
        return dict(record, mfu=statistics.median(mfu)) if mfu else record
    stage.do_all([(f"{size} {pos}", measure, size, *shape, pos)
                  for size, *shape, encodings in sizes for pos in encodings])


LENGTHS, EVALUATED = (1024, 16384, 32768, 65536, 131072), 131072


def evaluation(stage):
    """every length over the same 131,072 tokens; the time of the first one includes the start and is not reported"""
    write_data()
    tokens = path("tokens.bin")

    def evaluate(out, lengths, count, skipping, **more):
        arguments = ["--train_files", tokens, "--val_files", tokens, "--model", "small", "--pos", "cable",
                     "--T", "1024", "--B", "1", "--steps", "1", "--lr", "0", "--seed", "0",
                     "--eval_tokens", str(count), "--tile_skip", skipping,
                     "--eval_lengths", ",".join(map(str, lengths))]
        train(stage, CUDA["gpt2"], out, arguments, 35, **more)
        found = {r["T"]: r.get("loss") for r in records(out, "extrapolation")}
        if list(found) != list(lengths) or None in found.values():
            raise Failed(f"{out}/log.jsonl: expected one loss for each length of {list(lengths)}, got {found}")
        return found

    def measure():
        rows, live = [], []

        def row(line, seconds):
            if re.match(r"\s*\d+ +\d+ +\d+ +\d+ +[\d.]+ +[\d.]+\b", line):
                rows.append((int(line.split()[0]), seconds))
            elif rows and "tiles live" in line:
                live.append(f"T = {rows[-1][0]}: {line.strip()}")
        found = evaluate(path("eval"), LENGTHS, EVALUATED, "default", on_line=row)
        if [t for t, _ in rows] != list(LENGTHS):
            raise Failed(f"expected a table of the lengths {list(LENGTHS)}, got {[t for t, _ in rows]}")
        windows = {str(t): (seconds - rows[i][1]) * t / EVALUATED for i, (t, seconds) in enumerate(rows[1:])}
        return {"seconds_per_window": windows, "ratio": windows["131072"] / windows["16384"], "live": live,
                "losses": {str(t): x for t, x in found.items()}}

    def exact():
        """skipping in its exact mode must not change a bit"""
        a, b = (evaluate(path("eval_" + mode), (16384,), 32768, mode)[16384] for mode in ("exact", "off"))
        if a != b:
            raise Failed(f"T = 16,384: expected the same bits, got loss {a!r} with --tile_skip exact, {b!r} with off")
        return {"loss": a}
    stage.do_all([("124M cable", measure), ("exact skipping", exact)])


def torch_version(stage):
    """of a PyTorch that can be compared with, else None with a note"""
    python = stage.runner.which("python3") or sys.executable
    probe = "import torch, torch.nn.attention; assert torch.cuda.is_available(); print(torch.__version__)"
    found = stage.run([python, "-c", probe], 75, fine=None)         # PyTorch may be slow to load
    if found.code != 0:
        stage.record["note"] = "python3 has no torch of version 2.3 or newer that sees the GPU"
        return None
    stage.record["note"] = "torch " + found.output.strip().split("\n")[-1]
    return stage.record["note"]


def pytorch(stage):
    if torch_version(stage):
        json_lines(stage, [stage.runner.which("python3") or sys.executable, "dev/gpu_bench_pytorch.py"], 75)


def exchange(stage):
    """test/ranks/comm_program.cu on one GPU"""
    def run():
        result = stage.run([built(COMM_PROGRAM), "self"], 10, fine=None)
        if "built without NCCL" in result.output:
            return {"note": "built without NCCL"}
        if result.code != 0 or not re.search("^ok$", result.output, re.M):
            raise Failed(f"expected ok, got exit code {result.code}\n{result.tail()}")
        return {}
    stage.do_all([("NCCL, a GPU and itself", run)])


def ranks(stage):
    """one rank against two, each with its GPU: the same losses and weights, bit for bit"""
    query = [stage.runner.which("nvidia-smi"), "--query-gpu=name", "--format=csv,noheader"]
    gpus = stage.run(query, 10).output.strip().split("\n")
    if len(gpus) < 2:
        stage.record["note"] = "needs two GPUs, found one"
        return
    if not nccl(stage.runner):
        stage.record["note"] = "built without NCCL"
        return
    write_data()

    def run(trainer, count):
        text = path("text.txt")
        return end_of_run(stage, CUDA[trainer], path(f"ranks_{trainer}_{count}"),
                          ["--train_files", text, "--val_files", text, "--model", MODEL, "--T", str(T), "--B", str(B),
                           "--total_batch", str(2 * B * T), "--gpus", str(count)])

    def compare(trainer):
        (one, _), (two, printed) = run(trainer, 1), run(trainer, 2)
        same_bits(f"{trainer}, two ranks", one, two)
        return {"losses": one[0], "nccl": "NCCL" in printed}
    stage.do_all([(trainer, compare, trainer) for trainer in TRAINERS])


# name, function, cap in seconds; with a minute for `trainer` and three for `build`, on 16 cores, all of them fit into
# two visits of 9.5 minutes
STAGES = [("device", device, 30), ("trainer", build, 600), ("step", step, 90), ("repeat", repeat, 40),
          ("build", build, 1500), ("kernels", kernels, 110), ("losses", losses, 110), ("torch", torch_step, 140),
          ("bench", bench, 70), ("train", training, 50), ("eval", evaluation, 35), ("pytorch", pytorch, 60),
          ("exchange", exchange, 10), ("ranks", ranks, 20), ("sanitizer", sanitizer, 70)]
STAGE_NAMES = [s[0] for s in STAGES]


# ---------------------------------------------------------------------------------------------------------
# driver

def commit_and_sources(runner):
    """(the commit, with "-dirty" if files differ from it; a checksum of everything that the results depend on)"""
    commit = os.environ.get("COMMIT")                       # of a copy without .git, or with an older one
    if not commit:
        head = runner.run(["git", "rev-parse", "--short=12", "HEAD"], 10)
        commit = head.output.strip() if head.code == 0 else "nogit"
        status = runner.run(["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!dev/results"], 20)
        if head.code == 0 and status.output.strip():
            commit += "-dirty"
    total = hashlib.sha256()
    names = []
    for pattern in ("Makefile", "train_*.cu", "dev/gpu_*", "llmc/**/*", "test/simt/*", "test/ranks/comm_program.cu"):
        names += [os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, pattern), recursive=True)]
    for name in sorted(names):
        full = os.path.join(ROOT, name)
        if os.path.isfile(full) and "__pycache__" not in name:
            with open(full, "rb") as f:
                total.update(name.encode() + b"\0" + hashlib.sha256(f.read()).digest())
    return commit, total.hexdigest()[:16]


def check_of(options, runner, clock=time.monotonic):
    """the stages of the options, with the results that are there"""
    nvcc(runner)
    gpu = "for " + options.build if options.build else smi(runner, ["name"])["name"]
    report = Report(options.results, gpu, *commit_and_sources(runner), STAGE_NAMES)
    for name in options.again:
        report.data["stages"].pop(name, None)
    stages = [(name, work, 7200 if options.build else cap) for name, work, cap in STAGES if name in options.only]
    return Check(runner, report, stages, ("device", *BUILDS), options.minutes, clock)


def parse(arguments):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")                # noqa: E731
    p.add_argument("--again", action="extend", type=names, default=[], metavar="STAGE",
                   help="forget the results of these stages and run them again")
    p.add_argument("--only", action="extend", type=names, default=[], metavar="STAGE", help="run only these stages")
    p.add_argument("--results", help="directory of results [dev/results, with --build build/gpu_check]")
    p.add_argument("--minutes", type=float, default=0, help="end by then; run again to continue")
    p.add_argument("--build", metavar="ARCH", help="only compile, for this architecture, such as sm_90a")
    options = p.parse_args(arguments)
    stages = list(BUILDS) if options.build else STAGE_NAMES
    for name in options.again + options.only:
        if name not in stages:
            p.error(f"expected a stage among {', '.join(stages)}, got {name!r}")
    options.only = options.only or stages
    options.results = options.results or os.path.join(ROOT, WORK if options.build else "dev/results")
    return options


def main(arguments, runner=None):
    options = parse(arguments)
    runner = runner or Runner()
    headers = os.path.join(ROOT, HEADERS)
    if os.path.isdir(headers):
        os.environ["CPATH"] = os.pathsep.join([headers, *filter(None, [os.environ.get("CPATH")])])
    if options.build:                                   # NCCL of this machine's PyTorch may be elsewhere on the other
        os.environ.update(ARCH=options.build, MARCH="x86-64-v3", NCCL_DIR=os.environ.get("NCCL_DIR", os.devnull))
    os.makedirs(os.path.join(ROOT, WORK), exist_ok=True)
    with open(os.path.join(ROOT, WORK, "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"another gpu-check is running here ({WORK}/lock)", file=sys.stderr)
            return 2
        try:
            return check_of(options, runner).run()
        except NoDevice as e:
            print(f"gpu-check needs a GPU and nvcc: {e}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            runner.end_all()
            print("interrupted; all results so far are kept: run again to continue", file=sys.stderr)
            return 130


def interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))
