#!/usr/bin/env python3
"""scaling.py -- predicts what a training costs on N GPUs: a model of the exchange between ranks, not a measurement.

    scripts/scaling.py --model small --log a/log.jsonl@16 --log b/log.jsonl@64 -o scaling
    scripts/scaling.py --model 2,4,256 --element 4 --overlap 0 ... --measured run2/log.jsonl@2

--log FILE@B is a run on one GPU with micro-batches of B sequences and the same --total_batch: the median of its steps'
ms, without the first three. Two such runs give the fixed cost of a micro-batch, and so the loss at few tokens; without
any, --tflops and --overhead_us are assumed. Prints CSV; -o PATH writes PATH.csv and PATH.png (which
needs matplotlib). All times are ms of a step:

    compute      what one GPU needs for 1/N of the micro-batches
    exchange     sums of the gradients: inside the nodes, then over them, and the additions
    gather       the new weights (--zero 1) or the sums (--zero 0), the other way
    exposed      the part of both that the step waits for; the rest hides behind the last backward and next forward
    efficiency   tokens/s, over N times those of one GPU with the largest micro-batch
    memory_gb    the parameters, moments and gradients of a rank, without activations; ./train_gpt2cu --check
                 --as_ranks N has both

--measured FILE@N prints the model's error against a run of N ranks. The model leaves out the optimizer's step, which is
N times shorter with --zero 1, other users of the links, slow ranks, and the SMs that NCCL takes.
"""
import argparse
import collections
import csv
import json
import math
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import console  # noqa: E402
from console import BadInput  # noqa: E402

SIZES = {"tiny": (6, 8, 512), "small": (12, 12, 768), "medium": (24, 16, 1024), "large": (36, 20, 1280),
         "xl": (48, 25, 1600)}
# heads' columns of qkv beside q, k and v, by encoding: cable.cuh declares them
EXTRA_COLUMNS = {"cable": 2, "kcable": 2, "cable_nw": 1, "kcable_nw": 1, "cable_v1": 1, "fox": 1, "kcable_v1": 1}
UNIT = 16384                                        # SLICE_UNIT: blocks of the layout are multiples of it
COLUMNS = ("N", "B", "compute", "exchange", "gather", "exposed", "step", "tokens_per_s", "efficiency", "memory_gb")

# Bytes/s and seconds. fold: bytes of memory that adding an element moves (add_to_kernel: two are read, one written);
# chunk: bytes that arrive at a time
Machine = collections.namedtuple("Machine", "node nvlink nic memory latency nic_latency fold chunk")
Compute = collections.namedtuple("Compute", "fixed token")      # seconds of a micro-batch, and of each token in it


