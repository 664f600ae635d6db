#!/usr/bin/env python3
"""mutate.py -- plants faults in a copy of the sources, one at a time, and says which of them no test sees.

    make mutations                                  the faults of known.tsv, which tests are known to see
    test/mutations/mutate.py --only ID...           some of them
    test/mutations/mutate.py --seed 1 --count 30    30 faults drawn at random: every line of code is as likely
    test/mutations/mutate.py --ci                   3 of known.tsv's cheap ones, drawn by the commit

`killed`: a test fails, or takes several times as long as without the fault. `survived`: all pass, so a test is missing,
or the change changes nothing. `reached by no test`: no test program includes the file. What does not compile does not
count. Without faults every test must pass, and some must run; anything else is an error. known.tsv names the tests of
its faults; a drawn fault meets the programs that include its file, or the scripts' tests that name it, those first that
have killed most in a second (SHORT in dev/test.py), for at most 5 minutes. With --minutes a run ends after so long; no
result is kept. The exit code is 1 if a known fault survived, 2 after an error."""
import collections
import filecmp
import functools
import glob
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "dev")]
import console      # noqa: E402
import ledger       # noqa: E402
from console import BadInput    # noqa: E402
import test as runner       # noqa: E402, dev/test.py

KNOWN = os.path.join(ROOT, "test/mutations/known.tsv")
# seconds: for a build, or a test without a fault; beside five times as long, for one with a fault; for a drawn fault
LIMIT, SPARE, MOST = 7200, 20, 300
DRAWN = ["llmc", "train_gpt2.cu", "train_bert.cu", "data", "scripts", "dev/hf"]
TOOLS = ("test_mutate", "test_make", "test_lint", "test_gpu_check")     # do not test what is drawn

# tests: of known.tsv, each PROGRAM or FILE.py, what it is to run after a colon, what else is built after plus signs
Fault = collections.namedtuple("Fault", "id file line before after tests")


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
    """f(b, a) of f(a, b); None of a declaration, whose arguments are two words each"""
    return None if re.search(r"\w[*&]* [*&]*\w", m[2] + "," + m[3]) else f"{m[1]}{m[3]}, {m[2]}"


def deleted(m):
    """nothing, as a statement of C++ or of Python; None of a part of a statement"""
    return m[1] + (m[2] or "pass") if m[0].count("(") == m[0].count(")") else None


