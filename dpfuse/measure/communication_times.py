"""How long buckets travel, and how much of that backward had to wait for. Knows works and clocks, no gradient."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm.completion import call_when_landed
from dpfuse.comm.waiting import NO_LIMIT
from dpfuse.comm.work import last_collective
from dpfuse.engine.events import Watcher
from dpfuse.engine.time_marks import Moment, has_passed, now, seconds_between

__all__ = ["CommunicationTimes"]

MOST = 1024  # spans of a GPU, after which those that have ended are added up


@dataclass
class CommunicationTimes(Watcher):
    """Totals over the synchronised backwards of this rank; complete once the measuring context has ended."""

    steps: int = 0
    collectives: int = 0  # one per bucket, of however many tensors
    nbytes: int = 0  # of what travels, with padding and report
    seconds: float = 0.0  # from sent to landed, summed over the buckets
    exposed: float = 0.0  # in which backward had nothing left to do but wait
    _spans: deque[tuple[str, Moment, Moment]] = field(default_factory=deque, repr=False)  # of GPUs
    _unended: dict[int, Moment] = field(default_factory=dict, repr=False)  # by id of a work: when it was sent
    _waiting: Moment = field(default=0.0, repr=False)
    _landing: Moment | None = field(default=None, repr=False)  # when that was sent which is waited for
    _device: torch.device = field(default=torch.device("cpu"), repr=False)  # of the bucket that is waited for
    _side: torch.cuda.Stream | None = field(default=None, repr=False)

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """A bucket was handed to the process group."""
        self.steps += is_last
        self.collectives += 1
        self.nbytes += sum(tensor.nbytes for tensor in tensors)
        device = tensors[0].device
        started = now(device)
        if device.type == "cuda":
            self._side = self._side or torch.cuda.Stream(device)
            last = last_collective(work)
            if last is None:
                self._unended[id(work)] = started
                return
            with torch.cuda.stream(self._side):
                last.wait(NO_LIMIT)
                self._spans.append(("seconds", started, now(device)))
            return

        def landed() -> None:
            seconds = seconds_between(started, now(device))
            self.seconds += seconds  # without a call between reading and writing it: another thread may do the same

        call_when_landed(work, landed)

    def bucket_waited_for(self, flat: Tensor, work: dist.Work) -> None:
        """Backward is over and waits for a bucket."""
        self._device = flat.device
        self._waiting, self._landing = now(flat.device), self._unended.pop(id(work), None)

    def bucket_landed(self) -> None:
        """The bucket has landed."""
        landed = now(self._device)
        if isinstance(self._waiting, float):
            self.exposed += seconds_between(self._waiting, landed)
        else:
            self._spans.append(("exposed", self._waiting, landed))
            if self._landing is not None:
                self._spans.append(("seconds", self._landing, landed))
            while len(self._spans) > MOST and has_passed(self._spans[0][2]):
                self._add_up_first()

    def finish(self) -> None:
        """Turn what was recorded on the GPU into seconds; waits for the device."""
        while self._spans:
            self._add_up_first()

    def _add_up_first(self) -> None:
        name, begin, end = self._spans.popleft()
        setattr(self, name, getattr(self, name) + seconds_between(begin, end))
