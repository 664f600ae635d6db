#!/usr/bin/env python3
"""longppl.py -- LongPPL (Fang et al. 2024): perplexity over the tokens that need a long context.

    scripts/longppl.py keys EVALUATOR --val_files b.txt --long 4096 --short 512 --stride 256 -o keys.json
    scripts/longppl.py score keys.json run/cable/step_00002000 run/rope/step_00002000 --out run/longppl

The perplexity over all tokens says little about whether a model uses distant context, because few tokens depend on it.
`keys` finds those tokens of one text, once, by the losses of one model, the evaluator, with a long and a short context:

    key token   loss(short) - loss(long) > alpha   and   -loss(long) > beta         alpha = 2, beta = -2, in nats

so the distant context makes it much likelier, and with it the token is likely. `score` measures other models on these
tokens in the long context: LongPPL = exp(mean of their losses), beside the perplexity over all tokens that could have
been keys.

Both let the trainer evaluate (--eval_lengths, --stride, --token_losses), in windows whose last --stride tokens count.
Only tokens whose long window holds more than --short tokens before them can be keys. The file has the checksum of the
text, the evaluator and all settings; `score` refuses another text. Existing losses are not evaluated again.
docs/probes.md has an example, and what --short and --stride are in the authors' program.
"""
import hashlib
import json
import math
import os

import console
import runqueue
from console import BadInput, need, sha256_of
from runqueue import Command, Job, weights_of


