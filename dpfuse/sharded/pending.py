"""Parameters that are still on their way. The first use of one waits for its bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Pending"]

# What programs do with a parameter between a step and a forward, without reading its numbers.
_ATTRIBUTES = ("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "is_cuda", "grad_fn")
_HARMLESS = {
    getattr(getattr(Tensor, name), how) for name in _ATTRIBUTES for how in ("__get__", "__set__", "__delete__")
} | {Tensor.numel, Tensor.size, Tensor.dim, Tensor.__hash__}


class Pending:
    """The parameters of a bucket, while they are gathered.

    As long as the gathering runs, each is a `_PendingParameter`, which torch asks before it does anything with it. So
    every operation, in a forward, an evaluation, a copy or a state dict, waits first. What gets a parameter's memory
    without `__torch_function__` is not noticed: an extension in C++, a scripted function or a transform of
    `torch.func` that is called with the parameter itself.

    Args:
        params: all of one bucket, or none, if no program can use them before `finish` is called.
        finish: waits for their gathering; called once.
    """

    def __init__(self, params: Sequence[Tensor], finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._params: list[nn.Parameter] = [param for param in params if type(param) is nn.Parameter]
        if len(self._params) < len(params):
            self._params = []
            self.finish()  # a class of the program's own must not be replaced
        for param in self._params:
            param.__class__ = _PendingParameter
            param.__dict__["_pending"] = self

    def finish(self) -> None:
        """Wait for the parameters; it can be called again."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        finally:
            for param in self._params:
                param.__class__ = nn.Parameter
                param.__dict__.pop("_pending", None)


class _PendingParameter(nn.Parameter):
    """A parameter whose numbers are on their way.

    Source: torch's `__torch_function__` protocol.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for value in _flat((args, kwargs)):
                if type(value) is _PendingParameter:
                    value.__dict__["_pending"].finish()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.__dict__["_pending"].finish()
        return copy.deepcopy(self, memo)  # it is an ordinary parameter now

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.__dict__["_pending"].finish()
        return self.__reduce_ex__(protocol)


def _flat(values: Any) -> Any:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    else:
        yield values
