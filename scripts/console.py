"""console.py -- what every script shares: errors in one line, exit codes, and output that cannot command a terminal.

A script ends with

    if __name__ == "__main__":
        console.run(main)               # main(argv) returns the exit code, None for 0, and raises BadInput

Names of files, and text that stands in them, may hold control characters; a terminal would obey them. What run() starts
prints and complains through streams that write them as escapes, so that no script has to think of it.
"""
import contextlib
import importlib
import io
import json
import os
import re
import signal
import stat
import sys

EXIT_BAD_INPUT, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED = 2, 4, 75         # the trainers' exit codes
LARGEST_JSON = 1 << 28                                                  # bytes
# all controls but tab and newline, and the marks that reorder a line
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PACKAGES = {"matplotlib": "apt install python3-matplotlib", "numpy": "apt install python3-numpy",
            "tensorboard": "pip install tensorboard", "wandb": "pip install wandb"}


class BadInput(Exception):
    """what the user can mend; the script ends with this line and exit code 2"""


class Interrupted(Exception):
    """a stop from which the same command, run again, continues"""


def clean(text):
    """text with its control characters as escapes, as in \\x1b[2J"""
    return CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), str(text))


class Stream(io.TextIOWrapper):
    """a standard stream that cleans what it writes; what the locale cannot print becomes an escape too"""

    def __init__(self, beneath):
        super().__init__(beneath.buffer, beneath.encoding, "backslashreplace", line_buffering=beneath.line_buffering,
                         write_through=beneath.write_through)
        self.beneath = beneath

    def write(self, text):
        return super().write(clean(text))


def clean_streams():
    for name in ("stdout", "stderr"):
        if type(getattr(sys, name)) is io.TextIOWrapper:                # not what a test has put there
            setattr(sys, name, Stream(getattr(sys, name)))


def terminal(stream):
    """the stream beneath a clean one, for the controls that a script sends on purpose"""
    stream.flush()
    return getattr(stream, "beneath", stream)


def say(text):
    print(text, file=sys.stderr, flush=True)


def code_of(main, argv):
    """the exit code of main(argv); an error is one line on stderr, which begins with the name of main's file"""
    try:
        code = main(argv)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:                     # as in `report.py ... | head`
        sys.stdout = open(os.devnull, "w")
        return 0
    except (Interrupted, KeyboardInterrupt) as e:
        code, what = EXIT_INTERRUPTED, f"interrupted: {e}" if isinstance(e, Interrupted) else "interrupted"
        what += "; run the same command again to continue"
    except MemoryError:
        code, what = EXIT_OUT_OF_MEMORY, "out of memory"
    except OSError as e:
        code, what = EXIT_BAD_INPUT, f"{e.filename}: {e.strerror}" if e.filename else e
    except BadInput as e:
        code, what = EXIT_BAD_INPUT, e
    say(f"{os.path.basename(main.__code__.co_filename)}: {what}")
    return code


def run(main):
    """ends the process with the exit code of main(sys.argv[1:])"""
    def stop(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, stop)
    clean_streams()
    sys.exit(code_of(main, sys.argv[1:]))


def need(module):
    """a module that Python may lack"""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        how = PACKAGES.get(name, "pip install -r data/requirements.txt")
        raise BadInput(f"Python's module {name} is missing: {how}") from None


# Files ----------------------------------------------------------------------------------------------------------------

def open_regular(path):
    """path opened for reading; only a regular file, because a pipe or a device could block"""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadInput(f"{path}: expected a regular file")
        return open(path, "rb")
    except (OSError, ValueError) as e:          # ValueError: a zero byte in its name
        raise BadInput(f"{path}: {getattr(e, 'strerror', e)}") from None


def parse_object(text, where):
    """the JSON object of these bytes"""
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{where}: expected a JSON object ({e})") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}: expected a JSON object, got {json.dumps(found)[:40]}")
    return found


def read_object(path):
    """the JSON object that a file holds"""
    with open_regular(path) as f:
        text = f.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise BadInput(f"{path}: expected at most {LARGEST_JSON >> 20} MB of JSON, got more")
    return parse_object(text, path)


def write_whole(path, text):
    """writes a file; a kill at any moment leaves the old one or the new one"""
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(path + ".tmp", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise
