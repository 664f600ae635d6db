"""make_fixtures.py -- writes test/fixtures/gpt2_<encoding>.safetensors, what test_gpt2 compares the trainer with.

Regenerate with `python3 dev/hf/make_fixtures.py` (PyTorch 1.13 or later; the same weights on every version).
A file holds one model with large random weights, so that every path carries weight in the result, its inputs, and what
modeling_cable.py makes of them in float64, rounded to float32:
    param.<tensor>, grad.<tensor>   named and laid out as in a checkpoint
    inputs, targets                 (B,T) int32; targets of -1 are ignored
    logits (B,T,V), loss (1)        the loss is the mean over the targets that are not -1
    inputs.long, logits.long        the same model at T = 64, beyond the trained 37 (not `learned`)
    logits.pi, .ntk, .yarn          rope: inputs.long with a scaling factor of 64/37
    error.<tensor>, .logits ...     (1): max|f32 - f64| / max|f64| of the same computation in float32 here, the unit in
                                    which to state a tolerance: the worst of RUNS, and at least float32's epsilon. For a
                                    parameter's name it is the gradient's, absolute where that is zero (EXACTLY_ZERO)
The metadata holds the configuration as JSON.
"""
import argparse
import copy
import json
import os
import zlib
from dataclasses import asdict

import numpy as np
import torch

from modeling_cable import POSITIONS, CableConfig, CableGPT2, write_safetensors

L, NH, C, V, B, T, T_LONG = 2, 2, 16, 29, 2, 37, 64
SCALING = T_LONG / T
RUNS = 8                                            # a single run's error may be small by luck
EXACTLY_ZERO = "fire.mlp.2.bias"                    # adds the same to every score of a row, which softmax ignores


def draw(name, shape, kind="normal"):
    """seeded by the tensor's name: what two encodings share is equal in both. RandomState's stream never changes."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy(np.asarray(getattr(stream, kind)(size=shape), dtype=np.float32))


def set_weights(model):
    """float32 values for every parameter, far from their initial ones"""
    for name, p in model.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            value = 1 + 0.2 * draw(name, p.shape)
        elif ".kerple.r" in name:
            value = 0.1 + draw(name, p.shape, "uniform")
        elif name.endswith(".fire.c"):              # both signs: the definition takes |c| and |l|
            value = torch.tensor([0.3 if ".0." in name else -1.5])
        elif name.endswith(".fire.l"):              # 512 |l| = 15.4 and 25.6: rows on either side of max(L, i)
            value = torch.tensor([0.03 if ".0." in name else -0.05])
        elif ".fire.mlp" in name or ".t5." in name:
            value = 0.5 * draw(name, p.shape)
        elif ".c_attn." in name:                    # attention far from uniform
            value = 0.4 * draw(name, p.shape)
        else:
            value = 0.2 * draw(name, p.shape)
        with torch.no_grad():
            p.copy_(value)


def nudge(model, run):
    """every weight to the float32 above or below it: as close as float32 can tell"""
    stream = np.random.RandomState(run)
    for p in model.parameters():
        up = torch.from_numpy(stream.randint(0, 2, tuple(p.shape))).bool()
        with torch.no_grad():
            p.copy_(torch.where(up, torch.nextafter(p, p + 1), torch.nextafter(p, p - 1)))


def compute(model, inputs, targets, inputs_long):
    """everything that is compared, by name"""
    model.zero_grad()
    logits, loss = model(inputs, targets)
    loss.backward()
    out = {"grad." + name: p.grad.clone() for name, p in model.named_parameters()}
    out["logits"], out["loss"] = logits.detach(), loss.detach().view(1)
    name = model.config.position["name"]
    with torch.no_grad():
        if name != "learned":
            out["logits.long"] = model(inputs_long)[0]
        for scaling in ("pi", "ntk", "yarn") if name == "rope" else ():
            out["logits." + scaling] = model(inputs_long, rope_scaling=(scaling, SCALING))[0]
    return out


def fixture(name, inputs, targets, inputs_long):
    config = CableConfig(n_layer=L, n_head=NH, n_embd=C, vocab_size=V, n_positions=T, position={"name": name})
    model = CableGPT2(config)
    set_weights(model)
    tensors = {"param." + n: p.detach().clone() for n, p in model.named_parameters()}
    f64 = compute(copy.deepcopy(model).double(), inputs, targets, inputs_long)
    f32 = []
    for run in range(RUNS):
        trial = copy.deepcopy(model)
        if run > 0:
            nudge(trial, run)
        f32.append(compute(trial, inputs, targets, inputs_long))
    tensors["inputs"], tensors["targets"] = inputs.int(), targets.int()
    if "logits.long" in f64:
        tensors["inputs.long"] = inputs_long.int()
    errors = {}
    for key, exact in f64.items():
        scale = exact.abs().max().item()
        if key.endswith(EXACTLY_ZERO):
            assert scale < 1e-12, f"{name}: {key} is {scale}, not zero"
            exact, scale = torch.zeros_like(exact), 1.0
        assert np.isfinite(scale) and scale > 1e-4, f"{name}: {key} is too small to compare with, {scale}"
        tensors[key] = exact.float()
        worst = max((run[key].double() - exact).abs().max().item() for run in f32)
        errors[key] = max(worst / scale, torch.finfo(torch.float32).eps)
        tensors["error." + key.replace("grad.", "", 1)] = torch.tensor([errors[key]])
    return tensors, errors, {"format": "pt", "config": json.dumps(asdict(config))}


def main():
    root = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", nargs="?", default=os.path.join(root, "test", "fixtures"))
    parser.add_argument("--all", action="store_true", help="print the error and size of every tensor")
    args = parser.parse_args()
    directory = args.directory
    os.makedirs(directory, exist_ok=True)
    torch.manual_seed(1)                            # every weight is replaced; this only keeps the run reproducible
    torch.set_num_threads(1)
    stream = np.random.RandomState(1)
    inputs, targets, inputs_long = (torch.from_numpy(stream.randint(0, V, (B, n))) for n in (T, T, T_LONG))
    targets[0, :3] = targets[0, 17] = targets[1, 30:34] = -1
    total = 0
    print(f"{'encoding':14}{'bytes':>8}{'loss':>10}   float32 against float64: loss, logits, worst gradient")
    for name in POSITIONS:
        tensors, errors, metadata = fixture(name, inputs, targets, inputs_long)
        path = os.path.join(directory, f"gpt2_{name}.safetensors")
        write_safetensors(path, tensors, metadata)
        total += os.path.getsize(path)
        worst = max((k for k in errors if k.startswith("grad.")), key=errors.get)
        logits = max(v for k, v in errors.items() if k.startswith("logits"))
        print(f"{name:14}{os.path.getsize(path):8}{tensors['loss'].item():10.6f}   "
              f"{errors['loss']:.1e}  {logits:.1e}  {errors[worst]:.1e} {worst[5:]}")
        if args.all:
            print("".join(f"    {k:48} {errors[k]:.1e}  max {tensors[k].abs().max():.2e}\n" for k in errors), end="")
    print(f"{total} bytes in {directory}")


if __name__ == "__main__":
    main()
