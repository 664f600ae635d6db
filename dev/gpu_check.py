#!/usr/bin/env python3
"""gpu_check.py -- `make gpu-check`: checks the CUDA build on the GPU of this machine and measures it.

    dev/gpu_check.py [--again STAGE]... [--only STAGE,STAGE] [--results DIR] [--minutes N]
    dev/gpu_check.py --list                    the stages

Stages, in order, each with a limit of time; those that tell most about a new machine come first:
  device     GPU, driver, compiler, headers; without the headers nothing else starts
  trainer    the bf16 trainer of GPT-2, with two encodings only, which takes a fraction of the time
  step       124M with 65,536 tokens a step, drawn as frequent as words are: tokens/s, and the time of each kernel
             beside scripts/roofline.py's prediction
  repeat     one seed several times: the same bits
  build      trainers for the CPU (two builds that round differently) and for CUDA (bf16, FP32); kernel tests; benchmark
  kernels    every kernel test of test/simt on the hardware, each in a process of its own
  losses     20 steps on the CPU and in CUDA, FP32 and bf16: GPT-2 with every encoding; BERT with some of them, on
             masked tokens and on pairs
  racecheck  compute-sanitizer's racecheck of the tensor-core attention
  torch      the step of 124M in PyTorch with torch.compile at the same batch, CABLE in its two ways
  bench      attention forward and backward with each encoding, and a cuBLASLt product for comparison
  train      tokens/s and memory of GPT-2 tiny, 124M, 350M and of BERT base
  eval       a randomly initialised 124M cable model at lengths up to 131,072
  pytorch    shapes of bench in PyTorch, if python3 has it
  exchange   NCCL between a GPU and itself, started, ended and aborted
  ranks      one GPU against two, if there are two: the same bits
  sanitizer  memcheck, racecheck, synccheck and initcheck of the short kernel tests

It compiles by itself, without make, by the flags that the Makefile names.

Each result is written to dev/results/<gpu>_<commit>.json (replaced atomically) as soon as it is obtained, and the .md
after each stage. A rerun does only what is missing; a failed result stays until --again. What the time did not suffice
for is unfinished, never failed: a stage at its cap, the stages that --minutes left no time for, a program that its cap
ended. A rerun tries it again.
Exit codes: 0 all passed, 1 a mismatch or a failure, 2 no GPU, no nvcc or no headers, 3 nothing failed but something is
unfinished, 130 interrupted.

An FP32 loss may differ from the CPU's by FP32_MULTIPLE times the difference between two CPU builds that round
differently (no FMA, another vector width, another order of sums). A bf16 loss may differ by BF16_MULTIPLE times what
rounding the initial weights to bf16 changes on the CPU. Both errors are measured in the same run, from the same initial
weights, for each step, so that early steps, in which errors have not grown yet, have a tighter bound.
"""
import argparse
import array
import concurrent.futures
import contextlib
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
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpu_report import markdown  # noqa: E402
from ptxas_budget import console, makefile  # noqa: E402

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
FORMAT = "gpu-check 1"
WORK = os.path.join("build", "gpu_check")           # relative to the root, where every command runs
HEADERS = os.path.join("build", "gpu_headers")      # written by dev/gpu_pack.sh

MODEL, T, B, STEPS = "2,2,128", 150, 4, 20          # heads of 64, three tiles of 64 tokens, the last one not full
FP32_MULTIPLE, FP32_MOST = 30, 1e-3                 # with a bound above MOST the measurement has failed
BF16_MULTIPLE, BF16_MOST = 8, 5e-2


class Failed(Exception):
    """one result is bad; the stage continues with the next"""


class Unfinished(Failed):
    """a result whose program was not built or reached its own cap; a rerun tries it again"""


class OutOfTime(Exception):
    """the stage has reached its cap; a rerun does what is missing"""


def without_root(error):
    """what it says, with paths that begin in this repository"""
    return str(error).replace(ROOT + os.sep, "")


class NoDevice(Exception):
    """there is no GPU, no driver or no compiler"""


class Result:
    def __init__(self, code, output, seconds=0.0, timed_out=False, beside=""):
        self.code, self.output, self.seconds, self.timed_out, self.beside = code, output, seconds, timed_out, beside

    def tail(self, lines=15):
        return "\n".join(self.output.rstrip().split("\n")[-lines:])


