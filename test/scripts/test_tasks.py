"""test_tasks.py -- data/tasks.py: known examples, what a row marks as the answer, and that example k is the same on
every machine; verify.py on its files; and that a small model learns to copy."""
import cmath
import functools
import hashlib
import importlib.util
import itertools
import math
import os
import re
import struct
import subprocess
import sys
import unittest
import unittest.mock

from folder import HAS_TRAINER, ROOT, TRAINER, Folder, called, ended, read_bytes
sys.path.insert(0, os.path.join(ROOT, "data"))
import common                   # noqa: E402
import tasks                    # noqa: E402
import verdict                  # noqa: E402


def read_rows(path):
    """(header, rows of ids)"""
    data = read_bytes(path)
    header = struct.unpack("<256i", data[:1024])
    ids = struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])
    return header, [ids[i:i + header[7]] for i in range(0, len(ids), header[7])]


def question_and_answer(row):
    """what a row says: the text up to the first '=', and the marked bytes"""
    text = bytes(i % tasks.ANSWER for i in row)
    return text[1:text.index(b"=")].decode(), bytes(i - tasks.ANSWER for i in row if i >= tasks.ANSWER).decode()


def solved(task, question):
    """the right answer, computed in another way than tasks.py computes it"""
    if task == "copy":
        return question
    if task == "reverse":
        return "".join(reversed(question))
    if task == "sort":
        return "".join(c * question.count(c) for c in tasks.LETTERS)
    if task == "parity":
        return "".join(str(question[:i + 1].count("1") % 2) for i in range(len(question)))
    if task == "modsum":
        return "".join(str(sum(map(int, question[:i + 1])) % 10) for i in range(len(question)))
    if task == "haystack":
        return question.strip(tasks.LETTERS)
    if task == "index":
        text, source, shift = re.fullmatch(r"([A-Za-z]+),([A-Za-z])([+-]\d\d)", question).groups()
        return text[text.index(source) + int(shift)]
    if task == "circle":                        # as a rotation by 40 degrees each
        turn = cmath.exp(2j * cmath.pi / 9)
        z = functools.reduce(lambda z, m: z * turn if m == "R" else z / turn, question, 1)
        return str(round(cmath.phase(z) / cmath.phase(turn)) % 9)
    if task == "line":                          # as a shift of the set of places
        at = [True] + [False] * 8
        for m in question:
            at = [False] + at[:7] + [at[7] or at[8]] if m == "R" else [at[0] or at[1]] + at[2:] + [False]
        return str(at.index(True))
    a, b = question.split("+")
    digits, carry = "", 0
    for x, y in zip(a, b):
        digits += str((int(x) + int(y) + carry) % 2)
        carry = (int(x) + int(y) + carry) // 2
    return digits + str(carry)


def reads(text):
    """what the register holds at each r of a flip-flop string, from its last write"""
    return [text[:i].rsplit("w", 1)[1][0] for i in range(0, len(text), 2) if text[i] == "r"]


def recalled(text):
    """[(place of a value whose key was there before, that key's first value)]"""
    first, found = {}, []
    for i in range(0, len(text), 2):
        if text[i] in first:
            found.append((i + 1, first[text[i]]))
        first.setdefault(text[i], text[i + 1])
    return found


FIRST_TASKS = ("copy", "reverse", "sort", "addition", "parity", "modsum")


