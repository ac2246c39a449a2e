"""How a sum over ranks becomes a mean. Pure arithmetic: knows no tensor and no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

__all__ = ["Averaging", "averaging_for"]

SUPPORTED = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Averaging:
    """What is done to each gradient element around the all-reduce SUM.

    `pre_scale` multiplies before the sum, while packing, in float64 for float64 and in float32 for the
    rest, so that a sum of large half-precision gradients cannot overflow where their mean would not.
    """

    dtype: str  # of the flat buffer
    pre_scale: float


def averaging_for(dtype: str, world_size: int, scale: Any = None) -> Averaging:
    """The averaging of gradients of `dtype` over `world_size` ranks.

    Args:
        dtype: name of the gradients' dtype.
        world_size: number of ranks, at least 1.
        scale: factor on each rank's gradient; None is `1 / world_size`, the mean; 1.0 is the plain sum.

    Returns:
        The averaging. Multiplying by the reciprocal before the sum gives the bits of torch's
        DistributedDataParallel, and avoids NCCL's AVG, whose factor is rounded to bfloat16.

    Raises:
        TypeError: `dtype` cannot be averaged, or `scale` is not a number.
        ValueError: `scale` is not finite.

    Example:
        >>> from dpfuse.averaging import averaging_for
        >>> averaging_for("float32", 4).pre_scale
        0.25
    """
    if dtype not in SUPPORTED:
        raise TypeError(
            f"gradients of dtype {dtype} cannot be averaged; expected one of {', '.join(SUPPORTED)}. "
            "Freeze such a parameter, or convert it."
        )
    if scale is None:
        return Averaging(dtype, 1.0 / world_size)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(
            f"scale must be a number, got {scale!r} of type {type(scale).__name__}; "
            "leave it out for the mean, pass 1.0 for the sum"
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}; leave it out for the mean")
    return Averaging(dtype, float(scale))
