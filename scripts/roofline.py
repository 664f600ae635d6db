#!/usr/bin/env python3
"""roofline.py -- predicts the time of a training step of train_gpt2cu, kernel by kernel: a model, not a measurement.

    scripts/roofline.py --model small --T 1024 --B 64 --pos cable --gpu H200
    scripts/roofline.py --measured FILE ...       beside what ./train_gpt2cu --profile 3 ... printed into FILE

Each kernel has a row: how often a step calls it, what a call reads and writes beyond the L2 cache, its floating-point
operations, and which limit its time follows from:

    tensor     FLOPs over what a large product reaches     memory     bytes over what a copy reaches
    issue      instructions over 4 warps per SM and clock  attention  FLOPs over the published rates of FlashAttention-2
    latency    a chain of dependent loads, or the host

A kernel reaches a fraction of its limit between two stated numbers (RATES), so each time is a range. The errors are
assumed to be independent: the step's is the root of the sum of their squares. Shapes are read from the table of
tensors in train_gpt2.cu. What it leaves out: other GPUs, checkpoints, evaluation, --tile_skip.
"""
import argparse
import collections
import math
import os
import re
import sys

import console
from console import BadInput
from ledger import commit

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
VOCABULARY = 50257
SIZES = {"tiny": (6, 8, 512), "small": (12, 12, 768), "medium": (24, 16, 1024), "large": (36, 20, 1280),
         "xl": (48, 25, 1600)}
# a head's columns of qkv beside q, k and v, by encoding: cable.cuh declares them
EXTRA_COLUMNS = {"cable": 2, "kcable": 2, "cable_nw": 1, "kcable_nw": 1, "cable_v1": 1, "fox": 1, "kcable_v1": 1,
                 "cable_signed": 2, "grape_q": 1, "grape_k": 1, "grape_qk": 2}

# ----------------------------------------------------------------------------------------------------------
# the GPUs. tflops, gbs: datasheets, dense bf16 with float32 sums, and the memory's GB/s; product, copy: what was
# measured of them on an H200, by other programs than these (a bf16 product of 8,192^3 at 770 to 800 TFLOP/s, copies at
# 4.3 TB/s, 1.98 GHz, 60 MB of L2). Of another GPU the same shares are taken, a guess. mma: FLOPs of mma.sync per SM and
# clock, which a Hopper GPU issues at 62.5 % of wgmma's rate (a B200's was taken for the same). fed: how much nearer to
# its peak a product comes than on an H100; fitted for the A100 to the 300 ms of llm.c's run_gpt2_124M.sh, a guess for
# the 4090.
Gpu = collections.namedtuple("Gpu", "tflops gbs sms ghz mma l2 fed source")
GPUS = {
    "A100": Gpu(312, 2039, 108, 1.41, 2048, 40e6, 1.3, "NVIDIA A100 80GB SXM datasheet"),
    "H100": Gpu(989.4, 3352, 132, 1.98, 2560, 50e6, 1.0, "NVIDIA H100 SXM5 datasheet"),
    "H200": Gpu(989.4, 4800, 132, 1.98, 2560, 60e6, 1.0, "NVIDIA H200 SXM datasheet"),
    "B200": Gpu(2250, 8000, 148, 1.85, 2560, 126e6, 1.0, "NVIDIA HGX B200 datasheet"),
    "4090": Gpu(165.2, 1008, 128, 2.52, 512, 72e6, 1.2, "NVIDIA Ada GPU architecture paper, appendix A"),
}
PRODUCT = (770 + 800) / 2 / 989.4       # measured on an H200, of the datasheet's TFLOP/s
COPY = 4300 / 4800                      # likewise, of its GB/s
# What is reached of each limit: at least, at most, and of what. Measured at 1ee49cd on an H100, by the profile of a
# step of 124M (dev/results/NVIDIA-H100-80GB-HBM3_1ee49cdc8c27.md); only "issue", which limited nothing, is a guess.
Rate = collections.namedtuple("Rate", "least most what")
RATES = {
    "tensor": Rate(0.84, 1.01, "of a large product, by cuBLASLt's first heuristic with K = 768 to 3,072"),
    "tuned": Rate(0.85, 1.01, "of a large product, by algorithms measured once and kept (--plans)"),
    "issue": Rate(0.75, 0.95, "of the clocks, by elementwise kernels that wait for instructions"),
    "stream": Rate(0.86, 1.0, "of a copy, by elementwise kernels, 16 bytes a load"),
    "rows": Rate(0.82, 0.90, "of a copy, by one warp per row, three passes over it (layernorm_forward_kernel)"),
    "warps": Rate(0.80, 0.87, "of a copy, by four warps per block (layernorm_backward_kernel, slab_sums_kernel)"),
    "states": Rate(0.77, 0.85, "of a copy, by seven arrays side by side (adamw_kernel)"),
}
# TFLOP/s of attention on an H100, causal, head size 64, T 1,024, no bias: alone, and in a step, where clocks are lower.
# The backward is counted for its seven products. With T they grow by T / (T + 340).
ATTENTION = {"forward": (190, 240), "backward": (235, 265)}
LAUNCH = 2e-6               # seconds between the end of a kernel and the next one's work
CHAIN = {"chunk": 2.5e-6,   # a chunk of 128 tokens of cable_forward_kernel: scans, barriers
         "back": 6.2e-6,    # the same of cable_backward_kernel, which goes over them three times
         "slabs": 5.2e-6,   # add_slabs_kernel: 32 rows, one after the other, and 32 sums
         "row": 0.12e-6,    # a row of dout that embedding_backward_kernel adds for a token, one after the other
         "loss": 0.6e-6,    # 1,024 losses of loss_sum_kernel
         "dots": 0.2e-6,    # 1,024 numbers of ssmax_gradient_kernel, four loads at a time
         "host": 0.3e-3}    # a step's end: the host waits for the norm, then starts AdamW; the rest runs beside it
