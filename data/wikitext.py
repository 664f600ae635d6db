#!/usr/bin/env python3
"""wikitext.py -- WikiText-103 or WikiText-2, word-level or raw.

    data/wikitext.py --size 103 --out data/wikitext103
    data/wikitext.py --size 2 --raw --join rows_apart --out data/wikitext2_raw

Source    the hub's Salesforce/wikitext; with --local, files below DIR named wiki.train.tokens, wiki.valid.raw, test.txt,
          train-00000-of-00001.parquet and the like, also compressed or in the original .zip
Size      103: 0.3 GB to download, 240 MB of shards; 2: 8 MB and 6 MB
Licence   CC BY-SA 3.0 and GFDL (Wikipedia)
Tokens    103: about 118 million of training; 2: 2.4 million. Validation and test are the same in both
Time      103: 2 minutes of one core; 2: seconds

Word-level text (the default) has <unk> for rare words; --raw has none. --join says what one string a split is, which changes
the number of tokens and so the perplexity; it is recorded in manifest.json. GPT-2 tokens of the test split, without the one
<|endoftext|> in front of it:
    --join          what                                                    word-level      raw
    file            the file as it is                                          295,877  286,221
    rows            the hub's rows one after another: no blank lines           292,943  283,287
    rows_apart      the hub's rows with "\\n\\n" between, as tutorials do        297,300  287,644
Published perplexities that divide by 287,645 tokens are of the raw text with rows_apart: 287,644 and one <|endoftext|>.
With --documents article each article is a document of its own, with its own <|endoftext|>.
"""
import io
import os
import re
import sys

from build import Stream, build, numbered
from common import SHARD_TOKENS, BadInput, need, parser, positive, run, say
from download import hub_download, hub_files, vocabulary
from sources import DAMAGED, Reader, Unit, files_in, kind_of, open_bytes, pieces_of, stream_document

REPO = "Salesforce/wikitext"
SPLITS = {"train": ("train",), "val": ("valid", "validation"), "test": ("test",)}
JOINS = ("file", "rows", "rows_apart")
HEADING = re.compile(rb"^ = [^=].* = \r?\n?$")
# GPT-2 tokens of the text, to recognise a damaged or different copy: (size, raw, join) -> split -> count
KNOWN = {
    (2, False, "file"): {"train": 2448382, "val": 258659, "test": 295877},
    (2, False, "rows"): {"test": 292943},
    (2, False, "rows_apart"): {"test": 297300},
    (2, True, "file"): {"test": 286221},
    (2, True, "rows"): {"test": 283287},
    (2, True, "rows_apart"): {"test": 287644},
}
for (_, raw, join), counts in list(KNOWN.items()):          # the same articles
    KNOWN[103, raw, join] = {split: n for split, n in counts.items() if split != "train"}


class Joined(io.RawIOBase):
    """an iterator of bytes as a stream"""

    def __init__(self, parts):
        self.parts, self.waiting = parts, b""

    def readable(self):
        return True

    def readinto(self, out):
        while not self.waiting:
            self.waiting = next(self.parts, None)
            if self.waiting is None:
                self.waiting = b""
                return 0
        n = min(len(out), len(self.waiting))
        out[:n], self.waiting = self.waiting[:n], self.waiting[n:]
        return n


class WikiReader(Reader):
    """All files of a split are one text. A blank line is " \\n" in the files and an empty row on the hub."""

    def __init__(self, join, documents):
        super().__init__(documents)
        self.join = join

    def units(self, paths):
        return [Unit(tuple(paths), -1, sum(os.path.getsize(p.split("!")[0]) for p in paths))]

    def lines(self, paths, counts):
        for path in paths:
            if kind_of(path) == ".parquet":
                for group in range(self.parquet(path).num_row_groups):
                    for record in self.records(Unit(path, group, 0), counts):
                        yield record["text"] or b" \n"
                continue
            stream, _ = open_bytes(path)
            with stream:
                yield from stream

    def checked(self, lines, path):
        """the first line that is not blank is an article's title"""
        started = False
        for line in lines:
            if not started and line.strip():
                if not HEADING.match(line):
                    raise BadInput(f"{path}: does not begin with a title as WikiText does (' = ... = '), but with {line[:40]!r}")
                started = True
            yield line

    def joined(self, lines):
        for i, line in enumerate(lines):
            if self.join == "rows_apart" and i:
                yield b"\n\n"
            if self.join == "file" or line.strip():
                yield line

    def articles(self, lines):
        """An article begins with the blank line above its title. A title stands between blank lines: formulas look like titles
        too, but stand within text."""
        article, title = [], False
        for line in lines:
            blank = not line.strip()
            if title and blank and len(article) > 2:
                yield b"".join(self.joined(article[:-2]))
                article = article[-2:]
            title = HEADING.match(line) and bool(article) and not article[-1].strip()
            article.append(line)
        yield b"".join(self.joined(article))

    def pieces(self, unit, counts, progress):
        try:
            lines = self.checked(self.lines(unit.path, counts), unit.path[0])
            if self.documents == "article":
                yield from (p for d in self.articles(lines) for p in pieces_of(d, counts))
            else:
                yield from stream_document(io.BufferedReader(Joined(self.joined(lines)), 1 << 20), counts)
            progress[0] = unit.weight
        except DAMAGED as e:
            raise BadInput(f"{unit.path[0]}: damaged or cut short ({e})") from None
        except OSError as e:
            raise BadInput(f"{unit.path[0]}: cannot be read ({e})") from None


