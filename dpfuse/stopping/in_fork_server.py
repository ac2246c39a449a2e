"""Imported by the fork server of multiprocessing, which was started with those signals blocked that it outlives.

The processes that it forks begin with these signals blocked, too. This file unblocks them in each of these processes
before its work begins: else `Process.terminate` would end none. In a worker of a loader, `WorkerStart` does it later.
"""

from __future__ import annotations

import signal
from multiprocessing import util

from dpfuse.stopping.worker_start import WorkerStart

__all__: list[str] = []

_blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _unblock(_: object) -> None:
    if not WorkerStart.has_arrived:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)


util.register_after_fork(_unblock, _unblock)
