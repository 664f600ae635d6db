#!/usr/bin/env python3
"""recipe.py -- follows docs/new_encoding.md, docs/new_kernel.md and README.md to the letter, so that they cannot rot.

    python3 dev/recipe.py           what changes code, in a copy of the sources
    python3 dev/recipe.py --here    the rest of README.md, after `make demo`, with what this tree has built

Follows the marked code blocks of the pages in order: writes files and inserts lines, then runs commands. --here runs
them in a directory of links to this tree, so that what they write to run/ does not stay. A mark is an HTML comment on
the line before the block, invisible to the reader:

    <!-- file: PATH -->                         the block is the file
    <!-- insert: PATH after "TEXT" -->          the block goes after the one line of PATH that contains TEXT
    <!-- run -->                                the block is run by bash, and must succeed
    <!-- run: prints "TEXT" -->                 ... and print TEXT
    <!-- run: needs MODULE -->                  ... skipped unless a python3 has this module
    <!-- copy: prints "TEXT" -->                the same for an edit in README.md, which --here leaves out
    <!-- launches: PATH has A and B, not C -->  after the run: kernels were launched in A and in B, and none in C

What was added must satisfy dev/lint.py. The commands compile with -O1. The first step that fails ends the work with
exit code 1.
"""
import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

from lint import tracked_files

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES, HERE = ["docs/new_encoding.md", "docs/new_kernel.md", "README.md"], ["README.md"]
MARK = re.compile(r"<!-- (file|insert|run|copy|launches)\b:? *(.*?) *-->$")
# a code block with the marks before it, or a mark that has none
PART = re.compile(r"^(?P<marks>(<!--.*\n)*)```.*\n(?P<text>((?!```).*\n)*)(?P<end>```)?|^(?P<alone><!--.*)", re.M)


class Failure(Exception):
    pass


# place: the page and line where its marks begin; marks: the (kind, words) of each
Block = collections.namedtuple("Block", "place marks text")


def blocks_of(page, text):
    """the marked code blocks of a page; a mark without a block is a Failure"""
    found = []
    for part in PART.finditer(text):
        place, marks = f"{page}:{text[:part.start()].count(chr(10)) + 1}", (part["alone"] or part["marks"]).splitlines()
        for mark in marks:
            if not MARK.match(mark):
                raise Failure(f"{place}: expected a mark of dev/recipe.py, got {mark}")
        if part["alone"]:
            raise Failure(f"{place}: expected a code block after the mark")
        if marks and not part["end"]:
            raise Failure(f"{place}: this code block has no end")
        if marks:                                       # the rest is only for the reader
            found.append(Block(place, [MARK.match(mark).groups() for mark in marks], part["text"]))
    return found


def followed(page, blocks, here):
    """all of a page's blocks, but of README.md what edits the sources in the copy, and the rest here"""
    return [b for b in blocks if page not in HERE or here == (b.marks[0][0] != "copy")]


def copy_sources(target):
    """what git tracks and what it would"""
    for name in tracked_files(ROOT):
        os.makedirs(os.path.dirname(os.path.join(target, name)), exist_ok=True)
        shutil.copy2(os.path.join(ROOT, name), os.path.join(target, name))


def link_sources(target):
    for name in os.listdir(ROOT):
        if name not in (".git", "run"):
            os.symlink(os.path.join(ROOT, name), os.path.join(target, name))


