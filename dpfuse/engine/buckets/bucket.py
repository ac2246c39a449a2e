"""One flat buffer on its way: pack, all-reduce, deliver. Owns its lifetime; knows no hook and no order of events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine import collective
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.buckets.bucket_state import FLIGHT, FREE, LANDED, BucketState
from dpfuse.engine.buckets.early_unpack import LEAST, EarlyGradients, SideStream
from dpfuse.engine.buckets.flat_buffer import FlatBuffer
from dpfuse.engine.buckets.ranges import no_graph, ranged, ranged_without_graph
from dpfuse.engine.memory_order import real_pairs
from dpfuse.engine.plan import MB, Bucket
from dpfuse.engine.report import Tail
from dpfuse.engine.streams import capturing, writers_on
from dpfuse.engine.timing import BucketObserver
from dpfuse.engine.waiting import board_of, finish
from dpfuse.errors import DPFuseError
from dpfuse.gradients.finite import FiniteCounter
from dpfuse.gradients.residual import Residual
from dpfuse.gradients.square_sum import SquareSum
from dpfuse_kernels import PointerTable, flatten, squared_norm, unflatten

if TYPE_CHECKING:
    from dpfuse.gradients.factors import GradientFactors

__all__ = ["BucketState", "GradBucket"]


class GradBucket(FlatBuffer):
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
        super().__init__(bucket, params, names, group, averaging, views=views, tail=tail)
        self.plan, self.params = bucket, self.fused_params  # kinds may keep some of them out of the buffer
        self.state = FREE
        self.missing: list[int] = []  # registration indices of the gradients that the last pack found missing
        self.error: Exception | None = None  # why the last pack failed; zeros were sent in its place
        self._board = board_of(group)
        self._device_type = torch.device(bucket.device).type
        self._handed_out = False  # whether the views were handed out when the bucket was sent
        self.times: BucketObserver | None = None
        self.finite: FiniteCounter | None = None  # of the values that are not, in what is packed
        self.factors: GradientFactors | None = None  # what multiplies it besides the averaging
        self.writers = writers_on(torch.device(bucket.device))
        self.early: EarlyGradients | None = None
        self.squares: SquareSum | None = None  # what the norm of the gradients is made of, if it is to be measured
        self.residual: Residual | None = None  # what rounding takes, if that is to be sent with the next gradients
        self._label = f"{label} ({bucket.nbytes / MB:.3g} MB)"
        self._hooks: list[Collection[object]] = []  # the post-accumulate hooks of each parameter, ours among them
        self._sources: list[Tensor | None] = []
        self._work: dist.Work | None = None
        self._side: SideStream | None = None
        self._measured = False  # whether the sum of the squares of the views that were handed out is on its way

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
        if self.squares is not None:
            self.squares.forget()
            self._measured = False
        self._precede()
        self._move(FREE, FLIGHT)
        table = self._table or self._allocate()
        grads: list[Tensor | None] = [param.grad for param in self.fused_params]
        self.missing = []
        if not complete:
            found = zip(self._fused.params, grads, strict=True)
            self.missing = [index for index, grad in found if grad is None and index not in self.held]
        with ranged_without_graph("dpfuse::pack", self._label):
            if self.tail is not None:
                unused = [*unused, *self.missing]
                grads.append(self.tail.source(table.dtype, table.flat.device, unused, failed))
            try:
                if self._is_complex:
                    grads = [*map(real_pairs, grads[: len(self.fused_params)]), *grads[len(self.fused_params) :]]
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
                self._handed_out = self._keep_views and sum(map(len, self._hooks)) == len(self.fused_params)
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
        if self._side is not None and complete and not failed and self.error is None:
            self._overlap(grads, self._side, table)

    def wait(self) -> None:
        """Wait for the all-reduce: on the CPU until it is done, on CUDA by ordering the current stream after it."""
        self._move(FLIGHT, LANDED)
        assert self._work is not None
        assert self._table is not None
        if self.times is not None:
            self.times.wait_begins(self._table.flat)
        with ranged("dpfuse::wait", self._label):
            finish(self._work, self._board, self._device_type, last=self.tail is not None)
            if self._side is not None:
                self._side.join()
        if self.times is not None:
            self.times.wait_ends()
        self._work = None
        if self.tail is not None:
            self.tail.landed(self._table.views[-1])

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """Hand the reduced gradients to the parameters, but for those (registration indices) to leave alone.

        Where views were handed out when the bucket was sent, only parameters that had no gradient still wait.
        """
        self._move(LANDED, FREE)
        assert self._table is not None
        self._sources = []
        if untouched and self.residual is not None:
            self.residual.take_back(untouched)
        if self._keep_views:
            if not self._handed_out:
                self._hand_out_views(untouched)
            elif self.missing:
                self._hand_out_views(set(self._fused.params).difference(self.missing).union(untouched))
            if self.squares is not None and self.fused_params:
                self._settle_views(self.squares, untouched)
            return
        if not self.fused_params:
            return  # only the tail was in it
        skipped = (
            {place for place, index in enumerate(self._fused.params) if index in untouched} if untouched else set()
        )
        early = set() if self.early is None else self.early.delivered()
        if len(early) == len(self.fused_params):
            self._settle_private()
            return
        skipped |= early
        targets: list[Tensor | None] = []
        for place, param in enumerate(self.fused_params):
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
                for place, param in enumerate(self.fused_params):
                    if targets[place] is not None:
                        param.grad = None
                        targets[place] = self._target(place)
                self._unpack(targets, matched=False)
        if not skipped:
            self._settle_private()

    def discard(self) -> None:
        """Wait if need be, and give the buffer back without touching any gradient but those that are written already.

        Those, and views that were handed out, become zeros: their owner may have zeroed them already, before the peers'
        part landed in them.
        """
        if self.state is FLIGHT:
            self.wait()
        self._move(LANDED, FREE)
        self._sources = []
        if self.early is not None:
            self.early.lose()
        if self._handed_out:
            with torch.no_grad():
                for view in self._views[: len(self.fused_params)]:  # the tail, behind them, is still to be read
                    view.zero_()

    def overlap_on(self, side: SideStream) -> None:
        """Go on there when the sum has landed, while backward does.

        That is to unpack private gradients, where it pays, and to read views for their norm, where it is measured.
        """
        self._side = side
        nbytes = sum(slot.numel for slot in self._fused.slots) * getattr(torch, self.plan.dtype).itemsize
        is_usual = self.tail is None and not self._keep_views and not self._is_complex
        if is_usual and self.fused_params and nbytes >= LEAST * len(self.fused_params):
            self.early = EarlyGradients(self.fused_params, side)

    def eager(self) -> dict[int, Callable[[], None]]:
        """What to call, by registration index, as soon as the gradient of a parameter is ready."""
        return {}

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
        return self.state is not FREE

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
        squares = None if self.squares is None else self.squares.value
        with ranged("dpfuse::unpack", self._label):
            unflatten(self._table, targets, scale=self._averaging.post_scale, squares=squares, matched=matched)

    def _overlap(self, grads: list[Tensor | None], side: SideStream, table: PointerTable) -> None:
        """Have done on the side, behind the all-reduce, what else would be done when backward has ended."""
        assert self._work is not None
        if self.early is not None:
            self.early.write(self._work, [grad for grad in grads if grad is not None], self._unpack, table)
        elif self.squares is not None and self._handed_out and self.tail is None and not capturing():
            self._measured = side.queue(self._work, self._measure, [table])

    def _measure(self) -> None:
        """Read the buffer, in which all gradients lie, for the sum of their squares."""
        table = self.untailed
        assert self._table is not None
        assert table is not None
        assert self.squares is not None
        self.squares.value.copy_(squared_norm(self._table.views[: len(self.fused_params)], table))

    def _settle_views(self, squares: SquareSum, untouched: Collection[int]) -> None:
        """Gradients are their views, but for those."""
        assert self._table is not None
        if any(index in untouched for index in self._fused.params):
            return
        if not self._measured:
            self._measure()
        count = len(self.fused_params)
        squares.settle_views(self._views[:count], self._table.addresses[:count])

    def _settle_private(self) -> None:
        """All gradients were unpacked, and measured with it."""
        if self.squares is not None:
            grads = [param.grad for param in self.fused_params if param.grad is not None]
            self.squares.settle_private(grads)

    def _precede(self) -> bool:
        """Order what is read of gradients from here on behind all that wrote them; was any on another stream?"""
        return self.writers is not None and self.writers.precede()

    def _settle_counts(self, finite: FiniteCounter) -> None:
        finite.settle(self._names)
        if self.tail is not None:
            finite.fail()

    def _launch_empty(self, failed: bool) -> None:
        self._move(FREE, FLIGHT)
        self.missing, self.error, self._handed_out = [], None, False
        if self.squares is not None:
            self.squares.forget()
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

    def _allocate(self) -> PointerTable:
        self._hooks = [param._post_accumulate_grad_hooks or () for param in self.fused_params]  # live dictionaries
        return super()._allocate()

    def _move(self, expected: BucketState, to: BucketState) -> None:
        if self.state is not expected:
            raise DPFuseError(
                f"bucket {self._label} with parameters {', '.join(self._names[:3])}… is {self.state.name}, "
                f"expected {expected.name}; this is a bug in dpfuse, please report it"
            )
        self.state = to
