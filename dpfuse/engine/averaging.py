"""How a sum over ranks becomes a mean, and in which dtype gradients travel. Pure: no tensor, no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch

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


NARROW = ("float16", "bfloat16", *FP8)
PAIR = "(torch.bfloat16, torch.float32)"  # the example in texts


@dataclass(frozen=True)
class Wire:
    """What travels in place of gradients.

    Args:
        dtype: its name, one of `dpfuse.engine.averaging.WIRES`; None sends each gradient in its own.
        sums_in_float32: False is an all-reduce, which rounds after each addition. True sends each rank a part, which it
            adds up in the order of the ranks in float32, and rounds once.

    Example:
        >>> import torch
        >>> from dpfuse.engine.averaging import Wire
        >>> Wire.of(torch.bfloat16), Wire.of((torch.bfloat16, torch.float32))
        (Wire(dtype='bfloat16', sums_in_float32=False), Wire(dtype='bfloat16', sums_in_float32=True))
    """

    dtype: str | None = None
    sums_in_float32: bool = False

    @classmethod
    def of(cls, wire_dtype: Any) -> Wire:
        """What a user means by this argument: None, a dtype, or a pair of them.

        Raises:
            ValueError: it is something else, or such numbers cannot travel or be added up.
        """
        if wire_dtype is None:
            return cls()
        is_pair = isinstance(wire_dtype, tuple)
        if is_pair and len(wire_dtype) != 2:
            raise ValueError(
                f"wire_dtype must be None, a dtype or a pair of two, such as {PAIR}, got {len(wire_dtype)} values: "
                f"{wire_dtype!r}; the first travels, in the second numbers are added up"
            )
        travels, added = wire_dtype if is_pair else (wire_dtype, None)
        if travels not in (getattr(torch, name) for name in WIRES):
            raise ValueError(
                f"wire_dtype must be None or one of {', '.join(f'torch.{name}' for name in WIRES)}, or a pair such as "
                f"{PAIR}, got {wire_dtype!r}; None sends gradients in their own dtype"
            )
        if is_pair and added != torch.float32:
            raise ValueError(
                f"the second dtype of wire_dtype must be torch.float32, in which numbers are added up, got "
                f"{added!r} in {wire_dtype!r}; pass wire_dtype=({travels}, torch.float32), or {travels} alone"
            )
        name = str(travels).removeprefix("torch.")
        return cls(name, name in FP8 or (is_pair and name in NARROW))

    @property
    def argument(self) -> str:
        """The argument by which users ask for it, for errors."""
        pair = self.sums_in_float32 and not self.is_fp8
        return f"wire_dtype=(torch.{self.dtype}, torch.float32)" if pair else f"wire_dtype=torch.{self.dtype}"

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
        return self.sums_in_float32 and dtype in NARROW

    @property
    def probe(self) -> tuple[torch.dtype, str] | None:
        """The dtype of the parts and sums that travel, and the argument that asks for them; None of an all-reduce."""
        if not self.sums_in_float32 or self.dtype is None:
            return None
        return torch.uint8 if self.is_fp8 else cast(torch.dtype, getattr(torch, self.dtype)), self.argument


UNCHANGED = Wire()  # gradients travel as they are
