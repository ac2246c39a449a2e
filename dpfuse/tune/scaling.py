"""Predicts steps at other numbers of ranks from one recorded backward. Measures nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dpfuse.engine.plan import BucketPlan
from dpfuse.tune.cluster import Cluster
from dpfuse.tune.planner import optimal_plan
from dpfuse.tune.published_plans import ddp_plan, ramp_plan
from dpfuse.tune.simulated_comparison import RANKS
from dpfuse.tune.simulation import simulate, table_text
from dpfuse.tune.timeline import Timeline

__all__ = ["BACKWARD_SHARE", "BEST", "DDP", "DPFUSE", "ScaledStep", "break_even", "on_gpu", "scale", "scale_text"]

BACKWARD_SHARE = 2 / 3  # of a step without communication: backward has two products for each one of forward
BEST, DPFUSE, DDP = "best", "dpfuse", "DDP"
NOTABLE = 0.01  # part of DDP's step that a plan must save at the break-even


@dataclass(frozen=True)
class ScaledStep:
    """A step at one number of ranks, with all-reduces by one algorithm.

    Args:
        ranks: their number.
        algorithm: of the all-reduces.
        compute: seconds of a step without communication.
        exposed: by name of the plan, seconds that communication adds.
        buckets: by name of the plan, their number.

    The plans are `"best"`, `"dpfuse"` (the default) and `"DDP"` (its default).

    Example:
        >>> from dpfuse.tune import ScaledStep
        >>> step = ScaledStep(8, "ring", 0.09, {"best": 0.0, "dpfuse": 0.01, "DDP": 0.03}, {})
        >>> round(step.seconds("dpfuse"), 6), step.efficiency("DDP"), round(step.saved("best"), 6)
        (0.1, 0.75, 0.25)
    """

    ranks: int
    algorithm: str
    compute: float
    exposed: Mapping[str, float]
    buckets: Mapping[str, int]

    def seconds(self, plan: str) -> float:
        """Return the seconds of a step with this plan."""
        return self.compute + self.exposed[plan]

    def efficiency(self, plan: str) -> float:
        """Return the throughput, divided by that of as many ranks without communication."""
        return self.compute / self.seconds(plan)

    def saved(self, plan: str) -> float:
        """Return the part of DDP's step that this plan saves; negative if it is slower."""
        return 1 - self.seconds(plan) / self.seconds(DDP)


def scale(
    timeline: Timeline,
    cluster: Cluster,
    ranks: Iterable[int] = RANKS,
    *,
    algorithm: str = "ring",
    compute: float | None = None,
    comm_buffer_size: float = math.inf,
    last_comm_buffer_size: float = math.inf,
) -> list[ScaledStep]:
    """Predict steps with three plans: the best one, dpfuse's default (the ramp) and DDP's default.

    Args:
        timeline: of one rank, on any device. It is used for every number of ranks.
        cluster: the GPUs and their network.
        ranks: 8 to 16,384 by default.
        algorithm: `"ring"`, `"tree"` or `"two-level"`.
        compute: seconds of a step without communication. Backward is two thirds of it, and the recorded times are
            scaled to that. None keeps the recorded backward, and a step takes 1.5 times as long.
        comm_buffer_size: limit in MB of a bucket of the best plan.
        last_comm_buffer_size: limit in MB of its last bucket.

    Raises:
        TypeError, ValueError: a number of ranks does not fill its nodes, the algorithm is unknown, or a limit or a time
            is no positive number.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import INSIDE, NETWORKS, Cluster, Timeline, scale
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec(name, (10**7,), "float32") for name in "abcd"], 0.020)
        >>> cluster = Cluster(INSIDE["pcie-4"], NETWORKS["ethernet-25"])
        >>> [round(step.efficiency("dpfuse"), 2) for step in scale(timeline, cluster, [8, 64])]
        [0.91, 0.24]
    """
    backward = timeline.backward_end if compute is None else BACKWARD_SHARE * compute
    if not 0 < backward < math.inf:
        raise ValueError(f"a step must take more than 0 s, got a backward of {backward!r} s")
    scaled = on_gpu(timeline, backward)
    steps = []
    for count in ranks:
        cost = cluster.cost(count, algorithm)
        plans: dict[str, BucketPlan] = {
            BEST: optimal_plan(
                scaled, cost, comm_buffer_size=comm_buffer_size, last_comm_buffer_size=last_comm_buffer_size
            ),
            DPFUSE: ramp_plan(scaled, ranks=count),
            DDP: ddp_plan(scaled),
        }
        exposed = {name: simulate(scaled, plan, cost).exposed for name, plan in plans.items()}
        buckets = {name: len(plan.buckets) for name, plan in plans.items()}
        steps.append(ScaledStep(count, algorithm, backward / BACKWARD_SHARE, exposed, buckets))
    return steps


