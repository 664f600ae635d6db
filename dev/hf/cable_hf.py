R"py("""  # Python skips this line; C++ begins a raw string here. The names of cable_encodings.py stand before it.
"""cable_hf.py -- the models of cable.c for the transformers library (4.40 or later): GPT-2 and BERT with any encoding.

It lies beside the weights in a checkpoint, whose config.json names it, so that on any machine

    model = AutoModelForCausalLM.from_pretrained("step_00001000", trust_remote_code=True)       # train_gpt2
    model = AutoModelForMaskedLM.from_pretrained("step_00001000", trust_remote_code=True)       # train_bert

compute what the trainers compute, with a key-value cache, padding on either side and batches of unequal lengths: what
attention_mask hides is not a key, has no position, and adds nothing to CABLE's running sum. Attention runs over blocks
of queries, so that no (T,T) matrix is ever in memory.
"""
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (BaseModelOutput, BaseModelOutputWithPast, CausalLMOutputWithPast,
                                           MaskedLMOutput)
from transformers.pytorch_utils import Conv1D       # the class that PEFT and the quantizers look for

ROWS = 256                                          # queries in a block
# Before 4.45 each model had to say itself what generate() gives it.
OLD_GENERATE = tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (4, 45)
# What past_key_values is called since 5.24; both names are taken.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def check_mask(window, sinks, name):
    """--window and --sinks of the trainers"""
    if name == "learned":
        raise ValueError("config.json: learned positions with a window or documents apart: neither this cable_hf.py "
                         "nor transformers' own models can compute that")
    windows = window if isinstance(window, (list, tuple)) and window else [window]      # layers that take turns
    if min(windows) < 0 or sinks < 0 or (sinks > 0 and max(windows) == 0):
        raise ValueError(f"config.json: expected a window of keys and sinks with it, got {window} and {sinks}")
    return window, sinks


def base_of(position):
    """rope's base theta, None where there is no rope, or several with different ones"""
    layers = position["layers"] if position["name"] == "layers" else [[position]]
    parts = [part for layer in layers for part in layer]
    found = {float(part["theta"]) for part in parts if part["name"] == "rope"}
    return found.pop() if len(found) == 1 else None


def check_base(rope_theta, position):
    base = base_of(position)
    if rope_theta is not None and base is not None and float(rope_theta) != base:
        raise ValueError(f"config.json: rope_theta: expected {base}, which position has, got {rope_theta}")


class EncodedConfig(PretrainedConfig):
    def __init__(self, tie_word_embeddings=True, **rest):
        super().__init__(tie_word_embeddings=tie_word_embeddings, **rest)

    def take_encoding(self, position, rope_scaling, rope_theta, window, sinks):
        self.window, self.sinks = check_mask(window, sinks, (position or {}).get("name"))
        self.stretch = renamed(rope_scaling)
        self.position = check_position(position or {"name": "cable"}, self.stretch)
        check_base(rope_theta, self.position)

    def to_dict(self):
        """a configuration to be written: `stretch` is our name for it in memory, as the library changes what is called
        rope_scaling; rope_theta repeats what the encoding has; encoding_version says which formulas these are"""
        config = super().to_dict()
        stretch, base = config.pop("stretch", None), base_of(config["position"])
        config = {**config, "encoding_version": 2, **({"rope_scaling": stretch} if stretch else {})}
        return config if base is None else {**config, "rope_theta": base}


class CableConfig(EncodedConfig):
    """GPT-2 with an encoding of cable.c"""
    model_type = "cable"
    keys_to_ignore_at_inference = [CACHE]
    attribute_map = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
                     "max_position_embeddings": "n_positions"}
    causal = True

    def __init__(self, n_layer=12, n_head=12, n_embd=768, vocab_size=50257, n_positions=1024, position=None,
                 layer_norm_epsilon=1e-5, rope_scaling=None, activation_function="gelu_new", use_cache=True,
                 vocab_softmax="used", window=0, sinks=0, document_mask=None, rope_theta=None, **rest):
        self.n_layer, self.n_head, self.n_embd = n_layer, n_head, n_embd
        self.vocab_size, self.n_positions = vocab_size, n_positions
        self.document_mask = document_mask          # the token that begins a document, beyond which no query sees
        self.take_encoding(position, rope_scaling, rope_theta, window, sinks)
        self.layer_norm_epsilon, self.vocab_softmax = layer_norm_epsilon, vocab_softmax
        if vocab_softmax not in ("used", "padded"):
            raise ValueError(f"config.json: vocab_softmax: expected used or padded, got {vocab_softmax!r}")
        self.activation_function = activation_function
        if activation_function != "gelu_new":
            raise ValueError(f"config.json: activation_function: expected gelu_new, got {activation_function!r}")
        self.use_cache = use_cache
        super().__init__(**rest)


