"""Moments of a training, by the host's clock or in the current stream of a GPU, and the seconds between two of them."""

from __future__ import annotations

from time import perf_counter

import torch

__all__ = ["Moment", "has_passed", "now", "seconds_between"]

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Return this moment: of the host, in seconds, or an event at the end of the current stream of a GPU.

    Example:
        >>> begin = now(torch.device("cpu"))
        >>> 0 <= seconds_between(begin, now(torch.device("cpu"))) < 10
        True
    """
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds from one moment to another one of the same kind. Waits for a device until the second one."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def has_passed(moment: Moment) -> bool:
    """Whether the device has come as far as that, so that nothing waits for it."""
    return isinstance(moment, float) or moment.query()
