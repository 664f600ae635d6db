#!/usr/bin/env python3
"""ranks_long.py -- what is promised of several ranks, at full length: the samples in test_ranks.py are its short form.

    make ranks-long                        all cases, or as many as fit into an hour
    make ranks-long PART=2/4               the second quarter of them
    make ranks-long ARGS='--only bits --minutes 10'
    make ranks-long ARGS=--summary         counts what build/ranks_long.csv holds; runs nothing

  bits      100 steps of none, cable, t5 and rope, by both trainers, for three --B: 1, 2, 4 and 8 ranks save
            the same
  signals   a signal at a random moment to one of 2 or 4 ranks, or to the program that started them: the run saves and
            ends with 75, or has not begun, or is done; resumed, on another number of ranks, it saves the same bits
  deaths    kill -9 or SIGSTOP at a random moment: all are gone within 10 s of the death, or 5 s of the deadline; the
            message says which rank, and of a rank that stopped also which collective

Each case is drawn from its name only, and is a row of the CSV with the commit of the sources that it ran on. A case
that has passed on this commit is not run again, so that one run continues where another stopped."""
import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "scripts")]
import console                                              # noqa: E402
import ledger                                               # noqa: E402
from console import BadInput                                # noqa: E402
import test_ranks as ranks_of                               # noqa: E402  its launchers, processes and limits

RESULTS = os.path.join(ranks_of.ROOT, "build", "ranks_long.csv")
SOURCES = ["llmc", "train_gpt2.cu", "train_bert.cu"]
TRAINERS = {"gpt2": ranks_of.TRAINER, "bert": ranks_of.BERT_TRAINER}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
DEADLINE = 4            # --collective_timeout of the deaths, in seconds
STEPS = 40              # of a run that is interrupted


class Failure(Exception):
    pass


def expect(condition, message):
    if not condition:
        raise Failure(message)


def cases():
    """[(promise, name)], in an order that mixes them, so that each part has some of each"""
    bits = [("bits", f"{trainer} {pos} B={B}") for trainer in TRAINERS for pos in ("none", "cable", "t5", "rope")
            for B in (1, 2, 4)]
    found = bits + [("signals", str(i)) for i in range(300)] + [("deaths", str(i)) for i in range(100)]
    random.Random(1).shuffle(found)
    return found


class Case:
    """A directory with a text, and the runs in it."""

    def __init__(self, directory, promise, name):
        self.directory = directory
        self.rng = random.Random(f"{promise} {name}")
        self.text = os.path.join(directory, "text.txt")
        with open(os.path.join(ranks_of.ROOT, "LICENSE"), "rb") as source, open(self.text, "wb") as f:
            f.write(source.read() * 10)

    def command(self, out, trainer, steps, every, *flags, B=1, samples=8):
        quiet = ["--sample_every", "7"] if trainer == "gpt2" else []
        return [TRAINERS[trainer], "--train_files", self.text, "--val_files", self.text, "--model", "2,4,96", "--T",
                "32", "--B", str(B), "--total_batch", str(32 * samples), "--steps", str(steps), "--lr", "1e-2",
                "--warmup", "2", "--val_every", "5", "--val_batches", "3", "--checkpoint_every", str(every),
                "--threads", "1", "--out", os.path.join(self.directory, out), *quiet, *flags]

    def run(self, ranks, command):
        code, output = ranks_of.run(ranks, *command)
        expect(code == 0, f"{ranks} ranks: exit code {code}: {output[-500:]}")

    def hash(self, out, step):
        """sha256 of the model's file, and of the moments by their names, whichever ranks have written them"""
        tensors = ranks_of.tensors_of(os.path.join(self.directory, out, f"step_{step:08d}"))
        model, moments = tensors.pop("model.safetensors"), hashlib.sha256()
        for name, data in tensors.items():
            moments.update(name.encode() + data)
        return [hashlib.sha256(model).hexdigest(), moments.hexdigest()]

    def saved(self, out, step):
        return os.path.isdir(os.path.join(self.directory, out, f"step_{step:08d}"))


def bits(case, name):
    trainer, pos, B = name.split()
    found = {}
    for ranks in 1, 2, 4, 8:
        out = f"out{ranks}"
        case.run(ranks, case.command(out, trainer, 100, 50, "--pos", pos, B=int(B[2:]), samples=32))
        found[ranks] = [case.hash(out, step) for step in (50, 100)]
    different = [ranks for ranks in found if found[ranks] != found[1]]
    expect(not different, f"other bits on {different} ranks")
    expect(found[1][0] != found[1][1], "training changes nothing")
    return "1, 2, 4 and 8 ranks: " + found[1][1][0][:12]


def begin(case, command, ranks, own):
    """the launcher of a run with this number of ranks: the trainer itself, or mpirun"""
    if own:
        return ranks_of.started(ranks, *command, "--ranks", str(ranks), launcher=[])
    return ranks_of.started(ranks, *command)


def wait_until(process, begun, moment):
    while process.poll() is None and time.monotonic() < begun + moment:
        time.sleep(0.005)


