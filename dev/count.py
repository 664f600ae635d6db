#!/usr/bin/env python3
"""count.py -- how the code reads, in numbers: the lengths of lines, functions and files, the share of comments, what a
reader has to open. Prints one line per count, with the bound that it should keep: at most (<=) or at least (>=). A
missed bound is marked with !, or with ~ and a reason where it is known and accepted. Exit code 1 if any has a !.

    dev/count.py

How it counts: shares are of the lines that are not empty. A line of dashes is not a comment, and neither is a comment
after #endif. A function is what dev/lint.py takes for one: also a method and a test case, but not a struct. A ladder is
a source of dev/cuda/ that has at least three rungs (// rung 1: ...), one of them a shipped kernel.
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


def row(what, value, relation=None, bound=None, note="", reason=""):
    global missed
    good = {"<=": lambda: value <= bound, ">=": lambda: value >= bound, None: lambda: True}[relation]()
    missed += not good and not reason
    missing = "~" if reason else "!"
    mark = " " if good else missing
    percent = " %" if isinstance(value, float) else ""
    shown = f"{value:.1f}{percent}" if percent else str(value)
    limit = f"{relation} {bound}{percent}" if relation else ""
    print(f"{mark} {what:62} {shown:>9}   {limit:10} {note}".rstrip())
    if mark == "~":
        print(f"    because {reason}")


def share(part, whole):
    return 100.0 * part / max(1, whole)


def lines_over(paths, columns):
    lines = [line for p in paths for line in read(p).split("\n") if line.strip()]
    return share(sum(len(line) > columns for line in lines), len(lines))


def comment_share(paths):
    """(lines that are comments, lines with a trailing comment), as shares of the lines that are not empty"""
    whole = trailing = lines = 0
    for p in paths:
        text = read(p)
        commented = {number for number, comment in lint.comments(text) if re.search(r"[A-Za-z]", comment)}
        for number, (line, code) in enumerate(zip(text.split("\n"), lint.without_comments(text).split("\n")), 1):
            lines += bool(line.strip())
            if number in commented and not code.lstrip().startswith("#endif"):
                whole += not code.strip()
                trailing += bool(code.strip())
    return share(whole, lines), share(trailing, lines)


def function_lines(path, name):
    return next((n for _, n, head, _ in lint.functions(read(path)) if re.search(rf"\b{name}\(", head)), 0)


def included(path):
    """the paths of a header and of all headers that it includes"""
    found, left = set(), [path]
    while left:
        p = left.pop()
        if p in found or p not in lint.tracked:
            continue
        found.add(p)
        for name in re.findall(r'#include "([^"]+)"', read(p)):
            left.append(os.path.normpath(os.path.join(os.path.dirname(p), name)))
    return found


def files_to_open(path, kernel):
    """the headers that define the functions, types and constants in a kernel's text, its own header among them"""
    body = next(b for _, _, head, b in lint.functions(read(path)) if kernel + "(" in head)
    code = lint.without_comments(body)
    names = set(re.findall(r"\b([A-Za-z_]\w+)\b", code)) - {"class"}
    start = r"^ *(?:template <[^\n]*> *)?"
    function = r"(?:(?:static|inline|constexpr|__device__|__host__|__forceinline__)\b[^\n=;(]* )NAME\("
    other = r"(?:struct|enum|enum class|using|#define) NAME\b|(?:static |inline )?constexpr [\w ]+ NAME\b"
    found = {path}
    for header in included(path):
        text = lint.without_comments(read(header))
        # the emulations of CUDA's own names on a CPU are not part of the algorithm
        for name in names if header != "llmc/base/device_cpu.h" else ():
            if re.search((start + f"(?:{function}|{other})").replace("NAME", name), text, re.M):
                found.add(header)
    return sorted(found)


def ladders():
    found = []
    for p in files("dev/cuda/*.cu"):
        rungs = re.findall(r"^// rung \d+[^\n]*", read(p), re.M)
        if len(rungs) >= 3 and any("shipped" in rung for rung in rungs):
            found.append(p)
    return found


def count_lines(llmc, trainers, cpp, everything):
    print("lines")
    row("over 120 columns, llmc/", lines_over(llmc, 120), "<=", 2.8)
    row("over 120 columns, trainers", lines_over(trainers, 120), "<=", 2.8)
    row("over 120 columns, all sources", lines_over(everything, 120), "<=", 2.8)
    cuh = [line for p in files("llmc/**/*.cuh") for line in lint.without_comments(read(p)).split("\n") if line.strip()]
    row("that initialise three variables or more, .cuh", share(sum(lint.initialised(x) > 2 for x in cuh), len(cuh)),
        "<=", 0.3)
    code = [line for p in cpp for line in lint.without_comments(read(p)).split("\n")]
    row("with two ternaries or more", sum(lint.ternaries(x) > 1 for x in code), "<=", 1)
    whole, trailing = comment_share(llmc + trainers)
    reason = ("equations, shapes and errors stand at the declarations, in headers that do one thing each; "
              "messages and names say the rest")
    row("that are comments, llmc/ and trainers", whole, ">=", 20, reason=reason)
    row("with a trailing comment", trailing, ">=", 10, reason="likewise")


def count_functions(llmc, trainers, cpp):
    print("functions and files")
    for path in trainers:
        kind = path[len("train_"):-len(".cu")]
        for name in (f"{kind}_forward", f"{kind}_backward", f"{kind}_main"):
            row(f"lines of {name}", function_lines(path, name), "<=", 110)
    longest = max((n, f"{head[:40]} {p}") for p in llmc for _, n, head, _ in lint.functions(read(p)))
    row("lines of the longest function of llmc/", longest[0], note=longest[1])
    long = [f"{p}:{first}" for p in cpp for first, n, _, body in lint.functions(read(p))
            if n > lint.MAX_LINES_FUNCTION and not lint.numbered(body)]
    row("functions over 60 lines without numbered steps", len(long), "<=", 0, ", ".join(long[:3]))
    row("lines of the longest header", max(read(p).count("\n") for p in llmc), "<=", lint.MAX_LINES_HEADER)
    row("lines of the Makefile", read("Makefile").count("\n"), "<=", 160)
    row("files in llmc/ itself", len(files("llmc/*.cuh", "llmc/*.h")), "<=", 14)
    row("folders beneath it", len({os.path.dirname(p) for p in llmc} - {"llmc"}), ">=", 8)


def count_reading():
    print("reading and changing")
    opened = files_to_open("llmc/attention.cuh", "attention_backward_kernel")
    row("files to open for attention's portable backward", len(opened), "<=", 6,
        ", ".join(os.path.basename(p) for p in opened))
    readme = read("README.md")
    row("lines of README.md", readme.count("\n"), "<=", 160)
    row("words of README.md", len(readme.split()), "<=", 2278)
    row("blocks of console output in README.md", len(re.findall(r"^```console", readme, re.M)), ">=", 2)
    row("kernel ladders in dev/cuda/", len(ladders()), ">=", 4)
    row("rows of lint's table of floors", len(lint.FLOORS), "<=", 12)


def main():
    llmc, trainers = files("llmc/**/*.h", "llmc/**/*.cuh"), files("train_*.cu")
    cpp = llmc + trainers + files("test/**/*.h", "test/**/*.cu", "dev/**/*.cu")
    count_lines(llmc, trainers, cpp, sorted(p for p in lint.tracked if p.endswith(lint.SOURCES)))
    count_functions(llmc, trainers, cpp)
    count_reading()
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
