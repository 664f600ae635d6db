"""numpy_torch.py -- the part of PyTorch and transformers that the exported models compute with, in numpy.

install() makes `import torch` and `import transformers` find it, so that the formulas of dev/hf/modeling_cable*.py and
of a checkpoint's cable_hf.py are tested where PyTorch is not. There are no gradients, and nothing is drawn: weights are
zeros until load_state_dict. A name that is not here is an AttributeError.
"""
import contextlib
import math
import sys
import types

import numpy as np

FLOAT, INT = np.dtype(np.float64), np.dtype(np.int64)


# ---- tensors ----

class Tensor(np.ndarray):
    """an array with PyTorch's names, where they differ from numpy's"""
    device = "cpu"

    def to(self, kind):
        return self if kind == self.device else self.astype(kind)

    def split(self, size, dim):
        return [wrap(part) for part in np.split(raw(self), range(size, self.shape[dim], size), axis=dim)]

    def cummax(self, dim):
        return types.SimpleNamespace(values=wrap(np.maximum.accumulate(raw(self), axis=dim)))

    def clamp_(self, min=None, max=None):
        self[...] = self.clamp(min, max)


# PyTorch's methods by numpy's functions of an array
METHODS = {
    "view": np.ndarray.reshape, "double": lambda x: x.astype(FLOAT), "long": lambda x: x.astype(INT),
    "bool": lambda x: x.astype(np.bool_), "detach": lambda x: x, "t": np.transpose, "transpose": np.swapaxes,
    "permute": lambda x, *axes: x.transpose(axes), "flatten": lambda x, first: x.reshape(*x.shape[:first], -1),
    "expand": lambda x, *shape: np.broadcast_to(x, shape), "sum": lambda x, dim: x.sum(axis=dim),
    "any": lambda x, dim=None: x.any(axis=dim), "flip": np.flip, "abs": np.abs, "floor": np.floor, "cos": np.cos,
    "sin": np.sin, "gather": lambda x, dim, index: np.take_along_axis(x, raw(index), dim),
    "clamp": lambda x, min=None, max=None: np.clip(x, min, max),
    "masked_fill": lambda x, mask, value: np.where(raw(mask), value, x)}


def method(function):
    return lambda self, *arguments, **rest: wrap(function(raw(self), *arguments, **rest))


for name, function in METHODS.items():
    setattr(Tensor, name, method(function))


def raw(x):
    return np.asarray(x)


def wrap(x):
    return np.asarray(x).view(type=Tensor)


def returning_tensor(f, axis="dim"):
    """f with PyTorch's name for an axis, and without a device"""
    def g(*arguments, device=None, **rest):
        if axis in rest:
            rest["axis"] = rest.pop(axis)
        return wrap(f(*arguments, **rest))
    return g


class no_grad(contextlib.ContextDecorator):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


# ---- layers ----

class Parameter(Tensor):
    def __new__(cls, x):
        return np.array(x, dtype=FLOAT).view(type=cls)


class Module:
    training = False

    def __call__(self, *arguments, **rest):
        return self.forward(*arguments, **rest)

    def named(self, kind, prefix=""):
        """every (name, value) of this kind in it"""
        for name, value in vars(self).items():
            if isinstance(value, kind):
                yield prefix + name, value
            if isinstance(value, Module):
                yield from value.named(kind, prefix + name + ".")

    def named_modules(self):
        return self.named(Module)

    def children(self):
        return [value for value in vars(self).values() if isinstance(value, Module)]

    def load_state_dict(self, state):
        own = dict(self.named(Parameter))
        if set(own) != set(state):
            raise KeyError(f"the model and the state differ in {sorted(set(own) ^ set(state))}")
        for name, value in state.items():
            if own[name].shape != value.shape:
                raise ValueError(f"{name}: expected the shape {own[name].shape}, got {value.shape}")
            own[name][...] = value


class ModuleDict(Module):
    def __init__(self, modules):
        for name, module in modules.items():
            self[name] = module

    def __getitem__(self, name):
        return vars(self)[name]

    def __setitem__(self, name, module):
        setattr(self, name, module)

    def __contains__(self, name):
        return name in vars(self)

    def values(self):
        return list(vars(self).values())


class ModuleList(Module):
    def __init__(self, modules):
        for i, module in enumerate(modules):
            setattr(self, str(i), module)

    def __getitem__(self, i):
        return list(vars(self).values())[i]


class Sequential(ModuleList):
    def __init__(self, *modules):
        super().__init__(modules)

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


