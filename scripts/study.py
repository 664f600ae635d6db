#!/usr/bin/env python3
"""study.py -- which encoding, and why: trains encodings x seeds x lengths x sizes and compares them in one table.

    scripts/study.py --encodings cable alibi rope --seeds 42 43 --lengths 64 128 256 --models 2,4,64 \\
        --eval_lengths 64 256 1024 --train_files a.txt --val_files b.txt --steps 300 --lr 2e-3 --out run/study

Every other flag goes to the trainer, for all runs; --eval.FLAG only to the evaluations (--eval.stride 64). An encoding
is what --pos takes, with its hyperparameters (kcable:weight=inside); `all` means those that the trainer's --help lists.
All models of a study see equally many tokens per step: --total_batch, or --B sequences of the longest length.

--jobs N runs N at a time, each on its share of the cores; with a trainer whose name ends in cu, each GPU has one run.
After an interruption the same command continues; with more encodings, seeds, lengths, sizes or evaluations (--sliding,
--positions, --compare) it runs only what is new. A directory that was begun with other settings is refused.

OUT/study.md and study.csv have the mean, the standard deviation and the number of seeds for each length, study.tex the
first table for LaTeX (booktabs), and study.png and study_positions.png draw them. A run is in
OUT/SIZE/ENCODING-T<length>/seed_<seed>; report.py and plot.py read it too. docs/studies.md has more.
"""
import collections
import itertools
import math
import os
import re
import shlex
import statistics
import subprocess
import textwrap

import compare

import console
import ledger
import plot
import report
import runqueue
from runqueue import BadInput, Command, Job, arguments

# one model to train: its encoding, seed, trained length, and size
Run = collections.namedtuple("Run", "pos seed T model")
# flags of the trainer that study.py gives itself, and where their values come from
OWN = {"pos": "--encodings", "layers": "--encodings", "seed": "--seeds", "T": "--lengths", "model": "--models",
       "out": "--out", "resume": "nothing: study.py resumes by itself", "load": "nothing: every run starts afresh"}
COUNTS = ("B", "total_batch", "steps", "eval_tokens", "eval.stride")    # what is computed with here
DEFAULTS = {"B": "8", "lr": "1e-3", "warmup": "0", "final_lr": "0.1", "weight_decay": "0.1", "val_every": "0"}


# ----------------------------------------------------------------------------------------------------------
# what was requested

def parse(argv):
    p = console.parser(__doc__, usage="study.py [--flag value...]...")
    p.add_argument("--encodings", nargs="+", required=True, metavar="NAME", help="encodings, or all")
    p.add_argument("--seeds", nargs="+", type=console.naturals, default=[[42]], metavar="N", help="seeds [42]")
    p.add_argument("--lengths", nargs="+", type=console.naturals, required=True, metavar="T",
                   help="lengths to train at")
    p.add_argument("--models", nargs="+", required=True, metavar="SIZE", help="sizes, by name or as L,NH,C")
    p.add_argument("--eval_lengths", nargs="+", type=console.naturals, default=[], metavar="T",
                   help="lengths to evaluate at [the trained ones, 2 and 4 times the longest]")
    p.add_argument("--eval_tokens", default="0", help="evaluate at most this many tokens; 0 = all [0]")
    p.add_argument("--sliding", type=int, default=0, metavar="S", help="also perplexity in windows S tokens apart")
    p.add_argument("--positions", action="store_true", help="also the loss by position in the window")
    p.add_argument("--compare", nargs="+", default=[], metavar="NAME", help="differences between these, with intervals")
    p.add_argument("--out", default="run/study", help="directory of the runs and results [run/study]")
    p.add_argument("--trainer", default="", help="program that trains and evaluates [train_gpt2 of this repository]")
    p.add_argument("--jobs", type=int, default=0, help="runs at a time [1; with GPUs: one for each]")
    p.add_argument("--verbose", action="store_true", help="show the trainer's output (with --jobs 1)")
    p.add_argument("--dry_run", action="store_true", help="print the commands; run nothing")
    args, rest = p.parse_known_args(argv)
    args.flags = runqueue.flags_of(rest)
    for name in args.flags.keys() & OWN.keys():
        raise BadInput(f"--{name}: expected {OWN[name]}")
    for name in ("seeds", "lengths", "eval_lengths"):
        setattr(args, name, list(dict.fromkeys(n for some in getattr(args, name) for n in some)))
    args.eval_lengths = sorted(args.eval_lengths or {*args.lengths, 2 * max(args.lengths), 4 * max(args.lengths)})
    args.encodings, args.models = list(dict.fromkeys(args.encodings)), list(dict.fromkeys(args.models))
    if min(args.lengths + args.eval_lengths) < 1 or args.jobs < 0:
        raise BadInput("--lengths, --eval_lengths, --jobs: expected positive numbers")
    if (args.sliding or args.positions) and "eval.stride" in args.flags:
        raise BadInput("--sliding and --positions stand beside windows that do not overlap: expected no --eval.stride")
    if args.sliding < 0 or args.sliding >= max(args.eval_lengths):
        raise BadInput(f"--sliding {args.sliding}: expected fewer tokens than the longest of --eval_lengths, "
                       f"{max(args.eval_lengths)}")
    absent = [pos for pos in args.compare if pos not in args.encodings and "all" not in args.encodings]
    if len(args.compare) == 1 or absent:
        raise BadInput(f"--compare: expected two or more of --encodings, got {' '.join(args.compare)}")
    args.trainer = shlex.quote(os.path.abspath(args.trainer or os.path.join(runqueue.ROOT, "train_gpt2")))
    args.command = shlex.join(["scripts/study.py", *argv])
    return args


