"""Records when gradients are ready in real backwards. Does not change a backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dpfuse.comm import collective
from dpfuse.engine.averaging import UNCHANGED, Wire
from dpfuse.engine.feature import Engine, ReadyRecorder
from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.time_marks import Moment, now, seconds_between
from dpfuse.errors import DPFuseError
from dpfuse.tune.timeline import Timeline

__all__ = ["BackwardRecorder", "timeline_of"]

Times = NDArray[np.float64]


@dataclass
class _Backward:
    begin: Moment
    ready: dict[int, Moment] = field(default_factory=dict)  # by parameter; the last time if it fired several times
    end: Moment | None = None
    delivered: Moment | None = None  # all gradients are averaged


class BackwardRecorder(ReadyRecorder):
    """Records when a backward begins and ends, when gradients are ready, and when all of them are averaged.

    On CUDA it records events, and waits for them only when the times are read. It calls `after` after each recorded
    backward, on all ranks.
    """

    _engine: Engine

    def __init__(self, count: int, *, device: torch.device, after: Callable[[], None] = lambda: None) -> None:
        self._count = count
        self._device = device
        self._skip = 0
        self._after = after
        self._backward: _Backward | None = None
        self._backwards: list[_Backward | None] = []  # None: a backward of other ranks that this rank shadowed

    @property
    def steps(self) -> int:
        """Number of recorded synchronised backwards."""
        return len(self._backwards)

    def restart(self, count: int, *, skip: int = 0) -> None:
        """Forget all records. From now on there are `count` parameters.

        `skip` synchronised backwards are left out: the first one sends all buckets at its end, for example.
        """
        self._count, self._skip = count, skip
        self._backwards.clear()

    def forget_last(self) -> None:
        """Forget the last recorded backward."""
        self._backwards.pop()

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine = engine

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """Record the begin of a backward."""
        self._backward = _Backward(now(self._device))

    def backward_ended(self) -> None:
        """Record the end of the outermost backward."""
        if self._backward is not None:
            self._backward.end = now(self._device)

    def local_backward_ended(self, *, added: bool) -> None:
        """Drop a backward that is not synchronised."""
        self._backward = None

    def delivered(self) -> None:
        """Record the end of delivery. A backward of other ranks, in which this one only took part, has no times."""
        backward, self._backward = self._backward, None
        if backward is None or self._engine.without_inputs:
            self._keep(None)
            return
        backward.delivered = now(self._device)
        self._keep(backward)

    def gather(self, group: dist.ProcessGroup) -> Times:
        """Return the seconds of all ranks, [steps, ranks, parameters + 2].

        The last two entries are the end of backward and the end of delivery. Steps that some rank shadowed are left
        out. Call it on all ranks; the result is the same on each.

        Raises:
            DPFuseError: The ranks recorded different numbers of backwards, or none.
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

    def _rows(self) -> list[list[float]]:
        return [[math.nan] * (self._count + 2) if one is None else self._row(one) for one in self._backwards]

    def _row(self, one: _Backward) -> list[float]:
        """Return the seconds to each parameter's ready mark (NaN without one), to the end and to delivery."""
        stamps = [*(one.ready.get(index) for index in range(self._count)), one.end, one.delivered]
        return [_seconds(one.begin, stamp) for stamp in stamps]

    def _keep(self, backward: _Backward | None) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._backwards.append(backward)
        self._after()

    def stamped(self, index: int, hook: Callable[[Any], None]) -> Callable[[Any], None]:
        """A ready hook of that parameter that notes the time, then calls `hook`."""

        def mark_ready(param: Any) -> None:
            marked = now(self._device)
            hook(param)  # may open the backward
            if self._backward is not None:
                self._backward.ready[index] = marked

        return mark_ready


def _seconds(begin: Moment, end: Moment | None) -> float:
    if end is None:
        return math.nan
    return max(0.0, seconds_between(begin, end))  # a ready mark that opens the backward comes just before its begin


def timeline_of(times: Times, plan: BucketPlan, wire: Wire = UNCHANGED) -> Timeline:
    """Return the typical backward of the times that `BackwardRecorder.gather` returned."""
    return Timeline.from_steps(plan.specs, times[:, :, :-2], times[:, :, -2], wire_dtype=wire.dtype)
