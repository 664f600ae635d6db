"""test_console.py -- scripts/console.py and ledger.py: no script prints a control character, every error is a line and
an exit code, and rows are added whole."""
import argparse
import errno
import fcntl
import functools
import glob
import hashlib
import os
import re
import stat
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from folder import ROOT, SCRIPTS, Folder, read_bytes
import console
import ledger

FOLDERS = ("scripts", "data", "dev", "dev/hf", "dev/bench")
CONTROLS = {chr(c) for c in (*range(32), *range(127, 160))} - {"\n", "\t"}


def programs():
    """the scripts that end with console.run; dev/lint.py says which must"""
    found = []
    for path in sorted(p for folder in FOLDERS for p in glob.glob(os.path.join(ROOT, folder, "*.py"))):
        with open(path, encoding="utf-8") as f:
            if "run(main)\n" in f.read().partition('\nif __name__ == "__main__":')[2]:
                found.append(path)
    return found


def program(code):
    return f"import sys\nsys.path.insert(0, {SCRIPTS!r})\nimport console\n{code}"


def ended(code):
    """what a program that imports console and runs this code prints, and its exit code"""
    return subprocess.run([sys.executable, "-c", program(code)], capture_output=True, text=True)


class TestConsole(Folder):
    def test_a_missing_module_is_installed_where_this_python_looks(self):
        finds = self.shell("py thon", "exit 0")                         # which dev/install.sh asks first
        for python, how in (("/usr/bin/python3", "apt install python3-matplotlib"),
                            ("/opt/con da/python", "'/opt/con da/python' -m pip install matplotlib")):
            with mock.patch.dict(sys.modules, matplotlib=None), mock.patch.object(sys, "executable", python), \
                    mock.patch.dict(os.environ, PYTHON=finds):
                said = f"^Python's module matplotlib is missing: {how}; or run this script with '{finds}', "
                said += "which has it$"
                with self.assertRaisesRegex(console.BadInput, said):
                    console.need("matplotlib")

    def test_safetensors(self):
        """a header that no spaces fill up, and the SHA-256 of what follows it"""
        header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        path = self.write("model.safetensors", len(header).to_bytes(8, "little") + header + b"8 bytes.")
        with open(path, "rb") as f:
            self.assertEqual(console.read_tensors(f, path), {"a": ("F32", [2], 62, 70)})
        self.assertEqual(console.weights_sha256(self.folder), hashlib.sha256(b"8 bytes.").hexdigest())

    def test_every_script_escapes_what_it_was_given(self):
        self.assertGreater(len(programs()), 18)
        for path in programs():
            r = subprocess.run([sys.executable, path, "\x1b[2J\x9b\u202e.json", "--no\x1b[2J\x07"], text=True,
                               stdin=subprocess.DEVNULL, capture_output=True, cwd=tempfile.gettempdir())
            text = r.stdout + r.stderr
            self.assertEqual(set(text) & {*CONTROLS, "\u202e"}, set(), (path, text))
            self.assertNotIn("Traceback", text, path)

    def test_streams(self):
        r = ended("console.clean_streams()\nprint('a\\x1b[2J\\tb\\x9b\\r', '\\u202e', 'ü')\n"
                  "print('\\x07', file=sys.stderr)\nconsole.terminal(sys.stdout).write('\\x1b[K')\n"
                  "print('\\udc80')\nraise ValueError('\\x1b')")
        self.assertEqual(r.stdout, "a\\x1b[2J\tb\\x9b\\r \\u202e ü\n\x1b[K\\udc80\n")
        self.assertTrue(r.stderr.startswith("\\x07\n"))
        self.assertTrue(r.stderr.endswith("ValueError: \\x1b\n"))
        closed = program("console.run(lambda argv: print('a', file=sys.stderr) or print(sys.stdout.isatty()))")
        self.assertEqual(subprocess.run(["bash", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, closed]).returncode, 0)

    def test_commands_to_paste(self):
        """bash reads the words that were given, from one line of plain characters"""
        words = ["printf", "%s\\0", "a b", "it's", "", "$HOME `x` \\n", "a\nb\t\x1b[2J\x85\u2028'", "ü", "\udcff\n"]
        line = console.command_line(words)
        self.assertEqual(console.one_line(line), line)
        said = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE).stdout
        self.assertEqual(said.split(b"\0")[:-1], [os.fsencode(word) for word in words[2:]])
        self.assertEqual(console.table(["a"], [["x|y\nz"]]), ["| a |", "|---|", r"| x\|y\nz |"])

    def test_exit_codes(self):
        for raised, code, text in (
                ("console.BadInput('a\\x1b')", 2, "<string>: a\\x1b\n"),
                ("console.Interrupted('lost')", 75, "<string>: interrupted: lost; run the same command again to"),
                ("KeyboardInterrupt", 75, "interrupted; run the same command again"),
                ("MemoryError", 4, "out of memory"),
                ("OSError(13, 'Permission denied', 'x/y')", 2, "<string>: x/y: Permission denied\n")):
            r = ended(f"def main(argv):\n    raise {raised}\nconsole.run(main)")
            self.assertEqual(r.returncode, code, r.stderr)
            self.assertIn(text, r.stderr)
            self.assertEqual(r.stderr.count("\n"), int(code != 0), r.stderr)
        self.assertEqual([ended(f"console.run(lambda argv: {n})").returncode for n in (None, 0, 3)], [0, 0, 3])
        fails = program("import subprocess\nconsole.run(lambda argv: subprocess.call('false'))")
        ignored = ["bash", "-c", "trap '' CHLD; exec \"$0\" -c \"$1\"", sys.executable, fails]
        self.assertEqual(subprocess.run(ignored).returncode, 1)
        for says in "print('line\\n' * 100000)", "any(print('line', flush=True) for _ in range(100000))":
            piped = program(f"import os\nopen_files = lambda: len(os.listdir('/proc/self/fd'))\nbefore = open_files()\n"
                            f"console.run(lambda argv: {says} or 3 + open_files() - before)")
            r = subprocess.run(["bash", "-c", '"$0" -c "$1" | head -1; exit ${PIPESTATUS[0]}', sys.executable, piped],
                               capture_output=True, text=True)
            self.assertEqual((r.returncode, r.stdout, r.stderr), (3, "line\n", ""))
        works = program("def main(argv):\n    console.say('a')\n    print('done')\nconsole.run(main)")
        r = subprocess.run(["bash", "-c", '"$0" -c "$1" 2> /dev/full', sys.executable, works], stdout=subprocess.PIPE)
        self.assertEqual((r.returncode, r.stdout), (0, b"done\n"))

    def test_numbers_of_flags(self):
        for of, good, bad in (
                (console.natural, {"0": 0, "+07": 7}, {"-1": "at least 0, got -1", **dict.fromkeys(
                    ("1e3", "", "\u0663", "1_0", "9" * 19), "a whole number of at most 18 digits")}),
                (console.processes, {"1024": 1024}, {"0": "at least 1", "1025": "at most 1,024"}),
                (console.real, {"-2.5": -2.5}, {"nan": "a number, got nan", "inf": "a number", "x" * 99: "a number"}),
                (functools.partial(console.real, above=0), {"1e-3": 1e-3}, {"0": "a number above 0, got 0",
                                                                            "nan": "a number above 0"}),
                (functools.partial(console.real, above=1), {"2": 2}, {"1": "a number above 1, got 1"})):
            self.assertEqual({text: of(text) for text in good}, good)
            for text, says in bad.items():
                self.assertRaisesRegex(argparse.ArgumentTypeError, f"^expected {says}", of, text)

    def test_objects(self):
        path = self.path("a.json")
        for text in (b"", b"{", b"[1]", b"\xff", b"[" * 100000, b'{"a":' * 100000, b"1" * 5000, b"\xef\xbb\xbf{}"):
            self.write("a.json", text)
            with self.assertRaisesRegex(console.BadInput, "a.json: expected a JSON object") as caught:
                console.read_object(path)
            self.assertLess(len(str(caught.exception)), 300)
        console.write_whole(path, '{"a": "ü"}')
        self.assertEqual((console.read_object(path), os.listdir(self.folder)), ({"a": "ü"}, ["a.json"]))
        for text in ('{"a": 1e999}', '{"a": -Infinity}', '{"a": 1' + "0" * 400 + "}", '{"a": 1, "a": 1}',
                     '{"a": "\\ud800"}', '{"a": ' + "[" * 32 + "]" * 32 + "}"):
            self.write("a.json", text)
            self.assertRaisesRegex(console.BadInput, "a.json: expected a JSON object", console.read_object, path)
        self.write("a.json", '{"a": ' + "[" * 31 + "]" * 31 + ', "b": "\\ud83d\\ude00' + "[" * 99 + '"}')
        self.assertEqual(console.read_object(path)["b"][:2], "\U0001f600[")
        with open(path, "wb") as f:
            f.truncate(1 << 40)
        self.assertRaisesRegex(console.BadInput, "a.json: expected at most 256 MB", console.read_object, path)
        os.mkfifo(self.path("fifo"))
        for name in ("fifo", "none", "a\0b", "."):
            self.assertRaises(console.BadInput, console.read_object, self.path(name))
        self.assertRaisesRegex(console.BadInput, "a regular file", console.read_object, "/dev/zero")

    def test_writes(self):
        """a file is replaced as a whole and keeps its mode; a link and what it leads to stay, as do a device, a
        pipe and every other file beside it"""
        mask = os.umask(0o027)
        self.addCleanup(os.umask, mask)
        os.makedirs(self.path("there"))
        for text in "first", b"second":
            console.write_whole(self.path("there", "a"), text)
            self.assertEqual(stat.S_IMODE(os.stat(self.path("there", "a")).st_mode), 0o640)
        os.chmod(self.path("there", "a"), 0o604)

        def blocks():
            yield b"third"
            raise console.BadInput("cut short")
        self.assertRaises(console.BadInput, console.write_whole, self.path("there", "a"), blocks())
        self.assertEqual((self.read("there", "a"), os.listdir(self.path("there"))), ("second", ["a"]))
        for target in "there/a", "there/none", "link":                  # to a file, to nowhere, to itself
            os.symlink(target, self.path("link"))
            for write in console.write_whole, console.append:
                with self.assertRaisesRegex(console.BadInput, f"link: expected a file to write, got .* to {target};"):
                    write(self.path("link"), "lost\n")
            self.assertEqual((os.readlink(self.path("link")), os.listdir(self.path("there"))), (target, ["a"]))
            os.remove(self.path("link"))
        for name in "a.tmp", ".tmp-" + "0" * 16:
            os.symlink("a", self.path("there", name))
        with mock.patch("secrets.token_hex", return_value="0" * 16):    # a name that somebody else has
            self.assertRaisesRegex(OSError, "File exists", console.write_whole, self.path("there", "a"), "lost")
        self.assertEqual((self.read("there", "a"), len(os.listdir(self.path("there")))), ("second", 3))
        files = os.listdir("/proc/self/fd")
        console.write_whole(self.path("there", "a"), "fourth")
        self.assertEqual(len(os.listdir("/proc/self/fd")), len(files))
        self.assertEqual(stat.S_IMODE(os.stat(self.path("there", "a")).st_mode), 0o604)
        killed = program("import os\nos.replace = lambda *_: os.kill(os.getpid(), 9)\nconsole.write_whole('a', 'x')")
        subprocess.run([sys.executable, "-c", killed], cwd=self.path("there"))
        self.assertEqual(len(os.listdir(self.path("there"))), 4)        # and what it left is not left again
        with console.replacing(self.path("there", "a")), console.replacing(self.path("there", "a")) as f:
            self.assertEqual(len(os.listdir(self.path("there"))), 5)
            f.write(b"fourth")
        self.assertEqual((self.read("there", "a"), len(os.listdir(self.path("there")))), ("", 3))
        self.device("full", 7)
        console.write_whole(self.device("null", 3), "x")
        for name, says in (("full", "No space left"), ("there", "Is a directory"), ("no/where", "No such file")):
            with self.assertRaises(OSError) as caught:
                console.write_whole(self.path(name), "x")
            self.assertRegex(console.reason(caught.exception), rf"\A{self.path(name)}: {says}")
        into = program("console.write_whole('/dev/stdout', 'a file')")
        with open(self.path("there", "a"), "w") as f:
            subprocess.run([sys.executable, "-c", into], stdout=f, check=True)
        self.assertEqual(self.read("there", "a"), "a file")
        os.mkfifo(self.path("pipe"))
        reader = subprocess.Popen(["cat", self.path("pipe")], stdout=subprocess.PIPE, text=True)
        console.write_whole(self.path("pipe"), "through")
        self.assertEqual(reader.communicate(timeout=60)[0], "through")
        kinds = [stat.S_IFMT(os.stat(self.path(name)).st_mode) for name in ("pipe", "full", "null")]
        self.assertEqual(kinds, [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFCHR])
        self.assertEqual(sorted(os.listdir(self.folder)), ["full", "null", "pipe", "there"])

    def test_a_log_has_every_line_of_its_writers(self):
        """three processes, one of which writes as a trainer does; and a log that is replaced or torn"""
        log = self.path("log.jsonl")
        writer = program("for i in range(300): console.append(sys.argv[1], f'{sys.argv[2]} {i}\\n')")
        trainer = ("import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
                   "for i in range(300): os.write(fd, f'{sys.argv[2]} {i}\\n'.encode())")
        writers = [subprocess.Popen([sys.executable, "-c", code, log, name]) for code, name in
                   ((writer, "a"), (writer, "b"), (trainer, "c"))]
        self.assertEqual([w.wait() for w in writers], [0, 0, 0])
        self.assertEqual(sorted(self.read(log).splitlines()), sorted(f"{w} {i}" for w in "abc" for i in range(300)))
        lock, replaced = console.lock, []

        def late(*args):                                        # the log that was opened is not the log any more
            if not replaced:
                replaced.append(os.replace(self.write("new", "resumed\n"), log))
            lock(*args)
        with mock.patch.object(console, "lock", late):
            console.append(log, "line\n")
        self.assertEqual(self.read(log), "resumed\nline\n")
        self.write("log.jsonl", "line\nli")
        self.assertRaisesRegex(console.BadInput, "its last line has no end; remove", console.append, log, "line\n")
        self.assertEqual(self.read(log), "line\nli")
        self.assertRaisesRegex(OSError, "No space", console.append, self.device("full", 7), "line\n")

    def test_a_file_system_without_a_service(self):
        """one warning, and work continues; an error of the disk stays an error"""
        calls = (("locks", "flock", lambda: console.locked(self.folder).__enter__()),
                 ("locks", "flock", lambda: console.append(self.path("log"), "line\n")),
                 ("fsync of directories", "fsync", lambda: console.sync_directory(self.folder)))
        for service, name, call in calls:
            for error in "EINVAL", "EBADF", "ENOTSUP", "ENOSYS", "ENOLCK", "EIO":
                failing = OSError(getattr(errno, error), error)
                with mock.patch.object(console, "WARNED", set()), mock.patch.object(console, "say") as say, \
                        mock.patch.object(fcntl if name == "flock" else os, name, side_effect=failing):
                    if error == "EIO":
                        self.assertRaisesRegex(OSError, "EIO.*" + self.folder, call)
                        continue
                    call(), call()
                    self.assertEqual(say.call_count, 1, error)
                    self.assertIn(f"has no {service} ({error}); ", say.call_args[0][0])
        self.assertEqual(self.read("log"), "line\n" * 10)

    def test_logs_and_tables(self):
        """a refusal names file, line and field"""
        log = ['{"kind":"train","step":0,"loss":3}', '{"kind":"val","step":1,"loss":null,"more":[]}']
        path = self.write("run/log.jsonl", "\n".join([*log, '{"kind":"tr']))
        self.assertEqual([r["step"] for r in console.read_log(self.path("run"))], [0, 1])
        self.assertEqual([r["step"] for r in console.read_log(path, "val")], [1])
        self.assertRaisesRegex(console.BadInput, "line 3: expected a JSON object", console.read_log, path, ended=True)
        for line, says in (('{"kind":"train","step":0', "expected a JSON object"), ("[1]", "expected a JSON object"),
                           ("", "expected a JSON object"), ('{"kind":"trajn"}', "kind: expected one of config, "),
                           ('{"kind":"train","step":0}', "loss: expected a number of at least 0, got none"),
                           ('{"kind":"train","step":"0","loss":1}', 'step: expected a whole number, got "0"'),
                           ('{"kind":"train","step":0,"loss":true}', "loss: expected a number of at least 0, got true"),
                           ('{"kind":"train","step":0,"loss":1,"lr":-1}', "lr: expected a number of at least 0"),
                           ('{"kind":"curve","pos":"a","T":2,"stride":2,"loss":[1]}', "loss: expected 2 numbers")):
            self.write("run/log.jsonl", "\n".join([log[0], line, log[1], ""]))
            self.assertRaisesRegex(console.BadInput, "log.jsonl: line 2: " + re.escape(says), console.read_log, path)
        sources = [p for p in glob.glob(os.path.join(ROOT, "**", "*.*"), recursive=True) if p.endswith((".cu", ".h"))]
        kinds = {kind for p in sources if "/test/" not in p
                 for kind in re.findall(r'\{"kind", "(\w+)"\}', read_bytes(p).decode())}
        self.assertEqual(kinds | {"head", "retrieval"}, {*console.KINDS})   # the trainers', heads.py's, retrieve.py's
        columns = {"name": console.TEXT, "share": console.PERCENT, "of": console.NUMBER}
        path = self.write("a.csv", "\ufeffname,share,of,more\r\n01,1,,x\nb,2.5,-1e3,y\n")          # as Excel writes it
        self.assertEqual(console.read_table(path, columns, ("name",)),
                         [{"name": "01", "share": 1, "of": None, "more": "x"},
                          {"name": "b", "share": 2.5, "of": -1000, "more": "y"}])
        for text, says in (("", "line 1: expected the names"), ("name,share\n", "line 1: of: expected one column"),
                           ("name,share,of,of\n", "line 1: of: expected one column of this name, got 2"),
                           ("name,share,of\na,1,1\na,1\n", "line 3: expected 3 columns"),
                           ("name,share,of\na,1,1\nb,1,1", "line 3: expected 3 columns, it has no end"),
                           ('name,share,of\na,1,"1\nb', "line 3: expected 3 columns"),
                           ("name,share,of\na,nan,1\n", 'line 2: share: expected a number from 0 to 100, got "nan"'),
                           ("name,share,of\na,101,1\n", "line 2: share: expected a number from 0 to 100, got 101"),
                           ("name,share,of\na,01,1\n", 'line 2: share: expected a number from 0 to 100, got "01"'),
                           ("name,share,of\na,1,1\na,1,1\n", "line 3: name: expected a row of its own, got line 2")):
            self.write("a.csv", text)
            with self.assertRaisesRegex(console.BadInput, "a.csv: " + re.escape(says)):
                console.read_table(path, columns, ("name",))

    def test_rows_of_a_ledger(self):
        path = self.path("rows.csv")
        self.assertEqual(ledger.read(path), [])
        self.write("rows.csv", "\ufeff# mine\n# é\nb,a\n")
        self.assertEqual(ledger.read(path), [])
        ledger.add(path, [{"a": 1, "b": 'a "word", é'}], ["a"], "more")
        self.assertTrue(self.read("rows.csv").startswith("# mine\n# é\na,b\n"))
        ledger.add(path, [{"b": "", "a": 2}, {"b": "another", "a": 1}], ["a"])
        self.assertEqual(ledger.read(path), [{"a": "1", "b": 'a "word", é'}, {"a": "2", "b": ""}])
        whole = self.read("rows.csv").encode()
        for last in (b"3", b"3,", b"3,4,5\n", b"\xff\0\n", b'"\n'):         # torn, or damaged
            self.write("rows.csv", whole + last)
            with self.assertRaisesRegex(console.BadInput, "rows.csv: line 6: expected 2 columns"):
                ledger.read(path)


if __name__ == "__main__":
    unittest.main(verbosity=1)
