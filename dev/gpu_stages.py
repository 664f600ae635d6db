"""gpu_stages.py -- the stages of gpu_check.py: each within its time, with every result on disk as soon as it is known.

A stage is a function of a Stage. It runs programs by stage.run(), and hands each result, a dictionary, to stage.do().
Check.run() enters the stages in turn, and in a later run those that are unfinished.
"""
import concurrent.futures
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from gpu_report import markdown
from ptxas_budget import console

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
FORMAT = "gpu-check 1"


class Failed(Exception):
    """one result is bad; the stage continues with the next"""


class Unfinished(Failed):
    """a result whose program was not built or reached its own cap; a rerun tries it again"""


class OutOfTime(Exception):
    """the stage has reached its cap; a rerun does what is missing"""


def without_root(error):
    """what it says, with paths that begin in this repository"""
    return str(error).replace(ROOT + os.sep, "")


class Result:
    def __init__(self, code, output, timed_out=False):
        self.code, self.output, self.timed_out = code, output, timed_out

    def tail(self, lines=15):
        return "\n".join(self.output.rstrip().split("\n")[-lines:])


class Runner:
    """The only place that starts programs. A program that reaches its cap is ended together with all its children."""

    def __init__(self):
        self.live, self.lock = set(), threading.Lock()

    def which(self, name):
        return shutil.which(name) or next((p for p in glob.glob("/usr/local/cuda/bin/" + name)), None)

    def kill(self, process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end_all(self):
        with self.lock:
            for process in self.live:
                self.kill(process)

    def run(self, command, cap, on_line=None, env=None):
        """on_line(text, seconds) gets each line as it arrives"""
        began, output, late = time.monotonic(), [], threading.Event()
        try:
            process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, **(env or {})), text=True,
                                       errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as e:
            return Result(127, f"{command[0]}: {e.strerror}")
        with self.lock:
            self.live.add(process)
        timer = threading.Timer(cap, lambda: (late.set(), self.kill(process)))
        timer.start()
        try:
            for line in process.stdout:
                output.append(line)
                if on_line:
                    on_line(line.rstrip("\n"), time.monotonic() - began)
            code = process.wait()
        finally:
            timer.cancel()
            self.kill(process)
            process.wait()
            with self.lock:
                self.live.discard(process)
            process.stdout.close()
        return Result(code, "".join(output)[-200000:], late.is_set())


class Report:
    """the results of one GPU and commit, on disk after every change; names: of all stages"""

    def __init__(self, directory, device, commit, sources, names):
        self.names = names
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-") + "_" + commit + ".json")
        self.lock = threading.RLock()
        self.data = {"format": FORMAT, "gpu": device, "commit": commit, "sources": sources, "stages": {}}
        self.kept = False
        if not os.path.exists(self.path):
            return
        try:
            with open(self.path) as f:
                old = json.load(f)
            assert old["format"] == FORMAT and isinstance(old["stages"], dict)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise SystemExit(f"{self.path}: not a result of this program (expected format {FORMAT!r}); move it away")
        if old["sources"] == sources:
            self.data, self.kept = old, True

    def stage(self, name):
        return self.data["stages"].setdefault(name, {"status": "unfinished", "seconds": 0.0, "items": {}})

    def save(self, whole=False):
        """whole: as Markdown, too"""
        with self.lock:
            console.write_whole(self.path, json.dumps(self.data, indent=1, sort_keys=True) + "\n")
            if whole:
                console.write_whole(self.path[:-len(".json")] + ".md", markdown(self.data, self.names))


