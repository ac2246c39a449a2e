"""When buckets are sent and delivered: a state machine on parameter indices. Touches no tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dpfuse.engine import messages
from dpfuse.engine.countdown import Countdown
from dpfuse.engine.local_backward import LocalBackward
from dpfuse.engine.phase import ABANDONED, CHANGED, IDLE, LOCAL, RECORDERS, RECORDING, REDUCING, RESTING, Phase
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.engine.waiting import BACKWARD, BETWEEN, Track
from dpfuse.errors import DPFuseError

if TYPE_CHECKING:
    from dpfuse.engine.buckets.bucket import GradBucket
    from dpfuse.engine.report import Report, Tail
    from dpfuse.engine.window import Canary

__all__ = ["Reducer"]


class Reducer:
    """Counts gradients down, sends complete buckets in plan order, and delivers them after backward.

    Args:
        buckets: in communication order; the last one carries the tail.
        names: of the parameters, by registration index.
        canary: counts what the tail tells of.
        index_of: the registration index of what a ready mark is called with.
        warn_unused: whether to warn, once, of parameters without gradient.
        open_backward: called by the first ready mark of a backward that nothing announced; must call `open`.
        rebuild: called after the first synchronised backward with the ready order and the marks of each parameter.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        names: Sequence[str],
        *,
        canary: Canary,
        index_of: Callable[[Any], int],
        warn_unused: bool,
        open_backward: Callable[[], None],
        rebuild: Callable[[list[int], list[int]], None],
    ) -> None:
        self.phase = IDLE
        self.require_sync = True  # what no_sync() switches off
        self.after_delivery: Sequence[Callable[[], None]] = ()  # called once all gradients of a backward are averaged
        self.opened: Callable[..., None] | None = None  # called with `sync` and `announced` when a backward begins
        self.guard: Callable[[Any], None] | None = None  # called with the tail's alarm after each delivery
        self.strict = False  # whether to wait for what the peers report, wherever that takes waiting
        self._names = names
        self._canary = canary
        self._index_of = index_of
        self._warn_unused = warn_unused
        self._open_backward = open_backward
        self._rebuild = rebuild
        self.track = Track()  # where it tells the heartbeat how far it has come
        self.rebuilt = False  # whether the buckets are those of the first synchronised backward's ready order
        self._outdated: list[GradBucket] = []  # those in use, once `follow` has brought others
        self._change = ""
        self._agree: Callable[[], None] = lambda: None
        self._recorded: bool | None = None  # did a forward since the last synchronised backward ask for one?
        self._outputs_watched = True
        self._ready: dict[int, int] = {}  # while recording: ready marks by parameter, last ready last
        self._late: list[int] = []  # parameters that became ready after their bucket was sent
        self._missing: list[int] = []  # parameters without gradient, of the buckets sent so far
        self._error: Exception | None = None  # the first of their packs that failed
        self.completed = 0  # synchronised backwards
        self.last_error = ""  # of a backward
        self.adopt(buckets, [1] * len(names))

    def adopt(self, buckets: Sequence[GradBucket], marks: Sequence[int]) -> None:
        """Use these buckets from now on; `marks` is how often each parameter becomes ready in a backward.

        Every marker made before is out of date afterwards.
        """
        self.buckets = list(buckets)
        self._marks = marks
        self._countdowns = [Countdown(sum(max(1, marks[i]) for i in b.plan.params)) for b in buckets]
        self._expected = [countdown.expected for countdown in self._countdowns]
        self._tail = _tail_of(self.buckets)
        self._next = 0
        self.local = LocalBackward(self.buckets, self._countdowns, self._canary)

    def follow(
        self, buckets: Sequence[GradBucket], names: Sequence[str], change: str, agree: Callable[[], None]
    ) -> None:
        """The model of this rank has changed, and maybe that of others.

        The next synchronised backward first sends the buckets in use, empty, since the peers may still use them.
        Their tail tells who has changed. If all have, the backward goes on as the first one of `buckets`.

        Args:
            buckets: of the changed model; every marker made before is out of date.
            names: of its parameters.
            change: what has changed, for errors.
            agree: called once all have changed; raises, on all ranks alike, if they have not done so alike.
        """
        self._outdated = self._outdated or self.buckets
        self._names, self._change, self._agree = names, change, agree
        self.adopt(buckets, [1] * len(names))

    def unfollow(self, names: Sequence[str], marks: Sequence[int]) -> None:
        """The change was undone: go back to the buckets in use; arguments as for `follow` and `adopt`."""
        buckets, self._outdated = self._outdated, []
        self._names = names
        self.adopt(buckets, marks)

    def markers(self) -> list[Callable[[Any], None]]:
        """Per parameter, what to call with it whenever its gradient was accumulated. This is the hot path."""
        by_parameter: dict[int, Callable[[Any], None]] = {}
        for bucket, countdown in zip(self.buckets, self._countdowns, strict=True):
            marker = countdown.marker(self._decide)
            by_parameter |= dict.fromkeys(bucket.plan.params, marker)
            for index, pack in bucket.eager().items():
                if self._marks[index] == 1:  # else there is more to come, or may be
                    by_parameter[index] = countdown.packing_marker(pack, self._decide)
        return [by_parameter[index] for index in range(len(self._names))]

    def record_forward(self, sync: bool, *, outputs_watched: bool = True) -> None:
        """Note a forward with gradients enabled; one that synchronises wins over any that do not."""
        self._recorded = sync or bool(self._recorded)
        self._outputs_watched = outputs_watched

    def forget_forwards(self) -> None:
        """Let the next backward be judged by later forwards alone, or by the state of `no_sync()` then."""
        self._recorded = None
        self._canary.forget_forwards()

    def prepare_for_backward(self, tensors: Iterable[Any] = ()) -> None:
        """Make the next backward synchronise, whatever `no_sync()` says; name and argument are those of torch's."""
        self.record_forward(True)

    def shadow_backward(self) -> None:
        """Take part in a synchronised backward of other ranks, as one in which no parameter became ready.

        Raises:
            DPFuseError: that backward failed on some rank.
        """
        warn_unused, self._warn_unused = self._warn_unused, False
        self._canary.elsewhere = True
        try:
            self.record_forward(True)
            self.open(announced=True)
            self.close(lambda: True)
        finally:
            self._canary.elsewhere = False
            self._warn_unused = warn_unused

    def open(self, *, announced: bool) -> None:
        """A backward begins; `announced` by an output of the wrapper, or else by its first ready mark.

        Raises:
            DPFuseError: the backward before was interrupted on some ranks only, or this one is not announced and has
                added to gradients of it; or a CUDA graph is captured in the first one, after which the ranks agree.
        """
        if self.phase is ABANDONED:
            begun = self._next > 0 and not announced
            self.drain()
            if begun:
                raise DPFuseError(messages.begun(self._tail.rank))
        self._canary.backward_begins(announced=announced)
        sync = self._recorded
        # A backward through none of the watched outputs has no forward of its own.
        if sync is None or (not sync and not announced and self._outputs_watched):
            sync = self.require_sync
        if self.opened is not None:
            self.opened(sync=sync, announced=announced)
        if not sync:
            self._enter(LOCAL, self.local.pending())
        elif (self._outdated or not self.rebuilt) and self._tail.deaf:
            raise DPFuseError(messages.unsettled(self._tail.rank))
        elif self._outdated:
            self._enter(CHANGED)
        elif not self.rebuilt:
            self._enter(RECORDING)
        else:
            self._enter(REDUCING, self._expected)

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        """The outermost backward ended: send what is left, wait, deliver.

        Args:
            reached_leaves: tells whether it was a backward that accumulates gradients at all; asked only
                if no parameter became ready (`torch.autograd.grad` must not be reduced, a rank that used
                no parameter must).

        Raises:
            DPFuseError: this rank or another one failed; no rank's gradients may be used.
        """
        if self.phase is LOCAL:
            try:
                self.local.finish()
            finally:
                self._enter(IDLE)
            return
        if not self._any_mark() and not reached_leaves():
            self._enter(IDLE)
            return
        self._canary.gradients_accumulated()
        try:
            if self.phase is CHANGED:
                self._settle_change()
            self._launch_rest()
            if not self._deliver() and self.guard is not None:
                self.guard(self._tail.alarm())
        except BaseException as error:
            self.last_error = f"{type(error)}: {error}"
            # What _deliver itself reports has been cleared up; a collective that failed has not.
            if self.phase is not IDLE:
                self.abandon()
            raise
        self.completed += 1
        if self.rebuilt:
            self._reset()
        else:
            self.rebuilt = True
            order, marks = list(self._ready), [self._ready.get(i, 0) for i in range(len(self._names))]
            self._reset()
            self._rebuild(order, marks)
        for action in self.after_delivery:
            action()

    def abandon(self) -> None:
        """The open backward died of an exception: `close` will not be called for it."""
        if self.phase is LOCAL:
            self._enter(IDLE)
            self.local.die()  # last, for a warning may be an error
        else:
            self._enter(ABANDONED)

    def drain(self) -> None:
        """Complete the collectives of an abandoned backward, whose peers may wait in them.

        If every rank abandoned it, training goes on; what is in `.grad` is no whole backward's then.

        Raises:
            DPFuseError: some ranks completed that backward.
        """
        buckets = self._outdated or self.buckets
        self._launch_empty(buckets, failed=True)
        for bucket in buckets:
            if bucket.busy:  # not delivered before something went wrong
                bucket.discard()
        failed = _tail_of(buckets).report(wait=True).failed
        self.local.forget()  # also of a changed model, whose buckets were not sent
        self._reset()
        if len(failed) < self._tail.world_size:
            raise DPFuseError(messages.interrupted(failed, self._tail.world_size))

    @property
    def owes_backward(self) -> bool:
        """Whether a forward that synchronises still waits for its backward."""
        return bool(self._recorded)

    def _decide(self, param: Any, countdown: Countdown) -> None:
        if self.phase is REDUCING:
            if countdown.pending == 0:
                self._launch_complete()
            elif countdown.launched:
                self._late.append(self._index_of(param))
        elif self.phase in RECORDERS:
            index = self._index_of(param)
            self._ready[index] = self._ready.pop(index, 0) + 1
        elif self.phase is LOCAL:
            self.local.ready(countdown)
        else:
            # No output of the wrapper announced this backward; this mark is its first.
            self._open_backward()
            countdown.pending -= 1
            if countdown.pending <= 0:
                self._decide(param, countdown)

    def _launch_complete(self) -> None:
        # In plan order, never in that of completion: collectives must match on all ranks. The last one goes once
        # backward has ended, for it tells the peers whether all went well; its gradients are the last to arrive anyway.
        while self._next < len(self.buckets) - 1 and self._countdowns[self._next].pending <= 0:
            self._launch(self._next, complete=True)

    leave_untraced(_launch_complete, calls=True, reason="dpfuse sends gradients here")

    def _launch_rest(self) -> None:
        for order in range(self._next, len(self.buckets)):
            self._launch(order, complete=self.phase is REDUCING and self._countdowns[order].pending <= 0)

    def _launch_empty(self, buckets: Sequence[GradBucket], *, failed: bool) -> None:
        for bucket in buckets[self._next :]:
            self._next += 1
            bucket.launch(empty=True, failed=failed)

    def _settle_change(self) -> None:
        """Hear who has changed, and go on with the new buckets if all have, alike."""
        buckets = self._outdated
        self._launch_empty(buckets, failed=False)
        for bucket in buckets:
            bucket.wait()
        error = next((bucket.error for bucket in buckets if bucket.error is not None), None)
        for bucket in buckets:
            bucket.discard()
        report = _tail_of(buckets).report(wait=True)
        try:
            if len(report.changed) < self._tail.world_size:
                raise DPFuseError(self._verdict(report, error)) from error
            self._agree()
        except BaseException:
            self.local.forget()
            self._reset()
            raise
        self._outdated, self.rebuilt, self._next = [], False, 0

    def _launch(self, order: int, *, complete: bool) -> None:
        self.track.tell(BACKWARD, self.completed, order)
        bucket = self.buckets[order]
        self._countdowns[order].launched = True
        self._next = order + 1
        failed = bool(self._late) or self._error is not None
        bucket.launch(complete=complete, unused=self._missing, failed=failed)
        self._missing += bucket.missing
        self._error = self._error or bucket.error

    def _deliver(self) -> bool:
        """Wait for all buckets and hand the gradients over; returns whether the peers' report on them was read."""
        missing, error = self._missing, self._error
        held: list[GradBucket] = []
        for order, bucket in enumerate(self.buckets):
            if len(self.buckets) > 1:  # else it is where it was when that one was sent
                self.track.tell(BACKWARD, self.completed, order)
            bucket.wait()
            error = error or bucket.error  # a communication hook may fail as late as that
            here = error is not None or bool(self._late)
            # Whether a missing gradient exists elsewhere is known once the last bucket has landed.
            if here or bucket.missing:
                held.append(bucket)
            else:
                bucket.deliver()
        if missing and self._tail.deaf:
            error, here = DPFuseError(messages.unread([self._names[index] for index in sorted(missing)])), True
        # After the first backward the ranks agree on the buckets: whoever has failed would be missed there.
        wait = here or bool(missing) or self.strict or not self.rebuilt
        report = self._tail.report(wait=wait, failed=here)
        if not report.all_well:
            for bucket in held:
                bucket.discard()
            message = self._verdict(report, error)
            self._reset()
            raise DPFuseError(message) from error
        heard = wait and not self._tail.deaf
        if not held:
            return heard
        untouched = set(missing) - self._tail.used_somewhere(missing)
        for bucket in held:
            bucket.deliver(untouched)
        if self._warn_unused:
            self._warn_unused = False
            names = [self._names[index] for index in sorted(missing)]
            warnings.warn(messages.unused(self._tail.rank, names, len(untouched)), stacklevel=2)
        return heard

    def _verdict(self, report: Report, error: Exception | None) -> str:
        rank, size = self._tail.rank, self._tail.world_size
        if report.strayed:
            return messages.strayed(rank, report.strayed)
        if not report.failed:
            return messages.changed(rank, size, report.changed, self._change)
        late = [self._names[index] for index in sorted(set(self._late))]
        return messages.failed(rank, size, report.failed, error, late)

    def _any_mark(self) -> bool:
        if self.phase in RECORDERS:
            return bool(self._ready)
        return [countdown.pending for countdown in self._countdowns] != self._expected

    def _enter(self, phase: Phase, pending: Sequence[int] | None = None) -> None:
        self.phase = phase
        self.track.tell(BETWEEN if phase in RESTING else BACKWARD, self.completed)
        for order, countdown in enumerate(self._countdowns):
            countdown.pending = pending[order] if pending else 0

    def _reset(self) -> None:
        self._canary.begin_window()
        self._recorded = None
        self._ready = {}
        self._late = []
        self._missing = []
        self._error = None
        self._next = 0
        for countdown in self._countdowns:
            countdown.launched = False
        self._enter(IDLE)


def _tail_of(buckets: Sequence[GradBucket]) -> Tail:
    tail = buckets[-1].tail
    assert tail is not None
    return tail
