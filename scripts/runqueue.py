"""runqueue.py -- runs the trainers' commands, several at a time. study.py and paper.py make the jobs; the queue makes
sure that nothing is done twice and nothing is lost.

A job is a list of commands, such as a training and its evaluations; a slot (some cores, or GPUs) takes the next job as
soon as it is free. A command that succeeded leaves a .done file and is skipped from then on, as long as the settings,
the model and the files that it was given are the same, and its results are what it has left. A job that fails
does not keep the rest from running; what its command printed last is shown at the end. Ctrl-C, SIGTERM and SIGHUP are
passed on to the commands as SIGTERM, upon which a trainer saves a checkpoint; the same command continues.
"""
import collections
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import console
import ledger
from console import ROOT, BadInput, say, show, write_whole

INTERRUPTED = console.EXIT_INTERRUPTED
LONGEST_LINE = 500                                      # characters of a failed command's output that are shown
# flags that change only speed, places or what is shown: a run may continue with other values
FREE = ("B", "allow_change", "checkpoint_every", "keep", "load", "out", "profile", "recompute", "resume",
        "sample_every", "threads", "tile_skip", "val_batches", "val_every")
# flags of files whose contents a result depends on; flags that leave records of a kind
INPUTS = ("train_files", "pairs", "distill", "val_files", "tasks", "hellaswag", "queries", "corpus", "qrels")
RECORDS = {"eval_lengths": "extrapolation", "curve": "curve", "corpus": "retrieval", "hellaswag": "hellaswag",
           "tasks": "task"}

# One process. flags: {flag: value}, None for a switch; marker: a .done file that is written after success and holds the
# flags, or a glob of the files that the command makes; flops: its share of the progress; ranks: whether it uses all
# GPUs of its slot; parts: {length: flops} of an evaluation at several lengths, in this order; validates: whether the
# last validation of a training is a result
Command = collections.namedtuple("Command", "title program flags out marker flops ranks parts validates",
                                 defaults=(False, {}, False))
Job = collections.namedtuple("Job", "label heading commands")
Failure = collections.namedtuple("Failure", "label what code log tail")


# ----------------------------------------------------------------------------------------------------------
# commands

def launcher(gpus):
    """mpirun; root, as in a container, has to tell Open MPI twice that it means it, and other MPIs do not read that"""
    allow = ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"] if os.geteuid() == 0 else []
    return [*allow, "mpirun", "-np", str(gpus)]


def arguments(command, gpus=1):
    """the words of the command line"""
    words = shlex.split(command.program)
    for name, value in command.flags.items():
        words += ["--" + name] + ([] if value is None else [value])
    return (launcher(gpus) if gpus > 1 and command.ranks else []) + words


def program(path):
    """the words of a program that is started in any directory; "" for none"""
    return path and shlex.quote(os.path.abspath(path))


def flags_of(words):
    """{flag: value} of words that the trainers take, --flag value or --flag=value; a flag without a value has None"""
    flags, name = {}, None
    for word in words:
        if word.startswith("--"):
            name, joined, value = word[2:].partition("=")
            if name in flags:
                raise BadInput(f"--{name}: is given twice")
            flags[name] = value if joined else None
        elif name is None or flags[name] is not None:
            raise BadInput(f"{word}: expected a flag, because --{name} has its value" if name else
                           f"{word}: expected a flag")
        else:
            flags[name] = word
    return flags


def encodings_of(text):
    """the encodings in a list; a comma before key=value belongs to an encoding, as the trainers read --pos"""
    return re.split(r",(?![^,:+]*=)", text)


def settings_of(command):
    """what identifies the result of a command: its title and its flags"""
    free = (*FREE, "val_files") if "resume" in command.flags else FREE          # an evaluation is of its files
    return {"title": command.title, **{k: v for k, v in command.flags.items() if k not in free}}


