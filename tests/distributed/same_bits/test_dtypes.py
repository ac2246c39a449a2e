"""Gradients of any dtype, shape and memory format are added in the tree: real, complex, empty, of no dimension."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse

COUNT, STEPS = 5, 5


class Mixed(nn.Module):
    """Has parameters of many kinds; the convolution is used in every second micro-batch only."""

    def __init__(self):
        super().__init__()
        self.complex_numbers = nn.Parameter(torch.randn(7, 3, dtype=torch.complex64))
        self.wide = nn.Linear(4, 7).double()
        self.sixteen_bits = nn.Parameter(torch.randn(6).half())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.channels_last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, inputs, number):
        products = self.wide(inputs.double()).to(torch.complex64) @ self.complex_numbers
        loss = products.abs().mean() + self.sixteen_bits.float().square().mean() * self.scalar + self.empty.sum()
        if number % 2:
            loss = loss + self.channels_last(torch.rand(1, 3, 6, 6)).square().mean()
        return loss


def trained(rank, size, buffer_size):
    torch.manual_seed(1)
    model = dpfuse.DataParallel(
        Mixed(), fixed_micro_batches=COUNT, comm_buffer_size=buffer_size, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        for number in model.micro_batches():
            model(torch.rand(3, 4), number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().flatten().tolist() for name, param in model.module.named_parameters()}


@pytest.mark.parametrize("buffer_size", [25, 0.0001], ids=["few buckets", "many buckets"])
def test_every_kind_of_gradient_has_the_same_bits(ranks, buffer_size):
    (whole,) = ranks(trained, 25, size=1)
    for size in (2, 3):
        assert ranks(trained, buffer_size, size=size) == [whole] * size
