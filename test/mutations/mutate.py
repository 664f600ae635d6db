#!/usr/bin/env python3
"""mutate.py -- plants faults in a copy of the sources, and says which of them no test sees.

    make mutations                                  the faults of known.tsv, which tests are known to see
    test/mutations/mutate.py --part 2/5             the second fifth of them; --only ID... some of them
    test/mutations/mutate.py --seed 1 --count 130   130 faults drawn at random: every line of code is as likely
    test/mutations/mutate.py --seed 1 --again       those of seed 1 that no test has seen yet
    test/mutations/mutate.py --ci                   3 of known.tsv's cheap ones, drawn by the commit; writes no CSV
    test/mutations/mutate.py --summary              the score of all in the CSV; the survivors that nothing explains

A fault changes one text. All faults in C++ are compiled into one build, each an expression that an environment variable
switches (mut.h). One pass without a fault says which tests reach which fault, and how long they take; a fault then
costs a run of those, the fastest first. Constants, tables, declarations and Python are planted one at a time (tree.py).

`killed`: a test fails, or takes several times as long as without the fault. `survived`: all pass, so a test is
missing, or the change changes nothing; survivors.tsv says which. `reached by no test`: no test runs the line. A fault
that does not compile does not count. Without faults every test must pass, and some must run; anything else is an error.

Each result is appended to dev/results/mutations.csv with its commit; a case that this commit has is not run again.
With --minutes a run ends after so long, and the same command continues it. The exit code is 1 if a known fault
survived, 2 after an error.
"""
import argparse
import collections
import hashlib
import json
import os
import random
import re
import resource
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "dev")]
import console      # noqa: E402
import ledger       # noqa: E402
from console import BadInput    # noqa: E402
import test as runner       # noqa: E402, dev/test.py
import faults as planting   # noqa: E402
from faults import Fault    # noqa: E402
from tree import Case, MUT_MAX, Tree, case_of   # noqa: E402

HERE = os.path.join(ROOT, "test", "mutations")
KNOWN, SURVIVORS = os.path.join(HERE, "known.tsv"), os.path.join(HERE, "survivors.tsv")
RESULTS = os.path.join(ROOT, "dev", "results", "mutations.csv")
SCORE = 0.97                # the least share of the faults that change something to be killed
SINGLE = 300                # seconds of builds and tests for a fault that has a build of its own
NOT_HERE = ("test/scripts/test_mutate.py", "test/scripts/test_make.py", "test/scripts/test_lint.py")    # of the tests
# Between them they include nearly all of llmc, with and without its CUDA text: what does not compile is found early.
SOURCES = {"build/train_bert.o": "train_bert.cu", "build/simt/train_gpt2.o": "train_gpt2.cu"}


def rows_of(path, cells):
    """(place, cells) of each line of a table; \\n stands for a line's end"""
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if line.startswith("#") or not line.strip():
                continue
            row = [cell.replace("\\n", "\n") for cell in line.rstrip("\n").split("\t")]
            if len(row) != cells:
                raise BadInput(f"{path}:{number}: expected {cells} cells, got {len(row)}")
            yield f"{path}:{number}", row


def read_known(path, cheap=False):
    """id, file, before, after, tests, "ci" for the cheap ones, why"""
    faults, names = [], set()
    for place, (name, file, before, after, tests, ci, _) in rows_of(path, 7):
        with open(os.path.join(ROOT, file), encoding="utf-8") as source:
            text = source.read()
        if text.count(before) != 1:
            raise BadInput(f"{place}: {name}: expected its text once in {file}, got {text.count(before)}")
        if name in names:
            raise BadInput(f"{place}: {name}: an id appears twice")
        if not tests:
            raise BadInput(f"{place}: {name}: expected the tests that see it")
        names.add(name)
        at = text.count("\n", 0, text.index(before)) + 1
        if ci or not cheap:
            faults.append(Fault(name, file, at, before, after, tests))
    return faults


def key_of(row):
    return row["id"], row["file"], row["before"], row["after"]


def kind_of(result):
    """killed, survived, reached by no test, or does not compile"""
    return re.match(r"killed|survived|.*", result)[0]


