#!/usr/bin/env python3
"""verdict.py -- is a published number reproduced, contradicted, or undecided?

    scripts/verdict.py                  the rows: what is published, and what a seed of ours costs
    scripts/verdict.py ROW...           trains the seeds that these rows lack, and says a word for each number
    scripts/verdict.py ROW --seeds 4    the fourth seed only: 45 minutes, say; results stay in --results
    scripts/verdict.py index-rope --trainer ./train_gpt2cu    on a GPU, which this row needs

A row is a training by scripts/tasks.py of the published model, and the numbers that it was tested for; the schedule is
ours where the paper gives none. The paper's own tables need a GPU: scripts/paper.py trains their rows, and
scripts/report.py puts the published numbers beside them.

The interval is Student's at 95 %, over the seeds of --results, within 0 and 100 %. A published number is an interval
too: its own +-, or what it was rounded from, and at least 0.05 %, because a test has a few wrong bits more or less. The
word is *contradicted* if the two have no point in common; else *reproduced* if ours is at most as wide as the published
number is large, or as WIDTH points where that is more; else *undecided*, as it always is with one seed.
"""
import collections
import os
import statistics
import subprocess
import sys

import compare
import console
import ledger
from console import COUNT, PERCENT, POSITIVE, ROOT, SHARE, TEXT, BadInput, naturals

WIDTH = 5.0
KEY = "row", "task", "seed"             # of --results

# cells: {task of tasks.csv: (published %, its own +-)}; measure: a row of tasks.csv -> our number of it, in %
Row = collections.namedtuple("Row", "pos task cells measure source flags minutes")


wrong_bits = lambda row: 100 * (1 - row["accuracy"])
right_answers = lambda row: 100 * row["exact"] / row["examples"]

FLIP_FLOP = {"model": "1,2,64", "length": 32, "B": 16, "steps": 30_000, "lr": "1e-2", "examples": 160_000}
INDEXING = {"model": "8,8,512", "steps": 100_000, "lr": "2e-4", "examples": 1_600_000}
PATH = "PaTH (arXiv 2505.16381), table 1: wrong bits of 256 instructions"
ROWS = {
    "fflm-rope": Row("rope", "fflm", {"fflm": (6.9, 0.05), "fflm_sparse": (40.3, 0.05), "fflm_dense": (0.01, 0.05)},
                     wrong_bits, PATH, FLIP_FLOP, 45),
    "fflm-fox": Row("fox", "fflm", {"fflm": (8.3, 0.05), "fflm_sparse": (36.3, 0.05), "fflm_dense": (0.0, 0.05)},
                    wrong_bits, PATH, FLIP_FLOP, 50),
    "index-rope": Row("rope", "index", {"index": (11.16, 2.45)}, right_answers,
                      "PoPE (arXiv 2509.10534v3), table 9: right letters", INDEXING, 4200),
}


def interval(numbers):
    """(least, most) of the mean at 95 %, in %; all of 0 to 100 where there is one number"""
    if len(numbers) < 2:
        return 0.0, 100.0
    low, high = compare.over_seeds(numbers)
    return max(0.0, float(low)), min(100.0, float(high))


def word(published, spread, ours):
    """of a published number and our interval"""
    least, most = ours
    if most < published - spread or least > published + spread:
        return "contradicted"
    return "reproduced" if most - least <= max(published, WIDTH) else "undecided"


def verdicts(name, results):
    """a line for each number; results: the rows of --results"""
    for task, (published, spread) in ROWS[name].cells.items():
        here = [r for r in results if r["row"] == name and r["task"] == task]
        numbers = [r["percent"] for r in here]
        least, most = interval(numbers)
        yield (f"{task}: {word(published, spread, (least, most))}: published {published:g} %, ours "
               f"{statistics.mean(numbers):.3g} % [{least:.3g}, {most:.3g}], seeds "
               f"{', '.join(str(r['seed']) for r in here)}, commit {', '.join(sorted({r['commit'] for r in here}))}")


def found(args):
    """the rows of --results"""
    columns = {"row": TEXT, "task": TEXT, "seed": COUNT, "commit": TEXT, "percent": PERCENT}
    return ledger.read(args.results, columns, KEY)


def recorded(name, args):
    """the (task, seed) of a row that --results has a number of"""
    return {(r["task"], r["seed"]) for r in found(args) if r["row"] == name}


def train(name, seed, args):
    """tasks.py's exit code; its results go into --results"""
    row, out = ROWS[name], os.path.join(args.out, name)
    words = [w for flag, value in row.flags.items() for w in (f"--{flag}", str(value))]
    code = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "tasks.py"), "--tasks", row.task, "--pos",
                           row.pos, "--seeds", str(seed), "--jobs", "1", "--out", out, "--trainer",
                           args.trainer, *words]).returncode
    columns = {"task": TEXT, "length": POSITIVE, "trained": POSITIVE, "accuracy": SHARE, "exact": COUNT,
               "examples": POSITIVE, "commit": TEXT}
    rows = ledger.read(os.path.join(out, "tasks.csv"), columns, ("task", "pos", "seed", "length")) if code == 0 else ()
    ledger.add(args.results, [{"row": name, "task": r["task"], "seed": seed, "commit": r["commit"],
                               "percent": f"{row.measure(r):.4g}"}
                              for r in rows if r["task"] in row.cells and r["length"] == r["trained"]], KEY)
    return code


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("rows", nargs="*", metavar="ROW", help="of those that are listed without one")
    p.add_argument("--seeds", type=naturals, default=[1, 2, 3], help="seeds of the models [1,2,3]")
    p.add_argument("--results", default=os.path.join(ROOT, "dev", "results", "verdicts.csv"),
                   help="what was found so far [dev/results/verdicts.csv]")
    p.add_argument("--out", default=os.path.join(ROOT, "build", "verdict"), help="the runs [build/verdict]")
    p.add_argument("--trainer", default=os.path.join(ROOT, "train_gpt2"), help="the program to run [./train_gpt2]")
    args = p.parse_args(argv)
    for name in args.rows:
        if name not in ROWS:
            raise BadInput(f"{name}: expected some of {', '.join(ROWS)}")
    if args.rows:
        console.need("scipy.stats")                     # before an hour of training
    else:
        for name, row in ROWS.items():
            cells = ", ".join(f"{task} {number:g} %" for task, (number, _) in row.cells.items())
            print(f"{name:12} {row.minutes} minutes of one core a seed; {row.source}: {cells}")
        print("The paper's tables: scripts/paper.py table1 --dry_run has their hours of a GPU; then scripts/report.py")
    for name in args.rows:
        kept = recorded(name, args)
        for seed in args.seeds:
            code = 0 if kept.issuperset((task, seed) for task in ROWS[name].cells) else train(name, seed, args)
            if code != 0:
                return code
            for task in ROWS[name].cells:
                if (task, seed) not in recorded(name, args):
                    raise BadInput(f"{args.out}/{name}/tasks.csv: expected a row of {task} with seed {seed}, got none")
        print(f"{name}: {ROWS[name].source}")
        for line in verdicts(name, found(args)):
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    console.run(main)
