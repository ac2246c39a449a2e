"""The suspicion of DPF-L01: a step uses a mean over the ranks to which a local backward has added."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from dpfuse.findings import REST, findings
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["LocalRest"]

RARELY = 64  # steps between two looks, at most


class LocalRest:
    """Looks whether the last synchronised backward before a step was followed by others, which only this rank has.

    All ranks may have added the same, such as a replayed batch. So this is a suspicion, and the ranks compare their
    weights after the step. Where these are equal each time, it looks ever less often.

    Args:
        watched: a gradient of the optimizer.
        suspect: has the ranks compare, with what this rank has seen; returns False where they compare no weights.
    """

    def __init__(self, watched: WatchedGradient, suspect: Callable[[str], bool]) -> None:
        self._watched = watched
        self._suspect = suspect
        self._averaged = 0  # such steps in a row, since other code had changed the values
        self._between = 1  # such steps until it looks again
        self._left = 0  # of them

    def before_step(self, optimizer: Optimizer) -> None:
        """Have the ranks compare if that is so; `optimizer` is about to step."""
        watched = self._watched
        if not watched.rest:
            return
        if self._left:
            self._left -= 1
            return
        # To look waits for the device. A program that averages by itself before each step is looked at ever less often.
        if self._averaged & (self._averaged - 1) or not watched.was_kept:
            self._averaged += 1
            return
        self._averaged, self._left, self._between = 0, self._between - 1, min(2 * self._between, RARELY)
        text = self._text(type(optimizer).__name__)
        if not self._suspect(text):
            findings.note(REST, watched.rank, f"rank {watched.rank}: {text}")

    def _text(self, optimizer: str) -> str:
        watched = self._watched
        one = watched.rest == 1
        backwards = "one backward that was" if one else f"{watched.rest} backwards that were"
        line = f" ({'at' if one else 'the last at'} {watched.rest_line})" if watched.rest_line else ""
        return (
            f"{optimizer} has stepped on gradients that are not the mean over the ranks. A synchronised backward has "
            f"written the gradient of {watched.name!r}, and then {backwards} not synchronised{line}; expected the "
            "synchronised backward as the last one before the step. The forward decides: enter no_sync(), or set "
            "require_backward_grad_sync, before the forward of each batch, and synchronise the last batch before the "
            "step."
        )
