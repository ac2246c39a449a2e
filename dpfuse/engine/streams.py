"""CUDA streams: those that gradients were written on, and one beside backward. Knows no bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist

__all__ = ["SideStream", "WritingStreams", "capturing", "writers_on"]

_orphans: list[tuple[Any, list[object]]] = []  # events, and what must not be freed before them


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


class SideStream:
    """One stream beside that of backward, and all that what was queued there reads and writes.

    The code that queues calls `join` at the end of backward, before other code touches what is written. If `join` is
    never called, since the backward died and the model with it, the memory still outlives what was queued.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._held: list[object] = []
        finalize(self, _outlive, self._held, self._stream).atexit = False

    def queue(self, work: dist.Work, unpack: Callable[[], None], held: Sequence[object]) -> bool:
        """Have `unpack` run behind `work`, and behind all that `work` waits for; the current stream goes on.

        Args:
            work: a collective, whose `wait` orders the current stream behind it.
            unpack: queues kernels on the current stream.
            held: owners of all memory that these read and write; no other code may use it until `join`.

        Returns:
            Whether everything was queued. If not, the later delivery runs into the same error and raises it.
        """
        self._held += held
        try:
            with self._module.stream(self._stream), torch.no_grad():
                work.wait()
                unpack()
        except (ValueError, RuntimeError):
            return False
        return True

    def join(self) -> None:
        """Let the current stream wait for all that was queued."""
        if self._held:
            self._module.current_stream(self._device).wait_stream(self._stream)
            self._held.clear()


def _outlive(held: list[object], stream: Any) -> None:
    """Keep what was never joined until the stream has finished with it."""
    _orphans[:] = [(event, owners) for event, owners in _orphans if not event.query()]
    if held:
        _orphans.append((stream.record_event(), list(held)))
