#!/usr/bin/env python3
"""msmarco.py -- MS MARCO passages for contrastive training: (query, positive, hard negative) triplets, as BERT shards.

    data/msmarco.py --out data/msmarco

Source    the hub's sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1, triplet-hard: 11.7 million triplets
          whose negatives a dense retriever ranked high and a cross-encoder low; with --local, .parquet or .jsonl files below DIR
          with query, positive and negative (or lists pos and neg, of which the first is taken)
Size      3.2 GB to download, 0.5 GB of shards for 1.25 million triplets
Licence   MS MARCO's: non-commercial research only
Tokens    about 180 a triplet (WordPiece); passages are cut at --max_tokens
Time      downloading: 5 minutes at 100 Mbit/s; tokenizing: 5 minutes of one core

Writes msmarco_val_000000.bin (--val_triplets) and msmarco_train_000001.bin and on, manifest.json with counts and checksums. A shard is
a BERT shard, of documents [CLS] text [SEP], three to a triplet: query, positive, negative; a triplet is never cut in two. Header:
int32 [5] is 3, the documents in a group, [6] the number of documents.
"""
import os
import sys

from build import Stream, build, numbered, stream_kwargs
from common import add_stream_flags, natural, parser, positive, run
from download import hub_download, hub_files, vocabulary
from sources import Reader, files_in, json_text

REPO = "sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1"
COLUMNS = ["query", "positive", "negative"]
GROUP = 3


def first_text(record, *names):
    """the text itself, or the first of a list of texts or of {"text": ...}"""
    for name in names:
        value = record.get(name)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            value = value.get("text")
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return json_text(value)
    return b""


def triplet(record):
    texts = [first_text(record, "query"), first_text(record, "positive", "pos", "positive_passages"),
             first_text(record, "negative", "neg", "negative_passages")]
    texts = [t.replace(b"\0", b" ") for t in texts]     # NUL stands between them
    return (b"\0".join(texts), "") if all(t.strip() for t in texts) else None


def main(argv):
    p = parser(__doc__, "data/msmarco", encodings=("bert",))
    add_stream_flags(p, val_tokens=None)
    p.add_argument("--triplets", type=natural, default=1_250_000, help="of training; 0 = all [1250000]")
    p.add_argument("--val_triplets", type=natural, default=1000, help="of validation [1000]")
    p.add_argument("--max_tokens", type=positive, default=512, help="longest document, its frame included [512]")
    p.add_argument("--files", type=natural, default=0, help="only so many of the source's files; 0 = all [0]")
    args = p.parse_args(argv)
    if args.local:
        paths = files_in([args.local], (".parquet", ".jsonl"))[:args.files or None]
    else:
        entries = hub_files(REPO, "triplet-hard", ".parquet")[:args.files or None]
        paths = hub_download(REPO, entries, args.cache or os.path.join(args.out, "source"))
    names = numbered("msmarco", args.shard_tokens, args.shard_tokens if args.val_triplets else 0)
    stream = Stream("triplets", Reader(column="", make=triplet, columns=COLUMNS), paths, **names, **stream_kwargs(args), group=GROUP,
                    val_groups=args.val_triplets, limit=args.triplets and args.triplets + args.val_triplets)
    build(args.out, [stream], args.encoding, vocabulary(args), args.workers,
          {"name": "MS MARCO triplets with hard negatives", "licence": "MS MARCO, non-commercial research"}, args.max_tokens)


if __name__ == "__main__":
    run(main, sys.argv[1:])
