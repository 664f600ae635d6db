#!/usr/bin/env python3
"""bench.py -- causal attention with CABLE's bias, from q, k, v, z and u, by dev/torch/cable_torch.py and in PyTorch.

    dev/torch/bench.py [--device cuda] [--lengths 1024,4096,16384] [--ways kernels,bias,columns,flex,...]

Prints a JSON object for each length and way, measured in a process of its own: milliseconds of the forward and of the
backward (the median of 5, of 1 at 16,384 on a CPU, where it is the time of one thread), and the memory that both take
beyond the inputs. One sequence; heads of 64: one in float32 on a CPU, 12 in bf16 on a GPU. z is so small that no tile
can be skipped. bias: SDPA with a T x T bias; columns: SDPA with eight more columns; flex: FlexAttention, compiled,
which has no backward on a CPU; kernels_compiled, bias_compiled: under torch.compile.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
HS = 64


def attention(way, device):
    """f(q, k, v, z, u)"""
    import torch
    import torch.nn.functional as F
    import cable_torch
    from gpu_bench_pytorch import flex, with_columns
    by_flex = flex(device, compiled=True) if way == "flex" else None

    def run(q, k, v, z, u):
        if way == "kernels":
            return cable_torch.cable_attention(q, k, v, z, u)
        S, g = F.relu(z.float()).cumsum(-1), F.softplus(u.float())
        if way == "flex":
            return by_flex(q, k, v, S, g)
        if way == "columns":
            wide = with_columns(q, k, v, S, g, HS ** -0.5)
            return F.scaled_dot_product_attention(*wide, is_causal=True, scale=HS ** -0.5)[..., :HS]
        bias = -g[..., None] * (S[..., None] - S[..., None, :])
        later = bias.new_ones(bias.shape[-2:], dtype=bool).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(later, float("-inf")).to(q.dtype))
    if way.endswith("_compiled"):
        way = way[:-len("_compiled")]
        return torch.compile(run)
    return run


def resident(field):
    """kB of this process: VmRSS, or VmHWM, its peak"""
    with open("/proc/self/status") as f:
        return int(re.search(field + r":\s+(\d+)", f.read())[1])


def measure(way, T, device):
    import torch
    cuda, draw = device == "cuda", torch.Generator().manual_seed(1)
    torch.set_num_threads(1)
    NH, dtype = (12, torch.bfloat16) if cuda else (1, torch.float32)
    inputs = [(factor * torch.randn(1, NH, T, *more, generator=draw)).to(device, dtype)
              for more, factor in (((HS,), 1), ((HS,), 1), ((HS,), 1), ((), 1e-3), ((), 1))]
    for x in inputs:
        x.requires_grad_(cuda or way != "flex")
    f, dout = attention(way, device), torch.ones_like(inputs[0])

    def clock():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if cuda else time.process_time()

    def step():
        start = clock()
        out = f(*inputs)
        between = clock()
        if out.requires_grad:
            torch.autograd.grad(out, inputs, dout)
        return 1e3 * (between - start), 1e3 * (clock() - between)
    f(*(x[:, :, :128] for x in inputs))             # loads
    if way == "flex" or way.endswith("_compiled"):
        step()                                      # compiles
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")                         # VmHWM starts again
    before = torch.cuda.memory_allocated() >> 10 if cuda else resident("VmRSS")
    times = [step()]
    peak = torch.cuda.max_memory_allocated() >> 10 if cuda else resident("VmHWM")
    if cuda or T <= 4096:
        times = [step() for _ in range(5)]
    forward, backward = (round(statistics.median(t[n] for t in times), 2) for n in (0, 1))
    print(json.dumps({"key": f"{way} T{T} {device}", "forward_ms": forward, "backward_ms": backward,
                      "mib": (peak - before) >> 10}), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--lengths", default="1024,4096,16384")
    p.add_argument("--ways", default="kernels,bias,columns,flex")
    p.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    cases = [(T, way) for T in args.lengths.split(",") for way in args.ways.split(",")]
    if args.measure:
        return measure(args.ways, int(args.lengths), args.device)
    for T, way in cases:
        done = subprocess.run([sys.executable, __file__, "--measure", "--device", args.device, "--lengths", T, "--ways",
                               way], stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            print(f"{way} T{T}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
