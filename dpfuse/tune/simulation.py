"""Simulates a plan on a timeline: when each bucket is ready, is sent and lands. Decides and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfuse.engine.plan import MB, BucketPlan
from dpfuse.tune.cost import CostTable
from dpfuse.tune.timeline import Timeline

__all__ = ["BucketTimes", "Schedule", "schedule_of", "simulate", "table_text"]


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket, in seconds since backward began."""

    order: int  # of sending, from 0
    params: int  # number of parameters
    nbytes: int  # bytes sent, without padding
    opened: float  # its first gradient was ready
    ready: float  # its last gradient was ready
    closed_by: str  # the parameter of that gradient
    late: float  # seconds from its last but one gradient to its last
    sent: float  # begin of its all-reduce, when the bucket before has landed (recorded: when the group got it)
    landed: float
    exposed: float  # seconds of its all-reduce after backward had ended


@dataclass(frozen=True)
class Schedule:
    """The times of all buckets of a plan, simulated or recorded.

    Args:
        buckets: in the order of sending.
        backward_end: seconds since backward began.
    """

    buckets: tuple[BucketTimes, ...]
    backward_end: float

    @property
    def end(self) -> float:
        """Seconds from the begin of backward until the last bucket lands."""
        return max(self.backward_end, max(bucket.landed for bucket in self.buckets))

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to backward."""
        return self.end - self.backward_end

    def explain(self) -> str:
        """Return the schedule as a table, with a row per bucket and times in ms since backward began.

        Returns:
            Lines of text; the last line is a summary. `late` is the time that the bucket waited for its last gradient.
            `waited` is the time that it then waited for earlier buckets, or for the end of backward.
        """
        header = ("order", "MB", "params", "ready", "sent", "landed", "exposed", "waited", "late", "closed by")
        rows = [
            (
                str(bucket.order),
                f"{bucket.nbytes / MB:.4g}",
                str(bucket.params),
                *(_ms(time) for time in (bucket.ready, bucket.sent, bucket.landed, bucket.exposed)),
                _ms(bucket.sent - bucket.ready),
                _ms(bucket.late),
                bucket.closed_by,
            )
            for bucket in self.buckets
        ]
        return (
            f"{table_text([header, *rows])}\n"
            f"backward ends at {_ms(self.backward_end)} ms, the last bucket lands at {_ms(self.end)} ms: "
            f"{_ms(self.exposed)} ms exposed"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as an object for `json.dump`, with times in seconds."""
        return {
            "backward_end": self.backward_end,
            "end": self.end,
            "exposed": self.exposed,
            "buckets": [asdict(bucket) for bucket in self.buckets],
        }


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
        >>> from dpfuse.tune import CostTable, Timeline, simulate
        >>> specs = [dpfuse.ParamSpec(name, (250_000,), "float32") for name in "abcd"]
        >>> timeline = Timeline.synthetic(specs, 0.004)
        >>> print(simulate(timeline, dpfuse.plan_buckets(specs, 1.5, 1), CostTable.affine(1e-4, 2e9)).explain())
        order  MB     params  ready  sent   landed  exposed  waited  late   closed by
        0      1.907  2       2.000  2.000  3.100   0.000    0.000   1.000  c
        1      1.907  2       4.000  4.000  5.100   1.100    0.000   1.000  a
        backward ends at 4.000 ms, the last bucket lands at 5.100 ms: 1.100 ms exposed
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
    return schedule_of(timeline, plan, sent, landed)


def schedule_of(timeline: Timeline, plan: BucketPlan, sent: Sequence[float], landed: Sequence[float]) -> Schedule:
    """Return the schedule of a plan with given begins and ends of its all-reduces."""
    buckets = []
    for order, bucket in enumerate(plan.buckets):
        last, *before = sorted(bucket.params, key=lambda index: (-timeline.ready[index], index))
        ready = timeline.ready[last]
        buckets.append(
            BucketTimes(
                order,
                len(bucket.params),
                sum(timeline.nbytes[index] for index in bucket.params),
                min(timeline.ready[index] for index in bucket.params),
                ready,
                timeline.specs[last].name,
                ready - timeline.ready[before[0]] if before else 0.0,
                sent[order],
                landed[order],
                max(0.0, landed[order] - max(sent[order], timeline.backward_end)),
            )
        )
    return Schedule(tuple(buckets), timeline.backward_end)


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of words as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
