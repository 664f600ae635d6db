#!/usr/bin/env python3
"""paper.py -- every table and figure of the paper, as commands of the trainers, run one after another.

    scripts/paper.py table1 fineweb-edu medium cable        one row: its data if missing, training, evaluation
    scripts/paper.py table1 --dry_run                       all rows of a table: the commands, and what they cost
    scripts/paper.py --rows                                 the command of every row; with --as run, the code's
    scripts/report.py run -o report                         the tables, with the paper's numbers beside ours

docs/paper.md says what each experiment is, and where the authors' code (--as run) differs from what the papers print
(--as printed, the default). small and quick make the same comparison on two CPU cores, with WikiText-2 as bytes: in a
night, and in under 15 minutes.

Words after the experiment select rows by data set, size, encoding, trained length and tokens per step; without a word
of a kind, all of that kind are selected that the papers have. Rows that the papers lack (t5 with logarithmic buckets,
kerple_power, most encodings of BERT, BERT's other number of tokens, any other encoding of the trainer's) have to be
named. After an interruption run the same command again: it skips finished parts, continues training from the newest
checkpoint, and lets rows that have the same model (table1, long, bias; table2, bert_curves; arxiv_figure3, 5, 6, sweep)
share its run. --set FLAG=VALUE replaces a flag of the trainer, --set pairs.FLAG=VALUE one of the fine-tuning.

--dry_run prints steps, tokens, FLOPs and hours of each row. FLOPs per token are 6 (12 L C^2 + V C) + 6 L C T, forward
and backward, causal; for BERT, whose head sees masked rows only, 6 (12 L C^2 + 0.15 V C) + 12 L C T. Fine-tuning counts
every text as 512 tokens and two forward passes, retrieval 200,000 documents of the average length whose tokens all see
T keys: upper bounds. Hours are those of ONE GPU that sustains 200 TFLOP/s, which is an assumption, not a measurement:
change it with --tflops, or give your own measurement with --tokens_per_s.
"""
import argparse
import collections
import functools
import os
import re
import shlex
import sys

import console
import report
import runqueue
from runqueue import BadInput, Command, Job, arguments

Size = collections.namedtuple("Size", "L NH C B")           # B: sequences of 1,024 tokens per micro-batch
SIZES = {"tiny": Size(6, 8, 512, 64), "small": Size(12, 12, 768, 32), "medium": Size(24, 16, 1024, 16),
         "base": Size(12, 12, 768, 32)}

# name: as in paper_tables.csv; prepare: the command that makes the files; train, val, test: globs; test_tokens: number
# of tokens evaluated; vocab: padded size of the vocabulary
Data = collections.namedtuple("Data", "name prepare train val test test_tokens vocab")


def shards(name, script, directory, prefix, test_tokens, test="test"):
    """the Data of numbered shards that a script of data/ writes"""
    at = lambda split: f"data/{directory}/{prefix}_{split}_*.bin"
    prepare = f"data/{script} --out data/{directory}"
    return Data(name, prepare, at("train"), at("val"), at(test), test_tokens, 50304)


DATA = {
    "fineweb-edu": shards("fineweb-edu-10B", "fineweb_edu.py", "edu_fineweb10B", "edu_fineweb", 100_000_000,
                          "val"),
    "wikitext-103": shards("wikitext-103", "wikitext.py --size 103 --raw --join rows_apart", "wikitext103_raw",
                           "wikitext103_raw", 287_645),
    # only evaluated: FineWeb's validation shard, which the first of its files holds, WikiText-2, and word-level text
    "fineweb": shards("fineweb-10B", "fineweb_edu.py --dataset classic --files 1", "fineweb10B", "fineweb",
                      100_000_000, "val"),
    "fineweb-1B": shards("fineweb-1B", "fineweb_edu.py --dataset classic --sample 1BT", "fineweb1B", "fineweb",
                         100_000_000, "val"),
    "wikitext-2": shards("wikitext-2", "wikitext.py --size 2 --raw --join rows_apart", "wikitext2_raw",
                         "wikitext2_raw", 287_645),
    "wikitext-2-words": shards("wikitext-2, word-level", "wikitext.py --size 2", "wikitext2", "wikitext2", 295_878),
    "wikitext-103-words": shards("wikitext-103, word-level", "wikitext.py --size 103", "wikitext103", "wikitext103",
                                 290_000),
    "tinyshakespeare": Data("tinyshakespeare", "data/tinyshakespeare.py --out data/tinyshakespeare",
                            "data/tinyshakespeare/tiny_shakespeare_train.bin",
                            "data/tinyshakespeare/tiny_shakespeare_val.bin",
                            "data/tinyshakespeare/tiny_shakespeare_val.bin", 32_768, 50304),
    "fineweb-edu-bert": shards("fineweb-edu-10B + ms-marco", "fineweb_edu.py --encoding bert", "edu_fineweb10B_bert",
                               "edu_fineweb", 0, "val")._replace(vocab=30592),
    "wikitext-2-bytes": Data("wikitext-2-bytes", "data/wikitext.py --size 2 --bytes --out data/wikitext2_bytes",
                             *(f"data/wikitext2_bytes/wikitext2_bytes_{s}.txt" for s in ("train", "val", "test")),
                             0, 256),
}
HELLASWAG = ("data/hellaswag.py --out data/hellaswag", "data/hellaswag/hellaswag_val.bin")
# the second and third part of BERT: groups of texts for fine-tuning, and a corpus that is searched as a whole. Both
# hold 1,000 groups out; the authors' code draws them with seed 12
PAIRS = {"printed": ("data/msmarco.py --out data/msmarco", "data/msmarco/msmarco_train_*.bin"),
         "run": ("data/msmarco.py --val_triplets 1000 --seed 12 --cache data/msmarco/source --out data/msmarco_seed12",
                 "data/msmarco_seed12/msmarco_train_*.bin")}