class Runner:
    """The only place that starts programs. A program that reaches its cap is ended together with all its children."""

    def __init__(self):
        self.live, self.lock = set(), threading.Lock()

    def which(self, name):
        return shutil.which(name) or next((p for p in glob.glob("/usr/local/cuda/bin/" + name)), None)

    def start(self, command, env=None):
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, **(env or {})), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True,
                                   errors="replace")
        with self.lock:
            self.live.add(process)
        return process

    def kill(self, process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end(self, process):
        self.kill(process)
        process.wait()
        with self.lock:
            self.live.discard(process)

    def end_all(self):
        with self.lock:
            for process in self.live:
                self.kill(process)

    def run(self, command, cap, on_line=None, beside=None, env=None):
        """on_line(text, seconds) gets each line as it arrives; the command `beside` runs as long as this one does"""
        began, output, late, companion = time.monotonic(), [], threading.Event(), None
        try:
            process = self.start(command, env)
        except OSError as e:
            return Result(127, f"{command[0]}: {e.strerror}")
        with contextlib.suppress(OSError):                  # then its output is empty
            companion = self.start(beside) if beside else None
        timer = threading.Timer(cap, lambda: (late.set(), self.kill(process)))
        timer.start()
        try:
            for line in process.stdout:
                output.append(line)
                if on_line:
                    on_line(line.rstrip("\n"), time.monotonic() - began)
            code = process.wait()
        finally:
            timer.cancel()
            for program in filter(None, (process, companion)):
                self.end(program)
            process.stdout.close()
        seen = companion.communicate()[0] if companion else ""
        return Result(code, "".join(output)[-200000:], time.monotonic() - began, late.is_set(), seen)


class Report:
    """the results of one GPU and commit, on disk after every change"""

    def __init__(self, directory, device, commit, sources):
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-") + "_" + commit + ".json")
        self.lock = threading.RLock()
        self.data = {"format": FORMAT, "gpu": device, "commit": commit, "sources": sources, "stages": {}}
        self.kept = False
        if not os.path.exists(self.path):
            return
        try:
            with open(self.path) as f:
                old = json.load(f)
            assert old["format"] == FORMAT and isinstance(old["stages"], dict)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise SystemExit(f"{self.path}: not a result of this program (expected format {FORMAT!r}); move it away")
        if old["sources"] == sources:
            self.data, self.kept = old, True

    def stage(self, name):
        return self.data["stages"].setdefault(name, {"status": "unfinished", "seconds": 0.0, "items": {}})

    def save(self):
        with self.lock:
            console.write_whole(self.path, json.dumps(self.data, indent=1, sort_keys=True) + "\n")

    def save_markdown(self):
        with self.lock:
            console.write_whole(self.path[:-len(".json")] + ".md", markdown(self.data, STAGE_NAMES))


class Stage:
    """one stage while it runs"""

    def __init__(self, name, cap, check):
        self.name, self.cap, self.check, self.runner = name, cap, check, check.runner
        self.record = check.report.stage(name)
        self.items = self.record["items"]
        self.began, self.before = check.clock(), self.record["seconds"]
        self.done = self.total = 0
        self.stopped = False

    def left(self):
        return 0.0 if self.stopped else self.cap - (self.check.clock() - self.began)

    def run(self, command, cap, fine=(0,), slow_ok=False, **more):
        """The command's Result. Raises Failed if its exit code is not among `fine` or it reaches its own cap, and
        OutOfTime if the stage reaches its cap first."""
        left = self.left()
        if left <= 0.5:
            raise OutOfTime
        result = self.runner.run(command, min(cap, left), **more)
        if result.timed_out:
            if left < cap:
                raise OutOfTime
            if slow_ok:
                return result
            raise Unfinished(f"{' '.join(command)[:300]}: ended at its cap of {cap} s\n{result.tail()}")
        if fine is not None and result.code not in fine:
            raise Failed(f"{' '.join(command)[:300]}: exit code {result.code}\n{result.tail()}")
        return result

    def put(self, name, record):
        with self.check.report.lock:
            self.items[name] = record
            self.record["seconds"] = self.before + self.check.clock() - self.began
            self.check.report.save()

    def do(self, name, work, *args):
        """the record of an item, from an earlier run or from work(*args), which returns a dictionary"""
        old = self.items.get(name, {})
        if name in self.items and not old.get("unfinished"):
            self.done += 1
            return old
        if self.left() <= 0.5:
            raise OutOfTime
        began = self.check.clock()
        try:
            record = dict(work(*args))
            record.setdefault("ok", True)
        except Failed as e:
            record = {"ok": False, "error": without_root(e), "unfinished": isinstance(e, Unfinished)}
        record["seconds"] = round(self.check.clock() - began, 2)
        self.put(name, record)
        self.done += 1
        self.check.progress(self, name, record)
        return record

    def do_all(self, work, workers=1):
        """work: a list of (name, function, args...); several run at once if they do not share the GPU"""
        self.total = max(self.total, self.done + len(work))
        if workers == 1:
            for w in work:
                self.do(*w)
            return
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(self.do, *w) for w in work]:
                    future.result()
            except BaseException:
                self.stopped = True                     # nothing new begins
                self.runner.end_all()
                raise


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
    kept = ("Product Name", "Driver Version", "CUDA Version", "Total", "Max Clocks", "Graphics", "SM", "Memory",
            "Performance State", "Current Power Limit", "Default Power Limit", "GPU Current Temp", "ECC Mode",
            "MIG Mode", "Persistence Mode", "Link Width")
    fields = ["name", "driver_version", "compute_cap", "memory.total", "clocks.max.sm", "power.limit"]

    def query():
        r = stage.run([stage.runner.which("nvidia-smi"), "-q", "-i", "0"], 20)
        lines = [x.rstrip() for x in r.output.split("\n") if x.split(":")[0].strip() in kept and ":" in x]
        return {"lines": lines[:60], **smi(stage.runner, fields)}

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
    stage.items.pop("headers", None)                    # tried again in each run
    stage.do_all([("nvidia-smi", query), ("nvcc", compiler), ("headers", headers)])


