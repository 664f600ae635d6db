"""modeling_cable.py -- GPT-2 with every positional encoding of this repository, in plain PyTorch (1.13 or later).

The readable reference: T x T biases, autograd, no dependency but PyTorch. Tensors are named and laid out as in the
checkpoints (Hugging Face's GPT-2 plus the encodings' own), so load_checkpoint() reads what the trainer writes:

    model = load_checkpoint("out/step_00001000")
    logits, loss = model(idx, targets)              # idx, targets (B,T) int64; targets of -1 are ignored
    logits, _ = model(idx, rope_scaling=("yarn", None))
    B = model.bias(0, idx[:1])                      # (NH,T,T): what layer 0 adds to its scaled scores
"""
import json
import math
import os
import struct
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

POSITIONS = ("none learned sinusoidal rope alibi t5 t5_clip kerple kerple_power sandwich cope fire "
             "cable cable_nw kcable kcable_nw cable_v1 kcable_v1 ssmax alibi_trained alibi_random").split()
# Hyperparameters but t5_clip's K: today's defaults, and what a config.json without the key means, which is older
DEFAULTS = {"rope": {"theta": 10000.0, "p": 1.0}, "sinusoidal": {"scale": 0.1, "embed": "plain"},
            "kcable": {"weight": "outside"}, "alibi": {"slopes": "press"}, "t5": {"buckets": 32, "distance": 128},
            "t5_clip": {"scale": "HS", "layers": "shared"}, "sandwich": {"d": 128}, "cope": {"npos": 64},
            "alibi_random": {"seed": 42, "mean": 0.125}}
OLD_DEFAULTS = {**DEFAULTS, "sinusoidal": {"scale": 1.0, "embed": "sqrt"}, "kcable": {"weight": "inside"}}
CABLES = ("cable", "cable_nw", "kcable", "kcable_nw", "cable_v1", "kcable_v1")
BIASES = [name for name in POSITIONS if name not in ("none", "learned", "sinusoidal", "rope", "ssmax")]
CAUSAL_ONLY = ("cope",)                             # a key after the query has no position
ROPE_TYPES = {"default": None, "linear": "pi", "ntk": "ntk", "yarn_paper": "yarn", "longrope": "longrope",
              "yarn": "yarn"}                           # as older files have it
FIRE_LENGTH, FIRE_EPS, FIRE_HIDDEN = 512, 1e-6, 32


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
    window: int = 0                                 # keys at this distance or more are hidden; 0: none are
    sinks: int = 0                                  # but for the first ones of the sequence
    document_mask: int = None                       # the token that begins a document, which no query sees beyond
    causal: bool = True
    layer_norm_epsilon: float = 1e-5
    model_type: str = "gpt2"
    activation_function: str = "gelu_new"

    def __post_init__(self):
        name = self.position.get("name")
        if name == "fire" and self.document_mask is not None:
            raise ValueError("document_mask with fire, which divides by the position in the sequence")
        if name == "layers":
            turns = [[replace(self, position=p).position for p in parts] for parts in self.position["layers"]]
            self.position = {"name": "layers", "layers": turns}
            return
        if name == "fox":                           # a second name
            name, self.position = "cable_v1", {**self.position, "name": "cable_v1"}
        if name not in POSITIONS:
            raise ValueError(f"position {name!r}: expected one of {', '.join(POSITIONS)}")
        if self.n_embd % self.n_head != 0:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if name in CAUSAL_ONLY and not self.causal:
            raise ValueError(f"position {name}: expected a causal model")
        self.position = {**OLD_DEFAULTS.get(name, {}), **self.position}
        if name == "t5_clip":
            self.position["K"] = int(self.position.get("K", self.n_positions - 1))

    def parts(self, layer):
        """the encodings of a layer"""
        turns = self.position["layers"] if self.position["name"] == "layers" else [[self.position]]
        return turns[layer % len(turns)]

    def part(self, layer, names):
        """the configuration with that of the layer's encodings alone which is one of `names`, or with none"""
        found = [p for p in self.parts(layer) if p["name"] in names]
        return replace(self, position=found[0] if found else {"name": "none"})

    def shared_t5(self):
        """the configuration with the encoding whose table all layers share, or None"""
        for layer in range(self.n_layer):
            one = self.part(layer, ("t5", "t5_clip"))
            if one.position["name"] != "none" and one.position.get("layers") != "own":
                return one
        return None

    def stretch(self, T, asked=None):
        """how rope is stretched at T tokens: (pi | ntk | yarn | longrope or None, factor, original length, longrope's
        factor of each pair). asked: as forward() has it, instead of what the checkpoint has settled"""
        stored = asked if isinstance(asked, dict) else self.rope_scaling or {}
        original = stored.get("original_max_position_embeddings", self.n_positions)
        if stored and not isinstance(asked, tuple):
            asked = (ROPE_TYPES[stored.get("rope_type") or stored["type"]], float(stored["factor"]))
        scaling, s = asked or (None, None)
        s = max(1.0, T / original) if s is None else s
        return scaling, s, original, stored.get("long_factor" if T > original else "short_factor")


