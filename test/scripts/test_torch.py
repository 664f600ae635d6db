"""test_torch.py -- dev/torch/cable_torch.py over build/libcable.so computes what PyTorch does in float64, with every
encoding that is a bias; in torch.compile, in transformers and in its Trainer as outside them."""
import copy
import importlib.util
import os
import resource
import struct
import sys
import tempfile
import threading
import unittest
from unittest import mock

import interpreter

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__":
    interpreter.choose("torch, transformers, accelerate", "torch")
from folder import HAS_TRAINER, TRAINER, Folder, ended, read_bytes  # noqa: E402

HOME = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=HOME.name, HF_MODULES_CACHE=os.path.join(HOME.name, "modules"), HF_HUB_OFFLINE="1",
                  TRANSFORMERS_VERBOSITY="error", TORCHINDUCTOR_CACHE_DIR=os.path.join(HOME.name, "inductor"))
has_torch = importlib.util.find_spec("torch") is not None
has_libraries = has_torch and all(importlib.util.find_spec(m) for m in ("transformers", "accelerate"))
has_kernels = HAS_TRAINER and os.path.exists(os.path.join(ROOT, "build", "libcable.so"))
has_emulated, has_cuda = False, False
if has_torch:
    import torch
    recent = hasattr(torch.library, "custom_op")
    has_libraries = has_libraries and recent
    has_emulated = recent and os.path.exists(os.path.join(ROOT, "build", "libcable_simt.so"))
    sys.path[:0] = [os.path.join(ROOT, "dev", "torch"), os.path.join(ROOT, "dev", "hf")]
    if recent:
        import cable_torch
        from cable_torch import bias_attention, cable_attention, rope, rows_attention
        folder = os.environ.get("CABLE_LIBRARIES", cable_torch.BUILD)
        has_cuda = torch.cuda.is_available() and all(os.path.exists(os.path.join(folder, name)) for (device, _), name in
                                                     cable_torch.LIBRARIES.items() if device == "cuda")
if has_libraries and has_kernels:
    import transformers
    import export
    cable_hf = export.cable_hf()
WHY = ("SKIPPED: make torch train_gpt2 has not been run" if has_libraries else
       "SKIPPED: no PyTorch 2.4 or later with transformers and accelerate; make exports installs them")


def drawn(*shape):
    return torch.randn(shape).requires_grad_()


def cable_inputs(B, NH, T, HS):
    """q, k, v, z, u"""
    return [drawn(B, NH, T, HS) for _ in range(3)] + [drawn(B, NH, T) for _ in range(2)]