def resolve(args):
    """replaces `all`, and completes the flags"""
    text = runqueue.help_of(args.trainer)
    encodings, sizes = console.encodings(text), re.findall(r"(\w+) (\d+),(\d+),(\d+)", text)
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
    return os.path.join(args.out, run.model.replace(",", "x"), f"{slug(run.pos)}-T{run.T}", f"seed_{run.seed}")


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
    trains.update(model=run.model, pos=run.pos, T=str(run.T), seed=str(run.seed), resume="1", out=out)
    cost = flops(run, args, int(trains.get("steps", 1)) * total, run.T, 3)
    where = os.path.join(out, "eval", slug(report.data_name(args.flags.get("eval.val_files") or
                                                            args.flags.get("val_files", "default_val"))))
    commands = [Command("train", args.trainer, trains, out, os.path.join(out, "train.done"), cost),
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
    for seed in args.seeds:
        for model in args.models:
            for T in args.lengths:
                for pos in args.encodings:
                    run = Run(pos, seed, T, model)
                    jobs[run] = Job(f"{pos}, T {T}" + f", {model}" * (len(args.models) > 1) + f", seed {seed}", "",
                                    commands_of(run, args))
    places = collections.Counter(run_directory(run, args) for run in jobs)
    if max(places.values()) > 1:
        raise BadInput(f"two runs would share {max(places, key=places.get)}; name their sizes and encodings apart")
    return jobs


def check(jobs):
    """Lets the trainer check the flags of every kind of run before the first one starts. One seed stands for all."""
    kinds = {}
    for run, job in jobs.items():
        if not runqueue.is_done(job.commands[0]):
            kinds.setdefault(run._replace(seed=0), job)
    errors = {}                                             # {message: the first job that has it}
    for job in kinds.values():
        train = job.commands[0]
        words = arguments(train._replace(flags={**train.flags, "check": None}))
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if found.returncode:
            said = (found.stderr or found.stdout).strip().splitlines() or [f"exit code {found.returncode}"]
            errors.setdefault(said[-1], job.label)
    if errors:
        lines = [f"  {label}: {message}" for message, label in errors.items()]
        raise BadInput("nothing was started, because the trainer refuses:\n" + "\n".join(lines))


# ----------------------------------------------------------------------------------------------------------
# results

def records(command, kind):
    """{T: record} of this kind as an evaluation has logged them; the last one of a length counts"""
    return {r["T"]: r for r in console.read_log(command.out, kind)}


# Of all runs. cells and sliding: {(model, trained length, encoding): {T: [perplexity for each seed]}}, in windows that
# do not overlap and in sliding ones; positions: {the same: {T: {(first, last): [loss for each seed]}}}; speeds: {the
# same: {T: {key of SPEEDS: [value for each seed]}}}, of the evaluations of cells
Results = collections.namedtuple("Results", "cells sliding positions speeds commits")
SPEEDS = {"tok_per_s": "Tokens per second", "mem": "Memory in MB at the end"}


def gather(jobs):
    """the Results of what is finished"""
    results, commits = Results({}, {}, {}, {}, []), {}
    for run, job in jobs.items():
        rows = [found.setdefault((run.model, run.T, run.pos), {}) for found in results[:4]]
        finished = {c.title: c for c in job.commands if runqueue.is_done(c)}
        if "train" not in finished or "evaluate" not in finished:
            continue
        commits.update({runqueue.commit_of(c): None for c in finished.values()})
        for title, row in zip(("evaluate", "sliding"), rows):
            for T, r in records(finished[title], "extrapolation").items() if title in finished else ():
                if T in console.naturals(finished[title].flags["eval_lengths"]) and r["ppl"] is not None:
                    row.setdefault(T, []).append(r["ppl"])
        for T, r in records(finished["positions"], "curve").items() if "positions" in finished else ():
            for positions, loss in plot.octaves(r["loss"]).items():
                rows[2].setdefault(T, {}).setdefault(positions, []).append(loss)
        for T, r in records(finished["evaluate"], "evaluation_speed").items():
            for name in SPEEDS if None not in (r["tok_per_s"], r["mem"]) else ():
                rows[3].setdefault(T, {}).setdefault(name, []).append(r[name])
    results.commits.extend(commits)
    return results


def cell(values, digits=2):
    if not values:
        return "-"
    deviation = f" ± {plot.spread(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.{digits}f}{deviation} ({len(values)})"


def table(args, head, rows):
    """lines of Markdown; rows: {(model, trained length, encoding): its cells}"""
    several = len(args.models) > 1
    head = ["size"] * several + ["trained at", "encoding"] + head
    return console.table(head, [[model] * several + [f"{T:,}", pos] + cells for (model, T, pos), cells in rows.items()])


def latex(lines):
    """a table in Markdown as LaTeX's, by booktabs"""
    rows = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
    lines = [" & ".join(cells) + r" \\" for cells in rows]
    for letter, instead in (("_", r"\_"), ("%", r"\%"), ("±", r"$\pm$")):
        lines = [line.replace(letter, instead) for line in lines]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", r"\toprule", lines[0], r"\midrule", *lines[1:],
                      r"\bottomrule", r"\end{tabular}", ""])


