"""test_ranks.py -- runs of several ranks, over sockets (--ranks N) and over MPI (mpirun): they give the same bits as
one rank, and if a rank dies, hangs or fails, all end soon and without success. The scenes over MPI skip where there is
no mpirun, or the programs were built without MPI. MPIRUN names another MPI's.

Bits are compared, not numbers: no tolerance anywhere. A run must end within 5 s of a death and 5 s of a deadline, and
the parent of --ranks N then waits for last words. CABLE_RANKS_CASES=300 for that many drawn cases; CABLE_TEST_SEED=7
for other ones."""
import contextlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))
import folder  # noqa: E402
from folder import BERT_TRAINER, ROOT, TRAINER, Folder, alive, children, read, read_bytes  # noqa: E402

COMM_PROGRAM = os.environ.get("COMM_PROGRAM", os.path.join(ROOT, "build", "comm_program"))
COMM_ALONE = os.path.join(ROOT, "build", "comm_program_alone")      # built without MPI
SIMT_TRAINER = os.path.join(ROOT, "build", "simt", "train_gpt2_fp32")
BF16_TRAINER = os.path.join(ROOT, "build", "simt", "train_gpt2")
MPIRUN = shutil.which(os.environ.get("MPIRUN", "mpirun"))
ENVIRONMENT = dict(folder.ENVIRONMENT, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   CABLE_OVERSUBSCRIBE="1",
                   OMPI_MCA_btl_vader_single_copy_mechanism="none",     # containers forbid it: a warning
                   OMPI_MCA_plm_rsh_agent="sh")                         # one machine: no ssh is needed
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "universal_newlines": True, "errors": "replace"}
LIMIT = 100             # seconds, for what should end by itself in a few
# The program promises 5 seconds after a death or a deadline; a busy machine takes as many times longer.
SOON = 5 * max(1, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
DEADLINE = 4            # --collective_timeout: more than ranks that work are apart from each other on a busy machine,
SLOW = DEADLINE + 2     # and less than the pause of a slow disk
TIMED = ["--collective_timeout", str(DEADLINE)]
CASES = int(os.environ.get("CABLE_RANKS_CASES", "4"))


def mpirun(ranks):
    version = subprocess.run([MPIRUN, "--version"], **PIPES).stdout
    oversubscribe = ["--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else []
    return [MPIRUN] + oversubscribe + ["-np", str(ranks)]


def on_ranks(wire, ranks, command):
    """the words that start a command on so many ranks, which talk by this wire"""
    if ranks == 1:
        return [*command]
    return [*mpirun(ranks), *command] if wire == "MPI" else [*command, "--ranks", str(ranks)]


def ended(words):
    """exit code and output of what ends by itself. Open MPI 4.1's mpirun sometimes waits forever although its ranks
    have gone, for a lock in PMIx 4.2; it is then started once more. A rank that hangs is a failure."""
    for left in 1, 0:
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            p = subprocess.Popen(words, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
            try:
                code, what = p.wait(LIMIT), ""
            except subprocess.TimeoutExpired:
                ranks = processes(p.pid) if words[0] == MPIRUN else {"": p.pid}
                what = f"{' '.join(words)}: not ended after {LIMIT} s"
                for rank, pid in ranks.items():
                    with contextlib.suppress(OSError):
                        what += f"; rank {rank}, process {pid}, waits in {read(f'/proc/{pid}/wchan')}"
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                p.kill()
                code = p.wait()
                print(what, file=sys.stderr)
            log.seek(0)
            output = log.read()
        if not what:
            return code, output
        assert left and not ranks, f"{what}\n{output}"


def apart(commands, directories=None):
    """exit code and output of one rank per command, each in its directory"""
    words = mpirun(1)[:-2]
    for n, command in enumerate(commands):
        place = ["-wdir", directories[n]] if directories else []
        words += [":"] * (n > 0) + ["-np", "1", *place, *command]
    return ended(words)


def preloaded(directory, name, text):
    """words before a command whose functions of the same names are replaced by these"""
    name = name.replace("/", "")
    source, library = os.path.join(directory, name + ".c"), os.path.join(directory, name + ".so")
    with open(source, "w") as f:
        f.write(text)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    return ["env", "LD_PRELOAD=" + library]


def slow_disk(directory, seconds, word="safetensors"):
    """words before a command whose first fsync of a model, or of another path with this word, takes so long"""
    return preloaded(directory, word, """#include <stdio.h>
                   #include <string.h>
                   #include <unistd.h>
                   #include <sys/syscall.h>
                   int fsync(int fd) {
                       static int slept;
                       char link[64], path[4096] = "";
                       snprintf(link, sizeof(link), "/proc/self/fd/%%d", fd);
                       if (readlink(link, path, sizeof(path) - 1) > 0 && strstr(path, "%s") && !slept++) {
                           sleep(%d);
                       }
                       return syscall(SYS_fsync, fd);
                   }
                """ % (word, seconds))


def tensors_of(directory):
    """{name: bytes} of a checkpoint's model file, and of the moments, whichever ranks have written them"""
    found, pieces = {}, {}
    for name in sorted(os.listdir(directory)):
        data = read_bytes(directory, name)
        if name == "model.safetensors":
            found[name] = data
        if name.endswith(".state"):
            start = 8 + struct.unpack("<Q", data[:8])[0]
            for tensor, t in json.loads(data[8:start]).items():
                if tensor != "__metadata__":
                    begin, end = (start + n for n in t["data_offsets"])
                    whole, _, first = tensor.partition("@")
                    pieces.setdefault(whole, []).append((int(first or 0), data[begin:end]))
    assert found and pieces, os.listdir(directory)
    for tensor, parts in pieces.items():
        found[tensor] = b""
        for first, data in sorted(parts):
            assert 4 * first == len(found[tensor]), (tensor, first)
            found[tensor] += data
    return dict(sorted(found.items()))


def processes(launcher):
    """{rank: pid} of the processes that a launcher has started, directly or through other processes"""
    found, waiting, own = {}, [launcher], children(launcher)
    while waiting:
        pid = waiting.pop()
        waiting += children(pid)
        with contextlib.suppress(OSError):
            environment = read_bytes(f"/proc/{pid}/environ")
            m = re.search(rb"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", environment)
            if m and pid != launcher:
                found[int(m.group(1))] = pid
    return found or dict(enumerate(sorted(own)))            # a program that multiplies itself starts them in order


@contextlib.contextmanager
def started(ranks, words):
    """a run, to be interfered with: its process, {rank: pid}, a function that waits for a condition on the output, and
    one that waits for the end and returns exit code, output and seconds"""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # the background jobs of a script ignore SIGINT, and what they start inherits that
        p = subprocess.Popen(words, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        pids = {}

        def output():
            log.seek(0)
            return log.read()

        def until(condition):
            end = time.monotonic() + LIMIT
            while not condition(output()):
                assert p.poll() is None and time.monotonic() < end, f"exit code {p.poll()}\n{output()}"
                time.sleep(0.02)
            pids.update(processes(p.pid))
            assert len(pids) == ranks, pids

        def end():
            begin = time.monotonic()
            code = p.wait(LIMIT)
            while any(alive(pid) for pid in pids.values()) and time.monotonic() < begin + LIMIT:
                time.sleep(0.02)
            return code, output(), time.monotonic() - begin

        try:
            yield p, pids, until, end
        finally:
            for pid in [*pids.values(), p.pid]:
                if alive(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            p.wait()


def why_not(program):
    if not os.path.exists(program):
        return f"SKIPPED: {os.path.relpath(program, ROOT)} is not built; make ranks builds it"
    return None


def why_not_mpi():
    if MPIRUN is None:
        return "SKIPPED: there is no mpirun; dev/install.sh ranks"
    reason = why_not(COMM_PROGRAM)
    if reason is None and "2 ranks" not in ended(on_ranks("MPI", 2, [COMM_PROGRAM, "small"]))[1]:
        reason = "SKIPPED: build/comm_program is built without MPI"
    return reason


WITHOUT_COMM = why_not(COMM_ALONE)
WITHOUT_MPI = why_not_mpi()
WITHOUT_TRAINER = why_not(TRAINER)


class Wire(unittest.TestCase):
    """scenes over one wire; a class for each"""
    wire = "sockets"

    def run_on(self, ranks, *command):
        """exit code and output of a program that ends by itself"""
        return ended(on_ranks(self.wire, ranks, command))

    def started(self, ranks, *command):
        return started(ranks, on_ranks(self.wire, ranks, command))


class Collectives:
    program = COMM_ALONE

    def waiting(self, ranks, seconds="600", mode="wait"):
        return self.started(ranks, self.program, mode, seconds)

    def test_sums_and_the_small_collectives(self):
        for ranks, mode in ((1, "sums"), (1, "small"), (2, "sums"), (2, "small"), (3, "sums"), (3, "small"),
                            (8, "sums"), (8, "small"), (1, "gradients"), (3, "gradients"), (4, "gradients")):
            with self.subTest(ranks=ranks, mode=mode):
                code, output = self.run_on(ranks, self.program, mode)
                self.assertEqual(code, 0, output)
                description = f"{ranks} ranks, gradients by {self.wire}" if ranks > 1 else "1 rank"
                self.assertEqual(re.findall(r"^(?:ok|\d+ rank.*)$", output, re.M), [description, "ok"])

    def test_a_dead_rank(self):
        """is named, also by ranks that work by themselves"""
        for ranks, victim, mode in (2, 0, "wait"), (2, 1, "wait"), (4, 3, "wait"), (3, 1, "work"):
            with self.subTest(ranks=ranks, victim=victim, mode=mode), \
                    self.waiting(ranks, mode=mode) as (_, pids, until, end):
                until(lambda text: text.count("is process") == ranks)
                os.kill(pids[victim], signal.SIGKILL)
                code, output, seconds = end()
                self.assertLess(seconds, SOON)
                if self.wire == "MPI":                  # whose mpirun ends the run
                    self.assertNotEqual(code, 0, output)
                    continue
                self.assertEqual(code, 128 + 9, output)
                self.assertIn(f"rank {victim} (process {pids[victim]}) was ended by signal 9", output)
                what = "sum of the gradients|stop signals|own work"
                errors = re.findall("^error: .*", output, re.M)
                self.assertTrue(errors, output)
                for error in errors:
                    self.assertRegex(error, f"({what}): rank {victim} has died")

    def test_a_dead_parent(self):
        with self.waiting(3) as (p, pids, until, end):
            until(lambda text: text.count("is process") == 3)
            p.kill()
            self.assertLess(end()[2], SOON)
            self.assertFalse(any(map(alive, pids.values())))

    def test_a_rank_that_hangs(self):
        message = (r"error: .*(?:sum of the gradients|stop signals): rank (\d) waited %d s for "
                   r"rank (\d) \(--collective_timeout\)") % DEADLINE
        for ranks, victim in (2, 0), (2, 1), (4, 2):
            with self.subTest(ranks=ranks, victim=victim), self.waiting(ranks, str(DEADLINE)) as (_, pids, until, end):
                until(lambda text: text.count("is process") == ranks)
                os.kill(pids[victim], signal.SIGSTOP)
                code, output, seconds = end()
                self.assertEqual(code, 5, output)
                self.assertTrue(DEADLINE / 2 < seconds < DEADLINE + SOON, seconds)
                found = re.search(message, output)
                self.assertTrue(found, output)
                self.assertNotEqual(int(found.group(1)), victim)
                self.assertEqual(int(found.group(2)), victim)
                self.assertFalse(any(map(alive, pids.values())))

    def test_a_pause_ends_nothing(self):
        """a pause of one rank that is shorter than the deadline, or of all ranks, however long; a rank that said during
        the first pause that it waits is still found when it hangs"""
        deadline = 4
        with self.waiting(3, str(deadline)) as (p, pids, until, end):
            until(lambda text: text.count("is process") == 3)
            for victims, pause in ([1], deadline * 0.7), (pids, deadline + 2):
                for victim in victims:
                    os.kill(pids[victim], signal.SIGSTOP)
                time.sleep(pause)
                for victim in victims:
                    os.kill(pids[victim], signal.SIGCONT)
                time.sleep(1)
                self.assertIsNone(p.poll())
                self.assertTrue(all(map(alive, pids.values())))
            os.kill(pids[2], signal.SIGSTOP)
            self.assertRegex(end()[1], r"error: .*: rank [01] waited 4 s for rank 2 \(--collective_timeout\)")

    def test_an_error(self):
        for ranks, who, code in (4, "0", 4), (4, "3", 4), (2, "1", 4), (4, "all", 2):
            with self.subTest(ranks=ranks, who=who):
                begin = time.monotonic()
                found, output = self.run_on(ranks, self.program, "throw", who)
                self.assertEqual(found, code, output)
                self.assertLess(time.monotonic() - begin, SOON)
                wanted = "a mistake of all" if who == "all" else "a mistake of one"
                wanted = wanted if who in ("0", "all") else f"rank {who}: {wanted}"
                self.assertEqual(re.findall("^error: (.*a mistake of (?:one|all))", output, re.M), [wanted])

    def test_the_highest_exit_code(self):
        for who in 0, 2:
            with self.subTest(who=who):
                self.assertEqual(self.run_on(3, self.program, "exit", str(who), "75")[0], 75)


@unittest.skipIf(WITHOUT_COMM, WITHOUT_COMM)
class CollectivesBySockets(Collectives, Wire):
    def test_more_ranks_than_cores_are_refused(self):
        """before the first of them is started, unless the environment allows it"""
        one_core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        for allowed in "0", "1":
            p = subprocess.run([*one_core, COMM_ALONE, "small", "--ranks", "2"], timeout=LIMIT, **PIPES,
                               env=dict(ENVIRONMENT, CABLE_OVERSUBSCRIBE=allowed))
            self.assertEqual(p.returncode, 2 if allowed == "0" else 0, p.stdout)
            self.assertEqual("the ranks are processes" in p.stdout, allowed == "1", p.stdout)
            self.assertEqual("error: --ranks 2: this machine has 1 core and " in p.stdout, allowed == "0", p.stdout)

    def test_too_few_descriptors(self):
        """are noticed before a rank is started"""
        code, output = ended(["prlimit", "--nofile=12", COMM_ALONE, "small", "--ranks", "8"])
        self.assertEqual(code, 5, output)
        self.assertIn("error: --ranks 8: socketpair (ulimit -n?): Too many open files", output)
        self.assertNotIn("the ranks are processes", output)

    def test_waiting_ranks_sleep(self):
        def switches(pid):
            return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", read(f"/proc/{pid}/status"), re.M).group(1))

        with self.waiting(3) as (_, pids, until, _):
            until(lambda text: text.count("is process") == 3)
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(0.2)
            before = [switches(pids[r]) for r in (0, 2)]
            time.sleep(1)
            for rank, b in zip((0, 2), before):
                self.assertLess(switches(pids[rank]) - b, 50)       # it looks up ten times a second

    def test_no_port_and_no_network(self):
        """no rank has a socket of the network, and none needs one: in a namespace not even the loopback is up"""
        with self.waiting(4) as (p, pids, until, _):
            until(lambda text: text.count("is process") == 4)
            for pid in [p.pid, *pids.values()]:
                links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                sockets = {m.group(1) for m in (re.match(r"socket:\[(\d+)\]", link) for link in links) if m}
                self.assertEqual(len(sockets), 0 if pid == p.pid else 3)
                for kind in "tcp", "tcp6", "udp", "udp6", "raw":
                    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{kind}") as f:
                        inodes = {line.split()[9] for line in f.read().splitlines()[1:]}
                        self.assertEqual(sockets & inodes, set(), kind)
        alone = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork"]
        if subprocess.run([*alone, "true"], stderr=subprocess.DEVNULL).returncode != 0:
            self.skipTest("SKIPPED: no namespaces here")
        for ranks in range(1, 9):
            code, output = ended([*alone, *on_ranks("sockets", ranks, [COMM_ALONE, "small"])])
            self.assertEqual(code, 0, output)
            self.assertIn("\nok\n", output)

    def test_a_launcher_that_cannot_be_served_is_refused_once(self):
        """never N trainings that each take themselves for the only one; and the line that is printed works"""
        cases = (("torchrun", "WORLD_SIZE", "RANK", "type: mpirun -np 3 "),
                 ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "type: srun --mpi=pmix -n 3 "),
                 ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "built without MPI: install it"))
        for by, size, rank, wanted in cases:
            words = [COMM_ALONE, "small", "it's", *(["--ranks", "8"] if by == "srun" else [])]
            with self.subTest(by=by):
                runs = [subprocess.Popen(words, env=dict(ENVIRONMENT, **{size: "3", rank: str(r)}), **PIPES)
                        for r in range(3)]
                results = [p.communicate(timeout=LIMIT)[0] for p in runs]
                self.assertEqual([p.returncode for p in runs], [2, 2, 2], results)
                self.assertEqual([bool(text) for text in results], [True, False, False], results)
                self.assertRegex(results[0], f"^error: {by}.* started 3 processes, each of which would train alone")
                self.assertIn(wanted, results[0])
                line = re.search("on one machine, type: (.*)", results[0]).group(1)
                p = subprocess.run(line, shell=True, env=ENVIRONMENT, timeout=LIMIT, **PIPES)
                self.assertEqual((p.returncode, p.stdout.split("\n", 1)[1]),
                                 (0, "3 ranks, gradients by sockets\nok\n"))

    def test_nccl_on_the_emulated_gpu(self):
        """with the stand-in for NCCL: between a GPU and itself, as make gpu-check runs it, and a step's sum of
        gradients, where a missing wait finds memory that another stream has still to read or to write"""
        with tempfile.TemporaryDirectory() as directory:
            program = os.path.join(directory, "comm_program")
            subprocess.run([os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-include", "test/simt/simt.h",
                            "-Itest/simt", "-I.", "-DUSE_NCCL", "-x", "c++", "test/ranks/comm_program.cu", "-o",
                            program], cwd=ROOT, check=True)
            for seed in range(8):
                with self.subTest(seed=seed):
                    p = subprocess.run([program, "self"], env=dict(ENVIRONMENT, SIMT_GPUS="1", SIMT_SEED=str(seed)),
                                       timeout=LIMIT, **PIPES)
                    self.assertEqual((p.returncode, p.stdout), (0, "1 rank\nok\n"))
            for ranks, seed in (2, 1), (2, 2), (3, 3):
                with self.subTest(ranks=ranks, seed=seed):
                    p = subprocess.run([program, "gradients", "--ranks", str(ranks)], timeout=LIMIT,
                                       env=dict(ENVIRONMENT, SIMT_GPUS="8", SIMT_SEED=str(seed)), **PIPES)
                    self.assertEqual((p.returncode, p.stdout.split("\n")[-2]), (0, "ok"), p.stdout)


@unittest.skipIf(WITHOUT_MPI, WITHOUT_MPI)
class CollectivesByMpi(Collectives, Wire):
    wire, program = "MPI", COMM_PROGRAM

    def test_a_launcher_of_another_mpi(self):
        """each process would take itself for the only one, train on all of the data and fight for --out"""
        for rank in "01":
            p = subprocess.run([COMM_PROGRAM, "small"], env=dict(ENVIRONMENT, PMI_SIZE="4", PMI_RANK=rank), **PIPES)
            self.assertEqual(p.returncode, 2, p.stdout)
            said = "expected the 4 processes that the launcher started, got 1" in p.stdout
            self.assertEqual(said, rank == "0", p.stdout)

    def test_a_signal_during_the_start(self):
        """must not end a rank that MPI_Init is making known to mpirun, which might then wait forever"""
        early = """#include <signal.h>
                   #include <stdlib.h>
                   #include <unistd.h>
                   int PMPI_Init_thread(int*, char***, int, int*);
                   int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
                       const char* rank = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK")
                                                                         : getenv("PMI_RANK");
                       const int mine = *rank == '1';
                       if (mine) { raise(%d); }
                       const int result = PMPI_Init_thread(argc, argv, required, provided);
                       if (mine && write(2, "MPI knows it\\n", 13) < 0) { return -1; }
                       return result;
                   }
                """
        with tempfile.TemporaryDirectory() as directory:
            words = preloaded(directory, "early", early % signal.SIGINT)
            with self.started(2, *words, COMM_PROGRAM, "wait", "600") as (_, _, _, end):
                code, output, seconds = end()
        self.assertIn("MPI knows it", output)
        self.assertIn(code, [128 + signal.SIGINT, signal.SIGINT], output)      # of MPICH it is the signal itself
        self.assertNotIn("is process", output)
        self.assertLess(seconds, SOON)


class Runs(Folder, Wire):
    """small runs of train_gpt2, and how they are compared"""

    EMULATED = {"trainer": SIMT_TRAINER, "model": "1,2,64", "T": 20, "steps": 2, "micro_batches": 4, "every": 2}

    def setUp(self):
        super().setUp()
        self.text = self.write("text.txt", read("LICENSE") * 10)

    def command(self, name, *flags, trainer=TRAINER, model="2,4,96", T=32, steps=10, micro_batches=8, every=5, B=1):
        """8 micro-batches of one sequence: 8, 4 or 2 per rank"""
        return [trainer, "--train_files", self.text, "--val_files", self.text, "--model", model, "--T", str(T),
                "--B", str(B), "--total_batch", str(T * micro_batches), "--steps", str(steps), "--lr", "1e-2",
                "--warmup", "2", "--val_every", "5", "--val_batches", "3", "--sample_every", "0",
                "--checkpoint_every", str(every), "--keep", "2", "--out", self.path(name), *flags]

    def run_ok(self, ranks, *command):
        """stdout and stderr of a run"""
        code, output = self.run_on(ranks, *command)
        self.assertEqual(code, 0, output)
        return output

    def train(self, ranks, name, *flags, **shape):
        return self.run_ok(ranks, *self.command(name, *flags, **shape))

    def result(self, name, step=10):
        """the bytes of a checkpoint and what was logged, without times"""
        tensors = tensors_of(self.path(name, f"step_{step:08d}"))
        records = map(json.loads, self.read(name, "log.jsonl").splitlines())
        log = [{k: r.get(k) for k in ("kind", "step", "loss", "norm", "lr")} for r in records]
        assert sum(r["kind"] == "train" for r in log) == step and any(r["kind"] == "val" for r in log), log
        return tensors, log

    def assert_same(self, a, b, **shape):
        (tensors, log), (other_tensors, other_log) = self.result(a, **shape), self.result(b, **shape)
        self.assertEqual(log, other_log)
        self.assertEqual(list(tensors), list(other_tensors))
        for name in tensors:
            self.assertTrue(tensors[name] == other_tensors[name], f"{name} of {b} is not that of {a}")

    def interrupted(self, name, ranks, what, *flags):
        """exit code, output and seconds of a long run after what(pids), which is called once it has a checkpoint"""
        with self.started(ranks, *self.command(name, *flags, steps=2000, every=2)) as (p, pids, until, end):
            until(lambda _: os.path.isdir(self.path(name, "step_00000004")))
            what({**pids, "parent": p.pid})
            return end()


class Training:
    def test_any_number_of_ranks_gives_the_same_bits(self):
        """16 micro-batches in 8 leaves, whose sums every number of ranks that divides them adds up in the same order"""
        for pos, counts in ("cable", (1, 2, 4, 8)), ("t5", (1, 2)):
            for ranks in counts:
                output = self.train(ranks, f"{pos}{ranks}", "--pos", pos, micro_batches=16)
                if ranks == 1:
                    continue
                with self.subTest(pos=pos, ranks=ranks):
                    self.assertIn(f"{ranks} ranks, gradients by {self.wire}", " ".join(output.split()))
                    self.assert_same(f"{pos}1", f"{pos}{ranks}")
                    # each rank has written its part of the moments
                    files = [f for f in os.listdir(self.path(f"{pos}{ranks}", "step_00000010"))
                             if f.startswith("optimizer_")]
                    self.assertEqual(sorted(files), [f"optimizer_{r}.state" for r in range(ranks)])
                    # only rank 0 prints
                    self.assertEqual(len(re.findall(r"^step +\d+/10 \| loss ", output, re.M)), 10, output)

    def test_resume_on_another_number_of_ranks(self):
        self.train(1, "whole")
        for before, after in (1, 4), (4, 2), (2, 1):
            with self.subTest(before=before, after=after):
                name = f"{before}_{after}"
                self.train(before, name)
                shutil.rmtree(self.path(name, "step_00000010"))
                output = self.train(after, name, "--resume", "1")
                self.assertIn("step_00000005", output)
                self.assert_same("whole", name)
        # a file of moments is missing, although the manifest is valid: refused
        self.train(2, "part")
        step = self.path("part", "step_00000010")
        os.unlink(os.path.join(step, "optimizer_1.state"))
        output = self.train(1, "part", "--resume", "1")
        self.assertRegex(output, "step_00000010 is bad: .*optimizer_1.state")

    def test_bad_input_is_reported_once(self):
        for flags, words in ((["--lr", "x"], "--lr"), (["--total_batch", "96"], "--total_batch"),
                             (["--load", "/nowhere"], "/nowhere")):
            with self.subTest(flags=flags):
                command = self.command("bad")
                for flag in flags[::2]:
                    if flag in command:
                        at = command.index(flag)
                        del command[at:at + 2]
                code, output = self.run_on(4, *command, *flags)
                self.assertEqual(code, 2, output)
                self.assertEqual(len(re.findall(r"^error: .*" + re.escape(words), output, re.M)), 1, output)

    def test_divergence_is_reported_once(self):
        command = self.command("diverged", steps=100)
        command[command.index("--lr") + 1] = "1e30"
        code, output = self.run_on(2, *command)
        self.assertEqual(code, 3, output)
        self.assertEqual(output.count("error:"), 1, output)

    def test_a_dead_rank(self):
        """ends all ranks, and resuming from what was saved gives the bits of a run that was never interrupted"""
        constant = ["--schedule", "constant"]           # so that no learning rate depends on the number of steps
        for ranks, victim in (2, 1), (4, 0):
            with self.subTest(ranks=ranks, victim=victim):
                name = f"dead{ranks}"
                code, output, seconds = self.interrupted(
                    name, ranks, lambda pids: os.kill(pids[victim], signal.SIGKILL), *constant)
                self.assertNotEqual(code, 0, output)
                self.assertLess(seconds, SOON)
                saved = max(int(d[5:]) for d in os.listdir(self.path(name)) if re.fullmatch(r"step_\d{8}", d))
                length = saved + 4
                self.train(1, name, "--resume", "1", "--allow_change", "steps", *constant, steps=length, every=length)
                self.train(1, name + "_whole", *constant, steps=length, every=length)
                self.assert_same(name + "_whole", name, step=length)

    def test_a_save_may_take_longer_than_the_timeout(self):
        slow = slow_disk(self.folder, SLOW)
        command = slow + self.command("slow", *TIMED, steps=4, every=2)
        begin = time.monotonic()
        code, output = self.run_on(2, *command)
        self.assertEqual(code, 0, output)
        self.assertGreater(time.monotonic() - begin, SLOW, "the disk was not slow")
        self.train(1, "fast", steps=4, every=2)
        self.assert_same("fast", "slow", step=4)

    def test_a_rank_that_hangs_while_another_one_saves(self):
        """is not hidden by that: the saving rank, whose disk hangs too, notices it, and so do the remaining ranks"""
        for victim in 1, 0:
            with self.subTest(victim=victim):
                slow = slow_disk(self.folder, 60)
                command = slow + self.command(f"slow{victim}", *TIMED, every=2)
                with self.started(2, *command) as (_, pids, until, end):
                    until(lambda _: any("safetensors" in f for _, _, files in os.walk(self.path(f"slow{victim}"))
                                        for f in files))
                    time.sleep(0.5)
                    os.kill(pids[victim], signal.SIGSTOP)
                    code, output, seconds = end()
                self.assertEqual(code, 5, output)
                self.assertLess(seconds, DEADLINE + SOON)
                wanted = f"error: .*checkpoint: rank {1 - victim} waited {DEADLINE} s for rank {victim} "
                self.assertRegex(output, wanted)

    def test_signals(self):
        """to the command that was started, or to one rank: all ranks save, and the exit code says so. mpirun passes
        SIGUSR1 on, but ends all ranks soon after a SIGTERM."""
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
        cases = [("parent", number) for number in (numbers[2:] if self.wire == "MPI" else numbers)]
        for victim, number in [*cases, (1, signal.SIGTERM)]:
            with self.subTest(victim=victim, number=number):
                name = f"signal{victim}{number}"
                code, output, _ = self.interrupted(name, 2, lambda pids: os.kill(pids[victim], number))
                self.assertEqual(code, 75, output)
                step = int(re.search(r"stopped by signal \d+ before step (\d+)", output).group(1)) - 1
                self.assertTrue(os.path.isdir(self.path(name, f"step_{step:08d}")), output)

    @unittest.skipUnless(os.path.exists(SIMT_TRAINER), "SKIPPED: build/simt/train_gpt2_fp32 is not built")
    def test_the_cuda_build_on_the_emulator(self):
        """by an NCCL that takes its time and refuses misuse"""
        self.train(1, "1", **self.EMULATED)
        for ranks, seed in (2, 1), (2, 2), (4, 3):
            with self.subTest(ranks=ranks, seed=seed), \
                    mock.patch.dict(ENVIRONMENT, SIMT_GPUS="8", SIMT_SEED=str(seed)):
                name = f"{ranks}_{seed}"
                output = self.train(ranks, name, **self.EMULATED)
                self.assertIn(f"{ranks} ranks, gradients by NCCL 2.28.9", " ".join(output.split()))
                self.assert_same("1", name, step=2)

        # a bf16 build's ranks hold only the float32 weights of their shares; a run continues with another number of
        # ranks
        bf16 = {**self.EMULATED, "trainer": BF16_TRAINER, "model": "3,2,64"}
        constant = ["--schedule", "constant"]
        self.train(1, "bf16", *constant, **{**bf16, "steps": 4})
        for before, after, seed in (2, 4, 1), (1, 2, 3), (2, 1, 4):
            with self.subTest(before=before, after=after), \
                    mock.patch.dict(ENVIRONMENT, SIMT_GPUS="8", SIMT_SEED=str(seed)):
                name = f"bf16_{before}_{after}"
                self.train(before, name, *constant, **bf16)
                self.train(after, name, *constant, "--resume", "1", "--allow_change", "steps",
                           **{**bf16, "steps": 4})
                self.assert_same("bf16", name, step=4)

        code, output = self.run_on(2, *self.command("refused", **self.EMULATED))
        self.assertEqual(code, 2, output)
        self.assertEqual(len(re.findall("^error: ranks 0 and 1 share a GPU", output, re.M)), 1, output)


@unittest.skipIf(WITHOUT_TRAINER, WITHOUT_TRAINER)
class TrainingBySockets(Training, Runs):
    def test_three_ranks(self):
        """of 6 micro-batches each has a leaf of 2; one rank continues in the same order, two ranks cannot"""
        self.train(3, "3", micro_batches=6)
        for name in "1", "2":
            shutil.copytree(self.path("3"), self.path(name))
            shutil.rmtree(self.path(name, "step_00000010"))
        self.train(1, "1", "--resume", "1", micro_batches=6)
        self.assert_same("1", "3")
        code, output = self.run_on(2, *self.command("2", "--resume", "1", micro_batches=6))
        self.assertEqual(code, 2, output)
        self.assertIn("sums a step's gradient in 3 parts, which 2 ranks cannot share; start it on 1 rank", output)
        self.train(2, "2", "--resume", "1", "--allow_change", "leaves", micro_batches=6)
        for ranks in 1, 2:
            self.train(ranks, f"default{ranks}", micro_batches=6)
        self.assert_same("default1", "default2")
        self.assertNotEqual(self.result("default1"), self.result("1"))

    def test_a_plan_for_other_ranks(self):
        """--check --ranks N says in one process what N ranks would hold, and what they would send"""
        held = r"(\d[\d.]* \wB) for the parameters"
        for ranks in 2, 4:
            plan = self.train(1, "plan", "--check", "--ranks", str(ranks))
            there = self.train(ranks, f"there{ranks}")
            self.assertEqual(re.findall(held, plan), re.findall(held, there))
            self.assertIn(f"{8 // ranks} micro-batches of 1 sequences on each rank, summed in 8 leaves", plan)
            self.assertRegex(plan, r"all is well: 10 steps of .*; not compared with this machine's \d+ cores? and \d")
        self.assertNotIn("not compared", self.train(1, "plan", "--check"))
        # three blocks of 16,384 elements, padding included; 3 / 4 of them leave a rank, and come back
        plan = self.train(1, "plan", "--check", "--ranks", "4", model="2,2,32")
        self.assertIn("294.9 kB an update leave each and reach it: 147.5 kB of gradients, 147.5 kB of new", plan)
        plan = self.train(1, "plan", "--check", "--ranks", "16", micro_batches=32)
        self.assertIn("2 micro-batches of 1 sequences on each rank, summed in 16 leaves", plan)
        code, output = self.run_on(1, *self.command("plan", "--ranks", "2", "--check", B=-1))
        self.assertEqual(code, 2, output)
        self.assertIn("--check --ranks 2: --B -1 depends on the memory of the machine", output)

    def test_the_data_matter(self):
        """the comparisons above would notice another order of the data"""
        self.train(1, "a")
        self.train(2, "b", "--seed", "43")
        self.assertNotEqual(self.result("a")[1], self.result("b")[1])

    def test_the_largest_batch_divides_and_fits(self):
        """--B -1, and the --B that the message for too large a batch names"""
        self.train(1, "four", "--threads", "1", B=4)
        for ranks in 1, 2:
            output = " ".join(self.train(ranks, f"most{ranks}", B=-1).split())
            self.assertIn(f"--B -1 is {8 // ranks} here", output)
        self.assert_same("four", "most2")

        def check(B, megabytes=None, recompute=-1):
            """exit code and output of --check, for 12 sequences of a step, with so much address space"""
            command = self.command("", "--check", "--threads", "1", "--recompute", str(recompute), model="2,2,256",
                                   T=512, micro_batches=12, B=B)
            del command[command.index("--out"):][:2]
            limit = [] if megabytes is None else ["prlimit", f"--as={int(megabytes * 1e6)}"]
            p = subprocess.run([*limit, *command], env=ENVIRONMENT, timeout=LIMIT, **PIPES)
            return p.returncode, " ".join(p.stdout.split())

        def megabytes(B, what, *given):
            return float(re.search(r"memory: .*?([0-9.]+) MB " + what, check(B, *given)[1]).group(1))

        # too little for 12 that recompute GELU, enough for 12 that recompute layernorm too, which is never chosen
        enough = 900 - megabytes(1, "available", 900)
        enough += (megabytes(12, "needed", None, 1) + megabytes(12, "needed", None, 2)) / 2
        code, output = check(12, enough)
        self.assertEqual(code, 4, output)
        self.assertIn("--B 6 would fit", output)
        code, output = check(-1, enough)
        self.assertEqual(code, 0, output)
        self.assertIn("--B -1 is 6 here", output)
        code, output = self.run_on(1, TRAINER, "--B", "-1", "--train_files", self.text, "--val_files", self.text)
        self.assertEqual(code, 2, output)
        self.assertIn("--B -1: takes the most sequences that divide --total_batch", output)

    def test_a_choice_of_the_checkpoint_may_take_longer_than_the_timeout(self):
        """only rank 0 cleans the directory and reads all bytes of the newest checkpoint"""
        self.train(1, "whole", steps=4, every=2)
        self.train(1, "tidied", steps=4, every=2)
        shutil.rmtree(self.path("tidied", "step_00000004"))
        slow = slow_disk(self.folder, SLOW, "tidied")
        begin = time.monotonic()
        code, output = self.run_on(2, *slow, *self.command("tidied", *TIMED, "--resume", "1", steps=4, every=2))
        self.assertEqual(code, 0, output)
        self.assertGreater(time.monotonic() - begin, SLOW, "the disk was not slow")
        self.assertIn("step_00000002", output)
        self.assert_same("whole", "tidied", step=4)

    def test_an_output_directory_may_take_longer_than_the_timeout(self):
        self.train(1, "whole", steps=4, every=2)
        self.train(1, "cut", steps=4, every=2)
        shutil.rmtree(self.path("cut", "step_00000004"))
        for name, word, flags in (("new", "/new", ()), ("probed", ".tmp_step_shared", ()),
                                  ("cut", "log.jsonl", ("--resume", "1"))):
            with self.subTest(word):
                begin = time.monotonic()
                code, output = self.run_on(2, *slow_disk(self.folder, SLOW, word),
                                           *self.command(name, *TIMED, *flags, steps=4, every=2))
                self.assertEqual(code, 0, output)
                self.assertGreater(time.monotonic() - begin, SLOW, "the disk was not slow")
                self.assert_same("whole", name, step=4)

    def test_an_environment_that_cannot_grow(self):
        full = preloaded(self.folder, "full", "int setenv(const char *name, const char *value, int replace) { "
                         "(void)name; (void)value; (void)replace; return -1; }\n")
        code, output = self.run_on(1, "env", "-u", "OMP_WAIT_POLICY", *full, TRAINER, "--help")
        self.assertEqual(code, 0, output)

    @unittest.skipUnless(os.path.exists(SIMT_TRAINER), "SKIPPED: build/simt/train_gpt2_fp32 is not built")
    def test_an_nccl_that_fails_or_hangs(self):
        # a step has 5 groups of messages: the gradients of the layer and of the rest, and their new weights
        sums, failed, hung = "sum of the gradients", "NCCL: remote process exited", f"rank [01] waited {DEADLINE} s for"
        for plan, what, error in (("fail:2", sums, failed), ("hang:2", sums, hung), ("hang:4", "weights", hung)):
            for rank in "01":
                with self.subTest(plan=plan, rank=rank), \
                        mock.patch.dict(ENVIRONMENT, SIMT_GPUS="8", SIMT_NCCL=plan, SIMT_NCCL_RANK=rank):
                    begin = time.monotonic()
                    command = self.command("nccl", *TIMED, **self.EMULATED)
                    code, output = self.run_on(2, *command)
                    self.assertEqual(code, 5, output)
                    self.assertRegex(output, f"error: .*{what}: .*{error}")
                    self.assertLess(time.monotonic() - begin, 3 * SOON)

    def test_drawn_signals_and_deaths(self):
        """at random moments, over either wire: after a signal the run resumes with the same bits on another number of
        ranks; kill -9 and SIGSTOP end all ranks, and the message names the rank"""
        seed = os.environ.get("CABLE_TEST_SEED", "1")
        constant = ["--schedule", "constant", *TIMED]
        for case in range(CASES):
            draw = random.Random(f"{seed} {case}")
            wire, ranks = draw.choice(["sockets"] + ["MPI"] * (not WITHOUT_MPI)), draw.choice([2, 4])
            number = draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL, signal.SIGSTOP])
            deadly = number in (signal.SIGKILL, signal.SIGSTOP)
            name, shape = f"drawn{case}", {"steps": 100000 if deadly else 40, "every": draw.choice([2, 10, 1000])}
            words = on_ranks(wire, ranks, self.command(name, *constant, **shape))
            with self.subTest(case=case, wire=wire, ranks=ranks, number=number):
                with started(ranks, words) as (p, pids, until, end):
                    if deadly:
                        until(lambda text: "\nstep " in text)
                    time.sleep(2 * draw.random())
                    while len(pids) < ranks and p.poll() is None:       # mpirun is slow to start them
                        pids.update(processes(p.pid))
                    pids.update({"parent": p.pid} if wire == "sockets" and not deadly else {})
                    victim = draw.choice(sorted(pids, key=str) or [None])
                    with contextlib.suppress(ProcessLookupError, KeyError):     # it is done
                        os.kill(pids[victim], number)
                    code, output, seconds = end()
                late = DEADLINE + SOON if number == signal.SIGSTOP else SOON
                self.assertLess(seconds, late, output)
                if deadly:
                    self.assertNotEqual(code, 0, output)
                    self.assertRegex(output, rf"rank {victim}\b")
                    continue
                found = re.search(r"stopped by signal \d+ (?:before step (\d+)|after)", output)
                self.assertEqual(code == 75, bool(found), output)
                if found and found.group(1) != "1":
                    step = int(found.group(1) or 41) - 1
                    self.assertTrue(os.path.isdir(self.path(name, f"step_{step:08d}")), output)
                shape["every"] = 40
                self.train(draw.choice([1, 2, 4]), name, *constant, "--resume", "1", **shape)
                self.train(1, name + "_whole", *constant, **shape)
                self.assertEqual(self.result(name, 40)[0], self.result(name + "_whole", 40)[0])


@unittest.skipIf(WITHOUT_MPI or WITHOUT_TRAINER, WITHOUT_MPI or WITHOUT_TRAINER)
class TrainingByMpi(Training, Runs):
    wire = "MPI"

    def test_other_flags_on_a_rank_are_an_error(self):
        other = self.path("other.txt")
        shutil.copyfile(self.text, other)
        same = self.command("same", "--threads", "1")
        for flag, value in (("--train_files", other), ("--val_files", other), ("--out", self.path("elsewhere")),
                            ("--lr", "2e-2"), ("--steps", "9")):
            with self.subTest(flag=flag):
                changed = list(same)
                changed[changed.index(flag) + 1] = value
                code, output = apart([same, same, changed])
                self.assertEqual(code, 2, output)
                found = re.findall(rf"^error: {flag}: expected the same on all ranks, got (.*) on rank 2 and (.*) on "
                                   "rank 0", output, re.M)
                self.assertEqual(len(found), 1, output)
                if flag == "--steps":
                    self.assertEqual(found, [("'9'", "'10'")])
                self.assertFalse(os.path.exists(self.path("same")) or os.path.exists(self.path("elsewhere")))
        threads = [*same[:-1], "2"]
        self.assertEqual(apart([same, threads])[0], 0)
        self.train(1, "alone")
        self.assert_same("alone", "same")

    def test_other_data_on_a_rank_are_an_error(self):
        """the same flags, but each rank has a disk of its own"""
        text = read_bytes(self.text)
        command = self.command("out", "--eval_lengths", "16")
        for name in ("train_files", "val_files"):
            command[command.index("--" + name) + 1] = name + ".txt"
        for change in (None, "longer", "other", "another file"):
            for flag in ("train_files", "val_files"):
                with self.subTest(change=change, flag=flag):
                    self.fresh_places()
                    for place in self.places:
                        for name in ("train_files", "val_files"):
                            self.write(os.path.join(place, name + ".txt"), text)
                    changed = {"longer": text + b"x" * 5000, "other": text[:-1] + b"#"}.get(change, text)
                    path = self.write(os.path.join(self.places[1], flag + ".txt"), changed)
                    words = command
                    if change == "another file":
                        shutil.copyfile(path, os.path.join(self.places[1], flag + "2.txt"))
                        words = [w.replace(flag + ".txt", flag + "*.txt") for w in command]
                    shutil.rmtree(self.path("out"), ignore_errors=True)
                    code, output = apart([words, words], self.places)
                    if change is None:
                        self.assertEqual(code, 0, output)
                        continue
                    self.assertEqual(code, 2, output)
                    error = f"^error: --{flag}: expected the same on all ranks, got (\\d) files, (\\d+) bytes, "
                    found = re.findall(error, output, re.M)
                    self.assertEqual(len(found), 1, output)
                    files = 2 if change == "another file" else 1
                    self.assertEqual(found[0], (str(files), str(files * len(changed))))
                    self.assertEqual(output.count("loss "), 0, output)

    def refused_apart(self, error, *flags, commands=None):
        """of two ranks whose directories are not the same one"""
        command = self.command("", *flags, steps=2)
        command[command.index("--out") + 1] = "run"
        code, output = apart(commands(command) if commands else [command, command], self.places)
        self.assertEqual(code, 2, output)
        self.assertEqual(len(re.findall(f"^error: {error}", output, re.M)), 1, output)
        self.assertNotIn("loss ", output)

    def fresh_places(self):
        self.places = [self.path("here"), self.path("there")]
        for place in self.places:
            shutil.rmtree(place, ignore_errors=True)
            os.mkdir(place)

    def checkpoint_at(self, place, of, step, to):
        shutil.copytree(self.path(of, f"step_{step:08d}"), os.path.join(self.places[place], to))

    SAME = "expected the same on all ranks, got"

    def test_another_model_on_a_rank_is_an_error(self):
        """each rank has its own disk, and finds a different model under the same path: nothing is trained, and the
        message names both"""
        self.train(1, "one", steps=2, every=1)
        self.train(1, "two", "--seed", "43", steps=2, every=1)
        resume = ["--resume", "1"]
        self.fresh_places()
        for place, of in enumerate(("one", "two")):
            self.checkpoint_at(place, of, 2, "model")
        self.refused_apart(f"--load model: {self.SAME} . files, .* on rank 1 and . files, .* on rank 0",
                           "--load", "model")
        for place, of in enumerate(("one", "two")):
            self.checkpoint_at(place, of, 1, "run/step_00000001")
        self.refused_apart(f"--resume run/step_00000001: {self.SAME} . files, .* on rank 1", *resume)
        # another newest checkpoint: of a --load directory, and of --resume, which rank 0 chooses
        for place, step in enumerate((1, 2)):
            self.checkpoint_at(place, "one", step, f"newest/step_{step:08d}")
        self.refused_apart(f"--load newest/step_0000000.: {self.SAME} . files, .* on rank 1", "--load", "newest")
        shutil.rmtree(os.path.join(self.places[1], "run"))
        self.checkpoint_at(1, "one", 2, "run/step_00000002")
        self.refused_apart(f"--resume run/step_00000001: {self.SAME} 0 files, .* on rank 1", *resume)

    def test_another_content_on_a_rank_is_an_error(self):
        """under the same manifest, a bit of the weights or of the state is another one"""
        self.train(1, "one", steps=2, every=1)
        for name, before in ("state.json", b'"updates": 1'), ("model.safetensors", None):
            self.fresh_places()
            for place in 0, 1:
                self.checkpoint_at(place, "one", 1, "run/step_00000001")
            path = os.path.join(self.places[1], "run", "step_00000001", name)
            data = bytearray(read_bytes(path))
            data[data.index(before) + len(before) - 1 if before else -5] ^= 1
            self.write(path, bytes(data))
            self.refused_apart("--resume run/step_00000001: " + self.SAME, "--resume", "1")

    def test_another_program_or_directory_on_a_rank_is_an_error(self):
        """before anything is trained, though nothing is saved for five steps"""
        self.fresh_places()
        self.refused_apart("--out run: rank 1 cannot write there, or cannot read what rank 0 has written", *TIMED)
        other = self.executable("other", read_bytes(TRAINER) + b"#")
        self.refused_apart(f"the program: {self.SAME} a file of .* bytes, checksum .* on rank 1 and a file of ",
                           commands=lambda command: [command, [other, *command[1:]]])

    def test_a_job_of_slurm_goes_on_where_it_was_stopped(self):
        """scripts/multi_node/slurm.sbatch: srun is a script that sends SIGUSR1 to the ranks once they have saved"""
        script = os.path.join(ROOT, "scripts", "multi_node", "slurm.sbatch")
        tools, out = self.path("tools"), self.path("job")
        srun = f"""#!/bin/sh
            echo "$@" >>{tools}/calls
            while [ "$1" != {TRAINER} ]; do shift; done
            saved=$(ls {out} | grep step_ | tail -n 1)
            {" ".join(mpirun(2))} "$@" & pid=$!
            while kill -0 $pid && [ "$(ls {out} | grep step_ | tail -n 1)" = "$saved" ]; do sleep 0.1; done
            kill -USR1 $pid
            wait $pid; code=$?
            exit ${{ENDS:-$code}}
            """
        self.executable("tools/srun", srun)
        self.shell("tools/scontrol", f"echo scontrol \"$@\" >>{tools}/calls\n")
        environment = dict(ENVIRONMENT, SLURM_JOB_ID="77", PATH=tools + ":" + os.environ["PATH"])
        words = ["bash", script, *self.command("job", steps=100000, every=10)]
        for attempt in 1, 2:
            p = subprocess.run(words, env=environment, timeout=LIMIT, **PIPES)
            self.assertEqual(p.returncode, 0, p.stdout)
            self.assertEqual("resumed from" in p.stdout, attempt == 2, p.stdout)
        p = subprocess.run(words, env=dict(environment, ENDS="5"), timeout=LIMIT, **PIPES)
        self.assertEqual(p.returncode, 5, p.stdout)
        calls = self.read("tools/calls").split("\n")
        self.assertEqual(calls.count("scontrol requeue 77"), 2, calls)
        self.assertTrue(calls[0].startswith("-K1 --mpi=pmix --cpu-bind=none --cpus-per-task=1 " + TRAINER), calls)
        p = subprocess.run(["bash", script], env=environment, **PIPES)
        self.assertEqual(p.returncode, 2, p.stdout)
        self.assertTrue(p.stdout.endswith("(`srun --mpi=list`).\n"), p.stdout)

    def test_a_rank_that_mpi_does_not_let_go(self):
        stuck = preloaded(self.folder, "stuck", "#include <unistd.h>\n"
                          "int MPI_Finalize(void) { return (int)sleep(600); }\n")
        code, output = self.run_on(2, *stuck, *self.command("stuck", *TIMED, steps=1))
        self.assertEqual(code, 5, output)
        self.assertIn("error: MPI_Init or MPI_Finalize: the other ranks did not appear in time", output)
        self.assertTrue(os.path.isdir(self.path("stuck", "step_00000001")), output)

    def test_the_others_never_start(self):
        begin = time.monotonic()
        command = self.command("start", *TIMED)
        words = [*mpirun(1), *command, ":", "-np", "1", "sleep", "60"]
        p = subprocess.run(words, env=ENVIRONMENT, timeout=LIMIT, **PIPES)
        self.assertEqual(p.returncode, 5, p.stdout)
        self.assertIn("MPI_Init", p.stdout)
        self.assertLess(time.monotonic() - begin, DEADLINE + 2 * SOON)


def bytes_of(directory, *ends):
    """{name: bytes} of a directory's files with these ends"""
    return {name: read_bytes(directory, name) for name in sorted(os.listdir(directory)) if name.endswith(ends)}


def write_hellaswag(path, examples, seed=1):
    """llm.c's file, of random bytes: contexts of 1 to 30 tokens, endings of 1 to 12"""
    random_ = random.Random(seed)
    bodies = []
    for _ in range(min(examples, 100)):                 # many examples are these again
        texts = [random_.choices(range(256), k=random_.randint(1, most)) for most in (30, 12, 12, 12, 12)]
        body = struct.pack("<2H", random_.randrange(4), 4)
        bodies.append(body + b"".join(struct.pack(f"<{len(text) + 1}H", len(text), *text) for text in texts))
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240522, 1, examples, *[0] * 253))
        for e in range(examples):
            body = bodies[e % len(bodies)]
            f.write(struct.pack("<3H", 65535, 6 + len(body), e & 0xffff) + body)


