"""A launch is made again only where nothing differs from it. The kernel and the device are pretended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dpfuse_kernels.address_ring import AddressRing
from dpfuse_kernels.launcher import Dispatcher, Repeatable


class Bound:
    """A compiled kernel that notes its launches."""

    def __init__(self) -> None:
        self.stream = 7
        self.refuses = False
        self.breaks = False
        self.launched: list[tuple[int, int, tuple[Any, ...]]] = []

    def stream_of(self, device: int) -> int:
        return self.stream

    def whole(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return ("function", *arguments)

    def launch_whole(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> bool:
        if self.breaks:
            raise TypeError("another Triton")
        if not self.refuses:
            self.launched.append((programs, stream, arguments))
        return not self.refuses


class Device:
    """What torch says of the device."""

    current, captures = 0, False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Device]]:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: Device.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: Device.captures, raising=False)
    yield Device
    Device.current, Device.captures = 0, False


def a_launch() -> tuple[Dispatcher, Repeatable, Bound, AddressRing]:
    dispatcher, bound, ring = Dispatcher(torch.device("cuda", 0)), Bound(), AddressRing(2, torch.device("cpu"))
    ring.device_copy([16, 32])
    dispatcher._bound["kernel",] = bound  # type: ignore[assignment]
    call = dispatcher.repeatable(("kernel",), 3, (1, 2), ring.latest)
    assert call is not None
    return dispatcher, call, bound, ring


def test_it_is_made_again_with_the_same_arguments_and_counted(device: type[Device]) -> None:
    dispatcher, call, bound, _ = a_launch()
    assert dispatcher.repeat(call)
    assert dispatcher.repeat(call)
    assert bound.launched == [(3, 7, ("function", 1, 2))] * 2
    assert (dispatcher.launches, dispatcher.bound_launches) == (2, 2)


@pytest.mark.parametrize("what", ["stream", "device", "capture", "hook", "addresses", "Triton"])
def test_it_is_not_where_anything_differs(what: str, device: type[Device]) -> None:
    dispatcher, call, bound, ring = a_launch()
    if what == "stream":
        bound.stream = 8
    elif what == "device":
        device.current = 1
    elif what == "capture":
        device.captures = True
    elif what == "hook":
        bound.refuses = True
    elif what == "Triton":
        bound.breaks = True
    else:
        for address in range(4):
            ring.device_copy([address, address])
    assert not dispatcher.repeat(call)
    assert bound.launched == []
    assert dispatcher.launches == 0
    assert (dispatcher._bound["kernel",] is None) == (what == "Triton"), "Triton's own dispatcher is used from then on"


def test_a_launch_that_triton_made_itself_is_not_repeated() -> None:
    dispatcher, ring = Dispatcher(torch.device("cuda", 0)), AddressRing(1, torch.device("cpu"))
    ring.device_copy([16])
    assert dispatcher.repeatable(("kernel",), 1, (1,), ring.latest) is None
