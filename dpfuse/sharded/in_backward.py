"""Updates parameters while backward runs: those of a bucket once its gradients have landed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.waiting import board_of, finish
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.errors import DPFuseError
from dpfuse.gradients.norm import clipping_factor
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse.sharded.division import Region
from dpfuse.sharded.part_sum import Incoming, PartSum
from dpfuse_kernels.multiply import multiply_each
from dpfuse_kernels.squared_norm import row_norms

__all__ = ["DEPTH", "DeliveryInBackward", "InBackward", "SumInBackward", "Updates"]

DEPTH = 2  # buckets in flight; before a further one is packed, backward waits for the oldest

HALF_UPDATED = "The parameters are half updated: load a checkpoint into the model and the optimizer."


class Updates(Protocol):
    """What is done with the buckets of a backward."""

    def begin(self) -> None:
        """Note that a backward that synchronises begins."""

    def update(self, buffer: CommBuffer, *, sent: bool) -> None:
        """Update this rank's part of a bucket's parameters, and start to gather the parts; raises nothing.

        Args:
            buffer: of the bucket; it has the gradients of this rank's part.
            sent: whether this rank has sent gradients. Otherwise its part stays as it is.
        """

    def finish(self) -> None:
        """Wait for all parameters that have begun to travel."""

    def spoil(self, wrong: Tensor) -> None:
        """Make the parameters NaN on the device, if `wrong`, [] bool, is set there."""


@dataclass
class _Flight:
    """A bucket in flight; `sent` says whether it has this rank's gradients, and not zeros after an error."""

    buffer: CommBuffer
    work: dist.Work
    sent: bool


