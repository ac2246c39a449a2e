"""One sparse gradient on its way: how many rows each rank has, then the rows themselves. Knows no hook, no order."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from dpfuse.engine import collective
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.buckets.bucket import BucketState, GradBucket
from dpfuse.engine.waiting import finish

__all__ = ["SparseBucket"]

INDEX = torch.int64


class SparseBucket(GradBucket):
    """The gradient of one parameter with sparse rows, such as an embedding with `sparse=True`.

    Rows cannot be summed in place, since each rank has others: all ranks gather the rows of all, and add up
    equal ones. How many rows there are must be known first, so a small collective goes ahead during backward,
    with the tail where this bucket has it, and the rows follow when backward has ended.

    `.grad` is a coalesced COO tensor afterwards, or dense on every rank where it was dense on one (an embedding
    whose weight is used elsewhere too). Arguments are those of `GradBucket`; `views` means nothing here.
    """

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Start to exchange the number of rows; arguments as for `GradBucket.launch`."""
        self._precede()
        self._move(BucketState.FREE, BucketState.FLIGHT)
        (param,) = self.params
        grad = None if empty else param.grad
        self.missing = list(self.plan.params) if grad is None else []
        is_dense = grad is not None and grad.layout is torch.strided
        self.error = None
        self._rows = torch.empty(0, self._row_bytes, dtype=torch.uint8, device=self.plan.device)
        if self.finite is not None and not empty:
            self.finite.begin()
        with torch.no_grad():
            try:
                if grad is not None:
                    self._rows = self._rows_of(grad)
                if self.finite is not None and not empty:
                    self._settle_counts(self.finite)
            except (ValueError, TypeError, RuntimeError) as error:
                self.error = error  # the peers wait for this bucket whatever happened here
            header = [torch.tensor([len(self._rows), is_dense], dtype=torch.float64, device=self.plan.device)]
            if self.tail is not None:
                failed = failed or self.error is not None
                unused = [*unused, *self.missing]
                device = torch.device(self.plan.device)
                header.append(self.tail.source(torch.float64, device, unused, failed, changed=empty))
            # Held until it was sent: whoever measures waits for the work elsewhere, and the work then lets go of it.
            self._header = torch.cat(header)
            if self.factors is not None and self.tail is not None and not empty:
                self.factors.tell(self.tail, self._header[2:])
        self._headers, self._work = collective.start_all_gather(self._header, self._group)
        if self.times is not None:
            self.times.sent([self._header], self._work, is_last=self.tail is not None)

    def wait(self) -> None:
        """Wait until every rank's rows are here."""
        self._move(BucketState.FLIGHT, BucketState.LANDED)
        assert self._work is not None
        if self.times is not None:
            self.times.wait_begins(self._rows)
        finish(self._work, self._board, self._device_type)
        headers = torch.stack(self._headers)
        counts = [int(count) for count in headers[:, 0].tolist()]
        self._is_dense = bool(headers[:, 1].any())
        if self.tail is not None:
            self.tail.landed(headers[:, 2:].sum(0))
        padded = torch.zeros(max(counts), self._row_bytes, dtype=torch.uint8, device=self._rows.device)
        padded[: len(self._rows)] = self._rows
        gathered, work = collective.start_all_gather(padded, self._group)
        if self.times is not None:
            self.times.sent([padded], work, is_last=False)
        finish(work, self._board, self._device_type, last=self.tail is not None)
        if self.times is not None:
            self.times.wait_ends()
        self._work = None
        self._rows = torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """Make the sum of all ranks' rows the parameter's gradient, unless it is to be left alone."""
        self._move(BucketState.LANDED, BucketState.FREE)
        (param,), (index,) = self.params, self.plan.params
        if index in untouched:
            return
        with torch.no_grad():
            count = len(self._rows)
            # reshape, not contiguous: that of a single row is contiguous where it lies, at an odd place.
            indices = self._rows[:, : INDEX.itemsize].reshape(-1).view(INDEX).view(1, count)
            values = self._rows[:, INDEX.itemsize :].reshape(-1).view(self._wire).view(count, *param.shape[1:])
            total = torch.sparse_coo_tensor(indices, values.to(self._compute), param.shape, check_invariants=False)
            grad = (total.coalesce() * self._averaging.post_scale).to(self._dtype)
            param.grad = grad.to_dense() if self._is_dense else grad.coalesce()

    def average_by(self, averaging: Averaging) -> None:
        """Use other factors from the next launch on, for the gradient; a tail is never scaled here."""
        self._averaging = replace(averaging, dtype=self._averaging.dtype)

    @property
    def _row_bytes(self) -> int:
        return INDEX.itemsize + math.prod(self._shapes[0][0][1:]) * self._wire.itemsize

    @property
    def _compute(self) -> torch.dtype:
        """What rows are scaled and added up in."""
        return torch.float64 if self._dtype == torch.float64 else torch.float32

    @property
    def _wire(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._averaging.dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.plan.dtype))

    def _rows_of(self, grad: Tensor) -> Tensor:
        """The scaled rows of a gradient as bytes, [rows, bytes]: the row's number, then its values."""
        if grad.dtype != self._dtype:
            raise ValueError(
                f"parameter {self._names[0]!r} has a gradient of dtype {grad.dtype}, expected {self._dtype} as the "
                "parameter had in forward. Convert a module between steps, not between forward and backward."
            )
        if grad.layout is torch.strided:
            indices, values = torch.arange(len(grad), device=grad.device), grad
        elif grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
            grad = grad.coalesce()
            indices, values = grad.indices()[0], grad.values()
        else:
            raise ValueError(
                f"parameter {self._names[0]!r} has a gradient of layout {grad.layout}, expected rows in a "
                "torch.sparse_coo tensor of one sparse dimension, as an embedding gives. Convert it with .to_dense()."
            )
        count = len(indices)
        values = values.to(self._compute) * self._averaging.pre_scale
        if self.factors is not None:
            self.factors.apply([values])
        values = values.to(self._wire)
        if self.finite is not None:
            self.finite.count(self._names[0], values)
        parts = [part.reshape(-1).view(torch.uint8) for part in (indices, values)]
        widths = (INDEX.itemsize, self._row_bytes - INDEX.itemsize)
        return torch.cat([part.view(count, width) for part, width in zip(parts, widths, strict=True)], dim=1)
