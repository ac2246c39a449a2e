"""Adds up the parts of a buffer from all ranks, in the order of the ranks. Knows no bucket and no collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.launch_shape import DEFAULT
from dpfuse_kernels.launcher import launch_flat
from dpfuse_kernels.layout import DTYPES
from dpfuse_kernels.options import check_residual

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["sum_parts", "sum_parts_reference"]


def _sum_parts_kernel(
    parts_address: tl.int64,
    out_address: tl.int64,
    count: tl.int64,  # rows of parts
    numel: tl.int64,  # elements of a row, and of out
    first_program: tl.int64,
    residual_address: tl.int64,  # [numel] float32, where RESIDUAL
    WIRE: tl.constexpr,
    SUM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add up one chunk in program p: out[i] = (parts[0, i] + parts[1, i]) + parts[2, i] …, rounded once to WIRE.

    Example: parts [[1, 2], [256, 4], [1, 6]] in bfloat16 give [258, 12]. A sum that is rounded to bfloat16 after each
    addition gives [256, 12], because bfloat16 has no 257.
    RESIDUAL with parts [[256, 4], [3, 6]]: out is [260, 10], and residual [0.5, 0] becomes [-0.5, 0].
    """
    # Every address is computed in 64 bits: parts may hold more than 2**31 elements.
    start = (first_program + tl.program_id(0).to(tl.int64)) * CHUNK
    length = tl.minimum(numel - start, CHUNK).to(tl.int32)
    SIZE: tl.constexpr = WIRE.primitive_bitwidth // 8
    stride = numel.to(tl.int64) * SIZE
    source = parts_address + start * SIZE
    target = out_address + start * SIZE
    residual = residual_address + start * 4
    lane = tl.arange(0, CHUNK)
    if (numel % 8 == 0) & (parts_address % 16 == 0) & (out_address % 16 == 0) & (residual_address % 16 == 0):
        # The alignment is known, and the mask keeps groups of eight elements whole: 128-bit loads and stores.
        # The compiler sees that in `length // 8 * 8`, too, but spills 8 bytes then, for float16 with a residual.
        whole = lane < tl.minimum(numel // 8 * 8 - start, CHUNK).to(tl.int32)
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(WIRE)), 16)
        # Start with the first part, not with zero: the sum of negative zeros is a negative zero.
        total = tl.load(source_ptr + lane, mask=whole).to(SUM)
        added = 1
        while added < count:
            source += stride
            source_ptr = tl.multiple_of(source.to(tl.pointer_type(WIRE)), 16)
            total += tl.load(source_ptr + lane, mask=whole).to(SUM)
            added += 1
        tl.store(tl.multiple_of(target.to(tl.pointer_type(WIRE)), 16) + lane, total.to(WIRE), mask=whole)
        if RESIDUAL:
            _add_error(tl.multiple_of(residual.to(tl.pointer_type(tl.float32)), 16) + lane, whole, total, WIRE)
    else:
        total = tl.load(source.to(tl.pointer_type(WIRE)) + lane, mask=lane < length).to(SUM)
        added = 1
        while added < count:
            source += stride
            total += tl.load(source.to(tl.pointer_type(WIRE)) + lane, mask=lane < length).to(SUM)
            added += 1
        tl.store(target.to(tl.pointer_type(WIRE)) + lane, total.to(WIRE), mask=lane < length)
        if RESIDUAL:
            _add_error(residual.to(tl.pointer_type(tl.float32)) + lane, lane < length, total, WIRE)


def _add_error(residual_ptr: tl.tensor, mask: tl.tensor, total: tl.tensor, WIRE: tl.constexpr) -> None:
    """Add the rounding error of `total` to the residual, where the error is finite."""
    error = total - total.to(WIRE).to(tl.float32)
    error = tl.where(tl.abs(error) < float("inf"), error, 0.0)
    tl.store(residual_ptr, tl.load(residual_ptr, mask=mask) + error, mask=mask)


def sum_parts(parts: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Add up the rows of `parts` in their order, in float32 (float64 for float64), and round once.

    For CUDA tensors this is one kernel launch on the current stream. Each element is added up in float32 (float64 for
    float64), first row first, and rounded once. So its bits depend only on its summands, not on its place or on other
    elements.

    Args:
        parts: [rows, numel], contiguous, float32, float16, bfloat16 or float64; at least one row.
        out: [numel], contiguous, of the same dtype and device; shares no memory with `parts`.
        residual: [numel] float32, contiguous, on that device, for error feedback. The rounding error, the exact sum
            minus `out`, is added to it where the error is finite. Not for float64.

    Raises:
        ValueError: A tensor has another shape, dtype or device, or is not contiguous. Nothing was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import sum_parts
        >>> out = torch.empty(2, dtype=torch.bfloat16)
        >>> sum_parts(torch.tensor([[1.0, 2], [256, 4], [1, 6]], dtype=torch.bfloat16), out)
        >>> out
        tensor([258.,  12.], dtype=torch.bfloat16)
    """
    if not chooses_triton(out.device):
        sum_parts_reference(parts, out, residual)
        return
    _check(parts, out, residual)
    kept = 0 if residual is None else residual.data_ptr()
    launch_flat(
        _sum_parts_kernel,
        out,
        out.numel(),
        (parts.data_ptr(), out.data_ptr(), len(parts), out.numel(), 0, kept),
        DEFAULT,
        WIRE=out.dtype,
        SUM=_sum_dtype(out.dtype),
        RESIDUAL=residual is not None,
    )


@torch.no_grad()
def sum_parts_reference(parts: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Add up the rows with torch's own operations, on any device. The bits equal those of `sum_parts`.

    Arguments and errors are those of `sum_parts`.
    """
    _check(parts, out, residual)
    total = out if out.dtype == _sum_dtype(out.dtype) else torch.empty_like(out, dtype=_sum_dtype(out.dtype))
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    if total is not out:
        out.copy_(total)
    if residual is not None:
        residual.add_((total - out).nan_to_num_(0.0, 0.0, 0.0))


def _sum_dtype(wire: torch.dtype) -> torch.dtype:
    return torch.float64 if wire == torch.float64 else torch.float32


def _check(parts: Tensor, out: Tensor, residual: Tensor | None) -> None:
    if parts.dim() != 2 or not len(parts) or out.shape != parts.shape[1:]:
        raise ValueError(
            f"parts has shape {tuple(parts.shape)} and out {tuple(out.shape)}, expected [rows, numel] with at least "
            "one row, and [numel]. Reshape parts with .view(rows, -1)."
        )
    if out.dtype not in DTYPES or parts.dtype != out.dtype or parts.device != out.device:
        raise ValueError(
            f"parts is {parts.dtype} on {parts.device} and out {out.dtype} on {out.device}, expected one device and "
            f"one of {', '.join(map(str, DTYPES))} for both. Convert one of them."
        )
    if not parts.is_contiguous() or not out.is_contiguous():
        raise ValueError(
            f"parts has strides {parts.stride()} and out {out.stride()}, expected contiguous tensors: the kernel "
            "computes addresses from the shape. Call .contiguous() on them."
        )
    if residual is not None:
        check_residual(residual, out.numel(), out.device, of=out.dtype)