def distances(T, device=None):
    """i - j, (T,T)"""
    t = torch.arange(T, device=device)
    return t[:, None] - t[None, :]


def hidden_pairs(config, T, device=None, begin=None):
    """what a query does not see, (T,T), or (B,1,T,T) with documents that begin at begin (B,T): later keys, if causal,
    those before its document, and those outside the window that are not sinks"""
    d, j = distances(T, device), torch.arange(T, device=device)
    hidden = d < 0 if config.causal else torch.zeros_like(d, dtype=torch.bool)
    if begin is not None:
        j = j - begin[:, None, :, None]             # counted from where the query's document begins
        hidden = hidden | (j < 0)
    if config.window > 0:
        hidden = hidden | (d.abs() >= config.window) & (j >= config.sinks)
    return hidden


def document_begins(config, idx):
    """(B,T): where the document of each token of idx (B,T) begins; None where documents are not told apart"""
    if config.document_mask is None:
        return None
    t = torch.arange(idx.shape[1], device=idx.device)
    return torch.where(idx == config.document_mask, t, torch.zeros_like(t)).cummax(1).values


def alibi_slopes(NH, geometric=False):
    """2^(-8(h+1)/NH); NH no power of 2: those of the next lower power p, then every other one of 2p's, unless
    `geometric` is the formula as it stands"""
    p = NH if geometric else 2 ** int(math.log2(NH))
    slopes = [2.0 ** (-8.0 * (h + 1) / p) for h in range(p)]
    return torch.tensor(slopes + [2.0 ** (-4.0 * (h + 1) / p) for h in range(0, 2 * (NH - p), 2)], dtype=torch.float64)


def uniform01(seed, stream):
    """what llmc/base/rand.h draws: in [0, 1), with 53 bits of SplitMix64"""
    x = seed
    for word in (stream, 0, 0):
        x = (x + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        x = x ^ x >> 31 ^ word
    return (x >> 11) / 2 ** 53


class Alibi(nn.Module):
    """-m_h |i-j|; m_h published, or r_h times that with r_h learned, or drawn from an exponential distribution"""
    def __init__(self, position, NH):
        super().__init__()
        if position["name"] == "alibi_random":
            uniform = torch.tensor([uniform01(int(position["seed"]), h) for h in range(NH)], dtype=torch.float64)
            self.slopes = -position["mean"] * torch.log1p(-uniform)
        else:
            self.slopes = alibi_slopes(NH, position.get("slopes") == "geometric")
        self.r = nn.Parameter(torch.ones(NH)) if position["name"] == "alibi_trained" else None

    def forward(self, x):
        slopes = self.slopes.to(x) if self.r is None else self.slopes.to(x) * self.r
        return -slopes[:, None, None] * distances(x.shape[1], x.device).abs().to(x.dtype)


def sandwich_bias(distance, NH, d):
    """(sum over k < d/2 of cos(distance / 10000^(2k/d)) - d/2) NH / (8h) of the heads h = 1 .. NH, float64"""
    reach = torch.arange(int(distance.abs().max()) + 1, dtype=torch.float64, device=distance.device)
    frequency = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64, device=distance.device) / d)
    row = (reach[:, None] * frequency).cos().sum(-1) - d / 2
    ratio = 8 * torch.arange(1, NH + 1, dtype=torch.float64, device=distance.device) / NH
    return row[distance.abs()] / ratio[:, None, None]


def t5_bucket(distance, causal, buckets=32, max_distance=128):
    """T5's bucket of i - j: half of them exact, the rest logarithmic up to max_distance; bidirectional: keys after the
    query take the upper half."""
    n = buckets if causal else buckets // 2
    first = torch.zeros_like(distance) if causal else (distance < 0).long() * n
    d = distance.clamp(min=0) if causal else distance.abs()
    exact = n // 2
    ratio = torch.log(d.clamp(min=1).double() / exact) / math.log(max_distance / exact)
    # the sliver keeps distances that sit on a boundary (8, 16, 32, 64 when bidirectional) in the upper bucket
    large = (exact + (ratio * (n - exact) + 1e-9).long()).clamp(max=n - 1)
    return first + torch.where(d < exact, d, large)


