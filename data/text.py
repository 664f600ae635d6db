#!/usr/bin/env python3
"""text.py -- token shards of any text: .txt, .jsonl, .csv and .parquet files, plain or compressed.

    data/text.py --out data/mine --val_tokens 1000000 corpus/ more.jsonl.gz
    data/text.py --out data/mine --documents line dump.txt.gz
    data/text.py --out data/pairs --pairs sentence corpus/      pairs to train a retriever on, as text

Source    the files you name and those below the directories you name, sorted, also as .gz .xz .bz2 .zst: plain text
          as .txt .md .raw .tokens, JSON lines as .jsonl .ndjson .jl .jsonlines .json, tables as .parquet .csv .tsv
Size      2 bytes per token, about half the size of English text; nothing else is written
Licence   that of the text
Tokens    English has about 4.6 bytes per GPT-2 token
Time      about 4 million bytes per second and core; the same command with the same input continues an interrupted run

Writes text_train_000000.bin and so on, with --val_tokens text_val_000000.bin first, and manifest.json with counts
and checksums. Bytes that are not UTF-8 are replaced, empty documents and broken lines are skipped; all are counted and
reported; a file with a byte 0, which no text has, is refused. The trainer also reads .txt files directly, one token per
byte; shards are for subword tokens.

With --pairs it writes text instead of shards: text_train_pairs.txt, lines of query TAB passage for train_bert
--pairs, and of the first --val_pairs pairs text_val_queries.txt, text_val_corpus.txt and text_val_qrels.tsv,
for scripts/retrieve.py. A paragraph is the text between blank lines of a document. The pair is
    sentence    its first sentence and the rest of it
    halves      its first half of the words and the second
    title       the first line of the document and the rest of the document
Pairs of fewer than 4 and 8 words (a title: 1 and 8) are skipped, and so is one that has a held-out text. --seed
decides the order of the documents, and so which are held out; --encoding, --tokenizer, --shard_tokens, --val_tokens
and --workers play no part.
"""

from build import Stream, build, numbered, stream_kwargs
from common import BadInput, add_stream_flags, natural, parser, run, say
from download import vocabulary
from pairs import RULES, build_pairs
from sources import SPLITTERS, Reader, files_in


def main(argv):
    p = parser(__doc__, "data/text")
    add_stream_flags(p, val_tokens=0)
    p.add_argument("inputs", nargs="*", metavar="FILE", help="files or directories")
    p.add_argument("--documents", choices=("file", *sorted(SPLITTERS)), default="file",
                   help="what a document of plain text is: a file, a line, the text between blank lines, or a section "
                   "that ends with an empty line [file]")
    p.add_argument("--column", default="text", help="the field of JSON or column of a table with the text [text]")
    p.add_argument("--text", action="store_true", help="the files that you name are plain text if their endings are "
                   "of no known kind; without it they are refused")
    p.add_argument("--pairs", choices=RULES, help="write pairs for a retriever instead of shards, by this rule")
    p.add_argument("--val_pairs", type=natural, default=1000, help="pairs held out, as a collection to search [1000]")
    args = p.parse_args(argv)
    inputs = args.inputs + [args.local] * bool(args.local)
    if not inputs:
        raise BadInput("expected an input: name files or directories (see --help)")
    shards = numbered("text", args.shard_tokens, 0 if args.pairs else args.val_tokens)
    stream = Stream("text", Reader(args.documents, args.column), files_in(inputs, any_kind=args.text), **shards,
                    **stream_kwargs(args))
    if args.pairs:
        build_pairs(args.out, args.pairs, stream, args.val_pairs)
    else:
        build(args.out, [stream], args.encoding, vocabulary(args), args.workers, {"name": "text"})
        if not args.val_tokens:
            say("no validation shard: for one, give --val_tokens and another --out; or train with --val_every 0")


if __name__ == "__main__":
    run(main)
