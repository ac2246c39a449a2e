"""Hashes: equal bits give equal numbers, and every change of a bit, of the order or of the shape in a tree is seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dpfuse.trace.tensor_hash import NOTHING, _hash_on_device, hash_of, hash_of_all, read, text_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def device_hash(values):
    return int(_hash_on_device(values.contiguous().view(-1).view(torch.uint8), 0))


@pytest.mark.parametrize("number", [lambda values: int(hash_of(values)), device_hash], ids=["CPU", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_value_and_two_exchanged_ones_are_seen(number, dtype):
    values = torch.arange(37, dtype=torch.float64).fmod(2 if dtype is torch.bool else 37).to(dtype)
    found = {number(values)}
    for place in range(37):
        changed = values.clone()
        changed[place] = not changed[place] if dtype is torch.bool else changed[place] + 1
        found.add(number(changed))
    swapped = values.clone()
    swapped[3], swapped[4] = values[4], values[3]
    found.add(number(swapped))
    assert len(found) == 39
    assert number(values.clone()) == number(values)


@pytest.mark.parametrize("number", [lambda values: int(hash_of(values)), device_hash], ids=["CPU", "device"])
def test_signs_of_zeros_and_payloads_of_nan_count(number):
    assert number(torch.tensor([0.0])) != number(torch.tensor([-0.0]))
    assert number(torch.tensor([torch.nan])) == number(torch.tensor([torch.nan]))


def test_views_hash_as_the_values_that_they_show():
    values = torch.randn(4, 6)
    assert hash_of(values.t()) == hash_of(values.t().contiguous()) != hash_of(values)
    assert hash_of(torch.view_as_complex(torch.randn(3, 2)).conj()) != 0
    assert hash_of(values.to_sparse()) != hash_of((values + 1).to_sparse())
    assert hash_of(torch.empty(0)) == 0
    assert hash_of(None) is NOTHING
    assert text_of([0x12, NOTHING]) == "00000012--------"


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda values: values.to_sparse(),
        lambda values: values.to_sparse_csr(),
        lambda values: values.to_sparse_csc(),
        lambda values: values.to_sparse_bsr((2, 2)),
        lambda values: values.to_sparse_bsc((2, 2)),
        lambda values: torch.nested.nested_tensor([values, values[:2]]),
        lambda values: torch.nested.nested_tensor([values, values[:2]], layout=torch.jagged),
    ],
    ids=["COO", "CSR", "CSC", "BSR", "BSC", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state):UserWarning")
def test_each_layout_has_a_hash_of_its_values(lay_out):
    values = torch.arange(16.0).view(4, 4)
    assert hash_of(lay_out(values)) == hash_of(lay_out(values.clone())) != hash_of(lay_out(values + 1))
    assert hash_of_all([lay_out(values)]) != hash_of_all([lay_out(values + 1)])


def test_a_start_chains_two_tensors():
    one, other = torch.randn(5), torch.randn(5)
    assert hash_of(other, hash_of(one)) != hash_of(one, hash_of(other))
    number = torch.tensor(7)
    assert read([5, number, 6]) == [5, 7, 6]


@dataclasses.dataclass
class Outputs:
    loss: torch.Tensor
    name: str = "x"


def test_trees_differ_in_values_keys_places_shapes_and_dtypes():
    values = torch.ones(4)
    trees = [
        [values],
        [values, None],
        [values * 2],
        {"a": values},
        {"b": values},
        [[values]],
        [values.view(2, 2)],
        [values.long()],
        Outputs(values),
        Outputs(values, "y"),
        "text",
        3,
        object(),
    ]
    assert len({hash_of_all(tree) for tree in trees}) == len(trees)
    assert hash_of_all([{"a": values.clone()}, 1]) == hash_of_all([{"a": values}, 1])
