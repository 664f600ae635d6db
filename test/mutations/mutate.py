#!/usr/bin/env python3
"""mutate.py -- plants faults in a copy of the sources and says which of them no test sees.

    make mutations                                  the faults of known.tsv, which tests are known to see
    test/mutations/mutate.py --only ID...           some of them
    test/mutations/mutate.py --seed 1 --count 30    30 faults drawn at random: every line of code is as likely
    test/mutations/mutate.py --ci                   3 of known.tsv's cheap ones, drawn by the commit

`killed`: a test fails, or takes several times as long as without the fault. `survived`: all pass, so a test is missing,
or the change changes nothing. `out of time`: 15 minutes of processor time have passed, and others are left. `changes no
program`: what is built is the same. `reached by no test`: no test includes the file. What does not compile does not
count. A test that fails with a fault must pass without it; anything else is an error.

known.tsv names the tests of its faults. A drawn fault meets the programs that include its file and are another with it,
or the scripts' tests that name a script or what imports it: of these, what bears the file's name, then what has killed
most in a second. All faults meet those of `make test` (SHORT in dev/test.py) first; what survived `so far` then meets
the rest. What came of each is a row of dev/results/mutations.csv, and is not run again; a fault that changes nothing
leaves the score once the row's last cell says why. The exit code is 1 if a known fault survived, 2 after an error."""
import collections
import concurrent.futures
import filecmp
import functools
import glob
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "dev")]
import console      # noqa: E402
import ledger       # noqa: E402
from console import BadInput    # noqa: E402
import test as runner       # noqa: E402, dev/test.py

KNOWN = os.path.join(ROOT, "test/mutations/known.tsv")
RESULTS = os.path.join(ROOT, "dev/results/mutations.csv")
# seconds: for a build, or a test without a fault; beside five times as long, for one with a fault; of processor time,
# for a drawn fault
LIMIT, SPARE, MOST = 7200, 120, 900
MEMORY = 8 << 30                # bytes of data that a process may have, so that a fault cannot exhaust the machine's
SO_FAR = " so far"              # at the end of what came of a fault that the rest of the tests have yet to meet
DRAWN = ["llmc", "train_gpt2.cu", "train_bert.cu", "data", "scripts", "dev/hf"]
TOOLS = ("test_mutate", "test_make", "test_lint", "test_gpu_check")     # do not test what is drawn

# tests: of known.tsv, each PROGRAM or FILE.py, what it is to run after a colon, what else is built after plus signs
Fault = collections.namedtuple("Fault", "id file line before after tests operator", defaults=["", ""])


# ----------------------------------------------------------------------------------------------------------
# the faults

