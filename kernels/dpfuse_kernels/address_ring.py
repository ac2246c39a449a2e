"""Device copies of address lists, uploaded only when they change. Knows no table and no kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["AddressRing", "CudaStreams", "Entry", "HostStreams"]

# Three entries are enough for safety. Four hold the lists for pack and unpack of two alternating gradient sets.
ENTRIES = 4


class HostStreams:
    """Stream operations on the CPU, where the host is the only stream: nothing has to wait."""

    def current(self) -> Any:
        """Return the stream on which the next operation will run; it is hashable."""
        return None

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    def record(self, stream: Any) -> Any:
        """Return an event after all work that was submitted to `stream`."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Let later work on `stream` wait for `event`, without blocking the host."""

    def synchronize(self, event: Any) -> None:
        """Block the host until `event` has passed."""


class CudaStreams(HostStreams):
    """Stream operations of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, torch.cuda.Stream] = {}
        self._index: int = device.index

    def current(self) -> Any:
        # `current_stream` makes a new object at each call. Reading only the handle takes a tenth of the time.
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self._device)
        return stream

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        event.synchronize()


@dataclass(eq=False)
class Entry:
    """A copy of one address list on the device."""

    host: torch.Tensor  # [n] int64, pinned where there is a device
    device: torch.Tensor  # [n] int64
    addresses: list[int] | None = None
    uploaded: Any = None  # event after the upload
    # Streams ordered after the upload, which may read `device`. A list: `hash` of a stream is Python code of torch.
    streams: list[Any] = field(default_factory=list)
    passed: dict[Any, Any] | None = None  # per stream the event after the last kernel that reads `device`, if known
    captured: bool = False  # a CUDA graph reads `device` at each replay: never write it again

    def read_again(self, addresses: list[int]) -> bool:
        """Note that a kernel reads the copy again, on a stream of its earlier readers, and not in a graph.

        Args:
            addresses: the list that those readers passed.

        Returns:
            Whether the copy still holds that very list. Another list with equal addresses is not recognised.
        """
        if self.addresses is not addresses:
            return False
        self.passed = None
        return True


class AddressRing:
    """Keeps the last few address lists on the device and uploads a list only when it is new.

    Usually addresses repeat, and a call costs one comparison of lists. Before an entry is rewritten, its upload from
    pinned host memory has run. Its device memory is overwritten after the kernels that read it.

    Args:
        count: addresses per list.
        device: device of the copies.
        streams: stream operations; by default those of `device`.

    Attributes:
        uploads: number of lists copied to the device so far.
        latest: the copy that the last call of `device_copy` returned, and what is known about it.

    Example:
        >>> ring = AddressRing(2, torch.device("cpu"))
        >>> ring.device_copy([16, 32]).tolist(), ring.device_copy([16, 32]).tolist(), ring.uploads
        ([16, 32], [16, 32], 1)
    """

    def __init__(self, count: int, device: torch.device, streams: HostStreams | None = None) -> None:
        self._count = count
        self._device = device
        self._streams = streams or (CudaStreams(device) if device.type == "cuda" else HostStreams())
        self._entries: list[Entry] = []
        self.latest: Entry | None = None
        self.uploads = 0

    def device_copy(self, addresses: list[int]) -> torch.Tensor:
        """Return the list on the device, int64 [count], ready for a kernel on the current stream.

        Args:
            addresses: the ring keeps this list; it must not change later.

        Raises:
            ValueError: The list is new, and a CUDA graph is being captured.
        """
        streams = self._streams
        current = streams.current()
        capturing = streams.capturing()
        for entry in self._entries:
            if entry.addresses is addresses or entry.addresses == addresses:
                entry.addresses = addresses  # the caller's own list, which it is likely to pass again
                break
        else:
            if capturing:
                raise ValueError(
                    f"{self._changed(addresses)} tensors are not where the last call found them, while a CUDA "
                    "graph is being captured. Expected the addresses of an earlier call, because a graph cannot upload "
                    "new ones. Keep gradients as bucket views or use zero_grad(set_to_none=False), and run a step "
                    "before the capture."
                )
            entry = self._upload(addresses, current)
        if current not in entry.streams:
            # A capture cannot wait for an event from outside it. It need not: torch.cuda.graph synchronises the device
            # before a capture begins, so the upload has run.
            if not capturing:
                streams.wait(current, entry.uploaded)
            entry.streams.append(current)
        if capturing:
            entry.captured = True
        entry.passed = None
        self.latest = entry
        return entry.device

    def _upload(self, addresses: list[int], current: Any) -> Entry:
        for used in self._entries:
            if used.passed is None and not used.captured:
                used.passed = {stream: self._streams.record(stream) for stream in used.streams}
        entry = self._free_entry(current)
        entry.host.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        entry.device.copy_(entry.host, non_blocking=True)
        entry.addresses = addresses  # not a copy: comparing a list with itself costs almost nothing
        entry.uploaded = self._streams.record(current)
        entry.streams = [current]
        self.uploads += 1
        self._entries.append(entry)  # the newest is last
        return entry

    def _free_entry(self, current: Any) -> Entry:
        """Return an entry that the host may write now, and that the device may write after the work on `current`."""
        free = [entry for entry in self._entries if not entry.captured]
        if len(free) < ENTRIES:
            pinned = self._device.type == "cuda"
            with torch.inference_mode(False):  # what is made there cannot be written outside of it
                host = torch.empty(self._count, dtype=torch.int64, pin_memory=pinned, device="cpu")
                return Entry(host, torch.empty(self._count, dtype=torch.int64, device=self._device))
        oldest = free[0]
        self._entries.remove(oldest)
        self._streams.synchronize(oldest.uploaded)
        # Not after what these streams do now: the stream of a collective may be busy for long.
        for stream, event in (oldest.passed or {}).items():
            if stream != current:
                self._streams.wait(current, event)
        return oldest

    def _changed(self, addresses: list[int]) -> str:
        if not self._entries:
            return "All"
        last = self._entries[-1].addresses or []
        moved = sum(new != old for new, old in zip(addresses, last, strict=True))
        return f"{moved} of {self._count}"
