"""test_data.py -- data/*.py: shards are whole, a killed run continues to the same bytes, bad input is explained.

A test that needs tiktoken, tokenizers, pyarrow or huggingface_hub is skipped where Python lacks them
(data/requirements.txt); a test that needs real data runs only with CABLE_DATA. The engine itself is tested with an
encoding of bytes.
"""
import bz2
import collections
import contextlib
import glob
import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import lzma
import multiprocessing
import os
import random
import re
import resource
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest
import urllib.parse
from unittest import mock

import numpy as np

from folder import BERT_TRAINER, HAS_BERT, HAS_TRAINER, ROOT, TRAINER, Folder, alive, called, children, ended
from folder import read_bytes as read

DATA = os.path.join(ROOT, "data")
REAL = os.environ.get("CABLE_DATA", "")
sys.path.insert(0, DATA)

import build                    # noqa: E402
import common                   # noqa: E402
import encoding                 # noqa: E402
import sources                  # noqa: E402


class Bytes:
    """every byte is an id, and 256 begins a document"""
    name, header, frame, sha256 = "bytes", (30522, 102), ([256], []), "bytes"

    def __init__(self, directory=None):
        if "BEGUN" in os.environ and multiprocessing.parent_process():       # a worker that takes its time to begin
            open(os.environ["BEGUN"], "w").close()
            time.sleep(3)

    def encode(self, texts):
        return [np.frombuffer(t.encode(), dtype=np.uint8).astype(np.uint16) for t in texts]


encoding.ENCODINGS["bytes"] = Bytes             # at the top level, because spawned processes import this file


def has(*modules):
    return all(importlib.util.find_spec(m) for m in modules)


def needs(*modules):
    missing = [m for m in modules if not has(m)]
    return unittest.skipIf(missing, f"Python's {', '.join(missing)} is missing: pip install -r data/requirements.txt")


def needs_real(*files):
    missing = [f for f in files if not (REAL and os.path.exists(os.path.join(REAL, f)))]
    return unittest.skipIf(missing, f"no {', '.join(missing)} in CABLE_DATA")


def real(name):
    return os.path.join(REAL, name)


def contents(directory):
    return {name: read(os.path.join(directory, name)) for name in sorted(os.listdir(directory))
            if os.path.isfile(os.path.join(directory, name))}


def header(path):
    return struct.unpack("<256i", read(path)[:1024])


def tokens(path):
    return np.frombuffer(read(path)[1024:], dtype="<u2")


def all_tokens(directory, pattern="*.bin"):
    return np.concatenate([tokens(p) for p in sorted(glob.glob(os.path.join(directory, pattern)))])


def group_shards(directory, stem):
    """[(documents as lists of ids, header)] of the shards, in order"""
    found = []
    for path in sorted(glob.glob(os.path.join(directory, stem))):
        ids = list(tokens(path))
        starts = [i for i, t in enumerate(ids) if t == 101] + [len(ids)]
        found.append(([ids[a:b] for a, b in zip(starts, starts[1:])], header(path)))
    return found


def documents(count, seed=0, longest=60):
    r = random.Random(seed)

    def letters():
        return "".join(r.choice("abc de\u00e9\u4e2d\n") for _ in range(r.randrange(longest)))
    return [f"{i} {letters()}." for i in range(count)]


def jsonl(texts):
    return json_lines({"text": t} for t in texts)


def json_lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def parquet(path, texts, rows=None, **columns):
    """a file with this column of texts, and more columns; rows: of a group"""
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, **columns}), path, row_group_size=rows)
    return path


def zstd(text):
    import pyarrow
    return pyarrow.compress(text, "zstd", asbytes=True)


class Case(Folder):
    def setUp(self):
        super().setUp()
        self.start(mock.patch("os.fsync", lambda fd: None))     # disks are slow, and a killed process loses nothing

    def build(self, out, paths, shard=500, val=0, seed=7, workers=1, window=800, reader=None, **more):
        """the engine with the encoding of bytes; self.said is what it would have printed"""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            stream = build.Stream("text", reader or sources.Reader(), sources.files_in(paths),
                                  **build.numbered("t", shard, val), seed=seed, window_bytes=window, **more)
            data = build.build(self.path(out), [stream], "bytes", None, workers, {"name": "test"})
        self.said = said.getvalue()
        return data

    def script(self, name, *args, code=0, env=None):
        """the output of data/NAME.py, which must end with this code and without a traceback"""
        r = subprocess.run([sys.executable, os.path.join(DATA, name + ".py"), *args],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})})
        text = (r.stdout + r.stderr).decode()
        self.assertNotIn("Traceback", text)
        self.assertEqual(r.returncode, code, text)
        return text

    def prepare(self, name, out, *args, **more):
        """script() with the real vocabularies and an output directory; workers cost more to start than these texts"""
        return self.script(name, "--tokenizer", REAL, "--workers", "1", "--out", self.path(out), *args, **more)

    def nothing_but_whole_shards(self, out):
        names = os.listdir(self.path(out)) if os.path.isdir(self.path(out)) else []
        self.assertEqual([n for n in names if n.startswith(common.TEMPORARY)], [])
        if common.MANIFEST not in names:
            self.assertEqual([n for n in names if n.endswith(".bin")], [])


class Engine(Case):
    def test_every_document_once_framed_and_in_order(self):
        texts = documents(100)
        data = self.build("o", [self.write("in/a.jsonl", jsonl(texts))], seed=None)
        wanted = [i for t in texts for i in [256] + list(t.encode())]
        self.assertEqual(list(all_tokens(self.path("o"))), wanted)
        shards = data["shards"]
        self.assertEqual([s["tokens"] for s in shards[:-1]], [500] * (len(shards) - 1))
        self.assertEqual(sum(s["documents"] for s in shards), 100)
        self.assertEqual(data["counts"]["text"]["documents"], 100)
        for s in shards:
            path = self.path("o", s["file"])
            self.assertEqual(header(path), (20240520, 1, s["tokens"], 30522, 102) + (0,) * 251)
            self.assertEqual(os.path.getsize(path), 1024 + 2 * s["tokens"])
            self.assertEqual(hashlib.sha256(read(path)).hexdigest(), s["sha256"])

    def test_the_progress_never_falls_and_ends_with_the_input(self):
        path = self.write("in/a.jsonl", jsonl(documents(100)))
        with mock.patch.object(build, "Progress") as bar:
            self.build("o", [path], seed=None)
        positions = [call.args[0] for call in bar.return_value.update.call_args_list]
        self.assertEqual(positions, sorted(positions))
        self.assertEqual((bar.call_args.args[0], positions[-1]), (os.path.getsize(path),) * 2)

    def test_gpt2_header_is_that_of_llm_c(self):
        self.assertEqual(encoding.GPT2.header, (0, 0))

    def split(self, directory):
        ids = list(all_tokens(directory))
        starts = [i for i, t in enumerate(ids) if t == 256] + [len(ids)]
        return [bytes(ids[a + 1:b]).decode() for a, b in zip(starts, starts[1:])]

    def test_shuffle_is_a_permutation_of_the_seed_alone(self):
        texts = documents(300)
        paths = [self.write(f"in/{i:02d}.jsonl", jsonl(texts[i * 10:i * 10 + 10])) for i in range(30)]
        self.build("a", paths)
        self.build("b", paths, workers=2)
        self.build("c", paths, seed=8)
        self.assertEqual(contents(self.path("a")), contents(self.path("b")))
        one, other = self.split(self.path("a")), self.split(self.path("c"))
        self.assertEqual(sorted(one), sorted(texts))
        self.assertEqual(sorted(other), sorted(texts))
        self.assertNotEqual(one, other)
        moved = [abs(texts.index(t) - i) for i, t in enumerate(one)]
        self.assertGreater(sum(moved) / len(moved), 60)     # 100 in a uniform permutation; about 9 within windows only

    def test_validation_split_comes_first(self):
        path = self.write("in/a.jsonl", jsonl(documents(100)))
        data = self.build("o", [path], val=300)
        self.assertEqual([(s["file"], s["tokens"]) for s in data["shards"][:2]],
                         [("t_val_000000.bin", 300), ("t_train_000001.bin", 500)])
        with self.assertRaisesRegex(common.BadInput, "leaves nothing to train on"):
            self.build("p", [path], val=10**6)
        self.nothing_but_whole_shards("p")

    def test_a_document_longer_than_window_and_shard(self):
        with mock.patch.object(sources, "PIECE_BYTES", 100):
            text = " ".join(documents(200, seed=1))
            for ending, data in (("txt", text), ("jsonl", jsonl(["first", text, "last"]))):
                for seed in (None, 3):
                    self.build(ending + str(seed), [self.write("in/a." + ending, data)], seed=seed)
                    found = self.split(self.path(ending + str(seed)))
                    self.assertEqual(sorted(found), sorted([text] if ending == "txt" else ["first", text, "last"]))

    def test_a_window_is_as_long_as_its_last_document(self):
        """what follows a window counts for the next one, also where a document has begun"""
        reader = mock.Mock()
        reader.pieces.return_value = [sources.Piece(b"a" * n, True, last) for n, last in (
            (60, True), (50, False), (60, True), (99, True), (1, True))]
        found = [[len(p.text) for p in w.pieces] for w in sources.windows(reader, [mock.Mock(weight=1)], None, 100)]
        self.assertEqual(found, [[60], [50, 60], [99, 1], []])

    def test_last_shard_exactly_full(self):
        data = self.build("o", [self.write("in/a.txt", "x" * 999)], shard=500)
        self.assertEqual([s["tokens"] for s in data["shards"]], [500, 500])
        before = contents(self.path("o"))
        self.build("o", [self.path("in/a.txt")], shard=500)
        self.assertIn("is already complete", self.said)
        self.assertEqual(contents(self.path("o")), before)

    def test_memory_stays_within_the_window(self):
        line = ("the quick brown fox " * 50 + "\n").encode()
        with gzip.open(self.path("big.txt.gz"), "wb", 1) as f:
            for _ in range(60):
                f.write(line * 1000)            # 60 MB

        def child():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.build("o", [self.path("big.txt.gz")], shard=10**7, window=10**6)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            return 0 if grown < 40 * 1024 else 1                # kB; the text in one piece is 60 MB, its ids 120
        self.assertEqual(forked(child), 0)

    def test_no_cut_inside_a_word_unless_forced(self):
        counts = sources.new_counts()
        with mock.patch.object(sources, "PIECE_BYTES", 10), mock.patch.object(sources, "FORCED_BYTES", 40):
            pieces, rest = sources.cut(b"a" * 100 + b" " + b"b" * 12 + "\u4e2d".encode() * 40, counts)
        self.assertEqual(b"".join(pieces) + rest, b"a" * 100 + b" " + b"b" * 12 + "\u4e2d".encode() * 40)
        for piece in pieces:
            piece.decode("utf-8")
        self.assertGreaterEqual(counts["forced_cuts"], 2)


def forked(child):
    """exit status of child() in a process of its own (minus the signal that ended it)"""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = child() or 0
        except SystemExit as e:
            code = e.code
        except BaseException as e:
            print(f"child: {type(e).__name__}: {e}", file=sys.stderr)
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


