"""What a slice of the weights is hashed of, in which order, and how the bits of a hash are written into a report."""

import pytest
import torch

from dpfuse.weights.hashing import Hashing, write_number
from dpfuse_kernels.bit_hash import write_bits

CPU = torch.device("cpu")


def written(hashing, seed=0, but=()):
    """The pairs of each slice."""
    pairs = torch.zeros(hashing.slices, 32, 2)
    for number in range(hashing.slices):
        hashing.write(number, seed, pairs[number], but)
    return pairs


@pytest.mark.parametrize("seed", [0, 1])
def test_each_piece_of_a_large_tensor_and_each_small_one_counts(seed):
    tensors = {"large": torch.randn(150_001), "small": torch.randn(3), "lazy": torch.randn(3, dtype=torch.complex64)}
    hashing = Hashing(tensors, {}, CPU)
    before, each = written(hashing, seed), hashing.each()
    for name, place in [("large", 0), ("large", 75_000), ("large", 150_000), ("small", 2), ("lazy", 1)]:
        value = tensors[name][place].clone()
        tensors[name][place] += 1
        assert int(written(hashing, seed).ne(before).any(2).any(1).sum()) == 1, name
        assert hashing.each().ne(each).tolist() == [name == other for other in tensors]
        tensors[name][place] = value
    assert torch.equal(written(hashing, seed), before)
    other = written(hashing, seed + 1).ne(before).any(2).any(1)
    assert [hashing.is_empty(number) for number in range(hashing.slices)] == other.logical_not().tolist()


def test_a_small_tensor_that_has_another_size_or_is_gone_is_left_out():
    tensors = {"a": torch.randn(4), "b": torch.randn(4), "c": torch.randn(4)}
    hashing = Hashing(tensors, {}, CPU)
    whole, without = written(hashing), written(hashing, but=[1])
    assert not torch.equal(whole, without)
    tensors["b"].data = torch.randn(5)
    assert torch.equal(written(hashing), without)
    del tensors["b"]
    assert torch.equal(written(hashing), without)


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
