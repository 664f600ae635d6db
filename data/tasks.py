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
recall    c7a3F0=a3F0c7        the values that belong to keys, asked in another order; only the values count

TASK_train.bin has examples of 1 to --length symbols (addition: bits; recall: pairs), every length equally often.
TASK_test_NNNN.bin has examples of exactly NNNN symbols: 1, 2, 4 and 8 times --length. Example k of a file depends only
on the task, the length, --seed and k, on every machine. No test example is among the training examples: an eighth
of all questions of at least 8 symbols, chosen by checksum, is for testing, and the rest for training.
"""
import hashlib
import os
import struct
import sys
from array import array

from common import (HEADER_BYTES, MAGIC, VERSION_ROWS, BadInput, Manifest, locked, positive, natural, run, say,
                    sha256_of, write_file)

END, ANSWER = ord("\n"), 1 << 15
VOCABULARY = 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEYS = LETTERS + LETTERS.upper() + "!#$%&*+-/<>?"
DIGITS = "0123456789"
HELD_OUT, HELD_OUT_SYMBOLS = 8, 8       # one question in 8, of those that have 8 symbols or more


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

def copy(draws, n):
    x = draws.text(LETTERS, n)
    return x, x


def reverse(draws, n):
    x = draws.text(LETTERS, n)
    return x, x[::-1]


def sort(draws, n):
    x = draws.text(LETTERS, n)
    return x, "".join(sorted(x))


def addition(draws, n):
    a, b = draws.text("01", n), draws.text("01", n)
    total = int(a[::-1], 2) + int(b[::-1], 2)
    return f"{a}+{b}", f"{total:0{n + 1}b}"[::-1]


def running_sums(digits, modulus):
    total, sums = 0, []
    for d in digits:
        total = (total + int(d)) % modulus
        sums.append(str(total))
    return "".join(sums)


def parity(draws, n):
    x = draws.text("01", n)
    return x, running_sums(x, 2)


def modsum(draws, n):
    x = draws.text(DIGITS, n)
    return x, running_sums(x, 10)


def recall(draws, n):
    keys, values = draws.sample(KEYS, n), draws.text(DIGITS, n)
    asked = draws.sample(range(n), n)
    pairs = [k + v for k, v in zip(keys, values)]
    return "".join(pairs), "".join(pairs[i] for i in asked)


TASKS = {f.__name__: f for f in (copy, reverse, sort, addition, parity, modsum, recall)}


def row_tokens(task, n):
    """tokens of an example of n symbols: newline, question, =, answer, newline"""
    question = {"addition": 2 * n + 1, "recall": 2 * n}.get(task, n)
    answer = {"addition": n + 1, "recall": 2 * n}.get(task, n)
    return question + answer + 3


def is_held_out(task, question):
    return hashlib.sha256(f"{task} {question}".encode()).digest()[0] % HELD_OUT == 0


def example(task, split, length, seed, k):
    """(question, answer) number k; split: train, with up to `length` symbols, or test, with exactly that many"""
    for attempt in range(1000):
        draws = Draws(f"{task} {split} {length} {seed} {k} {attempt}")
        n = 1 + draws.below(length) if split == "train" else length
        question, answer = TASKS[task](draws, n)
        if n < HELD_OUT_SYMBOLS or is_held_out(task, question) == (split == "test"):
            return question, answer
    raise AssertionError(f"{task}: no example for {split} in 1000 attempts")


def row(task, question, answer, tokens):
    """the ids of an example in a row of this many tokens; the ones of the answer carry the mark ANSWER"""
    ids = list(f"\n{question}=".encode())
    for i, c in enumerate(answer.encode()):
        ids.append(c if task == "recall" and i % 2 == 0 else c + ANSWER)       # a key of recall is given
    ids.append(END + ANSWER)
    return ids + [END] * (tokens - len(ids))


def shard(task, split, length, seed, examples):
    """the bytes of a file; llmc/engine/text/dataloader.h describes them"""
    tokens = row_tokens(task, length)
    ids = array("H")
    for k in range(examples):
        ids.extend(row(task, *example(task, split, length, seed, k), tokens))
    if sys.byteorder == "big":
        ids.byteswap()
    header = struct.pack("<9i", MAGIC, VERSION_ROWS, len(ids), VOCABULARY, END, 0, 0, tokens,
                         length if split == "test" else 0)
    return header.ljust(HEADER_BYTES, b"\0") + ids.tobytes()


def parse(argv):
    import argparse
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("--out", default="data/tasks", help="directory to write the files to [data/tasks]")
    p.add_argument("--tasks", default=",".join(TASKS), help="tasks, separated by commas [all]")
    p.add_argument("--length", type=positive, default=10, help="most symbols in training; recall: 8 tenths [10]")
    p.add_argument("--examples", type=positive, default=100_000, help="training examples of each task [100000]")
    p.add_argument("--test_examples", type=positive, default=500, help="test examples of each length [500]")
    p.add_argument("--seed", type=natural, default=42, help="seed of the examples [42]")
    args = p.parse_args(argv)
    args.tasks = args.tasks.split(",")
    for task in args.tasks:
        if task not in TASKS:
            raise BadInput(f"--tasks: expected some of {', '.join(TASKS)}, got {task}")
    return args


def trained_length(task, length):
    """recall: so that there are keys enough for 8 times as many pairs"""
    return max(1, length * 8 // 10) if task == "recall" else length


def main(argv):
    args = parse(argv)
    if "recall" in args.tasks and 8 * trained_length("recall", args.length) > len(KEYS):
        raise BadInput(f"--length: expected at most {len(KEYS) // 64 * 10 + 1} for recall, which has {len(KEYS)} keys, "
                       f"got {args.length}")
    settings = {"length": args.length, "examples": args.examples, "test_examples": args.test_examples,
                "seed": args.seed}
    with locked(args.out):
        manifest = Manifest(args.out, settings, {"name": "tasks"})
        manifest.load()
        manifest.data["complete"] = True        # after each file: the directory has the requested tasks
        there = {s["file"] for s in manifest.data["shards"]}
        for task in args.tasks:
            length = trained_length(task, args.length)
            files = [(f"{task}_train.bin", "train", length, args.examples)]
            files += [(f"{task}_test_{length * m:04d}.bin", "test", length * m, args.test_examples)
                      for m in (1, 2, 4, 8)]
            for name, split, n, examples in files:
                if name in there:
                    continue
                path = os.path.join(args.out, name)
                data = shard(task, split, n, args.seed, examples)
                write_file(path, data)
                manifest.add({"file": name, "bytes": len(data), "sha256": sha256_of(path), "stream": split,
                              "examples": examples})
                say(f"wrote {path}: {examples:,} examples in rows of {row_tokens(task, n)} tokens")


if __name__ == "__main__":
    run(main)
