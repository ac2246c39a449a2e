"""How gradients travel: in which dtype, and how they are added up there. Knows no process group and no bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from dpfuse.engine.averaging import FP8, WIRES

__all__ = ["UNCHANGED", "Wire"]

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
        >>> from dpfuse.engine.wire import Wire
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
        if name in FP8 and wire_reduce == "ring":
            raise ValueError(
                f"wire_reduce='ring' was passed with wire_dtype={wire_dtype}, expected 'fp32' or None: no back end "
                "adds up numbers of 8 bits. Leave wire_reduce out."
            )
        if deterministic and wire_reduce == "ring":
            raise ValueError(
                "wire_reduce='ring' was passed with deterministic=True, expected 'fp32' or None: in a ring the order "
                "of additions depends on where an element lies. Leave one of the two out."
            )
        return cls(name, wire_reduce or ("fp32" if name in FP8 else "ring"))

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
        """What the back end has to exchange for it, and by which argument; None: nothing but all-reduces."""
        if self.reduce != "fp32" or self.dtype == "float32":
            return None
        if self.is_fp8:
            return torch.uint8, f"wire_dtype=torch.{self.dtype}"
        return cast(torch.dtype, getattr(torch, self.dtype or "float32")), 'wire_reduce="fp32"'


UNCHANGED = Wire()  # gradients travel as they are
