"""How the workers of a loader end that outlive SIGTERM. Knows no signal that asks ranks to stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Any
from weakref import ref

from dpfuse.engine.torch_private import unwatch_workers

__all__ = ["WorkerEnd"]


class WorkerEnd:
    """Kills the workers of one iterator where torch or multiprocessing would send them SIGTERM.

    Torch waits some seconds for each worker that does not end by itself. Here it waits as long for all of them
    together.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = ref(iterator)
        self._until = inf  # when the seconds are over, once torch waits
        for process in iterator._workers:
            child = process._popen
            # No cycle: the end of the iterator, of its processes and of their files must not wait for a collection.
            child.terminate, child.wait = partial(self._kill, ref(child)), partial(self._wait, ref(child))

    def _kill(self, child: Callable[[], Any]) -> None:
        iterator = self._iterator()
        if iterator is not None:
            unwatch_workers(iterator)
        self._until = inf
        child().kill()

    def _wait(self, child: Callable[[], Any], timeout: float | None = None) -> int | None:
        waiting = child()
        if timeout is not None:
            self._until = min(self._until, monotonic() + timeout)
            timeout = max(0.0, self._until - monotonic())
        code: int | None = type(waiting).wait(waiting, timeout)
        return code
