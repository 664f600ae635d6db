"""ledger.py -- results that grow by a few rows at a time, and the commit of a result."""
import csv
import io
import itertools
import os
import subprocess

import console
from console import ROOT, BadInput


def commit(*paths, clean=False):
    """The commit that last changed these paths, all but results if none are given; with + if they differ from it, which
    `clean` refuses. "unknown" outside a repository."""
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words, "--", *(paths or (".", ":!dev/results"))], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.strip()
    try:
        changed, found = git("status", "--porcelain", "-uno"), git("log", "-1", "--format=%h", "--abbrev=10")
    except OSError:
        return "unknown"
    if changed and clean:
        raise BadInput(f"expected sources that are committed, for the results to name a commit; got\n{changed}")
    return (found or "unknown") + ("+" if changed else "")


def read(path, columns=None, key=()):
    """the rows of a CSV, as console.read_table() gives them; none where there is no file yet"""
    return console.read_table(path, columns, key) if os.path.exists(path) else []


def comments(path):
    """the lines at the top of a CSV that begin with #; none if there is no CSV yet"""
    text = console.read_bytes(path).decode("utf-8-sig", "surrogateescape") if os.path.exists(path) else ""
    return [line.strip() for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())]


def write(path, rows, about=""):
    """A CSV of these rows, below a comment, or without one below the comments that the file has. A kill at any moment
    leaves the old file or the new one"""
    text = io.StringIO()
    text.writelines(line + "\n" for line in ([f"# {console.one_line(about)}"] if about else comments(path)))
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    console.write_whole(path, text.getvalue())


def add(path, rows, key, about=""):
    """Adds the rows that a CSV lacks; key: the columns that tell rows apart; about: a new file's comment. A kill at any
    moment leaves the old file or the new one, also beside another process"""
    with console.locked(os.path.dirname(os.path.abspath(path)), wait=True):
        columns = dict.fromkeys(rows[0] if rows else key, console.TEXT)
        old, identity = read(path, columns), lambda row: tuple(str(row[name]) for name in key)
        known = set(map(identity, old))
        if new := [row for row in rows if identity(row) not in known]:
            write(path, old + new, "" if os.path.exists(path) else about)
