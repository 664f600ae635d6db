"""test_scripts.py -- paper.py and report.py with tiny real training runs."""
import argparse
import collections
import contextlib
import fnmatch
import glob
import importlib
import io
import json
import lzma
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import unittest
from random import Random
from unittest import mock

from folder import (BERT_TRAINER, ENVIRONMENT, HAS_BERT, HAS_TRAINER, ROOT, SCRIPTS, TRAINER, Folder, called,
                    read_bytes)
import console
import demo
import paper
import report
import runqueue
import verdict


def run(*command, env=None, cwd=ROOT, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**ENVIRONMENT, **(env or {})},
                          timeout=300, **kwargs)


def script(name, *args, **kwargs):
    return run(sys.executable, os.path.join(SCRIPTS, name), *args, **kwargs)


def dry(*args):
    """(headings, commands as lists of words) of a dry run"""
    code, out, err = called(paper.main, *args, "--dry_run")
    assert code == 0, err
    lines = out.splitlines()
    headings = [line for line in lines if line.startswith("#")]
    return headings, [shlex.split(line) for line in lines if not line.startswith("#")]


SWITCHES = ("--curve", "--raw", "--bytes")


def flags_of(command):
    """{flag: value} of a trainer's command; a switch has None"""
    words = iter(command[next(i for i, w in enumerate(command) if w.startswith("./train")) + 1:])
    return {name: None if name in SWITCHES else next(words) for name in words}


def words_of(flags):
    return [w for name, value in flags.items() for w in (name, value) if w is not None]


class TestQueue(Folder):
    def test_another_file_is_another_evaluation(self):
        flags = {"load": "run", "val_files": "a.bin", "eval_lengths": "512", "out": "o"}
        done = runqueue.Command("evaluate", "./train_gpt2", flags, self.folder, self.path("eval.done"), 0)
        self.write("log.jsonl", '{"kind":"extrapolation","pos":"x","T":512,"stride":512,"ppl":2}\n')
        runqueue.mark_done(done)
        found = lambda **changed: runqueue.is_done(done._replace(flags={**flags, **changed}))
        self.assertEqual([found(), found(load="moved"), found(val_files="b.bin"), found(eval_lengths="1024")],
                         [True, True, False, False])
        # a training may be validated on another file
        settings = [runqueue.settings_of(done._replace(flags={**flags, "resume": "1", "val_files": name}))
                    for name in ("a.bin", "b.bin")]
        self.assertEqual(settings[0], settings[1])


class TestDemo(Folder):
    def test_the_table_fits_a_terminal(self):
        for kind, encodings in demo.EXPECTED.items():
            self.assertEqual({*demo.published(kind)}, {*encodings})
            log = lambda run, *_, **__: [{"T": T, "ppl": 20.38} for T in demo.LENGTHS
                                         if T <= 128 or not run.endswith("learned")]
            out = io.StringIO()
            with mock.patch.multiple(demo, read_log=log, weights_sha256=lambda _: 64 * "f"), \
                    contextlib.redirect_stdout(out):
                demo.table(kind, "run", demo.STEPS[kind])
            head, *rows = out.getvalue().splitlines()[1:2 + len(encodings)]
            self.assertEqual({len(line) for line in (head, *rows)}, {79})
            self.assertIn(f"weights: {', '.join(encodings)}: expected those of {demo.PUBLISHED[kind]}", out.getvalue())
            self.assertIn("\n" + head + "\n", read_bytes(os.path.join(ROOT, demo.PUBLISHED[kind])).decode())

    def test_help(self):
        for path in ("scripts/demo.py", "dev/lint.py"):
            done = run(sys.executable, path, "-h")
            self.assertEqual((done.returncode, f"{path} " in done.stdout), (0, True), path)


