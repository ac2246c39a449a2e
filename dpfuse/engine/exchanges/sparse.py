"""The gradient of one parameter with sparse rows: ranks exchange how many rows each has, then the rows themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.work import StagedWork
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Exchange, PackStep

__all__ = ["SparseRows"]

INDEX = torch.int64


class SparseRows(Exchange):
    """All ranks gather the rows of all ranks, and add up those with the same index.

    The ranks must first know how many rows each has, so a small collective starts during backward. The rows follow when
    backward has ended. `.grad` is a coalesced COO tensor afterwards, or dense on every rank where it was dense on one
    (an embedding whose weight is used elsewhere too).

    Args:
        group: the ranks.
        bucket: the plan of the one parameter.
        param: that parameter.
        name: its name, for errors.
        averaging: the dtype that travels, and the factor after the sum.
    """

    def __init__(
        self, group: dist.ProcessGroup, bucket: Bucket, param: Tensor, name: str, averaging: Averaging
    ) -> None:
        super().__init__(group)
        self._index = bucket.params[0]
        self._param = param
        self._name = name
        self._dtype = cast(torch.dtype, getattr(torch, bucket.dtype))
        self._wire = cast(torch.dtype, getattr(torch, averaging.dtype))
        self._post_scale = averaging.post_scale
        self._device = torch.device(bucket.device)
        self._width = INDEX.itemsize + math.prod(param.shape[1:]) * self._wire.itemsize  # bytes of a row
        self._rows: Tensor | None = None  # until they are delivered: those of all ranks may be much memory
        self._is_dense = False

    def take(self, scale: float, steps: Sequence[PackStep], frozen: Set[int]) -> list[int]:
        self.empty(scale)
        grad = None if self._index in frozen else self._param.grad
        if grad is None:
            return [self._index]
        with torch.no_grad():
            self._rows = self._rows_of(grad, scale, steps)
        self._is_dense = grad.layout is torch.strided
        return []

    def empty(self, scale: float) -> None:
        self._rows, self._is_dense = self._no_rows(), False

    def start(self, flat: Tensor) -> dist.Work:
        assert self._rows is not None
        return StagedWork(self._stages(self._rows, self._is_dense), 2, device=flat.device)

    def tensors(self, flat: Tensor) -> list[Tensor]:
        """As `Exchange.tensors`: the numbers of rows, and the rows."""
        assert self._rows is not None
        return [torch.empty(2, dtype=torch.float64, device=self._device), self._rows]

    def deliver(self, untouched: Set[int]) -> None:
        """As `Exchange.deliver`: the sum of all ranks' rows becomes the parameter's gradient."""
        if self._rows is not None and self._index not in untouched:
            with torch.no_grad():
                self._param.grad = self._sum_of(self._rows)
        self._rows = None

    def _sum_of(self, rows: Tensor) -> Tensor:
        shape, count = self._param.shape, len(rows)
        # reshape, since the slice of a single row counts as contiguous although its address is not aligned.
        indices = rows[:, : INDEX.itemsize].reshape(-1).view(INDEX).view(1, count)
        values = rows[:, INDEX.itemsize :].reshape(-1).view(self._wire).view(count, *shape[1:])
        total = torch.sparse_coo_tensor(
            indices, values.to(self._compute), shape, device=rows.device, check_invariants=False
        )
        grad = (total.coalesce() * self._post_scale).to(self._dtype)
        return grad.to_dense() if self._is_dense else grad.coalesce()

    def discard(self) -> None:
        self._rows = None

    def _stages(self, rows: Tensor, is_dense: bool) -> Iterator[dist.Work]:
        """Exchange the numbers of rows, then the rows, [rows, bytes]; keep those of all ranks, in their order."""
        header = torch.tensor([len(rows), is_dense], dtype=torch.float64, device="cpu").to(rows.device)
        gathered_headers, work = collective.start_all_gather(header, self.group)
        yield work
        headers = torch.stack(gathered_headers)
        counts = [int(count) for count in headers[:, 0].tolist()]
        padded = torch.zeros(max(counts), rows.shape[1], dtype=torch.uint8, device=rows.device)
        padded[: len(rows)] = rows
        gathered, work = collective.start_all_gather(padded, self.group)
        yield work
        self._rows = torch.cat([every[:count] for every, count in zip(gathered, counts, strict=True)])
        self._is_dense = bool(headers[:, 1].any())

    @property
    def _compute(self) -> torch.dtype:
        """The dtype in which rows are scaled and added up."""
        return torch.float64 if self._dtype == torch.float64 else torch.float32

    def _no_rows(self) -> Tensor:
        return torch.empty(0, self._width, dtype=torch.uint8, device=self._device)

    def _rows_of(self, grad: Tensor, scale: float, steps: Sequence[PackStep]) -> Tensor:
        """Return the scaled rows of a gradient as bytes, [rows, bytes]: the row's number, then its values."""
        if grad.dtype != self._dtype:
            raise ValueError(
                f"parameter {self._name!r} has a gradient of dtype {grad.dtype}, expected {self._dtype} as the "
                "parameter had in forward. Convert a module between steps, not between forward and backward."
            )
        if grad.layout is torch.strided:
            indices, values = torch.arange(len(grad), device=grad.device), grad
        elif grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
            grad = grad.coalesce()
            indices, values = grad.indices()[0], grad.values()
        else:
            raise ValueError(
                f"parameter {self._name!r} has a gradient of layout {grad.layout}, expected rows in a "
                "torch.sparse_coo tensor of one sparse dimension, as an embedding gives. Convert it with .to_dense()."
            )
        count = len(indices)
        values = values.to(self._compute) * scale
        for step in steps:
            step.outside([self._name], [values])
        values = values.to(self._wire)
        parts = [part.reshape(-1).view(torch.uint8) for part in (indices, values)]
        widths = (INDEX.itemsize, self._width - INDEX.itemsize)
        return torch.cat([part.view(count, width) for part, width in zip(parts, widths, strict=True)], dim=1)