MLDR = {"queries": "data/mldr_en/mldr_test_queries.bin", "corpus": "data/mldr_en/mldr_corpus_*.bin",
        "qrels": "data/mldr_en/mldr_test_qrels.tsv"}
MLDR_PREPARE, MLDR_DOCUMENTS, MLDR_TOKENS = "data/mldr.py --out data/mldr_en", 200_000, 4700
TRIPLETS, TEXTS = 1_250_000, 3                              # groups per epoch; texts per group
GROUPS = {"printed": 128, "run": 512}                       # groups per update
# Tokens per step. On WikiText-103 the code and section 5.1 of the arXiv version take 128 sequences of 1,024, while the
# text of both papers has one number for all data
BATCH, BATCH_WIKITEXT = 524288, 131072
BATCH_BERT = {"printed": 65536, "run": 524288}              # tokens per step; the other one is a row to be named
MASKED = 0.15                                               # share of BERT's tokens that are masked
PRINTED = {("fineweb-edu-bert", "base"): 14000,
           ("fineweb-edu", "tiny"): 19073, ("fineweb-edu", "small"): 19073, ("fineweb-edu", "medium"): 19073,
           ("wikitext-103", "tiny"): 9000, ("wikitext-103", "small"): 5000, ("wikitext-103", "medium"): 3000}
STEPS = {"printed": PRINTED, "run": {**PRINTED, ("wikitext-103", "tiny"): 9150, ("wikitext-103", "small"): 4575,
                                     ("wikitext-103", "medium"): 2745}}
RECIPE = {"lr": "6e-4", "warmup": "750", "final_lr": "0.1", "weight_decay": "0.1", "clip": "1", "schedule": "cosine"}
COUNTS = {"T": 1, "total_batch": 1, "steps": 0, "eval_tokens": 0, "tokens": 0, "bias_tokens": 1}    # with their least
ADAM = {"weight_decay": "0", "beta1": "0.9", "beta2": "0.999"}
RECIPE_BERT = dict(RECIPE, lr="1e-4", **ADAM)
RECIPE_PAIRS = dict(RECIPE, lr="2e-5", **ADAM)
LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)
ARXIV_LENGTHS = (*LENGTHS[:-1], 16384)  # of the arXiv version's figures
LONG = 131072
RETRIEVAL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SLIDING_TOKENS = 1 << 20                # a sliding window costs T / stride times as much per token
WINDOWS_AS_RUN = 1000                   # the most that the authors' code evaluates at each length

# what the papers call t5 and alibi, in their text and in the authors' code
NAMES = {"printed": {"t5": "t5_clip"},
         "run": {"t5": "t5_clip:K=256,scale=C,layers=own", "alibi": "alibi:slopes=geometric"}}
BEYOND = ("t5", "kerple_power")         # encodings that the papers' perplexity tables lack
EVERY = ("cable", "cable_nw", "kcable", "kcable_nw", "cable_v1", "kcable_v1", "alibi", "fire", "t5_clip", "t5",
         "kerple", "kerple_power", "rope", "sinusoidal", "none")

BIAS_TEXT, BIAS_IDS = "The quick brown fox", "464 2068 7586 21831"         # the same in GPT-2's tokens

# The comparison on two CPU cores has its own model, steps and lengths.
Small = collections.namedtuple("Small", "model T B steps lr eval_tokens lengths encodings seeds")
SMALL = {
    "quick": Small("2,4,64", 128, 16, 500, "2e-3", 131072, (64, 128, 256, 512, 1024, 2048),
                   ("cable", "cable_nw", "alibi", "fire", "t5", "kerple", "rope", "learned", "sinusoidal"),
                   (42, 43)),
    "small": Small("4,4,128", 256, 16, 4000, "1e-3", 262144, (128, 256, 512, 1024, 2048, 4096),
                   ("cable", "cable_nw", "kcable", "alibi", "fire", "t5", "kerple", "rope", "learned", "sinusoidal"),
                   (42, 43, 44)),
}


