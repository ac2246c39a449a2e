"""Hears that backwards begin, but only while there is something to do then. Knows no weight."""

from __future__ import annotations

from collections.abc import Callable

from dpfuse.engine.events import Events, Watcher

__all__ = ["BackwardBegins"]


class BackwardBegins(Watcher):
    """Hears that a backward begins where it was asked to. Else a backward has no cost of it.

    Args:
        begins: gets whether it is synchronised; returns whether to hear of the next one.

    Attributes:
        events: of the model; None where there are none.
    """

    def __init__(self, begins: Callable[[bool], bool]) -> None:
        self.events: Events | None = None
        self._begins = begins
        self._heard = False

    def hear(self) -> None:
        """Hear of the next backward."""
        if self.events is not None and not self._heard:
            self._heard = True
            self.events.add(self)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`."""
        if not self._begins(sync) and self.events is not None:
            self._heard = False
            self.events.remove(self)
