"""test_retriever.py -- documents.py and retriever.py: from pages to a figure with a tiny BERT, where a section begins
in a document that was moved, and input that is refused by its name and line."""
import glob
import importlib
import itertools
import json
import os
import random
import unittest
from unittest import mock

import interpreter

interpreter.choose("lxml.html, datasketch, numpy, tokenizers, xxhash, matplotlib", "lxml.html, datasketch, numpy, "
                   "tokenizers, xxhash", "numpy, tokenizers, xxhash",
                   also=[os.path.join(interpreter.ROOT, "build", "venv", "bin", "python")])

from folder import BERT_TRAINER, HAS_BERT, ROOT, Folder, called, console, ended, sys        # noqa: E402
sys.path.append(os.path.join(ROOT, "data"))
import documents        # noqa: E402
import retriever        # noqa: E402

MISSING = None
try:
    import numpy as np
    import tokenizers
    for module in "lxml.html", "datasketch", "xxhash":
        importlib.import_module(module)
except ImportError as e:
    MISSING = f"SKIPPED: Python's {e.name} is missing: pip install -r data/requirements.txt"

SYLLABLES = ["ba", "co", "di", "fu", "ge", "ha", "ji", "ko", "lu", "me", "no", "pi", "qua", "ro", "su", "te"]


def page(n):
    """a page of eight sections of 50 words, each fifth page of one, in words of its own"""
    draws = random.Random(n)
    own = ["".join(draws.choices(SYLLABLES, k=3)) for _ in range(60)]
    text = lambda k: " ".join(draws.choices(own, k=k))
    sections = "".join(f"<h2>{i}.1. {text(2)} {n}<a class='headerlink' href='#'>#</a></h2><p>{text(7).capitalize()}. "
                       f"<b>{text(1)}</b>{text(44)}.</p>" for i in range(1 if n % 5 == 4 else 8))
    return (f"<html><head><title>{text(2)}</title><style>x</style></head><body><nav>everywhere</nav><h1>{text(2)}</h1>"
            f"<div class='navheader'>everywhere</div><p>{text(60)}<!-- not this --></p>{sections}<h2>Copyright</h2>"
            f"<p>{text(50)}</p></body></html>")


