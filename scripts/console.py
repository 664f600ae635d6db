"""console.py -- what every script shares: errors in one line, exit codes, and output that cannot command a terminal.

A script ends with

    if __name__ == "__main__":
        console.run(main)               # main(argv) returns the exit code, None for 0, and raises BadInput

Names and contents of files may have control characters, which a terminal would obey. run() gives main() streams that
write them as escapes, so that no script has to care.
"""
import argparse
import array
import collections
import contextlib
import csv
import errno
import fcntl
import hashlib
import importlib
import io
import json
import math
import os
import re
import secrets
import shlex
import signal
import stat
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXIT_BAD_INPUT, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED = 2, 4, 75         # the trainers' exit codes
LARGEST_JSON, MOST_BRACKETS, DEEPEST_JSON = 1 << 28, 1 << 22, 32         # bytes, lists and objects, levels
# all controls but tab and newline, and the marks that reorder a line
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PACKAGES = {"matplotlib": "apt install python3-matplotlib", "numpy": "apt install python3-numpy",
            "scipy": "apt install python3-scipy",
            "tensorboard": "pip install tensorboard", "wandb": "pip install wandb",
            "torch": "apt install python3-torch", "transformers": "pip install transformers safetensors",
            "xxhash": "apt install python3-xxhash, or pip install xxhash"}
# For Popen: a process group, to which a terminal's Ctrl-C does not go, but no new session, in which Linux (autogroup)
# would not apply the nice of this one
OWN_GROUP = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
TENSOR_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class BadInput(Exception):
    """what the user can mend; the script ends with this line and exit code 2"""


class Interrupted(Exception):
    """a stop from which the same command, run again, continues"""


def clean(text):
    """text with its control characters as escapes, as in \\x1b[2J"""
    return CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), str(text))


def one_line(text):
    """clean text whose lines and tabs are escaped too, as for a comment, which ends with its line"""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


def command_line(words):
    """words to paste into bash, on one line; a word with unprintable characters is $'...', with their escapes"""
    quote = lambda text: re.sub(r"[^\x20-\x7e]", lambda m: "".join(f"\\x{b:02x}" for b in os.fsencode(m[0])),
                                text.replace("\\", r"\\").replace("'", r"\'"))
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{quote(word)}'" for word in words)


class Stream(io.TextIOWrapper):
    """a standard stream that cleans what it writes; what the locale cannot print becomes an escape too"""

    def __init__(self, beneath):
        super().__init__(beneath.buffer, beneath.encoding, "backslashreplace", line_buffering=beneath.line_buffering,
                         write_through=beneath.write_through)
        self.beneath = beneath

    def write(self, text):
        return self.unbroken(super().write, clean(text))

    def flush(self):
        self.unbroken(super().flush)

    def unbroken(self, act, *args):
        """drops output once its reader has gone, as in `report.py ... | head`; the exit code stays the work's"""
        try:
            return act(*args)
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


def clean_streams():
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:                                  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))
        if type(getattr(sys, name)) is io.TextIOWrapper:                # not what a test has put there
            setattr(sys, name, Stream(getattr(sys, name)))


def terminal(stream):
    """the stream beneath a clean one, for the controls that a script sends on purpose"""
    stream.flush()
    return getattr(stream, "beneath", stream)


def show(text, end="\n", file=None):
    """prints a message; a console that is full or gone does not end the work"""
    with contextlib.suppress(OSError):
        print(text, end=end, file=file or sys.stdout, flush=True)


def say(text):
    show(text, file=sys.stderr)


def reason(error):
    """the message of an exception: the file and what is wrong with it; the type of an unexpected one"""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, (OSError, BadInput)) else f"{type(error).__name__}: {error}"


def fail(error):
    """for os.walk(onerror), which otherwise leaves out a directory that it cannot read"""
    raise error


def code_of(main, argv):
    """the exit code of main(argv); an error is one line on stderr, which begins with the name of main's file"""
    try:
        code = main(argv)
        sys.stdout.flush()
        return code or 0
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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)       # where the caller ignores it, all programs seem to end with 0
    clean_streams()
    sys.exit(code_of(main, sys.argv[1:]))


