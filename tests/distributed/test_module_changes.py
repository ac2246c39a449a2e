"""The module after wrapping: buffers that are to stay equal, and changes that are none for the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse


def buffers_follow_rank_0(rank, size, broadcast):
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=broadcast)
    norm = model.module[1]
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 3)).sum().backward()
        model.zero_grad()
    model(torch.zeros(8, 3))  # the same batch everywhere: what still differs comes from the batches before
    return norm.running_mean.tolist(), norm.num_batches_tracked.item()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_sent_before_each_forward_only_if_asked(ranks, broadcast):
    first, second = ranks(buffers_follow_rank_0, broadcast)
    assert (first == second) is broadcast
    assert first[1] == second[1] == 4


def equal_before_forward(rank, size):
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.seen = []

        def forward(self, x):
            self.seen.append((self.mean.tolist(), self.count.item()))
            return self.weight * x.sum()

    model = dpfuse.DataParallel(Reading(), broadcast_buffers=True)
    for step in range(3):
        model.mean.fill_(10.0 * step + rank)
        model.count.fill_(10 * step + rank)
        model(torch.ones(1)).backward()
    with torch.no_grad():
        model(torch.ones(1))
    return model.seen


def test_every_rank_computes_with_the_buffers_of_rank_0(ranks):
    sent = [([10.0 * step] * 3, 10 * step) for step in range(3)]
    assert ranks(equal_before_forward) == [[*sent, sent[-1]]] * 2


def harmless(rank, size):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    model = dpfuse.DataParallel(net, find_unused_parameters=True)
    x = torch.full((2, 3), 1.0 + rank)

    def same_as_mean_of_bare():
        model.zero_grad()
        model(x).sum().backward()
        mean = torch.autograd.grad(net(torch.full((2, 3), 1.5)).sum(), list(net.parameters()), allow_unused=True)
        for param, expected in zip(net.parameters(), mean, strict=True):
            torch.testing.assert_close(param.grad, expected)

    same_as_mean_of_bare()  # the network is linear where it is positive, so its gradients' mean is that of the mean
    net[1] = nn.Identity()
    same_as_mean_of_bare()
    net.append(nn.Identity())
    same_as_mean_of_bare()
    net[2] = nn.Identity()  # takes two parameters away
    same_as_mean_of_bare()
    net[4] = nn.Sequential(net[0], nn.Unflatten(1, (4, 1)), nn.Flatten(0))  # a second place for known parameters
    net[3] = nn.Linear(4, 3, bias=False).requires_grad_(False)  # a layer that nobody trains
    model.zero_grad()
    model(x).sum().backward()
    assert net[0].weight.grad is not None
    assert len(model.bucket_plan.specs) == 6  # those of the beginning; nothing has been planned again


def test_other_changes_of_a_module_are_none(ranks):
    ranks(harmless)