class TestCommands(Folder):
    def every_command(self, *more):
        """the commands of every row, also of those that have to be named"""
        for how in ("printed", "run"):
            for experiment in paper.EXPERIMENTS:
                rows = [r._replace(named=()) for r in paper.rows_of(experiment, how)]
                with mock.patch.object(paper, "rows_of", lambda *_: rows):
                    yield from dry(experiment, "--as", how, *more)[1]

    def test_rows_are_the_papers(self):
        numbers = report.paper_rows()
        tables = (("table1", "1"), ("table2", "2"), ("table3", "3"), ("table4", "4"), ("generalization", "arxiv-1"),
                  ("carope", "carope-1"))
        for experiment, table in tables:
            family = "bert:" if table == "2" else "gpt2:"
            called_t5 = lambda pos: pos.replace("t5_clip", "t5")
            expected = {(r["trained_on"], r["model"], r["encoding"]) for r in numbers if r["table"] == table}
            rows = [r for r in paper.rows_of(experiment) if not r.named]        # the rest are not in the paper
            found = {(paper.DATA[r.data].name, family + r.model, called_t5(r.pos)) for r in rows}
            self.assertEqual(found, expected)
            self.assertEqual(len(rows), len(expected))
            for r in rows:                                  # some evaluation gives each of the row's numbers
                row = (table, paper.DATA[r.data].name, family + r.model, called_t5(r.pos))
                evaluated = {paper.DATA[e].name if e in paper.DATA else report.NAMES.get(e, e) for e in r.evaluations}
                for n in numbers:
                    if (n["table"], n["trained_on"], n["model"], n["encoding"]) == row:
                        self.assertIn(n["evaluated_on"], evaluated)
                        self.assertLessEqual(set(n["numbers"]), set(r.lengths))
        for how in ("printed", "run"):
            lines = called(paper.main, "--rows", "--as", how)[1].splitlines()
            self.assertEqual(len(lines), sum(len(paper.rows_of(e, how)) for e in paper.EXPERIMENTS))
            self.assertEqual(len(set(lines)), len(lines))
            for line in lines:                              # each line selects exactly one row
                args = paper.parse(line.split()[1:])
                chosen, unknown = paper.select(paper.rows_of(args.experiment, args.how), args.words)
                self.assertEqual((len(chosen), unknown), (1, []), line)
            for line in lines[::37]:
                self.assertEqual(len(dry(*line.split()[1:], "--seeds", "42")[0]), 1, line)

    def trains(self, *args):
        return [flags_of(c) for c in dry(*args)[1] if "--train_files" in c]

    def test_as_printed_and_as_run(self):
        for how, warmup, steps, tokens, t5, alibi, softmax in (
                ("printed", "750", "9000", "524288", "t5_clip", "alibi", None),
                ("run", "715", "9150", "131072", "t5_clip:K=256,scale=C,layers=own", "alibi:slopes=geometric",
                 "padded")):
            trained = self.trains("table1", "tiny", "t5_clip", "alibi", "--as", how)
            self.assertEqual([f["--pos"] for f in trained], [alibi, t5])
            for f in trained:
                of = [f.get("--" + name) for name in ("warmup", "steps", "total_batch", "vocab_softmax")]
                self.assertEqual(of, [warmup, steps, tokens, softmax])
                self.assertEqual("/as_run/" in f["--out"], how == "run")
            names = [r.pos for r in paper.rows_of("figure4", how)]
            self.assertEqual(("kcable_v1" in names, "kcable" in names, "kcable:weight=inside" in names),
                             (True, True, how == "printed"))
            batch, groups, lr = ("65536", 128, "2e-5") if how == "printed" else ("524288", 512, "8e-5")
            train, tune = map(flags_of, [c for c in dry("bert_curves", "rope", "--as", how)[1]
                                         if c[0].startswith("./train")])
            self.assertEqual((train["--total_batch"], train["--beta2"], train["--weight_decay"]),
                             (batch, "0.999", "0"))
            self.assertEqual((tune["--total_batch"], tune["--lr"]), (str(groups * 512), lr))
        self.assertEqual([f["--pos"] for f in self.trains("table1", "tiny", "t5")], ["t5"])         # by name only
        rows = paper.rows_of("table2", "run")
        self.assertEqual(("fire" in {r.pos for r in rows}, {r.batch for r in rows}), (False, {65536, 524288}))
        every = {r.pos for r in paper.rows_of("table2")}
        self.assertTrue({"fire", "kcable", "kcable_v1", "t5", "t5_clip", "kerple", "kerple_power"} <= every)
        evaluations = [flags_of(c) for c in dry("table1", "medium", "cable", "--as", "run")[1] if "--eval_lengths" in c]
        lengths = [f["--eval_lengths"] for f in evaluations]
        *windows, together = lengths
        self.assertEqual((windows, together), (["512", "1024", "2048", "4096", "8192", "14000"], ",".join(windows)))
        self.assertEqual([f["--eval_tokens"] for f in evaluations[:-1]], [str(1000 * int(T)) for T in windows])
        self.assertEqual([("--curve" in f, f.get("--stride")) for f in evaluations],
                         6 * [(True, None)] + [(False, "256")])
        self.assertEqual(len({f["--out"] for f in evaluations}), 7)
        wikitext = [flags_of(c) for c in dry("table4", "medium", "rope", "--as", "run")[1] if "--eval_lengths" in c]
        self.assertIn("_val_", wikitext[0]["--val_files"])

    def test_the_held_out_triplets_are_never_trained_on(self):
        for how, seed in (("printed", None), ("run", "12")):
            commands = dry("table2", "cable", "--as", how)[1]
            prepare, = [c for c in commands if c[1] == "data/msmarco.py"]
            f = flags_of(["./train", *prepare[2:]])
            self.assertEqual((f.get("--seed"), f.get("--val_triplets", "1000")), (seed, "1000"))
            tune, = [flags_of(c) for c in commands if "--pairs" in c]
            self.assertEqual(tune["--pairs"], f["--out"] + "/msmarco_train_*.bin")      # the held out are msmarco_val_*
        self.assertNotEqual(paper.PAIRS["printed"][1], paper.PAIRS["run"][1])

    def test_every_evaluation_reads_the_data_that_its_name_says(self):
        for name, d in paper.DATA.items():
            f = flags_of(["./train", *shlex.split(d.prepare)[1:]])
            for files in (d.train, d.val, d.test):
                self.assertEqual(os.path.dirname(files), f["--out"], name)
            if "wikitext" in name and "bytes" not in name:      # word-level and raw are two texts
                self.assertEqual("--raw" in f, "words" not in name, name)
                self.assertEqual(f["--size"], re.search(r"\d+", name)[0])
                self.assertEqual(("raw" in f["--out"], "_test_" in d.test), ("words" not in name, True))
        tests = [d.test for d in paper.DATA.values()]
        self.assertEqual(sorted(t for t in set(tests) if tests.count(t) > 1), [])

    def test_what_stands_beside_the_tables(self):
        commands = [flags_of(c) for c in dry("table1", "medium", "cable")[1] if "--eval_lengths" in c]
        self.assertEqual([("--curve" in f, f.get("--stride")) for f in commands], [(True, None), (False, "256")])
        self.assertEqual([c.T for c in paper.rows_of("arxiv_figure5")], 2 * [512, 1024, 2048, 4096, 8192])
        swept = {r.pos.partition(":")[0] for r in paper.rows_of("sweep")}
        others = {"learned", "ssmax", "alibi_trained", "alibi_random", "cope", "bam", "cable_signed", "grape_q",
                  "grape_k", "grape_qk", "carope"}
        self.assertEqual(set(report.plot.STYLES) - swept, others)
        for experiment, data in (("arxiv_figure1", "fineweb-edu"), ("arxiv_figure3", "wikitext-103")):
            rows = paper.rows_of(experiment)
            self.assertEqual({(r.data, r.T) for r in rows}, {(data, 512), (data, 1024)})
        self.assertEqual([(r.pos, r.T) for r in paper.rows_of("arxiv_figure6")],
                         [(pos, T) for pos in ("cable_v1", "kcable_v1") for T in (512, 1024)])
        for experiment in ("arxiv_figure1", "arxiv_figure3", "arxiv_figure5", "arxiv_figure6", "sweep"):
            recipe = ("19073", "524288") if experiment == "arxiv_figure1" else ("5000", "131072")   # of section 5.1
            self.assertEqual({(f["--steps"], f["--total_batch"]) for f in self.trains(experiment)}, {recipe})
            whole = [flags_of(c) for c in dry(experiment)[1] if "--curve" in c]
            self.assertEqual({f["--eval_lengths"] for f in whole}, {"512,1024,2048,4096,8192,16384"})
        speed = paper.rows_of("figure3")
        self.assertEqual({r.T for r in speed}, {512, 1024, 2048})
        places = lambda experiment: {(f["--out"], f["--pos"], f["--T"]) for f in self.trains(experiment)}
        self.assertEqual(places("arxiv_figure3") | places("arxiv_figure6") <= places("sweep") | places("arxiv_figure5"),
                         True)                              # the same model is trained once
        outs = [f["--out"] for e in ("figure3", "figure4", "sweep") for f in self.trains(e)]
        self.assertEqual(len(set(outs)), len(outs))
        both = {e: [flags_of(c) for c in dry(e, "medium", "cable", "alibi", "rope")[1] if "--load" in c]
                for e in ("table1", "long")}
        loaded, written = ({e: {f[flag] for f in both[e]} for e in both} for flag in ("--load", "--out"))
        self.assertEqual((loaded["table1"], written["table1"] & written["long"]), (loaded["long"], set()))
        self.assertEqual([f["--eval_lengths"] for f in both["long"]], 6 * ["131072"])
        tested = [c[c.index("--out") + 1] for c in dry("generalization", "small", "rope")[1] if "--load" in c]
        self.assertEqual([os.path.basename(t) for t in tested if not t.endswith(".sliding")],
                         ["hellaswag", "fineweb", "wikitext-2", "wikitext-2-words", "wikitext-103",
                          "wikitext-103-words"])
        smaller = dry("generalization", "small", "rope", "--fineweb", "1BT")[1]
        self.assertTrue(any(c[-1] == "data/fineweb1B" and "1BT" in c for c in smaller))
        self.assertTrue(any("data/fineweb1B/fineweb_val_*.bin" in c for c in smaller))
        bias = [flags_of(c) for c in dry("bias", "kerple_power")[1] if "--dump_bias" in c]
        self.assertEqual([f["--dump_bias"].rpartition(",")[0] for f in bias[:3]], ["0,mean", "12,mean", "23,mean"])
        self.assertEqual({f["--T"] for f in bias[:3]}, {"512"})
        self.assertEqual(bias[3]["--dump_bias"], "all,all,464 2068 7586 21831")             # T = 4
        drawn = [c for c in dry("bias", "kerple_power")[1] if "scripts/plot.py" in c]
        self.assertEqual(["--normalize" in c for c in drawn], [True, True, True, False])

    def test_recipe(self):
        steps = {("fineweb-edu", "tiny"): 19073, ("fineweb-edu", "small"): 19073, ("fineweb-edu", "medium"): 19073,
                 ("wikitext-103", "tiny"): 9000, ("wikitext-103", "small"): 5000, ("wikitext-103", "medium"): 3000}
        names = ("lr", "warmup", "final_lr", "weight_decay", "clip", "schedule", "T", "resume")
        for experiment in ("table1", "table3", "table4", "figure4"):
            for row in paper.rows_of(experiment):
                commands = dry(experiment, row.data, row.model, row.pos)[1]
                train, evaluate, sliding = [c for c in commands if c[0].startswith("./train")]
                f = flags_of(train)
                self.assertEqual([f["--" + name] for name in names],
                                 ["6e-4", "750", "0.1", "0.1", "1", "cosine", "1024", "1"])
                self.assertEqual((int(f["--steps"]), f["--total_batch"]), (steps[row.data, row.model], "524288"))
                lengths = flags_of(evaluate)["--eval_lengths"]
                self.assertEqual(lengths, "512,1024" if row.pos == "learned" else "512,1024,2048,4096,8192,15360")

    def test_bert_recipe(self):
        for experiment in ("table2", "bert_curves"):
            for row in paper.rows_of(experiment):
                if row.batch != 65536:
                    continue
                commands = dry(experiment, row.pos, "--gpus", "4", "--seeds", "7")[1]
                train, tune, *search = [c for c in commands if not c[1].startswith("data/")]
                f = flags_of(train)
                self.assertEqual(train[:train.index("./train_bertcu")], runqueue.launcher(4))
                self.assertEqual(tune[0], "./train_bertcu")         # groups are trained by one process
                names = ("model", "pos", "T", "total_batch", "steps", "lr", "seed", "resume")
                self.assertEqual([f["--" + name] for name in names],
                                 ["base", row.pos, "512", str(4 * 32 * 512), "14000", "1e-4", "7", "1"])
                g = flags_of(tune)
                self.assertEqual([g["--" + name] for name in ("load", "pos", "T", "pooling", "seed", "resume")],
                                 [f["--out"], row.pos, "512", "mean", "7", "1"])
                updates = int(g["--steps"])
                self.assertEqual(int(g["--total_batch"]), 128 * 512)
                self.assertTrue(updates * 128 <= 1_250_000 < (updates + 1) * 128, updates)
                self.assertAlmostEqual(int(g["--warmup"]) / updates, 0.05, 3)
                self.assertEqual(128 % int(g["--B"]), 0)
                scripts = [c[1] for c in commands if c[1].startswith("data/")]
                expected = ["data/fineweb_edu.py", "data/msmarco.py", "data/mldr.py"]
                self.assertEqual(scripts, expected if search else expected[:2])
                self.assertEqual(len(search), experiment == "table2")
                lengths = "512" if row.pos == "learned" else "512,1024,2048,4096,8192,16384"
                for h in map(flags_of, search):
                    self.assertEqual((h["--load"], h["--out"]), (g["--out"], os.path.join(g["--out"], "eval", "mldr")))
                    self.assertEqual(h["--eval_lengths"], lengths)

    def test_settings_of_bert(self):
        commands = dry("table2", "rope", "--set", "pairs.lr=5", "--set", "pairs.pooling=cls", "--set", "lr=3",
                       "--tokenizer", "v.txt")[1]
        train, tune, search = [flags_of(c) for c in commands if "./train_bertcu" in c]
        self.assertEqual((train["--lr"], tune["--lr"]), ("3", "5"))
        self.assertEqual((tune["--pooling"], search["--load"]), ("cls", tune["--out"]))     # whose pooling is kept
        self.assertEqual((train["--tokenizer"], tune["--tokenizer"]), ("v.txt", "v.txt"))

    def test_bert_arithmetic(self):
        heading = dry("table2", "cable")[0][0]
        C, T, layers, assumed = 768, 512, 12, 3600 * 200e12
        weights = layers * 12 * C * C                       # the matrices of a layer: q, k, v, projection, MLP
        forward = lambda n: 2 * weights + layers * 2 * 2 * n * C        # q k and p v with n keys each
        mlm = 3 * (forward(T) + 2 * 0.15 * 30592 * C)
        self.assertIn(f"; {mlm / 1e9:.3g} GFLOP per token;", heading)
        self.assertIn(f": {14000 * 65536 * mlm / assumed:.1f} GPU hours of training", heading)
        self.assertIn("then 9,765 steps x 128 = 1,249,920 triplets:", heading)
        self.assertIn(f"at most {9765 * 128 * 3 * T * 4 * forward(T) / assumed:.1f} of fine-tuning", heading)
        search = sum(200_000 * min(n, 4700) * forward(n) for n in (512, 1024, 2048, 4096, 8192, 16384)) / assumed
        self.assertIn(f", {search:.1f} of retrieval, if a GPU sustains 200 TFLOP/s (assumed, not measured)", heading)
        self.assertNotIn("retrieval", dry("bert_curves", "cable")[0][0])

    def test_arithmetic(self):
        for words, L, C, steps, batch in ((("table1", "medium"), 24, 1024, 19073, 524288),
                                          (("table4", "wikitext-103", "small"), 12, 768, 5000, 524288)):
            heading = dry(*words, "cable")[0][0]
            flops = 6 * (12 * L * C * C + 50304 * C) + 6 * L * C * 1024
            hours = steps * batch * flops / (3600 * 200e12)
            self.assertIn(f"{steps:,} steps x {batch:,} = {steps * batch / 1e9:.2f}G tokens; {flops / 1e9:.3g} GFLOP",
                          heading)
            self.assertIn(f": {hours:.1f} GPU hours of training", heading)
            self.assertIn("200 TFLOP/s (assumed, not measured)", heading)
        self.assertIn(f"{19073 * 524288 / 1e5 / 3600:.1f} GPU hours of training at the given 100,000 tokens/s",
                      dry("table1", "medium", "cable", "--tokens_per_s", "100000")[0][0])

    def test_gpus(self):
        for experiment in paper.EXPERIMENTS:
            for gpus in (1, 2, 4, 8):
                for c in dry(experiment, "--gpus", str(gpus))[1]:
                    trains = "--train_files" in c
                    many = trains or "--hellaswag" in c or ("--eval_lengths" in c and "--corpus" not in c)
                    started = "mpirun" in c and c[:c.index("mpirun") + 3] == runqueue.launcher(gpus)
                    self.assertEqual(started, many and gpus > 1, c)
                    if trains:
                        f = flags_of(c)
                        self.assertEqual(int(f["--total_batch"]) % (int(f["--B"]) * int(f["--T"]) * gpus), 0, c)
        for user, allowed in ((0, True), (1000, False)):
            with mock.patch.object(os, "geteuid", lambda: user):
                self.assertEqual("OMPI_ALLOW_RUN_AS_ROOT=1" in dry("table1", "tiny", "rope", "--gpus", "2")[1][1],
                                 allowed)
        code, _, err = called(paper.main, "arxiv_figure5", "8192", "--gpus", "64", "--dry_run")
        self.assertEqual((code, "--gpus 64" in err), (2, True), err)

    def test_refusals(self):
        for args, naming in ((("table1", "huge"), "huge"), (("table1", "fineweb-edu", "tiny"), "no such row"),
                             (("table9",), "table9"), (("table1", "--set", "stepz=4"), "stepz"),
                             (("table1", "--seeds", "a"), "--seeds"), ((), "expected an experiment"),
                             (("arxiv_figure5", "512", "--set", "model=big"), "model=big"),
                             (("table1", "--set", "steps=1e4"), "steps: expected a number of at least 0, got 1e4"),
                             (("table1", "--set", "T=1k"), "--set T: expected"),
                             (("table1", "--tflops", "nan"), "--tflops: expected a number above 0, got nan"),
                             (("table1", "--jobs", "9" * 9), "--jobs: expected at most 1,024"),
                             (("quick", "--set", "T=0"), "--set T: expected a number of at least 1, got 0"),
                             (("table2", "--set", "pairs.T=x"), "--set pairs.T: expected"),
                             (("table1", "--set", "eval_lengths=512,"), "expected numbers separated by commas, got 51"),
                             (("table1", "--set", "eval_lengths=0"), "--set eval_lengths")):
            r = script("paper.py", *args, "--dry_run")
            self.assertEqual(r.returncode, 2, args)
            self.assertIn(naming, r.stderr)
            self.assertNotIn("Traceback", r.stderr)
        # without matplotlib nothing is trained that would have to be drawn
        self.write("matplotlib.py", "raise ImportError('hidden')")
        r = script("paper.py", "bias", "cable", "--trainer", "false", "--set", "train_files=x", "--set", "val_files=x",
                   env={"PYTHONPATH": self.folder})
        self.assertEqual((r.returncode, r.stdout), (2, ""), r.stderr)
        self.assertIn("Python's module matplotlib is missing", r.stderr)

    def test_paths_are_those_of_the_directory_that_it_is_called_from(self):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        _, commands = dry("quick", "cable", "--seeds", "1", "--trainer", "a b/mine", "--tokenizer", "t.json",
                          *("--set", "train_files=a.txt", "--set", "val_files=/b.txt"))
        (program, *_), (evaluator, *_) = commands
        files = dict(zip(commands[0][1::2], commands[0][2::2]))
        self.assertEqual((program, evaluator, files["--val_files"]), (*2 * [self.path("a b/mine")], "/b.txt"))
        self.assertEqual([os.path.normpath(os.path.join(os.path.realpath(ROOT), files[name]))
                          for name in ("--train_files", "--tokenizer")], [self.path("a.txt"), self.path("t.json")])
        self.assertEqual(dry("quick", "cable", "--seeds", "1")[1][1][0], "./train_gpt2")        # the repository's
        os.chdir(ROOT)                                  # where the words of runs that are there stay as they are
        self.assertIn("./t.json", dry("quick", "cable", "--seeds", "1", "--tokenizer", "./t.json")[1][1])

    def test_data_commands(self):
        seen = set()
        for c in self.every_command():
            if c[1].startswith("data/") and tuple(c) not in seen:
                seen.add(tuple(c))
                r = run(*c, "--help")
                self.assertEqual(r.returncode, 0, f"{c}\n{r.stderr}")
        self.assertEqual(len(seen), 13)
        # a run reads the shards that the script with these flags writes
        sys.path.insert(0, os.path.join(ROOT, "data"))
        self.addCleanup(sys.path.remove, os.path.join(ROOT, "data"))
        fineweb = importlib.import_module("fineweb_edu")
        for key, dataset in (("fineweb-edu", "edu"), ("fineweb", "classic")):
            self.assertEqual(os.path.basename(paper.DATA[key].val), fineweb.DATASETS[dataset][1] + "_val_*.bin")
        for module, prepare, patterns in (*(("msmarco", p, [files]) for p, files in paper.PAIRS.values()),
                                          ("mldr", paper.MLDR_PREPARE, paper.MLDR.values())):
            named = re.findall(r"\w+\.\w+", importlib.import_module(module).__doc__.partition("Writes")[2])
            for pattern in patterns:
                self.assertTrue(fnmatch.filter(named, os.path.basename(pattern)), pattern)
                self.assertEqual(os.path.dirname(pattern), shlex.split(prepare)[-1])

    @unittest.skipUnless(HAS_TRAINER, "the trainer is not built")
    def test_every_flag_is_the_trainers(self):
        checked, models = self.check_flags(TRAINER, "./train_gpt2cu", "./train_gpt2")
        self.assertGreater(checked, 25)
        self.assertGreater(models, 60)

    @unittest.skipUnless(HAS_BERT, "train_bert is not built")
    def test_every_flag_is_berts(self):
        checked, models = self.check_flags(BERT_TRAINER, "./train_bertcu")
        self.assertGreater(checked, 5)
        self.assertGreater(models, 10)

    def check_flags(self, trainer, *names):
        checked, models = set(), set()
        for c in self.every_command():
            if not set(names) & set(c):
                continue
            f = flags_of(c)
            shape = tuple((k, v) for k, v in f.items()
                          if k not in ("--out", "--load", "--pos", "--train_files", "--val_files"))
            if "--model" in f:
                models.add((f["--model"], f["--pos"], f["--T"]))
            if shape in checked:
                continue
            checked.add(shape)
            program = [sys.executable, c[1]] if c[1] == "scripts/retrieve.py" else [trainer]
            r = run(*program, *words_of(f), "--help")                           # all flags before --help are parsed
            self.assertEqual(r.returncode, 0, f"{c}\n{r.stderr}")
        text = self.write("text.txt", 20000 * "a")
        for model, pos, T in models:
            r = run(trainer, "--check", "--ranks", "1", "--model", model, "--pos", pos, "--T", T, "--B", "1",
                    "--train_files", text, "--val_files", text)
            self.assertEqual(r.returncode, 0, f"{model} {pos} {T}\n{r.stderr}")
        return len(checked), len(models)


