"""CUDA streams: the streams on which gradients were written, and a side stream. Knows no bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm.waiting import NO_LIMIT
from dpfuse.engine.torch_private import OnStream, no_graph
from dpfuse_kernels.address_ring import CudaStreams

__all__ = ["HostCopy", "SideStream", "WritingStreams", "capturing", "new_stream", "writers_on"]

_orphans: list[tuple[Any, list[object]]] = []  # events, and the memory that must not be freed before them


def capturing() -> bool:
    """Whether the current CUDA stream is being captured in a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """A copy of a few values for the host, which reads them later. On CUDA it then waits for the copy alone.

    Args:
        values: on any device, of any shape. On CUDA the copy begins now, on the current stream of their device.

    Attributes:
        late: whether the values come from a GPU.
        arriving: the values on the CPU, once `wait` has returned; the next copy changes them.
    """

    def __init__(self, values: Tensor) -> None:
        self.late = values.is_cuda
        self._event: torch.cuda.Event | None = None
        self._outlives = False
        with torch.inference_mode(False):  # what is made there cannot be written outside of it
            self.arriving = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=self.late)
        self._streams = CudaStreams(values.device)  # not always the current device
        self.take(values)

    def take(self, values: Tensor) -> None:
        """Copy other values of the same shape, dtype and device. Those before must have been read, or are lost."""
        self.arriving.copy_(values, non_blocking=True)
        if self.late:
            self._event = self._streams.current().record_event(self._event)

    def written(self) -> None:
        """Note that what the current stream has been given last, a kernel, writes the values to `arriving`."""
        if self.late:
            self._event = self._streams.current().record_event(self._event)
            if not self._outlives:  # torch does not know that a kernel uses this memory
                finalize(self, _keep_until, self._event, [self.arriving]).atexit = False
                self._outlives = True

    def read(self) -> list[Any]:
        """Return the values, as `Tensor.tolist` does, once they have arrived."""
        self.wait()
        return list(self.arriving.tolist())

    def wait(self) -> None:
        """Wait until the values have arrived."""
        if self._event is not None:
            self._event.synchronize()


class WritingStreams:
    """The streams on which gradients of one bucket became ready since it was last packed.

    Autograd finishes a gradient on the stream of its forward. The pack runs on the stream of the last gradient, and
    must not begin before the other streams are done. At the end of a backward nothing is to be noted: before autograd
    calls what was queued for the end, it lets the current stream wait for all streams that have written gradients.

    Args:
        device: of the gradients, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: dict[int, None] = {}  # handles, in the order in which they were noted

    def noting(self, marker: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a ready mark that notes the current stream, then calls `marker`."""
        noted, index, is_compiling = self._noted, self._device.index, torch.compiler.is_dynamo_compiling
        # Each call of `current_stream` makes a new object; to get the handle alone takes a tenth of the time.
        handle_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

        def mark_ready(param: Any) -> None:  # called for each gradient
            if not is_compiling():  # what compiled autograd traces runs on one stream
                noted[handle_of(index)] = None
            marker(param)

        return mark_ready

    def precede(self) -> bool:
        """Let the current stream wait for all noted streams, and forget them. Return whether there was another one."""
        noted = self._noted
        noted.pop(torch._C._cuda_getCurrentRawStream(self._device.index), None)
        if not noted:
            return False
        others = [_stream_of(handle, self._device) for handle in noted]
        noted.clear()
        current, in_capture = torch.cuda.current_stream(self._device), capturing()
        for stream in others:
            # A captured stream cannot wait for one outside its graph, and need not: a capture begins when all is done.
            if not in_capture or _is_captured(stream):
                current.wait_stream(stream)
        return True


def writers_on(device: torch.device) -> WritingStreams | None:
    """Return new `WritingStreams` for a bucket on `device`; None if the device has no streams."""
    return WritingStreams(device) if device.type == "cuda" else None


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream on `device`; None if the device has no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    # For torch, an external stream with handle 0 is a new one.
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class SideStream:
    """A stream besides that of backward, and the memory that its kernels read and write.

    The code that queues calls `join` at the end of backward, before other code touches what is written. If `join` is
    never called, since the backward died and the model with it, the memory still outlives what was queued.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        is_cuda = hasattr(self._stream, "stream_id")
        self._on: Callable[[], AbstractContextManager[object]] = partial(self._module.stream, self._stream)
        if is_cuda:
            on_stream = OnStream(self._stream)
            self._on = lambda: on_stream
        self._held: list[object] = []
        finalize(self, _outlive, self._held, self._stream).atexit = False

    def queue(self, work: dist.Work, unpack: Callable[[], None], held: Sequence[object]) -> bool:
        """Run `unpack` on the side stream after `work`. The current stream goes on.

        Args:
            work: a collective, whose `wait` orders the current stream after it.
            unpack: queues kernels on the current stream.
            held: owners of all memory that these kernels read and write; no other code may use it until `join`.

        Returns:
            Whether everything was queued. If not, the later delivery runs into the same error and raises it.
        """
        self._held += held
        try:
            with self._on(), no_graph():
                work.wait(NO_LIMIT)
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
    _keep_until(stream.record_event() if held else None, list(held))


def _keep_until(event: Any, held: list[object]) -> None:
    if held:
        _orphans.append((event, held))
    if not capturing():  # a query would break the capture
        for orphan in [orphan for orphan in _orphans if orphan[0].query()]:
            with suppress(ValueError):  # another thread may add and remove some meanwhile
                _orphans.remove(orphan)
