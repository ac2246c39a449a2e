"""`bit_hash` and its reference: each bit and each place counts; and its machine code."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from dpfuse_kernels.bit_hash import BitHashTable, Piece, _bit_hash_kernel, bit_hash, bit_hash_reference
from tests.kernels.compile_kernels import AMD, NVIDIA
from tests.kernels.ptx import narrow_products_in_addresses
from tests.kernels.test_ahead_of_time import compilations, targets

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
Hash = Callable[[BitHashTable, int, Mapping[int, Tensor], int, Tensor], None]


def kernel(table: BitHashTable, group: int, tensors: Mapping[int, Tensor], seed: int, pairs: Tensor) -> None:
    """`bit_hash`. In Triton 3.6 a sum of 32 bits that overflows is an error of the interpreter."""
    try:
        bit_hash(table, group, tensors, seed, pairs)
    except Exception as error:
        if "out of bounds for int32" in str(error):
            pytest.skip("the interpreter of this Triton has no sums that overflow")
        raise


both = pytest.mark.parametrize("hash_bits", [kernel, bit_hash_reference], ids=["kernel", "reference"])
MASK = 0xFFFFFFFF


def tables(tensors: Sequence[Tensor], chunk: int = 64) -> BitHashTable:
    """A table that hashes whole tensors, all in one group."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return BitHashTable(sizes, [[Piece(place, 0, size) for place, size in enumerate(sizes)]], CPU, chunk=chunk)


def number_of(pairs: Tensor) -> int:
    assert pairs.sum(1).eq(1).all(), "each bit and its complement"
    return sum(1 << place for place, bit in enumerate(pairs[:, 0].tolist()) if bit)


def hashed(hash_bits: Hash, tensors: Sequence[Tensor], seed: int = 3, dtype: torch.dtype = torch.float32) -> int:
    pairs = torch.full((32, 2), 7.0, dtype=dtype)
    hash_bits(tables(tensors), 0, dict(enumerate(tensors)), seed, pairs)
    return number_of(pairs)


