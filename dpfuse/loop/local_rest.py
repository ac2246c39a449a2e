"""The rule of DPF-L01: a step on a mean over the ranks to which later backwards have added what one rank has."""

from __future__ import annotations

from torch.optim import Optimizer

from dpfuse.loop.findings import REST, findings
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["LocalRest"]


class LocalRest:
    """Looks whether the last synchronised backward before a step was followed by others, which only this rank has.

    Args:
        watched: a gradient of the optimizer.
        raises: whether that is an error.
    """

    def __init__(self, watched: WatchedGradient, *, raises: bool) -> None:
        self._watched = watched
        self._raises = raises
        self._averaged = 0  # such steps in a row, since other code had changed the values

    def before_step(self, optimizer: Optimizer) -> None:
        """Warn if that is so.

        Args:
            optimizer: is about to step.

        Raises:
            DPFuseError: in place of the warning.
        """
        watched = self._watched
        if not watched.rest:
            return
        # To look waits for the device. A program that averages by itself before each step is looked at ever less often.
        if self._averaged & (self._averaged - 1) or not watched.was_kept:
            self._averaged += 1
            return
        self._averaged = 0
        text = self._text(type(optimizer).__name__)
        if self._raises:
            raise findings.error(REST, f'{text} To go on all the same, pass check_loop="warn" to the wrapper.')
        findings.warn(REST, text)

    def _text(self, optimizer: str) -> str:
        watched = self._watched
        one = watched.rest == 1
        backwards = "one backward that was" if one else f"{watched.rest} backwards that were"
        means = "A synchronised backward has" if watched.means == 1 else f"{watched.means} synchronised backwards have"
        line = f" ({'at' if one else 'the last at'} {watched.rest_line})" if watched.rest_line else ""
        return (
            f"rank {watched.rank}: {optimizer} steps on gradients that are not the mean over the ranks. {means} "
            f"written the gradient of {watched.name!r}, and then {backwards} not synchronised{line}; expected the "
            "synchronised backward as the last one before the step. The forward decides: enter no_sync(), or set "
            "require_backward_grad_sync, before the forward of each batch, and synchronise the last batch before the "
            "step."
        )
