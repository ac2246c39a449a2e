"""What a feature adds to the averaging of gradients, without being known to the engine by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer, Format, Zeros
from dpfuse.engine.exchanges.ordered import Rounding
from dpfuse.engine.plan import Bucket, BucketPlan
from dpfuse.engine.protocols import Companion, Delivery, Exchange, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportLayout
from dpfuse.engine.streams import SideStream

__all__ = ["Feature"]


class Feature:
    """Adds something to each bucket, or is told of backwards. A method that is not overridden does nothing."""

    eager = True  # whether gradients may be packed one by one, before their bucket is sent
    divides = False  # whether each rank receives only its part of each sum; the report then travels alone
    keeps_buckets = False  # whether buckets must stay as they are after the first synchronised backward
    hears_alarm = False  # whether the class overrides `alarmed`; only then it is called

    def __init_subclass__(cls) -> None:
        cls.hears_alarm = cls.alarmed is not Feature.alarmed

    def register(self, layout: ReportLayout) -> None:
        """Register what the ranks tell each other for it. Called once, on all ranks in the same order."""

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        """Return what it does while a bucket is packed. `report` is that of the last bucket, None for others."""
        return None

    def rounding(self, order: int, bucket: Bucket, buffer: CommBuffer) -> Rounding | None:
        """Return what keeps the rounding errors of sums of this bucket. It is called before `step`."""
        return None

    def planned(self, plan: BucketPlan) -> None:
        """Note that the buckets of this plan are made now. An error raised here keeps those in use."""

    def memory(self, device: str, usual: Zeros) -> Zeros:
        """Return what allocates the communication buffer of the next dense bucket: `usual`, or another function."""
        return usual

    def format(self, bucket: Bucket, params: Sequence[Tensor]) -> Format | None:
        """Return how the gradients of these parameters lie in their buffer, if it divides them among the ranks."""
        return None

    def exchange(self, order: int, bucket: Bucket, buffer: CommBuffer, usual: Exchange) -> Exchange:
        """Return how this bucket travels: the `usual` way, or another one."""
        return usual

    def squares(self, order: int, bucket: Bucket) -> Tensor | None:
        """Return where a private delivery adds up the squares of the gradients, [] float64."""
        return None

    def delivery(self, order: int, delivery: Delivery, buffer: CommBuffer, side: SideStream | None) -> Delivery:
        """Return `delivery`, or one that does more around it. On `side`, work can be done while backward runs."""
        return delivery

    def beside(self) -> Companion | None:
        """Return what travels beside the last bucket."""
        return None

    def opened(self, *, sync: bool, announced: bool) -> None:
        """Note that a backward begins. An error raised here comes before anything is sent."""

    def thawed(self, params: Sequence[Tensor]) -> None:
        """Note that these parameters were frozen, and require gradients from the backward on that begins now."""

    def left(self, *, added: bool) -> None:
        """Note that a backward has ended without averaging. `added` says whether it has added to gradients."""

    def delivered(self) -> None:
        """Note that all gradients of a synchronised backward are delivered."""

    def alarmed(self, alarm: Callable[[], Tensor], deliveries: Sequence[Delivery]) -> None:
        """Invalidate what these deliveries have measured, if `alarm()`, [] bool on the device, is set. For CUDA."""