def range_text(positions):
    return "-".join(f"{t:,}" for t in dict.fromkeys(positions))


def perplexities(args, cells):
    return table(args, [f"{T:,}" for T in args.eval_lengths],
                 {key: [cell(row.get(T, [])) for T in args.eval_lengths] for key, row in cells.items()})


def markdown(args, results):
    steps = f"{int(args.flags['steps']):,} steps" if "steps" in args.flags else "one pass over the data in steps"
    data = os.path.basename(args.flags.get("val_files", "the validation data"))
    lines = [f"Perplexity on {data} at each length: mean ± standard deviation (number of seeds). Trained for "
             f"{steps} of {int(args.flags['total_batch']):,} tokens, size {', '.join(args.models)}.", "",
             f"Commit {', '.join(results.commits)}:", "", f"    {args.command}", ""]
    lengths = [f"{T:,}" for T in args.eval_lengths]
    lines += perplexities(args, results.cells)
    if any(results.sliding.values()):
        lines += ["", f"The same in windows {args.sliding:,} tokens apart; only the last {args.sliding:,} of each "
                  "count: each token sees the rest of its window.", ""]
        lines += perplexities(args, results.sliding)
    for T in sorted({T for of_T in results.positions.values() for T in of_T}):
        rows = {key: of_T[T] for key, of_T in results.positions.items() if T in of_T}
        columns = sorted({positions for row in rows.values() for positions in row})
        lines += ["", f"Loss in nats by position in windows of {T:,} tokens that do not overlap.", ""]
        lines += table(args, [range_text(p) for p in columns],
                       {key: [cell(row.get(p, [])) for p in columns] for key, row in rows.items()})
    for name, what in SPEEDS.items() if any(results.speeds.values()) else ():
        shown = lambda row, T: [v / (1e6 if name == "mem" else 1) for v in row.get(T, {}).get(name, [])]
        lines += ["", f"{what} of the evaluations in the first table.", ""]
        lines += table(args, lengths, {key: [cell(shown(row, T), 0) for T in args.eval_lengths]
                                       for key, row in results.speeds.items()})
    return "\n".join(lines) + "\n"


