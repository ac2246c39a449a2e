"""Adds up eight-bit blocks from all ranks, in the order of the ranks. Knows no bucket and no collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.launch_shape import DEFAULT
from dpfuse_kernels.launcher import launch_flat
from dpfuse_kernels.mx import BLOCK, SUPER_BLOCK, SUPER_BYTES, check_packed, in_chunks, mx_decode, mx_encode, mx_format
from dpfuse_kernels.mx_block import _element_ptr, _encode, _lost, _read, _scale_ptr
from dpfuse_kernels.options import check_residual

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["sum_quantized", "sum_quantized_reference"]


def _sum_quantized_kernel(
    parts_address: tl.int64,
    out_address: tl.int64,
    count: tl.int64,  # rows of parts
    blocks: tl.int64,  # of a row, and of out
    first_program: tl.int64,
    residual_address: tl.int64,  # [elements] float32, where RESIDUAL
    RESIDUAL: tl.constexpr,
    E4M3: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add up CHUNK elements in program p: out = encode((decode(parts[0]) + decode(parts[1])) + decode(parts[2]) …).

    Example: in E4M3 three blocks full of 1, 2.25 and 240 have the sum 243.25. The nearest numbers are 240 and 256: out
    is a block full of 240, and RESIDUAL full of 0.5 becomes 3.75.
    """
    # Every address is computed in 64 bits: parts may hold more than 2**31 elements.
    first = (first_program + tl.program_id(0).to(tl.int64)) * (CHUNK // 32)
    block = first + tl.arange(0, CHUNK // 32)[:, None].to(tl.int64)
    mask = block < blocks
    stride = (blocks >> 4) * 528
    source = parts_address
    total = _read(source, block, mask, E4M3)
    added = 1
    while added < count:
        source += stride
        total += _read(source, block, mask, E4M3)
        added += 1
    element, unit = _encode(total, E4M3)
    tl.store(_element_ptr(out_address, block), element, mask=mask)
    tl.store(_scale_ptr(out_address, block), unit, mask=mask)
    if RESIDUAL:
        residual_ptr = tl.multiple_of(residual_address.to(tl.int64).to(tl.pointer_type(tl.float32)), 16)
        residual_ptr += block * 32 + tl.arange(0, 32)[None, :]
        error = _lost(total, element, unit, E4M3)
        tl.store(residual_ptr, tl.load(residual_ptr, mask=mask) + error, mask=mask)


def sum_quantized(parts: Tensor, out: Tensor, format: torch.dtype, residual: Tensor | None = None) -> None:
    """Decode the rows of `parts`, add them up in their order in float32, and encode the sum once.

    For CUDA tensors this is one kernel launch on the current stream. Each element is added up in float32, first row
    first. NaN in one row gives NaN in the sum.

    Args:
        parts: [rows, bytes] uint8 of whole super-blocks, contiguous, at a multiple of 16 bytes; at least one row.
        out: [bytes], contiguous, at a multiple of 16 bytes of the same device; shares no memory with `parts`.
        format: torch.float8_e4m3fn or torch.float8_e5m2.
        residual: [elements] float32, 512 for each 528 bytes of `out`, at a multiple of 16 bytes of that device, for
            error feedback. The encoding error is added to it where the error is finite.

    Raises:
        ValueError: A tensor has another shape, dtype or device, or is not contiguous or not aligned. Nothing was
            written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import mx_bytes, mx_decode, mx_encode, sum_quantized
        >>> parts = torch.zeros(2, mx_bytes(512), dtype=torch.uint8)
        >>> for row, number in zip(parts, (1.0, 2.5)):
        ...     _ = mx_encode(torch.full((512,), number), torch.float8_e4m3fn, row)
        >>> out = torch.empty_like(parts[0])
        >>> sum_quantized(parts, out, torch.float8_e4m3fn)
        >>> mx_decode(out, torch.float8_e4m3fn)[:3]
        tensor([3.5000, 3.5000, 3.5000])
    """
    if not chooses_triton(out.device):
        sum_quantized_reference(parts, out, format, residual)
        return
    check_sum(parts, out, format, residual)
    blocks = out.numel() // SUPER_BYTES * (SUPER_BLOCK // BLOCK)
    kept = 0 if residual is None else residual.data_ptr()
    launch_flat(
        _sum_quantized_kernel,
        out,
        blocks * BLOCK,
        (parts.data_ptr(), out.data_ptr(), len(parts), blocks, 0, kept),
        DEFAULT,
        RESIDUAL=residual is not None,
        E4M3=format == torch.float8_e4m3fn,
    )


@torch.no_grad()
def sum_quantized_reference(parts: Tensor, out: Tensor, format: torch.dtype, residual: Tensor | None = None) -> None:
    """Add up with torch's own operations, on any device. The bytes equal those of `sum_quantized`.

    Arguments and errors are those of `sum_quantized`.
    """
    check_sum(parts, out, format, residual)
    chunks = in_chunks(out)
    kept = [None] * len(chunks) if residual is None else in_chunks(residual)
    for columns, encoded, losses in zip(in_chunks(parts), chunks, kept, strict=True):
        total = mx_decode(columns[0], format)
        for part in columns[1:]:
            total.add_(mx_decode(part, format))
        mx_encode(total, format, encoded)
        if losses is not None:
            losses.add_(total.sub_(mx_decode(encoded, format)).nan_to_num_(0.0, 0.0, 0.0))


def check_sum(parts: Tensor, out: Tensor, format: torch.dtype, residual: Tensor | None) -> None:
    """Raise ValueError if the tensors do not fit each other."""
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
        check_residual(residual, out.numel() // SUPER_BYTES * SUPER_BLOCK, out.device, of=out.dtype)
