#!/usr/bin/env python3
"""text.py -- token shards of any text: .txt, .jsonl, .csv and .parquet files, plain or compressed.

    data/text.py --out data/mine corpus/ more.jsonl.gz
    data/text.py --out data/mine --documents line dump.txt.gz
    data/text.py --out data/pairs --pairs sentence corpus/      pairs to train a retriever on, as text
    data/text.py --out data/pairs --pairs sentence --encoding bert --tokenizer DIR corpus/      as shards

Source    the files you name and those below the directories you name, sorted, also as .gz .xz .bz2 .zst: plain text
          as .txt .md .raw .tokens, JSON lines as .jsonl .ndjson .jl .jsonlines .json, tables as .parquet .csv .tsv
Size      2 bytes per token, about half the size of English text; nothing else is written
Licence   that of the text
Tokens    English has about 4.6 bytes per GPT-2 token
Time      about 4 million bytes per second and core; the same command with the same input continues an interrupted run

Writes text_val_000000.bin, then text_train_000001.bin and so on, and manifest.json with counts and checksums. The
validation split is a tenth of the text, at most 1,000,000 tokens; of less than 100 KB, and with --val_tokens 0, all
text is for training, from text_train_000000.bin on. Bytes that are not UTF-8 are replaced, empty documents and broken
lines are skipped; all are counted and reported; a file with a byte 0, which no text has, is refused. The trainer also
reads .txt files directly, one token per byte; shards are for subword tokens.

With --pairs it writes text instead of shards: text_train_pairs.txt, lines of query TAB passage for train_bert
--pairs, and of the first --val_pairs pairs text_val_queries.txt, text_val_corpus.txt and text_val_qrels.tsv,
for scripts/retrieve.py. A paragraph is the text between blank lines of a document. The pair is
    sentence    its first sentence and the rest of it
    halves      its first half of the words and the second
    title       the first line of the document and the rest of the document
White space becomes single spaces, passages are cut after 64 KB, and a sentence is the first if it ends with . ! or ?
before a space and has 4 words. Pairs of fewer than 4 and 8 words (a title: 1 and 8) are skipped, and so is one that has
a held-out text. --seed decides the order of the documents, and so which are held out.

A BERT of WordPiece reads pairs as shards: --encoding bert writes text_pairs_000000.bin and so on, in groups of two
documents, and text_val_queries.bin, text_val_corpus.bin and text_val_qrels.tsv; the text of the pairs is then in
OUT/text. --tokenizer names a WordPiece tokenizer.json; without it, bert-base-uncased's vocabulary is downloaded.
    lines       makes shards of pairs that there are: lines of QUERY tab PASSAGE, or QUERY tab PASSAGE tab NEGATIVE, as
                text_lines_000000.bin; of lines without a tab it makes a collection to search, which the lines' numbers
                name, from 0 on. They stay in the order of the files.
"""
import hashlib
import os
import re

from build import Stream, build, numbered, single, stream_kwargs
from common import (MANIFEST, BadInput, Manifest, add_max_tokens, add_stream_flags, check_own, console, flat, locked,
                    natural, parser, read_manifest, run, say, write_file)
from download import vocabulary
from sources import PIECE_BYTES, SPLITTERS, Piece, Reader, files_in, new_counts, report, windows

RULES = ("sentence", "halves", "title")
QUERY_WORDS, PASSAGE_WORDS, PASSAGE_BYTES = 4, 8, 1 << 16
WRITTEN = ("train_pairs.txt", "val_queries.txt", "val_corpus.txt", "val_qrels.tsv")
MOST_VAL_TOKENS, LEAST_SPLIT_BYTES = 1_000_000, 100_000
SENTENCE_END = re.compile(r"[.!?][\"')\]\u201d\u2019]* ")
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
MOST_PARAGRAPH = PIECE_BYTES            # what is kept of a paragraph, or document, while more of it is read


def by_sentence(words):
    text = " ".join(words)
    for m in SENTENCE_END.finditer(text):
        if text.count(" ", 0, m.end() - 1) + 1 >= QUERY_WORDS:
            return text[:m.end() - 1], text[m.end():]
    return text, ""