class CableBertConfig(EncodedConfig):
    """BERT with an encoding of cable.c"""
    model_type = "cable_bert"
    attribute_map = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
                     "n_positions": "max_position_embeddings"}
    causal = False

    def __init__(self, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
                 max_position_embeddings=512, vocab_size=30522, type_vocab_size=2, hidden_act="gelu",
                 layer_norm_eps=1e-12, pad_token_id=0, position=None, rope_scaling=None, window=0,
                 sinks=0, rope_theta=None, **rest):
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_attention_heads, self.intermediate_size = num_attention_heads, intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.vocab_size, self.type_vocab_size = vocab_size, type_vocab_size
        self.hidden_act, self.layer_norm_eps = hidden_act, layer_norm_eps
        self.take_encoding(position, rope_scaling, rope_theta, window, sinks)
        turns = self.position.get("layers", [[self.position]])
        if isinstance(turns, list) and any(part["name"] == "cope" for layer in turns for part in layer):
            raise ValueError("config.json: position cope: expected a causal model")
        if hidden_act != "gelu":
            raise ValueError(f"config.json: hidden_act: expected gelu, got {hidden_act!r}")
        super().__init__(pad_token_id=pad_token_id, **rest)


class Rows:
    """The rows of a call: position (B or 1,T) of its queries, key_position (B or 1,S) and is_key (B,S) or None of all
    keys, is_token (B,T) or None of its queries; past: the keys that the cache already has; begin (B,T) or None: where
    the documents of its queries begin."""
    def __init__(self, tokens, attention_mask, position_ids, past):
        """tokens: their ids (B,T), or their embeddings (B,T,C)"""
        B, T = tokens.shape[:2]
        self.past, S = past, past + T
        self.is_key = self.is_token = None
        self.key_position = torch.arange(S, device=tokens.device)[None]
        if attention_mask is not None:
            shape = tuple(getattr(attention_mask, "shape", ()))
            if shape != (B, S):
                raise ValueError(f"attention_mask: expected the shape ({B}, {S}), got {shape}")
            mask = attention_mask.bool()
            if not mask.all():
                self.is_key, self.is_token = mask, mask[:, past:]
                self.key_position = (mask.long().cumsum(1) - 1).clamp(min=0)
        self.position, self.begin = self.key_position[:, past:], None
        if position_ids is not None:
            differs = position_ids != self.position
            if self.is_token is not None:
                differs = differs & self.is_token
            if differs.any():
                raise ValueError("position_ids: expected each token's number among those that attention_mask shows; "
                                 "other positions are not supported")

    def tell_documents_apart(self, input_ids, document_mask, cache):
        begins = input_ids == document_mask
        if self.is_token is not None:
            begins = begins & self.is_token
        begin = torch.where(begins, self.position, torch.zeros_like(self.position))
        if self.past > 0:                           # the document of the last token that the cache has
            key = last_key(cache, 0, self.past)
            last = join(key[:, 0, 0, -columns_of(key.dtype):]).to(begin.dtype)
            begin = torch.cat((torch.maximum(begin[:, :1], last), begin[:, 1:]), dim=1)
        self.begin = begin.cummax(1).values


