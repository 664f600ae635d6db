"""test_part.py -- part.py: a bit that flips in a run is found, and its step, kernel, tensor and element are named.

CABLE_PART_CASES=200 for that many flips, CABLE_TEST_SEED=7 for other ones.
"""
import contextlib
import io
import os
import random
import shlex
import sys
import tempfile
import unittest
from unittest import mock

from folder import ROOT, Folder
import console
import part

STEPS = 6
TRAINER = os.path.join(ROOT, "build/trace/train_gpt2")
COMMAND = [TRAINER, "--train_files", os.path.join(ROOT, "data/shakespeare_train.txt"), "--model", "2,2,32", "--T", "72",
           "--B", "2", "--total_batch", "288", "--steps", str(STEPS), "--val_every", "0", "--sample_every",
           "0"]
CABLE = [*COMMAND, "--pos", "cable", "--threads", "1"]


@unittest.skipUnless(os.path.exists(TRAINER), "build/trace/train_gpt2 is not built")
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
        with self.assertRaisesRegex(console.BadInput, "no_such_flag: trained no step, or is not"):
            self.parted(CABLE, [*CABLE, "--no_such_flag"])
        fails = ["sh", "-c", shlex.join(CABLE) + "; exit 3"]
        with self.assertRaisesRegex(console.BadInput, f"same bits in {STEPS} steps, but .* ended with exit code 3"):
            self.parted(CABLE, fails)
        with self.assertRaisesRegex(console.BadInput, "expected two commands, got an empty one"):
            part.main([" ", shlex.join(CABLE)])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.addCleanup(os.chdir, os.getcwd())
            os.chdir(self.folder)
            with mock.patch.object(tempfile, "tempdir", os.path.dirname(self.write("a:b/c", ""))):
                code = part.main([shlex.join(CABLE), shlex.join([*CABLE, "--seed", "7"])])
        self.assertEqual((code, said.getvalue()[:32]), (1, "first difference: before step 1,"))


if __name__ == "__main__":
    unittest.main()
