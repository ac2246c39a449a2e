"""Launches past Triton's dispatcher on real hardware: the same bits, the same kernels, the current stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import PointerTable, flatten, unflatten
from tests.kernels.layouts import PAIRS, guarded, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMELS = (1, 8, 1000, 4096, 8195, 0)


def randoms(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, generator=generator).to(dtype).cuda() for n in NUMELS]


def there_and_back(table: PointerTable, tensors: list[Tensor]) -> list[Tensor]:
    """Three rounds of everything that can be compiled: pack and unpack, plain and scaled."""
    targets = [torch.ones_like(tensor) for tensor in tensors]
    for scale in (0.25, 0.0, 1 / 3):
        flatten(tensors, table)
        flatten(tensors, table, scale=scale)
        unflatten(table, targets)
        unflatten(table, targets, scale=scale)
    return targets


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_both_ways_give_the_same_bits(dtype: torch.dtype, wire: torch.dtype) -> None:
    tensors = randoms(dtype)
    bound, dispatched = (guarded(tensors, dtype, wire, gap=3) for _ in range(2))
    dispatched.table.launcher.dispatcher.binds = False
    results = [there_and_back(buffer.table, tensors) for buffer in (bound, dispatched)]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert all(same_bits(a, b) for a, b in zip(bound.table.views, dispatched.table.views, strict=True))
    assert bound.untouched_outside_slots()
    ours, tritons = (buffer.table.launcher.dispatcher for buffer in (bound, dispatched))
    assert (ours.launches, ours.bound_launches) == (12, 8), (
        "expected 8 of 12 launches to be bound; this release of Triton is not known"
    )
    assert (tritons.launches, tritons.bound_launches) == (12, 0)


def kernels_of(call: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum("flatten_kernel" in event.name for event in profile.events())


def test_each_launch_is_one_kernel() -> None:
    tensors = randoms(torch.float32)
    table = guarded(tensors, torch.float32, torch.float32).table
    flatten(tensors, table, scale=0.5)
    assert kernels_of(lambda: [flatten(tensors, table, scale=0.5) for _ in range(10)]) == 10
    assert table.launcher.dispatcher.bound_launches >= 1


def test_a_launch_is_on_the_stream_that_is_current() -> None:
    tensors = [torch.zeros(4096, device="cuda")]
    table = guarded(tensors, torch.float32, torch.float32).table
    flatten(tensors, table, scale=0.5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        tensors[0].fill_(8.0)
        flatten(tensors, table, scale=0.5)
        result = table.views[0].clone()
    torch.cuda.current_stream().wait_stream(side)
    assert table.launcher.dispatcher.bound_launches == 1
    assert result.eq(4.0).all()
