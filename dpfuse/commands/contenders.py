"""What a sweep compares: the bare module, torch's DDP, and dpfuse with several sizes. Runs and times nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from dpfuse.engine.plan import BucketPlan
from dpfuse.tune import Timeline, paddle_plan

__all__ = ["ALONE", "DEFAULT", "TUNED", "Contender", "Sizes", "changes", "contenders", "without_duplicates"]

Sizes = tuple[float, float]  # comm_buffer_size and last_comm_buffer_size in MB
DEFAULT: Sizes = (25.0, 1.0)
ALONE, TUNED = "no averaging", "tuned"
DDP_MODES: dict[str, dict[str, Any]] = {"torch DDP": {}, "torch DDP, views": {"gradient_as_bucket_view": True}}


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Args:
        name: in tables.
        sizes: of dpfuse; None: torch's DDP, or no wrapper at all.
        plan: that dpfuse is to use, in place of the one that the sizes give.
        ddp: options of torch's DDP, where that is meant.
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
        """A wrapper around `module`, or `module` itself. Nobody sends buffers: DDP alone would by default."""
        if self.ddp is not None:
            return DistributedDataParallel(module, **self.ddp)
        if self.sizes is None:
            return module
        return dpfuse.DataParallel(
            module, comm_buffer_size=self.sizes[0], last_comm_buffer_size=self.sizes[1], find_unused_parameters=True
        )

    def use_plan(self, wrapped: nn.Module) -> None:
        """Let dpfuse use the contender's own plan, if it has one; to be called between two backwards."""
        if self.plan is not None:
            assert isinstance(wrapped, dpfuse.DataParallel)
            assert wrapped._sync is not None
            wrapped._sync.use_plan(self.plan)


def contenders(grid: Iterable[Sizes], tuned: BucketPlan | None, *, find_unused: bool) -> list[Contender]:
    """All of them; `tuned` is the planner's plan, None where some of the sizes make the same buckets."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options = {buffers: False, "find_unused_parameters": find_unused}
    return [
        Contender(ALONE),
        *(Contender(name, ddp=mode | options) for name, mode in DDP_MODES.items()),
        *(Contender(_name(sizes), sizes) for sizes in grid),
        *([] if tuned is None else [Contender(TUNED, DEFAULT, tuned)]),
    ]


def without_duplicates(grid: Iterable[Sizes], timeline: Timeline) -> list[Sizes]:
    """The default and the grid; of those that make the same buckets for gradients in this order, the simplest."""
    kept: dict[str, Sizes] = {}
    for sizes in sorted({DEFAULT, *grid}, key=lambda sizes: (changes(sizes), sizes)):
        kept.setdefault(paddle_plan(timeline, *sizes).layout, sizes)
    return sorted(kept.values())


def changes(sizes: Sizes) -> int:
    """How many of the sizes are not the default."""
    return sum(size != usual for size, usual in zip(sizes, DEFAULT, strict=True))


def _name(sizes: Sizes) -> str:
    return f"{sizes[0]:g} / {sizes[1]:g} MB"
