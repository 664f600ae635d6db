#!/usr/bin/env python3
"""export.py -- what other libraries need beside a checkpoint.

    dev/hf/export.py STEP OUT                       STEP: run/cable/step_00001000, or run/cable: its newest checkpoint
    dev/hf/export.py --check TEXT STEP OUT          also compares the losses of OUT in transformers and of STEP in
                                                    train_gpt2, on a text or shard like those it was trained on

A checkpoint is its own export: AutoModelForCausalLM.from_pretrained(STEP, trust_remote_code=True). This script writes a
copy with today's cable_hf.py, which an old checkpoint needs for new versions of transformers; and of a BERT, old or
not, a copy that SentenceTransformer("OUT", trust_remote_code=True) loads: modules.json and 1_Pooling, with the pooling
that it was trained with. A retriever's copy leaves out the head of masked language modelling, which --pairs does not
train.

A changed kernel trains another model than PyTorch's, unless that is changed too: --check then fails with both losses.
Its trainer is ./train_gpt2, or the one in TRAIN_GPT2; a build in float32.

The checkpoint is compared with its manifest. One without a manifest, which PyTorch has saved, is taken as it is.
"""
import ast
import contextlib
import json
import os
import re
import secrets
import shutil
import struct
import sys
import tempfile
import types

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, "..", "..", name) for name in ("scripts", "data")]

import common                   # noqa: E402
import console                  # noqa: E402
from console import BadInput    # noqa: E402

TRAINER = os.environ.get("TRAIN_GPT2") or os.path.join(os.path.dirname(os.path.dirname(HERE)), "train_gpt2")
SAME = 1e-4             # of a loss in two programs in float32, which differ by 1e-6
CODE, SOURCES = "cable_hf.py", ("cable_encodings.py", "cable_hf.py")
COPIED = ("encoder.json", "vocab.bpe", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.json", "tokenizer.model",
          "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
          "generation_config.json")
CLASSES = {"cable": {"AutoConfig": "cable_hf.CableConfig", "AutoModel": "cable_hf.CableModel",
                     "AutoModelForCausalLM": "cable_hf.CableForCausalLM"},
           "cable_bert": {"AutoConfig": "cable_hf.CableBertConfig", "AutoModel": "cable_hf.CableBertModel",
                          "AutoModelForMaskedLM": "cable_hf.CableBertForMaskedLM"}}
TYPES = {"gpt2": "cable", "bert": "cable_bert", "cable": "cable", "cable_bert": "cable_bert"}
HEAD = "cls."                                           # how the names of BERT's head begin
# what would make a library run code that a config.json names, from another directory or from the hub
NAMES_CODE = {"auto_map", "custom_pipelines", "custom_generate", "trust_remote_code", "code_revision", "use_kernels",
              "attn_implementation", "_attn_implementation"}


def newest(directory):
    """the checkpoint itself, or the last one of a run"""
    if os.path.exists(os.path.join(directory, "config.json")):
        return directory
    steps = sorted(d for d in os.listdir(directory) if re.fullmatch(r"step_\d{8,}", d))
    if not steps:
        raise BadInput(f"{directory}: expected a checkpoint (config.json) or a run with step_* in it, got neither")
    return os.path.join(directory, steps[-1])


def open_own(path):
    """a file of the checkpoint: a link could lead to any file of the system, which the copy would give away"""
    if os.path.islink(path):
        raise BadInput(f"{path}: expected a regular file, got a link")
    return console.open_regular(path)


def read_own(path):
    with open_own(path) as f:
        return f.read()


def without_code(value, path):
    """the contents of a .json without the keys that name code, wherever they stand"""
    if isinstance(value, list):
        return [without_code(one, path) for one in value]
    if not isinstance(value, dict):
        return value
    left = sorted(key for key in NAMES_CODE & set(value) if value[key] not in CLASSES.values())
    if left:
        console.say(f"{path}: left out {', '.join(left)}: the copy names no code but its own")
    return {key: without_code(one, path) for key, one in value.items() if key not in NAMES_CODE}


def verified(source):
    """the names of the checkpoint's files, after all that is copied has been compared with the manifest"""
    path = os.path.join(source, "manifest.json")
    if not os.path.lexists(path):
        return [name for name in os.listdir(source) if name != CODE]
    xxhash, text = console.need("xxhash"), read_own(path)
    summed = text[:text.rfind(b',\n "checksum": ')]       # its last line is the checksum of what stands before it
    own = xxhash.xxh3_64_hexdigest(summed + b"\n}")
    if text != summed + f',\n "checksum": "xxh3:{own}"\n}}\n'.encode():
        raise BadInput(f"{path}: its checksum does not match its contents (damaged, or edited?)")
    listed, needed = console.parse_object(text, path).get("files"), ("config.json", "model.safetensors")
    if not isinstance(listed, dict) or not all(isinstance(listed.get(name), dict) for name in needed):
        raise BadInput(f"{path}: expected the size and checksum of {' and '.join(needed)}")
    for name in (*needed, *COPIED):
        if name not in listed:
            continue
        found, size = xxhash.xxh3_64(), 0
        with open_own(os.path.join(source, name)) as f:
            for block in iter(lambda: f.read(1 << 20), b""):
                found.update(block)
                size += len(block)
        got = {"bytes": size, "checksum": "xxh3:" + found.hexdigest()}
        if got != listed[name]:
            raise BadInput(f"{os.path.join(source, name)}: expected {listed[name]}, as the manifest says, got {got} "
                           "(damaged?)")
    return list(listed)


