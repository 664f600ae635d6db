#!/usr/bin/env python3
"""gpu_study.py -- which encoding extrapolates at a real size, in half an hour of a GPU: GPT-2 124M with four encodings,
the same tokens for each; perplexity at 512 to 131,072 tokens; and passages that have to be found again.

    dev/gpu_study.py --pack 'data/edu_fineweb10B/*_train_*.bin' --val_files 'data/edu_fineweb10B/*_val_*.bin'
    dev/gpu_study.py --minutes 9.5

The first command runs where the text is. It writes build/gpu_study: --tokens tokens in two compressed files, which can
be copied one by one, and text for evaluation. The second command runs on the GPU's machine, where that folder and
build/gpu_check (gpu_check.py --build) have been copied. The same command continues until its exit code is 0: a training
that the time ends has a checkpoint. Each result is a row of dev/results/gpu.csv as soon as it is known, and
build/gpu_study/study has the tables and figures of scripts/study.py. Exit codes as in gpu_check.py."""
import collections
import glob
import itertools
import lzma
import os
import statistics
import sys
import time
from array import array

import gpu_check
from gpu_check import Failed, Late, common, console, ledger, say

WORK = "build/gpu_study"
PASSAGES = "passkey,induction"
path = lambda name: os.path.join(WORK, name)