def nvcc(runner):
    p = os.environ.get("NVCC") or runner.which("nvcc")
    if not p:
        raise NoDevice("nvcc is not there: install the CUDA toolkit or set NVCC=path")
    return p


def architecture(runner):
    major, minor = smi(runner, ["compute_cap"])["compute_cap"].split(".")
    return os.environ.get("ARCH") or f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


# ---------------------------------------------------------------------------------------------------------
# build

def path(*names):
    return os.path.join(WORK, *names)


TRAINERS = ("gpt2", "bert")
CPU = {t: path("cpu", "train_" + t) for t in TRAINERS}
CPU_FUSED = {t: path("fused", "train_" + t) for t in TRAINERS}
CUDA = {t: path("bf16", f"train_{t}cu") for t in TRAINERS}
CUDA_FP32 = {t: path("fp32", f"train_{t}cu") for t in TRAINERS}
FIRST_TRAINER = path("first", "train_gpt2cu")           # with none and cable only
COMM_PROGRAM = path("comm_program")


def kernel_tests():
    """{name: source}"""
    found = {}
    for source in sorted(glob.glob(os.path.join(ROOT, "test", "simt", "test_*.cu"))):
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
            "-lcublasLt", "-lcublas"]


def cpu_line(runner, trainer, product, *flags):
    compiler = os.environ.get("CXX") or runner.which("g++") or runner.which("clang++") or "g++"
    return [compiler, "-std=c++17", "-fopenmp", *makefile("OPT"), *flags, "-I.", "-x", "c++", f"train_{trainer}.cu",
            "-o", product, "-lpthread"]


def compile_all(stage, work):
    """work: [(name, command)], the longest first; what was built from the same sources stays"""
    sources = stage.check.report.data["sources"]

    def stamp(product):                                 # by a checksum: a copied tree may have other times
        return os.path.join(ROOT, product + ".sources")

    def up_to_date(product):
        if not os.path.exists(os.path.join(ROOT, product)) or not os.path.exists(stamp(product)):
            return False
        with open(stamp(product)) as f:
            return f.read() == sources

    def compile_one(command):
        product = command[command.index("-o") + 1]
        os.makedirs(os.path.dirname(os.path.join(ROOT, product)), exist_ok=True)
        stage.run(command, 840)
        if not os.path.exists(os.path.join(ROOT, product)):
            raise Failed(f"{' '.join(command)}: exit code 0, but {product} is not there")
        console.write_whole(stamp(product), sources)
        return {"product": product}
    for name, command in work:
        product = command[command.index("-o") + 1]
        if not up_to_date(product):
            stage.items.pop(name, None)
        elif not stage.items.get(name, {}).get("ok"):       # built elsewhere, and carried here
            stage.items[name] = {"product": product, "ok": True, "seconds": 0.0}
    stage.do_all([(name, compile_one, command) for name, command in work], workers=max(2, os.cpu_count() or 2))


def trainer(stage):
    compile_all(stage, [("GPT-2, CUDA bf16, two encodings",
                         cuda_line(stage.runner, "train_gpt2.cu", FIRST_TRAINER, "-DFEW_POSITIONS"))])


