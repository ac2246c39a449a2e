"""What is in the `.grad` of a parameter stays there while a backward goes through it frozen, as with torch's class."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse

WRAPS = {
    "DDP": dpfuse.DistributedDataParallel,
    "DDP views": lambda module: dpfuse.DistributedDataParallel(module, gradient_as_bucket_view=True),
    "DP": dpfuse.DataParallel,
    "DP private": lambda module: dpfuse.DataParallel(module, gradient_as_bucket_view=False),
    "DP accumulating": lambda module: dpfuse.DataParallel(module, accumulate_in_buckets=True),
    "DP 16 bits": lambda module: dpfuse.DataParallel(module, wire_dtype=torch.bfloat16),
    "DP large": lambda module: dpfuse.DataParallel(module, comm_buffer_size=1e-4),
}
STEPS = 4


def train(rank, wrap, *, whole):
    """Train a generator and its discriminator, whose steps both come last; return what its gradients were at its step.

    Args:
        rank: of this process.
        wrap: of both.
        whole: whether all of the discriminator is frozen in the backward of the generator, or its first layer only.
    """
    torch.manual_seed(5)
    judge = wrap(nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1)))
    maker = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 64)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (judge, maker)]
    draw = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        noise, real = torch.randn(4, 8, generator=draw), torch.randn(4, 64, generator=draw)
        fake = maker(noise)
        (judge(fake.detach()).mean() - 2 * judge(real).mean()).backward()
        part = judge.module if whole else judge.module[0]
        part.requires_grad_(False)
        (-judge(fake).mean()).backward()
        part.requires_grad_(True)
        found += [param.grad.clone() for param in part.parameters()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found, [param.detach().clone() for model in (judge, maker) for param in model.parameters()]


def as_torch(rank, size, name, whole):
    ours = train(rank, WRAPS[name], whole=whole)
    torchs = train(rank, lambda module: TorchDDP(module, find_unused_parameters=not whole), whole=whole)
    for got, expected in zip(ours, torchs, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert one.any()
            torch.testing.assert_close(one, other, **({"rtol": 0.05, "atol": 1e-2} if "16" in name else {}))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("whole", [True, False], ids=["all frozen", "a layer frozen"])
@pytest.mark.parametrize("name", WRAPS)
def test_an_optimizer_finds_the_gradients_of_the_backward_before(ranks, name, whole):
    ranks(as_torch, name, whole)
