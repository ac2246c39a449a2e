"""Gradient merging: counts an optimizer's cycle of k iterations. Touches no gradient and calls no collective."""

from __future__ import annotations

from weakref import WeakSet

import torch

import dpfuse

__all__ = ["GradientMerge", "follow_optimizers"]


class GradientMerge:
    """Counts the iterations of one optimizer, and tells its models in which iterations to communicate.

    An iteration ends with the optimizer's `step()`. So forwards without a step, such as those of a validation, do not
    count.

    Args:
        k_steps: iterations per cycle; 1 merges nothing.
        avg: True uses the mean over the cycle, False the sum.
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
        """Ended iterations and all iterations of the cycle. It must be equal for all optimizers over one model."""
        return self._done, self.k_steps

    @property
    def pending(self) -> bool:
        """Whether there are accumulated gradients that the optimizer has not used yet."""
        return self._done > 0

    def advance(self) -> bool:
        """End an iteration. Return whether it was the last of its cycle."""
        was_last = self._is_last
        self._begin(0 if was_last else self._done + 1)
        return was_last

    def restart(self) -> None:
        """Begin a new cycle."""
        self._begin(0)

    @property
    def _is_last(self) -> bool:
        return self._done == self.k_steps - 1

    def _begin(self, iteration: int) -> None:
        self._done = iteration
        for model in list(self._models):
            if model.reducer is not None:
                # A forward without a backward must not affect a backward of another iteration.
                model.reducer.forget_forwards()
            follow_optimizers(model)


_all_merges: WeakSet[GradientMerge] = WeakSet()


def follow_optimizers(model: dpfuse.DataParallel) -> list[GradientMerge]:
    """Let a model communicate in the last iteration of each optimizer of its parameters. Return their cycles."""
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
