"""Address lists reach the device once per change, and never too early, on streams that run late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dpfuse_kernels.address_ring import ENTRIES, AddressRing, HostStreams
from dpfuse_kernels.flatten import flatten
from dpfuse_kernels.unflatten import unflatten
from tests.kernels.layouts import guarded


@dataclass(eq=False)
class LateStream:
    """Runs what is submitted only when it must: in order, behind the events it waits for."""

    queue: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.done += 1
            self.queue[self.done - 1]()


@dataclass
class LateStreams(HostStreams):
    """A device with several late streams, on which the test chooses the current one."""

    stream: LateStream = field(default_factory=LateStream)
    graph: bool = False
    waits: int = 0
    blocked: int = 0

    def current(self) -> Any:
        return self.stream

    def capturing(self) -> bool:
        return self.graph

    def record(self, stream: Any) -> Any:
        return stream, len(stream.queue)

    def wait(self, stream: Any, event: Any) -> None:
        self.waits += 1
        other, upto = event
        stream.queue.append(lambda: other.run(upto))

    def synchronize(self, event: Any) -> None:
        self.blocked += 1
        stream, upto = event
        stream.run(upto)


class LateTensor:
    """A device tensor whose copies run when its stream does; the host memory is read only then."""

    def __init__(self, memory: torch.Tensor, streams: LateStreams) -> None:
        self.memory, self._streams = memory, streams

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self._streams.stream.queue.append(lambda: self.memory.copy_(source))


class LateRing(AddressRing):
    """A ring over late streams."""

    def _free_entry(self, current: Any) -> Any:
        entry = super()._free_entry(current)
        if isinstance(entry.device, torch.Tensor):
            entry.device = LateTensor(entry.device, self._streams)
        return entry


def read_later(streams: LateStreams, ring: AddressRing, addresses: list[int], seen: list[tuple[Any, Any]]) -> None:
    """A kernel on the current stream that reads the device copy when it runs."""
    last = ring.latest
    again = last is not None and streams.stream in last.streams and last.read_again(addresses)
    copy: Any = last.device if again else ring.device_copy(addresses)
    wanted = list(addresses)
    streams.stream.queue.append(lambda: seen.append((copy.memory.tolist(), wanted)))


def test_every_kernel_reads_its_own_list_however_late_the_streams_run() -> None:
    streams = LateStreams()
    ring = LateRing(3, torch.device("cpu"), streams)
    seen: list[tuple[Any, Any]] = []
    every = [streams.stream, LateStream(), LateStream()]
    for step in range(50):
        streams.stream = every[step % 3]
        read_later(streams, ring, [step, step + 1, step // 7], seen)
        streams.stream = every[(step + 1) % 3]
        read_later(streams, ring, [step, step + 1, step // 7], seen)
    for stream in every:
        stream.run(len(stream.queue))
    assert len(seen) == 100
    assert all(got == wanted for got, wanted in seen)
    assert ring.uploads == 50
    assert streams.blocked == 50 - ENTRIES, "the host waits for nothing but uploads that are a ring ago"


def test_an_entry_is_written_behind_its_own_readers_and_not_behind_later_work() -> None:
    streams = LateStreams()
    ring = LateRing(1, torch.device("cpu"), streams)
    seen: list[tuple[Any, Any]] = []
    main, side = streams.stream, LateStream()
    late: list[str] = []
    read_later(streams, ring, [0], seen)
    streams.stream = side
    read_later(streams, ring, [0], seen)
    for address in range(1, ENTRIES + 1):
        streams.stream = main
        read_later(streams, ring, [address], seen)
        side.queue.append(lambda: late.append("a collective that began later"))
    main.run(len(main.queue))
    assert len(seen) == ENTRIES + 2, "the reader on the side stream has run"
    assert all(got == wanted for got, wanted in seen)
    assert late == []


def test_an_entry_that_is_read_again_is_written_behind_that_reader() -> None:
    streams = LateStreams()
    ring = LateRing(1, torch.device("cpu"), streams)
    seen: list[tuple[Any, Any]] = []
    main, side = streams.stream, LateStream()
    for address in range(ENTRIES - 1):
        read_later(streams, ring, [address], seen)
    streams.stream = side
    read_later(streams, ring, [0], seen)  # after others were uploaded behind its first reader
    streams.stream = main
    for address in range(ENTRIES - 1, 2 * ENTRIES):
        read_later(streams, ring, [address], seen)
    main.run(len(main.queue))
    side.run(len(side.queue))
    assert len(seen) == 2 * ENTRIES + 1
    assert all(got == wanted for got, wanted in seen)


def test_who_reads_a_copy_again_is_waited_for_like_any_other_reader() -> None:
    streams = LateStreams()
    ring = LateRing(1, torch.device("cpu"), streams)
    seen: list[tuple[Any, Any]] = []
    main, side = streams.stream, LateStream()
    held = [0]
    streams.stream = side
    read_later(streams, ring, held, seen)
    streams.stream = main
    for address in range(1, ENTRIES):
        read_later(streams, ring, [address], seen)
    streams.stream = side
    read_later(streams, ring, held, seen)
    assert ring.latest.read_again(held)
    read_later(streams, ring, held, seen)
    streams.stream = main
    for address in range(ENTRIES, 2 * ENTRIES):
        read_later(streams, ring, [address], seen)
    main.run(len(main.queue))
    side.run(len(side.queue))
    assert all(got == wanted for got, wanted in seen)


def test_a_copy_is_read_again_only_for_the_very_list_that_it_holds() -> None:
    ring = AddressRing(1, torch.device("cpu"))
    held = [0]
    ring.device_copy(held)
    first = ring.latest
    assert first.read_again(held)
    assert not first.read_again([0]), "an equal list would have to be compared"
    for address in range(1, ENTRIES):
        ring.device_copy([address])
    assert ring.latest is not first
    assert first.read_again(held), "other lists lie elsewhere"
    ring.device_copy([ENTRIES])
    assert not first.read_again(held), "another list was uploaded there"


def test_a_known_list_is_not_uploaded_again() -> None:
    ring = AddressRing(2, torch.device("cpu"))
    lists = [[16 * i, 32] for i in range(ENTRIES)]
    for addresses in lists * 5:
        assert ring.device_copy(addresses).tolist() == addresses
    assert ring.uploads == ENTRIES


def test_capture_takes_known_lists_and_refuses_new_ones() -> None:
    streams = LateStreams()
    ring = AddressRing(2, torch.device("cpu"), streams)
    held = ring.device_copy([16, 32])
    streams.graph = True
    assert ring.device_copy([16, 32]) is held
    with pytest.raises(
        ValueError, match=r"1 of 2 tensors are not where .* CUDA graph .*Keep gradients as bucket views"
    ):
        ring.device_copy([16, 48])
    assert ring.uploads == 1


def test_what_a_graph_captured_is_never_written_again() -> None:
    streams = LateStreams()
    ring = AddressRing(1, torch.device("cpu"), streams)
    held = ring.device_copy([1])
    streams.graph = True
    ring.device_copy([1])
    streams.graph = False
    for address in range(2, 30):
        ring.device_copy([address])
    assert held.tolist() == [1]


def test_capture_before_any_upload_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"All tensors .*run a step before the capture"):
        AddressRing(1, torch.device("cpu"), LateStreams(graph=True)).device_copy([1])


def test_steady_state_uploads_nothing() -> None:
    gradients = [torch.randn(5), torch.randn(7)]
    table = guarded(gradients, torch.float32, torch.float32).table
    for _ in range(10):
        flatten(gradients, table, scale=0.5)
        unflatten(table, gradients)
    assert table.launcher.ring.uploads == 1
    for _ in range(3):
        flatten([None, gradients[1]], table, scale=0.5)
        unflatten(table, gradients)
    assert table.launcher.ring.uploads == 2
    assert table.launcher.dispatcher.launches == 26
