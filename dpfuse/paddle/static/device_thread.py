"""Gives a device's thread the settings of the thread that called run(). Knows no program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from dpfuse.paddle.static.replica import Replica

__all__ = ["on_device"]


def on_device(function: Callable[[Replica], None]) -> Callable[[Replica], None]:
    """Wrap `function` for another thread, which gets the present settings of this thread for the replica's device.

    Autocast, the current device and its stream are settings of a thread.
    """
    autocast = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if kind == "cpu" or torch.cuda.is_available()
    }
    # The devices' threads use the streams of this thread, so its later work comes after theirs.
    streams = {}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        streams = {index: torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())}

    def call(replica: Replica) -> None:
        with ExitStack() as settings:
            enabled, dtype = autocast[replica.device.type]
            settings.enter_context(torch.autocast(replica.device.type, dtype=dtype, enabled=enabled))
            if replica.device.type == "cuda":
                settings.enter_context(torch.cuda.device(replica.device))
                if replica.device.index in streams:
                    settings.enter_context(torch.cuda.stream(streams[replica.device.index]))
            function(replica)

    return call
