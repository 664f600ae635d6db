#!/usr/bin/env python3
"""tasks.py -- examples with one right answer, short ones to learn from and longer ones to test on.

    data/tasks.py --tasks copy,sort --out data/tasks
    ./train_gpt2 --train_files data/tasks/copy_train.bin --val_every 0 --sample_every 0 --model 2,4,64 --T 22 --B 64 \\
        --steps 1000 --lr 2e-3 --warmup 50 --final_lr 0.1 --tasks "data/tasks/copy_test_*.bin"

An example is a line of ASCII, whose bytes are the tokens. It begins and ends with a newline, and what comes after "="
is the answer, the last newline included:

copy      fbda=fbda            the same letters
reverse   fbda=adbf            the letters from the last to the first
sort      fbda=abdf            the letters in order
addition  011+111=1011         the sum of two binary numbers of equally many bits, the lowest bit first everywhere
parity    0110=0100            how many ones there are up to each bit, modulo 2
modsum    0714=0782            the sum of the digits up to each one, modulo 10
recall    =cFaccFFaac          keys with their values, again and again; from a key's second time on its value counts
mqrar1    a7b2a1a4=b2a4        the last value that each key was given; mqrar2 to mqrar4: the second to fourth last
haystack  ahKcmzop=K          the only capital, in the first half
index     BdkaQz,k+02=Q        the letter at a distance of at most 15 from another one
line      RRLRRRL=3            where a walk ends that starts at 0; walls at 0 and 8 stop it
circle    RRLLLRL=8            where a walk ends that starts at 0, on a circle of 9 places
fflm      =w1i0r1i1w0i1r0      a bit that is written (w), read (r) and left alone (i); only the bits after r count

TASK_train.bin has examples of 1 to --length symbols (addition: bits; recall: keys, each 4 times on average; mqrar:
keys, each with 2 N values on average; line, circle: moves; fflm: instructions), every length equally often. recall and
mqrar have 8 tenths of --length, haystack 16 tenths, index 4 times and fflm 8 times as many. recall and fflm always have
the most, because they ask along the way.
TASK_test_NNNN.bin has examples of exactly NNNN symbols: 1, 2, 4 and 8 times as many as the longest in training, of
haystack up to 512 times. Beyond 16 times a file has fewer examples, and as many tokens as the file of 16 times.
Of fflm's instructions 80 % are ignored, in fflm_test_sparse_NNNN.bin 98 % and in fflm_test_dense_NNNN.bin 10 %.
With --text it plants passages in windows of a text instead, and asks for them at the window's end:

needle     8 tokens of text and 4 drawn ones; the 8 again, and the 4 are the answer
passkey    the same, in a text that repeats 24 tokens
induction  a b; a again, and b is the answer
mqar       8 pairs of different tokens; the pairs in another order, and the second of each is an answer
quote      32 drawn tokens; the first 8 of them, and the rest is the answer

TASK_DDD_NNNN.bin has windows of NNNN tokens, and the passage at DDD percent of the text before the question.
induction's a and mqar's pairs stand nowhere else. (mqar: Arora et al. 2023; induction: Olsson et al. 2022.)

Example k of a file depends only on the task, the length, --seed and k, on every machine. No test example is among the
training examples: an eighth of all questions of at least 8 symbols, chosen by checksum, is for testing, and the rest
for training.

fflm is the flip-flop language of Liu et al. 2023, arXiv 2306.00946; their data set's card has the three mixtures, with
256 instructions (--length 32). mqrar is the N-back recall of PaTH, arXiv 2505.16381, section 4.1, with the questions
at the end. index is the indirect indexing of PoPE, arXiv 2509.10534v3, appendix B.1: there 20 to 40 letters, all
different; here up to 40, and a string of more than 52 repeats letters other than the one in the question. line is the
gridworld of Liu et al. 2022, arXiv 2210.10749, and circle their cyclic group, with the last state as the answer.
"""
import functools
import hashlib
import itertools
import os
import struct
import sys
from array import array

