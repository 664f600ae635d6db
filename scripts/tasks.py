#!/usr/bin/env python3
"""tasks.py -- which encodings answer longer questions than they have learned from? Trains a small model for every
encoding, task and seed, tests it at 1, 2, 4 and 8 times the trained length, and keeps a CSV, a table and a figure.

    scripts/tasks.py                                all cases that build/tasks/tasks.csv lacks, on all cores
    scripts/tasks.py --part 2/4                     the second of four parts, each of at most two hours on two cores
    scripts/tasks.py --pos cable,rope --tasks copy --seeds 1 --out build/mine    some of them, with results of their own
    scripts/tasks.py --summary                      only the table and the figure of what there is

The tasks are those of data/tasks.py, which says what they are; LENGTH symbols are learned, STEPS steps of B examples.
A row of the CSV is one case (task, encoding, seed) at one length, with the commit of the sources that ran it. A case
that is there is not run again, so that the same command continues after an interruption; --again runs it again, and the
table takes the last one. Cases come in the order of their seeds: a part of the work is a part of every task.

A cell of the table is the share of test examples whose whole answer is right, in percent, at 1, 2, 4 and 8 times the
trained length: the mean over the seeds that reached 95 % at the trained length. Of an encoding that reached it with no
seed it says "not learned" and the best that was reached, because its errors at longer lengths would mean nothing.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, os.path.join(ROOT, "data"))              # before this directory, whose tasks.py this is
sys.path.append(HERE)
sys.dont_write_bytecode = True

import console                  # noqa: E402
import ledger                   # noqa: E402
from console import BadInput    # noqa: E402
import tasks as generators      # noqa: E402  data/tasks.py

SOURCES = ["llmc", "train_gpt2.cu", "data/tasks.py"]
FIELDS = ["commit", "task", "pos", "seed", "trained", "length", "T", "examples", "exact", "tokens", "accuracy", "loss",
          "steps", "seconds"]
NUMBERS = {"seed": r"-?\d{1,18}", **dict.fromkeys(("trained", "examples"), r"[1-9]\d{0,8}"),
           **dict.fromkeys(("length", "exact"), r"\d{1,9}")}
LENGTH, EXAMPLES, TEST_EXAMPLES = 10, 100_000, 500
MODEL, B, STEPS, LR = "3,4,64", 64, 1500, "1e-3"
MULTIPLES = (1, 2, 4, 8)
LEARNED = 0.95

Case = collections.namedtuple("Case", "task pos seed")


def encodings(trainer):
    """the names that train_gpt2 --help lists, in its order"""
    text = subprocess.run([trainer, "--help"], stdout=subprocess.PIPE, text=True, errors="replace").stdout
    block = text.partition("(--pos):")[2].partition("Sizes for --model")[0]
    found = re.findall(r"^  (\w+) ", block, flags=re.M)
    if not found:
        raise BadInput(f"{trainer}: expected train_gpt2, whose --help lists the encodings")
    return found


def read_results(args):
    return ledger.read(args.csv, FIELDS, NUMBERS)


# One case -------------------------------------------------------------------------------------------------------------

def command(args, case):
    length = generators.trained_length(case.task, LENGTH)
    T = generators.row_tokens(case.task, length) - 1
    return [args.trainer, "--train_files", f"{args.data}/{case.task}_train.bin", "--pos", case.pos, "--seed",
            str(case.seed), "--model", MODEL, "--T", str(T), "--B", str(B), "--steps", str(args.steps), "--lr", LR,
            "--warmup", str(min(50, args.steps // 10)), "--final_lr", "0", "--weight_decay", "0.1", "--val_every", "0",
            "--sample_every", "0", "--tasks", f"{args.data}/{case.task}_test_*.bin", "--log_every", "100",
            "--threads", "1"]


class Stop(Exception):
    pass


class Runs:
    """runs cases, --jobs at a time; a signal ends them all, and what is finished is in the CSV"""

    def __init__(self, args, commit):
        self.args, self.commit, self.stopped = args, commit, threading.Event()
        self.processes, self.lock = set(), threading.Lock()

    def stop(self, *_):
        self.stopped.set()
        with self.lock:
            for p in self.processes:
                p.terminate()

    def run(self, case):
        out = os.path.join(self.args.out, "{}_{}_{}".format(*case).replace(":", "_"))
        shutil.rmtree(out, ignore_errors=True)          # of a case that was stopped
        begun = time.monotonic()
        with self.lock:
            if self.stopped.is_set():
                raise Stop
            p = subprocess.Popen([*command(self.args, case), "--out", out], stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
                                 env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
            self.processes.add(p)
        text = p.communicate()[0]
        with self.lock:
            self.processes.discard(p)
        if self.stopped.is_set():
            raise Stop
        if p.returncode != 0:
            raise BadInput(f"{' '.join(case[:2])}: exit code {p.returncode}: {text[-600:]}")
        with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
            records = [r for r in map(json.loads, f) if r["kind"] == "task"]
        if not records:
            raise BadInput(f"{out}/log.jsonl: expected the results of the tasks, got none (is the disk full?)")
        rows = [{"commit": self.commit, "task": case.task, "pos": case.pos, "seed": case.seed,
                 "trained": generators.trained_length(case.task, LENGTH), "steps": self.args.steps,
                 "seconds": f"{time.monotonic() - begun:.0f}", "accuracy": f"{r['accuracy']:.4f}",
                 "loss": f"{r['loss']:.4f}", **{k: r[k] for k in ("length", "T", "examples", "exact", "tokens")}}
                for r in records]
        ledger.append(self.args.csv, rows, FIELDS)
        return rows


def prepare(args, names):
    """the files of the tasks, written once"""
    r = subprocess.run([sys.executable, os.path.join(ROOT, "data", "tasks.py"), "--out", args.data, "--tasks",
                        ",".join(names), "--length", str(LENGTH), "--examples", str(args.examples),
                        "--test_examples", str(TEST_EXAMPLES)],
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if r.returncode != 0:
        raise BadInput(r.stdout.strip())


def work(args, cases):
    """runs what is missing; returns whether all of it ran"""
    there = {Case(r["task"], r["pos"], int(r["seed"])) for r in read_results(args)}
    missing = [c for c in cases if args.again or c not in there]
    print(f"{len(cases)} cases, {len(missing)} of them to run", flush=True)
    if not missing:
        return True
    prepare(args, sorted({c.task for c in missing}))
    runs = Runs(args, ledger.commit(*SOURCES))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, runs.stop)
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(runs.run, c): c for c in missing}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                rows, spent = future.result(), time.monotonic() - begun
                found = " ".join(f"{100 * int(r['exact']) / int(r['examples']):.1f}" for r in rows)
                print("{0.task} {0.pos} seed {0.seed}: {1}   [{2} of {3}, {4:.0f} min left]".format(
                    futures[future], found, done, len(missing), spent / done * (len(missing) - done) / 60), flush=True)
        except Stop:
            return False
        except BaseException:
            runs.stop()
            raise
    return True


# The table and the figure ---------------------------------------------------------------------------------------------

def by_cell(rows):
    """{(task, pos): {seed: [exact share at 1, 2, 4, 8 times the trained length; None beyond an encoding's reach]}}"""
    cells = {}
    for r in rows:                                          # a later row of the same case replaces an earlier one
        seeds = cells.setdefault((r["task"], r["pos"]), {})
        shares = seeds.setdefault(int(r["seed"]), [None] * len(MULTIPLES))
        multiple = int(r["length"]) // int(r["trained"])
        if multiple in MULTIPLES:
            shares[MULTIPLES.index(multiple)] = int(r["exact"]) / int(r["examples"])
    return cells


def learned_seeds(seeds):
    return [s for s in seeds.values() if s[0] is not None and s[0] >= LEARNED]


def mean_shares(seeds):
    """at each length the mean over the seeds that have learned; None where there is none"""
    learned = learned_seeds(seeds)
    columns = [[s[i] for s in learned if s[i] is not None] for i in range(len(MULTIPLES))]
    return [statistics.mean(c) if c else None for c in columns]


def cell_text(seeds):
    if not seeds:
        return ""
    learned = learned_seeds(seeds)
    if not learned:
        return f"not learned ({100 * max(s[0] for s in seeds.values()):.0f})"
    shares = " / ".join("-" if s is None else f"{100 * s:.0f}" for s in mean_shares(seeds))
    return shares + (f" ({len(learned)} of {len(seeds)})" if len(seeds) > 1 else "")


def in_order(found, wanted):
    return [x for x in wanted if x in found] + sorted(set(found) - set(wanted))


def table(rows, order):
    cells = by_cell(rows)
    names = in_order({t for t, _ in cells}, generators.TASKS)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for pos in in_order({p for _, p in cells}, order):
        lines.append(f"| `{pos}` | " + " | ".join(cell_text(cells.get((t, pos), {})) for t in names) + " |")
    commits = sorted({r["commit"] for r in rows})
    runs = sum(map(len, cells.values()))
    head = f"{runs} runs of commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return "\n".join([head, "", *lines]) + "\n"


def draw(rows, order, path):
    import plot                                             # only here: it needs matplotlib
    cells = by_cell(rows)
    names = in_order({t for t, _ in cells}, generators.TASKS)
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    fig, axes = plot.figure(3.2 * columns, 2.7 * lines + 0.8, nrows=lines, ncols=columns, squeeze=False, sharey=True)
    drawn = {}
    for ax, task in zip(axes.flat, names):
        ax.set_title(task)
        for pos in in_order({p for t, p in cells if t == task}, order):
            points = [(m, 100 * s) for m, s in zip(MULTIPLES, mean_shares(cells[task, pos])) if s is not None]
            if points:
                colour, marker = plot.style(pos)
                drawn[pos], = ax.plot(*zip(*points), color=colour, marker=marker, label=pos, clip_on=False)
        plot.length_axis(ax, MULTIPLES)
        ax.set_ylim(0, 100)
    for ax in list(axes.flat)[len(names):]:
        ax.set_visible(False)
    fig.supxlabel("length of the test examples / longest trained length")
    fig.supylabel("whole answer right (%)")
    if drawn:
        kept = in_order(drawn, order)
        axes[0, -1].legend([drawn[p] for p in kept], kept, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=9)
    fig.savefig(path)


def report(args, order):
    rows = read_results(args)
    if not rows:
        raise BadInput(f"{args.csv}: no results yet")
    text = table(rows, order)
    stem = os.path.splitext(args.csv)[0]
    console.write_whole(stem + ".md", text)
    print(text)
    try:
        draw(rows, order, stem + ".png")
        print(f"{stem}.md, {stem}.png")
    except BadInput as e:
        print(f"{stem}.md; no figure: {e}")


def chosen(text, known, flag):
    found = text.split(",") if text else list(known)
    for name in found:
        if name.split(":")[0] not in known:
            raise BadInput(f"{flag}: expected some of {', '.join(known)}, got {name}")
    return found


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("--pos", help="encodings, separated by commas [all of train_gpt2 --help]")
    p.add_argument("--tasks", help="tasks, separated by commas [all of data/tasks.py]")
    p.add_argument("--seeds", default="1,2,3", help="seeds of the models [1,2,3]")
    p.add_argument("--part", type=ledger.part_of, default=(1, 1), metavar="K/N",
                   help="run the Kth of N parts of the cases [1/1]")
    p.add_argument("--steps", type=int, default=STEPS, help=f"training steps of {B} examples [{STEPS}]")
    p.add_argument("--examples", type=int, default=EXAMPLES, help=f"training examples of each task [{EXAMPLES}]")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time, of one thread each [all cores]")
    p.add_argument("--out", default=os.path.join(ROOT, "build", "tasks"),
                   help="directory of the runs and of tasks.csv [build/tasks]")
    p.add_argument("--again", action="store_true", help="also run the cases that the CSV has")
    p.add_argument("--summary", action="store_true", help="run nothing; write the table and the figure")
    p.add_argument("--trainer", default=os.path.join(ROOT, "train_gpt2"), help="the program to run [./train_gpt2]")
    args = p.parse_args(argv)
    for name in ("steps", "examples", "jobs"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", args.seeds):
        raise BadInput(f"--seeds: expected numbers separated by commas, got {args.seeds}")
    args.csv = os.path.join(args.out, "tasks.csv")
    args.out = os.path.abspath(args.out)
    args.data = os.path.join(args.out, "data")
    return args


def main(argv):
    args = parse(argv)
    if not os.path.exists(args.trainer):
        raise BadInput(f"{args.trainer}: no such program; build it with: make train_gpt2")
    order = encodings(args.trainer)
    pos, names = chosen(args.pos, order, "--pos"), chosen(args.tasks, generators.TASKS, "--tasks")
    seeds = [int(s) for s in args.seeds.split(",")]
    cases = [Case(t, p, s) for s in seeds for p in pos for t in names]
    if not args.summary and not work(args, ledger.share(args.part, cases)):
        print("interrupted; run the same command again to continue")
        return 75
    report(args, order)
    return 0


if __name__ == "__main__":
    console.run(main)
