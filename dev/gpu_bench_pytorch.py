#!/usr/bin/env python3
"""gpu_bench_pytorch.py -- shapes of gpu_bench.cu in PyTorch, and compiled training steps of GPT-2.

    dev/gpu_bench_pytorch.py [--device cpu]                               attention
    dev/gpu_bench_pytorch.py --step B [--tokens SHARD] ...                a step of GPT-2 124M, B sequences of 1,024

Prints one JSON object per result. Attention is causal, in bf16: scaled_dot_product_attention by cuDNN and by flash
attention, and CABLE in the two ways that PyTorch has for it: FlexAttention with its bias, and SDPA with more columns.
Left of the query the bias -g_i (S_i - S_j) is g_i S_j and a constant of the row, which the softmax does not see: eight
more columns of q hold g in parts of bf16, those of k hold S. The columns are there before the clock starts.

The inputs are three sets of normal random numbers, used in turn; the time is the median of 50 repetitions after 10 to
warm up, measured by events. A training step is forward, backward, clipping and fused AdamW, in bf16 autocast under
torch.compile: the GPT-2 of dev/hf/modeling_cable.py, whose losses are the trainer's (test_gpu_bench_pytorch.py),
without positions and with CABLE in both ways. Where B sequences do not fit, a step takes them in equal parts. --device
cpu takes tiny shapes: it checks this program and measures nothing.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "hf"))
sys.path.append(os.path.join(HERE, "..", "data"))
import common  # noqa: E402
from modeling_cable import CableConfig, CableGPT2  # noqa: E402
from cable_encodings import alibi_slopes  # noqa: E402

WARM_UP, REPETITIONS, SETS = 10, 50, 3


def say(key, **record):
    print(json.dumps(dict(record, key=key)), flush=True)


class Timer:
    def __init__(self, device):
        self.cuda = device == "cuda"

    def once(self, f):
        if not self.cuda:
            start = time.perf_counter()
            f()
            return 1000 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        f()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def median(self, f):
        """milliseconds of f(set), with enough calls between two events to hide the cost of the events"""
        warm_up, repetitions = (WARM_UP, REPETITIONS) if self.cuda else (1, 2)
        for r in range(warm_up):
            f(r % SETS)
        once = self.once(lambda: [f(k) for k in range(SETS)]) / SETS
        calls = SETS * max(1, min(20, int(1 / (SETS * once)) + 1)) if self.cuda else SETS
        times = [self.once(lambda: [f(r % SETS) for r in range(calls)]) / calls for _ in range(repetitions)]
        return statistics.median(times)


def parts(x, count, dtype):
    """count tensors of dtype whose sum is x, but for the last one's rounding; gradients reach x through the first"""
    found = []
    for _ in range(count):
        found.append(x.to(dtype))
        x = x - found[-1].to(x.dtype)
    return found


def with_columns(q, k, v, S, g, scale):
    """q, k, v (B,NH,T,HS) with eight more columns, so that scale q.k has gained g_i S_j: the bias -g_i (S_i - S_j) but
    for a constant of each row. bf16 holds S in three parts and g in two, float32 in one."""
    low = q.dtype in (torch.bfloat16, torch.float16)
    S_parts = parts(S, 3 if low else 1, q.dtype)
    g_parts = parts(g / scale, 2 if low else 1, q.dtype)
    pairs = [(a, b) for i, a in enumerate(g_parts) for j, b in enumerate(S_parts) if i + j < 3]
    zeros = q.new_zeros(*q.shape[:-1], 8 - len(pairs))
    return (torch.cat([q, torch.stack([a for a, _ in pairs], -1), zeros], -1),
            torch.cat([k, torch.stack([b for _, b in pairs], -1), zeros], -1), F.pad(v, (0, 8)))


