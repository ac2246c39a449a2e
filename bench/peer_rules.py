"""The buckets of peers that cannot run in a simulated network, by their published rules.

dpfuse sends these buckets. So a contender has dpfuse's host time, and no negotiation between ranks. Its time is
therefore a lower bound of the peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.published_plans import one_bucket_plan
from dpfuse.engine.plan import BucketPlan
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune import CostTable, Timeline

__all__ = ["PEER_RULES", "deepspeed_plan", "horovod_plan"]

CYCLE = 1e-3  # seconds between two looks at Horovod's queue
FUSION_THRESHOLD = 128 << 20  # bytes of Horovod's fusion buffer


def horovod_plan(timeline: Timeline, cost: CostTable) -> BucketPlan:
    """Return the buckets of Horovod's tensor fusion, with its default settings.

    Its thread looks at the queue once per cycle. It fuses the gradients that are ready, up to the size of its buffer,
    and sends them. It looks again when they have landed, and at the earliest one cycle later.

    Args:
        timeline: when gradients are ready.
        cost: seconds by bytes of an all-reduce.

    Example:
        >>> import dpfuse
        >>> from bench.peer_rules import horovod_plan
        >>> from dpfuse.tune import CostTable, Timeline
        >>> specs = [dpfuse.ParamSpec(name, (4,), "float32") for name in "abcdef"]
        >>> backward = Timeline.synthetic(specs, 0.003)  # a gradient each 0.5 ms
        >>> [bucket.params for bucket in horovod_plan(backward, CostTable.affine(1e-4, 1e9)).buckets]
        [(4, 5), (2, 3), (0, 1)]

    Source: Sergeev, Del Balso: Horovod (arXiv 1802.05799); the defaults are those since its release 0.21.
    """
    waiting, groups = list(timeline.order), []
    look = landed = 0.0
    while waiting:
        look = max(look + CYCLE, landed)
        ready = [index for index in waiting if timeline.ready[index] <= look]
        landed = look
        for group in _fused(timeline, ready):
            groups.append(group)
            landed += cost(sum(timeline.nbytes[index] for index in group))
        waiting = waiting[len(ready) :]
    return plan_from_groups(timeline.specs, groups)


def _fused(timeline: Timeline, ready: Sequence[int]) -> list[list[int]]:
    """Return groups of gradients in their order, each of one dtype and of no more bytes than the fusion buffer has."""
    groups: list[list[int]] = []
    for index in ready:
        last = groups[-1] if groups else []
        alike = all(timeline.specs[other].dtype == timeline.specs[index].dtype for other in last)
        if last and alike and sum(timeline.nbytes[other] for other in [*last, index]) <= FUSION_THRESHOLD:
            last.append(index)
        else:
            groups.append([index])
    return groups


def deepspeed_plan(timeline: Timeline, cost: CostTable) -> BucketPlan:
    """Return DeepSpeed's buckets at stages 0 and 1, with default settings: one, sent when backward has ended.

    Its buckets hold 500 million elements, and communication does not overlap unless the user asks for it.

    Args:
        timeline: when gradients are ready; no model here has more elements.
        cost: not used.
    """
    return one_bucket_plan(timeline)


PEER_RULES: dict[str, Callable[[Timeline, CostTable], BucketPlan]] = {
    "Horovod's rule": horovod_plan,
    "DeepSpeed's rule": deepspeed_plan,
}
