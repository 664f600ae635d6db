"""bench_pytorch.py -- training speed of the same model in the strongest PyTorch that a user could write, to compare
with the trainer's tokens/s.

A step is forward, backward, gradient clipping and fused AdamW on random tokens, in float32 with denormal numbers
flushed; the median step counts. Attention is scaled_dot_product_attention without a T x T matrix: alibi and cable are
more columns of q and k (dev/gpu_bench_pytorch.py), which its kernels for CPUs do not know as a bias. The other
encodings with a bias, and a PyTorch before 2.0, have the T x T scores of dev/hf/modeling_cable.py.

The last lines are for scripts, one per form (eager, compiled):   pytorch <version> <form> pos=<p> tokens/s <x>

    python3 dev/bench/bench_pytorch.py --model 4,4,128 --vocab 256 --T 256 --B 8 --pos cable --steps 10 --threads 2
"""
import argparse
import os
import re
import statistics
import sys
import time

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, ".."), os.path.join(HERE, "..", "hf")]
from gpu_bench_pytorch import GPT2  # noqa: E402
from modeling_cable import POSITIONS, CableConfig, CableGPT2, project  # noqa: E402

WARM_UP = 2         # untimed steps, which compile, too


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", default="4,4,128", help="L,NH,C")
    p.add_argument("--vocab", type=int, default=256)
    p.add_argument("--T", type=int, default=256)
    p.add_argument("--B", type=int, default=8)
    p.add_argument("--pos", default="cable", choices=POSITIONS)
    p.add_argument("--forms", default="eager,compiled", help="eager (as it stands), compiled (torch.compile), or both")
    p.add_argument("--steps", type=int, default=10, help=f"timed steps of each form, after {WARM_UP} untimed ones")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--cpu_time", action="store_true", help="count CPU time instead of the time on the clock")
    args = p.parse_args()
    if not re.fullmatch(r"\d+,\d+,\d+", args.model) or set(args.forms.split(",")) - {"eager", "compiled"}:
        p.error(f"expected --model L,NH,C and --forms eager, compiled or both, got {args.model} and {args.forms}")
    args.L, args.NH, args.C = map(int, args.model.split(","))
    return args


def decays(name, p):
    """whether weight decay applies: to matrices and embeddings, not to biases or to an encoding's scalars and tables"""
    return p.dim() >= 2 and ".t5." not in name and ".fire." not in name


def milliseconds(args, form, way):
    """the milliseconds of the median step, and the loss of the last one"""
    torch.manual_seed(42)
    config = CableConfig(n_layer=args.L, n_head=args.NH, n_embd=args.C, vocab_size=args.vocab, n_positions=args.T,
                         position={"name": args.pos})
    model = CableGPT2(config)
    loss_of = GPT2(model, way, "cpu") if way else lambda tokens, targets: model(tokens, targets)[1]
    if form == "compiled":
        loss_of = torch.compile(loss_of, dynamic=False)
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
              {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0}]
    fused = {"fused": True} if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4) else {}
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, **fused)
    tokens = torch.randint(0, args.vocab, (args.B, args.T + 1))
    seconds = []
    clock = time.process_time if args.cpu_time else time.perf_counter
    for step in range(args.steps + WARM_UP):
        start = clock()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        project(model)
        optimizer.zero_grad(set_to_none=True)
        seconds.append(clock() - start)
    return 1e3 * statistics.median(seconds[WARM_UP:]), loss.item()


def main():
    args = parse()
    torch.set_flush_denormal(True)                  # as in the trainers
    torch.set_num_threads(args.threads)
    ways = {"none": "sdpa", "learned": "sdpa", "sinusoidal": "sdpa", "alibi": "columns", "cable": "columns"}
    way = ways.get(args.pos) if hasattr(torch.nn.functional, "scaled_dot_product_attention") else None
    lines = []
    for form in args.forms.split(","):
        if form == "compiled" and not hasattr(torch, "compile"):
            continue
        ms, loss = milliseconds(args, form, way)
        print(f"{form}: B {args.B} T {args.T} {args.pos}, {torch.get_num_threads()} threads, attention "
              f"{way or 'over T x T scores'}: median step {ms:.1f} ms, loss {loss:.4f}", flush=True)
        lines.append(f"pytorch {torch.__version__} {form} pos={args.pos} tokens/s {args.B * args.T / ms * 1e3:.0f}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
