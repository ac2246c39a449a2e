"""When the gradients and buckets of real backwards were ready, sent and landed. Changes nothing of what it watches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse import collective
from dpfuse.errors import DPFuseError
from dpfuse.plan import BucketPlan
from dpfuse.tune.simulation import Schedule, schedule_of
from dpfuse.tune.timeline import Timeline

if TYPE_CHECKING:
    from dpfuse.autograd import BackwardListener

__all__ = ["BackwardRecorder"]

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
        self._backwards: list[_Backward] = []

    @property
    def steps(self) -> int:
        """How many synchronised backwards were recorded."""
        return len(self._backwards)

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
        finally:
            self._backward = None
        if not backward.complete:
            return
        if self._skip:
            self._skip -= 1
            return
        self._backwards.append(backward)
        self._after()

    def abandon(self) -> None:
        """The open backward died of an exception."""
        self._backward = None
        self._listener.abandon()

    def sent(self, flat: Tensor, work: dist.Work, *, is_last: bool) -> None:
        """A bucket was handed to the process group."""
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
            work.get_future().add_done_callback(lambda _: backward.landed.setdefault(place, perf_counter()))

    def wait_begins(self, flat: Tensor) -> None:
        """Backward is over and waits for a bucket."""

    def wait_ends(self) -> None:
        """The bucket has landed."""
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
        device = collective.group_device(group)
        counts = [int(row) for row in collective.all_gather(torch.tensor([self.steps], device=device), group)]
        if min(counts) != max(counts) or not counts[0]:
            raise DPFuseError(
                f"the ranks recorded {counts} synchronised backwards; expected the same number on each, at least 1"
            )
        ours = torch.tensor(self._rows(), dtype=torch.float64, device=device)
        times = torch.stack(collective.all_gather(ours, group), dim=1).cpu().numpy()  # [step, rank, parameter and end]
        return Timeline.from_steps(plan.specs, times[:, :, :-1], times[:, :, -1], wire_dtype=wire_dtype)

    def schedule(self, plan: BucketPlan, *, wire_dtype: str | None = None) -> Schedule:
        """The typical way of this rank's own buckets, next to which a simulated one can be held.

        `sent` is when a bucket was handed to the process group, which may still have been busy with others.

        Raises:
            DPFuseError: nothing was recorded, or not one collective per bucket of `plan`.
        """
        if not self._backwards or any(len(one.landed) != len(plan.buckets) for one in self._backwards):
            raise DPFuseError(
                f"expected records of {len(plan.buckets)} collectives in each backward, one per bucket, got "
                f"{[len(one.landed) for one in self._backwards]}; sparse gradients and communication hooks send others"
            )
        rows = [[row] for row in self._rows()]
        ready, ends = [[row[:-1] for row in rank] for rank in rows], [[row[-1] for row in rank] for rank in rows]
        timeline = Timeline.from_steps(plan.specs, ready, ends, wire_dtype=wire_dtype)
        orders = range(len(plan.buckets))
        sent = [median(self._seconds(one.begin, one.sent[order]) for one in self._backwards) for order in orders]
        landed = [median(self._seconds(one.begin, one.landed[order]) for one in self._backwards) for order in orders]
        return schedule_of(timeline, plan, sent, landed)

    def _rows(self) -> list[list[float]]:
        """By backward the seconds until each parameter was ready, NaN where it never was, and until the end."""
        return [
            [self._seconds(one.begin, one.ready.get(index)) for index in range(self._count)]
            + [self._seconds(one.begin, one.end)]
            for one in self._backwards
        ]

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
