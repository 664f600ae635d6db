"""cable_torch.py -- the attention of cable.c for PyTorch (2.4 or later), forward and backward, without a T x T matrix.

    out = cable_attention(q, k, v, z, u)            # q, k, v (B,NH,T,HS) as F.scaled_dot_product_attention has them
    out = alibi_attention(q, k, v)
    out = bias_attention("kerple", q, k, v, tables=[r1, r2])
    q, k = rope(q, k)

z and u (B,NH,T) are CABLE's, of each head and token: S is the running sum of ReLU(z), g is softplus(u). float32 on a
CPU; bfloat16 or float32 on a GPU, where tables stay float32. `make torch` builds the libraries (docs/torch.md).
"""
import ctypes
import functools
import os
from typing import List, Tuple

import torch
from torch import Tensor

BUILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "build")
LIBRARIES = {("cpu", torch.float32): "libcable.so", ("cuda", torch.bfloat16): "libcablecu.so",
             ("cuda", torch.float32): "libcablecu_fp32.so"}


class Call(ctypes.Structure):               # CableCall of library.cu
    _fields_ = [("position", ctypes.c_char_p), *((name, ctypes.c_int) for name in
                ("B", "T", "NH", "HS", "OC", "causal", "T_train", "threads")), ("stream", ctypes.c_void_p)]


class Sizes(ctypes.Structure):              # CableSizes
    _fields_ = [(name, ctypes.c_size_t) for name in ("columns", "tables", "state", "forward", "backward")]


@functools.lru_cache(maxsize=None)
def library(device, dtype):
    path = os.path.join(os.environ.get("CABLE_LIBRARIES", BUILD), LIBRARIES[device, dtype])
    if not os.path.exists(path):
        raise OSError(f"{path}: not found; `make torch` builds it, or set CABLE_LIBRARIES to its folder")
    loaded = ctypes.CDLL(path)
    for name in ("describe", "forward", "backward", "turn"):
        getattr(loaded, "cable_" + name).restype = ctypes.c_char_p
    return loaded


@functools.lru_cache(maxsize=1024)
def described(device, dtype, position, T_train, causal, B, T, NH, HS):
    """the Sizes of a call, and of each of its tables (name, offset, shape)"""
    sizes, text = Sizes(), ctypes.create_string_buffer(4096)
    call = Call(position.encode(), B, T, NH, HS, 0, causal, T_train, 1, None)
    error = library(device, dtype).cable_describe(ctypes.byref(call), ctypes.byref(sizes), text,
                                                  ctypes.c_size_t(len(text)))
    if error is not None:
        raise ValueError(error.decode())
    tables = []
    for line in text.value.decode().splitlines():
        name, *numbers = line.split()
        offset, rows, columns = map(int, numbers)
        tables.append((name, offset, (rows, columns) if columns else (rows,)))
    return sizes, tables


def sizes_of(rows, tables, position, T_train, causal, NH, HS):
    """described, once the arguments agree with it"""
    (B, T, OC), device = rows.shape, rows.device
    sizes, wanted = described(device.type, rows.dtype, position, T_train, causal, int(B), int(T), NH, HS)
    if tables is None:
        return sizes, wanted
    if [tuple(t.shape) for t in tables] != [shape for _, _, shape in wanted]:
        raise ValueError(f"tables: {position} has {[(name, shape) for name, _, shape in wanted]}, got "
                         f"{[tuple(t.shape) for t in tables]}")
    if OC < 3 * NH * HS + sizes.columns:
        raise ValueError(f"rows: {position} has {3 * NH * HS + sizes.columns} columns, got {OC}")
    return sizes, wanted


def run(name, rows, position, T_train, causal, NH, HS, *arguments):
    """calls the library on rows' device and stream; a tensor stands for its data"""
    (B, T, OC), stream = rows.shape, None
    if rows.is_cuda:
        stream = torch.cuda.current_stream(rows.device).cuda_stream
    call = Call(position.encode(), B, T, NH, HS, OC, causal, T_train, torch.get_num_threads(), stream)
    pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    with torch.cuda.device_of(rows):
        error = getattr(library(rows.device.type, rows.dtype), "cable_" + name)(ctypes.byref(call), *pointers)
    if error is not None:
        raise RuntimeError(error.decode())


