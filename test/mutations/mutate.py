#!/usr/bin/env python3
"""mutate.py -- plants faults in copies of the sources, one at a time, and says which of them no test sees.

    make mutations                                  the faults of known.tsv, which tests are known to see
    test/mutations/mutate.py --part 2/5             the second fifth of them; --only ID... some of them
    test/mutations/mutate.py --seed 1 --count 130   130 faults drawn at random: file x operator x line of code
    test/mutations/mutate.py --ci                   3 of known.tsv's cheap ones, drawn by the commit; writes no CSV
    test/mutations/mutate.py --summary              the score of all in the CSV; the survivors that nothing explains

A fault changes one text in a copy of one file, below build/mutations. There make builds only the tests in TESTS that
should notice it; a fault that does not compile does not count. `killed`: a test fails, or takes several times as long
as without the fault. `survived`: all pass, so a test is missing, or the change changes
nothing; survivors.tsv says which. Without the fault every named test must have passed, and none of those that let it
survive may have been skipped. Anything else is an error, and no result.

Each result is appended to dev/results/mutations.csv with its commit; a case that this commit has is not run again. The
exit code is 1 if a known fault survived, 2 after an error.
"""
import argparse
import collections
import contextlib
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

HERE = os.path.join(ROOT, "test", "mutations")
KNOWN, SURVIVORS = os.path.join(HERE, "known.tsv"), os.path.join(HERE, "survivors.tsv")
RESULTS = os.path.join(ROOT, "dev", "results", "mutations.csv")
SCORE = 0.97                                        # the least share of the faults that change something to be killed
LIMIT = 3600                                        # seconds for a build, or for a test without a fault
SPARE = 60                                          # with a fault it may take five times as long, and this

Fault = collections.namedtuple("Fault", "id file line before after tests")

