"""What a thread of this process does: its line of the user's source, its collective, its processor time.

Read from another thread. Knows no rank.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

from dpfuse.engine.user_line import user_frame

__all__ = ["ThreadState", "thread_state"]

COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.algorithms.join")
LOGGER = "torch.distributed.c10d_logger"  # wraps each of their functions


class ThreadState(NamedTuple):
    """What a thread does."""

    at: str = ""  # the innermost line outside of libraries and dpfuse: "train.py:57 in evaluate"
    call: str = ""  # the function of torch.distributed that the thread is in, if it has not called out of there
    cpu: float | None = None  # seconds of processor time that it has used; None if unknown


def thread_state(thread: int) -> ThreadState:
    """Return what a thread does.

    Args:
        thread: its identifier.
    """
    frame = sys._current_frames().get(thread)
    call = _collective(frame)
    frame, _ = user_frame(frame)
    if frame is None:
        return ThreadState("", call, _cpu(thread))
    file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return ThreadState(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}", call, _cpu(thread))


def _collective(frame: FrameType | None) -> str:
    """Return the outermost of the calls of torch.distributed at the end of the stack."""
    found = ""
    while frame is not None and frame.f_globals.get("__name__") in (*COLLECTIVES, LOGGER):
        if frame.f_globals.get("__name__") != LOGGER:
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def _cpu(thread: int) -> float | None:
    try:
        if not any(one.ident == thread for one in threading.enumerate()):
            return None  # the clock of a thread that has ended may show anything
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError, OverflowError):  # some systems have no such clock
        return None