class Linear(Module):
    def __init__(self, n_in, n_out):
        self.weight, self.bias = Parameter(np.zeros((n_out, n_in))), Parameter(np.zeros(n_out))

    def forward(self, x):
        return x @ self.weight.t() + self.bias


class Embedding(Module):
    def __init__(self, rows, columns):
        self.weight = Parameter(np.zeros((rows, columns)))

    def forward(self, ids):
        return self.weight[ids]


class LayerNorm(Module):
    def __init__(self, n, eps):
        self.weight, self.bias, self.eps = Parameter(np.ones(n)), Parameter(np.zeros(n)), eps

    def forward(self, x):
        x = raw(x)
        away = x - x.mean(-1, keepdims=True)
        return away / np.sqrt((away ** 2).mean(-1, keepdims=True) + self.eps) * self.weight + self.bias


class ReLU(Module):
    def forward(self, x):
        return np.maximum(x, 0)


def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(raw(x) / math.sqrt(2)))


def softmax(x, dim):
    e = np.exp(raw(x) - raw(x).max(axis=dim, keepdims=True))
    return wrap(e / e.sum(axis=dim, keepdims=True))


# ---- transformers ----

class PretrainedConfig:
    attribute_map = {}

    def __init__(self, **rest):
        for name, value in rest.items():
            setattr(self, name, value)

    def __getattr__(self, name):                    # called for names that it does not have
        if name not in self.attribute_map:
            raise AttributeError(name)
        return getattr(self, self.attribute_map[name])


class PreTrainedModel(Module):
    def __init__(self, config):
        self.config = config

    def post_init(self):
        pass


class DynamicCache:
    def __init__(self):
        self.layers = []

    def get_seq_length(self):
        return self.layers[0].keys.shape[2] if self.layers else 0

    def update(self, keys, values, index):
        if index == len(self.layers):
            self.layers.append(types.SimpleNamespace(keys=keys, values=values))
        else:
            layer = self.layers[index]
            layer.keys = wrap(np.concatenate((layer.keys, keys), axis=2))
            layer.values = wrap(np.concatenate((layer.values, values), axis=2))
        return self.layers[index].keys, self.layers[index].values


class ModelOutput(types.SimpleNamespace):
    __dataclass_fields__ = ()

    def get(self, name):
        return vars(self)[name]


class GenerationMixin:
    pass


def install():
    def unchanged(x, *_, **__):
        return x
    numpy_names = ("arange", "where", "maximum", "cos", "exp", "log", "log1p", "tanh", "ones", "zeros_like",
                   "ones_like", "full", "stack")
    zeros = returning_tensor(lambda *shape: np.zeros(shape))
    contents = {
        "torch": {**{name: returning_tensor(getattr(np, name)) for name in numpy_names}, "Tensor": Tensor,
                  "cat": returning_tensor(np.concatenate), "tensor": returning_tensor(np.array),
                  "zeros": zeros, "rand": zeros, "randn": zeros,
                  "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "promote_types": np.promote_types, "finfo": np.finfo,
                  "float64": FLOAT, "float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": None,
                  "int64": INT, "int32": np.dtype(np.int32), "uint8": np.dtype(np.uint8), "bool": np.dtype(np.bool_),
                  "no_grad": no_grad, "is_grad_enabled": lambda: False},
        "torch.nn": {c.__name__: c for c in (Parameter, Module, ModuleDict, ModuleList, Sequential, Linear, Embedding,
                                             LayerNorm, ReLU)},
        "torch.nn.init": {"normal_": unchanged, "zeros_": unchanged, "ones_": unchanged},
        "torch.nn.functional": {"gelu": gelu, "softmax": softmax, "relu": lambda x: np.maximum(x, 0),
                                "softplus": lambda x: np.logaddexp(0, x)},
        "torch.utils": {}, "torch.utils.checkpoint": {"checkpoint": None},
        "transformers": {"__version__": "4.45.0", "PretrainedConfig": PretrainedConfig,
                         "PreTrainedModel": PreTrainedModel},
        "transformers.cache_utils": {"DynamicCache": DynamicCache},
        "transformers.generation": {"GenerationMixin": GenerationMixin},
        "transformers.modeling_outputs": dict.fromkeys(("BaseModelOutput", "BaseModelOutputWithPast", "MaskedLMOutput",
                                                        "CausalLMOutputWithPast"), ModelOutput)}
    for name, content in contents.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(content)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
