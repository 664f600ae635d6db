"""ledger.py -- results that grow by a row at a time, and shares of the work: what mutate.py,
ranks_long.py and reliability.py have in common."""
import argparse
import csv
import os
import re


def part_of(text):
    """(k, n) of --part k/n, for argparse; the share is share(part, things)"""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"expected k/n with k <= n, got {text}")
    return int(found[1]), int(found[2])


def share(part, things):
    """every n-th thing, from the k-th on"""
    k, n = part
    return things[k - 1::n]


def read(path):
    """the rows of a CSV, none where there is no file yet"""
    if not os.path.exists(path):
        return []
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def append(path, row, columns=None):
    """adds a row; columns: those of the file, in their order, if not the keys of the row"""
    fresh = not os.path.exists(path)
    with open(path, "a", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, columns or list(row), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)
