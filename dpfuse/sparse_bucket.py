"""One sparse gradient on its way: how many rows each rank has, then the rows themselves. Knows no hook, no order."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor

from dpfuse import collective
from dpfuse.bucket import BucketState, GradBucket

__all__ = ["SparseBucket"]

INDEX = torch.int64


class SparseBucket(GradBucket):
    """The gradient of one parameter with sparse rows, such as an embedding with `sparse=True`.

    Rows cannot be summed in place, since each rank has others: all ranks gather the rows of all, and add up
    equal ones. How many rows there are must be known first, so a small collective goes ahead during backward,
    with the tail where this bucket has it, and the rows follow when backward has ended.

    `.grad` is a coalesced COO tensor afterwards, or dense where it was dense before (an embedding whose weight
    is used elsewhere too). Arguments are those of `GradBucket`; `views` means nothing here.
    """

    def launch(self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False) -> None:
        """Start to exchange the number of rows; arguments as for `GradBucket.launch`."""
        self._move(BucketState.FREE, BucketState.FLIGHT)
        (param,) = self.params
        grad = param.grad
        self.missing = list(self.plan.params) if grad is None else []
        self._is_dense = grad is not None and grad.layout is torch.strided
        self.error = None
        with torch.no_grad():
            try:
                self._rows = self._pack(param, grad)
            except (ValueError, TypeError, RuntimeError) as error:
                self.error = error  # the peers wait for this bucket whatever happened here
                self._rows = self._pack(param, None)
            header = [torch.tensor([self._rows.shape[0]], dtype=torch.float64, device=param.device)]
            if self.tail is not None:
                failed = failed or self.error is not None
                header.append(self.tail.source(torch.float64, param.device, [*unused, *self.missing], failed))
            row = torch.cat(header)
        self._headers, self._work = collective.start_all_gather(row, self._group)
        if self.times is not None:
            self.times.sent(row, self._work, is_last=self.tail is not None)

    def wait(self) -> None:
        """Wait until every rank's rows are here."""
        self._move(BucketState.FLIGHT, BucketState.LANDED)
        assert self._work is not None
        if self.times is not None:
            self.times.wait_begins(self._rows)
        self._work.wait()
        headers = torch.stack(self._headers)
        counts = [int(count) for count in headers[:, 0].tolist()]
        if self.tail is not None:
            self.tail.landed(headers[:, 1:].sum(0))
        longest = max(counts)
        padded = torch.zeros(longest, self._rows.shape[1], dtype=torch.uint8, device=self._rows.device)
        padded[: len(self._rows)] = self._rows
        gathered, work = collective.start_all_gather(padded, self._group)
        if self.times is not None:
            self.times.sent(padded, work, is_last=False)
        work.wait()
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
            indices = self._rows[:, : INDEX.itemsize].contiguous().view(INDEX).view(1, count)
            values = self._rows[:, INDEX.itemsize :].contiguous().view(self._wire).view(count, *param.shape[1:])
            values = values.to(self._dtype) * self._averaging.post_scale
            grad = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()
            param.grad = grad.to_dense() if self._is_dense else grad

    @property
    def _wire(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._averaging.dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.plan.dtype))

    def _pack(self, param: Tensor, grad: Tensor | None) -> Tensor:
        """The scaled rows of a gradient as bytes, [rows, bytes]: the row's number, then its values."""
        if grad is None:
            indices = torch.zeros(0, dtype=INDEX, device=param.device)
            values = torch.zeros(0, *param.shape[1:], dtype=self._dtype, device=param.device)
        elif grad.dtype != self._dtype:
            raise ValueError(
                f"parameter {self._names[0]!r} has a gradient of dtype {grad.dtype}, expected {self._dtype} as when it "
                "was wrapped. Wrap the module again after converting it."
            )
        elif grad.layout is torch.strided:
            indices, values = torch.arange(param.shape[0], device=param.device), grad
        elif grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
            grad = grad.coalesce()
            indices, values = grad.indices()[0], grad.values()
        else:
            raise ValueError(
                f"parameter {self._names[0]!r} has a gradient of layout {grad.layout}, expected rows in a "
                "torch.sparse_coo tensor of one sparse dimension, as an embedding gives. Convert it with .to_dense()."
            )
        compute = torch.float64 if self._dtype == torch.float64 else torch.float32
        values = (values.to(compute) * self._averaging.pre_scale).to(self._wire)
        values = values.reshape(len(indices), math.prod(param.shape[1:]))
        return torch.cat([part.contiguous().view(torch.uint8) for part in (indices[:, None], values)], dim=1)
