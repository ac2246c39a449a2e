"""Measures gradients while they are handed over, so that their norm needs no pass over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from operator import attrgetter, is_

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.delivery import RenewedViews, Views
from dpfuse.engine.feature import Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Delivery
from dpfuse.engine.streams import SideStream, capturing
from dpfuse.engine.torch_private import TensorMark
from dpfuse_kernels import squared_norm

__all__ = ["MeasuredDelivery", "NormInBackward", "SquareSum"]

_version = attrgetter("_version")


class SquareSum:
    """The sum of the squares of a bucket's gradients, measured when they are delivered, in the same pass.

    It is of no use once a gradient was replaced, moved, taken away, or written by an operation that torch counts.
    Writes that torch does not count, such as those through `.data`, cannot be noticed. Nor can replays of a CUDA graph.
    So a sum that was measured in a capture is used in captures only, and any other sum only outside of them.

    Args:
        value: where the sum is put, [] float64 on the device of the gradients.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._known = False
        self._captured = False  # whether replays write it, and gradients
        self._views: Sequence[Tensor] = ()
        self._private: list[TensorMark] = []  # no references: code that drops a gradient wants its memory back
        self._addresses: Sequence[int] = ()
        self._versions = 0  # of all memory that they have, added up, for versions only grow

    def forget(self) -> None:
        """Forget the sum, since the gradients are about to be written."""
        self._known = False
        self._views = ()  # the bucket may get another communication buffer

    def note_views(self, views: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Note that the sum is that of these views of a buffer, which live as long as the buffer does.

        Args:
            views: the measured gradients.
            addresses: where they were then, as `Tensor.data_ptr` gives them.
        """
        self._views, self._private, self._addresses = views, [], addresses
        self._note(views)

    def note_private(self, grads: Sequence[Tensor]) -> None:
        """Note that the sum is that of these gradients, each of which has memory of its own."""
        if len(self._private) != len(grads) or not all(map(TensorMark.is_of, self._private, grads)):
            self._private = list(map(TensorMark, grads))
        self._views, self._addresses = (), list(map(Tensor.data_ptr, grads))
        self._note(grads)

    def _note(self, grads: Sequence[Tensor]) -> None:
        try:
            self._versions = self._count(grads)
        except RuntimeError:  # backward ran in inference mode, whose tensors count no writes
            return
        self._captured |= capturing()
        self._known = True

    def of(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return the sum, [] float64, if it still is the one of these gradients; else None."""
        if not self._known or self._captured != capturing():
            return None
        there = [grad for grad in grads if grad is not None]
        if len(there) < max(len(grads), len(self._addresses)) or not self._are_measured(there):
            return None
        if self._count(there) != self._versions:
            return None
        return self.value if list(map(Tensor.data_ptr, there)) == self._addresses else None

    def _are_measured(self, grads: Sequence[Tensor]) -> bool:
        return all(map(is_, grads, self._views)) if self._views else all(map(TensorMark.is_of, self._private, grads))

    def _count(self, grads: Sequence[Tensor]) -> int:
        return sum(map(_version, grads[:1] if self._views else grads))


class NormInBackward(Feature):
    """Has each bucket add up the squares of the gradients that it hands over."""

    eager = True

    def __init__(self) -> None:
        self._sums: dict[int, SquareSum] = {}  # by order of the buckets that were made last

    def squares(self, order: int, bucket: Bucket) -> Tensor | None:
        self._sums[order] = SquareSum(torch.zeros((), dtype=torch.float64, device=bucket.device))
        return self._sums[order].value

    def delivery(self, order: int, delivery: Delivery, buffer: CommBuffer, side: SideStream | None) -> Delivery:
        if isinstance(delivery, (Views, RenewedViews)):
            self._sums[order] = SquareSum(torch.zeros((), dtype=torch.float64, device=buffer.flat.device))
            return _MeasuredViews(delivery, buffer, self._sums[order], side)
        return MeasuredDelivery(delivery, buffer, self._sums[order])

    def spoil(self, wrong: Callable[[], Tensor], deliveries: Sequence[Delivery]) -> None:
        """As `Feature.spoil`: sums become NaN with the gradients."""
        values = [each.squares.value for each in deliveries if isinstance(each, MeasuredDelivery)]
        poison = torch.where(wrong(), math.nan, 0.0).double()
        torch._foreach_add_(values, [poison] * len(values))  # of one tensor alone the host would read the value


class MeasuredDelivery(Delivery):
    """A delivery that copies gradients, and adds up their squares as it does.

    Args:
        delivery: copies them.
        buffer: of the bucket.
        squares: what they come to.
    """

    def __init__(self, delivery: Delivery, buffer: CommBuffer, squares: SquareSum) -> None:
        self.squares = squares
        self._delivery = delivery
        self._buffer = buffer

    def prepare(self, grads: list[Tensor | None], *, complete: bool) -> None:
        self._delivery.prepare(grads, complete=complete)

    def hand_out_early(self, missing: Set[int]) -> None:
        self.squares.forget()
        self._delivery.hand_out_early(missing)

    def sent(self, work: dist.Work, *, clean: bool) -> None:
        self._delivery.sent(work, clean=clean)

    def landed(self) -> None:
        self._delivery.landed()

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        whole = self._delivery.deliver(missing, untouched)
        if whole:
            self.squares.note_private([param.grad for param in self._buffer.params if param.grad is not None])
        return whole

    def discard(self) -> None:
        self.squares.forget()
        self._delivery.discard()


class _MeasuredViews(MeasuredDelivery):
    """Gradients that lie in a buffer, which is read once for their squares: while backward runs if there is a stream.

    Args:
        delivery, buffer, squares: as for `MeasuredDelivery`.
        side: where to read it while backward goes on, if anywhere.
    """

    def __init__(
        self, delivery: Views | RenewedViews, buffer: CommBuffer, squares: SquareSum, side: SideStream | None
    ) -> None:
        super().__init__(delivery, buffer, squares)
        self._views = delivery
        self._side = side
        self._measured = False  # whether the sum is on its way

    def sent(self, work: dist.Work, *, clean: bool) -> None:
        self._measured = False
        if self._side is not None and clean and self._views.handed_out and not capturing():
            self._measured = self._side.queue(work, self._measure, [self._buffer.table])

    def landed(self) -> None:
        if self._side is not None:
            self._side.join()

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        whole = self._views.deliver(missing, untouched)
        if whole:
            if not self._measured:
                self._measure()
            if isinstance(self._views, Views):  # they count their writes together
                self.squares.note_views(self._buffer.views, self._buffer.gradients.addresses)
            else:
                self.squares.note_private([param.grad for param in self._buffer.params if param.grad is not None])
        return whole

    def _measure(self) -> None:
        """Read the buffer, in which all gradients lie, for the sum of their squares."""
        table = self._buffer.gradients
        self.squares.value.copy_(squared_norm(table.views, table))
