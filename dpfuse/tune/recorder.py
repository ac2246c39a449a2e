"""When the gradients and buckets of real backwards were ready, sent and landed. Changes nothing of what it watches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dpfuse.engine import collective
from dpfuse.engine.landing import when_landed
from dpfuse.engine.plan import BucketPlan
from dpfuse.errors import DPFuseError
from dpfuse.tune.simulation import Schedule, schedule_of
from dpfuse.tune.timeline import Timeline

if TYPE_CHECKING:
    from dpfuse.engine.autograd import BackwardListener
    from dpfuse.engine.timing import BucketObserver

__all__ = ["BackwardRecorder", "timeline_of"]

Times = NDArray[np.float64]
Stamp = Any  # a float of perf_counter, or a CUDA event


@dataclass
class _Backward:
    begin: Stamp
    ready: dict[int, Stamp] = field(default_factory=dict)  # by parameter; of several, the last
    end: Stamp = None
    sent: list[Stamp] = field(default_factory=list)
    landed: dict[int, Stamp] = field(default_factory=dict)  # by place in `sent`
    waited: int = 0  # for how many of them
    complete: bool = False  # its last bucket was sent
    delivered: Stamp = None  # all is averaged


class BackwardRecorder:
    """Stands between a wrapper's engine hooks and its reducer, and writes down what passes.

    It is a `BackwardListener` that hands on to `listener`, a source of ready hooks that call others, and an observer
    of buckets as `CommunicationTimes` is. On CUDA it records events, and waits for nothing before it is asked.

    Args:
        listener: who listened before.
        count: number of parameters.
        on_cuda: whether gradients are on a GPU.
        skip: synchronised backwards to leave out, such as the first one, whose buckets are all sent at its end.
        after: called at the end of each backward that was recorded, outside of it; all ranks get there alike.

    Attributes:
        also: who is told of buckets, too.
    """

    def __init__(
        self,
        listener: BackwardListener,
        count: int,
        *,
        on_cuda: bool,
        skip: int = 0,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._count = count
        self._on_cuda = on_cuda
        self._skip = skip
        self._after = after
        self._backward: _Backward | None = None
        self._side: torch.cuda.Stream | None = None
        self._backwards: list[_Backward | None] = []  # None: this rank only shadowed those of others
        self.also: BucketObserver | None = None

    @property
    def steps(self) -> int:
        """How many synchronised backwards were recorded."""
        return len(self._backwards)

    def restart(self, count: int, *, skip: int = 0) -> None:
        """Forget everything; from now on there are `count` parameters."""
        self._count, self._skip = count, skip
        self._backwards.clear()

    def forget_last(self) -> None:
        """Forget the last backward that was recorded."""
        self._backwards.pop()

    def stamped(self, markers: Sequence[Callable[[Any], None]]) -> list[Callable[[Any], None]]:
        """Ready hooks by parameter that note the time before they call `markers`."""
        return [self._stamped(index, marker) for index, marker in enumerate(markers)]

    def open(self, *, announced: bool) -> None:
        """A backward begins."""
        self._backward = _Backward(self._now())
        self._listener.open(announced=announced)

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        """The outermost backward ended; what the listener does now is no longer backward."""
        backward = self._backward
        assert backward is not None
        backward.end = self._now()
        try:
            self._listener.close(reached_leaves)
            backward.delivered = self._now()
        finally:
            self._backward = None
        if backward.complete:
            self._keep(backward)

    def shadowed(self) -> None:
        """This rank has taken part in a backward of others, without one of its own."""
        self._keep(None)

    def abandon(self) -> None:
        """The open backward died of an exception."""
        self._backward = None
        self._listener.abandon()

    def sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """A bucket was handed to the process group."""
        if self.also is not None:
            self.also.sent(tensors, work, is_last=is_last)
        if (backward := self._backward) is None:
            return  # what is left of one that died
        place = len(backward.sent)
        backward.sent.append(self._now())
        backward.complete |= is_last
        if self._on_cuda:
            self._side = self._side or torch.cuda.Stream()
            with torch.cuda.stream(self._side):
                work.wait()
                backward.landed[place] = self._now()
        else:
            when_landed(work, lambda: backward.landed.setdefault(place, perf_counter()))

    def wait_begins(self, flat: Tensor) -> None:
        """Backward is over and waits for a bucket."""
        if self.also is not None:
            self.also.wait_begins(flat)

    def wait_ends(self) -> None:
        """The bucket has landed."""
        if self.also is not None:
            self.also.wait_ends()
        if (backward := self._backward) is not None:
            # Another thread tells when it landed, perhaps not yet.
            if not self._on_cuda:
                backward.landed.setdefault(backward.waited, perf_counter())
            backward.waited += 1

    def timeline(self, plan: BucketPlan, group: dist.ProcessGroup, *, wire_dtype: str | None = None) -> Timeline:
        """The typical backward of all ranks, the same on each of them; to be called on all.

        Raises:
            DPFuseError: the ranks recorded different numbers of backwards, or none.
        """
        return timeline_of(self.gather(group), plan, wire_dtype=wire_dtype)

    def gather(self, group: dist.ProcessGroup) -> Times:
        """The seconds of all ranks: [step, rank, parameter, and end of backward, and end of delivery].

        Steps that some rank only shadowed are left out. To be called on all ranks; the same on each of them.

        Raises:
            DPFuseError: the ranks recorded different numbers of backwards, or none.
        """
        device = collective.group_device(group)
        counts = [int(row) for row in collective.all_gather(torch.tensor([self.steps], device=device), group)]
        if min(counts) != max(counts) or not counts[0]:
            raise DPFuseError(
                f"the ranks recorded {counts} synchronised backwards; expected the same number on each, at least 1"
            )
        ours = torch.tensor(self._rows(), dtype=torch.float64, device=device)
        times: Times = torch.stack(collective.all_gather(ours, group), dim=1).cpu().numpy()
        return times[~np.isnan(times[:, :, -1]).any(axis=1)]

    def schedule(self, plan: BucketPlan, *, wire_dtype: str | None = None) -> Schedule:
        """The typical way of this rank's own buckets, next to which a simulated one can be held.

        `sent` is when a bucket was handed to the process group, which may still have been busy with others.

        Raises:
            DPFuseError: nothing was recorded, or not one collective per bucket of `plan`.
        """
        own = [one for one in self._backwards if one is not None]
        if not own or any(len(one.landed) != len(plan.buckets) for one in own):
            raise DPFuseError(
                f"expected records of {len(plan.buckets)} collectives in each backward, one per bucket, got "
                f"{[len(one.landed) for one in own]}; sparse gradients and communication hooks send others"
            )
        timeline = timeline_of(np.asarray([[self._row(one)] for one in own]), plan, wire_dtype=wire_dtype)
        orders = range(len(plan.buckets))
        sent = [median(self._seconds(one.begin, one.sent[order]) for one in own) for order in orders]
        landed = [median(self._seconds(one.begin, one.landed[order]) for one in own) for order in orders]
        return schedule_of(timeline, plan, sent, landed)

    def _rows(self) -> list[list[float]]:
        return [[math.nan] * (self._count + 2) if one is None else self._row(one) for one in self._backwards]

    def _row(self, one: _Backward) -> list[float]:
        """Seconds until each parameter was ready, NaN where it never was, until the end, until all was delivered."""
        stamps = [*(one.ready.get(index) for index in range(self._count)), one.end, one.delivered]
        return [self._seconds(one.begin, stamp) for stamp in stamps]

    def _keep(self, backward: _Backward | None) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._backwards.append(backward)
        self._after()

    def _stamped(self, index: int, marker: Callable[[Any], None]) -> Callable[[Any], None]:
        def mark_ready(param: Any) -> None:
            now = self._now()
            marker(param)  # may open the backward
            if self._backward is not None:
                self._backward.ready[index] = now

        return mark_ready

    def _now(self) -> Stamp:
        if not self._on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Stamp, end: Stamp | None) -> float:
        if end is None:
            return math.nan
        if not self._on_cuda:
            # A first ready mark that opens its backward was stamped just before it.
            return max(0.0, float(end - begin))
        end.synchronize()
        return max(0.0, float(begin.elapsed_time(end)) / 1000)


def timeline_of(times: Times, plan: BucketPlan, *, wire_dtype: str | None = None) -> Timeline:
    """The typical backward of those that `BackwardRecorder.gather` returned."""
    return Timeline.from_steps(plan.specs, times[:, :, :-2], times[:, :, -2], wire_dtype=wire_dtype)
