"""A collective inside the autograd graph. The only file of fleet that calls a collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["sum_over_ranks"]


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' tensors, as part of the autograd graph of every rank."""
    result: Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss depends on every rank's summand.
        return sum_over_ranks(grads[0], ctx.group), None
