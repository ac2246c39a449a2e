"""The end of this process: tell the peers how it ends, and make sure that it does end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from multiprocessing import util
from types import TracebackType

from dpfuse.comm.waiting import forget_unfinished_works, has_unfinished_works
from dpfuse.liveness.consequences import end_now
from dpfuse.liveness.diagnosis import end_with
from dpfuse.liveness.heartbeat import Heartbeat

__all__ = ["announce_by", "announce_error", "announce_exit"]

_heartbeats: list[Heartbeat] = []
_installed = False
_finalizer: util.Finalize | None = None
_caller_exits = False  # whether a caller of `announce_exit` ends the process
_code = 0  # with which this process ends after an error that nothing has caught; 0 without one


def announce_by(heartbeat: Heartbeat) -> None:
    """Tell the peers of a heartbeat when this process ends, and stop its thread before Python ends."""
    global _installed, _finalizer
    _heartbeats[:] = [one for one in _heartbeats if one.beats]
    _heartbeats.append(heartbeat)
    if not _installed:
        _installed = True
        before = sys.excepthook

        def announce_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            global _code
            # Else the program has called this hook by itself, and goes on. With Ctrl-C Python ends by the signal.
            if error is getattr(sys, "last_value", None) and not isinstance(error, KeyboardInterrupt):
                _code = 1
            announce_error(error)
            before(kind, error, trace)

        sys.excepthook = announce_and_print
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_forget)
    # A child of multiprocessing runs finalizers, and not atexit. It begins without those of its parent.
    if _finalizer is None or not _finalizer.still_active():
        _finalizer = util.Finalize(None, _child_ends, exitpriority=0)


def announce_error(error: BaseException) -> None:
    """Tell the peers that this process ends with an exception."""
    for heartbeat in _heartbeats:
        heartbeat.announce(end_with(error))


def announce_exit(code: int = 0) -> None:
    """Tell the peers that this process ends, unless an error was announced, and stop all heartbeats.

    The caller then ends the process with this exit code.
    """
    global _caller_exits
    _caller_exits = True
    _stop(code)


def _stop(code: int) -> None:
    for heartbeat in _heartbeats:
        heartbeat.announce(heartbeat.unannounced_end(code))
        heartbeat.stop()
    _heartbeats.clear()


def _child_ends() -> None:
    """End the heartbeats of a child of multiprocessing, which calls this before it prints the error that ends it."""
    global _code
    error = sys.exc_info()[1]
    if error is not None:
        _code = 1
    if isinstance(error, SystemExit):
        _code = error.code if isinstance(error.code, int) else int(error.code is not None)
        error = error.__context__  # torch's processes catch an error, write it into a file, and exit
    if _code and error is not None:
        announce_error(error)
    _stop(_code)


def _at_exit() -> None:
    _stop(0)
    if _caller_exits:
        return
    if has_unfinished_works():
        # Python would now wait for threads of the back end, which wait for a peer that does not answer.
        end_now(1)
    if _code and not hasattr(sys, "ps1"):  # an interactive session goes on after an error
        # Other functions are to be called first. Then Python collects garbage, and takes its modules apart. There it
        # may wait for threads of the back end, which wait for Python's lock or for a peer.
        gc.enable()
        gc.callbacks.append(lambda _phase, _info: end_now(_code) if sys.is_finalizing() else None)


def _forget() -> None:
    """In a fork: the threads and works belong to the parent."""
    for heartbeat in _heartbeats:
        heartbeat.close()
    _heartbeats.clear()
    forget_unfinished_works()
