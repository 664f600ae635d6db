"""test_exports_numpy.py -- the exported models compute the fixtures' logits, without PyTorch.

numpy_torch.py stands for it: the formulas of dev/hf/modeling_cable.py, modeling_cable_bert.py and of cable_hf.py and
cable_encodings.py run in float64 on the weights of test/fixtures, and what they have in no fixture is compared with its
formula, written out in loops. Left to test_exports.py, which needs PyTorch: gradients, float32 and smaller types, what
transformers itself does (generate, from_pretrained, its caches), and checkpoints that a trainer has just written.
"""
import json
import math
import os
import struct
import sys
import unittest

import numpy as np

import numpy_torch
from numpy_torch import wrap

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "..", "fixtures")
numpy_torch.install()
sys.path.insert(0, os.path.join(HERE, "..", "..", "dev", "hf"))
import modeling_cable                               # noqa: E402
import modeling_cable_bert                          # noqa: E402
import cable_encodings                              # noqa: E402
import cable_hf                                     # noqa: E402

HALF_STEP = 2.0 ** -24                              # the fixtures are float64's results, rounded to float32
EXACT = 1e-12


def read_fixture(path):
    """(its configuration, its tensors)"""
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        header, data = json.loads(f.read(size)), f.read()
    kinds, tensors = {"F32": "<f4", "I32": "<i4"}, {}
    config = json.loads(header.pop("__metadata__")["config"])
    for name, info in header.items():
        begin, end = info["data_offsets"]
        x = np.frombuffer(data[begin:end], kinds[info["dtype"]]).reshape(info["shape"])
        tensors[name] = wrap(x.astype(np.float64 if info["dtype"] == "F32" else np.int64))
    return config, tensors


def fixtures(family, without=()):
    """those of every encoding and mask"""
    names = {*modeling_cable.POSITIONS, "clock", "window", "layers"}
    names = names | {"documents"} if family == "gpt2" else names - set(modeling_cable.CAUSAL_ONLY)
    for name in sorted(names - set(without)):
        yield (name, *read_fixture(os.path.join(FIXTURES, f"{family}_{name}.safetensors")))


def filled(model, tensors):
    model.load_state_dict({name[len("param."):]: x for name, x in tensors.items() if name.startswith("param.")})
    return model


def stretched(config, kind):
    """the configuration of cable_hf.py with rope stretched from 37 to 64 tokens"""
    scaling = {"rope_type": modeling_cable.ROPE_TYPES.get(kind, kind), "factor": 64 / 37,
               "original_max_position_embeddings": 37}
    return {**config, "rope_scaling": scaling}


class Case(unittest.TestCase):
    def compare(self, found, want, bound=HALF_STEP):
        worst = np.abs(found - want).max()
        self.assertLessEqual(worst, bound * np.abs(want).max() if bound == HALF_STEP else bound)


class Reference(Case):
    def test_gpt2(self):
        for name, config, x in fixtures("gpt2"):
            with self.subTest(name):
                model = filled(modeling_cable.CableGPT2(modeling_cable.CableConfig(**config)), x)
                self.compare(model(x["inputs"])[0], x["logits"])
                if "logits.long" in x:
                    self.compare(model(x["inputs.long"])[0], x["logits.long"])
                for kind in ("pi", "ntk", "yarn") if name == "rope" else ():
                    self.compare(model(x["inputs.long"], rope_scaling=(kind, 64 / 37))[0], x["logits." + kind])

    def test_bert(self):
        for name, config, x in fixtures("bert"):
            with self.subTest(name):
                model = filled(modeling_cable_bert.CableBert(modeling_cable_bert.CableBertConfig(**config)), x)
                logits = model(x["inputs"], lengths=x["lengths"])[0]
                for row, length in enumerate(x["lengths"]):
                    self.compare(logits[row, :length], x["logits"][row, :length])
                if "logits.long" in x:
                    self.compare(model(x["inputs.long"])[0], x["logits.long"])


