"""How long buckets travel, and how much of that backward had to wait for. Knows works and clocks, no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm.completion import call_when_landed
from dpfuse.comm.waiting import NO_LIMIT
from dpfuse.engine.events import Watcher

__all__ = ["CommunicationTimes"]


@dataclass
class CommunicationTimes(Watcher):
    """Totals over the synchronised backwards of this rank; complete once the measuring context has ended."""

    steps: int = 0
    collectives: int = 0  # one per bucket, of however many tensors
    nbytes: int = 0  # of what travels, with padding and report
    seconds: float = 0.0  # from sent to landed, summed over the buckets
    exposed: float = 0.0  # in which backward had nothing left to do but wait
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)
    _waiting: float | torch.cuda.Event = field(default=0.0, repr=False)
    _side: torch.cuda.Stream | None = field(default=None, repr=False)

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """A bucket was handed to the process group."""
        self.steps += is_last
        self.collectives += 1
        self.nbytes += sum(tensor.nbytes for tensor in tensors)
        if tensors[0].is_cuda:
            start = _event()
            self._side = self._side or torch.cuda.Stream()
            with torch.cuda.stream(self._side):
                work.wait(NO_LIMIT)
                self._events.append(("seconds", start, _event()))
            return
        started = perf_counter()

        def landed() -> None:
            self.seconds += perf_counter() - started

        call_when_landed(work, landed)

    def bucket_waited_for(self, flat: Tensor) -> None:
        """Backward is over and waits for a bucket."""
        self._waiting = _event() if flat.is_cuda else perf_counter()

    def bucket_landed(self) -> None:
        """The bucket has landed."""
        if isinstance(self._waiting, float):
            self.exposed += perf_counter() - self._waiting
        else:
            self._events.append(("exposed", self._waiting, _event()))

    def finish(self) -> None:
        """Turn what was recorded on the GPU into seconds; waits for the device."""
        for name, start, end in self._events:
            end.synchronize()
            setattr(self, name, getattr(self, name) + start.elapsed_time(end) / 1000)
        self._events.clear()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
