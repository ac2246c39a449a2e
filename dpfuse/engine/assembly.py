"""Makes the buckets of a plan: chooses a feed, an exchange and a delivery for each. Knows no order of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import registered_memory
from dpfuse.comm.abilities import abilities_of
from dpfuse.engine.averaging import FP8, Averaging, averaging_for, real_dtype
from dpfuse.engine.bucket import GradBucket, Parts, Surroundings
from dpfuse.engine.comm_buffer import PLAIN, CommBuffer, Format, Zeros, zeros_on
from dpfuse.engine.delivery import LEAST, EarlyPrivate, Private, RenewedViews, Views
from dpfuse.engine.exchanges.all_reduce import AllReduce
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.exchanges.hooked import AfterHooks, HookedBuffer, HookedRows, Unpadded
from dpfuse.engine.exchanges.in_place import InPlace, places_in_place
from dpfuse.engine.exchanges.ordered import Blocks, OrderedParts, OrderedSum, Rounding
from dpfuse.engine.exchanges.sparse import SparseRows
from dpfuse.engine.exchanges.tree import TreeSum
from dpfuse.engine.feature import Feature
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.feeds.at_once import AtOnce
from dpfuse.engine.feeds.eager import Eager
from dpfuse.engine.feeds.tree_sums import TreeSums
from dpfuse.engine.local_part import LocalPart
from dpfuse.engine.param_spec import ITEM_SIZE
from dpfuse.engine.plan import MB, Bucket, BucketPlan
from dpfuse.engine.protocols import Delivery, Exchange, Feed
from dpfuse.engine.renewed_memory import RenewedMemory
from dpfuse.engine.report import Report
from dpfuse.engine.settings import SyncSettings
from dpfuse.engine.streams import SideStream, writers_on
from dpfuse.engine.subtrees import Subtrees
from dpfuse.engine.torch_private import COUNTS_REFERENCES, Hooks

__all__ = ["Assembly"]

REPORT_DTYPES = ("float32", "float64")  # in which a report can travel; sums of weights need their digits


@dataclass(frozen=True)
class Assembly:
    """Makes the buckets of one model, for any plan.

    Args:
        group: process group of the collectives.
        around: what all buckets share.
        settings: how gradients are averaged.
        overlaps: whether backward goes on while buckets travel.
        features: add steps to buckets; may grow between two calls of `make`.
        hook: reduces the gradients instead of the collectives.
        make_report: makes the report for so many parameters, in a dtype, on a device; None sends none.
    """

    group: dist.ProcessGroup
    around: Surroundings
    settings: SyncSettings = field(default_factory=SyncSettings)
    overlaps: bool = True
    features: list[Feature] = field(default_factory=list)
    hook: CommHook | None = None
    make_report: Callable[[int, torch.dtype, torch.device], Report] | None = None

    def make(
        self,
        plan: BucketPlan,
        params: Sequence[Tensor],
        *,
        before: Sequence[GradBucket] = (),
        rank_count: int | None = None,
    ) -> list[GradBucket]:
        """Make the buckets of a plan, in communication order; the last one carries the report.

        All memory is allocated here. If a bucket of `before` has the same gradients in the same places, its
        communication buffer is used again, so that views of it stay valid.

        Args:
            plan: the plan of `params`.
            params: by registration index.
            before: buckets that these replace; none of them is in flight.
            rank_count: divides the sums; None is the number of ranks.

        Raises:
            RuntimeError: there is no memory left.
        """
        device = torch.device(plan.buckets[0].device)
        side = None
        if self.overlaps and self.hook is None and abilities_of(self.group, device).on_streams:
            side = SideStream(device)
        return _Making(self, plan, params, list(before), rank_count or self.group.size(), side).buckets()


@dataclass
class _Making:
    """One call of `Assembly.make`."""

    assembly: Assembly
    plan: BucketPlan
    params: Sequence[Tensor]
    before: list[GradBucket]
    rank_count: int
    side: SideStream | None

    def buckets(self) -> list[GradBucket]:
        plan, make_report = self.plan, self.assembly.make_report
        for feature in self.assembly.features:
            feature.planned(plan)
        last = plan.buckets[-1]
        averaging = self._averaging(last)
        inside = (
            make_report is not None
            and self.assembly.hook is None
            and not self._divides
            and not last.sparse
            and averaging.dtype in REPORT_DTYPES
            and real_dtype(last.dtype) in REPORT_DTYPES
        )
        report = None
        if make_report is not None:
            dtype = getattr(torch, real_dtype(last.dtype)) if inside else torch.float32
            report = make_report(len(plan.specs), dtype, torch.device(last.device))
        count = len(plan.buckets)
        buckets = [
            self._bucket(order, bucket, report if inside and order == count - 1 else None)
            for order, bucket in enumerate(plan.buckets)
        ]
        if report is not None and not inside:
            buckets.append(self._report_alone(report, buckets))
        return buckets

    @property
    def _divides(self) -> bool:
        return any(feature.divides for feature in self.assembly.features)

    def _averaging(self, bucket: Bucket) -> Averaging:
        assembly = self.assembly
        if self.assembly.hook is not None:
            return Averaging(real_dtype(bucket.dtype), 1.0)
        if assembly.settings.micro_batches is not None:
            return Averaging(real_dtype(bucket.dtype), 1.0)  # the sum is divided
        # Rows are not blocks: sparse gradients are not quantized.
        wire = None if bucket.sparse and assembly.settings.wire.is_fp8 else assembly.settings.wire.dtype
        return averaging_for(bucket.dtype, self.rank_count, assembly.settings.scale, wire)

    def _is_renewed(self, bucket: Bucket) -> bool:
        """Whether private gradients of this bucket lie in its buffer, which gets new memory while one is held."""
        assembly = self.assembly
        if any(type(self.params[index]) is LocalPart for index in bucket.params):
            return False  # a program holds DTensors, and references to what is inside of them are not counted
        settings = assembly.settings
        taken = settings.accumulates or settings.micro_batches is not None
        private = not settings.views and assembly.hook is None and not taken
        usual = assembly.overlaps and not settings.registered and COUNTS_REFERENCES
        on_cpu = self.side is None and torch.device(bucket.device).type == "cpu"
        whole = not self._divides and self._averaging(bucket).dtype == real_dtype(bucket.dtype)
        return private and usual and on_cpu and whole

    def _bucket(self, order: int, bucket: Bucket, report: Report | None) -> GradBucket:
        params = [self.params[index] for index in bucket.params]
        names = [self.plan.specs[index].name for index in bucket.params]
        label = f"bucket {order} ({bucket.nbytes / MB:.3g} MB)"
        if self.assembly.hook is not None:
            parts = self._hooked(self.assembly.hook, order, bucket, params, names, label)
        elif bucket.sparse:
            buffer = self._buffer(_without_slots(bucket), [], [])
            exchange = SparseRows(self.assembly.group, bucket, params[0], names[0], buffer.averaging)
            parts = self._parts(order, bucket, buffer, AtOnce(buffer), exchange, Delivery(), None)
        else:
            parts = self._dense(order, bucket, params, names, label, report)
        return GradBucket(bucket, params, parts, self.assembly.around, label)

    def _dense(
        self, order: int, bucket: Bucket, params: list[Tensor], names: list[str], label: str, report: Report | None
    ) -> Parts:
        assembly, averaging, size = self.assembly, self._averaging(bucket), self.assembly.group.size()
        in_buffer = bucket, params, names
        exchange: Exchange
        ordered: OrderedParts | Blocks | None = None
        divided = next((one for each in assembly.features if (one := each.format(bucket, params)) is not None), None)
        if averaging.dtype in FP8:
            ordered = Blocks(size, getattr(torch, averaging.dtype))
        elif divided is not None:
            pass
        elif assembly.settings.keeps_order or assembly.settings.wire.adds_in_float32(averaging.dtype):
            ordered = OrderedParts(size)
        renewed = self._is_renewed(bucket)
        in_place: list[int] = []
        if ordered is divided is None and not (assembly.settings.views or assembly.settings.accumulates or renewed):
            packs = report is not None or not all(feature.eager for feature in assembly.features)
            in_place = places_in_place(bucket, averaging, assembly.group, packs=packs)
        if in_place:
            in_buffer = InPlace.others(*in_buffer, in_place)
        buffer = self._buffer(*in_buffer, report=report, format=ordered or divided or PLAIN)
        subtrees = self._subtrees(bucket, buffer)
        if in_place:
            exchange = InPlace(assembly.group, bucket, params, names, in_place)
        elif subtrees is not None:
            exchange = TreeSum(assembly.group, subtrees, buffer.report.numel())
        elif ordered is not None:
            exchange = OrderedSum(assembly.group, ordered, self._rounding(order, bucket, buffer))
        else:
            exchange = AllReduce(assembly.group, torch.device(bucket.device))
        for feature in assembly.features:
            exchange = feature.exchange(order, bucket, buffer, exchange)
        hooks = Hooks(buffer.params)
        writers = writers_on(torch.device(bucket.device))
        memory = RenewedMemory(buffer) if renewed else None
        feed: Feed = AtOnce(buffer)
        if subtrees is not None:
            feed = TreeSums(buffer, subtrees, hooks, writers, label)
        elif assembly.settings.accumulates:
            feed = Accumulating(buffer, hooks, writers, label)
        elif self._packs_eagerly(bucket, buffer):
            feed = Eager(bucket, buffer, hooks, memory)
        delivery = self._delivery(order, bucket, buffer, hooks, report, label, memory)
        parts = self._parts(order, bucket, buffer, feed, exchange, delivery, report)
        return replace(parts, writers=writers)

    def _subtrees(self, bucket: Bucket, buffer: CommBuffer) -> Subtrees | None:
        """Make the memory in which the gradients of a fixed number of micro-batches are added up, if that is asked."""
        deal = self.assembly.settings.micro_batches
        if deal is None:
            return None
        slots, dtype = buffer.gradients.slots, getattr(torch, real_dtype(bucket.dtype))
        rank, zeros = self.assembly.group.rank(), zeros_on(bucket.device)
        return Subtrees(deal, rank, buffer.flat.numel(), slots, dtype, zeros)

    def _packs_eagerly(self, bucket: Bucket, buffer: CommBuffer) -> bool:
        assembly = self.assembly
        return (
            (assembly.settings.views or self._divides or self._is_renewed(bucket))
            and assembly.overlaps
            and all(feature.eager for feature in assembly.features)
            and Eager.suits(bucket, buffer.averaging.dtype)
        )

    def _delivery(
        self,
        order: int,
        bucket: Bucket,
        buffer: CommBuffer,
        hooks: Hooks,
        report: Report | None,
        label: str,
        memory: RenewedMemory | None = None,
    ) -> Delivery:
        delivery: Delivery
        if memory is not None:
            delivery = RenewedViews(hooks, memory, Private(buffer, 1.0, label=label))
        elif self.assembly.settings.views and buffer.holds_gradients:
            delivery = Views(buffer, hooks)
        else:
            post_scale = buffer.averaging.post_scale
            private = delivery = Private(buffer, post_scale, label)
            nbytes = sum(torch.Size(shape).numel() for shape, _ in buffer.shapes) * ITEM_SIZE[bucket.dtype]
            usual = report is None and not buffer.dtype.is_complex and self.assembly.hook is None
            if self.side is not None and usual and buffer.params and nbytes >= LEAST * len(buffer.params):
                delivery = EarlyPrivate(private, buffer, self.side)
        for feature in self.assembly.features:
            delivery = feature.delivery(order, delivery, buffer)
        return delivery

    def _hooked(
        self, hook: CommHook, order: int, bucket: Bucket, params: list[Tensor], names: list[str], label: str
    ) -> Parts:
        group, is_last = self.assembly.group, order == len(self.plan.buckets) - 1
        exchange: Exchange
        if bucket.sparse:
            buffer = self._buffer(_without_slots(bucket), [], [])
            exchange = HookedRows(
                group, hook, buffer, order, is_last=is_last, label=label, planned=bucket, param=params[0], name=names[0]
            )
            return self._parts(order, bucket, buffer, AtOnce(buffer), exchange, Delivery(), None)
        buffer = self._buffer(bucket, params, names, format=Unpadded())
        exchange = HookedBuffer(group, hook, buffer, order, is_last=is_last, label=label)
        delivery = self._delivery(order, bucket, buffer, Hooks(params), None, label)
        return self._parts(order, bucket, buffer, AtOnce(buffer), exchange, delivery, None)

    def _report_alone(self, report: Report, buckets: list[GradBucket]) -> GradBucket:
        """Make a bucket without gradients, for a report that needs exact numbers or is sent after a hook."""
        plan = self.plan.buckets[-1]
        empty = Bucket((), 0, "float32", plan.device, (), 0, None)
        buffer = CommBuffer(empty, [], [], Averaging("float32", 1.0), zeros=zeros_on(plan.device), room=report.numel)
        group, hook, own = self.assembly.group, self.assembly.hook, list(buckets)
        exchange: Exchange = AllReduce(group, torch.device(plan.device))
        if hook is not None:
            exchange = AfterHooks(group, hook, report, lambda: [b.error for b in own if b.error is not None])
        parts = self._parts(len(buckets), empty, buffer, AtOnce(buffer), exchange, Delivery(), report)
        return GradBucket(empty, [], parts, self.assembly.around, "the report")

    def _parts(
        self,
        order: int,
        bucket: Bucket,
        buffer: CommBuffer,
        feed: Feed,
        exchange: Exchange,
        delivery: Delivery,
        report: Report | None,
    ) -> Parts:
        steps = [each.step(order, bucket, buffer, report) for each in self.assembly.features]
        taken = tuple(step for step in steps if step is not None)
        if isinstance(exchange, InPlace) and report is None and not taken:
            exchange.multiply_buffer()
        found = () if report is None else (each.beside() for each in self.assembly.features)
        beside = tuple(companion for companion in found if companion is not None)
        return Parts(buffer, feed, exchange, delivery, taken, report, writers_on(torch.device(bucket.device)), beside)

    def _rounding(self, order: int, bucket: Bucket, buffer: CommBuffer) -> Rounding | None:
        found = (each.rounding(order, bucket, buffer) for each in self.assembly.features)
        return next((one for one in found if one is not None), None)

    def _buffer(
        self,
        bucket: Bucket,
        params: list[Tensor],
        names: list[str],
        *,
        report: Report | None = None,
        format: Format = PLAIN,
    ) -> CommBuffer:
        averaging = self._averaging(bucket)
        room = 0 if report is None else report.numel
        zeros = usual = self._zeros(bucket.device)
        for feature in self.assembly.features if params else ():
            zeros = feature.memory(bucket.device, zeros)
        for old in () if self._is_renewed(bucket) or zeros is not usual else self.before:
            if old.parts.buffer.serves(bucket, params, averaging.dtype, room, format):
                old.parts.buffer.averaging = averaging
                return old.parts.buffer
        return CommBuffer(bucket, params, names, averaging, zeros=zeros, room=room, format=format)

    def _zeros(self, device: str) -> Zeros:
        group = self.assembly.group
        if not self.assembly.settings.registered or self.assembly.hook is not None:
            return zeros_on(device)
        return lambda numel, dtype: registered_memory.zeros(
            numel, dtype=dtype, device=torch.device(device), group=group
        )


def _without_slots(bucket: Bucket) -> Bucket:
    return Bucket((), bucket.nbytes, bucket.dtype, bucket.device, (), 0, None, bucket.sparse)
