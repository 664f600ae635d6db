"""test_text.py -- scripts/text.py: the ids equal the tokenizers library's, and what is printed is what the trainer
prints of these ids.

It needs tokenizers (data/requirements.txt) and, for all but the ids, the trainers. The golden texts need CABLE_DATA.
"""
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import unittest
from unittest import mock

from folder import (BERT_TRAINER, ENVIRONMENT, HAS_BERT, HAS_TRAINER, ROOT, SCRIPTS, TRAINER, Folder, console,
                    read_bytes, temporary)

sys.path.append(os.path.join(ROOT, "data"))
import text        # noqa: E402

HAS_TOKENIZERS = importlib.util.find_spec("tokenizers")
REAL = os.environ.get("CABLE_DATA", "")
CORPUS = ("The cable's sum S of the cable, and 1234 more: caf\u00e9! We'LL see what it does,\n\n  here or there. "
          "\u4e2d\u6587 \U0001f600 A query; the passage of numbers 0123456789.\n")
TEXTS = (CORPUS, " the  cable", "We'LL\u00a0see\n \n\n", "caf\u00e9 cafe\u0301 \u4e2d", "1234567", "\U0001f600\t.\r\n",
         "1984", "a <|endoftext|> b[MASK]c [SEP]", "@home", "don't", "sum<|endoftext|>")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
         r"\s+(?!\S)|\s+")


def trained(model, kind, pre_tokenizer, decoder, normalizer=None, **more):
    """a tokenizer of CORPUS by the library"""
    import tokenizers
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoder
    if normalizer:
        made.normalizer = normalizer
    made.train_from_iterator([CORPUS] * 20, getattr(tokenizers.trainers, kind)(show_progress=False, **more))
    return made


def tokenizers_of_each_kind():
    """{name: tokenizer}"""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    llama = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"),
                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "vocab_size": 300}
    made = {"gpt2": trained(models.BPE(), "BpeTrainer", by_bytes, decoders.ByteLevel(), **alphabet,
                            special_tokens=["<|endoftext|>"]),
            "llama": trained(models.BPE(ignore_merges=True), "BpeTrainer", llama, decoders.ByteLevel(), **alphabet,
                             special_tokens=["<|begin_of_text|>", "<|endoftext|>"]),
            "unigram": trained(models.Unigram(), "UnigramTrainer", pre_tokenizers.Metaspace(), decoders.Metaspace(),
                               normalizers.NFKC(), vocab_size=100, unk_token="<unk>", special_tokens=["<unk>"])}
    made["llama"].post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    for name, lower in (("cased", False), ("uncased", True)):
        made[name] = trained(models.WordPiece(unk_token="[UNK]"), "WordPieceTrainer",
                             pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
                             normalizers.BertNormalizer(lowercase=lower), vocab_size=120, special_tokens=SPECIAL)
        made[name].post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


