#!/usr/bin/env python3
"""msmarco.py -- MS MARCO passages for contrastive training: (query, positive, hard negative) triplets, as BERT shards.

    data/msmarco.py --out data/msmarco

Source    sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1 on the hub, triplet-hard: 11.7 million
          triplets whose negatives a dense retriever ranked high and a cross-encoder low; with --local, the .parquet or
          .jsonl files below DIR with query, positive and negative (or lists pos and neg, whose first text is taken)
Size      3.2 GB to download, 0.5 GB of shards for 1.25 million triplets
Licence   MS MARCO's: non-commercial research only
Tokens    about 180 per triplet (WordPiece); passages are cut at --max_tokens
Time      downloading: 5 minutes at 100 Mbit/s; tokenizing: 5 minutes on one core

Writes msmarco_val_000000.bin (--val_triplets), then msmarco_train_000001.bin and so on, and manifest.json with counts
and checksums. These are BERT shards: each document is [CLS] text [SEP], and three make a triplet, query, positive and
negative, which is never cut in two. In the header, int32 [5] is 3, the documents per group, and [6] is the number of
documents.
"""
from build import Stream, build, numbered, stream_kwargs
from common import add_max_tokens, add_stream_flags, natural, parser, run
from download import source_files, vocabulary
from sources import Reader, json_text

REPO = "sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1"
COLUMNS = ["query", "positive", "negative"]
GROUP = 3


def first_text(record, *names):
    """the first field of these names: a text, or the first of a list of texts, or its "text" if it is an object"""
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
    texts = [first_text(record, "query"), first_text(record, "positive", "pos"),
             first_text(record, "negative", "neg")]
    texts = [t.replace(b"\0", b" ") for t in texts]     # NUL will separate them
    return (b"\0".join(texts), "") if all(t.strip() for t in texts) else None


def main(argv):
    p = parser(__doc__, "data/msmarco", encodings=("bert",))
    add_stream_flags(p, val_tokens=None)
    p.add_argument("--triplets", type=natural, default=1_250_000, help="training triplets; 0 = all [1250000]")
    p.add_argument("--val_triplets", type=natural, default=1000, help="validation triplets [1000]")
    add_max_tokens(p, 512)
    p.add_argument("--files", type=natural, default=0, help="number of source files to read; 0 = all [0]")
    args = p.parse_args(argv)
    paths = source_files(args, REPO, "triplet-hard", ".parquet", ".jsonl")
    names = numbered("msmarco", args.shard_tokens, args.shard_tokens if args.val_triplets else 0)
    reader = Reader(column="", make=triplet, columns=COLUMNS)
    limit = args.triplets + args.val_triplets if args.triplets else 0
    stream = Stream("triplets", reader, paths, **names, **stream_kwargs(args), group=GROUP,
                    val_groups=args.val_triplets, limit=limit)
    facts = {"name": "MS MARCO triplets with hard negatives", "licence": "MS MARCO, non-commercial research"}
    build(args.out, [stream], args.encoding, vocabulary(args), args.workers, facts, args.max_tokens)


if __name__ == "__main__":
    run(main)
