#!/usr/bin/env python3
"""verify.py -- checks token shards and multiple-choice files (header, size, every id, checksum) and prints a sample.

    data/verify.py data/wikitext103             a directory: every file that its manifest.json names, and no other shard
    data/verify.py --tokenizer DIR data/mine/text_train_000000.bin

Checksums come from the manifest.json beside a file; for a file without one, verify says so and checks the rest. If
anything is wrong, it prints one line per finding and exits with code 2. Time: a second per 300 MB.
"""
import glob
import os
import struct

from common import (EVAL_MAGIC, HEADER_BYTES, MAGIC, MANIFEST, TEMPORARY, VERSION, VERSION_ROWS, WIDE_MAGIC,
                    WIDE_VERSION, BadInput, console, named_files, natural, need, open_regular, read_manifest, run, say,
                    sha256_of)
from encoding import VOCABULARIES, encoding_of, make_encoding, tokenizer_json

BLOCK = 1 << 22                                 # tokens checked at once
ANSWER = {2: 1 << 15, 4: 1 << 30}               # {bytes of an id: the mark of an answer's tokens, in examples in rows}


def check_ids(f, tokens, vocab, rows, width):
    """Every id must be below vocab; returns how many are marked as answers. What else groups of documents and rows of
    examples must be, the trainer checks as it reads them."""
    np, answers = need("numpy"), 0
    for position in range(0, tokens, BLOCK):
        ids = np.frombuffer(f.read(width * min(BLOCK, tokens - position)), dtype=f"<u{width}")
        answers += int((ids >= ANSWER[width]).sum())
        wrong = np.flatnonzero((ids % ANSWER[width] if rows else ids) >= vocab)
        if wrong.size:
            raise BadInput(f"token {position + wrong[0]}: expected an id below {vocab}, the vocabulary, got "
                           f"{ids[wrong[0]]}")
    return answers


def check_shard(f, header, size):
    version, tokens, vocab, eot, group, documents, row, length = header[1:9]
    rows = version == VERSION_ROWS                      # examples of a task, as tasks.py writes them
    width, stream = (4, WIDE_VERSION) if header[0] == WIDE_MAGIC else (2, VERSION)
    if version not in (stream, VERSION_ROWS):
        raise BadInput(f"expected version {stream} or {VERSION_ROWS}, got {version}")
    if tokens <= 0 or size != HEADER_BYTES + width * tokens:
        raise BadInput(f"expected {HEADER_BYTES + width * tokens} bytes for the {tokens} tokens of its header, got "
                       f"{size}")
    if any(header[9:]) or any(header[5:7] if rows else header[7:9]):
        raise BadInput("the header has other values where it should be zero")
    if (vocab, eot) == (0, 0):
        vocab, eot, _ = VOCABULARIES["gpt2"]
    fits = row >= 2 and tokens % row == 0 and length >= 0 if rows else group >= 0 and documents >= 0
    if not (0 < vocab <= (ANSWER[width] if rows else 65536) and 0 <= eot < vocab and fits):
        kind = f" in rows of {row}, length {length}" if rows else f", {documents} documents in groups of {group}"
        raise BadInput(f"the header is out of range: vocabulary {vocab}, end-of-text {eot}, {tokens} tokens{kind}")
    answers = check_ids(f, tokens, vocab, rows, width)
    if not rows:
        grouped = f", {documents:,} documents in groups of {group}" if group else ""
        return vocab, f"{tokens:,} tokens, vocabulary of {vocab:,}{grouped}"
    of_length = f" of length {length:,}" if length else ""
    return vocab, (f"{tokens // row:,} examples{of_length} in rows of {row:,} tokens, {answers:,} of them in answers, "
                   f"vocabulary of {vocab:,}")


def check_eval(f, header, size):
    """the multiple-choice format of hellaswag.py, whose examples the trainer checks as it reads them"""
    if header[1] != 1 or header[2] <= 0 or any(header[4:]):
        raise BadInput(f"the header is out of range: version {header[1]}, {header[2]} examples")
    return VOCABULARIES["gpt2"][0], f"{header[2]:,} examples of four endings"


