"""Which CUDA streams gradients were written on, and the order that puts their pack behind all. Knows no bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["WritingStreams", "capturing", "writers_on"]


def capturing() -> bool:
    """Whether the current CUDA stream is being captured in a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class WritingStreams:
    """The streams on which gradients of one bucket became ready since it was packed last.

    Autograd runs a gradient's last step on the stream of its forward. The pack runs on that of the last of them, and
    must not begin before the others are done.

    Args:
        device: of the gradients, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, Any] = {}  # by handle

    def noting(self, marker: Callable[[Any], None]) -> Callable[[Any], None]:
        """A ready mark that notes the stream it is called on, then calls `marker`."""
        streams, device = self._streams, self._device
        # Torch makes a new object at each call of `current_stream`; the handle alone is had for a tenth of that.
        handle_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        index, is_compiling = device.index, torch.compiler.is_compiling

        def mark_ready(param: Any) -> None:
            if not is_compiling():  # what compiled autograd traces runs on one stream
                handle = handle_of(index)
                if handle not in streams:
                    streams[handle] = torch.cuda.current_stream(device)
            marker(param)

        return mark_ready

    def precede(self) -> bool:
        """Let the current stream wait for all of them, and forget them; was there any other?"""
        if not self._streams:
            return False
        others = dict(self._streams)
        self._streams.clear()
        others.pop(torch._C._cuda_getCurrentRawStream(self._device.index), None)
        if not others:
            return False
        current, in_capture = torch.cuda.current_stream(self._device), capturing()
        for stream in others.values():
            # A captured stream cannot wait for one outside its graph, and need not: a capture begins when all is done.
            if not in_capture or _is_captured(stream):
                current.wait_stream(stream)
        return True


def writers_on(device: torch.device) -> WritingStreams | None:
    """A new one for a bucket there; None where there are no streams."""
    return WritingStreams(device) if device.type == "cuda" else None


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
