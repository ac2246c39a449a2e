"""A backward fails on one rank around a change of the model, with reports that are read one backward late, as on a GPU.

The ranks then know of the failure at different moments. All the same they answer the same questions, and vote together.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from tests.distributed.failures.test_spoiler import as_on_a_gpu

CHANGED = 4  # the batch before which all ranks change the model
BATCHES = 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, *self.more):
            x = torch.tanh(layer(x))
        return x


def grow(net: Net) -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3))
        layer.bias.fill_(0.1)
    net.more.append(layer)


def loss_of(net: nn.Module, rank: int, number: int) -> Tensor:
    return net(torch.full((2, 3), 0.1 * (1 + rank) + number)).square().sum()


def is_mean(net: Net, size: int, number: int) -> bool:
    """Whether the gradients are the mean over the batches with this number of all ranks."""
    params = list(net.parameters())
    sums = [torch.zeros_like(param) for param in params]
    for rank in range(size):
        for total, grad in zip(sums, torch.autograd.grad(loss_of(net, rank, number), params), strict=True):
            total += grad / size
    return all(torch.allclose(param.grad, total, atol=1e-6) for param, total in zip(params, sums, strict=True))


def train(rank: int, size: int, failing: int, failed_in: int) -> tuple[list[int], list[int]]:
    """Skip each batch that raises. Return the batches that raised, and those whose mean was wrong."""
    raised, wrong = [], []
    with as_on_a_gpu():
        torch.manual_seed(0)
        model = dpfuse.DataParallel(Net(), None, 0, 0, group=dist.new_group(), stall_timeout=8)
        for number in range(BATCHES):
            model.zero_grad()
            if number == CHANGED:
                grow(model.module)
            planted = None
            if (rank, number) == (failing, failed_in):
                planted = model.module.first.bias.register_hook(lambda grad: 1 / 0)
            try:
                loss_of(model, rank, number).backward()
                if not is_mean(model.module, size, number):
                    wrong.append(number)
            except (ZeroDivisionError, dpfuse.DPFuseError):
                raised.append(number)
            if planted is not None:
                planted.remove()
    return raised, wrong


@pytest.mark.one_in(2)
@pytest.mark.parametrize("failed_in", range(CHANGED - 2, CHANGED + 3))
def test_the_ranks_go_on_together(ranks, failed_in):
    for failing in (0, 2):
        told = ranks(train, failing, failed_in, size=3, timeout=50)
        peers = [each for rank, each in enumerate(told) if rank != failing]
        assert peers[0] == peers[1]
        assert told[failing][0] == sorted({failed_in, *peers[0][0]})
        assert len(peers[0][0]) == 1  # one failure is one error
        assert peers[0][0][0] in (failed_in, failed_in + 1)
        assert peers[0][1] == [failed_in] * (peers[0][0][0] > failed_in)  # NaN until they hear of it
        assert told[failing][1] == []
