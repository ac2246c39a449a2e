"""The hash of weights on a GPU equals its reference."""

from __future__ import annotations

import pytest
import torch

from dpfuse.engine.tensor_hash import _hash_on_device, hash_of, hash_of_all, read
from dpfuse_kernels.bit_hash import BitHashTable, Piece, bit_hash, bit_hash_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
NUMELS = [1, 3, 64, 0, 130, 4099, 1 << 20]


def hashed(hash_bits, tensors, device):
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    table = BitHashTable(sizes, [[Piece(place, 0, size) for place, size in enumerate(sizes)]], device)
    pairs = torch.full((32, 2), 7.0, device=device)
    hash_bits(table, 0, dict(enumerate(tensors)), 3, pairs)
    return pairs.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_that_of_the_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = [
        torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator) for numel in NUMELS
    ]
    tensors = [each.view(dtype) for each in bits]
    expected = hashed(bit_hash_reference, tensors, torch.device("cpu"))
    found = hashed(bit_hash, [tensor.cuda() for tensor in tensors], torch.device("cuda", 0))
    assert torch.equal(found, expected)


def test_a_flipped_bit_and_an_odd_address_change_it_as_they_should():
    device = torch.device("cuda", 0)
    data = torch.randint(0, 256, (4097,), dtype=torch.uint8, device=device)
    before = hashed(bit_hash, [data[1:]], device)
    assert torch.equal(hashed(bit_hash, [data[1:].clone()], device), before)
    data[-1] ^= 1
    assert not torch.equal(hashed(bit_hash, [data[1:]], device), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_of_a_tensor_is_that_of_the_cpu_and_the_host_does_not_wait(dtype):
    values = torch.randn(4099).mul(9).to(dtype)
    there = values.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [hash_of(there[1:], 5), hash_of(there, hash_of(there[1:]), seed=3), hash_of_all([there, 1, None])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, whole = (each.contiguous().view(torch.uint8) for each in (values[1:], values))
    expected = [_hash_on_device(first, 5), _hash_on_device(whole, _hash_on_device(first, 0), 3)]
    assert read(found)[:2] == [int(number) for number in expected]
