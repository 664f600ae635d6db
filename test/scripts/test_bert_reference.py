"""test_bert_reference.py -- dev/hf/modeling_cable_bert.py, which makes the fixtures of test_bert: with learned
positions it agrees with transformers' BertForMaskedLM, and every encoding, loss and pooling agrees with its formula,
written out here in loops.

It needs PyTorch, and transformers for the first part, and continues in a Python that has them. Everything is in
float64. BERT_ERRORS=1 prints the errors that the tolerances are multiples of.
"""
import glob
import importlib.util
import itertools
import json
import math
import os
import sys
import tempfile
import unittest

import interpreter

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "..", "fixtures")


def missing():
    return [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


if __name__ == "__main__":
    interpreter.choose("torch, transformers", "torch")
if "torch" not in missing():
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
    import torch
    sys.path.insert(0, os.path.join(HERE, "..", "..", "dev", "hf"))
    import modeling_cable
    import cable_encodings
    import modeling_cable_bert as reference
    from modeling_cable import CAUSAL_ONLY, read_safetensors
    POSITIONS = [name for name in modeling_cable.POSITIONS if name not in CAUSAL_ONLY]
    CABLES = [name for name in POSITIONS if name in cable_encodings.CABLES]
    torch.set_flush_denormal(True)                  # as in the trainers
    torch.set_num_threads(1)
needs_torch = unittest.skipUnless("torch" not in missing(), "PyTorch is not installed; set PYTORCH_PYTHON")
needs_transformers = unittest.skipUnless(not missing(), "PyTorch or transformers is not installed; set PYTORCH_PYTHON")

EXACT = 1e-13       # six times the largest error measured, 1.6e-14 in a gradient that cancels to 0


def draw(model, seed=1):
    """puts every parameter far from its initial value, so that each one affects the result"""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        value = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if name.endswith("LayerNorm.weight"):
                p.copy_(1 + 0.2 * value)
            elif ".kerple." in name or ".fire.c" in name:
                p.copy_(0.1 + value.abs().clamp(max=1.5))
            elif ".fire.l" in name:                     # 512 |l| is L: some rows are before it, some after
                p.copy_(0.01 + 0.005 * value)
            else:
                p.copy_(0.4 * value)
    return model


def bert(position, T=13, NH=3, HS=4, L=2, V=29, seed=1):
    position = {"name": position} if isinstance(position, str) else position
    config = reference.CableBertConfig(hidden_size=NH * HS, num_hidden_layers=L, num_attention_heads=NH,
                                       intermediate_size=20, max_position_embeddings=T, vocab_size=V, position=position)
    return draw(reference.CableBert(config).double(), seed)


def tokens(B, T, V=29, seed=1):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


class Case(unittest.TestCase):
    def near(self, got, want, what, tolerance=EXACT, floor=1.0):
        """the error relative to the largest value, or to the floor, since some gradients cancel to 0"""
        self.assertEqual(got.shape, want.shape, what)
        scale = max(want.abs().max().item(), floor)
        error = (got.double() - want.double()).abs().max().item() / scale
        if os.environ.get("BERT_ERRORS"):
            print(f"{error:.1e} {what}")
        self.assertLessEqual(error, tolerance, what)


@needs_transformers
class TestTransformers(Case):
    """with learned positions it is the BERT of transformers"""
    SHAPES = [dict(num_hidden_layers=2, num_attention_heads=3, hidden_size=24, intermediate_size=40, vocab_size=31,
                   max_position_embeddings=19),
              dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=64, vocab_size=101,
                   max_position_embeddings=8)]

    def theirs(self, shape):
        from transformers import BertConfig, BertForMaskedLM
        config = BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                            attn_implementation="eager")
        return draw(BertForMaskedLM(config).double())

    def batch(self, shape):
        V, T = shape["vocab_size"], shape["max_position_embeddings"]
        idx = 1 + tokens(3, T, V - 1)                   # transformers drops the gradient of 0, the input [PAD]
        types, lengths = tokens(3, T, 2, seed=2), torch.tensor([T, 1, T - 3])
        is_token = torch.arange(T) < lengths[:, None]
        targets = torch.where((tokens(3, T, 5, seed=3) == 0) & is_token, tokens(3, T, V, seed=4), torch.tensor(-1))
        targets[1, 0] = 7
        return idx, types, lengths, is_token, targets

    def run_theirs(self, model, batch):
        idx, types, _, is_token, targets = batch
        labels = targets.masked_fill(targets == -1, -100)
        out = model(idx, attention_mask=is_token.long(), token_type_ids=types, labels=labels)
        out.loss.backward()
        return out.logits, out.loss, {n: p.grad for n, p in model.named_parameters()}

    def compare(self, ours, theirs, shape):
        batch = self.batch(shape)
        idx, types, lengths, is_token, targets = batch
        want_logits, want_loss, want = self.run_theirs(theirs, batch)
        logits, loss = ours(idx, targets, lengths, types)
        loss.backward()
        self.near(logits[is_token], want_logits[is_token], "logits")
        self.near(loss.view(1), want_loss.view(1), "loss")
        got = {n: p.grad for n, p in ours.named_parameters()}
        self.assertEqual(set(got), set(want))
        for name in want:
            self.near(got[name], want[name], "grad " + name)

    def test_loads_theirs(self):
        for shape in self.SHAPES:
            theirs = self.theirs(shape)
            with tempfile.TemporaryDirectory() as folder:
                theirs.float().save_pretrained(folder)
                ours = reference.load_checkpoint(folder)
            self.assertEqual(ours.config.position, {"name": "learned"})
            self.compare(ours.double(), theirs.double(), shape)

    def test_they_load_ours(self):
        from transformers import BertForMaskedLM
        for shape in self.SHAPES:
            ours = draw(reference.CableBert(reference.CableBertConfig(**shape, position={"name": "learned"})), seed=5)
            with tempfile.TemporaryDirectory() as folder:
                reference.save_checkpoint(ours, folder)
                theirs, info = BertForMaskedLM.from_pretrained(folder, output_loading_info=True,
                                                               attn_implementation="eager")
                again = reference.load_checkpoint(folder)
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                self.assertEqual(sorted(info[kind]), [], kind)
            self.assertEqual(again.config, ours.config)
            self.compare(again.double(), theirs.double().eval(), shape)

    def test_t5_buckets(self):
        from transformers.models.t5.modeling_t5 import T5Attention
        d = torch.arange(-3000, 3001)
        want = T5Attention._relative_position_bucket(-d, bidirectional=True, num_buckets=32, max_distance=128)
        different = d[cable_encodings.t5_bucket(d, False, 32, 128) != want].tolist()
        self.assertEqual(different[:9], [], "distances in another bucket")