def by_halves(words):
    return " ".join(words[:len(words) // 2]), " ".join(words[len(words) // 2:])


def by_title(document):
    lines = [line.split() for line in document.split("\n") if line.strip()]
    title = " ".join(lines[0]).strip("=# ") if lines else ""
    return title, " ".join(" ".join(line) for line in lines[1:])


def cut_passage(text):
    """the text within PASSAGE_BYTES, cut between words"""
    data = text.encode("utf-8")
    if len(data) <= PASSAGE_BYTES:
        return text
    return data[:PASSAGE_BYTES].decode("utf-8", "ignore").rpartition(" ")[0]


def pair_of(rule, text):
    """(query, passage) of a paragraph, or of a document for the titles; None if one of them is too short"""
    text = text.decode("utf-8", "replace")
    if rule == "title":
        query, passage = by_title(text)
    else:
        query, passage = (by_sentence if rule == "sentence" else by_halves)(text.split())
    fewest = 1 if rule == "title" else QUERY_WORDS
    if len(query.split()) < fewest or len(passage.split()) < PASSAGE_WORDS:
        return None
    return cut_passage(query), cut_passage(passage)


def paragraphs(pieces, whole):
    """the paragraphs of documents that come in pieces, or the documents (`whole`)"""
    waiting = b""
    for piece in pieces:
        waiting = piece.text if piece.first else waiting + piece.text
        parts = [waiting] if whole else BLANK_LINE.split(waiting)
        waiting = b"" if piece.last else parts.pop()[:MOST_PARAGRAPH]
        yield from parts


def documents_in_order(reader, units, seed, window_bytes, counts):
    """the pieces of all documents, shuffled within windows"""
    for window in windows(reader, units, seed, window_bytes):
        yield from window.pieces
        counts.update(window.counts)


def train_lines(rule, pieces, val_pairs, held_out, found):
    """yields the lines of the pairs to train on; the first val_pairs pairs go to held_out, and found counts the rest"""
    keys = set()
    for text in paragraphs(pieces, rule == "title"):
        pair = pair_of(rule, text)
        if pair is None:
            found["short"] += bool(text.strip())
            continue
        own = {hashlib.sha256(s.encode("utf-8")).digest() for s in pair}
        if own & keys:
            found["repeated"] += 1
        elif len(held_out) < val_pairs:
            held_out.append(pair)
            keys |= own
        else:
            found["train_pairs"] += 1
            yield f"{pair[0]}\t{pair[1]}\n".encode("utf-8")


def build_pairs(directory, rule, stream, val_pairs):
    """Writes text_train_pairs.txt, the held-out text_val_{queries,corpus}.txt and _qrels.tsv, and manifest.json."""
    r, path = stream.reader, lambda name: os.path.join(directory, f"text_{name}")
    settings = {"pairs": rule, "val_pairs": val_pairs, "prefix": "text", "seed": stream.seed,
                "window_bytes": stream.window_bytes, "documents": r.documents, "column": r.column}
    with locked(directory):
        manifest = Manifest(directory, settings, {"name": "text", "streams": {"text": stream.source()}})
        manifest.load()
        if manifest.data["complete"]:
            say(f"{directory} is already complete")
            return
        for name in WRITTEN if not os.path.exists(manifest.path) else ():
            check_own(path(name), None)
        manifest.save()                         # what is there from now on is ours
        counts, held_out, found = {}, [], {"train_pairs": 0, "short": 0, "repeated": 0}
        pieces = documents_in_order(r, stream.units, stream.seed, stream.window_bytes, counts)
        files = [write_file(path(WRITTEN[0]), train_lines(rule, pieces, val_pairs, held_out, found))]
        found["val_pairs"] = len(held_out)
        report(counts)
        for key, text in (("short", "paragraphs too short for a pair, skipped"),
                          ("repeated", "pairs skipped, because the held-out ones have their text")):
            if found[key]:
                say(f"{found[key]:,} {text}")
        if not found["train_pairs"]:
            os.remove(path(WRITTEN[0]))
            os.remove(manifest.path)
            raise BadInput(f"{', '.join(stream.paths[:3])}: {len(held_out)} pairs; --val_pairs {val_pairs} leaves none "
                           "to train on")
        if held_out:
            lines = ([query for query, _ in held_out], [passage for _, passage in held_out],
                     [f"{i} 0 {i} 1" for i in range(len(held_out))])
            files += [write_file(path(name), "".join(line + "\n" for line in of).encode("utf-8"))
                      for name, of in zip(WRITTEN[1:], lines)]
        manifest.data.update(files=files, counts={"text": {**counts, **found}}, complete=True)
        manifest.save()
        say(f"{found['train_pairs']:,} pairs to train on, {len(held_out):,} held out; wrote {manifest.path}")


class Lines(Reader):
    """Lines of documents that tabs separate: each line is a group. A document that is a line gets its number as its
    name."""

    def __init__(self, paths, column="text"):
        super().__init__("line", column)
        first = next((self.fields(u, new_counts(), [0]) for u in self.units(paths)), iter(()))
        self.group = len(next(first, (0, [b""]))[1])
        self.paths = paths

    def fields(self, unit, counts, progress):
        """(number of the line, its documents) of each line that is not empty"""
        before, parts = counts["documents"] + counts["empty"], []
        for piece in super().pieces(unit, counts, progress):
            parts.append(piece.text)
            if piece.last:
                yield counts["documents"] + counts["empty"] - before, b"".join(parts).replace(b"\0", b" ").split(b"\t")
                parts = []

    def pieces(self, unit, counts, progress):
        for line, fields in self.fields(unit, counts, progress):
            if len(fields) != self.group or not all(text.strip() for text in fields):
                raise BadInput(f"{unit.path}: line {line}: expected {self.group} texts separated by tabs, as in the "
                               f"first line of {self.paths[0]}, got {sum(bool(text.strip()) for text in fields)}")
            name = str(counts["documents"] + counts["empty"] - 1) if self.group == 1 else ""
            yield Piece(b"\0".join(fields), True, True, name)


def build_groups(args, paths, text):
    """Writes the shards of files of lines; text: the directory of build_pairs(), whose held-out texts are written too.
    """
    reader = Lines(paths) if text else Lines(paths, args.column)
    if reader.group > 3:
        raise BadInput(f"{paths[0]}: line 1: expected at most 3 texts separated by tabs, got {reader.group}")
    streams = [Stream("pairs" if text else "lines", reader, paths, group=reader.group,
                      **numbered("text", args.shard_tokens, split="pairs" if text else "lines"))]
    extra, held = {}, os.path.join(text, "text_val_qrels.tsv") if text else ""
    if os.path.exists(held):
        extra["text_val_qrels.tsv"] = console.read_bytes(held)
        for name in "queries", "corpus":
            path = [os.path.join(text, f"text_val_{name}.txt")]
            streams.append(Stream(name, Lines(path), path, group=1, **single(f"text_val_{name}.bin")))
    build(args.out, streams, "bert", vocabulary(args), args.workers, {"name": "text"}, args.max_tokens, extra)


def val_tokens_of(directory, paths):
    """The default: a token for 46 bytes of the files. An earlier version's shards, which had no validation split by
    default, are continued without one."""
    manifest, size = os.path.join(directory, MANIFEST), sum(map(os.path.getsize, paths))
    if os.path.exists(manifest):
        if flat(read_manifest(manifest)["settings"]).get("streams.text.first") == "text_train_000000.bin":
            return 0
    return min(size // 46, MOST_VAL_TOKENS) if size >= LEAST_SPLIT_BYTES else 0


def main(argv):
    p = parser(__doc__, "data/text")
    add_stream_flags(p, val_tokens=None)
    p.add_argument("--val_tokens", type=natural, help="tokens in the validation split, which is taken first [a tenth "
                   "of the text, at most 1000000; of less than 100 KB none; of compressed files less]")
    p.add_argument("inputs", nargs="*", metavar="FILE", help="files or directories")
    p.add_argument("--documents", choices=("file", *sorted(SPLITTERS)), default="file",
                   help="what a document of plain text is: a file, a line, the text between blank lines, or a section "
                   "that ends with an empty line [file]")
    p.add_argument("--column", default="text", help="the field of JSON or column of a table with the text [text]")
    p.add_argument("--text", action="store_true", help="the files that you name are plain text if their endings are "
                   "of no known kind; without it they are refused")
    p.add_argument("--pairs", choices=(*RULES, "lines"), help="write pairs for a retriever, by this rule")
    p.add_argument("--val_pairs", type=natural, default=1000, help="pairs held out, as a collection to search [1000]")
    add_max_tokens(p, 512, " of --pairs")
    args = p.parse_args(argv)
    inputs = args.inputs + [args.local] * bool(args.local)
    if not inputs:
        raise BadInput("expected an input: name files or directories (see --help)")
    paths = files_in(inputs, any_kind=args.text, out=args.out)
    if args.pairs == "lines":
        if args.encoding != "bert":
            raise BadInput("--pairs lines: makes shards of lines for WordPiece: give --encoding bert and --tokenizer; "
                           "a model of bytes reads the lines as they are")
        return build_groups(args, paths, None)
    if args.pairs:
        args.val_tokens = 0
    elif args.val_tokens is None:
        args.val_tokens = val_tokens_of(args.out, paths)
    shards = numbered("text", args.shard_tokens, args.val_tokens)
    stream = Stream("text", Reader(args.documents, args.column), paths, **shards, **stream_kwargs(args))
    if args.pairs:
        text = os.path.join(args.out, "text") if args.encoding == "bert" else args.out
        build_pairs(text, args.pairs, stream, args.val_pairs)
        if args.encoding == "bert":
            build_groups(args, [os.path.join(text, "text_train_pairs.txt")], text)
    else:
        build(args.out, [stream], args.encoding, vocabulary(args), args.workers, {"name": "text"})
        if not args.val_tokens:
            say("no validation shard: for one, give --val_tokens and another --out; or train with --val_every 0")


if __name__ == "__main__":
    run(main)
