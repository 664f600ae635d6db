#!/usr/bin/env python3
"""reliability.py -- what this project promises about your work, the tests that prove it, and how many cases they tried.

    make reliability                       each promise at full length, or as much of it as fits into an hour
    make reliability PART=2/8              the second eighth of it
    make reliability ARGS=--short          a sample of each in three minutes; writes nothing
    make reliability ARGS='--only P2 P5'   only these promises
    make reliability ARGS=--report         only writes dev/results/reliability.md again

Each part appends what it saw to dev/results/reliability.csv, with the commit of the sources. One that has passed there
for the same commit is not run again, so that one run continues where another stopped. The report counts the cases of a
part since it last failed, on any commits, and says what no test covers."""
import argparse
import collections
import os
import re
import shlex
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import console                                              # noqa: E402
import ledger                                               # noqa: E402

CSV = os.path.join(ROOT, "dev", "results", "reliability.csv")
REPORT = os.path.join(ROOT, "dev", "results", "reliability.md")
FUZZ_MINUTES, FUZZ_TARGET = 3, 60                           # of a run, and in all, for each parser

# The promise; what of it no test here covers
PROMISES = {
    "P1": ("A run that is killed at any moment resumes to the same bits.", "kills on a GPU"),
    "P2": ("Whenever the power fails in a save, the old checkpoint or the new one is whole.",
           "a disk that acknowledges what it has not written"),
    "P3": ("Whichever call to the disk fails, no checkpoint is lost and no run ends as if it had saved.", ""),
    "P4": ("A disk that is too small is foreseen, and one that fills up ends no run.", ""),
    "P5": ("Every byte of a checkpoint is covered by a checksum.", ""),
    "P6": ("A damaged checkpoint is named and passed over; the last good one is never deleted.", ""),
    "P7": ("A hostile file is refused before memory is taken for what it claims.", ""),
    "P8": ("Shards are checked before they are used, and while they are.", "a network file system that lies"),
    "P9": ("A run is not resumed with other settings or data.", ""),
    "P10": ("The order of the data depends only on the seed.", ""),
    "P11": ("The same seed gives the same bits, on any number of threads.", "kernels on a GPU"),
    "P12": ("N ranks compute the bits of one.", "the sums of NCCL's own kernels; the exchange uses none"),
    "P13": ("Replicas that differ are found within 100 steps.", ""),
    "P14": ("A loss or gradient that is not finite changes no weight and reaches no checkpoint.", ""),
    "P15": ("A spike of the loss is skipped if a flag requests it, and nothing else is.",
            "losses of a real run: the 10,000 are drawn"),
    "P16": ("A signal ends a run with a checkpoint and exit code 75.", ""),
    "P17": ("A dead rank ends all of them within 10 s, one that hangs within the deadline and 5 s.",
            "ncclCommAbort between several GPUs"),
    "P18": ("Memory that is missing is an error with a name.", "a GPU's memory"),
    "P19": ("No input crashes a parser.", "a second engine (AFL++)"),
    "P20": ("The sanitizers are silent.", "compute-sanitizer, which gpu-check runs: docs/results.md"),
    "P21": ("No figure is silently wrong: NaN is seen, sums are of logarithms.", ""),
    "P22": ("Flags are strict.", ""),
    "P23": ("Checkpoints of older versions can be resumed.", ""),
    "P24": ("Logs survive kills, resumes and full disks without a torn or doubled line.", ""),
    "P25": ("The tests notice planted faults.", "faults that no operator draws; of those drawn, see mutations.md"),
}

# promises: the promises it proves; short, full: its command, None where that form has none; minutes: of the full form;
# kind: how its output is counted
Part = collections.namedtuple("Part", "name promises short full minutes kind")


def tests(name, promises, program, patterns, long_environment="", minutes=2):
    """tests of a program of Catch2, chosen by name; cases: assertions"""
    command = f"build/test/{program} {shlex.quote(patterns)}"
    full = f"env {long_environment} {command}" if long_environment else command
    return Part(name, promises, command, full, minutes, "assertions")


