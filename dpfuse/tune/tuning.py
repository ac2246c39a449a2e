"""Records a few steps of a wrapped model, plans, tries the new plan, and restores the old plan if that was better."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dpfuse.arguments import a_callable, instance
from dpfuse.comm import collective, votes
from dpfuse.engine.plan import BucketPlan, size_in_bytes
from dpfuse.errors import DPFuseError
from dpfuse.exclusions import refuse
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune.cost import CostTable
from dpfuse.tune.measure import SIZES, measure_all_reduce
from dpfuse.tune.planner import optimal_plan
from dpfuse.tune.recorder import BackwardRecorder, timeline_of
from dpfuse.tune.timeline import Timeline
from dpfuse.wrapper import SyncedModule, check_wrapped

if TYPE_CHECKING:
    from dpfuse.model.module_sync import ModuleSync

__all__ = ["RecordedTimes", "Tuning", "autotune"]

WARM_UP = 1  # backwards to leave out after buckets were rebuilt, because their memory is new
TOLERANCE = 0.02  # fraction of a backward by which two records of the same buckets can differ


@dataclass(frozen=True)
class RecordedTimes:
    """Seconds of several backwards, the same on all ranks."""

    exposed: tuple[float, ...]  # from the end of backward until all gradients were averaged, on the last rank
    total: tuple[float, ...]  # from the begin of backward until all gradients were averaged

    @classmethod
    def of(cls, times: NDArray[np.float64]) -> RecordedTimes:
        """Return the times of what `BackwardRecorder.gather` returned."""
        ends, delivered = times[:, :, -2], times[:, :, -1]
        # The minimum, because the other ranks' exposed time includes waiting for the last rank.
        return cls(tuple((delivered - ends).min(axis=1).tolist()), tuple(delivered.max(axis=1).tolist()))

    def worse_than(self, before: RecordedTimes) -> bool:
        """Whether the exposed or the total time has grown by more than the tolerance."""
        tolerance = TOLERANCE * float(np.median(before.total))
        return any(
            np.median(new) - np.median(old) > tolerance
            for new, old in ((self.exposed, before.exposed), (self.total, before.total))
        )

    def explain(self) -> str:
        """Return one line, with times in ms."""
        exposed, total = (f"{np.median(one) * 1e3:.3f}" for one in (self.exposed, self.total))
        return (
            f"{exposed} ms exposed, {total} ms backward with communication; "
            f"medians of {len(self.total)} recorded backwards"
        )


MEANING = "(exposed: backward could only wait, on the rank that waits least; backward: on the slowest rank)"


class Tuning:
    """The results of `autotune` so far.

    Attributes:
        done: whether the recording has ended.
        kept: whether the new buckets are in use; None until that is known.
        error: the reason why there are no new buckets, if something failed.
        timeline, cost: when gradients were ready, and the time of an all-reduce.
        old_plan: the buckets while the first times were recorded.
        plan: the new buckets.
        before, after: recorded seconds with the old and with the new buckets.
    """

    def __init__(self) -> None:
        self.done = False
        self.kept: bool | None = None
        self.error = ""
        self.timeline: Timeline | None = None
        self.cost: CostTable | None = None
        self.old_plan: BucketPlan | None = None
        self.plan: BucketPlan | None = None
        self.before: RecordedTimes | None = None
        self.after: RecordedTimes | None = None

    def explain(self) -> str:
        """Return the recorded times and what became of the new buckets, as lines of text."""
        if self.error:
            return f"nothing was changed: {self.error}"
        if self.before is None:
            return "there are no records yet: train for a few more steps"
        lines = [f"before: {self.before.explain()}"]
        if self.after is not None:
            lines.append(f"after:  {self.after.explain()}")
        return "\n".join([*lines, MEANING, self._outcome()])

    def _outcome(self) -> str:
        if not self.done:
            return "the new buckets are being tried"
        if self.after is None:
            return "the old buckets are already the best"
        return "the new buckets are kept" if self.kept else "the new buckets are worse: the old buckets are restored"


def autotune(
    model: SyncedModule,
    steps: int = 5,
    *,
    comm_buffer_size: float = math.inf,
    last_comm_buffer_size: float = math.inf,
    cost: CostTable | None = None,
) -> Tuning:
    """Find and use the best buckets for this model on this machine, while it trains.

    Record `steps` synchronised backwards. Then time all-reduces, plan on rank 0, and use this plan on all ranks. Record
    as many backwards with the new plan. If they are slower, restore the old buckets. Call this function on all ranks at
    the same place, between two backwards.

    Args:
        model: a wrapped model.
        steps: synchronised backwards to record before and after, each time without the first.
        comm_buffer_size: limit of a bucket in MB.
        last_comm_buffer_size: limit in MB of the bucket sent last.
        cost: seconds of an all-reduce by bytes. With None, all-reduces are timed, which takes about a second.

    Returns:
        The results, also as `model.tuning`. They are complete when `done` is true.

    Raises:
        ValueError, TypeError: A size is invalid, `steps` is less than 1, or the model is not wrapped by dpfuse.
        DPFuseError: The model only passes calls through, has a communication hook, is already recorded, or is in the
            middle of a backward. If the ranks' calls differ, the next synchronised backward raises on all ranks.

    Example:
        >>> import torch, dpfuse
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> tuning = dpfuse.autotune(model, steps=2)
        >>> while not tuning.done:
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> len(model.bucket_plan.buckets)
        1
        >>> dist.destroy_process_group()
    """
    caps = comm_buffer_size, last_comm_buffer_size
    for cap, name in zip(caps, ("comm_buffer_size", "last_comm_buffer_size"), strict=True):
        size_in_bytes(cap, name)  # raise here, not later when ranks wait for each other
    instance("steps", steps, Integral, "a whole number", "leave it out for 5")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}; leave it out for 5")
    if cost is not None:
        a_callable("cost", cost, "a CostTable or None")
    check_wrapped(model, "autotune")
    sync = model._sync
    if sync is None:
        raise DPFuseError(
            "autotune was called on a model that only passes calls through, expected one that averages gradients. Call "
            "init_parallel_env() before wrapping."
        )
    refuse("autotune", "autotune was called on a model with", sync.in_use)
    if sync.recording:
        raise DPFuseError(
            f"rank {sync.grads.group.rank()}: autotune was called while it records this model; expected one call at a "
            "time. Call it again when the tuning is done."
        )
    sync.ask(f"autotune: {steps} steps, sizes {caps[0]:g} and {caps[1]:g} MB, cost {cost}")
    tuner = _Tuner(sync, steps, caps, cost)
    model.tuning = tuner.tuning
    return tuner.tuning


class _Tuner:
    """Acts between two backwards, on all ranks in the same way: it plans, and later compares old and new times."""

    def __init__(self, sync: ModuleSync, steps: int, caps: tuple[float, float], cost: CostTable | None) -> None:
        self.tuning = Tuning()
        self._grads, self._wire = sync.grads, sync.options.wire
        self._steps = steps
        self._caps = caps
        self._cost = cost
        self._plan: BucketPlan | None = None  # the plan that is recorded
        self._old: BucketPlan | None = None  # the old plan, while the new one is tried
        device = sync.grads.params[0].device
        self._on_cuda = device.type == "cuda"
        count = len(sync.grads.plan.specs)
        self._recorder = BackwardRecorder(count, device=device, after=self._after_backward)
        sync.grads.record(self._recorder)

    def _after_backward(self) -> None:
        if self._grads.plan is not self._plan:  # the first one, or the module has changed
            self._old = None
            self._record_anew()
            return
        # On CUDA this rank would otherwise learn a step later that this backward failed on some rank.
        if self._on_cuda and self._grads.reducer.failed_somewhere():
            self._recorder.forget_last()
            return
        if self._recorder.steps < self._steps:
            return
        try:
            times = self._recorder.gather(self._grads.group)
            if not len(times):  # some rank has no input left; inside join() it has input again in the next epoch
                self._recorder.restart(len(self._grads.plan.specs))
            elif self._old is None:
                self._try_plan(times)
            else:
                self._judge(times)
        except DPFuseError as error:  # on every rank
            self.tuning.error = str(error)
            self._end(kept=False)
            warnings.warn(f"rank {self._grads.group.rank()}: autotune has changed nothing: {error}", stacklevel=2)

    def _record_anew(self) -> None:
        self._plan = self._grads.plan
        self._recorder.restart(len(self._plan.specs), skip=WARM_UP)

    def _try_plan(self, times: NDArray[np.float64]) -> None:
        tuning, old, group = self.tuning, self._grads.plan, self._grads.group
        timeline = timeline_of(times, old, self._wire)
        cost = self._cost or measure_all_reduce(group, _sizes_for(sum(timeline.nbytes)))
        plan = self._planned_on_rank_0(timeline, cost)
        tuning.timeline, tuning.cost, tuning.old_plan, tuning.plan = timeline, cost, old, plan
        tuning.before = RecordedTimes.of(times)
        if plan.layout == old.layout:
            self._end(kept=False)
            return
        self._old = old
        self._grads.use_plan(plan)
        self._record_anew()

    def _judge(self, times: NDArray[np.float64]) -> None:
        assert self._old is not None
        assert self.tuning.before is not None
        self.tuning.after = RecordedTimes.of(times)
        worse = self.tuning.after.worse_than(self.tuning.before)
        if worse:
            self._grads.use_plan(self._old)
        self._end(kept=not worse)

    def _end(self, *, kept: bool) -> None:
        self.tuning.kept = kept
        self.tuning.done = True
        self._grads.record(None)

    def _planned_on_rank_0(self, timeline: Timeline, cost: CostTable) -> BucketPlan:
        """Return rank 0's plan. Ranks do not plan on their own: machines that round differently may differ."""
        caps, group = self._caps, self._grads.group

        def numbers_here() -> torch.Tensor:
            numbers = torch.full((len(timeline.specs),), -1, dtype=torch.int64, device="cpu")
            if group.rank() == 0:
                plan = optimal_plan(timeline, cost, comm_buffer_size=caps[0], last_comm_buffer_size=caps[1])
                for order, bucket in enumerate(plan.buckets):
                    numbers[list(bucket.params)] = order
            return numbers.to(collective.group_device(group))

        numbers = votes.agree_on_success(numbers_here, group, "autotune")
        collective.broadcast(numbers, group)
        groups: list[list[int]] = [[] for _ in range(int(numbers.max()) + 1)]
        for index, number in enumerate(numbers.tolist()):
            groups[number].append(index)
        return plan_from_groups(timeline.specs, groups, comm_buffer_size=caps[0], last_comm_buffer_size=caps[1])


def _sizes_for(nbytes: int) -> list[int]:
    """Return the sizes to time for gradients of `nbytes` bytes."""
    return [size for size in SIZES if size < 2 * nbytes] or [SIZES[0]]
