#!/usr/bin/env python3
"""explorer.py -- one offline HTML page that shows what each token of a text sees, in one model or in two side by side.

    scripts/explorer.py CHECKPOINT [CHECKPOINT2] --text FILE -o page.html

Click a token, and the page colours the text by the attention or the bias of this query in a chosen head, or by each
token's loss, g, or step of CABLE's sum S. Below the text are the same numbers as curves, above it the live tiles of all
heads. The page needs no server and no network; it is explorer.html with explorer.js inside.

The trainer computes what is shown (--dump_bias all,parts, --heads, --token_losses). The page itself only turns q and k
into weights: T x T of them for each head would not fit.
"""
import array
import base64
import json
import math
import os
import subprocess
import tempfile
import zlib

import console
import plot
from console import BadInput, read_losses

HERE = os.path.dirname(os.path.abspath(__file__))
LARGEST_PAGE = 5_000_000                        # bytes
LARGEST_DUMP = 100_000_000                      # of JSON, about 20 bytes a number: its page would be larger
# what bias_all_parts.json has
PARTS = {**plot.MATRICES, **plot.TOKENS, "pos": console.TEXT, "sinks": console.COUNT, "begins": console.NUMBERS}


def tokens_of(path):
    """how many tokens a text file or a shard has"""
    with console.open_regular(path) as f:
        return int.from_bytes(f.read(12)[8:], "little") if path.endswith(".bin") else os.fstat(f.fileno()).st_size


def too_large(size, T):
    return BadInput(f"expected a page of at most {LARGEST_PAGE / 1e6:.0f} MB, got {size / 1e6:.1f} MB for {T:,} "
                    f"tokens: give --tokens {int(0.97 * T * LARGEST_PAGE / size)}, or a smaller model")


def run_trainer(args, checkpoint, T, out):
    """the trainer's files about the first T tokens: bias_all_parts.json, token_losses_*.safetensors and log.jsonl"""
    command = [args.trainer, "--load", checkpoint, "--val_files", args.text, "--T", str(T), "--eval_lengths", str(T),
               "--eval_tokens", str(T), "--token_losses", "--heads", "--dump_bias", "all,parts", "--out", out]
    command += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip()).splitlines() or [f"exit code {ran.returncode}"]
        raise BadInput(f"{checkpoint}: {said[-1]}")


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


def model_of(args, checkpoint, T):
    """(tokens, what the page knows of one model)"""
    with tempfile.TemporaryDirectory() as out:
        run_trainer(args, checkpoint, T, out)
        path = os.path.join(out, "bias_all_parts.json")
        if os.path.getsize(path) > LARGEST_DUMP:
            raise too_large(os.path.getsize(path) / 4, T)
        parts = console.fields(console.read_object(path), PARTS, {}, path)
        losses = read_losses(os.path.join(out, f"token_losses_{T}_{T}.safetensors"))
        records = console.read_log(out)
    floats = Floats()
    statistics = {(r["layer"], r["head"]): r for r in records if r["kind"] == "head"}
    for head in parts["matrices"]:
        console.fields(head, plot.PLACE, {}, path)
        head["statistics"] = statistics[head["layer"], head["head"]]
        if "rows" in head:                                              # of any bias: the lower triangle
            head["rows"] = [x for i, row in enumerate(head["rows"]) for x in row[:i + 1]]
        try:
            head.update({name: floats.add(head[name]) for name in ("q", "k", "S_offset", "g", "by_distance", "rows")
                         if name in head})
        except TypeError:
            raise BadInput(f"{checkpoint}: layer {head['layer']}, head {head['head']}: not all numbers are finite")
    summary = next(r for r in records if r["kind"] == "extrapolation")
    # the loss of a token is that of predicting it: the first has none, and the last one's target is not shown
    return parts["tokens"], {"pos": parts["pos"], "path": checkpoint, "T_train": summary["T_train"],
                             "loss": summary["loss"], "losses": floats.add([math.nan, *losses[:T - 1]]),
                             "sinks": parts["sinks"], "begins": parts["begins"],
                             "heads": parts["matrices"], "floats": floats.text()}


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
