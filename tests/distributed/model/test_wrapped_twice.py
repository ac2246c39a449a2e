"""A module that is wrapped twice is noticed where the user wraps it, and its gradients are still the mean."""

from __future__ import annotations

import gc
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


def said_of(train):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [(str(each.message), each.filename == __file__) for each in caught if each.category is UserWarning]


def beside_each_other(rank, size, face, ways):
    """What is said of two wrappers of one module, and the gradients."""
    net = nn.Linear(4, 2)
    x = torch.full((3, 4), rank + 1.0)
    first = face(net)
    if ways == "trained before":
        first(x).sum().backward()
        net.zero_grad()
    second = face(net)
    if ways == "deleted":
        del first
        gc.collect()

    def train():
        for _ in range(3):
            second(x).sum().backward()
            if ways == "in turns":
                first(x).sum().backward()

    said = said_of(train)
    return said, net.bias.grad.tolist()


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.parametrize("ways", ["trained before", "in turns", "deleted"])
def test_two_living_wrappers_of_a_module_are_told_once(ranks, face, ways):
    for said, grad in ranks(beside_each_other, face, ways, size=2, timeout=60):
        assert grad == [9.0 * (1 + (ways == "in turns"))] * 2
        if ways == "deleted":
            assert said == []
        else:
            ((text, at_user),) = said
            assert text.startswith("the 2 parameters of this module belong to two wrappers; expected one. Each")
            assert at_user


@pytest.mark.ranks(timeout=60)
def test_models_that_share_an_encoder_have_a_wrapper_each(rank, size):
    encoder = nn.Linear(4, 4)
    models = [dpfuse.DistributedDataParallel(nn.Sequential(encoder, nn.Linear(4, 2))) for _ in range(2)]

    def train():
        for model in models:
            model(torch.ones(3, 4)).sum().backward()

    assert not [text for text, _ in said_of(train) if "two wrappers" in text]


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_torch_s_class_around_ours_is_told_once(rank, size, face):
    net = nn.Linear(4, 2)
    model = TorchDDP(nn.Sequential(face(net), nn.Linear(2, 2)))

    def train():
        for _ in range(3):
            model(torch.full((3, 4), rank + 1.0)).sum().backward()

    ((text, at_user),) = said_of(train)
    assert text.startswith("the module is wrapped twice: torch's DistributedDataParallel is around this wrapper; ")
    assert at_user


def test_of_a_module_that_is_wrapped_twice_only_the_constructor_tells(ranks):
    assert ranks(forwards_of_nested, size=2, timeout=60) == [[]] * 2


def forwards_of_nested(rank, size):
    _, model, _ = nested(dpfuse.DataParallel, dpfuse.DistributedDataParallel, "whole")
    return said_of(lambda: model(torch.ones(3, 4)).sum().backward())
