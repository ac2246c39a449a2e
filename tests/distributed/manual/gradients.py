"""Parameters with gradients, and what averaging each on its own gives; for the tests of the manual path."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse import fused_allreduce_gradients

SHAPES = [(3, 4), (), (7,), (0, 2), (2, 3, 2, 2), (1, 1), (129,)]


def parameters(rank: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with gradients that differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


def reference(params: list[Tensor], factor: float) -> list[Tensor]:
    """Each gradient on its own: multiplied first, then summed by torch."""
    results = []
    for param in params:
        compute = torch.promote_types(param.grad.dtype, torch.float32)
        value = (param.grad.detach().to(compute) * factor).to(param.grad.dtype).contiguous()
        dist.all_reduce(value)
        results.append(value)
    return results


def gradients(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def assert_group_works(rank: int, size: int) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), rank + 1.0)
    fused_allreduce_gradients([param])
    torch.testing.assert_close(param.grad, torch.full((2,), (size + 1) / 2))
