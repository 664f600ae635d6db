#!/usr/bin/env python3
"""retrieve.py -- how well a BERT's embeddings find documents: an exact search by cosine similarity, and trec_eval's
measures of what it finds.

    scripts/retrieve.py --load run/retriever --corpus 'corpus_*.bin' --queries queries.txt --qrels qrels.tsv \\
        --eval_lengths 512,1024 --out run/retriever/eval/mine
    scripts/retrieve.py --corpus run/c/embeddings.safetensors --queries run/q/embeddings.safetensors --qrels qrels.tsv

With --load, `train_bert --encode` embeds the corpus and the queries, cut to each of the --eval_lengths. Without it they
are files that `--encode` has written. --qrels has lines "query 0 document grade", or BEIR's "query document grade".
Of equal scores the earlier document is found; of the documents found the greater name ranks first, as in trec_eval.
Queries without judgements are left out. --queries lacks the unasked queries, --corpus the missing relevant documents.
"""
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile

import console
from console import BadInput, need

DEPTH = 100                                             # documents that are found for each query
MEASURES = {"ndcg@10": "ndcg_cut_10", "recall@10": "recall_10", "recall@100": "recall_100", "mrr": "recip_rank"}


def lines_of(path, encoding="utf-8"):
    try:
        text = console.read_bytes(path).decode(encoding)
    except ValueError as e:
        raise BadInput(f"{path}: expected UTF-8 ({e})") from None
    return text.removesuffix("\n").split("\n") if text else []


def read_qrels(path):
    """{query: {document: grade}}"""
    qrels, names = {}, "query 0 document grade"
    for n, fields in enumerate(map(str.split, lines_of(path, "utf-8-sig")), 1):
        if n == 1 and fields == ["query-id", "corpus-id", "score"]:         # BEIR's
            names = "query document grade"
            continue
        if len(fields) != len(names.split()):
            raise BadInput(f"{path}: line {n}: expected '{names}', got {len(fields)} fields")
        query, document, grade = fields[0], fields[-2], fields[-1]
        if not re.fullmatch(r"[+-]?[0-9]{1,4}", grade) or abs(int(grade)) > 1000:
            raise BadInput(f"{path}: line {n}: grade: expected a whole number from -1000 to 1000, got '{grade[:40]}'")
        if document in qrels.setdefault(query, {}):
            raise BadInput(f"{path}: line {n}: document {document[:80]} is judged twice for query {query[:80]}")
        qrels[query][document] = int(grade)
    if not qrels:
        raise BadInput(f"{path}: expected lines '{names}', got none")
    return qrels


def read_embeddings(path):
    """the names, embeddings (N,C) of float32, pooling, checksum of the weights and --encode_piece, of a file that
    --encode has written"""
    with console.open_regular(path) as f:
        dtype, shape, first, _ = console.read_tensors(f, path).get("embeddings", ("", [], 0, 0))
        if dtype != "F32" or len(shape) != 2 or 0 in shape:
            raise BadInput(f"{path}: embeddings: expected rows of F32, as train_bert --encode writes them")
        f.seek(8)
        made = console.parse_object(f.read(first - 8), path).get("__metadata__", {})
    names = lines_of(ids := path.removesuffix(".safetensors") + ".ids")
    digest = need("xxhash").xxh3_64_hexdigest("".join(name + "\n" for name in names).encode())
    if not isinstance(made, dict) or made.get("ids") != "xxh3:" + digest or len(names) != shape[0]:
        raise BadInput(f"{ids}: expected the {shape[0]:,} names of {path}, got others; write both again with --encode")
    return (names, need("numpy").memmap(path, "<f4", "r", first, tuple(shape)),
            made.get("pooling"), made.get("weights"), made.get("piece", "none"))


def unit_rows(rows, names):
    """rows divided by their lengths, so that dot products are cosine similarities; float64, rounded to float32"""
    length = (rows.astype("f8") ** 2).sum(1) ** 0.5
    for i in (~(length < float("inf"))).nonzero()[0]:
        raise BadInput(f"the embedding of {names[i]} is not finite")
    return (rows * (1 / length.clip(1e-12)).astype("f4")[:, None]).astype("f8")


