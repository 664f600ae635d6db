#!/usr/bin/env python3
"""plot.py -- figures from a run's log.jsonl, or from the CSV of a study. Needs matplotlib and nothing else.

    python3 scripts/plot.py train   RUN_DIR [RUN_DIR ...] -o train.png     training and validation loss, learning rate,
                                                                           and the share of dead heads, if any
    python3 scripts/plot.py lengths RUN_DIR [RUN_DIR ...] -o lengths.png   perplexity against evaluation length
    python3 scripts/plot.py curve   RUN_DIR [RUN_DIR ...] -o curve.png     loss against position in the sequence
    python3 scripts/plot.py passages RUN_DIR [RUN_DIR ...] -o passages.png right answers by length and depth (--tasks)
    python3 scripts/plot.py heads   RUN_DIR [RUN_DIR ...] -o heads.png     where each head looks (heads.py)
    python3 scripts/plot.py study   STUDY.csv -o study.png                 perplexity by length of a study's models, and
                                                                           the differences beside it
    python3 scripts/plot.py positions STUDY.csv -o positions.png           loss by position, of a study with --positions
    python3 scripts/plot.py bias    BIAS.json -o bias.png                  heat maps of the bias (--dump_bias); with
                                                                           --normalize divided by its largest magnitude

Without -o the figure goes beside its input. A record that was written twice, as a resumed run does, counts as last
written. Exit code 2: bad input.
"""
import colorsys
import functools
import glob
import io
import itertools
import math
import os
import re
import statistics
import zlib

import console
import ledger
from console import BadInput, number, read_log

# Every encoding has one colour and one marker, the same in every figure. A family has one hue; the most common have
# Okabe and Ito's colours. test_plot.py measures how far apart all of them are, in colour and in grey.
STYLES = {          # colour, marker
    "cable": ("#0072B2", "o"), "cable_nw": ("#5A88AD", "s"), "kcable": ("#31577C", "*"), "kcable_nw": ("#5DB8FD", "^"),
    "cable_v1": ("#002B43", "v"), "kcable_v1": ("#ADCDFD", "X"), "cable_signed": ("#299DFE", "P"),
    "alibi": ("#009E73", "v"), "alibi_trained": ("#002D1A", "*"), "alibi_random": ("#015534", "<"),
    "grape_q": ("#7159CF", "^"), "grape_k": ("#C39DFF", "D"), "grape_qk": ("#69009C", "s"), "kerple": ("#870056", "D"),
    "kerple_power": ("#4F0031", "P"), "bam": ("#D67BB3", ">"), "fire": ("#E69F00", "*"), "t5": ("#D55E00", "X"),
    "t5_clip": ("#861500", "^"), "rope": ("#251302", "<"), "carope": ("#7C511A", "P"), "learned": ("#A3A3A3", "o"),
    "sinusoidal": ("#595959", ">"), "ssmax": ("#A1AF5B", "<"), "cope": ("#882B2C", "X"), "none": ("#606900", "v")}
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (9, 3)), (0, (5, 2, 1, 2, 1, 2)), (0, (1, 4)))


def literal(s):
    """text as matplotlib shows it: $ would start a formula, a leading _ would hide it from the legend"""
    s = str(s).replace("$", r"\$")
    return " " + s if s.startswith("_") else s


def logs_with(runs, *kinds):
    """{run: its records}; for a run without a record of these kinds, the logs below it that have some: an evaluation's
    --out may be RUN/eval, and for paper.py and study.py it is RUN/eval/DATA"""
    found = {}
    for run in runs:
        below = lambda *names: sorted(glob.glob(os.path.join(glob.escape(run), *names, "log.jsonl")))
        own = {run: read_log(run) if not os.path.isdir(run) or below() else []}
        deeper = ({os.path.dirname(path): read_log(path) for path in below(*["*"] * n)} for n in (1, 2))
        having = ({at: log for at, log in logs.items() if any(r["kind"] in kinds for r in log)}
                  for logs in itertools.chain([own], deeper))
        found.update(next(filter(None, having), own))
    return found


def runs_with(runs, kind):
    """(run, its records of this kind) of each run that has any; a directory without any is skipped with a note"""
    found = {run: [r for r in log if r["kind"] == kind] for run, log in logs_with(runs, kind).items()}
    missing = [run for run, records in found.items() if not records]
    what = f"no records of kind \"{kind}\""
    if len(missing) == len(found):
        raise BadInput(f"{', '.join(missing)}: {what}; {HINTS[kind]}")
    for run in missing:
        console.say(f"skipped {run}: {what}")
    return [(run, records) for run, records in found.items() if records]


LOAD = "they are written to --out: train_gpt2 --load RUN --val_files FILE --out RUN_eval "
HINTS = {"extrapolation": LOAD + "--eval_lengths 128,256", "curve": LOAD + "--eval_lengths 128,256 --curve",
         "task": LOAD + "--tasks 'data/passages/*.bin'",
         "head": "they are written by scripts/heads.py RUN --val_files FILE --eval_lengths 128,256 --out RUN_heads"}


def series(records, kind, key):
    """sorted (step, value), the last record of a step"""
    points = {r["step"]: number(r, key) for r in records if r["kind"] == kind}
    return sorted((s, v) for s, v in points.items() if v is not None)


def run_name(run):
    return os.path.basename(os.path.normpath(run)) or run


