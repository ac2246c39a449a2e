"""What a sweep compares: the bare module, torch's DDP, and dpfuse with several sizes. Times nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from dpfuse.engine.plan import DEFAULT_SIZE, BucketPlan, BucketRule, plan_buckets, rebuild_plan
from dpfuse.tune import Timeline

__all__ = [
    "ALONE",
    "DEFAULT",
    "TUNED",
    "Contender",
    "Sizes",
    "changes",
    "contenders",
    "ramp_plan",
    "without_duplicates",
]

Sizes = tuple[float, float]  # comm_buffer_size and last_comm_buffer_size in MB
DEFAULT: Sizes = (25.0, 1.0)  # 25 stands for no size, so buckets may be larger later
ALONE, TUNED = "no averaging", "tuned"
DDP_MODES: dict[str, dict[str, Any]] = {"torch DDP": {}, "torch DDP, views": {"gradient_as_bucket_view": True}}


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Args:
        name: in tables.
        sizes: of dpfuse; None for torch's DDP and for no wrapper.
        plan: for dpfuse, in place of the plan that follows from the sizes.
        ddp: options of torch's DDP; None for other contenders.
    """

    name: str
    sizes: Sizes | None = None
    plan: BucketPlan | None = None
    ddp: dict[str, Any] | None = None

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged."""
        return self.sizes is not None or self.ddp is not None

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return a wrapper around `module`, or `module` itself. DDP is told not to send buffers, as dpfuse does not."""
        if self.ddp is not None:
            return DistributedDataParallel(module, **self.ddp)
        if self.sizes is None:
            return module
        return dpfuse.DataParallel(
            module,
            comm_buffer_size=_passed(self.sizes[0]),
            last_comm_buffer_size=self.sizes[1],
            find_unused_parameters=True,
        )

    def use_plan(self, wrapped: nn.Module) -> None:
        """Set the contender's own plan, if it has one; to be called between two backwards."""
        if self.plan is not None:
            assert isinstance(wrapped, dpfuse.DataParallel)
            assert wrapped._sync is not None
            wrapped._sync.grads.use_plan(self.plan)


def contenders(grid: Iterable[Sizes], tuned: BucketPlan | None, *, find_unused: bool) -> list[Contender]:
    """Return all contenders.

    Args:
        grid: sizes of dpfuse.
        tuned: the planner's plan; None if some sizes make the same buckets.
        find_unused: torch's `find_unused_parameters`.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options = {buffers: False, "find_unused_parameters": find_unused}
    return [
        Contender(ALONE),
        *(Contender(name, ddp=mode | options) for name, mode in DDP_MODES.items()),
        *(Contender(_name(sizes), sizes) for sizes in grid),
        *([] if tuned is None else [Contender(TUNED, DEFAULT, tuned)]),
    ]


def without_duplicates(grid: Iterable[Sizes], timeline: Timeline, ranks: int) -> list[Sizes]:
    """Return the default sizes and those of the grid, but only one of sizes that make the same buckets.

    Args:
        grid: sizes to try.
        timeline: has the order of the gradients, on which the buckets depend.
        ranks: their number, on which the buckets depend, too.

    Returns:
        The sizes; of several that make the same buckets, the one nearest to the default.
    """
    kept: dict[str, Sizes] = {}
    for sizes in sorted({DEFAULT, *grid}, key=lambda sizes: (changes(sizes), sizes)):
        plan = ramp_plan(timeline, _passed(sizes[0]), sizes[1], ranks=ranks)
        kept.setdefault(plan.layout, sizes)
    return sorted(kept.values())


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


def _passed(size: float) -> float | None:
    return None if size == DEFAULT[0] else size


def changes(sizes: Sizes) -> int:
    """Return how many of the two sizes differ from the default."""
    return sum(size != usual for size, usual in zip(sizes, DEFAULT, strict=True))


def _name(sizes: Sizes) -> str:
    return f"{sizes[0]:g} / {sizes[1]:g} MB"
