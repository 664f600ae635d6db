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
import itertools
import json
import lzma
import os
import random
import re
import zlib
from collections import namedtuple

from common import BadInput, brief, console, hub_hint, need, open_regular, say

Piece = namedtuple("Piece", "text first last name", defaults=("",))
Unit = namedtuple("Unit", "path group weight")      # group: row group, or -1; weight: bytes, for the progress bar

PIECE_BYTES = 1 << 20               # a longer document is cut at the next place where no token can span the cut,
FORCED_BYTES = 1 << 24              # or here, if there is none: such cuts are counted, since tokens there may differ
# Between a visible ASCII character and a space or newline, where a word of GPT-2 begins and one of WordPiece ends
CUT = re.compile(rb"[!-~](?=[ \n])")
EMPTY_LINE = re.compile(rb"(\n\r?\n)")
LINE_BYTES = 1 << 26                # no line, record, row or document of lines is longer: it is held in memory
BLOCK_BYTES, XZ_BYTES = 1 << 17, 1 << 28
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
TABLES = {".csv": ",", ".tsv": "\t"}
KINDS = (".txt", ".jsonl", ".json", ".parquet", *TABLES, ".tokens", ".raw", ".md")
JSON_LINES = (".ndjson", ".jl", ".jsonlines")           # other names of .jsonl
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)


def new_counts():
    return {"documents": 0, "text_bytes": 0, "empty": 0, "bad_utf8": 0, "bad_lines": 0, "forced_cuts": 0}


# Bytes of one file ----------------------------------------------------------------------------------------------------

class Joined(io.RawIOBase):
    """an iterator of bytes as a stream"""

    def __init__(self, parts):
        self.parts, self.waiting, self.at = parts, b"", 0       # waiting[at:] is not read yet

    def readable(self):
        return True

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


def text_of(stream, path, counts):
    """The blocks of a text, without byte order marks, which stand before each file of several in a row, and with LF
    where lines end with CR, as in a file without LF in its first block. A byte 0 is an error."""
    at, waiting, mac, mark = 0, b"", None, codecs.BOM_UTF8
    for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
        if (nul := block.find(0)) >= 0:
            raise BadInput(f"{path}: byte {at + nul} is 0: expected text in UTF-8, got a binary file, or UTF-16")
        if mac is None:
            mac = b"\r" in block[:-1] and b"\n" not in block
            if mac:
                counts["cr"] = counts.get("cr", 0) + 1
        block = waiting + (block.replace(b"\r", b"\n") if mac else block)
        if marks := block.count(mark) - (at == 0 and block.startswith(mark)):
            counts["marks"] = counts.get("marks", 0) + marks
        at += len(block) - len(waiting)
        block = block.replace(mark, b"")
        begun = 2 if block.endswith(mark[:2]) else int(block.endswith(mark[:1]))
        block, waiting = block[:len(block) - begun], block[len(block) - begun:]
        if block:
            yield block
    yield waiting


def xz_blocks(file):
    """The contents of an .xz file: of one stream or several, with zeros after any. Its dictionary may have XZ_BYTES."""
    unpack, waiting, between = None, b"", True          # between streams
    while True:
        if not waiting and (between or unpack.needs_input) and not (waiting := file.read(BLOCK_BYTES)):
            if unpack is None or not between:
                raise EOFError("its end is missing")
            return
        if between:
            waiting = waiting.lstrip(b"\0")
            if not waiting:
                continue
            unpack = lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=XZ_BYTES)
        yield unpack.decompress(waiting, BLOCK_BYTES)
        waiting, between = unpack.unused_data, unpack.eof


def open_bytes(path):
    """(uncompressed stream, the file beneath it, whose position tells the progress)"""
    file = open_regular(path)
    unpack = {".gz": lambda f: gzip.GzipFile(fileobj=f), ".xz": lambda f: Joined(xz_blocks(f)), ".bz2": bz2.BZ2File,
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
        if "Memory usage" in str(e):
            raise BadInput(f"{path}: xz needs more than {XZ_BYTES >> 20} MB for it; unpack it first (xz -d)") from None
        raise BadInput(f"{path}: damaged or cut short ({e})") from None
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e})") from None


def lines_of(stream, path):
    """the lines of a stream, as iterating it gives them, none longer than LINE_BYTES"""
    for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES + 1), b""), 1):
        if len(line) > LINE_BYTES:
            raise BadInput(f"{path}: line {number}: expected at most {LINE_BYTES >> 20} MB in a line, got more "
                           "(--record_mb)")
        yield line