def unseen(results, seed):
    """the faults of a seed whose last row is no kill"""
    last = {key_of(r): r for r in ledger.read(results) if r["id"].startswith(f"seed {seed}, ")}
    return [Fault(r["id"], r["file"], int(r["line"]), r["before"], r["after"], "") for r in last.values()
            if kind_of(r["result"]) in ("survived", "reached by no test")]


def summary(path, survivors):
    """prints what came of all faults in the CSV, when first run and by now; 1: too few were killed, or a survivor has
    no explanation"""
    why = {(name, file): kind for _, (name, file, kind, _) in rows_of(survivors, 4)}
    found, unexplained = collections.defaultdict(collections.Counter), []
    first, last = {}, {}
    for row in ledger.read(path):
        first.setdefault(key_of(row), row)
        last[key_of(row)] = row
    for key, row in last.items():
        kind, result = why.get(key[:2]), kind_of(row["result"])
        if result in ("survived", "reached by no test"):
            result = "changes nothing" if kind == "equivalent" else result
            unexplained += [] if kind else [row]
        elif result == "killed" and kind_of(first[key]["result"]) != "killed":
            result = "killed since"
        found[row["id"].split(",")[0] if row["id"].startswith("seed ") else "known"][result] += 1
    found["all"] = sum(found.values(), collections.Counter())
    columns = ["killed", "killed since", "survived", "reached by no test", "changes nothing", "does not compile"]
    print(f"| faults | {' | '.join(columns)} | first score | score |\n|{'---|' * (len(columns) + 3)}")
    score = 0
    for name, n in found.items():
        count = max(n["killed"] + n["killed since"] + n["survived"] + n["reached by no test"], 1)
        score = (n["killed"] + n["killed since"]) / count
        print(f"| {name} | {' | '.join(str(n[c]) for c in columns)} | {100 * n['killed'] / count:.1f}% | "
              f"{100 * score:.1f}% |")
    for row in unexplained:
        print(f"no explanation in {os.path.relpath(survivors, ROOT)}: {row['id']}: {row['result']}\n"
              f"  {row['file']}:{row['line']}\n- {row['before'].strip()}\n+ {row['after'].strip()}")
    return int(score < SCORE or bool(unexplained))


def chosen(args):
    if args.ci:
        cheap = read_known(args.known, cheap=True)
        return random.Random(ledger.commit().rstrip("+")).sample(cheap, min(3, len(cheap)))
    if args.seed is not None:
        faults = unseen(args.results, args.seed) if args.again else planting.draw(args.seed, args.count)
    else:
        faults = read_known(args.known)
    if args.only:
        unknown = set(args.only) - {f.id for f in faults}
        if unknown:
            raise BadInput(f"--only: there is no fault {', '.join(sorted(unknown))}")
        faults = [f for f in faults if f.id in args.only]
    return ledger.share(args.part, faults)


def all_tests():
    """the programs of `make test`, what else they need"""
    os.chdir(ROOT)
    programs, also = runner.plan("test", [])
    return [p for p in programs if p not in NOT_HERE], also


class OutOfTime(Exception):
    pass


