"""Wires the engine for the parameters of one model, and again when their buckets change. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.comm import votes
from dpfuse.comm.failed import mark
from dpfuse.comm.memory_errors import error_of
from dpfuse.comm.waiting import Track, board_of, leave
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.autograd import BackwardWatch
from dpfuse.engine.averaging import averaging_for
from dpfuse.engine.backward import IDLE, State
from dpfuse.engine.bucket import GradBucket, Surroundings
from dpfuse.engine.bucket_set import BucketSet
from dpfuse.engine.events import Events, Watcher, overridden
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.feature import Feature
from dpfuse.engine.host_memory import keep_freed_memory
from dpfuse.engine.listening import Listening, ReadyRecorder, Wrap
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.lost_steps import LostSteps
from dpfuse.engine.plan import BucketPlan, rebuild_plan
from dpfuse.engine.reducer import Decline, Reducer, Wiring
from dpfuse.engine.report import Guard, Report
from dpfuse.engine.report_layout import Field, Question, ReportLayout
from dpfuse.engine.send_order import SendOrder
from dpfuse.engine.settings import SyncSettings
from dpfuse.engine.spoiler import spoiler_of
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError

__all__ = ["GradSync"]

BUCKETS = "the buckets after the first synchronised backward"

log = logging.getLogger("dpfuse.rebuild")

_gave_views = attrgetter("gave_views")


class GradSync:
    """Averages the gradients of some parameters in every backward that is to synchronise.

    Args:
        plan: of the buckets.
        params: the planned parameters, by registration index.
        group: the ranks.
        settings: how gradients are averaged.
        window: counts forwards and backwards, which ranks must have in common.
        watchers: hear a training, in this order; features among them do something besides averaging.
        later: features that may be added later, on one rank before another: they join now.
        wrap: puts a listener of the face in front of the reducer.

    Attributes:
        layout: of the report.
        events: what is told of forwards, backwards and steps.
        source: the rank whose ready order all ranks take.
        listening: tells the reducer of backwards.
        lost: knows which means this rank has not used.
        order: the turns of this model among those of its group.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[Tensor],
        group: dist.ProcessGroup,
        settings: SyncSettings,
        *,
        window: Window,
        watchers: Sequence[Watcher] = (),
        later: Sequence[Feature] = (),
        wrap: Wrap = lambda reducer: reducer,
    ) -> None:
        self.source = 0
        self.track = Track(board_of(group), settings.number, settings.stall_timeout)
        watch = BackwardWatch(window.reached)
        self.events = Events(watchers)
        self.listening = Listening(watch, self.events, alone=settings.alone, wrap=wrap)
        self._rank_count = group.size()
        self._agreed: BucketSet | None = None  # that all ranks have agreed on, until it is in use
        self._left: BaseException | None = None  # why this rank has left the group
        self.order = order = SendOrder(group, settings.number, hears_at_once=settings.strict)
        self.layout = layout = ReportLayout()
        self.lost = LostSteps(self._concerns)
        layout.compare(_wrapper_field(settings.number), self.lost.field())
        self._group, self._window = group, window
        features = [watcher for watcher in watchers if isinstance(watcher, Feature)]
        for feature in (*later, *features):
            feature.join(self)
        layout.compare(*window.fields(), order.field())
        self._assembly = Assembly(
            group,
            Surroundings(board_of(group), self.events, self.leave),
            settings,
            features=features,
            make_report=lambda count, dtype, device: Report(group, count, layout, window, dtype, device),
        )
        params = list(params)
        self._spoiler = spoiler_of(params, group.size())
        self.listening.hooks.put_on(params)
        watch, install = self.listening.watch, self.listening.hooks.install
        wiring = Wiring(
            window=window,
            layout=layout,
            track=self.track,
            events=self.events,
            warn_unused=settings.warn_unused,
            asks_graph=settings.asks_graph,
            order=order,
            rank=group.rank(),
            size=group.size(),
            open_backward=watch.begin,
            open_at_end=watch.begin_at_end,
            rebuild=self._rebuild,
            decline=self._decline,
            check_group=self._check_group,
            install=install,
            come_last=self.listening.hooks.come_last,
            spoil=self._spoil,
            answer=self._answer,
            lost=self.lost,
        )
        if params and params[0].is_cpu:
            keep_freed_memory()
        self.reducer = Reducer(self.bucket_set(plan, params), wiring)
        self.listening.tell(self.reducer)
        self.events.hear_steps()  # only now: what failed to be made must not be called

    @property
    def plan(self) -> BucketPlan:
        """The plan of the buckets on which all ranks have agreed."""
        return self.reducer.agreed.plan

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self._group

    @property
    def hook(self) -> CommHook | None:
        """The communication hook that reduces the gradients, if a user has registered one."""
        return self._assembly.hook

    @property
    def params(self) -> Sequence[Any]:
        """The parameters whose gradients are averaged, in the order of registration."""
        return self.reducer.agreed.params

    @property
    def buckets(self) -> Sequence[GradBucket]:
        """The buckets in use, in communication order."""
        return self.reducer.buckets

    @property
    def state(self) -> State:
        """That of the backward that is open, if any."""
        return self.reducer.state

    @property
    def completed(self) -> int:
        """The number of synchronised backwards."""
        return self.reducer.completed

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph has captured the last synchronised backward."""
        return self.reducer.in_use.report.captured

    @property
    def without_inputs(self) -> bool:
        """Whether this rank only takes part in a backward of other ranks."""
        return self._window.without_inputs

    def record(self, recorder: ReadyRecorder | None) -> None:
        """Let `recorder` watch, and note when gradients are ready; None ends the recording."""
        if recorder is not None:
            recorder.join(self)
        self.listening.record(recorder)
        self.listening.hooks.install(self.reducer.hooks())

    def add_feature(self, feature: Feature, *, joined: bool = False) -> None:
        """Ask `feature` before all others from the next backward on; the buckets are made again.

        Args:
            feature: to be asked. All ranks add it before the same backward, unless it is one of `later`.
            joined: whether it is one of those.

        Raises:
            DPFuseError: a backward is running.
        """
        self._check_idle("a feature was added")
        self._assembly.features.insert(0, feature)
        if not joined:
            feature.join(self)
        self.events.add(feature, first=True)
        self.remake()

    def hear_at_once(self) -> None:
        """Let backwards of all models that the group has now wait for their reports from now on, on a GPU too.

        To be called on all ranks, where a collective may follow a backward before the next one: a rank that has not
        heard of a failure would call it while the rank that failed goes on to the next backward. Models that are
        wrapped later are meant once it is called again.
        """
        self.order.hear_at_once()

    def average_over(self, rank_count: int) -> None:
        """Divide the sums of the next backwards by this number; a communication hook uses a number of its own."""
        self._rank_count = rank_count
        settings = self._assembly.settings
        for bucket in self.reducer.buckets:
            bucket.average_by(averaging_for(bucket.plan.dtype, rank_count, settings.scale, settings.wire.dtype))

    def shadow_backward(self) -> None:
        """Take part in a backward of other ranks, as `Reducer.shadow_backward` does."""
        self.reducer.shadow_backward()

    @property
    def plans_again(self) -> bool:
        """Whether the order of the first backward decides on the buckets, unless they were given."""
        return not (self._assembly.settings.keeps_order or any(one.keeps_buckets for one in self._assembly.features))

    def use_plan(self, plan: BucketPlan) -> None:
        """Use these buckets of the same parameters from the next backward on; to be called on every rank.

        Raises:
            DPFuseError: a rank has no memory for them; raised on every rank, and nothing has changed.
        """
        assert self.reducer.state is IDLE
        assert not self.reducer.change
        assert plan.specs == self.plan.specs
        self.reducer.accumulation.release()
        self.reducer.adopt(votes.agree_on_success(lambda: self._remade(plan), self.group, "a plan"))

    def set_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the gradients from the next synchronised backward on."""
        self._assembly = replace(self._assembly, hook=hook)
        self.remake()

    def follow(self, buckets: BucketSet, text: str, agree: Callable[[], None], decline: Decline) -> None:
        """Use the changed model of this rank; arguments as for `Reducer.follow`."""
        self.listening.hooks.put_on(buckets.params)
        self.reducer.follow(buckets, text, agree, decline)

    def unfollow(self) -> None:
        """Return to the model before the change, since it was undone."""
        self.listening.hooks.put_on(self.params)
        self.reducer.unfollow()
        self.remake()  # a feature may have been added meanwhile

    def keep_change(self) -> None:
        """Keep the changed model, on which all ranks have agreed."""
        self.reducer.keep_change()
        self._agreed = None
        self._spoiler = spoiler_of(self.params, self.group.size())

    def bucket_set(self, plan: BucketPlan, params: Sequence[Tensor]) -> BucketSet:
        """Make the buckets of a model, which share no memory with those in use."""
        return BucketSet(plan, params, self._assembly.make(plan, params, rank_count=self._rank_count))

    def remove_hooks(self) -> None:
        """Remove all hooks, and put what the buckets have accumulated back into `.grad`."""
        self.listening.hooks.remove()
        self.listening.watch.forget_leaves()
        self.reducer.accumulation.release()

    def _remade(self, plan: BucketPlan, marks: Sequence[int] = ()) -> BucketSet:
        """Make the buckets of `plan` for the parameters in use; equal ones keep their communication buffers."""
        before = self.reducer.in_use
        made = self._assembly.make(plan, before.params, before=before.buckets, rank_count=self._rank_count)
        return before.remade(made, plan, marks)

    def remake(self) -> None:
        """Make the buckets again, since a feature was added or has something else beside them; between backwards."""
        self.reducer.accumulation.release()
        self.reducer.adopt(self._remade(self.reducer.in_use.plan))

    def _rebuild(self, order: list[int], marks: list[int], hidden: bool) -> BaseException | None:
        # Backward has ended and everything is delivered, so no bucket is in flight or holds accumulated gradients.
        # Gradients that are views keep the old buffers alive.
        group = self.group  # nothing may fail between the beginning of the vote and its first collective
        if self._agreed is None:
            one_machine = (board := board_of(group)) is not None and board.one_machine
            tensors = votes.order_tensors(order, [*marks, hidden, not one_machine], group)
            told: list[BaseException] = []
            try:
                self._agreed = self._agree_on_buckets(*tensors, group, told)
            except DPFuseError as error:
                return error
            except BaseException as error:
                if error in told:  # an interrupt
                    return error
                self.leave(error)  # it is unknown in which vote the peers are
                raise
        self._adopt_agreed()
        return None

    def _adopt_agreed(self) -> None:
        assert self._agreed is not None
        text, rank = "rank %d: %d buckets after the first synchronised backward, %d before it", self.group.rank()
        log.info(text, rank, len(self._agreed.buckets), len(self.reducer.buckets), extra={"rank": rank})
        self.reducer.adopt(self._agreed, rebuilt=True)
        self._agreed = None

    def _agree_on_buckets(
        self, order: Tensor, marks: Tensor, group: dist.ProcessGroup, told: list[BaseException]
    ) -> BucketSet:
        """Return the buckets for the agreed ready order, with the agreed marks.

        What keeps this rank from making them is put into `told`, for then the other ranks hear of it.
        """

        def build() -> BucketSet:
            *counts, hidden, several_machines = marks.tolist()  # the largest of all ranks
            self.reducer.in_use.hidden = bool(hidden)
            if any(feature.keeps_buckets for feature in self._assembly.features):
                return self.reducer.in_use.remade(self.reducer.buckets, marks=counts)
            keeps = self.plan.tuned or not self.plans_again
            one_machine = not several_machines
            plan = self.plan if keeps else rebuild_plan(self.plan, votes.order_in(order), one_machine=one_machine)
            return self._remade(plan, counts)

        def build_or_note() -> BucketSet:
            try:
                return build()
            except BaseException as error:
                told.append(error)
                raise

        votes.agree_on_order(order, marks, group, self.source)
        return votes.agree_on_success(build_or_note, group, BUCKETS)

    def _decline(self, *, out_of_memory: bool) -> bool:
        if self._agreed is not None:  # the vote has ended, and all ranks use these
            self._adopt_agreed()
            return False
        nothing = votes.order_tensors([], [0] * (len(self.params) + 2), self.group)
        votes.agree_on_order(*nothing, self.group, self.source)
        text = "its backward was interrupted after the gradients were averaged"
        votes.report_failure(error_of(text, out_of_memory=out_of_memory), self.group, BUCKETS)
        return True

    def leave(self, error: BaseException) -> None:
        """Take part in no further collective of the group, since it is unknown in which one the peers are."""
        self._left = error
        mark(error)  # nothing is tried again after it
        leave(board_of(self.group), error)

    def _answer(self, question: Question) -> None:
        """Do what was asked for on every rank, and leave the group if that raises."""
        try:
            question.answer()
        except BaseException as error:
            self.leave(error)
            raise

    def _check_group(self) -> None:
        if self._left is not None:
            raise DPFuseError(
                f"rank {self.group.rank()}: a collective of this process group has failed in an earlier backward "
                f"({type(self._left).__name__}: {self._left}), so that the collectives of the ranks no longer fit "
                "together; expected a new group. Restart the job, or make another group and wrap the module again."
            )

    def _spoil(self, report: Report) -> None:
        """Let the device act on the report. On CUDA the host reads it one backward later."""
        buckets, features = self.reducer.buckets, self._assembly.features
        guard: Guard | None = self._spoiler
        if self._spoiler is None or any(feature.divides for feature in features):
            guard = None  # a feature that divides the gradients has them
        elif all(map(_gave_views, buckets)):
            guard = partial(self._spoiler.fill_buffers, [b.parts.buffer for b in buckets if b.params])
        report.hand_over(guard)
        if self._spoiler is not None:
            for spoil in overridden(Feature, "spoil", *features):
                spoil(report.wrong, [bucket.parts.delivery for bucket in buckets])

    def _concerns(self, optimizer: Optimizer) -> bool:
        ours = set(map(id, map(leaf_of, self.params)))
        return any(id(leaf_of(param)) in ours for group in optimizer.param_groups for param in group["params"])

    def _check_idle(self, what: str) -> None:
        if self.reducer.state is not IDLE:
            raise DPFuseError(
                f"rank {self.group.rank()}: {what} while a backward is {self.reducer.state.name}, expected it between "
                "backwards."
            )


def _wrapper_field(number: int) -> Field:
    return Field(
        "wrapper",
        number.__int__,  # a constant: no call of Python in each backward
        lambda other: f"averages the gradients of the wrapped model number {other + 1} of its group",
        "Run the backwards of several wrapped models in the same order everywhere.",
    )
