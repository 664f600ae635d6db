"""modeling_cable_bert.py -- BERT with every positional encoding of this repository, in plain PyTorch (1.13 or later).

The readable reference of train_bert, as modeling_cable.py is train_gpt2's. The encodings are that file's, here
bidirectional. Tensors are named and laid out as in Hugging Face's BertForMaskedLM plus the encodings' own, so
load_checkpoint() reads what the trainer writes, and with position `learned` this is transformers' model:

    model = load_checkpoint("out/step_00001000")
    logits, loss = model(idx, targets, lengths)     # idx, targets (B,T) int64, targets of -1 are ignored; lengths (B)
    vectors = pool(model.encode(idx, lengths), lengths, "mean")                 # (B,C)
    loss = contrastive_loss(vectors[:Q], vectors[Q:], positives, temperature=0.05)

What lies after a sequence's length is not a key of the attention, not a target, and in no mean: it changes nothing
before it.
"""
import os
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

from modeling_cable import Attention, CableConfig, hidden_pairs, read_config, read_safetensors, save_checkpoint
from cable_encodings import Output, Predictions, add_position, shared_t5, with_part


@dataclass
class CableBertConfig:
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512              # the length the model is trained at
    vocab_size: int = 30522
    type_vocab_size: int = 2
    hidden_act: str = "gelu"                        # the erf one
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    position: dict = field(default_factory=lambda: {"name": "cable"})   # and its hyperparameters: t5_clip K, rope theta
    rope_scaling: dict = None
    window: object = 0                                 # as in modeling_cable.py
    sinks: int = 0
    model_type: str = "bert"
    architectures: list = field(default_factory=lambda: ["BertForMaskedLM"])

    def __post_init__(self):
        self.position = self.encoding().position    # checked, its defaults filled in

    def encoding(self):
        """what modeling_cable.py's encodings want to know"""
        return CableConfig(n_layer=self.num_hidden_layers, n_head=self.num_attention_heads, n_embd=self.hidden_size,
                           vocab_size=self.vocab_size, n_positions=self.max_position_embeddings, position=self.position,
                           rope_scaling=self.rope_scaling, window=self.window, sinks=self.sinks, causal=False,
                           layer_norm_epsilon=self.layer_norm_eps, model_type="bert", activation_function="gelu")