class CableAttention(EncodedAttention):
    """What is GPT-2's and BERT's: the scores, the encoding's bias and the softmax, over blocks of queries"""
    def rows(self, q, k, v, row, column, S_row, S_col, g, t5, hidden):
        """the output of some queries; hidden (B or 1,1,rows,columns): keys that they do not see"""
        dtype = torch.promote_types(q.dtype, torch.float32)
        factor = 1 if self.ssmax is None else self.ssmax(k.shape[2], hidden, dtype)
        q = q.to(dtype) * factor
        scores = (q @ k.to(dtype).transpose(-2, -1)) * self.scale
        bias = self.bias(row, column, S_row, S_col, g, t5, dtype)
        if bias is not None:
            scores = scores + factor * bias.to(dtype)
        if self.name == "cope":
            scores = scores + self.cope(q, scores, hidden)
        if hidden is not None:                      # not -inf: a row of padding may see no key at all
            scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
        return (F.softmax(scores, dim=-1) @ v.to(dtype)).to(v.dtype)

    def sums(self, x, is_token):
        """S (B,NH,T,sums) of x's tokens alone, in double, or Grape's w; and g (B,NH,T). None: the layer has none"""
        if self.name in CABLES:
            b, g = self.own()(x, is_token)
            return b.cumsum(-1, dtype=torch.float64)[..., None], g
        if self.name in GRAPES:
            w, g = self.grape(x)
            return w.double()[..., None], g
        return None if self.clock is None else self.clock_sums(x, is_token), None

    def attend(self, x, qkv, rows, cache, t5):
        """x, and the q, k and v of its heads side by side (B,T,C) -> (B,T,C); t5: the table that the layers share.
        attn_implementation="cable" (dev/torch/cable_torch.py of cable.c) takes whole sequences without a cache,
        padding, a window or documents."""
        q, k, v = (part.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2) for part in qkv)       # (B,NH,T,HS)
        t5 = self.t5.weight if hasattr(self, "t5") else t5
        whole = cache is None and rows.is_key is None and rows.begin is None and window_of(self.config, self.index) == 0
        known = self.ssmax is None and self.clock is None and not self.rope.stretch
        if getattr(self.config, "_attn_implementation", None) == "cable" and whole and known:
            return transformers.AttentionInterface()["cable"](self, x, q, k, v, t5)
        return self.attend_in_blocks(x, q, k, v, rows, cache, t5)

    def attend_in_blocks(self, x, q, k, v, rows, cache, t5):
        B, T, C = x.shape
        HS, window = q.shape[-1], window_of(self.config, self.index)
        # longrope turns all keys by other angles once a text is long: its cache has them as they are
        turned_late = (self.rope.stretch or {}).get("rope_type") == "longrope"
        S, g = self.sums(x, rows.is_token)
        n = 0 if S is None else S.shape[-1] * columns_of(k.dtype)
        if rows.past > 0:
            wanted = HS + n + columns_of(k.dtype) * (rows.begin is not None)
            got = last_key(cache, self.index, rows.past).shape[-1]
            if got != wanted:
                raise ValueError(f"{CACHE}: expected keys of {wanted} columns, with the sums of their tokens, got "
                                 f"{got}; prefix tuning makes keys of no token: take prompt tuning or LoRA")
        if S is not None and rows.past > 0 and self.name not in GRAPES:
            S = S + join(last_key(cache, self.index, rows.past)[..., HS:HS + n])
        turns = self.rope.position["name"] != "none"
        if turns:
            length = int(rows.key_position.max()) + 1 if turned_late else rows.past + T
            angle, factor = self.angles(rows.position if self.clock is None else S, length, self.rope.stretch)
            q = rotate(q, angle) * factor
            k = k if turned_late else rotate(k, angle)
        if cache is not None:       # S or w, and last the document's begin, travel as columns of the keys
            more = [] if S is None else [split(S, k.dtype)]
            if rows.begin is not None:
                begin = rows.begin[:, None, :, None].double().expand(B, k.shape[1], T, 1)
                more.append(split(begin, k.dtype))
            k, v = cache.update(torch.cat((k, *more), dim=-1), v, self.index)
            k, v = k[:, :, :rows.past + T], v[:, :, :rows.past + T]         # a static cache has room for more
            S, k = None if S is None else join(k[..., HS:HS + n]), k[..., :HS]
        if turns and turned_late:
            k = rotate(k, self.angles(rows.key_position if self.clock is None else S, length, self.rope.stretch)[0])
        out = []
        for first in range(0, T, ROWS):
            last = min(first + ROWS, T)
            seen = rows.past + last if self.config.causal else k.shape[2]
            row, column = rows.position[:, first:last], rows.key_position[:, :seen]
            at = torch.arange(rows.past + first, rows.past + last, device=x.device)
            later = torch.arange(seen, device=x.device) > at[:, None]
            hidden = later[None, None] if self.config.causal else None
            in_document = column[:, None, :]
            if rows.begin is not None:
                in_document = in_document - rows.begin[:, first:last, None]
                hidden = hidden | (in_document < 0)[:, None]
            if window > 0:
                away = (row[:, :, None] - column[:, None, :]).abs() >= window
                outside = (away & (in_document >= self.config.sinks))[:, None]
                hidden = outside if hidden is None else hidden | outside
            if rows.is_key is not None:
                padding = ~rows.is_key[:, None, None, :seen]
                hidden = padding if hidden is None else hidden | padding
            S_row = None if S is None else S[:, :, rows.past + first:rows.past + last, 0]
            S_column = None if S is None else S[:, :, :seen, 0]
            g_row = None if g is None else g[..., first:last]
            arguments = (q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], row, column, S_row, S_column, g_row, t5,
                         hidden)
            if T > ROWS and torch.is_grad_enabled():            # the backward pass computes a block's scores again
                out.append(checkpoint(self.rows, *arguments, use_reentrant=False))
            else:
                out.append(self.rows(*arguments))
        return torch.cat(out, dim=2).transpose(1, 2).reshape(B, T, C)


