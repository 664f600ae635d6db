"""test_hf_directories.py -- directories that transformers saves: the trainer computes transformers' loss and shows
transformers' tokens from each, or refuses it with a message that names the key.

A row of ROWS is a directory: a model, and mostly its tokenizer, as this version of the library saves them, some of
them changed afterwards. dev/results/hf_directories.tsv says for the layouts of transformers 4 and 5 what the trainers
do with each; the test compares it, and with --update writes what it has found. Where both are right, loading and
refusing, the table decides.

The loss is the mean over a shard of drawn ids; of a BERT it depends on the ids of [MASK] and the other special tokens.
The tokens of a GPT-2 are seen in the text of a prompt of ids (--generate).
"""
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

import interpreter

if __name__ == "__main__":
    interpreter.choose("torch, transformers, safetensors")
from folder import BERT_TRAINER, HAS_BERT, HAS_TRAINER, ROOT, TRAINER, Folder  # noqa: E402

HOME = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=HOME.name, HF_MODULES_CACHE=os.path.join(HOME.name, "modules"), HF_HUB_OFFLINE="1",
                  TRANSFORMERS_VERBOSITY="error")
try:
    import tokenizers
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
    transformers.utils.logging.disable_progress_bar()
    LAYOUT = transformers.__version__.split(".")[0]         # "4" or "5"
except ImportError:
    torch = None
MISSING = ("SKIPPED: expected PyTorch, transformers, safetensors, train_gpt2 and train_bert; PYTORCH_PYTHON names a "
           "python3")
TABLE = os.path.join(ROOT, "dev", "results", "hf_directories.tsv")
UPDATE = "--update" in sys.argv
REACH, T, WINDOWS, SAME = 160, 32, 8, 1e-6                  # the loss in float32 errs by 3e-7 at most
TEXT = ("the Then other  weather,\n\tcaf\u00e9 cafe\u0301 na\u00efve \u4f60\u597d \U0001f600 I'll DON'T we've 12345 "
        "a-to (the) <x> the<x>the foo bar \u00e9\u2192 the\u00a0end ")
MERGES = "t+h th+e \u0120+the e+r i+n \u0120+a 1+2 -+t \u0120+\u0120 f+o fo+o \u00c3+\u00a9 \u0120the+r".split()
WORDS = ("[PAD] [UNK] [CLS] [SEP] [MASK] Paris paris the The of in capital caf\u00e9 cafe Caf\u00e9 na\u00efve naive a "
         "un ##the \u4f60 \u597d \u4f60\u597d ##\u597d , ' t ##is < > x ##x tis istanbul uber \u00fcber i "
         "##stanbul").split()


# ---- tokenizers ----

def byte_level(**options):
    """GPT-2's classes, over the bytes, some merges and <|endoftext|>; options: of its constructor"""
    name = options.pop("cls", "GPT2TokenizerFast")
    with tempfile.TemporaryDirectory() as source:
        write_byte_level(source)
        return getattr(transformers, name).from_pretrained(source, **options)


def spelled():
    """({token: id}, [merge])"""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace("+", "") for m in MERGES] + ["<|endoftext|>"]
    return {token: n for n, token in enumerate(tokens)}, [tuple(m.split("+")) for m in MERGES]


