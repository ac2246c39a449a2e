"""A module that is wrapped twice is noticed where the user wraps it, and its gradients are still the mean."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse


def nested(inner, outer, place):
    net = nn.Linear(4, 2)
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)
    module = inner(net)
    if place == "part":
        module = nn.Sequential(module, nn.ReLU())
    with pytest.warns(UserWarning, match="wrapped twice: got a .*expected a bare module.*Wrap the bare") as warned:
        model = outer(module)
    return net, model, warned[0].filename == __file__


def train(rank, size, place):
    found = []
    for inner, outer in [
        (dpfuse.DataParallel, dpfuse.DataParallel),
        (dpfuse.DataParallel, dpfuse.DistributedDataParallel),
        (TorchDDP, dpfuse.DataParallel),
    ]:
        net, model, at_user = nested(inner, outer, place)
        model(torch.full((3, 4), rank + 1.0)).sum().backward()
        found.append((at_user, net.bias.grad.tolist(), net.weight.grad[0, 0].item()))
    return found


@pytest.mark.parametrize("place", ["whole", "part"])
def test_two_wrappers_of_a_module_are_noticed(ranks, place):
    for found in ranks(train, place, size=2, timeout=60):
        assert found == [(True, [3.0, 3.0], 4.5)] * 3


@pytest.mark.ranks(timeout=60)
def test_one_wrapper_warns_of_nothing(rank, size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 2)))
        dpfuse.DistributedDataParallel(torch.compile(nn.Linear(4, 2), backend="eager"))
