"""Whether values were scaled or cut, as clipping does, or changed in another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse.trace.rescaling import Pair, is_plain, rescaled, sample_of

VALUES = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))
MASK = (NOISE > 0).float()


def pair(before, now, place=0):
    return Pair(place, sample_of(before), sample_of(now), 4 * torch.finfo(now.dtype).eps)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda grad: grad / 3, True),
        (lambda grad: grad * 65536, True),
        (lambda grad: grad.clamp(-0.7, 0.7), True),
        (lambda grad: (grad / 4).clamp(-0.2, 0.2), True),
        (lambda grad: grad.clone(), False),
        (lambda grad: grad * MASK, False),
        (lambda grad: grad + 0.01 * NOISE, False),
        (lambda grad: (grad + NOISE) / 2, False),  # an average over two ranks
        (lambda grad: NOISE, False),
        (lambda grad: grad * 0, False),
        (lambda grad: grad * torch.inf, False),
        (lambda grad: -grad, False),
        (lambda grad: grad[:10], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_scaling_and_cutting_counts(change, found, dtype):
    now = change(VALUES.to(dtype)).to(dtype)
    assert rescaled([pair(VALUES.to(dtype), now, place=7)]) == [7] * found


def test_a_sample_is_a_copy_of_at_most_64_elements_from_all_parts():
    values = torch.arange(1000.0)
    sample = sample_of(values)
    values.zero_()
    assert (len(sample), sample[0], sample[-1] > 900) == (64, 0, True)
    assert sample_of(torch.tensor([1 + 2j])).tolist() == [1.0, 2.0]
    assert sample_of(VALUES.t()).dtype == torch.float64


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (VALUES, True),
        (nn.Parameter(VALUES), True),
        (VALUES.to_sparse(), False),
        (VALUES.to("meta"), False),
        (torch.nested.nested_tensor([VALUES], layout=torch.jagged), False),
    ],
    ids=["dense", "parameter", "sparse", "meta", "nested"],
)
def test_only_dense_tensors_are_plain(tensor, plain):
    assert is_plain(tensor) == plain
