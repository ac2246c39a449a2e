"""How a sum over ranks becomes a mean. Pure arithmetic: knows no tensor and no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

__all__ = ["FP8", "WIRES", "Averaging", "averaging_for", "real_dtype"]

SUPPORTED = ("float16", "bfloat16", "float32", "float64")
REAL = {"complex64": "float32", "complex128": "float64"}  # complex numbers travel as pairs of these
FP8 = ("float8_e4m3fn", "float8_e5m2")  # which travel with a scale for each block of elements
WIRES = ("float16", "bfloat16", "float32", *FP8)


@dataclass(frozen=True)
class Averaging:
    """What is done to each gradient element around the all-reduce SUM.

    `pre_scale` multiplies before the sum, while packing, in float64 for float64 and in float32 for the
    rest, so that a sum of large half-precision gradients cannot overflow where their mean would not.
    `post_scale` multiplies what is unpacked; it is 1 but for plain sums that travel narrowed to float16.
    """

    dtype: str  # of the flat buffer
    pre_scale: float
    post_scale: float = 1.0


def real_dtype(dtype: str) -> str:
    """The dtype of what is added up: that of the parts of a complex number, else the same.

    Example:
        >>> from dpfuse.engine.averaging import real_dtype
        >>> real_dtype("complex64"), real_dtype("float64")
        ('float32', 'float64')
    """
    return REAL.get(dtype, dtype)


def averaging_for(dtype: str, world_size: int, scale: Any = None, wire: str | None = None) -> Averaging:
    """The averaging of gradients of `dtype` over `world_size` ranks.

    Args:
        dtype: name of the gradients' dtype; the parts of complex ones are averaged as real numbers.
        world_size: number of ranks, at least 1.
        scale: factor on each rank's gradient; None is `1 / world_size`, the mean; 1.0 is the plain sum.
        wire: name of the dtype that travels, one of `WIRES`; None sends gradients as they are. Those of
            float64 and complex128 always travel as they are.

    Returns:
        The averaging. Multiplying by the reciprocal before the sum gives the bits of torch's
        DistributedDataParallel, and avoids NCCL's AVG, whose factor is rounded to bfloat16.

    Raises:
        TypeError: `dtype` cannot be averaged, or `scale` is not a number.
        ValueError: `scale` is not finite.

    Example:
        >>> from dpfuse.engine.averaging import averaging_for
        >>> averaging_for("float32", 4).pre_scale
        0.25
    """
    if dtype not in (*SUPPORTED, *REAL):
        raise TypeError(
            f"gradients of dtype {dtype} cannot be averaged; expected one of {', '.join((*SUPPORTED, *REAL))}. "
            "Freeze such a parameter, or convert it."
        )
    dtype = real_dtype(dtype)
    if wire is None or dtype == "float64":
        wire = dtype
    if scale is None:
        return Averaging(wire, 1.0 / world_size)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(
            f"scale must be a number, got {scale!r} of type {type(scale).__name__}; "
            "leave it out for the mean, pass 1.0 for the sum"
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}; leave it out for the mean")
    if wire == "float16" != dtype:
        # A number that float16 can just hold must not be added to its like; the mean of both it can hold.
        return Averaging(wire, 1.0 / world_size, float(scale) * world_size)
    return Averaging(wire, float(scale))
