"""What a thread of this process does: its line of the user's source, its collective, its processor time.

Read from another thread. Knows no rank.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import NamedTuple

from dpfuse.engine.user_line import INSIDE

__all__ = ["ThreadState", "thread_state"]

COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/algorithms/join.py")
LOGGER = "torch/distributed/c10d_logger.py"  # wraps each of their functions
UNDISTURBED = 1.0  # seconds for which Python does not switch threads; to read a stack takes some 20 microseconds
DEPTH = 100  # frames


class ThreadState(NamedTuple):
    """What a thread does."""

    at: str = ""  # the innermost line outside of libraries and dpfuse: "train.py:57 in evaluate"
    call: str = ""  # the function of torch.distributed that the thread is in, if it has not called out of there
    cpu: float | None = None  # seconds of processor time that it has used; None if unknown


def thread_state(thread: int) -> ThreadState:
    """Return what the thread with this identifier does."""
    stack = _stack(thread)
    call = _collective(stack)
    for file, line, function in stack:
        if not file.startswith(INSIDE):
            name = file.replace("\\", "/").rpartition("/")[2]
            return ThreadState(f"{name}:{line} in {function}", call, _cpu(thread))
    return ThreadState("", call, _cpu(thread))


def _stack(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of the innermost frames of a thread, innermost first; at most 100.

    The thread must not go on meanwhile: a frame may then lead to memory that is freed. So Python is asked not to switch
    threads, and not to collect garbage. Before Python 3.12 the making of a frame object can start a collection, and
    the finalizer of an object that it finds can let the thread go on. faulthandler cannot be used: it reads the list of
    all threads without the lock of that list, and crashes where a thread of C++ enters Python at that moment.
    """
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(UNDISTURBED)
    gc.disable()
    try:
        found: list[tuple[str, int, str]] = []
        frame = sys._current_frames().get(thread)
        while frame is not None and len(found) < DEPTH:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found
    finally:
        if collects:
            gc.enable()
        sys.setswitchinterval(interval)


def _collective(stack: list[tuple[str, int, str]]) -> str:
    """Return the outermost of the calls of torch.distributed at the end of the stack."""
    found = ""
    for file, _, function in stack:
        path = file.replace("\\", "/")
        if not path.endswith((*COLLECTIVES, LOGGER)):
            break
        if not path.endswith(LOGGER):
            found = function
    return found


def _cpu(thread: int) -> float | None:
    try:
        if not any(one.ident == thread for one in threading.enumerate()):
            return None  # the clock of a thread that has ended may show anything
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError, OverflowError):  # some systems have no such clock
        return None