class Stage:
    """one stage while it runs"""

    def __init__(self, name, cap, check):
        self.name, self.cap, self.check, self.runner = name, cap, check, check.runner
        self.record = check.report.stage(name)
        self.items = self.record["items"]
        self.began, self.before = check.clock(), self.record["seconds"]
        self.done = self.total = 0
        self.stopped = False

    def left(self):
        return 0.0 if self.stopped else self.cap - (self.check.clock() - self.began)

    def run(self, command, cap, fine=(0,), slow_ok=False, **more):
        """The command's Result. Raises Failed if its exit code is not among `fine` or it reaches its own cap, and
        OutOfTime if the stage reaches its cap first."""
        left = self.left()
        if left <= 0.5:
            raise OutOfTime
        result = self.runner.run(command, min(cap, left), **more)
        if result.timed_out:
            if left < cap:
                raise OutOfTime
            if slow_ok:
                return result
            raise Unfinished(f"{' '.join(command)[:300]}: ended at its cap of {cap} s\n{result.tail()}")
        if fine is not None and result.code not in fine:
            raise Failed(f"{' '.join(command)[:300]}: exit code {result.code}\n{result.tail()}")
        return result

    def put(self, name, record):
        with self.check.report.lock:
            self.items[name] = record
            self.record["seconds"] = self.before + self.check.clock() - self.began
            self.check.report.save()

    def do(self, name, work, *args):
        """an item's record: that of an earlier run, else what work(*args) returns, a dictionary"""
        if name in self.items and not self.items[name].get("unfinished"):
            self.done += 1
            return
        if self.left() <= 0.5:
            raise OutOfTime
        began = self.check.clock()
        try:
            record = dict(work(*args))
            record.setdefault("ok", True)
        except Failed as e:
            record = {"ok": False, "error": without_root(e), "unfinished": isinstance(e, Unfinished)}
        record["seconds"] = round(self.check.clock() - began, 2)
        self.put(name, record)
        self.done += 1
        self.check.progress(self, name, record)

    def do_all(self, work, workers=1):
        """work: a list of (name, function, args...); several run at once if they do not share the GPU"""
        self.total = max(self.total, self.done + len(work))
        if workers == 1:
            for w in work:
                self.do(*w)
            return
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(self.do, *w) for w in work]:
                    future.result()
            except BaseException:
                self.stopped = True                     # nothing new begins
                self.runner.end_all()
                raise


class Check:
    """stages: (name, function of a Stage, cap in seconds); always: those that each run enters again"""

    def __init__(self, runner, report, stages, always=(), minutes=0, clock=time.monotonic):
        self.runner, self.report, self.stages, self.always, self.minutes = runner, report, stages, always, minutes
        self.clock = clock
        self.ends = clock() + 60 * minutes if minutes else None
        self.remaining = 0.0                            # sum of the caps of the later stages

    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    def progress(self, stage, name, record):
        left = max(0, stage.left() + self.remaining) / 60
        verdict = "ok" if record["ok"] else "FAILED"
        of = f" {stage.done}/{stage.total}" if stage.total else ""
        self.say(f"[{stage.name}{of}] {name}: {verdict}; at most {left:.1f} min left")
        if not record["ok"]:
            self.say("    " + record.get("error", "").replace("\n", "\n    "))

    def run_stage(self, name, work, cap):
        stage = Stage(name, cap, self)
        stage.record["status"] = "unfinished"
        stage.record.pop("error", None)
        try:
            work(stage)
            bad = [n for n, r in stage.items.items() if not r["ok"]]
            passed = "ok" if stage.items else "skipped"
            stage.record["status"] = "failed" if bad else passed
            if bad and all(stage.items[n].get("unfinished") for n in bad):
                stage.record.update(status="unfinished", error="not built, or ended at a cap: " + ", ".join(bad))
            elif not stage.items and not stage.record.get("note"):
                stage.record.update(status="failed", error="the stage has no results")
        except OutOfTime:
            stage.record["error"] = f"it reached its cap of {cap:.0f} s; run again to continue"
        except Failed as e:
            stage.record.update(status="unfinished" if isinstance(e, Unfinished) else "failed", error=without_root(e))
        finally:                                        # an interrupted stage stays "unfinished"
            stage.record["seconds"] = stage.before + self.clock() - stage.began
            self.report.save(whole=True)
        self.say(f"== {name}: {stage.record['status']}, {stage.record['seconds']:.0f} s"
                 + "".join(f"; {stage.record[k]}" for k in ("note", "error") if k in stage.record))

    def status(self, name):
        return self.report.data["stages"].get(name, {}).get("status", "not run")

    def run(self):
        """the exit code"""
        if self.report.kept:
            self.say(f"continuing with {self.report.path}")
        todo = [s for s in self.stages if self.status(s[0]) in ("unfinished", "not run") or s[0] in self.always]
        for i, (name, work, cap) in enumerate(todo):
            self.remaining = sum(s[2] for s in todo[i + 1:])
            left = self.ends - self.clock() if self.ends else cap
            if left < 5:
                self.say(f"== {name}: left for the next run, --minutes {self.minutes:g} are over")
                continue
            self.run_stage(name, work, min(cap, left))
            if name == "device" and self.status(name) == "failed":
                return 2                                # without a compiler and headers nothing else can work
        self.report.save(whole=True)
        states = {name: self.status(name) for name, *_ in self.stages}
        failed = [name for name, state in states.items() if state == "failed"]
        open_ones = [name for name, state in states.items() if state in ("unfinished", "not run")]
        kinds = (("FAILED", failed), ("unfinished", open_ones))
        words = [f"{what}: {', '.join(names)}" for what, names in kinds if names]
        self.say(f"{self.report.path[:-5]}.md: " + ("; ".join(words) or "all stages passed"))
        if failed:
            return 1
        return 3 if open_ones else 0
