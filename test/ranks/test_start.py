"""test_start.py -- runs of several ranks not started by mpirun: by torchrun or srun without PMI, which are here
the variables that they set, or by --ranks N. Builds with and without MPI.

As in test_ranks.py, bits are compared, and a run must end within 10 s of a death and 5 s of a deadline."""
import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest
import unittest.mock

import test_ranks
from test_ranks import (AFTER_DEADLINE, AFTER_DEATH, COMM_ALONE, COMM_PROGRAM, ENVIRONMENT, LIMIT, PIPES, ROOT,
                        SIMT_TRAINER, TRAINER, alive)

TORCHRUN = shutil.which("torchrun")


def free_port():
    """torchrun's MASTER_PORT: the ranks take the one after it"""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        if port > 1025:
            return port - 1


def torchrun(ranks, rank, port, **more):
    return {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "7", **more}


def pod(ranks, rank, port, **more):
    """of Kubernetes, which says nothing of local ranks"""
    return {k: v for k, v in torchrun(ranks, rank, port, **more).items() if "LOCAL" not in k and "ELASTIC" not in k}


def srun(ranks, rank, port, **more):
    """port: the job's number is made from it; the step has two nodes of one name, so that it is looked up"""
    return {"SLURM_STEP_NUM_TASKS": ranks, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": 1, "SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NODELIST": "localhost,elsewhere[1-3]", **more}


@contextlib.contextmanager
def started(kind, ranks, *command, timeout=600, **more):
    """the processes that a launcher starts, and a function that returns [(exit code, output, seconds)] of some of them;
    ranks: their number, or the variables of those that do start"""
    port = free_port()
    variables = ranks if isinstance(ranks, list) else [kind(ranks, rank, port, **more) for rank in range(ranks)]
    with contextlib.ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in variables]
        begin = time.monotonic()
        runs = []
        for v, log in zip(variables, logs):
            environment = dict(ENVIRONMENT, TIMEOUT=str(timeout), **{k: str(value) for k, value in v.items()})
            runs.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

        def end(which=None):
            results = []
            for p, log in zip(runs, logs):
                if which is not None and runs.index(p) not in which:
                    continue
                code = p.wait(LIMIT)
                log.seek(0)
                results.append((code, log.read(), time.monotonic() - begin))
            return results

        def until(text):
            """every rank has said this"""
            deadline = time.monotonic() + LIMIT
            for log in logs:
                while log.seek(0) or text not in log.read():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

        try:
            yield runs, until, end
        finally:
            for p in runs:
                p.kill()
                p.wait()


def connect(s, port, address="127.0.0.1"):
    """waits until somebody listens there"""
    deadline = time.monotonic() + LIMIT
    while s.connect_ex((address, port)) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def outputs(results):
    return [(code, text) for code, text, _ in results]


def errors(results):
    return re.findall("^error: .*", "\n".join(text for _, text, _ in results), re.M)


