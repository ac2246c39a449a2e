"""Where the time of a step goes: forward, backward, optimizer, what lies between, and the tracing itself.

These are times of the host. On a GPU "device" is what the GPU still has to do when the host has ended the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from dpfuse.engine.user_line import user_line

__all__ = ["StepPhases"]

PHASES = ("outside", "loader", "forward", "backward", "optimizer", "device", "tracing")


class StepPhases:
    """Adds up the seconds of each phase. At any time one phase runs; "outside" is the rest, such as the loss.

    Attributes:
        lines: of the user's code, in which each phase first began since they were cleared.
    """

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._now = "outside"
        self._since = perf_counter()

    def enter(self, phase: str) -> None:
        """From here on time belongs to this phase."""
        now = perf_counter()
        self._seconds[self._now] += now - self._since
        self._now, self._since = phase, now
        if phase not in self.lines:
            self.lines[phase] = user_line()

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Give the time of this context to a phase, and what follows to the phase that ran before."""
        before = self._now
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def taken(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self.enter(self._now)
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return {phase: round(value, 7) for phase, value in seconds.items()}