def name_of(run, runs):
    """the end of a run's path that no other of these runs has, its last directory at least"""
    path, *other = [os.path.normpath(each).split(os.sep) for each in (run, *(set(runs) - {run}))]
    n = next((n for n in range(1, len(path)) if path[-n:] not in [p[-n:] for p in other]), len(path))
    return os.sep.join(path[-n:]) or run


def title_of(run, pos, runs):
    """the run and its encoding, which may be its name"""
    name = name_of(run, runs)
    return name if run_name(run) == pos else f"{name} ({pos})"


@functools.cache
def lab(colour):
    """L*, a*, b* of "#RRGGBB" (CIE 1976, D65); L* is what is left in grey"""
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in
               (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)))
    x, y, z = (v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in
               (0.4339 * r + 0.3762 * g + 0.1899 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b,
                0.0178 * r + 0.1095 * g + 0.8730 * b))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one, other):
    """how far two looks (colour, marker) are apart: in CIELAB, and with one marker or one hue in grey"""
    a, b = lab(one[0]), lab(other[0])
    turn = abs(math.atan2(a[1], a[2]) - math.atan2(b[1], b[2]))
    alike = one[1] == other[1] or min(turn, 2 * math.pi - turn) < 0.5
    return min(math.dist(a, b), 1.5 * abs(a[0] - b[0]) if alike else math.inf)


def style(pos, taken=()):
    """Colour and marker of an encoding. One with hyperparameters, a combination and a second run ("cable, run 2") have
    the hue of their first part, an unknown name has the hue that it hashes to. Of such looks it is the first that is
    far from those taken, from the table's colours and from white paper."""
    pos, code = str(pos), zlib.crc32(str(pos).encode())
    if pos in STYLES:
        return STYLES[pos]
    rgb = STYLES.get(re.split("[:,+]", pos)[0], (None, None))[0]
    hue, _, saturation = (code % 360 / 360, 0, 0.8) if rgb is None else colorsys.rgb_to_hls(
        *(int(rgb[i:i + 2], 16) / 255 for i in (1, 3, 5)))

    def look(n):
        light, less = 0.15 + 0.06 * ((code + 4 * n) % 11), (1, 0.7, 0.45)[n // 11 % 3]
        rgb = colorsys.hls_to_rgb(hue, light, saturation * less)
        return "#" + "".join(f"{round(255 * v):02X}" for v in rgb), "os^vD<>PX*"[((code >> 8) + n) % 10]
    return max(map(look, range(330)), key=lambda new: min(
        27, 2 * (93 - lab(new[0])[0]), *(2 * math.dist(lab(new[0]), lab(old)) for old, _ in STYLES.values()),
        *(apart(new, old) for old in taken)))


def styles_of(keys):
    """{(run, pos): (colour, marker)}: the encoding's, and a variant of it for each further run"""
    names, runs = {}, {}
    for key in dict.fromkeys(keys):
        n = runs[key[1]] = runs.get(key[1], 0) + 1
        names[key] = key[1] if n == 1 else f"{key[1]}, run {n}"
    looks = {name: STYLES[name] for name in names.values() if name in STYLES}
    for name in names.values():
        looks.setdefault(name, style(name, looks.values()))
    return {key: looks[name] for key, name in names.items()}


def stretch_of(record):
    """", yarn" of an evaluation for which rope was stretched, ", theta 500000" of one with another base, ", window
    64+4" of one with a window and sinks, ", documents apart" of one with a mask of documents"""
    stretch, theta, window = (record.get(key) for key in ("rope_scaling", "rope_theta", "window"))
    text = f", {stretch.get('rope_type')}" if isinstance(stretch, dict) else ""
    text += f", theta {theta:.9g}" if isinstance(theta, (int, float)) else ""
    if isinstance(window, (int, list)):
        of_layers = ",".join(map(str, window if isinstance(window, list) else [window]))
        text += f", window {of_layers}+{record.get('sinks', 0)}"
    return text + (", documents apart" if record.get("document_mask") is True else "")


def encoding_of(run, log):
    """the encoding of a run: as its evaluations or its checkpoints say, else the run's own name"""
    for r in log:
        if "pos" in r:
            return str(r["pos"])
    for path in sorted(glob.glob(os.path.join(glob.escape(run), "step_*", "config.json")), reverse=True):
        config = console.fields(console.read_object(path), {}, {"position": console.OBJECT}, path)
        if config.get("position"):
            return console.field(config["position"], "name", console.TEXT, f"{path}: position")
    return run_name(run)


def figure(width=8.0, height=4.5, **kwargs):
    console.need("matplotlib").use("Agg")
    plt = console.need("matplotlib.pyplot")
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.color": "#DDDDDD", "grid.linewidth": 0.7, "axes.axisbelow": True,
                         "legend.frameon": False, "lines.linewidth": 1.8, "savefig.dpi": 150})
    return plt.subplots(figsize=(width, height), constrained_layout=True, **kwargs)


def save(fig, path, about=""):
    """writes a figure in the format that the name ends with, PNG if it has no ending; about: kept in its metadata"""
    image, form = io.BytesIO(), os.path.splitext(path)[1][1:] or "png"
    metadata = {"pdf": {"Subject": about, "CreationDate": None}, "svg": {"Description": about, "Date": None},
                "png": {"Description": about}}.get(form)
    try:
        fig.savefig(image, format=form, metadata=metadata)
    except ValueError as e:                         # an unknown format
        raise BadInput(f"{path}: {e}") from None
    console.write_whole(path, image.getvalue())


