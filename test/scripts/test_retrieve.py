"""test_retrieve.py -- retrieve.py: the rankings and measures of the search that train_bert had, an exact search in any
blocks, and damaged files refused by name, line and field."""
import hashlib
import json
import os
import random
import struct
import sys
import unittest

import interpreter

interpreter.choose("numpy, pytrec_eval, xxhash", "numpy, xxhash",
                   also=[os.path.join(interpreter.ROOT, "build", "venv", "bin", "python")])

from folder import BERT_TRAINER, HAS_BERT, SCRIPTS, Folder, called, ended       # noqa: E402
import retrieve         # noqa: E402

MISSING = None
try:
    import numpy as np
    import pytrec_eval      # noqa: F401
    import xxhash
except ImportError as e:
    MISSING = f"SKIPPED: Python's {e.name} is missing: pip install -r data/requirements.txt"


@unittest.skipIf(MISSING, MISSING)
class TestRetrieve(Folder):
    def embeddings(self, name, rows, prefix, ids=None, pooling="mean", weights="xxh3:1", **more):
        """what train_bert --encode writes"""
        text = "".join(f"{prefix}{i}\n" for i in range(len(rows))).encode()
        data = struct.pack(f"<{sum(map(len, rows))}f", *(x for row in rows for x in row))
        made = {"ids": "xxh3:" + xxhash.xxh3_64_hexdigest(text), "pooling": pooling, "weights": weights,
                **more}
        header = json.dumps({"__metadata__": made, "embeddings": {
            "dtype": "F32", "shape": [len(rows), len(rows[0])], "data_offsets": [0, len(data)]}}).encode()
        self.write(name + ".ids", (text if ids is None else ids).decode())
        with open(self.path(name + ".safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header + data)
        return self.path(name + ".safetensors")

    def collection(self):
        """20 queries near one of 240 documents each, half of which are there twice, and judgements"""
        draws = random.Random(7)
        number = lambda: draws.random() - 0.5
        documents = [[number() for _ in range(8)] for _ in range(120)]
        queries = [[2 * x + 3 * number() for x in row] for row in documents[:20]]
        grade = lambda q, d: 3 if d == q else draws.choice((-1, 0, 1, 2))
        judged = [f"q{q} 0 d{d} {q != 3 and grade(q, d):d}\n" for q in range(25)
                  if q != 5 for d in sorted({q, *draws.sample(range(260), 6)})]
        return (self.embeddings("q", queries, "q"), self.embeddings("c", documents + documents, "d"),
                self.write("qrels.tsv", "".join(judged)))

    def go(self, queries, corpus, qrels, *more):
        return called(retrieve.main, "--queries", queries, "--corpus", corpus, "--qrels", qrels, *more)

    def test_the_results_of_the_search_that_train_bert_had(self):
        """its log's record, and SHA-256 of the 100 names that it found for each query"""
        queries, corpus, qrels = self.collection()
        for _ in range(2):                                      # the log is continued
            code, out, err = self.go(queries, corpus, qrels, "--out", self.path("o"))
            self.assertEqual((code, err), (0, ""))
        self.assertIn("| 19 | 240 | 0.1930 | 0.2526 | 0.5895 | 0.2898 | 100 | 1 | 1 | 5 | 4 |", out)
        with open(self.path("o/log.jsonl")) as f:
            record, again = map(json.loads, f)
        golden = {"kind": "retrieval", "ndcg@10": 0.1929714242644297, "recall@10": 0.25263157894736843,
                  "recall@100": 0.5894736842105263, "mrr": 0.2898257776929444, "depth": 100, "queries": 19,
                  "documents": 240, "unjudged": 1, "without_relevant": 1, "unasked": 5, "missing": 4}
        self.assertEqual((record.keys(), again), (golden.keys(), record))
        for key, value in golden.items():
            self.assertTrue(record[key] == value or abs(record[key] - value) < 1e-12, (key, record[key]))
        self.assertEqual(os.listdir(self.path("o")), ["log.jsonl"])
        for line, wanted in (('{"kind":"train","step":0,"loss":1}\n', 0), ('{"kind":"tr', 2)):         # the latter torn
            code = self.go(queries, corpus, qrels, "--out", os.path.dirname(self.write("o/log.jsonl", line)))[0]
            self.assertEqual(code, wanted)
            self.assertEqual(self.read("o/log.jsonl").startswith(line + '{"kind": "retrieval"'), code == 0)
        (asked, rows, *_), (names, documents, *_) = map(retrieve.read_embeddings, (queries, corpus))
        for at_once in 1 << 23, 20 * 17, 1:                     # blocks of documents
            _, found = retrieve.search(retrieve.unit_rows(rows, asked), names, documents, 100, at_once)
            text = "\n".join(" ".join(names[d] for d in row) for row in found)
            self.assertEqual(hashlib.sha256(text.encode()).hexdigest()[:16], "649030c75e250e8f", at_once)

    def test_judgements_of_beir(self):
        """three columns under a line of names"""
        queries, corpus, qrels = self.collection()
        with open(qrels) as f:
            rows = [line.split() for line in f]
        beir = self.write("beir.tsv", "".join(f"{q}\t{d}\t{grade}\n" for q, _, d, grade in
                                              [("query-id", "", "corpus-id", "score"), *rows]))
        self.assertEqual(retrieve.read_qrels(beir), retrieve.read_qrels(qrels))
        odd = self.write("odd.tsv", "\ufeffq1 Q0 d1 1\r\nq1\t0\td2\t-1\n  q2 x  d1   +2")
        self.assertEqual(retrieve.read_qrels(odd), {"q1": {"d1": 1, "d2": -1}, "q2": {"d1": 2}})

    def refused(self, *files, says):
        code, out, err = self.go(*files)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
        self.assertIn(says, err)

    def test_damaged_judgements(self):
        queries, corpus, _ = self.collection()
        refused = lambda text, says: self.refused(queries, corpus, self.write("j.tsv", text), says=f"j.tsv: {says}")
        refused("", "expected lines 'query 0 document grade', got none")
        refused("q 0 d 1\n\nq 0 e 1\n", "line 2: expected 'query 0 document grade', got 0 fields")
        refused("q 0 d 1\nq 0 e\n", "line 2: expected 'query 0 document grade', got 3 fields")
        refused("query-id\tcorpus-id\tscore\nq 0 d 1\n", "line 2: expected 'query document grade', got 4 fields")
        refused("q 0 d 1\nq 0 d 1\n", "line 2: document d is judged twice for query q")
        for grade in "x", "1x", "1.0", "0x1", "1001", "-1001", "99999999999999999999", "--1", "\u0661":
            refused(f"q 0 d 1\nq 0 e {grade}\n",
                    f"line 2: grade: expected a whole number from -1000 to 1000, got '{grade}'")
        refused("nobody 0 d1 1\n", "judges none of the 20 queries")
        with open(self.path("j.tsv"), "wb") as f:
            f.write(b"q 0 \xff 1\n")
        self.refused(queries, corpus, self.path("j.tsv"), says="j.tsv: expected UTF-8")

    def test_damaged_embeddings(self):
        queries, corpus, qrels = self.collection()
        wide = self.embeddings("wide", [[1.0] * 9], "d")
        self.refused(queries, wide, qrels, says="expected 8 channels, pooling mean, weights xxh3:1 and --encode_piece ")
        cls = self.embeddings("cls", [[1.0] * 8], "d", pooling="cls")
        self.refused(queries, cls, qrels, says="as the queries have, got 8 channels, pooling cls, weights xxh3:1")
        later = self.embeddings("later", [[1.0] * 8], "d", weights="xxh3:2")
        self.refused(queries, later, qrels, says="the queries have, got 8 channels, pooling mean, weights xxh3:2")
        pieces = self.embeddings("pieces", [[1.0] * 8], "d", piece="512")
        self.refused(queries, pieces, qrels, says="mean, weights xxh3:1 and --encode_piece 512;")
        empty = self.embeddings("empty", [[]], "d")
        self.refused(queries, empty, qrels, says="empty.safetensors: embeddings: expected rows of F32")
        bad = self.embeddings("bad", [[1.0] * 8, [float("nan")] * 8], "d")
        self.refused(queries, bad, qrels, says="the embedding of d1 is not finite")
        self.refused(bad, corpus, qrels, says="judges none of the 2 queries")
        other = self.embeddings("other", [[1.0] * 8] * 2, "d", ids=b"d0\nd2\n")
        self.refused(queries, other, qrels, says="other.ids: expected the 2 names of")
        with open(corpus, "r+b") as f:
            f.truncate(os.path.getsize(corpus) - 1)
        self.refused(queries, corpus, qrels, says="c.safetensors: expected")
        self.refused(self.path("gone.safetensors"), corpus, qrels, says="gone.safetensors: No such file")
        self.assertEqual(retrieve.unit_rows(np.array([[0, 0], [3e30, 4e30]], "f4"), "ab").tolist()[0], [0, 0])

    @unittest.skipUnless(HAS_BERT, "train_bert is not built")
    def test_a_checkpoint_embeds_at_each_length(self):
        lines = [f"the passage of number {i} is number {i}" for i in range(30)]
        texts, pairs = (self.write(name, "".join(line + "\n" for line in of)) for name, of in
                        (("t.txt", lines), ("p.txt", [f"{line.upper()}\t{line}" for line in lines])))
        qrels = self.write("j.tsv", "".join(f"{i} 0 {i} 1\n" for i in range(30)))
        code, said = ended(BERT_TRAINER, "--pairs", pairs, "--model", "1,1,16", "--T", "32", "--B", "4", "--steps", "1",
                           "--checkpoint_every", "1", "--out", self.path("run"))
        self.assertEqual(code, 0, said)
        go = lambda *more: ended(sys.executable, os.path.join(SCRIPTS, "retrieve.py"), "--load", self.path("run"),
                                 "--corpus", texts, "--queries", texts, "--qrels", qrels, "--trainer", BERT_TRAINER,
                                 "--out", self.path("o"), *more)
        code, said = go("--eval_lengths", "8", "40")
        self.assertEqual(code, 0, said)
        with open(self.path("o/log.jsonl")) as f:
            cut, whole = map(json.loads, f)
        self.assertEqual((cut["T"], whole["T"]), (8, 40))
        self.assertGreater(whole["mrr"], 0.9)                   # a text finds itself
        self.assertLess(cut["mrr"], 0.5)                        # all begin alike
        code, said = go("--eval_lengths", "8", "--corpus", self.path("gone.txt"))
        self.assertEqual((code, os.listdir(self.path("o"))), (2, ["log.jsonl"]), said)
        self.assertIn(f"error: --encode: no file matches '{self.path('gone.txt')}'", said)
        code, said = go("--eval_lengths", "8", "--tokenizer", self.path("words"))       # of a .txt, by text.py
        self.assertEqual(code, 2, said)
        self.assertIn(f"text.py: {self.path('words')}: ", said)


if __name__ == "__main__":
    unittest.main()
