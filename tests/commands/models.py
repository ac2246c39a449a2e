"""Factories for `dpfuse plan`: good ones, and one for each mistake."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import dpfuse

PLACE = "tests.commands.models"


def build():
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)], nn.Dropout(0.5))


def with_a_loss():
    """As the benchmarks want it."""
    return build(), lambda model: model(torch.randn(4, 128)).square().mean()


def large():
    """On no device at all: only to be planned."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 3 * 1024 + 8 * index) for index in range(9)])


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


def lazy():
    return nn.LazyLinear(2)


def wrapped():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        return dpfuse.DataParallel(nn.Linear(2, 2))


def number():
    return 3


def numbers():
    return 3, 4


def nothing():
    return ()


not_callable = 3