HOT = 0.038                 # share of the most frequent token: 2,500 of 65,536
HOTS = 0.44                 # of all that have more than 64 of 65,536, by Zipf's law
HOT_PART = 64               # EMBEDDING_PART: rows that one block adds
PORTABLE = 0.15             # of the float32 peak (256 FLOPs per SM and clock): attention's portable kernels, a guess
TOGETHER = 512              # blocks of attention that run at a time share as few heads as they can

# Instructions per element in SASS for sm_90a (nvcc 13.0, at 6e967cc); the classifier's over its two loops
INSTRUCTIONS = {"gelu_forward_kernel": 18.6, "gelu_backward_kernel": 31.1, "classifier_kernel": 11.9}
# Of the TFLOP/s of `none` with heads of 64: forward and backward, measured with the rates above at T 1,024, heads of
# 128 at T 4,096. fire's follow from its instructions: a guess.
SHARES = {
    64: {"none": (1, 1), "linear": (0.955, 0.936), "distance": (0.802, 0.814), "log": (0.740, 0.671),
         "toeplitz": (0.879, 0.563), "fire": (0.873, 0.584)},
    128: {"none": (0.979, 0.896), "linear": (0.934, 0.882), "distance": (0.842, 0.851), "log": (0.763, 0.758),
          "toeplitz": (0.867, 0.710), "fire": (0.580, 0.483)},
}

# --pos: the form of its bias in the tensor-core kernels (None: portable kernels)
BIASES = {"none": "none", "learned": "none", "sinusoidal": "none", "rope": "none", "ssmax": "none", "alibi": "linear",
          "cable": "distance", "cable_nw": "distance", "cable_v1": "distance", "fox": "distance",
          "kcable": "log", "kcable_nw": "log", "kcable_v1": "log",
          "t5": "toeplitz", "t5_clip": "toeplitz", "kerple": "toeplitz", "kerple_power": "toeplitz", "bam": "toeplitz",
          "fire": "fire", "sandwich": "toeplitz", "alibi_trained": "toeplitz", "alibi_random": "linear", "cope": None,
          "cable_signed": None, "grape_q": "distance", "grape_k": None, "grape_qk": None}
# tensors that the encoding has for the whole model; their elements are few but for wpe's
OWN_TENSORS = {"learned": 1, "t5": 1, "t5_clip": 1, "kerple": 2, "kerple_power": 2, "fire": 6, "ssmax": 1,
               "alibi_trained": 1, "cope": 1, "bam": 2}