def length_axis(ax, lengths):
    """log2 with the lengths themselves as ticks, thinned out to what fits"""
    ax.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    kept = []
    for t in ticks:
        if not kept or math.log2(t / kept[-1]) > math.log2(max(2.0, ticks[-1] / ticks[0])) / 10:
            kept.append(t)
    ax.set_xticks(kept, [f"{t:,.0f}" for t in kept])
    ax.minorticks_off()


def perplexity_axis(ax, values):
    """log with plain numbers when a linear axis would press most lines flat"""
    span = max(values) / min(values)
    if span > 3:
        from matplotlib.ticker import FuncFormatter, LogLocator
        ax.set_yscale("log")
        subs = (1, 2, 5) if span < 1000 else (1,)
        subs = (1, 1.5, 2, 3, 4, 5, 7) if span < 20 else subs
        ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:.4g}"))
        ax.minorticks_off()
    ax.set_ylabel("perplexity")


def draw_apart(ax):
    """moves lines that lie on each other all along by 2.5 points each; returns whether there are any"""
    from matplotlib.transforms import ScaledTranslation
    groups = []
    for line in (line for line in ax.lines if not line.get_label().startswith("_")):
        points = ax.transData.transform(line.get_xydata())
        for first, group in groups:
            if first.shape == points.shape and abs(first - points).max() < 2:           # pixels
                group.append(line)
                break
        else:
            groups.append((points, [line]))
    for _, group in groups:
        for n, line in enumerate(group if len(group) > 1 else ()):
            up = ScaledTranslation(0, 2.5 / 72 * (n - (len(group) - 1) / 2), ax.figure.dpi_scale_trans)
            line.set_transform(ax.transData + up)
    return any(len(group) > 1 for _, group in groups)


def band_of(counts, band="± the standard\ndeviation"):
    """what the legend says of bands; counts: how many seeds stand behind each point"""
    low, high = min(counts), max(counts)
    return f"band: {band} of {f'{low} to ' * (low < high)}{high} seeds" if high > 1 else "one seed"


def legend_beside(ax, ends, *notes, **more):
    """right of the axes, in the order in which the lines end from the top, below these notes; ends: (last y, line)"""
    moved = [draw_apart(each) for each in ax.figure.axes]
    notes = [*notes, *["lines that coincide are\ndrawn apart"] * any(moved)]
    handles = [line for _, line in sorted(ends, key=lambda e: -e[0])]
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=10, title="\n".join(notes),
              title_fontsize=9, alignment="left", **more)


def named_apart(keys):
    """{(run, pos): label}: the encoding, and the run where two runs share it"""
    runs = {}
    for run, pos in keys:
        runs.setdefault(pos, set()).add(run)
    return {(run, pos): pos if len(runs[pos]) == 1 else f"{pos} ({name_of(run, runs[pos])})" for run, pos in keys}


