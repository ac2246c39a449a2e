"""Bucket planning: parameter sizes in, buckets with offsets out. Knows no tensor and no process group.

The assignment rule is that of Paddle's `DataParallel` (`eager_assign_group_by_size`) and of torch's
`_compute_bucket_assignment_by_size`. After the first synchronised backward `bucket_sizes.py` may cut that order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from dpfuse.arguments import instance
from dpfuse.engine.bucket_sizes import ON_CPU, ON_GPU, ON_SHARED_CORES, ramp_limits
from dpfuse.engine.param_spec import ITEM_SIZE, ParamSpec, describe_parameters
from dpfuse.errors import DPFuseError

__all__ = [
    "ALIGNMENT",
    "DEFAULT_SIZE",
    "MB",
    "NO_WISHES",
    "PLAN_FORMAT",
    "Bucket",
    "BucketPlan",
    "BucketRule",
    "Group",
    "Slot",
    "assign_buckets",
    "lay_out",
    "lay_out_slots",
    "plan_buckets",
    "rebuild_plan",
    "size_in_bytes",
]

MB = 1 << 20
DEFAULT_SIZE = 25  # MB of a bucket, where a program has passed none
PLAN_FORMAT = "dpfuse plan 1"
ALIGNMENT = 16  # bytes; one 128-bit load or store never straddles two slots


@dataclass(frozen=True)
class BucketRule:
    """How buckets are made, beyond the two sizes; the default adds nothing.

    Example:
        >>> from dpfuse.engine.plan import BucketRule
        >>> BucketRule(caps=(1 << 20, 25 << 20))
        BucketRule(caps=(1048576, 26214400), delayed=(), behind='', ramp_ranks=0, grows=False)
    """

    caps: tuple[float, ...] = ()  # bytes, in the order of communication; the last repeats; they replace the sizes
    delayed: tuple[str, ...] = ()  # names of parameters that get buckets of their own, sent later
    behind: str = ""  # the name of the parameter after whose bucket they are sent
    # The number of ranks if `rebuild_plan` cuts by `bucket_sizes.py`, else 0. The first plan does not depend on it.
    ramp_ranks: int = field(default=0, compare=False)
    # Whether the program has passed no cap, so that `rebuild_plan` lets it grow with the model where that is best.
    grows: bool = field(default=False, compare=False)


NO_WISHES = BucketRule()


class Slot(NamedTuple):
    """One parameter's place in a communication buffer: parameter index, offset and length in elements."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients share one communication buffer and one all-reduce."""

    params: tuple[int, ...]  # registration indices, ascending
    nbytes: int  # of the parameters alone
    dtype: str
    device: str
    slots: tuple[Slot, ...]  # in the order of `params`
    numel: int  # length of the flat buffer in elements, padding included
    cap: float | None  # bytes that closed it; None: left over, or a sparse parameter alone
    sparse: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a model, in the order in which they are communicated.

    Args:
        specs: the parameters, by registration index.
        buckets: in communication order; the last is sent when backward is about to end.
        comm_buffer_size: cap of every bucket except the first closed of each dtype, in bytes.
        last_comm_buffer_size: cap of the first closed bucket of each dtype, in bytes.
        rule: how buckets are made, beyond these two sizes.
        tuned: whether the buckets were chosen, by `dpfuse.tune` or a user, and not made by the rule. They are kept
            after the first backward.

    Example:
        >>> from dpfuse import ParamSpec, plan_buckets
        >>> plan = plan_buckets([ParamSpec(n, (k,), "float32") for n, k in [("a", 2), ("b", 3), ("c", 5)]],
        ...                     comm_buffer_size=32 / 2**20, last_comm_buffer_size=8 / 2**20)
        >>> [bucket.params for bucket in plan.buckets]
        [(1, 2), (0,)]
    """

    specs: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    comm_buffer_size: float
    last_comm_buffer_size: float
    rule: BucketRule = NO_WISHES
    tuned: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, without padding."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def layout(self) -> str:
        """Canonical text of the layout. It is equal on two ranks if and only if their collectives match."""
        return ";".join(
            f"{bucket.dtype}:{','.join(f'{slot.param}@{slot.offset}' for slot in bucket.slots)}"
            for bucket in self.buckets
        )

    def warnings(self) -> tuple[str, ...]:
        """Return one text for each property of this plan that is likely to cost time."""
        if not self.buckets or self.last_comm_buffer_size >= self.comm_buffer_size:
            return ()
        last = self.buckets[-1]
        heaviest = max(last.params, key=lambda index: self.specs[index].nbytes)
        spec = self.specs[heaviest]
        if last.cap != self.last_comm_buffer_size or spec.nbytes < self.comm_buffer_size:
            return ()
        return (
            f"the bucket sent last holds {spec.name!r} of {_megabytes(spec.nbytes)} MB, where "
            f"last_comm_buffer_size={_megabytes(self.last_comm_buffer_size)} MB asked for a small one: its "
            f"all-reduce cannot overlap with backward. Register a small parameter first, or accept the wait.",
        )

    def explain(self) -> str:
        """Return the plan as a table: order, bytes, parameters, and the cap that closed each bucket.

        Returns:
            Lines of text; sizes in MB of 1048576 bytes; warnings at the end.
        """
        rows = [("order", "MB", "dtype", "params", "closed by", "first … last parameter")]
        for order, bucket in enumerate(self.buckets):
            first, last = self.specs[bucket.params[0]].name, self.specs[bucket.params[-1]].name
            rows.append((
                str(order),
                _megabytes(bucket.nbytes),
                bucket.dtype,
                str(len(bucket.params)),
                self._closed_by(bucket),
                first if len(bucket.params) == 1 else f"{first} … {last}",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON: names, shapes and dtypes of the parameters, and the buckets. Call it on one rank.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            OSError: the file cannot be written.

        Example:
            >>> import dpfuse, pathlib, tempfile, torch
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "plan.json"
            >>> dpfuse.plan_buckets(torch.nn.Linear(4, 2)).save(path)
            >>> dpfuse.load_plan(path).buckets[0].params
            (0, 1)
        """
        instance("path", path, (str, os.PathLike), "the path of a file")
        facts = {
            "format": PLAN_FORMAT,
            "parameters": [(spec.name, spec.shape, spec.dtype, spec.sparse) for spec in self.specs],
            "buckets": [bucket.params for bucket in self.buckets],
        }
        Path(path).write_text(json.dumps(facts), encoding="utf-8")

    def _closed_by(self, bucket: Bucket) -> str:
        if self.tuned:
            return "given"
        if bucket.sparse:
            return "sparse, alone"
        if bucket.cap is None:
            return "end of the model"
        caps = {self.comm_buffer_size: "comm cap", self.last_comm_buffer_size: "last cap"}
        caps = dict.fromkeys(self.rule.caps, "comm cap") | caps
        return f"{caps.get(bucket.cap, 'ramp')} {_megabytes(bucket.cap)} MB"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / MB:.4g}"


