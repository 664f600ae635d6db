#!/usr/bin/env python3
"""retriever.py -- does a sentence embedder read past the length that it was made for? Gives it other positional
encodings, trains them towards its own embeddings and then on your documents, and asks for text that begins at token 0,
512, 1,024, 2,048.

    data/documents.py --out data/documents /usr/share/doc/git-doc /usr/share/man/man1
    scripts/retriever.py --documents data/documents --model all-MiniLM-L6-v2 --encodings learned none cable:gate=0.2 \\
        --tokens 0 300000 1000000 --out run/retriever

--documents   a directory of data/documents.py, or .jsonl files of {"id", "title", "sections": [{"heading", "text"}]}
--encodings   what train_bert's --pos takes; `learned` is cut at the first of --lengths, and also reads chunks of that
              length, whose largest score counts; `stretched` is learned with its table repeated up to the longest
              all others that read a multiple of it are also scored `late`: by the largest score of the pieces of that
              length, which one forward pass embeds
--questions   your own, lines {"question", "id"} of the document that answers; asked of the documents as they are
--small       documents of 300 tokens, and a tiny BERT where there is no --model: to see whether all of it works

A question is a section's heading, or its first sentence, which is taken out of the text; no text has headings. The
document that answers is moved cyclically until the section begins at each of --begins: the same words, only the place
differs. Where it begins beyond what is read, only the rest of the document can be found. NAME lines of man pages are a
control, and titles show what a title alone would find.

The same command continues, and other --encodings, --seeds, --tokens and --lengths add to it: what has a file in
OUT/scores is not measured again. OUT/data/plan.json has what was asked before anything was measured; OUT/retriever.csv,
.md, .png and OUT/differences.csv are written from all of OUT/scores.
"""
import bisect
import collections
import functools
import glob
import itertools
import json
import math
import os
import random
import re
import shutil
import sys

import console
import ledger
import retrieve
import runqueue
from console import TEXT, BadInput, flat, list_of, need, say, share
from runqueue import Command, Job

KEY = "encoding", "lr", "seed", "tokens", "reads", "T"
# the trainer's flags that are set here
OURS = {"pos", "load", "pairs", "encode", "encode_piece", "eval_lengths", "out", "steps", "total_batch", "resume",
        "allow_change", "keep", "checkpoint_every"}
OF_SECTION = "heading", "sentence", "title"
SPAN = 40, 400                          # tokens of a section that has a question
GROUPS, PAIRS = 32, 6                   # of an update; sections of a document
# not part of a document's text
APART = {"name", "synopsis", "see also", "author", "authors", "copyright", "reporting bugs", "license", "keywords",
         "copyright and license", "colophon", "maintainers", "credits", "acknowledgements", "history", "availability"}
# headings of these words, or their plurals, name nothing
VAGUE = {word.rstrip("s") for word in """
a additional advanced and api application argument attribute basic bug c caveat change class classes code command
common compatibility configuration constructor control core data default deprecated description detail environment
error example exception exit extension feature field file flag for format function general generic global
implementation improvement information input interface internal invocation issue kernel library limitation line
message method miscellaneous mode module name new note object of operation option optional other output parameter
performance platform portability problem report return security simple source special specific standard status summary
support supported syntax system table the to type usage user using value variable warning""".split()}
SENTENCE = re.compile(r"\S+(?: \S+){3,39}?[.!?][\"')\]]*(?= )")

Section = collections.namedtuple("Section", "heading sentence begin end")   # end of its first sentence; characters
Document = collections.namedtuple("Document", "id title name text sections")


# ----------------------------------------------------------------------------------------------------------
# documents and questions

def read_lines(path, columns):
    """the objects of a .jsonl, which must have these columns, with their lines"""
    for n, line in enumerate(retrieve.lines_of(path), 1):
        where = f"{path}: line {n}"
        yield console.fields(console.parse_object(line.encode(), where), columns, {}, where), where


def read_documents(paths):
    found = {}
    for path in paths:
        for record, where in read_lines(path, {"id": TEXT, "title": TEXT, "sections": list_of("sections", (
                "", lambda s: isinstance(s, dict) and all(TEXT[1](s.get(key)) for key in ("heading", "text"))))}):
            text, sections, names = "", [], ""
            for heading, words in [(flat(s["heading"]), flat(s["text"])) for s in record["sections"]]:
                if heading.lower() == "name":
                    names = words.partition(" - ")[2]
                if heading.lower() in APART or not words:
                    continue
                text += " " * bool(text)
                first = SENTENCE.match(words)
                sections.append(Section(heading, first.end() if first else 0, len(text), len(text) + len(words)))
                text += words
            if not any(s["text"].strip() for s in record["sections"]):
                raise BadInput(f"{where}: document {record['id'][:80]} is empty: expected a section with text")
            if record["id"] in found:
                raise BadInput(f"{where}: id: expected one of its own, got {record['id'][:80]} again")
            found[record["id"]] = Document(record["id"], flat(record["title"]), names, text, sections)
    return [d for d in found.values() if d.text]