def t5_bucket(d):
    """Raffel et al. 2020: 16 buckets per side, 8 of them for one distance; keys after the query have the upper 16"""
    n, side = abs(d), 16 if d < 0 else 0
    if n < 8:
        return side + n
    k = 8
    while k < 15 and n * n >= 64 * 2 ** (k - 7):        # bucket k + 1 begins where n / 8 = 2^((k - 7) / 2)
        k += 1
    return side + k


def projection(attention, which, x):
    linear = getattr(attention, which)
    return [[sum(linear.weight[h, c].item() * x[t, c].item() for c in range(x.shape[1])) + linear.bias[h].item()
             for t in range(len(x))] for h in range(len(linear.bias))]


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def fire(weights, h, i, j):
    c, L, w1, b1, w2, b2 = weights
    y = math.log(c * abs(i - j) + 1) / (math.log(c * max(L, i, j) + 1) + 1e-6)
    return sum(w2[h][k] * max(0.0, w1[k] * y + b1[k]) for k in range(32)) + b2[h]


# what rand.h draws for three heads, by seed
UNIFORM = {42: (0.3869742762400409, 0.577125795355946, 0.025461786751653892),
           7: (0.609394524568175, 0.43775600474440823, 0.5069350657438018)}


def bias_in_loops(model, layer, idx):
    """B_ij (NH,T,T) for all i and j, from the formulas"""
    name, NH, T = model.config.position["name"], model.config.num_attention_heads, idx.shape[1]
    attention = model.bert["encoder"]["layer"][layer].attention["self"]
    x = model.encode(idx, layers=layer)[0].detach()
    B = torch.zeros(NH, T, T, dtype=torch.float64)
    g = None
    if name in CABLES:
        step = {"cable_v1": softplus, "kcable_v1": softplus, "cable_signed": math.tanh}.get(name, lambda z: max(z, 0.0))
        b = [[step(z) for z in row] for row in projection(attention.cable, "c", x)]
    if name in ("cable", "kcable", "cable_signed"):
        g = [[softplus(u) for u in row] for row in projection(attention.cable, "s", x)]
    if name.startswith("grape"):
        gates = {gate: projection(attention.grape, gate, x) for gate in name.partition("_")[2]}
    if name == "fire":
        f = attention.fire
        weights = (abs(f.c.item()), abs(f.l.item()) * 512, f.mlp[0].weight[:, 0].tolist(), f.mlp[0].bias.tolist(),
                   f.mlp[2].weight.tolist(), f.mlp[2].bias.tolist())
    for h in range(NH):
        for i in range(T):
            for j in range(T):
                d, lo, hi = i - j, min(i, j), max(i, j)
                if name in CABLES:
                    D, weight = abs(sum(b[h][lo + 1:hi + 1])), g[h][i] if g else 1.0         # |S_i - S_j|
                    B[h, i, j] = -weight * (math.log(1 + D * D) if name.startswith("k") else D)
                    if model.config.position.get("weight") == "inside":
                        B[h, i, j] = -math.log(1 + (weight * D) ** 2)
                elif name.startswith("grape"):
                    sum_of_gates = sum(softplus(gates[gate][h][t]) for gate, t in (("q", i), ("k", j)) if gate in gates)
                    B[h, i, j] = -(2.0 ** -4, 2.0 ** -8, 2.0 ** -2)[h] * sum_of_gates * abs(d)
                elif name == "alibi":                   # three heads: both slopes of 2 heads, then the first of 4
                    B[h, i, j] = -(2.0 ** -4, 2.0 ** -8, 2.0 ** -2)[h] * abs(d)
                    if model.config.position["slopes"] == "geometric":
                        B[h, i, j] = -(2.0 ** (-8 * (h + 1) / 3)) * abs(d)
                elif name == "alibi_trained":
                    B[h, i, j] = -attention.alibi.r[h] * (2.0 ** -4, 2.0 ** -8, 2.0 ** -2)[h] * abs(d)
                elif name == "alibi_random":
                    position = model.config.position
                    B[h, i, j] = position["mean"] * math.log(1 - UNIFORM[position["seed"]][h]) * abs(d)
                elif name == "sandwich":
                    dim = model.config.position["d"]
                    waves = sum(math.cos(d / 10000 ** (2 * k / dim)) - 1 for k in range(dim // 2))
                    B[h, i, j] = waves * NH / (8 * (h + 1))
                elif name == "t5":
                    B[h, i, j] = model.bert["t5"].weight[t5_bucket(d), h]
                elif name == "t5_clip":
                    K = model.config.position["K"]
                    own = model.config.position["layers"] == "own"
                    table = attention.t5 if own else model.bert["t5"]
                    B[h, i, j] = table.weight[K + max(-K, min(K, d)), h]
                elif name == "kerple":
                    B[h, i, j] = -attention.kerple.r1[h] * math.log(1 + attention.kerple.r2[h].item() * abs(d))
                elif name == "kerple_power":
                    B[h, i, j] = -attention.kerple.r1[h] * abs(d) ** attention.kerple.r2[h].item()
                elif name == "bam":
                    bam = attention.bam
                    B[h, i, j] = -math.exp(bam.scale[h]) * (abs(d) + 1e-5) ** bam.shape[h].item()
                elif name == "fire":
                    B[h, i, j] = fire(weights, h, i, j)
    return B


@needs_torch
class TestEncodings(Case):
    def test_biases(self):
        for position in POSITIONS + [{"name": "t5_clip", "K": 4}, {"name": "t5_clip", "K": 4, "layers": "own"},
                                     {"name": "kcable", "weight": "outside"}, {"name": "alibi", "slopes": "geometric"},
                                     {"name": "alibi_random", "seed": 7, "mean": 0.3}, {"name": "sandwich", "d": 6}]:
            model = bert(position)
            idx = tokens(1, 13)
            for layer in (0, 1):
                expected = bias_in_loops(model, layer, idx).detach()
                self.near(model.bias(layer, idx), expected, f"{position}, layer {layer}")
        self.assertEqual(bert("t5_clip").bert["t5"].weight.shape[0], 2 * 12 + 1)

    def test_window(self):
        """which pairs a window and sinks leave, and that a query depends on no other key"""
        config = modeling_cable.CableConfig(window=3, sinks=2)
        for config.causal in (True, False):
            hidden = modeling_cable.hidden_pairs(config, 0, 9)
            for i, j in itertools.product(range(9), range(9)):
                seen = (j <= i or not config.causal) and (abs(i - j) < 3 or j < 2)
                self.assertEqual(hidden[i, j].item(), not seen, (i, j, config.causal))
        model, idx = bert("cable", L=1), tokens(1, 13)
        model.bert["encoder"]["layer"][0].attention["self"].whole.window = 3
        other = idx.clone()
        other[0, 9] = (idx[0, 9] + 1) % 29
        changed = (model(idx)[0] - model(other)[0]).abs().amax(-1)[0] > 0
        # CABLE's sums continue from the token: tokens after it see pairs of keys that are farther apart
        self.assertFalse(changed[:7].any())
        self.assertTrue(changed[7:12].all())

    def test_documents(self):
        """which pairs documents leave, and that each document has the logits that it has by itself"""
        config = modeling_cable.CableConfig(document_mask=7, window=3, sinks=2)
        idx = torch.tensor([[1, 7, 2, 3, 4, 5, 7, 7, 1], [7, 1, 2, 3, 4, 5, 6, 1, 2]])
        begins = [[0, 1, 1, 1, 1, 1, 6, 7, 7], [0] * 9]
        self.assertEqual(modeling_cable.document_begins(config, idx).tolist(), begins)
        hidden = modeling_cable.hidden_pairs(config, 0, 9, begin=torch.tensor(begins))
        for b, i, j in itertools.product(range(2), range(9), range(9)):
            in_document = j - begins[b][i]
            seen = 0 <= in_document and j <= i and (i - j < 3 or in_document < 2)
            self.assertEqual(hidden[b, 0, i, j].item(), not seen, (b, i, j))
        for name in modeling_cable.POSITIONS:
            if name == "fire":
                continue
            config = modeling_cable.CableConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=8, n_positions=9,
                                                position={"name": name}, document_mask=7)
            torch.manual_seed(1)
            model = modeling_cable.CableGPT2(config).double()
            packed = model(idx)[0][0]
            parts = [model(idx[:1, first:last])[0][0] for first, last in ((0, 1), (1, 6), (6, 7), (7, 9))]
            self.near(packed, torch.cat(parts), name)
        with self.assertRaisesRegex(ValueError, "fire"):
            modeling_cable.CableConfig(position={"name": "fire"}, document_mask=7)

    def test_distances_beyond_the_trained(self):
        """reaches all of t5's buckets in both halves of its table, and both sides of FIRE's L"""
        for position in ("t5", "t5_clip", "fire"):
            model, idx = bert(position, NH=1, L=1), tokens(1, 140)
            self.near(model.bias(0, idx), bias_in_loops(model, 0, idx).detach(), position)

    def test_rotation_depends_only_on_the_distance(self):
        q, k = torch.randn(2, 1, 1, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        q, k = q[..., :1, :].expand_as(q), k[..., :1, :].expand_as(k)
        rope = modeling_cable.CableConfig(n_head=1, n_embd=8, position={"name": "rope"})
        f, _ = cable_encodings.rope_frequencies(rope, 9, None)
        q, k = (cable_encodings.rotate(x, torch.arange(9)[None], f) for x in (q, k))
        s = (q @ k.transpose(-2, -1))[0, 0]
        for d in range(-8, 9):
            diagonal = torch.diagonal(s, d)
            self.near(diagonal, diagonal[:1].expand_as(diagonal), f"distance {d}")
        self.assertGreater((s[0, 8] - s[8, 0]).abs().item(), 0.01)              # and on its sign

    def test_embedding(self):
        idx, C, T = tokens(1, 13), 12, 13
        for position in ("none", "sinusoidal", "learned"):
            model = bert(position)
            e = model.bert["embeddings"]
            want = torch.zeros(1, T, C, dtype=torch.float64)
            for t in range(T):
                for c in range(C):
                    x = e["word_embeddings"].weight[idx[0, t], c].item()
                    if position == "sinusoidal":
                        angle = t / 10000 ** ((c - c % 2) / C)
                        x = math.sqrt(C) * x + (math.cos(angle) if c % 2 else math.sin(angle))
                    if position == "learned":
                        x += e["position_embeddings"].weight[t, c].item()
                    want[0, t, c] = x + e["token_type_embeddings"].weight[0, c].item()
                row = want[0, t]
                row = (row - row.mean()) / (row.var(unbiased=False) + 1e-12).sqrt()
                want[0, t] = row * e["LayerNorm"].weight.detach() + e["LayerNorm"].bias.detach()
            self.near(model.embed(idx).detach(), want, position)


@needs_torch
class TestLengths(Case):
    def gradients(self, model, T, noise):
        """the gradients of a masked-language loss and of both poolings for two texts of 9 and 4 tokens in rows of T"""
        lengths = torch.tensor([9, 4])
        is_token = torch.arange(T) < lengths[:, None]
        text, filler = torch.nn.functional.pad(tokens(2, 9), (0, T - 9)), tokens(2, T, seed=noise)
        idx = torch.where(is_token, text, filler)
        targets = torch.full((2, T), -1)
        targets[0, 8], targets[0, 2], targets[1, 3] = 5, 11, 28
        model.zero_grad(set_to_none=True)
        x = model.encode(idx, lengths)
        vectors = torch.stack([reference.pool(x, lengths, how) for how in ("mean", "cls")])
        logits, loss = model(idx, targets, lengths)
        (loss + vectors.pow(3).sum()).backward()
        return {"logits": logits[is_token].detach(), "vectors": vectors.detach(),
                **{n: p.grad[:9] if "position_embeddings" in n else p.grad for n, p in model.named_parameters()}}

    def test_padding_changes_nothing(self):
        for position in POSITIONS:
            model = bert(position, T=40)
            want = self.gradients(model, 9, 1)
            for T, noise in ((9, 2), (13, 3), (40, 4)):
                for key, value in self.gradients(model, T, noise).items():
                    self.near(value, want[key], f"{position}, padded to {T}: {key}")

    def test_length_matters(self):
        model, idx = bert("cable"), tokens(1, 9)
        a, b = (model.encode(idx, torch.tensor([n]))[0, 0] for n in (9, 8))
        self.assertGreater((a - b).abs().max().item(), 1e-3)
        self.near(model.encode(idx, torch.tensor([9])), model.encode(idx), "no lengths are full ones")
        with self.assertRaisesRegex(ValueError, "length 0"):
            model.encode(idx, torch.tensor([0]))

    def test_pooling(self):
        x, lengths = torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([5, 1, 3])
        self.near(reference.pool(x, lengths), torch.stack([x[b, :n].mean(0) for b, n in enumerate(lengths)]), "mean")
        self.near(reference.pool(x, lengths, "cls"), x[:, 0], "cls")
        x[2, 3] = float("nan")                          # padding is left out, not multiplied by zero
        self.assertTrue(reference.pool(x, lengths).isfinite().all())
        with self.assertRaisesRegex(ValueError, "mean and cls"):
            reference.pool(x, lengths, "max")


@needs_torch
class TestLosses(Case):
    def test_contrastive(self):
        generator = torch.Generator().manual_seed(1)
        q, d = (torch.randn(n, 6, dtype=torch.float64, generator=generator) for n in (3, 7))
        for positives in ([0, 1, 2], [4, 0, 6], [2, 2, 5]):
            total = 0.0
            for n in range(3):
                e = [math.exp((q[n] @ d[m] / (q[n].norm() * d[m].norm())).item() / 0.05) for m in range(7)]
                total -= math.log(e[positives[n]] / sum(e)) / 3
            loss = reference.contrastive_loss(3.0 * q, d, torch.tensor(positives), 0.05)    # cosines ignore the 3
            self.near(loss.view(1), torch.tensor([total], dtype=torch.float64), f"positives {positives}")
        default, explicit = reference.contrastive_loss(q, d), reference.contrastive_loss(q, d, torch.arange(3), 0.05)
        self.near(default.view(1), explicit.view(1), "default")

    def test_masked_language_loss(self):
        model, idx = bert("cable"), tokens(2, 13)
        targets = torch.full((2, 13), -1)
        logits, loss = model(idx, targets)
        loss.backward()
        self.assertEqual(loss.item(), 0.0)              # nothing to predict: the loss and its gradient are zero
        self.assertTrue(all((p.grad == 0).all() for p in model.parameters()))
        targets[0, 3], targets[1, 12], targets[1, 0] = 2, 7, 0
        want = -sum(torch.log_softmax(logits[b, t], 0)[targets[b, t]] for b, t in ((0, 3), (1, 12), (1, 0))) / 3
        self.near(model(idx, targets)[1].view(1), want.view(1), "mean over the targets")

    def test_finite_differences(self):
        """The slope of the loss along random directions, for each encoding: the gradient reaches every parameter. The
        largest error measured with a step of 1e-6 is 4.7e-8; the tolerance is four times that."""
        for position in POSITIONS:
            model, idx, lengths = bert(position), tokens(2, 13), torch.tensor([13, 8])
            is_target = (tokens(2, 13, 3, seed=2) == 0) & (torch.arange(13) < lengths[:, None])
            targets = torch.where(is_target, idx, torch.tensor(-1))
            model(idx, targets, lengths)[1].backward()
            generator = torch.Generator().manual_seed(7)
            for part in ("", ".self.", "cls.", "embeddings."):
                directions = [torch.randn(p.shape, dtype=torch.float64, generator=generator) * (part in n)
                              for n, p in model.named_parameters()]
                slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), directions))
                ends = []
                for h in (1e-6, -2e-6):
                    with torch.no_grad():
                        for p, d in zip(model.parameters(), directions):
                            p += h * d
                        ends.append(model(idx, targets, lengths)[1])
                with torch.no_grad():
                    for p, d in zip(model.parameters(), directions):
                        p += 1e-6 * d
                difference = (ends[0] - ends[1]) / 2e-6
                self.near(difference.view(1), slope.detach().view(1), f"{position}, {part or 'all'}", 2e-7)


