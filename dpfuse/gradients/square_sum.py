"""The sum of the squares of gradients as they were handed over, while they still are that. Knows no bucket."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from weakref import ref

from torch import Tensor

from dpfuse.engine.streams import capturing

__all__ = ["SquareSum"]

_version = attrgetter("_version")


class SquareSum:
    """Measured while a bucket hands its gradients over, so that nobody has to read them again for their norm.

    It is of no use once a gradient was replaced, moved, taken away, or written by an operation that torch counts.
    Writes that torch does not count, such as those through `.data`, cannot be noticed. Nor can replays of a CUDA graph:
    once it was measured in a capture it is of use in captures only, and before only outside.

    Args:
        value: where the sum is put, [] float64 on the device of the gradients.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._known = False
        self._captured = False  # whether replays write it, and gradients
        self._views: Sequence[Tensor] = ()
        self._private: list[ref[Tensor]] = []  # who drops a gradient wants its memory back
        self._addresses: Sequence[int] = ()
        self._versions = 0  # of all memory that they have, added up, for versions only grow

    def forget(self) -> None:
        """What it was measured of is about to be written."""
        self._known = False
        self._views = ()  # the bucket may get another buffer

    def settle_views(self, views: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """It is that of these, which share the memory of a buffer and live as long as it does.

        Args:
            views: of which it was measured, [gradients].
            addresses: where they were then, as `Tensor.data_ptr` gives them.
        """
        self._views, self._private, self._addresses = views, [], addresses
        self._settle(views)

    def settle_private(self, grads: Sequence[Tensor]) -> None:
        """It is that of these, each of which has memory of its own."""
        self._views, self._private, self._addresses = (), list(map(ref, grads)), list(map(Tensor.data_ptr, grads))
        self._settle(grads)

    def _settle(self, grads: Sequence[Tensor]) -> None:
        try:
            self._versions = self._count(grads)
        except RuntimeError:  # backward ran in inference mode, whose tensors count no writes
            return
        self._captured |= capturing()
        self._known = True

    def of(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """It, [] float64, if it still is that of these; else None."""
        if not self._known or self._captured != capturing():
            return None
        measured: Sequence[Tensor | None] = self._views or [reference() for reference in self._private]
        there = [grad for grad in measured if grad is not None]
        if len(there) < len(grads) or not all(map(is_, grads, there)) or self._count(there) != self._versions:
            return None
        return self.value if list(map(Tensor.data_ptr, there)) == self._addresses else None

    def _count(self, grads: Sequence[Tensor]) -> int:
        return sum(map(_version, grads[:1] if self._views else grads))
