"""Which buckets take gradients in a backward that is not synchronised, and when. Touches no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from dpfuse.countdown import ENDLESS, Countdown
from dpfuse.tracing import leave_untraced

if TYPE_CHECKING:
    from dpfuse.buckets.accumulating_bucket import AccumulatingBucket
    from dpfuse.buckets.bucket import GradBucket

__all__ = ["LocalBackward"]


class LocalBackward:
    """Lets buckets that accumulate take their gradients while such a backward runs, and what is left at its end.

    No order has to be kept and no mark can come too late: whatever is ready after its bucket has taken is taken later.

    Args:
        buckets: all of them.
        countdowns: theirs.
    """

    def __init__(self, buckets: Sequence[GradBucket], countdowns: Sequence[Countdown]) -> None:
        self._countdowns = countdowns
        self._takers = {
            countdown: cast("AccumulatingBucket", bucket)
            for bucket, countdown in zip(buckets, countdowns, strict=True)
            if bucket.accumulates
        }

    def pending(self) -> list[int]:
        """Per bucket, the marks after which `ready` is to be called."""
        if not self._takers:
            return [ENDLESS] * len(self._countdowns)
        return [countdown.expected if countdown in self._takers else ENDLESS for countdown in self._countdowns]

    def ready(self, countdown: Countdown) -> None:
        """The bucket of this countdown got its last mark, or one more."""
        if countdown.pending == 0:
            self._takers[countdown].accumulate(backward_ended=False)

    leave_untraced(ready, calls=True, reason="dpfuse accumulates gradients here")

    def finish(self) -> bool:
        """The backward has ended; returns whether any parameter became ready in it."""
        marked = [c for c, begun in zip(self._countdowns, self.pending(), strict=True) if c.pending != begun]
        for countdown in marked:
            if countdown in self._takers:
                self._takers[countdown].accumulate(backward_ended=True)
        return bool(marked)

    def hand_back(self) -> None:
        """Put what the buckets have taken back to `.grad`."""
        for bucket in self._takers.values():
            bucket.hand_back()

    def forget(self) -> int:
        """Throw away what the buckets have taken; returns of how many parameters that was."""
        return sum(bucket.forget() for bucket in self._takers.values())
