"""Classes of tensors as libraries for quantised weights have them; each knows few operations."""

from __future__ import annotations

import torch
from torch import nn

aten = torch.ops.aten
COPIES = aten.detach.default, aten.alias.default, aten.clone.default


class Codes(torch.Tensor):
    """A weight as int8 codes with a scale for each row. It shows both by torch's protocol, and refuses to be read."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    fails_in = ""  # the name of what fails on this rank

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def plain(self):
        return self.codes.float() * self.scale

    def __repr__(self):
        return type(self).__name__

    def __tensor_flatten__(self):
        if self.fails_in == "flatten":
            raise ValueError("the codes are lost")
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = args[0]
        if func in COPIES:
            change = torch.clone if func is aten.clone.default else lambda tensor: tensor
            return cls(change(first.codes), change(first.scale))
        return cls.other(func, args)

    @classmethod
    def other(cls, func, args):
        raise NotImplementedError(f"{cls.__name__} does not know {func}")


class Closed(Codes):
    """Does not show them, and knows the operations that torch's class needs."""

    __tensor_flatten__ = None

    @classmethod
    def other(cls, func, args):
        first = args[0]
        if func is aten.view.default:
            return first.plain().view(args[1])
        if func is aten.cat.default:
            return torch.cat([each.plain() if isinstance(each, cls) else each for each in first], *args[1:])
        if func is aten.copy_.default and cls.fails_in != "copy_":
            source = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            first.codes.copy_(source.codes)
            first.scale.copy_(source.scale)
            return first
        return super().other(func, args)


class Mute(Codes):
    """Does not show them, and knows no operation."""

    __tensor_flatten__ = None


class Shifted(torch.Tensor):
    """Has a tensor of another wrapper class inside."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, shift):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)

    def __init__(self, inner, shift):
        self.inner, self.shift = inner, shift

    def plain(self):
        return self.inner.plain() + self.shift

    def __repr__(self):
        return "Shifted"

    def __tensor_flatten__(self):
        return ["inner", "shift"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in COPIES:
            return cls(args[0].inner, args[0].shift)
        raise NotImplementedError(f"Shifted does not know {func}")


class Bytes(nn.Parameter):
    """A byte parameter whose scales are an attribute, as in libraries for 4 bits."""

    def __new__(cls, data, state):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    def plain(self):
        state = self.state
        return (self.data.float() - 128) * (state.scale if isinstance(state, State) else state)


class State:
    """What a library keeps of a quantisation."""

    def __init__(self, scale):
        self.scale, self.blocks = scale, 1


class Strict(torch.Tensor):
    """Has memory, and its `__torch_function__` refuses almost all."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("__get__", "__set__", "detach", "requires_grad_"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise NotImplementedError(f"Strict does not know {func}")

    def plain(self):
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class Dispatched(torch.Tensor):
    """Has memory, and its `__torch_dispatch__` refuses almost all."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    def plain(self):
        with torch._C._DisableTorchDispatch():
            return self.detach().as_subclass(torch.Tensor)

    def __repr__(self):
        return "Dispatched"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in COPIES:
            raise NotImplementedError(f"Dispatched does not know {func}")
        return cls(func(args[0].plain()))


class Wrapped(torch.Tensor):
    """Knows all operations; the gradients of a parameter are of this class, too."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, strides=inside.stride())

    def __init__(self, inside):
        self.inside = inside

    def plain(self):
        return Unwrapped.apply(self)

    def __repr__(self):
        return "Wrapped"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inside(value):
            return value.inside if isinstance(value, Wrapped) else value

        tree_map = torch.utils._pytree.tree_map
        out = func(*tree_map(inside, args), **tree_map(inside, kwargs or {}))
        if func is aten.copy_.default:
            return args[0]
        return tree_map(lambda value: Wrapped(value) if isinstance(value, torch.Tensor) else value, out)


class Unwrapped(torch.autograd.Function):
    """The tensor inside; its gradient is wrapped."""

    @staticmethod
    def forward(ctx, wrapped):
        return wrapped.inside.clone()

    @staticmethod
    def backward(ctx, grad):
        return Wrapped(grad)


def byte_codes(weight):
    found = Codes.of(weight)
    return (found.codes.int() + 128).to(torch.uint8), found.scale


KINDS = {
    "shown": Codes.of,
    "nested": lambda weight: Shifted(Codes.of(weight), weight.sum(1, keepdim=True)),
    "operations": Closed.of,
    "attributes": Mute.of,
    "strict": lambda weight: weight.as_subclass(Strict),
    "dispatched": Dispatched,
    "bytes": lambda weight: Bytes(*byte_codes(weight)),
    "state": lambda weight: Bytes(byte_codes(weight)[0], State(byte_codes(weight)[1])),
    "sparse": torch.Tensor.to_sparse,
    "quantised": lambda weight: torch.quantize_per_tensor(weight, 0.05, 10, torch.qint8),
    "jagged": lambda weight: torch.nested.nested_tensor([weight[:3], weight[3:]], layout=torch.jagged),
    "trained": lambda weight: nn.Parameter(Wrapped(weight)),
    "trained, strict": lambda weight: nn.Parameter(weight.as_subclass(Strict)),
}


class Adapted(nn.Module):
    """Trainable adapters on a weight of one of these kinds."""

    def __init__(self, kind, seed, *, as_buffer=False):
        super().__init__()
        torch.manual_seed(seed)
        base = KINDS[kind](torch.randn(8, 6))
        if as_buffer:
            self.register_buffer("base", base)
        else:
            self.base = base if isinstance(base, nn.Parameter) else nn.Parameter(base, requires_grad=False)
        torch.manual_seed(100)
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 8, bias=False)

    def weight(self):
        base = self.base
        if isinstance(base, Strict):
            return _Read.apply(base) if base.requires_grad else base.plain()
        if hasattr(base, "plain"):
            return base.plain()
        if base.is_nested:
            return base.values()
        return base.dequantize() if base.is_quantized else base.to_dense()

    def forward(self, x):
        return nn.functional.linear(x, self.weight()) + self.up(self.down(x))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.plain().clone()

    @staticmethod
    def backward(ctx, grad):
        return grad