def blocks(shape, vocabulary, pos, T):
    """elements of the encoding, of the rest and of a layer, in whole units"""
    L, NH, C = shape
    encoding = T * C if pos == "learned" else 0
    columns = EXTRA_COLUMNS.get(pos, 0) * NH                            # more rows of the qkv matrix
    whole = lambda n: -(-n // UNIT) * UNIT
    return whole(encoding), whole(vocabulary * C + 2 * C), whole(12 * C * C + 13 * C + columns * (C + 1))


def buffers(leaves):
    """gradient_buffers() of llmc/engine/ranks/parameters.cuh"""
    return 1 + math.ceil(math.log2(leaves))


def leaves_of(micro_batches, N):
    """what --leaves -1 makes of the micro-batches of a step, on each of N ranks; 1 where it is refused, and --leaves N
    is the least that is not"""
    return math.gcd(micro_batches, 8) // N or 1


def memory(parts, L, N, leaves, element, zero):
    """bytes for the parameters of a rank: weight_bytes() of llmc/engine/run/plan.h"""
    encoding, rest, layer = parts
    total = encoding + rest + L * layer
    ranks = N if zero else 1
    share = sum(count * -(-block // UNIT // ranks) * UNIT for block, count in ((encoding, 1), (rest, 1), (layer, L)))
    weights = 4 * total
    if element < 4:
        weights = element * total + 4 * (share + (encoding if ranks > 1 else 0))
    return weights + 8 * share + 4 * buffers(leaves) * total


def transfer(elements, element, N, m, adds):
    """seconds for the parts of a block to reach those that own them, inside the nodes and then over them"""
    g = m.node
    levels = [(N, 1, m.nic, m.nic_latency)]
    if N <= g:
        levels = [(N, 1, m.nvlink, m.latency)]
    elif g > 1 and N % g == 0 and g & (g - 1) == 0:
        levels = [(g, 1, m.nvlink, m.latency), (N // g, g, m.nic, m.nic_latency)]
    seconds = 0.0
    for size, part, speed, latency in levels:
        moved = elements / part * (size - 1) / size
        turns = math.ceil(moved * element / m.chunk)
        seconds += moved * element / speed + turns * latency
        if adds:
            seconds += moved * m.fold / m.memory
    return seconds


def exposed_sum(parts, L, N, m, backward):
    """A block's sum sets out when its backward is done, one after the other; the encoding and the rest come last."""
    encoding, rest, layer = (transfer(n, 4, N, m, True) for n in parts)
    free = 0.0
    for done in range(1, L + 1):
        free = max(free, backward * done / L) + layer
    return free + rest + encoding - backward


def exposed_gather(parts, L, N, m, element, forward):
    """The rest comes first, then a layer at a time, for which its forward waits."""
    encoding, rest, layer = (transfer(n, element, N, m, False) for n in parts)
    now = arrived = encoding + rest
    for _ in range(L):
        arrived += layer
        now = max(now, arrived) + forward / L
    return now - forward


def predict(shape, parts, N, samples, T, B, m, compute, element=2, zero=1, overlap=True):
    """a row of COLUMNS, or None where N does not divide the samples of a step"""
    if samples % N:
        return None
    L, mine = shape[0], samples // N
    B = max(b for b in range(1, min(B, mine) + 1) if mine % b == 0)
    micro = compute.fixed + compute.token * B * T
    back = element if zero else 4
    exchange = gather = exposed = 0.0
    if N > 1:
        exchange, gather = ((L * transfer(parts[2], size, N, m, adds) + transfer(parts[0], size, N, m, adds) +
                             transfer(parts[1], size, N, m, adds)) for size, adds in ((4, True), (back, False)))
        exposed = exchange + gather
        if overlap:
            exposed = exposed_sum(parts, L, N, m, micro * 2 / 3) + exposed_gather(parts, L, N, m, back, micro / 3)
    computing = micro * (mine // B)
    step = computing + exposed
    return dict(N=N, B=B, compute=computing * 1e3, exchange=exchange * 1e3, gather=gather * 1e3,
                exposed=exposed * 1e3, step=step * 1e3, tokens_per_s=samples * T / step,
                memory_gb=memory(parts, L, N, leaves_of(samples // B, N), element, zero) / 1e9)


def with_efficiency(row, samples, T, B, compute):
    best = (compute.fixed + compute.token * B * T) / (B * T)            # seconds a token
    row["efficiency"] = samples * T * best / row["N"] / (row["step"] / 1e3)
    return row


# ----------------------------------------------------------------------------------------------------------
# what was measured

def logged(text):
    """the median ms of a FILE@NUMBER's steps, and the number"""
    path, at, number = text.rpartition("@")
    if not at or not number.isdigit() or int(number) < 1:
        raise BadInput(f"expected FILE@NUMBER, got {text}")
    steps = {}
    try:
        with open(path) as f:
            for line in f:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue                                            # torn by a crash
                if isinstance(record, dict) and record.get("kind") == "train":
                    steps[record["step"]] = record["ms"]
    except (OSError, KeyError) as e:
        raise BadInput(f"{path}: {e}")
    ms = [steps[step] for step in sorted(steps)][3:]
    if not ms:
        raise BadInput(f"{path}: expected a log of more than three steps, got {len(steps)}")
    return statistics.median(ms), int(number)


def fitted(logs, samples, T):
    """Compute from runs of one GPU: the seconds of a micro-batch at one or two --B"""
    points = sorted({B: ms / 1e3 / (samples / B) for ms, B in logs}.items())
    if len(points) == 1:
        return Compute(0.0, points[0][1] / (points[0][0] * T))
    (b0, t0), (b1, t1) = points[0], points[-1]
    token = (t1 - t0) / ((b1 - b0) * T)
    if token <= 0:
        raise BadInput(f"--log: a micro-batch of {b1} sequences takes no longer than one of {b0}")
    return Compute(max(0.0, t0 - token * b0 * T), token)


def assumed(shape, vocabulary, T, tflops, overhead_us):
    L, _, C = shape
    flops = 6 * (12 * L * C * C + vocabulary * C) + 6 * L * C * T       # as in paper.py
    return Compute(overhead_us * 1e-6 * L, flops / (tflops * 1e12))


# ----------------------------------------------------------------------------------------------------------

def draw(rows, title, path):
    console.need("matplotlib").use("Agg")
    plt = console.need("matplotlib.pyplot")
    fig, axes = plt.subplots(1, 2, figsize=(10, 4))
    N = [r["N"] for r in rows]
    axes[0].plot(N, [100 * r["efficiency"] for r in rows], "o-", color="#0072B2")
    axes[0].set_ylabel("efficiency, %")
    axes[0].set_ylim(0, 105)
    for name, colour in ("compute", "#009E73"), ("exchange", "#E69F00"), ("gather", "#56B4E9"), ("exposed", "#D55E00"):
        axes[1].plot(N, [r[name] for r in rows], "o-", label=name, color=colour)
    axes[1].set_ylabel("ms of a step")
    axes[1].set_yscale("log")
    axes[1].legend()
    for a in axes:
        a.set_xscale("log", base=2)
        a.set_xticks(N, [str(n) for n in N])
        a.set_xlabel("GPUs")
        a.grid(alpha=0.3)
    fig.suptitle(title)
    fig.tight_layout()
    fig.savefig(path, dpi=100)


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    number = lambda name, default, what: p.add_argument(name, type=float, default=default, help=f"{what} [{default}]")
    whole = lambda name, default, what: p.add_argument(name, type=int, default=default, help=f"{what} [{default}]")
    p.add_argument("--model", default="small", help="a size by name, or L,NH,C [small]")
    p.add_argument("--pos", default="cable", help="positional encoding [cable]")
    whole("--vocabulary", 50257, "rows of the embedding")
    whole("--T", 1024, "tokens in a sequence")
    whole("--total_batch", 524288, "tokens in an update")
    whole("--B", 16, "the most sequences in a micro-batch")
    p.add_argument("--ranks", default="1,8,16,32,64,128,256,512,1024", help="numbers of GPUs, joined by commas")
    whole("--gpus_per_node", 8, "GPUs in a machine")
    number("--nvlink", 370, "GB/s that a GPU gets inside a machine, each way")
    number("--nic", 48, "GB/s that a GPU gets between machines, each way")
    number("--memory", 3000, "GB/s of a GPU's memory")
    number("--latency_us", 20, "of a turn inside a machine")
    number("--nic_latency_us", 40, "of a turn between machines")
    number("--chunk_mb", 32, "MB that arrive in a turn; through the host it is 4")
    p.add_argument("--zero", type=int, choices=(0, 1), default=1, help="as the trainer's [1]")
    p.add_argument("--element", type=int, choices=(2, 4), default=2, help="bytes of a weight: bf16 2, float32 4 [2]")
    p.add_argument("--overlap", type=int, choices=(0, 1), default=1,
                   help="1 = sums and gathers hide behind layers, as by NCCL; 0 = as through the host [1]")
    p.add_argument("--log", action="append", default=[], metavar="FILE@B", help="a run of one GPU")
    number("--tflops", 200, "TFLOP/s of a GPU, assumed where there is no --log")
    number("--overhead_us", 100, "microseconds that a layer takes beside that in each micro-batch, assumed likewise")
    p.add_argument("--measured", action="append", default=[], metavar="FILE@N", help="a run of N ranks")
    p.add_argument("-o", dest="out", default="", help="PATH.csv and PATH.png")
    args = p.parse_args(argv)
    try:
        args.shape = SIZES.get(args.model) or tuple(int(n) for n in args.model.split(","))
        args.ranks = [int(n) for n in args.ranks.split(",")]
    except ValueError:
        raise BadInput(f"expected numbers joined by commas, got --model {args.model}, --ranks {args.ranks}")
    positive = (args.T, args.B, args.nvlink, args.nic, args.memory, args.chunk_mb, args.tflops, args.gpus_per_node)
    if len(args.shape) != 3 or min(*args.shape, *args.ranks, *positive) <= 0 or args.total_batch % args.T:
        raise BadInput("expected --model L,NH,C, positive numbers, and a --total_batch that is a multiple of --T")
    return args


def report(args):
    samples = args.total_batch // args.T
    m = Machine(args.gpus_per_node, args.nvlink * 1e9, args.nic * 1e9, args.memory * 1e9, args.latency_us * 1e-6,
                args.nic_latency_us * 1e-6, 12, args.chunk_mb * 2 ** 20)
    parts = blocks(args.shape, args.vocabulary, args.pos, args.T)
    logs = [logged(text) for text in args.log]
    compute = fitted(logs, samples, args.T) if logs else assumed(args.shape, args.vocabulary, args.T, args.tflops,
                                                                 args.overhead_us)

    def row_of(N):
        row = predict(args.shape, parts, N, samples, args.T, args.B, m, compute, args.element, args.zero, args.overlap)
        return row and with_efficiency(row, samples, args.T, args.B, compute)

    rows = [row for row in map(row_of, args.ranks) if row]
    table = [list(COLUMNS)] + [[r[c] if c in ("N", "B") else f"{r[c]:.5g}" for c in COLUMNS] for r in rows]
    print("# a prediction, not a measurement" + ("" if logs else f"; {args.tflops:g} TFLOP/s a GPU are assumed"))
    csv.writer(sys.stdout, lineterminator="\n").writerows(table)
    for N in sorted(set(args.ranks) - {r["N"] for r in rows}):
        print(f"# {N}: does not divide the {samples} sequences of a step")
    for text in args.measured:
        ms, N = logged(text)
        row = row_of(N)
        if row is None:
            raise BadInput(f"--measured {text}: {N} ranks do not divide the {samples} sequences of a step")
        print(f"# {text}: measured {ms:.4g} ms a step, predicted {row['step']:.4g}: {row['step'] / ms - 1:+.1%}")
    if args.out:
        with open(args.out + ".csv", "w", newline="") as f:
            csv.writer(f, lineterminator="\n").writerows(table)
        batch = f"{args.total_batch:,} tokens a step"
        draw(rows, f"Predicted, not measured: {args.model}, {batch}, --zero {args.zero}", args.out + ".png")


def main(argv):
    report(parse(argv))


if __name__ == "__main__":
    console.run(main)