def flat(tables, sizes, wanted, like):
    """the tables in one array, as the library has them"""
    whole = torch.zeros(max(sizes.tables, 1), dtype=torch.float32, device=like.device)
    for table, (_, offset, _) in zip(tables, wanted):
        whole[offset:offset + table.numel()] = table.flatten()
    return whole


def floats(count, like):
    return torch.empty(max(count, 1), dtype=torch.float32, device=like.device)


# ---- one row for each token: q, k, v and the encoding's columns, packed ----

@torch.library.custom_op("cable::pack", mutates_args=())
def pack(heads: List[Tensor], columns: List[Tensor], OC: int) -> Tensor:
    """rows (B,T,OC) of heads (B,NH,T,HS) and then of columns (B,NH,T), of any strides; padding is 0"""
    B, NH, T, HS = heads[0].shape
    rows, at = heads[0].new_empty(B, T, OC), 0
    for part in [*heads, *columns]:
        width = NH * part[0, 0, 0].numel()
        rows[..., at:at + width].view(B, T, NH, -1).copy_(part.reshape(B, NH, T, -1).transpose(1, 2))
        at += width
    rows[..., at:] = 0
    return rows


@pack.register_fake
def _(heads, columns, OC):
    return heads[0].new_empty(heads[0].shape[0], heads[0].shape[2], OC)


def pack_context(ctx, inputs, output):
    heads, columns, _ = inputs
    ctx.counts, (_, ctx.NH, _, ctx.HS) = (len(heads), len(columns)), heads[0].shape


def pack_backward(ctx, drows):
    """views of drows"""
    parts, at = ([], []), 0
    for kind, width in enumerate((ctx.NH * ctx.HS, ctx.NH)):
        for _ in range(ctx.counts[kind]):
            part = drows[..., at:at + width]
            parts[kind].append(part.unflatten(-1, (ctx.NH, -1)).transpose(1, 2) if kind == 0 else part.transpose(1, 2))
            at += width
    return *parts, None


pack.register_autograd(pack_backward, setup_context=pack_context)


# ---- attention over rows ----

@torch.library.custom_op("cable::attend", mutates_args=())
def attend(rows: Tensor, tables: List[Tensor], position: str, T_train: int, causal: bool, NH: int,
           HS: int) -> Tuple[Tensor, Tensor, Tensor]:
    """out (B,T,C) of rows (B,T,OC), and what the backward wants: lse (B,NH,T) and the encoding's state"""
    what = (position, T_train, causal, NH, HS)
    sizes, wanted = sizes_of(rows, tables, *what)
    out, lse, state = attend_fake(rows, tables, *what)
    state.zero_()
    run("forward", rows, *what, out, lse, state, floats(sizes.forward, rows), rows, flat(tables, sizes, wanted, rows))
    return out, lse, state


@attend.register_fake
def attend_fake(rows, tables, position, T_train, causal, NH, HS):
    (B, T, _), sizes = rows.shape, sizes_of(rows, tables, position, T_train, causal, NH, HS)[0]
    return (rows.new_empty(B, T, NH * HS), rows.new_empty(B, NH, T, dtype=torch.float32),
            rows.new_empty(max(sizes.state, 1), dtype=torch.float32))


@torch.library.custom_op("cable::attend_backward", mutates_args=())
def attend_backward(dout: Tensor, rows: Tensor, out: Tensor, lse: Tensor, state: Tensor, tables: List[Tensor],
                    position: str, T_train: int, causal: bool, NH: int, HS: int) -> Tuple[Tensor, Tensor]:
    """drows, and the gradients of all tables in one array"""
    what = (position, T_train, causal, NH, HS)
    sizes, wanted = sizes_of(rows, tables, *what)
    drows, dtables = rows.new_empty(rows.shape), floats(sizes.tables, rows).zero_()
    drows[..., 3 * NH * HS + sizes.columns:] = 0
    run("backward", rows, *what, drows, dtables, state.clone(), floats(sizes.backward, rows), dout.contiguous(), rows,
        out, lse, flat(tables, sizes, wanted, rows))
    return drows, dtables


