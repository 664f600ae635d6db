"""make_fixtures.py -- writes test/fixtures: what test_gpt2 and test_bert compare the trainers with.

Regenerate with `python3 dev/hf/make_fixtures.py` (PyTorch 1.13 and transformers 4.40, or later). The weights are the
same on every version; errors, and the last bits of results, depend on it. `--only bert_` writes only the files of that
prefix.
A file holds one model with large random weights, so that every path carries weight in the result, its inputs, and what
a checkpoint's cable_hf.py (with `learned` transformers' own model) makes of them in float64, rounded to float32.
gpt2_<encoding>, bert_<encoding>:
    param.<tensor>, grad.<tensor>   named and laid out as in a checkpoint. A parameter that the model with cable has,
                                    too, is equal there and only in that file
    inputs, targets                 (B,T) int32; targets of -1 are ignored
    lengths                         bert: (B) int32; inputs after a length are noise, which nothing may depend on
    logits (B,T,V), loss (1)        the loss is the mean over the targets that are not -1. bert: rows after a length are
                                    0, and not to be compared
    inputs.long, logits.long        the same model with one text of T = 64, beyond the trained 37 (not `learned`)
    logits.pi, .ntk, .yarn          rope: inputs.long with a scaling factor of 64/37
gpt2_clock, bert_clock: the same of rope with clock=cable
gpt2_window, bert_window: the same of cable with a window of 9 keys and 3 sinks
gpt2_documents: the same of several encodings with documents apart, sinks, and a window of 9 keys in one layer and of 4
    in the other
contrastive_cable, the weights of bert_cable; P is mean and cls, the pooling:
    inputs (Q+M,T), lengths (Q+M)   Q = 2 queries, then M = 4 documents
    positives (Q), temperature (1)  int32: the document that answers each query
    embeddings.P (Q+M,C), loss.P    the pooled vectors, as they are before the cosine, and InfoNCE's mean over the
                                    queries
    grad.P.<tensor>                 of loss.P; no tensor of the head, which this path does not use
All:
    error.<tensor>, .logits ...     (1): max|f32 - f64| / max|f64| of the same computation in float32 here, the unit in
                                    which to state a tolerance: the worst of RUNS, and at least float32's epsilon. For a
                                    parameter's name it is the gradient's, absolute where that is zero (exactly_zero)
The metadata holds the configuration as JSON.
"""
import argparse
import copy
import json
import os
import re
import zlib

import numpy as np
import torch
import torch.nn.functional as F
import transformers

import export
from cable_encodings import POSITIONS, TURNS, with_part
from modeling_cable import write_safetensors

cable_hf = export.cable_hf()

L, NH, C, V, B, T, T_LONG = 2, 2, 8, 16, 2, 37, 64
WINDOW, WINDOWS, SINKS = 9, [9, 4], 3
DOCUMENT = 7                                        # documents begin with it
RUNS = 8                                            # a single run's error may be small by luck
TARGETS = 0.2                                       # share of positions that BERT has to predict
LENGTHS = (T, 23)
QUERY_LENGTHS, DOCUMENT_LENGTHS, POSITIVES, TEMPERATURE = (5, 9), (37, 1, 24, 16), (2, 0), np.float32(0.05)
# Today's hyperparameters, where a config.json without the key means others
DEFAULTS = {**POSITIONS, "sinusoidal": {"scale": 0.1, "embed": "plain"}, "kcable": {"weight": "outside"},
            "t5_clip": {**POSITIONS["t5_clip"], "K": T - 1},
            "cope": {"npos": 6}}                    # so that positions reach the last one
SCALINGS = {"pi": "linear", "ntk": "ntk", "yarn": "yarn_paper"}     # --rope_scaling's words, and config.json's


def position_of(name):
    if name == "layers":                            # every hook; columns, a rotation and parameters of only one layer
        layers = ("cable", "rope", "sinusoidal"), ("kerple", "sinusoidal")
        return {"name": name, "layers": [[position_of(part) for part in layer] for layer in layers]}
    if name == "clock":
        return {"name": "rope", **DEFAULTS["rope"], "clock": "cable"}
    return {"name": name, **DEFAULTS.get(name, {})}


