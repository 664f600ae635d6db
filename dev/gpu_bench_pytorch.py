#!/usr/bin/env python3
"""gpu_bench_pytorch.py -- the shapes of gpu_bench.cu in PyTorch, and compiled training steps of GPT-2 and BERT.

    dev/gpu_bench_pytorch.py [--quick] [--skip FILE] [--device cpu]       FILE: keys to skip, one per line

Prints one JSON object per result. Attention is causal, in bf16: scaled_dot_product_attention by cuDNN and by flash
attention, and FlexAttention with CABLE's bias. The inputs are three sets of normal random numbers, used in turn; the
time is the median of 50 repetitions after 10 to warm up, measured by events. A training step is forward, backward,
clipping and fused AdamW, in bf16 autocast under torch.compile: GPT-2 124M without positions, and BERT base with learned
positions on masked tokens, layer by layer. --device cpu takes tiny shapes: it checks this program and measures nothing.
"""
import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

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


def backends(device):
    """[(name, encoding, function(q, k, v, S, g))]"""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(which):
        def run(q, k, v, S, g):
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return run
    found = [("SDPA cuDNN", "none", sdpa(SDPBackend.CUDNN_ATTENTION)),
             ("SDPA flash", "none", sdpa(SDPBackend.FLASH_ATTENTION))]
    try:
        from torch import _dynamo
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return found
    for name in ("cache_size_limit", "recompile_limit"):    # one compilation per shape; beyond this it runs uncompiled
        if hasattr(_dynamo.config, name):
            setattr(_dynamo.config, name, 64)
    import torch._functorch.config as functorch_config
    if hasattr(functorch_config, "donated_buffer"):     # the backward is timed many times over one graph
        functorch_config.donated_buffer = False
    compiled, masks = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention, {}

    def flex(q, k, v, S, g):
        length = q.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)

        def cable(score, b, h, i, j):
            return score - g[b, h, i] * torch.abs(S[b, h, i] - S[b, h, j])
        return compiled(q, k, v, score_mod=cable, block_mask=masks[length])
    return found + [("FlexAttention", "cable", flex)]


def attention(device, shapes, skip):
    timer = Timer(device)
    kinds = backends(device)
    for tokens, T, C, HS in shapes:
        B, NH = tokens // T, C // HS
        sets = []
        for _ in range(SETS):
            q, k, v, dout = (torch.randn(B, NH, T, HS, device=device, dtype=torch.bfloat16) for _ in range(4))
            S = torch.cumsum(F.relu(0.5 * torch.randn(B, NH, T, device=device)), -1)
            g = F.softplus(torch.randn(B, NH, T, device=device))
            sets.append([q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), S, g, dout])
        for backend, pos, run in kinds:
            keys = [f"{direction} causal d{HS} T{T} tokens{tokens} C{C} {pos} {backend}"
                    for direction in ("forward", "backward")]
            if all(key in skip for key in keys):
                continue
            outs = []

            def forward(k):
                q, key, v, S, g, _ = sets[k]
                run(q, key, v, S, g)                    # not under no_grad, which would compile it a second time

            def backward(k):
                torch.autograd.grad(outs[k], sets[k][:3], sets[k][5], retain_graph=True)
            try:
                forward_ms = timer.median(forward)
                outs = [run(*s[:5]) for s in sets]
                backward_ms = timer.median(backward)
            except RuntimeError as e:                   # this device has no such kernel
                print(f"{backend}: {str(e).splitlines()[0][:200]}", file=sys.stderr)
                continue
            for key, direction, ms, factor in ((keys[0], "forward", forward_ms, 2),
                                               (keys[1], "backward", backward_ms, 5)):
                say(key, **{"pass": direction}, backend=backend, pos=pos, HS=HS, T=T, tokens=tokens, C=C, causal=True,
                    ms=ms, tflops=factor * tokens * T * C / ms * 1e-9)


class Block(torch.nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.qkv, self.proj = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)
        self.fc, self.fcproj = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(C, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, L, NH, C, V):
        super().__init__()
        self.wte = torch.nn.Embedding(V, C)
        self.blocks = torch.nn.ModuleList(Block(C, NH) for _ in range(L))
        self.lnf = torch.nn.LayerNorm(C)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.lnf(x), self.wte.weight).flatten(0, 1), targets.flatten())


