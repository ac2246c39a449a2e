"""The rule of DPF-L06: gradients are changed between the backwards of one window."""

from __future__ import annotations

from torch.optim import Optimizer

from dpfuse.loop.findings import CHANGED_IN_WINDOW, findings
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["ChangedGradients"]

WINDOWS = 2  # in which that happened
LOOKS = 32  # steps for which values are compared: on a CPU a program with such a mistake makes it from the beginning


class ChangedGradients:
    """Counts windows in which other code writes a gradient that is not complete yet.

    Args:
        watched: a gradient of the optimizer.
    """

    def __init__(self, watched: WatchedGradient) -> None:
        self._watched = watched
        self._windows = 0
        self._steps = 0
        self._looks = not watched.param.is_cuda  # on which a copy takes a kernel
        watched.keeps_bits += self._looks

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the window that ends with this step."""
        watched = self._watched
        if not watched.changes:
            return
        self._windows += 1
        if self._windows == WINDOWS:
            findings.warn(
                CHANGED_IN_WINDOW,
                f"rank {watched.rank}: in {self._windows} windows of {type(optimizer).__name__}, the gradient of "
                f"{watched.name!r} was changed between two backwards that add to it, the last time {watched.changes} "
                f"times among {watched.length} backwards. The first batches are then scaled more often than the last. "
                "Expected changes such as clipping or unscaling once, between the last backward and the step. Move "
                "them there, or divide the loss. If this is meant for each batch, pass "
                'check_loop="off" to the wrapper.',
            )
