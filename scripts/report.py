#!/usr/bin/env python3
"""report.py -- gathers finished runs into the paper's tables, with the paper's numbers beside them.

    scripts/report.py run                       the tables that have runs, as Markdown
    scripts/report.py run other -o report       report/report.md, and a figure for every table
    scripts/report.py run --paper               also the paper's tables that have no run

A run is a directory with log.jsonl and checkpoints anywhere below the given directories. Its newest checkpoint says
what was trained, on what and with which seed. Its evaluations are the records of its own log and of
RUN/eval/DATA/log.jsonl, as scripts/paper.py writes them; for BERT the report also shows the losses during training.
Means and sample standard deviations are over seeds; "-" means not run. Below a table of perplexities is the loss at
each position of its longest windows, if the evaluation has written it (--curve). The paper's numbers are in
scripts/paper_tables.csv; its tables without a run are named in one line. Runs that are left out (unfinished, damaged,
not evaluated, run twice) are named on stderr. Exit code 2: bad input, such as a run that is damaged.
"""
import collections
import glob
import os
import re
import statistics
import sys

import console
import plot
from console import COUNT, NUMBER, OBJECT, POSITIVE, TEXT, BadInput, field, fields

NAMES = {"edu_fineweb": "fineweb-edu-10B", "fineweb-edu": "fineweb-edu-10B", "fineweb": "fineweb-10B",
         "wikitext103_raw": "wikitext-103", "wikitext2_raw": "wikitext-2", "wikitext103": "wikitext-103, word-level",
         "wikitext-103-words": "wikitext-103, word-level", "wikitext2": "wikitext-2, word-level",
         "wikitext-2-words": "wikitext-2, word-level", "wikitext2_bytes": "wikitext-2-bytes", "msmarco": "ms-marco",
         "mldr": "mldr-en"}
# data sets whose tables also show the paper's numbers for another: the paper does not say which one it used
ALSO = {"wikitext-103, word-level": "wikitext-103", "wikitext-2, word-level": "wikitext-2", "fineweb-1B": "fineweb-10B"}
PAPER_TABLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "paper_tables.csv")
COLUMNS = {**dict.fromkeys(("table", "model", "trained_on", "evaluated_on", "metric", "encoding"), TEXT),
           **dict.fromkeys(("trained_at", "512", "1024", "2048", "4096", "8192", "15360", "16384"), NUMBER)}
# numbers in paper_tables.csv that belong to no table of CABLE's paper, with the heading that a report gives them
QUOTED = {"arxiv-text": "Numbers in the arXiv version's text", "carope-1": "Table 1 of CARoPE (arXiv 2507.23083)"}
# the names of layers, heads, channels and trained length in config.json, and the sizes
FAMILIES = {"gpt2": (("n_layer", "n_head", "n_embd", "n_positions"),
                     {(6, 8, 512): "tiny", (12, 12, 768): "small", (24, 16, 1024): "medium"}),
            "bert": (("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"),
                     {(2, 2, 128): "tiny", (4, 4, 256): "mini", (4, 8, 512): "small", (12, 12, 768): "base"})}
METRICS = {"ppl": "perplexity", "acc": "accuracy, %", "ndcg@10": "nDCG@10"}
FIGURE_NAME = {"arxiv-1": "the arXiv version's generalization table"}
# the curves in the paper: (model, data it was trained on)
CURVES = {("bert:base", "fineweb-edu-10B"): "Figure 5", ("bert:base", "fineweb-edu-10B + ms-marco"): "Figure 6"}

# What identifies a table of the report; tokens None: only the paper has numbers for it; how: "as run" for the runs of
# paper.py --as run
Key = collections.namedtuple("Key", "model trained_on evaluated_on metric tokens how", defaults=("",))
# what: its training in words; tokens: all that it was trained on, including the run that it was loaded from; pairs:
# whether it was fine-tuned on groups of texts
Run = collections.namedtuple("Run", "path model trained_on pos T seed steps tokens what pairs how")


def complain(text):
    console.say(f"report.py: {text}")


def data_name(pattern):
    """the name of a data set: fineweb-edu-10B for data/edu_fineweb10B/edu_fineweb_train_*.bin; for files that NAMES
    does not know, what stands before _train, _val or _test"""
    stem = re.sub(r"[_-]?(train|val|valid|test)([_.*?\[-].*)?$", "", os.path.basename(pattern))
    stem = stem or os.path.basename(os.path.dirname(pattern))
    return NAMES.get(stem, stem or pattern)