class BertLayer(torch.nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = torch.nn.LayerNorm(C, 1e-12), torch.nn.LayerNorm(C, 1e-12)
        self.qkv, self.proj = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)
        self.fc, self.fcproj = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, -1).transpose(1, 2) for y in self.qkv(x).split(C, 2))
        x = self.ln1(x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C)))
        return self.ln2(x + self.fcproj(F.gelu(self.fc(x))))


class BERT(torch.nn.Module):
    """forward(tokens, (places, ids)) gives the loss of predicting these ids at these places"""

    def __init__(self, L, NH, C, V, T, compiled):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(V, C), torch.nn.Parameter(0.02 * torch.randn(T, C))
        self.embed_ln, self.head_ln = torch.nn.LayerNorm(C, 1e-12), torch.nn.LayerNorm(C, 1e-12)
        self.layers = torch.nn.ModuleList(BertLayer(C, NH) for _ in range(L))
        self.head, self.bias = torch.nn.Linear(C, C), torch.nn.Parameter(torch.zeros(V))
        if compiled:
            for layer in self.layers:                   # each by itself, so that they share the compiled code
                layer.compile()

    def forward(self, tokens, targets):
        x = self.embed_ln(self.wte(tokens) + self.wpe)
        for layer in self.layers:
            x = layer(x)
        x = self.head_ln(F.gelu(self.head(x.flatten(0, 1)[targets[0]])))
        return F.cross_entropy(F.linear(x, self.wte.weight, self.bias), targets[1])


def training(key, model, inputs, skip, device, steps, **record):
    """measures training steps of model(*inputs), which returns the loss"""
    if key in skip:
        return
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, **({"fused": True} if device == "cuda" else {}))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step():
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(*inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    for _ in range(3):
        step()
    timer = Timer(device)
    ms = statistics.median(timer.once(step) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 2 ** 20 if device == "cuda" else None
    tokens = inputs[0].numel()
    B, T = inputs[0].shape
    say(key, backend="torch.compile", B=B, T=T, ms=ms, tokens_per_s=1000 * tokens / ms, peak_mib=peak, **record)


def train_gpt2(device, skip):
    size, (L, NH, C, V), B, T, steps = "nano", (2, 2, 64, 256), 2, 32, 2
    if device == "cuda":
        size, (L, NH, C, V), B, T, steps = "124M", (12, 12, 768, 50304), 16, 1024, 10
    model = GPT2(L, NH, C, V).to(device)
    if device == "cuda":
        model = torch.compile(model)
    data = torch.randint(0, min(V, 50257), (B, T + 1), device=device)
    training(f"step {size} none torch.compile", model, (data[:, :-1], data[:, 1:]), skip, device, steps,
             size=size, pos="none")


def train_bert(device, skip):
    size, (L, NH, C, V), B, T, steps = "BERT nano", (2, 2, 64, 256), 2, 32, 2
    if device == "cuda":
        size, (L, NH, C, V), B, T, steps = "BERT base", (12, 12, 768, 30528), 32, 512, 10
    model = BERT(L, NH, C, V, T, device == "cuda").to(device)
    places = torch.randperm(B * T, device=device)[:B * T * 15 // 100]
    tokens = torch.randint(0, min(V, 30522), (B, T), device=device)
    training(f"step {size} learned torch.compile", model, (tokens, (places, tokens.flatten()[places])), skip, device,
             steps, size=size, pos="learned")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="fewer shapes")
    p.add_argument("--skip", metavar="FILE", help="a file of keys to skip, one per line")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where to run [cuda]")
    args = p.parse_args()
    skip = set()
    if args.skip:
        with open(args.skip) as f:
            skip = set(f.read().split("\n"))
    torch.manual_seed(42)
    shapes = [(16384, 1024, 768, 64), (16384, 4096, 2048, 128)]
    if args.device == "cpu":
        shapes = [(256, 128, 128, 64)]
    elif not args.quick:
        shapes.insert(1, (16384, 4096, 768, 64))
    attention(args.device, shapes, skip)
    torch.set_float32_matmul_precision("high")
    train_gpt2(args.device, skip)
    train_bert(args.device, skip)


if __name__ == "__main__":
    main()