def read_own(path, numbers):
    """(question, number of the document that answers) of --questions"""
    for record, where in read_lines(path, {"question": TEXT, "id": TEXT}):
        if record["id"] not in numbers:
            raise BadInput(f"{where}: question '{record['question'][:60]}' has no answer: no document of the test has "
                           f"the id {record['id'][:80]}")
        if not (question := flat(record["question"])):
            raise BadInput(f"{where}: question: expected a text, got an empty one")
        yield question, numbers[record["id"]]


class Text:
    """Where the tokens of a text are, and cuts of it between words. most: of its first words, as many at least as it
    has tokens."""

    def __init__(self, tokenizer, text, most=None):
        self.text = " ".join(text.split(" ", most)[:most]) if most else text
        self.encode = lambda: tokenizer.encode(self.text, add_special_tokens=False)

    @functools.cached_property
    def words(self):
        encoded = self.encode()
        self.begins = [begin for begin, _ in encoded.offsets]
        return encoded.word_ids

    def __len__(self):
        return len(self.words)

    def token(self, character):
        return bisect.bisect_left(self.begins, character) if self.words else 0

    def whole(self, token):
        """the first token of its word"""
        return bisect.bisect_left(self.words, self.words[token], 0, token)

    def character(self, token):
        """where the word of a token begins"""
        return self.begins[self.whole(token)] if token < len(self) else len(self.text)

    def rotated(self, at, begin):
        """moved cyclically so that the character `at` begins at this token, or up to a word later"""
        cut = self.character((self.token(at) - begin) % len(self))
        return (self.text[cut:] + " " + self.text[:cut]).strip()

    def chunks(self, size, most):
        """of at most `size` tokens, of the first `most`"""
        found, at = [], 0
        while at < min(len(self), most):
            end = len(self) if at + size >= len(self) else max(self.whole(at + size), at + 1)
            found.append(self.text[self.character(at):self.character(end)].strip())
            at = end
        return found


def size_of(section, where):
    """its tokens without the first sentence"""
    return where.token(section.end) - where.token(section.begin + section.sentence)


def why_not(section, where, common, here):
    """why a section has no question; here: the document's headings, each with its number"""
    heading = section.heading.lower()
    words = re.findall(r"[\w-]+", heading)
    if all(word.rstrip("s") in VAGUE for word in words):
        return "vague"
    if len("".join(words)) < 4:
        return "short"
    if common[heading] > 3:
        return "in more than 3 documents"
    if section.begin == 0 or here[heading] > 1:
        return "first, or twice in the document"
    if not section.sentence:
        return "no first sentence"
    size = size_of(section, where)
    return "too little text" * (size < SPAN[0]) or "too much text" * (size > SPAN[1])


def candidates(document, where, common, left_out):
    """the sections of a document that can be trained on, with their sizes; those in SPAN can have a question, too"""
    here = collections.Counter(s.heading.lower() for s in document.sections)
    for section in document.sections:
        why = why_not(section, where, common, here)
        left_out[why][section.heading] += 1
        if why in ("", "too much text"):
            yield section, size_of(section, where)


def pairs_of(document, where, common, left_out, args):
    """lines QUERY tab PASSAGE to train on; the passage holds the section somewhere"""
    text, room = document.text, args.T - 2
    found = sorted(candidates(document, where, common, left_out), key=lambda s: share(args.seed, document.id, s[0]))
    for section, size in found[:PAIRS]:
        draw = share("passage", args.seed, document.id, section)
        taken = text[section.begin:section.begin + section.sentence]
        first = where.token(section.begin)
        begin = where.character(max(0, first - int(draw * max(0, room - size + 1))))
        after = section.begin + section.sentence
        left = room - (first - where.token(begin))
        end = where.character(min(len(where), where.token(after) + left))
        for query in section.heading, taken:
            yield f"{query}\t{flat(text[begin:section.begin] + text[after:end])}"


def tokenizer_of(args):
    tokenizer = need("tokenizers").Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True                      # "[MASK]" of a text is text, as in shards
    return tokenizer


def sides_of(args):
    """the paths of the documents, and the documents to train on and to test with"""
    folder, paths = args.documents[0], args.documents
    if len(paths) == 1 and os.path.isdir(folder):
        paths = [os.path.join(folder, side + ".jsonl") for side in ("train", "test")]
        return paths, [read_documents([path]) for path in paths]
    every = read_documents(paths)
    return paths, [[d for d in every if (share(d.id) < 0.3) == is_test] for is_test in (False, True)]


def sections_of(test, tokenizer, common, left_out, args):
    """the sections that have questions, at first one of each document: (document, section)"""
    found = []
    for d in test:
        where = Text(tokenizer, d.text)
        fits = [s for s, size in candidates(d, where, common, left_out) if size <= SPAN[1] and
                len(where) - where.token(s.begin + s.sentence) + where.token(s.begin) > args.begins[-1] + size]
        fits.sort(key=lambda s: share(args.seed, d.id, s))
        found += [(n, share(args.seed, d.id), d, s) for n, s in enumerate(fits)]
    return [(d, s) for *_, d, s in sorted(found, key=lambda f: f[:2])[:args.sections]]


