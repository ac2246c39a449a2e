"""One flat buffer on its way: pack, all-reduce, deliver. Owns the buffer and its lifetime; knows no hook, no order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse import collective, registered_memory
from dpfuse.averaging import Averaging, real_dtype
from dpfuse.buckets.bucket_state import BucketState
from dpfuse.buckets.early_unpack import LEAST, EarlyGradients, SideStream
from dpfuse.buckets.ranges import no_graph, ranged
from dpfuse.buckets.residual import Residual
from dpfuse.errors import DPFuseError
from dpfuse.finite_check import FiniteCounter
from dpfuse.liveness.patience import finish
from dpfuse.liveness.whereabouts import board_of
from dpfuse.memory_order import dense_stride, real_layout, real_pairs
from dpfuse.plan import MB, Bucket, Slot, lay_out_slots
from dpfuse.tail import Tail
from dpfuse.timing import BucketObserver
from dpfuse.writing_streams import capturing, writers_on
from dpfuse_kernels import PointerTable, flatten, unflatten
from dpfuse_kernels import Slot as KernelSlot

if TYPE_CHECKING:
    from dpfuse.gradient_factors import GradientFactors

__all__ = ["BucketState", "GradBucket"]


class GradBucket:
    """The gradients of some parameters, fused into one flat buffer.

    Args:
        bucket: the plan of this bucket.
        params: the parameters, in the order of `bucket.params`; on one device.
        names: their names, for errors.
        group: process group of the all-reduce.
        averaging: factors on the gradients, and the dtype that travels.
        views: whether `.grad` becomes a view of the buffer (else, or where another dtype travels, the result
            is copied to `.grad`).
        tail: what travels behind the last slot, if anything.
        label: text for profiler ranges.
    """

    held: Collection[int] = ()  # registration indices of the parameters of which something is in the buffer already
    takes_factors = True  # whether others than those of the averaging may multiply it

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        averaging: Averaging,
        views: bool = True,
        tail: Tail | None = None,
        label: str = "",
    ) -> None:
        self.plan = bucket
        self.params = list(params)
        self._fused, self._fused_params = self.plan, self.params  # the part of them that lies in the buffer
        self._shapes = [(tuple(param.shape), dense_stride(param)) for param in params]  # when they were planned
        self._is_complex = bucket.dtype != real_dtype(bucket.dtype)
        self.state = BucketState.FREE
        self.missing: list[int] = []  # registration indices of the gradients that the last pack found missing
        self.error: Exception | None = None  # why the last pack failed; zeros were sent in its place
        self._names = names
        self._group = group
        self._board = board_of(group)
        self._device_type = torch.device(bucket.device).type
        self._averaging = averaging
        self._keep_views = views and averaging.dtype == real_dtype(bucket.dtype)
        self._handed_out = False  # whether the views were handed out when the bucket was sent
        self.tail = tail
        self.times: BucketObserver | None = None
        self.finite: FiniteCounter | None = None  # of the values that are not, in what is packed
        self.factors: GradientFactors | None = None  # what multiplies it besides the averaging
        self.registered = False  # whether the buffer is to lie in memory that the group's back end has registered
        self.writers = writers_on(torch.device(bucket.device))
        self.early: EarlyGradients | None = None
        self.residual: Residual | None = None  # what rounding takes, if that is to be sent with the next gradients
        self._label = f"{label} ({bucket.nbytes / MB:.3g} MB)"
        self._table: PointerTable | None = None
        self._untailed: PointerTable | None = None
        self._views: list[Tensor] = []  # what gradients become: the table's views, as complex numbers where they are
        self._hooks: list[Collection[object]] = []  # the post-accumulate hooks of each parameter, ours among them
        self._sources: list[Tensor | None] = []
        self._work: dist.Work | None = None

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Pack the gradients and start the all-reduce; a parameter without gradient sends zeros.

        Args:
            complete: True promises that no gradient is missing; otherwise `missing` is found out.
            unused: parameters (by registration index) of other buckets to report as unused, and
            failed: whether to report this rank as failed, if this bucket has the tail.
            empty: True sends zeros and touches no gradient, for what lands will not be delivered; the tail tells
                that this rank's model is another, unless it failed.
        """
        if empty:
            self._launch_empty(failed)
            return
        self._precede()
        self._move(BucketState.FREE, BucketState.FLIGHT)
        table = self._table or self._allocate()
        grads: list[Tensor | None] = [param.grad for param in self._fused_params]
        found = zip(self._fused.params, grads, strict=True)
        self.missing = [] if complete else [i for i, grad in found if grad is None and i not in self.held]
        with ranged("dpfuse::pack", self._label), no_graph():
            if self.tail is not None:
                unused = [*unused, *self.missing]
                grads.append(self.tail.source(table.dtype, table.flat.device, unused, failed))
            try:
                if self._is_complex:
                    grads = [*map(real_pairs, grads[: len(self._fused_params)]), *grads[len(self._fused_params) :]]
                counts = None
                if self.finite is not None:
                    counts = self.finite.begin_table(len(table.slots), table.flat.device)
                factor = None
                if self.factors is not None:
                    counts, factor = self.factors.begin(counts, len(table.slots)), self.factors.factor
                if grads:
                    self._pack(grads, table, counts, factor)
                    if self.factors is not None:
                        self.factors.settle(counts, table, self.tail, grads[-1])
                if self.finite is not None:
                    self._settle_counts(self.finite)
                self.error = None
                # Now, not when they have landed: private gradients are freed while backward goes on. But another
                # hook on the same parameters, say of a second wrapper, still has to read what was accumulated.
                self._handed_out = self._keep_views and sum(map(len, self._hooks)) == len(self._fused_params)
                if self._handed_out:
                    self._hand_out_views(set(self.missing))
            except (ValueError, TypeError, RuntimeError) as error:
                # The peers wait for this bucket whatever happened here; the tail tells them.
                self.error = error
                table.flat.zero_()
                if self.tail is not None:
                    self.tail.write(table.views[-1], self.tail.source(table.dtype, table.flat.device, unused, True))
        # On CUDA the pack may only just have started, and gradients may come from other streams than this one:
        # their memory must not be used again before everything is ordered, at the end of backward.
        self._sources = grads if table.flat.is_cuda else []
        self._send(table.flat)
        if self.early is not None and complete and not failed and self.error is None:
            assert self._work is not None
            self.early.write(self._work, [grad for grad in grads if grad is not None], self._unpack, table)

    def wait(self) -> None:
        """Wait for the all-reduce: on the CPU until it is done, on CUDA by ordering the current stream after it."""
        self._move(BucketState.FLIGHT, BucketState.LANDED)
        assert self._work is not None
        assert self._table is not None
        if self.times is not None:
            self.times.wait_begins(self._table.flat)
        with ranged("dpfuse::wait", self._label):
            finish(self._work, self._board, self._device_type, last=self.tail is not None)
            if self.early is not None:
                self.early.join()
        if self.times is not None:
            self.times.wait_ends()
        self._work = None
        if self.tail is not None:
            self.tail.landed(self._table.views[-1])

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """Hand the reduced gradients to the parameters, but for those (registration indices) to leave alone.

        Where views were handed out when the bucket was sent, only parameters that had no gradient still wait.
        """
        self._move(BucketState.LANDED, BucketState.FREE)
        assert self._table is not None
        self._sources = []
        if untouched and self.residual is not None:
            self.residual.take_back(untouched)
        if self._keep_views:
            if not self._handed_out:
                self._hand_out_views(untouched)
            elif self.missing:
                self._hand_out_views(set(self._fused.params).difference(self.missing).union(untouched))
            return
        if not self._fused_params:
            return  # only the tail was in it
        skipped = (
            {place for place, index in enumerate(self._fused.params) if index in untouched} if untouched else set()
        )
        if self.early is not None:
            skipped |= self.early.delivered()
            if len(skipped) == len(self._fused_params):
                return
        targets: list[Tensor | None] = []
        for place, param in enumerate(self._fused_params):
            if place in skipped:
                targets.append(None)
            elif param.grad is None or self._is_complex:
                targets.append(self._target(place))
            else:
                targets.append(param.grad)
        if self.tail is not None:
            targets.append(None)
        with no_graph():
            try:
                self._unpack(targets)
            except (ValueError, RuntimeError):
                # A gradient that can be read but not written, such as an expanded one that was set by hand.
                for place, param in enumerate(self._fused_params):
                    if targets[place] is not None:
                        param.grad = None
                        targets[place] = self._target(place)
                self._unpack(targets, matched=False)

    def discard(self) -> None:
        """Wait if need be, and give the buffer back without touching any gradient but those that are written already.

        Those, and views that were handed out, become zeros: their owner may have zeroed them already, before the peers'
        part landed in them.
        """
        if self.state is BucketState.FLIGHT:
            self.wait()
        self._move(BucketState.LANDED, BucketState.FREE)
        self._sources = []
        if self.early is not None:
            self.early.lose()
        if self._handed_out:
            with torch.no_grad():
                for view in self._views[: len(self._fused_params)]:  # the tail, behind them, is still to be read
                    view.zero_()

    @property
    def in_buffer(self) -> tuple[PointerTable, Sequence[Tensor]] | None:
        """Where gradients lie in the buffer, without the tail, and whose; None before the first launch."""
        if self._table is None or not self._fused_params:
            return None
        if self._untailed is None or self._untailed.address != self._table.address:
            self._untailed = self._table.first(len(self._fused_params))
        return self._untailed, self._fused_params

    def unpack_early_on(self, side: SideStream) -> None:
        """Unpack private gradients while backward goes on, where they are long enough for that to pay."""
        nbytes = sum(slot.numel for slot in self._fused.slots) * getattr(torch, self.plan.dtype).itemsize
        is_usual = self.tail is None and not self._keep_views and not self._is_complex
        if is_usual and self._fused_params and nbytes >= LEAST * len(self._fused_params):
            self.early = EarlyGradients(self._fused_params, side)

    def average_by(self, averaging: Averaging) -> None:
        """Use other factors from the next launch on; what travels keeps its dtype."""
        self._averaging = replace(averaging, dtype=self._averaging.dtype)
        if self.tail is not None:
            self.tail.scale = averaging.pre_scale

    @property
    def averaging(self) -> Averaging:
        """The factors of the next launch, and the dtype that travels."""
        return self._averaging

    @property
    def busy(self) -> bool:
        """Whether somebody has to wait for it, or to deliver or discard it, before it is used again."""
        return self.state is not BucketState.FREE

    @property
    def bytes_in_place(self) -> int:
        """Of the gradients that the last launch reduced where they lie, without a copy."""
        return 0

    def _pack(
        self, grads: list[Tensor | None], table: PointerTable, counts: Tensor | None, factor: Tensor | None
    ) -> None:
        residual = None
        if self.residual is not None:
            residual = self.residual.before_pack(table, table.flat.numel(), self.missing)
        scale = self._averaging.pre_scale
        flatten(grads, table, scale=scale, counts=counts, factor=factor, residual=residual, matched=True)

    def _unpack(self, targets: Sequence[Tensor | None], *, matched: bool = True) -> None:
        assert self._table is not None
        with ranged("dpfuse::unpack", self._label):
            unflatten(self._table, targets, scale=self._averaging.post_scale, matched=matched)

    def _precede(self) -> bool:
        """Order what is read of gradients from here on behind all that wrote them; was any on another stream?"""
        return self.writers is not None and self.writers.precede()

    def _target(self, place: int) -> Tensor:
        """The gradient of a parameter, to be written: a new one where there is none, real where it is complex."""
        assert self._table is not None
        param = self._fused_params[place]
        if param.grad is None or param.grad.is_conj():
            shape, stride = self._shapes[place]
            dtype = getattr(torch, self.plan.dtype)
            param.grad = torch.empty_strided(shape, stride, dtype=dtype, device=self._table.flat.device)
        return torch.view_as_real(param.grad) if self._is_complex else param.grad

    def _settle_counts(self, finite: FiniteCounter) -> None:
        finite.settle(self._names)
        if self.tail is not None:
            finite.fail()

    def _launch_empty(self, failed: bool) -> None:
        self._move(BucketState.FREE, BucketState.FLIGHT)
        self.missing, self.error, self._handed_out = [], None, False
        table = self._allocate()  # not the one in use: what is accumulated may lie in it, in views
        if self.tail is not None:
            source = self.tail.source(table.dtype, table.flat.device, (), failed, changed=True)
            self.tail.write(table.views[-1], source)
        self._send(table.flat)

    def _send(self, flat: Tensor) -> None:
        with ranged("dpfuse::all_reduce", self._label):
            self._work = self._start(flat)
        if self.times is not None:
            self.times.sent(self._travelling(flat), self._work, is_last=self.tail is not None)

    def _start(self, flat: Tensor) -> dist.Work:
        """Send the packed buffer on its way."""
        return collective.all_reduce(flat, self._group)

    def _travelling(self, flat: Tensor) -> list[Tensor]:
        """What was sent with the packed buffer, and it."""
        return [flat]

    def _hand_out_views(self, but: Collection[int]) -> None:
        """Make `.grad` of all parameters, but for those registration indices, their view of the buffer."""
        assert self._table is not None
        views = self._views
        if list(map(Tensor.data_ptr, views)) != self._table.addresses:
            # Somebody assigned to `.grad.data`, which took a view that was handed out elsewhere.
            self._table.views[:] = self._table.new_views()
            views[:] = self._gradient_views(self._table)
        if not but:
            for param, view in zip(self._fused_params, views, strict=False):  # the tail's belongs to nobody
                param.grad = view
            return
        for param, index, view in zip(self._fused_params, self._fused.params, views, strict=False):
            if index not in but:
                param.grad = view

    def _allocate(self) -> PointerTable:
        # Not before the first launch: after a rebuild the gradients of the step before may still live in
        # the buffers of the plan before.
        self._hooks = [param._post_accumulate_grad_hooks or () for param in self._fused_params]  # live dictionaries
        # Of the planned type, whatever became of the parameters: the peers keep to the plan.
        dtype = getattr(torch, real_dtype(self.plan.dtype))
        places, numel = self._places()
        slots = [
            KernelSlot(name, place.offset, *(real_layout(shape, stride) if self._is_complex else (shape, stride)))
            for name, place, (shape, stride) in zip(self._names, places, self._shapes, strict=True)
        ]
        if self.tail is not None:
            slots.append(KernelSlot("dpfuse's tail", numel, (self.tail.numel,), (1,)))
            numel += self.tail.numel
        self._table = self._new_table(numel, slots, dtype)
        self._views = self._gradient_views(self._table)
        return self._table

    def _new_table(self, numel: int, slots: Sequence[KernelSlot], dtype: torch.dtype) -> PointerTable:
        return PointerTable(self._zeros(numel, getattr(torch, self._averaging.dtype)), slots, dtype)

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        device = torch.device(self.plan.device)
        # A graph has a pool of its own for what is allocated while it is captured.
        if not self.registered or capturing():
            return torch.zeros(numel, dtype=dtype, device=device)
        return registered_memory.zeros(numel, dtype=dtype, device=device, group=self._group)

    def _gradient_views(self, table: PointerTable) -> list[Tensor]:
        if not self._is_complex or not self._keep_views:
            return table.views
        count = len(self._fused_params)
        return [*map(torch.view_as_complex, table.views[:count]), *table.views[count:]]

    def _places(self) -> tuple[list[Slot], int]:
        """Where each gradient lies in the buffer, in the order of the parameters, and the buffer's length."""
        # Not the plan's: elements of another size start elsewhere.
        return lay_out_slots(
            [(slot.param, self._width * slot.numel) for slot in self._fused.slots], self._averaging.dtype
        )

    @property
    def _width(self) -> int:
        """Numbers in the buffer for each element of a gradient."""
        return 2 if self._is_complex else 1

    def _move(self, expected: BucketState, to: BucketState) -> None:
        if self.state is not expected:
            raise DPFuseError(
                f"bucket {self._label} with parameters {', '.join(self._names[:3])}… is {self.state.name}, "
                f"expected {expected.name}; this is a bug in dpfuse, please report it"
            )
        self.state = to
