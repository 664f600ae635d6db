#!/usr/bin/env bash
# run.sh -- `make bench`: training speed compared with PyTorch's, what CABLE costs over no encoding, the memory of a
# long evaluation, and what BERT's head saves by computing the masked tokens alone. The programs run in turns on this
# machine, so that a ratio means something on a busy machine too.
#
#   dev/bench/run.sh [small|124M|lengths|memory|bert]...     default: all but lengths, about 10 minutes on 2 cores
#   THREADS=2 ROUNDS=2
set -euo pipefail
cd "$(dirname "$0")/../.."
dev/install.sh bench
make train_gpt2 train_bert
export OMP_NUM_THREADS=${THREADS:-2}
exec "$(dev/install.sh --python torch numpy)" - "$@" <<'PYTHON'
import json
import os
import platform
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time

OUT = "build/bench"
THREADS, ROUNDS = os.environ["OMP_NUM_THREADS"], int(os.environ.get("ROUNDS", "2"))
# --model, V, T, B, data, steps of ours, steps of PyTorch
SHAPES = {"small": ("4,4,128", 256, 256, 8, f"{OUT}/text.txt", 40, 15),
          "124M": ("12,12,768", 50257, 64, 4, f"{OUT}/random.bin", 7, 4)}


def make_data():
    """text for the byte model, random tokens for the others: speed does not depend on what they are"""
    os.makedirs(OUT, exist_ok=True)
    with open(f"{OUT}/text.txt", "wb") as f:
        for directory in ("llmc", "test", "scripts", "."):
            for name in sorted(os.listdir(directory)):
                if name.endswith((".h", ".cuh", ".cu", ".py", ".md")):
                    f.write(open(os.path.join(directory, name), "rb").read())
    random.seed(42)
    n = 50000
    with open(f"{OUT}/random.bin", "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, n, *[0] * 253))
        f.write(struct.pack(f"<{n}H", *(random.randrange(50257) for _ in range(n))))
    with open(f"{OUT}/bert.bin", "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, n, 30522, 102, *[0] * 251))
        f.write(struct.pack(f"<{n}H", *(random.randrange(1000, 30522) for _ in range(n))))


def run(command):
    """the output of a command and its peak memory in bytes"""
    with open(f"{OUT}/output.txt", "w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if status != 0:
        sys.exit(f"{' '.join(command)}\n{text[-2000:]}\nended with status {status}")
    return text, usage.ru_maxrss * 1024


def ours(shape, pos, extra=()):
    """tokens/s of train_gpt2: the median step, without the first quarter, which warms up"""
    model, V, T, B, data, steps, _ = SHAPES[shape]
    out = f"{OUT}/{shape}_{pos}"
    shutil.rmtree(out, ignore_errors=True)
    run(["./train_gpt2", "--train_files", data, "--val_files", data, "--model", model, "--pos", pos, "--T", str(T),
         "--B", str(B), "--steps", str(steps), "--val_every", "0", "--sample_every", "0", "--recompute", "0",
         "--out", out, *extra])
    ms = [r["ms"] for r in map(json.loads, open(f"{out}/log.jsonl")) if r["kind"] == "train"]
    return B * T / statistics.median(ms[len(ms) // 4:]) * 1e3


def cpu_seconds(command):
    """of the process itself: other programs on the machine disturb it less than the time on the clock"""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)}\nended with status {status}")
    return usage.ru_utime


def lengths():
    """milliseconds per step, per 16,384 evaluated tokens and per 100 generated ones; none and cable in turns, and the
    least of the rounds"""
    text = open(f"{OUT}/text.txt", errors="replace").read().encode("ascii", "replace").decode()
    trainer = ["./train_gpt2", "--threads", THREADS]
    best = {}
    for r in range(ROUNDS):
        for T, B, steps in (256, 8, 24), (1024, 2, 24), (4096, 1, 12):
            for pos in ("none", "cable"):
                out = f"{OUT}/lengths_{pos}_{T}"
                shutil.rmtree(out, ignore_errors=True)
                train = [*trainer, "--train_files", f"{OUT}/text.txt", "--model", "4,4,128", "--T", str(T), "--B",
                         str(B), "--val_every", "0", "--sample_every", "0", "--recompute", "0", "--pos", pos,
                         "--schedule", "constant"]
                run([*train, "--steps", "2", "--checkpoint_every", "2", "--out", out])
                use = [*trainer, "--load", f"{out}/step_00000002", "--val_files", f"{OUT}/text.txt"]
                evaluate = [*use, "--eval_lengths", str(T), "--eval_tokens"]
                generate = [*use, "--temperature", "0", "--generate", text[:T], "--tokens"]
                pairs = {"training": ([*train, "--steps", str(steps + 1)], [*train, "--steps", "1"], steps),
                         "evaluation": ([*evaluate, str(5 << 14)], [*evaluate, str(1 << 14)], 4),
                         "generation": ([*generate, "401"], [*generate, "1"], 4)}
                for what, (long, short, n) in pairs.items():
                    ms = 1e3 * (cpu_seconds(long) - cpu_seconds(short)) / n
                    best[what, T, pos] = min(ms, best.get((what, T, pos), ms))
                print(f"  round {r + 1}/{ROUNDS} T {T} {pos} (load {os.getloadavg()[0]:.1f})", flush=True)
    print("\n| T | | none, ms | cable, ms | cable over none |\n|---|---|---|---|---|")
    for what, T, pos in best:
        if pos == "none":
            none, cable = best[what, T, "none"], best[what, T, "cable"]
            print(f"| {T:,} | {what} | {none:.1f} | {cable:.1f} | {100 * (cable / none - 1):+.1f} % |")


def bert_ms(share):
    """milliseconds per step when this share of the tokens is masked; with nearly all of them masked, this is what
    a head that computes every row costs"""
    out = f"{OUT}/bert_{share}"
    shutil.rmtree(out, ignore_errors=True)
    run(["./train_bert", "--train_files", f"{OUT}/bert.bin", "--model", "4,4,256", "--T", "128", "--B", "8",
         "--steps", "9", "--val_every", "0", "--mask_share", share, "--out", out])
    records = map(json.loads, open(f"{out}/log.jsonl"))
    return statistics.median([r["ms"] for r in records if r["kind"] == "train"][2:])


def pytorch(python, shape, pos):
    """tokens/s of the same model in PyTorch"""
    model, V, T, B, _, _, steps = SHAPES[shape]
    text, _ = run([python, "dev/bench/bench_pytorch.py", "--model", model, "--vocab", str(V), "--T", str(T),
                   "--B", str(B), "--pos", pos, "--steps", str(steps), "--threads", THREADS])
    return float(re.search(r"tokens/s ([0-9.]+)", text).group(1))


def torch_version(python):
    p = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], stdout=subprocess.PIPE,
                       stderr=subprocess.DEVNULL, universal_newlines=True)
    return p.stdout.strip() if p.returncode == 0 else None


def processor():
    try:
        return re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read()).group(1)
    except (OSError, AttributeError):
        return platform.processor()


