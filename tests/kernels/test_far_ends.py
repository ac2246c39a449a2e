"""Layouts of more than 2**31 elements, of which only the last programs run.

The memory is reserved but, except for the last pages, never touched.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import MxTable, PointerTable, Slot, mx_bytes
from dpfuse_kernels.dequantize import _dequantize_kernel
from dpfuse_kernels.flatten import _flatten_kernel
from dpfuse_kernels.quantize import _quantize_kernel
from dpfuse_kernels.unflatten import _unflatten_kernel

NUMEL = 2**31 + 5
EARLIER = 4096  # elements of a first, small slot: one program's


def reserve(numel: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Address space, not memory: pages come into being when they are touched."""
    try:
        return torch.empty(numel, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"this machine does not reserve {dtype.itemsize * numel} bytes: {error}")


def test_the_last_programs_of_a_layout_beyond_31_bits() -> None:
    flat = reserve(EARLIER + NUMEL)
    tensor = reserve(NUMEL)
    slots = [Slot("first", 0, (EARLIER,), (1,)), Slot("huge", EARLIER, (NUMEL,), (1,))]
    table = PointerTable(flat, slots, torch.bfloat16)
    total = 1 + -(-NUMEL // table.launcher.shape.chunk)
    assert len(table.launcher._rows) == total
    tail = slice(NUMEL - 3000, NUMEL)
    values = torch.arange(3000).remainder(251).to(torch.bfloat16)
    tensor[tail] = values
    addresses = [0, tensor.data_ptr()]
    last = range(total - 2, total)

    off = dict.fromkeys(("COUNT", "FACTOR", "RESIDUAL", "ACCUMULATE"), False)
    table.launcher.launch(_flatten_kernel, addresses, extras=(None, None, None), programs=last, **off)
    assert torch.equal(flat[EARLIER:][tail], values)
    assert flat[:EARLIER].eq(0).all(), "an offset of 32 bits would have wrapped round to here"

    tensor[tail] = 0
    table.launcher.launch(_unflatten_kernel, addresses, programs=last)
    assert torch.equal(tensor[tail], values)
    assert tensor[:EARLIER].eq(0).all()


def test_the_last_programs_of_eight_bit_blocks_beyond_31_bits() -> None:
    flat = reserve(mx_bytes(EARLIER + NUMEL), torch.uint8)
    tensor = reserve(NUMEL)
    residual = reserve(len(flat) // 528 * 512, torch.float32)
    slots = [Slot("first", 0, (EARLIER,), (1,)), Slot("huge", EARLIER, (NUMEL,), (1,))]
    table = MxTable(flat, slots, torch.bfloat16, torch.float8_e4m3fn)
    total = 1 + -(-NUMEL // table.launcher.shape.chunk)
    tail = slice(NUMEL - 3000, NUMEL)
    values = torch.arange(3000).remainder(15).to(torch.bfloat16)
    tensor[tail] = values
    addresses = [0, tensor.data_ptr()]
    last = range(total - 2, total)

    on = {"COUNT": False, "FACTOR": False, "RESIDUAL": True, "E4M3": True}
    table.launcher.launch(_quantize_kernel, addresses, extras=(None, None, residual), programs=last, **on)
    assert flat[mx_bytes(EARLIER + NUMEL - 3000) : mx_bytes(EARLIER + NUMEL)].count_nonzero() > 2000
    assert flat[: mx_bytes(EARLIER)].eq(0).all(), "an offset of 32 bits would have wrapped round to here"
    assert residual[:EARLIER].eq(0).all()

    tensor[tail] = 0
    table.launcher.launch(_dequantize_kernel, addresses, programs=last, E4M3=True)
    assert torch.equal(tensor[tail], values)
    assert tensor[:EARLIER].eq(0).all()
