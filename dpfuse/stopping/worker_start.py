"""What a worker process of a DataLoader does about the signals that it outlives. Imports the standard library only.

A worker that is spawned imports this file, so it must take little time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

__all__ = ["WorkerStart"]


class WorkerStart:
    """The `worker_init_fn` of a loader whose workers outlive signals: torch calls it after its own handlers are there.

    The handler is one of Python that does nothing. A program that a worker starts would inherit an ignored signal, or
    a blocked one, but no handler.

    Args:
        numbers: of the signals. A worker begins with them blocked.
        init: the function that the program has given to the loader; None if there is none.

    Attributes:
        has_arrived: whether this process has been sent an object of this class: it is a worker.
    """

    has_arrived = False

    def __init__(self, numbers: Collection[int], init: Callable[[int], Any] | None) -> None:
        self._numbers, self._init = numbers, init
        self._loader = os.getpid()
        self._parent = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        WorkerStart.has_arrived = True

    def __call__(self, worker: int) -> None:
        """Begin the work of this process, the worker of this number."""
        self._parent = os.getppid()
        for number in self._numbers:
            signal.signal(number, self._hear)
            signal.siginterrupt(number, False)  # libraries in C may take an interrupted call for a failed one
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self._init is not None:
            self._init(worker)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # Under "forkserver" the server is the parent for the system, and another process for multiprocessing.
        parent = multiprocessing.parent_process()
        has_parent = os.getppid() == self._parent and (parent is None or parent.is_alive())
        if not (has_parent and _exists(self._loader)):  # the loader may have ended before this worker began
            signal.signal(number, signal.SIG_DFL)  # no loader is left that could end this worker
            os.kill(os.getpid(), number)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