@unittest.skipUnless(HAS_TRAINER, "the trainer is not built")
class TestRuns(Folder):
    SETTINGS = ("--set", "model=1,2,32", "--set", "T=16", "--set", "total_batch=64", "--set", "steps=6",
                "--set", "warmup=2", "--set", "eval_lengths=8,16,32", "--set", "eval_tokens=200", "--trainer", TRAINER)

    def setUp(self):
        super().setUp()
        text = "".join(f"line {n} of a text, {n * n} its square.\n" for n in range(400))
        self.files = ("--set", "train_files=" + self.write("wikitext103_raw_train_1.txt", text),
                      "--set", "val_files=" + self.write("wikitext103_raw_test_1.txt", text[:3000]))

    def go(self, *args):
        r = script("paper.py", *args, *self.files, *self.SETTINGS, "--out", self.path("run"))
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        return r

    def test_a_table_end_to_end(self):
        self.go("table4", "small", "cable", "learned", "--seeds", "1,2")
        log = self.path("run", "wikitext-103", "1x2x32", "cable-T16", "seed_1", "log.jsonl")
        self.assertEqual([r["step"] for r in self.records("train", os.path.dirname(log))], list(range(1, 7)))
        before = os.stat(log).st_mtime_ns
        again = self.go("table4", "small", "cable", "learned", "--seeds", "1,2")
        self.assertEqual(os.stat(log).st_mtime_ns, before)
        self.assertEqual((again.stdout.count("already done: train"), "$ " in again.stdout), (4, False))
        os.remove(self.path("run/wikitext-103/1x2x32/cable-T16/seed_2/eval/wikitext-103/eval.done"))
        self.assertEqual(self.go("table4", "small", "cable", "--seeds", "2").stdout.count("$ "), 1)
        # other settings in the same directory are refused, and nothing is lost
        other = [w.replace("steps=6", "steps=7") for w in self.SETTINGS]
        r = script("paper.py", "table4", "small", "cable", "--seeds", "1", *self.files, *other,
                   "--out", self.path("run"))
        self.assertEqual((r.returncode, "--steps: 6 there, 7 now" in r.stderr), (2, True), r.stdout + r.stderr)

        r = script("report.py", self.path("run"), "-o", self.path("report"))
        self.assertEqual((r.returncode, r.stderr.count("\n")), (0, 1), r.stderr)
        values = []
        for seed in (1, 2):
            with open(self.path(f"run/wikitext-103/1x2x32/cable-T16/seed_{seed}/eval/wikitext-103/log.jsonl")) as f:
                values.append({r["T"]: r["ppl"] for r in map(json.loads, f) if r["kind"] == "extrapolation"})
        cells = [f"{statistics.fmean(v[T] for v in values):.2f} ± {statistics.stdev(v[T] for v in values):.2f}"
                 for T in (8, 16, 32)]
        ratio = statistics.fmean(v[32] / v[16] for v in values)
        self.assertIn(f"| cable | 2 | {' | '.join(cells)} | {ratio:.3f} |\n", r.stdout)
        self.assertRegex(r.stdout, r"\| learned \| 2 \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \| - \| - \|\n")
        self.assertIn("Trained for 6 steps of 64 tokens of wikitext-103, at T = 16.", r.stdout)
        self.assertEqual(read_bytes(glob.glob(self.path("report", "*.png"))[0])[:8], b"\x89PNG\r\n\x1a\n")

    def test_figures_3_and_bias(self):
        self.go("figure3", "tiny", "none", "alibi", "1024", "--set", "tokens=20")
        self.go("bias", "cable", "--set", "text=a text, or not")
        for name in ("0_mean", "all_all"):
            image = f"run/fineweb-edu/1x2x32/cable-T16/seed_42/eval/bias/bias_{name}.png"
            self.assertTrue(os.path.exists(self.path(image)))
        used = [r["mem"] for r in self.records("train", "run/figure3/1x2x32/alibi-T16/seed_42")]
        self.assertTrue(len(used) == 6 and all(1e6 < m < 64e9 for m in used), used)     # measured, not estimated
        r = script("report.py", self.path("run"), "-o", self.path("report"))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertRegex(r.stdout, r"\| L1 NH2 C32 \| alibi \| 16 \| [\d,]+ \| [\d.]+ \| [\d,]+ \|")
        self.assertIn("cable-T16/seed_42: finished, but not evaluated", r.stderr)
        self.assertNotIn("alibi", r.stderr)

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_two_processes_even_as_root(self):
        out = self.go("table4", "small", "cable", "--gpus", "2").stdout
        if "2 ranks" not in out:
            self.skipTest("the trainer is built without MPI")
        printed = [line[2:] for line in out.splitlines() if line.startswith("$ ")]
        self.assertEqual((len(printed), out.count(", 2 ranks")), (3, 3))    # training, windows apart and sliding
        self.assertEqual(run("bash", "-c", printed[1]).returncode, 0)       # the printed command works by itself

    def test_unfinished_data_is_made_again(self):
        with mock.patch.object(runqueue, "ROOT", self.folder):
            self.write("data/x/x_train_1.bin", "")
            self.assertTrue(runqueue.has_data("data/x/x_train_*.bin"))
            self.write("data/x/manifest.json", '{"complete": false}')
            self.assertFalse(runqueue.has_data("data/x/x_train_*.bin"))
            self.write("data/x/manifest.json", '{"complete": true}')
            self.assertTrue(runqueue.has_data("data/x/x_train_*.bin"))
            self.assertFalse(runqueue.has_data("data/x/x_test_*.bin"))

    def test_quick(self):
        text = "".join(f" = {n} = \n a line of text\n" for n in range(300))
        with lzma.open(self.write("wikitext-2/train.txt.xz", ""), "wt") as f:
            f.write(text)
        for split in ("valid", "test"):
            self.write(f"wikitext-2/{split}.txt", text[:900])
        r = run(sys.executable, os.path.join(ROOT, "data", "wikitext.py"), "--size", "2", "--bytes", "--local",
                self.folder, "--out", self.path("text"))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("expected 10,797,148: is this another text?", r.stderr)
        for split, length in ("train", len(text)), ("test", 900):
            self.assertEqual(self.read(f"text/wikitext2_bytes_{split}.txt"), text[:length])
        files = [word for split in ("train", "val")
                 for word in ("--set", f"{split}_files={self.path(f'text/wikitext2_bytes_{split}.txt')}")]
        command = ["paper.py", "quick", "cable", "rope", "--quiet", "--seeds", "7", "--set", "steps=3", "--set",
                   "eval_lengths=128,256", "--set", "eval_tokens=300", *files, "--trainer", TRAINER, "--out",
                   "quick"]
        r = script(*command, cwd=self.folder)
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        r = script("report.py", self.path("quick"))
        self.assertRegex(r.stdout, r"\| rope \| 1 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|")
        again = script(*command, cwd=self.folder)
        self.assertEqual((again.returncode, "step " in again.stdout), (0, False), again.stdout)
        # equal in everything but the encoding
        trains = [flags_of(shlex.split(line)) for line in script("paper.py", "quick", "--dry_run").stdout.splitlines()
                  if "--train_files" in line]
        self.assertEqual((len(trains), len({f["--pos"] for f in trains})), (18, 9))
        self.assertEqual({f["--seed"] for f in trains}, {"42", "43"})
        rest = {tuple((k, v) for k, v in f.items() if k not in ("--pos", "--seed", "--out")) for f in trains}
        self.assertEqual(len(rest), 1)
        flags = dict(rest.pop())
        self.assertEqual([flags[k] for k in ("--model", "--T", "--B", "--steps")], ["2,4,64", "128", "16", "500"])


