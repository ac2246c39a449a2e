"""Makes a plan that a wrapper can use from groups of parameters. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral

from dpfuse.arguments import instance
from dpfuse.engine.param_spec import ParamSpec, specs_of
from dpfuse.engine.plan import Bucket, BucketPlan, lay_out_slots, size_in_bytes

__all__ = ["plan_from_groups"]


def plan_from_groups(
    specs: Sequence[ParamSpec],
    groups: Iterable[Iterable[int]],
    *,
    comm_buffer_size: float = math.inf,
    last_comm_buffer_size: float = math.inf,
) -> BucketPlan:
    """Return the plan with these buckets.

    Args:
        specs: the parameters, by registration index.
        groups: for each bucket, registration indices in any order. Buckets are in the order of communication.
        comm_buffer_size: the limit in MB with which the groups were made. The plan only records it.
        last_comm_buffer_size: the same for the bucket sent last.

    Returns:
        A plan in which the parameters of each bucket ascend, with the layout of `plan_buckets`.

    Raises:
        ValueError: A limit is negative or NaN. A group is empty, mixes dtypes or devices, or has a sparse parameter
            together with others. A parameter is in no group, in several groups, or does not exist.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import plan_from_groups
        >>> specs = [dpfuse.ParamSpec(name, (3,), "float32") for name in "abc"]
        >>> [(bucket.params, bucket.numel) for bucket in plan_from_groups(specs, [[2, 1], [0]]).buckets]
        [((1, 2), 8), ((0,), 4)]
    """
    specs = specs_of(specs)
    instance("groups", groups, Iterable, "a list of groups, each a list of indices")
    buckets = tuple(_bucket(specs, _members(group)) for group in groups)
    seen = sorted(index for bucket in buckets for index in bucket.params)
    if seen != list(range(len(specs))):
        wrong = next(index for index in [*range(len(specs)), *seen] if seen.count(index) != 1)
        raise ValueError(
            f"parameter {specs[wrong].name!r} is in {seen.count(wrong)} groups; expected every parameter in exactly one"
        )
    cap = size_in_bytes(comm_buffer_size, "comm_buffer_size")
    last_cap = size_in_bytes(last_comm_buffer_size, "last_comm_buffer_size")
    return BucketPlan(specs, buckets, cap, last_cap, tuned=True)


def _members(group: Iterable[int]) -> list[int]:
    instance("each of groups", group, Iterable, "a list of indices")
    members = list(group)
    for index in members:
        instance("each index in groups", index, Integral, "a whole number")
    return sorted(members)


def _bucket(specs: Sequence[ParamSpec], members: Sequence[int]) -> Bucket:
    if not members or not 0 <= members[0] <= members[-1] < len(specs):
        raise ValueError(f"a group must hold parameter indices from 0 to {len(specs) - 1}, got {list(members)}")
    head = specs[members[0]]
    for spec in (specs[index] for index in members):
        if (spec.dtype, spec.device) != (head.dtype, head.device):
            raise ValueError(
                f"{head.name!r} is {head.dtype} on {head.device} and {spec.name!r} {spec.dtype} on {spec.device}; "
                "expected one dtype and one device per group"
            )
        if spec.sparse and len(members) > 1:
            raise ValueError(f"{spec.name!r} has sparse gradients; expected it alone in its group, got {len(members)}")
    slots, numel = lay_out_slots([(index, specs[index].numel) for index in members], head.dtype)
    nbytes = sum(specs[index].nbytes for index in members)
    return Bucket(tuple(members), nbytes, head.dtype, head.device, tuple(slots), numel, None, head.sparse)