def flex(device, compiled=None):
    """attention(q, k, v, S, g) by FlexAttention; None where this PyTorch has none"""
    try:
        from torch import _dynamo
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return None
    for name in ("cache_size_limit", "recompile_limit"):    # one compilation per shape; beyond this it runs uncompiled
        if hasattr(_dynamo.config, name):
            setattr(_dynamo.config, name, 64)
    import torch._functorch.config as functorch_config
    if hasattr(functorch_config, "donated_buffer"):     # the backward is timed many times over one graph
        functorch_config.donated_buffer = False
    compiled = device == "cuda" if compiled is None else compiled
    attend, masks = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention, {}

    def run(q, k, v, S, g):
        length = q.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)

        def cable(score, b, h, i, j):
            return score - g[b, h, i] * torch.abs(S[b, h, i] - S[b, h, j])
        return attend(q, k, v, score_mod=cable, block_mask=masks[length])
    return run


def backends(device):
    """[(name, encoding, what prepares q, k, v, function(q, k, v, S, g))]"""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(which):
        def run(q, k, v, S, g):
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=g)
        return run
    found = []
    for name, which in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        found += [(f"SDPA {name}", "none", False, sdpa(which)), (f"SDPA {name}, columns", "cable", True, sdpa(which))]
    if device == "cpu":                                 # which has neither
        found = [("SDPA math" + ", columns" * columns, pos, columns, sdpa(SDPBackend.MATH))
                 for pos, columns in (("none", False), ("cable", True))]
    run = flex(device)
    return found + ([("FlexAttention", "cable", False, run)] if run else [])


def attention(device, shapes):
    timer = Timer(device)
    kinds = backends(device)
    for tokens, T, C, HS in shapes:
        B, NH = tokens // T, C // HS
        plain, more = [], []
        for _ in range(SETS):
            q, k, v, dout = (torch.randn(B, NH, T, HS, device=device, dtype=torch.bfloat16) for _ in range(4))
            S = torch.cumsum(F.relu(0.5 * torch.randn(B, NH, T, device=device)), -1)
            g = F.softplus(torch.randn(B, NH, T, device=device))
            wide = with_columns(q, k, v, S, g, 1 / math.sqrt(HS))
            plain.append([*(x.requires_grad_() for x in (q, k, v)), S, g, dout])
            more.append([*(x.detach().requires_grad_() for x in wide), None, None, F.pad(dout, (0, 8))])
        for backend, pos, columns, run in kinds:
            sets, outs = more if columns else plain, []
            if backend.startswith("SDPA"):              # their last argument is the scale
                sets = [[*x[:4], 1 / math.sqrt(HS), x[5]] for x in sets]

            def forward(k):
                run(*sets[k][:5])                       # not under no_grad, which would compile it a second time

            def backward(k):
                torch.autograd.grad(outs[k], sets[k][:3], sets[k][5], retain_graph=True)
            try:
                forward_ms = timer.median(forward)
                outs = [run(*s[:5]) for s in sets]
                backward_ms = timer.median(backward)
            except RuntimeError as e:                   # this device has no such kernel
                print(f"{backend}: {str(e).splitlines()[0][:200]}", file=sys.stderr)
                continue
            for direction, ms, factor in (("forward", forward_ms, 2), ("backward", backward_ms, 5)):
                say(f"{direction} causal d{HS} T{T} tokens{tokens} C{C} {pos} {backend}", **{"pass": direction},
                    backend=backend, pos=pos, HS=HS, T=T, tokens=tokens, C=C, causal=True, ms=ms,
                    tflops=factor * tokens * T * C / ms * 1e-9)


# ---- GPT-2: dev/hf/modeling_cable.py, with attention that has no (T,T) bias ----

