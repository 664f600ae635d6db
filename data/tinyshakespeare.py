#!/usr/bin/env python3
"""tinyshakespeare.py -- tiny Shakespeare as llm.c cuts it: tiny_shakespeare_val.bin, tiny_shakespeare_train.bin.

Source    data/tinyshakespeare/input.txt in github.com/karpathy/char-rnn; with --local, DIR/input.txt
Size      1.1 MB to download, 0.7 MB of shards
Licence   the text is in the public domain
Tokens    32,768 for validation and 305,260 for training (GPT-2's); a document is the text between two empty lines
Time      seconds
"""
import os

from build import MAX_SHARD_TOKENS, Stream, build
from common import BadInput, parser, run, say, sha256_of
from download import cache_of, download, vocabulary
from sources import Reader

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE, SHA256 = 1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
VAL_TOKENS = 32768


def name_of(shard):
    """the file of shard 0, 1, ...; the text fits in two"""
    names = ("tiny_shakespeare_val.bin", "tiny_shakespeare_train.bin")
    return names[shard] if shard < 2 else f"tiny_shakespeare_train{shard}.bin"


def main(argv):
    args = parser(__doc__, "data/tinyshakespeare").parse_args(argv)
    if args.local:
        path = os.path.join(args.local, "input.txt")
        if not os.path.isfile(path):
            raise BadInput(f"{path}: no such file; --local expects a directory with input.txt")
        if sha256_of(path) != SHA256:
            say(f"warning: {path} is not the usual tiny Shakespeare, whose sha256 is {SHA256[:12]}...")
    else:
        path = download(URL, os.path.join(cache_of(args), "input.txt"), SIZE, SHA256)
    stream = Stream("text", Reader("section"), [path], name_of, lambda i: MAX_SHARD_TOKENS if i else VAL_TOKENS, full=1)
    facts = {"name": "tiny Shakespeare", "licence": "public domain"}
    build(args.out, [stream], args.encoding, vocabulary(args), 1, facts)


if __name__ == "__main__":
    run(main)