# short kernels of the encodings: calls of a forward and backward, and of each layer in it
SHORT_KERNELS = {
    "alibi": {"alibi_slopes_kernel": (1, 0)},
    "alibi_random": {"alibi_random_kernel": (1, 0)},
    "alibi_trained": {"alibi_slopes_kernel": (1, 0), "toeplitz_fill_kernel": (0, 1),
                      "toeplitz_gradient_kernel": (0, 1)},
    "rope": {"rope_table_kernel": (1, 0)},
    "t5": {"toeplitz_fill_kernel": (1, 0), "t5_backward_kernel": (0, 1)},
    "kerple": {"toeplitz_fill_kernel": (0, 1), "toeplitz_gradient_kernel": (0, 2)},
    "sandwich": {"sandwich_table_kernel": (1, 0)},
    "fire": {f"fire_{name}_kernel": (0, 1) for name in ("forward", "breaks", "slopes", "reduce", "backward")},
}
SHORT_KERNELS.update(t5_clip=SHORT_KERNELS["t5"], kerple_power=SHORT_KERNELS["kerple"], bam=SHORT_KERNELS["kerple"])

# what the trainer was told: --recompute; products: of RATES, "tuned" by --plans
Code = collections.namedtuple("Code", "recompute products", defaults=(0, "tensor"))


# ----------------------------------------------------------------------------------------------------------
# shapes

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

# calls: in a step. The rest is of one call: bytes beyond the L2, FLOPs on the tensor cores, instructions of all
# threads, (least, most) TFLOP/s of attention, seconds of a chain. memory: of RATES. shape: M x N x K of a product, *
# for the tokens. waste: FLOPs of whole tiles, on all SMs, for each that is wanted
Row = collections.namedtuple("Row", "group kernel what calls bytes flops instructions rates seconds memory shape waste",
                             defaults=(0, 0, 0, None, 0, "stream", "-", 1.0))
row = Row


def ends(r, gpu, code):
    """the shortest and the longest time of a call, and what limits it"""
    limits = {}

    def add(name, amount, least, most):
        if amount:
            limits[name] = (amount / most, amount / least)
    tensor, memory, issue = RATES[code.products], RATES[r.memory], RATES["issue"]
    if r.rates:
        add("attention", r.flops / 1e12, *r.rates)
    else:
        peak = gpu.tflops * 1e12 * PRODUCT * gpu.fed
        add("tensor", r.flops * r.waste, peak * tensor.least, peak * tensor.most)
    add("memory", r.bytes, *(gpu.gbs * 1e9 * COPY * x for x in memory[:2]))
    add("issue", r.instructions / 32, *(gpu.sms * 4 * gpu.ghz * 1e9 * x for x in issue[:2]))
    add("latency", r.seconds, 1, 1)
    limit = max(limits, key=lambda name: sum(limits[name]), default="latency")
    gap = LAUNCH if r.kernel != "(host)" else 0.0
    return [seconds + gap for seconds in limits.get(limit, (0.0, 0.0))], limit


def seconds_of(r, gpu, code):
    """the time of a call, the middle of its range, and what limits it"""
    times, limit = ends(r, gpu, code)
    return sum(times) / 2, limit