# Which tests should notice a fault in a file: the first pattern that matches, the cheapest test first. A test is
# PROGRAM, which make builds, or a FILE.py, with what else is to be built after plus signs and what it is to run (a tag,
# a word, a class) after a colon.
RUN = "build/test/programs/test_run+train_gpt2"
BERT_RUN = "build/test/programs/test_bert_run+train_bert"
RANKS = "+train_gpt2+train_bert+build/comm_program+build/comm_program_alone"
DATA = "test/scripts/test_data.py:"
SIMT_TRAINING = "test/simt/test_simt_training.py"
TESTS = [
    (r"data/(hellaswag|mldr|msmarco|vocabulary|fineweb_edu|tinyshakespeare|text)\.py",
     f"{DATA}WithoutAVocabulary {DATA}Help {DATA}Scripts {DATA}BadFiles"),
    (r"data/(verify)\.py", f"{DATA}Verify test/scripts/test_tasks.py:Files"),
    (r"data/(download)\.py", f"{DATA}Download {DATA}Scripts"),
    (r"data/(pairs)\.py", f"{DATA}Pairs {DATA}Scripts"),
    (r"data/(wikitext)\.py", f"{DATA}WikiText {DATA}Scripts"),
    (r"data/(tasks)\.py", "test/scripts/test_tasks.py:Examples test/scripts/test_tasks.py:Files"),
    (r"data/(encoding)\.py", f"{DATA}WithoutAVocabulary {DATA}Tokens {DATA}Engine {DATA}Scripts"),
    (r"data/(sources)\.py", f"{DATA}BadFiles {DATA}Engine {DATA}Scripts"),
    (r"data/(build|common)\.py", f"{DATA}Engine {DATA}Restart {DATA}Verify {DATA}Scripts"),
    (r"data/.*", "test/scripts/test_data.py"),
    (r"llmc/(embedding|gelu|layernorm|pooling|rows|classifier|contrastive)\.cuh",
     r"build/test/layers/test_\1 build/simt/test_layers"),
    (r"llmc/adamw\.cuh", "build/test/layers/test_adamw build/simt/test_adamw build/simt/test_layers"),
    (r"llmc/matmul\.cuh|llmc/base/matrix\.cuh", "build/test/layers/test_matmul build/simt/test_matmul"),
    (r"llmc/base/cublaslt\.cuh", "build/simt/test_matmul test/simt/test_plans.py+build/simt/train_gpt2"),
    (r"llmc/base/ptx\.cuh", "test/simt/test_ptx_text.py build/simt/test_ptx"),
    (r"llmc/base/fastmath\.h", "build/test/base/test_device build/simt/test_fastmath"),
    (r"llmc/base/reduce\.cuh", "build/test/layers/test_layernorm build/simt/test_layers"),
    (r"llmc/base/device_cuda\.h", "build/simt/test_layers build/simt/test_generate_simt"),
    (r"llmc/base/(device|device_cpu)\.h", "build/test/base/test_device build/test/layers/test_layernorm " + RUN),
    (r"llmc/base/(tensor|rand)\.h", "build/test/base/test_rand build/test/model/test_gpt2"),
    (r"llmc/base/denormals\.h", "build/test/base/test_device " + RUN),
    (r"llmc/base/gpu\.h", "build/test/base/test_gpu build/simt/test_layers " + RUN),
    (r"llmc/engine/json\.h", "build/test/files/test_checkpoint"),
    (r"llmc/base/parse\.h", "build/test/programs/test_flags build/test/files/test_safetensors"),
    (r"llmc/engine/sha256\.h", "build/test/text/test_tokenizer"),
    (r"llmc/base/profile\.h", f"build/test/base/test_device {SIMT_TRAINING}:Training.test_profile"
     "+build/simt/train_gpt2+train_gpt2 " + RUN),
    (r"llmc/base/.*", "build/test/base/test_device build/test/files/test_safetensors " + RUN),
    (r"llmc/cable\.cuh|llmc/position/(none|encoding|table)\..*", "build/test/layers/test_positions "
     "build/test/layers/test_attention build/test/layers/test_attention_bits build/simt/test_encodings"),
    (r"llmc/position/.*",
     "build/test/layers/test_positions build/test/layers/test_attention build/simt/test_encodings"),
    (r"llmc/attention/decode\.cuh", "build/test/layers/test_decode build/simt/test_decode_simt"),
    (r"llmc/attention/flash/forward\.cuh", "build/simt/test_flash_forward"),
    (r"llmc/attention/flash/(backward|dkdv|dq)\.cuh", "build/simt/test_flash_backward"),
    (r"llmc/attention/flash/.*", "build/simt/test_flash_forward build/simt/test_flash_backward"),
    (r"llmc/attention/choose\.cuh", "build/test/layers/test_attention build/simt/test_encodings "
     "build/simt/test_flash_long"),
    (r"llmc/attention.*", "build/test/layers/test_attention build/test/layers/test_attention_bits "
     "build/simt/test_encodings"),
    (r"llmc/engine/text/(documents|dataloader|mlm|tokenizer|words)\.h", r"build/test/text/test_\1"),
    (r"llmc/engine/text/(bpe|unicode)\.h", "build/test/text/test_tokenizer"),
    (r"llmc/engine/text/trec\.h", "build/test/model/test_retrieval"),
    (r"llmc/engine/files/safetensors\.h", "build/test/files/test_safetensors build/test/files/test_checkpoint"),
    (r"llmc/engine/files/outdir\.h", "build/test/files/test_checkpoint " + RUN),
    (r"llmc/engine/files/.*", "build/test/files/test_checkpoint " + RUN),
    (r"llmc/engine/run/(guard|schedule|data_record|log)\.h", r"build/test/programs/test_\1 " + RUN),
    (r"llmc/engine/run/flag.*", "build/test/programs/test_flags " + RUN),
    (r"llmc/engine/run/plans\.h", "test/simt/test_plans.py+build/simt/train_gpt2"),
    (r"llmc/engine/run/.*", RUN + " " + BERT_RUN),
    (r"llmc/lab/(retrieval|hellaswag)\.h", r"build/test/model/test_\1"),
    (r"llmc/lab/(predict|collections)\.h", BERT_RUN),
    (r"llmc/lab/.*", "build/test/model/test_generate " + RUN),
    (r"llmc/engine/ranks/(launch|fork)\.h", "build/test/ranks/test_launch test/ranks/test_start.py" + RANKS),
    (r"llmc/engine/ranks/nccl\.h", "test/ranks/test_ranks.py:Collectives.test_nccl_on_the_emulated_gpu"),
    (r"llmc/engine/ranks/(rendezvous|wire_tcp)\.h", "test/ranks/test_start.py" + RANKS),
    (r"llmc/engine/ranks/.*",
     "test/ranks/test_ranks.py:Collectives" + RANKS + " test/ranks/test_ranks.py:Training" + RANKS),
    (r"llmc/contrastive\.cuh", "build/test/layers/test_contrastive"),
    (r"llmc/engine/model\.cuh", "build/test/model/test_gpt2 build/test/model/test_retrieval " + RUN),
    (r"train_gpt2\.cu", "build/test/model/test_gpt2 build/test/model/test_gpt2_steps build/test/model/test_generate "
     + RUN),
    (r"train_bert\.cu", "build/test/model/test_bert build/test/model/test_bert_padding "
     "build/test/model/test_bert_steps " + BERT_RUN),
]


