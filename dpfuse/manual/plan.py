"""The buckets of gradients that a user averages by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import BucketPlan, Group, lay_out

__all__ = ["check_bucket_size", "plan_in_order"]


def check_bucket_size(bucket_size: Any) -> None:
    """Raise TypeError or ValueError unless this is a number of bytes."""
    if isinstance(bucket_size, bool) or not isinstance(bucket_size, (int, float)):
        raise TypeError(f"bucket_size must be a number of bytes, got {bucket_size!r}; pass for example 128 << 20")
    if not bucket_size >= 0:
        raise ValueError(f"bucket_size must be >= 0 bytes, got {bucket_size!r}; 0 moves every gradient alone")


def plan_in_order(specs: Sequence[ParamSpec], bucket_size: float) -> BucketPlan:
    """Plan the manual path: consecutive gradients of one dtype share a bucket until its bytes reach a size.

    Args:
        specs: the gradients, in the order given by the user.
        bucket_size: bytes.

    Returns:
        Groups in the order of `specs`, which is also the communication order.

    Example:
        >>> from dpfuse import ParamSpec
        >>> from dpfuse.manual.plan import plan_in_order
        >>> specs = [ParamSpec("", (2,), dtype) for dtype in ("float32", "float64", "float32")]
        >>> [bucket.params for bucket in plan_in_order(specs, 1024).buckets]
        [(0,), (1,), (2,)]

    Source: Paddle's `build_groups`, used by its `fused_allreduce_gradients`.
    """
    groups: list[Group] = []
    key, nbytes = None, 0
    for index, spec in enumerate(specs):
        if groups and (spec.dtype, spec.device) == key and nbytes < bucket_size:
            groups[-1].members.append(index)
            nbytes += spec.nbytes
        else:
            groups.append(Group([index], bucket_size))
            key, nbytes = (spec.dtype, spec.device), spec.nbytes
    return BucketPlan(tuple(specs), tuple(lay_out(specs, groups)), bucket_size, bucket_size)
