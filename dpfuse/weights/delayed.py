"""What ranks hear of what they send: at once on a CPU, one backward later on a GPU. Knows no weight and no report."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Delayed", "Echo"]

T = TypeVar("T")


class Delayed(Generic[T]):
    """What a rank has sent, until every rank has heard how it compares.

    Attributes:
        late: whether ranks hear of a backward in the next one.
        moves: whether the next delivery may tell of something else than the one before.

    Example:
        >>> sent = Delayed()
        >>> sent.late = True
        >>> sent.send("a hash")
        >>> sent.delivered(), sent.delivered()
        ((True, None), (True, 'a hash'))
    """

    def __init__(self) -> None:
        self.late = False
        self.moves = False
        self._sent: T | None = None  # what each backward sends
        self._before: T | None = None  # what the last backward has sent
        self._unheard = 0  # deliveries to come that tell of what is forgotten

    def send(self, item: T | None) -> None:
        """Send this in each backward from now on; None sends nothing."""
        self._sent, self.moves = item, True

    def forget(self) -> None:
        """Send nothing, and hear nothing of what was sent so far, in the backward that runs or comes next, too."""
        self.send(None)
        self._unheard = 1 + self.late

    def delivered(self) -> tuple[bool, T | None]:
        """Return whether what every rank hears now counts, and what it is about, if this rank had sent something."""
        known = self._before if self.late else self._sent
        self._before = self._sent
        if self._unheard:
            self._unheard -= 1
            return False, None
        self.moves = known is not self._sent
        return True, known


class Echo:
    """Questions that were asked before an examination, and are heard after it: on a GPU, in the next backward.

    It is counted by averaged backwards that begin, which a rank does also where its backward fails then.

    Attributes:
        left: how many of these begin before a question is a new one.
    """

    def __init__(self) -> None:
        self.left = 0

    def examined(self, *, late: bool) -> None:
        """Note an examination, inside a backward."""
        self.left = 2 if late else 0

    def backward_begins(self) -> None:
        """Note that an averaged backward begins."""
        self.left = max(0, self.left - 1)
