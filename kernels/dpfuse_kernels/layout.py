"""The static description of one flat buffer: where each tensor lies. Knows no bucket and no kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import is_

import torch
from torch import Tensor

from dpfuse_kernels.arguments import instance

__all__ = ["Layout", "Slot", "TransposeCheck", "check_slots"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a flat buffer.

    Args:
        name: the tensor's name in error texts.
        offset: where the slot starts, in elements from the start of the flat buffer.
        shape: the tensor's shape.
        stride: its strides in elements. They must be a dense permutation, so that the slot fills elements `offset` to
            `offset + numel` without holes. A dimension of size 1 may have any stride.

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
        """Return a new, uninitialised tensor in this slot's memory order, with the dtype and device of `tensor`."""
        return torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)


class Layout:
    """The places of all tensors in one flat buffer. Arguments, attributes and errors are those of `PointerTable`."""

    def __init__(self, flat: Tensor, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        instance("flat", flat, Tensor, "a torch.Tensor")
        instance("slots", slots, Sequence, "a list of Slots")
        instance("dtype", dtype, torch.dtype, "a torch.dtype")
        self.flat = flat
        self.slots = tuple(slots)
        self.dtype = dtype
        self._check_layout()
        self.address = flat.data_ptr()
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

    @property
    def elements(self) -> int:
        """Elements that the buffer holds."""
        return self.flat.numel()

    def new_views(self) -> list[Tensor]:
        """Return a new view of `flat` for each slot."""
        base = self.flat.storage_offset()
        return [self.flat.as_strided(slot.shape, slot.stride, base + slot.offset) for slot in self.slots]

    @contextmanager
    def gaps_kept(self, *beside: Tensor, zero: bool = False) -> Iterator[None]:
        """Restore the elements between the slots after a write to the whole buffer.

        Args:
            beside: other buffers of the same length, restored in the same way.
            zero: fill the elements between the slots of `flat` with zeros first.
        """
        if self._gaps is None:
            yield
            return
        # Write to `data`: a graph may have saved the slots, and autograd must not count this as a write to them.
        buffers = [buffer.data for buffer in (self.flat, *beside)]
        kept = [buffer[self._gaps] for buffer in buffers]
        if zero:
            buffers[0].index_fill_(0, self._gaps, 0)
        yield
        for buffer, values in zip(buffers, kept, strict=True):
            buffer[self._gaps] = values

    def clear_gaps(self) -> None:
        """Fill the elements between the slots of `flat` with zeros."""
        if self._gaps is not None:
            self.flat.data.index_fill_(0, self._gaps, 0)  # `[…] = 0` would copy the 0 from the host

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the scale is applied: float64 if either side is float64, else float32."""
        return torch.float64 if torch.float64 in (self.dtype, self.flat.dtype) else torch.float32

    # The checks of every call compare with these lists: one comparison in C instead of a Python loop. They are computed
    # from the slots, not from the views: views are used as gradients, and `gradient.data = x` moves a view.

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
    def turnable(self) -> list[int]:
        """The slots that keep their shape where a program turns a view in place."""
        return [place for place, slot in enumerate(self.slots) if can_be_turned(slot.shape)]

    def are_views(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these tensors, at the slots' addresses, are `views`, and have the slots' strides."""
        return all(map(is_, tensors, self.views)) and all(
            self.views[place].stride() == self.strides[place] for place in self.turnable
        )

    @cached_property
    def ndims(self) -> int:
        """Number of dimensions, summed over all slots."""
        return sum(len(slot.shape) for slot in self.slots)

    @cached_property
    def addresses(self) -> list[int]:
        """Address per slot, in bytes; 0 for an empty slot, as from `Tensor.data_ptr`."""
        size = self.flat.element_size()
        return [self.address + slot.offset * size if slot.numel else 0 for slot in self.slots]

    @cached_property
    def contiguous(self) -> bool:
        """Whether all slots are in C order."""
        return all(torch.empty_strided(slot.shape, slot.stride, device="meta").is_contiguous() for slot in self.slots)

    @cached_property
    def ascending(self) -> bool:
        """Whether the slots' offsets ascend."""
        return all(a.offset + a.numel <= b.offset for a, b in zip(self.slots, self.slots[1:], strict=False))

    @cached_property
    def storage_range(self) -> tuple[int, int]:
        """First address of the storage of `flat`, and the first address after the storage."""
        storage = self.flat.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    @cached_property
    def _gaps(self) -> Tensor | None:
        """Indices of the elements of `flat` that belong to no slot; None if there are none."""
        return gaps_of(self.flat, self.slots)


def gaps_of(flat: Tensor, slots: Iterable[Slot], start: int = 0) -> Tensor | None:
    """Return the indices of the elements of `flat` that belong to no slot; None if there are none.

    Args:
        flat: the part of a buffer that begins at its element `start`.
        slots: those in it.

    Example:
        >>> gaps_of(torch.zeros(5), [Slot("a", 11, (2,), (1,)), Slot("b", 14, (1,), (1,))], start=10)
        tensor([0, 3])
    """
    end = 0
    gaps: list[int] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        gaps += range(end, slot.offset - start)
        end = max(end, slot.offset - start + slot.numel)
    gaps += range(end, flat.numel())
    return torch.tensor(gaps, device=flat.device) if gaps else None


def can_be_turned(shape: Sequence[int]) -> bool:
    """Whether a tensor may keep this shape where a program turns it in place, as `grad.t_()` does.

    Example:
        >>> can_be_turned((2, 2)), can_be_turned((2, 3)), can_be_turned((1, 1))
        (True, False, False)
    """
    longer = [size for size in shape if size != 1]
    return len(set(longer)) < len(longer)


class TransposeCheck:
    """Notices where a program turns one of these tensors in place, and it keeps its shape.

    Args:
        tensors: of any shapes; those that cannot keep their shape are not looked at.

    Attributes:
        contiguous: those for which it is enough, and faster, to ask whether they still are.
        others: the rest, of which the strides are compared.

    Example:
        >>> import torch
        >>> square = torch.zeros(2, 2)
        >>> check = TransposeCheck([square, torch.zeros(3)])
        >>> check.fails()
        False
        >>> _ = square.t_()
        >>> check.fails()
        True
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        turnable = [tensor for tensor in tensors if can_be_turned(tensor.shape)]
        self.contiguous = [tensor for tensor in turnable if tensor.is_contiguous()]
        self.others = [tensor for tensor in turnable if not tensor.is_contiguous()]
        self._strides = list(map(Tensor.stride, self.others))

    def fails(self) -> bool:
        """Whether one was turned."""
        if not all(map(Tensor.is_contiguous, self.contiguous)):
            return True
        return bool(self.others) and list(map(Tensor.stride, self.others)) != self._strides


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory, each address once, in any order of dimensions.

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
    """Raise ValueError for a slot that is not dense, leaves a buffer of `numel` elements or overlaps another slot."""
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
                f"where slot {previous!r} ends. Give each tensor its own place."
            )
        end, previous = slot.offset + slot.numel, slot.name
