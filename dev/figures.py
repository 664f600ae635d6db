#!/usr/bin/env python3
"""figures.py -- the drawings of docs/tour.md, as SVG that reads on a light and on a dark page.

    dev/figures.py             writes docs/figures/*.svg
    dev/figures.py --check     exit code 1 unless they are what this would write

The drawing of who includes whom is read in the sources; the rest is laid out by hand.
"""
import math
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
STYLE = """
.page { fill: #ffffff; }
text { font: 13px sans-serif; fill: #1f2328; } .small { font-size: 11px; } .number { font-weight: bold; }
.line { stroke: #57606a; fill: none; stroke-width: 1.5; } .thin { stroke: #8c959f; fill: none; }
.box { fill: #eef2f7; stroke: #57606a; } .cable { fill: #ffe3c2; stroke: #bc4c00; } .mark { fill: #bc4c00; }
.hidden { fill: #d0d7de; stroke: #8c959f; } .curve { stroke: #bc4c00; fill: none; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; }
  text { fill: #e6edf3; } .line { stroke: #9ea7b3; } .thin { stroke: #6e7681; }
  .box { fill: #21262d; stroke: #9ea7b3; } .cable { fill: #5a3010; stroke: #f0883e; } .mark { fill: #f0883e; }
  .hidden { fill: #30363d; stroke: #6e7681; } .curve { stroke: #f0883e; }
}"""


def kind_of(hidden, mine):
    """how a tile is drawn"""
    if hidden:
        return "hidden"
    return "cable" if mine else "box"


class Drawing:
    """an SVG that grows by calls; x to the right, y downwards"""
    def __init__(self, width, height, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                      f'height="{height}" role="img">', f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
                      f'<rect width="{width}" height="{height}" class="page"/>',
                      '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                      'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker></defs>']

    def box(self, x, y, w, h, text="", kind="box"):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" class="{kind}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 4.5, text, "middle")

    def text(self, x, y, text, anchor="start", kind=""):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def line(self, *points, kind="line", tip=False):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<polyline points="{path}" class="{kind}"{end}/>')

    def dot(self, x, y):
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3.5" class="mark"/>')

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def block():
    """the ten numbers of gpt2_forward, beside the stream that they read and add to"""
    d = Drawing(640, 560, "A block of GPT-2 with the numbers of gpt2_forward")
    stream = 60
    d.text(stream, 22, "tokens", "middle")
    d.line((stream, 30), (stream, 528), tip=True)
    steps = [(1, "layernorm", "ln1"), (2, "matmul: q k v and the encoding's columns", "qkv (B,T,OC)"),
             (3, "the encoding prepares: S and g", "S, g (B,NH,T)"), (4, "attention, with its bias", "atty (B,T,C)"),
             (5, "matmul: mixes the heads", "residual2"), (6, "layernorm", "ln2"), (7, "matmul: C to 4C", "fch"),
             (8, "GELU", "fchgelu"), (9, "matmul: 4C to C", "residual3"), (10, "the last layernorm", "lnf")]
    for n, what, leaves in steps:
        y = 60 + (n - 1) * 46 + (14 if n == 10 else 0)
        d.box(130, y, 310, 30, what, "cable" if n in (3, 4) else "box")
        d.text(118, y + 20, str(n), "end", "number")
        d.text(456, y + 20, leaves, kind="small")
        if n in (1, 6, 10):
            d.line((stream, y + 15), (94, y + 15), tip=True)
        if n not in (5, 9, 10):
            d.line((285, y + 30), (285, y + 45), kind="thin", tip=True)
        if n in (5, 9):
            d.line((130, y + 30), (130, y + 38), (stream + 8, y + 38), kind="line", tip=True)
            d.text(stream - 6, y + 42, "+", "end", "number")
    d.line((540, 60), (550, 60), (550, 460), (540, 460), kind="thin")
    d.text(558, 262, "L layers", kind="small")
    d.text(130, 552, "the head: logits = lnf wte^T, then the losses")
    return d


def tiles():
    """how one block of the forward kernel walks over keys"""
    d = Drawing(640, 330, "A tile of queries walks over the tiles of keys")
    size, left, top, row, n = 36, 70, 40, 5, 7
    d.text(left, 26, "keys: tiles of 64")
    d.text(left - 12, top + 14, "queries", "end")
    for r in range(n):
        for c in range(n):
            d.box(left + c * size, top + r * size, size - 2, size - 2, kind=kind_of(c > r, r == row))
            if c == r:
                x, y = left + c * size, top + r * size
                d.line((x, y), (x + size - 2, y + size - 2), kind="thin")
    y = top + row * size + size / 2
    d.line((left + row * size + 20, y), (left + 8, y), kind="curve", tip=True)
    x = left + n * size + 30
    for k, text in enumerate(("One block of threads has a tile of queries.", "It visits the tiles of keys they see:",
                              "scores = scale q k^T, hidden pairs become -inf", "logits = scores + B_ij",
                              "largest = max(largest, logits)", "sum = shrink sum + e^(logit - largest)",
                              "O = shrink O + P v")):
        below = k > 1
        d.text(x, 76 + k * 24 + 8 * below, text, kind="small" * below)
    d.text(x, 276, "At the end: out = O / sum,")
    d.text(x, 296, "lse = largest + log(sum) for the backward.")
    return d


