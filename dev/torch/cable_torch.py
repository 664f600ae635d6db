"""cable_torch.py -- the attention of cable.c for PyTorch (2.4 or later), forward and backward, without a T x T matrix.

    out = cable_attention(q, k, v, z, u)            # q, k, v (B,NH,T,HS) as F.scaled_dot_product_attention has them
    out = alibi_attention(q, k, v)
    out = bias_attention("kerple", q, k, v, tables=[r1, r2])
    q, k = rope(q, k)

z and u (B,NH,T) are CABLE's, of each head and token: S is the running sum of ReLU(z), g is softplus(u). float32 on a
CPU; bfloat16 or float32 on a GPU, where tables stay float32; under torch.autocast any of them. `make torch` builds the
libraries (docs/torch.md).
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
HALVES = (torch.float16, torch.bfloat16)


class Call(ctypes.Structure):               # CableCall of library.cu
    _fields_ = [("position", ctypes.c_char_p), *((name, ctypes.c_int) for name in
                ("B", "T", "NH", "HS", "OC", "causal", "T_train", "threads")), ("stream", ctypes.c_void_p)]


@functools.lru_cache(maxsize=None)
def library(device, dtype):
    name = LIBRARIES[device, dtype]
    path = os.path.join(os.environ.get("CABLE_LIBRARIES", BUILD), name)
    if not os.path.exists(path):
        raise OSError(f"{path}: not found; `make build/{name}` builds it, or set CABLE_LIBRARIES to its folder")
    loaded = ctypes.CDLL(path)
    for name in ("describe", "forward", "backward", "turn"):
        getattr(loaded, "cable_" + name).restype = ctypes.c_char_p
    return loaded


class Sizes:
    """of a call, in float32: columns of a row, tables, state, scratch; `wanted` (name, offset, shape) of each table"""
    def __init__(self, device, dtype, *call):
        found, text = (ctypes.c_size_t * 5)(), ctypes.create_string_buffer(4096)
        asked = Call(*call, torch.get_num_threads(), None)
        error = library(device, dtype).cable_describe(ctypes.byref(asked), found, text, ctypes.c_size_t(4096))
        if error is not None:
            raise ValueError(error.decode())
        self.columns, self.tables, self.state, self.forward, self.backward = found
        self.wanted = []
        for name, offset, rows, columns in map(str.split, text.value.decode().splitlines()):
            self.wanted.append((name, int(offset), (int(rows), int(columns)) if columns != "0" else (int(rows),)))


cached_sizes = functools.lru_cache(maxsize=1024)(Sizes)


def sizes_of(rows, tables, position, T_train, causal, NH, HS):
    """an error unless the arguments agree with the encoding; tables: None for rope. int(): torch.compile may have
    symbols for sizes, which the library cannot compute with; an empty call has the sizes of one token"""
    B, T = (max(int(n), 1) for n in rows.shape[:2])
    sizes = cached_sizes(rows.device.type, rows.dtype, position.encode(), B, T, int(NH), int(HS),
                         int(tables is not None), int(causal), int(T_train))
    shapes, least = [shape for _, _, shape in sizes.wanted], 3 * NH * HS + sizes.columns
    if tables is not None and [tuple(t.shape) for t in tables] != shapes:
        raise ValueError(f"tables: {position}: expected {[name for name, _, _ in sizes.wanted]} of the shapes "
                         f"{shapes}, got {[tuple(t.shape) for t in tables]}")
    if tables is not None and not least <= rows.shape[2] < least + 64:
        raise ValueError(f"rows: {position}: expected {least} columns, {sizes.columns} after q, k and v, got "
                         f"{rows.shape[2]}")
    return sizes


def run(name, rows, what, *arguments):
    """calls the library on rows' device and stream; a tensor stands for its data"""
    position, T_train, causal, NH, HS = what
    if rows.numel() == 0:
        return
    stream = torch.cuda.current_stream(rows.device).cuda_stream if rows.is_cuda else None
    call = Call(position.encode(), *rows.shape[:2], NH, HS, rows.shape[2], causal, T_train, torch.get_num_threads(),
                stream)
    pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    with torch.cuda.device_of(rows):
        error = getattr(library(rows.device.type, rows.dtype), "cable_" + name)(ctypes.byref(call), *pointers)
    if error is not None:
        raise RuntimeError(error.decode())


def in_a_row(x):
    """contiguous, and for a GPU's loads on 16 bytes"""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def floats(like, *shape):
    return like.new_empty(shape, dtype=torch.float32)


def flat(tables, sizes, like):
    """the tables in one array, as the library has them"""
    whole = floats(like, sizes.tables).zero_()
    for table, (_, offset, _) in zip(tables, sizes.wanted):
        whole[offset:offset + table.numel()] = table.flatten()
    return whole


# ---- attention over rows (B,T,OC): q, k, v and the encoding's columns of a token ----