def size_in_bytes(megabytes: Any, name: str) -> float:
    """Convert a buffer size from MB (1048576 bytes; fractions and `inf` are allowed) to bytes.

    Raises:
        TypeError: not a number.
        ValueError: negative or NaN.

    Example:
        >>> from dpfuse.engine.plan import size_in_bytes
        >>> size_in_bytes(0.5, "comm_buffer_size")
        524288
    """
    if isinstance(megabytes, bool) or not isinstance(megabytes, Real):
        raise TypeError(
            f"{name} must be a number of MB, got {megabytes!r} of type {type(megabytes).__name__}; "
            f"pass for example {name}=25"
        )
    size = float(megabytes)
    if math.isnan(size) or size < 0:
        raise ValueError(f"{name} must be >= 0 MB, got {megabytes!r}; 0 puts every parameter alone")
    return size if math.isinf(size) else int(size * MB)


class Group(NamedTuple):
    """Parameters of one bucket, and the bytes that closed it."""

    members: list[int]
    cap: float | None


def assign_buckets(
    specs: Sequence[ParamSpec], limits: Sequence[float], order: Iterable[int] | None = None
) -> list[Group]:
    """Decide which parameters share a bucket, in the order of the walk (communication order is the reverse).

    One bucket is open per (dtype, device). A parameter is added to the open one. The bucket closes once its bytes
    reach the current limit, so the parameter that crosses the limit stays inside. The n-th bucket that closes for
    a dtype uses the n-th limit, and the last limit repeats. A sparse parameter forms a bucket alone and closes
    nothing. At the end the buckets that are still open are added, and all are sorted by their first member.

    Args:
        specs: the parameters.
        limits: bytes, at least one.
        order: indices into `specs` in the order of the walk; registration order by default.

    Returns:
        Groups of indices into `specs`, sorted by the position of their first member.

    Example:
        >>> from dpfuse import ParamSpec
        >>> from dpfuse.engine.plan import assign_buckets
        >>> specs = [ParamSpec(str(n), (n,), "float32") for n in (2, 3, 5)]
        >>> [group.members for group in assign_buckets(specs, [8, 32])]
        [[0], [1, 2]]
    """
    open_groups: dict[Hashable, tuple[int, list[int], int]] = {}  # first position, members, bytes
    closed_count: dict[Hashable, int] = {}
    groups: list[tuple[int, Group]] = []
    for position, index in enumerate(range(len(specs)) if order is None else order):
        spec = specs[index]
        if spec.sparse:
            groups.append((position, Group([index], None)))
            continue
        key = (spec.dtype, spec.device)
        first, members, nbytes = open_groups.get(key) or (position, [], 0)
        members.append(index)
        nbytes += spec.nbytes
        count = closed_count.get(key, 0)
        limit = limits[min(count, len(limits) - 1)]
        if nbytes >= limit:
            groups.append((first, Group(members, limit)))
            closed_count[key] = count + 1
            open_groups.pop(key, None)
        else:
            open_groups[key] = (first, members, nbytes)
    groups += [(first, Group(members, None)) for first, members, _ in open_groups.values()]
    return [group for _, group in sorted(groups, key=lambda item: item[0])]


