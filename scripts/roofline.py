#!/usr/bin/env python3
"""roofline.py -- predicts the time of a training step of train_gpt2cu, kernel by kernel: a model, not a measurement.

    scripts/roofline.py --model small --T 1024 --B 64 --pos cable --gpu H200 -o roofline
    scripts/roofline.py --with all                what the changes of CHANGES would save, and the step with all of them
    scripts/roofline.py --references              the model against the figures that its constants were fitted to
    scripts/roofline.py --measured FILE ...       beside what ./train_gpt2cu --profile 3 ... printed into FILE

Each kernel has a row: how often a step calls it, what a call reads and writes beyond the L2 cache, its floating-point
operations, and which limit its time follows from:

    tensor     FLOPs over the tensor cores' peak           memory     bytes over the bandwidth of the datasheet
    issue      instructions over 4 warps per SM and clock  pipe       clocks of the tensor-core attention's tiles
    latency    a chain of dependent loads, or the host

Each limit is reached to a stated fraction (FRACTIONS). Shapes are read from the table of tensors in train_gpt2.cu;
sizes by name and the layout's arithmetic are those of scaling.py. -o PATH writes PATH.csv and PATH.png (which needs
matplotlib). What it leaves out: other GPUs (scaling.py has the exchange), checkpoints, evaluation, --tile_skip.
"""
import argparse
import collections
import csv
import math
import os
import re
import subprocess
import sys

import console
import scaling

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
VOCABULARY = 50257

# ----------------------------------------------------------------------------------------------------------
# the GPUs. tflops, gbs: datasheets, dense bf16 with float32 sums, and the memory's GB/s. ghz: assumed under load; the
# tensor peak belongs to the clock in GPU_RATES of llmc/base/gpu.h. mma: FLOPs of mma.sync per SM and clock, which a
# Hopper GPU issues at 62.5 % of wgmma's rate (a B200's was taken for the same). fed: how much nearer to its peak a
# product comes than on an H100; fitted for the A100 to the 300 ms of llm.c's run_gpt2_124M.sh, a guess for the 4090.
Gpu = collections.namedtuple("Gpu", "tflops gbs sms ghz mma l2 fed source")
GPUS = {
    "A100": Gpu(312, 2039, 108, 1.41, 2048, 40e6, 1.15, "NVIDIA A100 80GB SXM datasheet"),
    "H100": Gpu(989.4, 3352, 132, 1.755, 2560, 50e6, 1.0, "NVIDIA H100 SXM5 datasheet"),
    "H200": Gpu(989.4, 4800, 132, 1.755, 2560, 50e6, 1.0, "NVIDIA H200 SXM datasheet"),
    "B200": Gpu(2250, 8000, 148, 1.85, 2560, 126e6, 1.0, "NVIDIA HGX B200 datasheet"),
    "4090": Gpu(165.2, 1008, 128, 2.52, 512, 72e6, 1.3, "NVIDIA Ada GPU architecture paper, appendix A"),
}
# What is reached of each limit. No GPU has confirmed one of them: they reproduce the figures of REFERENCES.
FRACTIONS = {
    "tensor": (0.65, "cuBLASLt's first heuristic; a product of K = 768 to 3,072"),
    "tuned": (0.68, "algorithms measured once and kept (the change `plans`)"),
    "issue": (0.86, "elementwise kernels that wait for instructions"),
    "pipe": (0.80, "of the clocks that the limiting pipe of a tile of attention needs"),
    "pipes": (0.70, "the same where several pipes are near their limits (the change `rows32`)"),
    "stream": (0.90, "elementwise kernels, 16 bytes a load"),
    "rows": (0.69, "one warp per row, three passes over it (layernorm_forward_kernel)"),
    "columns": (0.80, "2-byte loads down the columns (slab_sums_kernel)"),
    "lone_warps": (0.39, "8 warps per SM (layernorm_backward_kernel): 2.3 times the memory's time"),
    "four_warps": (0.85, "4 warps per block (the change `layernorm`)"),
    "states": (0.85, "seven arrays side by side (adamw_kernel)"),
    "library": (0.80, "llm.c's elementwise and row kernels (the reference only)"),
}
LAUNCH = 2e-6               # seconds between the end of a kernel and the next one's work
EXPOSED = 0.40              # share of attention's memory time that its tiles do not hide
CHAIN = {"chunk": 2.5e-6,   # a chunk of 128 tokens of cable_forward_kernel or cable_backward_kernel: scans, barriers
         "row": 0.12e-6,    # a row of dout that embedding_backward_kernel adds for a token, one after the other
         "loss": 0.6e-6,    # 1,024 losses of loss_sum_kernel
         "dots": 0.2e-6,    # 1,024 numbers of ssmax_gradient_kernel, four loads at a time
         "host": 1.0e-3}    # a step's end: the host waits, then reads and sorts the tokens of the next step