def local_files(directory, size, raw):
    """{split: paths}: what below the directory is of this size and kind, by name"""
    found = {split: [] for split in SPLITS}
    for path in files_in([directory], (".txt", ".raw", ".tokens", ".parquet")):
        name = re.split(r"[/!]", path)[-1]
        stem = re.match(r"(?:wiki\.)?([a-z]+)[.-]", name)
        for split, names in SPLITS.items():
            if stem and stem.group(1) in names and ("raw" in os.path.relpath(path, directory).lower()) == raw:
                found[split].append(path)
    for split, paths in found.items():
        named = [p for p in paths if f"wikitext-{size}-" in p or f"wikitext-{size}/" in p]
        found[split] = named or paths
        kinds = {kind_of(p) for p in found[split]}
        if not found[split]:
            raise BadInput(f"{directory}: no {'raw' if raw else 'word-level'} {split} split: looked for wiki.{split}.* , {split}.txt, "
                           f"{split}-*.parquet")
        if len(found[split]) > 1 and kinds != {".parquet"}:
            raise BadInput(f"{directory}: which is the {split} split: {', '.join(found[split])}?")
    return found


def main(argv):
    p = parser(__doc__, "data/wikitext103")
    p.add_argument("--size", type=int, choices=(2, 103), default=103, help="WikiText-2 or WikiText-103 [103]")
    p.add_argument("--raw", action="store_true", help="the raw text instead of the word-level one")
    p.add_argument("--join", choices=JOINS, default="file", help="what one string a split is [file]")
    p.add_argument("--documents", choices=("split", "article"), default="split", help="what stands behind an <|endoftext|> [split]")
    p.add_argument("--shard_tokens", type=positive, default=SHARD_TOKENS, help=f"tokens in a shard [{SHARD_TOKENS}]")
    args = p.parse_args(argv)
    if args.documents == "article" and args.join == "rows_apart":
        raise BadInput("--join rows_apart is of one string a split, not of articles")
    if args.local:
        files = local_files(args.local, args.size, args.raw)
    else:
        folder = f"wikitext-{args.size}-{'raw-' if args.raw else ''}v1"
        entries = hub_files(REPO, folder, ".parquet")
        paths = hub_download(REPO, entries, args.cache or os.path.join(args.out, "source"))
        files = {split: [f for f in paths if os.path.basename(f).split("-")[0] in names] for split, names in SPLITS.items()}
        empty = [split for split, found in files.items() if not found]
        if empty:
            raise BadInput(f"{REPO} {folder}: no {empty[0]} split among its files")
    prefix = f"wikitext{args.size}{'_raw' if args.raw else ''}"
    reader = WikiReader(args.join, args.documents)
    streams = [Stream(split, reader, files[split], **numbered(prefix, args.shard_tokens, split=split)) for split in SPLITS]
    facts = {"name": f"WikiText-{args.size}", "licence": "CC BY-SA 3.0, GFDL", "text": "raw" if args.raw else "word-level",
             "join": args.join, "documents": args.documents}
    data = build(args.out, streams, args.encoding, vocabulary(args), args.workers, facts)
    if args.encoding == "gpt2":
        check_counts(data, KNOWN.get((args.size, args.raw, args.join), {}))


def check_counts(data, known):
    for split in SPLITS:
        shards = [s for s in data["shards"] if s["stream"] == split]
        text = sum(s["tokens"] - s["documents"] for s in shards)
        wanted = known.get(split) if data["source"]["documents"] == "split" else None
        verdict = "" if wanted is None else ", as it should be" if text == wanted else f"; the original has {wanted:,}: another text?"
        say(f"{split}: {text:,} tokens without <|endoftext|>{verdict}")


if __name__ == "__main__":
    run(main, sys.argv[1:])
