"""When this process must have stopped, if that is known, and how long it takes to stop. Knows no rank."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from time import monotonic, time

from dpfuse.stopping.reason import DEADLINE
from dpfuse.stopping.wish import wish

__all__ = ["GRACE", "Deadline", "DeadlineWatch", "deadline"]

VARIABLE = "DPFUSE_DEADLINE"
OF_SLURM = "SLURM_JOB_END_TIME"
GRACE = 30.0  # seconds: Kubernetes and Slurm leave so many after SIGTERM, unless they are told otherwise
UNTIL_SAVED = 1 / 4  # of the grace: what the first checkpoint is expected to take
STEPS = 3  # this one, on a GPU the next one, in which all ranks hear of it, and one to spare
MARGIN = 1.5  # a checkpoint may take so many times as long as the last one


class Deadline:
    """When this process must have stopped, and how long a checkpoint takes before that.

    Attributes:
        grace: seconds that the cluster leaves between its signal and the end.
        reads_slurm: whether the end of the job that Slurm tells counts.
        end: in seconds since the epoch; infinity where it is not known.
    """

    def __init__(self) -> None:
        self.grace = GRACE
        self.reads_slurm = False
        self.end = math.inf
        self._saving: float | None = None  # seconds of the last checkpoint, once there is one

    def read(self) -> None:
        """Read from the environment when the job ends: the earlier time, if there are two.

        Raises:
            ValueError: `DPFUSE_DEADLINE` is no time.
        """
        ends = [math.inf]
        if text := os.environ.get(VARIABLE):
            ends.append(_time_of(text))
        slurm = os.environ.get(OF_SLURM, "") if self.reads_slurm else ""
        if slurm.isdecimal():
            ends.append(float(slurm))
        self.end = min(ends)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long a checkpoint takes, around what saves it."""
        began = monotonic()
        yield
        self._saving = monotonic() - began

    def is_near(self, step: float) -> bool:
        """Whether it is time to stop, where a step takes so many seconds."""
        saving = self.grace * UNTIL_SAVED if self._saving is None else self._saving
        return time() + STEPS * step + MARGIN * saving > self.end

    def __str__(self) -> str:
        return datetime.fromtimestamp(self.end).astimezone().isoformat(sep=" ", timespec="seconds")


class DeadlineWatch:
    """Asks all ranks to stop where the deadline is near. It measures the steps of one loop itself.

    A step takes as long as the shorter of the last two, since one of them may hold an evaluation.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0

    def look(self) -> None:
        """Look once in each step. Where no deadline is known, this is one comparison."""
        if deadline.end == math.inf:
            return
        now = monotonic()
        before, self._last = self._last, 0.0 if self._began is None else now - self._began
        self._began = now
        if deadline.is_near(min(before, self._last)):
            wish.make(DEADLINE, str(deadline))


def _time_of(text: str) -> float:
    try:
        end = float(text)
    except ValueError:
        try:
            end = datetime.fromisoformat(text).timestamp()
        except ValueError:
            end = math.nan
    if not math.isfinite(end):
        raise ValueError(
            f"{VARIABLE} is {text!r}, expected when the job ends: the seconds since the epoch, as `date +%s` prints "
            "them, or a time such as 2026-12-31T18:00:00+01:00. Correct the variable, or unset it."
        )
    return end


deadline = Deadline()  # of this process
