"""When this process must have stopped, if that is known, and how long it takes to stop. Knows no rank.

That is at once where the launcher of the job has ended: a cluster may be about to end its processes, too.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from time import monotonic, time

from dpfuse.engine.user_line import warn_at_user
from dpfuse.stopping.wish import DEADLINE, LAUNCHER, wish

__all__ = ["GRACE", "Deadline", "DeadlineWatch", "deadline"]

VARIABLE = "DPFUSE_DEADLINE"
OF_SLURM = "SLURM_JOB_END_TIME"
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set where torchrun has started this process
GRACE = 30.0  # seconds: Kubernetes and Slurm leave so many after SIGTERM, unless they are told otherwise
UNTIL_SAVED = 1 / 4  # of the grace: what the first checkpoint is expected to take
EARLIEST = 1e9  # in September 2001; a smaller number is a date, such as 20261231
TURNS = 8  # that are remembered
STEPS = 3  # this one, on a GPU the next one, in which all ranks hear of it, and one to spare
MARGIN = 1.5  # a checkpoint may take so many times as long as the last one


class Deadline:
    """When this process must have stopped, and how long a checkpoint takes before that.

    Attributes:
        end: in seconds since the epoch; infinity where it is not known.
        launcher: the process whose end asks to stop, too; 0 for none.
    """

    def __init__(self) -> None:
        self.end = math.inf
        self.launcher = 0
        self._graces: list[float] = []  # of the handlers that are installed
        self._saving: float | None = None  # seconds of the last checkpoint, once there is one

    def open(self, grace: float) -> None:
        """Count the end of the job that Slurm tells, and that of torchrun, too, until `close`.

        Args:
            grace: seconds that the cluster leaves between its signal and the end. The largest one counts.

        Raises:
            ValueError: as `read`; then nothing has changed.
        """
        self.end = _end_of_job(with_slurm=True)
        self.launcher = os.getppid() if OF_TORCHRUN in os.environ else 0
        self._graces.append(grace)

    def close(self, grace: float) -> None:
        """End what `open` has begun with this grace."""
        self._graces.remove(grace)
        if not self._graces:
            self.launcher = 0
        with suppress(ValueError):  # which the next wrapper raises
            self.read()

    def read(self) -> None:
        """Read from the environment when the job ends.

        Raises:
            ValueError: `DPFUSE_DEADLINE` is no time.
        """
        self.end = _end_of_job(with_slurm=bool(self._graces))
        if self.end <= time():
            warn_at_user(
                f"the deadline of this job, {self}, has passed, so each training stops after its first step; expected "
                f"a later one. Set {VARIABLE} again where the job starts, or unset it."
            )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long a checkpoint takes, around what saves it."""
        began = monotonic()
        yield
        self._saving = monotonic() - began

    def is_near(self, step: float, steps: int = STEPS) -> bool:
        """Whether it is time to stop, where a step takes so many seconds, and so many are still made."""
        saving = max(self._graces, default=GRACE) * UNTIL_SAVED if self._saving is None else self._saving
        return time() + steps * step + MARGIN * saving > self.end

    def __str__(self) -> str:
        return datetime.fromtimestamp(self.end).astimezone().isoformat(sep=" ", timespec="seconds")


class DeadlineWatch:
    """Asks all ranks to stop where the deadline is near. It measures the steps of one loop itself.

    A step takes as long as the second longest of the last turns. One of them may hold an evaluation, and a step may
    have several turns, of which all but one are short.

    Args:
        more: steps that are made besides the usual ones between the wish and the stop.
    """

    def __init__(self, more: int = 0) -> None:
        self._steps = STEPS + more
        self._began: float | None = None
        self._turns: deque[float] = deque(maxlen=TURNS)

    def look(self) -> None:
        """Look in each turn. Where no deadline is known, this is two comparisons."""
        if deadline.launcher and os.getppid() != deadline.launcher:
            wish.make(LAUNCHER)
        if deadline.end == math.inf:
            return
        now = monotonic()
        if self._began is not None:
            self._turns.append(now - self._began)
        self._began = now
        if deadline.is_near(sorted(self._turns)[-2] if len(self._turns) > 1 else 0.0, self._steps):
            wish.make(DEADLINE, str(deadline))


def _end_of_job(*, with_slurm: bool) -> float:
    """The earlier one of the times that the environment tells."""
    ends = [math.inf]
    if text := os.environ.get(VARIABLE):
        ends.append(_time_of(text))
    slurm = os.environ.get(OF_SLURM, "") if with_slurm else ""
    if slurm.isdecimal():
        ends.append(float(slurm))
    return min(ends)


def _time_of(text: str) -> float:
    try:
        end = float(text)
    except ValueError:
        try:
            end = datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        except ValueError:
            end = math.nan
    if not EARLIEST < end < math.inf:
        raise ValueError(
            f"{VARIABLE} is {text!r}, expected when the job ends: the seconds since the epoch, as `date +%s` prints "
            "them, or a time such as 2026-12-31T18:00:00+01:00. Correct the variable, or unset it."
        )
    return end


deadline = Deadline()  # of this process
