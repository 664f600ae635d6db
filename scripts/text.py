#!/usr/bin/env python3
"""text.py -- text in and out of a model, with the vocabulary that its checkpoint, or --tokenizer, has.

    scripts/text.py generate RUN "Once upon a time" --tokens 100        train_gpt2 --generate
    scripts/text.py predict RUN "Rome is the [MASK] of Italy."          train_bert --predict
    scripts/text.py encode RUN documents.txt --out run/embeddings       train_bert --encode: a document in each line
    scripts/text.py ids RUN "Once upon a time"                          the token ids, as in "7454 2402 257 640"

RUN is a run, a checkpoint, or a directory of Hugging Face. TEXT, or the file of encode, may be - for stdin. Flags after
it are the trainer's, but for
    --tokenizer DIR     tokenizer.json, vocab.json and merges.txt, or vocab.txt, instead of RUN's
    --trainer CMD       the program, with flags [train_gpt2 or train_bert of this repository]

Python's tokenizers encodes the text, by any tokenizer.json; a model of bytes needs none. A special token that a prompt
spells, such as <|endoftext|>, is special; in documents it is plain text. None is added, but [CLS] and [SEP] by predict
and encode. An empty prompt is the end-of-text token.
"""
import array
import contextlib
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

import console
from console import BadInput, need

sys.path.append(os.path.join(console.ROOT, "data"))
from common import MAGIC, VERSION, WIDE_MAGIC, WIDE_VERSION, header  # noqa: E402
from encoding import check_directory, one_file, tokenizer_of  # noqa: E402

COMMANDS = {"generate": "train_gpt2", "predict": "train_bert", "encode": "train_bert", "ids": ""}
BYTES = (256, 260)                                      # vocabularies of models that are trained on bytes
LONGEST_ARGUMENT = 100_000                              # bytes; Linux takes 131,072
become = lambda command: os.execvp(command[0], list(map(os.fsencode, command)))


def checkpoint_of(run):
    """the directory of the checkpoint that a run's name stands for: its last, or itself"""
    directory = run if os.path.isdir(run) else os.path.dirname(run) or "."
    steps = [os.path.dirname(path) for path in glob.glob(os.path.join(glob.escape(directory), "step_*", "config.json"))]
    return max((s for s in steps if re.fullmatch(r"step_\d{8}", os.path.basename(s))), default=directory)


class Words:
    """a tokenizer, and what its directory says of it"""

    def __init__(self, directory, plain=False):
        text, self.path = one_file(directory)
        self.tokenizer = tokenizer_of(text, self.path, plain)
        self.size = max(self.tokenizer.get_vocab().values(), default=0) + 1

    def ids(self, text, name="the text"):
        try:
            return self.tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        except UnicodeDecodeError as e:
            raise BadInput(f"{name}: not UTF-8 at byte {e.start:,}; {self.path} encodes characters") from None
        except Exception as e:                          # tokenizers raises a plain one
            raise BadInput(f"{self.path}: cannot encode {name} ({e})") from None

    def special(self, name):
        if (found := self.tokenizer.token_to_id(name)) is None:
            raise BadInput(f"{self.path}: has no token {name}, which a masked language model needs")
        return found

    def end_of_text(self, config):
        """the id that stands for an empty prompt"""
        path = os.path.join(os.path.dirname(self.path), "tokenizer_config.json")
        token = console.read_object(path).get("eos_token") if os.path.isfile(path) else None
        names = (token.get("content") if isinstance(token, dict) else token), "<|endoftext|>"
        found = [self.tokenizer.token_to_id(name) for name in names if isinstance(name, str)]
        return next((i for i in [*found, config.get("eos_token_id")] if isinstance(i, int)), 0)

    def shard(self, ids, end=0, group=0, documents=0):
        kind, magic, version = ("I", WIDE_MAGIC, WIDE_VERSION) if self.size > 1 << 16 else ("H", MAGIC, VERSION)
        return (header(len(ids), self.size, end, group, documents, magic=magic, version=version)
                + array.array(kind, ids).tobytes())

    def decoder(self):
        """a function that gives the text which an id adds"""
        stream = need("tokenizers.decoders").DecodeStream(skip_special_tokens=False)
        return lambda i: stream.step(self.tokenizer, i) or ""


def memory_file(data):
    """a file without a name, which ends with the processes that have it open"""
    with open(os.memfd_create("text", 0), "wb", closefd=False) as f:
        f.write(data)
    return f.name, f"@/proc/self/fd/{f.name}"


def decoded(source, expected, words):
    """the trainer's output; as text, if it begins with `expected`, the prompt's ids, for want of a vocabulary"""
    waiting, step = b"", None
    while block := os.read(source, 1 << 16):
        waiting += block
        if step is None and expected.startswith(waiting) and waiting != expected:
            continue                                    # still both
        if step is None:
            step = words.decoder() if waiting.startswith(expected) else False
        *ids, rest = waiting.split(b" ") if step else (waiting, b"")
        yield console.clean("".join(step(int(i)) for i in ids if i)).encode() if step else ids[0]
        waiting = rest
    yield (console.clean("".join(step(int(i)) for i in waiting.split())) + "\n").encode() if step else waiting


