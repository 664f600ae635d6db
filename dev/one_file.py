#!/usr/bin/env python3
"""one_file.py -- dev/gpt2_cable.cpp beside ./train_gpt2: the same initial values, the same text, the same losses.

    dev/one_file.py                  20 steps on Shakespeare; one line per step
    dev/one_file.py --T 64 ...       other flags of gpt2_cable.cpp; --source FILE: another copy of it

The file is compiled twice, in float32 and in float64. How far its two losses are apart is float32's rounding error;
the trainer's loss must be within MULTIPLE times the largest of these errors of the float64 one, or the exit code is 1.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.append(os.path.join(ROOT, "scripts"))
import console      # noqa: E402

MULTIPLE = 4            # both round, each in an order of its own
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp"]


def run(command, **options):
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", **options)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def losses_of(command, env):
    """starts the program and hands out its losses as they come"""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace", env=env) as process:
        for line in process.stdout:
            found = re.match(r"step +\d+/\d+ \| loss ([0-9.]+)", line)
            yield float(found.group(1)) if found else line.rstrip("\n")
    if process.returncode != 0:
        sys.exit(f"{command[0]}: exit code {process.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="dev/gpt2_cable.cpp")
    parser.add_argument("--text", default="data/shakespeare_train.txt", help="train on this .txt file")
    parser.add_argument("--out", default="build/one_file")
    for flag, value in (("model", "2,4,64"), ("T", "128"), ("B", "8"), ("steps", "20"), ("lr", "1e-3"),
                        ("warmup", "5"), ("final_lr", "0.1"), ("weight_decay", "0.1"), ("seed", "42")):
        parser.add_argument("--" + flag, default=value)
    args = parser.parse_args()
    out = os.path.join(ROOT, args.out)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    print(f"compiling {args.source}")
    compiler = os.environ.get("CXX", "g++").split()
    for name, real in (("float", "float"), ("double", "double")):
        run([*compiler, *FLAGS, f"-DREAL={real}", args.source, "-o", os.path.join(out, name)])
    common = ["--train_files", args.text, "--T", args.T, "--B", args.B, "--lr", args.lr, "--final_lr", args.final_lr,
              "--weight_decay", args.weight_decay, "--seed", args.seed, "--steps", args.steps, "--warmup", args.warmup]
    start = os.path.join(args.out, "start")
    run([os.path.join(out, "float"), *common, "--model", args.model, "--steps", "0", "--out", start])
    run(["./train_gpt2", *common, "--load", start, "--out", os.path.join(args.out, "trainer"), "--val_every", "0",
         "--sample_every", "0"], env=env)
    trained = [r["loss"] for r in console.read_log(os.path.join(out, "trainer"), "train", ended=True)]
    exact = [x for x in losses_of([os.path.join(out, "double"), *common, "--model", args.model, "--tokens", "0"], env)
             if isinstance(x, float)]
    print(f"{'step':>6} {'in float64':>12} {'one file':>12} {'./train_gpt2':>12}")
    worst, error, step = 0.0, 0.0, 0
    for loss in losses_of([os.path.join(out, "float"), *common, "--model", args.model], env):
        if not isinstance(loss, float):
            print(loss)
            continue
        print(f"{step + 1:6d} {exact[step]:12.8f} {loss:12.8f} {trained[step]:12.8f}", flush=True)
        error = max(error, abs(loss - exact[step]))
        worst = max(worst, abs(trained[step] - exact[step]))
        step += 1
    good = step == len(trained) == len(exact) == int(args.steps) and worst <= MULTIPLE * error
    print(f"\n{step} steps; from float64, the one file in float32 is at most {error:.1e} off and ./train_gpt2 "
          f"{worst:.1e}" + ("" if good else f": expected at most {MULTIPLE} times the former"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
