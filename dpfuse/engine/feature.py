"""What a feature adds to the averaging of gradients, without being known to the engine by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.backward_table import State
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.comm_buffer import CommBuffer, Format, Zeros
from dpfuse.engine.events import Events, Watcher
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.exchanges.ordered import Rounding
from dpfuse.engine.feeds.accumulating import Accumulation
from dpfuse.engine.plan import Bucket, BucketPlan
from dpfuse.engine.protocols import Companion, Delivery, Exchange, PackStep
from dpfuse.engine.ready import ReadyHook
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportLayout

__all__ = ["Backwards", "Engine", "Feature", "ReadyRecorder"]


class Backwards(Protocol):
    """What opens and ends backwards."""

    @property
    def state(self) -> State:
        """That of the backward that is open, if any."""

    @property
    def accumulation(self) -> Accumulation:
        """What counts and accumulates backwards that are not synchronised."""


class Engine(Protocol):
    """What a feature may look at. It registers its places in the report, and may throw away what was accumulated."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""

    @property
    def layout(self) -> ReportLayout:
        """Where what ranks tell each other is laid out."""

    @property
    def events(self) -> Events:
        """What is told of a training; watchers may come and go."""

    @property
    def plan(self) -> BucketPlan:
        """The buckets on which all ranks have agreed."""

    @property
    def params(self) -> Sequence[Any]:
        """The planned parameters, by registration index."""

    @property
    def buckets(self) -> Sequence[GradBucket]:
        """The buckets in use, in communication order."""

    @property
    def reducer(self) -> Backwards:
        """What knows the state of a backward."""

    @property
    def completed(self) -> int:
        """The number of synchronised backwards."""

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph has captured the last synchronised backward."""

    @property
    def without_inputs(self) -> bool:
        """Whether this rank has no inputs, and only takes part in a backward of ranks that still have some."""

    @property
    def source(self) -> int:
        """The rank whose state the others take."""

    @property
    def hook(self) -> CommHook | None:
        """The communication hook that reduces the gradients, if a user has registered one."""


class ReadyRecorder(Watcher):
    """A watcher that notes also when each gradient is ready."""

    def join(self, engine: Engine) -> None:
        """Take the engine."""
        raise NotImplementedError

    def stamped(self, index: int, hook: ReadyHook) -> ReadyHook:
        """Return a ready hook that notes the time, then calls `hook`."""
        raise NotImplementedError


class Feature(Watcher):
    """A watcher that adds something to each bucket. A method that is not overridden does nothing."""

    eager = True  # whether gradients may be packed one by one, before their bucket is sent
    divides = False  # whether each rank receives only its part of each sum; the report then travels alone
    keeps_buckets = False  # whether buckets must stay as they are after the first synchronised backward

    def join(self, engine: Engine) -> None:
        """Take the engine, and register what ranks tell each other. Called once, on all ranks in the same order."""

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

    def delivery(self, order: int, delivery: Delivery, buffer: CommBuffer) -> Delivery:
        """Return `delivery`, or one that does more around it."""
        return delivery

    def beside(self) -> Companion | None:
        """Return what travels beside the last bucket."""
        return None

    def spoil(self, wrong: Callable[[], Tensor], deliveries: Sequence[Delivery]) -> None:
        """Invalidate what these deliveries have delivered, if `wrong()`, [] bool on the device, is set. For CUDA."""
