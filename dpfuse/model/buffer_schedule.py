"""When a module's buffers are sent: in a backward, before a forward, or by a user's function. Knows no parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Companion, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Question
from dpfuse.errors import DPFuseError
from dpfuse.model.buffers import BufferKind, BufferSync
from dpfuse.model.written_buffers import WrittenBuffers

__all__ = ["BufferSchedule"]


class BufferSchedule(Feature, Companion):
    """Sends buffers beside the last bucket of each backward that synchronises, so that they are the same after it.

    A forward in training mode sends them first only if no such backward has done so since the one before, and if that
    one was to be averaged: ranks may have different numbers of forwards inside `no_sync()`. With gradient weights they
    may have different numbers of any, so no forward sends but the first of all. One in eval mode counts as none, since
    a rank may run it alone. Only the first of all sends in either mode: a rank may have left its model in eval mode,
    and its peers send then. A rank without a forward by then sends in its backward. What follows a forward that raised
    is another attempt.

    Once ranks have written different buffers between such a backward and the next forward, the first forward of each
    window sends them, too.

    As long as no buffer travels, no forward has to tell that it begins, and a delivery is unheard.

    Args:
        active: whether to send them, in backward and before a forward.

    Attributes:
        before_forward: whether a forward may have to send them.
        beside_gradients: whether backwards send them. Both may change between backwards, on all ranks.
        numbers_differ: whether ranks may have different numbers of forwards.
        local: whether the last forward that counts ran inside `no_sync()`.
        inferred: whether a forward without gradients has run since buffers were sent. What it has written on each rank
            stays there for the next forward, as with torch's class.
        hook: what synchronises the buffers in our place, before each forward.
        refusal: why the ranks have not settled on the buffers that travel, as an error; empty if they have.
    """

    _engine: Engine

    def __init__(self, buffers: BufferSync, *, active: bool) -> None:
        self.before_forward = self.beside_gradients = active
        self.numbers_differ = self.local = self.inferred = False
        self.hook: Callable[[], None] | None = None
        self.refusal = ""
        self.unheard = () if buffers.agreed else ("delivered",)
        self._buffers = buffers
        self._written = WrittenBuffers(buffers)
        self._question = Question("which buffers travel", self._settle_for_question)
        self._fresh = False  # whether a backward has sent them since the last forward
        self._begun = False  # whether they were sent, or a forward that counts has begun
        self._in_place = False  # whether the last forward raised, with the buffers that it was to have

    def join(self, engine: Engine) -> None:
        """As `Feature.join`: a rank on which buffers have changed asks all ranks to settle on those that travel."""
        self._engine = engine
        engine.layout.ask(self._question)
        self._written.join(engine)

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        """As `Feature.step`: take the report that the next backwards send."""
        if report is not None:
            self._written.use(report)
        return None

    def doubt(self) -> None:
        """As that of `BufferSync`."""
        self._buffers.doubt()

    @property
    def agreed(self) -> Mapping[str, BufferKind]:
        """The buffers that travel, by name."""
        return self._buffers.agreed

    def due(self, *, counts: bool) -> bool:
        """Whether the next forward sends buffers first. `counts` says that every rank runs it."""
        if not self.before_forward or self._in_place:
            return False
        if self.hook is not None:
            return True
        if not self._buffers.agreed:
            return False
        if not self._begun:
            return True
        if self._fresh:
            return counts and self._written.differ
        return counts and not (self.local or self.numbers_differ)

    def begin_forward(self, *, due: bool, counts: bool = True, local: bool = False, is_own: bool = True) -> None:
        """Send the buffers if they are due: on this rank, or for a rank without input, on the others.

        Args:
            due: whether they are.
            counts: whether every rank runs this forward.
            local: whether its backward is not to be averaged.
            is_own: whether this rank runs it, with the module's own buffers.
        """
        if counts and self._fresh:
            if is_own and self.beside_gradients:
                self._written.before_forward(by_value=not self.inferred)
            else:
                self._written.say_nothing()
        elif self._fresh and is_own and self.beside_gradients:
            self._written.note(by_value=not self.inferred)
        if due:
            self.send()
            self._fresh, self._begun, self.inferred = True, True, False
        if counts:
            self._begun, self.local = True, local
            self._fresh = self._in_place = False

    def forward_failed(self) -> None:
        """Note that a forward that counts raised after it had begun: the next one has its place on this rank."""
        self._in_place = self.hook is not None or bool(self._buffers.agreed)

    def send(self) -> None:
        """Send the buffers now, or do what the user has registered instead."""
        if self.hook is not None:
            self.hook()
        else:
            self._buffers.send(self._engine.source)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`. A forward may have changed buffers: some get a shape in the first."""
        if not (sync and self.beside_gradients):
            return
        buffers = self._buffers
        if buffers.agreed and (self._fresh or not self._begun):  # the other ranks may have run a forward
            self._written.tell_noted()
            if self.due(counts=True):
                self.begin_forward(due=True, counts=False)
        self._question.asks = bool(buffers.agreed or buffers.found or any(buffers.tables)) and buffers.unsettled

    def settle(self) -> str:
        """Settle with the other ranks on the buffers that travel; to be called on every rank.

        Returns:
            The error to raise on every rank; empty if there is none.
        """
        if not self.beside_gradients:
            return ""
        first = not self._buffers.agreed
        refusal = self._buffers.settle(self._engine.source)
        self._buffers.mark()
        if first:  # all of them have just been sent
            self._fresh = self._begun = True
        self._question.asks = self._buffers.unsettled
        self.unheard = ()
        self._engine.events.refresh()
        return refusal or ""

    def _settle_for_question(self) -> None:
        self.refusal = self.settle()

    def delivered(self) -> None:
        """As `Watcher.delivered`.

        Raises:
            DPFuseError: some ranks have converted a buffer, and others have not.
        """
        self._written.delivered()
        if self.refusal:
            text, self.refusal = self.refusal, ""
            raise DPFuseError(f"{text} The gradients of this backward are averaged.")

    def beside(self) -> Companion | None:
        """As `Feature.beside`. Without buffers it is None; when one is added, the buckets are made again."""
        return self if self._buffers.exist else None

    def start(self) -> None:
        """As `Companion.start`."""
        if self.beside_gradients:
            self._buffers.start(self._engine.source)

    def finish(self) -> None:
        """As `Companion.finish`."""
        if self.beside_gradients:
            self._written.finish_sending()
            self._fresh, self._begun, self.inferred = True, True, False

    def sent_otherwise(self) -> None:
        """Note that something else has sent the buffers, which counts as a write on all ranks but one."""
        self._buffers.forget_mark()