# ----------------------------------------------------------------------------------------------------------
# runs

def newest_options(path):
    """the flags that wrote the newest checkpoint in a directory, or this checkpoint itself"""
    checkpoints = sorted(glob.glob(os.path.join(glob.escape(path), "step_*")))
    where = os.path.join((checkpoints or [path])[-1], "state.json")
    return field(console.read_object(where), "options", OBJECT, where)


def loaded_options(path, options):
    """The flags of the run that this one started from, found where it was, or, if the runs have moved together, at the
    same place relative to this one: paper.py writes DATA/MODEL/POS/SEED."""
    load = options.get("load", "")
    moved = os.path.join(path, "..", "..", "..", "..", *os.path.normpath(load).split(os.sep)[-4:])
    for where in (load, moved) if load else ():
        if glob.glob(os.path.join(glob.escape(where), "step_*")) or os.path.exists(os.path.join(where, "state.json")):
            found = checked_options(newest_options(where), where)
            return {**found, "data": data_name(found["train_files"]), "tokens": found["steps"] * found["total_batch"]}
    return {}


def checked_options(options, where):
    """the flags of a training, which are used here"""
    needed = {"steps": COUNT, "total_batch": POSITIVE, "seed": COUNT,
              **dict.fromkeys(("pos", "train_files", "val_files"), TEXT)}
    return fields(options, needed, {"T": POSITIVE, "pairs": TEXT, "load": TEXT, "qrels": TEXT}, where)


def training_of(path, options, T):
    """(data, tokens, words); a model fine-tuned on groups has also learned from what it was loaded from"""
    steps, total_batch = options["steps"], options["total_batch"]
    if not options.get("pairs"):
        data = data_name(options["train_files"])
        return data, steps * total_batch, f"{steps:,} steps of {total_batch:,} tokens of {data}"
    before, data = loaded_options(path, options), data_name(options["pairs"])
    words = f"{steps:,} steps of {total_batch // options.get('T', T):,} groups of {data}"
    if not before:
        return data, steps * total_batch, words
    first = f"{before['steps']:,} steps of {before['total_batch']:,} tokens of {before['data']}"
    return f"{before['data']} + {data}", before["tokens"] + steps * total_batch, f"{first}, then for {words}"


def encoding_of(options, config):
    """the encoding as --pos named it, or, for a model loaded without --pos, as its config.json names it"""
    asked, own = options["pos"], config.get("position", {}).get("name", "")
    return own if own and own != asked.partition(":")[0] else asked


class LeftOut(BadInput):
    """a run that does not count, and is not damaged"""


def read_run(path, checkpoint):
    """the Run; raises BadInput with the reason if it does not count"""
    where = os.path.join(checkpoint, "config.json")
    config = console.read_object(where)
    family = "bert" if config.get("model_type") in ("bert", "cable_bert") else "gpt2"
    *shape, T = (field(config, name, POSITIVE, where) for name in FAMILIES[family][0])
    if "position" in config:
        field(field(config, "position", OBJECT, where), "name", TEXT, where)
    size = FAMILIES[family][1].get(tuple(shape))
    model = f"{family}:{size}" if size else "bert " * (family == "bert") + "L{} NH{} C{}".format(*shape)
    where = os.path.join(checkpoint, "state.json")
    state = console.read_object(where)
    options = checked_options(field(state, "options", OBJECT, where), where)
    steps, step = options["steps"], field(state, "step", COUNT, where)
    data, tokens, what = training_of(path, options, T)
    if step < steps:
        raise LeftOut(f"{path}: unfinished, at step {step:,} of {steps:,}; left out")
    return Run(path, model, data, encoding_of(options, config), T, options["seed"], steps, tokens, what,
               bool(options.get("pairs")), "as run" if "as_run" in os.path.abspath(path).split(os.sep) else "")