def shards(pattern, count, parts):
    """the first `count` tokens of the files of this pattern, as `parts` shards"""
    ids, kind = array("H"), None
    for name in sorted(glob.glob(pattern)):
        found = common.read_tokens(name)
        kind = kind or (found.vocabulary, found.end)
        if name.endswith(".txt") or found.ids.itemsize != ids.itemsize or kind != (found.vocabulary, found.end):
            raise console.BadInput(f"{name}: expected a shard of uint16 tokens, and all of one vocabulary")
        ids.extend(found.ids[:count - len(ids)])
        if len(ids) == count:
            break
    if not ids:
        raise console.BadInput(f"{pattern}: expected shards, got none")
    each = -(-len(ids) // parts)
    cut = [ids[at:at + each] for at in range(0, len(ids), each)]
    return [common.header(len(part), *kind) + part.tobytes() for part in cut]


def pack(args):
    os.makedirs(WORK, exist_ok=True)
    files = {f"train_{k}.bin": part for k, part in enumerate(shards(args.pack, args.tokens, 2), 1)}
    files["val.bin"], = shards(args.val_files, args.eval_tokens, 1)
    for name, content in files.items():
        small = lzma.compress(content)
        console.write_whole(path(name + ".xz"), small)
        say(f"{path(name)}.xz: {len(content) // 2 - 512:,} tokens, {len(small) / 2 ** 20:.1f} MiB")


def unpack(args):
    """writes the shards and the passages that are not there yet; the number of training tokens"""
    packed = sorted(glob.glob(path("*.bin.xz")))
    if path("val.bin.xz") not in packed or len(packed) < 2:
        raise console.BadInput(f"{WORK}: expected train_*.bin.xz and val.bin.xz, which --pack writes")
    for name in packed:
        if not os.path.exists(name[:-3]):
            try:
                with lzma.open(name) as f:                              # at most 8 GiB
                    console.write_whole(name[:-3], itertools.islice(iter(lambda: f.read(1 << 20), b""), 1 << 13))
            except (EOFError, lzma.LZMAError) as e:
                raise console.BadInput(f"{name}: expected what --pack writes, whole ({e}); copy it again") from None
    if not os.path.exists(path("passages")):
        lengths = ",".join(str(args.T << k) for k in range(5))
        console.output_of([sys.executable, "data/tasks.py", "--text", path("val.bin"), "--tasks", PASSAGES, "--lengths",
                           lengths, "--out", path("passages.new")])
        os.rename(path("passages.new"), path("passages"))
    return sum(os.path.getsize(name) // 2 - 512 for name in glob.glob(path("train_*.bin")))


def train(visit, args, trainer, tokens):
    """trains and evaluates what is missing: scripts/study.py has a checkpoint of what the time ends"""
    seconds = max(1, visit.end - time.monotonic() - 20)
    lengths = [str(args.T // 2 << k) for k in range(9)]
    code, said = visit.run(["timeout", f"{seconds:.0f}", sys.executable, "scripts/study.py", "--trainer", trainer,
                            "--encodings", *args.encodings, "--seeds", "1", "--models", args.model, "--lengths",
                            str(args.T), "--eval_lengths", *lengths, "--eval_tokens", str(args.eval_tokens), "--B",
                            str(args.B), "--steps", str(tokens // (args.B * args.T)), "--lr", "6e-4", "--warmup",
                            "100", "--train_files", path("train_*.bin"), "--val_files", path("val.bin"), "--jobs", "1",
                            "--out", path("study")], 1e6, ())
    if code in (124, console.EXIT_INTERRUPTED):
        raise Late("the same command continues")
    if code:
        raise Failed(said[-2000:])
    return {"encodings": len(args.encodings)}


def perplexities(run):
    found = [r for log in glob.glob(f"{run}/eval/*/log.jsonl") for r in console.read_log(log, "extrapolation")]
    if not found:
        raise Late("it has not been evaluated")
    return {f"at {r['T']}": r["ppl"] for r in found}


def passages(visit, trainer, run):
    """the share of whole passages that are found, in percent, over all depths of a length"""
    visit.run([trainer, "--load", run, "--tasks", path("passages/*.bin"), "--out", f"{run}/passages"], 300)
    found = collections.defaultdict(list)
    for r in console.read_log(f"{run}/passages", "task"):
        found[f"% {os.path.basename(r['file']).partition('_')[0]} at {r['T']}"].append(100 * r["exact"] / r["examples"])
    return {what: statistics.fmean(shares) for what, shares in found.items()}


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("--pack", metavar="SHARDS", help="write build/gpu_study; run nothing")
    p.add_argument("--val_files", metavar="SHARDS", help="text for evaluation, with --pack")
    p.add_argument("--tokens", type=console.positive, default=100_000_000, help="tokens to train on [100000000]")
    p.add_argument("--minutes", type=float, default=1e6, help="end by then; the same command continues")
    p.add_argument("--results", default="dev/results/gpu.csv", metavar="FILE", help="[dev/results/gpu.csv]")
    p.add_argument("--trainer", default=gpu_check.BF16["gpt2"], help="[%(default)s]")
    p.add_argument("--encodings", nargs="+", default="cable alibi rope none".split(), metavar="NAME")
    p.add_argument("--model", default="small", help="size, by name or as L,NH,C [small, 124M]")
    p.add_argument("--T", type=console.positive, default=1024, help="length to train at [1024]")
    p.add_argument("--B", type=console.positive, default=64, help="sequences a step [64]")
    p.add_argument("--eval_tokens", type=console.positive, default=1 << 20, help="of each length [1048576]")
    args = p.parse_args(argv)
    if bool(args.pack) != bool(args.val_files):
        raise console.BadInput("expected --pack and --val_files together, or neither: they pack the text that a study "
                               "reads")
    os.chdir(ledger.ROOT)
    if args.pack:
        return pack(args)
    os.makedirs(gpu_check.WORK, exist_ok=True)
    visit = gpu_check.Visit(gpu_check.smi("name")[0], os.environ.get("COMMIT") or ledger.commit(), args.results,
                            args.minutes)
    tokens = unpack(args)
    name = f"study {args.model}, {tokens:,} tokens"
    visit.check(name, train, visit, args, args.trainer, tokens)
    for pos in args.encodings:
        for run in glob.glob(f"{path('study')}/*/{pos}-T{args.T}/seed_1"):
            visit.check(f"{name}, {pos}, perplexity", perplexities, run)
            visit.check(f"{name}, {pos}, passages", passages, visit, args.trainer, run)
    say(f"FAILED: {', '.join(visit.failed) or 'nothing'}; unfinished: {', '.join(visit.unfinished) or 'nothing'}")
    return 1 if visit.failed else 3 * bool(visit.unfinished)


if __name__ == "__main__":
    console.run(main)
