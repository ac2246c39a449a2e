"""Optimizers that step when a backward has averaged its gradients. Knows no bucket and no process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["BackwardOptimizers"]


class BackwardOptimizers:
    """What updates parameters at the end of a synchronised backward, once all ranks are known to be well.

    Not bucket by bucket while backward runs: a rank that fails late would leave the others with half of a step.
    """

    def __init__(self) -> None:
        self._own: list[Tensor] = []  # parameters with optimizers of their own
        self._fused: Any = None
        self._fused_params: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._own or self._fused_params)

    def take_over(self, params: Iterable[Tensor]) -> None:
        """Step the optimizers that `_apply_optimizer_in_backward` gave to `params`, in place of its hooks."""
        found = [param for param in params if hasattr(param, "_in_backward_optimizers")]
        if not found:
            return
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in found:
            for handle in param_to_optim_hook_handle_map.get(param, ()):
                handle.remove()
        self._own = found

    def fuse(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """Step a functional optimizer, which has a method `step_param(param, grad)`, on `params`."""
        self._fused = optimizer
        self._fused_params = list(params)

    def step(self) -> None:
        """Update all parameters that have a gradient; those with optimizers of their own have none afterwards."""
        for param in self._fused_params:
            if param.grad is not None:
                self._fused.step_param(param, param.grad)
        for param in self._own:
            for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            param.grad = None
