"""A forward in another dtype than the parameters': copies that autograd knows, in their places while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.utils import _cast_forward_inputs

from dpfuse.engine.averaging import WIRES
from dpfuse.engine.torch_private import leave_untraced, set_tracer
from dpfuse.model.transforms import may_have_backward

if TYPE_CHECKING:
    from dpfuse.engine.autograd import BackwardListener, Reached

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """torch's `_MixedPrecision`, done by casts in the graph.

    A parameter keeps its dtype, and its gradient arrives in it, since the cast's backward casts back. So hooks,
    `no_sync()` and unused parameters need nothing. Activation checkpoints run parts of the forward again while
    backward runs, and find the copies in their places then too.

    Args:
        config: has `param_dtype`, `reduce_dtype` and `buffer_dtype`, each a dtype or None.
        ignored: names of parameters and buffers to leave alone.

    Raises:
        TypeError: `config` lacks one of the three.
        ValueError: gradients cannot travel in `reduce_dtype`.

    Attributes:
        dtype: of the copies; None where there are none.
        reduce_dtype: in which gradients travel; None is their own.
    """

    def __init__(self, config: Any, ignored: Collection[str]) -> None:
        try:
            self.dtype, reduce_dtype = config.param_dtype, config.reduce_dtype
            self._buffer_dtype = config.buffer_dtype
        except AttributeError:
            raise TypeError(
                "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision, got "
                f"{type(config).__name__}; pass one, or leave it out"
            ) from None
        self.reduce_dtype: torch.dtype | None = reduce_dtype or self.dtype
        if self.reduce_dtype is not None and self.reduce_dtype not in (getattr(torch, name) for name in WIRES):
            raise ValueError(
                f"mixed_precision reduces gradients in {self.reduce_dtype}, expected one of "
                f"{', '.join(f'torch.{name}' for name in WIRES)}; set reduce_dtype"
            )
        self._ignored = ignored
        self._copied: list[_Place] = []  # of the last forward with a graph, until its backward has ended
        self._replaced: list[_Place] = []  # while a backward runs

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copied": [], "_replaced": []}  # a graph is no part of a copy

    def cast_buffers(self, module: nn.Module) -> None:
        """Convert the floating-point buffers permanently, as torch does."""
        if self._buffer_dtype is None:
            return
        for name, buffer in module.named_buffers():
            if name not in self._ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self._buffer_dtype)

    def __call__(self, module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        """`module(*inputs, **kwargs)` in the other dtype."""
        if self.dtype is None:
            return module(*inputs, **kwargs)
        # Dynamo, where it is on, compiles the module, not what happens around it.
        tracer = set_tracer(None)
        replaced: list[_Place] = []
        try:
            inputs, kwargs = _cast_forward_inputs(self.dtype, *inputs, **kwargs)
            if not self._replaced:  # else a backward runs this forward again, and the copies are there
                copied = self._copies(module)
                replaced = _replace(copied)
                if may_have_backward():
                    self._copied = copied
            set_tracer(tracer)
            return module(*inputs, **kwargs)
        finally:
            set_tracer(None)
            _put_back(replaced)
            set_tracer(tracer)

    leave_untraced(__call__)

    def wrap(self, module: nn.Module, listener: BackwardListener) -> BackwardListener:
        """What to call in place of `listener`, so that the copies are there while a backward of `module` runs."""
        return listener if self.dtype is None else _CopiesInBackward(self, module, listener)

    def enter_backward(self, module: nn.Module) -> None:
        """Put the copies of the last forward back into their places; new ones if that had its backward already."""
        with torch.enable_grad():
            self._replaced = _replace(self._copied or self._copies(module))

    def leave_backward(self) -> None:
        """Parameters are in their places again, whatever became of the backward."""
        _put_back(self._replaced)
        self._copied, self._replaced = [], []

    def _copies(self, module: nn.Module) -> list[_Place]:
        copies: dict[int, Tensor] = {}  # by parameter, since it may have several places
        places = []
        for prefix, child in module.named_modules():
            for key, param in child._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if param is None or name in self._ignored or not param.is_floating_point():
                    continue
                if id(param) not in copies:
                    sparse = child.__dict__.get("sparse") is True  # an embedding's switch
                    cast: Callable[..., Tensor] = _SparseCast.apply if sparse else Tensor.to
                    copies[id(param)] = cast(param, self.dtype)
                places.append(_Place(child._parameters, key, param, copies[id(param)]))
        return places


class _SparseCast(torch.autograd.Function):
    """`tensor.to(dtype)` whose backward takes sparse gradients too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class _Place(NamedTuple):
    table: dict[str, Any]
    key: str
    param: Tensor
    copy: Tensor


def _replace(places: list[_Place]) -> list[_Place]:
    """Put copies where their parameters still are, and tell which those are."""
    replaced = [place for place in places if place.table.get(place.key) is place.param]
    for place in replaced:
        place.table[place.key] = place.copy
    return replaced


def _put_back(places: list[_Place]) -> None:
    for place in places:
        place.table[place.key] = place.param


class _CopiesInBackward:
    """Passes on what happens to a backward; the copies are in their places only while gradients are computed."""

    def __init__(self, precision: MixedPrecision, module: nn.Module, listener: BackwardListener) -> None:
        self._precision = precision
        self._module = module
        self._listener = listener

    def open(self, *, announced: bool) -> None:
        self._listener.open(announced=announced)
        self._precision.enter_backward(self._module)

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        self._precision.leave_backward()
        self._listener.close(reached_leaves)

    def abandon(self, *, opened: bool) -> None:
        self._precision.leave_backward()
        self._listener.abandon(opened=opened)

    def raised(self, error: BaseException, *, opened: bool, reached: Reached) -> None:
        self._listener.raised(error, opened=opened, reached=reached)