@unittest.skipIf(MISSING, MISSING)
class TestRetriever(Folder):
    def pages(self, count):
        for n in range(count):
            self.write(f"pages/{n}.html", page(n))
        return self.path("pages")

    def made(self, *given):
        code, _, err = called(documents.main, "--out", self.path("d"), *given)
        self.assertEqual(code, 0, err)
        return {side: [json.loads(line) for line in self.read("d", side + ".jsonl").splitlines()]
                for side in ("train", "test")}, err

    def test_documents(self):
        """sections without furniture; links, repetitions and pages beyond the cap stay out; like pages are together"""
        place = self.pages(40)
        os.symlink(self.path("pages/1.html"), self.path("pages/link.html"))
        self.write("pages/copy.html", page(3).replace("</body>", "<p>one more word</p></body>"))
        for n in range(20, 28):                             # most of another page, and some of its own
            most = page(n)
            self.write(f"pages/like{n}.html", most[:len(most) * 7 // 10] + page(100 + n)[-len(most) * 3 // 10:])
        self.write("pages/short.html", "<p>few words</p>")
        self.write("pages/comment.html", "<!-- nothing -->")
        latin = page(200).replace("<head>", "<head><meta charset=latin1>").replace("</body>", "<p>caf\xe9</p></body>")
        self.write("pages/latin.html", latin.encode("latin1"))
        self.shell("bin/mandoc", "printf '<section class=Sh><h1 class=Sh>NAME</h1>ls - lists</section>'; cat")
        self.write("man/man1/ls.1", "<h1>WHAT <i>IT</i> DOES</h1><p>" + " ".join(f"word{i}" for i in range(50)))
        self.write("man/man1/also.1", ".so man1/ls.1\n")
        for other in "a.7z", "x.nfo", "libz.so.1":
            self.write("man/" + other, page(300) + "\0" * other.startswith("lib"))
        with mock.patch.dict(os.environ, PATH=self.path("bin") + ":" + os.environ["PATH"]):
            sides, err = self.made(place, self.path("man"))
        found = {d["id"]: (d, side) for side, some in sides.items() for d in some}
        self.assertIn("left out: 4 too short, 1 nearly repeated", err)
        self.assertEqual(len(found), 40 + 8 + 2)
        self.assertNotIn("pages/link.html", found)
        for n in range(20, 28):
            self.assertEqual(found[f"pages/{n}.html"][1], found[f"pages/like{n}.html"][1], n)
        ls, _ = found["man/man1/ls.1"]
        self.assertEqual((ls["title"], [s["heading"] for s in ls["sections"]]), ("ls(1)", ["NAME", "WHAT IT DOES"]))
        self.assertEqual(ls["sections"][0]["text"], "ls - lists")
        self.assertIn("caf\xe9", found["pages/latin.html"][0]["sections"][-1]["text"])
        one, _ = found["pages/0.html"]
        self.assertEqual(len(one["sections"]), 10)
        text = json.dumps(one)
        for gone in "everywhere", "not this", "#", "1.1.", "style":
            self.assertNotIn(gone, text)
        self.assertRegex(one["sections"][1]["text"], r"^[A-Z]\w+( \w+){6}\. \w+( \w+){43}\.$")
        self.assertIn(sum(map(len, self.made(place, "--per_package", "30")[0].values())), range(25, 31))
        for given, says in ((self.path("bin"), "bin: expected .html files or man pages, got none"),
                            (self.write("a.md", "# a"), "a.md: expected .html files or man pages, got none"),
                            (self.path("pages/1.html"), "left no document for t")):
            code, _, err = called(documents.main, "--out", self.path("e"), given)
            self.assertEqual((code, says in err, os.path.exists(self.path("e"))), (2, True, False), err)

    def go(self, *more):
        return called(retriever.main, "--documents", self.path("d"), "--small", "--out", self.path("o"), "--trainer",
                      BERT_TRAINER, "--encodings", "learned", "none", "cable:gate=0.2", "stretched", "--tokens", "0",
                      "2500", "7500", "--sections", "10", "--corpus", "20", *more)

    @unittest.skipUnless(HAS_BERT, "make train_bert")
    def test_from_pages_to_a_figure(self):
        """and nothing is measured again, other settings are refused"""
        self.made(self.pages(60))
        own = json.loads(self.read("d/test.jsonl").splitlines()[0])["id"]
        asked = self.write("q.jsonl", 2 * (json.dumps({"question": "where is it", "id": own}) + "\n"))
        code, out, err = self.go("--questions", asked)
        self.assertEqual(code, 0, out + err)
        plan = json.loads(self.read("o/data/plan.json"))
        self.check_places(plan)
        self.check_rows(plan, self.table("o/retriever.csv"))
        place = self.path("o/runs/none-lr1e-4/seed_42/tokens_2500")
        self.check_ranks(plan, place, "none", "vector", 64)
        self.check_ranks(plan, place, "none", "late", 256)
        self.check_ranks(plan, place.replace("none", "learned"), "learned", "chunks", 256)
        losses = {name: [r["loss"] for r in console.read_log(
            self.path(f"o/runs/{name}-lr1e-4/seed_42/distilled"), "train")] for name in ("learned", "none")}
        self.assertLess(max(losses["learned"][:1]), 1e-5)               # it has taught itself
        self.assertTrue(0.01 < losses["none"][-1] < losses["none"][0], losses)
        trained = min(glob.glob(place + "/../step_*"))
        for part in "corpus", "moved":                      # whole, not as the mean of pieces
            code, said = ended(BERT_TRAINER, "--load", trained, "--eval_lengths", "256", "--encode", self.path(
                f"o/data/{part}/text_lines_000000.bin"), "--out", self.path("whole"))
            self.assertEqual(code, 0, said)
            found, want = (retriever.vectors_of(plan, os.path.join(of, "embeddings.safetensors"), part, "vector", 256)
                           for of in (os.path.join(place, part + "_256"), self.path("whole")))
            self.assertLess(np.abs(found[0] - want[0]).max(), 1e-6)
        self.assertLess(min(plan["tokens"]["corpus"]), 250)
        for what in " - itself at 64", ", late - as one vector":
            self.assertIn(f"| cable:gate=0.2 at 256{what} |", self.read("o/retriever.md"))
        self.assertTrue(os.path.exists(self.path("o/retriever.png")) or "no figure" in err)
        files = [self.path("o/scores/bm25---0-words-0.json"), self.path("o/scores/none-1e-4-42-7500-vector-64.json"),
                 os.path.join(place, "queries_64", "embeddings.safetensors")]
        stamps = [os.stat(path).st_mtime_ns for path in files]
        self.assertEqual(self.go("--questions", asked)[0], 0)
        self.assertEqual([os.stat(path).st_mtime_ns for path in files], stamps)
        self.assertEqual((len(plan["questions"]), [q[1] for q in plan["questions"][-2:]]), (32, ["where is it"] * 2))
        place, two = self.path("o/model"), str(round(64 * plan["tokens_of_pairs"]))     # tokens of two updates
        code, _, err = self.go("--out", self.path("other"), "--distill", "10")
        self.assertEqual((code, "--distill 10: expected 0, or at least " in err), (2, True), err)
        self.assertFalse(os.path.exists(self.path("other/data/plan.json")))     # a better --distill is welcome
        for more, says in ((["--seed", "2"], "was begun with other seed: 1, now 2"),
                           (["--model", place], "was begun with other model: made, now "),
                           (["--weight_decay", "1"], "was begun with other flags: {}, now {'weight_decay': '1'}"),
                           (["--tokens", "10"], "--tokens 10: expected 0, or at least "),
                           (["--tokens", two], "was trained further; give that")):
            code, _, err = self.go("--questions", asked, *more)
            self.assertEqual((code, says in err), (2, True), err)

    def check_places(self, plan):
        """the section that answers begins at the token that its row names, without its first sentence or heading"""
        words = tokenizers.Tokenizer.from_file(self.path("o/model/tokenizer.json"))
        moved = iter(self.read("o/data/moved.txt").splitlines())
        sections = {d["id"]: d["sections"] for d in map(json.loads, self.read("d/test.jsonl").splitlines())}
        asked = [(q, n) for kind, q, n in plan["questions"] if kind == "heading"]
        self.assertEqual((len(asked), plan["settings"]["begins"]), (10, [0, 64, 128, 256]))
        for heading, n in asked:
            text = next(s["text"] for s in sections[plan["corpus"][plan["sections"][n]]] if s["heading"] == heading)
            sentence, rest = text.split(". ", 1)
            bags = set()
            for begins in plan["settings"]["begins"]:
                document = next(moved)
                before = words.encode(document[:document.index(rest)], add_special_tokens=False).ids
                self.assertIn(len(before) - begins, range(12))              # up to a word later
                self.assertNotIn(sentence, document)
                self.assertNotIn(heading, document)
                bags.add(tuple(sorted(document.split())))
            self.assertEqual(len(bags), 1)

    def check_rows(self, plan, rows):
        """one for each model, length, kind of question and place"""
        reads = [("learned", "vector", "64"), ("learned", "chunks", "256"),
                 *((pos, *how) for pos in ("none", "cable:gate=0.2", "stretched")
                   for how in (("vector", "64"), ("vector", "256"), ("late", "256")))]
        models = [("bm25", "0", "words", T) for T in ("0", "64", "256")] + [
            (pos, tokens, *how) for tokens in ("0", "2500", "7500") for pos, *how in reads]
        places = [(kind, str(b)) for kind in retriever.OF_SECTION for b in plan["settings"]["begins"]]
        columns = "encoding", "tokens", "reads", "T", "questions", "begins"
        found = {tuple(r[c] for c in columns): float(r["ndcg"]) for r in rows}
        self.assertEqual(sorted(found), sorted((*m, *p) for m in models for p in [*places, ("own", "any")]))
        self.assertEqual(len(rows), len(found))
        for r in rows:
            self.assertEqual((r["distilled"], r["seconds"] == "" or 0 < float(r["seconds"]) < 1), ("5000", True), r)
            self.assertEqual(r["seconds"] == "", r["reads"] == "words")
            if r["reads"] in ("vector", "words"):
                self.assertEqual(r["bytes"], str(4 * 64) * (r["reads"] == "vector"))
        least = {int(r["bytes"]) for r in rows if r["reads"] in ("late", "chunks")}
        self.assertTrue(all(4 * 64 < b <= 4 * 4 * 64 for b in least), least)
        mean = lambda pos, T: np.mean([found[pos, "7500", "vector", T, kind, str(b)] for kind in ("heading", "sentence")
                                       for b in plan["settings"]["begins"]])
        gain = {r["difference"].partition("gain from 64 to 256: cable:gate=0.2 - ")[2]: float(r["ndcg"])
                for r in self.table("o/differences.csv") if (r["begins"], r["tokens"]) == ("all", "7500")}
        self.assertTrue(gain["none"] or gain["stretched"], gain)
        for rival in "none", "stretched":
            self.assertAlmostEqual(gain[rival], mean("cable:gate=0.2", "256") - mean("cable:gate=0.2", "64") -
                                   mean(rival, "256") + mean(rival, "64"), 4)
        bm25 = lambda T, begins: found["bm25", "0", "words", T, "sentence", begins]
        self.assertEqual((bm25("0", "0"), bm25("0", "256")), (1, 1))        # its words are the document's own
        self.assertLess(bm25("64", "256"), 1)                               # they begin beyond what is read

    def check_ranks(self, plan, place, name, reads, T):
        """those of a model's vectors, by other means"""
        def parts(of, size):
            """the vectors of each text"""
            ids, rows, *_ = retriever.retrieve.read_embeddings(
                os.path.join(place, f"{of}{'_chunks' * (size == 'chunks')}_{64 if size == 'chunks' else size}",
                             "embeddings.safetensors"))
            rows = iter(rows / np.linalg.norm(rows, axis=1)[:, None])
            if size == "chunks":
                counts = plan["chunks"][of]
            elif reads == "late" and size == T:
                counts = [len(list(some)) for _, some in itertools.groupby(ids, lambda i: i.partition(":")[0])]
            else:
                counts = [1] * len(ids)
            found = [list(itertools.islice(rows, n)) for n in counts]
            self.assertEqual(list(rows), [])
            self.assertEqual(max(map(len, found)) > 1, size != 64)
            return [some[:T // 64] if reads == "chunks" else some for some in found]
        of = T if reads != "chunks" else "chunks"
        (queries, corpus, moved), found = (parts("queries", 64), parts("corpus", of), parts("moved", of)), json.loads(
            self.read(f"o/scores/{name}-1e-4-42-2500-{reads}-{T}.json"))["ranks"]
        best = lambda q, some: max(float(np.dot(queries[q][0], x)) for x in some)
        for kind in "heading", "own":
            asked = [(q, n) for q, (other, _, n) in enumerate(plan["questions"]) if other == kind]
            for (q, n), ranks in zip(asked, found[kind], strict=True):
                own = plan["sections"][n] if kind == "heading" else n
                answers = moved[4 * n:4 * n + 4] if kind == "heading" else [corpus[n]]
                for answer, rank in zip(answers, ranks, strict=True):
                    scores = [best(q, d) for i, d in enumerate(corpus) if i != own]
                    mine = best(q, answer)
                    self.assertIn(rank - 1, range(sum(s > mine + 1e-6 for s in scores),
                                                  sum(s > mine - 1e-6 for s in scores) + 1))

    def test_headings(self):
        """of any script can be asked for, unless they name nothing"""
        for heading, why in ("\u0441\u0435\u0442\u044c \u0438 \u0434\u0438\u0441\u043a", ""), ("options", "vague"):
            section, once = retriever.Section(heading, 10, 50, 300), {heading.lower(): 1}
            self.assertEqual(retriever.why_not(section, mock.Mock(token=lambda at: at), once, once), why)

    def test_what_is_refused(self):
        self.write("m/tokenizer.json", "{}")
        self.write("m/config.json", '{"model_type": "gpt2"}')
        good = {"id": "a", "title": "t", "sections": [{"heading": "h", "text": "some text"}]}

        def refused(says, *records, model=(), more=()):
            path = self.write("d.jsonl", "".join(json.dumps(r) + "\n" for r in records))
            code, _, err = called(retriever.main, "--documents", path, "--small", "--out", self.path("r"), *model,
                                  *more)
            self.assertEqual((code, err.count("\n")), (2, 1 + ("finding" in err)), err)
            self.assertIn(says, err)
        refused("d.jsonl: line 2: id: expected a text, got none", good,
                {key: good[key] for key in ("title", "sections")})
        refused("d.jsonl: line 2: document b is empty: expected a section with text", good,
                {**good, "id": "b", "sections": [{"heading": "h", "text": " "}]})
        refused("d.jsonl: line 2: id: expected one of its own, got a again", good, good)
        refused("d.jsonl: line 1: sections: expected a list of sections", {**good, "sections": ["text"]})
        refused("expected model_type bert in config.json, got \"gpt2\"", good, model=("--model", self.path("m")))
        self.write("n/tokenizer.json", "{}")
        self.write("n/config.json", '{"model_type": "bert"}')
        refused("n/model.safetensors: ", good, model=("--model", self.path("n")))
        self.assertEqual(self.read("n/config.json"), '{"model_type": "bert"}')
        refused("n: expected a regular file", good, more=("--documents", self.path("n"), self.path("d.jsonl")))
        refused("--pos: expected --encodings, --model, --tokens or --lengths", good, more=("--pos", "rope"))
        own = self.write("q.jsonl", json.dumps({"question": "what now", "id": "z"}) + "\n")
        refused("q.jsonl: line 1: question 'what now' has no answer: no document of the test has the id z", good,
                more=("--questions", own))
        share, retriever.share = retriever.share, lambda *_: 0      # a document of the test
        self.addCleanup(setattr, retriever, "share", share)
        self.write("q.jsonl", json.dumps({"question": " ", "id": "a"}) + "\n")
        refused("q.jsonl: line 1: question: expected a text, got an empty one", good, more=("--questions", own))
        refused("got 0 sections to ask for and 0 pairs to train on", good)


if __name__ == "__main__":
    unittest.main()
