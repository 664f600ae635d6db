"""pairs.py -- text.py --pairs, whose --help has the rules: lines "query TAB passage" out of plain text, and a held-out
collection to search.

A sentence is the first if it ends with . ! or ? before a space and has QUERY_WORDS words. White space becomes single
spaces, and marks of a heading ("= Title =", "# Title") are left out of a title. Passages are cut after PASSAGE_BYTES.
What is skipped is counted.
"""
import hashlib
import os
import re

from common import BadInput, Manifest, locked, say, write_file
from sources import PIECE_BYTES, report, windows

RULES = ("sentence", "halves", "title")
QUERY_WORDS, PASSAGE_WORDS, PASSAGE_BYTES = 4, 8, 1 << 16
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
        counts, held_out, found = {}, [], {"train_pairs": 0, "short": 0, "repeated": 0}
        pieces = documents_in_order(r, stream.units, stream.seed, stream.window_bytes, counts)
        files = [write_file(path("train_pairs.txt"), train_lines(rule, pieces, val_pairs, held_out, found))]
        found["val_pairs"] = len(held_out)
        report(counts)
        for key, text in (("short", "paragraphs too short for a pair, skipped"),
                          ("repeated", "pairs skipped, because the held-out ones have their text")):
            if found[key]:
                say(f"{found[key]:,} {text}")
        if not found["train_pairs"]:
            os.remove(path("train_pairs.txt"))
            raise BadInput(f"{', '.join(stream.paths[:3])}: {len(held_out)} pairs; --val_pairs {val_pairs} leaves none "
                           "to train on")
        if held_out:
            lines = {"val_queries.txt": [query for query, _ in held_out],
                     "val_corpus.txt": [passage for _, passage in held_out],
                     "val_qrels.tsv": [f"{i} 0 {i} 1" for i in range(len(held_out))]}
            files += [write_file(path(name), "".join(line + "\n" for line in of).encode("utf-8"))
                      for name, of in lines.items()]
        manifest.data.update(files=files, counts={"text": {**counts, **found}}, complete=True)
        manifest.save()
        say(f"{found['train_pairs']:,} pairs to train on, {len(held_out):,} held out; wrote {manifest.path}")
