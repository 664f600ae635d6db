"""compare.py -- whether one encoding is better than another, by the losses of the same windows and seeds (study.py
--compare). The statistics are scipy's.

A difference is paired: model A's mean loss of a window minus B's, both of one seed. Its interval covers 95 % in two
ways, and is the wider of both: another text (bootstrap over the windows of the mean over seeds), and other seeds (the t
distribution of the mean over windows). With fewer than three seeds, or if the interval has 0 in it, nothing is
decided.
"""
import glob
import math
import os

import console
from console import BadInput

LEAST_SEEDS = 3


def windows(path, T):
    """the mean loss of each whole window of T tokens; path: written by --token_losses"""
    losses = console.need("numpy").array(console.read_losses(path), dtype="f8")
    if losses.size < T:
        raise BadInput(f"{path}: expected a window of {T:,} losses, got {losses.size:,}; give more --eval_tokens")
    return losses[:losses.size // T * T].reshape(-1, T).mean(axis=1)


def over_seeds(values, level=0.95):
    """(low, high): where the mean of numbers, one of each seed, lies at this level, by the t distribution"""
    numpy, stats = console.need("numpy"), console.need("scipy.stats")
    # scipy returns nan for a scale of 0, so that becomes a very small one
    return stats.t.interval(level, len(values) - 1, loc=numpy.mean(values), scale=stats.sem(values) or 1e-9)


def interval(d, level=0.95):
    """(mean, low, high) of paired differences d (seeds, windows), in nats; (mean, None, None) for too few seeds"""
    numpy, stats = console.need("numpy"), console.need("scipy.stats")
    mean = float(d.mean())
    if d.shape[0] < LEAST_SEEDS or d.shape[1] < 2:
        return mean, None, None
    ends = []
    for values, of in ((d.mean(axis=0), "windows"), (d.mean(axis=1), "seeds")):
        if numpy.ptp(values) == 0:
            ends.append((values[0], values[0]))
        elif of == "windows":
            ends.append(stats.bootstrap((values,), numpy.mean, method="basic", confidence_level=level,
                                        random_state=numpy.random.default_rng(1)).confidence_interval)
        else:
            ends.append(over_seeds(values, level))
    return mean, float(min(low for low, _ in ends)), float(max(high for _, high in ends))


def parameters(run):
    """the number of parameters of a run's newest checkpoint"""
    paths = sorted(glob.glob(os.path.join(glob.escape(run), "step_*", "model.safetensors")))
    if not paths:
        raise BadInput(f"{run}: expected a checkpoint, step_*/model.safetensors")
    with console.open_regular(paths[-1]) as f:
        return sum(math.prod(shape) for _, shape, *_ in console.read_tensors(f, paths[-1]).values())


def differences(a, b, T, ours, theirs):
    """(seeds, windows), for verdict(); ours, theirs: the losses of each seed, files that windows() reads"""
    losses = [(windows(x, T), windows(y, T)) for x, y in zip(ours, theirs)]
    counts = {values.size for pair in losses for values in pair}
    if len(counts) > 1:
        raise BadInput(f"{a} - {b} at {T:,}: expected as many windows in each evaluation, got "
                       f"{' and '.join(map(str, sorted(counts)))}")
    return console.need("numpy").array([x - y for x, y in losses])


def verdict(a, b, T, d):
    """("cable - alibi at 1,024: -0.0310 nats [-0.0340, -0.0280], 3 seeds, 64 windows: cable is better", "cable") of the
    differences d (seeds, windows); None in the place of the better one if that is undecided"""
    mean, low, high = interval(d)
    text = f"{a} - {b} at {T:,}: {mean:+.4f} nats"
    of = f", {d.shape[0]} seeds, {d.shape[1]:,} windows: "
    if low is None:
        return text + of + f"undecided, as fewer than {LEAST_SEEDS} seeds or 2 windows decide nothing", None
    better = a if high < 0 else b
    better = None if low <= 0 <= high else better
    return text + f" [{low:+.4f}, {high:+.4f}]" + of + (f"{better} is better" if better else "undecided"), better
