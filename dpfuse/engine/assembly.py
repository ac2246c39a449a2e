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
from dpfuse.engine.bucket_kinds import DELIVERIES, EXCHANGES, FEEDS, RENEWED, Trait, fits, part_for
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
from dpfuse.engine.streams import SideStream, WritingStreams, writers_on
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

    @torch.inference_mode(False)  # of the program: what is made there cannot be written outside of it
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

    def _bucket(self, order: int, bucket: Bucket, report: Report | None) -> GradBucket:
        params = [self.params[index] for index in bucket.params]
        names = [self.plan.specs[index].name for index in bucket.params]
        return _OneBucket(self, order, bucket, params, names, report, self._averaging(bucket)).made()

    def _report_alone(self, report: Report, buckets: list[GradBucket]) -> GradBucket:
        """Make a bucket without gradients, for a report that needs exact numbers or is sent after a hook."""
        plan = self.plan.buckets[-1]
        empty = Bucket((), 0, "float32", plan.device, (), 0, None)
        buffer = CommBuffer(empty, [], [], Averaging("float32", 1.0), zeros=zeros_on(plan.device), room=report.numel)
        group, hook, own = self.assembly.group, self.assembly.hook, list(buckets)
        exchange: Exchange = AllReduce(group, torch.device(plan.device))
        if hook is not None:
            exchange = AfterHooks(group, hook, report, lambda: [b.error for b in own if b.error is not None])
        writers = writers_on(torch.device(plan.device))
        parts = self.parts(len(buckets), empty, buffer, AtOnce(buffer), exchange, Delivery(), report, writers)
        return GradBucket(empty, [], parts, self.assembly.around, "the report")

    def parts(
        self,
        order: int,
        bucket: Bucket,
        buffer: CommBuffer,
        feed: Feed,
        exchange: Exchange,
        delivery: Delivery,
        report: Report | None,
        writers: WritingStreams | None,
    ) -> Parts:
        """Return the parts of a bucket, and what features add to them."""
        steps = [each.step(order, bucket, buffer, report) for each in self.assembly.features]
        taken = tuple(step for step in steps if step is not None)
        if isinstance(exchange, InPlace) and isinstance(feed, AtOnce) and report is None and not taken:
            exchange.multiply_buffer()
        found = () if report is None else (each.beside() for each in self.assembly.features)
        beside = tuple(companion for companion in found if companion is not None)
        return Parts(buffer, feed, exchange, delivery, taken, report, writers, beside)


