"""Weights of one rank that leave those of the other, after the mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from tests.faults.job import Job, Net

STEPS, AT = 90, 10


class Part(nn.Module):
    """A net, and a layer in front of it that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Net(1).requires_grad_(False)
        self.net = Net(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` through both."""
        return self.net(self.frozen(x))


def _train(job: Job, change: Callable[[Part, Optimizer], None]) -> None:
    """Train, and change something on rank 1 behind one step; tell at the end whether weights are equal."""
    net = Part()
    model = job.wrap(net)
    optimizer = job.optimizer_of(net)
    for step in range(STEPS):
        model(job.batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        job.number += 1
        if step == AT:
            job.plant()
            if job.rank == 1:
                with torch.no_grad():
                    change(net, optimizer)
    job.tell(same=[param.double().sum().item() for param in net.parameters()])


def weight(job: Job) -> None:
    _train(job, lambda net, _: net.net.layers[0].weight[3, 3].add_(0.1))


def bit(job: Job) -> None:
    def flip(net: Part, _: Optimizer) -> None:
        net.frozen.layers[0].weight.data.view(torch.int32)[5, 7] ^= torch.tensor(1 << 20, dtype=torch.int32)

    _train(job, flip)


def rate(job: Job) -> None:
    def change(_: Part, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 1.1

    _train(job, change)


def state(job: Job) -> None:
    def change(net: Part, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(1.5)

    _train(job, change)