def plan_of(args, path, settings):
    """what an earlier call has written, if it had these settings"""
    plan = console.read_object(path)
    if "tokens_of_texts" not in plan:
        raise BadInput(f"--out {args.out} was begun by an earlier version: give another --out")
    for key, value in settings.items():
        if (was := plan["settings"].get(key)) != value:
            raise BadInput(f"--out {args.out} was begun with other {key}: {str(was)[:60]}, now {str(value)[:60]}; "
                           "give that, or another --out")
    return plan


def prepare(args):
    """Writes OUT/data: what is asked and trained on, as plan.json and shards. Returns the plan."""
    paths, (train, test) = sides_of(args)
    args.model = args.model or small_tokenizer(args, train + test)
    settings = {"documents": [console.sha256_of(path) for path in paths], "cut": args.lengths[0],
                "questions": args.questions and console.sha256_of(args.questions), "longest": args.longest,
                "tokenizer": console.sha256_of(os.path.join(args.model, "tokenizer.json")),
                "model": "made" if args.made else console.sha256_of(os.path.join(args.model, "model.safetensors")),
                "flags": {key: value for key, value in args.flags.items() if key not in runqueue.FREE},
                **{key: getattr(args, key) for key in ("begins", "T", "sections", "corpus", "names", "seed",
                                                       "distill")}}
    if os.path.exists(path := os.path.join(args.out, "data", "plan.json")):
        return plan_of(args, path, settings)
    # 1 what is trained on, and what is asked
    say("finding questions and pairs in the documents")
    tokenizer, left_out = tokenizer_of(args), collections.defaultdict(collections.Counter)
    common = collections.Counter(h for d in train + test for h in {s.heading.lower() for s in d.sections})
    pairs = [line for d in train for line in pairs_of(d, Text(tokenizer, d.text), common, left_out, args)]
    random.Random(args.seed).shuffle(pairs)
    asked = sections_of(test, tokenizer, common, left_out, args)
    own = list(read_own(args.questions, {d.id: d for d in test})) if args.questions else []
    if not (asked or own) or len(pairs) < GROUPS:
        raise BadInput(f"{' '.join(args.documents)}: got {len(asked)} sections to ask for and {len(pairs)} pairs to "
                       f"train on; expected at least one and {GROUPS}: documents longer than "
                       f"{args.begins[-1] + SPAN[0]} tokens with headings that name something, or shorter --lengths")
    # 2 the collection: the documents of the questions and of --questions, and more
    first = {d.id: d for d in [d for d, _ in asked] + [d for _, d in own]}
    rest = sorted((d for d in test if d.id not in first), key=lambda d: share("corpus", args.seed, d.id))
    corpus = [*first.values(), *rest][:max(args.corpus, len(first))]
    number = {d.id: n for n, d in enumerate(corpus)}
    # 3 the questions: kind, text, and the number of the section, or else of the document that answers
    questions = [(kind, text, n) for n, (d, s) in enumerate(asked) for kind, text in (
        ("heading", s.heading), ("sentence", d.text[s.begin:s.begin + s.sentence]), ("title", d.title or "?"))]
    questions += [("name", d.name, number[d.id]) for d in corpus if len(d.name.split()) > 2][:args.names] + [
        ("own", q, number[d.id]) for q, d in own]
    without = [Text(tokenizer, d.text[:s.begin] + d.text[s.begin + s.sentence:].lstrip()) for d, s in asked]
    texts = {"corpus": [d.text for d in corpus],
             "moved": [where.rotated(s.begin, b) for (_, s), where in zip(asked, without) for b in args.begins]}
    counts, tokens = {}, {}         # 4 the files
    shards(args, "pairs", pairs, args.T)
    shards(args, "texts", passages := list(dict.fromkeys("\t".join(pairs).split("\t"))), args.T)
    shards(args, "queries", [q for _, q, _ in questions], args.lengths[0])
    for name, some in texts.items():
        shards(args, name, some, args.longest)
        wheres = [Text(tokenizer, text, args.longest) for text in some]
        chunks = [where.chunks(args.lengths[0] - 2, args.longest) for where in wheres]
        shards(args, name + "_chunks", sum(chunks, []), args.lengths[0])
        counts[name], tokens[name] = list(map(len, chunks)), [min(len(w) + 2, args.longest) for w in wheres]
    size = lambda some: sum(len(e.ids) for e in tokenizer.encode_batch(some)) / len(some) + 2
    plan = {"settings": settings, "pairs": len(pairs), "tokens_of_texts": size(passages[:2000]),
            "tokens_of_pairs": size([pair.replace("\t", " ") for pair in pairs[:2000]]),
            "questions": questions, "sections": [number[d.id] for d, _ in asked], "corpus": [d.id for d in corpus],
            "chunks": counts, "tokens": tokens, "test": [d.id for d in test],
            "left_out": {why: sorted(found) for why, found in left_out.items() if why}}
    if args.distill:
        updates("distill", args.distill, plan["tokens_of_texts"])
    console.write_whole(path, json.dumps(plan, indent=1) + "\n")
    say(f"{len(pairs):,} pairs of {plan['tokens_of_pairs']:.0f} tokens to train on; {len(asked)} sections of "
        f"{len({d.id for d, _ in asked})} documents and {len(questions)} questions, asked of {len(corpus)} documents")
    return plan