@torch.library.custom_op("cable::attend", mutates_args=())
def attend(rows: Tensor, tables: List[Tensor], position: str, T_train: int, causal: bool, NH: int,
           HS: int) -> Tuple[Tensor, Tensor, Tensor]:
    """out (B,T,C), and what the backward wants: lse (B,NH,T) and the encoding's state"""
    what, rows = (position, T_train, causal, NH, HS), in_a_row(rows)
    sizes, (out, lse, state) = sizes_of(rows, tables, *what), attend_shapes(rows, tables, *what)
    run("forward", rows, what, out, lse, state.zero_(), floats(rows, sizes.forward), rows, flat(tables, sizes, rows))
    return out, lse, state


@attend.register_fake
def attend_shapes(rows, tables, *what):
    (B, T, _), (NH, HS) = rows.shape, what[-2:]
    return rows.new_empty(B, T, NH * HS), floats(rows, B, NH, T), floats(rows, sizes_of(rows, tables, *what).state)


@torch.library.custom_op("cable::attend_backward", mutates_args=())
def attend_backward(dout: Tensor, rows: Tensor, out: Tensor, lse: Tensor, state: Tensor, tables: List[Tensor],
                    position: str, T_train: int, causal: bool, NH: int, HS: int) -> Tuple[Tensor, Tensor]:
    """drows, and the gradients of all tables in one array"""
    what, rows = (position, T_train, causal, NH, HS), in_a_row(rows)
    sizes, (drows, dtables) = sizes_of(rows, tables, *what), gradient_shapes(dout, rows, out, lse, state, tables, *what)
    drows[..., 3 * NH * HS + sizes.columns:] = 0
    run("backward", rows, what, drows, dtables.zero_(), state.clone(), floats(rows, sizes.backward), in_a_row(dout),
        rows, out, lse, flat(tables, sizes, rows))
    return drows, dtables


@attend_backward.register_fake
def gradient_shapes(dout, rows, out, lse, state, tables, *what):
    return rows.new_empty(rows.shape), floats(rows, sizes_of(rows, tables, *what).tables)


def attend_context(ctx, inputs, output):
    rows, tables, *ctx.what = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, *output, *tables)


def attend_gradient(ctx, dout, dlse, dstate):
    rows, out, lse, state, *tables = ctx.saved_tensors
    if dout is None:
        return None, [None] * len(tables), *([None] * 5)
    drows, dtables = attend_backward(dout, rows, out, lse, state, tables, *ctx.what)
    found = [dtables[offset:offset + table.numel()].view(shape)
             for table, (_, offset, shape) in zip(tables, sizes_of(rows, tables, *ctx.what).wanted)]
    return drows, found, *([None] * 5)


attend.register_autograd(attend_gradient, setup_context=attend_context)


# ---- rope over rows of q and k ----

@torch.library.custom_op("cable::turn", mutates_args=())
def turn(rows: Tensor, position: str, NH: int, HS: int, back: bool) -> Tensor:
    """back: the gradients of q and k, turned back"""
    what, turned = (position, 1, True, NH, HS), rows.clone(memory_format=torch.contiguous_format)
    run("turn", turned, what, turned, floats(rows, sizes_of(rows, None, *what).state), int(back))
    return turned


def turn_context(ctx, inputs, output):
    _, *ctx.what, ctx.back = inputs


turn.register_fake(lambda rows, *_: rows.new_empty(rows.shape))
turn.register_autograd(lambda ctx, drows: (turn(drows, *ctx.what, not ctx.back), *([None] * 4)),
                       setup_context=turn_context)


# ---- what a model calls ----

def check_tensor(name, x, shape, like=None, dtype=None):
    """an error that names the argument; shape: numbers, or letters of those that may be any. like: has its device, and
    unless another is given its type"""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {getattr(x, 'layout', type(x).__name__)}")
    if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{name}: expected no forward-mode derivative (jvp); backward() has the gradients")
    types = [t for device, t in LIBRARIES if device == x.device.type]
    if not types or like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected the device {like.device if like is not None else 'cpu or cuda'}, got "
                         f"{x.device}")
    dtype = like.dtype if like is not None and dtype is None else dtype
    if x.dtype not in (types if dtype is None else [dtype]):
        raise TypeError(f"{name}: expected {dtype or ' or '.join(map(str, types))} on {x.device}, got {x.dtype}")
    if x.ndim != len(shape) or any(not isinstance(n, str) and n != m for n, m in zip(shape, x.shape)):
        raise ValueError(f"{name}: expected the shape ({', '.join(map(str, shape))}), got {tuple(x.shape)}")


