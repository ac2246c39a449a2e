"""The hash of a tensor: equal bits give equal numbers, every change is seen, and no device is waited for."""

from __future__ import annotations

import dataclasses
from functools import reduce
from zlib import crc32

import pytest
import torch

from dpfuse.engine import tensor_hash
from dpfuse.engine.tensor_hash import NOTHING, hash_of, hash_of_all, hash_of_small, joined, read, text_of
from dpfuse_kernels.bit_hash import BitHashTable, Piece, bit_hash_reference
from tests.operations import Operations

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool)
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
GENERATOR = ((0xEDB88320 << 1) | 1).to_bytes(5, "little")  # of CRC-32: it divides the difference of such bytes


def bytes_in(values):
    return values.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def device_hash(values, start=0, seed=0):
    return int(tensor_hash._hash_on_device(bytes_in(values), start, seed))


def small_hash(values, start=0, seed=0):
    return hash_of_small([values], seed)


def host_hash(values, start=0, seed=0):
    return hash_of(values, start, seed=seed)


each_way = pytest.mark.parametrize("number", [host_hash, small_hash, device_hash], ids=["CPU", "small", "device"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_cpu_it_is_the_crc_of_the_bytes_and_of_an_odd_seed_backwards(dtype):
    values = torch.randn(3, 37).mul(9).to(dtype)
    told = bytes(bytes_in(values).tolist())
    for seed, memory in ((0, told), (1, told[::-1]), (6, told), (7, told[::-1])):
        assert hash_of(values, 5, seed=seed) == crc32(memory, 5)
        assert hash_of_small([values], seed) == hash_of(values, seed=seed)
    several = [values, values[1:], values.t(), values[0, :0]]
    for seed in (0, 1):
        assert hash_of_small(several, seed) == reduce(lambda start, one: hash_of(one, start, seed=seed), several, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [16, 1 << 24])
def test_on_a_device_it_is_the_number_of_the_kernel(dtype, chunk, monkeypatch):
    monkeypatch.setattr(tensor_hash, "CHUNK", chunk)
    for values in torch.randn(200).mul(9).to(dtype).split([37, 1, 162]):  # at any address, and of any length
        for seed in (0, 5):
            size, pairs = values.nbytes, torch.zeros(32, 2)
            bit_hash_reference(BitHashTable([size], [[Piece(0, 0, size)]], CPU), 0, {0: values}, seed, pairs)
            expected = sum(1 << place for place, bit in enumerate(pairs[:, 0].tolist()) if bit)
            assert int(tensor_hash._hash_on_device(values.view(torch.uint8), 0, seed)) == expected


@each_way
@pytest.mark.parametrize("seed", [0, 1])
def test_each_flipped_bit_and_two_exchanged_words_give_another_hash(number, seed):
    values = torch.arange(1, 8, dtype=torch.int32)
    found, memory = [number(values, seed=seed)], values.view(torch.uint8)
    for bit in range(8 * len(memory)):
        memory[bit // 8] ^= 1 << bit % 8
        found.append(number(values, seed=seed))
        memory[bit // 8] ^= 1 << bit % 8
    for first in range(7):
        for second in range(first):
            swapped = values.clone()
            swapped[[first, second]] = values[[second, first]]
            found.append(number(swapped, seed=seed))
    assert len({*found}) == len(found) == 1 + 8 * 28 + 21
    assert number(values.clone(), seed=seed) == found[0]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("nbytes", [tensor_hash.LARGE, tensor_hash.LARGE + 8 * tensor_hash.ROW + 13])
def test_of_large_memory_each_bit_and_the_place_of_each_word_count(nbytes, seed):
    memory = torch.randint(256, (nbytes + 8,), dtype=torch.uint8)
    values = memory[:nbytes]
    found, row = [hash_of(values, seed=seed)], 8 * tensor_hash.ROW
    for place in (0, 1, row - 1, row, nbytes // 2, nbytes - 14, nbytes - 1):
        for bit in range(8):
            values[place] ^= 1 << bit
            found.append(hash_of(values, seed=seed))
            values[place] ^= 1 << bit
    for first, second in [(0, 4), (0, 8), (0, row), (row, row + 8), (0, nbytes // 8 * 8 - 4)]:
        swapped = values.clone()
        swapped[first : first + 4], swapped[second : second + 4] = (
            values[second : second + 4],
            values[first : first + 4],
        )
        found.append(hash_of(swapped, seed=seed))
    assert len({*found}) == len(found)
    memory[5 : nbytes + 5] = values.clone()  # at an address that is no multiple of 8
    assert hash_of(memory[5 : nbytes + 5], seed=seed) == found[0]
    assert hash_of(memory[5 : nbytes + 5], seed=seed + 1) != found[0]


def test_a_tensor_that_is_hashed_in_parts_has_a_number_of_all_of_them(monkeypatch):
    monkeypatch.setattr(tensor_hash, "CHUNK", tensor_hash.LARGE)
    values = torch.randint(256, (3 * tensor_hash.LARGE + 5,), dtype=torch.uint8)
    found = [hash_of(values)]
    for place in (0, tensor_hash.LARGE, len(values) - 1):
        other = values.clone()
        other[place] ^= 1
        found.append(hash_of(other))
    assert len({*found}) == 4


def test_what_is_equal_by_chance_with_one_seed_differs_with_the_next():
    one = torch.randint(256, (40_003,), dtype=torch.uint8)
    for place in (0, 16, 39_998):
        other = one.clone()
        other[place : place + 5] ^= torch.tensor(list(GENERATOR), dtype=torch.uint8)
        assert hash_of(one) == hash_of(other)
        assert hash_of(one, seed=1) != hash_of(other, seed=1)


def test_views_hash_as_the_values_that_they_show():
    values = torch.randn(4, 6)
    assert hash_of(values.t()) == hash_of(values.t().contiguous()) != hash_of(values)
    lazy = torch.view_as_complex(torch.randn(3, 2)).conj()
    for view in (lazy, lazy.imag, torch._neg_view(values), torch.ones(()).expand(5)[:1], torch.nn.Parameter(values)):
        assert hash_of(view) == crc32(bytes(bytes_in(view.resolve_conj().resolve_neg()).tolist()))
    assert (hash_of(torch.empty(0)), hash_of(torch.empty(0), 3), hash_of(None, 3)) == (0, 3, NOTHING)
    assert hash_of(values.to("meta")) != hash_of(values.t().to("meta"))


def laid_out(values, layout):
    if layout in (torch.strided, torch.jagged):
        return torch.nested.nested_tensor([values, values[:2]], layout=layout)
    return values.to_sparse(layout=layout, blocksize=(2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, *SPARSE], ids=str)
@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state):UserWarning")
def test_each_layout_has_a_hash_of_its_values(layout):
    values = torch.arange(16.0).view(4, 4)
    one, same, other = (laid_out(each, layout) for each in (values, values.clone(), values + 1))
    assert hash_of(one) == hash_of(same) != hash_of(other)
    assert hash_of_all([one]) != hash_of_all([other])


def test_a_start_chains_two_tensors():
    one, other = torch.randn(5), torch.randn(5)
    for number in (host_hash, device_hash):
        assert number(other, number(one)) != number(one, number(other))


def test_no_number_is_read_from_a_device_or_copied_to_it():
    """A copy of a number of the host waits for the device, as reading does. Here the CPU stands in for one."""
    started = torch.tensor(7)
    with Operations() as operations:
        found = tensor_hash._hash_on_device(torch.ones(9, dtype=torch.uint8), 5)
        found = tensor_hash._hash_on_device(torch.ones(9, dtype=torch.uint8), found)
        found = joined([3, hash_of(torch.ones(2), found), NOTHING, hash_of(torch.ones(2, device="meta"), started)])
    assert {"_local_scalar_dense", "lift_fresh"}.isdisjoint(operations.names)
    assert "bitwise_and_" in operations.names
    assert read([5, found, 6, started]) == [5, int(found), 6, 7]


def test_numbers_are_joined_in_their_order_into_32_bits():
    numbers = [1, 2, 2**32 - 1, NOTHING]
    assert len({joined(order) for order in ([1, 2], [2, 1], [1], [2], [0, 1, 2], [])} | {joined(numbers)}) == 6
    assert joined([torch.tensor(number) for number in numbers]) == joined(numbers) < 2**32
    assert text_of([0x12, NOTHING]) == "00000012--------"


@dataclasses.dataclass
class Outputs:
    loss: torch.Tensor
    name: str = "x"


def test_trees_differ_in_values_keys_places_shapes_and_dtypes():
    values = torch.ones(4)
    trees = [[values], [values, None], [values * 2], [[values]], [values.view(2, 2)], [values.long()]]
    trees += [{"a": values}, {"b": values}, Outputs(values), Outputs(values, "y"), "text", 3, object()]
    assert len({hash_of_all(tree) for tree in trees}) == len(trees)
    assert hash_of_all([{"a": values.clone()}, 1]) == hash_of_all([{"a": values}, 1])