@unittest.skipUnless(os.path.exists(COMM_ALONE), "SKIPPED: build/comm_program_alone is not built")
class Launchers(unittest.TestCase):
    torchrun = None

    @classmethod
    def setUpClass(cls):
        """torchrun takes ten seconds to start, during which the other tests run"""
        if TORCHRUN:
            words = [TORCHRUN, "--no_python", "-r", "1", "-t", "1", "--nproc_per_node", "3",
                     "--master_port", str(free_port()), COMM_ALONE, "small"]
            cls.torchrun = subprocess.Popen(words, env=ENVIRONMENT, **PIPES)

    def test_sums_and_the_small_collectives(self):
        for kind, program, ranks, mode in ((torchrun, COMM_ALONE, 8, "small"), (torchrun, COMM_ALONE, 4, "sums"),
                                           (srun, COMM_PROGRAM, 3, "small"), (srun, COMM_PROGRAM, 3, "sums"),
                                           (pod, COMM_ALONE, 2, "small")):
            with self.subTest(kind=kind, ranks=ranks), started(kind, ranks, program, mode) as (_, _, end):
                first = (0, f"{ranks} ranks, gradients by TCP\nok\n")
                self.assertEqual(outputs(end()), [first] + [(0, "")] * (ranks - 1))

    @unittest.skipUnless(TORCHRUN, "SKIPPED: there is no torchrun; dev/install.sh bench")
    def test_the_real_torchrun(self):
        output = self.torchrun.communicate(timeout=LIMIT)[0]
        self.assertEqual(self.torchrun.returncode, 0, output)
        self.assertEqual(re.findall(r"\bok$|3 ranks.*$", output, re.M), ["3 ranks, gradients by TCP", "ok"])

    def test_a_launcher_that_cannot_be_served_is_refused_once(self):
        """never N trainings that each take themselves for the only one; and the line that is printed works"""
        cases = [("torchrun", torchrun, "MASTER_PORT"), ("srun", srun, "SLURM_JOB_ID")]
        cases = [(name, [dict(kind(3, r, 1234), SLURM_STEP_NUM_NODES="3", **{missing: ""}) for r in range(3)])
                 for name, kind, missing in cases]
        cases.append(("mpirun", [{"OMPI_COMM_WORLD_SIZE": 3, "OMPI_COMM_WORLD_RANK": r} for r in range(3)]))
        for name, variables in cases:
            with self.subTest(name=name), started(None, variables, COMM_ALONE, "small", "it's") as (_, _, end):
                results = outputs(end())
                self.assertEqual([code for code, _ in results], [2, 2, 2], results)
                self.assertEqual([bool(text) for _, text in results], [True, False, False], results)
                self.assertRegex(results[0][1], f"^error: {name} started 3 processes, each of which would train alone")
                self.assertNotIn("ok", results[0][1])
                line = re.search("type: (.*?), on several", results[0][1]).group(1)
                p = subprocess.run(line, shell=True, env=ENVIRONMENT, timeout=LIMIT, **PIPES)
                self.assertEqual((p.returncode, p.stdout.split("\n", 1)[1]), (0, "3 ranks, gradients by TCP\nok\n"))

    def test_the_exit_codes(self):
        for words, codes, wanted in ((["exit", "1", "75"], [75] * 3, None),
                                     (["throw", "all"], [2] * 3, "a mistake of all"),
                                     (["throw", "0"], [4] * 3, "a mistake of one"),
                                     (["throw", "2"], [4] * 3, "rank 2: a mistake of one")):
            with self.subTest(words=words), started(torchrun, 3, COMM_ALONE, *words) as (_, _, end):
                results = end()
                self.assertEqual([code for code, _, _ in results], codes, results)
                found = errors(results)
                self.assertEqual(len(found), wanted is not None, found)
                if wanted:
                    self.assertTrue(found[0].startswith("error: " + wanted), found)

    def test_a_dead_rank_is_named(self):
        for ranks, victim, mode in (2, 1, "wait"), (4, 0, "wait"), (4, 2, "wait"), (3, 1, "work"):
            with self.subTest(ranks=ranks, victim=victim, mode=mode), \
                    started(torchrun, ranks, COMM_ALONE, mode, "600") as (runs, until, end):
                until("is process")
                runs[victim].kill()
                begin = time.monotonic()
                results = end()
                self.assertLess(time.monotonic() - begin, AFTER_DEATH)
                self.assertEqual([code for code, _, _ in results], [-9 if r == victim else 5 for r in range(ranks)])
                self.assertTrue(errors(results))        # on a slow machine more than one rank may say so
                for error in errors(results):
                    self.assertRegex(error, f"(sum of the gradients|stop signals|own work): rank . *: rank {victim} is "
                                            "gone")

    def test_a_rank_that_hangs_is_named(self):
        with contextlib.ExitStack() as stack:           # both at the same time
            cases = [(ranks, victim, *stack.enter_context(started(torchrun, ranks, COMM_ALONE, "wait", "2")))
                     for ranks, victim in ((2, 0), (4, 2))]
            for _, _, _, until, _ in cases:
                until("is process")
            begin = time.monotonic()
            for _, victim, runs, _, _ in cases:
                runs[victim].send_signal(signal.SIGSTOP)
            for ranks, victim, _, _, end in cases:
                results = end([r for r in range(ranks) if r != victim])
                self.assertTrue(1 < time.monotonic() - begin < 2 + AFTER_DEADLINE)
                self.assertEqual([code for code, _, _ in results], [5] * (ranks - 1), results)
                self.assertTrue(errors(results))
                for error in errors(results):
                    self.assertRegex(error, f"(sum of the gradients|stop signals): rank . waited 2 s for rank {victim}")

    def test_a_pause_ends_nothing(self):
        with started(torchrun, 3, COMM_ALONE, "wait", "3") as (runs, until, _):
            until("is process")
            for victims, pause in (runs[1:2], 1), (runs, 3.5):
                for p in victims:
                    p.send_signal(signal.SIGSTOP)
                time.sleep(pause)
                for p in victims:
                    p.send_signal(signal.SIGCONT)
                time.sleep(0.5)
                self.assertTrue(all(p.poll() is None for p in runs))

    def test_a_rank_that_never_comes_is_named(self):
        with contextlib.ExitStack() as stack:           # both at the same time
            cases = []
            for kind, missing in (torchrun, 2), (srun, 0):
                port = free_port()
                variables = [kind(3, rank, port) for rank in range(3) if rank != missing]
                few = "prlimit", "--nofile=32"          # about 100 attempts to connect must leave none open
                run = stack.enter_context(started(kind, variables, *few, COMM_ALONE, "small", timeout=2))
                cases.append((missing, run[2]))
            for missing, end in cases:
                results = end()
                self.assertEqual([code for code, _, _ in results], [5, 5], results)
                self.assertLess(max(seconds for _, _, seconds in results), 2 + 2 * AFTER_DEADLINE)
                if missing == 2:
                    found = errors(results)
                    self.assertEqual(len(found), 1, found)
                    self.assertIn("start: rank 0 waited 2 s for rank 2 (--collective_timeout)", found[0])
                else:
                    self.assertRegex(results[0][1], r"start: rank 1 waited 2 s for rank 0 at localhost:\d+ \(Connect")

    def test_strangers_are_refused(self):
        """refuses a rank of another run, of another size, and other programs; and the run continues"""
        port = free_port()
        rank = lambda r, size=2, **more: torchrun(size, r, port, **more)
        with started(torchrun, [rank(0)], COMM_ALONE, "small", timeout=60) as (_, _, end):
            strangers = [socket.socket() for _ in range(2)]
            for s in strangers:
                connect(s, port + 1)
            strangers[0].sendall(b"GET / HTTP/1.1\r\n" * 100)                 # the other one says nothing
            for variables, error in (
                    (rank(1, TORCHELASTIC_RUN_ID="8"), "expected a rank of torchrun 7 at .* with 2 ranks, "
                                                       "got one of torchrun 8 at .* with 2 ranks"),
                    (rank(2, size=3), ".* with 2 ranks, got one of torchrun 7 .* with 3 ranks")):
                with started(None, [variables], COMM_ALONE, "small", timeout=60) as (_, _, refused):
                    code, text, _ = refused()[0]
                self.assertEqual(code, 2, text)
                self.assertRegex(text, f"^error: .*rank 0 at 127.0.0.1:{port + 1} refuses this one: {error}")
            with started(None, [rank(1)], COMM_ALONE, "small") as (_, _, other):
                self.assertEqual(outputs(other()), [(0, "")])
            code, text, _ = end()[0]
            self.assertEqual((code, text.count("refused a connection from this machine")), (0, 3), text)
            self.assertIn("2 ranks, gradients by TCP\nok\n", text)
            for s in strangers:
                s.close()

    def test_strangers_learn_nothing(self):
        """and are refused: one without the secret, one that repeats what it has heard of another
        rank, and one that listens in place of rank 0"""
        port, secret = free_port(), "ba5e" * 8
        hello = struct.Struct("64s32s96sQQiiii")
        with started(torchrun, [torchrun(2, 0, port, CABLE_SECRET=secret)], COMM_ALONE, "small") as (_, _, end):
            def call(proof):
                """what rank 0 answers, and the number that it has drawn"""
                s = socket.socket()
                self.addCleanup(s.close)
                connect(s, port + 1)
                greeting = s.recv(48, socket.MSG_WAITALL)
                self.assertEqual(greeting[:16].rstrip(b"\0"), b"cable.c ranks 2")
                s.sendall(hello.pack(proof(greeting[16:]), b"0" * 32, b"run", 0, 0, 2, 1, 1, 0))
                return s.recv(512, socket.MSG_WAITALL), greeting[16:]

            def known(drawn):
                return hashlib.sha256(secret.encode() + drawn).hexdigest().encode()

            answer, heard = call(lambda drawn: b"")
            repeated, drawn = call(lambda drawn: known(heard))
            for a in answer, repeated:
                self.assertIn(b"expected a rank that knows the run's secret", a)
                self.assertEqual((a[:64], b"torchrun" in a or secret.encode() in a), (bytes(64), False), a)
            self.assertNotEqual(heard, drawn)
            self.assertIn(b"expected a rank of torchrun 7", call(known)[0])     # only now is the run named
            for other in {}, {"CABLE_SECRET": secret[:-1] + "f"}:
                with started(None, [torchrun(2, 1, port, **other)], COMM_ALONE, "small") as (_, _, refused):
                    code, text, _ = refused()[0]
                self.assertEqual(code, 2, text)
                self.assertIn("refuses this one: expected a rank that knows the run's secret", text)
            with started(None, [torchrun(2, 1, port, CABLE_SECRET=secret)], COMM_ALONE, "small") as (_, _, other):
                self.assertEqual(outputs(other()), [(0, "")])
            code, text, _ = end()[0]
            self.assertEqual((code, secret in text), (0, False), text)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            variables = [torchrun(2, 1, s.getsockname()[1] - 1, CABLE_SECRET=secret)]
            with started(None, variables, COMM_ALONE, "small") as (_, _, end):
                rank = s.accept()[0]
                rank.sendall(b"cable.c ranks 2\0" + b"0" * 32)
                rank.recv(hello.size, socket.MSG_WAITALL)
                rank.sendall(bytes(512))                    # welcome
                code, text, _ = end()[0]
                rank.close()
            self.assertEqual(code, 2, text)
            self.assertIn("it does not know the run's secret", text)

    def test_a_secret_is_wanted_where_strangers_could_come(self):
        for secret in {}, {"CABLE_SECRET": "short"}:
            variables = [torchrun(2, r, 1234, MASTER_ADDR="node.invalid", **secret) for r in range(2)]
            with started(None, variables, COMM_ALONE, "small") as (_, _, end):
                results = end()
            self.assertEqual([code for code, _, _ in results], [2, 2], results)
            self.assertEqual(len(errors(results)), 1, results)
            self.assertIn("strangers could join the ranks at node.invalid: give them all a secret", errors(results)[0])

    def test_the_address_where_a_rank_listens(self):
        """is MASTER_ADDR, and no other one of the machine"""
        port = free_port()
        with started(torchrun, [torchrun(2, 0, port, MASTER_ADDR="127.0.0.2")], COMM_ALONE, "small") as (_, _, end):
            with socket.socket() as s:
                connect(s, port + 1, "127.0.0.2")
            with socket.socket() as s:
                self.assertNotEqual(s.connect_ex(("127.0.0.1", port + 1)), 0)
            with started(None, [torchrun(2, 1, port, MASTER_ADDR="127.0.0.2")], COMM_ALONE, "small") as (_, _, other):
                self.assertEqual(outputs(other()), [(0, "")])
            self.assertEqual(end()[0][0], 0)

    def test_a_port_that_is_taken(self):
        """ends all ranks, though --collective_timeout has ten minutes left"""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            variables = [torchrun(2, r, s.getsockname()[1] - 1) for r in range(2)]
            with started(None, variables, COMM_ALONE, "small") as (_, _, end):
                (code, text, _), (other_code, other_text, seconds) = end()
        self.assertEqual((code, other_code), (2, 2), text + other_text)
        self.assertIn("start: rank 0 cannot listen at port", text)
        self.assertIn("got no greeting: another program", other_text)
        self.assertLess(seconds, 10 + AFTER_DEATH)


