"""test_retrieval_reference.py -- checks test/fixtures/retrieval.json by pytrec_eval. The file has the judgements and
rankings of a small collection and what pytrec_eval computes from them; the C++ tests compare text/trec.h with it.

    test/scripts/test_retrieval_reference.py            checks the file; skipped if pytrec_eval is not installed
    test/scripts/test_retrieval_reference.py --write    writes the file
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
# their order as bytes differs from that as numbers
DOCUMENTS = [f"d{i}" for i in range(36)] + ["D7", "d07", "doc", "Z", "\u00e9t\u00e9", "\u4e2d"]


def grades_of(q):
    """what the documents of a query may be judged"""
    special = {3: [0], 4: [-1, 0]}
    return special.get(q, [1] if q < 10 else [-1, 0, 0, 1, 1, 2, 4])


def collection(seed):
    """(lines of qrels, {query: [[document, score], ...]}); scores are eighths, so that many are equal"""
    rng = random.Random(seed)
    qrels, run = [], {}
    for q in range(20):
        name = f"q{q}"
        if q != 5:                                                  # query 5 is asked, but not judged
            some = rng.sample(DOCUMENTS, rng.randint(1, 20))
            judged = {d: rng.choice(grades_of(q)) for d in some}
            qrels += [f"{name} {rng.choice(['0', 'Q0'])}{rng.choice([' ', chr(9), '   '])}{d} {g}"
                      for d, g in judged.items()]
        if q != 6:                                                  # query 6 is judged, but not asked
            found = rng.sample(DOCUMENTS, rng.choice([1, 7, 12, 42, 42]))
            run[name] = [[d, rng.randint(-4, 4 if q % 2 else 20) / 8] for d in found]
    return qrels, run


def evaluate(qrels, run):
    judged = {}
    for line in qrels:
        query, _, document, grade = line.split()
        judged.setdefault(query, {})[document] = int(grade)
    scores = {q: {d: float(s) for d, s in ranking} for q, ranking in run.items()}
    return pytrec_eval.RelevanceEvaluator(judged, MEASURES).evaluate(scores)


def write():
    qrels, run = collection(7)
    expected = evaluate(qrels, run)
    rows = {"qrels": qrels, "run": run, "expected": expected}
    text = json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    with open(FIXTURE, "w", encoding="utf-8") as f:
        f.write(text.replace('},"', '},\n"').replace(']],"', ']],\n"') + "\n")      # one query per line
    print(f"wrote {FIXTURE}: {os.path.getsize(FIXTURE)} bytes")


class TestRetrievalReference(unittest.TestCase):
    def test_fixture(self):
        with open(FIXTURE, encoding="utf-8") as f:
            rows = json.load(f)
        self.assertGreater(len(rows["expected"]), 10)
        self.assertLess(len(rows["expected"]), len(rows["run"]))
        if pytrec_eval is None:
            self.skipTest("SKIPPED: pytrec_eval is not installed: test/fixtures/retrieval.json is not checked")
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
