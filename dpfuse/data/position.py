"""Where a training is in its data: the epoch, and how many samples of it all ranks together have seen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dpfuse.errors import DPFuseError

__all__ = ["Position", "integer"]


class Position:
    """How far all ranks together are. It is counted where the training loop gets a batch, not where one is loaded.

    Args:
        facts: what the order of the samples depends on, by name. A saved position is only good for the same facts.
        loop: the line of a program that counts.

    Attributes:
        epoch: the number of the epoch.
        seen: how many samples of the epoch the training loops of all ranks have been given.
        start: where the iteration began that is running, or the next one will begin.
    """

    def __init__(self, facts: Mapping[str, int | bool], loop: str = "for batch in sampler.track(loader)") -> None:
        self._loop = loop
        self.epoch = self.seen = self.start = 0
        self._counts = False  # whether a loop has counted
        self._facts = dict(facts)
        self._jumps = 0  # how often the position was set

    def jump(self, epoch: int, seen: int) -> None:
        """Go to another place in the data."""
        self.epoch, self.seen, self.start = epoch, seen, seen
        self._jumps += 1

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of an epoch; nothing changes if it is the epoch of now."""
        if integer("epoch", epoch, 0) != self.epoch:
            self.jump(epoch, 0)

    def track(self, loader: Iterable[Any], size_of_step: Callable[[], int]) -> Iterator[Any]:
        """Yield the batches of `loader`, and count them; at the end of the data, go to the next epoch.

        Args:
            loader: gives the batches of this rank from `start` on.
            size_of_step: called once for each batch: how many samples all ranks together get in its step.

        Raises:
            DPFuseError: the position was set inside the loop.
        """
        jumps, self._counts = self._jumps, True
        try:
            for batch in loader:
                if jumps != self._jumps:
                    raise DPFuseError(
                        f"set_epoch() or load_state_dict() was called inside the loop `{self._loop}`, expected it "
                        "between two loops: batches from before are still on their way. Leave the loop, and begin a "
                        "new one."
                    )
                self.seen += size_of_step()
                yield batch
            if jumps == self._jumps:
                self.jump(self.epoch + 1, 0)
        finally:
            self.start = self.seen

    def state_dict(self, *, iterated: bool) -> dict[str, Any]:
        """The position and its facts.

        Args:
            iterated: whether batches were taken, by a loop that counts or by another one.

        Raises:
            DPFuseError: batches were taken, and nothing has ever counted one.
        """
        if iterated and not self._counts:
            raise DPFuseError(
                "state_dict() was called after batches were taken that were not counted, expected the training loop to "
                f"count them: the position would be wrong. Write `{self._loop}`."
            )
        return {"epoch": self.epoch, "seen": self.seen, **self._facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            TypeError, ValueError: this is no such state, or that of other data.
        """
        if not isinstance(state, Mapping) or not {"epoch", "seen", *self._facts} <= state.keys():
            raise ValueError(
                f"the state must have {sorted(['epoch', 'seen', *self._facts])}, got {state!r:.200}; pass what "
                "state_dict() of the same class has returned"
            )
        for name, fact in self._facts.items():
            if state[name] != fact:
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}, got {name}={fact!r}: the order of the samples "
                    "would be another. Pass the same, or start a new epoch with set_epoch()."
                )
        self.jump(integer("epoch", state["epoch"], 0), integer("seen", state["seen"], 0))


def integer(name: str, value: Any, least: int) -> int:
    """Return `value`, which must be a whole number of at least `least`; of Python, numpy or torch.

    Raises:
        TypeError, ValueError: it is none.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number
