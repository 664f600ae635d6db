#!/usr/bin/env python3
"""roofline.py -- predicts the time of a training step of train_gpt2cu, kernel by kernel: a model, not a measurement.

    scripts/roofline.py --model small --T 1024 --B 64 --pos cable --gpu H200
    scripts/roofline.py --measured FILE ...       beside what ./train_gpt2cu --profile 3 ... printed into FILE

Each kernel has a row: how often a step of one micro-batch calls it, what a call reads and writes (each array once), its
floating-point operations, and which limit its time follows from:

    tensor     FLOPs over what a large product reaches     memory     bytes over what a copy reaches
    attention  FLOPs over the rates of an H100             latency    a chain of dependent loads, or the host

A kernel reaches a fraction of its limit between two stated numbers (RATES), so each time is a range. The errors are
assumed to be independent: the step's is the root of the sum of their squares. Shapes are read from the table of
tensors in train_gpt2.cu. What it leaves out: other GPUs, checkpoints, evaluation, --tile_skip, and attention that does
not run on the tensor cores with heads of 64 or 128.
"""
import collections
import math
import os
import re
import sys

import console
from console import BadInput
from ledger import ROOT, commit

VOCABULARY = 50257
SIZES = {"tiny": (6, 8, 512), "small": (12, 12, 768), "medium": (24, 16, 1024), "large": (36, 20, 1280),
         "xl": (48, 25, 1600)}
# a head's columns of qkv beside q, k and v, by encoding: cable.cuh declares them
EXTRA_COLUMNS = {"cable": 2, "kcable": 2, "cable_nw": 1, "kcable_nw": 1, "cable_v1": 1, "fox": 1, "kcable_v1": 1,
                 "grape_q": 1}

# ----------------------------------------------------------------------------------------------------------
# the GPUs. tflops, gbs: datasheets, dense bf16 with float32 sums, and the memory's GB/s. mma: FLOPs of mma.sync per SM
# and clock, which a Hopper GPU issues at 62.5 % of wgmma's rate (a B200's was taken for the same). fed: how much nearer
# to its peak a product comes than on an H100; fitted for the A100 to the 300 ms of llm.c's run_gpt2_124M.sh, a guess
# for the 4090.
Gpu = collections.namedtuple("Gpu", "tflops gbs sms ghz mma fed")
GPUS = {
    "A100": Gpu(312, 2039, 108, 1.41, 2048, 1.3),
    "H100": Gpu(989.4, 3352, 132, 1.98, 2560, 1.0),
    "H200": Gpu(989.4, 4800, 132, 1.98, 2560, 1.0),
    "B200": Gpu(2250, 8000, 148, 1.85, 2560, 1.0),
    "4090": Gpu(165.2, 1008, 128, 2.52, 512, 1.2),
}
# What was measured on an H200, by other programs than these: a bf16 product of 8,192^3 at 770 to 800 TFLOP/s, copies at
# 4.3 TB/s. Of another GPU the same shares are taken, a guess.
PRODUCT = (770 + 800) / 2 / 989.4       # of the datasheet's TFLOP/s
COPY = 4300 / 4800                      # of its GB/s
# What is reached of each limit: at least, at most. Measured at 1ee49cd on an H100, by the profile of a step of 124M
# (dev/results/NVIDIA-H100-80GB-HBM3_1ee49cdc8c27.md); attention at a48c6ac.
RATES = {
    "tensor": (0.84, 1.01),     # of a large product, by cuBLASLt's first heuristic with K = 768 to 3,072
    "stream": (0.86, 1.0),      # of a copy, by elementwise kernels, 16 bytes a load
    "rows": (0.82, 0.90),       # of a copy, by one warp per row, three passes over it
    "warps": (0.80, 0.87),      # of a copy, by four warps per block
    "states": (0.77, 0.85),     # of a copy, by AdamW's seven arrays side by side
}
# TFLOP/s of attention on an H100, causal, head size 64, T 1,024, no bias, rows of qkv that do not begin on a sector of
# 32 bytes: alone, and in a step, where clocks are lower.
# The backward is counted for its seven products. With T they grow by T / (T + 280).
ATTENTION = {"forward": (230, 255), "backward": (290, 350)}
LAUNCH = 2e-6               # seconds between the end of a kernel and the next one's work
CHAIN = {"chunk": 2.5e-6,   # a chunk of 128 tokens of cable_forward_kernel: scans, barriers
         "back": 6.2e-6,    # the same of cable_backward_kernel, which goes over them three times
         "slabs": 5.2e-6,   # add_slabs_kernel: 32 rows, one after the other, and 32 sums
         "parts": 0.12e-6,  # a sum of 64 rows that embedding_hot_kernel adds for the most frequent token
         "loss": 0.6e-6,    # 1,024 losses of loss_sum_kernel
         "host": 0.3e-3}    # a step's end: the host waits for the norm, then starts AdamW; the rest runs beside it
