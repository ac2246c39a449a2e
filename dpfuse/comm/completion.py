"""Calls back when a collective has landed, and lets the threads of a back end finish before Python ends.

Knows no bucket.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from time import monotonic, sleep
from weakref import WeakSet

import torch.distributed as dist

__all__ = ["call_when_landed", "let_threads_finish_at_exit"]

PATIENCE = 2.0  # seconds; what has not landed by then may never
LAST_WORK = 0.02  # seconds in which a thread of gloo can drop its last work

_awaited: WeakSet[Callable[[object], None]] = WeakSet()  # a thread drops its reference after the call


def call_when_landed(work: dist.Work, call: Callable[[], None]) -> None:
    """Let a thread of the back end call `call` when `work` is done.

    A thread that still has to call into Python when Python ends aborts the whole process ("terminate called without
    an active exception"). So the end of the process waits for these threads.
    The back end, or a communication hook, sets the future of the work. The call should be short.
    """

    def landed(_future: object) -> None:
        call()

    _awaited.add(landed)
    work.get_future().add_done_callback(landed)


def let_threads_finish_at_exit() -> None:
    """Give the threads of a back end the time to drop their last work when Python ends.

    A work of gloo holds a Python object. Its thread drops the work soon after it is done, and needs Python's lock for
    that. If Python ends meanwhile, the whole process is aborted, as above.
    """
    atexit.unregister(_sleep)
    atexit.register(_sleep)


def _sleep() -> None:
    sleep(LAST_WORK)  # without Python's lock


def _let_land() -> None:
    deadline = monotonic() + PATIENCE
    while _awaited and monotonic() < deadline:
        sleep(0.001)


atexit.register(_let_land)
os.register_at_fork(after_in_child=_awaited.clear)  # the threads are its parent's
