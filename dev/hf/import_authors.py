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

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "scripts")]

import console                          # noqa: E402
from console import BadInput            # noqa: E402
from export import new_directory        # noqa: E402

try:
    import torch
    from modeling_cable import CableConfig, CableGPT2, read_safetensors, save_checkpoint
except ImportError:                     # main() names what is missing
    pass

VOCAB = 50257                                               # GPT-2's
LINEAR = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
BUFFERS = re.compile(r"(^|\.)(cached_[^.]*|bias_mask|attn\.bias|attn\.masked_bias)$|^lm_head\.weight$")
WTE, LAYER = "transformer.wte.weight", "transformer.h."


def read_state(path):
    """{name from "transformer." or "lm_head." on: tensor}"""
    try:
        with console.open_regular(path) as f:
            if path.endswith(".safetensors"):
                console.read_tensors(f, path)
                state = read_safetensors(path)
            else:
                state = torch.load(f, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as e:                                  # a damaged file can raise anything
        what = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise BadInput(f"{path}: expected .safetensors, or a state dict that torch.save() wrote ({what})") from None
    for key in ("model", "state_dict", "model_state_dict"):
        state = state[key] if isinstance(state, dict) and isinstance(state.get(key), dict) else state
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(t, torch.Tensor)
                                              for n, t in state.items()):
        raise BadInput(f"{path}: expected the names and tensors of a model, got something else")
    # DistributedDataParallel and torch.compile put words before the names
    return {re.sub(r"^.*?(?=transformer\.|lm_head\.)", "", name): t for name, t in state.items()}


def config_of(state, T):
    """the model that a state dict with this repository's names is of"""
    try:
        rows, C = state[WTE].shape
        NH, _ = state[LAYER + "0.attn.cable.c.weight"].shape
    except (KeyError, ValueError) as e:
        raise BadInput(f"expected a GPT-2 with CABLE: {e} is missing, or not a matrix") from None
    if not C or not NH or C % NH:
        raise BadInput(f"{WTE}: expected columns, a multiple of the {NH} heads, got {C}")
    padded = (VOCAB + 127) // 128 * 128
    if rows != padded:
        raise BadInput(f"{WTE}: expected {padded} rows, GPT-2's {VOCAB} and padding, got {rows}")
    layers = {name[len(LAYER):].partition(".")[0] for name in state if name.startswith(LAYER)}
    weighted = LAYER + "0.attn.cable.s.weight" in state
    return CableConfig(n_layer=len(layers), n_head=NH, n_embd=C, vocab_size=rows, n_positions=T,
                       position={"name": "cable" if weighted else "cable_nw"})


def import_state(state, T=1024):
    state = {name.replace(".cable_layer_scale.", ".cable.s.").replace(".cable_layer.", ".cable.c."): t
             for name, t in state.items() if not BUFFERS.search(name)}
    try:
        model = CableGPT2(config_of(state, T))
        model.load_state_dict({name: t.float().t().contiguous() if LINEAR.search(name) else t.float()
                               for name, t in state.items()})
    except (RuntimeError, ValueError) as e:                 # a name or a shape
        raise BadInput(" ".join(str(e).split())[:400]) from None
    return model


def write(model, out):
    with new_directory(out) as partial:
        save_checkpoint(model, partial)
        path = os.path.join(partial, "config.json")
        config = {**console.read_object(path), "vocab_softmax": "padded", "vocab_used": VOCAB}
        console.write_whole(path, json.dumps(config, indent=2) + "\n")


def main(argv):
    if len(argv) not in (2, 3) or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    console.need("torch")
    if len(argv) == 3 and not re.fullmatch(r"[1-9]\d{0,8}", argv[2]):
        raise BadInput(f"expected the trained length, a number of tokens, got {argv[2]}")
    state = read_state(argv[0])
    try:
        model = import_state(state, int(argv[2]) if len(argv) == 3 else 1024)
    except BadInput as e:
        raise BadInput(f"{argv[0]}: {e}") from None
    write(model, argv[1])
    c = model.config
    print(f"{argv[0]} -> {argv[1]}: {c.position['name']}, L {c.n_layer}, NH {c.n_head}, C {c.n_embd}")


if __name__ == "__main__":
    console.run(main)