HOT, HOTS = 0.038, 0.44     # shares of the most frequent token, and of all with more than 64 of 65,536 (Zipf's law)

# Of the TFLOP/s of `none` with heads of 64: forward and backward, measured with the rates above at T 1,024, heads of
# 128 at T 4,096. fire's follow from its instructions: a guess.
SHARES = {
    64: {"none": (1, 1), "linear": (0.882, 0.910), "distance": (0.838, 0.782), "log": (0.644, 0.638),
         "toeplitz": (0.860, 0.603), "fire": (0.80, 0.45)},
    128: {"none": (0.952, 0.681), "linear": (0.897, 0.658), "distance": (0.870, 0.626), "log": (0.784, 0.570),
          "toeplitz": (0.830, 0.533), "fire": (0.56, 0.37)},
}

# --pos: the form of its bias in the tensor-core kernels
FORMS = {"none": "none learned sinusoidal rope ssmax", "linear": "alibi alibi_random",
         "distance": "cable cable_nw cable_v1 fox grape_q", "log": "kcable kcable_nw kcable_v1",
         "toeplitz": "t5 t5_clip kerple kerple_power bam sandwich alibi_trained", "fire": "fire"}
BIASES = {pos: form for form, names in FORMS.items() for pos in names.split()}
# those with tensors for the whole model; their elements are few but for wpe's
OWN_TENSORS = "learned t5 t5_clip kerple kerple_power fire ssmax alibi_trained bam".split()
# kernels of an encoding: calls in a step and in each layer of it; of a call, bytes for each of the (B,T,C) numbers of
# the residual stream, and for each token and head. Kernels that fill or add up small tables are left out.
KERNELS = {
    "rope": [("rope_kernel", 0, 2, 8, 0)],
    "learned": [("learned_forward_kernel", 1, 0, 4, 0), ("learned_backward_kernel", 1, 0, 2, 0)],
    "sinusoidal": [("sinusoidal_forward_kernel", 1, 0, 4, 0)],
    "ssmax": [("ssmax_forward_kernel", 0, 1, 4, 0), ("ssmax_backward_kernel", 0, 1, 6, 4),
              ("ssmax_gradient_kernel", 0, 1, 0, 4)],
    "grape_q": [("grape_forward_kernel", 0, 1, 0, 8), ("grape_backward_kernel", 0, 1, 0, 8)],
}


Shape = collections.namedtuple("Shape", "L NH C B T V Vp OC pos")


def shape_of(model, B, T, pos, V=VOCABULARY):
    L, NH, C = model
    OC = math.ceil((3 * C + EXTRA_COLUMNS.get(pos, 0) * NH) / 8) * 8
    return Shape(L, NH, C, B, T, V, math.ceil(V / 128) * 128, OC, pos)


def tensors(s):
    """name -> (layers, rows, columns) of the parameters, from the table GPT2_PARAMS; layers 0: one for the model"""
    with open(os.path.join(ROOT, "train_gpt2.cu")) as f:
        table = re.search(r"#define GPT2_PARAMS\(X\)(.*?)\n\n", f.read(), re.S).group(1)
    rows = re.findall(r"X\((\w+),\s*([^,]+),\s*([^,]+),\s*([^,]+),", table)
    names = {"__builtins__": {}, "L": s.L, "C": s.C, "Vp": s.Vp, "OC": s.OC}
    found = {name: tuple(eval(text, names) for text in sizes) for name, *sizes in rows}
    if s.pos == "learned":
        found["wpe"] = (0, s.T, s.C)
    return found


def elements(s):
    return sum(max(1, layers) * rows * max(1, cols) for layers, rows, cols in tensors(s).values())


