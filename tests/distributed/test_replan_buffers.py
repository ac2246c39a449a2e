"""Buffers of a module that changes after wrapping are rank 0's, in the dtype that they have now."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from dpfuse import DataParallel, DistributedDataParallel

FACES = {"paddle": DataParallel, "torch": DistributedDataParallel}


class Reading(nn.Module):
    """Notes the buffers that its forward sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen = []

    def forward(self, x):
        self.seen.append([(buffer.dtype, buffer.tolist()) for buffer in self.buffers()])
        return (self.weight * x.to(self.weight.dtype)).sum()


def buffers_after_a_change(rank, size, face, early):
    option = {"broadcast_buffers": True} if face == "paddle" else {"forward_sync_buffers": True}
    model = FACES[face](Reading(), **option)
    net = model.module

    def step(value):
        for buffer in net.buffers():
            buffer.fill_(value + rank)
        model(torch.ones(2)).backward()
        model.zero_grad()

    if not early:
        step(10)
    net.double()
    step(20)
    net.register_buffer("late", torch.full((2, 2), float(rank)))
    net.weight = nn.Parameter(torch.ones(2))
    step(30)
    step(40)
    if rank == 0:
        return net.seen
    seen = [(torch.float64, [20.0] * 3), (torch.int64, 20)]
    assert net.seen[-3] == seen
    return net.seen


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("early", [True, False])
def test_buffers_follow_from_the_first_forward_on(ranks, face, early):
    first, second = ranks(buffers_after_a_change, face, early)
    assert [row[:2] for row in first] == [row[:2] for row in second]
    # One that is new itself is sent as soon as all ranks have agreed that it is there.
    assert first[-1] == second[-1]
    assert len(first[-1]) == 3


def mixed_precision_norm(rank, size):
    precision = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), mixed_precision=precision)
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(5, 3)).float().square().sum().backward()
            assert model.module[1].running_mean.dtype is torch.bfloat16
        model.module[1] = nn.BatchNorm1d(4)


def test_new_buffers_are_converted_as_those_before(ranks):
    ranks(mixed_precision_norm)