class Exported(Case):
    """cable_hf.py, as transformers loads it"""
    def tearDown(self):
        cable_hf.ROWS = 256

    def test_gpt2(self):
        """whole, in blocks of queries, a few tokens at a time on a cache, and with padding before the text and in it"""
        for name, config, x in fixtures("gpt2", without=("learned",)):
            with self.subTest(name):
                model = filled(cable_hf.CableForCausalLM(cable_hf.CableConfig(**config)), x)
                for ids, logits in ((x["inputs"], x["logits"]), (x["inputs.long"], x["logits.long"])):
                    for cable_hf.ROWS in (256, 10):
                        self.compare(model(ids).logits, logits)
                self.compare_cached(model, x["inputs.long"], x["logits.long"], padding=[])
                self.compare_cached(model, x["inputs"], x["logits"], padding=[0, 1, 2, 9, 21])
                for kind in ("pi", "ntk", "yarn") if name == "rope" else ():
                    longer = filled(cable_hf.CableForCausalLM(cable_hf.CableConfig(**stretched(config, kind))), x)
                    self.compare(longer(x["inputs.long"]).logits, x["logits." + kind])

    def test_longrope(self):
        """which factors are used follows from the length of the text, also for the keys of a cache"""
        config, x = read_fixture(os.path.join(FIXTURES, "gpt2_rope.safetensors"))
        scaling = {"rope_type": "longrope", "factor": 64 / 37, "original_max_position_embeddings": 37,
                   "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 0.5]}
        reference = filled(modeling_cable.CableGPT2(modeling_cable.CableConfig(**config)), x)
        model = filled(cable_hf.CableForCausalLM(cable_hf.CableConfig(**{**config, "rope_scaling": scaling})), x)
        want = reference(x["inputs.long"], rope_scaling=scaling)[0]
        self.compare(model(x["inputs.long"]).logits, want)
        self.compare_cached(model, x["inputs"], reference(x["inputs"], rope_scaling=scaling)[0], padding=[])

    def compare_cached(self, model, ids, logits, padding):
        """padding: the places of the second row that hold none of its tokens; a document would begin at each"""
        B, T = ids.shape
        length = T + len(padding)
        padded, mask = np.full((B, length), 7), np.ones((B, length), int)
        mask[1, padding] = 0
        padded[0, :T], padded[1, mask[1] == 1] = ids
        cache, parts, at = None, [], 0
        for end in (20, 21, 22, length):
            out = model(wrap(padded[:, at:end]), attention_mask=wrap(mask[:, :end]) if padding else None, cache=cache)
            cache, at = out.past_key_values, end
            parts.append(out.logits)
        found = np.concatenate(parts, axis=1)
        self.compare(found[0, :T], logits[0])
        self.compare(found[1, mask[1] == 1], logits[1])

    def test_bert(self):
        """with padding after the text, and before it"""
        for name, config, x in fixtures("bert", without=("learned",)):
            with self.subTest(name):
                rest = {key: config[key] for key in config if key not in ("model_type", "architectures")}
                model = filled(cable_hf.CableBertForMaskedLM(cable_hf.CableBertConfig(**rest)), x)
                ids, T = x["inputs"], x["inputs"].shape[1]
                mask = wrap(np.arange(T) < x["lengths"][:, None])
                logits = model(ids, attention_mask=mask).logits
                for row, length in enumerate(x["lengths"]):
                    self.compare(logits[row, :length], x["logits"][row, :length])
                n = int(x["lengths"][1])
                shifted, shifted_mask = np.zeros_like(ids[1:]), np.zeros_like(ids[1:])
                shifted[0, T - n:], shifted_mask[0, T - n:] = ids[1, :n], 1
                logits = model(shifted, attention_mask=shifted_mask).logits
                self.compare(logits[0, T - n:], x["logits"][1, :n])
                for cable_hf.ROWS in (256, 10):
                    self.compare(model(x["inputs.long"]).logits, x["logits.long"])


class Formulas(Case):
    """hyperparameters that no fixture has"""
    NH, C, T = 3, 24, 20

    def config(self, name, causal=True, **rest):
        position = {**modeling_cable.DEFAULTS[name], "name": name, **rest}
        return modeling_cable.CableConfig(n_layer=2, n_head=self.NH, n_embd=self.C, vocab_size=9, n_positions=self.T,
                                          position=position, causal=causal)

    def bias(self, config, S=None, g=None, table=None):
        t = wrap(np.arange(self.T))[None]
        return cable_encodings.EncodedAttention(config, 0).bias(t, t, S, S, g, table, np.float64)[0]

    def compare_bias(self, found, formula):
        want = [[[formula(h, i, j) for j in range(self.T)] for i in range(self.T)] for h in range(self.NH)]
        self.compare(found, np.array(want), EXACT)

    def test_slopes(self):
        """2^(-8h/n); by Press et al. three heads have the two of n = 2 and then the first of n = 4"""
        def line(slopes):
            return lambda h, i, j: -slopes[h] * abs(i - j)
        self.compare_bias(self.bias(self.config("alibi")), line([2 ** -4, 2 ** -8, 2 ** -2]))
        self.compare_bias(self.bias(self.config("alibi", slopes="geometric")),
                          line([2 ** (-8 / 3), 2 ** (-16 / 3), 2 ** -8]))
        drawn = [cable_encodings.random_slopes(4, 7, mean) for mean in (0.3, 0.6)]
        self.compare(2 * drawn[0], drawn[1], EXACT)
        self.assertGreater(abs(drawn[0] - cable_encodings.random_slopes(4, 8, 0.3)).min(), 1e-4)

    def test_sandwich(self):
        def formula(h, i, j):
            return 3 / (8 * (h + 1)) * sum(math.cos((i - j) / 10000 ** (2 * k / 16)) - 1 for k in range(8))
        self.compare_bias(self.bias(self.config("sandwich", d=16)), formula)

    def test_ranges(self):
        """what a parameter begins with, and where it stays"""
        for causal in (True, False):
            logs = [math.log(n if causal else self.T) for n in range(1, self.T + 1)]
            s = cable_encodings.SSMax(self.config("ssmax", causal)).s
            self.compare(s * np.mean(logs), np.ones(self.NH), EXACT)
        for name, highest in (("kerple", 9.0), ("kerple_power", 2.0)):
            kerple = cable_encodings.Kerple(self.config(name))
            kerple.r1[...], kerple.r2[...] = -1.0, 9.0
            kerple.project()
            self.assertEqual((kerple.r1[0], kerple.r2[0]), (0.01, highest))
        bam = cable_encodings.Bam(self.config("bam"))
        bam.shape[...] = (-3.0, 0.5, 3.0)
        bam.project()
        self.assertEqual(list(bam.shape), [-1.0, 0.5, 2.0])

    def test_t5(self):
        """the bucket of T5's paper, and a distance that is clipped"""
        table = wrap(np.random.RandomState(1).normal(size=(40, self.NH)))

        def bucket(d, n):
            exact = n // 2
            if d < exact:
                return d
            return min(n - 1, exact + math.floor(1e-9 + (n - exact) * math.log(d / exact) / math.log(40 / exact)))

        def of_pair(d, causal):
            if causal:
                return bucket(max(d, 0), 12)
            return bucket(abs(d), 6) + (6 if d < 0 else 0)
        for causal in (True, False):
            found = self.bias(self.config("t5", causal, buckets=12, distance=40), table=table)
            self.compare_bias(found, lambda h, i, j: table[of_pair(i - j, causal), h])
            found = self.bias(self.config("t5_clip", causal, K=5), table=table)
            low = 0 if causal else -5
            self.compare_bias(found, lambda h, i, j: table[min(max(i - j, low), 5) - low, h])
        config = self.config("t5_clip", K=5, scale="C", layers="own")
        own = cable_encodings.EncodedAttention(config, 1)
        self.assertIsNone(cable_encodings.shared_t5(config))
        self.assertEqual((own.t5.weight.shape, own.scale), ((6, self.NH), 1 / math.sqrt(self.C)))

    def test_kcable(self):
        """g inside the logarithm or outside it"""
        stream = np.random.RandomState(2)
        b, g = (wrap(stream.uniform(size=(1, self.NH, self.T))) for _ in range(2))
        S = b.cumsum(-1)

        def inside(h, i, j):
            return -math.log(1 + (g[0, h, i] * (S[0, h, i] - S[0, h, j])) ** 2)

        def outside(h, i, j):
            return -g[0, h, i] * math.log(1 + (S[0, h, i] - S[0, h, j]) ** 2)
        for causal in (True, False):
            for weight, formula in (("inside", inside), ("outside", outside)):
                self.compare_bias(self.bias(self.config("kcable", causal, weight=weight), S, g), formula)

    def test_rope(self):
        """a part of the channels, another base, and longrope's factors for short texts and for long ones"""
        config = self.config("rope", theta=50.0, p=0.25)            # 8 channels in a head: one pair is turned
        x, t = wrap(np.random.RandomState(3).normal(size=(1, self.NH, self.T, 8))), wrap(np.arange(self.T))[None]
        f, factor = cable_encodings.rope_frequencies(config, self.T, None)
        want = np.array(x)
        turned = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * np.arange(self.T))
        want[..., 0], want[..., 1] = turned.real, turned.imag
        self.compare(cable_encodings.rotate(x, t, f) * factor, want, EXACT)
        config = self.config("rope", theta=50.0, p=0.5)             # two pairs, of base ** 0 and base ** (-1 / 2)
        scaling = {"rope_type": "longrope", "factor": 3.0, "original_max_position_embeddings": 16,
                   "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
        for length, factors in ((16, (1.0, 1.5)), (17, (2.0, 5.0))):
            f, factor = cable_encodings.rope_frequencies(config, length, scaling)
            self.compare(f, np.array([1 / factors[0], 50 ** -0.5 / factors[1]]), EXACT)
            self.assertAlmostEqual(factor, 1 + math.log(3) / math.log(16), places=12)

    def test_sinusoidal(self):
        x, t = wrap(np.random.RandomState(4).normal(size=(1, self.T, self.C))), wrap(np.arange(self.T))[None]
        found = cable_encodings.add_position(x, t, self.config("sinusoidal", scale=0.5, embed="sqrt"))
        waves = [[(math.sin, math.cos)[c % 2](i / 10000 ** (c // 2 * 2 / self.C)) for c in range(self.C)]
                 for i in range(self.T)]
        self.compare(found, self.C ** 0.5 * x + 0.5 * np.array(waves), EXACT)


if __name__ == "__main__":
    unittest.main()
