"""Makes the plans of published rules on a timeline, dpfuse's among them, to compare with the best. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from bench.simulation import simulate
from dpfuse.engine.plan import (
    DEFAULT_SIZE,
    BucketPlan,
    BucketRule,
    assign_buckets,
    plan_buckets,
    rebuild_plan,
    size_in_bytes,
)
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune import CostTable, Timeline

__all__ = [
    "best_cap_plan",
    "capped_plan",
    "ddp_plan",
    "mg_wfbp_plan",
    "one_bucket_plan",
    "paddle_plan",
    "ramp_plan",
    "rival_plans",
    "single_plan",
]

CAPS = tuple(1 << power for power in range(10))  # MB


def ddp_plan(timeline: Timeline, first_size: float = 1, size: float = 25) -> BucketPlan:
    """Return the buckets of torch's DDP after its first backward: in the order of gradients, the small bucket first.

    Args:
        timeline: when gradients are ready.
        first_size: MB of the first bucket of each dtype and device.
        size: MB of all other buckets.

    Source: torch's `Reducer::rebuild_buckets`, with its defaults.
    """
    groups = assign_buckets(
        timeline.specs, [size_in_bytes(first_size, "first_size"), size_in_bytes(size, "size")], timeline.order
    )
    return plan_from_groups(timeline.specs, [group.members for group in groups])


def paddle_plan(timeline: Timeline, size: float = 25, last_size: float = 1) -> BucketPlan:
    """Return Paddle's buckets, with the small bucket sent last. dpfuse makes them with `plan="greedy"`.

    Args:
        timeline: when gradients are ready.
        size: `comm_buffer_size`, in MB.
        last_size: `last_comm_buffer_size`, in MB.
    """
    return rebuild_plan(plan_buckets(timeline.specs, size, last_size), timeline.order)


def ramp_plan(timeline: Timeline, size: float | None = None, last_size: float = 1, *, ranks: int) -> BucketPlan:
    """Return the buckets that dpfuse makes after its first synchronised backward, with default options.

    Args:
        timeline: when gradients are ready.
        size: `comm_buffer_size`, in MB; None lets the rule choose, as there.
        last_size: `last_comm_buffer_size`, in MB.
        ranks: their number.
    """
    rule = BucketRule(ramp_ranks=ranks, grows=size is None)
    plan = plan_buckets(timeline.specs, DEFAULT_SIZE if size is None else size, last_size, rule=rule)
    return rebuild_plan(plan, timeline.order)


def capped_plan(timeline: Timeline, size: float) -> BucketPlan:
    """Return buckets of one size in MB, in the order of gradients."""
    return ddp_plan(timeline, size, size)


def best_cap_plan(timeline: Timeline, cost: CostTable, caps: Sequence[float] = CAPS) -> BucketPlan:
    """Return the best `capped_plan` of several sizes in MB."""
    return min((capped_plan(timeline, cap) for cap in caps), key=lambda plan: simulate(timeline, plan, cost).end)


def one_bucket_plan(timeline: Timeline) -> BucketPlan:
    """Return one bucket per dtype and device: no communication overlaps with backward."""
    return capped_plan(timeline, math.inf)


def single_plan(timeline: Timeline) -> BucketPlan:
    """Return one bucket per gradient, sent as soon as the gradient is ready (wait-free backpropagation)."""
    return plan_from_groups(timeline.specs, [[index] for index in timeline.order])


def mg_wfbp_plan(timeline: Timeline, cost: CostTable) -> BucketPlan:
    """Return MG-WFBP's plan, which merges greedily: the next gradient joins a bucket if waiting for it costs less.

    The rule starts with single gradients and goes through them in order. The next gradient joins the bucket in two
    cases: it is ready before the bucket could be sent; or it is ready before the bucket would land, and waiting for it
    costs less than another start-up. Each dtype and device is planned separately.

    Args:
        timeline: when gradients are ready.
        cost: seconds by bytes. The time of 0 bytes is used as the start-up time.

    Source: Shi, Chu, Li: MG-WFBP (arXiv 1912.09268), algorithm 1, and the authors' repository.
    """
    kinds: dict[Hashable, list[int]] = {}
    for index in timeline.order:
        spec = timeline.specs[index]
        kinds.setdefault((spec.dtype, spec.device, index if spec.sparse else None), []).append(index)
    groups = [group for members in kinds.values() for group in _merged(timeline, members, cost)]
    places = {index: place for place, index in enumerate(timeline.order)}
    groups.sort(key=lambda group: places[group[-1]])
    return plan_from_groups(timeline.specs, groups)


def _merged(timeline: Timeline, members: Sequence[int], cost: CostTable) -> list[list[int]]:
    startup = cost(0.0)
    groups: list[list[int]] = []
    group: list[int] = []
    free = 0.0  # time at which the buckets before have landed
    for index, following in zip(members, [*members[1:], None], strict=True):
        group.append(index)
        begin = max(free, timeline.ready[index])
        end = begin + cost(float(sum(timeline.nbytes[member] for member in group)))
        if following is not None:
            soon = timeline.ready[following]
            if soon < end and soon - begin < startup:  # below zero: ready before the bucket could be sent
                continue
        groups.append(group)
        group, free = [], end
    return groups


def rival_plans(timeline: Timeline, cost: CostTable) -> dict[str, BucketPlan]:
    """Return the plans of all published rules, by name.

    Example:
        >>> import dpfuse
        >>> from bench.published_plans import rival_plans
        >>> from dpfuse.tune import CostTable, Timeline
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec(name, (99,), "float32") for name in "ab"], 0.001)
        >>> {name: len(plan.buckets) for name, plan in rival_plans(timeline, CostTable.affine(1e-4, 1e9)).items()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'DDP, 1 + 25 MiB': 1, 'Paddle, 25 MiB + last 1': 1, 'best single size': 1, 'MG-WFBP': 2, 'one bucket': 1,
         'each gradient alone': 2}
    """
    return {
        "DDP, 1 + 25 MiB": ddp_plan(timeline),
        "Paddle, 25 MiB + last 1": paddle_plan(timeline),
        "best single size": best_cap_plan(timeline, cost),
        "MG-WFBP": mg_wfbp_plan(timeline, cost),
        "one bucket": one_bucket_plan(timeline),
        "each gradient alone": single_plan(timeline),
    }
