#!/usr/bin/env python3
"""documents.py -- documents with their sections, out of HTML and man pages, for scripts/retriever.py.

    data/documents.py --out data/documents /usr/share/doc/git-doc manual.html /usr/share/man/man1

Source    the files you name, and below the directories you name .html and .htm files and man pages (name.1, also .gz);
          symbolic links are not followed. Each file or directory that you name is a package, of which at most
          --per_package files are read
Size      as the pages' text
Licence   as the pages
Tokens    a man page has 800 by the median; some have 25,000
Needs     lxml, datasketch, and for man pages the program mandoc (apt install mandoc)
Time      50 pages a second on one core

Writes train.jsonl and test.jsonl, an object per line: {"id", "title", "sections": [{"heading", "text"}]}. The id is
PACKAGE/path. A page with fewer than --least_words words is left out, and so is a page that nearly repeats an earlier
page (estimated Jaccard similarity of 5-word shingles of at least 0.7). From 0.35 on, similar pages go to the same side;
a page similar to pages on both sides is left out. Of the other pages --test_share go to the test, chosen by their ids.
"""
import collections
import contextlib
import gzip
import json
import os
import re
import subprocess
import time
import zlib

from common import BadInput, console, need, open_regular, positive, run, say, write_file
from console import flat, share

PAGE = re.compile(r"\.html?$", re.I)
MANUAL = re.compile(r"\.([0-9](?!z)[a-z]*|n)(\.gz)?$")
HEADING = re.compile(r"h[1-6]")
INLINE = {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "del", "dfn", "em", "font", "i", "ins",
          "kbd", "mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "tt", "u", "var", "wbr"}
SKIPPED = {"script", "style", "nav", "header", "footer", "aside", "head", "template", "noscript", "form", "svg", "math"}
FURNITURE = re.compile(r"\b(nav\w*|toc|sphinxsidebar|related|headerlink|headline-link|footer|head|foot)\b")   # classes
NUMBER = re.compile(r"^(\d+\.|(Chapter|Appendix) \w+\.)[\d.]*\s+")
SAME, ALIKE = 0.7, 0.35


def sections_of(page):
    """[{heading, text}] of a parsed page, in order; the text before the first heading has an empty one"""
    found = [["", []]]

    def walk(element):
        tag = element.tag
        if not isinstance(tag, str) or tag in SKIPPED or FURNITURE.search(element.get("class") or ""):
            return                                          # a comment has no tag
        if HEADING.fullmatch(tag):
            for link in element.find_class("headerlink"):
                link.text = ""
            found.append([NUMBER.sub("", flat(element.text_content())), []])
            return
        text, apart = found[-1][1], "" if tag in INLINE else " "
        text.append(apart + (element.text or ""))
        for child in element:
            walk(child)
            found[-1][1].append(child.tail or "")
        found[-1][1].append(apart)
    walk(page)
    sections = [{"heading": heading, "text": flat("".join(text))} for heading, text in found]
    return [s for s in sections if s["heading"] or s["text"]]


def read_page(path):
    """the title and sections of a file; None if it has none of its own"""
    with open_regular(path) as f:
        data = f.read()
    try:
        data = gzip.decompress(data) if path.endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{path}: expected gzip ({e})") from None
    title = ""
    if manual := MANUAL.search(path):
        title = os.path.basename(path)[:manual.start() - len(path)] + f"({manual[1]})"
        if re.match(rb"\s*\.so\s", data) or b"\0" in data:              # another page, or a library, libz.so.1
            return None
        try:
            data = subprocess.run(["mandoc", "-T", "html", "-O", "fragment"], input=data, capture_output=True).stdout
        except FileNotFoundError:
            raise BadInput(f"{path}: mandoc, which reads man pages, is missing: apt install mandoc") from None
    if not data.strip():
        return None
    html, encoding = need("lxml.html"), None                 # None: its meta element says
    with contextlib.suppress(UnicodeDecodeError):
        encoding = data.decode("utf-8") and "utf-8"
    try:
        page = html.document_fromstring(data, parser=html.HTMLParser(encoding=encoding))
    except html.etree.ParserError:                          # nothing but a comment
        return None
    body = next((e for path in ('//*[@role="main"]', "//main", "//body") for e in page.xpath(path)), page)
    sections = sections_of(body)
    title = title or flat(page.findtext(".//title") or "") or next((s["heading"] for s in sections if s["heading"]), "")
    return title, sections


def files_of(inputs):
    """{package: what was given, and its paths}; links are not followed"""
    found = {}
    for given in inputs:
        name = os.path.basename(os.path.abspath(given))
        if name in found:
            raise BadInput(f"{given}: a package {name} is named already; name directories with names of their own")
        paths = [given] if os.path.isfile(given) else [
            path for place, _, files in os.walk(given, onerror=console.fail) for file in files
            if not os.path.islink(path := os.path.join(place, file))]
        found[name] = given, sorted(path for path in paths if PAGE.search(path) or MANUAL.search(path))
        if not found[name][1]:
            raise BadInput(f"{given}: expected .html files or man pages, got none")
    return found


class Sides:
    """Which side a document belongs to, by what it resembles; None: it repeats one that there is."""

    def __init__(self, test_share):
        self.sketch, self.test_share = need("datasketch"), test_share
        self.index, self.known = self.sketch.MinHashLSH(ALIKE, num_perm=64), {}

    def take(self, name, text):
        words = text.lower().split()
        sketch = self.sketch.MinHash(num_perm=64)
        sketch.update_batch([" ".join(words[i:i + 5]).encode() for i in range(max(1, len(words) - 4))])
        alike = {other: self.known[other][0].jaccard(sketch) for other in self.index.query(sketch)}
        sides = {self.known[other][1] for other, similarity in alike.items() if similarity >= ALIKE}
        if max(alike.values(), default=0) >= SAME or len(sides) > 1:        # or stands between the two sides
            return None
        side = sides.pop() if sides else ("train", "test")[share(name) < self.test_share]
        self.index.insert(name, sketch)
        self.known[name] = sketch, side
        return side


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("inputs", nargs="+", metavar="FILE", help="files or directories, each a package")
    p.add_argument("--out", default="data/documents", help="directory to write to [data/documents]")
    p.add_argument("--per_package", type=positive, default=400, help="most files of a package [400]")
    p.add_argument("--least_words", type=positive, default=40, help="words of the shortest document [40]")
    p.add_argument("--test_share", type=lambda text: console.real(text, 0), default=0.3,
                   help="share of the documents for the test [0.3]")
    args = p.parse_args(argv)
    work = []
    for package, (base, paths) in files_of(args.inputs).items():
        chosen = sorted(paths, key=lambda path: share(os.path.basename(path)))[:args.per_package]
        work += [(path, package + "/" + os.path.relpath(path, base) * (path != base)) for path in sorted(chosen)]
    sides, lines = Sides(args.test_share), {"train": [], "test": []}
    counts, begin, told = collections.Counter(), time.time(), time.time()
    for n, (path, name) in enumerate(work):
        if time.time() - told > 10:
            told = time.time()
            say(f"{n:,} of {len(work):,} pages, {(told - begin) / n * (len(work) - n):.0f} s left")
        name = re.sub(r"\s", "_", name.strip("/")).encode("utf-8", "replace").decode()
        title, sections = read_page(path) or ("", [])
        text = " ".join(s["text"] for s in sections)
        if len(text.split()) < args.least_words:
            counts["too short"] += 1
        elif (side := sides.take(name, text)) is None:
            counts["repeated"] += 1
        else:
            lines[side].append(json.dumps({"id": name, "title": title, "sections": sections}) + "\n")
    if missing := [side for side, documents in lines.items() if not documents]:
        raise BadInput(f"{args.out}: {len(work):,} pages left no document for {missing[0]}.jsonl ({dict(counts)}); "
                       "give more files, or another --test_share")
    os.makedirs(args.out, exist_ok=True)
    for side, documents in lines.items():
        write_file(os.path.join(args.out, side + ".jsonl"), "".join(documents).encode())
    say(f"{len(lines['train']):,} documents to train on, {len(lines['test']):,} to test; left out: "
        f"{counts['too short']:,} too short, {counts['repeated']:,} nearly repeated; wrote {args.out}")


if __name__ == "__main__":
    run(main)
