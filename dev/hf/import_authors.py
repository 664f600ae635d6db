#!/usr/bin/env python3
"""import_authors.py -- turns the weights that CABLE's authors have released into a checkpoint of this repository.

    dev/hf/import_authors.py FILE OUT [trained length, 1024 unless given]
    ./train_gpt2 --load OUT --val_files 'data/edu_fineweb10B/edu_fineweb_val_*.bin' --eval_lengths 512,1024,2048

FILE: the state dict of one of their models, as .safetensors or as what torch.save() writes. Their names stay but for
these: linear layers are (out, in) there and (in, out) here; cable_layer and cable_layer_scale are cable.c and cable.s;
buffers (cached_*) and the head, which is wte, are left out. All 50,304 rows of wte are kept, because all are in their
softmax: --vocab_softmax padded, which config.json says.
"""
import json
import os
import re
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from modeling_cable import CableConfig, CableGPT2, read_safetensors, save_checkpoint

VOCAB = 50257                                               # GPT-2's
LINEAR = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
BUFFERS = re.compile(r"(^|\.)(cached_[^.]*|bias_mask|attn\.bias|attn\.masked_bias)$|^lm_head\.weight$")


def read_state(path):
    """{name from "transformer." or "lm_head." on: tensor}"""
    if path.endswith(".safetensors"):
        state = read_safetensors(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for key in ("model", "state_dict", "model_state_dict"):
            state = state[key] if isinstance(state.get(key), dict) else state
    # DistributedDataParallel and torch.compile put words before the names
    return {re.sub(r"^.*?(?=transformer\.|lm_head\.)", "", name): t for name, t in state.items()}


def convert(state):
    """the tensors by this repository's names"""
    ours = {}
    for name, t in state.items():
        if BUFFERS.search(name):
            continue
        t = t.float()
        if LINEAR.search(name):
            t = t.t().contiguous()
        ours[name.replace(".cable_layer_scale.", ".cable.s.").replace(".cable_layer.", ".cable.c.")] = t
    return ours


def import_state(state, T=1024):
    ours = convert(state)
    try:
        rows, C = ours["transformer.wte.weight"].shape
        NH = ours["transformer.h.0.attn.cable.c.weight"].shape[0]
    except KeyError as missing:
        raise ValueError(f"expected a GPT-2 with CABLE, but there is no {missing}") from None
    L = 1 + max(int(name.split(".")[2]) for name in ours if name.startswith("transformer.h."))
    if rows != (VOCAB + 127) // 128 * 128:
        raise ValueError(f"transformer.wte.weight: expected 50304 rows, GPT-2's {VOCAB} and padding, got {rows}")
    weighted = "transformer.h.0.attn.cable.s.weight" in ours
    model = CableGPT2(CableConfig(n_layer=L, n_head=NH, n_embd=C, vocab_size=rows, n_positions=T,
                                  position={"name": "cable" if weighted else "cable_nw"}))
    try:
        model.load_state_dict(ours)
    except RuntimeError as e:
        raise ValueError(str(e)) from None
    return model


def write(model, out):
    if os.path.exists(os.path.join(out, "model.safetensors")):
        raise ValueError(f"{out}: already holds a model; give another directory")
    save_checkpoint(model, out)
    path = os.path.join(out, "config.json")
    with open(path) as f:
        config = json.load(f)
    config.update(vocab_softmax="padded", vocab_used=VOCAB)
    with open(path, "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[1].startswith("-"):
        print("usage: dev/hf/import_authors.py FILE OUT [trained length]", file=sys.stderr)
        return 2
    try:
        model = import_state(read_state(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) == 4 else 1024)
        write(model, sys.argv[2])
    except (ValueError, OSError) as e:
        print(f"error: {sys.argv[1]}: {e}", file=sys.stderr)
        return 2
    c = model.config
    print(f"{sys.argv[1]} -> {sys.argv[2]}: {c.position['name']}, L {c.n_layer}, NH {c.n_head}, C {c.n_embd}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