def mark_trained(ax, lengths):
    for T in sorted(set(lengths)):
        ax.axvline(T, color="#555555", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        ax.annotate("trained length", (T, 1), xycoords=("data", "axes fraction"), xytext=(4, -2),
                    textcoords="offset points", va="top", fontsize=9, color="#555555")


def spread(values):
    """the sample standard deviation, None for a single value"""
    return statistics.stdev(values) if len(values) > 1 else None


def line_of_seeds(ax, points, **more):
    """A line through the means of points {x: [the value of each seed]} and a band of their standard deviation, which
    stays above 0, as the axis may be logarithmic; returns the line"""
    x = sorted(points)
    mean = [statistics.fmean(points[at]) for at in x]
    band = [spread(points[at]) or 0 for at in x]
    line, = ax.plot(x, mean, **{"markersize": 6, **more})
    ax.fill_between(x, [max(m - s, m / 10) for m, s in zip(mean, band)], [m + s for m, s in zip(mean, band)],
                    color=line.get_color(), alpha=0.2, linewidth=0)
    return line


def octaves(losses, first=1):
    """{(from, to): mean loss} of the positions 1 to `first`, and then of as many as there were before; a range without
    a loss is left out"""
    found = {}
    for t, loss in enumerate(losses, start=1):
        if loss is not None:
            last = max(first, 1 << (t - 1).bit_length())
            begin = 1 if last == first else last // 2 + 1
            found.setdefault((begin, min(last, len(losses))), []).append(loss)
    return {positions: statistics.fmean(values) for positions, values in found.items()}


def running_median(points, width):
    values = [v for _, v in points]
    half = width // 2
    return [statistics.median(values[max(0, i - half):i + half + 1]) for i in range(len(values))]


def plot_train(runs):
    runs, logs = zip(*logs_with(runs, "train", "val").items())
    dead = [[(step, 100 * share) for step, share in series(log, "val", "dead_heads")] for log in logs]
    none = not any(share for points in dead for _, share in points)
    heights = [3.4, 1] if none else [3.4, 1, 1]
    fig, (ax, ax_lr, *more) = figure(8, 1.25 * sum(heights), nrows=len(heights), sharex=True,
                                     gridspec_kw={"height_ratios": heights})
    keys = [(run, encoding_of(run, log)) for run, log in zip(runs, logs)]
    styles = styles_of(keys)
    for key, run, log, of_run in zip(keys, runs, logs, dead):
        train, val, lr = series(log, "train", "loss"), series(log, "val", "loss"), series(log, "train", "lr")
        if not train and not val:
            raise BadInput(f"{run}: no record of kind \"train\" or \"val\" in its log; has the run made a step?")
        colour, name = styles[key][0], literal(name_of(run, runs))
        if train:
            steps, raw = zip(*train)
            smooth = len(train) >= 100
            if smooth:                              # single batches are noise, and no single spike moves a median
                ax.plot(steps, raw, color=colour, linewidth=0.8, alpha=0.3)
            ax.plot(steps, running_median(train, max(5, len(train) // 100)) if smooth else raw, color=colour,
                    label=f"{name}, train" + (" (running median)" if smooth else ""))
        if val:
            ax.plot(*zip(*val), color=colour, marker="o", markersize=5, markerfacecolor="white", linestyle="--",
                    linewidth=1.2, label=f"{name}, validation", markevery=max(1, len(val) // 40))
        if lr:
            ax_lr.plot(*zip(*lr), color=colour)
        for ax_dead in more if of_run else ():
            ax_dead.plot(*zip(*of_run), color=colour, marker="o", markersize=4)
            ax_dead.set_ylabel("dead heads (%)")
    ax.set_ylabel("loss (nats per token)")
    ax.legend(fontsize=9)
    ax_lr.set_ylabel("learning rate")
    (more or [ax_lr])[-1].set_xlabel("step")
    ax_lr.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    ax_lr.set_ylim(bottom=0)
    return fig


def extrapolation_lines(runs):
    """{(label, style, stride or None): {T: ppl}} and the trained lengths. None: windows that do not overlap."""
    last, trained = {}, []
    for run, found in runs_with(runs, "extrapolation"):
        for r in found:
            last[run, r["pos"] + stretch_of(r), r["T"], r["stride"]] = r
    lines, labels, styles = {}, named_apart([key[:2] for key in last]), styles_of([key[:2] for key in last])
    sliding = {(run, pos, stride) for run, pos, T, stride in last if stride < T}
    for (run, pos, T, stride), r in last.items():
        ppl = r["ppl"]
        trained += [r["T_train"]] if "T_train" in r else []
        if ppl is None:                             # diverged
            continue
        label, look = labels[run, pos], styles[run, pos]
        if stride >= T:
            lines.setdefault((label, look, None), {})[T] = ppl
        # a window no longer than its stride is a sliding line's first point too
        if (run, pos, stride) in sliding:
            lines.setdefault((label, look, stride), {})[T] = ppl
    if not lines:
        raise BadInput(f"{', '.join(runs)}: no extrapolation record has a length and a perplexity")
    return lines, trained


def plot_lengths(runs):
    lines, trained = extrapolation_lines(runs)
    fig, ax = figure(8, 4.8)
    ends = []
    for (label, (colour, marker), stride), points in lines.items():
        x, y = zip(*sorted(points.items()))
        text = literal(label if stride is None else f"{label}, stride {stride:.0f}")
        dash, face = ("-", colour) if stride is None else ("--", "white")
        line, = ax.plot(x, y, linestyle=dash, color=colour, marker=marker, markersize=6, markerfacecolor=face,
                        label=text)
        ends.append((y[-1], line))
    perplexity_axis(ax, [v for points in lines.values() for v in points.values()])
    length_axis(ax, [T for points in lines.values() for T in points])
    mark_trained(ax, trained)
    ax.set_xlabel("evaluation length T (tokens)")
    legend_beside(ax, ends)
    return fig


def geometric_bins(values, per_octave=4, least=1):
    """mean loss of positions 1, 2, ..., grouped into bins that grow with the position: (middle, mean). Each
    has at least `least` positions."""
    bins = {}
    for t, v in enumerate(values, start=1):
        if v is not None:
            bins.setdefault(int(math.log2(t) * per_octave), []).append((t, v))
    whole = []
    for b in bins.values():
        if whole and len(whole[-1]) < least:
            whole[-1] += b
        else:
            whole.append(b)
    bins = whole
    # At T = 2^n the last bin has only just begun. Its few positions would be noise, so they join the bin before them.
    if len(bins) > 1 and len(bins[-1]) < len(bins[-2]) / 2:
        bins[-2:] = [bins[-2] + bins[-1]]
    middle = [math.exp(statistics.fmean(math.log(t) for t, _ in b)) for b in bins]
    return list(zip(middle, (statistics.fmean(v for _, v in b) for b in bins)))


def loss_axis(ax, lines):
    """The later half of every line is inside the frame. The first positions have seen nothing yet, or are noise: those
    within one and a half times the height of the later halves are inside, too, and a note says what is cut off."""
    values = [v for points in lines for _, v in points]
    later = [v for points in lines for _, v in points[len(points) // 2:]]
    reach = 1.5 * (max(later) - min(later)) or 0.5
    low, high = max(min(values), min(later) - reach), min(max(values), max(later) + reach)
    bottom, top = low - 0.1 * (high - low or 5), high + 0.07 * (high - low or 5)
    ax.set_ylim(bottom, top)
    if outside := [v for v in values if not bottom <= v <= top]:                # the note is below the lines
        text = f"cut off: {len(outside)} of {len(values)} points, {min(outside):.3g} to {max(outside):.3g}"
        ax.annotate(text, (0, 0), xycoords="axes fraction", xytext=(4, 4), textcoords="offset points", fontsize=9,
                    color="#555555")


def legend_of_curves(ax, ends, dashes):
    """the runs by colour, in the order in which their longest lines end from the top, then the lengths by line style"""
    from matplotlib.lines import Line2D
    runs = [(y, Line2D([], [], color=colour, marker=marker, markersize=4, label=text))
            for y, text, colour, marker in ends]
    lengths = [Line2D([], [], color="#555555", linestyle=dash, label=f"T = {T:,}") for T, dash in dashes.items()]
    legend_beside(ax, runs + [(-math.inf, line) for line in lengths], handlelength=3)


FEW = 64        # losses, whose mean is still noise


def plot_curve(runs):
    fig, ax = figure(8, 4.5)
    last, trained = {}, []
    for run, found in runs_with(runs, "curve"):
        for r in found:
            windows = number(r, "windows") or FEW          # each has one loss for a position
            points = geometric_bins(r["loss"], least=FEW / windows)
            if not points:
                raise BadInput(f"{run}: a curve record of {r['pos']} holds no loss that is a number")
            last[run, r["pos"] + stretch_of(r), r["T"]] = points
        trained += [r["T_train"] for r in read_log(run) if "T_train" in r]
    keys, lengths = list(dict.fromkeys(key[:2] for key in last)), sorted({T for _, _, T in last})
    labels, styles = named_apart(keys), styles_of(keys)
    dashes = {T: LINE_STYLES[n % len(LINE_STYLES)] for n, T in enumerate(lengths)}
    ends = {}
    for (run, pos, T), points in sorted(last.items(), key=lambda item: item[0][2]):
        colour, marker = styles[run, pos]
        name = literal(labels[run, pos])
        ax.plot(*zip(*points), color=colour, linestyle=dashes[T], marker=marker, markersize=4,
                label=f"{name}, T = {T:,}")
        ends[run, pos] = points[-1][1], name, colour, marker
    length_axis(ax, [2 ** n for n in range(int(math.log2(lengths[-1])) + 1)])
    mark_trained(ax, [T for T in trained if T <= lengths[-1]])
    loss_axis(ax, list(last.values()))
    ax.set(xlabel="position in the sequence, from 1", ylabel="loss (nats per token)")
    legend_of_curves(ax, ends.values(), dashes)
    return fig


# what a file of --dump_bias has, and each of its matrices
MATRICES = {"matrices": ("a list of objects", lambda v: console.list_of("", console.OBJECT)[1](v) and v)}
TOKENS = {"tokens": ("a list", lambda v: isinstance(v, list))}
PLACE = {"layer": console.COUNT, "head": ('a whole number or "mean"', lambda v: v == "mean" or console.COUNT[1](v))}
ROWS = {"bias": ("a list of rows", lambda v: isinstance(v, list))}


def read_bias(path):
    """the file's object, each bias in it a lower triangle: NaN above the diagonal"""
    data = console.fields(console.read_object(path), {}, {**MATRICES, **TOKENS}, path)
    for m in data.get("matrices", [data]):
        console.fields(m, {**ROWS, **(PLACE if "matrices" in data else {})}, PLACE, path)
        m["bias"] = triangle(path, m["bias"])
    return data


def triangle(path, rows):
    numpy = console.need("numpy")
    T = len(rows)
    matrix = numpy.full((T, T), math.nan)
    for i, row in enumerate(rows):
        if not console.NUMBERS[1](row) or not i < len(row) <= T:
            raise BadInput(f"{path}: row {i} of \"bias\": expected {i + 1} to {T} numbers")
        matrix[i, :i + 1] = row[:i + 1]
    if not numpy.isfinite(matrix).any():
        raise BadInput(f"{path}: expected a \"bias\" as --dump_bias writes it, with a finite number on or below the "
                       "diagonal")
    return matrix


def grid(rows, columns, value):
    """a matrix of value(row, column)"""
    return [[value(row, column) for column in columns] for row in rows]


def heat_map(ax, values, low, high, text, most=12):
    """the first row at the bottom; text(value) is written into each cell, up to `most` rows and columns"""
    image = ax.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto", origin="lower")
    ax.grid(False)
    for y, row in enumerate(values if max(len(values), len(values[0])) <= most else []):
        for x, v in enumerate(row):
            if math.isfinite(v):
                ax.text(x, y, text(v), ha="center", va="center", fontsize=8,
                        color="black" if v > low + 0.6 * (high - low) else "white")
    return image


def passage_cells(runs):
    """{(run, encoding, passage): {(T, depth): share of right answers}}, of files like needle_050_0128.bin"""
    found = {}
    for run, records in runs_with(runs, "task"):
        for r in records:
            name = re.fullmatch(r"(\w+)_(\d{3})_\d+\.bin", r["file"])
            if name:
                cells = found.setdefault((run, encoding_of(run, records), name[1]), {})
                cells[r["T"], int(name[2])] = r["exact"] / r["examples"]
    if not found:
        raise BadInput("no task is a passage at a depth; data/tasks.py --text FILE writes such files")
    return found


def plot_passages(runs):
    """a heat map per run and passage: a row per length, a column per depth"""
    maps = passage_cells(runs)
    runs = [run for run, _, _ in maps]
    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    fig, axes = figure(1.2 + 3.4 * columns, 1.2 + 2.6 * lines, nrows=lines, ncols=columns, squeeze=False)
    for ax in list(axes.flat)[len(maps):]:
        ax.set_visible(False)
    for ax, ((run, pos, kind), cells) in zip(axes.flat, maps.items()):
        lengths, depths = (sorted({key[i] for key in cells}) for i in (0, 1))
        shares = grid(lengths, depths, lambda T, depth: 100 * cells.get((T, depth), math.nan))
        image = heat_map(ax, shares, 0, 100, "{:.0f}".format)
        ax.set_xticks(range(len(depths)), [f"{d}%" for d in depths])
        ax.set_yticks(range(len(lengths)), [f"{T:,.0f}" for T in lengths])
        ax.set(xlabel="depth of the passage", ylabel="T")
        ax.set_title(literal(f"{kind}, {title_of(run, pos, runs)}"), fontsize=10)
    fig.colorbar(image, ax=axes, shrink=0.85).set_label("right answers (%)")
    return fig


# of a "head" record: title, value, its text, and the range of the colours at T tokens
HEAD_STATISTICS = (
    ("first 4 keys (%)", lambda r: 100 * r["sink_weight"]["4"], "{:.0f}", lambda T: (0, 100)),
    ("entropy (nats)", lambda r: r["entropy"], "{:.1f}", lambda T: (0, math.log(T))),
    ("window with 90 %", lambda r: r["window90"], "{:.0f}", lambda T: (0, T)),
    ("live tiles (%)", lambda r: 100 * r["live_tiles"], "{:.0f}", lambda T: (0, 100)))


def head_records(runs):
    """{(run, encoding, T): {(layer, head): record}}, the last record of a head"""
    found = {}
    for run, records in runs_with(runs, "head"):
        for r in records:
            if None not in (r["entropy"], r["window90"]):
                found.setdefault((run, r["pos"] + stretch_of(r), r["T"]), {})[r["layer"], r["head"]] = r
    if not found:
        raise BadInput(f"{', '.join(runs)}: no record of a head has its statistics")
    return found


def plot_heads(runs):
    """a row per run and length, a heat map per statistic: layers from below, heads from the left"""
    models = head_records(runs)
    runs = [run for run, _, _ in models]
    fig, axes = figure(10, 1 + 2.1 * len(models), nrows=len(models), ncols=len(HEAD_STATISTICS), squeeze=False)
    for row, ((run, pos, T), heads) in zip(axes, models.items()):
        layers, columns = (sorted({key[i] for key in heads}) for i in (0, 1))
        for ax, (title, value, text, colours) in zip(row, HEAD_STATISTICS):
            of_head = lambda layer, head: value(heads[layer, head]) if (layer, head) in heads else math.nan
            heat_map(ax, grid(layers, columns, of_head), *colours(T), text.format)
            ax.set_xticks(range(len(columns)) if len(columns) <= 8 else [0, len(columns) - 1])
            ax.set_yticks(range(len(layers)) if len(layers) <= 8 else [0, len(layers) - 1])
            ax.set_title(title, fontsize=10)
        row[0].set_ylabel(literal(f"{title_of(run, pos, runs)}\nT = {T:,}; layer"), fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("head", fontsize=9)
    return fig


def colours_of(matrices):
    """how imshow colours these biases: from the lowest value but for 2 % of all to the highest; and how the bar of the
    colours ends"""
    numpy = console.need("numpy")
    values = numpy.concatenate([m[numpy.isfinite(m)] for m in matrices])
    values.sort()
    low, high = values[int(0.02 * (len(values) - 1))], values[-1]
    colours = {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1, "interpolation": "nearest"}
    return colours, "min" if values[0] < low else "neither"


def plot_bias_grid(data):
    """one small map per head, a row per layer, all in one scale of colours"""
    matrices = data["matrices"]
    layers, heads = (list(dict.fromkeys(m[key] for m in matrices)) for key in ("layer", "head"))
    fig, axes = figure(1.2 + 0.9 * len(heads), 1 + 0.9 * len(layers), nrows=len(layers), ncols=len(heads),
                       squeeze=False)
    colours, extend = colours_of([m["bias"] for m in matrices])
    for m in matrices:
        ax = axes[layers.index(m["layer"])][heads.index(m["head"])]
        image = ax.imshow(m["bias"], **colours)
        ax.grid(False)
        ax.set(xticks=[], yticks=[])
        if m["layer"] == layers[0]:
            ax.set_title(f"head {m['head']}", fontsize=8)
        if m["head"] == heads[0]:
            ax.set_ylabel(f"layer {m['layer']}", fontsize=8)
    fig.colorbar(image, ax=axes, shrink=0.85, extend=extend).set_label(f"{data.get('pos', 'bias')} ({data['unit']})")
    return fig


def plot_bias(paths, normalize=False):
    data = read_bias(paths[0])
    data["unit"] = "divided by the largest magnitude" if normalize else "nats"
    for m in (data.get("matrices") or [data]) if normalize else ():
        m["bias"] /= console.need("numpy").nanmax(abs(m["bias"])) or 1
    if data.get("matrices"):
        return plot_bias_grid(data)
    bias, tokens = data["bias"], data.get("tokens") or []
    T = len(bias)
    colours, extend = colours_of([bias])
    low, high = colours["vmin"], colours["vmax"]
    if low < 0 and (bias > 0).any():                # both signs: white means 0
        colours.update(cmap="PuOr_r", vmin=-max(-low, high), vmax=max(-low, high))
    fig, ax = figure(7.2, 6)
    ax.grid(False)
    fig.colorbar(ax.imshow(bias, **colours), shrink=0.85, extend=extend,
                 label=f"bias added to the scaled score ({data['unit']})")
    if len(tokens) == T and T <= 48:
        shown = [literal(str(t).replace("\n", "↵").replace(" ", "␣").replace("\t", "⇥")) for t in tokens]
        size = 10 if T <= 24 else 7
        ax.set_xticks(range(T), shown, rotation=90, fontsize=size)
        ax.set_yticks(range(T), shown, fontsize=size)
        ax.tick_params(length=0)
    ax.set(xlabel="key j", ylabel="query i")
    ax.set_title(literal(f"{data.get('pos', 'bias')}, layer {data.get('layer', '?')}, head {data.get('head', '?')}"))
    return fig


# A number of one run of a study: what it is (ppl; ppl, stride 64; loss at some positions; tok_per_s; mem; val, the loss
# of the last validation; dead heads, their share then), and at which length, 0 where it has none
STUDY = {"model": console.TEXT, "trained_at": console.POSITIVE, "encoding": console.TEXT, "lr": console.TEXT,
         "seed": console.TEXT, "T": console.COUNT, "what": console.TEXT, "positions": console.TEXT,
         "value": ("a number of at least 0", lambda v: v is not None and console.AMOUNT[1](v))}

# a comparison of two encodings: the mean difference of their losses, its interval, and its interval among all shown
DIFFERENCES = {"model": console.TEXT, "trained_at": console.POSITIVE, "encoding": console.TEXT,
               "against": console.TEXT, "T": console.POSITIVE, "mean": ("a number", console.is_number),
               **dict.fromkeys(("low", "high", "low_all", "high_all"), console.NUMBER)}


def key_of(row):
    return row["model"], row["trained_at"], row["encoding"]


def best_rates(rows):
    """{(model, trained length, encoding): the learning rate that counts}: with the lowest mean of the last validations,
    among those with which most seeds have finished"""
    found = {}
    for r in rows:
        losses = found.setdefault(key_of(r), {}).setdefault(r["lr"], [])
        losses += [r["value"]] * (r["what"] == "val")
    order = lambda losses: (-len(losses), statistics.fmean(losses or [0]))
    return {key: min(rates, key=lambda lr: order(rates[lr])) for key, rates in found.items()}


def counted(rows):
    """the rows of the learning rates that count"""
    rates = best_rates(rows)
    return [r for r in rows if r["lr"] == rates[key_of(r)]]


def cells_of(rows, what, at=lambda row: row["T"]):
    """{(model, trained length, encoding): {at(row): [the value of each seed]}}"""
    found = {}
    for r in rows:
        if r["what"] == what:
            found.setdefault(key_of(r), {}).setdefault(at(r), []).append(r["value"])
    return found


def study_panels(rows, cells, plot_row, xlabel, below=0):
    """A panel for each size and trained length, in which plot_row(ax, key, label, colour, marker) draws each encoding
    that has cells and returns its line; below: how many empty ones there are under each. Returns (figure, {(size,
    trained length): [panel and those under it]}, a function that draws the legend, as styles_of())."""
    if not cells:
        raise BadInput("expected a study with numbers of this kind (--positions), got none")
    models, lengths, encodings = (list(dict.fromkeys(r[name] for r in rows)) for name in
                                  ("model", "trained_at", "encoding"))
    fig, axes = figure(1.8 + 3.6 * len(lengths), 0.9 + 3.4 * len(models) * (1 + below), ncols=len(lengths),
                       nrows=len(models) * (1 + below), sharex=True, squeeze=False)
    styles, lines, panels = styles_of(("", pos) for pos in encodings), {}, {}
    for (row, model), (column, T) in itertools.product(enumerate(models), enumerate(lengths)):
        stack = [axes[row * (1 + below) + n][column] for n in range(1 + below)]
        stack[0].set_title(literal(f"trained at {T:,}" + f", {model}" * (len(models) > 1)), fontsize=11)
        for ax, first in zip(stack, next(iter(panels.values()), stack) if panels else ()):
            ax.sharey(first)
            ax.tick_params(labelleft=column == 0)
        panels[model, T] = stack
    for key in cells:
        lines[key[2]] = plot_row(panels[key[:2]][0], key, literal(key[2]), *styles["", key[2]])
    axes[-1][len(lengths) // 2].set_xlabel(xlabel)
    note = band_of([len(values) for points in cells.values() for values in points.values()])
    legend = lambda: legend_beside(panels[models[len(models) // 2], lengths[-1]][0],
                                   [(line.get_ydata()[-1], line) for line in lines.values()], note)
    return fig, panels, legend, styles


def draw_differences(ax, found, styles):
    """the paired differences of one panel, each with its own interval (thick) and the one of all at once (thin)"""
    others = list(dict.fromkeys(r["against"] for r in found))
    ax.axhline(0, color="black", linewidth=1)
    for r in found:
        colour, marker = styles.get(("", r["against"])) or style(r["against"])
        x = r["T"] * 2 ** (0.12 * (others.index(r["against"]) - (len(others) - 1) / 2))     # beside each other
        for low, high, width in (("low_all", "high_all", 1), ("low", "high", 3)):
            if r[low] is not None and r[high] is not None:
                ax.plot([x, x], [r[low], r[high]], color=colour, linewidth=width, label="_interval")
        ax.plot(x, r["mean"], color=colour, marker=marker, markersize=8, markeredgecolor="white", label="_difference")


def draw_study(rows, differences=()):
    """Perplexity by length: a line for each encoding, its band the standard deviation; sliding windows are dashed.
    Below it the paired differences of --compare between its first encoding and the other ones."""
    cells, shown = cells_of(rows, "ppl"), []
    stride = next((r["what"] for r in rows if r["what"].startswith("ppl, stride ")), "")
    slid = cells_of(rows, stride)
    differences = [r for r in differences if r["low_all"] is not None]

    def plot_row(ax, key, label, colour, marker):
        line = line_of_seeds(ax, cells[key], color=colour, marker=marker, markersize=5, label=label)
        dashed = {T: statistics.fmean(values) for T, values in sorted(slid.get(key, {}).items())}
        ax.plot(list(dashed), list(dashed.values()), color=colour, linewidth=1, linestyle="--", label="_sliding")
        shown.extend([*line.get_ydata(), *dashed.values()])
        return line

    caption = f"; dashed: {stride[5:]}" * bool(slid)
    if n := len(differences):
        caption += (f"\nthick: 95 % for each of {n} comparison{'s' * (n > 1)}"
                    + "\nthin: 95 % for all of them at once (Bonferroni)" * (n > 1))
    fig, panels, legend, styles = study_panels(rows, cells, plot_row, "evaluation length T (tokens)" + caption, n > 0)
    for (model, T), (ax, *more) in panels.items():
        length_axis(ax, [length for row in cells.values() for length in row])
        perplexity_axis(ax, shown)
        mark_trained(ax, [T])
        ax.set_ylabel("perplexity" if ax.get_subplotspec().is_first_col() else "")
        for below in more:
            draw_differences(below, [r for r in differences if (r["model"], r["trained_at"]) == (model, T)], styles)
            first = literal(differences[0]["encoding"])
            below.set_ylabel(f"loss of {first} - loss of another\n(nats, same seeds; below 0 {first} is better)"
                             if ax.get_subplotspec().is_first_col() else "", fontsize=9)
    legend()
    return fig


def draw_positions(rows):
    """the loss by position in the longest windows that an encoding has, its band the standard deviation"""
    ends = lambda row: (row["T"], tuple(int(end) for end in row["positions"].split("-")))
    cells, drawn = cells_of(rows, "loss", ends), []

    def plot_row(ax, key, label, colour, marker):
        longest = max(T for T, _ in cells[key])
        points = {math.sqrt(at[0] * at[-1]): losses for (T, at), losses in cells[key].items() if T == longest}
        line = line_of_seeds(ax, points, color=colour, marker=marker, markersize=4, label=label)
        drawn.append(line.get_xydata())
        return line

    longest = max((T for row in cells.values() for T, _ in row), default=0)
    fig, panels, legend, _ = study_panels(rows, cells, plot_row, f"position in windows of up to {longest:,} tokens")
    for (_, T), [ax] in panels.items():
        length_axis(ax, [x for points in drawn for x, _ in points] + [T])
        ticks = [1 << n for n in range(0, longest.bit_length(), 2)]
        ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
        mark_trained(ax, [T])
        ax.set_ylabel("loss (nats per token)" if ax.get_subplotspec().is_first_col() else "")
    loss_axis(ax, drawn)
    legend()
    return fig


def read_study(path):
    """the rows that count, each once: seeds that stand twice in the file would look alike"""
    rows = console.read_table(path, STUDY, STUDY)
    for r in rows:
        ppl, loss = r["what"].startswith("ppl"), r["what"] == "loss"
        positions = r"[1-9]\d{0,17}(-[1-9]\d{0,17})?" if loss else ""
        if (ppl or loss) and r["T"] == 0 or ppl and r["value"] == 0 or not re.fullmatch(positions, r["positions"]):
            raise BadInput(f"{path}: {','.join(map(str, r.values()))}: expected a perplexity above 0, or a loss with "
                           "positions such as 1 or 3-4, of windows of at least one token")
    return counted(rows)


def read_differences(path):
    """the rows of study_differences.csv beside study.csv; none if there is no such file, or one of an earlier study"""
    beside = os.path.splitext(path)[0] + "_differences.csv"
    rows = ledger.read(beside, DIFFERENCES, list(DIFFERENCES)[:5])
    return rows if ledger.comments(beside) == ledger.comments(path) else []


FIGURES = {"train": plot_train, "lengths": plot_lengths, "curve": plot_curve, "passages": plot_passages,
           "heads": plot_heads, "study": lambda paths: draw_study(read_study(paths[0]), read_differences(paths[0])),
           "positions": lambda paths: draw_positions(read_study(paths[0])), "bias": plot_bias}


def main(argv):
    parser = console.parser(__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("input", nargs="+", help="run directories, or for bias a JSON file, for study, positions a CSV")
    parser.add_argument("-o", "--out", help="the image to write, .png, .svg or .pdf")
    parser.add_argument("--normalize", action="store_true", help="bias: divide each matrix by its largest magnitude")
    args = parser.parse_args(argv)
    first = args.input[0]
    beside = os.path.join(first, args.figure) if os.path.isdir(first) else os.path.splitext(first)[0]
    out = args.out or beside + ".png"
    if args.figure in ("bias", "study", "positions") and len(args.input) > 1:
        raise BadInput(f"{args.figure}: expected one file, got " + ", ".join(args.input))
    if args.normalize and args.figure != "bias":
        raise BadInput(f"--normalize: expected the figure bias, got {args.figure}")
    fig = FIGURES[args.figure](args.input, *[True] * args.normalize)
    about = "\n".join(ledger.comments(first)).removeprefix("# ") if first.endswith(".csv") else ""
    save(fig, out, about.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    print(out)


if __name__ == "__main__":
    console.run(main)
