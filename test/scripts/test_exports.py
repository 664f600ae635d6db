"""test_exports.py -- the trainers and PyTorch compute the same from the same files.

PyTorch reads the checkpoints of every encoding with dev/hf/modeling_cable.py, and those with learned positions also
with transformers' own GPT-2 and BERT. The trainer reads what transformers saves, and scores HellaSwag as PyTorch does.
Every bound is a multiple of an error measured here: how far PyTorch's own results in float32 are from float64.
"""
import contextlib
import copy
import importlib.util
import io
import json
import logging
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import interpreter

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__":
    interpreter.choose("torch, transformers, safetensors", "torch")
from folder import Folder, read, read_bytes  # noqa: E402

HOME = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=HOME.name, HF_MODULES_CACHE=os.path.join(HOME.name, "modules"), HF_HUB_OFFLINE="1",
                  TRANSFORMERS_VERBOSITY="error")
has_torch = importlib.util.find_spec("torch") is not None
has_transformers = has_torch and all(importlib.util.find_spec(m) for m in ("transformers", "safetensors"))
has_mteb = importlib.util.find_spec("mteb") is not None
has_peft = has_transformers and importlib.util.find_spec("peft") is not None
has_bitsandbytes = has_transformers and all(importlib.util.find_spec(m) for m in ("bitsandbytes", "accelerate"))
has_lm_eval = has_transformers and importlib.util.find_spec("lm_eval") is not None
if has_torch:
    import torch
    import torch.nn.functional as F
    sys.path.insert(0, os.path.join(ROOT, "dev", "hf"))
    from modeling_cable import (POSITIONS, CableConfig, CableGPT2, load_checkpoint, project, read_safetensors,
                                save_checkpoint, write_safetensors)
    import export
    import console
if has_transformers:
    import safetensors
    import transformers
    # before caches with layers: a static one had the width of a head from the start
    OLD_CACHES = not hasattr(transformers.cache_utils, "StaticLayer")
    transformers.utils.logging.disable_progress_bar()
DATA = os.environ.get("CABLE_DATA", "")
NO_TORCH = "SKIPPED: PyTorch is not installed; set PYTORCH_PYTHON to a python3 that has it"
NO_TRANSFORMERS = ("SKIPPED: transformers and safetensors are not installed; set PYTORCH_PYTHON to a python3 that has "
                   "them")
NO_LM_EVAL = "SKIPPED: lm_eval is not installed; make exports installs it"
NO_PEFT = "SKIPPED: peft is not installed; make exports installs it"
NO_DATA = "SKIPPED: set CABLE_DATA to a directory with hellaswag_val_500.bin and tiny_shakespeare_train.bin"
HAS_DATA = all(os.path.exists(os.path.join(DATA, f)) for f in ("hellaswag_val_500.bin", "tiny_shakespeare_train.bin"))

TRAINER = os.path.join(ROOT, os.environ.get("TRAIN_GPT2", "train_gpt2"))
T, TOKENS = 32, 1000                                    # the last window of either length is cut short
FACTOR = 8                                              # bounds are this many times float32's own error
V = 300                                                 # vocabulary of models that print ids, not text
# forms of the encodings other than the default ones
OPTIONS = ["cable:bias=0.5,gate=0.3", "t5_clip:K=5", "rope:theta=50", "rope:p=0.25", "kcable:weight=inside",
           "alibi:slopes=geometric,scale=0.3", "t5:buckets=12,distance=40", "t5_clip:K=5,scale=C,layers=own",
           "sinusoidal:scale=1,embed=sqrt", "alibi_random:seed=7,mean=0.3", "cope:npos=6", "rope:theta=50,clock=cable"]
# every hook; columns, a rotation and a table of one layer only
COMPOSED = ["sinusoidal+rope:theta=50+ssmax+cable,sinusoidal+t5_clip:K=5"]
SCALINGS = ("pi", "ntk:3", "yarn", "longrope:factors.json")
# of the 8 pairs of a head of 16 channels
FACTORS = {"short_factor": [1 + 0.05 * i for i in range(8)], "long_factor": [1 + i for i in range(7)] + [0.5]}
NO_EFFECT = "fire.mlp.2.bias"                           # adds the same to every score of a row: softmax ignores it
TEXT = read_bytes("LICENSE")


