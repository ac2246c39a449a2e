"""Unpacks a flat buffer into tensors: copy, scale and cast in one pass. Knows no bucket and no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import uses_triton
from dpfuse_kernels.checks import check_all, check_cheaply, diagnose
from dpfuse_kernels.launch_again import launch_again
from dpfuse_kernels.pointer_table import PointerTable

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["unflatten", "unflatten_reference"]


def _unflatten_kernel(
    flat_address: tl.int64,
    address_ptr: tl.tensor,  # [slots] int64
    chunk_ptr: tl.tensor,  # [programs, 4] int64: tensor, first element, elements, offset in flat
    scale_bits: tl.int64,
    first_program: tl.int64,
    TENSOR: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy one chunk in program p: flat[offset:] to `length` elements of tensor `tensor`, from `start` on.

    Example: numels [3, 2], CHUNK 2, slots at 0 and 4 give chunks (0, 0, 2, 0), (0, 2, 1, 2), (1, 0, 2, 4).
    flat [1, 2, 3, 9, 4, 5], scale 0.5: the tensors become [0.5, 1, 1.5] and [2, 2.5].
    """
    # Every address is computed in 64 bits: a layout may exceed 2**31 elements.
    program = first_program + tl.program_id(0).to(tl.int64)
    row_ptr = chunk_ptr + program * 4
    address_ptr += tl.load(row_ptr)
    start = tl.load(row_ptr + 1) * (TENSOR.primitive_bitwidth // 8)
    length = tl.load(row_ptr + 2).to(tl.int32)
    source = flat_address + tl.load(row_ptr + 3) * (WIRE.primitive_bitwidth // 8)
    # The factor arrives as the bits of a double: float64 uses it exactly, float32 uses it rounded.
    scale = scale_bits.to(tl.float64, bitcast=True).to(COMPUTE)
    # With a known alignment, and a mask that keeps groups of eight elements whole: 128-bit loads and stores.
    aligned = (length % 8 == 0) & (source % 16 == 0)
    lane = tl.arange(0, CHUNK)
    whole = lane < length // 8 * 8
    value = tl.full([CHUNK], 0, WIRE)
    if aligned:
        # Before the address is looked at, which comes from another table.
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(WIRE)), 16)
        value = tl.load(source_ptr + lane, mask=whole, eviction_policy="evict_first")
    address = tl.load(address_ptr)
    target = address + start
    if address == 0:
        pass
    elif aligned & (target % 16 == 0):
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(TENSOR)), 16)
        _write(value, target_ptr + lane, whole, scale, COMPUTE, SCALED)
    else:
        # One element at a time, in parts of the chunk: a thread then needs no more registers than above.
        PART: tl.constexpr = CHUNK if CHUNK < 1024 else CHUNK // 4
        first = 0
        while first < length:
            place = first + tl.arange(0, PART)
            single = tl.load(source.to(tl.pointer_type(WIRE)) + place, mask=place < length)
            single_ptr = target.to(tl.pointer_type(TENSOR)) + place
            _write(single, single_ptr, place < length, scale, COMPUTE, SCALED)
            first += PART


def _write(
    value: tl.tensor,
    target_ptr: tl.tensor,
    mask: tl.tensor,
    scale: tl.tensor,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Compute and write a part of a chunk."""
    TENSOR: tl.constexpr = target_ptr.dtype.element_ty
    if SCALED:
        value = value.to(COMPUTE) * scale
    if value.dtype.is_fp64() and not TENSOR.is_fp64():
        # Torch converts float64 to 16 bits through float32.
        value = value.to(tl.float32)
    tl.store(target_ptr, value.to(TENSOR), mask=mask)


def unflatten(
    table: PointerTable, tensors: Sequence[Tensor | None], *, scale: float = 1.0, matched: bool = False
) -> None:
    """Copy the slots of `table.flat` to `tensors`: copy, scale and cast in one pass.

    For CUDA tensors this is one kernel launch on the current stream. Each tensor becomes its slot times `scale`. The
    product is computed in float32, or in float64 if either side is float64, and rounded once to `table.dtype`. Float64
    is rounded to 16 bits through float32, as torch does it.

    Args:
        table: the layout.
        tensors: one per slot, with the slot's shape, `table.dtype` and the device of `flat`. None is skipped. A tensor
            that is its slot is scaled in place. A tensor with other strides than its slot goes through a dense copy.
            They must not share memory with each other. Keep a reference to all of them until the work that may reuse
            their memory is ordered after this launch.
        scale: the factor.
        matched: as for `flatten`.

    Raises:
        ValueError: A tensor is wrong: count, shape, dtype, device, sparse, expanded, or memory that overlaps `flat`
            without being the slot. Or it moved while a CUDA graph is captured. The text names the slot, and nothing
            was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, unflatten
        >>> table = PointerTable(torch.tensor([1.0, 2.0, 3.0]), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> gradient = torch.empty(3)
        >>> unflatten(table, [gradient], scale=0.5)
        >>> gradient
        tensor([0.5000, 1.0000, 1.5000])
    """
    if not uses_triton(table):
        plain = matched and scale == 1.0 and table.dtype == table.flat.dtype
        if not (plain and table.host_plan.unpack_matched(tensors, table)):  # type: ignore[arg-type]
            unflatten_reference(table, tensors, scale=scale)
        return
    if type(tensors) is not list:
        tensors = list(tensors)
    if launch_again(_unflatten_kernel, tensors, table, scale):
        return
    entries = check_all(tensors, table, written=True)
    if entries.own is None and scale == 1.0:
        return
    entries.make_dense(table.slots, read=False)
    # Freed after the launch. Work that reuses this memory is ordered after it, on the same stream.
    table.launcher.launch(_unflatten_kernel, entries.addresses, scale=scale)
    entries.write_back()


@torch.no_grad()
def unflatten_reference(table: PointerTable, tensors: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
    """Unpack with torch's own operations, on any device. The result equals that of `unflatten`.

    Arguments and errors are those of `unflatten`.
    """
    tensors = list(tensors)
    entries = check_cheaply(tensors, table, written=True)
    try:
        table.host_plan.unpack(table, tensors, entries, scale)
    except RuntimeError:
        diagnose(tensors, table, written=True)
        raise