PYTHON = next((python for python in (sys.executable, os.path.join(ROOT, "build", "venv", "bin", "python")) if
               os.path.exists(python) and run(python, "-c", "import numpy, pytrec_eval, xxhash").returncode == 0), "")


@unittest.skipUnless(HAS_BERT, "train_bert is not built")
@unittest.skipUnless(PYTHON, "Python's pytrec_eval is missing: pip install -r data/requirements.txt")
class TestBertRuns(Folder):
    """a row of Table 2 from its text to its report, at sizes that take seconds"""
    WORDS = "cable length token bias sum head query key value layer norm ocean river stone cloud maple".split()
    SETTINGS = ("model=1,2,32", "T=32", "total_batch=128", "steps=6", "warmup=2", "pairs.steps=4",
                "pairs.total_batch=256", "pairs.warmup=1", "eval_lengths=16,32,64")

    def go(self, *args):
        def lines(count, line):
            return "".join(line(n) + "\n" for n in range(count))
        word = lambda n: self.WORDS[n % 16]
        files = {
            "train_files": ("edu_fineweb_train_1.txt", lines(300, lambda n: f"the {word(n)} of a {word(n * 7)}")),
            "val_files": ("edu_fineweb_val_1.txt", lines(40, lambda n: f"the {word(n)} of a {word(n * 5)}")),
            "pairs": ("msmarco_train_1.txt",
                      lines(64, lambda n: f"{word(n)} {n}\tabout {word(n)} {n}\tabout {word(n * 7)}")),
            "corpus": ("mldr_corpus.txt", lines(16, lambda n: f"{word(n)} and {word(n)}, {'at length ' * 8}")),
            "queries": ("mldr_test_queries.txt", lines(16, word)),
            "qrels": ("mldr_test_qrels.tsv", lines(16, lambda n: f"{n} 0 {n} 1"))}
        settings = dict(setting.split("=") for setting in self.SETTINGS)
        settings.update({flag: self.write(*file) for flag, file in files.items()})
        flags = [w for k, v in settings.items() for w in ("--set", f"{k}={v}")]
        r = script("paper.py", *args, *flags, "--trainer", BERT_TRAINER, "--python", PYTHON, "--out", self.path("run"))
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        return r.stdout + r.stderr

    def log(self, *names):
        with open(self.path("run", *names, "log.jsonl")) as f:
            return [json.loads(line) for line in f]

    def steps(self, *names):
        return [r["step"] for r in self.log(*names) if r["kind"] == "train"]

    def test_end_to_end(self):
        curves = self.go("bert_curves", "cable", "learned", "--seeds", "1,2")
        self.assertEqual(curves.count("\n$ "), 8)
        table = self.go("table2", "cable", "learned", "--seeds", "1,2")             # searches with the same runs
        self.assertEqual(table.count("\n$ "), 4)
        self.assertEqual((table.count("already done: train"), table.count("already done: fine-tune")), (4, 4))
        self.assertEqual(self.go("table2", "cable", "learned", "--seeds", "1,2").count("\n$ "), 0)
        for data, steps in (("fineweb-edu-bert", 6), ("ms-marco", 4)):
            self.assertEqual(self.steps(data, "1x2x32", "cable-T32", "seed_1"), list(range(1, steps + 1)))
        evaluated = ("ms-marco", "1x2x32", "cable-T32", "seed_1", "eval", "mldr")
        found = [r for r in self.log(*evaluated) if r["kind"] == "retrieval"]
        self.assertEqual([(r["T"], r["queries"], r["documents"]) for r in found],
                         [(16, 16, 16), (32, 16, 16), (64, 16, 16)])
        values = [[r["ndcg@10"] for r in self.log("ms-marco", "1x2x32", "cable-T32", f"seed_{n}", "eval", "mldr")]
                  for n in (1, 2)]
        moved = shutil.move(self.path("run"), self.path("elsewhere"))               # as if copied to another machine
        r = script("report.py", moved)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        cells = [f"{100 * statistics.fmean(v):.2f} ± {100 * statistics.stdev(v):.2f}" for v in zip(*values)]
        self.assertIn("## bert L1 NH2 C32, nDCG@10 on mldr-en\n\nTrained for 6 steps of 128 tokens of fineweb-edu-10B, "
                      "then for 4 steps of 8 groups of ms-marco, at T = 32.", r.stdout)
        self.assertIn(f"| cable | 2 | {' | '.join(cells)} |\n", r.stdout)
        self.assertRegex(r.stdout, r"\| learned \| 2 \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \| - \|\n")
        self.assertRegex(r.stdout, r"loss of masked tokens on fineweb-edu-10B\n(.*\n)+"
                                   r"\| cable \| 2 \| 5\.\d+ ± [\d.]+ \| 5\.\d+ ± [\d.]+ \| 0.00 ± 0.00 \|\n")
        self.assertRegex(r.stdout, r"contrastive loss on fineweb-edu-10B \+ ms-marco\n(.*\n)+"
                                   r"\| cable \| 2 \| [\d.]+ ± [\d.]+ \| - \|\n")


