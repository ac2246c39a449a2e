"""The end of this process: says goodbye to its peers, or why not, and lets nothing keep it from ending."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING

from dpfuse.engine.waiting import forget_unfinished_works, has_unfinished_works
from dpfuse.liveness.diagnosis import End, EndKind, end_with

if TYPE_CHECKING:
    from dpfuse.liveness.heartbeat import Heartbeat

__all__ = ["leave", "publish", "say_goodbye_of"]

_heartbeats: list[Heartbeat] = []
_installed = False
_told_code = False  # whether somebody has told the exit code, who will also see to it


def say_goodbye_of(heartbeat: Heartbeat) -> None:
    """Have the peers of a heartbeat told how this process ends, and its thread stopped before Python ends."""
    global _installed
    _heartbeats[:] = [one for one in _heartbeats if one.beats]
    _heartbeats.append(heartbeat)
    if not _installed:
        _installed = True
        before = sys.excepthook

        def publish_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            publish(error)
            before(kind, error, trace)

        sys.excepthook = publish_and_print
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_forget)
    util.Finalize(None, _at_exit, exitpriority=0)  # children of multiprocessing run these alone


def publish(error: BaseException) -> None:
    """Tell the peers that this process ends with an exception."""
    for heartbeat in _heartbeats:
        heartbeat.announce(end_with(error))


def leave(code: int = 0) -> None:
    """Say goodbye, unless more was said, and stop all heartbeats; for who then ends the process by itself.

    Args:
        code: the exit code.
    """
    global _told_code
    _told_code = True
    _leave(code)


def _leave(code: int) -> None:
    for heartbeat in _heartbeats:
        error = f"exit code {code}" if code else heartbeat.last_error
        heartbeat.announce(End(EndKind.FAILED if error else EndKind.NORMAL, error))
        heartbeat.stop()
    _heartbeats.clear()


def _at_exit() -> None:
    _leave(0)
    if _told_code or not has_unfinished_works():
        return
    # Python would now wait for threads of the back end, which wait for a peer that does not answer.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _forget() -> None:
    """In a fork: these threads and works are its parent's."""
    for heartbeat in _heartbeats:
        heartbeat.abandon()
    _heartbeats.clear()
    forget_unfinished_works()
