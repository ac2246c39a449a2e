"""In which order the wrapped models of one group send their buckets. Knows no bucket and no tensor.

Collectives of one group pair up by their order. If several models share a backward, their buckets must be sent in the
same order on every rank. A number tells the ranks whether they were: the report compares it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import torch.distributed as dist

from dpfuse.comm.collective import is_registered
from dpfuse.engine.number_hash import number_hash
from dpfuse.engine.report_layout import Field
from dpfuse.errors import DPFuseError

__all__ = ["SendOrder", "complete_failed"]

BUCKETS = 1 << 32  # more than a model has


class SendOrder:
    """The turns of one wrapped model, among the models of its group.

    Args:
        group: the ranks.
        number: of the wrapper in its group.
        hears_at_once: as the attribute, at first.

    Attributes:
        turns: of all models of the group.
        key: what `turns.turn` is while this model has the turn.
        complete: completes what the peers wait for in a backward of this model that has failed on this rank. It keeps
            the model alive once that is noted.
        hears_at_once: whether a backward of this model waits for the report on a GPU, too, the same on all ranks: the
            user wants it, or another collective of the group may follow.
    """

    __slots__ = ("__weakref__", "_number", "_reference", "_send_due", "complete", "hears_at_once", "key", "turns")

    def __init__(self, group: dist.ProcessGroup, number: int, *, hears_at_once: bool = False) -> None:
        self.complete: weakref.WeakMethod[Callable[[], None]] | None = None
        self.hears_at_once = hears_at_once
        self._send_due: Callable[[bool], None] | None = None  # while a backward is open
        self._number = number
        _forget_destroyed()
        self.turns = _groups.setdefault(group, Turns(group))
        self.key = next(self.turns.keys)
        self._reference = weakref.ref(self, self.turns.forget)
        self.turns.models.append(self._reference)

    def hear_at_once(self) -> None:
        """Let the backwards of all models that the group has now wait for their reports, from now on."""
        for reference in tuple(self.turns.models):
            model = reference()
            if model is not None:
                model.hears_at_once = True

    @property
    def is_shared(self) -> bool:
        """Whether the group has another wrapped model."""
        return len(self.turns.models) > 1

    @property
    def another_is_open(self) -> bool:
        """Whether a backward of another model of the group is open."""
        return len(self.turns.opened) > (self._send_due is not None)

    def open(self, send_due: Callable[[bool], None]) -> None:
        """Note that a backward of this model begins, which other models of the group may share.

        Args:
            send_due: sends the buckets of this model for which that backward has no more gradients. Its argument says
                whether the backward has ended.
        """
        if self._reference in self.turns.opened:  # an exception may have left it there
            self.turns.opened.remove(self._reference)
        self.turns.opened.append(self._reference)
        self._send_due = send_due
        self.turns.turn = 0

    def close(self) -> None:
        """Note that the backward of this model has ended, or was never open."""
        group = self.turns
        self._send_due = None
        if self._reference in group.opened:
            group.opened.remove(self._reference)
        if not group.opened:
            # Every turn so far was compared by the report of its model, and a bucket that is sent from now on pairs up
            # with none of them. So models that only take turns tell the same number in each backward.
            group.first = group.told = 0

    def take_turn(self, place: int, *, among_others: bool = True) -> None:
        """Note that this model now sends its bucket at this place. The hot path calls it only where it has no turn.

        Args:
            place: of the bucket, in the order of the plan.
            among_others: whether other models that share the backward first send what is due.
        """
        group = self.turns
        if group.turn == self.key:
            return
        if among_others and self.another_is_open:
            self.let_others_send(ended=False)
        turn = self._number * BUCKETS + place + 1
        if not group.first:
            group.first, group.last = turn, self.key
        elif group.last != self.key:  # else other models have opened, and sent nothing
            group.told = number_hash((group.told or group.first, turn))
            group.last = self.key
        group.turn = self.key  # last, so that nothing is left out after an error

    def let_others_send(self, *, ended: bool) -> None:
        """Let the other models send what is due, in the order in which their backwards have begun."""
        group = self.turns
        if group.sends:
            return
        group.sends = True
        try:
            for reference in tuple(group.opened):
                model = reference()
                if model is not None and model is not self and model._send_due is not None:
                    model._send_due(ended)
        finally:
            group.sends = False

    def fail_alone(self) -> None:
        """Note that a backward of this model has failed which was to reach no other one: the peers wait in this one.

        Until it is completed, the model lives, also where the program has dropped it. Python collects garbage at other
        moments on each rank, and all ranks must take part in what is left.
        """
        complete = None if self.complete is None else self.complete()
        if complete is not None:
            self.turns.failed.setdefault(self.key, complete)

    def settled(self) -> None:
        """Note that nothing is left of a failed backward of this model."""
        self.turns.failed.pop(self.key, None)

    def complete_failed(self) -> None:
        """Complete what the peers wait for, as `complete_failed(group)` does, and raise what prevents it."""
        self.turns.complete_failed()

    def field(self) -> Field:
        """Return the field that the report compares."""
        return Field(
            "order",
            partial(getattr, self.turns, "told"),  # in C, since each backward calls it
            lambda number: f"has sent the buckets of its wrapped models in another order (number {number})",
            "Their gradients are mixed up. Run forwards and backwards of the models in the same order everywhere; "
            "where ranks use different parameters, pass find_unused_parameters=True to all of these wrappers.",
        )


class Turns:
    """What the models of one group share.

    Only changes of turn count, since one model always sends its buckets in the order of its plan.

    Attributes:
        models: those that live.
        opened: those of them whose backward is open, in the order in which they opened.
        keys: gives numbers that no model has had.
        turn: the key of the model that sent last: no reference, which would keep it alive. 0 once a further model has
            begun a backward.
        first: a number for the first turn since no backward was open; 0 before it.
        last: the key of the model that had the last turn since then.
        told: a number for the order of all turns since then; 0 while one model has had all of them.
        sends: whether models send what is due for another one.
        failed: what completes a backward that has failed on this rank, and was to reach no other model, by the key of
            its model.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._registered = is_registered(group)
        self.models: list[weakref.ref[SendOrder]] = []
        self.opened: list[weakref.ref[SendOrder]] = []
        self.keys = count(1)
        self.turn = 0
        self.first = 0
        self.last = 0
        self.told = 0
        self.sends = False
        self.failed: dict[int, Callable[[], None]] = {}

    def forget(self, reference: weakref.ref[SendOrder]) -> None:
        """Forget a model that lives no more."""
        self.models.remove(reference)
        if reference in self.opened:
            self.opened.remove(reference)

    def complete_failed(self) -> None:
        """As `SendOrder.complete_failed`."""
        while self.failed:
            self.failed.pop(next(iter(self.failed)))()

    def forget_if_destroyed(self, group: dist.ProcessGroup) -> None:
        """Let go of models with a failed backward if the group was destroyed: no peer waits for them any more."""
        if self.failed and self._registered and not is_registered(group):
            self.failed.clear()


def complete_failed(group: dist.ProcessGroup | None) -> None:
    """Complete what the peers wait for in backwards that have failed on this rank, of one model of the group each.

    To be called before other collectives of the group. Where several models have shared a backward, each is completed
    in its own next forward: in the order of the program.
    """
    turns = None if group is None else _groups.get(group)
    while turns is not None and turns.failed:
        with suppress(DPFuseError):  # it cannot be completed, and its own next forward says why, if there is one
            turns.complete_failed()


def _forget_destroyed() -> None:
    for group, turns in tuple(_groups.items()):
        turns.forget_if_destroyed(group)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Turns] = weakref.WeakKeyDictionary()
