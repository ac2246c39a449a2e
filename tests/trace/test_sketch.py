"""The sum of a tensor with fixed random signs: distances follow from it, and a sparse tensor has that of its values."""

from __future__ import annotations

import math

import pytest
import torch

from dpfuse.trace.signed_sum import CHUNK, signed_sum


@pytest.mark.parametrize("shape", [(50, 4), (CHUNK // 4 + 3, 5), (7,)])
def test_a_sparse_tensor_has_the_sum_of_the_dense_one(shape):
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    dense[::3] = 0
    for sparse_dims in range(1, len(shape) + 1):
        assert torch.allclose(signed_sum(dense.to_sparse(sparse_dims)), signed_sum(dense))
    assert signed_sum(torch.zeros(shape).to_sparse(1)) == 0


def test_the_distance_of_many_tensors_is_estimated():
    generator = torch.Generator().manual_seed(1)
    ones = [torch.randn(100, generator=generator) for _ in range(400)]
    others = [one + 0.1 * torch.randn(100, generator=generator) for one in ones]
    found = math.dist([float(signed_sum(one)) for one in ones], [float(signed_sum(one)) for one in others])
    assert found == pytest.approx(0.1 * (400 * 100) ** 0.5, rel=0.2)