def code_of_models():
    """cable_hf.py as the trainers write it: what C++ reads as two raw strings, without the first quote"""
    texts = []
    for name in SOURCES:
        with open(os.path.join(HERE, name), encoding="utf-8") as f:
            text = f.read()
        texts.append(text[text.index('R"py(') + 5:text.rindex(')py"')])
    return "".join(texts)[1:]


def cable_hf():
    """the module that lies beside a checkpoint"""
    module = sys.modules["cable_hf"] = types.ModuleType("cable_hf")
    exec(compile(code_of_models(), CODE, "exec"), module.__dict__)
    return module


def check_encoding(config, path):
    """what cable_hf.py checks of a config.json, in which an older name becomes today's; it needs nothing that this
    Python may lack"""
    module = ast.parse(code_of_models())
    wanted = "CABLES GRAPES POSITIONS WORDS SCALINGS renamed check_position check_mask base_of check_base".split()
    names = lambda node: {getattr(part, "id", getattr(part, "name", "")) for part in getattr(node, "targets", [node])}
    module.body = [node for node in module.body if names(node) & set(wanted)]
    code = {}
    exec(compile(module, CODE, "exec"), code)
    try:
        code["check_mask"](config.get("window", 0), config.get("sinks", 0), config["position"].get("name"))
        if "rope_scaling" in config:
            config["rope_scaling"] = code["renamed"](config["rope_scaling"])
        position = code["check_position"](config["position"], config.get("rope_scaling"))
        code["check_base"](config.get("rope_theta"), position)
        check_version(config, position)
    except (ValueError, TypeError, KeyError, AttributeError) as e:      # the values may be of any type
        raise BadInput(f"{path}: {str(e).replace('config.json: ', '')}") from None


def check_version(config, position):
    """raises ValueError if the model was trained with another formula of its encodings, as engine/config.h decides"""
    layers = position["layers"] if position["name"] == "layers" else [[position]]
    others = {"none", "rope", "carope", "learned", "sinusoidal", "ssmax", "cope"}     # without a bias
    for layer in layers:
        names = {encoding["name"] for encoding in layer}
        if config.get("encoding_version") != 2 and ("bam" in names or ("ssmax" in names and names - others)):
            raise ValueError("encoding_version: expected 2: this model was trained with an earlier formula")


def check_new(out):
    if os.path.lexists(out) and (os.path.islink(out.rstrip("/")) or not os.path.isdir(out) or os.listdir(out)):
        raise BadInput(f"{out}: expected a new or an empty directory; give another one")


@contextlib.contextmanager
def new_directory(out):
    """a temporary directory that becomes `out` at the end: `out` has all of its files or does not exist"""
    check_new(out)
    out = os.path.abspath(out)
    partial = f"{out}.{secrets.token_hex(8)}"
    os.makedirs(os.path.dirname(out), exist_ok=True)
    os.mkdir(partial)
    try:
        yield partial
        os.rename(partial, out)                         # also onto an empty directory, and onto nothing else
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    console.write_whole(path, json.dumps(value, indent=2) + "\n")


def write_sentence_transformer(out, source, config):
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")]
    write_json(os.path.join(out, "modules.json"),
               [{"idx": int(name), "name": name, "path": path, "type": "sentence_transformers.models." + kind}
                for name, path, kind in modules])
    write_json(os.path.join(out, "sentence_bert_config.json"),
               {"max_seq_length": config["max_position_embeddings"], "do_lower_case": False})
    settings = os.path.join(out, "tokenizer_config.json")
    if os.path.exists(os.path.join(out, "vocab.txt")) and not os.path.exists(settings):
        write_json(settings,
                   {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length":
                    config["max_position_embeddings"], "pad_token": "[PAD]", "unk_token": "[UNK]",
                    "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"})
    pooling = config.get("pooling", "mean")
    write_json(os.path.join(out, "1_Pooling", "config.json"),
               {"word_embedding_dimension": config["hidden_size"], "pooling_mode_cls_token": pooling == "cls",
                "pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False})


def copy_weights(source, out, left_out):
    """model.safetensors without the tensors whose names begin with left_out"""
    path = os.path.join(source, "model.safetensors")
    with open_own(path) as f, open(out, "wb") as copy:
        header, kept, end = {"__metadata__": {"format": "pt"}}, [], 0
        for name, (dtype, shape, first, last) in console.read_tensors(f, path).items():
            if left_out is None or not name.startswith(left_out):
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + last - first]}
                kept.append((first, last))
                end += last - first
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)                 # the data starts aligned
        copy.write(struct.pack("<Q", len(text)) + text)
        for first, last in kept:
            f.seek(first)
            for n in range(first, last, 1 << 20):
                copy.write(f.read(min(1 << 20, last - n)))