# ----------------------------------------------------------------------------------------------------------
# rows and their commands

# A model to train. T: length to train at; batch: tokens per step, 0 for the data's; steps: 0 for the paper's;
# evaluations: data sets, "mldr", "hellaswag", "generate" or "bias"; named: fields whose value a word must name to
# select the row
Row = collections.namedtuple("Row", "experiment data model pos T evaluations lengths batch steps named",
                             defaults=(LENGTHS, 0, 0, ()))


def paper_rows(table, how):
    """{(data, model): [encoding]} of a table in paper_tables.csv, in the paper's order"""
    names = {d.name: key for key, d in DATA.items()}
    rows = {}
    for r in report.paper_rows():
        if r["table"] == table:
            pos = NAMES[how].get(r["encoding"], r["encoding"])
            rows.setdefault((names[r["trained_on"]], r["model"].split(":")[1]), {})[pos] = True
    return {key: list(encodings) for key, encodings in rows.items()}


def bert_rows(experiment, how):
    """the paper's encodings and all the rest, with both numbers of tokens per step"""
    (data, model), encodings = next(iter(paper_rows("2", how).items()))
    beyond = [pos for pos in every_encoding(how) if pos not in encodings]
    if how == "run":
        beyond.remove("fire")                           # the authors' code refuses it for BERT
    row = Row(experiment, data, model, "", 512, ("mldr",) * (experiment == "table2"), RETRIEVAL_LENGTHS)
    rows = []
    for batch in sorted(BATCH_BERT.values(), key=lambda n: n != BATCH_BERT[how]):
        named = ("batch",) * (batch != BATCH_BERT[how])
        rows += [row._replace(pos=pos, batch=batch, named=named) for pos in encodings]
        rows += [row._replace(pos=pos, batch=batch, named=(*named, "pos")) for pos in beyond]
    return rows


def every_encoding(how):
    return list(dict.fromkeys("t5" if pos == "t5" else NAMES[how].get({"t5_clip": "t5"}.get(pos, pos), pos)
                              for pos in EVERY))


def rows_of(experiment, how="printed"):
    """the rows of an experiment, in the paper's order"""
    def of(table, lengths, evaluations, beyond):
        return [Row(experiment, data, model, pos, 1024, evaluations or (data,), lengths,
                    named=("pos",) if pos in beyond else ())
                for (data, model), encodings in paper_rows(table, how).items() for pos in (*encodings, *beyond)]

    def trained_at(trained, data, model, encodings, **more):
        return [Row(experiment, data, model, pos, T, (data,), **more) for pos in encodings for T in trained]

    def arxiv_wikitext(trained, encodings):
        """section 5.1 of the arXiv version"""
        return trained_at(trained, "wikitext-103", "tiny", encodings, steps=5000, lengths=ARXIV_LENGTHS)

    as_named = lambda *encodings: [NAMES[how].get(pos, pos) for pos in encodings]
    if experiment in BERT:
        return bert_rows(experiment, how)
    if experiment.startswith("table"):
        return of(experiment[5:], LENGTHS, (), BEYOND)
    if experiment == "generalization":
        return of("arxiv-1", (1024,), ("hellaswag", "fineweb", "wikitext-2", "wikitext-2-words", "wikitext-103",
                                       "wikitext-103-words"), ("t5",))
    if experiment == "carope":
        return [row for (data, model), encodings in paper_rows("carope-1", how).items()
                for row in trained_at((512,), data, model, encodings, lengths=(512, 1024))]
    if experiment == "long":
        return trained_at((1024,), "fineweb-edu", "medium", as_named("cable", "alibi", "rope"), lengths=(LONG,))
    if experiment == "arxiv_figure1":
        return trained_at((512, 1024), "fineweb-edu", "medium", paper_rows("arxiv-1", how)["fineweb-edu", "medium"],
                          lengths=ARXIV_LENGTHS)
    if experiment == "arxiv_figure3":
        return arxiv_wikitext((512, 1024), paper_rows("arxiv-1", how)["fineweb-edu", "medium"])
    if experiment == "arxiv_figure5":
        return arxiv_wikitext((512, 1024, 2048, 4096, 8192), ("cable_v1", "sinusoidal"))
    if experiment == "arxiv_figure6":
        return arxiv_wikitext((512, 1024), ("cable_v1", "kcable_v1"))
    if experiment == "sweep":
        return arxiv_wikitext((512, 1024, 2048, 4096, 8192), every_encoding(how))
    if experiment == "figure3":
        encodings = ["none"] + paper_rows("1", how)["fineweb-edu", "medium"]
        return [Row(experiment, "tinyshakespeare", model, pos, T, ("generate",), (), steps=30)
                for model in ("medium", "small", "tiny") for pos in encodings for T in (512, 1024, 2048)]
    if experiment == "figure4":
        inside = ("kcable:weight=inside",) if how == "printed" else ()
        encodings = ("cable", "cable_nw", "kcable", *inside, "kcable_nw", "cable_v1", "kcable_v1")
        return trained_at((1024,), "wikitext-103", "tiny", encodings)
    if experiment == "bias":
        encodings = as_named("cable", "cable_v1", "alibi", "kerple", "t5", "fire", "kerple_power")
        return [Row(experiment, "fineweb-edu", "medium", pos, 1024, ("bias",), ()) for pos in encodings]
    s = SMALL[experiment]
    return trained_at((s.T,), "wikitext-2-bytes", s.model, s.encodings, steps=s.steps, lengths=s.lengths)


