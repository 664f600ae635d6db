"""test_log_to_tensorboard.py -- a log as TensorBoard and Weights & Biases read it. Needs them (make exports)."""
import glob
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
import unittest

import interpreter

if __name__ == "__main__":
    interpreter.choose("tensorboard, wandb")

from folder import SCRIPTS, Folder, read_bytes  # noqa: E402

LOG = [{"kind": "config", "time": "2026-01-31T12:00:00.000Z", "flags": {"lr": 0.1}},
       {"kind": "train", "step": 3, "loss": 2.5, "lr": 0.125, "time": "2026-01-31T12:00:01.500Z"},
       {"kind": "val", "step": 4, "loss": None, "dead_heads": 0.25, "time": "2026-01-31T12:00:02.000Z"},
       {"kind": "extrapolation", "pos": "cable", "T": 64, "T_train": 32, "stride": 64, "windows": 9, "ppl": 7,
        "time": "2026-01-31T12:00:03.000Z"},
       {"kind": "extrapolation", "pos": "cable", "T": 64, "T_train": 32, "stride": 16, "windows": 9, "ppl": 5}]
VALUES = {("train/loss", 3): 2.5, ("train/lr", 3): 0.125, ("val/dead_heads", 4): 0.25,
          ("extrapolation/ppl at T 64", 4): 7.0, ("extrapolation/ppl at T 64, stride 16", 4): 5.0}
NOON = 1769860800                                                       # 2026-01-31, UTC


def needs(name):
    return unittest.skipUnless(importlib.util.find_spec(name), f"SKIPPED: {name} is not installed (make exports)")


def wandb_records(path):
    """of an offline run: one block of LevelDB's log after a header of 7 bytes"""
    from wandb.proto.wandb_internal_pb2 import Record
    with open(path, "rb") as f:
        data = f.read()[7:]
    while data:
        _, length, _ = struct.unpack("<IHB", data[:7])
        yield Record.FromString(data[7:7 + length])
        data = data[7 + length:]


class LogToTensorboard(Folder):
    def run_script(self, *args, **environment):
        return subprocess.run([sys.executable, os.path.join(SCRIPTS, "log_to_tensorboard.py"), *args], cwd=self.folder,
                              env={**os.environ, "PYTHONPATH": self.folder, **environment}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)

    def copied(self, *args):
        """the log, with a line that a crash has cut short, goes to one of the two"""
        self.write("run/log.jsonl", ''.join(json.dumps(r) + "\n" for r in LOG) + '{"kind":')
        r = self.run_script("run", *args, WANDB_MODE="offline")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("run: 5 records", r.stdout)

    def scalars(self):
        """[(tag, step, value, time after noon)] of all events of the run"""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(self.path("run"))
        events.Reload()
        return [(tag, e.step, e.value, e.wall_time - NOON) for tag in events.Tags()["scalars"]
                for e in events.Scalars(tag)]

    @needs("tensorboard")
    def test_tensorboard(self):
        self.copied()
        found = self.scalars()
        self.assertEqual({(tag, step): value for tag, step, value, _ in found}, VALUES)
        self.assertEqual({(step, time) for _, step, _, time in found}, {(3, 1.5), (4, 2), (4, 3)})
        events = read_bytes(self.path("run", "events.out.tfevents.log"))
        self.copied()                                                   # again, and after more steps: no point twice
        self.assertEqual(self.scalars(), found)
        more = {"kind": "train", "step": 5, "loss": 2.0, "ms": 250}     # of an older version: without a time
        self.write("run/log.jsonl", "".join(json.dumps(r) + "\n" for r in (*LOG, more)))
        self.assertEqual(self.run_script("run").returncode, 0)
        added = [("train/loss", 5, 2.0, 3.25), ("train/ms", 5, 250, 3.25)]
        self.assertEqual(sorted(self.scalars()), sorted(found + added))
        self.assertTrue(read_bytes(self.path("run", "events.out.tfevents.log")).startswith(events))
        self.write("run/log.jsonl", "".join(json.dumps(r) + "\n" for r in (LOG[0], {**LOG[1], "loss": 2.25})))
        self.assertEqual(self.run_script("run").returncode, 0)          # resumed at step 3
        self.assertEqual(self.scalars(), [("train/loss", 3, 2.25, 1.5), ("train/lr", 3, 0.125, 1.5)])
        self.assertEqual(sorted(os.listdir(self.path("run"))), ["events.out.tfevents.log", "log.jsonl"])
        for time, step in ((5, 1), ("soon", 2), ("0001-01-01", 3), ("2026-01-31T12:00:01Z", 1 << 63)):
            self.write("run/log.jsonl", json.dumps({"kind": "train", "step": step, "time": time, "loss": 1}) + "\n")
            r = self.run_script("run")
            self.assertEqual((r.returncode, len(r.stderr.splitlines())), (2, 1), r.stderr)
            self.assertIn("log.jsonl: expected steps below" if step > 9 else "log.jsonl: line 1: time: exp", r.stderr)

    @needs("tensorboard")
    def test_follow(self):
        self.write("run/log.jsonl", json.dumps(LOG[0]) + "\n")
        command = [sys.executable, os.path.join(SCRIPTS, "log_to_tensorboard.py"), "run", "--follow"]
        with subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True) as process:
            try:
                for r in LOG[1:3]:
                    with open(self.path("run", "log.jsonl"), "a") as f:
                        f.write(json.dumps({**r, "loss": r["step"]}) + "\n")
                    end = time.monotonic() + 60
                    while not (os.path.exists(self.path("run", "events.out.tfevents.log")) and
                               any(step == r["step"] for _, step, _, _ in self.scalars())):
                        self.assertLess(time.monotonic(), end)
                        self.assertIsNone(process.poll())
                        time.sleep(0.1)
            finally:
                process.terminate()
            said = process.communicate()[1]
        self.assertEqual((process.returncode, sorted(self.scalars())), (75, [
            ("train/loss", 3, 3, 1.5), ("train/lr", 3, 0.125, 1.5), ("val/dead_heads", 4, 0.25, 2),
            ("val/loss", 4, 4, 2)]), said)

    @needs("wandb")
    def test_wandb(self):
        self.copied("wandb")
        path, = glob.glob(self.path("wandb", "offline-run-*", "*.wandb"))
        config, values, names = {}, {}, set()
        for record in wandb_records(path):
            if record.HasField("run"):
                config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
                names.add(record.run.run_id)
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                if not name.startswith("_") or name == "_timestamp":
                    values[name, record.history.step.num] = json.loads(item.value_json)
        self.assertEqual({step: values.pop(("_timestamp", step)) - NOON for step in (3, 4)}, {3: 1.5, 4: 3})
        self.assertEqual(values, VALUES)
        self.copied("wandb")                                            # again: the same run
        for path in glob.glob(self.path("wandb", "offline-run-*", "*.wandb")):
            names |= {record.run.run_id for record in wandb_records(path) if record.HasField("run")}
        self.assertEqual(len(names), 1)
        self.assertEqual({key: config.get(key) for key in LOG[0]}, LOG[0])

    def test_refusals(self):
        self.write("wandb.py", "raise ImportError('wandb is not installed')")
        self.write("run/log.jsonl", "")
        for args, naming in ((("run", "wandb"), "pip install wandb"), (("nowhere",), "nowhere"), ((), "RUN_DIR"),
                             (("a", "excel"), "RUN_DIR")):
            r = self.run_script(*args)
            self.assertEqual(r.returncode, 2, args)
            self.assertIn(naming, r.stderr)
            self.assertNotIn("Traceback", r.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
