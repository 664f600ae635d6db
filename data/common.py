"""common.py -- what every data script shares: errors, flags, files of tokens, and shards that survive a kill at any
moment. It needs Python's own library only.

A shard is written under a temporary name, synced, renamed, and then entered in manifest.json (written the same way)
with its token count, its sha256 and the cursor from which the next shard starts. At any moment the directory therefore
holds only complete shards, and the same command continues where a killed one stopped and produces the same bytes.
"""
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import struct
import sys
from collections import namedtuple

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts"))
import console  # noqa: E402
from console import (BadInput, Interrupted, clean, locked, natural, need, open_regular, positive,  # noqa: E402,F401
                     run, say, sha256_of, sync_directory, terminal)

HEADER_BYTES, MAGIC, VERSION, VERSION_ROWS = 1024, 20240520, 1, 2
WIDE_MAGIC, WIDE_VERSION = 20240801, 7           # of uint32 ids
EVAL_MAGIC = 20240522
TEMPORARY = ".part-"
MANIFEST = "manifest.json"
SHARD_TOKENS = 100_000_000


# Flags ----------------------------------------------------------------------------------------------------------------

def parser(description, out, encodings=("gpt2", "bert")):
    p = console.parser(description)
    p.add_argument("--out", default=out, help=f"directory to write the shards to [{out}]")
    p.add_argument("--encoding", choices=encodings, default=encodings[0],
                   help=f"gpt2: byte-pair encoding; bert: WordPiece, [CLS] document [SEP] [{encodings[0]}]")
    p.add_argument("--tokenizer", metavar="DIR", help="directory of the vocabulary: encoder.json and vocab.bpe, "
                   "vocab.txt, or a byte-level or WordPiece tokenizer.json [downloaded]")
    p.add_argument("--local", metavar="DIR", help="read the source from files in DIR; the source is not downloaded")
    p.add_argument("--cache", metavar="DIR", help="directory that keeps the downloads [OUT/source]")
    p.add_argument("--workers", type=console.processes, default=os.cpu_count() or 1,
                   help="number of tokenizing processes [all cores]")
    p.add_argument("--record_mb", type=limit_records, metavar="N",
                   help="MB of the longest line, record or row that is read [64]")
    return p


def limit_records(text):
    import sources
    sources.LINE_BYTES = natural(text, 1, 2047) << 20


def add_stream_flags(p, val_tokens=SHARD_TOKENS):
    p.add_argument("--shard_tokens", type=positive, default=SHARD_TOKENS, help=f"tokens per shard [{SHARD_TOKENS}]")
    if val_tokens is not None:
        p.add_argument("--val_tokens", type=natural, default=val_tokens,
                       help=f"tokens in the validation split, which is taken first [{val_tokens}]")
    p.add_argument("--seed", type=natural, default=42, help="seed of the order of documents [42]")
    p.add_argument("--no_shuffle", action="store_true", help="keep the documents in the order of the source")
    p.add_argument("--window_mb", type=positive, default=256, help="MB of text shuffled at once; memory is at most "
                   "about three times this, plus 150 MB per worker [256]")


def add_max_tokens(p, most, of=""):
    p.add_argument("--max_tokens", type=lambda text: natural(text, 3), default=most,
                   help=f"tokens of the longest document{of}, including [CLS] and [SEP] [{most}]")


# Files that exist whole or not at all ---------------------------------------------------------------------------------

@contextlib.contextmanager
def writing(path):
    """errors of the disk, each with what to do about it"""
    try:
        yield
    except OSError as e:
        directory = os.path.dirname(path) or "."
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = ""
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(directory)
                free = f"; {usage.free >> 20:,} MB free" if usage.total else ""     # 0 of 0: it does not know
            raise BadInput(f"{path}: the disk is full ({e.strerror}{free}); finished shards are kept: make room and "
                           "run the same command again") from None
        raise BadInput(f"{path}: cannot write: {e.strerror}") from None


def remove_quietly(path):
    with contextlib.suppress(OSError):
        os.remove(path)


def write_file(path, data):
    """Writes data, bytes or an iterable of them, to path; a kill at any moment leaves either all of it or the previous
    file. Returns what a manifest records of it."""
    with writing(path):
        console.write_whole(path, data)
    return {"file": os.path.basename(path), "bytes": os.path.getsize(path), "sha256": sha256_of(path)}


def check_own(path, sha256, ours=()):
    """raises BadInput if writing to path would replace a file that is neither ours nor the same"""
    if os.path.lexists(path) and os.path.basename(path) not in ours and (
            not os.path.isfile(path) or sha256_of(path) != sha256):
        raise BadInput(f"{path}: is there already, with other contents, and {MANIFEST} does not name it; move it away "
                       "or give another --out")