def flat(text):
    return " ".join(text.split())


def share(*what):
    """a number from 0 to 1 that these words decide"""
    words = "\n".join(map(str, what)).encode("utf-8", "surrogateescape")
    return int(hashlib.sha256(words).hexdigest()[:12], 16) / 16 ** 12


def need(module):
    """a module that Python may lack"""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        how = PACKAGES.get(name, "pip install -r data/requirements.txt")
        if not sys.executable.startswith("/usr/bin/"):      # conda's, pyenv's or a venv's, where apt puts nothing
            how = f"{shlex.quote(sys.executable)} -m " + re.sub(r"^apt install python3-(\w+).*", r"pip install \1", how)
        find = [os.path.join(ROOT, "dev", "install.sh"), "--python", name]
        other = subprocess.run(find, capture_output=True, text=True).stdout.strip() if name in PACKAGES else ""
        has = f"; or run this script with {shlex.quote(other)}, which has it" * (other not in ("", sys.executable))
        raise BadInput(f"Python's module {name} is missing: {how}{has}") from None


def output_of(command, **more):
    """the stdout of a command; if it fails, the error ends with its last output"""
    p = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", **more)
    if p.returncode != 0:
        said = p.stdout[-1000:] + p.stderr[-2000:]
        raise BadInput(f"{command_line(command)}: exit code {p.returncode}\n{said.strip()}")
    return p.stdout


def encodings(text):
    """the names that a trainer's --help lists for --pos"""
    listed = re.search(r"\(--pos\).*:\n((?:  .*\n)+)", text)
    return re.findall(r"^  (\w+) ", listed[1], re.M) if listed else []


def table(head, rows):
    """the lines of a table in Markdown; rows of texts"""
    line = lambda cells: "| " + " | ".join(one_line(text).replace("|", r"\|") for text in cells) + " |"
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


# Flags ----------------------------------------------------------------------------------------------------------------

def parser(description, **more):
    """of flags that may not be abbreviated; --help shows the description as it is"""
    return argparse.ArgumentParser(description=description, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter, **more)


def natural(text, least=0, most=10 ** 18 - 1):
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected a whole number of at most 18 digits, got {text[:40]}")
    if not least <= int(text) <= most:
        limit = f"at least {least}" if int(text) < least else f"at most {most:,}"
        raise argparse.ArgumentTypeError(f"expected {limit}, got {text}")
    return int(text)


def positive(text):
    return natural(text, 1)


def processes(text):
    """how many at a time"""
    return natural(text, 1, 1024)


def real(text, above=-math.inf):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not above < value < math.inf:
        limit = "" if above == -math.inf else f" above {above:g}"
        raise argparse.ArgumentTypeError(f"expected a number{limit}, got {text[:40]}")
    return value


def naturals(text):
    """the numbers of a list such as 1,2,3 or 1 2 3, each once"""
    if not re.fullmatch(r"\d{1,18}([, ]\d{1,18})*", text):
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas or blanks, got {text}")
    return list(dict.fromkeys(map(int, re.split("[, ]", text))))


# Files ----------------------------------------------------------------------------------------------------------------

# Files that stand in for another: what they begin with, what they are, and how to get the real one. A pointer is short,
# and a page of HTML counts only under a name that a page would not have.
POINTERS = (
    (rb"version https://git-lfs\.github\.com/spec/",
     "a pointer of Git LFS, not the file; in its repository: git lfs pull"),
    (rb"/annex/objects/", "a pointer of git-annex, not the file; in its repository: git annex get"),
    (rb"(\.\./)+blobs/[0-9a-f]{40}", "a name in a hub's cache, not the file; get it again: hf download"))
PAGES = (
    (rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype html|html|head|\?xml)\b", "a page of HTML, not the file; get that by "
     "hf download, or by curl -LO with /resolve/ (GitHub: /raw/) instead of /blob/ in its address"),
    (rb"(404: )?Not Found\b|Entry not found|Invalid username or password|Access to .{1,99} is restricted",
     "a server's refusal, not the file; get that by hf download, after hf auth login if it needs an account"))