class InBackward:
    """Lands buckets in the order of the plan, and updates their parameters.

    The updated parts are gathered by collectives. So every rank lands a bucket at the same point: before the second
    bucket after it is packed, or at the end of backward.

    Args:
        largest_norm: the gradients are multiplied so that their norm would be at most this, if it were that of the
            backward before; None leaves them as they are.

    Attributes:
        norm: of the gradients of the last backward, before they were multiplied, [] float32; None before the first
            step, and where none was asked for.
    """

    def __init__(
        self, group: dist.ProcessGroup, updates: Updates, largest_norm: float | None, device: torch.device
    ) -> None:
        self._device = device
        self.norm: Tensor | None = None
        self._group = group
        self.updates = updates
        self._largest = largest_norm
        self._factor: Tensor | None = None
        self._squares: list[Tensor] = []
        self._flights: deque[_Flight] = deque()
        self._begun = False  # whether a backward has updated parameters, and has not ended well
        self._owed = False  # whether a step is owed to the last backward
        self._unused: list[str] = []
        self._lost: Exception | None = None  # why a bucket did not land

    @property
    def adds_up(self) -> bool:
        """Whether a step adds up the squares of all ranks."""
        return self._largest is not None

    def opens(self) -> None:
        """Note that a backward that synchronises begins.

        Raises:
            DPFuseError: the last one has failed, or `step` was not called since.
        """
        rank = self._group.rank()
        if self._begun:
            raise DPFuseError(
                f"rank {rank}: a backward began after one that did not end, with step_in_backward=True, expected that "
                f"each ends well. {HALF_UPDATED}"
            )
        if self._owed:
            raise DPFuseError(
                f"rank {rank}: a second backward began before optimizer.step(), with step_in_backward=True, expected "
                "one step() after each backward that synchronises, since each has updated the parameters. Accumulate "
                "inside no_sync()."
            )
        self.updates.begin()
        norm, largest = self.norm, self._largest
        self._factor = None if norm is None or largest is None else clipping_factor(largest, norm)

    def make_room(self) -> None:
        """Land buckets until another one may be sent."""
        while len(self._flights) >= DEPTH:
            self._land_oldest()

    def flies(self, buffer: CommBuffer, work: dist.Work, *, sent: bool) -> None:
        """Note that the bucket with this communication buffer was sent."""
        self._begun = self._begun or sent  # zeros update nothing, as where every rank has died before it sent anything
        self._flights.append(_Flight(buffer, work, sent))

    def land(self, buffer: CommBuffer) -> None:
        """Land this bucket and those that were sent before, unless they have landed."""
        while any(flight.buffer is buffer for flight in self._flights):
            self._land_oldest()

    def clip(self, part: Tensor) -> None:
        """Add up the squares of a part of the gradients, [elements], and multiply it with the factor."""
        if self._largest is not None and part.numel():
            self._squares.append(row_norms([part]).square())
            if (factor := self._factor) is not None and (factor.is_cuda or factor != 1.0):
                multiply_each([part], factor)

    def unused(self, names: Sequence[str]) -> None:
        """Note parameters that no rank has used, although they are trained."""
        self._unused += names

    def ended(self) -> None:
        """Note that a backward has ended well on every rank, and wait for the parameters."""
        self._begun, self._owed = False, True
        self.updates.finish()

    def failed(self) -> None:
        """Wait for the parameters after a backward that has failed: the program may load others into their memory."""
        with suppress(Exception):  # the backward raises its own error; one of the group comes again
            self.updates.finish()

    def begin_again(self) -> None:
        """Forget what has happened: a state was loaded."""
        self._begun = self._owed = False
        self._flights.clear()
        self._lost = None
        self.norm, self._unused, self._squares = None, [], []

    def refuse_half_updated(self) -> None:
        """Raise DPFuseError before a step if the last backward did not end well."""
        if self._begun:
            raise DPFuseError(
                f"rank {self._group.rank()}: step() was called after a backward that did not end, with "
                f"step_in_backward=True, expected one that ended well. {HALF_UPDATED}"
            )

    def step(self) -> bool:
        """Note that the program calls `step`; to be called on all ranks.

        Returns:
            Whether there was a backward since the last one.

        Raises:
            DPFuseError: the last backward updated a parameter that no rank has used.
        """
        rank = self._group.rank()
        names, self._unused = self._unused, []
        if names:
            raise DPFuseError(
                f"rank {rank}: no rank has used parameter {names[0]!r} and {len(names) - 1} more, with "
                "step_in_backward=True, expected a gradient for each: they were updated as with a gradient of zeros. "
                "Freeze them (requires_grad_(False)), or leave step_in_backward out."
            )
        if self._owed and self._largest is not None:
            total = torch.zeros((), dtype=torch.float64, device=self._device)
            if self._squares:  # this rank's parts may be empty
                total = torch.cat(self._squares).sum(dtype=torch.float64)
            finish(collective.all_reduce(total, self._group), board_of(self._group), total.device.type)
            self.norm = total.sqrt().float()
        owed, self._squares, self._owed = self._owed, [], False
        return owed

    def _land_oldest(self) -> None:
        if self._lost is not None:
            raise self._lost  # without waiting once more
        flight = self._flights[0]
        try:
            finish(flight.work, board_of(self._group), flight.buffer.flat.device.type)
        except Exception as error:
            self._lost = error
            raise
        self._flights.popleft()
        self.updates.update(flight.buffer, sent=flight.sent)


class SumInBackward(PartSum):
    """As `PartSum`, for a bucket whose parameters are updated in backward."""

    def __init__(
        self,
        buffer: CommBuffer,
        regions: Sequence[Region],
        group: dist.ProcessGroup,
        incoming: Incoming,
        in_backward: InBackward,
    ) -> None:
        super().__init__(group, regions, incoming)
        self._buffer = buffer
        self._in_backward = in_backward

    def start(self, flat: Tensor) -> dist.Work:
        self._in_backward.make_room()
        work = super().start(flat)
        self._in_backward.flies(self._buffer, work, sent=flat is self._buffer.flat)
        return work


class DeliveryInBackward(ShardedDelivery):
    """As `ShardedDelivery`, but the gradients are used up when `backward()` returns."""

    in_backward = True

    def __init__(
        self, buffer: CommBuffer, regions: Sequence[Region], group: dist.ProcessGroup, in_backward: InBackward
    ) -> None:
        super().__init__(buffer, regions, group)
        self._in_backward = in_backward

    def prepare(self, grads: list[Tensor | None], *, complete: bool) -> None:
        self._in_backward.make_room()  # the memory is that of an older bucket
        self.buffer.table.clear_gaps()

    def landed(self) -> None:
        self._in_backward.land(self.buffer)

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        triples = zip(self.buffer.params, self.buffer.indices, self.buffer.names, strict=True)
        self._in_backward.unused([name for param, i, name in triples if i in untouched and param.requires_grad])
        return super().deliver(missing, untouched)
