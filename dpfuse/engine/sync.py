"""Builds the engine for the parameters of one model, in one order, and shows it to features. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.comm import votes
from dpfuse.comm.waiting import Track, board_of
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.autograd import BackwardListener, ReadyHooks
from dpfuse.engine.backward_table import IDLE
from dpfuse.engine.bucket import GradBucket, Surroundings
from dpfuse.engine.bucket_maker import BucketMaker
from dpfuse.engine.bucket_set import BucketSet
from dpfuse.engine.events import Events, Watcher
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.feature import Feature, ReadyRecorder
from dpfuse.engine.host_memory import keep_freed_memory
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.lost_steps import LostSteps
from dpfuse.engine.membership import Membership
from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.reducer import Decline, Reducer
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Field, ReportLayout
from dpfuse.engine.send_order import SendOrder
from dpfuse.engine.settings import SyncSettings
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError

__all__ = ["GradSync", "Wrap"]

Wrap = Callable[[BackwardListener], BackwardListener]  # returns what is told of backwards, and tells its argument


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
        membership: of this rank in the group.
        events: what is told of forwards, backwards and steps.
        track: tells the heartbeat what this rank is doing.
        layout: of the report.
        lost: knows which means this rank has not used.
        order: the turns of this model among those of its group.
        hooks: the ready hooks on the parameters.
        reducer: sends and delivers buckets.
        watch: tells the reducer of backwards.
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
        params = list(params)
        self.membership = Membership(group)
        self.events = Events(watchers)
        self.track = Track(board_of(group), settings.number, settings.stall_timeout)
        self.order = SendOrder(group, settings.number, hears_at_once=settings.strict)
        self.layout = layout = ReportLayout()
        self.lost = LostSteps(self._concerns)
        self._window = window
        self._times: Watcher | None = None
        layout.compare(_wrapper_field(settings.number), self.lost.field())
        features = [watcher for watcher in watchers if isinstance(watcher, Feature)]
        for feature in (*later, *features):
            feature.join(self)
        layout.compare(*window.fields(), self.order.field())
        self._maker = BucketMaker(
            Assembly(
                group,
                Surroundings(board_of(group), self.events, self.membership.leave),
                settings,
                features=features,
                make_report=lambda count, dtype, device: Report(group, count, layout, window, dtype, device),
            ),
            self.membership,
        )
        self.hooks = ReadyHooks(settings.alone)
        self.hooks.put_on(params)
        if params and params[0].is_cpu:
            keep_freed_memory()
        self.reducer = Reducer(
            self._maker.make(plan, params),
            maker=self._maker,
            membership=self.membership,
            window=window,
            layout=layout,
            track=self.track,
            events=self.events,
            order=self.order,
            lost=self.lost,
            hooks=self.hooks,
            wrap=wrap,
        )
        self.watch = self.reducer.watch
        self.events.hear_steps()  # only now: what failed to be made must not be called

    @property
    def plan(self) -> BucketPlan:
        """The plan of the buckets on which all ranks have agreed."""
        return self.reducer.agreed.plan

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.membership.group

    @property
    def source(self) -> int:
        """The rank whose state the others take."""
        return self.membership.source

    @source.setter
    def source(self, rank: int) -> None:
        self.membership.source = rank

    @property
    def hook(self) -> CommHook | None:
        """The communication hook that reduces the gradients, if a user has registered one."""
        return self._maker.hook

    @property
    def params(self) -> Sequence[Any]:
        """The parameters whose gradients are averaged, in the order of registration."""
        return self.reducer.agreed.params

    @property
    def buckets(self) -> Sequence[GradBucket]:
        """The buckets in use, in communication order."""
        return self.reducer.buckets

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
        self.events.exchange(self.hooks.recorder, recorder)
        self.hooks.recorder = recorder
        self.hooks.install(self.reducer.hooks())

    def observe(self, times: Watcher | None) -> None:
        """Let `times` watch, besides a recorder; None ends that."""
        self.events.exchange(self._times, times)
        self._times = times

    def add_feature(self, feature: Feature, *, joined: bool = False) -> None:
        """Ask `feature` before all others from the next backward on; the buckets are made again.

        Args:
            feature: to be asked. All ranks add it before the same backward, unless it is one of `later`.
            joined: whether it is one of those.

        Raises:
            DPFuseError: a backward is running.
        """
        self._check_idle("a feature was added")
        self._maker.features.insert(0, feature)
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
        self._maker.average_over(rank_count, self.reducer.in_use)

    def shadow_backward(self) -> None:
        """Take part in a backward of other ranks, as `Reducer.shadow_backward` does."""
        self.reducer.shadow_backward()

    @property
    def plans_again(self) -> bool:
        """Whether the order of the first backward decides on the buckets, unless they were given."""
        return self._maker.plans_again

    def use_plan(self, plan: BucketPlan) -> None:
        """Use these buckets of the same parameters from the next backward on; to be called on every rank.

        Raises:
            DPFuseError: a rank has no memory for them; raised on every rank, and nothing has changed.
        """
        assert self.reducer.state is IDLE
        assert not self.reducer.change
        assert plan.specs == self.plan.specs
        self.reducer.accumulation.release()
        in_use = self.reducer.in_use
        self.reducer.adopt(votes.agree_on_success(lambda: self._maker.remake(in_use, plan), self.group, "a plan"))

    def set_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the gradients from the next synchronised backward on."""
        self._maker.hook = hook
        self.remake()

    def follow(self, buckets: BucketSet, text: str, agree: Callable[[], None], decline: Decline) -> None:
        """Use the changed model of this rank; arguments as for `Reducer.follow`."""
        self.hooks.put_on(buckets.params)
        self.reducer.follow(buckets, text, agree, decline)

    def unfollow(self) -> None:
        """Return to the model before the change, since it was undone."""
        self.hooks.put_on(self.params)
        self.reducer.unfollow()
        self.remake()  # a feature may have been added meanwhile

    def keep_change(self) -> None:
        """Keep the changed model, on which all ranks have agreed."""
        self.reducer.keep_change()
        self._maker.agreed = None

    def bucket_set(self, plan: BucketPlan, params: Sequence[Tensor]) -> BucketSet:
        """Make the buckets of a model, which share no memory with those in use."""
        return self._maker.make(plan, params)

    def remove_hooks(self) -> None:
        """Remove all hooks, and put what the buckets have accumulated back into `.grad`."""
        self.hooks.remove()
        self.watch.forget_leaves()
        self.reducer.accumulation.release()

    def remake(self) -> None:
        """Make the buckets again, since a feature was added or has something else beside them; between backwards."""
        self.reducer.accumulation.release()
        self.reducer.adopt(self._maker.remake(self.reducer.in_use, self.reducer.in_use.plan))

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
