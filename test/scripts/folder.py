"""folder.py -- what the tests of the scripts share: where programs are, and a temporary directory for each test."""
import contextlib
import io
import os
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
import console  # noqa: E402


def called(main, *args):
    """(the exit code of a script's main(args), what it prints, and on stderr)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = console.code_of(main, list(args))
    return code, out.getvalue(), err.getvalue()


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.realpath(folder.name)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, content):
        """the path of a file with this text, or these bytes"""
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as f:
            f.write(content if isinstance(content, bytes) else content.encode())
        return self.path(name)

    def read(self, *names):
        with open(self.path(*names), encoding="utf-8") as f:
            return f.read()