BERT = ("table2", "bert_curves")
AT_LENGTHS = ("arxiv_figure1", "arxiv_figure3", "arxiv_figure5", "arxiv_figure6", "sweep")
EXPERIMENTS = ("table1", "table2", "table3", "table4", "long", "generalization", "figure3", "figure4", *AT_LENGTHS,
               "bert_curves", "bias", "carope", "small", "quick")


def select(rows, words):
    """(the rows that the words select, the words that no row has). The name of an encoding without its options selects
    the one without options, or else all that have that name."""
    for field in ("data", "model", "pos", "T", "batch"):
        value = lambda r: str(getattr(r, field))
        base = lambda r: value(r).partition(":")[0]
        exact = {value(r) for r in rows}
        known = exact | {base(r) for r in rows}
        chosen = {w for w in words if w in known}
        words = [w for w in words if w not in known]
        rows = [r for r in rows if value(r) in chosen or base(r) in chosen - exact
                or (not chosen and field not in r.named)]
    return rows, words


def with_encodings(rows, args):
    """the rows, and for each word that no row has but that the trainer takes as an encoding, the rows with that one"""
    for word in select(rows, args.words)[1]:
        trainers = (args.trainer, "./train_bert" if args.experiment in BERT else "./train_gpt2")
        if any(runqueue.knows(trainer, word) for trainer in trainers):
            rows = rows + list(dict.fromkeys(r._replace(pos=word, named=(*r.named, "pos")) for r in rows
                                             if "pos" not in r.named))
    return rows


def shape(model):
    """(L, NH, C) of a named size, or of "L,NH,C" as the trainer takes it"""
    if model in SIZES:
        return SIZES[model][:3]
    try:
        L, NH, C = (int(x) for x in model.split(","))
        return L, NH, C
    except ValueError:
        raise BadInput(f"--set model: expected {', '.join(SIZES)} or L,NH,C, got model={model}")


def token_flops(model, T, head, causal=True):
    """FLOPs of a forward pass per token"""
    L, _, C = shape(model)
    return runqueue.forward_flops(L, C, T, head, causal)


def train_flops(row, flags):
    """FLOPs of training per token, forward and backward"""
    bert, vocab = row.experiment in BERT, DATA[row.data].vocab
    return 3 * token_flops(flags["model"], int(flags["T"]), MASKED * vocab if bert else vocab, not bert)


