#!/usr/bin/env python3
"""wikitext.py -- WikiText-103 or WikiText-2, word-level or raw.

    data/wikitext.py --size 103 --out data/wikitext103
    data/wikitext.py --size 2 --raw --join rows_apart --out data/wikitext2_raw
    data/wikitext.py --size 2 --bytes --out data/wikitext2_bytes

Source    Salesforce/wikitext on the hub; with --local, files below DIR named like wiki.train.tokens, wiki.valid.raw,
          test.txt or train-00000-of-00001.parquet, also compressed
Size      103: 0.3 GB to download, 240 MB of shards; 2: 8 MB and 6 MB
Licence   CC BY-SA 3.0 and GFDL (Wikipedia)
Tokens    103: about 118 million for training; 2: 2.4 million. Validation and test are the same articles in both, and
          the same text if raw; word-level, 103 has splits of its own, with fewer <unk> (2: 6.3 % of the test words)
Time      103: 2 minutes on one core; 2: seconds

Word-level text (the default) has <unk> for rare words; --raw has none. --join says how the lines of a split become one
string. It changes the number of tokens and so the perplexity, and is recorded in manifest.json. GPT-2 tokens of the
test split (word-level: of WikiText-2), without the one <|endoftext|> before it:
    --join          the string                                              word-level      raw
    file            the file as it is                                          295,877  286,221
    rows            the hub's rows one after another, without blank lines      292,943  283,287
    rows_apart      the hub's rows separated by "\\n\\n", as in tutorials        297,300  287,644
Published perplexities that divide by 287,645 tokens are of the raw text with rows_apart: 287,644 and one <|endoftext|>.
With --bytes, each split is written as text, for a trainer whose tokens are bytes.
"""
import io
import os
import re

from build import Stream, build, numbered
from common import SHARD_TOKENS, BadInput, locked, parser, positive, run, say, write_own
from download import cache_of, hub_download, hub_files, vocabulary
from sources import (Joined, Reader, Unit, files_in, kind_of, lines_of, new_counts, open_bytes, reading,
                     stream_document)

REPO = "Salesforce/wikitext"
SPLITS = {"train": ("train",), "val": ("valid", "validation"), "test": ("test",)}
JOINS = ("file", "rows", "rows_apart")
HEADING = re.compile(rb"^ = [^=].* = \r?\n?$")
# GPT-2 tokens of the text, which reveal a damaged or different copy: (size, raw, join) -> split -> count. Both sizes
# have the same raw splits for validation and test.
KNOWN = {
    (2, False, "file"): {"train": 2448382, "val": 258659, "test": 295877},
    (2, False, "rows"): {"test": 292943},
    (2, False, "rows_apart"): {"test": 297300},
    (2, True, "file"): {"test": 286221},
    (2, True, "rows"): {"test": 283287},
    (2, True, "rows_apart"): {"test": 287644},
}
KNOWN_BYTES = {"train": 10797148, "val": 1121681, "test": 1256449}      # of WikiText-2's files, word-level


class WikiReader(Reader):
    """Reads all files of a split as one text. A blank line is " \\n" in the files and an empty row on the hub."""

    def __init__(self, join):
        super().__init__("split")
        self.join = join

    def units(self, paths):
        return [Unit(tuple(paths), -1, sum(map(os.path.getsize, paths)))]

    def lines(self, paths, counts):
        for path in paths:
            if kind_of(path) == ".parquet":
                for group in range(self.parquet(path).num_row_groups):
                    for record in self.records(Unit(path, group, 0), counts):
                        yield record["text"] or b" \n"
                continue
            stream, _ = open_bytes(path)
            with stream:
                yield from lines_of(stream, path)

    def checked(self, lines, path):
        """the lines; the first that is not blank must be the title of an article"""
        started = False
        for line in lines:
            if not started and line.strip():
                if not HEADING.match(line):
                    raise BadInput(f"{path}: expected a title (' = ... = ') at the beginning, as in WikiText, "
                                   f"got {line[:40]!r}")
                started = True
            yield line

    def joined(self, lines):
        for i, line in enumerate(lines):
            if self.join == "rows_apart" and i:
                yield b"\n\n"
            if self.join == "file" or line.strip():
                yield line

    def pieces(self, unit, counts, progress):
        with reading(unit.path[0]):
            lines = self.checked(self.lines(unit.path, counts), unit.path[0])
            yield from stream_document(io.BufferedReader(Joined(self.joined(lines)), 1 << 20), counts)
            progress[0] = unit.weight


