"""Gradient merging: where an optimizer is in its cycle of k iterations. Touches no gradient and calls no collective."""

from __future__ import annotations

from weakref import WeakSet

import torch

import dpfuse

__all__ = ["GradientMerge", "follow_optimizers"]


class GradientMerge:
    """Counts the iterations of one optimizer, and tells its models in which of them to communicate.

    An iteration ends with the optimizer's `step()`, so forwards that nobody steps after, such as those of
    a validation, do not count.

    Args:
        optimizer: the one that holds the parameters.
        k_steps: iterations per cycle; 1 merges nothing.
        avg: whether the optimizer takes the mean over the cycle, or the sum.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, k_steps: int = 1, avg: bool = True) -> None:
        self.k_steps = k_steps
        self.avg = avg
        self._optimizer = optimizer
        self._done = 0
        self._models: WeakSet[dpfuse.DataParallel] = WeakSet()
        _all_merges.add(self)

    def __str__(self) -> str:
        return f"{type(self._optimizer).__name__} after {self._done} of {self.k_steps} iterations"

    @property
    def position(self) -> tuple[int, int]:
        """Iterations of the cycle: those that have ended, all. Optimizers over one model must agree on it."""
        return self._done, self.k_steps

    @property
    def pending(self) -> bool:
        """Whether gradients have accumulated that the optimizer has not used yet."""
        return self._done > 0

    def advance(self) -> bool:
        """End an iteration. Returns whether it was the last of its cycle."""
        was_last = self._is_last
        self._begin(0 if was_last else self._done + 1)
        return was_last

    def restart(self) -> None:
        """Begin a cycle, wherever the present one is."""
        self._begin(0)

    @property
    def _is_last(self) -> bool:
        return self._done == self.k_steps - 1

    def _begin(self, iteration: int) -> None:
        self._done = iteration
        for model in list(self._models):
            if model.reducer is not None:
                # A forward that no backward followed must not decide over a backward of another iteration.
                model.reducer.forget_forwards()
            follow_optimizers(model)


_all_merges: WeakSet[GradientMerge] = WeakSet()


def follow_optimizers(model: dpfuse.DataParallel) -> list[GradientMerge]:
    """Let a model communicate in the last iterations of the optimizers that hold its parameters.

    Returns:
        Their cycles. Where these do not agree, the model communicates in the last iteration of each.
    """
    ids = {id(param) for param in model.parameters()}
    merges = [
        merge
        for merge in _all_merges
        if any(id(param) in ids for group in merge._optimizer.param_groups for param in group["params"])
    ]
    for merge in merges:
        merge._models.add(model)
    model.require_backward_grad_sync = not merges or any(merge._is_last for merge in merges)
    return merges