from common import (MAGIC, VERSION_ROWS, WIDE_MAGIC, BadInput, Manifest, console, header, locked, natural, positive,
                    read_tokens, run, say, sha256_of)

END, ANSWER = ord("\n"), 1 << 15
VOCABULARY = 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAPITALS = LETTERS.upper()
BOTH_CASES = LETTERS + CAPITALS
KEYS = BOTH_CASES + "!#$%&*+-/<>?"
DIGITS = "0123456789"
HELD_OUT, HELD_OUT_SYMBOLS = 8, 8       # one question in 8, of those that have 8 symbols or more
MOST = 1 << 27                          # symbols of a file, which is made in memory
REACH = 15                              # of index: the largest distance
PLACES = 9                              # of line and circle


class Draws:
    """the random numbers of one example, a function of its name"""

    def __init__(self, name):
        self.stream, self.words, self.at = hashlib.shake_128(name.encode()), (), 0

    def below(self, n):
        if self.at == len(self.words):
            count = max(64, 2 * self.at)
            self.words = struct.unpack(f"<{count}I", self.stream.digest(4 * count))
        self.at += 1
        return self.words[self.at - 1] * n >> 32

    def text(self, symbols, n):
        return "".join(symbols[self.below(len(symbols))] for _ in range(n))

    def sample(self, symbols, n):
        """n different ones of them"""
        symbols = list(symbols)
        for i in range(n):
            j = i + self.below(len(symbols) - i)
            symbols[i], symbols[j] = symbols[j], symbols[i]
        return symbols[:n]


# The tasks: a number of symbols -> question, answer ------------------------------------------------------------------

def changed(draws, n, symbols, answer):
    x = draws.text(symbols, n)
    return x, answer(x)


def addition(draws, n):
    a, b = draws.text("01", n), draws.text("01", n)
    total = int(a[::-1], 2) + int(b[::-1], 2)
    return f"{a}+{b}", f"{total:0{n + 1}b}"[::-1]


def running_sums(digits, modulus):
    return "".join(str(total % modulus) for total in itertools.accumulate(map(int, digits)))


def recall(draws, n):
    """values are drawn from the same characters as keys: which is which, a model has to find out"""
    keys, values = draws.sample(KEYS, n), draws.text(KEYS, n)
    return "", "".join(keys[i] + values[i] for i in (draws.below(n) for _ in range(4 * n)))


def mqrar(draws, n, back):
    """2 back n values for n keys, at least `back` for each"""
    keys = draws.sample(KEYS, n)
    given = keys * back + [keys[draws.below(n)] for _ in range(n * back)]
    pairs = [k + v for k, v in zip(draws.sample(given, len(given)), draws.text(DIGITS, len(given)))]
    asked = draws.sample(keys, n)
    return "".join(pairs), "".join([p for p in pairs if p[0] == k][-back] for k in asked)


