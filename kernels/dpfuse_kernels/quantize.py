"""Packs tensors into eight-bit blocks: scale, encode, count and keep the error in one pass. Knows no collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfuse_kernels.flatten import count_nonfinite, flatten_reference, product
from dpfuse_kernels.mx import mx_decode, mx_encode
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.options import check_factor, check_residual

__all__ = ["quantize_reference"]


@torch.no_grad()
def quantize_reference(
    tensors: Sequence[Tensor | None],
    table: MxTable,
    *,
    scale: float = 1.0,
    factor: Tensor | None = None,
    counts: Tensor | None = None,
    residual: Tensor | None = None,
    matched: bool = False,
) -> None:
    """Pack `tensors` with torch's own operations: the same bytes as `quantize`, on any device; the CPU path.

    Args:
        tensors: as for `quantize`; any strides.
        table: the layout.
        scale: the factor.
        factor: as for `quantize`; read by the host.
        counts: as for `quantize`.
        residual: likewise.
        matched: True promises a list of tensors whose shapes and device are those of their slots.

    Raises:
        ValueError: as `quantize`.

    Example:
        >>> from dpfuse_kernels import MxTable, Slot, mx_bytes
        >>> flat = torch.zeros(mx_bytes(3), dtype=torch.uint8)
        >>> table = MxTable(flat, [Slot("a", 0, (3,), (1,))], torch.float32, torch.float8_e4m3fn)
        >>> quantize_reference([torch.tensor([896.0, -0.5, 1.0])], table)
        >>> flat[:4].tolist(), flat[512].item()
        ([126, 168, 48, 0], 128)
    """
    check_options(table, factor, residual)
    stage, flat = table.stage, table.flat
    scale = product(scale, factor)
    if not (matched and stage.host_plan.pack_matched(tensors, stage, scale)):  # type: ignore[arg-type]
        flatten_reference(tensors, stage, scale=scale)
    value = stage.flat
    if residual is not None:
        with stage.gaps_kept():
            value.add_(residual)
    with table.gaps_kept():
        mx_encode(value, table.format.dtype, flat)
    if counts is not None:
        count_nonfinite(stage, counts)
    if residual is not None:
        with stage.gaps_kept(residual):
            torch.sub(value, mx_decode(flat, table.format.dtype), out=residual).nan_to_num_(0.0, 0.0, 0.0)


def check_options(table: MxTable, factor: Tensor | None, residual: Tensor | None) -> None:
    """Raise ValueError for a factor or a residual that does not belong to this table."""
    if factor is not None:
        check_factor(factor, table.flat.device)
    if residual is not None:
        check_residual(residual, table.elements, table.flat.device)