def split(S, dtype):
    """S (B,NH,T,sums) in double as columns (B,NH,T,sums * parts) of a smaller type; the parts of a sum add up to it"""
    parts = []
    for _ in range(columns_of(dtype)):
        parts.append(S.to(dtype))
        S = S - parts[-1].double()
    return torch.stack(parts, dim=-1).flatten(-2)


def columns_of(dtype):
    return 2 if dtype == torch.float32 else 4


def join(columns):
    return columns.double().reshape(*columns.shape[:-1], -1, columns_of(columns.dtype)).sum(-1)


def last_key(cache, index, past):
    """(B,NH,1,columns): the last of the `past` keys that a layer has cached"""
    keys = cache.layers[index].keys if hasattr(cache, "layers") else cache.key_cache[index]
    return keys[:, :, past - 1:past]


def keys_in(cache):
    """how many; an error unless the cache keeps keys of any width as they are"""
    name = type(cache).__name__
    if cache is not None and name != "DynamicCache" and (name != "StaticCache" or not hasattr(cache, "layers")):
        raise ValueError(f"{CACHE}: expected a DynamicCache or, of newer releases of transformers, a StaticCache, got "
                         f"{name}")
    return 0 if cache is None else int(cache.get_seq_length())


def mean_loss(logits, labels, count):
    """over the labels that are not -100; count: over how many, where a batch comes in several calls"""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100,
                           reduction="mean" if count is None else "sum")
    return loss if count is None else loss / count


class CableBase(PreTrainedModel):
    supports_gradient_checkpointing = True
    _supports_cache_class = True                    # of releases that ask
    # the few columns that make S; quantizers leave them, too: older ones look for names, newer ones for a pattern
    _keep_in_fp32_modules = ["cable", "grape", "clock", r".*\.(cable|grape|clock)"]

    def wants_hidden_states(self, input_ids, embedded, asked, rest):
        """whether a call returns hidden states; an error without tokens, or if `rest`, its further arguments, would
        change the result"""
        attentions = rest.pop("output_attentions", None)
        if getattr(self.config, "output_attentions", False) if attentions is None else attentions:
            raise ValueError("output_attentions: expected False, because attention runs over blocks of queries and "
                             "keeps no weights")
        for name in ("cache_position", "tokenizer", "assistant_tokenizer"):     # generate() leaves them here, used
            rest.pop(name, None)
        unknown = [name for name, value in rest.items() if value is not None]
        if unknown:
            raise ValueError(f"{type(self).__name__} does not compute with {', '.join(unknown)}; leave it out")
        if (input_ids is None) == (embedded is None):
            raise ValueError("expected input_ids or inputs_embeds, got " + ("none" if embedded is None else "both"))
        return getattr(self.config, "output_hidden_states", False) if asked is None else asked

    def result(self, output, return_dict):
        """of a call: an object, or a tuple if the call or config.json wants that"""
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return output if return_dict else output.to_tuple()

    def _init_weights(self, module):
        if isinstance(module, Clock):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    @classmethod
    def from_pretrained(cls, *arguments, output_loading_info=False, **rest):
        """A tensor that the file lacks would be drawn at random, which is an error here. A warning if the trainer was
        built from sources that differed from its commit."""
        model, info = super().from_pretrained(*arguments, output_loading_info=True, **rest)
        if info["missing_keys"]:
            raise ValueError(f"the checkpoint lacks {', '.join(sorted(info['missing_keys'])[:4])}")
        commit = getattr(model.config, "built_from", None)
        if commit is not None:
            warnings.warn(f"this checkpoint is of a trainer whose sources differed from their commit ({commit}): if a "
                          "kernel was changed, this model may compute something else; compare the losses: "
                          "dev/hf/export.py --check TEXT STEP OUT")
        return (model, info) if output_loading_info else model


