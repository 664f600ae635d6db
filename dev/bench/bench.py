"""bench.py -- what dev/bench/run.sh measures: it builds the trainers, finds PyTorch and starts this."""
import math
import os
import platform
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array

sys.path += ["scripts", "data", "dev"]
import common   # noqa: E402
import console  # noqa: E402
import ledger   # noqa: E402
import measured     # noqa: E402
import runqueue     # noqa: E402

OUT = "build/bench"
THREADS, ROUNDS, PYTORCH = os.environ["THREADS"], int(os.environ.get("ROUNDS", "2")), os.environ.get("PYTORCH_PYTHON")
CPU_TIME, FORMS = THREADS == "1", os.environ.get("FORMS", "eager,compiled")
# --model, V, T, B, data, steps of ours, steps of PyTorch
TEXT = f"{OUT}/text.txt"
SHAPES = {"256": ("4,4,128", 256, 256, 8, TEXT, 24, 10), "1024": ("4,4,128", 256, 1024, 2, TEXT, 16, 8),
          "4096": ("4,4,128", 256, 4096, 1, TEXT, 8, 5), "124M": ("12,12,768", 50257, 64, 4, f"{OUT}/random.bin", 7, 4)}
ENCODINGS = ("none", "alibi", "cable")
COSTS = ("256", "1024")             # shapes of costs() and shares()
# the least milliseconds of numpy's BLAS for each M x N x K, as many operands in turn as a step has of them
NUMPY = """import sys, time, numpy
for size in sys.argv[1:]:
    M, N, K, sets = map(int, size.split("x"))
    pairs = [[numpy.random.rand(*shape).astype("f") for shape in ((M, K), (K, N))] for _ in range(sets)]
    least = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for a, b in pairs:
            a @ b
        least = min(least, time.perf_counter() - start)
    print(1e3 * least)
"""


def make_data():
    """text for the byte model, random tokens for the rest: speed does not depend on what they are"""
    os.makedirs(OUT, exist_ok=True)
    with console.replacing(f"{OUT}/text.txt") as f:
        for directory in ("llmc", "test", "scripts", "."):
            for name in sorted(os.listdir(directory)):
                if name.endswith((".h", ".cuh", ".cu", ".py", ".md")):
                    f.write(open(os.path.join(directory, name), "rb").read())
    random.seed(42)
    ids = array("H", (random.randrange(50257) for _ in range(50000)))
    console.write_whole(f"{OUT}/random.bin", common.header(len(ids)) + ids.tobytes())


def run(command):
    """the output of a command, and what it used: memory, and CPU time, which other programs disturb little"""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if status != 0:
        sys.exit(f"{console.command_line(command)}\n{text[-2000:]}\nended with status {status}")
    return text, usage


def trainer(shape, pos, steps, *extra):
    """the command of a run of this many steps, and where its files are"""
    model, _, T, B, data = SHAPES[shape][:5]
    out = f"{OUT}/{shape}_{pos}"
    shutil.rmtree(out, ignore_errors=True)
    return ["./train_gpt2", "--threads", THREADS, "--train_files", data, "--val_files", data, "--model", model, "--pos",
            pos, "--T", str(T), "--B", str(B), "--steps", str(steps), "--val_every", "0", "--sample_every", "0",
            "--recompute", "0", "--out", out, *extra], out


def step_ms(shape, pos):
    """milliseconds of each step"""
    command, out = trainer(shape, pos, SHAPES[shape][5])
    run(command)
    return [r["ms"] for r in console.read_log(out, "train", ended=True)]


