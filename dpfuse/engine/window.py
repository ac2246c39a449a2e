"""What a rank did since the last synchronised backward, in small numbers that all ranks must have in common.

They travel in the tail, so a rank that left something out is noticed in the backward in which that matters.
Knows no tensor, no rank and no group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["ELSEWHERE", "TOP", "WEIGHS", "Canary", "Counts"]

WEIGHS = 2
TOP = 64  # above every number that travels, and a power of two: 16-bit gradients still tell them apart


class Counts(NamedTuple):
    """Each from 1 to 62, beyond which it starts again, or all of them `TOP`."""

    backwards: int  # one more than were not synchronised, where their number matters
    forwards: int  # one more than no backward has reached
    wrapper: int  # one more than were made before this one for its group
    handling: int  # one more than a number for what is done to gradients besides averaging them


NEVER = 0  # the number of no window
ELSEWHERE = Counts(TOP, TOP, TOP, TOP)  # of a rank that has no inputs left, and compares with anything


class Canary:
    """Counts what must be alike on all ranks when gradients are averaged.

    Not among it is the number of synchronised backwards: they are collectives, so no rank can be ahead.

    Args:
        wrapper: how many wrappers were made for the group before this one.
        counts_forwards: False where ranks may differ in which outputs they use.
    """

    def __init__(self, wrapper: int = 0, *, counts_forwards: bool = True) -> None:
        self.elsewhere = False  # whether this rank only takes part for the sake of others
        self.uneven = False  # whether some rank may
        self.wrapper = wrapper
        # In the backward that is running: 1 if the loss scale is undone; and WEIGHS if gradients are weighed, or twice
        # that if sums are, and four times that if the weight is that of a window in which a backward died.
        self.handling = 0
        self.died = False  # whether one that was not to synchronise did in this window
        self._counts_forwards = counts_forwards
        self._window = NEVER
        self.began = NEVER  # the window in which the forward that is running did, if it counts
        self._watched = True  # whether the outputs of the last forward are
        self._of_outputs = True  # whether the backward that is running has come by any that is
        self.begin_window()

    def begin_window(self) -> None:
        """A synchronised backward is over, well or not."""
        self._window += 1
        self._backwards = self._forwards = 0
        self.died = False

    def forward_begins(self, *, counts: bool) -> None:
        """One with gradients enabled, whether it succeeds or not; one in eval mode may be one rank's alone."""
        self.began = self._window if counts else NEVER
        self._forwards += counts

    def forward_ends(self, *, watched: bool) -> None:
        """It succeeded; if its outputs cannot be watched, nobody will know of its backward."""
        self._watched = watched
        if not watched and self.began == self._window:
            self._forwards -= 1

    def forget_forwards(self) -> None:
        """Whatever has got no backward yet is to get none, or one that does not count."""
        self._window += 1
        self._forwards = 0

    def reached(self, window: int) -> None:
        """A backward reaches outputs of a forward for the first time; `window` is what `began` was in that forward."""
        self._of_outputs = True
        # A forward counts nowhere once the window is over in which it began: its outputs may have their backward later,
        # and a training step may run whole backwards inside its forward.
        if window == self._window:
            self._forwards -= 1

    def backward_begins(self, *, announced: bool) -> None:
        """Announced by an output that is watched, or by none so far."""
        self._of_outputs = announced or not self._watched

    def gradients_accumulated(self) -> None:
        """By the backward that ends, which is to synchronise or not.

        One that comes by no output stands for the forwards so far: where a batch has nothing to learn from, the loss
        is often all parameters times 0.
        """
        if not self._of_outputs:
            self.forget_forwards()

    def backward_ends(self) -> None:
        """One that accumulated gradients and did not synchronise."""
        self.gradients_accumulated()
        self._backwards += 1

    def backward_dies(self) -> None:
        """An exception ended one that was not to synchronise: what has accumulated is of no use any more.

        Who begins the window again will have counted right at its end, and who goes on as if nothing had happened
        will not. With weights nobody counts, so there `died` tells.
        """
        self._backwards = 0
        self.died = True

    def begin_again(self) -> None:
        """What has accumulated in this window was thrown away."""
        self._backwards = 0
        self.died = False

    @property
    def counts(self) -> Counts:
        """What to tell the other ranks."""
        if self.elsewhere:
            return ELSEWHERE
        forwards = self._forwards if self._counts_forwards else 0
        # Who weighs gradients says how much each rank has; in how many batches is its own affair.
        backwards = self._backwards if self.handling < WEIGHS else 0
        return _told(backwards, forwards, self.wrapper, self.handling)


@lru_cache(maxsize=1024)  # nearly every backward tells the same
def _told(*numbers: int) -> Counts:
    return Counts(*(1 + number % (TOP - 2) for number in numbers))
