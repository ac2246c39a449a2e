"""Unpacks eight-bit blocks into tensors: decode, scale and cast in one pass. Knows no bucket and no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import uses_triton
from dpfuse_kernels.checks import check_all
from dpfuse_kernels.mx import mx_decode
from dpfuse_kernels.mx_block import _read
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.unflatten import unflatten

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["dequantize", "dequantize_reference"]


def _dequantize_kernel(
    flat_address: tl.int64,
    address_ptr: tl.tensor,  # [slots] int64
    chunk_ptr: tl.tensor,  # [programs, 4] int64: tensor, first element, elements, offset in elements of flat
    scale_bits: tl.int64,
    first_program: tl.int64,
    TENSOR: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    E4M3: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Decode one chunk in program p: whole blocks to `length` elements of tensor `tensor`, from `start` on.

    Example: numel 3, E4M3, a slot at 32; bytes 32 to 34 of flat are 126, 168, 48, byte 513 is 128. With scale 0.5 the
    tensor becomes [448, -0.25, 0.5].
    """
    # Every address is computed in 64 bits: a layout may exceed 2**31 elements.
    program = first_program + tl.program_id(0).to(tl.int64)
    row_ptr = chunk_ptr + program * 4
    address = tl.load(address_ptr + tl.load(row_ptr))
    target = address + tl.load(row_ptr + 1) * (TENSOR.primitive_bitwidth // 8)
    length = tl.load(row_ptr + 2).to(tl.int32)
    block = tl.arange(0, CHUNK // 32)[:, None]
    lane = block * 32 + tl.arange(0, 32)[None, :]
    there = (tl.load(row_ptr + 3) >> 5) + block.to(tl.int64)
    if address != 0:
        value = _read(flat_address, there, block * 32 < length, E4M3)
        if SCALED:
            # The factor arrives as the bits of a double.
            value *= scale_bits.to(tl.float64, bitcast=True).to(tl.float32)
        value = value.to(TENSOR)
        if (length % 8 == 0) & (target % 16 == 0):
            # The alignment is known, and the mask keeps groups of eight elements whole: 128-bit stores.
            target_ptr = tl.multiple_of(target.to(tl.pointer_type(TENSOR)), 16)
            tl.store(target_ptr + lane, value, mask=lane < length // 8 * 8)
        else:
            tl.store(target.to(tl.pointer_type(TENSOR)) + lane, value, mask=lane < length)


def dequantize(table: MxTable, tensors: Sequence[Tensor | None], *, scale: float = 1.0, matched: bool = False) -> None:
    """Unpack eight-bit blocks into `tensors`: decode, scale and cast in one pass.

    For CUDA tensors this is one kernel launch on the current stream. Each tensor becomes the values of its slot times
    `scale`, computed in float32 and rounded once to `table.dtype`.

    Args:
        table: the layout.
        tensors: one per slot, with the slot's shape, `table.dtype` and the device of `table.flat`. None is skipped. A
            tensor with other strides than its slot goes through a dense copy. They must not share memory with each
            other. Keep a reference to all of them until the work that may reuse their memory is ordered after this
            launch.
        scale: the factor.
        matched: as for `flatten`.

    Raises:
        ValueError: A tensor is wrong, as for `unflatten`. The text names the slot, and nothing was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import MxTable, Slot, dequantize, mx_bytes
        >>> flat = torch.zeros(mx_bytes(3), dtype=torch.uint8)
        >>> flat[:3], flat[512] = torch.tensor([126, 168, 48]), 128
        >>> table = MxTable(flat, [Slot("a", 0, (3,), (1,))], torch.float32, torch.float8_e4m3fn)
        >>> tensor = torch.empty(3)
        >>> dequantize(table, [tensor], scale=0.5)
        >>> tensor.tolist()
        [448.0, -0.25, 0.5]
    """
    if not uses_triton(table):
        dequantize_reference(table, tensors, scale=scale, matched=matched)
        return
    tensors = list(tensors)
    entries = check_all(tensors, table, written=True)
    entries.make_dense(table.slots, read=False)
    table.launcher.launch(_dequantize_kernel, entries.addresses, scale=scale, E4M3=table.e4m3)
    entries.write_back()


@torch.no_grad()
def dequantize_reference(
    table: MxTable, tensors: Sequence[Tensor | None], *, scale: float = 1.0, matched: bool = False
) -> None:
    """Unpack with torch's own operations, on any device. The result equals that of `dequantize`.

    Arguments and errors are those of `dequantize`.
    """
    stage = table.stage
    with stage.gaps_kept():
        mx_decode(table.flat, table.format.dtype, stage.flat)
    unflatten(stage, tensors, scale=scale, matched=matched)