@unittest.skipUnless(HAS_TOKENIZERS, "Python's tokenizers is missing: pip install -r data/requirements.txt")
class Case(Folder):
    @classmethod
    def setUpClass(cls):
        cls.place, cls.made = temporary(cls.addClassCleanup), tokenizers_of_each_kind()
        for name, tokenizer in cls.made.items():
            os.mkdir(os.path.join(cls.place, name))
            tokenizer.enable_truncation(4)              # which must cut no text
            tokenizer.enable_padding(length=9)
            tokenizer.save(cls.of(name, "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()

    @classmethod
    def of(cls, *names):
        return os.path.join(cls.place, *names)

    def text(self, *words, code=0, stdin=b"", env={}):
        """what text.py prints, as bytes; it must end with this code, and without a traceback"""
        p = subprocess.run([sys.executable, os.path.join(SCRIPTS, "text.py"), *words], input=stdin,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENVIRONMENT, **env})
        self.said = p.stderr.decode()
        self.assertNotIn("Traceback", self.said)
        self.assertNotIn("panicked", self.said)
        self.assertEqual(p.returncode, code, self.said)
        return p.stdout

    def ids(self, directory, text):
        return [int(i) for i in self.text("ids", directory, "-", "--tokenizer", directory, stdin=text.encode()).split()]


class Ids(Case):
    def test_are_those_of_the_library(self):
        for name, tokenizer in self.made.items():
            for text in TEXTS:
                self.assertEqual(self.ids(self.of(name), text), tokenizer.encode(text, add_special_tokens=False).ids,
                                 (name, text))

    def test_ids_above_65535_take_four_bytes(self):
        for size, bytes_of_id in ((1 << 16, 2), ((1 << 16) + 1, 4)):
            shard = text.Words.shard(mock.Mock(size=size), [size - 1] * 3)
            self.assertEqual(len(shard), 1024 + 3 * bytes_of_id)

    def test_of_a_vocabulary_without_tokenizer_json(self):
        """its two files of before, and the files that a checkpoint of the trainer has beside them"""
        for name in "gpt2", "uncased", "cased":
            self.made[name].model.save(self.path(), name)
            os.mkdir(self.path(name))
            for file in ("vocab.json", "merges.txt", "vocab.txt"):
                if os.path.exists(self.path(f"{name}-{file}")):
                    shutil.move(self.path(f"{name}-{file}"), self.path(name, file))
            self.write(f"{name}/tokenizer_config.json", json.dumps({"do_lower_case": name == "uncased"}))
            for text in TEXTS:
                self.assertEqual(self.ids(self.path(name), text),
                                 self.made[name].encode(text, add_special_tokens=False).ids, (name, text))
        self.write("gpt2/added_tokens.json", json.dumps({"<x>": self.made["gpt2"].get_vocab_size()}))
        self.assertEqual(self.ids(self.path("gpt2"), "a<x>b")[1], self.made["gpt2"].get_vocab_size())

    @unittest.skipUnless(os.path.exists(os.path.join(REAL, "golden_gpt2_bpe.jsonl")), "no golden texts in CABLE_DATA")
    def test_golden_texts(self):
        sys.path.append(os.path.join(ROOT, "data"))
        import encoding
        for file, names, count in (("golden_gpt2_bpe.jsonl", ("encoder.json", "vocab.bpe"), 456),
                                   ("golden_bert_wordpiece.jsonl", ("vocab.txt",), 454)):
            os.mkdir(self.path(names[0] + ".d"))
            for name in names:
                shutil.copy(os.path.join(REAL, name), self.path(names[0] + ".d"))
            tokenizer = encoding.tokenizer_of(*encoding.one_file(self.path(names[0] + ".d")), True)
            with open(os.path.join(REAL, file), encoding="utf-8") as f:
                cases = [json.loads(line) for line in f]
            self.assertEqual(len(cases), count)
            for case in cases:
                found = tokenizer.encode(case["text"], add_special_tokens=False).ids
                self.assertEqual(found, case["ids"], case["text"])

    def test_what_is_refused_in_one_line(self):
        def refused(*words, says, **more):
            self.text(*words, code=2, **more)
            self.assertRegex(self.said, says)
        refused("ids", self.path("none"), "x", says="none: expected a run or a checkpoint|no such directory")
        refused("ids", self.of("gpt2"), "x", says="gpt2: expected a run or a checkpoint, with config.json")
        refused("ids", self.of("gpt2"), "--tokenizer", "x", says="expected a command, RUN, TEXT, then flags")
        refused("generate", "--tokens", "3", says="expected a command")
        refused("sing", "a", "b", says="expected a command")
        flags = ("--tokenizer", self.of("gpt2"))
        refused("ids", "x", "-", *flags, stdin=b"ab\xff", says="^text.py: the text: not UTF-8 at byte 2; .*gpt2")
        refused("generate", "x", "a", *flags, "--trainer", "/no/program", says="/no/program: no such program; make")
        refused("predict", "x", "a [MASK]", *flags, says="has no token .CLS., which a masked language model needs")
        refused("predict", "x", "no mask", "--tokenizer", self.of("cased"), says="there is no .MASK. in the text")
        table = json.loads(self.read(self.of("gpt2/tokenizer.json")))
        table["model"].update(vocab={"a": 0, "b": 1}, merges=["a b"])
        refused("ids", "x", "a", "--tokenizer", self.write("tokenizer.json", json.dumps(table)),
                says="tokenizer.json: expected a tokenizer.json, but Python's tokenizers cannot read it")
        refused("ids", "x", "a", "--tokenizer", self.write("vocab.json", '{"a": 0}'), says="expected merges.txt")
        refused("ids", "x", "a", "--tokenizer", self.write("some.txt", "a\nb\n"), says="some.txt: has no line .UNK.")
        self.write("run/config.json", '{"vocab_size": 300}')
        refused("ids", self.path("run"), "a", says="run: expected tokenizer.json.* there; name another by --tokenizer")
        self.write("without/tokenizers.py", "raise ImportError")
        refused("ids", "x", "a", *flags, env={"PYTHONPATH": self.path("without")},
                says="^text.py: .*Python's module tokenizers is missing: .*pip install -r data/requirements.txt\n$")


@unittest.skipUnless(HAS_TRAINER, "train_gpt2 is not built")
class Generate(Case):
    FLAGS = ("--tokens", "12", "--threads", "1")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for name in ("gpt2", "llama", "unigram", "bytes"):
            V = cls.made[name].get_vocab_size() if name in cls.made else 256
            ids = [i * i % V for i in range(99)]
            with open(cls.of("data.bin"), "wb") as f:
                f.write(struct.pack("<256i", 20240520, 1, 99, V, 1, *[0] * 251) + struct.pack("<99H", *ids))
            flags = ("--tokenizer", cls.of(name)) if name == "gpt2" else ()
            subprocess.run([TRAINER, "--train_files", cls.of("data.bin"), "--model", "1,1,16", "--T", "16", "--B", "1",
                            "--steps", "60", "--lr", "0.1", "--val_every", "0", "--sample_every", "0",
                            "--checkpoint_every", "60", "--threads", "1", "--out", cls.of("run", name), *flags],
                           check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def trainer(self, name, prompt, *flags):
        flags = flags or self.FLAGS
        return subprocess.run([TRAINER, "--load", self.of("run", name), "--generate", prompt, *flags],
                              check=True, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout

    def asked(self, name, text):
        """what the trainer reads of this text"""
        if name == "bytes":
            return "@" * text.startswith("@") + text
        return " ".join(map(str, self.made[name].encode(text, add_special_tokens=False).ids))

    def test_as_the_trainer_prints_it(self):
        for name in "gpt2", "bytes":
            for text in (*TEXTS, ""):
                asked = self.asked(name, text)
                for run in self.of("run", name), self.of("run", name, "step_00000060"):
                    self.assertEqual(self.text("generate", run, text, *self.FLAGS), self.trainer(name, asked), text)
                    self.assertRegex(self.said, "[0-9]+ tokens(, up to the end of the text)?, [0-9.]+ tokens/s\n$")
        self.assertTrue(self.text("generate", self.of("run/gpt2"), CORPUS, *self.FLAGS).startswith(CORPUS.encode()))
        self.assertTrue(self.text("generate", self.of("run/bytes"), "-", *self.FLAGS, stdin=b"a\xff\0b")
                        .startswith("a\ufffd\\x00b".encode()))

    def test_a_prompt_of_200_kb(self):
        text, flags = CORPUS.encode() * (200_000 // len(CORPUS.encode()) + 1), ("--tokens", "2", "--threads", "2")
        said = self.text("generate", self.of("run/gpt2"), "-", *flags, stdin=text)
        self.assertTrue(said.startswith(text[:99]))
        ids = self.asked("gpt2", text.decode())
        self.assertEqual(said, self.trainer("gpt2", "@" + self.write("prompt.txt", ids), *flags))
        shows = self.shell("trainer", 'cat "${4#@}"')               # --load RUN --generate @FILE
        self.assertEqual(self.text("generate", self.of("run/bytes"), "-", "--trainer", shows, stdin=text), text)

    def test_of_another_split_and_of_another_kind(self):
        """the trainer prints the text of a byte-level vocabulary, and ids of Unigram, which become text here"""
        for name in "llama", "unigram":
            tokenizer = self.made[name]
            for text in (CORPUS, "1984", "<unk>", ""):
                ids = tokenizer.encode(text, add_special_tokens=False).ids or [1 if name == "llama" else 0]
                found = self.trainer(name, " ".join(map(str, ids))).split()
                shown = self.text("generate", self.of("run", name), text, "--tokenizer", self.of(name), *self.FLAGS)
                plain = tokenizer.decode(list(map(int, found)), skip_special_tokens=False)
                self.assertEqual(shown.decode(), console.clean(plain) + "\n", (name, text))

    def test_ids_of_a_trainer_become_text(self):
        """as it prints them if it cannot show the vocabulary: the model has fewer rows, for example"""
        shows = self.shell("ids", "echo " + self.asked("gpt2", CORPUS))
        self.assertEqual(self.text("generate", self.of("run/gpt2"), CORPUS, "--trainer", shows),
                         console.clean(CORPUS).encode() + b"\n")

    def test_the_reader_may_go(self):
        command = [sys.executable, os.path.join(SCRIPTS, "text.py"), "generate", self.of("run/unigram"), "a",
                   "--tokenizer", self.of("unigram"), "--tokens", "100000", "--threads", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as p:
            p.stdout.read(20)
            p.stdout.close()
            said = p.stderr.read().decode()
        self.assertNotIn("Traceback", said)
        self.assertNotIn("Broken pipe", said)
        self.assertIn(p.returncode, (141, 143))         # the trainer's, which a signal ends


@unittest.skipUnless(HAS_BERT, "train_bert is not built")
class Bert(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for name in "cased", "uncased", "bytes":
            flags, data = ("--tokenizer", cls.of(name)), cls.of("data.bin")
            if name == "bytes":
                flags, data = (), cls.of("data.txt")
                with open(data, "w") as f:
                    f.write(CORPUS * 9)
            else:
                ids = [2, *cls.made[name].encode(CORPUS * 9, add_special_tokens=False).ids, 3]
                head = struct.pack("<256i", 20240520, 1, len(ids), cls.made[name].get_vocab_size(), 3, *[0] * 251)
                with open(data, "wb") as f:
                    f.write(head + struct.pack(f"<{len(ids)}H", *ids))
            p = subprocess.run([BERT_TRAINER, "--train_files", data, "--model", "1,1,16", "--T", "32", "--B", "1",
                                "--steps", "60", "--lr", "0.03", "--val_every", "0", "--checkpoint_every", "60",
                                "--threads", "1", "--out", cls.of("run", name), *flags], env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert p.returncode == 0, p.stdout

    def trainer(self, name, *flags):
        return subprocess.run([BERT_TRAINER, "--load", self.of("run", name), *flags, "--threads", "1"], check=True,
                              env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout

    def marked(self, name, text):
        """the ids of the library, [CLS], [SEP] and [MASK] included"""
        return " ".join(map(str, self.made[name].encode(text).ids))

    def test_predict(self):
        for name in "cased", "uncased", "bytes":
            for text in ("The [MASK] of the Cable's caf\u00e9.", "[MASK][MASK]x", "@a [MASK]"):
                asked = text if name == "bytes" else self.marked(name, text)
                self.assertEqual(self.text("predict", self.of("run", name), text, "--threads", "1"),
                                 self.trainer(name, "--predict", asked).replace(asked.encode(), text.encode(), 1), text)
        # another normalizer of the same tokens
        from tokenizers import Tokenizer, normalizers
        other, text = Tokenizer.from_file(self.of("cased", "tokenizer.json")), "The [MASK] of the Cable."
        other.normalizer = normalizers.Sequence([other.normalizer])
        os.mkdir(self.path("other"))
        other.save(self.path("other/tokenizer.json"))
        self.assertEqual(self.text("predict", self.of("run", "cased"), text, "--tokenizer", self.path("other"),
                                   "--threads", "1"), self.text("predict", self.of("run/cased"), text))

    def shard(self, path, name, lines):
        """a collection of these documents, as train_bert reads it"""
        ids = [i for line in lines for i in self.made[name].encode(line).ids]
        size = self.made[name].get_vocab_size()
        head = struct.pack("<256i", 20240520, 1, len(ids), size, 3, 1, len(lines), *[0] * 249)
        return self.write(path, head + struct.pack(f"<{len(ids)}H", *ids))

    def test_encode(self):
        lines = ["The Cable\r", "caf\u00e9 and more", "here"]
        for name in "cased", "uncased", "bytes":
            path = self.write("d.txt", "\n".join(lines))
            theirs = path if name == "bytes" else self.shard("s.bin", name, lines)
            for names in "0\n1\n2\n", "a\nb\nc\n":
                for file in "d.ids", "s.ids":
                    self.write(file, names)
                self.trainer(name, "--encode", theirs, "--out", self.path("theirs"))
                if names[0] == "0":
                    os.remove(self.path("d.ids"))
                self.text("encode", self.of("run", name), path, "--out", self.path("ours"), "--threads", "1")
                for file in ("embeddings.safetensors", "embeddings.ids"):
                    self.assertEqual(read_bytes(self.path("ours", file)), read_bytes(self.path("theirs", file)), name)
            os.remove(self.path("d.ids"))
        self.text("encode", self.of("run/cased"), "-", "--out", self.path("o"), "--threads", "1", stdin=b"[SEP] a\nb\n")
        self.assertEqual(self.read("o/embeddings.ids"), "0\n1\n")
        self.text("encode", self.of("run/cased"), "-", "--out", self.path("o"), stdin=b"a\n\nb", code=2)
        self.assertIn("text.py: line 2: expected a document", self.said)
        self.text("encode", self.of("run/cased"), "-", "--out", self.path("o"), stdin=b"a\nb\xff", code=2)
        self.assertIn("text.py: line 2: not UTF-8 at byte 1", self.said)


if __name__ == "__main__":
    unittest.main()