def on_gpu(timeline: Timeline, backward: float) -> Timeline:
    """Return the backward as on a GPU, in `backward` seconds.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import Timeline
        >>> from dpfuse.tune.scaling import on_gpu
        >>> on_gpu(Timeline.synthetic([dpfuse.ParamSpec("a", (9,), "float32")], 2.0), 0.5).ready
        (0.5,)
    """
    factor = backward / timeline.backward_end
    specs = tuple(replace(spec, device="cuda:0") for spec in timeline.specs)
    ready = tuple(min(factor * time, backward) for time in timeline.ready)
    return replace(timeline, specs=specs, ready=ready, backward_end=backward)


def break_even(steps: Sequence[ScaledStep], plan: str) -> int | None:
    """Return the smallest number of ranks at which a plan saves 1 % of DDP's step or more; None if there is none.

    Args:
        steps: from `scale`.
        plan: `"best"` or `"dpfuse"`.

    Example:
        >>> from dpfuse.tune import ScaledStep, break_even
        >>> steps = [ScaledStep(ranks, "ring", 1.0, {"best": 0.0, "DDP": ranks / 1000}, {}) for ranks in (8, 16)]
        >>> break_even(steps, "best")
        16
    """
    return min((step.ranks for step in steps if step.saved(plan) >= NOTABLE), default=None)


def scale_text(steps: Sequence[ScaledStep]) -> str:
    """Return the steps as a table, with times in ms, and the break-even of both plans in the last two lines.

    Args:
        steps: from `scale`.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import INSIDE, NETWORKS, Cluster, Timeline, scale, scale_text
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec(name, (10**7,), "float32") for name in "abcd"], 0.020)
        >>> cluster = Cluster(INSIDE["pcie-4"], NETWORKS["ethernet-25"])
        >>> print(scale_text(scale(timeline, cluster, [64])).split("\\n", 2)[2])
        the best plan first saves 1 % of DDP's step at 64 ranks
        dpfuse's default saves 1 % of DDP's step at no number of ranks: there is no break-even
    """
    header = ("ranks", "best plan", "exposed", "efficiency", "buckets", "dpfuse", "exposed", "buckets")
    rows: list[Sequence[str]] = [(*header, "DDP", "exposed", "buckets", "best saves", "dpfuse saves")]
    rows += [_row(step) for step in steps]
    return "\n".join([table_text(rows), *(_break_even_text(steps, plan) for plan in (BEST, DPFUSE))])


def _row(step: ScaledStep) -> list[str]:
    def times(plan: str) -> list[str]:
        return [f"{seconds * 1e3:.3f}" for seconds in (step.seconds(plan), step.exposed[plan])]

    best, dpfuse, ddp = ([*times(plan), str(step.buckets[plan])] for plan in (BEST, DPFUSE, DDP))
    best.insert(2, f"{step.efficiency(BEST):.1%}")
    return [str(step.ranks), *best, *dpfuse, *ddp, *(f"{step.saved(plan) + 0.0:+.2%}" for plan in (BEST, DPFUSE))]


def _break_even_text(steps: Sequence[ScaledStep], plan: str) -> str:
    name = {BEST: "the best plan", DPFUSE: "dpfuse's default"}[plan]
    ranks = break_even(steps, plan)
    losses = [step.ranks for step in steps if step.saved(plan) <= -NOTABLE]
    slower = f"; it first takes 1 % longer than DDP's at {losses[0]} ranks" if losses else ""
    if ranks is None:
        return f"{name} saves 1 % of DDP's step at no number of ranks: there is no break-even{slower}"
    return f"{name} first saves 1 % of DDP's step at {ranks} ranks{slower}"
