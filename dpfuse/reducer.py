"""When buckets are sent and delivered: a state machine on parameter indices. Touches no tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from dpfuse.errors import DPFuseError

if TYPE_CHECKING:
    from dpfuse.bucket import GradBucket

__all__ = ["Phase", "Reducer"]

ENDLESS = 1 << 62  # marks that a countdown survives when nothing is to happen at its end


class Phase(Enum):
    """What the backward that is open, if any, means for the reducer."""

    IDLE = auto()  # none is open; the next ready mark opens one
    LOCAL = auto()  # it does not synchronise; marks mean nothing
    RECORDING = auto()  # the first that synchronises: marks are recorded, all is sent at its end
    REDUCING = auto()  # a bucket is sent once it and all before it are complete, the last one at the end
    ABANDONED = auto()  # it synchronised, and an exception ended it; to be drained before anything else


class _Countdown:
    """Ready marks that a bucket still waits for. Below zero: it got more of them than expected."""

    __slots__ = ("expected", "launched", "pending")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.pending = 0
        self.launched = False


class Reducer:
    """Counts gradients down, sends complete buckets in plan order, and delivers them after backward.

    Args:
        buckets: in communication order; the last one carries the tail.
        names: of the parameters, by registration index.
        index_of: the registration index of what a ready mark is called with.
        warn_unused: whether to warn, once, of parameters without gradient.
        open_backward: called by the first ready mark of a backward that nothing announced; must call `open`.
        rebuild: called after the first synchronised backward with the ready order and the number of ready
            marks per parameter; may call `adopt`.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        names: Sequence[str],
        *,
        index_of: Callable[[Any], int],
        warn_unused: bool,
        open_backward: Callable[[], None],
        rebuild: Callable[[list[int], list[int]], None],
    ) -> None:
        self.phase = Phase.IDLE
        self.require_sync = True  # what no_sync() switches off
        self._names = names
        self._index_of = index_of
        self._warn_unused = warn_unused
        self._open_backward = open_backward
        self._rebuild: Callable[[list[int], list[int]], None] | None = rebuild
        self._recorded: bool | None = None  # did a forward since the last synchronised backward ask for one?
        self._outputs_watched = True
        self._ready: dict[int, int] = {}  # while recording: ready marks by parameter, last ready last
        self._late: list[int] = []  # parameters that became ready after their bucket was sent
        self._missing: list[int] = []  # parameters without gradient, of the buckets sent so far
        self._error: Exception | None = None  # the first of their packs that failed
        self.adopt(buckets, [1] * len(names))

    def adopt(self, buckets: Sequence[GradBucket], marks: Sequence[int]) -> None:
        """Use these buckets from now on; `marks` is how often each parameter becomes ready in a backward.

        Every marker made before is out of date afterwards.
        """
        self.buckets = list(buckets)
        self._countdowns = [_Countdown(sum(max(1, marks[i]) for i in b.plan.params)) for b in buckets]
        self._next = 0

    def markers(self) -> list[Callable[[Any], None]]:
        """Per parameter, what to call with it whenever its gradient was accumulated. This is the hot path.

        All parameters of a bucket share one function, which then stays in the processor's caches: that costs
        as little as calling an empty one, where a function per parameter costs half as much again.
        """
        by_parameter: dict[int, Callable[[Any], None]] = {}
        for bucket, countdown in zip(self.buckets, self._countdowns, strict=True):
            marker = self._marker(countdown)
            by_parameter |= dict.fromkeys(bucket.plan.params, marker)
        return [by_parameter[index] for index in range(len(self._names))]

    def _marker(self, countdown: _Countdown) -> Callable[[Any], None]:
        decide = self._decide

        def mark_ready(param: Any) -> None:
            countdown.pending = pending = countdown.pending - 1
            if pending <= 0:
                decide(param, countdown)

        return mark_ready

    def record_forward(self, sync: bool, *, outputs_watched: bool = True) -> None:
        """Note a forward with gradients enabled; one that synchronises wins over any that do not."""
        self._recorded = sync or bool(self._recorded)
        self._outputs_watched = outputs_watched

    def forget_forwards(self) -> None:
        """Let the next backward be judged by later forwards alone, or by the state of `no_sync()` then."""
        self._recorded = None

    def prepare_for_backward(self, tensors: Iterable[Any] = ()) -> None:
        """Make the next backward synchronise although its forward ran inside `no_sync()`.

        The name and the (unused) argument are those of the reducer of torch's DistributedDataParallel.
        """
        self.record_forward(True)

    def shadow_backward(self) -> None:
        """Take part in a synchronised backward of other ranks, as one in which no parameter became ready.

        Raises:
            DPFuseError: that backward failed on some rank.
        """
        warn_unused, self._warn_unused = self._warn_unused, False
        try:
            self.record_forward(True)
            self.open(announced=True)
            self.close(lambda: True)
        finally:
            self._warn_unused = warn_unused

    def open(self, *, announced: bool) -> None:
        """A backward begins; `announced` by an output of the wrapper, or else by its first ready mark.

        Raises:
            DPFuseError: the backward before was interrupted on some ranks only.
        """
        if self.phase is Phase.ABANDONED:
            self.drain()
        sync = self._recorded
        # A backward through none of the watched outputs has no forward of its own.
        if sync is None or (not sync and not announced and self._outputs_watched):
            sync = self.require_sync
        if not sync:
            self._enter(Phase.LOCAL, [ENDLESS] * len(self.buckets))
        elif self._rebuild is not None:
            self._enter(Phase.RECORDING, [0] * len(self.buckets))
        else:
            self._enter(Phase.REDUCING, [countdown.expected for countdown in self._countdowns])

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        """The outermost backward ended: send what is left, wait, deliver.

        Args:
            reached_leaves: tells whether it was a backward that accumulates gradients at all; asked only
                if no parameter became ready (`torch.autograd.grad` must not be reduced, a rank that used
                no parameter must).

        Raises:
            DPFuseError: this rank or another one failed; no rank's gradients may be used.
        """
        if self.phase is Phase.LOCAL or (not self._any_mark() and not reached_leaves()):
            self._enter(Phase.IDLE)
            return
        try:
            self._launch_rest()
            self._deliver()
        except BaseException:
            # What _deliver itself reports has been cleared up; a collective that failed has not.
            if self.phase is not Phase.IDLE:
                self.abandon()
            raise
        if self._rebuild is None:
            self._reset()
            return
        rebuild, self._rebuild = self._rebuild, None
        order, marks = list(self._ready), [self._ready.get(i, 0) for i in range(len(self._names))]
        self._reset()
        rebuild(order, marks)

    def abandon(self) -> None:
        """The open backward died of an exception: `close` will not be called for it."""
        self._enter(Phase.IDLE if self.phase is Phase.LOCAL else Phase.ABANDONED)

    def drain(self) -> None:
        """Complete the collectives of an abandoned backward, whose peers may wait in them.

        If every rank abandoned it, training goes on; what is in `.grad` is no whole backward's then.

        Raises:
            DPFuseError: some ranks completed that backward.
        """
        self._launch_rest(failed=True)
        for bucket in self.buckets:
            if bucket.busy:  # not delivered before something went wrong
                bucket.discard()
        failed = self._tail.failed_ranks(wait=True)
        self._reset()
        world_size = self._tail.world_size
        if len(failed) < world_size:
            raise DPFuseError(
                f"the last backward was interrupted by an exception on rank {_listed(failed)} of "
                f"{world_size} only; expected all ranks to end it alike. Its gradients are not averaged: "
                "zero them on every rank and repeat the step."
            )

    @property
    def rebuilt(self) -> bool:
        """Whether the first synchronised backward is over, and the buckets are those of its ready order."""
        return self._rebuild is None

    @property
    def owes_backward(self) -> bool:
        """Whether a forward that synchronises still waits for its backward."""
        return bool(self._recorded)

    @property
    def _tail(self) -> Any:
        return self.buckets[-1].tail

    def _decide(self, param: Any, countdown: _Countdown) -> None:
        if self.phase is Phase.REDUCING:
            if countdown.pending == 0:
                self._launch_complete()
            elif countdown.launched:
                self._late.append(self._index_of(param))
        elif self.phase is Phase.RECORDING:
            index = self._index_of(param)
            self._ready[index] = self._ready.pop(index, 0) + 1
        else:
            # No output of the wrapper announced this backward; this mark is its first.
            self._open_backward()
            countdown.pending -= 1
            if countdown.pending <= 0:
                self._decide(param, countdown)

    def _launch_complete(self) -> None:
        # In plan order, never in the order of completion: collectives must match on all ranks. The last one
        # goes when backward has ended, for it tells the peers whether all went well until then; its
        # gradients are the last to arrive anyway.
        while self._next < len(self.buckets) - 1 and self._countdowns[self._next].pending <= 0:
            self._launch(self._next, complete=True)

    def _launch_rest(self, *, failed: bool = False) -> None:
        recording = self.phase is Phase.RECORDING
        for order in range(self._next, len(self.buckets)):
            complete = not recording and self._countdowns[order].pending <= 0
            self._launch(order, complete=complete, failed=failed)

    def _launch(self, order: int, *, complete: bool, failed: bool = False) -> None:
        bucket = self.buckets[order]
        self._countdowns[order].launched = True
        self._next = order + 1
        failed = failed or bool(self._late) or self._error is not None
        bucket.launch(complete=complete, unused=self._missing, failed=failed)
        self._missing += bucket.missing
        self._error = self._error or bucket.error

    def _deliver(self) -> None:
        missing, error = self._missing, self._error
        held: list[GradBucket] = []
        for bucket in self.buckets:
            bucket.wait()
            error = error or bucket.error  # a communication hook may fail as late as that
            here = error is not None or bool(self._late)
            # Whether a missing gradient exists elsewhere is known once the last bucket has landed.
            if here or bucket.missing:
                held.append(bucket)
            else:
                bucket.deliver()
        failed = self._tail.failed_ranks(wait=here or bool(missing))
        if failed:
            for bucket in held:
                bucket.discard()
            message = self._failure(failed, error)
            self._reset()
            raise DPFuseError(message) from error
        if not held:
            return
        untouched = set(missing) - self._tail.used_somewhere(missing)
        for bucket in held:
            bucket.deliver(untouched)
        if self._warn_unused:
            self._warn_unused = False
            self._warn(missing, untouched)

    def _failure(self, failed: list[int], error: Exception | None) -> str:
        rank = self._tail.rank
        consequence = "No rank's gradients of this backward are averaged: zero them before the next one."
        if rank not in failed:
            return (
                f"the backward failed on rank {_listed(failed)} of {self._tail.world_size}, and rank {rank} "
                f"cannot have its gradients; see the error there. {consequence}"
            )
        if isinstance(error, DPFuseError):
            return f"rank {rank}: {str(error).rstrip('.')}. {consequence}"
        if error is not None:
            return f"rank {rank} could not pack its gradients: {str(error).rstrip('.')}. {consequence}"
        return (
            f"on rank {rank} {self._named(set(self._late))} became ready after its bucket was sent; expected "
            "as many times in a backward as in the first synchronised one. Use it equally often in every "
            "step, or run such steps inside no_sync() and call dpfuse.fused_allreduce_gradients(). " + consequence
        )

    def _warn(self, unused: list[int], untouched: Collection[int]) -> None:
        warnings.warn(
            f"rank {self._tail.rank}: {self._named(unused)} got no gradient in this backward; "
            f"{len(untouched)} of these were used on no rank and stay without, the others got the mean over "
            "all ranks with zero from here. Pass find_unused_parameters=True if that is meant.",
            stacklevel=2,
        )

    def _named(self, indices: Collection[int]) -> str:
        names = [repr(self._names[index]) for index in sorted(indices)]
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return f"parameter{'s' * (len(names) > 1)} {', '.join(names[:10])}{more}"

    def _any_mark(self) -> bool:
        if self.phase is Phase.RECORDING:
            return bool(self._ready)
        return any(countdown.pending != countdown.expected for countdown in self._countdowns)

    def _enter(self, phase: Phase, pending: Sequence[int] | None = None) -> None:
        self.phase = phase
        for order, countdown in enumerate(self._countdowns):
            countdown.pending = pending[order] if pending else 0

    def _reset(self) -> None:
        self._recorded = None
        self._ready = {}
        self._late = []
        self._missing = []
        self._error = None
        self._next = 0
        for countdown in self._countdowns:
            countdown.launched = False
        self._enter(Phase.IDLE)


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