@attend_backward.register_fake
def _(dout, rows, out, lse, state, tables, position, T_train, causal, NH, HS):
    sizes, _ = sizes_of(rows, tables, position, T_train, causal, NH, HS)
    return rows.new_empty(rows.shape), rows.new_empty(max(sizes.tables, 1), dtype=torch.float32)


def attend_context(ctx, inputs, output):
    rows, tables, *ctx.what = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, *output, *tables)


def attend_gradient(ctx, dout, dlse, dstate):
    rows, out, lse, state, *tables = ctx.saved_tensors
    if dout is None:
        return None, [None] * len(tables), *([None] * 5)
    drows, dtables = attend_backward(dout, rows, out, lse, state, tables, *ctx.what)
    _, wanted = sizes_of(rows, None, *ctx.what)
    parts = [dtables[offset:offset + table.numel()].view(table.shape) for table, (_, offset, _) in zip(tables, wanted)]
    return drows, parts, *([None] * 5)


attend.register_autograd(attend_gradient, setup_context=attend_context)


# ---- rope over rows of q and k ----

@torch.library.custom_op("cable::turn", mutates_args=())
def turn(rows: Tensor, position: str, NH: int, HS: int, back: bool) -> Tensor:
    """rows (B,T,2C) of q and k, turned; back: their gradients, turned back"""
    what, turned = (position, 1, True, NH, HS), rows.clone(memory_format=torch.contiguous_format)
    sizes, _ = sizes_of(rows, None, *what)
    run("turn", turned, *what, turned, floats(sizes.state, rows), int(back))
    return turned


@turn.register_fake
def _(rows, position, NH, HS, back):
    return rows.new_empty(rows.shape)


def turn_context(ctx, inputs, output):
    _, *ctx.what, ctx.back = inputs


turn.register_autograd(lambda ctx, drows: (turn(drows, *ctx.what, not ctx.back), *([None] * 4)),
                       setup_context=turn_context)


# ---- what a model calls ----

