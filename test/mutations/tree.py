"""tree.py -- a copy of the sources with many faults at once, what its tests reach, and what a test says to a fault.

In C++ a fault is an expression that mut.h switches; what can be none (a constant, a table, a declaration) is planted
and built by itself, and so is what changes Python."""
import collections
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import faults as planting
from console import BadInput
import test as runner       # dev/test.py

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 3600                # seconds for a build, or for a case without a fault
SPARE = 20                  # with a fault a case may take five times as long, and this
DRIVE = {"build/train_gpt2": "build/test/programs/test_run", "build/train_bert": "build/test/programs/test_bert_run"}
MUT_MAX = 4096              # mut.h's too

# What runs at once: a Catch2 case, a test of the emulated GPU, a class of a script. `what` selects it in its program.
Case = collections.namedtuple("Case", "program what")


def case_of(text):
    """(Case, [what else make builds]) of PROGRAM or FILE.py, what it is to run after a colon, targets after plusses"""
    name, *needed = text.split("+")
    program, _, what = name.partition(":")
    return Case(program, what), needed


class Tree:
    def __init__(self, path, root=planting.ROOT):
        self.path, self.root = path, root
        tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                                 check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
        for name in filter(None, tracked):
            if os.path.isfile(os.path.join(root, name)):
                self.write(name, self.source(name))
                shutil.copymode(os.path.join(root, name), os.path.join(path, name))
        self.log = path + ".log"
        self.reached = path + ".reached"
        self.planted, self.spans = {}, {}       # n -> Fault; n -> (its file, the first and the last line of its place)

    def source(self, name):
        with open(os.path.join(self.root, name), "rb") as f:
            return f.read()

    def write(self, name, data):
        """only where it changes, so that make builds only what it must"""
        target = os.path.join(self.path, name)
        if os.path.isfile(target):
            with open(target, "rb") as f:
                if f.read() == data:
                    return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as f:
            f.write(data)

    def plant(self, numbered, whole=False):
        """faults {n: Fault} as expressions, or `whole`, as they are. Returns those that cannot be planted so."""
        files, left = collections.defaultdict(list), []
        for n, fault in numbered.items():
            text = self.source(fault.file).decode()
            start, end, new = planting.place(text, fault)
            made = (start, end, new) if whole else planting.schema(text, fault, n)
            if made is None or any(made[0] < b and a < made[1] for a, b, *_ in files[fault.file]):
                left.append(n)
                continue
            files[fault.file].append((*made, n))
        for name in {f.file for f in self.planted.values()} - set(files):
            self.write(name, self.source(name))
        self.planted, self.spans = {}, {}
        for name, places in files.items():
            text = self.source(name).decode()
            for a, b, new, n in sorted(places, reverse=True):
                self.spans[n] = (name, text.count("\n", 0, a) + 1, text.count("\n", 0, b) + 1)
                self.planted[n] = numbered[n]
                text = text[:a] + new + text[b:]
            header = "" if whole else f'#include "{os.path.join(HERE, "mut.h")}"\n#line 1\n'
            self.write(name, (header + text).encode())
        return left

    @contextlib.contextmanager
    def changed(self, fault):
        """a file of Python with a fault, and without"""
        text = self.source(fault.file).decode()
        start, end, new = planting.place(text, fault)
        self.write(fault.file, (text[:start] + new + text[end:]).encode())
        try:
            yield
        finally:
            self.write(fault.file, text.encode())

    def command(self, words, limit, **environment):
        """(0, an exit code, or None where it took too long; what it printed, which goes to the log too)"""
        scratch = tempfile.mkdtemp()                    # a short path: tests look at the width of what is printed
        environment = {**runner.ENVIRONMENT, "CCACHE_NOHASHDIR": "1", **os.environ, "TMPDIR": scratch, **environment}
        with open(self.log, "ab") as log:
            log.write(f"\n$ {' '.join(words)}\n".encode())
            log.flush()
            before = log.tell()
            p = subprocess.Popen(words, cwd=self.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 env=environment, start_new_session=True)
        try:
            code = p.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:                                        # what it has started and left behind ends too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            shutil.rmtree(scratch, ignore_errors=True)
        with open(self.log, "rb") as f:
            f.seek(before)
            return code, f.read().decode(errors="replace")

    # ------------------------------------------------------------------------------------------------------
    # building

    def named(self, text):
        """the faults on the lines of a compiler's errors; else on those that it names; else those closest to an error:
        ([these three])"""
        places = re.findall(r"^(?:In file included from )?([\w./-]+):(\d+)[:,](.*)", text, re.M)
        places = [(os.path.normpath(path), int(line), "error:" in said) for path, line, said in places]
        levels = [{n for n, (name, first, last) in self.spans.items() for path, line, error in places
                   if error >= wanted and path.endswith(name) and first <= line <= last} for wanted in (True, False)]
        near = [min((abs(line - first), n) for n, (name, first, _) in self.spans.items() if path.endswith(name))
                for path, line, error in places if error and any(path.endswith(s[0]) for s in self.spans.values())]
        return [*levels, {n for _, n in near}]

    def make(self, targets):
        """(whether make builds them, what it printed); without warnings, so that only errors name lines"""
        code, text = self.command(["make", "-k", "CPPFLAGS=-w", *targets], LIMIT) if targets else (0, "")
        if code is None:
            raise BadInput(f"{' '.join(targets)}: expected a build within {LIMIT} s; see {self.log}")
        return code == 0, text

    def parse(self, sources):
        """what the compiler says to these sources, {object: source}, before anything is compiled"""
        said = ""
        for target, source in dict(sources).items():
            lines = subprocess.run(["make", "-n", "-W", source, "CPPFLAGS=-w", target], cwd=self.path, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.replace("\\\n", " ")
            for line in lines.split("\n"):
                if f" -c {source} " in line:
                    words = [w for w in line.split()[:-2] if w not in ("ccache", "-MMD", "-MP")]
                    words[words.index("-c")] = "-fsyntax-only"
                    code, text = self.command([*words, "-fmax-errors=0"], LIMIT)
                    said += text if code else ""
        return said

    def build(self, numbered, targets, sources=()):
        """plants these faults as expressions and builds. Returns those that are none, or do not compile as such."""
        left = set(self.plant(numbered))
        while True:
            said = self.parse(sources)
            if not said:
                good, said = self.make(targets)
                if good:
                    return left
            wrong = next(filter(None, self.named(said)), None)
            if not wrong:
                raise BadInput(f"expected tests that compile without a fault; see {self.log}")
            left |= wrong
            self.plant({n: f for n, f in numbered.items() if n not in left})

    def refused(self, numbered, sources):
        """of faults that are planted as they are: those that do not compile"""
        left = set()
        for n in (n for n, f in numbered.items() if f.file.endswith(".py")):
            try:
                with self.changed(numbered[n]), open(os.path.join(self.path, numbered[n].file), encoding="utf-8") as f:
                    compile(f.read(), "", "exec")
            except (SyntaxError, ValueError):
                left.add(n)
        cpp = {n: f for n, f in numbered.items() if not f.file.endswith(".py")}
        while cpp:
            self.plant(cpp, whole=True)
            wrong = self.named(self.parse(sources))[0]
            if not wrong:                               # what is left may still not compile, as its own build says
                break
            left |= wrong
            cpp = {n: f for n, f in cpp.items() if n not in wrong}
        return left

    def depends(self, name):
        """programs of C++ that include this file, those that include least first; then what drives the trainers"""
        found = []
        for path in glob.glob(os.path.join(self.path, "build", "**", "*.d"), recursive=True):
            program = os.path.relpath(path, self.path)[:-len(".d")]
            with open(path, encoding="utf-8") as f:
                words = {os.path.normpath(word) for word in f.read().replace("\\\n", " ").split()}
            if name in words:
                found.append((program in DRIVE, len(words), DRIVE.get(program, program)))
        return [program for *_, program in sorted(found)]

    # ------------------------------------------------------------------------------------------------------
    # running

    def cases(self, program):
        """what a program can run by itself"""
        if program.endswith(".py"):
            words = ("import sys, os, unittest; sys.argv = sys.argv[1:]; d, n = os.path.split(sys.argv[0]);"
                     "sys.path.insert(0, d); s = unittest.defaultTestLoader.loadTestsFromName(n[:-3]);"
                     "print('\\n'.join('case ' + type(next(iter(c))).__name__ for c in s if c.countTestCases()))")
            python = runner.command_of(program, [])[0][0]
            code, text = self.command([python, "-c", words, program], LIMIT)
            names = re.findall(r"^case (\w+)$", text, re.M) if code == 0 else []
        elif program.startswith("build/simt"):
            names = [line for line in self.command([f"./{program}", "--list"], LIMIT)[1].split("\n") if line]
        else:
            text = self.command([f"./{program}", "--list-test-names-only"], LIMIT)[1]
            if "--list-test-names-only" in text:                                # Catch2 3
                text = self.command([f"./{program}", "--list-tests", "--verbosity", "quiet"], LIMIT)[1]
            names = [re.sub(r"([\\,\[\]])", r"\\\1", line.strip()) for line in text.split("\n") if line.strip()]
        return [Case(program, name) for name in names or [""]]      # with none it says why, when it is run

    def run(self, case, limit, **environment):
        """(exit code, None where it did not end; the Result of dev/test.py, None where no test ran)"""
        words, read = runner.command_of(case.program, [])
        words = [w for w in words if w not in ("--min-duration", "5")]
        if case.program.endswith(".py"):
            words += ["-f"]
        elif not case.program.startswith("build/simt"):
            words += ["--abort"]
        words = [f"./{w}" if w == case.program and not w.endswith(".py") else w for w in words]
        code, text = self.command([*words, *filter(None, [case.what])], limit, PYTHONDONTWRITEBYTECODE="1",
                                  **environment)
        return code, read(text, code)

    def green(self, case, spans):
        """(seconds, its Result, the faults that it reaches) without a fault; `spans`: lines of Python to look for"""
        with open(self.reached, "wb") as f:
            f.write(bytes(MUT_MAX))
        with open(self.reached + ".lines", "w") as f:
            f.writelines(f"{n}\t{name}\t{first}\t{last}\n" for n, (name, first, last) in spans.items())
        begin, path = time.time(), os.environ.get("PYTHONPATH", "")
        code, result = self.run(case, LIMIT, MUT_REACHED=self.reached,
                                PYTHONPATH=os.pathsep.join(filter(None, [os.path.join(HERE, "trace"), path])))
        seconds, name = time.time() - begin, f"{case.program} {case.what}".strip()
        expected = f"{name}: expected tests that pass without a fault"
        if code != 0:
            raise BadInput(f"{expected}, got {'no end' if code is None else f'exit code {code}'}; see {self.log}")
        if result is None or result.passed + len(result.skipped) == 0:
            raise BadInput(f"{expected}, and none ran; see {self.log}")
        absent = [why for why in result.skipped if re.search(r"not built|\bmake ", why)]
        if absent:
            raise BadInput(f"{expected}, but some were left out: {'; '.join(absent)}")
        with open(self.reached, "rb") as f:
            return seconds, result, [n for n, seen in enumerate(f.read()) if seen]

    def verdict(self, n, cases):
        """(killed by which, or None; the number of cases that ran) of fault n in {Case: (seconds, Result)}, the fastest
        first"""
        for count, (case, (seconds, result)) in enumerate(sorted(cases.items(), key=lambda item: item[1][0]), 1):
            name = os.path.basename(case.program)
            code, found = self.run(case, SPARE + 5 * seconds, MUT=str(n))
            if code != 0:
                return f"killed by {name}" + (", which did not end" if code is None else ""), count
            if found != result:
                raise BadInput(f"{name}: expected {result}, as without the fault, got {found} and exit code 0")
        return None, len(cases)
