#!/usr/bin/env python3
"""paper.py -- every table and figure of the paper, as commands of the trainers, run one after another.

    scripts/paper.py table1 fineweb-edu medium cable        one row: its data if missing, training, evaluation
    scripts/paper.py table1 --dry_run                       all rows of a table: what would be run, and what that costs
    scripts/paper.py --rows                                 the command of every row
    scripts/report.py run -o report                         the tables, beside the paper's numbers

table1 table3 table4   perplexity at 512 to 15,360 tokens after training at 1,024
table2                 BERT: masked tokens, then MS MARCO's triplets, then MLDR-en's full corpus at 512 to 16,384 tokens, nDCG@10
bert_curves            Figures 5 and 6: table2's trainings alone; scripts/report.py draws their losses
generalization         the arXiv version's table: HellaSwag, FineWeb, WikiText-2 and -103 by models trained on FineWeb-Edu
figure3                training tokens/s and memory, unbatched generation, of 30 steps on tiny Shakespeare
figure4                kernel CABLE (kcable) beside cable
figure5                the arXiv version's: trained at 512, 1,024 ... 8,192
bias                   the arXiv version's: bias matrices of three layers as JSON and image (text needs --tokenizer encoder.json)
small, quick           the comparison on two CPU cores: scripts/reproduce_small.sh

Words behind the experiment select rows: data sets, sizes, encodings; none of a kind means all of that kind. Run the same command
again after an interruption: finished parts are skipped, training goes on from its newest checkpoint, and rows that share a model
(table1, figure4, bias; table2, bert_curves) share its run. --set FLAG=VALUE replaces a flag of the trainer, --set pairs.FLAG=VALUE
one of the fine-tuning.

The arithmetic. A step of FineWeb-Edu is 524,288 tokens, of WikiText-103 131,072 (the only size that fits the paper's epochs);
FLOPs a token are 6 (12 L C^2 + V C) + 6 L C T, forward and backward, causal; hours are those of ONE GPU that sustains the
200 TFLOP/s which --tflops assumes. No GPU was measured: --tokens_per_s puts your own figure in the assumption's place.
    data              size      steps    tokens   GFLOP a token    hours a model
    fineweb-edu       tiny     19,073    10.00G            0.29              4.0
    fineweb-edu       small    19,073    10.00G            0.80             11.1
    fineweb-edu       medium   19,073    10.00G            2.27             31.6
    wikitext-103      tiny      9,000     1.18G            0.29              0.5
    wikitext-103      small     5,000     0.66G            0.80              0.7
    wikitext-103      medium    3,000     0.39G            2.27              1.2
    fineweb-edu-bert  base     14,000     0.92G            0.59              0.7
BERT sees all keys: 6 (12 L C^2 + 0.15 V C) + 12 L C T, only masked rows reach the head; a step is 128 sequences of 512. Fine-tuning is one
epoch of 1.25 million triplets, 128 an update, on one GPU. Its FLOPs count every text as 512 tokens and two forward passes, those of
retrieval 200,000 documents of the average length, each token seeing T keys: both are bounds from above. Choices of our own: decay,
clipping, schedule and the warm-up of pre-training are GPT-2's, the learning rate of fine-tuning is 2e-5, its temperature 0.05.
"""
import argparse
import collections
import csv
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

Size = collections.namedtuple("Size", "L NH C B")           # B: sequences of 1,024 in a micro-batch
SIZES = {"tiny": Size(6, 8, 512, 64), "small": Size(12, 12, 768, 32), "medium": Size(24, 16, 1024, 16), "base": Size(12, 12, 768, 32)}

# name: its name in paper_tables.csv; prepare: what makes the files; train, val, test: globs; total_batch: tokens a step;
# test_tokens: how many are evaluated; vocab: padded
Data = collections.namedtuple("Data", "name prepare train val test total_batch test_tokens vocab")


def shards(name, script, directory, prefix, total_batch, test_tokens, test="test"):
    at = lambda split: f"data/{directory}/{prefix}_{split}_*.bin"
    return Data(name, f"data/{script} --out data/{directory}", at("train"), at("val"), at(test), total_batch, test_tokens, 50304)


