"""How gradients are averaged: what a user asked for, as far as the engine needs it. Read by what makes the buckets."""

from __future__ import annotations

from dataclasses import dataclass

from dpfuse.engine.averaging import UNCHANGED, Wire
from dpfuse.engine.micro_batches import MicroBatches

__all__ = ["SyncSettings"]


@dataclass(frozen=True)
class SyncSettings:
    """How gradients are averaged; what users pass to a wrapper, as far as the engine needs it.

    Args:
        number: which of the wrappers of its group this one is.
        scale: factor on each rank's gradients; None is the mean.
        wire: how gradients travel.
        views: whether `.grad` becomes a view of the communication buffer.
        registered: whether communication buffers lie in memory that the group's back end has registered.
        deterministic: whether sums are formed in the order of the ranks; buckets keep the order of registration.
        micro_batches: the deal of a fixed number of micro-batches, whose gradients are added in one tree; None if there
            is none.
        accumulates: whether buckets take gradients in backwards that are not synchronised, too.
        strict: whether to wait in each backward for what the peers report.
        warn_unused: whether to warn, once, of parameters without a gradient.
        alone: whether another wrapper of the same parameters would break what this one does.
        asks_graph: whether to ask the graph of each backward which parameters it reaches.
        stall_timeout: seconds.
    """

    number: int = 0
    scale: float | None = None
    wire: Wire = UNCHANGED
    views: bool = False
    registered: bool = False
    deterministic: bool = False
    micro_batches: MicroBatches | None = None
    accumulates: bool = False
    strict: bool = False
    warn_unused: bool = True
    alone: bool = False
    asks_graph: bool = False
    stall_timeout: float = 60.0

    @property
    def keeps_order(self) -> bool:
        """Whether buckets keep the order of registration: the bits of a training must not depend on its first step."""
        return self.deterministic or self.micro_batches is not None