def check_tensor(name, x, dtype, device, shape):
    """an error that names the argument; shape: numbers, or letters of those that may be any"""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got {x.layout}")
    if x.device != device:
        raise ValueError(f"{name}: expected the device {device}, as q has, got {x.device}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if x.ndim != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, x.shape)) or x.numel() == 0:
        raise ValueError(f"{name}: expected the shape ({', '.join(map(str, shape))}), got {tuple(x.shape)}")


def check_first(name, x, shape):
    """of the argument whose type and device the rest must have"""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    types = [dtype for device, dtype in LIBRARIES if device == x.device.type]
    if not types:
        raise ValueError(f"{name}: expected a tensor on a CPU or in CUDA, got {x.device}")
    if x.dtype not in types:
        raise TypeError(f"{name}: expected {' or '.join(map(str, types))} on {x.device}, got {x.dtype}")
    check_tensor(name, x, x.dtype, x.device, shape)


def padded(columns, x):
    """the columns of a row, which on a GPU begins on a cache line"""
    unit = 128 // x.element_size() if x.is_cuda else 1
    return -(-columns // unit) * unit


def rows_attention(position, rows, heads, head_size, tables=(), causal=True, T_train=1024):
    """out (B,T,C) of rows (B,T,OC), contiguous: q, k and v, C = heads * head_size columns each, then the encoding's, as
    one linear layer makes them without a copy"""
    check_first("rows", rows, ("B", "T", "OC"))
    if not rows.is_contiguous():
        raise ValueError(f"rows: expected contiguous memory, got the strides {rows.stride()}; call .contiguous()")
    if rows.is_cuda and rows.shape[2] != padded(rows.shape[2], rows):
        raise ValueError(f"rows: expected {padded(rows.shape[2], rows)} columns, some of them padding, got "
                         f"{rows.shape[2]}")
    for n, table in enumerate(tables):
        check_tensor(f"tables[{n}]", table, torch.float32, rows.device, tuple(getattr(table, "shape", ())))
    return attend(rows, list(tables), position, T_train, bool(causal), heads, head_size)[0]


def bias_attention(position, q, k, v, columns=(), tables=(), causal=True, T_train=1024):
    """softmax(q k^T / sqrt(HS) + B) v for the bias B of any encoding of --pos that adds one, or none. columns: what it
    computes from x, (B,NH,T) each; tables: its learned tables, float32, in the order and the shapes that an error
    names; T_train: the length that default hyperparameters follow"""
    check_first("q", q, ("B", "NH", "T", "HS"))
    B, NH, T, HS = q.shape
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, q.dtype, q.device, (B, NH, T, HS))
    named = columns if isinstance(columns, dict) else {f"columns[{n}]": x for n, x in enumerate(columns)}
    for name, x in named.items():
        check_tensor(name, x, q.dtype, q.device, (B, NH, T))
    columns = list(named.values())
    rows = pack([q, k, v], columns, padded((3 * HS + len(columns)) * NH, q))
    out = rows_attention(position, rows, NH, HS, tables, causal, T_train)
    return out.unflatten(-1, (NH, HS)).transpose(1, 2)


def cable_attention(q, k, v, z, u, causal=True):
    """B_ij = -g_i |S_i - S_j|, S the running sum of ReLU(z), g = softplus(u)"""
    return bias_attention("cable", q, k, v, {"z": z, "u": u}, causal=causal)


def alibi_attention(q, k, v, causal=True):
    """B_ij = -m_h |i - j| with ALiBi's slopes"""
    return bias_attention("alibi", q, k, v, causal=causal)


def rope(q, k, theta=10000.0, p=1.0):
    """q and k (B,NH,T,HS), the pairs (2i, 2i+1) of the first p of their channels turned by t / theta^(2i/HS)"""
    check_first("q", q, ("B", "NH", "T", "HS"))
    check_tensor("k", k, q.dtype, q.device, q.shape)
    NH, HS = q.shape[1], q.shape[3]
    position = f"rope:theta={float(theta)!r},p={float(p)!r}"
    rows = turn(pack([q, k], [], padded(2 * NH * HS, q)), position, NH, HS, False)
    return tuple(rows[..., n * NH * HS:(n + 1) * NH * HS].unflatten(-1, (NH, HS)).transpose(1, 2) for n in (0, 1))


# ---- transformers: from_pretrained(STEP, trust_remote_code=True, attn_implementation="cable") ----

def layer_attention(layer, x, q, k, v, t5):
    """(B,T,C) of a layer of cable_hf.py: x (B,T,C) its input; t5: the table, where it has one"""
    position = dict(layer.config.position)
    name = position.pop("name")
    if layer.rope.position["name"] == "rope":
        q, k = rope(q, k, layer.rope.position["theta"], layer.rope.position["p"])
    gates = ([layer.cable.c, getattr(layer.cable, "s", None)] if hasattr(layer, "cable") else
             [getattr(layer.grape, gate, None) for gate in "kq"] if hasattr(layer, "grape") else [])
    columns = [gate(x).transpose(1, 2) for gate in gates if gate is not None]
    tables = [t5] if name.startswith("t5") else [
        table for module in ("alibi", "bam", "cope", "fire", "kerple") if hasattr(layer, module)
        for table in getattr(layer, module).parameters()]
    values = ",".join(f"{key}={value}" for key, value in position.items() if value is not None)
    text = f"{name}:{values}" if values else name
    out = bias_attention(text, q, k, v, columns, tables, layer.config.causal, layer.config.n_positions)
    return out.transpose(1, 2).flatten(2)


def register():
    """makes attn_implementation="cable" known to transformers (4.48 or later)"""
    import transformers
    transformers.AttentionInterface.register("cable", layer_attention)
