"""Hashes of the weights and gradients of an optimizer before and after its step, and sketches of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpfuse.engine.tensor_hash import Hash, hash_of, joined
from dpfuse.trace.signed_sum import signed_sum
from dpfuse.trace_file import BEFORE_STEP

__all__ = ["StepHashes"]


class StepHashes:
    """Fields of the line of a step.

    Args:
        sketch: whether to write a sketch of each gradient, too.
    """

    def __init__(self, *, sketch: bool) -> None:
        self._sketch = sketch
        self._stepped: list[Hash] = []  # the gradients
        self._before: list[Hash] = []  # the weights
        self._gradient: list[Tensor | float] = []  # its sketch

    def before_step(self, params: Sequence[Tensor]) -> None:
        """Take the gradients that a step is to use, and the weights that it is to change."""
        self._stepped = [hash_of(param.grad) for param in params]
        self._before = [hash_of(param) for param in params]
        if self._sketch:
            self._gradient = [0.0 if param.grad is None else signed_sum(param.grad) for param in params]

    def after_step(self, params: Sequence[Tensor], *, deep: bool) -> dict[str, Any]:
        """Return the fields.

        Args:
            params: of the optimizer.
            deep: whether each weight has its own hash, and the line says what there was before the step.
        """
        hashes = [hash_of(param) for param in params]
        line: dict[str, Any] = {"all_parameters": joined(hashes)}
        if deep:
            line = {"stepped": self._stepped, BEFORE_STEP: self._before, "parameters": hashes}
            if self._sketch:
                line["gradient sketch"] = self._gradient
        self._stepped, self._before = [], []
        return line
