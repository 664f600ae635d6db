#!/usr/bin/env python3
"""tasks.py -- which encodings answer longer questions than they have learned from? Trains a small model for every
encoding, task and seed, tests it at 1, 2, 4 and 8 times the trained length (haystack: up to 512 times), and keeps a
CSV, a table and a figure, whose bands reach from the lowest seed to the highest.

    scripts/tasks.py                                all cases that build/tasks lacks, on all cores
    scripts/tasks.py --pos cable,rope --tasks copy --seeds 1 --out build/mine    some of them, with results of their own
    scripts/tasks.py --summary                      only the CSV, the table and the figure of the results so far
    scripts/tasks.py --tasks recall --seeds 1,2,3,4,5 --results dev/results/recall.csv    the cases that a CSV lacks

data/tasks.py describes the tasks. A model learns --length symbols in --steps steps of --B examples. The one that learns
fflm is also tested on fflm_sparse and fflm_dense, which are columns of their own.
A row of OUT/tasks.csv is one case (task, encoding, seed) at one length, with the commit that ran it. A case that is
done is not run again, so that the same command continues after an interruption. With --results a case is also done if
that CSV has rows of it; a comment at its top must name the settings. New rows go there, and the table and the figure
beside it.

A cell of the table is the share of test examples whose whole answer is right, in percent, at each multiple of the
trained length: the mean over the seeds that reached 95 % at the trained length. Of recall and fflm, which ask all along
the way, it is the share of the answers. If no seed did, it says "not learned" and the best result, because errors at
longer lengths would mean nothing. --compare cable alibi adds how much the two differ at the longer lengths, in
percentage points: the mean over the seeds with which both have learned, and its 95 % confidence interval, in bold type
if that does not contain 0 (it needs scipy).
"""
import collections
import itertools
import math
import os
import statistics
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "data"))              # before this directory, whose tasks.py this is
sys.dont_write_bytecode = True

import tasks as generators      # noqa: E402  data/tasks.py
import compare                  # noqa: E402
import console                  # noqa: E402
import ledger                   # noqa: E402
import runqueue                 # noqa: E402
from console import COUNT, POSITIVE, SHARE, TEXT, BadInput, positive, processes      # noqa: E402

TEST_EXAMPLES = 500
LEARNED = 0.95
# what decides the results of a case, beside its task, encoding and seed
SETTINGS = "model", "length", "steps", "B", "lr", "examples"
# a row of tasks.csv
COLUMNS = {**dict.fromkeys(("commit", "task", "pos", "loss"), TEXT), **dict.fromkeys(("seed", "exact"), COUNT),
           **dict.fromkeys(("trained", "length", "T", "examples", "tokens", "steps"), POSITIVE), "accuracy": SHARE}
KEY = "task", "pos", "seed", "length"

Case = collections.namedtuple("Case", "task pos seed")


def case_of(row):
    return Case(row["task"], row["pos"], row["seed"])


# One case -------------------------------------------------------------------------------------------------------------

