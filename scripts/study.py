#!/usr/bin/env python3
"""study.py -- which encoding, and why: trains encodings x seeds x lengths x sizes and compares them in one table.

    scripts/study.py --encodings cable alibi rope --seeds 42 43 --lengths 64 128 256 --models 2,4,64 \\
        --eval_lengths 64 256 1024 --train_files a.txt --val_files b.txt --steps 300 --lr 2e-3 --out run/study

Every other flag goes to the trainer, for all runs; --eval.FLAG only to the evaluations (--eval.stride 64). An encoding
is what --pos takes, with its hyperparameters (kcable:weight=inside); `all` means those that the trainer's --help lists.
All models of a study see equally many tokens per step: --total_batch, or --B sequences of the longest length.

--jobs N runs N at a time, each on its share of the cores; with a trainer whose name ends in cu, each GPU has one run.
After an interruption the same command continues; with more encodings, seeds, lengths, sizes, learning rates (after the
first one) or evaluations (--sliding, --positions, --compare) it runs only what is new. A directory that was begun with
other settings is refused.

OUT/study.csv has a row for each number of each run, study_means.csv their means, study_differences.csv the
differences of --compare, study.md tables of them, study.tex the first table for LaTeX (booktabs), and study.png and
study_positions.png, also as .pdf, draw them. A run is in OUT/SIZE/ENCODING-T<length>/seed_<seed>; report.py and
plot.py read it too. docs/studies.md has more.
"""
import collections
import itertools
import os
import re
import statistics
import subprocess

import compare

import console
import ledger
import plot
import report
import runqueue
from runqueue import BadInput, Command, Job, arguments

# one model to train: its encoding, seed, trained length, size, and learning rate
Run = collections.namedtuple("Run", "pos seed T model lr")
# flags of the trainer that study.py gives itself, and where their values come from
OWN = {"pos": "--encodings", "layers": "--encodings", "seed": "--seeds", "T": "--lengths", "model": "--models",
       "out": "--out", "resume": "nothing: study.py resumes by itself", "load": "nothing: every run starts afresh"}
COUNTS = ("B", "total_batch", "steps", "eval_tokens", "eval.stride")    # what is computed with here
DEFAULTS = {"B": "8", "warmup": "0", "final_lr": "0.1", "weight_decay": "0.1", "val_every": "0"}


# ----------------------------------------------------------------------------------------------------------
# what was requested

