#!/usr/bin/env python3
"""mutate.py -- plants faults in a copy of the sources, and says which of them no test sees.

    make mutations                                  the faults of known.tsv, which tests are known to see
    test/mutations/mutate.py --only ID...           some of them
    test/mutations/mutate.py --seed 1 --count 130   130 faults drawn at random: every line of code is as likely
    test/mutations/mutate.py --seed 1 --again       those of seed 1 that no test has seen yet
    test/mutations/mutate.py --ci                   3 of known.tsv's cheap ones, drawn by the commit; writes no CSV
    test/mutations/mutate.py --summary              the score of all in the CSV; the survivors that nothing explains

A fault changes one text. All faults in C++ are compiled into one build, each an expression that an environment variable
switches (mut.h). Each test program runs once without a fault, which says what its cases reach and how long they take;
a fault that no program before has seen then costs a run of the cases that reach it, the fastest first. Constants,
tables and declarations come last, each built by itself for the programs that include it; Python needs no build.

`killed`: a test fails, or takes several times as long as without the fault. `survived`: all pass, so a test is
missing, or the change changes nothing; survivors.tsv says which. `reached by no test`: no test runs the line. A fault
that does not compile does not count. Without faults every test must pass, and some must run; anything else is an error.

Each result is appended to dev/results/mutations.csv with its commit; a fault that has one of this commit is not tried
again. With --minutes a run ends after so long, and the same command continues it. The exit code is 1 if a known fault
survived, 2 after an error.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import json
import math
import os
import random
import re
import signal
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
from tree import Case, MUT_MAX, Tree    # noqa: E402

HERE = os.path.join(ROOT, "test", "mutations")
KNOWN, SURVIVORS = os.path.join(HERE, "known.tsv"), os.path.join(HERE, "survivors.tsv")
RESULTS = os.path.join(ROOT, "dev", "results", "mutations.csv")
COLUMNS = "id file line before after result cases seconds commit".split()
UNSEEN = "survived", "reached by no test"
SCORE = 0.97                # the least share of the faults that change something to be killed
MOST = 300                  # seconds of tests, and of builds where it has its own, for one drawn fault
NOT_HERE = ("test/scripts/test_mutate.py", "test/scripts/test_make.py", "test/scripts/test_lint.py")    # of the tests
# Between them they include nearly all of llmc, with and without its CUDA text: what does not compile is found early.
OBJECTS, SYNTAX = ["build/train_bert.o", "build/simt/train_gpt2.o"], "-w -fsyntax-only -fmax-errors=0"


def rows_of(path, cells):
    """(place, cells) of each line of a table; \\n stands for a line's end"""
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f.read().splitlines(), 1):
            row = [cell.replace("\\n", "\n") for cell in line.split("\t")]
            if len(row) == cells:
                yield f"{path}:{number}", row
            elif line and not line.startswith("#"):
                raise BadInput(f"{path}:{number}: expected {cells} cells, got {len(row)}")


def read_known(path, cheap=False):
    """the faults of a table: id, file, before, after, tests, "ci" for the cheap ones, why"""
    faults = []
    for place, (name, file, before, after, tests, ci, _) in rows_of(path, 7):
        text = planting.source(file)
        if text.count(before) != 1:
            raise BadInput(f"{place}: {name}: expected its text once in {file}, got {text.count(before)}")
        if ci or not cheap:
            faults.append(Fault(name, file, text.count("\n", 0, text.index(before)) + 1, before, after, tests))
    return faults


def results_of(path):
    """{(id, file, before, after): [(Fault, its result, commit), the first one first]} of the CSV"""
    found = collections.defaultdict(list)
    for r in ledger.read(path):
        fault = Fault(r["id"], r["file"], int(r["line"]), r["before"], r["after"], "")
        found[key_of(fault)].append((fault, r["result"], r["commit"]))
    return found


def key_of(fault):
    return fault.id, fault.file, fault.before, fault.after


def kind_of(result):
    """killed, survived, reached by no test, or does not compile"""
    return re.match(r"killed|survived|.*", result)[0]