def rope_frequencies(HS, theta, T_original, scaling=None, s=1.0, factors=None):
    """radians a token for each pair of the HS channels that are turned (HS/2), float64, and the factor on q.k; factors:
    longrope's"""
    i = torch.arange(0, HS, 2, dtype=torch.float64)
    if scaling == "ntk":
        theta = theta * s ** (HS / (HS - 2))
    f = theta ** (-i / HS)
    if scaling == "pi":
        return f / s, 1.0
    if scaling == "yarn":
        turns = T_original * f / (2 * math.pi)      # full turns within the original length
        gamma = ((turns - 1) / 31).clamp(0, 1)
        return gamma * f + (1 - gamma) * f / s, (0.1 * math.log(s) + 1) ** 2
    if scaling == "longrope":
        return f / torch.tensor(factors, dtype=torch.float64), 1 + math.log(s) / math.log(T_original)
    return f, 1.0


def rotate(x, frequency):
    """x (B,NH,T,HS): the pair (2i, 2i+1) of token t turned by t * frequency[i]; channels without a frequency are not"""
    x, rest = x[..., :2 * len(frequency)], x[..., 2 * len(frequency):]
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2), rest), dim=-1)


def sinusoids(T, C):
    angle = torch.arange(T, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[:, :C]


class Conv1D(nn.Module):
    """a linear layer whose weight is (in, out), as GPT-2's files have it"""
    def __init__(self, n_in, n_out, std):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * std)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Cable(nn.Module):
    """B_ij = -g_i |S_i - S_j| and its variants"""
    def __init__(self, name, C, NH, inside=False):
        super().__init__()
        self.name, self.inside = name, inside       # inside: kcable's g is inside the logarithm
        self.c = nn.Linear(C, NH)
        if name in ("cable", "kcable"):
            self.s = nn.Linear(C, NH)
        for linear in self.children():
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        T = x.shape[1]
        z = self.c(x).transpose(1, 2)               # (B,NH,T)
        b = F.softplus(z) if self.name.endswith("_v1") else F.relu(z)
        # S grows with T while differences between neighbours do not: float32 would lose them
        S = b.cumsum(-1, dtype=torch.float64 if T > 1024 else x.dtype)
        # |S_i - S_j| with the sign taken from the index, so that the gradient where S_i = S_j is defined as well
        sign = torch.where(distances(T, x.device) >= 0, 1.0, -1.0).to(x.dtype)
        r = (S[..., :, None] - S[..., None, :]).to(x.dtype) * sign
        g = F.softplus(self.s(x).transpose(1, 2))[..., None] if hasattr(self, "s") else 1.0
        if not self.name.startswith("kcable"):
            return -g * r
        return -torch.log1p((g * r) ** 2) if self.inside else -g * torch.log1p(r * r)


class SSMax(nn.Module):
    """q times s log n, n the number of keys that it sees: softmax with the base n instead of e"""
    def __init__(self, config):
        super().__init__()
        T = config.n_positions
        mean = math.lgamma(T + 1) / T if config.causal else math.log(T)
        self.s = nn.Parameter(torch.full((config.n_head,), 1 / mean))

    @torch.no_grad()
    def project(self):
        """to be called after every update"""
        self.s.clamp_(min=1e-3)

    def forward(self, q, hidden):
        """q (B,NH,T,HS); hidden, broadcast to (B,1,T,T): the keys that are not seen"""
        n = (~hidden).sum(-1).clamp(min=1)[..., None]       # a row of padding may see none
        return q * self.s[:, None, None] * torch.log(n.to(q.dtype))


class Cope(nn.Module):
    """q_i.e[p_ij], where p_ij counts the keys t from j to i by sigmoid(score_it); e is linear between whole p"""
    def __init__(self, HS, npos):
        super().__init__()
        self.e = nn.Parameter(torch.zeros(HS, npos))

    def forward(self, q, scores):
        """q (B,NH,T,HS), scores (B,NH,T,T), -inf where a key is not seen"""
        last = self.e.shape[1] - 1
        p = torch.sigmoid(scores).flip(-1).cumsum(-1).flip(-1).clamp(max=last)
        below = p.detach().floor().clamp(max=last - 1)
        z, n = q @ self.e, below.long()
        return z.gather(-1, n) * (below + 1 - p) + z.gather(-1, n + 1) * (p - below)