@unittest.skipUnless(has_libraries and has_kernels, WHY)
class Attention(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)

    def compare(self, position, causal, B=2, NH=3, T=77, HS=16):
        """the output, and the gradients of all that a layer reads and learns, with PyTorch's in float64"""
        if causal:
            layer = cable_hf.CableGPT2Attention(cable_hf.CableConfig(1, NH, NH * HS, 9, 64, position), 0)
        else:
            config = cable_hf.CableBertConfig(NH * HS, 1, NH, 9, 64, 9, position=position)
            layer = cable_hf.CableSelfAttention(config, 0)
        own = {name: p for name, p in layer.named_parameters() if not name.startswith(("c_", "query", "key", "value"))}
        with torch.no_grad():
            for p in own.values():
                if p.ndim > 1 or not p.any():       # else it starts in a range of its own
                    p += torch.randn_like(p) / p.shape[-1] ** 0.5
        inputs, t5 = [drawn(B, T, NH * HS), *(drawn(B, NH, T, HS) for _ in range(3))], None
        if position["name"].startswith("t5"):
            t5 = drawn(*cable_hf.t5_table(layer.config).weight.shape)
        dout, found = torch.randn(B, T, NH * HS), []
        rows = cable_hf.Rows(torch.zeros(B, T, dtype=torch.long), None, None, 0)
        for dtype in (torch.float32, torch.float64):
            one, mine = copy.deepcopy(layer).to(dtype), [x.detach().to(dtype).requires_grad_() for x in inputs]
            table = None if t5 is None else t5.detach().to(dtype).requires_grad_()
            read = {**dict(zip("xqkv", mine)), **({} if table is None else {"t5": table}),
                    **{name: p for name, p in one.named_parameters() if name in own}}
            out = (cable_torch.layer_attention(one, *mine, table) if dtype == torch.float32 else
                   one.attend_in_blocks(*mine, rows, None, table))
            grads = torch.autograd.grad(out, list(read.values()), dout.to(dtype), allow_unused=True)
            found.append({name: x for name, x in zip(("out", *read), (out, *grads)) if x is not None})
        self.assertEqual(found[0].keys(), found[1].keys())
        for name, want in found[1].items():
            scale = max(want.abs().max().item(), 0.5)       # below it, the terms of a sum have cancelled
            error = (found[0][name] - want).abs().max().item()
            self.assertLess(error, 1e-4 * scale, (position, causal, name))      # 3.5e-5 found, of the bias of w_c

    def test_every_encoding(self):
        more = [{"name": "t5_clip", "K": 5, "scale": "C"}, {"name": "kcable", "weight": "outside"},
                {"name": "alibi", "slopes": "geometric"}, {"name": "rope", "theta": 50.0, "p": 0.25}]
        for position in [*({"name": name} for name in [*cable_hf.BIASES, "none", "rope"]), *more]:
            for causal in (True, False)[:1 + (position["name"] != "cope")]:
                with self.subTest(position=position, causal=causal):
                    self.compare(position, causal)

    def test_shapes(self):
        for shape in ((1, 1, 1, 32), (1, 2, 129, 128), (3, 1, 64, 72), (1, 3, 253, 64)):
            for causal in (True, False):
                self.compare({"name": "cable"}, causal, *shape)

    def test_gradcheck(self):
        inputs = [x.detach().double().requires_grad_() for x in cable_inputs(1, 2, 5, 8)]
        torch.autograd.gradcheck(lambda *a: cable_attention(*(x.float() for x in a)).double(), inputs, eps=1e-2,
                                 atol=2e-3, rtol=2e-2)

    def test_the_same_bits(self):
        """20 times; with one thread and several; from two threads of Python at the same time"""
        inputs, dout, found = cable_inputs(2, 3, 200, 32), torch.randn(2, 3, 200, 32), []

        def once():
            out = cable_attention(*inputs)
            return [out, *torch.autograd.grad(out, inputs, dout)]
        first, threads = once(), torch.get_num_threads()
        for n in range(20):
            torch.set_num_threads(1 + n % 4)
            self.assertTrue(all(map(torch.equal, first, once())))
        torch.set_num_threads(threads)
        both = [threading.Thread(target=lambda: found.extend(once() for _ in range(5))) for _ in range(2)]
        for do in (threading.Thread.start, threading.Thread.join):
            for thread in both:
                do(thread)
        self.assertEqual([all(map(torch.equal, first, again)) for again in found], [True] * 10)

    def test_views(self):
        """strides and expanded dimensions change nothing"""
        q, k, v, z, u = cable_inputs(2, 3, 40, 32)
        others, wide = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, z, u)], torch.randn(2, 3, 40, 64)
        wide[..., ::2] = q
        self.assertTrue(torch.equal(cable_attention(q, k, v, z, u), cable_attention(wide[..., ::2], *others)))
        self.assertTrue(torch.equal(cable_attention(q, k, v, z[:, :1].expand_as(z), u),
                                    cable_attention(q, k, v, z[:, :1].repeat(1, 3, 1), u)))
        rows = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v, z, u)], 2)
        self.assertTrue(torch.equal(rows_attention("cable", rows, 3, 32),
                                    cable_attention(q, k, v, z, u).transpose(1, 2).flatten(2)))
        self.assertEqual(cable_torch.in_a_row(torch.zeros(9)[1:]).data_ptr() % 16, 0)

    def test_a_model_with_tables_in_bf16(self):
        layer = cable_hf.CableGPT2Attention(cable_hf.CableConfig(1, 2, 32, 9, 64, {"name": "kerple"}), 0).bfloat16()
        q, k, v, *_ = cable_inputs(1, 2, 6, 16)
        out = bias_attention("kerple", q, k, v, (), [r.float() for r in layer.kerple.parameters()])
        self.assertTrue(torch.equal(cable_torch.layer_attention(layer, None, q, k, v, None),
                                    out.transpose(1, 2).flatten(2)))

    def test_refusals(self):
        q, k, v, z, u = cable_inputs(1, 2, 6, 32)
        rows, r, e = torch.randn(1, 6, 196), torch.ones(2), torch.ones(32, 64)
        jvp = lambda: torch.func.jvp(lambda x: cable_attention(x, k, v, z, u), (q.detach(),), (q.detach(),))
        find = mock.patch.dict(os.environ, CABLE_LIBRARIES=HOME.name)(cable_torch.library.__wrapped__)
        for error, words, f, *arguments in (
                (TypeError, "k: .*float32", cable_attention, q, k.double(), v, z, u),
                (TypeError, "q: .*bfloat16", cable_attention, q.bfloat16(), k, v, z, u),
                (TypeError, "z: .*list", cable_attention, q, k, v, [1.0], u),
                (TypeError, "v: .*sparse", cable_attention, q, k, v.detach().to_sparse(), z, u),
                (ValueError, "u: .*cpu, got meta", cable_attention, q, k, v, z, u.to("meta")),
                (ValueError, r"u: .*\(1, 2, 6\), got \(1, 6, 2\)", cable_attention, q, k, v, z, u.transpose(1, 2)),
                (ValueError, "k: .*shape", cable_attention, q, k[:, :1], v, z, u),
                (ValueError, "q: .*shape", cable_attention, q[0], k, v, z, u),
                (ValueError, "k: .*shape", cable_attention, q[:0], k, v, z, u),
                (ValueError, "at least 1 of each", cable_attention, *(x[..., :0] for x in (q, k, v)), z, u),
                (ValueError, "rows: .*strides", rows_attention, "cable", rows[:, ::2], 2, 32),
                (ValueError, "rows: .*196 columns", rows_attention, "cable", rows[..., :192].contiguous(), 2, 32),
                (ValueError, "196 columns, 4 after", bias_attention, "cable", q, k, v, [z]),
                (ValueError, "tables: .*kerple_r1", bias_attention, "kerple", q, k, v, (), [r]),
                (TypeError, r"tables\[1\]: .*float32", bias_attention, "kerple", q, k, v, (), [r, r.double()]),
                (ValueError, "did you mean", bias_attention, "cabel", q, k, v),
                (ValueError, "K is 0.5", bias_attention, "t5_clip:K=0.5", q, k, v),
                (ValueError, "one encoding", bias_attention, "cable,none", q, k, v),
                (ValueError, "expected a bias", bias_attention, "rope", q, k, v),
                (ValueError, "a causal model", bias_attention, "cope", q, k, v, (), [e], False),
                (NotImplementedError, "q: .*jvp", jvp),
                (OSError, "make build/libcablecu_fp32.so", find, "cuda", torch.float32),
                (ValueError, "must be even", rope, q[..., :31], k[..., :31])):
            with self.subTest(words=words), self.assertRaisesRegex(error, words):
                f(*arguments)

    def results(self, f, inputs):
        """the output, and the gradients of all inputs"""
        out = f(*inputs)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    def test_autocast(self):
        """as for F.scaled_dot_product_attention the output has autocast's type, whatever the inputs have; and it is
        float32's up to one rounding. Gradients have their inputs' types."""
        inputs, compiled = cable_inputs(2, 3, 40, 16), torch.compile(cable_attention, fullgraph=True,
                                                                    backend="aot_eager")
        want = self.results(cable_attention, inputs)
        for dtype, eps in ((torch.bfloat16, 2 ** -8), (torch.float16, 2 ** -11)):
            mixed = [x.detach().to(dtype if n % 2 else torch.float32).requires_grad_() for n, x in enumerate(inputs)]
            rounded = self.results(cable_attention, [x.detach().float().requires_grad_() for x in mixed])
            for given, expected in ((inputs, want), (mixed, rounded)):
                rows = torch.cat([x.transpose(1, 2).flatten(2) for x in given], 2)
                for f in (cable_attention, compiled):
                    with torch.autocast("cpu", dtype):
                        found = self.results(f, given)
                        by_rows = rows_attention("cable", rows.detach(), 3, 16)
                        turned = rope(*given[:2])
                    self.assertEqual([x.dtype for x in found], [dtype, *(x.dtype for x in given)])
                    self.assertEqual([x.dtype for x in turned], [x.dtype for x in given[:2]])
                    for a, b in zip(found, expected):
                        self.assertLess((a - b).abs().max().item(), 2 * eps * b.abs().max().item())
                    self.assertTrue(torch.equal(by_rows, found[0].transpose(1, 2).flatten(2)))
            with torch.autocast("cpu", dtype), self.assertRaisesRegex(TypeError, "k: .*float64"):
                cable_attention(inputs[0], inputs[1].double(), *inputs[2:])

    def test_compiled_for_any_shape(self):
        """one process with several numbers of heads, head sizes and lengths, forward and backward"""
        def turned(q, k, *rest):
            return cable_attention(*rope(q, k), *rest)
        for dynamic in (True, None):
            torch._dynamo.reset()
            compiled = torch.compile(turned, dynamic=dynamic, fullgraph=True, backend="aot_eager")
            for shape in ((2, 2, 16, 32), (1, 3, 20, 16), (2, 4, 33, 64), (1, 1, 5, 8)):
                inputs = cable_inputs(*shape)
                for a, b in zip(self.results(compiled, inputs), self.results(turned, inputs)):
                    self.assertLess((a - b).abs().max().item(), 1e-5 * b.abs().max().item(), (dynamic, shape))

    def test_empty(self):
        """no sequence, or none with a token: an empty output, and gradients"""
        for shape in ((0, 2, 5, 16), (2, 2, 0, 16)):
            inputs = cable_inputs(*shape)
            compiled = torch.compile(cable_attention, backend="aot_eager")
            for f in (cable_attention, compiled, lambda q, k, *_: rope(q, k)[1]):
                out = f(*inputs)
                grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
                self.assertEqual([x.shape for x in (out, grads[1])], [shape, shape])
            r = torch.ones(2).requires_grad_()
            out = bias_attention("kerple", *inputs[:3], (), [r, r])
            self.assertEqual(torch.autograd.grad(out.sum(), r)[0].tolist(), [0, 0])

    def test_columns_of_padding(self):
        """their gradient is 0, where PyTorch fills with NaN what nobody has written"""
        rows = drawn(2, 9, 3 * 2 * 16 + 4 + 7)
        torch.use_deterministic_algorithms(True)
        try:
            rows_attention("cable", rows, 2, 16).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        self.assertTrue(rows.grad[..., -7:].eq(0).all())
        self.assertTrue(rows.grad[..., :-7].ne(0).any(dim=(0, 1)).all())

    def test_a_guest_of_the_process(self):
        """PyTorch's threads keep denormal numbers; without memory there is an error and no exit"""
        code = f"""if True:
            import contextlib, ctypes, resource, sys, torch
            sys.path.append({os.path.join(ROOT, "dev", "torch")!r})
            import cable_torch
            torch.set_num_threads(2)
            x = torch.randn(1, 4, 64, 32)
            cable_torch.alibi_attention(x, x, x)
            with contextlib.suppress(ValueError):
                cable_torch.bias_attention("rope", x, x, x)
            assert ctypes.CDLL("libgomp.so.1").omp_get_max_threads() == 2, "the number of threads has changed"
            assert torch.full((1 << 20,), 1e-40).mul(0.5).ne(0).all(), "denormal numbers became 0"
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), -1))
            x = torch.randn(1, 1, 1, 1 << 20)               # a block's scratch takes a gigabyte
            try:
                cable_torch.alibi_attention(x, x, x)
            except RuntimeError as e:
                print(e)"""
        status, text = ended(sys.executable, "-c", code)
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"cannot allocate \d+ bytes for a block's scratch")

    def test_long(self):
        """131,072 tokens: memory of a few copies of q, k and v, and the last query as float64 has it"""
        q, k, v, z, u = cable_inputs(1, 1, 131072, 32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = cable_attention(q, k, v, z, u)
        out.sum().backward()
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        self.assertLess(taken, 30 * 4 * q.numel())          # 16 found; T x T would be 4,096
        with torch.no_grad():
            S = z.double().relu().cumsum(-1)[0, 0]
            bias = torch.nn.functional.softplus(u[0, 0, -1].double()) * (S - S[-1])
            P = torch.softmax(k[0, 0].double() @ q[0, 0, -1].double() / 32 ** 0.5 + bias, 0)
            self.assertLess((out[0, 0, -1] - P @ v[0, 0].double()).abs().max().item(), 1e-5)

    def test_compiled(self):
        """a block, with another length too"""
        NH, C, norm = 2, 64, torch.nn.LayerNorm(64)
        qkv, gates = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, 2 * NH)
        parameters = [p for layer in (norm, qkv, gates) for p in layer.parameters()]

        def block(x):
            y = norm(x)
            q, k, v = (t.unflatten(2, (NH, -1)).transpose(1, 2) for t in qkv(y).chunk(3, 2))
            z, u = (t.transpose(1, 2) for t in gates(y).chunk(2, 2))
            return x + cable_attention(*rope(q, k), v, z, u).transpose(1, 2).flatten(2)
        compiled = torch.compile(block, fullgraph=True)
        for T in (64, 80):
            x, found = torch.randn(2, T, C), []
            for f in (block, compiled):
                out = f(x)
                found.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
            for a, b in zip(*found):
                self.assertLess((a - b).abs().max().item(), 2e-5 * a.abs().max().item())
        torch.library.opcheck(torch.ops.cable.attend.default, (drawn(2, 9, 66), [torch.rand(2).requires_grad_(),
                              torch.rand(2).requires_grad_()], "kerple", 64, True, 2, 11))
        torch.library.opcheck(torch.ops.cable.turn.default, (drawn(2, 9, 40), "rope", 2, 10, False))