def micro_batch(row, args, flags, gpus):
    """Sequences per micro-batch. Without --B it holds about the same number of tokens at every length. It must divide
    each GPU's share of a step."""
    total, T = int(flags["total_batch"]), int(flags["T"])
    small = SMALL.get(row.experiment)
    B = args.B or (small.B if small else max(1, SIZES[row.model].B * 1024 // T))
    share = total // (T * gpus)
    if share < 1 or total % (T * gpus) or (args.B and share % B):
        given = f"--gpus {gpus}" + (f" --B {B}" if args.B else "")
        raise BadInput(f"{given}: expected a divisor of a step, which is {total:,} tokens in sequences of {T}")
    return runqueue.largest_divisor(share, B)


def training(row, args, seed, out):
    """the command that trains the model of a row"""
    d = DATA[row.data]
    s = SMALL.get(row.experiment)
    flags = {"train_files": d.train, "val_files": d.val, "model": row.model, "pos": row.pos, "T": str(row.T)}
    if s:
        flags.update(total_batch=str(s.B * s.T), steps=str(s.steps), **dict(RECIPE, lr=s.lr, warmup=str(s.steps // 10)))
    else:
        few = row.data == "wikitext-103" and (args.how == "run" or row.experiment in AT_LENGTHS)
        batch = row.batch or (BATCH_WIKITEXT if few else BATCH)
        flags.update(total_batch=str(batch), steps=str(row.steps or STEPS[args.how][row.data, row.model]),
                     **(RECIPE_BERT if row.experiment in BERT else RECIPE))
        if args.how == "run":
            flags["warmup"] = "715"
    flags.update(padded(row, args))
    if row.evaluations == ("generate",):
        flags["warmup"] = "0"
    flags["seed"] = str(seed)
    flags.update({k: v for k, v in args.set.items() if k in flags})
    flags["B"] = str(micro_batch(row, args, flags, args.gpus))
    flags["val_every"] = "0" if s or row.experiment == "figure3" else "250"
    if row.experiment not in BERT:
        flags["sample_every"] = "0"
    flops = int(flags["steps"]) * int(flags["total_batch"]) * train_flops(row, flags)
    return Command("train", args.trainer, saved(flags, args, out), out, os.path.join(out, "train.done"), flops, True)


def padded(row, args):
    """the authors' softmax also sees the rows of the vocabulary that no token has"""
    wanted = args.how == "run" and row.experiment not in (*SMALL, *BERT)
    return {"vocab_softmax": "padded"} if wanted else {}


def saved(flags, args, out):
    """the flags of a training run that can be interrupted and resumed"""
    more = {"tokenizer": args.tokenizer} if args.tokenizer else {}
    every = str(min(1000, int(flags["steps"])))
    return {**flags, "checkpoint_every": every, "keep": "2", "resume": "1", "out": out, **more}


def fine_tuning(row, args, seed, before, out):
    """the command that fine-tunes the model of the run `before` on groups of texts"""
    T, groups = args.set.get("T", str(row.T)), GROUPS[args.how]
    flags = {"load": before, "pairs": args.set.get("pairs", PAIRS[args.how][1]), "pos": row.pos, "T": T,
             "total_batch": str(groups * int(T)), "steps": str(TRIPLETS // groups), **RECIPE_PAIRS,
             "warmup": str(TRIPLETS // groups // 20), "tau": "0.05", "pooling": "mean", "seed": str(seed)}
    if args.how == "run":
        flags["lr"] = "8e-5"
    flags.update({k: args.set["pairs." + k] for k in flags if "pairs." + k in args.set})
    flags["B"] = str(micro_batch(row, args, flags, 1))
    tokens = int(flags["steps"]) * int(flags["total_batch"]) * TEXTS
    # two forward passes, and one backward pass that costs as much as two
    flops = 4 * tokens * token_flops(args.set.get("model", row.model), int(flags["T"]), 0, False)
    return Command("fine-tune", args.trainer, saved(flags, args, out), out, os.path.join(out, "train.done"), flops)


def retrieval(row, args, run, out, lengths):
    flags = {"load": run, **{k: args.set.get(k, v) for k, v in MLDR.items()},
             "eval_lengths": ",".join(map(str, lengths)), "out": out}
    program = f"{args.python} scripts/retrieve.py --trainer {shlex.quote(args.evaluator)}"
    model = args.set.get("model", row.model)
    flops = sum(MLDR_DOCUMENTS * min(T, MLDR_TOKENS) * token_flops(model, T, 0, False) for T in lengths)
    return Command("search mldr", program, flags, out, os.path.join(out, "eval.done"), flops)


def bias_commands(row, args, run, out):
    """The commands that write bias matrices as JSON and draw them: for the first, middle and last layer the mean over
    heads for 512 tokens of the validation split, and for four tokens a grid of all layers and heads."""
    L = shape(args.set.get("model", row.model))[0]
    text = BIAS_TEXT if DATA[row.data].vocab == 256 else BIAS_IDS
    T = args.set.get("bias_tokens", "512")
    wanted = [(str(layer), "mean", "") for layer in sorted({0, L // 2, L - 1})]
    commands = []
    for layer, head, shown in [*wanted, ("all", "all", args.set.get("text", text))]:
        name = f"bias_{layer}_{head}"
        flags = {"load": run, "dump_bias": f"{layer},{head},{shown}", "out": out}
        if not shown:
            flags.update(val_files=args.set.get("val_files", DATA[row.data].val), T=T)
        if args.tokenizer:
            flags["tokenizer"] = args.tokenizer
        matrix = os.path.join(out, name + ".json")
        what = "grid of all heads" if layer == "all" else f"mean bias of layer {layer}"
        commands.append(Command(what, args.evaluator, flags, out, os.path.join(out, name + ".done"), 0))
        draw = f"{shlex.quote(sys.executable)} scripts/plot.py bias {shlex.quote(matrix)}"
        draw += " --normalize" * (head == "mean")
        commands.append(Command("image", draw, {}, out, matrix[:-len(".json")] + ".png", 0))
    return commands


def evaluated_lengths(row, args):
    if "eval_lengths" in args.set:
        lengths = [int(T) for T in args.set["eval_lengths"].split(",")]
    else:
        shorter = args.how == "run" and (row.model, row.pos) == ("medium", "cable")
        lengths = [14000 if T == 15360 and shorter else T for T in row.lengths]
    if row.pos == "learned":                # has no positions beyond the length it was trained at
        lengths = [T for T in lengths if T <= int(args.set.get("T", row.T))]
    return lengths


def perplexity(row, args, what, run):
    """the commands that evaluate the perplexity on a data set; as run, each length has its own number of tokens"""
    d, s, lengths = DATA[what], SMALL.get(row.experiment), evaluated_lengths(row, args)
    as_run = args.how == "run" and not s
    files = args.set.get("val_files", d.val if as_run else d.test)
    model = args.set.get("model", row.model)

    def command(title, name, lengths, more):
        out = os.path.join(run, "eval", name)
        flags = {"load": run, "val_files": files, "eval_lengths": ",".join(map(str, lengths)), **padded(row, args),
                 **more, "out": out}
        tokens = int(flags.get("eval_tokens", 0)) or d.test_tokens
        cost = lambda T: token_flops(model, T, d.vocab) * (T / int(flags.get("stride", T)))
        flops = sum(tokens * cost(T) for T in lengths)
        return Command(title, args.evaluator, flags, out, os.path.join(out, "eval.done"), flops, True)

    given = {"eval_tokens": args.set["eval_tokens"]} if "eval_tokens" in args.set else {}
    if s:
        return [command(f"evaluate on {what}", what, lengths,
                        {"eval_tokens": str(s.eval_tokens), **given, "curve": None})]
    if row.experiment == "long":            # beside the evaluation of table1, of the same run
        what += ".long"
    stride = str(max(1, min(lengths) // 2))
    sliding = command(f"sliding windows on {what}", f"{what}.sliding", lengths,
                      {"eval_tokens": str(SLIDING_TOKENS), **given, "stride": stride})
    if as_run:
        return [command(f"evaluate on {what} at {T}", f"{what}.{T}", [T],
                        {"eval_tokens": str(WINDOWS_AS_RUN * T), **given, "curve": None}) for T in lengths] + [sliding]
    return [command(f"evaluate on {what}", what, lengths, {**given, "curve": None}), sliding]


def evaluation(row, args, what, run):
    """the commands that evaluate the model of a run; what: a data set, or mldr, hellaswag, generate or bias"""
    out = os.path.join(run, "eval", what)
    marker = os.path.join(out, "eval.done")
    if what == "hellaswag":
        flags = {"load": run, "hellaswag": HELLASWAG[1], **padded(row, args), "out": out}
        return [Command("hellaswag", args.evaluator, flags, out, marker, 0, True)]
    if what == "generate":
        T = int(args.set.get("T", row.T))
        flags = {"load": run, "generate": "", "tokens": args.set.get("tokens", str(T - 24)), "temperature": "0"}
        return [Command("generate", args.evaluator, flags, out, marker, 0)]
    if what == "bias":
        return bias_commands(row, args, run, out)
    if what == "mldr":
        return [retrieval(row, args, run, out, evaluated_lengths(row, args))]
    return perplexity(row, args, what, run)


def run_directory(row, args, seed, data):
    top = ("figure3",) if row.experiment == "figure3" else (data,)      # a model of 30 steps is not worth sharing
    if args.how == "run":
        top = ("as_run", *top)
    model, T = args.set.get("model", row.model), int(args.set.get("T", row.T))
    pos = row.pos.replace(":", "-").replace(",", "-")
    if T != (512 if row.experiment in BERT else 1024):
        pos += f"-T{T}"
    if row.steps and row.experiment not in (*SMALL, "figure3"):
        pos += f"-{row.steps}"
    if row.batch and row.batch != BATCH_BERT["printed"]:
        pos += f"-{row.batch}"
    return os.path.join(args.out, *top, model.replace(",", "x"), pos, f"seed_{seed}")


def preparations(row, args):
    """the commands that make the data; files given by --set are the caller's responsibility"""
    wanted = []
    if "train_files" not in args.set:
        wanted.append((DATA[row.data].prepare, DATA[row.data].train))
    if row.experiment in BERT and "pairs" not in args.set:
        wanted.append(PAIRS[args.how])
    for what in row.evaluations:
        if what == "hellaswag":
            wanted.append(HELLASWAG)
        elif what == "mldr" and "corpus" not in args.set:
            wanted.append((MLDR_PREPARE, MLDR["corpus"]))
        elif what in DATA and "val_files" not in args.set:
            wanted.append((DATA[what].prepare, DATA[what].test))
    found = {script: files for script, files in wanted if script}
    return [Command("data", f"{args.python} {script}", {}, "", files, 0) for script, files in found.items()]


def commands_of(row, args, seed):
    run = run_directory(row, args, seed, row.data)
    commands = [training(row, args, seed, run)]
    if row.experiment in BERT:
        before, run = run, run_directory(row, args, seed, "ms-marco")
        commands.append(fine_tuning(row, args, seed, before, run))
    return commands + [c for what in row.evaluations for c in evaluation(row, args, what, run)]


# ----------------------------------------------------------------------------------------------------------
# what a dry run shows

def short(n):
    return f"{n / 1e9:.2f}G" if n >= 1e7 else f"{n:,}"


def arithmetic(row, args, commands):
    """one line: steps, tokens, FLOPs and, by a stated assumption, GPU hours"""
    flags = commands[0].flags
    steps, batch = int(flags["steps"]), int(flags["total_batch"])
    gflop = train_flops(row, flags) / 1e9
    line = f"{steps:,} steps x {batch:,} = {short(steps * batch)} tokens; {gflop:.3g} GFLOP per token"
    if row.experiment in SMALL:
        return line
    if args.tokens_per_s:
        hours = steps * batch / args.tokens_per_s / 3600
        return f"{line}: {hours:.1f} GPU hours of training at the given {args.tokens_per_s:,.0f} tokens/s per GPU"
    hours = lambda part: f"{sum(c.flops for c in part) / args.tflops / 3.6e15:.1f}"
    assumed = f"if a GPU sustains {args.tflops:g} TFLOP/s (assumed, not measured)"
    if row.experiment in BERT:
        pairs = commands[1].flags
        updates, groups = int(pairs["steps"]), int(pairs["total_batch"]) // int(pairs["T"])
        search = f", {hours(commands[2:])} of retrieval" if row.evaluations else ""
        return (f"{line}; then {updates:,} steps x {groups:,} = {updates * groups:,} triplets: {hours(commands[:1])} "
                f"GPU hours of training and at most {hours(commands[1:2])} of fine-tuning{search}, {assumed}")
    return f"{line}: {hours(commands[:1])} GPU hours of training, {hours(commands[1:])} of evaluation, {assumed}"


def row_name(row):
    T = [str(row.T)] if row.experiment in ("figure3", *AT_LENGTHS) else []
    batch = [str(row.batch)] if row.batch else []
    return " ".join([row.experiment, row.data, row.model, row.pos, *T, *batch])


def show(rows, args):
    for row in rows:
        for seed in args.seeds:
            commands = commands_of(row, args, seed)
            print(f"# {row_name(row)}, seed {seed}: {arithmetic(row, args, commands)}")
            for c in preparations(row, args) + commands:
                print(console.command_line(arguments(c, args.gpus)))


# ----------------------------------------------------------------------------------------------------------

def run_all(rows, args):
    """Runs each row with each seed; returns the exit code. The loop over seeds is the outer one, so that an early end
    leaves comparisons of all encodings."""
    if any("bias" in row.evaluations for row in rows):
        console.need("matplotlib")                          # rather than after the training
    os.chdir(runqueue.ROOT)                                 # where data/ and the trainers are
    slots = runqueue.slots(args.jobs, args.trainer, args.gpus)
    jobs = []
    for row, seed in ((row, seed) for seed in args.seeds for row in rows):
        commands = commands_of(row, args, seed)
        jobs.append(Job(f"{row_name(row)}, seed {seed}", arithmetic(row, args, commands),
                        preparations(row, args) + commands))
    return runqueue.Queue("paper.py", jobs, slots, not args.quiet, args.gpus).run()


def setting(text):
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected FLAG=VALUE, got {text}")
    return name, value


def parse(argv):
    above_0 = functools.partial(console.real, above=0)
    p = console.parser(__doc__)
    p.add_argument("experiment", nargs="?", choices=EXPERIMENTS, metavar="EXPERIMENT", help=" ".join(EXPERIMENTS))
    p.add_argument("words", nargs="*", metavar="WORD", help="data sets, sizes, encodings, trained lengths, tokens per "
                   "step [all that the papers have]")
    p.add_argument("--as", dest="how", choices=("printed", "run"), default="printed",
                   help="the recipe that the papers print, or the one that the authors' code runs [printed]")
    p.add_argument("--fineweb", choices=("1BT", "10BT"), default="10BT",
                   help="sample of classic FineWeb that generalization evaluates on [10BT]")
    p.add_argument("--rows", action="store_true",
                   help="print the command of every row (of the experiment, if one is given)")
    p.add_argument("--dry_run", action="store_true", help="print the commands and their arithmetic; run nothing")
    p.add_argument("--gpus", type=console.processes, default=1,
                   help="number of GPUs to train and evaluate on, with mpirun [1]")
    p.add_argument("--jobs", type=functools.partial(console.natural, most=1024), default=1,
                   help="rows at a time, each on its share of the cores, or on its own --gpus GPUs; 0 = as many as "
                   "there are GPUs for [1]")
    p.add_argument("--B", type=console.natural, default=0, help="sequences per micro-batch [tiny 64, small 32, medium "
                   "16, base 32, of 1,024 tokens]")
    p.add_argument("--seeds", type=console.naturals, default=[],
                   help="seeds separated by commas [42; small: 42,43,44; quick: 42,43]")
    p.add_argument("--out", default="run", help="directory of the runs [run]")
    p.add_argument("--trainer", default="",
                   help="program that trains [./train_gpt2cu; small and quick: ./train_gpt2; BERT: ./train_bertcu]")
    p.add_argument("--evaluator", default="", help="program that evaluates, such as a build with PRECISION=FP32 "
                   "[--trainer]")
    p.add_argument("--tokenizer", default="",
                   help="vocabulary to keep with the checkpoints, so that the models print text")
    p.add_argument("--tokens_per_s", type=above_0, default=0,
                   help="speed of one GPU as you measured it, for the hours shown")
    p.add_argument("--tflops", type=above_0, default=200, help="TFLOP/s assumed without --tokens_per_s [200]")
    p.add_argument("--set", type=setting, action="append", default=[], metavar="FLAG=VALUE",
                   help="another value for a flag of the trainer")
    p.add_argument("--python", default=shlex.quote(sys.executable),
                   help="Python for data/*.py, which needs data/requirements.txt [the one that runs this]")
    p.add_argument("--quiet", action="store_true",
                   help="show one line of progress over all rows instead of the trainer's output")
    args = p.parse_intermixed_args(argv)
    if not args.experiment and not args.rows:
        p.error("expected an experiment: " + " ".join(EXPERIMENTS))
    return args


def from_root(path):
    """a path that the caller gave, as it is called in the repository, where the commands run"""
    as_it_is = not path or os.path.isabs(path) or os.path.samefile(os.curdir, runqueue.ROOT)
    return path if as_it_is else os.path.relpath(path, runqueue.ROOT)


def check_arguments(args):
    args.set = dict(args.set)
    files = {"train_files", "val_files", "pairs", *MLDR}
    known = {*files, "model", "T", "total_batch", "steps", "eval_lengths", "eval_tokens", "tokens", "text",
             "bias_tokens", "beta1", "beta2", *RECIPE,
             *("pairs." + k for k in ("T", "total_batch", "steps", "tau", "pooling", *RECIPE_BERT))}
    unknown = set(args.set) - known
    if unknown:
        raise BadInput(f"--set: expected one of {', '.join(sorted(known))}, got {sorted(unknown)[0]}")
    for flag, value in args.set.items():
        least = COUNTS.get(flag.replace("pairs.", ""))
        if least is not None and not (re.fullmatch(r"\d{1,18}", value) and int(value) >= least):
            raise BadInput(f"--set {flag}: expected a number of at least {least}, got {value}")
        if flag == "eval_lengths" and not re.fullmatch(r"0*[1-9]\d{0,17}(,0*[1-9]\d{0,17})*", value):
            raise BadInput(f"--set {flag}: expected numbers separated by commas, got {value}")
        if flag in files:
            args.set[flag] = from_root(value)
    args.tokenizer = from_root(args.tokenizer)
    default = {**dict.fromkeys(BERT, "./train_bertcu"), **dict.fromkeys(SMALL, "./train_gpt2")}
    args.trainer = runqueue.program(args.trainer) or default.get(args.experiment, "./train_gpt2cu")
    args.evaluator = runqueue.program(args.evaluator) or args.trainer
    args.seeds = args.seeds or (list(SMALL[args.experiment].seeds) if args.experiment in SMALL else [42])
    if not args.dry_run:
        args.out = os.path.abspath(args.out)


def main(argv):
    args = parse(argv)
    check_arguments(args)
    if args.rows:
        for experiment in [args.experiment] if args.experiment else EXPERIMENTS:
            for row in rows_of(experiment, args.how):
                print(f"scripts/paper.py {row_name(row)}" + " --as run" * (args.how == "run"))
        return 0
    rows, unknown = select(with_encodings(rows_of(args.experiment, args.how), args), args.words)
    if unknown or not rows:
        every = rows_of(args.experiment, args.how)
        known = [", ".join(dict.fromkeys(str(getattr(r, f)) for r in every)) for f in ("data", "model", "pos")]
        raise BadInput(f"{args.experiment} {' '.join(unknown or args.words)}: no such row; {args.experiment} has "
                       f"data {known[0]}; sizes {known[1]}; encodings {known[2]}")
    if args.fineweb == "1BT":
        smaller = lambda r: tuple("fineweb-1B" if e == "fineweb" else e for e in r.evaluations)
        rows = [r._replace(evaluations=smaller(r)) for r in rows]
    if not args.dry_run:
        return run_all(rows, args)
    show(rows, args)
    return 0


if __name__ == "__main__":
    console.run(main)
