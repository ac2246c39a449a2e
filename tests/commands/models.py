"""Factories for the commands: good ones, and one for each mistake."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

import dpfuse

PLACE = "tests.commands.models"
LAYERS, WIDTH = 6, 128  # 65 KB per weight


def build():
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], nn.Dropout(0.5))
    batch = torch.randn(4, WIDTH)
    return module, lambda model: model(batch).square().mean()


class Uneven(nn.Module):
    """A layer that runs twice, and one that rank 0 alone uses."""

    def __init__(self):
        super().__init__()
        self.twice, self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Embedding(16, 8, sparse=True)

    def forward(self, tokens):
        x = self.twice(self.twice(self.table(tokens)))
        return x if dist.get_rank() else self.sometimes(x)


def uneven():
    tokens = torch.arange(8)
    return Uneven(), lambda model: model(tokens).square().mean()


def large():
    """On no device at all: only to be planned."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 3 * 1024 + 8 * index) for index in range(9)])


def frozen():
    return nn.Linear(2, 2).requires_grad_(False), len


def lazy():
    return nn.LazyLinear(2), len


def wrapped():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        return dpfuse.DataParallel(nn.Linear(2, 2)), len


def infinite():
    return nn.Linear(2, 2), lambda model: model(torch.full((2,), float("inf"))).sum()


def number():
    return 3


def numbers():
    return 3, 4


def alone():
    return nn.Linear(2, 2)


def no_function():
    return nn.Linear(2, 2), 4


def vector():
    return nn.Linear(2, 2), lambda model: model(torch.ones(3, 2))


def another():
    """The loss does not run the model that it is given."""
    own = nn.Linear(2, 2)
    return nn.Linear(2, 2), lambda model: own(torch.ones(2)).sum()


def breaks():
    raise OSError("no data here")


def breaks_on_rank_1():
    if dist.get_rank() == 1:
        raise OSError("no data here")
    return build()


def breaks_later():
    """On rank 1, in the fifth step: the others wait for it."""
    module, loss = build()
    steps = []

    def break_(model):
        steps.append(1)
        if dist.get_rank() == 1 and len(steps) == 5:
            raise OSError("no data any more")
        return loss(model)

    return module, break_


not_callable = 3
