"""test_study.py -- study.py and the queue of runqueue.py, with a fake trainer and with the real one."""
import argparse
import collections
import contextlib
import glob
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import unittest
from unittest import mock

from folder import BERT_TRAINER, ENVIRONMENT, ROOT, SCRIPTS, TRAINER, Folder, called, read, read_bytes
import compare
import console
import ledger
import paper
import plot
import report
import runqueue
import study

sys.path.append(os.path.join(ROOT, "dev"))
import ptxas_budget         # noqa: E402

PATIENCE = 120

# A trainer whose perplexities follow from seed and length. Each start is a line of calls.jsonl; checkpoints are a file
# with the number of steps. The encoding says how a run behaves.
FAKE = r'''
import json, os, signal, sys, time
words, flags = sys.argv[1:], {}
for n, word in enumerate(words):
    if word.startswith("--"):
        flags[word[2:]] = words[n + 1] if n + 1 < len(words) and not words[n + 1].startswith("--") else True
here = os.path.dirname(os.path.abspath(__file__))
at = lambda *names: os.path.join(here, *names)
names = open(at("encodings")).read().split() if os.path.exists(at("encodings")) else ["one", "two", "limited"]
if "help" in flags:
    print("usage: fake --model 4,4,128\nTrains with any of these encodings (--pos):")
    print("".join(f"  {name:13} says: what it is\n" for name in names))
    print("Sizes for --model: tiny 6,8,512; small 12,12,768\n\n  --sample_every  -s  samples")
    print("\ncommit abc, float32, CPU, compiler 1")
    sys.exit(0)
if flags.get("pos", "").startswith("unknown") or "flub" in flags:
    print("error: expected another flag", file=sys.stderr)
    sys.exit(2)
if "check" in flags:
    sys.exit(0)
environment = {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY")}
def note(what):
    with open(at("calls.jsonl"), "a") as f:
        f.write(json.dumps({"what": what, "pid": os.getpid(), "environment": environment, "flags": flags}) + "\n")
def wait_for(path):
    end = time.time() + 100
    while not os.path.exists(path) and time.time() < end:
        time.sleep(0.02)
note("start")
out = flags["out"]
os.makedirs(out, exist_ok=True)
if "eval_lengths" in flags:
    seed = int(flags["load"].rpartition("_")[2])
    with open(os.path.join(out, "log.jsonl"), "a") as f:
        for T in map(int, flags["eval_lengths"].split(",")) if "mute" not in flags["load"] else ():
            ppl = 10 + seed ** 2 + T / 64 + 100 * float(open(os.path.join(flags["load"], "lr")).read())
            stride = min(T, int(flags.get("stride", T)))
            if "limited" not in flags["load"] or T <= 64:
                ppl -= 1 - stride / T
                f.write(json.dumps({"kind": "extrapolation", "pos": "x", "T": T, "stride": stride, "ppl": ppl}) + "\n")
                if "measured" in flags["load"]:
                    f.write(json.dumps({"kind": "evaluation_speed", "pos": "x", "T": T, "ms": 3,
                                        "tok_per_s": 1000 * seed + T, "mem": 2e6 * seed + 4e5}) + "\n")
                if "token_losses" in flags:
                    header = json.dumps({"losses": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
                    with open(os.path.join(out, f"token_losses_{T}_{stride}.safetensors"), "wb") as losses:
                        losses.write(len(header).to_bytes(8, "little") + header + bytes(4))
                if "curve" in flags:
                    losses = [seed + 1 / (t + 1) for t in range(T)]
                    losses[1] = None
                    f.write(json.dumps({"kind": "curve", "pos": "x", "T": T, "stride": T, "loss": losses}) + "\n")
else:
    checkpoint = os.path.join(out, "steps")
    stopped = []
    how = signal.SIG_IGN if flags["pos"] == "deaf" else lambda *_: stopped.append(1)
    signal.signal(signal.SIGTERM, how)
    begin = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
    steps = int(flags["steps"])
    for step in range(begin, steps):
        print(f"step {step + 1}/{steps} | loss 2.5 | norm 1", flush=True)
        with open(os.path.join(out, "log.jsonl"), "a") as f:
            f.write(json.dumps({"kind": "train", "step": step, "loss": 2.5}) + "\n")
        if flags["pos"] == "fails" and step == 1:
            print("x" * 3_000_000 + "\nout of luck", flush=True)
            sys.exit(3)
        if flags["pos"] in ("slow", "deaf") and step == 1 and not begin:
            open(at("running"), "a").close()
            end = time.time() + 100
            while not stopped and time.time() < end:
                time.sleep(0.02)
        if flags["pos"].startswith("pair"):             # continues when the other one of the pair is there too
            open(at(flags["pos"] + flags["seed"]), "a").close()
            for n in "12":
                wait_for(at(flags["pos"] + n))
        if stopped:
            with open(checkpoint, "w") as f:
                f.write(str(step + 1))
            sys.exit(75)
    with open(os.path.join(out, "lr"), "w") as f:           # a rate costs perplexity, but for the lowest one
        f.write(flags["lr"] if float(flags["lr"]) > 1e-3 else "0")
    if flags["val_every"] != "0":
        with open(os.path.join(out, "log.jsonl"), "a") as f:
            f.write(json.dumps({"kind": "val", "step": steps, "loss": abs(float(flags["lr"]) - 3e-3),
                                "dead_heads": int(flags["seed"]) / 8}) + "\n")
note("end")
'''


def lines(text):
    """the records of a log"""
    return [json.loads(line) for line in text.splitlines()]


class Fake(Folder):
    def setUp(self):
        super().setUp()
        self.fake = self.executable("fake", f"#!{sys.executable} -SE\n{FAKE}")
        self.write("no/matplotlib.py", "raise ImportError('no matplotlib here')")    # its import takes a second

    def command(self, *words, seeds="1 2", lengths="64", trainer=None):
        return [sys.executable, os.path.join(SCRIPTS, "study.py"), "--seeds", *seeds.split(), "--lengths",
                *lengths.split(), "--models", "2,4,64", "--steps", "4", "--trainer", trainer or self.fake, "--out", "s",
                *words]

    def study(self, *words, code=0, env=None, **kwargs):
        r = subprocess.run(self.command(*words, **kwargs), cwd=self.folder, capture_output=True, text=True,
                           timeout=PATIENCE, env={**ENVIRONMENT, "PYTHONPATH": self.path("no"),
                                                 **(env or {})})
        self.assertEqual(r.returncode, code, r.stdout + r.stderr)
        self.assertNotIn("Traceback", r.stderr)
        return r

    def calls(self, what="start", of="train"):
        if not os.path.exists(self.path("calls.jsonl")):
            return []
        return [c for c in lines(self.read("calls.jsonl"))
                if c["what"] == what and ("eval_lengths" in c["flags"]) == (of == "evaluate")]


