"""Gradients of gradients: what is averaged, and what a gradient's own graph is."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DataParallel, DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(rank, step):
    torch.manual_seed(10 * step + rank)
    return torch.randn(5, 3, dtype=torch.float64)


def gradient_penalty(model, x):
    x = x.clone().requires_grad_(True)
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().sum() + (slope.norm(dim=1) - 1).square().sum()).backward()


def penalty_of_parameters(model, x):
    slopes = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()


def with_graph(model, x):
    model(x).square().sum().backward(create_graph=True)


def two_forwards_then_two_backwards(model, x):
    first, second = model(x), model(2 * x)
    first.sum().backward()
    second.square().sum().backward()


def same_graph_twice(model, x):
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


STEPS = [gradient_penalty, penalty_of_parameters, with_graph, two_forwards_then_two_backwards, same_graph_twice]
TORCHS = [gradient_penalty, penalty_of_parameters]  # those that its class gets right


def averaged(rank, size, step, face, views):
    model = face(built(), gradient_as_bucket_view=views)
    theirs = TorchDDP(built(), gradient_as_bucket_view=views) if step in TORCHS else None
    for number in range(3):
        x = batch(rank, number)
        bare = copy.deepcopy(model.module)
        for net in (model, bare):
            net.zero_grad()
            step(net, x)
        if theirs is not None:
            theirs.zero_grad()
            step(theirs, x)
        for index, (param, local) in enumerate(zip(model.module.parameters(), bare.parameters(), strict=True)):
            mean = local.grad.detach() / size
            dist.all_reduce(mean)
            torch.testing.assert_close(param.grad.detach(), mean)
            if theirs is not None and size == 2:
                assert torch.equal(param.grad, list(theirs.parameters())[index].grad)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("face", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("step", STEPS)
def test_the_gradients_are_the_mean(ranks, step, face, views):
    ranks(averaged, step, face, views)


def test_three_ranks(ranks):
    ranks(averaged, gradient_penalty, DataParallel, True, size=3)


@pytest.mark.parametrize("size", [2, 3])
def test_the_derivative_of_the_mean_gradient_is_that_of_one_process_on_all_data(rank, size):
    """Private gradients have the mean's value and the local gradient's graph, which the next backward averages."""
    model = DistributedDataParallel(built())
    alone = built()
    for number in range(2):
        model.zero_grad()
        model(batch(rank, number)).square().sum().backward(create_graph=True)
        grads = [param.grad for param in model.parameters()]
        model.zero_grad()
        sum(grad.square().sum() for grad in grads).backward()

        loss = sum(alone(batch(other, number)).square().sum() for other in range(size)) / size
        grads = torch.autograd.grad(loss, list(alone.parameters()), create_graph=True)
        expected = torch.autograd.grad(sum(grad.square().sum() for grad in grads), list(alone.parameters()))
        for param, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad)


def test_a_gradient_that_is_a_view_of_a_bucket_has_no_graph(rank, size):
    model = DataParallel(built())
    for number in range(3):
        model.zero_grad()
        model(batch(rank, number)).square().sum().backward(create_graph=True)
        assert not any(param.grad.requires_grad for param in model.parameters())
