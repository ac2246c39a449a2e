"""Simulates a plan on a timeline: when each bucket is sent and lands. Decides and measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from dpfuse.engine.plan import BucketPlan
from dpfuse.tune import CostTable, Timeline

__all__ = ["Schedule", "simulate"]


@dataclass(frozen=True)
class Schedule:
    """The expected times of the buckets of a plan, in seconds since backward began.

    Args:
        sent: the begin of each all-reduce, in the order of sending.
        landed: the end of each.
        backward_end: the end of backward.
    """

    sent: tuple[float, ...]
    landed: tuple[float, ...]
    backward_end: float

    @property
    def end(self) -> float:
        """Seconds from the begin of backward until the last bucket lands."""
        return max(self.backward_end, *self.landed)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to backward."""
        return self.end - self.backward_end


def simulate(timeline: Timeline, plan: BucketPlan, cost: CostTable) -> Schedule:
    """Return the expected times of a plan.

    A bucket is sent when all its gradients are ready and all buckets before it have landed. The last bucket also waits
    for the end of backward.

    Args:
        timeline: when gradients are ready.
        plan: of the same parameters.
        cost: seconds by bytes.

    Raises:
        ValueError: The plan is for other parameters.

    Example:
        >>> import dpfuse
        >>> from bench.simulation import simulate
        >>> from dpfuse.tune import CostTable, Timeline
        >>> specs = [dpfuse.ParamSpec(name, (250_000,), "float32") for name in "abcd"]
        >>> timeline = Timeline.synthetic(specs, 0.004)
        >>> schedule = simulate(timeline, dpfuse.plan_buckets(specs, 1.5, 1), CostTable.affine(1e-4, 2e9))
        >>> schedule.sent, round(schedule.exposed, 9)
        ((0.002, 0.004), 0.0011)
    """
    if [(spec.name, spec.shape) for spec in plan.specs] != [(spec.name, spec.shape) for spec in timeline.specs]:
        raise ValueError(
            f"the plan has {len(plan.specs)} parameters and the timeline {len(timeline.specs)}, or their names or "
            "shapes differ; expected the parameters of one model in the same order"
        )
    free, sent, landed = 0.0, [], []
    for order, bucket in enumerate(plan.buckets):
        ready = max(timeline.ready[index] for index in bucket.params)
        sent.append(max(free, timeline.backward_end if order == len(plan.buckets) - 1 else ready))
        free = sent[-1] + cost(float(sum(timeline.nbytes[index] for index in bucket.params)))
        landed.append(free)
    return Schedule(tuple(sent), tuple(landed), timeline.backward_end)