def shards(args, name, lines, most):
    """Writes the texts, and a shard of their first `most` tokens."""
    place = os.path.join(args.out, "data", name)
    os.makedirs(place, exist_ok=True)
    console.write_whole(path := place + ".txt", "".join(line + "\n" for line in lines or ["none"]))
    console.output_of([sys.executable, os.path.join(console.ROOT, "data", "text.py"), "--out", place, "--pairs",
                       "lines", "--encoding", "bert", "--tokenizer", args.model, "--max_tokens", str(most),
                       "--workers", "1", path])


def shard(args, name):
    return os.path.join(args.out, "data", name, "text_lines_000000.bin")


# ----------------------------------------------------------------------------------------------------------
# models

def small_tokenizer(args, documents):
    """the directory of a model to come, with a vocabulary of these documents"""
    place = os.path.join(args.out, "model")
    if not os.path.exists(path := os.path.join(place, "tokenizer.json")):
        os.makedirs(place, exist_ok=True)
        words = need("tokenizers").BertWordPieceTokenizer()
        words.train_from_iterator([d.text for d in documents], vocab_size=1000, show_progress=False)
        words.save(path)
    return place


def small_model(args):
    """a tiny BERT, hardly trained, with learned positions for the first of --lengths"""
    run, T = os.path.join(args.model, "run"), args.lengths[0]
    flags = {"model": "2,4,64", "pos": "learned", "T": str(T), "B": "8", "total_batch": str(8 * T), "steps": "20",
             "lr": "1e-3", "pairs": shard(args, "pairs"), "tokenizer": args.model, "checkpoint_every": "20", "out": run}
    console.output_of(runqueue.arguments(Command("", args.trainer, flags, run, "", 0)))
    made = os.path.join(run, "step_00000020")
    config = console.read_object(os.path.join(made, "config.json"))
    foreign = {key: value for key, value in config.items() if key not in ("position", "pooling")}   # as others write it
    console.write_whole(os.path.join(args.model, "config.json"), json.dumps(foreign) + "\n")
    shutil.copy(os.path.join(made, "model.safetensors"), args.model)


def stretched(args):
    """the model with its table of positions repeated up to the longest length"""
    np, place, T = need("numpy"), os.path.join(args.out, "stretched"), args.longest
    if os.path.exists(os.path.join(place, "model.safetensors")):
        return place
    os.makedirs(place, exist_ok=True)
    with console.open_regular(path := os.path.join(args.model, "model.safetensors")) as f:
        header, blocks, at = {}, [], 0
        for name, (dtype, shape, begin, end) in console.read_tensors(f, path).items():
            f.seek(begin)
            data = f.read(end - begin)
            if name.endswith("position_embeddings.weight"):
                rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
                data, shape = rows[np.arange(T) % shape[0]].tobytes(), [T, shape[1]]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
            blocks.append(data)
    head = json.dumps(header).encode()
    config = {**console.read_object(os.path.join(args.model, "config.json")), "max_position_embeddings": T}
    console.write_whole(os.path.join(place, "config.json"), json.dumps(config) + "\n")
    shutil.copy(os.path.join(args.model, "tokenizer.json"), place)
    console.write_whole(os.path.join(place, "model.safetensors"), [len(head).to_bytes(8, "little"), head, *blocks])
    return place


def slug(name):
    return re.sub(r"[^\w.=+-]", "-", name)


def updates(name, tokens, each):
    """the number of updates in these tokens; each: of a text"""
    if not (steps := round(tokens / GROUPS / each)):
        raise BadInput(f"--{name} {tokens}: expected 0, or at least {GROUPS * each:.0f}, an update")
    return steps


def training(args, plan, data, load, tokens, run, flops):
    """the command that trains on `pairs` or `texts`, and the checkpoint that it leaves"""
    name = "tokens" if data == "pairs" else "distill"
    steps = updates(name, tokens, plan["tokens_of_" + data])
    last = os.path.join(run, f"step_{steps:08d}")
    if max(glob.glob(os.path.join(glob.escape(run), "step_*")), default="") > last and not os.path.exists(last):
        raise BadInput(f"--{name} {tokens}: {run} was trained further; give that as well, and another --out")
    flags = {**load, "pairs": shard(args, data), "T": str(args.T), "B": str(GROUPS), "lr": args.lr, "warmup": "5",
             "total_batch": str(GROUPS * args.T), "schedule": "constant", "steps": str(steps),
             "checkpoint_every": str(steps), "resume": "1", "allow_change": "steps", "out": run, **args.flags}
    if name == "distill":
        flags["distill"] = os.path.join(args.out, "teacher")
        flags.pop("tau", None)
    marker = os.path.join(run, f"train{tokens}.done")
    return Command("train" if data == "pairs" else "distill", args.trainer, flags, run, marker,
                   6 * tokens * flops), last


