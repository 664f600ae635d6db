"""sitecustomize.py -- which Python faults a test reaches, as mut.h says it for C++; Python imports this by its name.

MUT_REACHED=FILE: byte n becomes 1 when a line runs that FILE.lines lists: [[n, file, first line, last line], ...]. A
file is known by its name without folders, so that a copy counts, as in an export."""
import json
import mmap
import os
import sys
import threading


def start(path):
    spans = {}
    with open(path + ".lines", encoding="utf-8") as f:
        for n, name, first, last in json.load(f):
            spans.setdefault(os.path.basename(name), []).append((n, first, last))
    with open(path, "r+b") as f:
        reached = mmap.mmap(f.fileno(), 0)

    def trace(frame, event, _):
        found = spans.get(frame.f_code.co_filename.rpartition("/")[2])
        if found and event == "line":
            for n, first, last in found:
                if first <= frame.f_lineno <= last:
                    reached[n] = 1
        return found and trace

    threading.settrace(trace)
    sys.settrace(trace)


if "MUT_REACHED" in os.environ and os.path.exists(os.environ["MUT_REACHED"] + ".lines"):
    start(os.environ["MUT_REACHED"])
