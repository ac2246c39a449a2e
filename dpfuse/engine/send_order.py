"""In which order the wrapped models of one group send their buckets. Knows no bucket and no tensor.

Collectives of one group pair up by their order. If several models share a backward, their buckets must be sent in the
same order on every rank. A number tells the ranks whether they were: the report compares it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import count

import torch.distributed as dist

from dpfuse.engine.window import Field

__all__ = ["SendOrder"]

BITS = 16  # of the number that is compared
PRIME = 65521  # the largest one below 2 ** BITS
FACTOR = 17364


class SendOrder:
    """The turns of one wrapped model, among the models of its group.

    Only changes of turn are added to the number, since one model always sends its buckets in the order of its plan.

    Args:
        group: the ranks.
        number: of the wrapper in its group.

    Attributes:
        turns: of all models of the group.
        key: what `turns.turn` is while this model has the turn.
        told: a number for the order of all turns since the last report of this model; 0 before its first report, and
            in a group of one rank.
    """

    __slots__ = ("__weakref__", "_begun", "_is_alone", "_number", "_opened", "_send_due", "key", "told", "turns")

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self.told = 0
        self._send_due: Callable[[bool], None] | None = None  # while a backward is open that others may share
        self._number = number
        self._opened = 0
        self._begun = False
        self._is_alone = group.size() == 1  # then there is no other rank whose order may differ
        self.turns = _groups.setdefault(group, Turns())
        self.key = next(self.turns.keys)
        self.turns.models.append(weakref.ref(self, self.turns.models.remove))

    @property
    def is_shared(self) -> bool:
        """Whether the group has another wrapped model."""
        return len(self.turns.models) > 1

    def begin(self) -> None:
        """Begin to count after a report. Copies of a model are not made at the same time, so the first one begins."""
        self.told, self._begun, self._send_due = 0, True, None

    def open(self, send_due: Callable[[bool], None]) -> None:
        """Note that a backward of this model begins, which other models of the group may share.

        Args:
            send_due: sends the buckets of this model for which that backward has no more gradients. Its argument says
                whether the backward has ended.
        """
        self._opened, self._send_due = next(self.turns.keys), send_due
        self.turns.turn = 0

    def take_turn(self, place: int, *, among_others: bool = True) -> None:
        """Note that this model now sends its bucket at this place. The hot path calls it only where it has no turn.

        Args:
            place: of the bucket, in the order of the plan.
            among_others: whether other models that share the backward first send what is due.
        """
        group = self.turns
        if group.turn == self.key:
            return
        if among_others:
            self.let_others_send(ended=False)
        if group.last != self.key:  # else it was the last one in a backward before
            for model in () if self._is_alone else group.living():
                if model._begun:
                    model.told = (model.told * FACTOR + self._number * 251 + place + 1) % PRIME
            group.last = self.key
        group.turn = self.key  # last, so that nothing is left out after an error

    def let_others_send(self, *, ended: bool) -> None:
        """Let the other models send what is due, in the order in which their backwards have begun."""
        group = self.turns
        if group.sends or len(group.models) < 2:
            return
        group.sends = True
        try:
            for model in sorted(group.living(), key=lambda model: model._opened):
                if model is not self and model._send_due is not None:
                    model._send_due(ended)
        finally:
            group.sends = False

    def field(self) -> Field:
        """Return the field that the report compares."""
        return Field(
            "order",
            partial(getattr, self, "told"),  # in C, since each backward calls it
            lambda number: f"has sent the buckets of its wrapped models in another order (number {number})",
            "Their gradients are mixed up. Run forwards and backwards of the models in the same order everywhere; "
            "where ranks use different parameters, pass find_unused_parameters=True to all of these wrappers.",
            bits=BITS,
        )


class Turns:
    """What the models of one group share.

    Attributes:
        models: those that live.
        keys: gives numbers that no model has had.
        last: the key of the model that sent last: no reference, which would keep it alive.
        turn: the same; 0 once a further model has begun a backward.
        sends: whether models send what is due for another one.
    """

    def __init__(self) -> None:
        self.models: list[weakref.ref[SendOrder]] = []
        self.keys = count(1)
        self.last = 0
        self.turn = 0
        self.sends = False

    def living(self) -> list[SendOrder]:
        return [model for reference in self.models if (model := reference()) is not None]


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Turns] = weakref.WeakKeyDictionary()
