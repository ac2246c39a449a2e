"""Which gradients a trace says to be scaled or cut, and of which it takes a sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse.trace.rescaling import Pair, is_plain, rescaled, sample_of

VALUES = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))


def test_only_the_places_of_what_was_scaled_or_cut_are_returned():
    changed = {3: VALUES / 3, 4: VALUES, 5: VALUES.clamp(-0.7, 0.7), 6: VALUES + 1, 7: VALUES * (VALUES > 0)}
    pairs = [Pair(place, sample_of(VALUES), sample_of(now)) for place, now in changed.items()]
    assert rescaled(pairs) == [3, 5]


def test_a_sample_is_a_copy_of_at_most_64_elements_from_all_parts():
    values = torch.arange(1000.0)
    sample = sample_of(values)
    values.zero_()
    assert (len(sample), sample[0], sample[-1] > 900) == (64, 0, True)


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
