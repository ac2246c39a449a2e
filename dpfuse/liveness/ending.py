"""The end of this process: says goodbye to its peers, or why not, and lets nothing keep it from ending."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfuse.liveness.heartbeat import Heartbeat

__all__ = ["leave", "leave_behind", "publish", "say_goodbye_of"]

# What the back ends say of a peer that is gone: its own error says more.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")

_heartbeats: list[Heartbeat] = []
_left_behind: list[Any] = []  # works that never end
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


def leave_behind(work: Any) -> None:
    """Note a work that will never end, which would keep Python from ending, too."""
    _left_behind.append(work)


def publish(error: BaseException) -> None:
    """Tell the peers that this process ends with an exception."""
    echo = is_echo(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for heartbeat in _heartbeats:
        heartbeat.say_last_words(text, echo=echo)


def is_echo(error: BaseException | None) -> bool:
    """Whether an exception only tells that another rank has ended."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if getattr(error, "ranks", ()) or (isinstance(error, RuntimeError) and any(t in str(error) for t in ECHOES)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


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
        heartbeat.say_last_words(f"exit code {code}" if code else heartbeat.last_error)
        heartbeat.stop()
    _heartbeats.clear()


def _at_exit() -> None:
    _leave(0)
    if _told_code or not any(not work.is_completed() for work in _left_behind):
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
    _left_behind.clear()
