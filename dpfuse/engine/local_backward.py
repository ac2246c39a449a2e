"""A backward that is not synchronised: counted, and what buckets take of it. Touches no tensor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpfuse.engine import messages
from dpfuse.engine.buckets.accumulating_bucket import AccumulatingBucket
from dpfuse.engine.countdown import ENDLESS, Countdown
from dpfuse.engine.phase import RESTING, Phase
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.errors import DPFuseError

if TYPE_CHECKING:
    from dpfuse.engine.buckets.bucket import GradBucket
    from dpfuse.engine.window import Canary

__all__ = ["LocalBackward"]


class LocalBackward:
    """Lets buckets that accumulate take their gradients while such a backward runs, and what is left at its end.

    No order has to be kept and no mark can come too late: whatever is ready after its bucket has taken is taken later.

    Args:
        buckets: all of them.
        countdowns: theirs.
        canary: counts such backwards.
    """

    def __init__(self, buckets: Sequence[GradBucket], countdowns: Sequence[Countdown], canary: Canary) -> None:
        self._countdowns = countdowns
        self._canary = canary
        self._takers = {
            countdown: bucket
            for bucket, countdown in zip(buckets, countdowns, strict=True)
            if isinstance(bucket, AccumulatingBucket)
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

    def finish(self) -> None:
        """The backward has ended: let buckets take what is left of it.

        Raises:
            DPFuseError, ValueError: a gradient cannot be taken; the window is thrown away.
        """
        marked = [c for c, begun in zip(self._countdowns, self.pending(), strict=True) if c.pending != begun]
        try:
            for countdown in marked:
                if countdown in self._takers:
                    self._takers[countdown].accumulate(backward_ended=True)
        except BaseException:
            self.die()
            raise
        if marked:
            self._canary.backward_ends()

    def die(self) -> None:
        """An exception ended the backward: the window begins again, with a warning if buckets lose something by it."""
        self._canary.backward_dies()
        if lost := self.forget():
            warnings.warn(messages.discarded(lost), stacklevel=2)

    def begin_again(self, phase: Phase) -> None:
        """Throw away what the buckets have taken; if that is anything, the window begins again.

        Raises:
            DPFuseError: a backward is running, as `phase` tells.
        """
        if not self._takers:
            return
        if phase not in RESTING:
            raise DPFuseError(
                f"discard_accumulated() was called while a backward is {phase.name}, expected it between backwards. "
                "Call it once backward() has ended."
            )
        if self.forget():
            self._canary.begin_again()

    def hand_back(self) -> None:
        """Put what the buckets have taken back to `.grad`."""
        for bucket in self._takers.values():
            bucket.hand_back()

    def forget(self) -> int:
        """Let what the buckets have taken count no more; returns of how many parameters that was."""
        return sum(bucket.forget() for bucket in self._takers.values())
