R"py("""  # Python skips this line; C++ begins a raw string here: the trainers write this file, then cable_hf.py.
"""cable_encodings.py -- the encodings of cable.c, and the layers around attention, in plain PyTorch (1.13 or later).

modeling_cable.py, the readable reference, imports them. Beside a checkpoint they stand in its cable_hf.py, before the
models for the transformers library.
"""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

FIRE_LENGTH, FIRE_EPS, FIRE_HIDDEN = 512, 1e-6, 32
# The hyperparameters of each encoding, with what stands for a key that config.json lacks, as the file is older than it;
# 0: such a key stays absent.
CABLES = {"cable": {"bias": 0.0, "gate": 0.0}, "kcable": {"weight": "inside", "bias": 0.0, "gate": 0.0},
          "cable_nw": {"bias": 0.0}, "kcable_nw": {"bias": 0.0}, "cable_v1": {}, "fox": {}, "kcable_v1": {},
          "cable_signed": {}}
GRAPES = {"grape_q": {}, "grape_k": {}, "grape_qk": {}}
POSITIONS = {**CABLES, **GRAPES, "none": {}, "sinusoidal": {"scale": 1.0, "embed": "sqrt"},
             "rope": {"theta": 10000.0, "p": 1.0, "clock": "token"}, "alibi": {"slopes": "press", "scale": 0.0},
             "t5": {"buckets": 32, "distance": 128}, "t5_clip": {"K": None, "scale": "HS", "layers": "shared"},
             "kerple": {}, "kerple_power": {}, "fire": {}, "alibi_trained": {},
             "alibi_random": {"seed": 42, "mean": 0.125}, "sandwich": {"d": 128}, "cope": {"npos": 64}, "ssmax": {},
             "bam": {}, "carope": {}}
TURNS = ("rope", "carope")
BIASES = [name for name in POSITIONS if name not in ("none", "sinusoidal", "ssmax", *TURNS)]
WORDS = {"weight": ("inside", "outside"), "embed": ("sqrt", "plain"), "slopes": ("press", "geometric"),
         "scale": ("HS", "C"), "clock": ("token", "cable"), "layers": ("shared", "own")}
SCALINGS = ("linear", "ntk", "yarn_paper", "longrope")


def renamed(rope_scaling):
    """an older file's "yarn" is the paper's; transformers' has another ramp"""
    old = rope_scaling and rope_scaling.get("rope_type") == "yarn"
    return {**rope_scaling, "rope_type": "yarn_paper"} if old else rope_scaling


def check_position(position, rope_scaling, known=POSITIONS):
    """the encoding with all its hyperparameters; an error if it, or a key or a word of it, is unknown here"""
    name = (position or {}).get("name")
    if name == "layers" and set(position) == {"name", "layers"}:    # the encodings of the layers that take turns
        turns = [[check_position(part, None, known) for part in layer] for layer in position["layers"]]
        if any(part["name"] == "rope" for layer in turns for part in layer):
            check_position({"name": "rope"}, rope_scaling)
            rope_scaling = None
        check_position({"name": "none"}, rope_scaling)
        return {"name": name, "layers": turns}
    if name not in known:
        raise ValueError(f"config.json: position {name!r}: expected one of {', '.join(known)}; "
                         "cable.c's docs/new_encoding.md (In PyTorch) teaches cable_hf.py an encoding of your own")
    for key, value in position.items():
        has_key = key == "name" or key in known[name]
        if not has_key or isinstance(value, str) and key != "name" and value not in WORDS.get(key, ()):
            raise ValueError(f"config.json: position {name}: {key} = {value!r} is not known to this cable_hf.py; take "
                             "that of the version that trained the model")
    if rope_scaling and (name != "rope" or rope_scaling.get("rope_type") not in SCALINGS):
        raise ValueError(f"config.json: rope_scaling {rope_scaling!r} of {name}: expected rope and a rope_type of "
                         f"{', '.join(SCALINGS)}")
    return {**{key: value for key, value in known[name].items() if value != 0}, **position}


