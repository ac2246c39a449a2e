"""The norm of gradients that lie in the parts of all ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.waiting import board_of, finish
from dpfuse.errors import DPFuseError
from dpfuse.sharded.gradient import ShardedGradient, used_up
from dpfuse_kernels.multiply import multiply_each
from dpfuse_kernels.squared_norm import ROW, row_norms

__all__ = ["ShardedGradients"]


PIECE = 256 * ROW  # elements of which squares are in memory at a time


class ShardedGradients:
    """This rank's parts of the gradients that some parameters have now.

    Args:
        reading: told while ranks wait for each other.
        by_rows: whether the sum of squares has the same bits on any number of ranks: each rank sends those of the rows
            that it has, and all add up all rows.

    Raises:
        DPFuseError: a parameter has a gradient that was not averaged.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        reading: AbstractContextManager[None],
        *,
        by_rows: bool = False,
    ) -> None:
        self._by_rows = by_rows
        self._group = group
        self._reading = reading
        self._grads = [grad for name, param in named if (grad := sharded_gradient(name, param, group)) is not None]

    @torch.no_grad()
    def norm(self, order: float) -> Tensor:
        """As `Measurable.norm`. To be called on all ranks: each sends one number.

        Raises:
            ValueError: the order is not above 0.
        """
        if not order > 0:
            raise ValueError(
                f"norm_type must be above 0 with a ShardedOptimizer, got {order}: other norms of a parameter are not "
                "the sum of those of its parts. Pass 2.0 or math.inf."
            )
        if self._by_rows and order not in (2, math.inf):
            raise ValueError(
                f"norm_type must be 2.0 or math.inf with a ShardedOptimizer and fixed_micro_batches, got {order}: only "
                "these have the same bits on any number of ranks."
            )
        kind = torch.float64 if any(grad.dtype == torch.float64 for grad in self._grads) else torch.float32
        device = self._grads[0].device if self._grads else collective.group_device(self._group)
        if self._by_rows and order == 2:
            with self._reading:
                return self._squares_by_row(device).sum().sqrt().to(kind)
        norms = [torch.zeros(1, dtype=torch.float64, device=device)]
        for part in self._parts():
            norms.append(row_norms([part]) if order == 2 else _norm_of(part, order))
        rows = torch.cat(norms)
        with self._reading:
            if order == math.inf:
                collective.all_reduce_max(total := rows.max(), self._group)
            else:
                total = rows.pow(order).sum()
                finish(collective.all_reduce(total, self._group), board_of(self._group), device.type)
                total = total.pow(1 / order)
        return total.to(kind)

    def _squares_by_row(self, device: torch.device) -> Tensor:
        """Return the sum of squares of each row of each gradient, on all ranks. A row begins where a part may."""
        counts = [-(-grad.numel() // ROW) for grad in self._grads]
        rows = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        for grad, own_rows in zip(self._grads, rows.split(counts), strict=True):
            first = grad.start // ROW
            for piece, squares in zip(grad.own.split(PIECE), own_rows[first:].split(PIECE // ROW), strict=False):
                squares[: -(-piece.numel() // ROW)] = _squares(piece)
        # Each row is on one rank, and 0 on the others: this sum rounds nothing.
        finish(collective.all_reduce(rows, self._group), board_of(self._group), device.type)
        return rows

    def _parts(self) -> Iterator[Tensor]:
        """Yield all that this rank has: a region in one piece where all of its gradients are there."""
        regions: dict[int, list[ShardedGradient]] = {}
        for grad in self._grads:
            regions.setdefault(id(grad.region), []).append(grad)
        for grads in regions.values():
            region = grads[0].region
            parts = [region.part] if len(grads) == region.count else [grad.own for grad in grads]
            yield from (part for part in parts if part.numel())

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """As `Measurable.multiply`."""
        for part in self._parts():
            multiply_each([part], factor)


def _norm_of(part: Tensor, order: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(part, order, dtype=torch.promote_types(part.dtype, torch.float32))
    return norm.double().view(1)


def _squares(flat: Tensor) -> Tensor:
    """Return the sums of squares of the rows, [rows] float64, in an order that the shape does not change."""
    rows = -(-flat.numel() // ROW)
    values = torch.zeros(rows, ROW, dtype=torch.float64, device=flat.device)
    values.view(-1)[: flat.numel()] = flat
    values.square_()
    width = ROW
    while width > 1:
        width //= 2
        values = values[:, :width] + values[:, width:]
    return values.view(-1)


def sharded_gradient(name: str, param: Tensor, group: dist.ProcessGroup) -> ShardedGradient | None:
    """Return the gradient of a parameter, if it has one.

    Raises:
        DPFuseError: it was not averaged by a backward of the wrapped model.
    """
    grad = param.grad
    if isinstance(grad, ShardedGradient) and grad.region.in_backward:
        raise used_up(f"rank {group.rank()}: the gradient of parameter {name!r} was asked for")
    if grad is None or isinstance(grad, ShardedGradient):
        return grad
    raise DPFuseError(
        f"rank {group.rank()}: parameter {name!r} has a gradient that no synchronised backward of the wrapped model "
        "has averaged, expected one that was averaged, or None. Run the last backward of a step outside no_sync(), and "
        "assign nothing to .grad."
    )
