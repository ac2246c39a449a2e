"""The squares of what one rank sends, measured while buckets are packed. Knows no step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.protocols import PackArguments, PackStep
from dpfuse.engine.report import Report
from dpfuse_kernels import MxTable
from dpfuse_kernels.squared_norm import row_norms

__all__ = ["LocalSquares", "host_knows"]


def host_knows(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor without waiting. Then sums are Python's numbers, in fewer calls."""
    return not tensor.is_cuda


class Taker(Protocol):
    """Takes what is measured."""

    @property
    def measures(self) -> bool:
        """Whether the backward that is running is measured."""

    def add(self, squares: Tensor | float, nonfinite: Tensor | float) -> None:
        """Take what some gradients of this rank come to: tensors on a GPU, numbers on a CPU."""

    def tell(self, report: Report, packed: Tensor) -> None:
        """Write the sums of this rank into the report, as it is packed."""


class LocalSquares(PackStep):
    """Measures what one bucket sends.

    Args:
        metrics: take it.
        buffer: of the bucket.
        report: if it travels with this bucket, which is packed last.
        sparse: whether the bucket holds rows of a sparse gradient, which are scaled when they are measured.
    """

    def __init__(self, metrics: Taker, buffer: CommBuffer, report: Report | None, *, sparse: bool) -> None:
        self._metrics = metrics
        self._buffer = buffer
        self._report = report
        self._sparse = sparse
        self._outside: list[Tensor] = []

    def before(self, arguments: PackArguments) -> None:
        self._outside = []

    def outside(self, names: Sequence[str], tensors: list[Tensor]) -> None:
        for values in tensors if self._metrics.measures else ():
            self._outside.append(torch.view_as_real(values) if values.is_complex() else values)

    def after(self, arguments: PackArguments) -> None:
        buffer, metrics = self._buffer, self._metrics
        if not metrics.measures:
            return
        table = buffer.gradients
        if not buffer.params:
            flat = buffer.flat
            zero = 0.0 if host_knows(flat) else torch.zeros((), dtype=torch.float64, device=flat.device)
            metrics.add(zero, zero)
        elif isinstance(table, MxTable):  # blocks are no numbers: the gradients are read, and not what is sent
            grads = [
                param.grad
                for param, index in zip(buffer.params, buffer.indices, strict=True)
                if param.grad is not None and index not in arguments.missing
            ]
            factor = 1.0 if arguments.factor is None else arguments.factor.double()
            self._add(grads, 1.0, factor)
        else:
            self._add([table.flat], arguments.scale, 1.0)
        # Large gradients that are reduced in their own memory are measured before they are scaled.
        self._add(self._outside, arguments.scale if self._sparse else 1.0, 1.0)
        self._outside = []
        if self._report is not None:
            metrics.tell(self._report, buffer.report)

    def _add(self, tensors: list[Tensor], scale: float, factor: Tensor | float) -> None:
        if not tensors:
            return
        rows = row_norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
        if host_knows(tensors[0]):
            number = rows.dot(rows).item() * (float(factor) / scale) ** 2
            wrong = (
                0 if math.isfinite(number) else sum(int(values.isfinite().logical_not().sum()) for values in tensors)
            )
            self._metrics.add(number, wrong)  # nothing is read again where all is well
            return
        squares = rows.square().sum().to(tensors[0].device) * (factor / scale) ** 2
        count = torch.zeros((), dtype=torch.float64, device=squares.device)
        for values in tensors:
            count = count + values.isfinite().logical_not().sum()
        self._metrics.add(squares, count)