NO_PAGE = re.compile(r"\.(json\w*|ndjson|jl|[ct]sv|parquet|bin|bpe|model|safetensors|gz|xz|bz2|zst)$|"
                     r"\b(vocab|merges)\.txt$", re.I)


def stand_in(path, head, size=0):
    """what a file really is, if its first bytes show that it stands in for another; else None"""
    kinds = POINTERS * (size <= 1024) + PAGES * bool(NO_PAGE.search(os.fsdecode(path)))
    return next((what for begin, what in kinds if re.match(begin, head)), None)


def open_regular(path):
    """path opened for reading; only a regular file, because a pipe or a device could block"""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{path}: expected a regular file")
        file = open(path, "rb")
        if what := stand_in(path, file.peek(512), status.st_size):
            file.close()
            raise BadInput(f"{path}: {what}")
        return file
    except (OSError, ValueError) as e:          # ValueError: a zero byte in its name
        raise BadInput(f"{path}: {getattr(e, 'strerror', e)}") from None


def finite(text):
    """a number of JSON with a fraction; NaN, Infinity and 1e999 are none"""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return float(text)


def whole(text):
    if len(text) > 20:
        raise ValueError(f"{text[:20]}... has {len(text)} digits")
    return int(text)


def once(pairs):
    """the object of these pairs; a key twice is an error, because readers differ in the value that they keep"""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"the key {collections.Counter(key for key, _ in pairs).most_common(1)[0][0][:80]!r} twice")
    return found


def depth(value):
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


DECODER = json.JSONDecoder(parse_float=finite, parse_int=whole, parse_constant=finite, object_pairs_hook=once)


def parse_json(text):
    """A value of JSON, or a ValueError. Its brackets are bounded: what reads a value recurses, and a bracket takes 30
    times its memory. Half a character, as in "\\ud800", could not be written again."""
    if (brackets := text.count("[") + text.count("{")) > MOST_BRACKETS:
        raise ValueError(f"more than {MOST_BRACKETS:,} lists and objects")
    try:
        found = DECODER.decode(text)
        deep = brackets > DEEPEST_JSON and depth(found) > DEEPEST_JSON
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"nested deeper than {DEEPEST_JSON} levels")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        json.dumps(found, ensure_ascii=False).encode()
    return found


def parse_object(text, where):
    """the JSON object of these bytes"""
    try:
        found = parse_json(text.decode("utf-8"))
    except ValueError as e:
        raise BadInput(f"{where}: expected a JSON object ({e})") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}: expected a JSON object, got {json.dumps(found)[:40]}")
    return found


def read_bytes(path):
    with open_regular(path) as f:
        if os.fstat(f.fileno()).st_size > LARGEST_JSON:
            raise BadInput(f"{path}: expected at most {LARGEST_JSON >> 20} MB, got more")
        return f.read(LARGEST_JSON)


def read_object(path):
    """the JSON object that a file holds"""
    return parse_object(read_bytes(path), path)