HOT = 0.038                 # share of the most frequent token: 2,500 of 65,536
HOTS = 0.44                 # of all that have more than 64 of 65,536, by Zipf's law
PORTABLE = 0.15             # of the float32 peak (256 FLOPs per SM and clock): attention's portable kernels, a guess

# Instructions per element in SASS for sm_90a (nvcc 13.0), counted at the sources of commit ff047c6; and in those with
# the change `fast_functions`, whose e^x is within 4 ulp. The classifier's go over three loops, and then over two.
INSTRUCTIONS = {
    "gelu_forward_kernel": (45.6, 19.6),
    "gelu_backward_kernel": (54.5, 28.8),
    "classifier_kernel": (75.2, 43.4),
}
# Upper bounds in TFLOP/s of full tiles on an H200 at 1.755 GHz, forward and backward (2.5 times the forward's FLOPs):
# from the clocks of the pipes of a tile (SASS). Shared memory limits all of them.
BOUND_CLOCK = 132 * 1.755e9
BOUNDS = {
    64: {"none": (380, 285), "linear": (357, 267), "distance": (357, 261), "log": (357, 235), "toeplitz": (339, 210),
         "fire": (315, 213)},
    128: {"none": (380, 234), "distance": (368, 225), "fire": (344, 205)},
}
# With 32 rows per warp, head size 64, as dev/sass_bound.py counts them; 128 keeps 16. The goal was 550, 400 for none
ROWS32 = {"none": (593, 424), "linear": (593, 385), "distance": (593, 350), "log": (461, 283), "toeplitz": (593, 292),
          "fire": (518, 247)}       # of its tiles without a break

# --pos: the form of its bias in the tensor-core kernels (None: portable kernels)
BIASES = {"none": "none", "learned": "none", "sinusoidal": "none", "rope": "none", "ssmax": "none", "alibi": "linear",
          "cable": "distance", "cable_nw": "distance", "cable_v1": "distance", "fox": "distance",
          "kcable": "log", "kcable_nw": "log", "kcable_v1": "log",
          "t5": "toeplitz", "t5_clip": "toeplitz", "kerple": "toeplitz", "kerple_power": "toeplitz", "fire": "fire",
          "sandwich": "toeplitz", "alibi_trained": "toeplitz", "alibi_random": "linear", "cope": None}
# tensors that the encoding has for the whole model; their elements are few but for wpe's
OWN_TENSORS = {"learned": 1, "t5": 1, "t5_clip": 1, "kerple": 2, "kerple_power": 2, "fire": 6, "ssmax": 1,
               "alibi_trained": 1, "cope": 1}
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
SHORT_KERNELS.update(t5_clip=SHORT_KERNELS["t5"], kerple_power=SHORT_KERNELS["kerple"])

# ----------------------------------------------------------------------------------------------------------
# the code: as it was when it was reviewed, and what changes have made and would make of it

Code = collections.namedtuple("Code", "functions recompute products norm order columns rows32 bias_pass gelu_bias "
                              "gelu_pass logit_reads first_beta adamw_launches hot_part")
TODAY = Code(functions=0,               # index into INSTRUCTIONS
             recompute=1,               # --recompute
             products="tensor",         # of FRACTIONS
             norm="lone_warps",         # likewise
             order=0,                   # 0: (batch, head) fastest; else so many blocks share as few heads as they can
             columns=8,                 # the width of a row of qkv is a multiple of it
             rows32=False,              # 128 queries per block, 32 rows per warp
             bias_pass=True,            # bias gradients read dout once more
             gelu_bias=False,           # but fcb's comes from GELU's backward
             gelu_pass=True,            # GELU is a kernel of its own, forwards and backwards
             logit_reads=3,             # passes of the classifier that read the logits
             first_beta=1,              # 0: the first product into a gradient overwrites it
             adamw_launches=0,          # 0: one for each tensor of each layer
             hot_part=0)                # 0: one block adds all rows of a token; else so many, and the sums are added
Change = collections.namedtuple("Change", "replaces low high why")      # low, high: ms saved of 143, by the review
CHANGES = {
    "fast_functions": Change(dict(functions=1), 8, 13, "exp, tanh and 1/x by ex2.approx and rcp.approx"),
    "block_order": Change(dict(order=512), 3, 7, "512 blocks share few heads, so that K and V stay in the L2"),
    "online_softmax": Change(dict(logit_reads=2), 0, 3, "the classifier's largest logit and its sum in one pass"),
    "no_recompute": Change(dict(recompute=0), 2, 3, "--recompute 0 where it fits"),
    "plans": Change(dict(products="tuned"), 3, 5, "tuned cuBLASLt plans: --plans FILE"),
    "layernorm": Change(dict(norm="four_warps"), 3, 3, "4 warps per block"),
    "columns64": Change(dict(columns=64), 0, 2, "rows of qkv start on a sector"),
    "rows32": Change(dict(rows32=True), 3, 6, "stage 1.5: 128-query blocks, 32 rows per warp"),
    "gelu_bias": Change(dict(gelu_bias=True), 1, 2, "the MLP's first bias gradient from GELU's backward"),
    "epilogues": Change(dict(bias_pass=False, gelu_pass=False, first_beta=0), 5, 8,
                        "GELU in the products, bias gradients fused"),
    "one_adamw": Change(dict(adamw_launches=1), 0.3, 0.7, "AdamW in one launch"),
    "hot_tokens": Change(dict(hot_part=64), 0.2, 0.4, "embedding_backward: frequent tokens by several blocks"),
}
# the names of CHANGES that the sources have: the default of --with
LANDED = ("fast_functions", "block_order", "layernorm", "online_softmax", "no_recompute", "plans", "rows32",
          "one_adamw", "hot_tokens")


def code_with(names):
    code = TODAY
    for name in names:
        code = code._replace(**CHANGES[name].replaces)
    return code


# ----------------------------------------------------------------------------------------------------------
# shapes

Shape = collections.namedtuple("Shape", "L NH C B T V Vp OC pos")


def shape_of(model, B, T, pos, V=VOCABULARY, columns=8):
    L, NH, C = model
    OC = math.ceil((3 * C + scaling.EXTRA_COLUMNS.get(pos, 0) * NH) / columns) * columns
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
# threads, clocks summed over the SMs, seconds of a chain. memory: of FRACTIONS. shape: M x N x K of a product, * for
# the tokens
Row = collections.namedtuple("Row", "group kernel what calls bytes flops instructions clocks seconds memory shape",
                             defaults=(0, 0, 0, 0, 0, "stream", "-"))
row = Row


def seconds_of(r, gpu, code):
    """the time of a call, and what limits it"""
    reached = lambda name: FRACTIONS[name][0]
    limits = {"tensor": r.flops / (gpu.tflops * 1e12 * gpu.fed * reached(code.products)),
              "memory": r.bytes / (gpu.gbs * 1e9 * reached(r.memory)),
              "issue": r.instructions / 32 / (gpu.sms * 4 * gpu.ghz * 1e9 * reached("issue")),
              "pipe": r.clocks / (gpu.sms * gpu.ghz * 1e9 * reached("pipes" if code.rows32 else "pipe")),
              "latency": r.seconds}
    limit = max(limits, key=limits.get)
    exposed = EXPOSED * limits["memory"] if r.clocks and limit == "pipe" else 0.0
    return limits[limit] + exposed + (LAUNCH if r.kernel != "(host)" else 0.0), limit


