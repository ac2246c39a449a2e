"""How many ready marks a bucket still waits for. Imports nothing of dpfuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ENDLESS", "Countdown"]

ENDLESS = 1 << 62  # marks that a countdown survives when nothing is to happen at its end


class Countdown:
    """Ready marks that a bucket still waits for. Below zero: it got more of them than expected."""

    __slots__ = ("expected", "launched", "pending")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.pending = 0
        self.launched = False

    def marker(self, decide: Callable[[Any, Countdown], None]) -> Callable[[Any], None]:
        """What to call with a parameter whenever it is ready; from the last expected mark on it calls `decide`.

        All parameters of a bucket share one function, which then stays in the processor's caches: that costs
        as little as calling an empty one, where a function per parameter costs half as much again.
        """

        def mark_ready(param: Any) -> None:
            self.pending = pending = self.pending - 1
            if pending <= 0:
                decide(param, self)

        return mark_ready

    def packing_marker(
        self, pack: Callable[[], None], decide: Callable[[Any, Countdown], None]
    ) -> Callable[[Any], None]:
        """The same, of a parameter whose gradient is to be packed before, as long as marks are waited for."""
        mark = self.marker(decide)

        def mark_packed(param: Any) -> None:
            if 0 < self.pending <= self.expected:
                pack()
            mark(param)

        return mark_packed