def comparisons(args, jobs):
    """lines of Markdown: for each two encodings of --compare their difference at each length"""
    lines = []
    for a, b in itertools.combinations(args.compare, 2):
        for model, T in itertools.product(args.models, args.lengths):
            of = [[job.commands for run, job in jobs.items() if (run.model, run.T, run.pos) == (model, T, pos)]
                  for pos in (a, b)]
            try:
                if not all(map(runqueue.is_done, itertools.chain(*of[0], *of[1]))):
                    raise BadInput("not all seeds are finished")
                ours, theirs = (compare.parameters(commands[0][0].out) for commands in of)
                lines.append(f"- {model}, trained at {T:,}; {a} has {ours:,} parameters, {b} {theirs - ours:+,}")
                for length in args.eval_lengths:
                    name = f"token_losses_{length}_{length}.safetensors"
                    places = ([os.path.join(c[-1].out, name) for c in commands] for commands in of)
                    lines.append("  - " + compare.sentence(a, b, length, *places))
            except BadInput as e:
                lines.append(f"- {a} - {b}, {model}, trained at {T:,}: none: {e}")
    return lines


def rows_of(args, results):
    """the rows of study.csv"""
    def row(key, T, values, what, positions=""):
        (model, trained_at, encoding), deviation = key, plot.spread(values)
        return {"model": model, "trained_at": trained_at, "encoding": encoding, "T": T,
                "mean": f"{statistics.fmean(values):.6g}", "std": "" if deviation is None else f"{deviation:.6g}",
                "n": len(values), "commit": " ".join(results.commits), "command": args.command, "what": what,
                "positions": positions}

    for key in results.cells:
        for what, cells in ("ppl", results.cells), (f"ppl, stride {args.sliding}", results.sliding):
            for T, values in sorted(cells.get(key, {}).items()):
                yield row(key, T, values, what)
        for T, of_positions in sorted(results.positions.get(key, {}).items()):
            for positions, values in sorted(of_positions.items()):
                yield row(key, T, values, "loss", range_text(positions).replace(",", ""))
        for T, measured in sorted(results.speeds.get(key, {}).items()):
            for name, values in measured.items():
                yield row(key, T, values, name)


def panels(args, plot_row, rows):
    """A panel for each size and trained length, in which plot_row(ax, row, label, colour, marker) draws each encoding
    and returns its line. Returns (figure, axes, the lines)."""
    several = len(args.models) > 1
    fig, axes = plot.figure(1.8 + 3.6 * len(args.lengths), 0.9 + 3.4 * len(args.models), nrows=len(args.models),
                            ncols=len(args.lengths), sharex=True, sharey=True, squeeze=False)
    colours, lines = plot.styles_of(("", pos) for pos in args.encodings), {}
    for (model, trained, pos), row in rows.items():
        if row:
            ax = axes[args.models.index(model)][args.lengths.index(trained)]
            lines[pos] = plot_row(ax, row, plot.literal(pos), *colours["", pos])
    for model, of_model in zip(args.models, axes):
        for T, ax in zip(args.lengths, of_model):
            ax.set_title(plot.literal(f"trained at {T:,}" + f", {model}" * several), fontsize=11)
    return fig, axes, lines


