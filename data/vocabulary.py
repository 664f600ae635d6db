#!/usr/bin/env python3
"""vocabulary.py -- GPT-2's vocabulary as files, by which the trainer prints text and scripts/text.py reads it.

    data/vocabulary.py --out data/gpt2
    scripts/text.py generate run/cable "Once upon a time" --tokenizer data/gpt2

Source    vocab.json and merges.txt of openai-community/gpt2 on the hub; with --local, the files in DIR under these
          names or OpenAI's, encoder.json and vocab.bpe
Size      1.5 MB to download, 3.3 MB written
Licence   MIT
Tokens    50,257; checked against the known sha256 of the table
Time      seconds

Writes encoder.json and vocab.bpe, and tokenizer.json, the same as one file, as transformers reads it.
"""
import hashlib
import os

from common import BadInput, check_own, console, locked, parser, run, say, write_file
from download import cache_of, hub_file
from encoding import bpe_json, check_directory, first_file, gpt2_ranks

REPO = "openai-community/gpt2"
NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}               # OpenAI's, the hub's


def source_files(args):
    """({name: path}, where from)"""
    local = args.local or args.tokenizer
    if local:
        check_directory(local, *NAMES.values())
        found = {name: first_file(local, (name, other)) for name, other in NAMES.items()}
        if not all(found.values()):
            raise BadInput(f"{local}: expected encoder.json and vocab.bpe, or vocab.json and merges.txt there")
        return found, local
    return {name: hub_file(REPO, other, cache_of(args), kind="model") for name, other in NAMES.items()}, REPO


def main(argv):
    args = parser(__doc__, "data/gpt2", encodings=("gpt2",)).parse_args(argv)
    files, where = source_files(args)
    gpt2_ranks(os.path.dirname(files["encoder.json"]))
    with locked(args.out):
        contents = {os.path.join(args.out, name): console.read_bytes(path) for name, path in files.items()}
        one = bpe_json(*(files[name] for name in NAMES))
        contents[os.path.join(args.out, "tokenizer.json")] = (one + "\n").encode("utf-8")
        for path, data in contents.items():
            check_own(path, hashlib.sha256(data).hexdigest())
        for path, data in contents.items():
            write_file(path, data)
    say(f"wrote {args.out}/encoder.json, {args.out}/vocab.bpe and {args.out}/tokenizer.json, from {where}")


if __name__ == "__main__":
    run(main)
