"""test_multi_node.py -- scripts/multi_node/mpirun.sh and scripts/run_gpt2_*.sh, on CPU ranks with real data (from
CABLE_DATA). Each training is stopped by SIGUSR1 in its middle, resumes, and ends. slurm.sbatch: test_ranks.py."""
import glob
import os
import signal
import subprocess
import threading
import time
import unittest

from test_ranks import ENVIRONMENT, LIMIT, MPIRUN, PIPES, TRAINER
from folder import SCRIPTS, Folder

DATA = os.environ.get("CABLE_DATA", "")
STEPS = 12

# the trainer, but the first time that it is started one SIGUSR1 comes once it has saved
STOPPED = f"""#!/bin/bash
if mkdir "$MARK" 2>/dev/null; then
    "{TRAINER}" "$@" & pid=$!
    trap 'kill -USR1 $pid' USR1
    while kill -0 $pid && ! ls "$RUN" 2>/dev/null | grep -q step_; do sleep 0.05; done
    kill -USR1 $pid
    wait $pid
    exit $?
fi
exec "{TRAINER}" "$@"
"""

DRAWN = 'echo drawn "$@"\n'


@unittest.skipUnless(DATA, "SKIPPED: CABLE_DATA is not set")
@unittest.skipUnless(os.path.exists(TRAINER), "SKIPPED: make train_gpt2")
class MultiNode(Folder):
    def setUp(self):
        super().setUp()
        self.trainer = self.executable("trainer", STOPPED)

    def files(self):
        return [os.path.join(DATA, f"tiny_shakespeare_{split}.bin") for split in ("train", "val")]

    def run_script(self, script, *words, **variables):
        environment = dict(ENVIRONMENT, RESTART_WAIT="0", MARK=self.path("mark"), RUN=self.path("run"), **variables)
        for name in "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM":
            environment.pop(name)                   # the script's to set
        p = subprocess.run(["bash", os.path.join(SCRIPTS, script), *words], env=environment, timeout=LIMIT, **PIPES)
        return p.returncode, p.stdout

    def command(self):
        train, val = self.files()
        return [self.trainer, "--train_files", train, "--val_files", val, "--model", "1,2,16", "--T", "16", "--B", "2",
                "--total_batch", "64", "--steps", str(STEPS), "--checkpoint_every", "2", "--val_every", "0",
                "--sample_every", "0", "--out", self.path("run")]

    def check_ended(self, code, output):
        """once stopped, resumed once, and at the end; by two ranks each time"""
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("stopped with a checkpoint; continuing"), 1, output)
        self.assertEqual(output.count("resumed from"), 1, output)
        self.assertIn("2 ranks", output)
        self.assertTrue(os.path.isdir(self.path("run", f"step_{STEPS:08d}")), output)

    @unittest.skipUnless(MPIRUN, "SKIPPED: there is no mpirun")
    def test_mpirun(self):
        self.check_ended(*self.run_script("multi_node/mpirun.sh", *self.command(), RANKS="2",
                                          MPI_FLAGS="--oversubscribe"))

    def test_the_runs_of_the_paper(self):
        """the second script is the first one with other values"""
        train, val = self.files()
        python = self.shell("python", DRAWN)
        code, output = self.run_script(
            "run_gpt2_350M_cable.sh", "--val_batches", "1", "--threads", "1", "--eval_tokens", "256",
            TRAINER=self.trainer, LAUNCH="--ranks 2", TRAIN_FILES=train, VAL_FILES=val, OUT=self.path("run"),
            MODEL="1,2,16", T="16", B="2", TOTAL_BATCH="64", STEPS=str(STEPS), VAL_EVERY="0", CHECKPOINT_EVERY="2",
            LENGTHS="16,32", HELLASWAG="none", PYTHON=python)
        self.check_ended(code, output)
        self.assertIn(f"drawn scripts/plot.py train {self.path('run')} -o {self.path('run')}/train.png", output)
        self.assertEqual([r["T"] for r in self.records("extrapolation", "run")], [16, 32])
        self.assertEqual(sorted({r["step"] for r in self.records("train", "run")}), list(range(1, STEPS + 1)))

    def test_the_default_values_of_the_runs(self):
        """--check accepts them for 8 ranks, with HellaSwag"""
        train, val = self.files()
        hellaswag = os.path.join(DATA, "hellaswag_val_500.bin")
        for script, model in ("run_gpt2_124M.sh", "124.5M"), ("run_gpt2_350M_cable.sh", "354.6M"):
            code, output = self.run_script(script, TRAINER=TRAINER, LAUNCH="--check --ranks 8", TRAIN_FILES=train,
                                           VAL_FILES=val, HELLASWAG=hellaswag, OUT=self.path("checked"),
                                           PYTHON=self.shell("python", DRAWN))
            self.assertEqual(code, 0, output)
            self.assertIn(model + " parameters", output)
            self.assertIn("all is well: 19073 steps of 524288 tokens", output)

    def test_failures_are_tried_again_but_not_for_ever(self):
        """codes that would only repeat themselves, not at all"""
        for ends, times in (9, 3), (2, 1), (3, 1), (4, 1), (0, 1):
            with self.subTest(code=ends):
                calls = self.path(f"calls{ends}")
                program = self.shell("fails", f"echo \"$@\" >>{calls}\nexit {ends}\n")
                skip = f'while [ "$1" != "{program}" ]; do shift; done'
                double = self.shell("mpi", f'{skip}\nexec "$@"\n')
                code, output = self.run_script("multi_node/mpirun.sh", program, "--steps", "1", MPIRUN=double,
                                               RESTARTS="2")
                self.assertEqual(code, ends, output)
                self.assertEqual(self.read(calls), "--steps 1 --resume 1\n" * times)

    @unittest.skipUnless(MPIRUN, "SKIPPED: there is no mpirun")
    def test_a_signal_to_the_script_saves_and_ends(self):
        os.mkdir(self.path("mark"))                   # the trainer is not stopped by itself
        words = self.command()
        words[words.index("--steps") + 1] = "1000000"
        words += ["--keep", "2"]
        environment = dict(ENVIRONMENT, RUN=self.path("run"), MARK=self.path("mark"), RANKS="2",
                           MPI_FLAGS="--oversubscribe")
        p = subprocess.Popen(["bash", os.path.join(SCRIPTS, "multi_node", "mpirun.sh"), *words], env=environment,
                             **PIPES)
        late = threading.Timer(LIMIT, p.kill)
        late.start()
        while p.poll() is None and not glob.glob(self.path("run", "step_*")):
            time.sleep(0.05)
        p.send_signal(signal.SIGTERM)
        output = p.communicate()[0]
        late.cancel()
        self.assertEqual(p.returncode, 75, output)
        self.assertNotIn("continuing from it", output)

    def test_help(self):
        code, output = self.run_script("multi_node/mpirun.sh")
        self.assertEqual(code, 2, output)
        self.assertRegex(output, r"^\w+\.sh -- trains (?s:.)*RESTARTS \[3\]")
        self.assertNotIn("set -", output)
        code, output = self.run_script("run_gpt2_124M.sh", "--help")
        self.assertEqual(code, 0, output)
        self.assertIn("PREDICTION", output)
        self.assertNotIn("set -", output)


if __name__ == "__main__":
    unittest.main()