WITHOUT_BERT = WITHOUT_TRAINER or why_not(BERT_TRAINER)


@unittest.skipIf(WITHOUT_BERT, WITHOUT_BERT)
class Sharing(Runs):
    """what the ranks of one run share in addition to training; and train_bert in every mode"""

    def setUp(self):
        super().setUp()
        self.words = read(self.text).split()

    def lines(self, name, count, seed, most=12):
        """a file of `count` different lines of words, of very different lengths"""
        random_ = random.Random(seed)
        texts = [" ".join([str(n)] + random_.choices(self.words, k=random_.randint(1, most))) for n in range(count)]
        return self.write(name, "".join(text + "\n" for text in texts)), texts

    def command(self, out, *flags, trainer=TRAINER, steps=2, every=2, T=32, samples=8, val="text.txt"):
        return [trainer, "--train_files", self.text, "--val_files", self.path(val), "--model", "2,4,96", "--T", str(T),
                "--B", "1", "--total_batch", str(T * samples), "--steps", str(steps), "--lr", "1e-2", "--warmup", "1",
                "--schedule", "constant", "--checkpoint_every", str(every), "--out", self.path(out), *flags]

    def log(self, out, *kinds):
        """what log.jsonl says, without times"""
        records = map(json.loads, self.read(out, "log.jsonl").splitlines())
        found = [{k: v for k, v in r.items() if k not in ("ms", "tok_per_s", "mem", "time")}
                 for r in records if r["kind"] in kinds]
        self.assertEqual({r["kind"] for r in found}, set(kinds))
        return found

    def checkpoint(self, out, step):
        return tensors_of(self.path(out, f"step_{step:08d}"))

    def assert_same_files(self, a, b):
        self.assertEqual(list(a), list(b))
        for name in a:
            self.assertTrue(a[name] == b[name], f"{name} differs")

    def test_hellaswag_and_long_evaluation(self):
        """every score of every ending, during training and of a checkpoint, and every position's loss"""
        examples = 23
        write_hellaswag(self.path("h.bin"), examples)
        hellaswag = ["--hellaswag", self.path("h.bin")]
        trained, found = {}, {}
        for ranks in 1, 2, 4:
            out = f"swag{ranks}"
            self.train(ranks, out, "--val_every", "2", "--val_batches", "5", "--sample_every", "0", *hellaswag, T=48)
            trained[ranks] = self.log(out, "val", "hellaswag", "train")
        for ranks in 1, 2, 3:
            out = f"use{ranks}"
            output = self.run_ok(ranks, TRAINER, "--load", self.path("swag1", "step_00000002"),
                                 "--val_files", self.text, "--T", "48", "--B", "5", "--out", self.path(out),
                                 "--eval_lengths", "16,48,200", "--eval_tokens", "20000", "--curve", "--stride", "11",
                                 "--token_losses", *hellaswag)
            tables = [line for line in output.splitlines() if re.match(r"HellaSwag: |.*positions| +\d+ +\d+ ", line)]
            self.assertEqual(len(tables), 1 + 3 + 3 * 8, output)
            records = self.log(out, "hellaswag_example", "hellaswag", "extrapolation", "curve")
            self.assertEqual(len(records), examples + 1 + 3 + 3)
            losses = [read_bytes(self.path(out, f"token_losses_{T}_11.safetensors")) for T in (16, 48, 200)]
            self.assertGreater(min(map(len, losses)), 4 * 10000)
            found[ranks] = tables, records, losses
        for results in trained, found:
            first, *others = results.values()
            for other in others:
                self.assertEqual(other, first)
        self.assertGreater(len({tuple(r["nll"]) for r in found[1][1] if r["kind"] == "hellaswag_example"}), 20)

    def test_tasks(self):
        """every file: the ranks share its batches, which may be fewer than the ranks"""
        tasks = self.path("tasks")
        subprocess.run([sys.executable, os.path.join(ROOT, "data", "tasks.py"), "--out", tasks, "--tasks", "reverse",
                        "--length", "10", "--examples", "2000", "--test_examples", "300"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        train = os.path.join(tasks, "reverse_train.bin")
        self.run_ok(1, TRAINER, "--train_files", train, "--model", "2,2,32", "--T", "22", "--B", "16", "--steps", "30",
                    "--lr", "1e-2", "--val_every", "0", "--sample_every", "0", "--checkpoint_every", "30", "--out",
                    self.path("reverses"))
        load = [TRAINER, "--load", self.path("reverses", "step_00000030"), "--T", "22", "--tasks",
                os.path.join(tasks, "reverse_test_*.bin")]
        found = {}
        for ranks in 1, 2, 3:
            output = self.run_ok(ranks, *load, "--out", self.path(f"asked{ranks}"))
            tables = [line for line in output.splitlines() if re.match(r"reverse_test_\d+\.bin +\d", line)]
            found[ranks] = tables, self.log(f"asked{ranks}", "task")
            self.assertEqual(len(tables), 4, output)
        records = found[1][1]
        self.assertEqual([r["examples"] for r in records], 4 * [300])
        self.assertEqual(len({r["loss"] for r in records}), 4)
        self.assertTrue(any(0 < r["accuracy"] < 1 for r in records))
        for ranks in 2, 3:
            self.assertEqual(found[ranks], found[1], ranks)

    def test_a_signal_amid_an_evaluation(self):
        """Each evaluation takes minutes, and one rank gets the signal: all leave it, and what it would have said is not
        logged. They run at the same time, as each shows only after ten seconds where it is."""
        self.write("long.txt", " ".join(random.Random(6).choices(self.words, k=100000)) * 100)
        write_hellaswag(self.path("long.bin"), 60000)
        for out in "validation", "hellaswag", "use":
            self.train(1, out, "--val_every", "0", "--sample_every", "0", samples=12)

        def resumed(out, *flags):
            return self.command(out, "--resume", "1", "--sample_every", "0", "--val_batches", *flags, samples=12,
                                steps=2, val="long.txt")

        load = ["--load", self.path("use", "step_00000002"), "--val_files", self.path("long.txt")]
        long, after = "evaluating at T = 32", "after the last step"
        cases = [(2, long, after, "val", resumed("validation", "-1", "--val_every", "2")),
                 (2, "HellaSwag", after, "hellaswag",
                  resumed("hellaswag", "1", "--val_every", "2", "--hellaswag", self.path("long.bin"))),
                 (2, long, after, "extrapolation", resumed("use", "1", "--val_every", "0", "--eval_lengths", "32")),
                 (2, long, None, None, [TRAINER, *load, "--T", "32", "--eval_lengths", "32"])]
        with contextlib.ExitStack() as runs:
            begun = [runs.enter_context(self.started(case[0], *case[-1])) for case in cases]
            for (_, shown, _, _, _), (_, _, until, _) in zip(cases, begun):
                until(lambda text: shown in text)
            for (ranks, _, where, kind, command), (_, pids, _, end) in zip(cases, begun):
                with self.subTest(kind=kind):
                    os.kill(pids[ranks - 1], signal.SIGTERM)
                    code, output, seconds = end()
                    if where is None:           # without training there is nothing to save
                        self.assertNotEqual(code, 0, output)
                        self.assertLess(seconds, SOON)
                        continue
                    self.assertEqual(code, 75, output)
                    self.assertIn(f"stopped by signal {int(signal.SIGTERM)} {where}; continue with --resume 1", output)
                    log = read(command[command.index("--out") + 1], "log.jsonl")
                    self.assertNotIn(f'"kind":"{kind}"', log.replace(" ", ""))

    def bert(self, ranks, out, *flags, **more):
        """masked bytes: 8 samples, in 8, 4 or 2 micro-batches per rank"""
        return self.train(ranks, out, "--val_every", "3", "--val_batches", "3", *flags, trainer=BERT_TRAINER, **more)

    def test_masked_training(self):
        """and what a run writes that is resumed on another number of ranks"""
        for ranks in 1, 2, 4:
            self.bert(ranks, f"mlm{ranks}", steps=6, every=3)
        for before, after in (1, 2), (4, 1):
            out = f"mlm{before}_{after}"
            self.bert(before, out, steps=3, every=3)
            output = self.bert(after, out, "--resume", "1", "--allow_change", "steps", steps=6, every=3)
            self.assertIn("step_00000003", output)
        for out in "mlm2", "mlm4", "mlm1_2", "mlm4_1":
            with self.subTest(out=out):
                self.assert_same_files(self.checkpoint("mlm1", 6), self.checkpoint(out, 6))
                if "_" not in out:
                    self.assertEqual(self.log("mlm1", "train", "val"), self.log(out, "train", "val"))

    def pairs(self, ranks, out, *flags, samples=8, steps=3, texts=2, **more):
        """groups of two texts, each a micro-batch: 16 of them, or 8 or 4 per rank"""
        lines = [self.lines(f"texts{i}.txt", 200, i)[1] for i in range(texts)]
        pairs = self.write(f"groups{texts}.txt", "".join("\t".join(group) + "\n" for group in zip(*lines)))
        return self.train(ranks, out, "--pairs", pairs, "--val_every", "0", *flags, trainer=BERT_TRAINER, steps=steps,
                          every=3, samples=samples, **more)

    def test_contrastive_training(self):
        """the loss of a query sees the texts of all ranks"""
        for ranks in 1, 2, 4:
            self.pairs(ranks, f"pairs{ranks}", steps=6)
        # 12 micro-batches, a leaf of 4 on each of three ranks, with which one rank continues
        six = {"samples": 6, "steps": 6}
        self.pairs(3, "six3", "--pooling", "cls", **six)
        shutil.copytree(self.path("six3"), self.path("six1"))
        shutil.rmtree(self.path("six1", "step_00000006"))
        self.pairs(1, "six1", "--pooling", "cls", "--resume", "1", **six)
        for ranks in 1, 2:                              # 24 micro-batches, 3 to a leaf
            self.pairs(ranks, f"negative{ranks}", texts=3)
        self.pairs(4, "pairs4_2")
        output = self.pairs(2, "pairs4_2", "--resume", "1", "--allow_change", "steps", steps=6)
        self.assertIn("step_00000003", output)
        for a, b, step in (("pairs1", "pairs2", 6), ("pairs1", "pairs4", 6), ("six1", "six3", 6),
                           ("negative1", "negative2", 3), ("pairs1", "pairs4_2", 6)):
            with self.subTest(a=a, b=b):
                self.assert_same_files(self.checkpoint(a, step), self.checkpoint(b, step))
                if "_" not in b:
                    self.assertEqual(self.log(a, "train"), self.log(b, "train"))
        code, output = self.run_on(2, BERT_TRAINER, "--pairs", self.path("groups2.txt"), "--model", "2,2,32", "--T",
                                   "32", "--B", "2", "--total_batch", "96", "--steps", "1", "--val_every", "0")
        self.assertEqual(code, 2, output)
        self.assertIn("--total_batch 96 x 2 texts: not a multiple of --B x --T = 2 x 32 x 2 ranks = 128 tokens", output)

    def test_embeddings_and_predictions(self):
        """of documents that make some twenty batches, which 3 ranks do not divide"""
        self.bert(1, "base", steps=3, every=3)
        use = [BERT_TRAINER, "--load", self.path("base", "step_00000003"), "--T", "64"]
        documents, _ = self.lines("documents.txt", 700, 3, most=60)
        found = {}
        for ranks in 1, 2, 3:
            encoded = self.path(f"encoded{ranks}")
            output = self.run_ok(ranks, *use, "--encode", documents, "--out", encoded, "--predict",
                                 "the [MASK]oftware is [MASK]")
            found[ranks] = [line for line in output.splitlines() if "[MASK]" in line]
            self.assertEqual(len(found[ranks]), 3, output)
            files = bytes_of(encoded, ".safetensors", ".ids")
            self.assertEqual(list(files), ["embeddings.ids", "embeddings.safetensors"])
            self.assert_same_files(bytes_of(self.path("encoded1"), ".safetensors", ".ids"), files)
        self.assertEqual(found[2], found[1])
        self.assertEqual(found[3], found[1])
        for ranks in 1, 3:
            self.run_ok(ranks, *use, "--encode", documents, "--encode_piece", "16", "--out",
                        self.path(f"pieces{ranks}"))
        self.assert_same_files(*(bytes_of(self.path(f"pieces{ranks}"), ".safetensors", ".ids") for ranks in (1, 3)))
        for ranks in 1, 2:
            self.train(ranks, f"student{ranks}", "--pairs", documents, "--distill", self.path("encoded1"), "--pos",
                       "none", "--val_every", "0", trainer=BERT_TRAINER, steps=3, every=3, samples=8)
        self.assert_same_files(self.checkpoint("student1", 3), self.checkpoint("student2", 3))
        begin = time.monotonic()                        # only one rank writes, to a slow disk
        self.run_ok(2, *slow_disk(self.folder, SLOW), *use, "--encode", documents, "--out", self.path("slow"),
                    *TIMED)
        self.assertGreater(time.monotonic() - begin, SLOW, "the disk was not slow")
        self.assert_same_files(bytes_of(self.path("encoded1"), ".safetensors", ".ids"),
                               bytes_of(self.path("slow"), ".safetensors", ".ids"))

    def test_what_ranks_cannot_share(self):
        for flags in (["--generate", "a"], ["--dump_bias", "0,0,a", "--out", self.path("nowhere")]):
            code, output = self.run_on(2, TRAINER, "--load", "x", *flags)
            self.assertEqual(code, 2, output)
            self.assertEqual(output.count("error: --generate, --dump_bias: expected one process, got 2: "), 1, output)
        self.bert(1, "refusing", steps=1, every=1)
        self.write("there/c.txt", read(self.lines("c.txt", 9, 7)[0]) + "one more\n")
        command = [BERT_TRAINER, "--load", self.path("refusing", "step_00000001"), "--T", "64", "--encode",
                   "c.txt", "--out", self.path("nowhere")]
        code, output = apart([command, command], [self.folder, self.path("there")])
        self.assertEqual(code, 2, output)
        self.assertRegex(output, "error: --encode: expected the same on all ranks, got 1 files, .* on rank 1")
        self.assertFalse(os.path.exists(self.path("nowhere")))


if __name__ == "__main__":
    unittest.main()
