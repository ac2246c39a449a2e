"""A backward through a frozen model leaves each rank's part of the gradients that a backward before has left there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse

STEPS = 4
SGD = torch.optim.SGD


def train(rank, wrap, make_optimizer):
    """Train a generator and its discriminator, whose optimizers step one behind the other; return all weights."""
    torch.manual_seed(5)
    judge = wrap(nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1)))
    maker = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)))
    optimizers = [make_optimizer(model) for model in (judge, maker)]
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        noise, real = torch.randn(4, 8, generator=draw), torch.randn(4, 16, generator=draw)
        fake = maker(noise)
        (judge(fake.detach()).mean() - 2 * judge(real).mean()).backward()
        judge.module.requires_grad_(False)
        (-judge(fake).mean()).backward()
        judge.module.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for model in (judge, maker) for param in model.module.parameters()]


@pytest.mark.ranks(size=2, timeout=60)
def test_the_optimizer_of_a_discriminator_finds_its_gradients(rank, size):
    expected = train(rank, TorchDDP, lambda model: SGD(model.parameters(), lr=0.05))

    def sharded(model):
        return dpfuse.ShardedOptimizer(model, SGD, lr=0.05)

    weights = train(rank, dpfuse.DataParallel, sharded)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other)
