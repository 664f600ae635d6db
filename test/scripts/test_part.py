"""test_part.py -- part.py: a bit that flips in a run is found, and its step, kernel, tensor and element are named.

CABLE_PART_CASES=200 for that many flips, CABLE_TEST_SEED=7 for other ones.
"""
import contextlib
import io
import os
import random
import shlex
import shutil
import subprocess
import sys
import unittest

from folder import HAS_TRAINER, ROOT, TRAINER, Folder
import console
import part

STEPS = 6
COMMAND = [TRAINER, "--train_files", os.path.join(ROOT, "data/shakespeare_train.txt"), "--model", "2,2,32", "--T", "72",
           "--B", "2", "--total_batch", "288", "--steps", str(STEPS), "--val_every", "0", "--sample_every",
           "0"]
CABLE = [*COMMAND, "--pos", "cable", "--threads", "1"]


@unittest.skipUnless(HAS_TRAINER, "the trainer is not built")
class TestPart(Folder):
    def setUp(self):
        super().setUp()
        part.say = lambda text: None

    def parted(self, a, b):
        return part.part([a, b], self.folder)

    def test_a_flipped_bit_is_named(self):
        draw = random.Random(int(os.environ.get("CABLE_TEST_SEED", "20240520")))
        trace = os.path.join(self.folder, "trace")
        kernels = part.kernels_of(part.traced(CABLE, trace, 2))
        named = harmless = 0
        cases = int(os.environ.get("CABLE_PART_CASES", "4"))
        while named < cases:
            step, index = draw.randint(1, STEPS), draw.randrange(1, len(kernels))
            name, changed = kernels[index]
            if not changed:
                continue
            # what the kernel has written, or anything
            tensor = draw.choice(list(changed) if draw.random() < 0.8 else list(kernels[0][1]))
            values, columns = part.contents_of(CABLE, trace, step, index, tensor)
            at, bit = draw.randrange(values.size), draw.randrange(8 * values.itemsize)
            flip = f"CABLE_FLIP={step}:{index}:{tensor}:{at * 8 * values.itemsize + bit}"
            found = self.parted(CABLE, ["env", flip, *CABLE])
            if found is None:                       # such as the first query's bits: it sees one key only
                harmless += 1
                self.assertLess(harmless, 20 + 2 * named, "most flips change no weight")
                continue
            place = f"({at // columns}, {at % columns})" if columns > 1 else f"({at})"
            self.assertTrue(found.startswith(f"step {step}, {name} (kernel {index} of the step), {tensor}, "
                                             f"element {place}: "), f"{flip}: {found}")
            self.assertIn("; 1 of ", found)
            named += 1
        print(f"{named} flips named, {harmless} change no weight", file=sys.stderr)

    def test_commands(self):
        self.assertIsNone(self.parted(CABLE, [*COMMAND, "--threads", "3"]))
        for more, expected in ((["--lr", "1e-3"], "step 1, adamw_kernel"), (["--seed", "7"], "before step 1, ")):
            self.assertTrue(self.parted(CABLE, CABLE + more).startswith(expected), more)
        self.assertEqual(self.parted(CABLE, [*COMMAND, "--pos", "none"]),
                         "before step 1, qkvw[0]: 3,328 and 3,072 elements")
        with self.assertRaisesRegex(console.BadInput, "trained no step"):
            self.parted(CABLE, [*CABLE, "--no_such_flag"])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = part.main([shlex.join(CABLE), shlex.join([*CABLE, "--seed", "7"])])
        self.assertEqual((code, said.getvalue()[:32]), (1, "first difference: before step 1,"))


@unittest.skipUnless(HAS_TRAINER, "the trainer is not built")
class TestVerify(Folder):
    def test_a_flipped_bit_is_never_saved(self):
        """--verify_every 1 ends the run before it saves a flipped bit, wherever that was."""
        draw = random.Random(int(os.environ.get("CABLE_TEST_SEED", "20261125")))
        trace, out = self.path("trace"), self.path("out")
        kernels = part.kernels_of(part.traced(CABLE, trace, 2))
        update = next(i for i, (name, _) in enumerate(kernels) if name == "adamw_kernel")

        def flipped(flip, every):
            shutil.rmtree(out, ignore_errors=True)
            run = subprocess.run([*CABLE, "--checkpoint_every", "1", "--out", out, "--verify_every",
                                  every], env={**os.environ, "CABLE_TRACE": trace + ":99", "CABLE_FLIP": flip},
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            with open(trace) as f:
                return run, f.read(), sorted(name for name in os.listdir(out) if name.startswith("step"))

        _, sums, _ = flipped("9:1:wte:0", "1")
        found = 0
        for _ in range(6 * int(os.environ.get("CABLE_PART_CASES", "4"))):
            # step 1 begins with the first hashes: what flips before them, nobody can see
            step, index = draw.randint(2, STEPS), draw.randrange(update)
            tensor = draw.choice(list(kernels[0][1]))
            bit = draw.randrange(8 * 32)
            flip = f"{step}:{index}:{tensor}:{bit}"
            run, after, saved = flipped(flip, "1")
            if run.returncode == 0:             # nothing has read it, or it is one of a gap's
                self.assertEqual(after, sums, flip)
                self.assertIn(f"verified: {STEPS} steps computed twice", run.stdout)
                continue
            found += 1
            self.assertEqual(run.returncode, 5, f"{flip}: {run.stdout}")
            self.assertRegex(run.stdout, "computed twice, with two results|memory has changed", flip)
            self.assertEqual(saved, [f"step_{s:08d}" for s in range(1, step)], flip)
            if tensor.startswith(("m.", "v.")):
                self.assertIn(f"moments of {tensor[2:].split('[')[0]}", run.stdout)
        print(f"{found} flips found", file=sys.stderr)
        self.assertGreater(found, 5)
        # without the flag the same run ends well, with other weights
        run, after, _ = flipped("2:0:wte:30", "0")
        self.assertEqual(run.returncode, 0)
        self.assertNotEqual(after, sums)
        run, _, _ = flipped("2:0:wte:30", "2")
        self.assertIn("memory has changed since the end of step 1, first in the weights of wte", run.stdout)


if __name__ == "__main__":
    unittest.main()