@dataclass
class _OneBucket:
    """One bucket while it is made."""

    making: _Making
    order: int
    plan: Bucket
    params: list[Tensor]
    names: list[str]
    report: Report | None
    averaging: Averaging

    def __post_init__(self) -> None:
        self.assembly = self.making.assembly
        self.label = f"bucket {self.order} ({self.plan.nbytes / MB:.3g} MB)"
        self.device = torch.device(self.plan.device)
        self.writers = writers_on(self.device)
        packs = self.report is not None or not all(feature.eager for feature in self.assembly.features)
        # Of gradients that travel in their own memory, if the exchange can do that; the others lie inside the buffer.
        self.places = places_in_place(self.plan, self.averaging, self.assembly.group, packs=packs)
        self.traits = self._traits()
        self.exchange = part_for(EXCHANGES, self.traits)
        if self.exchange is not InPlace:
            self.places = []
        self.inside, self.params_inside, self.names_inside = InPlace.others(
            self.plan, self.params, self.names, self.places
        )
        if self.inside.slots and fits(RENEWED, self.traits):
            self.traits.add(Trait.RENEWED)
        if not Eager.suits(self.inside, self.averaging.dtype):
            self.traits.discard(Trait.SINGLY)

    def made(self) -> GradBucket:
        """Return the bucket."""
        buffer = self._buffer()
        subtrees = self._subtrees(buffer) if Trait.MICRO_BATCHES in self.traits and not self.plan.sparse else None
        exchange = self._exchange(buffer, subtrees)
        hooks = Hooks(buffer.params)
        memory = RenewedMemory(buffer) if Trait.RENEWED in self.traits else None
        feed = self._feed(buffer, hooks, memory, subtrees)
        delivery = self._delivery(buffer, hooks, memory)
        parts = self.making.parts(self.order, self.plan, buffer, feed, exchange, delivery, self.report, self.writers)
        return GradBucket(self.plan, self.params, parts, self.assembly.around, self.label)

    def _traits(self) -> set[Trait]:
        """Return what is known of the bucket before it is known what lies inside its buffer."""
        assembly, settings, plan, wire = self.assembly, self.assembly.settings, self.plan, self.averaging.dtype
        side, features = self.making.side, assembly.features
        found = {
            Trait.SPARSE: plan.sparse,
            Trait.COMPLEX: plan.dtype.startswith("complex"),
            Trait.DTENSOR: any(type(param) is LocalPart for param in self.params),
            Trait.IN_PLACE: bool(self.places),
            Trait.OWN_DTYPE: wire == real_dtype(plan.dtype),
            Trait.REPORT: self.report is not None,
            Trait.HOOK: assembly.hook is not None,
            Trait.VIEWS: settings.views,
            Trait.MICRO_BATCHES: settings.micro_batches is not None,
            Trait.ACCUMULATES: settings.accumulates,
            Trait.ORDERED: settings.keeps_order or settings.wire.adds_in_float32(wire),
            Trait.FLOAT8: wire in FP8,
            Trait.DIVIDED: any(feature.divides for feature in features),
            Trait.REGISTERED: settings.registered,
            Trait.COUNTED: side is None and self.device.type == "cpu" and assembly.overlaps and COUNTS_REFERENCES,
            Trait.ON_STREAMS: side is not None,
            Trait.SINGLY: assembly.overlaps and all(each.eager for each in features),
        }
        return {trait for trait, has in found.items() if has}

    def _format(self) -> Format:
        """Return how gradients lie in the buffer."""
        assembly = self.assembly
        if self.plan.sparse:
            return PLAIN
        if assembly.hook is not None:
            return Unpadded()
        if Trait.FLOAT8 in self.traits:
            return Blocks(assembly.group.size(), getattr(torch, self.averaging.dtype))
        found = (each.format(self.plan, self.params) for each in assembly.features)
        divided = next((one for one in found if one is not None), None)
        if divided is not None:
            return divided
        return OrderedParts(assembly.group.size()) if Trait.ORDERED in self.traits else PLAIN

    def _buffer(self) -> CommBuffer:
        """Make the buffer of the gradients that do not travel in place, or take that of a bucket before."""
        inside, params, names = self.inside, self.params_inside, self.names_inside
        if inside.sparse:  # rows travel elsewhere
            inside, params, names = replace(inside, params=(), slots=(), numel=0, cap=None), [], []
        room = 0 if self.report is None else self.report.numel
        format = self._format()
        zeros = usual = self._zeros()
        for feature in self.assembly.features if params else ():
            zeros = feature.memory(inside.device, zeros)
        for old in () if Trait.RENEWED in self.traits or zeros is not usual else self.making.before:
            if old.parts.buffer.serves(inside, params, self.averaging.dtype, room, format):
                old.parts.buffer.averaging = self.averaging
                return old.parts.buffer
        return CommBuffer(inside, params, names, self.averaging, zeros=zeros, room=room, format=format)

    def _zeros(self) -> Zeros:
        assembly = self.assembly
        if not assembly.settings.registered or assembly.hook is not None:
            return zeros_on(self.plan.device)
        return lambda numel, dtype: registered_memory.zeros(
            numel, dtype=dtype, device=self.device, group=assembly.group
        )

    def _subtrees(self, buffer: CommBuffer) -> Subtrees:
        """Make the memory in which the gradients of a fixed number of micro-batches are added up."""
        deal = self.assembly.settings.micro_batches
        assert deal is not None
        slots, dtype = buffer.gradients.slots, getattr(torch, real_dtype(self.plan.dtype))
        rank, zeros = self.assembly.group.rank(), zeros_on(self.plan.device)
        return Subtrees(deal, rank, buffer.flat.numel(), slots, dtype, zeros)

    def _exchange(self, buffer: CommBuffer, subtrees: Subtrees | None) -> Exchange:
        assembly, group, plan, kind = self.assembly, self.assembly.group, self.plan, self.exchange
        if assembly.hook is not None:
            hooked = group, assembly.hook, buffer, self.order
            is_last = self.order == len(self.making.plan.buckets) - 1
            if kind is HookedBuffer:
                return HookedBuffer(*hooked, is_last=is_last, label=self.label)
            one, name = self.params[0], self.names[0]
            return HookedRows(*hooked, is_last=is_last, label=self.label, planned=plan, param=one, name=name)
        if kind is SparseRows:
            return SparseRows(group, plan, self.params[0], self.names[0], buffer.averaging)
        exchange: Exchange
        if subtrees is not None:
            exchange = TreeSum(group, subtrees, buffer.report.numel())
        elif kind is OrderedSum:
            assert isinstance(buffer.format, (OrderedParts, Blocks))
            exchange = OrderedSum(group, buffer.format, self._rounding(buffer))
        elif kind is InPlace:
            exchange = InPlace(group, plan, self.params, self.names, self.places)
        else:
            exchange = AllReduce(group, self.device)
        for feature in assembly.features:
            exchange = feature.exchange(self.order, plan, buffer, exchange)
        return exchange

    def _rounding(self, buffer: CommBuffer) -> Rounding | None:
        found = (each.rounding(self.order, self.plan, buffer) for each in self.assembly.features)
        return next((one for one in found if one is not None), None)

    def _feed(self, buffer: CommBuffer, hooks: Hooks, memory: RenewedMemory | None, subtrees: Subtrees | None) -> Feed:
        kind = part_for(FEEDS, self.traits)
        if subtrees is not None:
            return TreeSums(buffer, subtrees, hooks, self.writers, self.label)
        if kind is Accumulating:
            return Accumulating(buffer, hooks, self.writers, self.label)
        if kind is Eager:
            return Eager(self.inside, buffer, hooks, memory)
        return AtOnce(buffer)

    def _delivery(self, buffer: CommBuffer, hooks: Hooks, memory: RenewedMemory | None) -> Delivery:
        nbytes = sum(torch.Size(shape).numel() for shape, _ in buffer.shapes) * ITEM_SIZE[self.plan.dtype]
        is_large = bool(buffer.params) and nbytes >= LEAST * len(buffer.params)
        kind = part_for(DELIVERIES, self.traits | {Trait.LARGE} if is_large else self.traits)
        if kind is Delivery:
            return Delivery()
        delivery: Delivery
        if memory is not None:
            delivery = RenewedViews(hooks, memory, Private(buffer, 1.0, label=self.label))
        elif kind is Views:
            delivery = Views(buffer, hooks)
        else:
            delivery = private = Private(buffer, buffer.averaging.post_scale, self.label)
            if kind is EarlyPrivate and self.making.side is not None:
                delivery = EarlyPrivate(private, buffer, self.making.side)
        for feature in self.assembly.features:
            delivery = feature.delivery(self.order, delivery, buffer)
        return delivery
