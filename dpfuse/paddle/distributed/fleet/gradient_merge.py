"""Gradient merging: where an optimizer is in its cycle of k iterations. Touches no gradient and calls no collective."""

from __future__ import annotations

from weakref import WeakSet

import dpfuse

__all__ = ["GradientMerge"]


class GradientMerge:
    """Counts the iterations of one optimizer and lets its models communicate in the last of each cycle only.

    An iteration ends with the optimizer's `step()`, so forwards that nobody steps after, such as those of
    a validation, do not count.

    Args:
        k_steps: iterations per cycle, at least 2.
        avg: whether the optimizer takes the mean over the cycle, or the sum.
    """

    def __init__(self, k_steps: int, avg: bool) -> None:
        self.k_steps = k_steps
        self.avg = avg
        self._done = 0
        self._models: WeakSet[dpfuse.DataParallel] = WeakSet()

    @property
    def pending(self) -> bool:
        """Whether gradients have accumulated that the optimizer has not used yet."""
        return self._done > 0

    def join(self, model: dpfuse.DataParallel) -> None:
        """Switch the synchronisation of `model` from now on."""
        self._models.add(model)
        self._switch()

    def advance(self) -> bool:
        """End an iteration. Returns whether it was the last of its cycle."""
        self._done = (self._done + 1) % self.k_steps
        self._switch()
        return self._done == 0

    def _switch(self) -> None:
        for model in self._models:
            model.require_backward_grad_sync = self._done == self.k_steps - 1
