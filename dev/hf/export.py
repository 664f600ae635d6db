#!/usr/bin/env python3
"""export.py -- what other libraries need beside a checkpoint.

    dev/hf/export.py STEP OUT                       STEP: run/cable/step_00001000, or run/cable: its newest checkpoint

A checkpoint is its own export: AutoModelForCausalLM.from_pretrained(STEP, trust_remote_code=True). This script writes a
copy of an old checkpoint, from before the trainers wrote cable_hf.py, that transformers loads the same way; and of a
BERT, old or not, a copy that SentenceTransformer("OUT", trust_remote_code=True) loads: modules.json and 1_Pooling,
with the pooling that it was trained with.
"""
import json
import os
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CODE = "cable_hf.py"
COPIED = ("encoder.json", "vocab.bpe", "vocab.json", "merges.txt", "vocab.txt", "gpt2_tokenizer.bin", "tokenizer.json",
          "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
CLASSES = {"cable": {"AutoConfig": "cable_hf.CableConfig", "AutoModel": "cable_hf.CableModel",
                     "AutoModelForCausalLM": "cable_hf.CableForCausalLM"},
           "cable_bert": {"AutoConfig": "cable_hf.CableBertConfig", "AutoModel": "cable_hf.CableBertModel",
                          "AutoModelForMaskedLM": "cable_hf.CableBertForMaskedLM"}}
TYPES = {"gpt2": "cable", "bert": "cable_bert", "cable": "cable", "cable_bert": "cable_bert"}


def newest(directory):
    """the checkpoint itself, or the last one of a run"""
    if os.path.exists(os.path.join(directory, "config.json")):
        return directory
    steps = sorted(d for d in os.listdir(directory) if d.startswith("step_"))
    if not steps:
        raise ValueError(f"{directory}: expected a checkpoint (config.json) or a run with step_* in it, got neither")
    return os.path.join(directory, steps[-1])


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def write_sentence_transformer(out, source, config):
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")]
    write_json(os.path.join(out, "modules.json"),
               [{"idx": int(name), "name": name, "path": path, "type": "sentence_transformers.models." + kind}
                for name, path, kind in modules])
    write_json(os.path.join(out, "sentence_bert_config.json"),
               {"max_seq_length": config["max_position_embeddings"], "do_lower_case": False})
    if os.path.exists(os.path.join(out, "vocab.txt")):
        write_json(os.path.join(out, "tokenizer_config.json"),
                   {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length":
                    config["max_position_embeddings"], "pad_token": "[PAD]", "unk_token": "[UNK]",
                    "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"})
    pooling = config.get("pooling", "mean")             # what --pairs has trained
    write_json(os.path.join(out, "1_Pooling", "config.json"),
               {"word_embedding_dimension": config["hidden_size"], "pooling_mode_cls_token": pooling == "cls",
                "pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False})


def export(source, out):
    source = newest(source)
    path = os.path.join(source, "config.json")
    with open(path) as f:
        config = json.load(f)
    kind, position = TYPES.get(config.get("model_type")), config.get("position")
    if kind is None or not isinstance(position, dict):
        raise ValueError(f"{path}: expected a checkpoint of train_gpt2 or train_bert, whose position names its "
                         f"encoding, got model_type {config.get('model_type')!r}, position {position!r}")
    if position.get("name") == "learned" and config.get("window"):
        raise ValueError(f"{path}: learned positions with a window of {config['window']}: transformers has no such "
                         "model")
    if position.get("name") == "learned" and config.get("document_mask") is not None:
        raise ValueError(f"{path}: learned positions with documents apart: transformers has no such model")
    if os.path.exists(os.path.join(out, "model.safetensors")):
        raise ValueError(f"{out}: already holds a model; give another directory")
    os.makedirs(out, exist_ok=True)
    if position.get("name") != "learned":
        config.update(model_type=kind, architectures=[list(CLASSES[kind].values())[-1].split(".")[1]],
                      auto_map=CLASSES[kind])
        has_code = os.path.exists(os.path.join(source, CODE))
        shutil.copyfile(os.path.join(source if has_code else HERE, CODE), os.path.join(out, CODE))
    for name in COPIED:
        if os.path.exists(os.path.join(source, name)):
            shutil.copyfile(os.path.join(source, name), os.path.join(out, name))
    write_json(os.path.join(out, "config.json"), config)
    if kind == "cable_bert":
        write_sentence_transformer(out, source, config)
    # last, under its name only when whole: an interrupted export is seen to be none
    weights = os.path.join(out, "model.safetensors")
    shutil.copyfile(os.path.join(source, "model.safetensors"), weights + ".partial")
    os.replace(weights + ".partial", weights)
    return source


def main():
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(f"{export(*sys.argv[1:])} -> {sys.argv[2]}")
    except (OSError, ValueError) as e:
        print(f"export.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
