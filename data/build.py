"""build.py -- turns documents into shards: reads ahead, encodes on all cores, writes shards, resumes after a kill."""
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

from common import BadInput, Manifest, Progress, ShardWriter, locked, say
from encoding import Encoder, encoding_of
from sources import PIECE_BYTES, report, windows

MAX_SHARD_TOKENS = 2**31 - 1                    # the header's count is an int32


class Stream:
    """One sequence of documents, cut into shards of one or several splits.

    name(i)       file of shard i
    capacity(i)   tokens that shard i holds; each of the first `full` shards must reach its capacity
    group         documents that stay together and whole; 0: a document may continue in the next shard
    val_groups    groups in shard 0, the validation split
    limit         groups in all shards together; 0: as many as there are
    shards        the most shards that are written, each of them full; 0: as many as there are
    """

    def __init__(self, label, reader, paths, name, capacity, full=0, group=0, seed=None, window_bytes=256_000_000,
                 val_groups=0, limit=0, shards=0):
        self.label, self.reader, self.name, self.capacity = label, reader, name, capacity
        self.full, self.group, self.seed, self.window_bytes = full, group, seed, window_bytes
        self.val_groups, self.limit, self.shards = val_groups, limit, shards
        self.units = reader.units(paths)
        self.paths = paths

    def settings(self):
        r = self.reader
        return {"seed": self.seed, "window_bytes": self.window_bytes, "group": self.group, "piece_bytes": PIECE_BYTES,
                "documents": r.documents, "column": r.columns if r.make else r.column,
                "capacity": [self.capacity(0), self.capacity(1)], "first": self.name(0),
                "val_groups": self.val_groups, "limit": self.limit, **({"shards": self.shards} if self.shards else {})}

    def source(self):
        listing = b"".join(os.fsencode(os.path.basename(p)) + b"\t%d\n" % os.path.getsize(p) for p in self.paths)
        return {"files": len(self.paths), "bytes": sum(u.weight for u in self.units),
                "listing_sha256": hashlib.sha256(listing).hexdigest()}


def numbered(prefix, shard_tokens, val_tokens=0, split="train"):
    """names and capacities of numbered shards: shard 000000 is the validation split if there is one, the rest train"""
    for n in (shard_tokens, val_tokens):
        if n > MAX_SHARD_TOKENS:
            raise BadInput(f"expected at most {MAX_SHARD_TOKENS} tokens per shard (the header's limit), got {n}")

    def name(i):
        return f"{prefix}_{'val' if val_tokens and i == 0 else split}_{i:06d}.bin"

    def capacity(i):
        return val_tokens if val_tokens and i == 0 else shard_tokens
    return {"name": name, "capacity": capacity, "full": 1 if val_tokens else 0}


def single(name):
    """name and capacity of a single file, of any size up to the header's limit"""
    def only(i):
        if i:
            raise BadInput(f"{name}: expected at most {MAX_SHARD_TOKENS} tokens, got more")
        return name
    return {"name": only, "capacity": lambda i: MAX_SHARD_TOKENS}


def build(directory, streams, encoding, tokenizer, workers, facts, max_tokens=0, extra=None):
    """Writes the shards of all streams and the manifest, and returns the manifest's content. facts: what the manifest
    says about the source (name, licence, how it was joined); extra: {name: bytes} of files beside the shards."""
    encoding = encoding_of(encoding, tokenizer)
    with locked(directory), Encoder(encoding, tokenizer, workers, max_tokens) as encoder:
        settings = {"encoding": encoding, "vocabulary_sha256": encoder.encoding.sha256, "max_tokens": max_tokens,
                    "streams": {s.label: s.settings() for s in streams}}
        manifest = Manifest(directory, settings, {**facts, "streams": {s.label: s.source() for s in streams}})
        manifest.load()
        if manifest.data["complete"]:
            say(f"{directory} is already complete")
            summary(manifest)
            return manifest.data
        for stream in streams:
            fill(stream, manifest, encoder)
        manifest.data["files"] = [manifest.write(name, data) for name, data in sorted((extra or {}).items())]
        manifest.data["complete"] = True
        manifest.save()
        summary(manifest)
        return manifest.data


def summary(manifest):
    data = manifest.data
    for label, counts in data["counts"].items():
        shards = [s for s in data["shards"] if s.get("stream") == label]
        tokens = sum(s.get("tokens", 0) for s in shards)
        documents = sum(s.get("documents", 0) for s in shards)
        plural = "s" if len(shards) != 1 else ""
        say(f"{label}: {tokens:,} tokens of {documents:,} documents in {len(shards)} shard{plural}")
        report(counts)
    say(f"wrote {manifest.path}")


def ahead(generator):
    """the generator's items; the next one is made while the caller uses the last"""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, generator, None)
        while True:
            item = waiting.result()
            if item is None:
                return
            waiting = thread.submit(next, generator, None)
            yield item


