"""Optimizers that step when a backward has averaged its gradients. Knows no bucket and no process group."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["APPLY", "BackwardOptimizers"]

APPLY = "torch.distributed.optim.apply_optimizer_in_backward"  # slow to import; unused where not imported


class BackwardOptimizers:
    """What updates parameters at the end of a synchronised backward, once all ranks are known to be well.

    Not bucket by bucket while backward runs: a rank that fails late would leave the others with half of a step.
    """

    def __init__(self) -> None:
        self._own: list[Tensor] = []  # parameters with optimizers of their own
        self._fused: Any = None
        self._fused_params: list[Tensor] | None = None  # None is all of the model

    def __bool__(self) -> bool:
        return bool(self._own) or self._fused is not None

    @staticmethod
    def waiting() -> bool:
        """Whether `_apply_optimizer_in_backward` was called for parameters that were not taken over yet."""
        applied = sys.modules.get(APPLY)
        return applied is not None and len(applied.param_to_optim_hook_handle_map) > 0

    def take_over(self, params: Iterable[Tensor]) -> None:
        """Step the optimizers that `_apply_optimizer_in_backward` gave to `params`, in place of its hooks."""
        self._own = [param for param in params if hasattr(param, "_in_backward_optimizers")]
        if applied := sys.modules.get(APPLY):
            for param in self._own:
                for handle in applied.param_to_optim_hook_handle_map.pop(param, ()):
                    handle.remove()

    def fuse(self, optimizer: Any, params: Iterable[Tensor] | None) -> None:
        """Step a functional optimizer, which has a method `step_param(param, grad)`, on `params`, or on all."""
        self._fused = optimizer
        self._fused_params = None if params is None else list(params)

    def step(self, params: Iterable[Tensor]) -> None:
        """Update those of the model's parameters that have a gradient; those with optimizers of their own lose it."""
        if self._fused is not None:
            for param in params if self._fused_params is None else self._fused_params:
                if param.grad is not None:
                    self._fused.step_param(param, param.grad)
        for param in self._own:
            for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            param.grad = None