def with_part(config, layer, names):
    """the configuration with only the layer's encoding that is one of `names`, or with none"""
    turns = config.position["layers"] if config.position["name"] == "layers" else [[config.position]]
    found = [part for part in turns[layer % len(turns)] if part["name"] in names]
    one = copy.copy(config)
    one.position = found[0] if found else {"name": "none"}
    return one


def window_of(config, layer):
    """the window of a layer; config.json has a number for all of them, or a list for layers that take turns"""
    window = config.window
    return window[layer % len(window)] if isinstance(window, (list, tuple)) else window


def alibi_slopes(NH, geometric):
    """2^(-8(h+1)/NH); published: NH not a power of 2 has those of the next lower power p, then every other one of 2p"""
    p = NH if geometric else 2 ** int(math.log2(NH))
    slopes = [2.0 ** (-8.0 * (h + 1) / p) for h in range(p)]
    return torch.tensor(slopes + [2.0 ** (-4.0 * (h + 1) / p) for h in range(0, 2 * (NH - p), 2)], dtype=torch.float64)


def random_slopes(NH, seed, mean):
    """drawn from the exponential distribution of this mean: head h has number h of the stream `seed`"""
    def mixed(x):                                   # SplitMix64's finalizer
        x = (x + 0x9E3779B97F4A7C15) % 2 ** 64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2 ** 64
        return x ^ x >> 31
    uniform = [(mixed(mixed(mixed(seed) ^ h)) >> 11) * 2.0 ** -53 for h in range(NH)]
    return torch.tensor([-mean * math.log(1 - u) for u in uniform], dtype=torch.float64)


def sandwich_bias(distance, NH, d):
    """the product of sinusoidal embeddings of width d this far apart, less d/2, times NH / (8h) of the heads h = 1 ..
    NH; distance (B,rows,columns)"""
    angle = torch.arange(int(distance.abs().max()) + 1, dtype=torch.float64, device=distance.device)[:, None]
    k = torch.arange(d // 2, dtype=torch.float64, device=distance.device)
    waves = torch.cos(angle / 10000.0 ** (2 * k / d)).sum(dim=1) - d / 2
    head = torch.arange(1, NH + 1, dtype=torch.float64, device=distance.device)
    return waves[distance.abs()][:, None] * (NH / (8 * head))[:, None, None]


def t5_bucket(distance, causal, buckets, greatest):
    """T5's bucket of i - j: half of them exact, the rest logarithmic; bidirectional: later keys take the upper half"""
    n = buckets if causal else buckets // 2
    first = torch.zeros_like(distance) if causal else (distance < 0).long() * n
    d = distance.clamp(min=0) if causal else distance.abs()
    exact = n // 2
    ratio = torch.log(d.clamp(min=1).double() / exact) / math.log(greatest / exact)
    # the sliver keeps distances that sit on a boundary in the upper bucket
    large = (exact + (ratio * (n - exact) + 1e-9).long()).clamp(max=n - 1)
    return first + torch.where(d < exact, d, large)


def rope_frequencies(config, length, scaling):
    """radians per token of each pair of the R channels that are turned (R/2), in double, and the factor on q.k.
    scaling: config.json's rope_scaling or None; without a factor it stretches to `length` tokens"""
    R = 2 * math.ceil(config.position["p"] * (config.n_embd // config.n_head) / 2)
    theta = float(config.position["theta"])
    scaling = scaling or {}
    kind, trained = scaling.get("rope_type"), int(scaling.get("original_max_position_embeddings", config.n_positions))
    s = float(scaling.get("factor") or max(1.0, length / trained))
    i = torch.arange(0, R, 2, dtype=torch.float64)
    if kind == "ntk":
        theta = theta * s ** (R / (R - 2))
    f = theta ** (-i / R)
    if kind == "linear":
        return f / s, 1.0
    if kind == "yarn_paper":
        turns = trained * f / (2 * math.pi)         # full turns within the trained length
        gamma = ((turns - 1) / 31).clamp(0, 1)
        return gamma * f + (1 - gamma) * f / s, (0.1 * math.log(s) + 1) ** 2
    if kind == "longrope":
        factors = scaling["long_factor" if length > trained else "short_factor"]
        return f / torch.tensor(factors, dtype=torch.float64), 1 + math.log(s) / math.log(trained)
    return f, 1.0


def rotate(x, angle):
    """x (B,NH,T,HS): the pair (2i, 2i+1) of a token turned by angle (B or 1,NH or 1,T,pairs), in double; channels
    without an angle are not turned"""
    x, rest = x[..., :2 * angle.shape[-1]], x[..., 2 * angle.shape[-1]:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2), rest), dim=-1)


def sinusoids(position, C):
    i = torch.arange(0, C, 2, dtype=torch.float64, device=position.device)
    angle = position.double()[..., None] * 10000.0 ** (-i / C)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., :C]


