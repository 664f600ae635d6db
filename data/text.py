#!/usr/bin/env python3
"""text.py -- token shards of any text: .txt, .jsonl and .parquet files, also .gz .xz .bz2 .zst or in a .zip, or standard input.

    data/text.py --out data/mine --val_tokens 1000000 corpus/ more.jsonl.gz
    zcat dump.gz | data/text.py --out data/mine --documents line -

Source    the files named, and those below the directories named, sorted; "-" is standard input
Size      2 bytes a token, about half the size of English text; nothing else is written
Licence   the text's own
Tokens    English has about 4.6 bytes a GPT-2 token
Time      about 4 million bytes a second and core; an interrupted run goes on with the same command (and the same input)

Writes PREFIX_train_000000.bin and on, with --val_tokens PREFIX_val_000000.bin first, and manifest.json with counts and checksums.
Text that is no UTF-8, empty documents and broken lines are mended or skipped, counted and reported. The trainer also reads .txt
files as they are, as bytes; shards are for subword tokens.
"""
import sys

from build import Stream, build, numbered, stream_kwargs
from common import BadInput, add_stream_flags, parser, run
from download import vocabulary
from sources import SPLITTERS, Reader, STDIN, files_in


def main(argv):
    p = parser(__doc__, "data/text")
    add_stream_flags(p, val_tokens=0)
    p.add_argument("inputs", nargs="*", metavar="FILE", help="files, directories or -")
    p.add_argument("--prefix", default="text", help="of the shards' names [text]")
    p.add_argument("--documents", choices=("file", *sorted(SPLITTERS)), default="file",
                   help="plain text: one document a file, a line, or between blank lines [file]")
    p.add_argument("--column", default="text", help="the field of JSON and parquet that is the text [text]")
    p.add_argument("--jsonl", action="store_true", help="standard input is JSON lines, not plain text")
    args = p.parse_args(argv)
    inputs = ["-.jsonl" if args.jsonl and i == "-" else i for i in args.inputs] + ([args.local] if args.local else [])
    if not inputs:
        raise BadInput("no input: name files, directories or - (see --help)")
    if sum(i in STDIN for i in inputs) > 1:
        raise BadInput("standard input can be read once")
    if "/" in args.prefix or not args.prefix:
        raise BadInput(f"--prefix {args.prefix}: a part of a file name, without /")
    reader = Reader(args.documents, args.column)
    stream = Stream("text", reader, files_in(inputs), **numbered(args.prefix, args.shard_tokens, args.val_tokens), **stream_kwargs(args))
    build(args.out, [stream], args.encoding, vocabulary(args), args.workers, {"name": "text"})


if __name__ == "__main__":
    run(main, sys.argv[1:])