def tests_of(path):
    for pattern, tests in TESTS:
        found = re.fullmatch(pattern, path)
        if found:
            return found.expand(tests)
    return ""


# ----------------------------------------------------------------------------------------------------------
# the faults

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
    """id, file, before, after, tests (empty: those of TESTS), "ci" for the cheap ones, why"""
    faults, names = [], set()
    for place, (name, file, before, after, tests, ci, _) in rows_of(path, 7):
        with open(os.path.join(ROOT, file), encoding="utf-8") as source:
            text = source.read()
        if text.count(before) != 1:
            raise BadInput(f"{place}: {name}: expected its text once in {file}, got {text.count(before)}")
        if name in names:
            raise BadInput(f"{place}: {name}: an id appears twice")
        names.add(name)
        at = text.count("\n", 0, text.index(before)) + 1
        if ci or not cheap:
            faults.append(Fault(name, file, at, before, after, tests or tests_of(file)))
    return faults


def swap_arguments(code, rng):
    """f(a, b) -> f(b, a)"""
    calls = [m for m in re.finditer(r"\b(?!i?(?:min|max)\()\w+\(([^\s(),][^(),]*), ([^\s(),][^(),]*)([,)])", code)
             if m[1] != m[2] and not re.search(r"\w[*&]* [*&]*\w", m[1] + "," + m[2])]        # not parameters
    if not calls:
        return None
    m = rng.choice(calls)
    return code[:m.start(1)] + m[2] + ", " + m[1] + code[m.start(3):]


def exchange(pairs):
    """an operator that replaces one of these by its partner"""
    table = dict(pairs)
    words = "|".join(re.escape(a) for a in sorted(table, key=len, reverse=True))

    def apply(code, rng):
        places = list(re.finditer(words, code))
        if not places:
            return None
        m = rng.choice(places)
        return code[:m.start()] + table[m[0]] + code[m.end():]
    return apply


def change_constant(code, rng):
    places = list(re.finditer(r"(?<![\w.])(\d+)(?![\w.])", code))
    if not places:
        return None
    m = rng.choice(places)
    return code[:m.start()] + str(int(m[1]) + 1) + code[m.end():]


def delete_statement(code, _):
    """calls and assignments, of C++ with a semicolon and of Python without one; not declarations"""
    if code.count("(") != code.count(")") or re.match(r"\s+(return|yield)\b", code):
        return None
    if re.fullmatch(r"\s+[*\w.\->\[\]+]+( [-+*/|&]?= |\().*;", code):
        return re.sub(r"\S.*", ";", code)
    if re.fullmatch(r"\s+[\w.\[\]]+(\(.*\)| [-+*/|]?= [^;{]*[^;{(\[,\\])", code):
        return re.sub(r"\S.*", "pass", code)
    return None


OPERATORS = {
    "off by one": exchange([(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" + 1", ""),
                            (" - 1", "")]),
    "sign": exchange([(" + ", " - "), (" - ", " + "), (" += ", " -= "), (" == ", " != "), (" != ", " == "),
                      (" && ", " || "), (" || ", " && "), (" and ", " or "), (" or ", " and "), ("!", "")]),
    "arguments": swap_arguments,
    "constant": change_constant,
    "statement": delete_statement,
}


