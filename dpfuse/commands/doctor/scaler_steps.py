"""Notes which steps a scaler makes, and which it skips."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from dpfuse.commands.doctor.replaced_function import replace
from dpfuse.commands.doctor.untraced_steps import UntracedSteps
from dpfuse.trace.finite import is_left_out

__all__ = ["ScalerSteps"]

SCALER: Any = torch.amp.GradScaler


class ScalerSteps:
    """Hears `GradScaler.step` from now on.

    Args:
        untraced: is told of skipped steps. A scaler that skips all would not end the run otherwise.

    Attributes:
        scaled: by the id of an optimizer, which of its steps a scaler has let pass.
    """

    def __init__(self, untraced: UntracedSteps) -> None:
        self._untraced = untraced
        self.scaled: dict[int, dict[str, Any]] = {}
        replace(SCALER, "step", self._step)

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`, before a step that may end the run is counted."""
        if id(optimizer) in self.scaled and is_left_out(optimizer):
            self.scaled[id(optimizer)]["made"][-1] = False

    def _step(self, plain: Any, /, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return plain(scaler, optimizer, *args, **kwargs)
        facts = {"optimizer": type(optimizer).__name__, "made": []}
        made = self.scaled.setdefault(id(optimizer), facts)["made"]
        made.append(True)  # a step that is made may end the run
        result = plain(scaler, optimizer, *args, **kwargs)
        if any(found.item() for found in scaler._found_inf_per_device(optimizer).values()):
            made[-1] = False
            self._untraced.add(made.count(False))
        return result
