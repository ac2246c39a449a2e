"""How far two lists of tensors lie apart, by what `sketch` has made of them. Reads numbers only. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["distance"]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Estimate the distance of two lists of tensors, taken as vectors, from the sums of each tensor.

    Example:
        >>> from dpfuse.trace.distance import distance
        >>> distance([1.0, 5.0], [1.0, 5.0]), distance([0.0, 3.0], [4.0, 0.0])
        (0.0, 5.0)
    """
    return math.sqrt(sum((ours - theirs) ** 2 for ours, theirs in zip(one, other, strict=True)))