def jobs_of(args, plan):
    """a job for each seed and encoding, with the embeddings at each length after each of --tokens; and all that there
    are to score: (KEY, their directory)"""
    config = console.read_object(os.path.join(args.model, "config.json"))
    flops = lambda T: runqueue.forward_flops(config["num_hidden_layers"], config["hidden_size"], T, 0, False)
    cut, jobs, models = args.lengths[0], [], []
    teacher, texts = os.path.join(args.out, "teacher"), shard(args, "texts")
    teaching = Command("embed texts", args.trainer, {
        "load": args.model, "encode": texts, "eval_lengths": str(args.T), "out": teacher, **args.flags}, teacher,
        os.path.join(teacher, "embeddings.safetensors"), os.path.getsize(texts) * flops(args.T))
    mean = args.flags.get("pooling", config.get("pooling", "mean")) == "mean"       # which a piece needs
    for seed, name in itertools.product(args.seeds, args.encodings):
        run, commands = os.path.join(args.out, "runs", slug(f"{name}-lr{args.lr}"), f"seed_{seed}"), []
        start = {"load": stretched(args) if name == "stretched" else args.model, "seed": str(seed),
                 "pos": "learned" if name == "stretched" else name}
        if args.distill:
            command, last = training(args, plan, "texts", start, args.distill, os.path.join(run, "distilled"),
                                     flops(args.T))
            commands += [teaching, command]
            start = {"load": last, "seed": str(seed)}
        for tokens in args.tokens:
            load = start
            if tokens:
                command, last = training(args, plan, "pairs", start, tokens, run, flops(args.T))
                commands.append(command)
                load = {"load": last}
            where = os.path.join(run, f"tokens_{tokens}")
            for T in args.lengths:
                chunks = name == "learned" and T > cut          # it has no positions there
                pieces = mean and not chunks and T > cut and T % cut == 0
                for part, kind, most in (("queries", "", cut), *((part, "_chunks" * chunks, cut if chunks else T)
                                                                 for part in ("corpus", "moved"))):
                    place, data = os.path.join(where, f"{part}{kind}_{most}"), shard(args, part + kind)
                    flags = {**load, "encode": data, "eval_lengths": str(most), "out": place, **args.flags}
                    flags.update({"encode_piece": str(cut)} if pieces and part != "queries" else {})
                    commands.append(Command(f"embed {part} at {most}", args.trainer, flags, place, os.path.join(
                        place, "embeddings.safetensors"), os.path.getsize(data) * flops(most)))
                ways = ["chunks"] if chunks else ["vector", "late"][:1 + pieces]
                models += [((name, args.lr, seed, tokens, reads, T), where) for reads in ways]
        jobs.append(Job(f"{name}, seed {seed}", "", commands))
    return jobs, models


# ----------------------------------------------------------------------------------------------------------
# scores

def ranks_of(plan, score, moved):
    """{kind: [ranks of the document that answers, for each place where the section begins]}; score(q) -> the scores
    (documents) of question q, moved(q, n) -> those of section n at each place. Equal scores rank before the answer."""
    np, found = need("numpy"), {}
    for q, (kind, _, n) in enumerate(plan["questions"]):
        scores = score(q)
        answer = plan["sections"][n] if kind in OF_SECTION else n
        own = moved(q, n) if kind in OF_SECTION else [scores[n]]
        others = np.delete(scores, answer)
        found.setdefault(kind, []).append([1 + int((others >= s).sum()) for s in own])
    return found