class TestForeignFiles(Fake):
    """what a script finds at the names of its outputs, and at names beside them that a temporary file could have"""
    def setUp(self):
        super().setUp()
        self.start(mock.patch.dict(sys.modules, matplotlib=None))       # plot.save() is tried by itself
        self.write("run/log.jsonl", '{"kind":"extrapolation","pos":"cable","T":8,"stride":8,"ppl":2}\n')
        self.write("run/step_00000002/state.json", json.dumps({"step": 2, "options": {
            "steps": 2, "total_batch": 8, "seed": 1, "pos": "cable", "train_files": "a.bin", "val_files": "b.bin"}}))
        self.write("run/step_00000002/config.json", '{"n_layer":1,"n_head":1,"n_embd":8,"n_positions":8}')
        self.write("b.txt", "text")
        self.write("ptxas.txt", "Compiling entry function 'a' for 'sm_80'\n0 bytes spill stores, 0 bytes spill loads\n"
                   "Used 9 registers")
        drawn = mock.Mock(savefig=lambda image, **_: image.write(b"png"))
        study_of = [*self.command("--encodings", "one", "--val_files", self.path("b.txt"), seeds="1")[2:], "--out"]
        self.scripts = (
            [study.main, *study_of, self.path("out")],
            (report.main, self.path("run"), "-o", self.path("out", "report")),
            (lambda argv: plot.save(drawn, *argv), self.path("out", "figure.png")),
            (ptxas_budget.main, self.path("ptxas.txt"), "--update", "--budget", self.path("out", "ptxas.json")),
            (lambda argv: console.append(*argv), self.path("out", "events"), "line\n"),
            (lambda argv: ledger.add(*argv, [{"a": 1}], "a"), self.path("out", "rows.csv")))

    def outputs(self):
        """the names of what the scripts write themselves; the rest is the trainer's"""
        found = glob.glob(self.path("out", "**"), recursive=True)
        return sorted(p for p in found if os.path.isfile(p) and not re.search(r"/(log.jsonl|lr|steps|token_.*)$", p))

    def run_all(self):
        """[(exit code, what is said)] of the scripts; none ends with a traceback"""
        return [(code, out + err) for main, *args in self.scripts for code, out, err in [called(main, *args)]]

    def test_survive(self):
        self.assertEqual([code for code, _ in self.run_all()], [0] * len(self.scripts))
        names = self.outputs()
        self.assertGreater(len(names), 12)
        self.write("foreign", "a user's")
        for name in names:
            for beside in (name + ".tmp", f"{os.path.dirname(name)}/.tmp-{os.path.basename(name)}"):
                os.symlink(self.path("foreign"), beside)
        for n, name in enumerate(names):
            shutil.copytree(self.path("out"), self.path("kept"), symlinks=True)
            os.remove(name)
            os.symlink(target := self.path(("foreign", "nowhere")[n % 2]), name)
            for marker in glob.glob(self.path("out", "**", "*.done"), recursive=True):
                if not os.path.islink(marker):
                    os.remove(marker)                                   # so that all runs again
            codes, said = zip(*self.run_all())
            self.assertRegex("".join(said), f"{re.escape(name)}: .*expected .*, got|{re.escape(name)}: expected a ")
            self.assertTrue({*codes} & {1, 2}, name)
            self.assertEqual((self.read("foreign"), os.readlink(name)), ("a user's", target))
            self.assertFalse(os.path.lexists(self.path("nowhere")))
            shutil.rmtree(self.path("out"))
            os.rename(self.path("kept"), self.path("out"))
        self.assertEqual([code for code, _ in self.run_all()], [0] * len(self.scripts))
        self.assertEqual({os.readlink(p) for p in glob.glob(self.path("out", "**", "*.tmp"), recursive=True)},
                         {self.path("foreign")})
        strange = f"{self.path('b')}\n\\input{{x}}\x85\u2028.txt"
        os.rename(self.path("b.txt"), strange)
        self.assertEqual(called(*(strange if word == self.path("b.txt") else word for word in self.scripts[0]))[0], 0)
        comment = rf"b\x0a\\input{{x}}\xc2\x85\xe2\x80\xa8.txt' --out {self.path('out')}"
        for name, comments, begin in (("study.tex", "%", "\\begin"), ("study.csv", "#", "model,"),
                                      ("study.md", "", "")):
            first, second = self.read("out", name).splitlines()[:2] if comments else ["", ""]
            self.assertEqual((first[:1], second[:len(begin)]), (comments, begin), name)
            self.assertIn(comment, self.read("out", name))
        own = self.write("out/2x4x64/two-T64/seed_1/settings.json", '{"editor.tabSize": 4}\n')
        self.scripts[0][self.scripts[0].index("one")] = "two"
        code, _, said = called(*self.scripts[0])
        self.assertEqual((code, said.count("\n"), read(own)), (2, 1, '{"editor.tabSize": 4}\n'))
        self.assertIn(f"study.py: {own}: title: expected a text, as study.py writes it (move this file, or ", said)