def write_own(path, data, ours=()):
    """write_file() of bytes, which replaces nothing but `ours`, the names that a manifest had"""
    check_own(path, hashlib.sha256(data).hexdigest(), ours)
    return write_file(path, data)


def hub_hint(name, *files, kind=""):
    """what to do about a name that is no file here, but could be a name on the hub"""
    if os.path.exists(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return ""
    command = " ".join(["hf download", *kind.split(), name, *files, "--local-dir", name.rpartition("/")[2]])
    return f"; a name on the hub is downloaded first: {command}"


# Manifest: {"format", "settings", "source", "counts", "shards": [...], "complete", "checksum"} ------------------------

FORMAT = 3                      # 2 had other places to continue from


class Manifest:
    def __init__(self, directory, settings, source):
        self.directory, self.path = directory, os.path.join(directory, MANIFEST)
        self.data = {"format": FORMAT, "complete": False, "settings": settings, "source": source, "counts": {},
                     "shards": []}
        self.names = set()                      # of the files that an earlier run wrote

    def load(self):
        """takes over what an earlier run left, which must have had the same settings and source"""
        for name in os.listdir(self.directory):
            if re.fullmatch(re.escape(TEMPORARY) + r".*\.bin|\.tmp-[0-9a-f]{16}", name):      # of a killed run
                remove_quietly(os.path.join(self.directory, name))
        if not os.path.exists(self.path):
            return
        old = read_manifest(self.path)
        self.names = set(named_files(old))
        if not self.names and not old["complete"]:
            return                              # of a run that had written nothing
        for part in ("settings", "source"):
            before, now = flat(old[part]), flat(self.data[part])
            for key in sorted(set(before) | set(now)):
                if before.get(key) != now.get(key):
                    raise BadInput(f"{self.directory} holds shards made with {key} = {brief(before.get(key))}, but "
                                   f"this run has {brief(now.get(key))}; give another --out or remove the directory")
        for i, shard in enumerate(old["shards"]):
            if self.lost(shard) or "ids" in shard and self.lost(shard["ids"]):
                say(f"{shard['file']} is missing or has the wrong size: it and all that follows are written again")
                old["shards"], old["complete"] = old["shards"][:i], False
                break
        if any(map(self.lost, old.get("files", []))):
            old["complete"] = False
        if old["format"] != FORMAT and not old["complete"]:
            raise BadInput(f"{self.path}: an earlier version of these scripts began these shards, and only that can "
                           "continue them; remove the directory or give another --out")
        self.data = old

    def lost(self, record):
        path = os.path.join(self.directory, record["file"])
        return not os.path.isfile(path) or os.path.getsize(path) != record["bytes"]

    def save(self):
        data = {**self.data, "checksum": checksum_of(self.data)}
        write_file(self.path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode())

    def write(self, name, data):
        """write_own() of a file of the directory"""
        return write_own(os.path.join(self.directory, name), data, self.names)

    def add(self, record):
        self.data["shards"] = [s for s in self.data["shards"] if s["file"] != record["file"]] + [record]
        self.save()


def flat(tree, prefix=""):
    """{"a": {"b": 1}} as {"a.b": 1}"""
    leaves = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return leaves


def brief(value):
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."


def checksum_of(data):
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def is_record(record):
    """whether it describes a file beside the manifest"""
    is_count, is_object = console.COUNT[1], console.OBJECT[1]
    return (is_object(record) and isinstance(record.get("file"), str) and re.fullmatch(r"\w[\w.+-]*", record["file"])
            and is_count(record.get("bytes")) and isinstance(record.get("sha256"), str)
            and isinstance(record.get("stream", ""), str) and is_object(record.get("next") or {})
            and all(map(is_count, [record.get(key, 0) for key in ("tokens", "documents", "examples")]))
            and all(map(is_count, (record.get("next") or {}).values()))
            and ("ids" not in record or is_record(record["ids"])))


def is_manifest(data):
    is_object = console.OBJECT[1]
    return (all(is_object(data.get(key)) for key in ("settings", "source", "counts"))
            and all(is_object(counts) and all(map(console.COUNT[1], counts.values()))
                    for counts in data["counts"].values())
            and isinstance(data.get("complete"), bool)
            and all(isinstance(data.get(key, []), list) and all(map(is_record, data.get(key, [])))
                    for key in ("shards", "files")) and "shards" in data)


def named_files(data):
    """{name: what a manifest says of the file}"""
    records = {}
    for record in data["shards"] + data.get("files", []):
        records[record["file"]] = record
        if "ids" in record:
            records[record["ids"]["file"]] = record["ids"]
    return records


def read_manifest(path):
    """the content of a manifest, which its checksum protects"""
    data = console.read_object(path)
    if data.get("format") not in (2, FORMAT) or data.pop("checksum", "") != checksum_of(data) or not is_manifest(data):
        raise BadInput(f"{path}: not a manifest of format 2 or {FORMAT}, or damaged or edited; remove it and its "
                       "shards to start over")
    return data


# One shard ------------------------------------------------------------------------------------------------------------

Tokens = namedtuple("Tokens", "path ids vocabulary end")        # ids: bytes, or a view of uint16 or uint32


def header(*fields, magic=MAGIC, version=VERSION):
    """the bytes before the tokens of a file; a shard's fields are its tokens, vocabulary, end-of-text id, ..."""
    return struct.pack(f"<{2 + len(fields)}i", magic, version, *fields).ljust(HEADER_BYTES, b"\0")


def read_tokens(path):
    """the ids of a .txt file, which are its bytes, or of a shard"""
    with open_regular(path) as f:
        if path.endswith(".txt"):
            text = f.read()
            if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise BadInput(f"{path}: expected UTF-8, got UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)")
            return Tokens(path, text, 256, ord("\n"))
        magic, version, count, vocabulary, end = struct.unpack("<5i", f.read(HEADER_BYTES).ljust(20, b"\0")[:20])
        if (magic, version) not in ((MAGIC, VERSION), (WIDE_MAGIC, WIDE_VERSION)):
            raise BadInput(f"{path}: header: expected a shard of tokens, or a name that ends in .txt")
        wide, ids = magic == WIDE_MAGIC, f.read()
        if len(ids) != (4 if wide else 2) * count:
            raise BadInput(f"{path}: expected {count:,} tokens, as its header says, got {len(ids):,} bytes")
    if (vocabulary, end) == (0, 0):             # as llm.c writes them
        vocabulary, end = (128256, 128000) if wide else (50257, 50256)
    ids = memoryview(ids).cast("I" if wide else "H")
    if (largest := max(end, max(ids, default=0))) >= vocabulary:
        raise BadInput(f"{path}: expected ids below {vocabulary}, the vocabulary, got {largest}")
    return Tokens(path, ids, vocabulary, end)


class ShardWriter:
    """A file of tokens, under a temporary name until finish(). Header: magic, version, tokens, vocabulary and
    end-of-text id (0 and 0 mean GPT-2's), documents per group (0: a stream), documents (0 in a stream, which does not
    count them)."""

    def __init__(self, directory, name, vocab=0, eot=0, group=0, ours=()):
        self.directory, self.name, self.fields, self.ours = directory, name, (vocab, eot, group), ours
        self.path = os.path.join(directory, name)
        self.temporary = os.path.join(directory, TEMPORARY + name)
        self.tokens = self.documents = 0
        self.ids = []
        with writing(self.path):
            self.file = open(self.temporary, "xb", buffering=1 << 20)
            self.file.write(bytes(HEADER_BYTES))

    def append(self, array):
        with writing(self.path):
            self.file.write(array.astype("<u2", copy=False).tobytes())
        self.tokens += len(array)

    def finish(self):
        """writes the header, gives the file its final name, and returns the record for the manifest"""
        vocab, eot, group = self.fields
        with writing(self.path):
            self.file.seek(0)
            self.file.write(header(self.tokens, vocab, eot, group, self.documents if group else 0))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        record = {"file": self.name, "bytes": HEADER_BYTES + 2 * self.tokens, "tokens": self.tokens,
                  "documents": self.documents, "sha256": sha256_of(self.temporary)}
        size = os.path.getsize(self.temporary)
        if size != record["bytes"]:
            raise BadInput(f"{self.temporary}: expected {record['bytes']} bytes, got {size}: the disk lost some")
        check_own(self.path, record["sha256"], self.ours)
        if self.ids:                # before the shard, so that no shard ever lacks its names
            names = os.path.splitext(self.path)[0] + ".ids"
            record["ids"] = write_own(names, "".join(i + "\n" for i in self.ids).encode(), self.ours)
        with writing(self.path):
            os.replace(self.temporary, self.path)
            sync_directory(self.directory)
        return record

    def abandon(self):
        with contextlib.suppress(OSError):
            self.file.close()
        remove_quietly(self.temporary)


class Progress:
    """a progress bar with its rate and the time left, if tqdm is installed"""

    def __init__(self, total, description):
        self.bar, self.tokens = None, 0
        with contextlib.suppress(BadInput):
            interval = 0.5 if sys.stderr.isatty() else 10
            self.bar = need("tqdm").tqdm(total=total or None, desc=clean(description), unit="B", unit_scale=True,
                                         smoothing=0.05, mininterval=interval, file=terminal(sys.stderr))

    def update(self, position, tokens):
        self.tokens += tokens
        if self.bar is not None and position > self.bar.n:
            self.bar.set_postfix_str(f"{self.tokens / 1e6:.1f}M tokens", refresh=False)
            self.bar.update(position - self.bar.n)

    def close(self):
        if self.bar is not None:
            self.bar.close()
