"""bench_pytorch.py -- training speed of the same model in PyTorch, to compare with the trainer's tokens/s.

A step is forward, backward, gradient clipping and AdamW on random tokens, eager, float32; the median step counts. With
PyTorch 2 an encoding without a bias uses scaled_dot_product_attention; the others build their T x T bias, as PyTorch
requires.

The last line is for scripts:   pytorch <version> eager pos=<p> tokens/s <x>

    python3 dev/bench/bench_pytorch.py --model 4,4,128 --vocab 256 --T 256 --B 8 --pos cable --steps 10 --threads 2
"""
import argparse
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "hf"))
from modeling_cable import POSITIONS, CableConfig, CableGPT2  # noqa: E402


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", default="4,4,128", help="L,NH,C")
    p.add_argument("--vocab", type=int, default=256)
    p.add_argument("--T", type=int, default=256)
    p.add_argument("--B", type=int, default=8)
    p.add_argument("--pos", default="cable", choices=POSITIONS)
    p.add_argument("--steps", type=int, default=10, help="timed steps, after 2 untimed ones")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    try:
        args.L, args.NH, args.C = (int(n) for n in args.model.split(","))
    except ValueError:
        p.error(f"--model: expected L,NH,C, for example 4,4,128, got {args.model}")
    for name in ("L", "NH", "C", "vocab", "T", "B", "steps", "threads"):
        if getattr(args, name) < 1:
            p.error(f"{name}: expected at least 1, got {getattr(args, name)}")
    return args


def decays(name, p):
    """whether weight decay applies: to matrices and embeddings, not to biases or to an encoding's scalars and tables"""
    return p.dim() >= 2 and ".t5." not in name and ".fire." not in name


def main():
    args = parse()
    torch.set_flush_denormal(True)                  # as in the trainers
    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    config = CableConfig(n_layer=args.L, n_head=args.NH, n_embd=args.C, vocab_size=args.vocab, n_positions=args.T,
                         position={"name": args.pos})
    model = CableGPT2(config).to(args.device)
    sdpa = hasattr(F, "scaled_dot_product_attention")
    for block in model.transformer.h:
        block.attn.sdpa = sdpa                      # used if the encoding adds no bias
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
              {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.randint(0, args.vocab, (args.B, args.T + 1), device=args.device)
    seconds = []
    for step in range(args.steps + 2):
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.project()
        optimizer.zero_grad(set_to_none=True)
        loss.item()                                 # waits for the GPU's queue, including the update
        seconds.append(time.perf_counter() - start)
    ms = [1e3 * s for s in seconds[2:]]
    median = statistics.median(ms)
    uses_sdpa = sdpa and args.pos in ("none", "learned", "sinusoidal", "rope")
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, "
          f"{sum(p.numel() for _, p in named):,} parameters, "
          f"attention: {'scaled_dot_product_attention' if uses_sdpa else 'T x T scores, eager'}")
    print(f"B {args.B} T {args.T}: step {median:.1f} ms (median of {len(ms)}; {min(ms):.1f} to {max(ms):.1f}), "
          f"loss {loss.item():.4f}")
    print(f"pytorch {torch.__version__} eager pos={args.pos} tokens/s {args.B * args.T / median * 1e3:.0f}")


if __name__ == "__main__":
    main()