def job_of(args, case):
    """the training of a case; the last records of its log are the results"""
    length, out = generators.trained_length(case.task, args.length), "{}_{}_{}".format(*case).replace(":", "_")
    T, out = generators.row_tokens(case.task, length) - 1, os.path.join(args.out, out)
    flags = {"train_files": f"{args.data}/{case.task}_train.bin", "pos": case.pos, "seed": case.seed, "T": T,
             "model": args.model, "B": args.B, "steps": args.steps, "lr": args.lr,
             "warmup": min(50, args.steps // 10), "final_lr": "0", "weight_decay": "0.1", "val_every": "0",
             "sample_every": "0", "threads": "1", "tasks": f"{args.data}/{case.task}_test_*.bin", "out": out,
             "resume": "1"}
    train = runqueue.Command("train", args.trainer, {k: str(v) for k, v in flags.items()}, out,
                             os.path.join(out, "train.done"), args.steps * T)
    return runqueue.Job("{0.task} {0.pos} seed {0.seed}".format(case), "", [train])


def recorded(args):
    """the rows that --results has so far, which must be of the same settings"""
    rows = ledger.read(args.results, COLUMNS, KEY) if args.results else []
    about = [line for line in ledger.comments(args.results) if "scripts/tasks.py" in line]
    if os.path.exists(args.results) and about != [f"# {args.settings}"]:
        raise BadInput(f"{args.results}: expected the line '# {args.settings}' before its rows, got "
                       f"{about or 'none'}; give the settings that its rows have, or another CSV")
    whole = {case_of(r) for r in rows if r["length"] == r["trained"]}
    for r in rows:
        trained = generators.trained_length(r["task"], args.length)
        lengths = [m * trained for m in generators.multiples(r["task"])]
        if (r["trained"], r["steps"]) != (trained, args.steps) or r["exact"] > r["examples"] or (
                r["length"] not in lengths or case_of(r) not in whole):
            raise BadInput(f"{args.results}: {', '.join(str(r[name]) for name in KEY)}: expected trained {trained}, "
                           f"steps {args.steps}, at most as many exact answers as examples, a length of "
                           f"{', '.join(map(str, lengths))}, and for the case a row of length {trained}")
    return rows


def results(args, jobs):
    """the rows of what is done of these jobs"""
    rows = []
    for case, job in jobs.items():
        train, = job.commands
        if not runqueue.is_done(train):
            if args.summary and os.path.exists(train.marker):
                raise BadInput(f"{train.out}: expected the results and settings that {train.marker} has; run the same "
                               "command without --summary")
            continue
        last = {r["file"]: r for r in console.read_log(train.out, "task")}
        rows += [{"commit": runqueue.commit_of(train), "task": generators.tested(r["file"]), "pos": case.pos,
                  "seed": case.seed, "trained": generators.trained_length(case.task, args.length),
                  **{k: r[k] for k in ("length", "T", "examples", "exact", "tokens")},
                  "accuracy": f"{r['accuracy']:.4f}", "loss": "" if r["loss"] is None else f"{r['loss']:.4f}",
                  "steps": args.steps}
                 for r in last.values()]
    return rows


# The table and the figure ---------------------------------------------------------------------------------------------

def by_cell(rows):
    """{(task, pos): {seed: [what is right at each multiple of the trained length; None beyond an encoding's reach]}}"""
    cells = {}
    for r in rows:
        multiples, multiple = generators.multiples(r["task"]), r["length"] // r["trained"]
        seeds = cells.setdefault((r["task"], r["pos"]), {})
        shares = seeds.setdefault(r["seed"], [None] * len(multiples))
        if multiple in multiples:
            along = generators.family(r["task"]) in generators.ALONG_THE_WAY
            shares[multiples.index(multiple)] = float(r["accuracy"]) if along else r["exact"] / r["examples"]
    return cells


def learned_seeds(seeds):
    return [s for s in seeds.values() if s[0] is not None and s[0] >= LEARNED]


def columns_of(seeds):
    """the shares of the seeds that have learned, at each length that they reach"""
    return [[s for s in column if s is not None] for column in zip(*learned_seeds(seeds))]


def cell_text(seeds):
    if not seeds:
        return ""
    learned = learned_seeds(seeds)
    if not learned:
        return f"not learned ({100 * max(s[0] for s in seeds.values()):.0f})"
    shares = " / ".join(f"{100 * statistics.mean(c):.0f}" if c else "-" for c in columns_of(seeds))
    return shares + (f" ({len(learned)} of {len(seeds)})" if len(seeds) > 1 else "")


def in_order(found, wanted):
    return [x for x in wanted if x in found] + sorted(set(found) - set(wanted))


def table(rows, order):
    cells = by_cell(rows)
    names = in_order({t for t, _ in cells}, generators.TASKS)
    lines = [[f"`{pos}`", *(cell_text(cells.get((t, pos), {})) for t in names)]
             for pos in in_order({p for _, p in cells}, order)]
    commits = sorted({r["commit"] for r in rows})
    runs = sum(len(seeds) for (task, _), seeds in cells.items() if task in generators.TASKS)
    head = f"{runs} runs of commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return "\n".join([head, "", *console.table(["encoding", *names], lines), ""])


def difference(points):
    """the mean of paired differences, one of each seed, and its 95 % confidence interval; bold if that does not contain
    0, "-" for too few seeds"""
    if len(points) < compare.LEAST_SEEDS:
        return "-"
    low, high = compare.over_seeds(points)
    rounded = (round(float(x), 1) + 0 for x in (statistics.mean(points), low, high))        # -0.0 + 0 is 0.0
    text = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*rounded)
    return text if low <= 0 <= high else f"**{text}**"