# What a field may hold, in words, and whether a value is that. Null is a number that was NaN.
is_number = lambda v: type(v) in (int, float) and abs(v) < 1e300        # beyond it sums and axes overflow
COUNT = "a whole number", lambda v: type(v) is int and 0 <= v < 1 << 64
POSITIVE = "a positive whole number", lambda v: COUNT[1](v) and v > 0
NUMBER = "a number", lambda v: v is None or is_number(v)
AMOUNT = "a number of at least 0", lambda v: v is None or is_number(v) and v >= 0
ABOVE_0 = "a number above 0", lambda v: v is None or is_number(v) and v > 0
SHARE = "a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1
PERCENT = "a number from 0 to 100", lambda v: is_number(v) and 0 <= v <= 100
TEXT = "a text", lambda v: isinstance(v, str)
TIME = "a time in UTC, such as 2026-01-31T23:59:59.123Z", lambda v: isinstance(v, str) and re.fullmatch(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z", v)
OBJECT = "an object", lambda v: isinstance(v, dict)
list_of = lambda what, kind: (f"a list of {what}", lambda v: isinstance(v, list) and all(map(kind[1], v)))
object_of = lambda what, kind: (f"an object of {what}", lambda v: OBJECT[1](v) and all(map(kind[1], v.values())))
NUMBERS, LOSSES = list_of("numbers", NUMBER), list_of("numbers of at least 0", AMOUNT)
SINKS = 'an object with the share of "4"', lambda v: OBJECT[1](v) and SHARE[1](v.get("4"))

# The kinds of log.jsonl and the fields that scripts need of each, and fields that a record may lack
MODEL = {"pos": TEXT, "T": POSITIVE}
SCORE = {"examples": POSITIVE, "exact": COUNT, "tokens": POSITIVE, "accuracy": SHARE, "loss": AMOUNT}
KINDS = {"config": {}, "train": {"step": COUNT, "loss": AMOUNT}, "val": {"step": COUNT, "loss": AMOUNT},
         "swap": {"step": COUNT}, "hellaswag": {"acc_norm": SHARE}, "hellaswag_example": {},
         "extrapolation": {**MODEL, "stride": POSITIVE, "ppl": ABOVE_0},
         "curve": {**MODEL, "stride": POSITIVE, "loss": LOSSES},
         "evaluation_speed": {**MODEL, "tok_per_s": AMOUNT, "mem": AMOUNT},
         "head": {**MODEL, "layer": COUNT, "head": COUNT, "entropy": AMOUNT, "window90": AMOUNT, "live_tiles": SHARE,
                  "sink_weight": SINKS},
         "retrieval": {"T": POSITIVE, "ndcg@10": SHARE}, "task": {**MODEL, "file": TEXT, "length": POSITIVE, **SCORE}}
OPTIONAL = {"step": COUNT, "T_train": POSITIVE, "windows": POSITIVE, "rope_theta": ABOVE_0, "rope_scaling": OBJECT,
            "window": ("a number or a list of them", lambda v: COUNT[1](v) or NUMBERS[1](v)), "sinks": COUNT,
            "document_mask": ("true", lambda v: v is True), "time": TIME, "dead_heads": SHARE,
            "dead": ("true or false", lambda v: isinstance(v, bool)),
            **dict.fromkeys(("loss", "lr", "norm", "ms", "tok_per_s", "mem", "mfu"), AMOUNT)}


def field(record, name, kind, where):
    """the value of a field, which must be of this kind"""
    if name not in record or not kind[1](record[name]):
        got = json.dumps(record[name])[:60] if name in record else "none"
        raise BadInput(f"{where}: {name}: expected {kind[0]}, got {got}")
    return record[name]


def fields(record, needed, optional, where):
    """the record, whose fields must be of these kinds, {name: kind}; it may lack the optional ones"""
    for name, kind in {**optional, **needed}.items():
        if name in record or name in needed:
            field(record, name, kind, where)
    return record


def number(record, name):
    """the value if it is a number, else None"""
    v = record.get(name)
    return float(v) if is_number(v) else None


def read_log(run, kind=None, ended=False):
    """The records of RUN_DIR/log.jsonl, or those of a kind. ended: the run has ended, so its last line has an end; the
    trainer cuts a line without an end when it continues."""
    path = os.path.join(run, "log.jsonl") if os.path.isdir(run) else run
    try:
        lines = read_bytes(path).split(b"\n")
    except BadInput as e:
        raise BadInput(f"{e}; expected a run's --out directory, with log.jsonl in it") from None
    records = []
    for n, line in enumerate(lines, 1):
        where = f"{path}: line {n}"
        if n == len(lines) and line and not ended:
            say(f"{where}: left out, because it has no end")
        elif n < len(lines) or line:
            records.append(parse_object(line, where))
            check_record(records[-1], where)
    return [r for r in records if kind in (None, r["kind"])]


def check_record(record, where):
    kind = field(record, "kind", ("one of " + ", ".join(KINDS), lambda v: isinstance(v, str) and v in KINDS), where)
    fields(record, KINDS[kind], OPTIONAL, where)
    if kind == "curve" and len(record["loss"]) != record["T"]:
        raise BadInput(f"{where}: loss: expected {record['T']:,} numbers, got {len(record['loss']):,}")
    if kind == "task" and record["exact"] > record["examples"]:
        raise BadInput(f"{where}: exact: expected at most {record['examples']:,}, got {record['exact']:,}")


NO_TEXT = "\ufffd"                                      # in the place of bytes that are not UTF-8


def read_table(path, columns=None, key=()):
    """The rows of a CSV, {column: text}; lines before them that begin with # are comments. columns: {name: kind} of the
    columns that must be there; a number is a number then, or None where the cell is empty. key: the columns that tell
    the rows apart."""
    text, columns = read_bytes(path).decode("utf-8-sig", "replace").replace("\0", NO_TEXT), columns or {}
    rows, names, seen = [], [], {}
    lines = csv.reader(text.splitlines(keepends=True), strict=True)

    def refuse(expected):
        raise BadInput(f"{path}: line {max(1, lines.line_num)}: {expected}") from None
    try:
        names += next(lines, [])
        while names and names[0].startswith("#"):
            names[:] = next(lines, [])
        for name in [*columns, *key, *names] if names else refuse("expected the names of the columns, got nothing"):
            if names.count(name) != 1:
                refuse(f"{name}: expected one column of this name, got {names.count(name)}")
        for cells in lines:
            if len(cells) != len(names) or NO_TEXT in "".join([*names, *cells]):
                raise csv.Error(f"got {','.join(cells)[:80]!r}")
            row = dict(zip(names, cells))
            row.update((name, cell_value(row[name])) for name, kind in columns.items() if kind is not TEXT)
            fields(row, columns, {}, f"{path}: line {lines.line_num}")
            first = seen.setdefault(tuple(row[name] for name in key), lines.line_num)
            if key and first != lines.line_num:
                refuse(f"{', '.join(key)}: expected a row of its own, got line {first} again")
            rows.append(row)
        if not text.endswith("\n"):
            raise csv.Error("it has no end")
    except csv.Error as e:
        refuse(f"expected {len(names)} columns, {e}; remove the line, and the same command runs its case again")
    return rows


def cell_value(text):
    try:
        return parse_json(text) if text else None
    except ValueError:
        return text


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
                len(shape) <= 8 and len(offsets) == 2 and
                offsets[1] - offsets[0] == math.prod(shape) * TENSOR_BYTES[dtype]):
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
        losses = array.array("f", f.read(last - first))
    if not all(map(math.isfinite, losses)):
        raise BadInput(f"{path}: losses: expected numbers, got {next(x for x in losses if not math.isfinite(x))}")
    return losses


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
    with open_regular(path := os.path.join(checkpoint, "model.safetensors")) as f:
        read_tensors(f, path)
        return sha256_of(f)


