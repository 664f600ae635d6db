"""modeling_cable.py -- GPT-2 with every positional encoding of this repository, in plain PyTorch (1.13 or later).

The readable reference: T x T biases, autograd, no dependency but PyTorch; the encodings are in cable_encodings.py.
Tensors are named and laid out as in the checkpoints (Hugging Face's GPT-2 plus the encodings' own), so
load_checkpoint() reads what the trainer writes:

    model = load_checkpoint("out/step_00001000")
    logits, loss = model(idx, targets)              # idx, targets (B,T) int64; targets of -1 are ignored
    logits, _ = model(idx, rope_scaling=("yarn", None))
    B = model.bias(0, idx[:1])                      # (NH,T,T): what layer 0 adds to its scaled scores
"""
import json
import math
import os
import struct
from dataclasses import asdict, dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

import cable_encodings
from cable_encodings import (CABLES, GRAPES, MLP, Bam, Conv1D, EncodedAttention, Kerple, SSMax, add_position,
                             check_position, renamed, rotate, shared_t5, window_of, with_part)

KNOWN = {**cable_encodings.POSITIONS, "learned": {}}
POSITIONS = [name for name in KNOWN if name != "fox"]         # a second name of cable_v1
# Today's hyperparameters; KNOWN has what a config.json without the key means, which is older
DEFAULTS = {**KNOWN, "sinusoidal": {"scale": 0.1, "embed": "plain"}, "kcable": {"weight": "outside"}}
ROPE_TYPES = {"pi": "linear", "yarn": "yarn_paper"}    # --rope_scaling's words that config.json has otherwise


@dataclass
class CableConfig:
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50257
    n_positions: int = 1024                         # the length the model is trained at
    # and its hyperparameters: t5_clip K, rope theta. Several: {"name": "layers", "layers": [[...], ...]}, the encodings
    # of the layers that take turns
    position: dict = field(default_factory=lambda: {"name": "cable"})
    rope_scaling: dict = None                       # as Hugging Face has it: rope_type, factor, original length
    window: object = 0                              # keys at this distance or more are hidden; 0: none are. A list: of
                                                    # the layers, which take turns
    sinks: int = 0                                  # but for the first ones of the sequence
    document_mask: int = None                       # the token that begins a document, which no query sees beyond
    causal: bool = True                             # always; the encodings ask
    layer_norm_epsilon: float = 1e-5
    model_type: str = "gpt2"
    activation_function: str = "gelu_new"

    def __post_init__(self):
        if self.n_embd % self.n_head != 0:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        self.position, self.rope_scaling = check_position(self.position, None, KNOWN), renamed(self.rope_scaling)
        layers = self.position["layers"] if self.position["name"] == "layers" else [[self.position]]
        for part in (part for layer in layers for part in layer):
            if part["name"] == "fire" and self.document_mask is not None:
                raise ValueError("document_mask with fire, which divides by the position in the sequence")
            if part["name"] == "t5_clip":
                part["K"] = int(self.n_positions - 1 if part["K"] is None else part["K"])

    def stretch(self, asked=None):
        """rope_scaling as config.json has it. asked: as forward() has it, instead of what the checkpoint has settled"""
        if not isinstance(asked, tuple):
            return asked or self.rope_scaling
        stored = self.rope_scaling or {}
        return {**stored, "rope_type": ROPE_TYPES.get(asked[0], asked[0]), "factor": asked[1]}


def hidden_pairs(config, layer, T, device=None, begin=None):
    """what a query of a layer does not see, (T,T), or (B,1,T,T) with documents that begin at begin (B,T): later keys,
    those before its document, and those outside the window that are not sinks"""
    j = torch.arange(T, device=device)
    d = j[:, None] - j
    hidden = d < 0
    if begin is not None:
        j = j - begin[:, None, :, None]             # counted from where the query's document begins
        hidden = hidden | (j < 0)
    window = window_of(config, layer)
    if window > 0:
        hidden = hidden | (d >= window) & (j >= config.sinks)
    return hidden