def signals(case, _):
    rng = case.rng
    trainer, own, ranks = rng.choice(list(TRAINERS)), rng.random() < 0.5, rng.choice([2, 4])
    number = rng.choice(SIGNALS)
    begun = time.monotonic()
    case.run(1, case.command("alone", trainer, STEPS, 10))
    span = 0.3 + 2.5 * (time.monotonic() - begun)           # several ranks take longer: the end is among the moments
    wanted = case.hash("alone", STEPS)
    command = case.command("out", trainer, STEPS, 10)
    with begin(case, command, ranks, own) as (process, pids, _, end):
        wait_until(process, time.monotonic(), rng.random() * span)
        pids.update(ranks_of.processes(process.pid))
        # mpirun has no part in this, but the program that has started its own ranks hands signals on
        targets = ([process.pid] if own else []) + sorted(pids.values())
        target = rng.choice(targets) if targets else process.pid
        try:
            os.kill(target, number)
        except ProcessLookupError:
            pass                                            # it is done
        code, output, seconds = end()
    what = f"{trainer}, {ranks} ranks, {signal.Signals(number).name}, exit code {code}"
    found = re.search(r"stopped by signal \d+ (?:before step (\d+)|after the last step)", output)
    trains = "\nstep " in output
    if found:
        step = int(found.group(1) or STEPS + 1) - 1
        expect(code == 75, f"{what}: stopped at step {step}")
        expect(step == 0 or case.saved("out", step), f"{what}: step {step} is not saved")
        what += f", step {step}"
    else:
        expect(code == 0 or not trains or case.saved("out", STEPS), f"{what}: {output[-300:]}")
        what += ", done" if code == 0 else ", not begun"
    expect(seconds < ranks_of.AFTER_DEATH, f"{what}: all ended after {seconds:.1f} s")
    case.run(rng.choice([1, 2, 4]), [*command, "--resume", "1"])
    expect(case.hash("out", STEPS) == wanted, f"{what}: other bits after it was resumed")
    return what


def deaths(case, _):
    rng = case.rng
    trainer, own, ranks = rng.choice(list(TRAINERS)), rng.random() < 0.5, rng.choice([2, 4])
    number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
    command = case.command("out", trainer, 100000, rng.choice([2, 10, 1000]), "--keep", "2", "--collective_timeout",
                           str(DEADLINE))
    with begin(case, command, ranks, own) as (_, pids, until, end):
        until(lambda text: "\nstep " in text)
        time.sleep(rng.random() * 2)
        victim = rng.randrange(ranks)
        os.kill(pids[victim], number)
        code, output, seconds = end()
    stopped = number == signal.SIGSTOP
    by = "--ranks" if own else "mpirun"
    what = f"{trainer}, {ranks} ranks by {by}, {number.name} of {victim}, {seconds:.1f} s"
    expect(code != 0, f"{what}: exit code 0")
    limit = DEADLINE + ranks_of.AFTER_DEADLINE if stopped else ranks_of.AFTER_DEATH
    expect(seconds < limit, f"{what}: expected less than {limit} s")
    named = rf"rank {victim}\b"
    if stopped:
        named = rf"error: \w.*: rank \d waited \d+ s for {named} \(--collective_timeout"
    expect(re.search(named, output), f"{what}: the rank is not named: {output[-500:]}")
    return what


def summary():
    """the last result of each case counts, on any commit"""
    last = {(r["promise"], r["case"]): r for r in ledger.read(RESULTS)}
    print("| promise | cases | ran | failed | commits |\n|---|---|---|---|---|")
    for promise in ("bits", "signals", "deaths"):
        mine = [r for (p, _), r in last.items() if p == promise]
        commits = ", ".join(sorted({r["commit"] for r in mine})) or "-"
        failed = [r["case"] for r in mine if r["passed"] != "1"]
        of = sum(p == promise for p, _ in cases())
        print(f"| {promise} | {of} | {len(mine)} | {len(failed)} | {commits} |")
        for case in failed:
            print(f"  failed: {promise} {case}: {last[promise, case]['what']}")


def run_case(promise, name, commit, memory):
    """whether it passed"""
    work = {"bits": bits, "signals": signals, "deaths": deaths}[promise]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cable_ranks_", dir=memory) as directory:
        try:
            passed, what = 1, work(Case(directory, promise, name), name)
        except subprocess.TimeoutExpired as e:
            passed, what = 0, f"did not end within {e.timeout} s"
        except (Failure, AssertionError, OSError, subprocess.SubprocessError) as e:
            passed, what = 0, " ".join(str(e).split()).encode("ascii", "replace").decode()[-1000:]
    seconds = f"{time.monotonic() - begun:.1f}"
    ledger.append(RESULTS, {"commit": commit, "promise": promise, "case": name, "passed": passed, "seconds": seconds,
                            "what": what})
    if not passed:
        print(f"FAILED {promise} {name}: {what}", flush=True)
    return passed == 1


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=ledger.part_of, default=(1, 1), metavar="K/N",
                        help="every n-th case, from the k-th on")
    parser.add_argument("--only", choices=["bits", "signals", "deaths"])
    parser.add_argument("--case", help="this one alone; with --only")
    parser.add_argument("--minutes", type=float, default=58, help="no case begins later")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(argv)
    if options.summary:
        summary()
        return
    for trainer in TRAINERS.values():
        if ranks_of.why_not(trainer):
            raise BadInput(ranks_of.why_not(trainer))
    commit = ledger.commit(*SOURCES, clean=True)
    done = {(r["promise"], r["case"]) for r in ledger.read(RESULTS)
            if r["passed"] == "1" and r["commit"] == commit}
    wanted = [c for c in ledger.share(options.part, cases())
              if options.only in (None, c[0]) and options.case in (None, c[1])]
    due = [c for c in wanted if c not in done or options.case]
    print(f"{len(wanted)} cases, {len(wanted) - len(due)} of them done already, on {commit}", flush=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    start = last = time.monotonic()
    failed = ran = 0
    for promise, name in due:
        if time.monotonic() - start > 60 * options.minutes:
            break
        failed += not run_case(promise, name, commit, memory)
        ran += 1
        if time.monotonic() - last >= 60:
            last = time.monotonic()
            eta = (last - start) / ran * (len(due) - ran)
            print(f"{ran} of {len(due)} cases, {failed} failures, ETA {eta / 60:.0f} min", flush=True)
    print(f"{len(due) - ran} cases are left")
    print(f"{ran - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    console.run(main)
