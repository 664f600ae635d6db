"""test_log_to_tensorboard.py -- a log as TensorBoard and Weights & Biases read it. Needs them (make exports)."""
import glob
import importlib.util
import json
import os
import struct
import subprocess
import sys
import unittest

import interpreter

if __name__ == "__main__":
    interpreter.choose("tensorboard, wandb")

from folder import SCRIPTS, Folder  # noqa: E402

LOG = [{"kind": "config", "time": "2026-01-31", "flags": {"lr": 0.1}},
       {"kind": "train", "step": 3, "loss": 2.5, "lr": 0.125},
       {"kind": "val", "step": 4, "loss": None},
       {"kind": "extrapolation", "pos": "cable", "T": 64, "stride": 64, "ppl": 7}]
VALUES = {("train/loss", 3): 2.5, ("train/lr", 3): 0.125, ("extrapolation/ppl at T 64", 4): 7.0}


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
        self.assertIn("run: 4 records", r.stdout)

    @needs("tensorboard")
    def test_tensorboard(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        self.copied()
        events = EventAccumulator(self.path("run"))
        events.Reload()
        self.assertEqual({(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)},
                         VALUES)

    @needs("wandb")
    def test_wandb(self):
        self.copied("wandb")
        path, = glob.glob(self.path("wandb", "offline-run-*", "*.wandb"))
        config, values = {}, {}
        for record in wandb_records(path):
            if record.HasField("run"):
                config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                if not name.startswith("_"):
                    values[name, record.history.step.num] = json.loads(item.value_json)
        self.assertEqual(values, VALUES)
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
