"""How a sum over ranks becomes a mean, and in which dtype gradients travel. Pure: no tensor, no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch

from dpfuse.exclusions import refuse

__all__ = ["FP8", "UNCHANGED", "WIRES", "Averaging", "Wire", "averaging_for", "real_dtype"]

SUPPORTED = ("float16", "bfloat16", "float32", "float64")
REAL = {"complex64": "float32", "complex128": "float64"}  # complex numbers travel as pairs of these
FP8 = ("float8_e4m3fn", "float8_e5m2")  # which travel with a scale for each block of elements
WIRES = ("float16", "bfloat16", "float32", *FP8)


@dataclass(frozen=True)
class Averaging:
    """What is done to each gradient element around the all-reduce SUM.

    `pre_scale` multiplies before the sum, while packing, in float64 for float64 and in float32 for the
    rest, so that a sum of large half-precision gradients cannot overflow where their mean would not.
    `post_scale` multiplies what is unpacked. It is 1, except for plain sums that travel narrowed to float16.
    """

    dtype: str  # of the communication buffer
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


REDUCES = ("ring", "fp32")
NARROW = ("float16", "bfloat16", *FP8)


@dataclass(frozen=True)
class Wire:
    """What travels in place of gradients.

    Args:
        dtype: its name, one of `dpfuse.engine.averaging.WIRES`; None sends each gradient in its own.
        reduce: "ring" is an all-reduce, which rounds after each addition. "fp32" sends each rank a part, which it adds
            up in the order of the ranks in float32, and rounds once.

    Example:
        >>> import torch
        >>> from dpfuse.engine.averaging import Wire
        >>> Wire.of(torch.bfloat16, None), Wire.of(torch.float8_e4m3fn, None)
        (Wire(dtype='bfloat16', reduce='ring'), Wire(dtype='float8_e4m3fn', reduce='fp32'))
    """

    dtype: str | None = None
    reduce: str = "ring"

    @classmethod
    def of(cls, wire_dtype: Any, wire_reduce: Any, *, deterministic: bool = False) -> Wire:
        """What a user means by these arguments.

        Raises:
            ValueError: one of them cannot be used, or not with another.
        """
        if wire_dtype is not None and wire_dtype not in (getattr(torch, name) for name in WIRES):
            raise ValueError(
                f"wire_dtype must be None or one of {', '.join(f'torch.{name}' for name in WIRES)}, got "
                f"{wire_dtype!r}; None sends gradients in their own dtype"
            )
        if wire_reduce is not None and wire_reduce not in REDUCES:
            raise ValueError(
                f"wire_reduce must be None or one of {', '.join(map(repr, REDUCES))}, got {wire_reduce!r}; None is "
                "'fp32' for float8, and 'ring' for the rest"
            )
        name = None if wire_dtype is None else str(wire_dtype).removeprefix("torch.")
        if wire_reduce == "ring":
            in_use = {"float8 wire": f"wire_dtype={wire_dtype}"} if name in FP8 else {}
            in_use |= {"deterministic": "deterministic=True"} if deterministic else {}
            refuse("ring", "wire_reduce='ring' was passed with", in_use, ValueError)
        return cls(name, wire_reduce or ("fp32" if name in FP8 else "ring"))

    @property
    def argument(self) -> str:
        """The argument by which users ask for its dtype, for errors."""
        return f"wire_dtype=torch.{self.dtype}"

    @property
    def narrows(self) -> bool:
        """Whether gradients may lose bits that their own dtype has."""
        return self.dtype in NARROW

    @property
    def is_fp8(self) -> bool:
        """Whether blocks of 8-bit numbers travel."""
        return self.dtype in FP8

    def narrowed(self, dtype: str) -> bool:
        """Whether gradients of this real dtype travel in a narrower one, or one with another range."""
        return self.narrows and dtype not in (self.dtype, "float64")

    def adds_in_float32(self, dtype: str) -> bool:
        """Whether what travels in `dtype` is added up in float32 though it is narrower."""
        return self.reduce == "fp32" and dtype in NARROW

    @property
    def probe(self) -> tuple[torch.dtype, str] | None:
        """The dtype of the parts and sums that travel, and the argument that asks for them; None of an all-reduce."""
        if self.reduce != "fp32" or self.dtype == "float32":
            return None
        if self.is_fp8:
            return torch.uint8, self.argument
        return cast(torch.dtype, getattr(torch, self.dtype or "float32")), 'wire_reduce="fp32"'


UNCHANGED = Wire()  # gradients travel as they are