class TestTable(Fake):
    def test_mean_deviation_and_count(self):
        r = self.study("--encodings", "one", "limited", "--eval_lengths", "64 128", "--val_files", "x/b.txt",
                       "--eval_tokens", "999", seeds="1 2 4")
        of = lambda T: [10 + seed ** 2 + T / 64 for seed in (1, 2, 4)]
        rows = {(row["encoding"], int(row["T"])): row for row in self.table("s", "study_means.csv")}
        self.assertEqual(set(rows), {("one", 64), ("one", 128), ("limited", 64)})
        command, head, first, *_ = self.read("s", "study.csv").split("\n")
        self.assertRegex(command, fr"^# commit {re.escape(ledger.commit())}: scripts/study.py --seeds 1 2 4 .* limited")
        self.assertEqual(head, "model,trained_at,encoding,lr,seed,T,what,positions,value,commit")
        self.assertEqual(first, f'"2,4,64",64,one,1e-3,1,64,ppl,,12.0,{ledger.commit()}')
        by_seed = [(row["encoding"], int(row["T"]), int(row["seed"]), float(row["value"]))
                   for row in self.table("s", "study.csv")]
        self.assertEqual(by_seed, [(pos, T, seed, 10 + seed ** 2 + T / 64) for seed in (1, 2, 4)
                                   for pos, T in (("one", 64), ("one", 128), ("limited", 64))])
        for (pos, T), row in rows.items():
            mean = sum(of(T)) / 3
            deviation = math.sqrt(sum((v - mean) ** 2 for v in of(T)) / 2)      # of a sample: n - 1
            self.assertAlmostEqual(float(row["mean"]), mean, 4)
            self.assertAlmostEqual(float(row["std"]), deviation, 4)
            self.assertEqual((row["n"], row["model"], row["trained_at"]), ("3", "2,4,64", "64"))
        self.assertIn("| 64 | one | 18.00 ± 7.94 (3) | 19.00 ± 7.94 (3) |\n"
                      "| 64 | limited | 18.00 ± 7.94 (3) | - |\n", r.stdout)
        table = self.read("s", "study.md")
        self.assertIn(table, r.stdout)
        self.assertEqual(self.read("s", "study.tex").split("\n")[2:7], [
            r"\toprule", r"trained at & encoding & 64 & 128 \\", r"\midrule",
            r"64 & one & \textbf{18.00 $\pm$ 7.94 (3)} & \textbf{19.00 $\pm$ 7.94 (3)} \\",
            r"64 & limited & 18.00 $\pm$ 7.94 (3) & - \\"])
        self.assertIn("no figure: Python's module matplotlib is missing: ", r.stderr)
        self.assertIn(f"Commit {ledger.commit()}:\n\n    scripts/study.py --seeds 1 2 4 ", table)
        self.assertIn("Perplexity on b.txt at each length: mean ± standard deviation (number of seeds). Trained for 4 "
                      "steps of 512 tokens", table)
        self.assertEqual([c["flags"]["eval_tokens"] for c in self.calls(of="evaluate")], 6 * ["999"])
        # one seed has no deviation; a longer study trains only what is new
        self.study("--encodings", "one", "limited", "two", "--eval_lengths", "64", "--val_files", "c.txt", seeds="1")
        self.assertIn("| 64 | two | 12.00 (1) |", self.read("s", "study.md"))
        self.assertEqual(len(self.calls()), 7)

    def test_sliding_windows_and_positions(self):
        self.study("--encodings", "one", "limited", "--eval_lengths", "32", "64", "128")
        self.assertEqual(len(self.calls(of="evaluate")), 4)
        words = ("--encodings", "one", "limited", "--eval_lengths", "32", "64", "128", "--sliding", "48", "--positions")
        r = self.study(*words)
        # what there was stays valid: nothing is trained or evaluated twice
        self.assertEqual((len(self.calls()), len(self.calls(of="evaluate"))), (4, 4 + 2 * 4))
        flags = [c["flags"] for c in self.calls(of="evaluate")][4:]
        self.assertEqual({(f.get("stride"), f.get("curve"), f["eval_lengths"]) for f in flags},
                         {("48", None, "32,64,128"), (None, True, "64,128")})
        rows = {(row["encoding"], row["T"], row["what"], row["positions"]): row
                for row in self.table("s", "study_means.csv")}
        of = lambda pos, T, what="ppl", positions="": float(rows[pos, str(T), what, positions]["mean"])
        ppl = lambda T: 10 + (1 + 4) / 2 + T / 64
        self.assertAlmostEqual(of("one", 128), ppl(128), 4)
        self.assertAlmostEqual(of("one", 128, "ppl, stride 48"), ppl(128) - 1 + 48 / 128, 4)
        self.assertAlmostEqual(of("one", 32, "ppl, stride 48"), ppl(32), 4)
        loss = lambda ts: sum(1.5 + 1 / t for t in ts) / len(ts)
        for T, positions, ts in (64, "1", [1]), (64, "3-4", [3, 4]), (64, "33-64", range(33, 65)), (
                128, "65-128", range(65, 129)):
            self.assertAlmostEqual(of("one", T, "loss", positions), loss(ts), 5)
        self.assertNotIn(("one", "64", "loss", "2"), rows)                          # no token was scored there
        self.assertEqual({T for pos, T, _, _ in rows if pos == "limited"}, {"32", "64"})
        self.assertEqual(rows["one", "64", "loss", "1"]["n"], "2")
        table = self.read("s", "study.md")
        self.assertIn("| 64 | one | 13.00 ± 2.12 (2) | 13.25 ± 2.12 (2) | 13.88 ± 2.12 (2) |\n"
                      "| 64 | limited | 13.00 ± 2.12 (2) | 13.25 ± 2.12 (2) | - |\n", table)
        self.assertIn("windows of 64 tokens that do not overlap.\n\n"
                      "| trained at | encoding | 1 | 3-4 | 5-8 | 9-16 | 17-32 | 33-64 |\n", table)
        self.assertIn(table, r.stdout)
        # another stride is another evaluation, and without them the table is what it was
        self.study(*words[:-2], "32")
        self.assertEqual(len(self.calls(of="evaluate")), 12 + 4)
        self.study(*words[:-3])
        self.assertEqual((len(self.calls()), len(self.calls(of="evaluate"))), (4, 16))
        self.assertNotIn("apart", self.read("s", "study.md"))
        for wrong in ("--sliding", "128"), ("--sliding", "-1"), ("--sliding", "16", "--eval.stride", "16"):
            self.assertIn("--sliding", self.study(*words[:-3], *wrong, code=2).stderr)
        self.assertIn("expected no --eval.stride", self.study(*words[:-3], "--positions", "--eval.stride", "16",
                                                              code=2).stderr)

    def test_speed_and_memory(self):
        self.write("encodings", "one measured")
        self.study("--encodings", "one", "measured", "--eval_lengths", "64", "128", "--sliding", "32")
        self.assertIn("Tokens per second of the evaluations in the first table.\n\n"
                      "| trained at | encoding | 64 | 128 |\n|---|---|---|---|\n| 64 | one | - | - |\n"
                      "| 64 | measured | 1,564 ± 707 (2) | 1,628 ± 707 (2) |\n", self.read("s", "study.md"))
        self.assertIn("| 64 | measured | 3 ± 1 (2) | 3 ± 1 (2) |\n", self.read("s", "study.md"))
        rows = {(row["encoding"], row["T"], row["what"]): row for row in self.table("s", "study_means.csv")}
        self.assertEqual(float(rows["measured", "128", "tok_per_s"]["mean"]), 1628)
        self.assertEqual(float(rows["measured", "128", "mem"]["mean"]), 3.4e6)
        self.assertNotIn(("one", "64", "mem"), rows)
        self.study("--encodings", "one")
        self.assertNotIn("Memory", self.read("s", "study.md"))

    @staticmethod
    def rows(cells, what="ppl"):
        """of study.csv; cells: {(trained length, encoding): {T: [the value of each seed]}}"""
        return [{"model": "2,4,64", "trained_at": trained, "encoding": pos, "lr": "1", "seed": seed, "T": T,
                 "what": what, "positions": "", "value": value, "commit": "abc"}
                for (trained, pos), row in cells.items() for T, values in row.items()
                for seed, value in enumerate(values)]

    def test_figure(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("there is no matplotlib")
        values = {"alibi": [5.0, 7.0], "alibi:slopes=geometric": [4.0], "cable": [3.0, 3.5]}
        cells = {(T, pos): {64: v, 128: [x + 1 for x in v]} for T in (64, 128) for pos, v in values.items()}
        del cells[128, "cable"]
        sliding = self.rows({(64, "cable"): {64: [2.0], 128: [2.0, 3.0]}}, "ppl, stride 16")
        left, right = plot.draw_study(self.rows(cells) + sliding).axes
        self.assertEqual([[line.get_label() for line in ax.lines if len(line.get_xdata()) == 2 and
                           not line.get_label().startswith("_")] for ax in (left, right)],
                         [list(values), list(values)[:2]])
        dashed = [line for line in left.lines if line.get_linestyle() == "--" and len(line.get_xdata()) == 2]
        self.assertEqual([line.get_xydata().tolist() for line in dashed if line.get_xdata()[1] == 128],
                         [[[64, 2.0], [128, 2.5]]])
        self.assertEqual(list(left.lines[0].get_ydata()), [6.0, 7.0])
        edges = sorted({round(y, 3) for _, y in left.collections[0].get_paths()[0].vertices})
        deviation = math.sqrt(2)
        self.assertEqual((edges[0], edges[-1]), (round(6 - deviation, 3), round(7 + deviation, 3)))
        self.assertEqual(len({line.get_color() for line in left.lines if line.get_label() in values}), 3)
        of_length = {64: {"1": [9.0], "5-8": [9.0]}, 128: {"1": [5.0, 6.0], "5-8": [2.0]}}
        rows = [{**row, "positions": positions} for pos, of in (("one", of_length), ("two", {128: {"1": [99.0],
                                                                                                  "5-8": [2.5]}}))
                for T, at in of.items() for positions, losses in at.items()
                for row in self.rows({(64, pos): {T: losses}}, "loss")]
        fig = plot.draw_positions(rows)
        axes = fig.axes[0]
        line, = (line for line in axes.lines if line.get_label() == "one")
        self.assertEqual(line.get_xydata().tolist(), [[1.0, 5.5], [math.sqrt(40), 2.0]])   # of the longest windows
        band = {round(y, 3) for _, y in axes.collections[0].get_paths()[0].vertices}
        self.assertEqual(band, {2.0, round(5.5 - math.sqrt(0.5), 3), round(5.5 + math.sqrt(0.5), 3)})
        fig.canvas.draw()
        note, = (text.get_window_extent() for text in axes.texts if "cut off" in text.get_text())
        self.assertFalse(note.overlaps(axes.title.get_window_extent()))

    def test_figures_are_drawn_again_from_the_csv(self):
        """also of the CSVs in dev/results; each figure says in its metadata where it is from"""
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("there is no matplotlib")
        self.study("--encodings", "one", "two", "--positions", "--eval_lengths", "64", "128", env={"PYTHONPATH": ""})
        for name in "study", "study_positions":
            for form, start in (".png", b"\x89PNG"), (".pdf", b"%PDF"):
                image = read_bytes(self.path("s", name + form))
                self.assertEqual(image[:4], start)
                self.assertIn(f"commit {ledger.commit()}: scripts/study.py --seeds 1 2 --lengths".encode(), image)
        os.chdir(self.folder)
        for words in (("study", "s/study.csv"), ("positions", "s/study.csv"),
                      *(("study", path) for path in glob.glob(os.path.join(ROOT, "dev", "results", "study_*.csv"))
                        if not path.endswith("_differences.csv"))):
            self.assertEqual(called(plot.main, *words, "-o", self.path("again.png"))[0], 0, words)
            self.assertIn(b"scripts/study.py --", read_bytes(self.path("again.png")))
        text = self.read("s", "study.csv")
        last = text.splitlines()[-1]
        value = last.split(",")[-2]
        for row, says in ((last, "got line "), (last.replace(f",{value},", ",,"), "value: expected a number of at"),
                          (last.replace(f",{value},", ",-1,"), "value: expected a number of at least 0, got -1")):
            edited = self.write("edited.csv", text + row + "\n")
            self.assertIn(says, called(plot.main, "study", edited)[2])
        self.write("edited.csv", text.encode().replace(b"commit", b"\xff", 1))
        self.assertEqual(called(plot.main, "study", edited)[0], 0)
        self.assertIn("(--positions), got none", called(
            plot.main, "positions", os.path.join(ROOT, "dev", "results", "study_layers.csv"))[2])

    def test_nothing_finished_is_no_table(self):
        args = study.parse(["--models", "2,4,64", "--trainer", self.fake, "--steps", "1", "--encodings", "one",
                            "--lengths", "64", "--out", self.path("s")])
        study.resolve(args)
        study.write_results(args, study.jobs_of(args))
        self.assertFalse(glob.glob(self.path("s", "study*")))

    def test_the_best_learning_rate_counts(self):
        words = ("--encodings", "one", "--lr", "1e-3", "4e-3", "9e-3", "--eval_lengths", "64")
        self.study(*words[:4], "--eval_lengths", "64", "--val_every", "3", "--val_batches", "-1")
        self.study(*words, code=0)
        self.assertEqual(len(self.calls()), 6)                                      # the first rate was there
        self.assertEqual({c["flags"]["val_every"] for c in self.calls()[2:]}, {"1000000000"})
        table = self.read("s", "study.md")
        self.assertIn("| trained at | encoding | lr | 64 |\n|---|---|---|---|\n"
                      "| 64 | one | 4e-3 | 13.90 ± 2.12 (2) |\n", table)
        self.assertIn("| trained at | encoding | lr | dead heads (%) |\n|---|---|---|---|\n"
                      "| 64 | one | 4e-3 | 18.8 ± 8.8 (2) |\n", table)
        self.assertEqual({row["lr"] for row in self.table("s", "study_means.csv")}, {"4e-3"})
        self.assertEqual([row["lr"] for row in self.table("s", "study.csv") if row["what"] == "ppl"],
                         ["1e-3", "4e-3", "9e-3"] * 2)
        r = self.study(*words, "--val_every", "3", code=2)                          # on a part of the text
        self.assertIn("--val_batches: -1 there, default now: s/2x4x64/one-T64/seed_1 and 5 more", r.stderr)
        self.study("--encodings", "two", "--lr", "1e-3", "--eval_lengths", "64")
        r = self.study(*words, "--encodings", "two", code=2)
        self.assertIn("two-T64/seed_1 was trained without the validation by which learning rates", r.stderr)
        # a rate that fewer seeds have finished with does not count
        rows = self.rows({(64, "one"): {0: [3.0, 3.0]}}, "val")
        rows += [{**self.rows({(64, "one"): {0: [1.0]}}, "val")[0], "lr": "2"}]
        self.assertEqual(plot.best_rates(rows), {("2,4,64", 64, "one"): "1"})


class TestCompare(Fake):
    def setUp(self):
        super().setUp()
        self.numpy = console.need("numpy")
        try:
            console.need("scipy.stats")
        except console.BadInput as e:
            self.skipTest(str(e))

    def differences(self, random, seeds, windows, of_seed, of_window):
        """means 0; the differences of a seed and of a window have these deviations"""
        d = random.normal(0, of_seed, (seeds, 1)) + random.normal(0, of_window, (1, windows))
        return d + random.normal(0, of_window / 2, (seeds, windows))

    def test_the_figure_has_the_differences_of_the_table(self):
        """those to the first encoding, with the table's intervals and with wider ones, of all of them at once"""
        random = self.numpy.random.default_rng(7)
        d = self.differences(random, 3, 50, 0.002, 0.01)
        (mean, low, high), (_, below, above) = compare.interval(d), compare.interval(d, 1 - 0.05 / 4)
        self.assertTrue(below < low < mean < high < above)
        # of three numbers: the quantile of t at 1 - 0.05 / 8, with two degrees of freedom, is 8.8602
        ends = compare.over_seeds([1.0, 2.0, 3.0], 1 - 0.05 / 4)
        self.assertAlmostEqual(float(ends[1]), 2 + 8.8602 / 3 ** 0.5, 3)
        cells = {(64, pos): {64: 3 * [value], 128: 3 * [value + 1]} for pos, value in
                 (("one", 3.0), ("two", 4.0), ("three", 5.0))}
        rows = TestTable.rows(cells)
        pair = lambda a, b, T, mean, wide: {"model": "2,4,64", "trained_at": 64, "encoding": a, "against": b, "T": T,
                                            "mean": mean, "low": mean - 0.1, "high": mean + 0.1,
                                            "low_all": wide and mean - wide, "high_all": wide and mean + wide}
        found = [pair("one", "two", 64, -0.5, 0.3), pair("one", "three", 128, 0.25, 0.3), pair("two", "three", 64, 1,
                                                                                             None)]
        perplexity, differences = plot.draw_study(rows, found).axes
        spans = [(line.get_ydata()[0], line.get_ydata()[-1]) for line in differences.lines]
        for expected in (0, 0), (-0.8, -0.2), (-0.6, -0.4), (-0.05, 0.55), (0.15, 0.35):
            self.assertTrue(any(self.numpy.allclose(expected, span) for span in spans), (expected, spans))
        self.assertNotIn((1, 1), spans)
        self.assertIn("each of 2 comparisons\nthin: 95 % for all of them at once (Bonferroni)",
                      differences.get_xlabel())
        self.assertIn("below 0 one is better", differences.get_ylabel())
        self.assertEqual(perplexity.get_legend().get_title().get_text(),
                         "band: ± the standard\ndeviation of 3 seeds")
        one, = plot.draw_study(rows, found[:1]).axes[1:]
        self.assertNotIn("Bonferroni", one.get_xlabel())
        self.assertEqual(len(plot.draw_study(rows, found[2:]).axes), 1)

    def test_an_interval_covers_the_truth(self):
        """in 60 studies, about as often as it says, whichever of seeds and windows differ more"""
        random = self.numpy.random.default_rng(5)
        for seeds, windows, of_seed, of_window in ((3, 40, 0.03, 0.01), (5, 30, 0.001, 0.05)):
            covered, narrow = 0, 0
            for _ in range(60):
                mean, low, high = compare.interval(self.differences(random, seeds, windows, of_seed, of_window))
                self.assertTrue(low <= mean <= high)
                covered += low <= 0 <= high
                narrow += high - low < 12 * (of_seed / seeds ** 0.5 + of_window / windows ** 0.5)
            # 57 are expected at 95 %; 50 is four deviations of a binomial distribution less
            self.assertGreaterEqual(covered, 50, (seeds, windows))
            self.assertGreaterEqual(narrow, 45, (seeds, windows))       # all numbers are no interval

    def test_verdicts(self):
        random = self.numpy.random.default_rng(6)
        noise = self.differences(random, 3, 50, 0.002, 0.01)
        text, better = compare.verdict("a", "b", 1024, noise - 0.05)
        self.assertRegex(text, r"^a - b at 1,024: -0\.0\d+ nats \[-0\.\d+, -0\.\d+\], 3 seeds, "
                         "50 windows: a is better$")
        for d, says, who in ((noise + 0.05, ": b is better", "b"), (noise - noise.mean(), ": undecided", None),
                             (noise[:2] - 0.05, "undecided, as fewer than 3 seeds", None)):
            text, better = compare.verdict("a", "b", 64, d)
            self.assertEqual((says in text, better), (True, who), text)
        with mock.patch.object(compare, "windows", lambda path, T: noise[0][:len(path)]), \
                self.assertRaisesRegex(compare.BadInput, "expected as many windows in each evaluation, got 3 and 4"):
            compare.differences("a", "b", 64, ["one", "two"], ["six", "four"])

    def test_refusals(self):
        for words, message in ((("--compare", "one"), "expected two or more"), (("--compare", "one", "2"), "one 2"),
                               (("--compare", "one", "two"), "--compare: expected at least 3 seeds, as fewer decide "
                                "nothing, got 2: give --seeds 1 2 3")):
            self.assertIn(message, self.study("--encodings", "one", "two", *words, code=2).stderr)
        self.write("none/scipy.py", "raise ImportError")
        self.assertIn("module scipy is missing", self.study(
            "--encodings", "one", "two", "--compare", "one", "two", seeds="1 2 3", code=2,
            env={"PYTHONPATH": self.path("none")}).stderr)
        self.assertEqual(self.calls(), [])                                          # before anything is trained
        # no losses, no difference; the rest of the study stands
        r = self.study("--encodings", "one", "two", "--eval_lengths", "64", "--compare", "one", "two", seeds="1 2 3")
        self.assertIn("expected a checkpoint", r.stdout)
        self.assertEqual([c["flags"].get("token_losses") for c in self.calls(of="evaluate")], 6 * [None, True])

    def test_the_best_and_what_cannot_be_told_from_it(self):
        cells = {("m", 64, pos): {64: [ppl], 128: [ppl]} for pos, ppl in (("a", 2.0), ("b", 1.0), ("c", 3.0))}
        cells["n", 64, "a"] = {64: [9.0]}
        mark = study.marks(cells, {("m", 64, 64, frozenset("ab")), ("m", 64, 64, frozenset("ac")),
                                   ("n", 64, 128, frozenset("ab"))})
        self.assertEqual([[mark(key, T, "x") for T in (64, 128)] for key in cells],
                         [[r"\underline{x}", "x"], [r"\textbf{x}"] * 2, ["x", "x"], [r"\textbf{x}", "x"]])


class TestQueue(Fake):
    def test_progress_of_an_evaluation(self):
        progress = runqueue.Progress(1000, False)
        progress.last = time.time() + 1000                                          # it is never due
        command = runqueue.Command("sliding", "x", {}, "", "x.done", 400, parts={64: 100, 128: 300})
        for text, done in (("evaluating at T = 64: 50%, ETA 9s\n", 50), ("evaluating at T = 128: 50%, ETA 9s\n", 250),
                           ("evaluating at T = 256: 50%, ETA 9s\n", 250)):
            progress.line(text, "one", command)
            self.assertEqual(progress.parts["one"], done)
        progress.last = 0
        with contextlib.redirect_stdout(io.StringIO()) as out:
            progress.line("evaluating at T = 128: 75%, ETA 9s\n", "one", command)
        self.assertRegex(out.getvalue(), r"\[ 32%, \d:\d\d left\] one: sliding at T = 128, 75%")

    def test_two_at_a_time_share_the_cores(self):
        # each of a pair waits until the other one runs
        with mock.patch.dict(os.environ):
            os.environ.pop("OMP_NUM_THREADS", None)
            self.assertEqual(len(runqueue.slots(2)), 2)
            cores = len(os.sched_getaffinity(0))
            self.assertEqual({e["OMP_NUM_THREADS"] for e in runqueue.slots(2)}, {str(max(1, cores // 2))})
            self.assertNotIn("OMP_NUM_THREADS", runqueue.slots(1)[0])
        r = self.study("--encodings", "pair", "--jobs", "2")
        self.assertIn("done: 2 of 2 runs", r.stdout)
        self.assertRegex(r.stdout, r"\[100%, 0:00 left\] pair, T 64, seed [12]: done in ")
        self.assertEqual({c["environment"]["OMP_WAIT_POLICY"] for c in self.calls()}, {"passive"})

    def test_a_gpu_for_each(self):
        trainer = self.path("fakecu")
        os.symlink(self.fake, trainer)
        self.study("--encodings", "pair", trainer=trainer, env={"CUDA_VISIBLE_DEVICES": "4,7"})
        calls = self.calls()
        self.assertEqual(sorted(c["environment"]["CUDA_VISIBLE_DEVICES"] for c in calls), ["4", "7"])
        r = self.study("--encodings", "one", "--jobs", "3", trainer=trainer, code=2,
                       env={"CUDA_VISIBLE_DEVICES": "4,7"})
        self.assertIn("expected at most 2 GPUs", r.stderr)
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="1,3,5,7"):
            self.assertNotIn("CUDA_VISIBLE_DEVICES", runqueue.slots(1, "xcu", 16)[0])    # with MPI on several machines
            self.assertEqual([e["CUDA_VISIBLE_DEVICES"] for e in runqueue.slots(2, "'a xcu'", 2)], ["1,3", "5,7"])

    def test_what_is_finished_is_skipped(self):
        self.study("--encodings", "one", "two", lengths="32 64")
        self.assertEqual((len(self.calls()), len(self.calls(of="evaluate"))), (8, 8))
        r = self.study("--encodings", "one", "two", lengths="32 64")
        self.assertEqual((len(self.calls()), len(self.calls(of="evaluate"))), (8, 8))
        self.assertIn("| 32 | two | 13.00 ± 2.12 (2) |", r.stdout)
        # other evaluations of the same models
        self.study("--encodings", "one", "two", "--eval_lengths", "640", "--eval.stride", "16", lengths="32 64")
        self.assertEqual((len(self.calls()), len(self.calls(of="evaluate"))), (8, 16))
        self.assertEqual(self.calls(of="evaluate")[-1]["flags"]["stride"], "16")
        self.assertIn("| trained at | encoding | 640 |\n", self.read("s", "study.md"))

    def test_other_settings_are_refused(self):
        self.study("--encodings", "one", "--lr", "1e-3")
        before = len(self.calls())
        r = self.study("--encodings", "two", "one", "--lr", "2e-3", code=2)
        self.assertIn("--lr: 1e-3 there, 2e-3 now: s/2x4x64/one-T64/seed_1 and 1 more", r.stderr)
        self.assertEqual(len(self.calls()), before)                                 # nothing was started
        self.study("--encodings", "one", "--lr", "1e-3", "--val_every", "3")        # changes no result
        self.study("--encodings", "one", "--lr", "2e-3", "--allow_change", "lr")
        r = self.study("--encodings", "unknown", "--flub", "3", code=2)
        self.assertIn("there will be no figure: Python's module matplotlib is missing", r.stderr)   # before any run
        self.assertIn("nothing was started, because the trainer refuses:\n  unknown, T 64, seed 1: error: expected "
                      "another flag", r.stderr)

    def test_runs_of_other_texts_or_builds_are_refused(self):
        """under the names that they had, and before the seeds of a second call are trained on something else"""
        words = ("--encodings", "one", "--train_files", "a.txt", "--val_files", "b.txt", "--val_every", "3")
        for name in "a.txt", "b.txt":
            self.write(name, "a text")
        self.study(*words, seeds="1")
        gpu = self.executable("gpu", f"#!{sys.executable} -SE\n{FAKE}".replace("float32, CPU", "bf16, CUDA"))
        for change, more, says in (
                ("a.txt", (), r"--train_files, contents: \w{12} there, \w{12} now"),
                ("b.txt", (), r"--val_files, contents: \w{12} there, \w{12} now"),
                ("", ("--val_batches", "-1"), "--val_batches: default there, -1 now"),
                ("", ("--trainer", gpu), "--trainer: float32, CPU there, bf16, CUDA now")):
            if change:
                self.write(change, "another text")
            r = self.study(*words, *more, code=2)
            self.assertRegex(r.stderr, says + ": s/2x4x64/one-T64/seed_1\n")
            if change:
                self.write(change, "a text")
        self.assertEqual(len(self.calls()), 1)
        os.remove(self.path("a.txt"))                           # results outlive the text
        self.study(*words)
        self.write("a.txt", "another text")
        self.assertIn("train_files", self.study(*words, seeds="1", code=2).stderr)
        self.study(*words, "--allow_change", "train_files", seeds="1")
        self.assertEqual(len({runqueue.checksum(self.write("a", text), True) for text in (
            b"a" * 5_000_000, b"a" * 5_000_001, b"a" * 4_999_999 + b"b", b"b" + b"a" * 4_999_999, b"a", b"")}), 6)
        self.write("b.txt", "another text")                     # where no validation counts
        self.study(*words[:-2], "--allow_change", "train_files", seeds="1")

    def test_the_newest_checkpoint_identifies_a_run(self):
        seen = []
        for step in (10, 9, 20):
            self.write(f"step_{step:08d}/manifest.json", f'{{"step": {step}}}')
            seen.append(runqueue.weights_of(self.folder))
        self.assertEqual([a == b for a, b in zip(seen, seen[1:])], [True, False])
        self.assertEqual(seen[-1], runqueue.weights_of(self.path("step_00000020")))

    def test_what_is_not_there_is_no_change(self):
        """a trainer and a text that are missing when a run is called again, and there at the call after that"""
        self.write("a.txt", "a text")
        self.write("o/log.jsonl", "")
        there = runqueue.Command("train", self.fake, {"train_files": self.path("a.txt"), "resume": "1"}, self.path("o"),
                                 self.path("o", "train.done"), 1)
        settings = json.dumps({**runqueue.settings_of(there), "given": runqueue.given_to(there)})
        self.write("o/settings.json", settings)
        os.rename(self.path("a.txt"), self.path("b.txt"))
        gone = [runqueue.Job("one", "", [there._replace(program=self.path("train_gone"))])]
        code, _, err = called(lambda argv: runqueue.Queue("test", gone, [{}]).run())
        self.assertEqual((code, "train_gone: No such file or directory; build it" in err), (2, True), err)
        self.assertEqual(json.loads(self.read("o", "settings.json")), json.loads(settings))
        os.rename(self.path("b.txt"), self.path("a.txt"))
        runqueue.refuse_changes([runqueue.Job("one", "", [there])])
        self.write("a.txt", "another text")
        with self.assertRaisesRegex(console.BadInput, "--train_files, contents: .* there, .* now"):
            runqueue.refuse_changes([runqueue.Job("one", "", [there])])

    def test_a_failure_does_not_lose_the_others(self):
        r = self.study("--encodings", "fails", "one", "two", code=3)
        self.assertIn("done: 4 of 6 runs", r.stdout)
        for seed in (1, 2):
            self.assertIn(f"fails, T 64, seed {seed}: train ended with exit code 3; s/2x4x64/fails-T64/seed_{seed}/"
                          "output.log ends with\n    step 1/4 | loss 2.5 | norm 1\n    step 2/4 | loss 2.5 | norm 1\n"
                          f"    {'x' * 499}\n    out of luck\n", r.stderr)
        self.assertIn("| 64 | fails | - | - | - |\n| 64 | one | 13.50 ± 2.12 (2) |", r.stdout)
        self.assertEqual(len(self.calls(of="evaluate")), 4)
        self.assertIn("run the same command again", r.stderr)

    def test_deep_json_is_not_an_object(self):
        self.assertEqual(runqueue.read_object(self.write("train.done", "[" * 100_000)), {})
        path = self.write("data/manifest.json", "[" * 100_000)
        self.assertFalse(runqueue.has_data(os.path.relpath(path, ROOT)))

    def test_an_evaluation_without_its_record_is_not_done(self):
        """when the trainer says that all is well and wrote nothing"""
        r = self.study("--encodings", "mute", seeds="1", code=1)
        self.assertIn("done: 0 of 1 runs", r.stdout)
        self.assertIn("evaluate left no record: s/2x4x64/mute-T64/seed_1/eval/", r.stderr)

    def test_done_means_its_records(self):
        """what an evaluation was given and what it has left are as they were, or it runs again"""
        words = ("--encodings", "one", "--eval_lengths", "64", "128", "--val_files", "b_val.txt")
        self.write("b_val.txt", "a text")
        self.study(*words, seeds="1")
        path = "s/2x4x64/one-T64/seed_1/eval/b/log.jsonl"
        good, table, runs = self.read(path), self.read("s", "study.md"), 1
        first, second = good.splitlines(keepends=True)
        for damaged in ("", first, first + second[:-9], good + first, good.replace("12.0", "13.0"), second + first):
            self.write(path, damaged)
            self.study(*words, seeds="1")
            runs += 1
            self.assertEqual((len(self.calls(of="evaluate")), self.read(path)), (runs, good), damaged)
        for name in "b_val.txt", "s/2x4x64/one-T64/seed_1/step_00000004/manifest.json":     # another text and model
            self.write(name, "rewritten")
            for _ in range(2):
                self.study(*words, seeds="1")
            runs += 1
            self.assertEqual(len(self.calls(of="evaluate")), runs, name)
        os.remove(self.path("b_val.txt"))                       # results outlive the text
        self.study(*words, "--eval.stride", "16", seeds="1")
        self.assertIn("11.25 (1)", self.read("s", "study.md"))
        self.study(*words, seeds="1")
        self.assertEqual((len(self.calls(of="evaluate")), self.read("s", "study.md")), (runs + 2, table))
        self.study(*words, seeds="1")
        self.assertEqual((len(self.calls(of="evaluate")), len(self.calls())), (runs + 2, 1))

    def interrupted(self, how, *words):
        """the output of a study that is sent how(process) while the run `slow` or `deaf` is running"""
        p = subprocess.Popen(self.command(*words, seeds="1"), cwd=self.folder, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))   # nohup ignores it
        end = time.time() + PATIENCE
        while not os.path.exists(self.path("running")) and time.time() < end:
            time.sleep(0.02)
        how(p)
        out, err = p.communicate(timeout=PATIENCE)
        return p.returncode, out, err

    def test_no_command_outlives_a_log_that_cannot_be_written(self):
        os.makedirs(self.path("o"))
        os.symlink("/dev/full", self.path("o", "output.log"))
        said = self.write("says", f"echo $$ > {self.path('pid')}\nprintf '%20000s\\n' x\nexec sleep 100\n")
        command = runqueue.Command("train", f"sh {said}", {}, self.path("o"), self.path("o", "train.done"), 1)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            self.assertEqual(runqueue.Queue("queue", [runqueue.Job("one", "", [command])], [{}]).run(), 1)
        self.assertIn("queue: one: [Errno 28] No space left on device", err.getvalue())
        self.assertRaises(ProcessLookupError, os.kill, int(self.read("pid")), 0)

    def test_a_command_has_a_process_group_of_its_own_in_this_session(self):
        say = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getsid(0)} {os.getpgrp() == os.getpid()}')"
        command = runqueue.Command("say", shlex.join([sys.executable, "-c", say, self.path("said")]), {}, "",
                                   self.path("said"), 1)
        code = called(lambda argv: runqueue.Queue("test", [runqueue.Job("one", "", [command])], [{}]).run())[0]
        self.assertEqual((code, self.read("said")), (0, f"{os.getsid(0)} True"))

    def test_a_console_that_is_gone_or_full_ends_no_run(self):
        for out, where, code in (("a", "| head -1; exit ${PIPESTATUS[0]}", 3), ("b", "> /dev/full", 2)):
            words = shlex.join(self.command("--encodings", "fails", "one", "two", "--out", out))
            r = subprocess.run(["bash", "-c", f"{words} {where}"], cwd=self.folder, capture_output=True, text=True,
                               timeout=PATIENCE, env={**ENVIRONMENT, "PYTHONPATH": self.path("no")})
            self.assertEqual(r.returncode, code, r.stderr)
            self.assertNotIn("Traceback", r.stderr)
            self.assertEqual({(row["encoding"], row["seed"]) for row in self.table(out, "study.csv")},
                             {(pos, seed) for pos in ("one", "two") for seed in "12"})

    def test_a_log_has_what_the_locale_cannot_write(self):
        said = self.write("says", "echo \u00fc\n")
        code = (f"import sys; sys.path.insert(0, {SCRIPTS!r}); from runqueue import Command, Job, Queue\n"
                f"Queue('q', [Job('one', '', [Command('x', 'sh {said}', {{}}, 'o', 'o/x.done', 1)])], [{{}}]).run()")
        r = subprocess.run([sys.executable, "-c", code], cwd=self.folder, capture_output=True, text=True, env={
            **os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
        self.assertIn("done: 1 of 1 runs", r.stdout, r.stderr)
        self.assertEqual(read(self.path("o", "output.log")), "\u00fc\n")

    def test_ctrl_c_and_resume(self):
        ways = (lambda p: os.killpg(p.pid, signal.SIGINT), lambda p: p.send_signal(signal.SIGTERM),
                lambda p: p.send_signal(signal.SIGHUP))
        for n, how in enumerate(ways):
            words = ("--encodings", "slow", "one", "--out", f"s{n}")
            code, out, err = self.interrupted(how, *words)
            os.remove(self.path("running"))
            self.assertEqual(code, 75, out + err)
            self.assertIn("stopping 1 runs with a checkpoint", err)
            self.assertIn("run the same command again to continue", err)
            self.assertIn("stopped: 0 of 2 runs", out)
            self.assertNotIn("FAILED", out)
            self.assertEqual(self.read(f"s{n}", "2x4x64", "slow-T64", "seed_1", "steps"), "2")
            self.assertFalse(os.path.exists(self.path(f"s{n}", "study.md")))
            self.study(*words, seeds="1")
            log = lines(self.read(f"s{n}", "2x4x64", "slow-T64", "seed_1", "log.jsonl"))
            self.assertEqual([r["step"] for r in log], [0, 1, 2, 3])                # each step once

    def test_a_second_ctrl_c_ends_at_once(self):
        def twice(p):
            p.send_signal(signal.SIGINT)
            for line in p.stderr:
                if "stopping 1 runs" in line:
                    break
            p.send_signal(signal.SIGINT)
        code, out, err = self.interrupted(twice, "--encodings", "deaf")
        self.assertEqual(code, 75, out + err)
        self.assertEqual(len(self.calls("end")), 0)
        pid = self.calls()[0]["pid"]
        self.assertRaises(ProcessLookupError, os.kill, pid, 0)

    def test_shared_data_is_made_once_and_its_failure_is_everyones(self):
        make = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"a\").write(\"x\"); sys.exit(int(sys.argv[2]))'"

        def queue(name, code):
            data = runqueue.Command("data", f"{make} {self.path(name)} {code}", {}, "", self.path(name + "*"), 0)
            own = [runqueue.Command("train", f"{make} {self.path('own')} 0", {}, self.path(n), self.path(n, "t.done"),
                                    1) for n in "abc"]
            jobs = [runqueue.Job(c.out[-1], "", [data, c]) for c in own]
            code, _, err = called(lambda argv: runqueue.Queue("test", jobs, runqueue.slots(3)).run())
            return code, err
        self.assertEqual(queue("good", 0), (0, ""))
        self.assertEqual((self.read("good"), self.read("own")), ("x", "xxx"))
        with mock.patch.object(runqueue, "has_data", lambda _: False):
            code, err = queue("bad", 4)
        self.assertEqual((code, self.read("bad")), (4, "x"))
        self.assertEqual((err.count("data failed for"), err.count("exit code 4")), (2, 1))


class TestWords(Fake):
    def parsed(self, *words):
        args = study.parse([*words, "--models", "2,4,64", "--trainer", self.fake])
        study.resolve(args)
        return args

    def test_all_comes_from_the_trainer(self):
        dry = lambda: [re.search(r"--pos (\S+)", line)[1] for line in
                       self.study("--encodings", "two:k=1", "all", "--dry_run", seeds="1").stdout.splitlines()[::2]]
        self.assertEqual(dry(), ["two:k=1", "one", "two", "limited"])
        self.write("encodings", "one two limited just_added")
        self.assertEqual(dry(), ["two:k=1", "one", "two", "limited", "just_added"])
        self.write("encodings", "")
        self.assertIn("expected a list of encodings", self.study("--encodings", "all", code=2).stderr)

    def test_no_two_runs_share_a_directory(self):
        words = ("--encodings", "one", "one:a=1", "one:a=2,b=3", "rope+cable_nw", "--lengths", "64", "128", "256",
                 "--seeds", "1", "2")
        args = self.parsed(*words)
        args.models = ["tiny", "2,4,64", "6,8,512"]
        jobs = study.jobs_of(args)
        self.assertEqual(len({c.out for job in jobs.values() for c in job.commands}), 2 * 4 * 3 * 2 * 3)
        args.encodings.append("one-a=1")
        self.assertRaisesRegex(study.BadInput, "two runs would share", study.jobs_of, args)

    def test_what_a_run_costs_depends_on_its_vocabulary(self):
        run, of = study.Run("one", 1, 8, "1,2,32", "1"), {}
        for name in ("a.txt", "a.bin"):
            args = argparse.Namespace(sizes={}, flags={"train_files": name})
            of[name] = study.flops(run, args, tokens=100, T=8, passes=3)
        self.assertEqual(of["a.bin"] - of["a.txt"], 3 * 100 * 2 * 32 * (50304 - 256))

    def test_each_length_sees_as_many_tokens(self):
        args = self.parsed("--encodings", "one", "--lengths", "64", "128", "256", "--B", "6")
        flags = [job.commands[0].flags for job in study.jobs_of(args).values()]
        self.assertEqual([(f["total_batch"], f["T"], f["B"]) for f in flags],
                         [("1536", "64", "24"), ("1536", "128", "12"), ("1536", "256", "6")])
        odd = ("--encodings", "one", "--lengths", "64", "96", "--total_batch", "960")
        self.assertRaisesRegex(study.BadInput, "total_batch 256: .* multiple of every length, got --lengths 96",
                               self.parsed, *odd[:4], "--lengths", "96", "64", "--total_batch", "256")
        self.assertEqual(self.parsed(*odd[:3], "96", "--total_batch", "960").flags["B"], "8")

    def test_flags_as_the_trainers_take_them(self):
        self.study("--encodings", "one", "--val_files=x/b.txt", "--lr=2e-3", "--eval.stride=16", seeds="1")
        flags = [c["flags"] for c in self.calls() + self.calls(of="evaluate")]
        self.assertEqual([f["val_files"] for f in flags], 2 * ["x/b.txt"])
        self.assertEqual((flags[0]["lr"], flags[1]["stride"]), ("2e-3", "16"))
        self.assertEqual(runqueue.flags_of(["--a=b=c", "--d", "--e", "-1", "--f="]),
                         {"a": "b=c", "d": None, "e": "-1", "f": ""})
        self.assertRaisesRegex(runqueue.BadInput, "--a: is given twice", runqueue.flags_of, ["--a", "1", "--a=2"])
        self.assertEqual(runqueue.encodings_of("a,b:c=1,d=2,e+f:g=1e+3,h=2,i"),
                         ["a", "b:c=1,d=2", "e+f:g=1e+3,h=2", "i"])

    def test_refusals(self):
        for words, naming in ((("--seed", "3"), "--seed: expected --seeds"), (("--T=3",), "--T: expected --lengths"),
                              (("--pos", "one"), "--encodings"), (("--warmup", "1", "2"), "2: expected a flag"),
                              (("--trainer", self.path("nowhere")), "nowhere: No such file"),
                              (("--trainer", ""), "--trainer : No such file or directory; build it"),
                              (("--resume", "1"), "resumes by itself"), (("--jobs", "-1"), "expected at least 1")):
            r = self.study("--encodings", "one", *words, code=2)
            self.assertIn(naming, r.stderr)
        for words, naming in ((("--B", "x"), "--B: expected a number, got x"), (("--steps", "1e3"), "--steps"),
                              (("--total_batch", "q"), "--total_batch"), (("--eval_tokens", "-1"), "--eval_tokens"),
                              (("--eval.stride", "z"), "--eval.stride"), (("--B",), "--B: expected a number")):
            self.assertRaisesRegex(study.BadInput, naming, self.parsed, "--encodings", "one", "--lengths", "64", *words)
        words = ["--encodings", "one", "--models", "2,4,64", "--trainer", self.fake, "--lengths"]
        self.assertEqual(study.parse([*words, "1"]).eval_lengths, [1, 2, 4])
        self.assertRaisesRegex(study.BadInput, "expected positive numbers", study.parse, [*words, "0"])
        for model in ("huge", "1,2", "1,2,x"):
            args = study.parse(["--encodings", "one", "--lengths", "64", "--models", model, "--trainer", self.fake])
            self.assertRaisesRegex(study.BadInput, "--models: expected L,NH,C or one of tiny, small, got " + model,
                                   study.resolve, args)
        self.assertEqual(self.calls(), [])

    def test_flags_that_a_run_may_change_are_the_trainers(self):
        rows = re.findall(r"X\([\w:]+, (\w+), .*?, (FREE|SAME),", read("llmc/engine/flags.h"))
        free = {name for name, on_resume in rows if on_resume == "FREE"}
        self.assertLessEqual(set(runqueue.FREE), free)


class TestPaper(unittest.TestCase):
    def dry(self, *words):
        code, out, err = called(paper.main, *words, "--dry_run")
        self.assertEqual(code, 0, err)
        return [line for line in out.splitlines() if "--train_files" in line]

    def test_lengths_and_sizes_have_directories_of_their_own(self):
        lines = [line for experiment, *settings in (("quick",), ("small",), ("quick", "T=64"), ("quick", "T=256"),
                                                    ("quick", "model=4,4,128"), ("quick", "model=4,4,128", "T=256"),
                                                    ("table1", "T=512"), ("table1",))
                 for line in self.dry(experiment, "cable", *(w for s in settings for w in ("--set", s)),
                                      *["medium"] * (experiment == "table1"))]
        runs = collections.defaultdict(set)
        for line in lines:
            flag = lambda name: re.search(rf"--{name} (\S+)", line)[1]
            runs[flag("out")].add((flag("model"), flag("T")))
        self.assertEqual([len(shapes) for shapes in runs.values()], [1] * len(runs))
        self.assertEqual(len(runs), 4 * 2 + 3 + 2)     # the last of quick's has the model and the length of small

    @unittest.skipUnless(os.path.exists(TRAINER), "the trainer is not built")
    def test_any_encoding_of_the_trainers_is_a_row(self):
        pos = lambda *words: re.findall(r"--pos (\S+)", "\n".join(self.dry(*words, "--trainer", TRAINER)))
        self.assertEqual(pos("quick", "fox", "--seeds", "1"), ["fox"])
        self.assertEqual(pos("quick", "fox", "rope", "kcable:weight=inside", "--seeds", "1"),
                         ["rope", "fox", "kcable:weight=inside"])
        self.assertEqual(pos("table1", "medium", "none"), ["none"])
        self.assertNotIn("none", pos("table1", "medium"))
        self.assertRaisesRegex(runqueue.BadInput, "no such row", paper.main,
                               ["quick", "foxy", "--dry_run", "--trainer", TRAINER])


@unittest.skipUnless(os.path.exists(TRAINER), "the trainer is not built")
class TestTrainer(Folder):
    def test_all_encodings_are_the_rows_of_the_table(self):
        rows = re.findall(r'^    X\((\w+), +\w+, +"', read("llmc/position/table.h"), re.M)
        for trainer in (TRAINER, BERT_TRAINER):
            if os.path.exists(trainer):
                text = runqueue.help_of(trainer)
                self.assertEqual(console.encodings(text), rows)
                self.assertRegex(text, r"\btiny \d+,\d+,\d+")

    def check_differences(self, listed):
        """the CSV has the numbers of the list; plot.py draws them again, but not beside another study"""
        found_again = plot.read_differences(self.path("s", "study.csv"))
        self.assertEqual([f"{row['encoding']} - {row['against']} at {row['T']}: {row['mean']:+.4f} nats "
                          f"[{row['low']:+.4f}, {row['high']:+.4f}]" for row in found_again],
                         listed)
        self.assertTrue(all(row["low_all"] < row["low"] < row["high"] < row["high_all"] for row in found_again))
        self.write("other.csv", "# another study\n" + self.read("s", "study.csv").partition("\n")[2])
        self.write("other_differences.csv", self.read("s", "study_differences.csv"))
        self.assertEqual((len(found_again), plot.read_differences(self.path("other.csv"))), (6, []))

    def test_a_study(self):
        text = "".join(f"line {n} of a text, {n * n} its square.\n" for n in range(400))
        command = [sys.executable, os.path.join(SCRIPTS, "study.py"), "--encodings", "cable", "learned", "fox",
                   "--seeds", "1", "2", "3", "--lengths", "8", "16", "--models", "1,2,32", "--eval_lengths", "8",
                   "16,32", "--sliding", "4", "--positions", "--eval_tokens", "200", "--steps", "5", "--train_files",
                   self.write("a.txt", text), "--val_files", self.write("b_val.txt", text[:3000]), "--trainer",
                   TRAINER, "--out", self.path("s"), "--jobs", "2", "--compare", "cable", "fox"]
        # a length that the text does not have is refused before anything is trained
        r = subprocess.run([*command, "--eval_lengths", "8", "3000"], capture_output=True, text=True, env=ENVIRONMENT)
        self.assertIn("b_val.txt': expected at least 3001 tokens to evaluate at T = 3000, got 3000", r.stderr)
        self.assertEqual((r.returncode, os.path.exists(self.path("s"))), (2, False))
        r = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        rows, runs = self.table("s", "study_means.csv"), self.table("s", "study.csv")
        # learned has no positions beyond those it was trained with
        count = lambda what: sum(row["what"] == what for row in rows)
        self.assertEqual((count("ppl"), count("ppl, stride 4")), 2 * (2 * 2 * 3 + 1 + 2,))
        octaves = {8: 4, 16: 5, 32: 6}
        self.assertEqual(count("loss"), 2 * (octaves[8] + octaves[16] + 2 * octaves[32]) + octaves[8] + octaves[16])
        self.assertEqual((count("tok_per_s"), count("mem")), 2 * (count("ppl"),))
        self.assertEqual(({row["n"] for row in rows}, len(runs)), ({"3"}, 3 * len(rows)))
        self.assertEqual({row["commit"] for row in runs}, {ledger.commit()})
        values = []
        for seed in (1, 2, 3):
            log = lines(self.read("s", "1x2x32", "fox-T16", f"seed_{seed}", "eval", "b", "log.jsonl"))
            values += [record["ppl"] for record in log if record["kind"] == "extrapolation" and record["T"] == 32]
        of_32 = {row["what"] + row["positions"]: row for row in rows
                 if (row["encoding"], row["trained_at"], row["T"]) == ("fox", "16", "32")}
        found = of_32["ppl"]
        # 200 tokens are 25 whole windows of 8, so the difference is that of the evaluations' losses
        both = {}
        for pos, seed in itertools.product(("cable", "fox"), (1, 2, 3)):
            log = lines(self.read("s", "1x2x32", f"{pos}-T16", f"seed_{seed}", "eval", "b", "log.jsonl"))
            both.setdefault(pos, []).extend(r["loss"] for r in log if r["kind"] == "extrapolation" and r["T"] == 8)
        difference = (sum(both["cable"]) - sum(both["fox"])) / 3
        after = r.stdout[r.stdout.index("- 1,2,32, trained at 16; cable has "):]
        self.assertRegex(after, rf"cable - fox at 8: \{difference:+.4f} nats \[.*\], 3 seeds, 25 windows: ")
        self.check_differences(re.findall(r"  - (.*\])", r.stdout))
        # the octaves of a window's positions are all of it, but for the last window, which is cut short
        losses = [float(of_32["loss" + p]["mean"]) for p in ("1", "2", "3-4", "5-8", "9-16", "17-32")]
        mean = sum(n * loss for n, loss in zip((1, 1, 2, 4, 8, 16), losses)) / 32
        self.assertAlmostEqual(mean, math.log(float(found["mean"])), 1)
        self.assertAlmostEqual(float(found["mean"]), sum(values) / 3, 3)
        self.assertAlmostEqual(float(found["std"]), statistics.stdev(values), 3)
        tables, silent = report.gather(report.find_runs([self.path("s")]))
        table, _ = sorted((t for t in tables if t.ours), key=lambda t: t.key.metric)     # and that of sliding windows
        self.assertEqual((table.key.evaluated_on, table.values(("cable_v1", 16), 32), silent), ("b", values, []))
        if os.path.exists(self.path("s", "study.png")):
            self.assertEqual(read_bytes(self.path("s", "study.png"))[:8], b"\x89PNG\r\n\x1a\n")
            self.assertRegex(r.stdout, r"\nwrote .*study\.csv, .*study\.png, .*study\.pdf, .*study_positions\.pdf\n")
        else:
            self.assertIn("matplotlib", r.stderr)
        # the trainer's own view: a finished run that is started again has nothing to do
        again = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
        self.assertEqual((again.returncode, "done in" in again.stdout), (0, False), again.stdout + again.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
