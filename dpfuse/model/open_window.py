"""Whether gradients have accumulated that no step has used yet. Knows no reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dpfuse.engine.events import Watcher
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.sync_decision import Window

__all__ = ["OpenWindow"]


class OpenWindow(Watcher):
    """Knows whether a window of `no_sync()` is open whose gradients may still be needed.

    The step of any optimizer ends it: a program may average by hand, or weights in place of gradients, or zero later
    what it does not use. Where no step of an optimizer of torch was ever heard, nothing is said.

    Args:
        window: of the model.
        steps: returns how many steps of any optimizer were heard.
        params: returns the parameters whose gradients are averaged.
        feeds: returns what holds gradients in place of `.grad`.
    """

    def __init__(
        self,
        window: Window,
        steps: Callable[[], int],
        params: Callable[[], Sequence[Tensor]],
        feeds: Callable[[], Sequence[Accumulating]],
    ) -> None:
        self._window = window
        self._steps = steps
        self._added_at = 0  # how many there were when a backward last added to gradients without averaging
        self._params = params
        self._feeds = feeds

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        if added:
            self._added_at = self._steps()

    def holds_gradients(self) -> bool:
        """Whether a window is open, and its gradients are not zero."""
        steps = self._steps()
        if not (steps and steps == self._added_at and self._window.is_open):
            return False
        params = self._params()
        ids = set(map(id, params))
        return any(feed.holds_of(ids) for feed in self._feeds()) or any(map(_is_filled, params))


def _is_filled(param: Any) -> bool:
    grad = param.grad
    return grad is not None and bool(grad._nnz() if grad.is_sparse else grad.count_nonzero())