class Examples(unittest.TestCase):
    def test_known(self):
        class Given:
            """draws that say what they are told to"""
            def __init__(self, *answers):
                self.answers = list(answers)

            def text(self, symbols, n):
                return self.answers.pop(0)
            sample = text

            def below(self, n):
                return self.answers.pop(0)
        for task, given, question, answer in (
                ("copy", ["fbda"], "fbda", "fbda"), ("reverse", ["fbda"], "fbda", "adbf"),
                ("sort", ["fbdab"], "fbdab", "abbdf"), ("addition", ["11", "10"], "11+10", "001"),
                ("addition", ["011", "111"], "011+111", "1011"), ("parity", ["0110"], "0110", "0100"),
                ("modsum", ["0714"], "0714", "0782"),
                ("recall", ["ac", "cF", 0, 0, 1, 0, 1, 1, 0, 0], "", "acaccFaccFcFacac")):
            self.assertEqual(tasks.TASKS[task](Given(*given), len(given[0])), (question, answer), task)

    def test_the_same_on_every_machine(self):
        self.assertEqual(tasks.example("copy", "test", 4, 42, 0), ("gsmp", "gsmp"))
        later = [t for t in (*tasks.TASKS, *tasks.ONLY_TESTS) if t not in (*FIRST_TASKS, "haystack")]
        for names, wanted in ((FIRST_TASKS, "53ebf891952fe0832a78cfe7edec19a9942f1d7e8dead98815ea90bb25f1d6fa"),
                              (later, "74367b498be48488f428dfd9575f35b2dd29d9f48282ff6ebe65a8dee36254c2"),
                              (["haystack"], "69d22545d0b041a2b39f2958cff0aa1c4ccea2acb17849f168498d9b1a1f3ce3")):
            found = hashlib.sha256()
            for task in names:
                for split in ("train", "test"):
                    found.update(tasks.shard(task, split, 8, 7, 20))
            self.assertEqual(found.hexdigest(), wanted)

    def test_an_example_does_not_depend_on_the_others(self):
        few, many = (tasks.shard("sort", "train", 6, 1, n) for n in (3, 9))
        self.assertEqual(few[1024:], many[1024:len(few)])
        other = tasks.shard("sort", "train", 6, 2, 3)
        self.assertNotEqual(few[1024:], other[1024:])

    def test_lengths_and_what_is_held_out(self):
        for task in tasks.TASKS:
            lengths, trained = [], set()
            for k in range(200):
                question, answer = tasks.example(task, "train", 12, 3, k)
                symbols = {"addition": question.find("+"), "recall": len(answer) // 8, "index": question.find(","),
                           "mqrar": len(answer) // 2, "fflm": len(answer) // 2}.get(tasks.family(task), len(question))
                lengths.append(symbols)
                trained.add(question)
                self.assertLessEqual(len(tasks.row(task, question, answer, 0)), tasks.row_tokens(task, 12))
                tested, found = tasks.example(task, "test", 12, 3, k)
                self.assertEqual(len(tasks.row(task, tested, found, 0)), tasks.row_tokens(task, 12))
                self.assertTrue(tasks.is_held_out(task, tested or found))
                self.assertFalse(symbols >= tasks.HELD_OUT_SYMBOLS and tasks.is_held_out(task, question or answer))
            self.assertEqual(set(lengths), {12} if task in ("recall", "fflm") else set(range(1, 13)), task)

    def test_a_test_of_fflm_is_not_what_it_has_learned(self):
        for task in tasks.ONLY_TESTS:
            self.assertTrue(all(tasks.is_held_out("fflm", tasks.example(task, "test", 12, 3, k)[1]) for k in range(50)))

    def test_mixtures_of_instructions(self):
        for task, share in (("fflm", 0.8), ("fflm_sparse", 0.98), ("fflm_dense", 0.1)):
            texts = [tasks.example(task, "test", 256, 3, k)[1] for k in range(100)]
            self.assertTrue(all(t[0] + t[-2] == "wr" and len(t) == 512 for t in texts))
            inner = "".join(t[2:-2] for t in texts)
            n = len(inner) / 2
            for what, wanted in (("i", share), ("w", (1 - share) / 2), ("r", (1 - share) / 2)):
                self.assertLess(abs(inner.count(what) / n - wanted), 4 * (wanted * (1 - wanted) / n) ** 0.5, task)
            for what in "iw":                   # data and instruction are independent
                data = re.findall(what + "(.)", inner)
                self.assertLess(abs(data.count("1") / len(data) - 0.5), 2 * len(data) ** -0.5, task)

    def test_mqrar_gives_each_key_enough_values(self):
        for back in (1, 2, 3, 4):
            for k in range(50):
                question, answer = tasks.example(f"mqrar{back}", "train", 8, 3, k)
                keys = question[::2]
                self.assertEqual(len(keys), 2 * back * len(set(keys)))
                self.assertGreaterEqual(min(map(keys.count, keys)), back)
                self.assertEqual(sorted(answer[::2]), sorted(set(keys)))

    def test_the_needle_is_in_the_first_half(self):
        for n in (1, 2, 9, 64):
            at = [re.search("[A-Z]", tasks.example("haystack", "test", n, 3, k)[0]).start() for k in range(400)]
            self.assertEqual(set(at), set(range((n + 1) // 2)))

    def test_index_reaches_as_far_as_said(self):
        shifts = set()
        for k in range(1500):
            question, _ = tasks.example("index", "test", 80, 3, k)
            text, asked = question.split(",")
            self.assertEqual((len(text), text.count(asked[0])), (80, 1))
            shifts.add(int(asked[1:]))
        self.assertEqual(shifts, set(range(-15, 16)))
        text = tasks.example("index", "test", 52, 3, 0)[0][:52]
        self.assertEqual(len(set(text)), 52)


class Files(Folder):
    def setUp(self):
        super().setUp()
        self.out = self.path("o")
        self.make()

    def make(self, *more, code=0):
        found, _, said = called(tasks.main, "--out", self.out, "--length", "4", "--examples", "40", "--test_examples",
                                "10", *more)
        self.assertEqual(found, code, said)
        return said

    def verify(self, *paths, code=0):
        r = subprocess.run([sys.executable, os.path.join(ROOT, "data", "verify.py"), *paths], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT)
        self.assertEqual(r.returncode, code, r.stdout.decode())
        return r.stdout.decode()

    def test_every_answer_is_right_and_marked(self):
        for task in tasks.TASKS:
            L = tasks.trained_length(task, 4)
            for name, length in [(f"{task}_train.bin", 0)] + [
                    (f"{task}_test{mix}_{L * m:04d}.bin", L * m) for m in tasks.multiples(task)
                    for mix in (("", "_sparse", "_dense") if task == "fflm" else ("",))]:
                header, rows = read_rows(os.path.join(self.out, name))
                self.assertEqual(header[:9], (20240520, 2, len(rows) * header[7], 256, 10, 0, 0, header[7], length))
                fewer = max(1, length // L // 16)           # files beyond 16 times the length have fewer examples
                self.assertEqual(len(rows), 10 // fewer or 1 if length else 40)
                for row in rows:
                    question, answer = question_and_answer(row)
                    marked = [i >= tasks.ANSWER for i in row]
                    if task == "fflm":                      # the bits after r, and not the end
                        text = bytes(i % tasks.ANSWER for i in row).decode()
                        self.assertRegex(text, rf"\A\n=(w[01]|r[01]|i[01]){{{len(text) // 2 - 1}}}\n\Z")
                        self.assertEqual(list(answer), reads(text[2:-1]))
                        self.assertEqual(marked, [text[i - 1:i] == "r" for i in range(len(row))])
                        continue
                    if task == "recall":                    # values of keys that were there before, and not the end
                        text = bytes(i % tasks.ANSWER for i in row).decode()
                        self.assertRegex(text, r"\A\n=[^\n=]+\n\Z")
                        wanted = recalled(text[2:-1])
                        self.assertEqual([(i - 2, text[i]) for i, m in enumerate(marked) if m], wanted)
                        self.assertEqual(len(text), 8 * (length or L) + 3)
                        continue
                    self.assertEqual(row[0], 10)
                    if task == "haystack":                  # the needle, and not the end
                        self.assertEqual((answer, marked.index(True)), (solved(task, question), 2 + len(question)))
                        continue
                    self.assertEqual(answer[-1], "\n")
                    if tasks.family(task) == "mqrar":       # every second token after "=", and the end
                        first, back = 2 + len(question), int(task[5:])
                        values = {k: re.findall(re.escape(k) + r"(\d)", question) for k in question[::2]}
                        asked = [chr(row[first + 2 * i]) for i in range(len(answer) - 1)]
                        self.assertEqual("".join(values[k][-back] for k in asked), answer[:-1])
                        self.assertEqual(len(set(asked)), len(values))
                        self.assertEqual([i - first for i, m in enumerate(marked) if m],
                                         [2 * i + 1 for i in range(len(asked))] + [2 * len(asked)])
                        continue
                    self.assertEqual(answer[:-1], solved(task, question))
                    first = 2 + len(question)               # a newline before it, "=" after it
                    self.assertEqual(marked, [first <= i < first + len(answer) for i in range(len(row))])
                    self.assertEqual(set(row[first + len(answer):]) - {10}, set())

    def test_verify_and_a_second_run(self):
        self.assertIn(f"{5 * len(tasks.TASKS) + 8 + 6} files checked, 0 findings",
                      self.verify(self.out, "--sample", "9" * 18))
        self.assertEqual(self.make(), "")                  # all there
        path = os.path.join(self.out, "copy_test_0008.bin")
        whole = read_bytes(path)
        os.remove(path)
        self.assertIn("copy_test_0008.bin", self.make("--tasks", "copy"))
        self.assertEqual(read_bytes(path), whole)
        self.assertIn("length = 4", self.make("--length", "5", code=2))
        self.assertIn("got kopy", self.make("--tasks", "kopy", code=2))
        self.assertIn("got fflm_sparse", self.make("--tasks", "fflm_sparse", code=2))
        self.assertIn("got mqrar5", self.make("--tasks", "mqrar5", code=2))
        for task in ("recall", "mqrar2"):
            self.assertIn(f"expected at most 11 for {task}", self.make("--tasks", task, "--length", "12", code=2))
        self.assertIn("fflm: expected a file of at most 134,217,728 symbols, got 1,000,000 examples of 168",
                      self.make("--tasks", "copy,fflm", "--length", "21", "--examples", "1000000", code=2))
        self.assertIn("--lengths: expected numbers", self.make("--lengths", "1e3", code=2))

    def test_verify_finds_damage(self):
        whole = read_bytes(self.path("o", "copy_test_0008.bin"))
        for at, value, words in ((28, 7, "in rows of 7"), (28, 0, "in rows of 0"), (12, 40000, "vocabulary 40000"),
                                 (20, 1, "should be zero"), (1024 + 2 * 12, 300, "expected an id below 256"),
                                 (8, 5, "tokens")):
            data = bytearray(whole)
            struct.pack_into("<i" if at < 1024 else "<H", data, at, value)
            self.assertIn(words, self.verify(self.write("x/a.bin", bytes(data)), code=2))
        wide = tasks.file_of([[1, 50000, 7 + (1 << 30)]] * 2, 3, 50257, 50256)
        self.assertIn("2 examples of length 3 in rows of 3 tokens, 2 of them in answers, vocabulary of 50,257",
                      self.verify(self.write("x/a.bin", wide)))
        damaged = wide[:1024] + struct.pack("<I", 60000) + wide[1028:]
        self.assertIn("token 0: expected an id below 50257", self.verify(self.write("x/a.bin", damaged), code=2))


class Passages(Folder):
    def windows(self, task, T, depth, ids, seed=1, k=0, vocabulary=256):
        """(the ids of a window, which of them are answers)"""
        row = tasks.window(task, common.Tokens("t", ids, vocabulary, 0), T, depth, seed, k)
        mark = 1 << (15 if vocabulary <= 1 << 15 else 30)
        self.assertEqual(len(row), T + 1)
        return [i % mark for i in row], [i >= mark for i in row]

    def test_the_passage_stands_at_its_depth_and_only_its_answer_is_marked(self):
        draws = tasks.Draws("text")
        for vocabulary in 256, 50257:
            text = [draws.below(vocabulary) for _ in range(2000)]
            for (task, planted, given), T, depth in itertools.product(
                    (("needle", 12, 8), ("passkey", 12, 8), ("induction", 2, 1), ("mqar", 16, 0), ("quote", 32, 8)),
                    (100, 257), tasks.DEPTHS):
                with self.subTest(task=task, T=T, depth=depth, vocabulary=vocabulary):
                    ids, answers = self.windows(task, T, depth, text, vocabulary=vocabulary)
                    asked, at = T + 1 - planted, math.floor(depth / 100 * (T + 1 - 2 * planted) + 0.5)
                    passage, question = ids[at:at + planted], ids[asked:]
                    wanted = [i >= given for i in range(planted)] if task != "mqar" else [False, True] * 8
                    self.assertEqual(answers, [False] * asked + wanted)
                    if task == "mqar":
                        pairs = lambda row: sorted(zip(row[::2], row[1::2]))
                        self.assertEqual(pairs(passage), pairs(question))
                        self.assertEqual({ids.count(i) for i in passage}, {2})
                    else:
                        self.assertEqual(passage, question)
                    if task == "induction":
                        self.assertEqual(ids.count(passage[0]), 2)
                    around = ids[:at] + ids[at + planted:asked]
                    if task == "passkey":
                        self.assertEqual(around[24:], around[:-24])
                    elif task in ("needle", "quote"):           # text as it stands
                        self.assertTrue(any(text[i:i + len(around)] == around for i in range(2000 - len(around) + 1)))
                    for other in ({"k": 1}, {"seed": 2}):
                        self.assertNotEqual(self.windows(task, T, depth, text, vocabulary=vocabulary, **other)[0], ids)

    def go(self, text, *more, code=0):
        found, said, err = called(tasks.main, "--text", text, "--out", self.path("o"), *more)
        self.assertEqual((found, said), (code, ""), err)
        return err

    def test_files_and_what_is_refused(self):
        text = self.write("t.txt", "".join(f"{i * i} is the square of {i}.\n" for i in range(99)))
        self.go(text, "--tasks", "needle,mqar", "--lengths", "100,130", "--test_examples", "3")
        self.assertEqual(len(os.listdir(self.path("o"))), 2 * 2 * 5 + 1)
        header, rows = read_rows(self.path("o/mqar_075_0130.bin"))
        self.assertEqual(header[:9], (20240520, 2, 3 * 131, 256, 10, 0, 0, 131, 130))
        self.assertEqual([sum(i >= tasks.ANSWER for i in row) for row in rows], [8, 8, 8])
        self.assertEqual(self.go(text, "--tasks", "needle", "--lengths", "100", "--test_examples", "3"), "")    # there
        refused = lambda text, *more: self.go(text, "--out", self.path("n"), *more, code=2)
        self.assertIn("made with text = ", self.go(self.write("u.txt", "x"), "--test_examples", "3", code=2))
        self.assertIn("of at least 71 tokens for quote, got 70", refused(text, "--lengths", "70", "--tasks", "quote"))
        self.assertIn("expected at least 9,977 tokens in", refused(text, "--lengths", "10000", "--tasks", "needle"))
        self.assertIn("more than 1 different tokens", refused(self.write("a.txt", "a" * 999), "--tasks", "mqar"))
        self.assertIn("expected some of needle", refused(text, "--tasks", "copy"))
        self.assertIn("passkey: expected a file of at most 134,217,728 symbols, got 64 examples of 999,999,999",
                      refused(text, "--lengths", "999999999", "--tasks", "passkey"))
        for bad, says in ((b"no shard", "expected a shard"), (struct.pack("<3i", 20240520, 1, 9), "expected 9 tokens")):
            self.assertIn(says, refused(self.write("b.bin", bad.ljust(1030, b"\0"))))
        bad = struct.pack("<5i", 20240520, 1, 3, 1000, 1).ljust(1024, b"\0") + struct.pack("<3H", 5, 40000, 7)
        self.assertIn("b.bin: expected ids below 1000, the vocabulary, got 40000", refused(self.write("b.bin", bad)))
        self.assertIn("w.txt: expected UTF-8, got UTF-16", refused(self.write("w.txt", "abc".encode("utf-16"))))

    @unittest.skipUnless(HAS_TRAINER, "make train_gpt2 first")
    def test_the_trainer_scores_them(self):
        """with GPT-2's vocabulary, whose ids take four bytes"""
        ids = [tasks.Draws(f"{i}").below(50257) for i in range(3000)]
        shard = self.write("t.bin", struct.pack("<256i3000H", 20240520, 1, 3000, *[0] * 253, *ids))
        self.go(shard, "--tasks", "needle,induction", "--lengths", "40", "--test_examples", "3")
        code, said = ended(TRAINER, "--train_files", shard, "--val_every", "0", "--sample_every", "0", "--model",
                           "1,1,8", "--T", "40", "--B", "1", "--steps", "1", "--tasks", self.path("o/*.bin"))
        self.assertEqual(code, 0, said)
        wanted = [f"{task}_{depth:03d}_0040" for task in ("induction", "needle") for depth in tasks.DEPTHS]
        self.assertEqual(re.findall(r"^(\w+)\.bin +40 +40 +3 ", said, re.M), wanted)


class Training(Folder):
    @unittest.skipUnless(HAS_TRAINER, "make train_gpt2 first")
    def test_a_small_model_learns_to_copy(self):
        called(tasks.main, "--out", self.folder, "--tasks", "copy", "--length", "3", "--examples", "40000",
               "--test_examples", "100")
        r = subprocess.run(
            [TRAINER, "--train_files", self.path("copy_train.bin"), "--tasks", self.path("copy_test_*.bin"), "--T", "8",
             "--model", "2,2,64", "--pos", "learned", "--B", "64", "--steps", "700", "--lr", "5e-3", "--warmup", "20",
             "--final_lr", "0", "--val_every", "0", "--sample_every", "0", "--out", self.path("run")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(r.returncode, 0, r.stdout.decode())
        found = self.records("task", "run")
        self.assertEqual(r.stdout.decode().count("learned has no positions beyond 8"), 3)
        self.assertEqual([(x["length"], x["T"], x["examples"], x["tokens"]) for x in found], [(3, 8, 100, 400)])
        self.assertGreaterEqual(found[0]["exact_share"], 0.95)


FAKE_TRAINER = r'''#!/usr/bin/env python3
import glob, json, os, sys
if "--help" in sys.argv:
    print("(--pos):\n  none   no\n  cable  yes\n  rope   rotates\n\nSizes for --model")
    print("\ncommit abc, float32, CPU, compiler 1")
    sys.exit(0)
if "--check" in sys.argv:
    sys.exit("error: --pos: an unknown encoding" if "kable" in sys.argv else "error: no data")
a = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if a["--pos"] == "rope" and os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "broken")):
    sys.exit("error: no luck today")
os.makedirs(a["--out"], exist_ok=True)
with open(os.path.join(a["--out"], "log.jsonl"), "w") as f:
    for i, path in enumerate(sorted(glob.glob(a["--tasks"]))):
        n = int(path[-8:-4])
        pos = a["--pos"].split(":")[0]
        share = {"none": 90, "cable": 100 - 20 * i, "rope": 96 - 32 * i + int(a["--seed"]), "alias": 0}[pos]
        if a["--pos"] == "rope" and i == 3:
            continue
        share = max(0, share)
        f.write(json.dumps({"kind": "task", "file": os.path.basename(path), "length": n, "T": 2 * n + 2, "pos": "x",
                            "examples": 200, "exact": 2 * share, "tokens": 9, "accuracy": 0.5, "loss": 1.0}) + "\n")
'''


class Table(Folder):
    """scripts/tasks.py, with a trainer that only says what it is told to say"""

    def setUp(self):
        super().setUp()
        self.out, self.trainer = self.path("o"), self.executable("trainer", FAKE_TRAINER)
        self.write("matplotlib.py", "raise ImportError('hidden')")

    def run_it(self, *args, code=0, figure=False, **more):
        hidden = {} if figure else {"PYTHONPATH": self.folder}      # matplotlib takes a second
        r = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "tasks.py"), "--trainer", self.trainer,
                            "--out", self.out, "--jobs", "2", "--examples", "20", *args],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env={**os.environ, **hidden}, **more)
        self.assertEqual(r.returncode, code, r.stdout)
        return r.stdout

    def rows(self):
        return self.table("o", "tasks.csv")

    def test_parts_resume_and_the_table(self):
        self.write("broken", "")
        few = ("--tasks", "copy,sort", "--seeds", "1,2")
        self.assertIn("no luck today", self.run_it(*few, "--seeds", "1", "--pos", "rope", "--lr", "nan", code=2))
        os.remove(self.path("broken"))
        self.assertIn("6 cases, ", self.run_it(*few, "--seeds", "1"))
        first = {(r["task"], r["pos"], r["seed"]) for r in self.rows()}
        self.assertEqual(len(first), 6)
        text = self.run_it(*few)                # the rest
        self.assertIn("12 cases, 6 of them to run", text)
        self.assertIn("no figure: Python's module matplotlib is missing", text)
        self.assertEqual(len({(r["task"], r["pos"], r["seed"]) for r in self.rows()}), 12)
        self.assertIn("12 cases, 0 of them to run", self.run_it(*few))
        rows = self.rows()
        self.assertEqual(len(rows), 4 * 8 + 3 * 4)
        self.assertEqual({r["commit"] for r in rows} - {rows[0]["commit"]}, set())
        self.assertEqual(self.read("o", "tasks.md").splitlines()[2:], [
            "| encoding | copy | sort |", "|---|---|---|", "| `none` | not learned (90) | not learned (90) |",
            "| `cable` | 100 / 80 / 60 / 40 (2 of 2) | 100 / 80 / 60 / 40 (2 of 2) |",
            "| `rope` | 98 / 66 / 34 / - (2 of 2) | 98 / 66 / 34 / - (2 of 2) |"])
        more = ("--out", self.path("p"), "--results", self.results("r/mine.csv", rows[4:]))
        self.assertIn("12 cases, 1 of them to run", self.run_it(*few, *more))
        found = self.table("r", "mine.csv")
        self.assertEqual(found[:-4], rows[4:])
        self.assertEqual([{**r, "commit": ""} for r in found[-4:]], [{**r, "commit": ""} for r in rows[:4]])
        self.assertEqual([self.read(*at).splitlines()[0] for at in (("r", "mine.csv"), ("o", "tasks.csv"))],
                         ["# mine", self.SETTINGS])
        self.assertEqual(self.read("r", "mine.md").splitlines()[2:], self.read("o", "tasks.md").splitlines()[2:])
        self.assertIn("line 4 again", self.run_it("--results", self.results("r/twice.csv", 2 * rows[:1]), code=2))
        expected = "copy, none, 1, {}: expected trained 10, steps 1500, at most as many exact answers as".format
        for name, value, says in (("accuracy", "1.5", "accuracy: expected a number from 0 to 1"),
                                  ("accuracy", "nan", "accuracy: expected a number from 0 to 1"),
                                  ("length", "15", expected(15)), ("exact", "501", expected(10)),
                                  ("trained", "20", expected(10)), ("steps", "9", expected(10)),
                                  ("trained", "0", "trained: expected a positive whole number")):
            edited = self.results("r/edited.csv", [{**rows[0], name: value}])
            self.assertIn(says, self.run_it("--summary", "--results", edited, code=2))
        self.assertIn(expected(20), self.run_it("--summary", "--results", self.results("r/cut.csv", rows[1:4]), code=2))
        self.run_it("--summary", "--trainer", "./trainer", cwd=self.folder)             # not the repository's
        self.assertIn("expected a name that ends with .csv", self.run_it("--results", self.path("r"), code=2))
        mixtures = self.run_it("--tasks", "fflm", "--pos", "none", "--seeds", "1")
        self.assertIn("| encoding | fflm | fflm_dense | fflm_sparse |\n", mixtures)
        self.assertIn("| `none` | not learned (50) |", mixtures)        # the share of answers, not of whole examples
        self.assertIn("\n1 runs of commit", mixtures)
        try:
            import matplotlib   # noqa: F401
        except ImportError:
            return
        self.assertIn("tasks.png", self.run_it("--summary", figure=True))
        self.assertGreater(os.path.getsize(os.path.join(self.out, "tasks.png")), 10000)

    SETTINGS = ("# scripts/tasks.py --model 3,4,64 --length 10 --steps 1500 --B 64 --lr 1e-3 --examples 20 "
                "(float32, CPU)")

    def results(self, name, rows, comments=("# mine", SETTINGS)):
        """the path of a CSV for --results"""
        return self.write(name, "".join(line + "\r\n" for line in (*comments, ",".join(rows[0]),
                                                                   *(",".join(r.values()) for r in rows))))

    def test_rows_of_other_settings_do_not_mix(self):
        one = ("--tasks", "copy", "--pos", "none", "--seeds", "1")
        self.run_it(*one)
        path = self.results("mine.csv", self.rows())
        text, more = self.read("mine.csv"), ("--tasks", "copy", "--pos", "none", "--results", path)
        for other in (("--model", "3,4,32"), ("--length", "12"), ("--steps", "9"), ("--B", "8"), ("--lr", "2e-3"),
                      ("--examples", "30")):
            self.assertRegex(self.run_it(*more, *other, code=2),
                             rf"mine.csv: expected the line '# .* {' '.join(other)} .*' before its rows, got \['# scr")
        self.executable("gpu", FAKE_TRAINER.replace("float32, CPU", "bf16, CUDA"))
        self.assertIn("(bf16, CUDA)' before its rows, got", self.run_it(*more, "--trainer", self.path("gpu"), code=2))
        self.assertEqual(self.read("mine.csv"), text)
        self.results("mine.csv", self.rows(), ())
        self.assertIn("before its rows, got none; give the settings that", self.run_it(*more, code=2))
        head = ",".join(self.rows()[0]) + "\n"                  # and no row yet
        self.write("mine.csv", head)
        self.assertIn("before its rows, got none; give the settings that", self.run_it(*more, "--seeds", "1", code=2))
        self.assertEqual(self.read("mine.csv"), head)
        self.write("mine.csv", f"{self.SETTINGS}\n{head}")
        self.run_it(*more, "--seeds", "1")
        self.assertEqual(self.table("mine.csv"), self.rows())

    def test_two_at_once_lose_no_row(self):
        """a second process adds its rows while the first one trains"""
        one = ("--tasks", "copy", "--pos", "none", "--seeds")
        self.run_it(*one, "1")
        path, there = self.path("mine.csv"), self.results("there.csv", self.rows())
        self.executable("slow", FAKE_TRAINER + f"import shutil\nshutil.copy({there!r}, {path!r})\n")
        self.run_it(*one, "2", "--results", path, "--trainer", self.path("slow"))
        self.assertEqual([r["seed"] for r in self.table("mine.csv")], 4 * ["1"] + 4 * ["2"])

    @unittest.skipUnless(importlib.util.find_spec("scipy"), "SKIPPED: no scipy")
    def test_differences(self):
        """over the seeds with which both have learned, at the longer lengths that both reach"""
        def rows(pos, *shares):
            return [{"task": "copy", "pos": pos, "seed": seed, "trained": 10, "length": 10 * m, "examples": 100,
                     "exact": share} for seed, of in enumerate(shares) for m, share in zip((1, 2, 4, 8), of)]
        found = rows("cable", (100, 52, 5), (99, 54, 9), (98, 56, 1), (90, 0, 0)) + rows(
            "rope", (100, 40, 6), (100, 42, 6), (100, 44, 6), (100, 99, 99))
        spec = importlib.util.spec_from_file_location("runs", os.path.join(ROOT, "scripts", "tasks.py"))
        runs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(runs)
        self.assertEqual(list(runs.comparisons(found, ["cable", "rope", "none"])), [
            "", "| copy | seeds | 2 times the length | 4 times the length | 8 times the length |",
            "|---|---|---|---|---|",
            # -1, 3 and -5: a standard deviation of 4, and 4.303 / 3^0.5 of it
            "| cable - rope | 3 | **+12.0 [+12.0, +12.0]** | -1.0 [-10.9, +8.9] | - |"])

    def test_bad_input(self):
        self.assertIn("--jobs: expected at least 1, got 0", self.run_it("--jobs", "0", code=2))
        self.assertIn("copy: expected a file of at most 134,217,728 symbols, got 20 examples of 99,999,999,999",
                      self.run_it("--length", "99999999999", "--tasks", "copy", code=2))
        self.assertRegex(self.run_it("--trainer", "/bin/true", code=2),
                         r"\Atasks.py: /bin/true --help: expected a list of.*\n\Z")
        self.assertIn("--seeds: expected numbers separated by commas or blanks, got 1,x",
                      self.run_it("--seeds", "1,x", code=2))
        self.assertIn("--pos: expected some of none, cable, rope", self.run_it("--pos", "kable", code=2))
        self.assertIn("--tasks: expected some of copy", self.run_it("--tasks", "kopy", code=2))
        self.assertIn("--compare: expected some of none, cable, rope, got kable",
                      self.run_it("--compare", "cable", "kable", code=2))
        self.assertIn("no results yet", self.run_it("--summary", code=2))
        self.run_it("--pos", "alias", "--tasks", "copy", "--seeds", "1")        # as fox, which no list has
        self.run_it("--pos", "cable:a=1,b=2,none", "--tasks", "copy", "--seeds", "1,01,1")
        self.assertEqual([r["pos"] for r in self.rows()], 4 * ["cable:a=1,b=2"] + 4 * ["none"])
        self.assertIn("/nowhere: No such file or directory; build it with make",
                      self.run_it("--trainer", "/nowhere", code=2))

    def judge_of(self, task, cells):
        """verdict.py, with the row "here": (its exit code, what it prints)"""
        row = verdict.Row("rope", task, cells, verdict.right_answers, "a paper", {"examples": 20}, 1)

        def judge(*words):
            with unittest.mock.patch.dict(verdict.ROWS, {"here": row}), \
                    unittest.mock.patch.dict(os.environ, {"PYTHONPATH": self.folder}):      # no figures
                code, out, err = called(verdict.main, *words, "--results", self.path("verdicts.csv"), "--out",
                                        self.path("v"), "--trainer", self.trainer)
            return code, out + err
        return judge

    @unittest.skipUnless(importlib.util.find_spec("scipy"), "SKIPPED: no scipy")
    def test_verdicts_continue_within_a_seed(self):
        """a stop may come between the numbers of a seed"""
        judge = self.judge_of("fflm", {task: (50, 0.05) for task in ("fflm", "fflm_sparse", "fflm_dense")})
        for kept in "here,fflm_dense,2,before,7\n", "there,fflm,2,before,7\nthere,fflm_sparse,2,before,7\n":
            self.write("verdicts.csv", "row,task,seed,commit,percent\n" + kept)
            code, text = judge("here", "--seeds", "2")
            self.assertEqual((code, text.count("undecided: published 50 %, ours ")), (0, 3), text)
            rows = [row.split(",") for row in self.read("verdicts.csv").splitlines()]
            self.assertEqual(sorted(row[1] for row in rows if row[0] == "here"), ["fflm", "fflm_dense", "fflm_sparse"])

    @unittest.skipUnless(importlib.util.find_spec("scipy"), "SKIPPED: no scipy")
    def test_verdicts(self):
        """scripts/verdict.py trains what its results lack, and keeps a number of each seed"""
        judge = self.judge_of("copy", {"copy": (98.5, 0.05)})
        self.assertRegex(judge("here", "--seeds", "2")[1], r"here: a paper\n  copy: undecided: published 98.5 %, "
                         r"ours 98 % \[0, 100\], seeds 2, commit \w+")
        self.assertRegex(self.read("verdicts.csv"), r"\Arow,task,seed,commit,percent\nhere,copy,2,\w+\+?,98\n\Z")
        # 98, 97 and 99: 98 +- 4.303 / 3^0.5
        self.assertIn("copy: reproduced: published 98.5 %, ours 98 % [95.5, 100], seeds 2, 1, 3", judge("here")[1])
        os.remove(self.trainer)                         # no seed is trained again
        self.assertEqual(judge("here", "--seeds", "2")[0], 0)
        self.assertEqual(judge("here", "--seeds", "7")[0], 2)
        self.assertIn("there: expected some of fflm-rope, fflm-fox, index-rope, here", judge("there")[1])
        self.assertIn("fflm 6.9 %, fflm_sparse 40.3 %", judge()[1])

    def test_words_of_a_verdict(self):
        for published, spread, ours, expected in (
                (6.9, 0.05, (1.0, 2.0), "contradicted"), (6.9, 0.05, (6.96, 9), "contradicted"),
                (6.9, 0.05, (6.94, 9), "reproduced"), (6.9, 0.05, (1, 7.8), "reproduced"),
                (6.9, 0.05, (1, 8), "undecided"), (0.0, 0.05, (0, 5), "reproduced"), (0.0, 0.05, (0, 5.1), "undecided"),
                (40.3, 0.05, (0, 40.25), "reproduced")):
            self.assertEqual(verdict.word(published, spread, ours), expected, (published, ours))


if __name__ == "__main__":
    unittest.main()
