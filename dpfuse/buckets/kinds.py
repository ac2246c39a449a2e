"""All buckets of a plan: one object for each, of the right kind. Knows no autograd hook and no order of events."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.averaging import averaging_for
from dpfuse.buckets.accumulating_bucket import AccumulatingBucket, AccumulatingOrderedBucket
from dpfuse.buckets.bucket import GradBucket
from dpfuse.buckets.early_unpack import side_stream_on
from dpfuse.buckets.hooked_bucket import HookedBucket, HookedSparseBucket
from dpfuse.buckets.in_place_bucket import InPlaceBucket
from dpfuse.buckets.ordered_bucket import OrderedBucket
from dpfuse.buckets.sparse_bucket import SparseBucket
from dpfuse.buckets.tail_bucket import TailBucket
from dpfuse.canary import Canary
from dpfuse.comm_hook import CommHook
from dpfuse.plan import BucketPlan
from dpfuse.tail import Tail

__all__ = ["make_buckets", "make_hooked_buckets"]


def make_buckets(
    plan: BucketPlan,
    params: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    scale: float | None = None,
    wire: str | None = None,
    views: bool = False,
    canary: Canary | None = None,
    registered: bool = False,
    deterministic: bool = False,
    accumulates: bool = False,
) -> list[GradBucket]:
    """One bucket object per bucket of `plan`, in communication order.

    Args:
        plan: the plan of `params`.
        params: by registration index.
        group: process group of the collectives.
        scale: factor on each rank's gradients; None is the mean.
        wire: name of the dtype that travels; None sends gradients as they are.
        views: whether `.grad` becomes a view of the buffers.
        canary: what the `Tail` of the last bucket tells of; without, there is none.
        registered: whether buffers lie in memory that the group's back end has registered.
        deterministic: whether sums are formed in the order of the ranks, so that no bit depends on the plan.
        accumulates: whether buckets take dense gradients in backwards that are not synchronised, too.
    """
    buckets: list[GradBucket] = []
    side = side_stream_on(group, torch.device(plan.buckets[0].device)) if canary is not None else None
    for order, bucket in enumerate(plan.buckets):
        averaging = averaging_for(bucket.dtype, group.size(), scale, wire)
        tail = None
        if canary is not None and order == len(plan.buckets) - 1:
            factor = 1.0 if bucket.sparse else averaging.pre_scale  # a sparse bucket's tail travels unscaled
            tail = Tail(group.rank(), group.size(), len(plan.specs), factor, canary)
        kind = SparseBucket if bucket.sparse else OrderedBucket if deterministic else GradBucket
        if accumulates and not bucket.sparse:
            kind = AccumulatingOrderedBucket if deterministic else AccumulatingBucket
        elif not views and not deterministic and InPlaceBucket.suits(bucket, averaging):
            kind = InPlaceBucket
        buckets.append(
            kind(
                bucket,
                [params[index] for index in bucket.params],
                [plan.specs[index].name for index in bucket.params],
                group,
                averaging=averaging,
                views=views,
                tail=tail,
                label=f"bucket {order}",
            )
        )
        buckets[-1].registered = registered
        if side is not None and kind in (GradBucket, InPlaceBucket):
            buckets[-1].unpack_early_on(side)
    return buckets


def make_hooked_buckets(
    plan: BucketPlan,
    params: Sequence[Tensor],
    group: dist.ProcessGroup,
    hook: CommHook,
    *,
    views: bool,
    canary: Canary,
) -> list[GradBucket]:
    """One bucket object per bucket of `plan`, reduced by a communication hook, and one more for the tail.

    Args:
        plan: the plan of `params`.
        params: by registration index.
        group: process group of the tail.
        hook: what reduces the gradients.
        views: whether `.grad` becomes a view of the buffers.
        canary: what the tail tells of.
    """
    buckets: list[GradBucket] = []
    for order, bucket in enumerate(plan.buckets):
        kind = HookedSparseBucket if bucket.sparse else HookedBucket
        buckets.append(
            kind(
                bucket,
                [params[index] for index in bucket.params],
                [plan.specs[index].name for index in bucket.params],
                group,
                hook=hook,
                index=order,
                is_last=order == len(plan.buckets) - 1,
                views=views,
            )
        )
    device = plan.buckets[0].device
    return [*buckets, TailBucket(list(buckets), len(plan.specs), group, hook=hook, device=device, canary=canary)]