def find_runs(directories, damaged=None):
    """{finished run: its logs} below the directories, each once. damaged: gets the runs that cannot be read"""
    runs, seen = {}, set()
    for top in directories:
        if not os.path.isdir(top):
            raise BadInput(f"{top}: no such directory")
        for path, below, files in sorted(os.walk(top, onerror=console.fail)):
            checkpoints = sorted(d for d in below if re.fullmatch(r"step_\d{8,9}", d))
            if os.path.realpath(path) in seen or "log.jsonl" not in files:
                continue
            seen.add(os.path.realpath(path))
            if checkpoints:
                try:
                    run = read_run(path, os.path.join(path, checkpoints[-1]))
                    runs[run] = logs_of(run)
                except BadInput as e:
                    complain(e)
                    if damaged is not None and not isinstance(e, LeftOut):
                        damaged.append(path)
            elif os.path.basename(os.path.dirname(path)) != "eval":
                complain(f"{path}: has a log but no checkpoint; left out")
    return runs


def perplexities(log, path):
    """{(metric, T): value} of one log; the last record for each length counts"""
    found = {}
    for r in log:
        if r["kind"] == "extrapolation" and r["ppl"] is None:
            complain(f"{path}: an evaluation without perplexity at {r['T']:,}")
        elif r["kind"] == "extrapolation":
            sliding = f", stride {r['stride']}" if r["stride"] < r["T"] else ""
            found["ppl" + plot.stretch_of(r) + sliding, r["T"]] = r["ppl"]
    return found


def logs_of(run):
    """[(path, log, name of the data set that a flag of the run gives)] of a run and of its evaluations"""
    found = []
    evaluations = sorted(glob.glob(os.path.join(glob.escape(run.path), "eval", "*")))
    for path, what in [(run.path, None)] + [(p, os.path.basename(p)) for p in evaluations]:
        if not os.path.exists(os.path.join(path, "log.jsonl")):
            continue
        what = what and what.partition(".")[0]          # wikitext-103.sliding, wikitext-103.8192
        flagged = lambda flag: data_name(newest_options(run.path).get(flag, ""))
        log = console.read_log(path, ended=True)
        found.append((path, log, (lambda _, w=what: NAMES.get(w, w)) if what else flagged))
    return found


def position_losses(logs):
    """{(evaluated_on, metric): {T: [loss at each position]}}, of windows that do not overlap"""
    found = {}
    for _, log, data in logs:
        for r in log:
            if r["kind"] == "curve" and r["stride"] == r["T"]:
                found.setdefault((data("val_files"), "ppl" + plot.stretch_of(r)), {})[r["T"]] = r["loss"]
    return found


def measurements(run, logs):
    """[(evaluated_on, metric, T, value)]"""
    found = []
    for path, log, data in logs:
        found += [(data("val_files"), metric, T, value) for (metric, T), value in perplexities(log, path).items()]
        retrieval = {r["T"]: r["ndcg@10"] for r in log if r["kind"] == "retrieval"}
        found += [(data("qrels"), "ndcg@10", T, 100 * share) for T, share in retrieval.items()]
        scores = [r["acc_norm"] for r in log if r["kind"] == "hellaswag"]
        if scores:
            found.append(("hellaswag", "acc", run.T, 100 * scores[-1]))
    return found


# ----------------------------------------------------------------------------------------------------------
# tables

class Table:
    """ours: {(pos, T_train): {seed: {T: value}}}; curves: the same with the losses at each position; paper: {pos: {T:
    value}}"""

    def __init__(self, key):
        self.key, self.number, self.ours, self.paper, self.settings = key, "", {}, {}, ""
        self.curves = {}
        self.paper_T = 512 if key.model.startswith("bert") else 1024        # the length at which the paper trained

    def lengths(self):
        ours = {T for seeds in self.ours.values() for values in seeds.values() for T in values}
        return sorted(ours | {T for row in self.paper.values() for T in row})

    def trained(self):
        return sorted({T for _, T in self.ours})

    def values(self, row, T):
        return [s[T] for s in self.ours.get(row, {}).values() if T in s]


def paper_rows():
    """the rows of the paper's tables, each with its `numbers` {T: value}"""
    rows = console.read_table(PAPER_TABLES, COLUMNS, [name for name in COLUMNS if not name.isdigit()])
    return [{**r, "numbers": {int(T): v for T, v in r.items() if T.isdigit() and v is not None}} for r in rows]


