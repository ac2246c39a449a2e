"""Means that this rank has averaged with the others and then not used, so that its weights differ. Knows no bucket."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from weakref import ref

from torch.optim import Optimizer

from dpfuse.engine.optimizer_step_hook import call_after_steps, living_optimizers
from dpfuse.engine.report_layout import Field
from dpfuse.engine.torch_private import STEP

__all__ = ["LOST", "LostSteps"]

LOST = "lost"


class LostSteps:
    """Averaged backwards after which an exception struck on this rank before an optimizer had used their mean.

    The other ranks may have used it, and then hear of it in the next averaged backward. Where all ranks have lost the
    same number, nothing is told. A step of an optimizer that follows all the same uses the mean. Where means were used
    and no optimizer of torch has the parameters, the program updates its weights in another way: nothing is told.

    Args:
        concerns: whether an optimizer updates parameters of the model.

    Attributes:
        steps: those backwards, by number, from 1, until every rank has heard of them.
        begun: the optimizer whose step has begun and not returned, so that an exception may have ended it. Steps of
            other optimizers do not change it.
        heard: how many steps there were, of any optimizer.
    """

    def __init__(self, concerns: Callable[[Optimizer], bool]) -> None:
        self.begun: ref[Optimizer] | None = None
        self.heard = 0
        self._concerns = concerns
        self.steps: list[int] = []
        call_after_steps(self)

    def note(self, step: int) -> None:
        """Note that the mean of this synchronised backward, from 1, may be lost."""
        if not step or step in self.steps:
            return
        if step == 1 or self.heard or any(map(self._concerns, living_optimizers())):
            self.steps.append(step)

    def look(self, step: int) -> None:
        """Note the last synchronised backward if an exception has ended the step that has begun since."""
        optimizer = None if self.begun is None else self.begun()
        if optimizer is None:
            self.begun = None
        elif not _a_step_runs():
            self.begun, self.heard = None, self.heard + 1
            if self._concerns(optimizer):
                self.note(step)

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self.heard += 1
        if self.begun is not None and self.begun() is optimizer:
            self.begun = None
        if self.steps and self._concerns(optimizer):
            self.steps.clear()

    def forget(self) -> None:
        """Forget those of which every rank has heard."""
        self.steps.clear()

    def weights_replaced(self) -> None:
        """Forget all, also the step that may have died: the weights of the ranks were made equal, or loaded."""
        self.begun = None
        self.steps.clear()

    def field(self) -> Field:
        """Return the field that the report compares."""
        return Field(
            LOST,
            self.steps.__len__,  # no call of Python in each backward
            _words,
            "An exception came after the mean, so the weights of that rank differ from those of the others. Call "
            "synchronize_weights() on every rank, or load the last checkpoint.",
            bits=0,  # the hash of all numbers tells of it
        )


def _words(number: int) -> str:
    if not number:
        return "has used every mean"
    return f"has not used the mean of {'the last averaged backward' if number == 1 else f'{number} averaged backwards'}"


def _a_step_runs() -> bool:
    """Whether an optimizer steps in this thread, as where it calls a closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is STEP:
            return True
        frame = frame.f_back
    return False
