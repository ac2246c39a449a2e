"""The mean of the gradients of some batches, from a bare module. Uses no process and nothing of the library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tests.distributed.failures.opening.programs import PROGRAMS, Bare, Pass

__all__ = ["Bits", "bits_of", "differs", "mean_of"]

Bits = tuple[bytes | None, ...]  # of some tensors

# The sums of two ways of adding differ in their last bits. A gradient that is told from two weights has those of these.
TOLERANCE, OF_WEIGHTS = 1e-6, 1e-5


def bits_of(values: Sequence[Tensor | None]) -> Bits:
    """Return the bits of tensors, or None where there is none."""
    return tuple(None if value is None else value.detach().contiguous().numpy().tobytes() for value in values)


@lru_cache(maxsize=4096)  # most trials go through the same weights and batches
def mean_of(program: str, weights: Bits, batches: tuple[tuple[int, str], ...]) -> Bits:
    """Return the mean of all ranks' gradients.

    Args:
        program: its name.
        weights: of the module, before the step.
        batches: the number of the batch of each rank, and the part of the step in which a dummy is in its place.
    """
    size, made = len(batches), PROGRAMS[program]
    sums: list[Tensor | None] = [None] * len(weights)
    for rank, (number, dummy) in enumerate(batches):
        module = made.made()
        with torch.no_grad():
            for param, values in zip(module.parameters(), weights, strict=True):
                param.copy_(torch.from_numpy(_numbers(values)).view_as(param))
        made.step(Pass(Bare(module, rank, size), rank, size, number, dummy))
        sums = [_added(total, param.grad) for total, param in zip(sums, module.parameters(), strict=True)]
    return bits_of([None if total is None else total / made.terms(size) for total in sums])


@lru_cache(maxsize=4096)
def differs(got: Bits, expected: Bits, *, of_weights: bool) -> bool:
    """Whether gradients are not the expected ones; `of_weights` says that they were told from two weights."""
    tolerance = OF_WEIGHTS if of_weights else TOLERANCE
    for one, other in zip(got, expected, strict=True):
        if (one is None) != (other is None):
            return True
        if one is not None and not np.allclose(_numbers(one), _numbers(other), atol=tolerance):
            return True
    return False


def _numbers(values: bytes | None) -> np.ndarray:
    assert values is not None
    return np.frombuffer(values, dtype=np.float32).copy()


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other
