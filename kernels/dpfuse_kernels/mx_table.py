"""The static description of one buffer of eight-bit blocks: where each tensor lies. Knows no bucket and no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dpfuse_kernels.arguments import instance
from dpfuse_kernels.layout import Slot, check_slots
from dpfuse_kernels.mx import BLOCK, SUPER_BLOCK, SUPER_BYTES, check_packed, mx_bytes, mx_format
from dpfuse_kernels.pointer_table import PointerTable

__all__ = ["MxTable"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class MxTable(PointerTable):
    """The places of all tensors in one buffer of bytes, for `quantize` and `dequantize`.

    No tensor can view encoded blocks: the table has no views, and no tensor can be its slot.

    Args:
        flat: [mx_bytes(elements)] uint8, contiguous, at a multiple of 16 bytes. The table keeps it alive and relies on
            its address: never resize it.
        slots: one per tensor, in the order in which `quantize` and `dequantize` get the tensors. Offsets are in
            elements, each a multiple of 32, so that no two tensors share a scale.
        dtype: of the tensors: float32, float16 or bfloat16.
        format: of the elements: torch.float8_e4m3fn or torch.float8_e5m2.

    Raises:
        TypeError: An argument has another type.
        ValueError: A slot leaves the buffer, overlaps another slot, is not dense or starts inside a block; `flat` has
            no whole super-blocks; or the dtype or format is another.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import MxTable, Slot, mx_bytes
        >>> slots = [Slot("a", 0, (40,), (1,)), Slot("b", 64, (2,), (1,))]
        >>> flat = torch.zeros(mx_bytes(66), dtype=torch.uint8)
        >>> MxTable(flat, slots, torch.float32, torch.float8_e4m3fn).elements
        512
    """

    def __init__(self, flat: Tensor, slots: Sequence[Slot], dtype: torch.dtype, format: torch.dtype) -> None:
        instance("format", format, torch.dtype, "a torch.dtype")
        instance("flat", flat, Tensor, "a torch.Tensor")
        self.format = mx_format(format)
        check_packed("flat", flat)
        super().__init__(flat, slots, dtype)

    def _check_layout(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype is {self.dtype}, expected one of {', '.join(map(str, DTYPES))}. "
                "Leave tensors of other types out of eight-bit buffers."
            )
        if self.flat.dim() != 1:
            raise ValueError(
                f"flat has shape {tuple(self.flat.shape)}, expected [bytes]. Pass one row of it, or flat.view(-1)."
            )
        check_slots(self.slots, self.elements)
        for slot in self.slots:
            if slot.offset % BLOCK:
                raise ValueError(
                    f"Slot {slot.name!r} starts at element {slot.offset}, expected a multiple of {BLOCK}: a block has "
                    "one scale. Round offsets up."
                )

    @property
    def elements(self) -> int:
        """Elements that the buffer holds, a multiple of 512."""
        return self.flat.numel() // SUPER_BYTES * SUPER_BLOCK

    def new_views(self) -> list[Tensor]:
        """Return an empty tensor for each slot: torch has no dtype for blocks with a scale."""
        return [self.flat[:0] for _ in self.slots]

    def first(self, count: int) -> MxTable:
        """Return a table of only the first `count` slots, over the super-blocks up to their end."""
        end = max((slot.offset + slot.numel for slot in self.slots[:count]), default=0)
        return MxTable(self.flat[: mx_bytes(end)], self.slots[:count], self.dtype, self.format.dtype)

    @property
    def e4m3(self) -> bool:
        """Whether the format is E4M3, as the kernels' compile-time argument."""
        return self.format.dtype == torch.float8_e4m3fn

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which values are scaled, added and rounded."""
        return torch.float32

    @cached_property
    def addresses(self) -> list[int]:
        """Address of each slot's first element byte; 0 for an empty slot."""
        starts = [slot.offset // SUPER_BLOCK * SUPER_BYTES + slot.offset % SUPER_BLOCK for slot in self.slots]
        return [self.address + start if slot.numel else 0 for slot, start in zip(self.slots, starts, strict=True)]

    @cached_property
    def _gaps(self) -> Tensor | None:
        """Indices of the bytes of blocks that belong to no slot, with their scales; None if there are none."""
        free = torch.ones(self.elements // BLOCK, dtype=torch.bool, device="cpu")
        for slot in self.slots:
            free[slot.offset // BLOCK : -(-(slot.offset + slot.numel) // BLOCK)] = False
        free = free.view(-1, SUPER_BLOCK // BLOCK)
        gaps = torch.cat((free.repeat_interleave(BLOCK, 1), free), 1).view(-1).nonzero().view(-1)
        return gaps.to(self.flat.device) if gaps.numel() else None

    @cached_property
    def stage(self) -> PointerTable:
        """The same slots over float32 elements, for torch's own operations; zeros between the slots."""
        flat = torch.zeros(self.elements, dtype=torch.float32, device=self.flat.device)
        stage = PointerTable(flat, self.slots, self.dtype)
        stage.triton = False
        return stage
