"""How a gradient lies in memory. Knows no bucket."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense_stride", "real_layout", "real_pairs"]


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """The strides of a gradient: the parameter's where it is dense, else C-contiguous."""
    return torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()


def real_pairs(grad: Tensor | None) -> Tensor | None:
    """A complex gradient as pairs of real numbers, [..., 2]."""
    return None if grad is None else torch.view_as_real(grad.resolve_conj())


def real_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of those pairs."""
    return (*shape, 2), (*(2 * step for step in stride), 1)