# name: what it finds in a line of code, and what that becomes, None where it does not change
OPERATORS = {
    "off by one": exchange([(" < ", " <= "), (" > ", " >= "), (" + 1",), (" - 1",)]),
    "sign": exchange([(" + ", " - "), (" += ", " -= "), (" == ", " != "), (" && ", " || "), (" and ", " or "), ("!",)]),
    "arguments": (r"\b(?!i?(?:min|max)\()(\w+\()([^\s(),][^(),]*), ([^\s(),][^(),]*)(?=[,)])", swapped),
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
                faults.append(Fault(f"seed {seed}, {len(faults)}: {operator}", path, number, line, changed, ""))
                break
    return faults


# ----------------------------------------------------------------------------------------------------------
# a copy of the sources, and what its tests say

class Tree:
    def __init__(self, path, minutes):
        self.path, self.end, self.green, self.errors = path, time.monotonic() + 60 * minutes, {}, []
        tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True,
                                 cwd=ROOT, stdout=subprocess.PIPE).stdout.decode().split("\0")
        for name in filter(None, tracked):
            here, copy = os.path.join(ROOT, name), os.path.join(path, name)
            if os.path.isfile(here) and not (os.path.isfile(copy) and filecmp.cmp(here, copy, shallow=False)):
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy(here, copy)                 # only what differs, so that make builds only what it must

    def command(self, words, limit):
        """(exit code, None where it took too long; what it printed)"""
        if time.monotonic() > self.end:
            raise console.Interrupted
        # a short path for temporary files: tests look at the width of what is printed
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, tempfile.TemporaryFile() as out:
            environment = {**runner.ENVIRONMENT, "CCACHE_NOHASHDIR": "1", **os.environ, "TMPDIR": scratch}
            p = subprocess.Popen(words, cwd=self.path, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                 env={**environment, "PYTHONDONTWRITEBYTECODE": "1"}, **console.OWN_GROUP)
            try:
                code = p.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:                                    # what it has started and left behind ends too
                try:
                    os.killpg(p.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                p.wait()
            out.seek(0)
            return code, out.read().decode(errors="replace")

    def make(self, test):
        """whether what the test needs compiles"""
        program, *needed = re.sub(r":[^+]*", "", test).split("+")
        targets = [name for name in (program, *needed) if not name.endswith(".py")]
        return not targets or self.command(["make", f"-j{runner.JOBS}", "CPPFLAGS=-w", *targets], LIMIT)[0] == 0

    def run(self, test, limit):
        """(exit code, None where it did not end; what dev/test.py reads in what it prints)"""
        program, _, what = test.partition("+")[0].partition(":")
        words, read = runner.command_of(program, [])
        code, text = self.command([*words, *filter(None, [what])], limit)
        return code, read(text, code)

    def passes(self, test):
        """its seconds without a fault, None where it does not pass"""
        if test not in self.green:
            built, begin, self.green[test] = self.make(test), time.monotonic(), None
            code, result = self.run(test, LIMIT) if built else (1, None)
            if code == 0 and result and result.passed:
                self.green[test] = time.monotonic() - begin
            else:
                self.errors.append(test)
                print(f"error: {test}: expected tests that pass without a fault, got {result}, exit code {code}")
                for why in result.skipped if result else ():
                    print(f"skipped: {test} | {why}")
        return self.green[test]

    def tests_of(self, fault):
        """known.tsv's, else those that include the file or name it, those first that have killed most in a second"""
        if fault.tests:
            return fault.tests.split()
        if fault.file.endswith(".py"):
            name = re.compile(rf"\b{os.path.basename(fault.file)[:-3]}\b")
            found = [p for p in glob.glob("test/*/test_*.py", root_dir=ROOT) if name.search(source(p))]
        else:
            found = [p for p, objects in self.linked().items() if any(
                fault.file in map(os.path.normpath, source(d).split()) for o in objects
                if os.path.exists(d := os.path.join(self.path, o[:-2] + ".d")))]
        rate = {name: kills / (1 + seconds) for name, (seconds, kills) in runner.SHORT.items()}
        return sorted((p for p in found if not any(tool in p for tool in TOOLS)),
                      key=lambda p: -rate.get(runner.name(p), 0))

    @functools.lru_cache(maxsize=None)
    def linked(self):
        """{program: the objects that make links it from}"""
        programs = [p for p in runner.plan("test", [])[0] if not p.endswith(".py")]
        lines = self.command(["make", "-nB", "CPPFLAGS=-w", *programs], LIMIT)[1].split("\n")
        return {m[1]: re.findall(r"build/\S+\.o", line) for line in lines
                if (m := re.search(r" -o (build/\S+)(?<!\.o)(?:\s|$)", line)) and m[1] in programs}

    def verdict(self, fault):
        """what comes of it"""
        path, text, begin = os.path.join(self.path, fault.file), source(fault.file), time.monotonic()
        start = sum(len(line) + 1 for line in text.split("\n")[:fault.line - 1])
        changed = text[:start] + text[start:].replace(fault.before, fault.after, 1)
        tests = [test for test in self.tests_of(fault) if self.passes(test) is not None]
        with open(path, "w", encoding="utf-8", newline="") as f:
            f.write(changed)
        try:
            if path.endswith(".py"):
                compile(changed, path, "exec")
            for test in tests:
                if not self.make(test):
                    return "does not compile"
                code, _ = self.run(test, SPARE + 5 * self.green[test])
                if code != 0:
                    how = "" if code else ", which did not end"
                    return f"killed by {os.path.basename(test.partition(':')[0])}{how}"
                if not fault.tests and time.monotonic() - begin > MOST:
                    break
        except SyntaxError:
            return "does not compile"
        finally:
            with open(path, "w", encoding="utf-8", newline="") as f:
                f.write(text)
        if fault.tests and not tests:
            return "no result"
        return "survived" if tests else "reached by no test"


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("--seed", type=int, help="draw the faults instead")
    p.add_argument("--count", type=console.positive, default=20, help="number of faults drawn [20]")
    p.add_argument("--ci", action="store_true", help="3 cheap ones of the list, drawn by the commit")
    p.add_argument("--only", nargs="+", default=[], metavar="ID", help="only these")
    p.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    args = p.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)    # which a job in the background ignores; tests must not
    os.chdir(ROOT)
    faults = draw(args.seed, args.count) if args.seed is not None else read_known(KNOWN, args.ci)
    if args.ci:
        faults = random.Random(ledger.commit().rstrip("+")).sample(faults, min(3, len(faults)))
    if unknown := set(args.only) - {f.id for f in faults}:
        raise BadInput(f"--only: there is no fault {', '.join(sorted(unknown))}")
    faults = [f for f in faults if f.id in (args.only or [f.id])]
    tree, counts = Tree(os.path.join(ROOT, "build", "mutations", "tree"), args.minutes), collections.Counter()
    try:
        if args.seed is not None:                       # .d files say who includes what
            tree.command(["make", "-k", f"-j{runner.JOBS}", "CPPFLAGS=-w",
                          *(p for p in runner.plan("test", [])[0] if not p.endswith(".py"))], LIMIT)
        for fault in faults:
            result = tree.verdict(fault)
            counts[re.match(r"killed|.*", result)[0]] += 1
            print(f"[{counts.total()}/{len(faults)}] {fault.id}, {fault.file}: {result}", flush=True)
            if result in ("survived", "reached by no test"):
                print(f"  {fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}", flush=True)
    except console.Interrupted:
        print(f"{len(faults) - counts.total()} faults are left")
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if tree.errors:
        raise BadInput(f"no result: {', '.join(tree.errors)}")
    missed = len(faults) - counts["killed"] if args.ci else counts["survived"]
    if args.ci:
        print(f"{counts['killed']} passed, {missed} failed")
    return 1 if missed and args.seed is None else 0


if __name__ == "__main__":
    console.run(main)
