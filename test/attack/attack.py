#!/usr/bin/env python3
"""attack.py -- both trainers on hostile files, and without memory, files or descriptors. Whatever happens, a trainer
ends with a code that it promises and a message, and its checkpoints continue to the same bits.

    make attack                                    20 cases of each scene
    make attack ARGS='hostile limits --seed 7 --count 500'

Each case depends only on (seed, scene, number): --only NUMBER repeats one. Half of the cases train a GPT-2, the
other half a BERT that predicts masked bytes or compares pairs. The last line counts cases and failures. The binaries
are $TRAIN_GPT2 and $TRAIN_BERT, or ./train_gpt2 and ./train_bert."""
import argparse
import atexit
import errno
import functools
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRAINERS = {name: os.path.abspath(os.environ.get(name.upper(), os.path.join(ROOT, name)))
            for name in ("train_gpt2", "train_bert")}
ENVIRONMENT = dict(os.environ, OMP_WAIT_POLICY="passive", LC_ALL="C")
SECONDS = 60                        # for a run of a second or less
RESIDENT = 1500 << 20               # bytes of memory that a run of a tiny model may take, hostile file or not
PROMISED = {0, 2, 3, 4, 5}          # exit codes: docs/checkpoints.md
STARVED = 4


class Failure(Exception):
    pass


def expect(condition, message):
    if not condition:
        raise Failure(message)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def words(rng, count):
    return " ".join(rng.choice("the cable of a token sees what came before it".split()) for _ in range(count)).encode()


def groups(rng, count):
    """lines of a query, its positive and a negative"""
    return b"".join(b"\t".join(words(rng, rng.randint(2, 6)) + b" %d" % i for _ in range(3)) + b"\n"
                    for i in range(count))


