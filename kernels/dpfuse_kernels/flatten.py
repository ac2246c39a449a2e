"""Packs tensors into a flat buffer: copy, scale, cast and count in one pass. Knows no bucket and no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import uses_triton
from dpfuse_kernels.checks import check_all, check_cheaply, diagnose
from dpfuse_kernels.launch_again import launch_again
from dpfuse_kernels.options import check_options
from dpfuse_kernels.pointer_table import PointerTable

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["all_finite", "count_nonfinite", "flatten", "flatten_again", "flatten_reference", "product"]


def _flatten_kernel(
    flat_address: tl.int64,
    address_ptr: tl.tensor,  # [slots] int64
    chunk_ptr: tl.tensor,  # [programs, 4] int64: tensor, first element, elements, offset in flat
    scale_bits: tl.int64,
    first_program: tl.int64,
    counts_address: tl.int64,  # [slots] int32, where COUNT
    factor_address: tl.int64,  # [] float32, where FACTOR
    residual_address: tl.int64,  # float32, as many elements as flat, where RESIDUAL
    TENSOR: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    FACTOR: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy one chunk in program p: `length` elements of tensor `tensor`, from `start` on, to flat[offset:].

    Example: numels [3, 2], CHUNK 2, slots at 0 and 4 give chunks (0, 0, 2, 0), (0, 2, 1, 2), (1, 0, 2, 4).
    Tensors [1, 2, 3] and [4, 5], scale 0.5, in a buffer full of 9: flat is [0.5, 1, 1.5, 9, 2, 2.5].
    COUNT with tensors [1, inf, nan] and [4, nan]: counts [10, 20] become [12, 21].
    FACTOR 4 and ACCUMULATE, with scale 0.5, tensors [1, 2, 3] and [4, 5]: flat is [11, 13, 15, 9, 17, 19].
    RESIDUAL full of 0.25 with a float16 buffer, tensors [1, 2048, 3] and [4, 5]: flat is
    [1.25, 2048, 3.25, 9, 4.25, 5.25] and residual is [0, 0.25, 0, 0.25, 0, 0].
    """
    # Every address is computed in 64 bits: a layout may exceed 2**31 elements.
    row_ptr = chunk_ptr + (first_program + tl.program_id(0).to(tl.int64)) * 4
    tensor = tl.load(row_ptr)
    address = tl.load(address_ptr + tensor)
    start = tl.load(row_ptr + 1)
    length = tl.load(row_ptr + 2).to(tl.int32)
    offset = tl.load(row_ptr + 3)
    target = flat_address + offset * (WIRE.primitive_bitwidth // 8)
    residual = residual_address + offset * 4
    lane = tl.arange(0, CHUNK)
    count_ptr = (counts_address + tensor * 4).to(tl.pointer_type(tl.int32))
    if (address == 0) & (not RESIDUAL):
        if not ACCUMULATE:
            tl.store(target.to(tl.pointer_type(WIRE)) + lane, tl.full([CHUNK], 0, WIRE), mask=lane < length)
        elif COUNT:
            kept = tl.load(target.to(tl.pointer_type(WIRE)) + lane, mask=lane < length)
            _count(kept, lane < length, count_ptr, WIRE)
    else:
        source = address + start * (TENSOR.primitive_bitwidth // 8)
        # The factor arrives as the bits of a double: float64 uses it exactly, float32 uses it rounded.
        scale = scale_bits.to(tl.float64, bitcast=True)
        if FACTOR:
            scale *= tl.load(factor_address.to(tl.int64).to(tl.pointer_type(tl.float32))).to(tl.float64)
        scale = scale.to(COMPUTE)
        present = address != 0
        aligned = (length % 8 == 0) & (source % 16 == 0) & (target % 16 == 0)
        if RESIDUAL:
            aligned &= residual % 16 == 0
        if aligned:
            # The alignment is known, and the mask keeps groups of eight elements whole: 128-bit loads and stores.
            _pack(
                tl.multiple_of(source.to(tl.pointer_type(TENSOR)), 16) + lane,
                tl.multiple_of(target.to(tl.pointer_type(WIRE)), 16) + lane,
                tl.multiple_of(residual.to(tl.pointer_type(tl.float32)), 16) + lane,
                count_ptr,
                lane < length // 8 * 8,
                present,
                scale,
                WIRE=WIRE,
                COMPUTE=COMPUTE,
                SCALED=SCALED or FACTOR,
                COUNT=COUNT,
                RESIDUAL=RESIDUAL,
                ACCUMULATE=ACCUMULATE,
            )
        else:
            # One element at a time, in parts of the chunk: a thread then needs no more registers than above.
            PART: tl.constexpr = CHUNK if CHUNK < 1024 else CHUNK // 4
            first = 0
            while first < length:
                place = first + tl.arange(0, PART)
                _pack(
                    source.to(tl.pointer_type(TENSOR)) + place,
                    target.to(tl.pointer_type(WIRE)) + place,
                    residual.to(tl.pointer_type(tl.float32)) + place,
                    count_ptr,
                    place < length,
                    present,
                    scale,
                    WIRE=WIRE,
                    COMPUTE=COMPUTE,
                    SCALED=SCALED or FACTOR,
                    COUNT=COUNT,
                    RESIDUAL=RESIDUAL,
                    ACCUMULATE=ACCUMULATE,
                )
                first += PART


def _pack(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    count_ptr: tl.tensor,
    mask: tl.tensor,
    present: tl.tensor,  # bool: False reads zeros
    scale: tl.tensor,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """Read, compute and write one chunk of `_flatten_kernel`."""
    # Nothing reads a gradient again before it is overwritten. So it leaves the cache first, and the buffer stays.
    value = tl.load(
        source_ptr, mask=tl.where(present, mask, False) if RESIDUAL else mask, eviction_policy="evict_first"
    )
    if SCALED:
        value = value.to(COMPUTE) * scale
    if RESIDUAL:
        # A zero times an infinite factor would be NaN. Adding -0.0 changes no value.
        value = tl.where(present, value.to(COMPUTE), -0.0)
    if ACCUMULATE:
        value = tl.load(target_ptr, mask=mask).to(COMPUTE) + value.to(COMPUTE)
    if RESIDUAL:
        value += tl.load(residual_ptr, mask=mask).to(COMPUTE)
    exact = value
    if value.dtype.is_fp64() and not WIRE.is_fp64():
        # Torch converts float64 to 16 bits through float32.
        value = value.to(tl.float32)
    value = value.to(WIRE)
    tl.store(target_ptr, value, mask=mask)
    if RESIDUAL:
        error = exact - value.to(COMPUTE)
        error = tl.where(tl.abs(error) < float("inf"), error, 0.0)
        tl.store(residual_ptr, error.to(tl.float32), mask=mask)
    if COUNT:
        _count(value, mask, count_ptr, WIRE)


def _count(value: tl.tensor, mask: tl.tensor, count_ptr: tl.tensor, WIRE: tl.constexpr) -> None:
    """Add the number of values that are not finite to the count. Such values have all exponent bits set."""
    BITS: tl.constexpr = tl.int64 if WIRE.is_fp64() else tl.int32 if WIRE.is_fp32() else tl.int16
    EXPONENT: tl.constexpr = (
        0x7FF0000000000000 if WIRE.is_fp64() else 0x7F800000 if WIRE.is_fp32() else 0x7C00 if WIRE.is_fp16() else 0x7F80
    )
    strange = ((value.to(BITS, bitcast=True) & EXPONENT) == EXPONENT) & mask
    count = tl.sum(strange.to(tl.int32))
    if count > 0:
        tl.atomic_add(count_ptr, count, sem="relaxed")


def flatten(
    tensors: Sequence[Tensor | None],
    table: PointerTable,
    *,
    scale: float = 1.0,
    counts: Tensor | None = None,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
    accumulate: bool = False,
    matched: bool = False,
) -> None:
    """Pack `tensors` into their slots of `table.flat`: copy, scale and cast in one pass; count if `counts` is given.

    For CUDA tensors this is one kernel launch on the current stream. Each slot becomes the tensor times `scale`. The
    product is computed in float32, or in float64 if either side is float64, and rounded once to the dtype of `flat`.
    Float64 is rounded to 16 bits through float32, as torch does it. The elements between slots are not touched, in
    `flat` or in `residual`.

    Args:
        tensors: one per slot, with the slot's shape, `table.dtype` and the device of `flat`. None packs zeros for any
            `scale` and `factor`. A tensor that is its slot is scaled in place. A tensor with other strides than its
            slot goes through a dense copy. Keep a reference to all of them until the work that may reuse their memory
            is ordered after this launch.
        table: the layout.
        scale: the factor.
        counts: [slots] int32 on the device of `flat`. Each count grows by the number of NaN and infinities that its
            slot now holds. None counts nothing.
        factor: [] float32 on the device of `flat`, read by the kernel. Tensors are multiplied by `scale * factor`,
            which is computed in double precision.
        residual: [flat.numel()] float32 on the device of `flat`, for error feedback. The rounding errors of earlier
            calls are added before rounding, and the new errors are kept (0 where an error is not finite). In short,
            v = x * scale * factor + residual; flat = round(v); residual = v - flat. Not for a float64 buffer.
        accumulate: add to what the slot holds, before adding the residual and rounding. A tensor that is None then
            leaves its slot unchanged.
        matched: promise of the caller that `tensors` is a list of tensors with the shapes and the device of their
            slots, as autograd guarantees for gradients. The CPU path then checks only dtypes, at about 0.05 us per
            tensor. Before a kernel, all checks are made.

    Raises:
        ValueError: A tensor is wrong: count, shape, dtype, device, sparse, or memory that overlaps `flat` without being
            the slot. Or it moved while a CUDA graph is captured, or `factor` or `residual` does not fit. The text names
            the slot, and nothing was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, flatten
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> flatten([torch.tensor([1.0, 2.0, 3.0])], table, scale=0.5)
        >>> table.flat
        tensor([0.5000, 1.0000, 1.5000, 0.0000])

        With a residual, a small value that a 16-bit buffer cannot hold is kept and sent later:

        >>> table = PointerTable(torch.zeros(1, dtype=torch.float16), [Slot("a", 0, (1,), (1,))], torch.float32)
        >>> residual = torch.zeros(1)
        >>> for _ in range(3):
        ...     flatten([torch.tensor([2048.75])], table, residual=residual)
        ...     print(table.flat.item(), residual.item())
        2048.0 0.75
        2050.0 -0.5
        2048.0 0.25
    """
    # The choice is read here, because a call for each bucket costs more than the check.
    if not (table.triton or (table.triton is None and uses_triton(table))):
        if factor is not None or residual is not None or accumulate:
            check_options(table, factor, residual)
            scale, factor = product(scale, factor), None
            matched = matched and residual is None and not accumulate
        if not (matched and table.host_plan.pack_matched(tensors, table, scale)):  # type: ignore[arg-type]
            flatten_reference(tensors, table, scale=scale, counts=counts, residual=residual, accumulate=accumulate)
        elif counts is not None:
            count_nonfinite(table, counts)
        return
    if type(tensors) is not list:
        tensors = list(tensors)
    if factor is not None or residual is not None:
        check_options(table, factor, residual)
    plain = counts is None and factor is None and residual is None and not accumulate
    if plain and launch_again(_flatten_kernel, tensors, table, scale):
        return
    entries = check_all(tensors, table)
    if plain and entries.own is None and scale == 1.0:
        return
    entries.make_dense(table.slots, read=True)
    table.launcher.launch(
        _flatten_kernel,
        entries.addresses,
        scale=scale,
        extras=(counts, factor, residual),
        COUNT=counts is not None,
        FACTOR=factor is not None,
        RESIDUAL=residual is not None,
        ACCUMULATE=accumulate,
    )


def flatten_again(tensors: list[Tensor | None], table: PointerTable, scale: float) -> bool:
    """Pack `tensors` as the last call of `flatten` over this table did, if they are as usual.

    For a kernel that means tensors like those of that call, at the same addresses. Elsewhere it means tensors that have
    the dtype of the table, and are not their slots.

    Args:
        tensors: as for `flatten` with `matched`; a list.
        table: as for `flatten`.
        scale: as for `flatten`.

    Returns:
        Whether they were packed. If not, `flatten` packs them, or says what is wrong.

    Example:
        >>> from dpfuse_kernels import PointerTable, Slot, flatten
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> flatten_again([torch.ones(3)], table, 1.0)
        False
        >>> flatten([torch.ones(3)], table)
        >>> flatten_again([torch.full((3,), 5.0)], table, 0.5), flatten_again([None], table, 0.5)
        (True, False)
        >>> table.flat
        tensor([2.5000, 2.5000, 2.5000, 0.0000])
    """
    if table.triton is False:
        return table.host_plan.pack_matched(tensors, table, scale)
    return launch_again(_flatten_kernel, tensors, table, scale)


@torch.no_grad()
def flatten_reference(
    tensors: Sequence[Tensor | None],
    table: PointerTable,
    *,
    scale: float = 1.0,
    counts: Tensor | None = None,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Pack `tensors` with torch's own operations, on any device. The result equals that of `flatten`.

    Arguments and errors are those of `flatten`; the host reads `factor`.
    """
    tensors = list(tensors)
    check_options(table, factor, residual)
    scale = product(scale, factor)
    entries = check_cheaply(tensors, table)
    try:
        if residual is None and not accumulate:
            table.host_plan.pack(tensors, table, entries, scale)
        elif residual is None and table.flat.dtype == table.compute_dtype:
            table.host_plan.add(tensors, table, entries, scale)
        else:
            table.host_plan.pack_staged(tensors, table, entries, scale, residual, accumulate)
    except RuntimeError:
        diagnose(tensors, table)
        raise
    if counts is not None:
        count_nonfinite(table, counts)


def product(scale: float, factor: Tensor | None) -> float:
    """Return `scale` times `factor` as the kernel computes it. The host reads `factor`.

    Example:
        >>> product(0.5, torch.tensor(3.0)), product(0.5, None)
        (1.5, 0.5)
    """
    return scale if factor is None else scale * float(factor)


def count_nonfinite(table: PointerTable, counts: Tensor) -> None:
    """Increase `counts`, [slots] int32, by the number of NaN and infinities in each slot.

    On the CPU one sum over the buffer shows whether all values are finite. Only if it is not finite, slots are counted
    one by one. On a GPU slots are always counted one by one, because the host must not wait for the sum.

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
    """Whether every value is known to be finite. False may be wrong: the sum of finite numbers can overflow.

    Example:
        >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, float("nan")])), all_finite(torch.full((2,), 3e38))
        (True, False, False)
    """
    # A sum in 16 bits would overflow too often.
    sum_type = torch.promote_types(values.dtype, torch.float32)
    return bool(values.sum(dtype=sum_type).isfinite())
