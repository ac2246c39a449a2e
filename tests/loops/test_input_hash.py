"""Inputs of any kind have a hash or none, and no kind of them is an error."""

from __future__ import annotations

import pytest
import torch

from dpfuse.engine.tensor_hash import hash_of
from dpfuse.loop.input_hash import InputHash

WITH_BYTES = {
    "floats": torch.randn(3, 4),
    "one": torch.ones(1),
    "scalar": torch.tensor(2.0),
    "expanded": torch.ones(1, dtype=torch.float64).expand(6, 3),
    "one of an expanded": torch.ones((), dtype=torch.float64).expand(5)[:1],
    "turned": torch.randn(40, 30).T,
    "channels last": torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "many": torch.randn(5000),
    "empty": torch.zeros(0, 4),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(4).bfloat16(),
    "complex": torch.randn(4, dtype=torch.complex64),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "needs a gradient": torch.randn(3, requires_grad=True),
}
WITHOUT = {
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
    "another object": object(),
    "nothing": None,
}


@pytest.mark.parametrize("name", WITH_BYTES)
def test_dense_tensors_have_a_hash(name):
    found = InputHash()
    found.add(((WITH_BYTES[name],), {"mask": None, "length": 3}))
    assert found.known
    assert len(found.word()) == 8


@pytest.mark.parametrize("name", WITHOUT)
def test_other_inputs_have_none(name):
    found = InputHash()
    found.add(((WITHOUT[name],), {}))
    assert not found.known


def test_one_object_that_cannot_be_read_leaves_all_inputs_without_a_hash():
    found = InputHash()
    found.add(((torch.ones(3), object()), {}))
    found.add(((torch.ones(3),), {}))
    assert not found.known


def test_the_hash_depends_on_every_input():
    words = set()
    for values in [(1, 2), (2, 1), (1, 3), (3, 3)]:
        found = InputHash()
        for value in values:
            found.add(((torch.full((3,), float(value)),), {}))
        words.add(tuple(found.word()))
    assert len(words) == 4


def test_the_word_is_the_lowest_bits_of_the_hash_of_up_to_1024_elements_of_each_tensor():
    many, turned = torch.randn(5000), torch.randn(40, 30).T
    number = hash_of(turned[::1, ::2], hash_of(many[::4][:1024]))
    found = InputHash()
    found.add(((many, turned), {}))
    assert list(found.word()) == [number >> place & 1 for place in range(8)]
    found._hash = torch.tensor(number)  # as on a GPU
    assert found.word().tolist() == [number >> place & 1 for place in range(8)]