class Restart(Case):
    def setUp(self):
        super().setUp()
        texts = documents(150) + ["long " * 300] + documents(30, seed=5)
        texts[20:20] = ["", "  \n"]
        lines = jsonl(texts).encode().split(b"\n")[:-1]
        lines[40:40] = [b"{broken", b'{"text": "bad \xff byte"}']
        cut = len(lines) // 3
        parts = (lines[:cut], lines[cut:2 * cut], lines[2 * cut:])
        self.paths = [self.write(f"in/{i}.jsonl", b"\n".join(part) + b"\n") for i, part in enumerate(parts)]
        self.start(mock.patch.object(sources, "PIECE_BYTES", 200))

    def run_killed(self, out, event):
        """a build that is killed at its event-th write, sync or rename; True if it came that far"""
        def child():
            left = [event]

            def killing(f):
                def wrapped(*args, **kwargs):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return f(*args, **kwargs)
                return wrapped
            with mock.patch("os.replace", killing(os.replace)), mock.patch("os.fsync", killing(os.fsync)), \
                    mock.patch.object(common.ShardWriter, "append", killing(common.ShardWriter.append)):
                self.build(out, self.paths, val=200)
        status = forked(child)
        self.assertIn(status, (0, -signal.SIGKILL))
        return status != 0

    def check_state(self, out, reference):
        """every file with a final name has its final content"""
        manifest = self.path(out, common.MANIFEST)
        recorded = {s["file"] for s in common.read_manifest(manifest)["shards"]} if os.path.exists(manifest) else set()
        for name, data in contents(self.path(out)).items():
            if name.endswith(".bin") and not name.startswith(common.TEMPORARY):
                self.assertEqual(data, reference[name], name)
                recorded.discard(name)
        self.assertEqual(recorded, set())

    def test_killed_anywhere_goes_on_to_the_same_bytes(self):
        self.build("whole", self.paths, val=200)
        reference = contents(self.path("whole"))
        counts = json.loads(reference[common.MANIFEST])["counts"]["text"]
        self.assertEqual((counts["empty"], counts["bad_lines"], counts["bad_utf8"]), (2, 1, 1))
        self.assertGreater(len(reference), 8)
        event = killed = 0
        while True:
            event += 1 if event < 30 else 7
            if not self.run_killed(f"k{event}", event):
                break
            killed += 1
            self.check_state(f"k{event}", reference)
            if event % 4 == 0:                                      # and again, in the second run
                self.run_killed(f"k{event}", 9 + event % 20)
                self.check_state(f"k{event}", reference)
            self.build(f"k{event}", self.paths, val=200)
            self.assertEqual(contents(self.path(f"k{event}")), reference, f"killed at {event}")
        self.assertGreater(killed, 40)

    def test_a_worker_ends_with_its_parent(self):
        """also one that has not begun yet when the parent is killed"""
        pid = os.fork()
        if pid == 0:
            try:
                os.environ["BEGUN"] = self.path("begun")
                self.build("o", self.paths, workers=2)
            finally:
                os._exit(0)
        while not os.path.exists(self.path("begun")) and alive(pid):
            time.sleep(0.01)
        found = children(pid)
        os.kill(pid, signal.SIGKILL)
        self.assertEqual(os.waitpid(pid, 0)[1], signal.SIGKILL)
        end = time.monotonic() + 20
        while any(map(alive, found)) and time.monotonic() < end:
            time.sleep(0.05)
        left = [worker for worker in found if alive(worker)]
        for worker in left:
            os.kill(worker, signal.SIGKILL)
        self.assertEqual(left, [])

    def test_every_shard_is_a_place_to_go_on_from(self):
        even = self.write("even.jsonl", jsonl(["x" * 99] * 40))      # every fifth document ends a shard
        texts = ["a b " * 30, "c d " * 900, *documents(40), "e f " * 500, *documents(40, seed=2)]
        odd = self.write("odd.jsonl", jsonl(texts))
        for name, path, window, piece, wanted in (
                ("even", even, 450, 200, "babc4b0d"), ("small", odd, 150, 200, "f5ab0ce4"),
                ("large", odd, 1000, 100, "c1f9db2b"), ("one", odd, 10**6, 100, "14f4fd06")):
            with mock.patch.object(sources, "PIECE_BYTES", piece):
                self.build(name, [path], window=window, shard=500 if name == "even" else 137)
                reference = contents(self.path(name))
                order = hashlib.sha256(all_tokens(self.path(name)).tobytes()).hexdigest()[:8]
                self.assertEqual(order, wanted, name)           # of this seed, in each version
                shards = [n for n in reference if n.endswith(".bin")]
                for shard in shards[:8] if name in ("even", "small") else shards[::8]:
                    if name == "small":
                        os.truncate(self.path(name, shard), 1100)
                    else:
                        os.remove(self.path(name, shard))
                    self.build(name, [path], window=window, shard=500 if name == "even" else 137)
                    self.assertIn("written again", self.said)
                    self.assertEqual(contents(self.path(name)), reference, (name, shard))

    def test_finished_shards_are_not_redone(self):
        self.assertTrue(self.run_killed("o", 150))
        done = {n: os.stat(self.path("o", n)).st_mtime_ns for n in os.listdir(self.path("o")) if n.startswith("t_")}
        self.assertGreater(len(done), 2)
        encoded = []

        def encode(self, texts, f=Bytes.encode):
            encoded.extend(texts)
            return f(self, texts)
        with mock.patch.object(Bytes, "encode", encode):
            self.build("o", self.paths, val=200)
        recorded = sorted(done, key=done.get)[:-1]          # the kill may have come before the last one was recorded
        for name in recorded:
            self.assertEqual(os.stat(self.path("o", name)).st_mtime_ns, done[name])
        total = json.loads(read(self.path("o", common.MANIFEST)))["counts"]["text"]["text_bytes"]
        self.assertLess(sum(len(t.encode()) for t in encoded), total - 500 * (len(recorded) - 1))

    def test_other_settings_are_refused(self):
        self.build("o", self.paths)
        before = contents(self.path("o"))
        reader = sources.Reader(column="other")
        for change in ({"seed": 9}, {"shard": 400}, {"val": 5}, {"window": 900}, {"reader": reader}):
            with self.assertRaisesRegex(common.BadInput, "holds shards made with streams.text.* = "):
                self.build("o", self.paths, **change)
        self.write("in/0.jsonl", read(self.paths[0]) + b'{"text": "more"}\n')
        with self.assertRaisesRegex(common.BadInput, "holds shards made with"):
            self.build("o", self.paths)
        self.assertEqual(contents(self.path("o")), before)

    def test_what_somebody_else_wrote_is_not_replaced(self):
        whole = self.build("whole", self.paths)["shards"]
        own = self.write("o/" + whole[1]["file"], "my own")
        for _ in range(2):                          # neither now nor when it continues
            with self.assertRaisesRegex(common.BadInput, f"{whole[1]['file']}: is there already, with other contents"):
                self.build("o", self.paths)
            self.assertEqual(read(own), b"my own")
            self.assertFalse([n for n in os.listdir(self.path("o")) if n.startswith(common.TEMPORARY)])
        os.remove(own)
        mine, link = self.write("mine.txt", "mine"), self.path("o", f"{common.TEMPORARY}{whole[1]['file']}")
        os.symlink(mine, link)
        notes = common.TEMPORARY + "notes"
        self.write("o/" + notes, "my own")
        self.build("o", self.paths)
        self.assertEqual(contents(self.path("o")), {**contents(self.path("whole")), notes: b"my own"})
        os.symlink(mine, link)
        with self.assertRaisesRegex(common.BadInput, "cannot write: File exists"):
            common.ShardWriter(self.path("o"), whole[1]["file"])
        self.assertEqual(read(mine), b"mine")

    def test_a_limit_that_was_reached_before_the_end(self):
        for shard in 500, 499:                      # the second one ends within a piece
            out = f"o{shard}"
            self.build(out, self.paths, shard=shard, shards=2)
            before, manifest = contents(self.path(out)), common.Manifest(self.path(out), {}, {})
            manifest.data = {**common.read_manifest(manifest.path), "complete": False, "counts": {}}
            manifest.save()
            self.build(out, self.paths, shard=shard, shards=2)
            self.assertEqual(contents(self.path(out)), before)

    def test_two_writers(self):
        def refused():
            with self.assertRaisesRegex(common.BadInput, "another run is writing here"):
                self.build("o", self.paths)
        with common.locked(self.path("o")):
            self.assertEqual(forked(refused), 0)
        self.build("o", self.paths)

    def test_full_disk(self):
        self.build("whole", self.paths)
        for limit in (600, 1500, 2000):                         # within the first header, the first shard, the manifest

            def child():
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                try:
                    self.build("o", self.paths)
                except common.BadInput as e:
                    return 0 if "the disk is full" in str(e) and "run the same command again" in str(e) else 3
                return 4
            self.assertEqual(forked(child), 0, limit)
            self.nothing_but_whole_shards("o")
            self.check_state("o", contents(self.path("whole")))
        self.build("o", self.paths)
        self.assertEqual(contents(self.path("o")), contents(self.path("whole")))

    def test_a_disk_that_does_not_know_how_much_is_free(self):
        full = OSError(28, "No space left on device")
        unknown = r"device\); finished"
        for usage, words in ((mock.Mock(total=0, free=0), unknown), (OSError(38, "x"), unknown),
                             (mock.Mock(total=9 << 20, free=1 << 20), "device; 1 MB free")):
            with mock.patch("shutil.disk_usage", side_effect=[usage]), self.assertRaisesRegex(common.BadInput, words):
                with common.writing(self.path("x")):
                    raise full

    def test_signal_leaves_a_whole_state_and_code_75(self):
        self.build("whole", self.paths)
        for number in (signal.SIGTERM, signal.SIGINT):
            def child():
                left = [40]

                def append(writer, array, f=common.ShardWriter.append):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), number)
                        time.sleep(1)
                    f(writer, array)
                with mock.patch.object(common.ShardWriter, "append", append), contextlib.redirect_stderr(io.StringIO()):
                    common.run(lambda _: self.build(f"o{number}", self.paths))
            self.assertEqual(forked(child), 75)
            self.nothing_but_whole_shards(f"o{number}")
            self.build(f"o{number}", self.paths)
            self.assertEqual(contents(self.path(f"o{number}")), contents(self.path("whole")))

    def test_synced_before_renamed_and_the_directory_after(self):
        events = []

        def sync(fd):
            events.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))

        def rename(a, b, f=os.replace):
            events.append(("rename", a))
            f(a, b)

        def append(writer, array, f=common.ShardWriter.append):
            events.append(("write", writer.temporary))
            f(writer, array)
        with mock.patch("os.fsync", sync), mock.patch("os.replace", rename), \
                mock.patch.object(common.ShardWriter, "append", append):
            self.build("o", self.paths)
        renames = [i for i, (what, _) in enumerate(events) if what == "rename"]
        self.assertGreater(len(renames), 10)
        for i in renames:
            self.assertEqual(events[i - 1], ("sync", events[i][1]))
            self.assertEqual(events[i + 1], ("sync", self.path("o")))

    def test_a_broken_manifest_is_refused(self):
        self.build("o", self.paths)
        whole = read(self.path("o", common.MANIFEST))
        for bad in (b"", whole[:100], b"[]", b"{}", b"\xff", whole.replace(b'"format": 3', b'"format": 2'),
                    whole.replace(b'"t_train_000000.bin"', b'"../x.bin"'), b'{"format": ' + b"[" * 100000):
            self.write("o/" + common.MANIFEST, bad)
            with self.assertRaisesRegex(common.BadInput, "manifest.json: (not a manifest|expected a JSON object)"):
                self.build("o", self.paths)

    def test_a_data_set_of_format_2_is_read_but_not_continued(self):
        self.build("o", self.paths)
        path = self.path("o", common.MANIFEST)
        old = {**common.read_manifest(path), "format": 2}
        self.write("o/" + common.MANIFEST, json.dumps({**old, "checksum": common.checksum_of(old)}).encode())
        self.build("o", self.paths)
        self.assertEqual(common.read_manifest(path), old)
        os.remove(self.path("o", old["shards"][-1]["file"]))
        with self.assertRaisesRegex(common.BadInput, "manifest.json: an earlier version"):
            self.build("o", self.paths)

    def test_a_flipped_bit_of_a_manifest(self):
        self.build("o", self.paths)
        path, whole, r = self.path("o", common.MANIFEST), read(self.path("o", common.MANIFEST)), random.Random(3)
        good = common.read_manifest(path)
        for _ in range(500):
            i = r.randrange(len(whole))
            self.write("o/" + common.MANIFEST, whole[:i] + bytes([whole[i] ^ 1 << r.randrange(8)]) + whole[i + 1:])
            try:
                self.assertEqual(common.read_manifest(path), good)          # a space between fields
            except common.BadInput as e:
                self.assertRegex(str(e), "^[^\n]*manifest.json: [^\n]*$")


