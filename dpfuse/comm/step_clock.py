"""Where the time of this rank's steps goes: seconds by phase. Knows no other rank.

The thread that trains writes a mark at each event, which costs it a call of C. The clock adds marks up now and then.
The heartbeat (`dpfuse.liveness`) takes the sums, and sends them to the first rank of the group. They are durations: the
clocks of two machines are never compared.
"""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import finalize, ref

__all__ = [
    "BACKWARD",
    "DELIVERED",
    "FORWARD",
    "LOADER",
    "MOST",
    "NAMES",
    "OPTIMIZER",
    "PAUSE",
    "STEPPED",
    "WAITING",
    "Mark",
    "StepClock",
    "Sums",
]

NAMES = ("loader", "forward", "backward", "optimizer", "garbage collection", "waiting")
LOADER, FORWARD, BACKWARD, OPTIMIZER, _COLLECTION, WAITING = range(len(NAMES))
# Events that end a phase: a backward has averaged its gradients, and an optimizer has stepped.
DELIVERED, STEPPED = OPTIMIZER, len(NAMES)
# The phase that begins, or one of these events; the time, the seconds waited for peers so far, those of collections.
Mark = tuple[int, float, float, float]
PAUSE = 0.05  # seconds; at the end of a step marks are added up where the last time is longer ago
MOST = 1024  # marks, after which they are added up in any case
Sums = tuple[int, list[float]]  # after so many steps; seconds of each phase since the start
KEPT = 64  # sums that the heartbeat has not taken
# The heartbeat takes sums now and then. If it finds more than MANY, the clock makes half as many from then on. If it
# finds at most FEW, the clock makes twice as many.
MANY, FEW = 16, 4
RAREST = 1 << 16  # steps between two sums


class StepClock:
    """Adds up seconds by phase. At any time one phase runs; waiting and garbage collections in it are not its own.

    A step is a backward that synchronises. It ends at the same moment on all ranks, about. So from one to the next each
    rank has the same time, and a rank that waits less was busy longer.

    Args:
        waited: seconds in which this rank has waited for its peers so far, as in each mark.

    Attributes:
        marks: those that are not added up yet.
        due: when marks are to be added up at the end of a step.
        collected: seconds of garbage collections in the thread that trains.
        thread: number of the thread that runs forwards.
        steps: that have ended, as far as marks are added up.
    """

    def __init__(self, waited: float = 0.0) -> None:
        self.marks: list[Mark] = []
        self.collected = 0.0
        self.thread = get_ident()
        self.steps = 0
        self._phase = LOADER  # after the marks that are added up
        self._seconds = [0.0] * _COLLECTION
        self._collection = 0.0  # when one has begun
        self.due = perf_counter()
        self._busy = self.due - waited  # the time of the last mark, without waits and collections
        self._told = False  # whether an optimizer has ever told that it stepped
        self._every = 1  # steps; always a power of two, so that ranks with different ones have steps in common
        self._sums: deque[Sums] = deque(maxlen=KEPT)
        callback = partial(_collects, ref(self))
        gc.callbacks.append(callback)
        finalize(self, _remove, callback).atexit = False

    @property
    def phase(self) -> int:
        """The number of the phase that runs now. Another thread may ask."""
        phase = self._phase
        for kind, *_ in tuple(self.marks):
            phase = _next_phase(phase, kind)
        return phase

    def add_up(self) -> None:
        """Give the time between marks to the phases. Called by the thread that writes marks."""
        seconds, phase, before = self._seconds, self._phase, self._busy
        for kind, time, waited, collected in self.marks:
            if kind == STEPPED:
                if phase not in (OPTIMIZER, LOADER):
                    continue  # it has stepped inside backward
                phase, self._told = OPTIMIZER, True  # what ran since backward, or since the optimizer before, was its
            elif phase == OPTIMIZER and self._told and kind in (FORWARD, BACKWARD):
                phase = LOADER  # no optimizer has stepped since the backward, but one would have told
            busy = time - waited - collected
            seconds[phase] += busy - before
            phase, before = LOADER if kind == STEPPED else kind, busy
            if kind == DELIVERED:
                self.steps += 1
                if not self.steps % self._every:
                    self._sums.append((self.steps, [*seconds, collected, waited]))
        self._phase, self._busy, self.due = phase, before, perf_counter() + PAUSE
        self.marks.clear()

    def taken(self) -> list[Sums]:
        """Return the sums since the last call. Called by the heartbeat's thread, before each heartbeat."""
        found = [self._sums.popleft() for _ in range(len(self._sums))]
        if len(found) > MANY and self._every < RAREST:
            self._every *= 2
        elif 0 < len(found) <= FEW and self._every > 1:
            self._every //= 2
        return found

    def collection(self, begins: bool) -> None:
        """A garbage collection begins or ends. Those of other threads count as part of the phase that they hold up."""
        if get_ident() != self.thread:
            return
        if begins:
            self._collection = perf_counter()
        elif self._collection:
            self.collected += perf_counter() - self._collection
            self._collection = 0.0


def _next_phase(phase: int, kind: int) -> int:
    """Return the phase that runs after a mark."""
    if kind != STEPPED:
        return kind
    return LOADER if phase == OPTIMIZER else phase


def _collects(clock: ref[StepClock], moment: str, _info: dict[str, Any]) -> None:
    """Tell a clock that a garbage collection begins or ends. This does not keep the clock."""
    found = clock()
    if found is not None:
        found.collection(moment == "start")


def _remove(callback: Any) -> None:
    if callback in gc.callbacks:  # a program may have cleared the list
        gc.callbacks.remove(callback)