class TestReport(Folder):
    """on logs that these tests write"""

    def run_of(self, name, pos="cable", seed=1, ppl=None, step=10, steps=10, model=(24, 16, 1024),
               train="data/edu_fineweb10B/edu_fineweb_train_*.bin", T=1024, what="fineweb-edu", lines=()):
        config = {"n_layer": model[0], "n_head": model[1], "n_embd": model[2], "n_positions": T, "vocab_size": 50257,
                  "position": {"name": pos}}
        options = {"steps": steps, "total_batch": 100, "train_files": train, "val_files": train.replace("train", "val"),
                   "pos": pos, "seed": seed}
        self.write(f"{name}/step_{step:08d}/config.json", json.dumps(config))
        self.write(f"{name}/step_{step:08d}/state.json", json.dumps({"step": step, "options": options}))
        self.write(f"{name}/log.jsonl", '{"kind":"train","step":1,"loss":3}\n' + "".join(line + "\n" for line in lines))
        records = [{"kind": "extrapolation", "pos": pos, "T": length, "T_train": T, "stride": length, "ppl": v}
                   for length, v in (ppl or {}).items()]
        if records:
            self.write(f"{name}/eval/{what}/log.jsonl", "".join(json.dumps(r) + "\n" for r in records))
        return self.path(name)

    def report(self, *args, code=0):
        found, out, err = called(report.main, self.folder, *args)
        self.assertEqual(found, code, err)
        return out, err

    def test_beside_the_paper(self):
        self.run_of("a", seed=1, ppl={512: 17.0, 1024: 16.0, 2048: 15.0})
        self.run_of("deep/er/b", seed=2, ppl={512: 18.0, 1024: 16.5})
        self.run_of("c", pos="learned", ppl={512: 20.123, 1024: 19.0})
        out, err = self.report("-o", self.path("report"))
        self.assertIn("## gpt2:medium, perplexity on fineweb-edu-10B (Table 1)", out)
        self.assertIn("| cable | 2 | 17.50 ± 0.71 | 16.25 ± 0.35 | 15.00 | - | - | - | - |\n"
                      "| *cable, paper* |  | *17.00* | *16.52* | *15.97* | *15.34* | *15.41* | *15.41* |  |", out)
        self.assertIn("| learned | 1 | 20.12 | 19.00 | - | - | - | - | - |\n"
                      "| *learned, paper* |  | *17.99* | *17.47* |  |  |  |  |  |", out)
        self.assertIn("| alibi | - | - | - | - | - | - | - | - |\n| *alibi, paper* |  | *17.30* |", out)
        order = re.findall(r"^\| (\w+) \|", out.partition("(Table 1)")[2].partition("##")[0], re.M)
        self.assertEqual(order, ["T", "cable", "cable_nw", "alibi", "fire", "t5_clip", "kerple", "rope", "learned",
                                 "sinusoidal"])
        self.assertEqual(re.findall("^## .*", out, re.M), ["## gpt2:medium, perplexity on fineweb-edu-10B (Table 1)"])
        tables = "Table 1 (gpt2:tiny, wikitext-103), Table 3 (gpt2:small, fineweb-edu-10B), "
        self.assertIn(f"\nLeft out, as they have no run (--paper shows them): {tables}", out)
        self.assertEqual(len(glob.glob(self.path("report/*.png"))), 1)
        self.assertEqual(self.read("report/report.md") + "\n", out)
        whole, _ = self.report("--paper")
        for table in ("Table 2", "Table 3", "Table 4", "the arXiv version's"):
            self.assertIn(table, whole)
        self.assertNotIn("Left out", whole)

    def test_every_number_of_the_paper_is_shown(self):
        out, err = self.report("--paper")
        self.assertIn("no finished and evaluated run", err)
        with open(report.PAPER_TABLES) as f:
            numbers = [float(v) for line in f.readlines()[1:] for v in line.strip().split(",")[7:] if v]
        shown = [float(x) for x in re.findall(r"\*(-?[\d.]+)\*", out)]
        self.assertEqual(sorted(shown), sorted(numbers))
        self.assertEqual(len(numbers), 388)

    def test_printed_and_run_stay_apart(self):
        for n, (name, pos) in enumerate((("t5_clip", "t5_clip"), ("as_run/t5_clip", "t5_clip:K=256,scale=C,layers=own"),
                                         ("alibi", "alibi"), ("as_run/alibi", "alibi:slopes=geometric"),
                                         ("cable", "cable"), ("as_run/cable", "cable"), ("t5", "t5"))):
            self.run_of(name, pos=pos, ppl={512: 20.0 + n})
        out, err = self.report()
        self.assertEqual(err, "")
        printed, run = out.split("## ")[1:]
        self.assertEqual(("fineweb-edu-10B (Table 1)" in printed, "fineweb-edu-10B, as run (Table 1)" in run),
                         (True, True))
        for text, pos, ours, theirs in ((printed, "t5_clip", 20, 17.79), (printed, "alibi", 22, 17.3),
                                        (run, "t5_clip:K=256,scale=C,layers=own", 21, 17.79),
                                        (run, "alibi:slopes=geometric", 23, 17.3), (run, "cable", 25, 17.0)):
            row = f"| {pos} | 1 | {ours}.00 | - | - | - | - | - |\n| *{pos}, paper* |  | *{theirs:.2f}* |"
            self.assertIn(row, re.sub(r"( \| -)+ \|\n", " | - | - | - | - | - |\n", text))
        self.assertIn("| t5 | 1 | 26.00 |", printed)        # buckets: not the paper's T5
        self.assertNotIn("*t5, paper*", printed)

    def test_numbers_in_the_text(self):
        tiny = {"model": (6, 8, 512), "train": "wikitext103_raw_train_*.bin", "what": "wikitext-103"}
        self.run_of("a", pos="cable_v1", ppl={8192: 21.5, 16384: 20.5}, **tiny)
        self.run_of("c", pos="cable_v1", ppl={512: 25.5, 8192: 22.5}, T=512, **tiny)
        self.run_of("b", pos="sinusoidal", ppl={8192: 23.5}, T=8192, **tiny)
        out, _ = self.report()
        self.assertIn("| gpt2:tiny | cable_v1 | 1,024 | 8,192 | ppl on wikitext-103 | *22.22* | 21.50 |", out)
        self.assertIn("| gpt2:tiny | cable_v1 | 1,024 | 16,384 | ppl on wikitext-103 | *21.97* | 20.50 |", out)
        for T, theirs, ours in (("512", "25.12", "25.50"), ("8,192", "22.86", "22.50")):
            self.assertIn(f"| gpt2:tiny | cable_v1 | 512 | {T} | ppl on wikitext-103 | *{theirs}* | {ours} |", out)
        self.assertNotIn("*23.75*", out)
        out, _ = self.report("--paper")
        self.assertIn("| gpt2:tiny | cable_v1 | 1,024 | 1,024 | ppl on wikitext-103 | *23.75* | - |", out)
        self.assertIn("| gpt2:tiny | sinusoidal | 8,192 | 8,192 | ppl on wikitext-103 | *22.81* | 23.50 |", out)
        self.assertIn("*-0.65* | - |", out)

    def test_word_level_and_sliding_are_tables_of_their_own(self):
        self.run_of("g", pos="cable_v1")
        record = {"kind": "extrapolation", "pos": "cable_v1", "T": 1024}
        table, also = "the arXiv version's generalization table", "its numbers for"
        wanted = {}         # {heading: (ours, the paper's or None)}; each table has a number of its own
        for n, (what, name, theirs, caption) in enumerate((
                ("wikitext-2", "wikitext-2", "41.10", table),
                ("wikitext-2-words", "wikitext-2, word-level", "41.10", f"{table}, {also} wikitext-2"),
                ("wikitext-103", "wikitext-103", "46.43", table),
                ("wikitext-103-words", "wikitext-103, word-level", "46.43", f"{table}, {also} wikitext-103"),
                ("fineweb", "fineweb-10B", "25.89", table),
                ("fineweb-1B", "fineweb-1B", "25.89", f"{table}, {also} fineweb-10B"))):
            for sliding in (False, True):
                ours, stride = 50.0 + 2 * n + sliding, 256 if sliding else 1024
                self.write(f"g/eval/{what}{'.sliding' * sliding}/log.jsonl",
                           json.dumps({**record, "stride": stride, "ppl": ours}) + "\n")
                metric = "ppl, stride 256" if sliding else "perplexity"
                heading = f"gpt2:medium, {metric} on {name}" + f" ({caption})" * (not sliding)
                wanted[heading] = f"{ours:.2f}", None if sliding else theirs
        out, err = self.report()
        self.assertEqual(err, "")
        found = {}
        for section in out.split("\n## ")[1:]:
            paper_has = re.search(r"^\| \*cable_v1, paper\* \|  \| \*([\d.]+)\* \|", section, re.M)
            ours = re.search(r"^\| cable_v1 \| 1 \| ([\d.]+) \|", section, re.M)
            found[section.partition("\n")[0]] = ours and ours[1], paper_has and paper_has[1]
        self.assertEqual(found, wanted)

    def test_a_stretched_rope_is_a_table_of_its_own(self):
        self.run_of("r", pos="rope", ppl={1024: 20.0, 2048: 90.0})
        stretch = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1024}
        records = [{"kind": "extrapolation", "pos": "rope", "T": 2048, "stride": 2048, "ppl": 21.0},
                   {"kind": "curve", "pos": "rope", "T": 2048, "stride": 2048, "loss": [3.0] * 2048}]
        self.write("r/eval/fineweb-edu.yarn/log.jsonl",
                   "".join(json.dumps({**r, "rope_scaling": stretch}) + "\n" for r in records))
        out, _ = self.report()
        plain, _, stretched = out.partition("## gpt2:medium, ppl, yarn on fineweb-edu")
        self.assertIn("| rope | 1 | - | 20.00 | 90.00 |", plain)
        self.assertIn("\n| rope | 1 | 21.00 |\n", stretched)
        self.assertNotIn("Loss at the positions", plain)
        self.assertIn("Loss at the positions of windows of 2,048 tokens", stretched)

    def test_the_loss_at_each_position(self):
        losses = [5 - 4 * t / 2048 for t in range(2048)]
        for seed in (1, 2):
            run = self.run_of(f"s{seed}", seed=seed, ppl={1024: 20.0, 2048: 21.0})
            curves = [{"kind": "curve", "pos": "cable", "T": T, "stride": stride,
                       "loss": [v + shift + 0.1 * (seed - 1) for v in losses[:T]]}
                      for T, stride, shift in ((2048, 2048, 0), (1024, 1024, 7), (2048, 256, 9))]
            curves[0]["loss"][0] = None                                 # a position that nothing has scored
            with open(os.path.join(run, "eval", "fineweb-edu", "log.jsonl"), "a") as f:
                f.write("".join(json.dumps(c) + "\n" for c in curves))
        self.run_of("other", pos="rope", ppl={1024: 30.0})               # without a curve
        out, _ = self.report()
        part = out.partition("Loss at the positions of windows of 2,048 tokens:\n\n")[2]
        head, _, row, *_ = part.split("\n")
        self.assertEqual(head, "| position | 1 to 64 | 65 to 128 | 129 to 256 | 257 to 512 | 513 to 1,024 | "
                               "1,025 to 2,048 |")
        mean = lambda a, b: statistics.fmean(losses[a - 1:b])
        cells = [f"{mean(a, b) + 0.05:.2f} ± 0.07" for a, b in
                 ((2, 64), (65, 128), (129, 256), (257, 512), (513, 1024), (1025, 2048))]
        self.assertEqual(row, "| cable | " + " | ".join(cells) + " |")
        self.assertNotIn("rope", part)

    def test_generalization(self):
        run = self.run_of("g", pos="cable_v1", model=(12, 12, 768), ppl={1024: 33.0}, what="fineweb")
        self.write("g/eval/wikitext-2/log.jsonl", '{"kind":"extrapolation","pos":"x","T":1024,"stride":1024,'
                   '"ppl":51.5}\n')
        self.write("g/eval/hellaswag/log.jsonl", '{"kind":"hellaswag","step":0,"acc_norm":0.31375}\n')
        out, err = self.report()
        self.assertIn("on fineweb-10B (the arXiv version's generalization table)", out)
        for ours, theirs in (("33.00", "33.54"), ("51.50", "51.28"), ("31.37", "31.37")):
            self.assertIn(f"| cable_v1 | 1 | {ours} |\n| *cable_v1, paper* |  | *{theirs}* |", out)
        self.assertEqual(err, "", run)

    def bert_of(self, name, pos, options, lines=(), seed=1):
        """a finished run of 10 steps"""
        run = self.run_of(name, pos=pos, T=512, lines=lines)
        config = {"model_type": "bert", "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
                  "max_position_embeddings": 512, "position": {"name": pos}}
        options = {"steps": 10, "total_batch": 65536, "T": 512, "train_files": "data/x/edu_fineweb_train_*.bin",
                   "val_files": "data/x/edu_fineweb_val_*.bin", "pos": pos, "seed": seed, **options}
        self.write(f"{name}/step_00000010/config.json", json.dumps(config))
        self.write(f"{name}/step_00000010/state.json", json.dumps({"step": 10, "options": options}))
        return run

    def test_retrieval(self):
        self.bert_of("mlm", "rope", {})
        # the model was loaded without --pos: its config.json has the encoding, not the flag's default
        tuned = {"pairs": "data/m/msmarco_train_*.bin", "load": self.path("mlm"), "pos": "cable"}
        self.bert_of("tuned", "rope", tuned)
        self.write("tuned/eval/mldr/log.jsonl",
                   '{"kind":"retrieval","T":512,"ndcg@10":0.5}\n{"kind":"retrieval","T":512,"ndcg@10":0.15}\n'
                   '{"kind":"retrieval","T":1024,"ndcg@10":0.1441}\n')
        out, err = self.report("-o", self.path("report"))
        self.assertIn("## bert:base, nDCG@10 on mldr-en (Table 2)\n\nTrained for 10 steps of 65,536 tokens of "
                      "fineweb-edu-10B, then for 10 steps of 128 groups of ms-marco, at T = 512.", out)
        self.assertIn("| rope | 1 | 15.00 | 14.41 | - | - | - | - |\n| *rope, paper* |  | *15.16* | *14.41* |", out)
        self.assertEqual([line for line in err.splitlines() if "wrote" not in line], [])
        self.assertEqual(len(glob.glob(self.path("report/*.png"))), 3)              # lengths, and two curves
        # a run whose first part is no longer there
        self.bert_of("other", "rope", dict(tuned, load=self.path("nowhere")), seed=2)
        self.assertIn("## bert:base, contrastive loss on ms-marco\n\nTrained for 10 steps of 128 groups of ms-marco.",
                      self.report()[0])

    def test_curves(self):
        loss = lambda n: f'{{"kind":"train","step":{n},"loss":{10 - n / 10}}}'
        val = '{"kind":"val","step":%d,"loss":%g,"dead_heads":0.25}'
        for seed in (1, 2):
            self.bert_of(f"c{seed}", "cable", {}, [*map(loss, range(2, 50)), val % (0, 9), val % (40, 5 + seed)], seed)
            self.bert_of(f"s{seed}", "sinusoidal", {}, map(loss, range(2, 20)), seed)
        self.bert_of("p", "alibi", {"pairs": "msmarco_train_*.bin", "load": self.path("s1")}, map(loss, range(2, 30)))
        out, err = self.report("-o", self.path("report"))
        mean = statistics.fmean(10 - n / 10 for n in range(46, 50))                 # the last tenth of 49 steps
        self.assertIn("## bert:base, loss of masked tokens on fineweb-edu-10B (Figure 5)\n\n"
                      "Trained for 10 steps of 65,536 tokens of fineweb-edu-10B.", out)
        self.assertIn("| encoding | seeds | training | validation | dead heads (%) |\n|---|---|---|---|---|\n"
                      f"| cable | 2 | {mean:.2f} ± 0.00 | 6.50 ± 0.71 | 25.00 ± 0.00 |\n"
                      "| sinusoidal | 2 | 8.10 ± 0.00 | - | - |\n", out)
        self.assertIn("## bert:base, contrastive loss on fineweb-edu-10B + ms-marco (Figure 6)\n", out)
        self.assertIn("| alibi | 1 | 7.15 | - |", out)
        for name in re.findall(r"!\[.*\]\((.*)\)", out):
            self.assertEqual(read_bytes(self.path("report", name))[:4], b"\x89PNG")
        self.assertEqual(out.count("!["), 2)
        lines = [line for ax in self.draw(self.path("c1"), self.path("s1")).axes for line in ax.lines]
        self.assertEqual([(line.get_label(), len(line.get_xdata())) for line in lines if line.get_linestyle() == "-"],
                         [("cable", 49), ("sinusoidal", 19)])
        self.assertEqual([list(line.get_ydata()) for line in lines if line.get_linestyle() == "None"], [[9, 6]])
        legend = self.draw(self.path("c1"), self.path("c2"), self.path("s1")).axes[0].get_legend()
        names = sorted(text.get_text() for text in legend.get_texts())
        self.assertEqual(names, ["cable", "sinusoidal"])                            # one name for all seeds

    def test_other_pre_training_is_another_table(self):
        for n, total_batch in enumerate((65536, 131072)):
            self.bert_of(f"m{n}", "rope", {"total_batch": total_batch})
            self.bert_of(f"p{n}", "rope", {"pairs": "msmarco_train_*.bin", "load": self.path(f"m{n}")})
            self.write(f"p{n}/eval/mldr/log.jsonl", f'{{"kind":"retrieval","T":512,"ndcg@10":0.{n + 1}}}\n')
        out, err = self.report()
        self.assertEqual(re.findall(r"^\| rope \| 1 \| (\d+\.00) \| - \| - \|", out, re.M), ["10.00", "20.00"])
        self.assertEqual((out.count("loss of masked"), out.count("contrastive loss on"), err), (2, 2, ""))

    def draw(self, *paths):
        (curves,) = report.curves_of(report.find_runs(paths)).values()
        return report.draw_curves(curves)

    def test_a_figure_says_whose_dots_it_has(self):
        self.run_of("short", pos="rope", T=512, ppl={512: 18.0, 1024: 20.0})
        tables, _ = report.gather(report.find_runs([self.folder]))
        table, = (t for t in tables if t.ours)
        for paper, end in ((table.paper, "; dots: the paper's"), ({}, "")):
            table.paper = paper
            label = report.draw_lengths(table).axes[0].get_xlabel()
            self.assertEqual(label, "evaluation length T (tokens)" + end)

    def test_trained_at_another_length_than_the_paper(self):
        self.run_of("short", pos="rope", T=512, ppl={512: 18.0})
        out, _ = self.report()
        self.assertIn("| rope, T 512 | 1 | 18.00 | - |", out)
        self.assertIn("| rope, T 1024 | - | - | - | - | - | - | - |", out)
        self.assertIn("| *rope, paper* |  | *17.39* |", out)

    def test_other_runs(self):
        small = {"model": (2, 4, 64), "train": "x/wikitext2_bytes_train.txt", "T": 128, "what": "wikitext-2-bytes"}
        self.run_of("s1", ppl={64: 7.0, 128: 6.0, 256: 5.0}, seed=1, **small)
        self.run_of("s2", ppl={64: 7.2, 128: 6.0, 256: 6.0}, seed=2, **small)
        tiny = {"model": (6, 8, 512), "train": "wikitext103_raw_train_*.bin", "what": "wikitext-103"}
        self.run_of("f5", pos="rope", ppl={512: 20, 1024: 30}, T=512, **tiny)
        self.run_of("f5b", pos="rope", ppl={512: 21, 1024: 22}, T=1024, **tiny)
        out, err = self.report("-o", self.path("report"))
        self.assertIn("## L2 NH4 C64, perplexity on wikitext-2-bytes\n", out)
        self.assertIn("| T | seeds | 64 | 128 | 256 | PPL(256) / PPL(128) |", out)
        self.assertIn(f"| cable | 2 | 7.10 ± 0.14 | 6.00 ± 0.00 | 5.50 ± 0.71 | {(5 / 6 + 1) / 2:.3f} |", out)
        self.assertIn("| rope, T 512 | 1 | 20.00 | 30.00 |", out)
        self.assertIn("| rope, T 1024 | 1 | 21.00 | 22.00 |", out)
        self.assertEqual(out.count("!["), 2)

    def test_what_is_left_out_is_named(self):
        lines = ['{"kind":"tra', '{"kind":"extrapolation","pos":"cable","T":1024,"stride":1024,"ppl":null}']
        self.run_of("good", ppl={512: 17.0}, lines=lines[1:])
        self.run_of("hurt", pos="fire", ppl={512: 17.0}, lines=lines)
        self.run_of("half", pos="alibi", step=4, ppl={512: 1.0})
        self.run_of("mute", pos="rope")
        self.run_of("twin", ppl={512: 99.0})
        os.remove(self.run_of("broken", pos="t5", ppl={512: 3.0}) + "/step_00000010/state.json")
        self.write("torn/step_00000010/config.json", "{")
        self.write("torn/log.jsonl", "")
        self.write("early/log.jsonl", "")
        out, err = self.report(code=2)
        self.assertIn("| cable | 1 | 17.00 |", out)
        for text in ("good: an evaluation without perplexity at 1,024", "half: unfinished, at step 4 of 10",
                     "hurt/log.jsonl: line 2: expected a JSON object",
                     "mute: finished, but not evaluated", "twin: the same as", "broken/step_00000010/state.json",
                     "torn/step_00000010/config.json: expected a JSON object", "early: has a log but no checkpoint"):
            self.assertIn(text, err)
        self.assertNotIn("99.00", out)
        self.assertEqual(len(err.splitlines()), 8, err)
        with mock.patch("os.scandir", side_effect=PermissionError(13, "Permission denied", "x/shut")):
            self.assertIn("report.py: x/shut: Permission denied", self.report(code=2)[1])

    def test_refusals(self):
        code, _, err = called(report.main, self.path("nowhere"))
        self.assertEqual((code, "nowhere: no such directory" in err), (2, True))
        self.report(code=2)
        options = {"steps": 10, "total_batch": 100, "train_files": "a", "pos": "cable", "seed": 1}
        state = {"step": 10, "options": options}
        for old, new, says in (('"steps": 10', '"steps": Infinity', ".*Infinity is not a finite number"),
                               ('"seed": 1', '"seed": "1"', 'seed: expected a whole number, got "1"'),
                               (' "pos": "cable",', "", "pos: expected a text, got none")):
            self.run_of("run", ppl={512: 17.0})
            self.write("run/step_00000010/state.json", json.dumps(state).replace(old, new))
            self.assertRegex(self.report(code=2)[1], r"\Areport.py: .*state.json: " + says)