def vectors_of(plan, path, part, reads, T):
    """the unit vectors of a file; the first vector of each text, and which vectors begin beyond token T; None, None
    where each text has one vector"""
    np, cut = need("numpy"), plan["settings"]["cut"]
    ids, found, *_ = retrieve.read_embeddings(path)
    if part == "queries" or reads == "vector" and len(ids) == len(plan["tokens"][part]):
        return retrieve.unit_rows(found, ids), None, None
    tokens = np.minimum(plan["tokens"][part], T)
    counts = np.array(plan["chunks"][part]) if reads == "chunks" else -(-tokens // cut)
    if counts.sum() != len(ids):
        raise BadInput(f"{path}: expected {counts.sum()} vectors of parts, got {len(ids)}; remove the directory")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    at = np.arange(len(ids)) - np.repeat(starts, counts)
    if reads == "vector":                                   # the mean of its pieces by their tokens
        own = np.minimum(np.repeat(tokens, counts) - at * cut, cut)
        mean = np.add.reduceat(found * own[:, None].astype("f8"), starts) / tokens[:, None]
        return retrieve.unit_rows(mean.astype("f4"), [ids[at] for at in starts]), None, None
    return retrieve.unit_rows(found, ids), starts, at >= -(-T // cut)


def of_embeddings(plan, key, where):
    """the ranks by the embeddings in a directory, and what embedding the collection cost; None if one is missing"""
    np, (*_, reads, T), cut = need("numpy"), key, plan["settings"]["cut"]
    kind, rows = f"_chunks_{cut}" if reads == "chunks" else f"_{T}", {}
    for part, name in (("queries", f"_{cut}"), ("corpus", kind), ("moved", kind)):
        path = os.path.join(where, part + name, "embeddings.safetensors")
        if not os.path.exists(path):
            return None                                                 # its command failed
        rows[part] = vectors_of(plan, path, part, reads, T)

    def scores(q, part):
        vectors, starts, late = rows[part]
        found = (vectors @ rows["queries"][0][q]).astype("f4")
        if starts is None:
            return found
        found[late] = -np.inf
        return np.maximum.reduceat(found, starts)
    places, (vectors, _, late) = len(plan["settings"]["begins"]), rows["corpus"]
    read = len(vectors) if late is None else int((~late).sum())
    seconds = os.path.join(where, "corpus" + kind, "seconds")
    cost = {"seconds": round(float(console.read_bytes(seconds)) / len(plan["corpus"]), 5) if os.path.exists(seconds)
            else "",
            "bytes": 4 * read * vectors.shape[1] // len(plan["corpus"])}
    return ranks_of(plan, lambda q: scores(q, "corpus"),
                    lambda q, n: scores(q, "moved")[n * places:(n + 1) * places]), cost


def of_words(args, plan, T):
    """the ranks by BM25 (k1 1.2, b 0.75) of the first T tokens, 0: of all; and no cost"""
    np, tokenizer = need("numpy"), tokenizer_of(args)
    words = lambda text: collections.Counter(re.findall(r"\w+", text.lower()))
    texts = {name: [words(text[:Text(tokenizer, text, T).character(T - 2)] if T else text) for text in
                    retrieve.lines_of(os.path.join(args.out, "data", name + ".txt"))] for name in ("corpus", "moved")}
    corpus = texts["corpus"]
    mean = sum(c.total() for c in corpus) / len(corpus)
    frequency = collections.Counter(word for c in corpus for word in c)
    weight = {word: 2.2 * math.log(1 + (len(corpus) - n + 0.5) / (n + 0.5)) for word, n in frequency.items()}
    gains = {name: [(c, 1.2 * (0.25 + 0.75 * c.total() / mean)) for c in some] for name, some in texts.items()}
    places, queries = len(plan["settings"]["begins"]), [words(q) for _, q, _ in plan["questions"]]

    def score(query, some):
        asked = query.keys() & weight.keys()
        return np.array([sum(weight[w] * c[w] / (c[w] + norm) for w in sorted(asked & c.keys())) for c, norm in some])
    return ranks_of(plan, lambda q: score(queries[q], gains["corpus"]),
                    lambda q, n: score(queries[q], gains["moved"][n * places:(n + 1) * places])), {}


def interval(values, documents):
    """(mean, low, high): 95 % by the bootstrap over documents"""
    np = need("numpy")
    _, at = np.unique(documents, return_inverse=True)
    sums, counts = np.bincount(at, values), np.bincount(at)
    draws = np.random.default_rng(1).multinomial(len(sums), np.ones(len(sums)) / len(sums), 2000)
    low, high = np.percentile(draws @ sums / (draws @ counts), (2.5, 97.5))
    return round(float(np.mean(values)), 5), round(float(low), 5), round(float(high), 5)


GAIN = {"ndcg": lambda rank: 1 / math.log2(1 + rank) * (rank <= 10), "recall": lambda rank: float(rank <= 10)}


def documents_of(plan, kind):
    """the document of each question of a kind"""
    return [plan["sections"][n] if kind in OF_SECTION else n for other, _, n in plan["questions"] if other == kind]


def score(args, plan, key, found):
    """Writes OUT/scores/KEY.json, unless it is there: the rows of the CSV, and the ranks that they are made of."""
    path = os.path.join(args.out, "scores", slug("-".join(map(str, key))) + ".json")
    if os.path.exists(path) or not (found := found()):
        return
    (ranks, cost), rows = found, []
    for kind, found in ranks.items():
        for place, begins in enumerate(plan["settings"]["begins"] if len(found[0]) > 1 else ["any"]):
            cells = {}
            for measure, gain in GAIN.items():
                mean, low, high = interval([gain(r[place]) for r in found], documents_of(plan, kind))
                cells.update({measure: mean, measure + "_low": low, measure + "_high": high})
            rows.append({**dict(zip(KEY, key)), "distilled": args.distill, "questions": kind, "begins": begins,
                         "n": len(found), **cells, "documents": len(plan["corpus"]), "seconds": cost.get("seconds", ""),
                         "bytes": cost.get("bytes", ""), "commit": ledger.commit()})
    os.makedirs(os.path.dirname(path), exist_ok=True)
    console.write_whole(path, json.dumps({"key": key, "rows": rows, "ranks": ranks}) + "\n")


def write_differences(args, plan, scores):
    """paired differences of nDCG@10 over headings and sentences, with intervals over documents; seeds are averaged"""
    np, by = need("numpy"), collections.defaultdict(list)
    kinds = [kind for kind in ("heading", "sentence") if kind in {q[0] for q in plan["questions"]}]
    for s in scores:
        gains = [[GAIN["ndcg"](r) for r in ranks] for kind in kinds for ranks in s["ranks"][kind]]
        by[(*s["key"][:2], *s["key"][3:])].append(np.array(gains))
    mean = {key: sum(found) / len(found) for key, found in by.items()}
    documents = [d for kind in kinds for d in documents_of(plan, kind)]
    short, long, rows = args.lengths[0], args.lengths[-1], []

    def add(what, tokens, lr, d):
        for place, begins in [(slice(None), "all"), *enumerate(args.begins)]:
            found = interval(d[:, place].reshape(len(d), -1).mean(axis=1), documents)
            rows.append({"difference": what, "lr": lr, "tokens": tokens, "begins": begins,
                         **dict(zip(("ndcg", "low", "high"), found))})
    for (name, lr, tokens, reads, T), gains in sorted(mean.items()) if kinds else ():
        if reads not in ("vector", "late") or T != long or long == short:
            continue
        vector = lambda of, T: mean.get((of, lr, tokens, "vector", T))
        own, whole = vector(name, short), reads == "vector"
        for what, other in ((f"itself at {short}", own), (f"learned, cut at {short}", vector("learned", short)),
                            (f"learned, chunks up to {long}", mean.get(("learned", lr, tokens, "chunks", long))),
                            ("as one vector", None if whole else vector(name, long))):
            if other is not None:
                add(f"{name} at {long}{'' if whole else ', late'} - {what}", tokens, lr, gains - other)
        for (rival, *same), theirs in mean.items() if name.startswith("cable") and whole and own is not None else ():
            shorter = vector(rival, short)
            if same == [lr, tokens, "vector", long] and rival != name and shorter is not None:
                add(f"gain from {short} to {long}: {name} - {rival}", tokens, lr, gains - own - (theirs - shorter))
    if rows:
        ledger.write(os.path.join(args.out, "differences.csv"), rows, "nDCG@10 of headings and first sentences, paired")
    return rows


def write_results(args, plan):
    """OUT/retriever.csv, .md and .png, and OUT/differences.csv, from OUT/scores"""
    paths = sorted(glob.glob(os.path.join(glob.escape(args.out), "scores", "*.json")))
    scores, path = list(map(console.read_object, paths)), os.path.join(args.out, "retriever.csv")
    rows = [row for s in scores for row in s["rows"]]
    ledger.write(path, rows, "recall@10 and nDCG@10 with 95 % by the bootstrap over documents; begins: the token at "
                 "which the section that answers begins; distilled, tokens: of the trainings; T: tokens that are read, "
                 "0 all; seconds of a processor to embed a document, bytes of its vectors")
    cells = collections.defaultdict(dict)
    for r in rows:
        cells[r["questions"], r["tokens"], r["encoding"], r["reads"], r["T"], r["lr"]].setdefault(
            r["begins"], []).append((r["ndcg"], r["recall"]))
    mean = lambda some, i: sum(pair[i] for pair in some) / len(some)
    lines = []
    for kind in dict.fromkeys(r["questions"] for r in rows):
        wanted = ["any"] if kind in ("name", "own") else args.begins
        head = ["tokens trained", "encoding", "reads", "T", *(f"from {b}" for b in wanted), "seeds"]
        cell = lambda of: f"{100 * mean(of, 0):.1f} / {100 * mean(of, 1):.1f}" if of else ""
        found = [[str(key[1]), *key[2:4], str(key[4] or "all"), *(cell(of.get(b)) for b in wanted),
                  str(max(map(len, of.values())))] for key, of in cells.items() if key[0] == kind]
        lines += [f"{kind}: nDCG@10 / recall@10 in %", "", *console.table(head, found), ""]
    differences = [[r["difference"], str(r["tokens"]), str(r["begins"]),
                    f"{100 * r['ndcg']:+.1f} [{100 * r['low']:+.1f}, {100 * r['high']:+.1f}]"]
                   for r in write_differences(args, plan, scores)]
    if differences:
        lines += ["Differences of nDCG@10 in points", "",
                  *console.table(["difference", "tokens trained", "begins", "95 % over documents"], differences)]
    console.write_whole(os.path.join(args.out, "retriever.md"), "\n".join(lines).rstrip() + "\n")
    say(f"wrote {path}, {os.path.join(args.out, 'retriever.md')}")
    try:
        draw(args, cells, mean)
    except BadInput as e:
        say(f"retriever.py: no figure: {e}")


def draw(args, cells, mean):
    import plot
    kinds = [kind for kind in ("heading", "sentence") if any(key[0] == kind for key in cells)]
    if not kinds:
        return
    tokens = max(key[1] for key in cells)
    fig, panels = plot.figure(5.0 * len(kinds) + 2, 4.5, ncols=len(kinds), squeeze=False, sharey=True)
    shown = {key[2:]: None for key in cells if key[0] in kinds and (key[1] == tokens or key[2] == "bm25")}
    for ax, kind in zip(panels[0], kinds):
        ends = []
        for encoding, reads, T, lr in shown:
            of = cells.get((kind, tokens, encoding, reads, T, lr)) or cells.get((kind, 0, encoding, reads, T, lr), {})
            colour, marker = plot.style(encoding) if encoding != "bm25" else ("#777777", "x")
            dash = "-." if reads == "late" else {args.lengths[-1]: "-", args.lengths[0]: ":"}.get(T, "--")
            label = f"{encoding}, {T or 'all'}" + f", {reads}" * (reads in ("chunks", "late"))
            if not (values := [100 * mean(of[b], 0) for b in args.begins if b in of]):
                continue
            line, = ax.plot([b for b in args.begins if b in of], values, dash, color=colour, marker=marker, label=label)
            ends.append((values[-1], line))
        ax.set_xlabel(f"token at which the section begins ({kind})")
    panels[0][0].set_ylabel("nDCG@10 in %")
    plot.legend_beside(panels[0][-1], ends, "encoding, tokens read")
    plot.save(fig, os.path.join(args.out, "retriever.png"))
    say(f"wrote {os.path.join(args.out, 'retriever.png')}")


def parse(argv):
    p = console.parser(__doc__)
    p.add_argument("--documents", nargs="+", metavar="FILE", help="a directory of data/documents.py, or .jsonl files")
    p.add_argument("--model", help="directory of a BERT with tokenizer.json [--small: a tiny one is made]")
    p.add_argument("--encodings", nargs="+", metavar="NAME", help="what is compared [all that are listed above]",
                   default=["learned", "none", "cable:gate=0.2", "alibi:slopes=geometric,scale=0.02", "rope",
                            "stretched"])
    p.add_argument("--seeds", nargs="+", type=console.natural, default=[42], metavar="N", help="of a training [42]")
    p.add_argument("--tokens", nargs="+", type=console.natural, metavar="N",
                   help="measure after training on so many tokens, padding not counted [0 1000000; --small: 0 10000]")
    p.add_argument("--distill", type=console.natural, metavar="N", help="train first towards --model's "
                   "embeddings of the same texts, on N tokens; 0: do not [1000000; --small: 5000]")
    p.add_argument("--lengths", nargs="+", type=console.positive, metavar="T",
                   help="tokens that are read [512 2048; --small: 64 256]")
    p.add_argument("--begins", nargs="+", type=console.natural, metavar="N",
                   help="where the section begins [0, then the first of --lengths doubled up to the last]")
    p.add_argument("--T", type=console.positive, help="tokens of a training passage [256; --small: 64]")
    p.add_argument("--lr", default="1e-4", help="learning rate [1e-4]")
    p.add_argument("--sections", type=console.positive, default=200, help="sections that have questions [200]")
    p.add_argument("--corpus", type=console.positive, default=600, help="documents that are searched, at least [600]")
    p.add_argument("--names", type=console.natural, default=200, help="NAME lines that are asked [200]")
    p.add_argument("--questions", help="a .jsonl of your own questions")
    p.add_argument("--seed", type=console.natural, default=1, help="of the questions and the collection [1]")
    p.add_argument("--jobs", type=console.processes, default=0, help="runs at a time [1; with GPUs: one for each]")
    p.add_argument("--small", action="store_true", help="short documents and lengths, for a try")
    p.add_argument("--trainer", default=os.environ.get("TRAIN_BERT", os.path.join(console.ROOT, "train_bert")),
                   help="the program [TRAIN_BERT, or train_bert of this repository]")
    p.add_argument("--out", default="run/retriever", help="directory of all that is made [run/retriever]")
    args, rest = p.parse_known_args(argv)
    args.flags, args.trainer = runqueue.flags_of(rest), runqueue.program(args.trainer)
    for name in sorted(OURS & args.flags.keys()):
        raise BadInput(f"--{name}: expected --encodings, --model, --tokens or --lengths, which set this flag")
    args.T, args.made = args.T or (64 if args.small else 256), not args.model
    args.lengths = sorted(args.lengths or ([64, 256] if args.small else [512, 2048]))
    if args.distill is None:
        args.distill = 5000 if args.small else 1_000_000
    args.tokens = sorted(args.tokens or ([0, 10_000] if args.small else [0, 1_000_000]))
    short, long = args.lengths[0], args.lengths[-1]
    args.begins = sorted(args.begins or [0, *(short << n for n in range((long // short).bit_length()))])
    args.longest = max(long, args.begins[-1])
    if not args.documents or not (args.model or args.small):
        p.error("expected --documents, and --model or --small")
    if args.model:
        kind = console.read_object(os.path.join(args.model, "config.json")).get("model_type")
        if kind not in ("bert", "cable_bert"):
            raise BadInput(f"--model {args.model}: expected model_type bert in config.json, got {json.dumps(kind)}")
    return args


def main(argv):
    args = parse(argv)
    list(map(need, ("numpy", "tokenizers", "xxhash")))
    with console.locked(os.path.join(args.out, "data")):
        plan = prepare(args)
        if args.made and not os.path.exists(os.path.join(args.model, "model.safetensors")):
            small_model(args)
        jobs, models = jobs_of(args, plan)
        code = runqueue.Queue("retriever.py", jobs, runqueue.slots(args.jobs, args.trainer)).run()
        if code != runqueue.INTERRUPTED:
            say("finding what the models and BM25 rank first")
            for T in (0, *args.lengths):
                score(args, plan, ("bm25", "", "", 0, "words", T), lambda: of_words(args, plan, T))
            for key, where in models:
                score(args, plan, key, lambda: of_embeddings(plan, key, where))
            write_results(args, plan)
    return code


if __name__ == "__main__":
    console.run(main)
