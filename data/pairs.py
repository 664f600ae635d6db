"""pairs.py -- text.py --pairs: lines "query TAB passage" out of plain text, and a held-out collection to search.

A paragraph is the text between blank lines of a document. Its white space becomes single spaces, and it makes a pair
by one of three rules:

sentence    the query is its first sentence, up to the first . ! or ? before a space that has QUERY_WORDS words before
            it; the passage is the rest
halves      the query is the first half of its words, the passage the second
title       the query is the first line of the document, the passage is the rest of the document, without regard to
            paragraphs; marks of a heading ("= Title =", "# Title") are left out

A pair is skipped, and counted, if its query has fewer than QUERY_WORDS words (a title: 1), its passage fewer than
PASSAGE_WORDS, or if either is among the held-out ones already. Passages are cut after PASSAGE_BYTES.
"""
import hashlib
import os
import re

from common import BadInput, Manifest, TEMPORARY, locked, publish, remove_quietly, say, sha256_of, writing
from sources import PIECE_BYTES, new_cursor, report, windows

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
    for window in windows(reader, units, seed, window_bytes, new_cursor()):
        yield from window.pieces
        counts.update(window.counts)


class Output:
    """text files that get their names when all of them are complete"""

    def __init__(self, directory, names):
        self.paths = {n: os.path.join(directory, n) for n in names}
        self.temporary = {n: os.path.join(directory, TEMPORARY + n) for n in names}
        self.files = {}
        for name, path in self.temporary.items():
            with writing(path):
                self.files[name] = open(path, "wb", buffering=1 << 20)

    def write(self, name, text):
        with writing(self.paths[name]):
            self.files[name].write(text.encode("utf-8"))

    def finish(self):
        """the manifest's records of the files"""
        records = []
        for name, f in self.files.items():
            with writing(self.paths[name]):
                f.flush()
                os.fsync(f.fileno())
                f.close()
                record = {"file": name, "bytes": os.path.getsize(self.temporary[name])}
                records.append({**record, "sha256": sha256_of(self.temporary[name])})
        for name, path in self.paths.items():
            with writing(path):
                publish(self.temporary[name], path)
        return records

    def abandon(self):
        for name, f in self.files.items():
            f.close()
            remove_quietly(self.temporary[name])


def fill(out, prefix, rule, pieces, val_pairs):
    """writes the pairs, the first val_pairs of them as a collection to search; returns what was counted"""
    train, queries = f"{prefix}_train_pairs.txt", f"{prefix}_val_queries.txt"
    corpus, qrels = f"{prefix}_val_corpus.txt", f"{prefix}_val_qrels.tsv"
    held_out, found = set(), {"val_pairs": 0, "train_pairs": 0, "short": 0, "repeated": 0}
    for text in paragraphs(pieces, rule == "title"):
        pair = pair_of(rule, text)
        if pair is None:
            found["short"] += bool(text.strip())
            continue
        keys = [hashlib.sha256(s.encode("utf-8")).digest() for s in pair]
        if any(k in held_out for k in keys):
            found["repeated"] += 1
        elif found["val_pairs"] < val_pairs:
            held_out.update(keys)
            out.write(queries, pair[0] + "\n")
            out.write(corpus, pair[1] + "\n")
            out.write(qrels, f"{found['val_pairs']} 0 {found['val_pairs']} 1\n")
            found["val_pairs"] += 1
        else:
            out.write(train, f"{pair[0]}\t{pair[1]}\n")
            found["train_pairs"] += 1
    return found


def build_pairs(directory, prefix, rule, stream, val_pairs):
    """Writes PREFIX_train_pairs.txt, the held-out PREFIX_val_{queries,corpus}.txt and _qrels.tsv, and manifest.json."""
    names = [f"{prefix}_train_pairs.txt"]
    if val_pairs:
        names += [f"{prefix}_val_queries.txt", f"{prefix}_val_corpus.txt", f"{prefix}_val_qrels.tsv"]
    r = stream.reader
    settings = {"pairs": rule, "val_pairs": val_pairs, "prefix": prefix, "seed": stream.seed,
                "window_bytes": stream.window_bytes, "documents": r.documents, "column": r.column}
    with locked(directory):
        manifest = Manifest(directory, settings, {"name": "text", "streams": {"text": stream.source()}})
        manifest.load()
        made = {os.path.join(directory, f["file"]): f["bytes"] for f in manifest.data.get("files", [])}
        if manifest.data["complete"] and all(os.path.exists(p) and os.path.getsize(p) == n for p, n in made.items()):
            say(f"{directory} is already complete")
            return
        counts, out = {}, Output(directory, names)
        try:
            pieces = documents_in_order(r, stream.units, stream.seed, stream.window_bytes, counts)
            found = fill(out, prefix, rule, pieces, val_pairs)
            report(counts)
            for key, text in (("short", "paragraphs too short for a pair, skipped"),
                              ("repeated", "pairs skipped, because the held-out ones have their text")):
                if found[key]:
                    say(f"{found[key]:,} {text}")
            if not found["train_pairs"]:
                raise BadInput(f"{', '.join(stream.paths[:3])}: {found['val_pairs']} pairs; --val_pairs "
                               f"{val_pairs} leaves none to train on")
            manifest.data["files"] = out.finish()
        except BaseException:
            out.abandon()
            raise
        manifest.data["counts"] = {"text": {**counts, **found}}
        manifest.data["complete"] = True
        manifest.save()
        say(f"{found['train_pairs']:,} pairs to train on, {found['val_pairs']:,} held out; wrote {manifest.path}")