def kind_of(path):
    """the ending that says what a file contains, in small letters, without those of its compression"""
    path = path.lower()
    for ending in COMPRESSED:
        path = path.removesuffix(ending)
    kind = os.path.splitext(path)[1]
    return ".jsonl" if kind in JSON_LINES else kind


def walked(path, kinds, out):
    """The files below a directory, sorted. What is hidden, behind a link or in `out`, where the shards go, is left out
    with a word about it."""
    inside, left = [], []
    for directory, below, names in os.walk(path, onerror=console.fail):
        hidden = [n for n in below if n[0] == "."] + [n for n in names if n[0] == "." and kind_of(n) in kinds]
        left += [(os.path.join(directory, n), "hidden") for n in hidden]
        inside += [os.path.join(directory, n) for n in names if n[0] != "."]
        below[:] = [n for n in below if n[0] != "."]
        for name in below[:]:
            place = os.path.join(directory, name)
            if os.path.islink(place):
                left.append((place, "a link to a directory"))
            elif out and os.path.exists(out) and os.path.samefile(place, out):
                left.append((place, "--out"))
                below.remove(name)
    for place, why in sorted(left)[:8]:
        say(f"{place}: left out, because it is {why}" + "; name it to read it" * (why != "--out"))
    if len(left) > 8:
        say(f"{path}: {len(left) - 8} more are left out, hidden or links to directories")
    return sorted(inside)


def files_in(paths, kinds=KINDS, any_kind=False, out=None):
    """every file of these kinds below the directories, sorted; any_kind: a file that paths name may have any ending"""
    found = []
    for path in paths:
        if not os.path.exists(path):
            hint = "" if kind_of(path) in kinds else hub_hint(path, kind="--repo-type dataset")
            raise BadInput(f"{path}: no such file or directory{hint}")
        if os.path.isdir(path):
            inside = walked(path, kinds, out)
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
    once = {}
    for path in found:
        status = os.stat(path)
        once.setdefault((status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path), path)
    if again := len(found) - len(once):
        say(f"{again} of the {len(found)} files {'was' if again == 1 else 'were'} named before, or by a link, and will "
            "be read again")
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
    for visible, lines in itertools.groupby(lines_of(stream, path), lambda line: bool(line.strip())):
        document = bytearray()
        for line in lines if visible else ():
            document += line
            check_document(len(document), path)
        if visible:
            yield bytes(document).rstrip(b"\r\n")


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


BETWEEN = re.compile("(?:[ \\t\\r\\n,]|\xef\xbb\xbf)*")       # values of JSON, as bytes in Latin-1
VISIBLE, LINE_END = re.compile(r"\S"), re.compile("[\r\n]|$")
decode_json = json.JSONDecoder().raw_decode


def json_values(stream, path, counts):
    """(line, object) for each object of a file: one in each line, over several lines, or in arrays, however deep. Of a
    line outside an array that is not an object, None; within an array that is an error. A part of the file is in
    memory, as characters of one byte; a longer one is needed only while an object does not end in it."""
    text, at, line, depth, end_of_file = "", 0, 1, 0, False
    while True:
        start, at = at, BETWEEN.match(text, at).end()
        line += text.count("\n", start, at)
        mark, value, enough = text[at:at + 1], None, False
        if mark == "[" or mark == "]" and depth:
            depth, at = depth + (1 if mark == "[" else -1), at + 1
            continue
        if mark:
            try:
                (value, end), enough = decode_json(text, at), True
            except (ValueError, RecursionError) as e:       # an error at the end of whole lines: they are too few
                visible = VISIBLE.search(text, getattr(e, "pos", at), text.rfind("\n") + 1)
                enough = bool(visible) or isinstance(e, RecursionError)
        size = (end if isinstance(value, dict) else len(text) * (not enough)) - at
        parts = sum(text.count(c, at) for c in "[{,") if size > PIECE_BYTES else 0     # each takes 64 bytes when read
        if size > LINE_BYTES or parts > LINE_BYTES >> 4:
            raise BadInput(f"{path}: line {line}: expected at most {LINE_BYTES >> 20} MB and {LINE_BYTES >> 4:,} "
                           "values in a record, got more (--record_mb)")
        if not enough and not end_of_file:
            text, at, size = text[at:], 0, min(2 * (len(text) - at) + 1, LINE_BYTES + 1)
            while len(text) < size and not end_of_file:
                more = stream.read(BLOCK_BYTES) + stream.readline(PIECE_BYTES)
                text, end_of_file = text + more.decode("latin-1"), not more
        elif isinstance(value, dict):
            found = text[at:end]
            yield line, value if found.isascii() else json.loads(valid(found.encode("latin-1"), counts))
            line, at = line + found.count("\n"), end
        elif depth:
            raise BadInput(f"{path}: line {line}: expected objects up to the end of a JSON array (]), got "
                           f"{text[at:at + 40] or 'the end of the file'!r}")
        elif not mark:
            return
        else:
            yield line, None
            at = LINE_END.search(text, at).end()
            line += text[at - 1] == "\n"