@unittest.skipUnless(has_cuda or has_emulated, "SKIPPED: no GPU with PyTorch, and make build/libcable_simt.so has not "
                     "been run")
class Cuda(unittest.TestCase):
    def compare(self, device, dtype, bound, *shape):
        """CABLE's output and gradients with float64's, and the same bits again"""
        torch.manual_seed(1)
        inputs = [x.detach().to(dtype) for x in cable_inputs(*shape)]
        dout = torch.randn_like(inputs[0])
        for causal in (True, False):
            def formula(q, k, v, z, u):
                S = z.relu().cumsum(-1)
                bias = -torch.nn.functional.softplus(u)[..., None] * (S[..., None] - S[..., None, :]).abs()
                later = torch.ones(S.shape[-1], S.shape[-1], dtype=bool).triu(1) & causal
                scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias).masked_fill(later, float("-inf"))
                return torch.softmax(scores, -1) @ v

            def results(f, device, dtype):
                mine = [x.to(device, dtype).requires_grad_() for x in inputs]
                out = f(*mine)
                return [x.cpu() for x in (out, *torch.autograd.grad(out, mine, dout.to(device, dtype)))]
            first, again = (results(lambda *a: cable_attention(*a, causal=causal), device, dtype) for _ in range(2))
            self.assertTrue(all(map(torch.equal, first, again)))
            for a, b in zip(first, results(formula, "cpu", torch.float64)):
                self.assertLess((a - b).abs().max().item(), bound * b.abs().max().item(), (dtype, causal, shape))

    @unittest.skipUnless(has_emulated, "SKIPPED: make build/libcable_simt.so has not been run")
    def test_on_the_emulator(self):
        with mock.patch.dict(cable_torch.LIBRARIES, {("cpu", torch.bfloat16): "libcable_simt.so"}):
            self.compare("cpu", torch.bfloat16, 2e-2, 2, 4, 70, 64)             # 5e-3 found

    @unittest.skipUnless(has_cuda, "SKIPPED: no GPU here, or make torch build/libcablecu_fp32.so has not been run")
    def test_on_a_gpu(self):
        for shape in ((2, 3, 333, 64), (1, 12, 1000, 128), (1, 1, 70, 32)):
            self.compare("cuda", torch.bfloat16, 2e-2, *shape)
            self.compare("cuda", torch.float32, 1e-4, *shape)


