#!/usr/bin/env python3
"""export.py -- turns a checkpoint into a directory that transformers loads anywhere, with the code that it needs.

    dev/hf/export.py run/cable/step_00001000 OUT        (or run/cable: its newest checkpoint)

    AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

A model with learned positions is a GPT-2 and needs none of this: GPT2LMHeadModel.from_pretrained(step directory).
"""
import json
import os
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CODE = ("modeling_cable.py", "cable_for_transformers.py")
TOKENIZERS = ("encoder.json", "vocab.bpe", "vocab.txt", "gpt2_tokenizer.bin")
AUTO_MAP = {"AutoConfig": "cable_for_transformers.CableTransformersConfig",
            "AutoModelForCausalLM": "cable_for_transformers.CableForCausalLM"}


def newest(directory):
    """the checkpoint itself, or the last one of a run"""
    if os.path.exists(os.path.join(directory, "config.json")):
        return directory
    steps = sorted(d for d in os.listdir(directory) if d.startswith("step_"))
    if not steps:
        raise ValueError(f"{directory}: neither a checkpoint (config.json) nor a run with step_* in it")
    return os.path.join(directory, steps[-1])


def export(source, out):
    source = newest(source)
    path = os.path.join(source, "config.json")
    with open(path) as f:
        config = json.load(f)
    if config.get("model_type") != "gpt2" or not isinstance(config.get("position"), dict):
        raise ValueError(f"{path}: model_type {config.get('model_type')!r}, position {config.get('position')!r}; "
                         "wanted a checkpoint of train_gpt2, whose position names its encoding")
    if os.path.exists(os.path.join(out, "model.safetensors")):
        raise ValueError(f"{out}: already holds a model; give another directory")
    config.update(model_type="cable", architectures=["CableForCausalLM"], auto_map=AUTO_MAP, use_cache=False)
    os.makedirs(out, exist_ok=True)
    for name in CODE:
        shutil.copyfile(os.path.join(HERE, name), os.path.join(out, name))
    for name in TOKENIZERS:
        if os.path.exists(os.path.join(source, name)):
            shutil.copyfile(os.path.join(source, name), os.path.join(out, name))
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")
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