def multiplied(ranks, *command):
    """exit code and output of a program that multiplies itself"""
    p = subprocess.run([*command, "--ranks", str(ranks)], env=ENVIRONMENT, timeout=LIMIT, **PIPES)
    return p.returncode, p.stdout


@unittest.skipUnless(os.path.exists(COMM_ALONE), "SKIPPED: build/comm_program_alone is not built")
class Multiplied(unittest.TestCase):
    def test_more_ranks_than_cores_are_refused(self):
        """before the first of them is started, unless the environment allows it"""
        one_core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        for allowed in "0", "1":
            p = subprocess.run([*one_core, COMM_ALONE, "small", "--ranks", "2"], timeout=LIMIT, **PIPES,
                               env=dict(ENVIRONMENT, CABLE_OVERSUBSCRIBE=allowed))
            self.assertEqual(p.returncode, 2 if allowed == "0" else 0, p.stdout)
            self.assertEqual("the ranks are processes" in p.stdout, allowed == "1", p.stdout)
            self.assertEqual("error: --ranks 2: this machine has 1 core and " in p.stdout, allowed == "0", p.stdout)

    def test_waiting_ranks_sleep(self):
        def switches(pid):
            with open(f"/proc/{pid}/status") as f:
                return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", f.read(), re.M).group(1))

        with test_ranks.started(3, COMM_ALONE, "wait", "600", "--ranks", "3", launcher=[]) as (_, pids, until, _):
            until(lambda text: text.count("is process") == 3)
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(0.2)
            before = [switches(pids[r]) for r in (0, 2)]
            time.sleep(1)
            for rank, b in zip((0, 2), before):
                self.assertLess(switches(pids[rank]) - b, 50)       # it looks up ten times a second

    def test_the_code_of_the_ranks_is_that_of_the_program(self):
        for words, code in (["small"], 0), (["exit", "1", "75"], 75), (["throw", "all"], 2), (["throw", "1"], 4):
            found, text = multiplied(3, COMM_ALONE, *words)
            self.assertEqual(found, code, text)
            self.assertIn("\n3 ranks, gradients by TCP\n", text)
            self.assertEqual(text.count("error:"), int(words[0] == "throw"), text)

    def test_a_dead_rank(self):
        for victim in 0, 2:
            with test_ranks.started(3, COMM_ALONE, "wait", "600", "--ranks", "3", launcher=[]) as (_, pids, until, end):
                until(lambda text: text.count("is process") == 3)
                os.kill(pids[victim], signal.SIGKILL)
                code, text, seconds = end()
                self.assertEqual(code, 128 + 9, text)
                self.assertLess(seconds, AFTER_DEATH)
                self.assertIn(f"rank {victim} (process {pids[victim]}) was ended by signal 9", text)

    def test_a_rank_that_hangs(self):
        """is killed once the other ranks have said that they miss it"""
        with test_ranks.started(3, COMM_ALONE, "wait", "2", "--ranks", "3", launcher=[]) as (_, pids, until, end):
            until(lambda text: text.count("is process") == 3)
            os.kill(pids[1], signal.SIGSTOP)
            code, text, seconds = end()
            self.assertEqual(code, 5, text)
            self.assertLess(seconds, 2 + 2 * AFTER_DEADLINE)
            self.assertRegex(text, "rank . waited 2 s for rank 1 ")
            self.assertFalse(any(map(alive, pids.values())))

    def test_a_dead_parent(self):
        with test_ranks.started(3, COMM_ALONE, "wait", "600", "--ranks", "3", launcher=[]) as (p, pids, until, end):
            until(lambda text: text.count("is process") == 3)
            p.kill()
            self.assertLess(end()[2], AFTER_DEATH)
            self.assertFalse(any(map(alive, pids.values())))