def ours(shape, pos):
    """tokens/s of train_gpt2: of the median step, without the first quarter, which warms up; or by CPU time"""
    T, B, steps = SHAPES[shape][2], SHAPES[shape][3], SHAPES[shape][5]
    if CPU_TIME:
        long, short = (run(trainer(shape, pos, n)[0])[1] for n in (steps + 1, 1))
        return B * T * steps / (long.ru_utime + long.ru_stime - short.ru_utime - short.ru_stime)
    ms = step_ms(shape, pos)
    return B * T / statistics.median(ms[len(ms) // 4:]) * 1e3


def pytorch(shape, pos):
    """({form: tokens/s} of the same model in PyTorch, its version)"""
    model, V, T, B, _, _, steps = SHAPES[shape]
    text, _ = run([PYTORCH, "dev/bench/bench_pytorch.py", "--model", model, "--vocab", str(V), "--T", str(T),
                   "--B", str(B), "--pos", pos, "--steps", str(steps), "--threads", THREADS,
                   "--forms", FORMS, *["--cpu_time"] * CPU_TIME])
    found = re.findall(r"^pytorch (\S+) (\w+) \S+ tokens/s (\d+)", text, re.M)
    return {form: float(x) for _, form, x in found}, found[0][0]


def processor():
    try:
        return re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read()).group(1)
    except (OSError, AttributeError):
        return platform.processor()


def compare(shapes):
    """prints the table of tokens/s, and writes it to CSV"""
    speed, version, start = {}, "", time.time()
    turns = [(r, shape, pos) for r in range(ROUNDS) for shape in shapes for pos in ENCODINGS]
    for done, (r, shape, pos) in enumerate(turns, 1):
        speed.setdefault((shape, pos, "ours"), []).append(ours(shape, pos))
        forms, version = pytorch(shape, pos)
        for form, x in forms.items():
            speed.setdefault((shape, pos, form), []).append(x)
        left = (time.time() - start) / done * (len(turns) - done)
        print(f"  {done}/{len(turns)} {shape} {pos}: ours {speed[shape, pos, 'ours'][-1]:.0f}, " +
              ", ".join(f"{form} {x:.0f}" for form, x in forms.items()) +
              f" tokens/s (load {os.getloadavg()[0]:.1f}; {left / 60:.0f} min left)", flush=True)
    columns = ["model", "T", "encoding", "ours", "PyTorch", "form", "ratio", "over none, %"]
    rows = []
    for shape in shapes:
        model, _, T = SHAPES[shape][:3]
        for pos in ENCODINGS:
            x = statistics.median(speed[shape, pos, "ours"])
            y, form = max((statistics.median(speed[key]), key[2]) for key in speed
                          if key[:2] == (shape, pos) and key[2] != "ours")
            more = statistics.median(n / c for n, c in zip(speed[shape, "none", "ours"], speed[shape, pos, "ours"])) - 1
            rows.append([model, str(T), pos, f"{x:.0f}", f"{y:.0f}", form, f"{x / y:.2f}", f"{100 * more:+.1f}"])
    machine = (f"{processor()}, {os.cpu_count()} cores, {THREADS} threads, PyTorch {version}, "
               f"{'CPU time' if CPU_TIME else 'wall-clock time'}, medians of {ROUNDS} rounds, "
               f"load {os.getloadavg()[0]:.0f}")
    given = f"THREADS={THREADS} ROUNDS={ROUNDS} FORMS={shlex.quote(FORMS)}"
    command = f"{given} {console.command_line(['dev/bench/run.sh', *sys.argv[1:]])}"
    print("\n".join(["", f"{machine}; commit {ledger.commit()}; {command}", "", *console.table(columns, rows)]))
    if os.environ.get("CSV"):
        more = {"machine": machine, "commit": ledger.commit(), "command": command}
        ledger.write(os.environ["CSV"], [{**dict(zip(columns, row)), **more} for row in rows])


def costs():
    """prints how much longer the fastest training step takes with each encoding than with none, in turns; and how far
    the fastest steps of an encoding's rounds are apart, which is how much of that is chance"""
    names = console.encodings(runqueue.help_of("./train_gpt2"))
    fastest, start = {}, time.time()
    turns = [(r, shape, pos) for r in range(ROUNDS) for shape in COSTS for pos in names]
    for done, (_, shape, pos) in enumerate(turns, 1):
        fastest.setdefault((shape, pos), []).append(min(step_ms(shape, pos)))
        left = (time.time() - start) / done * (len(turns) - done)
        print(f"  {done}/{len(turns)} {shape} {pos}: {fastest[shape, pos][-1]:.1f} ms "
              f"(load {os.getloadavg()[0]:.1f}; {left / 60:.0f} min left)", flush=True)
    print(f"\ncommit {ledger.commit()}, {THREADS} threads, {ROUNDS} rounds\n")
    cells = lambda x, none: [f"{100 * (min(x) / min(none) - 1):+.1f}", f"{100 * (max(x) / min(x) - 1):.1f}"]
    rows = [[f"`{pos}`", *(c for T in COSTS for c in cells(fastest[T, pos], fastest[T, "none"]))] for pos in names]
    head = ["encoding", *(column for T in COSTS for column in (f"T {T}: over none, %", "rounds apart, %"))]
    print("\n".join(console.table(head, rows)))


def shares():
    """prints what a step's products and attention reach of a loop of multiply-adds that wait for nothing, and numpy's
    BLAS on the same products: of each the fastest of all rounds, which take turns"""
    limit, least = 0.0, {}
    subprocess.run(["g++", "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-I.", "-x", "c++",
                    "dev/bench/fma.cu", "-o", f"{OUT}/fma"], check=True)
    for r in range(ROUNDS):
        for shape in COSTS:
            limit = max(limit, float(run([f"{OUT}/fma"])[0].split()[0]))
            text = run([*trainer(shape, "none", 4, "--profile", "3")[0]])[0]
            calls = {row[:3]: row[3] for row in measured.rows(text) if re.match("matmul|attention", row[0])}
            products = [key for key in calls if key[1] != "-"]
            blas = run([PYTORCH, "-c", NUMPY, *(f"{size}x{n}" for _, size, n in products)])[0].split()
            calls |= {("numpy", *key[1:]): float(ms) for key, ms in zip(products, blas)}
            for key, ms in calls.items():
                least[shape, *key] = min(ms, least.get((shape, *key), ms))
        print(f"  {r + 1}/{ROUNDS} (load {os.getloadavg()[0]:.1f})", flush=True)
    rows = []
    for shape in COSTS:
        (_, _, C), T, B = SHAPES[shape][0].split(","), *SHAPES[shape][2:4]
        for kernel in ("matmul_kernel", "numpy", "attention_forward_kernel", "attention_backward_kernel"):
            found = {key: ms for key, ms in least.items() if key[:2] == (shape, kernel)}
            # attention: pairs that are seen, 2 products of HS forward and 5 backward
            pairs = B * T * (T + 1) // 2 * int(C) * (2 if kernel.endswith("forward_kernel") else 5)
            work = sum(2 * n * (math.prod(map(int, size.split("x"))) if size != "-" else pairs)
                       for _, _, size, n in found)
            rate = 1e-6 * work / sum(found.values())
            rows.append([str(T), kernel, f"{rate:.1f}", f"{rate / limit:.2f}"])
    print(f"\ncommit {ledger.commit()}, {THREADS} threads, {ROUNDS} rounds; the limit is {limit:.1f} GFLOP/s\n")
    print("\n".join(console.table(["T", "what", "GFLOP/s", "of the limit"], rows)))


def main():
    wanted = sys.argv[1:] or [*SHAPES, "shares", "memory"]
    if set(wanted) - {*SHAPES, "memory", "encodings", "shares"}:
        sys.exit(f"expected {', '.join(SHAPES)}, memory, shares or encodings, got {' '.join(wanted)}")
    make_data()
    compiler = subprocess.run(["g++", "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout
    print(f"{processor()}, {os.cpu_count()} cores, {THREADS} threads; {compiler.splitlines()[0]}; "
          "float32, training", flush=True)
    shapes = [s for s in SHAPES if s in wanted]
    if shapes:
        compare(shapes)
    if "shares" in wanted:
        shares()
    if "encodings" in wanted:
        costs()
    if "memory" in wanted:
        command, out = trainer("256", "cable", 2, "--checkpoint_every", "2")
        run(command)
        _, used = run(["./train_gpt2", "--load", f"{out}/step_00000002", "--val_files", TEXT, "--eval_lengths", "16384",
                       "--eval_tokens", "32768"])
        print(f"evaluation of 4,4,128 V256 at T = 16,384: peak {used.ru_maxrss * 1024 / 1e6:.0f} MB resident")


if __name__ == "__main__":
    main()
