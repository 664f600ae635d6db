"""test_start.py -- what a trainer inherits and what its machine lacks: closed descriptors, ignored and blocked signals,
file systems without a service, wrong clocks. Each run gives the bits of an ordinary one, or says what is wrong."""
import errno
import fcntl
import os
import re
import signal
import subprocess
import termios
import time
import unittest

from test_ranks import BERT_TRAINER, ENVIRONMENT, LIMIT, ROOT, TRAINER
from folder import ClassFolder, read_bytes

# What changes the disk, by its name in the C library: test/faults.c has to stand before each that a trainer imports.
# Without freopen(), which sends the console of all ranks but the first to /dev/null.
CHANGES = set("""
    open openat creat fopen fdopen mkstemp mkostemp tmpfile write writev pwrite pwritev sendfile splice copy_file_range
    fsync fdatasync sync syncfs sync_file_range msync ftruncate truncate fallocate posix_fallocate close rename renameat
    renameat2 link linkat symlink symlinkat unlink unlinkat rmdir remove mkdir mkdirat chmod fchmod utimensat futimens
    __open_2 __open64_2 __openat_2 syscall""".split())


class Start(ClassFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.library, source = cls.path("faults.so"), os.path.join(ROOT, "test", "faults.c")
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", cls.library, "-ldl"], check=True)
        cls.text = cls.write("t.txt", "some text to learn\n" * 500)
        cls.runs = 0
        cls.ordinary = {trainer: cls.results(*cls.run_of(trainer)[:2]) for trainer in (TRAINER, BERT_TRAINER)}

    @classmethod
    def command(cls, trainer, *flags, steps=4):
        cls.runs += 1
        out = cls.path(f"out{cls.runs}")
        return out, [trainer, "--train_files", cls.text, "--val_every", "0", "--model", "1,2,16", "--T", "16", "--B",
                     "2", "--total_batch", "64", "--steps", str(steps), "--checkpoint_every", str(steps), "--out", out,
                     *flags]

    @classmethod
    def run_of(cls, trainer, *flags, redirections="", faults=(), **how):
        """exit code, --out and stderr of a run; faults: from when on a call has a fault, as test/faults.c says"""
        out, words = cls.command(trainer, *flags)
        shell = ["sh", "-c", f'exec "$@" {redirections}', "sh"]
        planted = " ".join(f"{call}:1:{what}:always" for call, what in faults)
        preload = ["env", f"LD_PRELOAD={cls.library}", f"FAULTS={planted}"] if faults else []
        p = subprocess.run([*shell, *preload, *words], env=ENVIRONMENT, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LIMIT, **how)
        for call, _ in faults:
            assert f"FAULTS: {call} number 1, " in p.stderr, f"{planted}: {p.stderr}"
        return p.returncode, out, p.stderr

    @classmethod
    def results(cls, code, out):
        """the model and main.log of a run that has ended well"""
        assert code == 0, code
        kinds = re.findall('"kind":"([^"]*)"', cls.read(out, "log.jsonl"))
        assert kinds == ["config"] + 4 * ["train"], kinds
        return [read_bytes(out, name) for name in ("step_00000004/model.safetensors", "main.log")]

    def test_closed_descriptors(self):
        """the lowest free descriptor is the next file's: no log gets the console's text, ranks keep their sockets"""
        for trainer, ordinary in self.ordinary.items():
            for ranks in "1", "2":
                for closed in "<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-":
                    with self.subTest(trainer=trainer, ranks=ranks, closed=closed):
                        code, out, _ = self.run_of(trainer, "--ranks", ranks, redirections=closed)
                        self.assertEqual(self.results(code, out), ordinary)
        _, out, _ = self.run_of(TRAINER)
        for use in ["--generate", "some"], ["--val_files", self.text, "--eval_lengths", "16"]:
            p = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", TRAINER, "--load", out, *use], env=ENVIRONMENT,
                               stderr=subprocess.PIPE, text=True)
            self.assertEqual((p.returncode, p.stderr.splitlines()[-1]), (2, "error: cannot write to stdout"))

    def test_ignored_and_blocked_signals(self):
        signals = {signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        for name, inherit in (("ignored", lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)),
                              ("blocked", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signals))):
            for ranks in "1", "2":
                with self.subTest(name, ranks=ranks):
                    code, out, _ = self.run_of(TRAINER, "--ranks", ranks, preexec_fn=inherit)
                    self.assertEqual(self.results(code, out), self.ordinary[TRAINER])
                    out, words = self.command(TRAINER, "--ranks", ranks, steps=1000000)
                    with subprocess.Popen(words, env=ENVIRONMENT, preexec_fn=inherit, stdout=subprocess.DEVNULL,
                                          stderr=subprocess.DEVNULL) as p:
                        try:
                            while not os.path.exists(f"{out}/main.log") or os.path.getsize(f"{out}/main.log") == 0:
                                self.assertIsNone(p.poll())
                                time.sleep(0.01)
                            p.terminate()
                            self.assertEqual(p.wait(LIMIT), 75)
                        finally:
                            p.kill()

    def test_a_terminal_that_stops_what_prints_in_the_background(self):
        out, words = self.command(TRAINER, "--ranks", "2")

        def inherit():
            os.setsid()
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)
            mode = termios.tcgetattr(1)
            mode[3] |= termios.TOSTOP
            termios.tcsetattr(1, termios.TCSANOW, mode)
        terminal, console = os.openpty()
        with subprocess.Popen(words, env=ENVIRONMENT, preexec_fn=inherit, stdout=console,
                              stderr=subprocess.DEVNULL) as p:
            try:
                self.assertEqual(self.results(p.wait(LIMIT), out), self.ordinary[TRAINER])
            finally:
                p.kill()
        os.close(terminal)
        os.close(console)

    def test_a_rank_that_something_else_has_waited_for(self):
        code, _, said = self.run_of(TRAINER, "--ranks", "2", faults=[("waitpid", errno.ECHILD)])
        self.assertEqual(code, 5)
        self.assertRegex(said, r"rank 0 \(process \d+\) has ended; its exit code is lost")

    def test_a_file_system_without_a_service(self):
        """one warning for each, and the same bits"""
        for errors in (errno.ENOSYS, errno.EINVAL, 0), (errno.ENOLCK, errno.EBADF, errno.ENOSYS), 3 * (errno.ENOTSUP,):
            for trainer, ordinary in self.ordinary.items():
                faults = list(zip(("flock", "fsync", "statvfs"), errors))
                with self.subTest(faults, trainer=trainer):
                    code, out, said = self.run_of(trainer, faults=faults)
                    self.assertEqual(self.results(code, out), ordinary)
                    warnings = re.findall("^warning: .*not supported by its file system", said, re.M)
                    self.assertEqual(len(warnings), 3, said)
        for call in "flock", "fsync", "statvfs":
            code, out, said = self.run_of(TRAINER, faults=[(call, errno.EIO)])
            self.assertEqual(code, 2, said)
            self.assertIn("Input/output error", said)

    def test_no_call_that_changes_the_disk_passes_by_the_library(self):
        def symbols(path, kind):
            listed = subprocess.run(["nm", "-D", path], check=True, stdout=subprocess.PIPE, text=True).stdout
            return set(re.findall(rf"^[0-9a-f ]* {kind} (\w+?)(?:64)?(?:@.*)?$", listed, re.M))
        library = symbols(self.library, "T")
        self.assertLess({"open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "ftruncate", "close"}, library)
        for trainer in TRAINER, BERT_TRAINER:
            imported = symbols(trainer, "U") & CHANGES
            self.assertIn("rename", imported)
            self.assertEqual(imported - library, set())

    def test_clocks(self):
        for seconds, year in (2 ** 63 - 1, 9999), (-2 ** 63, 1970), (67768036191676800, 9999), (253402300799, 9999):
            with self.subTest(seconds):
                code, out, _ = self.run_of(TRAINER, faults=[("clock", seconds)])
                self.assertEqual(self.results(code, out), self.ordinary[TRAINER])
                self.assertRegex(self.read(out, "log.jsonl"),
                                 f'"time":"{year}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{{3}}Z"')


if __name__ == "__main__":
    unittest.main()
