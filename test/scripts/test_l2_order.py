"""test_l2_order.py -- dev/l2_order.py: what the order of attention's blocks costs; that of the kernels is good."""
import os
import re
import subprocess
import sys
import unittest
from unittest import mock

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path.insert(0, os.path.join(ROOT, "dev"))
import l2_order  # noqa: E402

H200 = l2_order.GPUS["H200"]


def times(order, B=64, T=1024, HS=64, **more):
    read, least = l2_order.traffic(order, B, T, 12, HS, H200, **more)
    return read / least


class Order(unittest.TestCase):
    def test_all_heads_side_by_side(self):
        """at 65,536 tokens nearly every tile is fetched again: 8.5 blocks read it on average; 16,384 tokens fit"""
        self.assertLess(abs(times("heads") - 8.0), 0.3)
        self.assertEqual(times("heads", B=16), 1.0)
        self.assertLess(abs(times("heads", queries=128) - 4.3), 0.2)        # half as many blocks
        self.assertGreater(times("heads", causal=False), 15)

    def test_the_kernels_order(self):
        """every key once, up to where a single head fills the L2"""
        for B, T in ((64, 1024), (16, 4096), (8, 8192), (1, 16384)):
            for HS, queries in ((64, 64), (64, 128), (128, 64)):
                self.assertLess(times("wave", B, T, HS, queries=queries), 1.01, (B, T, HS, queries))

    def test_a_wave_that_is_too_large(self):
        with mock.patch.object(l2_order, "wave_size", lambda: 10 ** 6):
            self.assertGreater(times("wave"), 7)

    def test_every_block_once(self):
        for order in ("wave", "heads", "rows"):
            found = l2_order.places(order, 100, 7)
            self.assertEqual(sorted(found), [(h, t) for h in range(100) for t in range(7)])
        self.assertEqual(l2_order.places("wave", 200, 8)[:65], [(h, 0) for h in range(64)] + [(0, 1)])

    def test_what_it_prints(self):
        command = [sys.executable, os.path.join(ROOT, "dev", "l2_order.py"), "--B", "2"]
        p = subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True)
        self.assertEqual(p.returncode, 0)
        self.assertEqual(re.findall(r"^(\w+) +\S+ +1\.00$", p.stdout, re.M), ["wave", "heads", "rows"])


if __name__ == "__main__":
    unittest.main()