def paper_numbers():
    """{(model, trained_on, evaluated_on, metric): (table, {pos: {T: value}})}"""
    tables = {}
    for r in paper_rows():
        if r["table"] not in QUOTED:
            key = r["model"], r["trained_on"], r["evaluated_on"], r["metric"]
            tables.setdefault(key, (r["table"], {}))[1][r["encoding"]] = r["numbers"]
    return tables


def paper_name(pos):
    """the paper's name of an encoding with any options; the paper's T5 is t5_clip, and it has no t5 with buckets"""
    return {"t5_clip": "t5", "t5": ""}.get(pos.partition(":")[0], pos.partition(":")[0])


def quoted_numbers(tables, all_rows):
    """the numbers of QUOTED, and ours where they are perplexities; not all_rows: only where we have one"""
    lines = []
    for table, heading in QUOTED.items():
        rows = []
        for r in paper_rows():
            where = r["model"], r["trained_on"], r["evaluated_on"], r["metric"]
            own = [t for t in tables if tuple(t.key[:4]) == where and t.ours]
            for T, theirs in r["numbers"].items() if r["table"] == table else ():
                ours = [v for t in own for v in t.values((r["encoding"], int(r["trained_at"])), T)]
                if ours or all_rows:
                    rows.append([r["model"], r["encoding"], f"{int(r['trained_at']):,}", f"{T:,}",
                                 f"{r['metric']} on {r['evaluated_on']}", f"*{theirs:.2f}*", cell(ours)])
        head = ["model", "encoding", "trained at", "T", "what", "paper", "ours"]
        lines += [f"## {heading}", "", *console.table(head, rows), ""] if rows else []
    return lines


def gather(runs):
    """(the tables, the paper's first; the runs without any measurement)"""
    paper, tables, seen, silent = paper_numbers(), {}, {}, []
    for run, logs in runs.items():
        found = measurements(run, logs)
        if not found:
            silent.append(run)
        same = run._replace(path="")
        if found and same in seen:
            complain(f"{run.path}: the same as {seen[same]}, with equal model, data, steps and seed; left out")
            continue
        seen[same] = run.path
        for data, metric, T, value in found:
            key = Key(run.model, run.trained_on, data, metric, run.tokens, run.how)
            t = tables.setdefault(key, Table(key))
            t.settings = run.what
            t.ours.setdefault((run.pos, run.T), {}).setdefault(run.seed, {})[T] = value
        for (data, metric), curves in position_losses(logs).items() if found else ():
            t = tables.get(Key(run.model, run.trained_on, data, metric, run.tokens, run.how))
            if t:
                t.curves.setdefault((run.pos, run.T), {})[run.seed] = curves
    ordered = []
    for (model, trained_on, data, metric), (name, rows) in paper.items():
        own = [t for t in tables.values() if tuple(t.key[:4]) == (model, trained_on, data, metric)]
        for t in own or [Table(Key(model, trained_on, data, metric, None))]:
            t.number, t.paper = FIGURE_NAME.get(name, f"Table {name}"), rows
            ordered.append(t)
    for t in tables.values():
        also = (*t.key[:2], ALSO.get(t.key.evaluated_on), t.key.metric)
        if also in paper:
            t.number, t.paper = f"{FIGURE_NAME.get(paper[also][0], '')}, its numbers for {also[2]}", paper[also][1]
    return ordered + [t for t in tables.values() if t not in ordered], silent


def cell(values):
    """the mean of the values, and their standard deviation if there are several"""
    if not values:
        return "-"
    mean = statistics.fmean(values)
    text = f"{mean:.2f}" if mean < 10000 else f"{mean:,.0f}"
    return text + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def ratios(table, row, longest):
    """the perplexity at the longest length divided by that at the trained length, for each seed"""
    return [s[longest] / s[row[1]] for s in table.ours.get(row, {}).values() if longest in s and row[1] in s]


def row_order(table):
    """the rows in the paper's order, then in that of plot.py, then by name"""
    rank = {pos: n for n, pos in enumerate(dict.fromkeys([*table.paper, *map(paper_name, plot.STYLES)]))}
    have = {(paper_name(pos), T) for pos, T in table.ours}
    missing = [({"t5": "t5_clip"}.get(pos, pos), table.paper_T) for pos in table.paper
               if (pos, table.paper_T) not in have]
    return sorted([*table.ours, *missing], key=lambda r: (rank.get(paper_name(r[0]), len(rank)), r[0], r[1]))


