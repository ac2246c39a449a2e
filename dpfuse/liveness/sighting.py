"""Where a thread of this process is in its source, seen from another thread. Knows no rank."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from types import FrameType
from typing import NamedTuple

__all__ = ["Sighting", "sight"]

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OURS = __file__.rpartition("liveness")[0]
COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.algorithms.join")
LOGGER = "torch.distributed.c10d_logger"  # wraps each of their functions


class Sighting(NamedTuple):
    """What a thread does."""

    at: str = ""  # the innermost line that is neither a library's nor ours: "train.py:57 in evaluate"
    call: str = ""  # the function of torch.distributed in which it is, if it has called nothing else from there
    cpu: float | None = None  # seconds of processor time that it has used; None where that is not known


def sight(thread: int) -> Sighting:
    """Look at a thread, by its identifier."""
    frame = sys._current_frames().get(thread)
    call = _collective(frame)
    while frame is not None and frame.f_code.co_filename.startswith((*LIBRARIES, OURS, "<frozen")):
        frame = frame.f_back
    if frame is None:
        return Sighting("", call, _cpu(thread))
    file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return Sighting(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}", call, _cpu(thread))


def _collective(frame: FrameType | None) -> str:
    """The outermost of the calls of torch.distributed that end the stack."""
    found = ""
    while frame is not None and frame.f_globals.get("__name__") in (*COLLECTIVES, LOGGER):
        if frame.f_globals.get("__name__") != LOGGER:
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def _cpu(thread: int) -> float | None:
    try:
        if not any(one.ident == thread for one in threading.enumerate()):
            return None  # the clock of a thread that has ended may be anything
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError, OverflowError):  # not on every system
        return None