class SelfAttention(Attention):
    """the encoding and its bias are Attention's; q, k and v are three layers here, and the output layer is Output's"""
    def __init__(self, encoding, layer, t5):
        super().__init__(encoding, layer, t5)
        del self.c_attn, self.c_proj
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(encoding.n_embd, encoding.n_embd))

    def forward(self, x, is_key, rope_scaling=None):
        """x (B,T,C); is_key (B,T): false after a sequence's end"""
        B, T, C = x.shape
        NH = self.config.n_head
        q, k, v = (f(x).view(B, T, NH, C // NH).transpose(1, 2) for f in (self.query, self.key, self.value))
        hidden = ~is_key[:, None, None, :] | hidden_pairs(self.whole, self.index, T, x.device)
        return self.mix(x, q, k, v, hidden, rope_scaling)


class Layer(nn.Module):
    def __init__(self, config, encoding, layer, t5):
        super().__init__()
        C, OC, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.attention = nn.ModuleDict({"self": SelfAttention(encoding, layer, t5), "output": Output(C, C, eps)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(C, OC)})
        self.output = Output(OC, C, eps)

    def forward(self, x, is_key, rope_scaling=None):
        h = self.attention["output"](self.attention["self"](x, is_key, rope_scaling), x)
        return self.output(F.gelu(self.intermediate["dense"](h)), h)


class CableBert(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, encoding = config.hidden_size, config.encoding()
        self.config, self.encoding, t5 = config, encoding, shared_t5(encoding)
        embeddings = {"word_embeddings": nn.Embedding(config.vocab_size, C)}
        if with_part(encoding, 0, ("learned",)).position["name"] == "learned":
            embeddings["position_embeddings"] = nn.Embedding(config.max_position_embeddings, C)
        embeddings["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, C)
        embeddings["LayerNorm"] = nn.LayerNorm(C, eps=config.layer_norm_eps)
        self.bert = nn.ModuleDict({"embeddings": nn.ModuleDict(embeddings)})
        if t5 is not None:
            self.bert["t5"] = t5
        layers = nn.ModuleList(Layer(config, encoding, layer, t5) for layer in range(config.num_hidden_layers))
        self.bert["encoder"] = nn.ModuleDict({"layer": layers})
        self.cls = nn.ModuleDict({"predictions": Predictions(config)})
        for name, module in self.named_modules():   # an encoding's own layers have set theirs
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif name.split(".")[-1] in ("query", "key", "value", "dense"):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def embed(self, idx, token_types=None):
        e, T = self.bert["embeddings"], idx.shape[1]
        x = add_position(e["word_embeddings"](idx), torch.arange(T, device=idx.device)[None], self.encoding)
        if "position_embeddings" in e:
            if T > self.config.max_position_embeddings:
                raise ValueError(f"learned: T = {T} is beyond the table's {self.config.max_position_embeddings} "
                                 "positions")
            x = x + e["position_embeddings"].weight[:T]
        types = torch.zeros_like(idx) if token_types is None else token_types
        return e["LayerNorm"](x + e["token_type_embeddings"](types))

    def encode(self, idx, lengths=None, token_types=None, rope_scaling=None, layers=None):
        """the last layer's output (B,T,C), or that of the first `layers`; rows after a length have no meaning"""
        t = torch.arange(idx.shape[1], device=idx.device)
        is_key = torch.ones_like(idx, dtype=torch.bool) if lengths is None else t < lengths[:, None]
        if not is_key.any(dim=1).all():
            raise ValueError("a sequence of length 0 has no key to attend to")
        x = self.embed(idx, token_types)
        for layer in self.bert["encoder"]["layer"][:layers]:
            x = layer(x, is_key, rope_scaling)
        return x

    def forward(self, idx, targets=None, lengths=None, token_types=None, rope_scaling=None):
        """Returns logits (B,T,V) and the mean loss over the targets that are not -1, 0 if there are none (None without
        targets). rope_scaling: (pi | ntk | yarn, factor or None for T / original length), not the checkpoint's."""
        x = self.encode(idx, lengths, token_types, rope_scaling)
        logits = self.cls["predictions"](x, self.bert["embeddings"]["word_embeddings"].weight)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return logits, loss / (targets != -1).sum().clamp(min=1)

    @torch.no_grad()
    def bias(self, layer, idx):
        """B_ij of one sequence idx (1,T) in a layer, (NH,T,T)"""
        NH, T = self.config.num_attention_heads, idx.shape[1]
        x = self.encode(idx, layers=layer)
        bias = self.bert["encoder"]["layer"][layer].attention["self"].pair_bias(x)
        return x.new_zeros(NH, T, T) if bias is None else bias.reshape(NH, T, T)


def pool(x, lengths, how="mean"):
    """x (B,T,C) to one vector per sequence (B,C): the mean of its tokens, or the first one's (cls)"""
    if how == "cls":
        return x[:, 0]
    if how != "mean":
        raise ValueError(f"pooling {how!r}: there are mean and cls")
    is_token = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return x.masked_fill(~is_token[..., None], 0).sum(dim=1) / lengths[:, None].to(x.dtype)


def contrastive_loss(queries, documents, positives=None, temperature=0.05):
    """InfoNCE: queries (Q,C), documents (M,C). Document positives[q] (default: q) answers query q; all other
    documents, the positives of other queries and the hard negatives, do not. The mean over q of
        -log( exp(cos(q, positives[q]) / temperature) / sum_m exp(cos(q, m) / temperature) )"""
    similarity = F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).t()
    positives = torch.arange(len(queries), device=queries.device) if positives is None else positives
    return F.cross_entropy(similarity / temperature, positives)


def load_checkpoint(directory):
    """config.json and model.safetensors of a checkpoint, or of a Hugging Face BertForMaskedLM (position `learned`)"""
    stored = read_config(directory)
    if stored.get("model_type") not in ("bert", "cable_bert"):
        raise ValueError(f"{directory}/config.json: model_type is {stored.get('model_type')!r}, not 'bert' or "
                         "'cable_bert'")
    known = {k: stored[k] for k in CableBertConfig.__dataclass_fields__ if k in stored}
    known.setdefault("position", {"name": "learned"})
    model = CableBert(CableBertConfig(**known))
    state = {}
    for name, t in read_safetensors(os.path.join(directory, "model.safetensors")).items():
        # the decoder is word_embeddings and predictions.bias; position_ids is a buffer of old transformers versions
        if not name.startswith(("bert.pooler.", "cls.seq_relationship.", "cls.predictions.decoder.",
                                "bert.embeddings.position_ids")):
            state[name.replace(".gamma", ".weight").replace(".beta", ".bias")] = t.float()
    model.load_state_dict(state)
    return model