class Kerple(nn.Module):
    def __init__(self, power, NH):
        super().__init__()
        self.power = power
        self.r1 = nn.Parameter(torch.rand(NH) * 2)
        self.r2 = nn.Parameter(torch.rand(NH) * (2 if power else 1))
        self.project()

    @torch.no_grad()
    def project(self):
        """to be called after every update"""
        self.r1.clamp_(min=0.01)
        self.r2.clamp_(min=0.01, max=2.0 if self.power else None)

    def forward(self, x):
        d = distances(x.shape[1], x.device).abs().to(x.dtype)
        r1, r2 = self.r1[:, None, None], self.r2[:, None, None]
        return -r1 * d ** r2 if self.power else -r1 * torch.log(1 + r2 * d)


class Fire(nn.Module):
    def __init__(self, NH):
        super().__init__()
        self.c = nn.Parameter(torch.full((1,), 0.1))
        self.l = nn.Parameter(torch.ones(1))
        self.mlp = nn.Sequential(nn.Linear(1, FIRE_HIDDEN), nn.ReLU(), nn.Linear(FIRE_HIDDEN, NH))

    def forward(self, x):
        i = torch.arange(x.shape[1], device=x.device)
        # max(L, i), bidirectional max(L, i, j): where j > i the causal mask hides the difference
        length = torch.maximum(self.l.abs() * FIRE_LENGTH, torch.maximum(i[:, None], i[None, :]).to(x.dtype))
        psi = lambda d: torch.log(self.c.abs() * d + 1)
        y = psi(distances(len(i), x.device).abs().to(x.dtype)) / (psi(length) + FIRE_EPS)
        return self.mlp(y[..., None]).permute(2, 0, 1)


def t5_rows(config):
    """of the table of t5 or t5_clip"""
    if config.position["name"] == "t5":
        return int(config.position["buckets"])
    K = config.position["K"]
    return K + 1 if config.causal else 2 * K + 1


