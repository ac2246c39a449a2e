"""Buffers of a module that changes after wrapping are rank 0's, in the dtype that they have now."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from dpfuse import DataParallel, DistributedDataParallel

FACES = {"paddle": DataParallel, "torch": DistributedDataParallel}


class Counting(nn.Module):
    """A parameter and two buffers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return (self.weight * x.to(self.weight.dtype)).sum()


def buffers_after_a_change(rank, size, face, early):
    option = {"broadcast_buffers": True} if face == "paddle" else {"forward_sync_buffers": True}
    model = FACES[face](Counting(), **option)
    net, seen = model.module, []

    def step(value):
        loss = model(torch.ones(2))
        for buffer in net.buffers():
            buffer.fill_(value + rank)
        loss.backward()
        model.zero_grad()
        seen.append([(buffer.dtype, buffer.tolist()) for buffer in net.buffers()])

    if not early:
        step(10)
    net.double()
    step(20)
    net.register_buffer("late", torch.full((2, 2), float(rank)))
    net.weight = nn.Parameter(torch.ones(2))
    step(30)
    step(40)
    assert seen[-3] == [(torch.float64, [20.0] * 3), (torch.int64, 20)]
    assert seen[-1] == [*[(torch.float64, [40.0] * 3), (torch.int64, 40)], (torch.float32, [[40.0] * 2] * 2)]
    return seen


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("early", [True, False])
def test_buffers_follow_from_the_first_backward_on(ranks, face, early):
    first, second = ranks(buffers_after_a_change, face, early)
    assert first == second


def test_new_buffers_are_converted_as_those_before(rank, size):
    precision = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), mixed_precision=precision)
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(5, 3)).float().square().sum().backward()
            assert model.module[1].running_mean.dtype is torch.bfloat16
        model.module[1] = nn.BatchNorm1d(4)
