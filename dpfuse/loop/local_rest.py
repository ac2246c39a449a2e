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
        rank: of this process.
        raises: whether that is an error.
    """

    def __init__(self, watched: WatchedGradient, rank: int, *, raises: bool) -> None:
        self._watched = watched
        self._rank = rank
        self._raises = raises

    def before_step(self, optimizer: Optimizer) -> None:
        """Warn if that is so.

        Raises:
            DPFuseError: in place of the warning.
        """
        watched = self._watched
        if not (watched.rest and watched.was_kept):
            return
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
            f"rank {self._rank}: {optimizer} steps on gradients that are not the mean over the ranks. {means} written "
            f"the gradient of {watched.name!r}, and then {backwards} not synchronised{line}; expected the synchronised "
            "backward as the last one before the step. The forward decides: enter no_sync(), or set "
            "require_backward_grad_sync, before the forward of each batch, and synchronise the last batch before the "
            "step."
        )
