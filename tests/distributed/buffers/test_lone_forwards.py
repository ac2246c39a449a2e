"""Forwards that one rank runs alone, in eval mode, or again after they raised: no rank waits for a lone collective."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.buffers.test_after_backward import of_rank_0, state_of

WAYS = {
    "paddle": lambda net: dpfuse.DataParallel(net),
    "paddle with buffers": lambda net: dpfuse.DataParallel(net, broadcast_buffers=True),
    "torch": lambda net: dpfuse.DistributedDataParallel(net),
    "torch, unused": lambda net: dpfuse.DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=1e-5),
    "torch, static": lambda net: dpfuse.DistributedDataParallel(net, static_graph=True),
}


class Net(nn.Module):
    """Batch norm, and a buffer whose value a forward in training mode uses and changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x, fails=False):
        if fails:
            raise RuntimeError("out of memory, as planted")
        centered = x - self.center
        if self.training:
            self.center.lerp_(x.detach().mean(0), 0.1)
        return self.layers(centered)


def batch(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def evaluate(model):
    model(batch(5, 5)).mean().item()


def evaluate_without_gradients(model):
    with torch.no_grad():
        model(batch(5, 5))


def take_the_gradient_of_an_input(model):
    x = batch(5, 5).requires_grad_()
    torch.autograd.grad(model(x).sum(), [x])


def fail(model):
    with contextlib.suppress(RuntimeError):
        model(batch(5, 5), fails=True)


LONE = [evaluate, evaluate_without_gradients, take_the_gradient_of_an_input, fail]


def trained(rank, way, lone=None, places=()):
    """Windows of three backwards; `lone` runs on rank 0 before these of them, in eval mode."""
    torch.manual_seed(0)
    model = WAYS[way](Net())
    found = []
    for number in range(9):
        if lone is not None and rank == 0 and number in places:
            model.eval()
            lone(model)
            model.train()
        inside = number % 3 < 2
        with model.no_sync() if inside else contextlib.nullcontext():
            model(batch(rank, number)).square().sum().backward()
        if not inside:
            found += [param.grad.clone() for param in model.module.parameters()]
            found += [buffer.clone() for buffer in model.module.buffers()]
            model.zero_grad()
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_in_eval_mode_on_one_rank_changes_nothing(rank, size, way):
    expected = trained(rank, way)
    for lone in LONE:
        got = trained(rank, way, lone, places=range(9))
        assert all(map(torch.equal, got, expected)), lone
    for place in range(4):
        got = trained(rank, way, evaluate, places=[place])
        assert all(map(torch.equal, got, expected)), place


@pytest.mark.parametrize("way", WAYS)
def test_backwards_of_a_model_in_eval_mode_are_averaged(rank, size, way):
    """Training with fixed statistics: a forward inside no_sync() is local, and one outside synchronises."""
    torch.manual_seed(0)
    model = WAYS[way](Net())
    bias = model.module.layers[2].bias
    model(batch(rank, 0)).sum().backward()
    for train in (False, True):  # whether a forward in training mode has begun the window
        model.train(train)
        model.zero_grad()
        with model.no_sync():
            (model(batch(rank, 1)).sum() * (rank + 1)).backward()
        assert bias.grad.item() == 4 * (rank + 1)
        model.eval()
        output = model(batch(rank, 2)).sum() * (rank + 1)
        with model.no_sync():
            output.backward()
        assert bias.grad.item() == 8 * 1.5
    model.train()
    model(batch(rank, 3)).sum().backward()
    if way != "paddle":
        assert torch.equal(state_of(model), of_rank_0(state_of(model)))


@pytest.mark.parametrize("way", ["torch, unused"])
def test_a_forward_that_raised_and_is_run_again_sends_nothing_twice(rank, size, way):
    torch.manual_seed(0)
    model = WAYS[way](Net())
    for step in range(6):  # the first forward and the second ones of a window send buffers
        model.zero_grad()
        for micro in range(1 + step % 2):
            if rank == step % 2:
                with contextlib.suppress(RuntimeError):
                    model(batch(rank, step), fails=True)
            if micro < step % 2:
                first = model(batch(rank, step))
            else:
                loss = model(batch(rank, step)).sum() + (first.sum() if step % 2 else 0)
        loss.backward()
        assert torch.equal(state_of(model), of_rank_0(state_of(model)))
