"""The static description of one flat buffer: which tensor lies where. Knows no bucket and no kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpfuse_kernels.host_plan import HostPlan
    from dpfuse_kernels.launcher import Launcher

__all__ = ["PointerTable", "Slot"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a flat buffer.

    Args:
        name: what error texts call the tensor.
        offset: where the slot starts, in elements from the start of the flat buffer.
        shape: the tensor's shape.
        stride: its strides in elements: a dense permutation, so that the slot fills elements `offset` to
            `offset + numel` without holes. Strides of size-1 dimensions are free.

    Example:
        >>> Slot("weight", offset=4, shape=(2, 3), stride=(3, 1)).numel
        6
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A new tensor of the dtype and device of `tensor` in this slot's memory order, not initialised."""
        return torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)


class PointerTable:
    """The places of all tensors in one flat buffer, built once per plan and used at every pack and unpack.

    Args:
        flat: the buffer, 1-D and contiguous; its dtype is the wire dtype. The table keeps it alive and counts
            on its address: never resize it.
        slots: one per tensor, in the order in which `flatten` and `unflatten` get the tensors. They may lie
            anywhere in `flat` but must not overlap.
        dtype: dtype of the tensors that are packed and unpacked.

    Attributes:
        views: per slot, `flat` seen with the slot's shape and strides.
        address: of `flat`, in bytes.

    Raises:
        ValueError: a slot leaves the buffer, overlaps another one or is not dense; `flat` is not 1-D and
            contiguous; a dtype other than float32, float16, bfloat16, float64.

    Example:
        >>> flat = torch.zeros(8)
        >>> slots = [Slot("a", 0, (3,), (1,)), Slot("b", 4, (2, 2), (2, 1))]
        >>> table = PointerTable(flat, slots, torch.float32)
        >>> table.views[1].shape
        torch.Size([2, 2])
    """

    def __init__(self, flat: Tensor, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        self.flat = flat
        self.slots = tuple(slots)
        self.dtype = dtype
        self._check_layout()
        self.address = flat.data_ptr()
        self.triton: bool | None = None  # whether kernels run over it, once `backend` has chosen
        self.views: list[Tensor] = self.new_views()

    def _check_layout(self) -> None:
        flat = self.flat
        for what, got in (("flat.dtype", flat.dtype), ("dtype", self.dtype)):
            if got not in DTYPES:
                raise ValueError(
                    f"{what} is {got}, expected one of {', '.join(map(str, DTYPES))}. "
                    "Leave tensors of other types out of fused buffers."
                )
        if flat.layout is not torch.strided or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"flat has shape {tuple(flat.shape)} and layout {flat.layout}, expected a contiguous 1-D tensor. "
                "Allocate it with torch.zeros(numel)."
            )
        check_slots(self.slots, flat.numel())

    def new_views(self) -> list[Tensor]:
        """Per slot, a new tensor over its part of `flat`."""
        base = self.flat.storage_offset()
        return [self.flat.as_strided(slot.shape, slot.stride, base + slot.offset) for slot in self.slots]

    def first(self, count: int) -> PointerTable:
        """A table of the first `count` slots alone, over the part of the buffer that ends with them; same views."""
        end = max((slot.offset + slot.numel for slot in self.slots[:count]), default=0)
        table = PointerTable(self.flat[:end], self.slots[:count], self.dtype)
        table.views[:] = self.views[:count]
        return table

    @contextmanager
    def gaps_kept(self, *beside: Tensor, zero: bool = False) -> Iterator[None]:
        """Put back what lies between the slots after the buffer was written as a whole; `zero` makes it zeros first.

        The same of buffers `beside` it, which have its length.
        """
        if self._gaps is None:
            yield
            return
        # To `data`: autograd is not to take that for a write to the slots, which a graph may have saved.
        buffers = [buffer.data for buffer in (self.flat, *beside)]
        kept = [buffer[self._gaps] for buffer in buffers]
        if zero:
            buffers[0][self._gaps] = 0
        yield
        for buffer, values in zip(buffers, kept, strict=True):
            buffer[self._gaps] = values

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type in which the scale is applied: float64 if either side is, else float32."""
        return torch.float64 if torch.float64 in (self.dtype, self.flat.dtype) else torch.float32

    # What the checks of every call compare with, as lists: one C-level comparison instead of a Python loop. Taken
    # from the slots, not from the views: those are handed out as gradients, and `gradient.data = x` moves one.

    @cached_property
    def numels(self) -> list[int]:
        """Elements per slot."""
        return [slot.numel for slot in self.slots]

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape per slot, as `Tensor.size` returns it."""
        return [torch.Size(slot.shape) for slot in self.slots]

    @cached_property
    def strides(self) -> list[tuple[int, ...]]:
        """Strides per slot, in elements."""
        return [tuple(slot.stride) for slot in self.slots]

    @cached_property
    def ndims(self) -> int:
        """Sum of the slots' numbers of dimensions."""
        return sum(len(slot.shape) for slot in self.slots)

    @cached_property
    def addresses(self) -> list[int]:
        """Address per slot, in bytes; 0 for an empty one, as `Tensor.data_ptr` gives it."""
        size = self.flat.element_size()
        return [self.address + slot.offset * size if slot.numel else 0 for slot in self.slots]

    @cached_property
    def contiguous(self) -> bool:
        """Are all slots in C order?"""
        return all(view.is_contiguous() for view in self.new_views())

    @cached_property
    def ascending(self) -> bool:
        """Does each slot lie behind the one before it?"""
        return all(a.offset + a.numel <= b.offset for a, b in zip(self.slots, self.slots[1:], strict=False))

    @cached_property
    def storage_range(self) -> tuple[int, int]:
        """First address of the memory that `flat` is part of, and the first address behind it."""
        storage = self.flat.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    @cached_property
    def _gaps(self) -> Tensor | None:
        """Indices of the elements of `flat` that belong to no slot; None where there are none."""
        end = 0
        gaps: list[int] = []
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            gaps += range(end, slot.offset)
            end = max(end, slot.offset + slot.numel)
        gaps += range(end, self.flat.numel())
        return torch.tensor(gaps, device=self.flat.device) if gaps else None

    # Both are made when first needed and hold no reference to the table: a cycle would keep `flat` allocated
    # until the garbage collector runs.

    @cached_property
    def launcher(self) -> Launcher:
        """How a kernel runs over this table."""
        from dpfuse_kernels.launcher import Launcher

        return Launcher(self)

    @cached_property
    def host_plan(self) -> HostPlan:
        """How torch's own operations run over this table."""
        from dpfuse_kernels.host_plan import HostPlan

        return HostPlan(self)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do the elements fill one block of memory, each address once, whatever the order of the dimensions?

    Example:
        >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1)), is_dense((1, 3), (99, 1))
        (True, False, True)
    """
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def check_slots(slots: Sequence[Slot], numel: int) -> None:
    """Raise ValueError for a slot that is not dense, leaves a buffer of `numel` elements or overlaps another one."""
    end, previous = 0, ""
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if len(slot.stride) != len(slot.shape) or not is_dense(slot.shape, slot.stride):
            raise ValueError(
                f"Slot {slot.name!r} has strides {slot.stride} for shape {slot.shape}, expected a dense "
                "permutation. Give the slot the strides of torch.empty_like(parameter)."
            )
        if slot.offset < 0 or slot.offset + slot.numel > numel:
            raise ValueError(
                f"Slot {slot.name!r} covers elements {slot.offset} to {slot.offset + slot.numel}, expected "
                f"them inside the {numel} elements of flat. Allocate flat for the whole plan."
            )
        if slot.numel == 0:
            continue
        if slot.offset < end:
            raise ValueError(
                f"Slot {slot.name!r} starts at element {slot.offset}, expected {end} or later, "
                f"where slot {previous!r} ends. Give each tensor a place of its own."
            )
        end, previous = slot.offset + slot.numel, slot.name
