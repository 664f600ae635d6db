"""sources.py -- documents from .txt, .jsonl, .csv and .parquet files, plain or as .gz .xz .bz2 .zst.

A source is a list of units: each parquet row group is one, and so is every other file. A unit yields pieces: (text as
UTF-8, whether it starts a document, whether it ends one, name). The seed puts the units in random order, and then
documents are shuffled within windows of a given size. With units of a thousand documents, like FineWeb's row groups,
this mixes the whole source in the memory of one window.
"""
import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import zlib
from collections import namedtuple

from common import BadInput, brief, console, need, open_regular, say

Piece = namedtuple("Piece", "text first last name", defaults=("",))
Unit = namedtuple("Unit", "path group weight")      # group: row group, or -1; weight: bytes, for the progress bar

PIECE_BYTES = 1 << 20               # a longer document is cut at the next place where no token can span the cut,
FORCED_BYTES = 1 << 24              # or here, if there is none: such cuts are counted, since tokens there may differ
# Between a visible ASCII character and a space or newline, where a word of GPT-2 begins and one of WordPiece ends
CUT = re.compile(rb"[!-~](?=[ \n])")
EMPTY_LINE = re.compile(rb"(\n\r?\n)")
LINE_BYTES = 1 << 26                # no line, and no document of several lines, is longer: it would be held in memory
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
TABLES = {".csv": ",", ".tsv": "\t"}
KINDS = (".txt", ".jsonl", ".json", ".parquet", *TABLES, ".tokens", ".raw", ".md")
JSON_LINES = (".ndjson", ".jl", ".jsonlines")           # other names of .jsonl
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)


def new_counts():
    return {"documents": 0, "text_bytes": 0, "empty": 0, "bad_utf8": 0, "bad_lines": 0, "forced_cuts": 0}


# Bytes of one file ----------------------------------------------------------------------------------------------------

class Readable(io.RawIOBase):
    def readable(self):
        return True


class Joined(Readable):
    """an iterator of bytes as a stream"""

    def __init__(self, parts):
        self.parts, self.waiting, self.at = parts, b"", 0       # waiting[at:] is not read yet

    def readinto(self, out):
        while self.at == len(self.waiting):
            self.waiting, self.at = next(self.parts, None), 0
            if self.waiting is None:
                self.waiting = b""
                return 0
        n = min(len(out), len(self.waiting) - self.at)
        out[:n] = memoryview(self.waiting)[self.at:self.at + n]
        self.at += n
        return n


class Text(Readable):
    """a stream that ends with an error at a byte 0, which no text has"""

    def __init__(self, path, stream):
        self.path, self.stream, self.at = path, stream, 0

    def readinto(self, out):
        n = self.stream.readinto(out)
        nul = bytes(out[:n]).find(0)
        if nul >= 0:
            raise BadInput(f"{self.path}: byte {self.at + nul} is 0: expected text in UTF-8, got a binary file, or "
                           "UTF-16")
        self.at += n
        return n


class Unpadded(Readable):
    """an .xz file without the zeros that may follow its end: Python's lzma fails where there are fewer than 12"""

    def __init__(self, file):
        self.file, self.left, tail = file, file.seek(0, io.SEEK_END), b""
        while not tail and self.left:
            file.seek(max(0, self.left - 4096))
            block = file.read(self.left - file.tell())
            tail = block.rstrip(b"\0")
            self.left -= len(block) - len(tail)
        file.seek(0)

    def readinto(self, out):
        n = self.file.readinto(memoryview(out)[:self.left])
        self.left -= n
        return n


def open_bytes(path):
    """(uncompressed stream, the file beneath it, whose position tells the progress)"""
    file = open_regular(path)
    unpack = {".gz": lambda f: gzip.GzipFile(fileobj=f), ".xz": lambda f: lzma.LZMAFile(Unpadded(f)),
              ".bz2": bz2.BZ2File,
              ".zst": lambda f: need("pyarrow").CompressedInputStream(f, "zstd")}
    for ending, reader in unpack.items():
        if path.lower().endswith(ending):
            return io.BufferedReader(reader(file), 1 << 17), file
    return file, file


@contextlib.contextmanager
def reading(path):
    """errors of a file that is damaged or cannot be read, with its name"""
    try:
        yield
    except gzip.BadGzipFile as e:
        raise BadInput(f"{path}: expected gzip up to its end, got other bytes ({e})") from None
    except DAMAGED as e:
        raise BadInput(f"{path}: damaged or cut short ({e})") from None
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e})") from None