class Attention(nn.Module):
    def __init__(self, config, layer, t5):
        super().__init__()
        self.whole, self.rope = config, config.part(layer, ("rope",))
        self.ssmax = SSMax(config) if config.part(layer, ("ssmax",)).position["name"] == "ssmax" else None
        config = config.part(layer, BIASES)
        C, NH, name = config.n_embd, config.n_head, config.position["name"]
        self.config, self.name, self.sdpa = config, name, False
        self.c_attn = Conv1D(C, 3 * C, 0.02)
        self.c_proj = Conv1D(C, C, 0.02 / math.sqrt(2 * config.n_layer))
        if name in CABLES:
            self.cable = Cable(name, C, NH, config.position.get("weight") == "inside")
        elif name.startswith("kerple"):
            self.kerple = Kerple(name == "kerple_power", NH)
        elif name.startswith("alibi"):
            self.alibi = Alibi(config.position, NH)
        elif name == "fire":
            self.fire = Fire(NH)
        elif name == "cope":
            self.cope = Cope(C // NH, int(config.position["npos"]))
        if config.position.get("layers") == "own":
            self.t5 = nn.Embedding(t5_rows(config), NH)
            nn.init.normal_(self.t5.weight, std=0.02)
        else:
            self.t5 = [t5]                          # in a list: the table is the model's, not a layer's submodule

    def bias(self, x):
        """B_ij of x (B,T,C), the layer's input: (B or absent,NH,T,T), or None where nothing is added to the scores; nor
        for cope, which forward() adds"""
        if self.name in CABLES:
            return self.cable(x)
        if self.name.startswith("kerple"):
            return self.kerple(x)
        if self.name == "fire":
            return self.fire(x)
        d = distances(x.shape[1], x.device)
        if self.name.startswith("alibi"):
            return self.alibi(x)
        if self.name == "sandwich":
            return sandwich_bias(d, self.config.n_head, int(self.config.position["d"])).to(x)
        table = self.t5[0] if isinstance(self.t5, list) else self.t5
        if self.name == "t5":
            sizes = int(self.config.position["buckets"]), int(self.config.position["distance"])
            return table.weight[t5_bucket(d, self.config.causal, *sizes)].permute(2, 0, 1)
        if self.name == "t5_clip":                  # bidirectional: row K + (i - j)
            K = self.config.position["K"]
            row = d.clamp(0, K) if self.config.causal else d.clamp(-K, K) + K
            return table.weight[row].permute(2, 0, 1)
        return None

    def turn(self, q, k, rope_scaling):
        """q, k (B,NH,T,HS) as rope makes them, where the layer has it"""
        if self.rope.position["name"] != "rope":
            return q, k
        scaling, s, original, factors = self.rope.stretch(q.shape[2], rope_scaling)
        R = 2 * math.ceil(self.rope.position["p"] * q.shape[3] / 2)
        f, factor = rope_frequencies(R, self.rope.position["theta"], original, scaling, s, factors)
        return rotate(q, f) * factor, rotate(k, f)

    def score_scale(self):
        """what q.k is multiplied by"""
        C, NH = self.config.n_embd, self.config.n_head
        return 1 / math.sqrt(C if self.config.position.get("scale") == "C" else C // NH)

    def forward(self, x, rope_scaling=None, begin=None):
        """begin (B,T): where each token's document begins"""
        B, T, C = x.shape
        NH, config = self.config.n_head, self.config
        q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        q, k = self.turn(q, k, rope_scaling)
        bias, hidden = self.bias(x), hidden_pairs(self.whole, T, x.device, begin)
        if self.ssmax is not None:
            q = self.ssmax(q, hidden)
        if self.sdpa and bias is None and self.name != "cope" and config.window == 0 and begin is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=config.causal)
        else:
            scores = (q @ k.transpose(-2, -1)) * self.score_scale()
            if bias is not None:
                scores = scores + bias
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.name == "cope":
                scores = scores + self.cope(q, scores)
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = Conv1D(C, 4 * C, 0.02)
        self.c_proj = Conv1D(4 * C, C, 0.02 / math.sqrt(2 * config.n_layer))

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


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
        C, shared = config.n_embd, config.shared_t5()
        self.config = config
        self.embedding = config.part(0, ("learned", "sinusoidal")).position
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, C)})
        if self.embedding["name"] == "learned":
            self.transformer["wpe"] = nn.Embedding(config.n_positions, C)
        t5 = None
        if shared is not None:
            t5 = self.transformer["t5"] = nn.Embedding(t5_rows(shared), config.n_head)
        for embedding in self.transformer.values():
            nn.init.normal_(embedding.weight, std=0.02)
        self.transformer["h"] = nn.ModuleList(Block(config, layer, t5) for layer in range(config.n_layer))
        self.transformer["ln_f"] = nn.LayerNorm(C, eps=config.layer_norm_epsilon)

    def embed(self, idx, begin=None):
        x, T = self.transformer.wte(idx), idx.shape[1]
        name, C = self.embedding["name"], self.config.n_embd
        t = torch.arange(T, device=idx.device)
        t = t if begin is None else t - begin       # the position in the document
        if name == "learned":
            if T > self.config.n_positions:
                raise ValueError(f"learned: T = {T} is beyond the table's {self.config.n_positions} positions")
            x = x + self.transformer.wpe.weight[t]
        elif name == "sinusoidal":
            factor = math.sqrt(C) if self.embedding["embed"] == "sqrt" else 1.0
            x = factor * x + (self.embedding["scale"] * sinusoids(T, C)).to(x)[t]
        return x

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
        """B_ij of one sequence idx (1,T) in a layer, (NH,T,T); entries with j > i are masked when causal"""
        begin = document_begins(self.config, idx)
        x = self.embed(idx, begin)
        for block in self.transformer.h[:layer]:
            x = block(x, begin=begin)
        block, T = self.transformer.h[layer], idx.shape[1]
        if block.attn.name == "cope":
            raise ValueError("cope: what it adds to a score depends on other scores, which bias() does not have")
        bias = block.attn.bias(block.ln_1(x))
        return x.new_zeros(self.config.n_head, T, T) if bias is None else bias.reshape(self.config.n_head, T, T)

    def project(self):
        """brings parameters with a range back into it; to be called after every update"""
        for module in self.modules():
            if isinstance(module, (Kerple, SSMax)):
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


# Keys of transformers' GPT2Config and BertConfig that make another model of the same tensors, and what is computed here
COMPUTED = {"activation_function": "gelu_new", "hidden_act": "gelu", "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False, "position_embedding_type": "absolute",
            "tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False}


def read_config(directory):
    path = os.path.join(directory, "config.json")
    with open(path) as f:
        stored = json.load(f)
    for key, value in COMPUTED.items():
        if stored.get(key, value) != value:
            raise ValueError(f"{path}: {key}: expected {value!r}, which is what is computed here, got {stored[key]!r}")
    return stored


def load_checkpoint(directory):
    """config.json and model.safetensors of a checkpoint, or of a Hugging Face GPT-2 (position `learned`)"""
    stored = read_config(directory)
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
        json.dump(asdict(model.config), f, indent=2)
    write_safetensors(os.path.join(directory, "model.safetensors"), model.state_dict())