# What a file system without a service answers. EIO and ENOSPC are not among them: there the disk has failed.
UNSUPPORTED = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
WARNED = set()


@contextlib.contextmanager
def where_supported(path, service, means):
    """a call that a file system may not have: one warning for each service, and the work continues without it"""
    try:
        yield
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise OSError(e.errno, e.strerror, path) from None
        if service not in WARNED:
            say(f"warning: {path}: this file system has no {service} ({e.strerror}); {means}")
        WARNED.add(service)


def sync_directory(directory):
    fd = os.open(directory, os.O_RDONLY)
    try:
        with where_supported(directory, "fsync of directories", "a power failure may undo the last rename"):
            os.fsync(fd)
    finally:
        os.close(fd)


def lock(fd, path, how=fcntl.LOCK_EX):
    """locks an open file until it is closed"""
    with where_supported(path, "locks", "do not let a second process write there"):
        fcntl.flock(fd, how)


@contextlib.contextmanager
def locked(directory, wait=False):
    """Lets one process at a time write into a directory. A second one is refused, or waits if `wait`; the lock ends
    with the process"""
    os.makedirs(directory, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            lock(fd, directory, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BadInput(f"{directory}: another run is writing here; wait, or give another --out") from None
        yield
    finally:
        os.close(fd)


def is_stream(path):
    """whether path is written into: a device or a pipe. A link to a file or to nothing is refused: to follow it would
    replace a file that nobody has named, and to replace it would lose the link"""
    if os.path.exists(path) and not os.path.isfile(path):
        return True
    if os.path.islink(path):
        raise BadInput(f"{path}: expected a file to write, got a symbolic link to {os.readlink(path)}; give that name "
                       "instead, or remove the link")
    return False


def new_file(path):
    """a new temporary file beside path, open and locked; it removes those whose process has ended"""
    directory = os.path.dirname(path)
    with contextlib.suppress(OSError):
        for name in filter(re.compile(r"\.tmp-[0-9a-f]{16}").fullmatch, os.listdir(directory or ".")):
            left = os.path.join(directory, name)
            with contextlib.suppress(OSError), os.fdopen(os.open(left, os.O_NOFOLLOW | os.O_NONBLOCK)) as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.remove(left)
    f = open(os.path.join(directory, f".tmp-{secrets.token_hex(8)}"), "xb")            # x: through no link
    with contextlib.suppress(OSError):
        fcntl.flock(f, fcntl.LOCK_EX)
    if os.path.exists(f.name):
        return f
    f.close()                                   # another process took it for left over before it was locked
    return new_file(path)


@contextlib.contextmanager
def replacing(path):
    """A file to write, which gets its name and the mode of the file it replaces at the end. A kill or a power failure
    at any moment leaves the old file or the new one, an error the old one. A device or a pipe is written into."""
    if os.path.dirname(path) in ("/dev", "/dev/fd") and os.path.isfile(path):           # stdout, sent to a file
        path = os.path.realpath(path)
    stream, f = is_stream(path), None
    try:
        with (open(path, "wb") if stream else new_file(path)) as f:
            with contextlib.suppress(OSError):
                os.fchmod(f.fileno(), os.stat(path).st_mode & 0o777)
            yield f
            f.flush()
            if not stream:
                os.fsync(f.fileno())
                os.replace(f.name, path)
                sync_directory(os.path.dirname(path) or ".")
    except BaseException as e:
        if f and not stream:
            with contextlib.suppress(OSError):
                os.remove(f.name)
        if isinstance(e, OSError):
            elsewhere = f and e.filename not in (None, f.name)
            raise OSError(e.errno, e.strerror, e.filename if elsewhere else path) from None
        raise


def write_whole(path, content):
    """Writes a text, bytes, or blocks of bytes, as replacing() does."""
    content = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with replacing(path) as f:
        f.writelines([content] if isinstance(content, bytes) else content)


def open_end(path):
    """a descriptor whose writes go to the end of a file"""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | (0 if is_stream(path) else os.O_NOFOLLOW), 0o666)


def append(path, text):
    """Adds lines to the end of a log, by one write under the log's lock, so that of several writers none loses a line.
    A trainer writes whole lines at the end too, without the lock; when it resumes, it renames a new log over the old.
    Without a text, only sees whether a line could be added."""
    line = text.encode("utf-8", "surrogateescape")
    for _ in range(100):
        fd = open_end(path)
        try:
            lock(fd, path)
            before = os.fstat(fd).st_size
            if not os.path.exists(path) or not os.path.samestat(os.fstat(fd), os.stat(path)):
                continue
            if before and os.pread(fd, 1, before - 1) != b"\n":
                time.sleep(0.02)                # the end of a line that is being written, or of a killed run
                continue
            if (written := os.write(fd, line)) == len(line):
                return
            if os.fstat(fd).st_size == before + written:
                os.ftruncate(fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise OSError(e.errno, e.strerror, path) from None
        finally:
            os.close(fd)
    raise BadInput(f"{path}: expected a log of whole lines, but its last line has no end; remove that line, or "
                   "continue its run, which does")