def mutated(operator, line, rng):
    """the line with one fault, None where the operator finds nothing; what a string or a comment says stays"""
    code, comment = re.fullmatch(r"((?:[^\"'/#]|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|/(?!/)|(?<!  )#|')*)(.*)",
                                 line).groups()
    texts = re.findall(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", code)
    for i, text in enumerate(texts):
        code = code.replace(text, chr(0xE000 + i), 1)
    code, found = code.rstrip(), OPERATORS[operator](code.rstrip(), rng)
    if found is None or found == code:
        return None
    found += line[len(line.rstrip()):] + ("  " + comment if comment else "")
    for i, text in enumerate(texts):
        found = found.replace(chr(0xE000 + i), text)
    return found


def code_lines(path):
    """(number, line) of what is code: not a comment, and not a line that only words what is printed"""
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        lines = f.read().split("\n")
    quoted = False
    for number, line in enumerate(lines, 1):
        opens = line.count('"""') % 2 == 1
        comment = line.lstrip().startswith(("//", "#", '"""')) or quoted or opens
        quoted = quoted != opens
        if line.strip() and not comment and not re.search(r"\b(die|say|\w*printf|print)\(|^\s*f?\"", line):
            yield number, line


def draw(seed, count):
    """faults that depend only on the seed and the sources. Every file has its turn, in an order drawn at random; in
    it an operator and a line are drawn until they fit."""
    files = subprocess.run(["git", "ls-files", "llmc", "data", "train_gpt2.cu", "train_bert.cu"], cwd=ROOT, check=True,
                           stdout=subprocess.PIPE, universal_newlines=True).stdout.split()
    rng, faults, seen = random.Random(seed), [], set()
    files = [file for file in sorted(files) if tests_of(file) and not file.endswith(".txt")]
    lines = {file: list(code_lines(file)) for file in files}
    rng.shuffle(files)
    for turn in range(4 * count):
        file = files[turn % len(files)]
        for _ in range(200):
            operator = rng.choice(sorted(OPERATORS))
            number, line = rng.choice(lines[file])
            changed = mutated(operator, line, rng)
            if changed is not None and (file, number, changed) not in seen:
                seen.add((file, number, changed))
                name = f"seed {seed}, {len(faults)}: {operator}"
                faults.append(Fault(name, file, number, line, changed, tests_of(file)))
                break
        if len(faults) == count:
            break
    return faults


# ----------------------------------------------------------------------------------------------------------
# running them

class Tree:
    """a copy; its builds are kept, so that a fault costs what it changes"""
    green, locks = {}, collections.defaultdict(threading.Lock)      # test -> (its Result, its seconds) without a fault

    def __init__(self, path):
        self.path, self.python = path, python()
        tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                 check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
        for name in filter(None, tracked):
            self.restore(name)
        self.log = open(os.path.join(path + ".log"), "ab")

    def restore(self, name):
        source, target = os.path.join(ROOT, name), os.path.join(self.path, name)
        if not os.path.isfile(source):
            return
        with open(source, "rb") as f:
            data = f.read()
        if os.path.isfile(target):
            with open(target, "rb") as f:
                if f.read() == data:
                    return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)

    def plant(self, fault):
        path = os.path.join(self.path, fault.file)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        if text.count(fault.before) == 1:
            text = text.replace(fault.before, fault.after)
        else:                                       # of a drawn fault: a whole line, which may not be the only one
            lines = text.split("\n")
            lines[fault.line - 1] = fault.after
            text = "\n".join(lines)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)

    def command(self, words, limit):
        """0, an exit code, or None where it took too long; its output goes to the log"""
        self.log.write(f"\n$ {' '.join(words)}\n".encode())
        self.log.flush()
        scratch = tempfile.mkdtemp()                    # a short path: tests look at the width of what is printed
        environment = {"TRAIN_GPT2": "./train_gpt2", "TRAIN_BERT": "./train_bert", "OMP_WAIT_POLICY": "passive",
                       "CCACHE_NOHASHDIR": "1", **os.environ, "TMPDIR": scratch}
        p = subprocess.Popen(words, cwd=self.path, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                             env=environment, start_new_session=True)
        try:
            return p.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if p.returncode is None or not words[0] == "make":      # what a test has started and left behind ends too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            shutil.rmtree(scratch, ignore_errors=True)

    def build(self, test):
        """whether make builds what the test needs"""
        program, *needed = test.split("+")
        program = program.partition(":")[0]
        targets = needed if program.endswith(".py") else [program, *needed]
        code = self.command(["make", *targets], LIMIT) if targets else 0
        if code is None:
            raise BadInput(f"{test}: expected a build within {LIMIT} s; see {self.log.name}")
        return code == 0

    def run_test(self, test, limit):
        """(exit code, None where it did not end; the Result of dev/test.py, None where no test ran)"""
        program, _, what = test.partition("+")[0].partition(":")
        if program.endswith(".py"):
            command, read = [self.python, program, "-v", "-f"], runner.read_unittest
        elif program.startswith("build/simt"):
            command, read = [os.path.join(self.path, program)], runner.read_kernel_tests
        else:
            command, read = [os.path.join(self.path, program), "--abort"], runner.read_catch
        before = os.path.getsize(self.log.name)
        code = self.command([*command, *filter(None, [what])], limit)
        with open(self.log.name, "rb") as f:
            f.seek(before)
            return code, read(f.read().decode(errors="replace"), code)

    def check_green(self, test):
        """its Result without a fault, and the seconds it takes; once for all trees"""
        with Tree.locks[test]:
            if test not in Tree.green:
                expected = f"{test}: expected tests that pass without a fault"
                if not self.build(test):
                    raise BadInput(f"{expected}, which does not compile; see {self.log.name}")
                start = time.time()
                code, result = self.run_test(test, LIMIT)
                if code != 0:
                    end = "no end" if code is None else f"exit code {code}"
                    raise BadInput(f"{expected}, got {end}; see {self.log.name}")
                if result is None or result.passed == 0:
                    why = "; ".join(result.skipped) if result else ""
                    raise BadInput(f"{expected}, and none ran{why and ': ' + why}; see {self.log.name}")
                Tree.green[test] = result, time.time() - start
        return Tree.green[test]

    def try_fault(self, fault):
        """killed by which test, survived, does not compile"""
        green = {test: self.check_green(test) for test in fault.tests.split()}
        self.plant(fault)
        try:
            if fault.file.endswith(".py") and not compiles(os.path.join(self.path, fault.file)):
                return "does not compile"
            for test, (result, seconds) in green.items():
                if not self.build(test):
                    return "does not compile"
                code, found = self.run_test(test, SPARE + 5 * seconds)
                if code != 0:
                    name = os.path.basename(test.partition("+")[0].partition(":")[0])
                    return f"killed by {name}" + (", which did not end" if code is None else "")
                if found != result:
                    raise BadInput(f"{test}: expected {result}, as without the fault, got {found} and exit code 0")
        finally:
            self.restore(fault.file)
        skipped = [f"{test}: {why}" for test, (result, _) in green.items() for why in result.skipped]
        if skipped:
            raise BadInput(f"no test has seen it, but some were skipped: {'; '.join(skipped)}")
        return "survived"