@needs_torch
class TestFixtures(Case):
    """test/fixtures are what this reference computes today, up to their rounding to float32"""
    ROUNDING = 2.0 ** -24

    def load(self, path):
        t = read_safetensors(path)
        with open(path, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        config = json.loads(header["__metadata__"]["config"])
        model = reference.CableBert(reference.CableBertConfig(**config)).double()
        model.load_state_dict({n[6:]: v for n, v in t.items() if n.startswith("param.")})
        return model, t

    def check(self, t, name, got):
        self.near(got.float(), t[name], name, tolerance=2 * self.ROUNDING, floor=1e-4)

    def test_models(self):
        paths = sorted(glob.glob(os.path.join(FIXTURES, "bert_*.safetensors")))
        self.assertEqual({os.path.basename(p)[5:-12] for p in paths}, set(POSITIONS) | {"clock", "window", "layers"})
        for path in paths:
            model, t = self.load(path)
            lengths = t["lengths"].long()
            is_token = torch.arange(t["inputs"].shape[1]) < lengths[:, None]
            self.assertTrue((t["targets"][~is_token] == -1).all() and (lengths < t["inputs"].shape[1]).any())
            share = (t["targets"] >= 0).sum().item() / is_token.sum().item()
            self.assertTrue(0.15 < share < 0.25, share)
            logits, loss = model(t["inputs"].long(), t["targets"].long(), lengths)
            loss.backward()
            self.check(t, "logits", logits * is_token[..., None])
            self.check(t, "loss", loss.view(1))
            for name, p in model.named_parameters():
                self.check(t, "grad." + name, p.grad)
                self.assertLess(t["error." + name].item(), 1e-3, name)
            self.assertEqual("logits.long" in t, model.config.position["name"] != "learned")
            if "logits.long" in t:
                self.check(t, "logits.long", model(t["inputs.long"].long())[0])

    def test_contrastive(self):
        model, t = self.load(os.path.join(FIXTURES, "contrastive_cable.safetensors"))
        Q, lengths = len(t["positives"]), t["lengths"].long()
        for how in ("mean", "cls"):
            model.zero_grad(set_to_none=True)
            vectors = reference.pool(model.encode(t["inputs"].long(), lengths), lengths, how)
            loss = reference.contrastive_loss(vectors[:Q], vectors[Q:], t["positives"].long(), t["temperature"].item())
            loss.backward()
            self.check(t, "embeddings." + how, vectors)
            self.check(t, "loss." + how, loss.view(1))
            for name, p in model.named_parameters():
                self.assertEqual(p.grad is None, f"grad.{how}.{name}" not in t, name)
                if p.grad is not None:
                    self.check(t, f"grad.{how}.{name}", p.grad)


@needs_torch
class TestRefusals(Case):
    def test_bad_input(self):
        with self.assertRaisesRegex(ValueError, "beyond the table's 13"):
            bert("learned")(tokens(1, 14))
        with self.assertRaisesRegex(ValueError, "expected one of"):
            bert("cables")
        for config, message in (({"model_type": "gpt2"}, "not 'bert'"), ({"hidden_act": "relu"}, "expected 'gelu'")):
            with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, message):
                with open(os.path.join(folder, "config.json"), "w") as f:
                    json.dump(config, f)
                reference.load_checkpoint(folder)

    def test_checkpoints_return(self):
        for position in POSITIONS:
            model, idx = bert(position).float(), tokens(1, 13)
            with tempfile.TemporaryDirectory() as folder:
                reference.save_checkpoint(model, folder)
                again = reference.load_checkpoint(folder)
            self.assertEqual(again.config, model.config)
            self.assertTrue(torch.equal(model(idx)[0], again(idx)[0]), position)

    def test_names_of_old_files(self):
        """gamma and beta and the tensors of other tasks are accepted, as in bert-base-uncased, unknown ones refused"""
        model, idx = bert("learned").float(), tokens(1, 13)
        state = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): p
                 for n, p in model.state_dict().items()}
        state.update({"bert.pooler.dense.weight": torch.ones(12, 12), "cls.seq_relationship.bias": torch.ones(2),
                      "bert.embeddings.position_ids": torch.arange(13), "cls.predictions.decoder.bias": torch.ones(29)})
        with tempfile.TemporaryDirectory() as folder:
            reference.save_checkpoint(model, folder)
            path = os.path.join(folder, "model.safetensors")
            modeling_cable.write_safetensors(path, state)
            self.assertTrue(torch.equal(model(idx)[0], reference.load_checkpoint(folder)(idx)[0]))
            modeling_cable.write_safetensors(path, dict(state, another=torch.ones(1)))
            with self.assertRaisesRegex(RuntimeError, "another"):
                reference.load_checkpoint(folder)


if __name__ == "__main__":
    if missing():
        print(f"SKIPPED: not installed: {', '.join(missing())}; set PYTORCH_PYTHON to a Python that has PyTorch and "
              "transformers")
    unittest.main()