def build(stage):
    line, communicator = functools.partial(cuda_line, stage.runner), nccl(stage.runner)
    work = []
    for t in TRAINERS:
        source = f"train_{t}.cu"
        work += [(f"{t}, CUDA bf16", line(source, CUDA[t], *communicator)),
                 (f"{t}, CUDA FP32", line(source, CUDA_FP32[t], "-DPRECISION_FP32")),
                 (f"{t}, CPU", cpu_line(stage.runner, t, CPU[t], "-ffp-contract=off")),
                 # products and sums fused wherever the compiler can: the same results, rounded at other places
                 (f"{t}, CPU, other rounding", cpu_line(stage.runner, t, CPU_FUSED[t], "-ffp-contract=fast"))]
    tests = sorted(kernel_tests().items(), key=lambda item: (not item[0].startswith("flash"), item))
    work += [("kernel test " + name, line(source, path("test_" + name), "-Itest/simt")) for name, source in tests]
    work += [("bench_causal", line("dev/gpu_bench.cu", path("bench_causal"), "-DCAUSAL=1")),
             ("bench_full", line("dev/gpu_bench.cu", path("bench_full"), "-DCAUSAL=0")),
             ("the program of test/ranks", line("test/ranks/comm_program.cu", COMM_PROGRAM, *communicator))]
    compile_all(stage, work)


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


def sanitized(stage, kinds, chosen):
    """the tests of the binaries `chosen` under each of compute-sanitizer's tools `kinds`"""
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
    stage.do_all([(f"{kind} {name}", check, kind, name) for kind in kinds for name in chosen])
    if not stage.items:
        stage.record["note"] = "there is no such test"


def racecheck(stage):
    sanitized(stage, ("racecheck",), [name for name in in_order(kernel_tests()) if name.startswith("flash")])


def sanitizer(stage):
    sanitized(stage, SANITIZERS, in_order(kernel_tests()))


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


def rewrite(source, target, change=lambda values, *_: values):
    """copies a checkpoint to a directory for --load; change(values, name, shape) returns the new bytes of a tensor"""
    with open(os.path.join(source, "model.safetensors"), "rb") as f:
        data = f.read()
    at = 8 + struct.unpack("<Q", data[:8])[0]
    parts = [data[:at]]
    tensors = {name: t for name, t in json.loads(data[8:at]).items() if name != "__metadata__"}
    for name, t in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        if t["dtype"] != "F32":
            raise Failed(f"{source}: {name}: expected a float32 tensor, got {t['dtype']}")
        first, end = t["data_offsets"]
        parts.append(change(data[at + first:at + end], name, t["shape"]))
    os.makedirs(target, exist_ok=True)
    shutil.copy(os.path.join(source, "config.json"), target)
    with open(os.path.join(target, "model.safetensors"), "wb") as f:
        f.write(b"".join(parts))


def round_to_bf16(source, target, seed):
    """every weight becomes one of the two bf16 numbers next to it, at random"""
    draw = random.Random(seed)

    def change(values, *_):
        bits = array.array("I", values)
        drawn = array.array("H", draw.randbytes(2 * len(bits)))
        return array.array("I", [(b + r) & 0xFFFF0000 for b, r in zip(bits, drawn)]).tobytes()
    rewrite(source, target, change)


def enlarge(source, target):
    """Every matrix becomes six times as large. Then queries and keys have size 1, attention is not just a mean of all
    values, and no gradient is small compared to what bf16 does to it."""
    def change(values, name, shape):
        if len(shape) != 2:
            return values
        return array.array("f", [6 * x for x in array.array("f", values)]).tobytes()
    rewrite(source, target, change)


def losses_of(directory):
    try:
        with open(os.path.join(ROOT, directory, "log.jsonl")) as f:
            losses = [r["loss"] for r in map(json.loads, f) if r["kind"] == "train"]
    except (OSError, ValueError, KeyError) as e:
        raise Failed(f"{directory}/log.jsonl: {e}")
    if not losses or any(not isinstance(x, (int, float)) or x != x for x in losses):
        raise Failed(f"{directory}/log.jsonl: expected finite losses, got losses {losses}")
    return losses


def differences(a, b):
    """the relative difference of two curves of the loss, step by step"""
    if len(a) != len(b):
        raise Failed(f"expected {len(b)} losses, got {len(a)}")
    return [abs(x - y) / max(abs(y), 1e-9) for x, y in zip(a, b)]


