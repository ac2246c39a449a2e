"""Adds up eight-bit blocks that came from all ranks, in the order of the ranks. Knows no bucket and no collective."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfuse_kernels.mx import SUPER_BLOCK, SUPER_BYTES, check_packed, mx_decode, mx_encode, mx_format
from dpfuse_kernels.options import check_residual

__all__ = ["sum_quantized_reference"]


@torch.no_grad()
def sum_quantized_reference(parts: Tensor, out: Tensor, format: torch.dtype, residual: Tensor | None = None) -> None:
    """Add up with torch's own operations: the same bytes as `sum_quantized`, on any device; the CPU path.

    Args:
        parts: as for `sum_quantized`.
        out: likewise.
        format: likewise.
        residual: likewise.

    Raises:
        ValueError: as `sum_quantized`.

    Example:
        >>> from dpfuse_kernels import mx_bytes, mx_decode, mx_encode
        >>> parts = torch.zeros(2, mx_bytes(512), dtype=torch.uint8)
        >>> for row, number in zip(parts, (1.0, 2.5)):
        ...     _ = mx_encode(torch.full((512,), number), torch.float8_e4m3fn, row)
        >>> out = torch.empty_like(parts[0])
        >>> sum_quantized_reference(parts, out, torch.float8_e4m3fn)
        >>> mx_decode(out, torch.float8_e4m3fn)[:3]
        tensor([3.5000, 3.5000, 3.5000])
    """
    check_sum(parts, out, format, residual)
    total = mx_decode(parts[0], format)
    for part in parts[1:]:
        total.add_(mx_decode(part, format))
    mx_encode(total, format, out)
    if residual is not None:
        residual.add_(total.sub_(mx_decode(out, format)).nan_to_num_(0.0, 0.0, 0.0))


def check_sum(parts: Tensor, out: Tensor, format: torch.dtype, residual: Tensor | None) -> None:
    """Raise ValueError for buffers that do not belong together."""
    mx_format(format)
    check_packed("parts", parts)
    check_packed("out", out)
    if parts.dim() != 2 or not len(parts) or out.shape != parts.shape[1:] or out.device != parts.device:
        raise ValueError(
            f"parts has shape {tuple(parts.shape)} on {parts.device} and out {tuple(out.shape)} on {out.device}, "
            "expected [rows, bytes] with at least one row, and [bytes], on one device. Reshape parts with "
            ".view(rows, -1)."
        )
    if residual is not None:
        check_residual(residual, out.numel() // SUPER_BYTES * SUPER_BLOCK, out.device)