def compiles(path):
    with open(path, encoding="utf-8") as f:
        try:
            compile(f.read(), path, "exec")
        except (SyntaxError, ValueError):
            return False
    return True


def python():
    """the one that has the packages of the tests"""
    for name in ("build/venv/bin/python",):
        if os.path.exists(os.path.join(ROOT, name)):
            return os.path.join(ROOT, name)
    script = os.path.join(ROOT, "dev", "install.sh")
    if not os.path.exists(script):
        return sys.executable
    p = subprocess.run([script, "--python", "numpy"], stdout=subprocess.PIPE, universal_newlines=True)
    return p.stdout.strip() or sys.executable


def latest(results):
    """fault -> its last row that says anything"""
    return {(r["id"], r["file"], r["before"], r["after"]): r for r in results}


def summary(path, survivors):
    """prints what came of all faults in the CSV; 1: too few were killed, or a survivor has no explanation"""
    why = {(name, file): (kind, text) for _, (name, file, kind, text) in rows_of(survivors, 4)}
    found = collections.defaultdict(collections.Counter)
    unexplained = []
    for row in latest(ledger.read(path)).values():
        result = row["result"].split(" by ")[0]
        if result == "survived":
            kind, _ = why.get((row["id"], row["file"]), ("unexplained", ""))
            result = "changes nothing" if kind == "equivalent" else "survived"
            unexplained += [row] if kind == "unexplained" else []
        found["drawn" if row["id"].startswith("seed ") else "known"][result] += 1
    found["all"] = sum(found.values(), collections.Counter())
    print(f"{'':8} {'killed':>8} {'survived':>8} {'score':>8}    {'changes nothing':>15} {'does not compile':>16}")
    score = 0
    for name, n in found.items():
        score = n["killed"] / max(n["killed"] + n["survived"], 1)
        print(f"{name:8} {n['killed']:8} {n['survived']:8} {100 * score:7.1f}%    {n['changes nothing']:15} "
              f"{n['does not compile']:16}")
    for row in unexplained:
        print(f"no explanation in {os.path.relpath(survivors, ROOT)}: {row['id']}\n  {row['file']}:{row['line']}\n"
              f"- {row['before'].strip()}\n+ {row['after'].strip()}")
    return int(score < SCORE or bool(unexplained))


