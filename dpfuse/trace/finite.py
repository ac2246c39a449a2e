"""Which gradients and weights hold NaN or infinite values: fields of a trace, where they are asked for.

The host reads nothing of a GPU before the step has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from dpfuse.engine.sample import is_dense
from dpfuse.engine.tensor_hash import read
from dpfuse.trace_file import NOT_FINITE, SKIPPED, STEPPED, WEIGHTS

__all__ = ["FiniteLook", "Look", "is_finite", "is_left_out"]

Look = tuple[int, bool | Tensor]  # the place of a parameter, and whether its values are finite, if that is read yet
NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


class FiniteLook:
    """Writes into the lines of a trace what is not finite.

    A weight that is not finite before the first step of its optimizer is meant so, such as a mask of minus infinity.
    """

    def __init__(self) -> None:
        self._meant: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        self._own: list[tuple[dict[str, Any], str, Sequence[Look]]] = []  # of these backwards, and of a model
        self._stepped: list[Look] = []

    def backward_ended(self, line: dict[str, Any], model: str, looks: Sequence[Look]) -> None:
        """Take what was seen of the gradients of this rank in one backward, which has this line."""
        self._own.append((line, model, looks))

    def before_step(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        """Look at the gradients that a step is to use. The first time, look at the weights, too."""
        if optimizer not in self._meant:
            self._meant[optimizer] = _places(_looks_at(enumerate(params)))
        self._stepped = _looks_at((place, param.grad) for place, param in enumerate(params))

    def after_step(self, optimizer: Optimizer, params: Sequence[Tensor]) -> dict[str, Any]:
        """Complete the lines of the backwards since the step before, and return fields for that of the step.

        Waits for the device.
        """
        for backward, model, looks in self._own:
            if places := _places(looks):
                backward.setdefault(NOT_FINITE, {})[model] = places
        meant = self._meant.get(optimizer, [])
        weights = [place for place in _places(_looks_at(enumerate(params))) if place not in meant]
        found: dict[str, Any] = {WEIGHTS: weights} if weights else {}
        if is_left_out(optimizer):
            found[SKIPPED] = True
        elif stepped := _places(self._stepped):
            found[STEPPED] = stepped
        self._own, self._stepped = [], []
        return {NOT_FINITE: found} if found else {}


def is_finite(tensor: Tensor) -> bool | Tensor:
    """Return whether all values are finite; True where they cannot be read.

    Of a GPU it is a tensor, [] bool, for which the host does not wait.
    """
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    if values.dtype not in NUMBERS or not is_dense(values) or not values.numel():
        return True
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_cpu:
        # A sum is read ten times as fast as the largest value. It may also overflow where all values are finite.
        return math.isfinite(values.sum().item()) or bool(values.isfinite().all())
    largest: Tensor = torch.linalg.vector_norm(values, math.inf)
    return largest.isfinite()


def is_left_out(optimizer: Optimizer) -> bool:
    """Whether a `GradScaler` has a fused optimizer leave out the step that it makes now. Waits for the device."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found)


def _looks_at(tensors: Iterable[tuple[int, Tensor | None]]) -> list[Look]:
    """Return, with their places, those tensors that are not finite, and those of which it is not read yet."""
    looks = ((place, is_finite(tensor)) for place, tensor in tensors if tensor is not None)
    return [(place, finite) for place, finite in looks if finite is not True]


def _places(looks: Sequence[Look]) -> list[int]:
    """Return the places of those that are not finite. Waits once for each device."""
    finite = read([look for _, look in looks])
    return sorted({place for (place, _), fine in zip(looks, finite, strict=True) if not fine})
