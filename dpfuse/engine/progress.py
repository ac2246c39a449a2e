"""Have collectives that nobody waits for come to an end? Asked by another thread than the one that trains."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

__all__ = ["progress_of"]

RELAXED = 2  # cudaStreamCaptureModeRelaxed


def progress_of(work: dist.Work, device: str) -> Callable[[], bool] | None:
    """What tells whether the collectives up to `work`, which has been waited for, have come to an end.

    Args:
        work: of a back end whose `wait()` only orders what follows on the device.
        device: type of the device of its tensors.

    Returns:
        A function for another thread; None while a CUDA graph is captured, in which nothing runs yet.
    """
    if device != "cuda":
        return work.is_completed
    if torch.cuda.is_current_stream_capturing():
        return None
    # Not the work itself: it would keep gradients that travel where they lie, which must have no second owner.
    event = torch.cuda.Event()
    event.record()
    return lambda: _query(event)


def _query(event: torch.cuda.Event) -> bool:
    _permit_queries()
    return bool(event.query())


_permitted = threading.local()


def _permit_queries() -> None:
    """Let this thread ask for events while another one captures a graph, which would otherwise spoil the capture."""
    if getattr(_permitted, "done", False):
        return
    _permitted.done = True
    with suppress(OSError, AttributeError):
        with open("/proc/self/maps", encoding="utf-8") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libcudart" in line}
        for path in paths:
            ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