class BadFiles(Case):
    """every kind of damage gives exit code 2 or a counted skip, and one line, and leaves no shard"""
    text = ("\n".join(documents(400, seed=2)) + "\n").encode()

    def refused(self, words, *paths, reader=None):
        self.attempts = getattr(self, "attempts", 0) + 1
        with self.assertRaisesRegex(common.BadInput, words):
            self.build(f"refused{self.attempts}", list(paths), reader=reader)
        self.nothing_but_whole_shards(f"refused{self.attempts}")

    def compressed(self):
        yield "gz", gzip.compress(self.text)
        yield "xz", lzma.compress(self.text)
        yield "xz", lzma.compress(self.text) + bytes(8)         # padding, as its format allows
        yield "bz2", bz2.compress(self.text)
        if has("pyarrow"):
            yield "zst", zstd(self.text)

    def test_compressed_files_whole_cut_and_flipped(self):
        self.build("plain", [self.write("in/a.txt", self.text)], seed=None)
        for n, (ending, data) in enumerate(self.compressed()):
            path = self.write(f"{ending}/a.txt.{ending}", data)
            self.build(f"out{n}", [path], seed=None)
            self.assertTrue((all_tokens(self.path("plain")) == all_tokens(self.path(f"out{n}"))).all())
            damaged = [data[:3], data[:len(data) // 2], data.rstrip(b"\0")[:-1], b"not compressed at all"]
            if ending in ("gz", "xz", "bz2"):               # these always carry a checksum
                flipped = bytearray(data)
                flipped[len(data) // 2] ^= 1
                damaged.append(bytes(flipped))
            for content in damaged:
                path = self.write(f"{ending}/a.txt.{ending}", content)
                self.refused("damaged or cut short|cannot be read|expected gzip", path)

    def test_a_line_and_a_document_are_bounded(self):
        line = b'{"text": "' + b"a" * 3000 + b'"}\n'
        cases = (("a.jsonl", b'{"text": "b"}\n' + line, "file", "a.jsonl: line 2: expected at most 0 MB and 125 "),
                 ("a.jsonl.gz", gzip.compress(line), "file", "a.jsonl.gz: line 1: expected at most 0 MB and"),
                 ("a.json", b'[{"text": "b"},' + line + b"]", "file", "a.json: line 1: expected at most 0 MB and"),
                 ("v.jsonl", b'{"a": [' + b"0," * 900, "file", "v.jsonl: line 1: .* and 125 values in a"),
                 ("a.csv", b'text,id\n"' + b"a\n" * 2000, "file", "a.csv: line 1001: expected at most 0 MB and"),
                 ("b.csv", b"text,id\n" + b"," * 50, "file", "b.csv: line 2: expected at most 0 MB and 31 fields"),
                 ("c.csv", b"text,id\n" + b'"\n",' * 50, "file", "c.csv: line 34: expected at most 0 MB and 31 fields"),
                 ("b.tsv", b"text\tid\n" + b"\t" * 50, "file", "b.tsv: line 2: expected at most 0 MB and 31 fields"),
                 ("a.txt.xz", lzma.compress(line), "line", "line 1: expected at most"),
                 ("b.txt", b"abc\n" * 1000, "blank", "expected at most 0 MB in a document, got more; --documents file"),
                 ("c.txt", b"abc\n" * 1000, "section", "expected at most 0 MB in a document"),
                 ("d.txt", line, "blank", "line 1: expected at most"))
        with mock.patch.object(sources, "LINE_BYTES", 2000), mock.patch.object(sources, "PIECE_BYTES", 500):
            for name, data, documents, words in cases:
                self.refused(words, self.write(name, data), reader=sources.Reader(documents))
            self.build("whole", [self.path("c.txt")], reader=sources.Reader("file"))    # streamed, however long
            short = b"x" * 1999 + b"\n"
            self.build("line", [self.write("e.txt", short * 2)], reader=sources.Reader("line"))
        self.assertEqual(len(all_tokens(self.path("line"))), 2 * 2000)
        for size in range(1, 8):                # however the blocks fall
            for parts in [b"a\n\n", b"\nb\n\n", b"c\n\n", b""], [b"a\r\n\r\n", b"\r\nb\r\n\r\n", b"c\r"]:
                with mock.patch.object(sources, "PIECE_BYTES", size):
                    self.assertEqual(list(sources.sections(io.BytesIO(b"".join(parts)), "x")), parts)

    @needs("pyarrow")
    def test_zstd_frames_in_a_row(self):
        self.build("o", [self.write("a.txt.zst", zstd(b"one ") + zstd(b"two"))])
        self.assertEqual(bytes(list(all_tokens(self.path("o")))[1:]), b"one two")

    def test_paths_without_text(self):
        os.mkfifo(self.path("pipe.txt"))
        self.refused("expected a regular file", self.path("pipe.txt"))
        self.refused("no such file", self.path("missing.txt"))
        os.makedirs(self.path("nothing"))
        self.refused("no file of", self.path("nothing"))
        self.refused("no documents", self.write("e.txt", b""))
        self.refused("no documents", self.write("e2.txt", b" \n\n "))
        self.assertIn("1 empty", self.report_of(self.path("e2.txt")))
        with mock.patch("os.scandir", side_effect=PermissionError(13, "Permission denied", "x/shut")):
            self.assertRaises(PermissionError, sources.files_in, [self.folder])

    def test_files_named_twice_and_links_to_directories(self):
        path = self.write("d/a.txt", "one")
        os.symlink(self.path("d"), self.path("d", "again"))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(sources.files_in([self.path("d"), path]), [path, path])
        self.assertIn("d/again: left out, because it is a link to a directory; name it", said.getvalue())
        self.assertIn("1 of the 2 files was named before, or by a link, and will be read again", said.getvalue())
        os.link(path, self.path("d", "b.txt"))
        os.symlink(path, self.path("d", "c.txt"))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(len(sources.files_in([self.path("d")])), 3)
        self.assertIn("2 of the 3 files were named before, or by a link", said.getvalue())

    def test_what_nobody_meant_is_left_out_with_a_word(self):
        path = self.write("d [1]/a.txt", "one")
        for name in (".git/x.txt", "sub/.ipynb_checkpoints/b.txt", ".hidden.txt", ".DS_Store", "out/c.json"):
            self.write("d [1]/" + name, "other")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(sources.files_in([self.path("d [1]")], out=self.path("d [1]/out")), [path])
        said = said.getvalue()
        for name, why in ((".git", "hidden; name"), ("sub/.ipynb_checkpoints", "hidden; name"),
                          (".hidden.txt", "hidden; name"), ("out", "--out\n")):
            self.assertIn(f"{self.path('d [1]', name)}: left out, because it is {why}", said)
        self.assertNotIn("DS_Store", said)
        named = self.path("d [1]", ".git")
        self.assertEqual(sources.files_in([named]), [os.path.join(named, "x.txt")])

    def report_of(self, path):
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(common.BadInput):
            stream = build.Stream("text", sources.Reader(), [path], **build.numbered("t", 500))
            build.build(self.path("o"), [stream], "bytes", None, 1, {"name": "test"})
        return said.getvalue()

    def test_bad_utf8_is_replaced_and_counted(self):
        path = self.write("a.txt", b"good \xff\xfe bad\nline\xc3")
        data = self.build("o", [path], reader=sources.Reader("line"), seed=None)
        self.assertEqual(data["counts"]["text"]["bad_utf8"], 2)
        self.assertIn("2 texts with bad UTF-8", self.said)
        text = bytes(i for i in all_tokens(self.path("o")) if i < 256)
        self.assertEqual(text.decode(), "good \ufffd\ufffd badline\ufffd")

    def test_a_file_that_is_no_text(self):
        program, wide = b"\x7fELF\2\1\1\0" + bytes(20), "\ufefftext".encode("utf-16-le")
        for how in ("file", "line", "blank", "section"):
            with self.subTest(how=how):
                reader = sources.Reader(how)
                self.refused("/a.txt: byte 7 is 0: expected text", self.write("a.txt", program), reader=reader)
                self.refused("byte 3 is 0: .*UTF-16", self.write("b.txt", wide), reader=reader)
                late = self.write("c.txt.gz", gzip.compress(b"lines of text\n" * 200 + b"\0"))
                with mock.patch.object(sources, "BLOCK_BYTES", 1000):
                    self.refused("byte 2800 is 0", late, reader=reader)

    def test_json_lines(self):
        lines = ['{"text": "a"}', "{", "1]", '{"text": 5}', '{"other": "x"}', '{"text": ""}',
                 '{"text": "half \\ud800 pair"}', "", '"b"']
        data = self.build("o", [self.write("a.jsonl", "\n".join(lines))], seed=None)
        counts = data["counts"]["text"]
        self.assertEqual((counts["documents"], counts["bad_lines"], counts["empty"]), (2, 5, 1))
        self.assertIn("5 records without text skipped", self.said)
        self.refused("none of its lines is a JSON object", self.write("b.jsonl", "no\njson\n"))
        other = self.write("c.jsonl", '\n{\n{"other": "x", "id": 3}\n')
        self.refused("c.jsonl: none .* text in 'text'; line 3 has the fields .\"other\", \"id\".: .* --column", other)
        self.build("other", [other], reader=sources.Reader(column="other"))
        self.refused("line 3 has 3 there", other, reader=sources.Reader(column="id"))
        self.refused("none of its lines", self.write("d.jsonl", '{"a":' * 100000))

    def texts_of(self, name, content, **how):
        """the documents of a file, in its order; self.said is what was said about it"""
        reader, counts, texts = sources.Reader(**how), sources.new_counts(), []
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for unit in reader.units([self.write(name, content)]):
                for piece in reader.pieces(unit, counts, [0]):
                    texts += [""] * piece.first
                    texts[-1] += piece.text.decode()
            sources.report(counts)
        self.said = said.getvalue()
        return texts

    def test_json_in_any_layout(self):
        texts = ["one \u00e9", "two ][ {", "three\nlines", ""]
        records, ascii_only = [{"text": t, "n": [1, {"text": "x"}]} for t in texts], [True, False]
        each = [json.dumps(r) for r in records]
        layouts = [json.dumps(records, ensure_ascii=a, indent=i) for a in ascii_only for i in (None, 0, 2)]
        layouts += ["[\n" + ",\n".join(each) + "\n]\n", "[" + "\n,".join(each) + "]", ",\n".join(each),
                    "".join(each), "\r".join(each), "\n".join(json.dumps(r, indent=1) for r in records),
                    "\ufeff\n" + json.dumps(records),
                    "\n".join(f"[{e}]" for e in each), f"[[{each[0]}], [[{each[1]}, {each[2]}]], {each[3]}, []]",
                    "\n\ufeff".join(each), each[0] + "\n" + json.dumps(records[1:], indent=1)]
        for i, layout in enumerate(layouts):
            for block, name in ((1, "a.json"), (1 << 17, "a.jsonl"), (7, "a.json.gz")):
                data = layout.encode()
                with mock.patch.object(sources, "BLOCK_BYTES", block), mock.patch.object(sources, "PIECE_BYTES", 5):
                    found = self.texts_of(f"{i}{name}", gzip.compress(data) if name.endswith("gz") else data)
                self.assertEqual(found, texts[:3], (name, layout))
                self.assertEqual(self.said, "1 empty documents skipped\n")
        whole = json.dumps(records, indent=1)
        for text, line, got in ((whole[:-1], 38, "the end of"), (whole[:60], 2, "{"), ('["a", "b"]', 1, '"a"'),
                                (each[0] + "\n[1]\n" + each[1], 2, "1]"), ("[" * 10**5, 1, "the end of"),
                                (each[0] + "\n[null]", 2, "null"), (whole.replace('"n":', '"n"', 1), 2, "{")):
            words = re.escape(f"a.json: line {line}: expected objects up to the end of a JSON array (]), got '{got}")
            self.refused(words, self.write("a.json", text))
        self.assertEqual(self.texts_of("c.jsonl", '{"text": "cut\n{"text": "a"}\n{"text": "x",\n{"text": "b"}\n{"te'),
                         ["a", "b"])
        self.assertIn("3 records without text skipped", self.said)
        self.refused("expected UTF-8, got UTF-16", self.write("w.jsonl", each[0].encode("utf-16")))

    def test_quotation_marks_in_tables(self):
        """(rows, their texts, what is said) as the two readings have it"""
        plain, quoted = "rows with quotation marks as text", "rows with quotation marks around fields"
        cases = (('1\t"Hello.\n2\tBye."\n3\tx\n', ['"Hello.', 'Bye."', "x"], f"3 {plain}; with quotation marks around "
                  "fields they were 2"),
                 ('1\t"a"\n2\tb "c"\n', ['"a"', 'b "c"'], ""), ('1\t"a\n2\tb\n', ['"a', "b"], ""),
                 ('1\t"a ""b"""\n2\tc\n', ['a "b"', "c"], ""), ('1\t"a\nb"\n2\tc\n', ["a\nb", "c"], ""),
                 ('1\t"a"\n2\t"b"\n', ["a", "b"], ""), ('1\ta\\nb\n', ["a\\nb"], ""),
                 ("1\ta\r\n2\tb\r\n", ["a", "b"], ""),
                 ("1\ta\\\tb\n2\tc\n", ["a\tb", "c"], "2 rows with quotation marks around fields and backslashes"))
        for text, wanted, said in cases:
            self.assertEqual(self.texts_of("a.tsv", "id\ttext\n" + text), wanted)
            self.assertIn(said, self.said)
            self.assertEqual(bool(said), bool(self.said), self.said)
        head = '"id"\t"text"\n1\t"a\n2\tb"\n3\tNA\n'
        self.assertEqual(self.texts_of("head.tsv", head), ["a\n2\tb", "NA"])
        self.assertIn(f"2 {quoted}; with quotation marks as text they were 3", self.said)
        escaped = 'id,text\n1,"a \\"b\\", c"\n2,"d"\n'
        self.assertEqual(self.texts_of("a.csv", escaped), ['a "b", c', "d"])
        self.assertIn("2 rows with quotation marks around fields and backslashes", self.said)
        self.refused("b.tsv: line 3: expected 2 fields, got 3", self.write("b.tsv", "id\ttext\n1\ta\n2\tb\tc\n"))

    def test_lines_that_end_with_cr_and_marks_within_a_text(self):
        for how, wanted in (("file", ["one\n\ntwo\n"]), ("line", ["one", "two"]), ("section", ["one\n\n", "two\n"])):
            self.assertEqual(self.texts_of("a.txt", "one\r\rtwo\r", documents=how), wanted)
            self.assertIn("1 files with CR at the ends of lines, read as LF", self.said)
            for block in 1, 2, 5, 100:
                with mock.patch.object(sources, "BLOCK_BYTES", block):
                    text = "\ufeffone\n\n\ufefftw\ufeffo\n\u2ec2".encode() + b"\xef\xbb"
                    found = self.texts_of("b.txt", text, documents=how)
                    self.assertEqual("".join(found).replace("\n", ""), "onetwo\u2ec2\ufffd")
                    if block > 2:
                        self.assertIn("2 byte order marks within texts, left out", self.said)
        for name, text in (("a.csv", 'id,text\r1,"a, b"\r2,c\r'), ("b.csv", 'id,text\n1,"a, b"\n\ufeff2,c\n')):
            self.assertEqual(self.texts_of(name, text), ["a, b", "c"])

    def test_a_file_that_stands_in_for_another(self):
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
        page = "<!DOCTYPE html>\n<html><head>"
        for name in "a.jsonl", "a.txt", "a.parquet", "a.csv.gz", "a.txt.zst":
            self.refused(f"{name}: a pointer of Git LFS, not the file; .*git lfs pull", self.write(name, pointer))
            if name != "a.txt":
                self.refused(f"{name}: a page of HTML, .*hf download", self.write(name, page))
                self.refused(f"{name}: a server's refusal, .*hf download", self.write(name, "Entry not found"))
        self.refused("b.jsonl.gz: a page of HTML", self.write("b.jsonl.gz", gzip.compress(page.encode())))
        self.assertEqual(self.texts_of("a.txt", page), [page])              # which is text
        self.assertEqual(self.texts_of("a.txt", pointer + "x" * 1024), [pointer + "x" * 1024])
        said = self.script("verify", self.write("a.bin", pointer), code=2)
        self.assertIn("a.bin: a pointer of Git LFS", said)

    def test_a_tokenizer_that_is_not_here(self):
        for name in "gpt2", "bert", "bpe":
            hub = self.write(f"{name}/models--a--b/snapshots/0123/x", "")
            model = os.path.dirname(os.path.dirname(os.path.dirname(hub)))
            for place, words in (("a-b/gpt2", "gpt2: no such directory; .*: hf download a-b/gpt2 "),
                                 (model, "a cache of the hub.*0123/"), (self.path(name), "a cache of the hub.*0123/"),
                                 ("/no/such/place", "place: no such dir")):
                with self.assertRaisesRegex(common.BadInput, words):
                    encoding.ENCODINGS[name](place)

    def test_tokenizers_that_are_too_old(self):
        old = mock.Mock(Tokenizer=object, __version__="0.19.1")
        with mock.patch.object(encoding, "need", lambda _: old), \
                self.assertRaisesRegex(common.BadInput, "expected tokenizers 0.21 or later, got 0.19.1"):
            encoding.tokenizer_of("{}", "tokenizer.json", plain=True)

    def test_xz_takes_a_bounded_memory(self):
        filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]
        path = self.write("a.txt.xz", lzma.compress(b"a", filters=filters))
        self.refused("a.txt.xz: xz needs more than 256 MB", path)
        several = lzma.compress(b"one ") + bytes(8) + lzma.compress(b"two") + bytes(4)
        self.assertEqual(self.texts_of("b.txt.xz", several), ["one two"])

    def test_the_ending_says_what_a_file_is(self):
        texts = ['one, "two"', "three\nfour"]
        rows = [["id", "text"], ["1", texts[0]], ["2", texts[1]]]
        table = lambda mark: "".join(mark.join('"' + v.replace('"', '""') + '"' for v in row) + "\r\n" for row in rows)
        wanted = [i for t in texts for i in [256] + list(t.encode())]
        for name, data in (("a.ndjson", jsonl(texts)), ("a.jl", jsonl(texts)), ("a.jsonlines", jsonl(texts)),
                           ("A.JSONL", jsonl(texts)), ("a.JSON.GZ", gzip.compress(jsonl(texts).encode())),
                           ("m.jsonl", "\ufeff" + jsonl(texts)), ("a.csv", table(",")), ("a.TSV", table("\t")),
                           ("m.csv", "\ufeff" + table(","))):
            self.build("of_" + name, [self.write(name, data)], seed=None)
            self.assertEqual(list(all_tokens(self.path("of_" + name))), wanted, name)
        self.refused("a.html: expected one of .txt, .* got '.html'; --text reads it", self.write("a.html", "<p>text"))
        self.refused("a: expected one of .txt, .* got ''", self.write("a", "text"))
        self.assertEqual(sources.files_in([self.path("a.html")], any_kind=True), [self.path("a.html")])
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(len(sources.files_in([self.folder])), 9 + 9)         # with 9 manifests
        self.assertIn('11 files of other kinds are left out: ".bin", ".html", "without an ending"', said.getvalue())

    def test_tables_that_are_not_simple(self):
        for text, words in (("1,one\n2,two\n", r"a column 'text', got ..1., .one..: name another by --column"),
                            ("id;text\n1;one\n", "a column 'text'"), ("text,text\na,b\n", "a column 'text'"),
                            ("id,text\n1,one, two\n", "a.csv: line 2: expected 2 fields, got 3"),
                            ('id,text\n1,a\n2,"b" c\n', "a.csv: line 3: expected a row of a table"),
                            ('id,text\n1,"never ends\n', "a.csv: line 2: expected a row of a table"),
                            ("id,text\n1,\0\n", "byte 10 is 0")):
            self.refused(words, self.write("a.csv", text))
        data = self.build("o", [self.write("b.csv", b"text\none \xff\n\ntwo\n")], seed=None)
        self.assertEqual((data["counts"]["text"]["documents"], data["counts"]["text"]["bad_utf8"]), (2, 1))
        self.build("other", [self.path("b.csv")], reader=sources.Reader(column="text", make=lambda r: (r["text"], "")))

    def test_plain_text_is_cut_into_documents(self):
        """also where lines end with CR LF, and a byte order mark comes first"""
        lines = "one\ntwo\n\n \nthree\n"
        for how, count in (("file", 1), ("line", 3), ("blank", 2), ("section", 2)):
            for text in lines, "\ufeff" + lines.replace("\n", "\r\n"):
                path = self.write("a.txt", text)
                name = f"{how}{len(text)}"
                data = self.build(name, [path], reader=sources.Reader(how), seed=None)
                self.assertEqual(data["counts"]["text"]["documents"], count, (how, text))
                self.assertEqual(list(all_tokens(self.path(name)))[:4], [256, *b"one"])

    @needs("pyarrow")
    def test_parquet(self):
        texts = documents(90)
        path = parquet(self.path("a.parquet"), [None, ""] + texts, 10, n=range(92))
        data = self.build("o", [path], seed=None)
        self.assertEqual(bytes(i for i in all_tokens(self.path("o")) if i < 256).decode(), "".join(texts))
        self.assertEqual(data["counts"]["text"]["empty"], 2)
        whole = read(path)
        self.refused("not a whole parquet file", self.write("b.parquet", whole[:-20]))
        self.refused("not a whole parquet file", self.write("b.parquet", b"PAR1 nothing"))
        damaged = bytearray(whole)
        damaged[100:900] = b"\xff" * 800
        self.refused("damaged|not a whole", self.write("b.parquet", bytes(damaged)))
        reader = sources.Reader(column="body")
        self.refused("expected a column 'body', got text, n", path, reader=reader)
        reader = sources.Reader(column="n")
        self.refused("a.parquet: expected text in column 'n', got int64", path, reader=reader)

    @needs("pyarrow")
    def test_rows_of_parquet_are_bounded_before_they_are_read(self):
        import pyarrow
        long = "a " * 1000
        one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 50, pyarrow.int32()), pyarrow.array([long]))
        path = parquet(self.path("one.parquet"), one)
        with mock.patch.object(sources, "LINE_BYTES", 4000):
            self.assertEqual(self.texts_of("x.txt", "a"), ["a"])
            reader = sources.Reader()
            unit, = reader.units([path])
            self.assertLess(reader.batch_rows(reader.parquet(path), unit), 50)
            self.assertEqual([r["text"] for r in reader.records(unit, {})], [long.encode()] * 50)
        with mock.patch.object(sources, "LINE_BYTES", 1999):
            self.refused("one.parquet: row group 0: expected at most 0 MB in a row, got more", path)
            path = parquet(self.path("two.parquet"), [f"{i} {long}" for i in range(9)])
            self.refused("two.parquet: row group 0: expected at most 0 MB in a row, got 0 MB in 9", path)


