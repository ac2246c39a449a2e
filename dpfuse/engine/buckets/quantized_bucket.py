"""A bucket whose gradients travel as blocks of eight-bit numbers with a scale for each. Knows no order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dpfuse.engine.buckets.ordered_bucket import OrderedBucket
from dpfuse.engine.plan import Slot
from dpfuse_kernels import MxTable, PointerTable, dequantize, mx_bytes, quantize, sum_quantized
from dpfuse_kernels import Slot as KernelSlot
from dpfuse_kernels.mx import BLOCK, SUPER_BLOCK

__all__ = ["QuantizedBucket"]


class QuantizedBucket(OrderedBucket):
    """Private gradients that are sent as MXFP8 bytes, added up in float32 in the order of the ranks, and sent so again.

    A block of 32 elements shares a scale, and never belongs to two gradients: so no bit depends on what else is in the
    bucket. Each rank's part is of whole super-blocks. What is not finite arrives as NaN. Arguments are those of
    `GradBucket`; there is no tail, which needs signs and counts to the bit, and travels in a bucket behind.
    """

    _table: MxTable | None

    @property
    def untailed(self) -> None:
        """Nothing: bytes are no gradients."""
        return

    def _pack(
        self, grads: list[Tensor | None], table: PointerTable, counts: Tensor | None, factor: Tensor | None
    ) -> None:
        assert isinstance(table, MxTable)
        residual = None
        if self.residual is not None:
            residual = self.residual.before_pack(table, table.elements, self.missing)
        scale = self._averaging.pre_scale
        quantize(grads, table, scale=scale, factor=factor, counts=counts, residual=residual, matched=True)

    def _unpack(self, targets: Sequence[Tensor | None], *, matched: bool = True) -> None:
        assert self._table is not None
        squares = None if self.squares is None else self.squares.value
        dequantize(self._table, targets, scale=self._averaging.post_scale, squares=squares, matched=matched)

    def _adding(self) -> Callable[[Tensor, Tensor], None]:
        return partial(sum_quantized, format=self._format, residual=self._residual_part())

    def _new_table(self, numel: int, slots: Sequence[KernelSlot], dtype: torch.dtype) -> PointerTable:
        return MxTable(self._zeros(mx_bytes(numel), torch.uint8), slots, dtype, self._format)

    def _places(self) -> tuple[list[Slot], int]:
        slots, end = [], 0
        for planned in self._fused.slots:
            slots.append(Slot(planned.param, end, self._width * planned.numel))
            end += -(-slots[-1].numel // BLOCK) * BLOCK
        step = SUPER_BLOCK * self._group.size()
        return slots, -(-end // step) * step

    @property
    def _format(self) -> torch.dtype:
        format: torch.dtype = getattr(torch, self._averaging.dtype)
        return format