# ---- GPT-2 ----

class CableGPT2Attention(CableAttention):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.c_attn, self.c_proj = Conv1D(3 * config.n_embd, config.n_embd), Conv1D(config.n_embd, config.n_embd)

    def forward(self, x, rows, cache, t5):
        return self.c_proj(self.attend(x, self.c_attn(x).chunk(3, dim=2), rows, cache, t5))


class CableBlock(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CableGPT2Attention(config, index)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x, rows, cache=None, t5=None):
        x = x + self.attn(self.ln_1(x), rows, cache, t5)
        return x + self.mlp(self.ln_2(x))


class CableModel(CableBase):
    config_class = CableConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.t5 = shared_t5(config)
        self.h = nn.ModuleList(CableBlock(config, index) for index in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, embedding):
        self.wte = embedding

    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, *, position_ids=None, use_cache=None,
                output_hidden_states=None, return_dict=None, cache=None, inputs_embeds=None, **rest):
        wants_hidden_states = self.wants_hidden_states(input_ids, inputs_embeds, output_hidden_states, rest)
        recompute = self.gradient_checkpointing and self.training
        use_cache = (self.config.use_cache and not self.training if use_cache is None else use_cache) and not recompute
        cache = past_key_values if cache is None else cache
        if recompute and cache is not None:
            raise ValueError(f"{CACHE}: expected none with gradient checkpointing")
        if cache is None and use_cache:
            cache = DynamicCache()
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        rows = Rows(x, attention_mask, position_ids, keys_in(cache))
        position = rows.position
        if self.config.document_mask is not None:
            if input_ids is None:
                raise ValueError("inputs_embeds: expected input_ids, where this model finds the token that begins a "
                                 "document")
            rows.tell_documents_apart(input_ids, self.config.document_mask, cache)
            position = position - rows.begin
        t5 = None if self.t5 is None else self.t5.weight
        x, hidden = add_position(x, position, self.config), []
        for block in self.h:
            hidden.append(x)
            x = checkpoint(block, x, rows, None, t5, use_reentrant=False) if recompute else block(x, rows, cache, t5)
        x = self.ln_f(x)
        hidden.append(x)
        hidden = tuple(hidden) if wants_hidden_states else None
        output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=hidden, **{CACHE: cache})
        return self.result(output, return_dict)


class CableForCausalLM(CableBase, GenerationMixin):
    config_class = CableConfig
    base_model_prefix = "transformer"
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.transformer = CableModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, *, labels=None, logits_to_keep=0,
                return_dict=None, num_items_in_batch=None, **rest):
        """labels as in transformers: input_ids, or -100 where there is no loss; they are shifted here. logits_to_keep:
        the last ones, 0: all, or a tensor of their numbers"""
        found = self.transformer(input_ids, past_key_values, attention_mask, return_dict=True, **rest)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(found.last_hidden_state[:, kept]), None
        if labels is not None:
            loss = mean_loss(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=found.hidden_states,
                                        **{CACHE: found.get(CACHE)})
        return self.result(output, return_dict)

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **_):
        """what generate() makes of the mask for a static cache"""
        return attention_mask

    def _valid_auto_compile_criteria(self, *_):
        """With a static cache generate() would compile, but every token sees more keys than the one before it."""
        return False

    def _get_static_cache_init_shape(self):
        """unknown: the keys in the cache have columns beyond a head's"""

    if OLD_GENERATE:
        def _contrastive_search(self, *_, **__):
            raise ValueError("penalty_alpha: expected None: contrastive search takes a cache apart")

        def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, use_cache=None,
                                          **_):
            known = past_key_values.get_seq_length() if past_key_values is not None else 0
            known = min(known, input_ids.shape[1] - 1)      # PEFT's virtual tokens have no ids
            return {"input_ids": input_ids[:, known:], "past_key_values": past_key_values,
                    "attention_mask": attention_mask, "use_cache": use_cache}


