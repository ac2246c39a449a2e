"""One bucket: its feed packs, its exchange sends, its delivery delivers. Knows no hook and no order of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm.failed import has_raised
from dpfuse.comm.waiting import Board, finish
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.events import Events, overridden
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Companion, Delivery, Exchange, Feed, PackArguments, PackStep
from dpfuse.engine.reading import Outcome
from dpfuse.engine.report import Report
from dpfuse.engine.shared_params import shared
from dpfuse.engine.streams import WritingStreams
from dpfuse.engine.torch_private import profiler_runs, ranged, ranged_without_graph
from dpfuse.errors import DPFuseError

__all__ = ["FLIGHT", "FREE", "LANDED", "BucketState", "GradBucket", "Parts", "Surroundings"]


class BucketState(Enum):
    """What state a bucket is in. The only moves are down this list and from LANDED to FREE; others raise."""

    FREE = auto()  # nothing waits for the communication buffer: send() may fill it
    FLIGHT = auto()  # sent; the exchange reads and writes the buffer until wait() returns
    LANDED = auto()  # reduced; deliver() or discard() gives the buffer back


FREE, FLIGHT, LANDED = BucketState  # for the hot path: before Python 3.12, looking up a member is slow
_NOTHING: frozenset[int] = frozenset()
_grad_of = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all buckets of a model share.

    Args:
        board: what the heartbeat of the group reads and writes; None if the group has no heartbeat.
        events: of the model, of which some tell how each bucket travels.
        leave: called with the error of a collective that could not start; the group cannot be used after that.
    """

    board: Board | None
    events: Events
    leave: Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What one bucket is made of.

    Args:
        buffer: its memory, the communication buffer.
        feed: packs gradients into the buffer.
        exchange: sums the buffer over the ranks.
        delivery: makes the buffer's content the parameters' gradients.
        steps: what features do while the bucket is packed.
        report: what travels after the gradients, in the last bucket only.
        writers: the streams that write its gradients, on CUDA.
        beside: what travels beside the last bucket.
    """

    buffer: CommBuffer
    feed: Feed
    exchange: Exchange
    delivery: Delivery
    steps: tuple[PackStep, ...] = ()
    report: Report | None = None
    writers: WritingStreams | None = None
    beside: tuple[Companion, ...] = ()


class GradBucket:
    """Gradients of some parameters, which are sent together.

    Args:
        plan: the plan of this bucket.
        params: its parameters, in the order of `plan.params`.
        parts: what it is made of.
        around: what it shares with the other buckets.
        label: for errors and profiles.

    Attributes:
        state: FREE, FLIGHT or LANDED.
        missing: registration indices of the parameters without a gradient in the last backward.
        error: why the last backward cannot use this rank's gradients; zeros were sent in their place.
        gave_views: whether every gradient was last delivered as a view of the communication buffer.
        carries: whether all buckets that were sent before, and ride, have landed wherever this one has.
        untouched: registration indices to which the last delivery has given no gradient, of any bucket.
        rides: whether the bucket in flight needs no wait but that for one that carries it, and no delivery: its
            gradients are views.
    """

    def __init__(self, plan: Bucket, params: Sequence[Tensor], parts: Parts, around: Surroundings, label: str) -> None:
        self.plan = plan
        self.params = list(params)
        self.parts = parts
        self.state = FREE
        self.missing: list[int] = []
        self.error: Exception | None = None
        self.gave_views = not params
        self.untouched: Set[int] = _NOTHING
        self.carries = parts.exchange.ends_in_order
        self.rides = False
        self._gives_views = parts.delivery.gives_views and len(parts.buffer.params) == len(params)
        self._around = around
        self._label = label
        self._frozen: frozenset[int] = frozenset()
        exchange, delivery, steps = parts.exchange, parts.delivery, parts.steps
        # What is called of the parts: methods that their classes override.
        self._take = overridden(Exchange, "take", exchange)
        self._empty = overridden(Exchange, "empty", exchange)
        self._started = overridden(Exchange, "started", exchange)
        self._prepare = overridden(Delivery, "prepare", delivery)
        self._hand_out = overridden(Delivery, "hand_out_early", delivery) if parts.buffer.params else ()
        self._before = overridden(PackStep, "before", *steps)
        self._after = overridden(PackStep, "after", *steps)
        self._report_writers: Sequence[Callable[..., None]] = () if parts.report is None else parts.report.writers
        self._feed_sent = overridden(Feed, "sent", parts.feed)
        self._delivery_sent = overridden(Delivery, "sent", delivery)
        self._delivery_landed = overridden(Delivery, "landed", delivery)
        self._exchange_landed = overridden(Exchange, "landed", exchange)
        self._delivered = (*overridden(Exchange, "deliver", exchange), *overridden(PackStep, "delivered", *steps))
        self._can_ride = self.carries and not self._delivered
        self._discard = overridden(Exchange, "discard", exchange)
        self._again = None if self._take or self._before else parts.feed.again
        self._work: dist.Work | None = None
        self._sources: list[Tensor | None] = []
        self._sent: Tensor = parts.buffer.flat

    def send(self, outcome: Outcome, *, complete: bool) -> None:
        """Pack the gradients and start the exchange; a parameter without a gradient sends zeros.

        An error before the exchange starts is kept in `error` and in `outcome`. The peers wait for this bucket in any
        case, so zeros are sent, and the report tells the peers of the error.

        Args:
            outcome: what has happened in this backward; this method changes it.
            complete: whether every parameter is known to have a gradient.
        """
        if self.state is not FREE:
            raise self._misuse(FREE)
        buffer, parts = self.parts.buffer, self.parts
        self.missing, self.error, self.rides = [], None, False
        self._frozen = self.untouched = _NOTHING
        several_streams = parts.writers is not None and parts.writers.precede()
        grads: list[Tensor | None] = []
        try:
            if outcome.frozen or shared:
                self._move_out(self._left_out(outcome))
            grads = list(map(_grad_of, buffer.params))
            for prepare in self._prepare:
                prepare(grads, complete=complete)
            if outcome.frozen or not complete:
                grads = self._without_missing(grads, outcome)
            # Here and in two places below, no context is entered where none is needed: that costs more than to ask.
            if torch.is_grad_enabled() or profiler_runs():
                with ranged_without_graph("dpfuse::pack", self._label):
                    self._pack(grads, outcome)
            else:
                self._pack(grads, outcome)
        except Exception as error:
            self._send_zeros_for(error, outcome)
        # The allocator reuses memory in the order of this stream. What other streams wrote must be kept until packed.
        self._sources = grads if several_streams else []
        self._start(buffer.flat, outcome)
        for sent in self._feed_sent:
            sent()
        for sent in self._delivery_sent:
            sent(self._work, clean=self.error is None and not self.missing and not self._frozen)

    def send_empty(self, outcome: Outcome) -> None:
        """Send zeros, and write no gradient. The result is to be discarded."""
        if self.state is not FREE:
            raise self._misuse(FREE)
        self.missing, self.error, self.rides = [], None, False
        parts = self.parts
        try:
            # Not the buffer itself: gradients that are still in use may lie in it, as views.
            flat = torch.zeros_like(parts.buffer.flat)
        except Exception as error:
            outcome.note(error)
            flat = parts.buffer.flat.zero_()
        if parts.report is not None:
            self._room_in(flat).copy_(parts.report.source(outcome))
        for empty in self._empty:
            empty(parts.buffer.averaging.pre_scale)
        self._start(flat, outcome)
        for sent in self._feed_sent:
            sent()

    def wait(self) -> None:
        """Wait for the exchange: on a CPU until it has ended, on CUDA by ordering the current stream after it."""
        if self.state is not FLIGHT:
            raise self._misuse(FLIGHT)
        assert self._work is not None
        parts, buffer, events = self.parts, self.parts.buffer, self._around.events
        is_last = parts.report is not None
        for tell in events.bucket_waited_for:
            tell(self._sent, self._work)
        try:
            if profiler_runs():
                with ranged("dpfuse::wait", self._label):
                    finish(self._work, self._around.board, self.plan.device, last=is_last)
            else:
                finish(self._work, self._around.board, self.plan.device, last=is_last)
        except BaseException as error:
            self._leave_after(error)
            raise
        for landed in self._delivery_landed:
            landed()
        for tell_of_end in events.bucket_landed:
            tell_of_end()
        for landed in self._exchange_landed:
            landed(self._work)
        self.error = self.error or parts.exchange.error
        if parts.report is not None:
            parts.report.landed(buffer.report if self._sent is buffer.flat else self._room_in(self._sent))
        for companion in parts.beside:
            companion.finish()
        self.state, self._work = LANDED, None  # last, so that after an error it can be waited for again

    def deliver(self, untouched: Set[int] = frozenset()) -> None:
        """Give the reduced gradients to the parameters, except to the `untouched` ones (registration indices)."""
        if self.state is not LANDED:
            raise self._misuse(LANDED)
        parts = self.parts
        if self._frozen:
            untouched = untouched | self._frozen
        self.untouched = untouched
        if parts.delivery.is_done and not (self.missing or untouched):
            self.gave_views = self._gives_views
        elif parts.buffer.params:
            self.gave_views = parts.delivery.deliver(self.missing, untouched) and self._gives_views
        for delivered in self._delivered:
            delivered(untouched)
        self._sources = []
        self.state = FREE

    def delivered(self) -> list[Tensor]:
        """Return the parameters to which the last backward has given a gradient.

        A frozen parameter keeps what is in its `.grad`, and that is no gradient of this backward. A parameter that no
        rank has used keeps it, too.
        """
        if not self.untouched:
            return self.params
        return [
            param for index, param in zip(self.plan.params, self.params, strict=True) if index not in self.untouched
        ]

    def arrive(self) -> None:
        """Be delivered without a wait, since the current stream has waited for a later bucket that carries this one."""
        if self.state is not FLIGHT or not self.rides:
            raise self._misuse(FLIGHT)
        self.gave_views, self._sources, self._work = self._gives_views, [], None
        self.state = FREE

    def discard(self) -> None:
        """Drop the result, after waiting for it if necessary. Gradients that share its memory become zeros."""
        if self.state is FLIGHT:
            self.wait()
        if self.state is not LANDED:
            raise self._misuse(LANDED)
        if self._sent is self.parts.buffer.flat:
            self.parts.delivery.discard()
        for discard in self._discard:
            discard()
        self._sources, self._sent = [], self.parts.buffer.flat
        self.state = FREE

    def forget_packed(self) -> None:
        """Forget what was packed, after an exception that may have struck when the bucket was sent, before this was."""
        for sent in self._feed_sent:
            sent()

    def bind(self, params: Sequence[Tensor]) -> None:
        """Use these parameters until the next call. A kept bucket that is bound to none keeps none of them alive."""
        self.params = list(params)
        outside = self.parts.exchange.bind(params)
        self.parts.buffer.params[:] = [param for place, param in enumerate(params) if place not in outside]

    def average_by(self, averaging: Averaging) -> None:
        """Use other factors from the next `send` on; the dtype that travels stays."""
        buffer = self.parts.buffer
        if not self.parts.exchange.takes_factors:
            return
        if averaging.pre_scale != buffer.averaging.pre_scale:
            self.parts.feed.release()
        buffer.averaging = replace(averaging, dtype=buffer.averaging.dtype)

    @property
    def averaging(self) -> Averaging:
        """The factors of the next `send`, and the dtype that travels."""
        return self.parts.buffer.averaging

    @property
    def busy(self) -> bool:
        """Whether the bucket was sent, and neither delivered nor discarded since."""
        return self.state is not FREE

    def _left_out(self, outcome: Outcome) -> frozenset[int]:
        """Return the frozen parameters for which zeros are sent, whatever is in their `.grad`.

        What an open window has accumulated before they were frozen is averaged. A rank that has accumulated nothing for
        such a parameter still takes part: the report tells whether another one has.
        """
        return outcome.frozen - outcome.just_frozen - self.parts.feed.held

    def _move_out(self, frozen: Set[int]) -> None:
        """Move gradients out of the buffer that others want as they are while it is packed and summed.

        Those of frozen parameters, where zeros will be, are for an optimizer: a discriminator has gradients of its own
        loss, and is frozen while the generator's loss goes through it. Those of a shared parameter are for the other
        wrapper, which packs them, too.
        """
        buffer = self.parts.buffer
        low, high = buffer.table.storage_range
        for index, param in zip(buffer.indices, buffer.params, strict=True):
            stays = index in frozen
            grad = param.grad if stays or id(leaf_of(param)) in shared else None
            if type(grad) is Tensor and grad.layout is torch.strided and low <= grad.data_ptr() < high:
                with torch.inference_mode(False):  # what is made there cannot be written outside of it
                    copy = grad.detach().clone()
                if stays:
                    grad.data = copy  # the same tensor: a program may have it, too
                else:
                    param.grad = copy

    def _without_missing(self, grads: list[Tensor | None], outcome: Outcome) -> list[Tensor | None]:
        """Return the gradients to pack, and note in `missing` the parameters that have none."""
        indices, held = self.parts.buffer.indices, self.parts.feed.held
        frozen = self._frozen = self._left_out(outcome)
        grads = [None if index in frozen else grad for index, grad in zip(indices, grads, strict=True)]
        self.missing = [
            index
            for index, grad in zip(indices, grads, strict=True)
            if grad is None and index not in frozen and index not in held
        ]
        return grads

    def _pack(self, grads: list[Tensor | None], outcome: Outcome) -> None:
        parts, buffer = self.parts, self.parts.buffer
        report = None
        if self._again is not None and not (self.missing or self._frozen):
            report = None if parts.report is None else parts.report.source(outcome)
            sources = grads if report is None else [*grads, report]
            if self._again(sources, buffer.table, buffer.averaging.pre_scale):
                for after in self._after:
                    after(PackArguments(buffer.table, self.missing, buffer.averaging.pre_scale))
                for write in self._report_writers:
                    write(self.plan, buffer, parts.report)
                for hand_out in self._hand_out:
                    hand_out(_NOTHING)
                self.rides = self._can_ride and parts.delivery.is_done and not self._around.events.bucket_landed
                return
        without = [*self.missing, *self._frozen.intersection(buffer.indices)] if self._frozen else self.missing
        arguments = PackArguments(buffer.table, without, buffer.averaging.pre_scale)
        for before in self._before:
            before(arguments)
        for take in self._take:
            outside = take(arguments.scale, parts.steps, self._frozen)
            if parts.exchange.multiplies_buffer:
                arguments.scale = 1.0
            self.missing += [index for index in outside if index not in self._frozen]
        if self.missing:
            outcome.missing += tuple(self.missing)
        if parts.report is not None:
            arguments.report = parts.report.source(outcome) if report is None else report
        parts.feed.pack(grads, arguments)
        for after in self._after:
            after(arguments)
        for write in self._report_writers:
            write(self.plan, buffer, parts.report)
        for hand_out in self._hand_out:
            hand_out(self._frozen.union(self.missing) if self.missing else self._frozen)

    def _send_zeros_for(self, error: Exception, outcome: Outcome) -> None:
        parts = self.parts
        self.error = error
        outcome.note(error)
        with torch.no_grad():
            parts.buffer.clear()
            for empty in self._empty:
                empty(parts.buffer.averaging.pre_scale)
            if parts.report is not None:
                parts.buffer.report.copy_(parts.report.source(outcome))

    def _room_in(self, flat: Tensor) -> Tensor:
        """Return the part of `flat` that holds the report."""
        return flat[flat.numel() - self.parts.buffer.report.numel() :]

    def _start(self, flat: Tensor, outcome: Outcome) -> None:
        exchange = self.parts.exchange
        try:
            self._sent, self.state = flat, FLIGHT
            if profiler_runs():
                with ranged("dpfuse::all_reduce", self._label):
                    self._work = exchange.start(flat)
            else:
                self._work = exchange.start(flat)  # nothing may come between the start and this
        except BaseException as error:
            self.state, outcome.torn = FREE, True
            # It is unknown where an interrupt has struck.
            if has_raised(error) or not isinstance(error, Exception):
                self._around.leave(error)
            raise
        try:  # before anything else, which may raise
            for companion in self.parts.beside:
                companion.start()
        except BaseException as error:  # the peers start theirs
            outcome.torn = True
            self._around.leave(error)
            raise
        for started in self._started:
            started(self._work)
        for tell in self._around.events.bucket_sent:
            tell(exchange.tensors(flat), self._work, is_last=self.parts.report is not None)

    def _leave_after(self, error: BaseException) -> None:
        """Leave the group if its wait has raised this error because the exchange has failed, perhaps only here."""
        assert self._work is not None
        if not isinstance(error, Exception):
            if has_raised(error):
                self._around.leave(error)
        elif not isinstance(error, DPFuseError) and (has_raised(error) or self._fails_again(self._work)):
            self._around.leave(error)

    def _fails_again(self, work: dist.Work) -> bool:
        """Whether the same wait fails again. One that was only interrupted can be repeated."""
        try:
            finish(work, self._around.board, self.plan.device)
        except Exception as error:
            return not isinstance(error, DPFuseError)
        return False

    def _misuse(self, expected: BucketState) -> DPFuseError:
        return DPFuseError(
            f"{self._label} with parameters {', '.join(self.parts.buffer.names[:3])}… is {self.state.name}, "
            f"expected {expected.name}; this is a bug in dpfuse, please report it"
        )
