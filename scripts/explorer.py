#!/usr/bin/env python3
"""explorer.py -- one offline HTML page that shows what each token of a text sees, in one model or in two side by side.

    scripts/explorer.py CHECKPOINT [CHECKPOINT2] --text FILE -o page.html

Click a token, and the page colours the text by the attention or the bias of this query in a chosen head, or by each
token's loss, g, or step of CABLE's sum S. Below the text are the same numbers as curves, above it the live tiles of all
heads. The page needs no server and no network; it is explorer.html with explorer.js inside.

The trainer computes what is shown (--dump_bias all,parts and --token_losses), and heads.py the statistics of each head.
The page itself only turns q and k into weights: T x T of them for each head would not fit.
"""
import array
import base64
import glob
import json
import math
import os
import tempfile
import zlib

import console
import heads
from console import BadInput, read_losses

HERE = os.path.dirname(os.path.abspath(__file__))
LARGEST_PAGE = 5_000_000                        # bytes
LARGEST_DUMP = 20_000_000                       # of the trainer's files: their page would be larger
TOKENS = {"pos": console.TEXT, "tokens": ("a list", lambda v: isinstance(v, list))}


def tokens_of(path):
    """how many tokens a text file or a shard has"""
    with console.open_regular(path) as f:
        return int.from_bytes(f.read(12)[8:], "little") if path.endswith(".bin") else os.fstat(f.fileno()).st_size


def too_large(size, T):
    return BadInput(f"expected a page of at most {LARGEST_PAGE / 1e6:.0f} MB, got {size / 1e6:.1f} MB for {T:,} "
                    f"tokens: give --tokens {int(0.97 * T * LARGEST_PAGE / size)}, or a smaller model")


class Floats:
    """float32 numbers of a page: compressed without loss, each byte of a number with its like, and then as text"""

    def __init__(self):
        self.all = array.array("f")

    def add(self, numbers):
        """[where they begin, how many]"""
        first = len(self.all)
        self.all.extend(numbers)
        return [first, len(self.all) - first]

    def text(self):
        data = self.all.tobytes()
        return base64.b64encode(zlib.compress(b"".join(data[n::4] for n in range(4)), 9)).decode()


def head_of(checkpoint, about, part, floats):
    """what explorer.js knows of the weights of a head"""
    numpy = console.need("numpy")
    if "z" in part:
        raise BadInput(f"{checkpoint}: cope's biases depend on the scores of other keys; a page has no room for them")
    page = {name: about[name] for name in ("window", "log", "inside")}
    n, factor = len(part["q"]), part.get("factor")
    found = {name: part[name] for name in ("q", "k", "S_offset", "g") if name in part}
    if "by_distance" in part:
        found["by_distance"] = part["by_distance"][n - 1:]              # of the keys before the query
    if "g" in part and factor is not None:
        found["g"] = part["g"] * factor
    if "rows" in part or (factor is not None and ("by_distance" in part or about["inside"])):
        rows = heads.bias(about, part, *numpy.ogrid[:n, :n])
        found = {"q": part["q"], "k": part["k"], "rows": rows[numpy.tril_indices(n)].astype("f4")}
    if "S_offset" in found:
        page["S_origin"] = part["S_origin"].astype("f8").sum(axis=0).tolist()
    if not all(numpy.isfinite(numbers).all() for numbers in found.values()):
        raise BadInput(f"{checkpoint}: layer {about['layer']}: not all numbers are finite")
    return {**page, **{name: floats.add(numbers.ravel()) for name, numbers in found.items()}}


def model_of(args, checkpoint, T):
    """(tokens, what the page knows of one model)"""
    floats, shown = Floats(), []
    with tempfile.TemporaryDirectory() as out:
        heads.run_trainer([
            args.trainer, "--load", checkpoint, "--val_files", args.text, "--T", str(T), "--eval_lengths", str(T),
            "--eval_tokens", str(T), "--token_losses", "--dump_bias", "all,parts", "--out", out,
            *(["--tokenizer", args.tokenizer] if args.tokenizer else [])])
        path = os.path.join(out, "bias_all_parts.json")
        text = console.fields(console.read_object(path), TOKENS, {}, path)
        paths = sorted(glob.glob(os.path.join(glob.escape(out), "parts_*.safetensors")))
        size = sum(map(os.path.getsize, paths))
        if size > LARGEST_DUMP:
            raise too_large(1.25 * size, T)
        statistics = {(r["layer"], r["head"]): r for r in heads.statistics(out)}
        for about, parts in map(heads.read_parts, paths):
            begins, sinks = parts[0]["begins"].astype(int).tolist() if "begins" in parts[0] else [], about["sinks"]
            shown += [{"layer": about["layer"], "head": h, "statistics": statistics[about["layer"], h],
                       **head_of(checkpoint, about, part, floats)} for h, part in enumerate(parts)]
        shown.sort(key=lambda head: (head["layer"], head["head"]))      # of the files, layer 10 is before layer 2
        losses = read_losses(os.path.join(out, f"token_losses_{T}_{T}.safetensors"))
        summary = console.read_log(out, "extrapolation")[0]
    # the loss of a token is that of predicting it: the first has none, and the last one's target is not shown
    return text["tokens"], {"pos": text["pos"], "path": checkpoint, "T_train": summary["T_train"],
                            "loss": summary["loss"], "losses": floats.add([math.nan, *losses[:T - 1]]),
                            "sinks": sinks, "begins": begins, "heads": shown, "floats": floats.text()}


def main(argv):
    parser = console.parser(__doc__)
    parser.add_argument("checkpoint", nargs="+", help="one or two, each a checkpoint or a run's directory")
    parser.add_argument("--text", required=True, help="a .txt file, or a shard of tokens: what --val_files takes")
    parser.add_argument("-o", "--out", required=True, help="the page")
    parser.add_argument("--tokens", type=console.positive, default=2000, help="show at most this many [2000]")
    parser.add_argument("--tokenizer", help="as the trainer's, to show the text of a shard's tokens")
    parser.add_argument("--trainer", default=os.path.join(console.ROOT, "train_gpt2"),
                        help="[train_gpt2 of this repository]")
    args = parser.parse_args(argv)
    console.need("numpy")
    if len(args.checkpoint) > 2:
        raise BadInput(f"expected one or two checkpoints, got {len(args.checkpoint)}")
    T = min(args.tokens, tokens_of(args.text) - 1)
    if T < 2:
        raise BadInput(f"{args.text}: expected at least 3 tokens and --tokens of at least 2, got {T + 1}")
    tokens, models = zip(*(model_of(args, checkpoint, T) for checkpoint in args.checkpoint))
    if tokens[0] != tokens[-1]:
        raise BadInput(f"{' and '.join(args.checkpoint)}: expected the same tokens of {args.text}, got different ones")
    data = {"text": os.path.basename(args.text), "tokens": tokens[0], "models": models}
    page, script = (console.read_bytes(os.path.join(HERE, f"explorer.{of}")).decode() for of in ("html", "js"))
    page = page.replace("/*SCRIPT*/", script).replace("/*DATA*/", json.dumps(data).replace("<", "\\u003c"))
    if len(page.encode()) > LARGEST_PAGE:
        raise too_large(len(page.encode()), T)
    console.write_whole(args.out, page)
    print(f"{args.out}: {T:,} tokens, {len(page.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    console.run(main)
