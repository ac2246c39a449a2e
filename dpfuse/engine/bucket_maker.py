"""Makes the buckets of one model: by itself, or those on which all ranks agree. Knows no order of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import votes
from dpfuse.comm.failed import was_told
from dpfuse.comm.memory_errors import error_of
from dpfuse.comm.waiting import board_of
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.averaging import averaging_for
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.bucket_set import BucketSet
from dpfuse.engine.events import overridden
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.feature import Feature
from dpfuse.engine.late_reading import Guard
from dpfuse.engine.membership import Membership
from dpfuse.engine.plan import BucketPlan, rebuild_plan
from dpfuse.engine.settings import SyncSettings
from dpfuse.engine.spoiler import spoiler_of
from dpfuse.errors import DPFuseError

__all__ = ["BucketMaker"]

BUCKETS = "the buckets after the first synchronised backward"

_gave_views = attrgetter("gave_views")


class BucketMaker:
    """Makes the buckets of one model.

    Args:
        assembly: chooses the parts of each bucket.
        membership: of this rank in the group.

    Attributes:
        agreed: the buckets on which all ranks have agreed, until they are in use.
    """

    def __init__(self, assembly: Assembly, membership: Membership) -> None:
        self.agreed: BucketSet | None = None
        self._assembly = assembly
        self._membership = membership
        self._rank_count = membership.size
        # `_made` asks the features once: each backward on a GPU needs the answers.
        self._divides = False
        self._spoil: tuple[Callable[..., None], ...] = ()

    @property
    def settings(self) -> SyncSettings:
        """How gradients are averaged."""
        return self._assembly.settings

    @property
    def features(self) -> list[Feature]:
        """What adds steps to buckets, in the order in which it is asked."""
        return self._assembly.features

    @property
    def hook(self) -> CommHook | None:
        """The communication hook that reduces the gradients, if a user has registered one."""
        return self._assembly.hook

    @hook.setter
    def hook(self, hook: CommHook) -> None:
        self._assembly = replace(self._assembly, hook=hook)

    @property
    def plans_again(self) -> bool:
        """Whether the order of the first backward decides on the buckets, unless they were given."""
        return not (self.settings.keeps_order or any(one.keeps_buckets for one in self.features))

    def make(self, plan: BucketPlan, params: Sequence[Tensor]) -> BucketSet:
        """Make the buckets of a model, which share no memory with those in use."""
        spoiler = spoiler_of(params, self._membership.size)
        return BucketSet(plan, params, self._made(plan, params), spoiler=spoiler)

    def remake(self, in_use: BucketSet, plan: BucketPlan, marks: Sequence[int] = ()) -> BucketSet:
        """Make the buckets of `plan` for the parameters in use; equal ones keep their communication buffers."""
        return in_use.remade(self._made(plan, in_use.params, in_use.buckets), plan, marks)

    def _made(self, plan: BucketPlan, params: Sequence[Tensor], before: Sequence[GradBucket] = ()) -> list[GradBucket]:
        self._divides = any(feature.divides for feature in self.features)
        self._spoil = overridden(Feature, "spoil", *self.features)
        return self._assembly.make(plan, params, before=before, rank_count=self._rank_count)

    def average_over(self, rank_count: int, in_use: BucketSet) -> None:
        """Divide the sums of the next backwards by this number; a communication hook uses a number of its own."""
        self._rank_count, settings = rank_count, self.settings
        for bucket in in_use.buckets:
            bucket.average_by(averaging_for(bucket.plan.dtype, rank_count, settings.scale, settings.wire.dtype))

    def agree(self, in_use: BucketSet, order: list[int], marks: list[int], *, hidden: bool) -> BaseException | None:
        """Agree with the other ranks on buckets for the ready order of the first synchronised backward.

        That backward has ended and everything is delivered, so no bucket is in flight or holds accumulated gradients.
        Gradients that are views keep the old buffers alive.

        Args:
            in_use: the buckets of that backward.
            order: the registration indices, in the order in which the parameters became ready.
            marks: how often each parameter became ready.
            hidden: whether the graph has not shown all of that.

        Returns:
            The error that every rank is to raise, if there is one. Otherwise `agreed` has the buckets.
        """
        group = self._membership.group  # nothing may fail between the beginning of the vote and its first collective
        if self.agreed is None:
            board = board_of(group)
            tensors = votes.order_tensors(order, [*marks, hidden, board is None or not board.one_machine], group)
            try:
                self.agreed = self._agreed_buckets(in_use, *tensors, group)
            except BaseException as error:
                voted = isinstance(error, DPFuseError) and not error.ranks  # not a wait that cannot end
                if voted or was_told(error):  # told: an interrupt
                    return error
                self._membership.leave(error)  # it is unknown in which vote the peers are
                raise
        return None

    def _agreed_buckets(self, in_use: BucketSet, order: Tensor, marks: Tensor, group: dist.ProcessGroup) -> BucketSet:
        """Return the buckets for the agreed ready order, with the agreed marks."""

        def build() -> BucketSet:
            *counts, hidden, several_machines = marks.tolist()  # the largest of all ranks
            in_use.hidden = bool(hidden)
            if any(feature.keeps_buckets for feature in self.features):
                return in_use.remade(in_use.buckets, marks=counts)
            keeps, plan = in_use.plan.tuned or not self.plans_again, in_use.plan
            one_machine = not several_machines
            plan = plan if keeps else rebuild_plan(plan, votes.order_in(order), one_machine=one_machine)
            return self.remake(in_use, plan, counts)

        votes.agree_on_order(order, marks, group, self._membership.source)
        return votes.agree_on_success(build, group, BUCKETS)

    def decline(self, param_count: int, *, out_of_memory: bool) -> None:
        """Take part in that vote on a rank that cannot go on, so that the peers do not wait; they raise an error."""
        group = self._membership.group
        nothing = votes.order_tensors([], [0] * (param_count + 2), group)
        votes.agree_on_order(*nothing, group, self._membership.source)
        text = "its backward was interrupted after the gradients were averaged"
        votes.report_failure(error_of(text, out_of_memory=out_of_memory), group, BUCKETS)

    def spoil(self, in_use: BucketSet) -> None:
        """Let the device act on the report of these buckets. On CUDA the host reads it one backward later."""
        spoiler, report = in_use.spoiler, in_use.report
        guard: Guard | None = spoiler
        if spoiler is None or self._divides:
            guard = None  # a feature that divides the gradients has them
        elif all(map(_gave_views, in_use.buckets)):
            guard = partial(spoiler.fill_buffers, in_use.buffers)
        report.hand_over(guard)
        for spoil in self._spoil if spoiler is not None else ():
            spoil(report.wrong, [bucket.parts.delivery for bucket in in_use.buckets])