DATA = {
    "fineweb-edu": shards("fineweb-edu-10B", "fineweb_edu.py", "edu_fineweb10B", "edu_fineweb", 524288, 100_000_000, "val"),
    "wikitext-103": shards("wikitext-103", "wikitext.py --size 103 --raw --join rows_apart", "wikitext103_raw", "wikitext103_raw", 131072,
                           287_645),
    # evaluation only: of FineWeb its validation shard, the first of the numbered files
    "fineweb": shards("fineweb-10B", "fineweb_edu.py --dataset classic --files 1", "fineweb10B", "fineweb", 0, 100_000_000, "val"),
    "wikitext-2": shards("wikitext-2", "wikitext.py --size 2 --raw --join rows_apart", "wikitext2_raw", "wikitext2_raw", 0, 287_645),
    "tinyshakespeare": Data("tinyshakespeare", "data/tinyshakespeare.py --out data/tinyshakespeare",
                            "data/tinyshakespeare/tiny_shakespeare_train.bin", "data/tinyshakespeare/tiny_shakespeare_val.bin",
                            "data/tinyshakespeare/tiny_shakespeare_val.bin", 524288, 32_768, 50304),
    "fineweb-edu-bert": shards("fineweb-edu-10B + ms-marco", "fineweb_edu.py --encoding bert", "edu_fineweb10B_bert", "edu_fineweb", 65536, 0,
                               "val")._replace(vocab=30592),
    # scripts/reproduce_small.sh makes the files and says where they are
    "wikitext-2-bytes": Data("wikitext-2-bytes", "", "wikitext2_bytes_train.txt", "wikitext2_bytes_val.txt", "wikitext2_bytes_test.txt",
                             0, 0, 256),
}
HELLASWAG = ("data/hellaswag.py --out data/hellaswag", "data/hellaswag/hellaswag_val.bin")
# BERT's second and third part: groups of texts, and a collection that is searched whole
PAIRS = ("data/msmarco.py --out data/msmarco", "data/msmarco/msmarco_train_*.bin")
MLDR = {"queries": "data/mldr_en/mldr_test_queries.bin", "corpus": "data/mldr_en/mldr_corpus_*.bin", "qrels": "data/mldr_en/mldr_test_qrels.tsv"}
MLDR_PREPARE, MLDR_DOCUMENTS, MLDR_TOKENS = "data/mldr.py --out data/mldr_en", 200_000, 4700
TRIPLETS, GROUPS, TEXTS = 1_250_000, 128, 3                 # of an epoch; of an update; texts in a group
MASKED = 0.15
STEPS = {("fineweb-edu-bert", "base"): 14000, ("fineweb-edu", "tiny"): 19073, ("fineweb-edu", "small"): 19073, ("fineweb-edu", "medium"): 19073,
         ("wikitext-103", "tiny"): 9000, ("wikitext-103", "small"): 5000, ("wikitext-103", "medium"): 3000}
