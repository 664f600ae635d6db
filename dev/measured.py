#!/usr/bin/env python3
"""measured.py -- what each kernel of a training step reaches: bytes a second, FLOP/s, and the share of its limit.

    ./train_gpt2cu --train_files ... --steps 11 --profile 10 >run.txt; dev/measured.py run.txt

The limit is what takes longer: the kernel's FLOPs at the GPU's peak, or its bytes at the memory's speed, each array
counted once. Both are as the run's start banner says (llmc/base/gpu.h); on a CPU there are none. A kernel of small sums
or chains of dependent loads has no row in BYTES, and no limit. The batch is one micro-batch."""
import os
import re
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))
import console                      # noqa: E402
from console import BadInput        # noqa: E402

# Bytes of one call. x: of an array (B,T,C) in the activations' type; P: parameters; V: of all logits; q: of a float32
# for each query and head. AdamW reads gradient, master, m and v, and writes master, m, v and the weights.
BYTES = {"layernorm_forward_kernel": "2*x", "layernorm_backward_kernel": "4*x", "gelu_forward_kernel": "8*x",
         "gelu_backward_kernel": "12*x", "flash_forward_kernel": "4*x + q", "flash_backward_dkdv_kernel": "6*x + 4*q",
         "flash_backward_dq_kernel": "5*x + 4*q", "flash_backward_prepare_kernel": "2*x + 4*q",
         "embedding_forward_kernel": "2*x", "classifier_kernel": "2*V/calls", "norm_kernel": "4*P/calls",
         "adamw_kernel": "(28 + e)*P", "rope_kernel": "4*x"}
# products of T^2 HS FLOPs for each head, halved by causality
PRODUCTS = {"flash_forward_kernel": 2, "flash_backward_dkdv_kernel": 4, "flash_backward_dq_kernel": 3}


def number(text):
    if not re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", text, re.ASCII):
        raise BadInput(f"expected a number of at most 15 digits before and after its point, got {text[:40]}")
    return float(text)


def rows(text):
    """(kernel, its M x N x K or -, calls, ms) of the last table that --profile printed"""
    table = text.rpartition("\nprofile of step ")[2] if "\nprofile of step " in text else ""
    found = re.findall(r"^(\S+) +(-|[\d.]+x[\d.]+x[\d.]+) +([\d.]+|-) +(-?[\d.]+) +-?[\d.]+% ", table, re.M)
    if not found:
        raise BadInput("expected the output of a run with --profile, got no table in it")
    return [(kernel, shape, int(number(calls.replace("-", "0"))), number(ms)) for kernel, shape, calls, ms in found]


def banner(text):
    """numbers of the start banner"""
    patterns = {name: rf"(?<!\w){name}\s+([\d.]+)" for name in ("NH", "C", "V", "--B", "--T")}
    patterns |= {"P": r"([\d.]+)M parameters", "tflops": r"peak ([\d.]+) bf16", "tbs": r" at ([\d.]+) TB/s"}
    return {name: number(m[1]) if (m := re.search(pattern, text)) else 0.0 for name, pattern in patterns.items()}


def work(kernel, shape, calls, n):
    """(bytes, FLOPs) of one call; 0 where they do not say how long it takes"""
    tokens, e = n["--B"] * n["--T"], 2 if n["tflops"] else 4
    if shape != "-":
        M, N, K = (int(number(size)) for size in shape.split("x"))
        gradient = K > 4 * n["C"] and not 0 <= K - n["V"] < 128         # over tokens: float32, and added to
        return e * (M * K + K * N) + (8 if gradient else e) * M * N, 2 * M * N * K
    known = {"x": e * tokens * n["C"], "P": 1e6 * n["P"], "V": e * tokens * n["V"], "q": 4 * tokens * n["NH"], "e": e,
             "calls": calls}
    causal = tokens * (n["--T"] + 1) * n["C"]
    return eval(BYTES.get(kernel, "0"), {"__builtins__": {}}, known), causal * PRODUCTS.get(kernel, 0)


def table(text):
    """the lines of the table"""
    n = banner(text)
    found = [f"{'kernel':30} {'M x N x K':>18} {'calls':>6} {'ms':>9} {'MB':>8} {'GB/s':>7} {'TFLOP/s':>8} limit"]
    for kernel, shape, calls, ms in rows(text):
        size, flops = work(kernel, shape, calls, n)
        seconds = max(ms, 1e-6) / 1e3 / max(calls, 1)
        least = max(flops / n["tflops"] / 1e12, size / n["tbs"] / 1e12) if n["tflops"] and n["tbs"] else 0.0
        cells = [f"{value:.{digits}f}" if value else "-" for value, digits in
                 ((size / 1e6, 1), (size / seconds / 1e9, 0), (flops / seconds / 1e12, 1), (100 * least / seconds, 0))]
        found.append(f"{kernel:30} {shape:>18} {calls or '-':>6} {ms:9.3f} {cells[0]:>8} {cells[1]:>7} {cells[2]:>8} "
                     f"{cells[3]:>4}%")
    return found


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise BadInput("usage: dev/measured.py FILE, the output of a run with --profile")
    text = console.read_bytes(argv[0]).decode(errors="replace")
    try:
        print("\n".join(table(text)))
    except BadInput as e:
        raise BadInput(f"{argv[0]}: {e}") from None


if __name__ == "__main__":
    console.run(main)
