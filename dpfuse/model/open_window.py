"""Whether gradients were accumulated that no optimizer has used yet. Knows no reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.events import Watcher
from dpfuse.engine.feeds.accumulating import refuse_accumulated
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError

__all__ = ["OpenWindow"]


class OpenWindow(Watcher):
    """Hears whether a step followed backwards that are not synchronised, and refuses what loses their gradients.

    A program that averages by hand, or weights in place of gradients, steps on gradients of such backwards. So a step
    ends the window, too. Where no step of an optimizer of torch was ever heard, nothing is refused.

    Args:
        window: of the model.
        params: returns the parameters whose gradients are averaged.
    """

    def __init__(self, window: Window, params: Callable[[], Sequence[Tensor]]) -> None:
        self._window = window
        self._params = params
        self._accumulates = False
        self._heard = False  # whether an optimizer has stepped on parameters of this model

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        self._accumulates |= added

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        if self._accumulates or not self._heard:
            ids = set(map(id, self._params()))
            if any(id(param) in ids for group in optimizer.param_groups for param in group["params"]):
                self._accumulates, self._heard = False, True

    def refuse(self, what: str, rank: int) -> None:
        """Raise if a window is open.

        Args:
            what: was called.
            rank: of this process.

        Raises:
            DPFuseError: gradients were accumulated that are neither averaged nor used nor zero.
        """
        params = self._params()
        refuse_accumulated(params, what)
        if not (self._heard and self._accumulates and self._window.is_open and any(map(_is_filled, params))):
            return
        raise DPFuseError(
            f"rank {rank}: {what} was called inside a window of no_sync(): gradients have accumulated that no step has "
            "used, and a checkpoint holds none; expected it between two steps. Call it after optimizer.step(); to drop "
            "these gradients, call optimizer.zero_grad() before."
        )


def _is_filled(param: Any) -> bool:
    grad = param.grad
    return grad is not None and bool(grad.count_nonzero() if not grad.is_sparse else grad._nnz())