def so_far(curves):
    """for each step, the largest value of all curves up to that step"""
    return list(itertools.accumulate((max(step) for step in zip(*curves)), max))


def train(stage, binary, out, flags, cap, **more):
    shutil.rmtree(os.path.join(ROOT, out), ignore_errors=True)
    samples = ["--sample_every", "0"] if "gpt2" in os.path.basename(binary) else []
    return stage.run([built(binary), "--val_every", "0", *samples, "--out", out, *flags], cap, **more)


BERT_ENCODINGS = ("none", "cable", "alibi", "t5", "rope")


def cases(names):
    """{name: (trainer, encoding, flags, group)}; measured errors are comparable within a group"""
    found = {pos: ("gpt2", pos, ["--lr", "5e-4"], "gpt2") for pos in names}
    found.update({"BERT " + pos: ("bert", pos, ["--lr", "5e-4"], "bert") for pos in BERT_ENCODINGS if pos in names})
    pairs = ["--lr", "1e-4", "--tau", "0.5", "--pairs", path("pairs.txt")]
    found["BERT cable, pairs"] = ("bert", "cable", pairs, "pairs")
    return found


class LossCheck:
    """the runs of one case, on the CPU (measure) and in CUDA (compare)"""

    def __init__(self, stage, known):
        self.stage, self.known = stage, known
        text = path("text.txt")
        self.data = ["--train_files", text, "--val_files", text, "--T", str(T), "--B", str(B)]

    def place(self, name):
        return path("losses", re.sub(r"\W+", "_", name))

    def curve(self, binary, out, load, flags, **more):
        """the losses of STEPS steps from a checkpoint"""
        train(self.stage, binary, out, [*self.data, *flags, "--load", load, "--steps", str(STEPS)], 30, **more)
        found = losses_of(out)
        if len(found) != STEPS:
            raise Failed(f"{out}: expected {STEPS} losses, got {len(found)}")
        return found

    def measure(self, name):
        """on the CPU: the losses, and how much each kind of rounding changes them"""
        here, (trainer, pos, flags, group) = self.place(name), self.known[name]
        initial = ["--threads", "1", "--model", MODEL, "--pos", pos, "--steps", "1", "--lr", "0",
                   "--checkpoint_every", "1"]
        train(self.stage, CPU[trainer], here + "_new", [*self.data, *initial], 30)
        start = here + "_start"
        copy = enlarge if trainer == "bert" else rewrite
        copy(os.path.join(ROOT, here + "_new/step_00000001"), os.path.join(ROOT, start))
        cpu = self.curve(CPU[trainer], here + "_cpu", start, flags)
        fp32 = so_far([differences(self.curve(CPU_FUSED[trainer], here + "_fused", start, flags), cpu)])
        bf16 = []
        for seed in (1, 2, 3):
            rounded = here + f"_rounded{seed}"
            round_to_bf16(os.path.join(ROOT, start), os.path.join(ROOT, rounded), seed)
            bf16.append(differences(self.curve(CPU[trainer], here + "_cpu_rounded", rounded, flags), cpu))
        return {"losses": cpu, "fp32_error": fp32, "bf16_error": so_far(bf16), "group": group}

    def compare(self, name):
        """in CUDA, FP32 and bf16: the losses, which must be as close to the CPU's as the measured errors allow"""
        trainer, _, _, group = self.known[name]
        own = self.stage.items.get("measured " + name)
        if not own or not own["ok"]:
            raise (Unfinished if own and own.get("unfinished") else Failed)("the CPU's losses are missing")
        measured = [r for n, r in list(self.stage.items.items())
                    if n.startswith("measured ") and r["ok"] and r["group"] == group]
        record = {"ok": True}
        without_tf32 = {"NVIDIA_TF32_OVERRIDE": "0"}
        for kind, binary, multiple, most, env in (("fp32", CUDA_FP32[trainer], FP32_MULTIPLE, FP32_MOST, without_tf32),
                                                  ("bf16", CUDA[trainer], BF16_MULTIPLE, BF16_MOST, None)):
            record[kind], error = self.compare_kind(name, own, measured, kind, binary, multiple, most, env)
            if error:
                record.update(ok=False, error=error)
        return record

    def compare_kind(self, name, own, measured, kind, binary, multiple, most, env):
        """(record, error or None) of one precision"""
        # A measured error may be small by luck, the median of the group is not; just rounding gives 2^-24.
        middle = (statistics.median(step) for step in zip(*(r[kind + "_error"] for r in measured)))
        errors = [max(own_step, step, 2.0 ** -24) for own_step, step in zip(own[kind + "_error"], middle)]
        place, flags = self.place(name), self.known[name][2]
        found = self.curve(binary, f"{place}_{kind}", place + "_start", flags, env=env)
        apart = differences(found, own["losses"])
        step = max(range(STEPS), key=lambda t: apart[t] / errors[t])        # the step nearest to its bound
        record = {"losses": found, "step": step, "difference": apart[step], "measured_error": errors[step],
                  "multiple": multiple, "bound": multiple * errors[step]}
        if not any(own[kind + "_error"]) or multiple * errors[-1] > most:
            return record, (f"{kind}: expected a measured error above 0 and at most {most / multiple:.2g}, "
                            f"got {own[kind + '_error'][-1]:.2g}, which bounds nothing")
        if apart[step] > multiple * errors[step]:
            return record, (f"{kind}: at step {step} the loss differs from the CPU's by {apart[step]:.3g}, "
                            f"expected at most {multiple} x the measured error {errors[step]:.3g}")
        return record, None