def sample(path, vocab, count, tokenizer):
    """the first tokens as text, or as ids if no vocabulary is given, or another"""
    with open(path, "rb") as f:
        header = struct.unpack("<4i", f.read(16))
        f.seek(HEADER_BYTES)
        kind, width = ("I", 4) if header[0] == WIDE_MAGIC else ("H", 2)
        count = min(max(count, 6) if header[0] == EVAL_MAGIC else count, os.path.getsize(path) // width)
        ids = struct.unpack(f"<{count}{kind}", f.read(width * count).ljust(width * count, b"\0"))
    if header[0] == EVAL_MAGIC:
        ids = ids[6:6 + min(ids[5], count - 6)]
    else:
        ids = [i % ANSWER[width] if header[1] == VERSION_ROWS else i for i in ids[:header[2]]]
    if header[:2] == (MAGIC, VERSION_ROWS) and vocab == 256:
        return repr(bytes(ids).decode("latin-1"))
    name = {v[0]: k for k, v in VOCABULARIES.items()}.get(vocab)
    if tokenizer and (name or tokenizer_json(tokenizer)) and max(ids, default=0) < vocab:
        return repr(make_encoding(encoding_of(name or "bpe", tokenizer), tokenizer).decode(ids))
    return " ".join(map(str, ids)) + "   (give --tokenizer DIR to see text)"


def check_file(path, records):
    """(a line that says what the file is, its vocabulary if it has tokens); raises BadInput if it is damaged"""
    record = records.get(os.path.basename(path))
    try:
        size = os.path.getsize(path)
        if record and size != record["bytes"]:
            raise BadInput(f"expected {record['bytes']} bytes, as in the manifest, got {size}")
        if record and sha256_of(path) != record["sha256"]:
            raise BadInput("its checksum differs from the manifest's")
        if not path.endswith(".bin"):
            return f"{size:,} bytes, checksum as in the manifest", 0
        with open_regular(path) as f:
            if size < HEADER_BYTES:
                raise BadInput(f"expected at least {HEADER_BYTES} bytes, a header, got {size}")
            header = struct.unpack("<256i", f.read(HEADER_BYTES))
            if header[0] not in (MAGIC, WIDE_MAGIC, EVAL_MAGIC):
                raise BadInput(f"expected magic number {MAGIC}, {WIDE_MAGIC} or {EVAL_MAGIC}, got {header[0]}")
            check = check_eval if header[0] == EVAL_MAGIC else check_shard
            vocab, what = check(f, header, size)
    except OSError as e:
        raise BadInput(e.strerror) from None
    return what + "; no manifest, so no checksum" * (not record), vocab


def check_files(files, args):
    """prints a line for each file and returns how many of them are wrong"""
    bad, lacks = 0, None
    for file in files:
        manifest = os.path.join(os.path.dirname(file), MANIFEST)
        records = named_files(read_manifest(manifest)) if os.path.exists(manifest) else {}
        try:
            what, vocab = check_file(file, records)
        except BadInput as e:
            say(f"{file}: {str(e).removeprefix(f'{file}: ')}")
            bad += 1
            continue
        if vocab and args.sample:
            try:
                what += f"\n    {sample(file, vocab, args.sample, args.tokenizer)}"
            except BadInput as e:           # what this lacks is no finding about the file
                lacks = lacks or e
        print(f"{file}: {what}", flush=True)
    if lacks:
        raise lacks
    return bad


def check_directory(directory):
    """(files to check, findings about the directory as a whole)"""
    path = os.path.join(directory, MANIFEST)
    shards = sorted(glob.glob(os.path.join(glob.escape(directory), "*.bin")))
    if not os.path.exists(path):
        return shards, [] if shards else [f"{directory}: neither {MANIFEST} nor a shard"]
    data = read_manifest(path)
    findings = [] if data["complete"] else [f"{path}: not complete; run the command that wrote it again to continue"]
    named = [os.path.join(directory, n) for n in named_files(data)]
    findings += [f"{s}: not in {MANIFEST}" for s in shards if s not in named]
    findings += [f"{os.path.join(directory, n)}: left over from an interrupted run"
                 for n in sorted(os.listdir(directory)) if n.startswith(TEMPORARY)]
    return named, findings


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("paths", nargs="+", metavar="PATH", help="shards, or directories of shards")
    p.add_argument("--tokenizer", metavar="DIR", help="directory of the vocabulary, to show the sample as text")
    p.add_argument("--sample", type=natural, default=24, help="number of tokens to show; 0 = none [24]")
    args = p.parse_args(argv)
    need("numpy")
    bad, files = 0, []
    for path in args.paths:
        found, findings = check_directory(path) if os.path.isdir(path) else ([path], [])
        for finding in findings:
            say(finding)
        bad += len(findings)
        files += found
    bad += check_files(files, args)
    print(f"{len(files)} files checked, {bad} finding{'s' if bad != 1 else ''}")
    if bad:
        raise BadInput(f"{bad} finding{'s' if bad != 1 else ''}, see above")


if __name__ == "__main__":
    run(main)