class Cable(nn.Module):
    """B_ij = -g_i |S_i - S_j| and its variants"""
    def __init__(self, config):
        super().__init__()
        name = config.position["name"]
        self.softplus, self.logarithm = name in ("cable_v1", "fox", "kcable_v1"), name.startswith("kcable")
        self.outside = config.position.get("weight") == "outside"
        self.c = nn.Linear(config.n_embd, config.n_head)
        self.signed = name == "cable_signed"
        if name in ("cable", "kcable", "cable_signed"):
            self.s = nn.Linear(config.n_embd, config.n_head)
        for linear in self.children():
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x, is_token):
        """b (B,NH,T), 0 where a row is padding, and g (B,NH,T) or None"""
        x = x.to(self.c.weight.dtype)               # float32 in a model that is otherwise of float16, or quantized
        b = F.softplus(self.c(x)) if self.softplus else F.relu(self.c(x))
        if self.signed:
            b = torch.tanh(self.c(x))
        if is_token is not None:
            b = b.masked_fill(~is_token[..., None], 0)
        g = F.softplus(self.s(x)).transpose(1, 2) if hasattr(self, "s") else None
        return b.transpose(1, 2), g

    def bias(self, S_row, S_col, g, later, dtype):
        """S in double; later (B or 1,1,rows,columns): the key comes after the query; None when causal"""
        D = S_row[..., :, None] - S_col[..., None, :]
        if self.signed:
            D = D.abs()
        elif later is not None:
            D = torch.where(later, -D, D)
        D, g = D.to(dtype), 1.0 if g is None else g.to(dtype)[..., None]
        if not self.logarithm:
            return -g * D
        return -g * torch.log1p(D * D) if self.outside else -torch.log1p((g * D) ** 2)


class Clock(nn.Linear):
    """z of rope's clock=cable, whose running sum of ReLU(z) c = 1 makes about t at first"""
    def __init__(self, config):
        super().__init__(config.n_embd, config.n_head)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)
        nn.init.ones_(self.bias)


class Carope(Clock):
    """z of carope's f = 1 / (1 + softplus(z)): the angles are the running sums of f^i, rope's at first"""
    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        y = 10000.0 ** (2 * self.out_features / self.in_features) - 1       # softplus(c), so that f = 10000^(-2/HS)
        nn.init.constant_(self.bias, y + math.log(-math.expm1(-y)))


class Grape(nn.Module):
    """-(g_i + w_j) |i-j|, with slopes that the query chooses, the key, or both"""
    def __init__(self, config):
        super().__init__()
        self.config = config
        gates = config.position["name"].partition("_")[2]
        for gate in gates:
            setattr(self, gate, nn.Linear(config.n_embd, config.n_head))
            nn.init.normal_(getattr(self, gate).weight, std=0.02)
            nn.init.zeros_(getattr(self, gate).bias)

    def forward(self, x):
        """w and g (B,NH,T), 0 without the gate"""
        x = x.to(next(self.children()).weight.dtype)        # as in Cable
        slopes = alibi_slopes(self.config.n_head, False).to(x.device).to(x.dtype)[:, None]
        zero = torch.zeros_like(x[..., :self.config.n_head]).transpose(1, 2)
        return [slopes * F.softplus(getattr(self, gate)(x)).transpose(1, 2) if hasattr(self, gate) else zero
                for gate in "kq"]


