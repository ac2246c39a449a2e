"""CUDA streams that only pretend: what waits for what is noted. For machines without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["PretendedStream", "PretendedStreams", "PretendedWork"]


class PretendedStream:
    """A stream that tells `streams` what it waits for."""

    def __init__(self, streams: PretendedStreams, name: str, *, captured: bool = False) -> None:
        self.streams, self.name, self.captured = streams, name, captured

    def wait_stream(self, other: PretendedStream) -> None:
        """Note it."""
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """One that has not passed yet."""
        return PretendedEvent()


class PretendedEvent:
    """It has passed once somebody says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        """Has it?"""
        return self.passed


class PretendedWork:
    """The work of a collective, for which the current stream waits; the wait may fail."""

    def __init__(self, streams: PretendedStreams, error: Exception | None = None) -> None:
        self.streams, self.error = streams, error

    def wait(self, timeout: object) -> None:
        """Note it."""
        self.streams.log.append(f"{self.streams.current.name} waits for the work")
        if self.error is not None:
            raise self.error


class PretendedStreams:
    """What `torch.cuda` is asked for of streams, for one device; the same names.

    Attributes:
        log: what happened, in order.
        current: the stream that operations go to.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._made: dict[int, PretendedStream] = {}  # by handle, which names one stream as long as the device is there
        self.current = self._main = PretendedStream(self, "main")
        self.initialized = True

    def Stream(self, device: torch.device) -> PretendedStream:  # noqa: N802  # torch's name
        """A new stream, called side."""
        return self.new("side")

    def current_stream(self, device: torch.device | None = None) -> PretendedStream:
        """The stream that operations go to."""
        return self.current

    def new(self, name: str, *, captured: bool = False) -> PretendedStream:
        """A new stream."""
        made = PretendedStream(self, name, captured=captured)
        self._made[id(made)] = made
        return made

    def default_stream(self, device: torch.device) -> PretendedStream:
        """The stream that was current at first."""
        return self._main

    def handle(self) -> int:
        """That of the current stream."""
        return 0 if self.current is self._main else id(self.current)

    def ExternalStream(self, handle: int, device: torch.device) -> PretendedStream:  # noqa: N802  # torch's name
        """The stream with this handle."""
        return self._made[handle]

    @contextmanager
    def stream(self, stream: PretendedStream) -> Iterator[None]:
        """Make it the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def install(self, monkeypatch) -> None:
        """Let torch ask these."""
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.handle(), raising=False)
        monkeypatch.setattr("torch.get_device_module", lambda device=None: self)
        monkeypatch.setattr("torch.cuda.current_stream", self.current_stream)
        monkeypatch.setattr("torch.cuda.default_stream", self.default_stream)
        monkeypatch.setattr("torch.cuda.ExternalStream", self.ExternalStream)
        monkeypatch.setattr("torch.cuda.stream", self.stream)
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: self.initialized)
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: self.current.captured)
        # On a GPU, private gradients have memory of their own.
        monkeypatch.setattr("dpfuse.engine.assembly.COUNTS_REFERENCES", False)
