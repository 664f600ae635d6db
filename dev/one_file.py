#!/usr/bin/env python3
"""one_file.py -- dev/gpt2_cable.cpp beside ./train_gpt2: the same initial values, the same text, the same losses.

    dev/one_file.py                  20 steps on Shakespeare; one line per step
    dev/one_file.py --T 64 ...       other flags of gpt2_cable.cpp; --source FILE: another copy of it

The file is compiled twice, in float32 and in float64. How far its two losses are apart is float32's rounding error;
the trainer's loss must be within MULTIPLE times the largest of these errors of the float64 one, or the exit code is 1.
"""
import functools
import os
import re
import shutil
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.append(os.path.join(ROOT, "scripts"))
import console      # noqa: E402

MULTIPLE = 4            # both round, each in an order of its own
run = functools.partial(console.output_of, cwd=ROOT)
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp"]


def losses_of(text):
    return [float(loss) for loss in re.findall(r"^step +\d+/\d+ \| loss ([0-9.]+)", text, re.M)]


def main(argv):
    parser = console.parser(__doc__)
    parser.add_argument("--source", default="dev/gpt2_cable.cpp")
    parser.add_argument("--text", default="data/shakespeare_train.txt", help="train on this .txt file")
    parser.add_argument("--out", default="build/one_file")
    for flag, value in (("model", "2,4,64"), ("T", "128"), ("B", "8"), ("steps", "20"), ("lr", "1e-3"),
                        ("warmup", "5"), ("final_lr", "0.1"), ("weight_decay", "0.1"), ("seed", "42")):
        parser.add_argument("--" + flag, default=value)
    args = parser.parse_args(argv)
    out = os.path.join(ROOT, args.out)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    print(f"compiling {args.source}")
    compiler = os.environ.get("CXX", "g++").split()
    for real in "float", "double":
        run([*compiler, *FLAGS, f"-DREAL={real}", args.source, "-o", os.path.join(out, real)])
    common = ["--train_files", args.text, "--T", args.T, "--B", args.B, "--lr", args.lr, "--final_lr", args.final_lr,
              "--weight_decay", args.weight_decay, "--seed", args.seed, "--steps", args.steps, "--warmup", args.warmup]
    start = os.path.join(args.out, "start")
    run([os.path.join(out, "float"), *common, "--model", args.model, "--steps", "0", "--out", start])
    run(["./train_gpt2", *common, "--load", start, "--out", os.path.join(args.out, "trainer"), "--val_every", "0",
         "--sample_every", "0"], env=env)
    trained = [r["loss"] for r in console.read_log(os.path.join(out, "trainer"), "train", ended=True)]
    train = lambda real, *more: run([os.path.join(out, real), *common, "--model", args.model, *more], env=env)
    exact, text = losses_of(train("double", "--tokens", "0")), train("float")
    print(re.sub(r"^step .*\n", "", text, flags=re.M) + f"{'step':>6} {'in float64':>12} {'one file':>12} "
          f"{'./train_gpt2':>12}")
    found, worst, error = losses_of(text), 0.0, 0.0
    for step, (x, ours, theirs) in enumerate(zip(exact, found, trained), 1):
        print(f"{step:6d} {x:12.8f} {ours:12.8f} {theirs:12.8f}")
        error, worst = max(error, abs(ours - x)), max(worst, abs(theirs - x))
    good = len(found) == len(trained) == len(exact) == int(args.steps) and worst <= MULTIPLE * error
    print(f"\n{len(found)} steps; from float64, the one file in float32 is at most {error:.1e} off and ./train_gpt2 "
          f"{worst:.1e}" + ("" if good else f": expected at most {MULTIPLE} times the former"))
    return 0 if good else 1


if __name__ == "__main__":
    console.run(main)