def write_byte_level(directory):
    vocabulary, merges = spelled()
    with open(os.path.join(directory, "vocab.json"), "w") as f:
        json.dump(vocabulary, f)
    with open(os.path.join(directory, "merges.txt"), "w") as f:
        f.write("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in merges))


def composed(split=None, normalizer=None, after=None, **model):
    """a tokenizer.json of the tokenizers library with other parts than GPT-2's"""
    vocabulary, merges = spelled()
    t = tokenizers.Tokenizer(models.BPE(vocabulary, merges, **model))
    t.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    if normalizer is not None:
        t.normalizer = normalizer
    if after is not None:
        t.post_processor = after
    return transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|endoftext|>")


def regex(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def word_pieces(cls="BertTokenizerFast", words=WORDS, **options):
    with tempfile.TemporaryDirectory() as source:
        with open(os.path.join(source, "vocab.txt"), "w", encoding="utf-8") as f:
            f.write("\n".join(words) + "\n")
        return getattr(transformers, cls).from_pretrained(source, **options)


def adding(tokenizer, *tokens, special=None, **options):
    """with more tokens; special: one that has a name, such as pad_token"""
    if tokens:
        tokenizer.add_tokens([tokenizers.AddedToken(token, **options) for token in tokens])
    if special:
        tokenizer.add_special_tokens(special)
    return tokenizer


# ---- what is changed in a saved directory ----

def config(**changes):
    """keys of config.json; None: taken out"""
    return in_json("config.json", lambda j: {k: v for k, v in {**j, **changes}.items() if v is not None})


def in_json(name, edit):
    def change(directory):
        path = os.path.join(directory, name)
        with open(path) as f:
            j = edit(json.load(f))
        with open(path, "w") as f:
            json.dump(j, f)
    return change


def part(name, key, value):
    """a key of a part of tokenizer.json"""
    return in_json("tokenizer.json", lambda j: {**j, name: {**j[name], key: value}})


def tensors(edit):
    """edit({name: tensor}) -> the same of the new file"""
    def change(directory):
        path = os.path.join(directory, "model.safetensors")
        state = edit(load_file(path))
        save_file({name: t.contiguous().clone() for name, t in state.items()}, path, metadata={"format": "pt"})
    return change


def renamed(*pairs):
    def new(name):
        for old, to in pairs:
            name = re.sub(old, to, name)
        return name
    return tensors(lambda state: {new(name): t for name, t in state.items()})


def pickled(directory):
    state = load_file(os.path.join(directory, "model.safetensors"))
    torch.save(state, os.path.join(directory, "pytorch_model.bin"))
    os.remove(os.path.join(directory, "model.safetensors"))


def without(*names):
    """the directory lacks these files, where it had them"""
    def change(directory):
        for name in names:
            if os.path.exists(os.path.join(directory, name)):
                os.remove(os.path.join(directory, name))
    return change


def several(*changes):
    def change(directory):
        for one in changes:
            one(directory)
    return change


def buffers(state):
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, REACH, REACH, dtype=torch.uint8).tril()
             for layer in range(2)}
    values = {f"transformer.h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    return {**state, **masks, **values}


HEAD, WTE = "lm_head.weight", "transformer.wte.weight"
DECODER, EMBEDDING = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
OLD_FILES = without("tokenizer.json")


def row(name, key=None, model="GPT2LMHeadModel", tokenizer=None, change=None, only="45", dtype=None, rows=0, save=None,
        **settings):
    """key: what a refusal names, None: it must load; tokenizer: makes it; change(directory): after it was saved; only:
    the layouts that have it; rows: of the embedding beyond its tokens; save: of save_pretrained; settings: of the
    model's configuration"""
    return {"name": name, "key": key, "model": model, "tokenizer": tokenizer, "change": change, "only": only,
            "dtype": dtype, "rows": rows, "save": save or {}, "settings": settings}


def rows_of_gpt2():
    """[row]: models"""
    edit = lambda name, key, change, **more: row("gpt2 " + name, key, change=change, **more)
    return [
        row("gpt2"), row("gpt2 float16", dtype="float16"), row("gpt2 bfloat16", dtype="bfloat16"),
        row("gpt2 float64", "F64", dtype="float64"), row("gpt2 shards", save={"max_shard_size": "40KB"}),
        row("gpt2 without head", model="GPT2Model"), edit("buffers of transformers 3", None, tensors(buffers)),
        edit("prefix of torch.compile", "_orig_mod|wte", renamed(("^", "_orig_mod."))),
        edit("head beside wte", None, tensors(lambda s: {**s, HEAD: s[WTE]})),
        edit("only the head", "wte", renamed(("^" + WTE, HEAD)), only="5"),
        edit("another head, said to be tied", "lm_head.weight", tensors(lambda s: {**s, HEAD: s[WTE] + 1})),
        row("gpt2 untied", "tie_word_embeddings", tie_word_embeddings=False),
        edit("reordered", None, several(
            in_json("config.json", lambda j: dict(reversed(j.items()))),
            tensors(lambda s: dict(reversed(s.items()))))),
        edit("first config.json of GPT-2", None, config(n_ctx=REACH, **dict.fromkeys((
            "activation_function", "n_inner", "reorder_and_upcast_attn", "scale_attn_weights", "add_cross_attention",
            "scale_attn_by_inverse_layer_idx")))),
        edit("unknown key", "rope_theta", config(rope_theta=500.0)),
        edit("pytorch_model.bin", "pytorch_model.bin|safetensors", pickled),
        row("gpt2 gelu_pytorch_tanh", activation_function="gelu_pytorch_tanh"),
        row("gpt2 gelu", "activation_function", activation_function="gelu"),
        row("gpt2 relu", "activation_function", activation_function="relu"),
        row("gpt2 epsilon 1e-6", "layer_norm_epsilon", layer_norm_epsilon=1e-6),
        row("gpt2 scores unscaled", "scale_attn_weights", scale_attn_weights=False),
        row("gpt2 scores by layer", "scale_attn_by_inverse_layer_idx", scale_attn_by_inverse_layer_idx=True),
        row("gpt2 upcast", reorder_and_upcast_attn=True), row("gpt2 n_inner 4C", n_inner=128),
        row("gpt2 n_inner 3C", "n_inner|mlp.c_fc", n_inner=96),
        row("gpt2 cross-attention", "add_cross_attention", add_cross_attention=True),
        row("gpt2 classifier", "score", model="GPT2ForSequenceClassification"),
        row("gpt2 double heads", "multiple_choice_head", model="GPT2DoubleHeadsModel"),
        row("gpt2 pruned heads", "pruned_heads", change=config(pruned_heads={"0": [1]}), only="4"),
        row("gpt2 rows beyond the tokens", "vocab", rows=50),
        row("gpt2 without wpe", "wpe", change=tensors(lambda s: {n: t for n, t in s.items() if "wpe" not in n})),
    ]


def rows_of_byte_level():
    """[row]: tokenizers of a GPT-2"""
    words = lambda name, key, make, change=None, **more: row("gpt2 with " + name, key, tokenizer=make, change=change,
                                                             **more)
    added = lambda *tokens, **options: lambda: adding(byte_level(), *tokens, **options)
    llama = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return [
        words("tokenizer", None, byte_level),
        words("slow tokenizer", None, lambda: byte_level(cls="GPT2Tokenizer"), only="4"),
        words("vocab.json alone", None, byte_level, several(write_byte_level, without("tokenizer.json"))),
        words("vocab.json and nothing else", None, byte_level, several(write_byte_level, without(
            "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"))),
        words("tokenizer.json alone", None, byte_level, without("vocab.json", "merges.txt")),
        words("tokenizer, rows beyond it", "vocab", byte_level, rows=50),
        words("more tokens than rows", "tokens", byte_level, rows=-1),
        words("[PAD]", None, added(special={"pad_token": "[PAD]"})),
        words("[PAD], vocab.json", None, added(special={"pad_token": "[PAD]"}), OLD_FILES, only="4"),
        words("<x>", None, added("<x>")), words("<x>, vocab.json", None, added("<x>"), OLD_FILES, only="4"),
        words("<x>, rows beyond it", "vocab", added("<x>"), rows=50),
        words("<x> and <y>, two rows", None, added("<x>", "<y>")),
        words("'foo bar'", None, added("foo bar")), words("an accent", None, added("\u00e9\u2192")),
        words("another end", None, lambda: byte_level(eos_token="<end>", unk_token="<end>")),
        words("Llama 3's split", None, lambda: composed(regex(llama))),
        words("Llama 3's split, vocab.json", None, lambda: composed(regex(llama)), write_byte_level),
        words("NFC", None, lambda: composed(normalizer=normalizers.NFC())),
        words("merges as texts", None, composed, part("model", "merges", [" ".join(m.split("+")) for m in MERGES])),
        words("merges as pairs", None, composed, part("model", "merges", [m.split("+") for m in MERGES])),
        words("Qwen2's class, vocab.json", None, lambda: byte_level(cls="Qwen2TokenizerFast"), OLD_FILES, only="4"),
        words("Qwen2's class", None, lambda: byte_level(cls="Qwen2TokenizerFast")),
        words("Roberta's class", None, lambda: byte_level(
            cls="RobertaTokenizerFast", **{name + "_token": "<|endoftext|>" for name in (
                "bos", "eos", "cls", "sep", "unk", "pad", "mask")})),
    ]


def rows_of_bert():
    """[row]: models"""
    edit = lambda name, key, change=None, **more: row(f"bert {name}".strip(), key, change=change, **{
        "model": "BertForMaskedLM", "tokenizer": word_pieces, **more})
    return [
        edit("", None), edit("float16", None, dtype="float16"), edit("bfloat16", None, dtype="bfloat16"),
        edit("shards", None, save={"max_shard_size": "40KB"}),
        edit("gamma and beta", None, renamed(("LayerNorm.weight", "LayerNorm.gamma"),
                                             ("LayerNorm.bias", "LayerNorm.beta"))),
        edit("position_ids", None, tensors(lambda s: {**s, "bert.embeddings.position_ids": torch.arange(REACH)[None]})),
        edit("without head", "cls.predictions", model="BertModel"),
        edit("of pre-training", None, model="BertForPreTraining"),
        edit("classifier", "cls.predictions|classifier", model="BertForSequenceClassification"),
        edit("with decoder", None, tensors(lambda s: {**s, DECODER: s[EMBEDDING]})),
        edit("with decoder's bias", None, tensors(lambda s: {
            **s, "cls.predictions.decoder.bias": s["cls.predictions.bias"]})),
        edit("only the decoder", "word_embeddings", renamed(("^" + EMBEDDING, DECODER)), only="5"),
        edit("another decoder, said to be tied", "decoder", tensors(lambda s: {**s, DECODER: s[EMBEDDING] + 1})),
        edit("untied", "tie_word_embeddings", tie_word_embeddings=False),
        edit("reordered", None, several(in_json("config.json", lambda j: dict(reversed(j.items()))),
                                        tensors(lambda s: dict(reversed(s.items()))))),
        edit("pytorch_model.bin", "pytorch_model.bin|safetensors", pickled),
        edit("relu", "hidden_act", hidden_act="relu"), edit("gelu_new", "hidden_act", hidden_act="gelu_new"),
        edit("epsilon 1e-5", "layer_norm_eps", layer_norm_eps=1e-5),
        edit("intermediate 3C", "intermediate", intermediate_size=96),
        edit("one type", "type_vocab_size|token_type", type_vocab_size=1),
        edit("three types", "type_vocab_size|token_type", type_vocab_size=3),
        edit("relative positions", "position_embedding_type", only="4", position_embedding_type="relative_key"),
        edit("decoder's mask", "is_decoder", is_decoder=True), edit("rows beyond the tokens", "vocab", rows=10),
        edit("more tokens than rows", "tokens", rows=-1),
    ]


def rows_of_word_pieces():
    """[row]: tokenizers of a BERT"""
    words = lambda name, key, make, change=None, **more: row("bert with " + name, key, "BertForMaskedLM", make, change,
                                                             **more)
    options = lambda **o: lambda: word_pieces(**o)
    alone = without("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

    def vocabulary(*changes):
        """vocab.txt is written, as transformers 5 does not"""
        def write(directory):
            with open(os.path.join(directory, "vocab.txt"), "w", encoding="utf-8") as f:
                f.write("\n".join(WORDS) + "\n")
        return several(write, *changes)
    shuffled = WORDS[7:] + WORDS[:7]
    return [
        words("vocab.txt", None, word_pieces, vocabulary(OLD_FILES)),
        words("vocab.txt and nothing else", None, word_pieces, vocabulary(alone)),
        words("tokenizer.json alone", None, word_pieces, without("vocab.txt")),
        words("slow tokenizer", None, options(cls="BertTokenizer"), only="4"),
        words("cased", None, options(do_lower_case=False)),
        words("accents kept", None, options(strip_accents=False)),
        words("<x>", None, lambda: adding(word_pieces(), "<x>")),
        words("<x>, vocab.txt", None, lambda: adding(word_pieces(), "<x>"), OLD_FILES, only="4"),
        words("a special <e>", None, lambda: adding(word_pieces(), special={"additional_special_tokens": ["<e>"]}),
              only="4"),
        words("another [MASK]", "MASK", options(mask_token="<mask>", words=[
            w.replace("[MASK]", "<mask>") for w in WORDS])),
        words("special tokens at the end", None, options(words=shuffled)),
        words("whitespace split", None, word_pieces, in_json("tokenizer.json", lambda j: {
            **j, "pre_tokenizer": {"type": "Whitespace"}})),
        words("another order in tokenizer.json", None, options(words=shuffled), vocabulary()),
    ]


def make(row, directory):
    """saves the row's model and tokenizer; returns how many ids the data may have"""
    tokenizer = row["tokenizer"]() if row["tokenizer"] else None
    tokens = len(tokenizer) if tokenizer else 64
    bert, rows = row["model"].startswith("Bert"), tokens + row["rows"]
    settings = dict(vocab_size=rows, n_positions=REACH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                    pad_token_id=0)
    if bert:
        settings = dict(vocab_size=rows, max_position_embeddings=REACH, hidden_size=32, num_hidden_layers=2,
                        num_attention_heads=2, intermediate_size=128)
    torch.manual_seed(3)
    kind = transformers.BertConfig if bert else transformers.GPT2Config
    model = getattr(transformers, row["model"])(kind(**{**settings, **row["settings"]}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    if row["dtype"]:
        model = model.to(getattr(torch, row["dtype"]))
    model.save_pretrained(directory, **row["save"])
    if tokenizer:
        tokenizer.save_pretrained(directory)
    if row["change"]:
        row["change"](directory)
    return min(tokens, rows)


# ---- what transformers makes of a directory ----

def draw(seed, a, b=0):
    """train_bert's uniform01(): SplitMix64's finalizer over three words"""
    def mixed(x):
        x = (x + 0x9E3779B97F4A7C15) % 2 ** 64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2 ** 64
        return x ^ x >> 31
    return mixed(mixed(mixed(seed) ^ a) ^ b)


def masked(ids, special, rows, mask):
    """what train_bert's evaluation asks: (inputs, targets), -100 where it asks nothing"""
    plain = [n for n in range(rows) if n not in special]
    stream, inputs, targets = draw(0, 0x4D4C4D, 2 ** 64 - 1), list(ids), [-100] * len(ids)
    for position, token in enumerate(ids):
        share = (draw(stream, position) >> 11) / 2 ** 53 / 0.15
        if share >= 1 or token in special:
            continue
        targets[position] = token
        if share < 0.8:
            inputs[position] = mask
        elif share < 0.9:
            inputs[position] = plain[int((draw(stream, position, 1) >> 11) / 2 ** 53 * len(plain))]
    return inputs, targets


class Reference:
    """loss of the ids, and the tokenizer; None where transformers itself fails, or draws tensors at random"""
    def __init__(self, row, directory, ids):
        self.bert, self.lacks, self.why = row["model"].startswith("Bert"), set(), ""
        self.model = self.tokenizer = None
        try:
            kind = transformers.AutoModelForMaskedLM if self.bert else transformers.AutoModelForCausalLM
            model, info = kind.from_pretrained(directory, output_loading_info=True)
            self.lacks = set(info["missing_keys"]) - {HEAD, DECODER}
            self.model = None if self.lacks or info["mismatched_keys"] else model.double().eval()
            if row["tokenizer"]:
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        except Exception as e:                          # a directory that transformers cannot read, whatever it says
            self.why = f"{type(e).__name__}: {e}"
        self.loss = self.loss_of(ids) if self.model else None

    def loss_of(self, ids):
        rows = self.model.config.vocab_size
        with torch.no_grad():
            if self.bert:
                t = self.tokenizer
                special = {t.pad_token_id, t.unk_token_id, t.cls_token_id, t.sep_token_id, t.mask_token_id}
                x, y = masked(ids[:-1], special, len(t), t.mask_token_id)
                x, y = torch.tensor(x).view(-1, T), torch.tensor(y)
            else:
                x, y = torch.tensor(ids[:-1]).view(-1, T), torch.tensor(ids[1:])
            logits = self.model(x).logits.reshape(-1, rows)
            return torch.nn.functional.cross_entropy(logits, y.flatten()).item()


@unittest.skipUnless(torch and HAS_TRAINER and HAS_BERT, MISSING)
class Directories(Folder):
    def trainer(self, row, *flags):
        """(exit code, what it says)"""
        program = BERT_TRAINER if row["model"].startswith("Bert") else TRAINER
        p = subprocess.run([program, "--load", "hf", "--threads", "1", "--out", "out", *flags], cwd=self.folder,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
        self.assertIn(p.returncode, (0, 2), p.stderr)
        return p.returncode, p.stderr.strip()

    def refused(self, row, said):
        """the first line that names the key"""
        named = [line for line in said.split("\n") if row["key"] and re.search(row["key"], line)]
        self.assertTrue(named, f"expected a reason that names {row['key']}, got {said}")
        return re.sub(r"^(error: )?(hf(/|: ))?", "", named[0])

    def shown(self, prompt):
        """(what the trainer prints of a prompt of ids, which a new token follows; what it says)"""
        p = subprocess.run([TRAINER, "--load", "hf", "--threads", "1", "--tokens", "1", "--generate",
                            " ".join(map(str, prompt))], cwd=self.folder, capture_output=True, encoding="utf-8")
        self.assertEqual(p.returncode, 0, p.stderr)
        return p.stdout, p.stderr

    def outcome(self, row):
        """loads, or refused: why, or text refused: why; an error if it loads as something else. Tensors that the file
        lacks are drawn here as there, if the trainer says which"""
        shutil.rmtree(self.path("hf"), ignore_errors=True)
        shutil.rmtree(self.path("out"), ignore_errors=True)
        size = make(row, self.path("hf"))
        stream = random.Random(5)
        ids = [stream.randrange(size) for _ in range(WINDOWS * T + 1)]
        header = struct.pack("<256i", 20240520, 1, len(ids), size, 0, *[0] * 251)
        self.write("ids.bin", header + struct.pack(f"<{len(ids)}H", *ids))
        want = Reference(row, self.path("hf"), ids)
        code, said = self.trainer(row, "--val_files", "ids.bin", "--eval_lengths", str(T))
        if code:
            return "refused: " + self.refused(row, said)
        (found,) = self.records("extrapolation", "out")
        if want.lacks:
            return "loads: " + self.refused(row, said)
        loss = found["loss"]
        self.assertIsNotNone(want.loss, f"loads with the loss {loss:.6f}; transformers does not: {want.why}")
        self.assertLess(abs(loss / want.loss - 1), SAME, f"loss {loss:.7f}, expected {want.loss:.7f}")
        if not want.tokenizer:
            return "loads"
        prompt = [] if want.bert else want.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        if not prompt:
            return "loads"
        found, said = self.shown(prompt)
        if "tokens are shown as ids" in said:
            return "text refused: " + self.refused(row, said)
        text = want.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        self.assertEqual(found[:len(text)], text, "other tokens")
        return "loads"

    def test_directories(self):
        found = {}
        for row in (*rows_of_gpt2(), *rows_of_byte_level(), *rows_of_bert(), *rows_of_word_pieces()):
            if LAYOUT in row["only"]:
                with self.subTest(row=row["name"]):
                    found[row["name"]] = "wrong"
                    found[row["name"]] = self.outcome(row)
        self.assertGreater(len(found), 60)
        table = read_table()
        if UPDATE:
            write_table({**{key: v for key, v in table.items() if key[1] != LAYOUT},
                         **{(name, LAYOUT): outcome for name, outcome in found.items() if outcome != "wrong"}})
        stored = {name: outcome for (name, layout), outcome in read_table().items() if layout == LAYOUT}
        right = {name for name, outcome in found.items() if outcome != "wrong"}
        for name in sorted(right | set(stored) - set(found)):
            with self.subTest(row=name, table=os.path.basename(TABLE)):
                self.assertEqual(found.get(name), stored.get(name), "found, and in the table, which --update writes")


def read_table():
    """{(row, layout): outcome}"""
    if not os.path.exists(TABLE):
        return {}
    with open(TABLE, encoding="utf-8") as f:
        lines = [line.rstrip("\n").split("\t") for line in f if not line.startswith("directory\t")]
    return {(name, layout): outcome for name, layouts, outcome in lines for layout in layouts}


def write_table(found):
    order = [r["name"] for r in (*rows_of_gpt2(), *rows_of_byte_level(), *rows_of_bert(), *rows_of_word_pieces())]
    lines = ["directory\ttransformers\twhat the trainers do\n"]
    for name in order:
        of = {layout: found[name, layout] for layout in "45" if (name, layout) in found}
        for outcome in sorted(set(of.values()), key=list(of.values()).index):
            lines.append(f"{name}\t{''.join(layout for layout in of if of[layout] == outcome)}\t{outcome}\n")
    with open(TABLE, "w", encoding="utf-8") as f:
        f.writelines(lines)


if __name__ == "__main__":
    unittest.main(argv=[word for word in sys.argv if word != "--update"])
