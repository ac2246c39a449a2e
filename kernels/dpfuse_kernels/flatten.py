"""Packs tensors into a flat buffer: copy, scale, cast and count in one pass. Knows no bucket and no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.entries import check_all, check_cheaply, diagnose
from dpfuse_kernels.pointer_table import PointerTable

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` brings it, when a kernel is first launched

__all__ = ["all_finite", "count_nonfinite", "flatten", "flatten_reference"]


def _flatten_kernel(
    flat_address: tl.int64,
    address_ptr: tl.tensor,  # [slots] int64
    chunk_ptr: tl.tensor,  # [programs, 4] int64: tensor, first element, elements, offset in flat
    scale_bits: tl.int64,
    first_program: tl.int64,
    extra_address: tl.int64,  # of counts, [slots] int32, where COUNT
    TENSOR: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program p copies one chunk: `length` elements of tensor `tensor`, from `start` on, to flat[offset:].

    Example: numels [3, 2], CHUNK 2, slots at 0 and 4 give chunks (0, 0, 2, 0), (0, 2, 1, 2), (1, 0, 2, 4).
    Tensors [1, 2, 3] and [4, 5], scale 0.5, in a buffer full of 9: flat is [0.5, 1, 1.5, 9, 2, 2.5].
    COUNT with tensors [1, inf, nan] and [4, nan]: counts [10, 20] become [12, 21].
    """
    # Every address is computed in 64 bits: a layout may exceed 2**31 elements.
    row_ptr = chunk_ptr + (first_program + tl.program_id(0).to(tl.int64)) * 4
    tensor = tl.load(row_ptr)
    address = tl.load(address_ptr + tensor)
    start = tl.load(row_ptr + 1)
    length = tl.load(row_ptr + 2).to(tl.int32)
    target = flat_address + tl.load(row_ptr + 3) * (WIRE.primitive_bitwidth // 8)
    lane = tl.arange(0, CHUNK)
    # A number is finite unless all bits of its exponent are set.
    BITS: tl.constexpr = tl.int64 if WIRE.is_fp64() else tl.int32 if WIRE.is_fp32() else tl.int16
    EXPONENT: tl.constexpr = (
        0x7FF0000000000000 if WIRE.is_fp64() else 0x7F800000 if WIRE.is_fp32() else 0x7C00 if WIRE.is_fp16() else 0x7F80
    )
    if address == 0:
        tl.store(target.to(tl.pointer_type(WIRE)) + lane, tl.full([CHUNK], 0, WIRE), mask=lane < length)
    else:
        source = address + start * (TENSOR.primitive_bitwidth // 8)
        # The factor arrives as the bits of a double, so float64 gets all of it and float32 its rounding.
        scale = scale_bits.to(tl.float64, bitcast=True).to(COMPUTE)
        if (length % 8 == 0) & (source % 16 == 0) & (target % 16 == 0):
            # A known alignment, and a mask that parts no eight elements: 128-bit loads and stores.
            source_ptr = tl.multiple_of(source.to(tl.pointer_type(TENSOR)), 16)
            target_ptr = tl.multiple_of(target.to(tl.pointer_type(WIRE)), 16)
            whole = lane < tl.multiple_of(length, 8)
            value = tl.load(source_ptr + lane, mask=whole)
            if SCALED:
                value = value.to(COMPUTE) * scale
            if value.dtype.is_fp64() and not WIRE.is_fp64():
                # To 16 bits by way of float32, as torch converts.
                value = value.to(tl.float32)
            value = value.to(WIRE)
            tl.store(target_ptr + lane, value, mask=whole)
            if COUNT:
                strange = ((value.to(BITS, bitcast=True) & EXPONENT) == EXPONENT) & whole
                count = tl.sum(strange.to(tl.int32))
                if count > 0:
                    tl.atomic_add(extra_address.to(tl.pointer_type(tl.int32)) + tensor, count, sem="relaxed")
        else:
            value = tl.load(source.to(tl.pointer_type(TENSOR)) + lane, mask=lane < length)
            if SCALED:
                value = value.to(COMPUTE) * scale
            if value.dtype.is_fp64() and not WIRE.is_fp64():
                value = value.to(tl.float32)
            value = value.to(WIRE)
            tl.store(target.to(tl.pointer_type(WIRE)) + lane, value, mask=lane < length)
            if COUNT:
                strange = ((value.to(BITS, bitcast=True) & EXPONENT) == EXPONENT) & (lane < length)
                count = tl.sum(strange.to(tl.int32))
                if count > 0:
                    tl.atomic_add(extra_address.to(tl.pointer_type(tl.int32)) + tensor, count, sem="relaxed")


@torch.no_grad()
def flatten(
    tensors: Sequence[Tensor | None], table: PointerTable, *, scale: float = 1.0, counts: Tensor | None = None
) -> None:
    """Pack `tensors` into their slots of `table.flat` with one kernel launch on the current stream.

    Each slot becomes the tensor times `scale`, computed in float32 (float64 where either side is) and rounded
    once to the dtype of `flat` (float64 to 16 bits by way of float32, as torch converts). What lies between
    slots is not touched.

    Args:
        tensors: one per slot, of the slot's shape, `table.dtype` and the device of `flat`. None packs zeros.
            A tensor that is its slot is scaled in place. One whose strides differ from the slot's goes
            through a dense copy. The caller keeps all of them referenced until work that may reuse their
            memory is ordered behind this launch.
        table: the layout.
        scale: the factor.
        counts: [slots] int32 on the device of `flat`; each is increased by the number of NaN and infinities that
            its slot holds now. None counts nothing.

    Raises:
        ValueError: a wrong tensor, by slot name, with nothing written: count, shape, dtype, device, sparse,
            memory that overlaps `flat` without being its slot; or a tensor moved while a CUDA graph is captured.

    Example:
        >>> from dpfuse_kernels import PointerTable, Slot, flatten
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> flatten([torch.tensor([1.0, 2.0, 3.0])], table, scale=0.5)
        >>> table.flat
        tensor([0.5000, 1.0000, 1.5000, 0.0000])
    """
    tensors = list(tensors)
    entries = check_all(tensors, table)
    if entries.own is None and scale == 1.0 and counts is None:
        return
    addresses = entries.addresses
    # Held until the launch; what is freed after it is reused behind it, on the same stream.
    dense = {index: table.slots[index].empty_like(tensor).copy_(tensor) for index, tensor in entries.irregular.items()}
    for index, copy in dense.items():
        addresses[index] = copy.data_ptr()
    table.launcher.launch(_flatten_kernel, addresses, scale=scale, extra=counts, COUNT=counts is not None)


@torch.no_grad()
def flatten_reference(
    tensors: Sequence[Tensor | None], table: PointerTable, *, scale: float = 1.0, counts: Tensor | None = None
) -> None:
    """Pack `tensors` with torch's own operations: the same result as `flatten`, on any device; the CPU path.

    Args:
        tensors: as for `flatten`; any strides.
        table: the layout.
        scale: the factor.
        counts: as for `flatten`.

    Raises:
        ValueError: a wrong tensor, by slot name.

    Example:
        >>> from dpfuse_kernels import PointerTable, Slot
        >>> slots = [Slot("a", 0, (3,), (1,)), Slot("b", 4, (2,), (1,))]
        >>> table = PointerTable(torch.full((6,), 9.0), slots, torch.float32)
        >>> flatten_reference([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], table, scale=0.5)
        >>> table.flat
        tensor([0.5000, 1.0000, 1.5000, 9.0000, 2.0000, 2.5000])
    """
    tensors = list(tensors)
    entries = check_cheaply(tensors, table)
    try:
        table.host_plan.pack(tensors, table, entries, scale)
    except RuntimeError:
        diagnose(tensors, table)
        raise
    if counts is not None:
        count_nonfinite(table, counts)


def count_nonfinite(table: PointerTable, counts: Tensor) -> None:
    """Increase `counts`, [slots] int32, by the number of NaN and infinities in each slot.

    On the CPU that costs one sum over the buffer, which is finite only if all is; where it is not, slots are counted
    one by one. On a GPU nothing waits for a result, so they always are.

    Example:
        >>> from dpfuse_kernels import PointerTable, Slot
        >>> flat = torch.tensor([1.0, float("inf"), float("nan")])
        >>> table = PointerTable(flat, [Slot("a", 0, (2,), (1,)), Slot("b", 2, (1,), (1,))], torch.float32)
        >>> counts = torch.tensor([10, 20], dtype=torch.int32)
        >>> count_nonfinite(table, counts)
        >>> counts.tolist()
        [11, 21]
    """
    if not table.flat.is_cuda and all_finite(table.flat):
        return
    counts += torch.stack([view.numel() - view.isfinite().count_nonzero() for view in table.new_views()])


def all_finite(values: Tensor) -> bool:
    """Is every value known to be finite? False may be a false alarm: a sum of finite numbers that overflows.

    Example:
        >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, float("nan")])), all_finite(torch.full((2,), 3e38))
        (True, False, False)
    """
    # The sum of 16-bit numbers as such would overflow too often.
    sum_type = torch.promote_types(values.dtype, torch.float32)
    return bool(values.sum(dtype=sum_type).isfinite())