def settings_file(command):
    """where a training that can be resumed keeps its settings from its start on, None for other commands"""
    return os.path.join(command.out, "settings.json") if "resume" in command.flags else None


def has_data(files):
    """Whether the files exist and the script that makes them has finished. Files without its manifest, which the user
    brought, count as finished."""
    files = os.path.join(ROOT, files)
    manifest = os.path.join(os.path.dirname(files), "manifest.json")
    return bool(glob.glob(files)) and (not os.path.exists(manifest) or read_object(manifest).get("complete") is True)


def read_object(path):
    """the JSON object that a file holds; an empty one if there is none"""
    try:
        return console.read_object(path)
    except BadInput:
        return {}


def is_done(command):
    """whether a command need not run"""
    if command.title == "data":
        return has_data(command.marker)
    if not command.marker.endswith(".done"):
        return bool(glob.glob(command.marker))
    done = read_object(command.marker)
    was, now = done.get("inputs"), inputs_of(command)
    # "": it has gone; an earlier version kept no checksum of what a training reads
    same = isinstance(was, dict) and all(now[name] in ("", was.get(name, now[name])) for name in now)
    try:
        return same and done == done_file(command, was, done.get("commit"))
    except BadInput:
        return False


def done_file(command, inputs, commit):
    """what the .done file of a command has"""
    done = {"settings": settings_of(command), "inputs": inputs, "results": results_of(command), "commit": commit}
    return {**done, "checksum": hashlib.sha256(json.dumps(done, sort_keys=True).encode()).hexdigest()}


def inputs_of(command):
    """{flag: checksum} of the files that a command is given, and of the weights that it loads"""
    flags = settings_of(command)
    path = lambda name: flags[name] + "/embeddings.safetensors" * (name == "distill")
    found = {name: checksum(path(name), name in ("train_files", "pairs")) for name in INPUTS if name in flags}
    return {**found, "load": weights_of(command.flags["load"])} if "load" in command.flags else found


def given_to(command):
    """what decides the results of a training beside its settings; files and programs that are missing are left out"""
    sums = inputs_of(command)
    given = {"trainer": build_of(command.program)}
    if command.validates:
        given["val_batches"] = command.flags.get("val_batches", "default")
        sums["val_files"] = checksum(command.flags.get("val_files", ""))
    given.update((f"{name}, contents", text and hashlib.sha256(text.encode()).hexdigest()[:12])
                 for name, text in sums.items())
    return {name: value for name, value in given.items() if value}


def checksum(files, sampled=False):
    """of the contents of all files of a glob; "" of none. sampled: of 64 blocks of each, because the texts of a
    training may have terabytes"""
    stats = [(path, os.stat(path)) for path in sorted(glob.glob(files))]
    return " ".join(checksum_of(path, sampled, s.st_size, s.st_ino, s.st_mtime_ns) for path, s in stats)


