"""test_fixtures.py -- test/fixtures are what dev/hf/make_fixtures.py makes of cable_hf.py today, up to their rounding
to float32; and t5's buckets are transformers' own.

It needs PyTorch and transformers, and continues in a Python that has them.
"""
import importlib.util
import os
import sys
import unittest

import interpreter

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
WANTED = ("torch", "transformers")
if __name__ == "__main__":
    interpreter.choose(", ".join(WANTED))
MISSING = [name for name in WANTED if importlib.util.find_spec(name) is None]
if not MISSING:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
    import torch
    sys.path.insert(0, os.path.join(ROOT, "dev", "hf"))
    import make_fixtures
    from cable_encodings import t5_bucket
    from modeling_cable import read_safetensors
    torch.set_flush_denormal(True)                  # as in the trainers
    torch.set_num_threads(1)
ROUNDING = 2.0 ** -24


@unittest.skipIf(MISSING, f"SKIPPED: not installed: {', '.join(MISSING)}; set PYTORCH_PYTHON to a Python that has "
                          "PyTorch and transformers")
class TestFixtures(unittest.TestCase):
    def test_they_are_current(self):
        files = make_fixtures.fixtures()
        folder = os.path.join(ROOT, "test", "fixtures")
        self.assertEqual({n[:-12] for n in os.listdir(folder) if n.endswith(".safetensors")}, set(files))
        make_fixtures.RUNS = 1                      # the errors that they hold are of eight
        for name, (make, encoding) in files.items():
            want = make_fixtures.own(name, make(encoding)[0])
            found = read_safetensors(os.path.join(folder, name + ".safetensors"))
            self.assertEqual(set(found), set(want), name)
            for key, t in want.items():
                with self.subTest(file=name, tensor=key):
                    self.assertEqual((found[key].shape, found[key].dtype), (t.shape, t.dtype))
                    if key.startswith("error."):
                        self.assertLess(found[key].item(), 1e-3)
                    elif key.startswith("param.") or not t.is_floating_point():
                        self.assertTrue(torch.equal(found[key], t))
                    else:
                        off = (found[key].double() - t.double()).abs().max().item()
                        self.assertLessEqual(off, 2 * ROUNDING * max(t.abs().max().item(), 1e-4))

    def test_targets_of_bert(self):
        """a fifth of the tokens, none after a length"""
        t = make_fixtures.bert_fixture("none")[0]
        is_token = torch.arange(t["inputs"].shape[1]) < t["lengths"].long()[:, None]
        self.assertTrue((t["targets"][~is_token] == -1).all() and (t["lengths"] < t["inputs"].shape[1]).any())
        self.assertTrue(0.15 < (t["targets"] >= 0).sum().item() / is_token.sum().item() < 0.25)

    def test_t5_buckets(self):
        from transformers.models.t5.modeling_t5 import T5Attention
        d = torch.arange(-3000, 3001)
        for causal in (True, False):
            want = T5Attention._relative_position_bucket(-d, bidirectional=not causal, num_buckets=32, max_distance=128)
            different = d[t5_bucket(d, causal, 32, 128) != want].tolist()
            self.assertEqual(different[:9], [], f"distances in another bucket, causal {causal}")


if __name__ == "__main__":
    unittest.main()