def document_begins(config, idx):
    """(B,T): where the document of each token of idx (B,T) begins; None where documents are not told apart"""
    if config.document_mask is None:
        return None
    t = torch.arange(idx.shape[1], device=idx.device)
    return torch.where(idx == config.document_mask, t, torch.zeros_like(t)).cummax(1).values


class Attention(EncodedAttention):
    def __init__(self, config, layer, t5):
        super().__init__(config, layer)
        C = config.n_embd
        self.whole = config
        self.c_attn, self.c_proj = Conv1D(3 * C, C), Conv1D(C, C)
        self.c_proj.weight.data /= math.sqrt(2 * config.n_layer)
        # in a list: the table is the model's, not a layer's submodule
        self.table = [self.t5 if hasattr(self, "t5") else t5]

    def pair_bias(self, x):
        """B_ij of x (B,T,C), the layer's input: (B or 1,NH,T,T), or None where nothing is added to the scores; nor
        for cope, which forward() adds"""
        t, S, g = torch.arange(x.shape[1], device=x.device)[None], None, None
        if self.name in CABLES:
            b, g = self.own()(x, None)
            # S grows with T while differences between neighbours do not: float32 would lose them
            S = b.cumsum(-1, dtype=torch.float64 if x.shape[1] > 1024 else x.dtype)
        elif self.name in GRAPES:
            S, g = self.grape(x)
        table = None if self.table[0] is None else self.table[0].weight
        bias = self.bias(t, t, S, S, g, table, x.dtype)
        return None if bias is None else bias.to(x.dtype)

    def turn(self, x, q, k, rope_scaling):
        """q, k (B,NH,T,HS) of x (B,T,C) as rope or carope makes them, where the layer has it"""
        if self.rope.position["name"] == "none":
            return q, k
        t = torch.arange(q.shape[2], device=q.device)[None] if self.clock is None else self.clock_sums(x)
        angle, factor = self.angles(t, q.shape[2], self.rope.stretch(rope_scaling))
        return rotate(q, angle) * factor, rotate(k, angle)

    def forward(self, x, rope_scaling=None, begin=None):
        """begin (B,T): where each token's document begins"""
        B, T, C = x.shape
        NH = self.config.n_head
        q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        hidden = hidden_pairs(self.whole, self.index, T, x.device, begin)
        q, k = self.turn(x, q, k, rope_scaling)
        factor = 1 if self.ssmax is None else self.ssmax(x.shape[1], hidden, x.dtype)
        q = q * factor
        scores, bias = (q @ k.transpose(-2, -1)) * self.scale, self.pair_bias(x)
        if bias is not None:
            scores = scores + factor * bias
        if self.name == "cope":
            scores = scores + self.cope(q, scores, hidden)
        scores = scores.masked_fill(hidden, float("-inf"))
        return self.c_proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, config, layer, t5):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer, t5)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x, rope_scaling=None, begin=None):
        x = x + self.attn(self.ln_1(x), rope_scaling, begin)
        return x + self.mlp(self.ln_2(x))


class CableGPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, t5 = config.n_embd, shared_t5(config)
        self.config = config
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, C)})
        if with_part(config, 0, ("learned",)).position["name"] == "learned":
            self.transformer["wpe"] = nn.Embedding(config.n_positions, C)
        if t5 is not None:
            self.transformer["t5"] = t5
        for embedding in self.transformer.values():
            nn.init.normal_(embedding.weight, std=0.02)
        self.transformer["h"] = nn.ModuleList(Block(config, layer, t5) for layer in range(config.n_layer))
        self.transformer["ln_f"] = nn.LayerNorm(C, eps=config.layer_norm_epsilon)

    def embed(self, idx, begin=None):
        T = idx.shape[1]
        t = torch.arange(T, device=idx.device)[None]
        t = t if begin is None else t - begin       # the position in the document
        x = add_position(self.transformer.wte(idx), t, self.config)
        if "wpe" not in self.transformer:
            return x
        if T > self.config.n_positions:
            raise ValueError(f"learned: T = {T} is beyond the table's {self.config.n_positions} positions")
        return x + self.transformer.wpe.weight[t]

    def hidden(self, idx, rope_scaling=None):
        """what the head reads, (B,T,C)"""
        begin = document_begins(self.config, idx)
        x = self.embed(idx, begin)
        for block in self.transformer.h:
            x = block(x, rope_scaling, begin)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, rope_scaling=None):
        """rope_scaling: (pi | ntk | yarn, factor or None for T / original length), or an object as config.json has it,
        longrope's, too, instead of what the checkpoint has.
        Returns logits (B,T,V) and the mean loss over the targets that are not -1 (None without targets)."""
        logits = self.hidden(idx, rope_scaling) @ self.transformer.wte.weight.t()
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def bias(self, layer, idx):
        """B_ij of one sequence idx (1,T) in a layer, (NH,T,T); entries with j > i are masked"""
        begin = document_begins(self.config, idx)
        x = self.embed(idx, begin)
        for block in self.transformer.h[:layer]:
            x = block(x, begin=begin)
        block, T = self.transformer.h[layer], idx.shape[1]
        if block.attn.name == "cope":
            raise ValueError("cope: what it adds to a score depends on other scores, which bias() does not have")
        bias = block.attn.pair_bias(block.ln_1(x))
        return x.new_zeros(self.config.n_head, T, T) if bias is None else bias.reshape(self.config.n_head, T, T)


def project(model):
    """brings parameters with a range back into it; to be called after every update"""
    for module in model.modules():
        if isinstance(module, (Bam, Kerple, SSMax)):
            module.project()


# ---- safetensors: u64 length of the header, the header as JSON, the data ----
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


def write_safetensors(path, tensors, metadata=None):
    names, header, data = {v: k for k, v in DTYPES.items()}, {"__metadata__": metadata or {"format": "pt"}}, []
    end = 0
    for name, t in tensors.items():
        data.append(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + len(data[-1])]}
        end += len(data[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)                 # the data starts aligned
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))


def read_safetensors(path):
    with open(path, "rb") as f:
        raw = bytearray(f.read())
    size = struct.unpack_from("<Q", raw)[0] if len(raw) >= 8 else len(raw)
    if 8 + size > len(raw):
        raise ValueError(f"{path}: not a safetensors file, or cut short")
    header, data, tensors = json.loads(raw[8:8 + size]), torch.frombuffer(raw, dtype=torch.uint8)[8 + size:], {}
    for name, info in header.items():
        if name != "__metadata__":
            begin, end = info["data_offsets"]
            tensors[name] = data[begin:end].clone().view(DTYPES[info["dtype"]]).view(info["shape"])
    return tensors


# Keys of transformers' GPT2Config that make another model of the same tensors, and what is computed here
COMPUTED = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True, "add_cross_attention": False}


def load_checkpoint(directory):
    """config.json and model.safetensors of a checkpoint, or of a Hugging Face GPT-2 (position `learned`)"""
    path = os.path.join(directory, "config.json")
    with open(path) as f:
        stored = json.load(f)
    for key, value in COMPUTED.items():
        if stored.get(key, value) != value:
            raise ValueError(f"{path}: {key}: expected {value!r}, which is what is computed here, got {stored[key]!r}")
    known = {k: stored[k] for k in CableConfig.__dataclass_fields__ if k in stored}
    known.setdefault("position", {"name": "learned"})
    model = CableGPT2(CableConfig(**known))
    state = {}
    for name, t in read_safetensors(os.path.join(directory, "model.safetensors")).items():
        name = name if name.startswith(("transformer.", "lm_head.")) else "transformer." + name
        # buffers of old transformers versions, and the head, which is wte
        if not name.endswith((".attn.bias", ".attn.masked_bias")) and name != "lm_head.weight":
            state[name] = t.float()
    model.load_state_dict(state)
    return model


def save_checkpoint(model, directory):
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump({**asdict(model.config), "encoding_version": 2}, f, indent=2)
    write_safetensors(os.path.join(directory, "model.safetensors"), model.state_dict())