def attack(scene, promises, count=500, minutes=2):
    command = f"python3 test/attack/attack.py {scene} --count "
    return Part(f"attack {scene}", promises, f"{command}8", f"{command}{count} --seed 2", minutes, "cases")


def scripts(name, promises, words, short=True):
    command = f"python3 test/ranks/test_ranks.py {words}"
    return Part(name, promises, command if short else None, command, 1, "tests")


def ranks(promise, only, minutes):
    command = f"python3 test/ranks/ranks_long.py --minutes {minutes} --only {only}"
    return Part(f"ranks-long {only}", promise, None, command, minutes, "cases")


def parsers():
    """the names of the fuzzer's targets"""
    with open(os.path.join(ROOT, "test", "fuzz", "fuzz_files.cu"), encoding="utf-8") as f:
        return re.findall(r'\{"(\w+)", fuzz_\w+, seeds_', f.read())


FAULTS, RUN, CHECKPOINT = "programs/test_faults", "programs/test_run", "files/test_checkpoint"
PARTS = [
    tests("kills at every call", "P1", FAULTS, "faults: a run killed at any call*"),
    tests("kills of processes", "P1", RUN, "run: killed at any instant*,run: resumed in a fresh process*"),
    attack("kills", "P1", minutes=12),
    tests("power failures", "P2", FAULTS, "faults: the power fails*", "CABLE_CRASH_IMAGES=100000", 10),
    tests("order of syncs", "P2", CHECKPOINT, "checkpoint: files and directory are synced*"),
    tests("failing calls", "P3", FAULTS, "faults: whichever call fails*,faults: a run whose disk fails*,"
          "faults: signals in other calls*"),
    tests("full disks", "P4", CHECKPOINT, "checkpoint: a full disk*"),
    tests("full disks in a run", "P4", FAULTS, "faults: training continues after*,faults: how many checkpoints*"),
    tests("damage", "P5 P6", CHECKPOINT, "checkpoint: every kind of damage*,checkpoint: manifests that lie*,"
          "checkpoint: the newest good one*,checkpoint: old ones are deleted*,checkpoint: what is not a checkpoint*"),
    tests("one run at a time", "P6", CHECKPOINT, "output directory: one run at a time"),
    tests("damage before a run", "P6", RUN, "run: a damaged checkpoint is passed over"),
    attack("flips", "P5 P6"),
    tests("hostile weights", "P7", "files/test_safetensors", "safetensors: hostile*,safetensors: a hostile*"),
    attack("hostile", "P7 P8"),
    tests("shards", "P8", "text/test_dataloader", "shards: *"),
    attack("data", "P8 P9"),
    tests("flags on resume", "P9", "programs/test_flags", "args: a resumed run*"),
    tests("another run", "P9", RUN, "run: a checkpoint of another model*,run: it is not resumed*,run: a resumed run*"),
    tests("order of samples", "P10", "text/test_dataloader", "order: *"),
    tests("order of masks", "P10", "text/test_mlm", "mlm: a pure function*,mlm: golden*"),
    tests("order of pairs", "P10", "text/test_documents", "documents: a batch of groups*"),
    tests("threads", "P11", RUN, "run: threads and recomputing*"),
    tests("threads of BERT", "P11",   "model/test_bert", "bert: same bits*,recomputing BERT*"),
    scripts("ranks", "P12", "Training.test_three_ranks Training.test_leaves", short=False),
    ranks("P12", "bits", 15),
    scripts("flipped bits", "P13", "Training.test_a_flipped_bit_is_found_within_100_steps"),
    tests("guard", "P14 P15 P21", "programs/test_guard", "guard: *"),
    tests("losses that are not finite", "P14", RUN, "run: a loss that is not finite*,run: a step that is skipped*"),
    tests("norms that are not finite", "P14", "layers/test_adamw", "gradient norm: NaN*"),
    tests("signals", "P16", RUN, "run: a signal ends it*,run: a second signal*"),
    attack("signals", "P16", minutes=12),
    scripts("a signal to one rank", "P16", "Training.test_a_signal_to_one_rank"),
    ranks("P16", "signals", 15),
    scripts("deaths", "P17", "Collectives.test_a_dead_rank Collectives.test_a_rank_that_hangs"),
    ranks("P17", "deaths", 15),
    attack("allocations", "P18"),
    attack("limits", "P18"),
    attack("descriptors", "P24 P3"),
    Part("fuzzers", "P19", "dev/fuzz.sh 3", None, 0, "executions"),
    *(Part(f"fuzz {name}", "P19", None, f"dev/fuzz.sh {60 * FUZZ_MINUTES} {name}", FUZZ_MINUTES, "executions")
      for name in parsers()),
    Part("address and undefined behaviour", "P20", None, "make asan", 4, "tests"),
    Part("threads under a sanitizer", "P20", None, "make race", 3, "tests"),
    tests("large logits", "P21", "layers/test_classifier", "classifier: logits of*,classifier: a NaN*"),
    tests("NaN under these flags", "P21", "base/test_device", "NaN and infinity*"),
    tests("flags", "P22", "programs/test_flags", "args: *"),
    tests("old checkpoints", "P23", RUN, "run: an old checkpoint*,run: old forms*"),
    tests("logs", "P24", "programs/test_log", "log: *"),
    Part("planted faults", "P25", None, "python3 test/mutations/mutate.py", 55, "faults"),
]