def products(s):
    """the matrices that each token's vector is multiplied with: name -> (times, outputs, inputs)"""
    return {name: (max(1, layers), rows, cols) for name, (layers, rows, cols) in tensors(s).items()
            if cols > 0 and name != "wpe"}


def token_flops(s):
    """of training, recomputation left out: flops_per_token() of llmc/base/gpu.h; the vocabulary without its padding"""
    weights = sum(times * out * inp for times, out, inp in products(s).values()) - (s.Vp - s.V) * s.C
    return 6 * weights + 12 * s.L * s.C * (s.T + 1) / 2


# ----------------------------------------------------------------------------------------------------------
# rows of the table

# calls: in a step. The rest is of one call: bytes, FLOPs on the tensor cores, (least, most) TFLOP/s of attention,
# seconds of a chain. memory: of RATES. shape: M x N x K of a product, * for the tokens. waste: FLOPs of whole tiles, on
# all SMs, for each that is wanted
Row = collections.namedtuple("Row", "group kernel what calls bytes flops rates seconds memory shape waste",
                             defaults=(0, 0, None, 0, "stream", "-", 1.0))


def ends(r, gpu):
    """the shortest and the longest time of a call, and what limits it"""
    memory, product = gpu.gbs * 1e9 * COPY, gpu.tflops * 1e12 * PRODUCT * gpu.fed
    limits = {"latency": [r.seconds, r.seconds],
              "memory": [r.bytes / (memory * share) for share in reversed(RATES[r.memory])]}
    if r.rates:
        limits["attention"] = [r.flops / (1e12 * rate) for rate in reversed(r.rates)]
    else:
        limits["tensor"] = [r.flops * r.waste / (product * share) for share in reversed(RATES["tensor"])]
    limit = max(limits, key=lambda name: sum(limits[name]))
    gap = LAUNCH if r.kernel != "(host)" else 0.0
    return [seconds + gap for seconds in limits[limit]], limit