@functools.lru_cache(None)
def checksum_of(path, sampled, size, *_):
    if not sampled:
        return console.sha256_of(path)
    digest, block, count = hashlib.sha256(str(size).encode()), 1 << 16, 64
    with console.open_regular(path) as f:
        for n in range(count):
            f.seek(max(0, size - block) * n // (count - 1))
            digest.update(f.read(block))
    return digest.hexdigest()


def weights_of(checkpoint):
    """identifies the contents of a checkpoint, or of a run's newest one: its manifest's checksum, or its weights' if it
    has no manifest"""
    within = lambda *names: os.path.join(glob.escape(checkpoint), *names)
    found = sorted(glob.glob(within("step_*", "manifest.json")))
    return checksum(glob.escape(found[-1]) if found else within("manifest.json")) or checksum(within("*.safetensors"))


def results_of(command):
    """A checksum of what a command has left beside checkpoints. Raises BadInput if it lacks a kind of record that the
    command's flags require."""
    flags, kinds = command.flags, {kind for flag, kind in RECORDS.items() if flag in command.flags}
    names = ["output.log"] * ("generate" in flags)
    if "dump_bias" in flags:
        names, kinds = [os.path.basename(command.marker)[:-len(".done")] + ".json"], set()
    if "retrieval" in kinds:
        kinds.remove("extrapolation")
    if "resume" in flags:                                   # only a validation scores it then
        kinds.discard("hellaswag")
    found = [r for r in console.read_log(command.out, ended=True) if r["kind"] in kinds] if kinds else []
    for kind in kinds - {r["kind"] for r in found}:
        raise BadInput(f"{command.out}/log.jsonl: expected a record of kind {kind}, got none")
    if "token_losses" in flags:
        names += sorted(glob.glob("token_losses_*.safetensors", root_dir=command.out))
    return " ".join([hashlib.sha256(json.dumps(found).encode()).hexdigest(),
                     *(console.sha256_of(os.path.join(command.out, name)) for name in names)])


def mark_done(command):
    """writes the .done file of a command that has succeeded"""
    if command.marker.endswith(".done"):
        done = done_file(command, inputs_of(command), ledger.commit())
        write_whole(command.marker, json.dumps(done, sort_keys=True) + "\n")


def commit_of(command):
    """the commit that wrote the result of a finished command"""
    return str(read_object(command.marker).get("commit", "unknown"))


def refuse_changes(jobs):
    """raises BadInput, before anything is started, if runs that have a log were begun with other settings"""
    found = {}                                              # {difference: the directories that have it}
    for command in (c for job in jobs for c in job.commands if settings_file(c)):
        path, log = settings_file(command), os.path.join(command.out, "log.jsonl")
        if not os.path.exists(path):
            continue
        ours = "a text, as study.py writes it (move this file, or give another --out)", console.TEXT[1]
        kinds = {"title": ours}, {"given": console.OBJECT}
        was, given = console.fields(console.read_object(path), *kinds, path), given_to(command)
        if not os.path.exists(log):                                 # the trainer refused its flags
            continue
        now, before = {**settings_of(command), **given}, was.pop("given", {})
        was.update((k, before.get(k) or v) for k, v in given.items())       # unknown then: the same
        allowed = str(command.flags.get("allow_change", "")).split(",")
        for k in sorted({*was, *now}):
            if was.get(k) != now.get(k) and k.partition(",")[0] not in allowed:
                there, here = (str(settings.get(k, "not given")) for settings in (was, now))
                found.setdefault(f"--{k}: {there} there, {here} now", []).append(command.out)
    if found:
        lines = [f"  {what}: {places[0]}" + f" and {len(places) - 1} more" * (len(places) > 1)
                 for what, places in found.items()]
        raise BadInput("runs were begun with other settings; give those, or another --out:\n" + "\n".join(lines))


def largest_divisor(n, most):
    """the largest divisor of n that is at most `most`"""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def forward_flops(L, C, T, head, causal=True):
    """FLOPs of a forward pass per token: two per weight of a matrix, where the head makes `head` logits per token, and
    attention over T keys, or T / 2 on average if it is causal"""
    return 2 * (12 * L * C * C + head * C) + (2 if causal else 4) * L * C * T


@functools.lru_cache(None)
def help_of(trainer):
    """what a trainer's --help prints, which has a list of encodings"""
    try:
        text = subprocess.run([*shlex.split(trainer), "--help"], cwd=ROOT, capture_output=True, text=True,
                              errors="replace").stdout
    except OSError as e:
        raise BadInput(f"--trainer {trainer}: {e.strerror}; build it with make") from None
    if not console.encodings(text):
        raise BadInput(f"{trainer} --help: expected a list of encodings for --pos")
    return text


def build_of(trainer):
    """"float32, CPU" as the last line of its --help says, because the bits depend on it; "" of another program"""
    try:
        return "".join(re.findall(r"^commit \S+, (\w+, \w+), compiler", help_of(trainer), re.M))
    except BadInput:
        return ""


def knows(trainer, pos):
    """whether a trainer takes this encoding; None if it does not run"""
    command = [*shlex.split(trainer), "--check", "--pos", pos, "--train_files", ""]
    try:
        said = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True).stderr
    except OSError:
        return None
    return not said.startswith("error: --pos")          # which is looked at before the missing data