def counted(kind, text, code):
    """(cases, failures) that the output of a part names; a part that fails without a count has one failure"""
    def number(pattern):
        found = re.findall(pattern, text, re.M)
        return int(found[-1]) if found else 0

    if kind == "assertions":
        cases = number(r"^All tests passed \((\d+) assertion") or number(r"^assertions: (\d+) ")
        failures = number(r"^assertions: .* (\d+) failed") or number(r"^test cases: .* (\d+) failed")
    elif kind == "faults":
        failures = number(r"(\d+) survived")
        cases = number(r"(\d+) killed") + failures
    elif re.search(r"^Ran \d+ tests? in ", text, re.M):
        cases = number(r"^Ran (\d+) tests? in ")
        failures = number(r"^FAILED .*failures=(\d+)") + number(r"^FAILED .*errors=(\d+)")
    else:
        failures = number(r"^\d+ passed, (\d+) failed")
        cases = number(r"^(\d+) passed, ") + failures + number(r"^\d+ cases, (\d+) of them done already")
        if kind == "executions":
            cases = sum(int(n) for n in re.findall(r"(\d+) executions ", text))
    return cases, failures or int(code != 0)


def execute(command):
    """(what it printed, its exit code)"""
    environment = {"TRAIN_GPT2": "./train_gpt2", "TRAIN_BERT": "./train_bert", "OMP_WAIT_POLICY": "passive",
                   **os.environ}
    p = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return p.stdout.decode(errors="replace"), p.returncode


def programs(parts, form):
    """what make must build for these"""
    words = [word for p in parts for word in shlex.split(getattr(p, form))]
    found = {word for word in words if word.startswith("build/test/")}
    if "test/ranks/test_ranks.py" in words:
        found.add("build/comm_program")
    return sorted(found | {"train_gpt2", "train_bert"})


def since_failure(rows, name):
    """the rows of a part since it last failed, but those that left cases to do; where the last one failed, that one"""
    mine = [r for r in rows if r["part"] == name and not (" left" in r["what"] and r["failures"] == "0")]
    failed = [i for i, r in enumerate(mine) if int(r["failures"])]
    if failed and failed[-1] == len(mine) - 1:
        return mine[-1:]
    return mine[failed[-1] + 1 if failed else 0:]


def due(part, rows, commit):
    if part.kind == "executions":
        return sum(float(r["seconds"]) for r in since_failure(rows, part.name)) < 60 * FUZZ_TARGET
    return not any(r["commit"] == commit and r["failures"] == "0" for r in since_failure(rows, part.name))