def lines_of(stream, path):
    """the lines of a stream, as iterating it gives them, none longer than LINE_BYTES"""
    for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES + 1), b""), 1):
        if len(line) > LINE_BYTES:
            raise BadInput(f"{path}: line {number}: expected at most {LINE_BYTES >> 20} MB in a line, got more")
        yield line


def kind_of(path):
    """the ending that says what a file contains, in small letters, without those of its compression"""
    path = path.lower()
    for ending in COMPRESSED:
        path = path.removesuffix(ending)
    kind = os.path.splitext(path)[1]
    return ".jsonl" if kind in JSON_LINES else kind


def files_in(paths, kinds=KINDS, any_kind=False):
    """every file of these kinds below the directories, sorted; any_kind: a file that paths name may have any ending"""
    found = []
    for path in paths:
        if not os.path.exists(path):
            raise BadInput(f"{path}: no such file or directory")
        if os.path.isdir(path):
            walked = list(os.walk(path, onerror=console.fail))
            inside = sorted(os.path.join(d, f) for d, _, names in walked for f in names if f[0] != ".")
            for link in (os.path.join(d, n) for d, below, _ in walked for n in below):
                if os.path.islink(link):
                    say(f"{link}: left out, because it is a link to a directory; name it to read it")
            chosen = [f for f in inside if kind_of(f) in kinds]
            found += chosen
            if kinds is KINDS and len(chosen) < len(inside):
                others = sorted({kind_of(f) or "without an ending" for f in inside} - set(kinds))
                say(f"{path}: {len(inside) - len(chosen)} files of other kinds are left out: {brief(others)[1:-1]}")
        elif any_kind or kind_of(path) in kinds:
            found.append(path)
        else:
            raise BadInput(f"{path}: expected one of {', '.join(kinds)} (plain or with {', '.join(COMPRESSED)}), got "
                           f"'{kind_of(path)}'" + "; --text reads it as plain text" * (kinds is KINDS))
    if again := len(found) - len(set(map(os.path.realpath, found))):
        say(f"{again} of the {len(found)} files {'was' if again == 1 else 'were'} named before, and will be read again")
    if not found:
        raise BadInput(f"no file of {', '.join(kinds)} (plain or with {', '.join(COMPRESSED)}) in {', '.join(paths)}")
    return found


# Documents of one unit ------------------------------------------------------------------------------------------------

def cut(text, counts):
    """(pieces, rest): pieces of about PIECE_BYTES, cut only where no token can span the cut; the rest waits for more"""
    pieces, start = [], 0
    while len(text) - start > PIECE_BYTES:
        m = CUT.search(text, start + PIECE_BYTES - 1)
        end = m.end() if m else -1
        if end < 0 and len(text) - start > FORCED_BYTES:
            end = start + FORCED_BYTES
            while end > start + 1 and text[end] & 0xC0 == 0x80:     # never inside a character
                end -= 1
            counts["forced_cuts"] += 1
        if end < 0:
            break
        pieces.append(text[start:end])
        start = end
    return pieces, text[start:]


def valid(text, counts):
    """text, with U+FFFD for bytes that are not UTF-8; counts["bad_utf8"] counts the texts that had any"""
    try:
        text.decode("utf-8")
        return text
    except UnicodeDecodeError:
        counts["bad_utf8"] += 1
        return text.decode("utf-8", "replace").encode("utf-8")


def stream_document(stream, counts):
    """the pieces of a whole file as one document; however long it is, only a few pieces are in memory at once"""
    waiting, first = b"", True
    while True:
        block = stream.read(PIECE_BYTES)
        waiting += block
        pieces, waiting = cut(waiting, counts)
        if not block and first and not pieces and not waiting.strip():
            counts["empty"] += 1
            return
        last = [] if block else [waiting]
        for i, text in enumerate(pieces + last):
            text = valid(text, counts)
            counts["text_bytes"] += len(text)
            counts["documents"] += first
            yield Piece(text, first, bool(last) and i == len(pieces))
            first = False
        if not block:
            return


def pieces_of(document, counts):
    """the pieces of a document that is in memory"""
    return stream_document(io.BytesIO(document), counts)


def check_document(size, path):
    if size > LINE_BYTES:
        raise BadInput(f"{path}: expected at most {LINE_BYTES >> 20} MB in a document, got more; --documents file "
                       "reads a document of any length")


