#!/usr/bin/env python3
"""heads.py -- where each head of a model looks.

    scripts/heads.py CHECKPOINT --val_files b.txt --eval_lengths 256,1024 --eval_tokens 65536 --out run/heads

The trainer writes what the weights P_ij = e^(q_i.k_j + B_ij - lse_i) are made of, in windows of the data (--dump_bias
all,parts). This sums them, a mean over all queries of all windows, in memory that grows with T and not with its square.
OUT/log.jsonl gets a record of each head, for `plot.py heads`. docs/probes.md says what the columns mean.
"""
import glob
import json
import os
import subprocess
import tempfile

import console
try:
    import numpy
except ImportError:
    numpy = None                                # main() says so

TILE, SINKS = 64, 16                            # sinks: keys whose weights are summed one by one


def read_parts(path):
    """(what the metadata says, the tensors of each head) of a file of --dump_bias LAYER,parts: llmc/lab/dump.h"""
    with console.open_regular(path) as f:
        tensors = console.read_tensors(f, path)
        f.seek(8)
        header = console.parse_object(f.read(min(t[2] for t in tensors.values()) - 8), path)["__metadata__"]
    about = {name: int(value) for name, value in header.items() if name != "format"}
    parts = [{} for _ in range(about["heads"])]
    for name, (_, shape, at, end) in tensors.items():
        head, _, name = name.rpartition(".")            # rows, T x T, may be larger than the memory: some at a time
        rows = lambda i, n=shape[-1], at=at: numpy.memmap(path, "<f4", "r", at + 4 * n * int(i[0, 0]), (i.size, n))
        tensor = rows if name == "rows" else numpy.fromfile(path, "<f4", (end - at) // 4, offset=at).reshape(shape)
        for part in parts[int(head):][:1] if head else parts:
            part[name] = tensor
    return about, parts


def cope_bias(part, gates, i):
    """q.e at the positions that the gates count from each query downwards: position/cope.cuh"""
    z = part["z"][i[:, 0]]
    place = numpy.minimum(gates[:, ::-1].cumsum(axis=1)[:, ::-1], z.shape[1] - 1)
    below = numpy.minimum(place.astype(int), z.shape[1] - 2)
    low, high = (numpy.take_along_axis(z, below + step, axis=1).astype("f8") for step in (0, 1))
    return low + (place - below) * (high - low)


def bias(about, part, i, j):
    """B_ij of queries i (rows,1) and keys j (1,keys), rounded where the kernels round; cope's is above"""
    factor = part["factor"][i] if "factor" in part else numpy.float32(1)
    if "S_offset" in part:                      # cable.cuh
        origin, S, g = part["S_origin"].astype("f8").sum(axis=0), part["S_offset"], part["g"][i]
        D = abs((origin[i >> 7] - origin[j >> 7]).astype("f4") + S[i] - S[j])
        D, g = (g * D, numpy.float32(1)) if about["inside"] else (D, g)
        return -factor * g * (numpy.log1p(numpy.square(D, dtype="f8")) if about["log"] else D)
    if "by_distance" in part:
        return factor * part["by_distance"][len(part["q"]) - 1 + i - j]
    return factor * part["rows"](i)[:, :j.size] if "rows" in part else 0


def weights(about, part, i, j):
    """(P_ij, log P_ij) of queries i and keys j; 0, 0 where a key is hidden: position/encoding.cuh"""
    begin = part["begins"][i] if "begins" in part else 0
    near = (abs(i - j) < (about["window"] or about["T"])) | (j < begin + about["sinks"])
    seen = near & (j >= begin) & ((j <= i) | (not about["causal"]))
    log = part["q"][i[:, 0]].astype("f8") @ part["k"][:j.size].astype("f8").T
    log += cope_bias(part, seen / (1 + numpy.exp(-log)), i) if "z" in part else bias(about, part, i, j)
    log = numpy.where(seen, log - part["lse"][i], 0)
    return numpy.exp(log) * seen, log


class Head:                                     # the sums of one head over windows of at most T tokens
    def __init__(self, about):
        self.about, self.queries, self.tiles, self.entropy, self.live = about, 0, 0, 0.0, 0
        self.sinks, self.by_distance, self.ranges = numpy.zeros(SINKS), numpy.zeros(about["T"]), {}

    def add(self, part):
        n = len(part["q"])
        for first in range(0, n, TILE):
            end = min(first + TILE, n)
            i, j = numpy.ogrid[first:end, :end if self.about["causal"] else n]
            P, log = weights(self.about, part, i, j)
            self.entropy -= float(numpy.vdot(P, log))
            self.sinks[:j.size] += P[:, :SINKS].sum(axis=0)
            self.by_distance += numpy.bincount(abs(i - j).ravel(), P.ravel(), self.about["T"])
            largest = numpy.maximum.reduceat(P.max(axis=0), range(0, j.size, TILE))
            self.live += int((largest > 2 ** -24 / self.about["T"]).sum())
        tiles, self.queries = -(-n // TILE), self.queries + n
        self.tiles += tiles * (tiles + 1) // 2 if self.about["causal"] else tiles * tiles
        if "S_offset" in part:
            S = part["S_origin"].astype("f8").sum(axis=0).repeat(128)[:n] + part["S_offset"]
            for name, x in ("b", numpy.diff(S, prepend=0)), ("g", part["g"].astype("f8")), ("S", S[-1:]):
                self.ranges.setdefault(name, []).append((x.min(), x.sum(), x.max(), x.size))

    def record(self):
        share = self.by_distance / self.queries
        powers = [0, *(1 << n for n in range((len(share) - 1).bit_length()))]
        found = {"queries": self.queries, "entropy": self.entropy / self.queries, "live_tiles": self.live / self.tiles,
                 "sink_weight": {str(n): float(self.sinks[:n].sum() / self.queries) for n in (1, 4, SINKS)},
                 "window90": int((share.cumsum() < 0.9 * share.sum()).sum()) + 1,
                 "distance": float(share @ numpy.arange(len(share))),
                 "by_distance": numpy.add.reduceat(share, powers).tolist()}
        for name, (least, total, most, count) in ((name, zip(*values)) for name, values in self.ranges.items()):
            found[name] = [float(min(least)), float(sum(total) / sum(count)), float(max(most))]
        return {**found, "dead": found["S"][2] == 0} if self.about["relu"] else found       # S has never moved


def statistics(directory):
    """the record of each head over all files of parts in a directory, which are of windows of one length"""
    heads = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), "parts_*.safetensors"))):
        about, parts = read_parts(path)
        for h, part in enumerate(parts):
            heads.setdefault((about["layer"], h), Head(about)).add(part)
    return [{"layer": layer, "head": h, **head.record()} for (layer, h), head in sorted(heads.items())]


