"""Memory below 2 GiB, as Debian's Python has: Triton's interpreter takes such an address for a number of 32 bits."""

from __future__ import annotations

import mmap
import platform
import sys

import pytest
import torch
from torch import Tensor

from dpfuse_kernels.bit_hash import BitHashTable, Piece, bit_hash_reference
from tests.kernels.test_bit_hash import kernel
from tests.kernels.test_hints import KERNELS

BELOW = 0x40  # MAP_32BIT, which Python 3.13 was the first to name

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="only Linux on x86-64 takes a wish for an address"
)


def low(values: Tensor) -> Tensor:
    memory = mmap.mmap(-1, values.numel() * values.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | BELOW)
    found = torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values)
    assert found.data_ptr() < 1 << 31
    return found


def test_each_address_becomes_a_pointer_from_64_bits() -> None:
    sources = [path.read_text() for path in KERNELS.glob("*.py")]
    assert sum(source.count("address.to(tl.int64).to(tl.pointer_type(") for source in sources) > 10
    assert not any("address.to(tl.pointer_type(" in source for source in sources)


def test_the_hash_of_bits_may_be_written_there() -> None:
    tensor, found = low(torch.arange(77.0)), low(torch.zeros(32, 2))
    expected = torch.zeros(32, 2)
    table = BitHashTable([tensor.nbytes], [[Piece(0, 0, tensor.nbytes)]], torch.device("cpu"))
    kernel(table, 0, {0: tensor}, 1, found)
    bit_hash_reference(table, 0, {0: tensor}, 1, expected)
    assert torch.equal(found, expected)
