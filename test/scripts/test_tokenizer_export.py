"""test_tokenizer_export.py -- transformers reads the tokenizer of a checkpoint.

The trainers write checkpoints with every kind of tokenizer. AutoTokenizer gives the golden ids, and ids whose tokens
--dump_bias shows.
"""
import glob
import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

import interpreter

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__":
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    interpreter.choose("transformers", also=sorted(glob.glob(f"{cache}/cable.c/exports-*/bin/python")))
from folder import Folder  # noqa: E402

HOME = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=HOME.name, HF_MODULES_CACHE=os.path.join(HOME.name, "modules"), HF_HUB_OFFLINE="1",
                  TRANSFORMERS_VERBOSITY="error")
has_transformers = importlib.util.find_spec("transformers") is not None
has_torch = importlib.util.find_spec("torch") is not None
if has_transformers:
    import transformers
    transformers.utils.logging.disable_progress_bar()
DATA = os.environ.get("CABLE_DATA", "")
SPECIAL = ("<|endoftext|>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXTS = ["", "To be, or not to be", "  two spaces\n\tand a tab", "caf\u00e9 na\u00efve \u4f60\u597d \U0001f600",
         "the then other the", "I'll don't we've 12345", "\u0000\u0001", "trailing "]


def program(name):
    return os.environ.get(name.upper()) or os.path.join(ROOT, name)


def shard(path, vocab, end, ids):
    header = [20240520, 1, len(ids), vocab, end] + [0] * 251
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", *header) + struct.pack(f"<{len(ids)}H", *ids))


