"""Where the time of this rank's steps goes: seconds by phase, added up by the thread that trains. Knows no other rank.

The heartbeat (`dpfuse.liveness`) takes the sums, and sends them to the first rank of the group. They are durations:
the clocks of two machines are never compared.
"""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import finalize, ref

__all__ = ["BACKWARD", "FORWARD", "LOADER", "NAMES", "OPTIMIZER", "WAITING", "PhaseClock", "Sums"]

NAMES = ("loader", "forward", "backward", "optimizer", "garbage collection", "waiting")
LOADER, FORWARD, BACKWARD, OPTIMIZER, _COLLECTION, WAITING = range(len(NAMES))
Sums = tuple[int, list[float]]  # after so many steps; seconds of each phase since the start
KEPT = 64  # sums that the heartbeat has not taken
# The heartbeat takes sums now and then. If it finds more than MANY, the clock makes half as many from then on. If it
# finds at most FEW, the clock makes twice as many.
MANY, FEW = 16, 4
RAREST = 1 << 16  # steps between two sums


class PhaseClock:
    """Adds up seconds by phase. At any time one phase runs; waiting and garbage collections in it are not its own.

    A step is a backward that synchronises. It ends at the same moment on all ranks, about. So from one to the next each
    rank has the same time, and a rank that waits less was busy longer. Everywhere `waited` is the seconds in which this
    rank has waited for its peers so far.
    """

    def __init__(self, waited: float = 0.0) -> None:
        self.phase = LOADER  # that runs now
        self.steps = 0  # that have ended
        self._thread = get_ident()
        self._seconds = [0.0] * _COLLECTION
        self._collected = self._began = 0.0
        self._busy = perf_counter() - waited  # the time of the last change of phase, without waits and collections
        self._told = False  # whether an optimizer has ever told that it stepped
        self._every = 1  # steps; always a power of two, so that ranks with different ones have steps in common
        self._sums: deque[Sums] = deque(maxlen=KEPT)
        callback = partial(_collects, ref(self))
        gc.callbacks.append(callback)
        finalize(self, _remove, callback).atexit = False

    def enter(self, phase: int, waited: float) -> None:
        """From now on time belongs to this phase."""
        if phase == FORWARD:
            self._thread = get_ident()
        if self.phase == OPTIMIZER and self._told and phase in (FORWARD, BACKWARD):
            self.phase = LOADER  # no optimizer has stepped since the backward, but one would have told
        busy = perf_counter() - waited - self._collected
        self._seconds[self.phase] += busy - self._busy
        self.phase, self._busy = phase, busy

    def optimizer_ended(self, waited: float) -> None:
        """An optimizer has stepped. What ran since backward, or since the optimizer before, belonged to it."""
        if self.phase == OPTIMIZER or self.phase == LOADER:
            self.phase = OPTIMIZER
            self._told = True
            self.enter(LOADER, waited)

    def step_ended(self, waited: float) -> None:
        """A backward has averaged its gradients. On a GPU a thread of autograd says so."""
        busy = perf_counter() - waited - self._collected
        self._seconds[self.phase] += busy - self._busy
        self.phase, self._busy = OPTIMIZER, busy
        self.steps += 1
        if not self.steps % self._every:
            self._sums.append((self.steps, [*self._seconds, self._collected, waited]))

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
        if get_ident() != self._thread:
            return
        if begins:
            self._began = perf_counter()
        elif self._began:
            self._collected += perf_counter() - self._began
            self._began = 0.0


def _collects(clock: ref[PhaseClock], moment: str, _info: dict[str, Any]) -> None:
    """Tell a clock that a garbage collection begins or ends. This does not keep the clock."""
    found = clock()
    if found is not None:
        found.collection(moment == "start")


def _remove(callback: Any) -> None:
    if callback in gc.callbacks:  # a program may have cleared the list
        gc.callbacks.remove(callback)
