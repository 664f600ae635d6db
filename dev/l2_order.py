#!/usr/bin/env python3
"""l2_order.py -- how often the keys and values of attention come from memory, by the order in which its blocks start: a
model of the L2 cache (least recently used, tiles of 64 keys), not a measurement.

    dev/l2_order.py [--B 64] [--T 1024] [--NH 12] [--HS 64] [--gpu H200] [--order wave] [--queries 128]
                    [--bidirectional]

Blocks start in the order of their numbers, up to the number that the SMs hold, and visit their tiles of keys at the
same pace, the diagonal first. `wave` is the order of FlashPlace (llmc/attention/flash/args.cuh), groups of few heads;
`heads` has all heads side by side; `rows` all tiles of a head.
"""
import argparse
import collections
import os
import re
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
from roofline import GPUS  # noqa: E402

RESIDENT = {(64, 64): 3}                # blocks of an SM, by head size and queries (launch bounds), else 2
TILE = 64


def wave_size():
    with open(os.path.join(ROOT, "llmc", "attention", "flash", "args.cuh")) as f:
        return int(re.search(r"constexpr int FLASH_WAVE = (\d+);", f.read()).group(1))


def places(order, heads, turns):
    """(head, turn) of each block, in the order in which they start"""
    if order == "rows":
        return [(h, t) for h in range(heads) for t in range(turns)]
    group = heads if order == "heads" else max(1, wave_size() // turns)
    found = []
    for first in range(0, heads, group):
        some = range(first, min(first + group, heads))
        found += [(h, t) for t in range(turns) for h in some]
    return found


def traffic(order, B, T, NH, HS, gpu, causal=True, queries=TILE):
    """(bytes of keys and values that come from memory, all that there are) in one forward pass of a layer; queries: of
    a block"""
    tiles_of_keys, turns = -(-T // TILE), -(-T // queries)
    tile_bytes = 2 * 2 * TILE * HS
    room, slots = int(gpu.l2 / tile_bytes), gpu.sms * RESIDENT.get((HS, queries), 2)
    waiting = collections.deque(places(order, B * NH, turns))
    cache, misses, running = collections.OrderedDict(), 0, []
    while waiting or running:
        while waiting and len(running) < slots:
            head, turn = waiting.popleft()
            own = min((turns - turn) * queries // TILE, tiles_of_keys) - 1          # the last one that it sees
            tiles = list(range(own, -1, -1)) + ([] if causal else list(range(own + 1, tiles_of_keys)))
            running.append((head, tiles[::-1]))
        for head, tiles in running:
            key = (head, tiles.pop())
            if key in cache:
                cache.move_to_end(key)
                continue
            misses += 1
            cache[key] = None
            if len(cache) > room:
                cache.popitem(last=False)
        running = [r for r in running if r[1]]
    return misses * tile_bytes, B * NH * tiles_of_keys * tile_bytes


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("B", 64), ("T", 1024), ("NH", 12), ("HS", 64)):
        p.add_argument("--" + name, type=int, default=usual)
    p.add_argument("--queries", type=int, default=TILE, choices=(64, 128), help="of a block [64]")
    p.add_argument("--gpu", default="H200", choices=GPUS)
    p.add_argument("--order", choices=("wave", "heads", "rows"))
    p.add_argument("--bidirectional", action="store_true")
    args = p.parse_args()
    print(f"{args.gpu}, B {args.B}, T {args.T}, {args.NH} heads of {args.HS}: keys and values of a layer's forward\n"
          f"{'order':8} {'GB from memory':>15} {'times':>6}")
    for order in [args.order] if args.order else ("wave", "heads", "rows"):
        read, least = traffic(order, args.B, args.T, args.NH, args.HS, GPUS[args.gpu], not args.bidirectional,
                              args.queries)
        print(f"{order:8} {read / 1e9:15.3f} {read / least:6.2f}")


if __name__ == "__main__":
    main()