def blank_documents(stream, path):
    """paragraphs, which blank lines separate"""
    lines, size = [], 0
    for line in lines_of(stream, path):
        if line.strip():
            lines.append(line)
            size += len(line)
            check_document(size, path)
        elif lines:
            yield b"".join(lines).rstrip(b"\r\n")
            lines, size = [], 0
    if lines:
        yield b"".join(lines).rstrip(b"\r\n")


def sections(stream, path):
    """sections as llm.c cuts tiny Shakespeare: each ends with an empty line, which belongs to it"""
    waiting = b""
    for block in iter(lambda: stream.read(PIECE_BYTES), b""):
        *parts, waiting = EMPTY_LINE.split(waiting + block)
        check_document(len(waiting), path)
        yield from (text + end for text, end in zip(parts[::2], parts[1::2]))
    yield waiting


SPLITTERS = {"line": lambda stream, path: (line.rstrip(b"\r\n") for line in lines_of(stream, path)),
             "blank": blank_documents, "section": sections}


def json_text(value):
    """a string of JSON as UTF-8; it may hold half of a surrogate pair, which becomes U+FFFD"""
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def json_object(line):
    try:
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def json_records(stream, counts, path, column=None):
    """The objects of a .jsonl file; column: only those with text in it, or null. Other lines are counted and skipped,
    but a file of nothing else is an error."""
    good, bad, example = 0, 0, ""
    for number, line in enumerate(lines_of(stream, path), 1):
        if not line.strip():
            continue
        record = json_object(valid(line, counts))
        if record is not None and (column is None or isinstance(record.get(column, 0), (str, type(None)))):
            good += 1
            yield record
            continue
        if record is not None and not example:
            found = f"{brief(record[column])} there" if column in record else f"the fields {brief(list(record))}"
            example = f" with text in '{column}'; line {number} has {found}: name another field by --column"
        bad += 1
        counts["bad_lines"] += 1
        if good == 0 and bad == 1000:
            break
    if bad and not good:
        raise BadInput(f"{path}: none of its lines is a JSON object{example}")


def table_records(stream, counts, path, column=None):
    """the rows of a .csv or .tsv file, whose first line names the columns"""
    csv.field_size_limit(LINE_BYTES)
    lines = (valid(line, counts).decode("utf-8") for line in lines_of(stream, path))
    rows = csv.reader(lines, delimiter=TABLES[kind_of(path)], strict=True)
    try:
        names = next(rows, [])
        if column is not None and names.count(column) != 1:
            raise BadInput(f"{path}: expected a column '{column}', got {brief(names)}: name another by --column")
        for row in rows:
            if len(row) not in (0, len(names)):
                raise BadInput(f"{path}: line {rows.line_num}: expected {len(names)} fields, got {len(row)}")
            if row:
                yield dict(zip(names, row))
    except csv.Error as e:
        raise BadInput(f"{path}: line {rows.line_num}: expected a row of a table ({e})") from None


def records_of(path, counts):
    """json_records of a file, plain or compressed"""
    with reading(path):
        stream, _ = open_bytes(path)
        with stream:
            yield from json_records(stream, counts, path)