def shown(fault):
    return f"  {fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}"


def summary(path, survivors):
    """prints what came of all faults in the CSV, when first run and by now; 1: too few were killed, or a survivor has
    no explanation"""
    why = {(name, file): kind for _, (name, file, kind, _) in rows_of(survivors, 4)}
    found, unexplained = collections.defaultdict(collections.Counter), []
    for (name, file, *_), rows in results_of(path).items():
        first, result = kind_of(rows[0][1]), kind_of(rows[-1][1])
        if result in UNSEEN and (name, file) not in why:
            unexplained.append(f"{name}: {result}\n{shown(rows[-1][0])}")
        if result in UNSEEN and why.get((name, file)) == "equivalent":
            result = "changes nothing"
        if result == "killed" != first:
            result = "killed since"
        found[name.split(",")[0] if name.startswith("seed ") else "known"][result] += 1
    found["all"] = sum(found.values(), collections.Counter())
    columns = ["killed", "killed since", *UNSEEN, "changes nothing", "does not compile"]
    print(f"| faults | {' | '.join(columns)} | first score | score |\n|{'---|' * (len(columns) + 3)}")
    for name, n in found.items():
        count = max(sum(n[c] for c in columns[:4]), 1)
        score = (n["killed"] + n["killed since"]) / count
        print(f"| {name} | {' | '.join(str(n[c]) for c in columns)} | {100 * n['killed'] / count:.1f}% | "
              f"{100 * score:.1f}% |")
    for fault in unexplained:
        print(f"no explanation in {os.path.relpath(survivors, ROOT)}: {fault}")
    return int(score < SCORE or bool(unexplained))


def chosen(args):
    if args.ci:
        cheap = read_known(KNOWN, cheap=True)
        return random.Random(ledger.commit().rstrip("+")).sample(cheap, min(3, len(cheap)))
    if args.again:
        last = [rows[-1] for rows in results_of(args.results).values()]
        faults = [f for f, result, _ in last if f.id.startswith(f"seed {args.seed}, ") and kind_of(result) in UNSEEN]
    else:
        faults = read_known(KNOWN) if args.seed is None else planting.draw(args.seed, args.count)
    unknown = set(args.only) - {f.id for f in faults}
    if unknown:
        raise BadInput(f"--only: there is no fault {', '.join(sorted(unknown))}")
    return [f for f in faults if f.id in (args.only or [f.id])]


def all_tests():
    """{program of `make test`: what else it needs}, those first that are cheap to build and to run"""
    os.chdir(ROOT)
    order = ["text", "files", "base", "programs", "layers", "scripts", "simt", "model", "attack", "ranks"]
    programs, also = runner.plan("test", [])
    trainers = {"programs": runner.TRAINERS, "scripts": runner.TRAINERS}
    kind = {p: p.split("/")[-2] for p in programs if p not in NOT_HERE}
    return {p: trainers.get(kind[p], also if p.endswith(".py") else []) for p in sorted(
        kind, key=lambda p: (order.index(kind[p]), p))}


def targets_of(program, programs):
    """what make builds for a program; programs: {program: what else it needs}"""
    return [target for target in (program, *programs[program]) if not target.endswith(".py")]


