#!/usr/bin/env python3
"""figures.py -- docs/figures/includes.svg, the drawing of who includes whom, from the sources. The other drawings of
docs/tour.md are written by hand, with the same styles.

    dev/figures.py             writes the drawing
    dev/figures.py --check     exit code 1 unless it is what this would write
"""
import math
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
FIGURES = os.path.join(ROOT, "docs", "figures")
PLACES = {"trainers": (320, 30), "llmc/lab": (460, 110), "llmc/engine": (180, 170), "llmc/attention": (500, 230),
          "llmc": (320, 290), "llmc/position": (500, 340), "llmc/base": (320, 400)}


def folder_of(path):
    path = path.replace("llmc/attention.cuh", "llmc/attention/").replace("llmc/cable.cuh", "llmc/position/")
    parts = path.split("/")
    if len(parts) > 2:
        return "/".join(parts[:2])
    return "llmc" if parts[0] == "llmc" else "trainers"


def inclusions():
    """{(folder, folder)}: who includes whom, of llmc/ and the trainers; all include llmc/base"""
    found = set()
    paths = [p for p in os.listdir(ROOT) if re.fullmatch(r"train_\w+\.cu", p)]
    for directory, _, names in os.walk(os.path.join(ROOT, "llmc")):
        paths += [os.path.relpath(os.path.join(directory, n), ROOT) for n in names if n.endswith((".h", ".cuh"))]
    for path in paths:
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            for name in re.findall(r'^#include "([^"]+)"', f.read(), re.M):
                edge = folder_of(path), folder_of(os.path.normpath(os.path.join(os.path.dirname(path), name)))
                if edge[0] != edge[1] and edge[1].startswith("llmc") and edge[1] != "llmc/base":
                    found.add(edge)
    return found


def includes(old):
    """the drawing: `old` with a line for each inclusion and a box for each folder; what stands around them stays"""
    lines, boxes = [], []
    for a, b in sorted(inclusions()):
        (x0, y0), (x1, y1) = PLACES[a], PLACES[b]
        length = math.hypot(x1 - x0, y1 - y0)
        at = min(1.0, 24 / length if abs(y1 - y0) > abs(x1 - x0) * 0.4 else 60 / length)
        points = [(round(x0 + (x1 - x0) * f, 1), round(y0 + (y1 - y0) * f, 1)) for f in (at, 1 - at)]
        lines.append('<polyline points="' + " ".join(f"{x:g},{y:g}" for x, y in points) + '" class="thin"/>')
    for name, (x, y) in PLACES.items():
        kind = "cable" if name == "llmc/position" else "box"
        boxes.append(f'<rect x="{x - 58}" y="{y - 15}" width="116" height="30" rx="3" class="{kind}"/>\n'
                     f'<text x="{x:g}" y="{y + 4.5:g}" text-anchor="middle" class="">{name}</text>')
    head, foot = old.partition("</defs>\n")[0], old[old.rindex("<text"):]
    return head + "</defs>\n" + "\n".join([*lines, *boxes]) + "\n" + foot


def main():
    path = os.path.join(FIGURES, "includes.svg")
    with open(path, encoding="utf-8") as f:
        old = f.read()
    new = includes(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print("docs/figures/includes.svg changed: run dev/figures.py and look at the result")
        return int(new != old)
    with open(path, "w", encoding="utf-8") as f:
        f.write(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
