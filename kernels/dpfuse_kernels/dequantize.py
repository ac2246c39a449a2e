"""Unpacks eight-bit blocks into tensors: decode, scale and cast in one pass. Knows no bucket and no collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfuse_kernels.mx import mx_decode
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.unflatten import unflatten_reference

__all__ = ["dequantize_reference"]


@torch.no_grad()
def dequantize_reference(
    table: MxTable, tensors: Sequence[Tensor | None], *, scale: float = 1.0, matched: bool = False
) -> None:
    """Unpack with torch's own operations: the same result as `dequantize`, on any device; the CPU path.

    Args:
        table: the layout.
        tensors: as for `dequantize`; any strides without overlap.
        scale: the factor.
        matched: True promises a list of tensors whose shapes and device are those of their slots.

    Raises:
        ValueError: a wrong tensor, by slot name.

    Example:
        >>> from dpfuse_kernels import MxTable, Slot, mx_bytes
        >>> flat = torch.zeros(mx_bytes(3), dtype=torch.uint8)
        >>> flat[:3], flat[512] = torch.tensor([126, 168, 48]), 128
        >>> table = MxTable(flat, [Slot("a", 0, (3,), (1,))], torch.float32, torch.float8_e4m3fn)
        >>> tensor = torch.empty(3)
        >>> dequantize_reference(table, [tensor], scale=0.5)
        >>> tensor.tolist()
        [448.0, -0.25, 0.5]
    """
    stage = table.stage
    with stage.gaps_kept():
        mx_decode(table.flat, table.format.dtype, stage.flat)
    plain = matched and scale == 1.0 and stage.dtype == stage.flat.dtype
    if not (plain and stage.host_plan.unpack_matched(tensors, stage)):  # type: ignore[arg-type]
        unflatten_reference(stage, tensors, scale=scale)