def source_files(args):
    """{split: paths}: from --local, where they fit this size and kind, or downloaded"""
    if args.local:
        where, every = args.local, files_in([args.local], (".txt", ".raw", ".tokens", ".parquet"))
        paths = [p for p in every if ("raw" in os.path.relpath(p, args.local).lower()) == args.raw]
    else:
        where = f"wikitext-{args.size}-{'raw-' if args.raw else ''}v1"
        paths = hub_download(REPO, hub_files(REPO, where, ".parquet"), cache_of(args))
    found = {}
    for split, names in SPLITS.items():
        name = re.compile(rf"(wiki\.)?({'|'.join(names)})[.-]")
        of_split = [p for p in paths if name.match(os.path.basename(p))]
        of_size = [p for p in of_split if f"wikitext-{args.size}-" in p or f"wikitext-{args.size}/" in p]
        found[split] = of_size or of_split
        if not found[split]:
            raise BadInput(f"{where}: no {'raw' if args.raw else 'word-level'} {split} split: expected wiki.{split}.*, "
                           f"{split}.txt or {split}-*.parquet")
        if len(found[split]) > 1 and {kind_of(p) for p in found[split]} != {".parquet"}:
            raise BadInput(f"{where}: expected one file for the {split} split, got {', '.join(found[split])}")
    return found


def main(argv):
    p = parser(__doc__, "data/wikitext103")
    p.add_argument("--size", type=int, choices=(2, 103), default=103, help="WikiText-2 or WikiText-103 [103]")
    p.add_argument("--raw", action="store_true", help="the raw text instead of the word-level text")
    p.add_argument("--join", choices=JOINS, default="file", help="how lines become one string per split [file]")
    p.add_argument("--bytes", action="store_true", help="write text for models of bytes instead of shards")
    p.add_argument("--shard_tokens", type=positive, default=SHARD_TOKENS, help=f"tokens per shard [{SHARD_TOKENS}]")
    args = p.parse_args(argv)
    files = source_files(args)
    prefix = f"wikitext{args.size}{'_raw' if args.raw else ''}"
    reader = WikiReader(args.join)
    if args.bytes:
        write_bytes(reader, files, os.path.join(args.out, f"{prefix}_bytes"))
        return
    streams = [Stream(split, reader, files[split], **numbered(prefix, args.shard_tokens, split=split))
               for split in SPLITS]
    facts = {"name": f"WikiText-{args.size}", "licence": "CC BY-SA 3.0, GFDL",
             "text": "raw" if args.raw else "word-level", "join": args.join, "documents": "split"}
    data = build(args.out, streams, args.encoding, vocabulary(args), args.workers, facts)
    if args.encoding == "gpt2":
        check_counts(data, KNOWN.get((2 if args.raw else args.size, args.raw, args.join), {}))


def write_bytes(reader, files, stem):
    """STEM_train.txt, STEM_val.txt, STEM_test.txt; the training split comes last: with it all are there"""
    with locked(os.path.dirname(stem)):
        for split in ("val", "test", "train"):
            unit, = reader.units(files[split])
            text = b"".join(piece.text for piece in reader.pieces(unit, new_counts(), [0]))
            write_own(f"{stem}_{split}.txt", text)
            expected = KNOWN_BYTES[split] if stem.endswith("wikitext2_bytes") and reader.join == "file" else len(text)
            verdict = "" if len(text) == expected else f"; expected {expected:,}: is this another text?"
            say(f"{stem}_{split}.txt: {len(text):,} bytes{verdict}")


def check_counts(data, known):
    """says how many tokens each split has, and whether that is the known number"""
    for split in SPLITS:
        shards = [s for s in data["shards"] if s["stream"] == split]
        text = sum(s["tokens"] - s["documents"] for s in shards)
        verdict = ""
        if split in known:
            verdict = ", as expected" if text == known[split] else f"; expected {known[split]:,}: is this another text?"
        say(f"{split}: {text:,} tokens without <|endoftext|>{verdict}")


if __name__ == "__main__":
    run(main)