def main():
    wanted = sys.argv[1:] or ["small", "124M", "memory", "bert"]
    if set(wanted) - {"small", "124M", "lengths", "memory", "bert"}:
        sys.exit(f"expected small, 124M, lengths, memory or bert, got {' '.join(wanted)}")
    make_data()
    pythons = {}
    for python in (sys.executable, shutil.which("python3")):
        version = python and torch_version(python)
        if version and version not in pythons:
            pythons[version] = python
    compiler = subprocess.run(["g++", "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout
    compiler = compiler.split("\n")[0]
    flags = open("build/cpu.flags").read()
    print(f"{processor()}, {os.cpu_count()} cores, {THREADS} threads; {compiler}; "
          f"{'OpenBLAS' if 'USE_CBLAS' in flags else 'portable matmul'}; PyTorch {', '.join(pythons)}; "
          f"float32, forward + backward + update; medians of {ROUNDS} rounds in turns", flush=True)
    if "lengths" in wanted:
        lengths()
    shapes = [s for s in SHAPES if s in wanted]
    columns = ["ours"] + list(pythons)
    total, done, start = len(shapes) * ROUNDS * 2 * len(columns), 0, time.time()
    speed = {}
    for shape in shapes:
        for _ in range(ROUNDS):
            for column in columns:
                for pos in ("none", "cable"):
                    x = ours(shape, pos) if column == "ours" else pytorch(pythons[column], shape, pos)
                    speed.setdefault((shape, pos, column), []).append(x)
                    done += 1
                    left = (time.time() - start) / done * (total - done)
                    print(f"  {done}/{total} {shape} {pos} {column}: {x:.0f} tokens/s (load {os.getloadavg()[0]:.1f}; "
                          f"{left / 60:.0f} min left)", flush=True)
    if shapes:
        print("\n| model | encoding | ours, tokens/s |" + "".join(f" PyTorch {v} | ratio |" for v in pythons))
        print("|---|---|---|" + "---|---|" * len(pythons))
        for shape in shapes:
            model, V, T, B = SHAPES[shape][:4]
            for pos in ("none", "cable"):
                mid = {c: statistics.median(speed[shape, pos, c]) for c in columns}
                print(f"| {model} V{V} T{T} B{B} | {pos} | {mid['ours']:,.0f} |" +
                      "".join(f" {mid[v]:,.0f} | {mid['ours'] / mid[v]:.2f} |" for v in pythons))
    for shape in shapes:
        pairs = [n / c - 1 for n, c in zip(speed[shape, "none", "ours"], speed[shape, "cable", "ours"])]
        rounds = ", ".join(f"{100 * p:+.1f}" for p in pairs)
        print(f"cable over none, {shape}: {100 * statistics.median(pairs):+.1f} % (rounds: {rounds})")
    if "memory" in wanted:
        SHAPES["model"] = SHAPES["small"][:5] + (2, 0)
        ours("model", "cable", ["--checkpoint_every", "2"])
        _, peak = run(["./train_gpt2", "--load", f"{OUT}/model_cable/step_00000002", "--val_files", f"{OUT}/text.txt",
                       "--eval_lengths", "16384", "--eval_tokens", "32768"])
        print(f"evaluation of 4,4,128 V256 at T = 16,384: peak {peak / 1e6:.0f} MB resident")
    if "bert" in wanted:
        pairs = [(bert_ms("0.15"), bert_ms("0.999")) for _ in range(ROUNDS)]
        saved = statistics.median(1 - a / b for a, b in pairs)
        masked, every = (statistics.median(column) for column in zip(*pairs))
        print(f"BERT 4,4,256 V30522 T128 B8: {masked:.0f} ms per step if the head computes the masked 15 %, "
              f"{every:.0f} ms if it computes all tokens: {100 * saved:.0f} % less")


main()
PYTHON
