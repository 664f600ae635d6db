#!/usr/bin/env python3
"""gpu_check.py -- `make gpu-check`: is the CUDA build right on this machine's GPU, how fast is it, how much memory?

    dev/gpu_check.py [--only STAGE...] [--minutes N] [--results FILE]
    dev/gpu_check.py --build ARCH   compiles for sm_90a, say, where no GPU need be
    dev/gpu_check.py --pack         copies the headers of xxHash and nlohmann-json, which no CUDA toolkit brings

Each result is a row of dev/results/gpu.csv as soon as it is known: for each GPU and what was measured, the newest. The
same command, run again on the same commit, does only what is missing or has failed. Each command has a limit of time,
and so has each stage; what they end is unfinished, not failed. build/gpu_check/log.txt has what the programs print.

It needs no make: the flags are the Makefile's, and dev/configure.sh finds the GPU's architecture and NCCL, as for make.
With --only, `build` compiles what the other stages run. What --build has compiled is used wherever build/gpu_check is
carried with the same sources, and the headers of --pack wherever build/gpu_headers is. The CPU programs of --build need
AVX2; it builds with NCCL only if NCCL_DIR names one. COMMIT names the commit of a copy without .git.
Exit codes: 0 all passed, 1 a failure, 2 no GPU, no nvcc or no headers, 3 something is unfinished, 75 interrupted."""
import array
import concurrent.futures
import csv
import functools
import glob
import hashlib
import itertools
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import time

from ptxas_budget import console, makefile, tool        # which finds scripts/
import ledger
import measured

sys.path.append(os.path.join(ledger.ROOT, "data"))
import common                                   # noqa: E402

WORK, HEADERS = "build/gpu_check", "build/gpu_headers"
STEP = "small", "tokens.bin", 1024, 64              # GPT-2 124M; 65,536 tokens
LIMIT, TOKENS = 100, 1000000                        # seconds of a training, tokens of a shard
MODEL, T, B, STEPS = "2,2,128", 150, 4, 20          # heads of 64, three tiles of 64 tokens, the last one not full
# How far an H100's losses were from the CPU's at 1ee49cd, relative, 2^-24 where it was less: in the first step, and at
# most in all 20. Four times as much is allowed.
DIFFERENCES = {("gpt2", "fp32"): (6.0e-8, 3.3e-7), ("gpt2", "bf16"): (3.4e-5, 3.6e-4),
               ("bert", "fp32"): (6.0e-8, 2.0e-7), ("bert", "bf16"): (5.8e-4, 1.2e-3),
               ("pairs", "fp32"): (1.4e-7, 1.5e-7), ("pairs", "bf16"): (6.7e-5, 1.3e-3)}
COLUMNS = dict.fromkeys(("gpu", "commit", "what", "value", "unit"), console.TEXT)         # of --results
# in bash: ends a process and all that it has started
FAMILY = "all() { echo $1; for c in $(cat /proc/$1/task/*/children); do all $c; done; }; kill -9 $(all $1)"
path = functools.partial(os.path.join, WORK)
say = functools.partial(print, flush=True)


class Failed(Exception): pass       # a check that is not right, or a program that failed
class Late(Exception): pass         # what a limit of time has ended, or needs a program that was not built