def fill(stream, manifest, encoder):
    """writes all shards of a stream that do not exist yet; the text of earlier shards is read again, but not encoded"""
    done = [s for s in manifest.data["shards"] if s.get("stream") == stream.label]
    cursor = {"piece": 0, "token": 0}
    if done:
        if done[-1].get("next") is None:
            return
        cursor.update(done[-1]["next"])
    if done:
        say(f"{stream.label}: continuing after the {len(done)} shard{'s' if len(done) != 1 else ''} already there")
    shards = Shards(stream, manifest, encoder.encoding.header, len(done))
    progress = Progress(sum(u.weight for u in stream.units), stream.label)
    position = begin = 0                        # bytes and pieces in the windows before
    try:
        for window in ahead(windows(stream.reader, stream.units, stream.seed, stream.window_bytes)):
            first = max(0, cursor["piece"] - begin)
            todo = window.pieces[first:]
            bundle = ((p.text, p.first, p.last) for p in todo)
            for index, (piece, ids) in enumerate(zip(todo, encoder.arrays(bundle)), begin + first):
                if shards.limit_reached():
                    break
                shards.add(piece, ids, index, cursor["token"] if index == cursor["piece"] else 0)
                read = (window.end - position) * (index + 1 - begin) // len(window.pieces)
                progress.update(position + read, len(ids))
            position, begin = window.end, begin + len(window.pieces)
            if shards.limit_reached() and begin >= cursor["piece"] + (cursor["token"] > 0):     # as it was reached
                break
        shards.close(window.counts)
    except BaseException:
        shards.abandon()
        raise
    finally:
        progress.close()


class Shards:
    """cuts a sequence of token arrays into shards, starting with shard `number`"""

    def __init__(self, stream, manifest, vocabulary, number):
        self.stream, self.manifest, self.vocabulary, self.number = stream, manifest, vocabulary, number
        self.writer = None
        documents = sum(s.get("documents", 0) for s in manifest.data["shards"] if s.get("stream") == stream.label)
        self.groups = documents // max(stream.group, 1)

    def limit_reached(self):
        return 0 < self.stream.limit <= self.groups or 0 < self.stream.shards <= self.number

    def open(self):
        if self.writer is None:
            name = self.stream.name(self.number)
            self.writer = ShardWriter(self.manifest.directory, name, *self.vocabulary, self.stream.group,
                                      self.manifest.names)
        return self.writer

    def finish(self, index, token=0):
        """ends a shard; the next one begins with this token of piece `index`, None: there is none"""
        record = self.writer.finish()
        self.writer = None
        self.number += 1
        record.update(stream=self.stream.label, next=None if index is None else {"piece": index, "token": token})
        self.manifest.add(record)

    def add(self, piece, ids, index, token):
        """appends ids[token:], the tokens of piece `index`"""
        if self.stream.group:
            self.add_group(piece, ids, index)
            return
        at = token
        while at < len(ids) and not self.limit_reached():
            writer = self.open()
            capacity = self.stream.capacity(self.number)
            n = min(len(ids) - at, capacity - writer.tokens)
            writer.documents += piece.first and at == 0
            writer.append(ids[at:at + n])
            at += n
            if writer.tokens == capacity:
                whole = at == len(ids)
                self.finish(index + whole, 0 if whole else at)

    def add_group(self, piece, ids, index):
        """appends a group, which is never cut: if it does not fit, it begins the next shard"""
        capacity = self.stream.capacity(self.number)
        full = self.number == 0 and self.writer is not None and 0 < self.stream.val_groups <= self.groups
        if full or self.writer is not None and self.writer.tokens + len(ids) > capacity:
            self.finish(index)
            capacity = self.stream.capacity(self.number)
        if len(ids) > capacity:
            raise BadInput(f"a group of {len(ids)} tokens does not fit in a shard of {capacity}: "
                           "give a larger --shard_tokens")
        writer = self.open()
        writer.append(ids)
        writer.documents += self.stream.group
        self.groups += 1
        if piece.name:
            writer.ids.append(piece.name)

    def close(self, counts):
        """finishes the last shard, which may be shorter than its capacity"""
        stream = self.stream
        if self.number == 0 and self.writer is None:
            report(counts)
            more = " ..." if len(stream.paths) > 3 else ""
            raise BadInput(f"{stream.label}: no documents in {', '.join(stream.paths[:3])}{more}")
        if self.writer is not None and self.number < stream.full:
            raise BadInput(f"the source has {self.writer.tokens:,} tokens, and a validation split of "
                           f"{stream.capacity(0):,} leaves nothing to train on: give a smaller --val_tokens (0: none)")
        self.manifest.data["counts"][stream.label] = counts
        if self.writer is not None:
            self.finish(None)

    def abandon(self):
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None


def stream_kwargs(args):
    """the flags of add_stream_flags as arguments of Stream"""
    return {"seed": None if args.no_shuffle else args.seed, "window_bytes": args.window_mb * 1_000_000}
