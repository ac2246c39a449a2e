"""Lets the workers of a DataLoader outlive the signals that ask all ranks to stop. Knows no wish and no rank.

A launcher, a terminal or a cluster may send a signal to all processes of a group. A rank whose worker dies of it raises
in the middle of a step, and cannot stop together with the others. It does not help to ignore the signal in the parent,
because torch installs a handler of its own in each worker.

So each loader is given a `WorkerStart`. Its workers begin with the signals blocked, until torch calls that one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from multiprocessing import resource_tracker
from typing import Any

import torch.multiprocessing

from dpfuse.engine.torch_private import LOADER_WITH_WORKERS
from dpfuse.stopping.fork_server import ForkServer
from dpfuse.stopping.worker_end import WorkerEnd
from dpfuse.stopping.worker_start import WorkerStart

__all__ = ["Workers", "workers"]


class Workers:
    """Which signals the workers of new loaders outlive."""

    def __init__(self) -> None:
        self._process = 0  # a fork of it has no such handlers
        self._open: list[tuple[int, ...]] = []  # the signals of the handlers that are installed
        self._hears_loaders = False
        self._fork_server = ForkServer()

    def open(self, numbers: tuple[int, ...]) -> None:
        """Let the workers of new loaders outlive these signals, until `close`."""
        self._process = os.getpid()
        self._open.append(numbers)
        if LOADER_WITH_WORKERS is not None and not self._hears_loaders:
            self._hears_loaders = True
            LOADER_WITH_WORKERS.__init__ = self._around(LOADER_WITH_WORKERS.__init__)  # type: ignore[misc]

    def close(self, numbers: tuple[int, ...]) -> None:
        """End what `open` has begun with these signals. Workers that run outlive them still."""
        self._open.remove(numbers)

    def _around(self, start: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Return what starts the workers of an iterator in place of torch's `start`, and calls it."""

        @wraps(start)
        def start_workers(iterator: Any, loader: Any) -> None:
            numbers = {number for each in self._open for number in each}
            if not numbers or os.getpid() != self._process:
                start(iterator, loader)
                return
            init = loader.worker_init_fn
            before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                self._start_helpers(loader, numbers)
                loader.worker_init_fn = WorkerStart(numbers, init)
                start(iterator, loader)
            finally:
                loader.worker_init_fn = init
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                if hasattr(iterator, "_workers"):
                    WorkerEnd(iterator)

        return start_workers

    def _start_helpers(self, loader: Any, numbers: set[int]) -> None:
        """Start the processes that multiprocessing needs for these workers. They begin with the signals blocked."""
        method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
        if method != "fork":
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # Python 3.11 unblocks some once the tracker has started
        if method == "forkserver":
            self._fork_server.start(numbers)


workers = Workers()  # of this process
