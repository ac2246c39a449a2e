"""A forward in another dtype than the parameters': copies that autograd knows, in their places while it runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _cast_forward_inputs

from dpfuse.averaging import WIRES
from dpfuse.tracing import leave_untraced, set_tracer

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """torch's `_MixedPrecision`, done by casts in the graph.

    A parameter keeps its dtype, and its gradient arrives in it, since the cast's backward casts back. So hooks,
    `no_sync()` and unused parameters need nothing.

    Args:
        config: has `param_dtype`, `reduce_dtype` and `buffer_dtype`, each a dtype or None.
        ignored: names of parameters and buffers to leave alone.

    Raises:
        TypeError: `config` lacks one of the three.
        ValueError: gradients cannot travel in `reduce_dtype`.
    """

    def __init__(self, config: Any, ignored: Collection[str]) -> None:
        try:
            self._dtype, reduce_dtype = config.param_dtype, config.reduce_dtype
            self._buffer_dtype = config.buffer_dtype
        except AttributeError:
            raise TypeError(
                "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision, got "
                f"{type(config).__name__}; pass one, or leave it out"
            ) from None
        self.wire_dtype: torch.dtype | None = reduce_dtype or self._dtype
        if self.wire_dtype is not None and self.wire_dtype not in (getattr(torch, name) for name in WIRES):
            raise ValueError(
                f"mixed_precision reduces gradients in {self.wire_dtype}, expected one of "
                f"{', '.join(f'torch.{name}' for name in WIRES)}; set reduce_dtype"
            )
        self._ignored = ignored

    def cast_buffers(self, module: nn.Module) -> None:
        """Convert the floating-point buffers for good, as torch does."""
        if self._buffer_dtype is None:
            return
        for name, buffer in module.named_buffers():
            if name not in self._ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self._buffer_dtype)

    def __call__(self, module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        """`module(*inputs, **kwargs)` in the other dtype."""
        if self._dtype is None:
            return module(*inputs, **kwargs)
        # Dynamo, where it is on, compiles the module, not what happens around it.
        tracer = set_tracer(None)
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            inputs, kwargs = _cast_forward_inputs(self._dtype, *inputs, **kwargs)
            self._cast_parameters(module, places)
            set_tracer(tracer)
            return module(*inputs, **kwargs)
        finally:
            set_tracer(None)
            for parameters, key, param in places:
                parameters[key] = param
            set_tracer(tracer)

    leave_untraced(__call__)

    def _cast_parameters(self, module: nn.Module, places: list[tuple[dict[str, Any], str, Tensor]]) -> None:
        """Put copies in the places of the parameters, and note the places."""
        copies: dict[int, Tensor] = {}  # by parameter, since it may have several places
        for prefix, child in module.named_modules():
            for key, param in child._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if param is None or name in self._ignored or not param.is_floating_point():
                    continue
                if id(param) not in copies:
                    copies[id(param)] = param.to(self._dtype)
                places.append((child._parameters, key, param))
                child._parameters[key] = copies[id(param)]
