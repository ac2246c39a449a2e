"""What a program asks of the pretended device, on which it runs: counts of calls, a log of streams, failing calls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["LIBRARY", "counted", "fail", "host_waits", "is_present", "logged", "waiting"]

LIBRARY = "PRETENDED_GPU"  # the environment variable with the path of the built device.cpp


def is_present() -> bool:
    """Return whether this process runs on the pretended device."""
    return LIBRARY in os.environ


@cache
def _device() -> Any:
    device = ctypes.CDLL(os.environ[LIBRARY])
    device.pretended_counts.restype = device.pretended_log_text.restype = ctypes.c_char_p
    device.pretended_fail.argtypes = [ctypes.c_char_p, ctypes.c_long]
    return device


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the calls of the runtime, the driver and NCCL inside the context, by name."""
    found: dict[str, int] = {}
    _device().pretended_reset()
    yield found
    lines = _device().pretended_counts().decode().splitlines()
    found |= {name: int(count) for name, count in (line.split("\t") for line in lines)}


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect a line for each call inside the context that a stream or the host sees."""
    lines: list[str] = []
    _device().pretended_reset()
    _device().pretended_log(1)
    yield lines
    _device().pretended_log(0)
    lines += _device().pretended_log_text().decode().splitlines()


def fail(call: str, after: int = 1) -> None:
    """Let a call of this name fail once: the next one, or with `after` the one after so many."""
    _device().pretended_fail(call.encode(), after)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Tell the device that this host waits for its peers, so that it can tell a hang from what it does not model."""
    tell = _device().pretended_host_waits
    tell.argtypes = [ctypes.c_char_p]
    tell(what.encode())
    try:
        yield
    finally:
        tell(b"")


def host_waits() -> None:
    """Tell the device whenever this host waits in a store."""
    import torch.distributed as dist  # the build of the device needs no torch

    def telling(name: str) -> Any:
        wait = getattr(dist.Store, name)

        def tell_and_wait(store: Any, *args: Any) -> Any:
            with waiting(f"store.{name}({str(args[0])[:80] if args else ''})"):
                return wait(store, *args)

        return tell_and_wait

    for name in ("get", "wait", "barrier"):
        if hasattr(dist.Store, name):
            setattr(dist.Store, name, telling(name))