def chunk_of(s):
    """rows that the head takes at a time: logit_rows() of llmc/engine/model.cuh"""
    N, most = s.B * s.T, (256 << 20) // s.Vp
    return N if N <= most else math.ceil(math.ceil(N / math.ceil(N / (most // 128 * 128))) / 128) * 128


def chunks_of(s):
    return math.ceil(s.B * s.T / chunk_of(s))


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
        head = name == "wte"
        calls = chunks_of(s) if head else times
        n = N / calls if head else N
        tall = chunk_of(s) if head else N                               # all but the last
        operands = 2 * (n * inp + out * inp + n * out)
        added = 2 * n * out if name in ("attprojw", "fcprojw") else 0   # the residual stream
        gradient = 2 * n * (inp + out) + 2 * 4 * out * inp              # it is added to
        flops = 2 * n * out * inp
        for what, bytes, shape, waste in (
                ("forward", operands + added, f"*x{out}x{inp}", waste_of(tall, out, gpu)),
                ("dinp", operands, f"*x{inp}x{out}", waste_of(tall, inp, gpu) * math.ceil(out / 64) * 64 / out),
                ("dweight", gradient, f"{out}x{inp}x*", waste_of(out, inp, gpu, True))):
            rows.append(row("GEMM", "matmul_kernel", f"{name} {what}", calls, bytes, flops, shape=shape, waste=waste))
    return rows


def attention_rates(kind, HS, T, gpu):
    """(least, most) TFLOP/s, forward and backward"""
    h100 = GPUS["H100"]
    speed = gpu.sms * gpu.ghz * gpu.mma / (h100.sms * h100.ghz * h100.mma) * (T / (T + 340)) / (1024 / (1024 + 340))
    return [(least * speed * share, most * speed * share)
            for (least, most), share in zip(ATTENTION.values(), SHARES[HS][kind])]


def flash_rows(s, gpu):
    HS, N, BNH = s.C // s.NH, s.B * s.T, s.B * s.NH
    kind = BIASES[s.pos]
    tiles = math.ceil(s.T / 64)
    forward, backward = attention_rates(kind, HS, s.T, gpu)
    per_block = 2 if HS == 64 else 1                                    # tiles of queries
    # K and V of all heads between two visits, or of a group: beyond the L2, each tile of queries reads them again
    reuse = 4.0 * s.T * HS * min(max(1, TOGETHER * per_block // tiles), BNH)
    again = (tiles / per_block + 1) / 2 if reuse > gpu.l2 else 1
    half = 1 + 16 / (2 * HS) if s.OC % 16 else 1                        # every second row half a sector off
    x, q = 2.0 * N * s.C, 2.0 * N * s.C * half                          # an array of bf16; a third of qkv
    per_query = 16.0 * N * s.NH
    product = s.B * s.NH * s.T * (s.T + 1) * HS                         # FLOPs of one of the seven products and two
    extra = 3 if kind in ("distance", "log") else 1                     # flash_variants
    slab = 4.0 * BNH * tiles * (tiles + 1) * 64 if kind == "toeplitz" else 0
    slabs = max(32, 2 * math.ceil(512 / BNH)) if slab else tiles        # flash_slabs of flash/backward.cuh
    parts = math.ceil(tiles / slabs)                                    # launches of the dq kernel
    g = "attention"
    rows = [row(g, "flash_forward_kernel", kind, s.L, q + 2 * q * again + x + per_query / 4,
                2 * product, rates=forward),
            row(g, "flash_backward_prepare_kernel", "row sums of dout * out", s.L, 2 * x + extra * per_query),
            row(g, "flash_backward_dkdv_kernel", kind, s.L, 4 * q + (q + x + per_query) * again,
                4 * product, rates=backward),
            row(g, "flash_backward_dq_kernel", kind, s.L * parts,
                (2 * q + x + 2 * q * again + per_query + slab) / parts, 3 * product / parts, rates=backward)]
    if slab:
        rows.append(row(g, "flash_backward_table_kernel", "diagonals", s.L * parts, slab / parts))
    if kind == "fire":
        rows.append(row(g, "fire_pieces_kernel", "", s.L, 16.0 * 33 * s.NH))
        rows.append(row(g, "flash_backward_fire_kernel", "sums of blocks", s.L, 8.0 * BNH * tiles * 33 * 4))
    return rows


def attention_rows(s, gpu):
    HS, N = s.C // s.NH, s.B * s.T
    if BIASES[s.pos] is not None and HS in SHARES:
        return flash_rows(s, gpu)
    pairs = s.B * s.NH * s.T * (s.T + 1) / 2
    at = lambda flops: flops / (256 * gpu.sms * gpu.ghz * 1e9 * PORTABLE)
    moved = 2.0 * N * s.C
    forward, backward = 4 * pairs * HS, 10 * pairs * HS
    return [row("attention", "attention_forward_kernel", "portable", s.L, 4 * moved, seconds=at(forward)),
            row("attention", "attention_backward_kernel", "portable", s.L, 8 * moved, seconds=at(backward))]


def short_rows(s):
    """some read the gradients of a table of distances; for the rest only the launch counts"""
    tables = 4.0 * s.B * s.NH * (2 * s.T + 256)
    reads = {"t5_backward_kernel": tables, "toeplitz_gradient_kernel": tables}
    return [row("rest", kernel, "", once + each * s.L, reads.get(kernel, 0))
            for kernel, (once, each) in SHORT_KERNELS.get(s.pos, {}).items()]


def encoding_rows(s, gpu):
    N, g = s.B * s.T, "rest"
    if s.pos.startswith("grape"):
        gates = 4.0 * N * s.NH * EXTRA_COLUMNS[s.pos]
        return [row(g, "grape_forward_kernel", "", s.L * EXTRA_COLUMNS[s.pos], 2 * gates),
                row(g, "grape_backward_kernel", "", s.L * EXTRA_COLUMNS[s.pos], 2 * gates)]
    if s.pos in EXTRA_COLUMNS:
        # an SM has 16 blocks of 128 threads, or 8 of 256; one block per head
        chain, back = (math.ceil(s.T / 128) * CHAIN[way] * math.ceil(s.B * s.NH / (blocks * gpu.sms))
                       for way, blocks in (("chunk", 16), ("back", 8)))
        moved = 32.0 * N * math.ceil(4 * s.NH / 32) + 8.0 * N * s.NH
        return [row(g, "cable_forward_kernel", "S, g", s.L, moved, seconds=chain),
                row(g, "cable_backward_kernel", "dz, du", s.L, 2 * moved, seconds=back)]
    if s.pos == "rope":
        return [row(g, "rope_kernel", "q, k and back", 2 * s.L, 8.0 * N * s.C)]
    if s.pos == "ssmax":
        return [row(g, "ssmax_forward_kernel", "q", s.L, 4.0 * N * s.C),
                row(g, "ssmax_backward_kernel", "dq, dots", s.L, 6.0 * N * s.C + 4.0 * N * s.NH),
                row(g, "ssmax_gradient_kernel", "ds", s.L, 4.0 * N * s.NH, seconds=CHAIN["dots"] * math.ceil(N / 1024))]
    if s.pos == "cope":                             # of 64 positions: q times their embeddings, twice; back into both
        z, e = 4.0 * N * s.NH * 64, s.C // s.NH * 64
        pairs = N * s.NH * e
        return [row(g, "cope_forward_kernel", "q.e", 2 * s.L, 2.0 * N * s.C + z, instructions=4 * pairs),
                row(g, "cope_dq_kernel", "", s.L, 4.0 * N * s.C + z, instructions=3 * pairs),
                row(g, "cope_de_kernel", "sequence by sequence", s.L, 2.0 * N * s.C + z, instructions=6 * pairs),
                row(g, "cope_reduce_kernel", "", s.L, 4.0 * s.B * s.NH * e)]
    if s.pos in ("learned", "sinusoidal"):
        rows = [row(g, f"{s.pos}_forward_kernel", "a row per position", 1, 4.0 * N * s.C)]
        return rows + [row(g, "learned_backward_kernel", "", 1, 2.0 * N * s.C)] * (s.pos == "learned")
    return []


def layer_rows(s, code):
    """what a layer does beside products and attention"""
    N, calls = s.B * s.T, 2 * s.L + 1
    x, wide = 2.0 * N * s.C, 4 * N * s.C                                # bytes, elements
    slabs = min(math.ceil(N / 32), 1024)                                # MAX_SLABS of llmc/base/reduce.cuh
    forward, backward = (INSTRUCTIONS[f"gelu_{way}_kernel"] * wide for way in ("forward", "backward"))
    rows = [row("layernorm forward", "layernorm_forward_kernel", "", calls + 2 * s.L * (code.recompute > 1), 2 * x,
                memory="rows"),
            row("layernorm backward", "layernorm_backward_kernel", "", calls, 4 * x + 8.0 * slabs * s.C,
                memory="warps"),
            row("layernorm backward", "add_slabs_kernel", "of layernorm", 2 * calls, 4.0 * slabs * s.C,
                seconds=CHAIN["slabs"])]
    again = s.L * (code.recompute > 0)
    rows += [row("GELU", "gelu_forward_kernel", "", s.L + again, 4.0 * wide, instructions=forward),
             row("GELU", "gelu_backward_kernel", "and fcb's sums", s.L, 6.0 * wide + 16.0 * slabs * s.C,
                 instructions=backward)]
    for name, (times, out, _) in products(s).items():
        bias = name[:-1] + "b"
        if name not in ("wte", "fcw"):
            rows.append(row("bias gradients", "slab_sums_kernel", bias, times, 2.0 * N * out + 4.0 * slabs * out,
                            memory="warps"))
        if name != "wte":
            rows.append(row("bias gradients", "add_slabs_kernel", bias, times, 4.0 * slabs * out,
                            seconds=CHAIN["slabs"]))
    return rows


def ends_rows(s):
    """the embedding, the loss, and what a micro-batch does once"""
    N = s.B * s.T
    x = 2.0 * N * s.C
    chunks = chunks_of(s)
    groups = s.V * (1 - math.exp(-N / s.V))                             # distinct tokens, were all equally frequent
    logits = float(N) * s.Vp / chunks
    # one read and the write go to memory; a block's row stays in the L2 between its passes
    issue = INSTRUCTIONS["classifier_kernel"] * logits
    chain, parts = HOT * N, []
    if chain > HOT_PART:
        sums = 4.0 * HOTS * N / HOT_PART * s.C                     # written, and then read
        parts = [row("rest", "embedding_hot_kernel", "sums of parts", 1, sums,
                     seconds=math.ceil(chain / HOT_PART) * CHAIN["row"])]
        chain = HOT_PART
    return [row("rest", "embedding_forward_kernel", "", 1, 2 * x),
            row("classifier", "classifier_kernel", "", chunks, 4.0 * logits, instructions=issue),
            row("rest", "loss_sum_kernel", "", 1, 4.0 * N, seconds=CHAIN["loss"] * math.ceil(N / 1024)),
            row("rest", "memset", "dresidual", 1, x),
            row("rest", "embedding_backward_kernel", "", 1, x + 8.0 * groups * s.C,
                seconds=chain * CHAIN["row"])] + parts


def step_rows(s, code, gpu, micro_batches=1):
    rows = product_rows(s, gpu) + attention_rows(s, gpu) + layer_rows(s, code) + encoding_rows(s, gpu)
    rows += short_rows(s)
    rows = [r._replace(calls=r.calls * micro_batches) for r in rows + ends_rows(s)]
    leaves, n = math.gcd(micro_batches, 8), float(elements(s))          # as plan_leaves()
    blocks = s.L + 1 + (s.pos in OWN_TENSORS)                           # of the layout, without empty ones
    rows += [row("optimizer", "memset", "gradients", leaves, 4 * n),
             row("optimizer", "norm_kernel", "", blocks, 4 * n / blocks),
             # gradient, master, m, v are read; master, m, v and the bf16 weights are written
             row("optimizer", "adamw_kernel", "", 1, 30 * n, memory="states"),
             row("rest", "(host)", "end of the step", 1, seconds=CHAIN["host"])]
    if leaves > 1:                                  # the last leaf's gradient is added a block at a time
        whole = sum((i ^ (i + 1)).bit_length() - 1 for i in range(leaves - 1))
        calls = whole + (leaves - 1 - whole) * blocks
        rows.append(row("optimizer", "add_to_kernel", "sums of leaves", calls, 12 * n * (leaves - 1) / calls))
    return rows


def range_of(rows, gpu, code):
    """(least, middle, most) ms of all rows. Rows with the same rates err together, other rows independently."""
    middle, errors = 0.0, collections.Counter()
    for r in rows:
        (shortest, longest), limit = ends(r, gpu, code)
        middle += r.calls * (shortest + longest) / 2 * 1e3
        errors[limit, r.memory if limit == "memory" else ""] += r.calls * (longest - shortest) / 2 * 1e3
    error = math.sqrt(sum(e * e for e in errors.values()))
    return middle - error, middle, middle + error


# ----------------------------------------------------------------------------------------------------------
# what is printed

def print_table(rows, gpu, code):
    """MB and GFLOP are of a call; ms, their range and share of all its calls in a step"""
    print(f"{'kernel':30} {'what':24} {'calls':>5} {'MB':>9} {'GFLOP':>9} {'limit':>9} {'ms':>8} "
          f"{'least':>8} {'most':>8} {'share':>6}")
    whole = range_of(rows, gpu, code)[1]
    for r in rows:
        times, limit = ends(r, gpu, code)
        least, most = (1e3 * r.calls * seconds for seconds in times)
        ms = (least + most) / 2
        print(f"{r.kernel:30} {r.what:24} {r.calls:5} {r.bytes / 1e6:9.1f} {r.flops / 1e9:9.1f} {limit:>9} {ms:8.3f} "
              f"{least:8.3f} {most:8.3f} {100 * ms / whole:5.1f}%")


def assumptions(gpu_name, gpu, s, code):
    """yields lines"""
    yield "A PREDICTION, not a measurement, by rates that one H100 has shown"
    yield (f"commit {commit()}, {gpu_name}: {gpu.tflops:g} TFLOP/s bf16, {gpu.gbs:g} GB/s ({gpu.source}), of which a "
           f"large product reaches {gpu.tflops * PRODUCT * gpu.fed:.0f} and a copy {gpu.gbs * COPY:.0f}; {gpu.sms} SMs "
           f"at {gpu.ghz:g} GHz, {gpu.l2 / 1e6:g} MB of L2, mma.sync {gpu.mma} FLOPs per SM and clock")
    yield f"L {s.L}, NH {s.NH}, C {s.C}, OC {s.OC}, V {s.V:,} padded to {s.Vp:,}, B {s.B}, T {s.T}, {s.pos}, bf16"
    yield f"recompute {code.recompute}; products: {code.products}"
    for name, rate in RATES.items():
        yield f"{name}: {rate.least:g} to {rate.most:g} {rate.what}"
    if BIASES[s.pos] is not None and s.C // s.NH in SHARES:
        each = zip(ATTENTION, attention_rates(BIASES[s.pos], s.C // s.NH, s.T, gpu))
        yield "attention: " + ", ".join(f"{way} {least:.0f} to {most:.0f} TFLOP/s" for way, (least, most) in each)
    yield (f"between kernels {LAUNCH * 1e6:g} us; the portable attention reaches {PORTABLE:g} of the float32 peak; "
           "chains: " + ", ".join(f"{name} {seconds * 1e6:g} us" for name, seconds in CHAIN.items()))
    for name, count in INSTRUCTIONS.items():
        yield f"{name}: {count:g} instructions per element"


def summary(s, rows, gpu, code, micro_batches):
    """yields lines: ms by group, and what follows from the step's"""
    groups = {}
    for r in rows:
        groups.setdefault(r.group, []).append(r)
    ranges = {group: range_of(each, gpu, code) for group, each in groups.items()}
    ranges["step"] = range_of(rows, gpu, code)
    for group, (least, ms, most) in sorted(ranges.items(), key=lambda item: (item[0] == "step", -item[1][1])):
        yield f"{group:20} {ms:8.2f} ms, {least:6.1f} to {most:6.1f} {100 * ms / ranges['step'][1]:5.1f} %"
    for what, ms in zip(("at best", "middle", "at worst"), ranges["step"]):
        tokens = s.B * s.T * micro_batches / ms * 1e3
        yield (f"{'predicted, ' + what:20} {tokens:9,.0f} tokens/s, MFU "
               f"{100 * tokens * token_flops(s) / (gpu.tflops * 1e12):.1f} %")


def measured(path):
    """(kernel, shape) -> calls, ms: the last table of --profile in what a trainer printed"""
    try:
        with open(path) as f:
            text = f.read()
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}")
    table = text.rpartition("\nprofile of step ")[2] if "profile of step " in text else ""
    found = re.findall(r"^(\S+) +(-|\d+x\d+x\d+) +(\d+|-) +(-?[\d.]+) +-?[\d.]+% ", table, re.M)
    if not found:
        raise BadInput(f"--measured {path}: expected the output of a run with --profile, got no table in it")
    return {(kernel, shape): (0 if calls == "-" else int(calls), float(ms)) for kernel, shape, calls, ms in found}


def compared(rows, gpu, code, profile):
    """(kernel, shape) -> calls and ms predicted, calls and ms measured, bytes and FLOPs of all calls; a product that
    is measured counts for the one that is predicted with its shape"""
    table = {}
    for r in rows:
        entry = table.setdefault((r.kernel, r.shape), [0, 0.0, 0, 0.0, 0, 0])
        ms = 1e3 * seconds_of(r, gpu, code)[0]
        for k, each in (0, 1), (1, ms), (4, r.bytes), (5, r.flops):
            entry[k] += r.calls * each
    for (kernel, shape), (calls, ms) in profile.items():
        M, N, K = shape.split("x") if "x" in shape else ("-",) * 3
        names = [(kernel, s) for s in (f"*x{N}x{K}", f"{M}x{N}x*", shape) if (kernel, s) in table]
        entry = table.setdefault(names[0] if names else (kernel, shape), [0, 0.0, 0, 0.0, 0, 0])
        entry[2] += calls
        entry[3] += ms
    return table


def comparison(rows, gpu, code, profile):
    """yields lines"""
    yield (f"{'kernel':30} {'M x N x K':>18} {'calls':>6} {'found':>6} {'predicted':>10} {'measured':>9} {'error':>7} "
           f"{'GB/s':>7} {'TFLOP/s':>8}")
    for (kernel, shape), (calls, ms, found, took, bytes, flops) in compared(rows, gpu, code, profile).items():
        error = f"{100 * (ms / took - 1):+.0f}%" if took > 0 and ms > 0 else "-"
        per_ms = lambda amount: amount / took / 1e6 if took > 0 else 0.0
        yield (f"{kernel:30} {shape:>18} {calls:6} {found:6} {ms:10.3f} {took:9.3f} {error:>7} {per_ms(bytes):7.0f} "
               f"{per_ms(flops) / 1e3:8.1f}")


# ----------------------------------------------------------------------------------------------------------

def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    whole = lambda name, default, what: p.add_argument(name, type=int, default=default, help=f"{what} [{default}]")
    p.add_argument("--model", default="small", help="a size by name, or L,NH,C [small]")
    p.add_argument("--pos", default="cable", choices=sorted(BIASES), help="positional encoding [cable]")
    whole("--T", 1024, "tokens in a sequence")
    whole("--B", 64, "sequences in a micro-batch")
    whole("--micro_batches", 1, "in a step")
    p.add_argument("--gpu", default="H200", choices=sorted(GPUS), help="[H200]")
    p.add_argument("--recompute", type=int, choices=(0, 1, 2), default=0, help="as the trainer's [0]")
    p.add_argument("--plans", action="store_true", help="tuned cuBLASLt algorithms, as with the trainer's --plans FILE")
    p.add_argument("--measured", metavar="FILE", help="what a run with --profile printed: beside the prediction")
    whole("--vocabulary", VOCABULARY, "tokens; 256 where a text is read as bytes")
    args = p.parse_args(argv)
    try:
        args.shape = SIZES.get(args.model) or tuple(int(n) for n in args.model.split(","))
    except ValueError:
        args.shape = ()
    positive = (*args.shape, args.T, args.B, args.micro_batches)
    if len(args.shape) != 3 or min(positive) <= 0 or args.shape[2] % args.shape[1]:
        raise BadInput("expected --model L,NH,C with C a multiple of NH, and positive numbers")
    return args


def report(args):
    gpu, code = GPUS[args.gpu], Code(args.recompute, "tuned" if args.plans else "tensor")
    s = shape_of(args.shape, args.B, args.T, args.pos, args.vocabulary)
    rows = step_rows(s, code, gpu, args.micro_batches)
    for line in assumptions(args.gpu, gpu, s, code):
        print("# " + line)
    print_table(rows, gpu, code)
    for line in summary(s, rows, gpu, code, args.micro_batches):
        print("# " + line)
    for line in comparison(rows, gpu, code, measured(args.measured)) if args.measured else ():
        print(line)


def main(argv):
    report(parse(argv))


if __name__ == "__main__":
    console.run(main)