def chunks_of(s):
    """how many parts the head cuts the rows into: LOGITS_BOUND of llmc/model.cuh"""
    return math.ceil(s.B * s.T / ((256 << 20) // s.Vp))


def product_rows(s, code):
    """forward, back to the input, into the weight's gradient; the head does its three a chunk of logits at a time"""
    N, rows = s.B * s.T, []
    for name, (times, out, inp) in products(s).items():
        head = name == "wte"
        calls = chunks_of(s) if head else times
        n = N / calls if head else N
        operands = 2 * (n * inp + out * inp + n * out)
        added = 2 * n * out if name in ("attprojw", "fcprojw") else 0   # the residual stream
        gradient = 2 * n * (inp + out) + 4 * out * inp * (1 + code.first_beta)
        flops = 2 * n * out * inp
        of_gelu = {"fcw": 2 * n * out, "fcprojw": 2 * n * inp}          # what it reads or writes in the epilogues
        extra = 0 if code.gelu_pass else of_gelu.get(name, 0)
        for what, bytes, shape in (("forward", operands + added + extra, f"*x{out}x{inp}"),
                                   ("dinp", operands + extra, f"*x{inp}x{out}"),
                                   ("dweight", gradient, f"{out}x{inp}x*")):
            rows.append(row("GEMM", "matmul_kernel", f"{name} {what}", calls, bytes, flops, shape=shape))
    return rows


def tile_clocks(kind, HS, gpu, rows32):
    """clocks of a tile of 64 x 64 pairs, forward and backward: by the bound, or by mma.sync where that is slower"""
    none = BOUNDS[HS]["none"]
    scaled = (b * n / m for b, n, m in zip(BOUNDS[64][kind], none, BOUNDS[64]["none"]))
    bounds = BOUNDS[HS].get(kind) or tuple(scaled)
    if rows32 and HS == 64:
        bounds = ROWS32[kind]
    flops = 4 * 64 * 64 * HS                                            # two products; backward 5, of which 7 are done
    by_bound = [flops * f * BOUND_CLOCK / (b * 1e12) for f, b in zip((1, 2.5), bounds)]
    return [max(c, flops * f / gpu.mma) for c, f in zip(by_bound, (1, 3.5))]


def flash_rows(s, code, gpu):
    HS, N, BNH = s.C // s.NH, s.B * s.T, s.B * s.NH
    kind = BIASES[s.pos]
    tiles = math.ceil(s.T / 64)
    forward, backward = (BNH * tiles * (tiles + 1) / 2 * c for c in tile_clocks(kind, HS, gpu, code.rows32))
    per_block = 2 if code.rows32 and HS == 64 else 1                    # tiles of queries
    # K and V of all heads between two visits, or of a group: beyond the L2, each tile of queries reads them anew
    reuse = 4.0 * s.T * HS * (min(max(1, code.order * per_block // tiles), BNH) if code.order else BNH)
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
                2 * product, clocks=forward),
            row(g, "flash_backward_prepare_kernel", "row sums of dout * out", s.L, 2 * x + extra * per_query),
            row(g, "flash_backward_dkdv_kernel", kind, s.L, 4 * q + (q + x + per_query) * again,
                4 * product, clocks=backward * 4 / 7),
            row(g, "flash_backward_dq_kernel", kind, s.L * parts,
                (2 * q + x + 2 * q * again + per_query + slab) / parts, 3 * product / parts,
                clocks=backward * 3 / 7 / parts)]
    if slab:
        rows.append(row(g, "flash_backward_table_kernel", "diagonals", s.L * parts, slab / parts))
    if kind == "fire":
        rows.append(row(g, "fire_pieces_kernel", "", s.L, 16.0 * 33 * s.NH))
        rows.append(row(g, "flash_backward_fire_kernel", "sums of blocks", s.L, 8.0 * BNH * tiles * 33 * 4))
    return rows


def attention_rows(s, code, gpu):
    HS, N = s.C // s.NH, s.B * s.T
    if BIASES[s.pos] is not None and HS in BOUNDS:
        return flash_rows(s, code, gpu)
    pairs = s.B * s.NH * s.T * (s.T + 1) / 2
    at = lambda flops: flops / (256 * gpu.sms * gpu.ghz * 1e9 * PORTABLE)
    moved = 2.0 * N * s.C
    forward, backward = 4 * pairs * HS, 10 * pairs * HS
    return [row("attention", "attention_forward_kernel", "portable", s.L, 4 * moved, forward, seconds=at(forward)),
            row("attention", "attention_backward_kernel", "portable", s.L, 8 * moved, backward, seconds=at(backward))]


def short_rows(s):
    """some read the gradients of a table of distances; of the others only the launch counts"""
    tables = 4.0 * s.B * s.NH * (2 * s.T + 256)
    reads = {"t5_backward_kernel": tables, "toeplitz_gradient_kernel": tables}
    return [row("rest", kernel, "", once + each * s.L, reads.get(kernel, 0))
            for kernel, (once, each) in SHORT_KERNELS.get(s.pos, {}).items()]


def encoding_rows(s, gpu):
    N, g = s.B * s.T, "rest"
    if BIASES[s.pos] in ("distance", "log"):
        waves = math.ceil(s.B * s.NH / (16 * gpu.sms))                  # blocks of 128 threads, one per head
        chain = math.ceil(s.T / 128) * CHAIN["chunk"] * waves
        moved = 32.0 * N * math.ceil(4 * s.NH / 32) + 8.0 * N * s.NH
        return [row(g, "cable_forward_kernel", "S, g", s.L, moved, seconds=chain),
                row(g, "cable_backward_kernel", "dz, du", s.L, 2 * moved, seconds=chain)]
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
    x, wide = 2.0 * N * s.C, 4 * N * s.C
    slabs = min(math.ceil(N / 32), 1024)                                # MAX_SLABS of llmc/base/reduce.cuh
    forward, backward = (INSTRUCTIONS[f"gelu_{way}_kernel"][code.functions] * wide for way in ("forward", "backward"))
    rows = [row("layernorm forward", "layernorm_forward_kernel", "", calls + 2 * s.L * (code.recompute > 1), 2 * x,
                memory="rows"),
            row("layernorm backward", "layernorm_backward_kernel", "", calls, 4 * x + 8.0 * slabs * s.C,
                memory=code.norm),
            row("layernorm backward", "add_slabs_kernel", "of layernorm", 2 * calls, 4.0 * slabs * s.C)]
    if code.gelu_pass:
        again = s.L * (code.recompute > 0)
        rows += [row("GELU", "gelu_forward_kernel", "", s.L + again, 4.0 * wide, instructions=forward),
                 row("GELU", "gelu_backward_kernel", "", s.L, 6.0 * wide + 4.0 * slabs * 4 * s.C * code.gelu_bias,
                     instructions=backward)]
    else:                                                               # an epilogue's instructions are not hidden
        rows += [row("GELU", "(epilogue)", "forward", s.L, instructions=forward),
                 row("GELU", "(epilogue)", "backward", s.L, instructions=backward)]
    if code.bias_pass:
        for name, (times, out, _) in products(s).items():
            if name == "wte":
                continue
            if name != "fcw" or not code.gelu_bias:
                rows.append(row("bias gradients", "slab_sums_kernel", name[:-1] + "b", times,
                                2.0 * N * out + 4.0 * slabs * out, memory="columns"))
            rows.append(row("bias gradients", "add_slabs_kernel", name[:-1] + "b", times, 4.0 * slabs * out))
    return rows


def ends_rows(s, code):
    """the embedding, the loss, and what a micro-batch does once"""
    N = s.B * s.T
    x = 2.0 * N * s.C
    chunks = chunks_of(s)
    groups = s.V * (1 - math.exp(-N / s.V))                             # distinct tokens, were all equally frequent
    logits = float(N) * s.Vp / chunks
    # one read and the write go to memory; a block's row stays in the L2 between its passes
    issue = INSTRUCTIONS["classifier_kernel"][code.functions] * (0.4 + 0.2 * code.logit_reads) * logits
    chain, parts = HOT * N, []
    if code.hot_part and chain > code.hot_part:
        sums = 4.0 * HOTS * N / code.hot_part * s.C                     # written, and then read
        parts = [row("rest", "embedding_hot_kernel", "sums of parts", 1, sums,
                     seconds=math.ceil(chain / code.hot_part) * CHAIN["row"])]
        chain = code.hot_part
    return [row("rest", "embedding_forward_kernel", "", 1, 2 * x),
            row("classifier", "classifier_kernel", "", chunks, 4.0 * logits, instructions=issue),
            row("rest", "loss_sum_kernel", "", 1, 4.0 * N, seconds=CHAIN["loss"] * math.ceil(N / 1024)),
            row("rest", "memset", "dresidual", 1, x),
            row("rest", "embedding_backward_kernel", "", 1, x + 8.0 * groups * s.C,
                seconds=chain * CHAIN["row"])] + parts


def step_rows(s, code, gpu, micro_batches=1):
    rows = product_rows(s, code) + attention_rows(s, code, gpu) + layer_rows(s, code) + encoding_rows(s, gpu)
    rows += short_rows(s)
    rows = [r._replace(calls=r.calls * micro_batches) for r in rows + ends_rows(s, code)]
    leaves, n = scaling.leaves_of(micro_batches, 1), float(elements(s))
    table = tensors(s).values()
    blocks = s.L + 1 + (s.pos in OWN_TENSORS)                           # of the layout, without empty ones
    more = OWN_TENSORS.get(s.pos, 0) - (s.pos == "learned")
    launches = code.adamw_launches or sum(max(1, layers) for layers, _, _ in table) + more
    rows += [row("optimizer", "memset", "gradients", leaves, 4 * n),
             row("optimizer", "norm_kernel", "", blocks, 4 * n / blocks),
             # gradient, master, m, v are read; master, m, v and the bf16 weights are written
             row("optimizer", "adamw_kernel", "", launches, 30 * n / launches, memory="states"),
             row("rest", "(host)", "end of the step", 1, seconds=CHAIN["host"])]
    if leaves > 1:                                  # the last leaf's gradient joins the others' a block at a time
        whole = sum((i ^ (i + 1)).bit_length() - 1 for i in range(leaves - 1))
        calls = whole + (leaves - 1 - whole) * blocks
        rows.append(row("optimizer", "add_to_kernel", "sums of leaves", calls, 12 * n * (leaves - 1) / calls))
    return rows


def decode_rows(s, gpu):
    """a token after s.T others, one sequence: every weight and every cached key and value is read once"""
    HS, rows = s.C // s.NH, []
    for name, (times, out, inp) in products(s).items():
        rows.append(row("GEMM", "matmul_kernel", name, times, 2.0 * out * inp + 2.0 * (out + inp), 2.0 * out * inp))
    small = 4.0 * s.C
    return rows + [row("attention", "attention_decode_kernel", "", s.L, 4.0 * s.T * s.NH * HS),
                   row("attention", "attention_decode_combine_kernel", "", s.L, small),
                   row("rest", "decode_store_kernel", "the row of qkv", s.L, 4.0 * s.OC),
                   row("layernorm forward", "layernorm_forward_kernel", "", 2 * s.L + 1, small, memory="rows"),
                   row("GELU", "gelu_forward_kernel", "", s.L, 4 * small),
                   row("rest", "embedding_forward_kernel", "", 1, small)]


# ----------------------------------------------------------------------------------------------------------
# llm.c, by its own kernels (dev/cuda and llmc of that repository at 7ecd8906): the model's second reference

def llmc_rows(s, gpu):
    """GPT-2 124M by run_gpt2_124M.sh: -r 0, cuDNN's attention, a fused residual and layernorm, tanhf in GELU"""
    N, HS, calls = s.B * s.T, s.C // s.NH, 2 * s.L + 1
    x, wide, n = 2.0 * N * s.C, 4.0 * N * s.C, float(elements(s) + s.T * s.C)
    code = TODAY._replace(recompute=0)
    pairs = s.B * s.NH * s.T * s.T / 2
    # H100: 373 TFLOP/s without a mask at head size 64, T 1024 (FlashAttention-3, figure 5), 0.65 of it causal; backward
    # 0.8 of that. Otherwise 0.38 of the tensor peak, a guess
    rate = 373e12 * 0.65 if gpu.tflops == GPUS["H100"].tflops else 0.38e12 * gpu.tflops
    lib = dict(memory="library")
    rows = product_rows(s, code)
    rows += [row("attention", "cuDNN", "forward", s.L, seconds=4 * pairs * HS / rate),
             row("attention", "cuDNN", "backward", s.L, seconds=10 * pairs * HS / (0.8 * rate)),
             row("GELU", "gelu_forward", "", s.L, 2 * 2 * wide, instructions=40 * wide, **lib),
             row("GELU", "gelu_backward", "", s.L, 3 * 2 * wide, instructions=70 * wide, **lib),
             row("layernorm forward", "fused_residual_forward", "", calls, 4 * x, **lib),
             row("layernorm backward", "layernorm_backward", "", calls, 4 * x, **lib),
             row("classifier", "fused_classifier", "", 1, 3 * 2.0 * N * s.Vp, instructions=40.0 * N * s.Vp, **lib)]
    for name, (times, out, _) in products(s).items():
        if name != "wte":
            rows.append(row("bias gradients", "matmul_backward_bias", name, times, 2.0 * N * out, **lib))
    return rows + [row("optimizer", "adamw", "", 16, 28 * n / 16, **lib),
                   row("optimizer", "global_norm, memset", "", 2, 2 * n, **lib),
                   row("rest", "encoder_forward, encoder_backward", "", 3, 2 * x, **lib),
                   row("rest", "(host)", "end of the step", 1, seconds=CHAIN["host"])]


# ----------------------------------------------------------------------------------------------------------
# what the constants were fitted to: no measurement of this code is among them

# ms of a step of GPT-2 124M with cable at T 1024, B 64 on one H200, by a review of the sources and of the SASS at
# commit ff047c6; where it gave a range, the middle. The review's total is 143 (135 to 160).
REFERENCES = {"GEMM": 76, "attention": 28, "GELU": 14, "classifier": 9.5, "layernorm backward": 5.8,
              "bias gradients": 3.2, "layernorm forward": 1.6, "optimizer": 1.5, "rest": 2}
REFERENCE_TOTAL = 143
# llm.c on an H100, B 64, T 1024: 468 thousand tokens/s on one GPU. Ten billion tokens in 45 minutes on eight
# (KellerJordan/modded-nanogpt, README) are 463.
# A100: "~300 ms" for 524,288 tokens on eight, in the same repository's run_gpt2_124M.sh.
LLMC = {"H100": 1e3 * 65536 / 468e3, "A100": 300}


def totals(rows, gpu, code):
    """ms by group"""
    ms = collections.Counter()
    for r in rows:
        ms[r.group] += r.calls * seconds_of(r, gpu, code)[0] * 1e3
    return ms


def references():
    """yields (what, figure, prediction) for each reference"""
    s, gpu = shape_of(scaling.SIZES["small"], 64, 1024, "cable"), GPUS["H200"]
    ms = totals(step_rows(s, TODAY, gpu), gpu, TODAY)
    for group, figure in REFERENCES.items():
        yield group, figure, ms[group]
    yield "step", REFERENCE_TOTAL, sum(ms.values())
    s = shape_of(scaling.SIZES["small"], 64, 1024, "none")
    for name, figure in LLMC.items():
        yield f"llm.c, {name}", figure, sum(totals(llmc_rows(s, GPUS[name]), GPUS[name], TODAY).values())


# ----------------------------------------------------------------------------------------------------------
# what is printed

COLUMNS = ("kernel", "what", "group", "calls", "MB", "GFLOP", "limit", "ms", "share")


def table_of(rows, gpu, code):
    """COLUMNS of each row: MB and GFLOP are of a call, ms and share of all its calls in a step"""
    timed = [(r, *seconds_of(r, gpu, code)) for r in rows]
    whole = sum(r.calls * seconds for r, seconds, _ in timed)
    return [dict(kernel=r.kernel, what=r.what, group=r.group, calls=r.calls, MB=r.bytes / 1e6, GFLOP=r.flops / 1e9,
                 limit=limit, ms=r.calls * seconds * 1e3, share=r.calls * seconds / whole)
            for r, seconds, limit in timed]


def commit():
    """of the working tree; + where it has other changes"""
    ask = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    try:
        head = ask("rev-parse", "--short", "HEAD")
        if head.returncode == 0:
            changed = ask("status", "--porcelain", "-uno", ":!dev/results").stdout.strip()
            return head.stdout.strip() + ("+" if changed else "")
    except OSError:
        pass
    return "unknown"


def assumptions(gpu_name, gpu, s, code, changes):
    """yields lines"""
    yield "A PREDICTION, not a measurement: nothing of this has run on a GPU"
    yield (f"commit {commit()}, {gpu_name}: {gpu.tflops:g} TFLOP/s bf16, {gpu.gbs:g} GB/s ({gpu.source}); {gpu.sms} "
           f"SMs at {gpu.ghz:g} GHz, {gpu.l2 / 1e6:g} MB of L2, mma.sync {gpu.mma} FLOPs per SM and clock, products "
           f"{gpu.fed:g} times as near to the peak as on an H100")
    yield f"L {s.L}, NH {s.NH}, C {s.C}, OC {s.OC}, V {s.V:,} padded to {s.Vp:,}, B {s.B}, T {s.T}, {s.pos}, bf16"
    yield f"changes: {', '.join(changes) or 'none'}; recompute {code.recompute}"
    for name, (fraction, what) in FRACTIONS.items():
        yield f"reached of {name}: {fraction:g}; {what}"
    yield (f"between kernels {LAUNCH * 1e6:g} us; {EXPOSED:g} of attention's memory time is not hidden; the portable "
           f"attention reaches {PORTABLE:g} of the float32 peak")
    yield "chains: " + ", ".join(f"{name} {seconds * 1e6:g} us" for name, seconds in CHAIN.items())
    for name, counts in INSTRUCTIONS.items():
        yield f"{name}: {counts[code.functions]:g} instructions per element"


def summary(s, rows, gpu, code, micro_batches):
    """yields lines: ms by group, and what follows from the step's"""
    ms = totals(rows, gpu, code)
    whole = sum(ms.values())
    for group, value in ms.most_common():
        yield f"{group:20} {value:9.2f} ms {100 * value / whole:5.1f} %"
    tokens = s.B * s.T * micro_batches / whole * 1e3
    mfu = 100 * tokens * token_flops(s) / (gpu.tflops * 1e12)
    yield f"{'step':20} {whole:9.2f} ms, {tokens:,.0f} tokens/s, MFU {mfu:.1f} % (predicted)"
    parts = scaling.blocks((s.L, s.NH, s.C), s.V, s.pos, s.T)
    leaves = scaling.leaves_of(micro_batches, 1)
    yield f"parameters, moments and gradients: {scaling.memory(parts, s.L, 1, leaves, 2, 1) / 1e9:.2f} GB"


def savings(args, gpu):
    """yields lines: what each change saves alone and after those before it, beside the review's estimate"""
    def step(names):
        code = code_with(names)
        return sum(totals(step_rows(shape(args, code), code, gpu, args.micro_batches), gpu, code).values())
    first = before = step(())
    yield f"{'change':16} {'alone':>6} {'after':>6}  review     why"
    for k, (name, change) in enumerate(CHANGES.items(), 1):
        after = step(list(CHANGES)[:k])
        alone = first - step([name])
        yield f"{name:16} {alone:6.2f} {before - after:6.2f}  {change.low:g} to {change.high:<5g} {change.why}"
        before = after
    yield f"{'all':16} {'':6} {first - before:6.2f}  of {first:.2f} ms: {before:.2f} (predicted)"


def measured(path):
    """(kernel, shape) -> calls, ms: the last table of --profile in what a trainer printed"""
    try:
        with open(path) as f:
            text = f.read()
    except OSError as e:
        raise scaling.BadInput(f"{path}: {e.strerror}")
    table = text.rpartition("\nprofile of step ")[2] if "profile of step " in text else ""
    found = re.findall(r"^(\S+) +(-|\d+x\d+x\d+) +(\d+|-) +(-?[\d.]+) +-?[\d.]+% ", table, re.M)
    if not found:
        raise scaling.BadInput(f"--measured {path}: expected the output of a run with --profile, got no table in it")
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


def shape(args, code):
    return shape_of(args.shape, args.B, args.T, args.pos, args.vocabulary, code.columns)


def draw(bars, title, path):
    """bars: name -> ms by group"""
    console.need("matplotlib").use("Agg")
    plt = console.need("matplotlib.pyplot")
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000"]
    groups = list(dict.fromkeys(group for ms in bars.values() for group, _ in ms.most_common()))
    fig, ax = plt.subplots(figsize=(10, 1.6 + 0.6 * len(bars)))
    left = [0.0] * len(bars)
    for group, colour in zip(groups, colours):
        widths = [ms[group] for ms in bars.values()]
        ax.barh(list(bars), widths, left=left, color=colour, label=group)
        left = [a + b for a, b in zip(left, widths)]
    for at, whole in enumerate(left):
        ax.text(whole, at, f" {whole:.0f} ms", va="center")
    ax.set_xlim(0, 1.12 * max(left))
    ax.set_xlabel("ms of a step, predicted")
    ax.invert_yaxis()
    ax.legend(ncol=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    ax.set_title(title, fontsize=10)
    fig.savefig(path, dpi=100, bbox_inches="tight")


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
    p.add_argument("--recompute", type=int, choices=(0, 1, 2), help="as the trainer's [1]")
    p.add_argument("--with", dest="changes", default=",".join(LANDED), metavar="NAMES",
                   help="changes, joined by commas; all, or none: " + ", ".join(CHANGES))
    p.add_argument("--decode", action="store_true", help="a token that is generated after T others, instead of a step")
    p.add_argument("--references", action="store_true", help="the model against what its constants were fitted to")
    p.add_argument("--measured", metavar="FILE", help="what a run with --profile printed: beside the prediction")
    whole("--vocabulary", VOCABULARY, "tokens; 256 where a text is read as bytes")
    p.add_argument("-o", dest="out", default="", help="PATH.csv and PATH.png")
    args = p.parse_args(argv)
    names = {"all": list(CHANGES), "none": [], "": []}.get(args.changes, args.changes.split(","))
    unknown = [name for name in names if name not in CHANGES]
    if unknown:
        raise scaling.BadInput(f"expected --with all, none, or some of {', '.join(CHANGES)}; got {unknown[0]}")
    args.changes = names
    try:
        args.shape = scaling.SIZES.get(args.model) or tuple(int(n) for n in args.model.split(","))
    except ValueError:
        args.shape = ()
    positive = (*args.shape, args.T, args.B, args.micro_batches)
    if len(args.shape) != 3 or min(positive) <= 0 or args.shape[2] % args.shape[1]:
        raise scaling.BadInput("expected --model L,NH,C with C a multiple of NH, and positive numbers")
    return args


def report(args):
    gpu, code = GPUS[args.gpu], code_with(args.changes)
    if args.references:
        print("# what the constants were fitted to, ms: no measurement of this code is among them")
        for what, figure, predicted in references():
            print(f"{what:20} {figure:8.2f} predicted {predicted:8.2f} {predicted / figure - 1:+.1%}")
        return
    if args.recompute is not None:
        code = code._replace(recompute=args.recompute)
    s = shape(args, code)
    rows = decode_rows(s, gpu) if args.decode else step_rows(s, code, gpu, args.micro_batches)
    table = table_of(rows, gpu, code)
    for line in assumptions(args.gpu, gpu, s, code, args.changes):
        print("# " + line)
    print(f"{'kernel':30} {'what':24} {'calls':>5} {'MB':>9} {'GFLOP':>9} {'limit':>8} {'ms':>8} {'share':>6}")
    for r in table:
        print(f"{r['kernel']:30} {r['what']:24} {r['calls']:5} {r['MB']:9.1f} {r['GFLOP']:9.1f} {r['limit']:>8} "
              f"{r['ms']:8.3f} {100 * r['share']:5.1f}%")
    if args.decode:
        whole = sum(r["ms"] for r in table)
        print(f"# a token after {s.T} others, one sequence: {whole:.3f} ms, {1e3 / whole:,.0f} tokens/s (predicted)")
        return
    for line in [*summary(s, rows, gpu, code, args.micro_batches), *savings(args, gpu)]:
        print("# " + line)
    for line in comparison(rows, gpu, code, measured(args.measured)) if args.measured else ():
        print(line)
    if args.out:
        write(args, table, gpu, code)


def write(args, table, gpu, code):
    head = next(assumptions(args.gpu, gpu, shape(args, code), code, args.changes))
    with open(args.out + ".csv", "w", newline="") as f:
        f.write(f"# {head}; commit {commit()}, {args.gpu}, {args.model}, {args.pos}, T {args.T}, B {args.B}, changes: "
                f"{' '.join(args.changes) or 'none'}\n")
        out = csv.writer(f, lineterminator="\n")
        out.writerow(COLUMNS)
        out.writerows([f"{r[c]:.5g}" if isinstance(r[c], float) else r[c] for c in COLUMNS] for r in table)
    bars = {}
    for name, names in (("the code", args.changes), ("all changes", list(CHANGES))):
        with_them = code_with(names)
        rows = step_rows(shape(args, with_them), with_them, gpu, args.micro_batches)
        bars[name] = totals(rows, gpu, with_them)
    draw(bars, f"A prediction, not a measurement: a step of {args.model}, {args.pos}, T {args.T}, B {args.B} on one "
         f"{args.gpu}; commit {commit()}", args.out + ".png")


def main(argv):
    report(parse(argv))


if __name__ == "__main__":
    console.run(main)
