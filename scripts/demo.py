#!/usr/bin/env python3
"""demo.py -- the point of CABLE in two minutes: four small byte-level models, alike but for their positional encoding,
learn Shakespeare at T = 128 and are then evaluated at lengths up to 16 times that.

    scripts/demo.py            GPT-2; results in build/demo: a table, lengths.png, one directory per model
    scripts/demo.py bert       BERT, on masked bytes; results in build/demo_bert
    scripts/demo.py tasks      tasks with one right answer, at longer lengths than trained; results in build/demo_tasks
    DEMO_STEPS=800 ...         a longer training

The exit code is 1 unless cable and alibi extrapolate and the other two do not, and the weights are those of README.md
(docs/results.md for BERT), bit for bit, whatever the processor and the compiler: docs/reproducibility.md.
"""
import os
import re
import shutil
import subprocess
import sys

import runqueue
from console import BadInput, output_of, parser, read_log, run, weights_sha256

ROOT = runqueue.ROOT
LENGTHS = [64, 128, 256, 512, 1024, 2048]
# PPL(2048) / PPL(128) of each encoding; learned has no positions beyond 128
EXPECTED = {"gpt2": {"cable": ("<=", 1.02), "alibi": ("<=", 1.02), "rope": (">=", 1.2), "sinusoidal": (">=", 1.5)},
            "bert": {"cable": ("<=", 1.02), "alibi": ("<=", 1.02), "sinusoidal": (">=", 1.1), "learned": None}}
SAMPLE = {"gpt2": ["--generate", "ROMEO:\n", "--tokens", "300", "--temperature", "0.7", "--top_k", "40"],
          "bert": ["--predict", "What say yo[MASK] to this, my l[MASK]rd?\n"]}
PUBLISHED = {"gpt2": "README.md", "bert": "docs/results.md"}
STEPS = {"gpt2": 400, "bert": 600, "tasks": 1200}


def published(kind):
    """{encoding: the first 12 digits of its weights' SHA-256}, from the table in the documentation"""
    with open(os.path.join(ROOT, PUBLISHED[kind]), encoding="utf-8") as f:
        return dict(re.findall(r"^ *(\w+) .* ([0-9a-f]{12})$", f.read(), re.M))


def table(kind, out, steps):
    """prints perplexities and weights; True if every line is as expected"""
    what = "perplexity per byte" if kind == "gpt2" else "pseudo-perplexity per masked byte"
    print(f"{what} of held-out text, trained at T = 128")
    print(f"{'T':>10}" + "".join(f" {T:>5}" for T in LENGTHS) + "  2048/128     SHA-256 of weights")
    extrapolates, different = True, []
    for pos, expected in EXPECTED[kind].items():
        ppl = {r["T"]: r["ppl"] for r in read_log(os.path.join(out, pos), "extrapolation", ended=True)}
        line = f"{pos:>10}" + "".join(f" {ppl[T]:5.2f}" if T in ppl else f" {'-':>5}" for T in LENGTHS)
        if expected is None:
            holds, line = sorted(ppl) == [64, 128], line + " " * 21
        else:
            ratio = ppl[2048] / ppl[128]
            holds = ratio <= expected[1] if expected[0] == "<=" else ratio >= expected[1]
            line += f"  {ratio:.3f} {expected[0]} {expected[1]:<4} {'yes' if holds else 'NO ':3}  "
        digits = weights_sha256(os.path.join(out, pos, f"step_{steps:08d}"))[:12]
        print(line + digits)
        extrapolates = extrapolates and holds
        if digits != published(kind).get(pos):
            different.append(pos)
    print()
    others = " and ".join(list(EXPECTED[kind])[2:])
    if extrapolates:
        print(f"cable and alibi hold beyond the trained length, {others} do not.")
    else:
        print("This is not what the paper says: a line above has a NO." +
              (f" {steps} steps are few: with 400 or more every line holds." if steps < 400 else ""))
    if steps != STEPS[kind] or "DEMO_SEED" in os.environ:
        print(f"weights: not compared with {PUBLISHED[kind]}, which are those of {STEPS[kind]} steps and seed 42.")
        return extrapolates
    if different:
        print(f"weights: {', '.join(different)}: expected those of {PUBLISHED[kind]}, bit for bit. If you have changed "
              "no kernel and no flag of the compiler, python3 dev/hashes.py says which builds agree.")
    else:
        print(f"weights: bit for bit as in {PUBLISHED[kind]}.")
    return extrapolates and not different


def jobs_of(kind, out, trainer, steps):
    """a training for each encoding, which evaluates at its end"""
    flags = {"train_files": "data/shakespeare_train.txt", "val_files": "data/shakespeare_val.txt", "model": "2,4,64",
             "T": "128", "B": "16", "steps": str(steps), "lr": "2e-3", "warmup": str(min(steps // 10, 100)),
             "final_lr": "0.1", "weight_decay": "0.1", "val_every": "0", "checkpoint_every": str(steps),
             "seed": os.environ.get("DEMO_SEED", "42"), "eval_lengths": ",".join(map(str, LENGTHS))}
    if kind == "gpt2":
        flags["sample_every"] = "0"
    for pos in EXPECTED[kind]:
        where = f"{out}/{pos}"
        train = runqueue.Command("train", f"./{trainer}", {**flags, "pos": pos, "out": where}, where,
                                 f"{where}/train.done", 1)
        yield runqueue.Job(pos, "", [train])


def main(argv):
    p = parser(__doc__)
    p.add_argument("kind", nargs="?", choices=list(STEPS), default="gpt2")
    kind = p.parse_args(argv).kind
    steps = os.environ.get("DEMO_STEPS", str(STEPS[kind]))
    if not re.fullmatch(r"[1-9][0-9]{0,5}", steps):
        raise BadInput(f"DEMO_STEPS={steps}: expected a number of training steps")
    os.chdir(ROOT)
    trainer = "train_bert" if kind == "bert" else "train_gpt2"
    out = "build/demo" if kind == "gpt2" else f"build/demo_{kind}"
    print(f"building ./{trainer} (half a minute)", flush=True)
    output_of(["make", trainer])
    shutil.rmtree(out, ignore_errors=True)
    if kind == "tasks":
        return subprocess.run([sys.executable, "scripts/tasks.py", "--out", out, "--pos", "cable,t5,rope", "--tasks",
                               "sort,reverse", "--seeds", "1", "--steps", steps]).returncode
    slots = runqueue.slots(1)
    code = runqueue.Queue("demo.py", jobs_of(kind, out, trainer, int(steps)), slots).run()
    if code:
        return code
    sample = subprocess.run([f"./{trainer}", "--load", f"{out}/cable/step_{int(steps):08d}", *SAMPLE[kind]],
                            env={**os.environ, **slots[0]}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            text=True, errors="replace").stdout
    start = sample.find("ROMEO:") if kind == "gpt2" else 0
    does = "writes" if kind == "gpt2" else "takes the masked bytes for"
    print(f"\nWhat the cable model {does}:")
    print(sample[start:])
    subprocess.run([sys.executable, "scripts/plot.py", "lengths", *(f"{out}/{pos}" for pos in EXPECTED[kind]), "-o",
                    f"{out}/lengths.png"], check=True)
    return 0 if table(kind, out, int(steps)) else 1


if __name__ == "__main__":
    run(main)