RECIPE = {"lr": "6e-4", "warmup": "750", "final_lr": "0.1", "weight_decay": "0.1", "clip": "1", "schedule": "cosine"}
RECIPE_BERT = dict(RECIPE, lr="1e-4")
RECIPE_PAIRS = dict(RECIPE, lr="2e-5", warmup=str(TRIPLETS // GROUPS // 20))
INTERRUPTED = 75                        # the trainer's exit code too
LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)
RETRIEVAL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

# "The quick brown fox jumps over the lazy dog, and the dog sleeps on." in GPT-2's tokens
BIAS_TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
BIAS_IDS = "464 2068 7586 21831 18045 625 262 16931 3290 11 290 262 3290 44263 319 13"

# The comparison on two CPU cores: its own model, steps and lengths
Small = collections.namedtuple("Small", "model T B steps lr eval_tokens lengths encodings seeds")
SMALL = {
    "quick": Small("2,4,64", 128, 16, 500, "2e-3", 131072, (64, 128, 256, 512, 1024, 2048),
                   ("cable", "cable_nw", "alibi", "fire", "t5", "kerple", "rope", "learned", "sinusoidal"), (42, 43)),
    "small": Small("4,4,128", 256, 16, 4000, "1e-3", 262144, (128, 256, 512, 1024, 2048, 4096),
                   ("cable", "cable_nw", "kcable", "alibi", "fire", "t5", "kerple", "rope", "learned", "sinusoidal"), (42, 43, 44)),
}


class BadInput(Exception):
    pass


class Stopped(Exception):
    """a command ended otherwise than well: its exit code"""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a batch system sends to this process alone"""


# ----------------------------------------------------------------------------------------------------------
# rows and their commands

# A model that is trained. T: trained length; steps 0: the paper's; evaluations: data sets, "hellaswag", "generate", "bias"
Row = collections.namedtuple("Row", "experiment data model pos T steps lengths evaluations")
# One process. flags: a dict; done: a file that appears when it has ended well, holding its flags, or a glob that must match
Command = collections.namedtuple("Command", "title program flags out marker flops")


def paper_rows(table):
    """{(data, model): [encoding]} of a table in paper_tables.csv, in the paper's order"""
    names = {d.name: key for key, d in DATA.items()}
    rows = {}
    with open(os.path.join(HERE, "paper_tables.csv"), newline="") as f:
        for r in csv.DictReader(f):
            if r["table"] == table:
                rows.setdefault((names[r["trained_on"]], r["model"].split(":")[1]), {})[r["encoding"]] = True
    return {key: list(encodings) for key, encodings in rows.items()}


def rows_of(experiment):
    of = lambda table, lengths, evaluations: [
        Row(experiment, data, model, pos, 1024, 0, lengths, evaluations or (data,))
        for (data, model), encodings in paper_rows(table).items() for pos in encodings]
    if experiment in ("table1", "table3", "table4"):
        return of(experiment[5:], LENGTHS, ())
    if experiment in BERT:
        return [Row(experiment, data, model, pos, 512, 0, RETRIEVAL_LENGTHS, ("mldr",) if experiment == "table2" else ())
                for (data, model), encodings in paper_rows("2").items() for pos in encodings]
    if experiment == "generalization":
        return of("arxiv-1", (1024,), ("hellaswag", "fineweb", "wikitext-2", "wikitext-103"))
    if experiment == "figure3":
        encodings = ["none"] + paper_rows("1")["fineweb-edu", "medium"]
        return [Row(experiment, "tinyshakespeare", model, pos, 1024, 30, (), ("generate",))
                for model in ("medium", "small", "tiny") for pos in encodings]
    if experiment == "figure4":
        return [Row(experiment, "wikitext-103", "tiny", pos, 1024, 0, LENGTHS, ("wikitext-103",))
                for pos in ("cable", "cable_nw", "kcable", "kcable_nw")]
    if experiment == "figure5":
        return [Row(experiment, "wikitext-103", "tiny", pos, T, 0, LENGTHS, ("wikitext-103",))
                for pos in ("cable_v1", "sinusoidal") for T in (512, 1024, 2048, 4096, 8192)]
    if experiment == "bias":
        return [Row(experiment, "fineweb-edu", "medium", pos, 1024, 0, (), ("bias",))
                for pos in ("cable", "cable_v1", "alibi", "kerple", "t5", "fire")]
    s = SMALL[experiment]
    return [Row(experiment, "wikitext-2-bytes", s.model, pos, s.T, s.steps, s.lengths, ("wikitext-2-bytes",)) for pos in s.encodings]


BERT = ("table2", "bert_curves")
EXPERIMENTS = ("table1", "table2", "table3", "table4", "generalization", "figure3", "figure4", "figure5", "bert_curves", "bias", "small", "quick")


def select(rows, words):
    """the rows that have the words; a word that is in no row of the experiment is an error"""
    for field in ("data", "model", "pos", "T"):
        known = {str(getattr(r, field)) for r in rows}
        chosen = [w for w in words if w in known]
        words = [w for w in words if w not in known]
        rows = [r for r in rows if not chosen or str(getattr(r, field)) in chosen]
    return rows, words


def shape(model):
    """L, NH, C of tiny, small, medium or of the trainer's L,NH,C"""
    if model in SIZES:
        return SIZES[model][:3]
    try:
        L, NH, C = (int(x) for x in model.split(","))
        return L, NH, C
    except ValueError:
        raise BadInput(f"--set model={model}: wanted {', '.join(SIZES)} or L,NH,C")


def token_flops(model, T, head, causal=True):
    """of a forward pass: two for each weight of a matrix (head: logits a token), and attention, causal over half of T on average"""
    L, _, C = shape(model)
    return 2 * (12 * L * C * C + head * C) + (2 if causal else 4) * L * C * T


def train_flops(row, flags):
    """a token of training, forward and backward"""
    bert, vocab = row.experiment in BERT, DATA[row.data].vocab
    return 3 * token_flops(flags["model"], int(flags["T"]), MASKED * vocab if bert else vocab, not bert)


def micro_batch(row, args, flags, gpus):
    """sequences in a micro-batch: what fits is held constant in tokens, and must divide a step on every GPU"""
    total, T = int(flags["total_batch"]), int(flags["T"])
    small = SMALL.get(row.experiment)
    B = args.B or (small.B if small else max(1, SIZES[row.model].B * 1024 // T))
    share = total // (T * gpus)
    if share < 1 or total % (T * gpus) or (args.B and share % B):
        raise BadInput(f"--gpus {gpus}{f' --B {B}' if args.B else ''}: do not divide a step of {total:,} tokens in sequences of {T}")
    while share % min(B, share):
        B -= 1
    return min(B, share)


def training(row, args, seed, out):
    d = DATA[row.data]
    s = SMALL.get(row.experiment)
    flags = {"train_files": d.train, "val_files": d.val, "model": row.model, "pos": row.pos, "T": str(row.T)}
    if s:
        flags.update(total_batch=str(s.B * s.T), steps=str(s.steps), **dict(RECIPE, lr=s.lr, warmup=str(s.steps // 10)))
    else:
        flags.update(total_batch=str(d.total_batch), steps=str(row.steps or STEPS[row.data, row.model]),
                     **(RECIPE_BERT if row.experiment in BERT else RECIPE))
    if row.evaluations == ("generate",):
        flags["warmup"] = "0"
    flags["seed"] = str(seed)
    flags.update({k: v for k, v in args.set.items() if k in flags})
    flags["B"] = str(micro_batch(row, args, flags, args.gpus))
    flags["val_every"] = "0" if s or row.experiment == "figure3" else "250"
    if row.experiment not in BERT:
        flags["sample_every"] = "0"
    flops = int(flags["steps"]) * int(flags["total_batch"]) * train_flops(row, flags)
    return Command("train", args.trainer, saved(flags, args, out), out, os.path.join(out, "train.done"), flops)


def saved(flags, args, out):
    """the flags of a training that can be interrupted"""
    more = {"tokenizer": args.tokenizer} if args.tokenizer else {}
    return {**flags, "checkpoint_every": str(min(1000, int(flags["steps"]))), "keep": "2", "resume": "1", "out": out, **more}


def fine_tuning(row, args, seed, before, out):
    """contrastive, of the model in `before`; a chunk of texts is run forward twice, and backward"""
    T = args.set.get("T", str(row.T))
    flags = {"load": before, "pairs": args.set.get("pairs", PAIRS[1]), "pos": row.pos, "T": T, "total_batch": str(GROUPS * int(T)),
             "steps": str(TRIPLETS // GROUPS), **RECIPE_PAIRS, "tau": "0.05", "pooling": "mean", "seed": str(seed)}
    flags.update({k: args.set["pairs." + k] for k in flags if "pairs." + k in args.set})
    flags["B"] = str(micro_batch(row, args, flags, 1))
    tokens = int(flags["steps"]) * int(flags["total_batch"]) * TEXTS
    flops = 4 * tokens * token_flops(args.set.get("model", row.model), int(flags["T"]), 0, False)
    return Command("fine-tune", args.trainer, saved(flags, args, out), out, os.path.join(out, "train.done"), flops)


def retrieval(row, args, run, out, lengths):
    flags = {"load": run, **{k: args.set.get(k, v) for k, v in MLDR.items()}, "eval_lengths": ",".join(map(str, lengths)), "out": out}
    if "pairs.pooling" in args.set:
        flags["pooling"] = args.set["pairs.pooling"]
    model = args.set.get("model", row.model)
    flops = sum(MLDR_DOCUMENTS * min(T, MLDR_TOKENS) * token_flops(model, T, 0, False) for T in lengths)
    return Command("search mldr", args.trainer, flags, out, os.path.join(out, "eval.done"), flops)


def evaluation(row, args, what, run):
    """the commands that evaluate the model of a run on a data set, or on one of the other things"""
    out = os.path.join(run, "eval", what)
    marker = os.path.join(out, "eval.done")
    set_ = args.set
    if what == "hellaswag":
        return [Command("hellaswag", args.trainer, {"load": run, "hellaswag": HELLASWAG[1], "out": out}, out, marker, 0)]
    if what == "generate":
        T = int(set_.get("T", row.T))
        flags = {"load": run, "generate": "", "tokens": set_.get("tokens", str(T - 24)), "temperature": "0"}
        return [Command("generate", args.trainer, flags, out, marker, 0)]
    if what == "bias":
        L = shape(set_.get("model", row.model))[0]
        commands = []
        for layer in sorted({0, L // 2, L - 1}):
            image = os.path.join(out, f"bias_{layer}_0.json")
            text = BIAS_TEXT if args.tokenizer or DATA[row.data].vocab == 256 else BIAS_IDS
            flags = {"load": run, "dump_bias": f"{layer},0,{set_.get('text', text)}", "out": out}
            if args.tokenizer:
                flags["tokenizer"] = args.tokenizer
            commands.append(Command(f"bias of layer {layer}", args.trainer, flags, out, os.path.join(out, f"bias_{layer}.done"), 0))
            commands.append(Command("image", f"{sys.executable} scripts/plot.py bias {shlex.quote(image)}", {}, out, image[:-5] + ".png", 0))
        return commands
    T_train = int(set_.get("T", row.T))
    lengths = [int(T) for T in set_["eval_lengths"].split(",")] if "eval_lengths" in set_ else list(row.lengths)
    if row.pos == "learned":
        lengths = [T for T in lengths if T <= T_train]
    if what == "mldr":
        return [retrieval(row, args, run, out, lengths)]
    d = DATA[what]
    s = SMALL.get(row.experiment)
    flags = {"load": run, "val_files": d.test, "eval_lengths": ",".join(map(str, lengths)), "out": out}
    if s or "eval_tokens" in set_:
        flags["eval_tokens"] = str(s.eval_tokens) if s else "0"
    flags.update({k: v for k, v in set_.items() if k in ("val_files", "eval_tokens")})
    model = set_.get("model", row.model)
    tokens = int(flags.get("eval_tokens", 0)) or d.test_tokens
    flops = sum(tokens * token_flops(model, T, d.vocab) for T in lengths)
    return [Command(f"evaluate on {what}", args.trainer, flags, out, marker, flops)]


def run_directory(row, args, seed, data):
    T = f"-T{row.T}" if row.experiment == "figure5" and row.T != 1024 else ""
    top = ("figure3",) if row.experiment == "figure3" else (data,)          # 30 steps are no model
    return os.path.join(args.out, *top, row.model.replace(",", "x"), row.pos + T, f"seed_{seed}")


def preparations(row, args):
    """what makes the files that are not there; files given by --set are the caller's"""
    wanted = [(DATA[row.data].prepare, DATA[row.data].train)] if "train_files" not in args.set else []
    if row.experiment in BERT and "pairs" not in args.set:
        wanted.append(PAIRS)
    for what in row.evaluations:
        if what == "hellaswag":
            wanted.append(HELLASWAG)
        elif what == "mldr" and "corpus" not in args.set:
            wanted.append((MLDR_PREPARE, MLDR["corpus"]))
        elif what in DATA and "val_files" not in args.set:
            wanted.append((DATA[what].prepare, DATA[what].test))
    found = {script: files for script, files in wanted if script}
    return [Command("data", f"{args.python} {script}", {}, "", files, 0) for script, files in found.items()]


def has_data(files):
    """are they there, and is the script that makes them done with them? Files without its manifest are somebody else's"""
    files = os.path.join(ROOT, files)
    try:
        with open(os.path.join(os.path.dirname(files), "manifest.json")) as f:
            complete = json.load(f)["complete"]
    except (OSError, ValueError, KeyError, TypeError):
        complete = True
    return complete and bool(glob.glob(files))


def commands_of(row, args, seed):
    run = run_directory(row, args, seed, row.data)
    commands = [training(row, args, seed, run)]
    if row.experiment in BERT:
        before, run = run, run_directory(row, args, seed, "ms-marco")
        commands.append(fine_tuning(row, args, seed, before, run))
    return commands + [c for what in row.evaluations for c in evaluation(row, args, what, run)]


# ----------------------------------------------------------------------------------------------------------
# what is shown

def arguments(command, gpus=1):
    words = shlex.split(command.program)
    for name, value in command.flags.items():
        words += ["--" + name, value]
    return (["mpirun", "-np", str(gpus)] if gpus > 1 and command.title == "train" else []) + words


def short(n):
    return f"{n / 1e9:.2f}G" if n >= 1e7 else f"{n:,}"


def arithmetic(row, args, commands):
    """one line: steps, tokens, FLOPs and, under a stated assumption, GPU hours"""
    flags = commands[0].flags
    steps, batch = int(flags["steps"]), int(flags["total_batch"])
    line = f"{steps:,} steps x {batch:,} = {short(steps * batch)} tokens; {train_flops(row, flags) / 1e9:.3g} GFLOP a token"
    if row.experiment in SMALL:
        return line
    if args.tokens_per_s:
        hours = steps * batch / args.tokens_per_s / 3600
        return f"{line}: {hours:.1f} GPU hours of training at the given {args.tokens_per_s:,.0f} tokens/s a GPU"
    hours = lambda part: f"{sum(c.flops for c in part) / args.tflops / 3.6e15:.1f}"
    assumed = f"if a GPU sustains {args.tflops:g} TFLOP/s (assumed, not measured)"
    if row.experiment in BERT:
        pairs = commands[1].flags
        groups = int(pairs["total_batch"]) // int(pairs["T"])
        search = f", {hours(commands[2:])} of retrieval" if row.evaluations else ""
        return (f"{line}; then {int(pairs['steps']):,} steps x {groups:,} = {int(pairs['steps']) * groups:,} triplets: {hours(commands[:1])} GPU hours "
                f"of training and at most {hours(commands[1:2])} of fine-tuning{search}, {assumed}")
    return f"{line}: {hours(commands[:1])} GPU hours of training, {hours(commands[1:])} of evaluation, {assumed}"


def row_name(row):
    return " ".join([row.experiment, row.data, row.model, row.pos] + ([str(row.T)] if row.experiment == "figure5" else []))


def show(rows, args):
    for row in rows:
        for seed in args.seeds:
            commands = commands_of(row, args, seed)
            print(f"# {row_name(row)}, seed {seed}: {arithmetic(row, args, commands)}")
            for c in preparations(row, args) + commands:
                print(shlex.join(arguments(c, args.gpus)))


# ----------------------------------------------------------------------------------------------------------
# running

def marker_text(command):
    """what a finished command has computed; how fast and where from does not matter"""
    free = ("B", "keep", "checkpoint_every", "val_every", "resume", "out", "load")
    return json.dumps({"title": command.title, **{k: v for k, v in command.flags.items() if k not in free}}, sort_keys=True)


def is_done(command):
    if command.title == "data":
        return has_data(command.marker)
    if not command.marker.endswith(".done"):
        return bool(glob.glob(command.marker))
    try:
        with open(command.marker) as f:
            return f.read().strip() == marker_text(command)
    except OSError:
        return False


def duration(seconds):
    m, s = divmod(int(seconds), 60)
    return f"{m // 60}:{m % 60:02d}:{s:02d}" if m >= 60 else f"{m}:{s:02d}"


class Progress:
    """one line over all rows, by FLOPs: rewritten on a terminal, otherwise a line every ten seconds; or, verbose, all output"""

    def __init__(self, total, verbose):
        self.total, self.verbose, self.done, self.ran = max(total, 1), verbose, 0.0, 0.0
        self.start, self.last, self.terminal = time.time(), 0.0, sys.stdout.isatty()

    def line(self, text, label, command):
        if self.verbose:
            print(text, end="", flush=True)
            return
        step = re.match(r"step +(\d+)/(\d+) \| loss +([\d.]+)", text)
        if step and time.time() - self.last >= (0.5 if self.terminal else 10):
            self.last = time.time()
            part = command.flops * int(step[1]) / int(step[2])
            self.say(f"{label}: step {step[1]} of {step[2]}, loss {step[3]}", part)

    def say(self, what, part=0.0):
        ran = self.ran + part
        left = (time.time() - self.start) * (self.total - self.done - part) / ran if ran else 0
        eta = f", {duration(left)} left" if ran else ""
        before, after = ("\r\033[K", "") if self.terminal else ("", "\n")
        print(f"{before}[{100 * (self.done + part) / self.total:3.0f}%{eta}] {what}", end=after, flush=True)

    def finished(self, command, ran):
        self.done += command.flops
        self.ran += command.flops if ran else 0

    def clear(self):
        if self.terminal and not self.verbose:
            print("\r\033[K", end="", flush=True)


def execute(command, label, args, progress):
    words = arguments(command, args.gpus)
    if progress.verbose:
        print("$ " + shlex.join(words), flush=True)
    else:
        progress.say(f"{label}: {command.title}")
    log = os.path.join(command.out or ".", "output.log")
    if command.out:
        os.makedirs(command.out, exist_ok=True)
    tail = collections.deque(maxlen=8)
    try:
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as e:
        raise BadInput(f"{words[0]}: {e.strerror}" + ("; build it with make" if words[0].startswith("./train") else ""))
    stopped = None
    with open(log if command.out else os.devnull, "a") as f:
        while True:
            try:
                for text in process.stdout:
                    f.write(text)
                    tail.append(text)
                    progress.line(text, label, command)
                code = process.wait()
                break
            except KeyboardInterrupt as e:      # the trainer saves a checkpoint
                stopped = e
                if isinstance(e, Terminated):   # ^C it has had itself
                    process.terminate()
    progress.clear()
    if code == 0:
        if command.marker.endswith(".done"):
            with open(command.marker + ".tmp", "w") as f:
                f.write(marker_text(command) + "\n")
            os.replace(command.marker + ".tmp", command.marker)
        if stopped:
            raise Stopped(INTERRUPTED)
        return
    if not progress.verbose:
        print("".join(tail), end="", file=sys.stderr)
    print(f"paper.py: {label}: {command.title} ended with exit code {code}; run the same command again to go on", file=sys.stderr)
    raise Stopped(INTERRUPTED if stopped else code if code > 0 else 1)


def run_all(rows, args):
    """each row for each seed; seeds outermost, so that an early end leaves whole comparisons"""
    work = [(row, seed, commands_of(row, args, seed)) for seed in args.seeds for row in rows]
    verbose = not args.quiet
    progress = Progress(sum(c.flops for _, _, commands in work for c in commands), verbose)
    for row, seed, commands in work:
        label = f"{row_name(row)}, seed {seed}"
        if verbose:
            print(f"# {label}: {arithmetic(row, args, commands)}", flush=True)
        for command in preparations(row, args) + commands:
            ran = not is_done(command)
            if ran:
                execute(command, label, args, progress)
            elif verbose:
                print(f"# done before: {command.title} ({command.marker})")
            progress.finished(command, ran)
    print(f"done: {len(work)} runs below {args.out}, {duration(time.time() - progress.start)}")


def setting(text):
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError("wanted FLAG=VALUE")
    return name, value


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("experiment", nargs="?", choices=EXPERIMENTS, metavar="EXPERIMENT", help=" ".join(EXPERIMENTS))
    p.add_argument("words", nargs="*", metavar="WORD", help="data sets, sizes, encodings (figure5: lengths) [all]")
    p.add_argument("--rows", action="store_true", help="print the command of every row (of the experiment, if one is given)")
    p.add_argument("--dry_run", action="store_true", help="print the commands and their arithmetic")
    p.add_argument("--gpus", type=int, default=1, help="train with mpirun on so many [1]")
    p.add_argument("--B", type=int, default=0, help="sequences in a micro-batch [64, 32, 16, 32 of 1,024 tokens for tiny, small, medium, base]")
    p.add_argument("--seeds", default="", help="joined by commas [42; small: 42,43,44; quick: 42,43]")
    p.add_argument("--out", default="run", help="directory of the runs [run]")
    p.add_argument("--trainer", default="", help="[./train_gpt2cu; small and quick: ./train_gpt2; BERT: ./train_bertcu]")
    p.add_argument("--tokenizer", default="", help="vocabulary to keep with the checkpoints, so that they take and print text")
    p.add_argument("--tokens_per_s", type=float, default=0, help="of one GPU, as you measured it: for the hours shown")
    p.add_argument("--tflops", type=float, default=200, help="assumed where --tokens_per_s is not given [200]")
    p.add_argument("--set", type=setting, action="append", default=[], metavar="FLAG=VALUE", help="another value for a flag of the trainer")
    p.add_argument("--python", default=shlex.quote(sys.executable), help="for data/*.py, with data/requirements.txt [this one]")
    p.add_argument("--quiet", action="store_true", help="one line of progress over all rows instead of the trainer's output")
    args = p.parse_intermixed_args(argv)
    if not args.experiment and not args.rows:
        p.error("which experiment? " + " ".join(EXPERIMENTS))
    return args


def check_arguments(args):
    args.set = dict(args.set)
    known = {"train_files", "val_files", "model", "T", "total_batch", "steps", "eval_lengths", "eval_tokens", "tokens", "text",
             "pairs", *MLDR, *("pairs." + k for k in ("T", "total_batch", "steps", "tau", "pooling", *RECIPE)), *RECIPE}
    unknown = set(args.set) - known
    if unknown:
        raise BadInput(f"--set {sorted(unknown)[0]}: no such setting; known are {', '.join(sorted(known))}")
    small = SMALL.get(args.experiment)
    args.trainer = args.trainer or ("./train_gpt2" if small else "./train_bertcu" if args.experiment in BERT else "./train_gpt2cu")
    try:
        args.seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else list(small.seeds) if small else [42]
    except ValueError:
        raise BadInput(f"--seeds {args.seeds}: wanted numbers joined by commas")
    if args.gpus < 1 or args.B < 0 or args.tflops <= 0:
        raise BadInput("--gpus, --B and --tflops: wanted positive numbers")
    if not args.dry_run and args.out:
        args.out = os.path.abspath(args.out)


def main(argv):
    def terminate(*_):
        raise Terminated
    signal.signal(signal.SIGTERM, terminate)
    args = parse(argv)
    try:
        check_arguments(args)
        if args.rows:
            for experiment in [args.experiment] if args.experiment else EXPERIMENTS:
                for row in rows_of(experiment):
                    print(f"scripts/paper.py {row_name(row)}")
            return 0
        rows, unknown = select(rows_of(args.experiment), args.words)
        if unknown or not rows:
            every = rows_of(args.experiment)
            known = [", ".join(dict.fromkeys(str(getattr(r, f)) for r in every)) for f in ("data", "model", "pos")]
            raise BadInput(f"{args.experiment} {' '.join(unknown or args.words)}: no such row; it has data {known[0]}; sizes {known[1]}; "
                           f"encodings {known[2]}")
        (show if args.dry_run else run_all)(rows, args)
        return 0
    except BadInput as e:
        print(f"paper.py: {e}", file=sys.stderr)
        return 2
    except Stopped as e:
        return e.args[0]
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:                     # of `| head`
        sys.stdout = open(os.devnull, "w")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
