#!/usr/bin/env python3
"""hashes.py -- the same weights, bit for bit, from every compiler, processor, number of threads and of ranks.

    dev/hashes.py                  every encoding, both trainers, all builds that this machine can make and run
    dev/hashes.py --quick          eight builds of train_gpt2 with none and cable, in three minutes
    dev/hashes.py --build gcc-v3 --build emulated --pos rope --pos alibi        only these
    dev/hashes.py --update         writes dev/results/hashes.tsv, if all builds agree
    dev/hashes.py --of DIRECTORY   prints the SHA-256 of a checkpoint's weights

Each build trains for some steps on data/shakespeare_train.txt, and the SHA-256 of the weights must be the one in
dev/results/hashes.tsv. Builds that store bf16 have rows of their own. The emulated CUDA build sums in another order:
--build emulated --update gives it rows, too, which are not committed yet.
A change that is meant to change bits is committed with the new table. docs/reproducibility.md says what is promised.
"""
import concurrent.futures
import os
import shutil
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import console                                                  # noqa: E402
from console import output_of, run, say, weights_sha256         # noqa: E402

TABLE = "dev/results/hashes.tsv"
OUT = "build/hashes"
PROGRAMS = ("train_gpt2", "train_bert")
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
ARM = ["aarch64-linux-gnu-g++", "-static", "-idirafter", "/usr/include"]        # of this machine: xxhash.h, json.hpp
BF16 = ["-DPRECISION_BF16"]
TILES = BF16 + ["-include", "test/amx_stand_in.h"]      # the blocks of AMX, with its instructions in plain C
# name: (compiler and flags, the command that runs its programs, what /proc/cpuinfo must have)
BUILDS = {
    "shipped": (None, [], ""),                          # by make, for this processor, with OpenMP
    "bf16": (None, [], ""),                             # by make PRECISION=BF16: AMX where the processor has it
    "gcc-v2": (["g++", "-O1", "-march=x86-64-v2"], [], "sse4_2"),           # no fma: each is a call of the C library
    "gcc-v3": (["g++", "-O3", "-march=x86-64-v3", "-fopenmp"], [], "avx2"),
    "gcc-v3-O1": (["g++", "-O1", "-march=x86-64-v3"], [], "avx2"),
    "gcc-v4": (["g++", "-O1", "-march=x86-64-v4"], [], "avx512vl"),
    "clang-v3": (["clang++", "-O1", "-march=x86-64-v3"], [], "avx2"),
    "clang-v4": (["clang++", "-O2", "-march=x86-64-v4"], [], "avx512vl"),
    "gcc-arm": (ARM + ["-O1"], ["qemu-aarch64"], ""),
    "bf16-tiles": (["g++", "-O1", "-march=x86-64-v3"] + TILES, [], "avx2"),
    "bf16-clang": (["clang++", "-O2", "-march=x86-64-v4"] + BF16, [], "avx512vl"),
    "bf16-arm": (ARM + ["-O1"] + BF16, ["qemu-aarch64"], ""),
    "emulated": (None, [], ""),                         # the CUDA build on test/simt's GPU
}
QUICK = ("shipped", "gcc-v3-O1", "gcc-v4", "clang-v3", "clang-v4", "gcc-arm", "bf16", "bf16-tiles")
# Eight micro-batches an update, which up to 8 ranks share. T crosses a chunk of the cumulative sum and the tiles.
CPU_RUN = ["--model", "2,2,32", "--T", "136", "--B", "1", "--total_batch", "1088", "--steps", "20"]
EMULATED_RUN = ["--model", "1,1,64", "--T", "136", "--B", "1", "--steps", "4"]   # heads of 64: tensor-core kernels
RUN = ["--train_files", "data/shakespeare_train.txt", "--lr", "1e-3", "--warmup", "5", "--weight_decay", "0.1",
       "--val_every", "0", "--checkpoint_every", "1000"]                         # at the end only
# of the builds by make
SHARED = [["--threads", "1"], ["--threads", "3"], ["--threads", "8"], ["--ranks", "2"], ["--ranks", "4"],
          ["--ranks", "8", "--threads", "1"]]


def missing(build):
    """what this machine lacks for a build; "" if it can make and run it"""
    command, wrapper, feature = BUILDS[build]
    for program in (command or [])[:1] + wrapper:
        if shutil.which(program) is None:
            return f"{program} is not installed"
    with open("/proc/cpuinfo") as f:
        return "" if feature in f.read() else f"the processor has no {feature}"


def kind_of(build):
    if build.startswith("bf16"):
        return "bf16"
    return "emulated" if build == "emulated" else "cpu"


def encodings():
    """the names of all encodings, from the rows of llmc/position/table.h, and what a key makes of one"""
    with open(os.path.join(ROOT, "llmc/position/table.h")) as f:
        return [line.split("(")[1].split(",")[0] for line in f if line.startswith("    X(")] + ["rope:clock=cable"]