def golden(name):
    with open(os.path.join(DATA, name), encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    # transformers finds special tokens in a text, where the golden ids are of plain text
    return [(row["text"], row["ids"]) for row in rows if not any(s in row["text"] for s in SPECIAL)]


def needs(*names):
    """skips a test where something is not built or installed"""
    missing = [name for name in names if not os.access(program(name), os.X_OK)]
    if not has_transformers:
        return unittest.skip("SKIPPED: transformers is not installed; set PYTORCH_PYTHON to a python3 that has it")
    return unittest.skipIf(missing, f"SKIPPED: there is no {', '.join(missing)}")


needs_data = unittest.skipUnless(DATA, "SKIPPED: CABLE_DATA is not set")


class Exported(Folder):
    def train(self, name, data, *flags):
        """the directory of a checkpoint"""
        out = self.path("out")
        command = [program(name), "--train_files", data, "--model", "1,2,16", "--T", "16", "--B", "2", "--steps", "1",
                   "--val_every", "0", "--checkpoint_every", "1", "--threads", "1", "--out", out, *flags]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return os.path.join(out, "step_00000001")

    def tokenizer(self, step):
        # without trust no code of the checkpoint may run, and without PyTorch it cannot; questions get no answer
        stdin, sys.stdin = sys.stdin, open(os.devnull)
        try:
            return transformers.AutoTokenizer.from_pretrained(step, trust_remote_code=has_torch)
        finally:
            sys.stdin.close()
            sys.stdin = stdin

    def shown(self, step, ids):
        """the text of each id in the trainer"""
        command = [program("train_gpt2"), "--load", step, "--threads", "1", "--out", self.path("bias"), "--dump_bias",
                   "0,0," + " ".join(map(str, ids))]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(self.read("bias/bias_0_0.json"))["tokens"]

    def check_ids(self, tokenizer, rows, decodes=True):
        self.assertGreater(len(rows), 5)
        for text, ids in rows:
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            self.assertEqual(list(found), list(ids), repr(text))
            if decodes:
                self.assertEqual(tokenizer.decode(found), text)


class TestGPT2(Exported):
    def small_vocabulary(self, end):
        """the bytes and four merges; end: with <|endoftext|>"""
        printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        spell = {b: chr(b if b in printed else next(others)) for b in range(256)}
        space = spell[32]
        tokens = [spell[b] for b in range(256)] + ["th", "the", space + "the", "er"] + ["<|endoftext|>"] * end
        self.write("encoder.json", json.dumps({token: i for i, token in enumerate(tokens)}))
        self.write("vocab.bpe", f"#version: 0.2\nt h\nth e\n{space} the\ne r\n")
        shard(self.path("ids.bin"), len(tokens), 0, [i % len(tokens) for i in range(3000)])
        return len(tokens)

    @needs("train_gpt2")
    @needs_data
    def test_golden(self):
        source = os.path.join(DATA, "tiny_shakespeare_val.bin")
        step = self.train("train_gpt2", source, "--tokenizer", os.path.join(DATA, "encoder.json"), "--pos", "learned")
        tokenizer = self.tokenizer(step)
        self.assertEqual((len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id), (50257, 50256, 50256))
        self.assertEqual(tokenizer.model_max_length, 16)
        self.check_ids(tokenizer, golden("golden_gpt2_bpe.jsonl"))
        end = transformers.GenerationConfig.from_pretrained(step)
        self.assertEqual((end.eos_token_id, end.bos_token_id), (50256, 50256))
        # and back: what transformers saves is a --tokenizer, and is kept as it is
        tokenizer.save_pretrained(self.path("saved"))
        if os.path.exists(self.path("saved/tokenizer.json")):
            os.rename(self.path("out"), self.path("before"))
            again = self.train("train_gpt2", source, "--tokenizer", self.path("saved/tokenizer.json"))
            self.check_ids(self.tokenizer(again), golden("golden_gpt2_bpe.jsonl"))
            self.assertGreater(self.tokenizer(again).model_max_length, 1 << 40)         # the default, cable: any length

    @needs("train_gpt2")
    def test_small(self):
        for end in (False, True):
            with self.subTest(end=end):
                size = self.small_vocabulary(end)
                step = self.train("train_gpt2", self.path("ids.bin"), "--tokenizer", self.path("encoder.json"))
                os.rename(self.path("out"), self.path(f"out{end}"))
                step = step.replace("/out/", f"/out{end}/")
                tokenizer = self.tokenizer(step)
                self.assertEqual(len(tokenizer), size)
                self.assertEqual(tokenizer.eos_token_id, 260 if end else None)
                for text in ("the then other", "  weather, thethe\n"):
                    ids = tokenizer(text)["input_ids"]
                    self.assertEqual([tokenizer.decode([i]) for i in ids], self.shown(step, ids))
                    self.assertLess(max(ids), size)

    @needs("train_gpt2")
    def test_bytes(self):
        step = self.train("train_gpt2", self.write("t.txt", "what came before it " * 50))
        tokenizer = self.tokenizer(step)
        self.assertEqual(len(tokenizer), 256)
        self.check_ids(tokenizer, [(t, list(t.encode())) for t in TEXTS])
        special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        self.assertEqual((special, tokenizer.unk_token_id), ((0, 0, 0), None))
        self.assertEqual(dict(tokenizer(["a\n", "abc"], padding=True)),
                         {"input_ids": [[0, 97, 10], [97, 98, 99]], "attention_mask": [[0, 1, 1], [1, 1, 1]]})
        self.assertEqual(tokenizer.decode([97, 10, 98, 0], skip_special_tokens=True), "a\nb")


class TestBERT(Exported):
    @needs("train_bert")
    @needs_data
    def test_golden(self):
        draw = random.Random(1)
        ids = [i for _ in range(20) for i in [101, *(draw.randrange(1000, 30000) for _ in range(60)), 102]]
        shard(self.path("ids.bin"), 30522, 102, ids)
        step = self.train("train_bert", self.path("ids.bin"), "--tokenizer", os.path.join(DATA, "vocab.txt"), "--pos",
                          "learned")
        tokenizer = self.tokenizer(step)
        self.assertEqual((len(tokenizer), tokenizer.model_max_length), (30522, 16))
        self.check_ids(tokenizer, golden("golden_bert_wordpiece.jsonl"), decodes=False)
        self.assertEqual(tokenizer("a [MASK]")["input_ids"], [101, 1037, 103, 102])
        self.assertFalse(os.path.exists(os.path.join(step, "generation_config.json")))
        tokenizer.save_pretrained(self.path("saved"))
        if os.path.exists(self.path("saved/tokenizer.json")):
            os.rename(self.path("out"), self.path("before"))
            again = self.train("train_bert", self.path("ids.bin"), "--tokenizer", self.path("saved/tokenizer.json"))
            self.check_ids(self.tokenizer(again), golden("golden_bert_wordpiece.jsonl"), decodes=False)

    @needs("train_bert")
    def test_bytes(self):
        tokenizer = self.tokenizer(self.train("train_bert", self.write("t.txt", "what came before it " * 50)))
        self.assertEqual(len(tokenizer), 260)
        self.check_ids(tokenizer, [(t, list(t.encode())) for t in TEXTS])
        self.assertEqual(tokenizer("a [MASK]")["input_ids"], [257, 97, 32, 259, 258])
        self.assertEqual(tokenizer.pad_token_id, 256)


if __name__ == "__main__":
    unittest.main(verbosity=2)
