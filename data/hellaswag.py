#!/usr/bin/env python3
"""hellaswag.py -- HellaSwag's validation split as llm.c's multiple-choice file, for --hellaswag.

Source    github.com/rowanz/hellaswag, data/hellaswag_val.jsonl; with --local, that file, or the one of this name in DIR
Size      12 MB to download, 3.6 MB written
Licence   MIT
Tokens    10,042 examples of one context and four endings, 1.8 million GPT-2 tokens
Time      seconds

Format: 256 int32 {20240522, 1, examples, bytes of the longest example, 0...}, then for each example, in uint16: 65535,
the bytes of the example, its number, the right ending, 4, and then length and tokens of the context and of each ending.
An ending begins with a space.
"""
import glob
import os
import struct

from common import EVAL_MAGIC, BadInput, Manifest, header, locked, parser, run, say, sha256_of
from download import cache_of, download, vocabulary
from encoding import make_encoding
from sources import kind_of, new_counts, records_of, report

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
EXAMPLES = 10042
MARK, ENDINGS = 65535, 4


def usable(record):
    """whether a record has a context, four endings and the number of the right one"""
    try:
        label = int(str(record["label"]))               # "2" or 2, and not 2.7 or true
        endings = record["endings"]
        return (isinstance(record["ctx"], str) and record["ctx"].strip() and isinstance(endings, list)
                and len(endings) == ENDINGS and all(isinstance(e, str) for e in endings) and 0 <= label < ENDINGS)
    except (KeyError, ValueError, TypeError):
        return False


def encode_example(encoding, record, number):
    texts = [record["ctx"]] + [" " + e for e in record["endings"]]
    context, *endings = encoding.encode([t.encode("utf-8", "replace").decode() for t in texts])
    body = struct.pack(f"<3H{len(context)}H", int(record["label"]), ENDINGS, len(context), *context)
    for e in endings:
        body += struct.pack(f"<H{len(e)}H", len(e), *e)
    size = 6 + len(body)
    if size >= 65536:
        raise BadInput(f"example {number}: expected at most 65535 bytes, the format's limit, got {size}")
    return struct.pack("<3H", MARK, size, number) + body


def source_file(args):
    """the .jsonl to read: from --local, or downloaded"""
    if not args.local:
        return download(URL, os.path.join(cache_of(args), "hellaswag_val.jsonl"))
    if not os.path.isdir(args.local):
        return args.local
    found = sorted(glob.glob(os.path.join(glob.escape(args.local), "hellaswag_val.jsonl*")))
    if not found:
        raise BadInput(f"{args.local}: expected hellaswag_val.jsonl there")
    return found[0]


def read_examples(path, encoding, counts):
    """the encoded examples of a .jsonl; records that are not usable are counted and skipped"""
    examples = []
    for record in records_of(path, counts):
        if not usable(record):
            counts["bad_lines"] += 1
        elif len(examples) == MARK:
            raise BadInput(f"{path}: expected at most {MARK} examples, the most that the format can number")
        else:
            examples.append(encode_example(encoding, record, len(examples)))
    if not examples:
        raise BadInput(f"{path} ({kind_of(path)}): no example with ctx, label and four endings")
    return examples


def main(argv):
    args = parser(__doc__, "data/hellaswag", encodings=("gpt2",)).parse_args(argv)
    path = source_file(args)
    counts = new_counts()
    with locked(args.out):
        encoding = make_encoding("gpt2", vocabulary(args))
        examples = read_examples(path, encoding, counts)
        manifest = Manifest(args.out, {"encoding": "gpt2", "vocabulary_sha256": encoding.sha256}, {
            "name": "HellaSwag", "licence": "MIT", "file": os.path.basename(path), "sha256": sha256_of(path)})
        manifest.load()                 # refuses the directory of another data set
        target = os.path.join(args.out, "hellaswag_val.bin")
        record = manifest.write("hellaswag_val.bin", b"".join([
            header(len(examples), max(map(len, examples)), magic=EVAL_MAGIC), *examples]))
        manifest.data["counts"] = {"val": {**counts, "documents": len(examples)}}
        manifest.data["complete"] = True
        manifest.add({**record, "stream": "val", "examples": len(examples)})
    report(counts)
    note = "" if len(examples) == EXAMPLES else f" (the validation split has {EXAMPLES:,})"
    say(f"wrote {target}: {len(examples):,} examples{note}")


if __name__ == "__main__":
    run(main)