def draw(name, shape, kind="normal"):
    """seeded by the tensor's name: what two encodings share is equal in both. RandomState's stream never changes."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy(np.asarray(getattr(stream, kind)(size=shape), dtype=np.float32))


def exactly_zero(key, config):
    """Gradients of what adds the same to every score of a row, which softmax ignores. Rope and carope turn a key's
    bias by its position, so that there it counts."""
    if not key.endswith(".self.key.bias"):
        return key.endswith("fire.mlp.2.bias")
    layer = int(re.search(r"\.layer\.(\d+)\.", key).group(1))
    return not hasattr(config, "position") or with_part(config, layer, TURNS).position["name"] == "none"


def set_weights(model):
    """float32 values for every parameter, far from their initial ones"""
    for name, p in model.named_parameters():
        if ("ln_" in name or "LayerNorm" in name) and name.endswith("weight"):
            value = 1 + 0.2 * draw(name, p.shape)
        elif ".kerple.r" in name:
            value = 0.1 + draw(name, p.shape, "uniform")
        elif name.endswith(".ssmax.s"):
            value = 0.2 + draw(name, p.shape, "uniform")
        elif name.endswith(".fire.c"):              # both signs: the definition takes |c| and |l|
            value = torch.tensor([0.3 if ".0." in name else -1.5])
        elif name.endswith(".fire.l"):              # 512 |l| = 15.4 and 25.6: rows on either side of max(L, i)
            value = torch.tensor([0.03 if ".0." in name else -0.05])
        elif ".fire.mlp" in name or ".t5." in name:
            value = 0.5 * draw(name, p.shape)
        elif ".c_attn." in name or ".self.query." in name or ".self.key." in name:      # attention far from uniform
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


def gradients(model, prefix="grad."):
    return {prefix + name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compute(model, inputs, targets, inputs_long, lengths=None):
    """everything that is compared, by name"""
    model.zero_grad()
    mask = None if lengths is None else (torch.arange(T) < lengths[:, None]).long()
    logits = model(inputs, attention_mask=mask).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    out = gradients(model)
    out["logits"], out["loss"] = logits.detach(), loss.detach().view(1)
    if lengths is not None:
        out["logits"] = out["logits"].masked_fill(mask[..., None] == 0, 0)
    position = getattr(model.config, "position", {"name": "learned"})
    with torch.no_grad():
        if position["name"] != "learned":
            out["logits.long"] = model(inputs_long).logits
        for word, kind in SCALINGS.items() if position["name"] == "rope" else ():
            stretched = copy.deepcopy(model)
            for module in stretched.modules():
                if hasattr(module, "rope"):
                    module.rope.stretch = {"rope_type": kind, "factor": T_LONG / T}
            out["logits." + word] = stretched(inputs_long).logits
    return out


def compute_contrastive(model, inputs, lengths, positives):
    out, Q = {}, len(positives)
    is_token = torch.arange(T) < lengths[:, None]
    for how in ("mean", "cls"):
        model.zero_grad(set_to_none=True)
        x = model.bert(inputs, attention_mask=is_token.long()).last_hidden_state
        means = x.masked_fill(~is_token[..., None], 0).sum(dim=1) / lengths[:, None]
        vectors = means if how == "mean" else x[:, 0]
        similarity = F.normalize(vectors[:Q], dim=1) @ F.normalize(vectors[Q:], dim=1).t()
        loss = F.cross_entropy(similarity / float(TEMPERATURE), positives)
        loss.backward()
        out["embeddings." + how], out["loss." + how] = vectors.detach(), loss.detach().view(1)
        out.update(gradients(model, f"grad.{how}."))
    return out


def fixture(model, config, given, run):
    """config: what the metadata say of the model; given: the inputs, by name; run(model): everything that is compared.
    Returns tensors, the errors, and the metadata."""
    set_weights(model.eval())
    name = config["position"]["name"]
    tensors = {"param." + n: p.detach().clone() for n, p in model.named_parameters()}
    f64 = run(copy.deepcopy(model).double())
    f32 = []
    for number in range(RUNS):
        trial = copy.deepcopy(model)
        if number > 0:
            nudge(trial, number)
        f32.append(run(trial))
    kept = {n: t for n, t in given.items() if n != "inputs.long" or "logits.long" in f64}
    tensors.update({n: t if t.is_floating_point() else t.int() for n, t in kept.items()})
    errors = {}
    for key, exact in f64.items():
        scale = exact.abs().max().item()
        if exactly_zero(key, model.config):
            assert scale < 1e-12, f"{name}: {key} is {scale}, not zero"
            exact, scale = torch.zeros_like(exact), 1.0
        assert np.isfinite(scale) and scale > 1e-4, f"{name}: {key} is too small to compare with, {scale}"
        tensors[key] = exact.float()
        worst = max((trial[key].double() - exact).abs().max().item() for trial in f32)
        errors[key] = max(worst / scale, torch.finfo(torch.float32).eps)
        tensors["error." + key.replace("grad.", "", 1)] = torch.tensor([errors[key]])
    return tensors, errors, {"format": "pt", "config": json.dumps(config)}


def of_name(name):
    """position and mask of a fixture"""
    mask = {"window": WINDOW, "sinks": SINKS} if name == "window" else {}
    if name == "documents":
        mask = {"window": WINDOWS, "sinks": SINKS, "document_mask": DOCUMENT}
    return {"position": position_of({"window": "cable", "documents": "layers"}.get(name, name)), **mask}


def gpt2(name):
    config = dict(n_layer=L, n_head=NH, n_embd=C, vocab_size=V, n_positions=T, **of_name(name))
    if name == "learned":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)), config
    return cable_hf.CableForCausalLM(cable_hf.CableConfig(**config)), config


def gpt2_fixture(name):
    stream = np.random.RandomState(1)
    inputs, targets = (torch.from_numpy(stream.randint(0, V, (B, T))) for _ in range(2))
    inputs_long = torch.from_numpy(stream.randint(0, V, (1, T_LONG)))
    targets[0, :3] = targets[0, 17] = targets[1, 30:34] = -1
    return fixture(*gpt2(name), {"inputs": inputs, "targets": targets, "inputs.long": inputs_long},
                   lambda model: compute(model, inputs, targets, inputs_long))


def bert(name):
    config = dict(hidden_size=C, num_hidden_layers=L, num_attention_heads=NH, intermediate_size=4 * C,
                  max_position_embeddings=T, vocab_size=V, **of_name(name))
    if name != "learned":
        return cable_hf.CableBertForMaskedLM(cable_hf.CableBertConfig(**config)), config
    model = transformers.BertForMaskedLM(transformers.BertConfig(**config, layer_norm_eps=1e-12))
    model.bert.embeddings.word_embeddings.padding_idx = None    # else the gradient of token 0 would be left out
    return model, config


def bert_fixture(name):
    stream = np.random.RandomState(2)
    inputs, targets = (torch.from_numpy(stream.randint(0, V, (B, T))) for _ in range(2))
    inputs_long = torch.from_numpy(stream.randint(0, V, (1, T_LONG)))
    lengths = torch.tensor(LENGTHS)
    for b, length in enumerate(LENGTHS):
        targets[b, stream.permutation(length)[round(TARGETS * length):]] = targets[b, length:] = -1
    return fixture(*bert(name), {"inputs": inputs, "targets": targets, "lengths": lengths, "inputs.long": inputs_long},
                   lambda model: compute(model, inputs, targets, inputs_long, lengths))


def contrastive_fixture(name):
    stream = np.random.RandomState(3)
    lengths, positives = torch.tensor(QUERY_LENGTHS + DOCUMENT_LENGTHS), torch.tensor(POSITIVES)
    inputs = torch.from_numpy(stream.randint(0, V, (len(lengths), T)))
    given = {"inputs": inputs, "lengths": lengths, "positives": positives,
             "temperature": torch.tensor([float(TEMPERATURE)])}
    return fixture(*bert(name), given, lambda model: compute_contrastive(model, inputs, lengths, positives))


def fixtures():
    """{the name of a file: what makes its tensors, errors and metadata}"""
    names = [*DEFAULTS, "learned", "clock", "window", "layers"]
    names.remove("fox")                             # a second name of cable_v1
    files = {"gpt2_" + name: (gpt2_fixture, name) for name in [*names, "documents"]}
    files.update({"bert_" + name: (bert_fixture, name) for name in names if name != "cope"})   # cope is causal
    return {**files, "contrastive_cable": (contrastive_fixture, "cable")}


def own(name, tensors):
    """without the parameters that the file of the model with cable has, too"""
    family, _, encoding = name.partition("_")
    model = {"gpt2": gpt2, "bert": bert, "contrastive": bert}[family]("cable")[0]
    shared = set() if (family, encoding) in (("gpt2", "cable"), ("bert", "cable")) else {
        "param." + n for n, p in model.named_parameters()}
    return {n: t for n, t in tensors.items() if n not in shared}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", nargs="?", default=os.path.join(export.HERE, "..", "..", "test", "fixtures"))
    parser.add_argument("--only", default="", metavar="PREFIX", help="write the files whose names begin so, e.g. bert_")
    args = parser.parse_args()
    os.makedirs(args.directory, exist_ok=True)
    torch.manual_seed(1)                            # every weight is replaced; this only keeps the run reproducible
    torch.set_flush_denormal(True)                  # as in the trainers
    torch.set_num_threads(1)
    total = 0
    print(f"{'file':17}{'bytes':>8}{'loss':>10}   float32 against float64: loss, logits or embeddings, worst gradient")
    for name, (make, encoding) in fixtures().items():
        if not name.startswith(args.only):
            continue
        tensors, errors, metadata = make(encoding)
        path = os.path.join(args.directory, name + ".safetensors")
        write_safetensors(path, own(name, tensors), metadata)
        total += os.path.getsize(path)
        worst = max((k for k in errors if k.startswith("grad.")), key=errors.get)
        logits = max(v for k, v in errors.items() if k.startswith(("logits", "embeddings")))
        loss = "loss" if "loss" in errors else "loss.mean"
        print(f"{name:17}{os.path.getsize(path):8}{tensors[loss].item():10.6f}   "
              f"{errors[loss]:.1e}  {logits:.1e}  {errors[worst]:.1e} {worst[5:]}")
    print(f"{total} bytes in {args.directory}")


if __name__ == "__main__":
    main()
