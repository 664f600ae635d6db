#!/usr/bin/env python3
"""test.py -- builds and runs the tests of a make target. Ends with a table of the skipped ones and one count of all.

    dev/test.py test           the programs of SHORT: in C++, on the emulated GPU, and the scripts test/*/test_*.py
    dev/test.py test-long      every other program
    dev/test.py simt           what runs on the emulated GPU
    dev/test.py ranks          one run on several processes
    dev/test.py asan           the tests tagged [asan], under AddressSanitizer
    dev/test.py ladders        dev/cuda/*.cu: on the CPU, on the emulated GPU, and with nvcc where it is
    dev/test.py KIND '[tag]'   the tests that Catch2 finds by these words; only files of C++ with such a tag are built
    dev/test.py simt 'words'   the tests on the emulated GPU that have these words in their names

Each core runs one program at a time, and one more program runs beside them whose tests mostly wait (WAITS). A program's
output is shown if one of its tests failed, or if only some tests run; one in C++ ends at its fifth failure.
BUDGET=seconds: an error if the processors took more, compilers included.
"""
import collections
import concurrent.futures
import functools
import glob
import os
import re
import resource
import signal
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
JOBS = int(os.environ.get("JOBS") or len(os.sched_getaffinity(0)))
COMM_PROGRAMS = ["build/comm_program", "build/comm_program_alone"]
TRAINERS = ["train_gpt2", "train_bert"]
OTHER_TRAINERS = ["build/bf16/train_gpt2", "build/bf16/train_bert", "build/trace/train_gpt2"]
SIMT_TRAINERS = ["build/simt/train_gpt2", "build/simt/train_gpt2_fp32", "build/simt/train_bert"]
ENVIRONMENT = {"TRAIN_GPT2": "./train_gpt2", "TRAIN_BERT": "./train_bert",
               # a thread that waits gives up its core: with anything else running, spinning takes several times as long
               "OMP_WAIT_POLICY": "passive",
               "UBSAN_OPTIONS": "print_stacktrace=1"}

# What `make test` runs: the programs that saw most of 365 planted faults first, for the time that they take, and the
# layers. (seconds of a processor for a run, faults that it was the first to see)
SHORT = {
    "scripts/test_scripts.py": (16, 42),  "programs/test_bert_run": (10, 29), "scripts/test_data.py": (56, 30),
    "simt/test_layers": (1, 16),          "programs/test_run": (27, 17),      "layers/test_attention": (40, 14),
    "simt/test_flash_forward": (14, 14),  "model/test_gpt2": (23, 10),        "text/test_tokenizer": (1, 9),
    "scripts/test_study.py": (25, 10),     "scripts/test_tasks.py": (28, 9),
    "scripts/test_plot.py": (10, 8),      "programs/test_flags": (4, 7),
    "text/test_documents": (1, 5),        "layers/test_decode": (12, 5),
    "layers/test_gelu": (1, 4),           "model/test_bert": (5, 4),          "simt/test_flash_long": (2, 4),
    "text/test_dataloader": (1, 5),       "files/test_checkpoint": (1, 4),    "programs/test_guard": (1, 3),
    "layers/test_contrastive": (1, 4),    "layers/test_matmul": (2, 3),       "text/test_mlm": (1, 2),
    "programs/test_data_record": (3, 2),  "layers/test_classifier": (1, 2),   "programs/test_schedule": (1, 2),
    "files/test_safetensors": (2, 1),     "scripts/test_console.py": (4, 1),  "scripts/test_explorer.py": (4, 1),
    "ranks/test_start.py": (1, 3),
    "ranks/test_launch": (1, 1),          "base/test_rand": (1, 1),           "base/test_gpu": (1, 1),
    "simt/test_ptx_text.py": (1, 1),      "layers/test_layernorm": (1, 0),    "layers/test_adamw": (1, 0),
    "layers/test_rows": (1, 0),           "layers/test_embedding": (1, 1),
    "programs/test_log": (3, 1),          "base/test_device": (1, 1),         "simt/test_matmul": (1, 2),
    "simt/test_adamw": (1, 1),          "scripts/test_retriever.py": (10, 2),
    "scripts/test_text.py": (18, 1),      "scripts/test_retrieve.py": (2, 1),    "scripts/test_heads.py": (6, 0),
}
# They wait more than they compute.
WAITS = {"test/ranks/test_ranks.py", "test/scripts/test_tasks.py", "test/simt/test_simt_training.py"}

# passed, failed: numbers of tests; skipped: the reason of each skipped test
Result = collections.namedtuple("Result", "passed failed skipped")


# ---------------------------------------------------------------------------------------------------------
# what a program printed

def number(pattern, text):
    """the last number that the pattern finds, 0 where it finds none"""
    found = re.findall(pattern, text, re.M)
    return int(found[-1]) if found else 0