def python_with(module):
    """a python3 that has this module, or None"""
    chooser = [os.path.join(ROOT, "dev", "install.sh"), "--python", module]
    own = os.path.join(ROOT, "build", "pytorch", "bin", "python3")
    environment = {**os.environ, "PYTHON": own if os.path.exists(own) else os.environ.get("PYTHON", "")}
    found = subprocess.run(chooser, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return shutil.which(found.stdout.strip() or "-")


class Recipe:
    def __init__(self, directory, here=False):
        self.directory, self.here = directory, here
        self.counts = collections.Counter()             # of steps that are ok, FAILED or skipped

    def at(self, path):
        return os.path.join(self.directory, path)

    def step(self, name, work, *arguments):
        """work() returns why it was skipped, or None"""
        start, how = time.monotonic(), "FAILED"
        try:
            why = work(*arguments)
            how = "skipped" if why else "ok"
        except Failure as failure:
            why = f"\n{failure}"
            raise
        finally:
            self.counts[how] += 1
            self.say(f"{how:7} {time.monotonic() - start:6.1f} s  {name}" + f": {why}" * bool(why))

    def follow(self, block):
        for kind, words in block.marks:
            what = words
            if kind in ("run", "copy"):
                first, _, rest = block.text.partition("\n")
                what = first + " ..." * bool(rest)
            self.step(f"{kind}: {what}, {block.place}", getattr(self, kind), words, block)

    @staticmethod
    def parse(pattern, words, block, wanted):
        match = re.fullmatch(pattern, words)
        if match is None:
            raise Failure(f"{block.place}: expected {wanted}, got {words!r}")
        return match.groups()

    def say(self, line):
        print(line, flush=True)

    def file(self, path, block):
        if os.path.exists(self.at(path)):
            raise Failure(f"{path} exists already")
        os.makedirs(os.path.dirname(self.at(path)), exist_ok=True)
        with open(self.at(path), "w", encoding="utf-8") as f:
            f.write(block.text)

    def insert(self, words, block):
        path, text = self.parse(r'(\S+) after "(.*)"', words, block, 'PATH after "TEXT"')
        with open(self.at(path), encoding="utf-8") as f:
            lines = f.read().splitlines(keepends=True)
        places = [k for k, line in enumerate(lines) if text in line]
        if len(places) != 1:
            raise Failure(f"{block.place}: expected one line of {path} with {text!r}, got {len(places)}")
        lines.insert(places[0] + 1, block.text)
        with open(self.at(path), "w", encoding="utf-8") as f:
            f.write("".join(lines))

    def run(self, words, block):
        prints, module = self.parse(r'(?:prints "(.*)"|needs (\w+)|)', words, block, 'prints "TEXT" or needs MODULE')
        environment = dict(os.environ)
        if not self.here:
            environment["MAKEFLAGS"] = "CXXFLAGS=-O1"               # half the time of the compiler, the same tests
        if module:
            python = python_with(module)
            if python is None:
                return f"no python3 here has {module}"
            environment["PATH"] = os.path.dirname(python) + os.pathsep + environment["PATH"]
        run = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], cwd=self.directory, env=environment,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             errors="replace")
        if run.returncode != 0:
            last = "\n".join(run.stdout.split("\n")[-60:])
            raise Failure(f"{block.place}: exit code {run.returncode}\n{block.text}The end of the output:\n{last}")
        if prints and prints not in run.stdout:
            raise Failure(f"{block.place}: expected {prints!r} in the output, got\n{run.stdout}")
        skipped = re.search(r".*(skipped=[1-9]|\b[1-9]\d* skipped).*", run.stdout)
        if skipped:
            raise Failure(f"{block.place}: expected every test to run, got {skipped.group(0)}\n{run.stdout}")
        for line in run.stdout.split("\n"):
            if re.search(r"\bmissing\b|\b\d+ passed, \d+ failed|All tests passed", line):
                self.say(f"            {line.strip()}")
        return None

    copy = run

    def launches(self, words, block):
        path, places, absent = self.parse(r"(\S+) has (.*), not (\S+)", words, block, "PATH has A and B, not C")
        with open(self.at(path), encoding="utf-8") as f:
            launched = [os.path.normpath(line.split()[1].rsplit(":", 1)[0]) for line in f]
        for place in places.split(" and "):
            if place not in launched:
                got = ", ".join(sorted(set(launched)))
                raise Failure(f"{path}: expected kernels launched in {place}, got those in {got}")
        if absent in launched:
            raise Failure(f"{path}: expected no kernel of {absent}, got {launched.count(absent)} launched")

    def lint(self):
        """the findings of dev/lint.py, without their lines"""
        run = subprocess.run([sys.executable, "dev/lint.py"], cwd=self.directory, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
        *found, last = run.stdout.rstrip("\n").split("\n")
        if not last.startswith("lint: "):
            raise Failure(run.stdout)
        return {re.sub(r":\d+:", ":", line) for line in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--here", action="store_true", help="README.md, in a directory of links to this tree")
    args = parser.parse_args()
    start = time.monotonic()
    pages = HERE if args.here else PAGES
    directory = tempfile.mkdtemp(prefix="recipe_")
    recipe = Recipe(directory, args.here)
    try:
        (link_sources if args.here else copy_sources)(directory)
        blocks = []
        for page in pages:
            with open(recipe.at(page), encoding="utf-8") as f:
                blocks += followed(page, blocks_of(page, f.read()), args.here)
        changes = [b for b in blocks if b.marks[0][0] in ("file", "insert")]
        if len(blocks) == len(changes):
            raise Failure(f"{', '.join(pages)}: expected blocks marked run, got none")
        findings = recipe.lint() if changes else set()
        for block in changes:
            recipe.follow(block)
        if new := recipe.lint() - findings if changes else ():
            raise Failure("dev/lint.py does not accept what was added:\n" + "\n".join(sorted(new)))
        for block in blocks:
            if block not in changes:
                recipe.follow(block)
    except Failure as failure:
        if not recipe.counts["FAILED"]:
            recipe.counts["FAILED"] = 1
            print(failure)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{time.monotonic() - start:.0f} s\n{recipe.counts['ok']} passed, {recipe.counts['FAILED']} failed, "
          f"{recipe.counts['skipped']} skipped")
    return 1 if recipe.counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