def relay(command, fd, expected, words):
    """the exit code of a trainer whose output is passed on, as are the signals that would end this process"""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(fd,), **console.OWN_GROUP)
    for which in signal.SIGINT, signal.SIGTERM:
        signal.signal(which, lambda number, _: child.send_signal(number))
    for text in decoded(child.stdout.fileno(), expected, words):
        try:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        except BrokenPipeError:                         # the reader has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            child.terminate()
    return child.wait() if child.wait() >= 0 else 128 - child.returncode


def generate(text, words, config, trainer, flags):
    if words is None:
        short = len(text) <= LONGEST_ARGUMENT and b"\0" not in text
        prompt = b"@" * text.startswith(b"@") + text if short else memory_file(text)[1].encode()
        become([*trainer, "--generate", os.fsdecode(prompt), *flags])
    ids = words.ids(text) or [words.end_of_text(config)]
    fd, path = memory_file(words.shard(ids))
    command = [*trainer, "--generate", path, *flags]
    return relay(command, fd, " ".join(map(str, ids)).encode(), words)


def predict(text, words, config, trainer, flags):
    if b"\0" in text:
        raise BadInput("the text has a byte 0")
    if words is None:
        if len(text) > LONGEST_ARGUMENT:
            raise BadInput(f"expected at most {LONGEST_ARGUMENT:,} bytes of text, got {len(text):,}")
        become([*trainer, "--predict", os.fsdecode(text), *flags])
    cls, sep, mask = map(words.special, ("[CLS]", "[SEP]", "[MASK]"))
    words.tokenizer.add_special_tokens(["[MASK]"])      # to be found in the text, if it is only a token so far
    if mask not in (ids := [cls, *words.ids(text), sep]):
        raise BadInput("there is no [MASK] in the text")
    print(text.decode("utf-8"), flush=True)
    become([*trainer, "--predict", memory_file(words.shard(ids, sep))[1], *flags])


def documents_of(data, words):
    """(the ids of the documents of a text, one in each line, and how many they are)"""
    cls, sep, ids = words.special("[CLS]"), words.special("[SEP]"), array.array("I")
    for n, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        if not (found := words.ids(line, f"line {n:,}")):
            raise BadInput(f"line {n:,}: expected a document, got nothing that has a token")
        ids.extend([cls, *found, sep])
    return ids, n


def encode(file, words, config, trainer, flags):
    """file: its name, or - for stdin; names of its documents may stand beside it in NAME.ids"""
    if words is None and file != "-":
        become([*trainer, "--encode", file, *flags])
    with tempfile.TemporaryDirectory(prefix="text.") as place:
        path, names = (os.path.join(place, f"documents.{end}") for end in ("bin" if words else "txt", "ids"))
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else console.open_regular(file) as f:
            data = f.read()
        if words:
            ids, count = documents_of(data, words)
            data, own = words.shard(ids, words.special("[SEP]"), 1, count), os.path.splitext(file)[0] + ".ids"
            numbers = "".join(f"{i}\n" for i in range(count))
            console.write_whole(names, console.read_bytes(own) if os.path.isfile(own) else numbers)
        console.write_whole(path, data)
        code = subprocess.call([*trainer, "--encode", path, *flags])
        return code if code >= 0 else 128 - code


def main(argv):
    p = console.parser(__doc__, usage="text.py {generate,predict,encode,ids} RUN TEXT [flags]")
    p.add_argument("--tokenizer")
    p.add_argument("--trainer")
    if {"-h", "--help"} & set(argv[:2]):
        return p.print_help()
    if len(argv) < 3 or argv[0] not in COMMANDS or argv[1].startswith("--") or argv[2].startswith("--"):
        p.error("expected a command, RUN, TEXT, then flags (give a text that begins with -- on stdin, and - in "
                "its place)")
    (command, run, text), (args, flags) = argv[:3], p.parse_known_args(argv[3:])
    place = checkpoint_of(run)
    path = os.path.join(place, "config.json")
    if not os.path.isfile(path) and not args.tokenizer:
        check_directory(run, "config.json", "tokenizer.json", "model.safetensors")
        raise BadInput(f"{run}: expected a run or a checkpoint, with config.json, or --tokenizer")
    config = console.read_object(path) if os.path.isfile(path) else {}
    bytes_are_tokens = config.get("vocab_size") in BYTES and not args.tokenizer
    words = None if bytes_are_tokens else Words(args.tokenizer or place, plain=command == "encode")
    data = text if command == "encode" else os.fsencode(text)
    if data == b"-":
        data = sys.stdin.buffer.read()
    if command == "ids":
        return print(*(words.ids(data) if words else data))
    if command == "generate" and words and {f.partition("=")[0] for f in flags} & {"--dump_bias", "--eval_lengths"}:
        raise BadInput("generate takes no flag that prints something else; run the trainer by itself for that")
    trainer = shlex.split(args.trainer or shlex.quote(os.path.join(console.ROOT, COMMANDS[command])))
    if not shutil.which(trainer[0]):
        raise BadInput(f"{trainer[0]}: no such program; make {COMMANDS[command]}, or give --trainer")
    if args.tokenizer:
        flags = ["--tokenizer", args.tokenizer, *flags]
    work = {"generate": generate, "predict": predict, "encode": encode}[command]
    return work(data, words, config, [*trainer, "--load", run], flags)


if __name__ == "__main__":
    console.run(main)