def read_catch(text, _):
    # "All tests passed (9 assertions in 3 test cases)", or "test cases: 3 | 2 passed | 1 failed"
    total = number(r"^All tests passed .* in (\d+) test case", text) or number(r"^test cases: +(\d+)", text)
    if total == 0 and re.search(r"^No tests? (ran|cases matched)", text, re.M):    # the tag stands only in a comment
        return None
    failed = number(r"^test cases:.*\| +(\d+) failed", text)
    # A test's name stands between two lines of dashes; its warnings follow, folded at 80 columns.
    skipped = {}
    for block in re.split(r"^-{79}\n(?=.*\n(?:.*\n)*?-{79}\n)", text, flags=re.M)[1:]:
        warning = re.search(r"^ +SKIPPED: *((?:.+\n)+)", block, re.M)
        if warning:
            skipped[block.split("\n")[0]] = " ".join(warning.group(1).split())
    return Result(total - failed - len(skipped), failed, list(skipped.values()))


def read_kernel_tests(text, _):
    """a line for each test: its name, ok or FAILED or skipped, the time, a note"""
    if re.search(r"^no test's name contains", text, re.M):
        return None
    lines = re.findall(r"^\S.* (ok|FAILED|skipped) +[0-9.]+ ms *(.*)$", text, re.M)
    count = collections.Counter(status for status, _ in lines)
    return Result(count["ok"], count["FAILED"], [why for status, why in lines if status == "skipped"])


def read_unittest(text, _):
    total = number(r"^Ran (\d+) tests? in ", text)
    failed = number(r"^FAILED .*failures=(\d+)", text) + number(r"^FAILED .*errors=(\d+)", text)
    skipped = [why for _, why in re.findall(r"\.\.\. skipped (['\"])(?:SKIPPED: *)?(.*)\1$", text, re.M)]
    return Result(max(total - failed - len(skipped), 0), failed, skipped)


def read_exit_code(_, code):
    return Result(int(code == 0), int(code != 0), [])


# ---------------------------------------------------------------------------------------------------------
# programs

def command_of(program, words):
    """the command that runs a program, the function that reads its output"""
    if program.endswith(".py"):
        python = python_of_the_scripts()
        libraries = os.path.exists("build/venv/bin/python")         # of data/requirements.txt
        if libraries and program.endswith(("/test_data.py", "/test_text.py")):
            python = os.path.abspath("build/venv/bin/python")        # also from the trees of mutate.py
        return [python, program, "-v"], read_unittest
    if program.startswith("build/simt"):            # the sanitized ones have no tags: all of their tests
        return [program, *(() if program.startswith("build/simt_asan/") else words)], read_kernel_tests
    if program.startswith("build/ladders/"):
        return [program], read_exit_code
    return [program, "--min-duration", "5", "--abortx", "5", *words], read_catch


@functools.lru_cache(maxsize=None)
def python_of_the_scripts():
    """a python3 that draws figures (apt installs that for the system's), or this one; its tests say what is missing"""
    found = subprocess.run(["dev/install.sh", "--python", "matplotlib", "numpy"], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, text=True)
    return found.stdout.strip() or sys.executable


def succeeds(*command):
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def run(program, words):
    """(program, its Result, seconds, seconds of processors, what it printed)"""
    command, read = command_of(program, words)
    environment = {**ENVIRONMENT, **os.environ}
    if program.startswith("build/asan/"):
        environment["ASAN_OPTIONS"] = "allocator_may_return_null=1"
    if program.startswith("build/simt_asan/"):      # cublaslt.cuh keeps its plans to the end
        environment["ASAN_OPTIONS"] = "detect_leaks=0"
    begin = time.time()
    p = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env=environment)
    text = p.stdout.read().decode(errors="replace")
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    result = read(text, p.returncode)
    if result is not None and p.returncode != 0 and result.failed == 0:
        result = result._replace(failed=1)
        text += f"{program} ended with exit code {p.returncode}\n"
    return program, result or Result(0, 0, []), time.time() - begin, usage.ru_utime + usage.ru_stime, text


def parts(source):
    """the sources of one program, as the Makefile has it: test_gpt2.cu and test_gpt2_*.cu"""
    return [source, *glob.glob(source[:-len(".cu")] + "_*.cu")]


def holding(words, sources):
    """those of the sources in which one of these words stands; all of them where there are no words"""
    joined = {part for p in sources for part in parts(p)[1:]}
    return [p for p in sorted(set(sources) - joined)
            if not words or any(word in open(part).read() for part in parts(p) for word in words)]


def built(directory, sources):
    """where the programs of these sources are: test/layers/test_gelu.cu in build/asan/layers/test_gelu"""
    return [os.path.join(directory, re.sub(r"^(test/simt|test|dev/cuda)/", "", p))[:-len(".cu")] for p in sources]