class Place:
    """A directory for one case: data, the flags of a run of a tiny model, and what its runs leave."""

    def __init__(self, path, rng):
        self.path, self.rng, self.out = path, rng, os.path.join(path, "out")
        self.task = rng.choice(["gpt2", "gpt2", "masks", "pairs"])
        self.trainer = TRAINERS["train_gpt2" if self.task == "gpt2" else "train_bert"]
        self.environment = ENVIRONMENT
        os.makedirs(path)
        write(self / "data.txt", self.text(random.Random(0)))
        write(self / "val.txt", words(random.Random(9), 200))
        write(self / "corpus.txt", words(random.Random(8), 100).replace(b"it", b"it\n"))
        self.model = ["--model", "1,2,16", "--T", "16", "--threads", "1"]
        self.flags = [*self.reads(self / "data.txt"), *self.model, "--B", "2", "--lr", "1e-3"]
        self.quiet = {"gpt2": ["--sample_every", "0", "--val_every", "0"], "masks": ["--val_every", "0"],
                      "pairs": []}[self.task]

    def __truediv__(self, name):
        return os.path.join(self.path, name)

    def text(self, rng):
        return groups(rng, 40) if self.task == "pairs" else words(rng, 600)

    def reads(self, train, val=None):
        """the flags of training on these files"""
        if self.task == "pairs":
            return ["--pairs", train]
        return ["--train_files", train, "--val_files", val or self / "val.txt"]

    def train(self, steps, every, *more):
        return [*self.flags, *self.quiet, "--steps", str(steps), "--checkpoint_every", str(every), "--out", self.out,
                *more]

    def uses(self):
        """the flags of what is done with a model, in addition to --load"""
        uses = [["--eval_lengths", "16,32", "--val_files", self / "val.txt"]]
        if self.task == "gpt2":
            return [*uses, ["--generate", "the", "--tokens", "4"]]
        return [*uses, ["--predict", "the [MASK]at"], ["--encode", self / "corpus.txt", "--out", self / "embeddings"]]

    def start(self, arguments, limits=()):
        """limits: pairs for setrlimit"""
        def prepare():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for kind, value in limits:
                resource.setrlimit(kind, (value, value))

        with open(self / "stdout", "wb") as out, open(self / "stderr", "wb") as err:
            return subprocess.Popen([self.trainer, *arguments], preexec_fn=prepare, env=self.environment,
                                    cwd=self.path, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def finish(self, process, promised=PROMISED):
        """the exit code of a run that ends by itself, which must be promised, said, and cheap"""
        deadline = time.monotonic() + SECONDS
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                process.kill()
                os.wait4(process.pid, 0)
                raise Failure(f"it runs for more than {SECONDS} s")
            time.sleep(0.002)
        process.returncode = code = os.waitstatus_to_exitcode(status) if hasattr(os, "waitstatus_to_exitcode") else (
            os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
        said = read(self / "stderr")
        expect(code in promised, f"exit code {code}, expected one of {sorted(promised)}: {said[-500:]!r}")
        expect(code == 0 or b"error: " in said, f"exit code {code} without a message: {said[-500:]!r}")
        expect(len(said) < 8000, f"{len(said)} bytes on stderr: {said[:300]!r}")
        odd = [c for c in said + read(self / "stdout") if c < 32 and c not in b"\n\r\t" or c == 127]
        expect(not odd, f"control characters on the console: {bytes(odd[:20])!r}")
        expect(usage.ru_maxrss << 10 < RESIDENT, f"{usage.ru_maxrss >> 10} MB of memory")
        return code

    def run(self, arguments, promised=PROMISED, limits=()):
        return self.finish(self.start(arguments, limits), promised)

    def starts(self, limit):
        """whether the system can load the program at all: before main() it is not ours to report what is missing"""
        process = self.start(["--help"], limit)
        try:
            return process.wait(10) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False

    def checkpoint(self, step):
        return os.path.join(self.out, f"step_{step:08d}")

    def bits(self, step):
        return [read(os.path.join(self.checkpoint(step), name)) for name in ("model.safetensors", "optimizer_0.state")]


# scenes ---------------------------------------------------------------------------------------------------------------

NUMBERS = [0, -1, 1, 2**31 - 1, -2**31, 20240520, 65536, 1 << 30]
TEXTS = [b"-1", b"0", b"1e308", b"99999999999999999999", b"null", b"[]", b"{}", b'"x"', b"true", b"0.5", b"[" * 200,
         b'"' + b"y" * 3000 + b'"', b'"\\u0000\\u001b[31m"', b"\x1b[2J\x07", b"\xff\xfe", b"1" * 400]


def mutated(rng, data):
    """damaged as a disk, a network or a hand would: bytes, sizes, fields of a header, words of a text"""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        if not data:
            break
        at = rng.randrange(len(data))
        how = rng.randrange(6)
        if how == 0:
            data[at] = rng.randrange(256)
        elif how == 1:
            data[at:] = b""
        elif how == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 2000)))
        elif how == 3 and len(data) >= 4:
            field = 4 * rng.randrange(min(len(data), 1100) // 4)
            data[field:field + 4] = struct.pack("<i", rng.choice(NUMBERS))
        elif how == 4:
            data[at:at + rng.randint(1, 12)] = rng.choice(TEXTS)
        else:
            stop = rng.randint(at, len(data))
            data[at:at] = data[at:stop]
    return bytes(data)


def shard(rng):
    ids = [rng.randrange(300) for _ in range(rng.choice([100, 2000]))]
    return struct.pack("<256i", 20240520, 1, len(ids), 300, 0, *[0] * 251) + struct.pack(f"<{len(ids)}H", *ids)


def hostile(place):
    """a damaged shard, text, or file of a model: read, or refused with a message, in little time and memory"""
    rng = place.rng
    if rng.random() < 0.5:
        name = rng.choice(["a.bin", "a.txt"])
        write(place / name, mutated(rng, shard(rng) if name == "a.bin" else place.text(rng)))
        works = {"gpt2": ["--val_every", "1", "--sample_every", "2", "--tokens", "4"], "masks": ["--val_every", "1"]}
        place.run([*place.reads(place / name, place / name), *place.model, "--steps", "2", *works.get(place.task, [])])
        return
    expect(place.run(place.train(2, 2)) == 0, "the first run failed")
    model = place / "model"
    shutil.copytree(place.checkpoint(2), model)
    if rng.random() < 0.8:
        os.remove(os.path.join(model, "manifest.json"))     # nothing then sees the damage before the parsers do
    name = rng.choice(["config.json", "config.json", "model.safetensors", "model.safetensors", "manifest.json"])
    path = os.path.join(model, name)
    write(path, mutated(rng, read(path) if os.path.exists(path) else b'{"files": []}'))
    use = rng.choice([*place.uses(), [*place.flags, *place.quiet, "--steps", "1"]])
    threads = [] if "--threads" in use else ["--threads", "1"]
    place.run(["--load", rng.choice([model, os.path.join(model, "model.safetensors")]), *threads, *use])


def limits(place):
    """little address space, small files, few descriptors, sizes beyond any machine: a message, not a crash"""
    rng = place.rng
    arguments = place.train(20, 10)
    how = rng.choice(["memory", "memory", "file", "descriptors", "sizes"])
    limit = []
    if how == "memory":
        limit = [(resource.RLIMIT_AS, rng.randint(30, 600) << 20)]
        arguments[arguments.index("--threads") + 1] = str(rng.choice([1, 2, 8]))
        if not place.starts(limit):
            return
    elif how == "file":
        limit = [(resource.RLIMIT_FSIZE, rng.randrange(8000, 40000))]       # stderr is a file, too
    elif how == "descriptors":
        limit = [(resource.RLIMIT_NOFILE, rng.randint(4, 30))]
        if not place.starts(limit):
            return
    else:
        flag, values = rng.choice([
            ("--threads", [1000, 10**5, 2**31 - 1]), ("--total_batch", [2**25, 2**26, 2**31 - 32]),
            ("--T", [2**20, 2**30]), ("--B", [2**20, 2**31 - 1]),
            ("--model", ["1,1,1048576", "100000,2,16", "2,2,65536"])])
        arguments = place.train(2, 2, flag, str(rng.choice(values)))
        # some of these a large machine can do, in minutes or in gigabytes
        limit = [(resource.RLIMIT_AS, 1 << 30)] if flag in ("--total_batch", "--T") else []
        at = arguments.index(flag)
        if at < len(arguments) - 2:
            del arguments[at:at + 2]
    place.run(arguments, PROMISED, limit)


def starve(place, library, fails):
    """Lets a request for memory fail in what place starts from now on; returns the file of counts (test/faults.c)."""
    place.environment = dict(ENVIRONMENT, LD_PRELOAD=library, FAULTS=f"memory:{fails}",
                             FAULT_COUNTS=place / "requests")
    write(place / "requests", b"")
    return place / "requests"


def allocations(place):
    """a request for memory or a thread fails, one or all from one on: exit code 4 and what it was for, or the result"""
    rng, library = place.rng, shim()
    place.flags[place.flags.index("--threads") + 1] = rng.choice("12")
    works = {"gpt2": ["--val_every", "2", "--sample_every", "3", "--tokens", "3"], "masks": ["--val_every", "2"]}
    train = [*place.flags, *works.get(place.task, []), "--steps", "4", "--checkpoint_every", "2", "--keep", "2",
             "--resume", "1", "--out", place.out]
    use = rng.choice([None, None, *place.uses()])           # None: trains, or continues to train
    begun = use is None and rng.random() < 0.5
    if use is not None:
        expect(place.run(train) == 0, "the first run failed")
    if begun:
        expect(place.run(train) == 0, "the first run failed")
        shutil.rmtree(place.checkpoint(4))
    arguments = train if use is None else ["--load", place.checkpoint(4), "--threads", "1", *use]
    before = place / "before"
    shutil.copytree(place.out, before) if os.path.exists(place.out) else os.makedirs(before)

    requests = starve(place, library, f"0:{errno.ENOMEM}")
    expect(place.run(arguments) == 0, "the undisturbed run failed")
    result = read(place / "stdout") if use else place.bits(4)
    total = struct.unpack("<q", read(requests)[:8])[0]
    shutil.rmtree(place.out)
    shutil.copytree(before, place.out)

    failing = rng.randint(1, total)
    fails = f"{failing}:{errno.ENOMEM}:{rng.choice(['once', 'always'])}"
    starve(place, library, fails)
    code = place.run(arguments, {0, STARVED})
    said = read(place / "stderr")
    asked = struct.unpack("<q", read(requests)[:8])[0]      # with two threads perhaps less often than before
    expect(asked < failing or b"FAULTS: memory number " in said, f"{fails} of {total}: none failed of {asked}")
    named = re.search(rb"error: (.* while |cannot allocate|.*Cannot allocate memory|expected \d+ threads)", said)
    expect(code == 0 or named, f"{fails} of {total}: it does not say what it wanted: {said[-300:]!r}")
    if use is None:
        place.environment = ENVIRONMENT
        expect(place.run(train) == 0, f"{fails} of {total}: it cannot go on")
        expect(place.bits(4) == result, f"{fails} of {total}: other bits")
    expect(code != 0 or use is None or read(place / "stdout") == result, f"{fails} of {total}: another result")


SCENES = [hostile, limits, allocations]


@functools.lru_cache(maxsize=None)
def shim():
    """test/faults.c, compiled"""
    directory = tempfile.mkdtemp(prefix="cable_faults_")
    atexit.register(shutil.rmtree, directory)
    library = os.path.join(directory, "faults.so")
    source = os.path.join(ROOT, "test", "faults.c")
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source,
                    "-o", library, "-ldl"], check=True)
    return library


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [s.__name__ for s in SCENES]
    parser.add_argument("scenes", nargs="*", help="of " + ", ".join(names) + "; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="cases of each scene")
    parser.add_argument("--only", type=int, help="run this case alone")
    options = parser.parse_args()
    for name in options.scenes:
        if name not in names:
            parser.error(f"expected a scene of {', '.join(names)}, got {name}")
    for name, path in TRAINERS.items():
        if not os.access(path, os.X_OK):
            sys.exit(f"{path}: not found; build it with: make {name}")
    scenes = [s for s in SCENES if s.__name__ in (options.scenes or names)]
    numbers = range(options.count) if options.only is None else [options.only]
    failures, done, start = 0, 0, time.monotonic()
    last, total = start, len(scenes) * len(numbers)
    # in memory, where there is room: kills saves a hundred checkpoints a second, and a disk would have to keep up
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30 else None
    for scene in scenes:
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="cable_attack_", dir=memory) as directory:
                rng = random.Random(f"{options.seed} {scene.__name__} {number}")
                try:
                    scene(Place(os.path.join(directory, "case"), rng))
                except (Failure, OSError, subprocess.SubprocessError) as e:
                    failures += 1
                    print(f"FAILED {scene.__name__} --seed {options.seed} --only {number}: {e}", flush=True)
            done += 1
            now = time.monotonic()
            if now - last >= 10:
                last = now
                eta = (now - start) / done * (total - done)
                print(f"{scene.__name__}: {done} of {total} cases, {failures} failures, ETA {eta:.0f} s", flush=True)
    print(f"{', '.join(s.__name__ for s in scenes)}; seed {options.seed}: {done} cases, {failures} failures, "
          f"{time.monotonic() - start:.0f} s")
    print(f"{done - failures} passed, {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