def search(queries, names, corpus, k, at_once=1 << 23):
    """scores and documents (Q,k): the best k of each query, of equal ones the earlier. Scores are float64 sums, rounded
    to float32 so that equal documents have equal scores."""
    np = need("numpy")
    best, found = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1)
    step = max(1, at_once // len(queries))
    for first in range(0, len(corpus), step):
        block = unit_rows(corpus[first:first + step], names[first:first + step])
        scores = (queries @ block.T).astype("f4")
        better = scores > best[:, -1:]                  # an equal one comes too late
        for q in np.flatnonzero(better.any(1)):
            d = np.flatnonzero(better[q])
            both, documents = np.append(best[q], scores[q, d]), np.append(found[q], first + d)
            order = np.argsort(-both, kind="stable")[:k]
            best[q], found[q] = both[order], documents[order]
    return best, found


def evaluate(queries_path, corpus_path, qrels, qrels_path):
    """the record of a search: the measures, and which queries and documents they cover"""
    asked, queries, *of_queries = read_embeddings(queries_path)
    names, corpus, *of_corpus = read_embeddings(corpus_path)
    told = "{} channels, pooling {}, weights {} and --encode_piece {}".format
    if (wanted := told(queries.shape[1], *of_queries)) != (got := told(corpus.shape[1], *of_corpus)):
        raise BadInput(f"{corpus_path}: expected {wanted}, as the queries have, got {got}; embed both with the same "
                       "checkpoint")
    relevant = {q: [d for d, grade in qrels[q].items() if grade > 0] for q in asked if q in qrels}
    if not relevant:
        raise BadInput(f"{qrels_path}: judges none of the {len(asked):,} queries; are they of another collection?")
    scores, found = search(unit_rows(queries, asked), names, corpus, min(DEPTH, len(names)))
    run = {q: {names[d]: float(s) for s, d in zip(scores[i], found[i])} for i, q in enumerate(asked) if q in relevant}
    of = need("pytrec_eval").RelevanceEvaluator({q: qrels[q] for q in relevant}, set(MEASURES.values())).evaluate(run)
    known, count = set(names), len(relevant)
    means = {measure: sum(of[q][name] for q in relevant) / count for measure, name in MEASURES.items()}
    return {"queries": count, "documents": len(names), **means, "depth": DEPTH, "unjudged": len(asked) - count,
            "without_relevant": sum(not r for r in relevant.values()), "unasked": len(qrels) - count,
            "missing": sum(d not in known for r in relevant.values() for d in r)}


def embed(args, what, T, place):
    """the file of --encode for --corpus or --queries; if the trainer fails, this script ends with its exit code"""
    out = os.path.join(place, what)
    path, words = getattr(args, what), [*shlex.split(args.trainer), "--load", args.load, "--encode"]
    flags = ["--tokenizer", args.tokenizer] if args.tokenizer else []
    if path.endswith(".txt"):                               # which text.py makes ids of, if the model wants them
        words = [sys.executable, os.path.join(console.ROOT, "scripts", "text.py"), "encode", args.load]
        flags += ["--trainer", args.trainer]
    if code := subprocess.call([*words, path, "--eval_lengths", T, "--out", out, *flags]):
        raise SystemExit(abs(code))
    return os.path.join(out, "embeddings.safetensors")


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("--load", help="the checkpoint that embeds; without it, --corpus and --queries are embeddings")
    p.add_argument("--corpus", required=True, help="the documents: shards, or a .txt with one per line")
    p.add_argument("--queries", required=True, help="the queries: shards, or a .txt with one per line")
    p.add_argument("--qrels", required=True, help="the judgements, TREC's or BEIR's")
    p.add_argument("--eval_lengths", nargs="+", type=console.naturals, default=[[512]], metavar="T",
                   help="with --load: tokens that the texts are cut to [512]")
    p.add_argument("--out", help="directory whose log.jsonl gets a line for each length [none]")
    p.add_argument("--tokenizer", help="the vocabulary of a .txt, if the checkpoint has none")
    p.add_argument("--trainer", default=shlex.quote(os.path.join(console.ROOT, "train_bert")),
                   help="the program that embeds, with flags [train_bert of this repository]")
    args = p.parse_args(argv)
    list(map(need, ("numpy", "pytrec_eval", "xxhash")))     # before minutes of embedding
    qrels = read_qrels(args.qrels)
    os.makedirs(args.out or ".", exist_ok=True)
    log = os.path.join(args.out or "", "log.jsonl")
    if args.out and os.path.lexists(log):
        console.append(log, "")                             # refused before minutes of embedding, too
    for T in [str(n) for some in args.eval_lengths for n in some] if args.load else [""]:
        with tempfile.TemporaryDirectory(prefix="embeddings.", dir=args.out) as place:
            files = [embed(args, what, T, place) if T else getattr(args, what) for what in ("queries", "corpus")]
            record = {**({"T": int(T)} if T else {}), **evaluate(*files, qrels, args.qrels)}
        shown = [f"{value:.4f}" if key in MEASURES else str(value) for key, value in record.items()]
        print("\n".join(console.table(record, [shown])))
        if args.out:
            console.append(log, json.dumps({"kind": "retrieval", **record}) + "\n")


if __name__ == "__main__":
    console.run(main)