def name(program):
    """as in SHORT: programs/test_run, scripts/test_data.py"""
    return re.sub(r"^(build/test|build(?=/simt/)|test)/", "", program)


def plan(kind, words):
    """what to run; what else to build for it"""
    simt = built("build/simt", holding(words, glob.glob("test/simt/test_*.cu")))
    if kind == "simt" and words:
        return simt, []
    if kind == "simt":
        return simt + sorted(glob.glob("test/simt/test_*.py")), SIMT_TRAINERS + TRAINERS
    if kind == "ranks":
        return sorted(glob.glob("test/ranks/test_*.py")), COMM_PROGRAMS + TRAINERS
    if kind == "ladders":
        ladders = built("build/ladders", sorted(glob.glob("dev/cuda/*.cu")))
        climbed = [p for p in ladders if not p.endswith("/matmul")]             # by a GPU, too
        cuda = [p + "cu" for p in climbed] if os.environ.get("NVCC") else []
        return ladders + [p + "_simt" for p in climbed] + (cuda if succeeds("nvidia-smi", "-L") else []), cuda
    sources = [p for p in glob.glob("test/*/test_*.cu") if not p.startswith("test/simt/")]
    sources = holding(re.findall(r"\[\w+\]", " ".join(words)), sources)
    programs = built(f"build/{kind.replace('-long', '')}", sources)
    if kind == "test" and words:
        return programs, TRAINERS if any("test/programs/" in p for p in sources) else []
    if kind in ("test", "test-long"):
        programs += sorted(glob.glob("test/*/test_*.py")) + simt
        unknown = set(SHORT) - {name(p) for p in programs}
        assert not unknown, f"SHORT names tests that do not exist: {unknown}"
        if kind == "test":
            return [p for p in programs if name(p) in SHORT], TRAINERS
        return ([p for p in programs if name(p) not in SHORT],
                SIMT_TRAINERS + TRAINERS + OTHER_TRAINERS + COMM_PROGRAMS)
    if kind == "asan" and words == ["[asan]"]:                  # sees past the end of shared memory
        sanitized = [p for name in ("ptx", "layers", "decode") for p in sorted(glob.glob(f"test/simt/test_{name}*.cu"))]
        programs += built("build/simt_asan", sanitized)
    return programs, []


def main():
    kind, words = (sys.argv[1:] or [""])[0], sys.argv[2:]
    if kind not in ("test", "test-long", "simt", "ranks", "asan", "ladders"):
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a job in the background of a script ignores it
    os.chdir(ROOT)
    if kind == "asan" and not words:
        words = ["[asan]"]
    programs, also = plan(kind, words)
    if not programs:
        print(f"{' '.join(words)}: found in no file of tests" if words else f"nothing to run for make {kind}")
        return 2 if words else 0
    targets = [p for p in programs if not p.endswith(".py")] + also
    if subprocess.run([os.environ.get("MAKE", "make"), f"-j{JOBS}", *targets]).returncode != 0:
        return 1

    total, skips = collections.Counter(), collections.Counter()
    # the slowest first, so that the end keeps all cores busy
    programs.sort(key=lambda p: -SHORT.get(name(p), (p.endswith(".py"), 0))[0])
    cores = concurrent.futures.ThreadPoolExecutor(1 if kind == "ladders" else JOBS)     # a ladder times its rungs
    beside = concurrent.futures.ThreadPoolExecutor(1)
    with cores, beside:
        started = [(beside if p in WAITS else cores).submit(run, p, words) for p in programs]
        for work in concurrent.futures.as_completed(started):
            program, result, seconds, of_processors, text = work.result()
            total.update(passed=result.passed, failed=result.failed, skipped=len(result.skipped))
            skips.update((program, why) for why in result.skipped)
            if result.failed or kind == "ladders" or (words and result.passed):
                print("\n".join(line for line in text.split("\n") if not line.endswith("... ok")))
            print(f"{program:44} {result.passed:4} passed, {result.failed} failed, {len(result.skipped)} skipped, "
                  f"{seconds:.1f} s, {of_processors:.1f} s of processors", flush=True)
    if skips:
        print("\nskipped: what | why")
        for (program, why), count in sorted(skips.items()):
            print(f"  {program}{f' ({count} tests)' if count > 1 else ''} | {why}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = usage.ru_utime + usage.ru_stime
    print(f"{spent:.0f} seconds of processors, compilers included"
          f"{'; make test-long runs the rest' if kind == 'test' and not words else ''}")
    if spent > float(os.environ.get("BUDGET") or "inf"):
        print(f"expected at most {os.environ['BUDGET']}: move tests from SHORT to the long ones, or make them cheaper")
        total["failed"] += 1
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