# ----------------------------------------------------------------------------------------------------------
# slots

def visible_gpus():
    """the GPUs that a program sees, [] if that is not known"""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU (\d+):", listed, re.M)


def slots(jobs, trainer="", gpus=1):
    """The environments of `jobs` jobs at a time: an equal share of the cores for each, or `gpus` GPUs for a trainer
    whose name ends in cu. jobs 0: one job for all cores, or a job for each GPU."""
    common = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}      # a waiting thread gives its core up
    if not trainer.rstrip("'").endswith("cu"):
        jobs = jobs or 1
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        share = {"OMP_NUM_THREADS": str(threads)} if jobs > 1 and "OMP_NUM_THREADS" not in os.environ else {}
        return [{**common, **share} for _ in range(jobs)]
    have = visible_gpus() if jobs != 1 else []              # a single job sees all of them
    jobs = jobs or max(1, len(have) // gpus)
    if have and jobs * gpus > len(have):
        raise BadInput(f"{jobs} jobs with {gpus} GPUs each: expected at most {len(have)} GPUs in use")
    if jobs == 1:
        return [common]
    have = have or [str(n) for n in range(jobs * gpus)]
    return [{**common, "CUDA_VISIBLE_DEVICES": ",".join(have[n * gpus:(n + 1) * gpus])} for n in range(jobs)]


# ----------------------------------------------------------------------------------------------------------
# progress

def duration(seconds):
    m, s = divmod(int(seconds), 60)
    return f"{m // 60}:{m % 60:02d}:{s:02d}" if m >= 60 else f"{m}:{s:02d}"


class Progress:
    """One line of progress and time left over all jobs, weighted by FLOPs. On a terminal it is rewritten, elsewhere a
    new one is printed every ten seconds; verbose: all output of the commands instead."""

    def __init__(self, total, verbose):
        self.total, self.verbose, self.done, self.ran = max(total, 1), verbose, 0.0, 0.0
        self.start, self.last, self.terminal = time.time(), 0.0, sys.stdout.isatty()
        self.parts = {}                                     # {job that runs: FLOPs of its command until now}

    def line(self, text, label, command):
        if self.verbose:
            show(text, end="")
            return
        step = re.match(r"step +(\d{1,18})/([1-9]\d{0,17}) \| loss +([\d.]+)", text)
        windows = re.match(r"evaluating at T = (\d{1,18}): (\d{1,3})%", text)
        if step:
            self.parts[label] = command.flops * int(step[1]) / int(step[2])
            self.say_part(label, f"step {step[1]} of {step[2]}, loss {step[3]}")
        elif windows and int(windows[1]) in command.parts:
            T, share = int(windows[1]), int(windows[2]) / 100
            before = itertools.takewhile(lambda length: length != T, command.parts)
            self.parts[label] = sum(command.parts[t] for t in before) + share * command.parts[T]
            self.say_part(label, f"{command.title} at T = {T:,}, {windows[2]}%")

    def say_part(self, label, what):
        if self.due():
            self.say(f"{label}: {what}" + f" (and {len(self.parts) - 1} more)" * (len(self.parts) > 1))

    def due(self):
        return time.time() - self.last >= (0.5 if self.terminal else 10)

    def say(self, what, stays=False):
        self.last = time.time()
        part = sum(self.parts.values())
        ran = self.ran + part
        left = (time.time() - self.start) * (self.total - self.done - part) / ran if ran else 0
        eta = f", {duration(left)} left" if ran else ""
        self.clear()
        show(f"[{100 * (self.done + part) / self.total:3.0f}%{eta}] {what}",
             end="\n" if stays or not self.terminal else "")

    def finished(self, label, command, ran):
        self.parts.pop(label, None)
        self.done += command.flops
        self.ran += command.flops if ran else 0

    def clear(self):
        if self.terminal and not self.verbose:
            with contextlib.suppress(OSError):
                print("\r\033[K", end="", flush=True, file=console.terminal(sys.stdout))


# ----------------------------------------------------------------------------------------------------------
# the queue

class Queue:
    """Each slot has a thread that starts its commands and reads what they print; the main thread waits for signals.
    `lock` guards everything that they share."""

    def __init__(self, name, jobs, environments, verbose=False, gpus=1):
        self.name, self.jobs, self.environments = name, list(jobs), environments
        self.gpus = gpus
        self.waiting = collections.deque(self.jobs)
        total = sum(c.flops for job in self.jobs for c in job.commands)
        self.progress = Progress(total, verbose and len(environments) == 1)
        self.lock = threading.RLock()
        self.of_marker = collections.defaultdict(threading.Lock)        # jobs may share data, or a run
        self.lost = {}                                                  # {marker of a failed command: its job's label}
        self.processes, self.failures, self.interrupted = set(), [], 0
        self.stopping, self.signals, self.interrupts = False, 0, 0

    def run(self):
        """runs all jobs; returns the exit code"""
        refuse_changes(self.jobs)
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                   if signal.getsignal(n) != signal.SIG_IGN]            # as under nohup
        before = {n: signal.signal(n, self.noted) for n in numbers}
        workers = [threading.Thread(target=self.work, args=(e,), daemon=True) for e in self.environments]
        for worker in workers:
            worker.start()
        handled = 0
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.05)
            if self.signals > handled:
                handled = self.signals
                self.stop(signal.SIGKILL if self.interrupts > 1 else signal.SIGTERM)
        for number, handler in before.items():
            signal.signal(number, handler)
        return self.conclude()

    def noted(self, number, _):
        self.signals += 1
        self.interrupts += number == signal.SIGINT

    def stop(self, number):
        with self.lock:
            self.progress.clear()
            if self.processes:
                how = "now" if number == signal.SIGKILL else "with a checkpoint of each; Ctrl-C again ends them now"
                say(f"{self.name}: stopping {len(self.processes)} runs {how}")
            self.stopping = True
            for process in self.processes:
                self.send(process, number)

    @staticmethod
    def send(process, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def work(self, environment):
        while True:
            with self.lock:
                if self.stopping or not self.waiting:
                    return
                job = self.waiting.popleft()
            try:
                self.run_job(job, environment)
            except Exception as e:                                      # as when a log cannot be written
                self.fail(Failure(job.label, console.reason(e), 1, "", []))
            with self.lock:
                self.progress.parts.pop(job.label, None)

    def run_job(self, job, environment):
        begin, ran_any = time.time(), False
        if self.progress.verbose and job.heading:
            show(f"# {job.label}: {job.heading}")
        for command in job.commands:
            with self.lock:
                turn = self.of_marker[command.marker]
            with turn:
                if command.marker in self.lost:
                    self.fail(Failure(job.label, f"{command.title} failed for {self.lost[command.marker]}", 1, "", []))
                    return
                ran = not is_done(command)
                if ran and not self.execute(command, job.label, environment):
                    self.interrupted += self.stopping
                    return
            if not ran and self.progress.verbose:
                show(f"# already done: {command.title} ({command.marker})")
            with self.lock:
                self.progress.finished(job.label, command, ran)
            ran_any = ran_any or ran
        if ran_any and not self.progress.verbose:
            with self.lock:
                self.progress.say(f"{job.label}: done in {duration(time.time() - begin)}", stays=True)

    def execute(self, command, label, environment):
        """runs a command and keeps its output; whether it succeeded"""
        words = arguments(command, self.gpus)
        log = os.path.join(command.out, "output.log") if command.out else os.devnull
        if command.out:
            os.makedirs(command.out, exist_ok=True)
        if settings_file(command):
            given = {**read_object(settings_file(command)).get("given", {}), **given_to(command)}
            begun = {**settings_of(command), "given": given}
            write_whole(settings_file(command), json.dumps(begun, sort_keys=True) + "\n")
        elif os.path.exists(os.path.join(command.out, "log.jsonl")):    # of other settings, or damaged
            old = os.path.join(command.out, "log.jsonl")
            os.rename(old, next(name for n in itertools.count(1) if not os.path.lexists(name := f"{old}.{n}")))
        tail, process = collections.deque(maxlen=8), None
        try:
            with os.fdopen(console.open_end(log), "a", encoding="utf-8") as f:
                process = self.start(words, command, label, environment)
                for text in process.stdout if process else ():
                    f.write(text)
                    tail.append(text[-LONGEST_LINE:])
                    with self.lock:
                        self.progress.line(text, label, command)
        except BaseException:                                           # as when the disk is full
            if process:
                self.send(process, signal.SIGKILL)
                self.end(process)
            raise
        if not process:
            return False
        code, seconds = self.end(process)
        with self.lock:
            self.progress.clear()
            if code == 0:
                try:
                    mark_done(command)
                    if command.marker.endswith("embeddings.safetensors"):
                        write_whole(os.path.join(command.out, "seconds"), f"{seconds:.2f}\n")
                    return True
                except BadInput as e:
                    self.fail(Failure(label, f"{command.title} left no record: {e}", 1, log, list(tail)))
                    return False
            if not self.stopping or code not in (INTERRUPTED, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM):
                self.lost[command.marker] = label
                self.fail(Failure(label, f"{command.title} ended with exit code {code}", max(code, 1),
                                  command.out and log, list(tail)))
        return False

    def start(self, words, command, label, environment):
        """starts the process in a group of its own, which a terminal's Ctrl-C does not reach; None if the queue is
        stopping or the program does not start"""
        with self.lock:
            if self.stopping:
                return None
            if self.progress.verbose:
                show("$ " + console.command_line(words))
            elif self.progress.due():
                self.progress.say(f"{label}: {command.title}")
            try:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                           stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                                           env={**os.environ, **environment}, **console.OWN_GROUP)
            except OSError as e:
                hint = "; build it with make" if os.path.basename(words[0]).startswith("train_") else ""
                self.fail(Failure(label, f"{words[0]}: {e.strerror}{hint}", 2, "", []))
                return None
            self.processes.add(process)
            return process

    def end(self, process):
        """the exit code of a process that prints no more, and its seconds of processors"""
        process.stdout.close()
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        except ChildProcessError:                                       # SIGCHLD is ignored
            process.wait()
            seconds = 0
        with self.lock:
            self.processes.discard(process)
        return process.returncode, seconds

    def fail(self, failure):
        with self.lock:
            self.failures.append(failure)
            if not self.progress.verbose:
                self.progress.say(f"{failure.label}: FAILED: {failure.what}", stays=True)

    def conclude(self):
        self.progress.clear()
        took = duration(time.time() - self.progress.start)
        unfinished = len(self.failures) + self.interrupted + len(self.waiting)
        how = "stopped" if self.stopping else "done"
        show(f"{how}: {len(self.jobs) - unfinished} of {len(self.jobs)} runs, {took}")
        for failure in self.failures:
            say(f"{self.name}: {failure.label}: {failure.what}" + f"; {failure.log} ends with" * bool(failure.log))
            show("".join("    " + line for line in failure.tail), end="", file=sys.stderr)
        if self.failures or self.stopping:
            say(f"{self.name}: run the same command again to continue")
        if self.stopping:
            return INTERRUPTED
        return self.failures[0].code if self.failures else 0
