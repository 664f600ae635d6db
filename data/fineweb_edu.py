#!/usr/bin/env python3
"""fineweb_edu.py -- FineWeb-Edu or classic FineWeb: filtered web text, the sample of 10 billion tokens.

    data/fineweb_edu.py --out data/edu_fineweb10B
    data/fineweb_edu.py --dataset classic --out data/fineweb10B
    data/fineweb_edu.py --sample 1BT --out data/edu_fineweb1B       a billion tokens, validation included
    data/fineweb_edu.py --files 1 --out data/edu_fineweb700M        a fourteenth of it

Source    HuggingFaceFW/fineweb-edu (or fineweb) on the hub, sample/10BT; with --local, the .parquet files below DIR
Size      edu: 14 files, 28.5 GB to download, 20 GB of shards; classic: 15 files, 30 GB, 21 GB of shards. The
          downloads may be removed afterwards. --sample 100BT and 350BT are 10 and 35 times as large; 1BT, which the
          hub does not have, is ten shards of the first two files of 10BT
Licence   ODC-By 1.0, and Common Crawl's terms of use
Tokens    edu: 9.67 million documents, about 9.9 billion GPT-2 tokens in 100 shards; classic: about 10.3 billion in 104
Time      downloading: 40 minutes at 100 Mbit/s; tokenizing: about 1 million tokens per second and core, so
          3 hours on one core, 12 minutes on 16

Writes PREFIX_val_000000.bin, then PREFIX_train_000001.bin and so on, 100M tokens each, under the names that llm.c uses,
and manifest.json. --seed shuffles the documents: groups of about 1,000 over the whole source, then single documents
within windows of --window_mb. The same seed gives the same shards on every machine and for any number of workers.
"""
from build import Stream, build, numbered, stream_kwargs
from common import add_stream_flags, natural, parser, run
from download import source_files, vocabulary
from sources import Reader

DATASETS = {"edu": ("HuggingFaceFW/fineweb-edu", "edu_fineweb"), "classic": ("HuggingFaceFW/fineweb", "fineweb")}


def main(argv):
    p = parser(__doc__, "data/edu_fineweb10B")
    add_stream_flags(p)
    p.add_argument("--dataset", choices=sorted(DATASETS), default="edu", help="FineWeb-Edu or classic FineWeb [edu]")
    p.add_argument("--sample", choices=("1BT", "10BT", "100BT", "350BT"), default="10BT",
                   help="size of the sample [10BT]")
    p.add_argument("--files", type=natural, default=0, help="number of source files to read; 0 = all [0]")
    args = p.parse_args(argv)
    repo, prefix = DATASETS[args.dataset]
    sample, most = args.sample, 0
    if sample == "1BT":
        sample, most, args.files = "10BT", 10, args.files or 2
    paths = source_files(args, repo, f"sample/{sample}", ".parquet")
    shards = numbered(prefix, args.shard_tokens, args.val_tokens)
    stream = Stream("text", Reader(), paths, shards=most, **shards, **stream_kwargs(args))
    build(args.out, [stream], args.encoding, vocabulary(args), args.workers,
          {"name": f"{repo} sample-{args.sample}", "licence": "ODC-By 1.0"})


if __name__ == "__main__":
    run(main)