class Visit:        # one run of this script: the GPU, the commit, the time left, what has failed or is unfinished
    def __init__(self, gpu, commit, results, minutes, stages=()):
        self.gpu, self.commit, self.results, self.end = gpu, commit, results, time.monotonic() + 60 * minutes
        self.stages, self.config, self.patience = stages, {}, 1
        self.stage_end, self.failed, self.unfinished = self.end, [], []

    def configure(self):
        """asks dev/configure.sh, as make does, for the GPU's architecture and for NCCL"""
        console.output_of(["bash", "dev/configure.sh", "MPI=0", "CONFIG=" + path("config.mk"), "NVCC=" + tool("nvcc"),
                           *(f"{knob}={os.environ.get(knob, '')}" for knob in ("CXX", "NCCL", "NCCL_DIR"))])
        self.config = dict(re.findall(r"^(\w+) := (.*)$", console.read_bytes(path("config.mk")).decode(), re.M))
        if self.config["GPU_ARCH"].startswith("compute"):
            say("nvcc is older than this GPU: the driver compiles PTX, at first for minutes")
            self.patience = 10

    def run(self, command, limit, fine=(0,), **environment):
        """(exit code, output) of a program; the only place that starts one. Any code is fine where fine is empty."""
        words, limit = " ".join(command), min(limit * self.patience, self.stage_end - time.monotonic())
        if limit < 0.5 or command[0].startswith(WORK) and not os.path.exists(command[0]):
            raise Late("no time was left" if limit < 0.5 else f"{command[0]} was not built")
        try:
            with subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as p:
                try:
                    text = p.communicate(timeout=limit)[0].decode(errors="replace")
                except BaseException:
                    subprocess.run(["bash", "-c", FAMILY, "bash", str(p.pid)], stderr=subprocess.DEVNULL)
                    raise
        except subprocess.TimeoutExpired:
            raise Late(f"{words[:300]}: ended after {limit:.0f} s") from None
        except OSError as e:
            raise Failed(f"{command[0]}: {e.strerror}") from None
        with os.fdopen(console.open_end(path("log.txt")), "a", encoding="utf-8", errors="replace") as log:
            log.write(f"\n$ {console.command_line(command)}\n{text}")
        if fine and p.returncode not in fine:
            raise Failed(f"{words[:300]}: exit code {p.returncode}\n{text[-2000:]}")
        return p.returncode, text

    def put(self, what, found):
        shown = {unit: f"{x:.6g}" if isinstance(x, float) else str(x) for unit, x in found.items()}
        rows = [r for r in ledger.read(self.results, COLUMNS) if (r["gpu"], r["what"]) != (self.gpu, what)]
        ledger.write(self.results, rows + [{"gpu": self.gpu, "commit": self.commit, "what": what, "value": value,
                                            "unit": unit} for unit, value in shown.items()])
        say(f"  {what}: " + ", ".join(f"{value} {unit}".strip() for unit, value in shown.items()))

    def check(self, what, work, *arguments):
        """puts what work() returns, or that it failed; does nothing where this commit has it already"""
        mine, rows = (self.gpu, self.commit, what), ledger.read(self.results, COLUMNS)
        if "+" not in self.commit and any((r["gpu"], r["commit"], r["what"]) == mine and r["value"] != "failed"
                                          for r in rows):               # +: files differ from the commit
            return
        try:
            found = work(*arguments)
        except Late as e:
            self.unfinished.append(what)
            return say(f"  {what}: unfinished: {e}")
        except (Failed, LookupError, ValueError) as e:      # the last two: a program that prints something else
            self.failed.append(what)
            say(f"  {what}: FAILED: {e if isinstance(e, Failed) else repr(e)}")
            found = {"": "failed"}
        self.put(what, found)


def side_by_side(work, things, workers):
    with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(work, things))


