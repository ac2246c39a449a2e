"""All buckets of a plan: one object for each, of the right kind. Knows no autograd hook and no order of events."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.averaging import FP8, Averaging, averaging_for, real_dtype
from dpfuse.engine.buckets.accumulating_bucket import AccumulatingBucket, AccumulatingOrderedBucket
from dpfuse.engine.buckets.bucket import GradBucket
from dpfuse.engine.buckets.eager_bucket import EagerBucket, EagerOrderedBucket
from dpfuse.engine.buckets.early_unpack import side_stream_on
from dpfuse.engine.buckets.hooked_bucket import HookedBucket, HookedSparseBucket
from dpfuse.engine.buckets.in_place_bucket import InPlaceBucket
from dpfuse.engine.buckets.ordered_bucket import OrderedBucket
from dpfuse.engine.buckets.quantized_bucket import QuantizedBucket
from dpfuse.engine.buckets.sparse_bucket import SparseBucket
from dpfuse.engine.buckets.tail_bucket import TailBucket
from dpfuse.engine.comm_hook import CommHook
from dpfuse.engine.plan import Bucket, BucketPlan
from dpfuse.engine.report import Tail
from dpfuse.engine.window import Canary
from dpfuse.engine.wire import UNCHANGED, Wire
from dpfuse.gradients.error_feedback import ErrorFeedback
from dpfuse.gradients.residual import Residual

__all__ = ["make_buckets", "make_hooked_buckets"]


def make_buckets(
    plan: BucketPlan,
    params: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    scale: float | None = None,
    wire: Wire = UNCHANGED,
    views: bool = False,
    canary: Canary | None = None,
    registered: bool = False,
    deterministic: bool = False,
    feedback: ErrorFeedback | None = None,
    accumulates: bool = False,
) -> list[GradBucket]:
    """One bucket object per bucket of `plan`, in communication order.

    Args:
        plan: the plan of `params`.
        params: by registration index.
        group: process group of the collectives.
        scale: factor on each rank's gradients; None is the mean.
        wire: how gradients travel.
        views: whether `.grad` becomes a view of the buffers.
        canary: what the `Tail` of the last bucket tells of; without, there is none.
        registered: whether buffers lie in memory that the group's back end has registered.
        deterministic: whether sums are formed in the order of the ranks, so that no bit depends on the plan.
        feedback: where to keep what rounding takes from dense gradients that travel narrowed; None loses it.
        accumulates: whether buckets take dense gradients in backwards that are not synchronised, too.
    """
    buckets: list[GradBucket] = []
    side = side_stream_on(group, torch.device(plan.buckets[0].device)) if canary is not None else None
    for order, bucket in enumerate(plan.buckets):
        # Rows are not blocks: sparse gradients travel as they are where the others are quantized.
        averaging = averaging_for(
            bucket.dtype, group.size(), scale, None if bucket.sparse and wire.is_fp8 else wire.dtype
        )
        in_order = deterministic or wire.adds_in_float32(averaging.dtype)
        tail = None
        if canary is not None and order == len(plan.buckets) - 1 and not wire.is_fp8:
            factor = 1.0 if bucket.sparse else averaging.pre_scale  # a sparse bucket's tail travels unscaled
            tail = Tail(group.rank(), group.size(), len(plan.specs), factor, canary)
        kind = SparseBucket if bucket.sparse else OrderedBucket if in_order else GradBucket
        if averaging.dtype in FP8:
            kind = QuantizedBucket
        if accumulates and not bucket.sparse:
            kind = AccumulatingOrderedBucket if deterministic else AccumulatingBucket
        elif not views and not in_order and InPlaceBucket.suits(bucket, averaging):
            kind = InPlaceBucket
        elif views and canary is not None and EagerBucket.suits(bucket, averaging):
            kind = EagerOrderedBucket if in_order else EagerBucket
        ours = [params[index] for index in bucket.params]
        names = [plan.specs[index].name for index in bucket.params]
        buckets.append(
            kind(
                bucket,
                ours,
                names,
                group,
                averaging=averaging,
                views=views,
                tail=tail,
                label=f"bucket {order}",
            )
        )
        buckets[-1].registered = registered
        if feedback is not None and not bucket.sparse and wire.narrowed(real_dtype(bucket.dtype)):
            buckets[-1].residual = Residual(feedback, order, bucket, ours, names)
        if side is not None and kind in (GradBucket, InPlaceBucket):
            buckets[-1].overlap_on(side)
    if canary is not None and wire.is_fp8:
        buckets.append(_tail_alone(plan, group, canary))
    return buckets


def _tail_alone(plan: BucketPlan, group: dist.ProcessGroup, canary: Canary) -> GradBucket:
    """A bucket without gradients, for a tail that cannot travel with them: its signs and counts need their bits."""
    return GradBucket(
        Bucket((), 0, "float32", plan.buckets[0].device, (), 0, None),
        (),
        (),
        group,
        averaging=Averaging("float32", 1.0),
        tail=Tail(group.rank(), group.size(), len(plan.specs), 1.0, canary),
        label="tail",
    )


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