def json_records(stream, counts, path, column=None):
    """The objects of a file of JSON; column: only those with text in it, or null. Other lines are counted and skipped,
    but a file of nothing else is an error."""
    good, bad, example = 0, 0, ""
    head = stream.peek(512)
    if what := "expected UTF-8, got UTF-16" if 0 in head[:4] else console.stand_in(kind_of(path), head):
        raise BadInput(f"{path}: {what}")
    for number, record in json_values(stream, path, counts):
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


def table_rows(path, how, counts, progress=None):
    """(line, fields) of the rows of a .csv or .tsv file; how: with quotation marks around fields ("quoted"), with
    backslashes before special characters as well ("escaped"), or with both as text ("plain")"""
    mark, number, size, fields = TABLES[kind_of(path)], 0, 0, 0

    def lines(stream):
        nonlocal number, size, fields
        for number, line in enumerate(lines_of(io.BufferedReader(Joined(text_of(stream, path, counts))), path), 1):
            size, fields = size + len(line), fields + line.count(mark.encode())
            if size > LINE_BYTES or fields > LINE_BYTES >> 6:
                raise BadInput(f"{path}: line {number}: expected at most {LINE_BYTES >> 20} MB and "
                               f"{LINE_BYTES >> 6:,} fields in a row, got more (--record_mb)")
            yield valid(line, counts).decode("utf-8")
    csv.field_size_limit(LINE_BYTES)
    with reading(path):
        stream, below = open_bytes(path)
        with stream, below:
            rows = lines(stream)
            rows = ((line.rstrip("\r\n").split(mark) if line.strip("\r\n") else [] for line in rows)
                    if how == "plain" else
                    csv.reader(rows, delimiter=mark, strict=True, escapechar="\\" if how == "escaped" else None))
            try:
                for row in rows:
                    if row:
                        yield number, row
                    size = fields = 0
                    if progress:
                        progress[0] = below.tell()
            except csv.Error as e:
                raise BadInput(f"{path}: line {number}: expected a row of a table ({e})") from None


def rows_in(path, how):
    """the number of rows, or 0 if read in this way they have not all as many fields as the first"""
    try:
        sizes = (len(row) for _, row in table_rows(path, how, new_counts()))
        first, others = next(sizes, 0), 0
        for others, size in enumerate(sizes, 1):
            if size != first:
                return 0
        return others
    except BadInput:
        return 0


def is_consistent(path):
    """whether, read as text, the quotation marks around fields are as a program writes them: in the first line, or only
    where the field has one inside, or in the same columns of every row"""
    needless, columns = False, set()
    for number, (_, row) in enumerate(table_rows(path, "plain", new_counts())):
        quoted = [field[:1] == '"' for field in row]
        if number == 0 and all(quoted):
            return True
        needless |= any(q and '""' not in field[1:-1] for q, field in zip(quoted, row))
        columns |= {tuple(quoted)} if number and len(columns) < 2 else set()
        if needless and len(columns) > 1:
            return False
    return True


WAYS = {"quoted": "quotation marks around fields", "plain": "quotation marks as text",
        "escaped": "quotation marks around fields and backslashes before special characters"}