def sign(args, fig, axes, lines, commits):
    """the legend, and where the figure is from"""
    plot.legend_beside(axes[len(axes) // 2][-1], [(line.get_ydata()[-1], line) for line in lines.values()])
    line = int(18 * fig.get_size_inches()[0])               # characters, each 8 pixels of 150 an inch wide
    wrapped = textwrap.wrap(f"commit {', '.join(commits)}: {args.command}", line, break_on_hyphens=False)
    fig.suptitle(plot.literal("\n".join(wrapped)), fontsize=6, family="monospace", color="#555555", x=0.01, ha="left")
    return fig


def draw(args, results):
    """perplexity by length: a line for each encoding, its band the standard deviation; sliding windows are dashed"""
    shown = []

    def plot_row(ax, row, label, colour, marker):
        cells, slid = row
        line = plot.line_of_seeds(ax, cells, color=colour, marker=marker, markersize=5, label=label)
        dashed = [statistics.fmean(slid[T]) for T in sorted(slid)]
        ax.plot(sorted(slid), dashed, color=colour, linewidth=1, linestyle="--", label="_sliding")
        shown.extend([*line.get_ydata(), *dashed])
        return line

    rows = {key: (row, results.sliding.get(key, {})) for key, row in results.cells.items() if row}
    fig, axes, lines = panels(args, plot_row, rows)
    for of_model in axes:
        for T, ax in zip(args.lengths, of_model):
            plot.length_axis(ax, args.eval_lengths)
            plot.perplexity_axis(ax, shown)
            plot.mark_trained(ax, [T])
            ax.set_ylabel("perplexity" if ax is of_model[0] else "")
    dashed = f"; dashed: windows {args.sliding:,} apart" if any(results.sliding.values()) else ""
    axes[-1][len(args.lengths) // 2].set_xlabel("evaluation length T (tokens)" + dashed)
    return sign(args, fig, axes, lines, results.commits)


def draw_positions(args, results):
    """the loss by position in the longest windows that an encoding has, its band the standard deviation"""
    drawn = []

    def plot_row(ax, of_lengths, label, colour, marker):
        points = {math.sqrt(first * last): losses for (first, last), losses in of_lengths[max(of_lengths)].items()}
        line = plot.line_of_seeds(ax, points, color=colour, marker=marker, markersize=4, label=label)
        drawn.append(line.get_xydata())
        return line

    fig, axes, lines = panels(args, plot_row, results.positions)
    for of_model in axes:
        for T, ax in zip(args.lengths, of_model):
            plot.length_axis(ax, [x for points in drawn for x, _ in points] + [T])
            ticks = [1 << n for n in range(0, max(args.eval_lengths).bit_length(), 2)]
            ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
            plot.mark_trained(ax, [T])
            ax.set_ylabel("loss (nats per token)" if ax is of_model[0] else "")
    plot.loss_axis(axes[0][0], drawn)
    axes[-1][len(args.lengths) // 2].set_xlabel(f"position in windows of up to {max(args.eval_lengths):,} tokens")
    return sign(args, fig, axes, lines, results.commits)


def write_results(args, jobs):
    results = gather(jobs)
    if not any(results.cells.values()):
        return
    text, path = markdown(args, results), os.path.join(args.out, "study")
    if args.compare:
        text += "\n" + "\n".join(comparisons(args, jobs)) + "\n"
    console.write_whole(path + ".md", text)
    console.write_whole(path + ".tex", latex(perplexities(args, results.cells)))
    ledger.write(path + ".csv", list(rows_of(args, results)))
    print("\n" + text)
    written = f"{path}.md, {path}.tex, {path}.csv"
    try:
        figures = {path + ".png": draw}
        if any(results.positions.values()):
            figures[path + "_positions.png"] = draw_positions
        for name, drawing in figures.items():
            plot.save(drawing(args, results), name, metadata={"Description": f"{results.commits}: {args.command}"})
            written += f", {name}"
    except BadInput as e:
        console.say(f"study.py: no figure: {e}")
    print(f"wrote {written}")


def main(argv):
    args = parse(argv)
    resolve(args)
    jobs = jobs_of(args)
    if args.dry_run:
        for job in jobs.values():
            print("\n".join(shlex.join(arguments(c)) for c in job.commands))
        return 0
    slots = runqueue.slots(args.jobs, args.trainer.rstrip("'").endswith("cu"))
    runqueue.refuse_changes(jobs.values())
    try:
        console.need("matplotlib")
    except BadInput as e:
        console.say(f"study.py: there will be no figure: {e}")
    check(jobs)
    code = runqueue.Queue("study.py", jobs.values(), slots, args.verbose).run()
    if code != runqueue.INTERRUPTED:
        write_results(args, jobs)
    return code


if __name__ == "__main__":
    console.run(main)
