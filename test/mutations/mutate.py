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
tables, declarations and Python are planted one at a time (tree.py).

`killed`: a test fails, or takes several times as long as without the fault. `survived`: all pass, so a test is
missing, or the change changes nothing; survivors.tsv says which. `reached by no test`: no test runs the line. A fault
that does not compile does not count. Without faults every test must pass, and some must run; anything else is an error.

Each result is appended to dev/results/mutations.csv with its commit; a case that this commit has is not run again.
With --minutes a run ends after so long, and the same command continues it. The exit code is 1 if a known fault
survived, 2 after an error.
"""
import argparse
import collections
import contextlib
import hashlib
import json
import math
import os
import random
import re
import resource
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
from tree import Case, MUT_MAX, Tree, case_of   # noqa: E402

HERE = os.path.join(ROOT, "test", "mutations")
KNOWN, SURVIVORS = os.path.join(HERE, "known.tsv"), os.path.join(HERE, "survivors.tsv")
RESULTS = os.path.join(ROOT, "dev", "results", "mutations.csv")
COLUMNS = "id file line before after result cases seconds commit".split()
SCORE = 0.97                # the least share of the faults that change something to be killed
MOST = 300                  # seconds of tests, and of builds where it has its own, for one fault
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
    """the faults of a seed that no test has killed yet, by their last row"""
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


class OutOfTime(Exception):
    pass


class Campaign:
    """the faults that are still to be tried, and the results of the rest"""
    def __init__(self, args, faults):
        self.args, self.here, self.drawn = args, ledger.commit(), args.seed is not None
        self.counts, self.began, self.wrong = collections.Counter(), time.time(), []
        if len(faults) >= MUT_MAX:
            raise BadInput(f"expected fewer than {MUT_MAX} faults, got {len(faults)}")
        self.faults = dict(enumerate(faults, 1))
        done = {} if args.ci or self.here.endswith("+") else {
            key_of(r): r["result"] for r in ledger.read(args.results) if r["commit"] == self.here}
        self.waiting = {n: f for n, f in self.faults.items() if key_of(f._asdict()) not in done}
        for n in set(self.faults) - set(self.waiting):
            self.say(self.faults[n], done[key_of(self.faults[n]._asdict())])
        directory = os.path.join(ROOT, "build", "mutations")
        os.makedirs(directory, exist_ok=True)
        self.tree = Tree(os.path.join(directory, "tree"), ROOT)
        # What a run that --minutes ended has found: the faults that are no expressions; the programs that are done; of
        # each case its seconds, Result and what it reaches; of each fault the number of cases, and seconds; seconds of
        # processors.
        self.path = os.path.join(directory, "state.json")
        name = hashlib.sha256(repr((self.here, sorted(self.faults.items()))).encode()).hexdigest()
        self.state = {"name": name, "left": None, "done": [], "green": {}, "cases": {}, "spent": {}, "processors": 0}
        if os.path.exists(self.path) and not self.here.endswith("+"):
            with open(self.path, encoding="utf-8") as f:
                state = json.load(f)
            self.state = state if state["name"] == name else self.state
        self.used = 0

    def save(self):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.state["processors"] += used.ru_utime + used.ru_stime - self.used
        self.used = used.ru_utime + used.ru_stime
        console.write_whole(self.path, json.dumps(self.state))

    def check_time(self):
        if time.time() - self.began > 60 * self.args.minutes:
            raise OutOfTime

    def error(self, what, why):
        print(f"error: {what}: {why}", file=sys.stderr, flush=True)
        self.wrong.append(what)

    def say(self, fault, result):
        self.counts[kind_of(result)] += 1
        print(f"[{sum(self.counts.values())}/{len(self.faults)}] {fault.id}, {fault.file}: {result}", flush=True)
        if kind_of(result) in ("survived", "reached by no test"):
            print(f"  {fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}", flush=True)

    def settle(self, n, result):
        """a fault's result, which nothing that follows changes"""
        fault, cases = self.waiting.pop(n), self.state["cases"].get(str(n), 0)
        if not self.args.ci:
            seconds = round(self.state["spent"].get(str(n), 0))
            ledger.append(self.args.results, dict(zip(COLUMNS, (*fault[:-1], result, cases, seconds, self.here))))
        self.save()
        self.say(fault, result)

    def attempt(self, n, cases, began):
        """runs these cases, {Case: (seconds, Result)}, with a fault that is planted"""
        spent, key = self.state["spent"], str(n)
        try:
            result, count = self.tree.verdict(n, cases)
        except BadInput as e:                           # no result; the rest are tried
            self.error(self.faults[n].id, e)
            del self.waiting[n]
            return
        self.state["cases"][key] = self.state["cases"].get(key, 0) + count
        spent[key] = spent.get(key, 0) + time.time() - began
        if result:
            self.settle(n, result)
        elif spent[key] > MOST and not self.faults[n].tests:
            self.settle(n, f"survived {MOST} s of its tests")

    def green(self, cases):
        """these cases without a fault: {Case: (seconds, Result)}, and {n: the cases that reach it}"""
        spans = {n: (f.file, *planting.python_span(self.tree.source(f.file).decode(), f.line))
                 for n, f in self.waiting.items() if f.file.endswith(".py")}
        green, reached = {}, collections.defaultdict(list)
        for case in cases:
            found = self.state["green"].setdefault(case.program, {})
            if case.what not in found:
                self.check_time()
                try:
                    found[case.what] = self.tree.green(case, spans)
                except BadInput as e:
                    self.error(" ".join(case).strip(), e)
                    continue
                for why in dict.fromkeys(found[case.what][1].skipped):
                    print(f"skipped: {' '.join(case).strip()} | {why}", flush=True)
                self.save()
            seconds, result, numbers = found[case.what]
            if result[0]:                               # some passed
                green[case] = seconds, runner.Result(*result)
                for n in numbers:
                    reached[n].append(case)
        return green, reached

    def run(self):
        """builds and runs one program after the other, each with the faults that are left and that it reaches"""
        named = {n: [case_of(t) for t in f.tests.split()] for n, f in self.waiting.items()}
        programs = all_tests() if self.drawn else {}
        for case, needed in (test for tests in named.values() for test in tests):
            programs[case.program] = list(dict.fromkeys([*programs.get(case.program, []), *needed]))
        named = {n: [case for case, _ in tests] for n, tests in named.items()}
        cpp = {n: f for n, f in self.faults.items() if not f.file.endswith(".py")}
        if self.state["left"] is None:
            left = self.tree.build(cpp, [], SOURCES if self.drawn else {})
            whole = {n: f for n, f in self.waiting.items() if n in left or n not in cpp}
            for n in sorted(self.tree.refused(whole, SOURCES if self.drawn else {})):
                self.settle(n, "does not compile")
            self.state["left"] = sorted(left)
        for program, needed in programs.items():
            if self.waiting and program not in self.state["done"]:
                self.check_time()
                self.try_program(program, needed, cpp, named)
        for n in sorted(set(self.state["left"]) & set(self.waiting)):
            self.try_single(n, programs, named[n])
        for n in sorted(self.waiting):
            if self.faults[n].tests and str(n) not in self.state["cases"]:
                self.error(self.faults[n].id, "no result without its tests")
            else:
                self.settle(n, "survived" if self.state["cases"].get(str(n)) else "reached by no test")

    def try_program(self, program, needed, cpp, named):
        """one program: its cases without a fault, and with each fault that they reach"""
        targets = needed if program.endswith(".py") else [program, *needed]
        left = set(self.state["left"])
        left |= self.tree.build({n: f for n, f in cpp.items() if n not in left}, targets)
        cases = [c for n in self.waiting for c in named[n] if c.program == program]
        if self.drawn:
            cases += self.tree.cases(program)
        green, reached = self.green(dict.fromkeys(cases))
        for n, fault in list(self.waiting.items()):
            some = {case: green[case] for case in named[n] or reached[n] if case in green}
            if some and n not in left:
                self.check_time()
                with self.tree.changed(fault) if n not in cpp else contextlib.nullcontext():
                    self.attempt(n, some, time.time())
        self.state["left"] = sorted(left)
        self.state["done"].append(program)
        self.save()

    def try_single(self, n, programs, named):
        """a fault of C++ by itself, in the programs that include its file, those that include least first"""
        self.tree.plant({n: self.faults[n]}, whole=True)
        for program in dict.fromkeys(c.program for c in named) or self.tree.depends(self.faults[n].file):
            green = {Case(program, what): (seconds, runner.Result(*result)) for what, (seconds, result, _)
                     in self.state["green"].get(program, {}).items() if result[0]}
            cases = {case: green[case] for case in named or green if case in green}
            if cases and n in self.waiting:
                self.check_time()
                began = time.time()
                if self.tree.make([*programs[program], *([] if program.endswith(".py") else [program])])[0]:
                    self.attempt(n, cases, began)
                else:
                    self.settle(n, "does not compile")


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--known", default=KNOWN, metavar="FILE", help="the list of faults [test/mutations/known.tsv]")
    p.add_argument("--seed", type=int, help="draw the faults instead")
    p.add_argument("--count", type=int, default=20, help="number of faults drawn [20]")
    p.add_argument("--again", action="store_true", help="those of the seed in the CSV that no test has seen")
    p.add_argument("--ci", action="store_true", help="3 cheap ones of the list, drawn by the commit")
    p.add_argument("--only", nargs="+", metavar="ID", help="only these")
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
    except OutOfTime:
        print(f"{len(campaign.waiting)} faults are left; the same command continues")
    campaign.save()
    counts = campaign.counts
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(f"{campaign.state['processors'] / 60:.1f} minutes of processors")
    if campaign.wrong:
        raise BadInput(f"no result: {', '.join(campaign.wrong)}")
    if args.ci:
        print(f"{counts['killed']} passed, {len(faults) - counts['killed']} failed")
    bad = counts["survived"] + counts["reached by no test"]
    bad += len(faults) - counts["killed"] - bad if args.ci else 0
    return 1 if bad and args.seed is None else 0


if __name__ == "__main__":
    console.run(main)