def report():
    rows = ledger.read(CSV)
    lines = ["# What is promised, and what the tests saw", "",
             "Written by `make reliability`, from `reliability.csv`. The count of cases restarts when a part fails.",
             "",
             "| promise | proved by | cases | failures | on | not covered |", "|---|---|---|---|---|---|"]
    for number, (sentence, open_) in PROMISES.items():
        parts = [p for p in PARTS if number in p.promises.split() and p.full]
        label = f"**{number}** {sentence}"
        missing = []
        for part in parts:
            mine = since_failure(rows, part.name)
            if not mine:
                missing.append(part.name)
                continue
            cases, failures = (sum(int(r[k]) for r in mine) for k in ("cases", "failures"))
            extra = ""
            if part.kind == "executions":
                extra = f" in {sum(float(r['seconds']) for r in mine) / 60:.0f} min, {mine[-1]['what']}"
            cells = [label, part.name, f"{cases:,} {part.kind}{extra}", str(failures), mine[-1]["commit"], open_]
            lines.append(f"| {' | '.join(cells)} |")
            label = open_ = ""
        if missing or not parts:
            said = "not yet run at full length" if parts else "-"
            lines.append(f"| {label} | {', '.join(missing)} | {said} | | | {open_} |")
    with open(REPORT, "w", encoding="ascii") as f:
        f.write("\n".join(lines) + "\n")
    print(f"wrote {os.path.relpath(REPORT)}")


def run(parts, form, minutes):
    """runs each; (passed, failed, left for lack of time)"""
    commit = ledger.commit("llmc", "train_gpt2.cu", "train_bert.cu", clean=True) if form == "full" else ""
    rows = ledger.read(CSV)
    if form == "full":
        chosen, parts = len(parts), [p for p in parts if due(p, rows, commit)]
        print(f"{chosen} parts, {chosen - len(parts)} of them done already, on {commit}", flush=True)
    if not parts:
        return 0, 0, 0
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 2)
    if subprocess.run(["make", f"-j{jobs}", *programs(parts, form)], cwd=ROOT, check=False).returncode != 0:
        return 0, 1, len(parts)
    start, passed, failed = time.monotonic(), 0, 0
    left = sum(p.minutes for p in parts)
    late = []
    for i, part in enumerate(parts):
        elapsed = (time.monotonic() - start) / 60
        if form == "full" and i and elapsed + part.minutes > minutes:
            late.append(part.name)
            continue
        begun = time.monotonic()
        text, code = execute(getattr(part, form))
        seconds = time.monotonic() - begun
        cases, failures = counted(part.kind, text, code)
        if cases == 0 and failures == 0 and "skipped" not in text.lower():
            failures = 1                                    # a test that was renamed proves nothing
        passed, failed, left = passed + (failures == 0), failed + (failures != 0), left - part.minutes
        eta = f", ETA {left} min" if form == "full" and left else ""
        print(f"{part.promises:12} {part.name:34} {cases:9,} {part.kind:11} {failures:3} failures "
              f"{seconds:7.1f} s{eta}", flush=True)
        if failures:
            print(f"{text[-4000:]}\n{getattr(part, form)}: exit code {code}", flush=True)
        if form == "full" and cases + failures:
            what = " ".join(re.findall(r"\d+ edges|[1-9]\d* cases are left", text))
            ledger.append(CSV, {"commit": commit, "part": part.name, "cases": cases, "failures": failures,
                                "seconds": f"{seconds:.1f}", "what": what})
    return passed, failed, len(late)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=ledger.part_of, default=(1, 1), metavar="K/N",
                        help="every n-th part, from the k-th on")
    parser.add_argument("--only", nargs="+", metavar="P1", help="these promises, or parts by name")
    parser.add_argument("--minutes", type=float, default=58, help="no part begins that would end later")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(argv)
    if options.report:
        report()
        return
    known = {*PROMISES, *(p.name for p in PARTS)}
    for name in options.only or []:
        if name not in known:
            parser.error(f"--only: expected one of P1 to P{len(PROMISES)} or the name of a part, got {name}")
    form = "short" if options.short else "full"
    parts = [p for p in PARTS if getattr(p, form)]
    if options.only:
        parts = [p for p in parts if p.name in options.only or set(p.promises.split()) & set(options.only)]
    passed, failed, left = run(ledger.share(options.part, parts), form, options.minutes)
    if form == "full":
        report()
        print(f"{left} parts are left")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    console.run(main)