class Campaign:
    """the faults, those that wait for a result, and what the next run need not find out again"""
    def __init__(self, args, faults):
        if len(faults) >= MUT_MAX:
            raise BadInput(f"expected fewer than {MUT_MAX} faults, got {len(faults)}")
        self.args, self.commit, self.end = args, ledger.commit(), time.time() + 60 * args.minutes
        self.faults = dict(enumerate(faults, 1))
        self.waiting, self.counts, self.wrong = dict(self.faults), collections.Counter(), []
        name = hashlib.sha256(repr((self.commit, sorted(self.faults.items()))).encode()).hexdigest()
        self.path = os.path.join(ROOT, "build", "mutations", f"{name[:16]}.json")
        self.tree = Tree(os.path.join(ROOT, "build", "mutations", "tree"))
        # left: the faults of C++ that are not expressions; green: {program: {case: what Tree.green() says}}
        self.state = {"left": None, "green": {}}
        if args.ci or self.commit.endswith("+"):        # this name is not of one version of the sources
            return
        if os.path.exists(self.path):
            self.state = console.read_object(self.path)
        results = results_of(args.results)
        for n, fault in self.faults.items():
            done = [result for _, result, commit in results[key_of(fault)] if commit == self.commit]
            if done:
                self.say(self.waiting.pop(n), done[-1])

    def save(self):
        console.write_whole(self.path, json.dumps(self.state))

    def check_time(self):
        if time.time() > self.end:
            raise console.Interrupted

    def say(self, fault, result):
        self.counts[kind_of(result)] += 1
        print(f"[{sum(self.counts.values())}/{len(self.faults)}] {fault.id}, {fault.file}: {result}", flush=True)
        if kind_of(result) in UNSEEN:
            print(shown(fault), flush=True)

    def settle(self, n, result, cases=0, seconds=0):
        """a fault's result, which nothing that follows changes"""
        fault = self.waiting.pop(n)
        if not self.args.ci:
            ledger.append(self.args.results, dict(zip(COLUMNS, (*fault[:-1], result, cases, round(seconds),
                                                                self.commit))))
        self.save()
        self.say(fault, result)

    def run(self):
        """builds and runs all programs without a fault; then each fault with the cases that it reaches"""
        drawn = self.args.seed is not None
        programs, named = all_tests() if drawn else {}, collections.defaultdict(list)
        for n, fault in list(self.waiting.items()):
            if fault.file.endswith(".py") and not planting.parses(fault):
                self.settle(n, "does not compile")
            for test in fault.tests.split():
                test, *needed = test.split("+")
                program, _, what = test.partition(":")
                named[n].append(Case(program, what))
                programs[program] = list(dict.fromkeys([*programs.get(program, []), *needed]))
        if self.state["left"] is None:
            self.state["left"] = []
            self.build(OBJECTS if drawn else [], SYNTAX)
        if drawn:                                       # all at once, which keeps each core busy
            self.check_time()
            self.build(sorted({t for p in programs for t in targets_of(p, programs)}))
        green = {}
        for program in programs:
            if self.waiting:
                self.check_time()
                self.build(targets_of(program, programs))
                cases = [case for n in self.waiting for case in named[n] if case.program == program]
                green |= self.green(program, cases + (self.tree.cases(program) if drawn else []))
        work = {n: {case: seconds for case, (seconds, reached) in green.items()
                    if (case in named[n] if named[n] else n in reached)} for n in self.waiting}
        for n in [n for n in work if named[n] and not work[n]]:         # all of its cases are errors
            self.wrong.append(self.faults[n].id)
            del work[n]
        single = [n for n in work if n in self.state["left"]]
        python = [n for n in work if self.faults[n].file.endswith(".py")]
        for n, tried in self.side_by_side(self.tried, [(n, work[n]) for n in work if n not in single + python]):
            self.settle(n, *tried)
        for n in python:
            with self.tree.changed(self.faults[n]):
                self.settle(n, *self.tried(n, work[n]))
        for n in single:
            with self.tree.changed(self.faults[n]):
                self.settle(n, *self.tried_by_itself(n, programs, green, work[n]))

    def build(self, targets, *flags):
        switched = {n: f for n, f in self.faults.items()
                    if not f.file.endswith(".py") and n not in self.state["left"]}
        self.state["left"] += sorted(self.tree.build(switched, targets, *flags))

    def side_by_side(self, work, rows, jobs=runner.JOBS):
        """(row[0], work(*row)) of each as it is done, several at a time"""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            begun = {pool.submit(work, *row): row[0] for row in rows}
            try:
                for done in concurrent.futures.as_completed(begun):
                    yield begun[done], done.result()
            except BaseException:
                self.end = 0                            # nothing new begins
                raise

    def tried(self, n, cases):
        """(the result, the number of cases, seconds) of a fault that is in place"""
        self.check_time()
        began = time.time()
        most = math.inf if self.faults[n].tests else MOST
        return *self.tree.verdict(n, cases, most), time.time() - began

    def tried_by_itself(self, n, programs, green, named):
        """the same of one that needs builds of its own: does it compile, and which program that includes it sees it?
        Those that need the trainers come last"""
        fault, result, cases, seconds = self.faults[n], "reached by no test", 0, 0
        if not fault.tests and self.tree.make(OBJECTS, SYNTAX)[0] != 0:
            return "does not compile", 0, 0
        for program in sorted(programs, key=lambda p: len(programs[p])):
            targets = targets_of(program, programs)
            included = not fault.tests and any(self.tree.includes(target, fault.file) for target in targets)
            some = {case: row[0] for case, row in green.items()
                    if case.program == program and (included or case in named)}
            if some:
                self.check_time()
                if self.tree.make(targets)[0] != 0:
                    return "does not compile", cases, seconds
                result, more, spent = self.tried(n, some)
                cases, seconds = cases + more, seconds + spent
                if kind_of(result) == "killed" or spent > MOST:
                    break
        return result, cases, seconds

    def green(self, program, cases):
        """{Case: (seconds, the faults that it reaches)} of those in which a test passes without a fault"""
        spans = [(n, f.file, *planting.python_span(planting.source(f.file), f.line))
                 for n, f in self.waiting.items() if f.file.endswith(".py")]
        found = self.state["green"].setdefault(program, {})
        def run(case):
            self.check_time()
            try:
                return self.tree.green(case, spans)
            except BadInput as e:                       # the rest are tried
                return e
        new = [(case,) for case in dict.fromkeys(cases) if case.what not in found]
        for case, result in self.side_by_side(run, new, 1 if program.endswith(".py") else runner.JOBS):
            name = " ".join(case).strip()
            if isinstance(result, BadInput):
                print(f"error: {name}: {result}", file=sys.stderr, flush=True)
                self.wrong.append(name)
                continue
            found[case.what] = result
            for why in dict.fromkeys(result[3]):
                print(f"skipped: {name} | {why}", flush=True)
            self.save()
        return {case: found[case.what][:2] for case in cases if found.get(case.what, (0, 0, 0))[2]}


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, help="draw the faults instead")
    p.add_argument("--count", type=int, default=20, help="number of faults drawn [20]")
    p.add_argument("--again", action="store_true", help="those of the seed in the CSV that no test has seen")
    p.add_argument("--ci", action="store_true", help="3 cheap ones of the list, drawn by the commit")
    p.add_argument("--only", nargs="+", default=[], metavar="ID", help="only these")
    p.add_argument("--minutes", type=float, default=math.inf, help="end after so long; the same command continues")
    p.add_argument("--summary", action="store_true", help="print the score of all in the CSV and run nothing")
    p.add_argument("--results", default=RESULTS, metavar="FILE", help="the CSV [dev/results/mutations.csv]")
    args = p.parse_args(argv)
    if args.summary:
        return summary(args.results, SURVIVORS)
    signal.signal(signal.SIGINT, signal.default_int_handler)    # which a job in the background ignores; tests must not
    faults = chosen(args)
    campaign = Campaign(args, faults)
    try:
        campaign.run()
    except console.Interrupted:
        print(f"{len(campaign.waiting)} faults are left; the same command continues")
    campaign.save()
    counts, used = campaign.counts, os.times()
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(f"{(used.children_user + used.children_system) / 60:.1f} minutes of processors")
    if campaign.wrong:
        raise BadInput(f"no result: {', '.join(campaign.wrong)}")
    missed = len(faults) - counts["killed"] if args.ci else counts["survived"] + counts["reached by no test"]
    if args.ci:
        print(f"{counts['killed']} passed, {missed} failed")
    return 1 if missed and args.seed is None else 0


if __name__ == "__main__":
    console.run(main)
