"""What all samplers of this folder do with their position: tell it, set it, save it and load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfuse.data.position import Position

__all__ = ["Resumable"]


class Resumable:
    """An object with a position in the data, which is the same number on all ranks.

    A class that inherits this sets the two private attributes.

    Attributes:
        same_on_all_ranks: True; `load_checkpoint` takes the state to another number of ranks.
    """

    same_on_all_ranks = True

    _position: Position
    _iterated: Any  # whether batches were taken, by a loop that counts or by another one

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; 0 in a new training."""
        return self._position.epoch

    @property
    def seen(self) -> int:
        """How many samples of this epoch the training loops of all ranks together have been given."""
        return self._position.seen

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. For the epoch of now nothing changes: a resumed job goes on where it was.

        Args:
            epoch: 0 or more. At the end of the data the counted loop goes to the next one by itself.

        Raises:
            TypeError, ValueError: `epoch` is no such number.
        """
        self._position.set_epoch(epoch)
        self._was_moved()

    def state_dict(self) -> dict[str, Any]:
        """The position of all ranks together: a few numbers, the same on every rank.

        Returns:
            A dict for `load_state_dict`, also on another number of ranks.

        Raises:
            DPFuseError: batches were taken, and no loop has counted them.
        """
        return self._position.state_dict(iterated=bool(self._iterated))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state_dict: what `state_dict()` has returned, in a job of any number of ranks.

        Raises:
            TypeError, ValueError: this is no such state, or the order of the samples would be another.
        """
        self._position.load_state_dict(state_dict)
        self._was_moved()

    def _was_moved(self) -> None:
        """The position was set. A class with workers tells them."""