class Server(http.server.ThreadingHTTPServer):
    """A hub of files, {path: bytes}. It answers everything with `status` if there is one; the first `drops` GETs of a
    file get half of what they requested."""

    def __init__(self, files):
        self.files, self.status, self.drops, self.requests = files, None, 0, []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self):
        """sends the headers; returns what follows them"""
        path = urllib.parse.unquote(self.path.split("?")[0])
        self.server.requests.append((self.command, path, self.headers.get("Authorization")))
        if self.server.status or path not in self.server.files:
            self.send_error(self.server.status or 404)
            return b""
        data, start = self.server.files[path], int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", hashlib.sha256(data).hexdigest())
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.close_connection = True
        return data[start:]

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        body, drop = self.answer(), self.server.drops > 0 and not self.path.startswith("/api/")
        self.server.drops -= drop
        self.wfile.write(body[:len(body) // 2] if drop else body)


@needs("huggingface_hub")
class Download(Case):
    LISTING = "/api/datasets/r/n/tree/main"

    def setUp(self):
        super().setUp()
        import download
        self.download = download
        self.content = random.Random(1).randbytes(3_000_000)
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.server = Server({"/f": self.content, "/datasets/r/n/resolve/main/a/f": self.content})
        self.listed("a/f")
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.start(mock.patch.dict(os.environ, {"HF_ENDPOINT": self.server.url, "HF_TOKEN": "secret", "NO_PROXY": "*"}))
        self.start(mock.patch("time.sleep", lambda _: None))        # between tries
        said = contextlib.redirect_stderr(io.StringIO())
        said.__enter__()
        self.addCleanup(said.__exit__, None, None, None)

    def listed(self, *names):
        entries = [{"type": "file", "path": name, "size": len(self.content), "oid": "1",
                    "lfs": {"oid": self.sha256, "size": len(self.content), "pointerSize": 1}} for name in names]
        entries.append({"type": "directory", "path": "a/x", "oid": "2"})
        self.server.files[self.LISTING] = json.dumps(entries).encode()

    def fetched(self):
        path, = self.download.hub_download("r/n", self.download.hub_files("r/n", ending="f"), self.path("cache"))
        return path

    def get(self, **more):
        return self.download.download(self.server.url + "/f", self.path("f"), **more)

    def test_a_file_of_the_hub(self):
        self.server.drops = 2                                       # it continues after each loss
        path = self.fetched()
        self.assertEqual((path, read(path)), (self.path("cache", "a", "f"), self.content))
        get = ("GET", "/datasets/r/n/resolve/main/a/f", "Bearer secret")
        self.assertEqual(self.server.requests.count(get), 3)
        self.fetched()
        self.assertEqual(self.server.requests.count(get), 3)        # a file that is there is not requested again
        self.write("cache/a/f", b"X" + self.content[1:])
        with self.assertRaisesRegex(common.BadInput, f"f: expected sha256 {self.sha256[:12]}... as in its source, got "
                                    "another; remove it"):
            self.fetched()
        self.write("cache/a/f", self.content[1:])
        with self.assertRaisesRegex(common.BadInput, "expected 3000000 bytes as in its source, got 2999999"):
            self.fetched()

    def test_a_small_file(self):
        self.server.drops = 1
        with self.assertRaisesRegex(common.Interrupted, "no connection, or it was lost"):
            self.get()
        self.assertEqual(os.listdir(self.folder), [])
        self.assertEqual(read(self.get(size=len(self.content), sha256=self.sha256)), self.content)
        count = len(self.server.requests)
        for more in ({"sha256": "0" * 64}, {"size": len(self.content) + 1}):
            with self.assertRaisesRegex(common.BadInput, "as in its source, got .*; remove it to download again"):
                self.get(**more)
        self.assertEqual(len(self.server.requests), count)          # a file that is there is not requested again

    def test_what_a_status_means(self):
        for status, error, words in ((404, common.BadInput, "--local"), (401, common.BadInput, "HF_TOKEN"),
                                     (403, common.BadInput, "HF_TOKEN"), (503, common.Interrupted, "answered 503")):
            self.server.status = status
            for get in (self.get, lambda: self.download.hub_files("r/n")):
                with self.assertRaisesRegex(error, words):
                    get()

    def test_no_network(self):
        self.server.shutdown()
        self.server.server_close()
        for get in self.get, self.fetched:
            self.assertRaises(common.Interrupted, get)

    def test_a_listing_writes_nothing_outside_the_cache(self):
        self.server.files.update({f"/datasets/r/n/resolve/main/{n}": self.content for n in ("../../xf", "/xf")})
        for name in "../../xf", "/xf", self.path("xf"), "a/../../xf", "a/\0f":
            self.listed(name)
            with self.assertRaises(common.BadInput, msg=name):
                self.fetched()
            self.assertEqual([f for _, _, files in os.walk(self.folder) for f in files if f.endswith("f")], [], name)

    def test_odd_listings(self):
        for listing in (b"{", b"5", b"null", b"[" * 100000, b"[5]", b"[null]", b"{}", b'[{"type": "file"}]', b"<html>",
                        b'[{"type": "file", "path": 5}]', b'[]'):
            self.server.files[self.LISTING] = listing
            with self.assertRaisesRegex(common.BadInput, "^[^\n]{1,300}$", msg=listing[:20]):
                self.download.hub_files("r/n")


class Pairs(Case):
    """text.py --pairs"""
    FILES = ("text_train_pairs.txt", "text_val_queries.txt", "text_val_corpus.txt", "text_val_qrels.tsv")

    def pairs(self, rule, *inputs, val=0, out="o", more=()):
        self.said = self.script("text", "--out", self.path(out), "--pairs", rule, "--val_pairs", str(val), *more,
                                *inputs)
        return [read(self.path(out, n)).decode().splitlines() for n in self.FILES[:4 if val else 1]]

    def test_the_three_rules(self):
        text = ("= A title =\n\nMr. Ba ran a\tlong way to town.\nThere he  sat, and ate, and slept, and was well.\n"
                "  \r\nToo short. No rest.\n\nOne without an end of a sentence but of very many words indeed")
        path = self.write("a.txt", text)
        rest = "There he sat, and ate, and slept, and was well."
        self.assertEqual(self.pairs("sentence", path, out="s"), [[f"Mr. Ba ran a long way to town.\t{rest}"]])
        self.assertIn("3 paragraphs too short", self.said)
        halves = [f"Mr. Ba ran a long way to town. There\t{rest[6:]}"]
        self.assertEqual(self.pairs("halves", path, out="h", more=("--no_shuffle",))[0], halves)
        whole = " ".join(text.split()[4:])
        self.assertEqual(self.pairs("title", path, out="t"), [[f"A title\t{whole}"]])

    def test_the_fewest_words(self):
        """four of a query, eight of a passage"""
        passage = "one two three four five six seven eight."
        path = self.write("a.txt", f"A query of four. {passage}\n\nOne of three. {passage[4:]}\n\nOf four words again. "
                                  f"{passage[4:]}\n\nOf three words. A query. {passage}")
        self.assertEqual(self.pairs("sentence", path, more=("--no_shuffle",)),
                         [[f"A query of four.\t{passage}", f"Of three words. A query.\t{passage}"]])

    def corpus(self, count=300):
        texts = (f"Here is the query number {i}. What follows is the passage of number {i}." for i in range(count))
        return self.write("c.txt", "\n\n".join(texts))

    def test_held_out_pairs_depend_on_the_seed_and_are_not_trained_on(self):
        path = self.corpus()
        by = ("--documents", "blank")
        train, queries, corpus, qrels = first = self.pairs("sentence", path, val=40, more=by)
        self.assertEqual((len(train), len(queries), len(corpus)), (260, 40, 40))
        self.assertEqual(qrels, [f"{i} 0 {i} 1" for i in range(40)])
        numbers = [re.findall("[0-9]+", q + c) for q, c in zip(queries, corpus)]
        self.assertTrue(all(a == b for a, b in numbers), "a query is beside its passage")
        self.assertEqual(len({n for n, _ in numbers} | {t.split(".")[0].split()[-1] for t in train}), 300)
        self.assertEqual(self.pairs("sentence", path, val=40, out="again", more=by), first)
        self.assertNotEqual(self.pairs("sentence", path, val=40, out="other", more=(*by, "--seed", "1"))[1], queries)
        self.assertIn("already complete", (self.pairs("sentence", path, val=40, more=by), self.said)[1])
        os.remove(self.path("o", "text_val_corpus.txt"))
        self.assertEqual(self.pairs("sentence", path, val=40, more=by), first)
        self.assertIn("4 files checked, 0 findings", self.script("verify", self.path("o")))
        said = self.script("text", "--out", self.path("o"), "--pairs", "halves", path, code=2)
        self.assertIn("holds shards made with documents", said)

    def test_a_text_that_is_held_out_is_nowhere_else(self):
        lines = [f"The same query again and again. And then a passage that is number {i} of many." for i in range(9)]
        text = "\n".join([*lines, "Another query, with words enough. And a passage of its own, which is long enough."])
        train, queries, *_ = self.pairs("sentence", self.write("r.txt", text), val=1,
                                        more=("--documents", "line", "--no_shuffle"))
        self.assertEqual((len(train), queries), (1, ["The same query again and again."]))
        self.assertIn("8 pairs skipped", self.said)

    def test_a_paragraph_without_an_end_is_bounded(self):
        import text
        piece = collections.namedtuple("Piece", "text first last")
        pieces = [piece(b"0123456789", True, False), *(piece(b"abc", False, False) for _ in range(9)),
                  piece(b"xyz", False, True), piece(b"next", True, True)]
        with mock.patch.object(text, "MOST_PARAGRAPH", 12):
            for whole in (False, True):
                self.assertEqual(list(text.paragraphs(pieces, whole)), [b"0123456789abxyz", b"next"])

    def test_odd_text(self):
        words = "w" * 100 + " "
        path = self.write("a.txt", ("A query of some words. " + words * 3000).encode() + b"\n\nBad \xff byte in it. " +
                         b"And enough of other words to make a pair of it.\n")
        train, = self.pairs("sentence", path)
        self.assertEqual([len(t) for t in train], [len("A query of some words.\t") + 65536 // 101 * 101 - 1, 65])
        self.assertIn("\ufffd", train[1])
        self.assertIn("1 texts with bad UTF-8", self.said)
        zipped = self.write("b.jsonl.gz", gzip.compress(jsonl(["A query of some words. " + "and more " * 9]).encode()))
        self.assertEqual(self.pairs("sentence", zipped, out="z")[0],
                         ["A query of some words.\t" + ("and more " * 9)[:-1]])
        few = self.write("s.txt", "few words")
        said = self.script("text", "--out", self.path("n"), "--pairs", "halves", few, code=2)
        self.assertIn("0 pairs; --val_pairs 1000 leaves none to train on", said)
        self.assertEqual(os.listdir(self.path("n")), [])
        own = self.write("own/text_train_pairs.txt", "my own")
        said = self.script("text", "--out", self.path("own"), "--pairs", "halves", few, code=2)
        self.assertIn("text_train_pairs.txt: is there already", said)
        self.assertEqual(read(own), b"my own")

    @needs("pytrec_eval", "xxhash")
    @unittest.skipUnless(HAS_BERT, "train_bert is not built")
    def test_the_trainer_reads_them(self):
        self.pairs("sentence", self.corpus(), val=40, more=("--documents", "blank"))
        pairs, queries, corpus, qrels = (self.path("o", name) for name in self.FILES)
        code, said = ended(BERT_TRAINER, "--model", "1,1,16", "--T", "32", "--B", "8", "--total_batch", "256",
                           "--steps", "2", "--pairs", pairs, "--checkpoint_every", "2", "--out", self.path("run"))
        self.assertEqual(code, 0, said)
        code, said = ended(sys.executable, os.path.join(ROOT, "scripts", "retrieve.py"), "--load", self.path("run"),
                           "--queries", queries, "--corpus", corpus, "--qrels", qrels, "--eval_lengths", "32",
                           "--trainer", BERT_TRAINER)
        self.assertEqual(code, 0, said)
        self.assertIn("| 32 | 40 | 40 | ", said)


VOCABULARIES = ("encoder.json", "vocab.bpe", "vocab.txt")


def golden(name):
    with open(real(name), encoding="utf-8") as f:
        return [json.loads(line) for line in f]


@needs("tiktoken", "tokenizers")
@needs_real(*VOCABULARIES)
class Tokens(Case):
    def test_golden_strings(self):
        for name, file, count in (("gpt2", "golden_gpt2_bpe.jsonl", 456), ("bert", "golden_bert_wordpiece.jsonl", 454)):
            cases = golden(file)
            self.assertEqual(len(cases), count)
            made = encoding.make_encoding(name, REAL)
            for case, ids in zip(cases, made.encode([c["text"] for c in cases])):
                self.assertEqual(list(ids), case["ids"], case["text"])

    def test_whole_files_in_pieces_by_two_processes(self):
        corpus = {c["file"]: c for c in json.loads(read(real("golden_corpus.json")))}
        files = ("input.txt", "hellaswag_val_500.jsonl", "wikitext-2/test.txt", "wikitext-2/valid.txt")
        texts = {file: read(real(file)) for file in files}
        texts["wikitext-2/train.txt"] = lzma.decompress(read(real("wikitext-2/train.txt.xz")))
        for name, key in (("gpt2", "gpt2"), ("bert", "bert_uncased")):
            with mock.patch.object(sources, "PIECE_BYTES", 5000), encoding.Encoder(name, REAL, 2) as encoder:
                for file, text in texts.items():
                    pieces = list(sources.pieces_of(text, sources.new_counts()))
                    self.assertGreater(len(pieces), 30)
                    ids = np.concatenate(list(encoder.arrays([(p.text, False, False) for p in pieces])))
                    digest = hashlib.sha256(ids.tobytes()).hexdigest()
                    self.assertEqual(len(ids), corpus[file][key + "_tokens"], file)
                    self.assertEqual(digest, corpus[file][key + "_ids_u16le_sha256"], file)

    def test_pieces_give_the_ids_of_the_whole(self):
        r = random.Random(4)
        marks = ["a", "B", "'s", "'", "1", " ", "  ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "\u0301", "\u4e2d",
                 "\U0001f600", ".", "-", "<", "\u2028", "word", "[CLS]", "<|endoftext|>", "\r\n", "\x85"]
        encodings = [encoding.make_encoding(n, REAL) for n in ("gpt2", "bert")]
        with mock.patch.object(sources, "PIECE_BYTES", 7):
            for _ in range(300):
                text = "".join(r.choice(marks) for _ in range(r.randrange(1, 80)))
                pieces = [p.text.decode() for p in sources.pieces_of(text.encode(), sources.new_counts())]
                self.assertEqual("".join(pieces), text if text.strip(" \n\t\r") else "")
                for e in encodings if pieces else ():
                    self.assertEqual(list(np.concatenate(e.encode(pieces))), list(e.encode([text])[0]), repr(text))

    def test_long_runs_take_linear_time(self):
        e = encoding.make_encoding("gpt2", REAL)
        for text in (" " * 200000, "a" * 200000, "\n " * 100000, "\u4e2d" * 50000):
            self.assertEqual(e.encoding.decode(e.encode([text])[0].tolist()), text)

    def test_unknown_vocabularies(self):
        table = json.loads(read(real("encoder.json")))
        merges = read(real("vocab.bpe")).decode()

        def gpt2(words, vocabulary, bpe):
            self.write("v/encoder.json", vocabulary if isinstance(vocabulary, (bytes, str)) else json.dumps(vocabulary))
            self.write("v/vocab.bpe", bpe)
            with self.assertRaisesRegex(common.BadInput, words):
                encoding.make_encoding("gpt2", self.path("v"))
        gpt2("unknown vocabulary", {k: v for k, v in table.items() if v != 77}, merges)
        gpt2("expected a JSON object", b"{", merges)
        gpt2("other merges", table, merges.replace("h e\n", "e h\n", 1))
        gpt2("other merges", table, merges[:merges.rindex("\n", 0, -1)])
        swapped = {**table, "!": table['"'], '"': table["!"]}
        gpt2("unknown vocabulary", swapped, merges)
        gpt2("unknown vocabulary", {("\u4e2d" if k == "!" else k): v for k, v in table.items()}, merges)
        self.write("b/vocab.txt", read(real("vocab.txt")).replace(b"[unused7]", b"[altered]"))
        with self.assertRaisesRegex(common.BadInput, "unknown vocabulary"):
            encoding.make_encoding("bert", self.path("b"))
        os.makedirs(self.path("none"))
        for name in ("gpt2", "bert"):
            with self.assertRaisesRegex(common.BadInput, "there"):
                encoding.make_encoding(name, self.path("none"))


@needs("tokenizers")
class TokenizerJson(Case):
    """shards of the tokenizer.json that the tokenizers library trains and saves"""

    TEXT = "The cable's sum S of the cable, and 12 more: caf\u00e9 <|endoftext|> the\n\n  end. "

    def setUp(self):
        super().setUp()
        import tokenizers
        self.own = tokenizers.Tokenizer(tokenizers.models.BPE())
        self.own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<pad>", "<|endoftext|>"], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        self.own.train_from_iterator([self.TEXT] * 9, trainer)
        os.makedirs(self.path("t"))
        self.own.save(self.path("t/tokenizer.json"))

    def test_shards_are_as_the_trainer_reads_them(self):
        text = self.TEXT * 40
        self.script("text", "--tokenizer", self.path("t"), "--out", self.path("o"), self.write("a.txt", text))
        shard = self.path("o/text_train_000000.bin")
        header, ids = np.fromfile(shard, "<i4", 256), np.fromfile(shard, "<u2", offset=1024)
        end = self.own.token_to_id("<|endoftext|>")
        self.assertEqual((header[3], header[4], ids[0]), (self.own.get_vocab_size(), end, end))
        self.assertNotIn(end, ids[1:])                  # in a text it is plain text
        self.assertIn("caf", self.script("verify", "--tokenizer", self.path("t"), "--sample", "40", shard))
        if not HAS_TRAINER:
            self.skipTest("SKIPPED: train_gpt2 is not built")
        flags = ["--tokenizer", self.path("t"), "--threads", "1"]
        code, said = ended(TRAINER, "--train_files", shard, "--model", "1,1,16", "--T", "32", "--B", "2", "--steps",
                           "1", "--val_every", "0", "--sample_every", "0", "--out", self.path("run"),
                           "--checkpoint_every", "1", *flags)
        self.assertEqual(code, 0, said)
        made = encoding.make_encoding("bpe", self.path("t"))
        ours = made.encode([self.TEXT])[0]
        self.assertEqual(list(ids[1:1 + len(ours) - 1]), list(ours[:-1]))
        code, said = ended(TRAINER, "--load", self.path("run"), "--dump_bias", "0,0," + " ".join(map(str, ours)),
                           "--out", self.path("bias"), *flags)
        self.assertEqual(code, 0, said)
        shown = json.loads(self.read("bias/bias_0_0.json"))["tokens"]
        self.assertEqual([s for s in shown if "\ufffd" not in s],
                         [s for s in map(made.decode, [[i] for i in ours]) if "\ufffd" not in s])
        self.assertEqual(len(shown), len(ours))

    def test_what_the_trainer_would_read_otherwise_is_refused(self):
        table = json.loads(self.read("t/tokenizer.json"))
        added = [{**token, "special": False} for token in table["added_tokens"]]
        for change in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "Whitespace"}},
                       {"pre_tokenizer": {**table["pre_tokenizer"], "add_prefix_space": True}}, {"pre_tokenizer": None},
                       {"model": {"type": "Unigram"}}, {"model": {**table["model"], "dropout": 0.1}},
                       {"model": {**table["model"], "ignore_merges": True}}, {"added_tokens": added}):
            self.write("bad/tokenizer.json", json.dumps({**table, **change}))
            said = self.script("text", "--tokenizer", self.path("bad"), "--out", self.path("o"),
                               self.write("a.txt", self.TEXT), code=2)
            self.assertIn("bad/tokenizer.json: expected a byte-level BPE", said)

    def test_gpt2_as_one_file(self):
        """the tokenizer.json that vocabulary.py writes, here of a few merges, splits as the library does"""
        model = json.loads(self.read("t/tokenizer.json"))["model"]
        merges = (m if isinstance(m, str) else " ".join(m) for m in model["merges"])
        self.write("two/merges.txt", "#version: 0.2\n" + "".join(m + "\n" for m in merges))
        self.write("two/vocab.json", json.dumps({**model["vocab"], "<|endoftext|>": encoding.EOT}))
        made = encoding.tokenizer_of(*encoding.one_file(self.path("two")), False)
        text = self.TEXT.replace("<|endoftext|>", "|")
        self.assertEqual(made.encode(text).ids, self.own.encode(text).ids)
        self.assertEqual(made.encode("<|endoftext|>").ids, [encoding.EOT])
        self.assertEqual(made.decode(made.encode(text).ids), text)


@needs("tokenizers")
class WordPieceJson(Case):
    """shards of a WordPiece tokenizer.json of one's own"""

    TEXT = "The Cable's sum of the cable, and 12 more: caf\u00e9 [SEP] the [MASK]\n\n  end. "

    def setUp(self):
        super().setUp()
        import tokenizers
        self.own = {}
        for name, lower in (("cased", False), ("uncased", True)):
            own = self.own[name] = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
            own.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
            own.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
            special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
            trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
            own.train_from_iterator([self.TEXT, "Here is the query number 0123456789. What follows passage of"] * 9,
                                    trainer)
            own.enable_truncation(4)                # which must cut no document
            own.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
            os.makedirs(self.path(name))
            own.save(self.path(name, "tokenizer.json"))
            own.no_truncation()
            own.encode_special_tokens = True

    def ids_of(self, name, text):
        """what the library makes of a document"""
        return [2, *self.own[name].encode(text, add_special_tokens=False).ids, 3]

    def make(self, name, out, *args, **more):
        return self.script("text", "--encoding", "bert", "--tokenizer", self.path(name), "--out", self.path(out),
                           "--workers", "1", "--no_shuffle", *args, **more)

    def test_documents(self):
        text = self.TEXT * 40
        for name in self.own:
            self.make(name, name + "/o", self.write("a.txt", text))
            shard = self.path(name, "o/text_train_000000.bin")
            self.assertEqual(header(shard)[3:5], (self.own[name].get_vocab_size(), 3))
            self.assertEqual(list(tokens(shard)), self.ids_of(name, text))
            self.assertEqual(list(tokens(shard)).count(3), 1)       # "[SEP]" in a text is plain text
            self.assertIn("[CLS]", self.script("verify", "--tokenizer", self.path(name), shard))
        self.assertNotEqual(self.ids_of("cased", text), self.ids_of("uncased", text))

    def corpus(self, count=60):
        texts = (f"Here is the Query number {i}. What follows is the passage of number {i}." for i in range(count))
        return self.write("c.txt", "\n\n".join(texts))

    def test_pairs_are_those_of_the_text(self):
        flags = ("--pairs", "sentence", "--documents", "blank", "--val_pairs", "9", self.corpus())
        self.make("cased", "o", *flags)
        self.script("text", "--out", self.path("plain"), "--no_shuffle", *flags)
        self.assertEqual(contents(self.path("o/text")), contents(self.path("plain")))
        for shard, text, group in (("pairs_000000", "train_pairs", 2), ("val_queries", "val_queries", 1),
                                   ("val_corpus", "val_corpus", 1)):
            documents = re.split("[\t\n]", self.read(f"plain/text_{text}.txt"))[:-1]
            path = self.path("o", f"text_{shard}.bin")
            self.assertEqual(list(tokens(path)), [i for d in documents for i in self.ids_of("cased", d)])
            self.assertEqual(header(path)[3:7], (self.own["cased"].get_vocab_size(), 3, group, len(documents)))
        self.assertEqual(self.read("o/text_val_corpus.ids").split(), [str(i) for i in range(9)])
        self.assertEqual(self.read("o/text_val_qrels.tsv"), self.read("plain/text_val_qrels.tsv"))
        self.assertIn("already complete", self.make("cased", "o", *flags))
        self.make("cased", "short", *flags, "--max_tokens", "5")
        self.assertEqual([len(d) for d, _ in zip(np.split(tokens(self.path("short/text_pairs_000000.bin")), 102),
                                                 range(3))], [5, 5, 5])
        self.assertIn("0 findings", self.script("verify", self.path("o")))

    def test_lines(self):
        pairs = self.write("a.txt", "The sum\tof the Cable\n\nthe end\tcaf\u00e9\r\n")
        self.make("cased", "two", "--pairs", "lines", pairs)
        documents = ("The sum", "of the Cable", "the end", "caf\u00e9")
        shard = self.path("two/text_lines_000000.bin")
        self.assertEqual(list(tokens(shard)), [i for d in documents for i in self.ids_of("cased", d)])
        self.assertEqual(header(shard)[5:7], (2, 4))
        self.make("cased", "zero", "--pairs", "lines", self.write("z.jsonl", jsonl(["The\0sum\tthe\0end"])))
        self.assertEqual(list(tokens(self.path("zero/text_lines_000000.bin"))),
                         self.ids_of("cased", "The sum") + self.ids_of("cased", "the end"))
        self.make("cased", "one", "--pairs", "lines", self.write("b.txt", "The sum\n\nof"), self.write("c.txt", "end"))
        self.assertEqual((self.read("one/text_lines_000000.ids"), header(self.path("one/text_lines_000000.bin"))[5:7]),
                         ("0\n2\n3\n", (1, 3)))
        for text, said in (("a\tb\n\nc\n", "line 3: expected 2 texts separated by tabs, as in .*got 1"),
                           ("a\tb\nc\t \n", "line 2: .*got 1"), ("a\tb\tc\td\n", "at most 3 texts"),
                           ("\n", "no documents")):
            self.assertRegex(self.make("cased", "bad", "--pairs", "lines", self.write("d.txt", text), code=2), said)
        self.assertIn("give --encoding bert", self.script("text", "--pairs", "lines", pairs, code=2))

    @needs("pytrec_eval", "xxhash")
    @unittest.skipUnless(HAS_BERT, "train_bert is not built")
    def test_the_trainer_reads_them(self):
        self.make("cased", "o", "--pairs", "sentence", "--documents", "blank", "--val_pairs", "9", self.corpus())
        flags = ("--model", "1,1,16", "--T", "32", "--B", "8", "--total_batch", "256", "--steps", "2", "--threads", "1")
        code, said = ended(BERT_TRAINER, *flags, "--tokenizer", self.path("cased"), "--checkpoint_every", "2",
                           "--pairs", self.path("o/text_pairs_*.bin"), "--out", self.path("run"))
        self.assertEqual(code, 0, said)
        code, said = ended(BERT_TRAINER, "--load", self.path("run"), "--encode", self.path("o/text_val_queries.bin"),
                           "--out", self.path("e"), "--threads", "1")
        self.assertEqual(code, 0, said)
        self.assertEqual(self.read("e/embeddings.ids").split(), [str(i) for i in range(9)])
        code, said = ended(sys.executable, os.path.join(ROOT, "scripts", "retrieve.py"), "--load", self.path("run"),
                           "--queries", self.path("o/text/text_val_queries.txt"), "--corpus",
                           self.path("o/text_val_corpus.bin"), "--qrels", self.path("o/text_val_qrels.tsv"),
                           "--trainer", BERT_TRAINER + " --threads 1")
        self.assertEqual(code, 0, said)
        self.assertIn("| 512 | 9 | 9 | ", said)

    def test_what_is_refused(self):
        table = json.loads(self.read("cased/tokenizer.json"))
        vocab = {token: i for token, i in table["model"]["vocab"].items() if i}
        odd = {**table, "model": {**table["model"], "vocab": vocab}, "added_tokens": []}
        merges = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}      # of no token
        for change, words in (({"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, "splits a text"),
                              ({"pre_tokenizer": None}, "splits a text"), (odd, "with 89 tokens"),
                              ({"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}, "got WordLevel"),
                              ({"model": merges}, "cannot read it"), ({"model": 3}, "cannot read it")):
            self.write("bad/tokenizer.json", json.dumps({**table, **change}))
            said = self.make("bad", "o", self.write("a.txt", self.TEXT), code=2)
            self.assertRegex(said, "^text.py: .*bad/tokenizer.json: expected .*" + words)
            self.assertNotIn("panicked", said)
        self.assertIn("--encoding bert", self.script("text", "--tokenizer", self.path("cased"), self.path("a.txt"),
                                                     "--out", self.path("o"), code=2))


@needs("tiktoken", "tokenizers")
@needs_real(*VOCABULARIES)
class Scripts(Case):
    """each data set's script, from --local to the files it writes"""

    def test_tiny_shakespeare_equals_that_of_llm_c(self):
        self.script("tinyshakespeare", "--local", REAL, "--out", self.path("o"))
        for split in ("train", "val"):
            name = f"tiny_shakespeare_{split}.bin"
            self.assertEqual(read(self.path("o", name)), read(real(name)))
        self.assertIn("2 files checked, 0 findings", self.script("verify", self.path("o"), "--tokenizer", REAL))
        self.write("bad/input.txt", "Other text.\n\n" * 20000)
        self.assertIn("not the usual", self.prepare("tinyshakespeare", "p", "--local", self.path("bad")))

    @needs_real("wikitext-2/train.txt.xz")
    def test_wikitext(self):
        said = self.script("wikitext", "--size", "2", "--local", REAL, "--out", self.path("o"),
                           "--shard_tokens", "1000000")
        for split, count in (("train", "2,448,382"), ("val", "258,659"), ("test", "295,877")):
            self.assertIn(f"{split}: {count} tokens without <|endoftext|>, as expected", said)
        corpus = {c["file"]: c for c in json.loads(read(real("golden_corpus.json")))}
        for split, file in (("train", "train"), ("val", "valid"), ("test", "test")):
            ids = all_tokens(self.path("o"), f"wikitext2_{split}_*.bin")
            digest = hashlib.sha256(ids[1:].tobytes()).hexdigest()
            self.assertEqual(ids[0], 50256)
            self.assertEqual(digest, corpus[f"wikitext-2/{file}.txt"]["gpt2_ids_u16le_sha256"])
        self.assertEqual(len(glob.glob(self.path("o", "wikitext2_train_*.bin"))), 3)
        for join, count in (("rows", "292,943"), ("rows_apart", "297,300")):
            said = self.prepare("wikitext", join, "--size", "2", "--local", REAL, "--join", join)
            self.assertIn(f"test: {count} tokens without <|endoftext|>, as expected", said)

    @needs("pyarrow")
    @needs_real("wikitext-2/train.txt.xz")
    def test_wikitext_from_parquet_equals_the_files(self):
        os.makedirs(self.path("hub"))
        for split, file in (("validation", "valid"), ("test", "test")):
            lines = read(real(f"wikitext-2/{file}.txt")).decode().split("\n")[:-1]
            rows = [line + "\n" if line.strip() else "" for line in lines]
            half = len(rows) // 2
            for i, part in enumerate((rows[:half], rows[half:])):
                parquet(self.path("hub", f"{split}-0000{i}-of-00002.parquet"), part, 1000)
        self.write("hub/train.txt", read(real("wikitext-2/valid.txt")))
        said = self.prepare("wikitext", "o", "--size", "2", "--local", self.path("hub"))
        self.assertIn("test: 295,877 tokens without <|endoftext|>, as expected", said)
        self.assertIn("train: 258,659 tokens without <|endoftext|>; expected 2,448,382: is this another text?", said)

    @needs_real("wikitext-2/wiki.test.raw")
    def test_wikitext_raw_counts(self):
        for name in ("train", "valid", "test"):
            self.write(f"wikitext-2-raw/wiki.{name}.raw", read(real("wikitext-2/wiki.test.raw")))
        for join, count in (("file", "286,221"), ("rows", "283,287"), ("rows_apart", "287,644")):
            said = self.prepare("wikitext", join, "--size", "2", "--raw", "--join", join,
                                "--local", self.path("wikitext-2-raw"))
            self.assertIn(f"test: {count} tokens without <|endoftext|>, as expected", said)

    def test_wikitext_refuses(self):
        title, cut = " = A = \n", gzip.compress(b" = A = \n" * 9)[:-4]
        splits = ("train", "valid", "test")
        cases = (("no word-level train split", {"valid.txt": title, "test.txt": title}),
                 ("expected a title", {f"{s}.txt": "Some other text\n" for s in splits}),
                 ("expected one file for the train split", {f"{d}/{s}.txt": title for d in "ab" for s in splits}),
                 ("damaged or cut short", {f"{s}.txt.gz": cut for s in splits}))
        for i, (words, files) in enumerate(cases):
            for file, text in files.items():
                self.write(f"case{i}/{file}", text)
            said = self.prepare("wikitext", f"out{i}", "--local", self.path(f"case{i}"), code=2)
            self.assertIn(words, said)
            self.nothing_but_whole_shards(f"out{i}")

    @needs_real("hellaswag_val_500.jsonl")
    def test_hellaswag_equals_that_of_llm_c(self):
        self.prepare("hellaswag", "o", "--local", real("hellaswag_val_500.jsonl"))
        self.assertEqual(read(self.path("o", "hellaswag_val.bin")), read(real("hellaswag_val_500.bin")))
        self.assertIn("500 examples", self.script("verify", self.path("o")))
        lines = read(real("hellaswag_val_raw_sample.jsonl")).split(b"\n")[:-1]
        first = json.loads(lines[0])
        broken = [b"no json"] + [json.dumps({**first, **c}).encode() for c in (
            {"label": 4}, {"label": ""}, {"label": 2.7}, {"label": True}, {"endings": ["a"]}, {"ctx": 5},
            {"endings": [1, 2, 3, 4]}, {"ctx": ""})]
        self.write("r/hellaswag_val.jsonl", b"\n".join(lines + broken))
        said = self.prepare("hellaswag", "p", "--local", self.path("r"))
        self.assertIn("9 records without text skipped", said)
        self.assertIn(" 100 examples (the validation split has 10,042)", said)
        self.write("e/hellaswag_val.jsonl", b"\n".join(broken))
        self.assertIn("no example", self.prepare("hellaswag", "q", "--local", self.path("e"), code=2))
        self.nothing_but_whole_shards("q")

    def test_vocabulary(self):
        names = ("encoder.json", "vocab.bpe")
        same = lambda out: all(read(self.path(out, n)) == read(real(n)) for n in names)
        self.script("vocabulary", "--local", REAL, "--out", self.path("a"))
        self.assertTrue(same("a"))
        tokenizer = encoding.tokenizer_of(self.read("a/tokenizer.json"), "a", False)
        for case in golden("golden_gpt2_bpe.jsonl"):
            if case["text"] != "<|endoftext|>":         # which a tokenizer.json finds
                self.assertEqual(tokenizer.encode(case["text"]).ids, case["ids"], case["text"])
        self.assertEqual(encoding.encoding_of("gpt2", self.path("a")), "gpt2")
        for name, hubs in zip(names, ("vocab.json", "merges.txt")):         # as a model's repository names them
            self.write(f"hub/{hubs}", read(real(name)))
        self.script("vocabulary", "--local", self.path("hub"), "--out", self.path("b"))
        self.assertTrue(same("b"))
        self.script("vocabulary", "--local", self.path("hub"), "--out", self.path("b"))         # again
        self.write("own/vocab.bpe", "my own")
        said = self.script("vocabulary", "--local", self.path("hub"), "--out", self.path("own"), code=2)
        self.assertIn("own/vocab.bpe: is there already, with other contents", said)
        self.assertEqual(read(self.path("own/vocab.bpe")), b"my own")
        self.write("hub/merges.txt", read(real("vocab.bpe"))[:-9])
        said = self.script("vocabulary", "--local", self.path("hub"), "--out", self.path("d"), code=2)
        self.assertIn("an unknown vocabulary", said)
        self.assertEqual([n for n in names if os.path.exists(self.path("d", n))], [])
        self.assertIn("expected encoder.json and vocab.bpe, or",
                      self.script("vocabulary", "--local", self.folder, "--out", self.path("e"), code=2))

    def test_text(self):
        path = self.write("a.txt", "one two\n\nthree")
        self.assertIn("no validation shard: for one, give --val_tokens", self.prepare("text", "f", path))
        self.assertNotIn("no validation shard", self.prepare("text", "v", "--val_tokens", "2", path))
        long = self.write("long.txt", "one two three four " * 6000)
        self.assertNotIn("no validation shard", self.prepare("text", "both", long))
        shards = sorted(glob.glob(self.path("both", "*.bin")))
        self.assertEqual([(os.path.basename(s), header(s)[2]) for s in shards], [
            ("text_train_000001.bin", 24002 - 2478), ("text_val_000000.bin", 2478)])
        self.prepare("text", "train", "--val_tokens", "0", long)
        self.assertIn("already complete", self.prepare("text", "train", long))      # as an earlier version left it
        self.prepare("text", "h", "--text", self.write("a.html", "one two\n\nthree"))
        self.assertEqual(all_tokens(self.path("h")).tolist(), all_tokens(self.path("f")).tolist())
        for args in ((), ("-",), (self.path("a.html"),), ("--shard_tokens", "0", path), ("--no_such", path),
                     ("--shard_tokens", "2147483648", path)):
            self.prepare("text", "x", *args, code=2)

    def test_hellaswag_leaves_the_manifest_of_another_data_set(self):
        self.prepare("text", "o", self.write("a.txt", "one two"))
        before = contents(self.path("o"))
        source = self.write("h/hellaswag_val.jsonl", json.dumps({"ctx": "a", "label": 1, "endings": list("abcd")}))
        said = self.prepare("hellaswag", "o", "--local", source, code=2)
        self.assertIn("give another --out or remove the directory", said)
        self.assertEqual(contents(self.path("o")), before)
        self.assertIn("1 files checked, 0 findings", self.script("verify", self.path("o")))
        for _ in range(2):
            self.prepare("hellaswag", "own", "--local", source)         # its own directory may be written again

    def test_names_beyond_ascii_in_the_c_locale(self):
        for name in (b"caf\xc3\xa9.txt", b"caf\xe9.txt", b"\xe4\xb8\xad.txt"):
            with self.subTest(name=name):
                path = os.fsencode(self.path()) + b"/" + name
                self.write(os.fsdecode(path), b"one two three")
                shards = []
                ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
                for i, env in enumerate((ascii_only, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"})):
                    out = f"o{name.hex()}{i}"
                    self.prepare("text", out, "--workers", "1", os.fsdecode(path), env=env)
                    shards.append(contents(self.path(out)))
                self.script("verify", "--tokenizer", REAL, self.path(out), env=ascii_only)
                self.assertTrue(all(s == shards[0] for s in shards))
                missing = self.prepare("text", "none", os.fsdecode(path) + "x", code=2, env=ascii_only)
                self.assertIn("no such file", missing)

    @needs("pyarrow")
    def test_fineweb_and_a_bert_shard(self):
        texts = read(real("input.txt")).decode().split("\n\n")[:500]
        os.makedirs(self.path("in"))
        for i in range(2):
            parquet(self.path("in", f"00{i}_00000.parquet"), texts[i * 250:i * 250 + 250], 50)
        for name, stem, more in (("edu", "edu_fineweb", ()), ("classic", "fineweb", ("--dataset", "classic"))):
            self.prepare("fineweb_edu", name, "--local", self.path("in"), "--shard_tokens", "5000",
                         "--val_tokens", "1000", "--workers", "2", *more)
            self.assertLess({stem + "_val_000000.bin", stem + "_train_000001.bin"}, set(os.listdir(self.path(name))))
        self.assertEqual(int((all_tokens(self.path("edu")) == 50256).sum()), 500)
        # a billion tokens are the first ten shards of the same order
        small = ("--local", self.path("in"), "--shard_tokens", "500", "--val_tokens", "300", "--no_shuffle")
        for name, more in (("all", ()), ("1B", ("--sample", "1BT"))):
            self.prepare("fineweb_edu", name, *small, *more)
        ten = sorted(os.path.basename(p) for p in glob.glob(self.path("1B", "*.bin")))
        self.assertEqual((len(ten), ten[-1]), (10, "edu_fineweb_val_000000.bin"))
        for name in ten:
            self.assertEqual(read(self.path("1B", name)), read(self.path("all", name)))
        self.assertIn("already complete", self.prepare("fineweb_edu", "1B", *small, "--sample", "1BT"))
        self.prepare("fineweb_edu", "b", "--local", self.path("in"), "--val_tokens", "1000", "--encoding", "bert")
        head = header(self.path("b", "edu_fineweb_val_000000.bin"))
        self.assertEqual(head[:7], (20240520, 1, 1000, 30522, 102, 0, 0))
        ids = np.concatenate([tokens(self.path("b", f"edu_fineweb_{s}.bin")) for s in ("val_000000", "train_000001")])
        self.assertEqual((int((ids == 101).sum()), int((ids == 102).sum()), ids[0], ids[-1]), (500, 500, 101, 102))
        self.assertIn("[CLS]", self.script("verify", "--tokenizer", REAL, self.path("b")))

    def test_a_document_has_room_for_a_token(self):
        for name in "mldr", "msmarco":
            self.assertIn("--max_tokens: expected at least 3, got 2", self.script(name, "--max_tokens", "2", code=2))

    def mldr(self, name, corpus, queries):
        self.write(f"{name}/corpus.jsonl.gz", gzip.compress(json_lines(corpus).encode()))
        for split in ("test", "dev"):
            self.write(f"{name}/{split}.jsonl", json_lines(queries))
        return self.path(name)

    def test_mldr(self):
        corpus = [{"docid": f"doc-{i}", "text": f"document {i} " * (2 * i + 1)} for i in range(40)]
        queries = [{"query_id": f"q-{i}", "query": f"which is {i}",
                    "positive_passages": [{"docid": f"doc-{i * 3}"}]} for i in range(10)]
        flags = ("--local", self.mldr("in", corpus, queries), "--shard_tokens", "600", "--max_tokens", "100")
        said = self.prepare("mldr", "o", *flags)
        self.assertIn("every judged document is among the 40", said)
        shards = group_shards(self.path("o"), "mldr_corpus_*.bin")
        self.assertGreater(len(shards), 1)
        names = []
        for i, (docs, head) in enumerate(shards):
            ids = read(self.path("o", f"mldr_corpus_{i:06d}.ids")).decode().split()
            self.assertEqual((head[5], head[6], len(ids)), (1, len(docs), len(docs)))
            names += ids
        self.assertEqual(names, [r["docid"] for r in corpus])
        self.assertEqual(max(len(d) for docs, _ in shards for d in docs), 100)
        e = encoding.make_encoding("bert", REAL)
        every = [d for docs, _ in shards for d in docs]
        for r, d in zip(corpus, every):
            self.assertEqual(d[1:-1], list(e.encode([r["text"]])[0][:98]))
        os.remove(self.path("o", "mldr_test_qrels.tsv"))
        self.prepare("mldr", "o", *flags)                           # writes it again
        self.assertEqual(read(self.path("o", "mldr_test_qrels.tsv")).decode().split("\n")[1], "q-1 0 doc-3 1")
        self.assertEqual(read(self.path("o", "mldr_test_queries.ids")).decode().split(), [f"q-{i}" for i in range(10)])
        self.assertIn("0 findings", self.script("verify", self.path("o")))
        text = read(self.path("o", "mldr_corpus_000000.ids"))
        self.write("o/mldr_corpus_000000.ids", text.replace(b"doc-0", b"doc-9"))
        self.assertIn("checksum", self.script("verify", self.path("o"), code=2))
        said = self.prepare("mldr", "lost", "--local", self.mldr("cut", corpus[:20], queries), code=2)
        self.assertIn("are not in the corpus", said)
        # a document of 100 tokens may be all of a shard
        self.prepare("mldr", "tight", *flags[:3], "100", *flags[4:])
        said = self.prepare("mldr", "narrow", *flags[:3], "99", *flags[4:], code=2)
        self.assertIn("a group of 100 tokens does not fit in a shard of 99", said)

    @unittest.skipUnless(HAS_TRAINER, "train_gpt2 is not built")
    def test_the_trainer_reads_them(self):
        self.script("tinyshakespeare", "--local", REAL, "--out", self.path("o"))
        self.script("text", "--tokenizer", REAL, "--out", self.path("b"), "--encoding", "bert", "--val_tokens", "0",
                    real("input.txt"))
        for files in ((self.path("o", "tiny_shakespeare_train.bin"), self.path("o", "tiny_shakespeare_val.bin")),
                      (self.path("b", "text_train_000000.bin"),) * 2):
            code, said = ended(TRAINER, "--check", "--train_files", files[0], "--val_files", files[1], "--model",
                               "1,1,16", "--T", "64")
            self.assertEqual(code, 0, said)

    @unittest.skipUnless(HAS_TRAINER, "train_gpt2 is not built")
    def test_sampling_after_training_on_shards_as_the_readme_has_it(self):
        readme = read(os.path.join(ROOT, "README.md")).decode()
        vocabulary = re.search(r"`data/(vocabulary).py --out (\S+)`", readme)
        sample = re.search(r"`(scripts/text.py) (generate \S+ \"[^\"]+\" --tokenizer \S+)`", readme)
        self.script("tinyshakespeare", "--local", REAL, "--out", self.path("data"))
        self.script(vocabulary[1], "--local", REAL, "--out", self.path(vocabulary[2]))

        def said(*command):
            r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, errors="replace")
            self.assertEqual(r.returncode, 0, r.stderr)
            return r.stdout
        said(TRAINER, "--train_files", "data/tiny_shakespeare_train.bin", "--val_every", "0", "--sample_every", "0",
             "--model", "1,1,16", "--T", "16", "--B", "1", "--steps", "1", "--checkpoint_every", "1",
             "--out", "run/cable")
        text = said(sys.executable, os.path.join(ROOT, sample[1]), *shlex.split(sample[2]), "--tokens", "3")
        self.assertTrue(text.startswith("Once upon a time"), text)


class WithoutAVocabulary(Folder):
    class Bytes(Bytes):
        frame = [101], [102]

    def prepare(self, main, out, *args):
        """what a script says in this process, with bytes for tokens"""
        with mock.patch.dict(encoding.ENCODINGS, gpt2=Bytes, bert=self.Bytes):
            code, _, said = called(main, "--workers", "1", "--local", self.path("in"), "--out", self.path(out), *args)
        self.assertEqual(code, 0, said)
        return said

    def test_msmarco(self):
        import msmarco
        import verify
        records = [{"query": f"what is {i}", "positive": f"it is {i} " * 3, "negative": [f"not {i}", "two"]}
                   for i in range(60)]                              # without e and f, which begin and end a document
        records[7:7] = [{"query": "lonely"}, {"query": "", "positive": "a", "negative": "b"}]
        records.append({"query": "long", "pos": ["word " * 900], "neg": [{"text": "nul\0 within"}]})
        self.write("in/a.jsonl", json_lines(records))
        said = self.prepare(msmarco.main, "o", "--val_triplets", "5", "--triplets", "50", "--shard_tokens", "700")
        self.assertIn("2 records without text skipped", said)
        shards = group_shards(self.path("o"), "msmarco_train_*.bin")
        val = group_shards(self.path("o"), "msmarco_val_000000.bin")
        self.assertGreater(len(shards), 1)
        for docs, head in shards + val:
            self.assertEqual((head[3], head[4], head[5], head[6]), (30522, 102, 3, len(docs)))
            self.assertEqual(len(docs) % 3, 0)
            self.assertTrue(all(d[0] == 101 and d[-1] == 102 and len(d) <= 512 for d in docs))
        self.assertEqual((len(val[0][0]), sum(len(d) for d, _ in shards)), (15, 150))
        every = [bytes(d[1:-1]).decode() for docs, _ in val + shards for d in docs]
        for q, positive, negative in zip(every[::3], every[1::3], every[2::3]):
            number = q.split()[-1]
            wanted = (f"it is {number} " * 3, f"not {number}") if number != "long" else (("word " * 102), "nul  within")
            self.assertEqual((positive, negative), wanted)
        self.assertIn("0 findings", called(verify.main, self.path("o"))[1])

    def test_how_wikitext_becomes_one_text(self):
        import wikitext
        lines = [" = A = \n", " \n", " Words of it . \n"]
        for split in ("train", "valid", "test"):
            self.write(f"in/wiki.{split}.tokens", "".join(lines))
        for join, between in (("file", " \n"), ("rows", ""), ("rows_apart", "\n\n\n\n")):
            wanted = lines[0] + between + lines[2]
            with mock.patch.dict(wikitext.KNOWN, {(2, False, join): {"train": len(wanted), "val": 5}}):
                said = self.prepare(wikitext.main, join, "--size", "2", "--join", join)
            self.assertIn(f"train: {len(wanted)} tokens without <|endoftext|>, as expected\n", said)
            self.assertIn(f"val: {len(wanted)} tokens without <|endoftext|>; expected 5: is this another text?", said)
            self.assertIn(f"test: {len(wanted)} tokens without <|endoftext|>\n", said)
            for split in ("train", "val", "test"):
                ids = all_tokens(self.path(join), f"wikitext2_{split}_*.bin")
                self.assertEqual(list(ids), [256, *wanted.encode()])
            source = json.loads(read(self.path(join, "manifest.json")))["source"]
            self.assertEqual((source["join"], source["text"], source["documents"]), (join, "word-level", "split"))
        self.write("in/wiki.valid.raw", "".join(lines))
        for name in ("train", "test"):
            self.write(f"in/wiki.{name}.raw", " = A = \n")
        with mock.patch.dict(wikitext.KNOWN, {(2, raw, "file"): {"val": 5} for raw in (False, True)}):
            for raw, counted in ([], "\n"), (["--raw"], "; expected 5: is this another text?"):   # the same raw splits
                said = self.prepare(wikitext.main, f"103{raw}", "--size", "103", *raw)
                self.assertIn(f"val: {len(''.join(lines))} tokens without <|endoftext|>{counted}", said)

    def test_a_document_has_room_for_its_frame(self):
        group = b"abc\0abcd\0abcde\0"
        ids, = encoding.encode_pieces(self.Bytes(), [(group, True, True)], 6)
        self.assertEqual(list(ids), [101, *b"abc", 102, 101, *b"abcd", 102, 101, *b"abcd", 102, 101, 102])

    def test_a_progress_bar_ends_at_its_total(self):
        bars = []

        class Bar:
            def __init__(self, total, **_):
                self.total, self.n = total, 0
                bars.append(self)

            def update(self, n):
                self.n += n

            set_postfix_str = close = lambda self, *_, **__: None
        with mock.patch.object(common, "need", lambda name: mock.Mock(tqdm=Bar)):
            for total in (0, 30):
                progress = common.Progress(total, "text")
                for position in (10, 10, 30):
                    progress.update(position, 7)
        self.assertEqual([(bar.total, bar.n) for bar in bars], [(None, 30), (30, 30)])

    def test_a_name_twice_in_the_corpus_of_mldr(self):
        import mldr
        data = {"shards": [{"stream": "corpus", "ids": {"file": name}} for name in ("a.ids", "b.ids")]}

        def check(*names):
            for shard, text in zip(data["shards"], names):
                self.write(shard["ids"]["file"], text)
            mldr.check_names(self.folder, data, {"test": {"x", "z"}})
        with contextlib.redirect_stderr(io.StringIO()) as said:
            check("x\ny\n", "z\n")
        self.assertIn("every judged document is among the 3", said.getvalue())
        with self.assertRaisesRegex(common.BadInput, "1 documents of the corpus share a name"):
            check("x\ny\n", "z\ny\n")
        with self.assertRaisesRegex(common.BadInput, "1 documents judged in test are not in the corpus, e.g. z"):
            check("x\ny\n", "w\n")

    def test_odd_queries_of_mldr(self):
        import mldr
        query = {"query_id": "q", "query": "what", "positive_passages": [{"docid": "d"}]}
        for passages in (5, "d", {"docid": "d"}, [5], [{}], [{"docid": ["d"]}], [{"docid": "a b"}], True):
            path = self.write("q.jsonl", json_lines([{**query, "positive_passages": passages}]))
            with self.assertRaisesRegex(common.BadInput, "query q has a positive passage without a docid"):
                mldr.qrels(path)
        odd = [{**query, "query_id": name} for name in ("\ud800", "", None, ["q"], 2.5, "a\u2003b")]
        path = self.write("q.jsonl", json_lines([*odd, {**query, "query": 5}, {**query, "query_id": 7}, query]))
        self.assertEqual(mldr.qrels(path), (b"7 0 d 1\nq 0 d 1\n", {"d"}))

    def test_the_validation_split_of_a_text(self):
        import text
        path = self.write("a.txt", "x" * 100_000)
        self.assertEqual(text.val_tokens_of(self.path("none"), [path]), 100_000 // 46)
        self.assertEqual(text.val_tokens_of(self.path("none"), [path] * 460 + [self.write("b.txt", "x")]), 1_000_000)
        self.assertEqual(text.val_tokens_of(self.path("none"), [self.write("c.txt", "x" * 99_999)]), 0)
        for first, wanted in (("text_train_000000.bin", 0), ("text_val_000000.bin", 100_000 // 46)):
            manifest = common.Manifest(self.folder, {"streams": {"text": {"first": first}}}, {})
            manifest.save()
            self.assertEqual(text.val_tokens_of(self.folder, [path]), wanted)

    def test_the_bound_of_a_record_is_a_flag(self):
        self.start(mock.patch.object(sources, "LINE_BYTES", sources.LINE_BYTES))
        p = common.parser("", "o")
        p.parse_args([])
        self.assertEqual(sources.LINE_BYTES, 64 << 20)
        p.parse_args(["--record_mb", "3"])
        self.assertEqual(sources.LINE_BYTES, 3 << 20)

    def test_a_line_of_wikitext_is_bounded(self):
        import wikitext
        reader, path = wikitext.WikiReader("file"), self.write("wiki.train.tokens", " = A = \n" + "a" * 99)
        with mock.patch.object(sources, "LINE_BYTES", 50):
            with self.assertRaisesRegex(common.BadInput, "line 2: .* in a line"):
                list(reader.pieces(reader.units([path])[0], sources.new_counts(), [0]))
        said = contextlib.redirect_stderr(io.StringIO())
        for text, words in ((" = A = \n", None), (" = B = \n", "w_val.txt: is there already, with other contents")):
            files = {split: [self.write("wiki.train.tokens", text)] for split in wikitext.SPLITS}
            with said, self.assertRaisesRegex(common.BadInput, words) if words else contextlib.nullcontext():
                wikitext.write_bytes(reader, files, self.path("w"))
        self.assertEqual(read(self.path("w_val.txt")), b" = A = \n")

    def test_both_sizes_of_wikitext_in_one_directory(self):
        import wikitext
        paths = {size: [self.write(f"wikitext-{size}-raw-v1/wiki.{split}.raw", "x") for split in
                        ("train", "valid", "test")] for size in (2, 103)}
        for size, wanted in paths.items():
            found = wikitext.source_files(mock.Mock(local=self.folder, size=size, raw=True))
            self.assertEqual(sum(found.values(), []), wanted)

    def test_an_ending_of_hellaswag_begins_with_a_space(self):
        import hellaswag
        record = {"ctx": "ab", "label": "2", "endings": ["c", "d", "ef", "g"]}
        data = hellaswag.encode_example(self.Bytes(), record, 7)
        words = [2, 4, 2, *b"ab", 2, *b" c", 2, *b" d", 3, *b" ef", 2, *b" g"]
        self.assertEqual(struct.unpack(f"<{len(data) // 2}H", data), (65535, len(data), 7, *words))


class Verify(Case):
    def setUp(self):
        super().setUp()
        self.build("o", [self.write("in/a.jsonl", jsonl(documents(100)))])
        self.name = self.path("o", "t_train_000002.bin")

    def test_whole(self):
        text = self.script("verify", self.path("o"))
        self.assertIn("0 findings", text)
        self.assertNotIn("no checksum", text)
        self.assertIn("expected at least 0", self.script("verify", "--sample", "-1", self.path("o"), code=2))

    def test_every_kind_of_damage(self):
        whole, r = read(self.name), random.Random(5)

        def found(words, data, manifest=True):
            self.write(self.name, data)
            target = self.path("o") if manifest else self.write("alone/x.bin", data)
            text = self.script("verify", target, code=2)
            self.assertRegex(text, words)
            self.assertIn("1 finding", text)
        for _ in range(6):
            i, bit = r.randrange(len(whole)), 1 << r.randrange(8)
            found("checksum", whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1:])
        found("bytes, as in the manifest, got", whole[:-1])
        found("bytes, as in the manifest, got", whole + b"x")
        numbers = list(struct.unpack("<256i", whole[:1024]))
        for i, value, words in ((0, 1, "magic"), (1, 3, "version"),
                                (2, 0, "tokens of its header"), (2, -1, "tokens of its header"),
                                (2, 2**31 - 1, "tokens of its header"), (3, -5, "vocabulary -5"),
                                (4, 40000, "end-of-text 40000"), (200, 1, "should be zero")):
            changed = numbers[:i] + [value] + numbers[i + 1:]
            found(words, struct.pack("<256i", *changed) + whole[1024:], manifest=False)
        changed = whole[:1500] + struct.pack("<H", 60000) + whole[1502:]
        found("expected an id below 30522, the vocabulary, got 60000", changed, manifest=False)
        found("expected at least 1024 bytes", whole[:100], manifest=False)
        found("expected at least 1024 bytes", b"", manifest=False)
        found("tokens of its header", whole[:-2], manifest=False)

    def test_a_manifest_with_other_contents(self):
        path = self.path("o", common.MANIFEST)
        good = common.read_manifest(path)
        shard = good["shards"][0]
        bad = [{**good, key: value} for key in good if key != "format" for value in (None, 5, "x", [5], {"text": 5})
               if not isinstance(value, dict) or key not in ("settings", "source")]
        bad += [{**good, "shards": [{**shard, **change}]} for change in (
            {"file": "../x.bin"}, {"file": ".."}, {"file": 5}, {"file": "a\0b"}, {"bytes": -1}, {"bytes": "9"},
            {"sha256": None}, {"next": 5}, {"next": {"piece": "x"}}, {"tokens": []}, {"stream": []}, {"ids": {}})]
        bad += [{**good, "counts": {"text": {"empty": "many"}}}, {**good, "files": [shard, {}]}]
        bad += [{k: v for k, v in good.items() if k != key} for key in good if key != "files"]
        for data in bad:
            self.write("o/" + common.MANIFEST, json.dumps({**data, "checksum": common.checksum_of(data)}))
            with self.assertRaisesRegex(common.BadInput, "manifest.json: not a manifest of format", msg=data):
                common.read_manifest(path)
        lacking = {**good, "complete": False, "shards": [{k: shard[k] for k in ("file", "bytes", "sha256")}]}
        self.write("o/" + common.MANIFEST, json.dumps({**lacking, "checksum": common.checksum_of(lacking)}))
        self.assertIn("not complete", self.script("verify", self.path("o"), code=2))

    def test_what_verify_lacks_is_no_finding(self):
        self.write("hidden/numpy.py", "raise ImportError('hidden')")
        said = self.script("verify", self.path("o"), code=2, env={"PYTHONPATH": self.path("hidden")})
        self.assertRegex(said, "^verify.py: [^\n]*Python's module numpy is missing: [^\n]*\n$")
        said = self.script("verify", "--tokenizer", self.path("none"), self.name, code=2)
        self.assertIn(f"{self.name}: 500 tokens", said)         # checked all the same
        self.assertRegex(said, "verify.py: [^\n]*none: no such directory[^\n]*\n")
        short = self.write("e.bin", struct.pack("<256i", 20240522, 1, 1, 9, *[0] * 252))
        self.assertIn("1 examples", self.script("verify", "--sample", "3", short))

    def test_the_directory(self):
        self.write("o/stray.bin", read(self.name))
        self.assertIn("not in manifest.json", self.script("verify", self.path("o"), code=2))
        os.remove(self.path("o", "stray.bin"))
        self.write("o/.part-x", b"")
        self.assertIn("left over", self.script("verify", self.path("o"), code=2))
        os.remove(self.path("o", ".part-x"))
        os.remove(self.name)
        self.assertIn("No such file", self.script("verify", self.path("o"), code=2))
        self.assertIn("neither", self.script("verify", self.path("in"), code=2))
        self.assertIn("No such file", self.script("verify", self.path("missing"), code=2))

    @needs_real("hellaswag_val_500.bin")
    def test_multiple_choice_files(self):
        whole = read(real("hellaswag_val_500.bin"))
        self.assertIn("0 findings", self.script("verify", real("hellaswag_val_500.bin")))
        for data in whole[:4] + bytes(8) + whole[12:], whole[:100]:
            self.script("verify", self.write("x.bin", data), code=2)


class Help(Case):
    def test_states_source_size_licence_tokens_time(self):
        scripts = ("text", "tinyshakespeare", "wikitext", "fineweb_edu", "hellaswag", "msmarco", "mldr", "vocabulary",
                   "documents")
        for name in scripts:
            text = self.script(name, "--help")
            for fact in ("Source ", "Size ", "Licence ", "Tokens ", "Time "):
                self.assertIn("\n" + fact, text, name)
        self.assertIn("Time", self.script("verify", "--help"))
        files = {os.path.basename(p)[:-3] for p in glob.glob(os.path.join(DATA, "*.py"))}
        self.assertEqual(files, {*scripts, "tasks", "verify", "common", "sources", "encoding", "build", "download"})

    def test_a_missing_module_is_named(self):
        self.write("in/a.txt", "text")
        self.write("hidden/tiktoken.py", "raise ImportError('hidden')")
        said = self.script("text", self.path("in"), "--out", self.path("o"), "--workers", "1", code=2,
                           env={"PYTHONPATH": self.path("hidden")})
        self.assertRegex(said, "tiktoken is missing: (.* -m )?pip install -r data/requirements.txt")


if __name__ == "__main__":
    unittest.main()