class GPT2(torch.nn.Module):
    """the loss of a CableGPT2 without a bias (way: sdpa), with cable (columns or flex) or with alibi (columns)"""

    def __init__(self, model, way, device):
        super().__init__()
        self.model = model
        by_flex = flex(device) if way == "flex" else None
        for block in model.transformer.h:
            block.attn.forward = self.attention(block.attn, way, by_flex)

    @staticmethod
    def attention(layer, way, by_flex):
        NH = layer.config.n_head

        def forward(x, rope_scaling=None, begin=None):
            B, T, C = x.shape
            q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in layer.c_attn(x).split(C, dim=2))
            scale = layer.scale
            if way == "sdpa":
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            else:
                if layer.name == "alibi":
                    slopes = alibi_slopes(NH, layer.config.position["slopes"] == "geometric").to(x.device).float()
                    S = torch.arange(T, device=x.device).float().expand(B, NH, T)
                    g = slopes[:, None].expand(B, NH, T)
                else:
                    S = F.relu(layer.cable.c(x)).transpose(1, 2).float().cumsum(-1)
                    g = F.softplus(layer.cable.s(x).transpose(1, 2).float())
                if way == "flex":
                    y = by_flex(q, k, v, S, g)
                else:
                    q, k, v = with_columns(q, k, v, S, g, scale)
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :C // NH]
            return layer.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return forward

    def forward(self, tokens, targets):
        return self.model(tokens, targets)[1]


def training(key, model, inputs, device, steps, **record):
    """measures training steps of model(*inputs), which returns the loss; in 1, 2, 4 or 8 equal parts, as they fit"""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, **({"fused": True} if device == "cuda" else {}))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step(count):
        for part in zip(*(x.chunk(count) for x in inputs)):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(*part) / count
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    for count in (1, 2, 4, 8):
        try:
            for _ in range(3):
                step(count)
            break
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    else:
        print(f"{key}: out of memory", file=sys.stderr)
        return
    timer = Timer(device)
    ms = statistics.median(timer.once(lambda: step(count)) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 2 ** 20 if device == "cuda" else None
    tokens = inputs[0].numel()
    B, T = inputs[0].shape
    say(key, B=B, T=T, micro_batches=count, ms=ms, tokens_per_s=1000 * tokens / ms, peak_mib=peak, **record)


WAYS = (("none", "sdpa", "torch.compile, SDPA"), ("cable", "columns", "torch.compile, SDPA with columns"),
        ("cable", "flex", "torch.compile, FlexAttention"))


def train_gpt2(device, B, shard):
    size, (L, NH, C, V), T, steps = "124M, 65,536 tokens", (12, 12, 768, 50304), 1024, 10
    if device == "cpu":
        size, (L, NH, C, V), T, steps = "nano", (2, 2, 64, 50304), 32, 2
    data = torch.randint(0, 50257, (B * T + 1,))
    if shard:
        ids = common.read_tokens(shard).ids[:B * T + 1]
        if len(ids) <= B * T:
            raise SystemExit(f"{shard}: expected at least {B * T + 1} tokens, got {len(ids)}")
        data = torch.tensor(list(ids))
    data = data.to(device)
    for pos, way, backend in WAYS:
        key = f"step {size} {pos} {backend}"
        if way == "flex" and (device == "cpu" or flex(device) is None):
            continue
        config = CableConfig(n_layer=L, n_head=NH, n_embd=C, vocab_size=V, n_positions=T, position={"name": pos})
        model = GPT2(CableGPT2(config), way, device).to(device)
        inputs = data[:-1].view(B, T), data[1:].view(B, T)
        try:
            training(key, torch.compile(model) if device == "cuda" else model, inputs, device, steps, size=size,
                     pos=pos, backend=backend)
        except Exception as e:                              # 2.11's compiler does not manage FlexAttention in a model
            if device == "cpu":
                raise
            say(key, note=f"PyTorch {torch.__version__}: {type(e).__name__}: {str(e)[:1000]}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--step", type=int, metavar="B", help="only a step of GPT-2 124M with B sequences of 1,024 tokens")
    p.add_argument("--tokens", metavar="SHARD", help="tokens of data/ instead of random ones")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where to run [cuda]")
    args = p.parse_args()
    torch.manual_seed(42)
    torch.set_float32_matmul_precision("high")
    if args.step:
        train_gpt2(args.device, args.step, args.tokens)
        return
    shapes = [(16384, 1024, 768, 64), (16384, 4096, 768, 64), (16384, 4096, 2048, 128)]
    attention(args.device, [(256, 128, 128, 64)] if args.device == "cpu" else shapes)


if __name__ == "__main__":
    main()