def plan_buckets(
    params: Any, comm_buffer_size: float = 25, last_comm_buffer_size: float = 1, *, rule: BucketRule = NO_WISHES
) -> BucketPlan:
    """Plan the buckets with which `DataParallel` would start.

    The small cap goes to the parameters registered first, whose gradients arrive last: the bucket that is
    sent when backward ends is small, and the unfilled remainder of the model goes first.

    Args:
        params: a module, a list of parameters, or a list of `ParamSpec`.
        comm_buffer_size: cap of a bucket in MB (1048576 bytes); 0 puts every parameter alone, `inf` makes
            one bucket per dtype.
        last_comm_buffer_size: cap in MB of the first bucket closed of each dtype, the one sent last.
        rule: a `dpfuse.engine.plan.BucketRule`: a cap for each bucket, parameters to send later.

    Returns:
        The plan; `plan.buckets` is in communication order, `print(plan.explain())` shows it as a table.

    Raises:
        TypeError, ValueError: a size is not a number, negative or NaN, or `params` has no trainable parameter.

    Example:
        >>> import torch, dpfuse
        >>> model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.Linear(512, 10))
        >>> [bucket.params for bucket in dpfuse.plan_buckets(model).buckets]
        [(1, 2, 3), (0,)]

    Source: Paddle's `DataParallel` (`init_reducer`) and `core.eager_assign_group_by_size`.
    """
    cap = size_in_bytes(comm_buffer_size, "comm_buffer_size")
    last_cap = size_in_bytes(last_comm_buffer_size, "last_comm_buffer_size")
    specs = tuple(describe_parameters(params))
    if not specs:
        raise ValueError(
            "params has no trainable parameter; expected at least one with requires_grad=True. Or pass the model "
            "itself."
        )
    # Before the first backward, gradients are expected in the reverse of the order of registration.
    return _arrange(BucketPlan(specs, (), cap, last_cap, rule), range(len(specs))[::-1])


def rebuild_plan(plan: BucketPlan, ready_order: Sequence[int], *, one_machine: bool = False) -> BucketPlan:
    """Plan the buckets again, for the order in which gradients really became ready.

    Args:
        plan: the plan under which the order was observed. Its caps are kept. The default cap may grow with the model.
        ready_order: parameter indices, first ready first; a parameter left out never became ready.
        one_machine: whether all ranks are on one machine. If it has no GPUs, the ranks share its cores.

    Returns:
        A plan by the same rule over `ready_order`. Parameters that never became ready form buckets that are sent last.

    Raises:
        DPFuseError: `ready_order` names a parameter twice, or one that is not in the plan.

    Example:
        >>> import dpfuse
        >>> from dpfuse.engine.plan import rebuild_plan
        >>> specs = [dpfuse.ParamSpec(name, (4,), "float32") for name in "abc"]
        >>> plan = dpfuse.plan_buckets(specs, comm_buffer_size=0, last_comm_buffer_size=0)
        >>> [bucket.params for bucket in rebuild_plan(plan, [0, 2]).buckets]
        [(0,), (2,), (1,)]

    Source: the rebuild of torch's `Reducer`, with Paddle's rule, or with the limits of `ramp_limits`.
    """
    seen = set(ready_order)
    if len(seen) != len(ready_order) or not seen <= set(range(len(plan.specs))):
        raise DPFuseError(
            f"the ready order names {len(ready_order)} parameters, {len(seen)} distinct, of "
            f"{len(plan.specs)}; expected each at most once. The ranks' models differ, or this is a bug."
        )
    return _arrange(plan, ready_order, plan.rule.ramp_ranks, one_machine)