# ---- BERT ----

class CableSelfAttention(CableAttention):
    def __init__(self, config, index):
        super().__init__(config, index)
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(config.n_embd, config.n_embd))

    def forward(self, x, rows, t5):
        return self.attend(x, (self.query(x), self.key(x), self.value(x)), rows, None, t5)


class CableBertLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        C, OC, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        attention = CableSelfAttention(config, index)
        self.attention = nn.ModuleDict({"self": attention, "output": Output(C, C, eps)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(C, OC)})
        self.output = Output(OC, C, eps)

    def forward(self, x, rows, t5=None):
        h = self.attention["output"](self.attention["self"](x, rows, t5), x)
        return self.output(F.gelu(self.intermediate["dense"](h)), h)


class CableBertModel(CableBase):
    config_class = CableBertConfig
    base_model_prefix = "bert"

    def __init__(self, config, add_pooling_layer=False):
        super().__init__(config)
        C = config.hidden_size
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(config.vocab_size, C),
                                         "token_type_embeddings": nn.Embedding(config.type_vocab_size, C),
                                         "LayerNorm": nn.LayerNorm(C, eps=config.layer_norm_eps)})
        self.t5 = shared_t5(config)
        layers = nn.ModuleList(CableBertLayer(config, index) for index in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings["word_embeddings"]

    def set_input_embeddings(self, embedding):
        self.embeddings["word_embeddings"] = embedding

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None,
                output_hidden_states=None, return_dict=None, inputs_embeds=None, **rest):
        wants_hidden_states = self.wants_hidden_states(input_ids, inputs_embeds, output_hidden_states, rest)
        e = self.embeddings
        x = e["word_embeddings"](input_ids) if inputs_embeds is None else inputs_embeds
        rows = Rows(x, attention_mask, position_ids, 0)
        types = torch.zeros_like(rows.position) if token_type_ids is None else token_type_ids
        x = add_position(x, rows.position, self.config)
        x, hidden = e["LayerNorm"](x + e["token_type_embeddings"](types)), []
        t5 = None if self.t5 is None else self.t5.weight
        for layer in self.encoder["layer"]:
            hidden.append(x)
            recompute = self.gradient_checkpointing and self.training
            x = checkpoint(layer, x, rows, t5, use_reentrant=False) if recompute else layer(x, rows, t5)
        hidden.append(x)
        output = BaseModelOutput(last_hidden_state=x, hidden_states=tuple(hidden) if wants_hidden_states else None)
        return self.result(output, return_dict)


class CableBertForMaskedLM(CableBase):
    config_class = CableBertConfig
    base_model_prefix = "bert"
    _tied_weights_keys = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                          "cls.predictions.decoder.bias": "cls.predictions.bias"}

    def __init__(self, config):
        super().__init__(config)
        self.bert = CableBertModel(config)
        self.cls = nn.ModuleDict({"predictions": Predictions(config)})
        self.post_init()

    def get_output_embeddings(self):
        return self.cls["predictions"].decoder

    def set_output_embeddings(self, head):
        self.cls["predictions"].decoder, self.cls["predictions"].bias = head, head.bias

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, labels=None,
                output_hidden_states=None, return_dict=None, num_items_in_batch=None, **rest):
        found = self.bert(input_ids, attention_mask, token_type_ids, position_ids, output_hidden_states,
                          return_dict=True, **rest)
        logits, loss = self.cls["predictions"](found.last_hidden_state), None
        if labels is not None:
            loss = mean_loss(logits, labels, num_items_in_batch)
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)
        return self.result(output, return_dict)
# )py"
