"""Counts the steps of which no trace has a line: without a wrapped model, or skipped by a scaler."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from dpfuse.commands.doctor.process_end import ProcessEnd
from dpfuse.commands.doctor.run_request import UNWRAPPED

__all__ = ["UntracedSteps"]


class UntracedSteps:
    """Writes a character for each of them, so that the doctor sees progress.

    Args:
        folder: for the file of this rank.
        end: of this process, once there are enough of them.

    Attributes:
        unwrapped: how many steps each optimizer has made without a wrapped model.
    """

    def __init__(self, folder: Path, end: ProcessEnd) -> None:
        self._folder = folder
        self._end = end
        self.unwrapped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def step(self, optimizer: Optimizer) -> None:
        """Count a step that an optimizer has made without a wrapped model."""
        self.unwrapped[optimizer] = self.unwrapped.get(optimizer, 0) + 1
        self.add(self.unwrapped[optimizer])

    def add(self, steps: int) -> None:
        """Note one more step.

        Args:
            steps: how many of this kind there are now.
        """
        self._end.trains()
        self._end.patience.step()
        with open(self._folder / f"{UNWRAPPED}{self._end.rank.number}", "a") as file:
            file.write(".")
        self._end.after(steps)
