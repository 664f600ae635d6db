#!/usr/bin/env python3
"""mldr.py -- MLDR, English: a long-document retrieval test (queries, judgements, the full corpus) as BERT shards.

    data/mldr.py --out data/mldr_en

Source    Shitao/MLDR on the hub, mldr-v1.0-en: corpus, test and dev .jsonl.gz; with --local, these files in DIR
Size      1.1 GB to download; 2 GB of shards
Licence   MIT
Tokens    200,000 documents (Wikipedia articles) of 4,700 WordPiece tokens on average; 800 test queries, 200 dev queries
Time      downloading: 2 minutes at 100 Mbit/s; tokenizing: 30 minutes on one core

Writes, with manifest.json:
    mldr_corpus_000000.bin ...        every document as [CLS] text [SEP], cut at --max_tokens; the .ids file beside each
                                      shard has the documents' names, one per line
    mldr_test_queries.bin, .ids       the queries in the same format; also dev
    mldr_test_qrels.tsv               TREC's lines "query 0 document 1"; also dev
In the header of a shard, int32 [5] is the number of documents per group, 1, and [6] that of documents.
"""
import os
import re

from build import Stream, build, numbered, single
from common import SHARD_TOKENS, BadInput, add_max_tokens, parser, positive, run, say
from download import cache_of, hub_download, hub_files, vocabulary
from encoding import first_file
from sources import COMPRESSED, Reader, json_text, new_counts, records_of

REPO, FOLDER = "Shitao/MLDR", "mldr-v1.0-en"


def name_of(value):
    """a name without whitespace, as TREC's formats need it, or None"""
    if isinstance(value, int):
        value = str(value)
    if not isinstance(value, str) or re.search(r"\s|[\ud800-\udfff]", value):
        return None
    return value or None


def named_text(name_field, text_field):
    """record -> (text, name), or None if the record lacks one of them"""
    def make(record):
        name, text = name_of(record.get(name_field)), record.get(text_field)
        if name is None or not isinstance(text, str) or not text.strip():
            return None
        return json_text(text).replace(b"\0", b" "), name
    return make


def qrels(path):
    """(the judgements as TREC's lines, the set of documents judged)"""
    lines, judged = [], set()
    make = named_text("query_id", "query")
    for record in records_of(path, new_counts()):
        made = make(record)
        passages = record.get("positive_passages") or [] if made else []
        for passage in passages if isinstance(passages, list) else [None]:
            document = name_of(passage.get("docid")) if isinstance(passage, dict) else None
            if document is None:
                raise BadInput(f"{path}: query {made[1]} has a positive passage without a docid")
            lines.append(f"{made[1]} 0 {document} 1\n")
            judged.add(document)
    if not lines:
        raise BadInput(f"{path}: no query with a judged document")
    return "".join(lines).encode(), judged


def check_names(directory, data, judged):
    """A judged document that the corpus lacks could never be found, and one that it has twice would count twice."""
    names = []
    for shard in data["shards"]:
        if shard.get("stream") == "corpus" and "ids" in shard:
            with open(os.path.join(directory, shard["ids"]["file"]), encoding="utf-8", errors="replace") as f:
                names += f.read().split("\n")[:-1]
    known = set(names)
    if len(known) != len(names):
        raise BadInput(f"{len(names) - len(known)} documents of the corpus share a name with another")
    for split, documents in judged.items():
        missing = sorted(documents - known)
        if missing:
            raise BadInput(f"{len(missing)} documents judged in {split} are not in the corpus, e.g. {missing[0]}")
    say(f"every judged document is among the {len(names):,} of the corpus")


def source_files(args, wanted):
    """{split: path}: from --local, or downloaded"""
    if args.local:
        found = {split: first_file(args.local, [f"{split}.jsonl{e}" for e in ("", *COMPRESSED)]) for split in wanted}
        for split in (split for split in wanted if not found[split]):
            raise BadInput(f"{args.local}: expected {split}.jsonl there, plain or compressed")
        return found
    entries = {os.path.basename(e[0]).split(".")[0]: e for e in hub_files(REPO, FOLDER, ".jsonl.gz")}
    if not set(wanted) <= set(entries):
        raise BadInput(f"{REPO} {FOLDER}: expected {', '.join(wanted)}, got {', '.join(sorted(entries))}")
    return dict(zip(wanted, hub_download(REPO, [entries[split] for split in wanted], cache_of(args))))


def main(argv):
    p = parser(__doc__, "data/mldr_en", encodings=("bert",))
    add_max_tokens(p, 16384)
    p.add_argument("--shard_tokens", type=positive, default=SHARD_TOKENS, help=f"tokens per shard [{SHARD_TOKENS}]")
    args = p.parse_args(argv)
    files = source_files(args, ["corpus", "test", "dev"])
    streams = [Stream("corpus", Reader(make=named_text("docid", "text")), [files["corpus"]],
                      **numbered("mldr", args.shard_tokens, split="corpus"), group=1)]
    extra, judged = {}, {}
    for split in ("test", "dev"):
        extra[f"mldr_{split}_qrels.tsv"], judged[split] = qrels(files[split])
        streams.append(Stream(split, Reader(make=named_text("query_id", "query")), [files[split]],
                              **single(f"mldr_{split}_queries.bin"), group=1))
    data = build(args.out, streams, args.encoding, vocabulary(args), args.workers,
                 {"name": "MLDR-en", "licence": "MIT"}, args.max_tokens, extra)
    check_names(args.out, data, judged)


if __name__ == "__main__":
    run(main)