MODEL = {"pos": "cable", "T": 64, "T_train": 32, "stride": 64}


class TestDamage(Folder):
    """Files that are damaged in ways drawn from a seed: a reader refuses one in a line that names it, or has the same
    result. With another number in the place of a number it is another file."""
    CASES, SEED = 30, 1                     # for each script
    OTHER = ("x", True, [1], {"a": 1}, -1, 0.5, 1e300, 10 ** 400, math.nan, math.inf)
    LOG = [{"kind": "config", "commit": "abc", "flags": {"lr": 0.1}},
           *({"kind": "train", "step": n, "loss": 5 - n / 8, "lr": 1e-3, "norm": 1.5} for n in range(3)),
           {"kind": "val", "step": 3, "loss": 4.5, "accuracy": 0.25},
           *({"kind": "extrapolation", **MODEL, "T": T, "stride": T, "loss": 2.5, "ppl": 12.5} for T in (4, 8)),
           {"kind": "evaluation_speed", **MODEL, "T": 8, "tok_per_s": 1e4, "mem": 2e6},
           {"kind": "curve", **MODEL, "T": 4, "stride": 4, "windows": 64, "loss": [5.5, 4.5, None, 3.5]},
           {"kind": "head", **MODEL, "layer": 0, "head": 1, "sink_weight": {"1": 0.5, "4": 0.75}, "entropy": 1.5,
            "window90": 3, "live_tiles": 0.5},
           {"kind": "task", **MODEL, "step": 3, "file": "needle_050_0008.bin", "length": 8, "examples": 4, "exact": 2,
            "tokens": 12, "accuracy": 0.75, "loss": 1.5},
           {"kind": "task", **MODEL, "step": 3, "file": "copy_test_0004.bin", "length": 4, "examples": 8, "exact": 6,
            "tokens": 32, "accuracy": 0.875, "loss": 0.5}]
    STATE = {"step": 3, "options": {"steps": 3, "total_batch": 256, "train_files": "a_train.txt",
                                    "val_files": "a_val.txt", "pos": "cable", "seed": 7, "T": 32, "load": ""}}
    CONFIG = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "position": {"name": "cable"}}

    def damaged(self, random, text):
        """(the kind of damage, the text with it) of lines of JSON, or of a CSV"""
        lines, table = text.splitlines(), text[0] != "{"
        kind = random.choice(("cut", "flip", "value", "value", "missing", "doubled"))
        n = random.randrange(table, len(lines))
        if kind == "cut":
            return kind, text[:random.randrange(len(text))].encode()
        if kind == "flip":
            data, at = bytearray(text.encode()), random.randrange(len(text))
            data[at] ^= 1 << random.randrange(8)
            return kind, bytes(data)
        if kind == "doubled":
            lines.insert(n, lines[n])
        elif table:
            rows = [line.split(",") for line in lines]
            column = random.choice([n for n, cell in enumerate(rows[n]) if re.fullmatch(r"[\d.]+", cell)])
            if kind == "missing":
                rows = [row[:column] + row[column + 1:] for row in rows]
            else:
                rows[n][column] = random.choice(("abc", "nan", "1e999", "1-", "1" * 400, "01", "1,2", '"'))
            lines = map(",".join, rows)
        else:
            record = json.loads(lines[n])
            inner = random.choice([record, *(v for v in record.values() if isinstance(v, dict) and v)])
            name = random.choice(sorted(inner))
            if kind == "missing":
                del inner[name]
            elif isinstance(inner[name], list) and random.random() < 0.7:
                inner[name] = random.choice((inner[name][1:], [*inner[name], 1.5], 4 * [random.choice(self.OTHER)]))
            else:
                instead = [v for v in self.OTHER if type(v) is not type(inner[name]) or v == 10 ** 400]
                inner[name] = random.choice(instead)
            lines[n] = json.dumps(record)
        return kind, "".join(line + "\n" for line in lines).encode()

    def shape(self, text):
        """what two files have in common whose numbers and words only are different ones; None of a file that is none"""
        def of(v):
            if isinstance(v, dict):
                return {name: of(x) for name, x in v.items()}
            return [*map(of, v)] if isinstance(v, list) else type(v)
        try:
            if text[:1] == b"{":
                return [of(json.loads(line)) for line in text.decode().splitlines()]
            head, *rows = [line.split(",") for line in text.decode().splitlines()]
            return [head, *([of(console.cell_value(cell)) for cell in row] for row in rows)]
        except ValueError:
            return None

    def campaign(self, path, read, strict=False):
        """read(): what a script gets out of the file. strict: also if it is a shorter file, or another one"""
        good, random, counts = read_bytes(path), Random(f"{self.SEED} {os.path.basename(path)}"), collections.Counter()
        expected = called(lambda _: print(read()))
        self.assertEqual(expected[0], 0, expected)
        for case in range(self.CASES):
            kind, text = self.damaged(random, good.decode())
            self.write(path, text)
            with self.subTest(path=path, case=case, kind=kind, text=text[:2000]):
                code, out, err = called(lambda _: print(read()))
                counts[code] += 1
                if code == 2:
                    err = re.sub(r".*has no end\n", "", err)
                    self.assertRegex(err, rf"\A[^\n]*{os.path.basename(path)}[^\n]*\n\Z")
                elif (code, out) != expected[:2]:
                    self.assertEqual(code, 0, err)
                    shorter = kind == "cut" and (text[-1:] in (b"\n", b"") or "has no end" in err)
                    other = kind == "flip" and self.shape(text) == self.shape(good)
                    self.assertTrue((shorter or other) and not strict, out)
        self.write(path, good)
        return counts

    def lines(self, *records):
        return "".join(json.dumps(r) + "\n" for r in records)

    def test_logs(self):
        path, plot = self.write("log.jsonl", self.lines(*self.LOG)), report.plot
        for read in (lambda: [plot.series(plot.read_log(path), kind, "loss") for kind in ("train", "val")],
                     lambda: plot.extrapolation_lines([path])[0], lambda: plot.passage_cells([path]),
                     lambda: {r["T"]: plot.geometric_bins(r["loss"]) for r in plot.runs_with([path], "curve")[0][1]},
                     lambda: [[value(r) for _, value, *_ in plot.HEAD_STATISTICS]
                              for heads in plot.head_records([path]).values() for r in heads.values()]):
            counts = self.campaign(path, read)
            self.assertGreater(counts[2], self.CASES / 2)

    def test_runs(self):
        for name, text in (("log.jsonl", self.lines(*self.LOG)), ("step_00000003/state.json", self.lines(self.STATE)),
                           ("step_00000003/config.json", self.lines(self.CONFIG)),
                           ("eval/b/log.jsonl", self.lines(*self.LOG[5:9]))):
            self.write("run/" + name, text)

        def read():
            code, out, err = called(report.main, self.path("run"))
            if code:
                raise console.BadInput(err.splitlines()[0])
            return out
        for name in "log.jsonl", "step_00000003/state.json", "step_00000003/config.json", "eval/b/log.jsonl":
            self.campaign(self.path("run", name), read)

    def test_tables(self):
        rows = [{"row": "r", "task": "t", "seed": seed, "commit": "abc", "percent": 2.5} for seed in (1, 2)]
        path = self.path("verdicts.csv")
        verdict.ledger.write(path, rows)
        self.campaign(path, lambda: verdict.found(argparse.Namespace(results=path)))
        with mock.patch.object(report, "PAPER_TABLES", self.write("paper_tables.csv", "".join(
                line for line in read_bytes(report.PAPER_TABLES).decode().splitlines(keepends=True)
                if "table" in line or "hellaswag" in line))):
            self.campaign(report.PAPER_TABLES, report.paper_rows)

    def test_what_is_done(self):
        """what is damaged is not done, and runs again"""
        text = self.write("text.txt", "a text")
        flags = {"load": "run", "val_files": text, "eval_lengths": "4,8", "out": self.folder}
        command = runqueue.Command("evaluate", "x", flags, self.folder, self.path("eval.done"), 1)
        self.write("log.jsonl", self.lines(*self.LOG[5:8]))
        runqueue.mark_done(command)
        for name in "log.jsonl", "eval.done":
            def read():
                if not runqueue.is_done(command):
                    raise console.BadInput(name)
                return [(r["T"], r["ppl"]) for r in console.read_log(self.folder, "extrapolation")]
            self.campaign(self.path(name), read, strict=True)


if __name__ == "__main__":
    unittest.main(verbosity=1)