def source(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", newline="") as f:
        return f.read()


def read_known(path, cheap=False):
    """the faults of a table: id, file, before, after, tests, "ci" for cheap ones, why; \\n stands for a line's end"""
    faults = []
    with open(path, encoding="utf-8") as f:
        lines = [line for line in f.read().splitlines() if line and not line.startswith("#")]
    for line in lines:
        row = [cell.replace("\\n", "\n") for cell in line.split("\t")]
        if len(row) != 7:
            raise BadInput(f"{path}: {line[:40]}: expected 7 cells, got {len(row)}")
        name, file, before, after, tests, ci, _ = row
        text = source(file)
        if text.count(before) != 1:
            raise BadInput(f"{path}: {name}: expected its text once in {file}, got {text.count(before)}")
        if ci or not cheap:
            faults.append(Fault(name, file, text.count("\n", 0, text.index(before)) + 1, before, after, tests))
    return faults


def exchange(words):
    """each of these words becomes the one beside it; a word that stands by itself goes"""
    table = {}
    for pair in words:
        table |= dict(zip(pair, reversed(pair))) if len(pair) == 2 else {pair[0]: ""}
    return "|".join(re.escape(word) for word in sorted(table, key=len, reverse=True)), lambda m: table[m[0]]


def swapped(m):
    """f(b, a) of f(a, b); None of a declaration, whose arguments are two words each, and of a part of a list"""
    parts = any(text.count(a) != text.count(b) for text in m.groups()[1:] for a, b in ("[]", "{}"))
    return None if parts or re.search(r"\w[*&]* [*&]*\w", m[2] + "," + m[3]) else f"{m[1]}{m[3]}, {m[2]}"


def deleted(m):
    """nothing, as a statement of C++ or of Python; None of a part of a statement"""
    return m[1] + (m[2] or "pass") if m[0].count("(") == m[0].count(")") else None


# name: what it finds in a line of code, and what that becomes, None where it does not change
OPERATORS = {
    "off by one": exchange([(" < ", " <= "), (" > ", " >= "), (" + 1",), (" - 1",)]),
    "sign": exchange([(" + ", " - "), (" += ", " -= "), (" == ", " != "), (" && ", " || "), (" and ", " or "), ("!",)]),
    "arguments": (r"\b(?<!def )(?!i?(?:min|max)\()(\w+\()([^\s(),][^(),]*), ([^\s(),][^(),]*)(?=[,)])", swapped),
    "constant": (r"(?<![\w.])\d+(?![\w.])", lambda m: str(int(m[0]) + 1)),
    "statement": (r"^(\s+)(?!(?:return|yield)\b)(?:[*\w.\->\[\]+]+(?: [-+*/|&]?= |\()[^;]*(;)|"
                  r"[\w.\[\]]+(?:\(.*\)| [-+*/|]?= [^;{]*[^;{(\[,\\]))$", deleted),
}


def mutated(operator, line, rng):
    """the line with one fault, None where the operator finds nothing; what a string or a comment says stays"""
    texts = re.findall(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", line)
    for n, text in enumerate(texts):                                    # each string as one letter
        line = line.replace(text, chr(0xE000 + n), 1)
    code, rest = re.fullmatch(r"(.*?)(\s*(?:(?://|(?<=  )#|\").*)?)", line).groups()
    pattern, change = OPERATORS[operator]
    found = [(m, new) for m in re.finditer(pattern, code) if (new := change(m)) not in (None, m[0])]
    if not found:
        return None
    m, new = rng.choice(found)
    changed = code[:m.start()] + new + code[m.end():] + rest
    return re.sub("[\ue000-\uf8ff]", lambda letter: texts[ord(letter[0]) - 0xE000], changed)


def code_lines(path):
    """(number, line) of what is code: not a comment, and not a line that only words what is printed"""
    quoted = False
    for number, line in enumerate(source(path).split("\n"), 1):
        comment = quoted or line.lstrip().startswith(("//", "#", '"""'))
        if line.count('"""') % 2 == 1:
            comment, quoted = True, not quoted
        if line.strip() and not comment and not re.search(r"\b(die|say|\w*printf|print)\(|^\s*f?\"", line):
            yield number, line


def draw(seed, count):
    """faults that depend only on the seed and the sources"""
    files = subprocess.run(["git", "ls-files", *DRAWN], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    lines = [(path, number, line) for path in sorted(files.stdout.split())
             if path.endswith((".h", ".cuh", ".cu", ".py")) for number, line in code_lines(path)]
    rng, faults = random.Random(seed), []
    rng.shuffle(lines)
    for path, number, line in lines:
        for operator in rng.sample(sorted(OPERATORS), len(OPERATORS)):
            changed = mutated(operator, line, rng)
            if changed is not None and len(faults) < count:
                faults.append(Fault(f"{seed}, {len(faults)}", path, number, line, changed, operator=operator))
                break
    return faults


# ----------------------------------------------------------------------------------------------------------
# copies of the sources, and what their tests say

class Tree:
    """a copy of the sources, in which make and the tests run"""
    stopped, running = False, set()             # of all: whether they end, their processes

    def __init__(self, name):
        self.path, self.built = os.path.join(ROOT, "build", "mutations", name), set()
        self.spent = 0                                  # seconds of processors
        tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True,
                                 cwd=ROOT, stdout=subprocess.PIPE).stdout.decode().split("\0")
        for name in filter(None, tracked):
            here, copy = os.path.join(ROOT, name), os.path.join(self.path, name)
            if os.path.isfile(here) and not (os.path.isfile(copy) and filecmp.cmp(here, copy, shallow=False)):
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy(here, copy)                 # only what differs, so that make builds only what it must
        for libraries in ("venv", "pytorch"):           # where tests look for them
            there = os.path.join(self.path, "build", libraries)
            os.makedirs(os.path.dirname(there), exist_ok=True)
            if os.path.isdir(here := os.path.join(ROOT, "build", libraries)) and not os.path.lexists(there):
                os.symlink(here, there)

    def command(self, words, limit, **environment):
        """(exit code, None where it took too long; what it printed)"""
        # a short path for temporary files: tests look at the width of what is printed
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, tempfile.TemporaryFile() as out:
            environment = {**runner.ENVIRONMENT, "CCACHE_NOHASHDIR": "1", **os.environ, **environment,
                           "TMPDIR": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
            p = subprocess.Popen(["prlimit", f"--data={MEMORY}", *words], cwd=self.path, stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=out, env=environment, **console.OWN_GROUP)
            Tree.running.add(p.pid)
            late, begin = threading.Timer(limit, end_group, [p.pid]), time.monotonic()
            late.start()
            _, status, usage = os.wait4(p.pid, 0)
            late.cancel()
            p.returncode = os.waitstatus_to_exitcode(status)
            code = p.returncode if time.monotonic() < begin + limit else None
            end_group(p.pid)                            # what it has started and left behind
            Tree.running.discard(p.pid)
            self.spent += usage.ru_utime + usage.ru_stime
            if Tree.stopped:
                raise console.Interrupted
            out.seek(0)
            return code, out.read().decode(errors="replace")

    def make(self, *words, **environment):
        """without the name of the commit, so that the same code is the same program"""
        return self.command(["make", f"-j{runner.JOBS}", *words], LIMIT, **environment,
                            GIT_CEILING_DIRECTORIES=os.path.dirname(self.path))

    def build(self, names, **environment):
        """whether they compile; make takes a second even where it finds nothing to do"""
        missing = [name for name in names if name not in self.built]
        if missing and self.make(*missing, **environment)[0] != 0:
            return False
        self.built.update(missing)
        return True

    def code(self, program):
        """a program without its debug information, which names the directory"""
        with tempfile.NamedTemporaryFile() as out:
            subprocess.run(["strip", "--strip-debug", "-o", out.name, os.path.join(self.path, program)], check=True)
            return console.read_bytes(out.name)

    def run(self, test, limit):
        """(exit code, None where it did not end; what it printed, what dev/test.py reads in that)"""
        program, _, what = test.partition("+")[0].partition(":")
        words, read = runner.command_of(program, [])
        stop = ["-f"] if program.endswith(".py") else []       # at the first failure
        code, text = self.command([*words, *stop, *filter(None, [what])], limit)
        return code, text, read(text, code)

    def put(self, name, text):
        if not name.endswith(".py"):
            self.built.clear()
        with open(os.path.join(self.path, name), "w", encoding="utf-8", newline="") as f:
            f.write(text)


def end_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def targets(test):
    """what make builds for it"""
    return [name for name in re.sub(r":[^+]*", "", test).split("+") if not name.endswith(".py")]


def name_of(test):
    return runner.name(re.match(r"[^:+]*", test)[0])


class Planter:
    def __init__(self):
        self.clean, self.green, self.errors, self.lock = Tree("clean"), {}, set(), threading.Lock()
        self.trees = queue.SimpleQueue()
        for n in range(runner.JOBS):
            self.trees.put(Tree(f"tree{n}"))

    @functools.lru_cache(maxsize=None)
    def built(self, test):
        """whether what the test needs compiles without a fault"""
        with self.lock:
            return self.clean.build(targets(test))

    def passes(self, test):
        """its seconds without a fault, None where it does not pass"""
        if test not in self.green:
            begin = time.monotonic()
            code, _, result = self.clean.run(test, LIMIT) if self.built(test) else (1, "", None)
            self.green[test] = time.monotonic() - begin if code == 0 and result and result.passed else None
            if self.green[test] is None:
                print(f"error: {test}: expected tests that pass without a fault, got {result}, exit code {code}")
                for why in result.skipped if result else ():
                    print(f"skipped: {test} | {why}")
        if self.green[test] is None:
            self.errors.add(test)
        return self.green[test]

    def red(self, tree, test):
        """What says that the test sees the fault, None where it does not. Only a test that fails is also run without
        the fault; of a script's tests, the first that failed."""
        limit = SPARE + 5 * (self.green.get(test) or 0)
        code, text, result = tree.run(test, limit)
        if code is None or code == 0 and not (result and result.passed):
            if self.passes(test) is None:
                return None
            if SPARE + 5 * self.green[test] > limit:
                code, text, _ = tree.run(test, SPARE + 5 * self.green[test])
        if not code:
            return "did not end" if code is None else None
        said = re.search(r"^(?:FAIL|ERROR): (.*)|^(\S+:\d+): FAILED|^(\S.*?) +FAILED|^(.*[Ee]rror.*)", text, re.M)
        said = next(filter(None, said.groups())) if said else f"exit code {code}"
        first = re.search(r"\(__main__\.([\w.]+)", said)
        if first and ":" not in test:
            test = test.replace(".py", f".py:{first[1]}", 1)
        return said[:100] if self.passes(test) is not None else None

    def tests_of(self, fault):
        """known.tsv's, else all that the file reaches: as the top of this file says"""
        if fault.tests:
            return fault.tests.split()
        base = os.path.basename(fault.file).partition(".")[0]
        if fault.file.endswith(".py"):
            names = naming(base)
            found = [t for t in self.tests() if ".py" in t and names.search(source(t.partition("+")[0]))]
        else:
            found = [test for test in self.tests() if any(fault.file in self.sources(t) for t in targets(test))]
        return sorted(found, key=functools.partial(self.turn, fault.file))

    def turn(self, file, test):
        """the place of a test in the order"""
        seconds, kills = runner.SHORT.get(name_of(test), (0, 0))
        near = [f"test_{os.path.basename(name).partition('.')[0]}" in test for name in (file, os.path.dirname(file))]
        return (not near[0], not near[1], test.split("+")[0] in runner.WAITS,
                -kills / (1 + seconds), test.startswith("test/"), test)

    @functools.lru_cache(maxsize=None)
    def tests(self):
        """each test of make test and make test-long, with the trainers that it starts"""
        started = runner.TRAINERS + runner.OTHER_TRAINERS + runner.COMM_PROGRAMS + runner.SIMT_TRAINERS
        tests = []
        for program in runner.plan("test", [])[0] + runner.plan("test-long", [])[0]:
            file = program if program.endswith(".py") else f"test/{name_of(program)}.cu"
            text = source(file) if program.endswith(".py") or "/programs/" in file else ""
            needed = [name for name in started if name in text]
            if re.search(r"TRAINER|\btrain_(gpt2|bert)\b", text) or "/programs/" in file:
                needed += runner.TRAINERS
            if file.startswith("test/simt/") and program.endswith(".py"):
                needed += runner.SIMT_TRAINERS
            if not any(tool in program for tool in TOOLS):
                tests.append("+".join(dict.fromkeys([program, *needed])))
        return tests

    @functools.lru_cache(maxsize=None)
    def rules(self):
        """{what make builds: the words of its command that it is built of}"""
        lines = self.clean.make("-nB", *{t for test in self.tests() for t in targets(test)})[1].split("\n")
        return {m[1]: [word for word in line.split() if re.search(r"\.(o|c|cu|cuh|h)$", word)] for line in lines
                if (m := re.search(r" -o (\S+)(?<!\.text)(?:\s|$)", line))}

    @functools.lru_cache(maxsize=None)
    def sources(self, target):
        """the files that it is built from"""
        found, left = set(), [target]
        while left:
            if (name := left.pop()) in found:
                continue
            found.add(name)
            left += self.rules().get(name, [])
            if os.path.isfile(os.path.join(ROOT, name)) and re.search(r"\.(c|cu|cuh|h)$", name):
                for included in re.findall(r'^\s*#\s*include [<"](.*)[>"]', source(name), re.M):
                    places = (os.path.normpath(os.path.join(folder, included))
                              for folder in (os.path.dirname(name), "", "test/simt"))
                    left += [place for place in places if os.path.isfile(os.path.join(ROOT, place))][:1]
        return found

    def verdict(self, tree, fault, before):
        """(what comes of it, the test that says so, what that test said). before: what came of a drawn fault in the
        tests of make test, "" where it has yet to meet them"""
        text, begin, met = source(fault.file), tree.spent, False
        start = sum(len(line) + 1 for line in text.split("\n")[:fault.line - 1])
        changed = text[:start] + text[start:].replace(fault.before, fault.after, 1)
        tests = [t for t in self.tests_of(fault) if fault.tests or (name_of(t) in runner.SHORT) == (not before)]
        tree.put(fault.file, changed)
        try:
            if fault.file.endswith(".py"):
                compile(changed, fault.file, "exec")
            for test in tests:
                if before and tree.spent - begin > MOST:
                    return "out of time", test, ""
                if not self.built(test):
                    self.passes(test)
                    continue
                if not tree.build(targets(test), CCACHE_READONLY="1"):
                    return "does not compile", "", ""
                programs = [] if fault.file.endswith(".py") else targets(test)
                if programs and all(self.clean.code(p) == tree.code(p) for p in programs):
                    continue
                if (said := self.red(tree, test)) is not None:
                    return "killed", name_of(test), said
                met = met or test not in self.errors
        except SyntaxError:
            return "does not compile", "", ""
        finally:
            tree.put(fault.file, text)
        met = met or before == "survived" + SO_FAR
        if not met and self.errors & set(tests):
            return "no result", "", ""
        unmet = "changes no program" if tests or before.startswith("changes") else "reached by no test"
        return ("survived" if met else unmet) + SO_FAR * (not before and not fault.tests), "", ""


def naming(base):
    """a pattern that finds in a test what it imports or runs: this script, or one that imports it"""
    scripts = {p: source(p) for p in glob.glob("*/**/*.py", root_dir=ROOT, recursive=True)
               if re.match(r"scripts|data|dev/", p)}
    names, more = set(), {base}
    while more:
        names |= more
        word = rf"(?:{'|'.join(map(re.escape, names))})\b"
        pattern = re.compile(rf"['\"/ ]{word}\.py\b|^\s*(?:import .*\b{word}|from {word} import)|"
                             rf"import_module\(['\"]{word}", re.M)
        more = {os.path.basename(p)[:-3] for p, text in scripts.items() if pattern.search(text)} - names
    return pattern


# ----------------------------------------------------------------------------------------------------------
# results

def row_of(fault, commit, result, test, said, seconds):
    seed, number = fault.id.split(", ")
    return {"seed": seed, "number": number, "commit": commit, "file": fault.file, "line": str(fault.line),
            "operator": fault.operator, "before": fault.before.strip(), "after": fault.after.strip(), "result": result,
            "test": test, "said": console.one_line(said), "make_test": "yes" if test in runner.SHORT else "",
            "seconds": f"{seconds:.0f}", "equivalent": ""}


def results(faults):
    """{id: the row} of those that have been planted"""
    rows = {f"{row['seed']}, {row['number']}": row for row in ledger.read(RESULTS)}
    for fault in faults:
        row = rows.get(fault.id)
        drawn = fault.file, fault.before.strip(), fault.after.strip()
        if row and drawn != (row["file"], row["before"], row["after"]):
            raise BadInput(f"{RESULTS}: {fault.id}: expected {row['before']} in {row['file']}, got {drawn[1]} in "
                           f"{drawn[0]}: the sources have changed since {row['commit']}; take another seed")
    return {fault.id: rows[fault.id] for fault in faults if fault.id in rows}


def keep(row):
    """in the place of an earlier row of this fault"""
    with console.locked(os.path.dirname(RESULTS), wait=True):
        others = [r for r in ledger.read(RESULTS) if (r["seed"], r["number"]) != (row["seed"], row["number"])]
        ledger.write(RESULTS, others + [row], "faults that mutate.py drew by a seed")


def print_scores(rows):
    rows = [row for row in rows if row["result"] != "does not compile" and not row["equivalent"]]
    killed = [row for row in rows if row["result"] == "killed"]
    for row in rows:
        if not (row["result"] == "killed" and row["make_test"]):
            print(f"{row['seed']}, {row['number']}: {row['result']} {row['test']}  {row['file']}:{row['line']}\n"
                  f"- {row['before']}\n+ {row['after']}")
    for what, seen in ("make test", [row for row in killed if row["make_test"]]), ("all tests", killed):
        print(f"seen by {what}: {len(seen)} of {len(rows)}" + f", {100 * len(seen) / len(rows):.0f} %" * bool(rows))


def plant(planter, faults, before):
    """yields (fault, what comes of it, the test that says so, what that test said, seconds of processors); before: what
    came of each in the tests of make test, by its id"""
    def work(fault):
        tree = planter.trees.get()
        spent = tree.spent
        try:
            return fault, *planter.verdict(tree, fault, before.get(fault.id, "")), tree.spent - spent
        finally:
            planter.trees.put(tree)

    with concurrent.futures.ThreadPoolExecutor(runner.JOBS) as pool:
        try:
            for done in concurrent.futures.as_completed([pool.submit(work, fault) for fault in faults]):
                yield done.result()
        except BaseException:
            Tree.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for pid in list(Tree.running):
                end_group(pid)
            raise
    if planter.errors:
        raise BadInput(f"no result: {', '.join(sorted(planter.errors))}")


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("--seed", type=int, help="draw the faults instead")
    p.add_argument("--count", type=console.positive, default=20, help="number of faults drawn [20]")
    p.add_argument("--ci", action="store_true", help="3 cheap ones of the list, drawn by the commit")
    p.add_argument("--only", nargs="+", default=[], metavar="ID", help="only these")
    args = p.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)    # which a job in the background ignores; tests must not
    os.chdir(ROOT)
    drawn, commit = args.seed is not None, ledger.commit()
    faults = draw(args.seed, args.count) if drawn else read_known(KNOWN, args.ci)
    if args.ci:
        faults = random.Random(commit.rstrip("+")).sample(faults, min(3, len(faults)))
    if unknown := set(args.only) - {f.id for f in faults}:
        raise BadInput(f"--only: there is no fault {', '.join(sorted(unknown))}")
    faults = [f for f in faults if f.id in (args.only or [f.id])]
    rows = results(faults) if drawn else {}
    so_far = lambda: {name: row["result"] for name, row in rows.items() if row["result"].endswith(SO_FAR)}
    planter, counts, error = Planter(), collections.Counter(), None
    for rest in (False, True)[:1 + drawn]:
        before, done = so_far() if rest else {}, collections.Counter()
        chosen = [f for f in faults if (f.id in before if rest else f.id not in rows)]
        try:
            for fault, result, test, said, seconds in plant(planter, chosen, before):
                done[result] += 1
                by = f" by {test}: {said}" * (result == "killed")
                print(f"[{done.total()}/{len(chosen)}] {fault.id}, {fault.file}: {result}{by}", flush=True)
                if drawn and result != "no result":
                    was = rows.get(fault.id, {"commit": commit, "seconds": 0})
                    rows[fault.id] = row_of(fault, was["commit"], result, test, said, seconds + float(was["seconds"]))
                    keep(rows[fault.id])
                elif not drawn and result != "killed":
                    print(f"  {fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}",
                          flush=True)
        except BadInput as e:
            error = e
        counts.update({result: n for result, n in done.items() if not result.endswith(SO_FAR)})
    if drawn:
        print_scores(rows.values())
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if error:
        raise error
    missed = len(faults) - counts["killed"] if args.ci else counts["survived"]
    if args.ci:
        print(f"{counts['killed']} passed, {missed} failed")
    return 1 if missed and not drawn else 0


if __name__ == "__main__":
    console.run(main)