def read_config(source):
    """config.json and what is to be written: cable, cable_bert, or None for a model of transformers' own"""
    path = os.path.join(source, "config.json")
    config = without_code(console.parse_object(read_own(path), path), path)
    kind, position = TYPES.get(str(config.get("model_type"))), config.get("position")
    if kind is None or not isinstance(position, dict):
        raise BadInput(f"{path}: expected a checkpoint of train_gpt2 or train_bert, whose position names its "
                       f"encoding, got model_type {config.get('model_type')!r}, position {position!r}")
    if kind == "cable_bert":
        for key in ("max_position_embeddings", "hidden_size"):
            if type(config.get(key)) is not int:
                raise BadInput(f"{path}: {key}: expected an integer, got {config.get(key)!r}")
        if config.get("pooling", "mean") not in ("mean", "cls"):
            raise BadInput(f"{path}: pooling: expected mean or cls, got {config['pooling']!r}")
    if position.get("name") != "learned":
        check_encoding(config, path)
    elif config.get("window"):
        raise BadInput(f"{path}: learned positions with a window of {config['window']}: transformers has no such model")
    elif config.get("document_mask") is not None:
        raise BadInput(f"{path}: learned positions with documents apart: transformers has no such model")
    return config, kind


def export(source, out):
    source = newest(source)
    check_new(out)
    files = {name: read_own(os.path.join(source, name)) for name in verified(source) if name in COPIED}
    for name in {"tokenizer_config.json", "generation_config.json"} & set(files):
        path = os.path.join(source, name)
        config = console.parse_object(files[name], path)
        if (kept := without_code(config, path)) != config:
            files[name] = json.dumps(kept, indent=2).encode()
    config, kind = read_config(source)
    with open_own(os.path.join(source, "model.safetensors")) as f:
        console.read_tensors(f, f.name)
    with new_directory(out) as partial:
        write_copy(source, partial, files, config, kind)
    return source


def write_copy(source, out, files, config, kind):
    if config["position"]["name"] != "learned":
        config.update(model_type=kind, architectures=[list(CLASSES[kind].values())[-1].split(".")[1]],
                      auto_map=CLASSES[kind])
        console.write_whole(os.path.join(out, CODE), code_of_models())
    retriever = "pooling" in config                     # what --pairs has trained
    if retriever:
        config["architectures"] = ["BertModel" if config["model_type"] == "bert" else "CableBertModel"]
    for name, text in files.items():
        with open(os.path.join(out, name), "wb") as f:
            f.write(text)
    write_json(os.path.join(out, "config.json"), config)
    if kind == "cable_bert":
        write_sentence_transformer(out, source, config)
    copy_weights(source, os.path.join(out, "model.safetensors"), HEAD if retriever else None)


def loss_of_trainer(source, text, length, count):
    with tempfile.TemporaryDirectory() as out:
        console.output_of([TRAINER, "--load", source, "--val_files", text, "--eval_lengths", str(length),
                           "--eval_tokens", str(count), "--out", out])
        return console.read_log(out, "extrapolation")[0]["loss"]


def check_losses(source, out, text):
    torch, transformers = console.need("torch"), console.need("transformers")
    config, _ = read_config(out)
    if text.endswith(".txt") and config.get("vocab_used", config["vocab_size"]) != 256:
        raise BadInput(f"{text}: expected a shard of tokens; a .txt is for models of bytes only")
    tokens = torch.tensor(list(common.read_tokens(text).ids[:1 << 21]))
    length = min(config.get("n_positions", 0), 1024)
    windows = min((len(tokens) - 1) // max(length, 1), 16)
    if windows == 0 or "n_positions" not in config:
        raise BadInput(f"--check: expected a checkpoint of train_gpt2 and a text of at least {length + 1} tokens, got "
                       f"{config['model_type']} and {len(tokens)}")
    trainer, loss = loss_of_trainer(source, text, length, windows * length), 0.0
    model = (transformers.GPT2LMHeadModel.from_pretrained(out, trust_remote_code=False)
             if config["position"]["name"] == "learned" else
             transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)).eval()
    with torch.no_grad():
        for x, y in zip(tokens[:windows * length].view(-1, length), tokens[1:windows * length + 1].view(-1, length)):
            loss += torch.nn.functional.cross_entropy(model(x[None]).logits[0].double(), y).item() / windows
    both = f"loss {trainer:.6f} in train_gpt2, {loss:.6f} in transformers"
    if not abs(trainer - loss) <= SAME:
        raise BadInput(f"{out}: {both}: another model; docs/new_kernel.md says what to change beside a kernel")
    print(f"{both}: the same model")


def main(argv):
    texts = argv[1:2] if argv[:1] == ["--check"] else []
    argv = argv[2 * len(texts):]
    if len(argv) != 2 or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    source, out = export(*argv), argv[1]
    print(f"{source} -> {out}", flush=True)
    for text in texts:
        check_losses(source, out, text)


if __name__ == "__main__":
    console.run(main)