class SSMax(nn.Module):
    """the factor of a query's logits, s log n, n the number of keys that it sees"""
    def __init__(self, config):
        super().__init__()
        T = config.n_positions
        mean = math.lgamma(T + 1) / T if config.causal else math.log(T)     # of log n
        self.s = nn.Parameter(torch.full((config.n_head,), 1 / (mean or 1.0)))

    @torch.no_grad()
    def project(self):
        """to be called after every update"""
        self.s.clamp_(min=1e-3)

    def forward(self, keys, hidden, dtype):
        """(NH,1,1) or (B or 1,NH,rows,1); keys: their number; hidden: the keys that each row does not see, or None"""
        if hidden is None:
            return self.s[:, None, None] * math.log(keys)
        n = (~hidden).sum(-1).clamp(min=1)[..., None]       # a row of padding may see none
        return self.s[:, None, None] * torch.log(n.to(dtype))


class Cope(nn.Module):
    """q_i.e[p_ij], where p_ij counts the keys t from j to i by sigmoid(score_it); e is linear between whole p"""
    def __init__(self, config):
        super().__init__()
        self.e = nn.Parameter(torch.zeros(config.n_embd // config.n_head, int(config.position["npos"])))

    def forward(self, q, scores, hidden):
        gates = torch.sigmoid(scores)
        if hidden is not None:
            gates = gates.masked_fill(hidden, 0)
        last = self.e.shape[1] - 1
        p = gates.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1).clamp(max=last).to(scores.dtype)
        below = p.detach().floor().clamp(max=last - 1)
        z, n = q @ self.e.to(q.dtype), below.long()
        return z.gather(-1, n) * (below + 1 - p) + z.gather(-1, n + 1) * (p - below)


class Kerple(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.power = config.position["name"] == "kerple_power"
        self.r1 = nn.Parameter(torch.rand(config.n_head) * 2)
        self.r2 = nn.Parameter(torch.rand(config.n_head) * (2 if self.power else 1))
        self.project()

    @torch.no_grad()
    def project(self):
        """to be called after every update"""
        self.r1.clamp_(min=0.01)
        self.r2.clamp_(min=0.01, max=2.0 if self.power else None)

    def forward(self, d):
        r1, r2 = self.r1[:, None, None], self.r2[:, None, None]
        d = d.abs().to(r1.dtype)[:, None]
        return -r1 * d ** r2 if self.power else -r1 * torch.log(1 + r2 * d)


class Bam(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(config.n_head))
        self.shape = nn.Parameter(torch.zeros(config.n_head))

    @torch.no_grad()
    def project(self):
        """to be called after every update"""
        self.shape.clamp_(min=-1.0, max=2.0)

    def forward(self, d):
        alpha, beta = self.scale[:, None, None], self.shape[:, None, None]
        return -torch.exp(alpha) * (d.abs().to(alpha.dtype)[:, None] + 1e-5) ** beta


class Alibi(nn.Module):
    """-m_h |i-j|, with a factor r of each slope that is learned, or drawn slopes, or those that were published"""
    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.position["name"] == "alibi_trained":
            self.r = nn.Parameter(torch.ones(config.n_head))

    def forward(self, d):
        position, NH = self.config.position, self.config.n_head
        if position["name"] == "alibi_random":
            slopes = random_slopes(NH, int(position["seed"]), position["mean"])
        else:
            slopes = (position.get("scale") or 1.0) * alibi_slopes(NH, position.get("slopes") == "geometric")
        slopes = slopes.to(d.device)
        if hasattr(self, "r"):
            slopes = slopes * self.r
        return -slopes[:, None, None] * d.abs()[:, None]


class Fire(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c, self.l = nn.Parameter(torch.full((1,), 0.1)), nn.Parameter(torch.ones(1))
        self.mlp = nn.Sequential(nn.Linear(1, FIRE_HIDDEN), nn.ReLU(), nn.Linear(FIRE_HIDDEN, config.n_head))

    def psi(self, distance):
        return torch.log(self.c.abs() * distance + 1)

    def forward(self, row, column):
        """(B or 1,NH,rows,columns); max(L, i, j): where j > i the causal mask hides the difference"""
        i, j = row[:, :, None], column[:, None, :]
        length = torch.maximum(self.l.abs() * FIRE_LENGTH, torch.maximum(i, j).to(self.l.dtype))
        y = self.psi((i - j).abs().to(self.l.dtype)) / (self.psi(length) + FIRE_EPS)
        return self.mlp(y[..., None]).permute(0, 3, 1, 2)


def t5_reach(config):
    K = config.position["K"]
    return int(config.n_positions - 1 if K is None else K)


def t5_table(config):
    if config.position["name"] == "t5":
        rows = int(config.position["buckets"])
    else:
        rows = (1 if config.causal else 2) * t5_reach(config) + 1
    table = nn.Embedding(rows, config.n_head)
    nn.init.normal_(table.weight, std=0.02)
    return table


def shared_t5(config):
    """the table that all layers share, or None"""
    for layer in range(config.n_layer):
        one = with_part(config, layer, ("t5", "t5_clip"))
        if one.position["name"] != "none" and one.position.get("layers") != "own":
            return t5_table(one)
    return None


def add_position(x, position, config):
    """what sinusoidal does to the token embeddings"""
    encoding = with_part(config, 0, ("sinusoidal",)).position
    if encoding["name"] == "none":
        return x
    factor = math.sqrt(config.n_embd) if encoding["embed"] == "sqrt" else 1.0
    return factor * x + (float(encoding["scale"]) * sinusoids(position, config.n_embd)).to(x.dtype)


# the module of an encoding that has parameters or constants of its own, and its name in a layer
MODULES = {**dict.fromkeys(CABLES, ("cable", Cable)), **dict.fromkeys(GRAPES, ("grape", Grape)),
           **dict.fromkeys(("kerple", "kerple_power"), ("kerple", Kerple)), "bam": ("bam", Bam), "fire": ("fire", Fire),
           **dict.fromkeys(("alibi", "alibi_trained", "alibi_random"), ("alibi", Alibi)), "cope": ("cope", Cope)}


class EncodedAttention(nn.Module):
    """a layer's encodings: their parameters, and what they add to the scores"""
    def __init__(self, config, index):
        super().__init__()
        scales = with_part(config, index, ("ssmax",)).position["name"] == "ssmax"
        self.ssmax = SSMax(config) if scales else None
        self.rope, config = with_part(config, index, TURNS), with_part(config, index, BIASES)
        self.clock = Clock(config) if self.rope.position.get("clock") == "cable" else None
        if self.rope.position["name"] == "carope":
            self.clock = Carope(config)
        self.config, self.name, self.index = config, config.position["name"], index
        self.scale = 1.0 / math.sqrt(config.n_embd // config.n_head)
        if self.name == "t5_clip" and config.position["scale"] == "C":
            self.scale = 1.0 / math.sqrt(config.n_embd)
        if self.name in MODULES:
            attribute, module = MODULES[self.name]
            setattr(self, attribute, module(config))
        elif self.name == "t5_clip" and config.position["layers"] == "own":
            self.t5 = t5_table(config)

    def own(self):
        """the module of the encoding with a bias"""
        return getattr(self, MODULES[self.name][0])

    def clock_sums(self, x, is_token=None):
        """(B,NH,T,1 or HS/2) in double. The clock itself stays a linear layer, which adapters may change."""
        z = self.clock(x.to(self.clock.weight.dtype)).transpose(1, 2)
        if self.rope.position["name"] == "carope":
            i = torch.arange(self.config.n_embd // self.config.n_head // 2, device=x.device)
            b = (1 / (1 + F.softplus(z.double())))[..., None] ** i
        else:
            b = F.relu(z)[..., None]
        if is_token is not None:
            b = b.masked_fill(~is_token[:, None, :, None], 0)
        return b.cumsum(2, dtype=torch.float64)

    def angles(self, time, length, scaling):
        """what the pairs of q and k are turned by (B or 1,NH or 1,T,pairs), and the factor on q.k, as in
        rope_frequencies; time: the positions (B or 1,T), or what clock_sums() has made"""
        if self.rope.position["name"] == "carope":
            return time, 1.0
        f, factor = rope_frequencies(self.rope, length, scaling)
        return (time[:, None, :, None] if self.clock is None else time).double() * f.to(time.device), factor

    def bias(self, row, column, S_row, S_col, g, t5, dtype):
        """(B or 1,NH,rows,columns) or None: what the scores of queries at row (B or 1,rows) and keys at column (B or
        1,columns) get, but from Cope, which needs the scores; S_col and g: Grape's w and g; t5: the table, where the
        layer has one"""
        d, position = row[:, :, None] - column[:, None, :], self.config.position
        causal = self.config.causal
        if self.name in CABLES:
            return self.own().bias(S_row, S_col, g, None if causal else d[:, None] < 0, dtype)
        if self.name in GRAPES:
            return -(g[..., :, None] + S_col[..., None, :]).to(dtype) * d.abs()[:, None]
        if self.name == "fire":
            return self.fire(row, column)
        if self.name.startswith(("kerple", "bam", "alibi")):
            return self.own()(d)
        if self.name == "sandwich":
            return sandwich_bias(d, self.config.n_head, int(position["d"])).to(dtype)
        if self.name == "t5":
            bucket = t5_bucket(d, causal, int(position["buckets"]), int(position["distance"]))
            return t5[bucket].permute(0, 3, 1, 2)
        if self.name == "t5_clip":                  # bidirectional: row K + (i - j)
            K = t5_reach(self.config)
            return t5[d.clamp(0, K) if causal else d.clamp(-K, K) + K].permute(0, 3, 1, 2)
        return None


# ---- GPT-2's and BERT's other layers ----

class Conv1D(nn.Module):
    """a linear layer whose weight is (in, out), as GPT-2's files have it; cable_hf.py takes transformers' own"""
    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc, self.c_proj = Conv1D(4 * C, C), Conv1D(C, 4 * C)
        self.c_proj.weight.data /= math.sqrt(2 * config.n_layer)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Output(nn.Module):
    """the end of a sublayer, post-LN: LN(x + dense(y))"""
    def __init__(self, n_in, n_out, eps):
        super().__init__()
        self.dense = nn.Linear(n_in, n_out)
        self.LayerNorm = nn.LayerNorm(n_out, eps=eps)

    def forward(self, y, x):
        return self.LayerNorm(x + self.dense(y))


class Predictions(nn.Module):
    """the head of masked language modelling; its decoder's weight is also the word embeddings', its bias `bias`"""
    def __init__(self, config):
        super().__init__()
        C = config.hidden_size
        self.transform = nn.ModuleDict({"dense": nn.Linear(C, C),
                                        "LayerNorm": nn.LayerNorm(C, eps=config.layer_norm_eps)})
        self.decoder = nn.Linear(C, config.vocab_size)
        self.bias = self.decoder.bias

    def _tie_weights(self):
        """to be called after the tensors of a file have come in place of these"""
        self.decoder.bias = self.bias

    def forward(self, x):
        return self.decoder(self.transform["LayerNorm"](F.gelu(self.transform["dense"](x))))
# )py"
