"""The end of this process: tell the peers how it ends, and make sure that it does end."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from multiprocessing import util
from types import TracebackType

from dpfuse.comm.waiting import forget_unfinished_works, has_unfinished_works
from dpfuse.liveness.diagnosis import end_with
from dpfuse.liveness.heartbeat import Heartbeat

__all__ = ["announce_by", "announce_error", "announce_exit"]

_heartbeats: list[Heartbeat] = []
_installed = False
_finalizer: util.Finalize | None = None
_caller_exits = False  # whether a caller of `announce_exit` ends the process


def announce_by(heartbeat: Heartbeat) -> None:
    """Tell the peers of a heartbeat when this process ends, and stop its thread before Python ends."""
    global _installed, _finalizer
    _heartbeats[:] = [one for one in _heartbeats if one.beats]
    _heartbeats.append(heartbeat)
    if not _installed:
        _installed = True
        before = sys.excepthook

        def announce_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            announce_error(error)
            before(kind, error, trace)

        sys.excepthook = announce_and_print
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_forget)
    # A child of multiprocessing runs finalizers, and not atexit. It begins without those of its parent.
    if _finalizer is None or not _finalizer.still_active():
        _finalizer = util.Finalize(None, _at_exit, exitpriority=0)


def announce_error(error: BaseException) -> None:
    """Tell the peers that this process ends with an exception."""
    for heartbeat in _heartbeats:
        heartbeat.announce(end_with(error))


def announce_exit(code: int = 0) -> None:
    """Tell the peers that this process ends, unless an error was announced, and stop all heartbeats.

    The caller then ends the process.

    Args:
        code: the exit code.
    """
    global _caller_exits
    _caller_exits = True
    _stop(code)


def _stop(code: int) -> None:
    for heartbeat in _heartbeats:
        heartbeat.announce(heartbeat.unannounced_end(code))
        heartbeat.stop()
    _heartbeats.clear()


def _at_exit() -> None:
    _stop(0)
    if _caller_exits or not has_unfinished_works():
        return
    # Python would now wait for threads of the back end, which wait for a peer that does not answer.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _forget() -> None:
    """In a fork: the threads and works belong to the parent."""
    for heartbeat in _heartbeats:
        heartbeat.abandon()
    _heartbeats.clear()
    forget_unfinished_works()
