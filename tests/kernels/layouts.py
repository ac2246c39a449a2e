"""Flat buffers for the kernel tests: guarded on both sides, and an answer computed without the code under test."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dpfuse_kernels import PointerTable, Slot, adamw_step
from dpfuse_kernels.flatten import flatten, flatten_reference
from dpfuse_kernels.unflatten import unflatten, unflatten_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PAIRS = [(tensor, wire) for tensor in DTYPES for wire in DTYPES]
GUARD = 32  # elements around a flat buffer that nobody may touch
POISON = float("nan")


@dataclass(frozen=True)
class Backend:
    """One implementation of both directions, and how far it may be from the exact answer."""

    name: str
    flatten: Callable[..., None]
    unflatten: Callable[..., None]
    truncates_bf16: bool  # Triton's interpreter cuts float32 to bfloat16; everything else rounds

    def __repr__(self) -> str:
        return self.name


TRITON = Backend("triton", flatten, unflatten, truncates_bf16=True)
REFERENCE = Backend("reference", flatten_reference, unflatten_reference, truncates_bf16=False)
BACKENDS = (TRITON, REFERENCE)


def adamw_step_reference(*tensors: Tensor, **settings: Any) -> None:
    """`adamw_step` with torch's own operations, whatever the device and the environment."""
    with mock.patch.dict(os.environ, DPFUSE_KERNELS="reference"):
        adamw_step(*tensors, **settings)


@dataclass(frozen=True)
class Guarded:
    """A table whose flat buffer lies inside a larger one, poisoned everywhere."""

    table: PointerTable
    memory: Tensor  # [GUARD + flat + GUARD]

    def untouched_outside_slots(self) -> bool:
        """Is the poison still wherever no slot lies?"""
        outside = torch.ones(self.memory.numel(), dtype=torch.bool)
        for slot in self.table.slots:
            start = self.memory.numel() - GUARD - self.table.flat.numel() + slot.offset
            outside[start : start + slot.numel] = False
        return bool(self.memory.isnan()[outside.to(self.memory.device)].all())


def slot_of(name: str, offset: int, tensor: Tensor) -> Slot:
    """A slot in the memory order of `tensor`, which is dense."""
    return Slot(name, offset, tuple(tensor.shape), tuple(tensor.stride()))


def guarded(
    likes: Sequence[Tensor], dtype: torch.dtype, wire: torch.dtype, *, align: int = 8, shift: int = 0, gap: int = 0
) -> Guarded:
    """A poisoned table for tensors like `likes`.

    Args:
        align: slots start at multiples of it, in elements.
        shift: elements by which the whole buffer is off its alignment.
        gap: further elements left free behind each slot.
    """
    slots, end = [], 0
    for index, like in enumerate(likes):
        slots.append(slot_of(f"p{index}", end, like))
        end += -(-(like.numel() + gap) // align) * align
    device = likes[0].device if likes else torch.device("cpu")
    memory = torch.full((2 * GUARD + shift + end,), POISON, dtype=wire, device=device)
    flat = memory[GUARD + shift : GUARD + shift + end]
    return Guarded(PointerTable(flat, slots, dtype), memory)


def expected(value: Tensor, scale: float, out: torch.dtype) -> Tensor:
    """`value * scale` in the compute type, rounded once to `out`: the definition, for one tensor."""
    compute = torch.float64 if torch.float64 in (value.dtype, out) else torch.float32
    if scale == 1.0:
        return value.to(out)
    return (value.to(compute) * torch.tensor(scale, dtype=torch.float64).to(compute).to(value.device)).to(out)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in every bit: NaN payloads and signed zeros count."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.shape == right.shape and torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))


def assert_equal(got: Tensor, want: Tensor, *, truncated: int = 0) -> None:
    """Bitwise equal, or within `truncated` units of the last bfloat16 place."""
    if truncated:
        torch.testing.assert_close(got.double(), want.double(), rtol=truncated * 2.0**-7, atol=truncated * 2.0**-133)
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