@unittest.skipUnless(has_libraries and has_kernels, WHY)
class Models(Folder):
    B, T, STEPS = 4, 48, 20

    def load(self, pos, name):
        """a new model with PyTorch's attention and with these kernels, the losses of its training by train_gpt2, and
        the ids of its windows"""
        text = read_bytes("LICENSE")[:self.B * self.T + 1]
        shard = self.write("shard.bin", struct.pack("<5i", 20240520, 1, len(text), 256, 10).ljust(1024, b"\0") +
                           struct.pack(f"<{len(text)}H", *text))
        start, run = self.path(name, "new"), self.path(name, "run")
        common = (f"--train_files {shard} --val_files {shard} --val_every 0 --sample_every 0 --T {self.T} --B {self.B} "
                  "--threads 1 ")
        for flags in (f"--model 2,2,64 --pos {pos} --steps 1 --lr 0 --checkpoint_every 1 --out {start}",
                      f"--load {start} --steps {self.STEPS} --lr 1e-3 --out {run}"):
            self.assertEqual(ended(TRAINER, *(common + flags).split())[0], 0)
        cable_torch.register(lambda *a: self.called.append(0) or cable_torch.layer_attention(*a))
        self.called = []
        models = [transformers.AutoModelForCausalLM.from_pretrained(
            os.path.join(start, "step_00000001"), trust_remote_code=True, **more)
            for more in ({}, {"attn_implementation": "cable"})]
        return models, [r["loss"] for r in self.records("train", run)], torch.tensor(list(text))

    def test_the_losses_of_the_trainer(self):
        for name, pos in enumerate(("cable", "rope+kerple", "t5")):
            (_, model), expected, ids = self.load(pos, str(name))
            inputs, targets = (ids[n:n + self.B * self.T].view(self.B, self.T) for n in (0, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
            for step in range(self.STEPS):
                logits = model(inputs, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                self.assertLess(abs(loss.item() / expected[step] - 1), 1e-6, (pos, step))       # 1.3e-7 found
            self.assertEqual((len(self.called), len(expected)), (2 * self.STEPS, self.STEPS))
            self.assertLess(expected[-1], expected[0] - 0.5)

    def test_ten_steps_of_the_trainer_of_transformers(self):
        models, _, ids = self.load("cable", "0")
        data, losses = [{"input_ids": w, "labels": w} for w in ids[:-1].view(self.B, self.T)], []
        models.append(copy.deepcopy(models[1]))
        for n, model in enumerate(models):          # the last one under autocast
            trainer = transformers.Trainer(model, transformers.TrainingArguments(
                self.path(f"out{n}"), bf16=n == 2, max_steps=10, per_device_train_batch_size=2, logging_steps=1,
                report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=1e-3),
                train_dataset=data)
            trainer.train()
            losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
        self.assertEqual((len(losses[1]), len(self.called)), (10, 2 * 2 * 10))
        for a, b, c in zip(*losses):
            self.assertLess(abs(a / b - 1), 1e-5)
            self.assertLess(abs(c / b - 1), 1e-2)


if __name__ == "__main__":
    unittest.main()