def by_hand(tensors: Sequence[Tensor], seed: int) -> int:
    """The definition, with Python's numbers."""
    total = 0
    for index, tensor in enumerate(tensors):
        data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        for place in range(-(-len(data) // 4)):
            word = int.from_bytes(data[4 * place : 4 * place + 4].ljust(4, b"\0"), "little")
            word = (word + place * 0x9E3779B1 + index * 0x7FEB352D + seed * 0x2C1B3C6D) & MASK
            word = (word ^ word >> 16) * 0x85EBCA6B & MASK
            word = (word ^ word >> 13) * 0xC2B2AE35 & MASK
            total += word ^ word >> 16
    return total & MASK


@both
def test_example_of_the_kernel_docstring(hash_bits: Hash) -> None:
    assert "bits of the hash 5 are the pairs (1, 0), (0, 1), (1, 0), and 29 times (0, 1)" in (
        _bit_hash_kernel.__doc__ or ""
    )
    tensors = [torch.arange(5.0)]
    pairs = torch.full((32, 2), 7.0)
    hash_bits(tables(tensors), 0, dict(enumerate(tensors)), 1, pairs)
    number = by_hand(tensors, 1)
    assert pairs.tolist() == [[float(number >> b & 1), 1.0 - (number >> b & 1)] for b in range(32)]


@pytest.mark.one_in(3)
@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [torch.float32, torch.float64])
def test_any_dtype_and_length_is_hashed_as_defined(hash_bits: Hash, dtype: torch.dtype, pair: torch.dtype) -> None:
    numels = [1, 3, 64, 0, 130, 257]
    bits = [torch.randint(0, 2, (numel * 8,), dtype=torch.uint8) for numel in numels]
    width = torch.empty(0, dtype=dtype).element_size()
    tensors = [each[: n * width].view(dtype) for each, n in zip(bits, numels, strict=True)]
    assert hashed(hash_bits, tensors, dtype=pair) == by_hand(tensors, 3)
    assert hashed(hash_bits, tensors, seed=2**31 - 1) == by_hand(tensors, 2**31 - 1)


@both
def test_a_second_call_with_the_same_table_starts_from_nothing(hash_bits: Hash) -> None:
    tensors = [torch.randn(300), torch.randn(7)]
    table, pairs = tables(tensors), torch.zeros(32, 2)
    for _ in range(3):
        hash_bits(table, 0, dict(enumerate(tensors)), 5, pairs)
        assert number_of(pairs) == by_hand(tensors, 5)


@both
def test_pieces_of_a_pass_add_up_to_the_whole(hash_bits: Hash) -> None:
    tensor = torch.randn(1000)
    table = BitHashTable([4000], [[Piece(0, 0, 1600)], [Piece(0, 1600, 2400)]], CPU, chunk=64)
    found = []
    for group in (0, 1):
        pairs = torch.zeros(32, 2)
        hash_bits(table, group, {0: tensor}, 9, pairs)
        found.append(number_of(pairs))
    assert sum(found) & MASK == by_hand([tensor], 9)


@both
def test_a_tensor_that_is_left_out_adds_nothing(hash_bits: Hash) -> None:
    tensors = [torch.randn(9), torch.randn(9)]
    pairs = torch.zeros(32, 2)
    hash_bits(tables(tensors), 0, {0: tensors[0]}, 3, pairs)
    assert number_of(pairs) == by_hand(tensors[:1], 3)


@both
def test_views_at_any_address(hash_bits: Hash) -> None:
    memory = torch.randn(200).bfloat16()
    for offset in range(4):
        view = memory[offset : offset + 151]
        assert hashed(hash_bits, [view]) == by_hand([view.clone()], 3)


@pytest.mark.one_in(2)
@both
def test_each_flipped_bit_and_each_swap_changes_the_hash(hash_bits: Hash) -> None:
    chance = random.Random(0)
    usual = torch.randn(333)
    usual[5:9] = torch.tensor([1.0, 2.0, float("nan"), -0.0])
    before = hashed(hash_bits, [usual])
    for _ in range(60):
        changed = usual.clone()
        changed.view(torch.int32)[chance.randrange(333)] ^= torch.tensor(1 << chance.randrange(32)).int()
        assert hashed(hash_bits, [changed]) != before
    for one, other in [(5, 6), (5, 8), (6, 8), (1, 257)]:
        changed = usual.clone()
        changed[[one, other]] = usual[[other, one]]
        assert hashed(hash_bits, [changed]) != before
    assert hashed(hash_bits, [usual.clone()]) == before, "equal bits, a NaN among them"
    assert hashed(hash_bits, [usual[:100], usual[100:]]) != hashed(hash_bits, [usual[100:], usual[:100]])


def test_addresses_are_uploaded_once_and_a_capture_needs_no_new_ones() -> None:
    tensors = [torch.randn(9), torch.randn(3)]
    table, pairs = tables(tensors), torch.zeros(32, 2)
    for _ in range(3):
        kernel(table, 0, dict(enumerate(tensors)), 1, pairs)
    assert (table.ring.uploads, table.dispatcher.launches) == (1, 3)
    tensors[1] = torch.randn(3)
    kernel(table, 0, dict(enumerate(tensors)), 1, pairs)
    assert (table.ring.uploads, table.dispatcher.launches) == (2, 4)
    assert number_of(pairs) == by_hand(tensors, 1)


@targets(*NVIDIA, *AMD)
def test_the_machine_code_spills_nothing_and_addresses_are_of_64_bits(architecture: int | str) -> None:
    rows = compilations("bit_hash", architecture)
    assert len(rows) == 2
    for row in rows:
        assert row["spilled"] == 0, {**row, "assembly": ""}
        if architecture in NVIDIA:
            assert not narrow_products_in_addresses(str(row["assembly"]))
            assert "ld.global.v4" in str(row["assembly"])
