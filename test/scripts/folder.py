"""folder.py -- what the tests of the scripts share: where programs are, and a temporary directory for each test."""
import contextlib
import csv
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SCRIPTS = os.path.join(ROOT, "scripts")
TRAINER, BERT_TRAINER = (os.path.abspath(os.path.join(ROOT, os.environ.get(name.upper(), "./" + name)))
                         for name in ("train_gpt2", "train_bert"))
HAS_TRAINER, HAS_BERT = map(os.path.exists, (TRAINER, BERT_TRAINER))
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, SCRIPTS)
sys.dont_write_bytecode = True
signal.signal(signal.SIGINT, signal.default_int_handler)    # a job in the background of a script ignores it
import console  # noqa: E402


def read(*names):
    """the text of a file; its path is absolute, or starts from the root of the repository"""
    with open(os.path.join(ROOT, *names), encoding="utf-8") as f:
        return f.read()


def read_bytes(*names):
    with open(os.path.join(ROOT, *names), "rb") as f:
        return f.read()


def alive(pid):
    """whether a process runs, and is not only waited for"""
    try:
        return read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    """the processes that a process has started; none of one that has ended"""
    with contextlib.suppress(OSError):
        return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split()]
    return []


def ended(*command, **more):
    """(the exit code of a program, all that it prints)"""
    p = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    return p.returncode, p.stdout


def temporary(cleanup):
    """a directory that cleanup() is told to remove"""
    folder = tempfile.TemporaryDirectory()
    cleanup(folder.cleanup)
    return os.path.realpath(folder.name)


def called(main, *args):
    """(the exit code of a script's main(args), what it prints, and on stderr)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = console.code_of(main, list(args))
        except SystemExit as e:                                 # of argparse
            code = e.code
    return code, out.getvalue(), err.getvalue()


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = temporary(self.addCleanup)

    def start(self, patch):
        """a patch that ends with the test"""
        patch.start()
        self.addCleanup(patch.stop)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, content):
        """the path of a file with this text, or these bytes"""
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as f:
            f.write(content if isinstance(content, bytes) else content.encode())
        return self.path(name)

    def executable(self, name, text):
        """the path of a program with this text"""
        os.chmod(self.write(name, text), 0o755)
        return self.path(name)

    def shell(self, name, text):
        return self.executable(name, "#!/bin/sh\n" + text)

    def device(self, name, minor):
        """the path of a device such as /dev/null, 3: for root, who could replace the system's own, one of the test"""
        try:
            if os.geteuid() == 0:
                os.mknod(self.path(name), stat.S_IFCHR | 0o666, os.makedev(1, minor))
            else:
                os.symlink("/dev/" + name, self.path(name))
            open(self.path(name), "wb").close()
        except PermissionError as e:
            self.skipTest(str(e))
        return self.path(name)

    def read(self, *names):
        return read(self.path(*names))

    def table(self, *names):
        """the rows of a file of CSV, below its comments"""
        return list(csv.DictReader(line for line in self.read(*names).splitlines(True) if line[0] != "#"))

    def records(self, kind, *names):
        """those of one kind in the log of a run"""
        return [r for r in map(json.loads, self.read(*names, "log.jsonl").splitlines()) if r["kind"] == kind]


class ClassFolder(Folder):
    """with one directory for all tests of the class"""
    path = classmethod(Folder.path)
    write = classmethod(Folder.write)
    read = classmethod(Folder.read)

    @classmethod
    def setUpClass(cls):
        cls.folder = temporary(cls.addClassCleanup)

    def setUp(self):
        pass