def run_trainer(command):
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        said = ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}"
        raise console.BadInput(said.splitlines()[-1].removeprefix("error: "))


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("checkpoint", help="a checkpoint, or a run's directory")
    p.add_argument("--val_files", required=True, help="as the trainer's")
    p.add_argument("--eval_lengths", type=console.naturals, required=True, help="T of the windows, such as 256,1024")
    p.add_argument("--eval_tokens", type=console.natural, default=0, help="at most this many; 0 = all [0]; "
                   "until it ends, each takes 8 L C bytes of disk in --out")
    p.add_argument("--stride", type=console.natural, default=0, help="from a window to the next; 0 = T [0]")
    p.add_argument("--out", required=True, help="directory of log.jsonl")
    p.add_argument("--trainer", default=os.path.join(console.ROOT, "train_gpt2"), help="[train_gpt2]; or train_bert")
    args = p.parse_args(argv)
    console.need("numpy")
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "log.jsonl")
    if os.path.lexists(path):
        console.append(path, "")                            # refused before any work
    for T in args.eval_lengths:
        with tempfile.TemporaryDirectory(dir=args.out) as parts:
            flags = {"load": args.checkpoint, "val_files": args.val_files, "eval_lengths": T, "out": parts,
                     "eval_tokens": args.eval_tokens, "stride": args.stride, "dump_bias": "all,parts"}
            run_trainer([args.trainer, *(str(word) for name, value in flags.items() for word in ("--" + name, value))])
            found, log = statistics(parts), console.read_log(parts)
        of = next(r for r in log if r["kind"] == "extrapolation")
        model = {k: v for k, v in of.items() if k not in ("kind", "windows", "tokens", "loss", "ppl", "accuracy")}
        lines = [*log, *({"kind": "head", **model, **r} for r in found)]
        console.append(path, "".join(json.dumps(r) + "\n" for r in lines))
        print(f"{of['pos']}, T {T:,}, {of['windows']:,} windows: loss {of['loss']:.4f}, perplexity {of['ppl']:.4f}")
        line = "{:>6}{:>6}{:>8}{:>8}{:>9}{:>10}{:>10}{:>8}{:>14}{:>8}".format
        print(line("layer", "head", "sink 1", "sink 4", "entropy", "distance", "window90", "tiles", "g", "S"))
        for r in found:
            shares = [f"{share:.1%}" for share in (r["sink_weight"]["1"], r["sink_weight"]["4"], r["live_tiles"])]
            g, S = (f"{r['g'][0]:.2f} to {r['g'][2]:.2f}", f"{r['S'][1]:.1f}") if "g" in r else "--"
            print(line(r["layer"], r["head"], shares[0], shares[1], f"{r['entropy']:.3f}", f"{r['distance']:.1f}",
                       r["window90"], shares[2], g, "dead" if r.get("dead") else S))


if __name__ == "__main__":
    console.run(main)
