"""Tells the clock of a group when the phases of a step begin: forward, backward, optimizer, loader (the rest)."""

from __future__ import annotations

from torch.optim import Optimizer

from dpfuse.comm.phase_clock import BACKWARD, FORWARD, LOADER, PhaseClock
from dpfuse.comm.waiting import Board
from dpfuse.engine.events import Inputs, Watcher

__all__ = ["PhaseTimes"]


class PhaseTimes(Watcher):
    """Marks the phases of one wrapped model. All models of a group use one clock.

    By the host's clock, so also on a GPU: what the host does not wait for takes no time.

    Args:
        board: of the group. It gets a clock, unless it has one.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._clock = board.clock = board.clock or PhaseClock(board.waited)

    def forward_begins(self, inputs: Inputs) -> None:
        """As `Watcher.forward_begins`."""
        self._clock.enter(FORWARD, self._board.waited)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`."""
        self._clock.enter(BACKWARD, self._board.waited)

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        self._clock.enter(LOADER, self._board.waited)

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        self._clock.step_ended(self._board.waited)

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        self._clock.optimizer_ended(self._board.waited)
