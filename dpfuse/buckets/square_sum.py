"""The sum of the squares of gradients as they were handed over, while they still are that. Knows no bucket."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from weakref import ref

from torch import Tensor

from dpfuse.writing_streams import capturing

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
        self._addresses: list[int] = []
        self._versions = 0  # of all memory that they have, added up, for versions only grow

    def forget(self) -> None:
        """What it was measured of is about to be written."""
        self._known = False
        self._views = ()  # the bucket may get another buffer

    def settle(self, grads: Sequence[Tensor], *, views: bool) -> None:
        """It is that of these; as `views` they share their memory and live as long as it does."""
        self._views, self._private = (grads, []) if views else ((), list(map(ref, grads)))
        self._addresses = list(map(Tensor.data_ptr, grads))
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
        same = [grad for grad, known in zip(grads, measured, strict=True) if grad is not None and grad is known]
        if len(same) < len(measured) or self._count(same) != self._versions:
            return None
        return self.value if list(map(Tensor.data_ptr, same)) == self._addresses else None

    def _count(self, grads: Sequence[Tensor]) -> int:
        return sum(map(_version, grads[:1] if self._views else grads))