def label_of(table, row):
    return row[0] if len({T for _, T in row_order(table)}) < 2 else f"{row[0]}, T {row[1]}"


def titled(title, number):
    """a heading, with the number of the paper's table or figure if it has one"""
    return [f"## {title} ({number})" if number else f"## {title}", ""]


def markdown(table):
    key, lengths, trained = table.key, table.lengths(), table.trained()
    how = f", {key.how}" * bool(key.how)
    lines = titled(f"{key.model}, {METRICS.get(key.metric, key.metric)} on {key.evaluated_on}{how}", table.number)
    if table.ours:
        at = ", ".join(f"{T:,}" for T in trained)
        lines += [f"Trained for {table.settings}, at T = {at}. Mean and standard deviation over seeds.", ""]
    else:
        lines += [f"Trained on {key.trained_on}. No run of it yet.", ""]
    longest = max(lengths)
    ratio = key.metric.startswith("ppl") and len(trained) == 1 and longest > trained[0] in lengths
    head = ["T", "seeds"] + [f"{T:,}" for T in lengths]
    if ratio:
        head.append(f"PPL({longest:,}) / PPL({trained[0]:,})")
    rows = []
    for row in row_order(table):
        seeds = len(table.ours.get(row, {}))
        cells = [label_of(table, row), str(seeds) if seeds else "-"] + [cell(table.values(row, T)) for T in lengths]
        if ratio:
            r = ratios(table, row, longest)
            cells.append(f"{statistics.fmean(r):.3f}" if r else "-")
        rows.append(cells)
        if paper_name(row[0]) in table.paper and row[1] == table.paper_T:
            paper = table.paper[paper_name(row[0])]
            cells = [f"*{row[0]}, paper*", ""] + [f"*{paper[T]:.2f}*" if T in paper else "" for T in lengths]
            rows.append(cells + [""] * ratio)
    return lines + console.table(head, rows) + [""]


# ----------------------------------------------------------------------------------------------------------
# figures

def slug(key):
    text = "_".join(str(x) for x in key if x is not None)
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")


def draw_lengths(table):
    """The metric against length: the mean over seeds as a line, their deviation as a band, the paper's as dots."""
    fig, ax = plot.figure(8, 4.8)
    ends, shown = [], []
    rows = [row for row in row_order(table) if row in table.ours]
    styles = plot.styles_of((row, row[0]) for row in rows)
    for row in rows:
        colour, marker = styles[row, row[0]]
        points = {T: table.values(row, T) for T in table.lengths() if table.values(row, T)}
        line = plot.line_of_seeds(ax, points, color=colour, marker=marker, label=plot.literal(label_of(table, row)))
        ends.append((line.get_ydata()[-1], line))
        shown += list(line.get_ydata())
        reference = table.paper.get(paper_name(row[0]), {}) if row[1] == table.paper_T else {}
        if reference:
            ax.plot(*zip(*sorted(reference.items())), color=colour, linewidth=0.9, linestyle=":")
            shown += reference.values()
    if table.key.metric.startswith("ppl"):
        plot.perplexity_axis(ax, shown)
    else:
        ax.set_ylabel(METRICS[table.key.metric])
    plot.length_axis(ax, table.lengths())
    plot.mark_trained(ax, table.trained())
    ax.set_xlabel("evaluation length T (tokens)" + ("; dots: the paper's" if table.paper else ""))
    plot.legend_beside(ax, ends, plot.band_of([len(values) for row in table.ours for T in table.lengths()
                                               if (values := table.values(row, T))]))
    return fig


# ----------------------------------------------------------------------------------------------------------
# the loss at each position, beside a table of perplexities

def markdown_positions(table):
    T = max(T for seeds in table.curves.values() for curves in seeds.values() for T in curves)
    octaves = {row: [plot.octaves(curves[T], 64) for curves in table.curves.get(row, {}).values() if T in curves]
               for row in row_order(table)}
    ranges = sorted({positions for of_row in octaves.values() for of_seed in of_row for positions in of_seed})
    rows = [[label_of(table, row), *(cell([of_seed[p] for of_seed in of_row if p in of_seed]) for p in ranges)]
            for row, of_row in octaves.items() if of_row]
    return [f"Loss at the positions of windows of {T:,} tokens:", "",
            *console.table(["position"] + [f"{a:,} to {b:,}" for a, b in ranges], rows), ""]


