"""Ready lists: which gradients of the running backward are ready, by bucket. Knows no gradient and no order of sending.

The hook of most parameters is the `append` of a list, a call in C. Only one parameter of each bucket, its *sentinel*,
has a hook in Python: the one that came last so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import is_
from typing import Any

from torch import Tensor

__all__ = ["ReadyHook", "ReadyList"]

ReadyHook = Callable[[Any], None]
MISSES = 2  # after so many backwards in a row in which another parameter came last, that one becomes the sentinel


class ReadyList:
    """The parameters of one bucket that became ready in the running backward, in that order.

    Args:
        params: of the bucket.
        marks: how often each of them becomes ready in a backward.
        recorded: the order in which parameters became ready in an earlier backward, if it is known.

    Attributes:
        entries: the list.
        sent: how many entries there were when the bucket was sent; -1 before.
        uncertain: how many entries came before the backward was opened, so that they may be of an earlier backward.
        sentinel: the parameter whose hook checks whether the bucket is complete; None without parameters.
        held_up: number of backwards at whose end other buckets waited for this one.
        due: the number of entries from which on the bucket may be complete.
        leaves_out: whether the bucket does not wait for some parameters in this backward.
    """

    __slots__ = (
        "_left_out",
        "_marks",
        "_misses",
        "_order",
        "_params",
        "_wanted",
        "due",
        "entries",
        "held_up",
        "leaves_out",
        "sent",
        "sentinel",
        "uncertain",
    )

    def __init__(self, params: Sequence[Tensor], marks: Sequence[int], recorded: Sequence[Tensor] = ()) -> None:
        self.entries: list[Tensor] = []
        self.sent = -1
        self.uncertain = 0
        self.held_up = 0
        self._params = params
        self._marks = [max(1, count) for count in marks]
        self._misses = 0
        self._order: list[Tensor] = []  # the entries of the last backward in which the bucket was complete
        self._wanted = self._order  # those of them that this backward reaches
        self._left_out: Set[int] = frozenset()  # ids of the others
        self.wait_for_all_but(frozenset())
        last = {id(param): place for place, param in enumerate(recorded)}
        self._order.sort(key=lambda param: last.get(id(param), -1))
        self.sentinel = self._order[-1] if self._order else None

    def wait_for_all_but(self, frozen: frozenset[int]) -> None:
        """Do not wait for the parameters with these ids from now on."""
        pairs = zip(self._params, self._marks, strict=True)
        # Before a backward was seen, gradients are expected in the reverse of the order of registration.
        self._order = [param for param, count in pairs if id(param) not in frozen for _ in range(count)][::-1]
        self._wait_for(self._order)

    def leave_out(self, ids: Set[int]) -> None:
        """Do not wait for the parameters with these ids in this backward, which does not reach them."""
        wanted = [param for param in self._order if id(param) not in ids]
        self._wait_for(wanted if len(wanted) < len(self._order) else self._order)
        self._left_out = ids

    def _wait_for(self, wanted: list[Tensor]) -> None:
        self._wanted, self.due, self._left_out = wanted, len(wanted), frozenset()
        self.leaves_out = wanted is not self._order

    @property
    def is_reached(self) -> bool:
        """Whether the bucket waits for any parameter in this backward."""
        return bool(self._wanted)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter that the bucket waits for became ready as often as expected."""
        entries, order = self.entries, self._wanted
        if len(entries) != len(order) or self.uncertain:
            return False
        if all(map(is_, entries, order)):
            return True
        if sorted(map(id, entries)) != sorted(map(id, order)):
            return False
        if order is self._order:
            self._order = self._wanted = list(entries)
        return True

    def early(self) -> list[Tensor]:
        """Return the uncertain entries if the bucket became complete all the same: they are of this backward.

        They are known from then on, if the next backward sees them before it is opened, too.
        """
        found, self.uncertain = self.entries[: self.uncertain], 0
        return found if self.is_complete else []

    def missing(self) -> list[Tensor]:
        """Return the parameters that did not become ready, frozen ones included."""
        seen = set(map(id, self.entries))
        return [param for param in self._params if id(param) not in seen]

    def late(self) -> list[Tensor]:
        """Return the parameters that became ready after the bucket was sent."""
        return self.entries[self.sent :] if self.sent >= 0 else []

    def unexpected(self) -> bool:
        """Whether a parameter became ready that this backward was not to reach."""
        return self.leaves_out and not self._left_out.isdisjoint(map(id, self.entries))

    def choose_sentinel(self) -> bool:
        """Choose another sentinel after a backward, if this one was not used, or was not the last several times.

        Returns:
            Whether the sentinel has changed.
        """
        if not self.entries:
            return False
        last = self.entries[-1]
        if last is self.sentinel:
            self._misses = 0
            return False
        self._misses += 1
        if self._misses < MISSES and any(entry is self.sentinel for entry in self.entries):
            return False
        self.sentinel, self._misses = last, 0
        return True

    def clear(self) -> None:
        """Forget the entries, at the end of a backward or when a new one begins."""
        self.entries.clear()
        self.sent = -1
        self.uncertain = 0
        if self.leaves_out:
            self._wait_for(self._order)
