"""tree.py -- a copy of the sources with many faults at once, what its tests reach, and what a test says to a fault.

In C++ a fault is an expression that mut.h switches; what can be none (a constant, a table, a declaration) is planted
and built by itself, and so is what changes Python."""
import collections
import contextlib
import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

import faults as planting
from console import BadInput
import test as runner       # dev/test.py

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 7200                # seconds for a build, or for a case without a fault
SPARE = 20                  # with a fault a case may take five times as long, and this
MUT_MAX = 4096              # mut.h's too

# What runs at once: a Catch2 case, a test of the emulated GPU, a class of a script. `what` selects it in its program.
Case = collections.namedtuple("Case", "program what")


class Tree:
    def __init__(self, path):
        self.path, self.log = path, path + ".log"
        self.spans = {}                         # n -> (file, the first and the last line) of what is planted
        tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True,
                                 cwd=planting.ROOT, stdout=subprocess.PIPE).stdout.decode().split("\0")
        for name in tracked:
            source, copy = os.path.join(planting.ROOT, name), os.path.join(path, name)
            if os.path.isfile(source) and not (os.path.isfile(copy) and filecmp.cmp(source, copy, shallow=False)):
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy(source, copy)

    def write(self, name, text):
        """only where it changes, so that make builds only what it must"""
        path = os.path.join(self.path, name)
        if planting.source(path) != text:
            with open(path, "w", encoding="utf-8", newline="") as f:
                f.write(text)

    def plant(self, numbered):
        """writes faults {n: Fault} as expressions. Returns those that are none, or are part of another."""
        places, left = collections.defaultdict(list), set()
        for n, fault in numbered.items():
            made = planting.schema(planting.source(fault.file), fault, n)
            if made is None or any(made[0] < b and a < made[1] for a, b, *_ in places[fault.file]):
                left.add(n)
            else:
                places[fault.file].append((*made, n))
        before, self.spans = {name for name, *_ in self.spans.values()}, {}
        for name in before | set(places):
            text = planting.source(name)
            for a, b, new, n in sorted(places[name], reverse=True):
                self.spans[n] = name, text.count("\n", 0, a) + 1, text.count("\n", 0, b) + 1
                text = text[:a] + new + text[b:]
            header = f'#include "{os.path.join(HERE, "mut.h")}"\n#line 1\n' if places[name] else ""
            self.write(name, header + text)
        return left

    @contextlib.contextmanager
    def changed(self, fault):
        """its file with this fault only, as it is; and what it was before"""
        before = planting.source(os.path.join(self.path, fault.file))
        self.write(fault.file, planting.planted(fault))
        try:
            yield
        finally:
            self.write(fault.file, before)

    def command(self, words, limit, **environment):
        """(0, an exit code, or None where it took too long; what it printed, which goes to the log too)"""
        # a short path for temporary files: tests look at the width of what is printed
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, tempfile.TemporaryFile() as out:
            environment = {**runner.ENVIRONMENT, "CCACHE_NOHASHDIR": "1", **os.environ, "TMPDIR": scratch,
                           **environment}
            p = subprocess.Popen(words, cwd=self.path, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                 env=environment, start_new_session=True)
            try:
                code = p.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:                                    # what it has started and left behind ends too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()
            out.seek(0)
            text = out.read()
            with open(self.log, "ab") as log:
                log.write(f"\n$ {' '.join(words)}\n".encode() + text)
            return code, text.decode(errors="replace")

    # ------------------------------------------------------------------------------------------------------
    # building

    def make(self, targets, flags="-w"):
        """(0 if make builds them, what it printed); without warnings, so that only errors name lines"""
        if not targets:
            return 0, ""
        return self.command(["make", "-k", f"-j{runner.JOBS}", f"CPPFLAGS={flags}", *targets], LIMIT)

    def build(self, numbered, targets, flags="-w"):
        """Plants these faults as expressions and builds. Returns those that are none, or do not compile as such: all on
        lines that the compiler's errors and notes name; if they name no such line, all in files that they name."""
        left = self.plant(numbered)
        while True:
            code, said = self.make(targets, flags)
            if code == 0:
                return left
            named = [(os.path.normpath(path), int(line)) for path, line in re.findall(r"([\w./-]+):(\d+)[:,]", said)]
            lines = {n for n, (name, first, last) in self.spans.items() for path, line in named
                     if path == name and first <= line <= last}
            wrong = lines or {n for n, (name, *_) in self.spans.items() for path, _ in named if path == name}
            if not wrong:
                raise BadInput(f"expected tests that compile without a fault; see {self.log}")
            left |= wrong
            self.plant({n: f for n, f in numbered.items() if n not in left})

    def includes(self, target, name):
        """whether a file is part of what make has built"""
        path = os.path.join(self.path, "build", target.removeprefix("build/") + ".d")
        return os.path.exists(path) and name in map(os.path.normpath, planting.source(path).split())

    # ------------------------------------------------------------------------------------------------------
    # running

    def cases(self, program):
        """what a program can run by itself"""
        if program.endswith(".py"):
            words = ("import sys, os, unittest; sys.argv = sys.argv[1:]; d, n = os.path.split(sys.argv[0]);"
                     "sys.path.insert(0, d); s = unittest.defaultTestLoader.loadTestsFromName(n[:-3]);"
                     "print('\\n'.join('case ' + type(next(iter(c))).__name__ for c in s if c.countTestCases()))")
            code, text = self.command([runner.command_of(program, [])[0][0], "-c", words, program], LIMIT)
            names = re.findall(r"^case (\w+)$", text, re.M) if code == 0 else []
        elif program.startswith("build/simt"):
            names = self.command([program, "--list"], LIMIT)[1].split("\n")[:-1]
        else:
            text = self.command([program, "--list-test-names-only"], LIMIT)[1]
            if "--list-test-names-only" in text:                                # Catch2 3
                text = self.command([program, "--list-tests", "--verbosity", "quiet"], LIMIT)[1]
            names = [re.sub(r"([\\,\[\]])", r"\\\1", line) for line in re.findall(r"^ *(\S.*?) *$", text, re.M)]
            names = [re.sub("^-+", "*", name) for name in names]                # or it would be a flag
        return [Case(program, name) for name in names or [""]]      # with none it says why, when it is run

    def run(self, case, limit, **environment):
        """(exit code, None where it did not end; the Result of dev/test.py, None where no test ran)"""
        words, read = runner.command_of(case.program, [])
        if not case.program.startswith("build/simt"):                           # to stop at what fails first
            words += ["-f" if case.program.endswith(".py") else "--abort"]
        code, text = self.command([*words, *filter(None, [case.what])], limit, PYTHONDONTWRITEBYTECODE="1",
                                  **environment)
        return code, read(text, code)

    def green(self, case, spans):
        """(seconds, the faults that it reaches, how many tests pass, why some were skipped) without a fault; of Python
        those in `spans`: [n, file, first line, last line]"""
        path, expected = os.environ.get("PYTHONPATH", ""), "expected tests that pass without a fault"
        with tempfile.TemporaryDirectory() as directory:
            reached = os.path.join(directory, "reached")
            with open(reached, "wb") as f:
                f.write(bytes(MUT_MAX))
            with open(reached + ".lines", "w", encoding="utf-8") as f:
                json.dump(spans, f)
            begin = time.time()
            code, result = self.run(case, LIMIT, MUT_REACHED=reached,
                                    PYTHONPATH=os.pathsep.join(filter(None, [os.path.join(HERE, "trace"), path])))
            seconds = time.time() - begin
            with open(reached, "rb") as f:
                numbers = [n for n, seen in enumerate(f.read()) if seen]
        if code != 0:
            raise BadInput(f"{expected}, got {'no end' if code is None else f'exit code {code}'}; see {self.log}")
        if result is None or result.passed + len(result.skipped) == 0:
            raise BadInput(f"{expected}, and none ran; see {self.log}")
        absent = [why for why in result.skipped if re.search(r"not built|\bmake (?!exports)", why)]
        if absent:
            raise BadInput(f"{expected}, but some were left out: {'; '.join(absent)}")
        return seconds, numbers, result.passed, result.skipped

    def verdict(self, n, cases, most):
        """(the result, the number of cases that ran) of fault n in {Case: seconds}, the fastest first, for at most
        `most` seconds"""
        end = time.time() + most
        for count, (case, seconds) in enumerate(sorted(cases.items(), key=lambda item: item[1]), 1):
            code, _ = self.run(case, SPARE + 5 * seconds, MUT=str(n))
            if code != 0:
                ends = "" if code else ", which did not end"
                return f"killed by {os.path.basename(case.program)}{ends}", count
            if time.time() > end and count < len(cases):
                return f"survived {most} s of its tests", count
        return "survived" if cases else "reached by no test", len(cases)
