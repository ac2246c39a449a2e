"""What a thread of this process does: its line of the user's source, its collective, its processor time.

Read from another thread. Knows no rank.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import time
from typing import IO, NamedTuple

from dpfuse.engine.user_line import INSIDE

__all__ = ["ThreadState", "thread_state"]

COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/algorithms/join.py")
LOGGER = "torch/distributed/c10d_logger.py"  # wraps each of their functions
THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
LINE = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$', re.MULTILINE)


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
    stack = _stack(thread)
    call = _collective(stack)
    for file, line, function in stack:
        if not file.startswith(INSIDE):
            name = file.replace("\\", "/").rpartition("/")[2]
            return ThreadState(f"{name}:{line} in {function}", call, _cpu(thread))
    return ThreadState("", call, _cpu(thread))


def _stack(thread: int) -> list[tuple[str, str, str]]:
    """Return file, line and function of the innermost frames of a thread, innermost first; at most 100.

    Frames are not followed from Python: the thread goes on meanwhile. While torch.compile traces in it, a frame may
    then lead to memory that is freed. faulthandler reads the whole stack while no other thread can run.
    """
    try:
        with _scratch() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:  # no file can be made
        return []
    parts = THREAD.split(text)
    stacks = dict(zip(parts[1::2], parts[2::2], strict=True))
    return next((LINE.findall(stack) for number, stack in stacks.items() if int(number, 16) == thread), [])


def _scratch() -> IO[bytes]:
    """Return an empty file, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dpfuse-stack"), "w+b")
    return tempfile.TemporaryFile()


def _collective(stack: list[tuple[str, str, str]]) -> str:
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
