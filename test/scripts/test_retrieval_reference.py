"""test_retrieval_reference.py -- test/fixtures/retrieval.json against pytrec_eval: the judgements and rankings of a small collection, and
what pytrec_eval makes of them. The C++ tests compare llmc/trec.h with that file.

    test/scripts/test_retrieval_reference.py            checks the file; skipped where pytrec_eval is not installed
    test/scripts/test_retrieval_reference.py --write    writes it anew
"""
import json
import os
import random
import sys
import unittest

try:
    import pytrec_eval
except ImportError:
    pytrec_eval = None

FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "retrieval.json")
MEASURES = {"ndcg_cut.1,3,10,100", "recall.1,5,10,100", "recip_rank"}
DOCUMENTS = [f"d{i}" for i in range(36)] + ["D7", "d07", "doc", "Z", "\u00e9t\u00e9", "\u4e2d"]     # as bytes they sort otherwise than as numbers


def collection(seed):
    """(lines of qrels, {query: [[document, score], ...]}): scores in eighths, so that many are equal; grades from -1 to 4"""
    rng = random.Random(seed)
    qrels, run = [], {}
    for q in range(20):
        name = f"q{q}"
        grades = [0] if q == 3 else [-1, 0] if q == 4 else [1] if q < 10 else [-1, 0, 0, 1, 1, 2, 4]
        if q != 5:                                                  # asked, but not judged
            some = rng.sample(DOCUMENTS, rng.randint(1, 20))
            judged = {d: rng.choice(grades) for d in some}
            qrels += [f"{name} {rng.choice(['0', 'Q0'])}{rng.choice([' ', chr(9), '   '])}{d} {g}" for d, g in judged.items()]
        if q != 6:                                                  # judged, but not asked
            found = rng.sample(DOCUMENTS, rng.choice([1, 7, 12, 42, 42]))
            run[name] = [[d, rng.randint(-4, 4 if q % 2 else 20) / 8] for d in found]
    return qrels, run


def evaluate(qrels, run):
    judged = {}
    for line in qrels:
        query, _, document, grade = line.split()
        judged.setdefault(query, {})[document] = int(grade)
    return pytrec_eval.RelevanceEvaluator(judged, MEASURES).evaluate({q: {d: float(s) for d, s in r} for q, r in run.items()})


def write():
    qrels, run = collection(7)
    expected = evaluate(qrels, run)
    rows = {"qrels": qrels, "run": run, "expected": expected}
    with open(FIXTURE, "w", encoding="utf-8") as f:
        f.write(json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=False).replace('},"', '},\n"').replace(']],"', ']],\n"') + "\n")
    print(f"wrote {FIXTURE}: {os.path.getsize(FIXTURE)} bytes")


class TestRetrievalReference(unittest.TestCase):
    def test_fixture(self):
        with open(FIXTURE, encoding="utf-8") as f:
            rows = json.load(f)
        self.assertGreater(len(rows["expected"]), 10)
        self.assertLess(len(rows["expected"]), len(rows["run"]))
        if pytrec_eval is None:
            self.skipTest("SKIPPED: pytrec_eval is not installed, so test/fixtures/retrieval.json is taken as it is")
        for values in (rows, dict(zip(("qrels", "run"), collection(7)))):
            found = evaluate(values["qrels"], values["run"])
            self.assertEqual(found.keys(), rows["expected"].keys())
            for query, measures in found.items():
                for name, value in measures.items():
                    self.assertAlmostEqual(value, rows["expected"][query][name], delta=1e-12, msg=f"{query} {name}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        unittest.main()
