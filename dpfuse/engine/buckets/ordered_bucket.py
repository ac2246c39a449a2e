"""A bucket whose gradients are added up in the order of the ranks: no layout changes their bits. Knows no order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dpfuse.engine import collective
from dpfuse.engine.buckets.bucket import GradBucket
from dpfuse.engine.plan import Slot
from dpfuse_kernels import sum_parts

__all__ = ["OrderedBucket"]

STEP = 8  # elements: the parts of the ranks are whole multiples, for loads and stores of 128 bits


class _OrderedSum(dist.Work):
    """The sum of a buffer over the ranks, begun as an all-to-all of its parts: each rank is to add up one of them.

    On CUDA all that follows is queued at once, on a stream of its own. On a CPU it follows in `wait`: who added up as
    soon as the parts have landed would have to gather in an order that differs between ranks, or to wait in backward.

    Args:
        flat: the buffer, [ranks * part]; holds the sum once this was waited for.
        parts: room for what the other ranks send, like `flat`.
        group: process group.
        stream: where to go on, on CUDA.
        add_up: called with the parts, [ranks, part], and where to put their sum, [part].
    """

    def __init__(
        self,
        flat: Tensor,
        parts: Tensor,
        group: dist.ProcessGroup,
        stream: torch.cuda.Stream | None,
        add_up: Callable[[Tensor, Tensor], None] = sum_parts,
    ) -> None:
        super().__init__()
        self._flat = flat
        self._parts = parts
        self._group = group
        self._add_parts = add_up
        self._future: Future[Any] = Future()
        self._exchange = collective.start_all_to_all(parts, flat, group)
        self._gather: dist.Work | None = None
        if stream is not None:
            with torch.cuda.stream(stream):
                self._exchange.wait()
                self._gather = self._add_up()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the sum, for each of its two collectives as long as `timeout` says, and again if that was too short.

        Raises:
            RuntimeError: it took longer, or failed, as `is_completed` tells then.
        """
        if self._gather is None:
            _wait(self._exchange, timeout)
            self._gather = self._add_up()
        _wait(self._gather, timeout)
        if not self._future.done():
            self._future.set_result([self._flat])
        return True

    def is_completed(self) -> bool:
        """Whether nobody has to wait, or it is in vain."""
        if self._gather is not None:
            return self._gather.is_completed()
        if self._exchange.is_completed():
            try:
                self._exchange.wait()
            except RuntimeError:
                return True
        return False

    def get_future(self) -> Future[Any]:
        """Done when somebody has waited for the sum."""
        return self._future

    def _add_up(self) -> dist.Work:
        size = self._group.size()
        # What this rank has sent was read: the sum is put where the gather leaves it.
        ours = self._flat.view(size, -1)[self._group.rank()]
        self._add_parts(self._parts.view(size, -1), ours)
        return collective.start_all_gather_into(self._flat, ours, self._group)


def _wait(work: dist.Work, timeout: timedelta) -> None:
    work.wait(timeout) if timeout else work.wait()


class OrderedBucket(GradBucket):
    """Gradients whose bits depend on nothing but their own summands, whatever else is in the buffer and how long it is.

    An all-reduce adds up in an order that depends on where an element lies. Here each rank receives one part of the
    buffer from all, adds it up in the order of the ranks, in float32 (float64 for float64), rounds once, and sends the
    sum to all: as many bytes as in a ring. Arguments are those of `GradBucket`.
    """

    _parts: Tensor | None = None
    _stream: torch.cuda.Stream | None = None

    def _start(self, flat: Tensor) -> dist.Work:
        if self._parts is None:
            self._parts = torch.empty_like(flat)
            self._stream = torch.cuda.Stream(flat.device) if flat.is_cuda else None
        return _OrderedSum(flat, self._parts, self._group, self._stream, self._adding())

    def _adding(self) -> Callable[[Tensor, Tensor], None]:
        residual = self._residual_part()
        return sum_parts if residual is None else partial(sum_parts, residual=residual)

    def _residual_part(self) -> Tensor | None:
        """Where to add what rounding this rank's part of the sum takes."""
        return None if self.residual is None else self.residual.part(self._group.rank(), self._group.size())

    def _places(self) -> tuple[list[Slot], int]:
        slots, numel = super()._places()
        tail = 0 if self.tail is None else self.tail.numel
        step = STEP * self._group.size()
        return slots, -(-(numel + tail) // step) * step - tail  # the tail follows, and ends the last rank's part