def in_one_type(*tensors):
    """the tensors as the library computes with them, and the type of the result, or None for theirs. As for
    F.scaled_dot_product_attention under torch.autocast, that is autocast's, whatever the types of the tensors; where
    the library has not got it, the work is done in float32."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors, None
    result = torch.get_autocast_dtype(device)
    dtype, cast = result if (device, result) in LIBRARIES else torch.float32, (torch.float32, *HALVES)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in cast else x for x in tensors], result


def rows_of(heads, columns):
    """(B,T,OC) of heads (B,NH,T,HS), then columns (B,NH,T); on a GPU a row begins on a cache line"""
    parts = [x.transpose(1, 2).flatten(2) for x in heads] + [x.transpose(1, 2) for x in columns]
    B, T, width = *parts[0].shape[:2], sum(part.shape[2] for part in parts)
    more = -width % (128 // parts[0].element_size()) if parts[0].is_cuda else 0
    return torch.cat(parts + [parts[0].new_zeros(B, T, more)] * (more > 0), dim=2)


def heads_of(rows, n, NH, HS):
    """the n-th C columns as (B,NH,T,HS)"""
    return rows[..., n * NH * HS:(n + 1) * NH * HS].unflatten(-1, (NH, HS)).transpose(1, 2)


def rows_attention(position, rows, heads, head_size, tables=(), causal=True, T_train=1024):
    """out (B,T,C) of contiguous rows (B,T,OC), as one linear layer makes them: q, k and v, C = heads * head_size
    columns each, the encoding's, and on a GPU padding to a multiple of 128 bytes"""
    (rows,), result = in_one_type(rows)
    check_tensor("rows", rows, ("B", "T", "OC"))
    if not rows.is_contiguous() or rows.is_cuda and rows.shape[2] * rows.element_size() % 128 != 0:
        raise ValueError(f"rows: expected contiguous memory, on a GPU a multiple of 128 bytes each, got the shape "
                         f"{tuple(rows.shape)} and the strides {rows.stride()}")
    for n, table in enumerate(tables):
        check_tensor(f"tables[{n}]", table, getattr(table, "shape", ()), rows, torch.float32)
    return attend(rows, list(tables), position, T_train, bool(causal), heads, head_size)[0].to(result or rows.dtype)


def bias_attention(position, q, k, v, columns=(), tables=(), causal=True, T_train=1024):
    """softmax(q k^T / sqrt(HS) + B) v for the bias B of any encoding of --pos that adds one, or none. columns: what it
    computes from x, (B,NH,T) each; tables: its learned tables, float32, in the order and the shapes that an error
    names; T_train: the length that default hyperparameters follow"""
    named = columns if isinstance(columns, dict) else {f"columns[{n}]": x for n, x in enumerate(columns)}
    (q, k, v, *columns), _ = in_one_type(q, k, v, *named.values())
    check_tensor("q", q, ("B", "NH", "T", "HS"))
    B, NH, T, HS = q.shape
    for name, x, shape in [("k", k, q.shape), ("v", v, q.shape), *((n, x, (B, NH, T)) for n, x in zip(named, columns))]:
        check_tensor(name, x, shape, q)
    out = rows_attention(position, rows_of([q, k, v], columns), NH, HS, tables, causal, T_train)
    return heads_of(out, 0, NH, HS)


def cable_attention(q, k, v, z, u, causal=True):
    """B_ij = -g_i |S_i - S_j|, S the running sum of ReLU(z), g = softplus(u)"""
    return bias_attention("cable", q, k, v, {"z": z, "u": u}, causal=causal)


def alibi_attention(q, k, v, causal=True):
    """B_ij = -m_h |i - j| with ALiBi's slopes"""
    return bias_attention("alibi", q, k, v, causal=causal)


def rope(q, k, theta=10000.0, p=1.0):
    """q and k (B,NH,T,HS), the pairs (2i, 2i+1) of the first p of their channels turned by t / theta^(2i/HS)"""
    (a, b), _ = in_one_type(q, k)
    check_tensor("q", a, ("B", "NH", "T", "HS"))
    check_tensor("k", b, a.shape, a)
    NH, HS = a.shape[1], a.shape[3]
    rows = turn(rows_of([a, b], []), f"rope:theta={float(theta)!r},p={float(p)!r}", NH, HS, False)
    return heads_of(rows, 0, NH, HS).to(q.dtype), heads_of(rows, 1, NH, HS).to(k.dtype)


# ---- transformers: from_pretrained(STEP, trust_remote_code=True, attn_implementation="cable") ----

def layer_attention(layer, x, q, k, v, t5):
    """(B,T,C) of a layer of cable_hf.py: x (B,T,C) its input; t5: the table, where it has one"""
    position, encodings = dict(layer.config.position), ("alibi", "bam", "cope", "fire", "kerple")
    name = position.pop("name")
    if layer.rope.position["name"] == "rope":
        q, k = rope(q, k, layer.rope.position["theta"], layer.rope.position["p"])
    gates = [getattr(getattr(layer, of, None), gate, None) for of, gate in
             (("cable", "c"), ("cable", "s"), ("grape", "k"), ("grape", "q"))]
    columns = [gate(x.to(gate.weight.dtype)).to(q.dtype).transpose(1, 2) for gate in gates if gate is not None]
    tables = [t5] if name.startswith("t5") else [table for of in encodings if hasattr(layer, of)
                                                 for table in getattr(layer, of).parameters()]
    values = ",".join(f"{key}={value}" for key, value in position.items() if value is not None)
    out = bias_attention(f"{name}:{values}" if values else name, q, k, v, columns,
                         [table.float() for table in tables], layer.config.causal, layer.config.n_positions)
    return out.transpose(1, 2).flatten(2)


def register(attention=layer_attention):
    """makes attn_implementation="cable" known to transformers (4.48 or later)"""
    import transformers
    transformers.AttentionInterface.register("cable", attention)