def chunk_of(s):
    """rows that the head takes at a time: logit_rows() of llmc/engine/model.cuh"""
    N, most = s.B * s.T, (256 << 20) // s.Vp
    return N if N <= most else math.ceil(math.ceil(N / math.ceil(N / (most // 128 * 128))) / 128) * 128


def waste_of(M, N, gpu, split=False):
    """of whole tiles of 128 x 256 over all SMs; split: K is long, and parts of it are tiles of their own"""
    def tiles(a, b):
        return math.ceil(M / a) * math.ceil(N / b)
    least = min(tiles(128, 256), tiles(256, 128))
    waves = least if split else math.ceil(least / gpu.sms) * gpu.sms
    return waves * 128 * 256 / (M * N)


def product_rows(s, gpu):
    """forward, back to the input, into the weight's gradient; the head does its three a chunk of logits at a time"""
    N, rows = s.B * s.T, []
    for name, (times, out, inp) in products(s).items():
        tall = chunk_of(s) if name == "wte" else N                      # all but the last
        calls = math.ceil(N / tall) * times
        n = N * times / calls
        operands = 2 * (n * inp + out * inp + n * out)
        added = 2 * n * out if name in ("attprojw", "fcprojw") else 0   # the residual stream
        gradient = 2 * n * (inp + out) + 2 * 4 * out * inp              # it is added to
        flops = 2 * n * out * inp
        for what, bytes, shape, waste in (
                ("forward", operands + added, f"*x{out}x{inp}", waste_of(tall, out, gpu)),
                ("dinp", operands, f"*x{inp}x{out}", waste_of(tall, inp, gpu) * math.ceil(out / 64) * 64 / out),
                ("dweight", gradient, f"{out}x{inp}x*", waste_of(out, inp, gpu, True))):
            rows.append(Row("GEMM", "matmul_kernel", f"{name} {what}", calls, bytes, flops, shape=shape, waste=waste))
    return rows


def attention_rates(kind, HS, T, gpu):
    """(least, most) TFLOP/s, forward and backward"""
    h100 = GPUS["H100"]
    speed = gpu.sms * gpu.ghz * gpu.mma / (h100.sms * h100.ghz * h100.mma) * (T / (T + 280)) / (1024 / (1024 + 280))
    return [(least * speed * share, most * speed * share)
            for (least, most), share in zip(ATTENTION.values(), SHARES[HS][kind])]


def attention_rows(s, gpu):
    HS, BNH, form = s.C // s.NH, s.B * s.NH, BIASES[s.pos]
    forward, backward = attention_rates(form, HS, s.T, gpu)
    x, per_query = 2.0 * s.B * s.T * s.C, 16.0 * BNH * s.T              # an array of bf16; a query's numbers
    product = BNH * s.T * (s.T + 1) * HS                                # FLOPs of one of the two products, and seven
    extra = 3 if form in ("distance", "log") else 1                     # flash_variants
    rows = [("flash_forward_kernel", form, 4 * x + per_query / 4, 2 * product, forward),
            ("flash_backward_prepare_kernel", "row sums of dout * out", 2 * x + extra * per_query),
            ("flash_backward_dkdv_kernel", form, 6 * x + per_query, 4 * product, backward),
            ("flash_backward_dq_kernel", form, 5 * x + per_query, 3 * product, backward)]
    return [Row("attention", kernel, what, s.L, *more) for kernel, what, *more in rows]


def encoding_rows(s, gpu):
    N = s.B * s.T
    if s.pos in EXTRA_COLUMNS and s.pos not in KERNELS:
        # an SM has 16 blocks of 128 threads, or 8 of 256; one block per head
        chain, back = (math.ceil(s.T / 128) * CHAIN[way] * math.ceil(s.B * s.NH / (blocks * gpu.sms))
                       for way, blocks in (("chunk", 16), ("back", 8)))
        moved = N * (32.0 * math.ceil(4 * s.NH / 32) + 8.0 * s.NH)
        return [Row("rest", "cable_forward_kernel", "S, g", s.L, moved, seconds=chain),
                Row("rest", "cable_backward_kernel", "dz, du", s.L, 2 * moved, seconds=back)]
    return [Row("rest", kernel, "", once + each * s.L, N * (number * s.C + head * s.NH))
            for kernel, once, each, number, head in KERNELS.get(s.pos, ())]


def layer_rows(s, recompute):
    """what a layer does beside products and attention"""
    N, calls = s.B * s.T, 2 * s.L + 1
    x, wide = 2.0 * N * s.C, 8.0 * N * s.C                              # bytes
    slabs = min(math.ceil(N / 32), 1024)                                # MAX_SLABS of llmc/base/reduce.cuh
    rows = [Row("layernorm forward", "layernorm_forward_kernel", "", calls + 2 * s.L * (recompute > 1), 2 * x,
                memory="rows"),
            Row("layernorm backward", "layernorm_backward_kernel", "", calls, 4 * x + 8.0 * slabs * s.C,
                memory="warps"),
            Row("layernorm backward", "add_slabs_kernel", "of layernorm", 2 * calls, 4.0 * slabs * s.C,
                seconds=CHAIN["slabs"]),
            Row("GELU", "gelu_forward_kernel", "", s.L * (1 + (recompute > 0)), 2 * wide),
            Row("GELU", "gelu_backward_kernel", "and fcb's sums", s.L, 3 * wide + 16.0 * slabs * s.C)]
    for name, (times, out, _) in products(s).items():
        bias = name[:-1] + "b"
        if name not in ("wte", "fcw"):
            rows.append(Row("bias gradients", "slab_sums_kernel", bias, times, 2.0 * N * out + 4.0 * slabs * out,
                            memory="warps"))
        if name != "wte":
            rows.append(Row("bias gradients", "add_slabs_kernel", bias, times, 4.0 * slabs * out,
                            seconds=CHAIN["slabs"]))
    return rows


def step_rows(s, gpu, recompute=0):
    N, n, chunks = s.B * s.T, float(elements(s)), math.ceil(s.B * s.T / chunk_of(s))
    x = 2.0 * N * s.C
    distinct = s.V * (1 - math.exp(-N / s.V))                           # tokens, were all equally frequent
    blocks = s.L + 1 + (s.pos in OWN_TENSORS)                           # of the layout, without empty ones
    rows = product_rows(s, gpu) + attention_rows(s, gpu) + layer_rows(s, recompute) + encoding_rows(s, gpu)
    if HOT * N > 64:                                                    # EMBEDDING_PART: rows that one block adds
        rows.append(Row("rest", "embedding_hot_kernel", "sums of parts", 1, 4.0 * HOTS * N / 64 * s.C,
                        seconds=CHAIN["parts"] * math.ceil(HOT * N / 64)))
    # The classifier's row stays in the L2 between its passes: one read and the write go to memory. AdamW reads
    # gradient, master, m and v, and writes master, m, v and the bf16 weights.
    return [*rows,
            Row("rest", "embedding_forward_kernel", "", 1, 2 * x),
            Row("classifier", "classifier_kernel", "", chunks, 4.0 * N * s.Vp / chunks),
            Row("rest", "loss_sum_kernel", "", 1, 4.0 * N, seconds=CHAIN["loss"] * math.ceil(N / 1024)),
            Row("rest", "memset", "dresidual", 1, x),
            Row("rest", "embedding_backward_kernel", "", 1, x + 8.0 * distinct * s.C),
            Row("optimizer", "memset", "gradients", 1, 4 * n),
            Row("optimizer", "norm_kernel", "", blocks, 4 * n / blocks),
            Row("optimizer", "adamw_kernel", "", 1, 30 * n, memory="states"),
            Row("rest", "(host)", "end of the step", 1, seconds=CHAIN["host"])]


def range_of(rows, gpu):
    """(least, middle, most) ms of all rows. Rows with the same rates err together, other rows independently."""
    middle, errors = 0.0, collections.Counter()
    for r in rows:
        (shortest, longest), limit = ends(r, gpu)
        middle += r.calls * (shortest + longest) / 2 * 1e3
        errors[limit, r.memory if limit == "memory" else ""] += r.calls * (longest - shortest) / 2 * 1e3
    error = math.sqrt(sum(e * e for e in errors.values()))
    return middle - error, middle, middle + error


# ----------------------------------------------------------------------------------------------------------
# what is printed

def print_table(rows, gpu):
    """MB and GFLOP are of a call; ms, their range and share of all its calls in a step"""
    print(f"{'kernel':30} {'what':24} {'calls':>5} {'MB':>9} {'GFLOP':>9} {'limit':>9} {'ms':>8} "
          f"{'least':>8} {'most':>8} {'share':>6}")
    whole = range_of(rows, gpu)[1]
    for r in rows:
        times, limit = ends(r, gpu)
        least, most = (1e3 * r.calls * seconds for seconds in times)
        ms = (least + most) / 2
        print(f"{r.kernel:30} {r.what:24} {r.calls:5} {r.bytes / 1e6:9.1f} {r.flops / 1e9:9.1f} {limit:>9} {ms:8.3f} "
              f"{least:8.3f} {most:8.3f} {100 * ms / whole:5.1f}%")


def summary(s, rows, gpu):
    """yields lines: ms by group, and what follows from the step's"""
    groups = {}
    for r in rows:
        groups.setdefault(r.group, []).append(r)
    ranges = {group: range_of(each, gpu) for group, each in groups.items()}
    ranges["step"] = range_of(rows, gpu)
    for group, (least, ms, most) in sorted(ranges.items(), key=lambda item: (item[0] == "step", -item[1][1])):
        yield f"{group:20} {ms:8.2f} ms, {least:6.1f} to {most:6.1f} {100 * ms / ranges['step'][1]:5.1f} %"
    for what, ms in zip(("at best", "middle", "at worst"), ranges["step"]):
        tokens = s.B * s.T / ms * 1e3
        yield (f"{'predicted, ' + what:20} {tokens:9,.0f} tokens/s, MFU "
               f"{100 * tokens * token_flops(s) / (gpu.tflops * 1e12):.1f} %")


def measured(path):
    """(kernel, shape) -> calls, ms: the last table of --profile in what a trainer printed"""
    with open(path, errors="replace") as f:
        text = f.read()
    table = text.rpartition("\nprofile of step ")[2] if "profile of step " in text else ""
    found = re.findall(r"^(\S+) +(-|\d+x\d+x\d+) +(\d+|-) +(-?\d+\.?\d*) +-?[\d.]+% ", table, re.M)
    if not found:
        raise BadInput(f"--measured {path}: expected the output of a run with --profile, got no table in it")
    return {(kernel, shape): (0 if calls == "-" else int(calls), float(ms)) for kernel, shape, calls, ms in found}


def compared(rows, gpu, profile):
    """(kernel, shape) -> calls and ms predicted, calls and ms measured, bytes and FLOPs of all calls; a product that
    is measured counts for the one that is predicted with its shape"""
    table = {}
    for r in rows:
        entry = table.setdefault((r.kernel, r.shape), [0, 0.0, 0, 0.0, 0, 0])
        for k, each in (0, 1), (1, 1e3 * sum(ends(r, gpu)[0]) / 2), (4, r.bytes), (5, r.flops):
            entry[k] += r.calls * each
    for (kernel, shape), (calls, ms) in profile.items():
        M, N, K = shape.split("x") if "x" in shape else ("-",) * 3
        names = [(kernel, s) for s in (f"*x{N}x{K}", f"{M}x{N}x*", shape) if (kernel, s) in table]
        entry = table.setdefault(names[0] if names else (kernel, shape), [0, 0.0, 0, 0.0, 0, 0])
        entry[2] += calls
        entry[3] += ms
    return table


def comparison(rows, gpu, profile):
    """yields lines"""
    yield (f"{'kernel':30} {'M x N x K':>18} {'calls':>6} {'found':>6} {'predicted':>10} {'measured':>9} {'error':>7} "
           f"{'GB/s':>7} {'TFLOP/s':>8}")
    for (kernel, shape), (calls, ms, found, took, bytes, flops) in compared(rows, gpu, profile).items():
        error = f"{100 * (ms / took - 1):+.0f}%" if took > 0 and ms > 0 else "-"
        per_ms = lambda amount: amount / took / 1e6 if took > 0 else 0.0
        yield (f"{kernel:30} {shape:>18} {calls:6} {found:6} {ms:10.3f} {took:9.3f} {error:>7} {per_ms(bytes):7.0f} "
               f"{per_ms(flops) / 1e3:8.1f}")


def parse(argv):
    p = console.parser(__doc__)
    p.add_argument("--model", default="small", help="a size by name, or L,NH,C [small]")
    p.add_argument("--pos", default="cable", choices=sorted(BIASES), help="positional encoding [cable]")
    p.add_argument("--T", type=int, default=1024, help="tokens in a sequence [1024]")
    p.add_argument("--B", type=int, default=64, help="sequences in a step [64]")
    p.add_argument("--gpu", default="H200", choices=sorted(GPUS), help="[H200]")
    p.add_argument("--recompute", type=int, choices=(0, 1, 2), default=0, help="as the trainer's [0]")
    p.add_argument("--measured", metavar="FILE", help="what a run with --profile printed: beside the prediction")
    args = p.parse_args(argv)
    try:
        args.shape = SIZES.get(args.model) or tuple(int(n) for n in args.model.split(","))
    except ValueError:
        args.shape = ()
    if len(args.shape) != 3 or min(*args.shape, args.T, args.B) <= 0 or args.shape[2] % args.shape[1]:
        raise BadInput("expected --model L,NH,C with C a multiple of NH, and positive numbers")
    if args.shape[2] // args.shape[1] not in SHARES:
        raise BadInput(f"expected heads of 64 or 128, got {args.shape[2] // args.shape[1]}: no other has been measured")
    return args


def main(argv):
    args = parse(argv)
    gpu, s = GPUS[args.gpu], shape_of(args.shape, args.B, args.T, args.pos)
    rows = step_rows(s, gpu, args.recompute)
    print("# A PREDICTION, not a measurement, by rates that one H100 has shown")
    print(f"# commit {commit()}, {args.gpu}: {gpu.tflops:g} TFLOP/s bf16 and {gpu.gbs:g} GB/s by its datasheet; a "
          f"large product reaches {gpu.tflops * PRODUCT * gpu.fed:.0f} and a copy {gpu.gbs * COPY:.0f}")
    print(f"# L {s.L}, NH {s.NH}, C {s.C}, OC {s.OC}, V {s.V:,} padded to {s.Vp:,}, B {s.B}, T {s.T}, {s.pos}, bf16, "
          f"recompute {args.recompute}")
    print_table(rows, gpu)
    for line in summary(s, rows, gpu):
        print("# " + line)
    for line in comparison(rows, gpu, measured(args.measured)) if args.measured else ():
        print(line)


if __name__ == "__main__":
    console.run(main)