def losses(stage):
    write_data()
    known = cases(encodings(stage.run([built(CPU["gpt2"]), "--help"], 10).output))
    check = LossCheck(stage, known)
    stage.total = 2 * len(known)
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    stage.do_all([("measured " + name, check.measure, name) for name in known], workers=workers)
    # Nothing is timed here, and a program takes longer to start than to do its steps: four share the GPU.
    stage.do_all([(name, check.compare, name) for name in known], workers=4)


# ---------------------------------------------------------------------------------------------------------
# bench, train, eval, pytorch

def json_lines(stage, command, cap, beside=None):
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
    return stage.run([*command, "--skip", done], cap, on_line=keep, beside=beside)


def watch(stage, field, ms):
    """the command that prints a field of the GPU every `ms` milliseconds"""
    return [stage.runner.which("nvidia-smi"), f"--query-gpu={field}", "--format=csv,noheader,nounits", "-lms", str(ms)]


def bench(stage):
    for name in ("bench_causal", "bench_full"):
        result = json_lines(stage, [built(path(name))], 90, beside=watch(stage, "clocks.sm", 200))
        mhz = sorted(int(x) for x in result.beside.split() if x.isdigit())
        if mhz:
            clocks = {"least": mhz[0], "median": mhz[len(mhz) // 2], "most": mhz[-1]}
            stage.put("clocks " + name, {"ok": True, "sm_mhz": clocks})


# name, trainer, --model, shard, T, sequences per batch, encodings, each with its further flags
SIZES = [("tiny", "gpt2", "tiny", "tokens.bin", 1024, 32, ("none", "cable", "alibi", "rope")),
         ("124M", "gpt2", "small", "tokens.bin", 1024, 16, ("none", "cable", "alibi", "rope")),
         ("BERT base", "bert", "base", "bert_tokens.bin", 512, 32, ("none", "cable", "alibi", "learned")),
         ("350M", "gpt2", "medium", "tokens.bin", 1024, 8, ("none", "cable", "alibi", "rope"))]
TRAIN_STEPS, WARM_UP = 14, 4
OUT_OF_MEMORY = 4                                       # llmc/base/common.h: EXIT_OUT_OF_MEMORY


STEP = ("124M, 65,536 tokens", "gpt2", "small", "tokens.bin", 1024, 64,
        ("none", "cable", "cable --plans " + path("plans")))
PROFILED = 10                                           # the step of --profile


def end_of_run(stage, binary, out, flags):
    """(its result, its losses, the SHA-256 of its weights) after STEPS steps"""
    result = train(stage, binary, out, [*flags, "--steps", str(STEPS), "--checkpoint_every", str(STEPS)], 30)
    with open(os.path.join(ROOT, out, f"step_{STEPS:08d}", "model.safetensors"), "rb") as f:
        return result, losses_of(out), hashlib.sha256(f.read()).hexdigest()


def repeat(stage):
    """one seed, several runs: the same losses and weights, bit for bit"""
    write_data()
    tokens = path("tokens.bin")

    def run(pos, name, recompute):
        out = path("repeat", f"{pos}_{name}")
        data = ["--train_files", tokens, "--val_files", tokens, "--model", "4,6,384", "--B", "16", "--pos", pos]
        return end_of_run(stage, FIRST_TRAINER, out, [*data, "--recompute", recompute])[1:]

    def compare(pos):
        first = run(pos, "first", "0")
        for name, recompute in (("again", "0"), ("recomputed", "2")):
            found = run(pos, name, recompute)
            if found != first:
                apart = [t for t, (a, b) in enumerate(zip(first[0], found[0])) if a != b]
                where = f"the losses differ from step {apart[0]}" if apart else "the losses agree, the weights differ"
                raise Failed(f"{pos}, {name}: expected the same bits, {where}")
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
                     "--T", "1024", "--B", str(B), "--steps", str(PROFILED + 1), "--profile", str(PROFILED),
                     "--plans", path("plans")]
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
        tokens, b, (encoding, *flags) = path(shard), batches.setdefault(size, most), pos.split()
        out = path(stage.name, re.sub("[^A-Za-z0-9]+", "_", f"{size}_{pos}"))
        while True:
            arguments = ["--train_files", tokens, "--val_files", tokens, "--model", model, "--pos", encoding,
                         "--T", str(T), "--B", str(b), "--steps", str(TRAIN_STEPS), *flags]
            result = train(stage, programs[trainer], out, arguments, 40, fine=(0, OUT_OF_MEMORY))
            if result.code == 0:
                break
            if b == 1:
                raise Failed(f"out of memory with one sequence\n{result.tail(4)}")
            b = batches[size] = b // 2
        with open(os.path.join(ROOT, out, "log.jsonl")) as f:
            steps = [r for r in map(json.loads, f) if r["kind"] == "train"][WARM_UP:]
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
        with open(os.path.join(ROOT, out, "log.jsonl")) as f:
            found = {r["T"]: r["loss"] for r in map(json.loads, f) if r["kind"] == "extrapolation"}
        if list(found) != list(lengths) or any(not isinstance(x, float) or x != x for x in found.values()):
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
    def run(words):
        result = stage.run([built(COMM_PROGRAM), *words], 10, fine=None)
        if "built without NCCL" in result.output:
            return {"note": "built without NCCL"}
        if result.code != 0 or not re.search("^ok$", result.output, re.M):
            raise Failed(f"expected ok, got exit code {result.code}\n{result.tail()}")
        return {}
    stage.do_all([("NCCL, a GPU and itself", run, ["self"])])


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
        result, *end = end_of_run(stage, CUDA[trainer], path(f"ranks_{trainer}_{count}"),
                                  ["--train_files", text, "--val_files", text, "--model", MODEL, "--T", str(T), "--B",
                                   str(B), "--total_batch", str(2 * B * T), "--gpus", str(count)])
        return *end, "NCCL" in result.output

    def compare(trainer):
        one, two = run(trainer, 1), run(trainer, 2)
        if one[:2] != two[:2]:
            weights = "differ" if one[1] != two[1] else "agree"
            raise Failed(f"{trainer}: expected two ranks to give the bits of one, losses {one[0]}, got {two[0]}; "
                         f"the weights {weights}")
        return {"losses": one[0], "nccl": two[2]}
    stage.do_all([(trainer, compare, trainer) for trainer in TRAINERS])


# name, function, cap in seconds; with a minute for `trainer` and three for `build`, on 16 cores, all of them fit into
# two visits of 9.5 minutes
STAGES = [("device", device, 30), ("trainer", trainer, 600), ("step", step, 90),
          ("repeat", repeat, 40), ("build", build, 1500), ("kernels", kernels, 110),
          ("losses", losses, 110), ("racecheck", racecheck, 40), ("torch", torch_step, 140),
          ("bench", bench, 70), ("train", training, 50), ("eval", evaluation, 35), ("pytorch", pytorch, 60),
          ("exchange", exchange, 10), ("ranks", ranks, 20), ("sanitizer", sanitizer, 30)]
BUILDS = ("trainer", "build")                           # what they made may be gone: each run looks
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


class Check:
    def __init__(self, options, runner, clock=time.monotonic, stages=None):
        self.options, self.runner, self.clock, self.stages = options, runner, clock, stages or STAGES
        self.remaining = 0.0                            # sum of the caps of the later stages
        gpu = smi(runner, ["name"])["name"]
        nvcc(runner)
        commit, sources = commit_and_sources(runner)
        self.ends = clock() + 60 * options.minutes if options.minutes else None
        self.report = Report(options.results, gpu, commit, sources)
        for name in options.again:
            self.report.data["stages"].pop(name, None)

    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    def progress(self, stage, name, record):
        left = stage.left()
        if stage.total and stage.done:                  # extrapolated from what is done, but never beyond the cap
            left = min(left, (self.clock() - stage.began) / stage.done * (stage.total - stage.done))
        verdict = "ok" if record["ok"] else "FAILED"
        of = f" {stage.done}/{stage.total}" if stage.total else ""
        self.say(f"[{stage.name}{of}] {name}: {verdict}; at most {max(0, left + self.remaining) / 60:.1f} min left")
        if not record["ok"]:
            self.say("    " + record.get("error", "").replace("\n", "\n    "))

    def run_stage(self, name, work, cap):
        stage = Stage(name, cap, self)
        stage.record["status"] = "unfinished"
        stage.record.pop("error", None)
        try:
            work(stage)
            bad = [n for n, r in stage.items.items() if not r["ok"]]
            passed = "ok" if stage.items else "skipped"
            stage.record["status"] = "failed" if bad else passed
            if bad and all(stage.items[n].get("unfinished") for n in bad):
                stage.record.update(status="unfinished", error="not built, or ended at a cap: " + ", ".join(bad))
            elif not stage.items and not stage.record.get("note"):
                stage.record.update(status="failed", error="the stage has no results")
        except OutOfTime:
            stage.record["error"] = f"it reached its cap of {cap:.0f} s; run again to continue"
        except Failed as e:
            stage.record.update(status="unfinished" if isinstance(e, Unfinished) else "failed", error=without_root(e))
        finally:                                        # an interrupted stage stays "unfinished"
            stage.record["seconds"] = stage.before + self.clock() - stage.began
            self.report.save()
            self.report.save_markdown()
        self.say(f"== {name}: {stage.record['status']}, {stage.record['seconds']:.0f} s"
                 + "".join(f"; {stage.record[k]}" for k in ("note", "error") if k in stage.record))

    def status(self, name):
        return self.report.data["stages"].get(name, {}).get("status", "not run")

    def run(self):
        wanted = [s for s in self.stages if not self.options.only or s[0] in self.options.only]
        if self.report.kept:
            self.say(f"continuing with {self.report.path}")
        again = lambda name: name == "device" and self.status(name) == "failed"         # may be right by now
        todo = [s for s in wanted if self.status(s[0]) in ("unfinished", "not run") or s[0] in BUILDS or again(s[0])]
        for i, (name, work, cap) in enumerate(todo):
            self.remaining = sum(s[2] for s in todo[i + 1:])
            left = self.ends - self.clock() if self.ends else cap
            if left < 5:
                self.say(f"== {name}: left for the next run, --minutes {self.options.minutes:g} are over")
                continue
            self.run_stage(name, work, min(cap, left))
            if name == "device" and self.status(name) == "failed":
                return 2                                # without a compiler and headers nothing else can work
        self.report.save()
        self.report.save_markdown()
        states = {name: self.status(name) for name, *_ in wanted}
        failed = [name for name, state in states.items() if state == "failed"]
        open_ones = [name for name, state in states.items() if state in ("unfinished", "not run")]
        kinds = (("FAILED", failed), ("unfinished", open_ones))
        words = [f"{what}: {', '.join(names)}" for what, names in kinds if names]
        self.say(f"{self.report.path[:-5]}.md: " + ("; ".join(words) or "all stages passed"))
        if failed:
            return 1
        return 3 if open_ones else 0


def parse(arguments):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")                # noqa: E731
    p.add_argument("--again", action="extend", type=names, default=[], metavar="STAGE",
                   help="forget the results of these stages and run them again")
    p.add_argument("--only", action="extend", type=names, default=[], metavar="STAGE", help="run only these stages")
    p.add_argument("--results", default=os.path.join(ROOT, "dev", "results"), help="directory of results [dev/results]")
    p.add_argument("--minutes", type=float, default=0, help="end by then; run again to continue")
    p.add_argument("--list", action="store_true", help="list the stages and their caps")
    options = p.parse_args(arguments)
    for name in options.again + options.only:
        if name not in STAGE_NAMES:
            p.error(f"expected a stage among {', '.join(STAGE_NAMES)}, got {name!r}")
    return options


def main(arguments, runner=None):
    options = parse(arguments)
    if options.list:
        for name, _, cap in STAGES:
            print(f"{name:10} {cap:5} s")
        return 0
    runner = runner or Runner()
    headers = os.path.join(ROOT, HEADERS)
    if os.path.isdir(headers):
        os.environ["CPATH"] = os.pathsep.join([headers, *filter(None, [os.environ.get("CPATH")])])
    os.makedirs(os.path.join(ROOT, WORK), exist_ok=True)
    with open(os.path.join(ROOT, WORK, "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"another gpu-check is running here ({WORK}/lock)", file=sys.stderr)
            return 2
        try:
            return Check(options, runner).run()
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
