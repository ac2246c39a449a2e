"""Packs tensors into eight-bit blocks: scale, encode, count and keep the error in one pass. Knows no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import uses_triton
from dpfuse_kernels.checks import check_all
from dpfuse_kernels.flatten import _count, count_nonfinite, flatten
from dpfuse_kernels.mx import in_chunks, mx_decode, mx_encode
from dpfuse_kernels.mx_block import _element_ptr, _encode, _lost, _scale_ptr
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.options import check_options

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["quantize", "quantize_reference"]


def _quantize_kernel(
    flat_address: tl.int64,
    address_ptr: tl.tensor,  # [slots] int64
    chunk_ptr: tl.tensor,  # [programs, 4] int64: tensor, first element, elements, offset in elements of flat
    scale_bits: tl.int64,
    first_program: tl.int64,
    counts_address: tl.int64,  # [slots] int32, where COUNT
    factor_address: tl.int64,  # [] float32, where FACTOR
    residual_address: tl.int64,  # [elements of flat] float32, where RESIDUAL
    TENSOR: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    FACTOR: tl.constexpr,
    RESIDUAL: tl.constexpr,
    E4M3: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Encode one chunk in program p: `length` elements from `start` on. Only a tensor's last block may be partial.

    Example: numel 3, E4M3, a slot at 32, tensor [896, -0.5, 1]: bytes 32 to 34 of flat are 126, 168, 48, the next 29
    are zeros, byte 513 is 128. They mean 448, -0.25 and 0.5 times 2 ** (128 - 127).
    RESIDUAL full of 30 with [896, 0, 0]: the bytes mean 896, 30 and 30, and residual is [30, 0, 0].
    """
    # Every address is computed in 64 bits: a layout may exceed 2**31 elements.
    row_ptr = chunk_ptr + (first_program + tl.program_id(0).to(tl.int64)) * 4
    tensor = tl.load(row_ptr)
    address = tl.load(address_ptr + tensor)
    source = address + tl.load(row_ptr + 1) * (TENSOR.primitive_bitwidth // 8)
    length = tl.load(row_ptr + 2).to(tl.int32)
    offset = tl.load(row_ptr + 3)
    block = tl.arange(0, CHUNK // 32)[:, None]
    lane = block * 32 + tl.arange(0, 32)[None, :]
    mask = lane < length
    readable = tl.where(address != 0, mask, False)
    if (length % 8 == 0) & (source % 16 == 0):
        # The alignment is known, and the mask keeps groups of eight elements whole: 128-bit loads.
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(TENSOR)), 16)
        whole = tl.where(address != 0, lane < length // 8 * 8, False)
        value = tl.load(source_ptr + lane, mask=whole, other=0.0).to(tl.float32)
    else:
        value = tl.load(source.to(tl.pointer_type(TENSOR)) + lane, mask=readable, other=0.0).to(tl.float32)
    # The factor arrives as the bits of a double: both factors are multiplied in float64, and the product is rounded.
    scale = scale_bits.to(tl.float64, bitcast=True)
    if FACTOR:
        scale *= tl.load(factor_address.to(tl.int64).to(tl.pointer_type(tl.float32))).to(tl.float64)
    if SCALED or FACTOR:
        # Lanes without an element hold zero, and zero times an infinite factor would be NaN.
        value = tl.where(readable, value * scale.to(tl.float32), 0.0)
    residual = residual_address + offset * 4
    residual_ptr = tl.multiple_of(residual.to(tl.pointer_type(tl.float32)), 16) + lane
    inside = block * 32 < length
    if RESIDUAL:
        # Whole blocks, so 128-bit loads and stores. What lies after the tensor is written as it was read.
        before = tl.load(residual_ptr, mask=inside, other=0.0)
        value += tl.where(mask, before, 0.0)
    element, unit = _encode(value, E4M3)
    there = (offset >> 5) + block.to(tl.int64)
    tl.store(_element_ptr(flat_address, there), element, mask=inside)
    tl.store(_scale_ptr(flat_address, there), unit, mask=inside)
    if RESIDUAL:
        error = _lost(value, element, unit, E4M3)
        tl.store(residual_ptr, tl.where(mask, error, before), mask=inside)
    if COUNT:
        _count(value, mask, (counts_address + tensor * 4).to(tl.pointer_type(tl.int32)), tl.float32)


def quantize(
    tensors: Sequence[Tensor | None],
    table: MxTable,
    *,
    scale: float = 1.0,
    factor: Tensor | None = None,
    counts: Tensor | None = None,
    residual: Tensor | None = None,
    matched: bool = False,
) -> None:
    """Pack `tensors` into eight-bit blocks: scale, encode, count and keep the error in one pass.

    For CUDA tensors this is one kernel launch on the current stream. Each tensor is multiplied by `scale` in float32
    and encoded block by block, as `mx_encode` does. The rest of a tensor's last block becomes zeros. Blocks that belong
    to no slot are not touched.

    Args:
        tensors: one per slot, with the slot's shape, `table.dtype` and the device of `table.flat`. None packs zeros for
            any `scale` and `factor`. A tensor with other strides than its slot goes through a dense copy. Keep a
            reference to all of them until the work that may reuse their memory is ordered after this launch.
        table: the layout.
        scale: the factor.
        factor: [] float32 on the device of `flat`, read by the kernel. Tensors are multiplied by `scale * factor`,
            which is computed in double precision.
        counts: [slots] int32 on that device. Each count grows by the number of NaN in its slot; infinities are packed
            as NaN, too. None counts nothing.
        residual: [table.elements] float32 on that device, at a multiple of 16 bytes, for error feedback. The encoding
            errors of earlier calls are added before encoding, and the new errors are kept (0 where an error is not
            finite). In short, v = x * scale * factor + residual; flat = encode(v); residual = v - decode(flat).
        matched: as for `flatten`.

    Raises:
        ValueError: A tensor is wrong, as for `flatten`, or `factor` or `residual` does not fit. The text names the
            slot, and nothing was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import MxTable, Slot, mx_bytes, quantize
        >>> flat = torch.zeros(mx_bytes(3), dtype=torch.uint8)
        >>> table = MxTable(flat, [Slot("a", 0, (3,), (1,))], torch.float32, torch.float8_e4m3fn)
        >>> quantize([torch.tensor([896.0, -0.5, 1.0])], table)
        >>> flat[:4].tolist(), flat[512].item()  # 448, -0.25, 0.5 and 0; times 2 ** (128 - 127)
        ([126, 168, 48, 0], 128)
    """
    if not uses_triton(table):
        quantize_reference(
            tensors, table, scale=scale, factor=factor, counts=counts, residual=residual, matched=matched
        )
        return
    tensors = list(tensors)
    check_options(table, factor, residual)
    entries = check_all(tensors, table)
    entries.make_dense(table.slots, read=True)
    table.launcher.launch(
        _quantize_kernel,
        entries.addresses,
        scale=scale,
        extras=(counts, factor, residual),
        COUNT=counts is not None,
        FACTOR=factor is not None,
        RESIDUAL=residual is not None,
        E4M3=table.e4m3,
    )


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
    """Pack `tensors` with torch's own operations, on any device. The bytes equal those of `quantize`.

    Arguments and errors are those of `quantize`; the host reads `factor`.
    """
    check_options(table, factor, residual)
    stage, flat = table.stage, table.flat
    flatten(tensors, stage, scale=scale, factor=factor, matched=matched)
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
            for encoded, exact, losses in zip(in_chunks(flat), in_chunks(value), in_chunks(residual), strict=True):
                torch.sub(exact, mx_decode(encoded, table.format.dtype), out=losses).nan_to_num_(0.0, 0.0, 0.0)