def contexts(tokens, T, stride):
    """how many tokens stand before each target in its window, as llmc/lab/evaluate.h moves them"""
    n = need("numpy").arange(tokens)
    window = (-(-(n + 1 - T) // stride)).clip(0)            # the first one that holds the target
    return n - window * stride + 1


def key_tokens(long_losses, short_losses, candidate, alpha, beta):
    """which tokens are keys"""
    return candidate & (short_losses - long_losses > alpha) & (-long_losses > beta)


def perplexity(losses, chosen):
    """exp(mean loss) of the chosen tokens, a list of their numbers; None of none"""
    return math.exp(losses[chosen].mean(dtype="f8")) if len(chosen) else None


# ----------------------------------------------------------------------------------------------------------
# evaluations

def evaluation(args, checkpoint, T, stride, place):
    """the command that writes the losses of all tokens, into a directory of these settings"""
    flags = {"load": checkpoint, "val_files": args.val_files, "eval_lengths": str(T), "stride": str(stride),
             "eval_tokens": str(args.eval_tokens), "token_losses": None}
    where = os.path.join(place, hashlib.sha256(json.dumps(flags).encode()).hexdigest()[:16])
    return Command("losses", args.trainer, {**flags, "out": where}, where,
                   os.path.join(where, "eval.done"), T, parts={T: T})


def losses_of(args, wanted):
    """{key: losses}; wanted: {key: (checkpoint, T, stride, directory)}"""
    numpy = need("numpy")
    commands = {key: evaluation(args, *what) for key, what in wanted.items()}
    jobs = [Job(f"{c.flags['load']}, T {c.flags['eval_lengths']}", "", [c]) for c in commands.values()]
    slots = runqueue.slots(args.jobs, args.trainer)
    code = runqueue.Queue("longppl.py", jobs, slots).run()
    if code:
        raise SystemExit(code)
    name = "token_losses_{eval_lengths}_{stride}.safetensors"
    read = lambda c: numpy.array(console.read_losses(os.path.join(c.out, name.format(**c.flags))))
    return {key: read(c) for key, c in commands.items()}


# what a file of keys has
KEYS = {"val_files": str, "sha256": str, "evaluator": str, "weights": str, "long": int, "short": int, "stride": int,
        "eval_tokens": int, "alpha": float, "beta": float, "tokens": int, "candidates": int, "keys": list}


def read_keys(path):
    record = console.read_object(path)
    given = record.pop("checksum", "")
    if {name: type(value) for name, value in record.items()} != KEYS or given != checksum(record):
        raise BadInput(f"{path}: expected a file that this version of `longppl.py keys` has written")
    return record


def checksum(record):
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def find_keys(args):
    if not args.stride <= args.short < args.long:
        raise BadInput(f"expected --stride <= --short < --long, got {args.stride}, {args.short}, {args.long}")
    args.text_sum = sha256_of(args.val_files)
    where = args.keep or args.output + ".losses"
    found = losses_of(args, {T: (args.evaluator, T, args.stride, where) for T in (args.long, args.short)})
    long_losses, short_losses = found[args.long], found[args.short]
    candidates = contexts(len(long_losses), args.long, args.stride) > args.short
    keys = key_tokens(long_losses, short_losses, candidates, args.alpha, args.beta)
    record = {"val_files": args.val_files, "sha256": args.text_sum, "evaluator": args.evaluator,
              "weights": weights_of(args.evaluator), "long": args.long, "short": args.short, "stride": args.stride,
              "eval_tokens": args.eval_tokens, "alpha": args.alpha, "beta": args.beta, "tokens": len(keys),
              "candidates": int(candidates.sum()), "keys": keys.nonzero()[0].tolist()}
    os.makedirs(os.path.dirname(os.path.abspath(args.output)), exist_ok=True)
    console.write_whole(args.output, json.dumps({**record, "checksum": checksum(record)}) + "\n")
    print(f"{args.output}: {len(record['keys']):,} key tokens of {record['candidates']:,} that see more than "
          f"{args.short:,} tokens ({len(record['keys']) / max(1, record['candidates']):.2%})")


def score(args):
    keys = read_keys(args.keys)
    args.val_files, args.eval_tokens = args.val_files or keys["val_files"], keys["eval_tokens"]
    args.text_sum = sha256_of(args.val_files)
    if args.text_sum != keys["sha256"]:
        raise BadInput(f"{args.val_files}: expected the text of {args.keys} (SHA-256 {keys['sha256'][:12]}...), got "
                       f"another one ({args.text_sum[:12]}...)")
    found = losses_of(args, {c: (c, keys["long"], keys["stride"], args.out) for c in args.checkpoints})
    rows = []
    for checkpoint, losses in found.items():
        if len(losses) != keys["tokens"]:
            raise BadInput(f"{checkpoint}: expected the losses of {keys['tokens']:,} tokens, as in {args.keys}, got "
                           f"{len(losses):,}; has it another vocabulary?")
        candidate = contexts(len(losses), keys["long"], keys["stride"]) > keys["short"]
        rows.append((checkpoint, perplexity(losses, keys["keys"]), perplexity(losses, candidate.nonzero()[0])))
    shown = lambda v: "-" if v is None else f"{v:.4f}"
    lines = [f"LongPPL over {len(keys['keys']):,} key tokens of {keys['candidates']:,}, windows of {keys['long']:,} "
             f"tokens; the keys are those of {keys['evaluator']} ({keys['short']:,} tokens, alpha {keys['alpha']:g}, "
             f"beta {keys['beta']:g}).", ""]
    lines += console.table(["model", "LongPPL", "perplexity"], [[c, shown(k), shown(p)] for c, k, p in rows])
    os.makedirs(args.out, exist_ok=True)
    console.write_whole(os.path.join(args.out, "longppl.md"), "\n".join(lines) + "\n")
    console.write_whole(os.path.join(args.out, "longppl.json"), json.dumps(
        [{"checkpoint": c, "longppl": k, "ppl": p, "keys": os.path.abspath(args.keys)} for c, k, p in rows]) + "\n")
    print("\n" + "\n".join(lines))


def parse(argv):
    p = console.parser(__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    keys = commands.add_parser("keys", help="find the key tokens of a text")
    keys.add_argument("evaluator", help="checkpoint whose losses decide")
    keys.add_argument("--val_files", required=True, help="the text: one file")
    keys.add_argument("--long", type=console.positive, required=True, help="tokens of the long context")
    keys.add_argument("--short", type=console.positive, required=True, help="tokens of the short one")
    keys.add_argument("--stride", type=console.positive, required=True, help="tokens that each window scores")
    keys.add_argument("--eval_tokens", type=console.natural, default=0,
                      help="only this many tokens of the text; 0 = all [0]")
    keys.add_argument("--alpha", type=console.real, default=2.0, help="least gain by the long context, in nats [2]")
    keys.add_argument("--beta", type=console.real, default=-2.0, help="least log-likelihood in the long context [-2]")
    keys.add_argument("-o", "--output", required=True, help="the file of the keys")
    keys.add_argument("--keep", default="", help="directory of the losses [OUTPUT.losses]")
    keys.set_defaults(run=find_keys)
    of = commands.add_parser("score", help="LongPPL of checkpoints")
    of.add_argument("keys", help="file of the keys")
    of.add_argument("checkpoints", nargs="+")
    of.add_argument("--val_files", default="", help="where the text is now [as when the keys were found]")
    of.add_argument("--out", default="run/longppl", help="directory of losses and results [run/longppl]")
    of.set_defaults(run=score)
    for parser in keys, of:
        parser.add_argument("--trainer", default=os.path.join(runqueue.ROOT, "train_gpt2"),
                            help="program that evaluates [train_gpt2 of this repository]")
        parser.add_argument("--jobs", type=console.processes, default=0,
                            help="evaluations at a time [1; with GPUs: one for each]")
    return p.parse_args(argv)


def main(argv):
    args = parse(argv)
    args.trainer = runqueue.program(args.trainer)
    args.run(args)


if __name__ == "__main__":
    console.run(main)
