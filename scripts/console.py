"""console.py -- what every script shares: errors in one line, exit codes, and output that cannot command a terminal.

A script ends with

    if __name__ == "__main__":
        console.run(main)               # main(argv) returns the exit code, None for 0, and raises BadInput

Names and contents of files may have control characters, which a terminal would obey. run() gives main() streams that
write them as escapes, so that no script has to care.
"""
import argparse
import array
import contextlib
import hashlib
import importlib
import io
import json
import math
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
            "scipy": "apt install python3-scipy",
            "tensorboard": "pip install tensorboard", "wandb": "pip install wandb",
            "torch": "apt install python3-torch", "xxhash": "apt install python3-xxhash, or pip install xxhash"}
TENSOR_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


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


def reason(error):
    """the message of an exception: the file and what is wrong with it; the type of an unexpected one"""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, (OSError, BadInput)) else f"{type(error).__name__}: {error}"


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
        code, what = EXIT_BAD_INPUT, reason(e)
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


def encodings(text):
    """the names that a trainer's --help lists for --pos"""
    listed = re.search(r"\(--pos\).*:\n((?:  .*\n)+)", text)
    return re.findall(r"^  (\w+) ", listed[1], re.M) if listed else []


def table(head, rows):
    """the lines of a table in Markdown; rows of texts"""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


# Flags ----------------------------------------------------------------------------------------------------------------

def parser(description, **more):
    """of flags that may not be abbreviated; --help shows the description as it is"""
    return argparse.ArgumentParser(description=description, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter, **more)


def natural(text, least=0):
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
    return value


def positive(text):
    return natural(text, 1)


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


def read_tensors(f, path):
    """{name: (dtype, shape, first byte, byte after the last)} of an open safetensors file, which they must fill"""
    length, start = os.fstat(f.fileno()).st_size, f.read(8)
    data = 8 + int.from_bytes(start, "little")
    if len(start) < 8 or data > min(length, LARGEST_JSON):
        raise BadInput(f"{path}: expected a safetensors file, got something else, or it was cut short")
    whole = lambda values: isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
    tensors = []
    for name, entry in parse_object(f.read(data - 8), path).items():
        if name == "__metadata__":
            continue
        dtype, shape, offsets = ((entry.get(key) if isinstance(entry, dict) else None)
                                 for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and dtype in TENSOR_BYTES and whole(shape) and whole(offsets) and
                len(offsets) == 2 and offsets[1] - offsets[0] == math.prod(shape) * TENSOR_BYTES[dtype]):
            raise BadInput(f"{path}: {name[:80]}: expected a tensor's dtype, shape and data_offsets, got "
                           f"{json.dumps(entry)[:120]}")
        tensors.append((data + offsets[0], data + offsets[1], name, dtype, shape))
    end = data
    for first, last, name, *_ in sorted(tensors):
        if first != end:
            raise BadInput(f"{path}: {name[:80]}: expected its data at byte {end:,}, got {first:,}")
        end = last
    if end != length:
        raise BadInput(f"{path}: expected {end:,} bytes, as its header says, got {length:,}")
    return {name: (dtype, shape, first, last) for first, last, name, dtype, shape in sorted(tensors)}


def read_losses(path):
    """the float32 tensor `losses` of a safetensors file, which --token_losses writes"""
    with open_regular(path) as f:
        dtype, shape, first, last = read_tensors(f, path).get("losses", ("", [], 0, 0))
        if dtype != "F32" or len(shape) != 1:
            raise BadInput(f"{path}: expected a row of F32, the losses of --token_losses")
        f.seek(first)
        return array.array("f", f.read(last - first))


def sha256_of(file):
    """SHA-256 in hexadecimal of the file at a path, or of the rest of an open file"""
    if isinstance(file, (str, os.PathLike)):
        with open_regular(file) as f:
            return sha256_of(f)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def weights_sha256(checkpoint):
    """SHA-256 of a checkpoint's weights: of model.safetensors after its header, in hexadecimal"""
    with open_regular(os.path.join(checkpoint, "model.safetensors")) as f:
        f.seek(int.from_bytes(f.read(8), "little"), os.SEEK_CUR)
        return sha256_of(f)


def write_whole(path, text):
    """writes a file; a kill or a power failure at any moment leaves the old one or the new one"""
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise
