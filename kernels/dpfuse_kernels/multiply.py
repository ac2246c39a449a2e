"""Multiplies all tensors of a layout by a scalar on the device. Knows no bucket and no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import uses_triton
from dpfuse_kernels.checks import check_all, check_cheaply
from dpfuse_kernels.pointer_table import PointerTable

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["multiply", "multiply_each", "multiply_reference"]


def _multiply_kernel(
    flat_address: tl.int64,  # not used: tensors are written where they are
    address_ptr: tl.tensor,  # [slots] int64
    chunk_ptr: tl.tensor,  # [programs, 4] int64: tensor, first element, elements, offset in flat
    scale_bits: tl.int64,  # not used
    first_program: tl.int64,
    factor_address: tl.int64,  # float32, float64 where the tensors are
    TENSOR: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Multiply one chunk in program p: `length` elements of tensor `tensor`, from `start` on. 1 as factor does nothing.

    Example: numels [3, 2], CHUNK 2, slots at 0 and 4 give chunks (0, 0, 2, 0), (0, 2, 1, 2), (1, 0, 2, 4).
    Tensors [1, 2, 3] and [4, 5], factor 0.5: they become [0.5, 1, 1.5] and [2, 2.5].
    """
    # Every address is computed in 64 bits: a layout may exceed 2**31 elements.
    row_ptr = chunk_ptr + (first_program + tl.program_id(0).to(tl.int64)) * 4
    address = tl.load(address_ptr + tl.load(row_ptr))
    start = tl.load(row_ptr + 1)
    length = tl.load(row_ptr + 2).to(tl.int32)
    lane = tl.arange(0, CHUNK)
    PRODUCT: tl.constexpr = tl.float64 if TENSOR.is_fp64() else tl.float32
    factor = tl.load(factor_address.to(tl.int64).to(tl.pointer_type(PRODUCT)))
    if (address != 0) & (factor != 1.0):
        target = address + start * (TENSOR.primitive_bitwidth // 8)
        if (length % 8 == 0) & (target % 16 == 0):
            # The alignment is known, and the mask keeps groups of eight elements whole: 128-bit loads and stores.
            target_ptr = tl.multiple_of(target.to(tl.pointer_type(TENSOR)), 16) + lane
            whole = lane < length // 8 * 8
            value = tl.load(target_ptr, mask=whole).to(PRODUCT) * factor
            tl.store(target_ptr, value.to(TENSOR), mask=whole)
        else:
            target_ptr = target.to(tl.pointer_type(TENSOR)) + lane
            value = tl.load(target_ptr, mask=lane < length).to(PRODUCT) * factor
            tl.store(target_ptr, value.to(TENSOR), mask=lane < length)


@torch.no_grad()
def multiply(tensors: Sequence[Tensor | None], table: PointerTable, factor: Tensor) -> None:
    """Multiply `tensors` in place by a scalar on their device, which the host does not read.

    For CUDA tensors this is one kernel launch on the current stream; a factor of 1 moves no byte.

    Args:
        tensors: one per slot, with the slot's shape, `table.dtype` and the device of `table.flat`. None is skipped.
            They must not share memory with each other.
        table: the layout. Its buffer changes only where it holds one of the tensors.
        factor: a scalar on that device. Products are computed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: A tensor is wrong, as for `unflatten`. The text names the slot, and nothing was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, multiply
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> gradient = torch.tensor([1.0, 2.0, 3.0])
        >>> multiply([gradient], table, torch.tensor(0.5))
        >>> gradient
        tensor([0.5000, 1.0000, 1.5000])
    """
    if not uses_triton(table):
        multiply_reference(tensors, table, factor)
        return
    tensors = list(tensors)
    entries = check_all(tensors, table, written=True)
    addresses = entries.addresses
    factor = factor.to(torch.float64 if table.dtype == torch.float64 else torch.float32)
    for index in entries.irregular:
        addresses[index] = 0
    table.launcher.launch(_multiply_kernel, addresses, extras=(factor,))
    multiply_each([*entries.irregular.values()], factor)


@torch.no_grad()
def multiply_reference(tensors: Sequence[Tensor | None], table: PointerTable, factor: Tensor) -> None:
    """Multiply with torch's own operations, on any device. Tensors that fill the buffer take one operation.

    Arguments and errors are those of `multiply`.
    """
    tensors = list(tensors)
    factor = factor.to(torch.float64 if table.dtype == torch.float64 else torch.float32)
    if check_cheaply(tensors, table, written=True).own is None:
        with table.gaps_kept():
            table.flat.mul_(factor)
    elif present := [tensor for tensor in tensors if tensor is not None]:
        multiply_each(present, factor)


@torch.no_grad()
def multiply_each(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place with torch's operations, on any device. Products are rounded once.

    Args:
        tensors: of one dtype, device and layout.
        factor: a number, or a tensor with one, which the host does not read if it is on their device.
    """
    if not isinstance(factor, Tensor):
        for tensor in tensors:  # one by one: on a GPU `_foreach_mul_` would round the number to 16 bits
            tensor.mul_(factor)
        return
    if not tensors:
        return
    factor = factor.reshape(()).to(tensors[0].device)
    if tensors[0].dtype in (torch.bfloat16, torch.float16) and tensors[0].layout is torch.strided:
        vector = factor.view(1).float()  # a scalar on a GPU is rounded to 16 bits before it multiplies; a vector is not
        for tensor in tensors:
            torch.atleast_1d(tensor).mul_(vector)
    else:
        torch._foreach_mul_(list(tensors), factor)