def way_to_read(path):
    """The `how` of table_rows() in which a table is whole. A .csv has quotation marks around fields, but in a .tsv they
    are text unless they are consistent."""
    rows = {how: rows_in(path, how) for how in ("quoted", "plain")}
    if not rows["quoted"]:
        rows["escaped"] = rows_in(path, "escaped")
    if TABLES[kind_of(path)] == "\t" and rows["plain"] and not (rows["quoted"] and is_consistent(path)):
        how = "plain"
    else:
        how = next((how for how in ("quoted", "escaped") if rows.get(how)), "quoted")
    others = [f"; with {WAYS[way]} they were {count:,}" for way, count in rows.items() if count not in (0, rows[how])]
    if how == "escaped" or others and rows[how]:
        say(f"{path}: {rows[how]:,} rows with {WAYS[how]}" + "".join(others[:1]))
    return how


def table_records(counts, path, progress, column=None):
    """the rows of a .csv or .tsv file, whose first line names the columns"""
    rows = table_rows(path, way_to_read(path), counts, progress)
    _, names = next(rows, (1, []))
    if column is not None and names.count(column) != 1:
        raise BadInput(f"{path}: expected a column '{column}', got {brief(names)}: name another by --column")
    for number, row in rows:
        if len(row) != len(names):
            raise BadInput(f"{path}: line {number}: expected {len(names)} fields, got {len(row)}")
        yield dict(zip(names, row))


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
            kind = str(file.schema_arrow.field(self.columns[0]).type)
            if not (self.make or re.match("(dictionary<values=)?(large_|fixed_size_)?(string|binary)|null", kind)):
                raise BadInput(f"{path}: expected text in column '{self.columns[0]}', got {kind}; name another by "
                               "--column")
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
        except (pa.ArrowException, OSError, ValueError) as e:
            raise BadInput(f"{path}: not a whole parquet file ({str(e).splitlines()[0]})") from None

    def batch_rows(self, file, unit):
        """How many rows to read at once: 64 MB, but at least 4 rows. A dictionary may hold one long text for all rows,
        so only one bound is known: no row is longer than the group's uncompressed bytes."""
        group = file.metadata.row_group(unit.group)
        columns = (group.column(i) for i in range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in self.columns)
        if size > LINE_BYTES * max(1, group.num_rows):
            raise BadInput(f"{unit.path}: row group {unit.group}: expected at most {LINE_BYTES >> 20} MB in a row, got "
                           f"{size >> 20:,} MB in {group.num_rows} (--record_mb)")
        return max(4, min(256, LINE_BYTES // max(1, size)))      # a row each time would take minutes

    def records(self, unit, counts):
        """the rows of a parquet row group as dictionaries"""
        pa = need("pyarrow")
        try:
            file = self.parquet(unit.path)
            for batch in file.iter_batches(self.batch_rows(file, unit), row_groups=[unit.group], columns=self.columns):
                columns = []
                for name in self.columns:
                    c = batch.column(batch.schema.get_field_index(name))
                    c = c.dictionary_decode() if pa.types.is_dictionary(c.type) else c
                    if c.nbytes > LINE_BYTES < max(c.slice(i, 1).nbytes for i in range(len(c))):
                        raise BadInput(f"{unit.path}: row group {unit.group}: expected at most {LINE_BYTES >> 20} MB "
                                       "in a row, got more (--record_mb)")
                    if pa.types.is_string(c.type) or pa.types.is_large_string(c.type):
                        c = c.cast(pa.large_binary())   # as bytes, so that one bad row does not raise for the batch
                    columns.append(c.to_pylist())
                for row in zip(*columns):
                    yield dict(zip(self.columns, row))
        except (pa.ArrowException, OSError, ValueError, OverflowError) as e:
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
            text, kind = io.BufferedReader(Joined(text_of(stream, path, counts)), BLOCK_BYTES), kind_of(path)
            column = None if self.make else self.column
            with stream, below:
                if kind in (".jsonl", ".json"):
                    found = self.from_records(json_records(stream, counts, path, column), counts)
                elif kind in TABLES:
                    found = self.from_records(table_records(counts, path, at := [0], column), counts)
                elif self.documents == "file":
                    found = stream_document(text, counts)
                else:
                    found = (p for d in SPLITTERS[self.documents](text, path) for p in pieces_of(d, counts))
                for piece in found:
                    progress[0] = min(at[0] if kind in TABLES else below.tell(), unit.weight)
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
             "bad_lines": "records without text skipped", "forced_cuts": "cuts inside a word of 16 MB",
             "marks": "byte order marks within texts, left out",
             "cr": "files with CR at the ends of lines, read as LF"}
    for key, text in words.items():
        if counts.get(key):
            say(f"{counts[key]:,} {text}")
