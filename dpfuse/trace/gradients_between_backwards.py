"""Finds where the program has scaled or cut gradients of one model between two backwards, by a few elements of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from dpfuse.engine.sample import Sample, is_dense, sample_of
from dpfuse.trace.rescaling import Pair, rescaled
from dpfuse.trace_file import RESCALED

__all__ = ["GradientsBetween"]


class GradientsBetween:
    """Samples of what a backward leaves in `.grad`, and of what the next one finds there, until an optimizer steps.

    Args:
        params: of the model.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._left: dict[int, Sample] = {}  # by the last backward since a step
        self._pairs: list[Pair] = []  # of the backward that runs
        self._seen: list[tuple[dict[str, Any], list[Pair]]] = []  # with the lines of these backwards

    def begin(self) -> None:
        """Begin another backward."""
        self._pairs = []

    def reached(self) -> None:
        """Compare, before the backward that runs adds the first gradient."""
        now = self._samples(self._left)
        self._pairs = [Pair(place, before, now[place]) for place, before in self._left.items() if place in now]

    def backward_ended(self, line: dict[str, Any]) -> None:
        """Take the samples of a backward, which has this line."""
        self._seen.append((line, self._pairs))
        self._left = self._samples(range(len(self._params)))

    def after_step(self, model: str) -> None:
        """Complete the lines of the backwards since the step before. Waits for the device.

        Args:
            model: its number.
        """
        for backward, pairs in self._seen:
            if places := rescaled(pairs):
                backward.setdefault(RESCALED, {})[model] = places
        self._seen, self._left = [], {}  # an optimizer may change gradients

    def _samples(self, places: Iterable[int]) -> dict[int, Sample]:
        grads = ((place, self._params[place].grad) for place in places)
        return {place: sample_of(grad, spread=True) for place, grad in grads if grad is not None and is_dense(grad)}
