"""A class may override `parameters()` and `named_parameters()`, also without torch's arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import dpfuse


class Chosen(nn.Module):
    """Gives the optimizer a list of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def parameters(self):
        return list(self.net.parameters())

    def forward(self, x):
        return self.net(x)


class Trained(Chosen):
    """Leaves frozen parameters out, as torch's older releases had the method."""

    def __init__(self):
        super().__init__()
        self.tied = self.net[2].weight
        self.net[0].bias.requires_grad_(False)

    def parameters(self, recurse=True):
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_parameters(self, prefix="", recurse=True):
        for name, param in super().named_parameters(prefix, recurse):
            if param.requires_grad:
                yield name, param


class Inside(nn.Module):
    """Holds one of these."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Trained(), nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.inner(x))


FACES = {
    "ours": dpfuse.DataParallel,
    "drop-in": dpfuse.DistributedDataParallel,
    "replicate": dpfuse.replicate,
    "torch's": DistributedDataParallel,
}


def trained(rank, size, kind, face):
    torch.manual_seed(0)
    net = kind()
    model = FACES[face](copy.deepcopy(net))
    optimizer = optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for step in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for name, value in model.state_dict().items() if "running" not in name and "num" not in name]


@pytest.mark.parametrize("face", [face for face in FACES if face != "torch's"])
@pytest.mark.parametrize("kind", [Chosen, Trained, Inside])
def test_it_trains_as_with_torchs_class(ranks, kind, face):
    for found, expected in zip(ranks(trained, kind, face), ranks(trained, kind, "torch's"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