def running_sum():
    """S by chunks of 128 tokens"""
    d = Drawing(640, 300, "S as an origin for each chunk and an offset inside it")
    left, bottom, chunk, height = 60, 240, 130, 190
    points, S = [], 0.0
    for t in range(4 * chunk + 1):
        b = max(0.0, math.sin(t / 9.0) + 0.6 * math.sin(t / 23.0))      # what a ReLU leaves
        points.append((left + t, bottom - S))
        S += 0.44 * b
    scale = height / S
    points = [(x, bottom - (bottom - y) * scale) for x, y in points]
    d.line((left, bottom), (left + 4 * chunk + 20, bottom), tip=True)
    d.line((left, bottom), (left, 30), tip=True)
    d.text(left + 4 * chunk + 8, bottom + 18, "t")
    d.text(left - 8, 34, "S_t", "end")
    for c in range(4):
        x, y = points[c * chunk]
        d.line((x, bottom), (x, 40), kind="thin")
        d.line((x, y), (x + chunk, y), kind="thin")
        d.dot(x, y)
        d.text(x, bottom + 18, str(128 * c), "middle", "small")
    d.line(*points, kind="curve")
    x, y = points[2 * chunk]
    d.text(x + 8, y + 16, "S_origin[2]: float64", kind="small")
    x, y = points[2 * chunk + 100]
    d.line((x, points[2 * chunk][1]), (x, y + 3), kind="line", tip=True)
    d.text(x + 6, (points[2 * chunk][1] + y) / 2 + 4, "S_offset[t]: float32", kind="small")
    d.text(left, 284, "S_t = origin of the chunk + offset", kind="small")
    d.text(left + 240, 284, "S_i - S_j = float(origin_i - origin_j) + offset_i - offset_j", kind="small")
    return d


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


PLACES = {"trainers": (320, 30), "llmc/lab": (460, 110), "llmc/engine": (180, 170), "llmc/attention": (500, 230),
          "llmc": (320, 290), "llmc/position": (500, 340), "llmc/base": (320, 400)}


def includes():
    """who includes whom"""
    d = Drawing(640, 440, "Which folder includes which")
    for a, b in sorted(inclusions()):
        (x0, y0), (x1, y1) = PLACES[a], PLACES[b]
        length = math.hypot(x1 - x0, y1 - y0)
        at = min(1.0, 24 / length if abs(y1 - y0) > abs(x1 - x0) * 0.4 else 60 / length)
        start, end = [(x0 + (x1 - x0) * f, y0 + (y1 - y0) * f) for f in (at, 1 - at)]
        d.line(*((round(x, 1), round(y, 1)) for x, y in (start, end)), kind="thin")
    for name, (x, y) in PLACES.items():
        d.box(x - 58, y - 15, 116, 30, name, "cable" if name == "llmc/position" else "box")
    d.text(16, 430, "Higher includes lower, never the other way; all of them include llmc/base.", kind="small")
    return d


def owners():
    """the two kernels of the backward, and which sums each owns"""
    d = Drawing(640, 330, "Two kernels of the backward, each the only writer of its sums")
    size, n = 30, 6
    for left, title, own, sums in ((40, "dkdv: a block owns keys", "keys", ("dk_j, dv_j", "dS_j += its column")),
                                   (360, "dq: a block owns queries", "queries", ("dq_i, dg_i", "dS_i -= its row"))):
        top = 50
        d.text(left, 26, title, kind="number")
        for r in range(n):
            for c in range(n):
                mine = c == 2 if own == "keys" else r == 4
                d.box(left + c * size, top + r * size, size - 2, size - 2, kind=kind_of(c > r, mine))
        if own == "keys":
            x = left + 2 * size + size / 2
            d.line((x, top + 2 * size + 6), (x, top + n * size - 6), kind="curve", tip=True)
        else:
            y = top + 4 * size + size / 2
            d.line((left + 6, y), (left + 5 * size - 6, y), kind="curve", tip=True)
        for k, text in enumerate(sums):
            d.text(left, top + n * size + 26 + 20 * k, text)
    d.text(40, 300, "Both recompute P and dlogit from q, k, v and lse: seven products where five would do,")
    d.text(40, 320, "so that every sum has one writer and one order, and the same input gives the same bits.")
    return d


FIGURES = {"block": block, "tiles": tiles, "running_sum": running_sum, "includes": includes, "owners": owners}


def main():
    stale = []
    for name, draw in FIGURES.items():
        path, text = os.path.join(ROOT, "docs", "figures", name + ".svg"), draw().svg()
        if "--check" not in sys.argv[1:]:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        elif not os.path.exists(path) or open(path, encoding="utf-8").read() != text:
            stale.append(name)
    if stale:
        print(f"docs/figures: {', '.join(stale)} changed: run dev/figures.py and look at the result")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