class Campaign:
    """the faults that are still to be tried, and the results of the rest"""
    def __init__(self, args, faults):
        self.args, self.here = args, ledger.commit()
        self.counts, self.began, self.wrong = collections.Counter(), time.time(), []
        self.faults = dict(enumerate(faults, 1))
        if len(faults) >= MUT_MAX:
            raise BadInput(f"expected fewer than {MUT_MAX} faults, got {len(faults)}")
        done = {} if args.ci or self.here.endswith("+") else {
            key_of(r): r["result"] for r in ledger.read(args.results) if r["commit"] == self.here}
        self.waiting = {}
        for n, fault in self.faults.items():
            result = done.get((fault.id, fault.file, fault.before, fault.after))
            if result is None:
                self.waiting[n] = fault
            else:
                self.say(fault, result)
        directory = os.path.join(ROOT, "build", "mutations")
        os.makedirs(directory, exist_ok=True)
        self.tree = Tree(os.path.join(directory, "tree"), ROOT)
        # What a run that --minutes ended has found: the faults that are no expressions; what each case reaches.
        self.path = os.path.join(directory, "state.json")
        name = hashlib.sha256(repr((self.here, sorted(self.faults.items()))).encode()).hexdigest()
        self.state = {"name": name, "left": None, "cases": {}, "seconds": 0}
        if os.path.exists(self.path) and not self.here.endswith("+"):
            with open(self.path, encoding="utf-8") as f:
                state = json.load(f)
            self.state = state if state["name"] == name else self.state

    def save(self):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.state["seconds"] += used.ru_utime + used.ru_stime - getattr(self, "used", 0)
        self.used = used.ru_utime + used.ru_stime
        console.write_whole(self.path, json.dumps(self.state))

    def say(self, fault, result):
        self.counts[kind_of(result)] += 1
        print(f"[{sum(self.counts.values())}/{len(self.faults)}] {fault.id}, {fault.file}: {result}", flush=True)
        if kind_of(result) in ("survived", "reached by no test"):
            print(f"  {fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}", flush=True)

    def try_one(self, n, attempt):
        """appends what attempt() returns: (result, the number of cases)"""
        if self.args.minutes and time.time() - self.began > 60 * self.args.minutes:
            raise OutOfTime
        fault, start = self.waiting[n], time.time()
        try:
            result, cases = attempt()
        except BadInput as e:                           # no result; the rest are tried
            self.error(fault.id, e)
            return
        if not self.args.ci:
            row = dict(fault._asdict(), result=result, cases=cases, seconds=round(time.time() - start),
                       commit=self.here)
            del row["tests"]
            ledger.append(self.args.results, row)
        del self.waiting[n]
        self.save()
        self.say(fault, result)

    def error(self, what, why):
        print(f"error: {what}: {why}", file=sys.stderr, flush=True)
        self.wrong.append(what)

    def cover(self, cases, spans):
        """runs each case once without a fault; {Case: (seconds, Result)} and {n: the cases that reach it}"""
        for case in cases:
            name = "\t".join(case)
            if name in self.state["cases"]:
                continue
            if self.args.minutes and time.time() - self.began > 60 * self.args.minutes:
                raise OutOfTime
            try:
                self.state["cases"][name] = self.tree.green(case, spans)
            except BadInput as e:
                self.error(" ".join(case).strip(), e)
            self.save()
        green, reached = {}, collections.defaultdict(list)
        for name, found in self.state["cases"].items():
            case = Case(*name.split("\t"))
            seconds, result, numbers = found
            result = runner.Result(*result)
            for why in result.skipped:
                print(f"skipped: {' '.join(case).strip()} | {why}")
            if result.passed:
                green[case] = seconds, result
                for n in numbers:
                    reached[n].append(case)
        return green, reached

    def run(self):
        drawn = self.args.seed is not None
        cpp = {n: f for n, f in self.faults.items() if not f.file.endswith(".py")}
        named = {n: [case_of(t) for t in f.tests.split()] for n, f in self.faults.items()}
        if drawn:
            programs, also = all_tests()
        else:
            waiting = [t for n in self.waiting for t in named[n]]
            programs = list(dict.fromkeys(case.program for case, _ in waiting))
            also = list(dict.fromkeys(t for _, needed in waiting for t in needed))
        targets = [p for p in programs if not p.endswith(".py")] + also
        tree, waiting = self.tree, self.waiting
        left = set(self.state["left"] or [])
        if self.state["left"] is None or set(waiting) - left or not self.state["cases"]:
            left |= tree.build({n: f for n, f in cpp.items() if n not in left}, targets, SOURCES if drawn else {})
            self.state["left"] = sorted(left)
            self.save()
        spans = {n: (f.file, *planting.python_span(tree.source(f.file).decode(), f.line))
                 for n, f in self.faults.items() if f.file.endswith(".py")}
        if drawn:
            cases = [case for p in programs for case in tree.cases(p)] if not self.state.get("whole") else []
        else:
            cases = list(dict.fromkeys(case for n in waiting for case, _ in named[n]))
        green, reached = self.cover(cases, spans)
        self.state["whole"] = drawn

        def seen_by(n):
            """the cases to run for a fault"""
            return {case: green[case] for case in ([c for c, _ in named[n]] or reached[n]) if case in green}

        def attempt(n):
            cases = seen_by(n)
            if named[n] and len(cases) < len(named[n]):
                raise BadInput("no result without its tests")
            return (tree.verdict(n, cases) if cases else "reached by no test"), len(cases)
        for n in sorted(set(waiting) & set(cpp) - left):
            self.try_one(n, lambda: attempt(n))
        single = {n: f for n, f in waiting.items() if n in left or n not in cpp}
        refused = tree.refused(single, SOURCES if drawn else {})
        for n in sorted(single):
            if n in refused:
                self.try_one(n, lambda: ("does not compile", 0))
                continue
            near = n in cpp and not named[n]
            cases = self.near(n, green, reached) if near else seen_by(n)
            needed = [t for _, needed in named[n] for t in needed] or also
            self.try_one(n, lambda: self.single(n, cases, needed, attempt))
        self.tree.plant({})

    def near(self, n, green, reached):
        """for a fault that no case can be said to reach: the cases of the programs that include its file, those that
        include least first; then those that reach another fault in it"""
        name = self.faults[n].file
        first = {p: i for i, p in enumerate(self.tree.depends(name))}
        others = {case for m, f in self.faults.items() if f.file == name for case in reached[m]}
        cases = [c for c in green if c.program in first or c in others]
        return {c: green[c] for c in sorted(cases, key=lambda c: (first.get(c.program, len(first)), green[c][0]))}

    def single(self, n, cases, needed, attempt):
        """a fault by itself: planted, built where it is C++, and run"""
        fault, began, count = self.faults[n], time.time(), 0
        self.tree.plant({n: fault}, whole=True)
        if fault.file.endswith(".py") and not fault.file.startswith("llmc/"):
            return attempt(n)
        programs = collections.defaultdict(dict)
        for case, result in cases.items():
            programs[case.program][case] = result
        for program, some in programs.items():
            driven = runner.TRAINERS if "/programs/" in program and not fault.tests else []
            targets = needed if program.endswith(".py") else [program, *(driven or needed)]
            if not self.tree.make(targets)[0]:
                return "does not compile", 0
            count += len(some)
            result = self.tree.verdict(n, some)
            if result != "survived":
                return result, count
            if time.time() - began > SINGLE and not fault.tests:
                return f"survived {SINGLE} s of builds and tests", count
        return ("survived" if programs else "reached by no test"), count


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--known", default=KNOWN, metavar="FILE", help="the list of faults [test/mutations/known.tsv]")
    p.add_argument("--seed", type=int, help="draw the faults instead")
    p.add_argument("--count", type=int, default=20, help="number of faults drawn [20]")
    p.add_argument("--again", action="store_true", help="those of the seed in the CSV that no test has seen")
    p.add_argument("--ci", action="store_true", help="3 cheap ones of the list, drawn by the commit")
    p.add_argument("--part", type=ledger.part_of, default=(1, 1), metavar="K/N", help="every n-th, from the k-th on")
    p.add_argument("--only", nargs="+", metavar="ID", help="only these")
    p.add_argument("--minutes", type=float, help="end after so long; the same command continues")
    p.add_argument("--summary", action="store_true", help="print the score of all in the CSV and run nothing")
    p.add_argument("--results", default=RESULTS, metavar="FILE", help="the CSV [dev/results/mutations.csv]")
    args = p.parse_args(argv)
    if args.summary:
        return summary(args.results, SURVIVORS)
    faults = chosen(args)
    campaign = Campaign(args, faults)
    try:
        campaign.run()
    except OutOfTime:
        print(f"{len(campaign.waiting)} faults are left; the same command continues")
    campaign.save()
    counts = campaign.counts
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(f"{campaign.state['seconds'] / 60:.1f} minutes of processors")
    if campaign.wrong:
        raise BadInput(f"no result: {', '.join(campaign.wrong)}")
    if args.ci:
        print(f"{counts['killed']} passed, {len(faults) - counts['killed']} failed")
    bad = counts["survived"] + counts["reached by no test"]
    bad += len(faults) - counts["killed"] - bad if args.ci else 0
    return 1 if bad and args.seed is None else 0


if __name__ == "__main__":
    console.run(main)