def trainer(directory, *flags):
    """the standard output of train_gpt2, as bytes"""
    common = ["--val_every", "0", "--sample_every", "0", "--threads", "1"]
    run = subprocess.run([TRAINER, *common, *flags], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.returncode == 0, f"{' '.join(flags)}: exit code {run.returncode}\n{run.stderr.decode()}"
    return run.stdout


def write_shard(path, vocab, end):
    """the text as ids of a larger vocabulary; `end` begins a document"""
    with open(path, "wb") as f:
        f.write(struct.pack("<5i", 20240520, 1, len(TEXT), vocab, end).ljust(1024, b"\0"))
        f.write(struct.pack(f"<{len(TEXT)}H", *TEXT))


def train(directory, out, pos, *flags, steps=40):
    length = () if "--T" in flags else ("--T", str(T))
    text = "lines.bin" if "--document_mask" in flags else "text.txt"
    trainer(directory, "--train_files", text, "--val_files", text, "--pos", pos, "--B", "4", *length,
            "--steps", str(steps), "--checkpoint_every", str(steps), "--out", out, *flags)
    return os.path.join(directory, out, f"step_{steps:08d}")


def records(directory, kind):
    return [r for r in map(json.loads, read(directory, "log.jsonl").splitlines()) if r["kind"] == kind]


def trainer_curves(directory, load, lengths, *flags, val="text.txt"):
    """{T: (loss at each position, mean loss, perplexity)}"""
    with tempfile.TemporaryDirectory(dir=directory) as out:
        trainer(directory, "--load", load, "--val_files", val, "--eval_lengths", ",".join(map(str, lengths)),
                "--eval_tokens", str(TOKENS), "--curve", "--out", out, *flags)
        curves = {r["T"]: r["loss"] for r in records(out, "curve")}
        return {r["T"]: (curves[r["T"]], r["loss"], r["ppl"]) for r in records(out, "extrapolation")}


def reference_curve(logits_of, length):
    """(mean loss at each position of windows of `length` over the first TOKENS targets, mean over all positions)"""
    ids, total = torch.tensor(list(TEXT[:TOKENS + 1])), torch.zeros(length, dtype=torch.float64)
    whole = TOKENS - TOKENS % length
    with torch.no_grad():
        for first, last in ((0, whole), (whole, TOKENS)):
            n = min(length, last - first)
            logits = logits_of(ids[first:last].view(-1, n)).double()
            nll = torch.logsumexp(logits, -1) - logits.gather(-1, ids[first + 1:last + 1].view(-1, n, 1))[..., 0]
            total[:n] += nll.sum(0)
    count = torch.full((length,), whole // length)
    count[:TOKENS - whole] += 1
    return total / count, total.sum().item() / TOKENS


def greatest(difference):
    return difference.abs().max().item()


def doubled(model):
    return copy.deepcopy(model).double()


def steps_of(value, eps=2.0 ** -23):
    """the resolution of float32 at a value, the smallest error that bounds use"""
    return eps * abs(value)


def change_config(directory, of=None, **changes):
    """changes config.json, or another content of it; returns what was there"""
    stored = json.loads(read(directory, "config.json"))
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump({**(of or stored), **changes}, f)
    return stored


class Case(Folder):
    def setUp(self):
        super().setUp()
        self.write("text.txt", TEXT)
        self.write("factors.json", json.dumps(FACTORS))
        write_shard(self.path("text.bin"), V, V - 1)
        write_shard(self.path("lines.bin"), 256, ord("\n"))

    def compare_model(self, load, lengths, model, *flags, logits=lambda out: out[0], val="text.txt", **arguments):
        """the trainer's curves of a checkpoint are those of PyTorch's model; returns that in float64, and the curves"""
        exact, found = doubled(model), trainer_curves(self.folder, load, lengths, *flags, val=val)
        self.assertEqual(sorted(found), lengths)
        self.compare_curves(found, *(lambda x, m=m: logits(m(x, **arguments)) for m in (model, exact)))
        return exact, found

    def compare_curves(self, found, logits_of, logits_of_double):
        """returns the bound on the loss at a position for the last length"""
        for length, (curve, loss, ppl) in found.items():
            exact, mean = reference_curve(logits_of_double, length)
            single, _ = reference_curve(logits_of, length)
            bound = FACTOR * max(greatest(single - exact), steps_of(greatest(exact)))
            self.assertLess(greatest(torch.tensor(curve, dtype=torch.float64) - exact), bound, f"T = {length}")
            self.assertLess(abs(loss - mean), bound, f"T = {length}")
            self.assertLess(abs(ppl / math.exp(mean) - 1), 1.01 * bound, f"T = {length}")
        return bound


@unittest.skipUnless(has_torch, NO_TORCH)
class Exports(Case):
    def cases(self):
        """--pos for each encoding, and for some with hyperparameters"""
        text = subprocess.run([TRAINER, "--help"], stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout
        listed = text.split("encodings (--pos):")[1].split("\n\n")[0]
        names = re.findall(r"^  ([a-z0-9_]+) {2,}\S", listed, re.M)
        self.assertEqual(sorted(set(POSITIONS) - set(names)), [], "twins of no encoding")
        for name in sorted(set(names) - set(POSITIONS)):    # a new encoding may have no twin yet
            print(f"missing: {name} in dev/hf/cable_encodings.py: its checkpoints are not compared")
        return [name for name in names if name in POSITIONS] + OPTIONS + COMPOSED

    def lengths(self, name):
        return [T] if name == "learned" else [T, 2 * T]

    def compare_rope_scaling(self, load, model):
        for scaling in ("pi", "ntk", "yarn") if model.config.position["p"] == 1 else ("pi", "ntk"):
            stretch = (scaling, 2.0)                    # the shorter last window is stretched as much
            self.compare_model(load, [2 * T], model, "--rope_scaling", scaling, rope_scaling=stretch)
        if model.config.position["p"] == 1:             # by the factors for short texts, and for long ones
            for length, factor in ((T, 1.0), (2 * T, 2.0)):
                stretch = {"rope_type": "longrope", "factor": factor, "original_max_position_embeddings": T, **FACTORS}
                self.compare_model(load, [length], model, "--rope_scaling", "longrope:factors.json",
                                   rope_scaling=stretch)

    def test_trained(self):
        for pos in self.cases():
            with self.subTest(pos=pos):
                name = "layers" if pos in COMPOSED else pos.split(":")[0]
                step = train(self.folder, "run_" + pos, pos, "--model", "2,3,48", "--lr", "1e-2", steps=3)
                model = load_checkpoint(step)
                self.assertEqual(model.config.position["name"], name)
                exact, _ = self.compare_model(step, self.lengths(name), model)
                self.compare_greedy(step, model, exact)
                if name == "rope":
                    self.compare_rope_scaling(step, model)

    def test_stretched(self):
        """a model that was trained on after --rope_scaling is stretched wherever its checkpoint goes"""
        # 4 tokens: the last window has 8 of T, and longrope must use the same factors for it as for the rest
        short = train(self.folder, "short", "rope", "--model", "2,3,48", "--T", "4", "--lr", "1e-2", steps=3)
        for scaling in SCALINGS:
            with self.subTest(scaling=scaling):
                step = train(self.folder, "long_" + scaling, "rope", "--load", short, "--rope_scaling", scaling,
                             "--rope_theta", "500", "--lr", "1e-2", steps=3)
                model = load_checkpoint(step)
                self.assertEqual(model.config.rope_scaling["original_max_position_embeddings"], 4)
                self.assertEqual(model.config.position["theta"], 500)
                exact, found = self.compare_model(step, [T, 2 * T], model)
                self.compare_greedy(step, model, exact)
                again = self.path("saved_" + scaling)
                save_checkpoint(model, again)
                self.assertEqual(trainer_curves(self.folder, again, [T, 2 * T]), found)

    def test_window(self):
        """--window and --sinks, the checkpoint's and different ones: evaluation, and decoding through its end"""
        step = train(self.folder, "window", "cable", "--model", "2,3,48", "--lr", "1e-2", "--window", "7", "--sinks",
                     "2", steps=3)
        model = load_checkpoint(step)
        self.assertEqual((model.config.window, model.config.sinks), (7, 2))
        for flags in ((), ("--window", "5", "--sinks", "0")):
            if flags:
                model.config.window, model.config.sinks = 5, 0      # one configuration, which the layers look into
            exact, _ = self.compare_model(step, [T, 2 * T], model, *flags)
        self.compare_greedy(step, model, exact, *flags)

    def test_documents(self):
        """--document_mask: evaluation, and decoding through the ends of lines"""
        for pos in ("cable", "learned", "sinusoidal+rope"):
            with self.subTest(pos=pos):
                step = train(self.folder, "run_" + pos, pos, "--model", "2,3,48", "--lr", "1e-2", "--document_mask",
                             "1")
                model = load_checkpoint(step)
                self.assertEqual(model.config.document_mask, ord("\n"))
                exact, _ = self.compare_model(step, self.lengths(pos), model)
                self.compare_greedy(step, model, exact)

    def test_padded_softmax(self):
        """--vocab_softmax padded: the twin's softmax is over as many rows as the file has, and its gradient too"""
        flags = ("--model", "2,3,48", "--lr", "1e-2", "--vocab_softmax", "padded")
        trainer(self.folder, "--train_files", "text.bin", "--val_files", "text.bin", "--pos", "cable", "--B", "4",
                "--T", str(T), "--steps", "3", "--checkpoint_every", "1", "--out", "padded", "--clip", "0", *flags)
        step = self.path("padded", "step_00000003")
        model = load_checkpoint(step)
        self.assertEqual(model.transformer.wte.weight.shape, (384, 48))
        before = load_checkpoint(self.path("padded", "step_00000001")).transformer.wte.weight
        self.assertGreater(greatest(model.transformer.wte.weight[V:] - before[V:]), 1e-3)   # they learn
        self.compare_model(step, [T, 2 * T], model, val="text.bin")

    def test_random(self):
        """weights that PyTorch draws and saves, which all matter; with them the greedy text does not repeat itself"""
        texts = set()
        for name in POSITIONS:
            with self.subTest(pos=name):
                torch.manual_seed(1)
                model = CableGPT2(CableConfig(n_layer=2, n_head=3, n_embd=48, vocab_size=V, n_positions=T,
                                              position={"name": name}))
                randomize(model)
                project(model)
                path = self.path(name)
                save_checkpoint(model, path)
                exact, found = doubled(model), trainer_curves(self.folder, path, self.lengths(name), val="text.bin")
                bound = self.compare_curves(found, lambda x: model(x)[0], lambda x: exact(x)[0])
                self.every_tensor_counts(model, max(found), bound)
                texts.add(self.compare_greedy(path, model, exact))
                self.compare_bias(path, model, exact)
        self.assertGreater(len(texts), len(POSITIONS) - 3)
        self.assertGreater(len(set(sum(texts, ()))), 20)

    def every_tensor_counts(self, model, length, bound):
        """reading any tensor of the checkpoint in another order would lead far outside the bound"""
        exact = reference_curve(lambda x: model(x)[0], length)[0]
        for name, p in model.named_parameters():
            kept = p.detach().clone()
            with torch.no_grad():
                p.copy_(kept.flatten().roll(1).view_as(p) if p.numel() > 1 else 1.5 * kept)
                moved = greatest(reference_curve(lambda x: model(x)[0], length)[0] - exact)
                p.copy_(kept)
            if not name.endswith(NO_EFFECT):
                self.assertGreater(moved, 2 * bound, name)

    def compare_greedy(self, load, model, exact, *flags):
        """each generated token is the likeliest one as far as float32 can tell; returns the text"""
        start = TEXT.index(b"The above copyright")
        prompt, length = TEXT[start:start + 20], max(self.lengths(model.config.position["name"]))
        as_ids = model.config.vocab_size != 256
        words = " ".join(map(str, prompt)) if as_ids else prompt.decode()
        text = trainer(self.folder, "--load", load, "--generate", words, "--temperature", "0",
                       "--tokens", str(length - 20), *flags)
        found = [int(n) for n in text.split()] if as_ids else list(text[:-1])
        self.assertEqual((found[:20], len(found)), (list(prompt), length))
        ids = torch.tensor([found])
        with torch.no_grad():
            logits, single = exact(ids[:, :-1])[0][0, 19:], model(ids[:, :-1])[0][0, 19:]
        bound = FACTOR * max(greatest(single - logits), steps_of(greatest(logits)))
        behind = logits.max(-1).values - logits[torch.arange(length - 20), ids[0, 20:]]
        self.assertLess(greatest(behind), bound)
        return tuple(found[20:])

    def compare_bias(self, load, model, exact):
        """--dump_bias gives PyTorch's bias, up to the diagonal"""
        ids = torch.tensor([list(b"Permission is hereby")])
        if model.config.position["name"] in ("none", "learned", "sinusoidal", "rope", "carope", "ssmax", "cope"):
            return
        words = " ".join(map(str, ids[0].tolist()))
        trainer(self.folder, "--load", load, "--dump_bias", "1,2," + words, "--out", "bias")
        rows = json.loads(self.read("bias", "bias_1_2.json"))["bias"]
        want, single = (m.bias(1, ids)[2].double() for m in (exact, model))
        bound = FACTOR * max(greatest((single - want).tril()), steps_of(greatest(want.tril())))
        for i, row in enumerate(rows):
            self.assertLessEqual(greatest(torch.tensor(row[:i + 1], dtype=torch.float64) - want[i, :i + 1]), bound)

    def test_refusals(self):
        step = train(self.folder, "run", "cable", "--model", "1,1,8", steps=1)
        for change, naming in (({"position": {"name": "cables"}}, "cables"), ({"n_layer": 2}, "h.1"),
                               ({"n_embd": 16}, "size mismatch")):
            kept = change_config(step, **change)
            with self.assertRaisesRegex((ValueError, RuntimeError), naming):
                load_checkpoint(step)
            change_config(step, of=kept)
        load_checkpoint(step)
        with open(os.path.join(step, "model.safetensors"), "rb+") as f:
            f.truncate(100)
        with self.assertRaisesRegex(ValueError, "cut short"):
            load_checkpoint(step)

    def test_export_script(self):
        step = train(self.folder, "run", "kcable", "--model", "1,1,8", steps=1)
        out = self.path("out")

        def script(*arguments):
            return subprocess.run([sys.executable, os.path.join(ROOT, "dev", "hf", "export.py"), *arguments],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        done = script(os.path.dirname(step), out)
        self.assertEqual((done.returncode, done.stdout), (0, f"{step} -> {out}\n"), done.stderr)
        self.assertEqual(sorted(os.listdir(out)), [export.CODE, "config.json", "model.safetensors", "tokenizer.json",
                                                   "tokenizer_config.json"])
        for arguments, naming in (((step, out), "expected a new or an empty directory"),
                                  ((self.path("nowhere"), out), "nowhere"),
                                  ((HOME.name, out + "2"), "step_"), ((step,), "OUT")):
            refused = script(*arguments)
            self.assertEqual((refused.returncode, os.path.exists(out + "2")), (2, False), arguments)
            self.assertIn(naming, refused.stderr)
            self.assertNotIn("Traceback", refused.stderr)

    def test_a_tokenizer_keeps_its_settings(self):
        """for sentence-transformers, too: a cased vocabulary does not become lower case"""
        own, config = '{"do_lower_case": false}', {"max_position_embeddings": 8, "hidden_size": 4}
        for settings in own, None:
            out = self.path(f"out_{settings is None}")
            self.write(os.path.join(out, "vocab.txt"), "[UNK]\n")
            if settings:
                self.write(os.path.join(out, "tokenizer_config.json"), settings)
            export.write_sentence_transformer(out, out, config)
            self.assertEqual(json.loads(read(out, "tokenizer_config.json"))["do_lower_case"], settings is None)

    def test_export_names_and_runs_no_code(self):
        """keys that name code stay behind, in every config; --check of learned positions loads transformers' GPT-2"""
        for pos in ("learned", "cable"):
            step, out = train(self.folder, pos, pos, "--model", "1,1,8", steps=1), self.path("out_" + pos)
            marker = self.path("ran")
            os.remove(os.path.join(step, "manifest.json"))
            for place in (step, self.folder):
                self.write(os.path.join(place, "evil.py"), f"open({marker!r}, 'w')\nclass Evil: pass\n")
            code = {"auto_map": {name: f"{self.folder}--evil.Evil" for name in ("AutoConfig", "AutoModelForCausalLM",
                                                                            "AutoTokenizer")}}
            change_config(step, **code)                 # what train_gpt2 passes over, too
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = console.code_of(export.main, ["--check", self.path("text.txt"), step, out + "_checked"])
            self.assertEqual((found, os.path.exists(marker)), (0 if has_transformers else 2, False), said.getvalue())
            code.update(custom_pipelines={"evil": {"impl": "evil.Evil"}}, trust_remote_code=True)
            change_config(step, **code, text_config={"deeper": [code]})
            for name in ("tokenizer_config.json", "generation_config.json"):
                self.write(os.path.join(step, name), json.dumps({"model_max_length": 32, **code}))
            with contextlib.redirect_stderr(said):
                export.export(step, out)
            self.assertIn("left out auto_map, custom_pipelines, trust_remote_code", said.getvalue())
            for name in os.listdir(out):
                if name.endswith("config.json"):
                    self.assertNotRegex(read(out, name), "evil|trust_remote_code", name)

    def test_export_writes_over_nothing(self):
        """not through a link, and not over what is somebody's; what a kill leaves is not in the way"""
        step, theirs = train(self.folder, "run", "cable", "--model", "1,1,8", steps=1), self.write("theirs", "kept")
        for name in ("cable_hf.py", "config.json", "model.safetensors.partial", "notes"):
            os.makedirs(self.path("out_" + name))
            os.symlink(theirs, self.path("out_" + name, name))
        os.symlink(self.path("elsewhere"), self.path("out_link"))
        os.makedirs(self.path("empty"))
        os.symlink(self.path("empty"), self.path("out_link_to_empty"))
        for name in [n for n in os.listdir(self.folder) if n.startswith("out_")] + ["theirs"]:
            with self.assertRaisesRegex(console.BadInput, "expected a new or an empty directory"):
                export.export(step, self.path(name))
        with unittest.mock.patch.object(export, "copy_weights", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                export.export(step, self.path("new", "copy"))
        self.assertEqual((os.listdir(self.path("new")), os.listdir(self.path("empty")), read(theirs)), ([], [], "kept"))
        for name in ("new/copy", "empty", "with/"):
            export.export(step, self.path(name))
            self.assertIn("model.safetensors", os.listdir(self.path(name)))

    def test_damaged_checkpoints(self):
        """what is damaged, cut, unknown or leads elsewhere is refused in one line before anything is written"""
        def change(name, edit):
            return lambda step: self.write(os.path.join(step, name), edit(read_bytes(step, name)))

        def flip(at):
            return lambda text: text[:at] + bytes([text[at] ^ 1]) + text[at + 1:]

        def no_manifest(damage):
            return lambda step: (os.remove(os.path.join(step, "manifest.json")), damage(step))

        def place(name, make):
            return lambda step: make(os.path.join(step, name))
        weights, link = "model.safetensors", lambda path: os.symlink("/etc/passwd", path)
        unknown = change("config.json", lambda text: text.replace(b'"cable"', b'"cables"'))
        shape = change(weights, lambda text: text.replace(b'"shape":[', b'"shape":[2,', 1))
        cases = ((change(weights, flip(9000)), "checksum"), (change(weights, lambda text: text[:-1]), "13631"),
                 (change("manifest.json", flip(150)), "manifest.json"),
                 (change("manifest.json", lambda text: text + b" "), "manifest.json"),
                 (unknown, "config.json: expected {"),
                 (no_manifest(unknown), "position 'cables'"), (no_manifest(shape), "shape"),
                 (no_manifest(change(weights, lambda text: text[:-1])), "13,632 bytes"),
                 (no_manifest(change(weights, lambda text: text[:7])), "cut short"),
                 (no_manifest(place("vocab.txt", link)), "vocab.txt: expected a regular file, got a link"),
                 (no_manifest(place("vocab.txt", os.mkfifo)), "vocab.txt: expected a regular file"),
                 (no_manifest(change("config.json", lambda text: b"[" * 100000)), "expected a JSON object"))
        for n, (damage, naming) in enumerate(cases):
            step, out = (self.path(kind + str(n)) for kind in ("step", "out"))
            shutil.copytree(os.path.join(ROOT, "test", "fixtures", "old_train_gpt2", "step_00000020"), step)
            damage(step)
            said = io.StringIO()
            with self.subTest(naming=naming), contextlib.redirect_stderr(said):
                self.assertEqual((console.code_of(export.main, [step, out]), os.path.exists(out)), (2, False))
                self.assertEqual(said.getvalue().count("\n"), 1, said.getvalue())
                self.assertIn(naming, said.getvalue())


@unittest.skipUnless(has_torch, NO_TORCH)
class Authors(Case):
    """dev/hf/import_authors.py on a state dict with the names and shapes of the released ones"""
    NAMES = {"cable.c": "cable_layer", "cable.s": "cable_layer_scale"}

    def state_of(self, model):
        """as their code saves it: linear layers (out, in), the head, buffers, torch.compile's prefix"""
        state = {}
        for name, t in model.state_dict().items():
            if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
                t = t.t().contiguous()
            for ours, theirs in self.NAMES.items():
                name = name.replace(ours, theirs)
            state["_orig_mod." + name] = t.clone()
        state["_orig_mod.lm_head.weight"] = state["_orig_mod.transformer.wte.weight"].clone()
        for layer in range(model.config.n_layer):
            state[f"_orig_mod.transformer.h.{layer}.attn.cached_mask"] = torch.zeros(4, 4)
        return state

    def run_script(self, state, out):
        source = self.path("theirs.pt")
        torch.save({"model": state, "step": 19072}, source)
        script = os.path.join(ROOT, "dev", "hf", "import_authors.py")
        return subprocess.run([sys.executable, script, source, out, str(T)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)

    def test_import(self):
        write_shard(self.path("ids.bin"), 0, 0)
        for name in ("cable", "cable_nw"):
            with self.subTest(pos=name):
                torch.manual_seed(5)
                model = CableGPT2(CableConfig(n_layer=2, n_head=3, n_embd=48, vocab_size=50304, n_positions=T,
                                              position={"name": name}))
                randomize(model)
                out = self.path("ours_" + name)
                done = self.run_script(self.state_of(model), out)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn(f"{name}, L 2, NH 3, C 48", done.stdout)
                for key, t in load_checkpoint(out).state_dict().items():
                    self.assertTrue(torch.equal(t, model.state_dict()[key]), key)
                self.compare_model(out, [T, 2 * T], model, val="ids.bin")

    def test_refusals(self):
        model = CableGPT2(CableConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=50304, n_positions=T))
        state, out = self.state_of(model), self.path("out")
        wte = "_orig_mod.transformer.wte.weight"
        for change, naming in (({wte: state[wte][:50257]}, "expected 50304 rows"),
                               ({"_orig_mod.transformer.h.0.attn.extra.weight": torch.zeros(1)}, "extra")):
            refused = self.run_script({**state, **change}, out)
            self.assertEqual((refused.returncode, os.path.exists(out)), (2, False))
            self.assertIn(naming, refused.stderr)
            self.assertNotIn("Traceback", refused.stderr)
        refused = self.run_script({k: t for k, t in state.items() if "cable" not in k}, out)
        self.assertIn("expected a GPT-2 with CABLE: ", refused.stderr)

    def test_damaged_files(self):
        """refused in one line"""
        import import_authors
        model = CableGPT2(CableConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=50304, n_positions=T))
        state = {name.replace("_orig_mod.", ""): t for name, t in self.state_of(model).items()}
        cable, good = "transformer.h.0.attn.cable_layer.weight", self.path("good.safetensors")
        write_safetensors(good, {name: t.contiguous() for name, t in state.items()})
        text = read_bytes(good)
        files = [("s.pt", {"model": s}) for s in (
            {**state, "transformer.h.1000000000.attn.c_attn.weight": torch.zeros(24, 8)}, {**state, cable: "c"},
            {**state, cable: torch.zeros(8)}, {**state, cable: torch.zeros(3, 8)}, {**state, cable: torch.zeros(0, 8)},
            {**state, "transformer.wte.weight": torch.zeros(50304, 0)}, [1], {})]
        files += [("s.pt", text[:-1]), ("s.pt", b"PK\3\4"), ("s.safetensors", b""), ("s.safetensors", text[:-1]),
                  ("s.safetensors", text.replace(b'"F32"', b'"I16"', 1))]
        for n, (name, content) in enumerate(files):
            path, out, said = self.path(name), self.path("out"), io.StringIO()
            if isinstance(content, bytes):
                self.write(path, content)
            else:
                torch.save(content, path)
            with self.subTest(n=n), contextlib.redirect_stderr(said):
                self.assertEqual((console.code_of(import_authors.main, [path, out]), os.path.exists(out)), (2, False))
                self.assertRegex(said.getvalue(), r"\Aimport_authors.py: [^\n]*s\.(pt|safetensors): [^\n]*\n\Z")


def randomize(model):
    """moves every tensor away from its initial value, so that none can be left out unnoticed"""
    stream = torch.Generator().manual_seed(7)
    for p in model.parameters():
        with torch.no_grad():
            p.add_(0.2 * torch.randn(p.shape, generator=stream))


@unittest.skipUnless(has_transformers, NO_TRANSFORMERS)
class Transformers(Case):
    def test_learned_is_a_gpt2(self):
        step = train(self.folder, "run", "learned", "--model", "2,3,48", "--lr", "1e-2")
        model, info = transformers.GPT2LMHeadModel.from_pretrained(step, output_loading_info=True)
        for what, names in info.items():
            self.assertFalse([n for n in names if n != "lm_head.weight"], what)
        model.eval()
        exact, _ = self.compare_model(step, [T // 2, T], model, logits=lambda out: out.logits)
        ids = torch.tensor([list(TEXT[:T])])
        with torch.no_grad():
            theirs, want = model(ids).logits.double(), exact(ids).logits
            ours = load_checkpoint(step)(ids)[0].double()
        self.assertLess(greatest(ours - want), FACTOR * max(greatest(theirs - want), steps_of(greatest(want))))

    def make_gpt2(self):
        """a random GPT-2, saved by transformers"""
        torch.manual_seed(3)
        config = transformers.GPT2Config(vocab_size=256, n_positions=T, n_embd=48, n_layer=2, n_head=3)
        model = transformers.GPT2LMHeadModel(config)
        randomize(model)
        model.eval()
        path = self.path("gpt2")
        model.save_pretrained(path)
        return model, path

    def test_import(self):
        model, path = self.make_gpt2()
        _, found = self.compare_model(path, [T // 2, T], model, "--pos", "learned", logits=lambda out: out.logits)
        self.assertEqual(trainer_curves(self.folder, path, [T // 2, T]), found)

    def test_import_of_another_model(self):
        """the same tensors, from which transformers computes something else: refused, like an extra head"""
        model, path = self.make_gpt2()
        model.save_pretrained(path)
        ids = torch.tensor([list(TEXT[:T])])
        for key, value in (("activation_function", "relu"), ("scale_attn_weights", False),
                           ("scale_attn_by_inverse_layer_idx", True), ("layer_norm_epsilon", 1e-2),
                           ("tie_word_embeddings", False)):
            with self.subTest(key=key):
                model.config.save_pretrained(path)
                change_config(path, **{key: value})
                if key != "tie_word_embeddings":        # the file lacks the head, which is drawn at random
                    other = transformers.GPT2LMHeadModel.from_pretrained(path).eval()
                    self.assertGreater(greatest(other(ids).logits - model(ids).logits), 1e-4)
                refused = subprocess.run([TRAINER, "--load", path, "--generate", "a"], stderr=subprocess.PIPE)
                self.assertEqual(refused.returncode, 2)
                self.assertIn(f"config.json: {key}: expected", refused.stderr.decode())
                if key != "layer_norm_epsilon":         # PyTorch's model takes it
                    with self.assertRaisesRegex(ValueError, f"config.json: {key}: expected"):
                        load_checkpoint(path)

    def test_saved_again(self):
        """what transformers saves of a checkpoint, the trainer loads"""
        flags = ("--model", "2,3,48", "--lr", "1e-2", "--window", "9")
        step, again = train(self.folder, "run", "rope+cable_nw", *flags), self.path("again")
        self.load(step).save_pretrained(again)
        self.assertEqual(trainer_curves(self.folder, again, [T]), trainer_curves(self.folder, step, [T]))

    def test_cable_starts_from_gpt2(self):
        """a step with learning rate 0 keeps every weight: those of the file, and the initial ones of the encoding"""
        model, path = self.make_gpt2()

        def weights(out, *flags):
            step = train(self.folder, out, "cable", *flags, "--lr", "0", steps=1)
            return read_safetensors(os.path.join(step, "model.safetensors"))
        start, fresh = weights("start", "--load", path), weights("fresh", "--model", "2,3,48")
        theirs, own = model.state_dict(), [name for name in start if ".cable." in name]
        self.assertEqual(len(own), 8)
        for name, t in start.items():
            self.assertTrue(torch.equal(t, fresh[name] if name in own else theirs[name]), name)
        masks = (".attn.bias", ".attn.masked_bias")
        self.assertEqual({name for name in theirs if name not in start and not name.endswith(masks)},
                         {"transformer.wpe.weight", "lm_head.weight"})
        ours = CableGPT2(CableConfig(n_layer=2, n_head=3, n_embd=48, vocab_size=256, n_positions=T,
                                     position={"name": "cable"}))
        ours.load_state_dict(start)
        self.compare_model("start", [T], ours)
        train(self.folder, "trained", "cable", "--load", path, "--lr", "1e-2")
        losses = [r["loss"] for r in records(self.path("trained"), "train")]
        self.assertEqual(len(losses), 40)
        self.assertTrue(all(map(math.isfinite, losses)))
        self.assertLess(sum(losses[-5:]) / 5, losses[0] - 1)

    def load(self, step, **settings):
        return transformers.AutoModelForCausalLM.from_pretrained(step, trust_remote_code=True, **settings).eval()

    def test_checkpoint_is_the_export(self):
        """a checkpoint gives the reference's logits, cached, padded and in batches, and the trainer's greedy text"""
        for pos in [*POSITIONS, *OPTIONS, *COMPOSED]:
            if pos != "learned":
                with self.subTest(pos=pos):
                    self.compare_export(train(self.folder, "run_" + pos, pos, "--model", "2,3,48", "--lr", "1e-2"))

    def built_from(self, commit):
        """train_gpt2 as if it had been built from this commit, whose name it knows"""
        words = subprocess.run([TRAINER, "--help"], stdout=subprocess.PIPE, check=True).stdout
        known = re.search(rb"commit (\S+),", words)[1]
        binary = read_bytes(TRAINER)
        self.assertEqual(binary.count(known + b"\0"), 1)
        return self.executable("built_" + commit, binary.replace(known, commit.rjust(len(known), "x").encode()))

    def test_a_checkpoint_knows_that_sources_were_changed(self):
        for commit in "-dirty", "0":
            with unittest.mock.patch.object(sys.modules[__name__], "TRAINER", self.built_from(commit)):
                step = train(self.folder, "run" + commit, "cable", "--model", "1,1,8", steps=1)
                train(self.folder, "again" + commit, "cable", "--load", step, steps=1)
            for path in step, self.path("exported" + commit):
                if path != step:
                    export.export(step, path)
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    self.load(path)
                found = [str(w.message) for w in found if "sources differed from their commit" in str(w.message)]
                self.assertEqual([commit in text for text in found], [True] * (commit == "-dirty"))

    def test_export_compares_the_losses(self):
        def check(step, out, *words):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                return console.code_of(export.main, [*words, step, self.path(out)]), said.getvalue()
        for pos, text, *flags in (("cable", "text.txt"), ("learned", "text.txt"),
                                  ("rope", "lines.bin", "--document_mask", "1")):
            step = train(self.folder, "run_" + pos, pos, "--model", "1,2,16", "--lr", "1e-2", *flags)
            code, said = check(step, "out_" + pos, "--check", self.path(text))
            self.assertEqual((code, "in transformers: the same model" in said), (0, True), said)
            with unittest.mock.patch.object(torch.nn.LayerNorm, "forward", lambda self, x: x * self.weight):
                code, said = check(step, "other_" + pos, "--check", self.path(text))
            self.assertEqual(code, 2, said)
            self.assertRegex(said, r"loss [0-9.]+ in train_gpt2, [0-9.]+ in transformers: another model; docs/new_kern")
        short = self.write("short.txt", "ab")
        wrong = self.write("wrong.bin", "ab" * 99)
        self.assertIn("expected a shard of tokens", check(step, "wrong", "--check", wrong)[1])
        self.assertIn("a text of at least 33 tokens", check(step, "short", "--check", short)[1])
        self.assertEqual(check(step, "usage", "--check")[0], 2)

    def test_stretched_checkpoint_is_the_export(self):
        short = train(self.folder, "short", "rope", "--model", "2,3,48", "--T", "4", "--lr", "1e-2")
        for scaling in SCALINGS:
            with self.subTest(scaling=scaling):
                flags = ("--load", short, "--rope_scaling", scaling, "--rope_theta", "500", "--lr", "1e-2")
                step = train(self.folder, "run_" + scaling, "rope", *flags, steps=3)
                self.compare_export(step)
                config = self.load(step).config
                self.assertEqual(config.to_dict()["rope_theta"], 500)
                if scaling == "yarn":               # not transformers' own; an older file's is ours, too
                    stored = config.to_dict()["rope_scaling"]
                    self.assertEqual(stored["rope_type"], "yarn_paper")
                    change = {"rope_scaling": {**stored, "rope_type": "yarn"}}
                    older = type(config)(**{**config.to_dict(), **change})
                    self.assertEqual(older.to_dict()["rope_scaling"], stored)
                    old, out = (self.path(name) for name in ("old", "out"))
                    shutil.copytree(step, old)
                    os.remove(os.path.join(old, "manifest.json"))
                    change_config(old, **change)
                    export.export(old, out)
                    self.assertEqual(json.loads(read(out, "config.json"))["rope_scaling"], stored)
        self.assertEqual(change_config(step, rope_theta=10000)["rope_theta"], 500)
        with self.assertRaisesRegex(ValueError, "rope_theta: expected 500.0, which position has, got 10000"):
            self.load(step)

    @unittest.skipUnless(has_transformers and importlib.util.find_spec("transformers.modeling_rope_utils"),
                         "SKIPPED: this transformers is older than its LongRoPE")
    def test_longrope_is_theirs(self):
        """our angles, and factor on q.k, against transformers' own for texts up to the original length and beyond it"""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        theirs = ROPE_INIT_FUNCTIONS["longrope"]
        model = self.load(train(self.folder, "run", "rope", "--model", "1,3,48", steps=1))
        beside = sys.modules[type(model).__module__]    # the checkpoint's cable_hf.py
        for factor, length in ((4.0, 16), (4.0, 17), (1.0, 17)):
            stretch = {"rope_type": "longrope", "factor": factor, "original_max_position_embeddings": 16, **FACTORS}
            config = transformers.LlamaConfig(hidden_size=48, num_attention_heads=3, max_position_embeddings=64,
                                              rope_parameters={**stretch, "rope_theta": 500.0})
            inv_freq, attention = theirs(config, "cpu", seq_len=length)
            ours = beside.CableConfig(n_head=3, n_embd=48, position={"name": "rope", "theta": 500.0, "p": 1.0})
            f, on_scores = beside.rope_frequencies(ours, length, stretch)
            self.assertLess(greatest(f / inv_freq.double() - 1), 8 * 2.0 ** -23)
            self.assertAlmostEqual(on_scores, attention ** 2, places=12)

    def test_longrope_goes_from_short_to_long_with_a_cache(self):
        """once a text is long, all its keys turn by the factors for long texts: in one layer, as without a cache"""
        short = train(self.folder, "short", "rope", "--model", "1,3,48", "--T", "16", "--lr", "1e-2")
        scaled = ("--load", short, "--rope_scaling", "longrope:factors.json")
        model = self.load(train(self.folder, "long", "rope", *scaled))
        ids = torch.tensor([list(TEXT[:T])])
        with torch.no_grad():
            begun = model(ids[:, :9], use_cache=True)
            cached = model(ids[:, 9:], past_key_values=begun.past_key_values).logits
            whole, exact = model(ids).logits, doubled(model)(ids).logits
            self.assertGreater(greatest(model(ids[:, :9]).logits - whole[:, :9]), 1e-3)
        bound = FACTOR * max(greatest(whole - exact), steps_of(greatest(exact)))
        self.assertLess(greatest(cached - exact[:, 9:]), bound)

    def test_windowed_checkpoint_is_the_export(self):
        mask = ("--window", "7", "--sinks", "2")
        self.compare_export(train(self.folder, "run", "cable", "--model", "2,3,48", "--lr", "1e-2", *mask))
        step = train(self.folder, "learned", "learned", "--model", "1,1,8", *mask, steps=1)    # not a GPT-2 of theirs
        with self.assertRaisesRegex(ValueError, "trust_remote_code"):
            transformers.AutoModelForCausalLM.from_pretrained(step, trust_remote_code=False)
        with self.assertRaisesRegex(ValueError, "learned positions with a window"):
            self.load(step)
        with self.assertRaisesRegex(console.BadInput, "learned positions with a window of 7"):
            export.export(step, self.path("out"))

    def test_checkpoint_of_documents_is_the_export(self):
        for pos in ("cable", "sinusoidal+alibi"):
            flags = ("--document_mask", "1", "--window", "9", "--sinks", "2")
            with self.subTest(pos=pos):
                self.compare_export(train(self.folder, "run_" + pos, pos, "--model", "2,3,48", "--lr", "1e-2", *flags))
        step = train(self.folder, "learned", "learned", "--model", "1,1,8", "--document_mask", "1", steps=1)
        with self.assertRaisesRegex(ValueError, "learned positions with a window or documents apart"):
            self.load(step)
        with self.assertRaisesRegex(console.BadInput, "learned positions with documents apart"):
            export.export(step, self.path("out"))

    def compare_export(self, step):
        self.assertIn("cable_hf.py", os.listdir(step))
        model, reference = self.load(step), load_checkpoint(step)
        ids = torch.tensor([list(TEXT[:T]), list(TEXT[T:2 * T])])
        with torch.no_grad():
            want, single = doubled(reference)(ids)[0], reference(ids)[0]
            loss = F.cross_entropy(want[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
            found = model(ids, labels=ids)
        bound = FACTOR * max(greatest(single - want), steps_of(greatest(want)))
        self.assertLess(greatest(found.logits - want), bound)
        self.assertLess(abs(found.loss.item() - loss), bound)
        self.compare_cached(model, ids, want, bound)
        self.compare_padded(model, ids, want, bound)
        self.compare_recomputed(model, ids)
        text = trainer(self.folder, "--load", step, "--generate", TEXT[:12].decode(), "--temperature", "0",
                       "--tokens", "8")
        self.compare_generated(model, ids, list(text[:20]))

    def compare_cached(self, model, ids, want, bound):
        """with a cache that grows, and with one that has room for more from the start"""
        fixed = [] if OLD_CACHES else [transformers.StaticCache(config=model.config, max_cache_len=2 * T)]
        for cache in [None, *fixed]:
            parts = []
            with torch.no_grad():
                for first, last in ((0, 5), (5, 6), (6, 20), (20, T)):
                    found = model(ids[:, first:last], past_key_values=cache, use_cache=True)
                    cache = found.past_key_values
                    parts.append(found.logits)
            self.assertLess(greatest(torch.cat(parts, 1) - want), bound)

    def compare_padded(self, model, ids, want, bound):
        for left, right in ((5, 0), (0, 5), (3, 4)):
            mask = F.pad(torch.ones_like(ids), (left, right))
            with torch.no_grad():
                found = model(F.pad(ids, (left, right), value=7), attention_mask=mask).logits[:, left:left + T]
            self.assertLess(greatest(found - want), bound, f"{left} before, {right} after")

    def compare_recomputed(self, model, ids):
        """gradient checkpointing gives the same gradients"""
        gradients = []
        model.train()
        for recompute in (False, True):
            model.zero_grad()
            if recompute:
                model.gradient_checkpointing_enable()
            model(ids, labels=ids).loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for a, b in zip(*gradients):
            self.assertTrue(torch.equal(a, b))
        model.gradient_checkpointing_disable()
        model.eval()

    def compare_generated(self, model, ids, want):
        """by itself, and beside a longer text, with padding before it"""
        one = model.generate(ids[:1, :12], max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.assertEqual(one[0].tolist(), want)
        rows = torch.cat((F.pad(ids[:1, :12], (6, 0)), ids[1:, :18]))
        mask = torch.cat((F.pad(torch.ones(1, 12, dtype=torch.long), (6, 0)), torch.ones(1, 18, dtype=torch.long)))
        both = model.generate(rows, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.assertEqual(both[0, 6:].tolist(), want)

    def random_pair(self, name):
        """the reference with random weights that all matter, and the directory of its export"""
        torch.manual_seed(2)
        model = CableGPT2(CableConfig(n_layer=1, n_head=1, n_embd=16, vocab_size=256, n_positions=4096,
                                      position={"name": name}))
        randomize(model)
        save_checkpoint(model, self.path("random_" + name))
        export.export(self.path("random_" + name), self.path("out_" + name))
        return model, self.path("out_" + name)

    def results(self, model, ids, reference=False):
        """logits and the gradient of every tensor, in float64"""
        targets = torch.cat((ids[:, 1:], torch.full((1, 1), -1)), 1)
        if reference:
            logits, loss = model(ids, targets)
        else:
            logits = model(ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        loss.backward()
        return {"logits": logits.detach().double(), **{key: p.grad.double() for key, p in model.named_parameters()}}

    def errors(self, found, exact):
        """of results of several texts: over all of them, because a gradient that cancels out errs by chance in one"""
        size = lambda some: sum(greatest(t) ** 2 for t in some) ** 0.5
        return {key: size([a[key] - b[key] for a, b in zip(found, exact)]) / size([b[key] for b in exact])
                for key in exact[0]}

    def test_long_rows(self):
        """more queries than a block: logits and every gradient have at most 4 times the error of the T x T form
        (over samples of six of ten texts of 4,096 tokens the ratio reaches 2.2 by chance)"""
        old = torch.__version__ < "2"                   # whose own sums err up to 9 times more
        for name, length in (("cable", 600), ("cable", 4096), ("cable_nw", 4096), ("kcable", 600), ("alibi", 600)):
            if length > 600 and old:
                continue
            with self.subTest(pos=name, T=length):
                shutil.rmtree(self.path("out_" + name), ignore_errors=True)
                (reference, out), double, own, found = self.random_pair(name), [], [], []
                for ids in torch.randint(256, (6, 1, length)):
                    double.append(self.results(self.load(out).double(), ids))
                    reference.zero_grad()
                    own.append(self.results(reference, ids, reference=True))
                    found.append(self.results(self.load(out), ids))
                exact = self.results(doubled(reference), ids, reference=True)
                self.assertLess(max(self.errors(double[-1:], [exact]).values()), 1e-11)
                own, found = (self.errors(some, double) for some in (own, found))
                for key, error in found.items():
                    self.assertLessEqual(error, 4 * max(own[key], steps_of(1)), key)
                if name.startswith("cable") and length > 600:
                    ids = torch.randint(256, (1, 16384))
                    with torch.no_grad():                   # only the logits: T x T gradients take 24 s
                        exact = {"logits": self.load(out).double()(ids).logits}
                        own = self.errors([{"logits": reference(ids)[0].double()}], [exact])["logits"]
                        found = self.errors([{"logits": self.load(out)(ids).logits.double()}], [exact])["logits"]
                    self.assertLessEqual(found, 4 * max(own, steps_of(1)))

    def test_bfloat16(self):
        """CABLE adds nothing to the error that bfloat16 has without an encoding, in rows where S is large"""
        ids, error = torch.randint(256, (1, 4096)), {}
        for name in ("none", "cable"):
            out = self.random_pair(name)[1]
            with torch.no_grad():
                half = self.load(out).bfloat16()
                exact = copy.deepcopy(half).double()
                difference = half(ids).logits.double() - exact(ids).logits
                error[name] = difference.square().mean().sqrt().item()      # the largest depends on the draw of ids
        self.assertLess(error["cable"], 2 * error["none"])

    def test_memory_of_long_rows(self):
        """forward and backward over 8,192 tokens stay below one T x T matrix"""
        script = """if True:
            import resource, sys, torch, transformers
            torch.set_num_threads(1)
            model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
            def peak(T):
                model(torch.zeros(1, T, dtype=torch.long)).logits.sum().backward()
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(-peak(300) + peak(8192))"""
        out = self.random_pair("cable")[1]
        # large blocks go back to the system when they are freed
        run = subprocess.run([sys.executable, "-c", script, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}, universal_newlines=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertLess(int(run.stdout.split()[-1]), 8192 * 8192 * 4)

    def test_refusals_of_transformers(self):
        step = train(self.folder, "run", "cable", "--model", "1,1,8", steps=1)
        with self.assertRaisesRegex(ValueError, "trust_remote_code"):
            transformers.AutoModelForCausalLM.from_pretrained(step, trust_remote_code=False)
        model = self.load(step)
        ids = torch.tensor([list(TEXT[:T])])
        with self.assertRaisesRegex(ValueError, "position_ids"):
            model(ids, position_ids=torch.zeros_like(ids))
        stored = change_config(step)
        for change in ({"position": {"name": "cable", "colour": 1}}, {"position": {"name": "cables"}},
                       {"position": {"name": "kcable", "weight": "beside"}}, {"vocab_softmax": "padded_otherwise"},
                       {"rope_scaling": {"rope_type": "yarn", "factor": 2}}):
            with self.subTest(change=change), self.assertRaisesRegex(ValueError, "config.json"):
                change_config(step, of=stored, **change)
                self.load(step)
        change_config(step, of=stored, position={"name": "fire"})
        with self.assertRaisesRegex(ValueError, "lacks"):
            self.load(step)

    def test_further_arguments(self):
        """no argument is swallowed: it counts, or it is refused"""
        out, ids = self.random_pair("cable")[1], torch.tensor([list(TEXT[:T])])
        model, refused = self.load(out), ValueError
        embedded = torch.zeros(1, T, 16)
        for part in (model, model.transformer):
            for name, value in (("output_attentions", True), ("head_mask", torch.ones(1)),
                                ("token_type_ids", torch.ones_like(ids)),
                                ("encoder_hidden_states", embedded), ("encoder_attention_mask", torch.ones(1, T)),
                                ("attention_mask", ids[None, None]), ("past_key_values", ((embedded, embedded),))):
                named = "past_key_values|cache" if name == "past_key_values" else name
                with self.subTest(name=name), self.assertRaisesRegex(refused, named):
                    part(ids, **{name: value})
            with self.assertRaisesRegex(refused, "input_ids or inputs_embeds, got both"):
                part(ids, inputs_embeds=embedded)
            with self.assertRaisesRegex(refused, "input_ids or inputs_embeds, got none"):
                part()
            found, want = part(inputs_embeds=model.get_input_embeddings()(ids)), part(ids)
            self.assertTrue(torch.equal(found[0], want[0]))
            self.assertIsInstance(part(ids, return_dict=False, output_attentions=False, inputs_embeds=None), tuple)
        with self.assertRaisesRegex(refused, "output_attentions"):
            self.load(out, output_attentions=True)(ids)
        self.assertEqual(len(self.load(out, output_hidden_states=True)(ids).hidden_states), 2)
        self.assertIsInstance(self.load(out, return_dict=False)(ids), tuple)
        logits = model(ids).logits
        self.assertTrue(torch.equal(model(ids, None, torch.ones_like(ids)).logits, logits))     # the order of GPT-2's
        for kept, rows in ((2, slice(-2, None)), (torch.tensor([1, 5]), [1, 5]), (0, slice(None))):
            self.assertLess(greatest(model(ids, logits_to_keep=kept).logits - logits[:, rows]), 1e-5)
        # transformers' Trainer, where a batch comes in several calls
        parts, count = (ids[:, :9], ids[:, 9:]), T - 2
        means = sum(model(part, labels=part).loss * (part.shape[1] - 1) for part in parts) / count
        sums = sum(model(part, labels=part, num_items_in_batch=count).loss for part in parts)
        self.assertLess(greatest(means - sums), FACTOR * steps_of(means.item()))

    def test_arguments_of_generate(self):
        """what GPT2LMHeadModel's generate() takes gives the text without a cache, or is refused by name"""
        torch.manual_seed(4)
        beside = sys.modules[type(self.load(self.random_pair("cable")[1])).__module__]
        shape = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64)
        model = beside.CableForCausalLM(beside.CableConfig(**shape, position={"name": "cable"})).eval()
        randomize(model)
        ids = torch.randint(1, 64, (2, 9))
        text = lambda ids, **more: model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **more)
        static = {} if OLD_CACHES else {"cache_implementation": "static"}
        beams, one = {"num_beams": 3, "num_return_sequences": 2}, ids[:1]
        cases = [(ids, {}, {}), (ids, beams, {}), (ids, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, {}),
                 (one, {}, {"prompt_lookup_num_tokens": 3}), (one, {}, {"assistant_model": model}),
                 (ids, {"guidance_scale": 1.5}, {}), (ids, {}, static), (ids, beams, static)]
        if not OLD_CACHES:
            cases += [(ids, {}, {"prefill_chunk_size": 4, **more}) for more in ({}, static)]
        for prompt, same, more in cases:
            with self.subTest(**same, **more):
                want = text(prompt, use_cache=False, **same)
                self.assertEqual(text(prompt, **same, **more).tolist(), want.tolist())
        if not OLD_CACHES:
            embedded = {"inputs_embeds": model.get_input_embeddings()(ids)}
            self.assertEqual(text(None, **embedded).tolist(), text(ids)[:, 9:].tolist())
        whole = {"return_dict_in_generate": True}
        self.assertEqual(len(text(ids, output_hidden_states=True, **whole).hidden_states), 12)
        for name, value in (("output_attentions", True), ("token_type_ids", ids), ("head_mask", ids),
                            ("encoder_hidden_states", torch.zeros(2, 3, 32)),
                            ("penalty_alpha", 0.6)):
            more = {"top_k": 4} if name == "penalty_alpha" else whole
            with self.subTest(name=name), self.assertRaisesRegex(ValueError, f"{name}|Contrastive"):
                text(ids, **{name: value}, **more)

    def test_a_batch_of_prompts(self):
        """the tokenizer of a checkpoint pads before a text, so that generate() continues each as it does by itself"""
        for pos in ("cable", "learned"):
            step = train(self.folder, "run_" + pos, pos, "--model", "2,3,48", "--lr", "1e-2")
            tokenizer = transformers.AutoTokenizer.from_pretrained(step, trust_remote_code=True)
            model = self.load(step)
            self.assertEqual(tokenizer.padding_side, "left")
            prompts, more = ["Permission is", "a", "The above copy"], dict(max_new_tokens=8, do_sample=False)
            for found, prompt in zip(model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), **more),
                                     prompts):
                want = model.generate(**tokenizer(prompt, return_tensors="pt"), **more)[0]
                self.assertEqual(found[-len(want):].tolist(), want.tolist(), (pos, prompt))

    def test_more_tokens(self):
        """resize_token_embeddings() before fine-tuning: rows, logits, a training in transformers, and what it saves"""
        step = train(self.folder, "run", "cable", "--model", "2,3,48", "--lr", "1e-2", steps=3)
        model, ids = self.load(step), torch.tensor([list(TEXT[:T - 1]) + [259]])
        with torch.no_grad():
            before = model(ids[:, :-1]).logits
        rows = model.resize_token_embeddings(260)
        self.assertIs(rows, model.get_input_embeddings())
        self.assertIs(rows.weight, model.get_output_embeddings().weight)
        self.assertEqual((rows.weight.shape, model.config.vocab_size), ((260, 48), 260))
        self.assertLess(greatest(model(ids[:, :-1]).logits[..., :256] - before), 1e-5)
        self.assertEqual(model(ids).logits.shape, (1, T, 260))
        if importlib.util.find_spec("accelerate"):
            kept = rows.weight[259].detach().clone()
            more = dict(output_dir=self.path("trained"), max_steps=10, learning_rate=1e-2, logging_steps=1,
                        per_device_train_batch_size=1, save_strategy="no", report_to=[], use_cpu=True)
            training = transformers.Trainer(model, transformers.TrainingArguments(**more),
                                            train_dataset=[{"input_ids": ids[0], "labels": ids[0]}] * 10)
            training.train()
            losses = [r["loss"] for r in training.state.log_history if "loss" in r]
            self.assertEqual(len(losses), 10)
            self.assertLess(losses[-1], losses[0] - 0.2)
            self.assertGreater(greatest(model.get_input_embeddings().weight[259] - kept), 1e-3)
        model.eval().save_pretrained(self.path("more"))
        with safetensors.safe_open(self.path("more", "model.safetensors"), "pt") as f:
            self.assertNotIn("lm_head.weight", f.keys())
        again = type(model).from_pretrained(self.path("more")).eval()
        self.assertTrue(torch.equal(again(ids).logits, model(ids).logits))
        embedding, head = torch.nn.Embedding(270, 48), torch.nn.Linear(48, 270, bias=False)
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(head)
        self.assertIs(model.transformer.wte, embedding)
        self.assertEqual(model(ids).logits.shape, (1, T, 270))

    @unittest.skipUnless(has_transformers and hasattr(transformers.GenerationConfig(), "stop_strings"),
                         "SKIPPED: this transformers has no stop_strings; make exports installs one that has")
    def test_stop_strings(self):
        """generate() stops each text of a batch after a string, as GPT2LMHeadModel does"""
        for pos in ("cable", "learned"):
            step = train(self.folder, "run_" + pos, pos, "--model", "2,3,48", "--lr", "1e-2")
            model, tokenizer = self.load(step), transformers.AutoTokenizer.from_pretrained(step)
            rows = tokenizer(["Permission is", "The above copy"], padding=True, return_tensors="pt")
            whole = model.generate(**rows, max_new_tokens=12, do_sample=False)
            start, stop = rows["input_ids"].shape[1], tokenizer.decode(whole[0, -9:-6])
            found = model.generate(**rows, max_new_tokens=12, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
            for row, want in zip(found[:, start:], whole[:, start:]):
                last = next((n for n in range(1, 13) if stop in tokenizer.decode(want[:n])), 12)
                self.assertEqual(row[:last].tolist(), want[:last].tolist(), pos)
                self.assertTrue((row[last:] == tokenizer.pad_token_id).all(), (pos, row, want))

    def tuned(self, pos, config, gpt2=False):
        """a random model with an adapter, and the names of what it adapts in the first layer"""
        import peft
        torch.manual_seed(5)
        name, _, clock = pos.partition(":clock=")
        shape = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=256, n_positions=64)
        position = {"name": name, **({"clock": clock} if clock else {})}
        model = (transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)) if gpt2 else
                 export.cable_hf().CableForCausalLM(export.cable_hf().CableConfig(**shape, position=position)))
        found = peft.get_peft_model(model.eval(), config).eval()
        first = "base_model.model.transformer.h.0."
        return found, {name[len(first):].rpartition(".lora_A")[0] for name, _ in found.named_modules()
                       if name.startswith(first) and name.endswith(".lora_A")}

    @unittest.skipUnless(has_peft, NO_PEFT)
    def test_lora(self):
        """it adapts GPT-2's layers and the encoding's, in every encoding as its merged weights say; saved and loaded"""
        import peft
        ids = torch.tensor([list(TEXT[:T])])
        whole = lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        theirs = self.tuned("learned", whole(), gpt2=True)[1]
        self.assertEqual(len(theirs), 4)
        self.assertEqual(self.tuned("cable", peft.LoraConfig(r=4, target_modules=["c_attn"]))[1], {"attn.c_attn"})
        gates = {"cable": {"cable.c", "cable.s"}, "rope:clock=cable": {"clock"}, "carope": {"clock"},
                 "grape_qk": {"grape.q", "grape.k"}, "fire": {"fire.mlp.0", "fire.mlp.2"}, "alibi": set()}
        for pos, own in gates.items():
            model, found = self.tuned(pos, whole())
            self.assertEqual(found, theirs | {"attn." + name for name in own}, pos)
            model.save_pretrained(self.path("adapter"))
            with torch.no_grad():
                want, exact = model(ids).logits, doubled(model)(ids).logits
                plain = self.tuned(pos, whole())[0].unload()
                self.assertGreater(greatest(want - plain(ids).logits), 10 * greatest(want - exact))
                again = peft.PeftModel.from_pretrained(plain, self.path("adapter")).eval()
                bound = FACTOR * max(greatest(want - exact), steps_of(greatest(exact)))
                self.assertTrue(torch.equal(again(ids).logits, want), pos)
                self.assertLess(greatest(model.merge_and_unload()(ids).logits - exact), bound, pos)

    @unittest.skipUnless(has_peft, NO_PEFT)
    def test_other_adapters(self):
        """what PEFT makes of a GPT-2 works, or is refused by its name"""
        import peft
        ids, more = torch.tensor([list(TEXT[:T])]), dict(task_type="CAUSAL_LM")
        virtual = dict(num_virtual_tokens=3, **more)
        for config in (peft.IA3Config(target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"], **more),
                       peft.LoraConfig(target_modules="all-linear", use_dora=True, **more),
                       peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["wte"], **more),
                       peft.PromptTuningConfig(**virtual), peft.PromptEncoderConfig(encoder_hidden_size=16, **virtual)):
            model, _ = self.tuned("cable", config)
            model.train()
            optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.3), []
            for _ in range(10):
                losses.append(model(ids, labels=ids).loss)
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            self.assertLess(losses[-1].item(), losses[0].item(), type(config))
            model.eval()
            mask = {"attention_mask": torch.ones_like(ids)}
            text = model.generate(input_ids=ids, **mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
            with torch.no_grad():
                want = model(text[:, :-1]).logits[:, -4:].argmax(-1)
            self.assertEqual(text[:, -4:].tolist(), want.tolist(), type(config))
        prefix = peft.PrefixTuningConfig(**virtual)
        for pos in ("cable", "grape_k"):
            with self.assertRaisesRegex(ValueError, "prefix tuning|DynamicCache"):
                self.tuned(pos, prefix)[0](ids)
        if not OLD_CACHES:                              # an encoding without sums
            self.tuned("alibi", prefix)[0](ids, labels=ids).loss.backward()

    @unittest.skipUnless(has_bitsandbytes, "SKIPPED: bitsandbytes is not installed; make exports installs it")
    def test_quantized(self):
        """bitsandbytes takes what it takes of a GPT-2, and leaves the columns that make S as they are"""
        import bitsandbytes
        warnings.simplefilter("ignore")
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        for pos in ("cable", "carope", "grape_qk"):
            torch.manual_seed(6)
            model = CableGPT2(CableConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64,
                                          position={"name": pos}))
            save_checkpoint(model, self.path("random_" + pos))
            export.export(self.path("random_" + pos), self.path(pos))
            ids = torch.tensor([list(TEXT[:T])])
            for bits, kind in ((8, bitsandbytes.nn.Linear8bitLt), (4, bitsandbytes.nn.Linear4bit)):
                quantized = self.load(self.path(pos), device_map="cpu", quantization_config=transformers.
                                      BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4))
                found = [name for name, m in quantized.transformer.h[0].named_modules() if isinstance(m, kind)]
                self.assertEqual(found, ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
                with torch.no_grad():
                    want, logits = model(ids)[0], quantized(ids).logits
                self.assertLess(greatest(logits - want), greatest(want) * (0.05 if bits == 8 else 0.5))
                self.assertEqual(quantized.generate(ids, max_new_tokens=4, pad_token_id=0).shape, (1, T + 4))

    @unittest.skipUnless(has_lm_eval, NO_LM_EVAL)
    def test_lm_eval_of_bytes(self):
        """lm_eval needs only the checkpoint: batches of two lengths, a text without a context, samples"""
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
        step = train(self.folder, "run", "cable", "--model", "1,2,32", "--lr", "1e-2")
        one, two = (HFLM(step, trust_remote_code=True, device="cpu", batch_size=n) for n in (1, 2))
        pairs = [("Permission is", " granted"), ("\u0100", "\n\n caf\u00e9"), ("", "The above")]
        requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
        found, batch = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (one, two))
        exact = doubled(load_checkpoint(step))
        for (context, rest), (single, _), (batched, _) in zip(pairs, found, batch):
            before, after = list(context.encode()) or [0], list(rest.encode())
            ids = torch.tensor([before + after])
            with torch.no_grad():
                scores = exact(ids)[0].log_softmax(-1)[0, len(before) - 1:-1]
            want = scores.gather(1, ids[0, len(before):, None]).sum().item()
            for score in (single, batched):
                self.assertLess(abs(score - want), FACTOR * len(after) * steps_of(want / len(after)))
        prompts = [Instance("generate_until", {}, (TEXT[:n].decode(), {"until": ["\0"], "max_gen_toks": 12}), n)
                   for n in (7, 15)]
        texts, both = (lm.generate_until(prompts, disable_tqdm=True) for lm in (one, two))
        self.assertEqual(texts, both)
        for n, text in zip((7, 15), texts):
            ours = trainer(self.folder, "--load", step, "--generate", TEXT[:n].decode(), "--temperature", "0",
                           "--tokens", "12")
            self.assertEqual(TEXT[:n].decode() + text, ours.decode()[:n + 12])

    def test_old_checkpoint(self):
        """dev/hf/export.py makes of an old checkpoint one that transformers loads"""
        old, out = (self.path(name) for name in ("old", "out"))
        shutil.copytree(os.path.join(ROOT, "test", "fixtures", "old_train_gpt2", "step_00000020"), old)
        self.write(os.path.join(old, export.CODE), "raise ImportError('of before')\n")
        export.export(old, out)
        ids = torch.tensor([list(b"the cable of a")])
        with torch.no_grad():
            want = load_checkpoint(old)(ids)[0]
            self.assertLess(greatest(self.load(out)(ids).logits - want), FACTOR * steps_of(greatest(want)))


@unittest.skipUnless(has_transformers, NO_TRANSFORMERS)
class BertForMaskedLM(Case):
    """transformers' own model, with learned positions: bytes, 256 [PAD], 257 [CLS], 258 [SEP], 259 [MASK]"""
    TEXTS = ["it was the best of times", "worst", "a tale of two cities, a far better thing that I do than I have e"]

    def bert(self, *flags):
        program = os.path.join(ROOT, os.environ.get("TRAIN_BERT", "train_bert"))
        run = subprocess.run([program, "--val_every", "0", "--threads", "1", *flags], cwd=self.folder,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(run.returncode, 0, run.stderr.decode())
        return run.stdout.decode(errors="replace")

    def compare(self, load, model):
        """the embeddings of texts of different lengths, and the likely tokens at a mask"""
        self.write("texts.txt", "\n".join(self.TEXTS) + "\n")
        self.bert("--load", load, "--encode", "texts.txt", "--eval_lengths", "40", "--out", "embeddings")
        found = read_safetensors(self.path("embeddings", "embeddings.safetensors"))["embeddings"]
        ids = [([257] + list(t.encode()))[:39] + [258] for t in self.TEXTS]             # cut to 40, [SEP] kept
        padded = torch.tensor([row + [256] * (40 - len(row)) for row in ids])
        mask = (padded != 256).long()
        results = []
        for m in (model.double(), model.float()):
            with torch.no_grad():
                hidden = m.bert(padded, attention_mask=mask).last_hidden_state
            results.append(((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).double())
        bound = FACTOR * max(greatest(results[1] - results[0]), steps_of(greatest(results[0])))
        self.assertLessEqual(greatest(found.double() - results[0]), bound)
        text = "the [MASK]est of"
        lines = self.bert("--load", load, "--predict", text).split("\n")
        row = [257] + list(b"the ") + [259] + list(b"est of") + [258]
        with torch.no_grad():
            p = torch.softmax(model.double()(torch.tensor([row])).logits[0, 5], -1)
        shares = [float(x) for x in re.findall(r"([0-9.]+)%", lines[1])]
        self.assertEqual(len(shares), 5)
        for share, expected in zip(shares, p.topk(5).values):
            self.assertAlmostEqual(share, 100 * expected.item(), delta=0.051)           # printed with one decimal

    def test_to_transformers(self):
        self.bert("--train_files", "text.txt", "--pos", "learned", "--model", "2,2,32", "--T", "40", "--B", "8",
                  "--steps", "60", "--lr", "5e-3", "--checkpoint_every", "60", "--out", "run")
        step = self.path("run", "step_00000060")
        model, info = transformers.BertForMaskedLM.from_pretrained(step, output_loading_info=True)
        self.assertEqual((list(info["missing_keys"]), list(info["unexpected_keys"])), ([], []))
        self.compare("run", model.eval())

    def train_encoding(self, pos, *flags):
        chosen = {"--T": "40", "--out": "run_" + pos, "--model": "2,3,48", **dict(zip(flags[::2], flags[1::2]))}
        if "--load" in chosen:
            del chosen["--model"]
        self.bert("--train_files", "text.txt", "--pos", pos, "--B", "8", "--steps", "20", "--lr", "5e-3",
                  "--checkpoint_every", "20", *sum(chosen.items(), ()))
        return self.path(chosen["--out"], "step_00000020")

    def test_checkpoint_is_the_export(self):
        # learned has no position at twice the length, and cope none for a key after the query
        steps = [(pos, self.train_encoding(pos)) for pos in [*POSITIONS, *OPTIONS, *COMPOSED]
                 if not pos.startswith(("learned", "cope"))]
        short = self.train_encoding("rope", "--T", "20", "--out", "short")
        steps += [(scaling, self.train_encoding("rope", "--load", short, "--rope_scaling", scaling, "--out",
                                                "run_" + scaling)) for scaling in SCALINGS]
        for name, step in steps:
            with self.subTest(name=name):
                model = transformers.AutoModelForMaskedLM.from_pretrained(step, trust_remote_code=True)
                self.compare(step, model.eval())
        ids = torch.zeros(1, 4, dtype=torch.long)
        for name, value in (("output_attentions", True), ("inputs_embeds", torch.zeros(1, 4, 48))):
            with self.assertRaisesRegex(ValueError, name):
                model(ids, **{name: value})
        self.assertTrue(torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits))
        model.float().resize_token_embeddings(270)
        predictions, ids = model.cls["predictions"], torch.tensor([[1, 269]])
        self.assertIs(predictions.bias, model.get_output_embeddings().bias)
        self.assertIs(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        with torch.no_grad():
            predictions.bias.normal_()
        model.save_pretrained(self.path("more"))
        found = type(model).from_pretrained(self.path("more")).eval()(ids).logits
        self.assertTrue(torch.equal(found, model(ids).logits))
        self.assertEqual(found.shape, (1, 2, 270))
        with self.assertRaisesRegex(ValueError, "trust_remote_code"):
            transformers.AutoModelForMaskedLM.from_pretrained(step, trust_remote_code=False)

    def test_from_transformers(self):
        torch.manual_seed(3)
        config = transformers.BertConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                         intermediate_size=128, max_position_embeddings=40, pad_token_id=256)
        model = transformers.BertForMaskedLM(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        model.save_pretrained(self.path("theirs"))
        self.compare("theirs", model)
        self.bert("--load", "theirs", "--pos", "cable", "--train_files", "text.txt", "--T", "40", "--B", "2",
                  "--steps", "2", "--out", "continued")


@unittest.skipUnless(has_transformers and importlib.util.find_spec("sentence_transformers"),
                     "SKIPPED: sentence-transformers is not installed")
class SentenceTransformers(Case):
    WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cable of a token sees what came before it and sums".split()
    TEXTS = ["the cable", "a token sees what came before it and sums", "it sums before what came before the cable"]

    def test_embeddings(self):
        """dev/hf/export.py takes a BERT there with its pooling: texts of unequal lengths have their own embeddings"""
        for name, pooling in (("cable", "mean"), ("cable", "cls"), ("rope", "mean")):
            with self.subTest(pos=name, pooling=pooling):
                out, embed = self.export_bert(name, pooling)
                found = torch.tensor(self.load(out).encode(self.TEXTS))
                (want, single), exact = embed(self.TEXTS), FACTOR * steps_of(1)
                self.assertLess(greatest(found - want), max(FACTOR * greatest(single - want), greatest(want) * exact))
                info = transformers.AutoModel.from_pretrained(out, trust_remote_code=True, output_loading_info=True)[1]
                self.assertEqual((list(info["missing_keys"]), list(info["unexpected_keys"])), ([], []))

    @unittest.skipUnless(has_mteb, "SKIPPED: mteb is not installed; make exports installs it")
    def test_mteb(self):
        """a task of MTEB's runs on the export, and its figures are those of the model's embeddings"""
        import mteb
        task, (out, embed) = similarity_task(self.TEXTS), self.export_bert("cable", "mean")
        result = mteb.evaluate(self.load(out), task, cache=None, co2_tracker=False, show_progress_bar=False)
        (found,) = result.task_results[0].scores["test"]
        one, two = (embed(task.dataset["test"][column])[0] for column in ("sentence1", "sentence2"))
        similarity, rating = F.cosine_similarity(one, two), torch.tensor(task.dataset["test"]["score"])
        want = torch.corrcoef(torch.stack((similarity, rating.double())))[0, 1].item()
        self.assertAlmostEqual(found["cosine_pearson"], want, places=4)
        self.assertLess(similarity.min(), 0.98)

    def load(self, out):
        from sentence_transformers import SentenceTransformer
        return SentenceTransformer(out, trust_remote_code=True, device="cpu")

    def export_bert(self, name, pooling):
        """a random model's export, and its embeddings of texts in float64 and float32, one text at a time"""
        cable_hf = export.cable_hf()
        torch.manual_seed(1)
        model = cable_hf.CableBertForMaskedLM(cable_hf.CableBertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
            max_position_embeddings=16, vocab_size=len(self.WORDS), position={"name": name})).eval()
        randomize(model)
        step, out = (self.path(kind + name + pooling) for kind in ("step_", "out_"))
        model.save_pretrained(step)
        change_config(step, pooling=pooling)
        self.write(os.path.join(step, "vocab.txt"), "\n".join(self.WORDS) + "\n")
        export.export(step, out)

        def embed(texts):
            ids = [[2] + [self.WORDS.index(w) for w in text.split()] + [3] for text in texts]
            with torch.no_grad():
                rows = [[m.bert(torch.tensor([row])).last_hidden_state[0] for row in ids]
                        for m in (doubled(model), model)]
            return [torch.stack([x.mean(0) if pooling == "mean" else x[0] for x in of]) for of in rows]
        return out, embed


def similarity_task(texts):
    """a task of MTEB's on pairs of these texts, which needs no download"""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata
    pairs = [(a, b) for a in texts for b in texts if a < b]

    class Task(AbsTaskSTS):
        metadata = TaskMetadata(
            name="CablePairs", type="STS", main_score="cosine_pearson", description="a few pairs", reference=None,
            dataset={"path": "none", "revision": "none"}, category="t2t", eval_splits=["test"],
            eval_langs=["eng-Latn"], date=None, domains=None, task_subtypes=None, license=None, dialect=None,
            annotations_creators=None, modalities=["text"], sample_creation=None, bibtex_citation=None)
        min_score, max_score = 0, 1

        def load_data(self, **ignored):
            rows = {"sentence1": [a for a, _ in pairs], "sentence2": [b for _, b in pairs],
                    "score": [n / len(pairs) for n in range(len(pairs))]}
            self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_dict(rows)}), True
    task = Task()
    task.load_data()
    return task


@unittest.skipUnless(has_torch, NO_TORCH)
@unittest.skipUnless(HAS_DATA, NO_DATA)
class HellaSwag(Case):
    T = 64

    def read_examples(self):
        """[(label, context, 4 endings)]; the .jsonl must have the same labels"""
        raw = read_bytes(DATA, "hellaswag_val_500.bin")
        data, at, examples = struct.unpack(f"<{(len(raw) - 1024) // 2}H", raw[1024:]), 0, []
        while at < len(data):
            label, texts = data[at + 3], []
            at += 5
            for _ in range(5):
                texts.append(list(data[at + 1:at + 1 + data[at]]))
                at += 1 + data[at]
            examples.append((label, texts[0], texts[1:]))
        with open(os.path.join(DATA, "hellaswag_val_500.jsonl")) as f:
            self.assertEqual([json.loads(line)["label"] for line in f], [e[0] for e in examples])
        return examples

    def write_examples(self, name, examples):
        body = []
        for index, (label, context, endings) in enumerate(examples):
            texts = sum(([len(t), *t] for t in (context, *endings)), [])
            body += [65535, 2 * (5 + len(texts)), index, label, 4, *texts]
        header = struct.pack("<4i", 20240522, 1, len(examples), 1000).ljust(1024, b"\0")
        self.write(name, header + struct.pack(f"<{len(body)}H", *body))

    def scores(self, model, context, endings):
        """the mean loss of the tokens of each ending; a context that is too long loses its beginning"""
        kept = [context[max(0, len(context) + len(ending) - self.T - 1):] for ending in endings]
        longest = max(len(c) + len(e) for c, e in zip(kept, endings)) - 1
        rows = torch.zeros(len(endings), longest, dtype=torch.long)
        targets = torch.full((len(endings), longest), -1)
        for r, (c, e) in enumerate(zip(kept, endings)):
            rows[r, :len(c) + len(e) - 1] = torch.tensor((c + e)[:-1])
            targets[r, len(c) - 1:len(c) + len(e) - 1] = torch.tensor(e)
        with torch.no_grad():
            logits = model.hidden(rows)[targets >= 0] @ model.transformer.wte.weight.t()
            losses = F.cross_entropy(logits, targets[targets >= 0], reduction="none").split([len(e) for e in endings])
        return [loss.mean().item() for loss in losses]

    def score(self, path, load):
        text = trainer(self.folder, "--load", load, "--T", str(self.T), "--hellaswag", path).decode()
        found = re.search(r"HellaSwag: (\d+)/(\d+) = \S+(?: +\((\d+) contexts cut)?", text)
        return tuple(int(n or 0) for n in found.groups())

    def is_cut(self, example):
        return len(example[1]) + max(map(len, example[2])) > self.T + 1

    def decide(self, model, examples):
        """the ending that PyTorch chooses for each example, None where float32 cannot tell"""
        nll, exact = [self.scores(model, *example[1:]) for example in examples], doubled(model)
        error = max(abs(a - b) for example, single in zip(examples[:20], nll)
                    for a, b in zip(self.scores(exact, *example[1:]), single))

        def choice(n):
            best, second = sorted(n)[:2]
            return n.index(best) if second - best > FACTOR * max(error, steps_of(max(n))) else None
        return [choice(n) for n in nll]

    def compare_decisions(self, load, examples, decisions):
        """with PyTorch's decisions as labels, every answer of the trainer is right"""
        self.assertEqual(set(decisions) - {None}, {0, 1, 2, 3})
        self.assertLess(decisions.count(None), 0.02 * len(decisions))
        chosen = [(d, *example[1:]) for d, example in zip(decisions, examples) if d is not None]
        self.write_examples("decided.bin", chosen)
        self.assertEqual(self.score("decided.bin", load)[:2], (len(chosen), len(chosen)))

    def random_export(self):
        """a model whose weights all matter, and its directory"""
        torch.manual_seed(1)
        model = CableGPT2(CableConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=50257, n_positions=self.T))
        randomize(model)
        source, out = (self.path(name) for name in ("random", "out"))
        save_checkpoint(model, source)
        export.export(source, out)
        return model, out

    def harness(self, directory, batch_size):
        """lm_eval's model, as its command line makes it; the tokenizer is that of a checkpoint of the trainer's"""
        from lm_eval.models.huggingface import HFLM
        logging.getLogger("lm_eval").setLevel(logging.ERROR)        # a warning for each context that is cut
        return HFLM(directory, trust_remote_code=True, device="cpu", batch_size=batch_size,
                    tokenizer=self.train_small())

    def train_small(self):
        step = self.path("run", "step_00000020")
        if not os.path.exists(step):
            trainer(self.folder, "--train_files", os.path.join(DATA, "tiny_shakespeare_train.bin"), "--model", "1,2,32",
                    "--pos", "cable", "--T", str(self.T), "--B", "2", "--steps", "20", "--lr", "1e-2",
                    "--tokenizer", os.path.join(DATA, "encoder.json"), "--checkpoint_every", "20", "--out", "run")
        return step

    def test_real_rows(self):
        """with random weights every token of the context matters, whether the context loses its beginning or not"""
        model = CableGPT2(CableConfig(n_layer=1, n_head=2, n_embd=32, n_positions=self.T, position={"name": "alibi"}))
        randomize(model)
        save_checkpoint(model, self.path("random"))
        examples = self.read_examples()
        decisions = self.decide(model, examples)
        correct, count, cut = self.score(os.path.join(DATA, "hellaswag_val_500.bin"), "random")
        self.assertEqual((count, cut), (500, sum(map(self.is_cut, examples))))
        right = sum(d == example[0] for d, example in zip(decisions, examples))
        self.assertLessEqual(abs(correct - right), decisions.count(None))
        chosen = [n for n, example in enumerate(examples) if n % 10 == 0 or self.is_cut(example)]
        self.compare_decisions("random", [examples[n] for n in chosen], [decisions[n] for n in chosen])

    @unittest.skipUnless(has_lm_eval, NO_LM_EVAL)
    def test_lm_eval(self):
        """the likelihood of every ending is the trainer's in lm_eval's own model, in batches and with contexts cut"""
        model, out = self.random_export()
        trainer(self.folder, "--load", out, "--T", str(self.T), "--hellaswag",
                os.path.join(DATA, "hellaswag_val_500.bin"), "--out", "scores")
        ours = records(self.path("scores"), "hellaswag_example")
        examples = self.read_examples()
        self.assertEqual([(r["example"], r["label"]) for r in ours], [(n, e[0]) for n, e in enumerate(examples)])
        lm = self.harness(out, batch_size=16)
        self.assertEqual(lm.max_length, self.T)
        requests = [(None, context, ending) for _, context, endings in examples for ending in endings]
        found = [score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
        want = [-nll * len(ending) for r, e in zip(ours, examples) for nll, ending in zip(r["nll"], e[2])]
        exact, error = doubled(model), 0.0
        for _, context, endings in examples[::10]:
            scores = zip(self.scores(model, context, endings), self.scores(exact, context, endings), endings)
            error = max([error] + [len(ending) * abs(a - b) for a, b, ending in scores])
        bound = 4 * max(error, steps_of(max(map(abs, want))))
        self.assertEqual((len(found), sum(map(self.is_cut, examples)) > 20), (4 * len(examples), True))
        self.assertLess(max(abs(a - b) for a, b in zip(found, want)), bound)
        self.text_is_split_as_here(lm, examples)

    def text_is_split_as_here(self, lm, examples):
        """lm_eval cuts context and ending into the ids of the trainer's file"""
        with open(os.path.join(DATA, "hellaswag_val_500.jsonl")) as f:
            for row, (_, context, endings) in zip(map(json.loads, f), examples):
                for text, ending in zip(row["endings"], endings):
                    self.assertEqual(lm._encode_pair(row["ctx"], " " + text), (context, ending), row["ctx"])


if __name__ == "__main__":
    if has_torch:
        torch.set_num_threads(1)                            # the models are tiny, and the machine may be shared
        version = transformers.__version__ if has_transformers else "none"
        print(f"PyTorch {torch.__version__}, transformers {version}: {sys.executable}")
    for missing, why in ((not has_torch, NO_TORCH), (has_torch and not has_transformers, NO_TRANSFORMERS),
                         (not DATA, NO_DATA)):
        if missing:
            print(why)
    unittest.main()