def comparisons(rows, names):
    """lines of Markdown: for each task, how much each two of these encodings differ at each length"""
    cells = by_cell(rows)
    for task in in_order({t for t, _ in cells}, generators.TASKS):
        multiples, lines = generators.multiples(task)[1:], []
        for a, b in itertools.combinations(names, 2):
            ours, theirs = ({seed: s for seed, s in cells.get((task, pos), {}).items() if learned_seeds({seed: s})}
                            for pos in (a, b))
            pairs = [list(zip(ours[seed], theirs[seed])) for seed in sorted(ours.keys() & theirs.keys())]
            points = [[100 * (x - y) for x, y in column if None not in (x, y)] for column in list(zip(*pairs))[1:]]
            if len(pairs) >= compare.LEAST_SEEDS:
                lines.append([f"{a} - {b}", str(len(pairs)), *map(difference, points)])
        if lines:
            head = [task, "seeds", *(f"{m} times the length" for m in multiples)]
            yield from ["", *console.table(head, lines)]


def draw(rows, order, path):
    """lines, or above ten encodings a table, because the lines would hide each other"""
    import plot                                             # only here: it needs matplotlib
    cells = by_cell(rows)
    names, rows = in_order({t for t, _ in cells}, generators.TASKS), in_order({p for _, p in cells}, order)[::-1]
    columns, table = min(4, len(names)), len(rows) > 10
    lines = -(-len(names) // columns)
    width, height = (3.2, 2.7) if not table else (2.6, 0.3 * len(rows) + 0.7)
    fig, axes = plot.figure(max(6.4, width * columns + table), height * lines + 0.8, nrows=lines, ncols=columns,
                            squeeze=False, sharey=True)
    styles, drawn, seeds = plot.styles_of((p, p) for p in rows[::-1]), {}, []
    for ax, task in zip(axes.flat, names):
        ax.set_title(task, pad=10)
        multiples = generators.multiples(task)
        columns_at = lambda pos: dict(zip(multiples, columns_of(cells.get((task, pos), {}))))
        if table:
            mean = lambda pos, m: 100 * statistics.mean(columns_at(pos).get(m) or [math.nan])
            plot.heat_map(ax, plot.grid(rows, multiples, mean), 0, 100, "{:.0f}".format, most=99)
            ax.set_xticks(range(len(multiples)), multiples)
            ax.set_yticks(range(len(rows)), rows, fontsize=9)
            continue
        for pos in rows[::-1]:
            points = [(m, *(100 * f(c) for f in (statistics.mean, min, max))) for m, c in columns_at(pos).items() if c]
            if points:
                colour, marker = styles[pos, pos]
                x, means, low, high = zip(*points)
                drawn[pos], = ax.plot(x, means, color=colour, marker=marker, label=pos, clip_on=False)
                ax.fill_between(x, low, high, color=colour, alpha=min(0.15, 1 / len(styles)), linewidth=0)
                seeds.append(len(learned_seeds(cells[task, pos])))
        plot.length_axis(ax, multiples)
        ax.set_ylim(0, 100)
    for ax in list(axes.flat)[len(names):]:
        ax.set_visible(False)
    fig.supxlabel("length of the test examples / longest trained length")
    fig.supylabel("" if table else "right (%)")
    if table:
        fig.suptitle("right (%), mean of the seeds that have learned the task; empty: none has, or no such length",
                     fontsize=11)
    elif drawn:
        plot.legend_beside(axes[0, -1], [(line.get_ydata()[-1], line) for line in drawn.values()],
                           plot.band_of(seeds, "lowest to\nhighest"))
    plot.save(fig, path)


def report(args, rows, order):
    stem = args.results.removesuffix(".csv") or os.path.join(args.out, "tasks")
    if args.results:
        ledger.add(args.results, rows, KEY, args.settings)
        rows = recorded(args)
    if not rows:
        raise BadInput(f"{args.results or args.out}: no results yet")
    if not args.results:
        ledger.write(stem + ".csv", rows, args.settings)
    text = table(rows, order) + "".join(line + "\n" for line in comparisons(rows, args.compare))
    console.write_whole(stem + ".md", text)
    try:
        draw(rows, order, stem + ".png")
        figure = f", {stem}.png"
    except BadInput as e:
        figure = f"; no figure: {e}"
    print(f"{text}\n{stem}.md{figure}")


def chosen(names, known, flag, also=lambda name: False):
    """these names, or all known ones; also: whether a name that is not among the known ones is right all the same"""
    for name in names:
        if name not in known and not also(name):
            raise BadInput(f"{flag}: expected some of {', '.join(known)}, got {name}")
    return list(dict.fromkeys(names or known))


def parse(argv):
    p = console.parser(__doc__)
    p.add_argument("--pos", type=runqueue.encodings_of, default=[],
                   help="encodings, separated by commas [all of train_gpt2 --help]")
    p.add_argument("--tasks", type=lambda text: text.split(","), default=[],
                   help="tasks, separated by commas [all of data/tasks.py]")
    p.add_argument("--seeds", type=console.naturals, default=[1, 2, 3], help="seeds of the models [1,2,3]")
    p.add_argument("--model", default="3,4,64", help="layers, heads, width [3,4,64]")
    p.add_argument("--length", type=positive, default=10, help="symbols that are learned; fflm: 8 times as many [10]")
    p.add_argument("--steps", type=positive, default=1500, help="training steps [1500]")
    p.add_argument("--B", type=positive, default=64, help="examples of a step [64]")
    p.add_argument("--lr", default="1e-3", help="peak learning rate [1e-3]")
    p.add_argument("--examples", type=positive, default=100_000, help="training examples of each task [100000]")
    p.add_argument("--jobs", type=processes, default=os.cpu_count(),
                   help="cases at a time, one thread each [all cores]")
    p.add_argument("--out", default=os.path.join(ROOT, "build", "tasks"),
                   help="directory of the runs and of tasks.csv [build/tasks]")
    p.add_argument("--results", default="", metavar="CSV", help="results so far, which get the new ones")
    p.add_argument("--compare", nargs="+", default=[], metavar="POS", help="differences between these, with intervals")
    p.add_argument("--summary", action="store_true", help="run nothing; write the results of what is done")
    p.add_argument("--trainer", default=os.path.join(ROOT, "train_gpt2"), help="the program to run [./train_gpt2]")
    args = p.parse_args(argv)
    if args.results and not args.results.endswith(".csv"):
        raise BadInput(f"--results: expected a name that ends with .csv, got {args.results}")
    args.out, args.results = os.path.abspath(args.out), args.results and os.path.abspath(args.results)
    args.trainer = runqueue.program(args.trainer)
    os.chdir(ROOT)
    args.data = os.path.join(args.out, "data")
    return args


def main(argv):
    args = parse(argv)
    order = console.encodings(runqueue.help_of(args.trainer))
    words = (word for name in SETTINGS for word in (f"--{name}", str(getattr(args, name))))
    args.settings = console.command_line(["scripts/tasks.py", *words]) + f" ({runqueue.build_of(args.trainer)})"
    names = chosen(args.tasks, generators.TASKS, "--tasks")
    pos = chosen(args.pos, order, "--pos", lambda name: runqueue.knows(args.trainer, name))      # fox is another's name
    chosen(args.compare, pos, "--compare")
    if args.compare:
        console.need("scipy.stats")                         # before hours of training
    files = ["--out", args.data, "--tasks", ",".join(sorted(names)), "--length", str(args.length), "--examples",
             str(args.examples), "--test_examples", str(TEST_EXAMPLES)]
    generators.parse(files)                                 # refuses a length that a task cannot have
    cases = [Case(t, p, s) for s in args.seeds for p in pos for t in names]
    done, code = set(map(case_of, recorded(args))), 0
    jobs = {case: job_of(args, case) for case in cases if case not in done}
    if not args.summary:
        missing = [job for job in jobs.values() if not runqueue.is_done(job.commands[0])]
        print(f"{len(cases)} cases, {len(missing)} of them to run", flush=True)
        if missing:
            generators.main(files)
            code = runqueue.Queue("tasks.py", missing, runqueue.slots(args.jobs)).run()
    if code != runqueue.INTERRUPTED:
        report(args, results(args, jobs), order)
    return code


if __name__ == "__main__":
    console.run(main)
