"""What a feature adds to the averaging of gradients, without being known to the engine by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfuse.engine.buffer import Buffer
from dpfuse.engine.exchanges.ordered import Rounding
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Delivery, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.streams import SideStream

__all__ = ["Feature"]


class Feature:
    """Adds something to each bucket, or hears of backwards. Each method does nothing unless a feature overrides it."""

    eager = True  # whether gradients may be packed before their bucket is

    def step(self, order: int, bucket: Bucket, buffer: Buffer, report: Report | None) -> PackStep | None:
        """What it does while a bucket is packed; `report` if it travels with this bucket, which is the last one."""
        return None

    def rounding(self, order: int, bucket: Bucket, buffer: Buffer) -> Rounding | None:
        """What keeps the rounding errors of sums of this bucket. Asked before `step`."""
        return None

    def squares(self, order: int, bucket: Bucket) -> Tensor | None:
        """Where a private delivery adds up the squares of the gradients, [] float64."""
        return None

    def measured(self, order: int, delivery: Delivery, buffer: Buffer, side: SideStream | None) -> Delivery:
        """The delivery, or one that does something around it; `side` if something can be done while backward runs."""
        return delivery

    def opened(self, *, sync: bool, announced: bool) -> None:
        """A backward begins; may raise, before anything is sent."""

    def delivered(self) -> None:
        """All gradients of a synchronised backward are averaged."""

    def alarmed(self, alarm: Tensor, deliveries: Sequence[Delivery]) -> None:
        """On CUDA: what these deliveries have measured is of no use if this flag, [] bool on the device, is set."""
