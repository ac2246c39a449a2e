"""When buckets are sent and delivered: ready lists, the order of sending, stages. Touches no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from operator import attrgetter
from typing import Any, Protocol
from weakref import ref

from torch import OutOfMemoryError, Tensor
from torch.optim import Optimizer

from dpfuse.comm.failed import has_raised
from dpfuse.comm.memory_errors import error_of
from dpfuse.comm.waiting import BACKWARD, BETWEEN, Track
from dpfuse.engine import messages
from dpfuse.engine.autograd import (
    BackwardListener,
    BackwardWatch,
    Reached,
    ReadyHooks,
    averaged_elsewhere,
    backward_is_nested,
    backward_runs,
    running_backward,
    unreached,
)
from dpfuse.engine.backward_table import (
    ABANDONED,
    ACCUMULATE,
    AVERAGED,
    BEGINS,
    BEGINS_CHANGED,
    BEGINS_FIRST,
    BEGINS_LOCAL,
    CHANGED,
    COMPLETED,
    COUNT,
    DIED,
    DIED_UNNOTED,
    DIED_UNOPENED,
    DROP,
    ENDED,
    ENTER,
    FORGET,
    IDLE,
    LOCAL,
    OPEN,
    READY,
    RECORDING,
    REDUCING,
    REFUSED,
    RESTING,
    SEND,
    TRANSITIONS,
    WAS_OPEN,
    Action,
    Event,
    State,
)
from dpfuse.engine.bucket import FLIGHT, FREE, LANDED, GradBucket
from dpfuse.engine.bucket_maker import BucketMaker
from dpfuse.engine.bucket_set import BucketSet
from dpfuse.engine.events import Events
from dpfuse.engine.feeds.accumulating import Accumulating, Accumulation
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.lost_steps import LOST, LostSteps
from dpfuse.engine.membership import Membership
from dpfuse.engine.optimizer_step_hook import call_before_steps
from dpfuse.engine.reading import ALL_WELL, Outcome, Reading
from dpfuse.engine.ready import ReadyHook, ReadyList
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportLayout
from dpfuse.engine.send_order import SendOrder
from dpfuse.engine.shared_params import backwards_begun, count_backward, shared
from dpfuse.engine.sync_decision import Window
from dpfuse.engine.torch_private import leave_untraced, profiler_runs
from dpfuse.engine.unused import UnusedParameters
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError

__all__ = ["Decline", "Reducer"]

log = getLogger("dpfuse.failed")
rebuild_log = getLogger("dpfuse.rebuild")


class Decline(Protocol):
    """Takes part in a vote of the peers on a rank that cannot go on; returns whether they all raise an error."""

    def __call__(self, *, out_of_memory: bool) -> bool: ...


_entries_of = attrgetter("entries")
_is_due = attrgetter("due")
_leaves_out_of = attrgetter("leaves_out")
_sentinel_of = attrgetter("sentinel")


@dataclass(slots=True)
class _Run:
    """The state of one synchronised backward."""

    outcome: Outcome = field(default_factory=Outcome)
    next: int = 0  # the bucket to be sent next
    stage: int = 0  # of its end, which comes next
    backward: int | None = None  # the engine's number of it, where another model of the group may share it
    asks_graph: bool = False  # whether its graph may be asked which parameters it reaches
    unreached: Sequence[Tensor] = ()  # what it has answered
    reading: Reading | None = None  # what the ranks have reported
    delivered: bool = False
    warnings: tuple[str, ...] = ()  # given after delivery: they may become errors


@dataclass(frozen=True)
class _Change:
    """A change of the model on this rank. The other ranks may have changed theirs, or not."""

    outdated: BucketSet  # in use until all ranks are known to have changed
    text: str
    agree: Callable[[], None]
    decline: Decline


class Reducer:
    """Sends complete buckets in plan order while backward runs, and delivers them at its end.

    Args:
        in_use: the buckets.
        maker: makes others.
        membership: of this rank in the group.
        window: decides whether a backward synchronises, and counts what ranks must have in common.
        layout: of the report.
        track: tells the heartbeat what this rank is doing.
        events: of the model, to be told of backwards.
        order: the turns of this model among those of its group.
        lost: knows which means this rank has not used.
        hooks: the ready hooks on the parameters.
        wrap: puts a listener of the face in front of the reducer.

    Attributes:
        watch: tells it when backwards begin and end.
        state: of the backward that is open, as the table of `dpfuse.engine.backward_table` says.
        require_sync: whether backwards are synchronised; no_sync() switches it off.
        rebuilt: whether the buckets are planned for the ready order of the first synchronised backward.
        completed: number of synchronised backwards.
        last_error: the text of the last error of a backward.
        missed: whether a backward has died before it reached an output that waits for it.
        accumulation: counts and accumulates backwards that are not synchronised.
    """

    def __init__(
        self,
        in_use: BucketSet,
        *,
        maker: BucketMaker,
        membership: Membership,
        window: Window,
        layout: ReportLayout,
        track: Track,
        events: Events,
        order: SendOrder,
        lost: LostSteps,
        hooks: ReadyHooks,
        wrap: Callable[[BackwardListener], BackwardListener] = lambda listener: listener,
    ) -> None:
        self.state: State = IDLE
        self.rebuilt = False
        self.completed = 0
        self.last_error = ""
        self.missed = False
        self._maker, self._membership = maker, membership
        self._window, self._layout, self._track, self._events = window, layout, track, events
        self._order, self._lost, self._hooks = order, lost, hooks
        self._asks_graph = maker.settings.asks_graph
        self._unused = UnusedParameters(membership.rank, warns=maker.settings.warn_unused)
        self.watch = BackwardWatch(wrap(self), window.reached, hooks)
        self._run = _Run()
        self._change: _Change | None = None
        self._frozen: frozenset[int] = frozenset()
        self._begun = 0  # backwards, while any parameter was shared, as the ready lists were cleared last
        self._completed_before = 0  # as the backward opened that runs, or was the last
        usual = self._send_rest, self._receive
        self._stages: dict[State, tuple[Callable[[], None], ...]] = {  # of the end of a synchronised backward
            REDUCING: usual,
            RECORDING: (*usual, self._deliver_rest, self._rebuild),
            CHANGED: (self._learn_of_change, *usual, self._deliver_rest, self._rebuild),
        }
        self._in_use = in_use
        self._use(in_use)
        call_before_steps(self)

    # --- The buckets in use ---

    @property
    def buckets(self) -> list[GradBucket]:
        """The buckets in use, in communication order."""
        return self._in_use.buckets

    @property
    def in_use(self) -> BucketSet:
        """The buckets that this rank uses: those of the changed model, while a change is pending."""
        return self._in_use

    @property
    def agreed(self) -> BucketSet:
        """The buckets on which all ranks have agreed."""
        return self._in_use if self._change is None else self._change.outdated

    @property
    def change(self) -> str:
        """The change of this rank's model that not all ranks have heard of, in words; empty if there is none."""
        return "" if self._change is None else self._change.text

    def adopt(self, buckets: BucketSet, *, rebuilt: bool | None = None) -> None:
        """Use these buckets of the same parameters from now on.

        Args:
            buckets: what to use.
            rebuilt: whether they are planned for the observed ready order; None keeps the value.
        """
        before = self.rebuilt
        try:
            if rebuilt is not None:
                self.rebuilt = rebuilt
            self._use(buckets)
        except BaseException:
            self.rebuilt = before
            raise

    def follow(self, buckets: BucketSet, change: str, agree: Callable[[], None], decline: Decline) -> None:
        """Use the buckets of a changed model once all ranks have changed theirs.

        The next synchronised backward first sends the buckets in use, empty, since the peers may still use them.
        Their report tells which ranks have changed. If all have, the backward goes on as the first one of `buckets`.

        Args:
            buckets: the buckets of the changed model.
            change: what has changed, for errors.
            agree: called once all have changed. It calls `keep_change`, or raises on every rank if their changes
                differ.
            decline: called instead on a rank that cannot go on, so that the peers do not wait.
        """
        self._change = _Change(self.agreed, change, agree, decline)
        self._use(buckets)

    def keep_change(self) -> None:
        """Keep the changed model, since all ranks have agreed on it."""
        self._change, self.rebuilt = None, False

    def unfollow(self) -> None:
        """Return to the buckets before the change, since it was undone."""
        assert self._change is not None
        before, self._change = self._change.outdated, None
        self._use(before)

    def hooks(self) -> dict[int, ReadyHook]:
        """Return the hook of each parameter, by registration index, to be called when its gradient was accumulated.

        They refer weakly to the reducer, and so to the model: the garbage collector does not see torch's hooks.
        """
        hooks: dict[int, ReadyHook] = {}
        marks = self._in_use.marks
        for order, (bucket, ready) in enumerate(zip(self.buckets, self._in_use.ready, strict=True)):
            writers = bucket.parts.writers if self._is_packed_early(order) else None
            eager = bucket.parts.feed.hooks() if self._uses_ready_lists else {}
            noting = (lambda hook: hook) if writers is None else writers.noting
            usual = noting(self._usual_hook(order, ready) if self._uses_ready_lists else self._recording_hook())
            hooks |= dict.fromkeys(bucket.plan.params, usual)
            if not self._uses_ready_lists:
                continue
            for index, param in zip(bucket.plan.params, bucket.params, strict=True):
                pack = eager.get(index) if marks[index] == 1 else None  # else more may be added to the gradient
                if param is ready.sentinel or pack is not None:
                    hooks[index] = noting(self._hook(order, ready, pack, is_sentinel=param is ready.sentinel))
        return hooks

    def _recording_hook(self) -> ReadyHook:
        """Return the hook of every parameter until the buckets are rebuilt."""
        known = ref(self)

        def mark_recorded(param: Any) -> None:
            reducer = known()
            if reducer is not None:
                reducer._record(param)

        return mark_recorded

    def _usual_hook(self, order: int, ready: ReadyList) -> ReadyHook:
        """Return the hook of parameters that are neither packed early nor the sentinel."""
        append, entries, known = ready.entries.append, ready.entries, ref(self)
        if not self._asks_graph:
            return append

        def mark(param: Any) -> None:  # the bucket is sent at this place, whichever parameter came last before
            append(param)
            reducer = known()
            if len(entries) >= ready.due and reducer is not None:
                reducer._examine(order, param)

        return mark

    def _use(self, buckets: BucketSet) -> None:
        same = buckets.params is self._in_use.params
        buckets.report.follow(self._in_use.report)
        self._in_use = buckets
        self._freeze(self._frozen if same else frozenset())
        feeds = {order: b.parts.feed for order, b in enumerate(self.buckets)}
        taking = {order: feed for order, feed in feeds.items() if isinstance(feed, Accumulating)}
        self.accumulation = Accumulation(taking, self._window)
        self._hooks.install(self.hooks())

    def _is_packed_early(self, order: int) -> bool:
        """Whether this bucket may be packed while backward goes on, so that the streams of its gradients count."""
        sent_early = self._uses_ready_lists and order < len(self.buckets) - 1
        return sent_early or order in self.accumulation.feeds

    @property
    def _uses_ready_lists(self) -> bool:
        return self.rebuilt and self._change is None

    def _hook(self, order: int, ready: ReadyList, pack: Callable[[], None] | None, *, is_sentinel: bool) -> ReadyHook:
        """Return a hook in Python for one parameter, which packs its gradient, or is the sentinel, or both."""
        append, known = ready.entries.append, ref(self)
        alone = len(self.buckets) == 1  # the last bucket is sent when backward has ended

        def mark_sentinel(param: Any) -> None:
            append(param)
            reducer = known()
            if reducer is None:
                return
            if reducer.state is not REDUCING:
                reducer._examine(order, param)
            elif not alone and (len(param._post_accumulate_grad_hooks or ()) <= 1 or reducer._hooks.come_last(param)):
                reducer._send_next()

        if pack is None:
            return mark_sentinel
        note, pack_now = mark_sentinel if is_sentinel else self._usual_hook(order, ready), pack

        def mark_packed(param: Any) -> None:
            reducer = known()
            if reducer is not None and reducer.state is REDUCING and ready.sent < 0:
                pack_now()
            note(param)

        return mark_packed

    # --- Forwards and no_sync() ---

    @property
    def require_sync(self) -> bool:
        """Whether backwards of the next forwards are synchronised; no_sync() switches it off."""
        return self._window.require_sync

    @require_sync.setter
    def require_sync(self, value: bool) -> None:
        if value != self.require_sync and self.state is IDLE:
            self.refuse_unaveraged()
        self._window.require_sync = value

    def forget_forwards(self) -> None:
        """Let only later forwards, or the state of `no_sync()` at that time, decide about the next backward."""
        self._window.forget_requests()
        self._window.forget_forwards()

    def prepare_for_backward(self, tensors: Iterable[Any] = ()) -> None:
        """Make the next backward synchronise, also inside `no_sync()`; name and argument are torch's."""
        self._window.request(True, watched=False)

    def refuse_unaveraged(self) -> None:
        """Forget ready gradients of a backward that went through no output and reached no sentinel.

        It is called while no backward is open. If one runs all the same, they may be its own, and are kept.

        Raises:
            DPFuseError: these gradients were to be averaged.
        """
        in_use = self._in_use  # in line, since each forward comes here
        some = in_use.recorded or any(map(_entries_of, in_use.ready))
        if some and not backward_runs() and self._refuse(in_use.entries()):
            self._window.backward_ends()

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse, outside of a backward, a step on parameters whose ready gradients no backward took.

        Raises:
            DPFuseError: these gradients were to be averaged.
        """
        lost = self._lost
        if lost.begun is None:
            lost.begun = ref(optimizer)
        in_use = self._in_use
        if (in_use.recorded or any(map(_entries_of, in_use.ready))) and not backward_runs():
            wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
            self._refuse(param for param in in_use.entries() if id(leaf_of(param)) in wanted)

    def _refuse(self, found: Iterable[Tensor]) -> bool:
        """Forget these ready gradients, and return whether a backward that no wrapper knows of has made them ready.

        A part that another wrapper has, too, may have become ready in a backward of that one.

        Raises:
            DPFuseError: they were to be averaged.
        """
        found = list(found)
        theirs = shared if self._begun != backwards_begun() else ()
        names = self._in_use.names_of(param for param in found if id(leaf_of(param)) not in theirs)
        if names:
            self._in_use.clear()
        elif found:
            self._in_use.forget_ready({id(leaf_of(param)) for param in found})
        if not self._in_use.entries():
            self._begun = backwards_begun()
        if names and self.require_sync:
            raise DPFuseError(messages.unaveraged(self._membership.rank, list(dict.fromkeys(names))))
        return bool(names)

    def discard_accumulated(self) -> None:
        """Drop what the buckets have accumulated.

        Raises:
            DPFuseError: a backward is running.
        """
        if not self.accumulation.feeds:
            return
        if self.state not in RESTING:
            raise DPFuseError(
                f"discard_accumulated() was called while a backward is {self.state.name}, expected it between "
                "backwards. Call it once backward() has ended."
            )
        self.accumulation.begin_again()

    def failed_somewhere(self) -> bool:
        """Whether the backward that ended last failed on some rank; waits for the device."""
        return self._in_use.report.read(Outcome(), wait=True, gather=False).any_failed

    # --- A backward ---

    def _settle(self, *, announced: bool) -> None:
        """Complete what an earlier backward has left, of this model or of another one of the group.

        Raises:
            DPFuseError: this one is not `announced` and has added to gradients of the one before.
        """
        if self.state is IDLE:
            self._order.complete_failed()
            return
        if self.state is not ABANDONED:
            self.abandon()  # an exception struck between the end of the backward before and its close
        if self.state is ABANDONED:
            begun = self._run.next > 0 and not announced
            self.drain()
            if begun:
                self._run.outcome.note_end()
                self._move(WAS_OPEN)
                raise DPFuseError(messages.begun(self._membership.rank))

    def open(self, *, announced: bool) -> None:
        """Begin a backward, which an output of the wrapper has `announced`, or else a ready mark.

        If this raises, `abandon` is to be called.

        Raises:
            DPFuseError: as `_settle`; or a CUDA graph captures the first synchronised backward.
        """
        if self.state is not IDLE or self._order.turns.failed:
            self._settle(announced=announced)
        in_use = self._in_use
        self._completed_before, self.missed = self.completed, False
        sync = self._window.backward_begins(announced=announced)
        is_usual = self.rebuilt and self._change is None
        event = BEGINS if is_usual else BEGINS_FIRST if self._change is None else BEGINS_CHANGED
        self._move(event if sync else BEGINS_LOCAL)
        in_use.restore_memory()
        # What is ready already is of this backward, or of one before that nothing announced. All of it is averaged.
        # But a bucket must not be complete by entries of a backward before.
        if shared:
            if announced and self._begun != backwards_begun():
                in_use.forget_ready(shared)  # in backwards of other wrappers: what this one reaches comes again
            self._begun = count_backward()
        if announced and any(map(_entries_of, in_use.ready)):
            self.refuse_unaveraged()
            in_use.doubt_early()
        for begins in self._events.backward_begins:
            begins(sync=sync, announced=announced)
        params = in_use.params
        # A bucket is sent from the hook of one of these parameters.
        for param in params if self._asks_graph else map(_sentinel_of, in_use.ready[:-1]):
            if param is not None and len(param._post_accumulate_grad_hooks or ()) > 1:
                self._hooks.come_last(param)
        if self._frozen and any(params[index].requires_grad for index in self._frozen):
            thawed = frozenset(index for index in self._frozen if params[index].requires_grad)
            self._freeze(self._frozen - thawed)
            for tell in self._events.thawed:
                tell([params[index] for index in thawed])
        if not sync:
            if not self._window.is_open:  # ranks whose windows differ in length find the same in their last backward
                self._note_frozen(params)
            return
        if not is_usual and in_use.report.unreadable:
            raise DPFuseError(messages.captured_first(self._membership.rank))
        self._run.outcome.frozen = self._frozen
        if self._asks_graph or not is_usual or len(self._order.turns.models) > 1:
            self._look_at_graph(announced=announced)

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        """Finish the outermost backward: send what is left, wait, deliver.

        Args:
            reached_leaves: returns whether this backward accumulates gradients at all. It is called only if no
                parameter became ready: `torch.autograd.grad` is not reduced, but a backward that used no
                parameter takes part.

        Raises:
            DPFuseError: this rank or another one failed. No rank may use its gradients.
        """
        for ended in self._events.backward_ended:
            ended()
        if self.state is LOCAL:
            self._close_local()
            return
        run, stages, window, noted = self._run, self._stages[self.state], self._window, False
        while True:
            try:
                if not run.stage:
                    # Usually something in the last list is ready.
                    if not (run.next or self._in_use.ready[-1].entries or self._any_ready() or reached_leaves()):
                        self._move(ENDED)
                        self._tell_of_end(added=False)
                        return
                    if not window.of_outputs:
                        window.gradients_accumulated()
                while run.stage < len(stages):
                    stages[run.stage]()
                    run.stage += 1
                self._complete()
                return
            except BaseException as error:
                if self.state is not IDLE and not noted and self._goes_on_after(error):
                    noted = True  # the peers hear of it. The same stage comes again, and does not repeat what was done
                    continue
                self._give_up(error)
                raise

    def _goes_on_after(self, error: BaseException) -> bool:
        """Whether `close` can go on and report this error to the peers, which wait for this rank."""
        run = self._run
        if isinstance(error, DPFuseError) or not isinstance(error, Exception):
            return False
        if has_raised(error) or self._change is not None or run.outcome.torn:
            return False
        run.outcome.note(error)
        return True

    def _give_up(self, error: BaseException) -> None:
        self.last_error = f"{type(error)}: {error}"
        if self.state is not IDLE:  # else every rank raises it, or the backward has averaged
            self.abandon()

    def abandon(self, *, opened: bool = True) -> None:
        """Note that a backward died of an exception; no `close` follows.

        Args:
            opened: whether `open` had returned. If so, and no backward is open, it has averaged, or all ranks have
                heard of its error.
        """
        missed, self.missed = self.missed, False
        if self.state is not IDLE:
            event = DIED
        elif opened:
            self._died_at_its_end()
            return
        else:  # the window may have begun again since it was missed
            event = DIED_UNOPENED if missed or self._window.is_to_synchronise else DIED_UNNOTED
        self._completed_before = self.completed  # it has averaged nothing
        if self._move(event) is DROP:
            self.accumulation.die()  # last, since a filter may turn its warning into an error
        elif not self._order.is_shared:
            self._order.fail_alone()

    def raised(self, error: BaseException, *, opened: bool, reached: Reached) -> None:
        """Note what has ended a backward: if memory has run out, the peers raise an error of that class, too.

        One that died above the outputs, in the loss, has told nothing. If it was to synchronise, the peers wait for it.
        Where it was to reach several models, it is unknown in which order they wait.
        """
        for failed in self._events.backward_failed:
            failed()
        window, order = self._window, self._order
        if self.state is IDLE:
            if opened:
                self._died_at_its_end()
                return
            if not window.is_to_synchronise:
                if window.owes_local_backward and reached(self.agreed.params, alone=False):
                    window.forget_forwards()
                    self.abandon(opened=False)
                return
            self.missed = reached(self.agreed.params, alone=True)
        if self.missed or self.state is not IDLE:
            self._run.outcome.out_of_memory = isinstance(error, OutOfMemoryError)
            if self.missed or (order.is_shared and reached(self.agreed.params, alone=True)):
                order.fail_alone()

    def _died_at_its_end(self) -> None:
        """Note that the backward that was opened last has raised: if it has averaged, its mean is not used."""
        if self.completed > self._completed_before:
            self._lost.note(self.completed)
        elif self._window.is_open:  # it was local, and is counted already
            self.accumulation.die()

    def drain(self) -> None:
        """Complete the collectives of an abandoned backward, whose peers may wait in them.

        The program of this rank has seen its exception, and sees no other one if the peers raise an error for the same
        backward. If they have completed it, all ranks raise one in the next averaged backward.
        """
        run = self._run
        self._membership.check()
        self._in_use.report.hand_over()  # if an exception came before that, the next pack would write over it
        completed = run.delivered or self._complete_empty(self.agreed)
        self.accumulation.forget()  # also of a changed model, whose buckets were not sent
        self._forget_packed()
        if completed and not self._uses_ready_lists:  # the peers are already in the vote on a change, or on the buckets
            decline = self._decline if self._change is None else self._change.decline
            completed = not decline(out_of_memory=run.outcome.out_of_memory)
        if run.reading is not None:
            self._forget_told(run.reading)
        self._move(COMPLETED)
        self._order.settled()
        if completed:
            self.completed += 1
            self._lost.note(self.completed)
        for failed in self._events.backward_failed:
            failed()
        log.info(messages.drained(self._membership.rank, completed=completed), extra={"rank": self._membership.rank})

    def _forget_packed(self) -> None:
        for buckets in dict.fromkeys([self._in_use, self.agreed]):
            for bucket in buckets.buckets:
                bucket.forget_packed()

    def _complete_empty(self, sent: BucketSet) -> bool:
        """Send what is left of these buckets, empty; return whether the peers go on with their means.

        On a GPU they may hear of a failure one backward later. Then this rank reads the report with them.
        """
        run, report, last, now = self._run, sent.report, sent.buckets[-1], self._all_read_now
        told = not (last.busy or run.next == len(sent.buckets)) or not run.outcome.well
        run.outcome.note_end()
        run.outcome.changed = self._change is not None
        self._send_empty(sent.buckets)
        for bucket in sent.buckets:
            if bucket.busy:  # not delivered before something went wrong
                bucket.discard()
        if run.reading is None:
            run.reading = self._read(report, wait=now or run.outcome.changed, gather=now)
            if not now:
                report.hand_over()
        if run.outcome.changed:
            return not (run.reading.any_unchanged or run.reading.any_failed)
        return run.reading.all_well and (now or not told)

    def _forget_told(self, reading: Reading) -> None:
        """Forget the means that this rank has lost, if every rank hears of them: of several things, one is said."""
        told = reading.differing[:1] == (LOST,) and not (reading.any_failed or reading.any_changed)
        if told or (LOST not in reading.differing and not self._all_read_now):
            self._lost.forget()

    def shadow_backward(self) -> None:
        """Take part in a synchronised backward of other ranks without gradients of this rank.

        Raises:
            DPFuseError: that backward failed on some rank.
        """
        window = self._window
        window.without_inputs = True
        try:
            with self._unused.expected():
                window.request(True)
                try:
                    self.open(announced=True)
                except BaseException:
                    self.abandon(opened=False)
                    raise
                self.close(lambda: True)
        finally:
            window.without_inputs = False

    # --- While it runs ---

    def _record(self, param: Any) -> None:
        """Record a ready mark."""
        if TRANSITIONS[self.state, READY][0] is OPEN:
            if self._is_anothers([*self._in_use.entries(), param]):
                return
            self._open_unannounced()
        self._in_use.recorded.append(param)
        if self.state is LOCAL and self.accumulation.feeds:
            order = self._in_use.order_of(param)
            self._in_use.ready[order].entries.append(param)
            if self.accumulation.takes_parts:  # how often a gradient becomes ready is not known yet
                self._examine(order, param)

    def _examine(self, order: int, param: Any) -> None:
        """Do what the table says: `param` of bucket `order` became ready. A hook of the program may still follow."""
        action, _ = TRANSITIONS[self.state, READY]
        if action is SEND:
            if len(param._post_accumulate_grad_hooks or ()) <= 1 or self._hooks.come_last(param):
                self._send_next()
        elif action is ACCUMULATE:
            if self._in_use.ready[order].is_complete:
                self.accumulation.ready(order)
        elif action is OPEN and self._is_anothers(self._in_use.entries()):
            self._in_use.forget_ready(shared)
        elif action is OPEN:
            self._open_unannounced()  # what is complete by this one is sent later: hooks may still follow

    def _is_anothers(self, entries: Sequence[Tensor]) -> bool:
        """Whether a backward of another wrapper averages all that became ready, of a part that both have."""
        return bool(shared) and len(averaged_elsewhere(entries)) == len(entries)

    def _open_unannounced(self) -> None:
        """Open a backward that no output of the wrapper has announced so far, unless one still may."""
        if self.state is IDLE and self._window.may_be_announced(nested=backward_is_nested()):
            self.watch.begin_at_end()
        else:
            self.watch.begin()

    def _look_at_graph(self, *, announced: bool) -> None:
        """Note what the graph of a backward tells, at its beginning."""
        run = self._run
        if self._order.is_shared:
            self._order.open(self._send_due)
            run.backward = running_backward()
        # One that no output has announced may be inside another one, whose graph reaches more.
        run.asks_graph = announced and not self._in_use.hidden
        if not announced:
            return
        if self.state is not REDUCING:
            run.unreached = unreached(self._in_use.params)
        elif self._asks_graph:
            self._leave_out()

    def _leave_out(self) -> None:
        """Wait in this backward only for the parameters that its graph reaches, so that buckets are not held up.

        A bucket is then sent where it is sent on a rank that uses other parameters of it: before other collectives of
        the same backward, or after them.
        """
        run, ready = self._run, self._in_use.ready
        if not run.asks_graph:
            return
        run.asks_graph = False  # once
        found = unreached(self._in_use.params)
        if not found:
            return
        self._note_frozen(found)
        ids = frozenset(map(id, found))
        for one in ready:
            one.leave_out(ids)
        if not ready[0].is_reached:  # the first gradient that is ready sends the bucket
            for one in ready:
                one.due = 0

    def _send_due(self, ended: bool) -> None:
        """Send buckets for which this backward has no more gradients, since another model of the group sends now."""
        run, in_use = self._run, self._in_use
        if self.state is not REDUCING or run.next >= len(in_use.buckets) - 1 or run.backward != running_backward():
            return
        if ended:
            self._send_next(rest=True, complete=self._note_stragglers())
            return
        self._leave_out()
        if any(map(_entries_of, in_use.ready)) or not any(one.is_reached for one in in_use.ready):
            self._send_next()

    def _send_next(self, *, rest: bool = False, complete: bool = False, last: bool = False) -> None:
        """Send the buckets that are complete, or all the `rest`, because backward has ended.

        Args:
            rest: whether backward has ended.
            complete: whether all of them are known to be complete.
            last: whether the last bucket is sent, too.
        """
        # In plan order, not in the order of completion: collectives must match on all ranks. The last bucket is sent
        # when backward has ended, because its report says whether all went well. Its gradients arrive last anyway.
        run, in_use = self._run, self._in_use
        order, track = self._order, self._track
        end = len(in_use.buckets) if last else len(in_use.buckets) - 1
        try:
            while run.next < end:
                ready, bucket = in_use.ready[run.next], in_use.buckets[run.next]
                all_there = complete or ready.is_complete
                if not (all_there or rest):
                    return
                track.board.place = track.wrapper, BACKWARD, self.completed, run.next
                if order.turns.turn != order.key:
                    order.take_turn(run.next)
                if bucket.state is FREE:
                    bucket.send(run.outcome, complete=all_there and not ready.leaves_out)
                ready.sent = len(ready.entries)
                run.next += 1
        except Exception as error:
            if last or run.outcome.torn:
                raise
            run.outcome.note(error)  # the rest is sent when backward has ended

    leave_untraced(_send_next, calls=True, reason="dpfuse sends gradients here")

    def _send_empty(self, buckets: Sequence[GradBucket]) -> None:
        for order in range(self._run.next, len(buckets)):
            if not buckets[order].busy:
                self._order.take_turn(order, among_others=False)
                buckets[order].send_empty(self._run.outcome)
            self._run.next = order + 1

    def _note_stragglers(self) -> bool:
        """Backward has ended: find late and frozen parameters, and a bucket that holds others up.

        Returns:
            Whether all buckets that were not sent are complete.
        """
        run, in_use, ready = self._run, self._in_use, self._in_use.ready
        for one, bucket in zip(ready[: run.next], in_use.buckets, strict=False):
            if len(one.entries) > one.sent:
                run.outcome.note_late(map(in_use.index_of, one.late()))
            elif one.leaves_out:  # a program may have written gradients itself
                params = in_use.params
                run.outcome.note_late(index for index in bucket.missing if params[index].grad is not None)
        if any(map(_leaves_out_of, ready)):
            in_use.hidden |= any(one.unexpected() for one in ready)
        if self.state is REDUCING:
            incomplete = [one for one in ready[run.next :] if one.leaves_out or not one.is_complete]
            if not incomplete:
                return True
            missing = [param for one in incomplete for param in one.missing()]
        else:
            seen = set(map(id, in_use.recorded))
            missing = [param for param in in_use.params if id(param) not in seen]
        self._note_frozen(missing)
        if self.state is REDUCING and run.next < len(ready) - 1 and in_use.waiting_for(run.next):
            blocking = ready[run.next]
            blocking.held_up += 1
            self._warn(self._unused.held_up(blocking.held_up, in_use.names_of(blocking.missing())))
        return False

    def _note_frozen(self, missing: Iterable[Tensor]) -> None:
        """Note which of the parameters that this backward does not reach are frozen."""
        outcome = self._run.outcome
        frozen = {self._in_use.index_of(param) for param in missing if not param.requires_grad}
        if not frozen <= self._frozen:
            if self._window.is_open:
                outcome.just_frozen |= frozen - self._frozen
            self._freeze(self._frozen | frozen)
            outcome.frozen = self._frozen

    def _freeze(self, frozen: frozenset[int]) -> None:
        self._frozen = frozen
        self._in_use.wait_for_all_but(frozen)

    # --- Its end ---

    def _close_local(self) -> None:
        try:
            if self._in_use.recorded:
                orders = list(range(len(self.buckets)))
            else:
                orders = [order for order, ready in enumerate(self._in_use.ready) if ready.entries]
            if orders:
                self.accumulation.finish(orders)
        finally:
            self._move(ENDED)
        self._tell_of_end(added=bool(orders))

    def _tell_of_end(self, *, added: bool) -> None:
        for ended in self._events.local_backward_ended:
            ended(added=added)

    def _learn_of_change(self) -> None:
        """Learn which ranks have changed, and go on with the new buckets if all have changed in the same way."""
        change, run = self._change, self._run
        if change is None:
            return  # an exception has struck since
        self._let_others_send()
        buckets = change.outdated.buckets
        run.outcome.changed = True
        run.outcome.frozen = frozenset()
        self._send_empty(buckets)
        for bucket in buckets:
            bucket.wait()
        error = next((bucket.error for bucket in buckets if bucket.error is not None), None)
        for bucket in buckets:
            bucket.discard()
        reading = self._read(change.outdated.report, wait=True, gather=self._all_read_now)
        try:
            if reading.any_unchanged or reading.any_failed:
                text = self._explain(reading, error)
                raise error_of(text, out_of_memory=reading.out_of_memory) from error
            change.agree()
        except BaseException:
            self.accumulation.forget()
            self._move(REFUSED)
            raise
        run.next = 0
        run.outcome.changed, run.outcome.frozen = False, self._frozen

    def _let_others_send(self) -> None:
        """Send all buckets but the last ones, also those of other models, as on ranks that miss no gradient."""
        if self._order.another_is_open:
            self._send_due(ended=True)
            self._order.let_others_send(ended=True)

    def _send_rest(self) -> None:
        """Send what is left; the report goes with the last bucket."""
        run = self._run
        if self._order.turns.opened:
            self._let_others_send()
        complete = True
        for order, ready in enumerate(self._in_use.ready):
            is_usual = len(ready.entries) == ready.sent if order < run.next else ready.is_complete
            if ready.leaves_out or not is_usual:
                complete = self._note_stragglers()
                break
        self._send_next(rest=True, complete=complete, last=True)

    def _receive(self) -> None:
        """Wait for all buckets, deliver those that do not depend on the report, and read the report."""
        if self._run.reading is not None:
            return  # an exception has struck since
        report, outcome, track = self._in_use.report, self._run.outcome, self._track
        buckets = self._in_use.buckets
        last = len(buckets) - 1
        # NCCL runs the buckets on one stream, so the wait for the last one is a wait for all before it.
        rides = outcome.well and buckets[last].carries and not profiler_runs()
        for order, bucket in enumerate(buckets):
            if rides and bucket.rides and order < last and bucket.state is FLIGHT:
                continue
            if len(buckets) > 1:  # with one bucket, the track has not changed since it was sent
                track.board.place = track.wrapper, BACKWARD, self.completed, order
            if bucket.state is FLIGHT:
                bucket.wait()
            if bucket.error is not None:  # a communication hook may fail that late
                outcome.note(bucket.error)
            # Whether another rank has a missing gradient is known once the last bucket has landed.
            if outcome.well and not bucket.missing and bucket.state is LANDED:
                bucket.deliver()
        if rides:
            for bucket in buckets:
                if bucket.rides and bucket.state is FLIGHT:
                    bucket.arrive()
        if outcome.missing and report.unreadable:
            names = [self._in_use.names[index] for index in sorted(outcome.missing)]
            outcome.error, outcome.well = DPFuseError(messages.unread(names)), False  # other errors come of it
        # After the first backward the ranks agree on the buckets, and a rank that has failed would not take part.
        all_read = self._order.hears_at_once or not self.rebuilt
        wait = all_read or not outcome.well or bool(outcome.missing)
        reading = report.read(outcome, wait=wait, gather=all_read or report.is_on_cpu)
        if report.asked or any(map(_is_due, self._layout.answered)):
            self._answer(report)
        self._run.reading = reading

    def _read(self, report: Report, *, wait: bool, gather: bool) -> Reading:
        """Read the report of a backward that failed or is the last of its buckets, and do what a rank has asked for."""
        reading = report.read(self._run.outcome, wait=wait, gather=gather)
        self._answer(report)
        return reading

    def _answer(self, report: Report) -> None:
        """Do what a rank has asked all ranks for, failed or not."""
        for question in self._layout.answered:
            if question in report.asked or (question.due and not report.unreadable):
                question.due = False
                try:
                    self._membership.answer(question)
                except BaseException:
                    self._run.outcome.torn = True  # it is unknown which exchange the peers are in
                    raise

    def _fail(self, reading: Reading) -> None:
        """Raise the error that every rank raises."""
        cause = self._run.outcome.error
        try:
            text = self._explain(reading, cause)
            for bucket in self.buckets:
                if bucket.state is LANDED:
                    bucket.discard()
        finally:
            self._move(REFUSED)
        self._forget_told(reading)
        raise error_of(text, out_of_memory=reading.out_of_memory) from cause

    def _deliver_rest(self) -> None:
        """Deliver what has waited for the report, if all is well on every rank. Else raise on all of them.

        Where gradients are missing, the report tells which parameters some rank has used.
        """
        run, report = self._run, self._in_use.report
        assert run.reading is not None
        if run.outcome.error is not None:
            self._forget_packed()
        if not run.reading.all_well:
            self._fail(run.reading)
        if run.delivered:
            return
        missing = run.outcome.missing
        if missing or run.outcome.error is not None:  # else every bucket was delivered when it had landed
            untouched = self._unused.untouched(missing, report)
            for bucket in self._in_use.buckets:
                if bucket.state is LANDED:
                    bucket.deliver(untouched)
            unused = [index for index in missing if index not in run.outcome.frozen]
            self._warn(self._unused.warning(unused, len(untouched.intersection(unused)), self._in_use.names))
        if not (report.is_on_cpu or report.was_read):
            self._maker.spoil(self._in_use)
        run.delivered = True

    def _rebuild(self) -> None:
        """Agree with the other ranks on buckets for the ready order of the first synchronised backward."""
        if self.rebuilt:
            return  # an exception has struck since
        counts = self._in_use.recorded_marks()
        marks = [counts.get(index, 0) for index in range(len(self._in_use.params))]
        recorded = set(map(id, self._in_use.recorded))
        hidden = any(id(param) in recorded for param in self._run.unreached)
        error = self._maker.agree(self._in_use, list(counts), marks, hidden=hidden)
        if error is not None:
            self._move(REFUSED)
            raise error
        self._adopt_agreed()

    def _adopt_agreed(self) -> None:
        """Use the buckets on which all ranks have agreed."""
        agreed, rank = self._maker.agreed, self._membership.rank
        assert agreed is not None
        text = "rank %d: %d buckets after the first synchronised backward, %d before it"
        rebuild_log.info(text, rank, len(agreed.buckets), len(self.buckets), extra={"rank": rank})
        self.adopt(agreed, rebuilt=True)
        self._maker.agreed = None

    def _decline(self, *, out_of_memory: bool) -> bool:
        """Take part in the vote on the buckets on a rank that cannot go on; return whether all ranks raise an error."""
        if self._maker.agreed is not None:  # the vote has ended, and all ranks use these
            self._adopt_agreed()
            return False
        self._maker.decline(len(self._in_use.params), out_of_memory=out_of_memory)
        return True

    def _complete(self) -> None:
        """End the backward, and warn. All is delivered then, and the peers wait for nothing."""
        run, report = self._run, self._in_use.report
        if run.reading is not ALL_WELL or run.outcome.missing or not (run.outcome.well and report.is_on_cpu):
            self._deliver_rest()
        run.delivered = True
        for order, ready in enumerate(self._in_use.ready):
            if ready.uncertain:
                self._in_use.learn_early(ready)
            if ready.entries and ready.entries[-1] is not ready.sentinel and ready.choose_sentinel():
                self._install_hooks_of(order)
        texts = run.warnings
        if self._lost.steps and not (self._window.excused or self._window.without_inputs):
            self._lost.forget()  # all ranks have lost as many, or hear of it in the next backward
        self._move(AVERAGED)
        for delivered in self._events.delivered:
            delivered()
        for text in texts:
            warn_at_user(text)

    def _install_hooks_of(self, order: int) -> None:
        inside = self.buckets[order].plan.params
        self._hooks.install({index: hook for index, hook in self.hooks().items() if index in inside})

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self._run.warnings += (text,)  # for when all is delivered

    @property
    def _all_read_now(self) -> bool:
        """Whether every rank reads the report at the end of this backward, as on CPUs and in strict mode."""
        on_cpu = self._in_use.report.is_on_cpu
        return on_cpu or self._order.hears_at_once or (not self.rebuilt and self._change is None)

    def _explain(self, reading: Reading, error: Exception | None) -> str:
        membership, outcome = self._membership, self._run.outcome
        if reading.any_failed:
            late = [self._in_use.names[index] for index in sorted(set(outcome.late))]
            failed = messages.failed(
                membership.rank,
                membership.size,
                reading.failed(),
                not outcome.well,
                error,
                late,
                out_of_memory=reading.out_of_memory,
            )
            return failed if self._all_read_now else f"{failed} {messages.HEARD_LATE}"
        if reading.any_changed:
            change = self.change
            return messages.changed(membership.rank, membership.size, reading.changed(), outcome.changed, change)
        return messages.differing(membership.rank, self._layout.fields, reading)

    def _any_ready(self) -> bool:
        return bool(self._in_use.recorded) or any(map(_entries_of, self._in_use.ready))

    def _move(self, event: Event) -> Action:
        """Do what the table says, and return it; nothing else assigns the state."""
        action, after = TRANSITIONS[self.state, event]
        track, run, completed = self._track, self._run, self.completed
        if action is ENTER:
            track.board.place = track.wrapper, BACKWARD, completed, -1
            self.state = after
            return action
        if action is FORGET or action is COUNT:
            self._window.begin()
            run, completed = _Run(), completed + (action is COUNT)
        track.board.place = track.wrapper, BETWEEN, completed, -1
        if self._order.turns.opened or self._order.turns.first:
            self._order.close()
        self._in_use.recorded.clear()  # as `BucketSet.clear`, in line since each backward comes here
        for ready in self._in_use.ready:
            ready.clear()
        self.state, self._run, self.completed = after, run, completed  # last, after what an exception may strike
        return action