class Reader:
    """How the bytes of a unit become pieces.

    documents   what a document of plain text is: file, or a key of SPLITTERS
    column      the field of JSON and parquet that holds the text
    make        instead of column: record -> (text, name), or None, which skips the record and counts a bad line
    columns     the columns of a parquet file that make needs
    """

    def __init__(self, documents="file", column="text", make=None, columns=None):
        self.documents, self.column, self.make = documents, column, make
        self.columns = columns or [column]
        self.open_files = {}                # parquet files by path: a shuffled order visits each of them often

    def units(self, paths):
        units = []
        for path in paths:
            if kind_of(path) != ".parquet":
                units.append(Unit(path, -1, os.path.getsize(path)))
                continue
            file = self.parquet(path)
            missing = [c for c in self.columns if c not in file.schema_arrow.names]
            if missing:
                raise BadInput(f"{path}: expected a column '{missing[0]}', got {', '.join(file.schema_arrow.names)}")
            share = os.path.getsize(path) // max(file.num_row_groups, 1)
            units += [Unit(path, g, share) for g in range(file.num_row_groups)]
        return units

    def parquet(self, path):
        pa, pq = need("pyarrow"), need("pyarrow.parquet")
        if path in self.open_files:
            return self.open_files[path]
        try:
            open_regular(path).close()
            if len(self.open_files) == 64:
                self.open_files.clear()
            self.open_files[path] = pq.ParquetFile(path)
            return self.open_files[path]
        except (pa.ArrowException, OSError) as e:
            raise BadInput(f"{path}: not a whole parquet file ({str(e).splitlines()[0]})") from None

    def records(self, unit, counts):
        """the rows of a parquet row group as dictionaries"""
        pa = need("pyarrow")
        try:
            for batch in self.parquet(unit.path).iter_batches(256, row_groups=[unit.group], columns=self.columns):
                columns = []
                for name in self.columns:
                    c = batch.column(batch.schema.get_field_index(name))
                    if pa.types.is_string(c.type) or pa.types.is_large_string(c.type):
                        c = c.cast(pa.large_binary())   # as bytes, so that one bad row does not raise for the batch
                    columns.append(c.to_pylist())
                for row in zip(*columns):
                    yield dict(zip(self.columns, row))
        except (pa.ArrowException, OSError) as e:
            raise BadInput(f"{unit.path}: row group {unit.group} is damaged ({str(e).splitlines()[0]})") from None

    def from_records(self, records, counts):
        for record in records:
            if self.make:
                made = self.make(record)
                text, name = made if made else (None, "")
            else:
                text, name = record.get(self.column), ""
            if text is None and not self.make and self.column in record:
                text = b""          # null in a table
            if isinstance(text, str):
                text = json_text(text)
            if not isinstance(text, bytes):
                counts["bad_lines"] += 1
                continue
            if self.make and text.strip():
                counts["documents"] += 1
                counts["text_bytes"] += len(text)
                yield Piece(valid(text, counts), True, True, name)
            else:
                yield from pieces_of(text, counts)

    def pieces(self, unit, counts, progress):
        """yields the pieces of a unit; progress[0] is set to the bytes of the unit read so far"""
        if unit.group >= 0:
            yield from self.from_records(self.records(unit, counts), counts)
            progress[0] = unit.weight
            return
        path = unit.path
        with reading(path):
            stream, below = open_bytes(path)
            text, kind = io.BufferedReader(Text(path, stream), 1 << 17), kind_of(path)
            column = None if self.make else self.column
            with stream, below:
                is_json = kind in (".jsonl", ".json")
                if not is_json and text.peek(3).startswith(codecs.BOM_UTF8):
                    text.read(3)                # a byte order mark, which json skips itself
                if is_json:
                    found = self.from_records(json_records(stream, counts, path, column), counts)
                elif kind in TABLES:
                    found = self.from_records(table_records(text, counts, path, column), counts)
                elif self.documents == "file":
                    found = stream_document(text, counts)
                else:
                    found = (p for d in SPLITTERS[self.documents](text, path) for p in pieces_of(d, counts))
                for piece in found:
                    progress[0] = min(below.tell(), unit.weight)
                    yield piece


# Windows --------------------------------------------------------------------------------------------------------------

# end: progress in bytes; counts: of all that was read
Window = namedtuple("Window", "pieces end counts")


def windows(reader, units, seed, window_bytes):
    """Yields windows of shuffled documents (seed None: in order), and at the end one without any. A document longer
    than a window continues, in order, in windows of its own."""
    order = list(range(len(units)))
    if seed is not None:
        random.Random(f"units {seed}").shuffle(order)
    counts, progress, done, number = new_counts(), [0], 0, 0
    documents, current, size = [], [], 0            # those that have ended, and the pieces of the one that has not

    def window(ordered):
        if seed is not None:
            random.Random(f"window {seed} {number}").shuffle(ordered)
        return Window([p for d in ordered for p in d], done + progress[0], dict(counts))

    for unit in (units[u] for u in order):
        progress = [0]
        for piece in reader.pieces(unit, counts, progress):
            current.append(piece)
            size += len(piece.text)
            if piece.last:
                documents.append(current)
                current = []
            while size >= window_bytes:             # twice if the rest begins a long document
                yield window(documents or [current])
                number += 1
                current, documents = current if documents else [], []
                size = sum(len(p.text) for p in current)
        done, progress = done + unit.weight, [0]
    if documents or current:
        yield window(documents + [current] * bool(current))
    yield Window([], done, counts)


def report(counts):
    """says what was skipped or replaced"""
    words = {"empty": "empty documents skipped", "bad_utf8": "texts with bad UTF-8, replaced by U+FFFD",
             "bad_lines": "records without text skipped", "forced_cuts": "cuts inside a word of 16 MB"}
    for key, text in words.items():
        if counts.get(key):
            say(f"{counts[key]:,} {text}")
