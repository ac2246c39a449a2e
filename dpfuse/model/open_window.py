"""Whether gradients have accumulated that no step has used yet. Knows no reducer."""

from __future__ import annotations

from typing import Any

from dpfuse.engine.events import Watcher
from dpfuse.engine.sync import GradSync
from dpfuse.engine.sync_decision import Window

__all__ = ["OpenWindow"]


class OpenWindow(Watcher):
    """Knows whether a window of `no_sync()` is open whose gradients may still be needed.

    The step of any optimizer ends it: a program may average by hand, or weights in place of gradients, or zero later
    what it does not use. Where no step of an optimizer of torch was ever heard, nothing is said.

    Args:
        window: of the model.
        grads: the synchronisation of its gradients.
    """

    def __init__(self, window: Window, grads: GradSync) -> None:
        self._window = window
        self._grads = grads
        self._added_at = 0  # steps that were heard when a backward last added to gradients without averaging

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        if added:
            self._added_at = self._grads.lost.heard

    def holds_gradients(self) -> bool:
        """Whether a window is open, and its gradients are not zero."""
        steps = self._grads.lost.heard
        if not (steps and steps == self._added_at and self._window.is_open):
            return False
        params, feeds = self._grads.params, self._grads.reducer.accumulation.feeds
        ids = set(map(id, params))
        return any(feed.holds_of(ids) for feed in feeds.values()) or any(map(_is_filled, params))


def _is_filled(param: Any) -> bool:
    grad = param.grad
    return grad is not None and bool(grad._nnz() if grad.is_sparse else grad.count_nonzero())