def compile_program(build, program, few):
    """the program's path"""
    command = BUILDS[build][0]
    if command is None:
        target = {"shipped": program, "bf16": f"build/bf16/{program}", "emulated": f"build/simt/{program}"}[build]
        output_of(["make", target], cwd=ROOT)
    else:
        target = f"{OUT}/{program}_{build}"
        commit = f"{OUT}/commit.cpp"
        flags = [*FLAGS, *(["-DFEW_POSITIONS"] if few else [])]
        output_of([*command, *flags, "-x", "c++", f"{program}.cu", commit, "-o", target], cwd=ROOT)
    return target


def trained(build, path, program, pos, more):
    """the SHA-256 of the weights after the last step"""
    out = f"{OUT}/runs/{build}_{program}_{pos}_{'_'.join(more).replace('--', '')}"
    command = [*BUILDS[build][1], f"./{path}", *(EMULATED_RUN if build == "emulated" else CPU_RUN), *RUN, "--pos", pos,
               "--out", out, *more, *(["--sample_every", "0"] if program == "train_gpt2" else [])]
    output_of(command, cwd=ROOT, env={"OMP_WAIT_POLICY": "passive", "CABLE_OVERSUBSCRIBE": "1", **os.environ})
    step, = (name for name in os.listdir(os.path.join(ROOT, out)) if name.startswith("step_"))
    digest = weights_sha256(os.path.join(ROOT, out, step))
    shutil.rmtree(os.path.join(ROOT, out))
    return digest


def read_table():
    with open(os.path.join(ROOT, TABLE)) as f:
        rows = [line.split() for line in f if not line.startswith("#")]
    return {tuple(row[:3]): row[3] for row in rows}


def write_table(found):
    about = "# SHA-256 of the weights after a short training; written by dev/hashes.py --update\n"
    rows = ("\t".join((*key, found[key])) + "\n" for key in sorted(found))
    console.write_whole(os.path.join(ROOT, TABLE), about + "".join(rows))


def main(argv):
    parser = console.parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--of", metavar="DIRECTORY")
    parser.add_argument("--build", action="append", choices=BUILDS)
    parser.add_argument("--pos", action="append", choices=encodings(), default=[])
    args = parser.parse_args(argv)
    if args.of:
        print(f"weights: SHA-256 {weights_sha256(args.of)}")
        return 0
    builds = args.build or (QUICK if args.quick else [b for b in BUILDS if b != "emulated"])
    positions = args.pos or (["none", "cable"] if args.quick else encodings())
    programs = PROGRAMS[:1] if args.quick else PROGRAMS
    few = set(positions) <= {"none", "cable"}
    shutil.rmtree(os.path.join(ROOT, OUT), ignore_errors=True)
    os.makedirs(os.path.join(ROOT, OUT, "runs"))
    console.write_whole(os.path.join(ROOT, OUT, "commit.cpp"),
                        'extern const char build_commit[];\nconst char build_commit[] = "hashes";\n')
    absent = lambda kind, pos: kind == "bf16" and pos not in args.pos + ["none", "cable"]       # from the table
    table = read_table()
    if args.update:             # the first build that has run fills what is taken out here
        kinds = {kind_of(build) for build in builds}
        table = {key: value for key, value in table.items()
                 if key[0] not in kinds or key[1] not in programs or key[2] not in positions or absent(key[0], key[2])}
    wrong, runs, start = [], 0, time.monotonic()
    jobs = max(1, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        able = [b for b in builds if not missing(b)]
        for build in builds:
            if build not in able:
                say(f"{build}: skipped, {missing(build)}")
        compiled = {(b, p): pool.submit(compile_program, b, p, few) for b in able for p in programs}
        for build in able:
            tasks = {}
            for program in programs:
                path = compiled[build, program].result()
                for pos in positions:
                    if pos == "cope" and program == "train_bert":               # causal only
                        continue
                    if absent(kind_of(build), pos):
                        continue
                    more = [[]] + (SHARED if build in ("shipped", "bf16") and pos in ("none", "cable") else [])
                    for m in more:
                        tasks[program, pos, " ".join(m)] = pool.submit(trained, build, path, program, pos, m)
            bad = []
            for (program, pos, more), task in tasks.items():
                digest = task.result()
                key = (kind_of(build), program, pos)
                if (table.setdefault(key, digest) if args.update else table.get(key)) != digest:
                    bad.append(f"{program} --pos {pos} {more}".strip())
            runs += len(tasks)
            wrong += bad
            print(f"{build:10} {len(tasks):3d} runs, {time.monotonic() - start:4.0f} s: " +
                  (f"{len(bad)} differ: {', '.join(bad)}" if bad else "as in the table"), flush=True)
    if args.update and not wrong:
        write_table(table)
    print(f"{runs - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong or not runs else 0


if __name__ == "__main__":
    run(main)
