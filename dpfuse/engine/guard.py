"""Makes gradients NaN on the device while the host cannot know what the peers report. Knows no report, no bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfuse_kernels import SpoilTable, spoil
from dpfuse_kernels.spoil import any_pair

__all__ = ["DeviceGuard", "guard_of"]


class DeviceGuard:
    """Fills the gradients of some parameters with NaN where numbers on the device say that they are wrong.

    On CUDA the host reads the report of the peers one step later. Until then, NaN keeps such gradients from being used.

    Args:
        params: whose gradients are averaged.
        squares: sums of squares of them, each [] float64 on their device; they become NaN, too.
    """

    def __init__(self, params: Sequence[Tensor], squares: Sequence[Tensor] = ()) -> None:
        self._squares = list(squares)
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for param in params:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        self._kinds = [
            (SpoilTable([_width(param) * param.numel() for param in alike], dtype.to_real(), device), alike)
            for (dtype, device), alike in kinds.items()
        ]

    def __call__(self, pairs: Tensor) -> None:
        """Make their gradients NaN if both numbers of a pair differ from zero. The host does not wait.

        Args:
            pairs: [2 * pairs], on the device of the report.
        """
        for table, params in self._kinds:
            grads = [param.grad for param in params]
            if params[0].is_complex():
                grads = [*map(_real, grads)]
            spoil(table, grads, pairs.to(table.device))
        if self._squares:
            poison = torch.where(any_pair(pairs), math.nan, 0.0).double()
            torch._foreach_add_(self._squares, [poison] * len(self._squares))  # else the host would read the value


def guard_of(params: Sequence[Tensor], world_size: int, squares: Sequence[Tensor] = ()) -> DeviceGuard | None:
    """Return a guard if one is needed: on a CPU errors are raised in the same backward; one rank has no peers."""
    return DeviceGuard(params, squares) if params[0].device.type == "cuda" and world_size > 1 else None


def _width(param: Tensor) -> int:
    return 2 if param.is_complex() else 1


def _real(grad: Tensor | None) -> Tensor | None:
    """Return a complex gradient as pairs of real numbers, without resolving a lazy conjugate."""
    if grad is None or not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