def haystack(draws, n):
    text, at, needle = draws.text(LETTERS, n - 1), draws.below((n + 1) // 2), draws.text(CAPITALS, 1)
    return text[:at] + needle + text[at:], needle


def index(draws, n):
    source, *letters = draws.sample(BOTH_CASES, len(BOTH_CASES))
    text = letters[:n - 1]
    while len(text) < n - 1:
        text += draws.sample(letters, min(len(letters), n - 1 - len(text)))
    at = draws.below(n)
    text.insert(at, source)
    first, end = max(0, at - REACH), min(n, at + REACH + 1)
    found = first + draws.below(end - first)
    return f"{''.join(text)},{source}{found - at:+03d}", text[found]


def line(draws, n):
    moves, place = draws.text("LR", n), 0
    for m in moves:
        place = max(place - 1, 0) if m == "L" else min(place + 1, PLACES - 1)
    return moves, str(place)


def circle(draws, n):
    moves = draws.text("LR", n)
    return moves, str((moves.count("R") - moves.count("L")) % PLACES)


def fflm(draws, n, ignored=80):
    """n >= 2 instructions, the first a write and the last a read; between them `ignored` percent are i, and w
    and r share the rest"""
    text = ""
    for i in range(n):
        draw = draws.below(400)                     # its last bit is the data, the one before it says w or r
        bit, what = "01"[draw % 2], "i" if draw < 4 * ignored else "wr"[draw // 2 % 2]
        if i in (0, n - 1):
            what = "w" if i == 0 else "r"
        if what == "w":
            memory = bit
        text += what + (memory if what == "r" else bit)
    return "", text


TASKS = {"copy": functools.partial(changed, symbols=LETTERS, answer=str),
         "reverse": functools.partial(changed, symbols=LETTERS, answer=lambda x: x[::-1]),
         "sort": functools.partial(changed, symbols=LETTERS, answer=lambda x: "".join(sorted(x))),
         "addition": addition,
         "parity": functools.partial(changed, symbols="01", answer=lambda x: running_sums(x, 2)),
         "modsum": functools.partial(changed, symbols=DIGITS, answer=lambda x: running_sums(x, 10)),
         **{f.__name__: f for f in (recall, haystack, index, line, circle, fflm)}}
TASKS.update((f"mqrar{back}", functools.partial(mqrar, back=back)) for back in (1, 2, 3, 4))
ONLY_TESTS = {"fflm_sparse": functools.partial(fflm, ignored=98), "fflm_dense": functools.partial(fflm, ignored=10)}
ALONG_THE_WAY = "recall", "fflm"        # tasks without a question before the answer
WITHOUT_END = *ALONG_THE_WAY, "haystack"        # where the newline after the answer does not count
TENTHS = {"recall": 8, "mqrar": 8, "haystack": 16, "index": 40, "fflm": 80}       # of --length; elsewhere 10


def family(task):
    """mqrar of mqrar2, and fflm of fflm_sparse"""
    return task.split("_")[0].rstrip(DIGITS)


def example_of(task, draws, n):
    return {**TASKS, **ONLY_TESTS}[task](draws, n)


def row_tokens(task, n):
    """tokens of any example of n symbols: newline, question, =, answer, newline"""
    return sum(map(len, example_of(task, Draws(task), n))) + 3


def is_held_out(task, question):
    return hashlib.sha256(f"{task} {question}".encode()).digest()[0] % HELD_OUT == 0


def example(task, split, length, seed, k):
    """(question, answer) number k; split: train, with up to `length` symbols, or test, with exactly that many"""
    for attempt in range(1000):
        draws = Draws(f"{task} {split} {length} {seed} {k} {attempt}")
        n = 1 + draws.below(length) if split == "train" and task not in ALONG_THE_WAY else length
        question, answer = example_of(task, draws, n)
        trained = "fflm" if task in ONLY_TESTS else task
        if n < HELD_OUT_SYMBOLS or is_held_out(trained, question or answer) == (split == "test"):
            return question, answer
    raise AssertionError(f"{task}: no example for {split} in 1000 attempts")


def is_wanted(kind, answer, i):
    """whether a model has to say character i of an answer: of mqrar the values and not the keys, of recall only the
    values of keys that were there before, of fflm only what is read"""
    if kind not in ("mqrar", "recall", "fflm"):
        return True
    key, before = answer[i - 1], answer[:i - 1:2]
    return i % 2 == 1 and {"mqrar": True, "recall": key in before, "fflm": key == "r"}[kind]


def row(task, question, answer, tokens):
    """the ids of an example in a row of this many tokens; those that a model has to say carry the mark ANSWER"""
    ids, kind = list(f"\n{question}=".encode()), family(task)
    for i, c in enumerate(answer.encode()):
        ids.append(c + ANSWER if is_wanted(kind, answer, i) else c)
    ids.append(END if kind in WITHOUT_END else END + ANSWER)
    return ids + [END] * (tokens - len(ids))


def file_of(rows, length, vocabulary=VOCABULARY, end=END):
    """the bytes of a file of rows of ids; llmc/engine/data.h describes them"""
    wide = vocabulary > ANSWER
    ids = array("I" if wide else "H")
    for each in rows:
        ids.extend(each)
    if sys.byteorder == "big":
        ids.byteswap()
    return header(len(ids), vocabulary, end, 0, 0, len(each), length, magic=WIDE_MAGIC if wide else MAGIC,
                  version=VERSION_ROWS) + ids.tobytes()


def shard(task, split, length, seed, examples):
    tokens = row_tokens(task, length)
    rows = (row(task, *example(task, split, length, seed, k), tokens) for k in range(examples))
    return file_of(rows, length if split == "test" else 0)


# Passages -------------------------------------------------------------------------------------------------------------

PASSAGES = ("needle", "passkey", "induction", "mqar", "quote")
DEPTHS = (0, 25, 50, 75, 100)


class TextDraws(Draws):
    def __init__(self, name, text):
        super().__init__(name)
        self.ids, self.path = text.ids, text.path

    def tokens(self, n):
        """n tokens of text from a drawn place on"""
        if n > len(self.ids):
            raise BadInput(f"--text: expected at least {n:,} tokens in {self.path}, got {len(self.ids):,}")
        at = self.below(len(self.ids) - n + 1)
        return list(self.ids[at:at + n])

    def other(self, taken, token):
        """the token, or a drawn one if it is taken"""
        for _ in range(10000):
            if token not in taken:
                return token
            token, = self.tokens(1)
        raise BadInput(f"--text: expected more than {len(taken)} different tokens in {self.path}")

    def different(self, n):
        found = []
        while len(found) < n:
            found.append(self.other(found, *self.tokens(1)))
        return found


def passage(task, draws):
    """(the planted tokens, the question and its answers, which of those are answers, tokens that stand nowhere else)"""
    if task == "mqar":
        tokens = draws.different(16)
        pairs = [tokens[i:i + 2] for i in range(0, 16, 2)]
        return tokens, sum(draws.sample(pairs, 8), []), [False, True] * 8, tokens
    if task == "induction":
        planted = draws.different(2)
        return planted, planted, [False, True], planted[:1]
    planted = draws.tokens(8) if task != "quote" else []
    planted += [draws.tokens(1)[0] for _ in range(4 if planted else 32)]
    return planted, planted, [i >= 8 for i in range(len(planted))], []


def window(task, text, T, depth, seed, k):
    """T + 1 ids: a text with a passage in it, and the question"""
    draws = TextDraws(f"{task} {T} {depth} {seed} {k}", text)
    planted, asked, answers, taken = passage(task, draws)
    around = T + 1 - len(planted) - len(asked)
    if around < 8:
        raise BadInput(f"--lengths: expected windows of at least {T + 8 - around} tokens for {task}, got {T}")
    words = draws.tokens(min(around, 24 if task == "passkey" else around))
    words = [draws.other(taken, words[i % len(words)]) for i in range(around)]
    at, mark = (2 * depth * around + 100) // 200, 1 << 30 if text.vocabulary > ANSWER else ANSWER
    return words[:at] + planted + words[at:] + [t + mark if a else t for t, a in zip(asked, answers)]


def passages(text, tasks, lengths, seed, examples):
    """(file, its bytes) of each length and depth"""
    for task, T, depth in itertools.product(tasks, lengths, DEPTHS):
        rows = (window(task, text, T, depth, seed, k) for k in range(examples))
        yield f"{task}_{depth:03d}_{T:04d}.bin", lambda: file_of(rows, T, text.vocabulary, text.end)


def parse(argv):
    p = console.parser(__doc__)
    p.add_argument("--out", default="data/tasks", help="directory to write the files to [data/tasks]")
    p.add_argument("--tasks", help="tasks, or with --text passages, separated by commas [all]")
    p.add_argument("--text", help="plant passages in this text: a .txt file, or a shard of tokens")
    p.add_argument("--lengths", type=console.naturals, default=[128, 256, 512, 1024],
                   help="with --text: tokens in a window [128,256,512,1024]")
    p.add_argument("--length", type=positive, default=10, help="most symbols in training, times 0.8 to 8 [10]")
    p.add_argument("--examples", type=positive, default=100_000, help="training examples of each task [100000]")
    p.add_argument("--test_examples", type=positive, help="test examples in each file [500; with --text 64]")
    p.add_argument("--seed", type=natural, default=42, help="seed of the examples [42]")
    args = p.parse_args(argv)
    known = PASSAGES if args.text else TASKS
    args.tasks = args.tasks.split(",") if args.tasks else list(known)
    args.test_examples = args.test_examples or (64 if args.text else 500)
    for task in args.tasks:
        if task not in known:
            raise BadInput(f"--tasks: expected some of {', '.join(known)}, got {task}")
    for task in args.tasks:
        if family(task) in ("recall", "mqrar") and 8 * trained_length(task, args.length) > len(KEYS):
            raise BadInput(f"--length: expected at most {len(KEYS) // 64 * 10 + 1} for {task}, which has {len(KEYS)} "
                           f"keys, got {args.length}")
        sizes = [(T, args.test_examples) for T in args.lengths] if args.text else [size[3:] for size in files_of(
            task, trained_length(task, args.length), args.examples, args.test_examples)]
        for length, examples in sizes:
            if length * examples > MOST:
                raise BadInput(f"{task}: expected a file of at most {MOST:,} symbols, got {examples:,} examples of "
                               f"{length:,}")
    return args


def trained_length(task, length):
    """the most symbols in training; of recall and mqrar so that there are keys enough for 8 times as many"""
    return max(1, length * TENTHS.get(family(task), 10) // 10)


def multiples(task):
    """of the trained length: how long the test examples are"""
    return tuple(2 ** i for i in range(10 if task == "haystack" else 4))


def files_of(task, length, examples, test_examples):
    """(file, its task, split, symbols, examples) of all files of a task"""
    files = [(f"{task}_train.bin", task, "train", length, examples)]
    return files + [(f"{task}_test{t[len(task):]}_{length * m:04d}.bin", t, "test", length * m,
                     max(1, test_examples * 16 // max(16, m)))
                    for t in (task, *(t for t in ONLY_TESTS if family(t) == task)) for m in multiples(task)]


def tested(file):
    """the task of a file for testing: fflm_sparse of fflm_test_sparse_0080.bin"""
    return file.rsplit("_", 1)[0].replace("_test", "")


def files(args):
    """(name, split, examples, a function that makes the bytes) of all files"""
    if args.text:
        text = read_tokens(args.text)
        for name, make in passages(text, args.tasks, args.lengths, args.seed, args.test_examples):
            yield name, "test", args.test_examples, make
        return
    for task in args.tasks:
        length = trained_length(task, args.length)
        for name, of, split, n, examples in files_of(task, length, args.examples, args.test_examples):
            yield name, split, examples, functools.partial(shard, of, split, n, args.seed, examples)


def main(argv):
    args = parse(argv)
    settings = {"test_examples": args.test_examples, "seed": args.seed}
    settings.update({"text": sha256_of(args.text)} if args.text else {"length": args.length, "examples": args.examples})
    with locked(args.out):
        manifest = Manifest(args.out, settings, {"name": "tasks"})
        manifest.load()
        manifest.data["complete"] = True        # after each file: the directory has the requested tasks
        there = {s["file"] for s in manifest.data["shards"]}
        for name, split, examples, make in files(args):
            if name in there:
                continue
            path, data = os.path.join(args.out, name), make()
            manifest.add({**manifest.write(name, data), "stream": split, "examples": examples})
            row_length = struct.unpack_from("<i", data, 28)[0]
            say(f"wrote {path}: {examples:,} examples in rows of {row_length} tokens")


if __name__ == "__main__":
    run(main)