def host(root="/"):
    """(bytes of memory, processors) that this process may take, by the machine and by its control groups"""
    text = lambda *names: file.read_text() if (file := pathlib.Path(root, *names)).exists() else ""
    memory = [1024 * int(re.search(r"MemAvailable: +(\d+)", text("proc/meminfo"))[1])]
    processors = [len(os.sched_getaffinity(0))]
    group = pathlib.Path("sys/fs/cgroup", *re.findall(r"^0::/(.*)", text("proc/self/cgroup"), re.M))
    for at in (group, *group.parents):
        memory += map(int, re.findall(r"^\d+", text(at, "memory.max")))
        processors += [int(q) // int(period) for q, period in re.findall(r"^(\d+) (\d+)", text(at, "cpu.max"))]
    return min(memory), min(processors)


def on_the_gpu():
    """how many processes run there at once: each has two threads, and takes up to a GiB of either memory"""
    memory, processors = host()
    free = re.match(r"\d+", smi("memory.free")[0])          # MiB; not where the GPU's memory is the host's
    return max(1, min(16, processors // 2, memory >> 30, int(free[0]) >> 10 if free else 16))


def smi(field):
    p = subprocess.run(f"nvidia-smi --query-gpu={field} --format=csv,noheader", shell=True, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, text=True)
    if p.returncode != 0:
        raise console.BadInput(f"no GPU: nvidia-smi lists none ({p.stdout.strip()}); install the NVIDIA driver")
    return p.stdout.strip().split("\n")


CPU, FP32, BF16 = ({t: path(kind, "train_" + t) for t in ("gpt2", "bert")} for kind in ("cpu", "fp32", "bf16"))
FIRST = path("first", "train_gpt2")             # bf16, with two encodings only: a fraction of the time
EPILOGUES = [path(f"epilogues_{bits}", "train_gpt2") for bits in range(4)]      # docs/gpu.md; built as FIRST


def kernel_tests():
    names = {p[len("test/simt/test_"):-len(".cu")] for p in glob.glob("test/simt/test_*.cu")} - {"flash_ampere"}
    return sorted(names, key=lambda n: (n != "ptx", not n.startswith("flash"), n))  # flash_ampere: for the emulator


def lines(visit):
    """the lines that compile all programs; each ends with the program's path"""
    arch = os.environ.get("ARCH") or visit.config["GPU_ARCH"]
    arch += "a" if re.fullmatch(r"sm_(9|1\d)\d", arch) else ""         # -arch=sm_90a would compile for compute_90, too
    nvcc = [tool("nvcc"), *makefile("NVCC_CODE"), "-gencode", f"arch={arch.replace('sm', 'compute')},code={arch}",
            "-Xcompiler", "-fopenmp", "-I.", "-Xlinker", "-s"]
    cuda = lambda product, *words: [*nvcc, *words, "-lcublasLt", "-lcublas", "-o", product]
    nccl = [word for name in ("NCCL_CFLAGS", "CUDA_RANK_LIBS") for word in visit.config[name].split()]
    optimized = [flag.replace("native", os.environ.get("MARCH", "native")) for flag in makefile("OPT")]
    library = ["dev/torch/library.cu", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    found = [cuda(FIRST, "train_gpt2.cu", "-DFEW_POSITIONS")]
    for t in CPU:
        found += [cuda(BF16[t], f"train_{t}.cu", *nccl), cuda(FP32[t], f"train_{t}.cu", "-DPRECISION_FP32"),
                  [os.environ["CXX"], "-std=c++17", "-fopenmp", *optimized, "-ffp-contract=off", "-I.", "-x", "c++",
                   f"train_{t}.cu", "-lpthread", "-s", "-o", CPU[t]]]
    found += [cuda(path("test_" + n), f"test/simt/test_{n}.cu", "-Itest/simt") for n in kernel_tests()]
    found += [cuda(path(f"bench_{causal}"), "dev/gpu_bench.cu", f"-DCAUSAL={causal}") for causal in (0, 1)]
    found += [cuda(binary, "train_gpt2.cu", "-DFEW_POSITIONS", f"-DSTEP_EPILOGUES={bits}")
              for bits, binary in enumerate(EPILOGUES)]
    return found + [cuda(path("libcablecu.so"), *library),
                    cuda(path("libcablecu_fp32.so"), *library, "-DPRECISION_FP32"),
                    cuda(path("comm_program"), "test/ranks/comm_program.cu", *nccl)]


def compile_all(stage, visit):
    patterns = ("Makefile train_*.cu dev/gpu_* dev/torch/*.cu llmc/**/*.* test/*.* test/*/*.h test/simt/*.cu "
                "test/ranks/*.cu").split()
    names = sorted(name for pattern in patterns for name in glob.glob(pattern, recursive=True))
    sources = hashlib.sha256(b"".join(name.encode() + pathlib.Path(name).read_bytes() for name in names)).hexdigest()

    def compile_one(line):
        stamp = line[-1] + ".sources"
        if not os.path.exists(stamp) or console.read_bytes(stamp).decode(errors="replace") != sources:  # or elsewhere
            os.makedirs(os.path.dirname(stamp), exist_ok=True)
            try:
                visit.run(line, 3000)
                console.write_whole(stamp, sources)
            except Failed as e:
                visit.failed.append(line[-1])
                say(f"  FAILED: {e}")
    # what the other stages of --only run, or all; PyTorch's library only if PyTorch is here, or another machine has it
    stages = [s for s in visit.stages if STAGES[s][2]] if stage == "build" else ["step"]
    chosen = tuple(path(name) for s in stages or STAGES for name in STAGES[s][2].split()
                   if s != "torch" or visit.gpu == "none" or has_pytorch(visit))
    memory, processors = host()
    side_by_side(compile_one, [line for line in lines(visit) if line[-1].startswith(chosen)],
                 min(processors, memory >> 31))         # nvcc takes up to 2 GiB


def pack():
    """copies the two libraries' headers, as -M names the files that are read, to HEADERS, which CPATH gets"""
    for header in ("xxhash.h", "nlohmann/json.hpp"):
        read = subprocess.run([os.environ["CXX"], "-std=c++17", "-DXXH_INLINE_ALL", "-x", "c++", "-M", "-"],
                              input=f"#include <{header}>\n", stdout=subprocess.PIPE, text=True, check=True).stdout
        root = re.search(rf"(\S+)/{header}\s", read)[1]
        for name in set(re.findall(rf"{root}/((?:xxh|nlohmann/)\S+)", read)):
            os.makedirs(os.path.dirname(os.path.join(HEADERS, name)), exist_ok=True)
            console.write_whole(os.path.join(HEADERS, name), console.read_bytes(os.path.join(root, name)))


def write_data():
    """the sources as text and as groups of pieces of it; tokens of GPT-2's and BERT's vocabularies, as frequent as
    words are (Zipf and Mandelbrot): 1 / (rank + 1.7) gives the first of 50,257 the 3.8 % that " the" has"""
    text = b"".join(p.read_bytes() for p in sorted(pathlib.Path("llmc").rglob("*.*h")))
    words, draw = text.split(), random.Random(1)
    files = {"text.txt": text, "headers.cu": b"#include <xxhash.h>\n#include <nlohmann/json.hpp>\n"}
    piece = lambda k: b" ".join(words[k:k + draw.randint(1, 40)])       # from a few bytes to more than T
    files["pairs.txt"] = b"".join(b"\t".join((piece(k), piece(k), piece(draw.randrange(len(words) - 40)))) + b"\n"
                                  for k in range(0, min(len(words), 40000) - 40, 97))
    for name, least, vocab, end in (("tokens.bin", 0, 50257, 50256), ("bert_tokens.bin", 1000, 30522, 102)):
        count = vocab - least
        weights = itertools.accumulate(1 / (rank + 2.7) for rank in range(count))
        tokens = array.array("H", (least + rank * 7919 % count for rank in random.Random(1).choices(
            range(count), cum_weights=list(weights), k=TOKENS)))       # neighbours in rank are apart as numbers
        files[name] = common.header(len(tokens), vocab, end) + tokens.tobytes()
    for name, content in files.items():
        console.write_whole(path(name), content)


def objects_in(text, begin=b"{"):
    """the objects of JSON in lines that begin so"""
    try:
        return [console.parse_object(line, "a line") for line in text.split(b"\n") if line.startswith(begin)]
    except console.BadInput as e:
        raise Failed(str(e)) from None


def train(visit, binary, out, data, *flags, **environment):
    """(what it printed, the records of its log, the losses of its updates)"""
    shutil.rmtree(out, ignore_errors=True)
    samples = ["--sample_every", "0"] if binary.endswith("gpt2") else []
    text = visit.run([binary, "--train_files", path(data), "--val_files", path(data), "--val_every", "0", *samples,
                      "--out", out, *map(str, flags)], LIMIT, **environment)[1]
    records = objects_in(console.read_bytes(os.path.join(out, "log.jsonl")))
    return text, records, [r["loss"] for r in records if r["kind"] == "train"]


def same_bits(visit, binary, data, common, *variants, **environment):
    """a result, if STEPS steps with each of these flags end in the same losses and weights"""
    ends, out = [], path("ends")
    for flags in variants:
        losses = train(visit, binary, out, data, *common, *flags, "--steps", STEPS, "--checkpoint_every", STEPS,
                       **environment)[2]
        ends.append((losses, console.weights_sha256(f"{out}/step_{STEPS:08d}")))
        if ends[-1] != ends[0]:
            same = sum(a == b for a, b in zip(ends[0][0], losses))
            raise Failed(f"expected the same bits with {flags} as with {variants[0]}, got {same} of {STEPS} losses")
    return {"": "same bits"}


def enlarge(source, target):
    """Copies a checkpoint for --load, with every matrix six times as large. Then queries and keys have size 1,
    attention is not just a mean of all values, and no gradient is small compared to what bf16 does to it."""
    os.makedirs(target, exist_ok=True)
    copied = console.read_bytes(os.path.join(source, "config.json"))
    console.write_whole(os.path.join(target, "config.json"), copied)
    with open(os.path.join(source, "model.safetensors"), "rb") as f:
        tensors, _, data = console.read_tensors(f, source), f.seek(0), bytearray(f.read())
    for _, shape, start, end in tensors.values():
        if len(shape) == 2:
            data[start:end] = array.array("f", [6 * x for x in array.array("f", data[start:end])]).tobytes()
    console.write_whole(os.path.join(target, "model.safetensors"), bytes(data))


def device(visit):
    release = re.search(r"release ([\d.]+)", visit.run([tool("nvcc"), "--version"], 20)[1])
    visit.put("machine", {"driver": smi("driver_version")[0], "nvcc": release[1]})
    if visit.run([tool("nvcc"), "-E", path("headers.cu"), "-o", os.devnull], 60, ())[0] != 0:
        raise console.BadInput("expected the headers xxhash.h and nlohmann/json.hpp: install libxxhash-dev and "
                       f"nlohmann-json3-dev, or carry {HEADERS} here, which dev/gpu_check.py --pack writes")


def training(visit, binary, model, data, length, batch, pos, *more):
    """(time and memory of a step, in units that name what memory has chosen; what it printed)"""
    text, records, _ = train(visit, binary, path("train"), data, "--model", model, "--pos", pos, "--T", length, "--B",
                             -1, "--total_batch", length * batch, "--steps", 14, *more)
    flags, steps = records[0]["flags"], [r for r in records[5:] if r["kind"] == "train"]
    as_wanted = (flags["B"], flags["recompute"]) == (batch, 0)
    chosen = "" if as_wanted else ", --B {B} --recompute {recompute}".format_map(flags)
    return {"ms" + chosen: statistics.median(r["ms"] for r in steps),
            "MiB" + chosen: round(max(r["mem"] for r in steps) / 2 ** 20)}, text


def step(visit):
    def profile():
        sums, ((unit, _), text) = {}, training(visit, FIRST, *STEP, "cable", "--profile", 10)
        say("\n".join(measured.table(text)))
        for kernel, _, _, ms in measured.rows(text):
            sums[kernel] = sums.get(kernel, 0.0) + ms
        return {f"{unit} {name}": ms for name, ms in sums.items() if ms > 1}
    for pos in ("none", "cable"):
        visit.check(f"step 124M {pos}, 65536 tokens", lambda: training(visit, FIRST, *STEP, pos)[0])
        visit.check(f"repeat {pos}", same_bits, visit, FIRST, "tokens.bin", ("--model", "4,6,384", "--B", 16, "--pos",
                    pos), ("--recompute", 0), ("--recompute", "0"), ("--recompute", 2))
    visit.check("profile 124M cable", profile)


def epilogues(visit):
    for turn in (1, 2, 3):
        for bits, binary in enumerate(EPILOGUES):
            visit.check(f"epilogues {bits}, step 124M cable, 65536 tokens, turn {turn}",
                        lambda: training(visit, binary, *STEP, "cable")[0])


# Nsight Compute's: what L2 and what the SMs read of it, how busy the schedulers are, what warps wait for
COUNTERS = ["lts__t_sectors_op_read.sum.per_second", "l1tex__m_xbar2l1tex_read_bytes.sum.per_second",
            "smsp__issue_active.avg.pct_of_peak_sustained_active"]
STALLS = r"smsp__average_warps_issue_stalled_\w+_per_issue_active.ratio"


def counters(visit):
    def count():
        flags = ("--csv --page raw --print-units base --clock-control none -k regex:flash_ --section WarpStateStats "
                 "--metrics {} {} --train_files {} --val_files {} --model 1,12,768 --T 1024 --B -1 --total_batch 65536 "
                 "--steps 1 --val_every 0 --sample_every 0")
        flags = flags.format(",".join(COUNTERS), FIRST, *2 * [path("tokens.bin")])
        said = visit.run([tool("ncu"), *flags.split()], 170, ())[1]
        table = csv.DictReader(line for line in said.split("\n") if line.startswith('"'))
        kernels = [{n: x.replace(",", "") for n, x in r.items()} for r in table if r["ID"]]     # no row of units
        for r in kernels:
            stall = max((n for n in r if re.fullmatch(STALLS, n)), key=lambda n: float(r[n]))
            name = re.search(r"\w+_kernel", r["Kernel Name"])[0]
            visit.put("counters " + name, {n: r[n] for n in (*COUNTERS, stall)})
        if not kernels:                     # without permission: the counters may be root's
            raise (Late if "ERR_NVGPUCTRPERM" in said else Failed)("ncu has no table: " + said[:2000])
        return {"kernels": len(kernels)}
    if tool("ncu"):
        visit.check("counters", count)
    else:
        say("  there is no ncu here (NVIDIA Nsight Compute)")


def evaluate(visit):
    def windows():
        records = train(visit, FIRST, path("evaluated"), "tokens.bin", "--model", "small", "--T", 1024, "--B", 1,
                        "--steps", 1, "--eval_lengths", "16384,131072", "--eval_tokens", 7 * 131072)[1]
        return {f"ms a window of {r['T']}": r["ms"] * r["T"] / r["tokens"] for r in records
                if r["kind"] == "evaluation_speed"}
    visit.check("evaluate 124M cable", windows)


def kernels(visit):
    def run(binary):
        names = visit.run([binary, "--list"], 10)[1].split("\n")[:-1]
        said = side_by_side(lambda name: visit.run([binary, name], 40, OMP_NUM_THREADS="2")[1], names, on_the_gpu())
        status = re.findall(r"^\S.* (ok|skipped) +[\d.]+ ms", "\n".join(said), re.M)
        if len(status) != len(names) or not names:
            raise Failed(f"expected each of the tests {names} to print a line, got {len(status)}")
        return {"tests passed": status.count("ok")}             # the rest are not for hardware
    for program in kernel_tests():
        visit.check("kernels " + program, run, path("test_" + program))


def losses(visit):
    def compare(case):
        group, pos, flags = case
        if pos == "cable_signed":       # has a kink where two tokens have the same S: at 5e-4 two CPU builds part, too
            flags = ("--lr", "2.5e-4")
        trainer, out, common = "gpt2" if group == "gpt2" else "bert", path(f"{group}_{pos}"), ("--T", T, "--B", B)
        train(visit, CPU[trainer], out + "_new", "text.txt", *common, "--model", MODEL, "--pos", pos, "--steps", 1,
              "--lr", 0, "--checkpoint_every", 1)
        start, found = out + "_new/step_00000001", {}
        if trainer == "bert":
            enlarge(start, out + "_start")
            start = out + "_start"
        of = {kind: train(visit, binary[trainer], out, "text.txt", *common, *flags, "--load", start, "--steps", STEPS,
                          NVIDIA_TF32_OVERRIDE="0", OMP_NUM_THREADS="2")[2]
              for kind, binary in (("cpu", CPU), ("fp32", FP32), ("bf16", BF16))}
        for kind in ("fp32", "bf16"):
            apart = [abs(x - y) / abs(y) for x, y in zip(of[kind], of["cpu"])]
            found[kind], limits = max(apart), [4 * limit for limit in DIFFERENCES[group, kind]]
            if not (apart[0] <= limits[0] and found[kind] <= limits[1]):
                raise Failed(f"{pos}, {kind}: the losses differ from the CPU's by {apart[0]:.3g} in the first step, "
                             f"{found[kind]:.3g} in one of {STEPS}; expected at most {limits[0]:.3g}, {limits[1]:.3g}")
        return found

    def all_of(group, positions, *flags):
        found = side_by_side(compare, [(group, pos, flags) for pos in positions], on_the_gpu())
        return {f"largest relative difference, {kind}": max(f[kind] for f in found) for kind in ("fp32", "bf16")}
    encodings = console.encodings(visit.run([CPU["gpt2"], "--help"], 10)[1])
    visit.check("losses gpt2", all_of, "gpt2", encodings, "--lr", "5e-4")
    visit.check("losses bert", all_of, "bert", ("none", "cable", "alibi", "t5", "rope"), "--lr", "5e-4")
    visit.check("losses pairs", all_of, "pairs", ["cable"], "--lr", "1e-4", "--tau", ".5", "--pairs", path("pairs.txt"))


def bench(visit):
    def run(what, limit, command):      # puts each line's JSON object; of attention the shapes of docs/results.md
        found = objects_in(visit.run(command, limit)[1].encode(), b'{"key"')
        for r in found:
            if "note" not in r and re.match(r"matmul|step|.* causal (d64 T1024 tokens65536|d64 T16384|d128 T4096|"
                                            r".*(cuDNN|Flex))", r["key"]):
                visit.put(f"{what} {r['key']}", {"TFLOP/s": r["tflops"]} if "tflops" in r else
                          {"ms": r["ms"], "MiB": round(r["peak_mib"])})
        return {"results": len(found)}
    visit.check("bench", run, "bench", 90, [path("bench_1")])
    visit.check("bench, bidirectional", run, "bench, bidirectional", 90, [path("bench_0")])
    torch = [sys.executable, "dev/gpu_bench_pytorch.py"]
    if has_pytorch(visit):
        visit.check("torch", run, "torch", 260, [*torch, "--step", "64", "--tokens", path("tokens.bin")])
        visit.check("torch, attention", run, "torch, attention", 75, torch)


@functools.lru_cache(maxsize=None)
def has_pytorch(visit):
    return visit.run([sys.executable, "-c", "import torch.nn.attention as a; a.torch.zeros(1).cuda()"], 75, ())[0] == 0


def torch_library(visit):       # docs/torch.md
    def right():
        text = visit.run([sys.executable, "test/scripts/test_torch.py", "Cuda.test_on_a_gpu"], 120,
                         CABLE_LIBRARIES=WORK)[1]
        if "skipped" in text:
            raise Failed(text[-2000:])
        return {"": "ok"}

    def bench_library():
        text = visit.run([sys.executable, "dev/torch/bench.py", "--device", "cuda"], 200, CABLE_LIBRARIES=WORK)[1]
        found = objects_in(text.encode(), b'{"key"')
        for r in found:
            visit.put(f"library {r.pop('key')}", r)
        return {"results": len(found)}
    if has_pytorch(visit):
        visit.check("library", right)
        visit.check("library, bench", bench_library)


def train_all(visit):
    for size, trainer, *shape in (("124M", "gpt2", "small", "tokens.bin", 1024, 16),
                                  ("BERT base", "bert", "base", "bert_tokens.bin", 512, 32),
                                  ("350M", "gpt2", "medium", "tokens.bin", 1024, 8)):
        for pos in ("none", "cable", "alibi", "rope"):
            what = f"step {size} {pos}, {shape[2] * shape[3]} tokens"
            visit.check(what, lambda: training(visit, BF16[trainer], *shape, pos)[0])


def ranks(visit):
    count = max(n for n in (1, 2, 4, 8) if n <= len(smi("name")))
    program = lambda *words, fine=(0,): visit.run([path("comm_program"), *words], 60, fine)     # NCCL's first start
    if "without NCCL" in program("self", fine=())[1]:
        if count > 1:
            raise Late("no NCCL was found, 2.17 or newer: install libnccl-dev or set NCCL_DIR, and remove " + WORK)
        return
    visit.check("exchange", lambda: program("self") and {"": "ok"})
    if count == 1:
        return
    visit.check("sums", lambda: program("gradients", "--ranks", str(count)) and {"": "ok"})
    runs = [("--model", MODEL, "--T", T, "--B", B, "--total_batch", 8 * B * T)]
    runs += [("--gpus", n) for n in sorted({1, 2, count})]
    for t in BF16:
        visit.check("ranks " + t, same_bits, visit, BF16[t], "text.txt", *runs)
    by_host = functools.partial(same_bits, NCCL_P2P_DISABLE="1")        # not from GPU to GPU
    visit.check("ranks gpt2, by the host's memory", by_host, visit, BF16["gpt2"], "text.txt", *runs)
    visit.check("a killed rank", killed_rank, visit, count)


KILL = r'''log=$1; shift; timeout 60 "$@" >"$log" 2>&1 & trainer=$!
until rank=$(sed -n 's/.*the ranks are processes .* //p' "$log") && [ -n "$rank" ] && grep -q '^step' "$log"; do
    kill -0 $trainer || { cat "$log"; exit 1; }
    sleep 0.1
done
kill -9 $rank; wait $trainer; code=$?; cat "$log"; exit $code'''


def killed_rank(visit, count):
    """a result, if a run on several GPUs ends when its last rank is killed, and names it"""
    data = path("text.txt")
    command = [BF16["gpt2"], "--train_files", data, "--val_files", data, "--model", MODEL, "--T", T, "--B", B,
               "--total_batch", count * B * T, "--gpus", count, "--steps", 10 ** 6, "--out", path("killed")]
    start = time.monotonic()
    said = visit.run(["bash", "-c", KILL, "bash", path("killed.txt"), *map(str, command)], 70, (128 + 9,))[1]
    if f"rank {count - 1} " not in said or "was ended by signal 9" not in said:
        raise Failed("expected the name of the rank that was killed, got\n" + said[-2000:])
    return {"s": time.monotonic() - start}


def sanitizer(visit):
    def run(kind):
        done, options = 0, ["--report-api-errors", "no"] if kind == "memcheck" else []      # some tests provoke them
        for binary in map(path, map("test_".__add__, kernel_tests())):
            names = visit.run([binary, "--list"], 10)[1].split("\n")
            name = next((n for n in names if "a span leaves out exactly" in n), names[0])   # launches real kernels
            try:
                code, text = visit.run([tool("compute-sanitizer"), "--tool", kind, *options, "--error-exitcode", "9",
                                        binary, name], 20, ())
            except Late:                                # the other tests continue
                continue
            if code != 0 and "Device not supported" not in text:    # containers may lack the debuggers' interface
                raise Failed(f"{name}: exit code {code}\n{text[-2000:]}")
            done += code == 0
        return {"tests without a finding": done}
    for kind in ("racecheck", "memcheck", "synccheck", "initcheck") if tool("compute-sanitizer") else ():
        visit.check(kind, run, kind)


# for each its limit, in seconds, and what it needs built, by the beginnings of the names in WORK
STAGES = {"device": (device, 30, ""), "first": (functools.partial(compile_all, "first"), 600, ""),
          "step": (step, 130, "first"), "build": (functools.partial(compile_all, "build"), 1500, ""),
          "kernels": (kernels, 110, "test"), "losses": (losses, 110, "cpu fp32 bf16"), "bench": (bench, 320, "bench"),
          "epilogues": (epilogues, 300, "epilogues"), "counters": (counters, 180, "first"),
          "evaluate": (evaluate, 60, "first"), "ranks": (ranks, 180, "bf16 comm"), "torch": (torch_library, 250, "lib"),
          "train": (train_all, 90, "bf16"), "sanitizer": (sanitizer, 120, "test")}


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("--only", nargs="+", default=[*STAGES], choices=[*STAGES], metavar="STAGE", help=", ".join(STAGES))
    p.add_argument("--minutes", type=float, default=1e6, help="end by then; the same command continues")
    p.add_argument("--results", default="dev/results/gpu.csv", metavar="FILE", help="[dev/results/gpu.csv]")
    p.add_argument("--build", metavar="ARCH", help="only compile, for this architecture, such as sm_90a")
    p.add_argument("--pack", action="store_true", help=f"only copy headers to {HEADERS}")
    args = p.parse_args(argv)
    os.chdir(ledger.ROOT)
    os.environ["CXX"] = os.environ.get("CXX") or ("g++" if shutil.which("g++") else "clang++")
    if args.pack:
        return pack()
    if not tool("nvcc"):
        raise console.BadInput("no nvcc: install the CUDA toolkit or set NVCC=path")
    os.makedirs(WORK, exist_ok=True)
    os.environ["CPATH"] = os.path.abspath(HEADERS) + (os.pathsep + os.environ.get("CPATH", "")).rstrip(os.pathsep)
    if args.build:
        os.environ.update(ARCH=args.build, MARCH="x86-64-v3", **{} if os.environ.get("NCCL_DIR") else {"NCCL": "0"})
        args.only = ["first", "build"]
    visit = Visit("none" if args.build else smi("name")[0], os.environ.get("COMMIT") or ledger.commit(), args.results,
                  args.minutes, args.only)
    visit.configure()
    write_data()
    for name, (work, limit, _) in ((name, STAGES[name]) for name in STAGES if name in args.only):
        say(name)
        visit.stage_end = min(visit.end, time.monotonic() + (7200 if args.build else limit * visit.patience))
        try:
            work(visit)
        except Late as e:
            visit.unfinished.append(name)
            say(f"  unfinished: {e}")
    say(f"FAILED: {', '.join(visit.failed) or 'nothing'}; unfinished: {', '.join(visit.unfinished) or 'nothing'}")
    return 1 if visit.failed else 3 * bool(visit.unfinished)


if __name__ == "__main__":
    console.run(main)
