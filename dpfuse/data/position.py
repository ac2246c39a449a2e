"""Where a training is in its data: the epoch, and how many samples of it all ranks together have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dpfuse.arguments import integer
from dpfuse.errors import DPFuseError

__all__ = ["Resumable"]


class Resumable:
    """An object with a position in the data, which is the same number on all ranks.

    It is counted where the training loop gets a batch, not where one is loaded.

    Args:
        facts: what the order of the samples depends on, by name. A saved position is only good for the same facts.
        loop: the line of a program that counts.

    Attributes:
        same_on_all_ranks: True; `load_checkpoint` takes the state to another number of ranks.
    """

    same_on_all_ranks = True

    def __init__(self, facts: Mapping[str, int | bool], loop: str = "for batch in sampler.track(loader)") -> None:
        self._facts = dict(facts)
        self._loop = loop
        self._epoch = self._seen = 0
        self._start = 0  # where the iteration began that is running, or the next one will begin
        self._iterated: Any = False  # whether batches were taken, by a loop that counts or by another one
        self._counts = False  # whether a loop has counted
        self._jumps = 0  # how often the position was set

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; 0 in a new training."""
        return self._epoch

    @property
    def seen(self) -> int:
        """How many samples of this epoch the training loops of all ranks together have been given."""
        return self._seen

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. For the epoch of now nothing changes: a resumed job goes on where it was.

        Args:
            epoch: 0 or more. At the end of the data the counted loop goes to the next one by itself.

        Raises:
            TypeError, ValueError: `epoch` is no such number.
        """
        if integer("epoch", epoch, 0) != self._epoch:
            self._jump(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position of all ranks together: a few numbers, the same on every rank.

        Returns:
            A dict for `load_state_dict`, also on another number of ranks.

        Raises:
            DPFuseError: batches were taken, and no loop has counted them.
        """
        if self._iterated and not self._counts:
            raise DPFuseError(
                "state_dict() was called after batches were taken that were not counted, expected the training loop to "
                f"count them: the position would be wrong. Write `{self._loop}`."
            )
        return {"epoch": self._epoch, "seen": self._seen, **self._facts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state_dict: what `state_dict()` has returned, in a job of any number of ranks.

        Raises:
            TypeError, ValueError: this is no such state, or the order of the samples would be another.
        """
        if not isinstance(state_dict, Mapping) or not {"epoch", "seen", *self._facts} <= state_dict.keys():
            raise ValueError(
                f"the state must have {sorted(['epoch', 'seen', *self._facts])}, got {state_dict!r:.200}; pass what "
                "state_dict() of the same class has returned"
            )
        for name, fact in self._facts.items():
            if state_dict[name] != fact:
                raise ValueError(
                    f"the state was saved with {name}={state_dict[name]!r}, got {name}={fact!r}: the order of the "
                    "samples would be another. Pass the same, or start a new epoch with set_epoch()."
                )
        self._jump(integer("epoch", state_dict["epoch"], 0), integer("seen", state_dict["seen"], 0))

    def _jump(self, epoch: int, seen: int) -> None:
        self._epoch, self._seen, self._start = epoch, seen, seen
        self._jumps += 1
        self._was_moved()

    def _was_moved(self) -> None:
        """The position was set. A class with workers tells them."""

    def _counted(self, batches: Iterable[Any], size_of_step: Callable[[], int]) -> Iterator[Any]:
        """Yield batches, and count them; at the end of the data, go to the next epoch.

        Args:
            size_of_step: called once for each batch: how many samples all ranks together get in its step.

        Raises:
            DPFuseError: the position was set inside the loop.
        """
        jumps, self._counts = self._jumps, True
        try:
            for batch in batches:
                if jumps != self._jumps:
                    raise DPFuseError(
                        f"set_epoch() or load_state_dict() was called inside the loop `{self._loop}`, expected it "
                        "between two loops: batches from before are still on their way. Leave the loop, and begin a "
                        "new one."
                    )
                self._seen += size_of_step()
                yield batch
            if jumps == self._jumps:
                self._jump(self._epoch + 1, 0)
        finally:
            self._start = self._seen