def _arrange(
    plan: BucketPlan, ready_order: Sequence[int], ramp_ranks: int = 0, one_machine: bool = False
) -> BucketPlan:
    """Return a plan with the specs, sizes and rule of `plan`, for this order of gradients."""
    specs, rule = plan.specs, plan.rule
    names = {spec.name: index for index, spec in enumerate(specs)} if rule.delayed else {}
    delayed = [names[name] for name in rule.delayed if name in names]  # others may have been frozen since
    seen, apart = set(ready_order), set(delayed)
    walk = [index for index in ready_order if index not in apart]
    never = [index for index in range(len(specs)) if index not in seen and index not in apart]
    if rule.caps:
        groups = [*assign_buckets(specs, rule.caps, walk), *assign_buckets(specs, rule.caps[-1:], never)]
    else:
        total, cap = sum(specs[index].nbytes for index in walk), plan.comm_buffer_size
        ramp = ON_GPU if specs[0].device != "cpu" else ON_SHARED_CORES if one_machine else ON_CPU
        if rule.grows and ramp_ranks:
            cap += total / ramp.share
        limits = ramp_limits(total, cap, plan.last_comm_buffer_size, ramp_ranks, ramp)
        groups = [*assign_buckets(specs, limits, walk[::-1])[::-1], *assign_buckets(specs, [cap], never)[::-1]]
    if delayed:
        ready = {index: position for position, index in enumerate([*ready_order, *never])}
        last = dict.fromkeys(range(len(specs)), len(specs)) | ready  # a delayed one that was never ready comes last
        for group in assign_buckets(specs, [math.inf], delayed):
            _put_behind(group, groups, names.get(rule.behind), last)
    ordered = (Group(sorted(group.members), group.cap) for group in groups)
    return replace(plan, buckets=tuple(lay_out(specs, ordered)))


def _put_behind(late: Group, groups: list[Group], index: int | None, ready: Mapping[int, int]) -> None:
    """Insert `late` after the group of parameter `index`, and after every group that is ready earlier."""
    due = max(ready[member] for member in late.members)
    before = [
        place
        for place, group in enumerate(groups, start=1)
        if index in group.members or max(ready[member] for member in group.members) < due
    ]
    groups.insert(max(before, default=0), late)


def lay_out(specs: Sequence[ParamSpec], groups: Iterable[Group]) -> Iterator[Bucket]:
    """Yield a bucket with its slots for each group of parameters, in this order.

    Args:
        specs: the parameters.
        groups: indices into `specs`, ascending.
    """
    for members, cap in groups:
        head = specs[members[0]]
        slots, length = lay_out_slots([(index, specs[index].numel) for index in members], head.dtype)
        nbytes = sum(slot.numel for slot in slots) * ITEM_SIZE[head.dtype]
        yield Bucket(tuple(members), nbytes, head.dtype, head.device, tuple(slots), length, cap, head.sparse)


def lay_out_slots(numels: Iterable[tuple[int, int]], dtype: str) -> tuple[list[Slot], int]:
    """Return the slots of one flat buffer of `dtype`, each at an aligned offset, and its length in elements.

    Args:
        numels: per parameter its index and its number of elements.
        dtype: by name.

    Example:
        >>> from dpfuse.engine.plan import lay_out_slots
        >>> slots, length = lay_out_slots([(0, 3), (1, 4)], "float32")
        >>> [slot.offset for slot in slots], length
        ([0, 4], 8)
    """
    step = max(1, ALIGNMENT // ITEM_SIZE[dtype])  # elements between possible starts
    slots, offset = [], 0
    for index, numel in numels:
        slots.append(Slot(index, offset, numel))
        offset += -(-numel // step) * step
    return slots, offset
