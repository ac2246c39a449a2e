"""The rule of DPF-L06: gradients are changed between the backwards of one window."""

from __future__ import annotations

from torch.optim import Optimizer

from dpfuse.findings import CHANGED_IN_WINDOW, findings
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["ChangedGradients"]

WINDOWS = 2  # in which that happened
STEPS = 32  # for which values are compared


class ChangedGradients:
    """Counts windows in which other code changes a gradient that is not complete yet.

    A running mean of the gradient is kept so, too. So the finding goes to a log.

    On a CPU it compares values from the beginning. On a GPU a copy takes a kernel, so it begins once torch's count of
    writes has shown that something was written.

    Args:
        watched: a gradient of the optimizer.
    """

    def __init__(self, watched: WatchedGradient) -> None:
        self._watched = watched
        self._windows = 0
        self._left = 0  # steps for which values are compared
        self._decided = False
        if not watched.param.is_cuda:
            self._look()

    def _look(self) -> None:
        self._left = STEPS
        self._watched.compares = True
        self._watched.keeps_bits += 1

    @property
    def settled(self) -> bool:
        """Whether a window without a write of other code changes nothing."""
        return not self._left and (self._decided or not self._watched.touched)

    def stop(self) -> None:
        """Compare values no more."""
        if self._left:
            self._left, self._watched.compares = 0, False
            self._watched.keeps_bits -= 1

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the window that ends with this step."""
        watched = self._watched
        if self._left == 1:
            self.stop()
        elif self._left:
            self._left -= 1
        elif watched.touched and not self._decided:
            self._decided = True  # with what is seen from now on
            self._look()
        if not watched.changes:
            return
        self._windows += 1
        if self._windows == WINDOWS:
            findings.note(
                CHANGED_IN_WINDOW,
                watched.rank,
                f"rank {watched.rank}: in {self._windows} windows of {type(optimizer).__name__}, the gradient of "
                f"{watched.name!r} was changed between two backwards that add to it, the last time {watched.changes} "
                f"times among {watched.length} backwards. The first batches are then scaled more often than the last. "
                "Expected changes such as clipping or unscaling once, between the last backward and the step. Move "
                "them there, or divide the loss.",
            )