def chosen(args):
    if args.ci:
        cheap = read_known(args.known, cheap=True)
        return random.Random(ledger.commit().rstrip("+")).sample(cheap, min(3, len(cheap)))
    if args.seed is not None:
        faults = draw(args.seed, args.count)
    else:
        faults = read_known(args.known)
    if args.only:
        unknown = set(args.only) - {f.id for f in faults}
        if unknown:
            raise BadInput(f"--only: there is no fault {', '.join(sorted(unknown))}")
        faults = [f for f in faults if f.id in args.only]
    return ledger.share(args.part, faults)


class Campaign:
    """the faults that are still to be tried, and the results of the rest"""
    def __init__(self, args, faults):
        self.args, self.here, self.lock = args, ledger.commit(), threading.Lock()
        self.counts, self.began, self.ran, self.total = collections.Counter(), time.time(), 0, len(faults)
        self.waiting, self.wrong = queue.Queue(), []
        done = {} if args.ci or self.here.endswith("+") else {
            (r["id"], r["file"], r["before"], r["after"]): r["result"]
            for r in ledger.read(args.results) if r["commit"] == self.here}
        for fault in faults:
            result = done.get((fault.id, fault.file, fault.before, fault.after))
            if result is None:
                self.waiting.put(fault)
            else:
                self.say(fault, result)

    def say(self, fault, result):
        self.counts[result.split(" by ")[0]] += 1
        left = int((time.time() - self.began) / max(self.ran, 1) * self.waiting.qsize())
        said = f"{sum(self.counts.values())}/{self.total}, {left // 60}:{left % 60:02d} left"
        print(f"[{said}] {fault.id}, {fault.file}: {result}", flush=True)
        if result == "survived":
            print(f"  {fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}", flush=True)

    def work(self, number):
        tree = Tree(os.path.join(ROOT, "build", "mutations", str(number)))
        with tree.log:
            while True:
                try:
                    fault = self.waiting.get_nowait()
                except queue.Empty:
                    return
                start = time.time()
                try:
                    result = tree.try_fault(fault)
                except BadInput as e:                   # no result; the rest are tried
                    print(f"error: {fault.id}: {e}", file=sys.stderr, flush=True)
                    self.wrong.append(fault.id)
                    continue
                with self.lock:
                    self.ran += 1
                    if not self.args.ci:
                        row = dict(fault._asdict(), result=result, seconds=round(time.time() - start), commit=self.here)
                        ledger.append(self.args.results, row)
                    self.say(fault, result)

    def run(self):
        jobs = min(self.args.jobs, self.waiting.qsize())
        threads = [threading.Thread(target=self.work, args=(i,)) for i in range(jobs)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self.wrong:
            raise BadInput(f"no result: {', '.join(self.wrong)}")


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--known", default=KNOWN, metavar="FILE", help="the list of faults [test/mutations/known.tsv]")
    p.add_argument("--seed", type=int, help="draw the faults instead")
    p.add_argument("--count", type=int, default=20, help="so many [20]")
    p.add_argument("--ci", action="store_true", help="3 cheap ones of the list, drawn by the commit")
    p.add_argument("--part", type=ledger.part_of, default=(1, 1), metavar="K/N", help="every n-th, from the k-th on")
    p.add_argument("--only", nargs="+", metavar="ID", help="these alone")
    p.add_argument("--jobs", type=int, default=1, help="faults at a time [1]")
    p.add_argument("--summary", action="store_true", help="print the score of all in the CSV and run nothing")
    p.add_argument("--results", default=RESULTS, metavar="FILE", help="the CSV [dev/results/mutations.csv]")
    args = p.parse_args(argv)
    if args.summary:
        return summary(args.results, SURVIVORS)
    faults = chosen(args)
    os.makedirs(os.path.join(ROOT, "build", "mutations"), exist_ok=True)
    campaign = Campaign(args, faults)
    campaign.run()
    counts = campaign.counts
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if args.ci:
        print(f"{counts['killed']} passed, {len(faults) - counts['killed']} failed")
    bad = counts["survived"] + (len(faults) - counts["killed"] if args.ci else 0)
    return 1 if bad and args.seed is None else 0


if __name__ == "__main__":
    console.run(main)
