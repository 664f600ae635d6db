#!/usr/bin/env python3
"""count.py -- how the code reads, in numbers: the lengths of lines, functions and files, the share of comments, what an addition
takes. Prints one line per count beside what it should be at most (<=) or at least (>=); exit code 1 if any is missed.

    dev/count.py
"""
import glob
import os
import re
import sys

import lint

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
lint.tracked.update(lint.tracked_files("."))
missed = 0


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def files(*patterns):
    return sorted(p for pattern in patterns for p in glob.glob(pattern, recursive=True) if p in lint.tracked)


def row(what, value, relation=None, bound=None, note=""):
    global missed
    good = relation is None or (value <= bound if relation == "<=" else value >= bound)
    missed += not good
    shown = f"{value:.1f} %" if isinstance(value, float) else str(value)
    limit = "" if relation is None else f"{relation} {bound}{' %' if isinstance(value, float) else ''}"
    print(f"{'' if good else '!':1} {what:62} {shown:>9}   {limit:10} {note}".rstrip())


def share(part, whole):
    return 100.0 * part / max(1, whole)


def lines_over(paths, columns):
    lines = [line for p in paths for line in read(p).split("\n")]
    return share(sum(len(line) > columns for line in lines), len(lines))


def comment_share(paths):
    """whole lines and trailing comments, as shares of the lines that are not empty"""
    whole = trailing = lines = 0
    for p in paths:
        text = read(p)
        commented = {number for number, _ in lint.comments(text)}
        for number, (line, code) in enumerate(zip(text.split("\n"), lint.without_comments(text).split("\n")), 1):
            lines += bool(line.strip())
            whole += number in commented and not code.strip()
            trailing += number in commented and bool(code.strip())
    return share(whole, lines), share(trailing, lines)


def function_lines(path, name):
    return next((count for _, count, head, _ in lint.functions(read(path)) if re.search(rf"\b{name}\(", head)), 0)


def included(path):
    """a header and all that it includes, as paths"""
    found, left = set(), [path]
    while left:
        p = left.pop()
        if p in found or p not in lint.tracked:
            continue
        found.add(p)
        left += [os.path.normpath(os.path.join(os.path.dirname(p), m)) for m in re.findall(r'#include "([^"]+)"', read(p))]
    return found


def files_to_open(path, kernel):
    """the headers whose functions and types a kernel's text uses"""
    body = next(b for _, _, head, b in lint.functions(read(path)) if kernel + "(" in head)
    used = re.findall(r"(?<![.\w])([a-zA-Z_]\w+)\s*(?=[(<{])|\b([A-Z]\w+) \w", lint.without_comments(body))
    names = {n for pair in used for n in pair if n} - {"if", "for", "while", "sizeof", "int", "float", "size_t", "template", "const"}
    found = {path}
    for header in included(path):
        code = lint.without_comments(read(header))
        for name in names:
            if re.search(rf"^(?:template <[^\n]*> )?(?:struct {name}\b|(?:inline|__device__|__forceinline__|__host__)[^\n=;(]* {name}\()", code, re.M):
                found.add(header)
    return sorted(found)


def main():
    llmc, trainers = files("llmc/**/*.h", "llmc/**/*.cuh"), files("train_*.cu")
    cpp = llmc + trainers + files("test/**/*.h", "test/**/*.cu", "dev/**/*.cu")
    everything = sorted(p for p in lint.tracked if p.endswith(lint.SOURCES))

    print("lines")
    row("over 120 columns, llmc/", lines_over(llmc, 120), "<=", 2.8)
    row("over 120 columns, trainers", lines_over(trainers, 120), "<=", 2.8)
    row("over 120 columns, all sources", lines_over(everything, 120), "<=", 2.8)
    cuh = [line for p in files("llmc/**/*.cuh") for line in lint.without_comments(read(p)).split("\n")]
    row("that initialise three variables or more, .cuh", share(sum(lint.initialised(x) > 2 for x in cuh), len(cuh)), "<=", 0.3)
    code = [line for p in cpp for line in lint.without_comments(read(p)).split("\n")]
    row("with two ternaries or more", sum(lint.ternaries(x) > 1 for x in code), "<=", 1)
    whole, trailing = comment_share(llmc + trainers)
    row("that are comments, llmc/ and trainers", whole, ">=", 20)
    row("with a trailing comment", trailing, ">=", 10)

    print("functions and files")
    for path in trainers:
        kind = path[len("train_"):-len(".cu")]
        for name in (f"{kind}_forward", f"{kind}_backward", f"{kind}_main"):
            row(f"lines of {name}", function_lines(path, name), "<=", 110)
    longest = max((count, f"{head[:40]} {p}") for p in llmc for _, count, head, body in lint.functions(read(p)))
    row("lines of the longest function of llmc/", longest[0], note=longest[1])
    long = [h for p in cpp for _, n, h, b in lint.functions(read(p)) if n > 60 and not re.search(r"(//|/\*) 2[. ]", b)]
    row("functions over 60 lines without numbered steps", len(long), "<=", 0, ", ".join(h[:30] for h in long[:3]))
    row("lines of the longest header", max(read(p).count("\n") for p in llmc), "<=", 400)
    row("lines of the Makefile", read("Makefile").count("\n"), "<=", 160)
    row("files in llmc/ itself", len(files("llmc/*.cuh", "llmc/*.h")), "<=", 14)
    row("folders beneath it", len({os.path.dirname(p) for p in llmc} - {"llmc"}), ">=", 8)

    print("reading and changing")
    opened = files_to_open("llmc/attention.cuh", "attention_backward_kernel")
    row("files to open for attention's portable backward", len(opened), "<=", 6, ", ".join(os.path.basename(p) for p in opened))
    readme = read("README.md")
    row("lines of README.md", readme.count("\n"), "<=", 160)
    row("words of README.md", len(readme.split()), "<=", 2278)
    row("blocks of console output in README.md", len(re.findall(r"^```console", readme, re.M)), ">=", 2)
    row("kernel ladders in dev/cuda/", len({os.path.basename(p).split(".")[0] for p in files("dev/cuda/*.cu")}), ">=", 4)
    floors = len(lint.FLOORS)
    row("rows of lint's table of floors", floors, "<=", 12)
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