WITHOUT_TRAINER = None if os.path.exists(TRAINER) else "SKIPPED: train_gpt2 is not built"


@unittest.skipIf(WITHOUT_TRAINER, WITHOUT_TRAINER)
class Training(test_ranks.Runs):
    def alone(self, name, *flags, **shape):
        """a run that ends by itself"""
        p = subprocess.run(self.command(name, *flags, **shape), env=ENVIRONMENT, timeout=LIMIT, **PIPES)
        self.assertEqual(p.returncode, 0, p.stdout)
        return p.stdout

    def test_the_same_bits_by_every_launcher(self):
        """also under the name that a shell finds"""
        self.alone("alone")
        words = self.command("two", "--ranks", "2")
        path = os.path.dirname(TRAINER) + ":" + os.environ["PATH"]
        environment = dict(ENVIRONMENT, PATH=path)
        p = subprocess.run([os.path.basename(TRAINER), *words[1:]], env=environment, timeout=LIMIT, **PIPES)
        self.assertEqual(p.returncode, 0, p.stdout)
        self.assertIn("2 ranks, gradients by TCP", p.stdout)
        self.assertEqual(len(re.findall(r"^step +\d+/10 \| loss ", p.stdout, re.M)), 10, p.stdout)
        self.assert_same("alone", "two")
        for kind in torchrun, srun:
            with started(kind, 4, *self.command(kind.__name__)) as (_, _, end):
                self.assertEqual([code for code, _, _ in end()], [0] * 4)
            self.assert_same("alone", kind.__name__)

    @unittest.skipUnless(os.path.exists(test_ranks.BERT_TRAINER), "SKIPPED: train_bert is not built")
    def test_masked_tokens_of_all_ranks(self):
        """each rank has another number of them, and the loss is a mean over all"""
        shape = {"trainer": test_ranks.BERT_TRAINER, "steps": 3, "micro_batches": 4, "every": 3}
        words = self.command("two", "--ranks", "2", **shape), self.command("one", **shape)
        for command in words:
            i = command.index("--sample_every")
            p = subprocess.run(command[:i] + command[i + 2:], env=ENVIRONMENT, timeout=LIMIT, **PIPES)
            self.assertEqual(p.returncode, 0, p.stdout)
        self.assert_same("one", "two", step=3)

    def test_bad_flags_start_nothing(self):
        for flags, count in (["--ranks", "2", "--nonsense", "1"], 1), (["--ranks", "2", "--lr", "x"], 1):
            p = subprocess.run(self.command("bad", *flags), env=ENVIRONMENT, timeout=LIMIT, **PIPES)
            self.assertEqual((p.returncode, p.stdout.count("error:")), (2, count), p.stdout)
        with started(torchrun, 2, *self.command("both", "--ranks", "3")) as (_, _, end):
            results = end()
        self.assertEqual([code for code, _, _ in results], [2, 2], results)
        self.assertRegex(errors(results)[0], "^error: --ranks 3: a launcher has started 2 processes")
        self.assertEqual(len(errors(results)), 1)

    def test_signals(self):
        """to the process that was started: all ranks save, and the exit code says so"""
        for number in signal.SIGTERM, signal.SIGINT, signal.SIGUSR1:
            with self.subTest(number=number):
                name = f"signal{number}"
                code, output, _ = self.interrupted(
                    name, 2, lambda pids: os.kill(pids["mpirun"], number), "--ranks", "2", launcher=[])
                self.assertEqual(code, 75, output)
                step = int(re.search(r"stopped by signal \d+ before step (\d+)", output).group(1)) - 1
                self.assertTrue(os.path.isdir(os.path.join(self.out(name), f"step_{step:08d}")), output)

    @unittest.skipUnless(os.path.exists(SIMT_TRAINER), "SKIPPED: build/simt/train_gpt2_fp32 is not built")
    def test_the_cuda_build_on_the_emulator(self):
        """NCCL's id travels by TCP"""
        self.alone("1", **self.EMULATED)
        with unittest.mock.patch.dict(ENVIRONMENT, SIMT_GPUS="2"):
            output = self.alone("2", "--gpus", "2", **self.EMULATED)
        self.assertIn("2 ranks, gradients by NCCL", " ".join(output.split()))
        self.assert_same("1", "2", step=2)


if __name__ == "__main__":
    unittest.main()