def parse(argv):
    p = console.parser(__doc__, usage="study.py [--flag value...]...")
    p.add_argument("--encodings", nargs="+", required=True, metavar="NAME", help="encodings, or all")
    p.add_argument("--seeds", nargs="+", type=console.naturals, default=[[42]], metavar="N", help="seeds [42]")
    p.add_argument("--lengths", nargs="+", type=console.naturals, required=True, metavar="T",
                   help="lengths to train at")
    p.add_argument("--models", nargs="+", required=True, metavar="SIZE", help="sizes, by name or as L,NH,C")
    p.add_argument("--lr", nargs="+", default=["1e-3"], metavar="RATE",
                   help="learning rates; the best by validation counts [1e-3]")
    p.add_argument("--eval_lengths", nargs="+", type=console.naturals, default=[], metavar="T",
                   help="lengths to evaluate at [the trained ones, 2 and 4 times the longest]")
    p.add_argument("--eval_tokens", default="0", help="evaluate at most this many tokens; 0 = all [0]")
    p.add_argument("--sliding", type=console.natural, default=0, metavar="S",
                   help="also perplexity in windows S tokens apart")
    p.add_argument("--positions", action="store_true", help="also the loss by position in the window")
    p.add_argument("--compare", nargs="+", default=[], metavar="NAME", help="differences between these, with intervals")
    p.add_argument("--out", default="run/study", help="directory of the runs and results [run/study]")
    p.add_argument("--trainer", default=os.path.join(runqueue.ROOT, "train_gpt2"),
                   help="program that trains and evaluates [train_gpt2 of this repository]")
    p.add_argument("--jobs", type=console.processes, default=0, help="runs at a time [1; with GPUs: one for each]")
    p.add_argument("--dry_run", action="store_true", help="print the commands; run nothing")
    args, rest = p.parse_known_args(argv)
    args.flags = runqueue.flags_of(rest)
    for name in args.flags.keys() & OWN.keys():
        raise BadInput(f"--{name}: expected {OWN[name]}")
    for name in ("seeds", "lengths", "eval_lengths"):
        setattr(args, name, list(dict.fromkeys(n for some in getattr(args, name) for n in some)))
    args.eval_lengths = sorted(args.eval_lengths or {*args.lengths, 2 * max(args.lengths), 4 * max(args.lengths)})
    for name in ("encodings", "models", "lr"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    if min(args.lengths + args.eval_lengths) < 1:
        raise BadInput("--lengths, --eval_lengths: expected positive numbers")
    if (args.sliding or args.positions) and "eval.stride" in args.flags:
        raise BadInput("--sliding and --positions stand beside windows that do not overlap: expected no --eval.stride")
    if args.sliding >= max(args.eval_lengths):
        raise BadInput(f"--sliding {args.sliding}: expected fewer tokens than the longest of --eval_lengths, "
                       f"{max(args.eval_lengths)}")
    absent = [pos for pos in args.compare if pos not in args.encodings and "all" not in args.encodings]
    if len(args.compare) == 1 or absent:
        raise BadInput(f"--compare: expected two or more of --encodings, got {' '.join(args.compare)}")
    if args.compare and len(args.seeds) < compare.LEAST_SEEDS:
        seeds = [*args.seeds, *range(max(args.seeds) + 1, max(args.seeds) + compare.LEAST_SEEDS)]
        raise BadInput(f"--compare: expected at least {compare.LEAST_SEEDS} seeds, as fewer decide nothing, got "
                       f"{len(args.seeds)}: give --seeds {' '.join(map(str, seeds[:compare.LEAST_SEEDS]))}")
    args.trainer = runqueue.program(args.trainer)
    args.command = console.command_line(["scripts/study.py", *argv])
    return args


def resolve(args):
    """replaces `all`, and completes the flags"""
    text = runqueue.help_of(args.trainer)
    listed = text.partition("Sizes for --model")[2].partition("\n\n")[0]
    encodings, sizes = console.encodings(text), re.findall(r"(\w+) (\d+),(\d+),(\d+)", listed)
    args.sizes = {name: tuple(map(int, shape)) for name, *shape in sizes}
    args.encodings = list(dict.fromkeys(e for pos in args.encodings for e in (encodings if pos == "all" else [pos])))
    longest = max(args.lengths)
    flags = {**DEFAULTS, **args.flags}
    for name, value in {**flags, "eval_tokens": args.eval_tokens}.items():
        if name in COUNTS and not re.fullmatch(r"\d{1,18}", value or ""):
            raise BadInput(f"--{name}: expected a number, got {value}")
    for model in args.models:
        if model not in args.sizes and not re.fullmatch(r"\d{1,6},\d{1,6},\d{1,6}", model):
            raise BadInput(f"--models: expected L,NH,C or one of {', '.join(args.sizes)}, got {model}")
    if len(args.lr) > 1 and flags["val_every"] == "0":      # at the end, on all of the text
        flags.update(val_every=str(10 ** 9), val_batches="-1")
    if "--sample_every" in text:
        flags.setdefault("sample_every", "0")
    flags.setdefault("total_batch", str(int(flags["B"]) * longest))
    if "steps" in flags:
        flags.setdefault("checkpoint_every", str(max(1, min(1000, int(flags["steps"]) // 4))))
    for T in args.lengths:
        if int(flags["total_batch"]) % T:
            raise BadInput(f"--total_batch {flags['total_batch']}: expected a multiple of every length, got --lengths "
                           f"{T}")
    args.flags = flags


# ----------------------------------------------------------------------------------------------------------
# runs and their commands

def slug(name):
    return re.sub(r"[^\w.=+-]", "-", name)


def run_directory(run, args):
    rate = f"-lr{slug(run.lr)}" * (run.lr != args.lr[0])
    return os.path.join(args.out, run.model.replace(",", "x"), f"{slug(run.pos)}-T{run.T}{rate}", f"seed_{run.seed}")


def flops(run, args, tokens, T, passes):
    L, _, C = args.sizes.get(run.model) or map(int, run.model.split(","))
    text = args.flags.get("train_files", "").endswith(".txt")
    return passes * tokens * runqueue.forward_flops(L, C, T, 256 if text else 50304)


def evaluation(title, run, args, where, lengths, **more):
    """the command that evaluates a run at some lengths; more: flags in addition to those of all evaluations"""
    flags = {k: args.flags[k] for k in ("val_files", "threads") if k in args.flags}
    flags.update({k[len("eval."):]: v for k, v in args.flags.items() if k.startswith("eval.")})
    flags.update(load=run_directory(run, args), eval_lengths=",".join(map(str, lengths)), eval_tokens=args.eval_tokens,
                 out=where, **more)
    tokens, stride = int(args.eval_tokens) or 100_000, int(flags.get("stride", 0))
    cost = {T: flops(run, args, tokens * max(1, T // stride if stride else 1), T, 1) for T in lengths}
    return Command(title, args.trainer, flags, where, os.path.join(where, "eval.done"), sum(cost.values()), parts=cost)


def commands_of(run, args):
    """Training and evaluations of one run. Each evaluation has a directory and a .done file of its own, so that one
    more does not repeat the rest."""
    out = run_directory(run, args)
    trains = {k: v for k, v in args.flags.items() if not k.startswith("eval.")}
    total = int(trains["total_batch"])
    trains["B"] = str(runqueue.largest_divisor(total // run.T, int(trains["B"]) * max(args.lengths) // run.T))
    trains.update(model=run.model, pos=run.pos, T=str(run.T), lr=run.lr, seed=str(run.seed), resume="1", out=out)
    cost = flops(run, args, int(trains.get("steps", 1)) * total, run.T, 3)
    where = os.path.join(out, "eval", slug(report.data_name(args.flags.get("eval.val_files") or
                                                            args.flags.get("val_files", "default_val"))))
    commands = [Command("train", args.trainer, trains, out, os.path.join(out, "train.done"), cost,
                        validates=trains["val_every"] != "0"),
                evaluation("evaluate", run, args, where, args.eval_lengths)]
    if args.sliding:
        commands.append(evaluation("sliding", run, args, f"{where}.stride{args.sliding}", args.eval_lengths,
                                   stride=str(args.sliding)))
    if args.positions:
        lengths = sorted({run.T, max(args.eval_lengths)})
        commands.append(evaluation("positions", run, args, where + ".positions", lengths, curve=None))
    if run.pos in args.compare:
        commands.append(evaluation("losses", run, args, where + ".losses", args.eval_lengths, token_losses=None))
    return commands


def jobs_of(args):
    """{Run: Job}; the loop over seeds is the outer one, so that an early end leaves comparisons of all encodings"""
    jobs = {}
    for seed, model, T, pos, lr in itertools.product(args.seeds, args.models, args.lengths, args.encodings, args.lr):
        run = Run(pos, seed, T, model, lr)
        label = f"{pos}, T {T}" + f", {model}" * (len(args.models) > 1) + f", lr {lr}" * (len(args.lr) > 1)
        jobs[run] = Job(f"{label}, seed {seed}", "", commands_of(run, args))
    places = collections.Counter(run_directory(run, args) for run in jobs)
    if max(places.values()) > 1:
        raise BadInput(f"two runs would share {max(places, key=places.get)}; name their sizes and encodings apart")
    return jobs


def check(jobs):
    """Lets the trainer check the flags and the lengths of every kind of run before the first one starts. One seed
    stands for all."""
    kinds = {}
    for run, job in jobs.items():
        if not all(map(runqueue.is_done, job.commands)):
            kinds.setdefault(run._replace(seed=0), job)
    errors = {}                                             # {message: the first job that has it}
    for job in kinds.values():
        first = next(c for c in job.commands if not runqueue.is_done(c))
        evaluates = {name: value for name, value in job.commands[1].flags.items() if name not in ("load", "out")}
        flags = {**first.flags, **(evaluates if first.title == "train" else {}), "check": None}
        words = arguments(first._replace(flags=flags))
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if found.returncode:
            said = (found.stderr or found.stdout).strip().splitlines() or [f"exit code {found.returncode}"]
            errors.setdefault(said[-1], job.label)
    if errors:
        lines = [f"  {label}: {message}" for message, label in errors.items()]
        raise BadInput("nothing was started, because the trainer refuses:\n" + "\n".join(lines))


# ----------------------------------------------------------------------------------------------------------
# results

def refuse_unvalidated(trainings):
    """raises BadInput if a finished run has no validation, by which learning rates are compared"""
    lacking = [c.out for c in trainings if runqueue.is_done(c) and not console.read_log(c.out, "val")]
    if lacking:
        raise BadInput(f"--lr: {lacking[0]} was trained without the validation by which learning rates are compared; "
                       "give another --out, or remove that directory, to train it again")


def records(command, kind):
    """{T: record} of this kind as an evaluation has logged them; the last one of a length counts"""
    return {r["T"]: r for r in console.read_log(command.out, kind)}


SPEEDS = {"tok_per_s": "Tokens per second", "mem": "Memory in MB at the end"}


def gather(jobs):
    """the rows of study.csv (plot.STUDY): each number of what is finished"""
    rows = []

    def add(run, command, T, what, value, positions=""):
        if value is not None:
            rows.append({"model": run.model, "trained_at": run.T, "encoding": run.pos, "lr": run.lr, "seed": run.seed,
                         "T": T, "what": what, "positions": positions, "value": float(f"{value:.8g}"),
                         "commit": runqueue.commit_of(command)})

    for run, job in jobs.items():
        done = {c.title: c for c in job.commands if runqueue.is_done(c)}
        if "train" not in done or "evaluate" not in done:
            continue
        for title in [title for title in ("evaluate", "sliding") if title in done]:
            what = "ppl" if title == "evaluate" else f"ppl, stride {done[title].flags['stride']}"
            for T, r in records(done[title], "extrapolation").items():
                if T in console.naturals(done[title].flags["eval_lengths"]):
                    add(run, done[title], T, what, r["ppl"])
        for T, r in records(done["positions"], "curve").items() if "positions" in done else ():
            for ends, loss in plot.octaves(r["loss"]).items():
                add(run, done["positions"], T, "loss", loss, "-".join(map(str, dict.fromkeys(ends))))
        for T, r in records(done["evaluate"], "evaluation_speed").items():
            for name in SPEEDS if None not in (r["tok_per_s"], r["mem"]) else ():
                add(run, done["evaluate"], T, name, r[name])
        validates = done["train"].flags["val_every"] != "0"
        for r in console.read_log(done["train"].out, "val")[-1:] if validates else ():
            add(run, done["train"], 0, "val", r["loss"])
            add(run, done["train"], 0, "dead heads", r.get("dead_heads"))
    return rows


def means_of(rows):
    """the rows of study_means.csv: of each number of the learning rates that count, over the seeds"""
    groups = {}
    for r in plot.counted(rows):
        group = {name: r[name] for name in ("model", "trained_at", "encoding", "lr", "T", "what", "positions")}
        groups.setdefault(tuple(group.items()), []).append(r["value"])
    for group, values in groups.items():
        deviation = plot.spread(values)
        yield {**dict(group), "mean": f"{statistics.fmean(values):.6g}",
               "std": "" if deviation is None else f"{deviation:.6g}", "n": len(values)}


def cell(values, digits=2):
    if not values:
        return "-"
    deviation = f" ± {plot.spread(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.{digits}f}{deviation} ({len(values)})"


def table(args, rows, head, cells, digits=2, mark=lambda key, column, text: text):
    """lines of Markdown with a row for each model; head: {column: its name}; cells: {model: {column: [values]}}"""
    shown, rates = [len(args.models) > 1, len(args.lr) > 1], plot.best_rates(rows)
    names = ["size"] * shown[0] + ["trained at", "encoding"] + ["lr"] * shown[1]
    lines = []
    for key in cells:
        model, T, pos = key
        texts = [mark(key, column, cell(cells[key].get(column), digits)) for column in head]
        lines.append([model] * shown[0] + [f"{T:,}", pos] + [rates.get(key, "-")] * shown[1] + texts)
    return console.table(names + list(head.values()), lines)


def marks(cells, ties):
    """For study.tex: mark(key, column, text) sets the lowest mean of a size and a trained length in bold, and
    underlines what --compare cannot tell from it."""
    def mark(key, column, text):
        means = {k: statistics.fmean(row[column]) for k, row in cells.items() if k[:2] == key[:2] and row.get(column)}
        best = min(means, key=means.get, default=None)
        if key == best:
            return rf"\textbf{{{text}}}"
        return rf"\underline{{{text}}}" if (*key[:2], column, frozenset((key[2], best and best[2]))) in ties else text
    return mark


def latex(lines, about):
    """a table in Markdown as LaTeX's, by booktabs"""
    rows = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
    lines = [" & ".join(cells) + r" \\" for cells in rows]
    for letter, instead in (("_", r"\_"), ("%", r"\%"), ("±", r"$\pm$")):
        lines = [line.replace(letter, instead) for line in lines]
    return "\n".join([f"% {console.one_line(about)}", rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", r"\toprule",
                      lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def markdown(args, jobs, rows, commits):
    """(study.md, the cells of its first table)"""
    steps = f"{int(args.flags['steps']):,} steps" if "steps" in args.flags else "one pass over the data in steps"
    data = console.one_line(os.path.basename(args.flags.get("val_files", "the validation data")))
    lines = [f"Perplexity on {data} at each length: mean ± standard deviation (number of seeds). Trained for "
             f"{steps} of {int(args.flags['total_batch']):,} tokens, size {', '.join(args.models)}.", "",
             f"Commit {commits}:", "", f"    {args.command}", ""]
    every = {(run.model, run.T, run.pos): {} for run in jobs}
    counted, lengths = plot.counted(rows), {T: f"{T:,}" for T in args.eval_lengths}

    def add(title, head, cells, *more):
        if any(cells.values()):
            lines.extend(["", title, ""] * bool(title) + table(args, rows, head, cells, *more))

    cells = {**every, **plot.cells_of(counted, "ppl")}
    add("", lengths, cells)
    add(f"The same in windows {args.sliding:,} tokens apart; only the last {args.sliding:,} of each count: each token "
        "sees the rest of its window.", lengths, {**every, **plot.cells_of(counted, f"ppl, stride {args.sliding}")})
    for T in sorted({r["T"] for r in counted if r["what"] == "loss"}):
        of_T = [r for r in counted if r["T"] == T]
        ranges = {r["positions"]: "-".join(f"{int(end):,}" for end in r["positions"].split("-")) for r in of_T
                  if r["positions"]}
        add(f"Loss in nats by position in windows of {T:,} tokens that do not overlap.", ranges,
            plot.cells_of(of_T, "loss", lambda r: r["positions"]))
    for name, what in SPEEDS.items():
        found = plot.cells_of([{**r, "value": r["value"] / (1e6 if name == "mem" else 1)} for r in counted], name)
        add(f"{what} of the evaluations in the first table.", lengths, {**every, **found} if found else {}, 0)
    add("Heads whose S never moves, at the end of the training.", {0: "dead heads (%)"},
        plot.cells_of([{**r, "value": 100 * r["value"]} for r in counted], "dead heads"), 1)
    return "\n".join(lines) + "\n", cells


def comparisons(args, jobs, rates):
    """(lines of Markdown: for each two encodings of --compare their difference at each length; what is undecided:
    {(size, trained length, length, the two)}; the rows of study_differences.csv). The figure shows the differences to
    the first encoding, so only these have an interval for all at once, by Bonferroni."""
    lines, ties, rows, shown = [], set(), [], []
    for (a, b), model, T in itertools.product(itertools.combinations(args.compare, 2), args.models, args.lengths):
        of = [[job.commands for run, job in jobs.items()
               if (run.model, run.T, run.pos, run.lr) == (model, T, pos, rates.get((model, T, pos)))] for pos in (a, b)]
        try:
            if not all(of) or not all(map(runqueue.is_done, itertools.chain(*of[0], *of[1]))):
                raise BadInput("not all seeds are finished")
            ours, theirs = (compare.parameters(commands[0][0].out) for commands in of)
            lines.append(f"- {model}, trained at {T:,}; {a} has {ours:,} parameters, {b} {theirs - ours:+,}")
            for length in args.eval_lengths:
                name = f"token_losses_{length}_{length}.safetensors"
                places = ([os.path.join(c[-1].out, name) for c in commands] for commands in of)
                d = compare.differences(a, b, length, *places)
                text, better = compare.verdict(a, b, length, d)
                numbers = dict(zip(("mean", "low", "high"), compare.interval(d)), low_all=None, high_all=None)
                rows.append({"model": model, "trained_at": T, "encoding": a, "against": b, "T": length,
                             "seeds": d.shape[0], "windows": d.shape[1], **numbers})
                shown += [(rows[-1], d)] * (a == args.compare[0])
                lines.append("  - " + text)
                ties |= {(model, T, length, frozenset((a, b)))} if better is None else set()
        except BadInput as e:
            lines.append(f"- {a} - {b}, {model}, trained at {T:,}: none: {e}")
    for row, d in shown:
        _, row["low_all"], row["high_all"] = compare.interval(d, 1 - 0.05 / len(shown))
    return lines, ties, rows


def write_results(args, jobs):
    rows = gather(jobs)
    if not rows:
        return
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows))
    path, about = os.path.join(args.out, "study"), f"commit {commits}: {args.command}"
    text, cells = markdown(args, jobs, rows, commits)
    lines, ties, differences = comparisons(args, jobs, plot.best_rates(rows))
    text += "\n".join(["", *lines, ""] if lines else [])
    tex = table(args, rows, {T: f"{T:,}" for T in args.eval_lengths}, cells, mark=marks(cells, ties))
    console.write_whole(path + ".md", text)
    console.write_whole(path + ".tex", latex(tex, about))
    ledger.write(path + ".csv", rows, about)
    ledger.write(path + "_means.csv", list(means_of(rows)), about)
    written = f"{path}.md, {path}.tex, {path}.csv, {path}_means.csv"
    if differences:
        ledger.write(path + "_differences.csv", [{name: f"{value:.6g}" if isinstance(value, float) else value
                                                  for name, value in row.items()} for row in differences], about)
        written += f", {path}_differences.csv"
    try:
        figures = {path: lambda rows: plot.draw_study(rows, differences)}
        if any(r["what"] == "loss" for r in rows):
            figures[path + "_positions"] = plot.draw_positions
        for name, drawing in figures.items():
            fig = drawing(plot.counted(rows))
            for form in ".png", ".pdf":
                plot.save(fig, name + form, about)
                written += f", {name}{form}"
    except BadInput as e:
        console.say(f"study.py: no figure: {e}")
    print(f"\n{text}\nwrote {written}")


def main(argv):
    args = parse(argv)
    resolve(args)
    jobs = jobs_of(args)
    if args.dry_run:
        for job in jobs.values():
            print("\n".join(console.command_line(arguments(c)) for c in job.commands))
        return 0
    if args.compare:
        console.need("scipy.stats")
    slots = runqueue.slots(args.jobs, args.trainer)
    runqueue.refuse_changes(jobs.values())
    if len(args.lr) > 1:
        refuse_unvalidated(job.commands[0] for job in jobs.values())
    try:
        console.need("matplotlib")
    except BadInput as e:
        console.say(f"study.py: there will be no figure: {e}")
    check(jobs)
    code = runqueue.Queue("study.py", jobs.values(), slots).run()
    if code != runqueue.INTERRUPTED:
        write_results(args, jobs)
    return code


if __name__ == "__main__":
    console.run(main)
