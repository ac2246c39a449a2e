"""The hash of small tensors on a CPU, and how the bits of a hash are written into a report."""

import pytest
import torch

from dpfuse.weights.hashing import Hashing, write_number
from dpfuse.weights.host_hash import hash_of_memory, joined_hash_of
from dpfuse_kernels.bit_hash import write_bits

CPU = torch.device("cpu")
GENERATOR = ((0xEDB88320 << 1) | 1).to_bytes(5, "little")  # of CRC-32: it divides the difference of such bytes


def test_each_flipped_bit_gives_another_hash():
    values = [torch.arange(5, dtype=torch.int32), torch.arange(3, dtype=torch.uint8)]
    for seed in (0, 1):
        seen = {joined_hash_of(values, seed)}
        for tensor in values:
            memory = tensor.view(torch.uint8)
            for place in range(memory.numel()):
                for bit in range(8):
                    memory[place] ^= 1 << bit
                    seen.add(joined_hash_of(values, seed))
                    memory[place] ^= 1 << bit
        assert len(seen) == 1 + 8 * 23


def test_no_two_flipped_bits_cancel_out():
    values = torch.zeros(24, dtype=torch.uint8)
    usual, found = joined_hash_of([values], 0), set()
    for first in range(8 * 24):
        for second in range(first):
            for bit in (first, second):
                values[bit // 8] ^= 1 << bit % 8
            found.add(joined_hash_of([values], 0))
            values.zero_()
    assert usual not in found


def test_what_is_equal_by_chance_in_one_pass_differs_in_the_next():
    one = torch.tensor([7, 1, 200, 3, 9, 9], dtype=torch.uint8)
    other = one.clone()
    other[:5] ^= torch.tensor(list(GENERATOR), dtype=torch.uint8)
    assert joined_hash_of([one], 0) == joined_hash_of([other], 0)
    assert joined_hash_of([one], 1) != joined_hash_of([other], 1)


def test_the_order_of_tensors_and_of_elements_counts_and_strides_do_not():
    one, other = torch.randn(3, 4), torch.randn(2)
    usual = joined_hash_of([one, other], 0)
    assert usual != joined_hash_of([other, one], 0)
    assert usual != joined_hash_of([one.flip(0), other], 0)
    assert usual == joined_hash_of([one.t().contiguous().t(), other], 0)
    assert joined_hash_of([torch.empty(0), other], 0) == joined_hash_of([other], 0)


def test_the_place_of_each_number_counts_in_large_memory():
    """Sums of its rows and columns are hashed."""
    memory = torch.arange(40_000, dtype=torch.int32)
    usual = hash_of_memory(memory, 0)
    assert usual == hash_of_memory(memory.clone(), 0)
    for first, second in [(0, 2), (0, 1), (1024, 1026), (0, 1024), (0, 39_999), (39_998, 39_999)]:
        other = memory.clone()
        other[[first, second]] = memory[[second, first]]
        assert hash_of_memory(other, 0) != usual, (first, second)


def test_of_complex_numbers_the_values_are_hashed():
    values = torch.view_as_complex(torch.randn(3, 2))
    lazy = values.conj()
    assert joined_hash_of([lazy], 0) == joined_hash_of([lazy.resolve_conj()], 0) != joined_hash_of([values], 0)


def test_a_small_tensor_that_has_another_size_or_is_gone_is_left_out():
    tensors = {"a": torch.randn(4), "b": torch.randn(4), "c": torch.randn(4)}
    hashing = Hashing(tensors, {}, CPU)
    number = next(number for number in range(hashing.slices) if not hashing.is_empty(number))

    def written(but=()):
        pairs = torch.zeros(32, 2)
        hashing.write(number, 0, pairs, but)
        return pairs

    whole, without = written(), written(but=[1])
    assert not torch.equal(whole, without)
    tensors["b"].data = torch.randn(5)
    assert torch.equal(written(), without)
    del tensors["b"]
    assert torch.equal(written(), without)


@pytest.mark.parametrize("shape", [(24, 24, 3, 3), (8, 16, 16, 16), (64, 128, 1, 1)], ids=str)
def test_a_large_weight_has_the_same_hash_in_each_memory_format(shape):
    weight = torch.randn(shape)  # small ones are hashed in the order of their indices
    found = [
        Hashing({"weight": weight.contiguous(memory_format=kind)}, {"weight": weight.stride()}, CPU)
        for kind in (torch.contiguous_format, torch.channels_last)
    ]
    assert found[0].each().tolist() == found[1].each().tolist()
    assert found[0].describe() == found[1].describe()


def test_a_weight_of_another_shape_is_hashed_in_its_own_order():
    weight = torch.randn(24, 24, 3, 3)
    hashing = Hashing({"weight": weight}, {"weight": (24, 1)}, CPU)
    assert hashing.each().tolist() == Hashing({"weight": weight}, {}, CPU).each().tolist()
    assert hashing.describe().endswith("(216, 9, 3, 1)")


def test_empty_slices_are_counted_up_to_the_next_that_is_not():
    hashing = Hashing({str(place): torch.zeros(2) for place in range(40)}, {}, CPU)
    full = [number for number in range(hashing.slices) if not hashing.is_empty(number)]
    assert len(full) == 2
    assert hashing.empty_behind(full[0]) == full[1] - full[0] - 1
    assert hashing.empty_behind(full[1]) == hashing.slices - full[1] - 1
    assert hashing.empty_behind(hashing.slices - 1) == 0


def test_a_number_is_written_as_the_kernel_writes_it():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for number in (0, 1, 5, 0x9E3779B1, 2**32 - 1):
            found, expected = torch.full((32, 2), 7, dtype=dtype), torch.zeros(32, 2, dtype=dtype)
            write_number(number, found)
            write_bits(torch.tensor(number), expected)
            assert torch.equal(found, expected)