# ----------------------------------------------------------------------------------------------------------
# BERT's curves: the loss of masked tokens, the contrastive loss

Curve = collections.namedtuple("Curve", "run train val dead")   # [(step, loss)] twice, [(step, share of dead heads)]


def curves_of(runs):
    """{(model, data, tokens): [Curve]}, the curves in plot.py's order of encodings"""
    found = {}
    for run, logs in runs.items():
        log = logs[0][1] if run.model.startswith("bert") else []
        train, val, dead = (plot.series(log, kind, key) for kind, key in (("train", "loss"), ("val", "loss"),
                                                                          ("val", "dead_heads")))
        if train:
            found.setdefault((run.model, run.trained_on, run.tokens), []).append(Curve(run, train, val, dead))
    rank = {pos: n for n, pos in enumerate(plot.STYLES)}
    order = lambda c: (rank.get(c.run.pos.partition(":")[0], len(rank)), c.run.seed)
    return {key: sorted(curves, key=order) for key, curves in found.items()}


def loss_name(curves):
    return "contrastive loss" if curves[0].run.pairs else "loss of masked tokens"


def markdown_curves(key, curves):
    lines = titled(f"{key[0]}, {loss_name(curves)} on {key[1]}", CURVES.get(key[:2]))
    lines += [f"Trained for {curves[0].run.what}. The training loss is the mean over the last tenth of the steps.", ""]
    groups, rows = {}, []
    head = ["encoding", "seeds", "training", "validation", *["dead heads (%)"] * any(c.dead for c in curves)]
    for c in curves:
        groups.setdefault(c.run.pos, []).append(c)
    for pos, group in groups.items():
        last = [statistics.fmean(v for _, v in c.train[-max(1, len(c.train) // 10):]) for c in group]
        dead = [cell([100 * c.dead[-1][1] for c in group if c.dead])] * len(head[4:])
        rows.append([pos, str(len(group)), cell(last), cell([c.val[-1][1] for c in group if c.val]), *dead])
    return lines + console.table(head, rows) + [""]


def draw_curves(curves):
    """The running median of the training loss, one line per seed, and validation as hollow marks. The steep fall of the
    first steps is cut off."""
    fig, ax = plot.figure(8, 4.8)
    ends, named, shown = [], set(), []
    for c in curves:
        colour, marker = plot.style(c.run.pos)
        smooth = plot.running_median(c.train, max(1, len(c.train) // 50))
        line, = ax.plot([step for step, _ in c.train], smooth, color=colour, linewidth=1.4, marker=marker, markersize=5,
                        markevery=max(1, len(smooth) // 8), label=plot.literal(c.run.pos))
        if c.val:
            ax.plot(*zip(*c.val), color=colour, linestyle="none", marker=marker, markersize=6, markerfacecolor="white",
                    markevery=max(1, len(c.val) // 12))
        shown += smooth[len(smooth) // 20:]
        if c.run.pos not in named:
            ends.append((smooth[-1], line))
        named.add(c.run.pos)
    low, high = min(shown), max(shown)
    margin = 0.05 * (high - low) or 0.05
    ax.set_ylim(low - margin, high + margin)
    ax.set(xlabel="step" + "; hollow: validation" * any(c.val for c in curves), ylabel=f"{loss_name(curves)} (nats)")
    plot.legend_beside(ax, ends)
    return fig


# ----------------------------------------------------------------------------------------------------------
# speed: the runs of figure 3

Speed = collections.namedtuple("Speed", "model pos T train memory generate")         # memory in GB


def speed_of(run, logs):
    """the Speed of a run, None if it has not generated"""
    try:
        said = console.read_bytes(os.path.join(run.path, "eval", "generate", "output.log")).decode(errors="replace")
        generated = re.findall(r"tokens, (\d{1,15}(?:\.\d{1,15})?) tokens/s", said)[-1]
    except (BadInput, IndexError):
        return None
    log = logs[0][1]
    rates = [v for _, v in plot.series(log, "train", "tok_per_s")]
    memory = max((v / 1e9 for _, v in plot.series(log, "train", "mem")), default=None)
    settled = rates[len(rates) // 4:]                   # the first steps choose kernels and fill caches
    return Speed(run.model, run.pos, run.T, statistics.median(settled) if settled else None, memory, float(generated))


# each column: title, value, format
SPEED_COLUMNS = (("training, tokens/s", lambda s: s.train, ",.0f"), ("memory, GB", lambda s: s.memory, ".3g"),
                 ("generation, tokens/s", lambda s: s.generate, ",.0f"))


def markdown_speed(speeds):
    rows = [[s.model, s.pos, f"{s.T:,}", *("-" if value(s) is None else format(value(s), form)
                                           for _, value, form in SPEED_COLUMNS)] for s in speeds]
    return ["## Speed and memory (Figure 3)", "",
            "Tokens per second in training (the median without the first quarter of the steps) and in unbatched "
            "generation.", "",
            *console.table(["model", "encoding", "T", "training", "memory, GB", "generation"], rows), ""]


def draw_speed(speeds):
    fig, axes = plot.figure(10, 1.2 + 0.35 * len(speeds), ncols=3, sharey=True)
    for ax, (title, value, _) in zip(axes, SPEED_COLUMNS):
        ax.barh(range(len(speeds)), [value(s) or 0 for s in speeds], color=[plot.style(s.pos)[0] for s in speeds])
        ax.set_xlabel(title)
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(speeds)), [plot.literal(f"{s.model} {s.pos} {s.T:,}") for s in speeds])
    axes[0].invert_yaxis()
    return fig


# ----------------------------------------------------------------------------------------------------------

class Page:
    """the Markdown, and its figures if there is a directory for them"""

    def __init__(self, directory, title):
        self.directory, self.lines, self.figures = directory, [title, ""], 0

    def add(self, lines, name, caption, draw, *data):
        """a section, and below it the figure that draw(*data) makes, if draw is not None"""
        self.lines += lines
        if self.directory and draw:
            plot.save(draw(*data), os.path.join(self.directory, name + ".png"))
            self.lines += [f"![{caption}]({name}.png)", ""]
            self.figures += 1


def report(args):
    damaged = []
    runs = find_runs(args.directory, damaged)
    tables, silent = gather(runs)
    speeds = {run: speed_of(run, logs) for run, logs in runs.items()}
    curves = curves_of(runs)
    drawn = {c.run for group in curves.values() for c in group}
    for run in silent:
        if speeds[run] is None and run not in drawn:
            complain(f"{run.path}: finished, but not evaluated")
    speeds = [s for s in speeds.values() if s]
    measured = [t for t in tables if t.ours]
    if not measured and not speeds and not curves:
        complain(f"no finished and evaluated run below {', '.join(args.directory)}")
        if not args.paper:
            return 2
    if args.out:
        os.makedirs(args.out, exist_ok=True)
    page = Page(args.out, f"# {len(runs)} finished run{'s' if len(runs) != 1 else ''}, compared with the paper")
    for t in tables if args.paper else measured:
        draw = draw_lengths if t.ours and len(t.lengths()) > 1 else None
        page.add(markdown(t), slug(t.key), f"{t.key.evaluated_on} against length", draw, t)
        page.lines += markdown_positions(t) if t.curves else []
    for key, group in curves.items():
        page.add(markdown_curves(key, group), slug(("loss", *key)), loss_name(group), draw_curves, group)
    page.lines += quoted_numbers(tables, args.paper)
    if speeds:
        page.add(markdown_speed(speeds), "speed", "speed", draw_speed, speeds)
    if len(measured) < len(tables) and not args.paper:
        left_out = [f"{t.number} ({t.key.model}, {t.key.evaluated_on})" for t in tables if not t.ours]
        page.lines += [f"Left out, as they have no run (--paper shows them): {', '.join(left_out)}.", ""]
    text = "\n".join(page.lines)
    print(text)
    if args.out:
        console.write_whole(os.path.join(args.out, "report.md"), text)
        print(f"report.py: wrote {args.out}/report.md and {page.figures} figures", file=sys.stderr)
    return console.EXIT_BAD_INPUT if damaged else 0


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("directory", nargs="+", help="directories to search for runs, at any depth")
    p.add_argument("-o", "--out", help="directory to write report.md and the figures to")
    p.add_argument("--paper", action="store_true", help="show the paper's tables that have no run, too")
    return report(p.parse_args(argv))


if __name__ == "__main__":
    console.run(main)
