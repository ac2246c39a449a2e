"""How long a rank that makes no step waits for ranks that have made all theirs."""

from __future__ import annotations

import time

__all__ = ["WaitingTime"]

STUCK, GAPS = 5.0, 10  # these seconds, and this often the longest time between two steps


class WaitingTime:
    """Grows with the longest time between two steps."""

    def __init__(self) -> None:
        self._longest: float | None = None  # seconds between two steps; None before the first step
        self.begin()

    def begin(self) -> None:
        """Begin to wait."""
        self._moved = time.monotonic()

    def step(self) -> None:
        """Note that a step was made."""
        before = self._moved
        self.begin()
        # Before the first step the program starts and compiles, which takes longer.
        self._longest = 0.0 if self._longest is None else max(self._longest, self._moved - before)

    @property
    def seconds(self) -> float:
        """The time without a step after which it ends."""
        return STUCK + GAPS * (self._longest or 0.0)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return time.monotonic() - self._moved >= self.seconds
